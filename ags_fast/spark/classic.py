"""Jobs on classic sessions: RDDs, whose tasks add their rows to an accumulator."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ags_fast.engines.start import is_current_directory_trusted
from ags_fast.spark.job import POLL_SECONDS, SETTLE_SECONDS, SparkJob
from ags_fast.spark.partition import Bin, run_bin

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Sequence

    from ags_fast.engines.base import AnyTask, JobContext


class ClassicSession:
    """A session whose SparkContext is in this process."""

    def __init__(self, session: Any) -> None:
        self._spark = session.sparkContext

    @property
    def parallelism(self) -> int:
        """The number of Spark tasks that can run at once."""
        return int(self._spark.defaultParallelism)

    def job(self, context: JobContext, parts: Sequence[Sequence[AnyTask]]) -> SparkJob:
        """Return a job that has one Spark task for each part."""
        return _ClassicJob(self._spark, context, parts)


class _ClassicJob(SparkJob):
    def __init__(self, spark: Any, context: JobContext, parts: Sequence[Sequence[AnyTask]]) -> None:
        super().__init__(context, parts)
        self._spark = spark
        self._rows = spark.accumulator([], _Rows())  # from tasks that succeeded, once each, while others run

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        from pyspark import InheritableThread

        return InheritableThread(target=target, name=self.name, daemon=True)

    def submit(self) -> None:
        count = sum(map(len, self.parts))
        self._spark.setJobGroup(self.name, f"{self.name}: {count} files", interruptOnCancel=True)
        bins = [Bin(number, part) for number, part in enumerate(self.parts)]
        partitions = self._spark.parallelize(bins, len(bins))
        if not is_current_directory_trusted():
            partitions.ctx = _SafePath(self._spark)
        partitions.foreachPartition(_Partition(self.context, self._rows))

    def arrived(self) -> Any:
        waiting = self._rows.value  # one list throughout, to which another thread adds
        came = waiting[:]
        del waiting[: len(came)]
        while came:
            yield came.pop(0)

    def cancel(self) -> None:
        self._spark.cancelJobGroup(self.name)

    def settle(self, stopped: bool) -> None:
        """Wait until Spark has no active task of the job.

        Spark reports the end of a job as soon as the result is decided. Workers go on, and leave files, until they are
        killed.
        """
        tracker = self._spark.statusTracker()
        until = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until:
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self.name)]
            stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
            if not any(stage.numActiveTasks for stage in stages if stage is not None):
                break
            time.sleep(POLL_SECONDS / 5)
        self._rows.value = []  # Spark keeps accumulators for as long as the session lives


class _Rows:
    """Adds lists in an accumulator: pyspark's AccumulatorParam without an import of pyspark."""

    def zero(self, value: list[Any]) -> list[Any]:
        return []

    def addInPlace(self, value1: list[Any], value2: list[Any]) -> list[Any]:  # noqa: N802
        value1.extend(value2)
        return value1


class _SafePath:
    """A SparkContext whose Python workers do not import from their current directory.

    Spark starts Python workers by ``python -m``. In a local session, their directory is the driver's, which may be a
    folder of data.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self.environment = {"PYTHONSAFEPATH": "1", **context.environment}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _Partition:
    """The function of a Spark task."""

    def __init__(self, context: JobContext, rows: Any) -> None:
        self._context = context
        self._rows = rows

    def __call__(self, parts: Iterable[Bin]) -> None:
        for part in parts:  # one
            self._rows.add([run_bin(self._context, part)])
