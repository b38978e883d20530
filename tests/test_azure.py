"""Store over Azure Blob Storage, as Azurite has it."""

from __future__ import annotations

import gzip
import logging
import os
from typing import TYPE_CHECKING, Any

import pytest
from object_contract import ObjectContract
from store_contract import names, put, read_all
from support import pattern

from ags_fast.fs import Store
from ags_fast.fs.objects import PART_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("adlfs")
from ags_fast.fs import azure

# The first time, a server has to be installed.
pytestmark = [pytest.mark.more, pytest.mark.timeout(900)]


def new_store(options: dict[str, str], folder: str = "/a folder/of-it") -> azure.AzureStore:
    store = Store(f"az://container-{os.urandom(8).hex()}{folder}", options)
    assert isinstance(store, azure.AzureStore)
    store.submit("create_container").result()
    return store


@pytest.fixture
def store(azurite: dict[str, str]) -> azure.AzureStore:
    return new_store(azurite)


class TestAzurite(ObjectContract):
    @pytest.fixture
    def store(self, azurite: dict[str, str]) -> Store:
        return new_store(azurite)


def requests(store: azure.AzureStore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, dict[str, str]]]:
    """What this store asks its server from now on: the method, the query's comp, and the headers."""
    asked: list[tuple[str, str, dict[str, str]]] = []
    transport = store.client()._pipeline._transport  # noqa: SLF001 (the SDK has no public name for the transport)
    send = transport.send

    async def note(request: Any, **options: Any) -> Any:
        asked.append((request.method, request.query.get("comp", ""), dict(request.headers)))
        return await send(request, **options)

    monkeypatch.setattr(transport, "send", note)
    return asked


def test_a_whole_container(azurite: dict[str, str]) -> None:
    store = new_store(azurite, "")
    put(store, "a/b", b"x")
    store.create_exclusive("c", b"y")
    with pytest.raises(FileExistsError):
        store.create_exclusive("c", b"z")
    assert names(store) == ["a/b", "c"]
    assert read_all(store, "a/b") == b"x"
    same = Store(store.url.replace("az:", "abfss:"), azurite)
    assert isinstance(same, azure.AzureStore)
    assert names(same) == ["a/b", "c"]
    with pytest.raises(FileNotFoundError):  # as in S3: a container that is not there is a mistake
        names(Store("az://no-such-container-here/x", azurite))


