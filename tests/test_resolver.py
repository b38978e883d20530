"""The key store of a dataset: on a folder, an object store in memory, and a stand-in that misbehaves.

What it has in common with the others, and what it does with many keys, is in test_key_stores.py.
"""

from __future__ import annotations

import json
import pickle
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
from kms_clients import Shelf, keystore
from support import flip

from ags_fast.errors import (
    AgsError,
    ConcurrentChangeError,
    FormatError,
    IntegrityError,
    KeyAccessError,
    PolicyError,
)
from ags_fast.fs import Store
from ags_fast.keys import (
    DatasetKeyStore,
    Envelope,
    KeyEntry,
    MemoryKeyStore,
    clear_cache,
    kms_calls,
    new_kek,
    open_document,
    seal_document,
)
from ags_fast.keys.entry import COLUMNS, newest_active, seals_documents
from ags_fast.keys.kms import local
from ags_fast.keys.stores.parts import INLINE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FIRST = "_ags/keys/00000001.json"


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    clear_cache()
    return keystore(tmp_path, "m", "n")


@pytest.fixture(params=["shelf", "folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "shelf":
        return Shelf()
    if request.param == "folder":
        return Store(tmp_path / "dataset")
    pytest.importorskip("fsspec")
    return Store(f"memory://{tmp_path.name}-keys")


def put(keys: Any, *entries: KeyEntry) -> int:
    return int(keys.compare_and_swap({entry.key_id: entry for entry in entries}, keys.version))


def test_memory_stays_in_its_process() -> None:
    with pytest.raises(TypeError, match="Envelope"):
        pickle.dumps(MemoryKeyStore())
    assert repr(MemoryKeyStore()) == "<MemoryKeyStore version=0 keys=0>"


def test_newest_active() -> None:
    entries = [
        KeyEntry("a", "m", created_ms=1),
        KeyEntry("b", "n", created_ms=3),
        KeyEntry("c", "m", created_ms=2),
        KeyEntry("d", "m", state="retired", created_ms=9),
    ]
    assert newest_active(entries) == entries[1]
    assert newest_active(entries, "m") == entries[2]
    assert newest_active(entries, "x") is None
    assert newest_active([]) is None


def test_which_key_seals_documents(kms: dict[str, str]) -> None:
    """The newest KEK that is for everything. Where there is none, as in single wrap, the newest not for columns."""
    kinds: dict[str, dict[str, Any]] = {
        "document": {},
        "single": {"double_wrap": False},
        "columns": {"properties": COLUMNS},
        "scope": {"properties": {"scope": "day=1"}},
        "newer": {},
    }
    entries = {name: new_kek(kms, "m", now=i, **more) for i, (name, more) in enumerate(kinds.items())}
    assert [name for name, entry in entries.items() if seals_documents(entry)] == ["document", "newer"]
    assert not seals_documents(entries["newer"].replace(state="retired"))
    for there, sealer in (
        (["document", "single", "columns", "scope"], "document"),
        (["newer", "document"], "newer"),
        (["single", "columns"], "single"),
        (["single", "scope", "columns"], "scope"),
    ):
        shelf = Shelf()
        put(DatasetKeyStore(shelf, kms), *(entries[name] for name in there))
        assert json.loads(shelf.objects[FIRST])["auth"]["key_id"] == entries[sealer].key_id
        assert len(DatasetKeyStore(shelf, kms).list()) == len(there)
    with pytest.raises(PolicyError, match="active key"):
        put(DatasetKeyStore(Shelf(), kms), entries["columns"])


# ---------------------------------------------------------------- in a dataset


def test_in_a_dataset(store: Any, kms: dict[str, str]) -> None:
    keys = DatasetKeyStore(store, kms)
    made_up = keys.dataset_id
    assert re.fullmatch(r"[0-9a-f]{32}", made_up)
    assert keys.refresh() == 0
    assert keys.dataset_id == made_up
    entry = new_kek(kms, "m", properties={"note": "ключ"})
    put(keys, entry)
    assert [e.path for e in store.list("_ags/")] == [FIRST]
    for dataset_id in (None, made_up):
        again = DatasetKeyStore(store, kms, dataset_id=dataset_id)
        assert again.get(entry.key_id) == entry
        assert again.dataset_id == made_up
        assert again.version == 1
    with pytest.raises(IntegrityError, match="another dataset's"):
        DatasetKeyStore(store, kms, dataset_id="another").list()
    shipped = pickle.loads(pickle.dumps(again)) if not isinstance(store, Shelf) else again
    assert shipped.get(entry.key_id) == entry
    # A store that has read before sees what others have added when it is asked for it, and so does a conflict.
    second = new_kek(kms, "m")
    put(keys, second)
    assert again.version == 1
    assert again.get(second.key_id) == second
    assert again.version == 2
    with pytest.raises(ConcurrentChangeError):
        again.compare_and_swap({}, 1)
    envelope = again.envelope()
    assert list(envelope.entries) == [entry.key_id, second.key_id]
    assert list(again.envelope([second.key_id]).entries) == [second.key_id]
    with pytest.raises(KeyAccessError, match="absent"):
        again.envelope(["absent"])


def test_a_given_id_is_the_datasets(store: Any, kms: dict[str, str]) -> None:
    keys = DatasetKeyStore(store, kms, dataset_id="my dataset")
    put(keys, new_kek(kms, "m"))
    assert DatasetKeyStore(store, kms).dataset_id == "my dataset"


def test_stores_of_one_dataset_race(store: Any, kms: dict[str, str]) -> None:
    """Of those who have read one version, one writes the next."""
    put(DatasetKeyStore(store, kms), new_kek(kms, "m"))
    racers = [DatasetKeyStore(store, kms) for _ in range(6)]
    for racer in racers:
        assert racer.version == 1
    entries = [new_kek(kms, "m") for _ in racers]
    won: list[int] = []
    barrier = threading.Barrier(len(racers))

    def race(i: int) -> None:
        barrier.wait()
        try:
            racers[i].compare_and_swap({entries[i].key_id: entries[i]}, 1)
            won.append(i)
        except ConcurrentChangeError:
            pass

    threads = [threading.Thread(target=race, args=(i,)) for i in range(len(racers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    fresh = DatasetKeyStore(store, kms)
    assert fresh.version == 2
    assert [entry.key_id for entry in fresh.list()][1:] == [entries[won[0]].key_id]
    assert all(racer.version == 2 for racer in racers)


def test_the_document(kms: dict[str, str]) -> None:
    """The bytes, as the rotation of keys and other readers will find them."""
    shelf = Shelf()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    double, single = new_kek(kms, "m", now=5), new_kek(kms, "n", double_wrap=False, now=4)
    assert keys.compare_and_swap({double.key_id: double, single.key_id: single}, 0, operation="create") == 1
    outer = json.loads(shelf.objects[FIRST])
    body = outer["body"]
    assert outer["auth"]["key_id"] == double.key_id  # the active one that was made last
    assert list(outer) == ["ags", "dataset_id", "auth", "sealer", "body"]
    assert outer["dataset_id"] == "d"
    assert outer["sealer"] == double.to_json()
    assert list(body)[:8] == ["format", "dataset_id", "version", "time_ms", "parent", "operation", "keys", "history"]
    assert {name: body[name] for name in list(body)[8:]} == {"ancestors": [], "chain": []}
    assert (body["format"], body["dataset_id"], body["version"], body["parent"]) == ("ags-keys", "d", 1, 0)
    assert body["operation"] == "create"
    assert body["keys"] == [double.to_json(), single.to_json()]
    added = [double.key_id, single.key_id]
    assert body["history"] == [{"version": 1, "time_ms": body["time_ms"], "added": added, "changed": [], "removed": []}]
    envelope = Envelope(kms, {double.key_id: double})
    assert open_document(shelf.objects[FIRST], "d", FIRST, envelope) == body


def test_calls_of_the_kms(kms: dict[str, str]) -> None:
    shelf = Shelf()
    before = kms_calls()
    keys = DatasetKeyStore(shelf, kms)
    entry = new_kek(kms, "m")
    put(keys, entry)
    put(keys, entry.replace(uses=1))
    assert dict(kms_calls() - before) == {("local", "wrap"): 1}
    clear_cache()
    before = kms_calls()
    for _ in range(5):
        reader = DatasetKeyStore(shelf, kms)
        reader.envelope().prepare(entry.key_id)
    assert dict(kms_calls() - before) == {("local", "unwrap"): 1}
    shelf.requests.clear()
    assert reader.list() == reader.list()
    assert reader.get(entry.key_id).key_id == entry.key_id
    assert reader.version == 2
    assert shelf.requests == []  # what was read is kept
    put(keys, new_kek(kms, "m"))
    assert shelf.requests == ["list", "create"]


def test_an_active_key_must_be_left(kms: dict[str, str]) -> None:
    shelf = Shelf()
    keys = DatasetKeyStore(shelf, kms)
    with pytest.raises(PolicyError, match="active key"):
        keys.compare_and_swap({}, 0)
    entry = new_kek(kms, "m")
    put(keys, entry)
    for change in ({entry.key_id: None}, {entry.key_id: entry.replace(state="retired")}):
        with pytest.raises(PolicyError, match="active key"):
            keys.compare_and_swap(change, 1)
    assert list(shelf.objects) == [FIRST]
    assert keys.list() == [entry]
    other = new_kek(kms, "n")
    keys.compare_and_swap({entry.key_id: entry.replace(state="retired"), other.key_id: other}, 1)
    clear_cache()
    local.set_state(kms, "m", "destroyed")  # the old master key is not needed to read the keys
    assert len(DatasetKeyStore(shelf, kms).list()) == 2
    local.set_state(kms, "n", "disabled")
    clear_cache()
    with pytest.raises(KeyAccessError, match="disabled"):
        DatasetKeyStore(shelf, kms).list()


def test_unknown_fields_survive(kms: dict[str, str]) -> None:
    """What a newer version of ags_fast has written there, an older one does not lose."""
    shelf = Shelf()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    entry = new_kek(kms, "m")
    put(keys, entry)
    body = open_document(shelf.objects[FIRST], "d", FIRST, keys.envelope())
    body["retention"] = {"days": [7]}
    body["keys"][0]["scope"] = {"partition": "day=1"}
    shelf.objects[FIRST] = seal_document(keys.envelope(), entry.key_id, "d", FIRST, body)
    older = DatasetKeyStore(shelf, kms)
    put(older, new_kek(kms, "m"))
    put(older, older.get(entry.key_id).replace(uses=3))
    last = open_document(shelf.objects["_ags/keys/00000003.json"], "d", "_ags/keys/00000003.json", older.envelope())
    assert last["retention"] == {"days": [7]}
    assert last["version"] == 3
    assert last["keys"][0]["scope"] == {"partition": "day=1"}
    assert last["keys"][0]["uses"] == 3


def test_large_entries_and_many(kms: dict[str, str]) -> None:
    shelf = Shelf()
    keys = DatasetKeyStore(shelf, kms)
    entry = new_kek(kms, "m", properties={"note": "n" * 50_000})
    huge = KeyEntry("huge", "m", bytes(range(256)) * 200, "retired")
    many = [KeyEntry(f"key {i}", "m", bytes(65), "retired", i + 1) for i in range(INLINE - 2)]
    put(keys, entry, huge, *many)
    assert DatasetKeyStore(shelf, kms).list() == [huge, *many, entry]
    assert list(shelf.objects) == [FIRST]


def test_history_is_bounded(kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ags_fast.keys.stores.parts.HISTORY", 3)
    keys = DatasetKeyStore(Shelf(), kms)
    entry = new_kek(kms, "m")
    for uses in range(5):
        put(keys, entry.replace(uses=uses))
    assert [change.version for change in keys.history()] == [3, 4, 5]


def test_old_versions_may_be_removed(kms: dict[str, str]) -> None:
    shelf = Shelf()
    keys, stale = DatasetKeyStore(shelf, kms), DatasetKeyStore(shelf, kms)
    entry = new_kek(kms, "m")
    put(keys, entry)
    assert stale.version == 1
    for uses in range(4):
        put(keys, entry.replace(uses=uses))
    for number in range(1, 5):
        del shelf.objects[f"_ags/keys/{number:08}.json"]
    assert DatasetKeyStore(shelf, kms).version == 5
    assert len(keys.history()) == 5
    with pytest.raises(ConcurrentChangeError):  # though number 2 is free
        stale.compare_and_swap({entry.key_id: entry}, 1)
    assert list(shelf.objects) == ["_ags/keys/00000005.json"]
    assert stale.version == 5


def test_a_version_that_goes_while_it_is_read(kms: dict[str, str]) -> None:
    shelf = Shelf()
    keys = DatasetKeyStore(shelf, kms)
    entry = new_kek(kms, "m")
    put(keys, entry)
    put(keys, entry.replace(uses=1))
    listed = shelf.list
    first = iter([[type("Gone", (), {"path": FIRST})()]])
    shelf.objects["_ags/keys/00000003.tmp"] = shelf.objects["_ags/keys/x.json"] = b""  # nobody's
    del shelf.objects[FIRST]
    shelf.list = lambda prefix="": iter(next(first, None) or listed(prefix))  # type: ignore[method-assign]
    assert DatasetKeyStore(shelf, kms).version == 2
    shelf.list = lambda prefix="": iter([type("Gone", (), {"path": FIRST})()])  # type: ignore[method-assign]
    with pytest.raises(ConcurrentChangeError, match="faster than they can be read"):
        DatasetKeyStore(shelf, kms).list()


def test_min_version(kms: dict[str, str]) -> None:
    shelf = Shelf()
    keys = DatasetKeyStore(shelf, kms)
    entry = new_kek(kms, "m")
    put(keys, entry)
    put(keys, entry.replace(uses=1))
    assert DatasetKeyStore(shelf, kms, min_version=2).version == 2
    del shelf.objects["_ags/keys/00000002.json"]  # somebody goes back: without a pin nobody can tell
    assert DatasetKeyStore(shelf, kms).version == 1
    with pytest.raises(IntegrityError, match="below 2"):
        DatasetKeyStore(shelf, kms, min_version=2).list()
    with pytest.raises(IntegrityError, match="below 1"):
        DatasetKeyStore(Shelf(), kms, min_version=1).list()


# ---------------------------------------------------------------- tampering


def refused(shelf: Shelf, kms: dict[str, str], data: bytes, number: int = 1) -> AgsError:
    shelf.objects = {f"_ags/keys/{number:08}.json": data}
    with pytest.raises(AgsError) as caught:
        DatasetKeyStore(shelf, kms, dataset_id="d").list()
    assert isinstance(caught.value, (FormatError, IntegrityError, KeyAccessError))
    return caught.value


@pytest.mark.parametrize("double_wrap", [True, False])
def test_every_bit(kms: dict[str, str], double_wrap: bool) -> None:
    shelf = Shelf()
    put(DatasetKeyStore(shelf, kms, dataset_id="d"), new_kek(kms, "m", double_wrap=double_wrap))
    good = shelf.objects[FIRST]
    for bit in range(8 * len(good)):
        refused(shelf, kms, flip(good, bit))
    for size in range(0, len(good), 7):
        refused(shelf, kms, good[:size])
    shelf.objects = {FIRST: good}
    assert len(DatasetKeyStore(shelf, kms, dataset_id="d").list()) == 1


def test_versions_put_elsewhere(kms: dict[str, str]) -> None:
    shelf, other = Shelf(), Shelf()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    entry = new_kek(kms, "m")
    put(keys, entry)
    put(keys, entry.replace(uses=1))
    put(DatasetKeyStore(other, kms, dataset_id="other"), entry)
    good = shelf.objects[FIRST]
    assert "moved here" in str(refused(shelf, kms, good, number=9))  # an older one as the newest
    assert "another dataset's" in str(refused(shelf, kms, other.objects[FIRST]))


def test_bodies_that_are_authentic_and_impossible(kms: dict[str, str]) -> None:
    shelf = Shelf()
    keys = DatasetKeyStore(shelf, kms, dataset_id="d")
    entry = new_kek(kms, "m")
    put(keys, entry)
    body = open_document(shelf.objects[FIRST], "d", FIRST, keys.envelope())
    envelope = keys.envelope()

    def sealed(change: Callable[[dict[str, Any]], Any]) -> bytes:
        changed = json.loads(json.dumps(body))
        change(changed)
        return seal_document(envelope, entry.key_id, "d", FIRST, changed)

    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda b: b.update(format="ags-version"),
        lambda b: b.update(version=2),
        lambda b: b.pop("version"),
        lambda b: b.update(keys=[]),
        lambda b: b.update(keys={}),
        lambda b: b.pop("keys"),
        lambda b: b["keys"].append(b["keys"][0]),
        lambda b: b["keys"][0].update(state="other"),
        lambda b: b["keys"].append(5),
        lambda b: b.pop("history"),
        lambda b: b.update(history=[5]),
    ]
    for change in changes:
        refused(shelf, kms, sealed(change))


def test_keys_of_somebody_else(kms: dict[str, str], tmp_path: Path) -> None:
    """Who cannot use the KMS cannot write a version, though everybody can write the place where it is."""
    theirs = keystore(tmp_path, "m", name="theirs")
    shelf = Shelf()
    put(DatasetKeyStore(shelf, theirs, dataset_id="d"), new_kek(theirs, "m"))
    refused(shelf, kms, shelf.objects[FIRST])
    # A KEK of ours, seen in another dataset, with a body of theirs.
    mine, forged = new_kek(kms, "m"), new_kek(theirs, "m")
    assert forged.wrapped is not None
    envelope = Envelope(theirs, {forged.key_id: forged})
    body = {"format": "ags-keys", "dataset_id": "d", "version": 1, "history": []}
    body["keys"] = [mine.replace(key_id=forged.key_id).to_json()]
    refused(shelf, kms, seal_document(envelope, forged.key_id, "d", FIRST, body))
