"""write_table: what pyarrow would have written, encrypted, without its plaintext ever being in storage."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import parquet_peers as peers
import pme_reference as ref
import pytest
from parquet_corpus import flat, nested
from parquet_peers import CTR, GCM, ParquetJava, PmeKeys, rows_of
from programs import parquets
from support import Target, program, python_env, run_python

from ags_fast import FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast import parquet as apq
from ags_fast.parquet import FOOTER_KEY, Keys, table_writer, write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pa, pq = peers.pa, peers.pq

KF, K1, K2 = b"0123456789012345", b"1234567890123450" * 2, b"1234567890123451"
CANARY = "the canary that nobody may see 1234567890"


def keys_of(table: Any) -> Keys:
    """The first column under a key of its own, the last one under the footer key by name."""
    first, last = table.schema.names[0], table.schema.names[-1]
    return Keys(KF, {(first,): K1, (last,): FOOTER_KEY} if first != last else {(first,): K1})


def sealed(table: Any, keys: Keys | None = None, **options: Any) -> bytes:
    target = bytearray()
    apq.write_table(table, target, keys or keys_of(table), **options)
    return bytes(target)


def opened(data: bytes, keys: Keys, **options: Any) -> bytes:
    apq.verify(data, keys, **options)
    target = bytearray()
    apq.decrypt_file(data, target, keys, **options)
    return bytes(target)


def by_pyarrow(table: Any, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def pages(data: bytes) -> bytes:
    """All of a plain file but its footer."""
    return data[: len(data) - 8 - int.from_bytes(data[-8:-4], "little")]


def said(data: bytes) -> dict[str, Any]:
    """What a plain file's footer says of values, as pyarrow reads it. Encryption writes places and sizes anew."""
    metadata = pq.read_metadata(io.BytesIO(data)).to_dict()
    for group in metadata["row_groups"]:
        for column in group["columns"]:
            del column["file_offset"]
    del metadata["serialized_size"]  # encryption adds ordinals and sizes of row groups
    file = pq.ParquetFile(io.BytesIO(data))
    schema = str(file.schema).partition("\n")[2]  # what comes before is an address
    return {**metadata, "key-value": file.metadata.metadata, "schema": schema}


def same(one: Any, other: Any) -> bool:
    """Of tables, in which NaN equals NaN."""
    return one.schema.equals(other.schema, check_metadata=True) and rows_of(one) == rows_of(other)


# ---------------------------------------------------------------------------------------------------------- equality

PAGED: dict[str, Any] = {"write_page_index": True, "max_rows_per_page": 50, "write_page_checksum": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "page index": {"row_group_size": 200, **PAGED},
    "one row group": {"row_group_size": 600, "compression": "zstd", "compression_level": 3},
    "uneven": {"row_group_size": 599, "compression": {"id": "gzip", "text": "none"}, "use_dictionary": ["text"]},
    "V2 pages": {"row_group_size": 250, "data_page_version": "2.0", **PAGED},
    "old": {"version": "1.0", "write_statistics": False, "store_schema": False, "use_dictionary": False},
    "spark": {"flavor": "spark", "data_page_size": 1000},
    "sorted": {"row_group_size": 100, "sorting_columns": [pq.SortingColumn(0)]},
    "cut by content": {"row_group_size": 301, "use_content_defined_chunking": True, "data_page_size": 500},
    "encodings": {"use_dictionary": False, "column_encoding": {"id": "DELTA_BINARY_PACKED", "text": "PLAIN"}},
}
TABLES = {
    "flat": flat(),
    "nested": nested(),
    "empty": flat(0),
    "no columns": pa.table({}),
    "metadata": flat(5).replace_schema_metadata({"owner": "tests", "long": "x" * 5000}),
    "chunked": pa.concat_tables([flat(7), flat(300, 1), flat(0), flat(400, 2)]),
    "category": pa.table({"c": pa.chunked_array([pa.array(list("aba")), pa.array(list("cb"))]).dictionary_encode()}),
}
CASES = [
    *((name, "flat") for name in OPTIONS),
    *((name, table) for name in ("defaults", "page index") for table in TABLES),
]


