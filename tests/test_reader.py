"""AgsReader: against io.BytesIO under random operations, over every kind of source, counted, misbehaving, shared."""

from __future__ import annotations

import array
import copy
import gzip
import io
import mmap
import os
import pickle
import random
import tempfile
import threading
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from programs import streams
from shares import rest_in_more
from support import (
    KEY,
    OTHER_KEY,
    Source,
    block_of,
    flip,
    pattern,
    program,
    run_python,
    seal_stream,
    split_stream,
)

import ags_fast
from ags_fast import AgsReader, FormatError, IntegrityError, _blocks, encrypted_length

# ---------------------------------------------------------------- sources


def in_gzip(data: bytes, path: Path) -> Any:
    with gzip.open(path, "wb", compresslevel=0) as file:
        file.write(data)
    return gzip.open(path, "rb")


def in_zip(data: bytes, path: Path) -> Any:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("name", data)
    return zipfile.ZipFile(path).open("name")


def in_map(data: bytes, path: Path) -> Any:
    path.write_bytes(data)
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def unflushed(data: bytes, path: Path) -> Any:
    file = path.open("w+b", buffering=1 << 20)
    file.write(data)
    return file


def opened(path: Path, data: bytes, buffering: int = -1) -> Any:
    path.write_bytes(data)
    return path.open("rb", buffering)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def temporary(data: bytes, make: Any) -> Any:
    file = make()
    file.write(data)
    return file


# How to make a source of each kind from a stream's bytes and a path to use.
KINDS = {
    "path": lambda data, path: written(path, data),
    "path as text": lambda data, path: str(written(path, data)),
    "buffered file": lambda data, path: opened(path, data),
    "raw file": lambda data, path: opened(path, data, 0),
    "file not yet flushed": unflushed,
    "bytes": lambda data, path: data,
    "bytearray": lambda data, path: bytearray(data),
    "memoryview": lambda data, path: memoryview(b"x" + data)[1:],
    "array": lambda data, path: array.array("b", data),
    "mmap": in_map,
    "BytesIO": lambda data, path: io.BytesIO(data),
    "buffered BytesIO": lambda data, path: io.BufferedReader(io.BytesIO(data), 100),
    "gzip": in_gzip,
    "zip": in_zip,
    "named temporary file": lambda data, path: temporary(data, tempfile.NamedTemporaryFile),
    "spooled temporary file": lambda data, path: temporary(data, tempfile.SpooledTemporaryFile),
    "file-like": lambda data, path: Source(data),
    "short reads": lambda data, path: Source(data, lambda at, right: right[: 1 + (at + len(right)) % 50]),
    "returns bytearrays": lambda data, path: Source(data, lambda at, right: bytearray(right)),
    "returns memoryviews": lambda data, path: Source(data, lambda at, right: memoryview(right)),
}
FEW_KINDS = ["path", "raw file", "bytes", "gzip", "short reads"]


def close(source: object) -> None:
    if hasattr(source, "close"):
        source.close()


