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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fastavro
from fastavro.read import SchemaResolutionError
from fastavro.schema import SchemaParseException

from ags_fast.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Container", "Layout", "array_of", "field_of", "read_container", "record_fields", "write_container"]

MAGIC = b"Obj\x01"
SYNC_NBYTES = 16
BLOCK_NBYTES = 1 << 20  # of plain records in a block, about

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
            self.many = array_of(self.schema)
        except (ValueError, TypeError, SchemaParseException):
            raise FormatError("the Avro file has a malformed schema") from None
        self._derived: dict[Callable[[Schema], Any], Any] = {}

    def derived(self, derive: Callable[[Schema], Any]) -> Any:
        """Return ``derive(schema)``, computed once for each function. The result is shared: do not change it."""
        if derive not in self._derived:
            self._derived[derive] = derive(copy.deepcopy(self.schema))
        return self._derived[derive]


layout_of = functools.lru_cache(maxsize=256)(Layout)


@dataclass(frozen=True, slots=True)
class Container:
    """A container whose blocks are decompressed.

    Attributes:
        layout: The schema of a record.
        meta: The other entries of the header, without ``avro.schema`` and ``avro.codec``.
        sync: The sync marker, 16 bytes.
        blocks: The records of each block, and their number.
    """

    layout: Layout
    meta: dict[str, bytes]
    sync: bytes
    blocks: list[tuple[int, bytearray]]

    @property
    def schema(self) -> Schema:
        """The schema of a record. It is shared: do not change it."""
        return self.layout.schema

    def records(self, keep: Callable[[Schema], Schema] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the records.

        Args:
            keep: Returns, by `array_of`, the part of the schema to decode. The rest is skipped. None decodes all.
        """
        part = None if keep is None else self.layout.derived(keep)
        for count, block in self.blocks:
            if not count:
                continue
            array = bytearray()
            _put_long(array, count)
            source = io.BytesIO(b"".join((array, block, b"\0")))
            try:
                found: Any = fastavro.schemaless_reader(source, self.layout.many, part)
            except (ValueError, TypeError, LookupError, EOFError, OverflowError, SchemaResolutionError) as error:
                raise FormatError(f"a record of an Avro file is malformed: {type(error).__name__}") from None
            if source.read():
                raise FormatError("a block of an Avro file has bytes after its last record")
            yield from found

    def encode(self, schema: bytes) -> bytes:
        """Return the container without a codec, whose header has another schema."""
        out = bytearray(_header(schema, self.meta, self.sync, b"null"))
        for count, block in self.blocks:
            _put_block(out, count, block, self.sync)
        return bytes(out)


def read_container(data: bytes | memoryview) -> Container:
    """Read a container, decompressed. FormatError if any part of the container is malformed or cut."""
    source = io.BytesIO(data)
    if source.read(4) != MAGIC:
        raise FormatError("the file is not an Avro file: its first 4 bytes are another format's")
    meta: dict[str, bytes] = {}
    while count := _long(source):
        if count < 0:
            count = -count
            _long(source)
        for _ in range(count):
            name = _bytes(source).decode("utf-8", "replace")
            meta[name] = _bytes(source)
    sync = _exactly(source, SYNC_NBYTES)
    decompress = _decompressor(meta.pop("avro.codec", b"null").decode("utf-8", "replace"))
    blocks = []
    while source.tell() < len(data):
        count, block = _long(source), _bytes(source)
        if count < 0 or _exactly(source, SYNC_NBYTES) != sync:
            raise FormatError("a block of the Avro file does not end with the file's sync marker")
        blocks.append((count, bytearray(decompress(block))))
    return Container(layout_of(meta.pop("avro.schema", b"")), meta, sync, blocks)


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


def array_of(schema: Schema) -> Any:
    """Return the schema of an array of records, without logical types, as fastavro takes it."""
    return fastavro.parse_schema({"type": "array", "items": _plain(schema)})


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
