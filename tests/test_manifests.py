"""Manifests as a log-structured store, compared with a dict: whatever is committed, removed, rotated or expired."""

from __future__ import annotations

import os
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, MASTER, decrypted, leftovers, make_kms, write_tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ags_fast.dataset.decide import Wish, next_version
from ags_fast.dataset.entries import FileEntry, wrapped_by
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.merging import RATIO, lanes, to_merge
from ags_fast.dataset.names import new_job_id
from ags_fast.dataset.tables import TableRef, bound, name_bytes
from ags_fast.dataset.versions import runs_of
from ags_fast.errors import IntegrityError
from ags_fast.fs import Store
from ags_fast.fs.numbered import TOMBSTONE, Numbered
from ags_fast.jobs import compact, encrypt_files, expire, open_file, rotate, sweep
from ags_fast.keys import binding, load_kms

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = {
    "ags_fast.dataset.tables.MANIFEST_ENTRIES": 8,
    "ags_fast.dataset.tables.PAGE_ENTRIES": 3,
    "ags_fast.dataset.tables.WHOLE_NBYTES": 3000,
    "ags_fast.dataset.merging.SMALL_ENTRIES": 4,
    "ags_fast.dataset.rewriting.SMALL_ENTRIES": 4,
    "ags_fast.fs.numbered.FEW": 2,
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LIMITS.items():
        monkeypatch.setattr(name, value)


def entry(opened: Ledger, path: str, number: int) -> FileEntry:
    key_id = opened.keyring.main_key().key_id
    file = f"{path}.{number}.ags"
    wrapped = opened.envelope.wrap(key_id, bytes(16), binding(opened.id, "dek", file))
    return FileEntry(path, file, "ags1", 5, 41, 4096, key_id, wrapped, None, b"", "job", None, None, None, path, "")


def check(opened: Ledger, model: dict[str, str]) -> None:
    head = opened.current()
    assert head is not None
    assert head.files == len(model)
    assert head.plain_length == 5 * len(model)
    found = list(opened.entries(head))
    assert {e.path: e.file for e in found} == model
    assert len(found) == len(model)
    for ref in head.manifests:
        entries = opened.open_table(ref, opened.envelope)
        names = [name_bytes(e.path) for e in entries]
        assert names == sorted(names)
        assert all(ref.first <= bound(name) <= ref.last for name in names)
        assert ref.entries == len(entries)
        assert ref.keys is not None
        assert Counter(dict(ref.keys)) == wrapped_by(entries)
    some = [*model, "zzz", "", "a/none"]
    assert {p: e.file for p, e in opened.find_many(head, some).items()} == model
    for path in [*list(model)[:5], "a/none"]:
        got = opened.find(head, path)
        assert (None if got is None else got.file) == model.get(path)
    for folder in {path.rpartition("/")[0] for path in model} | {"none", "a"}:
        inside = opened.find_where(head, [], [folder]).keys()
        assert bool(inside) == any(path.startswith(folder + "/") for path in model)
    for folder in {path[:at] for path in model for at, char in enumerate(path) if char == "/"} | {"", "none", "a"}:
        below = {path.removeprefix(f"{folder}/" if folder else "") for path in model if is_below(path, folder)}
        for deep in (False, True):
            folders, files = opened.list_folder(head, folder, deep)
            inner = [e.path.removeprefix(f"{folder}/" if folder else "") for e in files]
            assert sorted(inner) == sorted(name for name in below if deep or "/" not in name)
            assert folders == (set() if deep else {name.partition("/")[0] for name in below if "/" in name})


def is_below(path: str, folder: str) -> bool:
    return not folder or path.startswith(f"{folder}/")


NAMES = st.builds("{}/{}".format, st.sampled_from(("a", "b", "c", "c/d", "c-", "c0", "c/d/e")), st.integers(0, 30))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sets(NAMES, min_size=1, max_size=12)),
        st.tuples(st.just("remove"), st.sets(NAMES, min_size=1, max_size=12)),
        st.tuples(st.sampled_from(("rotate", "expire", "compact")), st.just(set[str]())),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_like_a_dict(small: None, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, set[str]]]) -> None:
    folder = tmp_path_factory.mktemp("model")
    kms, dataset = make_kms(folder), folder / "dataset"
    opened = Ledger.open_or_create(Store(dataset), load_kms(kms), MASTER)
    model: dict[str, str] = {}
    for number, (what, names) in enumerate([("put", {"a/0"}), *steps]):
        base = opened.current()
        if what == "put":
            old = list(opened.find_many(base, names).values())
            add = [entry(opened, path, number) for path in names]
            made = opened.commit(Wish("encrypt", new_job_id(), add, old, base))
            assert made.change.refused == ()
            model |= {e.path: e.file for e in add}
        elif what == "remove":
            gone = list(opened.find_many(base, names).values())
            opened.commit(Wish("remove", new_job_id(), remove=gone, base=base))
            model = {path: file for path, file in model.items() if path not in names}
        elif what == "rotate":
            rotate(dataset, kms=kms, progress=False).raise_for_failures()
        elif what == "expire":
            expire(dataset, kms=kms, force=True).raise_for_failures()
        else:
            compact(dataset, kms=kms).raise_for_failures()
        check(Ledger.open(dataset, load_kms(kms)), model)
        opened = Ledger.open(dataset, load_kms(kms))


