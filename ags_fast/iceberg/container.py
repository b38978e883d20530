"""Avro object containers, held whole in memory: the file form of manifests and manifest lists.

Values of a logical type stay as they are encoded: a schema is used without its logical types, so that reading and
writing a value again gives the same bytes. The header keeps the schema's own text.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import os
import zlib
from array import array
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import fastavro
from fastavro.schema import SchemaParseException

from ags_fast._core import (
    AVRO_BYTES,
    AVRO_FIXED,
    AVRO_ITEMS,
    AVRO_NULL,
    AVRO_NUMBER,
    AVRO_RECORD,
    AVRO_UNION,
    avro_pick,
)
from ags_fast.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Container", "Layout", "Picker", "field_of", "read_container", "record_fields", "write_container"]

MAGIC = b"Obj\x01"
SYNC_NBYTES = 16
BLOCK_NBYTES = 1 << 20  # of plain records in a block, about
NESTING = 32  # of a schema
HEADS = 8  # that are kept

Schema = dict[str, Any]


class Layout:
    """A schema, and what is derived from it once for all files that have it.

    Attributes:
        schema: The schema, parsed.
        plain: The schema without logical types, as fastavro takes it.
        many: That of an array of such records, which is decoded in one call.
    """

    def __init__(self, text: bytes) -> None:
        try:
            self.schema: Schema = json.loads(text)
            if not isinstance(self.schema, dict) or self.schema.get("type") != "record":
                raise FormatError("the Avro file is not one of records")
            self.plain = fastavro.parse_schema(_plain(self.schema))
            self.many = fastavro.parse_schema({"type": "array", "items": _plain(self.schema)})
        except (ValueError, TypeError, SchemaParseException):
            raise FormatError("the Avro file has a malformed schema") from None
        self._derived: dict[Callable[[Schema], Any], Any] = {}

    def derived(self, derive: Callable[[Schema], Any]) -> Any:
        """Return ``derive(schema)``, computed once for each function. The result is shared: do not change it."""
        if derive not in self._derived:
            self._derived[derive] = derive(copy.deepcopy(self.schema))
        return self._derived[derive]


layout_of = functools.lru_cache(maxsize=256)(Layout)


class _Head:
    """What stands before the sync marker of a container. Manifests of one table and partition spec have the same.

    Attributes:
        layout: The schema of a record.
        meta: The other entries, without ``avro.schema`` and ``avro.codec``.
        decompress: Decompresses a block.
    """

    def __init__(self, source: io.BytesIO) -> None:
        if source.read(4) != MAGIC:
            raise FormatError("the file is not an Avro file: its first 4 bytes are another format's")
        self.meta: dict[str, bytes] = {}
        while count := _long(source):
            if count < 0:
                count = -count
                _long(source)
            for _ in range(count):
                name = _bytes(source).decode("utf-8", "replace")
                self.meta[name] = _bytes(source)
        self.decompress = _decompressor(self.meta.pop("avro.codec", b"null").decode("utf-8", "replace"))
        self.layout = layout_of(self.meta.pop("avro.schema", b""))
        self._shown: dict[bytes, bytes] = {}

    def shown(self, schema: bytes) -> bytes:
        """Return the head of a container without a codec that has another schema."""
        if schema not in self._shown:
            self._shown[schema] = _header(schema, self.meta, b"", b"null")
        return self._shown[schema]


_heads: dict[bytes, _Head] = {}  # those that came last, by their bytes


def _head_of(data: bytes) -> tuple[_Head, int]:
    """Return the head of a container, and its length in bytes."""
    for encoded, head in list(_heads.items()):
        if data.startswith(encoded):
            return head, len(encoded)
    source = io.BytesIO(data)
    head = _Head(source)
    if len(_heads) >= HEADS:
        _heads.pop(next(iter(_heads)), None)
    _heads[data[: source.tell()]] = head
    return head, source.tell()


@dataclass(frozen=True, slots=True)
class Container:
    """A container whose blocks are decompressed.

    Attributes:
        head: What stands before the sync marker.
        sync: The sync marker, 16 bytes.
        blocks: The records of each block, and their number.
    """

    head: _Head
    sync: bytes
    blocks: list[tuple[int, bytearray]]

    @property
    def layout(self) -> Layout:
        """The schema of a record, and what is derived from it."""
        return self.head.layout

    @property
    def meta(self) -> dict[str, bytes]:
        """The entries of the header, without ``avro.schema`` and ``avro.codec``. It is shared: do not change it."""
        return self.head.meta

    @property
    def schema(self) -> Schema:
        """The schema of a record. It is shared: do not change it."""
        return self.layout.schema

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records, decoded."""
        for count, block in self.blocks:
            if not count:
                continue
            head = bytearray()
            _put_long(head, count)
            source = io.BytesIO(b"".join((head, block, b"\0")))
            try:
                found: Any = fastavro.schemaless_reader(source, self.layout.many, None)
            except (ValueError, TypeError, LookupError, EOFError, OverflowError) as error:
                raise FormatError(f"a record of an Avro file is malformed: {type(error).__name__}") from None
            if source.read():
                raise FormatError("a block of an Avro file has bytes after its last record")
            yield from found

    def take(self, picker: Callable[[Schema], Picker]) -> Iterator[list[Any]]:
        """Yield the values of some fields of each record, None where there is none, without decoding the rest.

        Values that the picker wipes are zeros in the container afterwards.

        Args:
            picker: Makes the picker of a schema.
        """
        chosen: Picker = self.layout.derived(picker)
        slots, wiped, step = chosen.slots, chosen.wiped, 2 * len(chosen.slots)
        for count, block in self.blocks:
            numbers = memoryview(avro_pick(chosen.program, block, count, len(slots))).cast("q").tolist()
            for at in range(0, len(numbers), step):
                values: list[Any] = []
                for i, kind in enumerate(slots):
                    value, nbytes = numbers[at + 2 * i], numbers[at + 2 * i + 1]
                    if nbytes < 0:
                        values.append(None)
                    elif kind == AVRO_NUMBER:
                        values.append(value)
                    else:
                        values.append(bytes(block[value : value + nbytes]))
                        if i == wiped:
                            block[value : value + nbytes] = bytes(nbytes)
                yield values

    def encode(self, schema: bytes) -> bytes:
        """Return the container without a codec, whose header has another schema."""
        out = bytearray(self.head.shown(schema))
        out += self.sync
        for count, block in self.blocks:
            _put_block(out, count, block, self.sync)
        return bytes(out)


