"""Iceberg's keys: the list ``encryption-keys`` in the metadata of a v3 table, as Java and Rust read and write it.

It has entries of two kinds. A KEK has the property ``KEY_TIMESTAMP`` and is wrapped by the master key that
``encrypted-by-id`` names: the table's property ``encryption.key-id``. The key of a manifest list, one for each
snapshot, is wrapped by the KEK that it names, in the layout of an `Envelope` whose binding is the KEK's timestamp.

All functions are pure: they make a new list, which the caller commits with the table's metadata. Entries keep their
places, their ids, and what is not known here of them, so that unchanged ones are written as they were, byte for byte:
``json.dumps(..., separators=(",", ":"), ensure_ascii=False)`` is what Java and Rust write.
"""

from __future__ import annotations

import base64
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ags_fast.errors import FormatError, IntegrityError, KeyAccessError
from ags_fast.keys.encoding import unbase64
from ags_fast.keys.entry import KEY_TIMESTAMP, LATEST_MS, KeyEntry, with_version
from ags_fast.keys.envelope import Envelope
from ags_fast.keys.kek import new_kek
from ags_fast.keys.kms import aes_key, as_kms, check_key_id, shared_client
from ags_fast.keys.metadata import StandardKeyMetadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ags_fast.keys.kms import KmsClient

__all__ = [
    "EncryptedKey",
    "add_manifest_list_key",
    "manifest_list_key",
    "read_encryption_keys",
    "rewrap_keks",
    "rotate_keks",
    "write_encryption_keys",
]

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
        """FormatError for what no entry is. One without ``encrypted-by-id`` is none: Java could not read the table."""
        if not isinstance(value, Mapping):
            raise FormatError(f"an entry of encryption-keys is a JSON object, not {type(value).__name__}")
        properties = value.get("properties") or {}
        try:
            key_id, by_id = check_key_id(value["key-id"]), check_key_id(value["encrypted-by-id"])
            metadata = unbase64(value["encrypted-key-metadata"])
            if not metadata or not all(isinstance(text, str) for pair in properties.items() for text in pair):
                raise ValueError("no bytes, or properties that are no text")
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
        """A KEK in double wrap: the table's format has no other. ValueError if it is another."""
        if entry.wrapped is None:
            raise ValueError("single wrap cannot be told to Iceberg: Java would take each wrapped key for a KEK")
        properties = {KEY_TIMESTAMP: str(entry.created_ms), **with_version(entry.properties, None)}
        for name, value, usual in ((STATE, entry.state, "active"), (USES, str(entry.uses), "0")):
            properties.pop(name, None)
            if value != usual:
                properties[name] = value
        return cls(entry.key_id, entry.wrapped, entry.wrapping_key_id, _as_in_java(properties), dict(entry.more))

    def entry(self) -> KeyEntry:
        """The KEK, as key stores and envelopes have it. The properties with the prefix ``ags.`` become its fields."""
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
    """The entries of the parsed JSON list. FormatError if it is none, or has two of one id."""
    if not isinstance(value, list | tuple):
        raise FormatError(f"encryption-keys is a JSON list, not {type(value).__name__}")
    keys = [EncryptedKey.from_json(item) for item in value]
    _named(keys)
    return keys


def write_encryption_keys(keys: Iterable[EncryptedKey]) -> list[dict[str, Any]]:
    """The inverse of `read_encryption_keys`."""
    return [key.to_json() for key in _named(keys).values()]


def manifest_list_key(
    keys: Iterable[EncryptedKey], key_id: str, kms: KmsClient | Mapping[str, str]
) -> StandardKeyMetadata:
    """What opens the manifest list of the snapshot whose ``key-id`` this is. One KMS call for a KEK, then none.

    KeyAccessError if it, or its KEK, is not there. IntegrityError if it was changed, or its KEK's timestamp was.
    """
    named = _named(keys)
    key = named.get(key_id)
    if key is None:
        raise KeyAccessError(f"the table has no key {key_id!r}: its snapshot was expired, or never was there")
    if key.is_kek:
        raise FormatError(f"{key_id!r} is a key encryption key, not the key of a manifest list")
    return StandardKeyMetadata.decode(_unwrapped(named, key.encrypted_by_id, [key], _client(kms))[0])


