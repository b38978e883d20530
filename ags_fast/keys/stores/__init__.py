"""Key stores: where the wrapped KEKs of a dataset are, if they are not in its log."""

from ags_fast.keys.stores.base import KeyResolver, KeyStore, job_of_row
from ags_fast.keys.stores.factory import open_key_store
from ags_fast.keys.stores.folder import FolderKeyStore
from ags_fast.keys.stores.memory import MemoryKeyStore
from ags_fast.keys.stores.wraps import Wraps, in_log, rows_of

__all__ = [
    "FolderKeyStore",
    "KeyResolver",
    "KeyStore",
    "MemoryKeyStore",
    "Wraps",
    "in_log",
    "job_of_row",
    "open_key_store",
    "rows_of",
]