@pytest.mark.parametrize(("options", "table"), CASES, ids=lambda name: name)
@pytest.mark.parametrize("threads", [1, 3])
def test_it_is_the_file_that_pyarrow_writes(options: str, table: str, threads: int) -> None:
    """Byte for byte, all pages and indexes; and the footer says the same of them."""
    rows, chosen = TABLES[table], OPTIONS[options]
    keys = keys_of(rows) if rows.num_columns else Keys(KF)
    plain = by_pyarrow(rows, **chosen)
    back = opened(sealed(rows, keys, threads=threads, **chosen), keys)
    assert pages(back) == pages(plain)
    assert said(back) == said(plain)
    assert same(pq.read_table(io.BytesIO(back)), pq.read_table(io.BytesIO(plain)))


def test_bloom_filters_follow_their_row_group() -> None:
    """Elsewhere than pyarrow has them, which has no use for a place that the format does not prescribe."""
    chosen: dict[str, Any] = {"row_group_size": 200, "bloom_filter_options": {"id": {"ndv": 300, "fpp": 0.01}}, **PAGED}
    data = sealed(flat(), **chosen)
    plain, back = by_pyarrow(flat(), **chosen), opened(data, keys_of(flat()))
    assert len(back) == len(plain) + len(back) - len(pages(back)) - (len(plain) - len(pages(plain)))
    filters = [module for module in ref.ParquetFile(data, KF, {"id": K1}).modules() if module.kind in (8, 9)]
    assert [(module.row_group, module.kind) for module in filters] == [(g, k) for g in range(3) for k in (8, 9)]
    assert all(module.plain in plain for module in filters)


MODES: dict[str, dict[str, Any]] = {
    "encrypted footer": {},
    "signed footer": {"plaintext_footer": True},
    "CTR": {"algorithm": CTR},
    "CTR, signed": {"algorithm": CTR, "plaintext_footer": True},
    "plain columns": {"other_columns": "plain"},
    "plain columns, signed": {"other_columns": "plain", "plaintext_footer": True},
    "prefix": {"aad_prefix": b"people/1"},
    "prefix to be known": {"aad_prefix": b"people/1", "store_aad_prefix": False},
    "uniform": {},
}


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str) -> None:
    """Every module opens by the specification alone, as does the whole; the report tells what is there."""
    table = nested()
    keys = Keys(KF) if mode == "uniform" else Keys(KF, {"list": K1, "deep": K2, "id": FOOTER_KEY})
    target = bytearray()
    report = apq.write_table(table, target, keys, row_group_size=250, **MODES[mode], **PAGED)
    prefix = MODES[mode].get("aad_prefix")
    known: dict[str, Any] = {"aad_prefix": prefix, "allow_ctr": "CTR" in mode}
    columns = {} if mode == "uniform" else {path: K1 if path[0] == "list" else K2 for path in LEAVES}
    modules = list(ref.ParquetFile(bytes(target), KF, columns, aad_prefix=prefix).modules())
    assert {module.row_group for module in modules} == {None, 0, 1, 2}
    assert pages(opened(bytes(target), keys, **known)) == pages(by_pyarrow(table, row_group_size=250, **PAGED))

    checked = apq.verify(bytes(target), keys, **known)
    assert (report.op, report.row_groups, report.file_length) == ("write", 3, len(target))
    assert report.footer == checked.footer == ("signed" if "signed" in mode else "encrypted")
    assert report.algorithm == checked.algorithm == (CTR if "CTR" in mode else GCM)
    for ours, theirs in zip(report.columns, checked.columns, strict=True):
        assert (ours.path, ours.key, ours.authenticated) == (theirs.path, theirs.key, theirs.authenticated)
        if ours.key != "plain":
            assert (ours.data_pages, ours.nbytes) == (theirs.data_pages, theirs.nbytes)
    kinds = {column.key for column in report.columns}
    assert kinds == (
        {"footer"} if mode == "uniform" else {"column", "footer"} | ({"plain"} if "plain" in mode else set())
    )
    if "to be known" in mode:
        with pytest.raises(PolicyError, match="prefix"):
            apq.verify(bytes(target), keys)


LEAVES = [("list", "list", "element"), *(("deep", *["list", "element"] * 2, name) for name in ("name", "age"))]


