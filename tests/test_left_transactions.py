"""Transactions that one process begins, tasks write, and another process commits."""

from __future__ import annotations

import io
import os
import pickle
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import programs.jobs
import pytest
from datasets import HERE, MASTER, data_files, decrypted, leftovers, lose_an_answer, make_kms
from support import program, run_python, start_python

from ags_fast import Dataset
from ags_fast.dataset.job import Job
from ags_fast.dataset.log import BATCHES_KEPT
from ags_fast.errors import ConcurrentChangeError, ExpiredError, JobEndedError
from ags_fast.jobs import audit, encrypt_files, expire, remove_files, rotate, sweep, verify_files

if TYPE_CHECKING:
    from ags_fast.dataset.files.writing import Receipt, Ticket

TREE = {"a": b"1", "b/c": b"2"}
DAY = 86_400


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return make_kms(tmp_path, keys=(MASTER, "other"))


@pytest.fixture
def dataset(tmp_path: Path, kms: dict[str, str]) -> Dataset:
    made = Dataset.create(tmp_path / "dataset", kms=kms, wrapping_key_id=MASTER)
    write(made, TREE)
    return made


def write(dataset: Dataset, tree: dict[str, bytes]) -> None:
    with dataset.transaction(fsync=False) as new:
        for path, data in tree.items():
            with new.create(path) as file:
                file.write(data)


def left(dataset: Dataset, **options: Any) -> tuple[str, Ticket]:
    """The id of a transaction that was left, and its ticket."""
    with dataset.transaction(fsync=False, **options) as new:
        ticket = new.ticket()
        return new.leave(), pickle.loads(pickle.dumps(ticket))


def attempt(ticket: Ticket, tree: dict[str, bytes]) -> list[Receipt]:
    with ticket.attempt() as task:
        for path, data in tree.items():
            with task.create(path) as file:
                file.write(data)
    return task.receipts()


def signs(dataset: Dataset) -> list[Path]:
    """What tells whether jobs live: their plans, and what lies beside these."""
    return list((Path(dataset.url) / "_ags/plans").glob("*/*"))


def age(dataset: Dataset, seconds: float) -> None:
    """Make plans look as if nothing had happened to them for so long."""
    for path in signs(dataset):
        os.utime(path, (time.time() - seconds,) * 2)


def test_another_process_commits(dataset: Dataset, kms: dict[str, str], tmp_path: Path) -> None:
    job_id, ticket = left(dataset, block_size=1024, dek_length=32, column_keys={"x": "other"})
    receipts = attempt(ticket, {"c": b"3" * 5000})
    assert sweep(dataset.url, kms=kms).rows == []  # it waits: nothing goes
    (open_job,) = audit(dataset.url, kms=kms)["open_jobs"]
    assert (open_job["job_id"], open_job["lives"]) == (job_id, None)
    (tmp_path / "receipts").write_bytes(pickle.dumps(receipts))
    run_python(program(programs.jobs.resume_transaction, dataset.url, kms, job_id, tmp_path / "receipts"))
    assert dataset.refresh()
    now = TREE | {"c": b"3" * 5000, "by the other": b"process"}
    assert decrypted(dataset.url, kms) == now
    assert leftovers(Path(dataset.url), kms) == []
    with pytest.raises(JobEndedError, match="committed before, as version 3"), dataset.resume(job_id):
        pass
    with pytest.raises(JobEndedError, match="is over"):
        attempt(ticket, {"late": b""})
    verify_files(dataset.url, kms=kms, engine=HERE).raise_for_failures()
    assert sweep(dataset.url, kms=kms).rows == []


def test_an_exception_drops_what_was_taken_up(dataset: Dataset, kms: dict[str, str]) -> None:
    before = data_files(dataset.url)
    job_id, ticket = left(dataset)
    receipts = attempt(ticket, {"c": b"3"})
    attempt(ticket, {"d": b"4"})  # whose receipts never come
    with pytest.raises(KeyboardInterrupt), dataset.resume(job_id) as new:
        new.add(receipts)
        raise KeyboardInterrupt
    assert decrypted(dataset.url, kms) == TREE
    assert data_files(dataset.url) == before
    assert leftovers(Path(dataset.url), kms) == []


