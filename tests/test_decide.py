"""The decisions about keys and versions, over generated snapshots.

What must hold, whatever there is (docs/rotation.md, docs/dataset-format.md, SECURITY.md):

1. A decision is a function of its arguments: it reads no file, no clock and no random numbers, and changes nothing.
2. A job that reserves KEKs gets active KEKs of the kinds that it asked for. `uses` grows by the DEKs of the job, and
   stays within the policy. A KEK whose lifetime or uses are over retires in favour of the KEK that took its place.
3. A rotation retires each active KEK that it is asked to replace, and nothing else. The manifests of the version after
   it need active keys only. No DEK is lost, and the new KEKs count all DEKs that they wrap.
4. An expiry keeps the newest versions, and all that versions and open jobs need. Retired KEKs stay for their grace.
5. A KEK that has retired never wraps again, `uses` never goes down, and the heirs of a KEK end with an active one.
6. All of that holds when jobs meet: each looks, decides, and swaps if nobody else was first.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count as numbers
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from datasets import HERE, MASTER, decrypted, make_kms, read_tree, write_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ags_fast.dataset import decide
from ags_fast.dataset.entries import FileEntry, wrapped_by
from ags_fast.dataset.keks import GRACE_MS, Uses, Want
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.names import folders_above
from ags_fast.dataset.policy import DAY_MS, MAX_USES, Policy
from ags_fast.dataset.snapshot import Job, Snapshot
from ags_fast.dataset.tables import TableRef, named_keys
from ags_fast.dataset.versions import Version
from ags_fast.errors import PolicyError
from ags_fast.fs.numbered import TOMBSTONE
from ags_fast.jobs import audit, compact, encrypt_files, expire, rekey_files, remove_files, rotate
from ags_fast.jobs.costs import Forecast
from ags_fast.jobs.survey import Survey
from ags_fast.keys import clear_cache, kms_calls, load_kms
from ags_fast.keys.entry import COLUMNS, RETIRES_MS, REWRAPPED_MS, SCOPE, SUCCESSOR, KeyEntry, retires_ms
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ags_fast.dataset.decide import Change
    from ags_fast.jobs import JobResult
    from ags_fast.jobs.costs import Cost

pytest.importorskip("pyarrow")

NOW = 1_800_000_000_000
MASTERS = ("a", "b", "c")
Steps: TypeAlias = Generator[None, None, Any]
POLICIES = st.builds(
    Policy,
    kek_scope=st.sampled_from(["dataset", "partition", "day", "writer", "files:2"]),
    kek_lifetime_days=st.sampled_from([730, 100, 0]),
    kek_uses=st.sampled_from([MAX_USES, 100, 10, 1]),
)
OUTSIDE = {"time", "_io", "io", "posix", "_socket", "_ssl", "select", "_random", "_thread"}

# ---------------------------------------------------------------------------------------------- snapshots


def ref(path: str, counts: Mapping[str, int], sealer: str, named: bool = True) -> TableRef:
    return TableRef(path, 1, sum(counts.values()), sealer, b"", named_keys(counts) if named else None, b"", b"")


@st.composite
def entries(draw: st.DrawFn, number: int) -> KeyEntry:
    """The key `k<number>`. Its successor, if it has one, is a key with a higher number, or gone."""
    kind = draw(st.sampled_from(["main", "main", "scope", "scope", "columns", "single", "single columns"]))
    properties = {SCOPE: draw(st.sampled_from("xy"))} if kind == "scope" else {}
    properties |= dict(COLUMNS) if "columns" in kind else {}
    state = draw(st.sampled_from(["active", "retired"]))
    if state == "retired":
        properties[RETIRES_MS] = str(NOW + draw(st.integers(-3, 3)) * DAY_MS)
        follower = draw(st.sampled_from([None, "gone", *(f"k{i}" for i in range(number + 1, 7))]))
        properties |= {} if follower is None else {SUCCESSOR: follower}
    wrapped = None if "single" in kind else b"k%d" % number
    if wrapped and draw(st.booleans()):
        properties[REWRAPPED_MS] = str(NOW - DAY_MS)
    master, created = draw(st.sampled_from(MASTERS)), NOW - draw(st.integers(0, 200)) * DAY_MS
    return KeyEntry(f"k{number}", master, wrapped, state, created, draw(st.integers(0, 9)), properties)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """A dataset with an active KEK that seals documents, and anything else."""
    keys = {entry.key_id: entry for entry in [draw(entries(i)) for i in range(draw(st.integers(0, 6)))]}
    keys["main"] = KeyEntry("main", "a", b"main", "active", NOW - draw(st.integers(0, 200)) * DAY_MS)
    sealers = [key for key, entry in keys.items() if Want.of(entry) == Want(entry.wrapping_key_id)]
    counts: dict[str, Mapping[str, int]] = {}
    refs = []
    for i in range(draw(st.integers(0, 4))):
        wraps = draw(st.dictionaries(st.sampled_from(sorted(keys)), st.integers(1, 5), max_size=3))
        refs.append(ref(f"m{i}", wraps, draw(st.sampled_from(sealers)), draw(st.booleans())))
        counts |= {} if refs[-1].keys is not None else {f"m{i}": wraps}
        for key_id, count in wraps.items():
            keys[key_id] = keys[key_id].replace(uses=keys[key_id].uses + count)
    times = sorted(draw(st.lists(st.integers(0, 50), max_size=4)), reverse=True)
    policy = draw(POLICIES)
    versions = tuple(
        Version(
            i + 3, i + 2, "", "", NOW - days * DAY_MS, 0, 0,
            tuple(draw(st.lists(st.sampled_from(refs), unique=True, max_size=3))) if refs else (),
            policy, draw(st.sampled_from(sealers)),
        )
        for i, days in enumerate(times)
    )  # fmt: skip
    jobs = tuple(
        Job(f"job {i}", frozenset(needs))
        for i, needs in enumerate(draw(st.lists(st.sets(st.sampled_from(sorted(keys)), max_size=2), max_size=2)))
    )
    return Snapshot(keys, versions, jobs, counts)


@st.composite
def rotations(draw: st.DrawFn, snapshot: Snapshot, whats: tuple[str, ...] = ("kek", "double-wrap")) -> decide.Rotation:
    """What `jobs.rotate` could ask of this dataset."""
    there = sorted({entry.wrapping_key_id for entry in snapshot.keys.values()})
    from_master = draw(st.sampled_from([None, None, *there]))
    left = from_master or decide.main_key(snapshot.keys.values()).wrapping_key_id
    master = draw(st.sampled_from([None, *MASTERS, "new"]))
    return decide.Rotation(draw(st.sampled_from(whats)), master, from_master, left, draw(st.booleans()))


def kek(want: Want, name: str, now: int = NOW) -> KeyEntry:
    """A KEK as the KMS makes it."""
    wrapped = name.encode() if want.double_wrap else None
    return KeyEntry(name, want.wrapping_key_id, wrapped, "active", now, 0, want.properties())


def completed(decision: Callable[[Mapping[Want, KeyEntry]], Change], name: str = "made") -> Change:
    """The decision with all KEKs that it needs. A provisional one differs from it in the names of new KEKs only."""
    made: dict[Want, KeyEntry] = {}
    change = first = decision(made)
    while change.makes:
        assert made.keys().isdisjoint(change.makes)
        for want in change.makes:
            made[want] = kek(want, f"{name} {len(made)}")
        change = decision(made)
    assert (change.rewrites, len(change.keys), len(change.moves)) == (first.rewrites, len(first.keys), len(first.moves))
    return change


def heirs(keys: Mapping[str, KeyEntry]) -> dict[str, str | Want]:
    """By the id of each key that of its heir, or the kind that is to be made."""
    found = {key_id: decide.heir(keys, entry) for key_id, entry in keys.items()}
    return {key_id: heir.key_id if isinstance(heir, KeyEntry) else heir for key_id, heir in found.items()}


def check_step(before: Mapping[str, KeyEntry], changes: Mapping[str, KeyEntry | None]) -> None:
    """What holds of each change of a key store (5)."""
    for key_id, new in changes.items():
        old = before.get(key_id)
        if new is not None and old is not None:
            assert (old.state, new.state) != ("retired", "active")
            assert new.uses >= old.uses
            assert Want.of(new)[1:] == Want.of(old)[1:]
    after = {**before, **changes}
    decide.main_key(entry for entry in after.values() if entry is not None)  # there is one


# ---------------------------------------------------------------------------------------------- (1) functions


@contextmanager
def alone() -> Iterator[None]:
    """AssertionError if the code calls anything that looks at the world outside."""

    def watch(frame: Any, what: str, called: Any) -> None:
        if what == "c_call" and "hypothesis" not in frame.f_code.co_filename:  # it times garbage collections
            owner = getattr(called, "__self__", None)
            name = f"{getattr(called, '__module__', None) or getattr(owner, '__name__', '')}.{called.__name__}"
            outside = name.split(".")[0] in OUTSIDE or called.__name__ in {"now", "today", "utcnow", "urandom"}
            assert not outside, f"a decision calls {name}"

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


@given(st.data())
def test_decisions_are_functions(data: st.DataObject) -> None:
    snapshot = data.draw(snapshots())
    asked, policy = data.draw(rotations(snapshot)), data.draw(POLICIES)
    there = snapshot.keys.values()
    paths, masters = ["x/1", "x/2", "y/3"], [{"c": "b"}, {}, {"c": "a"}]

    def kinds() -> Any:
        return decide.kinds_for_files(paths, masters, "a", True, policy, "job", NOW)

    decisions: list[Callable[[], Any]] = [
        kinds,
        lambda: decide.reserve(there, kinds()[1], Policy(), {}, NOW),
        lambda: decide.replace_keks(snapshot, asked, {}, GRACE_MS, NOW),
        lambda: decide.rewrite_manifests(snapshot, {}, NOW),
        lambda: decide.rewrap_keks(there, asked, lambda entry: entry.uses % 2 == 0, False),
        lambda: decide.put_in_wraps(there, {entry.wrapped: entry for entry in there}, NOW),
        lambda: decide.expire_versions(snapshot, 1, None, NOW),
        lambda: decide.expire_keys(snapshot, False, NOW),
        lambda: decide.Change({"k0": None}, versions=snapshot.versions[:1]).apply_to(snapshot, NOW),
    ]
    for decision in decisions:
        before = copy.deepcopy(snapshot)
        try:
            with alone():
                decided = decision()
        except PolicyError:
            continue
        assert decided == decision()
        assert snapshot == before


# ---------------------------------------------------------------------------------------------- (2) reservations


@settings(max_examples=150)
@given(st.data())
def test_reserve(data: st.DataObject) -> None:
    snapshot, policy = data.draw(snapshots()), data.draw(POLICIES)
    kinds = st.builds(Want, st.sampled_from(MASTERS), st.booleans(), st.booleans(), st.sampled_from([None, "x"]))
    uses = st.builds(Uses, st.integers(0, 12), st.integers(0, 80))
    wants = data.draw(st.dictionaries(kinds, uses, min_size=1, max_size=4))
    keys = snapshot.keys
    try:
        change = completed(lambda made: decide.reserve(keys.values(), wants, policy, made, NOW))
    except PolicyError:
        assert any(uses.data_keys > policy.kek_uses for uses in wants.values()) or "moved-from" in str(keys)
        return
    check_step(keys, change.keys)
    after = change.apply_to(snapshot, NOW).keys
    assert change.chosen.keys() == wants.keys()
    for want, (data_keys, _) in wants.items():
        chosen = change.chosen[want]
        assert after[chosen.key_id] == chosen
        assert (Want.of(chosen), chosen.state) == (want, "active")
        if not want.double_wrap:
            continue
        held = [entry for entry in decide.active(keys.values()) if Want.of(entry) == want]
        if chosen.key_id in keys:
            assert chosen.uses >= keys[chosen.key_id].uses + data_keys
            assert not policy.outlived(chosen.created_ms, NOW)
            assert chosen.key_id == held[-1].key_id
        else:
            assert chosen.uses >= data_keys
            for old in held[-1:]:  # of a kind there may be two, after a rotation of one of them to the other's master
                assert heirs(after)[old.key_id] == chosen.key_id
                assert retires_ms(after[old.key_id]) == NOW + GRACE_MS
                assert policy.outlived(old.created_ms, NOW) or old.uses + sum(wants[want]) > policy.kek_uses
        assert chosen.uses <= policy.kek_uses
    assert all(keys.get(key_id) != entry for key_id, entry in change.keys.items()), "a change that changes nothing"
    untouched = keys.keys() - {entry.key_id for entry in change.chosen.values()}
    assert all(after[i] == keys[i] or after[i].state == "retired" for i in untouched)


@given(st.data())
def test_reserve_for_files(data: st.DataObject) -> None:
    """What is reserved is what the files are given."""
    policy, double_wrap = data.draw(POLICIES), data.draw(st.booleans())
    paths = data.draw(st.lists(st.sampled_from(["x/1", "x/2", "y/1", "top"]), unique=True))
    masters = [data.draw(st.dictionaries(st.sampled_from("cd"), st.sampled_from("ab"))) for _ in paths]
    kinds, uses = decide.kinds_for_files(paths, masters, "a", double_wrap, policy, "job", NOW)
    assert uses[Want("a")].spare > 0  # documents and tables
    counted = {want: n.data_keys for want, n in uses.items() if n.data_keys}
    assert counted == Counter(kind for each in kinds for kind in each)
    assert sum(counted.values()) == len(paths) + sum(map(len, masters))
    chosen = {want: kek(want, repr(want)) for want in uses}
    files = decide.with_keys([file_entry(path, path) for path in paths], kinds, masters, chosen)
    assert wrapped_by(files) == {repr(want): number for want, number in counted.items()}
    for path, columns, (first, *rest) in zip(paths, masters, kinds, strict=True):
        assert first.wrapping_key_id == "a"
        assert [want.wrapping_key_id for want in rest] == list(columns.values())
        assert {want.double_wrap for want in (first, *rest)} == {double_wrap}
        assert all(want.columns == (want.wrapping_key_id != "a") for want in rest)
        if double_wrap and policy.kek_scope == "partition":
            assert first.scope == f"partition:{path.rpartition('/')[0]}"
        if double_wrap and policy.kek_scope == "day":
            assert first.scope == "day:2027-01-15"


# ---------------------------------------------------------------------------------------------- (3) rotations


@settings(max_examples=150)
@given(st.data())
def test_rotate(data: st.DataObject) -> None:
    before = data.draw(snapshots())
    asked = data.draw(rotations(before))
    change = completed(lambda made: decide.replace_keks(before, asked, made, GRACE_MS, NOW))
    check_step(before.keys, change.keys)
    between = change.apply_to(before, NOW)
    check_replaced(before, between, asked, change)
    more = completed(lambda made: decide.rewrite_manifests(between, made, NOW), "more")
    check_step(between.keys, more.keys)
    after = more.apply_to(between, NOW)
    check_rewritten(between, after, more)
    again = decide.rewrite_manifests(after, {}, NOW)
    assert not again, "a rotation has an end"
    # The KEKs that the rotation has put in count what they wrap, if nobody else commits.
    new = {entry.key_id for entry in change.successors.values() if entry is not None}
    moved: Counter[str] = Counter()
    for key_id, count in before.used().items():
        heir = heirs(between.keys)[key_id]
        moved[heir if isinstance(heir, str) else more.moves[key_id]] += count if isinstance(heir, str) else 0
    assert all(after.keys[key_id].uses >= moved[key_id] for key_id in new)


def check_replaced(before: Snapshot, after: Snapshot, asked: decide.Rotation, change: Change) -> None:
    there = [entry for entry in before.keys.values() if entry.state == "active"]
    singles = [entry for entry in there if not entry.double_wrap]
    now = heirs(before.keys)
    used = Counter({now[key_id]: count for key_id, count in before.used().items()})
    gone = {entry.key_id for entry in there if after.keys[entry.key_id].state == "retired"}
    assert gone == change.successors.keys()
    assert all(asked.concerns(before.keys[key_id]) for key_id in gone)
    for entry in filter(asked.concerns, there):
        left = asked.master_of(entry) != entry.wrapping_key_id
        if asked.what == "double-wrap":
            own = entry.double_wrap and Want.of(entry) == Want(entry.wrapping_key_id)
            must = not entry.double_wrap or (own and bool(singles))
        else:  # in single wrap, what seals documents may stay
            opens = any(key.double_wrap and used[key.key_id] for key in there)
            must = not entry.double_wrap or left or asked.documents or not singles or opens
        assert must == (entry.key_id in gone)
    for old_id, new in change.successors.items():
        old = before.keys[old_id]
        if new is None:
            assert SCOPE in old.properties
            assert not used[old_id]
            continue
        assert after.keys[new.key_id] == new
        assert new.key_id not in before.keys
        assert new.state == "active"
        assert new.wrapping_key_id == asked.master_of(old)
        kind = Want.of(old)._replace(wrapping_key_id=new.wrapping_key_id)
        assert Want.of(new) == (kind if asked.what == "kek" else kind._replace(double_wrap=True, scope=None))
        assert heirs(after.keys)[old_id] == new.key_id
        assert retires_ms(after.keys[old_id]) == NOW + GRACE_MS


def check_rewritten(before: Snapshot, after: Snapshot, change: Change) -> None:
    """The newest version needs active keys only, and has the DEKs that it had; older versions stay."""
    assert after.versions[: len(before.versions)] == before.versions
    if before.head is None or after.head is None:
        assert not change
        return
    assert (after.head != before.head) == bool(change.rewrites or change.reseals)
    needed = {after.head.key_id} | {ref.key_id for ref in after.head.manifests} | after.used().keys()
    assert {after.keys[key_id].state for key_id in needed} <= {"active"}
    assert len(after.head.manifests) == len(before.head.manifests)
    for old, new in zip(before.head.manifests, after.head.manifests, strict=True):
        assert sum(after.wraps(new).values()) == sum(before.wraps(old).values())
        if not {old.key_id, *before.wraps(old)} & {e.key_id for e in before.keys.values() if e.state == "retired"}:
            assert new == old


@given(st.data())
def test_wrap_keks_again(data: st.DataObject) -> None:
    snapshot = data.draw(snapshots())
    asked, leaves = data.draw(rotations(snapshot, ("mek",))), data.draw(st.booleans())
    current = {entry.wrapped for entry in snapshot.keys.values() if entry.uses % 2}
    todo, rest = decide.rewrap_keks(snapshot.keys.values(), asked, lambda entry: entry.wrapped in current, leaves)
    doubles = [e for e in snapshot.keys.values() if e.double_wrap and (leaves or asked.concerns(e))]
    assert sorted(e.key_id for e in [*todo, *rest]) == sorted(e.key_id for e in doubles)
    assert all(e.wrapped in current and asked.master_of(e) == e.wrapping_key_id for e in rest)
    wrapped: dict[bytes | None, KeyEntry] = {}
    for old in todo:
        new = old.replace(wrapped=b"new " + (old.wrapped or b""), wrapping_key_id=asked.master_of(old))
        wrapped[old.wrapped] = new
    change = decide.Change(decide.put_in_wraps(todo, wrapped, NOW))
    check_step(snapshot.keys, change.keys)
    after = change.apply_to(snapshot, NOW)
    active_heirs = {key_id: heir for key_id, heir in heirs(snapshot.keys).items() if isinstance(heir, str)}
    assert heirs(after.keys).items() >= active_heirs.items()
    for old in todo:
        new = after.keys[old.key_id]
        assert new.wrapped == b"new " + (old.wrapped or b"")
        assert (new.state, new.uses, new.created_ms) == (old.state, old.uses, old.created_ms)
        assert new.properties.items() >= {REWRAPPED_MS: str(NOW)}.items()
        assert all(
            new.properties.get(name) == old.properties.get(name) for name in (SCOPE, SUCCESSOR, RETIRES_MS, "use")
        )
    new_wraps = {e.wrapped for e in after.keys.values() if e.key_id in {t.key_id for t in todo}} | current
    later = asked._replace(from_master=None, left=asked.master or asked.left)
    if not leaves and asked.from_master is None:
        assert decide.rewrap_keks(after.keys.values(), later, lambda e: e.wrapped in new_wraps, False)[0] == []


# ---------------------------------------------------------------------------------------------- (4) expiry


@given(st.data())
def test_expire_versions(data: st.DataObject) -> None:
    snapshot = data.draw(snapshots())
    keep, keep_ms = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([None, 0, 10 * DAY_MS, 1000 * DAY_MS]))
    change = decide.expire_versions(snapshot, keep, keep_ms, NOW)
    after = change.apply_to(snapshot, NOW)
    old = snapshot.versions[:-keep]
    kept = [version for version in old if keep_ms is not None and version.time_ms >= NOW - keep_ms]
    assert after.versions == (*kept, *snapshot.versions[-keep:])
    assert after.head == snapshot.head
    assert after.manifests().keys() == snapshot.manifests().keys() - {ref.path for ref in change.manifests}
    assert len({ref.path for ref in change.manifests}) == len(change.manifests)
    assert not decide.expire_versions(after, keep, keep_ms, NOW)


@settings(max_examples=150)
@given(st.data())
def test_expire_keys(data: st.DataObject) -> None:
    snapshot, force = data.draw(snapshots()), data.draw(st.booleans())
    unsure = data.draw(st.sets(st.sampled_from(sorted(snapshot.keys))))
    change = decide.expire_keys(snapshot, force, NOW, unsure)
    check_step(snapshot.keys, change.keys)
    after = change.apply_to(snapshot, NOW)
    needed = {key_id for job in snapshot.jobs for key_id in job.keys}
    scopes = {snapshot.keys[key_id].properties.get(SCOPE) for key_id in needed}
    for _ in snapshot.keys:  # a job that commits wraps by their heirs
        needed |= {snapshot.keys[key_id].properties.get(SUCCESSOR, "") for key_id in needed & snapshot.keys.keys()}
    needed = needed.union(*(snapshot.keys_of(version) for version in snapshot.versions))
    for key_id, entry in snapshot.keys.items():
        new = after.keys.get(key_id)
        if new is None:
            assert key_id not in needed
            assert SCOPE in entry.properties or entry.state == "retired"
            assert force or (entry.state == "retired" and NOW >= retires_ms(entry))
            assert entry.state == "retired" or entry.properties[SCOPE] not in scopes, "a job may be about to wrap by it"
            continue
        assert (new.uses, new.wrapped, new.wrapping_key_id) == (entry.uses, entry.wrapped, entry.wrapping_key_id)
        if new.state != entry.state:
            assert SCOPE in entry.properties
            assert key_id not in needed
            assert entry.created_ms < NOW - GRACE_MS
            assert retires_ms(new) == NOW + GRACE_MS
        assert (REWRAPPED_MS in new.properties) == (REWRAPPED_MS in entry.properties and key_id in unsure)
    assert change.stay.keys() == {i for i in after.keys if snapshot.keys[i].state == "retired"}
    left = {i for i in after.keys if REWRAPPED_MS in snapshot.keys[i].properties}
    assert set(change.checks) == left
    heirs_now = heirs(after.keys)
    for key_id, heir in heirs(snapshot.keys).items():
        if key_id in after.keys and heir in after.keys and after.keys[str(heir)].state == "active":
            assert heirs_now[key_id] == heir, "the way to the newest key goes on"
    assert not decide.expire_keys(after, force, NOW, unsure), "an expiry leaves nothing to do"


# ---------------------------------------------------------------------------------------------- (6) files


def file_entry(path: str, file: str) -> FileEntry:
    return FileEntry(path, file, "ags1", 0, 36, 4096, "k", b"", None, b"", "job", None, None, None, path, "")


@given(st.data())
def test_files_of_the_next_version(data: st.DataObject) -> None:
    """What other jobs have changed since a job has looked wins, path by path, or against the whole wish."""
    names = st.sampled_from(["a", "b", "b/1", "b/1/x", "b/2", "c"])
    base, now = (data.draw(st.dictionaries(names, st.sampled_from(["1", "2"]))) for _ in range(2))
    new = data.draw(st.dictionaries(names, st.sampled_from(["3", "4"])))
    for there in (base, now, new):  # no name is a file and a folder
        for path in [path for path in there if not there.keys().isdisjoint(folders_above(path))]:
            del there[path]
    gone = data.draw(st.sets(st.sampled_from(sorted(base)))) if base else set()
    wish = decide.Wish(
        "", "job", [file_entry(*item) for item in new.items()], [file_entry(path, base[path]) for path in gone],
        whole=data.draw(st.booleans()),
    )  # fmt: skip
    change = decide.next_version(wish, None, now)
    after = {path: file for path, file in now.items() if change.removes.get(path) != file}
    assert after.keys().isdisjoint(entry.path for entry in change.adds)
    after |= {entry.path: entry.file for entry in change.adds}
    assert all(after.keys().isdisjoint(folders_above(path)) for path in after), "a name is a file and a folder"
    old = {path: base[path] for path in gone}
    refused = {entry.path for entry in change.refused}
    for path in new.keys() | gone:
        ours = after.get(path) == new.get(path)
        assert ours or path in refused or (wish.whole and refused), "done, or told"
        assert not (ours and path in refused) or wish.whole
        if now.get(path) != old.get(path):
            assert after.get(path) == now.get(path), "the change of another job stays"
    assert {path: file for path, file in after.items() if path not in new.keys() | gone} == {
        path: file for path, file in now.items() if path not in new.keys() | gone
    }
    if wish.whole:
        assert not (refused and change)
    elif not refused:
        assert not decide.next_version(wish, None, after), "what is done is not done again"


# ---------------------------------------------------------------------------------------------- (5, 6) jobs that meet


class LostError(Exception):
    """Somebody else was first."""


class World:
    """Keys and versions in storage, and jobs as generators: each stops where others may act.

    The jobs make the steps of those in `ags_fast.jobs` and `ags_fast.dataset`, in the same order.
    """

    def __init__(self) -> None:
        first = kek(Want("a"), "first")
        self.now = NOW
        self.keys = {first.key_id: first}
        self.number = 1  # of the key store
        self.versions: tuple[Version, ...] = (Version(1, None, "", "", NOW, 0, 0, (), Policy(), "first"),)
        self.counts: dict[str, Mapping[str, int]] = {}
        self.plans: dict[str, frozenset[str]] = {}  # the keys that open jobs need
        self.planned: dict[str, Any] = {}  # the successors that open rotations put in
        self.wrapped: Counter[str] = Counter()  # DEKs that each key has wrapped, in versions that were committed
        self.removed: set[str] = set()
        self.unsettled = 0  # expiries that have removed keys, and have not looked yet whether somebody wants them
        self.names = numbers()

    # ---- storage

    def name(self) -> str:
        return f"n{next(self.names)}"

    def look(self) -> Snapshot:
        jobs = tuple(Job(job_id, keys) for job_id, keys in self.plans.items())
        return Snapshot(dict(self.keys), self.versions, jobs, dict(self.counts), self.number)

    def newest(self) -> Snapshot:
        return replace(self.look(), versions=self.versions[-1:])

    def swap(self, changes: Mapping[str, KeyEntry | None], number: int, *, restores: bool = False) -> None:
        if number != self.number:
            raise LostError
        check_step(self.keys, changes)
        assert restores or self.removed.isdisjoint(changes)
        for key_id, entry in changes.items():
            if entry is None:
                del self.keys[key_id]
                self.removed.add(key_id)
            else:
                self.keys[key_id] = entry
        self.number += bool(changes)

    def commit(self, head: Version | None, refs: list[TableRef], moved: Mapping[str, int], policy: Any = None) -> None:
        """A version after `head`. moved: the DEKs that were wrapped for it."""
        assert head is not None
        if head != self.versions[-1]:
            raise LostError
        sealer = decide.main_key(self.keys.values()).key_id
        self.versions += (Version(head.number + 1, head.number, "", "", self.now, 0, 0, tuple(refs),
                                  policy or head.policy, sealer),)  # fmt: skip
        self.wrapped.update(moved)

    def table(self, counts: Mapping[str, int]) -> TableRef:
        made = ref(f"m {self.name()}", counts, decide.main_key(self.keys.values()).key_id)
        self.counts[made.path] = counts
        return made

    # ---- steps of jobs

    def until_done(self, attempt: Callable[[], Steps]) -> Steps:
        while True:
            try:
                return (yield from attempt())
            except LostError:
                yield

    def change(self, decision: Callable[[Snapshot, Mapping[Want, KeyEntry]], Change]) -> Steps:
        """Look, decide, swap; and again when somebody else was first."""

        def attempt() -> Steps:
            snapshot = self.newest()
            yield
            made: dict[Want, KeyEntry] = {}
            change = decision(snapshot, made)
            while change.makes:
                made |= {want: kek(want, self.name(), self.now) for want in change.makes}
                yield
                change = decision(snapshot, made)
            self.swap(change.keys, snapshot.number)
            return snapshot, change

        return (yield from self.until_done(attempt))

    def add_uses(self, uses: Mapping[str, int]) -> Steps:
        def more(snapshot: Snapshot, made: Mapping[Want, KeyEntry]) -> Change:
            entries = {i: snapshot.keys[i] for i in uses if snapshot.keys[i].double_wrap}
            return decide.Change({i: entry.replace(uses=entry.uses + uses[i]) for i, entry in entries.items()})

        yield from self.change(more)

    def heir(self, key_id: str) -> Steps:
        found = decide.heir(self.keys, self.keys[key_id])
        if isinstance(found, KeyEntry):
            return found.key_id
        wants = {found: Uses()}
        _, change = yield from self.change(
            lambda now, made: decide.reserve(now.keys.values(), wants, Policy(), made, self.now)
        )
        return change.chosen[found].key_id

    # ---- jobs

    def write(self, job: str, paths: list[str], columns: Mapping[str, str]) -> Steps:
        """Encrypt files. Returns without a version if the policy forbids it, or if its keys are gone."""
        masters = [columns] * len(paths)

        def reserved(now: Snapshot, made: Mapping[Want, KeyEntry]) -> Change:
            main = decide.main_key(now.keys.values()).wrapping_key_id
            kinds[:], uses = decide.kinds_for_files(paths, masters, main, True, now.policy, job, self.now)
            return decide.reserve(now.keys.values(), uses, now.policy, made, self.now)

        kinds: list[list[Want]] = []
        try:
            _, change = yield from self.change(reserved)
        except PolicyError:
            return
        own = Counter(change.chosen[kind].key_id for each in kinds for kind in each)
        self.plans[job] = frozenset({*own, decide.main_key(self.keys.values()).key_id})
        yield

        def attempt() -> Steps:
            head = self.versions[-1]
            yield
            if not own.keys() <= self.keys.keys():
                return
            moves = {}
            for old in own:
                if (new := (yield from self.heir(old))) != old:
                    moves[old] = new
            if moves:
                yield from self.add_uses({new: own[old] for old, new in moves.items()})
            yield
            wraps = decide.moved_counts(own, moves)
            made = self.table(wraps)
            yield
            self.commit(head, [*head.manifests, made], wraps)

        yield from self.until_done(attempt)
        del self.plans[job]

    def rotate(self, job: str, asked: decide.Rotation, successors: Any = None) -> Steps:
        """Replace KEKs. successors: of a rotation that died, which is resumed."""
        counted: set[tuple[str, str]] = set()
        if successors is None:
            snapshot, made = self.newest(), dict[Want, KeyEntry]()
            change = decide.replace_keks(snapshot, asked, made, GRACE_MS, self.now)
            while change.makes:
                made |= {want: kek(want, self.name(), self.now) for want in change.makes}
                yield
                change = decide.replace_keks(snapshot, asked, made, GRACE_MS, self.now)
            counted, successors = decide.counted_moves(snapshot, change), change.successors
            yield
            main = decide.main_key(self.keys.values()).key_id
            self.plans[job] = frozenset({main, *(new.key_id for new in successors.values() if new)})
            self.planned[job] = successors
        yield
        yield from self.change(lambda now, _: decide.Change(decide.install(now.keys, successors, GRACE_MS, self.now)))

        def attempt() -> Steps:
            before, change = yield from self.change(lambda now, made: decide.rewrite_manifests(now, made, self.now))
            if not (change.rewrites or change.reseals):
                return
            yield
            uses: Counter[str] = Counter()
            refs, wraps = [], Counter[str]()
            for table in before.head.manifests:
                if table not in change.rewrites:
                    refs.append(table)
                    continue
                for old, number in before.wraps(table).items():
                    if old in change.moves:
                        wraps[change.moves[old]] += number
                        uses[change.moves[old]] += number if (table.path, old) not in counted else 0
                        counted.add((table.path, old))
                refs.append(self.table(decide.moved_counts(before.wraps(table), change.moves)))
            if +uses:
                yield from self.add_uses(+uses)
            yield
            self.commit(before.head, refs, wraps)

        yield from self.until_done(attempt)
        del self.plans[job], self.planned[job]

    def wrap_keks(self, asked: decide.Rotation) -> Steps:
        def again(now: Snapshot, made: Mapping[Want, KeyEntry]) -> Change:
            todo, _ = decide.rewrap_keks(now.keys.values(), asked, lambda entry: False, False)
            wrapped: dict[bytes | None, KeyEntry] = {
                e.wrapped: e.replace(wrapped=self.name().encode(), wrapping_key_id=asked.master_of(e)) for e in todo
            }
            return decide.Change(decide.put_in_wraps(todo, wrapped, self.now))

        yield from self.change(again)

    def expire(self, keep: int, keep_days: float | None, force: bool) -> Steps:
        keep_ms = None if keep_days is None else keep_days * DAY_MS
        for version in decide.expire_versions(self.look(), keep, keep_ms, self.now).versions:
            self.versions = tuple(v for v in self.versions if v != version)
            yield

        def attempt() -> Steps:
            before = self.look()  # the keys first, then the plans, then the versions
            yield
            jobs = self.look().jobs
            yield
            snapshot = replace(self.look(), keys=before.keys, jobs=jobs, number=before.number)
            change = decide.expire_keys(snapshot, force, self.now)
            yield
            self.swap(change.keys, snapshot.number)
            return snapshot, change

        snapshot, change = yield from self.until_done(attempt)
        self.unsettled += 1
        yield
        needed = {key_id for keys in self.plans.values() for key_id in keys}
        gone = {key_id for key_id, entry in change.keys.items() if entry is None}
        self.swap({key_id: snapshot.keys[key_id] for key_id in gone & needed}, self.number, restores=True)
        self.removed -= gone & needed
        self.unsettled -= 1

    def take_out(self, place: int) -> Steps:
        """Remove the files of one manifest, or all but one of each KEK."""

        def attempt() -> Steps:
            head = self.versions[-1]
            yield
            if head.manifests:
                old = head.manifests[place % len(head.manifests)]
                rest = [ref for ref in head.manifests if ref != old]
                left = {key_id: 1 for key_id, number in dict(old.keys or ()).items() if number > 1}
                made = [self.table(left)] if left else []
                yield
                self.commit(head, rest + made, {})

        yield from self.until_done(attempt)

    def compact(self, policy: Policy | None) -> Steps:
        """Merge the manifests, and lay down a policy."""

        def attempt() -> Steps:
            head = self.versions[-1]
            yield
            wraps = Counter[str]()
            for ref in head.manifests:
                wraps.update(dict(ref.keys or ()))
            made = [self.table(wraps)] if wraps else []
            yield
            self.commit(head, made, {}, policy)

        yield from self.until_done(attempt)


class Meeting(RuleBasedStateMachine):
    """Jobs begin, go on step by step, and die, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.jobs: dict[str, Steps] = {}

    @precondition(lambda self: len(self.jobs) < 4)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        world, job = self.world, f"job {next(self.world.names)}"
        what = data.draw(st.sampled_from(["write", "write", "rotate", "rotate", "mek", "expire", "remove", "compact"]))
        if what == "write":
            columns = data.draw(st.dictionaries(st.just("c"), st.sampled_from(["a", "hr"])))
            paths = data.draw(st.lists(st.sampled_from(["x/1", "y/1"]), min_size=1, max_size=2))
            self.jobs[job] = world.write(job, paths, columns)
        elif what == "rotate":
            self.jobs[job] = world.rotate(job, data.draw(rotations(world.look(), ("kek",))))
        elif what == "mek":
            self.jobs[job] = world.wrap_keks(data.draw(rotations(world.look(), ("mek",))))
        elif what == "expire":
            keep, days, force = data.draw(st.tuples(st.integers(1, 2), st.sampled_from([None, 3]), st.booleans()))
            self.jobs[job] = world.expire(keep, days, force)
        elif what == "remove":
            self.jobs[job] = world.take_out(data.draw(st.integers(0, 3)))
        else:
            self.jobs[job] = world.compact(data.draw(POLICIES))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), steps=st.integers(1, 12))
    def go_on(self, data: st.DataObject, steps: int) -> None:
        self.advance(data.draw(st.sampled_from(sorted(self.jobs))), steps)

    def advance(self, job: str, steps: int = 1000) -> None:
        for _ in range(steps):
            try:
                next(self.jobs[job])
            except StopIteration:
                del self.jobs[job]
                return
            self.check()
        assert steps < 1000, "it ends"

    @precondition(lambda self: self.jobs and not self.world.unsettled)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.jobs.pop(data.draw(st.sampled_from(sorted(self.jobs)))).close()

    @precondition(lambda self: self.world.plans.keys() - self.jobs.keys())
    @rule(data=st.data())
    def sweep_or_resume(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.world.plans.keys() - self.jobs.keys())))
        if job in self.world.planned and data.draw(st.booleans()):
            asked = decide.Rotation("kek", None, None, "a")
            self.jobs[job] = self.world.rotate(job, asked, self.world.planned[job])
        else:
            self.world.planned.pop(job, None)
            del self.world.plans[job]

    @rule(days=st.sampled_from([1, 8, 120]))
    def time_passes(self, days: int) -> None:
        self.world.now += days * DAY_MS

    @invariant()
    def check(self) -> None:
        world = self.world
        for entry in world.keys.values():
            assert entry.uses >= world.wrapped[entry.key_id] or not entry.double_wrap, "a count that is too low"
            at, seen = entry, set[str]()
            while at.state == "retired" and (follower := world.keys.get(at.properties.get(SUCCESSOR, ""))):
                assert at.key_id not in seen, "a circle"
                seen.add(at.key_id)
                at = follower
        if not world.unsettled:
            for version in world.versions:
                assert world.look().keys_of(version) <= world.keys.keys(), "files that nobody can open"

    def teardown(self) -> None:
        """What is left to do comes to an end, and then one rotation and one expiry leave nothing old."""
        for job in list(self.jobs):
            self.advance(job)
        self.world.plans.clear()
        left = decide.main_key(self.world.keys.values()).wrapping_key_id
        asked = decide.Rotation("kek", "last", None, left, True)
        self.jobs = {"rotate": self.world.rotate("rotate", asked), "expire": self.world.expire(1, None, True)}
        for job in list(self.jobs):
            self.advance(job)
        assert {entry.state for entry in self.world.keys.values()} == {"active"}
        assert left not in {entry.wrapping_key_id for entry in self.world.keys.values()}
        assert len(self.world.versions) == 1


