"""Many small files in an object store: a worker has several in work at once, and in memory no more than it may."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, write_tree
from servers.slow_s3 import SlowS3, in_flight, slow_s3
from support import pattern

from ags_fast import jobs
from ags_fast.jobs import LocalEngine
from ags_fast.jobs.engines import together
from ags_fast.jobs.engines.together import run_files

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


@pytest.mark.parametrize(("processes", "files_at_once"), [(0, 1), (0, 16), pytest.param(1, 16, marks=pytest.mark.more)])
def test_files_at_once(
    server: SlowS3, shared: dict[str, Any], tmp_path: Path, processes: int, files_at_once: int
) -> None:
    src = write_tree(tmp_path / "src", {f"{i}": pattern(4096, i) for i in range(FILES)})
    where = f"s3://bucket-{os.urandom(8).hex()}"
    engine = LocalEngine(processes, files_at_once=files_at_once)
    server.set(latency=0.05 if files_at_once > 1 else 0.005)

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


class Task:
    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes


class Recorded:
    """A context, and the work of its tasks, which notes what is in work at once."""

    files_at_once = 8
    stores = (type("Far", (), {"local": False})(),)

    def __init__(self, fault: BaseException | None = None) -> None:
        self.work = self
        self.fault = fault
        self.most_files = self.most_nbytes = self.files = self.nbytes = self.runs = 0
        self.lock = threading.Lock()

    def run_file(self, context: Any, task: Any, attempt: int) -> Any:
        with self.lock:
            self.runs += 1
            self.files += 1
            self.nbytes += task.nbytes
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


def test_local_files_are_in_work_one_by_one() -> None:
    context: Any = Recorded()
    context.stores = (None, type("Near", (), {"local": True})())
    tasks: Any = [Task(f"{i}", 1) for i in range(10)]
    rows: Any = run_files(context, tasks)
    assert next(rows) == ("0", 0)
    assert context.runs == 1
    list(rows)
    assert context.most_files == 1


@pytest.mark.parametrize("files_at_once", [0, -1])
def test_impossible_numbers(files_at_once: int) -> None:
    with pytest.raises(ValueError, match="files_at_once"):
        LocalEngine(files_at_once=files_at_once)