def test_what_is_refused(dataset: Dataset, kms: dict[str, str]) -> None:
    with dataset.transaction(fsync=False) as new:
        new.remove("a")
        with pytest.raises(ValueError, match="before it changes anything"):
            new.leave()
        with pytest.raises(ValueError, match="not a transaction that was left"), dataset.resume(new.job_id):
            pass
        with pytest.raises(ValueError, match="number of a batch"):
            new.once("s", -1)
        with pytest.raises(ValueError, match="number of a batch"):
            new.once("", 1)
        with new.create("a") as file:
            file.write(TREE["a"])
    for job_id, error in (("../x", ValueError), ("20260101T000000-0123456789ab", JobEndedError)):
        with pytest.raises(error), dataset.resume(job_id):
            pass
    with pytest.raises(ValueError, match="stays at version"):
        Dataset.open(dataset.url, kms=kms, version=2).resume(new.job_id)
    child = start_python(program(programs.jobs.begin_transaction, dataset.url, kms, True))
    assert child.stdout is not None
    assert child.stdout.readline() == "now\n"
    child.kill()
    child.communicate()
    (dead,) = (Path(dataset.url) / "_ags/plans").iterdir()
    with pytest.raises(ValueError, match="not a transaction that was left"), dataset.resume(dead.name):
        pass
    (dead / "left").touch()
    with dataset.resume(dead.name):
        pass  # nothing was added
    sweep(dataset.url, kms=kms)
    assert decrypted(dataset.url, kms) == TREE
    assert leftovers(Path(dataset.url), kms) == []


def test_nobody_takes_it_up(dataset: Dataset, kms: dict[str, str]) -> None:
    """A sweep leaves it for a day after its last sign of life, which a task gives, too."""
    before = data_files(dataset.url)
    job_id, ticket = left(dataset)
    age(dataset, DAY - 60)
    assert sweep(dataset.url, kms=kms).rows == []
    age(dataset, DAY + 60)
    attempt(ticket, {"c": b"3"})
    assert sweep(dataset.url, kms=kms).rows == []
    age(dataset, DAY + 60)
    assert {row.format for row in sweep(dataset.url, kms=kms).rows} == {"plan", "file"}
    assert data_files(dataset.url) == before
    assert leftovers(Path(dataset.url), kms) == []
    job_id, ticket = left(dataset)
    attempt(ticket, {"c": b"3"})
    sweep(dataset.url, kms=kms, older_than=timedelta(0))  # who says so takes it away at once
    assert data_files(dataset.url) == before
    with pytest.raises(ConcurrentChangeError), dataset.resume(job_id):
        pass


