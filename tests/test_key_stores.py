"""All key stores under one contract: memory, a dataset, another folder, SQLite, PostgreSQL; and 10**5 keys."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import signal
import socket
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from kms_clients import Shelf, keystore
from programs import wrapping
from support import finish_python, flip, program, start_python

from ags_fast.errors import ConcurrentChangeError, FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.fs import Store
from ags_fast.keys import (
    DatasetKeyStore,
    Envelope,
    KeyEntry,
    KeyResolver,
    MemoryKeyStore,
    binding,
    clear_cache,
    kms_calls,
    new_kek,
    open_key_store,
    seal_document,
)
from ags_fast.keys.entry import UnknownKeyError
from ags_fast.keys.stores import Entries, claimed_keys
from ags_fast.keys.stores.parts import INLINE, bucket_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from servers.postgres import Postgres

BOUND = binding("d", "dek", "a/b")


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    clear_cache()
    return keystore(tmp_path, "m", "n")


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("psycopg")
    from servers.postgres import postgres as started

    with started() as server, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PGPASSWORD", server.password)
        yield server


class Opened:
    """A place for keys, and stores of it that know nothing of each other."""

    def __init__(self, name: str, tmp_path: Path, kms: dict[str, str], postgres: Any) -> None:
        self.alone = MemoryKeyStore("d") if name == "memory" else None
        self.where: Any = {
            "dataset": lambda: None,
            "place": lambda: f"memory://{tmp_path.name}-keys",
            "sqlite": lambda: f"sqlite:///{tmp_path}/keys.db?dataset=d",
            "postgres": lambda: f"{postgres().url}?dataset={tmp_path.name}",
            "memory": lambda: self.alone,
        }[name]()
        self.id = tmp_path.name if name == "postgres" else "d"
        self.open: Callable[[], KeyResolver] = lambda: open_key_store(
            self.where, kms, store=Store(tmp_path / "dataset"), dataset_id=self.id
        )


@pytest.fixture(params=["memory", "dataset", "place", "sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path, kms: dict[str, str]) -> Opened:
    if request.param == "place":
        pytest.importorskip("fsspec")
    if request.param == "sqlite":
        pytest.importorskip("sqlalchemy")
    return Opened(request.param, tmp_path, kms, lambda: request.getfixturevalue("postgres"))


def put(keys: Any, *entries: KeyEntry) -> int:
    return int(keys.compare_and_swap({entry.key_id: entry for entry in entries}, keys.version))


def many(count: int, more: int = 0) -> dict[str, KeyEntry]:
    """KEKs as KMSs of the cloud make them, by their wrapped size."""
    master = "arn:aws:kms:eu-central-1:123456789012:key/12345678-1234-1234-1234-123456789012"
    entries = (
        KeyEntry(f"key-{i:06}-{'x' * 11}", master, bytes(60), "retired", 1_700_000_000_000 + i)
        for i in range(more, more + count)
    )
    return {entry.key_id: entry for entry in entries}


# ---------------------------------------------------------------- what all stores do


def test_the_protocol(place: Opened, kms: dict[str, str]) -> None:
    keys = place.open()
    assert isinstance(keys, KeyResolver)
    assert keys.dataset_id == place.id
    assert (keys.version, keys.refresh(), keys.list(), keys.history()) == (0, 0, [], [])
    with pytest.raises(UnknownKeyError, match="no key 'absent'"):
        keys.get("absent")
    second = new_kek(kms, "m", now=2, properties={"note": "ключ \0 ' \"", "scope": "day=1"})
    first = new_kek(kms, "n", now=1, double_wrap=False)
    assert keys.compare_and_swap({second.key_id: second}, 0) == 1 == keys.version
    assert keys.compare_and_swap({first.key_id: first}, 1, operation="add") == 2
    assert keys.get(first.key_id) == first
    assert keys.list() == [first, second]
    retired = first.replace(state="retired", uses=7, more={"later": [1, {"a": None}]})
    assert put(keys, retired) == 3
    assert keys.list("active") == [second]
    assert keys.list("retired") == [retired]
    assert keys.compare_and_swap({first.key_id: None, "never there": None}, 3) == 4
    with pytest.raises(KeyAccessError):
        keys.get(first.key_id)
    assert keys.list() == place.open().list() == [second]
    history = keys.history()
    assert [change.version for change in history] == [1, 2, 3, 4]
    assert [change.changes for change in history] == [
        {"added": [second.key_id], "changed": [], "removed": []},
        {"added": [first.key_id], "changed": [], "removed": []},
        {"added": [], "changed": [first.key_id], "removed": []},
        {"added": [], "changed": [], "removed": [first.key_id]},
    ]
    assert [change.time_ms for change in history] == sorted(change.time_ms for change in history)
    assert put(keys, second) == 5
    assert keys.history()[-1].changes == {"added": [], "changed": [], "removed": []}


def test_conflicts(place: Opened, kms: dict[str, str]) -> None:
    keys = place.open()
    first = new_kek(kms, "m")
    for expected in (1, -1):
        with pytest.raises(ConcurrentChangeError, match="at version 0"):
            keys.compare_and_swap({first.key_id: first}, expected)
    put(keys, first)
    for expected in (0, 2, 3, -1, -2):
        with pytest.raises(ConcurrentChangeError, match="at version 1"):
            keys.compare_and_swap({first.key_id: None}, expected)
    with pytest.raises(ValueError, match="under 'x'"):
        keys.compare_and_swap({"x": first}, 1)
    assert keys.list() == [first]
    assert keys.version == keys.refresh() == 1


def test_others_change_it(place: Opened, kms: dict[str, str]) -> None:
    keys, other = place.open(), place.open()
    first = new_kek(kms, "m")
    put(keys, first)
    assert other.refresh() == 1
    assert other.get(first.key_id) == first
    second = new_kek(kms, "m")
    put(keys, first.replace(uses=5), second)
    assert other.get(second.key_id) == second  # asked for again, for it was not there before
    assert other.refresh() == 2
    assert other.get(first.key_id).uses == 5
    put(keys, first.replace(uses=6))
    if place.alone is None:
        before = other.version
        other.list()
        assert before == 2
        with pytest.raises(ConcurrentChangeError, match="at version 3"):
            other.compare_and_swap({first.key_id: None}, before)
    assert other.version == 3
    assert other.get(first.key_id).uses == 6


def test_the_version_is_never_newer_than_what_was_read(place: Opened, kms: dict[str, str]) -> None:
    """Else a change made from both would undo what came between."""
    entry = new_kek(kms, "m")
    put(place.open(), entry)
    for read in (lambda keys: keys.get(entry.key_id), lambda keys: keys.list()[0]):
        late = place.open()
        seen = read(late)
        put(place.open(), seen.replace(uses=seen.uses + 1))
        if place.alone is None:
            with pytest.raises(ConcurrentChangeError):
                put(late, seen.replace(uses=seen.uses + 100))
    assert place.open().get(entry.key_id).uses == 2


def test_lazy_entries(place: Opened, kms: dict[str, str]) -> None:
    """An envelope over a store finds keys that were put in after it was made, and those that were wrapped anew."""
    keys = place.open()
    entries = Entries(keys)
    envelope = Envelope(kms, entries)
    assert len(entries) == 0
    assert list(entries) == []
    assert "x" not in entries
    assert entries.get("x") is None
    with pytest.raises(KeyError):
        entries["x"]
    with pytest.raises(KeyAccessError, match="'x'"):
        envelope.unwrap("x", bytes(60), BOUND)
    first = new_kek(kms, "m", now=1)
    put(keys, first)
    wrapped = envelope.wrap(first.key_id, bytes(range(16)), BOUND)
    rewrapped = first.replace(wrapped=new_kek(kms, "m").wrapped)
    put(keys, rewrapped, new_kek(kms, "m", now=2))
    assert envelope.entries[first.key_id] == rewrapped
    assert entries[first.key_id] == rewrapped
    with pytest.raises(IntegrityError):  # another KEK by now: what was unwrapped before is not used any more
        envelope.unwrap(first.key_id, wrapped, BOUND)
    put(keys, first)
    assert envelope.unwrap(first.key_id, wrapped, BOUND) == bytes(range(16))
    assert list(envelope.subset([first.key_id]).entries) == [first.key_id]
    assert list(entries) == [entry.key_id for entry in keys.list()]
    assert len(entries) == 2
    assert "Entries of" in repr(envelope)
    if place.alone is None:
        shipped = pickle.loads(pickle.dumps(envelope))
        assert shipped.unwrap(first.key_id, wrapped, BOUND) == bytes(range(16))


def test_an_entry_under_another_name(kms: dict[str, str]) -> None:
    class Lying(Entries):
        def __getitem__(self, key_id: str) -> KeyEntry:
            return KeyEntry("another", "m")

    with pytest.raises(ValueError, match="under 'k'"):
        Envelope(kms, Lying(MemoryKeyStore())).wrap("k", bytes(16), BOUND)


def test_large_entries(place: Opened, kms: dict[str, str]) -> None:
    keys = place.open()
    large = [
        new_kek(kms, "m", now=i, properties={"note": chr(0x430 + i) * 25_000}).replace(more={"more": "n" * 25_000})
        for i in range(5)
    ]
    huge = KeyEntry("huge", "m", bytes(range(256)) * 200, "retired", 9)
    put(keys, *large, huge)
    fresh = place.open()
    assert fresh.get("huge") == huge
    assert fresh.list() == [*large, huge]


def test_threads_lose_nothing(place: Opened, kms: dict[str, str]) -> None:
    keys = place.open()
    lost: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(5):
                entry = new_kek(kms, "m")
                while True:
                    try:
                        put(keys, entry)
                        break
                    except ConcurrentChangeError:
                        continue
        except BaseException as error:
            lost.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lost
    assert keys.version == 20
    assert len(keys.list()) == 20


def test_one_winner(place: Opened, kms: dict[str, str]) -> None:
    """Of eight who have seen one version, one makes the next; the others change nothing, and are told."""
    stores = [place.open() for _ in range(8)]
    barrier = threading.Barrier(8)
    won: list[tuple[int, str]] = []
    failed: list[BaseException] = []

    def race(i: int) -> None:
        try:
            for version in range(4):
                entry = KeyEntry(f"{version} of {i}", "m", created_ms=version)
                assert stores[i].refresh() == version
                barrier.wait(30)
                try:
                    assert stores[i].compare_and_swap({entry.key_id: entry}, version) == version + 1
                    won.append((version, entry.key_id))
                except ConcurrentChangeError:
                    pass
                barrier.wait(30)
        except BaseException as error:
            barrier.abort()
            failed.append(error)

    threads = [threading.Thread(target=race, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert [version for version, _ in sorted(won)] == [0, 1, 2, 3]
    assert [entry.key_id for entry in place.open().list()] == [key_id for _, key_id in sorted(won)]
    assert [change.changes["added"] for change in place.open().history()] == [[key_id] for _, key_id in sorted(won)]


# ---------------------------------------------------------------- where they are


def test_where_keys_are(tmp_path: Path, kms: dict[str, str]) -> None:
    store = Store(tmp_path / "dataset")
    inside = open_key_store(None, kms, store=store)
    put(inside, new_kek(kms, "m"))
    assert isinstance(inside, DatasetKeyStore)
    assert [e.path for e in store.list()] == ["_ags/keys/00000001.json"]
    for where in (tmp_path / "other", Store(tmp_path / "another")):
        outside = open_key_store(where, kms, store=store)
        put(outside, new_kek(kms, "m"))
        assert open_key_store(where, kms, store=store).dataset_id == outside.dataset_id != inside.dataset_id
    assert (tmp_path / "other/_ags/keys/00000001.json").is_file()
    with pytest.raises(IntegrityError, match="another dataset's"):
        open_key_store(tmp_path / "other", kms, store=store, dataset_id=inside.dataset_id).list()
    mine = MemoryKeyStore("d")
    assert open_key_store(mine, kms, store=store) is mine is open_key_store(mine, kms, store=store, dataset_id="d")
    with pytest.raises(ValueError, match="'d', not 'e'"):
        open_key_store(mine, kms, store=store, dataset_id="e")


# ---------------------------------------------------------------- many keys in a folder


class Meter(Shelf):
    """A shelf that counts bytes, and says when objects were made."""

    def __init__(self) -> None:
        super().__init__()
        self.read_nbytes = self.written_nbytes = 0
        self.made: dict[str, float] = {}

    def list(self, prefix: str = "") -> Iterator[Any]:
        listed = super().list(prefix)
        return iter([SimpleNamespace(**{**vars(e), "modified": self.made.get(e.path, 0.0)}) for e in listed])

    def read_small(self, path: str, limit: int) -> bytes:
        data = super().read_small(path, limit)
        if len(data) > limit:
            raise FormatError(f"{path} was changed: it is longer")
        self.read_nbytes += len(data)
        return data

    def create_exclusive(self, path: str, data: bytes) -> None:
        super().create_exclusive(path, data)
        self.written_nbytes += len(data)
        self.made[path] = time.time()

    def reset(self) -> None:
        self.read_nbytes = self.written_nbytes = 0
        self.requests.clear()

    def newest(self) -> str:
        return max(path for path in self.objects if path.startswith("_ags/keys/0"))

    def body(self) -> Any:
        return json.loads(self.objects[self.newest()])["body"]


@pytest.mark.more
def test_a_hundred_thousand_keys(kms: dict[str, str]) -> None:
    """No lookup and no change reads or writes more than the document and a bucket."""
    shelf = Meter()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    sealer = new_kek(kms, "m", now=1_600_000_000_000)
    entries = many(100_000)
    assert keys.compare_and_swap({sealer.key_id: sealer, **entries}, 0) == 1
    assert len(shelf.objects[shelf.newest()]) < 100_000
    assert len(shelf.objects) == 1 + 512 + 1
    for key_id in list(entries)[::9973]:  # as docs/dataset-format.md has it: of 2**9 buckets, the first 9 bits
        part = shelf.body()["buckets"][int.from_bytes(hashlib.sha256(key_id.encode()).digest()[:2]) >> 7]
        data = shelf.objects[part["path"]]
        assert base64.b64decode(part["sha256"]) == hashlib.sha256(data).digest()
        assert part["length"] == len(data)
        assert entries[key_id].to_json() in json.loads(data)["keys"]
        assert part["entries"] == len(json.loads(data)["keys"])
    clear_cache()
    before = kms_calls()
    for key_id in ("key-000000-xxxxxxxxxxx", "key-099999-xxxxxxxxxxx"):
        shelf.reset()
        reader = DatasetKeyStore(shelf, kms)
        assert reader.get(key_id) == entries[key_id]
        assert shelf.read_nbytes < 300_000
        assert sorted(shelf.requests) == ["list", "read", "read"]
        shelf.reset()
        assert reader.get(key_id) == entries[key_id]
        assert reader.get(sealer.key_id) == sealer
        assert shelf.requests == []
    with pytest.raises(UnknownKeyError):
        reader.get("absent")
    assert kms_calls() - before == {("local", "unwrap"): 1}
    shelf.reset()
    writer = DatasetKeyStore(shelf, kms)
    new = new_kek(kms, "m", properties={"scope": "day=1"})
    assert put(writer, new) == 2
    assert shelf.read_nbytes < 300_000
    assert shelf.written_nbytes < 300_000
    assert shelf.requests.count("create") == 2
    reader = DatasetKeyStore(shelf, kms)
    assert reader.list() == [sealer, *entries.values(), new]
    assert [len(change.changes["added"]) for change in reader.history()] == [100_001, 1]
    assert len(Envelope(kms, reader.entries).subset([new.key_id]).entries) == 1


def check(shelf: Meter, kms: dict[str, str], expected: dict[str, KeyEntry]) -> None:
    """What a new reader finds, one by one and all, and that each bucket has what it should."""
    reader = DatasetKeyStore(shelf, kms)
    assert sorted(reader.list(), key=lambda e: e.key_id) == sorted(expected.values(), key=lambda e: e.key_id)
    some = list(expected)[:: max(1, len(expected) // 20)]
    fresh = DatasetKeyStore(shelf, kms)
    assert [fresh.get(key_id) for key_id in some] == [expected[key_id] for key_id in some]
    body = shelf.body()
    if len(expected) <= INLINE:
        assert "buckets" not in body
        assert "sealer" not in body
        assert len(body["keys"]) == len(expected)
    else:
        counts = [bucket["entries"] if bucket else 0 for bucket in body["buckets"]]
        assert "keys" not in body
        assert sum(counts) == len(expected) - 1  # the document has the sealer
        size = bucket_size(sum(counts))
        assert size / 4 <= sum(counts) / len(counts) <= size


def test_growing_and_shrinking(kms: dict[str, str]) -> None:
    """From the document to buckets, to more of them, and all the way back."""
    shelf = Meter()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    sealer = new_kek(kms, "m")
    expected = {sealer.key_id: sealer}
    put(keys, sealer)
    numbers = []
    for begin, end in ((0, 63), (63, 64), (64, 300), (300, 1600), (1600, 1601)):
        new = many(end - begin, begin)
        put(keys, *new.values())
        expected |= new
        check(shelf, kms, expected)
        numbers.append(len(shelf.body().get("buckets", ())))
    assert numbers == [0, 2, 8, 32, 32]
    for left in (1100, 450, 65, 64, 3):
        gone = list(expected)[left:]
        keys.compare_and_swap(dict.fromkeys(gone), keys.version)
        expected = {key_id: entry for key_id, entry in expected.items() if key_id not in gone}
        check(shelf, kms, expected)
    changes = [change.changes for change in DatasetKeyStore(shelf, kms).history()]
    assert sum(len(change["added"]) for change in changes) - sum(len(change["removed"]) for change in changes) == 3
    assert len(changes) == keys.version == 11


def test_what_is_claimed(kms: dict[str, str]) -> None:
    """Without a KMS."""
    shelf = Meter()
    with pytest.raises(FileNotFoundError):
        claimed_keys(shelf)
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    entry = new_kek(kms, "m")
    before = kms_calls()
    put(keys, entry)
    assert claimed_keys(shelf) == ("d", [entry])
    put(keys, *many(900).values())
    clear_cache()
    assert claimed_keys(shelf) == ("d", keys.list())
    assert kms_calls() == before
    del shelf.objects[shelf.body()["buckets"][1]["path"]]
    with pytest.raises(IntegrityError, match="is missing"):
        claimed_keys(shelf)


def test_only_what_changes_is_written(kms: dict[str, str]) -> None:
    shelf = Meter()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    sealer = new_kek(kms, "m", properties={"note": "x"})
    put(keys, sealer, *many(3000).values())
    for changes, buckets in (
        ({}, 0),
        ({"absent": None}, 0),
        (dict.fromkeys(list(many(1)), None), 1),
        ({sealer.key_id: sealer.replace(uses=5)}, 0),
    ):
        before = shelf.body()["buckets"]
        keys.compare_and_swap(changes, keys.version)
        after = shelf.body()["buckets"]
        assert sum(a != b for a, b in zip(before, after, strict=True)) == buckets
    assert DatasetKeyStore(shelf, kms).get(sealer.key_id).uses == 5
    assert [e.uses for e in DatasetKeyStore(shelf, kms).list("active")] == [5]


def test_the_sealer_of_many(kms: dict[str, str]) -> None:
    """It is the newest of the right kind, also where most entries are not looked at."""
    shelf = Meter()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    old, new = new_kek(kms, "m", now=1), new_kek(kms, "m", now=2)
    single = new_kek(kms, "m", now=9, double_wrap=False)

    def sealed_by() -> str:
        assert json.loads(shelf.objects[shelf.newest()])["auth"]["key_id"] == shelf.body()["sealer"]["key-id"]
        return str(shelf.body()["sealer"]["key-id"])

    put(keys, single, *many(1000).values())
    assert sealed_by() == single.key_id
    put(keys, old)
    assert sealed_by() == old.key_id
    put(keys, new_kek(kms, "m", properties={"use": "columns"}), new_kek(kms, "m", properties={"scope": "day=1"}))
    assert sealed_by() == old.key_id
    put(keys, new)
    assert sealed_by() == new.key_id
    put(keys, new.replace(state="retired"), new_kek(kms, "m", double_wrap=False))
    assert sealed_by() == old.key_id  # which nobody named in this change
    keys.compare_and_swap({old.key_id: None}, keys.version)
    assert sealed_by() != old.key_id
    version = keys.version
    with pytest.raises(PolicyError, match="active key"):
        put(keys, *(entry.replace(state="retired") for entry in keys.list("active")))
    assert keys.refresh() == version
    check(shelf, kms, {entry.key_id: entry for entry in keys.list()})


def test_history_moves_out(kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ags_fast.keys.stores.parts.HISTORY_NBYTES", 300)
    monkeypatch.setattr("ags_fast.keys.stores.parts.HISTORY", 7)
    shelf = Meter()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    entry = new_kek(kms, "m")
    put(keys, entry, *many(600).values())
    for uses in range(12):
        put(keys, entry.replace(uses=uses))
    body = shelf.body()
    assert len(body["earlier"]) == 2
    assert len(body["history"]) < 4
    assert [change.version for change in DatasetKeyStore(shelf, kms).history()] == list(range(7, 14))
    assert sum(part["entries"] for part in body["earlier"]) + len(body["history"]) < 7 + 3


def test_unknown_fields_survive_in_buckets(kms: dict[str, str]) -> None:
    shelf = Meter()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    entry = new_kek(kms, "m")
    put(keys, entry, *(e.replace(more={"later": 1}) for e in many(600).values()))
    body = shelf.body() | {"retention": {"days": None}, "note": None}
    shelf.objects[shelf.newest()] = seal_document(keys.envelope(), entry.key_id, "d", shelf.newest(), body)
    older = DatasetKeyStore(shelf, kms)
    put(older, *many(1, 700).values())
    assert shelf.body()["retention"] == {"days": None}
    assert "note" in shelf.body()
    assert sum(e.more == {"later": 1} for e in DatasetKeyStore(shelf, kms).list()) == 600


def test_parts_that_were_changed(kms: dict[str, str]) -> None:
    """The document's seal covers every bit of what it names."""
    shelf = Meter()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    put(keys, new_kek(kms, "m"), *many(900).values())
    good = dict(shelf.objects)
    buckets = [bucket["path"] for bucket in shelf.body()["buckets"]]
    (history,) = [part["path"] for part in shelf.body()["earlier"]]
    for path in (buckets[0], history):

        def read(path: str = path) -> None:
            fresh = DatasetKeyStore(shelf, kms)
            assert fresh.history() if path == history else fresh.list()

        data = good[path]
        lies = [flip(data, bit) for bit in range(0, 8 * len(data), 4999)]
        lies += [data[:-1], data + b" ", b"", good[buckets[1]]]
        for lie in lies:
            shelf.objects = good | {path: lie}
            with pytest.raises(IntegrityError, match="was changed"):
                read()
        shelf.objects = {name: data for name, data in good.items() if name != path}
        with pytest.raises(IntegrityError, match="is missing"):
            read()
        shelf.objects = good
        read()
    shelf.objects = good | {buckets[0]: b"{}"}
    inside = next(k for k in many(900) if _in(good[buckets[0]], k))
    outside = next(k for k in many(900) if not _in(good[buckets[0]], k))
    fresh = DatasetKeyStore(shelf, kms)
    assert fresh.get(outside).key_id == outside
    with pytest.raises(IntegrityError, match="was changed"):
        fresh.get(inside)
    with pytest.raises(IntegrityError, match="was changed"):
        put(fresh, many(900)[inside].replace(uses=1))


