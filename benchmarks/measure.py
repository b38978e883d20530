"""Side by side: contenders take turns, round after round, and what is claimed is the ratio of their times."""

from __future__ import annotations

import gc
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

TITLES = {
    "loop": "EVP loop",
    "beside": "beside",
    "naive": "naive",
    "best": "best Py",
    "pycryptodome": "pycrypt.",
    "ring": "ring",
    "ours": "ours",
}
REFERENCE = {"naive", "pycryptodome"}  # slow, and only for comparison: they get fewer rounds
SLOW_SECONDS = 0.03
PER_SECOND = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9, "calls": 1, "KiB": 1 / 1024}

by_cpu = False

Run = Callable[[], float | None]  # returns the seconds it took, or None if its caller should look at the clock


def use_bytecode() -> None:
    """Begin this program again if Python may not write bytecode: each process it starts would compile the package."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def warn_if_busy() -> None:
    """Say on the error stream if other programs keep the CPUs busy."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    if load > cpus:
        print(
            f"The load of the last minute is {load:.1f}, on {cpus} CPU{'s' * (cpus != 1)}: what is measured now may be "
            "slow. Wait for other programs, or for a build that has just ended.",
            file=sys.stderr,
            flush=True,
        )


class SkippedError(Exception):
    """A contest cannot take place here, or a contender take part; the message says why."""


@dataclass
class Row:
    """What contenders took for one task. Samples are seconds a call, bytes of memory or counts: less is better.

    name: unique, as ``codec/encrypt/1MiB/aes-128/2t``. unit: GB/s, MiB, KiB, s, ms, us, ns or calls. nbytes: of
    plaintext in a call.
    """

    name: str
    label: str
    unit: str = "GB/s"
    nbytes: int = 0
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return self.name.split("/")[0]

    def shown(self, column: str, statistic: Callable[[list[float]], float] = min) -> float | None:
        """A column's best, or another statistic of it, in the row's unit."""
        if not (samples := self.samples.get(column)):
            return None
        value = statistic(samples)
        if self.unit == "GB/s":
            return self.nbytes / value / 1e9
        return value / 2**20 if self.unit == "MiB" else value * PER_SECOND[self.unit]

    def as_json(self) -> dict[str, Any]:
        ours = self.samples.get("ours", [])
        return {
            "name": self.name,
            "label": self.label,
            "unit": self.unit,
            "columns": {
                column: {
                    "best": self.shown(column),
                    "median": self.shown(column, statistics.median),
                    "samples": samples,
                }
                for column, samples in self.samples.items()
            },
            "ratios": {
                f"ours/{other}": dict(zip(("best", "median"), speed(ours, samples), strict=True))
                for other, samples in self.samples.items()
                if other != "ours" and ours
            },
        }


def speed(ours: list[float], other: list[float]) -> tuple[float, float]:
    """How many times as fast as the other: their bests, and the median over the rounds that both were in."""
    rounds = [theirs / mine for mine, theirs in zip(ours, other, strict=False)]
    return min(other) / min(ours), statistics.median(rounds)


@dataclass
class Contest:
    """Contenders for the rows of one task. All of them take turns, so that any two can be compared.

    runs: by row and column. A contender that is missing here raises SkippedError when it first runs. calls: how many
    calls one run makes. check: whether the column's run that has just ended did its work; asked once for each
    contender, outside the clock.
    """

    rows: list[Row]
    runs: dict[tuple[str, str], Run]
    calls: int = 1
    check: Callable[[str], bool] = lambda column: True

    def measure(self, rounds: int) -> list[Row]:
        if unknown := {column for _, column in self.runs} - TITLES.keys():
            raise ValueError(f"no column of the table is called {', '.join(sorted(unknown))}")
        turns = {}
        for contender, run in self.runs.items():  # warms up
            try:
                seconds = timed(run)
            except SkippedError as reason:
                print(f"  {' '.join(contender)}: skipped, {reason}")
                continue
            if not self.check(contender[1]):
                raise AssertionError(f"{contender}: the result is wrong")
            slow = contender[1] in REFERENCE and seconds > SLOW_SECONDS
            turns[contender] = min(rounds, max(3, rounds // 4)) if slow else rounds
        rows = {row.name: row for row in self.rows}
        shuffle = random.Random(0).shuffle
        order = list(turns)
        gc.collect()
        gc.disable()
        try:
            for number in range(rounds):
                shuffle(order)  # no contender always follows the same other one
                for name, column in order:
                    if number < turns[name, column]:
                        seconds = timed(self.runs[name, column])
                        rows[name].samples.setdefault(column, []).append(seconds / self.calls)
        finally:
            gc.enable()
        for row in self.rows:
            row.samples = {column: samples for column, samples in row.samples.items() if samples}
        _share_best(self.rows)
        return self.rows


def timed(run: Run) -> float:
    """The seconds that a run took: those that it tells, or those by the clock."""
    start = clock()
    told = run()
    seconds = clock() - start
    return seconds if told is None else told


def clock() -> float:
    """The time in seconds; with --cpu that of the CPU, of this process and all below it, such as a JVM."""
    if not by_cpu:
        return time.perf_counter()
    ticks = sum(_ticks(pid) for pid in (os.getpid(), *below(os.getpid())))
    return max(ticks / os.sysconf("SC_CLK_TCK"), 1e-3)


def _ticks(pid: int) -> int:
    """Of a process, and of its children that have ended."""
    with suppress(OSError):
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return 0


def below(pid: int) -> Iterator[int]:
    """The processes that a process has started, and so on."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield int(child)
                yield from below(int(child))


def _share_best(rows: list[Row]) -> None:
    """With more threads, the best Python can be the one with fewer: its lock makes it so where blocks are small."""
    fewest: dict[str, list[float]] = {}
    for row in rows:
        task, _, threads = row.name.rpartition("/")
        best = row.samples.get("best")
        if best and re.fullmatch(r"\d+t", threads):
            row.samples["best"] = fewest[task] = min(best, fewest.get(task, best), key=min)


@dataclass(frozen=True)
class Case:
    """A contest, prepared when its turn comes. name: what the names of its rows begin with. rounds: as a factor."""

    name: str
    prepare: Callable[[], AbstractContextManager[Contest]]
    rounds: float = 1


@dataclass(frozen=True)
class Group:
    """Cases that are printed together. about: what is done, and what the columns are where they are not the usual."""

    about: str
    cases: list[Case]
