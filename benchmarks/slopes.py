"""Benchmarks of jobs by the size of their work: what a job costs beside the files, and what each GiB costs.

A contender runs over several sizes in a row. The line that fits its times best has a slope, the time of a GiB, and an
intercept, the time of a job over nothing.
"""

from __future__ import annotations

import functools
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ags_fast import jobs
from ags_fast.spark import SparkEngine
from benchmarks.cases import MIB, Bench
from benchmarks.datasets import done, encrypt, make_tree, session_in, taken, worker_loop, workspace
from benchmarks.evp import ROOT
from benchmarks.keystore import MASTER_KEY, keystore
from benchmarks.measure import Case, Contest, Group, Row, Run
from benchmarks.plain_jobs import plain_copy, plain_encrypt, plain_job, plain_plan, plain_verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

GIB = 1 << 30
FILE = 128 * MIB
SPARK_SIZES = (GIB, 2 * GIB, 4 * GIB, 8 * GIB)
LOCAL_SIZES = (GIB // 8, GIB // 4, GIB // 2, GIB)  # more starts worker processes, which has another intercept
Work = dict[str, "Callable[[int], float]"]  # by column: the seconds of a job over so many bytes


def slopes(bench: Bench) -> Group:
    spark, local = ([bench.size(size) for size in sizes] for sizes in (SPARK_SIZES, LOCAL_SIZES))
    cases = [
        Case("slopes/spark/encrypt", functools.partial(spark_encrypts, bench, spark), rounds=1 / 4),
        Case("slopes/spark/verify", functools.partial(spark_verifies, bench, spark), rounds=1 / 4),
        Case("slopes/local", functools.partial(local_jobs, bench, local), rounds=1 / 3),
    ]
    return Group("a GiB of a job, and the job beside its files; beside: see the row; best Py: over cryptography", cases)


class Sweeps:
    """Two rows, of one contest. A contender is timed over all sizes once for both."""

    def __init__(self, name: str, label: str, sizes: list[int], work: Work) -> None:
        self.rows = [
            Row(f"{name}/slope", f"{label}: a GiB", nbytes=GIB),
            Row(f"{name}/intercept", f"{label}: beside the files", "ms"),
        ]
        self._sizes = sizes
        self._waiting: dict[tuple[str, int], float] = {}
        self.runs: dict[tuple[str, str], Run] = {
            (row.name, column): functools.partial(self._part, column, part, one)
            for column, one in work.items()
            for part, row in enumerate(self.rows)
        }

    def _part(self, column: str, part: int, work: Callable[[int], float]) -> float:
        if (column, part) not in self._waiting:
            line = statistics.linear_regression(self._sizes, [work(size) for size in self._sizes])
            self._waiting[column, 0], self._waiting[column, 1] = line.slope * GIB, max(line.intercept, 1e-6)
        return self._waiting.pop((column, part))


def trees(folder: Path, sizes: list[int]) -> dict[int, Path]:
    """Trees of linked files, by their bytes."""
    file = min(FILE, sizes[0] // 4)
    return {size: make_tree(folder / f"of-{size}", size // file, file, linked=True) for size in sizes}


@contextmanager
def spark_encrypts(bench: Bench, sizes: list[int]) -> Iterator[Contest]:
    with workspace(bench, "slope") as folder, session_in(folder) as session:
        sources, out = trees(folder, sizes), folder / "out"
        kms, engine = keystore(folder), SparkEngine(session)

        def plain(task: Callable[..., Iterator[int]], size: int) -> float:
            shutil.rmtree(out, ignore_errors=True)
            plan = plain_plan(sources[size], out)
            return taken(lambda: plain_job(session, task, plan))

        def ours(size: int) -> float:
            shutil.rmtree(out, ignore_errors=True)
            return taken(lambda: encrypt(sources[size], out, kms, engine))

        work: Work = {
            "beside": functools.partial(plain, plain_copy),
            "best": functools.partial(plain, plain_encrypt),
            "ours": ours,
        }
        sweeps = Sweeps("slopes/spark/encrypt", "Spark encrypts; beside: copies", sizes, work)
        yield Contest(sweeps.rows, sweeps.runs)


@contextmanager
def spark_verifies(bench: Bench, sizes: list[int]) -> Iterator[Contest]:
    with workspace(bench, "slope") as folder, session_in(folder) as session:
        whole = trees(folder, sizes)[sizes[-1]]
        kms, engine, dataset = keystore(folder), SparkEngine(session), folder / "dataset"
        encrypt(whole, dataset, kms, engine)
        plan = plain_plan(whole, folder / "sealed")
        sum(plain_encrypt(plan[: len(plan) // 2]))  # half of it serves twice, which saves memory
        plan = 2 * plan[: len(plan) // 2]
        names = sorted(path.relative_to(whole).as_posix() for path in whole.rglob("*.avro"))

        def part(everything: list[str], size: int) -> list[str]:
            return everything[: len(everything) * size // sizes[-1]]

        def ours(size: int) -> float:
            return taken(
                lambda: done(
                    jobs.verify_files(dataset, kms=kms, engine=engine, paths=part(names, size), progress=False)
                )
            )

        work: Work = {
            "beside": lambda size: taken(worker_loop(dataset, kms, "verify", count=len(part(names, size)))) / 2,
            "best": lambda size: taken(lambda: plain_job(session, plain_verify, plan[: len(plan) * size // sizes[-1]])),
            "ours": ours,
        }
        sweeps = Sweeps("slopes/spark/verify", "Spark verifies; beside: 2 x one", sizes, work)
        yield Contest(sweeps.rows, sweeps.runs)


OURS = """
import sys
from ags_fast import jobs
op, source, target, keystore, key_file = sys.argv[1:]
kms = {"encryption.kms-type": "local", "kms.local.path": keystore, "kms.local.key-file": key_file}
if op == "encrypt":
    done = jobs.encrypt_files(source, target, kms=kms, wrapping_key_id="%s", fsync=False, progress=False)
else:
    done = jobs.verify_files(target, kms=kms, progress=False)
done.raise_for_failures()
"""
PLAIN = "import sys; from benchmarks.plain_jobs import plain_pool; plain_pool(*sys.argv[1:4], int(sys.argv[4]))"


@contextmanager
def local_jobs(bench: Bench, sizes: list[int]) -> Iterator[Contest]:
    """Each in a new process, as a command is, whose start is on the clock."""
    with workspace(bench, "slope") as folder:
        sources, kms = trees(folder, sizes), keystore(folder)
        rows: list[Row] = []
        runs: dict[tuple[str, str], Run] = {}

        def started(op: str, column: str, size: int) -> float:
            target = folder / f"{column}-{size}"
            if op == "encrypt":
                shutil.rmtree(target, ignore_errors=True)
            program, rest = PLAIN, [str(max(bench.threads))]
            if column == "ours":
                program, rest = OURS % MASTER_KEY, [kms["kms.local.path"], kms["kms.local.key-file"]]
            command = [sys.executable, "-c", program, op, str(sources[size]), str(target), *rest]
            begun = time.perf_counter()
            subprocess.run(command, cwd=ROOT, check=True)
            return time.perf_counter() - begun

        for op in ("encrypt", "verify"):
            work: Work = {column: functools.partial(started, op, column) for column in ("best", "ours")}
            sweeps = Sweeps(f"slopes/local/{op}", f"new process, local engine, {op}", sizes, work)
            rows += sweeps.rows
            runs |= sweeps.runs
        for column in ("best", "ours"):  # for a verification that comes first
            for size in sizes:
                started("encrypt", column, size)
        yield Contest(rows, runs)


GROUPS: dict[str, Callable[[Bench], Group]] = {"slopes": slopes}
