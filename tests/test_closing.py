"""Closing in one thread while another reads or writes: no byte from, or to, a file that has the number by then."""

from __future__ import annotations

import io
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from support import KEY, open_stream, pattern, seal_stream

import ags_fast
from ags_fast import AgsReader, AgsWriter, _core, parquet
from ags_fast._core import Descriptor
from ags_fast.fs import NewFile, NewObject, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ROUNDS = 6
PLAIN = pattern(24 << 20)


class Strangers:
    """Files that are opened as soon as something else is closed, and so get its number."""

    def __init__(self, folder: Path, content: bytes = b"") -> None:
        self.path = folder / "stranger"
        self.path.write_bytes(content)
        self.content = content
        self.files: list[Any] = []

    def open(self) -> None:
        self.files = [io.FileIO(self.path, "r+b") for _ in range(8)]

    def check(self) -> None:
        for file in self.files:
            file.close()
        assert os.path.getsize(self.path) == len(self.content), "another file was written to"
        assert self.path.read_bytes() == self.content, "another file was written to"


def raced(work: Callable[[], object], close: Callable[[], object], strangers: Strangers, delay: float) -> int:
    """Work again and again in a thread, close meanwhile. Returns how often it was done before it got its ValueError."""
    started, errors, done = threading.Event(), [], 0

    def loop() -> None:
        nonlocal done
        try:
            while True:
                started.set()
                work()
                done += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    started.wait()
    time.sleep(delay)  # to be somewhere in the call; wherever that is, the outcome must be the same
    close()
    strangers.open()
    thread.join()
    strangers.check()
    assert [type(error) for error in errors] == [ValueError], errors
    assert "closed" in str(errors[0])
    return done


def delays() -> Iterator[float]:
    return (0.0005 + 0.002 * i for i in range(ROUNDS))


# ---------------------------------------------------------------- readers


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("closing") / "stream"
    path.write_bytes(seal_stream(PLAIN))
    return path