@pytest.mark.parametrize("size", [0, 1000, 200_000])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source(kind: str, size: int, tmp_path: Path) -> None:
    """Offsets count from the beginning wherever its cursor is; bytes behind the length do not matter; left open."""
    plain = pattern(size)
    sealed = seal_stream(plain, prefix=b"p", block_size=10_000)
    source = KINDS[kind](sealed + b"trailing", tmp_path / "file")
    if hasattr(source, "seek"):
        source.seek(5)
    reader = AgsReader(source, KEY, length=len(sealed), aad_prefix=b"p")
    assert (reader.length, reader.block_size) == (size, 10_000)
    assert reader.read_at(size // 2, 100) == plain[size // 2 : size // 2 + 100]
    if hasattr(source, "seek"):
        source.seek(3)
    assert reader.read() == plain
    with pytest.raises(IntegrityError, match="8 bytes follow"):
        reader.verify()
    reader.close()
    if hasattr(source, "closed"):
        assert not source.closed
    close(source)


def test_bytes_that_are_still_in_a_files_buffer(tmp_path: Path) -> None:
    for plain in (pattern(10), pattern(200_000)):
        sealed = seal_stream(plain)
        with (tmp_path / "file").open("w+b", buffering=1 << 20) as file:
            file.write(sealed)
            assert AgsReader(file, KEY, length=len(sealed)).read() == plain


def test_fsspec_sources(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    plain = pattern(200_000)
    sealed = seal_stream(plain, block_size=10_000)
    for url in (f"memory://{tmp_path.name}", f"file://{tmp_path}/local"):
        with fsspec.open(url, "wb") as file:
            file.write(sealed)
        with fsspec.open(url, "rb") as file, AgsReader(file, KEY, length=len(sealed)) as reader:
            assert reader.read_at(150_000, 99) == plain[150_000:150_099]
            assert reader.read() == plain


def test_sources_that_cannot_be_used(tmp_path: Path) -> None:
    sealed = seal_stream(b"abc")
    with pytest.raises(FileNotFoundError):
        AgsReader(tmp_path / "missing", KEY, length=None)
    with pytest.raises(IsADirectoryError):
        AgsReader(tmp_path, KEY, length=None)
    for junk in (5, None, object(), [1, 2]):
        with pytest.raises(TypeError):
            AgsReader(junk, KEY, length=None)  # type: ignore[arg-type]
    with pytest.raises(BufferError):
        AgsReader(memoryview(sealed)[::2], KEY, length=None)
    (tmp_path / "file").write_bytes(sealed)
    with (tmp_path / "file").open(encoding="latin-1") as text, pytest.raises(TypeError):
        AgsReader(text, KEY, length=len(sealed))
    closed = (tmp_path / "file").open("rb")
    closed.close()
    for source in (closed, io.BytesIO(sealed)):
        source.close()
        with pytest.raises(ValueError, match="closed"):
            AgsReader(source, KEY, length=len(sealed))
    reading, writing = os.pipe()
    os.write(writing, sealed)
    os.close(writing)
    with io.FileIO(reading) as pipe, pytest.raises(io.UnsupportedOperation, match="seek"):
        AgsReader(pipe, KEY, length=len(sealed))
    os.mkfifo(tmp_path / "fifo")
    fifo = os.open(tmp_path / "fifo", os.O_RDWR)  # so that nobody waits for the other end
    with pytest.raises(io.UnsupportedOperation, match="seek"):
        AgsReader(tmp_path / "fifo", KEY, length=len(sealed))
    os.close(fifo)


def test_a_pipe_by_its_path(tmp_path: Path) -> None:
    """Nobody waits for somebody to write to it: it cannot be read by position anyway."""
    os.mkfifo(tmp_path / "fifo")
    run_python(
        program(streams.read_a_fifo, tmp_path / "fifo"),
        timeout=30,
    )


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_constructor_failures_leave_nothing_open(tmp_path: Path) -> None:
    sealed = seal_stream(pattern(100_000), block_size=10_000)
    path = written(tmp_path / "file", sealed)
    data = bytearray(sealed)
    before = descriptors()
    for options, expected in (
        ({"length": len(sealed) + 1}, IntegrityError),
        ({"length": len(sealed) - 10_000}, FormatError),
        ({"length": 3}, FormatError),
        ({"length": len(sealed), "block_size": 7}, FormatError),
        ({"length": len(sealed), "max_block_size": 9999}, FormatError),
        ({"length": len(sealed), "threads": 0}, ValueError),
        ({"length": "100"}, TypeError),
        ({"length": -1}, ValueError),
        ({}, TypeError),
    ):
        for source in (path, data):
            with pytest.raises(expected):
                AgsReader(source, KEY, **options)
    with pytest.raises(ValueError, match="key"):
        AgsReader(path, b"short", length=len(sealed))
    with pytest.raises(IsADirectoryError):
        AgsReader(tmp_path, KEY, length=None)
    with pytest.raises(ValueError, match="null"):
        AgsReader(f"{path}\0", KEY, length=None)
    assert descriptors() == before
    data.append(0)  # BufferError if anybody still held it


# ---------------------------------------------------------------- against io.BytesIO


class ReaderMachine(RuleBasedStateMachine):
    """The reader must do what io.BytesIO over the plaintext does.

    The sizes of cache, read-ahead and requests are small, so that little data goes through all of the code.
    """

    offsets = st.integers(0, 300)
    sizes = st.integers(0, 300) | st.sampled_from([1, 2, 10, 16, 1 << 40])

    @initialize(
        kind=st.sampled_from(FEW_KINDS),
        block_size=st.sampled_from([1, 7, 16, 64, 300]),
        plain_length=st.integers(0, 250),
        small=st.sampled_from([0, 64 << 10]),
        cache=st.sampled_from([1, 20, 40, 4 << 20]),
        ahead=st.sampled_from([1, 30, 100]),
        request=st.sampled_from([1, 50, 64 << 20]),
        lines=st.sampled_from([1, 20, 8 << 10]),
        threads=st.integers(1, 3),
    )
    def start(
        self,
        kind: str,
        block_size: int,
        plain_length: int,
        small: int,
        cache: int,
        ahead: int,
        request: int,
        lines: int,
        threads: int,
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.patches = [
            mock.patch(f"ags_fast.{name}", value)
            for name, value in {
                "files.source.SMALL_FILE_NBYTES": small,
                "_blocks.CACHE_NBYTES": cache,
                "_blocks.AHEAD_NBYTES": ahead,
                "_blocks.REQUEST_NBYTES": request,
                "_cursor.LINES_NBYTES": lines,
                "_cursor.MOST_LINES_NBYTES": 3 * lines,
            }.items()
        ]
        for patch in self.patches:
            patch.start()
        self.plain = bytes(byte if byte % 8 else 10 for byte in pattern(plain_length))
        self.model = io.BytesIO(self.plain)
        sealed = seal_stream(self.plain, block_size=block_size)
        self.source = KINDS[kind](sealed, Path(self.folder.name) / "file")
        self.reader = AgsReader(self.source, KEY, length=len(sealed), threads=threads)

    def teardown(self) -> None:
        if hasattr(self, "reader"):
            self.reader.close()
            close(self.source)
            for patch in self.patches:
                patch.stop()
            self.folder.cleanup()

    @rule(offset=st.integers(-20, 320), whence=st.sampled_from([io.SEEK_SET, io.SEEK_CUR, io.SEEK_END]))
    def seek(self, offset: int, whence: int) -> None:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.model.tell(), io.SEEK_END: len(self.plain)}[whence]
        if base + offset < 0:
            with pytest.raises(ValueError, match="negative"):
                self.reader.seek(offset, whence)
        else:
            assert self.reader.seek(offset, whence) == self.model.seek(base + offset)

    @rule(size=sizes | st.sampled_from([None, -1]))
    def read(self, size: int | None) -> None:
        assert self.reader.read(size) == self.model.read(size)

    @rule(size=st.integers(1, 40), times=st.integers(1, 12))
    def read_steadily(self, size: int, times: int) -> None:
        for _ in range(times):
            assert self.reader.read(size) == self.model.read(size)

    @rule()
    def readall(self) -> None:
        assert self.reader.readall() == self.model.read()

    @rule(size=st.integers(0, 300))
    def readinto(self, size: int) -> None:
        ours, theirs = bytearray(b"\xa5" * size), bytearray(b"\xa5" * size)
        assert self.reader.readinto(ours) == self.model.readinto(theirs)
        assert ours == theirs

    @rule(size=st.sampled_from([None, -1]) | sizes, times=st.integers(1, 4))
    def readline(self, size: int | None, times: int) -> None:
        for _ in range(times):
            assert self.reader.readline(size) == self.model.readline(size)
            assert self.reader.tell() == self.model.tell()

    @rule(offset=offsets, size=sizes)
    def read_at(self, offset: int, size: int) -> None:
        assert self.reader.read_at(offset, size) == self.plain[offset : offset + size]

    @rule(offset=offsets, size=st.integers(0, 300))
    def readinto_at(self, offset: int, size: int) -> None:
        out = bytearray(b"\xa5" * size)
        right = self.plain[offset : offset + size]
        assert self.reader.readinto_at(offset, out) == len(right)
        assert out == right + b"\xa5" * (size - len(right))

    @rule(ranges=st.lists(st.tuples(offsets, sizes), max_size=8))
    def read_ranges(self, ranges: list[tuple[int, int]]) -> None:
        assert self.reader.read_ranges(iter(ranges)) == [self.plain[o : o + s] for o, s in ranges]

    @rule(offset=st.integers(-5, 0), size=st.integers(-5, 0))
    def negative(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0:
            with pytest.raises(ValueError, match="negative"):
                self.reader.read_at(offset, size)
            with pytest.raises(ValueError, match="negative"):
                self.reader.read_ranges([(0, 1), (offset, size)])
        if offset < 0:
            with pytest.raises(ValueError, match="negative"):
                self.reader.readinto_at(offset, bytearray(-size))

    @rule()
    def verify(self) -> None:
        passed: list[int] = []
        self.reader.verify(passed.append)
        assert sum(passed) == len(self.plain)

    @rule(offset=offsets)
    def move_the_sources_cursor(self, offset: int) -> None:
        if hasattr(self.source, "seek"):
            self.source.seek(offset)

    @invariant()
    def same_position(self) -> None:
        if hasattr(self, "reader"):
            assert self.reader.tell() == self.model.tell()


TestReaderMachine = ReaderMachine.TestCase
TestReaderMachine.settings = hypothesis.settings(max_examples=100, stateful_step_count=30)


@pytest.mark.slow
def test_reader_machine_for_longer() -> None:
    hypothesis.stateful.run_state_machine_as_test(
        ReaderMachine, settings=hypothesis.settings(max_examples=1500, stateful_step_count=60, derandomize=False)
    )


# ---------------------------------------------------------------- requests, counted

BLOCK = 10_000
SEALED = BLOCK + 28


def counted(blocks: int = 40, extra: int = 0, **options: Any) -> tuple[AgsReader, Source, bytes]:
    plain = pattern(blocks * BLOCK + extra)
    sealed = seal_stream(plain, block_size=BLOCK)
    source = Source(sealed)
    reader = AgsReader(source, KEY, length=len(sealed), **options)
    source.requests.clear()
    return reader, source, plain


def requested(source: Source) -> list[tuple[int, int]]:
    """The blocks that were asked for, by first and end, since the last call."""
    blocks = []
    for offset, size in source.requests:
        assert (offset - 8) % SEALED == 0
        blocks.append(((offset - 8) // SEALED, -(-(offset + size - 8) // SEALED)))
    source.requests.clear()
    return blocks


def test_small_reads_in_a_block_cost_one_opening() -> None:
    reader, source, plain = counted()
    for i in range(100):
        offset = 3 * BLOCK + i * 97
        assert reader.read_at(offset, 50) == plain[offset : offset + 50]
        assert reader.readinto_at(offset, bytearray(10)) == 10
    assert requested(source) == [(3, 4)]
    reader.read_ranges([(5 * BLOCK + i, 10) for i in range(100)])
    assert requested(source) == [(5, 6)]
    for i in range(1000):  # the cache keeps both
        reader.read_at((3, 5)[i % 2] * BLOCK + i, 10)
    assert requested(source) == []


def test_small_reads_of_a_path_cost_one_opening(tmp_path: Path) -> None:
    """What has been opened does not change with the file; what has not is opened as it is now."""
    plain = pattern(20 * BLOCK)
    path = written(tmp_path / "file", seal_stream(plain, block_size=BLOCK))
    with AgsReader(path, KEY, length=None) as reader:
        assert reader.read_at(5, 5) == plain[5:10]
        with path.open("r+b") as file:
            file.seek(1000)
            file.write(bytes(SEALED))
        assert reader.read_at(9000, 1000) == plain[9000:10_000]
        with pytest.raises(IntegrityError):
            reader.read_at(BLOCK, 10)
        with pytest.raises(IntegrityError):  # wanted whole, it goes straight to the caller, and so is opened again
            reader.read_at(0, BLOCK + 1)


def test_cache_is_bounded_and_forgets_the_least_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocks, "CACHE_NBYTES", 3 * BLOCK)
    reader, source, _ = counted()

    def touch(*blocks: int) -> list[tuple[int, int]]:
        for block in blocks:
            reader.read_at(block * BLOCK + 1, 1)
        return requested(source)

    assert touch(0, 10, 20, 0) == [(0, 1), (10, 11), (20, 21)]
    assert touch(30) == [(30, 31)]  # 10 goes
    assert touch(0, 20, 30) == []
    assert touch(10) == [(10, 11)]  # 0 goes
    assert touch(20, 30, 10, 0) == [(0, 1)]


def test_cache_of_tiny_blocks_is_bounded_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objects around opened blocks count, too: 4 MiB in blocks of two bytes would be half a gigabyte of them."""
    monkeypatch.setattr(_blocks, "CACHE_NBYTES", 10_000)
    sealed = seal_stream(bytes(20_000), block_size=2)
    reader = AgsReader(sealed, KEY, length=len(sealed), threads=1)
    tracemalloc.start()
    try:
        for offset in range(0, 20_000, 2):
            reader.read_at(offset, 1)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 100_000, held


@pytest.mark.parametrize(
    ("first", "end"), [(0, 40 * BLOCK - 100), (100, 15 * BLOCK + 1), (3 * BLOCK, 9 * BLOCK), (BLOCK - 1, BLOCK + 1)]
)
def test_one_request_for_a_contiguous_range(first: int, end: int) -> None:
    def read(reader: AgsReader) -> bytes:
        reader.seek(first)
        return reader.read(end - first)

    def readinto_at(reader: AgsReader) -> bytes:
        out = bytearray(end - first)
        assert reader.readinto_at(first, out) == len(out)
        return bytes(out)

    for call in (read, readinto_at, lambda reader: reader.read_at(first, end - first)):
        reader, source, plain = counted(extra=-100)
        assert call(reader) == plain[first:end]
        assert requested(source) == [(first // BLOCK, -(-end // BLOCK))]


def test_a_request_leaves_out_what_is_at_hand() -> None:
    reader, source, plain = counted()
    assert reader.readall() == plain
    assert requested(source) == [(0, 40)]
    reader.read_at(3 * BLOCK + 1, 1)
    reader.read_at(7 * BLOCK + 1, 1)
    source.requests.clear()
    assert reader.read_at(3 * BLOCK + 5, 4 * BLOCK) == plain[3 * BLOCK + 5 : 7 * BLOCK + 5]
    assert requested(source) == [(4, 7)]


def test_an_edge_at_hand_that_the_other_edge_throws_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cache has room for one block: any of more than 2 MiB."""
    monkeypatch.setattr(_blocks, "CACHE_NBYTES", BLOCK)
    for at_hand in (7 * BLOCK + 1, 5 * BLOCK + 1):
        reader, _, plain = counted()
        reader.read_at(at_hand, 10)
        assert reader.read_at(5 * BLOCK + 5, 2 * BLOCK + 10) == plain[5 * BLOCK + 5 : 7 * BLOCK + 15]


def test_large_ranges_are_fetched_in_bounded_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocks, "REQUEST_NBYTES", 4 * BLOCK)
    reader, source, plain = counted(extra=77)
    assert reader.read_at(5, 1 << 40) == plain[5:]
    blocks = requested(source)
    assert [b for span in blocks for b in range(*span)] == list(range(41))
    assert max(end - first for first, end in blocks) <= 5
    assert reader.read_ranges([(0, 30 * BLOCK), (30 * BLOCK, BLOCK)]) == [
        plain[: 30 * BLOCK],
        plain[30 * BLOCK : 31 * BLOCK],
    ]


def test_ranges_are_coalesced() -> None:
    reader, source, plain = counted()
    ranges = [
        (20 * BLOCK, 10),  # of its own
        (3 * BLOCK + 5, 100),
        (4 * BLOCK + 5, 100),  # the next block: touches
        (3 * BLOCK + 50, 100),  # overlaps
        (6 * BLOCK, 0),  # nothing
        (10 * BLOCK, 3 * BLOCK),
        (11 * BLOCK + 1, 10),  # inside
        (39 * BLOCK, 1 << 40),
        (20 * BLOCK, 10),  # again
        (99 * BLOCK, 10),  # behind the end
        (13 * BLOCK, 10),  # touches the long one, not the one inside
    ]
    assert reader.read_ranges(ranges) == [plain[o : o + s] for o, s in ranges]
    assert requested(source) == [(3, 5), (10, 14), (20, 21), (39, 40)]
    assert reader.read_ranges([]) == []


def test_verify_reads_everything_once_in_bounded_requests() -> None:
    reader, source, _ = counted(1000)
    reader.verify()
    blocks = requested(source)
    assert [b for span in blocks for b in range(*span)] == list(range(1000))
    assert max(end - first for first, end in blocks) <= _blocks.CACHE_NBYTES // BLOCK


@pytest.mark.parametrize("step", [100, 3000, BLOCK, 25_000])
def test_read_ahead_is_bounded_and_reads_everything_once(step: int) -> None:
    """A cursor that moves steadily: few requests, none larger than promised, no byte twice."""
    threads = 2
    reader, source, plain = counted(400, threads=threads)
    assert b"".join(iter(lambda: reader.read(step), b"")) == plain
    blocks = requested(source)
    assert [b for span in blocks for b in range(*span)] == list(range(400))
    most = max(threads * _blocks.AHEAD_NBYTES // BLOCK, step // BLOCK + 2)
    assert max(end - first for first, end in blocks) <= most
    if step < BLOCK:
        assert len(blocks) < 40


def test_no_read_ahead_for_a_cursor_that_jumps() -> None:
    reader, source, plain = counted(400)
    rng = random.Random(0)
    for _ in range(100):
        offset = reader.seek(rng.randrange(400) * BLOCK + 5)
        assert reader.read(10) == plain[offset : offset + 10]
    assert all(end - first == 1 for first, end in requested(source))
    for offset in range(0, 100 * BLOCK, BLOCK):  # nor for reads without a cursor
        reader.read_at(offset, 10)
    assert all(end - first == 1 for first, end in requested(source))


@pytest.mark.parametrize("block_size", [10_000, 1 << 20])
def test_memory_of_a_long_read(block_size: int, tmp_path: Path) -> None:
    """A stream read in steps needs its blocks in flight, not the stream."""
    threads = 2
    path = written(tmp_path / "file", ags_fast.AgsCodec(KEY, block_size=block_size).encrypt(bytes(64 << 20)))
    tracemalloc.start()
    try:
        with AgsReader(path, KEY, length=None, threads=threads) as reader:
            while reader.read(77_777):
                pass
            reader.seek(0)
            for offset in range(0, 64 << 20, 300_000):
                reader.read_at(offset, 100)
            reader.verify()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= (threads + 2) * block_size + (8 << 20)


# ---------------------------------------------------------------- sources that misbehave


class TroubleError(OSError):
    """An error that only the source can have raised."""


def misbehaving(answer: Any, blocks: int = 20) -> tuple[AgsReader, bytes]:
    """A reader whose source behaves until it is open."""
    plain = pattern(blocks * BLOCK)
    sealed = seal_stream(plain, block_size=BLOCK)
    source = Source(sealed)
    reader = AgsReader(source, KEY, length=len(sealed))
    source.answer = answer
    return reader, plain


def raising(error: BaseException) -> Any:
    def answer(at: int, right: bytes) -> bytes:
        raise error

    return answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda at, right: b"", IntegrityError),  # shrunk
        (lambda at, right: right[:100] if at < 500 else b"", IntegrityError),
        (lambda at, right: bytes(len(right)), IntegrityError),
        (lambda at, right: right + b"x", OSError),  # more than asked for
        (lambda at, right: right[: len(right) // 2] or right * 3, OSError),
        (lambda at, right: None, BlockingIOError),
        (lambda at, right: "text"[: len(right)], TypeError),
        (raising(EOFError("end")), IntegrityError),  # readers of Avro take an EOFError for the end of the data
        (raising(TroubleError(5, "the source's own")), TroubleError),
        (raising(KeyboardInterrupt()), KeyboardInterrupt),
    ],
)
def test_misbehaving_sources(answer: Any, expected: type[BaseException]) -> None:
    """Never a short result and never an EOFError inside the length; the source's error is the source's."""
    for call in (
        lambda reader: reader.read(),
        lambda reader: reader.read(5),
        lambda reader: reader.read_at(3 * BLOCK, 4 * BLOCK),
        lambda reader: reader.read_ranges([(5, 5), (9 * BLOCK, 5)]),
        lambda reader: reader.verify(),
    ):
        reader, plain = misbehaving(answer)
        with pytest.raises(expected) as caught:
            call(reader)
        assert not isinstance(caught.value, EOFError)
        assert reader.tell() == 0
    for at in (False, True):
        reader, plain = misbehaving(answer)
        out = bytearray(b"\xa5" * (5 * BLOCK))
        with pytest.raises(expected):
            reader.readinto_at(77, out) if at else reader.readinto(out)
        assert out == bytes(len(out))
    reader._file.file.answer = lambda at, right: right  # type: ignore[union-attr]  # it has come back to its senses
    assert reader.read() == plain


@pytest.mark.parametrize(
    "answer", [raising(EOFError()), lambda at, right: b"", lambda at, right: right[:-1] if at else b""]
)
def test_misbehaving_while_it_is_opened(answer: Any) -> None:
    sealed = seal_stream(pattern(100))
    with pytest.raises(IntegrityError):
        AgsReader(Source(sealed, answer), KEY, length=len(sealed))


@pytest.mark.parametrize("block_size", [1000, 300_000])
@pytest.mark.parametrize("kind", ["path", "buffered file"])
def test_a_file_that_shrinks(kind: str, block_size: int, tmp_path: Path) -> None:
    """The block that is cut is named, also where one system call reads many; the blocks before it stay readable."""
    plain = pattern(20 * block_size if block_size > 1000 else 100 * block_size)
    sealed = seal_stream(plain, block_size=block_size)
    step = block_size + 28
    for cut, first_bad in ((8 + 15 * step + 500, 15), (8 + 15 * step, 15), (8 + 15 * step - 1, 14), (8 + 3, 0), (0, 0)):
        source = KINDS[kind](sealed, tmp_path / "file")
        with AgsReader(source, KEY, length=len(sealed), threads=2) as reader:
            os.truncate(tmp_path / "file", cut)
            out = bytearray(b"\xa5" * len(plain))
            blamed = []
            for call in (lambda r=reader, o=out: r.readinto(o), reader.read, reader.verify):
                with pytest.raises(IntegrityError) as caught:
                    call()
                blamed.append(caught.value.block_index)
            assert out == bytes(len(plain))
            assert reader.read_at(0, first_bad * block_size) == plain[: first_bad * block_size]
            assert blamed == [first_bad] * 3
        close(source)


@pytest.mark.parametrize("step", [100, 3000])
def test_read_ahead_of_a_source_that_ends(step: int) -> None:
    """What was asked for is there; that what was read ahead of it is not there is no reason to withhold it."""
    reader, plain = misbehaving(lambda at, right: right[: max(0, 8 + 12 * SEALED + 500 - at)])
    parts: list[bytes] = []
    with pytest.raises(IntegrityError):
        parts.extend(iter(lambda: reader.read(step), None))
    got = b"".join(parts)
    assert len(got) == 12 * BLOCK // step * step
    assert plain.startswith(got)


@pytest.mark.parametrize("kind", ["buffered file", "BytesIO"])
def test_a_source_that_somebody_closes(kind: str, tmp_path: Path) -> None:
    """ValueError, and never the bytes of the file that has got its descriptor's number since."""
    plain = pattern(20 * BLOCK)
    sealed = seal_stream(plain, block_size=BLOCK)
    source = KINDS[kind](sealed, tmp_path / "file")
    reader = AgsReader(source, KEY, length=len(sealed))
    source.close()
    with (tmp_path / "other").open("w+b") as other:
        other.write(sealed)
        other.flush()
        for call in (reader.read, lambda: reader.read_at(5, 5), reader.verify):
            with pytest.raises(ValueError, match="closed"):
                call()
    reader.close()


# ---------------------------------------------------------------- empty streams, verify


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_empty_streams(kind: str, tmp_path: Path) -> None:
    sealed = seal_stream(b"")
    for data in (sealed, sealed[:8]):
        source = KINDS[kind](data, tmp_path / "file")
        reader = AgsReader(source, KEY, length=len(data))
        assert reader.length == 0
        assert reader.read() == b"" == reader.read(10) == reader.read_at(0, 5) == reader.readall()
        assert reader.readinto(bytearray(5)) == 0
        assert reader.read_ranges([(0, 5)]) == [b""]
        assert reader.seek(0, io.SEEK_END) == 0
        reader.verify()
        close(source)
    for call in (
        lambda r: r.read(),
        lambda r: r.read(5),
        lambda r: r.read(0),
        lambda r: r.readall(),
        lambda r: r.readinto(bytearray(5)),
        lambda r: r.read_at(0, 5),
        lambda r: r.read_ranges([(0, 5)]),
        lambda r: r.verify(),
    ):
        source = KINDS[kind](sealed, tmp_path / "file")
        with AgsReader(source, OTHER_KEY, length=36) as reader:
            for _ in range(2):
                with pytest.raises(IntegrityError) as caught:
                    call(reader)
                assert caught.value.block_index == 0
        close(source)


def test_verify_reports(tmp_path: Path) -> None:
    plain = pattern(30 * (1 << 20) // 8 + 5)
    sealed = seal_stream(plain, block_size=100_000)
    for data, expected in ((sealed, None), (sealed + b"x", "1 bytes follow")):
        source = written(tmp_path / "file", data)
        with AgsReader(source, KEY, length=len(sealed)) as reader:
            reader.seek(17)
            passed: list[int] = []
            if expected is None:
                assert reader.verify(passed.append) is None  # type: ignore[func-returns-value]
            else:
                with pytest.raises(IntegrityError, match=expected) as caught:
                    reader.verify(passed.append)
                assert caught.value.block_index is None
            assert sum(passed) == len(plain)
            assert min(passed) > 0
            assert reader.tell() == 17
            assert reader.read(3) == plain[17:20]
    header, blocks = split_stream(sealed)
    bad = header + b"".join([*blocks[:20], flip(blocks[20], 5), blocks[21], flip(blocks[22], 5), *blocks[23:]])
    with AgsReader(bad, KEY, length=len(bad)) as reader:
        with pytest.raises(IntegrityError) as caught:
            reader.verify()
        assert caught.value.block_index == 20


def test_verify_passes_on_what_its_callback_raises() -> None:
    sealed = seal_stream(pattern(1000))

    def progress(nbytes: int) -> None:
        raise TroubleError

    with AgsReader(sealed, KEY, length=len(sealed)) as reader, pytest.raises(TroubleError):
        reader.verify(progress)


# ---------------------------------------------------------------- as a file object


def test_closed(tmp_path: Path) -> None:
    sealed = seal_stream(pattern(100_000), block_size=BLOCK)
    reader = AgsReader(written(tmp_path / "file", sealed), KEY, length=len(sealed))
    reader.read(5)
    with reader as entered:
        assert entered is reader
    reader.close()
    assert reader.closed
    assert "closed" in repr(reader)
    for call in (
        reader.read,
        lambda: reader.read(0),
        reader.readall,
        lambda: reader.read_at(0, 1),
        lambda: reader.read_at(6, 1),  # which it held opened
        lambda: reader.readinto(bytearray(1)),
        lambda: reader.readinto_at(0, bytearray(1)),
        lambda: reader.read_ranges([(0, 1)]),
        reader.verify,
        reader.tell,
        lambda: reader.seek(0),
        reader.readable,
        reader.seekable,
        reader.__enter__,
        reader.readline,
    ):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert reader.length == 100_000
    assert reader.block_size == BLOCK


def test_file_protocol(tmp_path: Path) -> None:
    lines = b"one\ntwo\n\nthree"
    sealed = seal_stream(lines, block_size=4)
    reader = AgsReader(sealed, KEY, length=len(sealed))
    assert isinstance(reader, io.RawIOBase)
    assert reader.readable()
    assert reader.seekable()
    assert not reader.writable()
    assert not reader.isatty()
    assert reader.mode == "rb"
    assert list(reader) == lines.splitlines(keepends=True)
    for call in (reader.fileno, lambda: reader.write(b"x"), reader.truncate):
        with pytest.raises(io.UnsupportedOperation):
            call()
    with pytest.raises(ValueError, match="whence"):
        reader.seek(0, 3)
    with pytest.raises(TypeError, match="writable"):
        reader.readinto(bytes(10))
    with pytest.raises(BufferError):
        reader.readinto(memoryview(bytearray(10))[::2])
    ints = array.array("i", [0] * 2)
    reader.seek(0)
    assert reader.readinto(ints) == 8
    assert ints.tobytes() == lines[:8]
    assert reader.seek(1 << 70) == 1 << 70
    assert reader.read(1) == b"" == reader.read()
    for function in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            function(reader)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_close_and_collection_release_what_was_held(tmp_path: Path) -> None:
    sealed = seal_stream(pattern(100_000), block_size=BLOCK)
    path = written(tmp_path / "file", sealed)
    data = bytearray(sealed)
    before = descriptors()
    for source in (path, data):
        reader = AgsReader(source, KEY, length=len(sealed))
        reader.read(5)
        reader.close()
        reader = AgsReader(source, KEY, length=len(sealed))
        reader.read(5)
        del reader
    assert descriptors() == before
    data.append(0)  # BufferError if anybody still held it


# ---------------------------------------------------------------- many threads, many processes


@pytest.mark.parametrize("kind", rest_in_more(FEW_KINDS, "path", "bytes", "gzip"))
def test_shared_by_ten_threads(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything without a cursor, at once, through a cache that is too small, with a bad block in the middle."""
    monkeypatch.setattr(_blocks, "CACHE_NBYTES", 3 * 4096)
    monkeypatch.setattr(_blocks, "AHEAD_NBYTES", 4 * 4096)
    plain = pattern(100 * 4096 + 10)
    header, blocks = split_stream(seal_stream(plain, block_size=4096))
    sealed = header + b"".join([*blocks[:50], flip(blocks[50], 999), *blocks[51:]])
    source = KINDS[kind](sealed, tmp_path / "file")
    reader = AgsReader(source, KEY, length=len(sealed), threads=2)

    def right(offset: int, size: int) -> bytes | None:
        size = min(size, len(plain) - offset)
        bad = size > 0 and offset < 51 * 4096 and offset + size > 50 * 4096
        return None if bad else plain[offset : offset + size]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            offset, size = rng.randrange(len(plain)), rng.choice([1, 100, 4096, 10_000, 3 * 4096])
            how = rng.randrange(4)
            try:
                if how == 0:
                    assert reader.read_at(offset, size) == right(offset, size)
                elif how == 1:
                    out = bytearray(size)
                    got = reader.readinto_at(offset, out)
                    assert out[:got] == right(offset, size)  # type: ignore[comparison-overlap]
                elif how == 2:
                    ranges = [(rng.randrange(len(plain)), rng.randrange(5000)) for _ in range(5)]
                    assert reader.read_ranges(ranges) == [right(*r) for r in ranges]
                else:
                    reader.verify()
                    raise AssertionError
            except IntegrityError as error:
                assert error.block_index == 50
                assert how == 3 or (how == 2 and any(right(*r) is None for r in ranges)) or right(offset, size) is None

    steady: list[bytes] = []
    with ThreadPoolExecutor(11) as pool:
        jobs = [pool.submit(work, seed) for seed in range(10)]
        while reader.tell() < 50 * 4096:  # and one has the cursor, and reads ahead
            steady.append(reader.read(min(700, 50 * 4096 - reader.tell())))
        for job in jobs:
            job.result()
    assert b"".join(steady) == plain[: 50 * 4096]
    close(source)


@pytest.mark.parametrize("at_hand", ["first", "last"])
def test_a_block_that_is_thrown_out_during_a_request(at_hand: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range has an edge at hand, and while the rest is fetched another thread has it thrown out."""
    monkeypatch.setattr(_blocks, "CACHE_NBYTES", 2 * BLOCK)
    reader, source, plain = counted(threads=1)
    reader.read_at(30 * BLOCK, 10)
    reader.seek(5 * BLOCK)
    while reader.tell() < 9 * BLOCK:  # what is read ahead of the cursor is at hand, but not in the cache
        reader.read(100)
    source.requests.clear()

    def meanwhile(at: int, right: bytes) -> bytes:
        other = threading.Thread(target=reader.read_at, args=(30 * BLOCK + 5, 5))  # this is in the cache
        other.start()
        other.join(10)
        return right

    source.answer = meanwhile
    begin, end = (9 * BLOCK + 5, 25 * BLOCK) if at_hand == "first" else (BLOCK, 9 * BLOCK + 5)
    assert reader.read_at(begin, end - begin) == plain[begin:end]


def test_read_in_forked_processes(tmp_path: Path) -> None:
    """Children read a reader that their parent opened, at once, from a path and from memory."""
    run_python(
        program(streams.read_after_a_fork, tmp_path / "file"),
    )


# ---------------------------------------------------------------- far away


def test_block_numbers_above_two_to_the_31() -> None:
    """A stream of 2**32 - 5 blocks of one byte, sealed when it is asked for: numbers are unsigned in Rust."""
    count = (1 << 32) - 5

    class Endless(Source):
        def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
            self.at = offset + (8 + 29 * count if whence == io.SEEK_END else 0)
            return self.at

        def read(self, size: int = -1) -> bytes:
            if self.at == 0:
                return b"AGS1\1\0\0\0"[:size]
            first, rest = divmod(self.at - 8, 29)
            assert rest == 0
            return b"".join(block_of(bytes([i % 251]), i) for i in range(first, first + size // 29))

    reader = AgsReader(Endless(b""), KEY, length=8 + 29 * count)
    assert reader.length == count
    for offset in (0, (1 << 31) - 3, (1 << 31), count - 10):
        assert reader.read_at(offset, 10) == bytes((offset + i) % 251 for i in range(10))
    assert reader.seek(-3, io.SEEK_END) == count - 3
    assert reader.read() == bytes(i % 251 for i in range(count - 3, count))


def test_offsets_above_four_gigabytes(tmp_path: Path) -> None:
    """A sparse file with two real blocks."""
    block_size, far = 1 << 20, 6000
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(b"AGS1" + block_size.to_bytes(4, "little"))
        for index in (0, far):
            file.seek(8 + index * (block_size + 28))
            file.write(block_of(pattern(block_size, index), index))
    length = encrypted_length((far + 1) * block_size)
    assert path.stat().st_size == length
    with AgsReader(path, KEY, length=length) as reader:
        begin = far * block_size
        assert reader.read_at(begin, block_size) == pattern(block_size, far)
        assert reader.read_at(begin + 5, 10) == pattern(block_size, far)[5:15]
        assert reader.read_ranges([(0, 10), (begin, 10)]) == [pattern(10), pattern(block_size, far)[:10]]
        with pytest.raises(IntegrityError) as caught:
            reader.read_at(begin - 1, 2)
        assert caught.value.block_index == far - 1
