"""Client-side encryption of lakehouse files, at the speed of memory.

All but errors is imported when it is first asked for, so that the command can decide what Ctrl-C does before anything
else.
"""

from __future__ import annotations

from ags_fast import errors as _errors
from ags_fast._lazy import lazy as _lazy
from ags_fast.errors import *  # noqa: F403 (each is a name of this package, and imports nothing)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ags_fast._core import crypto, openssl_version
    from ags_fast._version import __version__
    from ags_fast.ags1 import AgsCodec, encrypted_length, plaintext_length
    from ags_fast.dataset.dataset import Dataset
    from ags_fast.opening import open
    from ags_fast.profiles import profile
    from ags_fast.stream import AgsReader, AgsWriter

__all__ = ["AgsCodec", "AgsReader", "AgsWriter", "Dataset", "__version__", "crypto", "encrypted_length", "open"]
__all__ += ["openssl_version", "plaintext_length", "profile"]
__all__ += _errors.__all__

_HOMES = {
    "_core": ("crypto", "openssl_version"),
    "_version": ("__version__",),
    "ags1": ("AgsCodec", "encrypted_length", "plaintext_length"),
    "dataset.dataset": ("Dataset",),
    "opening": ("open",),
    "profiles": ("profile",),
    "stream": ("AgsReader", "AgsWriter"),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _HOMES)
