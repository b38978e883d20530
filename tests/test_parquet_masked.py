"""Columns whose key is refused, shown as nulls: missing="null" of open_plain, against the file in plain text."""

from __future__ import annotations

import contextlib
import decimal
import io
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import hypothesis
import hypothesis.strategies as st
import parquet_peers as peers
import pme_reference as ref
import pytest
from parquet_corpus import flat, nested
from parquet_peers import rows_of
from pme_reference import ParquetFile

from ags_fast.columnar.levels import RLE, chunk_levels, null_page, packed_nbytes
from ags_fast.columnar.levels import packed as pack
from ags_fast.columnar.thrift import Struct
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError
from ags_fast.parquet import FOOTER_KEY, Keys, encrypt_file, open_plain, scan_polars
from ags_fast.parquet import filesystem as make_filesystem

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from parquet_peers import ParquetJava

    from ags_fast.parquet.view import PlainView

pa, pq = peers.pa, peers.pq

KF, K1 = b"0123456789012345", b"1234567890123450"
READERS: dict[str, Any] = {
    "pyarrow": pq.read_table,
    "polars": peers.polars_read,
    "duckdb": peers.duckdb_read_object,
    "fastparquet": peers.fastparquet_read,
}


def plain_file(table: Any, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def seal(plain: bytes, refused: Collection[str], plaintext_footer: bool = False) -> bytes:
    sealed = bytearray()
    encrypt_file(plain, sealed, Keys(KF, dict.fromkeys(refused, K1)), plaintext_footer=plaintext_footer)
    return bytes(sealed)


def masked(plain: bytes, refused: Collection[str], plaintext_footer: bool = False) -> PlainView:
    return open_plain(seal(plain, refused, plaintext_footer), Keys(KF), missing="null")


def leaves_of(kind: Any, path: str) -> list[str]:
    """The columns of an Arrow type, as pyarrow writes it."""
    if pa.types.is_struct(kind):
        return [leaf for field in kind for leaf in leaves_of(field.type, f"{path}.{field.name}")]
    if pa.types.is_map(kind):
        return [
            *leaves_of(kind.key_type, f"{path}.key_value.key"),
            *leaves_of(kind.item_type, f"{path}.key_value.value"),
        ]
    if pa.types.is_list(kind):
        return leaves_of(kind.value_type, f"{path}.list.element")
    return [path]


def with_nulls(value: Any, kind: Any, path: str, refused: Collection[str]) -> Any:
    """A value of `rows_of` as it should be shown."""
    if value is None or all(leaf in refused for leaf in leaves_of(kind, path)):
        return None
    if pa.types.is_struct(kind):
        return {
            field.name: with_nulls(value[field.name], field.type, f"{path}.{field.name}", refused) for field in kind
        }
    if pa.types.is_map(kind):
        item = f"{path}.key_value.value"
        return [{"key": one["key"], "value": with_nulls(one["value"], kind.item_type, item, refused)} for one in value]
    if pa.types.is_list(kind):
        return [with_nulls(one, kind.value_type, f"{path}.list.element", refused) for one in value]
    return value


def expected(table: Any, refused: Collection[str]) -> list[dict[str, Any]]:
    maps = [name.removesuffix(".key_value.key") for name in refused if name.endswith(".key_value.key")]
    refused = {  # a map is nothing without its keys
        leaf
        for leaf in columns_of(table)
        if leaf in refused or any(leaf.startswith(f"{name}.key_value.") for name in maps)
    }
    return [
        {field.name: with_nulls(row[field.name], field.type, field.name, refused) for field in table.schema}
        for row in rows_of(table)
    ]


def columns_of(table: Any) -> list[str]:
    return [leaf for field in table.schema for leaf in leaves_of(field.type, field.name)]


def as_nullable(kind: Any) -> Any:
    """A type without its marks of what may be null."""
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, as_nullable(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(as_nullable(kind.key_type), as_nullable(kind.item_type))
    return pa.list_(as_nullable(kind.value_type)) if pa.types.is_list(kind) else kind


# ---------------------------------------------------------------- what is shown


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_a_column_is_there_and_all_nulls(plaintext_footer: bool) -> None:
    table = flat()
    plain = plain_file(table, row_group_size=250, write_page_index=True)
    for refused in (["id"], ["text", "flag"], table.column_names):
        view = masked(plain, refused, plaintext_footer)
        assert view.columns == table.column_names
        assert (view.masked, view.hidden) == (refused, [])
        found = pq.ParquetFile(view).read()
        assert [(field.name, field.type) for field in found.schema] == [(one.name, one.type) for one in table.schema]
        assert found.schema.field("id").nullable is ("id" in refused)
        for name, reader in READERS.items():
            view.seek(0)
            truth = [{**row, **dict.fromkeys(refused)} for row in rows_of(reader(io.BytesIO(plain)))]
            assert rows_of(reader(view)) == truth, name
        assert rows_of(found) == expected(table, refused)
        assert view.size == open_plain(seal(plain, refused), Keys(KF, dict.fromkeys(refused, K1))).size


def kinds() -> dict[str, Any]:
    """A column of every physical type, and of logical types that readers convert."""
    n = range(50)
    return {
        "bool": pa.array([i % 3 == 0 for i in n]),
        "int32": pa.array(n, pa.int32()),
        "uint8": pa.array(n, pa.uint8()),
        "int64": pa.array(n, pa.int64()),
        "float": pa.array([i / 8 for i in n], pa.float32()),
        "double": pa.array([i / 8 for i in n], pa.float64()),
        "text": pa.array([f"{i % 3}" for i in n]),
        "category": pa.array([f"c{i % 3}" for i in n]).dictionary_encode(),
        "bytes": pa.array([bytes([i]) for i in n]),
        "fixed": pa.array([bytes([i]) * 5 for i in n], pa.binary(5)),
        "half": pa.array([i / 8 for i in n], pa.float16()),
        "decimal": pa.array([decimal.Decimal(i) / 4 for i in n], pa.decimal128(9, 2)),
        "decimal38": pa.array([decimal.Decimal(i) for i in n], pa.decimal128(38, 0)),
        "date": pa.array(n, pa.date32()),
        "time": pa.array(n, pa.time64("us")),
        "local": pa.array(n, pa.timestamp("ms")),
        "instant": pa.array(n, pa.timestamp("us", "UTC")),
        "list": pa.array([[i] * (i % 3) for i in n]),
    }


@pytest.mark.parametrize("int96", [False, True])
def test_every_type_as_nulls(int96: bool) -> None:
    table = pa.table({**kinds(), "left": pa.array(range(50))})
    table = table.cast(pa.schema([field.with_nullable(False) for field in table.schema]))
    plain = plain_file(table, use_deprecated_int96_timestamps=int96)
    view = masked(plain, list(kinds()))
    for name, reader in READERS.items():
        view.seek(0)
        found = reader(view)
        assert found.column_names == table.column_names, name
        assert found["left"].to_pylist() == list(range(50)), name
        assert all(found[kind].null_count == 50 for kind in kinds()), name
    stored, truth = (pq.read_schema(one) for one in (view, io.BytesIO(plain)))
    assert [as_nullable(kind) for kind in stored.types] == [as_nullable(kind) for kind in truth.types]


NESTED = [
    ["struct.age"],
    ["struct"],
    ["deep.list.element.list.element.name"],
    ["deep.list.element.list.element.name", "struct.name"],
    ["map.key_value.value"],
    ["map.key_value.key"],
    ["list", "deep", "id"],
]


@pytest.mark.parametrize(
    ("plaintext_footer", "refused"), list(zip(itertools.cycle([False, True]), NESTED, strict=False))
)
def test_lists_and_structs(plaintext_footer: bool, refused: list[str]) -> None:
    """The topmost field all of whose columns are refused is null, and what is beside it stays as it was."""
    table = nested()
    gone = {one for one in columns_of(table) if any(one == name or one.startswith(f"{name}.") for name in refused)}
    for options in ({"data_page_version": "2.0"}, {"compression": "gzip"}, {"compression": "none"}):
        plain = plain_file(table, row_group_size=250, max_rows_per_page=60, **options)
        view = masked(plain, refused, plaintext_footer)
        found = pq.read_table(view)
        assert rows_of(found) == expected(table, gone)
        assert found.schema.types == table.schema.types
    for name in ("polars", "duckdb"):
        view.seek(0)
        assert rows_of(READERS[name](view)) == rows_of(found), name


@pytest.mark.spark  # no Spark here, but what comes with it
def test_parquet_java_reads_nulls(tmp_path: Path, parquet_java: ParquetJava) -> None:
    for table, refused in [(flat(), ["id", "text", "flag"]), *((nested(), one) for one in NESTED)]:
        view = masked(plain_file(table, row_group_size=250), refused)
        (tmp_path / "shown").write_bytes(view.read())
        assert rows_of(parquet_java.read(tmp_path / "shown")) == rows_of(pq.read_table(view)), refused
    (tmp_path / "shown").write_bytes(masked(plain_file(flat(), row_group_size=250), ["id"]).read())
    question: dict[str, Any] = {"column": "id", "is": "eq", "value": 3, "use": ["stats"]}
    left = parquet_java.count(tmp_path / "shown", **question)
    assert left["row_groups"] == 0


# ---------------------------------------------------------------- any schema

SCALARS = st.sampled_from([(pa.int32(), st.integers(0, 9)), (pa.string(), st.sampled_from(["", "a", "bcd"]))])


@st.composite
def typed(draw: Any, depth: int = 3) -> Any:
    """An Arrow type, and what draws its values, of which some are null if the type says so."""
    shape = draw(st.sampled_from(["scalar", "scalar", "struct", "list", "map"])) if depth else "scalar"
    if shape == "scalar":
        return draw(SCALARS)
    if shape == "struct":
        parts = draw(st.lists(nullable(depth - 1), min_size=1, max_size=3))
        fields = [pa.field(f"f{i}", kind, null) for i, (kind, null, _) in enumerate(parts)]
        return pa.struct(fields), st.fixed_dictionaries({f"f{i}": values for i, (_, _, values) in enumerate(parts)})
    kind, null, values = draw(nullable(depth - 1))
    if shape == "list":
        return pa.list_(pa.field("element", kind, null)), st.lists(values, max_size=3)
    key, keys = draw(SCALARS)
    return pa.map_(key, pa.field("value", kind, null)), st.lists(st.tuples(keys, values), max_size=3)


@st.composite
def nullable(draw: Any, depth: int) -> Any:
    kind, values = draw(typed(depth))
    null = draw(st.booleans())
    return kind, null, st.none() | values if null else values


@st.composite
def tables(draw: Any) -> Any:
    parts = draw(st.lists(nullable(3), min_size=1, max_size=3))
    schema = pa.schema([pa.field(f"c{i}", kind, null) for i, (kind, null, _) in enumerate(parts)])
    count = draw(st.integers(0, 30))
    columns = [draw(st.lists(values, min_size=count, max_size=count)) for _, _, values in parts]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)


@hypothesis.given(
    tables(), st.data(), st.booleans(), st.sampled_from(["1.0", "2.0"]), st.sampled_from(["none", "snappy", "zstd"])
)
def test_any_schema(table: Any, data: Any, plaintext_footer: bool, version: str, codec: str) -> None:
    """What is shown is the table, with nulls for what is refused."""
    leaves = columns_of(table)
    refused = data.draw(st.sets(st.sampled_from(leaves)))
    plain = plain_file(
        table,
        row_group_size=data.draw(st.integers(1, 20)),
        data_page_version=version,
        compression=codec,
        max_rows_per_page=7,
    )
    assert [column.path for column in pq.ParquetFile(io.BytesIO(plain)).schema] == leaves
    view = masked(plain, refused, plaintext_footer)
    found = pq.ParquetFile(view).read()
    assert rows_of(found) == expected(table, refused)
    assert [as_nullable(kind) for kind in found.schema.types] == [as_nullable(kind) for kind in table.schema.types]
    whole = view.read_at(0, view.size)
    assert all(view.read_at(at, 100) == whole[at : at + 100] for at in range(0, view.size, max(1, view.size // 20)))


# ---------------------------------------------------------------- nothing of the values


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_nothing_but_nulls_is_said_of_a_masked_column(plaintext_footer: bool) -> None:
    """Statistics, indexes, bloom filters and sizes are those of nulls, and the row groups count what is shown."""
    order = [pq.SortingColumn(0), pq.SortingColumn(4), pq.SortingColumn(2)]
    plain = plain_file(
        flat(),
        row_group_size=250,
        write_page_index=True,
        sorting_columns=order,
        bloom_filter_options={"text": True, "id": True},
    )
    view = masked(plain, ["text"], plaintext_footer)
    metadata = pq.ParquetFile(view).metadata
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        assert [one.column_index for one in group.sorting_columns] == [0]
        column = group.column(4)
        assert column.path_in_schema == "text"
        assert not column.has_offset_index
        assert not column.has_column_index
        assert not column.has_dictionary_page
        assert column.statistics.null_count == column.num_values == group.num_rows
        assert not column.statistics.has_min_max
        assert group.total_byte_size == sum(group.column(i).total_uncompressed_size for i in range(group.num_columns))
    chunks = [chunk for chunk in ParquetFile(view.read_at(0, view.size)).chunks() if chunk.path == ("text",)]
    assert len(chunks) == 3
    for chunk in chunks:  # no sizes, no encodings, no bloom filter
        assert [field for field, _, _ in chunk.meta.fields] == [1, 2, 3, 4, 5, 6, 7, 9, 12]
        assert [field for field, _, _ in chunk.meta[12].fields] == [3]


def test_filters_on_a_masked_column_give_no_row() -> None:
    view = masked(plain_file(flat(), row_group_size=250), ["id"])
    assert pq.read_table(view, filters=[("id", ">=", 0)]).num_rows == 0
    assert pq.read_table(view, filters=[("id", "!=", 3)]).num_rows == 0
    import pyarrow.compute as pc

    assert pq.read_table(view, filters=pc.field("id").is_null()).num_rows == 600
    before = view.decrypted
    assert pq.read_table(view, columns=["text"], filters=[("id", "==", 3)]).num_rows == 0
    assert view.decrypted == before  # its statistics say so


# ---------------------------------------------------------------- when pages are read


def test_nulls_take_no_page_of_the_file() -> None:
    view = masked(plain_file(flat(), row_group_size=250), ["id", "text"])
    assert pq.ParquetFile(view, pre_buffer=False).read(columns=["id", "text"]).num_rows == 600
    assert view.decrypted == 0


def test_levels_are_read_when_they_are_needed() -> None:
    """Beside readable columns, nulls cost the levels of one of these, when they are read and not before."""
    view = masked(plain_file(nested(), row_group_size=250), ["struct.age"])
    assert pq.ParquetFile(view, pre_buffer=False).read(columns=["id"]).num_rows == 600
    before = view.decrypted
    view.read_at(view.size - (64 << 10), 64 << 10)  # where readers hope for a footer
    assert view.decrypted == before
    assert pq.ParquetFile(view, pre_buffer=False).read(columns=["struct.age"]).num_rows == 600
    assert view.decrypted > before


# ---------------------------------------------------------------- what stays an error


def test_errors_stay_errors() -> None:
    plain = plain_file(nested(), row_group_size=250)
    sealed = seal(plain, ["struct.age"])
    with pytest.raises(KeyAccessError, match=r"struct\.age"):
        open_plain(sealed, Keys(KF))
    with pytest.raises(ValueError, match="'null'"):
        open_plain(sealed, Keys(KF), missing="nulls")  # type: ignore[arg-type]
    with pytest.raises(IntegrityError):  # a wrong key is not a missing one
        open_plain(sealed, Keys(KF, {"struct.age": bytes(range(16))}), missing="null")
    reference = ParquetFile(sealed, KF, {"struct.age": K1})
    page = next(m for m in reference.modules() if m.kind == ref.DATA_PAGE and m.path == ("struct", "name"))
    view = open_plain(reference.flip(page, -1), Keys(KF), missing="null")
    with pytest.raises(IntegrityError, match=r"struct\.name"):  # whose levels it has
        pq.read_table(view, columns=["struct.age"])
    assert pq.read_table(view, columns=["id"]).num_rows == 600


@pytest.mark.parametrize(("codec", "encoding"), [(3, RLE), (5, RLE), (0, 4)])
def test_levels_that_are_not_read(codec: int, encoding: int) -> None:
    """Of old writers: LZO, LZ4 in Hadoop's frames, and levels without runs."""
    page = bytearray(null_page(1, [b"", b"\2\0"], (0, 1)))
    at = page.index(bytes([0x15, 2 * RLE]))
    page[at + 1] = 2 * encoding
    with pytest.raises(FormatError, match='missing="hide"'):
        list(chunk_levels(lambda at, size: bytes(page[at : at + size]), 0, len(page), codec, (0, 1)))


LEVELS = st.integers(1, 255).flatmap(
    lambda highest: st.tuples(st.just(highest), st.lists(st.integers(0, highest), max_size=100).map(bytes))
)


@hypothesis.given(LEVELS)
def test_levels_are_packed_and_read_again(drawn: tuple[int, bytes]) -> None:
    highest, levels = drawn
    width = highest.bit_length()
    packed = pack(levels, width)
    assert len(packed) == packed_nbytes(len(levels), width)
    page = null_page(len(levels), [packed, packed], (width, width))
    found = list(chunk_levels(lambda at, size: page[at : at + size], 0, len(page), 0, (highest, highest)))
    assert found == [(levels, levels)]
    for cut in range(len(page)):  # damage is an error of its kind
        with contextlib.suppress(FormatError):
            list(chunk_levels(lambda at, size: page[:cut][at : at + size], 0, cut, 0, (highest, highest)))  # noqa: B023


def test_columns_under_the_footer_key() -> None:
    """Without the footer key, only columns with keys of their own are more than nulls."""
    sealed = bytearray()
    encrypt_file(plain_file(flat()), sealed, Keys(KF, {"id": K1, "flag": FOOTER_KEY}), plaintext_footer=True)
    view = open_plain(sealed, Keys(None, {"id": K1}), missing="null")
    assert not view.footer_verified
    assert view.masked == flat().column_names[1:]
    assert rows_of(pq.read_table(view)) == expected(flat(), flat().column_names[1:])


def test_row_groups_without_rows() -> None:
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, nested().schema) as writer:
        for table in (nested().slice(0, 0), nested(), nested().slice(0, 0)):
            writer.write_table(table)
    view = masked(sink.getvalue(), ["id", "struct.age", "map"])
    assert rows_of(pq.read_table(view)) == expected(
        nested(), ["id", "struct.age", "map.key_value.key", "map.key_value.value"]
    )
    empty = masked(plain_file(flat().slice(0, 0)), ["id"])
    assert pq.read_table(empty).num_rows == 0
    assert pq.read_schema(empty).names == flat().column_names


def test_fsspec(tmp_path: Path) -> None:
    (tmp_path / "sealed.parquet").write_bytes(seal(plain_file(flat()), ["text"]))
    fs = make_filesystem(Keys(KF), missing="null")
    with fs.open(str(tmp_path / "sealed.parquet")) as file:
        assert file.view.masked == ["text"]
    import pyarrow.dataset as ds

    data = ds.dataset(str(tmp_path / "sealed.parquet"), filesystem=fs)
    assert data.schema.names == flat().column_names
    assert rows_of(data.to_table()) == expected(flat(), ["text"])
    assert data.to_table(filter=ds.field("text") > "").num_rows == 0


def test_a_view_that_nobody_has_is_gone() -> None:
    """Its source is closed without a search for circles."""
    view = masked(plain_file(nested()), ["struct.age"])
    gone = weakref.ref(view)
    del view
    assert gone() is None


@pytest.mark.parametrize("refused", [["text"], ["id"]])
def test_scan_polars(refused: list[str]) -> None:
    pl = pytest.importorskip("polars")
    sealed = seal(plain_file(flat(), row_group_size=250), refused)
    scan = scan_polars(sealed, Keys(KF), missing="null")
    assert scan.collect_schema().names() == flat().column_names
    assert rows_of(scan.collect().to_arrow()) == expected(flat(), refused)
    assert scan.filter(pl.col(refused[0]).is_not_null()).collect().height == 0
    assert scan.filter(pl.col(refused[0]).is_null()).select("small").collect().height == 600


def test_maps_of_old_writers() -> None:
    """They mark the repeated group in a map as a map, too: its keys are still the first field in it."""
    plain = plain_file(nested().select(["map"]))
    begin = len(plain) - 8 - int.from_bytes(plain[-8:-4], "little")
    footer = plain[begin:-8]
    first, end = (Struct(footer).elements(2) or [])[2]
    footer = footer[: end - 1] + b"\x15\x04" + footer[end - 1 :]  # one more field, which says so
    assert footer[first:end].endswith(b"\x15")
    old = plain[:begin] + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    view = masked(old, ["map.key_value.value"])
    assert view.masked == ["map.key_value.value"]
    assert rows_of(pq.read_table(view)) == expected(nested().select(["map"]), ["map.key_value.value"])
    assert masked(old, ["map.key_value.key"]).masked == ["map.key_value.key", "map.key_value.value"]
