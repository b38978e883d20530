"""What a dataset lays down: which files share a KEK, for how long and how often it serves, and who carries that on."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, QUIET, add_tree, decrypted, leftovers, make_kms, read_tree, write_tree
from support import pattern

from ags_fast import Dataset, KeyAccessError, PolicyError
from ags_fast.dataset.access import Access
from ags_fast.dataset.keys import writer_name
from ags_fast.jobs import Policy, encrypt_files, expire, rekey_files, rotate, set_policy, verify_files
from ags_fast.keys import clear_cache, kms_calls

if TYPE_CHECKING:
    from pathlib import Path

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.snapshot import Snapshot
    from ags_fast.keys.entry import KeyEntry

pytest.importorskip("pyarrow")

TREE = {"top": b"top", **{f"day={n % 3}/{n}": pattern(200 * n, n) for n in range(7)}}
SLACK = 64  # uses of the dataset's own KEK that a job counts for its documents


def opened(dataset: Path, kms: Any) -> Snapshot:
    return Access.of(dataset, kms).open()


def keys(dataset: Path, kms: Any, state: str | None = None) -> dict[str, KeyEntry]:
    return {key_id: key for key_id, key in head(dataset, kms).keys.items() if state in (None, key.state)}


def head(dataset: Path, kms: Any) -> Entry:
    return opened(dataset, kms).entry


def entries(dataset: Path, kms: Any) -> dict[str, FileEntry]:
    return {row.path: row for row in opened(dataset, kms).files()}


def scopes(dataset: Path, kms: Any) -> dict[str, set[str]]:
    """The files that share a KEK, by its scope."""
    known = keys(dataset, kms)
    found: dict[str, set[str]] = {}
    for path, entry in entries(dataset, kms).items():
        found.setdefault(known[entry.key_id].properties.get("scope", ""), set()).add(path)
    return found


def sealers(dataset: Path) -> set[str]:
    """The keys that documents are sealed with, as they say."""
    documents = [data for path, data in read_tree(dataset).items() if path.startswith("_ags/log/")]
    return {json.loads(data.splitlines()[0])["sealer"]["key_id"] for data in documents}


def calls(work: Any) -> Counter[str]:
    before = kms_calls()
    work()
    return Counter({operation: count for (_, operation), count in (kms_calls() - before).items()})


# ---------------------------------------------------------------------------------------------- scopes


def test_scope_of_the_dataset(kms: dict[str, str], dataset: Path) -> None:
    add_tree(dataset, kms, TREE)
    add_tree(dataset, kms, {"more": b""})
    assert scopes(dataset, kms) == {"": {*TREE, "more"}}
    assert len(keys(dataset, kms)) == 1


def test_scope_of_a_partition(kms: dict[str, str], dataset: Path) -> None:
    policy = Policy(kek_scope="partition")
    assert calls(lambda: add_tree(dataset, kms, TREE, policy=policy)) == Counter(wrap=5, unwrap=5)
    by_folder: dict[str, set[str]] = {}
    for path in TREE:
        by_folder.setdefault(f"partition:{path.rpartition('/')[0]}", set()).add(path)
    assert scopes(dataset, kms) == by_folder
    # Jobs to come use what is there; a new folder has a new one.
    more = {"day=1/new": b"", "day=9/new": b""}
    assert calls(lambda: add_tree(dataset, kms, more)) == Counter(wrap=1, unwrap=1)
    by_folder["partition:day=1"].add("day=1/new")
    assert scopes(dataset, kms) == by_folder | {"partition:day=9": {"day=9/new"}}


def test_scope_of_a_day(kms: dict[str, str], dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day = [datetime(2026, 11, n, 23, 59, tzinfo=UTC).timestamp() * 1000 for n in (1, 2)]
    monkeypatch.setattr("ags_fast.jobs.encryption.clock_ms", lambda: day[0])
    add_tree(dataset, kms, TREE, policy=Policy(kek_scope="day"))
    add_tree(dataset, kms, {"same": b""})
    del day[0]
    add_tree(dataset, kms, {"next": b""})
    assert scopes(dataset, kms) == {"day:2026-11-01": {*TREE, "same"}, "day:2026-11-02": {"next"}}


def test_the_day_of_a_transaction(kms: dict[str, str], dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that on which the transaction has begun."""
    Dataset.create(dataset, kms=kms, wrapping_key_id=MASTER, policy=Policy(kek_scope="day"))
    now = datetime(2026, 11, 1, 23, 59, tzinfo=UTC).timestamp() * 1000
    monkeypatch.setattr("ags_fast.dataset.job_keys.clock_ms", lambda: int(now))
    with Dataset.open(dataset, kms=kms).transaction() as new:
        for path in ("before", "after"):
            with new.create(path) as file:
                file.write(b"x")
            now += 120_000
    assert scopes(dataset, kms) == {"day:2026-11-01": {"before", "after"}}


