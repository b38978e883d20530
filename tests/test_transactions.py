"""Transactions: files that one version adds, replaces and removes, or none of them."""

from __future__ import annotations

import io
import os
import pickle
import tempfile
import threading
from pathlib import Path
from typing import Any

import programs.jobs
import pytest
from datasets import HERE, MASTER, decrypted, leftovers, lose_an_answer, make_kms, read_tree, write_tree
from support import pattern, program, run_python, start_python

from ags_fast import Dataset, FormatError, PolicyError
from ags_fast.dataset import reach
from ags_fast.dataset.names import entry_path
from ags_fast.dataset.tables import Tables
from ags_fast.errors import ConcurrentChangeError, ExpiredError, JobEndedError
from ags_fast.jobs import Policy, encrypt_files, expire, rekey_files, remove_files, rotate, sweep, verify_files
from ags_fast.keys.cache import clear_cache
from ags_fast.keys.kms import count_calls

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TREE = {"a": b"1", "b/c.csv": pattern(3000), "b/d.csv": b""}


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return make_kms(tmp_path, keys=(MASTER, "other"))


@pytest.fixture
def dataset(tmp_path: Path, kms: dict[str, str]) -> Dataset:
    made = Dataset.create(tmp_path / "dataset", kms=kms, wrapping_key_id=MASTER)
    write(made, TREE)
    return made


def write(dataset: Dataset, tree: dict[str, bytes], *remove: str, **options: Any) -> None:
    with dataset.transaction(fsync=False, block_size=1024, **options) as new:
        for path in remove:
            new.remove(path)
        for path, data in tree.items():
            with new.create(path) as file:
                file.write(data)


def clean(dataset: Dataset, kms: dict[str, str]) -> bool:
    """Nothing is there that no version names."""
    return leftovers(Path(dataset.url), kms) == []


def test_one_version(dataset: Dataset, kms: dict[str, str], tmp_path: Path) -> None:
    assert dataset.version == 2
    assert decrypted(dataset.url, kms) == TREE
    other = Dataset.open(dataset.url, kms=kms)
    with dataset.transaction(fsync=False) as new:
        assert new.version is None
        assert decrypted(dataset.url, kms) == TREE
        with new.create("e") as file:
            assert file.writable()
            assert file.write(b"one") == 3
            assert file.tell() == 3
            assert file.name == "e"
            file.write(memoryview(b" two"))
        assert file.receipt().path == "e"
        with new.create("b/f") as file:
            pass
        new.remove("a")
        new.remove("b/c.csv")
        with new.create("b/c.csv") as file:
            file.write(b"replaced")
        assert dataset.version == 2
    assert [new.version, dataset.version, other.version] == [3, 3, 2]
    now = {"b/c.csv": b"replaced", "b/d.csv": b"", "b/f": b"", "e": b"one two"}
    assert decrypted(dataset.url, kms) == now
    assert decrypted(dataset.url, kms, version=2) == TREE
    assert {file.path: file.plain_length for file in dataset.files()} == {p: len(data) for p, data in now.items()}
    assert clean(dataset, kms)
    written = {path for path in read_tree(tmp_path / "dataset") if not path.startswith("_ags/")}
    assert sum(new.job_id in path for path in written) == 3
    verify_files(dataset.url, kms=kms, engine=HERE).raise_for_failures()
    rekey_files(dataset.url, kms=kms, engine=HERE).raise_for_failures()
    rotate(dataset.url, kms=kms, what="kek", engine=HERE).raise_for_failures()
    expire(dataset.url, kms=kms, keep=1, skip_grace=True).raise_for_failures()
    assert decrypted(dataset.url, kms) == now
    assert clean(dataset, kms)


def test_nothing_to_commit(dataset: Dataset, kms: dict[str, str]) -> None:
    with dataset.transaction() as new:
        pass
    assert new.version is None
    assert dataset.version == 2
    assert clean(dataset, kms)