def _in(bucket: bytes, key_id: str) -> bool:
    return key_id.encode() in bucket


def test_documents_that_are_authentic_and_impossible(kms: dict[str, str]) -> None:
    shelf = Meter()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    entry = new_kek(kms, "m")
    put(keys, entry, *many(900).values())
    good, path, envelope = dict(shelf.objects), shelf.newest(), keys.envelope([entry.key_id])

    def swapped(body: Any) -> None:
        body["buckets"].reverse()

    changes: list[Callable[[Any], Any]] = [
        swapped,
        lambda b: b["buckets"].append(None),
        lambda b: b.update(buckets=[]),
        lambda b: b.update(buckets=5),
        lambda b: b.update(buckets=[5, 5]),
        lambda b: b.pop("buckets"),
        lambda b: b.pop("sealer"),
        lambda b: b.update(sealer=many(1).popitem()[1].to_json()),
        lambda b: b.update(keys=[b["sealer"]]),
        lambda b: b["buckets"][0].update(path="_ags/keys/00000001.json"),
        lambda b: b["buckets"][0].update(path="../" + b["buckets"][0]["path"]),
        lambda b: b["buckets"][0].update(entries=b["buckets"][0]["entries"] + 1),
        lambda b: b["buckets"][0].update(length="1"),
        lambda b: b["buckets"][0].pop("sha256"),
        lambda b: b["earlier"][0].update(length=-1),
    ]
    for change in changes:
        body = json.loads(good[path])["body"]
        change(body)
        shelf.objects = good | {path: seal_document(envelope, entry.key_id, "d", path, body)}
        with pytest.raises((FormatError, IntegrityError)):
            DatasetKeyStore(shelf, kms).list()


