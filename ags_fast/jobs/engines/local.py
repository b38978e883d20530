"""The engine of one machine: worker processes, and how to handle a file that kills them.

Workers are started as new processes. They are not forked, because the caller may have threads, and not started by
multiprocessing, which would run the caller's script again.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast._threads import thread_count
from ags_fast.fs import Store
from ags_fast.fs.lacking import note
from ags_fast.jobs.engines.base import FILES_AT_ONCE, bins
from ags_fast.jobs.engines.start import import_path, start_python
from ags_fast.jobs.engines.together import opening_cost, run_files, with_files_at_once
from ags_fast.keys.kms import KmsClient, add_calls, as_kms, check_travels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ags_fast.dataset.access import Folder
    from ags_fast.jobs.engines.base import AnyTask, Engine, JobContext
    from ags_fast.jobs.results import Row


STARTS = 3  # failed starts of workers in a row that end the job
ATTEMPTS = 3  # for each file; an attempt that the worker does not survive costs that worker
TARGET_BYTES = 64 << 20  # work in one message to a worker: a small part of a second
EARLY = ("ags_fast.jobs.work.dispatch", "ags_fast.jobs.work.stream")  # imported before there is a context
MESSAGE_TASKS = 256  # small, so that progress shows, and a dead worker's message costs little to repeat


class Worker:
    """A process that runs tasks of one context. `close` kills it.

    Attributes:
        rows: The connection that the process answers on: first None, then rows.
    """

    def __init__(self, path: list[str], *, early: bool = False) -> None:
        call = f"main({', '.join(map(repr, EARLY)) if early else ''})"
        self._process = start_python(f"from ags_fast.jobs.engines.worker import main; {call}", path)
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._process.stdin as stdin, self._process.stdout as stdout:
            self._tasks = Connection(os.dup(stdin.fileno()), readable=False)
            self.rows = Connection(os.dup(stdout.fileno()), writable=False)

    def begin(self, context: JobContext) -> Worker:
        """Send the context of the tasks, once. Returns this worker."""
        self._send(context)
        return self

    def _send(self, message: Any) -> None:
        with suppress(BrokenPipeError):  # the process has died: `wait_ready` or `receive` reports that
            self._tasks.send(message)

    def start(self, tasks: Sequence[AnyTask], attempt: int) -> None:
        """Send tasks to the process."""
        self._send((list(tasks), attempt))

    def wait_ready(self) -> bool:
        """Wait until the process has the context. Returns False if the process died first: no file is the cause."""
        try:
            self.rows.recv()
        except (EOFError, OSError):
            return False
        return True

    def receive(self) -> list[Row] | None:
        """Return the next rows; an empty list when all sent tasks are done; None if the process has died."""
        try:
            rows, calls, lacks = self.rows.recv()
        except (EOFError, OSError):
            return None
        add_calls(calls)
        note(lacks)
        return rows  # type: ignore[no-any-return]

    def how_it_died(self) -> str:
        """Wait for the end of the process, and return its cause as a text."""
        code = self._process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"gone with status {code}"

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._tasks.close()
        self.rows.close()


def _started(context: JobContext, path: list[str]) -> Worker:
    """Start a worker and wait for it. Raises ChildProcessError after STARTS failures."""
    for _ in range(STARTS):
        worker = Worker(path).begin(context)
        if worker.wait_ready():
            return worker
        worker.close()
    raise _not_started(worker)


def run_isolated(context: JobContext, tasks: Iterable[AnyTask], attempt: int) -> Iterator[Row]:
    """Run each task like `run_file`, but in another process. A file that crashes twice gets a failed row."""
    # Spark decides what may be imported here, also by relative names: archives in its own folder.
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


def _died(context: JobContext, task: AnyTask, attempt: int, worker: Worker) -> Row:
    how = f"its worker process was {worker.how_it_died()}"
    return context.work.failed_row(context, task, attempt, "WorkerDiedError", how)


def _not_started(worker: Worker) -> ChildProcessError:
    return ChildProcessError(
        f"{STARTS} worker processes in a row were {worker.how_it_died()} before they had looked at a file: what they "
        "wrote to standard error says why. Is the KMS client's module where they can import it?"
    )


def client_for(engine: Engine, kms: KmsClient | Mapping[str, str], *folders: Folder) -> KmsClient:
    """Return the KMS client of a job on these folders. TypeError if workers need its properties and it has none."""
    client = as_kms(kms)
    stores = [folder if isinstance(folder, Store) else Store(folder) for folder in folders]
    if not (isinstance(engine, LocalEngine) and engine.runs_here(*stores)):
        check_travels(client)
    return client


class _Message(NamedTuple):
    tasks: list[AnyTask]
    attempt: int


class LocalEngine:
    """Runs jobs in processes of this machine.

    A program that embeds Python sets the interpreter of these processes by `multiprocessing.set_executable`.

    Args:
        processes: The number of processes; None: the usable CPUs. 0 does everything in the calling process: a file that
            crashes takes that process along.
        files_at_once: How many files a process has in work at once, where they are in an object store. They have at
            most 64 MiB together; a larger file is in work alone.

    Raises:
        ValueError: `processes` is negative, or `files_at_once` is less than 1.
    """

    _spare: Worker | None = None  # started early

    def __init__(self, processes: int | None = None, *, files_at_once: int = FILES_AT_ONCE) -> None:
        if processes is not None and processes < 0:
            raise ValueError(f"processes must not be negative, not {processes}")
        if files_at_once < 1:
            raise ValueError(f"files_at_once must be at least 1, not {files_at_once}")
        self._processes = processes
        self._files_at_once = files_at_once

    def start_early(self) -> None:
        """Start a process, if one is needed, that imports what it needs while the caller plans its job."""
        if self._processes != 0:
            with suppress(OSError):  # `run` reports why no worker starts
                self._spare = Worker(import_path(), early=True)

    def __del__(self) -> None:
        if (spare := self._take_spare()) is not None:
            spare.close()

    def _take_spare(self) -> Worker | None:
        worker, self._spare = self._spare, None
        return worker

    def runs_here(self, *stores: Store | None) -> bool:
        """Return whether jobs on these stores run in this process. They must if only this process sees a store."""
        return self._processes == 0 or any(store is not None and not store.shared for store in stores)

    def run(
        self, context: JobContext, tasks: Sequence[AnyTask], open_cost: int, report: Callable[[list[Row]], None]
    ) -> None:
        """Run every task: see `Engine`. An exception of `report`, and Ctrl-C, end the workers.

        Raises:
            ChildProcessError: No worker starts.
        """
        context = with_files_at_once(context, self._files_at_once)
        if self.runs_here(*context.stores):
            for row in run_files(context, tasks):
                report([row])
            return
        cpus = thread_count(None)
        processes = self._processes or cpus
        cost = opening_cost(context, open_cost)
        parts = bins(tasks, target_bytes=TARGET_BYTES, open_cost=cost, least=2 * processes)
        todo = deque(
            _Message(part[i : i + MESSAGE_TASKS], 0) for part in parts for i in range(0, len(part), MESSAGE_TASKS)
        )
        count = min(processes, len(todo))
        if context.threads is None and count:
            context = replace(context, threads=max(1, cpus // count))
        _Run(context, todo, count, report).work(self._take_spare())


class _Run:
    """One run of tasks in worker processes."""

    def __init__(
        self, context: JobContext, todo: deque[_Message], count: int, report: Callable[[list[Row]], None]
    ) -> None:
        self._context = context
        self._todo = todo
        self._count = count  # most workers at once
        self._report = report
        self._busy: dict[Worker, tuple[_Message, int]] = {}  # {worker: (its message, rows received)}
        self._starting: list[Worker] = []
        self._idle: list[Worker] = []
        self._failed_starts = 0
        self._path = import_path()

    def work(self, spare: Worker | None) -> None:
        """Do all tasks. In the end no worker lives. spare: a worker that was started early."""
        if spare is not None:
            self._starting.append(spare.begin(self._context))
        try:
            while self._todo or self._busy:
                self._hand_out()
                by_rows: dict[Any, Worker] = {worker.rows: worker for worker in (*self._busy, *self._starting)}
                for ready in wait(list(by_rows)):
                    worker = by_rows[ready]
                    if worker in self._busy:
                        self._receive(worker)
                    else:
                        self._greet(worker)
        finally:
            for worker in (*self._busy, *self._starting, *self._idle):
                worker.close()

    def _hand_out(self) -> None:
        while self._todo and self._idle:
            worker, message = self._idle.pop(), self._todo.popleft()
            self._busy[worker] = message, 0
            worker.start(*message)
        for _ in range(min(len(self._todo), self._count - len(self._busy)) - len(self._starting)):
            self._starting.append(Worker(self._path).begin(self._context))

    def _greet(self, worker: Worker) -> None:
        """Hear whether a new worker has started. Until then it has no tasks, which others may take meanwhile."""
        self._starting.remove(worker)
        if worker.wait_ready():
            self._failed_starts = 0
            self._idle.append(worker)
            return
        self._failed_starts += 1
        if self._failed_starts == STARTS:
            raise _not_started(worker)
        worker.close()

    def _receive(self, worker: Worker) -> None:
        """Take the rows of a worker. If the worker has died, its tasks are handed out again."""
        message, done = self._busy[worker]
        rows = worker.receive()
        if rows:
            self._busy[worker] = message, done + len(rows)
            self._report(rows)
            return
        del self._busy[worker]
        if rows is not None:
            self._idle.append(worker)
            return
        left = message.tasks[done:]
        attempt = message.attempt + 1
        if len(left) == 1 and attempt >= ATTEMPTS:
            self._report([_died(self._context, left[0], message.attempt, worker)])
        else:  # any of them may be the cause: send each alone
            self._todo.extendleft(_Message([task], attempt) for task in reversed(left))
        worker.close()
