"""Keys: what brings a file's data key, the envelopes that data keys travel in, and where their keys live.

All but `StandardKeyMetadata` is imported when it is first asked for: a reader with its key at hand needs none of it.
"""

from __future__ import annotations

from ags_fast._lazy import lazy as _lazy
from ags_fast.keys.metadata import StandardKeyMetadata

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ags_fast.keys.cache import clear_cache
    from ags_fast.keys.entry import KeyEntry
    from ags_fast.keys.envelope import Envelope, binding
    from ags_fast.keys.iceberg import (
        EncryptedKey,
        add_manifest_list_key,
        manifest_list_key,
        read_encryption_keys,
        rewrap_keks,
        rotate_keks,
        unused_keys,
        write_encryption_keys,
    )
    from ags_fast.keys.kek import new_kek
    from ags_fast.keys.kms import Kms, KmsClient, kms_calls, load_kms, set_audit_hook
    from ags_fast.keys.stores import FolderKeyStore, KeyResolver, KeyStore, MemoryKeyStore, open_key_store
    from ags_fast.keys.stores.sql import SqlKeyStore

__all__ = ["EncryptedKey", "Envelope", "FolderKeyStore", "KeyEntry", "KeyResolver", "KeyStore", "Kms", "KmsClient"]
__all__ += ["MemoryKeyStore", "SqlKeyStore", "StandardKeyMetadata", "add_manifest_list_key", "binding", "clear_cache"]
__all__ += ["kms_calls", "load_kms", "manifest_list_key", "new_kek", "open_key_store", "read_encryption_keys"]
__all__ += ["rewrap_keks", "rotate_keks", "set_audit_hook", "unused_keys", "write_encryption_keys"]

_HOMES = {
    "cache": ("clear_cache",),
    "entry": ("KeyEntry",),
    "envelope": ("Envelope", "binding"),
    "iceberg": (
        "EncryptedKey",
        "add_manifest_list_key",
        "manifest_list_key",
        "read_encryption_keys",
        "rewrap_keks",
        "rotate_keks",
        "unused_keys",
        "write_encryption_keys",
    ),
    "kek": ("new_kek",),
    "kms": ("Kms", "KmsClient", "kms_calls", "load_kms", "set_audit_hook"),
    "stores": ("FolderKeyStore", "KeyResolver", "KeyStore", "MemoryKeyStore", "open_key_store"),
    "stores.sql": ("SqlKeyStore",),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _HOMES)
