"""Spread tasks over bins of about equal work."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ags_fast.jobs.work.base import AnyTask

Task = TypeVar("Task", bound="AnyTask")


def bins(tasks: Sequence[Task], *, target_bytes: int, open_cost: int, least: int) -> list[list[Task]]:
    """Spread files over bins: the longest file first, each to the bin with the least work.

    A bin is to have `target_bytes` of work: plaintext, and `open_cost` bytes for each file. There are at least `least`
    bins (twice the number that can run at once) if there is work for them. The fullest bin is first, and in each bin
    the largest file.
    """
    if not tasks:
        return []
    total = sum(task.nbytes + open_cost for task in tasks)
    # Starting a bin of less than a sixteenth of the target costs more than its work.
    wanted = max(-(-total // target_bytes), min(least, -(-total * 16 // target_bytes)))
    count = max(1, min(wanted, len(tasks)))
    filled: list[list[Task]] = [[] for _ in range(count)]
    loads = [(0, i) for i in range(count)]
    for task in sorted(tasks, key=lambda task: -task.nbytes):
        load, i = loads[0]
        filled[i].append(task)
        heapq.heapreplace(loads, (load + task.nbytes + open_cost, i))
    return [filled[i] for _, i in sorted(loads, reverse=True)]
