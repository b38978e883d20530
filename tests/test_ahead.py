"""What helper threads open for a steady cursor, or seal behind a writer: they change when it is done, nothing else."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import sys
import threading
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from programs import ahead
from support import KEY, Source, flip, nonces_of, pattern, program, run_python, seal_stream, split_stream
from test_closing import Strangers, delays, raced

from ags_fast import AgsCodec, AgsReader, AgsWriter, IntegrityError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCK = 300_000  # a run of its own; four of them are opened ahead for two threads
SEALED = BLOCK + 28
PLAIN = pattern(20 * BLOCK + 5)
STREAM = seal_stream(PLAIN, block_size=BLOCK)
pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")


def damaged(*blocks: int) -> bytes:
    header, sealed = split_stream(STREAM)
    return header + b"".join(flip(block, 99) if i in blocks else block for i, block in enumerate(sealed))


def opened(source: Any, **options: Any) -> AgsReader:
    return AgsReader(source, KEY, length=None, **{"threads": 2} | options)


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def read_into(reader: AgsReader, size: int) -> bytes:
    out = bytearray(size)
    return bytes(out[: reader.readinto(out)])


READS: dict[str, Callable[[AgsReader, int], bytes]] = {"read": AgsReader.read, "readinto": read_into}


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("size", [1000, BLOCK, 3 * BLOCK // 2])
def test_blocks_are_opened_while_the_caller_does_something_else(size: int, how: str, tmp_path: Path) -> None:
    """Seen by a change of the file: what was opened before it is still right."""
    path = put(tmp_path / "file", STREAM)
    for wait in range(100):
        with opened(path) as reader:
            while reader.tell() < BLOCK:
                READS[how](reader, size)
            time.sleep(0.002 * wait)  # until a helper has had the time
            path.write_bytes(STREAM[:8] + bytes(len(STREAM) - 8))
            begin = reader.tell()
            try:
                parts = [READS[how](reader, BLOCK) for _ in range(2)]
            except IntegrityError:
                path.write_bytes(STREAM)
                continue
        assert b"".join(parts) == PLAIN[begin : begin + 2 * BLOCK]
        return
    raise AssertionError


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("kind", ["path", "memory"])
@pytest.mark.parametrize("size", [7000, BLOCK, BLOCK + 1, 5 * BLOCK])
def test_an_error_waits_for_the_read_that_wants_its_block(size: int, kind: str, how: str, tmp_path: Path) -> None:
    """Message, block and position are those of a reader with one thread; the blocks around it stay readable."""

    def outcome(threads: int) -> list[object]:
        seen: list[object] = []
        with opened(source, threads=threads) as reader:
            while reader.tell() < len(PLAIN):
                begin = reader.tell()
                try:
                    data = READS[how](reader, size)
                    assert data == PLAIN[begin : begin + size]
                    seen.append(len(data))
                except IntegrityError as error:
                    assert reader.tell() == begin
                    seen.append((begin, str(error), error.block_index))
                    reader.seek(size, io.SEEK_CUR)
        return seen

    for bad in ([0], [1], [2, 3], [7], [20], [5, 9]):
        data = damaged(*bad)
        source: Any = put(tmp_path / "file", data) if kind == "path" else data
        right = outcome(1)
        assert bad[0] in {what[2] for what in right if isinstance(what, tuple)} <= {*bad}
        for _ in range(3):
            assert outcome(2) == right


@pytest.mark.parametrize("kind", ["path", "memory"])
def test_a_cursor_that_goes_elsewhere(kind: str, tmp_path: Path) -> None:
    dice = random.Random(1)
    with opened(put(tmp_path / "file", STREAM) if kind == "path" else STREAM) as reader:
        for _ in range(300):
            begin = reader.seek(dice.choice([0, dice.randrange(len(PLAIN)), dice.randrange(20) * BLOCK]))
            for _ in range(dice.randrange(5)):
                size = dice.choice([10, BLOCK, BLOCK // 2, 3 * BLOCK])
                read = dice.choice([*READS.values()])
                assert read(reader, size) == PLAIN[begin : begin + size]
                begin = reader.tell()
                at = dice.randrange(len(PLAIN))
                if dice.randrange(3) == 0:  # reads without the cursor, in between
                    assert reader.read_at(at, 100) == PLAIN[at : at + 100]


@pytest.mark.parametrize("size", [77_777, 4 << 20])
@pytest.mark.parametrize("threads", [2, 3])
def test_memory_is_bounded(size: int, threads: int, tmp_path: Path) -> None:
    """Two blocks a thread are ahead; besides there are the block at hand, and the result."""
    block, count = 4 << 20, 24
    path = put(tmp_path / "file", seal_stream(bytes(count * block), block_size=block))
    with opened(path, threads=threads) as reader:
        tracemalloc.start()
        try:
            while reader.read(size):
                pass
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert 2 * threads * block < peak < (2 * threads + 2) * block + (1 << 20)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
def test_no_thread_where_there_is_one_cpu(tmp_path: Path) -> None:
    for cpus, threads in ((1, 1), (2, 2)):
        assert int(run_python(program(ahead.count_threads, tmp_path / "file", cpus))) == threads


def test_a_file_object_is_read_by_its_reader_alone() -> None:
    """Other threads would move a cursor that is not theirs to move."""
    readers: set[int] = set()

    def answer(at: int, right: bytes) -> bytes:
        readers.add(threading.get_ident())
        return right

    with opened(Source(STREAM, answer)) as reader:
        assert b"".join(iter(lambda: reader.read(BLOCK), b"")) == PLAIN
        assert reader.read_ahead == 0
    assert readers == {threading.get_ident()}


@pytest.mark.parametrize("size", [1000, BLOCK])
@pytest.mark.parametrize("owner", ["reader", "caller", "memory"])
def test_a_reader_is_closed_while_it_reads_steadily(owner: str, size: int, tmp_path: Path) -> None:
    strangers = Strangers(tmp_path, bytes(len(STREAM)))
    path = put(tmp_path / "stream", STREAM)
    for delay in delays():
        with open(path, "rb", buffering=0) as file:
            source = {"reader": path, "caller": file, "memory": STREAM}[owner]
            reader = opened(source)

            def read(reader: AgsReader = reader) -> None:
                begin = reader.tell() if reader.tell() < len(PLAIN) else reader.seek(0)
                assert reader.read(size) == PLAIN[begin : begin + size]

            def both(reader: AgsReader = reader, read: Callable[[], None] = read) -> None:
                read()
                reader.read_at(7 * BLOCK, BLOCK)  # which a helper has not opened

            if owner == "caller":
                raced(both, file.close, strangers, delay)
            else:
                raced(read, reader.close, strangers, delay)
        reader.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_close_waits_for_what_is_being_opened(tmp_path: Path) -> None:
    """Neither the file nor the memory is in use when it returns, and a reader that is collected leaves nothing."""
    path, data = put(tmp_path / "file", STREAM), bytearray(STREAM)
    before = set(os.listdir("/proc/self/fd"))
    for step in range(40):
        for source in (path, data):
            reader = opened(source)
            for _ in range(1 + step % 3):
                reader.read(BLOCK)
            if step % 2:
                reader.close()
            else:
                del reader
            data.append(0)  # BufferError if anybody still held it
            data.pop()
            assert set(os.listdir("/proc/self/fd")) == before


def test_forks_in_the_middle(tmp_path: Path) -> None:
    run_python(program(ahead.fork_in_the_middle, tmp_path / "file"))


# ---------------------------------------------------------------- writers


@pytest.mark.parametrize("size", [7000, BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize("threads", [2, 3])
def test_a_writer_with_helpers(threads: int, size: int, tmp_path: Path) -> None:
    """The bytes of a writer alone, each block under a nonce of its own, and counted once."""
    key = os.urandom(16)
    for turn in range(5):
        with AgsWriter(tmp_path / "file", key, block_size=BLOCK, threads=threads) as writer:
            for begin in range(0, len(PLAIN), size):
                writer.write(PLAIN[begin : begin + size])
                assert writer.tell() == min(begin + size, len(PLAIN))
        sealed = (tmp_path / "file").read_bytes()
        assert len(sealed) == writer.file_length
        assert AgsCodec(key).decrypt(sealed, length=len(sealed)) == PLAIN
        assert len({*nonces_of(sealed)}) == 21
        assert AgsCodec(key).sealed == 21 * (turn + 1)


def test_blocks_are_sealed_while_the_caller_does_something_else(tmp_path: Path) -> None:
    """A block that is written is in the file after a while, without another call; the caller may change its buffer."""
    data = bytearray(PLAIN[:BLOCK])
    with (tmp_path / "file").open("wb") as file, AgsWriter(file, KEY, block_size=BLOCK, threads=2) as writer:
        for number in range(6):
            writer.write(data)
            data[:] = PLAIN[(number + 1) * BLOCK :][:BLOCK]
            while os.fstat(file.fileno()).st_size < 8 + (number + 1) * SEALED:
                time.sleep(0.001)
    with opened(tmp_path / "file") as reader:
        assert reader.read() == PLAIN[: 6 * BLOCK]


def test_memory_of_a_writer_is_bounded(tmp_path: Path) -> None:
    block, threads = 4 << 20, 3
    tracemalloc.start()
    try:
        with AgsWriter(tmp_path / "file", KEY, block_size=block, threads=threads) as writer:
            for _ in range(600):
                writer.write(bytes(100_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (2 * threads + 1) * block + (1 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_an_error_of_a_block_that_is_sealed_behind(tmp_path: Path) -> None:
    """It comes from the next write or from `close`, and no file appears."""
    for late in ("write", "close"):
        run_python(program(ahead.write_too_much, tmp_path, late))
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("end", ["abort", "collect"])
def test_a_writer_that_is_given_up(end: str, tmp_path: Path) -> None:
    gc.collect()  # or files that other tests have left are closed on the way
    before = set(os.listdir("/proc/self/fd"))
    for step in range(20):
        writer = AgsWriter(tmp_path / "file", KEY, block_size=BLOCK, threads=2)
        for begin in range(0, (1 + step % 4) * BLOCK, BLOCK):
            writer.write(PLAIN[begin : begin + BLOCK])
        if end == "abort":
            writer.abort()
            assert set(os.listdir("/proc/self/fd")) == before
        with pytest.warns(ResourceWarning) if end == "collect" else contextlib.nullcontext():
            del writer
            gc.collect()
        assert os.listdir(tmp_path) == []
        assert set(os.listdir("/proc/self/fd")) == before
