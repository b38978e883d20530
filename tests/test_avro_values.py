"""Values at the bounds of their types, and beyond: no writer writes them as others, and no decoder reads others.

Each decoder gives the same rows, or the same error: FormatError. So does `read_split`, but for logical types.
"""

from __future__ import annotations

import bz2
import contextlib
import json
import lzma
import math
import struct
from datetime import date
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import KEY
from support import seal_stream as seal
from test_avro import to_varint

from ags_fast import FormatError

fastavro = pytest.importorskip("fastavro")
pa = pytest.importorskip("pyarrow")
from ags_fast import avro  # noqa: E402  # needs fastavro

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DECODERS = ("ags_fast", "datafusion", "polars", "fastavro")
MARKER = bytes(range(16))
LARGEST_FLOAT = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


def text(data: bytes) -> bytes:
    return to_varint(len(data)) + data


def file_of(schema: Any, *blocks: tuple[int, bytes], codec: str = "null") -> bytes:
    text_of = schema if isinstance(schema, bytes) else json.dumps(schema).encode()
    pairs = ((b"avro.schema", text_of), (b"avro.codec", codec.encode()))
    head = b"Obj\x01" + to_varint(2) + b"".join(text(name) + text(value) for name, value in pairs)
    return head + b"\0" + MARKER + b"".join(to_varint(rows) + text(body) + MARKER for rows, body in blocks)


def record(*types: Any) -> dict[str, Any]:
    return {"type": "record", "name": "r", "fields": [{"name": f"x{i}", "type": one} for i, one in enumerate(types)]}


class DecoderRefusesError(Exception):
    """A decoder does not take files of this schema."""


def outcome(read: Callable[[], list[Any]]) -> str:
    """The rows as text, in which each NaN is the same, or what was raised."""
    try:
        return repr(read())
    except FormatError:
        return "FormatError"
    except ValueError as error:
        if "cannot read this file" in str(error):
            raise DecoderRefusesError from error
        raise


def batches_of(sealed: bytes) -> list[Any]:
    return [row for batch in avro.read_batches(sealed, KEY, length=None) for row in batch.to_pylist()]


def records_of(sealed: bytes) -> list[Any]:
    return list(avro.read_split(sealed, KEY, 0, len(sealed), length=None))


def numbers_of(sealed: bytes, decoder: str) -> list[Any]:
    """The first column. Python has not all times and dates, and Arrow shows them as Python's: so their numbers."""
    found: list[Any] = []
    for batch in avro.read_batches(sealed, KEY, length=None, decoder=decoder):
        column = batch.column(0)
        if pa.types.is_temporal(column.type):
            column = column.view(pa.int32() if column.type.bit_width == 32 else pa.int64())
        found += map(dict, column.to_pylist()) if pa.types.is_map(column.type) else column.to_pylist()
    return found


def outcomes(plain: bytes, *, logical: bool = False) -> dict[str, str]:
    """What each reader that takes the schema makes of a file."""
    sealed = seal(plain)
    found: dict[str, str] = {}
    for decoder in DECODERS:
        with contextlib.suppress(DecoderRefusesError):
            found[decoder] = outcome(partial(numbers_of, sealed, decoder))
    if not logical:
        found["read_split"] = outcome(lambda: [row["x0"] for row in records_of(sealed)])
    return found


