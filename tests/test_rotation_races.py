"""Rotations, expiries and writers at once. Each runs in a thread that stops before every step in storage, and goes on
when it is told: so an interleaving is chosen, by a test or by a seed, and happens again. None may undo what another has
done, and all must succeed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, MASTER, decrypted, leftovers, make_kms, write_tree
from support import pattern

from ags_fast.dataset.access import Access
from ags_fast.dataset.entry import Entry
from ags_fast.dataset.names import entry_number
from ags_fast.dataset.sealed import Document, decoded
from ags_fast.errors import ConcurrentChangeError, ExpiredError, PolicyError
from ags_fast.fs import Store
from ags_fast.jobs import (
    JobResult,
    Policy,
    encrypt_files,
    expire,
    rekey_files,
    remove_files,
    rotate,
    set_policy,
    sweep,
    verify_files,
)
from ags_fast.keys import load_kms
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ags_fast.dataset.snapshot import Snapshot
    from ags_fast.keys.entry import KeyEntry

pytest.importorskip("pyarrow")

TREE = {f"{n % 2}/{n}": pattern(300 * n, n) for n in range(4)}
STEPS = ("create_exclusive", "write_small", "delete", "list", "read_small", "open_seekable")  # of a Store
CHANGING = "1/1"  # the file of them that gets other contents
QUIET: dict[str, Any] = {"engine": HERE, "progress": False}
PATIENCE = 60.0  # seconds for a step that takes some milliseconds


# ---------------------------------------------------------------------------------------------- actors


class _DeadError(BaseException):
    pass


class Actor:
    """Work in a thread of its own, which waits before each step in storage, `next`, until it is told to go."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.next: tuple[str, str] | None = ("begin", "")  # what it is about to do; None: it has ended
        self.result: Any = None
        self.error: BaseException | None = None
        self._dead = False
        self._work = work
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        _here.actor = self
        try:
            self.result = self._work()
        except _DeadError:
            self.error = _DeadError()  # without the frames, and the locks that they hold
        except BaseException as error:
            self.error = error
        self.next = None
        self._stopped.release()

    def stop_before(self, operation: str, path: str) -> None:
        self.next = operation, path
        self._stopped.release()
        self._go.acquire()
        if self._dead:
            raise _DeadError

    def step(self) -> None:
        """Let it do what it is about to do, and all until it is about to touch storage again."""
        self._go.release()
        assert self._stopped.acquire(timeout=PATIENCE), f"it hangs at {self.next}"

    def until(self, operation: str, path: str) -> Actor:
        """Run it until it is about to do this, to a path that the pattern matches."""
        while self.next is not None and not (self.next[0] == operation and re.match(path, self.next[1])):
            self.step()
        assert self.next is not None, f"it never came to {operation} {path}, {self.error!r}"
        return self

    def die(self) -> None:
        """It does no more, and holds nothing."""
        self._dead = True
        while self.next is not None:
            self.step()
        assert isinstance(self.error, _DeadError)

    def finish(self) -> Any:
        """Run it to its end; its result, or what it raises."""
        while self.next is not None:
            self.step()
        if self.error is not None:
            raise self.error
        if isinstance(self.result, JobResult):
            self.result.raise_for_failures()
        return self.result


_here = threading.local()


