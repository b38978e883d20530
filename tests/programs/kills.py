"""Jobs and rotations, killed before each step or at random moments: what is left, and its resumption."""

from __future__ import annotations

import functools
import itertools
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

from datasets import (
    HERE,
    MASTER,
    decrypted,
    kept_numbers,
    leftovers,
    read_tree,
    rows_of,
    version_of,
    write_tree,
)
from killing import Moments, ended, fork, killed_before_steps
from support import pattern

from ags_fast import AgsError, PolicyError
from ags_fast.fs import NewFile, Store
from ags_fast.jobs import (
    JobResult,
    LocalEngine,
    Policy,
    encrypt_files,
    expire,
    rekey_files,
    rotate,
    rotation,
    sweep,
    verify_files,
)
from ags_fast.keys.kms import local

Tree = dict[str, bytes]
PLACES: list[tuple[Any, str]] = [
    *((Store, name) for name in ("create_exclusive", "delete", "lock", "sweep")),
    (NewFile, "publish"),
    *((os, name) for name in ("link", "replace", "unlink")),
]


def copy_over(base: Path, dataset: Path) -> None:
    """The dataset as it was before."""
    shutil.rmtree(dataset, ignore_errors=True)
    if base.exists():
        shutil.copytree(base, dataset)


def check_nothing_left(dataset: Path, kms: dict[str, str], about: object) -> None:
    """Whoever took up what was killed has left nothing, but small objects: what lay beside a plan that never was or is
    gone already, and documents in the making."""
    plans = dataset / "_ags/plans"
    left = [path for path in leftovers(dataset, kms) if not path.startswith("_ags/plans/")]
    assert [path for path in left if not (path.startswith("_ags/") and path.endswith(".agstmp"))] == [], (about, left)
    assert list(plans.glob("*/plan*")) == [], about
    sweep(dataset, kms=kms)
    assert leftovers(dataset, kms) == [] == os.listdir(plans), about
    swept = sweep(dataset, kms=kms).rows
    assert swept == [], (about, swept)


def check_verified(dataset: Path, kms: dict[str, str], files: int, about: object) -> JobResult:
    checked = verify_files(dataset, kms=kms, engine=HERE, progress=False)
    assert checked.counts == {"ok": files, "skipped": 0, "failed": 0}, (about, checked.rows)
    return checked


# ---------------------------------------------------------------- jobs


def kill_job_at_steps(folder: Path, op: str, kms: dict[str, str]) -> None:
    """Prints the number of the job's steps that touch storage."""
    src, dataset, first = folder / "src", folder / "dataset", folder / "first"
    old: Tree = {"a": b"1" * 3000, "b/c": b"2", "b/d": b""}
    new: Tree = {**old, "b/c": b"22", "e/f": b"3" * 1000}
    encrypting: Any = {"kms": kms, "engine": HERE, "progress": False, "wrapping_key_id": MASTER, "block_size": 1024}

    def job(resume: Any = None) -> None:
        if op == "rekey":
            done = rekey_files(dataset, kms=kms, engine=HERE, progress=False, resume=resume)
        else:
            done = encrypt_files(src, dataset, overwrite=True, resume=resume, **encrypting)
        done.raise_for_failures()

    if op != "create":
        write_tree(src, old)
        assert ended(fork(lambda: encrypt_files(src, first, **encrypting))) == 0
    if op != "rekey":
        write_tree(src, new)
    states: dict[str, tuple[Tree, Tree]] = {"create": ({}, new), "encrypt": (old, new), "rekey": (old, old)}
    before, after = states[op]
    for step, _ in killed_before_steps(job, PLACES, prepare=lambda: copy_over(first, dataset)):
        try:
            found = decrypted(dataset, kms)
        except FileNotFoundError:
            assert op == "create", step
            assert step < 10, step
            found = {}
        assert found in (before, after), step
        if op != "create":
            assert decrypted(dataset, kms, version=2) == before
        assert ended(fork(functools.partial(job, "verify" if step % 2 else "length"))) == 0, step
        assert decrypted(dataset, kms) == after, step
        check_nothing_left(dataset, kms, step)
        check_verified(dataset, kms, len(after), step)
    assert read_tree(src) == (old if op == "rekey" else new)
    print(step)


def change_some(src: Path, tree: Tree, rng: random.Random, name: str) -> Tree:
    """The tree with a new file, and others that change; also in the folder."""
    new = {name: pattern(rng.randrange(30_000), len(tree))}
    for path in rng.sample(sorted({**tree, **new}), 5):
        new[path] = pattern(rng.randrange(30_000), rng.randrange(1 << 30))
    write_tree(src, new)
    return {**tree, **new}