NUMBERS = st.one_of(
    st.sampled_from([sign * (1 << bits) + step for bits in (31, 32, 63) for sign in (1, -1) for step in (-1, 0, 1)]),
    st.integers(-5, 5),
    st.integers(-(1 << 63), (1 << 63) - 1),
)
BYTES = st.one_of(
    st.binary(max_size=20), st.text(max_size=5).map(str.encode), st.just(b"\xc3"), st.just(b"\xed\xa0\x80")
)
FLOATS = ["0000807f", "000080ff", "0000c07f", "010080ff", "ffff7f7f", "00000080", "01000000"]
DOUBLES = ["000000000000f07f", "000000000000f8ff", "ffffffffffffef7f", "0100000000000000"]
ENUM = {"type": "enum", "name": "e", "symbols": ["A", "B", "C"]}
DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}
# A type, and the bytes of its values: right ones, those at the bounds and those beyond.
ENCODED: list[tuple[Any, st.SearchStrategy[bytes]]] = [
    ("boolean", st.sampled_from([b"\0", b"\1"])),
    ("int", NUMBERS.map(to_varint)),
    ("long", st.one_of(NUMBERS.map(to_varint), st.sampled_from([b"\xff" * 9 + b"\x01", b"\xff" * 9 + b"\x02"]))),
    ("float", st.one_of(st.sampled_from([*map(bytes.fromhex, FLOATS)]), st.binary(min_size=4, max_size=4))),
    ("double", st.one_of(st.sampled_from([*map(bytes.fromhex, DOUBLES)]), st.binary(min_size=8, max_size=8))),
    ("bytes", BYTES.map(text)),
    ("string", BYTES.map(text)),
    ({"type": "fixed", "name": "f", "size": 3}, st.binary(min_size=2, max_size=3)),
    (ENUM, st.one_of(st.integers(-2, 4), NUMBERS).map(to_varint)),
    (["null", "int"], st.one_of(NUMBERS.map(lambda n: b"\2" + to_varint(n)), st.integers(-1, 3).map(to_varint))),
    (["string", "null"], st.one_of(BYTES.map(lambda data: b"\0" + text(data)), st.integers(-1, 3).map(to_varint))),
    (["int", "long"], st.tuples(st.integers(-1, 2), NUMBERS).map(lambda pair: b"".join(map(to_varint, pair)))),
    ({"type": "array", "items": "int"}, NUMBERS.map(lambda n: b"\2" + to_varint(n) + b"\0")),
    ({"type": "map", "values": ENUM}, st.one_of(st.integers(-1, 3), NUMBERS).map(
        lambda n: b"\2" + text(b"k") + to_varint(n) + b"\0"
    )),
]  # fmt: skip
LOGICAL: list[tuple[Any, st.SearchStrategy[bytes]]] = [
    (DECIMAL, st.one_of(st.binary(max_size=20), NUMBERS.map(lambda n: n.to_bytes(9, "big", signed=True))).map(text)),
    ({**DECIMAL, "type": "fixed", "name": "d", "size": 4}, st.binary(min_size=4, max_size=4)),
    ({"type": "int", "logicalType": "date"}, NUMBERS.map(to_varint)),
    ({"type": "int", "logicalType": "time-millis"}, NUMBERS.map(to_varint)),
    ({"type": "long", "logicalType": "timestamp-micros"}, NUMBERS.map(to_varint)),
]


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_all_decoders_give_the_same_rows_or_the_same_error(data: st.DataObject) -> None:
    logical = data.draw(st.booleans())
    kind, values = data.draw(st.sampled_from(LOGICAL if logical else ENCODED))
    bodies = data.draw(st.lists(values, min_size=1, max_size=3))
    found = outcomes(
        file_of(record(kind, "long"), (len(bodies), b"".join(one + b"\2" for one in bodies))), logical=logical
    )
    assert len(found) >= 1 + (not logical)
    assert len({*found.values()}) == 1, found


@pytest.mark.parametrize("bad", [1 << 31, -(1 << 31) - 1, 1 << 32, (1 << 32) + 1, -(1 << 63)])
@pytest.mark.parametrize("kind", ["int", ENUM, ["null", "int"], {"type": "array", "items": "int"}], ids=str)
def test_no_number_is_wrapped(kind: Any, bad: int) -> None:
    head = b"" if kind in ("int", ENUM) else b"\2"
    tail = b"\0" if isinstance(kind, dict) and kind != ENUM else b""
    found = outcomes(file_of(record(kind), (1, head + to_varint(bad) + tail)))
    assert {*found.values()} == {"FormatError"}
    assert "read_split" in found
    # a type that holds itself is walked over in Python
    own = {
        "type": "record",
        "name": "own",
        "fields": [{"name": "x", "type": kind}, {"name": "o", "type": ["null", "own"]}],
    }
    with pytest.raises(FormatError):
        records_of(seal(file_of(own, (1, head + to_varint(bad) + tail + b"\0"))))
    assert records_of(seal(file_of(own, (1, head + to_varint(1) + tail + b"\0"))))


# ----------------------------------------------------------------------------------------------------------- writing