def test_buckets_go_while_they_are_read(kms: dict[str, str]) -> None:
    """Who has an older version in hand is led to the newest, if that is where its buckets went."""
    shelf = Meter()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    entry = new_kek(kms, "m")
    entries = many(900)
    put(keys, entry, *entries.values())
    readers = [DatasetKeyStore(shelf, kms) for _ in range(4)]
    assert {reader.version for reader in readers} == {1}
    put(keys, *(e.replace(uses=1) for e in entries.values()))
    for path in keys.superseded():
        del shelf.objects[path]
    assert [path for path in shelf.objects if path.startswith("_ags/keys/0")] == [shelf.newest()]
    assert readers[0].get(next(iter(entries))).uses == 1
    assert readers[0].version == 2
    assert {e.uses for e in readers[1].list("retired")} == {1}
    assert len(readers[2].history()) == 1
    assert len(readers[0].history()) == 2
    with pytest.raises(ConcurrentChangeError, match="at version 2"):
        readers[3].compare_and_swap(dict.fromkeys(entries), 1)
    assert readers[3].version == 2


def test_buckets_go_while_they_are_changed(kms: dict[str, str]) -> None:
    shelf = Meter()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    entries = many(900)
    put(keys, new_kek(kms, "m"), *entries.values())
    late = DatasetKeyStore(shelf, kms)
    assert late.version == 1
    read = shelf.read_small

    def overtaken(path: str, limit: int) -> bytes:
        if shelf.read_small is overtaken:
            shelf.read_small = read  # type: ignore[method-assign]
            put(keys, *(e.replace(uses=1) for e in entries.values()))
            for name in keys.superseded():
                del shelf.objects[name]
        return read(path, limit)

    shelf.read_small = overtaken  # type: ignore[method-assign]
    with pytest.raises(ConcurrentChangeError, match="at version 2"):
        late.compare_and_swap(dict.fromkeys(entries), 1)
    assert late.version == 2
    assert {e.uses for e in late.list("retired")} == {1}


