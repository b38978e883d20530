"""Avro files that were damaged, or made to do harm, before they were encrypted: FormatError, in bounded memory.

fastavro reads some of them with other rows or fewer, without end, or until the memory is full or the stack ends.
"""

from __future__ import annotations

import bz2
import contextlib
import io
import json
import random
import tracemalloc
import zlib
from typing import Any

import pytest
from support import KEY

from ags_fast import AgsCodec, FormatError

fastavro = pytest.importorskip("fastavro")
pytest.importorskip("pyarrow")
from ags_fast import avro  # noqa: E402  # needs fastavro

MARKER = b"0123456789abcdef"
READERS = ("read_split", "fastavro", "auto")
FILL = bytes(24 << 20)


def long(value: int) -> bytes:
    value = ((value << 1) ^ (value >> 63)) & ((1 << 64) - 1)
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def text(data: bytes) -> bytes:
    return long(len(data)) + data


def header(schema: Any, codec: bytes = b"null", pairs: int = 2) -> bytes:
    encoded = schema if isinstance(schema, bytes) else json.dumps(schema).encode()
    metadata = text(b"avro.schema") + text(encoded) + text(b"avro.codec") + text(codec)
    return b"Obj\x01" + long(pairs) + metadata + long(0) + MARKER


def record(*types: Any) -> dict[str, Any]:
    return {"type": "record", "name": "r", "fields": [{"name": f"c{i}", "type": one} for i, one in enumerate(types)]}


def array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def block(rows: int, body: bytes, marker: bytes = MARKER, nbytes: int | None = None) -> bytes:
    return long(rows) + long(len(body) if nbytes is None else nbytes) + body + marker


def deflated(data: bytes) -> bytes:
    compress = zlib.compressobj(9, wbits=-15)
    return compress.compress(data) + compress.flush()


LONG = record("long")
THREE = long(1) + long(2) + long(3)
EMPTY = {"type": "record", "name": "e", "fields": []}
LIST = {
    "type": "record",
    "name": "r",
    "fields": [{"name": "n", "type": "int"}, {"name": "next", "type": ["null", "r"]}],
}
HOLDS_ITSELF = {"type": "record", "name": "r", "fields": [{"name": "next", "type": "r"}]}
DAMAGED = {
    "magic": b"Obj\x02" + (header(LONG) + block(3, THREE))[4:],
    "schema that is cut": header(json.dumps(LONG).encode()[:-9]) + block(3, THREE),
    "schema that is not UTF-8": header(b"\xff\xfe" + json.dumps(LONG).encode()) + block(3, THREE),
    "schema that is deep": header(b'{"type":"array","items":' * 50_000 + b'"int"' + b"}" * 50_000) + block(1, b"\0"),
    "fixed of negative size": header(record({"type": "fixed", "name": "f", "size": -5})) + block(1, b"\0"),
    "fixed of huge size": header(record({"type": "fixed", "name": "f", "size": 1 << 40})) + block(1, b"\0"),
    "fixed of 2^70": header(record({"type": "fixed", "name": "f", "size": 1 << 70})) + block(1, b"\0"),
    "type that holds itself": header(HOLDS_ITSELF) + block(1, b"x"),
    "deep list": header(LIST) + block(1, b"\x02\x02" * 50_000 + b"\x02\0"),
    "codec": header(LONG, b"\xff\xfe") + block(3, THREE),
    "header with a negative length": b"Obj\x01" + long(2) + long(-5) + b"avro.schema",
    "header of 2^62 pairs": b"Obj\x01" + long(1 << 62) + text(b"avro.schema"),
    "header of -2^63 pairs": b"Obj\x01" + long(-1 << 63) + long(1) + text(b"avro.schema"),
    "header of many pairs": b"Obj\x01" + long(1 << 60) + FILL,
    "header with a value of 2^62": b"Obj\x01" + long(1) + text(b"avro.schema") + long(1 << 62) + FILL,
    "header with a value past the end": b"Obj\x01" + long(1) + text(b"avro.schema") + long(1 << 30) + FILL,
    "marker": header(LONG) + block(3, THREE, b"x" * 16),
    "second marker": header(LONG) + block(3, THREE) + block(3, THREE, b"x" * 16),
    "negative size": header(LONG) + block(3, THREE, nbytes=-1),
    "least size": header(LONG) + block(3, THREE, nbytes=-1 << 63),
    "size of 2^62": header(LONG) + block(3, THREE, nbytes=1 << 62),
    "size of what follows": header(LONG) + block(3, THREE, nbytes=20 << 20) + FILL,
    "negative count": header(LONG) + block(-3, THREE),
    "count of 4": header(LONG) + block(4, THREE),
    "count of 2": header(LONG) + block(2, THREE),
    "count of 0": header(LONG) + block(0, THREE),
    "count of 2^62": header(LONG) + block(1 << 62, THREE),
    "number without end": header(LONG) + b"\xff" * 11 + b"\x01",
    "number without end in a record": header(LONG) + block(1, b"\xff" * 11 + b"\x01"),
    "nulls without end": header(record("null")) + block(1 << 40, b""),
    "empty records without end": header(EMPTY) + block(1 << 62, b""),
    "nulls and a number": header(record("null", "long")) + block(1 << 40, b"\0"),
    "array of nulls": header(record(array("null"))) + block(1, long(1 << 40) + b"\0"),
    "array of fixed 0": header(record(array({"type": "fixed", "name": "f", "size": 0})))
    + block(1, long(1 << 40) + b"\0"),
    "array of empty records": header(record(array(EMPTY))) + block(1, long(1 << 40) + b"\0"),
    "array in an array": header(record(array(array("null")))) + block(1, long(1) + long(1 << 40) + b"\0\0"),
    "array of nulls, compressed": header(record(array("null")), b"deflate") + block(1, deflated(long(1 << 40) + b"\0")),
    "array of 2^40": header(record(array("long"))) + block(1, long(1 << 40) + THREE),
    "array of -2^63": header(record(array("long"))) + block(1, long(-1 << 63) + long(5) + THREE),
    "map of 2^40": header(record({"type": "map", "values": "null"})) + block(1, long(1 << 40) + b"\0\0"),
    "string of 2^40": header(record("string")) + block(1, long(1 << 40) + b"x"),
    "string of -3": header(record("string")) + block(1, long(-3) + b"x"),
    "string that is not UTF-8": header(record("string")) + block(1, text(b"\xff\xfe")),
    "branch -1": header(record(["null", "int"])) + block(1, long(-1) + long(1)),
    "branch 2 of a list": header(LIST) + block(1, long(1) + long(2) + long(1)),
    "symbol 2^40": header(record({"type": "enum", "name": "e", "symbols": ["A"]})) + block(1, long(1 << 40)),
    "snappy of 4 GiB": header(LONG, b"snappy") + block(1, b"\xff\xff\xff\xff\x0f" + bytes(8)),
    "deflate": header(LONG, b"deflate") + block(1, b"\xff" * 9),
}