def test_scope_of_a_writer(kms: dict[str, str], dataset: Path) -> None:
    """A writer is a process, which uses a KEK for all its jobs."""
    add_tree(dataset, kms, TREE, policy=Policy(kek_scope="writer"))
    add_tree(dataset, kms, {"more": b""})
    first = f"writer:{writer_name()}"
    assert scopes(dataset, kms) == {first: {*TREE, "more"}}
    writer_name.cache_clear()  # as a fork does
    add_tree(dataset, kms, {"yet more": b""})
    assert scopes(dataset, kms) == {first: {*TREE, "more"}, f"writer:{writer_name()}": {"yet more"}}


def test_scope_of_so_many_files(kms: dict[str, str], dataset: Path) -> None:
    result = add_tree(dataset, kms, TREE, policy=Policy(kek_scope="files:3"))
    found = scopes(dataset, kms)
    assert {scope: len(paths) for scope, paths in found.items()} == {
        f"files:{result.job_id}/0": 3,
        f"files:{result.job_id}/1": 3,
        f"files:{result.job_id}/2": 2,
    }


@pytest.mark.parametrize("scope", ["partition", "day", "writer", "files:2"])
def test_documents_have_the_datasets_own(kms: dict[str, str], dataset: Path, scope: str) -> None:
    """One key opens what says which files there are; those of scopes open nothing but files."""
    add_tree(dataset, kms, TREE, policy=Policy(kek_scope=scope))
    (own,) = (key_id for key_id, entry in keys(dataset, kms).items() if "scope" not in entry.properties)
    assert sealers(dataset) == {own}
    assert {ref.key_id for ref in head(dataset, kms).files} == {own}
    assert own not in {entry.key_id for entry in entries(dataset, kms).values()}
    add_tree(dataset, kms, {"more": b""})
    rekey_files(dataset, kms=kms, **QUIET).raise_for_failures()
    assert sealers(dataset) == {own}
    assert all(entry.uses < SLACK for key, entry in keys(dataset, kms).items() if key != own)
    clear_cache()
    assert calls(lambda: opened(dataset, kms)) == Counter(unwrap=1)
    assert decrypted(dataset, kms) == TREE | {"more": b""}


def test_in_single_wrap_there_are_none_to_share(kms: dict[str, str], dataset: Path) -> None:
    add_tree(dataset, kms, TREE, policy=Policy(kek_scope="partition"), double_wrap=False)
    assert scopes(dataset, kms) == {"": {*TREE}}
    assert sorted((e.double_wrap, dict(e.properties).get("scope")) for e in keys(dataset, kms).values()) == [
        (False, None),
        (True, None),
    ]
    (own,) = (key_id for key_id, entry in keys(dataset, kms).items() if entry.double_wrap)
    assert sealers(dataset) == {own}
    assert keys(dataset, kms)[own].uses == SLACK


