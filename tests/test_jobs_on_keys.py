"""Jobs on keys and versions: what they change and leave, and what they ask of the KMS."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import read_tree
from kms_clients import keystore

pytest.importorskip("msgspec")

from ags_fast import jobs
from ags_fast.dataset import reach
from ags_fast.dataset.access import Access
from ags_fast.dataset.dataset import Dataset
from ags_fast.dataset.job import Job
from ags_fast.dataset.job_keys import JobKeys
from ags_fast.dataset.log import Log
from ags_fast.dataset.policy import Policy
from ags_fast.engines.local import LocalEngine
from ags_fast.errors import ExpiredError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.jobs import rotation
from ags_fast.jobs.results import JobResult
from ags_fast.keys import clear_cache, kms_calls, load_kms
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ags_fast.dataset.entry import Entry

PATHS = tuple(f"{n % 2}/{n}" for n in range(6))


class Rewrapping(local.LocalKms):
    """A keystore that wraps anew without giving the key away, as AWS and Vault do."""

    def rewrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return self.wrap_key(self.unwrap_key(wrapped, wrapping_key_id), wrapping_key_id)


class Failing(local.LocalKms):
    """A keystore that refuses after so many wraps."""

    left = 0

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        type(self).left -= 1
        if self.left < 0:
            raise KeyAccessError("the tests refuse it")
        return super().wrap_key(key, wrapping_key_id)


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return keystore(tmp_path, "master", "other", "hr")


@pytest.fixture
def url(tmp_path: Path, kms: dict[str, str]) -> Path:
    make(tmp_path / "ds", kms)
    return tmp_path / "ds"


def make(url: Path, kms: Any, *, policy: Policy | None = None, double_wrap: bool = True) -> None:
    Dataset.create(url, kms=kms, wrapping_key_id="master", policy=policy)
    write(url, kms, *PATHS, double_wrap=double_wrap)


def write(url: Path, kms: Any, *paths: str, **options: Any) -> Dataset:
    dataset = Dataset.open(url, kms=kms)
    with dataset.transaction(fsync=False, **options) as new:
        for path in paths:
            with new.create(path, replace=True) as file:
                file.write(path.encode())
    return dataset


def head_of(url: Path, kms: Any) -> Entry:
    return Access.of(url, kms).log().head()


def check(url: Path, kms: Any, *paths: str, version: int | None = None) -> None:
    """The version has these files, and each has its content."""
    clear_cache()
    dataset = Dataset.open(url, kms=kms, version=version)
    assert {file.path: dataset.open_file(file.path).read() for file in dataset.files()} == {
        path: path.encode() for path in paths or PATHS
    }


def turned(url: Path, kms: Any, what: Any = "kek", **options: Any) -> JobResult:
    result = jobs.rotate(url, kms=kms, what=what, progress=False, **options)
    result.raise_for_failures()
    return result


def swept(url: Path, kms: Any) -> list[str]:
    return [row.src for row in jobs.sweep(url, kms=kms, older_than=timedelta(0)).rows]


@contextmanager
def asked() -> Iterator[Counter[str]]:
    """What the KMS is asked within, by kind of call."""
    before, counts = kms_calls(), Counter[str]()
    yield counts
    for (_, operation), count in (kms_calls() - before).items():
        counts[operation] += count


def masters(url: Path, kms: Any) -> set[str]:
    log = Access.of(url, kms).log()
    return {log.version_of(key)[1] for key in log.head().keys.values() if key.double_wrap}


# ---- rotation


@pytest.mark.parametrize("engine", [None, LocalEngine(1)], ids=["here", "workers"])
def test_keks(url: Path, kms: dict[str, str], engine: Any) -> None:
    before = head_of(url, kms)
    old = before.sealer
    with asked() as calls:
        result = turned(url, kms, engine=engine)
    assert engine is not None or calls == Counter(wrap=1, unwrap=1)
    head = head_of(url, kms)
    assert [(row.format, row.status) for row in result.rows] == [("table", "ok"), ("key", "ok")]
    assert (result.version, head.keys[old].state, needed(url, kms)) == (3, "retired", {result.rows[-1].key_id})
    check(url, kms)
    check(url, kms, version=2)
    assert swept(url, kms) == []
    rows = jobs.expire(url, kms=kms, keep=1).rows
    assert [row.error_class for row in rows if row.src == old] == ["Grace"]
    rows = jobs.expire(url, kms=kms, keep=1, skip_grace=True).rows
    assert [(row.format, row.src) for row in rows] == [("key", old)]
    check(url, kms)
    assert swept(url, kms) == []


def test_each_scope_and_what_is_planned(tmp_path: Path, kms: dict[str, str]) -> None:
    url = tmp_path / "ds"
    make(url, kms, policy=Policy("partition"))
    planned = jobs.rotate(url, kms=kms, dry_run=True)
    done = turned(url, kms)
    assert Counter(row.src for row in planned.rows) == Counter(row.src for row in done.rows)
    head = head_of(url, kms)
    active = [key for key in head.keys.values() if key.state == "active"]
    assert {key.properties.get("scope") for key in active} == {None, "partition:0", "partition:1"}
    assert counted_keys(url, kms) == {key.key_id for key in active if "scope" in key.properties}
    check(url, kms)


def counted_keys(url: Path, kms: Any) -> set[str]:
    log = Access.of(url, kms).log()
    return set(log.tables.counted(log.head().files, log.envelope(log.head())))


def needed(url: Path, kms: Any) -> set[str]:
    log = Access.of(url, kms).log()
    return reach.needed_keks(log, [log.head()], log.head())


def test_one_command_makes_the_old_version_needless(url: Path, kms: dict[str, str]) -> None:
    local.rotate_key(kms, "master")
    turned(url, kms, also_retired=False)
    assert masters(url, kms) == {"1", "2"}
    local.rotate_key(kms, "master")
    turned(url, kms)
    assert masters(url, kms) == {"3"}
    done = jobs.destroy_versions(kms, "master", [1, 2], datasets={url: head_of(url, kms).pin})
    assert done["destroyed"] == [1, 2]
    check(url, kms)
    check(url, kms, version=2)


def test_a_kek_of_the_past_that_does_not_open_is_in_nobodys_way(url: Path, kms: dict[str, str]) -> None:
    old = head_of(url, kms).sealer
    local.rotate_key(kms, "master")
    turned(url, kms, also_retired=False)
    local.rotate_key(kms, "master")
    local.set_state(kms, "master", "disabled", version=1)
    clear_cache()
    rows = {row.src: row for row in turned(url, kms).rows}
    assert (rows[old].status, rows[old].error_class) == ("skipped", "KeyAccessError")
    check(url, kms)


@pytest.mark.parametrize("rewraps", [False, True], ids=["local", "rewraps"])
def test_master_key(url: Path, kms: dict[str, str], rewraps: bool) -> None:
    before = read_tree(url)
    local.rotate_key(kms, "master")
    client = Rewrapping.with_properties(kms) if rewraps else load_kms(kms)
    head_of(url, client)
    with asked() as calls:
        result = turned(url, client, "mek")
    assert calls == (Counter(rewrap=1, unwrap=1) if rewraps else Counter(unwrap=2, wrap=1))
    assert result.counts == {"ok": 1, "skipped": 0, "failed": 0}
    after = read_tree(url)
    assert {path: after.get(path) for path in before} == before
    assert len(after) == len(before) + 1  # the entry
    again = turned(url, client, "mek")
    assert [row.error_class for row in again.rows] == ["Current"]
    assert read_tree(url) == after
    local.set_state(kms, "master", "destroyed", version=1)
    check(url, kms)
    check(url, kms, version=2)


def test_many_keks_in_batches(tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "ds", kms, policy=Policy("partition"))
    local.rotate_key(kms, "master")
    monkeypatch.setattr(rotation, "BATCH", 1)
    result = turned(tmp_path / "ds", kms, "mek")
    assert (result.counts["ok"], result.version) == (3, 5)
    assert masters(tmp_path / "ds", kms) == {"2"}


def test_another_kms(tmp_path: Path, url: Path, kms: dict[str, str]) -> None:
    there = keystore(tmp_path, "third", name="there.json")
    turned(url, kms, "mek", new_kms=there, wrapping_key_id="third")
    Path(kms["kms.local.path"]).unlink()
    check(url, there)
    check(url, there, version=2)
    write(url, there, "more")
    turned(url, there)
    check(url, there, *PATHS, "more")
    assert jobs.expire(url, kms=there, keep=1, skip_grace=True).failed == []


def test_another_kms_while_others_commit(
    tmp_path: Path, url: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = keystore(tmp_path, "master", name="there.json")
    sealed = Log._sealed

    def late(log: Log, *args: Any) -> Any:
        made = sealed(log, *args)
        if args[0].operation == "rotate-mek" and head_of(url, kms).number == 2:
            write(url, kms, "more")
        return made

    monkeypatch.setattr(Log, "_sealed", late)
    turned(url, kms, "mek", new_kms=there)
    check(url, there, *PATHS, "more")


@pytest.mark.parametrize("rewraps", [False, True], ids=["local", "rewraps"])
@pytest.mark.parametrize("engine", [None, LocalEngine(1)], ids=["here", "workers"])
def test_single_wrap(tmp_path: Path, kms: dict[str, str], rewraps: bool, engine: Any) -> None:
    url = tmp_path / "ds"
    make(url, kms, double_wrap=False)
    client = load_kms(kms) if engine or not rewraps else Rewrapping.with_properties(kms)
    count = len(PATHS)
    local.rotate_key(kms, "master")
    head_of(url, client)
    with asked() as calls:
        turned(url, client, engine=engine, also_retired=False)
    if engine is None:  # one wrap is tried
        assert calls == (Counter(rewrap=count, unwrap=1) if rewraps else Counter(unwrap=count + 1, wrap=count))
    snapshot = Access.of(url, kms).open()
    assert {client.key_version(row.wrapped_dek) for row in snapshot.files()} == {"2"}
    check(url, kms)
    turned(url, kms, wrapping_key_id="other")
    keys = head_of(url, kms).keys
    assert {keys[key_id].wrapping_key_id for key_id in counted_keys(url, kms)} == {"other"}
    check(url, kms)
    turned(url, kms, "double-wrap")
    keys = head_of(url, kms).keys
    assert all(keys[key_id].double_wrap for key_id in counted_keys(url, kms))
    before = read_tree(url)
    assert turned(url, kms, "double-wrap").rows == []
    assert read_tree(url) == before
    check(url, kms)
    check(url, kms, version=2)
    jobs.expire(url, kms=kms, keep=1, skip_grace=True)
    local.set_state(kms, "master", "destroyed")
    check(url, kms)
    assert swept(url, kms) == []


def test_what_the_kms_wraps_itself_cannot_be_left(tmp_path: Path, kms: dict[str, str]) -> None:
    url = tmp_path / "ds"
    make(url, kms, double_wrap=False)
    before = read_tree(url)
    for options in ({"wrapping_key_id": "other"}, {"new_kms": keystore(tmp_path, "master", name="there.json")}):
        with pytest.raises(PolicyError, match=r"wraps 6 data keys.*double-wrap"):
            turned(url, kms, "mek", **options)
    assert read_tree(url) == before


def many_tables(url: Path, kms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each table has two files."""
    for name in ("ags_fast.dataset.tables.TABLE_ROWS", "ags_fast.dataset.tables.PAGE_ROWS"):
        monkeypatch.setattr(name, 2)
    make(url, kms, double_wrap=False)
    assert len(head_of(url, kms).files) == 3