class Journal:
    """The entries that were created, in this order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def note(self, path: str, content: bytes) -> None:
        if entry_number(path):
            entry = decoded(Document.parse(content, path).text, Entry, path)
            # Who slept may create a number again that was expired and removed: nobody reads that.
            if not self.entries or entry.number >= self.entries[-1].first:
                self.entries.append(entry)

    def check(self, kms: Any) -> None:
        """Numbers go up by one, no key comes back, and none falls back to an older master key."""
        client = load_kms(kms)
        numbers = [entry.number for entry in self.entries]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        gone: set[str] = set()
        before: dict[str, KeyEntry] = {}
        for entry in self.entries:
            now = dict(entry.keys)
            assert not entry.key_tables  # else not all keys were looked at
            gone |= before.keys() - now.keys()
            assert gone.isdisjoint(now), entry.operation
            for key_id, key in now.items():
                old = before.get(key_id, key)
                assert (old.state, key.state) != ("retired", "active")
                if old.wrapped and key.wrapped and old.wrapping_key_id == key.wrapping_key_id:
                    was, is_now = (int(client.key_version(wrap) or 0) for wrap in (old.wrapped, key.wrapped))
                    assert was <= is_now
            before = now


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    """Has the threads of actors stop at each step, and takes down what was created."""
    made = Journal()

    def stopping(operation: str) -> Any:
        function = getattr(Store, operation)

        def call(self: Store, path: str = "", *args: Any, **options: Any) -> Any:
            actor = getattr(_here, "actor", None)
            if actor is not None:
                actor.stop_before(operation, path)
            result = function(self, path, *args, **options)
            if operation == "create_exclusive":
                made.note(path, args[0])
            return result

        return call

    for operation in STEPS:
        monkeypatch.setattr(Store, operation, stopping(operation))
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # nobody pulls the plug here
    monkeypatch.setenv("AGS_FAST_THREADS", "1")  # so that an actor does all its steps itself
    return made


# ---------------------------------------------------------------------------------------------- what they do


class World:
    """A dataset, what is done to it, and what must be true of it whatever was done."""

    def __init__(self, folder: Path, kms: dict[str, str], journal: Journal) -> None:
        self.folder, self.kms, self.journal = folder, kms, journal
        self.dataset = folder / "dataset"
        self.appended: dict[str, bytes] = {}
        self.changed = {TREE[CHANGING]}  # what may be in that file
        self.perhaps: dict[str, bytes] = {}  # what somebody was adding who died

    def append(self, name: str, **options: Any) -> Actor:
        tree = {f"{name}/{n}": f"{name} {n}".encode() for n in range(2)}
        src = write_tree(self.folder / f"src {name}", tree)
        options = {**QUIET, "wrapping_key_id": MASTER, "block_size": 4096, **options}

        def work() -> JobResult:
            try:
                result = encrypt_files(src, self.dataset, kms=self.kms, **options)
            except _DeadError:
                self.perhaps |= tree
                raise
            if not result.failed:
                self.appended |= tree
            return result

        return Actor(work)

    def overwrite(self, name: str) -> Actor:
        src = write_tree(self.folder / f"src {name}", {CHANGING: name.encode()})
        options: dict[str, Any] = {**QUIET, "wrapping_key_id": MASTER, "block_size": 4096, "overwrite": True}

        def work() -> JobResult:
            try:
                result = encrypt_files(src, self.dataset, kms=self.kms, **options)
            except _DeadError:
                self.changed |= {name.encode()}
                raise
            if not result.failed:
                self.changed = {*self.changed, name.encode()} - {TREE[CHANGING]}
            return result

        return Actor(work)

    def rotate(self, what: Any, **options: Any) -> Actor:
        def work() -> JobResult:
            if what == "mek":
                local.rotate_key(self.kms, MASTER)
            return rotate(self.dataset, kms=self.kms, what=what, progress=False, **options)

        return Actor(work)

    def expire(self, **options: Any) -> Actor:
        return Actor(lambda: expire(self.dataset, kms=self.kms, keep=1, force=True, **options))

    def rekey(self) -> Actor:
        return Actor(lambda: rekey_files(self.dataset, kms=self.kms, paths="0/*", **QUIET))

    def sweep(self) -> Actor:
        return Actor(lambda: sweep(self.dataset, kms=self.kms))

    def read(self) -> Actor:
        """Somebody who reads the newest version."""

        def work() -> None:
            found = decrypted(self.dataset, self.kms)
            assert TREE.keys() <= found.keys()

        return Actor(work)

    def act(self, name: str) -> Actor:
        """One by its name."""
        kind, _, number = name.partition(" ")
        return {
            "append": lambda: self.append(f"append{number}"),
            "overwrite": lambda: self.overwrite(f"other {number}"),
            "policy": lambda: Actor(lambda: set_policy(self.dataset, Policy("partition", keep=2), kms=self.kms)),
            "kek": lambda: self.rotate("kek"),
            "mek": lambda: self.rotate("mek"),
            "move": lambda: self.rotate("kek", wrapping_key_id="other"),
            "forced": lambda: self.rotate("kek", force_expire=True),
            "double": lambda: self.rotate("double-wrap"),
            "expire": lambda: self.expire(),
            "force": lambda: self.expire(skip_grace=True),
            "rekey": self.rekey,
            "sweep": self.sweep,
            "read": self.read,
        }[kind]()

    def opened(self) -> Snapshot:
        return Access.of(self.dataset, self.kms).open()

    def keys(self, *states: str) -> list[KeyEntry]:
        return [key for key in self.opened().entry.keys.values() if key.state in states]

    def used(self) -> set[str]:
        """The keys that the newest version needs for its files."""
        return set[str]().union(*(row.key_ids() for row in self.opened().files()))

    def tables(self) -> set[str]:
        """The names of all tables that are there."""
        return {path.name for path in (self.dataset / "_ags/tables").iterdir()}

    def check(self, died: bool = False) -> None:
        """All files of all that was appended are there, and every version opens; what a rotation retired is not in
        use; nothing is left over."""
        self.journal.check(self.kms)
        sweep(self.dataset, kms=self.kms)
        if died:  # maybe a rotation, which somebody has to do for it
            rotate(self.dataset, kms=self.kms, progress=False).raise_for_failures()
        log, head = self.opened()
        for entry in reversed(log.kept(head)):
            found = decrypted(self.dataset, self.kms, version=entry.number)
            last = found.get(CHANGING, b"")
            assert found.items() <= (TREE | self.appended | self.perhaps | {CHANGING: last}).items()
        assert found.items() >= (TREE | self.appended | {CHANGING: last}).items()
        assert last in self.changed
        assert self.used() | {table.key_id for table in head.files} <= {key.key_id for key in self.keys("active")}
        assert leftovers(self.dataset, self.kms) == []
        checked = verify_files(self.dataset, kms=self.kms, **QUIET)
        assert checked.counts == {"ok": len(found), "skipped": 0, "failed": 0}
        # And then whatever is retired can go.
        expire(self.dataset, kms=self.kms, keep=1, skip_grace=True, force=True)
        assert self.keys("retired") == []
        assert decrypted(self.dataset, self.kms) == found
        assert leftovers(self.dataset, self.kms) == []


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, Path]]:
    """A KMS, and datasets of two versions, to be copied."""
    folder = tmp_path_factory.mktemp("template")
    kms = make_kms(folder, keys=(MASTER, "other"))
    one = write_tree(folder / "one", {path: data for path, data in TREE.items() if path != "1/3"})
    two = write_tree(folder / "two", {"1/3": TREE["1/3"]})
    datasets = {name: folder / name for name in ("double", "single", "scopes")}
    for name, dataset in datasets.items():
        policy = Policy("partition", keep=4) if name == "scopes" else None
        for src in (one, two):
            options: dict[str, Any] = {
                **QUIET,
                "wrapping_key_id": MASTER,
                "double_wrap": name != "single",
                "policy": policy,
            }
            encrypt_files(src, dataset, kms=kms, **options).raise_for_failures()
    return kms, datasets


@pytest.fixture
def world(tmp_path: Path, templates: Any, journal: Journal) -> World:
    return made_world(tmp_path, templates, journal)


def made_world(folder: Path, templates: Any, journal: Journal, name: str = "double") -> World:
    kms, datasets = templates
    shutil.copytree(datasets[name], folder / "dataset")
    return World(folder, kms, journal)


LOG, TABLE, PLAN = (rf"_ags/{name}/" for name in ("log", "tables", "plans"))


# ---------------------------------------------------------------------------------------------- one in another's gap


def test_an_append_between_load_and_commit_of_a_rotation(world: World) -> None:
    """The rotation sees that it is late, and takes the new files along."""
    (old,) = world.keys("active")
    rotation = world.rotate("kek").until("create_exclusive", LOG)
    world.append("new").finish()
    assert rotation.finish().version == 5
    assert old.key_id not in world.used()
    world.check()


def test_an_append_before_the_keys_are_replaced(world: World) -> None:
    append = world.append("new").until("create_exclusive", LOG)
    rotation = world.rotate("kek").until("create_exclusive", LOG)
    append.finish()
    assert rotation.finish().version == 5
    world.check()


def test_a_rotation_between_load_and_commit_of_an_append(world: World) -> None:
    """Who has planned under the old key wraps anew what he has, before he commits."""
    append = world.append("new").until("create_exclusive", LOG)
    world.rotate("kek").finish()
    (new,) = world.keys("active")
    assert append.finish().version == 5
    assert world.used() == {new.key_id}
    world.check()


def test_a_move_of_master_keys_while_an_append_is_under_way(world: World) -> None:
    append = world.append("new").until("create_exclusive", LOG)
    world.rotate("mek", wrapping_key_id="other").finish()
    append.finish()
    assert {key.wrapping_key_id for key in world.keys("active", "retired")} == {"other"}
    world.check()


def test_two_rotations_with_the_same_plan(world: World) -> None:
    """Both make a KEK; the KEK of the first one retires with nothing under it."""
    one = world.rotate("kek").until("create_exclusive", PLAN)
    two = world.rotate("kek").until("create_exclusive", LOG)
    one.finish()
    two.finish()
    world.check()


def test_a_rotation_that_lost_three_times(world: World) -> None:
    rotation = world.rotate("kek").until("create_exclusive", LOG)
    for n in range(3):
        world.append(f"new{n}").finish()
        rotation.step()
        rotation.until("create_exclusive", LOG)
    assert rotation.finish().version == 7
    world.check()


def test_master_keys_while_keks_are_replaced(world: World) -> None:
    """Both change the same KEK: neither change is lost."""
    mek = world.rotate("mek").until("create_exclusive", LOG)
    world.rotate("kek").finish()
    mek.finish()
    client = load_kms(world.kms)
    keys = world.keys("active", "retired")
    assert {key.state for key in keys} == {"active", "retired"}
    assert len({client.key_version(key.wrapped) for key in keys if key.wrapped}) == 1
    world.check()


def test_an_expiry_while_an_append_is_under_way(world: World) -> None:
    append = world.append("new").until("create_exclusive", LOG)
    world.expire(skip_grace=True).finish()
    append.finish()
    world.check()


def test_a_key_that_leaves_before_an_append_has_its_plan(world: World) -> None:
    """What was wrapped under it is wrapped again."""
    append = world.append("new").until("create_exclusive", PLAN)
    world.rotate("kek", force_expire=True).finish()
    assert len(world.keys("active", "retired")) == 1
    append.finish()
    world.check()


def planned_under_a_key_that_leaves(world: World) -> Actor:
    """An append whose plan an expiry has not seen yet when it lets the key of that plan go."""
    append = world.append("new").until("create_exclusive", PLAN)
    (old,) = world.keys("active")
    world.rotate("kek").finish()
    world.expire().finish()  # so that only the entry by which the key leaves is to come
    expiry = world.expire(skip_grace=True).until("create_exclusive", LOG)
    append.until("create_exclusive", LOG)
    assert any((world.dataset / "new").iterdir())
    expiry.finish()
    assert old.key_id not in {key.key_id for key in world.keys("active", "retired")}
    return append


def test_a_key_that_leaves_after_an_append_has_its_plan(world: World) -> None:
    """The append has its KEK in memory, and wraps under another one."""
    planned_under_a_key_that_leaves(world).finish()
    world.check()


def test_what_a_job_leaves_whose_key_has_left(world: World) -> None:
    planned_under_a_key_that_leaves(world).die()
    world.check(died=True)
    assert not any((world.dataset / "new").iterdir())


def test_such_a_job_is_begun_anew(world: World) -> None:
    planned_under_a_key_that_leaves(world).die()
    result = world.append("new", resume="verify").finish()
    assert result.counts["ok"] == 2
    world.check(died=True)


def test_an_expiry_leaves_the_key_of_an_open_job(world: World) -> None:
    append = world.append("new").until("create_exclusive", LOG)
    world.rotate("kek").finish()
    (old,) = world.keys("retired")
    rows = world.expire(skip_grace=True).finish().rows
    assert [(row.src, row.error_class) for row in rows if row.status == "skipped"] == [(old.key_id, "InUse")]
    append.finish()
    world.check()


def test_tables_of_one_that_died_while_another_runs(world: World) -> None:
    """Their names say whose they are, so the other's plan is no reason to keep them."""
    one, other = world.append("one"), world.append("other")
    one.until("create_exclusive", LOG)
    other.until("create_exclusive", LOG)
    tables = world.tables()
    one.die()
    world.append("one", resume="length").finish()
    left = world.tables()
    assert len({name.rpartition("-")[0] for name in tables - left}) == 1  # those of the commit that never was
    two = world.append("two").until("create_exclusive", LOG)
    two.die()
    world.sweep().finish()
    assert world.tables() == left
    other.finish()
    world.check(died=True)


