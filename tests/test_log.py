"""The log of a dataset and what stands on it: names, tables, entries, jobs. `test_simulation` lets jobs meet."""

from __future__ import annotations

import copy
import pickle
import secrets
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from kms_clients import keystore

pytest.importorskip("msgspec")

import msgspec
from datasets import new_row, replace_keks
from simulation.store import Door, SimStore
from simulation.world import Request, World

from ags_fast.dataset import keks as keks_module
from ags_fast.dataset import names, reach, tries
from ags_fast.dataset.change import Change, Wish, first_kept, next_change
from ags_fast.dataset.columns import path_bytes
from ags_fast.dataset.draft import Draft, Idle
from ags_fast.dataset.entries import FileEntry
from ags_fast.dataset.entry import Entry, Pin
from ags_fast.dataset.job import Committed, Job
from ags_fast.dataset.job_keys import JobKeys
from ags_fast.dataset.keks import Keks, KeyTables
from ags_fast.dataset.kinds import Want
from ags_fast.dataset.log import Log
from ags_fast.dataset.names import new_job_id
from ags_fast.dataset.policy import Policy
from ags_fast.dataset.snapshot import Snapshot
from ags_fast.dataset.tables import Tables
from ags_fast.errors import (
    ConcurrentChangeError,
    ExpiredError,
    FormatError,
    IntegrityError,
    JobEndedError,
    PolicyError,
    UnknownOutcomeError,
)
from ags_fast.fs import Store
from ags_fast.keys import load_kms
from ags_fast.keys.entry import SCOPE, KeyEntry
from ags_fast.keys.kek import rewrap_kek
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ags_fast.keys import KmsClient

MAIN = Want("master")


@pytest.fixture
def kms(tmp_path: Path) -> KmsClient:
    return load_kms(keystore(tmp_path, "master"))


def new_log(folder: Path, kms: KmsClient, policy: Policy | None = None) -> Log:
    log = Log(Store(folder), kms)
    kek = MAIN.new_kek(kms.for_dataset("id"))
    log.create(Entry.first_of("id", kek, policy or Policy()))
    return log


def row(path: str, number: int = 0, key_id: str = "kek") -> FileEntry:
    return FileEntry(
        path, f"{path}.o{number}", "ags1", 5, 41, 1 << 20, key_id, bytes(44), None, bytes(16), "job", None, None, None,
        path, "stamp",
    )  # fmt: skip


def add(log: Log, *paths: str, replace: bool = False) -> int:
    """Commit files, whose content is of no matter here."""
    head = log.head()
    there = log.tables.find(head.files, paths, log.envelope(head)) if replace else {}
    job = Job.begin(log, "write", {MAIN: len(paths)})
    rows = [new_row(job, path) for path in paths]
    for one in rows:
        log.store.write_small(one.file, b"content")
    return job.commit(Wish("write", rows, {path: old.file for path, (_, old) in there.items()})).head.number


def newest(head: Entry) -> int:
    """The newest version that changed files, which an expiry keeps."""
    return first_kept(Policy(keep=1), head.number + 1, head.first, [*head.same, head.number + 1], {}, 0)


def version_of(made: Committed) -> int | None:
    return None if made.version is None else made.version.number


def paths_of(log: Log, entry: Entry | None = None) -> set[str]:
    head = log.head()
    return {
        row.path for table in (entry or head).files for row in log.tables.rows(table, log.envelope(head))
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- names


def test_names_of_entries_sort_as_their_numbers() -> None:
    numbers = [1, 999, 1000, 1001, 999_999, 1_000_000]
    paths = [names.entry_path(number) for number in numbers]
    assert paths == sorted(paths)
    assert [names.entry_number(path) for path in paths] == numbers
    assert names.entry_path(1999) < names.above_folder(1000) < names.entry_path(2000)
    for other in ("_ags/log/0000000/0000001000", "_ags/log/0000000/1", "_ags/log/x", "a/b"):
        assert names.entry_number(other) == 0


def test_the_job_is_in_the_name_of_each_object() -> None:
    job_id = new_job_id()
    for path in (names.table_path(job_id), names.block_path(job_id), names.plan_path(job_id), f"a/b.{job_id}-1f.ags"):
        assert names.job_of(path) == job_id
    for path in ("a/b.ags", names.entry_path(3), "_ags/other"):
        assert names.job_of(path) is None


# ---------------------------------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("add", "remove", "there", "below", "refused"),
    [
        (["a"], {}, {}, [], ()),
        (["a"], {}, {"a": "x"}, [], ("a",)),
        (["a"], {"a": "x"}, {"a": "x"}, [], ()),
        (["a"], {"a": "x"}, {"a": "y"}, [], ("a",)),
        ([], {"a": "x"}, {}, [], ("a",)),
        (["b"], {"a": "x"}, {}, [], ("a",)),  # renamed by another job
        (["a/b"], {}, {"a": "x"}, [], ("a/b",)),  # a file is where a folder would be
        (["a/b"], {"a": "x"}, {"a": "x"}, [], ()),
        (["a"], {}, {}, ["a/b"], ("a",)),  # a folder is where the file would be
    ],
)
def test_what_becomes_of_a_wish(
    add: list[str], remove: dict[str, str], there: dict[str, str], below: list[str], refused: tuple[str, ...]
) -> None:
    wish = Wish("write", [row(path, 1) for path in add], remove)
    change = next_change(wish, there, below)
    assert change == Change(refused=refused) if refused else change == Change(tuple(wish.add), frozenset(remove))


