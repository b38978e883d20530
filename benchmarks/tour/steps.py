"""Prints the steps of a tour, how long each took, and the outcome of its comparisons."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from ags_fast.jobs import JobResult

WIDTH = 78


class JobError(Exception):
    """A Spark job failed; the message is what its task raised."""


def count(number: int, noun: str) -> str:
    """`number` things, in the plural where that is right."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_failure(result: JobResult) -> str:
    """The first failed row of a job, or nothing."""
    return "".join(f"{row.src}: {row.error_class}: {row.error}" for row in result.failed[:1])


class Steps:
    """Prints what happens: a title when a step begins, what it took when it ends, and tasks done in between."""

    def __init__(self) -> None:
        self._number = 0
        self.spark: SparkSession | None = None
        self.failed = False

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        self._number += 1
        line = f"{self._number}. {title} "
        print(line, end="", flush=True)
        done = threading.Event()
        dots: list[str] = []
        if sys.stdout.isatty() and self.spark:
            watcher = threading.Thread(target=self._watch, args=(line, done), daemon=True)
        else:
            watcher = threading.Thread(target=_dot, args=(dots, done), daemon=True)
        watcher.start()
        start = time.perf_counter()
        try:
            yield
        except BaseException as error:
            print()
            if type(error).__name__ == "Py4JJavaError":
                raise JobError(_why(error)) from error
            raise
        finally:
            seconds = time.perf_counter() - start
            done.set()
            watcher.join()
        print(f"{'.' * (WIDTH - len(line) - len(dots) - 8)}{seconds:6.1f} s", flush=True)

    def _watch(self, line: str, done: threading.Event) -> None:
        assert self.spark is not None
        tracker = self.spark.sparkContext.statusTracker()
        shown = ""
        while not done.wait(0.2):
            stages = [info for info in map(tracker.getStageInfo, tracker.getActiveStageIds()) if info]
            shown = "".join(f"{info.numCompletedTasks} of {info.numTasks} tasks" for info in stages[:1])
            print(f"\r{line}{shown:<20}\r{line}", end="", flush=True)

    def say(self, text: str) -> None:
        print(f"   {text}")

    def check(self, text: str, problem: str) -> None:
        """A comparison, and what is wrong with it, if anything is. The tour goes on, and fails in the end."""
        self.failed |= bool(problem)
        self.say(f"WRONG: {problem}" if problem else f"ok: {text}")


def _dot(dots: list[str], done: threading.Event) -> None:
    """Show in a log that a step lives."""
    while not done.wait(10):
        dots.append(".")
        print(".", end="", flush=True)


def _why(error: BaseException) -> str:
    """What a task raised, without the hundred lines around it."""
    raised = re.findall(r"^\w[\w.]*(?:Error|Exception|Interrupt)\b.*", str(error), re.MULTILINE)
    return next((line for line in raised if not line.startswith(("org.", "java."))), str(error)[:2000])
