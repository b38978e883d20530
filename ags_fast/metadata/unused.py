"""Which keys of a table its metadata do not need."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ags_fast.errors import AgsError
from ags_fast.keys import iceberg as keys_of
from ags_fast.keys.iceberg import EncryptedKey, read_encryption_keys
from ags_fast.seals.seal import seal_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["named_keys", "unused_keys"]


def named_keys(raw: Mapping[str, Any]) -> set[str]:
    """Return the ids of the keys that snapshots and statistics name."""
    named = (*(raw.get("snapshots") or ()), *(raw.get("statistics") or ()))
    return {key_id for one in named if (key_id := one.get("key-id")) is not None}


def unused_keys(raw: Mapping[str, Any], *, gone: Collection[str | None] = ()) -> list[EncryptedKey]:
    """Return the keys that no snapshot needs: keys of manifest lists that are gone, and KEKs that wrap nothing else.

    If a snapshot has lost its ``key-id``, any key of a manifest list may be that snapshot's, so only keys that were
    another's are unused. A snapshot in plaintext looks the same. `gone` has the ``key-id`` of each snapshot that has
    just been removed from the metadata.
    """
    keys, named = read_encryption_keys(raw.get("encryption-keys") or ()), named_keys(raw)
    known = {key.key_id for key in keys}
    lost = any(one.get("key-id") not in known for one in raw.get("snapshots") or ())
    spare = [key.key_id for key in keys if lost and not key.is_kek and key.key_id not in gone]
    sealing = None
    with suppress(AgsError):
        sealing = seal.kek if (seal := seal_of(raw)) else None
    return [key for key in keys_of.unused_keys(keys, named, spare=spare) if key.key_id != sealing]