def test_v2_pages_in_both_layouts() -> None:
    texts = {}
    for layout in ("arrow", "parquet-java"):
        target = bytearray()
        report = apq.write_table(flat(), target, Keys(KF), data_page_version="2.0", v2_layout=layout)
        texts[layout] = " ".join(report.warnings)
        assert pages(opened(bytes(target), Keys(KF))) == pages(by_pyarrow(flat(), data_page_version="2.0"))
    assert "parquet-java and Spark will not read" in texts["arrow"]
    assert "except parquet-java will not read" in texts["parquet-java"]
    assert "show in plain text" in texts["parquet-java"]


@pytest.mark.parametrize("kind", ["name", "path", "either"])
def test_columns_may_be_any_mapping(kind: str) -> None:
    """No cast or ignore is needed here: mypy, which reads the tests, takes each kind of dict."""
    by_name: dict[str, bytes] = {"id": K1}
    by_path: dict[tuple[str, ...], bytes] = {("id",): K1}
    either: dict[str | tuple[str, ...], bytes] = {("id",): K1}
    notes: dict[str, bytes] = {"id": b"note"}
    made = {
        "name": lambda: Keys(KF, by_name, column_metadata=notes),
        "path": lambda: Keys(KF, by_path),
        "either": lambda: Keys(KF, either),
    }[kind]()
    assert made.column(("id",)) == (K1, b"note" if kind == "name" else None)


def test_column_keys_are_used() -> None:
    """Neither another key nor the footer's opens the column, and without its key the others are read."""
    table = flat()
    data = sealed(table, Keys(KF, {"text": K1}), row_group_size=200)
    for wrong in (K2, FOOTER_KEY):
        with pytest.raises(IntegrityError) as error:
            opened(data, Keys(KF, {"text": wrong}))
        assert error.value.column == "text"
    with pytest.raises(KeyAccessError, match="text"):
        opened(data, Keys(KF))
    target = bytearray()
    apq.decrypt_file(data, target, Keys(KF), missing="drop")
    assert rows_of(pq.read_table(io.BytesIO(target))) == rows_of(table.drop_columns(["text"]))
    metadata = Keys(KF, {"text": K1}, footer_metadata=b"kf", column_metadata={"text": b"k1"})
    data = sealed(table, metadata)
    target = bytearray()
    apq.decrypt_file(data, target, {b"kf": KF, b"k1": K1}.__getitem__)
    assert same(pq.read_table(io.BytesIO(target)), table)


# ---------------------------------------------------------------------------------------------------------- peers


def test_pyarrow_reads_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"row_group_size": 200, "aad_prefix": b"p", "algorithm": CTR, **PAGED}
    apq.write_table(flat(), tmp_path / "f", Keys(KF), **options)
    assert same(peers.pyarrow_read(tmp_path / "f", PmeKeys(KF)), flat())


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_polars_reads_it(tmp_path: Path, plaintext_footer: bool) -> None:
    keys = Keys(KF, {"text": K1, "id": K2})
    apq.write_table(flat(), tmp_path / "f", keys, row_group_size=200, plaintext_footer=plaintext_footer, **PAGED)
    read = peers.polars_read(tmp_path / "f", PmeKeys(KF, {"text": K1, "id": K2}))
    assert rows_of(read) == rows_of(flat())


@pytest.mark.spark  # no Spark here, but what comes with it
def test_parquet_java_reads_it(tmp_path: Path, parquet_java: ParquetJava) -> None:
    """Pages, and pushdown by statistics and column indexes over several row groups."""
    for number, options in enumerate([{}, {"plaintext_footer": True, "algorithm": CTR}]):
        path = tmp_path / f"{number}.parquet"
        apq.write_table(nested(), path, Keys(KF, {"id": K1, "list": K2}), row_group_size=200, **PAGED, **options)  # type: ignore[arg-type]
        columns = {("id",): K1, LEAVES[0]: K2}
        keys = PmeKeys(KF, columns)  # type: ignore[arg-type]
        assert rows_of(parquet_java.read(path, keys)) == rows_of(nested())
        found = parquet_java.count(path, keys, column="id", **{"is": "eq", "value": 333})
        assert (found["row_groups"], found["rows"]) == (1, 1)
        assert found["page_rows"] <= 50


# ---------------------------------------------------------------------------------------------------------- inputs


