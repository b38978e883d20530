"""The engine of one machine: worker processes, and what becomes of a file that kills them.

Workers are started afresh, not forked, for the caller may have threads; and not by multiprocessing, which would run the
caller's script again.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast._threads import thread_count
from ags_fast.fs import Store
from ags_fast.jobs.engines.bins import bins
from ags_fast.jobs.engines.start import import_path, start_python
from ags_fast.jobs.work.dispatch import run_file
from ags_fast.jobs.work.rows import failed_row
from ags_fast.keys.kms import KmsClient, add_calls, as_kms, check_travels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ags_fast.jobs.results import Row
    from ags_fast.jobs.work.context import Context, Task


STARTS = 3  # of workers that may fail in a row
ATTEMPTS = 3  # that a file gets; each that it does not survive costs a worker
TARGET_BYTES = 64 << 20  # of one message to a worker: a small part of a second
MESSAGE_TASKS = 256  # so that progress is seen, and little is done twice when a worker dies


class Worker:
    """A process that does files for one context. Killed when it is closed.

    ready: whether it has the context. What dies before that dies of no file, and its rows begin with None.
    """

    ready = False

    def __init__(self, context: Context, path: list[str]) -> None:
        self._process = start_python("from ags_fast.jobs.engines.worker import main; main()", path)
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._process.stdin as stdin, self._process.stdout as stdout:
            self._tasks = Connection(os.dup(stdin.fileno()), readable=False)
            self.rows = Connection(os.dup(stdout.fileno()), writable=False)
        self._send(context)

    def _send(self, message: Any) -> None:
        try:
            self._tasks.send(message)
        except BrokenPipeError:
            pass  # it has died: to be seen when it is asked

    def start(self, tasks: Sequence[Task], attempt: int) -> None:
        self._send((list(tasks), attempt))

    def wait_ready(self) -> bool:
        """False if it has died before."""
        try:
            self.rows.recv()
        except (EOFError, OSError):
            return False
        self.ready = True
        return True

    def receive(self) -> list[Row] | None:
        """The next rows; none of them at the end of what it was told to do. None if it has died."""
        try:
            rows, calls = self.rows.recv()
        except (EOFError, OSError):
            return None
        add_calls(calls)
        return rows  # type: ignore[no-any-return]

    def how_it_died(self) -> str:
        code = self._process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"gone with status {code}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._tasks.close()
        self.rows.close()


def _started(context: Context, path: list[str]) -> Worker:
    """A worker that is ready. ChildProcessError if none comes to be."""
    for _ in range(STARTS):
        worker = Worker(context, path)
        if worker.wait_ready():
            return worker
        worker.close()
    raise _not_started(worker)


def run_isolated(context: Context, tasks: Iterable[Task], attempt: int) -> Iterator[Row]:
    """Like `run_file` for each, but in another process: one that crashes twice has a failed row like any other."""
    # Spark has said what may be imported here, also by names that are relative to its own folder: archives it brought.
    path = list(map(os.path.abspath, sys.path))
    worker = None
    try:
        for task in tasks:
            rows: list[Row] = []
            for again in (attempt, attempt + 1):
                worker = worker or _started(context, path)
                worker.start([task], again)
                while more := worker.receive():
                    rows += more
                if more is None:
                    died = _died(context, task, again, worker)
                    worker.close()
                    worker = None
                if rows:
                    break
            yield from rows or [died]
    finally:
        if worker is not None:
            worker.close()


def _died(context: Context, task: Task, attempt: int, worker: Worker) -> Row:
    return failed_row(context, task, attempt, "WorkerDiedError", f"the process that did it was {worker.how_it_died()}")


def _not_started(worker: Worker) -> ChildProcessError:
    return ChildProcessError(
        f"{STARTS} worker processes in a row were {worker.how_it_died()} before they had looked at a file: what they "
        "wrote to standard error says why. Is the KMS client's module where they can import it?"
    )


def client_for(engine: object, kms: KmsClient | Mapping[str, str], *folders: Any) -> KmsClient:
    """The KMS client of a job on these. TypeError if the engine's processes could not have the same."""
    client = as_kms(kms)
    stores = [folder if isinstance(folder, Store) else Store(folder) for folder in folders]
    if not (isinstance(engine, LocalEngine) and engine.runs_here(*stores)):
        check_travels(client)
    return client


class _Message(NamedTuple):
    tasks: list[Task]
    attempt: int


class LocalEngine:
    """Runs jobs in processes of this machine.

    processes: how many; None: the usable CPUs. 0 does everything in the calling process: a file that crashes there
    takes it along. A program that embeds Python says by `multiprocessing.set_executable` which interpreter they run.
    """

    def __init__(self, processes: int | None = None) -> None:
        if processes is not None and processes < 0:
            raise ValueError(f"processes must not be negative, not {processes}")
        self._processes = processes

    def runs_here(self, *stores: Store | None) -> bool:
        """Whether jobs on these run in the calling process: as they must where no other process sees a store."""
        return self._processes == 0 or any(store is not None and not store.shared for store in stores)

    def run(self, context: Context, tasks: Sequence[Task], open_cost: int, report: Callable[[list[Row]], None]) -> None:
        """Do every file, and report its row. What `report` raises, and Ctrl-C, end the workers.

        ChildProcessError if no worker starts.
        """
        cpus = thread_count(None)
        processes = cpus if self._processes is None else self._processes
        if self.runs_here(context.dataset, context.other):
            for task in tasks:
                report([run_file(context, task)])
            return
        parts = bins(tasks, target_bytes=TARGET_BYTES, open_cost=open_cost, least=2 * processes)
        todo = deque(
            _Message(part[i : i + MESSAGE_TASKS], 0) for part in parts for i in range(0, len(part), MESSAGE_TASKS)
        )
        count = min(processes, len(todo))
        if context.threads is None and count:
            context = replace(context, threads=max(1, cpus // count))
        busy: dict[Worker, tuple[_Message, int]] = {}  # what it does, and how many rows of it have come
        idle: list[Worker] = []
        failed_starts = 0
        path = import_path()
        try:
            while todo or busy:
                while todo and len(busy) < count:
                    worker = idle.pop() if idle else Worker(context, path)
                    message = todo.popleft()
                    busy[worker] = message, 0
                    worker.start(*message)
                by_rows: dict[Any, Worker] = {worker.rows: worker for worker in busy}
                for ready in wait(list(by_rows)):
                    worker = by_rows[ready]
                    message, done = busy[worker]
                    if not worker.ready:
                        if worker.wait_ready():
                            failed_starts = 0
                            continue
                        failed_starts += 1
                        if failed_starts == STARTS:
                            raise _not_started(worker)
                        del busy[worker]
                        todo.appendleft(message)
                        worker.close()
                        continue
                    rows = worker.receive()
                    if rows:
                        busy[worker] = message, done + len(rows)
                        report(rows)
                        continue
                    del busy[worker]
                    if rows is not None:
                        idle.append(worker)
                        continue
                    left = message.tasks[done:]
                    attempt = message.attempt + 1
                    if len(left) == 1 and attempt >= ATTEMPTS:
                        report([_died(context, left[0], message.attempt, worker)])
                    else:  # whichever it was: each alone
                        todo.extendleft(_Message([task], attempt) for task in reversed(left))
                    worker.close()
        finally:
            for worker in (*busy, *idle):
                worker.close()
