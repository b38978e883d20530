"""Jobs on Spark: the same planner, the same worker function, in the tasks of ``mapPartitions``."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ags_fast.jobs.engines.bins import bins
from ags_fast.jobs.engines.local import run_isolated
from ags_fast.jobs.engines.start import is_current_directory_trusted
from ags_fast.jobs.work.dispatch import run_file
from ags_fast.keys.kms import add_calls, count_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ags_fast.jobs.results import Row
    from ags_fast.jobs.work.context import Context, Task

__all__ = ["SparkEngine"]

TARGET_BYTES = 256 << 20
POLL_SECONDS = 0.05
SETTLE_SECONDS = 30.0  # Spark kills a worker 2 to 4 s after its task is cancelled, and sees within 10 s what it lost


class SparkEngine:
    """Runs jobs as Spark jobs of a classic session: ``encrypt_files(..., engine=SparkEngine(spark))``.

    target_bytes: of plaintext for a task. threads: of a task; None: ``spark.task.cpus``.

    What travels to executors, and so may be seen in Spark's records, is paths, wrapped data keys and the properties of
    the KMS client: never a key. Every executor must reach the files and the KMS by these names.
    """

    def __init__(self, session: Any, *, target_bytes: int = TARGET_BYTES, threads: int | None = None) -> None:
        if type(session).__module__.startswith("pyspark.sql.connect"):
            raise TypeError(
                "this session is one of Spark Connect, which has no RDDs: SparkEngine needs a classic session, "
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
        """Settings for a session that runs these jobs: ``SparkSession.builder.config(map=...)``.

        Faster: Python workers talk to the JVM by Unix sockets (Spark >= 4.1; older ones ignore it): 40 ms less a task.
        Spark's own encryption is not among them. These jobs shuffle and spill nothing, and what Spark sends or keeps of
        them is paths, wrapped keys and KMS properties. ``spark.io.encryption.enabled`` protects shuffles of your own
        jobs, but sends its key in clear unless ``spark.authenticate`` and ``spark.network.crypto.enabled`` are on, too;
        standalone clusters want a ``spark.authenticate.secret`` for these.
        """
        return {
            "spark.python.unix.domain.socket.enabled": "true",
            "spark.task.maxFailures": "4",
            "spark.python.worker.reuse": "true",
        }

    def run(self, context: Context, tasks: Sequence[Task], open_cost: int, report: Callable[[list[Row]], None]) -> None:
        """Do every file, and report its row. What `report` raises, and Ctrl-C, cancel the Spark job.

        A Spark job fails when one of its tasks has been killed too often. What its other tasks have done is known, so
        the rest is done by a second job in which every file has a process of its own.
        """
        context = replace(context, threads=self._threads)
        done = self._run_job(context, tasks, open_cost, report) if tasks else set()
        left = [task for task in tasks if task.entry.path not in done]
        if left:
            self._run_job(replace(context, isolate=True), left, open_cost, report)

    def _run_job(
        self, context: Context, tasks: Sequence[Task], open_cost: int, report: Callable[[list[Row]], None]
    ) -> set[str]:
        """The paths of the files whose rows have come. When it returns, or raises, no worker is at it any more."""
        from pyspark import InheritableThread

        parts = bins(
            tasks,
            target_bytes=self._target_bytes,
            open_cost=open_cost,
            least=2 * self._spark.defaultParallelism,
        )
        done: set[str] = set()
        rows = self._spark.accumulator([], _Rows())  # of tasks that succeeded, each once, while others run
        group = f"ags_fast {context.op} {context.job_id}{' isolated' if context.isolate else ''}"
        failure: list[BaseException] = []
        over = (
            threading.Event()
        )  # for Thread.join, when Ctrl-C interrupts it, takes the thread for dead (Python < 3.13)

        def work() -> None:
            try:
                self._spark.setJobGroup(group, f"{group}: {len(tasks)} files", interruptOnCancel=True)
                partitions = self._spark.parallelize(parts, len(parts))
                if not is_current_directory_trusted():
                    partitions.ctx = _SafePath(self._spark)
                partitions.foreachPartition(_Partition(context, rows))
            except BaseException as error:
                failure.append(error)
            finally:
                over.set()

        seen = 0

        def collect() -> None:
            nonlocal seen
            came = rows.value[seen:]
            seen += len(came)
            for rows_of_task, calls in came:
                add_calls(calls)
                done.update(path for path, _ in rows_of_task)
                report([row for _, row in rows_of_task])

        thread = InheritableThread(target=work, name=group, daemon=True)
        try:
            thread.start()
            while not over.wait(POLL_SECONDS):
                collect()
            collect()
        except BaseException:
            until = time.monotonic() + SETTLE_SECONDS
            while thread.ident is not None and not over.wait(POLL_SECONDS) and time.monotonic() < until:
                self._spark.cancelJobGroup(group)  # again and again: it may not have begun
            raise
        finally:
            self._settle(group)
            rows.value = []  # Spark keeps accumulators for as long as the session lives
        if failure and (context.isolate or len(done) == len(tasks) or not _killed(failure[0])):
            raise failure[0]
        return done

    def _settle(self, group: str) -> None:
        """Wait for what still runs of a job that is over: tasks that were cancelled, or outrun by another attempt.

        Spark is done with a job when it has decided so. Its workers go on, and leave files, until they are killed.
        """
        tracker = self._spark.statusTracker()
        until = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until:
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
            stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
            if not any(stage.numActiveTasks for stage in stages if stage is not None):
                return
            time.sleep(POLL_SECONDS / 5)


DEATHS = (  # as the JVM sees them: of a worker, before, while and after it reads what it is to do; of an executor
    "Python worker exited unexpectedly",
    "Python worker died",
    "Connection reset",
    "Broken pipe",
    "ExecutorLostFailure",
)


def _killed(error: BaseException) -> bool:
    """Whether a job failed because its workers died, and not by a defect or because it was cancelled."""
    text = str(error)
    return "cancelled" not in text and any(sign in text for sign in DEATHS)


class _Rows:
    """How an accumulator adds lists; pyspark's AccumulatorParam without its import."""

    def zero(self, value: list[Any]) -> list[Any]:
        return []

    def addInPlace(self, value1: list[Any], value2: list[Any]) -> list[Any]:  # noqa: N802
        value1.extend(value2)
        return value1


class _SafePath:
    """A SparkContext whose Python workers do not import from their current directory.

    Spark starts them as ``python -m``. A local session's have the driver's directory, which may be a folder of data.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self.environment = {"PYTHONSAFEPATH": "1", **context.environment}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _Partition:
    """What a task does with its bins."""

    def __init__(self, context: Context, rows: Any) -> None:
        self._context = context
        self._rows = rows

    def __call__(self, parts: Iterable[list[Task]]) -> None:
        from pyspark import TaskContext

        task_context = TaskContext.get()
        assert task_context is not None
        # Said and not left to be found out: what is read at a time depends on it, and a process of its own has no task.
        context = replace(self._context, threads=self._context.threads or task_context.cpus())
        attempt = task_context.attemptNumber() + context.isolate  # which is a second try in itself
        tasks = [task for part in parts for task in part]
        if attempt > 1 or context.isolate:  # twice gone: by now it may be a file that does it
            rows = run_isolated(context, tasks, attempt)
        else:
            rows = (run_file(context, task, attempt) for task in tasks)
        with count_calls() as calls:
            done = [(task.entry.path, row) for task, row in zip(tasks, rows, strict=True)]
        self._rows.add([(done, calls)])
