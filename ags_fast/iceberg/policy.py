"""What an encrypted table must not be told: settings that would lose its keys, or send a client somewhere else."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast._types import OrAllow, check_choice
from ags_fast.errors import PolicyError
from ags_fast.iceberg.container import codec_of
from ags_fast.iceberg.properties import SERVER, check_code, is_inspected, is_shown
from ags_fast.keys.kms.names import TABLE, check_names
from ags_fast.seals.state import PROPERTY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ags_fast.keys.kms import KmsClient

__all__ = ["KEY_ID", "KEY_LENGTH", "PLAINTEXT_FILES", "PLAINTEXT_SNAPSHOTS", "PLAINTEXT_TABLES", "Plaintext"]
__all__ += ["check_change", "check_given", "check_key_id", "check_master", "check_raw", "check_settings"]
__all__ += ["from_before", "is_encrypted", "plaintext_setting"]

KEY_ID, KEY_LENGTH = "encryption.key-id", "encryption.data-key-length"
# A setting of the client, never of a table: nothing authenticates metadata, so metadata cannot permit plaintext.
PLAINTEXT_FILES = "encryption.plaintext-files"
PLAINTEXT_TABLES = "encryption.plaintext-tables"
# A table's property: the ids of the snapshots from before the table was encrypted. It goes with the last of them.
PLAINTEXT_SNAPSHOTS = "encryption.plaintext-snapshots"
LENGTHS = ("16", "24", "32")
NEWEST = 3  # version of the table format that is read
FORMATS = ("write.format.default", "write.delete.format.default")

# Settings of a client, beside those that a server may send.
CLIENTS = (
    *("ags_fast.", "azure.", "kms-", "kms.", "vault.", "encryption.kms-"),
    *("encryption.allowed-key-ids", PLAINTEXT_FILES, PLAINTEXT_TABLES),
)
NEW_TYPES = ("timestamp_ns", "timestamptz_ns", "unknown", "variant", "geometry", "geography")


class Plaintext(NamedTuple):
    """What a client's own configuration says of plaintext.

    Attributes:
        files: Whether files in plaintext of encrypted tables are read: "allow" or "refuse".
        tables: What is done with tables in plaintext: "refuse", "read" or "write".
    """

    files: str = "refuse"
    tables: str = "write"


def is_encrypted(raw: Mapping[str, Any]) -> bool:
    """Tell whether table metadata are those of an encrypted table: they name a master key."""
    return KEY_ID in (raw.get("properties") or {})


def check_settings(properties: Iterable[str], what: str) -> None:
    """Refuse a table's properties that would choose code, the KMS, or where requests go. PolicyError.

    what: whose they are, for the error.
    """
    names = [] if is_inspected.get() else list(properties)
    check_code(names, what)
    for name in names:
        if name.lower().startswith(CLIENTS) or is_shown(name.lower(), SERVER):
            raise PolicyError(
                f"{what} names {name}, a client's setting: whoever writes the table would configure the client. "
                "Remove the property; set it in your own configuration"
            )


def check_given(given: Mapping[str, str], has: Mapping[str, str]) -> None:
    """Refuse properties that a table is given. Those that it `has` are never checked: other engines may have set them.

    Raises:
        PolicyError: One belongs to a client's configuration, or is a key's length, without a key.
        ValueError: One is mistyped: the table would be less protected than its owner wants, or nobody could write it.
    """
    check_settings(given, "the change")
    if PROPERTY in given:
        raise PolicyError(f"{PROPERTY} is not set or removed as a property: commits seal what they make of a seal")
    check_names(given, TABLE, "an Iceberg table")
    codec_of(given)
    if KEY_LENGTH in given and KEY_ID not in {**has, **given}:
        raise PolicyError(f"{KEY_LENGTH} without {KEY_ID}: the table would be in plaintext. Name its master key, too")


def plaintext_setting(properties: Mapping[str, Any], *, encrypts: bool) -> Plaintext:
    """Return what a client's own configuration says of plaintext. ValueError if it says something else.

    encrypts: the client has a KMS, so tables in plaintext are refused if the configuration says nothing.
    """
    files = properties.get(PLAINTEXT_FILES, "refuse")
    tables = properties.get(PLAINTEXT_TABLES, "refuse" if encrypts else "write")
    check_choice(PLAINTEXT_FILES, files, OrAllow)
    check_choice(PLAINTEXT_TABLES, tables, None, "refuse", "read", "write")
    return Plaintext(files, tables)


def from_before(raw: Mapping[str, Any]) -> set[int]:
    """Return the ids of the snapshots that metadata name as those from before the encryption. Nothing proves that.

    The newest snapshot of ``main`` is none of them: `encrypt` makes a new one.
    """
    listed = ((raw.get("properties") or {}).get(PLAINTEXT_SNAPSHOTS) or "").split(",")
    main = (raw.get("refs") or {}).get("main") or {}
    heads = (raw.get("current-snapshot-id"), main.get("snapshot-id"))
    ids = {one.get("snapshot-id") for one in raw.get("snapshots") or () if not one.get("key-id")}
    return {one for one in ids if str(one) in listed and one not in heads}


def check_raw(raw: Mapping[str, Any], location: str, plaintext: Plaintext) -> None:
    """Refuse table metadata that cannot be right, or that would configure this client.

    Raises:
        PolicyError: The properties name a client's setting, a key length that AES does not have, or a master key in a
            version that has no encryption; or there are keys without a master key; or a snapshot has no key, and is
            not one from before the encryption; or the table is in plaintext, and the client refuses such tables.
    """
    properties, version = raw.get("properties") or {}, raw["format-version"]
    if version > NEWEST:
        raise PolicyError(
            f"{location} is of format version {version}, and ags_fast reads tables up to version {NEWEST}. Iceberg "
            f"takes no table back to an older version: have Java write its rows to a new one, by CREATE TABLE ... "
            f"TBLPROPERTIES ('format-version'='{NEWEST}') AS SELECT"
        )
    if not is_encrypted(raw):
        check_code(properties, location)
        if raw.get("encryption-keys"):
            raise PolicyError(
                f"{location} has encryption-keys, but its properties have no {KEY_ID}: somebody removed the property"
            )
        if plaintext.tables == "refuse":
            raise PolicyError(
                f"the table of {location} is in plaintext: either the table was never encrypted, or somebody put "
                f"plaintext in its place. {PLAINTEXT_TABLES}=read in your own configuration, as a property of "
                "load_catalog or open_table, lets such tables be read, and =write written"
            )
        return
    check_settings((name for name in properties if name != PLAINTEXT_FILES), location)
    _check_length(properties, location)
    if version != NEWEST:
        raise PolicyError(f"{location} has {KEY_ID} in format version {version}: only version 3 has encryption")
    named = properties.get(PLAINTEXT_SNAPSHOTS)
    for snapshot in raw.get("snapshots") or ():
        if snapshot.get("key-id"):
            continue
        what = f"snapshot {snapshot.get('snapshot-id')} in {location} has no key-id: its manifest list is in plaintext"
        if named is None and plaintext.files != "allow":
            raise PolicyError(f"{what}. With {PLAINTEXT_FILES}=allow in your own configuration it can be read")
        if named is not None and str(snapshot.get("snapshot-id")) not in named.split(","):
            raise PolicyError(f"{what}, and {PLAINTEXT_SNAPSHOTS} does not name it: it is younger than the encryption")


def check_change(base: Mapping[str, Any] | None, properties: Mapping[str, str], writing: Mapping[str, Any]) -> None:
    """Refuse a change of a table's metadata: of `base`, None for a new table, to `writing`.

    `properties` are all the table will have. Of `writing` only the types of the current schema count.

    Raises:
        PolicyError: The change sets, changes or removes the master key, names a client's setting, asks for ORC, or has
            a type that PyIceberg does not write.
    """
    before = (base or {}).get("properties") or {}
    check_settings((name for name in properties if name != PLAINTEXT_FILES or name not in before), "the change")
    _check_length(properties, "the change")
    if base is not None:
        check_key_id(before, properties)
    for name in FORMATS:
        if properties.get(name, "").lower() == "orc" and properties[name] != before.get(name):
            raise PolicyError(f"the change sets {name}={properties[name]}: ORC has no encryption that Iceberg uses")
    current = writing.get("current-schema-id")
    for schema in writing.get("schemas") or ():
        if schema.get("schema-id") == current and (found := _new_type(schema)) is not None:
            raise PolicyError(f"the column type {found} is read, but not written: PyIceberg writes version 2's types")


def check_key_id(old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """Refuse a change of properties that sets, changes or removes the master key. PolicyError."""
    if old.get(KEY_ID) != new.get(KEY_ID):
        raise PolicyError(
            f"{KEY_ID} is not set, changed or removed as a property: use ags_fast.iceberg.encrypt for a table in "
            "plaintext, and ags_fast.iceberg.rotate for another master key"
        )


def check_master(kms: KmsClient, key_id: str) -> None:
    """Have the KMS wrap a probe, for a table that has no KEK yet. KeyAccessError if it does not know the master key."""
    kms.wrap_key(secrets.token_bytes(16), key_id)


def _check_length(properties: Mapping[str, str], what: str) -> None:
    length = properties.get(KEY_LENGTH, "16")
    if length not in LENGTHS:
        raise PolicyError(f"{what} has {KEY_LENGTH}={length}: an AES key has 16, 24 or 32 bytes")


def _new_type(value: Any) -> str | None:
    """Return a type of version 3 that a schema has, or None."""
    if isinstance(value, str):
        return next((name for name in NEW_TYPES if value == name or value.startswith(name + "(")), None)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict) and "fields" not in value:  # names and documentation may say anything
        parts = [value.get(name) for name in ("type", "element", "key", "value")]
    elif isinstance(value, dict):
        parts = value["fields"]
    return next((found for part in parts if part is not None and (found := _new_type(part)) is not None), None)