def test_an_expiry_before_the_rotation_commits(world: World) -> None:
    rotation = world.rotate("kek").until("create_exclusive", LOG)
    world.expire(skip_grace=True).finish()
    rotation.finish()
    world.check()


def test_a_reader_while_keys_are_replaced(world: World) -> None:
    """The version that it has begun to read stays."""
    readers = [world.read().until(*what) for what in (("read_small", LOG), ("open_seekable", TABLE))]
    world.rotate("kek").finish()
    world.rotate("mek").finish()
    for reader in readers:
        reader.finish()
    world.check()


@pytest.mark.parametrize("options", [{}, {"wrapping_key_id": "other"}], ids=["old key", "new key"])
def test_a_commit_under_the_number_of_a_version_that_has_expired(world: World, options: dict[str, str]) -> None:
    append = world.append("new", **options).until("create_exclusive", LOG)
    world.append("another").finish()
    world.rotate("kek").finish()
    world.expire().finish()
    assert world.opened().entry.first > 4  # the number that the append tries first
    append.finish()
    world.check()


def test_a_key_that_a_version_has_come_to_need(tmp_path: Path, templates: Any, journal: Journal) -> None:
    """A job plans and commits after an expiry has read what needs keys, and before the expiry removes an idle key."""
    world = made_world(tmp_path, templates, journal, "scopes")
    world.append("new", overwrite=True).finish()
    remove_files(world.dataset, "new/*", kms=world.kms)
    world.expire().finish()
    append = world.append("new").until("create_exclusive", PLAN)
    expiry = world.expire(skip_grace=True).until("create_exclusive", LOG)
    append.finish()
    expiry.finish()
    assert decrypted(world.dataset, world.kms) == TREE | world.appended
    world.rotate("kek").finish()
    world.check()


