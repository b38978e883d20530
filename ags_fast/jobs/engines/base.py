"""The interface of the engines that run tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ags_fast.jobs.results import Row
    from ags_fast.jobs.work.base import AnyTask, JobContext


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
