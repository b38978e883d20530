"""Jobs over files: encrypt, rekey, remove, decrypt, verify, read one file."""

from __future__ import annotations

import io
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, QUIET, read_tree, replace_keks, row_of, write_tree
from kms_clients import keystore
from support import flip

pytest.importorskip("msgspec")

from ags_fast.dataset import names, reach
from ags_fast.dataset.change import Wish
from ags_fast.dataset.dataset import Dataset
from ags_fast.dataset.draft import Idle
from ags_fast.dataset.job import Job
from ags_fast.dataset.keys import writer_name
from ags_fast.dataset.log import Log
from ags_fast.dataset.policy import Policy
from ags_fast.errors import ConcurrentChangeError, ExpiredError, JobEndedError, KeyAccessError, PolicyError
from ags_fast.fs import Store
from ags_fast.fs.base import Entry
from ags_fast.jobs import (
    copy_file,
    decrypt_files,
    decryption,
    encrypt_files,
    open_file,
    rekey_files,
    remove_files,
    verify_files,
)
from ags_fast.jobs.results import JobError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ags_fast.jobs.results import JobResult

TREE = {"a": b"1", "b/c": b"22" * 700, "b/d e": b"", "z": b"333"}


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return keystore(tmp_path, MASTER, "other")


class World:
    """A source, a dataset, and jobs in this process."""

    def __init__(self, folder: Path, kms: dict[str, str]) -> None:
        self.src, self.url, self.kms = folder / "src", folder / "ds", kms

    def encrypt(self, tree: Mapping[str, bytes] | None = None, **options: Any) -> JobResult:
        write_tree(self.src, {} if tree is None else tree)
        return encrypt_files(
            self.src, self.url, kms=self.kms, **{"wrapping_key_id": MASTER, "fsync": False, **QUIET, **options}
        )

    def log(self) -> Log:
        return Dataset.open(self.url, kms=self.kms).snapshot().log

    def files(self, version: int | None = None) -> dict[str, bytes]:
        dataset = Dataset.open(self.url, kms=self.kms, version=version)
        return {file.path: dataset.open_file(file.path).read() for file in dataset.files()}

    def swept(self) -> list[str]:
        return reach.sweep(self.log(), Idle(), 0)

    def rekey(self, **options: Any) -> JobResult:
        return rekey_files(self.url, kms=self.kms, **{"fsync": False, **QUIET, **options})

    def verify(self, **options: Any) -> JobResult:
        return verify_files(self.url, kms=self.kms, **QUIET, **options)

    def begun(self, op: str = "encrypt", after: int = 2, **options: Any) -> str:
        """Begin a job that dies after so many files. Returns its id."""
        before = self.plans()
        rows: list[object] = []

        def stop(more: list[object]) -> None:
            rows.extend(more)
            if len(rows) >= after:
                raise StopIteration

        with pytest.raises(StopIteration):
            (self.encrypt if op == "encrypt" else self.rekey)(progress=stop, **options)
        (job_id,) = self.plans() - before
        return job_id

    def plans(self) -> set[str]:
        plans = self.log().plans() if (self.url / "_ags/log").exists() else {}
        return {plan_id for plan_id, sign in plans.items() if sign.of is None}

    def scopes(self) -> dict[str, set[str]]:
        """The files that share a KEK, by its scope."""
        snapshot, found = Dataset.open(self.url, kms=self.kms).snapshot(), dict[str, set[str]]()
        for row in snapshot.files():
            found.setdefault(snapshot.entry.keys[row.key_id].properties.get("scope", ""), set()).add(row.path)
        return found

    def object(self, path: str) -> Path:
        return self.url / Dataset.open(self.url, kms=self.kms).snapshot().file(path).file


@pytest.fixture
def world(tmp_path: Path, kms: dict[str, str]) -> World:
    return World(tmp_path, kms)


