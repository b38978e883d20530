"""Many small files in an object store: a worker has several in work at once, and in memory no more than it may."""

from __future__ import annotations

import os
import tarfile
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, write_tree
from servers.slow_s3 import SlowS3, in_flight, slow_s3
from support import pattern

from ags_fast import jobs
from ags_fast.engines import together
from ags_fast.engines.base import JobContext
from ags_fast.engines.together import opening_cost, run_files, with_files_at_once
from ags_fast.fs import Store
from ags_fast.jobs import LocalEngine, copying
from ags_fast.jobs.work.context import Context
from ags_fast.keys import Envelope
from ags_fast.keys.kek import new_kek
from ags_fast.keys.kms import set_audit_hook
from ags_fast.keys.kms.local import LocalKms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("s3fs")
pytest.importorskip("boto3")
pytest.importorskip("pyarrow")

FILES = 40


@pytest.fixture(scope="module")
def server() -> Iterator[SlowS3]:
    with slow_s3() as one:
        yield one


@pytest.fixture
def shared(server: SlowS3, kms: dict[str, str]) -> Iterator[dict[str, Any]]:
    yield {"kms": kms, "storage_options": server.options()}
    server.set()


@pytest.mark.more
@pytest.mark.parametrize(("processes", "files_at_once"), [(0, 1), (0, 16), (1, 16)])
def test_files_at_once(
    server: SlowS3, shared: dict[str, Any], tmp_path: Path, processes: int, files_at_once: int
) -> None:
    src = write_tree(tmp_path / "src", {f"{i}": pattern(4096, i) for i in range(FILES)})
    where = f"s3://bucket-{os.urandom(8).hex()}"
    engine = LocalEngine(processes, files_at_once=files_at_once)
    server.set(latency=0.15 if files_at_once > 1 else 0.005)

    def seen(run: Callable[[], Any], operation: str) -> int:
        server.log()
        done = run()
        assert done.counts == {"ok": FILES, "skipped": 0, "failed": 0}
        assert len({row.src for row in done.rows}) == FILES
        # Of files: listings, and the dataset's own objects, are requested by other code.
        return in_flight([one for one in server.log() if one.operation == operation and "_ags/" not in one.key])

    encrypt = seen(
        lambda: jobs.encrypt_files(src, f"{where}/ds", wrapping_key_id=MASTER, engine=engine, **shared), "PutObject"
    )
    verify = seen(lambda: jobs.verify_files(f"{where}/ds", engine=engine, **shared), "GetObject")
    rekey = seen(lambda: jobs.rekey_files(f"{where}/ds", engine=engine, **shared), "PutObject")
    decrypt = seen(lambda: jobs.decrypt_files(f"{where}/ds", f"{where}/out", engine=engine, **shared), "PutObject")
    if files_at_once == 1:
        assert {encrypt, verify, rekey, decrypt} == {1}
    else:
        assert all(12 <= one <= files_at_once for one in (encrypt, verify, rekey, decrypt))


@pytest.mark.parametrize(("double_wrap", "several"), [(False, False), (True, True)])
def test_a_rotation_makes_no_more_calls_at_once(
    server: SlowS3, shared: dict[str, Any], tmp_path: Path, double_wrap: bool, several: bool
) -> None:
    """`concurrency` bounds a worker's calls of the KMS. If there are none, tables are in work together."""
    where = f"s3://bucket-{os.urandom(8).hex()}/ds"
    for n in range(3):
        src = write_tree(tmp_path / f"src{n}", {f"{n}/{i}": pattern(10, i) for i in range(2)})
        jobs.encrypt_files(
            src, where, wrapping_key_id=MASTER, double_wrap=double_wrap, engine=LocalEngine(0), **shared
        ).raise_for_failures()
    callers: set[threading.Thread] = set()
    runs: set[threading.Thread] = set()
    run_file = copying.run_file

    def noted(context: Any, task: Any, attempt: int = 0) -> Any:
        runs.add(threading.current_thread())
        return run_file(context, task, attempt)

    set_audit_hook(lambda call: callers.add(threading.current_thread()))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copying, "run_file", noted)
            jobs.rotate(where, what="kek", concurrency=1, engine=LocalEngine(0), **shared).raise_for_failures()
    finally:
        set_audit_hook(None)
    assert callers == {threading.current_thread()}
    assert (runs != {threading.current_thread()}) is several


class Task:
    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes


class Recorded:
    """A context, and the work of its tasks, which notes what is in work at once, and the threads of large files."""

    files_at_once = 8
    large_at_once = 1

    def __init__(self, fault: BaseException | None = None) -> None:
        self.work = self
        self.fault = fault
        self.most_files = self.most_nbytes = self.files = self.nbytes = self.runs = 0
        self.lock = threading.Lock()
        self.threads: set[threading.Thread] = set()
        self.stopped: list[bool] = []

    def run_file(self, context: Any, task: Any, attempt: int) -> Any:
        with self.lock:
            self.runs += 1
            self.files += 1
            self.nbytes += task.nbytes
            if task.nbytes > together.HELD_NBYTES:
                self.threads.add(threading.current_thread())
            self.most_files = max(self.most_files, self.files)
            self.most_nbytes = max(self.most_nbytes, self.nbytes)
        time.sleep(0.005)
        with self.lock:
            self.files -= 1
            self.nbytes -= task.nbytes
        if self.fault is not None and task.path == "7":
            raise self.fault
        return task.path, attempt


