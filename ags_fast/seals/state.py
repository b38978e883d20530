"""The state of an Iceberg table: all of its metadata that its writers decide, in one spelling, and its digest.

Two metadata files have one digest if and only if they say the same, whoever has written them: PyIceberg, Java, or a
server that parsed them and wrote them again. What a REST server decides by itself is left out.
"""

from __future__ import annotations

import binascii
import hashlib
import re
import struct
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import msgspec

from ags_fast.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["PROPERTY", "canonical", "differences", "digest", "snapshot_text", "text_of", "uuid_of"]

PROPERTY = "ags.seal"  # the table's property that holds the seal
PREFIX = b"ags-iceberg-state-1\n"
VERSION = 3  # of the table format, which this scheme seals
# What a REST server decides; current-snapshot-id is that of the branch main.
LEFT_OUT = ("last-updated-ms", "metadata-log", "snapshot-log", "current-snapshot-id")
ABSENT: tuple[Any, ...] = (None, [], {})
ENCODE = msgspec.json.Encoder(order="sorted").encode  # no spaces, and no escape but those that JSON asks for
LONG = range(-1 << 63, 1 << 63)
LONG_TYPE = Annotated[int, msgspec.Meta(ge=LONG[0], le=LONG[-1])]
FLAT = list[dict[str, str | LONG_TYPE | Annotated[dict[str, str], msgspec.Meta(min_length=1)]]]

DECIMAL = re.compile(r"decimal\(\s*(\d+)\s*,\s*(\d+)\s*\)", re.ASCII)
FIXED = re.compile(r"fixed\[\s*(\d+)\s*\]", re.ASCII)
GEOGRAPHY = re.compile(r"geography\(([^,()]+)(?:,([^,()]+))?\)")
GEO = {"geometry": "geometry(OGC:CRS84)", "geography": "geography(OGC:CRS84, spherical)"}
TIME = re.compile(
    r"(?P<day>[^T]+T)?(?P<minute>\d\d:\d\d)(:(?P<second>\d\d)(\.(?P<fraction>\d*))?)?(?P<zone>Z|[+-][\d:]+)?", re.ASCII
)
INNER = ("element", "key", "value")  # of types that have types


def digest(raw: Mapping[str, Any]) -> bytes:
    """Return the SHA-256 of a table's state, 32 bytes. See `canonical`."""
    return hashlib.sha256(canonical(raw)).digest()


def canonical(raw: Mapping[str, Any]) -> bytes:
    """Return the text of a table's state, of which `digest` is the SHA-256.

    Args:
        raw: Parsed metadata of format version 3, whose types were checked.

    Raises:
        FormatError: The metadata are of another format version, or say something twice, or contradict themselves, or
            have a number or a text that not every reader can hold.
    """
    if raw.get("format-version") != VERSION:
        raise FormatError(f"a seal is of format version {VERSION}, and this table has {raw.get('format-version')!r}")
    made: dict[str, bytes] = {}
    try:
        for name, value in {"refs": None, **raw}.items():
            if name not in LEFT_OUT and (text := _member(name, value, raw)):
                made[name] = ENCODE(name) + b":" + text
        text = PREFIX + b"{%b}" % b",".join([made[name] for name in sorted(made)])
        if b'"f64:' in text and _has_bits({name: one for name, one in raw.items() if name != "properties"}):
            raise FormatError("a text of the metadata begins with f64:, as the state spells numbers")
        return text
    except UnicodeEncodeError:
        raise FormatError("a text of the metadata has half a surrogate pair") from None
    except FormatError:
        raise
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError, struct.error) as error:
        raise FormatError(f"the metadata have something of another type: {type(error).__name__}") from None


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return in what states differ: Added, Changed or Removed, by item, such as ``properties/comment``, in order."""
    before, after = _items(was), _items(now)
    return {
        name: "Added" if name not in before else "Removed" if name not in after else "Changed"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    }


def _items(raw: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in msgspec.json.decode(canonical(raw).removeprefix(PREFIX)).items():
        parts = value if isinstance(value, dict) else {"": value}
        found |= {f"{name}/{part}".rstrip("/"): one for part, one in parts.items()}
    return found


def uuid_of(raw: Mapping[str, Any]) -> UUID:
    """Return the UUID of the table of metadata. FormatError if they have none."""
    try:
        return UUID(str(raw.get("table-uuid")))
    except ValueError:
        raise FormatError("the metadata have no table-uuid, or a malformed one") from None


def text_of(value: Any) -> str:
    """Return canonical JSON: members by code point, no spaces, escapes where JSON asks for them."""
    return ENCODE(value).decode()


def snapshot_text(snapshot: Mapping[str, Any]) -> bytes:
    """Return the canonical text of a snapshot."""
    return ENCODE(_snapshot(_plain(snapshot)))


def _member(name: str, value: Any, raw: Mapping[str, Any]) -> bytes:
    """Return the text of a member of the metadata; none if that is as if absent."""
    if name in NUMBERED:
        id_name, change = NUMBERED[name]
        made: dict[str, Any] = {}
        as_it_is = name == "schemas" or _are_flat(value)  # a schema has numbers of its own
        for item in value or ():
            number = item.get(id_name)
            if type(number) not in (int, str) or str(number) in made:
                raise FormatError(f"an item of {name} has no {id_name}, or that of another item: {number!r}")
            made[str(number)] = change(item if as_it_is else _plain(item))
        value = made
    elif name in ("statistics", "partition-statistics"):
        value = sorted(text_of(_plain(item)) for item in value or ())
    elif name == "properties":
        value = {key: one for key, one in _texts(value or {}).items() if key != PROPERTY}
    elif name == "refs":
        value = _refs(raw)
    elif name == "table-uuid":
        value = str(uuid_of(raw))
    elif name == "location":
        value = value.rstrip("/")
    else:
        value = None if name == "next-row-id" and value == 0 else _plain(value)
    return b"" if value in ABSENT else ENCODE(value)


def _refs(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return branches and tags. FormatError if the current snapshot is not that of the branch main."""
    current = raw.get("current-snapshot-id")
    current = None if current == -1 else current
    refs: dict[str, Any] = {name: _plain(one) for name, one in (raw.get("refs") or {}).items()}
    if "refs" not in raw and current is not None:
        refs = {"main": {"snapshot-id": current, "type": "branch"}}
    if refs.get("main", {}).get("snapshot-id") != current:
        raise FormatError("the current snapshot is another than that of the branch main")
    return refs


