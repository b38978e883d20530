"""What is measured of many commits, and of datasets with many files: whether a commit costs what the 10th costs.

Times are of this process' CPUs: of commits the mean of 32, of `open_file` the least of five. Beside them is what the
target allows: 1.5 times the cost at the 10th commit, or among 100 files.

``python -m benchmarks.commits COUNT FOLDER`` commits COUNT files that do not exist, and prints what that takes.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from ags_fast import Dataset, jobs
from ags_fast.dataset.access import Access
from ags_fast.dataset.policy import Policy
from ags_fast.dataset.tables import Tables
from ags_fast.engines.local import LocalEngine
from benchmarks.datasets import done, workspace
from benchmarks.evp import ROOT
from benchmarks.keystore import MASTER_KEY, keystore
from benchmarks.measure import Case, Contest, Group, Row
from benchmarks.memory import start_counting, status
from benchmarks.rotation import add, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ags_fast.dataset.entries import FileEntry
    from benchmarks.cases import Bench

COMMITS, QUICK_COMMITS = 10_000, 40
FILES, QUICK_FILES = 1_000_000, 4000  # of one commit, and of the dataset that gets one file more
AMONG, QUICK_AMONG = 40_000, 2000
KEPT, QUICK_KEPT = 25_000, 4000
ROWS = 600  # that a commit may read on average: a page for its path, and small tables that it merges
FEW = 100
NEIGHBOURS = 5
MEAN = 32  # commits, since some of them merge tables
ALLOWED = 1.5
COMMIT_NBYTES = 16 << 10  # in `_ags/`, that a commit may add
FILE_NBYTES = 1000  # of memory, that a file of a commit may take
FOLDER_FILES = 100
DATA = b"a small file\n" * 8


def commits(bench: Bench) -> Group:
    count = QUICK_COMMITS if bench.quick else COMMITS
    cases = [
        Case("commits/encrypt_files", functools.partial(many_commits, bench, "encrypt_files", count), rounds=0),
        Case("commits/kek-a-file", functools.partial(many_commits, bench, "kek_a_file", min(count, 1000)), rounds=0),
        Case("commits/process", functools.partial(many_commits, bench, "in_a_process", min(count, 1000)), rounds=0),
        Case("commits/transaction", functools.partial(many_commits, bench, "transaction", count), rounds=0),
        Case("commits/among", functools.partial(among, bench, QUICK_AMONG if bench.quick else AMONG), rounds=0),
        Case("commits/one-more", functools.partial(one_more, bench, QUICK_FILES if bench.quick else FILES), rounds=0),
        Case("commits/rows", functools.partial(rows_read, bench, QUICK_KEPT if bench.quick else KEPT), rounds=0),
        Case("commits/whole", functools.partial(whole, bench, QUICK_FILES if bench.quick else FILES), rounds=0),
    ]
    return Group("CPU time, mean of 32 commits; beside: what the target allows, 1.5 times the 10th commit", cases)


def seconds_of(work: Callable[[], object]) -> float:
    """The seconds of CPU that it takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def told(rows: list[Row], values: dict[tuple[str, str], float]) -> Contest:
    """A contest of what has been measured."""
    return Contest(rows, {of: functools.partial(float, value) for of, value in values.items()})


