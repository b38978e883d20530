"""open_plain and filesystem: any reader takes an encrypted Parquet file for a plain one, and opens what it needs."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import pickle
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import hypothesis
import hypothesis.strategies as st
import parquet_corpus
import parquet_peers as peers
import pme_reference as ref
import pytest
from parquet_corpus import ENCRYPTED, MASTER_KEYS, UNREADABLE, flat, nested, parquet_testing_keys
from parquet_files import caught
from parquet_peers import CTR, ParquetJava, PmeKeys, rows_of
from pme_reference import ParquetFile, Pkmt1
from shares import rest_in_more
from support import Source, flip, run_python

from ags_fast.errors import FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.parquet import (
    FOOTER_KEY,
    Keys,
    decrypt_file,
    encrypt_file,
    open_plain,
    reencrypt_file,
    shown,
    write_table,
)
from ags_fast.parquet import filesystem as make_filesystem
from ags_fast.parquet.opened import Opened
from ags_fast.parquet.reading import Reading
from ags_fast.parquet.view import PlainView

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pa, pq = peers.pa, peers.pq

KF, K1, K2 = b"0123456789012345", b"1234567890123450" + bytes(8), b"1234567890123451" * 2
PREFIX = b"the table"
SPECULATIVE = 64 << 10  # bytes from the end, which readers read on the off chance

# How files are encrypted: the columns with keys of their own are every second one, under two keys in turn.
MODES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "ctr": {"algorithm": CTR},
    "columns": {"columns": True},
    "columns, ctr, prefix": {"columns": True, "algorithm": CTR, "aad_prefix": PREFIX, "store_aad_prefix": False},
    "partial": {"columns": True, "other_columns": "plain", "aad_prefix": PREFIX},
    "signed": {"plaintext_footer": True},
    "signed, columns": {"plaintext_footer": True, "columns": True},
    "signed, partial": {"plaintext_footer": True, "columns": True, "other_columns": "plain", "algorithm": CTR},
    "parquet-java's V2": {"columns": True, "v2_layout": "parquet-java"},
}


def plain_file(table: Any, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


PAGED = plain_file(flat(), row_group_size=200, max_rows_per_page=50, write_page_index=True, write_page_checksum=True)


def keys_of(plain: Any, mode: str) -> Keys:
    return Keys(KF, columns_of(mode, plain))


def columns_of(mode: str, plain: Any = None) -> dict[Any, bytes]:
    """Every second column has a key; `plain` is PAGED if it is not given."""
    if not MODES[mode].get("columns"):
        return {}
    with Opened(PAGED if plain is None else plain) as opened:
        return {leaf: (K1, K2)[i // 2 % 2] for i, leaf in enumerate(opened.leaves) if i % 2 == 0}


def encrypt(plain: Any, mode: str = "uniform", **options: Any) -> tuple[bytes, Keys]:
    sealed = bytearray()
    keys = keys_of(plain, mode)
    encrypt_file(plain, sealed, keys, **{name: x for name, x in MODES[mode].items() if name != "columns"}, **options)
    return bytes(sealed), keys


def view_of(plain: Any, mode: str = "uniform", **options: Any) -> PlainView:
    sealed, keys = encrypt(plain, mode)
    return open_plain(
        sealed, keys, aad_prefix=MODES[mode].get("aad_prefix"), **options, allow_ctr="algorithm" in MODES[mode]
    )


SEALED, HELD = encrypt(PAGED, "columns")
SHOWN = open_plain(SEALED, HELD).read()


def contents(plain: bytes) -> dict[tuple[Any, ...], bytes]:
    """What is in a plaintext file, without what a view adds to headers."""
    found = {}
    for at, data in ParquetFile(plain).contents().items():
        if at[0] in (ref.DATA_HEADER, ref.DICTIONARY_HEADER, ref.BLOOM_HEADER):
            header, _ = ref.parse(data)
            header.remove(14, 15)
            data = ref.serialise(header)
        found[at] = data
    return found


def places(file: ParquetFile) -> list[tuple[Any, ...]]:
    """Where parts are: pages as header and body, bloom filters as header and bits, and indexes."""
    pairs = {ref.DATA_HEADER: ref.DATA_PAGE, ref.DICTIONARY_HEADER: ref.DICTIONARY_PAGE, ref.BLOOM_HEADER: 9}
    found: list[Any] = []
    for module in file.modules():
        if module.kind in pairs.values():
            *start, length = found[-1]
            found[-1] = (*start, length + module.length)
        elif module.kind not in (ref.FOOTER, ref.COLUMN_META):
            found.append((module.kind, module.row_group, module.column, module.page, module.offset, module.length))
    return found


# ---------------------------------------------------------------- every file, every mode


@pytest.mark.parametrize(
    "mode", rest_in_more(MODES, "uniform", "columns, ctr, prefix", "signed, partial", "parquet-java's V2")
)
def test_every_file_of_the_corpus(corpus: dict[str, Path], mode: str) -> None:
    """A strict reader finds each module where it stands in the sealed file; pyarrow checks the CRCs."""
    draw = random.Random(mode)
    for i, (name, path) in enumerate(corpus.items()):
        plain = path.read_bytes()
        sealed, keys = encrypt(plain, mode)
        view = open_plain(sealed, keys, aad_prefix=MODES[mode].get("aad_prefix"), allow_ctr="algorithm" in MODES[mode])
        shown = view.read()
        assert (len(shown), shown[:4], shown[-4:], view.size) == (view.size, b"PAR1", b"PAR1", len(shown)), name
        if i % len(MODES) in (list(MODES).index(mode), list(MODES).index(mode) - 1):  # it is slow
            assert contents(shown) == contents(plain), name
            reference = ParquetFile(sealed, KF, columns_of(mode, plain), aad_prefix=MODES[mode].get("aad_prefix"))
            assert places(ParquetFile(shown)) == places(reference), name
        for _ in range(5):
            at, size = draw.randrange(view.size), draw.choice([1, 100, 8192])
            assert view.read_at(at, size) == shown[at : at + size], (name, at, size)
        table, truth = (pq.ParquetFile(one, page_checksum_verification=True).read() for one in (view, path))
        assert table.schema.equals(truth.schema, check_metadata=True), name
        assert table.equals(truth) or rows_of(table) == rows_of(truth), name  # by value NaN is not NaN


@pytest.mark.parametrize("name", ENCRYPTED)
def test_parquet_testing(vectors: Path, name: str) -> None:
    path = vectors / "parquet-testing" / "data" / f"{name}.parquet.encrypted"
    footer, columns = parquet_testing_keys(name)
    prefix = b"tester" if "disable_aad" in name else None
    if name.startswith("external"):
        material = Pkmt1(MASTER_KEYS, path)
        reference = ParquetFile(path, material.footer, material)
        keys: Any = material.key
    else:
        reference = ParquetFile(path, footer, columns, aad_prefix=prefix)
        keys = Keys(footer, dict[Any, Any](columns))
    plain = bytearray()
    known: dict[str, Any] = {"aad_prefix": prefix, "allow_ctr": "ctr" in name}
    decrypt_file(path, plain, keys, **known)
    with open_plain(path, keys, **known) as view:
        shown = view.read()
        assert contents(shown) == contents(bytes(plain))
        assert places(ParquetFile(shown)) == places(reference)
        table = pq.ParquetFile(view, page_checksum_verification=True).read()
        assert table.equals(pq.ParquetFile(io.BytesIO(plain)).read())
        assert table.num_rows > 0


# ---------------------------------------------------------------- every reader

PEER_FILES = ["v1 snappy dictionary", "v2 zstd plain", "nested", "all types", "bloom filters", "row group without rows"]

READERS: dict[str, Callable[[Any], Any]] = {
    "pyarrow": lambda file: pq.read_table(file),
    "pyarrow, streamed": lambda file: pq.ParquetFile(file, buffer_size=8192, pre_buffer=False).read(),
    "polars": peers.polars_read,
    "polars by pyarrow": lambda file: pytest.importorskip("polars").read_parquet(file, use_pyarrow=True).to_arrow(),
    "duckdb": lambda file: peers.duckdb_read_object(file),
    "fastparquet": peers.fastparquet_read,
    "pandas": lambda file: pa.Table.from_pandas(
        pytest.importorskip("pandas").read_parquet(file, dtype_backend="pyarrow")
    ),
}


READ_MODES = ("uniform", "columns, ctr, prefix", "signed, partial")


@pytest.mark.parametrize(
    ("mode", "reader"),
    rest_in_more(itertools.product(READ_MODES, READERS), *zip(itertools.cycle(READ_MODES), READERS, strict=False)),
)
def test_readers(corpus: dict[str, Path], reader: str, mode: str) -> None:
    """What a reader makes of the view is what it makes of the plaintext file."""
    for name in PEER_FILES:
        if name not in UNREADABLE.get(reader, ()):
            view = view_of(corpus[name].read_bytes(), mode)
            with corpus[name].open("rb") as file:
                truth = rows_of(READERS[reader](file))
            assert rows_of(READERS[reader](view)) == truth, name


def test_readers_that_take_little_at_a_time(corpus: dict[str, Path]) -> None:
    """8 KiB at a time, as BufferedReader and some readers do: no page is opened twice."""
    for name in ("large page", "many tiny pages", "nested"):
        sealed, keys = encrypt(corpus[name].read_bytes())
        view, fresh = (open_plain(sealed, keys, threads=threads) for threads in (2, 1))
        truth = view.read()
        once = view.decrypted
        read = functools.partial(io.BufferedReader(fresh, 8192).read, 8192)
        assert b"".join(iter(read, b"")) == truth, name
        assert fresh.decrypted == once, name


@pytest.mark.spark  # no Spark here, but what comes with it
def test_parquet_java_reads_what_the_view_shows(
    corpus: dict[str, Path], tmp_path: Path, parquet_java: ParquetJava
) -> None:
    for name in ("bloom filters", "nested v2", "row group without rows"):
        view = view_of(corpus[name].read_bytes(), "columns")
        (tmp_path / "shown").write_bytes(view.read())
        assert rows_of(parquet_java.read(tmp_path / "shown")) == parquet_corpus.rows(corpus[name]), name
    view = view_of(corpus["bloom filters"].read_bytes(), "columns")
    (tmp_path / "shown").write_bytes(view.read())
    question: dict[str, Any] = {"column": "id", "is": "eq", "value": 601, "use": ["bloom"]}
    left = parquet_java.count(tmp_path / "shown", **question)
    assert left["row_groups"] == 0  # the bloom filter says so: statistics do not
    (tmp_path / "shown").write_bytes(view_of(corpus["page index"].read_bytes()).read())
    question |= {"value": 333, "use": ["column index"]}
    left = parquet_java.count(tmp_path / "shown", **question)
    assert 0 < left["page_rows"] <= 20


def test_filters(corpus: dict[str, Path]) -> None:
    view = view_of(corpus["page index"].read_bytes(), "columns")
    truth = pq.read_table(corpus["page index"]).to_pylist()
    assert pq.read_table(view, filters=[("id", "==", 333)]).to_pylist() == [row for row in truth if row["id"] == 333]
    some = view.decrypted
    view.seek(0)
    assert 0 < some < len(view.read()) // 2  # two of three row groups were not opened
    metadata = pq.ParquetFile(view).metadata
    assert metadata.row_group(0).column(0).has_column_index
    assert metadata.row_group(0).column(0).statistics.max == 199


# ---------------------------------------------------------------- laziness


def test_opening_reads_the_footer_only(corpus: dict[str, Path]) -> None:
    for mode in MODES:
        sealed, keys = encrypt(corpus["large page"].read_bytes(), mode)
        source = Source(sealed)
        view = open_plain(source, keys, aad_prefix=MODES[mode].get("aad_prefix"), allow_ctr="algorithm" in MODES[mode])
        assert sum(size for _, size in source.requests) <= SPECULATIVE + 4, mode
        assert all(at >= len(sealed) - SPECULATIVE or (at, size) == (0, 4) for at, size in source.requests), mode
        before = len(source.requests)
        assert pq.ParquetFile(view).metadata.num_rows == 100
        assert pq.read_schema(view).names == ["bytes"]
        assert len(source.requests) == before, mode
        assert view.decrypted == 0, mode


def test_one_column_opens_that_column(corpus: dict[str, Path]) -> None:
    for mode in ("uniform", "signed, columns"):
        sealed, keys = encrypt(corpus["page index"].read_bytes(), mode)
        with Opened(sealed, Reading(keys)) as opened:
            nbytes = sum(c.numbers().compressed_nbytes for c in opened.chunks() if c.name == "text")
        view = open_plain(sealed, keys)
        assert pq.ParquetFile(view, pre_buffer=False).read(columns=["text"]).num_rows == 600
        assert view.decrypted == nbytes, mode


def test_a_page_opens_that_page() -> None:
    sealed, keys = encrypt(PAGED)
    source = Source(sealed)
    view = open_plain(source, keys)
    truth = open_plain(sealed, keys).read()
    pages = [m for m in ParquetFile(sealed, KF).modules() if m.kind == ref.DATA_HEADER and m.path == ("bytes",)]
    header = pages[2]
    [body] = [m for m in ParquetFile(sealed, KF).modules() if m.at == (ref.DATA_PAGE, *header.at[1:])]
    inside = body.begin + 10
    assert view.read_at(inside, 5) == truth[inside : inside + 5]
    assert view.decrypted == header.length + body.length
    requests = len(source.requests)
    assert view.read_at(inside + 5, 5) == truth[inside + 5 : inside + 10]  # at hand
    assert len(source.requests) == requests
    assert view.decrypted == header.length + body.length


def cache_of(view: PlainView) -> Any:
    return view._shown._cache  # noqa: SLF001 (a view says nothing of what it keeps)


@pytest.mark.parametrize("source", ["memory", "path", "file-like"])
def test_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Chunks, pages and gaps larger than what is read, or kept, at a time."""
    (tmp_path / "sealed").write_bytes(SEALED + bytes(0))
    monkeypatch.setattr("ags_fast.files.source.SMALL_FILE_NBYTES", 0)
    open_source: dict[str, Callable[[], Any]] = {
        "memory": lambda: SEALED,
        "path": lambda: tmp_path / "sealed",
        "file-like": lambda: Source(SEALED),
    }
    draw = random.Random(0)
    for window, listed, kept in ((1, 1, 1), (900, 100, 700), (5000, 3000, 3000), (1 << 20, 1 << 20, 1 << 20)):
        for name in ("WINDOW_NBYTES", "GAP_NBYTES"):
            monkeypatch.setattr(shown, name, window)
        for name in ("LIST_NBYTES", "LIST_LARGE_NBYTES"):
            monkeypatch.setattr(shown, name, listed)
        monkeypatch.setattr(shown, "CACHE_NBYTES", kept)
        with open_plain(open_source[source](), HELD, threads=2) as view:
            assert view.read() == SHOWN
            for _ in range(30):
                at, size = draw.randrange(len(SHOWN)), draw.choice([1, 700, 3000, 20_000])
                assert view.read_at(at, size) == SHOWN[at : at + size]
                nbytes = [len(data) for data in cache_of(view)._data.values()]  # noqa: SLF001
                assert sum(nbytes) <= max([kept, *nbytes])


