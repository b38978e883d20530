"""What the engine encodes of Arrow's arrays: the blocks that fastavro makes of the same rows, byte for byte."""

from __future__ import annotations

import io
import struct
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

fastavro = pytest.importorskip("fastavro")
pa = pytest.importorskip("pyarrow")
t = pytest.importorskip("pyspark.sql.types")

from ags_fast import _core, avro  # noqa: E402
from ags_fast.spark.datasource.avro_writing import SYNC_NBYTES, AvroFile, AvroFormat  # noqa: E402
from ags_fast.spark.datasource.conversion import arrow_schema  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

Drawn = tuple[Any, st.SearchStrategy[Any]]  # a type of Spark, and its values as fastavro takes them


def whole(bits: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(-(1 << bits - 1), (1 << bits - 1) - 1), st.sampled_from((0, -(1 << bits - 1))))


def decimals(precision: int, scale: int) -> Drawn:
    most = 10**precision - 1
    return t.DecimalType(precision, scale), st.integers(-most, most).map(lambda n: Decimal(f"{n}e-{scale}"))


SCALARS: list[Drawn] = [
    (t.BooleanType(), st.booleans()),
    (t.ByteType(), whole(8)),
    (t.ShortType(), whole(16)),
    (t.IntegerType(), whole(32)),
    (t.LongType(), whole(64)),
    (t.DateType(), whole(32)),
    (t.TimestampType(), whole(64)),
    (t.TimestampNTZType(), whole(64)),
    (t.DayTimeIntervalType(), whole(64)),
    (t.FloatType(), st.floats(width=32)),
    (t.DoubleType(), st.floats()),
    (t.StringType(), st.text(max_size=20)),
    (t.BinaryType(), st.binary(max_size=200)),
    (t.NullType(), st.none()),
    *(decimals(*digits) for digits in ((1, 0), (2, 2), (3, 0), (9, 2), (18, 18), (20, 5), (38, 10))),
]


def maybe(drawn: Drawn) -> st.SearchStrategy[tuple[Any, bool, Any]]:
    kind, values = drawn
    nullable = st.just(True) if isinstance(kind, t.NullType) else st.booleans()
    return nullable.map(lambda null: (kind, null, st.none() | values if null else values))


def array_of(drawn: Drawn) -> st.SearchStrategy[Drawn]:
    return maybe(drawn).map(lambda one: (t.ArrayType(one[0], one[1]), st.lists(one[2], max_size=3)))


def map_of(drawn: Drawn) -> st.SearchStrategy[Drawn]:
    def made(one: tuple[Any, bool, Any]) -> Drawn:
        return t.MapType(t.StringType(), one[0], one[1]), st.dictionaries(st.text(max_size=5), one[2], max_size=3)

    return maybe(drawn).map(made)


def record_of(fields: Sequence[tuple[Any, bool, Any]]) -> Drawn:
    named = {f"f{i}": field for i, field in enumerate(fields)}
    kind = t.StructType([t.StructField(name, kind, null) for name, (kind, null, _) in named.items()])
    return kind, st.fixed_dictionaries({name: values for name, (_, _, values) in named.items()})


