"""Client-side encryption of lakehouse files, at the speed of memory.

Names are imported when they are first asked for, so that the command can decide what Ctrl-C does before anything else.
"""

from __future__ import annotations

from ags_fast._lazy import attribute as _attribute

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ags_fast._core import crypto, openssl_version
    from ags_fast._version import __version__
    from ags_fast.ags1 import AgsCodec, encrypted_length, plaintext_length
    from ags_fast.dataset.dataset import Dataset
    from ags_fast.errors import (
        AgsError,
        ConcurrentChangeError,
        ExpiredError,
        FormatError,
        IntegrityError,
        JobEndedError,
        KeyAccessError,
        KeyLimitError,
        PolicyError,
        UnknownKeyError,
        UnknownOutcomeError,
        UnsupportedChangeError,
    )
    from ags_fast.opening import open
    from ags_fast.profiles import profile
    from ags_fast.stream import AgsReader, AgsWriter

__all__ = [
    "AgsCodec",
    "AgsError",
    "AgsReader",
    "AgsWriter",
    "ConcurrentChangeError",
    "Dataset",
    "ExpiredError",
    "FormatError",
    "IntegrityError",
    "JobEndedError",
    "KeyAccessError",
    "KeyLimitError",
    "PolicyError",
    "UnknownKeyError",
    "UnknownOutcomeError",
    "UnsupportedChangeError",
    "__version__",
    "crypto",
    "encrypted_length",
    "open",
    "openssl_version",
    "plaintext_length",
    "profile",
]

_HOMES = {
    "_core": ("crypto", "openssl_version"),
    "_version": ("__version__",),
    "ags1": ("AgsCodec", "encrypted_length", "plaintext_length"),
    "dataset.dataset": ("Dataset",),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
    "opening": ("open",),
    "profiles": ("profile",),
    "stream": ("AgsReader", "AgsWriter"),
}


def __getattr__(name: str) -> Any:
    return _attribute(__name__, _HOMES, name)