def _plain(value: Any) -> Any:
    """Return any JSON without what is as if absent, and with the bits of numbers that are no integers."""
    if isinstance(value, dict):
        made = {name: _plain(one) for name, one in value.items()}
        return {name: one for name, one in made.items() if one or one not in ABSENT}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return _bits(value)
    if type(value) is int and value not in LONG:
        raise FormatError(f"{value} is too large for a whole number of Java")
    return value


def _has_bits(value: Any) -> bool:
    """Tell whether a text looks like the bits of a number. Two different metadata would have one state."""
    if isinstance(value, dict | list):
        return any(map(_has_bits, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and value.startswith("f64:")


def _are_flat(items: Any) -> bool:
    """Tell whether items have nothing but texts, whole numbers and objects of texts: then they are plain already."""
    try:
        msgspec.convert(items, FLAT)
    except msgspec.ValidationError:
        return False
    return True


def _bits(value: float) -> str:
    return "f64:" + struct.pack(">d", value).hex()


def _texts(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if not set(map(type, value.values())) <= {str}:
        raise FormatError("a property, or a member of a summary, is no text")
    return value


def _snapshot(one: Mapping[str, Any]) -> Any:
    _texts(one.get("summary") or {})
    return one if one.get("sequence-number") != 0 else {name: one[name] for name in one if name != "sequence-number"}


def _key(one: Mapping[str, Any]) -> Any:
    """Return an entry of encryption-keys. Base64 has one spelling."""
    given = one["encrypted-key-metadata"]
    wrapped = binascii.b2a_base64(binascii.a2b_base64(given, strict_mode=True), newline=False).decode()
    return one if wrapped == given else {**one, "encrypted-key-metadata": wrapped}


def _schema(one: Mapping[str, Any]) -> Any:
    made = _without(one, "fields", "identifier-field-ids")
    made["fields"] = [_column(column) for column in one.get("fields") or ()]
    if ids := one.get("identifier-field-ids"):
        made["identifier-field-ids"] = sorted(ids)
    return made


def _column(one: Mapping[str, Any]) -> Any:
    made = _without(one, "type", "initial-default", "write-default")
    made["type"] = _type(one.get("type"))
    for name in ("initial-default", "write-default"):
        if one.get(name) is not None:
            made[name] = _default(one[name], made["type"])
    return made


def _without(one: Mapping[str, Any], *names: str) -> dict[str, Any]:
    made: dict[str, Any] = _plain({name: value for name, value in one.items() if name not in names})
    return made


def _type(value: Any) -> Any:
    if isinstance(value, dict):
        made = _without(value, "fields", *INNER)
        made |= {name: _type(value[name]) for name in INNER if name in value}
        return made | ({"fields": [_column(one) for one in value["fields"]]} if "fields" in value else {})
    if not isinstance(value, str):
        raise FormatError("the type of a column is neither text nor an object")
    if found := DECIMAL.fullmatch(value):
        return f"decimal({int(found[1])},{int(found[2])})"
    if found := FIXED.fullmatch(value):
        return f"fixed[{int(found[1])}]"
    if found := GEOGRAPHY.fullmatch(value):
        return f"geography({found[1].strip()}, {(found[2] or 'spherical').strip()})"
    return GEO.get(value, value)


def _default(value: Any, of: Any) -> Any:
    """Return the default value of a column, as its type says and not as JSON spells it."""
    kind = of if isinstance(of, str) else ""
    if kind in ("float", "double") and type(value) in (int, float):
        return _bits(value)
    if not isinstance(value, str):
        return _plain(value)
    if kind == "binary" or kind.startswith("fixed["):
        return value.upper()
    if kind == "uuid":
        return value.lower()
    if kind.startswith("time") and (found := TIME.fullmatch(value)):
        fraction = (found["fraction"] or "").rstrip("0")
        second = (found["second"] or "00") + (f".{fraction}" if fraction else "")
        zone = "+00:00" if found["zone"] == "Z" else found["zone"] or ""
        return f"{found['day'] or ''}{found['minute']}:{second}{zone}"
    return value


NUMBERED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "schemas": ("schema-id", _schema),
    "partition-specs": ("spec-id", dict),
    "sort-orders": ("order-id", dict),
    "snapshots": ("snapshot-id", _snapshot),
    "encryption-keys": ("key-id", _key),
}