def test_a_long_task_shows_that_it_lives(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ticket = left(dataset)
    clock = 0.0
    monkeypatch.setattr("ags_fast.dataset.files.writing.time.monotonic", lambda: clock)
    with ticket.attempt() as task:
        task.create("c").abort()
        for after, shown in ((1, False), (599, False), (601, True), (900, False)):
            age(dataset, 1000)
            clock = float(after)
            task.renew()
            assert any(time.time() - path.stat().st_mtime < 500 for path in signs(dataset)) == shown, after
    assert task.receipts() == []


def test_a_long_job_lives_with_its_further_plans(dataset: Dataset, kms: dict[str, str]) -> None:
    """A sign of life of the job is one of the further plans of its tasks, too: no sweep ends them alone."""
    job_id, ticket = left(dataset)
    with ticket.attempt() as task:
        file = task.create("c")
        age(dataset, DAY + 60)
        (Path(dataset.url) / "_ags/plans" / job_id / "alive").touch()
        assert sweep(dataset.url, kms=kms).rows == []
        file.close()
    with dataset.resume(job_id) as new:
        new.add(task.receipts())
    assert decrypted(dataset.url, kms) == TREE | {"c": b""}


@pytest.mark.parametrize("how", ["exception", "killed", "slower", "receipt"])
def test_an_attempt_that_loses(dataset: Dataset, kms: dict[str, str], how: str) -> None:
    """Its files are gone after the commit, at the latest: also what a dead process has not finished."""
    job_id, ticket = left(dataset)
    before = data_files(dataset.url)
    if how == "exception":
        with pytest.raises(ZeroDivisionError), ticket.attempt() as task:
            task.create("p/c").close()
            task.create("p/d").write(b"x")
            raise ZeroDivisionError
        assert data_files(dataset.url) == before
        with pytest.raises(ValueError, match="receipts"):
            task.receipts()
    elif how == "killed":
        run_python(program(programs.jobs.die_in_attempt, pickle.dumps(ticket)))
        assert len(data_files(dataset.url) - before) == 2
    else:
        attempt(ticket, {"p/c": b"slower"})
    receipts = attempt(ticket, {"p/c": b"3"})
    with dataset.resume(job_id) as new:
        new.add(receipts)
    assert decrypted(dataset.url, kms) == TREE | {"p/c": b"3"}
    assert data_files(dataset.url) - before == {receipts[0].entry.file}
    assert leftovers(Path(dataset.url), kms) == []


def test_an_attempt_with_an_open_file(dataset: Dataset) -> None:
    _, ticket = left(dataset)
    before = data_files(dataset.url)
    with pytest.raises(ValueError, match="'c' is still open"), ticket.attempt() as task:
        task.create("d").close()
        task.create("c")
    with pytest.raises(TypeError, match="ticket"):
        pickle.dumps(task)
    assert data_files(dataset.url) == before


def test_a_slow_attempt_ends_after_the_commit(dataset: Dataset, kms: dict[str, str]) -> None:
    job_id, ticket = left(dataset)
    with pytest.raises(JobEndedError, match="over"), ticket.attempt() as slow:
        file = slow.create("c")
        receipts = attempt(ticket, {"c": b"3"})
        with dataset.resume(job_id) as new:
            new.add(receipts)
        file.close()
    assert decrypted(dataset.url, kms) == TREE | {"c": b"3"}
    sweep(dataset.url, kms=kms)
    assert leftovers(Path(dataset.url), kms) == []


def test_the_commit_dies_after_its_version(
    dataset: Dataset, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, ticket = left(dataset)
    receipts = attempt(ticket, {"c": b"3"})
    monkeypatch.setattr(Job, "_end", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError), dataset.resume(job_id) as new:
        new.add(receipts)
    monkeypatch.undo()
    with pytest.raises(JobEndedError, match="committed before, as version 3"), dataset.resume(job_id):
        pass
    assert decrypted(dataset.url, kms) == TREE | {"c": b"3"}
    assert leftovers(Path(dataset.url), kms) == []


@pytest.mark.parametrize("what", ["rotates", "expires"])
def test_what_happens_meanwhile(dataset: Dataset, kms: dict[str, str], what: str) -> None:
    job_id, ticket = left(dataset)
    receipts = attempt(ticket, {"c": b"3"})
    other = Dataset.open(dataset.url, kms=kms)
    write(other, {"theirs": b"4"})
    if what == "rotates":
        rotate(dataset.url, kms=kms, what="kek", engine=HERE, force_expire=True).raise_for_failures()
    expire(dataset.url, kms=kms, keep=1, skip_grace=True).raise_for_failures()
    with dataset.resume(job_id) as new:
        with pytest.raises(ExpiredError, match=r"version 2.* expired"):
            new.remove_all()
        with pytest.raises(ExpiredError, match=r"version 2.* expired"):
            new.remove("a")
        new.add(receipts)
        with new.create("d") as file:
            file.write(b"5")
    assert decrypted(dataset.url, kms) == TREE | {"theirs": b"4", "c": b"3", "d": b"5"}
    verify_files(dataset.url, kms=kms, engine=HERE).raise_for_failures()
    assert leftovers(Path(dataset.url), kms) == []


# ---------------------------------------------------------------------------------------- to replace all files


@pytest.mark.parametrize("resumed", [False, True])
def test_remove_all(dataset: Dataset, kms: dict[str, str], resumed: bool) -> None:
    """Files that were added meanwhile stay: they are newer than those that are replaced."""
    other = Dataset.open(dataset.url, kms=kms)
    if resumed:
        job_id, ticket = left(dataset)
        write(other, {"theirs": b"4"})
        with dataset.resume(job_id) as new:
            new.remove_all()
            new.add(attempt(ticket, {"a": b"new"}))
    else:
        with dataset.transaction(fsync=False) as new:
            new.remove_all()
            write(other, {"theirs": b"4"})
            with new.create("a") as file:
                file.write(b"new")
    assert decrypted(dataset.url, kms) == {"a": b"new", "theirs": b"4"}
    assert decrypted(dataset.url, kms, version=2) == TREE


@pytest.mark.parametrize("change", ["replaces", "removes"])
def test_two_that_replace_all(dataset: Dataset, kms: dict[str, str], change: str) -> None:
    other = Dataset.open(dataset.url, kms=kms)
    job_id, ticket = left(dataset)
    if change == "replaces":
        with other.transaction(fsync=False) as theirs:
            theirs.remove_all()
            theirs.create("theirs").close()
    else:
        remove_files(dataset.url, "a", kms=kms).raise_for_failures()
    now = decrypted(dataset.url, kms)
    with pytest.raises(ConcurrentChangeError), dataset.resume(job_id) as new:
        new.remove_all()
        new.add(attempt(ticket, {"mine": b""}))
    assert decrypted(dataset.url, kms) == now
    assert leftovers(Path(dataset.url), kms) == []


def test_two_that_replace_nothing(tmp_path: Path, kms: dict[str, str]) -> None:
    """Both find a dataset without files: only one may win."""
    dataset = Dataset.create(tmp_path / "ds", kms=kms, wrapping_key_id=MASTER)
    other = Dataset.open(dataset.url, kms=kms)
    with pytest.raises(ConcurrentChangeError, match="which had none"), dataset.transaction(fsync=False) as new:
        new.remove_all()
        new.create("mine").close()
        with other.transaction(fsync=False) as theirs:
            theirs.remove_all()
            theirs.create("theirs").close()
    assert set(decrypted(dataset.url, kms)) == {"theirs"}
    assert leftovers(Path(dataset.url), kms) == []


# ---------------------------------------------------------------------------------------- batches of streams


def commit_batch(dataset: Dataset, stream: str, batch: int, tree: dict[str, bytes]) -> int | None:
    with dataset.transaction(fsync=False) as new:
        new.once(stream, batch)
        for path, data in tree.items():
            with new.create(path) as file:
                file.write(data)
    return new.version


def test_a_batch_is_committed_once(dataset: Dataset, kms: dict[str, str], tmp_path: Path) -> None:
    other = Dataset.open(dataset.url, kms=kms)
    assert commit_batch(dataset, "s", 0, {"s/0": b"0"}) == 3
    assert commit_batch(other, "s", 0, {"s/0 again": b"0"}) is None
    assert commit_batch(other, "t", 0, {"t/0": b"0"}) is not None
    assert commit_batch(dataset, "s", 2, {"s/2": b"2"}) is not None
    assert commit_batch(dataset, "s", 1, {"s/1": b"1"}) is None
    now = TREE | {"s/0": b"0", "t/0": b"0", "s/2": b"2"}
    assert decrypted(dataset.url, kms) == now
    assert leftovers(Path(dataset.url), kms) == []
    # other jobs keep what is recorded
    (tmp_path / "src").mkdir()
    (tmp_path / "src/x").write_bytes(b"x")
    encrypt_files(tmp_path / "src", dataset.url, kms=kms, wrapping_key_id=MASTER, engine=HERE).raise_for_failures()
    rotate(dataset.url, kms=kms, what="kek", engine=HERE).raise_for_failures()
    expire(dataset.url, kms=kms, keep=1, skip_grace=True).raise_for_failures()
    dataset.refresh()
    assert commit_batch(dataset, "s", 2, {"s/2 again": b"2"}) is None
    assert commit_batch(dataset, "t", 1, {}) is None  # without files there is no version
    assert decrypted(dataset.url, kms) == now | {"x": b"x"}
    assert [(one.stream, one.batch) for one in dataset.snapshot().entry.streams] == [("t", 0), ("s", 2)]


def test_two_writers_of_one_batch(dataset: Dataset, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one commits while the first one makes its version: that one finds its number taken, and looks."""
    other = Dataset.open(dataset.url, kms=kms)
    lose_an_answer(monkeypatch, before=lambda: commit_batch(other, "s", 7, {"theirs": b"7"}))
    assert commit_batch(dataset, "s", 7, {"mine": b"7"}) is None
    assert other.version == 3
    assert decrypted(dataset.url, kms) == TREE | {"theirs": b"7"}
    assert leftovers(Path(dataset.url), kms) == []


def test_the_answer_of_a_batch_is_lost(dataset: Dataset, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    lose_an_answer(monkeypatch)
    assert commit_batch(dataset, "s", 7, {"mine": b"7"}) == 3
    assert decrypted(dataset.url, kms) == TREE | {"mine": b"7"}
    assert leftovers(Path(dataset.url), kms) == []


def test_streams_are_forgotten(tmp_path: Path, kms: dict[str, str]) -> None:
    """Of many streams, the one that has committed last is remembered longest."""
    dataset = Dataset.create(tmp_path / "ds", kms=kms, wrapping_key_id=MASTER)
    for n in range(BATCHES_KEPT + 2):
        assert commit_batch(dataset, f"stream {n}", 3, {f"{n}": b""}) is not None
        assert commit_batch(dataset, "stream 0", 10 + n, {f"first {n}": b""}) is not None
    streams = dataset.snapshot().entry.streams
    assert len(streams) == BATCHES_KEPT
    assert [(one.stream, one.batch) for one in (streams[0], streams[1], streams[-1])] == [
        ("stream 3", 3), ("stream 4", 3), ("stream 0", 11 + BATCHES_KEPT),
    ]  # fmt: skip
    assert commit_batch(dataset, "stream 2", 3, {"again": b""}) is not None


# ---------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("column_keys", [{}, {"secret": "other"}])
def test_files_of_tables(dataset: Dataset, kms: dict[str, str], column_keys: dict[str, str]) -> None:
    """Two files share an encoder, and one of them is given up."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    from ags_fast.parquet.table_writer import Encoder

    table = pa.table({"n": range(1000), "secret": [f"a marker {n}" for n in range(1000)]})
    before = data_files(dataset.url)
    job_id, ticket = left(dataset, column_keys=column_keys)
    encoder = Encoder(table.schema, {"compression": "none"})
    with ticket.attempt() as task, task.create_tables("t/y.parquet", encoder) as other:
        with task.create_tables("t/x.parquet", encoder) as file:
            for start in range(0, 1000, 300):
                file.write_table(table.slice(start, 300))
                other.write_table(table.slice(start, 1))
            assert file.tell() > 1000
            with pytest.raises(io.UnsupportedOperation, match="write_table"):
                file.write(b"PAR1")
        with pytest.raises(ValueError, match="closed"):
            file.write_table(table)
        other.abort()
    with dataset.resume(job_id) as new:
        new.add(task.receipts())
    (found,) = dataset.files("t/*")
    with dataset.open_file(found.path) as opened:
        assert opened.seek(0, io.SEEK_END) == found.plain_length
        read = pq.ParquetFile(opened)
        assert read.num_row_groups == 4
        assert read.read().equals(table)
    (name,) = data_files(dataset.url) - before
    stored = (Path(dataset.url) / name).read_bytes()
    assert b"a marker" not in stored
    assert len(stored) == found.file_length
    verify_files(dataset.url, kms=kms, engine=HERE).raise_for_failures()
    assert leftovers(Path(dataset.url), kms) == []


def test_on_storage_without_locks(kms: dict[str, str]) -> None:
    """Only its age tells whether a plan is dead, and to take one up counts as a sign of life."""
    fsspec = pytest.importorskip("fsspec")
    name = os.urandom(8).hex()
    url = f"memory://{name}"
    dataset = Dataset.create(url, kms=kms, wrapping_key_id=MASTER)
    write(dataset, TREE)
    job_id, ticket = left(dataset)
    receipts = attempt(ticket, {"c": b"3"})
    attempt(ticket, {"c": b"slower"})
    assert sweep(url, kms=kms).rows == []
    with dataset.resume(job_id) as new:
        new.add(receipts)
    assert dataset.version == 3
    found = [path for path in fsspec.filesystem("memory").find(f"/{name}") if path.startswith(f"/{name}/c.")]
    assert len(found) == 1
    with dataset.open_file("c") as file:
        assert file.read() == b"3"
    job_id, ticket = left(dataset)
    attempt(ticket, {"d": b"4"})
    sweep(url, kms=kms, older_than=timedelta(0))
    assert not [path for path in fsspec.filesystem("memory").find(f"/{name}") if "/d." in path]
    with pytest.raises(ConcurrentChangeError), dataset.resume(job_id):
        pass