NOT_WRITTEN: list[tuple[Any, list[Any]]] = [
    ("null", [0, "x", False]),
    ("boolean", [0, 1, "x", None]),
    ("int", [1 << 31, -(1 << 31) - 1, 1 << 80, 1.0, 1.5, "1", None]),
    ("long", [1 << 63, -(1 << 63) - 1, 1.5, Decimal(1), None]),
    ("float", [1e300, -1e39, 10**400, "1", None]),
    ("double", [10**400, "x", None]),
    ("bytes", ["x", 5, None]),
    ("string", [b"x", 5, None]),
    ({"type": "fixed", "name": "f", "size": 2}, [b"abc", b"a", "ab"]),
    (ENUM, ["D", 0, None]),
    (["null", "int"], [1 << 31, "x", 1.5]),
    (["null", "float"], [1e300]),
    (["float", "double"], [1e300]),  # fastavro takes the first
    ({"type": "array", "items": "int"}, [[1 << 31], [1.5], 5]),
    ({"type": "map", "values": "float"}, [{"k": 1e300}, {1: 1.0}]),
    ({"type": "record", "name": "inner", "fields": [{"name": "x", "type": {"type": "int"}}]}, [{"x": 1 << 31}]),
    ({"type": "int", "logicalType": "date"}, [1 << 31, "x"]),
    ({"type": "long", "logicalType": "timestamp-millis"}, [1 << 63, 1.5]),
    (DECIMAL, [Decimal("1000.01"), Decimal("0.001"), 1.5]),
]


@pytest.mark.parametrize(("kind", "values"), NOT_WRITTEN, ids=lambda one: str(one)[:40])
def test_values_that_are_not_of_their_type_are_not_written(kind: Any, values: list[Any], tmp_path: Path) -> None:
    for schema in (record(kind), fastavro.parse_schema(record(kind))):
        for value in values:
            with pytest.raises((ValueError, TypeError, OverflowError)):
                avro.write(tmp_path / "x", KEY, schema, [{"x0": value}])
            assert [*tmp_path.iterdir()] == []


def test_values_at_the_bounds_are_written(tmp_path: Path) -> None:
    """The header has the schema as it was given; options are fastavro's."""
    numpy = pytest.importorskip("numpy")
    kinds = ["null", "boolean", "boolean", "int", "int", "int", "long", "long", "float", "float", ["null", "float"]]
    values = [None, True, numpy.bool_(False), (1 << 31) - 1, -(1 << 31), numpy.int32(7), (1 << 63) - 1, -(1 << 63)]
    values += [LARGEST_FLOAT, math.inf, -LARGEST_FLOAT]
    schema = record(
        *kinds, {"type": "int", "logicalType": "date"}, DECIMAL, {"type": "enum", "name": "Float", "symbols": ["float"]}
    )
    schema["fields"].append({"name": "again", "type": {"type": "array", "items": "float"}})  # the enum
    row = {f"x{i}": value for i, value in enumerate([*values, date(2026, 1, 2), Decimal("1.23"), "float"])}
    length = avro.write(
        tmp_path / "x", KEY, schema, [{**row, "again": []}] * 3, codec="deflate", codec_compression_level=9,
        metadata={"m": "v"}, strict=True, sync_interval=1,
    )  # fmt: skip
    got = list(avro.read_split(tmp_path / "x", KEY, 0, 1 << 20, length=length))
    assert got == [{**row, "again": []}] * 3
    from ags_fast import AgsReader

    with AgsReader(tmp_path / "x", KEY, length=length) as file:
        made = fastavro.reader(file)
        assert json.loads(made.metadata["avro.schema"]) == schema
        assert made.metadata["m"] == "v"


# ------------------------------------------------------------------------------------------- as other programs write