def ref(entries: int, first: bytes = b"a", last: bytes = b"z", run: str = "") -> TableRef:
    return TableRef(f"{first!r}{entries}", 1, entries, "k", b"", None, first, last, run)


def test_runs_stay_few() -> None:
    """Each commit of one entry, by the sizes alone: few runs, and each entry is written again a few times."""
    runs: list[list[TableRef]] = []
    written = most = 0
    for _ in range(10_000):
        places = set(to_merge(runs, 1))
        size = 1 + sum(ref.entries for place in places for ref in runs[place])
        runs = [run for place, run in enumerate(runs) if place not in places] + [[ref(size)]]
        written += size
        most = max(most, len(runs))
        sizes = sorted(run[0].entries for run in runs)
        assert all(size >= RATIO * sum(sizes[:i]) for i, size in enumerate(sizes))
    assert most <= 9
    assert written <= 16 * 10_000


def test_lanes() -> None:
    refs = [ref(1, b"a", b"c"), ref(1, b"b", b"d"), ref(1, b"e", b"f"), ref(1, b"d", b"e")]
    for lane in lanes(refs):
        assert all(one.last < other.first for one, other in pairwise(lane))
    assert sum(map(len, lanes(refs))) == 4
    assert [len(run) for run in runs_of([ref(1, run="x"), ref(2, run="x"), ref(3)])] == [2, 1]


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_wish_changes(whole: bool) -> None:
    """Each path has what the wish has, or what the job saw, or what another job has put there."""

    def file(path: str, job: str) -> FileEntry:
        return FileEntry(path, f"{path}.{job}", "ags1", 5, 41, 1, "k", b"", None, b"", job, None, None, None, path, "")

    def decided(there: dict[str, str] | None) -> tuple[list[str], list[str], list[str]]:
        change = next_version(wish, None, there)
        return [e.path for e in change.adds], sorted(change.removes), [e.path for e in change.refused]

    wish = Wish("x", "job", [file("new", "a"), file("put", "a")], [file("put", "0"), file("gone", "0")], whole=whole)
    seen = {"put": "put.0", "gone": "gone.0"}
    assert decided(None) == decided(seen) == (["new", "put"], ["gone", "put"], [])
    changes: list[tuple[dict[str, str | None], list[str], list[str], list[str]]] = [
        ({"new": "new.b"}, ["put"], ["gone", "put"], ["new"]),
        ({"put": "put.b"}, ["new"], ["gone"], ["put"]),
        ({"put": None}, ["new"], ["gone"], ["put"]),
        ({"gone": "gone.b"}, ["new", "put"], ["put"], ["gone"]),
        ({"put": "put.a"}, ["new"], ["gone"], []),  # done already
        ({"gone": None}, ["new", "put"], ["put"], []),
        ({"new/file": "new/file.b"}, ["put"], ["gone", "put"], ["new"]),
    ]
    for change, adds, removes, refused in changes:
        there = {path: name for path, name in {**seen, **change}.items() if name is not None}
        assert decided(there) == (
            ([], [], [path.split("/")[0] for path in change]) if whole else (adds, removes, refused)
        )
    old, new = file("n", "0"), file("n", "a")
    member = old._replace(set_id="set", part=0, parts=2)
    for add, remove, breaks in (
        ([], [member], {"set"}),
        ([new], [member], {"set"}),
        ([new._replace(set_id="set", part=0, parts=2)], [member], set[str]()),
        ([new], [old], set[str]()),
    ):
        assert next_version(Wish("x", "job", add, remove, whole=whole), None, None).breaks == breaks


@pytest.mark.usefixtures("small")
def test_lists_are_shared_and_checked(tmp_path: Path) -> None:
    kms, dataset = make_kms(tmp_path), tmp_path / "dataset"
    opened = Ledger.open_or_create(Store(dataset), load_kms(kms), MASTER)
    many = [entry(opened, f"{n:04}", 0) for n in range(100)]
    opened.commit(Wish("encrypt", new_job_id(), many))
    (path,) = (dataset / "_ags/lists").iterdir()
    manifests = set((dataset / "_ags/manifests").iterdir())
    opened.commit(Wish("encrypt", new_job_id(), [entry(opened, "x", 1)], base=opened.current()))
    assert list((dataset / "_ags/lists").iterdir()) == [path]
    assert len(set((dataset / "_ags/manifests").iterdir()) - manifests) == 1
    data = path.read_bytes()
    for change in (data[:-1], data.replace(b"entries", b"Entries", 1), b"", None):
        path.unlink()
        if change is not None:
            path.write_bytes(change)
        with pytest.raises(IntegrityError, match="_ags/lists/"):
            Ledger.open(dataset, load_kms(kms)).load()
        path.write_bytes(data)
    stale = path.with_name(f"{'0' * 64}.json")
    for old in (path, stale):
        old.write_bytes(data)
        os.utime(old, (0, 0))
    sweep(dataset, kms=kms)
    assert list((dataset / "_ags/lists").iterdir()) == [path]
    assert compact(dataset, kms=kms, dry_run=True).version == 2


