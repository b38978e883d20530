"""`KeyEntry`: a key encryption key (KEK) as a key store keeps it, and every property that a KEK can have.

In **double wrap** (the default) an entry holds the KEK, wrapped by a master key. In **single wrap** the entry holds no
key, and the KMS wraps each data key (DEK). See docs/dataset-format.md, "Keys and bindings".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ags_fast.errors import FormatError
from ags_fast.keys.encoding import to_base64, unbase64
from ags_fast.keys.kms import Wrapped, check_key_id

__all__ = ["COLUMNS", "KEY_TIMESTAMP", "LATEST_MS", "MASTER_VERSION", "MOVED_FROM", "RETIRES_MS", "REWRAPPED_MS"]
__all__ += ["ROW", "SCOPE", "SUCCESSOR", "KeyEntry", "for_columns", "left_masters", "moved", "retired", "retires_ms"]
__all__ += ["seals_documents", "with_version"]

STATES = ("active", "retired")
LATEST_MS = 253_402_300_799_999  # the end of the year 9999, in milliseconds since the epoch
MAX_USES = (1 << 63) - 1
JSON_FIELDS = ("key-id", "encrypted-by-id", "encrypted-key-metadata", "state", "created-ms", "uses", "properties")

# Properties of a KEK.
KEY_TIMESTAMP = "KEY_TIMESTAMP"  # Iceberg's: when the KEK was made, in milliseconds since the epoch
MASTER_VERSION = "master-version"  # the version of the master key that wraps the KEK, if only the KMS's answer told it
USE = "use"
COLUMNS = MappingProxyType({USE: "columns"})  # the KEK wraps nothing but data keys of Parquet columns
SCOPE = "scope"  # the files that the KEK is for; a KEK without a scope may seal documents and tables, too
SUCCESSOR = "successor"  # of a retired KEK: the key that took its place
MOVED_FROM = "moved-from"  # JSON list: master keys used earlier by this KEK and its predecessors
RETIRES_MS = "retires-ms"  # of a retired KEK: until then, a writer may come that knows no other KEK
REWRAPPED_MS = "rewrapped-ms"  # when the KEK was wrapped again
ROW = "row"  # the row of a key store that has the wrapped KEK, in place of the entry


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A KEK as a key store keeps it: never the key itself.

    Args:
        key_id: The name of the KEK in manifests.
        wrapping_key_id: The master key in the KMS.
        wrapped: The KEK as the KMS wrapped it; None in single wrap.
        state: ``"active"``, or ``"retired"``: a retired KEK opens what it has wrapped and wraps nothing new.
        created_ms: Milliseconds since the epoch.
        uses: How many DEKs it has wrapped, as far as its store was told; never less than were wrapped.
        properties: Text that travels with the KEK.
        more: Fields of its JSON that this version does not know; they are kept.
    """

    key_id: str
    wrapping_key_id: str
    wrapped: bytes | None = None
    state: str = "active"
    created_ms: int = 0
    uses: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_key_id(self.key_id)
        check_key_id(self.wrapping_key_id)
        if type(self.wrapped) not in (bytes, type(None)) or self.wrapped == b"":
            raise ValueError("a wrapped key is bytes, and None in single wrap")
        if self.state not in STATES:
            raise ValueError(f"a key is {' or '.join(STATES)}, not {self.state!r}")
        for name, number, most in (("created_ms", self.created_ms, LATEST_MS), ("uses", self.uses, MAX_USES)):
            if type(number) is not int or not 0 <= number <= most:
                raise ValueError(f"{name} is a whole number from 0 to {most}, not {str(number)[:40]}")
        if not all(isinstance(text, str) for pair in self.properties.items() for text in pair):
            raise ValueError("the properties of a key are text")
        if known := set(self.more) & set(JSON_FIELDS):
            raise ValueError(f"fields that have a name of their own: {', '.join(sorted(known))}")

    @property
    def double_wrap(self) -> bool:
        """Whether there is a KEK: the entry holds it, wrapped, or names the row of a key store that does."""
        return self.wrapped is not None or ROW in self.properties

    @property
    def wrap(self) -> bytes | str | None:
        """What tells its wrap from others: the wrapped KEK, or the name of the row that has it; None in single wrap."""
        return self.wrapped or self.properties.get(ROW)

    def replace(self, **changes: Any) -> KeyEntry:
        """Return the same entry with other values in these fields."""
        return replace(self, **changes)

    def __repr__(self) -> str:
        wrapped = "None" if self.wrapped is None else f"<{len(self.wrapped)} bytes>"
        return (
            f"KeyEntry({self.key_id!r}, wrapping_key_id={self.wrapping_key_id!r}, wrapped={wrapped}, "
            f"state={self.state!r}, created_ms={self.created_ms}, uses={self.uses})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the entry as documents hold it (docs/dataset-format.md, "Documents").

        The first three fields are named as in Iceberg's ``encryption-keys``: ``key-id``, ``encrypted-by-id`` (the
        master key) and ``encrypted-key-metadata`` (base64; absent in single wrap). Then come ``state``,
        ``created-ms``, ``uses``, ``properties`` (absent if empty), and the fields that were unknown when it was read.
        """
        value: dict[str, Any] = {"key-id": self.key_id, "encrypted-by-id": self.wrapping_key_id}
        if self.wrapped is not None:
            value["encrypted-key-metadata"] = to_base64(self.wrapped)
        value |= {"state": self.state, "created-ms": self.created_ms, "uses": self.uses}
        if self.properties:
            value["properties"] = dict(self.properties)
        return {**value, **self.more}

    @classmethod
    def from_json(cls, value: Any) -> KeyEntry:
        """Return the entry that `to_json` has written. FormatError if the value is not an entry."""
        if not isinstance(value, Mapping):
            raise FormatError(f"a key entry is a JSON object, not {type(value).__name__}")
        wrapped, properties = value.get("encrypted-key-metadata"), value.get("properties", {})
        if not isinstance(properties, Mapping):
            raise FormatError("a key entry is impossible: its properties are not a JSON object")
        try:
            return cls(
                value["key-id"],
                value["encrypted-by-id"],
                None if wrapped is None else unbase64(wrapped),
                value["state"],
                value["created-ms"],
                value["uses"],
                dict(properties),
                {name: more for name, more in value.items() if name not in JSON_FIELDS},
            )
        except KeyError as error:
            raise FormatError(f"a key entry has no {error}") from None
        except (TypeError, ValueError) as error:
            raise FormatError(f"a key entry is impossible: {error}") from None


# ---------------------------------------------------------------------------------------------------------- properties


def with_version(properties: Mapping[str, str], wrapped: bytes | str | None) -> dict[str, str]:
    """Return properties that name the version of the master key that has just wrapped the KEK, if that is known.

    Args:
        properties: The properties before.
        wrapped: The answer of the KMS, or the version itself.
    """
    version = wrapped.version if isinstance(wrapped, Wrapped) else wrapped if isinstance(wrapped, str) else None
    others = {name: text for name, text in properties.items() if name != MASTER_VERSION}
    return others if version is None else {**others, MASTER_VERSION: version}


def for_columns(entry: KeyEntry) -> bool:
    """Whether a KEK is for columns only. A caller that cannot unwrap it must still be able to read all the rest."""
    return COLUMNS.items() <= entry.properties.items()


def seals_documents(entry: KeyEntry) -> bool:
    """Whether a KEK may seal a dataset's documents: active, in double wrap, without `USE` and `SCOPE`."""
    return entry.state == "active" and entry.double_wrap and entry.properties.keys().isdisjoint((USE, SCOPE))