def test_round_trip(world: World, tmp_path: Path) -> None:
    done = world.encrypt(TREE)
    done.raise_for_failures()
    assert (done.version, done.counts["ok"]) == (2, 4)
    assert world.files() == TREE
    back = tmp_path / "back"
    decrypt_files(world.url, back, kms=world.kms, **QUIET).raise_for_failures()
    assert read_tree(back) == TREE
    checked = verify_files(world.url, kms=world.kms, **QUIET)
    assert checked.counts == {"ok": 4, "skipped": 0, "failed": 0}
    assert checked.extra_files == 0
    target = io.BytesIO()
    copy_file(world.url, "b/c", target, kms=world.kms)
    assert target.getvalue() == open_file(world.url, "b/c", kms=world.kms).read() == TREE["b/c"]
    assert world.swept() == []


# ---------------------------------------------------------------------------------------------------------- encryption


def test_unchanged_changed_and_new_sources(world: World) -> None:
    world.encrypt(TREE).raise_for_failures()
    assert world.encrypt().counts == {"ok": 0, "skipped": 4, "failed": 0}
    assert world.log().head().number == 2
    with pytest.raises(FileExistsError, match="'a' from sources that have changed"):
        world.encrypt({"a": b"changed"})
    done = world.encrypt({"new": b"4"}, overwrite=True)
    assert done.counts == {"ok": 2, "skipped": 3, "failed": 0}
    assert world.files() == TREE | {"a": b"changed", "new": b"4"}
    assert world.files(2) == TREE
    assert world.swept() == []


def test_nothing_is_made_for_a_source_without_files(world: World) -> None:
    assert world.encrypt({"_SUCCESS": b""}).version is None
    assert not world.url.exists()
    assert world.encrypt(TREE, dry_run=True).counts == {"ok": 0, "skipped": 1, "failed": 0, "planned": 4}
    assert not world.url.exists()
    with pytest.raises(ValueError, match="name its master key"):
        world.encrypt(wrapping_key_id=None)


@pytest.mark.parametrize("odd", ["2026/1//x", "./x", "b/../x", "/x", "a/below"])
def test_an_odd_source_is_a_failed_row(world: World, monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    """An object store may have such names. No job may plan what no job can read."""

    def with_odd(store: Store) -> Any:
        listed, left_out = original(store)
        return ([*listed, Entry(odd, 1, "stamp", 0.0)], left_out) if store.url == str(world.src) else (listed, left_out)

    original = type(Store(world.src)).list_all
    monkeypatch.setattr(type(Store(world.src)), "list_all", with_odd)
    done = world.encrypt(TREE)
    assert done.counts == {"ok": 4, "skipped": 0, "failed": 1}
    assert done.failed[0].error_class == "PolicyError"
    assert world.files() == TREE
    held = world.encrypt({"more": b"1"}, aad_prefix="t.{n}")
    assert {row.error_class for row in held.failed} == {"PolicyError", "IncompleteSetError"}
    assert world.log().head().number == 2


def test_a_path_below_a_file_of_the_dataset_is_a_failed_row(world: World) -> None:
    world.encrypt(TREE).raise_for_failures()
    (world.src / "a").unlink()
    (world.src / "b/c").unlink()
    (world.src / "b/d e").unlink()
    (world.src / "b").rmdir()
    done = world.encrypt({"a/x": b"1", "b": b"2", "c": b"3"})
    assert {row_of(done, path).error_class for path in ("a/x", "b")} == {"PolicyError", "ConcurrentChangeError"}
    assert world.files() == TREE | {"c": b"3"}
    assert world.verify().extra_files == 0
    assert world.swept() == []


def test_a_source_that_changes_fails_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    will_write = Job.will_write

    def then(job: Job, rows: Any) -> None:
        will_write(job, rows)
        (world.src / "a").write_bytes(b"longer than before")
        (world.src / "z").unlink()

    monkeypatch.setattr(Job, "will_write", then)
    done = world.encrypt(TREE, delete_sources=True)
    assert {row_of(done, path).error_class for path in ("a", "z")} == {"SourceChangedError", "FileNotFoundError"}
    assert world.files() == {path: TREE[path] for path in ("b/c", "b/d e")}
    assert (world.src / "b/c").exists()  # no source is deleted if one fails
    assert world.swept() == []


def test_sources_are_deleted_when_they_were_read_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.encrypt(TREE).raise_for_failures()
    world.encrypt({"more": b"1"}, delete_sources=True).raise_for_failures()
    assert read_tree(world.src) == {}
    commit = Job.commit

    def damage(job: Job, wish: Wish) -> Any:
        for row in wish.add:
            (world.url / row.file).write_bytes(bytes(row.file_length))
        return commit(job, wish)

    monkeypatch.setattr(Job, "commit", damage)
    done = world.encrypt({"bad": b"1", "good": b"2"}, delete_sources=True)
    assert done.counts["failed"] == 2
    assert read_tree(world.src) == {"bad": b"1", "good": b"2"}


def test_scopes_of_keks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.encrypt(TREE, policy=Policy(kek_scope="writer")).raise_for_failures()
    world.encrypt({"more": b"1"}).raise_for_failures()
    assert world.scopes() == {f"writer:{writer_name()}": {*TREE, "more"}}  # a process is one writer
    writer_name.cache_clear()
    world.encrypt({"other": b"1"}).raise_for_failures()
    assert world.scopes()[f"writer:{writer_name()}"] == {"other"}
    job = world.encrypt({"c/1": b"", "c/2": b"", "c/3": b""}, policy=Policy(kek_scope="files:2"))
    scopes = world.scopes()
    assert [len(scopes[f"files:{job.job_id}/{n}"]) for n in (0, 1)] == [2, 1]
    world.rekey(paths="b/*", double_wrap=None).raise_for_failures()
    world.encrypt({"p/1": b"", "q/1": b""}, policy=Policy(kek_scope="partition")).raise_for_failures()
    assert world.scopes()["partition:p"] == {"p/1"}
    assert len(world.files()) == 11


def test_a_fork_is_another_writer() -> None:
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, writer_name().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1000).decode() not in ("", writer_name())


