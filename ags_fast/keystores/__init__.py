"""Key stores: where the wrapped KEKs of a dataset are, if they are not in its log."""

from ags_fast.keystores.base import KeyResolver, KeyStore, job_of_row
from ags_fast.keystores.factory import open_key_store
from ags_fast.keystores.folder import FolderKeyStore
from ags_fast.keystores.memory import MemoryKeyStore
from ags_fast.keystores.wraps import Wraps, rows_of

__all__ = [
    "FolderKeyStore",
    "KeyResolver",
    "KeyStore",
    "MemoryKeyStore",
    "Wraps",
    "job_of_row",
    "open_key_store",
    "rows_of",
]
