"""scan_polars against polars' own reader of the plaintext file, and what of a file it decrypts."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from parquet_corpus import CORPUS
from parquet_peers import pa, pq

from ags_fast import IntegrityError, KeyAccessError, PolicyError
from ags_fast import parquet as apq
from ags_fast.parquet import Keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pl = pytest.importorskip("polars")
from polars.testing import assert_frame_equal  # noqa: E402 (polars may be missing)

KEYS = Keys(bytes(range(16, 32)), {"id": bytes(range(16))})
UNIFORM = Keys(bytes(range(32)))
ENGINES: list[Any] = ["in-memory", "streaming"]
GROUP, GROUPS = 1000, 8


@pytest.fixture(scope="module")
def table() -> Any:
    rows = range(GROUP * GROUPS)
    start = pl.datetime(2026, 1, 1, time_unit="us")
    frame = pl.DataFrame({"id": rows}).select(
        "id",
        number=pl.when(pl.col("id") % 3 > 0).then(pl.col("id")),
        unsigned=pl.col("id").cast(pl.UInt64) + 2**63,
        real=pl.when(pl.col("id") % 5 > 0).then(pl.col("id") / 8).otherwise(float("nan")),
        text=pl.format("name {}", pl.col("id").cast(pl.String).str.zfill(6)),
        day=pl.date(2026, 1, 1) + pl.duration(days=pl.col("id")),
        at=start + pl.duration(seconds=pl.col("id")),
        flag=pl.col("id") >= 4000,
        none=pl.lit(None, pl.Int32),
        tags=pl.concat_list("id", "id"),
        pair=pl.struct("id", x=pl.col("id") * 2),
    )
    return frame.to_arrow()


@pytest.fixture(scope="module")
def files(table: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("polars")
    plain, sealed = folder / "plain.parquet", folder / "sealed.parquet"
    pq.write_table(table, plain, row_group_size=GROUP, compression="none", use_dictionary=False)
    apq.encrypt_file(plain, sealed, KEYS)
    return plain, sealed


def decrypted(sealed: Path, query: Callable[[Any], Any]) -> int:
    """How many bytes of pages a query decrypts."""
    with apq.open_plain(sealed, KEYS) as view:
        query(apq.scan_polars(view)).collect()
        return view.decrypted


@pytest.mark.parametrize("name", CORPUS)
def test_types_are_those_of_polars(corpus: dict[str, Path], tmp_path: Path, name: str) -> None:
    apq.encrypt_file(corpus[name], tmp_path / "sealed", UNIFORM)
    try:
        expected = pl.read_parquet(corpus[name])
    except pl.exceptions.PolarsError:
        pytest.skip("polars does not read the plaintext file")
    for engine in ENGINES:
        assert_frame_equal(apq.scan_polars(tmp_path / "sealed", UNIFORM).collect(engine=engine), expected)
    for column in expected.columns:
        frame = apq.scan_polars(tmp_path / "sealed", UNIFORM).select(column).collect()
        assert_frame_equal(frame, expected.select(column))


QUERIES: dict[str, Callable[[Any], Any]] = {
    "all": lambda frame: frame,
    "order": lambda frame: frame.select("text", "id"),
    "slice": lambda frame: frame.slice(1990, 30),
    "tail": lambda frame: frame.tail(3),
    "head 0": lambda frame: frame.head(0),
    "head": lambda frame: frame.head(1001),
    "filter": lambda frame: frame.filter(pl.col("id") == 4321).select("text"),
    "filter, head": lambda frame: frame.filter(pl.col("id") > 2500).head(7),
    "head, filter": lambda frame: frame.head(3000).filter(pl.col("id") > 2500),
    "no row": lambda frame: frame.filter(pl.col("id") < 0),
    "nulls": lambda frame: frame.filter(pl.col("number").is_null() & (pl.col("id") < 20)),
    "not null": lambda frame: frame.filter(pl.col("none").is_not_null()),
    "null": lambda frame: frame.filter(pl.col("none").is_null()).select("id"),
    "unsigned": lambda frame: frame.filter(pl.col("unsigned") > 2**63 + 7000),
    "nan": lambda frame: frame.filter(pl.col("real") > 1e9),
    "real": lambda frame: frame.filter(pl.col("real") < 3.0),
    "text": lambda frame: frame.filter(pl.col("text") >= "name 007990"),
    "text in": lambda frame: frame.filter(pl.col("text").is_in(["name 000001", "name 007000", "x"])),
    "day": lambda frame: frame.filter(pl.col("day") > pl.date(2040, 1, 1)),
    "time": lambda frame: frame.filter(pl.col("at") < pl.datetime(2026, 1, 1, 0, 10)),
    "flag": lambda frame: frame.filter(pl.col("flag")),
    "modulo": lambda frame: frame.filter(pl.col("id") % 999 == 0),
    "or": lambda frame: frame.filter((pl.col("id") < 3) | (pl.col("text") > "name 007997")),
    "nested": lambda frame: frame.filter(pl.col("pair").struct.field("x") > 15990),
    "literal": lambda frame: frame.filter(pl.lit(False)),
    "group": lambda frame: frame.group_by(pl.col("id") // 1000).agg(pl.col("number").sum()).sort("id"),
    "count": lambda frame: frame.select(pl.len()),
    "join": lambda frame: frame.join(frame.filter(pl.col("id") < 9), on="id").select("id", "text_right").sort("id"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", QUERIES)
def test_queries_give_what_the_plaintext_gives(files: tuple[Path, Path], name: str, engine: Any) -> None:
    plain, sealed = files
    query = QUERIES[name]
    expected = query(pl.scan_parquet(plain)).collect()
    assert_frame_equal(query(apq.scan_polars(sealed, KEYS)).collect(engine=engine), expected)


@pytest.mark.parametrize("name", ["filter", "no row", "not null", "unsigned", "text", "day", "time", "flag"])
def test_statistics_spare_row_groups(files: tuple[Path, Path], name: str) -> None:
    sealed = files[1]
    assert decrypted(sealed, QUERIES[name]) <= sealed.stat().st_size * 0.55
    if name in ("no row", "not null"):
        assert decrypted(sealed, QUERIES[name]) == 0


def test_only_the_columns_of_a_query_are_decrypted(files: tuple[Path, Path]) -> None:
    plain, sealed = files
    footer = pq.read_metadata(plain)
    pages = 8 * footer.row_group(0).column(0).total_compressed_size
    one = decrypted(sealed, lambda frame: frame.select("id"))
    assert pages <= one <= pages + 8 * 200
    assert decrypted(sealed, lambda frame: frame.select("id").head(10)) <= one / 8 + 1
    assert decrypted(sealed, lambda frame: frame.head(0)) == 0
    everything = decrypted(sealed, lambda frame: frame)
    assert one < everything / 8
    with apq.open_plain(sealed, KEYS) as view:
        pl.read_parquet(view, columns=["id"])
        assert view.decrypted >= everything  # which is why scan_polars exists


def damaged(files: tuple[Path, Path], tmp_path: Path, column: str) -> Path:
    """A copy whose last row group has a bit flipped in the pages of a column."""
    with apq.open_plain(files[1], KEYS) as view:
        group = pq.ParquetFile(view).metadata.row_group(GROUPS - 1)
    chunk = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == column)
    data = bytearray(files[1].read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    return tmp_path / "damaged"


@pytest.mark.parametrize("engine", ENGINES)
def test_damage_is_an_integrity_error(files: tuple[Path, Path], tmp_path: Path, engine: Any) -> None:
    scan = apq.scan_polars(damaged(files, tmp_path, "text"), KEYS)
    expected = pl.read_parquet(files[0])
    assert_frame_equal(scan.drop("text").collect(engine=engine), expected.drop("text"))
    assert_frame_equal(scan.filter(pl.col("id") < 500).collect(engine=engine), expected.head(500))
    for query in (scan, scan.select("text"), scan.filter(pl.col("text") == "name 007500"), scan.group_by("text").len()):
        with pytest.raises(IntegrityError) as caught:
            query.collect(engine=engine)
        assert (caught.value.row_group, caught.value.column) == (GROUPS - 1, "text")


def test_damage_reaches_every_way_to_run_a_query(files: tuple[Path, Path], tmp_path: Path) -> None:
    scan = apq.scan_polars(damaged(files, tmp_path, "text"), KEYS)
    ways: list[Callable[[], Any]] = [
        lambda: pl.collect_all([scan, scan.select("text")]),
        lambda: list(scan.collect_batches()),
        lambda: scan.select("text").sink_csv(tmp_path / "out.csv"),
        lambda: scan.join(scan, on="id").collect(),
        lambda: pl.concat([scan, scan]).collect(),
    ]
    for way in ways:
        with pytest.raises(IntegrityError):
            way()


def test_keys_and_policies(files: tuple[Path, Path]) -> None:
    plain, sealed = files
    with pytest.raises(KeyAccessError):
        apq.scan_polars(sealed, Keys(bytes(range(16, 32))))
    shown = apq.scan_polars(sealed, Keys(bytes(range(16, 32))), missing="hide").collect()
    assert_frame_equal(shown, pl.read_parquet(plain).drop("id"))
    with pytest.raises(PolicyError):
        apq.scan_polars(plain, KEYS)
    with pytest.raises(IntegrityError):
        apq.scan_polars(sealed, Keys(bytes(range(1, 17))))


def test_statistics_without_a_tag_are_not_used(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Who holds no footer key cannot check the footer: changed bounds would hide rows."""
    apq.encrypt_file(files[0], tmp_path / "signed", KEYS, plaintext_footer=True, other_columns="plain")
    query = QUERIES["no row"]
    for keys, some in ((KEYS, False), (Keys(None, {"id": bytes(range(16))}), True)):
        with apq.open_plain(tmp_path / "signed", keys) as view:
            assert query(apq.scan_polars(view)).select("id").collect().height == 0
            assert (view.decrypted > 0) == some