def test_a_policy_is_laid_down_without_files_too(world: World) -> None:
    world.encrypt(TREE, policy=Policy(keep=3)).raise_for_failures()
    assert world.log().head().policy == Policy(keep=3)
    done = world.encrypt(policy=Policy(keep=1, kek_lifetime_days=7))
    assert (done.version, world.log().head().policy.keep) == (3, 1)
    assert done.expired is not None
    assert world.log().head().first == 2  # version 3 has the files of version 2


# ---------------------------------------------------------------------------------------------------- numbered sets


def test_a_numbered_set_is_whole_or_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(world.src, TREE)
    (world.src / "broken").symlink_to("/proc/self/mem")
    done = world.encrypt(aad_prefix="t.{n}", links="follow")
    assert row_of(done, "a").error_class == "IncompleteSetError"
    assert world.files() == {}
    (world.src / "broken").unlink()
    (world.src / "broken").write_bytes(b"mended")
    again = world.encrypt(aad_prefix="t.{n}", resume="length")
    again.raise_for_failures()
    assert again.job_id == done.job_id
    snapshot = Dataset.open(world.url, kms=world.kms).snapshot()
    assert sorted((row.aad_prefix, row.part, row.parts) for row in snapshot.files()) == [
        (b"t.%d" % n, n, 5) for n in range(5)
    ]
    assert snapshot.entry.sets == {done.job_id: 5}
    world.encrypt({"a": b"changed"}, overwrite=True).raise_for_failures()
    world.rekey(paths="z").raise_for_failures()
    assert world.log().head().sets == {done.job_id: 5}  # their numbers are those before
    assert world.verify().failed == []
    remove_files(world.url, "a", kms=world.kms)
    assert world.log().head().sets == {}
    assert world.verify().failed == []


def test_a_member_that_a_version_lacks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.encrypt(TREE, aad_prefix="t.{n}").raise_for_failures()
    monkeypatch.setattr("ags_fast.dataset.job.whole_sets", lambda sets, removed, added: dict(sets))
    remove_files(world.url, "a", kms=world.kms)
    (row,) = world.verify().failed
    assert (row.error_class, row.error is not None and "part 0 of the 4 files" in row.error) == ("IntegrityError", True)


def test_a_set_that_another_job_has_cut_across_is_dropped_whole(world: World) -> None:
    world.encrypt({"first": b"1"}).raise_for_failures()
    write_tree(world.src, TREE)

    def meanwhile(rows: object) -> None:
        monkey.append(rows)
        if len(monkey) == 1:
            other = World(world.url.parent / "2", world.kms)
            other.url = world.url
            other.encrypt({"a": b"theirs"}).raise_for_failures()

    monkey: list[object] = []
    with pytest.raises(ConcurrentChangeError, match="'a'"):
        world.encrypt(aad_prefix="t.{n}", progress=meanwhile)
    assert world.files() == {"first": b"1", "a": b"theirs"}
    assert world.plans() == set()
    assert world.swept() == []


