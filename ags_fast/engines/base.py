"""What engines know of a job, and jobs of engines; and how tasks are spread over workers."""

from __future__ import annotations

import heapq
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ags_fast.dataset.rows import Row
    from ags_fast.fs import Store


FILES_AT_ONCE = 16


class _Here(threading.local):
    left = 0  # bytes of the file in work that are not counted yet


_here = _Here()


class AnyTask(Protocol):
    """A task of a job: a file, or a manifest."""

    @property
    def path(self) -> str:
        """What tells the task from the other tasks of its job."""

    @property
    def nbytes(self) -> int:
        """Bytes of work."""


@dataclass(frozen=True, repr=False, eq=False)
class JobContext:
    """What all tasks of a job share. Every worker gets the context, so it pickles and holds no key.

    Attributes:
        runner: The name of the module that does the tasks: see `Runner`.
        op: The operation.
        job_id: The id of the job.
        threads: The number of threads for one file; None: the engine or the codec decides.
        isolate: Whether to run each file in a process of its own, because one of them kills its worker.
        files_at_once: How many files a worker has in work at once; None: the engine decides.
        large_at_once: How many of them may have more than 64 MiB; 1: such a file is in work alone.
        moved: Gets bytes of files in work as they are done, in any thread: see `counted`. None: nobody counts them. It
            is not pickled.
        stopped: Not empty when the tasks are to end before they are done, as after Ctrl-C: see `check_goes_on`.
    """

    runner: ClassVar[str]

    op: str
    job_id: str
    threads: int | None = field(default=None, kw_only=True)
    isolate: bool = field(default=False, kw_only=True)
    files_at_once: int | None = field(default=None, kw_only=True)
    large_at_once: int = field(default=1, kw_only=True)
    moved: Callable[[int], None] | None = field(default=None, kw_only=True)
    stopped: list[bool] = field(default_factory=list, init=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "moved": None}

    @property
    def work(self) -> Runner:
        """The module that does the tasks. A worker imports it when it has its first task."""
        return cast("Runner", import_module(self.runner))

    @property
    def stores(self) -> tuple[Store | None, ...]:
        """The folders that the tasks read and write; an engine looks whether other processes see them."""
        return ()

    @property
    def local(self) -> bool:
        """Whether all folders are on this machine."""
        return all(store is None or store.local for store in self.stores)

    @property
    def waits(self) -> bool:
        """Whether a task waits longer than it works, as for an object store."""
        return not self.local

    def is_harmless(self, tasks: Sequence[Any]) -> bool:
        """Return whether no task can end the process that runs it, whatever the bytes of its file are."""
        return False

    def check_goes_on(self, nbytes: int = 0) -> None:
        """Raise InterruptedError if the task is to end: to be called between two parts of a file, of `nbytes` each."""
        if self.stopped:
            raise InterruptedError("the job has ended before this file was done")
        if self.moved is not None and (part := min(nbytes, _here.left)):
            _here.left -= part
            self.moved(part)

    @contextmanager
    def counted(self, nbytes: int) -> Iterator[None]:
        """Count the bytes of a file: its parts as they are done, the rest at the end. A thread works on one file."""
        _here.left = nbytes
        try:
            yield
        finally:
            if self.moved is not None:
                self.moved(_here.left)
            _here.left = 0


class Runner(Protocol):
    """The functions in the module that does the tasks of a kind of job."""

    def run_file(self, context: Any, task: Any, attempt: int = 0) -> Row:
        """Run one task. Its error goes into the row; only a fault of the worker is raised. Attempt 0 is the first."""

    def failed_row(self, context: Any, task: Any, attempt: int, error_class: str, error: str) -> Row:
        """Return the row of a task that failed."""


class Engine(Protocol):
    """What runs the tasks of a job: LocalEngine or ags_fast.spark.SparkEngine."""

    def run(
        self, context: JobContext, tasks: Sequence[AnyTask], open_cost: int, report: Callable[[list[Row]], None]
    ) -> None:
        """Run all tasks, in any order.

        Args:
            context: What all tasks share.
            tasks: One task for each file or manifest.
            open_cost: The cost of opening a file, in bytes of work.
            report: Gets the rows of finished tasks. An exception that it raises ends the run.
        """


def checked(engine: Engine | None) -> Engine | None:
    """Return an engine. Raises TypeError for anything else, before any work."""
    if engine is not None and not callable(getattr(engine, "run", None)):
        raise TypeError(
            "engine is ags_fast.jobs.LocalEngine(), ags_fast.spark.SparkEngine(spark) or None, not "
            f"{type(engine).__name__!r}"
        )
    return engine


Task = TypeVar("Task", bound=AnyTask)


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
