"""How many threads a call may use when its caller does not say."""

from __future__ import annotations

import operator
import os
import sys

from ags_fast._core import MAX_THREADS

__all__ = ["thread_count", "usable_cpus"]


def thread_count(threads: int | None) -> int:
    """Return `threads`, else AGS_FAST_THREADS, else the CPUs of a Spark task, else the CPUs that this process may use.

    ValueError if one of the first two is no number from 1. Above MAX_THREADS is clamped.
    """
    if threads is None:
        text = os.environ.get("AGS_FAST_THREADS")
        if text is None:
            return min(_spark_task_cpus() or usable_cpus(), MAX_THREADS)
        if not text.strip().isdigit():
            raise ValueError(f"AGS_FAST_THREADS must be a whole number from 1, not {text!r}")
        threads = int(text)
    threads = operator.index(threads)
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    return min(threads, MAX_THREADS)


def _spark_task_cpus() -> int | None:
    # Looked up, never imported: where a task runs, PySpark is imported already. A task must not take all CPUs of the
    # machine, because one task a CPU runs beside it.
    module = sys.modules.get("pyspark.taskcontext")
    task = module and module.TaskContext.get()
    return task.cpus() if task else None


_known: tuple[int, int] | None = None  # process id and number of CPUs, as found by that process


def usable_cpus() -> int:
    global _known
    if _known is None or _known[0] != os.getpid():
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        _known = os.getpid(), max(1, min(affinity, _cgroup_cpus() or affinity))
    return _known[1]


def _cgroup_cpus() -> int | None:
    """Return the container's CPU quota, rounded up, or None. Looks at cgroup version 2, then at version 1."""
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        try:
            with open("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", encoding="ascii") as file:
                quota = file.read().strip()
            with open("/sys/fs/cgroup/cpu/cpu.cfs_period_us", encoding="ascii") as file:
                period = file.read().strip()
        except OSError:
            return None
    limited = quota.isdigit() and period.isdigit() and int(period) > 0  # not "max" or -1
    return -(-int(quota) // int(period)) if limited else None
