"""Jobs on sessions of Spark Connect: ``mapInArrow`` over a DataFrame that has one row, and one partition, for each bin.

A row has the pickled tasks of its bin. The result of a partition is one row, in JSON: the server's answers are not
unpickled.
"""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections import Counter, deque
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ags_fast._extras import lacks
from ags_fast.dataset.rows import Row
from ags_fast.spark.job import POLL_SECONDS, SparkJob, conf_seconds
from ags_fast.spark.partition import Bin, run_bin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from ags_fast.engines.base import AnyTask, JobContext

MONITOR_SECONDS = 2.0  # Spark looks this often whether a Python worker's task was cancelled


class ConnectSession:
    """A session whose SparkContext is in a server.

    Raises:
        ImportError: pandas or pyarrow is not installed, or is too old for ``mapInArrow``.
    """

    def __init__(self, session: Any) -> None:
        _check_packages()
        self._session = session
        self._parallelism = 0

    @property
    def parallelism(self) -> int:
        """The number of Spark tasks that can run at once. The first call asks the server, by a small Spark job."""
        if not self._parallelism:
            # Spark cuts a range into `defaultParallelism` partitions unless the session's settings say otherwise.
            wide = self._session.range(1 << 16).selectExpr("spark_partition_id() as part").distinct()
            self._parallelism = max(1, wide.count())
        return self._parallelism

    def job(self, context: JobContext, parts: Sequence[Sequence[AnyTask]]) -> SparkJob:
        """Return a job that has one Spark task for each part."""
        return _ConnectJob(self._session, context, parts)


class _ConnectJob(SparkJob):
    def __init__(self, session: Any, context: JobContext, parts: Sequence[Sequence[AnyTask]]) -> None:
        super().__init__(context, parts)
        self._session = session
        self._tags = session.getTags()  # of the calling thread
        self._results: deque[str] = deque()
        self._interrupter: threading.Thread | None = None
        # Asked for now: in the end the server may be gone, and pyspark tries for minutes to reach it.
        self._speculates = _conf(session, "spark.speculation", "false") == "true"
        self._settle_seconds = _settle_seconds(session)

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=target, name=self.name, daemon=True)

    def submit(self) -> None:
        for tag in (*self._tags, self.name):  # of this thread
            self._session.addTag(tag)
        results = _bins(self._session, self.parts).mapInArrow(_Partition(self.context), "result string")
        for row in results.toLocalIterator():  # evaluated once: a second action would run the tasks again
            self._results.append(row.result)

    def arrived(self) -> Any:
        while self._results:
            number, rows, calls, lacks = json.loads(self._results.popleft())
            counts = Counter({(provider, operation): count for provider, operation, count in calls})
            yield number, [Row(*row) for row in rows], counts, set(lacks)

    def cancel(self) -> None:
        if self._interrupter is None or not self._interrupter.is_alive():  # it may wait long for a server that is gone
            self._interrupter = threading.Thread(target=self._interrupt, name=f"{self.name} end", daemon=True)
            self._interrupter.start()

    def _interrupt(self) -> None:
        try:
            self._session.interruptTag(self.name)
        except Exception:
            pass  # the job's own thread has the error, too

    def settle(self, stopped: bool) -> None:
        """Wait until Spark must have killed the workers of a job that was stopped: Connect does not report that."""
        if stopped or self._speculates:
            time.sleep(self._settle_seconds)


def _conf(session: Any, name: str, default: str) -> str:
    try:
        return str(session.conf.get(name, default))
    except Exception:  # a server need not tell
        return default


def _settle_seconds(session: Any) -> float:
    """Return how long a Python worker may live after its task was cancelled."""
    try:
        kill = conf_seconds(_conf(session, "spark.python.task.killTimeout", "2s"))
    except ValueError:
        kill = 2.0
    return MONITOR_SECONDS + kill + POLL_SECONDS


def _bins(session: Any, parts: Sequence[Sequence[AnyTask]]) -> Any:
    """Return a DataFrame that has one row, and one partition, for each bin.

    The bins are broadcast, and joined to a range of the wanted partitions. A shuffle would be exact too. But after the
    loss of an executor, Spark runs a stage that reads a shuffle again with attempts numbered from 0, and only a later
    attempt expects files of an earlier attempt.
    """
    import pyarrow as pa

    payloads = [pickle.dumps(Bin(number, part), pickle.HIGHEST_PROTOCOL) for number, part in enumerate(parts)]
    bins = pa.table({"id": pa.array(range(len(parts)), pa.int64()), "tasks": pa.array(payloads, pa.binary())})
    return session.range(0, len(parts), 1, len(parts)).join(session.createDataFrame(bins).hint("broadcast"), "id")


class _Partition:
    """The function of a Spark task."""

    def __init__(self, context: JobContext) -> None:
        self._context = context

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for batch in batches:
            for payload in batch.column("tasks"):
                number, rows, calls, lacks = run_bin(self._context, pickle.loads(payload.as_py()))
                told = number, rows, [(*name, count) for name, count in calls.items()], sorted(lacks)
                yield pa.record_batch({"result": pa.array([json.dumps(told)], pa.string())})


def _check_packages() -> None:
    """Raise ImportError if the packages that ``mapInArrow`` needs in the caller's process are missing or too old."""
    for name, least in (("pyarrow", (18, 0)), ("pandas", (2, 2))):
        try:
            found = version(name)
        except PackageNotFoundError:
            raise lacks("Spark Connect", name, "spark") from None
        if tuple(map(int, found.split(".")[:2])) < least:
            raise lacks("Spark Connect", f"{name} {least[0]}.{least[1]} or newer", "spark", f"{found} is installed")