@pytest.mark.parametrize("codec", ["zstandard", "bzip2", "xz"])
def test_several_members_in_a_block(codec: str) -> None:
    """RFC 8878, bzip2 and xz: members follow one another, and their contents belong together."""
    packed = {
        "zstandard": lambda data: pa.compress(data, "zstd", asbytes=True),
        "bzip2": bz2.compress,
        "xz": lzma.compress,
    }[codec]
    parts = [to_varint(n) + text(b"x" * n) for n in (1, 0, 200)]
    for bodies in (parts, [b"".join(parts)], [b"".join(parts)[:7], b"", b"".join(parts)[7:]]):
        plain = file_of(record("long", "string"), (3, b"".join(map(packed, bodies))), codec=codec)
        assert [row["x0"] for row in records_of(seal(plain))] == [1, 0, 200]
        assert len({*outcomes(plain).values()}) == 1
    cut = b"".join(map(packed, parts))[:-9]
    for damaged in (cut, packed(parts[0]) + b"\0" * 40 + packed(parts[1])):
        with pytest.raises(FormatError, match=r"intact|damaged"):
            batches_of(seal(file_of(record("long", "string"), (3, damaged), codec=codec)))
    bomb = packed(b"\0" * 1000) * 1000
    with pytest.raises(FormatError, match="more than 9999 bytes"):
        [*avro.read_split(seal(file_of(record("long"), (9, bomb), codec=codec)), KEY, 0, 1 << 20, length=None,
                          max_block_nbytes=9999)]  # fmt: skip


READ_ALTHOUGH: dict[str, tuple[Any, bytes, Any]] = {
    "precision is a text": ({"type": "bytes", "logicalType": "decimal", "precision": "5"}, text(b"\1"), b"\1"),
    "no precision": ({"type": "bytes", "logicalType": "decimal", "scale": 1}, text(b"\1"), b"\1"),
    "scale above precision": ({**DECIMAL, "precision": 1}, text(b"\1"), b"\1"),
    "scale below 0": ({**DECIMAL, "scale": -1}, text(b"\1"), b"\1"),
    "precision above the size": ({**DECIMAL, "type": "fixed", "name": "f", "size": 1}, b"\1", b"\1"),
    "a precision that fits": ({**DECIMAL, "size": 1}, text(b"\1"), Decimal("0.01")),
    "logical type of another": ({"type": "string", "logicalType": "date"}, text(b"x"), "x"),
    "logical type that is none": ({"type": "string", "logicalType": {}}, text(b"x"), "x"),
}


@pytest.mark.parametrize("what", READ_ALTHOUGH)
def test_impossible_logical_types_are_ignored(what: str) -> None:
    kind, body, value = READ_ALTHOUGH[what]
    sealed = seal(file_of(record(kind), (1, body)))
    assert records_of(sealed) == batches_of(sealed) == [{"x0": value}]


def test_schemas_as_others_write_them() -> None:
    odd = record("int")
    odd["fields"][0]["default"] = "none of an int's"
    for schema in (json.dumps(odd).encode(), b"\xef\xbb\xbf" + json.dumps(record("int")).encode()):
        sealed = seal(file_of(schema, (1, to_varint(5))))
        assert records_of(sealed) == batches_of(sealed) == [{"x0": 5}]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ({"type": "string", "logicalType": "uuid"}, text(b"not-a-uuid")),
        ({"type": "long", "logicalType": "timestamp-millis"}, to_varint(253402300800000)),  # the year 10000
        ({"type": "int", "logicalType": "date"}, to_varint((1 << 31) - 1)),
    ],
    ids=["uuid", "timestamp", "date"],
)
def test_values_that_python_does_not_have_are_no_damage(kind: Any, body: bytes) -> None:
    sealed = seal(file_of(record(kind), (1, body)))
    with pytest.raises(FormatError, match="values that no type of Python") as raised:
        records_of(sealed)
    assert "intact" not in str(raised.value)
    assert sum(batch.num_rows for batch in avro.read_batches(sealed, KEY, length=None)) == 1


@pytest.mark.parametrize("schema", [b"", b"{}", b"{", b'["null", "none"]', b"\xff"])
def test_errors_of_schemas_are_said_of_the_schema(schema: bytes) -> None:
    sealed = seal(file_of(schema, (1, b"\2")))
    for read in (records_of, batches_of):
        with pytest.raises(FormatError, match="schema") as raised:
            read(sealed)
        assert "intact" not in str(raised.value)
    with pytest.raises(FormatError, match="reader's schema") as raised:
        list(avro.read_split(seal(file_of(record("string"), (1, b"\0"))), KEY, 0, 1 << 20, length=None,
                             reader_schema=record("int")))  # fmt: skip
    assert "intact" not in str(raised.value)