def test_pyarrow_reads_into_its_own_memory(tmp_path: Path) -> None:
    table = pa.table({"c": pa.array(memoryview(random.Random(0).randbytes(8 << 20)).cast("q"), pa.int64())})
    sealed, keys = encrypt(plain_file(table, compression="none", use_dictionary=False, row_group_size=1 << 17))
    (tmp_path / "sealed").write_bytes(sealed)
    with open_plain(tmp_path / "sealed", keys) as view:
        whole = view.read()
        pool = pa.total_allocated_bytes()
        view.seek(4)
        buffer = view.read_buffer(len(whole))
        assert pa.total_allocated_bytes() - pool >= len(whole) - 4
        assert (buffer.to_pybytes(), view.tell()) == (whole[4:], len(whole))
        assert view.read_buffer(1).size == 0
        with pytest.raises(ValueError, match="negative"):
            view.read_buffer(-1)
        assert pq.read_table(view) == table
    changed = flip(sealed, len(sealed) // 2)
    with open_plain(changed, keys) as view, pytest.raises(IntegrityError):
        pq.read_table(view)


def test_many_chunks_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A footer of 2,000 chunks under one key: none to open it, a few to find the pages of a column."""
    table = pa.table({f"c{i}": pa.array(range(20), pa.int32()) for i in range(200)})
    plain = plain_file(table, row_group_size=2)
    sealed, keys = encrypt(plain)
    looked = []
    chunk = Opened.chunk

    def look(opened: Opened, number: int, *args: Any) -> Any:
        looked.append(number)
        return chunk(opened, number, *args)

    monkeypatch.setattr(Opened, "chunk", look)
    view = open_plain(sealed, keys)
    assert len(view.columns) == 200
    assert not looked
    assert pq.ParquetFile(view, pre_buffer=False).read(columns=["c77"]) == table.select(["c77"])
    assert 10 <= len(looked) < 200
    assert pq.read_table(view) == table
    assert view.read_at(0, view.size) == open_plain(sealed, keys).read()


def test_a_tail_shows_no_pages() -> None:
    """Readers take the last 64 KiB on the off chance: what is damaged there keeps nobody from other columns."""
    sealed, keys = encrypt(PAGED, "columns")
    last = max(m.begin for m in ParquetFile(sealed, KF, columns_of("columns")).modules() if m.offset)
    view = open_plain(flip(sealed, 8 * (last - 20)), keys)
    assert pq.ParquetFile(view).read(columns=["id"]).num_rows == 600


# ---------------------------------------------------------------- a file


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(-1, 30_000)),
        st.tuples(st.just("readinto"), st.integers(0, 30_000)),
        st.tuples(st.just("seek"), st.integers(0, 200_000)),
        st.tuples(st.just("read_at"), st.integers(0, 120_000), st.integers(0, 9000)),
    ),
    max_size=20,
)


@hypothesis.settings(max_examples=30)
@hypothesis.given(OPERATIONS, st.sampled_from([1, 2, 3]), st.booleans())
def test_it_is_a_file_like_any_other(operations: list[tuple[Any, ...]], threads: int, request_by_request: bool) -> None:
    view = open_plain(Source(SEALED) if request_by_request else SEALED, HELD, threads=threads)
    other = io.BytesIO(SHOWN)
    for operation, *args in operations:
        if operation == "read_at":
            assert view.read_at(*args) == SHOWN[args[0] : args[0] + args[1]]
        elif operation == "readinto":
            ours, theirs = bytearray(args[0]), bytearray(args[0])
            assert (view.readinto(ours), ours) == (other.readinto(theirs), theirs)
        else:
            assert getattr(view, operation)(*args) == getattr(other, operation)(*args)
        assert view.tell() == other.tell()


def test_seek_and_close(tmp_path: Path) -> None:
    sealed, keys = encrypt(PAGED)
    (tmp_path / "sealed").write_bytes(sealed)
    view = open_plain(tmp_path / "sealed", keys)
    assert isinstance(view, io.RawIOBase)
    assert view.readable()
    assert view.seekable()
    assert not view.writable()
    assert view.seek(-4, io.SEEK_END) == view.size - 4
    assert view.read(100) == b"PAR1"
    assert view.read(1) == b""
    assert view.seek(-2, io.SEEK_CUR) == view.size - 2
    assert view.readall() == b"R1"
    for bad in (
        lambda: view.seek(-1),
        lambda: view.seek(0, 7),
        lambda: view.read_at(-1, 1),
        lambda: view.read_at(0, -1),
    ):
        with pytest.raises(ValueError, match=r"cannot be negative|must be 0, 1 or 2"):
            bad()
    with pytest.raises(io.UnsupportedOperation):
        view.write(b"")
    with pytest.raises(io.UnsupportedOperation):
        view.fileno()  # readers that find one would read the sealed file
    with pytest.raises(TypeError):
        view.readinto(b"read-only")
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(view)
    shown = repr(view)
    assert "sealed" in shown
    assert KF.decode() not in shown
    assert repr(KF) not in shown
    view.close()
    view.close()
    for closed in (lambda: view.read(1), lambda: view.read_at(0, 1), view.tell, lambda: view.seek(0)):
        with pytest.raises(ValueError, match="closed"):
            closed()
    assert "closed" in repr(view)
    with open_plain(sealed, keys) as inside:
        pass
    assert inside.closed


def test_a_file_passed_in_stays_open(tmp_path: Path) -> None:
    sealed, keys = encrypt(PAGED)
    (tmp_path / "sealed").write_bytes(sealed)
    with (tmp_path / "sealed").open("rb") as file:
        file.seek(77)
        with open_plain(file, keys) as view:
            assert pq.read_table(view).num_rows == 600
        assert not file.closed
    source = Source(sealed)
    open_plain(source, keys).close()
    assert not source.closed
    with pytest.raises(PolicyError):
        open_plain(tmp_path / "sealed", keys, aad_prefix=b"none")  # and the path's descriptor is closed
    assert not [fd for fd in os.listdir("/proc/self/fd") if _link(fd) == str(tmp_path / "sealed")]


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


# ---------------------------------------------------------------- many readers


def test_threads() -> None:
    view = open_plain(SEALED, HELD, threads=2)

    def read_some(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(60):
            at, size = draw.randrange(view.size), draw.choice([10, 3000, 50_000])
            assert view.read_at(at, size) == SHOWN[at : at + size]

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(read_some, seed) for seed in range(6)]:
            done.result()


def test_opened_bytes_are_counted_by_many_threads() -> None:
    """Pages that are read whole are opened each time, exactly once; indexes are kept."""
    view = open_plain(SEALED, HELD, threads=1)
    view.read_at(0, view.size)
    first = view.decrypted
    view.read_at(0, view.size)
    again = view.decrypted - first
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: view.read_at(0, view.size), range(8)))
    assert view.decrypted == first + 9 * again
    assert first > again > 0


def test_after_a_fork() -> None:
    """A child reads through what its parent opened, also if it was forked while another thread was in the cache."""
    view = open_plain(SEALED, HELD, threads=2)
    view.read_at(5000, 3000)
    with cache_of(view)._lock:  # noqa: SLF001
        pid = os.fork()
        if pid == 0:
            status = 1
            signal.alarm(30)  # rather than to hang
            try:
                same = view.read_at(5000, 3000) == SHOWN[5000:8000] and view.read_at(0, view.size) == SHOWN
                status = 0 if same else 2
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert view.read_at(0, view.size) == SHOWN


# ---------------------------------------------------------------- keys that are missing


def test_a_missing_key_is_an_error_at_open() -> None:
    sealed, _ = encrypt(PAGED, "columns")
    with pytest.raises(KeyAccessError, match=r"'id' is needed"):
        open_plain(sealed, Keys(KF))
    with pytest.raises(ValueError, match="missing"):
        open_plain(sealed, Keys(KF), missing="drop")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="keys"):
        open_plain(sealed, None)


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_hidden_columns(plaintext_footer: bool) -> None:
    """Whole top-level fields vanish, and everything that counts columns follows."""
    order = [pq.SortingColumn(4), pq.SortingColumn(5)]  # id, after the leaves of the first fields; and text
    table = nested().select(["struct", "list"])
    for name in ("real", "id", "text"):
        table = table.append_column(flat().schema.field(name), flat()[name])
    plain = plain_file(table, row_group_size=250, write_page_index=True, sorting_columns=order)
    keys: dict[Any, Any] = {"struct.age": K1, "text": K2, "id": FOOTER_KEY}
    sealed = bytearray()
    encrypt_file(plain, sealed, Keys(KF, keys), plaintext_footer=plaintext_footer)
    with Opened(plain) as opened:
        leaves = [".".join(leaf) for leaf in opened.leaves]
    draw = random.Random(0)

    for names, left, sorted_by in (
        (("struct.age", "text"), ["struct", "list", "real", "id", "text"], [4, 5]),
        (("struct.age",), ["struct", "list", "real", "id"], [4]),
        (("text",), ["list", "real", "id", "text"], [2, 3]),
        ((), ["list", "real", "id"], [2]),
    ):
        view = open_plain(sealed, Keys(KF, {name: keys[name] for name in names}), missing="hide")
        assert sorted([*view.columns, *view.hidden]) == sorted(leaves)
        file = pq.ParquetFile(view)
        assert rows_of(file.read()) == rows_of(table.select(left))
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            assert [one.column_index for one in group.sorting_columns] == sorted_by
            columns = [group.column(i) for i in range(group.num_columns)]
            assert group.total_byte_size == sum(one.total_uncompressed_size for one in columns)
            assert all(one.has_offset_index for one in columns)
        whole = view.read_at(0, view.size)
        for _ in range(50):
            at = draw.randrange(len(whole))
            assert view.read_at(at, 500) == whole[at : at + 500]
        strict = ParquetFile(whole)
        assert len(strict.footer[7].items) == len(strict.leaves) == len(view.columns)
        assert list(strict.modules())
        for number, group in enumerate(strict.footer[4].items):
            chunks = [chunk for chunk in strict.chunks() if chunk.row_group == number]
            assert group[5] == (chunks[0].meta[11] or chunks[0].meta[9])
            assert group[6] == sum(chunk.meta[7] for chunk in chunks)
        for reader in ("polars", "duckdb"):
            view.seek(0)
            assert READERS[reader](view).select(left).num_rows == 600, reader
    # Where a hidden column stands are zeros.
    hidden = [m for m in ParquetFile(bytes(sealed), KF, {"text": K2}).modules() if m.path == ("text",) and m.offset]
    everything = open_plain(sealed, Keys(KF), missing="hide").read()
    assert hidden
    assert all(not any(everything[m.begin : m.begin + m.length]) for m in hidden)


def test_every_column_hidden() -> None:
    sealed = bytearray()
    plain = plain_file(flat().select(["id", "text"]))
    encrypt_file(plain, sealed, Keys(KF, {"id": K1, "text": K1}))
    view = open_plain(sealed, Keys(KF), missing="hide")
    assert view.columns == []
    assert view.hidden == ["id", "text"]
    assert pq.ParquetFile(view).metadata.num_rows == 600


def test_keys_by_function() -> None:
    sealed = bytearray()
    keys = Keys(KF, {"id": K1, "text": K2}, footer_metadata=b"f", column_metadata={"id": b"one", "text": b"two"})
    encrypt_file(PAGED, sealed, keys)
    known = {b"f": KF, b"one": K1, b"two": K2}
    assert rows_of(pq.read_table(open_plain(sealed, known.__getitem__))) == rows_of(flat())
    del known[b"two"]
    with pytest.raises(KeyAccessError, match="'text'"):
        open_plain(sealed, known.__getitem__)
    view = open_plain(sealed, known.__getitem__, missing="hide")
    assert view.hidden == ["text"]
    assert rows_of(pq.read_table(view)) == rows_of(flat().drop_columns(["text"]))


# ---------------------------------------------------------------- files that are not what they were


@pytest.mark.parametrize("mode", ["uniform", "columns", "signed, columns"])
def test_every_module_that_is_changed_is_named(corpus: dict[str, Path], mode: str) -> None:
    plain = corpus["bloom filters"].read_bytes()
    sealed, keys = encrypt(plain, mode)
    reference = ParquetFile(sealed, KF, columns_of(mode, plain))
    seen = set()
    for module in list(reference.modules())[:: 1 if mode == "uniform" else 3]:
        for byte in (4, -1) if module.kind != ref.FOOTER else (-1,):
            damaged = reference.flip(module, byte)
            if module.kind in (ref.FOOTER, ref.COLUMN_META):
                with pytest.raises(IntegrityError) as caught:
                    open_plain(damaged, keys)
            else:
                view = open_plain(damaged, keys)
                with pytest.raises(IntegrityError) as caught:
                    view.read()
                with pytest.raises(IntegrityError):  # each time
                    view.read_at(module.begin, 1)
                buffer = bytearray(b"x" * view.size)
                with pytest.raises(IntegrityError):
                    view.readinto_at(0, buffer)
                assert not any(buffer)
            error = caught.value
            name = {"dictionary page header": "data page header"}.get(module.name, module.name)
            assert (error.module in (name, module.name), error.row_group) == (True, module.row_group)
            assert error.column == (None if module.path is None else ".".join(module.path))
            seen.add(module.name)
    assert len(seen) > 7


def test_what_is_intact_stays_readable() -> None:
    sealed, keys = encrypt(PAGED)
    pages = [m for m in ParquetFile(sealed, KF).modules() if m.kind == ref.DATA_PAGE and m.path == ("text",)]
    view = open_plain(ParquetFile(sealed, KF).flip(pages[5]), keys)
    with pytest.raises(IntegrityError, match="data page 1 of column 'text', row group 1") as caught:
        pq.read_table(view)  # through pyarrow
    error = caught.value
    assert (error.module, error.row_group, error.column, error.page) == ("data page", 1, "text", 1)
    assert pq.ParquetFile(view, pre_buffer=False).read(columns=["id", "bytes"]).num_rows == 600
    assert pq.ParquetFile(view, pre_buffer=False).read_row_group(0).num_rows == 200
    at = pages[5].begin
    assert view.read_at(at - 500, 100) == open_plain(sealed, keys).read_at(at - 500, 100)


def test_ctr_pages_are_checked_by_their_crc() -> None:
    sealed, keys = encrypt(PAGED, "ctr")
    [page, *_] = [m for m in ParquetFile(sealed, KF).modules() if m.kind == ref.DATA_PAGE and m.path == ("bytes",)]
    damaged = ParquetFile(sealed, KF).flip(page)
    with pytest.raises(IntegrityError, match="CRC"):
        open_plain(damaged, keys, allow_ctr=True).read()
    view = open_plain(damaged, keys, check_crc=False, allow_ctr=True)
    view.read()
    with pytest.raises(OSError, match=r"(?i)crc|checksum"):  # it is still wrong for those who look
        pq.ParquetFile(view, page_checksum_verification=True).read()


def test_wrong_keys_and_prefixes() -> None:
    sealed, keys = encrypt(PAGED, "columns, ctr, prefix")
    with pytest.raises(PolicyError, match="prefix"):
        open_plain(sealed, keys, allow_ctr=True)
    for wrong in (b"another", PREFIX + b"x"):
        with pytest.raises(IntegrityError):
            open_plain(sealed, keys, aad_prefix=wrong, allow_ctr=True)
    with pytest.raises(IntegrityError) as caught:
        open_plain(sealed, Keys(K1[:16]), aad_prefix=PREFIX, allow_ctr=True)
    assert caught.value.module == "footer"
    seen: list[bytes] = []
    open_plain(sealed, keys, aad_prefix=PREFIX, aad_prefix_verifier=seen.append, allow_ctr=True)
    assert seen == [PREFIX]
    with pytest.raises(PolicyError, match="not encrypted"):
        open_plain(PAGED, keys)


def test_cut_files() -> None:
    sealed, keys = encrypt(PAGED)
    for cut in (0, 3, 11, 100, len(sealed) // 2, len(sealed) - 1):
        with pytest.raises(FormatError):
            open_plain(sealed[:cut], keys)


def test_a_source_that_is_cut_later(tmp_path: Path) -> None:
    path = tmp_path / "sealed"  # small ones are read whole when they are opened
    encrypt_file(plain_file(pa.table({"x": [random.Random(0).randbytes(300_000)]})), path, Keys(KF))
    view = open_plain(path, Keys(KF))
    os.truncate(path, 1000)
    with pytest.raises(IntegrityError, match="cut"):
        view.read()


def test_hostile_places() -> None:
    """Chunks outside the file, or on top of each other, by somebody who has the footer key."""
    sealed, keys = encrypt(PAGED)
    for number, value in (
        (9, 1 << 40),
        (9, len(sealed) - 100),
        (7, 1 << 50),
        (9, 4),
        (7, 5),
        (7, -5),
        (9, -1),
        (11, 1),
    ):
        file = ParquetFile(sealed, KF)
        chunk = file.footer[4].items[1][1].items[2][3]
        chunk.remove(11)
        chunk.set(number, ref.I64, value)
        view = open_plain(file.with_footer(), keys)
        if value < 0:
            with contextlib.suppress(FormatError, IntegrityError):  # it may be passed over
                view.read()
        else:
            caught((FormatError, IntegrityError), view.read, (number, value))


def test_bloom_filters_of_every_size() -> None:
    """What is left over in a bloom filter's place, for each number of bytes, is hidden in its header."""
    header = bytes.fromhex("15c0021c1c00001c1c00001c1c000000")  # 160 bytes; algorithm, hash and compression
    for more in (*range(300), 16_386, 16_387, 16_388, 16_389):
        filled = shown.filled(header + bytes(20), len(header) + more)
        parsed, end = ref.parse(filled)
        assert (len(filled), end) == (len(header) + more,) * 2, more
        assert all(number < 5 or number in (14, 15) for number, _, _ in parsed.fields)
        parsed.remove(14, 15)
        assert ref.serialise(parsed) == header
    with pytest.raises(FormatError):
        shown.filled(header, len(header) - 1)


# ---------------------------------------------------------------- dialects


def test_duckdbs_dialect(tmp_path: Path) -> None:
    table = flat().select(["id", "number", "text"])
    peers.duckdb_write(table, tmp_path / "dialect", KF)
    with pytest.raises(FormatError, match="duckdb"):
        open_plain(tmp_path / "dialect", Keys(KF))
    view = open_plain(tmp_path / "dialect", Keys(KF), quirks={"duckdb"})
    assert rows_of(pq.read_table(view)) == rows_of(table)
    assert list(ParquetFile(view.read_at(0, view.size)).modules())


def test_ctr_pages_that_are_not_called_so() -> None:
    """Arrow up to 25 says AES_GCM_V1 of files with a plaintext footer whose pages are under CTR."""
    sealed, keys = encrypt(PAGED, "signed, partial")
    file = ParquetFile(sealed, KF, columns_of("signed, partial"))
    file.footer[8].fields[0][0] = 1
    mislabelled = file.with_footer()
    with pytest.raises(IntegrityError):
        open_plain(mislabelled, keys).read()
    with pytest.raises(PolicyError, match=r"column 'id'.*not under AES_GCM_V1.*allow_ctr=True"):
        open_plain(mislabelled, keys, quirks={"arrow-ctr-mislabel"})
    view = open_plain(mislabelled, keys, quirks={"arrow-ctr-mislabel"}, allow_ctr=True)
    assert view.read() == open_plain(sealed, keys, allow_ctr=True).read()


@pytest.mark.parametrize("nbytes", [1, 3, 4, 11, 12, 15, 16, 17, 40])
@pytest.mark.parametrize("version", ["1.0", "2.0", "dictionary"])
def test_small_pages_that_are_not_called_ctr(nbytes: int, version: str) -> None:
    """A first page that has no room for a tag is under CTR, too."""
    values = pa.array([bytes([65 + i]) for i in range(nbytes)], pa.binary(1))
    table = pa.table([values], pa.schema([pa.field("a", pa.binary(1), nullable=version == "2.0")]))
    sink, sealed, keys = io.BytesIO(), bytearray(), Keys(KF)
    options: dict[str, Any] = {"use_dictionary": version == "dictionary", "compression": "none"}
    options["data_page_version"] = "2.0" if version == "2.0" else "1.0"
    pq.write_table(pa.concat_tables([table, table]), sink, row_group_size=nbytes, **options)
    encrypt_file(sink.getvalue(), sealed, keys, algorithm=CTR, plaintext_footer=True)
    file = ParquetFile(bytes(sealed), KF)
    assert min(one.length for one in file.modules() if one.kind in ref.PAGES) == 16 + nbytes or version != "1.0"
    file.footer[8].fields[0][0] = 1
    mislabelled, quirk = file.with_footer(), {"arrow-ctr-mislabel"}
    with pytest.raises((FormatError, IntegrityError)):
        open_plain(mislabelled, keys).read()
    with pytest.raises(PolicyError, match="not under AES_GCM_V1"):
        open_plain(mislabelled, keys, quirks=quirk)
    view = open_plain(mislabelled, keys, quirks=quirk, allow_ctr=True)
    assert pq.read_table(view) == pa.concat_tables([table, table])


def test_damage_is_no_ctr() -> None:
    """Only the first page says that a column has no tags: damage further on is damage, also of files with the quirk."""
    sealed, keys = encrypt(PAGED, "signed, partial")

    out = bytearray()
    reencrypt_file(sealed, out, keys, keys, algorithm="AES_GCM_V1", allow_ctr=True, other_columns="plain")
    file = ParquetFile(bytes(out), KF, columns_of("signed, partial"))
    pages = [one for one in file.modules() if one.kind == ref.DATA_PAGE and one.path == ("id",)]
    damaged = file.flip(pages[1])
    with pytest.raises(IntegrityError) as caught:
        open_plain(damaged, keys, quirks={"arrow-ctr-mislabel"}, allow_ctr=True).read()
    assert (caught.value.column, caught.value.page) == ("id", 1)


def test_files_of_other_writers(tmp_path: Path) -> None:
    """pyarrow and polars: no row group has an ordinal there, and polars' V2 pages are sealed as a whole."""
    for version in ("1.0", "2.0"):
        path = tmp_path / version
        peers.pyarrow_write(nested(), path, PmeKeys(KF), row_group_size=200, data_page_version=version)
        assert rows_of(pq.read_table(open_plain(path, Keys(KF)))) == rows_of(nested())
    peers.polars_write(flat(), tmp_path / "polars", PmeKeys(KF, {"id": K1[:16]}))
    view = open_plain(tmp_path / "polars", Keys(KF, {"id": K1[:16]}))
    assert rows_of(peers.polars_read(view)) == rows_of(flat())


# ---------------------------------------------------------------- filesystem


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two encrypted files of a dataset, and a plain one beside."""
    for i in range(2):
        (tmp_path / "data" / f"part={i}").mkdir(parents=True)
        plain = plain_file(flat(300, seed=i), row_group_size=100)
        encrypt_file(plain, tmp_path / "data" / f"part={i}" / "a.parquet", Keys(KF, {"text": K1}))
    (tmp_path / "plain.parquet").write_bytes(PAGED)
    return tmp_path


KEYS = Keys(KF, {"text": K1})


def test_filesystem_in_readers(folder: Path) -> None:
    pytest.importorskip("fsspec")
    fs = make_filesystem(KEYS)
    truth = rows_of(flat(300, seed=0)) + rows_of(flat(300, seed=1))
    import pyarrow.dataset as ds

    dataset = ds.dataset(str(folder / "data"), filesystem=fs, format="parquet", partitioning="hive")
    table = dataset.to_table().sort_by([("part", "ascending"), ("id", "ascending")])
    assert rows_of(table.drop_columns(["part"])) == truth
    assert dataset.to_table(filter=ds.field("id") == 7, columns=["text"]).num_rows == 2

    first = folder / "data" / "part=0" / "a.parquet"
    url = f"ags-parquet://{first}"
    columns = flat(1).column_names  # DuckDB adds those of the folders
    assert rows_of(peers.duckdb_read_through(fs, url, columns)) == truth[:300]
    both = peers.duckdb_read_through(fs, f"ags-parquet://{folder}/data/*/*.parquet", ["id", "text"], "id = 5")
    assert both.num_rows == 2
    pandas = pytest.importorskip("pandas")
    with fs.open(str(first)) as file:
        assert rows_of(pa.Table.from_pandas(pandas.read_parquet(file, dtype_backend="pyarrow"))) == truth[:300]
        file.seek(0)
        assert rows_of(peers.polars_read(file)) == truth[:300]
    fastparquet = pytest.importorskip("fastparquet")
    assert len(fastparquet.ParquetFile(str(first), fs=fs).to_pandas(columns=["id"])) == 300


def test_filesystem_tells_what_it_shows(folder: Path) -> None:
    pytest.importorskip("fsspec")
    fs = make_filesystem(KEYS)
    path = str(folder / "data" / "part=0" / "a.parquet")
    with fs.open(f"ags-parquet://{path}") as file:
        shown = file.read()
        assert (file.size, file.tell(), file.mode) == (len(shown), len(shown), "rb")
        file.seek(-4, 2)
        buffer = bytearray(10)
        assert (file.readinto(buffer), bytes(buffer[:4])) == (4, b"PAR1")
    assert fs.info(path)["size"] == fs.size(path) == len(shown) != os.path.getsize(path)
    assert fs.cat_file(path, 4, 50) == shown[4:50]
    assert fs.cat_file(path) == shown
    assert sorted(fs.ls(f"{folder}/data", detail=False)) == [f"{folder}/data/part={i}" for i in range(2)]
    assert sorted(fs.find(f"ags-parquet://{folder}/data")) == [f"{folder}/data/part={i}/a.parquet" for i in range(2)]
    assert sorted(fs.glob(f"{folder}/data/*/*.parquet")) == [f"{folder}/data/part={i}/a.parquet" for i in range(2)]
    assert fs.exists(path)
    assert fs.isfile(path)
    assert fs.isdir(str(folder))
    assert not fs.exists(path + "x")
    assert [entry["size"] for entry in fs.ls(os.path.dirname(path))] == [None]  # not the sealed file's
    assert fs.modified(path) == fs.fs.modified(path)
    for write in (lambda: fs.open(path, "wb"), lambda: fs.pipe_file(path, b""), lambda: fs.rm(path)):
        with pytest.raises((OSError, NotImplementedError)):
            write()
    assert os.path.getsize(path) > 0

    encrypt_file(plain_file(flat(10)), path, KEYS)  # a new version
    with fs.open(path) as file:
        assert fs.size(path) == file.size != len(shown)


def test_filesystem_policies(folder: Path) -> None:
    pytest.importorskip("fsspec")
    plain, sealed = str(folder / "plain.parquet"), str(folder / "data" / "part=0" / "a.parquet")
    with pytest.raises(PolicyError, match="not encrypted"):
        make_filesystem(KEYS).open(plain)
    with pytest.raises(PolicyError, match="not encrypted"):
        make_filesystem(KEYS).info(plain)
    allowing = make_filesystem(KEYS, plain="allow")
    assert allowing.cat_file(plain) == PAGED
    assert allowing.size(plain) == len(PAGED)
    with allowing.open(plain) as file:
        assert rows_of(pq.read_table(file)) == rows_of(flat())
    with pytest.raises(KeyAccessError, match="'text'"):
        make_filesystem(Keys(KF)).open(sealed)
    with make_filesystem(Keys(KF), missing="hide").open(sealed) as file:
        assert "text" not in pq.read_table(file).column_names
    with pytest.raises(FileNotFoundError):
        make_filesystem(KEYS).open(sealed + "x")
    for wrong in (lambda: make_filesystem(), lambda: make_filesystem(KEYS, keys_for=lambda path: KEYS)):
        with pytest.raises(TypeError, match="keys"):
            wrong()
    with pytest.raises(ValueError, match="plain"):
        make_filesystem(KEYS, plain="maybe")  # type: ignore[arg-type]


def test_filesystem_by_path_and_over_another() -> None:
    fsspec = pytest.importorskip("fsspec")
    target = fsspec.filesystem("memory", skip_instance_cache=True)
    for name, key in (("one", KF), ("two", K2)):
        sealed = bytearray()
        encrypt_file(PAGED, sealed, Keys(key), aad_prefix=name.encode(), store_aad_prefix=False)
        target.pipe_file(f"/view/{name}", bytes(sealed))
    asked = []

    def keys_for(path: str) -> Keys:
        asked.append(path)
        return Keys(KF if path.endswith("one") else K2)

    fs = make_filesystem(keys_for=keys_for, fs=target, aad_prefix=lambda path: path.rpartition("/")[2].encode())
    for name in ("one", "two"):
        with fs.open(f"ags-parquet:///view/{name}") as file:
            assert rows_of(pq.read_table(file)) == rows_of(flat())
    assert asked == ["/view/one", "/view/two"]
    assert make_filesystem(KEYS, target_protocol="memory").exists("/view/one")
    target.rm("/view", recursive=True)


def test_filesystems_are_kept_apart_and_keep_keys(folder: Path) -> None:
    pytest.importorskip("fsspec")
    path = str(folder / "data" / "part=0" / "a.parquet")
    good, bad = make_filesystem(KEYS), make_filesystem(Keys(K2))
    assert good is not bad
    assert good != bad
    for _ in range(2):
        with pytest.raises(IntegrityError):
            bad.open(path)
        good.open(path).close()
    assert make_filesystem(KEYS) is not good
    for hidden in (repr(good), str(vars(good)), repr(good.storage_options), good.fsid):
        assert KF.decode() not in hidden
        assert K1[:16].decode() not in hidden
    with good.open(path) as file:
        for never in (good, file):
            with pytest.raises(TypeError, match="never pickled"):
                pickle.dumps(never)
        with pytest.raises(TypeError, match="never pickled"):
            good.to_json()
        assert KF.decode() not in repr(file)


def test_it_needs_nothing_optional() -> None:
    run_python(
        "import sys\n"
        "from ags_fast.parquet import open_plain\n"
        "assert not {'pyarrow', 'fsspec', 'pandas', 'polars'} & set(sys.modules)\n"
    )


# ---------------------------------------------------------------- its length, as reports have it


@pytest.mark.parametrize("speculative", [SPECULATIVE, 0])
@pytest.mark.parametrize("mode", MODES)
def test_reports_know_the_length_of_the_view(mode: str, speculative: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the footer is larger than what a view has at its end."""
    monkeypatch.setattr("ags_fast.parquet.footer.SPECULATIVE_NBYTES", speculative)
    options = {name: value for name, value in MODES[mode].items() if name != "columns"}
    known: dict[str, Any] = {"aad_prefix": options.get("aad_prefix"), "allow_ctr": "algorithm" in options}
    for plain in (PAGED, plain_file(nested(20), row_group_size=10, write_page_index=True)):
        keys = keys_of(plain, mode)
        sealed, again, same, written = bytearray(), bytearray(), bytearray(), bytearray()
        other = Keys(K1[:16], {path: key[::-1] for path, key in columns_of(mode, plain).items()})
        made = [
            (encrypt_file(plain, sealed, keys, **options), sealed, keys),
            (reencrypt_file(sealed, again, keys, other, **known), again, other),
            (reencrypt_file(sealed, same, keys, other, same_size=True, **known), same, other),
            (write_table(pq.read_table(io.BytesIO(plain)), written, keys, **options), written, keys),
        ]
        for report, file, held in made:
            view = open_plain(file, held, **known)
            assert report.plain_length == view.size == len(view.read()), report.op
        out = bytearray()
        assert decrypt_file(sealed, out, keys, **known).plain_length == len(out)


def test_a_report_does_not_guess_the_length_of_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of metadata that nobody has opened."""
    for speculative, known in ((SPECULATIVE, True), (0, False)):
        monkeypatch.setattr("ags_fast.parquet.footer.SPECULATIVE_NBYTES", speculative)
        same = bytearray()
        report = reencrypt_file(SEALED, same, Keys(KF), Keys(K1[:16]), same_size=True)
        size = open_plain(same, Keys(K1[:16], columns_of("columns"))).size
        assert report.plain_length == (size if known else None)
