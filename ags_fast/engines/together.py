"""Run tasks in this process: one by one, or several at once where that pays."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from ags_fast.keys.kms import same_counts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from ags_fast.dataset.rows import Row
    from ags_fast.engines.base import AnyTask, JobContext

HELD_NBYTES = 64 << 20  # of files that are in work at once; a larger file is in work alone
LONG_NBYTES = 1 << 20  # of a file whose calls into C take longer than the Python between them
AHEAD = 4  # times as many tasks wait for their turn: a slow file does not keep those behind it


def with_files_at_once(context: JobContext, most: int) -> JobContext:
    """Return the context for workers that may have `most` files in work at once, if the context does not say how many.

    They have several only where files wait, and where all stores bear it. The caller finds that out, because a worker
    that cannot reach a store must say so in the row of each file.
    """
    if context.files_at_once is not None:
        return context
    together = context.waits and all(store.parallel for store in context.stores if store is not None)
    return replace(context, files_at_once=most if together else 1)


def with_threads(context: JobContext, tasks: Sequence[AnyTask], cpus: int, most: int) -> JobContext:
    """Return the context of harmless tasks for all CPUs, and `most` files at once; that of others as it is.

    Python runs one thread at a time, except in calls that read, write or seal. So without a wait, too, several files
    are in work if these calls are long. Each gets its part of the CPUs, and a file that is most of the work gets all.
    """
    if not tasks or not context.is_harmless(tasks):
        return context
    total, largest = sum(task.nbytes for task in tasks), max(task.nbytes for task in tasks)
    busy = context.local and not context.waits and total >= len(tasks) * LONG_NBYTES
    at_once = min(cpus, most) if busy else context.files_at_once or 1
    count = max(1, min(at_once, cpus, total // max(largest, 1)))
    # Of an AGS1 stream on a local disk only a chunk is in memory, and its thread looks whether it is to end.
    large, threads = count if context.local else 1, context.threads or max(1, cpus // count)
    return replace(context, threads=threads, files_at_once=at_once, large_at_once=large)


def opening_cost(context: JobContext, open_cost: int) -> int:
    """Return the cost of opening a file in a worker, in bytes of work: files share their waits for an object store."""
    return open_cost if context.isolate or context.local else open_cost // (context.files_at_once or 1)


def run_files(context: JobContext, tasks: Sequence[AnyTask], attempt: int = 0) -> Iterator[Row]:
    """Run tasks, and yield their rows in the order of the tasks.

    A request to an object store takes long, whatever the file's size, and so does `fsync`. So `context.files_at_once`
    files are in work, as long as they have at most HELD_NBYTES together in memory.
    """
    if (files_at_once := context.files_at_once or 1) > 1 and len(tasks) > 1:
        yield from _together(context, tasks, attempt, files_at_once)
    else:
        yield from (context.work.run_file(context, task, attempt) for task in tasks)


def _together(context: JobContext, tasks: Sequence[AnyTask], attempt: int, files_at_once: int) -> Iterator[Row]:
    from concurrent.futures import ThreadPoolExecutor

    run_file, most = context.work.run_file, files_at_once * AHEAD
    waiting: deque[tuple[Future[Row], int]] = deque()
    held, large = 0, context.large_at_once
    pool = ThreadPoolExecutor(files_at_once, "ags_fast-file", **same_counts())
    try:
        for task in tasks:
            nbytes = task.nbytes if large == 1 else min(task.nbytes, HELD_NBYTES // large)
            while waiting and (len(waiting) >= most or held + nbytes > HELD_NBYTES):
                future, its = waiting.popleft()
                yield future.result()
                held -= its
            if nbytes > HELD_NBYTES:  # in this thread, where Ctrl-C ends the work on the file
                yield run_file(context, task, attempt)
                continue
            waiting.append((pool.submit(run_file, context, task, attempt), nbytes))
            held += nbytes
        while waiting:
            yield waiting.popleft()[0].result()
    except BaseException:
        context.stopped.append(True)
        raise
    finally:  # after an interruption, too, no file is in work when this ends
        pool.shutdown(cancel_futures=True)
