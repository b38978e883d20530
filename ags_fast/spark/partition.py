"""What a Spark task does: it runs the tasks of its bin. Both kinds of sessions ship this function."""

from __future__ import annotations

import functools
import gc
from dataclasses import replace
from typing import TYPE_CHECKING

from ags_fast.jobs.engines.local import run_isolated
from ags_fast.keys.kms import count_calls

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from ags_fast.jobs.results import Row
    from ags_fast.jobs.work.base import AnyTask, JobContext


@functools.cache
def _freeze_modules() -> None:
    """Take what a worker has imported out of the garbage collector's sight, once a process.

    Spark's daemon collects garbage after every task. With pyarrow and pandas that takes longer than a small task.
    """
    gc.collect()
    gc.freeze()


def run_bin(context: JobContext, tasks: Sequence[AnyTask]) -> tuple[list[tuple[str, Row]], Counter[tuple[str, str]]]:
    """Run tasks inside a Spark task.

    Returns:
        The path and the row of each task, and the calls of the KMS.
    """
    from pyspark import TaskContext

    _freeze_modules()
    task_context = TaskContext.get()
    assert task_context is not None
    # Set here: the size of reads depends on it, and an isolated process has no TaskContext.
    context = replace(context, threads=context.threads or task_context.cpus())
    attempt = task_context.attemptNumber() + context.isolate  # the isolated job is itself a second attempt
    if attempt > 1 or context.isolate:  # died twice: a file may be the cause
        rows = run_isolated(context, tasks, attempt)
    else:
        rows = (context.work.run_file(context, task, attempt) for task in tasks)
    with count_calls() as calls:
        done = [(task.path, row) for task, row in zip(tasks, rows, strict=True)]
    return done, calls
