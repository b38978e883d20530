"""Iceberg's keys: the list ``encryption-keys`` in the metadata of a v3 table, as Java and Rust read and write it.

It has entries of two kinds. A KEK has the property ``KEY_TIMESTAMP`` and is wrapped by the master key that
``encrypted-by-id`` names: the table's property ``encryption.key-id``. The key of a manifest list, one for each
snapshot, is wrapped by the KEK that it names, in the layout of an `Envelope` whose binding is the KEK's timestamp.

All functions are pure: they make a new list, which the caller commits with the table's metadata. Entries keep their
places, their ids and fields that are unknown here, so that unchanged entries are written as they were, byte for byte:
``json.dumps(..., separators=(",", ":"), ensure_ascii=False)`` is what Java and Rust write.
"""

from __future__ import annotations

import base64
import hmac
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ags_fast.errors import AgsError, FormatError, IntegrityError, KeyAccessError
from ags_fast.keys.encoding import unbase64
from ags_fast.keys.entry import KEY_TIMESTAMP, LATEST_MS, KeyEntry, with_version
from ags_fast.keys.envelope import Envelope
from ags_fast.keys.kek import KEY_NBYTES, check_wrap, new_kek, rewrap_kek
from ags_fast.keys.kms import Kms, check_key_id, shared_client
from ags_fast.keys.metadata import StandardKeyMetadata

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ags_fast.keys.kms import KmsClient

__all__ = ["EncryptedKey", "add_manifest_list_key", "manifest_list_key", "read_encryption_keys", "rewrap_keks"]
__all__ += ["rotate_keks", "sealing_secret", "unused_keys", "write_encryption_keys"]

FIELDS = ("key-id", "encrypted-key-metadata", "encrypted-by-id", "properties")
STATE, USES = "ags.state", "ags.uses"  # properties for what only a `KeyEntry` has, where it is not the default
LIFESPAN_MS = 730 * 86_400_000  # of a KEK that wraps: that of Java and Rust


@dataclass(frozen=True, slots=True)
class EncryptedKey:
    """An entry of ``encryption-keys``: a KEK, or the key of a manifest list.

    fields: its JSON as it was read, which keeps the order of the fields, and those that are not known here.
    """

    key_id: str
    encrypted_key_metadata: bytes
    encrypted_by_id: str
    properties: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def is_kek(self) -> bool:
        """Whether this is a KEK."""
        return KEY_TIMESTAMP in self.properties

    @property
    def created_ms(self) -> int:
        """Of a KEK: milliseconds since the epoch. FormatError if it does not say, as in Java and Rust."""
        text = self.properties.get(KEY_TIMESTAMP)
        if text is None or not re.fullmatch("[0-9]{1,18}", text) or int(text) > LATEST_MS:
            raise FormatError(f"the key encryption key {self.key_id!r} has no {KEY_TIMESTAMP}, or an impossible one")
        return int(text)

    @classmethod
    def from_json(cls, value: Any) -> EncryptedKey:
        """Parse an entry. FormatError if it is malformed or lacks ``encrypted-by-id``, without which Java fails."""
        if not isinstance(value, Mapping):
            raise FormatError(f"an entry of encryption-keys is a JSON object, not {type(value).__name__}")
        properties = value.get("properties") or {}
        try:
            key_id, by_id = check_key_id(value["key-id"]), check_key_id(value["encrypted-by-id"])
            metadata = unbase64(value["encrypted-key-metadata"])
            if not metadata or not all(isinstance(text, str) for pair in properties.items() for text in pair):
                raise ValueError("no bytes, or properties that are not text")
        except KeyError as error:
            raise FormatError(f"the entry {value.get('key-id')!r} of encryption-keys has no {error}") from None
        except (AttributeError, TypeError, ValueError) as error:
            raise FormatError(f"the entry {value.get('key-id')!r} of encryption-keys is impossible: {error}") from None
        return cls(key_id, metadata, by_id, dict(properties), dict(value))

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the table's metadata holds it."""
        known: dict[str, Any] = {
            "key-id": self.key_id,
            "encrypted-key-metadata": base64.b64encode(self.encrypted_key_metadata).decode(),
            "encrypted-by-id": self.encrypted_by_id,
        }
        if self.properties != (self.fields.get("properties") or {}):
            known["properties"] = dict(self.properties)
        return {**self.fields, **known} if "key-id" in self.fields else {**known, **self.fields}

    @classmethod
    def of(cls, entry: KeyEntry) -> EncryptedKey:
        """Make the entry of a KEK. ValueError in single wrap, which the table's format does not have."""
        if entry.wrapped is None:
            raise ValueError("Iceberg has no single wrap: Java would take each wrapped key for a KEK")
        properties = {KEY_TIMESTAMP: str(entry.created_ms), **with_version(entry.properties, None)}
        for name, value, usual in ((STATE, entry.state, "active"), (USES, str(entry.uses), "0")):
            properties.pop(name, None)
            if value != usual:
                properties[name] = value
        return cls(entry.key_id, entry.wrapped, entry.wrapping_key_id, _as_in_java(properties), dict(entry.more))

    def entry(self) -> KeyEntry:
        """Return the KEK as key stores and envelopes have it. Properties with the prefix ``ags.`` become its fields."""
        created_ms, properties = self.created_ms, dict(self.properties)
        state, uses = properties.pop(STATE, "active"), properties.pop(USES, "0")
        more = {name: value for name, value in self.fields.items() if name not in FIELDS}
        try:
            return KeyEntry(
                self.key_id,
                self.encrypted_by_id,
                self.encrypted_key_metadata,
                state,
                created_ms,
                int(uses),
                properties,
                more,
            )
        except ValueError as error:
            raise FormatError(f"the key encryption key {self.key_id!r} is impossible: {error}") from None


