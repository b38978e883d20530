"""Key stores stay small: what commits reserve and write, and what upkeep removes and leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import programs.jobs
import pytest
from kms_clients import Shelf, keystore
from support import program, run_python
from test_key_stores import Meter

from ags_fast.dataset.keks import Uses, Want
from ags_fast.dataset.keyring import Keyring
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.policy import Policy
from ags_fast.fs import Store
from ags_fast.fs.numbered import TOMBSTONE
from ags_fast.keys import DatasetKeyStore, KeyEntry, clear_cache, kms_calls, load_kms, new_kek, uses
from ags_fast.keys.kek import rewrap_kek
from ags_fast.keys.kms import local
from ags_fast.keys.stores.upkeep import SPARED

if TYPE_CHECKING:
    from pathlib import Path

MANY = 64  # versions


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    clear_cache()
    uses._held.clear()
    return keystore(tmp_path, "m", "n")


def documents(shelf: Shelf) -> list[int]:
    """The numbers of the documents that are there."""
    return [
        int(path[-13:-5])
        for path, data in sorted(shelf.objects.items())
        if path.startswith("_ags/keys/0") and data != TOMBSTONE
    ]


def count_to(keys: DatasetKeyStore, entry: KeyEntry, version: int) -> None:
    """Make versions that only count uses."""
    for number in range(keys.version + 1, version + 1):
        entry = entry.replace(uses=number)
        keys.compare_and_swap({entry.key_id: entry}, number - 1)


def test_old_documents_go(kms: dict[str, str]) -> None:
    shelf = Shelf()
    keys = DatasetKeyStore(shelf, kms)
    entry = new_kek(kms, "m")
    count_to(keys, entry, MANY - 1)
    before = kms_calls()
    count_to(keys, entry, MANY)
    assert kms_calls() == before
    assert documents(shelf) == [*range(MANY - SPARED, MANY + 1)]
    assert shelf.objects["_ags/keys/00000001.json"] == TOMBSTONE
    assert [keys.digest(number) is not None for number in (1, MANY)] == [True, True]
    assert len(keys.history()) == MANY
    keys.check_history()
    earlier = keys.earlier(MANY - SPARED)  # the way back stays
    assert keys.restore(earlier) == MANY + 1
    with pytest.raises(FileNotFoundError, match="was removed"):
        keys.earlier(MANY - SPARED - 1)


def test_upkeep_is_spread(kms: dict[str, str]) -> None:
    """No version asks the storage for much more than the others, also when many documents are to go."""
    shelf = Shelf()
    keys = DatasetKeyStore(shelf, kms)
    entry, other = new_kek(kms, "m"), new_kek(kms, "m", now=1, properties={"scope": "x"})
    keys.compare_and_swap({entry.key_id: entry, other.key_id: other}, 0)
    keys.compare_and_swap({other.key_id: None}, 1)  # the first document holds a KEK that no later one has
    most = 0
    for number in range(3, 3 * MANY):
        if number == 2 * MANY:
            shelf.objects["_ags/keys/00000001.json"] = TOMBSTONE  # now all others may go
        shelf.requests.clear()
        count_to(keys, entry, number)
        most = max(most, len([what for what in shelf.requests if what != "list"]))
    assert documents(shelf)[0] > MANY
    assert most < 30


def test_a_restored_version_names_nothing_old(kms: dict[str, str]) -> None:
    """What a version no longer names is removed: so no later version may name it."""
    shelf = Shelf()
    keys = DatasetKeyStore(shelf, kms)
    entry = new_kek(kms, "m")
    many = {f"key {i}": KeyEntry(f"key {i}", "m", bytes([i % 256]) * 60, "retired", i) for i in range(700)}
    keys.compare_and_swap({entry.key_id: entry, **many}, 0)
    old = keys.objects(1)
    count_to(keys, entry, 3)
    keys.restore(keys.earlier(1))
    assert keys.objects(4).isdisjoint(old)
    assert len(keys.history()) == 2
    count_to(keys, entry, MANY)
    assert DatasetKeyStore(shelf, kms).list() == keys.list()
    assert len(keys.list()) == 701


@pytest.mark.more
def test_its_size_ends(kms: dict[str, str]) -> None:
    """Neither the document nor what is stored grows with the number of versions, but for tombstones of a day."""
    shelf = Shelf()
    keys = DatasetKeyStore(shelf, kms)
    entry = new_kek(kms, "m")
    sizes = []
    for number in (20 * MANY, 40 * MANY):
        while keys.version < number:
            count_to(keys, entry, keys.version + MANY)
            for path in [path for path, data in shelf.objects.items() if data == TOMBSTONE]:
                del shelf.objects[path]  # a day later
        sizes.append(sum(len(data) for data in shelf.objects.values() if data != TOMBSTONE))
        newest = len(shelf.objects[f"_ags/keys/{number:08}.json"])
        assert newest < 20_000
    assert sizes[1] < 1.2 * sizes[0]
    assert len(keys.history()) == 1000
    assert keys.digest(40 * MANY - 1032) is not None


@pytest.mark.parametrize("what", ["removed", "rewrapped"])
def test_what_only_old_documents_hold_stays(kms: dict[str, str], what: str) -> None:
    """A KEK that is gone may be an open job's; an older wrap is the way back until an expiry has tried the new one."""
    shelf, client = Shelf(), load_kms(kms)
    keys = DatasetKeyStore(shelf, kms)
    entry, other = new_kek(kms, "m"), new_kek(kms, "m", now=1, properties={"scope": "x"})
    keys.compare_and_swap({entry.key_id: entry, other.key_id: other}, 0)
    if what == "removed":
        keys.compare_and_swap({other.key_id: None}, 1)
    else:
        local.rotate_key(kms, "m")
        keys.compare_and_swap({other.key_id: rewrap_kek(client, other)}, 1)
    count_to(keys, entry, 2 * MANY)
    assert documents(shelf) == [*range(1, 2 * MANY + 1)]
    assert keys.prune() != []  # as an expiry does
    assert documents(shelf) == [2 * MANY]
    count_to(keys, entry, 3 * MANY)
    assert documents(shelf) == [*range(3 * MANY - SPARED, 3 * MANY + 1)]


