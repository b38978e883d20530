"""Jobs in processes of their own."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import pathlib
import pickle
import sys
import time
from collections import Counter
from typing import Any

import pyarrow.parquet  # noqa: F401  # before a clock runs

import ags_fast
from ags_fast import AgsError, Dataset, jobs
from ags_fast.engines.start import import_path, start_python
from ags_fast.jobs import LocalEngine
from ags_fast.keys.kms import kms_calls


def run(name: str, *args: Any, workers: int = 2, at_once: int = 16, own_session: bool = False, **options: Any) -> None:
    """A job by its name. Prints what became of it, and the counts as JSON."""
    if own_session:
        os.setsid()
    result = getattr(jobs, name)(
        *args, **{"engine": LocalEngine(workers, files_at_once=at_once), "progress": False, **options}
    )
    print(result)
    print(json.dumps(result.counts))


def serve() -> None:
    """One job after another, each a line of stdin, and for each a line that says what became of it."""
    for line in sys.stdin:
        name, args, options = ast.literal_eval(line)
        if name != "sweep":
            options = {"engine": LocalEngine(0), "progress": False, **options}
        answer: tuple[object, object]
        try:
            result = getattr(jobs, name)(*args, **options)
        except (AgsError, FileExistsError) as error:
            answer = type(error).__name__, str(error)
        else:
            answer = result.counts, sorted({row.error_class for row in result.failed})
        print(repr(answer), flush=True)


def start_embedded(executable: str | None) -> None:
    sys.executable = executable  # type: ignore[assignment]
    code = "import ags_fast; print(ags_fast.__file__)"
    out = start_python(code, import_path()).communicate()[0].decode().strip()
    assert out == ags_fast.__file__, out
    multiprocessing.set_executable("/bin/echo")  # as such programs do
    assert "-P" in start_python("", []).communicate()[0].decode()


def begin_transaction(url: str, kms: dict[str, str], finished: bool) -> None:
    """Says when it is in the middle, and stays there."""
    dataset = Dataset.open(url, kms=kms)
    with dataset.transaction() as new:
        new.remove("a")
        file = new.create("x")
        file.write(b"x" * 5_000_000)
        if finished:
            file.close()
        print("now", flush=True)
        time.sleep(600)


def replace_and_expire(url: str, kms: dict[str, str]) -> None:
    """Replaces some files, and expires what was there."""
    dataset = Dataset.open(url, kms=kms)
    with dataset.transaction(fsync=False) as new:
        for path, data in (("a.csv", b"new"), ("b/c.csv", bytes(100))):
            with new.create(path, replace=True) as file:
                file.write(data)
    jobs.expire(url, kms=kms, keep=1)


def resume_transaction(url: str, kms: dict[str, str], job_id: str, receipts: pathlib.Path) -> None:
    """Commits what another process began and tasks have written."""
    with Dataset.open(url, kms=kms).resume(job_id) as new:
        new.add(pickle.loads(receipts.read_bytes()))
        with new.create("by the other") as file:
            file.write(b"process")


def die_in_attempt(ticket: bytes) -> None:
    """Dies with one file complete and one in the making."""
    task = pickle.loads(ticket).attempt()
    task.create("p/c").close()
    task.create("p/d").write(b"x")
    os._exit(0)


def read_handle(handle: pathlib.Path, name: str) -> None:
    """Prints the version, and a file's text."""
    dataset = pickle.loads(handle.read_bytes())
    print(dataset.version, dataset.open_file(name).read().hex())


def use_ticket(ticket: pathlib.Path, receipts: pathlib.Path) -> None:
    """Writes five files, and hands on the receipts of what a driver would see of two attempts."""
    opened = pickle.loads(ticket.read_bytes())
    made = []
    for n in range(5):
        with opened.create(f"task/{n // 2}") as file:
            file.write(b"%d" % n)
        made.append(file.receipt())
    assert sum(kms_calls().values()) == 1, kms_calls()
    receipts.write_bytes(pickle.dumps(made[1::2] + made[4:]))


class Calls:
    """Counts what a process opens and lists, and calls os.stat for, below a folder."""

    def __init__(self, folder: str) -> None:
        self.opened: Counter[str] = Counter()
        self.listed: Counter[str] = Counter()
        self.stats = 0
        self._folder = folder
        self._stat = os.stat
        os.stat = self._counted
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[object, ...]) -> None:
        counter = {"open": self.opened, "os.scandir": self.listed}.get(event)
        if counter is not None and isinstance(args[0], str):
            counter[os.path.relpath(args[0], self._folder)] += 1

    def _counted(self, path: Any, **options: Any) -> os.stat_result:
        self.stats += isinstance(path, str) and path.startswith(self._folder)
        return self._stat(path, **options)


def resume_frugally(src: str, dataset: str, kms: dict[str, str]) -> None:
    """Prints how many data files were opened, how often a folder was listed, and the number of os.stat."""
    calls = Calls(dataset)
    options: Any = {"block_size": 1024, "resume": "length", "fsync": False}
    result = jobs.encrypt_files(src, dataset, kms=kms, wrapping_key_id="master", engine=LocalEngine(0), **options)
    assert result.counts == {"ok": 1500, "skipped": 0, "failed": 0}, result
    files = [path for path in calls.opened if not path.startswith(("_ags", ".."))]
    print(len(files), max(calls.listed[str(n)] for n in range(7)), calls.stats)


def round_trip(src: Any, dataset: Any, other: Any, out: Any, kms: Any) -> None:
    """Encrypt a tree, and decrypt a dataset that another process has made. Prints what was encrypted."""
    made = jobs.encrypt_files(src, dataset, kms=kms, wrapping_key_id="master", fsync=False)
    jobs.verify_files(dataset, kms=kms).raise_for_failures()
    jobs.encrypt_files(src, other, kms=kms, fsync=False).raise_for_failures()  # nothing is new
    done = jobs.decrypt_files(other, out, kms=kms, fsync=False)
    print(ascii([sorted((row.status, row.src) for row in made.rows), done.counts]))