def read_encryption_keys(value: Iterable[Any]) -> list[EncryptedKey]:
    """Return the entries of the parsed JSON list. FormatError if it is malformed, or two entries have one id."""
    if not isinstance(value, list | tuple):
        raise FormatError(f"encryption-keys is a JSON list, not {type(value).__name__}")
    keys = [EncryptedKey.from_json(item) for item in value]
    _named(keys)
    return keys


def write_encryption_keys(keys: Iterable[EncryptedKey]) -> list[dict[str, Any]]:
    """Return the JSON list that `read_encryption_keys` reads."""
    return [key.to_json() for key in _named(keys).values()]


def manifest_list_key(keys: Iterable[EncryptedKey], key_id: str, kms: Kms) -> StandardKeyMetadata:
    """Return the key metadata of a manifest list. The first use of a KEK is one KMS call; later uses make none.

    Args:
        keys: The table's list.
        key_id: The snapshot's ``key-id``.
        kms: A client or its properties.

    Raises:
        KeyAccessError: The key, or its KEK, is not in the list.
        IntegrityError: The key, or the timestamp of its KEK, was changed.
    """
    named = _named(keys)
    key = named.get(key_id)
    if key is None:
        raise KeyAccessError(f"the table has no key {key_id!r}: its snapshot was expired, or never existed")
    if key.is_kek:
        raise FormatError(f"{key_id!r} is a key encryption key, not the key of a manifest list")
    return StandardKeyMetadata.decode(_unwrapped(named, key.encrypted_by_id, [key], shared_client(kms))[0])