def test_what_is_superseded(kms: dict[str, str]) -> None:
    shelf = Meter()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    assert keys.superseded() == []
    assert keys.objects(0) == set()
    entry = new_kek(kms, "m")
    put(keys, entry, *many(900).values())
    assert keys.superseded() == []
    assert keys.objects(1) == set(shelf.objects)
    first = keys.objects(1)
    put(keys, next(iter(many(1).values())).replace(uses=1))
    second = keys.objects(2)
    assert len(second - first) == 2
    assert len(first - second) == 2
    assert DatasetKeyStore(shelf, kms).objects(1) == first
    with pytest.raises(FileNotFoundError):
        keys.objects(3)
    young, aged = (f"_ags/keys/{kind}/{'0' * 36}.json" for kind in ("buckets", "history"))
    for path in (young, aged, "_ags/keys/note.txt", "_ags/keys/buckets/note.json"):
        shelf.create_exclusive(path, b"{}")
        shelf.made[path] -= 86_300 if path == young else 86_500
    found = keys.superseded()
    assert set(found) == (first - second) | {aged}
    assert found[-1] == "_ags/keys/00000001.json"  # last, for it names the others, should somebody die here
    for path in found:
        del shelf.objects[path]
    used = {key_id: key.replace(uses=1) for key_id, key in many(1).items()}
    check(shelf, kms, {entry.key_id: entry, **many(900), **used})
    assert keys.superseded() == []
    shelf.objects["_ags/keys/00000001.json"] = b"no document"
    assert keys.superseded() == ["_ags/keys/00000001.json"]


