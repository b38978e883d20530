"""Many small files on Spark: the number of Spark tasks, what the driver keeps for a file, what Spark's UI says.

``python tests/test_spark_scale.py 1000000`` prints the figures of a job of so many files whose tasks do nothing.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
import tracemalloc
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from spark_idle import IdleContext
from spark_jobs import spark_env

from ags_fast import encrypted_length
from ags_fast.dataset.entries import FileEntry
from ags_fast.engines.base import FILES_AT_ONCE, bins
from ags_fast.jobs.run import LOCAL_OPEN_COST, STORE_OPEN_COST
from ags_fast.jobs.work.context import Task
from ags_fast.spark import SparkEngine
from ags_fast.spark.engine import TARGET_BYTES
from ags_fast.spark.partition import Bin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spark_sessions import LocalSpark

    from ags_fast.dataset.rows import Row


def small_files(count: int, size: int = 1024) -> list[Task]:
    """Tasks as the plan of an encryption has them: keys and prefixes are random, names are alike."""
    return [
        Task(
            FileEntry(
                path=f"year=2026/month={n % 12}/part-{n:08}.avro",
                file=f"year=2026/month={n % 12}/part-{n:08}.avro.ags",
                format="ags1",
                plain_length=size,
                file_length=encrypted_length(size),
                block_size=1 << 20,
                key_id="k" * 22,
                wrapped_dek=os.urandom(44),
                column_keys=None,
                aad_prefix=os.urandom(16),
                job_id="j" * 32,
                set_id=None,
                part=None,
                parts=None,
                source=f"year=2026/month={n % 12}/part-{n:08}.avro",
                stamp=f"{n:019}",
            )
        )
        for n in range(count)
    ]


@contextmanager
def local_session(folder: Path) -> Iterator[Any]:
    """A session that writes its events down."""
    pyspark = pytest.importorskip("pyspark.sql")
    if not shutil.which("java"):
        pytest.skip("there is no Java runtime")
    (folder / "events").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in spark_env().items():
            patch.setenv(name, value)
        settings = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.local.dir": str(folder / "local"),
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": (folder / "events").as_uri(),
            "spark.eventLog.compress": "false",
            **SparkEngine.recommended_conf(),
        }
        session = pyspark.SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
        try:
            yield session
        finally:
            session.stop()


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind that Spark wrote down in a folder, as its UI shows them."""
    logs = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [line for path in logs for line in path.read_text(errors="replace").splitlines() if line.startswith("{")]
    return [event for event in map(json.loads, lines) if event["Event"] == kind]


@pytest.mark.parametrize(("open_cost", "files"), [(LOCAL_OPEN_COST, 512), (STORE_OPEN_COST // FILES_AT_ONCE, 1024)])
def test_small_files_fill_bins_evenly(open_cost: int, files: int) -> None:
    """A bin has so many files of 1 KiB that it is done in seconds, whatever a request takes."""
    tasks = small_files(20_000)
    parts = bins(tasks, target_bytes=TARGET_BYTES, open_cost=open_cost, least=4)
    counts = sorted(map(len, parts))
    assert counts[-1] - counts[0] <= 1
    assert 0.95 * files < counts[-1] <= files
    assert sorted(task.path for part in parts for task in part) == sorted(task.path for task in tasks)


def test_large_files_are_evened_out_by_small_ones() -> None:
    tasks = small_files(5_000) + small_files(9, 200 << 20)
    loads = [
        sum(task.nbytes + LOCAL_OPEN_COST for task in part)
        for part in bins(tasks, target_bytes=TARGET_BYTES, open_cost=LOCAL_OPEN_COST, least=4)
    ]
    assert max(loads) <= TARGET_BYTES
    assert max(loads) - min(loads) <= LOCAL_OPEN_COST + 1024


def test_a_bin_is_small_in_spark() -> None:
    """The driver's JVM keeps the pickles of all bins."""
    part = small_files(512)
    pickled = pickle.dumps(Bin(7, part))
    assert len(pickled) < 160 * len(part)
    assert len(pickled) < 0.7 * len(pickle.dumps(part, pickle.HIGHEST_PROTOCOL))
    again = pickle.loads(pickled)
    assert (again.number, again.tasks) == (7, part)


def run_idle(session: Any, tasks: list[Task]) -> list[Row]:
    rows: list[Row] = []
    SparkEngine(session).run(IdleContext("encrypt", "0" * 32), tasks, LOCAL_OPEN_COST, rows.extend)
    assert len(rows) == len(tasks)
    return rows


@pytest.mark.spark
@pytest.mark.more
@pytest.mark.timeout(300)
def test_memory_of_the_driver_and_what_the_ui_says(local_spark: LocalSpark) -> None:
    """Tasks and rows aside, the engine keeps less than 100 bytes for a file."""
    peaks = []
    session = local_spark.session()
    run_idle(session, small_files(100))  # imports what it needs
    for count in (10_000, 20_000):
        tasks = small_files(count)
        gc.collect()
        tracemalloc.start()
        rows = run_idle(session, tasks)
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        peaks.append((kept, peak))
        del rows, tasks
    kept, peak = ((after - before) / 10_000 for before, after in zip(*peaks, strict=True))
    assert kept < 600  # the rows
    assert peak - kept < 100
    local_spark.wait_for_events()
    begun = events(local_spark.events, "SparkListenerJobStart")[-1]
    assert begun["Properties"]["spark.jobGroup.id"] == f"ags_fast encrypt {'0' * 32}"
    assert begun["Properties"]["spark.job.description"] == f"ags_fast encrypt {'0' * 32}: 20000 files"
    wanted = -(-20_000 * (LOCAL_OPEN_COST + 1024) // TARGET_BYTES)
    assert [stage["Number of Tasks"] for stage in begun["Stage Infos"]] == [wanted]


def main(count: int) -> dict[str, float]:
    def resident(kind: str) -> float:
        return int(Path("/proc/self/status").read_text().split(f"{kind}:")[1].split()[0]) * 1024

    with tempfile.TemporaryDirectory() as made, local_session(Path(made)) as session:
        run_idle(session, small_files(100))
        tasks = small_files(count)
        gc.collect()
        before, begun = resident("VmRSS"), time.monotonic()
        run_idle(session, tasks)
        seconds, peak = time.monotonic() - begun, resident("VmHWM")
        session.stop()
        ended = [event["Task Info"] for event in events(Path(made) / "events", "SparkListenerTaskEnd")]
    longest = max(task["Finish Time"] - task["Launch Time"] for task in ended) / 1000
    return {"seconds": seconds, "bytes a file": (peak - before) / count, "tasks": len(ended), "longest s": longest}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
