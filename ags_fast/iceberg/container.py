"""Avro object containers, held whole in memory: the file form of manifests and manifest lists.

Values of a logical type stay as they are encoded: a schema is used without its logical types, so that reading and
writing a value again gives the same bytes. The header keeps the schema's own text.
"""

from __future__ import annotations

import bz2
import copy
import functools
import io
import json
import os
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fastavro
import pyarrow as pa
from fastavro.schema import SchemaParseException

from ags_fast._core import AVRO_BYTES, AVRO_NULL, AVRO_NUMBER, avro_blocks, avro_pick
from ags_fast.avro.blocks import MAX_BLOCK_NBYTES, SYNC_NBYTES, decompress, encode
from ags_fast.avro.checking import picking
from ags_fast.avro.container import MAGIC, encode_header, parse_header
from ags_fast.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["Container", "Layout", "Picker"]
__all__ += ["codec_of", "field_of", "read_container", "record_fields", "write_container"]

BLOCK_NBYTES = 1 << 20  # of plain records in a block, about
TEXTS = (100, 101, 131, 143, 500, 519)  # ids of fields of text or bytes; all others that are picked are numbers
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, SchemaParseException)

CODEC = "write.avro.compression-codec"  # a table's property: what manifests and lists are compressed by
CODECS = {"gzip": "deflate", "zstd": "zstandard", "uncompressed": "null"}  # names of Iceberg, and those of Avro
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "null": lambda data: data,
    "deflate": lambda data: zlib.compress(data, wbits=-15),
    "bzip2": bz2.compress,
    "snappy": lambda data: pa.compress(data, "snappy", asbytes=True) + zlib.crc32(data).to_bytes(4, "big"),
    "zstandard": lambda data: pa.compress(data, "zstd", asbytes=True),
}

Schema = dict[str, Any]


def codec_of(properties: Mapping[str, Any]) -> str:
    """Return the codec that a table's properties ask for, by Avro's name. ValueError if nobody knows it."""
    given = str(properties.get(CODEC, "gzip")).lower()
    codec = CODECS.get(given, given)
    if codec not in COMPRESSORS:
        raise ValueError(f"{CODEC} is {given!r}: it must be one of {', '.join(sorted({*COMPRESSORS, *CODECS}))}")
    return codec


class Layout:
    """A schema, and what is derived from it once for all files that have it.

    Attributes:
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
            record_fields(self.schema)
        except MALFORMED:
            raise FormatError("the Avro file has a malformed schema") from None
        self._derived: dict[Any, Any] = {}

    def derived(self, derive: Callable[..., Any], *given: Any) -> Any:
        """Return ``derive(schema, *given)``, computed once. The result is shared: do not change it."""
        if (derive, given) not in self._derived:
            self._derived[derive, given] = derive(copy.deepcopy(self.schema), *given)
        return self._derived[derive, given]


layout_of = functools.lru_cache(maxsize=256)(Layout)


@dataclass(frozen=True, slots=True)
class Container:
    """A container whose blocks are decompressed.

    Attributes:
        layout: The schema of a record, and what is derived from it.
        meta: The entries of the header, without ``avro.schema`` and ``avro.codec``.
        codec: As it was compressed by, by Avro's name.
        sync: The sync marker, 16 bytes.
        blocks: Of each block the number of its records, and these.
    """

    layout: Layout
    meta: dict[str, bytes]
    codec: str
    sync: bytes
    blocks: list[tuple[int, bytearray]]

    @property
    def schema(self) -> Schema:
        """The schema of a record. It is shared: do not change it."""
        return self.layout.schema

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records, decoded."""
        for count, block in self.blocks:
            if not count:
                continue
            source = io.BytesIO(b"".join((encode(count), block, b"\0")))
            try:
                found: Any = fastavro.schemaless_reader(source, self.layout.many, None)
            except (ValueError, TypeError, LookupError, EOFError, OverflowError) as error:
                raise FormatError(f"a record of an Avro file is malformed: {type(error).__name__}") from None
            if source.read():
                raise FormatError("a block of an Avro file has bytes after its last record")
            yield from found

    def take(self, fields: tuple[int, ...], wipes: int) -> Iterator[list[Any]]:
        """Yield the values of some fields of each record, None where there is none, without decoding the rest.

        Values of the field that it wipes are zeros in the container afterwards. The arguments are those of `Picker`.
        """
        chosen: Picker = self.layout.derived(Picker, fields, wipes)
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
        out = bytearray(encode_header(schema, self.sync, more=self.meta))
        for count, block in self.blocks:
            _put_block(out, count, block, self.sync)
        return bytes(out)


def read_container(data: bytes | memoryview) -> Container:
    """Read a container, decompressed. FormatError if any part of the container is malformed or cut."""
    data = bytes(data)
    if data[: len(MAGIC)] != MAGIC:
        raise FormatError("the file is not an Avro file: its first 4 bytes are another format's")
    try:
        meta, begin = parse_header(data, len(data))
    except IndexError:
        raise FormatError("the plaintext is not an intact Avro file: its header is cut") from None
    codec = meta.pop("avro.codec", b"").decode("utf-8", "replace") or "null"
    layout = layout_of(meta.pop("avro.schema", b""))
    sync, view = data[begin - SYNC_NBYTES : begin], memoryview(data)[begin:]
    found, used, _ = avro_blocks(view, sync, len(view))
    if used < len(view):
        raise FormatError("the Avro file is cut short")
    blocks = []
    for count, first, stop in found:
        body = view[first:stop]
        plain = body if codec == "null" else decompress(codec, body, MAX_BLOCK_NBYTES)
        blocks.append((count, bytearray(plain)))
    return Container(layout, meta, codec, sync, blocks)


def write_container(
    schema: Schema, meta: dict[str, bytes], records: Iterable[dict[str, Any]], codec: str = "deflate"
) -> bytes:
    """Return a container of records as `Container.records` yields them: values without their logical types.

    The schema has Iceberg's field ids. meta: other entries of the header. codec: as `codec_of` returns it.
    """
    sync = os.urandom(SYNC_NBYTES)
    text = json.dumps(schema).encode()
    plain = layout_of(text).plain
    out = bytearray(encode_header(text, sync, codec.encode(), meta))
    block, count = io.BytesIO(), 0

    def flush() -> None:
        _put_block(out, count, COMPRESSORS[codec](block.getvalue()), sync)

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
        fields: The ids of the fields to pick, in the order of their values. Ids of inner records are found, too; none
            is looked for in an array or a map.
        wiped: The id of the field whose bytes are overwritten.
    """

    def __init__(self, schema: Schema, fields: Sequence[int], wiped: int) -> None:
        named: dict[str, Any] = {}
        try:
            parsed = fastavro.parse_schema(_plain(schema), named)
            self.program, kinds = picking(parsed, named, {field_id: i for i, field_id in enumerate(fields)})
        except MALFORMED:
            raise FormatError("the Avro file has a malformed schema") from None
        self.slots = [kinds.get(i, AVRO_NULL) for i in range(len(fields))]
        for one, kind in zip(fields, self.slots, strict=True):
            if kind not in (AVRO_NULL, AVRO_BYTES if one in TEXTS else AVRO_NUMBER):
                raise FormatError(f"the field {one} of a manifest, or of a list, has another type than Iceberg's")
        self.wiped = fields.index(wiped)


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
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if isinstance(schema, dict):
        return {name: _plain(value) for name, value in schema.items() if name != "logicalType"}
    return schema


def _put_block(out: bytearray, count: int, data: bytes | bytearray, sync: bytes) -> None:
    for part in (encode(count), encode(len(data)), data, sync):
        out += part