TestMeeting = Meeting.TestCase
TestMeeting.settings = settings(max_examples=40, stateful_step_count=30)


# ---------------------------------------------------------------------------------------------- real datasets


def keys_of(dataset: Path, kms: dict[str, str]) -> tuple[dict[str, KeyEntry], Counter[str]]:
    """The keys of a dataset, and how many DEKs of the newest version each wraps."""
    opened = Ledger.open(dataset, load_kms(kms))
    return {entry.key_id: entry for entry in opened.keys.list()}, wrapped_by(opened.entries(opened.current()))


def test_a_rotation_counts_all_that_it_moves(tmp_path: Path) -> None:
    """Also DEKs of KEKs that had retired before, in favour of a KEK that the rotation leaves alone."""
    kms, dataset = make_kms(tmp_path, keys=(MASTER, "hr")), tmp_path / "dataset"
    for names, master, policy in (("abcde", MASTER, Policy(kek_uses=5)), ("f", MASTER, None), ("g", "hr", None)):
        src = write_tree(tmp_path / names, dict.fromkeys(names, b""))
        encrypt_files(src, dataset, kms=kms, wrapping_key_id=master, policy=policy, engine=HERE).raise_for_failures()
    rotate(dataset, kms=kms, from_key_id="hr").raise_for_failures()
    keys, wrapped = keys_of(dataset, kms)
    assert sorted(wrapped.values()) == [1, 6]
    assert all(keys[key_id].uses >= count for key_id, count in wrapped.items())