def test_an_exchanged_document_stays(kms: dict[str, str]) -> None:
    """It is evidence: `check_history` shows it."""
    shelf = Shelf()
    keys = DatasetKeyStore(shelf, kms)
    entry = new_kek(kms, "m")
    count_to(keys, entry, 20)
    shelf.objects["_ags/keys/00000015.json"] = shelf.objects["_ags/keys/00000016.json"]
    count_to(keys, entry, MANY)
    assert documents(shelf) == [*range(14, MANY + 1)]


def test_buckets_of_old_documents_go(kms: dict[str, str]) -> None:
    shelf = Shelf()
    keys = DatasetKeyStore(shelf, kms)
    entry = new_kek(kms, "m")
    many = {f"key {i}": KeyEntry(f"key {i}", "m", bytes([i % 256]) * 60, "retired", i) for i in range(700)}
    keys.compare_and_swap({entry.key_id: entry, **many}, 0)
    count_to(keys, entry, MANY)
    named = keys.objects(MANY).union(*(keys.objects(n) for n in range(MANY - SPARED, MANY)))
    assert {path for path, data in shelf.objects.items() if data != TOMBSTONE} == named
    assert DatasetKeyStore(shelf, kms).list() == keys.list()


def make(tmp_path: Path, kms: dict[str, str]) -> Ledger:
    return Ledger.open_or_create(Store(tmp_path / "dataset"), load_kms(kms), "m")


def reserve(ledger: Ledger, policy: Policy | None = None) -> KeyEntry:
    want = Want("m")
    return ledger.keyring.reserve({want: Uses(1, 64)}, policy)[want]