def left_masters(entry: KeyEntry) -> list[str]:
    """Return the master keys that this KEK and its predecessors were under."""
    if (text := entry.properties.get(MOVED_FROM)) is None:
        return []
    try:
        return [str(key_id) for key_id in json.loads(text)]
    except (TypeError, ValueError):
        raise FormatError(f"the key {entry.key_id!r} has an impossible {MOVED_FROM}") from None


def moved(entry: KeyEntry, old: KeyEntry) -> KeyEntry:
    """Return a KEK that takes the place of `old` and names the master keys that were left on the way."""
    left = {*left_masters(entry), *left_masters(old), old.wrapping_key_id} - {entry.wrapping_key_id}
    if not left and MOVED_FROM not in entry.properties:
        return entry
    properties = {name: text for name, text in entry.properties.items() if name != MOVED_FROM}
    return entry.replace(properties=properties | ({MOVED_FROM: json.dumps(sorted(left))} if left else {}))


def retires_ms(entry: KeyEntry) -> int:
    """Return until when a retired KEK stays, in milliseconds since the epoch."""
    text = entry.properties.get(RETIRES_MS, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise FormatError(f"the key {entry.key_id!r} has an impossible {RETIRES_MS}")
    return int(text)


def retired(entry: KeyEntry, successor: str | None, grace_ms: int, now_ms: int) -> KeyEntry:
    """Return a KEK that opens and no longer wraps.

    Args:
        entry: The KEK.
        successor: The id of the KEK that takes its place, if there is one.
        grace_ms: How long a writer may come that knows no other KEK, in milliseconds.
        now_ms: The time, in milliseconds since the epoch.
    """
    properties = {**entry.properties, RETIRES_MS: str(now_ms + grace_ms)}
    if successor is not None:
        properties[SUCCESSOR] = successor
    return entry.replace(state="retired", properties=properties)
