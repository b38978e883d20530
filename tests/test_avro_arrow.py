"""Avro decoded to Arrow: each decoder, each codec and any splits give what fastavro.reader gives of the plain file."""

from __future__ import annotations

import datetime
import decimal
import io
import json
import logging
import random
import string
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shares import rest_in_more
from support import KEY
from test_avro import PREFIX, cut_at, java_ids, seal, sync_marker, to_varint

from ags_fast import FormatError, IntegrityError

fastavro = pytest.importorskip("fastavro")
pa = pytest.importorskip("pyarrow")
from ags_fast import avro  # noqa: E402  # needs fastavro

if TYPE_CHECKING:
    from collections.abc import Sequence

CODECS = ("null", "deflate", "snappy", "bzip2", "xz", "zstandard")
DECODERS = ("ags_fast", "datafusion", "polars", "fastavro")
UTC = datetime.UTC
NOON = datetime.datetime(2026, 2, 3, 12, 30, 45, 123000)
RECORD = {"type": "record", "name": "inner", "fields": [{"name": "x", "type": ["null", "long"]}]}

# Avro type, Arrow type (as text), values as fastavro takes them, and as Arrow gives them if that is another.
TYPES: list[tuple[Any, str, list[Any], list[Any] | None]] = [
    ("null", "null", [None, None], None),
    ("boolean", "bool", [True, False], None),
    ("int", "int32", [0, -1, 2**31 - 1, -(2**31)], None),
    ("long", "int64", [0, 2**63 - 1, -(2**63)], None),
    ("float", "float", [0.5, -1e30], [0.5, -1.0000000150474662e30]),
    ("double", "double", [0.1, -1e300, float("inf")], None),
    ("bytes", "binary", [b"", b"\x00\xff"], None),
    ("string", "string", ["", "é\U0001f600"], None),
    ({"type": "string", "avro.java.string": "String"}, "string", ["x"], None),
    ({"type": "fixed", "name": "f", "size": 3}, "binary", [b"abc"], None),
    ({"type": "enum", "name": "e", "symbols": ["A", "B"]}, "string", ["B", "A"], None),
    ({"type": "int", "logicalType": "date"}, "date32[day]", [datetime.date(1969, 12, 31)], None),
    ({"type": "int", "logicalType": "time-millis"}, "time32[ms]", [NOON.time()], None),
    ({"type": "long", "logicalType": "time-micros"}, "time64[us]", [datetime.time(1, 2, 3, 4)], None),
    ({"type": "long", "logicalType": "timestamp-millis"}, "timestamp[ms, tz=UTC]", [NOON.replace(tzinfo=UTC)], None),
    ({"type": "long", "logicalType": "timestamp-micros"}, "timestamp[us, tz=UTC]", [NOON.replace(tzinfo=UTC)], None),
    ({"type": "long", "logicalType": "local-timestamp-millis"}, "timestamp[ms]", [NOON], None),
    ({"type": "long", "logicalType": "local-timestamp-micros"}, "timestamp[us]", [NOON], None),
    ({"type": "long", "logicalType": "timestamp-nanos"}, "int64", [1], None),
    ({"type": "int", "logicalType": "unheard-of"}, "int32", [7], None),
    ({"type": "string", "logicalType": "uuid"}, "string", [uuid.UUID(int=5)], [str(uuid.UUID(int=5))]),
    ({"type": "fixed", "name": "d", "size": 12, "logicalType": "duration"}, "binary", [bytes(range(12))], None),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2},
        "decimal128(10, 2)",
        [decimal.Decimal("1.23"), decimal.Decimal("-99999999.99"), decimal.Decimal("0.00")],
        None,
    ),
    (
        {"type": "fixed", "name": "m", "size": 16, "logicalType": "decimal", "precision": 38, "scale": 0},
        "decimal128(38, 0)",
        [decimal.Decimal(-(10**37)), decimal.Decimal(5)],
        None,
    ),
    ({"type": "array", "items": "int"}, "list<element: int32 not null>", [[1, 2], []], None),
    ({"type": "map", "values": ["null", "string"]}, "map<string, string>", [{"a": None, "b": "x"}, {}], None),
    (RECORD, "struct<x: int64>", [{"x": 1}, {"x": None}], None),
    ({"type": "record", "name": "hollow", "fields": []}, "struct<>", [{}, {}], None),
    (["null", RECORD], "struct<x: int64>", [None, {"x": None}, {"x": 2}], None),
    (["null", "int"], "int32", [None, 1], None),
    (["string", "null"], "string", ["x", None], None),
    (["long"], "int64", [1], None),
    (["null"], "null", [None], None),
    (["int", "long"], "int64", [1, 2**40], None),
    (["null", "float", "double"], "double", [None, 0.5], None),
    (
        ["null", "int", "string", RECORD],
        "struct<member0: int32, member1: string, member2: struct<x: int64>>",
        [None, 1, "x", {"x": 3}],
        [
            None,
            {"member0": 1, "member1": None, "member2": None},
            {"member0": None, "member1": "x", "member2": None},
            {"member0": None, "member1": None, "member2": {"x": 3}},
        ],
    ),
]