def add_manifest_list_key(
    keys: Iterable[EncryptedKey],
    metadata: StandardKeyMetadata,
    kms: Kms,
    wrapping_key_id: str,
    *,
    length: int = 32,
    now: int | None = None,
    own: Mapping[str, bytes] | None = None,
) -> tuple[list[EncryptedKey], str]:
    """Add the key of one more manifest list.

    The key is wrapped by the newest active KEK under the master key. If no such KEK is younger than 730 days, a new one
    is made, and the KMS unwraps it once, to see that it opens.

    Args:
        keys: The table's list.
        metadata: The key. Java wants it to have the ``file_length``.
        kms: A client or its properties.
        wrapping_key_id: The master key, as the table's property ``encryption.key-id`` names it.
        length: Bytes of a new KEK: 16, 24 or 32.
        now: Milliseconds since the epoch.
        own: The KEKs that may wrap, as they are wrapped, by id; None: any. Whoever writes the list may add others.

    Returns:
        The new list, and the key's id, for the snapshot.
    """
    keys, client = list(_named(keys).values()), shared_client(kms)
    now = _now_ms() if now is None else now
    wrapping = [
        key
        for key in keys
        if key.is_kek
        and key.encrypted_by_id == wrapping_key_id
        and now - key.created_ms < LIFESPAN_MS
        and key.entry().state == "active"
        and (own is None or own.get(key.key_id) == key.encrypted_key_metadata)
    ]
    kek = max(wrapping, key=lambda key: key.created_ms, default=None)
    if kek is None:
        keys.append(kek := _new_kek(client, wrapping_key_id, length, now, _new_id()))
    wrapped = _wrapped(kek, [metadata.encode()], client)[0]
    keys.append(EncryptedKey(_new_id(), wrapped, kek.key_id))
    return keys, keys[-1].key_id


def rotate_keks(
    keys: Iterable[EncryptedKey],
    kms: Kms,
    wrapping_key_id: str,
    *,
    keep_old: bool = True,
    length: int = 32,
    now: int | None = None,
    new_kms: Kms | None = None,
    needed: Collection[str] | None = None,
) -> list[EncryptedKey]:
    """Wrap every key of a manifest list by a new KEK.

    Ids stay, so no snapshot changes. The KMS wraps once, unwraps the new KEK once, to see that it opens, and unwraps
    each old KEK that wraps anything at most once. Each new wrap is opened again and compared, before it is returned.
    The new KEK comes first, under an id that Java's writers, too, find first.

    Args:
        keys: The table's list.
        kms: The client, or its properties, that unwraps the old KEKs.
        wrapping_key_id: The master key of the new KEK.
        keep_old: Whether old KEKs stay, for writers that have begun: those that wrap anything now, and the newest.
            Otherwise the keys that such writers add cannot be opened. Old KEKs that stay move with the new one to
            another master key or KMS, since Java unwraps all KEKs by one.
        length: Bytes of the new KEK: 16, 24 or 32.
        now: Milliseconds since the epoch.
        new_kms: The client, or its properties, that wraps the KEKs from now on; None is `kms`.
        needed: Ids of the keys that snapshots name; None is all. A key that nothing names and that does not open
            stays as it is.

    Raises:
        KeyAccessError: A needed key has lost its KEK, or the KMS refuses.
        IntegrityError: A needed key, or a new wrap, does not open.
    """
    named, client = _named(keys), shared_client(kms)
    target = client if new_kms is None else shared_client(new_kms)
    old = [key for key in named.values() if key.is_kek]
    # Rust's writers take the newest one.
    made = max([_now_ms() if now is None else now, *(key.created_ms + 1 for key in old)])
    kek = _new_kek(target, wrapping_key_id, length, made, _new_id(first_of=len(named) + 1))
    groups: dict[tuple[str, bool], list[EncryptedKey]] = {}
    for key in named.values():
        if not key.is_kek:
            groups.setdefault((key.encrypted_by_id, needed is None or key.key_id in needed), []).append(key)
    moved: dict[str, EncryptedKey] = {}
    for (kek_id, is_needed), group in groups.items():
        try:
            plain = _unwrapped(named, kek_id, group, client)
        except AgsError:
            if is_needed:
                raise
            continue
        moved.update((key.key_id, key) for key in _moved(kek, group, plain, target))
    if keep_old:
        kept = {key.encrypted_by_id for key in named.values() if not key.is_kek} | _newest(old)
        staying = [key for key in old if key.key_id in kept]
        if target is not client or any(key.encrypted_by_id != wrapping_key_id for key in staying):
            holding = [*staying, *(key for key in named.values() if not key.is_kek)]
            staying = rewrap_keks(holding, client, new_kms=new_kms, new_wrapping_key_id=wrapping_key_id)
        moved.update((key.key_id, key) for key in staying if key.is_kek)
    return [kek, *(moved.get(key.key_id, key) for key in named.values() if not key.is_kek or key.key_id in moved)]