def test_a_wish_that_need_not_be_whole() -> None:
    wish = Wish("rekey", [row("a", 1), row("b", 1)], {"a": "x", "b": "y", "gone": "z"}, whole=False)
    change = next_change(wish, {"a": "x", "b": "another"}, [])
    assert [one.path for one in change.add] == ["a"]
    assert change.remove == {"a"}
    assert change.refused == ("b",)


def test_the_first_entry_that_a_policy_keeps() -> None:
    assert first_kept(Policy(), 9, 1, (), {}, 0) == 1
    assert first_kept(Policy(keep=3), 9, 1, (), {}, 0) == 7
    assert first_kept(Policy(keep=3), 9, 8, (), {}, 0) == 8
    assert first_kept(Policy(keep=3), 9, 1, (8, 9), {}, 0) == 5  # which change no file
    days = {number: number * 86_400_000 for number in range(1, 9)}
    assert first_kept(Policy(keep=1, keep_days=2), 9, 1, (), days, 8 * 86_400_000) == 7


# ---------------------------------------------------------------------------------------------------------- tables


@pytest.fixture
def tables(tmp_path: Path, kms: KmsClient) -> tuple[Tables, Any, str]:
    log = new_log(tmp_path / "d", kms)
    head = log.head()
    return log.tables, log.envelope(head), head.sealer


def test_a_table_gives_back_its_rows(tables: tuple[Tables, Any, str]) -> None:
    place, envelope, key_id = tables
    rows = [row(f"{n:05d}/\udcff{n}", n, f"kek{n % 3}") for n in range(1500)]
    rows[7] = rows[7]._replace(
        format="parquet", block_size=0, set_id="set", part=1, parts=2, mode=0o644, mtime_ns=-5,
        column_keys=({"column": "a.b", "key_id": "kek9", "wrapped_dek": b"w"},),
        key_material=({"column": "", "wrapping_key_id": "m", "master_version": None, "wrapped_dek": b"k"},),
    )  # fmt: skip
    rows[8] = rows[8]._replace(source_length=7, ctime_ns=-1, inode=1 << 60, etag='"e"', checksum=b"crc")
    (table,) = place.write(reversed(rows), "job", key_id, envelope)
    assert place.rows(table, envelope) == rows
    assert table.rows == 1500
    assert table.nbytes == 1499 * 5 + 7  # a row has a source of another length than its plaintext
    assert table.keys == {"kek0": 500, "kek1": 500, "kek2": 500, "kek9": 1}
    found = place.find([table], [rows[0].path, rows[700].path, rows[-1].path, "00000/x", "none"], envelope)
    assert {path: entry for path, (_, entry) in found.items()} == {r.path: r for r in (rows[0], rows[700], rows[-1])}
    assert place.below([table], ["00513", "00514/\udcff514", "zz"], envelope).keys() == {rows[513].path}


