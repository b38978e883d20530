"""The engine that runs the tasks of a job in the tasks of a Spark job."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ags_fast.engines.base import FILES_AT_ONCE, bins
from ags_fast.engines.together import opening_cost, with_files_at_once
from ags_fast.spark.classic import ClassicSession
from ags_fast.spark.connect import ConnectSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ags_fast.engines.base import AnyTask, JobContext
    from ags_fast.jobs.results import Row
    from ags_fast.spark.job import Session

TARGET_BYTES = 256 << 20


class SparkEngine:
    """Runs jobs as Spark jobs of a session: ``encrypt_files(..., engine=SparkEngine(spark))``.

    Executors get paths, wrapped data keys and the properties of the KMS client, which may appear in Spark's records.
    They never get a key. Every executor must reach the files and the KMS by these names.

    On a classic session a job is an RDD. On a session of Spark Connect a job is a DataFrame with ``mapInArrow``, and
    the caller too must reach the files and the KMS by these names.

    Args:
        session: A SparkSession, classic or of Spark Connect.
        target_bytes: Bytes of plaintext for a Spark task.
        threads: The number of threads of a Spark task; None: ``spark.task.cpus``.
        files_at_once: How many files a Spark task has in work at once, where they wait for an object store, a
            disk or a KMS. They have at most 64 MiB together; a larger file is in work alone.

    Raises:
        TypeError: `session` is not a SparkSession.
        ValueError: `target_bytes` or `files_at_once` is less than 1.
        ImportError: `session` is of Spark Connect, and pandas or pyarrow is not installed, or is too old.
    """

    tasks_outlive_driver = True  # so they look, before they publish a file, whether their job has ended

    def __init__(
        self,
        session: Any,
        *,
        target_bytes: int = TARGET_BYTES,
        threads: int | None = None,
        files_at_once: int = FILES_AT_ONCE,
    ) -> None:
        for name, value in (("target_bytes", target_bytes), ("files_at_once", files_at_once)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self._session = _session_of(session)
        self._target_bytes = target_bytes
        self._threads = threads
        self._files_at_once = files_at_once

    @staticmethod
    def recommended_conf() -> dict[str, str]:
        """Return settings for a session that runs these jobs: ``SparkSession.builder.config(map=...)``.

        Unix sockets between Python workers and the JVM (Spark >= 4.1; older versions ignore the setting) save 40 ms a
        task.

        The settings do not turn on Spark's own encryption. These jobs shuffle nothing, and on Spark Connect they
        broadcast their tasks. Spark sends and keeps only paths, wrapped keys and KMS properties.
        ``spark.io.encryption.enabled`` protects shuffles of your own jobs, but sends its key in clear unless
        ``spark.authenticate`` and ``spark.network.crypto.enabled`` are on too. Standalone clusters need a
        ``spark.authenticate.secret`` for these settings.
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
        context = with_files_at_once(replace(context, threads=self._threads), self._files_at_once)
        left = self._run_job(context, tasks, open_cost, report) if tasks else []
        if left:
            self._run_job(replace(context, isolate=True), left, open_cost, report)

    def _run_job(
        self, context: JobContext, tasks: Sequence[AnyTask], open_cost: int, report: Callable[[list[Row]], None]
    ) -> list[AnyTask]:
        """Return the tasks whose rows did not arrive. After it returns or raises, no worker is active."""
        parts = bins(
            tasks,
            target_bytes=self._target_bytes,
            open_cost=opening_cost(context, open_cost),
            least=2 * self._session.parallelism,
        )
        job = self._session.job(context, parts)
        job.run(report)
        if job.failure and (context.isolate or len(job.done) == len(parts) or not _killed(job.failure)):
            raise _explained(job.failure) from None
        return [task for number, part in enumerate(parts) if number not in job.done for task in part]


def _session_of(session: Any) -> Session:
    kinds = type(session).__mro__
    if not any(kind.__name__ == "SparkSession" for kind in kinds):  # a builder and a DataFrame have much of its face
        raise TypeError(f"a SparkSession is required, not {type(session).__name__!r}")
    is_connect = any(kind.__module__.startswith("pyspark.sql.connect") for kind in kinds)
    return ConnectSession(session) if is_connect else ClassicSession(session)


def _explained(error: BaseException) -> BaseException:
    """Return the error to raise for a job that Spark gave up: without a traceback of workers if its cause is known."""
    if missing := re.search(r"ModuleNotFoundError: No module named '([^']+)'", str(error)):
        return ImportError(
            f"the Python workers of Spark have no module {missing[1]!r}: every host of the cluster needs it "
            "(docs/clusters.md says how to ship ags_fast)",
            name=missing[1],
        )
    return error


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
