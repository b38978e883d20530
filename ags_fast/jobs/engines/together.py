"""Run the tasks of a worker: one by one, or on object stores several at once."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ags_fast.keys.kms import same_counts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

    from ags_fast.dataset.rows import Row
    from ags_fast.jobs.work.base import AnyTask, JobContext

HELD_NBYTES = 64 << 20  # of files that are in work at once; a larger file is in work alone
AHEAD = 4  # times as many tasks wait for their turn: a slow file does not keep those behind it


def opening_cost(context: JobContext, open_cost: int) -> int:
    """Return the cost of opening a file in a worker, in bytes of work: files that are in work at once share it."""
    return open_cost // context.files_at_once if _is_far(context) else open_cost


def _is_far(context: JobContext) -> bool:
    return any(store is not None and not store.local for store in context.stores)


def run_files(context: JobContext, tasks: Iterable[AnyTask], attempt: int = 0) -> Iterator[Row]:
    """Run tasks, and yield their rows in the order of the tasks.

    A request to an object store takes long, whatever the file's size. So there a worker has `context.files_at_once`
    files in work, as long as they have at most HELD_NBYTES together.
    """
    if context.files_at_once < 2 or not _is_far(context):
        for task in tasks:
            yield context.work.run_file(context, task, attempt)
        return
    yield from _together(context, tasks, attempt)


def _together(context: JobContext, tasks: Iterable[AnyTask], attempt: int) -> Iterator[Row]:
    from concurrent.futures import ThreadPoolExecutor

    run_file, most = context.work.run_file, context.files_at_once * AHEAD
    waiting: deque[tuple[Future[Row], int]] = deque()
    held = 0
    pool = ThreadPoolExecutor(context.files_at_once, "ags_fast-file", **same_counts())
    try:
        for task in tasks:
            while waiting and (len(waiting) >= most or held + task.nbytes > HELD_NBYTES):
                future, nbytes = waiting.popleft()
                yield future.result()
                held -= nbytes
            waiting.append((pool.submit(run_file, context, task, attempt), task.nbytes))
            held += task.nbytes
        while waiting:
            yield waiting.popleft()[0].result()
    finally:  # after an interruption, too, no file is in work when this ends
        pool.shutdown(cancel_futures=True)
