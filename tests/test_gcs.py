"""Store over Google Cloud Storage, as fake-gcs-server has it."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import pytest
from object_contract import ObjectContract
from store_contract import names, put, read_all
from support import pattern

from ags_fast import PolicyError
from ags_fast.fs import Store

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


class TestFakeGcs(ObjectContract):
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
    with pytest.raises(FileNotFoundError):  # as in S3: a bucket that is not there is a mistake
        names(Store("gcs://no-such-bucket-here/x", store.storage_options))


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


def test_a_compressed_object_is_refused(store: gcs.GcsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "file", b"x")
    call = store.ask

    async def encoded(*names: Any, **arguments: Any) -> Any:
        headers, data = await call(*names, **arguments)
        return {**headers, "Content-Encoding": "gzip"}, data

    monkeypatch.setattr(store, "ask", encoded)
    with pytest.raises(PolicyError, match="Content-Encoding"):
        store.read_small("file", 10)


def test_requests_are_logged(store: gcs.GcsStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "ags_fast.store"):
        put(store, "a/b", b"data")
        assert read_all(store, "a/b") == b"data"
    assert any(message.startswith("gs: GET ") and "a/b" in message for message in caplog.messages)
    assert len(caplog.messages) >= 2