@pytest.mark.parametrize("size", [10, PART_NBYTES + 10])
def test_an_answer_that_was_lost(store: azure.AzureStore, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The client repeats the request, and the server refuses that one: it was ours all the same."""
    blob = store.blob

    async def twice(request: str, *names: Any, **arguments: Any) -> Any:
        if request in ("upload_blob", "commit_block_list"):
            await blob(request, *names, **arguments)
        return await blob(request, *names, **arguments)

    monkeypatch.setattr(store, "blob", twice)
    store.create_exclusive("file", pattern(size))
    assert read_all(store, "file") == pattern(size)
    with pytest.raises(FileExistsError):
        store.create_exclusive("file", b"other")
    put(store, "file", b"other")
    assert read_all(store, "file") == b"other"


def test_two_uploads_that_replace(store: azure.AzureStore) -> None:
    """Azure drops the blocks of the one that is completed later: it fails, and nothing of it shows."""
    new = [store.begin("file"), store.begin("file")]
    for me, upload in enumerate(new):
        upload.write(pattern(PART_NBYTES + 1, me))
        for part in vars(upload)["_parts"]:  # a block that arrives after the end of the other would not be dropped
            part.result()
    new[0].publish()
    with pytest.raises(OSError, match="somebody else has completed"):
        new[1].publish()
    assert read_all(store, "file") == pattern(PART_NBYTES + 1, 0)
    put(store, "file", pattern(PART_NBYTES + 1, 1))
    assert read_all(store, "file") == pattern(PART_NBYTES + 1, 1)


def test_each_request_has_its_condition(store: azure.AzureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(store, monkeypatch)

    def cost(call: Callable[[], Any]) -> list[tuple[str, str, dict[str, str]]]:
        asked.clear()
        call()
        return asked[:]

    ((method, _, headers),) = cost(lambda: store.create_exclusive("file", b"x" * 100))
    assert (method, headers["If-None-Match"]) == ("PUT", "*")
    entry = store.stat("file")
    assert entry is not None
    with store.open_seekable("file", entry) as file:
        ((method, _, headers),) = cost(lambda: file.read(10))
    assert (method, headers["If-Match"]) == ("GET", f'"{entry.stamp}"')
    put(store, "file", b"y")
    with pytest.raises(OSError, match="replaced"):
        store.delete_read(entry)
    assert names(store) == ["file"]
    entry = store.stat("file")
    assert entry is not None
    ((method, _, headers),) = cost(lambda: store.delete_read(entry))
    assert (method, headers["If-Match"]) == ("DELETE", f'"{entry.stamp}"')
    parts = cost(lambda: store.begin("large", exclusive=True).discard())
    assert [method for method, *_ in parts] == ["HEAD"]
    new = store.begin("large", exclusive=True)
    new.write(bytes(PART_NBYTES + 1))
    *_, (method, what, headers) = cost(new.publish)
    assert (method, what, headers["If-None-Match"]) == ("PUT", "blocklist", "*")
    assert [method for method, *_ in cost(lambda: store.read_small("large", 1 << 24))] == ["GET"]
    assert [method for method, *_ in cost(lambda: put(store, "small", b"x"))] == ["PUT"]
    assert [method for method, *_ in cost(lambda: names(store))] == ["GET"]
    assert [method for method, *_ in cost(lambda: store.open_seekable("small").close())] == ["GET"]


def test_pages(store: azure.AzureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(azure, "PAGE", 2)
    paths = [f"a/{i}" for i in range(5)] + ["b"]
    for path in paths:
        put(store, path, b"x")
    assert names(store) == paths
    assert store.existing([*paths, "c"]) == set(paths)


def test_folders_of_a_hierarchical_namespace(store: azure.AzureStore) -> None:
    """They are listed as empty blobs with this metadata."""
    put(store, "a/b", b"x")
    store.run(store.blob("upload_blob", "a", b"", metadata={"hdi_isfolder": "true"})).result()
    assert names(store) == ["a/b"]
    assert store.stat("a") is None


def test_a_blob_with_an_encoding(store: azure.AzureStore) -> None:
    """Its bytes are those that are stored."""
    from azure.storage.blob import ContentSettings

    data = gzip.compress(pattern(1000))
    settings = ContentSettings(content_encoding="gzip")
    store.run(store.blob("upload_blob", "file", data, content_settings=settings)).result()
    assert store.read_small("file", 2000) == data
    assert read_all(store, "file") == data


def test_a_wrong_key(store: azure.AzureStore) -> None:
    known = store.storage_options["connection_string"]
    key = next(part.removeprefix("AccountKey=") for part in known.split(";") if part.startswith("AccountKey="))
    for wrong in (key[::-1].lstrip("=") + "==", "not base64"):
        other = Store(store.url, {"connection_string": known.replace(key, wrong)})
        for call in (
            lambda other: names(other),
            lambda other: other.stat("a"),
            lambda other: other.read_small("a", 1),
            lambda other: other.create_exclusive("a", b"x"),
            lambda other: put(other, "a", bytes(PART_NBYTES + 1)),
            lambda other: other.delete("a"),
        ):
            with pytest.raises(PermissionError) as caught:
                call(other)
            assert wrong not in str(caught.value)
    assert names(store) == []


def test_requests_are_logged(store: azure.AzureStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "ags_fast.store"):
        put(store, "a/b", b"data")
        assert read_all(store, "a/b") == b"data"
    assert any(message.startswith("az: upload_blob ") and "a/b" in message for message in caplog.messages)
    assert len(caplog.messages) >= 2
