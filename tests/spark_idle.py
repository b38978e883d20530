"""A job whose tasks do nothing: what is left is the work of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ags_fast.dataset.rows import Row
from ags_fast.engines.base import JobContext

if TYPE_CHECKING:
    from ags_fast.jobs.work.context import Task


@dataclass(frozen=True)
class IdleContext(JobContext):
    """Runs `run_file` of this module."""

    runner: ClassVar[str] = "spark_idle"


def run_file(context: IdleContext, task: Task, attempt: int = 0) -> Row:
    entry = task.entry
    names = f"/src/{entry.source}", f"/dataset/{entry.file}"
    return Row(*names, "ok", None, None, entry.plain_length, entry.file_length, seconds=0.001, attempt=attempt)
