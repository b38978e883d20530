"""Tools that take a file system of fsspec, on an encrypted dataset: the results are those on the plaintext files."""

from __future__ import annotations

import io
import zipfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, make_kms

from ags_fast import Dataset

pa = pytest.importorskip("pyarrow")
fsspec = pytest.importorskip("fsspec")
pd = pytest.importorskip("pandas")
import pyarrow.csv  # noqa: E402
import pyarrow.dataset as ds  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS = 20_000
YEARS = (2024, 2025, 2026)
GROUPS = 10  # row groups in a file


class Side:
    """A file system, where the files are in it, and what its URLs begin with."""

    def __init__(self, fs: Any, root: str, protocol: str) -> None:
        self.fs = fs
        self.root = root
        self.protocol = protocol

    def at(self, path: str) -> str:
        return f"{self.root}{path}"

    def url(self, path: str) -> str:
        return f"{self.protocol}://{self.root}{path}"

    @property
    def options(self) -> dict[str, Any]:
        """`storage_options` of pandas and others."""
        return dict(self.fs.storage_options)


def rows(year: int) -> Any:
    first = year * ROWS
    return pa.table(
        {
            "id": range(first, first + ROWS),
            "price": [i % 1000 / 8 for i in range(ROWS)],
            "item": [f"item {i % 97}" for i in range(ROWS)],
            "at": pa.array(range(first, first + ROWS), pa.timestamp("us")),
        }
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Side:
    fastavro = pytest.importorskip("fastavro")
    folder = tmp_path_factory.mktemp("tools") / "plain"
    for year in YEARS:
        below = folder / "orders" / f"year={year}"
        below.mkdir(parents=True)
        pq.write_table(rows(year), below / "part.parquet", row_group_size=ROWS // GROUPS)
    table = rows(YEARS[0])
    pyarrow.csv.write_csv(table, folder / "rows.csv")
    schema = {"type": "record", "name": "row", "fields": [{"name": "id", "type": "long"}]}
    with open(folder / "rows.avro", "wb") as file:
        fastavro.writer(file, schema, table.select(["id"]).to_pylist(), codec="deflate")
    with zipfile.ZipFile(folder / "rows.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / "rows.csv", "inner.csv")
    return Side(fsspec.filesystem("file"), f"{folder}/", "file")


@pytest.fixture(scope="module")
def sealed(plain: Side, tmp_path_factory: pytest.TempPathFactory) -> Side:
    folder = tmp_path_factory.mktemp("sealed")
    kms = make_kms(folder)
    dataset = Dataset.create(folder / "dataset", kms=kms, wrapping_key_id=MASTER)
    fs = fsspec.filesystem("ags", dataset=dataset.url, kms=kms)
    with fs.transaction:
        fs.put(plain.root, "", recursive=True)
    assert dataset.refresh()
    assert {file.format for file in dataset.files("*.parquet")} == {"parquet"}
    return Side(fs, "", "ags")


# ---- reading


def by_pandas_csv(side: Side) -> Any:
    return pd.read_csv(side.url("rows.csv"), storage_options=side.options)


def by_pandas_parquet(side: Side) -> Any:
    url = side.url("orders/year=2025/part.parquet")
    return pd.read_parquet(url, columns=["id", "price"], storage_options=side.options)


def by_pandas_tree(side: Side) -> Any:
    return pd.read_parquet(side.at("orders"), filesystem=side.fs, filters=[("year", "=", 2026)])


def by_arrow_dataset(side: Side) -> Any:
    found = ds.dataset(files(side), filesystem=side.fs, partitioning="hive", partition_base_dir=side.root)
    return found.to_table(filter=(ds.field("year") > 2024) & (ds.field("price") < 10)).to_pandas()


def by_polars_csv(side: Side) -> Any:
    polars = pytest.importorskip("polars")
    with side.fs.open(side.at("rows.csv"), "rb") as file:
        return polars.read_csv(file).to_pandas()


def by_polars_parquet(side: Side) -> Any:
    polars = pytest.importorskip("polars")
    with side.fs.open(side.at("orders/year=2024/part.parquet"), "rb") as file:
        return polars.read_parquet(file, columns=["id", "item"]).to_pandas()


def by_polars_scan(side: Side) -> Any:
    polars = pytest.importorskip("polars")
    dataset = ds.dataset(files(side), filesystem=side.fs, partitioning="hive", partition_base_dir=side.root)
    return polars.scan_pyarrow_dataset(dataset).filter(polars.col("id") % 7 == 0).collect().to_pandas()


def by_polars_avro(side: Side) -> Any:
    polars = pytest.importorskip("polars")
    with side.fs.open(side.at("rows.avro"), "rb") as file:
        return polars.read_avro(file).to_pandas()


def by_duckdb(side: Side) -> Any:
    with duck(side) as connection:
        query = f"select year, sum(price) as total from read_parquet('{side.url('orders/*/*.parquet')}') group by year"
        return connection.sql(f"{query} order by year").df()


def by_duckdb_csv(side: Side) -> Any:
    with duck(side) as connection:
        return connection.sql(f"from read_csv('{side.url('rows.csv')}') where price < 2").df()


def by_fastavro(side: Side) -> Any:
    import fastavro

    with side.fs.open(side.at("rows.avro"), "rb") as file:
        return pd.DataFrame(list(fastavro.reader(file)))


def by_dask(side: Side) -> Any:
    frames = pytest.importorskip("dask.dataframe")
    read = frames.read_parquet(
        [side.url(f"orders/year={year}/part.parquet") for year in YEARS], storage_options=side.options
    )
    return read.groupby("item").price.sum().compute(scheduler="sync").sort_index().reset_index()


def by_dask_csv(side: Side) -> Any:
    frames = pytest.importorskip("dask.dataframe")
    read = frames.read_csv(side.url("rows.csv"), storage_options=side.options, blocksize=100_000)
    return read.compute(scheduler="threads").reset_index(drop=True)


def by_zipfile(side: Side) -> Any:
    with side.fs.open(side.at("rows.zip"), "rb") as file, zipfile.ZipFile(file) as archive:
        return pd.read_csv(io.BytesIO(archive.read("inner.csv")))


READERS = [value for name, value in list(globals().items()) if name.startswith("by_")]


def files(side: Side) -> list[str]:
    return [side.at(f"orders/year={year}/part.parquet") for year in YEARS]


@contextmanager
def duck(side: Side) -> Iterator[Any]:
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as connection:
        if side.protocol != "file":  # DuckDB has one for local files
            connection.register_filesystem(side.fs)
        yield connection


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__[3:])
def test_reads_as_from_plain_files(read: Callable[[Side], Any], plain: Side, sealed: Side) -> None:
    expected = read(plain)
    assert len(expected) > 0
    pd.testing.assert_frame_equal(read(sealed), expected)


def test_a_filter_reads_only_its_row_groups(sealed: Side) -> None:
    path = f"orders/year={YEARS[1]}/part.parquet"
    wanted = (ds.field("id") >= YEARS[1] * ROWS) & (ds.field("id") < YEARS[1] * ROWS + 10)
    with sealed.fs.open(path, "rb") as file:
        size = file.seek(0, io.SEEK_END)
        found = pq.read_table(file, filters=wanted)
        part = file.raw.decrypted
    with sealed.fs.open(path, "rb") as file:
        pq.read_table(file)
        whole = file.raw.decrypted
    assert found.num_rows == 10
    assert whole > size // 2
    assert part <= whole // GROUPS + (16 << 10)


# ---- writing


def test_pandas_writes(sealed: Side, plain: Side) -> None:
    frame = by_pandas_csv(plain)
    frame.to_parquet(sealed.url("made/by_pandas.parquet"), storage_options=sealed.options)
    frame.to_csv(sealed.url("made/by_pandas.csv"), storage_options=sealed.options, index=False)
    pd.testing.assert_frame_equal(pd.read_parquet(sealed.url("made/by_pandas.parquet"), filesystem=sealed.fs), frame)
    assert sealed.fs.cat_file("made/by_pandas.csv") == frame.to_csv(index=False).encode()
    formats = {file.path: file.format for file in reopened(sealed).files("made/by_pandas*")}
    assert formats == {"made/by_pandas.parquet": "parquet", "made/by_pandas.csv": "ags1"}


def test_arrow_writes_a_dataset_as_one_version(sealed: Side) -> None:
    table = rows(YEARS[0]).append_column("year", pa.array([2030, 2031] * (ROWS // 2)))
    before = reopened(sealed).version or 0
    with sealed.fs.transaction:
        ds.write_dataset(
            table,
            "arrow",
            filesystem=sealed.fs,
            format="parquet",
            partitioning=ds.partitioning(pa.schema([("year", pa.int64())]), flavor="hive"),
            existing_data_behavior="overwrite_or_ignore",
        )
    assert reopened(sealed).version == before + 1
    found = ds.dataset("arrow", filesystem=sealed.fs, partitioning="hive").to_table().sort_by("id")
    assert found.select(["id", "price"]).equals(table.select(["id", "price"]))
    assert {file.path.split("/")[1] for file in reopened(sealed).files("arrow/*")} == {"year=2030", "year=2031"}


def test_duckdb_writes(sealed: Side) -> None:
    with duck(sealed) as connection:
        connection.sql(f"copy (select 42 as answer) to '{sealed.url('duck/one.parquet')}' (format parquet)")
        connection.sql(f"copy (select 42 as answer) to '{sealed.url('duck/one.csv')}'")
    assert pq.read_table("duck/one.parquet", filesystem=sealed.fs).to_pydict() == {"answer": [42]}
    assert sealed.fs.cat_file("duck/one.csv") == b"answer\n42\n"


def test_zipfile_writes(sealed: Side) -> None:
    with sealed.fs.open("made/one.zip", "wb") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("inner.txt", b"hello")
    with sealed.fs.open("made/one.zip", "rb") as file, zipfile.ZipFile(file) as archive:
        assert archive.read("inner.txt") == b"hello"


def reopened(side: Side) -> Dataset:
    return Dataset.open(side.options["dataset"], kms=side.options["kms"])