@pytest.mark.parametrize("scope", ["dataset", "files:1"])
def test_what_a_reservation_reads_and_writes(kms: dict[str, str], scope: str) -> None:
    """A job adds its KEK to the keys that are there, and asks for few of them, however many there are."""
    shelf, costs = Meter(), {}
    keys = DatasetKeyStore(shelf, kms)
    main = new_kek(kms, "m")
    keys.compare_and_swap({main.key_id: main}, 0)
    for there in (100, 1000, 10_000):
        keys.refresh()
        more = {
            f"{there} {i}": KeyEntry(f"{there} {i}", "m", b"w" * 60, "active", i, 0, {"scope": f"{there} {i}"})
            for i in range(there - len(keys.list()))
        }
        keys.compare_and_swap(more, keys.version)
        ring = Keyring(DatasetKeyStore(shelf, kms), load_kms(kms), "it")
        shelf.reset()
        own, scoped = Want("m"), Want("m", scope=f"files:{there}/0")
        wants = {own: Uses(0, 64)} | ({} if scope == "dataset" else {scoped: Uses(1, 1)})
        chosen = ring.reserve(wants, Policy(kek_scope=scope), new_scopes=True)
        assert chosen[own].key_id == main.key_id
        assert {chosen[want].properties.get("scope") for want in wants} == {want.scope for want in wants}
        costs[there] = len(shelf.requests), shelf.read_nbytes + shelf.written_nbytes
    assert costs[10_000][0] <= costs[100][0] + 2
    assert costs[1000][1] < 3 * costs[100][1]
    assert costs[10_000][1] < 12 * costs[100][1], costs


def test_few_reservations_write_keys(tmp_path: Path, kms: dict[str, str]) -> None:
    """A process that commits often reserves ahead, and never uses more than it has reserved."""
    ledger = make(tmp_path, kms)
    for number in range(1, 2001):
        reserve(ledger)
        if number in (uses.OFTEN, 2000):
            assert ledger.keys.list()[0].uses >= 65 * number
        if number == uses.OFTEN:
            assert ledger.keys.version == 1 + uses.OFTEN
            assert ledger.keys.list()[0].uses == 65 * number
    assert ledger.keys.version < 1 + uses.OFTEN + 25
    assert ledger.keys.list()[0].uses <= 65 * 2000 + uses.MOST + 65


def test_what_is_reserved_is_one_history_s(tmp_path: Path, kms: dict[str, str]) -> None:
    """Keys that were put back do not count what was reserved in those that are gone."""
    ledger = make(tmp_path, kms)
    folder = tmp_path / "dataset/_ags/keys"
    for _ in range(uses.OFTEN + 2):
        reserve(ledger)
    kept = {path: path.read_bytes() for path in folder.glob("*.json")}
    reserve(ledger)
    assert uses.has_reserved(ledger.id)
    for path in {*folder.glob("*.json")} - kept.keys():
        path.unlink()
    older = Ledger.open(Store(tmp_path / "dataset"), load_kms(kms))
    before = older.keys.list()[0].uses
    assert reserve(older).uses >= before + 65


def test_a_retired_key_is_not_taken(tmp_path: Path, kms: dict[str, str]) -> None:
    ledger = make(tmp_path, kms)
    for _ in range(uses.OFTEN + 1):
        first = reserve(ledger)
    assert uses.has_reserved(ledger.id)
    other = Ledger.open(Store(tmp_path / "dataset"), load_kms(kms))
    new = new_kek(kms, "m")
    held = other.keys.get(first.key_id)
    other.keys.compare_and_swap({held.key_id: held.replace(state="retired"), new.key_id: new}, other.keys.version)
    assert reserve(ledger).key_id == new.key_id


def test_small_limits_are_exact(tmp_path: Path, kms: dict[str, str]) -> None:
    ledger = make(tmp_path, kms)
    policy = Policy(kek_uses=100_000)
    for number in range(1, 2 * uses.OFTEN):
        assert reserve(ledger, policy).uses == 65 * number


def test_a_fork_has_reserved_nothing(tmp_path: Path) -> None:
    out = run_python(program(programs.jobs.reserve_and_fork, tmp_path))
    assert out.split() == ["False", "True"]