def add_manifest_list_key(
    keys: Iterable[EncryptedKey],
    metadata: StandardKeyMetadata,
    kms: KmsClient | Mapping[str, str],
    wrapping_key_id: str,
    *,
    length: int = 32,
    now: int | None = None,
) -> tuple[list[EncryptedKey], str]:
    """The list with the key of one more manifest list, and that key's id, for the snapshot.

    It is wrapped by the newest active KEK under the master key `wrapping_key_id`. If none is younger than 730 days, a
    new one of `length` bytes is made. Java wants `metadata` to say the ``file_length``. now: milliseconds since the
    epoch.
    """
    keys, client = list(_named(keys).values()), _client(kms)
    now = _now_ms() if now is None else now
    wrapping = [
        key
        for key in keys
        if key.is_kek
        and key.encrypted_by_id == wrapping_key_id
        and now - key.created_ms < LIFESPAN_MS
        and key.entry().state == "active"
    ]
    if wrapping:
        kek = max(wrapping, key=lambda key: key.created_ms)
    else:
        kek = EncryptedKey.of(new_kek(client, wrapping_key_id, length=length, now=now).replace(key_id=_new_id()))
        keys.append(kek)
    wrapped = _wrapped(kek, [metadata.encode()], client)[0]
    keys.append(EncryptedKey(_new_id(), wrapped, kek.key_id))
    return keys, keys[-1].key_id


def rotate_keks(
    keys: Iterable[EncryptedKey],
    kms: KmsClient | Mapping[str, str],
    wrapping_key_id: str,
    *,
    keep_old: bool = True,
    length: int = 32,
    now: int | None = None,
) -> list[EncryptedKey]:
    """Every key of a manifest list, wrapped by a new KEK of `length` bytes under the master key `wrapping_key_id`.

    Ids stay, so no snapshot changes. One wrap in the KMS, and at most one unwrap for each old KEK that wraps anything.
    The new KEK comes first, and is the one that Java's writers, too, take from now on. Old ones stay for writers that
    have begun, or go at once (`keep_old=False`): then keys that such writers add cannot be opened by anybody.
    """
    named, client = _named(keys), _client(kms)
    old = [key for key in named.values() if key.is_kek]
    # The newest one is what Rust's writers take.
    made = max([_now_ms() if now is None else now, *(key.created_ms + 1 for key in old)])
    entry = new_kek(client, wrapping_key_id, length=length, now=made)
    kek = EncryptedKey.of(entry.replace(key_id=_new_id(first_of=len(named) + 1)))
    by_kek: dict[str, list[EncryptedKey]] = {}
    for key in named.values():
        if not key.is_kek:
            by_kek.setdefault(key.encrypted_by_id, []).append(key)
    moved = {}
    for kek_id, group in by_kek.items():
        wrapped = _wrapped(kek, _unwrapped(named, kek_id, group, client), client)
        for key, metadata in zip(group, wrapped, strict=True):
            moved[key.key_id] = replace(key, encrypted_key_metadata=metadata, encrypted_by_id=kek.key_id)
    return [kek, *(moved.get(key.key_id, key) for key in named.values() if keep_old or not key.is_kek)]