def test_who_loses_a_race_leaves_what_he_wrote(kms: dict[str, str]) -> None:
    """A request that was sent twice may be told that its object is there, and that one has the parts."""
    shelf = Meter()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    entry = new_kek(kms, "m")
    put(keys, entry, *many(600).values())
    create = shelf.create_exclusive

    def echo(path: str, data: bytes) -> None:
        create(path, data)
        if path == "_ags/keys/00000002.json":
            raise FileExistsError(path)

    shelf.create_exclusive = echo  # type: ignore[method-assign]
    with pytest.raises(ConcurrentChangeError):
        put(keys, entry.replace(uses=1))
    check(shelf, kms, {entry.key_id: entry.replace(uses=1), **many(600)})


def test_in_a_real_folder(tmp_path: Path, kms: dict[str, str]) -> None:
    store = Store(tmp_path)
    keys = DatasetKeyStore(store, kms, dataset_id="d")
    entry = new_kek(kms, "m")
    put(keys, entry, *many(900).values())
    put(keys, next(iter(many(1).values())).replace(uses=1))
    assert keys.objects(2) <= {e.path for e in store.list()}
    assert "_ags/keys/00000001.json" in keys.superseded()
    assert len(keys.superseded()) == 2
    for path in keys.superseded():
        store.delete(path)
    assert len(DatasetKeyStore(store, kms).list()) == 901
    assert keys.superseded() == []


