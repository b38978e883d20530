"""The Spark of this process, and the server of Spark Connect, that tests share: the fixtures are in conftest.py.

A JVM takes seconds to start, and seconds more until its code is warm. So all tests that need no session of their own
use one session, run by one worker of pytest-xdist.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from spark_jobs import connect_server, spark_env

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

MASTER = "local[2,4]"  # four attempts a task: plain local[2] has one

# For fixtures of which one gives a session of this process and one a session of the server.
SESSIONS = [
    pytest.param("classic", marks=pytest.mark.xdist_group("spark")),
    pytest.param("connect", marks=pytest.mark.xdist_group("connect")),
]

# All is written down as it is, for tests that look for keys in it.
WRITES_DOWN = {
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.broadcast.compress": "false",
    "spark.shuffle.compress": "false",
    "spark.shuffle.spill.compress": "false",
}


class LocalSpark:
    """The Spark of this process.

    Its JVM lives as long as the process, and keeps the local folder of the first session for all that follow. Hence
    the folders are one for all sessions: what a test looks for would be elsewhere if each file of tests had its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events = folder / "events"
        self.local = folder / "local"
        self.events.mkdir()
        self._running: tuple[SparkSession, str] | None = None

    def session(self, master: str = MASTER, settings: Mapping[str, str] | None = None) -> SparkSession:
        """The session of a master: the one that runs, if it has this master. `settings` are those of the master."""
        from pyspark.sql import SparkSession

        if self._running is not None and self._running[1] != master:
            self.stop()
        if self._running is None:
            conf: dict[str, Any] = {
                "spark.ui.enabled": "false",
                "spark.ui.showConsoleProgress": "false",
                "spark.driver.host": "127.0.0.1",
                "spark.python.unix.domain.socket.enabled": "true",
                "spark.executorEnv.PYTHONPATH": spark_env()["PYTHONPATH"],
                "spark.local.dir": str(self.local),
                "spark.eventLog.dir": self.events.as_uri(),
                **WRITES_DOWN,
                **(settings or {}),
            }
            with pytest.MonkeyPatch.context() as patch:  # what the JVM starts has its environment
                for name, value in spark_env().items():
                    patch.setenv(name, value)
                patch.delenv("SPARK_HOME", raising=False)
                made = SparkSession.builder.master(master).appName("tests").config(map=conf).getOrCreate()
            made.sparkContext.setLogLevel("ERROR")
            self._running = made, master
        return self._running[0]

    def fresh(self, settings: Mapping[str, str] | None = None) -> SparkSession:
        """A session with settings of its own, in which the data sources are registered."""
        from ags_fast.spark.datasource import register

        made = self.session().newSession()
        for name, value in {"spark.sql.shuffle.partitions": "2", **(settings or {})}.items():
            made.conf.set(name, value)
        activate(made)
        register(made)
        return made

    def wait_for_events(self) -> None:
        """Wait until all that has happened is in the event log."""
        self.session().sparkContext._jsc.sc().listenerBus().waitUntilEmpty()

    def stop(self) -> None:
        if self._running is not None:
            self._running[0].stop()
            self._running = None


def activate(session: SparkSession) -> None:
    """Make the session that of this thread: only there are the sources registered."""
    session.createDataFrame([(1,)], "a int")


class ConnectServer(NamedTuple):
    url: str
    events: Path
    folder: Path  # of what else it writes


@contextmanager
def shared_connect_server(folder: Path) -> Iterator[ConnectServer]:
    events = folder / "events"
    events.mkdir()
    conf = {**WRITES_DOWN, "spark.eventLog.dir": events.as_uri()}
    with connect_server(folder / "server", MASTER, conf) as url:
        yield ConnectServer(url, events, folder / "server")