def test_a_rotation_seals_a_version_without_files(tmp_path: Path) -> None:
    """Nothing but its document needs the KEK that has leaked."""
    kms, dataset = make_kms(tmp_path), tmp_path / "dataset"
    src = write_tree(tmp_path / "src", {"a": b""})
    encrypt_files(src, dataset, kms=kms, wrapping_key_id=MASTER, engine=HERE).raise_for_failures()
    remove_files(dataset, "a", kms=kms)
    (leaked,) = keys_of(dataset, kms)[0]
    check_forecast(
        dataset,
        kms,
        lambda forecast: forecast.rotate("kek"),
        lambda **more: rotate(dataset, kms=kms, engine=HERE, **more),
    )
    expire(dataset, kms=kms, force=True)
    assert leaked not in keys_of(dataset, kms)[0]
    assert decrypted(dataset, kms) == {}


def test_a_dry_run_names_each_file_once(tmp_path: Path) -> None:
    """Also a file that several manifests have."""
    kms, dataset = make_kms(tmp_path), tmp_path / "dataset"
    for name in "ab":
        src = write_tree(tmp_path / name, {name: b""})
        encrypt_files(src, dataset, kms=kms, wrapping_key_id=MASTER, engine=HERE).raise_for_failures()
    remove_files(dataset, "a", kms=kms)
    check_forecast(dataset, kms, Forecast.expire, lambda **more: expire(dataset, kms=kms, **more))