# ---------------------------------------------------------------- in a database


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Its URL."""
    pytest.importorskip("sqlalchemy")
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/keys.db"
    return str(request.getfixturevalue("postgres").url)


def test_many_datasets_in_one_database(database: str, tmp_path: Path) -> None:
    from ags_fast.keys import SqlKeyStore

    names = [f"{tmp_path.name} {name}" for name in ("one", "two", "o'three\"; %s")]
    for i, name in enumerate(names):
        keys = SqlKeyStore(database, dataset_id=name)
        assert keys.version == 0
        for n in range(i + 1):
            put(keys, KeyEntry("the same", "m", created_ms=i, uses=n), KeyEntry(f"of {name}", "m"))
    for i, name in enumerate(names):
        keys = SqlKeyStore(database, dataset_id=name)
        assert keys.version == len(keys.history()) == i + 1
        assert keys.get("the same").uses == i
        assert {entry.key_id for entry in keys.list()} == {"the same", f"of {name}"}
    assert SqlKeyStore(f"{database}?dataset={names[0]}").get("the same").uses == 0
    with pytest.raises(PolicyError, match=r"add \?dataset=") as caught:
        SqlKeyStore(database)
    assert all(repr(name) in str(caught.value) for name in names)
    with pytest.raises(ValueError, match="'x', not 'y'"):
        SqlKeyStore(f"{database}?dataset=x", dataset_id="y")
    for bad in ("", "x" * 256, "a\0b"):
        with pytest.raises(ValueError):
            SqlKeyStore(database, dataset_id=bad)
    with pytest.raises(ValueError, match="512"):
        put(keys, KeyEntry("k" * 513, "m"))
    assert put(keys, KeyEntry("ü" * 512, "m")) == 4


def test_pickles_as_its_url(database: str, tmp_path: Path) -> None:
    import sqlalchemy

    from ags_fast.keys import SqlKeyStore

    keys = SqlKeyStore(f"{database}?dataset={tmp_path.name}")
    put(keys, KeyEntry("k", "m"))
    again = pickle.loads(pickle.dumps(keys))
    assert again.get("k") == keys.get("k")
    assert repr(again) == repr(keys)
    assert tmp_path.name in repr(keys)
    engine = sqlalchemy.create_engine(database)
    own = SqlKeyStore(engine, dataset_id=tmp_path.name)
    assert own.get("k") == keys.get("k")
    with pytest.raises(TypeError, match="Engine"):
        pickle.dumps(own)
    engine.dispose()


def test_tables_are_made_once(database: str, tmp_path: Path) -> None:
    """By many at a time."""
    import sqlalchemy

    from ags_fast.keys import SqlKeyStore

    engine = sqlalchemy.create_engine(database)
    for _ in range(3):
        with engine.begin() as connection:
            for table in ("ags_keys", "ags_key_versions"):
                connection.execute(sqlalchemy.text(f"DROP TABLE IF EXISTS {table}"))
        stores = [SqlKeyStore(f"{database}?dataset={tmp_path.name}") for _ in range(6)]
        barrier = threading.Barrier(6)
        seen: list[int] = []

        def first(i: int, stores: Any = stores, barrier: Any = barrier, seen: Any = seen) -> None:
            barrier.wait(30)
            seen.append(stores[i].version)

        threads = [threading.Thread(target=first, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [0] * 6
    engine.dispose()


def test_rows_that_somebody_spoilt(database: str, tmp_path: Path) -> None:
    import sqlalchemy

    from ags_fast.keys import SqlKeyStore

    keys = SqlKeyStore(f"{database}?dataset={tmp_path.name}")
    put(keys, KeyEntry("k", "m"))
    engine = sqlalchemy.create_engine(database)
    for text, kind in (
        ("", FormatError),
        ("[]", FormatError),
        ("{}", FormatError),
        (json.dumps(KeyEntry("other", "m").to_json()), IntegrityError),
    ):
        with engine.begin() as connection:
            change = sqlalchemy.text("UPDATE ags_keys SET entry = :text WHERE dataset_id = :id")
            connection.execute(change, {"text": text, "id": tmp_path.name})
        keys.refresh()
        for read in (lambda: keys.get("k"), keys.list):
            with pytest.raises(kind):
                read()
    engine.dispose()


@pytest.mark.more
def test_processes_race(database: str, tmp_path: Path) -> None:
    """Processes that add forty keys between them, one at a time: each version has one, and none is lost."""
    url = f"{database}?dataset={tmp_path.name}"
    children = [start_python(program(wrapping.change_sql, url, i)) for i in range(4)]
    won = sorted(
        (int(number), key_id)
        for child in children
        for number, _, key_id in (line.partition(" ") for line in finish_python(child).splitlines())
    )
    from ags_fast.keys import SqlKeyStore

    keys = SqlKeyStore(url)
    assert [number for number, _ in won] == list(range(1, 41))
    assert keys.version == 40
    assert [change.changes["added"] for change in keys.history()] == [[key_id] for _, key_id in won]
    assert len(keys.list()) == 40


def in_a_fork(keys: Any, work: Callable[[], Any]) -> int:
    """The exit status of a child that does the work: 0 if it is done. Another thread has the lock at that moment."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with keys._lock:
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)  # it must not wait for a thread that it does not have
            work()
            status = 0
        finally:
            os._exit(status)
    release.set()
    thread.join()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork(place: Opened, kms: dict[str, str]) -> None:
    keys = place.open()
    put(keys, new_kek(kms, "m", now=1))

    def work() -> None:
        assert keys.refresh() == 1
        put(keys, new_kek(kms, "m", now=2))

    assert in_a_fork(keys, work) == 0
    if place.where is None or str(place.where).startswith(("sqlite", "postgres")):
        assert keys.refresh() == len(keys.list()) == 2  # the child's is seen here