def test_bytes_in_work_are_bounded() -> None:
    sizes = [1 << 10] * 30 + [together.HELD_NBYTES // 4] * 20 + [3 * together.HELD_NBYTES] * 3 + [0] * 30
    context: Any = Recorded()
    tasks: Any = [Task(f"{i}", size) for i, size in enumerate(sizes)]
    done: Any = list(run_files(context, tasks, 2))
    assert done == [(task.path, 2) for task in tasks]
    assert context.most_files == 8
    assert context.most_nbytes == 3 * together.HELD_NBYTES  # a large one, alone
    assert context.threads == {threading.current_thread()}  # which Ctrl-C interrupts
    context = Recorded()
    tasks = [task for task in tasks if task.nbytes < together.HELD_NBYTES]
    list(run_files(context, tasks))
    assert context.most_nbytes <= together.HELD_NBYTES


def test_nothing_is_in_work_after_a_fault() -> None:
    context: Any = Recorded(KeyboardInterrupt())
    tasks: Any = [Task(f"{i}", 1) for i in range(1000)]
    with pytest.raises(KeyboardInterrupt):
        list(run_files(context, tasks))
    assert context.files == 0
    assert context.runs < 100


def test_one_file_is_in_work_if_the_context_says_so() -> None:
    context: Any = Recorded()
    context.files_at_once = 1
    tasks: Any = [Task(f"{i}", 1) for i in range(10)]
    rows: Any = run_files(context, tasks)
    assert next(rows) == ("0", 0)
    assert context.runs == 1
    list(rows)
    assert context.most_files == 1


@dataclass(frozen=True)
class Stores(JobContext):
    urls: tuple[str | None, ...] = ()

    @property
    def stores(self) -> tuple[Store | None, ...]:
        return tuple(None if url is None else Store(url) for url in self.urls)


def test_only_stores_that_bear_it_have_several_files_in_work(tmp_path: Path) -> None:
    """Files of an archive are read through one open file: threads would mix their bytes."""
    with tarfile.open(tmp_path / "x.tar", "w"):
        pass
    here, archive = str(tmp_path), f"tar://d::file://{tmp_path}/x.tar"
    s3 = "s3://bucket/a"

    def files_at_once(*urls: str | None, says: int | None = None) -> int | None:
        return with_files_at_once(Stores("verify", "1", files_at_once=says, urls=urls), 16).files_at_once

    assert files_at_once(s3, None) == files_at_once(here, s3) == files_at_once(s3, s3) == 16
    assert files_at_once(here, None) == files_at_once("memory://a") == 1
    assert files_at_once(here, archive) == files_at_once(s3, archive) == 1
    assert files_at_once(s3, None, says=1) == 1
    assert files_at_once() == 1


def test_what_files_wait_for(kms: dict[str, str], tmp_path: Path) -> None:
    class Far(LocalKms):
        waits = True

    far = Far.with_properties(kms)
    here, there = Store(tmp_path), Store("s3://bucket/a")
    double, single = (
        Envelope(far, {key.key_id: key}) for key in (new_kek(kms, MASTER, double_wrap=wrap) for wrap in (True, False))
    )
    for op, store, envelope, fsync, waits in (
        ("encrypt", here, double, True, True),
        ("encrypt", here, double, False, False),
        ("verify", here, double, True, False),
        ("verify", here, single, True, True),
        ("verify", there, double, True, True),
        ("verify", here, Envelope(kms, single.entries), True, False),
    ):
        assert Context(op, "1", "", store, envelope, fsync=fsync).waits == waits, (op, store, fsync)


def test_bytes_of_an_archive_are_not_mixed(kms: dict[str, str], tmp_path: Path) -> None:
    files = {f"{i:03}": pattern(100_000, i) for i in range(40)}
    write_tree(tmp_path / "src", files)
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "src", "d")
    url, dataset = f"tar://d::file://{tmp_path}/x.tar", tmp_path / "dataset"
    done = jobs.encrypt_files(url, dataset, kms=kms, wrapping_key_id=MASTER, engine=LocalEngine(0))
    assert done.counts["ok"] == len(files)
    for name, data in files.items():
        with jobs.open_file(dataset, name, kms=kms) as file:
            assert file.read() == data


def test_an_isolated_file_shares_no_cost() -> None:
    context = Stores("verify", "1", files_at_once=16, urls=("s3://bucket/a",))
    assert opening_cost(replace(context, urls=("/a",)), 1600) == 1600
    assert opening_cost(context, 1600) == 100
    assert opening_cost(replace(context, isolate=True), 1600) == 1600


@pytest.mark.parametrize("files_at_once", [0, -1])
def test_impossible_numbers(files_at_once: int) -> None:
    with pytest.raises(ValueError, match="files_at_once"):
        LocalEngine(files_at_once=files_at_once)