def read(plain: bytes, reader: str, **options: Any) -> list[dict[str, Any]]:
    sealed = AgsCodec(KEY).encrypt(plain)
    if reader == "read_split":
        return list(avro.read_split(sealed, KEY, 0, len(plain), length=len(sealed), **options))
    batches = avro.read_batches(sealed, KEY, length=len(sealed), decoder=reader, **options)
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name: str, reader: str) -> None:
    plain = DAMAGED[name]
    with contextlib.suppress(FormatError):  # imports libraries
        read(plain[:200], reader)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            read(plain, reader)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Beside the sealed file: a piece that is decoded at a time, and little else.
    assert peak - len(plain) < (24 << 20)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("codec", [b"deflate", b"bzip2"])
def test_small_blocks_that_would_fill_the_memory(codec: bytes, reader: str) -> None:
    data = text(bytes(32 << 20))
    body = deflated(data) if codec == b"deflate" else bz2.compress(data)
    plain = header(record("bytes"), codec) + block(1, body)
    with pytest.raises(FormatError, match="max_block_nbytes"):
        read(plain, reader, max_block_nbytes=1 << 20)
    assert read(plain, reader, max_block_nbytes=33 << 20) == [{"c0": bytes(32 << 20)}]


def test_types_that_hold_themselves_are_read() -> None:
    file = io.BytesIO()
    rows: list[Any] = [{"n": 0, "next": None}]
    for n in range(1, 90):
        rows.append({"n": n, "next": rows[-1]})
    fastavro.writer(file, LIST, rows, codec="deflate")
    assert read(file.getvalue(), "read_split") == rows


EVERY = record(
    "boolean",
    "int",
    "float",
    {"type": "fixed", "name": "f", "size": 3},
    {"type": "enum", "name": "space.e", "symbols": ["A", "B"]},
    {"type": "map", "values": ["null", "space.e", "f", {"type": "array", "items": "string"}]},
    {
        "type": "record",
        "name": "inner",
        "fields": [{"name": "a", "type": ["null", "bytes"]}, {"name": "b", "type": "null"}],
    },
    ["inner", "double"],
)
RECURSIVE = record(
    "string", array({**LIST, "name": "list", "fields": [LIST["fields"][0], {"name": "next", "type": ["null", "list"]}]})
)


@pytest.mark.parametrize("schema", [EVERY, RECURSIVE], ids=["every type", "recursive"])
def test_what_is_read_is_what_fastavro_reads(schema: dict[str, Any]) -> None:
    """Random damage: either the rows of fastavro, all of them, or FormatError."""
    from fastavro.utils import generate_many

    random.seed(3)
    rows = (
        list(generate_many(schema, 6))
        if schema is EVERY
        else [{"c0": "é" * n, "c1": [{"n": n, "next": {"n": 7, "next": None}}] * n} for n in range(6)]
    )
    file = io.BytesIO()
    fastavro.writer(file, schema, rows, sync_marker=MARKER)
    plain = file.getvalue()
    assert read(plain, "read_split") == list(fastavro.reader(io.BytesIO(plain)))
    begin = plain.index(MARKER) + 16
    draw, found = random.Random(5), {"read": 0, "refused": 0}
    for _ in range(500):
        damaged = bytearray(plain)
        damaged[draw.randrange(begin, len(plain) - 16)] = draw.choice((0, 1, 2, 128, 255, draw.randrange(256)))
        try:
            got = read(bytes(damaged), "read_split")
        except FormatError:
            found["refused"] += 1
        else:
            found["read"] += 1
            assert repr(got) == repr(list(fastavro.reader(io.BytesIO(damaged))))
    assert min(found.values()) > 40, found


@pytest.mark.parametrize("codec", ["snappy", "zstandard"])
def test_codecs_without_pyarrow(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the library of fastavro decompresses."""
    file, rows = io.BytesIO(), [{"c0": "x" * n} for n in range(2000)]
    try:
        fastavro.writer(file, record("string"), rows, codec=codec)
    except ValueError as error:
        pytest.skip(str(error))
    monkeypatch.setattr("ags_fast.avro.blocks.pa", None)
    assert read(file.getvalue(), "read_split") == rows
    with pytest.raises(FormatError, match="max_block_nbytes"):
        read(file.getvalue(), "read_split", max_block_nbytes=5000)
