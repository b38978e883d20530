"""What a Spark task does: it runs the tasks of its bin. Both kinds of sessions ship this function."""

from __future__ import annotations

import functools
import gc
import pickle
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ags_fast.engines.processes import run_isolated
from ags_fast.engines.together import run_files
from ags_fast.fs.lacking import gathered
from ags_fast.keys.kms import count_calls

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from ags_fast.engines.base import AnyTask, JobContext
    from ags_fast.jobs.results import Row

    _BinResult = tuple[int, list[Row], Counter[tuple[str, str]], set[str]]


class Bin:
    """The tasks of a Spark task. A pickle of it is compressed, because the driver's JVM keeps all of them.

    A pickle is made when Spark asks for it, so that the caller's process does not hold those of all bins at once.

    Args:
        number: The number of the bin among those of its job.
        tasks: The tasks.
    """

    def __init__(self, number: int, tasks: Sequence[AnyTask]) -> None:
        self.number = number
        self.tasks = tasks

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self.number, zlib.compress(pickle.dumps(list(self.tasks), pickle.HIGHEST_PROTOCOL), 1))


def _unpacked(number: int, packed: bytes) -> Bin:
    return Bin(number, pickle.loads(zlib.decompress(packed)))


@functools.cache
def _freeze_modules() -> None:
    """Take what a worker has imported out of the garbage collector's sight, once a process.

    Spark's daemon collects garbage after every task. With pyarrow and pandas that takes longer than a small task.
    """
    gc.collect()
    gc.freeze()


def run_bin(context: JobContext, part: Bin) -> _BinResult:
    """Run the tasks of a bin inside a Spark task.

    Returns:
        The number of the bin, the rows in the order of its tasks, the calls of the KMS, and what file systems lack.
    """
    from pyspark import TaskContext

    _freeze_modules()
    task_context = TaskContext.get()
    assert task_context is not None
    # Set here: the size of reads depends on it, and an isolated process has no TaskContext.
    context = replace(context, threads=context.threads or task_context.cpus())
    attempt = task_context.attemptNumber() + context.isolate  # the isolated job is itself a second attempt
    isolated = attempt > 1 or context.isolate  # died twice: a file may be the cause
    with count_calls() as calls, gathered() as lacks:
        rows = (run_isolated if isolated else run_files)(context, part.tasks, attempt)
        done = [row for _, row in zip(part.tasks, rows, strict=True)]
    return part.number, done, calls, lacks
