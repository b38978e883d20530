"""Spread tasks over bins of about equal work."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class Sized(Protocol):
    """Work of a known size."""

    @property
    def nbytes(self) -> int:
        """Bytes of work."""


Task = TypeVar("Task", bound=Sized)


def bins(tasks: Sequence[Task], *, target_bytes: int, open_cost: int, least: int) -> list[list[Task]]:
    """Spread files over bins: the longest file first, each to the bin with the least work.

    Args:
        tasks: One task for each file or manifest.
        target_bytes: Bytes of work in a bin: plaintext, and `open_cost` for each file.
        open_cost: The cost of opening a file, in bytes of work.
        least: The number of bins to make if there is work for them: twice the number that can run at once.

    Returns:
        The bins, the fullest first. In each bin the largest file is first.
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