def newest(dataset: Path, kms: dict[str, str]) -> int:
    return version_of(dataset, kms).entry.number


def kill_jobs_at_random(folder: Path, kms: dict[str, str], rounds: int, seed: int) -> None:
    """Prints how many jobs were killed."""
    rng = random.Random(seed)
    src, dataset = folder / "src", folder / "dataset"
    tree = {f"{n % 3}/{n:02}": pattern(rng.randrange(60_000), n) for n in range(30)}
    write_tree(src, tree)

    def job(op: str, resume: str | None = None, workers: int = 2) -> None:
        common: Any = {"kms": kms, "engine": LocalEngine(workers), "progress": False, "resume": resume}
        if op == "rekey":
            done = rekey_files(dataset, **common)
        else:
            options: Any = {"wrapping_key_id": MASTER, "block_size": 4096, "overwrite": True}
            done = encrypt_files(src, dataset, **options, **common)
        if not workers:
            done.raise_for_failures()

    begun = time.monotonic()
    assert ended(fork(lambda: job("encrypt"))) == 0
    moments = Moments(rng, time.monotonic() - begun)
    for n in range(rounds):
        old, base = tree, newest(dataset, kms)
        op = rng.choice(["encrypt", "rekey"])
        if op == "encrypt":
            tree = change_some(src, tree, rng, f"new/{n}")
        resume = None
        for _ in range(rng.choice([1, 1, 1, 3])):  # and kill what takes it up, too
            done = moments.kill(functools.partial(job, op, resume), group=rng.random() < 0.7)
            resume = rng.choice(["length", "verify"])
            found = decrypted(dataset, kms)
            assert found in (old, tree), (seed, n)
            assert newest(dataset, kms) >= base + (found != old), (seed, n)
            if done:
                break
        if not done:  # whoever takes it up leaves nothing
            assert ended(fork(functools.partial(job, op, "length", 0))) == 0, (seed, n)
            check_nothing_left(dataset, kms, (seed, n))
        assert decrypted(dataset, kms) == tree, (seed, n)
        sweep(dataset, kms=kms)
        assert leftovers(dataset, kms) == [], (seed, n, leftovers(dataset, kms))
    check_verified(dataset, kms, len(tree), seed)
    assert read_tree(src) == tree
    print(moments.killed)


# ---------------------------------------------------------------- rotations

ROTATION_PLACES = [*PLACES, (Store, "write_small")]


class Rotations:
    """A dataset whose keys change, between two KMS.

    Args:
        folder: Has the dataset, and the sources.
        kms: Where its KEKs are.
        there: Where they can go.
    """

    def __init__(self, folder: Path, kms: dict[str, str], there: dict[str, str]) -> None:
        rotation.BATCH = 1  # each KEK has an entry of its own, as if there were thousands
        self.folder, self.dataset, self.kms, self.there = folder, folder / "dataset", kms, there

    def encrypt(self, src: Path, dataset: Path, **options: Any) -> None:
        options = {"kms": self.kms, "engine": HERE, "progress": False, **options}
        try:
            encrypt_files(src, dataset, wrapping_key_id=MASTER, **options).raise_for_failures()
        except PolicyError:  # a rotation has left that key
            encrypt_files(src, dataset, wrapping_key_id="other", **options).raise_for_failures()

    def opens(self, kms: dict[str, str]) -> bool:
        try:
            return version_of(self.dataset, kms) is not None
        except AgsError:
            return False

    def states(self) -> set[str]:
        return {key.state for key in version_of(self.dataset, self.kms).entry.keys.values()}

    def follow(self) -> bool:
        """Use the other KMS from now on, if the KEKs are there."""
        if not self.opens(self.there):
            return False
        self.kms, self.there = self.there, self.kms
        return True


FIRST: Tree = {"a/0": b"0", "a/1": b"1" * 3000, "b/2": b"", "b/3": b"3" * 500}
MORE: Tree = {"b/4": b"4", "c/5": b"5" * 1500}


