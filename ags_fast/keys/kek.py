"""Calls of a KMS for a KEK: make it, wrap it again, and see that the wrap opens."""

from __future__ import annotations

import base64
import os
import secrets
import time
from typing import TYPE_CHECKING

from ags_fast._core import NONCE_NBYTES, Key
from ags_fast.ags1 import KeyBytes
from ags_fast.errors import AgsError, FormatError, IntegrityError, KeyAccessError
from ags_fast.keys.cache import cache_name, unwrapped_keks
from ags_fast.keys.entry import KEY_TIMESTAMP, KeyEntry, with_version
from ags_fast.keys.kms import Kms, KmsClient, aes_key, as_kms, check_key_id

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KEK_NBYTES", "KEY_NBYTES", "bad_wrap", "check_unwraps", "check_wrap", "new_kek", "rewrap_kek"]

KEY_NBYTES = (16, 24, 32)  # of an AES key
KEK_NBYTES = 32  # of a dataset's KEK


def new_kek(
    kms: Kms,
    wrapping_key_id: str,
    *,
    double_wrap: bool = True,
    length: int = KEK_NBYTES,
    now: int | None = None,
    properties: Mapping[str, str] | None = None,
) -> KeyEntry:
    """Make a new KEK, whose id is 16 random bytes in base64url.

    In double wrap this is one call of the KMS, and this process need not ask the KMS for the KEK again. In single wrap
    no call is made.

    Args:
        kms: A client or its properties.
        wrapping_key_id: The master key.
        double_wrap: Whether the entry holds a KEK; otherwise the KMS wraps each data key.
        length: Bytes of the KEK: 16, 24 or 32.
        now: Milliseconds since the epoch.
        properties: Properties of the entry. In double wrap, Iceberg's ``KEY_TIMESTAMP`` is added.
    """
    if length not in KEY_NBYTES:
        raise ValueError(f"an AES key has 16, 24 or 32 bytes, not {length}")
    check_key_id(wrapping_key_id)
    created_ms = time.time_ns() // 1_000_000 if now is None else now
    key_id = base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")
    if not double_wrap:
        return KeyEntry(key_id, wrapping_key_id, None, "active", created_ms, 0, dict(properties or {}))
    client = as_kms(kms)
    if client.supports_key_generation:
        key, wrapped = client.generate_key(wrapping_key_id, length)
    else:
        key = KeyBytes(secrets.token_bytes(length))
        wrapped = client.wrap_key(key, wrapping_key_id)
    given = with_version({KEY_TIMESTAMP: str(created_ms), **(properties or {})}, wrapped)
    entry = KeyEntry(key_id, wrapping_key_id, bytes(wrapped), "active", created_ms, 0, given)
    unwrapped_keks.put(cache_name(client, entry), Key(key), client.cache_seconds)
    return entry


def rewrap_kek(
    kms: KmsClient, entry: KeyEntry, new_kms: KmsClient | None = None, wrapping_key_id: str | None = None
) -> KeyEntry:
    """Wrap a KEK by the current version of its master key, by another master key, or by another KMS.

    The id and the properties stay, so everything that the KEK has wrapped still opens. Under the same master key this
    is one rewrap, if the service rewraps; otherwise an unwrap and a wrap. One more unwrap shows that the new wrap
    opens. This process need not ask the KMS again.

    Args:
        kms: The client that unwraps the KEK now.
        entry: The KEK, in double wrap.
        new_kms: The client that wraps it from now on; None is `kms`.
        wrapping_key_id: The new master key; None keeps the master key.
    """
    assert entry.wrapped is not None
    after = kms if new_kms is None else new_kms
    master = wrapping_key_id or entry.wrapping_key_id
    if after is kms and master == entry.wrapping_key_id and kms.supports_rewrap:
        wrapped = kms.rewrap_key(entry.wrapped, master)
        changed = entry.replace(wrapped=bytes(wrapped), properties=with_version(entry.properties, wrapped))
        if (held := unwrapped_keks.peek(cache_name(kms, entry))) is not None:
            unwrapped_keks.put(cache_name(kms, changed), held, kms.cache_seconds)
        check_wrap(kms, changed)
        return changed
    key = aes_key(kms.unwrap_key(entry.wrapped, entry.wrapping_key_id), entry.key_id)
    wrapped = after.wrap_key(key, master)
    given = with_version(entry.properties, wrapped)
    changed = entry.replace(wrapping_key_id=master, wrapped=bytes(wrapped), properties=given)
    unwrapped_keks.put(cache_name(after, changed), Key(key), after.cache_seconds)
    check_wrap(after, changed)
    return changed


def check_wrap(kms: KmsClient, entry: KeyEntry) -> None:
    """Have the KMS unwrap a KEK that it has just wrapped, before anything depends on it.

    This process has the KEK in its cache, so nothing else would show whether the wrap opens.

    Raises:
        KeyAccessError: The KMS does not unwrap it.
        IntegrityError: The KMS returns another key.
    """
    assert entry.wrapped is not None
    name = cache_name(kms, entry)
    held = unwrapped_keks.peek(name)
    try:
        key = kms.unwrap_key(entry.wrapped, entry.wrapping_key_id)
        if len(key) not in KEY_NBYTES:
            raise IntegrityError(f"it is not an AES key: it has {len(key)} bytes")
        found = Key(key)
        if held is not None:
            nonce = os.urandom(NONCE_NBYTES)
            found.open(nonce, held.seal(nonce, b"", b"the same key?"), b"the same key?")
        unwrapped_keks.put(name, found if held is None else held, kms.cache_seconds)
    except (FormatError, IntegrityError) as error:
        raise IntegrityError(bad_wrap(entry, error)) from None
    except KeyAccessError as error:
        raise KeyAccessError(bad_wrap(entry, error)) from None


def bad_wrap(entry: KeyEntry, error: AgsError) -> str:
    """Return the error for a wrap that does not open."""
    return (
        f"what the KMS has just wrapped under {entry.wrapping_key_id!r} for the key {entry.key_id!r} does not open "
        f"again, so it was not put to use: {error}"
    )


def check_unwraps(kms: KmsClient, entry: KeyEntry) -> None:
    """Have the KMS unwrap a KEK, whether or not this process has it in its cache.

    Args:
        kms: The client that unwraps.
        entry: The KEK, in double wrap.

    Raises:
        KeyAccessError: The KMS does not unwrap it, or returns no AES key.
    """
    assert entry.wrapped is not None
    aes_key(kms.unwrap_key(entry.wrapped, entry.wrapping_key_id), entry.key_id)
