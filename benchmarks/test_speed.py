"""Ours beside naive Python, the best Python, the EVP loop and ring, by pytest-benchmark.

``pytest benchmarks --benchmark-only --benchmark-group-by=group`` prints a table for each task: codec, reader, writer,
small files and Parquet. The contenders are those of ``python -m benchmarks``, on a quarter of its data, with one
thread. Here they run one after the other. What is claimed comes from there, where they take turns.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

import pytest

from benchmarks import cases, parquet
from benchmarks.evp import ROOT
from benchmarks.measure import TITLES, Case, Contest, Run, SkippedError, timed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_benchmark.fixture import BenchmarkFixture

FOUR = ["loop", "naive", "best", "ours"]
FIVE = [*FOUR, "ring"]
TASKS = {  # the names of cases, and who takes part
    "codec/encrypt_into/4KiB/aes-128": FIVE,
    "codec/decrypt_into/4KiB/aes-128": FIVE,
    "codec/encrypt_into/1MiB/aes-128": FIVE,
    "codec/decrypt_into/1MiB/aes-128": FIVE,
    "read/8MiB/aes-128": FOUR,
    "write/64KiB/aes-128": FOUR,
    "small/8KiB/aes-128": FOUR,
    "parquet/encrypt": FOUR,
    "parquet/verify": FOUR,
}
NAMES = {("parquet/encrypt", "naive"): "pyarrow", ("parquet/encrypt", "best"): "parquet-java"}
ENTRIES = [
    pytest.param(task, column, id=f"{task} {NAMES.get((task, column), TITLES[column])}")
    for task, columns in TASKS.items()
    for column in columns
]


class Clock:
    """Seconds, less those that a contender does not count: the EVP loop's threads, a file that is removed before."""

    def __init__(self) -> None:
        self._left_out = 0.0

    def __call__(self) -> float:
        return time.perf_counter() - self._left_out

    def go(self, run: Run) -> None:
        """Go forward by what the run took."""
        begun = time.perf_counter()
        counted = timed(run)
        self._left_out += time.perf_counter() - begun - counted


CLOCK = Clock()


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    """The cases by name. Where nothing is measured, a little of the data is enough, and nothing is kept."""
    look = request.config.getoption("benchmark_disable")
    build = tmp_path_factory.mktemp("build") if look else ROOT / "build" / "benchmarks"
    with cases.scratch_folder() as scratch:
        bench = cases.Bench(build, scratch, [1], part=64 if look else 4)
        groups = [make(bench) for make in (cases.GROUPS | parquet.GROUPS).values()]
        yield {case.name: case for group in groups for case in group.cases}


@pytest.fixture(scope="module")
def contest(request: pytest.FixtureRequest, found: dict[str, Case]) -> Iterator[Contest]:
    try:
        with found[request.param].prepare() as contest:
            yield contest
    except SkippedError as reason:
        pytest.skip(str(reason))


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize(("contest", "column"), ENTRIES, indirect=["contest"])
def test_speed(benchmark: BenchmarkFixture, contest: Contest, column: str) -> None:
    row = contest.rows[0]
    benchmark.group = row.name if contest.calls == 1 else f"{row.name}, {contest.calls} calls"
    benchmark.extra_info["nbytes"] = row.nbytes
    try:
        benchmark(functools.partial(CLOCK.go, contest.runs[row.name, column]))
    except SkippedError as reason:
        pytest.skip(str(reason))
    assert contest.check(column), "the result is wrong"
