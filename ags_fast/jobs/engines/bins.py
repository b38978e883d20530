"""How tasks are spread over bins of about equal work."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ags_fast.jobs.work.context import Task


def bins(tasks: Sequence[Task], *, target_bytes: int, open_cost: int, least: int) -> list[list[Task]]:
    """Spread files over bins: the longest processing time first, each to the bin that has least to do.

    target_bytes: of plaintext for a bin, opening a file counted as open_cost bytes. least: bins to make if there is
    work for them: what can run at once, twice over. The fullest bin comes first, and in it the largest file.
    """
    if not tasks:
        return []
    total = sum(task.entry.plain_length + open_cost for task in tasks)
    # A bin of less than a sixteenth of the target costs more to start than to do.
    wanted = max(-(-total // target_bytes), min(least, -(-total * 16 // target_bytes)))
    count = max(1, min(wanted, len(tasks)))
    filled: list[list[Task]] = [[] for _ in range(count)]
    loads = [(0, i) for i in range(count)]
    for task in sorted(tasks, key=lambda task: -task.entry.plain_length):
        load, i = loads[0]
        filled[i].append(task)
        heapq.heapreplace(loads, (load + task.entry.plain_length + open_cost, i))
    return [filled[i] for _, i in sorted(loads, reverse=True)]