class Growing:
    """A dataset that gets one small file with each commit."""

    def __init__(self, folder: Path, kms: dict[str, str]) -> None:
        self.kms = kms
        self.source, self.folder = folder / "source", folder / "dataset"
        self.source.mkdir()
        self.log = Access.of(self.folder, kms).create(MASTER_KEY).log
        self._handle = Dataset.open(self.folder, kms=kms)

    def path(self, number: int) -> str:
        """Amid the files of `filled`."""
        return f"year=2026/month=06/{number // FOLDER_FILES:04}/{number:08}"

    def kek_a_file(self, number: int) -> float:
        """Seconds of a commit by a job that makes a KEK for its file."""
        return self.encrypt_files(number, Policy(kek_scope="files:1"))

    def in_a_process(self, number: int, commit: Callable[[int], float] | None = None) -> float:
        """Seconds of a commit by a process that knows nothing of the dataset: a fork of this one."""
        end, other = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                os.write(other, str((commit or self.encrypt_files)(number)).encode())
            finally:
                os._exit(0)
        os.close(other)
        with open(end, "rb") as file:
            seconds = float(file.read())
        os.waitpid(pid, 0)
        return seconds

    def rows(self, number: int) -> float:
        """How many rows of files a commit reads."""
        count, decoded = 0, Tables.decoded

        def counted(tables: Tables, data: bytes) -> Sequence[FileEntry]:
            nonlocal count
            count += len(rows := decoded(tables, data))
            return rows

        with patch.object(Tables, "decoded", counted):
            self.encrypt_files(number)
        return count

    def encrypt_files(self, number: int, policy: Policy | None = None) -> float:
        """Seconds of a commit by a job whose source has one file."""
        path = self.source / self.path(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(DATA)
        seconds = seconds_of(
            lambda: done(
                jobs.encrypt_files(
                    self.source,
                    self.folder,
                    kms=self.kms,
                    wrapping_key_id=MASTER_KEY,
                    engine=LocalEngine(0),
                    fsync=False,
                    policy=policy,
                    progress=False,
                )
            )
        )
        path.unlink()
        return seconds

    def transaction(self, number: int) -> float:
        """Seconds of a commit by a transaction that creates one file."""

        def work() -> None:
            with self._handle.transaction(fsync=False) as new, new.create(self.path(number)) as file:
                file.write(DATA)

        return seconds_of(work)

    def open(self, number: int) -> float:
        """Seconds to open a file, by name, and read it; the least of some."""

        def work() -> None:
            with jobs.open_file(self.folder, self.path(number), kms=self.kms) as file:
                if file.read() != DATA:
                    raise AssertionError("this is another file")

        return min(seconds_of(work) for _ in range(NEIGHBOURS))

    def nbytes(self) -> int:
        """The bytes in `_ags/`."""
        return sum(path.stat().st_size for path in (self.folder / "_ags").rglob("*") if path.is_file())


@contextmanager
def many_commits(bench: Bench, how: str, count: int) -> Iterator[Contest]:
    points = [point for point in (10, 100, 1000) if point < count] + [count]
    costs: dict[tuple[str, int], float] = {}
    with workspace(bench, f"commits-{how}") as folder:
        dataset = Growing(folder, keystore(folder))
        commit: Callable[[int], float] = getattr(dataset, how)
        for number in range(1, count + MEAN):
            seconds = commit(number)
            for point in points:
                if point <= number < point + MEAN:
                    costs["commit", point] = costs.get(("commit", point), 0.0) + seconds / MEAN
            if number in points:
                costs["oldest", number], costs["newest", number] = dataset.open(1), dataset.open(number)
                costs["nbytes", number] = dataset.nbytes() / number
    what = {"commit": "commit", "oldest": "open_file of the oldest", "newest": "open_file of the newest"}
    rows: list[Row] = []
    values: dict[tuple[str, str], float] = {}
    for (kind, number), cost in costs.items():
        unit, label = ("KiB", "in _ags/ for a commit") if kind == "nbytes" else ("ms", what[kind])
        row = Row(f"commits/{how}/{kind}/{number}", f"{how}, {label}, at {number:,}", unit)
        rows.append(row)
        values[row.name, "ours"] = cost
        values[row.name, "beside"] = COMMIT_NBYTES if kind == "nbytes" else ALLOWED * costs[kind, points[0]]
    yield told(rows, values)


@contextmanager
def among(bench: Bench, count: int) -> Iterator[Contest]:
    costs = {}
    with workspace(bench, "commits-among") as folder:
        for number in (FEW, count):
            (folder / str(number)).mkdir()
            dataset = filled(folder / str(number), number - 1)
            dataset.transaction(0)
            costs[number] = dataset.open(0)
    rows = [Row(f"commits/among/{number}", f"open_file, among {number:,} files", "ms") for number in costs]
    values = {(row.name, "ours"): cost for row, cost in zip(rows, costs.values(), strict=True)}
    yield told(rows, values | {(row.name, "beside"): ALLOWED * costs[FEW] for row in rows})


@contextmanager
def one_more(bench: Bench, count: int) -> Iterator[Contest]:
    costs = {}
    with workspace(bench, "commits-one-more") as folder:
        for number in (FEW, count):
            (folder / str(number)).mkdir()
            dataset = filled(folder / str(number), number)
            costs[number] = min(dataset.encrypt_files(n) for n in range(NEIGHBOURS))
    rows = [Row(f"commits/one-more/{number}", f"encrypt_files, 1 file more than {number:,}", "ms") for number in costs]
    values = {(row.name, "ours"): cost for row, cost in zip(rows, costs.values(), strict=True)}
    yield told(rows, values | {(row.name, "beside"): ALLOWED * costs[FEW] for row in rows})


@contextmanager
def rows_read(bench: Bench, count: int) -> Iterator[Contest]:
    """Of files, by commits to a dataset that keeps one version. Each is in a process that knows nothing of it."""
    with workspace(bench, "commits-rows") as folder:
        dataset = filled(folder, count)
        dataset.encrypt_files(0, Policy(keep=1))
        read = sum(dataset.in_a_process(number, dataset.rows) for number in range(1, 1 + MEAN)) / MEAN
    row = Row("commits/rows", f"rows that a commit reads, {count:,} files, keep=1", "calls")
    yield told([row], {(row.name, "ours"): read, (row.name, "beside"): ROWS})


def filled(folder: Path, count: int) -> Growing:
    """A dataset whose tables name N files that do not exist."""
    dataset = Growing(folder, keystore(folder))
    fill(dataset.log, count)
    return dataset


@contextmanager
def whole(bench: Bench, count: int) -> Iterator[Contest]:
    """In a process of its own, whose memory is only this."""
    found = {}
    with workspace(bench, "commits-whole") as folder:
        for number in (count // 10, count):
            made = folder / str(number)
            made.mkdir()
            command = [sys.executable, "-m", "benchmarks.commits", str(number), str(made)]
            found[number] = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    rows, values = [], {}
    for number, figures in found.items():
        memory = Row(f"commits/whole/memory/{number}", f"{number:,} files in a commit, memory for one", "KiB")
        cost = Row(f"commits/whole/time/{number}", f"{number:,} files in a commit, time for one", "us")
        rows += [memory, cost]
        values[memory.name, "ours"], values[memory.name, "beside"] = figures["memory"], FILE_NBYTES
        values[cost.name, "ours"], values[cost.name, "beside"] = (
            figures["seconds"],
            ALLOWED * found[count // 10]["seconds"],
        )
    yield told(rows, values)


def main(count: int, folder: Path) -> None:
    """Plan and commit N files, and print the peak memory and the CPU time for one of them."""
    kms = keystore(folder)
    commit_made_up(FEW, folder / "few", kms)  # imports what it needs
    before, start = start_counting(), time.process_time()
    commit_made_up(count, folder / "dataset", kms)
    seconds, memory = time.process_time() - start, status("VmHWM") - before
    print(json.dumps({"memory": memory / count, "seconds": seconds / count}))


def commit_made_up(count: int, folder: Path, kms: dict[str, str]) -> None:
    """Plan and commit N files that do not exist."""
    add(Access.of(folder, kms).create(MASTER_KEY).log, range(count))


GROUPS: dict[str, Callable[[Bench], Group]] = {"commits": commits}

if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