def rewrap_keks(
    keys: Iterable[EncryptedKey],
    kms: KmsClient | Mapping[str, str],
    *,
    new_kms: KmsClient | Mapping[str, str] | None = None,
    new_wrapping_key_id: str | None = None,
) -> list[EncryptedKey]:
    """Every KEK, wrapped by the current version of its master key; or by another master key, or in another KMS.

    Ids and timestamps stay, and nothing else changes. For each KEK one rewrap where the KMS can, else an unwrap and a
    wrap; none for those that the current version has wrapped, where the KMS tells.

    Java unwraps all KEKs by the master key that the table's property ``encryption.key-id`` names: with
    `new_wrapping_key_id`, change that in the same commit.
    """
    client = _client(kms)
    target = client if new_kms is None else _client(new_kms)
    current: dict[str, str | None] = {}
    result = []
    for key in _named(keys).values():
        if key.is_kek:
            key.created_ms  # noqa: B018  # FormatError, before it is too late
            old, new = key.encrypted_by_id, new_wrapping_key_id or key.encrypted_by_id
            if new_kms is not None or new != old:
                kek = aes_key(client.unwrap_key(key.encrypted_key_metadata, old), key.key_id)
                wrapped = target.wrap_key(kek, new)
            else:
                version = client.key_version(key.encrypted_key_metadata)
                if version is not None and old not in current:
                    current[old] = client.current_version(old)
                if version is not None and version == current[old]:
                    wrapped = key.encrypted_key_metadata
                else:
                    wrapped = client.rewrap_key(key.encrypted_key_metadata, old)
            key = replace(key, encrypted_key_metadata=wrapped, encrypted_by_id=new)
        result.append(key)
    return result


def _named(keys: Iterable[EncryptedKey]) -> dict[str, EncryptedKey]:
    keys = list(keys)
    named = {key.key_id: key for key in keys}
    if len(named) != len(keys):
        raise FormatError("encryption-keys has two entries of one id")
    return named


def _client(kms: KmsClient | Mapping[str, str]) -> KmsClient:
    return shared_client(kms) if isinstance(kms, Mapping) else as_kms(kms)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _envelope(kek: EncryptedKey, client: KmsClient) -> tuple[Envelope, bytes]:
    """An envelope with the KEK, and the binding of all that it wraps."""
    entry = kek.entry()
    return Envelope(client, {entry.key_id: entry}), entry.properties[KEY_TIMESTAMP].encode()


def _wrapped(kek: EncryptedKey, metadata: Iterable[bytes], client: KmsClient) -> list[bytes]:
    envelope, bound = _envelope(kek, client)
    return envelope.wrap_many(kek.key_id, ((one, bound) for one in metadata))


def _unwrapped(
    named: Mapping[str, EncryptedKey], kek_id: str, group: Sequence[EncryptedKey], client: KmsClient
) -> list[bytes]:
    """What the KEK has wrapped."""
    kek = named.get(kek_id)
    if kek is None:
        raise KeyAccessError(f"the key {group[0].key_id!r} is wrapped by {kek_id!r}, which the table does not have")
    kek.created_ms  # noqa: B018  # FormatError if it is none
    envelope, bound = _envelope(kek, client)
    try:
        return envelope.unwrap_many(kek_id, [(key.encrypted_key_metadata, bound) for key in group])
    except IntegrityError as error:
        raise IntegrityError(
            f"a key of a manifest list does not open, or {KEY_TIMESTAMP} was changed: {error}"
        ) from None


def _new_id(first_of: int = 0) -> str:
    """16 random bytes in base64, as Java makes ids.

    first_of: of so many keys, and of twice as many, Java's HashMap has it in its first bucket. Its writers take the
    first KEK that they come upon there, and would go on with an old one.
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
    """What Java's HashMap makes of a String: its hashCode, with the upper half on top of the lower."""
    units = text.encode("utf-16-le", "surrogatepass")
    code = 0
    for i in range(0, len(units), 2):
        code = 31 * code + units[i] + (units[i + 1] << 8) & 0xFFFFFFFF
    return code ^ code >> 16


def _as_in_java(properties: Mapping[str, str]) -> dict[str, str]:
    """The properties in the order in which Java's HashMap has them.

    Java writes them so, and compares a hash of the metadata (of a Hive table) with that of what it would write.
    """
    mask = (1 << (int(len(properties) / 0.75 + 1) - 1).bit_length()) - 1
    return dict(sorted(properties.items(), key=lambda item: _java_hash(item[0]) & mask))