def test_several_files(files: tuple[Path, Path], tmp_path: Path) -> None:
    plain, sealed = files
    expected = pl.concat([pl.read_parquet(plain)] * 2)
    scan = apq.scan_polars([sealed, sealed.read_bytes()], KEYS)
    assert_frame_equal(scan.collect(), expected)
    assert_frame_equal(scan.slice(7990, 20).collect(), expected.slice(7990, 20))
    apq.write_table(pa.table({"other": [1]}), tmp_path / "other", Keys(bytes(range(16, 32))))
    with pytest.raises(ValueError, match="differ in their columns"):
        apq.scan_polars([sealed, tmp_path / "other"], KEYS)
    with pytest.raises(ValueError, match="at least one"):
        apq.scan_polars([], KEYS)
    with pytest.raises(ValueError, match="length belongs to one file"):
        apq.scan_polars([sealed, sealed], KEYS, length=1)


def test_files_without_rows(tmp_path: Path) -> None:
    empty = pa.table({"a": pa.array([], pa.int64()), "b": pa.array([], pa.string())})
    apq.write_table(empty, tmp_path / "empty", UNIFORM)
    apq.write_table(pa.table({"a": [1], "b": ["x"]}), tmp_path / "one", UNIFORM)
    scan = apq.scan_polars(tmp_path / "empty", UNIFORM)
    assert_frame_equal(scan.filter(pl.col("a") > 1).collect(), pl.DataFrame(empty))
    both = apq.scan_polars([tmp_path / "empty", tmp_path / "one"], UNIFORM)
    assert both.select("b").collect()["b"].to_list() == ["x"]


def test_a_scan_shows_and_pickles_no_key(files: tuple[Path, Path]) -> None:
    key = bytes(range(100, 116))
    apq.encrypt_file(files[0], files[1].with_name("other key"), Keys(key))
    scan = apq.scan_polars(files[1].with_name("other key"), Keys(key))
    assert repr(key)[2:-1] not in scan.explain() + repr(scan)
    with pytest.raises(Exception, match=r"never pickled|serializ|pickle"):
        scan.serialize()


def test_a_view_has_its_keys(files: tuple[Path, Path]) -> None:
    with apq.open_plain(files[1], KEYS) as view, pytest.raises(ValueError, match="beside a view"):
        apq.scan_polars(view, KEYS)


def test_without_polars(files: tuple[Path, Path]) -> None:
    code = (
        "import sys; from ags_fast import parquet; parquet.scan_polars; assert 'polars' not in sys.modules\n"
        "sys.modules['polars'] = None\n"
        "try: parquet.scan_polars('x')\n"
        "except ImportError as error: assert 'pip install' in str(error)\n"
        "else: raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