# ---------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("op", ["encrypt", "rekey"])
@pytest.mark.parametrize("resume", ["length", "verify"])
def test_resume(world: World, op: str, resume: str) -> None:
    write_tree(world.src, TREE)
    if op == "rekey":
        world.encrypt().raise_for_failures()
    job_id = world.begun(op)
    finished = {path: data for path, data in read_tree(world.url).items() if job_id in path.rpartition("/")[2]}
    finished = {path: data for path, data in finished.items() if not path.startswith("_ags/")}
    assert len(finished) == 2
    done = (world.encrypt if op == "encrypt" else world.rekey)(resume=resume)
    done.raise_for_failures()
    assert (done.job_id, done.counts["ok"]) == (job_id, 4)
    assert finished.items() <= read_tree(world.url).items()
    assert world.files() == TREE
    assert world.swept() == []
    assert not [path for path in read_tree(world.url) if path.startswith("_ags/plans/")]


def test_resume_of_what_has_changed_and_twice(world: World) -> None:
    write_tree(world.src, TREE)
    job_id = world.begun()
    (world.src / "z").unlink()
    for n in range(3):
        write_tree(world.src, {"a": b"changed" * n, f"new {n}": b"x"})
        rows: list[object] = []

        def stop(more: list[object], rows: list[object] = rows) -> None:
            rows.extend(more)
            if len(rows) >= 2:
                raise StopIteration

        with pytest.raises(StopIteration):
            world.encrypt(resume="verify", progress=stop)
    done = world.encrypt(resume="length")
    done.raise_for_failures()
    assert done.job_id == job_id
    assert world.files() == {
        "a": b"changedchanged", **{path: TREE[path] for path in ("b/c", "b/d e")}, "new 0": b"x", "new 1": b"x",
        "new 2": b"x",
    }  # fmt: skip
    assert world.swept() == []


def test_a_set_with_other_members_is_another_job(world: World) -> None:
    write_tree(world.src, TREE)
    job_id = world.begun(aad_prefix="t.{n}")
    done = world.encrypt({"more": b"1"}, aad_prefix="t.{n}", resume="length")
    done.raise_for_failures()
    assert done.job_id != job_id
    assert world.log().head().sets == {done.job_id: 5}
    assert world.swept() == []


def test_two_go_on_with_one_job(world: World) -> None:
    """Where the storage has no locks, both do. The log lets one commit, and the other one has the same answer."""
    write_tree(world.src, TREE)
    job_id = world.begun()
    seen: list[JobResult] = []

    def meanwhile(rows: object) -> None:
        if not seen:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(Store(world.url)), "is_locked", lambda store, path: None)
                patch.setattr(type(Store(world.url)), "lock", lambda store, path: None)
                seen.append(world.encrypt(resume="length"))

    done = world.encrypt(resume="length", progress=meanwhile)
    assert {done.job_id, seen[0].job_id} == {job_id}
    assert done.version == seen[0].version
    assert done.failed == seen[0].failed == []
    assert world.files() == TREE
    assert world.swept() == []


def test_a_job_that_died_after_its_commit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.encrypt(TREE).raise_for_failures()
    with monkeypatch.context() as patch:
        patch.setattr(Job, "_end", lambda job, head: job.release())
        done = world.rekey()
    (job_id,) = world.plans()
    assert done.job_id == job_id
    again = world.rekey(resume="length")
    assert (again.job_id, again.version, again.counts["ok"]) == (job_id, done.version, 4)
    assert world.plans() == set()
    assert world.swept() == []


def test_a_job_that_a_sweep_has_ended(world: World) -> None:
    def sweep(rows: object) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reach, "is_dead", lambda *args: True)
            world.swept()

    with pytest.raises(JobEndedError):
        world.encrypt(TREE, progress=sweep)
    assert world.files() == {}
    world.swept()
    assert not [path for path in read_tree(world.url) if not path.startswith("_ags/log/")]