def types() -> st.SearchStrategy[Drawn]:
    def nested(inner: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
        records = st.lists(inner.flatmap(maybe), max_size=3).map(record_of)
        return st.one_of(inner.flatmap(array_of), inner.flatmap(map_of), records)

    return st.recursive(st.sampled_from(SCALARS), nested, max_leaves=5)


def schema(*kinds: Any, nullable: bool = True) -> Any:
    return t.StructType([t.StructField(f"f{i}", kind, nullable) for i, kind in enumerate(kinds)])


class Kept(io.BytesIO):
    """What is in it can be had when it is closed."""

    def close(self) -> None:
        self.whole = self.getvalue()
        super().close()


def written(spark: Any, *tables: Any, codec: str = "null") -> bytes:
    file = Kept()
    made = AvroFile(file, AvroFormat(spark, codec))
    for table in tables:
        made.write_table(table)
    made.close()
    return file.whole


def by_fastavro(spark: Any, rows: Sequence[Any], codec: str = "null") -> bytes:
    file = io.BytesIO()
    fastavro.writer(file, AvroFormat(spark, codec).avro, rows, codec, SYNC_NBYTES)
    return file.getvalue()


def blocks(data: bytes) -> list[tuple[int, bytes]]:
    return [(block.num_records, block.bytes_.getvalue()) for block in fastavro.block_reader(io.BytesIO(data))]


def table_of(spark: Any, rows: Sequence[Any]) -> Any:
    arrow = arrow_schema(spark)
    columns = [pa.array([row[field.name] for row in rows], field.type) for field in arrow]
    return pa.Table.from_arrays(columns, schema=arrow)


def same(spark: Any, rows: Sequence[Any], *tables: Any) -> None:
    """What is written of tables is what fastavro writes of rows."""
    ours, theirs = written(spark, *(tables or [table_of(spark, rows)])), by_fastavro(spark, rows)
    assert blocks(ours) == blocks(theirs)
    with io.BytesIO(ours) as one, io.BytesIO(theirs) as other:
        assert fastavro.reader(one).writer_schema == fastavro.reader(other).writer_schema


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_rows_of_any_types(data: st.DataObject) -> None:
    """Also of slices: the rows before and after what is written count for nothing."""
    kind, values = record_of(data.draw(st.lists(types().flatmap(maybe), min_size=1, max_size=4), "fields"))
    rows = data.draw(st.lists(values, max_size=12), "rows")
    begin, middle, end = sorted(data.draw(st.integers(0, len(rows)), "cut") for _ in range(3))
    table = table_of(kind, rows)
    same(kind, rows[begin:end], table.slice(begin, middle - begin), table.slice(middle, end - middle))


@pytest.mark.parametrize("drawn", SCALARS, ids=lambda drawn: drawn[0].simpleString())
def test_each_type(drawn: Drawn) -> None:
    @settings(max_examples=20)
    @given(rows=st.lists(st.fixed_dictionaries({"f0": st.none() | drawn[1]}), min_size=1, max_size=20))
    def check(rows: list[Any]) -> None:
        same(schema(drawn[0]), rows)

    check()


def test_bits_of_numbers() -> None:
    """A NaN keeps its bits, and zero its sign."""
    patterns = [0x7FF8000000000001, 0xFFF0000000000123, 0x8000000000000000, 0x7FEFFFFFFFFFFFFF]
    data = struct.pack("<4Q", *patterns)
    array = pa.Array.from_buffers(pa.float64(), 4, [None, pa.py_buffer(data)])
    found = blocks(written(schema(t.DoubleType(), nullable=False), pa.table([array], ["f0"])))
    assert found == [(4, data)]


@pytest.mark.parametrize("nbytes", [SYNC_NBYTES - 1, SYNC_NBYTES, SYNC_NBYTES + 1, 5 * SYNC_NBYTES])
@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_ends_of_blocks(nbytes: int, codec: str) -> None:
    """A block of exactly the limit, a row that is larger than a block, and blocks over several tables."""
    spark = schema(t.BinaryType(), nullable=False)
    rows = [{"f0": bytes(size)} for size in (nbytes - 3, 0, nbytes // 2 - 3, nbytes // 2 - 3, 1, nbytes, 0)]
    whole = table_of(spark, rows)
    for tables in ([whole], [whole.slice(i, 1) for i in range(len(rows))]):
        same(spark, rows, *tables)
        ours = written(spark, *tables, codec=codec)
        assert blocks(ours) == blocks(by_fastavro(spark, rows, codec))
        assert pa.Table.from_batches(avro.AvroFile(io.BytesIO(ours)).batches()).to_pylist() == rows


def test_many_rows() -> None:
    """Our own reader, which gets them with every codec, too."""
    spark = schema(t.LongType(), t.StringType(), t.DoubleType(), t.BooleanType(), t.DecimalType(9, 2))
    rows = [
        {"f0": i << i % 48, "f1": None if i % 7 else str(i), "f2": i / 3, "f3": i % 3 == 0, "f4": Decimal(i).scaleb(-2)}
        for i in range(20_000)
    ]
    table = table_of(spark, rows)
    same(spark, rows, table)
    for codec in ("null", "deflate"):
        file = avro.AvroFile(io.BytesIO(written(spark, table, codec=codec)))
        assert pa.Table.from_batches(file.batches(), file.schema).to_pylist() == rows


@pytest.mark.parametrize("tables", [0, 1])
def test_no_rows(tables: int) -> None:
    spark = schema(t.LongType(), t.StringType(), t.ArrayType(t.LongType()), t.StructType([]))
    data = written(spark, *[table_of(spark, [])] * tables)
    assert blocks(data) == []
    assert len(fastavro.reader(io.BytesIO(data)).writer_schema["fields"]) == 4


def test_rows_without_bytes() -> None:
    spark = schema(t.NullType())
    assert blocks(written(spark, pa.table([pa.nulls(5)], ["f0"]))) == [(5, b"")]


def test_arrays_that_begin_inside_of_others() -> None:
    """A list of a slice, a struct of slices and a slice of it: each has a first row of its own."""
    lists = pa.ListArray.from_arrays(pa.array([1, 1, 3, None, 4], pa.int32()), pa.array([9, 0, 1, 2, 3, 4]).slice(1))
    structs = pa.StructArray.from_arrays(
        [lists.slice(1), pa.array(["a", None, "c", "d"]).slice(1)], ["x", "y"], mask=pa.array([False, True, False])
    )
    inner = t.StructType([t.StructField("x", t.ArrayType(t.LongType())), t.StructField("y", t.StringType())])
    spark = schema(inner)
    for begin in range(4):
        part = structs.slice(begin)
        same(spark, [{"f0": value} for value in part.to_pylist()], pa.table([part], ["f0"]))


def test_values_that_the_schema_does_not_have() -> None:
    """Null in a struct where the schema has none, bytes that are no text, more digits than there may be."""
    inner = pa.StructArray.from_arrays([pa.array([1, None])], ["x"])
    spark = schema(t.StructType([t.StructField("x", t.LongType(), False)]))
    with pytest.raises(ValueError, match="null"):
        written(spark, pa.table([inner], ["f0"]))
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    with pytest.raises(ValueError, match="UTF"):
        written(schema(t.StringType()), pa.table([broken], ["f0"]))
    large = pa.Array.from_buffers(pa.decimal128(2, 0), 1, pa.array([Decimal(128)], pa.decimal128(3, 0)).buffers())
    with pytest.raises(ValueError, match="precision"):
        written(schema(t.DecimalType(2, 0)), pa.table([large], ["f0"]))


ONE = (_core.AVRO_NUMBER, False, 8, 1, 0, 1, [None, bytes(8)])


@pytest.mark.parametrize(
    "arrays",
    [
        [(*ONE[:-1], [None, bytes(7)])],
        [(*ONE[:-1], [b"", bytes(8)])],
        [(*ONE[:-1], [None, None])],
        [(*ONE[:4], 1, 1, [None, bytes(8)])],
        [(*ONE[:4], 2**64 - 1, 1, [None, bytes(8)])],
        [(*ONE[:4], 0, 2**63, [None, bytes(8)])],
        [(*ONE[:4], 0, 0, ONE[-1])],
        [(*ONE[:3], 2, 0, 1, ONE[-1])],
        [(_core.AVRO_INT, False, 3, 1, 0, 1, ONE[-1])],
        [(_core.AVRO_BYTES, False, 0, 1, 0, 1, [None, bytes(4), b""])],
        [(_core.AVRO_BYTES, False, 0, 1, 0, 1, [None, struct.pack("<2i", 0, 1), b""])],
        [(_core.AVRO_ITEMS, False, 0, 1, 0, 1, [None, bytes(8)])],
        [(99, False, 0, 1, 0, 1, [None])],
    ],
)
def test_arrays_that_are_none(arrays: Any) -> None:
    assert _core.avro_records([ONE], 0, 1, 1) == (1, b"\x00")
    with pytest.raises(ValueError, match=r"rows|int|Avro"):
        _core.avro_records(arrays, 0, 1, 1)