def read_container(data: bytes | memoryview) -> Container:
    """Read a container, decompressed. FormatError if any part of the container is malformed or cut."""
    data = bytes(data)
    head, at = _head_of(data)
    source = io.BytesIO(data)
    source.seek(at)
    sync = _exactly(source, SYNC_NBYTES)
    blocks = []
    while source.tell() < len(data):
        count, block = _long(source), _bytes(source)
        if count < 0 or _exactly(source, SYNC_NBYTES) != sync:
            raise FormatError("a block of the Avro file does not end with the file's sync marker")
        blocks.append((count, bytearray(head.decompress(block))))
    return Container(head, sync, blocks)


def write_container(
    schema: Schema, meta: dict[str, bytes], records: Iterable[dict[str, Any]], codec: str = "deflate"
) -> bytes:
    """Return a container.

    Args:
        schema: The schema, with Iceberg's field ids.
        meta: Other entries of the header.
        records: As `Container.records` yields them: values without their logical types.
        codec: ``deflate`` or ``null``.
    """
    sync = os.urandom(SYNC_NBYTES)
    text = json.dumps(schema).encode()
    plain = layout_of(text).plain
    out = bytearray(_header(text, meta, sync, codec.encode()))
    block, count = io.BytesIO(), 0

    def flush() -> None:
        data = block.getvalue()
        _put_block(out, count, _deflate(data) if codec == "deflate" else data, sync)

    for record in records:
        fastavro.schemaless_writer(block, plain, record)
        count += 1
        if block.tell() >= BLOCK_NBYTES:
            flush()
            block, count = io.BytesIO(), 0
    if count:
        flush()
    return bytes(out)


class Picker:
    """Which fields of a record to pick, compiled for `avro_pick`.

    Args:
        schema: The schema of a record.
        fields: The ids of the fields to pick, in the order of their values. Ids of inner records are found, too; none
            is looked for in an array or a map.
        wiped: The id of the field whose bytes are overwritten.
    """

    def __init__(self, schema: Schema, fields: Sequence[int], wiped: int) -> None:
        self._ids = {field_id: i for i, field_id in enumerate(fields)}
        self.slots = [AVRO_NULL] * len(fields)
        self.wiped = fields.index(wiped)
        self._named: dict[str, Any] = {}
        try:
            self.program = array("i", self._node(schema, None, 0))
        except (KeyError, TypeError, ValueError, RecursionError):
            raise FormatError("the Avro file has a malformed schema") from None

    def _node(self, schema: Any, slot: int | None, depth: int) -> list[int]:
        """Return the program of a schema. The value goes to `slot`, unless that is None."""
        if depth > NESTING:
            raise FormatError("the schema of the Avro file is nested too deeply")
        if isinstance(schema, list):
            branches = [self._node(one, slot, depth + 1) for one in schema]
            return _node(AVRO_UNION, [len(branches), *map(len, branches), *chain.from_iterable(branches)])
        kind = schema["type"] if isinstance(schema, dict) else schema
        if isinstance(kind, (dict, list)):
            return self._node(kind, slot, depth + 1)
        if isinstance(schema, dict) and "name" in schema and kind in ("fixed", "enum", "record"):
            self._named[schema["name"]] = schema
        if kind in self._named and not isinstance(schema, dict):
            return self._node(self._named[kind], slot, depth + 1)
        if kind == "record":
            return _node(AVRO_RECORD, chain.from_iterable(self._field(one, depth) for one in schema["fields"]))
        if kind == "array":
            return _node(AVRO_ITEMS, self._node(schema["items"], None, depth + 1))
        if kind == "map":
            pair = [*_node(AVRO_BYTES, ()), *self._node(schema["values"], None, depth + 1)]
            return _node(AVRO_ITEMS, _node(AVRO_RECORD, pair))
        if slot is not None and kind in ("int", "long", "bytes", "string"):
            self.slots[slot] = SCALARS[kind][0]
            return _node(*SCALARS[kind], slot + 1)
        return _node(AVRO_FIXED, [schema["size"]]) if kind == "fixed" else _node(*SCALARS[kind])

    def _field(self, field: Schema, depth: int) -> list[int]:
        return self._node(field["type"], self._ids.get(field.get("field-id", -1)), depth + 1)