def test_a_sweep_after_an_expiry_that_died(world: World) -> None:
    """It finishes what was begun: the versions are gone, and so are their files."""
    world.rekey().finish()
    expiry = world.expire().until("delete", "0/")
    expiry.die()
    world.sweep().finish()
    assert leftovers(world.dataset, world.kms) == []
    world.check()


def test_two_expiries(world: World) -> None:
    world.rekey().finish()
    world.rotate("kek").finish()
    two = world.expire(skip_grace=True).until("create_exclusive", LOG)
    one = world.expire(skip_grace=True).until("delete", "[01]/")
    two.until("open_seekable", TABLE)
    one.finish()
    two.finish()
    world.check()


def test_an_append_that_began_two_rotations_ago(world: World) -> None:
    """What was moved to another master key is not moved back."""
    append = world.append("new").until("create_exclusive", LOG)
    world.rotate("kek", wrapping_key_id="other").finish()
    world.rotate("kek").finish()
    world.expire(skip_grace=True).finish()
    append.finish()
    assert {key.wrapping_key_id for key in world.keys("active")} == {"other"}
    world.check()


def test_a_rotation_that_died_long_ago(world: World) -> None:
    """The version that it made has expired, and so have the keys: the next rotation does not look for them."""
    set_policy(world.dataset, Policy(kek_scope="partition"), kms=world.kms)
    world.rekey().finish()
    dead = world.rotate("kek", grace=timedelta(0)).until("create_exclusive", LOG)
    dead.step()  # which is the commit
    dead.die()
    world.append("new").finish()
    world.expire(skip_grace=True).finish()
    world.rotate("kek").finish()
    world.check()


