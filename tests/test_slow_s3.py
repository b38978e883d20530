"""The slow S3 server, by which other tests count requests: an S3, as slow as it is told to be, with a true log."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from servers.slow_s3 import SlowS3, in_flight, slow_s3
from store_contract import StoreContract, names, put, read_all
from support import pattern

from ags_fast.fs import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("s3fs")
pytest.importorskip("boto3")


@pytest.fixture(scope="module")
def server() -> Iterator[SlowS3]:
    with slow_s3() as one:
        yield one


class TestSlowS3(StoreContract):
    @pytest.fixture
    def store(self, server: SlowS3, request: pytest.FixtureRequest) -> Store:
        return Store(f"s3://{abs(hash(request.node.name))}/a folder/of-it", server.options())


def test_the_log_and_the_slowness(server: SlowS3) -> None:
    server.put("bucket", "folder/file", pattern(100_000))
    store = Store("s3://bucket/folder", server.options())
    assert read_all(store, "file") == pattern(100_000)
    server.log()
    server.set(latency=0.2, rate=100_000)
    begin = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        entries = list(pool.map(lambda _: store.stat("file"), range(4)))
    assert time.monotonic() - begin >= 0.2
    assert len({entry.size for entry in entries if entry}) == 1
    log = server.log()
    assert [(one.operation, one.bucket, one.key) for one in log] == [("HeadObject", "bucket", "folder/file")] * 4
    assert in_flight(log) == 4
    begin = time.monotonic()
    source = store.open_seekable("file", entries[0])
    source.seek(10)
    assert source.read(50_000) == pattern(100_000)[10:50_010]
    assert time.monotonic() - begin >= 0.2 + 0.4
    (one,) = server.log()
    assert (one.operation, one.range, one.status, one.nbytes) == ("GetObject", (10, 50_009), 206, 50_000)
    assert one.if_match == (entries[0] and entries[0].stamp)
    server.set()
    server.fail("GetObject", times=1, status=403, after=1)
    assert store.read_small("file", 1 << 20) == pattern(100_000)
    with pytest.raises(PermissionError):
        store.read_small("file", 1 << 20)
    server.fail("GetObject", times=1, status=0)
    assert store.read_small("file", 1 << 20) == pattern(100_000)  # the client tries again
    put(store, "other", b"x")
    assert names(store) == ["file", "other"]
