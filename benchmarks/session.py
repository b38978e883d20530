"""The Spark session of benchmarks and of the tour, on the Java of this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


class SetupError(Exception):
    """Something that the user can change keeps a run from starting."""


OLDEST_JAVA = 17
CLUSTER = "local-cluster[2,1,1024]"  # executors, cores, MiB
LOG4J = """\
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


def java_version() -> int:
    """The major version of the Java that Spark will run on."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    advice = f"Spark needs Java {OLDEST_JAVA} or newer: apt-get install openjdk-17-jre-headless, or set JAVA_HOME"
    try:
        told = subprocess.run([java or "java", "-version"], capture_output=True, text=True, timeout=60).stderr
    except OSError:
        raise SetupError(f"Java is not installed{f' ({java})' if java else ''}. {advice}") from None
    version = re.search(r'version "(?:1\.)?(\d+)', told)
    if version is None or int(version[1]) < OLDEST_JAVA:
        raise SetupError(f"{java} is {told.splitlines()[0] if told else 'broken'}. {advice}")
    return int(version[1])


@contextlib.contextmanager
def spark_session(
    scratch: Path, cluster: bool = False, memory: str | None = None, classes: Path | None = None
) -> Iterator[SparkSession]:
    """A local session that retries failed tasks, as a cluster does; or a cluster, of two executors on this machine.

    What Spark has to say goes to a file. Of a JVM that is to be started: memory is the heap, as Spark has it, and
    classes a folder of compiled ones.
    """
    for name in [name for name in os.environ if name.startswith(("SPARK_", "PYSPARK_"))]:
        del os.environ[name]  # a cluster's settings
    conf = scratch / "conf"
    conf.mkdir(parents=True)
    (conf / "log4j2.properties").write_text(LOG4J)
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(
        PYSPARK_PYTHON=sys.executable,
        PYSPARK_DRIVER_PYTHON=sys.executable,
        PYTHONPATH=os.pathsep.join(paths),
        SPARK_CONF_DIR=str(conf),
        SPARK_LOCAL_IP="127.0.0.1",
    )
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise SetupError("pyspark is not installed: make run installs what the tour needs") from None
    builder = SparkSession.builder.master(CLUSTER if cluster else "local[*,4]").appName("ags_fast tour")
    for name, value in {
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": str(scratch / "local"),
        "spark.python.unix.domain.socket.enabled": "true",  # saves 40 ms a task
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(name, value)
    if memory is not None:
        builder = builder.config("spark.driver.memory", memory)
    if classes is not None:
        for where in ("driver", "executor"):
            builder = builder.config(f"spark.{where}.extraClassPath", str(classes))
    log = scratch / "spark.log"
    try:
        with _stderr_to(log):  # the JVM keeps it
            session = builder.getOrCreate()
    except Exception as error:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SetupError(f"Spark does not start: {type(error).__name__}\n{tail}") from error
    signal.signal(signal.SIGINT, signal.default_int_handler)  # PySpark's asks the JVM, perhaps amid another question
    logging.disable()  # what py4j has to say of an interrupted question
    try:
        yield session
    finally:
        application = session.sparkContext.applicationId
        session.stop()
        if cluster:  # whose executors work in a folder of the package, whatever one says
            import pyspark

            shutil.rmtree(Path(pyspark.__file__).with_name("work") / application, ignore_errors=True)


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    sys.stderr.flush()
    before = os.dup(2)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.dup2(fd, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(fd)
