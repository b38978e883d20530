"""Handles and transactions of datasets."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from datasets import read_tree
from kms_clients import keystore

pytest.importorskip("msgspec")

from ags_fast.dataset import reach
from ags_fast.dataset.dataset import Dataset
from ags_fast.dataset.draft import Idle
from ags_fast.dataset.policy import Policy
from ags_fast.errors import ConcurrentChangeError, ExpiredError, FormatError, JobEndedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return keystore(tmp_path, "master")


@pytest.fixture
def dataset(tmp_path: Path, kms: dict[str, str]) -> Dataset:
    return Dataset.create(tmp_path / "ds", kms=kms, wrapping_key_id="master")


def write(
    dataset: Dataset, *paths: str, replace: bool = False, meanwhile: Callable[[], object] = lambda: None
) -> int | None:
    with dataset.transaction(fsync=False) as new:
        for path in paths:
            with new.create(path, replace=replace) as file:
                file.write(path.encode())
        meanwhile()
    return new.version


def fail(dataset: Dataset, path: str) -> None:
    def stop() -> None:
        raise KeyError

    write(dataset, path, meanwhile=stop)


def contents(dataset: Dataset) -> dict[str, bytes]:
    return {file.path: dataset.open_file(file.path).read() for file in dataset.files()}


def objects(dataset: Dataset) -> set[str]:
    from pathlib import Path

    return set(read_tree(Path(dataset.url)))


def swept(dataset: Dataset) -> set[str]:
    """What a sweep removes."""
    return set(reach.sweep(dataset.snapshot().log, Idle(), 0))


def test_files_are_written_renamed_copied_and_removed(dataset: Dataset) -> None:
    assert write(dataset, "a/x", "b/y") == dataset.version == 2
    with dataset.transaction() as new:
        new.rename({"a/x": "c/x"})
        new.copy("b/y", "b/z")
    assert contents(dataset) == {"c/x": b"a/x", "b/y": b"b/y", "b/z": b"b/y"}
    folders, files = dataset.list_folder("")
    assert (folders, files) == (["b", "c"], [])
    assert [file.path for file in dataset.list_folder("b")[1]] == ["b/y", "b/z"]
    assert not dataset.has_folder("a")
    assert {(change.kind, change.path) for change in dataset.changes(2)} == {("moved", "c/x"), ("added", "b/z")}
    with dataset.transaction() as new:
        new.remove_all()
    assert contents(dataset) == {}
    assert [(version.number, version.operation) for version in dataset.versions()] == [
        (4, "write"), (3, "write"), (2, "write"), (1, "create"),
    ]  # fmt: skip
    assert swept(dataset) == set()


def test_what_is_dropped_leaves_nothing(dataset: Dataset) -> None:
    write(dataset, "a")
    before = objects(dataset)
    with dataset.transaction():
        pass
    assert objects(dataset) == before  # nothing was wrapped, so the log need not count anything
    with pytest.raises(KeyError):
        fail(dataset, "b")
    assert contents(dataset) == {"a": b"a"}
    assert len(objects(dataset) - before) == 1  # the entry that counts what was wrapped


def test_the_second_of_two_transactions_is_refused(dataset: Dataset, kms: dict[str, str]) -> None:
    other = Dataset.open(dataset.url, kms=kms)
    with pytest.raises(ConcurrentChangeError, match="another job has changed 'a'"):
        write(dataset, "a", meanwhile=lambda: write(other, "a"))
    assert dataset.refresh()
    assert contents(dataset) == {"a": b"a"}
    assert swept(dataset) == set()


def test_tasks_write_with_tickets(dataset: Dataset) -> None:
    with dataset.transaction() as new:
        ticket = pickle.loads(pickle.dumps(new.ticket()))
        with ticket.attempt() as attempt:
            for path in ("t/1", "t/2"):
                with attempt.create(path) as file:
                    file.write(b"task")
        with ticket.create("t/3") as lost:  # nobody adds its receipt
            lost.write(b"lost")
        new.add(pickle.loads(pickle.dumps(attempt.receipts())))
        new.add(attempt.receipts())
    assert contents(dataset) == {"t/1": b"task", "t/2": b"task"}
    assert sum(not path.startswith("_ags/") for path in objects(dataset)) == 2
    head = dataset.snapshot().entry
    assert head.keys[head.sealer].uses > 3 * 64  # what the transaction and both attempts have reserved
    assert swept(dataset) == set()
    with pytest.raises(JobEndedError):
        ticket.create("t/4")


def test_another_process_commits_what_was_left(dataset: Dataset, kms: dict[str, str]) -> None:
    with dataset.transaction() as new:
        job_id = new.leave()
    assert swept(dataset) == {f"_ags/plans/{job_id}/{name}" for name in ("left", "lock", "plan")}
    with dataset.transaction(block_size=1 << 16) as new:
        job_id, ticket = new.job_id, new.ticket()
        new.leave()
    with ticket.attempt() as attempt, attempt.create("a") as file:
        file.write(b"a")
    other = Dataset.open(dataset.url, kms=kms)
    with other.resume(job_id) as new:
        new.add(attempt.receipts())
        with new.create("b") as file:
            file.write(b"b")
    assert contents(other) == {"a": b"a", "b": b"b"}
    assert {row.block_size for row in other.snapshot().files()} == {1 << 16}
    with pytest.raises(JobEndedError), other.resume(job_id):
        pass


def test_a_kek_for_each_folder(tmp_path: Path, kms: dict[str, str]) -> None:
    policy = Policy("partition", keep=1)
    dataset = Dataset.create(tmp_path / "ds", kms=kms, wrapping_key_id="master", policy=policy)
    for name in "xyz":
        write(dataset, f"a/{name}", f"b/{name}")
    assert len(dataset.snapshot().entry.keys) == 3
    with dataset.transaction() as new:
        new.rename({"a/x": "b/moved"})
    found: Any = dataset.find("b/moved"), dataset.find("b/x")
    assert found[0].key_id == found[1].key_id
    assert dataset.open_file("b/moved").read() == b"a/x"
    assert [version.number for version in dataset.versions()] == [5]  # the policy keeps one


def test_a_kek_wraps_so_many_and_no_more(tmp_path: Path, kms: dict[str, str]) -> None:
    dataset = Dataset.create(tmp_path / "ds", kms=kms, wrapping_key_id="master", policy=Policy(kek_uses=3))
    write(dataset, *(f"{n}" for n in range(10)))
    rows = list(dataset.snapshot().files())
    counts = [sum(row.key_id == key_id for row in rows) for key_id in {row.key_id for row in rows}]
    assert max(counts) <= 3
    assert len(contents(dataset)) == 10


@pytest.mark.parametrize("elsewhere", [False, True], ids=["keys in the log", "key store"])
def test_a_handle_at_a_version_that_was_expired(elsewhere: bool, tmp_path: Path, kms: dict[str, str]) -> None:
    how: dict[str, Any] = {"kms": kms, "key_store": tmp_path / "keys" if elsewhere else None}
    dataset = Dataset.create(tmp_path / "ds", wrapping_key_id="master", **how)
    write(dataset, "a")
    (sealed,) = pickle.loads(pickle.dumps(list(dataset.sealed_files())))
    there = Dataset.open(dataset.url, version=2, **how)
    write(dataset, "a", replace=True)
    reach.expire(dataset.snapshot().log, Idle(), lambda head: head.number, skip_grace=False, now_ms=0)
    for read in (lambda: there.open_file("a"), sealed.open):
        with pytest.raises(ExpiredError):
            read()
    with pytest.raises(ExpiredError):
        Dataset.open(dataset.url, version=2, **how)


def test_a_handle_pickles_without_a_key(dataset: Dataset) -> None:
    write(dataset, "a")
    copy = pickle.loads(pickle.dumps(dataset))
    write(dataset, "b")
    assert (copy.version, dataset.version) == (2, 3)
    assert contents(copy) == {"a": b"a"}


def test_there_is_one_dataset_at_a_place(dataset: Dataset, kms: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match=r"Dataset\.open"):
        Dataset.create(dataset.url, kms=kms, wrapping_key_id="master")
    with pytest.raises(FileNotFoundError):
        Dataset.open(tmp_path / "none", kms=kms)
    (tmp_path / "old/_ags/versions").mkdir(parents=True)
    (tmp_path / "old/_ags/versions/0000000001.json").write_bytes(b"{}")
    for act in (Dataset.open, lambda url, kms: Dataset.create(url, kms=kms, wrapping_key_id="master")):
        with pytest.raises(FormatError, match=r"made by ags_fast 0\.2"):
            act(tmp_path / "old", kms=kms)