class Stepped(Rotations):
    """One rotation or expiry, killed before each of its steps."""

    def __init__(self, folder: Path, kms: dict[str, str], there: dict[str, str], op: str) -> None:
        super().__init__(folder, kms, there)
        self.op = op
        double_wrap = op not in ("single", "double-wrap")
        write_tree(folder / "src", FIRST)
        write_tree(folder / "more", MORE)
        self.encrypt(folder / "src", self.dataset, double_wrap=double_wrap, policy=Policy(kek_scope="partition"))
        self.encrypt(folder / "more", self.dataset, double_wrap=double_wrap)
        if op in ("expire", "force"):
            rekey_files(self.dataset, kms=kms, engine=HERE, paths="a/*").raise_for_failures()
            rotate(self.dataset, kms=kms).raise_for_failures()
            rotate(self.dataset, kms=kms, what="mek", wrapping_key_id="other").raise_for_failures()
        local.rotate_key(kms, MASTER)
        local.rotate_key(kms, "other")
        self.files = self.data()
        self.newest = newest(self.dataset, kms)
        self.old_keys = set(version_of(self.dataset, kms).entry.keys)
        self.places = (kms, there)
        self.dataset.rename(folder / "base")

    def data(self) -> Tree:
        return {path: data for path, data in read_tree(self.dataset).items() if not path.startswith("_ags/")}

    def prepare(self) -> None:
        self.kms, self.there = self.places
        copy_over(self.folder / "base", self.dataset)

    def job(self) -> None:
        dataset, kms = self.dataset, self.kms
        if self.op in ("expire", "force"):
            expire(dataset, kms=kms, keep=1, skip_grace=self.op == "force")
        elif self.op == "forced":
            done = rotate(dataset, kms=kms, force_expire=True)
            done.raise_for_failures()
            assert done.expired is not None
            done.expired.raise_for_failures()
        elif self.op == "move":
            if kms is self.places[0]:  # else it was done, but for the plan
                rotate(dataset, kms=kms, what="mek", new_kms=self.there, wrapping_key_id="third").raise_for_failures()
        else:
            what: Any = "kek" if self.op == "single" else self.op
            rotate(dataset, kms=kms, what=what).raise_for_failures()

    def read(self, step: int) -> list[int]:
        """Each version, with its files."""
        numbers = kept_numbers(self.dataset, self.kms)
        for number in numbers:
            tree = ({}, FIRST)[number - 1] if number < 3 else {**FIRST, **MORE}
            assert decrypted(self.dataset, self.kms, version=number) == tree, (step, number)
        return numbers

    def check(self, step: int) -> None:
        """After the same call has finished what was begun."""
        sweep(self.dataset, kms=self.kms)  # the plan of what was killed, where nobody takes it up
        if self.op in ("force", "forced"):  # that plan had reserved KEKs
            expire(self.dataset, kms=self.kms, keep=1, skip_grace=True)
        check_nothing_left(self.dataset, self.kms, step)
        numbers = self.read(step)
        log, head = version_of(self.dataset, self.kms)
        rows = rows_of(self.dataset, self.kms).values()
        if self.op in ("expire", "force", "forced"):
            assert all(entry.files == head.files for entry in log.kept(head)), (step, numbers)
            assert head.number >= self.newest, step
            assert self.data() == {row.file: self.files[row.file] for row in rows}, step
            assert self.op == "expire" or "retired" not in self.states(), step
        else:
            assert self.data() == self.files, step
        if self.op in ("kek", "single", "double-wrap", "forced"):
            active = {key_id for key_id, key in head.keys.items() if key.state == "active"}
            for row in rows:
                assert set(row.key_ids()) <= active, step
                assert row.key_id not in self.old_keys, step
                assert head.keys[row.key_id].double_wrap == (self.op != "single"), step
            assert head.key_ids() <= active, step
        if self.op in ("mek", "move"):
            version = ("third", "1") if self.op == "move" else (MASTER, "2")
            for key in head.keys.values():
                assert log.version_of(key) == version, step
        check_verified(self.dataset, self.kms, len(FIRST) + len(MORE), step)


def kill_rotation_at_steps(
    folder: Path, kms: dict[str, str], there: dict[str, str], op: str, first: int, stride: int
) -> None:
    """Prints how many were killed, and the last step."""
    stepped = Stepped(folder, kms, there, op)
    steps = killed_before_steps(stepped.job, ROTATION_PLACES, prepare=stepped.prepare, first=first, stride=stride)
    killed = -1
    for step, _ in steps:
        killed += 1
        if op == "move":
            stepped.follow()
        stepped.read(step)
        assert ended(fork(stepped.job)) == 0, step
        if op == "move" and stepped.kms is stepped.places[0]:
            assert stepped.follow(), step
        stepped.check(step)
    print(killed, step)


