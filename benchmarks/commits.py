"""What is measured of many commits, and of datasets with many files: whether a commit costs what the 10th costs.

Times are of this process' CPUs: of commits the mean of 32, of `open_file` the least of five. The limit is what the
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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ags_fast import Dataset, jobs
from ags_fast.dataset.decide import Wish
from ags_fast.dataset.entries import FileEntry
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.names import new_job_id
from ags_fast.dataset.planning import begin_plan, reserve_keys
from ags_fast.dataset.policy import Policy
from ags_fast.fs import Store
from ags_fast.jobs.engines.local import LocalEngine
from ags_fast.keys.kms import load_kms
from benchmarks.datasets import done, workspace
from benchmarks.keystore import MASTER_KEY, keystore
from benchmarks.limit import ROOT
from benchmarks.measure import Case, Contest, Group, Row
from benchmarks.memory import start_counting, status
from benchmarks.rotation import file_of, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.cases import Bench

COMMITS, QUICK_COMMITS = 10_000, 40
FILES, QUICK_FILES = 1_000_000, 4000  # of one commit, and of the dataset that gets one file more
AMONG, QUICK_AMONG = 40_000, 2000
FEW = 100
NEIGHBOURS = 5
MEAN = 32  # commits, since some of them merge manifests or tidy up
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
        Case("commits/whole", functools.partial(whole, bench, QUICK_FILES if bench.quick else FILES), rounds=0),
    ]
    return Group("CPU time, mean of 32 commits; limit: what the target allows, 1.5 times the 10th commit", cases)


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
        Ledger.open_or_create(Store(self.folder), load_kms(kms), MASTER_KEY)
        self._handle = Dataset.open(self.folder, kms=kms)

    def path(self, number: int) -> str:
        return f"{number // FOLDER_FILES:04}/{number:08}"

    def kek_a_file(self, number: int) -> float:
        """Seconds of a commit by a job that makes a KEK for its file."""
        return self.encrypt_files(number, Policy(kek_scope="files:1"))

    def in_a_process(self, number: int) -> float:
        """Seconds of a commit by a process that knows nothing of the dataset: a fork of this one."""
        end, other = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                os.write(other, str(self.encrypt_files(number)).encode())
            finally:
                os._exit(0)
        os.close(other)
        with open(end, "rb") as file:
            seconds = float(file.read())
        os.waitpid(pid, 0)
        return seconds

    def encrypt_files(self, number: int, policy: Policy | None = None) -> float:
        """Seconds of a commit by a job whose source has one file."""
        path = self.source / self.path(number)
        path.parent.mkdir(exist_ok=True)
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
        values[row.name, "limit"] = COMMIT_NBYTES if kind == "nbytes" else ALLOWED * costs[kind, points[0]]
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
    yield told(rows, values | {(row.name, "limit"): ALLOWED * costs[FEW] for row in rows})


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
    yield told(rows, values | {(row.name, "limit"): ALLOWED * costs[FEW] for row in rows})


def filled(folder: Path, count: int) -> Growing:
    """A dataset whose manifests name N files that do not exist."""
    dataset = Growing(folder, keystore(folder))
    opened = Ledger.open(Store(dataset.folder), load_kms(dataset.kms))
    fill(opened, opened.keyring.main_key(), count)
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
        values[memory.name, "ours"], values[memory.name, "limit"] = figures["memory"], FILE_NBYTES
        values[cost.name, "ours"], values[cost.name, "limit"] = (
            figures["seconds"],
            ALLOWED * found[count // 10]["seconds"],
        )
    yield told(rows, values)


def made_up(number: int, job_id: str) -> FileEntry:
    """An entry without keys of a file that does not exist."""
    file = file_of(number)
    return FileEntry(
        path=file[:-4],
        file=file,
        format="ags1",
        plain_length=4096,
        file_length=4132,
        block_size=1 << 20,
        key_id="",
        wrapped_dek=b"",
        column_keys=None,
        aad_prefix=number.to_bytes(16, "big"),
        job_id=job_id,
        set_id=None,
        part=None,
        parts=None,
        source=file[:-4],
        stamp=str(1_767_225_600_000_000_000 + 1_000_003 * number),
    )


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
    job_id = new_job_id()
    opened = Ledger.open_or_create(Store(folder), load_kms(kms), MASTER_KEY)
    entries = [made_up(number, job_id) for number in range(count)]
    entries = reserve_keys(opened, Policy(), job_id, MASTER_KEY, True, entries, [{}] * count)
    with ExitStack() as held:
        plan, entries = begin_plan(opened, held, job_id, entries, 16, base=0)
        version = opened.commit(Wish("encrypt", job_id, entries)).version
        if version is None or version.files != count:
            raise AssertionError(f"not {count} files")
        plan.end({entry.file for entry in entries})


GROUPS: dict[str, Callable[[Bench], Group]] = {"commits": commits}

if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
