"""What a job expects of the engine that runs its tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ags_fast.jobs.results import Row
    from ags_fast.jobs.work.context import Context, Task


class Engine(Protocol):
    """Runs the tasks of a job: LocalEngine, or ags_fast.spark.SparkEngine."""

    def run(
        self, context: Context, tasks: Sequence[Task], open_cost: int, report: Callable[[list[Row]], None]
    ) -> None: ...