def single(world: World, templates: Any) -> None:
    """The dataset in single wrap in the place of the other."""
    shutil.rmtree(world.dataset)
    shutil.copytree(templates[1]["single"], world.dataset)


def test_two_rotations_of_data_keys_that_the_kms_wraps(world: World, templates: Any) -> None:
    """What one has had wrapped for its own new key is of no use under the other's."""
    single(world, templates)
    move = world.rotate("kek", wrapping_key_id="other").until("create_exclusive", PLAN)
    double = world.rotate("double-wrap").until("create_exclusive", LOG)
    move.finish()
    double.finish()
    world.check()


def test_a_version_that_expires_while_it_is_opened(world: World) -> None:
    """Who has listed it and comes to read it takes the next."""
    readers = [world.read().until(*what) for what in (("read_small", LOG), ("open_seekable", TABLE))]
    late = [world.expire().until("read_small", LOG), world.rotate("kek").until("read_small", LOG)]
    world.append("new").finish()
    world.rotate("kek", force_expire=True).finish()
    for actor in (readers[0], *late):
        actor.finish()
    with contextlib.suppress(ExpiredError):
        readers[1].finish()
    world.check()


@pytest.mark.parametrize("who", ["kek", "append", "overwrite", "rekey"])
def test_a_job_whose_version_expires_while_it_is_read(world: World, who: str) -> None:
    """It does the newer one instead, or says that somebody was faster; never that something is damaged."""
    actor = world.act(who).until("open_seekable", TABLE)
    world.rotate("kek", force_expire=True).finish()
    with contextlib.suppress(ConcurrentChangeError, ExpiredError):
        actor.finish()
    world.check()


