"""Store over S3, moto's server and a real one: an object appears once and complete, and reads cost what they must."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from programs import storage
from store_contract import StoreContract, names, put, race, race_uploads, read_all, writing
from support import KEY, finish_python, open_stream, pattern, program, start_python

from ags_fast import AgsReader, AgsWriter, IntegrityError
from ags_fast.fs import Store, s3

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from servers import S3Server

pytest.importorskip("s3fs")
pytest.importorskip("boto3")

# The first time, a server has to be built.
pytestmark = pytest.mark.timeout(900)


def new_store(server: S3Server, folder: str = "/a folder/of-it") -> Store:
    bucket = f"bucket-{os.urandom(8).hex()}"
    server.client().create_bucket(Bucket=bucket)
    return Store(f"s3://{bucket}{folder}", server.options())


def knows(option: str) -> None:
    """Skip a test of an option that the s3fs here does not have."""
    if option not in inspect.signature(pytest.importorskip("s3fs").S3FileSystem.__init__).parameters:
        pytest.skip(f"this s3fs has no {option}")


def bucket_of(store: Store) -> str:
    return store.url.split("/")[2]


def uploads(server: S3Server, store: Store) -> list[str]:
    found = server.client().list_multipart_uploads(Bucket=bucket_of(store))
    return [upload["Key"] for upload in found.get("Uploads", [])]


def no_uploads(server: S3Server, store: Store) -> None:
    """Also one that was collected, which waits for nothing, has told the server; and the server has done it."""
    for _ in range(100):
        if not uploads(server, store):
            return
        time.sleep(0.05)
    raise AssertionError(uploads(server, store))


class S3Contract(StoreContract):
    server: S3Server

    def no_uploads(self, store: Store) -> None:
        no_uploads(self.server, store)


@pytest.mark.more
class TestMoto(S3Contract):
    @pytest.fixture
    def store(self, moto_s3: S3Server) -> Store:
        self.server = moto_s3
        return new_store(moto_s3)


class TestVersitygw(S3Contract):
    @pytest.fixture
    def store(self, versitygw: S3Server) -> Store:
        self.server = versitygw
        return new_store(versitygw)


@pytest.fixture(params=[pytest.param("moto", marks=pytest.mark.more), "versitygw"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue({"moto": "moto_s3"}.get(request.param, request.param))
    return found


@pytest.fixture
def store(server: S3Server) -> Store:
    return new_store(server)


def requests(store: Store) -> list[str]:
    """What this store asks its server from now on: operations, and the ranges of those that have one."""
    asked: list[str] = []
    assert isinstance(store, s3.S3Store)
    fs = store.connect()[0]

    def note(params: dict[str, Any], model: Any, **_: Any) -> None:
        asked.append(" ".join([model.name, *filter(None, [params["headers"].get("Range")])]))

    fs.s3.meta.events.register("before-call.s3", note)
    return asked


def ranges_of(asked: list[str]) -> list[list[int]]:
    return [[int(n) for n in one.removeprefix("GetObject bytes=").split("-")] for one in asked]


def covers(asked: list[str], begin: int, end: int) -> bool:
    """Whether these requests ask for each byte once, in order."""
    ranges = ranges_of(asked)
    ends = [begin, *(last + 1 for _, last in ranges)]
    return ends[-1] == end and [first for first, _ in ranges] == ends[:-1]


# ---------------------------------------------------------------- complete or absent


def test_a_whole_bucket(server: S3Server) -> None:
    store = new_store(server, "")
    put(store, "a/b", b"x")
    store.create_exclusive("c", b"y")
    with pytest.raises(FileExistsError):
        store.create_exclusive("c", b"z")
    assert names(store) == ["a/b", "c"]
    assert names(store, "a/") == ["a/b"]
    assert read_all(store, "a/b") == b"x"
    with store.begin("d") as new:
        new.write(bytes(s3.PART_NBYTES))
        assert uploads(server, store) == ["d"]
        new._parts[0].result()  # type: ignore[union-attr]  # else moto answers with 500, and the client tries for seconds
        assert store.sweep("t", paths=["e"]) == []
        assert len(store.sweep("t", paths=["d"])) == 1
    store.delete("c")
    assert names(store) == ["a/b"]


def test_create_has_one_winner(store: Store, tmp_path: Path) -> None:
    race(store, 2, 15, tmp_path)


def test_uploads_in_parts_have_one_winner(versitygw: S3Server) -> None:
    store = new_store(versitygw)  # moto's looks first and completes then
    race_uploads(store, s3.PART_NBYTES + 1000)
    assert store.sweep(older_than=0) == []


def test_an_answer_that_was_lost(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client repeats the request, and the server refuses that one: it was ours all the same."""
    call = s3.S3Store.call

    def twice(self: Any, request: str, **arguments: Any) -> Any:
        if request in ("put_object", "complete_multipart_upload"):
            call(self, request, **arguments)
        return call(self, request, **arguments)

    monkeypatch.setattr(s3.S3Store, "call", twice)
    for size in (10, s3.PART_NBYTES + 10):
        store.create_exclusive(f"{size}", pattern(size))
        assert read_all(store, f"{size}") == pattern(size)
        with pytest.raises(FileExistsError):
            store.create_exclusive(f"{size}", pattern(size))
        put(store, "file", pattern(size))
        assert read_all(store, "file") == pattern(size)
    assert store.sweep(older_than=0) == []