def _node(kind: int, rest: Iterable[int], slot: int = 0) -> list[int]:
    rest = list(rest)
    return [kind, 3 + len(rest), slot, *rest]


SCALARS: dict[str, tuple[int, tuple[int, ...]]] = {
    "null": (AVRO_NULL, ()),
    "boolean": (AVRO_FIXED, (1,)),
    "int": (AVRO_NUMBER, ()),
    "long": (AVRO_NUMBER, ()),
    "enum": (AVRO_NUMBER, ()),
    "float": (AVRO_FIXED, (4,)),
    "double": (AVRO_FIXED, (8,)),
    "bytes": (AVRO_BYTES, ()),
    "string": (AVRO_BYTES, ()),
}


def record_fields(schema: Any) -> list[dict[str, Any]]:
    """Return the fields of a record, or of the record in a union with null."""
    if isinstance(schema, list):
        schema = next((one for one in schema if isinstance(one, dict)), {})
    while isinstance(schema.get("type"), dict):
        schema = schema["type"]
    fields = schema.get("fields")
    if not isinstance(fields, list) or not all(isinstance(one, dict) for one in fields):
        raise FormatError("the schema of an Avro file has no fields where a record belongs")
    return fields


def field_of(schema: Schema, field_id: int) -> dict[str, Any] | None:
    """Return the field of a record that has Iceberg's `field_id`, or None."""
    return next((one for one in record_fields(schema) if one.get("field-id") == field_id), None)


def _plain(schema: Any) -> Any:
    """Return the schema without logical types."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if isinstance(schema, dict):
        return {name: _plain(value) for name, value in schema.items() if name != "logicalType"}
    return schema


def _header(schema: bytes, meta: dict[str, bytes], sync: bytes, codec: bytes) -> bytes:
    entries = {"avro.schema": schema, "avro.codec": codec, **meta}
    out = bytearray(MAGIC)
    _put_long(out, len(entries))
    for name, value in entries.items():
        for data in (name.encode(), value):
            _put_long(out, len(data))
            out += data
    out.append(0)
    out += sync
    return bytes(out)


def _put_block(out: bytearray, count: int, data: bytes | bytearray, sync: bytes) -> None:
    _put_long(out, count)
    _put_long(out, len(data))
    out += data
    out += sync


def _put_long(out: bytearray, value: int) -> None:
    value <<= 1  # zigzag; never negative here
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _long(source: io.BytesIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = _exactly(source, 1)[0]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1)
    raise FormatError("a number in the Avro file is longer than 64 bits")


def _bytes(source: io.BytesIO) -> bytes:
    return _exactly(source, _long(source))


def _exactly(source: io.BytesIO, nbytes: int) -> bytes:
    data = source.read(nbytes) if nbytes >= 0 else b""
    if len(data) != nbytes:
        raise FormatError("the Avro file is cut short")
    return data


def _deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(data) + made.flush()


def _inflate(data: bytes) -> bytes:
    return zlib.decompress(data, wbits=-15)


def _unsnap(data: bytes) -> bytes:
    import cramjam  # an optional codec of fastavro, too

    plain = bytes(cramjam.snappy.decompress_raw(data[:-4]))
    if zlib.crc32(plain) != int.from_bytes(data[-4:], "big"):
        raise FormatError("a block of the Avro file has another CRC-32 than it says")
    return plain


def _unzstd(data: bytes) -> bytes:
    import zstandard  # pyiceberg depends on it

    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


CODECS: dict[str, Callable[[bytes], bytes]] = {
    "null": bytes,
    "deflate": _inflate,
    "snappy": _unsnap,
    "zstandard": _unzstd,
}


def _decompressor(codec: str) -> Callable[[bytes], bytes]:
    codecs: dict[str, Callable[[bytes], bytes]] = {
        "null": bytes,
        "deflate": _inflate,
        "snappy": _unsnap,
        "zstandard": _unzstd,
    }
    chosen = codecs.get(codec)
    if chosen is None:
        raise FormatError(f"the Avro file has the codec {codec!r}; null, deflate, snappy and zstandard are known")

    def decompress(data: bytes) -> bytes:
        try:
            return chosen(data)
        except ImportError as error:
            raise FormatError(f"the Avro file has the codec {codec}: install {error.name}") from error
        except (FormatError, MemoryError):
            raise
        except Exception as error:
            raise FormatError(f"a block of the Avro file does not decompress: {error}") from None

    return decompress