def test_a_rotation_that_failed_goes_on(tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = tmp_path / "ds"
    many_tables(url, kms, monkeypatch)
    before = head_of(url, kms).number
    failing = Failing.with_properties(kms)
    Failing.left = 5  # two tables, and half of the third
    result = jobs.rotate(url, kms=failing, concurrency=1, progress=False)
    assert (result.counts, result.version) == ({"ok": 2, "skipped": 0, "failed": 1}, before)
    assert head_of(url, kms).number == before
    check(url, kms)
    with asked() as calls:
        turned(url, kms)
    assert calls["wrap"] == 2  # of the third table
    check(url, kms)
    assert swept(url, kms) == []
    assert jobs.expire(url, kms=kms, keep=1, skip_grace=True).failed == []
    check(url, kms)


def test_a_rotation_that_is_not_taken_up_is_swept(
    tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path / "ds"
    many_tables(url, kms, monkeypatch)
    Failing.left = 3
    assert jobs.rotate(url, kms=Failing.with_properties(kms), concurrency=1, progress=False).failed
    turned(url, kms, resume=False)
    assert len(swept(url, kms)) > 1
    check(url, kms)


def test_a_rotation_keeps_its_copies_when_others_commit(
    tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path / "ds"
    make(url, kms, double_wrap=False)
    copies = rotation.Rotating._copies
    rounds: list[int] = []

    def late(work: Any, job: Any, todo: Any) -> Any:
        made = copies(work, job, todo)
        rounds.append(sum(table.rows for table in todo.tables))
        if len(rounds) == 1:
            with monkeypatch.context() as patch:
                patch.setattr("ags_fast.dataset.tables.RATIO", 0)
                write(url, kms, "more", double_wrap=False)
        return made

    monkeypatch.setattr(rotation.Rotating, "_copies", late)
    turned(url, kms)
    assert rounds == [6, 1]
    check(url, kms, *PATHS, "more")
    assert swept(url, kms) == []


def test_a_wrap_that_a_destruction_forbids_is_not_committed(
    tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version of the master key under which the rotation has wrapped is retired before it commits."""
    url = tmp_path / "ds"
    make(url, kms)
    own = "ags_fast.dataset.job_keys.JobKeys.own"
    made = JobKeys.own
    done: list[int] = []

    def late(keys: Any, *args: Any) -> Any:
        found = made(keys, *args)
        if not done:
            done.append(1)
            local.rotate_key(kms, "master")
            turned(url, kms, "mek")
            jobs.destroy_versions(kms, "master", [1], datasets={url: None})
        return found

    monkeypatch.setattr(own, late)
    turned(url, kms)
    check(url, kms)
    assert masters(url, kms) == {"2"}


def test_columns(tmp_path: Path, kms: dict[str, str]) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    url = tmp_path / "ds"
    Dataset.create(url, kms=kms, wrapping_key_id="master")
    table = pa.table({"id": [1, 2], "pay": [1.0, 2.0]})
    dataset = Dataset.open(url, kms=kms)
    with dataset.transaction(column_keys={"pay": "hr"}) as new:
        for n in range(3):
            with new.create(f"{n}.parquet", "parquet") as file:
                pq.write_table(table, file)
    mine = {row.path: row.wrapped_dek for row in dataset.snapshot().files()}
    turned(url, kms, from_key_id="hr", wrapping_key_id="other")
    assert {row.path: row.wrapped_dek for row in Access.of(url, kms).open().files()} == mine
    turned(url, kms)
    head = head_of(url, kms)
    assert {(key.wrapping_key_id, key.state) for key in head.keys.values()} == {
        ("master", "active"), ("master", "retired"), ("other", "active"), ("other", "retired"),
    }  # fmt: skip
    clear_cache()
    local.set_state(kms, "hr", "destroyed")
    dataset = Dataset.open(url, kms=kms)
    assert pq.read_table(dataset.open_file("0.parquet")).equals(table)


# ---- versions


def test_what_expires(tmp_path: Path, kms: dict[str, str]) -> None:
    url = tmp_path / "ds"
    make(url, kms)
    for path in "ab":
        write(url, kms, path)
    with pytest.raises(ValueError, match="keeps all versions"):
        jobs.expire(url, kms=kms)
    before = read_tree(url)
    planned = jobs.expire(url, kms=kms, keep=2, dry_run=True)
    assert read_tree(url) == before
    done = jobs.expire(url, kms=kms, keep=2)
    assert Counter(row.src for row in planned.rows) == Counter(row.src for row in done.rows)
    assert Counter(row.format for row in done.rows)["version"] == 2
    assert head_of(url, kms).first == 3
    jobs.expire(url, kms=kms, keep=1, older_than=timedelta(days=1))  # none is so old
    assert head_of(url, kms).first == 3
    jobs.set_policy(url, Policy(keep=2, keep_days=9), kms=kms)
    jobs.expire(url, kms=kms)
    assert head_of(url, kms).first == 3
    with pytest.raises(PolicyError, match="keeps versions 3 and newer"):
        jobs.expire(url, kms=kms, keep=1)
    jobs.expire(url, kms=kms, keep=1, force=True)
    assert head_of(url, kms).first == 4
    check(url, kms, *PATHS, "a", "b")
    assert swept(url, kms) == []


def test_a_policy_removes_nothing_by_itself(url: Path, kms: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    write(url, kms, "a")
    with caplog.at_level(logging.WARNING):
        before = jobs.set_policy(url, Policy(keep=1), kms=kms)
    assert before == Policy()
    assert "will expire versions 1 to 4" in caplog.text
    assert head_of(url, kms).first == 1
    write(url, kms, "b")
    assert head_of(url, kms).first == 5


def test_a_version_comes_back(url: Path, kms: dict[str, str]) -> None:
    write(url, kms, "more")
    jobs.set_policy(url, Policy(kek_uses=1000), kms=kms)
    turned(url, kms)
    planned = jobs.restore_version(url, 2, kms=kms, dry_run=True)
    assert [(row.status, row.src, row.dst) for row in planned.rows] == [("planned", "more", None)]
    done = jobs.restore_version(url, 2, kms=kms)
    check(url, kms)
    head = head_of(url, kms)
    assert (done.version, head.policy) == (head.number, Policy(kek_uses=1000))
    back = jobs.restore_version(url, 3, kms=kms)
    assert [(row.src, row.dst, row.status) for row in back.rows] == [("more", "more", "ok")]
    assert all(head_of(url, kms).keys[key_id].state == "active" for key_id in counted_keys(url, kms))
    check(url, kms, *PATHS, "more")
    assert jobs.restore_version(url, 3, kms=kms).rows == []
    assert swept(url, kms) == []


def test_a_version_that_expires_while_it_comes_back(
    url: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = write(url, kms, "more")
    with dataset.transaction() as new:
        new.remove("more")
    begin = Job.begin

    def late(*args: Any, **options: Any) -> Any:
        jobs.expire(url, kms=kms, keep=1)
        return begin(*args, **options)

    monkeypatch.setattr(Job, "begin", late)
    with pytest.raises(ExpiredError):
        jobs.restore_version(url, 3, kms=kms)
    check(url, kms)
    assert swept(url, kms) == []


def test_an_object_that_is_gone(url: Path, kms: dict[str, str]) -> None:
    dataset = write(url, kms, "more")
    (row,) = [row for row in dataset.snapshot().files() if row.path == "more"]
    with dataset.transaction() as new:
        new.remove("more")
    os.remove(url / row.file)
    with pytest.raises(FileNotFoundError, match=r"version 3 of .* cannot come back"):
        jobs.restore_version(url, 3, kms=kms)


def test_compaction(url: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ags_fast.dataset.tables.RATIO", 0)
    for path in ("0/x", "2"):
        write(url, kms, path)
    assert jobs.compact(url, kms=kms, dry_run=True).counts["planned"] == 3
    result = jobs.compact(url, kms=kms)
    assert (result.counts["ok"], len(head_of(url, kms).files)) == (3, 1)
    check(url, kms, *PATHS, "0/x", "2")
    assert jobs.compact(url, kms=kms).rows == []
    assert swept(url, kms) == []


def test_a_compaction_whose_retention_fails(url: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ags_fast.dataset.tables.RATIO", 0)
    write(url, kms, "0/x")
    jobs.set_policy(url, Policy(keep=1), kms=kms)

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", "x")

    with monkeypatch.context() as patch:
        patch.setattr(reach, "retention", refuse)
        result = jobs.compact(url, kms=kms)
    assert (result.counts["ok"], len(head_of(url, kms).files)) == (2, 1)
    assert result.expired is not None
    assert [row.error_class for row in result.expired.failed] == ["PermissionError"]
    check(url, kms, *PATHS, "0/x")


# ---- keys that do not open


def test_older_wraps_come_back(url: Path, kms: dict[str, str]) -> None:
    pin = head_of(url, kms).pin
    write(url, kms, "a")
    assert [row.error_class for row in jobs.restore_keys(url, kms=kms).rows] == ["Current"]
    local.rotate_key(kms, "master")
    turned(url, kms, "mek")
    write(url, kms, "b")
    local.set_state(kms, "master", "disabled", version=2)
    clear_cache()
    with pytest.raises(KeyAccessError):
        head_of(url, kms)
    before = read_tree(url)
    assert jobs.restore_keys(url, kms=kms, dry_run=True, pin=pin).counts["planned"] == 1
    assert read_tree(url) == before
    with pytest.raises(IntegrityError, match="does not descend"):
        jobs.restore_keys(url, kms=kms, pin=f"2-{'0' * 64}")
    clear_cache()
    assert jobs.restore_keys(url, kms=kms, pin=pin).counts == {"ok": 1, "skipped": 0, "failed": 0}
    check(url, kms, *PATHS, "a", "b")
    check(url, kms, *PATHS, "a", version=3)
    write(url, kms, "c")


def test_older_wraps_that_do_not_open_either(url: Path, kms: dict[str, str]) -> None:
    local.set_state(kms, "master", "disabled")
    clear_cache()
    with pytest.raises(KeyAccessError):
        jobs.restore_keys(url, kms=kms)


def test_versions_that_a_dataset_needs(url: Path, kms: dict[str, str]) -> None:
    local.rotate_key(kms, "master")
    for datasets in ({url: None}, {url: head_of(url, kms).pin}):
        with pytest.raises(PolicyError, match="nothing was destroyed"):
            jobs.destroy_versions(kms, "master", [1], datasets=datasets)
    turned(url, kms, "mek")
    with pytest.raises(IntegrityError):
        jobs.destroy_versions(kms, "master", [1], datasets={url: f"2-{'0' * 64}"})
    assert jobs.destroy_versions(kms, "master", [1], datasets={url: None}, dry_run=True)["destroyed"] == [1]
    assert head_of(url, kms).gone == ()
    assert jobs.destroy_versions(kms, "master", [1], datasets={url: None})["destroyed"] == [1]
    assert head_of(url, kms).gone == (("master", "1"),)
    check(url, kms)


# ---- upkeep


def test_upkeep(tmp_path: Path, kms: dict[str, str]) -> None:
    url = tmp_path / "ds"
    make(url, kms, policy=Policy(keep=1, keep_days=0))
    assert jobs.maintain(url, kms=kms).rows == []
    jobs.set_policy(url, Policy(keep=1, kek_lifetime_days=0), kms=kms)
    with Dataset.open(url, kms=kms).transaction() as new:
        new.leave()
    old = head_of(url, kms).sealer
    planned = jobs.maintain(url, kms=kms, dry_run=True)
    assert {row.format for row in planned.rows} >= {"key", "table"}
    result = jobs.maintain(url, kms=kms)
    assert result.failed == []
    assert head_of(url, kms).keys[old].state == "retired"
    assert "version" in {row.format for row in result.rows}
    check(url, kms)


def test_upkeep_verifies_a_share(url: Path, kms: dict[str, str]) -> None:
    pytest.importorskip("ags_fast.jobs.run")
    quiet: dict[str, Any] = {"kms": kms, "engine": LocalEngine(0), "progress": False}
    assert jobs.maintain(url, verify=1.0, **quiet).counts["ok"] == len(PATHS)
    row = next(iter(Access.of(url, kms).open().files()))
    (url / row.file).write_bytes(bytes(row.file_length))
    assert [one.src for one in jobs.maintain(url, verify=1.0, **quiet).failed] == [row.path]
    assert [one.src for one in jobs.verify_files(url, sample=1.0, **quiet).failed] == [row.path]
    assert jobs.verify_files(url, sample=0.0, **quiet).rows == []
    with pytest.raises(ValueError, match="sample is a share"):
        jobs.verify_files(url, sample=5, **quiet)


def test_each_file_has_its_turn(url: Path, kms: dict[str, str]) -> None:
    from ags_fast.jobs.verification import draws

    draw = draws(Access.of(url, kms).open())
    drawn = [sum(draw(str(day), path) < 0.2 for day in range(500)) for path in PATHS]
    assert all(60 < count < 140 for count in drawn)


# ---- audit


def double(url: Path, kms: Any) -> None:
    make(url, kms)


def single(url: Path, kms: Any) -> None:
    make(url, kms, double_wrap=False)


def scoped(url: Path, kms: Any) -> None:
    make(url, kms, policy=Policy("partition", keep=2))
    write(url, kms, "2/x")


def mixed(url: Path, kms: Any) -> None:
    make(url, kms, double_wrap=False)
    write(url, kms, "2/x")


def aged(url: Path, kms: Any) -> None:
    """Rotated in each way, with old KEKs in their grace and old versions."""
    make(url, kms)
    turned(url, kms)
    write(url, kms, "2/x", "0/0")
    local.rotate_key(kms, "master")
    turned(url, kms, "mek")
    local.rotate_key(kms, "master")


def worn(url: Path, kms: Any) -> None:
    make(url, kms)
    turned(url, kms, grace=timedelta(0))
    jobs.set_policy(url, Policy(kek_lifetime_days=0, keep=1), kms=kms)
    local.rotate_key(kms, "master")


STATES = (double, single, scoped, mixed, aged, worn)


def calls_of(work: Any) -> dict[str, int]:
    """The calls of the KMS in a process that knows no key."""
    clear_cache()
    with asked() as calls:
        work()
    return {operation: count for operation, count in sorted(calls.items()) if count}


def objects(url: Path, begin: str = "") -> set[str]:
    return {path for path in read_tree(url) if (path.startswith(begin) if begin else not path.startswith("_ags/"))}


@pytest.mark.parametrize("rewraps", [False, True], ids=["local", "rewraps"])
@pytest.mark.parametrize("event", [None, "planned", "kek-leaked", "dek-leaked", "mek-leaked"])
@pytest.mark.parametrize("state", STATES)
def test_steps_cost_what_was_said(state: Any, event: Any, rewraps: bool, tmp_path: Path, kms: dict[str, str]) -> None:
    url = tmp_path / "ds"
    state(url, kms)
    client = Rewrapping.with_properties(kms) if rewraps else load_kms(kms)
    before = read_tree(url)
    found = jobs.audit(url, kms=client, event=event)
    assert read_tree(url) == before
    for step in found["steps"]:
        arguments, function = dict(step["arguments"]), step["function"]
        if function == "new_version":
            local.rotate_key(kms, arguments["key_id"])
        if "kms_calls" not in step:
            continue
        was = {begin: objects(url, begin) for begin in ("", "_ags/tables/", "_ags/log/")}
        quiet = {} if function == "expire" else {"progress": False, "engine": LocalEngine(0)}
        calls = calls_of(lambda: getattr(jobs, function)(url, kms=client, **arguments, **quiet))  # noqa: B023
        assert calls == step["kms_calls"], step
        gone = {begin: was[begin] - objects(url, begin) for begin in was}
        names = {"files": "", "tables": "_ags/tables/", "versions": "_ags/log/"}
        removed = {name: len(gone[begin]) for name, begin in names.items()}
        assert removed == {name: step["removed"][name] for name in names}, step
        assert step["written"]["files"] == len(objects(url) - was[""])
    check_all(url, kms)


def check_all(url: Path, kms: Any) -> None:
    clear_cache()
    for version in Dataset.open(url, kms=kms).versions():
        dataset = Dataset.open(url, kms=kms, version=version.number)
        for file in dataset.files():
            assert dataset.open_file(file.path).read() == file.path.encode()


def verdicts(url: Path, kms: Any) -> dict[tuple[str, str | None], bool | None]:
    found = jobs.audit(url, kms=kms)["masters"]
    return {(m["wrapping_key_id"], v["version"]): v["may_be_destroyed"] for m in found for v in m["versions"]}


@pytest.mark.parametrize("state", STATES)
def test_what_may_be_destroyed(state: Any, tmp_path: Path, kms: dict[str, str]) -> None:
    """When what a version is said to wait for has been run, nothing needs it."""
    url = tmp_path / "ds"
    state(url, kms)
    local.rotate_key(kms, "master")
    newest = load_kms(kms).current_version("master")
    assert verdicts(url, kms)["master", newest] is False
    waiting = [row for m in jobs.audit(url, kms=kms)["masters"] for row in m["versions"] if row["first"]]
    assert waiting
    for row in waiting:
        with pytest.raises(PolicyError):
            jobs.destroy_versions(kms, "master", [int(row["version"])], datasets={url: None})
        for step in row["first"]:
            getattr(jobs, step["function"])(url, kms=kms, **step["arguments"])
        if row["version"] != newest:
            assert verdicts(url, kms).get(("master", row["version"]), True) is True
            jobs.destroy_versions(kms, "master", [int(row["version"])], datasets={url: None})
    check_all(url, kms)


def test_status(tmp_path: Path, kms: dict[str, str]) -> None:
    url = tmp_path / "ds"
    make(url, kms, policy=Policy(keep=3, keep_days=2, kek_lifetime_days=10))
    local.rotate_key(kms, "master")
    turned(url, kms, also_retired=False)
    write(url, kms, "a")
    found = jobs.key_status(url, kms=kms)
    assert json.loads(json.dumps(found)) == found
    assert (found["version"], found["tables_opened"], found["unread"]) == (4, 0, [])
    old, new = found["keys"]
    assert (old["state"], old["master_version"], old["needed_by_versions"]) == ("retired", "1", [1, 2])
    assert (new["state"], new["master_version"], new["needed_by_versions"]) == ("active", "2", [3, 4])
    assert (old["data_keys"], new["data_keys"]) == (0, len(PATHS) + 1)
    assert [row["expires_ms"] is None for row in found["versions"]] == [False, True, True, True]
    assert found._repr_html_()


def test_an_open_job_is_shown(tmp_path: Path, kms: dict[str, str]) -> None:
    url = tmp_path / "ds"
    make(url, kms, double_wrap=False)
    with Dataset.open(url, kms=kms).transaction() as new:
        (job,) = jobs.audit(url, kms=kms)["open_jobs"]
        assert (job["job_id"], job["lives"]) == (new.job_id, True)
        new.abort()
    with Dataset.open(url, kms=kms).transaction() as new:
        new.leave()
    assert [job["lives"] for job in jobs.key_status(url, kms=kms)["open_jobs"]] != [True]


def test_what_cannot_be_read_leaves_doubts(url: Path, kms: dict[str, str]) -> None:
    local.rotate_key(kms, "master")
    turned(url, kms, also_retired=False)
    local.set_state(kms, "master", "disabled", version=1)
    clear_cache()
    found = jobs.audit(url, kms=kms)
    assert any("version 1" in text for text in found["unread"])
    assert found["masters"][0]["others"] is None