def test_kill_9_and_sweep(store: Store, server: S3Server) -> None:
    with writing(store, 2 * s3.PART_NBYTES) as child:
        assert names(store) == []
        assert uploads(server, store) == ["a folder/of-it/a/file"]
        child.send_signal(signal.SIGKILL)
        child.wait()
    put(store, "b", b"x")
    assert store.sweep("job-1") == store.sweep("job-1", paths={"b", "a"}) == []
    for folder in ("/a/b", "/a/file", "-2"):
        assert Store(store.url + folder, store.storage_options).sweep(older_than=0) == []
    if server.key != "testing":  # all of moto's uploads have begun in 2010
        assert store.sweep() == store.sweep(older_than=3600) == []  # nobody can tell that it is dead
    assert uploads(server, store) == ["a folder/of-it/a/file"]
    assert names(store) == ["b"]
    assert len(store.sweep("job-1", paths={"a/file"})) == 1
    assert uploads(server, store) == []
    assert names(store) == ["b"]
    with writing(store, 2 * s3.PART_NBYTES) as child:
        child.kill()
        child.wait()
    assert len(store.sweep(older_than=0)) == 1
    assert uploads(server, store) == []
    assert names(store) == ["b"]


def test_a_swept_upload_fails(versitygw: S3Server) -> None:
    store = new_store(versitygw)
    with store.begin("file") as new:
        new.write(pattern(s3.PART_NBYTES))
        new._parts[0].result()  # type: ignore[union-attr]
        assert len(store.sweep(older_than=0)) == 1
        with pytest.raises(OSError):
            new.publish()
    assert names(store) == []


