"""What an encrypted table must not be told: settings that would lose its keys, or send a client somewhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "KEY_ID",
    "KEY_LENGTH",
    "PLAINTEXT_FILES",
    "PLAINTEXT_SNAPSHOTS",
    "check_change",
    "check_key_id",
    "check_raw",
    "check_settings",
    "from_before",
    "is_encrypted",
    "plaintext_setting",
]

KEY_ID, KEY_LENGTH = "encryption.key-id", "encryption.data-key-length"
# A setting of the client, never of a table: nothing authenticates metadata, so metadata cannot permit plaintext.
PLAINTEXT_FILES = "encryption.plaintext-files"
# A table's property: the ids of the snapshots from before the table was encrypted. It goes with the last of them.
PLAINTEXT_SNAPSHOTS = "encryption.plaintext-snapshots"
LENGTHS = ("16", "24", "32")
FORMATS = ("write.format.default", "write.delete.format.default")

CLASSES = ("py-io-impl", "py-catalog-impl")
# PyIceberg merges a table's properties over the catalog's, so whoever writes the metadata would configure the client.
CLIENT_NAMES = {
    PLAINTEXT_FILES,
    "encryption.allowed-key-ids",
    "uri",
    "warehouse",
    "token",
    "credential",
    "catalog-impl",
    "io-impl",
    "scope",
    "audience",
    "resource",
}
CLIENT_PREFIXES = (
    "ags_fast.",
    "kms-",
    "kms.",
    "encryption.kms-",
    "vault.",
    "azure.",
    "s3.",
    "adls.",
    "gcs.",
    "hdfs.",
    "hf.",
    "client.",
    "glue.",
    "dynamodb.",
    "hive.",
    "rest.",
    "oauth2",
    "header.",
)
NEW_TYPES = ("timestamp_ns", "timestamptz_ns", "unknown", "variant", "geometry", "geography")


def is_encrypted(raw: Mapping[str, Any]) -> bool:
    """Tell whether table metadata are those of an encrypted table: they name a master key."""
    return KEY_ID in (raw.get("properties") or {})


def check_settings(properties: Iterable[str], what: str) -> None:
    """Refuse names that belong to a client's configuration.

    Args:
        properties: Names of table properties.
        what: Whose they are, for the error.

    Raises:
        PolicyError: One of them would choose the code that opens files, the KMS, or where requests go.
    """
    for name in properties:
        low = name.lower()
        if low in CLASSES:
            raise PolicyError(
                f"{what} names {name}: PyIceberg would let that class write the table, and lose every key. "
                "Remove the property; set it for the catalog in your own configuration"
            )
        if low in CLIENT_NAMES or low.startswith(CLIENT_PREFIXES):
            raise PolicyError(
                f"{what} names {name}, a client's setting: whoever writes the table would configure the client. "
                "Remove the property; set it in your own configuration"
            )


def plaintext_setting(properties: Mapping[str, Any], default: str | None = None) -> str | None:
    """Return what a client's own configuration says of plaintext.

    Returns:
        ``"allow"``: files of encrypted tables that are in plaintext are read. ``"refuse"``: tables in plaintext are
        refused, too. None: only the files are refused.

    Raises:
        ValueError: The configuration says something else.
    """
    value: str | None = properties.get(PLAINTEXT_FILES, default)
    if value not in (None, "allow", "refuse"):
        raise ValueError(f"{PLAINTEXT_FILES} must be 'allow' or 'refuse', not {value!r}")
    return value


def from_before(raw: Mapping[str, Any]) -> set[int]:
    """Return the ids of the snapshots that metadata name as those from before the encryption. Nothing proves that.

    The newest snapshot of ``main`` is none of them: `encrypt` makes a new one.
    """
    listed = ((raw.get("properties") or {}).get(PLAINTEXT_SNAPSHOTS) or "").split(",")
    main = (raw.get("refs") or {}).get("main") or {}
    heads = (raw.get("current-snapshot-id"), main.get("snapshot-id"))
    ids = {one.get("snapshot-id") for one in raw.get("snapshots") or () if not one.get("key-id")}
    return {one for one in ids if str(one) in listed and one not in heads}


def check_raw(raw: Mapping[str, Any], location: str, plaintext: str | None = None) -> None:
    """Refuse table metadata that cannot be right, or that would configure this client.

    Args:
        raw: The parsed metadata.
        location: Where they are, for the error.
        plaintext: What `plaintext_setting` returned for the client's configuration.

    Raises:
        PolicyError: The properties name a client's setting, a key length that AES does not have, or a master key in a
            version that has no encryption; or there are keys without a master key; or a snapshot has no key, and is
            not one from before the encryption; or the table is in plaintext, and the client refuses such tables.
    """
    properties = raw.get("properties") or {}
    if not is_encrypted(raw):
        check_settings((name for name in properties if name.lower() in CLASSES), location)
        if raw.get("encryption-keys"):
            raise PolicyError(
                f"{location} has encryption-keys, but its properties have no {KEY_ID}: somebody removed the property"
            )
        if plaintext == "refuse":
            raise PolicyError(
                f"the table of {location} is in plaintext: either the table was never encrypted, or somebody put "
                f"plaintext in its place. With {PLAINTEXT_FILES}=allow in your own configuration it can be read"
            )
        return
    check_settings((name for name in properties if name != PLAINTEXT_FILES), location)
    _check_length(properties, location)
    version = raw.get("format-version")
    if version != 3:
        raise PolicyError(f"{location} has {KEY_ID} in format version {version}: only version 3 has encryption")
    named = properties.get(PLAINTEXT_SNAPSHOTS)
    for snapshot in raw.get("snapshots") or ():
        if snapshot.get("key-id"):
            continue
        what = f"snapshot {snapshot.get('snapshot-id')} in {location} has no key-id: its manifest list is in plaintext"
        if named is None and plaintext != "allow":
            raise PolicyError(f"{what}. With {PLAINTEXT_FILES}=allow in your own configuration it can be read")
        if named is not None and str(snapshot.get("snapshot-id")) not in named.split(","):
            raise PolicyError(f"{what}, and {PLAINTEXT_SNAPSHOTS} does not name it: it is younger than the encryption")


def check_change(base: Mapping[str, Any] | None, properties: Mapping[str, str], writing: Mapping[str, Any]) -> None:
    """Refuse a change of a table's metadata.

    Args:
        base: The metadata that are changed; None for a new table.
        properties: The new table properties.
        writing: The new metadata, for the types of their current schema.

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
