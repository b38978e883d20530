"""Jobs on real clusters, on loopback addresses: nothing that dies on the way loses anything.

After each death every file decrypts to its source, nothing is amiss, and nothing is left over: see `Folders.check`.
"""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from spark_jobs import (
    Driver,
    Folders,
    caller_after,
    check_canary,
    content,
    executor_of,
    spark_env,
    spark_home,
)

from ags_fast.engines.local import LocalEngine

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
    pytest.skip("there is no Java runtime", allow_module_level=True)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = [pytest.mark.more, pytest.mark.spark, pytest.mark.timeout(300)]

COUNT = 30
SIZE = 300_000


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    made = Folders(tmp_path)
    made.make({f"d{i % 3}/{i}": SIZE + i for i in range(COUNT)})
    made.dataset_id()
    return made


@contextmanager
def driver(
    master: str, folders: Folders, conf: Mapping[str, str] | None = None, env: Mapping[str, str] | None = None
) -> Iterator[Driver]:
    conf = {"spark.local.dir": str(folders.root / "scratch"), **(conf or {})}
    running = Driver(master, folders.root / "driver.log", conf, env or spark_env())
    try:
        yield running
    finally:
        running.close()


def job(folders: Folders, **more: Any) -> dict[str, Any]:
    return {"kms": folders.kms, **more}


def encryption(folders: Folders, **more: Any) -> dict[str, Any]:
    """Arguments of a job in which every file costs 0.15 s: the KMS is asked for each, and takes that long."""
    return job(folders, wrapping_key_id="master", double_wrap=False, block_size=1 << 16, fsync=False, **more)


def kill_on_the_way(running: Driver, folders: Folders, start: Any) -> dict[str, Any]:
    """Start a job, and kill a Python worker and then an executor of it."""
    folders.rules.set(wait=0.15, spared=(running.pid,))
    start()
    os.kill(caller_after(folders, 3), signal.SIGKILL)
    os.kill(executor_of(caller_after(folders, 10)), signal.SIGKILL)
    result = running.result()
    assert result["counts"] == {"ok": COUNT, "skipped": 0, "failed": 0}
    assert max(row["attempt"] for row in result["rows"]) >= 1
    return result


def test_local_cluster(folders: Folders) -> None:
    """Each Python worker may use 512 MiB of address space."""
    home = spark_home(folders.root / "home", folders.root / "work")
    conf = {"spark.executor.pyspark.memory": "512m"}
    with driver("local-cluster[2,1,1024]", folders, conf, spark_env(SPARK_HOME=str(home))) as running:
        ds = folders.root / "ds"
        kill_on_the_way(
            running, folders, lambda: running.start("encrypt_files", folders.src, ds, **encryption(folders))
        )
        folders.check()
        out = folders.root / "spark-out"
        kill_on_the_way(running, folders, lambda: running.start("decrypt_files", ds, out, **job(folders)))
        assert content(out) == content(folders.src)
        folders.rules.set(wait=0.1, spared=(running.pid,))
        running.start("rotate", ds, **job(folders, concurrency=1))  # a call for each file, all by one worker
        os.kill(caller_after(folders, 3), signal.SIGKILL)
        os.kill(executor_of(caller_after(folders, 10)), signal.SIGKILL)
        rotated = running.result()
        assert (rotated["counts"], rotated["version"]) == ({"ok": 2, "skipped": 0, "failed": 0}, 3)
        folders.rules.set()
        assert running.run("verify_files", ds, **job(folders))["counts"]["ok"] == COUNT
        folders.check()
    assert any((folders.root / "work").rglob("stderr"))


def test_standalone_whose_driver_is_killed(standalone: str, folders: Folders) -> None:
    """A worker and an executor first, in a job that survives it; then the driver, in one that is resumed."""
    ds, second = folders.root / "ds", folders.root / "second"
    with driver(standalone, folders) as running:
        kill_on_the_way(
            running, folders, lambda: running.start("encrypt_files", folders.src, ds, **encryption(folders))
        )
        folders.check()
        folders.rules.set(wait=0.15, spared=(running.pid,))
        running.start("encrypt_files", folders.src, second, **encryption(folders))
        caller_after(folders, 10)
        running.kill()
    finished = {path: path.stat().st_ino for path in second.rglob("*.ags") if "_ags" not in path.parts}
    assert 0 < len(finished) < COUNT
    with driver(standalone, folders) as running:
        folders.rules.set(spared=(running.pid,))
        result = running.run("encrypt_files", folders.src, second, **encryption(folders, resume="length"))
        assert result["counts"] == {"ok": COUNT, "skipped": 0, "failed": 0}
        assert {path: path.stat().st_ino for path in finished} == finished
    folders.check("second")


@pytest.mark.slow
@pytest.mark.parametrize("moment", [1, 10, COUNT - 1])
def test_standalone_whose_driver_is_killed_while_it_turns(standalone: str, folders: Folders, moment: int) -> None:
    ds = folders.root / "ds"
    folders.encrypt(LocalEngine(0), double_wrap=False)
    with driver(standalone, folders) as running:
        kill_on_the_way(running, folders, lambda: running.start("rekey_files", ds, **job(folders)))
        folders.check()
        folders.rules.set(wait=0.15, spared=(running.pid,))
        running.start("rekey_files", ds, **job(folders))
        caller_after(folders, moment)
        running.kill()
    folders.rules.set()
    with driver(standalone, folders) as running:
        assert running.run("rekey_files", ds, **job(folders, resume="verify"))["counts"]["ok"] == COUNT
    folders.check()


def test_speculation(standalone: str, folders: Folders) -> None:
    """The first attempt of a task hangs in the middle of a file; another one, on another host, outruns it."""
    ds, out = folders.root / "ds", folders.root / "spark-out"
    conf = {
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.2",
        "spark.speculation.minTaskRuntime": "200ms",
    }
    with driver(standalone, folders, conf) as running:
        for start in (
            lambda: running.start("encrypt_files", folders.src, ds, **encryption(folders)),
            lambda: running.start("decrypt_files", ds, out, **job(folders)),
        ):
            folders.rules.set(wait=0.02, slow_partition=0, spared=(running.pid,))
            start()
            result = running.result()
            assert result["counts"] == {"ok": COUNT, "skipped": 0, "failed": 0}
            assert {row["attempt"] for row in result["rows"]} == {0, 1}
            folders.check()
        assert content(out) == content(folders.src)


@pytest.mark.slow
def test_keys_are_in_nothing_that_a_cluster_keeps(tmp_path: Path) -> None:
    check_canary(tmp_path, "local-cluster[1,2,1024]")