def unused_keys(
    keys: Iterable[EncryptedKey], needed: Collection[str], *, spare: Collection[str] = ()
) -> list[EncryptedKey]:
    """Return the keys of manifest lists that nothing names, and the KEKs that then wrap nothing.

    The newest active KEK is none of them: the next writer takes it.

    Args:
        keys: The table's list.
        needed: Ids of the keys that snapshots name.
        spare: Ids of keys that stay although nothing names them.
    """
    named = _named(keys)
    staying = {*needed, *spare}
    staying |= {key.encrypted_by_id for key in named.values() if not key.is_kek and key.key_id in staying}
    staying |= _newest(key for key in named.values() if key.is_kek)
    return [key for key in named.values() if key.key_id not in staying]


def rewrap_keks(
    keys: Iterable[EncryptedKey],
    kms: Kms,
    *,
    new_kms: Kms | None = None,
    new_wrapping_key_id: str | None = None,
) -> list[EncryptedKey]:
    """Wrap every KEK by the current version of its master key, by another master key, or in another KMS.

    Ids and timestamps stay, and nothing else changes. For each KEK this is one rewrap if the KMS rewraps, otherwise an
    unwrap and a wrap, and then one unwrap, which shows that the new wrap opens what the KEK has wrapped. A KEK that the
    current version has wrapped takes no call, if the KMS tells versions.

    Java unwraps all KEKs by the master key that the table's property ``encryption.key-id`` names: with
    `new_wrapping_key_id`, change that property in the same commit.

    Args:
        keys: The table's list.
        kms: The client, or its properties, that unwraps the KEKs now.
        new_kms: The client, or its properties, that wraps them from now on; None is `kms`.
        new_wrapping_key_id: The new master key; None keeps each KEK's.

    Raises:
        IntegrityError: A new wrap opens as another key, or a KEK does not open what it has wrapped.
        KeyAccessError: The KMS refuses, or does not unwrap what it has just wrapped.
    """
    client = shared_client(kms)
    target = None if new_kms is None else shared_client(new_kms)
    named = _named(keys)
    witnesses = {key.encrypted_by_id: key for key in named.values() if not key.is_kek}
    current: dict[str, str | None] = {}
    result = []
    for key in named.values():
        if key.is_kek:
            key.created_ms  # noqa: B018  # FormatError, before anything is wrapped
            old, new = key.encrypted_by_id, new_wrapping_key_id or key.encrypted_by_id
            version = client.key_version(key.encrypted_key_metadata) if target is None and new == old else None
            if version is not None and old not in current:
                current[old] = client.current_version(old)
            if version is None or version != current[old]:
                key = _rewrapped(key, witnesses.get(key.key_id), client, target, new)
        result.append(key)
    return result


def sealing_secret(keys: Iterable[EncryptedKey], kek_id: str, kms: Kms, salt: bytes) -> bytes:
    """Return what a KEK makes seals of tables with: see `Key.extract`. KeyAccessError: the KMS refuses the KEK."""
    kek = _named(keys)[kek_id]
    return _envelope(kek, shared_client(kms))[0].extract(kek_id, salt)


def _rewrapped(
    key: EncryptedKey, witness: EncryptedKey | None, client: KmsClient, target: KmsClient | None, master: str
) -> EncryptedKey:
    changed = rewrap_kek(client, key.entry(), target, master)
    assert changed.wrapped is not None
    made = replace(key, encrypted_key_metadata=changed.wrapped, encrypted_by_id=master)
    if witness is not None:
        _unwrapped({key.key_id: made}, key.key_id, [witness], target or client)
    return made