def test_another_job_commits_during_a_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kms, dataset = make_kms(tmp_path), tmp_path / "dataset"
    tree = {f"{n}": b"%d" % n for n in range(10)}

    def commit(name: str, tree: dict[str, bytes]) -> None:
        src = write_tree(tmp_path / f"src {name}", tree)
        encrypt_files(src, dataset, kms=kms, wrapping_key_id=MASTER, engine=HERE).raise_for_failures()

    def late(opened: Ledger, *args: Any, **options: Any) -> Any:
        monkeypatch.setattr(Ledger, "succeed", real)
        commit("late", {"late": b"late"})
        return real(opened, *args, **options)

    real = Ledger.succeed
    commit("first", tree)
    commit("one", {"one": b"1"})
    assert len(compact(dataset, kms=kms, dry_run=True).rows) == 2
    monkeypatch.setattr(Ledger, "succeed", late)
    result = compact(dataset, kms=kms)
    assert (result.version, result.counts["ok"]) == (4, 2)  # the late file and the one file were in one manifest
    head = Ledger.open(dataset, load_kms(kms)).current()
    assert head is not None
    assert (head.operation, [ref.entries for ref in head.manifests]) == ("compact", [12])
    assert decrypted(dataset, kms) == tree | {"one": b"1", "late": b"late"}
    assert leftovers(dataset, kms) == []
    again = compact(dataset, kms=kms)
    assert (again.version, again.rows) == (4, [])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a child process dies at each step")
def test_deaths_at_each_step_of_a_commit_that_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kms, dataset = make_kms(tmp_path), tmp_path / "dataset"
    tree: dict[str, bytes] = {}

    def commit(name: str) -> None:
        src = write_tree(tmp_path / f"src {name}", {name: name.encode()})
        encrypt_files(src, dataset, kms=kms, wrapping_key_id=MASTER, engine=HERE).raise_for_failures()

    for name in "abc":
        commit(name)
        tree[name] = name.encode()
    for step in range(1, 40):
        name = f"d{step}"
        pid = os.fork()
        if pid == 0:
            left = step
            for what in ("create_exclusive", "write_small", "delete"):
                real = getattr(Store, what)

                def dying(*args: object, _real: object = real, **options: object) -> object:
                    nonlocal left
                    left -= 1
                    if not left:
                        os._exit(9)
                    return _real(*args, **options)  # type: ignore[operator]

                monkeypatch.setattr(Store, what, dying)
            commit(name)
            os._exit(0)
        died = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert died in (0, 9)
        found = decrypted(dataset, kms)
        assert found in (tree, tree | {name: name.encode()})
        tree = found
        sweep(dataset, kms=kms)
        assert decrypted(dataset, kms) == tree
        assert [left for left in leftovers(dataset, kms) if not left.startswith("_ags/chain/")] == []
        if died == 0:
            break
    else:
        pytest.fail("the commit did not end")
    assert step > 5


def test_the_newest_number_without_a_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    numbered = Numbered(store, "n/")
    (tmp_path / "n").mkdir()
    for number in range(1, 301):
        (tmp_path / f"n/{number:08}.json").write_bytes(b"x")
        if number % 37 == 0:
            assert Numbered(store, "n/").newest() == numbered.newest() == number
    with monkeypatch.context() as patch:
        patch.setattr(Store, "list", lambda *args: pytest.fail("it was listed"))
        assert Numbered(store, "n/").newest() == numbered.newest() == 300
    (tmp_path / "n/00000299.json").unlink()  # somebody takes objects away: the highest one still is the newest
    assert Numbered(store, "n/").newest() == numbered.newest() == 300
    for number in range(1, 200):
        (tmp_path / f"n/{number:08}.json").write_bytes(TOMBSTONE)
    assert Numbered(store, "n/").newest() == 300
    assert not numbered.has(1)
    for number in range(1, 200):
        (tmp_path / f"n/{number:08}.json").unlink()
    assert Numbered(store, "n/").newest() == numbered.newest() == 300


def test_find_what_is_not_there(tmp_path: Path) -> None:
    kms = make_kms(tmp_path)
    src = write_tree(tmp_path / "src", {"a": b"a", "b/c": b"c"})
    encrypt_files(src, tmp_path / "dataset", kms=kms, wrapping_key_id=MASTER, engine=HERE).raise_for_failures()
    for path in ("", "b", "b/", "b/d", "a/b"):
        with pytest.raises(FileNotFoundError):
            open_file(tmp_path / "dataset", path, kms=kms)
    for clash in ({"a/b": b"x"}, {"b": b"x"}):
        more = write_tree(tmp_path / f"more {len(next(iter(clash)))}", clash)
        with pytest.raises(ValueError, match="folder"):
            encrypt_files(more, tmp_path / "dataset", kms=kms, wrapping_key_id=MASTER, engine=HERE)