@pytest.mark.parametrize("error", [OSError("no answer"), KeyAccessError("refused")])
def test_an_error_at_the_commit_keeps_what_was_written(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("ags_fast.dataset.job.main_key", fail)
        with pytest.raises(type(error)):
            world.encrypt(TREE)
    (job_id,) = world.plans()
    assert world.encrypt(resume="length").job_id == job_id
    assert world.files() == TREE


def test_plans_that_cannot_be_read_stop_no_other_job(world: World) -> None:
    write_tree(world.src, TREE)
    good = world.begun()
    bad = world.begun()
    path = world.url / names.plan_path(bad)
    path.write_bytes(flip(path.read_bytes(), -1))
    done = world.encrypt(resume="length")
    assert done.job_id == good
    assert world.verify().failed == []
    world.begun("rekey", 1)
    warned = world.encrypt({"more": b"1"}).warnings
    assert len(warned) == 1
    assert "rekey, begun at" in warned[0]


def test_a_failed_job_stays_for_resume(world: World) -> None:
    write_tree(world.src, TREE)
    (world.src / "broken").symlink_to("/proc/self/mem")
    with pytest.raises(JobError, match="stopped after 1 failed files"):
        world.encrypt(on_error="raise", links="follow")
    (job_id,) = world.plans()
    (world.src / "broken").unlink()
    assert world.encrypt(resume="length").job_id == job_id
    assert world.swept() == []


# ---------------------------------------------------------------------------------------------------- rekey, remove


def test_rekey(world: World) -> None:
    world.encrypt(TREE, double_wrap=False).raise_for_failures()
    snapshot = Dataset.open(world.url, kms=world.kms).snapshot()
    old = {row.path: snapshot.contents(row).dek(row) for row in snapshot.files()}
    assert world.rekey(dry_run=True).counts["planned"] == 4
    done = world.rekey(paths=["b/*", "a"], dek_length=32, double_wrap=True, wrapping_key_id="other")
    done.raise_for_failures()
    snapshot = Dataset.open(world.url, kms=world.kms).snapshot()
    for row in snapshot.files():
        key = snapshot.entry.keys[row.key_id]
        dek = snapshot.contents(row).dek(row)
        kept = row.path == "z"
        assert (dek == old[row.path]) == kept
        assert (key.wrapping_key_id, key.double_wrap, len(dek)) == (
            (MASTER, False, 16) if kept else ("other", True, 32)
        )
    assert world.files() == world.files(2) == TREE
    assert world.swept() == []


def test_rekey_follows_a_rotation(world: World) -> None:
    world.encrypt(TREE).raise_for_failures()
    log = world.log()
    replace_keks(Job.begin(log, "rotate"), to_master="other")
    world.rekey().raise_for_failures()
    head = world.log().head()
    wrapping = log.tables.counted(head.files, log.envelope(head))
    assert {head.keys[key_id].wrapping_key_id for key_id in wrapping} == {"other"}
    with pytest.raises(Exception, match="rotated from the master key 'master' to 'other'"):
        world.rekey(wrapping_key_id=MASTER)


def test_a_version_that_expires_while_it_is_rekeyed(world: World) -> None:
    world.encrypt(TREE).raise_for_failures()

    def expire(rows: object) -> None:
        if world.log().head().number == 2:
            remove_files(world.url, "*", kms=world.kms)
            reach.expire(world.log(), Idle(), lambda head: head.number, skip_grace=True, now_ms=0)

    done = world.rekey(progress=expire)
    assert {row.error_class for row in done.failed} == {"ExpiredError", "ConcurrentChangeError"}
    assert world.files() == {}
    assert world.swept() == []


def test_remove(world: World) -> None:
    world.encrypt(TREE).raise_for_failures()
    world.encrypt({"more": b"1"}).raise_for_failures()
    assert remove_files(world.url, "b/*", kms=world.kms, dry_run=True).still_in == [2, 3]
    done = remove_files(world.url, ["b/*"], kms=world.kms)
    assert (done.version, done.counts["ok"], done.still_in) == (4, 2, [2, 3])
    assert "versions 2 to 3" in done.warnings[0]
    assert world.files() == {"a": b"1", "z": b"333", "more": b"1"}
    with pytest.raises(FileNotFoundError, match="did you mean 'more'"):
        remove_files(world.url, "mor", kms=world.kms)
    assert world.swept() == []


def test_a_file_that_was_replaced_meanwhile_stays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.encrypt(TREE).raise_for_failures()
    begin = Job.begin.__func__  # type: ignore[attr-defined]

    def late(cls: Any, *args: Any, **options: Any) -> Job:
        monkeypatch.undo()
        world.encrypt({"a": b"theirs"}, overwrite=True).raise_for_failures()
        job: Job = begin(cls, *args, **options)
        return job

    monkeypatch.setattr(Job, "begin", classmethod(late))
    done = remove_files(world.url, ["a", "z"], kms=world.kms)
    assert [(row.error_class, row.status) for row in done.rows] == [("ConcurrentChangeError", "failed"), (None, "ok")]
    assert world.files() == {"a": b"theirs", "b/c": TREE["b/c"], "b/d e": b""}


# ---------------------------------------------------------------------------------------------------------- retention


@pytest.mark.parametrize("job", ["encrypt", "unchanged", "rekey", "remove"])
def test_jobs_apply_the_policy(world: World, job: str) -> None:
    world.encrypt(TREE).raise_for_failures()
    world.encrypt({"more": b"1"}).raise_for_failures()
    Job.begin(log := world.log(), "policy").commit(Wish("policy", policy=Policy(keep=1)))
    assert log.head().first == 1
    before = world.object("a")
    done = {
        "encrypt": lambda: world.encrypt({"x": b"1"}),
        "unchanged": world.encrypt,
        "rekey": world.rekey,
        "remove": lambda: remove_files(world.url, "a", kms=world.kms),
    }[job]()
    assert done.expired is not None
    assert done.expired.failed == done.failed == []
    head = world.log().head()
    assert head.first == (3 if job == "unchanged" else 5)
    assert {row.format for row in done.expired.rows} >= {"version"}
    assert before.exists() == (job in ("encrypt", "unchanged"))
    assert world.swept() == []


def test_a_retention_that_fails_is_told_and_fails_no_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.encrypt(TREE, policy=Policy(keep=1)).raise_for_failures()

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", "x")

    for name in ("clean", "retention"):
        with monkeypatch.context() as patch:
            patch.setattr(reach, name, refuse)
            done = world.rekey()
        done.raise_for_failures()
        assert done.expired is not None
        assert [row.error_class for row in done.expired.failed] == ["PermissionError"]
        assert any("not expired" in warning for warning in done.warnings)
    world.encrypt()  # the next job does it
    assert world.log().head().first == 4
    assert world.swept() == []


# ---------------------------------------------------------------------------------------------------------- reading


def test_decrypt_to_a_disk_that_takes_two_names_for_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"A/x": b"1", "a/X": b"2", "Stra\u00dfe": b"3", "STRASSE": b"4", "other": b"5"}
    world.encrypt(tree).raise_for_failures()
    here = tmp_path / "here"
    decrypt_files(world.url, here, kms=world.kms, **QUIET).raise_for_failures()
    assert read_tree(here) == tree  # this disk tells them apart
    monkeypatch.setattr(decryption, "takes_for_one", lambda *args: True)
    done = decrypt_files(world.url, tmp_path / "there", kms=world.kms, overwrite=True, **QUIET)
    assert [row.error_class for row in done.failed] == ["FileExistsError"] * 2
    assert len(read_tree(tmp_path / "there")) == 3