def _moved(
    kek: EncryptedKey, group: Sequence[EncryptedKey], plain: Sequence[bytes], client: KmsClient
) -> list[EncryptedKey]:
    """Return keys wrapped by a new KEK. They were opened again, and compared with `plain`."""
    wrapped = _wrapped(kek, plain, client)
    made = [
        replace(key, encrypted_key_metadata=metadata, encrypted_by_id=kek.key_id)
        for key, metadata in zip(group, wrapped, strict=True)
    ]
    found = _unwrapped({kek.key_id: kek}, kek.key_id, made, client)
    if not all(hmac.compare_digest(*pair) for pair in zip(found, plain, strict=True)):
        raise IntegrityError(
            "a key of a manifest list opens as another key under its new KEK, which was not put to use"
        )
    return made


def _newest(keks: Iterable[EncryptedKey]) -> set[str]:
    newest: dict[str, EncryptedKey] = {}
    for kek in keks:
        known = newest.get(kek.encrypted_by_id)
        if kek.entry().state == "active" and (known is None or kek.created_ms >= known.created_ms):
            newest[kek.encrypted_by_id] = kek
    return {kek.key_id for kek in newest.values()}


def _new_kek(client: KmsClient, wrapping_key_id: str, length: int, now: int, key_id: str) -> EncryptedKey:
    entry = new_kek(client, wrapping_key_id, length=length, now=now)
    check_wrap(client, entry)
    return EncryptedKey.of(entry.replace(key_id=key_id))


def _named(keys: Iterable[EncryptedKey]) -> dict[str, EncryptedKey]:
    keys = list(keys)
    named = {key.key_id: key for key in keys}
    if len(named) != len(keys):
        raise FormatError("encryption-keys has two entries of one id")
    return named


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _envelope(kek: EncryptedKey, client: KmsClient) -> tuple[Envelope, bytes]:
    entry = kek.entry()
    return Envelope(client, {entry.key_id: entry}, kek_lengths=KEY_NBYTES), entry.properties[KEY_TIMESTAMP].encode()


def _wrapped(kek: EncryptedKey, metadata: Iterable[bytes], client: KmsClient) -> list[bytes]:
    envelope, bound = _envelope(kek, client)
    return envelope.wrap_many(kek.key_id, ((one, bound) for one in metadata))


def _unwrapped(
    named: Mapping[str, EncryptedKey], kek_id: str, group: Sequence[EncryptedKey], client: KmsClient
) -> list[bytes]:
    kek = named.get(kek_id)
    if kek is None:
        raise KeyAccessError(f"the key {group[0].key_id!r} is wrapped by {kek_id!r}, which the table does not have")
    kek.created_ms  # noqa: B018  # FormatError if it is none
    envelope, bound = _envelope(kek, client)
    try:
        return envelope.unwrap_many(kek_id, [(key.encrypted_key_metadata, bound) for key in group])
    except IntegrityError as error:
        why = f"a key of a manifest list does not open, or {KEY_TIMESTAMP} was changed"
        raise IntegrityError(f"{why}: {error}") from None


def _new_id(first_of: int = 0) -> str:
    """Return a new id: 16 random bytes in base64, as Java makes ids.

    With `first_of`, Java's HashMap of that many keys, or of twice as many, has this id in its first bucket. Java's
    writers take the first KEK that they find there, and would go on with an old one.
    """
    buckets = 16
    while first_of > buckets * 3 // 4:
        buckets *= 2
    mask = 2 * buckets - 1 if first_of else 0
    while True:
        key_id = base64.b64encode(os.urandom(16)).decode()
        if _java_hash(key_id) & mask == 0:
            return key_id


def _java_hash(text: str) -> int:
    """Return the hash that Java's HashMap uses for a String: its hashCode, with the upper half XORed into the lower."""
    units = text.encode("utf-16-le", "surrogatepass")
    code = 0
    for i in range(0, len(units), 2):
        code = 31 * code + units[i] + (units[i + 1] << 8) & 0xFFFFFFFF
    return code ^ code >> 16


def _as_in_java(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties in the order of Java's HashMap.

    Java writes them in this order. For a Hive table it compares a hash of the metadata with the hash of its own.
    """
    mask = (1 << (int(len(properties) / 0.75 + 1) - 1).bit_length()) - 1
    return dict(sorted(properties.items(), key=lambda item: _java_hash(item[0]) & mask))
