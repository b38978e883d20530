"""Small plaintext Parquet files that between them have what the format has, made by pyarrow, the same each time.

`CORPUS` has them by name; `rows` is what is in one of them.
"""

from __future__ import annotations

import datetime
import decimal
import random
from typing import TYPE_CHECKING, Any

import pytest
from parquet_peers import CTR, GCM, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = 600

CORPUS: dict[str, Callable[[Path], None]] = {}

# What a peer does not read in plaintext either.
UNREADABLE = {
    "parquet-java": {"no columns"},
    "duckdb": {"no columns"},
    "fastparquet": {
        *(f"v2 {codec} {encoding}" for codec in ("none", "snappy", "zstd") for encoding in ("dictionary", "plain")),
        "checksums v2",
        "encodings",
        "names with dots",
        "nested v2",
    },
}


def rows(path: Path) -> list[dict[str, Any]]:
    return rows_of(pq.ParquetFile(path).read())


def in_corpus(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def add(make: Callable[[Path], None]) -> Callable[[Path], None]:
        CORPUS[name] = make
        return make

    return add


def flat(count: int = ROWS, seed: int = 0) -> Any:
    """Columns that differ in what encodings make of them, with nulls, and one that has none."""
    draw = random.Random(seed)
    words = ["", "a", "Zürich", "a longer text that compresses " * 3]
    table = pa.table(
        {
            "id": pa.array(range(count), pa.int64()),
            "number": pa.array([draw.choice([None, draw.randrange(1 << 40)]) for _ in range(count)], pa.int64()),
            "small": pa.array([draw.randrange(9) for _ in range(count)], pa.int32()),
            "real": pa.array([draw.choice([None, float("nan"), draw.random()]) for _ in range(count)], pa.float64()),
            "text": pa.array([draw.choice([None, *words]) for _ in range(count)], pa.string()),
            "bytes": pa.array([draw.randbytes(draw.randrange(40)) for _ in range(count)], pa.binary()),
            "flag": pa.array([draw.choice([None, True, False]) for _ in range(count)], pa.bool_()),
        }
    )
    return table.cast(table.schema.set(0, pa.field("id", pa.int64(), nullable=False)))


def nested(count: int = ROWS, seed: int = 0) -> Any:
    draw = random.Random(seed)

    def some(make: Callable[[], Any], most: int = 4) -> Any:
        return draw.choice([None, [], [make() for _ in range(draw.randrange(1, most))]])

    def person() -> Any:
        return draw.choice([None, {"name": draw.choice([None, "x", "yy"]), "age": draw.randrange(99)}])

    struct = pa.struct([("name", pa.string()), ("age", pa.int32())])
    return pa.table(
        {
            "list": pa.array(
                [some(lambda: draw.choice([None, draw.randrange(9)])) for _ in range(count)], pa.list_(pa.int32())
            ),
            "deep": pa.array([some(lambda: some(person)) for _ in range(count)], pa.list_(pa.list_(struct))),
            "struct": pa.array([person() for _ in range(count)], struct),
            "map": pa.array(
                [draw.choice([None, [], [("k", draw.randrange(9)), ("l", None)]]) for _ in range(count)],
                pa.map_(pa.string(), pa.int64()),
            ),
            "id": pa.array(range(count), pa.int64()),
        }
    )


for _version in ("1.0", "2.0"):
    for _codec in ("none", "snappy", "zstd"):
        for _dictionary in (True, False):

            @in_corpus(f"v{_version[0]} {_codec} {'dictionary' if _dictionary else 'plain'}")
            def _flat(path: Path, version: str = _version, codec: str = _codec, dictionary: bool = _dictionary) -> None:
                options = {"data_page_version": version, "compression": codec, "use_dictionary": dictionary}
                pq.write_table(flat(), path, row_group_size=ROWS // 2 + 1, **options)


@in_corpus("nested")
def _nested(path: Path) -> None:
    pq.write_table(nested(), path, row_group_size=ROWS // 3, write_page_index=True, max_rows_per_page=50)


@in_corpus("nested v2")
def _nested_v2(path: Path) -> None:
    pq.write_table(nested(), path, data_page_version="2.0", max_rows_per_page=50, write_page_checksum=True)


@in_corpus("all types")
def _types(path: Path) -> None:
    """Without nulls, which "flat" has, so that peers with other nulls can be compared as well."""
    n = range(50)
    moment = datetime.datetime(2024, 2, 29, 12, 34, 56, 789000)
    table = pa.table(
        {
            **{
                str(kind): pa.array(n, kind)
                for kind in (pa.int8(), pa.int16(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
            },
            "float": pa.array([i / 8 for i in n], pa.float32()),
            "half": pa.array([i / 8 for i in n], pa.float16()),
            "fixed": pa.array([bytes([i]) * 5 for i in n], pa.binary(5)),
            "decimal9": pa.array([decimal.Decimal(i) / 4 for i in n], pa.decimal128(9, 2)),
            "decimal38": pa.array([decimal.Decimal(i - 25) * 10**30 for i in n], pa.decimal128(38, 0)),
            "date": pa.array([moment.date() + datetime.timedelta(i) for i in n], pa.date32()),
            "time": pa.array([datetime.time(i % 24, i, 1) for i in n], pa.time64("us")),
            "local": pa.array([moment + datetime.timedelta(i) for i in n], pa.timestamp("ms")),
            "instant": pa.array([moment + datetime.timedelta(i) for i in n], pa.timestamp("us", "UTC")),
            "category": pa.array([f"c{i % 3}" for i in n]).dictionary_encode(),
        }
    )
    pq.write_table(table, path)


@in_corpus("int96")
def _int96(path: Path) -> None:
    moments = pa.array(range(0, 10**12, 10**10), pa.timestamp("us"))
    pq.write_table(pa.table({"moment": moments}), path, use_deprecated_int96_timestamps=True)


@in_corpus("encodings")
def _encodings(path: Path) -> None:
    """One encoding per column, and a codec of its own."""
    table = flat().select(["id", "number", "real", "text", "bytes", "small"])
    encodings = {
        "id": "DELTA_BINARY_PACKED",
        "number": "BYTE_STREAM_SPLIT",
        "real": "BYTE_STREAM_SPLIT",
        "text": "DELTA_BYTE_ARRAY",
        "bytes": "DELTA_LENGTH_BYTE_ARRAY",
        "small": "PLAIN",
    }
    codecs = {"id": "gzip", "number": "lz4", "real": "zstd", "text": "snappy", "bytes": "none", "small": "gzip"}
    pq.write_table(table, path, use_dictionary=False, column_encoding=encodings, compression=codecs)


@in_corpus("old version")
def _old(path: Path) -> None:
    """Format 1.0, without statistics or a schema of Arrow's."""
    pq.write_table(flat(), path, version="1.0", write_statistics=False, store_schema=False)


@in_corpus("page index")
def _page_index(path: Path) -> None:
    """Sorted by id: a filter on it leaves few pages of few row groups."""
    pq.write_table(
        flat(), path, row_group_size=200, write_page_index=True, max_rows_per_page=20, write_page_checksum=True
    )


@in_corpus("no page index")
def _no_page_index(path: Path) -> None:
    pq.write_table(flat(), path, row_group_size=200, max_rows_per_page=20)


@in_corpus("bloom filters")
def _bloom_filters(path: Path) -> None:
    """On text and id. id has even numbers only, in an order that leaves statistics without use."""
    ids = [(i * 7919) % ROWS * 2 for i in range(ROWS)]
    table = flat().set_column(0, "id", pa.array(ids, pa.int64()))
    options = {"id": {"ndv": 300, "fpp": 0.001}, "text": {"ndv": 10}}
    pq.write_table(
        table, path, row_group_size=300, use_dictionary=["text"], bloom_filter_options=options, write_page_index=True
    )


@in_corpus("checksums")
def _checksums(path: Path) -> None:
    pq.write_table(flat(), path, write_page_checksum=True, data_page_size=1000)


@in_corpus("checksums v2")
def _checksums_v2(path: Path) -> None:
    pq.write_table(flat(), path, write_page_checksum=True, data_page_size=1000, data_page_version="2.0")


@in_corpus("sorting columns")
def _sorting(path: Path) -> None:
    order = [pq.SortingColumn(2), pq.SortingColumn(0, descending=True, nulls_first=True)]
    table = flat().sort_by([("small", "ascending"), ("id", "descending")])
    pq.write_table(table, path, sorting_columns=order, row_group_size=250)


@in_corpus("key-value metadata")
def _key_value(path: Path) -> None:
    table = flat().replace_schema_metadata({"owner": "tests", "empty": "", "long": "x" * 5000})
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"later": "\u00fc"})


@in_corpus("empty table")
def _empty(path: Path) -> None:
    pq.write_table(flat(0), path)


@in_corpus("no row group")
def _no_row_group(path: Path) -> None:
    with pq.ParquetWriter(path, flat(0).schema):
        pass


@in_corpus("no columns")
def _no_columns(path: Path) -> None:
    pq.write_table(pa.table({}), path)


@in_corpus("row group without rows")
def _zero_rows(path: Path) -> None:
    table = flat(100)
    with pq.ParquetWriter(path, table.schema, write_page_index=True) as writer:
        for part in (table.slice(0, 60), table.slice(0, 0), table.slice(60)):
            writer.write_table(part)


@in_corpus("one row")
def _one_row(path: Path) -> None:
    pq.write_table(flat(1), path, write_page_index=True, write_page_checksum=True)


@in_corpus("nulls only")
def _nulls(path: Path) -> None:
    table = pa.table(
        {
            "null": pa.nulls(100),
            "number": pa.nulls(100, pa.int64()),
            "list": pa.nulls(100, pa.list_(pa.string())),
            "id": pa.array(range(100), pa.int64()),
        }
    )
    pq.write_table(table, path, row_group_size=40, write_page_index=True)


@in_corpus("nulls only v2")
def _nulls_v2(path: Path) -> None:
    table = pa.table({"number": pa.nulls(100, pa.int64()), "id": pa.array(range(100), pa.int64())})
    pq.write_table(table, path, data_page_version="2.0", write_page_index=True, write_page_checksum=True)


@in_corpus("40 columns")
def _wide(path: Path) -> None:
    pq.write_table(pa.table({f"c{i}": pa.array(range(i, i + 20), pa.int32()) for i in range(40)}), path)


@in_corpus("20 row groups")
def _many_groups(path: Path) -> None:
    pq.write_table(flat(200).select(["id", "text"]), path, row_group_size=10, write_page_index=True)


@in_corpus("names with dots")
def _dots(path: Path) -> None:
    """The column "a.b" and the column b of "a" have the same dotted path."""
    table = pa.table(
        {
            "a.b": pa.array(range(100), pa.int64()),
            "a": pa.array(
                [{"b": f"t{i}", "c.d": i} for i in range(100)], pa.struct([("b", pa.string()), ("c.d", pa.int32())])
            ),
            "\u00fcber": pa.array(range(100), pa.int64()),
        }
    )
    pq.write_table(table, path, write_page_index=True)


@in_corpus("many tiny pages")
def _tiny_pages(path: Path) -> None:
    """A page per row: 1,200 in each column's chunk."""
    table = flat(1200).select(["id", "text"])
    pq.write_table(table, path, max_rows_per_page=1, write_batch_size=1, write_page_index=True, compression="none")


@in_corpus("large page")
def _large_page(path: Path) -> None:
    """One page of 3 MB, which does not compress."""
    values = pa.array([random.Random(i).randbytes(30_000) for i in range(100)], pa.binary())
    pq.write_table(pa.table({"bytes": values}), path, data_page_size=1 << 30, use_dictionary=False)


@in_corpus("dictionary falls back")
def _fallback(path: Path) -> None:
    """A dictionary page, pages that use it, and pages that do not as it became too large."""
    values = pa.array([f"{i * 7919 % 100_003:06}" for i in range(3000)])
    pq.write_table(
        pa.table({"text": values}), path, dictionary_pagesize_limit=4000, write_batch_size=100, data_page_size=1000
    )


# ---------------------------------------------------------------- encrypted files of parquet-testing

KF, K1, K2 = b"0123456789012345", b"1234567890123450", b"1234567890123451"
MASTER_KEYS = {"kf": KF, "kc1": K1, "kc2": K2}

ENCRYPTED = {  # algorithm, tail, columns that have keys of their own
    "aes256/encrypt_columns_and_footer": (GCM, b"PARE", 8),
    "aes256/encrypt_columns_and_footer_ctr": (CTR, b"PARE", 8),
    "aes256/encrypt_columns_and_footer_disable_aad_storage": (GCM, b"PARE", 8),
    "aes256/encrypt_columns_plaintext_footer": (GCM, b"PAR1", 8),
    "aes256/uniform_encryption": (GCM, b"PARE", 0),
    "encrypt_columns_and_footer": (GCM, b"PARE", 2),
    "encrypt_columns_and_footer_aad": (GCM, b"PARE", 2),
    "encrypt_columns_and_footer_bloom_filter": (GCM, b"PARE", 2),
    "encrypt_columns_and_footer_ctr": (CTR, b"PARE", 2),
    "encrypt_columns_and_footer_disable_aad_storage": (GCM, b"PARE", 2),
    "encrypt_columns_plaintext_footer": (GCM, b"PAR1", 2),
    "external_key_material_java": (GCM, b"PARE", 2),
    "uniform_encryption": (GCM, b"PARE", 0),
}


def parquet_testing_keys(name: str) -> tuple[bytes, dict[str, bytes]]:
    """As the README there has them."""
    if "aes256" not in name:
        return KF, {"double_field": K1, "float_field": K2}
    names = ["double", "float", "boolean", "int32", "ba", "flba", "int64_field.list.element", "int96"]
    columns = [name if "." in name else f"{name}_field" for name in names]
    return KF + b"6789012345678901", {column: b"1234567890" * 3 + b"1%d" % i for i, column in enumerate(columns, 2)}


# ---------------------------------------------------------------- trees


def parquets(folder: Path) -> dict[str, Path]:
    """What is not hidden of a tree."""
    found = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    return {str(name): path for name, path in found.items() if not any(part[0] in "._" for part in name.parts)}


def check_equal(one: Path, other: Path) -> None:
    ours, theirs = parquets(one), parquets(other)
    assert ours.keys() == theirs.keys()
    for name, path in ours.items():
        assert rows(path) == rows(theirs[name]), name
        assert pq.read_schema(path).equals(pq.read_schema(theirs[name]), check_metadata=True)