def schema_of(*types: Any) -> dict[str, Any]:
    """A record of these types. A named type may occur once."""
    return {"type": "record", "name": "row", "fields": [{"name": f"c{i}", "type": t} for i, t in enumerate(types)]}


def plain_file(schema: Any, rows: Sequence[Any], **options: Any) -> bytes:
    file = io.BytesIO()
    fastavro.writer(file, schema, rows, **options)
    return file.getvalue()


def table(plain: bytes, decoder: str = "auto", **options: Any) -> Any:
    opened = avro.AvroFile(io.BytesIO(plain))
    found = pa.Table.from_batches(opened.batches(decoder=decoder, **options), opened.schema)
    found.validate(full=True)
    return found


def rows_of(found: Any) -> list[Any]:
    """The rows, with maps as dicts."""
    if int(pa.__version__.partition(".")[0]) < 20:
        pytest.skip("pyarrow makes dicts of maps since 20")
    return found.to_pylist(maps_as_pydicts="lossy")


def taken_by(decoder: str, plain: bytes) -> bool:
    """Whether a decoder reads a file; it says so before it reads."""
    try:
        list(avro.AvroFile(io.BytesIO(plain)).batches(0, 0, decoder=decoder))
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        return False
    return True


# --------------------------------------------------------------------------------------------- types and codecs


@pytest.mark.parametrize("codec", CODECS)
def test_every_type_with_every_decoder(codec: str) -> None:
    reads = dict.fromkeys(DECODERS, 0)
    for avro_type, arrow, values, expected in TYPES:
        plain = plain_file(schema_of(avro_type), [{"c0": value} for value in values], codec=codec)
        for decoder in DECODERS:
            if not taken_by(decoder, plain):
                continue
            reads[decoder] += 1
            found = table(plain, decoder)
            assert str(found.schema.field(0).type) == arrow, (avro_type, decoder)
            assert [row["c0"] for row in rows_of(found)] == (expected or values), (avro_type, decoder)
    assert reads["fastavro"] == len(TYPES)
    assert reads["datafusion"] in (0, len(TYPES) - 5)
    assert reads["ags_fast"] == len(TYPES) - 9
    assert reads["polars"] in (0, len(TYPES) - 13)


