"""Store over Google Cloud Storage, as fake-gcs-server has it."""

from __future__ import annotations

import errno
import json
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from store_contract import StoreContract, names, put, race, read_all, writing
from support import pattern

from ags_fast import PolicyError
from ags_fast.fs import Store

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("gcsfs")
from ags_fast.fs import gcs

# The first time, a server has to be built.
pytestmark = [pytest.mark.more, pytest.mark.timeout(900)]


def new_store(url: str, folder: str = "/a folder/of-it") -> gcs.GcsStore:
    bucket = f"bucket-{os.urandom(8).hex()}"
    store = Store(f"gs://{bucket}{folder}", {"endpoint_url": url, "token": "anon", "project": "test"})
    assert isinstance(store, gcs.GcsStore)
    store.call("POST", "b", data=json.dumps({"name": bucket}).encode(), headers={"Content-Type": "application/json"})
    return store


@pytest.fixture
def store(fake_gcs: str) -> gcs.GcsStore:
    return new_store(fake_gcs)


class TestFakeGcs(StoreContract):
    @pytest.fixture
    def store(self, fake_gcs: str) -> Store:
        return new_store(fake_gcs)


def requests(store: gcs.GcsStore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What this store asks its server from now on."""
    asked: list[tuple[str, dict[str, Any]]] = []
    call = store.ask

    async def note(method: str, url: str, *names: str, **arguments: Any) -> Any:
        asked.append((method, arguments))
        return await call(method, url, *names, **arguments)

    monkeypatch.setattr(store, "ask", note)
    return asked


def test_a_whole_bucket(fake_gcs: str) -> None:
    store = new_store(fake_gcs, "")
    put(store, "a/b", b"x")
    store.create_exclusive("c", b"y")
    with pytest.raises(FileExistsError):
        store.create_exclusive("c", b"z")
    assert names(store) == ["a/b", "c"]
    assert read_all(store, "a/b") == b"x"
    assert [entry.path for entry in store.page("", "", 10)[0]] == ["c"]
    with pytest.raises(FileNotFoundError):  # as in S3: a bucket that is not there is a mistake
        names(Store("gcs://no-such-bucket-here/x", store.storage_options))


def test_create_has_one_winner(store: gcs.GcsStore, tmp_path: Path) -> None:
    race(store, 2, 15, tmp_path)


@pytest.mark.parametrize("size", [10, gcs.CHUNK_NBYTES, 2 * gcs.CHUNK_NBYTES + 1000])
def test_uploads_have_one_winner(store: gcs.GcsStore, size: int) -> None:
    new = [store.begin("file", exclusive=True) for _ in range(4)]
    won: list[int] = []

    def publish(me: int) -> None:
        new[me].write(pattern(size, me))
        try:
            new[me].publish()
            won.append(me)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=publish, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert read_all(store, "file") == pattern(size, won[0])


@pytest.mark.parametrize("size", [10, gcs.CHUNK_NBYTES + 10])
def test_an_answer_that_was_lost(store: gcs.GcsStore, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The client repeats the request, and the server refuses that one: it was ours all the same."""
    call = store.ask

    async def twice(method: str, url: str, *names: str, **arguments: Any) -> Any:
        span = arguments.get("headers", {}).get("Content-Range", "*")
        if arguments.get("uploadType") == "multipart" or not span.endswith("*"):
            await call(method, url, *names, **arguments)
        return await call(method, url, *names, **arguments)

    monkeypatch.setattr(store, "ask", twice)
    store.create_exclusive("file", pattern(size))
    assert read_all(store, "file") == pattern(size)
    with pytest.raises(FileExistsError):
        store.create_exclusive("file", b"other")
    put(store, "file", b"other")
    assert read_all(store, "file") == b"other"


def test_a_killed_upload_shows_nothing(store: gcs.GcsStore) -> None:
    with writing(store, 3 * gcs.CHUNK_NBYTES) as child:
        child.kill()
    assert names(store) == []
    assert store.sweep(older_than=0) == []


def test_an_object_that_is_replaced(store: gcs.GcsStore) -> None:
    put(store, "file", pattern(300_000))
    entry = store.stat("file")
    assert entry is not None
    with store.open_seekable("file", entry) as file, store.open_once("file") as once:
        assert file.read(10) == pattern(300_000)[:10]
        put(store, "file", pattern(300_000))  # the same bytes: another generation
        file.seek(250_000)
        with pytest.raises(OSError, match="replaced") as caught:
            file.read(20_000)
        assert caught.value.errno == errno.ESTALE
        with pytest.raises(OSError, match="replaced"):
            once.readinto(bytearray(300_000))
    assert store.read_if_unchanged("file", 300_000, entry.stamp) is None


def test_each_request_has_its_condition(store: gcs.GcsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """fake-gcs-server checks only those of uploads; Google checks all."""
    asked = requests(store, monkeypatch)
    store.create_exclusive("file", b"x" * 100)
    (method, arguments), *_ = asked
    assert (method, arguments["ifGenerationMatch"]) == ("POST", "0")
    entry = store.stat("file")
    assert entry is not None
    asked.clear()
    with store.open_seekable("file", entry) as file:
        assert file.read(10) == b"x" * 10
    store.delete_read(entry)
    assert [(method, arguments["ifGenerationMatch"]) for method, arguments in asked] == [
        ("GET", entry.stamp),
        ("DELETE", entry.stamp),
    ]
    assert len(store.existing(["a", "b", "file"])) == 0


def test_pages(store: gcs.GcsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs, "PAGE", 2)
    paths = [f"a/{i}" for i in range(5)] + ["b"]
    for path in paths:
        put(store, path, b"x")
    assert names(store) == paths
    assert store.existing([*paths, "c"]) == set(paths)
    found, more = store.page("a/", "1", 2)
    assert [entry.path for entry in found] == ["a/2", "a/3"]
    assert more


def test_a_compressed_object_is_refused(store: gcs.GcsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "file", b"x")
    call = store.ask

    async def encoded(*names: Any, **arguments: Any) -> Any:
        headers, data = await call(*names, **arguments)
        return {**headers, "Content-Encoding": "gzip"}, data

    monkeypatch.setattr(store, "ask", encoded)
    with pytest.raises(PolicyError, match="Content-Encoding"):
        store.read_small("file", 10)