def test_verify_finds_damage_and_strangers(world: World) -> None:
    world.encrypt(TREE).raise_for_failures()
    one, two = world.object("a"), world.object("z")
    data = one.read_bytes()
    one.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    two.unlink()
    (world.url / "stranger").write_bytes(b"?")
    done = world.verify()
    assert sorted(row.src for row in done.failed) == ["a", "z"]
    assert done.extra_files == 1
    assert world.verify(paths="b/*").rows[0].status == "ok"


def test_what_open_jobs_write_is_not_extra(world: World) -> None:
    write_tree(world.src, TREE)
    found: list[int] = []
    world.encrypt({"first": b"1"}, progress=lambda rows: found.append(world.verify().extra_files)).raise_for_failures()
    assert found
    assert set(found) == {0}
    world.begun("rekey")
    assert world.verify().extra_files == 0  # its plan is there still
    shutil.rmtree(world.url / "_ags/plans")
    assert world.verify().extra_files == 2


def test_reading_while_versions_expire(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.encrypt(TREE).raise_for_failures()
    original = Dataset.open_file

    def late(handle: Dataset, path: str, **options: Any) -> Any:
        handle.snapshot()
        if world.log().head().number == 2:
            world.rekey().raise_for_failures()
            reach.expire(world.log(), Idle(), lambda head: head.number, skip_grace=True, now_ms=0)
        return original(handle, path, **options)

    monkeypatch.setattr(Dataset, "open_file", late)
    assert open_file(world.url, "a", kms=world.kms).read() == b"1"
    for version in (2, None):
        with pytest.raises(ExpiredError) if version else nullcontext():
            open_file(world.url, "a", kms=world.kms, version=version)


def test_two_create_one_dataset(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One finds no log, and then what the other has just created."""
    local = type(Store(world.url))
    names_ = local.names

    def late(store: Store, folder: str) -> list[str]:
        found = names_(store, folder)
        if folder == names.LOG and not found:
            monkeypatch.undo()
            other = World(world.url.parent / "2", world.kms)
            other.url = world.url
            other.encrypt({"theirs": b"1"}).raise_for_failures()
        return found

    monkeypatch.setattr(local, "names", late)
    world.encrypt(TREE).raise_for_failures()
    assert world.files() == TREE | {"theirs": b"1"}


def test_the_datasets_own_kek_has_a_lifetime_too(world: World) -> None:
    world.encrypt(TREE, policy=Policy(kek_scope="partition")).raise_for_failures()
    first = world.log().head()
    world.encrypt({"b/more": b"1"}, policy=Policy(kek_scope="partition", kek_lifetime_days=0)).raise_for_failures()
    head = world.log().head()
    retired = {key.properties.get("scope") for key in head.keys.values() if key.state == "retired"}
    assert retired == {None, "partition:b"}
    assert head.sealer not in first.keys
    assert head.sealer in {table.key_id for table in head.files}
    assert world.files() == TREE | {"b/more": b"1"}
    assert world.swept() == []


@pytest.mark.parametrize("when", ["begin", "sealed"])
def test_a_job_that_gets_no_keys_leaves_nothing(world: World, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    world.encrypt(TREE).raise_for_failures()
    before = read_tree(world.url).keys()

    def refuse(*args: object) -> None:
        raise KeyAccessError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(f"ags_fast.dataset.job_keys.{'decide.choose' if when == 'begin' else 'with_new_keys'}", refuse)
        with pytest.raises(KeyAccessError):
            world.encrypt({"more": b"1"})
    left = read_tree(world.url).keys() - before
    assert {path.partition("/0")[0] for path in left} <= {"_ags/log"}  # the entry that ends the job
    assert world.plans() == set()


def test_what_another_version_lacks_is_a_row(world: World) -> None:
    world.encrypt(TREE).raise_for_failures()
    table = world.log().head().files[0].path
    remove_files(world.url, "*", kms=world.kms)
    world.encrypt({"b/new": b"1"}, include="b/new").raise_for_failures()
    (world.url / table).unlink()
    done = world.verify()
    assert [(row.status, row.error_class) for row in done.rows] == [("ok", None), ("failed", "IntegrityError")]
    assert table in (done.failed[0].error or "")


def test_a_kek_without_uses_retires(world: World) -> None:
    world.encrypt(TREE, policy=Policy(kek_uses=4)).raise_for_failures()
    (first,) = world.log().head().keys
    world.encrypt({"more": b"1"}).raise_for_failures()
    keys = world.log().head().keys
    assert (keys[first].state, {key.state for key in keys.values() if key.key_id != first}) == ("retired", {"active"})
    before = read_tree(world.url).keys()
    with pytest.raises(PolicyError, match=r"would wrap 5 data keys.*allows 4.*kek_scope"):
        world.encrypt({f"many/{n}": b"" for n in range(5)})
    assert read_tree(world.url).keys() == before
    assert world.files() == TREE | {"more": b"1"}