def test_a_rotation_of_a_version_that_expires(world: World) -> None:
    """Its tables are gone: those of the newer version are done instead."""
    rotation = world.rotate("kek").until("create_exclusive", TABLE)
    world.rotate("kek", force_expire=True).finish()
    rotation.finish()
    world.check()


def test_a_rotation_whose_new_key_is_needed_no_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one has done the same meanwhile, while two tables were copied."""
    monkeypatch.setattr("ags_fast.dataset.tables.RATIO", 0)
    world.append("new").finish()
    assert len(world.opened().entry.files) > 1
    rotation = world.rotate("kek").until("create_exclusive", TABLE)
    rotation.step()
    rotation.until("create_exclusive", TABLE)
    other = world.rotate("kek").until("create_exclusive", LOG)
    rotation.finish()
    other.finish()
    world.check()


# ---------------------------------------------------------------------------------------------- any order


def interleaved(world: World, names: list[str], rng: random.Random, dies: str = "", after: int = 0) -> None:
    """Run them to their ends, a step of this one and a step of that one. dies: this one does, after so many steps."""
    actors = {f"{name} {n}": world.act(f"{name} {n}") for n, name in enumerate(names)}
    stay = rng.choice([0.0, 0.5, 0.9, 0.97])  # how likely whoever is at it goes on
    trail: list[str] = []
    name = ""
    while alive := sorted(name for name, actor in actors.items() if actor.next is not None):
        if name not in alive or rng.random() >= stay:
            name = rng.choice(alive)
        trail.append(f"{name}: {' '.join(actors[name].next or ())}")
        if name == dies and len(trail) >= after:
            trail[-1] += ", and dies"
            actors[name].die()
        else:
            actors[name].step()
    told = "\n".join(trail)
    names_of = {name.split()[0] for name in actors}
    for name, actor in actors.items():
        rewrites = name.split()[0] in ("rekey", "overwrite")
        # It has done nothing, and says so: also if the master key that it names was left meanwhile.
        left = "move" in names_of and name.split()[0] in ("append", "overwrite")
        late = (_DeadError, ConcurrentChangeError, *[ExpiredError] * rewrites, *[PolicyError] * left)
        assert actor.error is None or isinstance(actor.error, late), f"{name}: {actor.error!r}\n{told}"
        if isinstance(actor.result, JobResult):
            errors = {row.error_class for row in actor.result.failed}
            assert errors <= ({"ConcurrentChangeError"} if rewrites else set()), f"{name}: {errors}\n{told}"
    try:
        world.check(died=bool(dies))
    except BaseException as error:
        error.add_note(told)
        raise


ACTS = ["append", "overwrite", "rekey", "kek", "mek", "move", "double", "forced", "force", "expire", "policy", "sweep"]
PAIRS = ["kek kek", "kek mek", "mek mek", "kek expire", "append expire", "rekey kek", "append forced", "forced kek"]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("pair", PAIRS)
def test_two(tmp_path: Path, templates: Any, journal: Journal, pair: str, seed: int) -> None:
    interleaved(made_world(tmp_path, templates, journal), pair.split(), random.Random(f"{pair} {seed}"))


@pytest.mark.parametrize("seed", range(3))
def test_three(tmp_path: Path, templates: Any, journal: Journal, seed: int) -> None:
    three(tmp_path, templates, journal, seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_of_three(tmp_path: Path, templates: Any, journal: Journal) -> None:
    first = 100 if os.environ.get("CI") else random.SystemRandom().randrange(1 << 30)
    for seed in range(first, first + 50):
        (tmp_path / str(seed)).mkdir()
        three(tmp_path / str(seed), templates, journal, seed)


def three(folder: Path, templates: Any, journal: Journal, seed: int) -> None:
    rng = random.Random(seed)
    names = rng.choices(ACTS, k=3)
    if {"forced", "expire", "force", "policy"}.isdisjoint(names) and rng.random() < 0.5:
        names.append("read")
    journal.entries.clear()
    world = made_world(folder, templates, journal, rng.choice(["double", "single", "scopes"]))
    try:
        if seed % 2:  # one of them dies
            interleaved(world, names, rng, f"{names[0]} 0", rng.randrange(100))
        else:
            interleaved(world, names, rng)
    except BaseException as error:
        error.add_note(f"seed {seed}: {', '.join(names)}")
        raise