def test_columns_in_scopes(kms: dict[str, str], dataset: Path, tmp_path: Path) -> None:
    """Each column's master key has a KEK for each scope, which opens nothing else."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    src = tmp_path / "tables"
    for n in range(4):
        (src / f"p={n % 2}").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": [n], "pay": [n * 10.0]}), src / f"p={n % 2}/{n}.parquet")
    encrypt_files(
        src,
        dataset,
        kms=kms,
        wrapping_key_id=MASTER,
        format="parquet",
        column_keys={"pay": "hr"},
        policy=Policy(kek_scope="partition"),
        **QUIET,
    ).raise_for_failures()
    assert sorted((e.wrapping_key_id, e.properties.get("scope", "")) for e in keys(dataset, kms).values()) == [
        ("hr", "partition:p=0"),
        ("hr", "partition:p=1"),
        (MASTER, ""),
        (MASTER, "partition:p=0"),
        (MASTER, "partition:p=1"),
    ]
    known = keys(dataset, kms)
    for path, entry in entries(dataset, kms).items():
        assert {known[key_id].properties["scope"] for key_id in entry.key_ids()} == {f"partition:{path[:3]}"}
    assert calls(lambda: rotate(dataset, kms=kms)) == Counter(wrap=5, unwrap=5)
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    assert sorted(e.properties.get("scope", "") for e in keys(dataset, kms).values()) == [
        "",
        "partition:p=0",
        "partition:p=0",
        "partition:p=1",
        "partition:p=1",
    ]
    verify_files(dataset, kms=kms, **QUIET).raise_for_failures()


# ---------------------------------------------------------------------------------------------- lifetime and uses


def test_lifetime(kms: dict[str, str], dataset: Path) -> None:
    """A KEK that is too old wraps nothing more; what it has wrapped is read as ever."""
    add_tree(dataset, kms, TREE, policy=Policy(kek_scope="partition", kek_lifetime_days=730))
    first = keys(dataset, kms)
    add_tree(dataset, kms, {"day=1/a": b"a"})
    assert keys(dataset, kms).keys() == first.keys()
    set_policy(dataset, Policy(kek_scope="partition", kek_lifetime_days=0), kms=kms)
    add_tree(dataset, kms, {"day=1/b": b"b"})
    active, retired = keys(dataset, kms, "active"), keys(dataset, kms, "retired")
    assert {entry.properties.get("scope") for entry in retired.values()} == {None, "partition:day=1"}
    assert retired.keys() < first.keys()
    assert len(active) == len(first)
    for entry in retired.values():
        successor = active[entry.properties["successor"]]
        assert successor.properties.get("scope") == entry.properties.get("scope")
        assert int(entry.properties["retires-ms"]) > successor.created_ms
    assert entries(dataset, kms)["day=1/b"].key_id in active
    assert entries(dataset, kms)["day=1/a"].key_id in retired
    clear_cache()
    assert decrypted(dataset, kms) == TREE | {"day=1/a": b"a", "day=1/b": b"b"}
    # A rotation leaves no file to them.
    rotate(dataset, kms=kms).raise_for_failures()
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    assert {entry.state for entry in keys(dataset, kms).values()} == {"active"}
    assert len(decrypted(dataset, kms)) == len(TREE) + 2
    assert leftovers(dataset, kms) == []


def test_uses(kms: dict[str, str], dataset: Path) -> None:
    """Counted ahead, for all processes: before more data keys than allowed, a new KEK is made."""
    policy = Policy(kek_uses=len(TREE))
    add_tree(dataset, kms, TREE, policy=policy)
    (first,) = keys(dataset, kms)
    add_tree(dataset, kms, {"more": b""})
    assert keys(dataset, kms, "retired").keys() == {first}
    (second,) = keys(dataset, kms, "active")
    assert {entry.key_id for entry in entries(dataset, kms).values()} == {first, second}
    assert all(entry.uses <= policy.kek_uses for entry in keys(dataset, kms).values())
    before = read_tree(dataset)
    with pytest.raises(PolicyError, match=r"would wrap 9 data keys.*allows 8.*kek_scope"):
        add_tree(dataset, kms, {f"many/{n}": b"" for n in range(len(TREE) + 1)})
    assert {path for path in read_tree(dataset) if path not in before} == set()
    assert decrypted(dataset, kms) == TREE | {"more": b""}


def test_uses_of_a_scope(kms: dict[str, str], dataset: Path) -> None:
    """Each has its own count."""
    tree = {f"p={n % 4}/{n}": b"%d" % n for n in range(80)}
    add_tree(dataset, kms, tree, policy=Policy(kek_scope="partition", kek_uses=30))
    known = keys(dataset, kms)
    assert len(known) == 5
    assert all(entry.uses <= 30 for entry in known.values())
    more = {f"p={n % 4}/more {n}": b"%d" % n for n in range(80)}
    add_tree(dataset, kms, more)
    assert all(entry.uses <= 30 for entry in keys(dataset, kms).values())
    assert {entry.state for entry in keys(dataset, kms).values()} == {"active"}  # each has uses left
    assert len(keys(dataset, kms)) == 9
    rest = {f"p={n % 4}/rest {n}": b"%d" % n for n in range(80)}
    for at in (0, 40):
        add_tree(dataset, kms, dict([*rest.items()][at : at + 40]))
    assert len(keys(dataset, kms)) == 9
    assert all(entry.uses == 30 for entry in keys(dataset, kms).values() if "scope" in entry.properties)
    add_tree(dataset, kms, {"p=0/one": b""})
    assert len(keys(dataset, kms, "retired")) == 2
    assert decrypted(dataset, kms) == tree | more | rest | {"p=0/one": b""}


def test_few_uses(kms: dict[str, str], dataset: Path) -> None:
    """A policy counts data keys, however few: what jobs keep spare for documents is not part of a small limit."""
    add_tree(dataset, kms, {"0": b""}, policy=Policy(kek_uses=10))
    (first,) = keys(dataset, kms)
    add_tree(dataset, kms, {f"{n}": b"" for n in range(1, 10)})
    assert keys(dataset, kms).keys() == {first}
    add_tree(dataset, kms, {"one more": b""})
    assert keys(dataset, kms, "retired").keys() == {first}
    uses = Counter(entry.key_id for entry in entries(dataset, kms).values())
    assert sorted(uses.values()) == [1, 10]
    add_tree(dataset, kms, {"only one": b""}, policy=Policy(kek_uses=1))
    rotate(dataset, kms=kms).raise_for_failures()  # many files need one successor
    assert len(decrypted(dataset, kms)) == 12


# ---------------------------------------------------------------------------------------------- carried on


def test_it_is_carried_on(kms: dict[str, str], dataset: Path) -> None:
    """By whatever makes a version."""
    policy = Policy(kek_scope="files:100", kek_lifetime_days=30, kek_uses=1 << 20, keep=100, keep_days=0.5)
    add_tree(dataset, kms, TREE, policy=policy)
    assert head(dataset, kms).policy == policy
    add_tree(dataset, kms, {"more": b""})
    assert head(dataset, kms).policy == policy
    write_tree(dataset.parent / "src 1", {"more": b"other"})
    encrypt_files(
        dataset.parent / "src 1", dataset, kms=kms, wrapping_key_id=MASTER, overwrite=True, **QUIET
    ).raise_for_failures()
    rekey_files(dataset, kms=kms, **QUIET).raise_for_failures()
    for what in ("kek", "mek", "double-wrap"):
        rotate(dataset, kms=kms, what=what).raise_for_failures()
    with pytest.raises(PolicyError, match=r"keeps versions 1 and newer ones.*force=True"):
        expire(dataset, kms=kms, keep=1, skip_grace=True)
    expire(dataset, kms=kms, keep=1, skip_grace=True, force=True)
    assert head(dataset, kms).policy == policy
    assert opened(dataset, kms).log.kept(head(dataset, kms))[-1].number == 6
    new = Policy(keep=3)
    assert set_policy(dataset, new, kms=kms) == policy
    assert head(dataset, kms).policy == new
    assert head(dataset, kms).operation == "policy"
    rotate(dataset, kms=kms).raise_for_failures()
    assert head(dataset, kms).policy == new
    add_tree(dataset, kms, {"then": b""}, policy=policy)
    assert head(dataset, kms).policy == policy
    assert decrypted(dataset, kms) == TREE | {"more": b"other", "then": b""}


def test_before_there_are_files(kms: dict[str, str], dataset: Path) -> None:
    Dataset.create(dataset, kms=kms, wrapping_key_id=MASTER)
    assert set_policy(dataset, Policy(kek_scope="files:99"), kms=kms) == Policy()
    result = add_tree(dataset, kms, TREE)
    assert scopes(dataset, kms).keys() == {f"files:{result.job_id}/0"}


def test_who_may_not_ask_the_kms_lays_down_nothing(kms: dict[str, str], dataset: Path) -> None:
    add_tree(dataset, kms, TREE)
    clear_cache()
    before = read_tree(dataset)
    with pytest.raises(KeyAccessError):
        set_policy(dataset, Policy(keep=1), kms={**kms, "encryption.allowed-key-ids": "other"})
    assert read_tree(dataset) == before


# ---------------------------------------------------------------------------------------------- rotated


@pytest.mark.parametrize("scope", ["partition", "day", "writer", "files:2"])
def test_rotation_keeps_scopes(kms: dict[str, str], dataset: Path, scope: str) -> None:
    """For each KEK another of the same scope, by one wrap; files that did not share one still do not."""
    add_tree(dataset, kms, TREE, policy=Policy(kek_scope=scope))
    before, count = scopes(dataset, kms), len(keys(dataset, kms))
    old = keys(dataset, kms).keys()
    assert calls(lambda: rotate(dataset, kms=kms).raise_for_failures()) == Counter(wrap=count, unwrap=count)
    assert scopes(dataset, kms) == before
    assert old.isdisjoint(entry.key_id for entry in entries(dataset, kms).values())
    active = keys(dataset, kms, "active")
    assert len(active) == count
    assert sealers(dataset) - old < active.keys()
    assert {ref.key_id for ref in head(dataset, kms).files} <= active.keys()
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    assert keys(dataset, kms).keys() == active.keys()
    clear_cache()
    assert decrypted(dataset, kms) == TREE
    assert leftovers(dataset, kms) == []


# ---------------------------------------------------------------------------------------------- the class


@pytest.mark.parametrize(
    "options",
    [
        {"kek_scope": "table"},
        {"kek_scope": "files:0"},
        {"kek_scope": "files:"},
        {"kek_scope": "files:1e3"},
        {"kek_uses": 0},
        {"kek_uses": 1 << 32},
        {"kek_uses": 1.5},
        {"kek_uses": True},
        {"kek_lifetime_days": -1},
        {"kek_lifetime_days": float("nan")},
        {"kek_lifetime_days": float("inf")},
        {"kek_lifetime_days": "1"},
        {"keep": 0},
        {"keep": 1.0},
        {"keep": True},
        {"keep_days": 1},
        {"keep": 1, "keep_days": -1},
    ],
)
def test_what_no_policy_is(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options)) if len(options) == 1 else "keep_days"):
        Policy(**options)


def test_the_class() -> None:
    policy = Policy(kek_scope="files:7", keep=2)
    assert pickle.loads(pickle.dumps(policy)) == policy == Policy("files:7").replace(keep=2)
    assert Policy().kek_lifetime_days == 730
    assert Policy().kek_uses < 1 << 32


# ---------------------------------------------------------------- what was left stays left


def test_a_master_key_that_was_left(dataset: Path, kms: dict[str, str]) -> None:
    """Who does not know of it is told, and does not go back to it."""
    add_tree(dataset, kms, TREE)
    rotate(dataset, kms=kms, what="mek", wrapping_key_id="other")
    with pytest.raises(PolicyError, match=r"rotated from the master key 'master' to 'other'.*wrapping_key_id='other'"):
        add_tree(dataset, kms, {"new": b"new"})
    add_tree(dataset, kms, {"new": b"new"}, wrapping_key_id="other")
    rekey_files(dataset, kms=kms, **QUIET).raise_for_failures()
    rotate(dataset, kms=kms, wrapping_key_id="hr")
    with pytest.raises(PolicyError, match="from the master key 'other' to 'hr'"):
        add_tree(dataset, kms, {"newer": b"newer"}, wrapping_key_id="other")
    rotate(dataset, kms=kms, wrapping_key_id=MASTER)
    add_tree(dataset, kms, {"newer": b"newer"})
    assert {key.wrapping_key_id for key in keys(dataset, kms, "active").values()} == {MASTER}
    assert decrypted(dataset, kms) == {**TREE, "new": b"new", "newer": b"newer"}


def test_keks_of_what_is_over(dataset: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation needs no successor of a KEK that wraps nothing, and an expiry lets it go in time."""
    add_tree(dataset, kms, TREE, policy=Policy(kek_scope="files:99"))
    rekey_files(dataset, kms=kms, **QUIET).raise_for_failures()
    expire(dataset, kms=kms, keep=1)
    idle, used = sorted(
        (key for key in keys(dataset, kms, "active").values() if "scope" in key.properties),
        key=lambda key: key.created_ms,
    )
    assert {entry.key_id for entry in entries(dataset, kms).values()} == {used.key_id}
    clear_cache()
    assert calls(lambda: rotate(dataset, kms=kms)) == Counter(unwrap=4, wrap=2)  # the dataset's own, and that in use
    assert keys(dataset, kms)[idle.key_id].state == "retired"
    assert "successor" not in keys(dataset, kms)[idle.key_id].properties
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    assert idle.key_id not in keys(dataset, kms)
    assert len(keys(dataset, kms)) == 2
    rekey_files(dataset, kms=kms, **QUIET).raise_for_failures()
    expire(dataset, kms=kms, keep=1)
    assert len(keys(dataset, kms, "active")) == 3  # the one that is idle now is young
    monkeypatch.setattr("ags_fast.dataset.keys.GRACE_MS", -1)
    expire(dataset, kms=kms, keep=1)
    expire(dataset, kms=kms, keep=1)
    assert len(keys(dataset, kms)) == 2
    assert decrypted(dataset, kms) == TREE


def test_all_keks_go_to_another_kms(tmp_path: Path, dataset: Path, kms: dict[str, str]) -> None:
    """Also if only those under one master key get under another."""
    add_tree(dataset, kms, TREE, policy=Policy(kek_scope="partition"))
    add_tree(dataset, kms, {"hr/one": b"one"}, wrapping_key_id="hr")
    there = make_kms(tmp_path, name="there", keys=("second", MASTER))
    with pytest.raises(PolicyError, match=r"no key of .* is under 'typo', but under 'hr', 'master'"):
        rotate(dataset, kms=kms, what="mek", new_kms=there, from_key_id="typo", wrapping_key_id="second")
    rotate(dataset, kms=kms, what="mek", new_kms=there, from_key_id="hr", wrapping_key_id="second")
    clear_cache()
    assert decrypted(dataset, there) == {**TREE, "hr/one": b"one"}
    assert {key.wrapping_key_id for key in keys(dataset, there).values()} == {"second", MASTER}