def test_what_is_refused(dataset: Dataset, kms: dict[str, str]) -> None:
    fixed = Dataset.open(dataset.url, kms=kms, version=2)
    with pytest.raises(ValueError, match="stays at version 2"):
        fixed.transaction()
    with pytest.raises(ValueError, match="dek_length"):
        dataset.transaction(dek_length=17)
    with pytest.raises(ValueError, match="block_size"):
        dataset.transaction(block_size=0)
    idle = dataset.transaction()
    with pytest.raises(ValueError, match="has not begun"):
        idle.create("x")
    with dataset.transaction() as new:
        for path, error in (
            ("a", FileExistsError),
            ("a/x", ValueError),
            ("b", ValueError),
            ("../x", PolicyError),
            ("/x", PolicyError),
            ("_ags/x", ValueError),
        ):
            with pytest.raises(error):
                new.create(path)
        with pytest.raises(ValueError, match="'csv'"):
            new.create("x", "csv")  # type: ignore[arg-type]
        with pytest.raises(FileNotFoundError):
            new.remove("x")
        new.remove("a")
        with pytest.raises(FileNotFoundError):
            new.remove("a")
        with new.create("x"), pytest.raises(FileExistsError):
            new.create("x")
        with pytest.raises(ValueError, match="folder"):
            new.create("x/y")
        with new.create("n/m"), pytest.raises(ValueError, match="folder"):
            new.create("n")
        new.remove("x")
        with new.create("x") as file:
            file.write(b"again")
        with pytest.raises(TypeError, match="ticket"):
            pickle.dumps(new)
        with pytest.raises(TypeError, match="Ticket"):
            pickle.dumps(file)
    with pytest.raises(ValueError, match="over"):
        new.create("y")
    with pytest.raises(ValueError, match="once"):
        new.__enter__()
    assert decrypted(dataset.url, kms) == {k: v for k, v in TREE.items() if k != "a"} | {"x": b"again", "n/m": b""}
    assert clean(dataset, kms)


def test_a_file_takes_the_place_of_another(dataset: Dataset, kms: dict[str, str]) -> None:
    with dataset.transaction(fsync=False) as new:
        with pytest.raises(ZeroDivisionError), new.create("a", replace=True):
            raise ZeroDivisionError
        with new.create("b/c.csv", replace=True) as file:
            file.write(b"first")
            with pytest.raises(FileExistsError, match="being written"):
                new.create("b/c.csv", replace=True)
        with new.create("b/c.csv", replace=True) as file:
            file.write(b"second")
        with pytest.raises(ZeroDivisionError), new.create("b/c.csv", replace=True):
            raise ZeroDivisionError
        new.create("x", replace=True).close()
        with pytest.raises(ValueError, match="folder"):
            new.create("b", replace=True)
        new.remove("b/d.csv")
        new.create("b/d.csv", replace=True).close()
    assert decrypted(dataset.url, kms) == TREE | {"b/c.csv": b"second", "x": b""}
    other = Dataset.open(dataset.url, kms=kms)
    with pytest.raises(ConcurrentChangeError), dataset.transaction(fsync=False) as new:
        new.create("a", replace=True).close()
        write(other, {}, "a")
    assert clean(dataset, kms)


def test_a_file_in_place_of_a_folder(dataset: Dataset, kms: dict[str, str]) -> None:
    with dataset.transaction(fsync=False) as new:
        for path in ("b/c.csv", "b/d.csv"):
            with pytest.raises(ValueError, match="'b' is a folder"):
                new.create("b")
            new.remove(path)
        new.create("b").close()
        with pytest.raises(ValueError, match="'b' is a file"):
            new.create("b/c.csv")
    assert decrypted(dataset.url, kms) == {"a": TREE["a"], "b": b""}
    assert clean(dataset, kms)


@pytest.mark.parametrize("ticket", [False, True])
def test_an_exception_drops_all_of_it(dataset: Dataset, kms: dict[str, str], tmp_path: Path, ticket: bool) -> None:
    before = set(read_tree(tmp_path / "dataset"))
    with pytest.raises(KeyboardInterrupt), dataset.transaction(fsync=False) as new:
        new.remove("a")
        with new.create("x") as file:
            file.write(b"1")
        open_one = new.create("y")
        open_one.write(b"2")
        if ticket:
            with new.ticket().create("z") as file:
                file.write(b"3")  # its receipt never comes
        raise KeyboardInterrupt
    assert open_one.closed
    assert dataset.version == 2
    counted = {entry_path(3)}  # what was wrapped counts, though it is gone
    assert set(read_tree(tmp_path / "dataset")) == before | counted
    assert decrypted(dataset.url, kms) == TREE


