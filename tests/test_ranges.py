"""Reading one object of a store: how many requests, of which bytes, how many at once, and what becomes of errors."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from servers.slow_s3 import Logged, SlowS3, in_flight, slow_s3
from support import KEY, pattern, seal_stream

import ags_fast
from ags_fast import AgsReader, IntegrityError
from ags_fast.fs import Store, ranges

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("s3fs")
pytest.importorskip("boto3")

MIB = 1 << 20
PLAIN = pattern(24 * MIB + 12_345)
SEALED = ags_fast.AgsCodec(KEY).encrypt(PLAIN)
URL = "s3://bucket/folder/file"


@pytest.fixture(scope="module")
def running() -> Iterator[SlowS3]:
    with slow_s3() as one:
        one.put("bucket", "folder/file", SEALED)
        one.put("bucket", "folder/plain", PLAIN)
        yield one


@pytest.fixture
def server(running: SlowS3) -> SlowS3:
    running.set()
    Store("s3://bucket/folder", running.options()).stat("file")  # connects
    running.log()
    return running


def opened(server: SlowS3) -> AgsReader:
    return AgsReader(URL, KEY, length=len(SEALED), storage_options=server.options())


def asked(log: list[Logged]) -> list[tuple[int, int]]:
    """The ranges of a log that has GETs only, all but the first with the ETag, sorted."""
    assert {one.operation for one in log} <= {"GetObject"}
    assert [one for one in log if one.if_match is None and one.range != (0, 65_535)] == []
    return sorted(one.range for one in log if one.range)


def is_each_byte_once(found: list[tuple[int, int]], begin: int, end: int) -> bool:
    return [first for first, _ in found] == [begin, *(last + 1 for _, last in found[:-1])] and found[-1][1] == end - 1


@pytest.mark.parametrize("step", [10_000, 1 << 20, 7_000_000, -1])
def test_a_steady_reader_has_several_requests_in_flight(server: SlowS3, step: int) -> None:
    server.set(latency=0.1)  # threads of a busy machine ask tens of milliseconds apart
    with opened(server) as reader:
        pieces = []
        while piece := reader.read(step):
            pieces.append(piece)
    assert b"".join(pieces) == PLAIN
    log = server.log()
    assert is_each_byte_once(asked(log), 0, len(SEALED))
    assert 4 <= in_flight(log) <= 8
    assert len(log) <= 40


def test_jobs_over_whole_objects_read_ahead_too(server: SlowS3) -> None:
    server.set(latency=0.1)
    store = Store("s3://bucket/folder", server.options())
    with store.open_once("plain") as file:
        data = bytearray(len(PLAIN) + 1)
        view = memoryview(data)
        at = 0
        while got := file.readinto(view[at : at + MIB]):
            at += got
        assert not file.changed()
    assert data[:at] == PLAIN
    log = server.log()
    assert is_each_byte_once(asked(log), 0, len(PLAIN))
    assert 4 <= in_flight(log) <= 8
    with opened(server) as reader:
        reader.verify()
    log = server.log()
    assert is_each_byte_once(asked(log), 0, len(SEALED))
    assert 4 <= in_flight(log) <= 8


def test_a_hundred_bytes(server: SlowS3) -> None:
    with opened(server) as reader:
        assert reader.read(100) == PLAIN[:100]
        time.sleep(0.1)
    found = asked(server.log())
    assert sum(last + 1 - first for first, last in found) <= 8 * MIB
    with opened(server) as reader:
        assert server.operations() == ["GetObject"]  # size, ETag and header
        assert reader.read_at(0, 100) == PLAIN[:100]
    assert asked(server.log()) == [(65_536, 8 + MIB + 28 - 1)]


def test_random_reads_get_nothing_ahead(server: SlowS3) -> None:
    sealed = MIB + 28
    with opened(server) as reader:
        server.log()
        for block in (20, 3, 11, 4, 17):
            begin = block * MIB + 500
            assert reader.read_at(begin, 1000) == PLAIN[begin : begin + 1000]
            reader.seek(begin + 5000)
            assert reader.read(10) == PLAIN[begin + 5000 : begin + 5010]
            assert asked(server.log()) == [(8 + block * sealed, 8 + (block + 1) * sealed - 1)]
        for block in (7, 13, 1):
            reader.seek(block * MIB)
            assert reader.read(10) == PLAIN[block * MIB : block * MIB + 10]
            assert len(asked(server.log())) == 1


def test_the_bound_of_what_is_ahead(server: SlowS3) -> None:
    for bound in (0, 2 * MIB, 16 * MIB):
        with opened(server) as reader:
            assert reader.read_ahead == 16 * MIB
            reader.read_ahead = bound
            for position in range(0, 12 * MIB, MIB):
                reader.read(MIB)
                time.sleep(0.02)
                last = max(last for _, last in asked(log)) if (log := server.log()) else 0
                assert last <= position + MIB + bound + 64 * 1024
        server.log()
    with opened(server) as reader, pytest.raises(ValueError, match="bytes"):
        reader.read_ahead = -1
    with AgsReader(SEALED, KEY, length=len(SEALED)) as reader:
        assert reader.read_ahead == 0


def test_ranges_at_once(server: SlowS3) -> None:
    wanted = [(i * 3 * MIB + 10, 1000) for i in range(8)]
    server.set(latency=2)  # so that the first one lasts until a busy machine has sent the last one
    with opened(server) as reader:
        server.log()
        assert reader.read_ranges(wanted) == [PLAIN[offset : offset + n] for offset, n in wanted]
        log = server.log()
        assert len(log) == in_flight(log) == 8
        server.set(latency=0)
        assert reader.read_ranges(wanted) == [PLAIN[offset : offset + n] for offset, n in wanted]
        assert len(server.log()) == 4  # four of the blocks are kept
        assert reader.read_ranges([(0, len(PLAIN)), (5, 5)]) == [PLAIN, PLAIN[5:10]]


def test_more_ranges_than_are_held_at_once(server: SlowS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "EXPECTED_NBYTES", 4 * MIB)
    server.set(latency=0.02)
    with opened(server) as reader:
        server.log()
        wanted = [(i * 2 * MIB + 10, 1000) for i in range(12)]
        assert reader.read_ranges(wanted) == [PLAIN[offset : offset + n] for offset, n in wanted]
        log = server.log()
        assert len(log) == 12
        assert 3 <= in_flight(log) <= 5


def test_an_error_reaches_the_read_that_needs_the_bytes(server: SlowS3) -> None:
    with opened(server) as reader:
        assert reader.read(MIB) == PLAIN[:MIB]
        server.fail("GetObject", times=1, status=403)
        failed = 0
        position = MIB
        while position < len(PLAIN):
            try:
                piece = reader.read(MIB)
            except PermissionError:
                failed += 1
                continue
            assert piece == PLAIN[position : position + MIB]
            position += len(piece)
        assert failed == 1  # once; the next read made the request again


def test_an_answer_that_breaks_off_is_asked_for_again(server: SlowS3) -> None:
    server.fail("GetObject", times=1, status=0, after=3)
    with opened(server) as reader:
        assert reader.read() == PLAIN


def test_replaced_while_requests_are_ahead(running: SlowS3, server: SlowS3) -> None:
    """Blocks of both never mix: what was requested before comes, what is requested after is refused."""
    try:
        with opened(server) as reader:
            assert reader.read(10) == PLAIN[:10]
            time.sleep(0.2)
            running.put("bucket", "folder/file", seal_stream(bytes(len(PLAIN))))
            with pytest.raises(OSError, match="replaced"):
                reader.seek(20 * MIB) and reader.read(10)
    finally:
        running.put("bucket", "folder/file", SEALED)


def test_cut_in_the_store(server: SlowS3) -> None:
    server.put("bucket", "folder/cut", SEALED[:-100])
    with pytest.raises(IntegrityError, match="bytes"):
        AgsReader("s3://bucket/folder/cut", KEY, length=len(SEALED), storage_options=server.options())


def test_close_gives_requests_up(server: SlowS3) -> None:
    server.set(latency=0.05, rate=500_000)
    threads = threading.active_count()
    reader = opened(server)
    errors: list[Any] = []

    def read() -> None:
        try:
            reader.read()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.5)
    begin = time.monotonic()
    reader.close()
    thread.join(10)
    assert time.monotonic() - begin < 5
    assert len(errors) == 1
    server.set()
    assert threading.active_count() <= threads
    with opened(server) as other:  # connections work on
        assert other.read_at(5, 5) == PLAIN[5:10]


def test_a_fork_in_the_middle(server: SlowS3) -> None:
    """The parent's requests are not the child's: both read on."""
    server.set(latency=0.02)
    with opened(server) as reader:
        assert reader.read(2 * MIB) == PLAIN[: 2 * MIB]
        child = os.fork()
        if not child:
            status = 1
            try:
                status = 0 if reader.read() == PLAIN[2 * MIB :] else 2
            finally:
                os._exit(status)
        assert reader.read() == PLAIN[2 * MIB :]
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_many_threads_over_one_reader(server: SlowS3) -> None:
    server.set(latency=0.005)
    errors: list[str] = []
    with opened(server) as reader:

        def work(me: int) -> None:
            for i in range(10):
                offset = (me * 7919 + i * 104_729 * 13) % (len(PLAIN) - 3_000_000)
                if reader.read_at(offset, 2_500_000) != PLAIN[offset : offset + 2_500_000]:
                    errors.append(f"{me} {offset}")
                spans = [(offset, 10), (offset // 2, 2000), (offset // 3, MIB)]
                if reader.read_ranges(spans) != [PLAIN[begin : begin + n] for begin, n in spans]:
                    errors.append(f"{me} {spans}")

        threads = [threading.Thread(target=work, args=(me,)) for me in range(6)]
        for thread in threads:
            thread.start()
        assert reader.read() == PLAIN
        for thread in threads:
            thread.join()
    assert errors == []


def test_urls_wherever_there_are_paths(server: SlowS3, tmp_path: Path) -> None:
    from ags_fast import avro

    options = server.options()
    for url, given in ((f"file://{tmp_path}/a", None), ("memory://folder/a", None), ("s3://bucket/new/a", options)):
        with ags_fast.open(url, "wb", key=KEY, storage_options=given) as writer:
            writer.write(PLAIN[:5_000_000])
        with ags_fast.open(url, key=KEY, length=None, storage_options=given) as reader:
            assert reader.read(5) == PLAIN[:5]
            assert reader.read() == PLAIN[5:5_000_000]
        with AgsReader(url, KEY, length=writer.file_length, storage_options=given) as reader:
            assert reader.read_at(4_000_000, 5) == PLAIN[4_000_000:4_000_005]
        with pytest.raises(FileNotFoundError):
            ags_fast.open(f"{url}-missing", key=KEY, length=None, storage_options=given)
    with pytest.raises(FileExistsError):
        ags_fast.open("s3://bucket/new/a", "xb", key=KEY, storage_options=options).close()
    records = [{"n": n} for n in range(1000)]
    schema = {"type": "record", "name": "r", "fields": [{"name": "n", "type": "long"}]}
    length = avro.write("s3://bucket/new/avro", KEY, schema, records, storage_options=options)
    shared: dict[str, Any] = {"length": length, "storage_options": options}
    (span,) = avro.splits("s3://bucket/new/avro", KEY, **shared)
    assert list(avro.read_split("s3://bucket/new/avro", KEY, *span, **shared)) == records
