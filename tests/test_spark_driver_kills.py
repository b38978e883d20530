"""Drivers of Spark that are killed while they commit a DataFrame: all of the write is in the dataset, or nothing."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from datasets import MASTER, leftovers, make_kms
from spark_jobs import spark_env, wait_for

pytest.importorskip("pyspark")
if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
    pytest.skip("there is no Java runtime", allow_module_level=True)

from pyarrow import parquet

from ags_fast import Dataset
from ags_fast.cli import main
from ags_fast.jobs import verify_files

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.more, pytest.mark.spark, pytest.mark.timeout(900)]

# Each Python process of the application runs this first. The one that commits stops before a step that touches storage.
SITE = """
import itertools, os, sys, time
if "commit_data_source_write" in " ".join(sys.orig_argv) and (step := int(os.environ["TEST_STEP"])) >= 0:
    from ags_fast.fs import NewFile, Store
    steps = itertools.count()
    def stops(function):
        def call(*args, **options):
            if next(steps) == step:
                open(os.environ["TEST_STOPPED"], "x").close()
                while os.path.exists(os.environ["TEST_STOPPED"]):
                    time.sleep(0.01)
            return function(*args, **options)
        return call
    for owner, name in [(Store, "create_exclusive"), (Store, "write_small"), (Store, "delete"), (Store, "lock"),
                        (Store, "sweep"), (NewFile, "publish"), (os, "link"), (os, "replace"), (os, "unlink")]:
        setattr(owner, name, stops(getattr(owner, name)))
"""
PROGRAM = """
import json, sys
from pyspark.sql import SparkSession
from ags_fast.spark.datasource import register
options, url, mode, begin, end = json.loads(sys.argv[1])
conf = {"spark.master": "local[2]", "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1"}
conf["spark.python.unix.domain.socket.enabled"] = "true"
spark = SparkSession.builder.config(map=conf).getOrCreate()
register(spark)
frame = spark.range(begin, end, 1, 3)
frame.write.format("ags_parquet").options(**options).mode(mode).save(url)
print("done", flush=True)
spark.stop()
"""


class Writes:
    """Writes of DataFrames to a dataset, each by a driver of its own."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.kms, self.url = make_kms(tmp_path), tmp_path / "ds"
        (tmp_path / "site").mkdir()
        (tmp_path / "site/sitecustomize.py").write_text(SITE)
        (tmp_path / "program.py").write_text(PROGRAM)
        self.stopped = tmp_path / "stopped"

    def write(self, mode: str, begin: int, end: int, step: int = -1, alone: bool = False) -> bool:
        """Write numbers. Before a step of the commit, kill the driver, with its JVM and workers unless `alone`.

        Returns whether the write ended before.
        """
        self.stopped.unlink(missing_ok=True)
        env = spark_env(TEST_STEP=str(step), TEST_STOPPED=str(self.stopped))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(self.tmp_path / "site"), env.get("PYTHONPATH"))))
        order = json.dumps([{**self.kms, "wrappingKeyId": MASTER}, str(self.url), mode, begin, end])
        with (self.tmp_path / "log").open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, str(self.tmp_path / "program.py"), order],
                env=env,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            wait_for("a commit", lambda: self.stopped.exists() or child.poll() is not None, 120)
        finally:
            for pid in [child.pid] if alone else session(child.pid):
                with suppress(ProcessLookupError):  # it has ended with another one
                    os.kill(pid, signal.SIGKILL)
            output, _ = child.communicate()
            self.stopped.unlink(missing_ok=True)
            wait_for("the end of all others", lambda: not list(session(child.pid)), 60)
        ended = bool(output == b"done\n")
        assert child.returncode in ((0, -signal.SIGKILL) if ended else (-signal.SIGKILL,)), self.log()
        return ended

    def log(self) -> str:
        return (self.tmp_path / "log").read_text()[-3000:]

    def sweep(self) -> None:
        """Remove what was left, as docs/spark.md has it."""
        options = ["--kms", "encryption.kms-type=local", "--keystore", self.kms["kms.local.path"]]
        options += ["--key-file", self.kms["kms.local.key-file"]]
        assert main(["sweep", str(self.url), "--older-than", "0", *options]) == 0
        assert leftovers(self.url, self.kms) == []

    def numbers(self) -> list[int]:
        found: list[int] = []
        dataset = Dataset.open(self.url, kms=self.kms)
        for file in dataset.files():
            with dataset.open_file(file.path) as opened:
                found += parquet.read_table(opened).to_pydict()["id"]
        return sorted(found)


def session(leader: int) -> Iterator[int]:
    """The processes of a session that live."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, number = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(number) == leader and state != "Z":
                yield int(folder.name)
        except OSError:
            continue


@pytest.mark.parametrize("stride", [12, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_of_a_commit(tmp_path: Path, stride: int) -> None:
    """Killed before every twelfth step, a driver each; before every fourth where there is time."""
    writes = Writes(tmp_path)
    assert writes.write("append", 0, 300)
    now = list(range(300))
    for round_ in itertools.count():
        mode = ("append", "overwrite")[round_ % 2]
        begin = 1000 * (round_ + 1)
        after = [*(now if mode == "append" else ()), *range(begin, begin + 300)]
        ended = writes.write(mode, begin, begin + 300, 1 + stride * round_, alone=round_ % 3 == 1)
        found = writes.numbers()
        assert found == after if ended else found in (now, after)
        if round_ % 4 > 1:  # else the next write finds what was left
            writes.sweep()
            assert writes.numbers() == found
        now = found
        if ended:
            break
    assert stride * round_ > 16
    writes.sweep()
    verify_files(writes.url, kms=writes.kms, progress=False).raise_for_failures()