def test_a_file_left_by_an_exception(dataset: Dataset, kms: dict[str, str]) -> None:
    with dataset.transaction(fsync=False) as new:
        with pytest.raises(ZeroDivisionError), new.create("x") as file:
            file.write(b"1")
            raise ZeroDivisionError
        with pytest.raises(ValueError, match="receipt"):
            file.receipt()
        new.create("y").abort()
        with new.create("x") as file:
            file.write(b"second")
        file.abort()  # too late
        with pytest.warns(ResourceWarning, match="neither closed nor aborted"):
            new_file = new.create("z")
            new._pending.open.clear()  # its only other reference
            del new_file
    assert decrypted(dataset.url, kms) == TREE | {"x": b"second"}
    assert clean(dataset, kms)


def test_a_file_that_is_still_open(dataset: Dataset, kms: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="'x' is still open"), dataset.transaction() as new:
        with new.create("y"):
            pass
        file = new.create("x")
    assert file.closed
    assert decrypted(dataset.url, kms) == TREE
    assert clean(dataset, kms)


@pytest.mark.parametrize("what", ["creates", "replaces", "removes", "job", "folder", "file"])
def test_two_that_touch_one_path(dataset: Dataset, kms: dict[str, str], tmp_path: Path, what: str) -> None:
    other = Dataset.open(dataset.url, kms=kms)
    now = dict(TREE)
    with pytest.raises(ConcurrentChangeError, match=r"'x|'a'"), dataset.transaction(fsync=False) as new:
        if what == "creates":
            new.create("x").close()
            write(other, {"x": b"theirs"})
            now = TREE | {"x": b"theirs"}
        elif what == "replaces":
            new.remove("a")
            new.create("a").close()
            write(other, {"a": b"theirs"}, "a")
            now = TREE | {"a": b"theirs"}
        elif what == "removes":
            new.remove("a")
            write(other, {}, "a")
            del now["a"]
        elif what in ("folder", "file"):  # of one name
            mine, theirs = ("x/y/z", "x") if what == "folder" else ("x", "x/y/z")
            new.create(mine).close()
            write(other, {theirs: b"theirs"})
            now = TREE | {theirs: b"theirs"}
        else:
            new.create("x").close()
            encrypt_files(
                write_tree(tmp_path / "src", {"x": b"job"}), dataset.url, kms=kms, wrapping_key_id=MASTER, engine=HERE
            ).raise_for_failures()
            now = TREE | {"x": b"job"}
        with new.create("kept?") as file:
            file.write(b"no")
    assert dataset.version == 2
    assert dataset.refresh()
    assert [version.operation for version in dataset.versions()][:1] == ["end"]
    assert decrypted(dataset.url, kms) == decrypted(dataset.url, kms, version=3) == now
    assert clean(dataset, kms)


def test_two_that_touch_other_paths(dataset: Dataset, kms: dict[str, str]) -> None:
    other = Dataset.open(dataset.url, kms=kms)
    with dataset.transaction(fsync=False) as new:
        new.remove("a")
        write(other, {"x": b"theirs"}, "b/d.csv")
        new.create("y").close()
    assert (other.version, dataset.version) == (3, 4)
    assert decrypted(dataset.url, kms) == {"b/c.csv": TREE["b/c.csv"], "x": b"theirs", "y": b""}
    assert clean(dataset, kms)