def test_an_upload_that_fails(store: Store, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that cannot be sent is an error of the write or of the end, never a shorter object."""
    submit = s3.S3Store.submit

    def failing(self: Any, request: str, **arguments: Any) -> Any:
        if arguments.get("PartNumber") == 2:
            arguments["Bucket"] = "no-such-bucket"
        return submit(self, request, **arguments)

    monkeypatch.setattr(s3.S3Store, "submit", failing)
    for parts in (2, 3, 9):
        with pytest.raises(OSError), AgsWriter(store.begin("file"), KEY) as writer:
            for _ in range(parts):
                writer.write(bytes(s3.PART_NBYTES))
        assert writer.closed
        assert names(store) == []
        no_uploads(server, store)


def test_many_parts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 takes 10,000 of them: they grow, or a file that has too many is refused."""
    assert sum(s3.PART_NBYTES << i // 1000 for i in range(10_000)) > 5 << 40
    assert max(s3.PART_NBYTES << i // 1000 for i in range(10_000)) < 5 << 30
    monkeypatch.setattr(s3, "PARTS", 2)
    with pytest.raises(OSError) as caught:
        put(store, "file", bytes(3 * s3.PART_NBYTES))
    assert caught.value.errno == errno.EFBIG
    assert names(store) == []
    put(store, "file", bytes(2 * s3.PART_NBYTES))
    knows("fixed_upload_size")
    fixed = Store(store.url, {**store.storage_options, "fixed_upload_size": True})
    monkeypatch.setattr(s3, "FIXED_PART_NBYTES", 6 << 20)
    put(fixed, "file", pattern(13 << 20 >> 1))
    assert read_all(fixed, "file") == pattern(13 << 20 >> 1)


def test_what_the_server_refuses(server: S3Server) -> None:
    missing = Store("s3://no-such-bucket-at-all/x", server.options())
    for call in (lambda: names(missing), lambda: missing.create_exclusive("a", b"x"), lambda: put(missing, "a", b"x")):
        with pytest.raises(FileNotFoundError):
            call()


def test_a_wrong_secret(versitygw: S3Server) -> None:
    store = new_store(versitygw)
    other = Store(store.url, versitygw._replace(secret="a wrong secret").options())
    for call in (
        lambda: names(other),
        lambda: other.stat("a"),
        lambda: other.read_small("a", 1),
        lambda: other.create_exclusive("a", b"x"),
        lambda: put(other, "a", b"x"),
        lambda: other.delete("a"),
    ):
        with pytest.raises(PermissionError) as caught:
            call()
        assert "wrong secret" not in str(caught.value)
    assert names(store) == []


# ---------------------------------------------------------------- what it costs


def test_requests_of_everything(store: Store, server: S3Server) -> None:
    asked = requests(store)

    def cost(call: Callable[[], Any]) -> list[str]:
        asked.clear()
        call()
        return asked[:]

    part = s3.PART_NBYTES
    assert cost(lambda: put(store, "a", b"x")) == ["PutObject"]
    assert cost(lambda: store.create_exclusive("b", b"x")) == ["PutObject"]
    assert cost(lambda: store.read_small("a", 100)) == ["GetObject bytes=0-100"]
    assert cost(lambda: store.stat("a")) == ["HeadObject"]
    assert cost(lambda: names(store)) == ["ListObjectsV2"]
    assert cost(lambda: store.delete("a")) == ["DeleteObject"]
    parts = ["CreateMultipartUpload", "UploadPart", "UploadPart", "CompleteMultipartUpload"]
    assert cost(lambda: put(store, "c", bytes(part + 1))) == parts
    assert cost(lambda: store.begin("d").discard()) == []


def test_one_get_per_range(store: Store) -> None:
    """Reads here and there ask for their own bytes; none for what is there."""
    data = pattern(3 << 20)
    put(store, "file", data)
    entry = store.stat("file")
    asked = requests(store)
    with store.open_seekable("file", entry) as source:
        assert asked == []
        rng = random.Random(1)
        for _ in range(20):
            begin, size = rng.randrange(2 << 20), rng.randrange(1, 1 << 20)
            source.seek(begin)
            assert source.read(size) == data[begin : begin + size]
            assert asked == [f"GetObject bytes={begin}-{begin + size - 1}"]
            asked.clear()
        assert source.read(0) == b""
        assert source.seek(0, 2)
        assert source.read(10) == b""
        assert asked == []


def test_requests_of_a_reader(store: Store) -> None:
    plain, size = pattern(6_000_000), 100_000
    with AgsWriter(store.begin("file"), KEY, block_size=size) as writer:
        writer.write(plain)
    asked = requests(store)
    with store.open_seekable("file") as source, AgsReader(source, KEY, length=writer.file_length) as reader:
        assert asked == ["GetObject bytes=0-65535"]  # which tells size and stamp, too
        asked.clear()
        assert reader.read_at(2_500_000, 10) == plain[2_500_000:2_500_010]
        assert reader.read_at(2_530_000, 100) == plain[2_530_000:2_530_100]  # in the same block
        sealed = size + 28
        assert asked == [f"GetObject bytes={8 + 25 * sealed}-{8 + 26 * sealed - 1}"]
        asked.clear()
        wanted = [(5_000_000, 10), (10, 5), (150_000, 100_000)]
        assert reader.read_ranges(wanted) == [plain[offset : offset + n] for offset, n in wanted]
        assert asked == [
            f"GetObject bytes=65536-{8 + 3 * sealed - 1}",  # the bytes before came with the first request
            f"GetObject bytes={8 + 50 * sealed}-{8 + 51 * sealed - 1}",
        ]
        asked.clear()
        reader.verify()
        assert len(asked) <= 8
        assert covers(asked, 65_536, writer.file_length)
    put(store, "small", open_and_seal(plain[:50_000]))
    asked.clear()
    with store.open_seekable("small") as source, AgsReader(source, KEY, length=None) as reader:
        assert reader.read() == plain[:50_000]
    assert asked == ["GetObject bytes=0-65535"]


def open_and_seal(plain: bytes) -> bytes:
    from ags_fast import AgsCodec

    return AgsCodec(KEY).encrypt(plain)


def test_requests_of_who_reads_on(store: Store) -> None:
    """In small steps from begin to end: the requests grow, and no byte is asked for twice."""
    data = pattern(10_000_000)
    put(store, "file", data)
    for step in (1000, 65_536, 1 << 20):
        asked = requests(store)
        with store.open_seekable("file", store.stat("file")) as source:
            asked.clear()
            pieces = []
            while piece := source.read(step):
                pieces.append(piece)
        assert b"".join(pieces) == data
        assert covers(asked, 0, len(data))
        ranges = ranges_of(asked)
        assert len(ranges) <= 35
        for begin, end in ranges:  # at most four times what was read before, and what is wanted
            assert end + 1 - begin <= max(65_536, 4 * begin + step)


def test_replaced_while_it_is_read(store: Store) -> None:
    """Its parts are never mixed: neither in a stream nor in plain bytes."""
    put(store, "file", pattern(1_000_000))
    before = store.stat("file")
    with store.open_seekable("file") as source:
        assert source.read(1000) == pattern(1000)
        put(store, "file", pattern(1_000_000, 1))
        assert source.read(1000) == pattern(2000)[1000:]  # which came with the first 1000
        source.seek(500_000)
        with pytest.raises(OSError, match="replaced"):
            source.read(1000)
    with store.open_seekable("file", before) as source, pytest.raises(OSError, match="replaced"):
        source.read(1000)
    knows("local_expiry_check")
    checks_here = Store(store.url, {**store.storage_options, "local_expiry_check": True})
    with checks_here.open_seekable("file", before) as source, pytest.raises(OSError, match="replaced"):
        source.read(1000)
    with store.open_seekable("file") as source:
        store.delete("file")
        with pytest.raises(FileNotFoundError):
            source.read()
        source.seek(0)
        with pytest.raises(FileNotFoundError):
            source.read()


def test_cut_while_it_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with AgsWriter(store.begin("file"), KEY, block_size=1000) as writer:
        writer.write(bytes(200_000))
    get = s3.S3Store.get

    async def cut(*args: Any) -> Any:
        looked = await get(*args)
        return looked and looked._replace(data=looked.data[:-1])

    monkeypatch.setattr(s3.S3Store, "get", cut)
    with store.open_seekable("file") as source, pytest.raises(IntegrityError, match="cut"):
        AgsReader(source, KEY, length=writer.file_length).read()


def test_listing_in_pages(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert s3.PAGE == 1000
    monkeypatch.setattr(s3, "PAGE", 10)
    store, client = new_store(server), server.client()
    for i in range(25):
        client.put_object(Bucket=bucket_of(store), Key=f"a folder/of-it/{i:05d}/x", Body=b"")
    client.put_object(Bucket=bucket_of(store), Key="a folder/of-it-2/x", Body=b"")
    client.put_object(Bucket=bucket_of(store), Key="a folder/of-it/marker/", Body=b"")
    asked = requests(store)
    assert names(store) == [f"{i:05d}/x" for i in range(25)]
    assert asked == ["ListObjectsV2"] * 3
    assert next(iter(store.list())).path == "00000/x"
    child = start_python(  # who looks no further leaves nothing behind
        program(storage.list_one, store),
    )
    assert finish_python(child) == "00000/x\n"
    assert child.stderr is not None


def test_listings_are_fresh(store: Store) -> None:
    other = Store(store.url, store.storage_options)
    for i in range(3):
        assert names(store) == names(other) == [f"{n}" for n in range(i)]
        assert store.stat(f"{i}") is None
        other.create_exclusive(f"{i}", b"x")
        assert store.stat(f"{i}") is not None


# ---------------------------------------------------------------- processes


def test_forks(store: Store) -> None:
    """A connection belongs to its process: a child has its own, neither hangs, at the end neither."""
    child = start_python(
        program(storage.fork_with_an_upload, store),
    )
    assert finish_python(child) == "child 0,child 1,child/0,child/1,half,parent\n"


def test_a_process_that_ends_in_the_middle(store: Store, server: S3Server) -> None:
    """Neither published nor waited for."""
    child = start_python(
        program(storage.leave_uploads, store),
    )
    assert finish_python(child, timeout=30) == ""
    assert names(store) == []
    assert len(store.sweep(older_than=0)) <= 1
    assert uploads(server, store) == []


def test_many_threads(store: Store) -> None:
    def work(me: int) -> None:
        for i in range(5):
            plain = pattern(100_000, me * 100 + i)
            with AgsWriter(store.begin(f"{me}/{i}"), KEY) as writer:
                writer.write(plain)
            assert open_stream(read_all(store, f"{me}/{i}")) == plain

    errors: list[BaseException] = []

    def guarded(me: int) -> None:
        try:
            work(me)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(names(store)) == 40


def test_requests_are_logged(versitygw: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    store = new_store(versitygw)
    with caplog.at_level(logging.DEBUG, "ags_fast.store"):
        put(store, "a/b", b"data")
        assert read_all(store, "a/b") == b"data"
    assert any(message.startswith("s3: put_object ") and "a/b" in message for message in caplog.messages)
    assert len(caplog.messages) >= 2
