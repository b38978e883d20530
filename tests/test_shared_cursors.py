"""Threads that share one file of fsspec: each reads where it has sought, as DuckDB's threads want it."""

from __future__ import annotations

import io
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, make_kms
from support import pattern

from ags_fast import Dataset
from ags_fast import parquet as apq
from ags_fast.errors import IntegrityError
from ags_fast.parquet.view import PlainView

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

fsspec = pytest.importorskip("fsspec")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS, GROUPS = 40_000, 20


class Shared:
    """A file system, a file on it, and the bytes of that file."""

    def __init__(self, fs: Any, path: str, protocol: str) -> None:
        self.fs = fs
        self.path = path
        self.protocol = protocol
        self.data = fs.cat_file(path)

    def open(self) -> Any:
        return self.fs.open(self.path, "rb")


@pytest.fixture(scope="module", params=["ags", "ags-as-stream", "ags-parquet"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("shared")
    table = pa.table({"id": range(ROWS), "price": [i % 1000 / 8 for i in range(ROWS)]})
    if request.param == "ags-parquet":
        pq.write_table(table, folder / "plain.parquet", row_group_size=ROWS // GROUPS)
        keys = apq.Keys(bytes(range(16)))
        apq.encrypt_file(folder / "plain.parquet", folder / "t.parquet", keys)
        yield Shared(apq.filesystem(keys), f"{folder}/t.parquet", "ags-parquet")
        return
    kms = make_kms(folder)
    Dataset.create(folder / "dataset", kms=kms, wrapping_key_id=MASTER)
    fs = fsspec.filesystem("ags", dataset=folder / "dataset", kms=kms, write_options={"fsync": False})
    with fs.open("t.parquet", "wb", format="ags1" if "stream" in request.param else "parquet") as file:
        pq.write_table(table, file, row_group_size=ROWS // GROUPS)
    yield Shared(fs, "t.parquet", "ags")


def in_another_thread(work: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_read_begins_where_its_thread_has_sought(shared: Shared, size: int) -> None:
    data = shared.data
    with shared.open() as file:
        file.seek(1000)
        assert in_another_thread(lambda: (file.seek(5000), file.read(size)))[1] == data[5000 : 5000 + size]
        assert file.tell() == 1000
        assert file.read(size) == data[1000 : 1000 + size]
        out = bytearray(size)
        file.seek(2000)
        in_another_thread(lambda: file.seek(7000))
        assert file.readinto(out) == size
        assert out == data[2000 : 2000 + size]
        assert in_another_thread(lambda: file.seek(7000) and file.seek(10, io.SEEK_CUR)) == 7010
        assert file.seek(0, io.SEEK_END) == len(data)
        in_another_thread(lambda: file.seek(0))
        assert file.read() == b""
        assert file.read(5) == b""
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_threads_go_on_with_one_cursor(shared: Shared) -> None:
    """As a pool of threads does that reads a file from its beginning to its end, one piece after the other."""
    with shared.open() as file:
        file.seek(10)
        pieces = [in_another_thread(lambda: file.read(70_000)), file.read(20), in_another_thread(lambda: file.read(30))]
        assert b"".join(pieces) == shared.data[10:70_060]
        assert in_another_thread(file.tell) == file.tell() == 70_060
        in_another_thread(lambda: file.seek(500))
        assert file.read(10) == shared.data[500:510]
        assert b"".join(iter(file.readline, b"")) == shared.data[510:]


def test_lines_of_a_view_are_not_read_byte_by_byte(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, wholes = 0, {name: getattr(PlainView, name) for name in ("read_at", "readinto_at")}
    for name in wholes:

        def counted(self: Any, *args: Any, name: str = name) -> Any:
            nonlocal reads
            reads += 1
            return wholes[name](self, *args)

        monkeypatch.setattr(PlainView, name, counted)
    ways: list[Any] = [iter, lambda file: iter(file.readline, b"")]
    for lines in ways:
        with shared.open() as file:
            file.seek(10)
            assert b"".join(lines(file)) == shared.data[10:]
            assert file.tell() == len(shared.data)
    assert reads < 50


@pytest.mark.parametrize("size", [10, 5000, 200_000])
def test_many_threads(shared: Shared, size: int) -> None:
    data, begin = shared.data, threading.Barrier(8)

    def work(seed: int) -> int:
        rng, wrong = random.Random(seed), 0
        begin.wait()
        for _ in range(150):
            at, nbytes = rng.randrange(len(data)), rng.randrange(size)
            file.seek(at)
            if rng.random() < 0.5:
                wrong += file.read(nbytes) != data[at : at + nbytes]
            else:
                out = bytearray(nbytes)
                wrong += out[: file.readinto(out)] != data[at : at + nbytes]
        return wrong

    with shared.open() as file, ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 0


def test_a_reader_that_mixes_all_calls(shared: Shared) -> None:
    """One thread sees a file as `io` has it."""
    rng, plain = random.Random(1), io.BytesIO(shared.data)
    with shared.open() as file:
        for _ in range(400):
            call = rng.choice(["seek", "read", "readline", "readinto", "tell", "seek_by"])
            size = rng.randrange(0, 300_000 if rng.random() < 0.1 else 300)
            if call == "seek":
                assert file.seek(size * 20) == plain.seek(size * 20)
            elif call == "seek_by":
                assert file.seek(size, 1) == plain.seek(size, 1)
            elif call == "readinto":
                ours, theirs = bytearray(size), bytearray(size)
                assert file.readinto(ours) == plain.readinto(theirs)
                assert ours == theirs
            elif call in ("readline", "tell"):
                assert getattr(file, call)() == getattr(plain, call)()
            else:
                assert file.read(size) == plain.read(size)


@pytest.mark.parametrize("threads", [1, 4])
def test_duckdb_reads_right(shared: Shared, threads: int) -> None:
    """Also with one thread it reads ahead from several. Before, one query in two returned a wrong sum."""
    duckdb: Any = pytest.importorskip("duckdb")
    query = f"select count(*), sum(id), sum(price) from read_parquet('{shared.protocol}://{shared.path}')"
    expected = (ROWS, ROWS * (ROWS - 1) // 2, sum(i % 1000 / 8 for i in range(ROWS)))
    for _ in range(10):
        with duckdb.connect() as connection:
            connection.execute(f"set threads = {threads}")
            connection.register_filesystem(shared.fs)
            assert connection.execute(query).fetchall() == [expected]


def test_no_bytes_are_passed_over(tmp_path: Path) -> None:
    """After a read that fails, the next one begins at the same place: nobody goes on behind what was tampered with."""
    kms = make_kms(tmp_path)
    dataset = Dataset.create(tmp_path / "dataset", kms=kms, wrapping_key_id=MASTER)
    fs = fsspec.filesystem("ags", dataset=tmp_path / "dataset", kms=kms, write_options={"block_size": 65536})
    fs.pipe("x", pattern(1 << 20))
    (entry,) = fs.ls("x")
    dataset.refresh()
    (found,) = dataset.files()
    stored = next(path for path in (tmp_path / "dataset").rglob("x.*"))
    sealed = bytearray(stored.read_bytes())
    sealed[300_000] ^= 1
    stored.write_bytes(sealed)
    assert (entry["size"], found.plain_length) == (1 << 20, 1 << 20)
    with fs.open("x") as file:
        in_another_thread(lambda: file.seek(1))
        file.seek(0)
        for _ in range(2):
            with pytest.raises(IntegrityError, match="block 4"):
                file.read(500_000)
            assert file.tell() == 0