class Moving(Rotations):
    """Jobs of all kinds one after another, killed at some moment, while this process reads all the time."""

    OPS = ("append", "rekey", "kek", "mek", "double-wrap", "expire", "force", "move")
    MASTERS = (MASTER, "other")

    def __init__(self, folder: Path, kms: dict[str, str], there: dict[str, str], seed: int) -> None:
        super().__init__(folder, kms, there)
        self.seed, self.rng = seed, random.Random(seed)
        self.moments = Moments(self.rng)
        self.tree = {f"{n % 3}/{n}": os.urandom(self.rng.randrange(3000)) for n in range(8)}
        self.begin()
        for properties, master in itertools.product((kms, there), self.MASTERS):
            local.rotate_key(properties, master)

    def begin(self) -> None:
        """A new dataset of the tree."""
        shutil.rmtree(self.folder / "src", ignore_errors=True)
        shutil.rmtree(self.dataset, ignore_errors=True)
        src = write_tree(self.folder / "src", self.tree)
        self.encrypt(src, self.dataset, policy=Policy(kek_scope="partition", keep=4))

    def read(self, *allowed: Tree) -> None:
        """What is there now. A version that goes while it is read makes way for a newer one, a KMS for the other."""
        while True:
            number = None
            try:
                number = newest(self.dataset, self.kms)
                found = decrypted(self.dataset, self.kms)
            except (AgsError, FileNotFoundError):
                if self.opens(self.there):
                    return
                if number is None or newest(self.dataset, self.kms) == number:
                    raise
                continue
            assert found in allowed, sorted(found)
            return

    def job(self, op: Any, n: int) -> None:
        dataset, here = self.dataset, self.kms
        common: Any = {"kms": here, "progress": False}
        if op == "append":
            self.encrypt(self.folder / f"src {n}", dataset, double_wrap=n % 3 > 0, resume="verify")
        elif op == "rekey":
            rekey_files(dataset, **common, engine=HERE, paths="0/*", resume="length").raise_for_failures()
        elif op == "kek":
            rotate(dataset, **common, wrapping_key_id=self.MASTERS[n % 2]).raise_for_failures()
        elif op == "expire":
            expire(dataset, kms=here, keep=1 + n % 2, force=True).raise_for_failures()
        elif op == "force":
            rotate(dataset, **common, force_expire=True).raise_for_failures()
        elif op != "move":
            rotate(dataset, **common, what=op).raise_for_failures()
        elif self.opens(here):
            rotate(dataset, **common, what="double-wrap", force_expire=True).raise_for_failures()
            expire(dataset, kms=here, keep=1, skip_grace=True, force=True)
            rotate(dataset, **common, what="mek", new_kms=self.there).raise_for_failures()

    def round(self, n: int) -> None:
        op = self.rng.choice(self.OPS)
        after = dict(self.tree)
        if op == "append":
            new = {f"{m % 3}/{n} {m}": b"%d %d" % (n, m) for m in range(2)}
            write_tree(self.folder / f"src {n}", new)
            after |= new
        if op == "mek":
            for master in self.MASTERS:
                local.rotate_key(self.kms, master)
        for _ in range(self.rng.choice([1, 1, 1, 3])):  # and what takes it up is killed, too
            done = self.moments.kill(lambda: self.job(op, n), op, meanwhile=lambda: self.read(self.tree, after))
            if op == "move" and self.follow():
                break
            self.read(self.tree, after)
            if done:
                break
        assert ended(fork(lambda: self.job(op, n))) == 0 or op == "move", (self.seed, n, op)
        if op == "move":
            self.follow()
        self.tree = after
        self.read(after)
        if len(self.tree) > 30:  # it would get slower and slower
            self.tree = {path: data for path, data in self.tree.items() if self.rng.random() < 0.3}
            self.begin()

    def check(self, about: object) -> None:
        sweep(self.dataset, kms=self.kms)
        for number in kept_numbers(self.dataset, self.kms):
            decrypted(self.dataset, self.kms, version=number)
        assert leftovers(self.dataset, self.kms) == [], about


def kill_rotations_at_random(folder: Path, kms: dict[str, str], there: dict[str, str], wanted: int, seed: int) -> None:
    """Prints how many jobs were killed."""
    moving = Moving(folder, kms, there, seed)
    for n in itertools.count(1):
        moving.round(n)
        if n % 5 == 0:
            moving.check((seed, n))
        if moving.moments.killed >= wanted:
            break
    check_verified(moving.dataset, moving.kms, len(moving.tree), seed)
    sweep(moving.dataset, kms=moving.kms)  # plans of dead jobs reserve KEKs
    expire(moving.dataset, kms=moving.kms, keep=1, skip_grace=True, force=True)
    moving.check(seed)
    assert "retired" not in moving.states(), seed
    moving.read(moving.tree)
    print(moving.moments.killed)