def test_a_fork_connects_for_itself(postgres: Postgres, tmp_path: Path) -> None:
    import sqlalchemy

    from ags_fast.keys import SqlKeyStore

    keys = SqlKeyStore(f"{postgres.url}?dataset={tmp_path.name}")

    def server() -> int:
        """The process that the connection leads to."""
        with keys._engine.begin() as connection:
            return int(connection.scalar(sqlalchemy.text("SELECT pg_backend_pid()")))

    assert keys.version == 0
    mine = server()

    def work() -> None:
        assert server() != mine

    assert in_a_fork(keys, work) == 0
    assert server() == mine


def test_urls_that_are_refused(tmp_path: Path, kms: dict[str, str]) -> None:
    pytest.importorskip("sqlalchemy")
    from ags_fast.keys import SqlKeyStore

    secret = "Pa55word"
    for url in (
        f"postgresql+psycopg://u:{secret}@h/d?dataset=x",
        f"postgresql+psycopg://u@h/d?dataset=x&password={secret}",
        f"postgresql+psycopg://u@h/d?dataset=x&sslpassword={secret}",
    ):
        for refuse in (SqlKeyStore, lambda url: open_key_store(url, kms, store=Shelf())):
            with pytest.raises(PolicyError, match="PGPASSWORD") as caught:
                refuse(url)
            assert secret not in str(caught.value)
    for url, why in (
        ("sqlite://", "MemoryKeyStore"),
        ("sqlite:///:memory:?dataset=x", "MemoryKeyStore"),
        ("sqlite:///file:x?mode=memory&uri=true&dataset=x", "MemoryKeyStore"),
        ("postgres://u@h/d?dataset=x", "knows no"),
        ("no url", "as SQLAlchemy takes it"),
        ("postgresql+psycopg://u@h/d?dataset=x&dataset=y", "names the dataset"),
    ):
        with pytest.raises(ValueError, match=why):
            SqlKeyStore(url)