def test_pandas_with_its_index() -> None:
    pd = pytest.importorskip("pandas")
    for index in (None, pd.Index(list("xyz"), name="letter")):
        frame = pd.DataFrame({"a": [1, 2, 3], "b": ["u", None, "w"]}, index=index)
        back = opened(sealed(frame, Keys(KF, {"b": K1})), Keys(KF, {"b": K1}))
        assert pages(back) == pages(by_pyarrow(pa.Table.from_pandas(frame)))
        pd.testing.assert_frame_equal(pq.read_table(io.BytesIO(back)).to_pandas(), frame)


def test_polars() -> None:
    pl = pytest.importorskip("polars")
    frame = pl.from_arrow(flat()).with_columns(category=pl.Series(["a", "b"] * 300, dtype=pl.Categorical))
    back = opened(sealed(frame, Keys(KF)), Keys(KF))
    assert pl.read_parquet(io.BytesIO(back)).equals(frame.with_columns(category=pl.col("category")), null_equal=True)
    with pytest.raises(TypeError, match="collect"):
        sealed(frame.lazy(), Keys(KF))


class Stream:
    """Something of another library."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


def test_streams_become_row_groups_of_the_size_asked_for() -> None:
    table, keys = flat(1000), Keys(KF, {"text": K1})
    own = pages(by_pyarrow(table, row_group_size=300))
    inputs = {
        "reader": pa.RecordBatchReader.from_batches(table.schema, iter(table.to_batches(70))),
        "large batches": pa.RecordBatchReader.from_batches(table.schema, iter(table.to_batches(999))),
        "stream": Stream(table),
        "batch": table.to_batches()[0],
        "list of batches": table.to_batches(300),
        "tables": (table.slice(start, 150) for start in range(0, 1000, 150)),
        "an empty one first": [table.slice(0, 0), table],
        "frames": (Stream(table.slice(start, 500)) for start in (0, 500)),
    }
    for name, rows in inputs.items():
        for threads in (1, 2):
            if threads == 2 and not isinstance(rows, (list, pa.RecordBatch, Stream)):
                continue  # it was used up
            assert pages(opened(sealed(rows, keys, row_group_size=300, threads=threads), keys)) == own, name


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("nbytes", "files"), [(1, 7), (4_000, 4), (1 << 20, 1)])
def test_small_row_groups_are_encoded_together(
    nbytes: int, files: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of 150 rows take 3,424 bytes. The pages, and which rows a group has, do not depend on it."""
    table, encoded = pa.table({"n": pa.array(range(1000), pa.int64())}), []
    write_table = pq.ParquetWriter.write_table

    def encode(writer: Any, part: Any, *args: Any, **options: Any) -> None:
        encoded.append(part.num_rows)
        write_table(writer, part, *args, **options)

    own = pages(by_pyarrow(table, row_group_size=150))
    monkeypatch.setattr(pq.ParquetWriter, "write_table", encode)
    monkeypatch.setattr(write, "TOGETHER_NBYTES", nbytes)
    data = sealed(table, Keys(KF), row_group_size=150, threads=threads)
    assert len(encoded) == files
    assert sum(encoded) == 1000
    assert pages(opened(data, Keys(KF))) == own


def test_nothing_but_a_schema() -> None:
    """A reader without rows has no row group, as with pyarrow's ParquetWriter; a table has one without rows."""
    for rows, groups in ((pa.RecordBatchReader.from_batches(flat().schema, iter([])), 0), (flat(0), 1)):
        back = opened(sealed(rows, Keys(KF, {"text": K1})), Keys(KF, {"text": K1}))
        file = pq.ParquetFile(io.BytesIO(back))
        assert (file.metadata.num_row_groups, file.metadata.num_rows) == (groups, 0)
        assert file.schema_arrow.equals(flat().schema, check_metadata=True)


