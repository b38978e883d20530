"""Client-side encryption of lakehouse files, at the speed of memory."""

from ags_fast._core import libcrypto_version as openssl_version
from ags_fast._version import __version__
from ags_fast.ags1 import AgsCodec, encrypted_length, plaintext_length
from ags_fast.errors import AgsError, FormatError, IntegrityError, KeyAccessError, KeyLimitError, PolicyError
from ags_fast.stream import AgsReader, AgsWriter, open

__all__ = [
    "AgsCodec",
    "AgsError",
    "AgsReader",
    "AgsWriter",
    "FormatError",
    "IntegrityError",
    "KeyAccessError",
    "KeyLimitError",
    "PolicyError",
    "__version__",
    "encrypted_length",
    "open",
    "openssl_version",
    "plaintext_length",
]