def test_threads(dataset: Dataset, kms: dict[str, str]) -> None:
    """Threads write files of one transaction, and transactions of one handle."""

    def one(new: Any, n: int) -> None:
        with new.create(f"t/{n}") as file:
            file.write(b"%d" % n)

    with dataset.transaction(fsync=False) as new:
        threads = [threading.Thread(target=one, args=(new, n)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    threads = [threading.Thread(target=write, args=(dataset, {f"u/{n}": b"%d" % n})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    now = TREE | {f"t/{n}": b"%d" % n for n in range(8)} | {f"u/{n}": b"%d" % n for n in range(4)}
    assert dataset.version == 7
    assert decrypted(dataset.url, kms) == now
    assert clean(dataset, kms)


def test_a_fork(dataset: Dataset, kms: dict[str, str]) -> None:
    """A child that leaves the blocks of its parent takes nothing away, and learns that it changes nothing."""
    with dataset.transaction(fsync=False) as new:
        with new.create("made") as file:
            file.write(b"made")
        late = new.create("late")
        with new.ticket().attempt() as attempt, attempt.create("task") as file:
            file.write(b"task")
        ticket = new.ticket()
        begin, go = os.pipe()
        if not (pid := os.fork()):
            code = 1
            try:
                os.read(begin, 1)
                for call in (new.ticket, new.abort, lambda: new.create("x"), lambda: new.remove("a"), new.leave):
                    with pytest.raises(ValueError, match="belongs to the process that began it"):
                        call()
                with pytest.raises(ValueError, match="belongs to the process that began it"):
                    attempt.create("x")
                attempt.__exit__(KeyError, KeyError(), None)
                late.abort()
                new.__exit__(KeyError, KeyError(), None)
                with ticket.attempt() as another, another.create("x") as file:
                    file.write(b"x")
                code = 0
            finally:
                os._exit(code)
        late.write(b"late")
        late.close()
        os.write(go, b"1")
        assert os.waitpid(pid, 0)[1] == 0
        new.add(attempt.receipts())
    os.close(begin)
    os.close(go)
    assert decrypted(dataset.url, kms) == TREE | {"made": b"made", "late": b"late", "task": b"task"}
    assert clean(dataset, kms)


def test_tickets(dataset: Dataset, kms: dict[str, str], tmp_path: Path) -> None:
    """Another process writes files, two of them twice; what has no receipt goes with the commit."""
    with dataset.transaction(fsync=False) as new:
        data = pickle.dumps(new.ticket())
        assert b"kms.json" in data
        assert len(data) < 4000
        (tmp_path / "ticket").write_bytes(data)
        run_python(program(programs.jobs.use_ticket, tmp_path / "ticket", tmp_path / "receipts"))
        receipts = pickle.loads((tmp_path / "receipts").read_bytes())
        with new.create("mine") as file:
            file.write(b"m")
        new.add(receipts)
        new.add(receipts[0])  # again: no harm
        with pytest.raises(FileExistsError):
            new.create("task/1")
    now = TREE | {"task/0": b"1", "task/1": b"3", "task/2": b"4", "mine": b"m"}
    assert decrypted(dataset.url, kms) == now
    assert clean(dataset, kms)
    with pytest.raises(JobEndedError, match="over"):
        pickle.loads(data).create("late")
    with dataset.transaction() as another, pytest.raises(ValueError, match="another transaction"):
        another.add(receipts)
    assert sweep(dataset.url, kms=kms).rows == []
    assert decrypted(dataset.url, kms) == now


def test_a_receipt_for_a_file_that_is_there(dataset: Dataset, kms: dict[str, str]) -> None:
    with pytest.raises(FileExistsError), dataset.transaction(fsync=False) as new:
        with new.ticket().create("a") as file:
            file.write(b"2")
        new.add(file.receipt())
    with dataset.transaction(fsync=False) as new:
        with new.ticket().create("a") as file:
            file.write(b"2")
        new.remove("a")
        new.add([file.receipt()])
    assert decrypted(dataset.url, kms) == TREE | {"a": b"2"}
    assert clean(dataset, kms)


def test_a_task_that_closes_too_late(dataset: Dataset, kms: dict[str, str]) -> None:
    with dataset.transaction(fsync=False) as new:
        late = new.ticket().create("late")
        late.write(b"late")
    with pytest.raises(JobEndedError, match="over"):
        late.close()
    assert late.closed
    assert decrypted(dataset.url, kms) == TREE
    assert clean(dataset, kms)


@pytest.mark.parametrize("finished", [False, True])
def test_a_writer_that_is_killed(dataset: Dataset, kms: dict[str, str], tmp_path: Path, finished: bool) -> None:
    child = start_python(program(programs.jobs.begin_transaction, dataset.url, kms, finished))
    assert child.stdout is not None
    assert child.stdout.readline() == "now\n"
    assert sweep(dataset.url, kms=kms).rows == []  # it lives: nothing goes
    child.kill()
    child.communicate()
    assert decrypted(dataset.url, kms) == TREE
    left = [path for path in read_tree(tmp_path / "dataset") if "/x." in f"/{path}" or ".x." in path]
    assert len(left) == 1
    assert left[0].endswith(".agstmp") != finished
    sweep(dataset.url, kms=kms)
    assert clean(dataset, kms)
    assert decrypted(dataset.url, kms) == TREE


def test_a_commit_that_fails(dataset: Dataset, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tables, "replaced", lambda *args, **options: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        write(dataset, {"x": b"1"}, "a")
    monkeypatch.undo()
    assert decrypted(dataset.url, kms) == TREE
    assert clean(dataset, kms)


@pytest.mark.parametrize("theirs", [{}, {"theirs": b"2"}])
@pytest.mark.parametrize("error", [OSError, FileExistsError])
@pytest.mark.parametrize("job", ["transaction", "encrypt", "remove"])
def test_an_answer_that_was_lost(
    dataset: Dataset,
    kms: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    error: type[OSError],
    theirs: dict[str, bytes],
) -> None:
    """The version is made, another job may commit the next version, and then the storage says that it failed."""
    src = write_tree(tmp_path / "src", {"a": b"new", "x": b"1"})
    other = Dataset.open(dataset.url, kms=kms)
    lose_an_answer(monkeypatch, error, lambda: write(other, theirs))
    now = {path: data for path, data in TREE.items() if path != "a"}
    if job == "transaction":
        write(dataset, {"x": b"1"}, "a")
        now["x"] = b"1"
    elif job == "encrypt":
        options: dict[str, Any] = {"wrapping_key_id": MASTER, "engine": HERE, "overwrite": True}
        encrypt_files(src, dataset.url, kms=kms, **options).raise_for_failures()
        now |= {"a": b"new", "x": b"1"}
    else:
        remove_files(dataset.url, "a", kms=kms).raise_for_failures()
    assert decrypted(dataset.url, kms, version=3) == now
    assert decrypted(dataset.url, kms) == now | theirs
    assert Dataset.open(dataset.url, kms=kms).version == 3 + bool(theirs)
    assert clean(dataset, kms)


@pytest.mark.parametrize("scope", ["partition", "writer", "files:1"])
def test_keys_as_the_policy_has_them(tmp_path: Path, kms: dict[str, str], scope: str) -> None:
    dataset = Dataset.create(tmp_path / "ds", kms=kms, wrapping_key_id=MASTER, policy=Policy(kek_scope=scope))
    write(dataset, {"p=1/a": b"1", "p=1/b": b"2", "p=2/a": b"3"})
    keys = {file.path: file.key_id for file in dataset.files()}
    assert len(set(keys.values())) == {"partition": 2, "writer": 1, "files:1": 3}[scope]
    keks = dataset.snapshot().entry.keys
    assert all("scope" in keks[key_id].properties for key_id in keys.values())
    assert decrypted(dataset.url, kms) == {"p=1/a": b"1", "p=1/b": b"2", "p=2/a": b"3"}


def test_versions_as_the_policy_keeps_them(
    tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Dataset.create(tmp_path / "ds", kms=kms, wrapping_key_id=MASTER, policy=Policy(keep=2))
    write(dataset, {"a": b"1", "b": b"2"})
    (old,) = [path for path in read_tree_of(dataset) if path.startswith("a.")]
    write(dataset, {"a": b"3"}, "a")
    assert Dataset.open(dataset.url, kms=kms, version=2).version == 2
    with pytest.raises(ExpiredError, match="it has 2 and newer"):
        Dataset.open(dataset.url, kms=kms, version=1)
    with monkeypatch.context() as patch:  # an expiry that fails is left to the next transaction
        patch.setattr(reach, "clean", lambda *args: os.stat(tmp_path / "nothing"))
        write(dataset, {"c": b"4"})
    assert dataset.version == 4
    assert old in read_tree_of(dataset)
    write(dataset, {}, "c")
    assert dataset.version == 5
    assert old not in read_tree_of(dataset)
    with pytest.raises(ExpiredError, match="it has 4 and newer"):
        Dataset.open(dataset.url, kms=kms, version=3)
    assert decrypted(dataset.url, kms) == {"a": b"3", "b": b"2"}
    assert clean(dataset, kms)


def test_single_wrap_and_another_master_key(dataset: Dataset, kms: dict[str, str]) -> None:
    write(dataset, {"single": b"1"}, double_wrap=False)
    write(dataset, {"other": b"2"}, wrapping_key_id="other")
    assert len({file.key_id for file in dataset.files()}) == 3
    assert decrypted(dataset.url, kms) == TREE | {"single": b"1", "other": b"2"}


def test_calls_of_the_kms(dataset: Dataset, kms: dict[str, str]) -> None:
    clear_cache()
    with count_calls() as calls:
        opened = Dataset.open(dataset.url, kms=kms)
        write(opened, {f"many/{n}": b"%d" % n for n in range(100)})
        for n in range(100):
            with opened.open_file(f"many/{n}") as file:
                assert file.read() == b"%d" % n
    assert calls == {("local", "unwrap"): 1}


def test_keys_that_rotate_meanwhile(dataset: Dataset, kms: dict[str, str]) -> None:
    with dataset.transaction(fsync=False) as new:
        with new.create("x") as file:
            file.write(b"x")
        rotate(dataset.url, kms=kms, what="kek", engine=HERE, force_expire=True).raise_for_failures()
        new.create("y").close()
    assert decrypted(dataset.url, kms) == TREE | {"x": b"x", "y": b""}
    expire(dataset.url, kms=kms, keep=1, skip_grace=True)
    assert decrypted(dataset.url, kms) == TREE | {"x": b"x", "y": b""}
    assert clean(dataset, kms)


def test_numbered_sets_and_removal(tmp_path: Path, kms: dict[str, str]) -> None:
    src = write_tree(tmp_path / "src", {f"{n}": b"%d" % n for n in range(3)})
    options: dict[str, Any] = {"wrapping_key_id": MASTER, "engine": HERE, "aad_prefix": "a.{n}"}
    encrypt_files(src, tmp_path / "ds", kms=kms, **options).raise_for_failures()
    dataset = Dataset.open(tmp_path / "ds", kms=kms)
    write(dataset, {}, "1")
    assert verify_files(dataset.url, kms=kms, engine=HERE).counts["failed"] == 0
    assert remove_files(dataset.url, "0", kms=kms).counts["ok"] == 1


# ---------------------------------------------------------------------------------------------- Parquet

TABLE = {"n": list(range(1000)), "secret": [f"s{n % 7}" for n in range(1000)]}


@pytest.mark.parametrize("by", ["pyarrow", "polars", "bytes"])
def test_parquet(dataset: Dataset, kms: dict[str, str], by: str) -> None:
    table = pa.table(TABLE)
    with dataset.transaction(fsync=False, column_keys={"secret": "other"}) as new:
        with new.create("t/x.parquet", format="parquet") as file:
            if by == "pyarrow":
                pq.write_table(table, file)
            elif by == "polars":
                pytest.importorskip("polars").from_arrow(table).write_parquet(file)
            else:
                plain = io.BytesIO()
                pq.write_table(table, plain)
                file.write(plain.getvalue())
        with new.create("y"):
            pass  # column_keys are for Parquet
    (found,) = dataset.files("t/*")
    assert found.format == "parquet"
    with dataset.open_file("t/x.parquet") as opened:
        assert pq.read_table(opened).to_pydict() == TABLE
        assert opened.seek(0, io.SEEK_END) == found.plain_length
    (name,) = [path for path in read_tree_of(dataset) if path.startswith("t/")]
    assert name.endswith(".parquet")
    assert os.path.getsize(os.path.join(dataset.url, name)) == found.file_length
    verify_files(dataset.url, kms=kms, engine=HERE).raise_for_failures()
    rekey_files(dataset.url, kms=kms, engine=HERE).raise_for_failures()


def read_tree_of(dataset: Dataset) -> dict[str, bytes]:
    return read_tree(Path(dataset.url))


def test_what_is_not_parquet(dataset: Dataset, kms: dict[str, str]) -> None:
    with dataset.transaction(fsync=False) as new:
        file = new.create("x.parquet", format="parquet")
        file.write(b"not Parquet" * 1000)
        with pytest.raises(FormatError):
            file.close()
        assert file.closed
    assert new.version is None
    assert clean(dataset, kms)


def test_no_plaintext_on_the_disk(
    dataset: Dataset, kms: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Parquet file that does not fit into memory waits in a temporary file, sealed."""
    monkeypatch.setattr("ags_fast.dataset.files.parquet.SPOOL_NBYTES", 1000)
    seen = []
    real = tempfile.SpooledTemporaryFile

    def spooled(*args: Any) -> Any:
        seen.append(real(*args))
        return seen[-1]

    monkeypatch.setattr("tempfile.SpooledTemporaryFile", spooled)
    with dataset.transaction(fsync=False) as new, new.create("x.parquet", format="parquet") as file:
        pq.write_table(pa.table({"marker": ["a marker that would be seen"] * 100_000}), file, compression="none")
        (spool,) = seen
        spool.seek(0)
        held = spool.read()
        assert b"a marker that would be seen" not in held
        assert b"PAR1" not in held
    with dataset.open_file("x.parquet") as opened:
        assert pq.read_table(opened).num_rows == 100_000
