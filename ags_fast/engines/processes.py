"""Worker processes of one machine, and how to handle a file that kills them.

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

from ags_fast.engines.start import import_path, start_python
from ags_fast.fs.lacking import note
from ags_fast.keys.kms import add_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ags_fast.dataset.rows import Row
    from ags_fast.engines.base import AnyTask, JobContext

    _Report = Callable[[list[Row]], None]


STARTS = 3  # failed starts of workers in a row that end the job
ATTEMPTS = 3  # for each file; an attempt that the worker does not survive costs that worker
MESSAGE_TASKS = 256  # small, so that progress shows, and a dead worker's message costs little to repeat


class Worker:
    """A process that runs tasks of one context. `close` kills it.

    Attributes:
        rows: The connection that the process answers on: first None, then rows.
    """

    def __init__(self, path: list[str], context: JobContext) -> None:
        self._process = start_python("from ags_fast.engines.worker import main; main()", path)
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._process.stdin as stdin, self._process.stdout as stdout:
            self._tasks = Connection(os.dup(stdin.fileno()), readable=False)
            self.rows = Connection(os.dup(stdout.fileno()), writable=False)
        self._moved = context.moved
        self._send(context)

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
        """Return the next rows; an empty list when all sent tasks are done; None if only parts of files are.

        EOFError: the process has died.
        """
        try:
            rows, calls, lacks, nbytes = self.rows.recv()
        except OSError as error:
            raise EOFError from error
        add_calls(calls)
        note(lacks)
        if self._moved is not None:
            self._moved(nbytes)
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


class _Message(NamedTuple):
    tasks: Sequence[AnyTask]
    attempt: int
    last: int  # the attempt after which a file that has killed its workers is given up


def run_in_processes(
    context: JobContext, parts: Iterable[Sequence[AnyTask]], most: int, cpus: int, report: _Report
) -> None:
    """Run the tasks of all parts in at most so many processes, which share the CPUs. See `Engine.run`.

    Raises:
        ChildProcessError: No worker starts.
    """
    pieces = (part[i : i + MESSAGE_TASKS] for part in parts for i in range(0, len(part), MESSAGE_TASKS))
    todo = deque(_Message(piece, 0, ATTEMPTS - 1) for piece in pieces)
    count = min(most, len(todo))
    if context.threads is None and count:
        context = replace(context, threads=max(1, cpus // count))
    _Run(import_path(), context, todo, count, report).work()


def run_isolated(context: JobContext, tasks: Iterable[AnyTask], attempt: int) -> list[Row]:
    """Run each task like `run_file`, but in another process. A file that crashes twice gets a failed row."""
    rows: list[Row] = []
    todo = deque(_Message([task], attempt, attempt + 1) for task in tasks)
    # Spark decides what may be imported here, also by relative names: archives in its own folder.
    _Run([*map(os.path.abspath, sys.path)], context, todo, 1, rows.extend).work()
    return rows


class _Run:
    """One run of tasks in worker processes."""

    def __init__(
        self, path: list[str], context: JobContext, todo: deque[_Message], count: int, report: _Report
    ) -> None:
        self._path, self._context, self._todo = path, context, todo
        self._count = count  # most workers at once
        self._report = report
        self._busy: dict[Worker, tuple[_Message, int]] = {}  # {worker: (its message, rows received)}
        self._starting: list[Worker] = []
        self._idle: list[Worker] = []
        self._failed_starts = 0

    def work(self) -> None:
        """Do all tasks. In the end no worker lives."""
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
            worker.start(message.tasks, message.attempt)
        for _ in range(min(len(self._todo), self._count - len(self._busy)) - len(self._starting)):
            self._starting.append(Worker(self._path, self._context))

    def _greet(self, worker: Worker) -> None:
        """Hear whether a new worker has started. Until then it has no tasks, which others may take meanwhile."""
        self._starting.remove(worker)
        if worker.wait_ready():
            self._failed_starts = 0
            self._idle.append(worker)
            return
        self._failed_starts += 1
        if self._failed_starts == STARTS:
            raise ChildProcessError(
                f"{STARTS} worker processes in a row were {worker.how_it_died()} before they had looked at a file: "
                "what they wrote to standard error says why. Is the KMS client's module where they can import it?"
            )
        worker.close()

    def _receive(self, worker: Worker) -> None:
        """Take what a worker has sent."""
        message, done = self._busy[worker]
        try:
            rows = worker.receive()
        except EOFError:
            self._end(worker, message, done)
            return
        if rows:
            self._busy[worker] = message, done + len(rows)
            self._report(rows)
        elif rows is not None:
            del self._busy[worker]
            self._idle.append(worker)

    def _end(self, worker: Worker, message: _Message, done: int) -> None:
        """Hand out again what a worker that has died has not done."""
        del self._busy[worker]
        left, attempt, last = message.tasks[done:], message.attempt, message.last
        if len(left) == 1 and attempt >= last:
            how = f"its worker process was {worker.how_it_died()}"
            self._report([self._context.work.failed_row(self._context, left[0], attempt, "WorkerDiedError", how)])
        else:  # any of them may be the cause: send each alone
            self._todo.extendleft(_Message([task], attempt + 1, last) for task in reversed(left))
        worker.close()