def test_auto_takes_the_first_that_reads_and_says_which(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("datafusion")
    for avro_type, value, decoder in (("long", 1, "ags_fast"), (["int", "string"], 1, "fastavro")):
        caplog.clear()
        with caplog.at_level(logging.INFO, "ags_fast.avro"):
            table(plain_file(schema_of(avro_type), [{"c0": value}], codec="deflate"))
        assert caplog.messages[0].startswith(f"{decoder} decodes an Avro file of codec deflate")
    assert "datafusion: does not read union" in caplog.messages[0]


def test_columns_and_batches() -> None:
    rows = [{"c0": i, "c1": str(i), "c2": None, "c3": i / 2} for i in range(1000)]
    plain = plain_file(schema_of("long", "string", "null", "double"), rows, sync_interval=500)
    for decoder in ("auto", *DECODERS):
        if decoder != "auto" and not taken_by(decoder, plain):
            continue
        found = table(plain, decoder).select(["c3", "c0", "c2"])
        opened = avro.AvroFile(io.BytesIO(plain))
        batches = list(opened.batches(columns=["c3", "c0", "c2"], decoder=decoder, batch_size=70))
        assert max(len(batch) for batch in batches) <= 70
        assert pa.Table.from_batches(batches).equals(found)
        assert sum(len(batch) for batch in opened.batches(columns=["c2"], decoder=decoder)) == 1000
    for wrong in ({"columns": ["c9"]}, {"decoder": "spark"}, {"batch_size": 0}, {"start": 5, "end": 4}):
        with pytest.raises(ValueError, match=r"c9|spark|batch_size|split"):
            avro.AvroFile(io.BytesIO(plain)).batches(**wrong)


@pytest.mark.parametrize(
    ("avro_type", "message"),
    [
        ({"type": "record", "name": "tree", "fields": [{"name": "l", "type": ["null", "tree"]}]}, "holds itself"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 39}, "39 digits"),
        ({"type": "array", "items": "null"}, "without bytes"),
    ],
)
def test_types_that_arrow_cannot_express(avro_type: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        avro.AvroFile(io.BytesIO(plain_file(schema_of(avro_type), [])))


@pytest.mark.parametrize("schema", ["", "[]", '"long"', '{"type": "record"}', '{"type": "unknown"}', "[" * 5000])
def test_malformed_schemas(schema: str) -> None:
    plain = b"Obj\x01" + to_varint(1) + to_varint(11) + b"avro.schema" + to_varint(len(schema)) + schema.encode()
    with pytest.raises(FormatError):
        avro.AvroFile(io.BytesIO(plain + b"\x00" + bytes(16)))


# ------------------------------------------------------------------------------------------------------- splits

ROW = schema_of("long", ["null", "string"], {"type": "array", "items": "double"}, "bytes")


def make_rows(count: int) -> list[dict[str, Any]]:
    draw = random.Random(count)
    return [
        {
            "c0": i,
            "c1": None if i % 3 else "é" * draw.randrange(30),
            "c2": [draw.random() for _ in range(i % 4)],
            "c3": draw.randbytes(draw.randrange(30)),
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("block_size", [1000, 1 << 20])
def test_splits_give_each_record_once(codec: str, block_size: int) -> None:
    rows = make_rows(400)
    plain = plain_file(ROW, rows, codec=codec, sync_interval=700)
    sealed = seal(plain, block_size)
    for parts in (1, 2, 3, 7, 20):
        found = []
        for start, end in cut_at(range(0, len(plain), -(-len(plain) // parts)), len(plain)):
            batches = avro.read_batches(sealed, KEY, start, end, length=len(sealed), aad_prefix=PREFIX)
            ids = [i for batch in batches for i in batch.column("c0").to_pylist()]
            assert ids == java_ids(plain, start, end)
            found += ids
        assert found == list(range(400))


@pytest.mark.parametrize("block_size", [7, 4096])
def test_two_splits_cut_at_every_byte(block_size: int) -> None:
    plain = plain_file(ROW, make_rows(9), sync_interval=150)
    sealed = seal(plain, block_size)
    for cut in range(len(plain) + 1):
        for start, end in ((0, cut), (cut, len(plain))):
            options: dict[str, Any] = {"length": len(sealed), "aad_prefix": PREFIX, "decoder": "fastavro"}
            found = avro.read_batches(sealed, KEY, start, end, **options)
            assert [i for batch in found for i in batch.column("c0").to_pylist()] == java_ids(plain, start, end)


def test_large_headers_blocks_without_records_and_blocks_larger_than_a_piece() -> None:
    rows = [{**row, "c3": bytes(9 << 20)} for row in make_rows(3)]
    plain = plain_file(ROW, rows, sync_interval=1, metadata={"note": "x" * 300_000})
    marker, at = sync_marker(plain)
    hollow = to_varint(0) + to_varint(0) + marker
    plain = plain[: at + 16] + 3 * hollow + plain[at + 16 :] + hollow
    for decoder in ("auto", "fastavro"):
        assert rows_of(table(plain, decoder)) == rows
    assert table(plain_file(ROW, [])).num_rows == 0
    assert table(plain_file(schema_of(), [{}] * 5)).num_rows == 5


# --------------------------------------------------------------------------------------------- any schema at all


def has_no_bytes(schema: Any) -> bool:
    if isinstance(schema, dict) and schema["type"] == "record":
        return all(has_no_bytes(field["type"]) for field in schema["fields"])
    return bool(schema == "null")


@st.composite
def typed(draw: Any, depth: int = 0) -> tuple[Any, Any]:
    """A type without names, and a strategy for its values."""
    scalars: list[tuple[Any, Any]] = [
        ("boolean", st.booleans()),
        ("int", st.integers(-(2**31), 2**31 - 1)),
        ("long", st.integers(-(2**63), 2**63 - 1)),
        ("float", st.floats(width=32, allow_nan=False)),
        ("double", st.floats(allow_nan=False)),
        ("bytes", st.binary(max_size=20)),
        ("string", st.text(max_size=10)),
        ({"type": "enum", "symbols": ["A", "B", "C"]}, st.sampled_from("ABC")),
        ({"type": "fixed", "size": 5}, st.binary(min_size=5, max_size=5)),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 3},
            st.integers(-(10**9) + 1, 10**9 - 1).map(lambda i: decimal.Decimal(i).scaleb(-3)),
        ),
        ("null", st.none()),
    ]
    kinds = ["scalar", "optional", "optional", *(["array", "map", "record"] if depth < 3 else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "scalar":
        return draw(st.sampled_from(scalars))
    if kind == "record":
        fields = draw(st.lists(typed(depth + 1), max_size=3))
        schema = {"type": "record", "fields": [{"name": f"x{i}", "type": t} for i, (t, _) in enumerate(fields)]}
        return schema, st.fixed_dictionaries({f"x{i}": values for i, (_, values) in enumerate(fields)})
    inner, values = draw(typed(depth + 1))
    if kind == "array" and not has_no_bytes(inner):
        return {"type": "array", "items": inner}, st.lists(values, max_size=3)
    if kind == "map":
        return {"type": "map", "values": inner}, st.dictionaries(
            st.text(string.ascii_letters, max_size=3), values, max_size=3
        )
    if isinstance(inner, list) or inner == "null" or kind == "array":
        return inner, values
    return draw(st.sampled_from([["null", inner], [inner, "null"]])), st.none() | values


def with_names(schema: Any) -> Any:
    """Named types with a name each."""
    numbers = iter(range(10_000))

    def walk(one: Any) -> Any:
        if isinstance(one, list):
            return [walk(branch) for branch in one]
        if not isinstance(one, dict):
            return one
        named = {"name": f"n{next(numbers)}"} if one.get("type") in ("record", "enum", "fixed") else {}
        found = {key: walk(value) if key in ("type", "items", "values") else value for key, value in one.items()}
        if "fields" in one:
            found["fields"] = [walk(field) for field in one["fields"]]
        return {**found, **named} if "type" in one and "name" not in one else found

    return walk(schema)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_schema_with_any_decoder(data: st.DataObject) -> None:
    fields = data.draw(st.lists(typed(), min_size=1, max_size=4), "fields")
    schema = with_names(schema_of(*(avro_type for avro_type, _ in fields)))
    one = st.fixed_dictionaries({f"c{i}": values for i, (_, values) in enumerate(fields)})
    rows = data.draw(st.lists(one, max_size=12), "rows")
    codec = data.draw(st.sampled_from(["null", "deflate", "zstandard"]), "codec")
    plain = plain_file(schema, rows, codec=codec, sync_interval=data.draw(st.sampled_from([1, 50, 16000])))
    expected = [*fastavro.reader(io.BytesIO(plain))]
    reference = table(plain, "fastavro")
    assert rows_of(reference) == expected
    for decoder in DECODERS[:3]:
        if taken_by(decoder, plain):
            assert table(plain, decoder).equals(reference), decoder
            part = data.draw(st.integers(0, len(fields) - 1))
            assert table(plain, decoder).select([part]).equals(reference.select([part]))


# ------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("rounds", rest_in_more([100, 400], 100))
def test_damaged_plaintext_is_a_format_error_or_right_for_all(rounds: int) -> None:
    """Bytes that were wrong before they were sealed. Where one decoder reads them, all do, and find the same."""
    schema = with_names(
        schema_of(
            "string",
            {"type": "array", "items": ["null", "string"]},
            {"type": "map", "values": "long"},
            {"type": "enum", "symbols": ["A", "B"]},
            ["null", "double"],
            {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 1},
        )
    )
    rows = [
        {"c0": "é" * i, "c1": [None, "x"] * i, "c2": {"k": i}, "c3": "AB"[i % 2], "c4": 0.5, "c5": decimal.Decimal(i)}
        for i in range(6)
    ]
    flat = schema_of("string", ["null", "long"], "double", "bytes")
    flat_rows = [{"c0": "é", "c1": i or None, "c2": 0.5, "c3": b"xy"} for i in range(6)]
    draw = random.Random(1)
    outcomes = {"read": 0, "refused": 0}
    for plain in (plain_file(schema, rows), plain_file(flat, flat_rows)):
        begin = sync_marker(plain)[1] + 18
        decoders = [decoder for decoder in DECODERS if taken_by(decoder, plain)]
        for _ in range(rounds):
            damaged = bytearray(plain)
            for _ in range(draw.choice((1, 1, 3))):
                damaged[draw.randrange(begin, len(plain) - 16)] = draw.choice((0, 1, 128, 255, draw.randrange(256)))
            found = []
            for decoder in decoders:
                try:
                    found.append(table(bytes(damaged), decoder))
                except FormatError:
                    found.append(None)
            outcomes["refused" if found[0] is None else "read"] += 1
            assert len({one is None for one in found}) == 1, (decoders, found, bytes(damaged)[begin - 2 :])
            assert found[0] is None or all(str(rows_of(one)) == str(rows_of(found[0])) for one in found)
    assert min(outcomes.values()) > rounds / 8


def test_cut_plaintext_and_changed_ciphertext() -> None:
    plain = plain_file(ROW, make_rows(12), sync_interval=150)
    ends = {len(plain[:i]) for i in range(len(plain)) if plain[:i].endswith(sync_marker(plain)[0])}
    for size in range(len(plain)):
        if size not in ends:
            with pytest.raises(FormatError):
                table(plain[:size])
    sealed = bytearray(seal(plain, 64))
    sealed[len(sealed) // 2] ^= 1
    with pytest.raises(IntegrityError):
        list(avro.read_batches(sealed, KEY, length=len(sealed), aad_prefix=PREFIX))
    with pytest.raises(FormatError, match=r"codec|unknown"):
        table(plain.replace(b"avro.codec\x08null", b"avro.codec\x08nope"))


@pytest.mark.parametrize("codec", CODECS[1:])
def test_a_block_that_decompresses_to_more_than_the_limit(codec: str) -> None:
    """A small block that would fill the memory is refused, and read if the caller raises the limit."""
    nbytes = 3 << 20
    plain = plain_file(schema_of("bytes"), [{"c0": bytes(nbytes)}], codec=codec)
    source = io.BytesIO(plain)
    with pytest.raises(FormatError, match="max_block_nbytes"):
        list(avro.AvroFile(source, max_block_nbytes=nbytes).batches())
    (batch,) = avro.AvroFile(source, max_block_nbytes=nbytes + 8).batches()
    assert batch.column(0).to_pylist() == [bytes(nbytes)]


@pytest.mark.more
@pytest.mark.parametrize("codec", CODECS[1:])
def test_many_blocks_that_decompress_to_much_are_decoded_one_by_one(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressed blocks of one read are given to the decoder in parts of bounded size."""
    from ags_fast.avro import container, decoders, reading

    sizes: list[int] = []
    decode = decoders.decode

    def watched(name: str, node: Any, header: bytes, blocks: Any, *rest: Any) -> Any:
        sizes.append(sum(memoryview(body).nbytes for _, body in blocks))
        return decode(name, node, header, blocks, *rest)

    monkeypatch.setattr(reading, "decode", watched)
    size = container.PIECE_NBYTES // 4
    plain = plain_file(schema_of("bytes"), [{"c0": bytes(size)} for _ in range(20)], codec=codec, sync_interval=1)
    assert len(plain) < container.PIECE_NBYTES
    assert sum(len(batch) for batch in avro.AvroFile(io.BytesIO(plain)).batches(decoder="fastavro")) == 20
    assert len(sizes) == 5
    assert max(sizes) < 5 * size


@pytest.mark.parametrize("codec", CODECS[1:])
def test_compressed_blocks_that_are_damaged(codec: str) -> None:
    rows = [{"c0": i, "c1": f"text {i % 7}"} for i in range(3000)]
    plain = bytearray(plain_file(schema_of("long", "string"), rows, codec=codec))
    good = rows_of(table(bytes(plain)))
    begin = sync_marker(bytes(plain))[1] + 16
    rng = random.Random(5)
    refused = 0
    for _ in range(60):
        bad = bytearray(plain)
        bad[rng.randrange(begin, len(plain) - 16)] ^= 1 << rng.randrange(8)
        try:
            assert len(rows_of(table(bytes(bad)))) == len(good)
        except FormatError:
            refused += 1
    assert refused > 5


def test_header_keeps_nothing_of_the_schema() -> None:
    """A schema with a name that is looked up twice, in a namespace, with defaults and documentation."""
    inner = {"type": "enum", "name": "kind", "symbols": ["A"], "doc": "x"}
    fields = [
        {"name": "a", "type": inner, "default": "A", "aliases": ["b"]},
        {"name": "c", "type": "kind"},
        {"name": "d", "type": ["null", "n.s.kind"], "default": None},
    ]
    schema = {"type": "record", "name": "row", "namespace": "n.s", "fields": fields}
    rows = [{"a": "A", "c": "A", "d": None}, {"a": "A", "c": "A", "d": "A"}]
    plain = plain_file(json.loads(json.dumps(schema)), rows)
    for decoder in DECODERS:
        if taken_by(decoder, plain):
            assert rows_of(table(plain, decoder)) == rows