def test_a_lookup_reads_one_page(tables: tuple[Tables, Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    place, envelope, key_id = tables
    (table,) = place.write([row(f"{n:06d}-{n * n}", n) for n in range(40_000)], "job", key_id, envelope)
    fresh = Tables(place._store, "id")
    read: list[int] = []

    def counted(*arguments: Any) -> bytes:
        read.append(arguments[-1])
        return Tables._read(fresh, *arguments)

    monkeypatch.setattr(fresh, "_read", counted)
    assert fresh.find([table], [f"{777:06d}-{777 * 777}"], envelope)
    assert len(read) == 2
    assert sum(read) < table.length / 20


def test_rows_with_much_key_material(tables: tuple[Tables, Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is as long as readers take, and nobody writes a row that nobody reads."""
    place, envelope, key_id = tables
    columns = tuple(
        {"column": f"c{n}", "wrapping_key_id": "m", "master_version": None, "wrapped_dek": b"k" * 300}
        for n in range(1000)
    )
    rows = [row(f"{n:04d}", n)._replace(key_material=columns) for n in range(512)]
    (table,) = place.write(rows, "job", key_id, envelope)
    assert Tables(place._store, "id").rows(table, envelope) == rows
    fresh = Tables(place._store, "id")
    assert fresh.find([table], ["0300"], envelope)["0300"][1] == rows[300]
    monkeypatch.setattr("ags_fast.dataset.columns.PAGE_NBYTES", 300_000)
    with pytest.raises(PolicyError, match="a row of a table has"):
        place.write(rows[:1], "job", key_id, envelope)


def test_tables_merge_so_that_there_are_few(tables: tuple[Tables, Any, str]) -> None:
    place, envelope, key_id = tables
    there: tuple[Any, ...] = ()
    written = 0
    for n in range(300):
        before = {table.path for table in there}
        there = place.replaced(there, {}, [row(f"{n * 7919 % 300:04d}")], "job", key_id, envelope)
        written += sum(table.rows for table in there if table.path not in before)
        assert len(there) <= 9
    assert written < 300 * 16
    gone = place.find(there, ["0007", "0250"], envelope)
    there = place.replaced(there, {path: table for path, (table, _) in gone.items()}, [], "job", key_id, envelope)
    names_left = sorted(entry.path for table in there for entry in place.rows(table, envelope))
    assert names_left == [f"{n:04d}" for n in range(300) if n not in (7, 250)]


@pytest.mark.parametrize("harm", ["flip", "cut", "swap"])
def test_a_table_that_was_changed(tables: tuple[Tables, Any, str], harm: str) -> None:
    place, envelope, key_id = tables
    table, other = (place.write([row(path)], "job", key_id, envelope)[0] for path in "ab")
    path = place._store.full_path(table.path)
    if harm == "swap":
        shutil.copy(place._store.full_path(other.path), path)
    else:
        with open(path, "r+b") as file:
            data = bytearray(file.read())
            data[30] ^= harm == "flip"
            file.seek(0)
            file.truncate()
            file.write(data[: -5 if harm == "cut" else None])
    with pytest.raises((IntegrityError, FormatError)):
        Tables(place._store, "id").rows(table, envelope)


# ---------------------------------------------------------------------------------------------------------- the log


def test_files_come_and_go(tmp_path: Path, kms: KmsClient) -> None:
    log = new_log(tmp_path / "d", kms)
    assert add(log, "a", "b/c") == 2
    assert add(log, "a", replace=True) == 3
    with pytest.raises(ConcurrentChangeError, match="'a'"):
        add(log, "a")
    assert paths_of(log) == {"a", "b/c"}
    assert paths_of(log, log.entry(2)) == {"a", "b/c"}
    assert [entry.number for entry in log.kept(log.head())] == [4, 3, 2, 1]  # 4: the job that lost was ended
    with pytest.raises(FileNotFoundError, match="the newest one is 4"):
        log.entry(9)


def test_a_conflict_names_the_file_and_the_job(tmp_path: Path, kms: KmsClient) -> None:
    log, other = new_log(tmp_path, kms), Log(Store(tmp_path), kms)
    add(log, "a", "b")
    (old,) = [row for table in log.head().files for row in log.tables.rows(table, log.envelope(log.head()))][:1]
    job = Job.begin(log, "write", {MAIN: 1})
    row = new_row(job, "a")
    add(other, "a", replace=True)
    (_, there) = other.tables.find(other.head().files, ["a"], other.envelope(other.head()))["a"]
    with pytest.raises(ConcurrentChangeError, match="another job has changed 'a', or") as caught:
        job.commit(Wish("write", [row], {"a": old.file}))
    assert (caught.value.path, caught.value.by_job) == ("a", there.job_id)
    assert (copy.copy(caught.value).path, pickle.loads(pickle.dumps(caught.value)).by_job) == ("a", there.job_id)


def test_a_policy_expires_in_the_entry_of_the_commit(tmp_path: Path, kms: KmsClient) -> None:
    log = new_log(tmp_path / "d", kms, Policy(keep=2))
    for n in range(5):
        add(log, "a", replace=n > 0)
    head = log.head()
    assert (head.number, head.first) == (6, 5)
    objects = {listed.path for listed in log.store.list() if not listed.path.startswith(names.LOG)}
    assert objects == reach.needed(log, head)
    assert len(objects) == 4  # two tables, and the file of each
    assert {names.entry_number(listed.path) for listed in log.store.list(names.LOG)} == {5, 6}
    with pytest.raises(ExpiredError, match="has 5 and newer"):
        log.entry(4)


def take_out(log: Log, path: str) -> FileEntry:
    """Commit a version without a file, and return the file's row."""
    row = Snapshot(log, log.head()).file(path)
    Job.begin(log, "remove").commit(Wish("remove", remove={path: row.file}))
    return row


def expire_below(log: Log, first: int) -> None:
    log.append(Idle(), lambda head, plans: Draft("expire", first=first))
    reach.clean(log)


def test_an_expiry_spares_what_came_back(tmp_path: Path, kms: KmsClient) -> None:
    """Neither the first kept version nor the head names a file, but a version between them does."""
    log = new_log(tmp_path / "d", kms)
    add(log, "a")
    row = take_out(log, "a")
    back = Job.begin(log, "restore").commit(Wish("restore", [row], of=2)).head
    assert (back.number, back.returns) == (4, (4,))
    take_out(log, "a")
    expire_below(log, 3)
    assert Snapshot(log, log.entry(4)).file("a").file == row.file
    assert log.store.stat(row.file) is not None
    expire_below(log, 5)
    assert log.store.stat(row.file) is None
    assert log.head().returns == ()


def test_an_expiry_reads_all_kept_versions_beside_an_entry_of_another_history(tmp_path: Path, kms: KmsClient) -> None:
    """A request that came late made an entry with a number that was free again. It names what was committed since."""
    log = new_log(tmp_path / "d", kms)
    add(log, "a")
    second = log.head()
    take_out(log, "a")
    add(log, "b")
    fourth = log.head()
    row = take_out(log, "b")
    expire_below(log, 3)
    assert log.below_first(log.head()) == []
    late, _ = log._sealed(msgspec.structs.replace(fourth, number=2, near=second.near, digest=""))
    log.store.create_exclusive(names.entry_path(2), late)
    reach.clean(log)
    assert log.below_first(log.head()) == []
    assert log.store.stat(row.file) is not None


def test_a_sweep_ends_a_dead_job(tmp_path: Path, kms: KmsClient) -> None:
    log = new_log(tmp_path / "d", kms)
    dead = Job.begin(log, "write", {MAIN: 3})
    path = new_row(dead, "a", MAIN).file
    log.store.write_small(path, b"data")
    assert reach.sweep(log, Idle()) == []  # its process lives
    dead.release()
    assert reach.sweep(log, Idle(), 1000) == []
    assert {path, names.plan_path(dead.id)} <= {*reach.sweep(log, Idle())}
    assert {listed.path for listed in log.store.list()} == {names.entry_path(1), names.entry_path(2)}
    head = log.head()
    assert head.keys[head.sealer].uses == 64 + 3
    assert log.plans() == {}
    with pytest.raises(JobEndedError):
        dead.commit(Wish("write"))
    add(log, "b")  # which forgets the job
    with pytest.raises(UnknownOutcomeError):
        dead.commit(Wish("write", [row("a")]))


def test_a_sweep_lets_a_job_begin(tmp_path: Path, kms: KmsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job locks its plan before the plan is there."""
    log, other = new_log(tmp_path / "d", kms), Log(Store(tmp_path / "d"), kms)
    begin = JobKeys.begin

    def swept_first(*arguments: Any) -> bool:
        assert reach.sweep(other, Idle()) == []
        return begin(*arguments)

    monkeypatch.setattr(JobKeys, "begin", swept_first)
    job = Job.begin(log, "write", {MAIN: 1})
    assert reach.sweep(other, Idle()) == []
    assert job.commit(Wish("write", [new_row(job, "a")])).version is not None


def test_a_job_goes_on_in_another_process(tmp_path: Path, kms: KmsClient) -> None:
    log = new_log(tmp_path / "d", kms)
    first = Job.begin(log, "rekey", {MAIN: 1}, resumable=True)
    rows = [new_row(first, "a", MAIN)]
    other = Job.resume(Log(log.store, kms), first.id)
    mine = [new_row(other, "a", MAIN)]
    assert len(log.plans()) == 2
    number = version_of(other.commit(Wish("rekey", mine)))
    assert version_of(first.commit(Wish("rekey", rows))) == number  # the job is committed, by whichever process
    head = log.head()
    assert head.number == number == 2
    assert head.keys[head.sealer].uses == 64 + 1 + 65  # what both plans have reserved
    with pytest.raises(JobEndedError):
        Job.resume(log, first.id)
    with pytest.raises(JobEndedError, match="no other process"):
        Job.resume(log, Job.begin(log, "write").id)


def test_a_job_that_is_ended_while_it_is_taken_up(
    tmp_path: Path, kms: KmsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, other = new_log(tmp_path / "d", kms), Log(Store(tmp_path / "d"), kms)
    job = Job.begin(log, "write")
    job.leave()
    plans = log.plans

    def swept_first() -> Any:
        reach.sweep(other, Idle(), 0)
        return plans()

    monkeypatch.setattr(log, "plans", swept_first)
    with pytest.raises(JobEndedError, match="is over"):
        Job.resume(log, job.id)


def test_a_version_of_a_master_key_is_forbidden(tmp_path: Path, kms: KmsClient) -> None:
    log = new_log(tmp_path / "d", kms)
    version = log.version_of(log.head().keys[log.head().sealer])
    with pytest.raises(PolicyError, match="still wraps 1 keys"):
        reach.retire_master(log, Idle(), version)
    reach.retire_master(log, Idle(), ("master", "another"))
    assert log.head().gone == (("master", "another"),)


def test_a_single_wrap_of_an_older_version_keeps_its_master_key(tmp_path: Path, kms: KmsClient) -> None:
    log = new_log(tmp_path / "d", kms)
    single = Want("master", double_wrap=False)
    job = Job.begin(log, "write", {single: 1})
    job.commit(Wish("write", [new_row(job, "a", single)]))
    late = Job.begin(log, "write", {single: 1})
    row = new_row(late, "b", single)  # wrapped by the old version, which is gone when the job commits
    local.rotate_key(kms.properties, "master")
    main = log.head().keys[log.head().sealer]
    log.append(Idle(), lambda head, plans: Draft("mek", keys={**head.keys, main.key_id: rewrap_kek(kms, main)}))
    there = log.tables.find(log.head().files, ["a"], log.envelope(log.head()))
    job = Job.begin(log, "remove")
    job.commit(Wish("remove", remove={"a": there["a"][1].file}))
    assert log.head().files == ()
    with pytest.raises(PolicyError, match="still wraps 1 keys"):
        reach.retire_master(log, Idle(), ("master", "1"))
    reach.expire(log, Idle(), newest, skip_grace=False, now_ms=0)
    reach.retire_master(log, Idle(), ("master", "1"))
    late.commit(Wish("write", [row]))
    (found,) = Snapshot(log, log.head()).files()
    assert kms.key_version(found.wrapped_dek) == "2"


def test_a_plan_that_cannot_be_read_stops_nobody(tmp_path: Path, kms: KmsClient) -> None:
    log = new_log(tmp_path / "d", kms, Policy(keep=1))
    log.store.write_small(names.plan_path(new_job_id()), b"garbled")
    add(log, "a")
    reach.expire(log, Idle(), newest, skip_grace=False, now_ms=0)
    reach.sweep(log, Idle(), 0)
    assert log.plans() == {}
    assert paths_of(log) == {"a"}


def test_a_batch_that_was_committed_before(tmp_path: Path, kms: KmsClient) -> None:
    log = new_log(tmp_path / "d", kms)
    for path in ("a", "b"):
        job = Job.begin(log, "write", {MAIN: 1})
        new = new_row(job, path, MAIN)
        log.store.write_small(new.file, b"content")
        job.commit(Wish("write", [new], batch=("stream", 7)))
    head = log.head()
    assert paths_of(log) == {"a"}
    assert head.keys[head.sealer].uses == 2 * (64 + 1)  # the second one has wrapped as much
    assert log.plans() == {}
    assert log.store.stat(new.file) is None


def test_the_chain_goes_back_beyond_one_block(tmp_path: Path, kms: KmsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    log = new_log(tmp_path / "d", kms, Policy(keep=1))
    pins = [log.head().pin]
    for _ in range(100):
        job = Job.begin(log, "nothing")
        job.replace_files(lambda head: Draft("nothing", first=head.number))
        pins.append(log.head().pin)
    head = log.head()
    assert len(head.blocks) == 1
    read: list[str] = []

    def read_small(store: Store, path: str, limit: int) -> bytes:
        read.append(path)
        return small(store, path, limit)

    small = Store.read_small
    monkeypatch.setattr(Store, "read_small", read_small)
    assert [log.digest(head, n + 1) for n in range(101)] == [pin.partition("-")[2] for pin in pins]
    assert read == [head.blocks[0].path]
    for pin in (pins[0], pins[50], pins[100]):
        assert Log(log.store, kms, pin=Pin.parse(pin)).head().number == 101
    with pytest.raises(IntegrityError, match="does not descend"):
        Log(log.store, kms, pin=Pin(50, "0" * 64)).head()


def test_a_log_that_was_put_back(tmp_path: Path, kms: KmsClient) -> None:
    log = new_log(tmp_path / "d", kms)
    add(log, "a")
    shutil.copytree(tmp_path / "d", tmp_path / "copy")
    add(log, "b")
    shutil.rmtree(tmp_path / "d")
    shutil.copytree(tmp_path / "copy", tmp_path / "d")
    with pytest.raises(IntegrityError, match="older copy"):
        log.head()
    other = Log(log.store, kms)
    pin = log.known(other.head()).pin
    add(other, "c")
    with pytest.raises(IntegrityError, match="another history"):
        Log(log.store, kms, pin=Pin.parse(pin)).head()


def test_a_log_that_is_gone(tmp_path: Path, kms: KmsClient) -> None:
    with pytest.raises(FileNotFoundError, match="no dataset"):
        Log(Store(tmp_path / "none"), kms).head()
    log = new_log(tmp_path / "d", kms)
    add(log, "a")
    shutil.rmtree(tmp_path / "d" / "_ags" / "log")
    for one in (log, Log(log.store, kms)):
        with pytest.raises(IntegrityError):
            one.head()


def test_an_entry_of_another_place(tmp_path: Path, kms: KmsClient) -> None:
    log = new_log(tmp_path / "d", kms)
    add(log, "a")
    path = tmp_path / "d" / names.entry_path(2)
    shutil.copy(path, tmp_path / "d" / names.entry_path(3))
    with pytest.raises(IntegrityError, match="not what was written"):
        Log(log.store, kms).head()
    path.with_name("0000000003").write_bytes(path.read_bytes()[:-3])
    with pytest.raises((IntegrityError, FormatError)):
        Log(log.store, kms).head()


def test_a_store_that_overwrites_is_refused(tmp_path: Path, kms: KmsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(store: Store, path: str, data: bytes) -> None:
        target = tmp_path / "d" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    monkeypatch.setattr(type(Store(tmp_path)), "_create_exclusive", overwrite)
    with pytest.raises(PolicyError, match="If-None-Match"):
        new_log(tmp_path / "d", kms)
    assert list(Store(tmp_path / "d").list()) == []


def test_a_rotation_replaces_what_wraps(tmp_path: Path, kms: KmsClient) -> None:
    log = new_log(tmp_path / "d", kms, Policy(keep=1))
    add(log, "a", "b")
    (old,) = log.head().keys
    replace_keks(Job.begin(log, "rotate"))
    head = log.head()
    assert {key.key_id: key.state for key in head.keys.values()} == {old: "retired", head.sealer: "active"}
    assert head.key_ids() == log.tables.counted(head.files, log.envelope(head)).keys() == {head.sealer}
    assert paths_of(log) == {"a", "b"}
    reach.expire(log, Idle(), newest, skip_grace=True, now_ms=0)
    assert log.head().keys.keys() == {head.sealer}
    assert paths_of(log) == {"a", "b"}


def test_work_that_others_undo_gives_up(tmp_path: Path, kms: KmsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    log, other = new_log(tmp_path / "d", kms), Log(Store(tmp_path / "d"), kms)
    monkeypatch.setattr(tries, "RACES", 2)

    def race(head: Entry, plans: Iterable[str]) -> Draft:
        add(other, f"x{other.head().number}")
        return Draft("race")

    with pytest.raises(ConcurrentChangeError, match="all the time"):
        log.append(Idle(), race)


# ---------------------------------------------------------------------------------------------------------- many KEKs


class Counting(Door):
    """A world that counts requests."""

    def __init__(self) -> None:
        super().__init__(World())
        self.asked: list[str] = []

    def ask(self, kind: str, path: str = "", argument: Any = None) -> Any:
        self.asked.append(f"{kind} {path.removeprefix('b/d/')}")
        return super().ask(kind, path, argument)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Counting:
    door = Counting()
    monkeypatch.setattr(SimStore, "door", door, raising=False)
    return door


def remote_log(door: Counting, kms: KmsClient, policy: Policy, first: int, last: int, there: Iterable[int]) -> Log:
    """Make a log whose head is `last`. The other entries that are there have no content."""
    log = Log(SimStore("sim://b/d"), kms)
    kek = MAIN.new_kek(kms.for_dataset("id"))
    entry = msgspec.structs.replace(Entry.first_of("id", kek, policy), number=last, first=first)
    for number in there:
        door.world.perform(Request("put", f"b/d/{names.entry_path(number)}", b"no entry"))
    door.world.perform(Request("put", f"b/d/{names.entry_path(last)}", log._sealed(entry)[0]))
    return Log(log.store, kms)


def scoped(*scopes: int) -> list[Want]:
    return [Want("master", scope=f"day={scope}") for scope in scopes]


def add_under(log: Log, wants: Iterable[Want]) -> list[FileEntry]:
    """Commit a file under each of these kinds of KEKs, in a commit of its own."""
    rows = []
    for want in wants:
        job = Job.begin(log, "write", {want: 1})
        rows.append(new_row(job, f"{want.scope}/{job.base.number}", want))
        log.store.write_small(rows[-1].file, b"content")
        job.commit(Wish("write", rows[-1:]))
    return rows


def objects_of(log: Log) -> set[str]:
    return {listed.path for listed in log.store.list() if not listed.path.startswith(names.LOG)}


def test_many_keks_stand_in_tables(door: Counting, kms: KmsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keks_module, "INLINE", 4)
    log = remote_log(door, kms, Policy(keep=2), 1, 1, ())
    rows = add_under(log, scoped(*range(30)))
    head = log.head()
    assert len(head.keys) == 31
    assert len(Keks.of(head.keys).inline) <= 5
    assert len(head.key_tables) <= 4
    other = Log(log.store, kms).head()  # which reads tables
    assert {row.key_id for row in rows} | {head.sealer} == set(other.keys)
    assert dict(other.keys) == dict(head.keys)
    for row, want in zip(rows, scoped(*range(30)), strict=True):
        assert [key.key_id for key in Keks.of(other.keys).active(want)] == [row.key_id]
        assert other.keys[row.key_id].uses == 1
    (again,) = add_under(log, scoped(3))
    assert again.key_id == rows[3].key_id
    assert Log(log.store, kms).head().keys[again.key_id].uses == 2  # what is newer wins
    assert objects_of(log) == reach.needed(log, log.head())
    sizes = [log.store.stat(names.entry_path(number)).size for number in (log.head().number - 1, log.head().number)]  # type: ignore[union-attr]
    assert max(sizes) < 10_000


def test_a_commit_that_changes_no_kek_writes_no_table(
    door: Counting, kms: KmsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keks_module, "INLINE", 4)
    log = remote_log(door, kms, Policy(), 1, 1, ())
    add_under(log, scoped(*range(12)))
    before = log.head()
    fresh = Log(log.store, kms)
    monkeypatch.setattr(KeyTables, "_read", None)  # nor does it read one
    add(fresh, "a")
    assert fresh.head().key_tables == before.key_tables != ()
    assert paths_of(fresh) >= {"a"}


def test_keks_that_left_are_in_no_table(door: Counting, kms: KmsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keks_module, "INLINE", 4)
    log = remote_log(door, kms, Policy(keep=1), 1, 1, ())
    rows = add_under(log, scoped(*range(12)))
    job = Job.begin(log, "remove")
    job.commit(Wish("remove", remove={row.path: row.file for row in rows[:10]}))
    tables, objects = log.head().key_tables, objects_of(log)
    reach.expire(log, Idle(), newest, skip_grace=True, now_ms=0)
    gone = {row.key_id for row in rows[:10]}
    for one in (log, Log(log.store, kms)):
        assert one.head().keys.keys() == {log.head().sealer, rows[10].key_id, rows[11].key_id}
        assert one.head().keys.get(rows[0].key_id) is None
        assert Keks.of(one.head().keys).active(scoped(0)[0]) == []
    assert log.head().key_tables == tables  # a job without a plan writes no object
    assert objects_of(log) == objects
    assert set(log.head().left) == gone
    add(log, "a")
    head = log.head()
    assert head.left == ()
    assert gone.isdisjoint(
        key_id for table in head.key_tables for key_id, _ in place_of(log).rows(table, envelope(log))
    )
    assert head.keys.keys() == {head.sealer, rows[10].key_id, rows[11].key_id}
    assert objects_of(log) == reach.needed(log, head)


def place_of(log: Log) -> KeyTables:
    return Keks.of(log.head().keys).place


def envelope(log: Log) -> Any:
    return log.envelope(log.head())


def test_a_kek_is_written_again_rarely(tmp_path: Path, kms: KmsClient) -> None:
    log = new_log(tmp_path / "d", kms)
    head = log.head()
    keks, written = Keks.of(head.keys), 0
    for n in range(2000):
        before = {table.path for table in keks.tables}
        key = KeyEntry(f"kek{n}", "master", bytes(60), properties={SCOPE: f"day={n}"})
        keks = keks.changed({key.key_id: key}).stored(head.sealer, "job")
        written += sum(table.rows for table in keks.tables if table.path not in before)
        assert len(keks.inline) <= keks_module.INLINE + 1
        assert len(keks.tables) <= 7
    assert written < 2000 * 6
    assert len(keks) == 2001


def test_a_kek_in_a_table_costs_one_page(tmp_path: Path, kms: KmsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    log = new_log(tmp_path / "d", kms)
    head = log.head()
    new = [
        KeyEntry(f"{n * n:08d}", "master", secrets.token_bytes(60), properties={SCOPE: f"day={n}"}) for n in range(4000)
    ]
    keks = Keks.of(head.keys).changed({key.key_id: key for key in new}).stored(head.sealer, "job")
    place = KeyTables(log.store, "id", partial(log._holding, "id"))
    fresh = Keks(keks.inline, (), keks.tables, place)
    read: list[int] = []

    def counted(*arguments: Any) -> bytes:
        read.append(arguments[-1])
        return KeyTables._read(place, *arguments)

    monkeypatch.setattr(place, "_read", counted)
    assert fresh[new[777].key_id] == new[777]
    assert "none" not in fresh
    assert len(read) == 2
    assert sum(read) < keks.tables[0].length / 6
    assert dict(fresh) == dict(keks)


@pytest.mark.parametrize("harm", ["flip", "cut"])
def test_a_table_of_keks_that_was_changed(
    tmp_path: Path, kms: KmsClient, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keks_module, "INLINE", 1)
    log = new_log(tmp_path / "d", kms)
    rows = add_under(log, scoped(1, 2))
    path = log.store.full_path(log.head().key_tables[0].path)
    with open(path, "r+b") as file:
        data = bytearray(file.read())
        data[30] ^= harm == "flip"
        file.seek(0)
        file.truncate()
        file.write(data[: -5 if harm == "cut" else None])
    head = Log(log.store, kms).head()
    with pytest.raises((IntegrityError, FormatError)):
        head.keys.get(rows[0].key_id)


def test_a_rotation_of_many_keks(door: Counting, kms: KmsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keks_module, "INLINE", 4)
    log = remote_log(door, kms, Policy(keep=1), 1, 1, ())
    add_under(log, scoped(*range(12)))
    old = log.head()
    job = Job.begin(log, "rotate")
    replace_keks(job)
    assert len(job.plans) == 2  # a further one for all new KEKs
    head = log.head()
    states = [key.state for key in head.keys.values()]
    assert (states.count("active"), states.count("retired")) == (13, 13)
    assert {table.key_id for table in head.key_tables} == {head.sealer} != {old.sealer}
    reach.expire(log, Idle(), newest, skip_grace=True, now_ms=0)
    add(log, "a")
    fresh = Log(log.store, kms)
    assert len(fresh.head().keys) == 13
    assert old.sealer not in fresh.head().keys
    assert len(paths_of(fresh)) == 13
    assert objects_of(log) == reach.needed(log, log.head())


def test_tables_of_keks_stay_with_their_versions(
    door: Counting, kms: KmsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keks_module, "INLINE", 1)
    log = remote_log(door, kms, Policy(keep=3), 1, 1, ())
    add_under(log, scoped(*range(8)))
    reach.sweep(log, Idle(), 0.0)
    kept = [entry for entry in log.kept(log.head()) if entry.key_tables]
    assert len({table.path for entry in kept for table in entry.key_tables}) > 1
    for entry in kept:
        for table in entry.key_tables:
            assert KeyTables(log.store, "id", partial(log._holding, "id")).rows(table, envelope(log))


def test_the_counts_of_many_keks_are_in_the_table(tmp_path: Path, kms: KmsClient) -> None:
    log = new_log(tmp_path / "d", kms)
    rows = [row(f"{n:03d}", n, f"kek{n % 50}") for n in range(200)]
    (table,) = log.tables.write(rows, "job", log.head().sealer, envelope(log))
    assert table.keys is None
    fresh = Tables(log.store, "id")
    assert fresh.counted([table], envelope(log)) == {f"kek{n}": 4 for n in range(50)}
    assert fresh.rows(table, envelope(log)) == rows
    with pytest.raises(FormatError):
        Tables(log.store, "id").rows(msgspec.structs.replace(table, keys={}), envelope(log))


# ---------------------------------------------------------------------------------------------------------- requests


def test_a_high_number_costs_no_more(door: Counting, kms: KmsClient) -> None:
    log = remote_log(door, kms, Policy(keep=9), 99_991, 100_000, range(99_500, 100_000))
    assert log.head().number == 100_000
    assert len(door.asked) == 3  # a listing, the entry, and what is above


@pytest.mark.parametrize("last", [999, 1000, 1001, 2000, 12_345, 30_000])
def test_a_long_log_is_not_listed_whole(door: Counting, kms: KmsClient, last: int) -> None:
    log = remote_log(door, kms, Policy(), 1, last, range(1, last))
    head = log.head()
    assert head.number == last
    assert len(door.asked) <= 17
    door.asked.clear()
    assert Log(log.store, kms, pin=Pin.parse(head.pin)).head().number == last
    assert len(door.asked) == 3


def test_what_is_expired_is_listed_up_to_what_is_kept(
    door: Counting, kms: KmsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = remote_log(door, kms, Policy(), 201, 5000, range(1, 5000))
    head = log.head()
    door.asked.clear()
    assert log.below_first(head) == [*range(1, 201)]
    assert door.asked == ["list _ags/log/"]
    most: list[int] = []

    def clean(log: Log, head: Entry, expired: list[int], plans: object) -> list[str]:
        most.append(len(expired))
        return []

    monkeypatch.setattr(log, "expired", lambda head, numbers: numbers)
    monkeypatch.setattr(reach, "_clean", clean)
    reach.clean(log)
    assert most == [64, 64, 64, 8]


@pytest.mark.parametrize(("keep", "requests"), [(None, 9), (3, 13)])
def test_a_commit_of_one_small_file(door: Counting, kms: KmsClient, keep: int | None, requests: int) -> None:
    log = remote_log(door, kms, Policy(keep=keep), 1, 1, ())
    add_under(log, scoped(*range(40)))
    for n in range(5):
        door.asked.clear()
        add_under(log, scoped(n))
        made = [asked for asked in door.asked if asked.startswith("create _ags/")]
        merged = [asked for asked in door.asked if asked.startswith("delete _ags/tables/")]
        assert len(made) == 3, made  # the plan, a table, the entry
        assert len(door.asked) - len(merged) <= requests


def test_a_check_of_a_master_key_looks_again(tmp_path: Path, kms: KmsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    log, other = new_log(tmp_path / "d", kms), Log(Store(tmp_path / "d"), kms)
    add_under(log, [Want("master", double_wrap=False)])
    job = Job.begin(log, "remove")
    job.commit(
        Wish("remove", remove={one.path: one.file for one in Snapshot(log, log.head()).files()}, policy=Policy(keep=1))
    )
    check, calls = reach.check_master, []

    def expired(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:  # after the entry
            add(other, "b")
            raise FileNotFoundError("a table")
        check(*arguments)

    monkeypatch.setattr(reach, "check_master", expired)
    reach.retire_master(log, Idle(), ("master", "another"))
    assert len(calls) == 3


def test_a_commit_that_makes_a_block_looks_at_no_version(
    tmp_path: Path, kms: KmsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its entry names need not be searched for in all that is kept: blocks, and tables of KEKs."""
    searched: list[str] = []
    log = new_log(tmp_path / "d", kms)
    monkeypatch.setattr(reach, "needed", lambda log, head: searched.append(head.operation))
    while not log.head().blocks:
        add(log, f"file {log.head().number}")
    add_under(log, [Want("master", scope=f"scope {number}") for number in range(keks_module.INLINE + 1)])
    assert log.head().key_tables
    assert searched == []


def test_paths_in_bytes() -> None:
    assert path_bytes("a/\udcff") == b"a/\xff"