def check_dataset(dataset: Path, kms: dict[str, str], tree: dict[str, bytes]) -> None:
    """All files open, no count is too low, and an audit finds nothing wrong."""
    assert decrypted(dataset, kms) == tree
    keys, wrapped = keys_of(dataset, kms)
    assert all(keys[key_id].uses >= n or not keys[key_id].double_wrap for key_id, n in wrapped.items())
    found = audit(dataset, kms=kms)
    assert found["unread"] == []
    holding = {entry.wrapping_key_id for entry in keys.values() if entry.state == "active" and entry.double_wrap}
    free = {row["wrapping_key_id"] for row in found["masters"] if row["may_be_destroyed"]}
    assert holding.isdisjoint(free)


def check_forecast(
    dataset: Path,
    kms: dict[str, str],
    foretell: Callable[[Forecast], Cost] | None,
    job: Callable[..., JobResult],
) -> None:
    """A dry run names what the job does, and changes nothing; and the job costs what was foretold."""
    opened = Ledger.open(dataset, load_kms(kms))
    cost = None if foretell is None else foretell(Forecast(Survey(opened)))
    before = keys_of(dataset, kms)[0]
    there = read_tree(dataset)
    planned = job(dry_run=True)
    assert read_tree(dataset) == there
    clear_cache()
    calls = kms_calls()
    result = job()
    result.raise_for_failures()
    made = kms_calls() - calls
    done = [row.src for row in result.rows if row.format not in ("keys", "chain") and row.status == "ok"]
    assert sorted(done) == sorted(row.src for row in planned.rows if row.status == "planned")
    assert [row.src for row in result.rows if row.status == "skipped"] == [
        row.src for row in planned.rows if row.status == "skipped"
    ]
    if cost is None:
        return
    assert {operation: n for (_, operation), n in made.items()} == +cost.calls
    after = keys_of(dataset, kms)[0]
    assert len([i for i in before | after if before.get(i) != after.get(i)]) == cost.keks
    now = read_tree(dataset)
    for kind, folder in (("manifests", "_ags/manifests/"), ("versions", "_ags/versions/")):
        gone = [path for path in there if path.startswith(folder) and now.get(path, TOMBSTONE) == TOMBSTONE]
        assert len([path for path in gone if there[path] != TOMBSTONE]) == cost.removed[kind]
    assert (
        len([path for path in now if path.startswith("_ags/manifests/") and path not in there])
        == (cost.written["manifests"])
    )