def test_a_database_that_cannot_be_reached(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    from ags_fast.keys import SqlKeyStore

    with socket.socket() as nobody:  # bound, and not listening
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(KeyAccessError, match="cannot be used now") as caught:
            SqlKeyStore(f"postgresql+psycopg://u@127.0.0.1:{port}/d?dataset=x").list()
        assert caught.value.__cause__ is None
        assert "\n" not in str(caught.value)
    with monkeypatch.context() as wrong:
        wrong.setenv("PGPASSWORD", "Pa55word")
        with pytest.raises(KeyAccessError, match="password authentication failed") as caught:
            SqlKeyStore(f"{postgres.url}?dataset=x").list()
        assert "Pa55word" not in str(caught.value)


def test_a_connection_that_is_cut(postgres: Postgres, tmp_path: Path) -> None:
    """While it was idle: nobody notices. In the middle of a change: KeyAccessError, and nothing was changed."""
    import sqlalchemy

    from ags_fast.keys import SqlKeyStore

    keys = SqlKeyStore(f"{postgres.url}?dataset={tmp_path.name}")
    put(keys, KeyEntry("k", "m"))
    admin = sqlalchemy.create_engine(postgres.url)
    cut = sqlalchemy.text("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    cut = sqlalchemy.text(f"{cut.text} AND backend_type = 'client backend'")
    with admin.begin() as connection:
        assert connection.scalar(cut) >= 1
    assert keys.refresh() == 1
    # Somebody has made version 2, and has not committed: we wait for him, and are cut off.
    with admin.begin() as connection:
        insert = f"INSERT INTO ags_key_versions VALUES ('{tmp_path.name}', 2, 0, 'x', '{{}}', '')"
        connection.execute(sqlalchemy.text(insert))
        failed: list[BaseException] = []

        def change() -> None:
            try:
                put(keys, KeyEntry("later", "m"))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=change)
        thread.start()
        waits = sqlalchemy.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        while connection.scalar(waits) == 0:
            assert thread.is_alive()
        assert connection.scalar(cut) >= 1
        thread.join(30)
        connection.rollback()
    assert [type(error) for error in failed] == [KeyAccessError]
    assert "cannot be used now" in str(failed[0])
    put(SqlKeyStore(f"{postgres.url}?dataset={tmp_path.name}"), KeyEntry("other", "m"))
    assert keys.version == 2  # asked for again: it might have been ours
    assert {entry.key_id for entry in keys.list()} == {"k", "other"}
    assert put(keys, KeyEntry("later", "m")) == 3
    admin.dispose()


def test_a_database_that_is_stuck(postgres: Postgres, tmp_path: Path) -> None:
    """A statement that waits for too long is given up."""
    import sqlalchemy

    from ags_fast.keys import SqlKeyStore

    keys = SqlKeyStore(f"{postgres.url}?dataset={tmp_path.name}&options=-c%20statement_timeout%3D200")
    assert keys.version == 0
    admin = sqlalchemy.create_engine(postgres.url)
    with admin.begin() as connection:
        connection.execute(sqlalchemy.text("LOCK TABLE ags_key_versions"))
        for use in (keys.refresh, lambda: keys.compare_and_swap({}, 0)):
            with pytest.raises(KeyAccessError, match="statement timeout"):
                use()
        connection.rollback()
    assert keys.version == 0
    admin.dispose()
