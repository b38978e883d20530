"""What engines know of a job: some fields of its context, and the module that does its tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

if TYPE_CHECKING:
    from ags_fast.dataset.rows import Row
    from ags_fast.fs import Store


FILES_AT_ONCE = 16


class AnyTask(Protocol):
    """A task of a job: a file, or a manifest."""

    @property
    def path(self) -> str:
        """What tells the task from the other tasks of its job."""

    @property
    def nbytes(self) -> int:
        """Bytes of work."""


@dataclass(frozen=True)
class JobContext:
    """What all tasks of a job share. Every worker gets the context, so it pickles and holds no key.

    Attributes:
        runner: The name of the module that does the tasks: see `Runner`.
        op: The operation.
        job_id: The id of the job.
        threads: The number of threads for one file; None: the engine or the codec decides.
        isolate: Whether to run each file in a process of its own, because one of them kills its worker.
        files_at_once: How many files a worker has in work at once; None: the engine decides.
    """

    runner: ClassVar[str]

    op: str
    job_id: str
    threads: int | None = field(default=None, kw_only=True)
    isolate: bool = field(default=False, kw_only=True)
    files_at_once: int | None = field(default=None, kw_only=True)

    @property
    def work(self) -> Runner:
        """The module that does the tasks. A worker imports it when it has its first task."""
        return cast("Runner", import_module(self.runner))

    @property
    def stores(self) -> tuple[Store | None, ...]:
        """The folders that the tasks read and write; an engine looks whether other processes see them."""
        return ()


class Runner(Protocol):
    """The functions in the module that does the tasks of a kind of job."""

    def run_file(self, context: Any, task: Any, attempt: int = 0) -> Row:
        """Run one task. Its error goes into the row; only a fault of the worker is raised. Attempt 0 is the first."""

    def failed_row(self, context: Any, task: Any, attempt: int, error_class: str, error: str) -> Row:
        """Return the row of a task that failed."""
