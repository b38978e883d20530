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
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, MASTER, make_kms, write_tree
from hypothesis import given
from hypothesis import strategies as st

from ags_fast.dataset import decide
from ags_fast.dataset.entries import wrapped_by
from ags_fast.dataset.keks import GRACE_MS, Uses, Want
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.policy import DAY_MS, MAX_USES, Policy
from ags_fast.dataset.snapshot import Job, Snapshot
from ags_fast.dataset.tables import TableRef, named_keys
from ags_fast.dataset.versions import Version
from ags_fast.errors import PolicyError
from ags_fast.jobs import encrypt_files, rotate
from ags_fast.keys import load_kms
from ags_fast.keys.entry import COLUMNS, RETIRES_MS, REWRAPPED_MS, SCOPE, SUCCESSOR, KeyEntry, retires_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from ags_fast.dataset.decide import Change

pytest.importorskip("pyarrow")

NOW = 1_800_000_000_000
MASTERS = ("a", "b", "c")
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
    assert (after.head != before.head) == bool(change.rewrites)
    needed = {ref.key_id for ref in after.head.manifests} | after.used().keys()
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


@given(st.data())
def test_expire_keys(data: st.DataObject) -> None:
    snapshot, force = data.draw(snapshots()), data.draw(st.booleans())
    unsure = data.draw(st.sets(st.sampled_from(sorted(snapshot.keys))))
    change = decide.expire_keys(snapshot, force, NOW, unsure)
    check_step(snapshot.keys, change.keys)
    after = change.apply_to(snapshot, NOW)
    needed = {key_id for job in snapshot.jobs for key_id in job.keys}
    needed = needed.union(*(snapshot.keys_of(version) for version in snapshot.versions))
    for key_id, entry in snapshot.keys.items():
        new = after.keys.get(key_id)
        if new is None:
            assert key_id not in needed
            assert SCOPE in entry.properties or entry.state == "retired"
            assert force or (entry.state == "retired" and NOW >= retires_ms(entry))
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
