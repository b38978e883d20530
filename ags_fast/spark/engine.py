"""The engine that runs the tasks of a job in the tasks of a Spark job."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ags_fast.jobs.engines.bins import bins
from ags_fast.jobs.engines.local import run_isolated
from ags_fast.jobs.engines.start import is_current_directory_trusted
from ags_fast.keys.kms import add_calls, count_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ags_fast.jobs.results import Row
    from ags_fast.jobs.work.base import AnyTask, JobContext

TARGET_BYTES = 256 << 20
POLL_SECONDS = 0.05
SETTLE_SECONDS = 30.0  # Spark kills a worker 2 to 4 s after a cancellation, and notices lost executors within 10 s


class SparkEngine:
    """Runs jobs as Spark jobs of a classic session: ``encrypt_files(..., engine=SparkEngine(spark))``.

    Executors get paths, wrapped data keys and the properties of the KMS client, which may appear in Spark's records.
    They never get a key. Every executor must reach the files and the KMS by these names.

    Args:
        session: A classic SparkSession.
        target_bytes: Bytes of plaintext for a Spark task.
        threads: The number of threads of a Spark task; None: ``spark.task.cpus``.

    Raises:
        TypeError: `session` is not a SparkSession, or is a session of Spark Connect.
        ValueError: `target_bytes` is less than 1.
    """

    def __init__(self, session: Any, *, target_bytes: int = TARGET_BYTES, threads: int | None = None) -> None:
        if type(session).__module__.startswith("pyspark.sql.connect"):
            raise TypeError(
                "this is a session of Spark Connect, which has no RDDs: SparkEngine needs a classic session, "
                "SparkSession.builder.master(...) on the cluster's own network (a job submitted to it has one)"
            )
        if not hasattr(session, "sparkContext"):
            raise TypeError(f"a SparkSession is required, not {type(session).__name__!r}")
        if target_bytes < 1:
            raise ValueError(f"target_bytes must be at least 1, not {target_bytes}")
        self._spark = session.sparkContext
        self._target_bytes = target_bytes
        self._threads = threads

    @staticmethod
    def recommended_conf() -> dict[str, str]:
        """Return settings for a session that runs these jobs: ``SparkSession.builder.config(map=...)``.

        Unix sockets between Python workers and the JVM (Spark >= 4.1; older versions ignore the setting) save 40 ms a
        task.

        The settings do not turn on Spark's own encryption. These jobs shuffle and spill nothing. Spark sends and keeps
        only paths, wrapped keys and KMS properties. ``spark.io.encryption.enabled`` protects shuffles of your own jobs,
        but sends its key in clear unless ``spark.authenticate`` and ``spark.network.crypto.enabled`` are on too.
        Standalone clusters need a ``spark.authenticate.secret`` for these settings.
        """
        return {
            "spark.python.unix.domain.socket.enabled": "true",
            "spark.task.maxFailures": "4",
            "spark.python.worker.reuse": "true",
        }

    def run(
        self, context: JobContext, tasks: Sequence[AnyTask], open_cost: int, report: Callable[[list[Row]], None]
    ) -> None:
        """Run every task, and report its row. An exception of `report`, and Ctrl-C, cancel the Spark job.

        A Spark job fails when one of its Spark tasks has been killed too often. Files that the other Spark tasks have
        finished are known. A second Spark job does the rest, with a process of its own for each file.

        Args:
            context: What all tasks share.
            tasks: One task for each file or manifest.
            open_cost: The cost of opening a file, in bytes of work.
            report: Gets the rows of finished tasks.
        """
        context = replace(context, threads=self._threads)
        done = self._run_job(context, tasks, open_cost, report) if tasks else set()
        left = [task for task in tasks if task.path not in done]
        if left:
            self._run_job(replace(context, isolate=True), left, open_cost, report)

    def _run_job(
        self, context: JobContext, tasks: Sequence[AnyTask], open_cost: int, report: Callable[[list[Row]], None]
    ) -> set[str]:
        """Return the paths of the files whose rows arrived. After it returns or raises, no worker is active."""
        parts = bins(
            tasks,
            target_bytes=self._target_bytes,
            open_cost=open_cost,
            least=2 * self._spark.defaultParallelism,
        )
        job = _SparkJob(self._spark, context, parts)
        job.run(report)
        if job.failure and (context.isolate or len(job.done) == len(tasks) or not _killed(job.failure)):
            raise job.failure
        return job.done


class _SparkJob:
    """One Spark job, a Spark task for each bin.

    Attributes:
        done: The paths of the tasks whose rows have arrived.
        failure: Why Spark gave the job up, or None.
    """

    def __init__(self, spark: Any, context: JobContext, parts: list[list[AnyTask]]) -> None:
        self.done: set[str] = set()
        self.failure: BaseException | None = None
        self._spark = spark
        self._context = context
        self._parts = parts
        self._group = f"ags_fast {context.op} {context.job_id}{' isolated' if context.isolate else ''}"
        self._rows = spark.accumulator([], _Rows())  # from tasks that succeeded, once each, while others run
        self._seen = 0
        # Not Thread.join: after Ctrl-C interrupts it, join takes the thread for dead (Python < 3.13).
        self._over = threading.Event()

    def run(self, report: Callable[[list[Row]], None]) -> None:
        """Run the job, and report rows as they arrive. After it returns or raises, no worker is active."""
        from pyspark import InheritableThread

        thread = InheritableThread(target=self._submit, name=self._group, daemon=True)
        try:
            thread.start()
            while not self._over.wait(POLL_SECONDS):
                self._collect(report)
            self._collect(report)
        except BaseException:
            until = time.monotonic() + SETTLE_SECONDS
            while thread.ident is not None and not self._over.wait(POLL_SECONDS) and time.monotonic() < until:
                self._spark.cancelJobGroup(self._group)  # repeatedly: the Spark job may not have begun
            raise
        finally:
            self._settle()
            self._rows.value = []  # Spark keeps accumulators for as long as the session lives

    def _submit(self) -> None:
        try:
            count = sum(map(len, self._parts))
            self._spark.setJobGroup(self._group, f"{self._group}: {count} files", interruptOnCancel=True)
            partitions = self._spark.parallelize(self._parts, len(self._parts))
            if not is_current_directory_trusted():
                partitions.ctx = _SafePath(self._spark)
            partitions.foreachPartition(_Partition(self._context, self._rows))
        except BaseException as error:
            self.failure = error
        finally:
            self._over.set()

    def _collect(self, report: Callable[[list[Row]], None]) -> None:
        came = self._rows.value[self._seen :]
        self._seen += len(came)
        for rows_of_task, calls in came:
            add_calls(calls)
            self.done.update(path for path, _ in rows_of_task)
            report([row for _, row in rows_of_task])

    def _settle(self) -> None:
        """Wait for tasks of a finished Spark job that still run: cancelled tasks, or attempts that lost to others.

        Spark reports the end of a job as soon as the result is decided. Workers go on, and leave files, until they are
        killed.
        """
        tracker = self._spark.statusTracker()
        until = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until:
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._group)]
            stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
            if not any(stage.numActiveTasks for stage in stages if stage is not None):
                return
            time.sleep(POLL_SECONDS / 5)


DEATHS = (  # messages of the JVM: a worker died before, while or after it read its task; an executor died
    "Python worker exited unexpectedly",
    "Python worker died",
    "Connection reset",
    "Broken pipe",
    "ExecutorLostFailure",
)


def _killed(error: BaseException) -> bool:
    """Return whether a job failed because its workers died, not because of a defect or a cancellation."""
    text = str(error)
    return "cancelled" not in text and any(sign in text for sign in DEATHS)


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
    """The function of a Spark task: runs the tasks of its bins."""

    def __init__(self, context: JobContext, rows: Any) -> None:
        self._context = context
        self._rows = rows

    def __call__(self, parts: Iterable[list[AnyTask]]) -> None:
        from pyspark import TaskContext

        task_context = TaskContext.get()
        assert task_context is not None
        # Set here: the size of reads depends on it, and an isolated process has no TaskContext.
        context = replace(self._context, threads=self._context.threads or task_context.cpus())
        attempt = task_context.attemptNumber() + context.isolate  # the isolated job is itself a second attempt
        tasks = [task for part in parts for task in part]
        if attempt > 1 or context.isolate:  # died twice: a file may be the cause
            rows = run_isolated(context, tasks, attempt)
        else:
            rows = (context.work.run_file(context, task, attempt) for task in tasks)
        with count_calls() as calls:
            done = [(task.path, row) for task, row in zip(tasks, rows, strict=True)]
        self._rows.add([(done, calls)])