def run_some_job(data: st.DataObject, folder: Path, kms: dict[str, str], tree: dict[str, bytes]) -> None:
    """One job on the dataset in `folder`."""
    dataset = folder / "dataset"
    access: dict[str, Any] = {"kms": kms}
    what = data.draw(st.sampled_from(["encrypt", "kek", "mek", "double-wrap", "expire", "rekey", "remove", "compact"]))
    if what == "encrypt":
        number = len(list(folder.glob("src*")))
        new = {f"{name}/{number}": bytes(number) for name in data.draw(st.sampled_from(["x", "xy"]))}
        options: dict[str, Any] = {"engine": HERE, "fsync": False, "progress": False, **access}
        options["double_wrap"] = data.draw(st.sampled_from([True, True, False]))
        options["wrapping_key_id"] = main_master(dataset, kms)
        try:
            encrypt_files(write_tree(folder / f"src{number}", new), dataset, **options).raise_for_failures()
        except PolicyError:
            return
        tree |= new
    elif what in ("kek", "mek", "double-wrap"):
        master = data.draw(st.sampled_from([None, None, "second", MASTER])) if what != "mek" else None
        if what == "mek":
            local.rotate_key(kms, main_master(dataset, kms))
        documents = data.draw(st.booleans())
        asked: dict[str, Any] = {"documents": documents}
        check_forecast(
            dataset,
            kms,
            lambda forecast: forecast.rotate(what, master=master, **asked),
            lambda **more: rotate(dataset, what=what, wrapping_key_id=master, engine=HERE, **asked, **access, **more),
        )
    elif what == "expire":
        keep, force = data.draw(st.integers(1, 2)), data.draw(st.booleans())
        check_forecast(
            dataset,
            kms,
            lambda forecast: forecast.expire(keep=keep, force=force),
            lambda **more: expire(dataset, keep=keep, force=force, **access, **more),
        )
    elif what == "rekey":
        try:
            check_forecast(
                dataset,
                kms,
                lambda forecast: forecast.rekey(),
                lambda **more: rekey_files(dataset, engine=HERE, fsync=False, progress=False, **access, **more),
            )
        except PolicyError:
            return
    elif what == "remove" and len(tree) > 1:
        path = data.draw(st.sampled_from(sorted(tree)))
        check_forecast(dataset, kms, None, lambda **more: remove_files(dataset, path, **access, **more))
        del tree[path]
    else:
        check_forecast(dataset, kms, None, lambda **more: compact(dataset, **access, **more))


def main_master(dataset: Path, kms: dict[str, str]) -> str:
    return decide.main_key(keys_of(dataset, kms)[0].values()).wrapping_key_id


@settings(max_examples=5)
@given(st.data())
def test_jobs_do_what_was_decided(data: st.DataObject) -> None:
    run_jobs(data, 8)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_many_jobs_do_what_was_decided(data: st.DataObject) -> None:
    run_jobs(data, 20)


def run_jobs(data: st.DataObject, most: int) -> None:
    with TemporaryDirectory() as name:
        folder, tree = Path(name), {"x/0": b"one"}
        kms = make_kms(folder, keys=(MASTER, "second"))
        options: dict[str, Any] = {"policy": data.draw(POLICIES), "double_wrap": data.draw(st.booleans())}
        src = write_tree(folder / "src0", tree)
        options |= {"engine": HERE, "progress": False, "fsync": False}
        encrypt_files(src, folder / "dataset", kms=kms, wrapping_key_id=MASTER, **options).raise_for_failures()
        for _ in range(data.draw(st.integers(3, most))):
            run_some_job(data, folder, kms, tree)
            check_dataset(folder / "dataset", kms, tree)
