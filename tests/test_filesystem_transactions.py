"""Transactions of protocol "ags" that threads share, and those of a process that forks."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, leftovers, make_kms
from support import pattern

from ags_fast import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable

fsspec = pytest.importorskip("fsspec")

TREE = {"a": b"a", "b": pattern(5000)}


@pytest.fixture
def fs(tmp_path: Path) -> Any:
    options: dict[str, Any] = {
        "dataset": str(tmp_path / "dataset"),
        "kms": make_kms(tmp_path),
        "write_options": {"fsync": False},
    }
    Dataset.create(tmp_path / "dataset", kms=options["kms"], wrapping_key_id=MASTER)
    made = fsspec.filesystem("ags", skip_instance_cache=True, **options)
    made.pipe(TREE)
    return made


def check(fs: Any, tree: dict[str, bytes]) -> None:
    """Another instance reads these files, and nothing else is stored."""
    other = fsspec.filesystem("ags", skip_instance_cache=True, **fs.storage_options)
    assert {path: other.cat_file(path) for path in other.find("")} == tree
    assert {path: fs.cat_file(path) for path in fs.find("", refresh=True)} == tree
    assert leftovers(Path(fs.dataset.url), fs.storage_options["kms"]) == []


def in_child(work: Callable[[], None]) -> None:
    """Do work in a fork's child. AssertionError if the work raises or takes a minute."""
    if not (pid := os.fork()):
        signal.alarm(60)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_child_leaves_the_block(fs: Any) -> None:
    """The transaction goes on in the parent, however the child ends the block."""
    for how in ("an exception", "the end", "end_transaction"):

        def child(how: str = how) -> None:
            if how == "end_transaction":
                fs.end_transaction()
            else:
                transaction.__exit__(*((KeyError, KeyError(), None) if how == "an exception" else (None, None, None)))

        with fs.transaction as transaction:
            fs.pipe("x", how.encode())
            in_child(child)
            fs.pipe("y", b"y")
        check(fs, TREE | {"x": how.encode(), "y": b"y"})


def test_a_child_works_by_itself(fs: Any) -> None:
    """What a child changes are versions of its own, which the child sees."""

    def child() -> None:
        with pytest.raises(FileNotFoundError):
            fs.rm_file("new")
        fs.pipe("child", b"1")
        with fs.transaction:
            fs.mv("child", "moved")
            fs.pipe("child2", b"2")
        assert fs.find("") == ["a", "b", "child2", "moved"]

    with fs.transaction:
        fs.pipe("new", b"new")
        version = fs.dataset.version
        in_child(child)
        fs.rm("a")
        assert fs.find("") == ["a", "b"]
    assert fs.dataset.version == version + 3
    check(fs, {"b": TREE["b"], "new": b"new", "moved": b"1", "child2": b"2"})


def test_a_child_ends_its_copy_of_an_open_file(fs: Any) -> None:
    """The file may be complete in the parent by then."""
    for name in ("in", "out"):
        for end in ("discard", "close"):
            transaction = fs.transaction
            if name == "in":
                transaction.start()
            file = fs.open(name, "wb")
            file.write(end.encode())
            begin, go = os.pipe()

            def child(file: Any = file, begin: int = begin, end: str = end) -> None:
                os.read(begin, 1)
                getattr(file, end)()

            with ThreadPoolExecutor(1) as pool:
                ended = pool.submit(in_child, child)
                time.sleep(0.1)  # a fork takes less; else the child has a closed file, which is right, too
                file.close()
                os.write(go, b"1")
                ended.result()
            if name == "in":
                transaction.complete()
            os.close(begin)
            os.close(go)
            assert fs.cat_file(name) == end.encode()
    check(fs, TREE | {"in": b"close", "out": b"close"})


def test_locks_that_other_threads_hold(fs: Any) -> None:
    with fs.transaction:
        fs.pipe("x", b"x")
        with fs._handle.running._lock, fs._handle._begins, fs._handle._lock, ThreadPoolExecutor(1) as pool:
            pool.submit(in_child, lambda: fs.pipe("child", b"1")).result()
        with fs._handle._begins, ThreadPoolExecutor(1) as pool:
            pool.submit(in_child, lambda: fs.transaction.__exit__(None, None, None)).result()
    check(fs, TREE | {"x": b"x", "child": b"1"})


def test_a_pool_that_is_forked_in_a_transaction(fs: Any) -> None:
    import multiprocessing

    with fs.transaction:
        fs.pipe("x", b"x")
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(fs.cat_file, ["a", "b"]) == [TREE["a"], TREE["b"]]
    check(fs, TREE | {"x": b"x"})


def test_threads_that_begin_at_once(fs: Any) -> None:
    """One begins, the others are told so and change nothing of its transaction."""
    begin = threading.Barrier(8)

    def work(n: int) -> int:
        begin.wait()
        for refused in range(10_000):
            try:
                with fs.transaction:
                    fs.pipe(f"{n}/x", b"x")
                    fs.pipe(f"{n}/y", b"y")
                return refused
            except ValueError as error:
                if "in a transaction already" not in str(error):
                    raise
                time.sleep(0.001)
        raise AssertionError("never begun")

    version = fs.dataset.version
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) > 0
    assert fs.dataset.refresh() is False
    assert fs.dataset.version == version + 8
    check(fs, TREE | {f"{n}/{name}": name.encode() for n in range(8) for name in "xy"})


@pytest.mark.parametrize("commit", [True, False])
def test_the_end_while_a_thread_writes(fs: Any, commit: bool) -> None:
    """The thread's file is part of the transaction: it is dropped, or the commit is refused."""
    written, ended = threading.Event(), threading.Event()

    def work() -> None:
        with fs.open("late", "wb") as file:
            file.write(b"begun")
            written.set()
            assert ended.wait(60)
            file.write(b"and ended")

    with ThreadPoolExecutor(1) as pool:
        fs.start_transaction()
        fs.pipe("x", b"x")
        late = pool.submit(work)
        assert written.wait(60)
        if commit:
            with pytest.raises(ValueError, match="'late' is still open"):
                fs.transaction.complete(True)
        else:
            fs.transaction.complete(False)
        ended.set()
        with pytest.raises(ValueError, match="closed"):
            late.result()
    check(fs, TREE)
    fs.pipe("late", b"now")  # the file system goes on
    check(fs, TREE | {"late": b"now"})
