"""Where KEKs live: the mutable medium beside data that never changes. Entries are wrapped, so stores keep no secret."""

from __future__ import annotations

from ags_fast.keys.stores.base import Change, Entries, KeyResolver
from ags_fast.keys.stores.documents import claimed_keys
from ags_fast.keys.stores.factory import open_key_store
from ags_fast.keys.stores.folder import DatasetKeyStore
from ags_fast.keys.stores.memory import MemoryKeyStore
from ags_fast.keys.stores.restore import Earlier

__all__ = [
    "Change",
    "DatasetKeyStore",
    "Earlier",
    "Entries",
    "KeyResolver",
    "MemoryKeyStore",
    "claimed_keys",
    "open_key_store",
]