@pytest.mark.parametrize("owner", ["reader", "caller", "memory"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_reader_is_closed_while_it_reads(owner: str, threads: int, stream: Path, tmp_path: Path) -> None:
    strangers = Strangers(tmp_path, bytes(stream.stat().st_size))
    out = bytearray(len(PLAIN))
    for delay in delays():
        with open(stream, "rb", buffering=0) as file:
            source = {"reader": stream, "caller": file, "memory": stream.read_bytes()}[owner]
            reader = AgsReader(source, KEY, length=stream.stat().st_size, threads=threads)  # type: ignore[arg-type]

            def read(reader: AgsReader = reader) -> None:
                assert reader.readinto_at(0, out) == len(PLAIN)
                assert out == PLAIN

            raced(read, file.close if owner == "caller" else reader.close, strangers, delay)
        assert out == PLAIN or out.count(0) == len(PLAIN)
        reader.close()


def test_a_file_of_a_store_is_closed_while_it_is_read(stream: Path, tmp_path: Path) -> None:
    strangers = Strangers(tmp_path, bytes(stream.stat().st_size))
    sealed = stream.read_bytes()
    for delay in delays():
        out = bytearray(len(sealed))
        file = Store(stream.parent).open_once("stream")
        raced(lambda: file.readinto(out), file.__exit__, strangers, delay)  # noqa: B023
        assert out in (sealed, bytes(len(sealed)))
        with pytest.raises(ValueError, match="closed"):
            file.changed()


def test_a_reader_that_was_closed_while_it_read_keeps_no_plaintext(stream: Path) -> None:
    """A call in flight puts what it has opened where the next would find it: not once the reader is closed."""
    with open(stream, "rb") as file:

        class Closing(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                data = super().read(size)
                if armed:
                    reader.close()  # as another thread would, now
                return data

        armed = False
        reader = AgsReader(Closing(file.read()), KEY, length=None)
    armed = True
    assert reader.read_at(5, 100) == PLAIN[5:105]  # it began before
    for read in (reader.read_at, reader.readinto_at):
        with pytest.raises(ValueError, match="closed"):
            read(5, bytearray(100) if read == reader.readinto_at else 100)  # type: ignore[arg-type]
    assert reader._hot.data == b""
    assert not reader._cache


def test_a_view_is_closed_while_it_reads(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    keys = parquet.Keys(bytes(range(16)))
    plain, path = tmp_path / "plain", tmp_path / "sealed"
    pq.write_table(pa.table({"x": [os.urandom(1 << 20) for _ in range(24)]}), plain, use_dictionary=False)
    parquet.encrypt_file(plain, path, keys)
    strangers = Strangers(tmp_path, bytes(path.stat().st_size))
    with parquet.open_plain(path, keys) as view:
        expected = view.read()
    out = bytearray(len(expected))
    for delay in delays():
        with ExitStack() as stack:
            source = stack.enter_context(open(path, "rb")) if delay > 0.005 else path
            view = stack.enter_context(parquet.open_plain(source, keys, threads=1))

            def read(view: Any = view) -> None:
                assert view.readinto_at(0, out) == len(expected)
                assert out == expected

            raced(read, view.close, strangers, delay)


# ---------------------------------------------------------------- writers


@pytest.mark.parametrize("threads", [1, 2])
def test_a_writer_is_aborted_while_it_writes(threads: int, tmp_path: Path) -> None:
    strangers = Strangers(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    for delay in delays():
        writer = AgsWriter(folder / "stream", KEY, threads=threads)
        raced(lambda: writer.write(PLAIN), writer.abort, strangers, delay)  # noqa: B023
        assert os.listdir(folder) == []
        with pytest.raises(ValueError, match="not complete"):
            writer.file_length  # noqa: B018


@pytest.mark.parametrize("target", ["path", "file", "memory"])
def test_a_writer_is_closed_while_it_writes(target: str, tmp_path: Path) -> None:
    """`close` waits for the write in flight: the stream has whole writes, all of those that succeeded."""
    strangers = Strangers(tmp_path)
    path = tmp_path / "stream"
    for size, delay in zip((len(PLAIN), 3 << 20, 70_001, 99, 5), delays(), strict=False):
        written = PLAIN[:size]
        file: Any = {"path": path, "file": None, "memory": io.BytesIO()}[target]
        with open(path, "wb") if target == "file" else ExitStack() as opened:
            writer = AgsWriter(opened if target == "file" else file, KEY)  # type: ignore[arg-type]
            done = raced(lambda: writer.write(written), writer.close, strangers, delay)  # noqa: B023
        sealed = file.getvalue() if target == "memory" else path.read_bytes()
        assert writer.file_length == len(sealed)
        assert open_stream(sealed) == written * done
        with pytest.raises(ValueError, match="closed"):
            writer.write(b"x")


def test_a_file_passed_in_is_closed_while_a_writer_writes(tmp_path: Path) -> None:
    strangers = Strangers(tmp_path)
    for delay in delays():
        with open(tmp_path / "stream", "wb") as file:
            writer = AgsWriter(file, KEY)
            raced(lambda: writer.write(PLAIN), file.close, strangers, delay)  # noqa: B023
        assert writer.closed


def test_a_pipe_is_given_up_while_a_write_to_it_waits(tmp_path: Path) -> None:
    pipe, strangers = tmp_path / "pipe", Strangers(tmp_path)
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = AgsWriter(pipe, KEY)
    failed: list[BaseException] = []

    def write() -> None:
        try:
            writer.write(PLAIN)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    got = len(os.read(reading, 100))
    writer.abort()  # the pipe is full now, or soon: `abort` does not wait for it
    strangers.open()
    while thread.is_alive():
        try:
            got += len(os.read(reading, 1 << 20))
        except BlockingIOError:
            time.sleep(0.001)
    thread.join()
    os.close(reading)
    strangers.check()
    assert [type(error) for error in failed] == [ValueError]
    assert 0 < got < len(PLAIN)


class Slow(NewObject):
    """An object of a store whose requests take as long as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.path = "slow"
        self.calls: list[str] = []
        self.armed = False
        self.inside, self.go_on = threading.Event(), threading.Event()

    def _write(self, view: memoryview) -> None:
        if self.armed:
            self.inside.set()
            assert self.go_on.wait(60)
        self.calls.append("write")

    def _publish(self) -> None:
        self.calls.append("publish")

    def _discard(self) -> None:
        self.calls.append("discard")


@pytest.mark.parametrize("how", ["abort", "close"])
def test_an_object_is_given_up_or_completed_after_the_request_in_flight(how: str) -> None:
    """An upload that is aborted before its last part has come would be left in the store."""
    target = Slow()
    writer = AgsWriter(target, KEY, block_size=1 << 10)
    target.armed = True
    results: list[object] = []

    def write() -> None:
        try:
            results.append(writer.write(bytes(1 << 20)))
        except ValueError as error:
            results.append(str(error))

    thread = threading.Thread(target=write)
    thread.start()
    assert target.inside.wait(60)
    closing = threading.Thread(target=getattr(writer, how))
    closing.start()
    if how == "abort":
        closing.join()  # it waits for nobody
        assert target.calls == ["write"]
        assert writer.closed
    target.go_on.set()
    thread.join()
    closing.join()
    if how == "abort":
        assert target.calls == ["write", "write", "discard"]
        assert results == ["I/O operation on closed file"]
    else:
        assert target.calls[-1] == "publish"
        assert results == [1 << 20]
        assert writer.file_length == ags_fast.encrypted_length(1 << 20, 1 << 10)


def test_many_threads_write(tmp_path: Path) -> None:
    """Each write is taken as a whole, large or small."""
    records = [bytes([i]) * (7 if i % 2 else 3_001) for i in range(8)]
    writer = AgsWriter(tmp_path / "stream", KEY, block_size=1024)
    threads = [threading.Thread(target=lambda r=record: [writer.write(r) for _ in range(300)]) for record in records]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    plain, counts = open_stream((tmp_path / "stream").read_bytes()), [0] * 8
    at = 0
    while at < len(plain):
        record = records[plain[at]]
        assert plain[at : at + len(record)] == record
        counts[plain[at]] += 1
        at += len(record)
    assert counts == [300] * 8


def test_what_is_interrupted_cannot_be_closed_from_within() -> None:
    """As a signal's handler would: no deadlock, and nothing half done looks complete."""

    class Handler(io.BytesIO):
        def write(self, data: Any) -> int:
            if armed:
                writer.close()
            return super().write(data)

    armed, target = False, Handler()
    writer = AgsWriter(target, KEY, block_size=16)
    armed = True
    with pytest.raises(RuntimeError, match="reentrant"):
        writer.write(bytes(1 << 20))
    assert writer.closed
    with pytest.raises(ValueError, match="not complete"):
        writer.file_length  # noqa: B018


# ---------------------------------------------------------------- what they are built on


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_descriptor_is_closed_by_the_last_call() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    descriptor = Descriptor(reading)
    with descriptor as first, descriptor as second:
        assert first == second == reading
        assert descriptor.close() is False
        assert descriptor.closed
        assert is_open(reading)
        with pytest.raises(ValueError, match="closed"), descriptor:
            pass
    assert not is_open(reading)
    assert descriptor.close() is True
    assert descriptor.close() is True


def test_a_descriptor_is_closed_when_it_is_collected() -> None:
    reading, writing = os.pipe()
    descriptor = Descriptor(reading)
    descriptor.__enter__()  # as after a fork, where the thread in that call does not exist
    descriptor.close()
    assert is_open(reading)
    del descriptor
    assert not is_open(reading)
    os.close(writing)


def test_a_descriptor_tells_of_a_failed_close() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    descriptor = Descriptor(reading)
    os.close(reading)
    with pytest.raises(OSError, match="Bad file descriptor"):
        descriptor.close()


def test_no_number_reaches_the_core(stream: Path) -> None:
    with open(stream, "rb") as file, pytest.raises(TypeError):
        _core.Key(KEY).open_bytes(b"", 1 << 20, 0, file.fileno(), 8, 100, 1)  # type: ignore[arg-type]


def test_a_new_file_that_is_being_written_is_not_published(tmp_path: Path) -> None:
    new = NewFile(tmp_path / "file")
    with new.descriptor, pytest.raises(ValueError, match="another thread"):
        new.publish()
    assert os.listdir(tmp_path) == []


def test_a_new_file_that_is_discarded_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread discards it while it is published: an error, and not a success without a file."""
    new = NewFile(tmp_path / "file", fsync=True)
    monkeypatch.setattr(os, "fsync", lambda fd: new.discard())
    with pytest.raises((ValueError, FileNotFoundError)):
        new.publish()
    assert os.listdir(tmp_path) == []
    new.discard()


def test_threads_that_discard_at_once(tmp_path: Path) -> None:
    for _ in range(100):
        new = NewFile(tmp_path / "file")
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(new.discard) for _ in range(4)]:
                done.result()
        assert os.listdir(tmp_path) == []
