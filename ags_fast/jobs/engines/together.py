"""Run the tasks of a worker: one by one, or on object stores several at once."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from ags_fast.keys.kms import same_counts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

    from ags_fast.dataset.rows import Row
    from ags_fast.jobs.engines.base import AnyTask, JobContext

HELD_NBYTES = 64 << 20  # of files that are in work at once; a larger file is in work alone
AHEAD = 4  # times as many tasks wait for their turn: a slow file does not keep those behind it


def with_files_at_once(context: JobContext, most: int) -> JobContext:
    """Return the context for workers that may have `most` files in work at once, if the context does not say how many.

    They have several only where files are in an object store, and where all stores bear it. The caller finds that out,
    because a worker that cannot reach a store must say so in the row of each file.
    """
    if context.files_at_once is not None:
        return context
    stores = [store for store in context.stores if store is not None]
    together = any(not store.local for store in stores) and all(store.parallel for store in stores)
    return replace(context, files_at_once=most if together else 1)


def opening_cost(context: JobContext, open_cost: int) -> int:
    """Return the cost of opening a file in a worker, in bytes of work: files that are in work at once share it."""
    return open_cost if context.isolate else open_cost // (context.files_at_once or 1)


def run_files(context: JobContext, tasks: Iterable[AnyTask], attempt: int = 0) -> Iterator[Row]:
    """Run tasks, and yield their rows in the order of the tasks.

    A request to an object store takes long, whatever the file's size. So there a worker has `context.files_at_once`
    files in work, as long as they have at most HELD_NBYTES together.
    """
    files_at_once = context.files_at_once or 1
    if files_at_once > 1:
        yield from _together(context, tasks, attempt, files_at_once)
        return
    for task in tasks:
        yield context.work.run_file(context, task, attempt)


def _together(context: JobContext, tasks: Iterable[AnyTask], attempt: int, files_at_once: int) -> Iterator[Row]:
    from concurrent.futures import ThreadPoolExecutor

    run_file, most = context.work.run_file, files_at_once * AHEAD
    waiting: deque[tuple[Future[Row], int]] = deque()
    held = 0
    pool = ThreadPoolExecutor(files_at_once, "ags_fast-file", **same_counts())
    try:
        for task in tasks:
            while waiting and (len(waiting) >= most or held + task.nbytes > HELD_NBYTES):
                future, nbytes = waiting.popleft()
                yield future.result()
                held -= nbytes
            if task.nbytes > HELD_NBYTES:  # in this thread, where Ctrl-C ends the work on the file
                yield run_file(context, task, attempt)
                continue
            waiting.append((pool.submit(run_file, context, task, attempt), task.nbytes))
            held += task.nbytes
        while waiting:
            yield waiting.popleft()[0].result()
    finally:  # after an interruption, too, no file is in work when this ends
        pool.shutdown(cancel_futures=True)
