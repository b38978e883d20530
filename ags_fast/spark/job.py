"""One Spark job: reports rows as they arrive, and is cancelled by Ctrl-C. What differs by session is in subclasses."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from ags_fast.fs.lacking import note
from ags_fast.keys.kms import add_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ags_fast.engines.base import AnyTask, JobContext
    from ags_fast.jobs.results import Row
    from ags_fast.spark.partition import _BinResult

POLL_SECONDS = 0.05
SETTLE_SECONDS = 30.0  # Spark kills a worker 2 to 4 s after a cancellation, and notices lost executors within 10 s


class Session(Protocol):
    """What the engine needs of a session: a classic session, or a session of Spark Connect."""

    @property
    def parallelism(self) -> int:
        """The number of Spark tasks that can run at once."""

    def job(self, context: JobContext, parts: Sequence[Sequence[AnyTask]]) -> SparkJob:
        """Return a job that has one Spark task for each part. The job has not begun."""


class SparkJob:
    """One Spark job, a Spark task for each bin.

    Args:
        context: What all tasks share.
        parts: The bins.

    Attributes:
        name: The name of the job in Spark.
        done: The numbers of the bins whose rows have arrived.
        failure: Why Spark gave the job up, or None.
    """

    def __init__(self, context: JobContext, parts: Sequence[Sequence[AnyTask]]) -> None:
        self.context = context
        self.parts = parts
        self.name = f"ags_fast {context.op} {context.job_id}{' isolated' if context.isolate else ''}"
        self.done: set[int] = set()
        self.failure: BaseException | None = None
        # Not Thread.join: after Ctrl-C interrupts it, join takes the thread for dead (Python < 3.13).
        self._over = threading.Event()

    def run(self, report: Callable[[list[Row]], None]) -> None:
        """Run the job, and report rows as they arrive. After it returns or raises, no worker is active."""
        thread = self.thread(self._run)
        stopped = True
        try:
            thread.start()
            while not self._over.wait(POLL_SECONDS):
                self._collect(report)
            self._collect(report)
            stopped = self.failure is not None
        except BaseException:
            until = time.monotonic() + SETTLE_SECONDS
            while thread.ident is not None and not self._over.wait(POLL_SECONDS) and time.monotonic() < until:
                self.cancel()  # repeatedly: the Spark job may not have begun
            raise
        finally:
            self.settle(stopped)

    def _run(self) -> None:
        try:
            self.submit()
        except BaseException as error:
            self.failure = error
        finally:
            self._over.set()

    def _collect(self, report: Callable[[list[Row]], None]) -> None:
        for number, rows, calls, lacks in self.arrived():
            add_calls(calls)
            note(lacks)
            self.done.add(number)
            report(rows)

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Return a thread that runs the Spark job. It is not started."""
        raise NotImplementedError

    def submit(self) -> None:
        """Run the Spark job, in the thread of `thread`. Returns or raises when Spark says that the job is over."""
        raise NotImplementedError

    def arrived(self) -> Iterable[_BinResult]:
        """Give what `run_bin` returned in the Spark tasks whose results arrived since the last call, and forget it."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Ask Spark to cancel the job. Returns at once. A job that has not begun may begin later."""
        raise NotImplementedError

    def settle(self, stopped: bool) -> None:
        """Wait for tasks of a job that is over but still run: cancelled tasks (`stopped`), or attempts that lost."""
        raise NotImplementedError


def conf_seconds(text: Any) -> float:
    """Return a duration of Spark's configuration, such as "2s" or "1500ms", in seconds. ValueError for other texts."""
    text = str(text).strip().lower()
    for unit, seconds in (("ms", 0.001), ("min", 60.0), ("s", 1.0), ("m", 60.0), ("h", 3600.0)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * seconds
    return float(text) / 1000