def test_targets(tmp_path: Path) -> None:
    """A path, an open file, and what cannot seek, of which all take the same."""
    keys = Keys(KF, {"text": K1})
    want = pages(by_pyarrow(flat(), row_group_size=200))
    apq.write_table(flat(), str(tmp_path / "a"), keys, row_group_size=200, fsync=True)
    with open(tmp_path / "b", "wb") as file:
        apq.write_table(flat(), file, keys, row_group_size=200)
    target = Target()
    apq.write_table(flat(), target, keys, row_group_size=200)
    for data in ((tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes(), bytes(target.taken)):
        assert pages(opened(data, keys)) == want
    (tmp_path / ".a.crc").write_bytes(b"of the file before")
    assert "Hadoop" in apq.write_table(flat(), tmp_path / "a", keys).warnings[0]
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


# ---------------------------------------------------------------------------------------------------------- plaintext


def canaries(count: int = 3000) -> Any:
    text = [f"{CANARY} {i}" for i in range(count)]
    return pa.table({"id": range(count), "text": text, "other": text})


def test_no_plaintext_where_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each write of the target, nothing in it, in the folders of temporary files or in the current one has any."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    writes = []

    def take(data: bytes, before: int) -> int:
        writes.append(data)
        assert os.listdir(tmp_path) == []
        return len(data)

    target = Target(take)
    options: dict[str, Any] = {
        "compression": "none",
        "use_dictionary": False,
        "row_group_size": 500,
        "write_page_index": True,
    }
    apq.write_table(canaries(), target, Keys(KF, {"text": K1}), plaintext_footer=True, **options)
    assert len(writes) > 6
    assert CANARY.encode() not in b"".join(writes)
    assert CANARY.encode() in by_pyarrow(canaries(), **options)


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace here")
def test_no_plaintext_in_any_system_call(tmp_path: Path) -> None:
    """Whatever a process of its own writes, to whatever it may be, none of it is plaintext."""
    log = tmp_path / "log"
    calls = "trace=write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,splice,vmsplice,memfd_create,openat"
    command = ["strace", "-f", "-qq", "-e", calls, "-s", "100000000", "-o", str(log)]
    pq.write_table(canaries(), tmp_path / "plain")
    python = [sys.executable, *program(parquets.write_encrypted, tmp_path / "plain", tmp_path / "f", KF, {"text": K1})]
    done = subprocess.run([*command, *python], env=python_env(TMPDIR=str(tmp_path)), capture_output=True, timeout=100)
    if b"ptrace" in done.stderr.lower():
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    text = log.read_bytes()
    begin = text.index(b"f.begin")
    assert b"PARE" in text[begin:]
    assert text[begin:].count(b"write(") > 5
    assert CANARY.encode() not in text[begin:]
    made = [line for line in text[begin:].splitlines() if b"O_CREAT" in line and b".agstmp" not in line]
    assert len(made) == 1, made  # f.begin


# ---------------------------------------------------------------------------------------------------------- memory


@pytest.mark.more
def test_more_than_memory() -> None:
    """240 MB by a generator, in row groups of 4 MB: never more than a few of these in memory."""
    run_python(program(parquets.write_at_length))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_generator_is_not_read_ahead(threads: int) -> None:
    pulled = 0

    def batches() -> Iterator[Any]:
        nonlocal pulled
        for batch in flat(1000).to_batches(100):
            pulled += 1
            yield batch

    leads = []

    def take(data: bytes, before: int) -> int:
        leads.append(pulled)
        return len(data)

    apq.write_table(batches(), Target(take), Keys(KF), row_group_size=100, threads=threads)
    assert leads[-1] == 10
    if threads == 1:
        assert sorted(set(leads)) == list(range(1, 11))
    else:
        assert leads[1] <= 5  # two in memory, and what was written meanwhile


# ---------------------------------------------------------------------------------------------------------- errors


class FailedSourceError(Exception):
    pass


def failing() -> Iterator[Any]:
    yield from flat(500).to_batches(100)
    raise FailedSourceError("the disk is gone")


def other_schema() -> Iterator[Any]:
    yield flat(300)
    yield nested(300)


def late_loss() -> Any:
    """Timestamps of which only the last cannot be had in milliseconds."""
    return pa.table({"text": ["x"] * 300, "moment": pa.array([0] * 299 + [1], pa.timestamp("us"))})


@pytest.mark.parametrize(
    ("rows", "options", "error", "words"),
    [
        (failing, {}, FailedSourceError, "the disk is gone"),
        (other_schema, {}, ValueError, "Schema"),
        (late_loss, {"coerce_timestamps": "ms"}, ValueError, "lose data"),
        (flat, {"keys": Keys(KF, {"txt": K1})}, ValueError, "'txt'"),
        (flat, {"compression": "no such"}, Exception, "no such"),
        (flat, {"no_such_option": 1}, TypeError, "no_such_option"),
        (flat, {"encryption_properties": object()}, TypeError, "keys tell"),
        (flat, {"filesystem": object()}, TypeError, "pass the file"),
        (flat, {"metadata_collector": []}, TypeError, "Report"),
        (flat, {"row_group_size": 0}, ValueError, "row_group_size"),
        (flat, {"threads": 0}, ValueError, "threads"),
        (flat, {"algorithm": "AES"}, ValueError, "algorithm"),
        (flat, {"other_columns": "none"}, ValueError, "other_columns"),
        (flat, {"v2_layout": "java"}, ValueError, "v2_layout"),
        (lambda: "a table", {}, TypeError, "'str'"),
        (lambda: 3, {}, TypeError, "'int'"),
        (lambda: iter([]), {}, ValueError, "RecordBatchReader"),
        (lambda: [flat(), {"a": 1}], {}, TypeError, "'dict'"),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_errors_leave_nothing(
    no_leftovers: Path, rows: Any, options: dict[str, Any], error: type[Exception], words: str, threads: int
) -> None:
    there, new = no_leftovers / "there", no_leftovers / "new"
    there.write_bytes(b"precious")
    given = {"keys": Keys(KF, {"text": K1}), "row_group_size": 100, "threads": threads, **options}
    for path in (there, new):
        with pytest.raises(error, match=words):
            apq.write_table(rows(), path, **given)
    assert there.read_bytes() == b"precious"
    assert os.listdir(no_leftovers) == ["there"]


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    def take(data: bytes, before: int) -> int:
        if before > 10_000:
            raise OSError(28, "No space left on device")
        return len(data)

    for threads in (1, 2):
        with pytest.raises(OSError, match="No space"):
            apq.write_table(flat(3000), Target(take), Keys(KF), row_group_size=500, threads=threads)


def test_a_row_group_that_is_larger_than_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer for it is too small, whether it is the first or was kept."""
    monkeypatch.setattr(table_writer, "ENCODED_BEYOND_NBYTES", 64)
    table = pa.table({"n": pa.nulls(50_000, pa.int8()), "s": ["x"] * 50_000}).append_column("i", [range(50_000)])
    for threads in (1, 2):
        out = bytearray()
        apq.write_table(table.slice(0, 9), out, Keys(KF), row_group_size=3, threads=threads)
        plain = bytearray()
        apq.decrypt_file(out, plain, Keys(KF))
        assert pq.read_table(pa.BufferReader(bytes(plain))).equals(table.slice(0, 9))


def test_what_cannot_be_numbered(no_leftovers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is encoded, if it is known by then."""
    table = pa.table({"a": pa.array(range(40_000), pa.int32())})
    encoded = []
    write_table = pq.ParquetWriter.write_table

    def encode(writer: Any, part: Any, *args: Any, **options: Any) -> None:
        encoded.append(part.num_rows)
        write_table(writer, part, *args, **options)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", encode)
    with pytest.raises(FormatError, match="40,000 row groups"):
        apq.write_table(table, no_leftovers / "f", Keys(KF), row_group_size=1)
    wide = pa.table({f"c{i}": pa.array([1], pa.int8()) for i in range(32_769)})
    with pytest.raises(FormatError, match="32768 columns"):
        apq.write_table(wide, no_leftovers / "f", Keys(KF))
    assert not encoded
    paged: dict[str, Any] = {"max_rows_per_page": 1, "write_batch_size": 1, "use_dictionary": False}
    with pytest.raises(FormatError, match="pages"):
        apq.write_table(table, no_leftovers / "f", Keys(KF), **paged)
    target = Target()
    with pytest.raises(FormatError, match="pages"):
        apq.write_table(table, target, Keys(KF), **paged)
    assert target.taken == b""  # what cannot be undone has nothing of the file
    monkeypatch.setattr(table_writer, "ORDINAL_MAX", 2)
    with pytest.raises(FormatError, match="4 row groups"):
        apq.write_table(iter(table.to_batches(10_000)), no_leftovers / "f", Keys(KF), row_group_size=10_000)
    assert os.listdir(no_leftovers) == []
