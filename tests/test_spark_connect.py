"""Jobs through servers of Spark Connect: what the tests of classic sessions (test_spark_jobs.py) do not have.

A server goes on with the tasks of a driver that has died. No attempt of them may harm what comes after.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from contextlib import nullcontext, suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from pickle import dumps
from typing import TYPE_CHECKING, Any

import pytest
from spark_jobs import (
    Driver,
    Folders,
    caller_after,
    check_canary,
    connect_server,
    connect_session,
    content,
    executor_of,
    leftovers,
    local_connect,
    spark_env,
    wait_for,
)

from ags_fast.engines.local import LocalEngine
from ags_fast.jobs import Row, rekey_files, sweep
from ags_fast.spark import SparkEngine

pytest.importorskip("pyspark")
pytest.importorskip("grpc_status")
if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
    pytest.skip("there is no Java runtime", allow_module_level=True)

if TYPE_CHECKING:
    from spark_sessions import ConnectServer

pytestmark = [pytest.mark.more, pytest.mark.spark, pytest.mark.timeout(300)]

COUNT = 40


@pytest.fixture
def server(shared_connect: ConnectServer) -> str:
    """The URL of a server on this machine alone."""
    return shared_connect.url


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    made = Folders(tmp_path)
    made.make({f"d{i % 3}/{i}": 100_000 + i for i in range(COUNT)})
    made.dataset_id()
    return made


def encryption(folders: Folders, **more: Any) -> dict[str, Any]:
    """Arguments of a job that asks the KMS for the key of each file."""
    return {"kms": folders.kms, "wrapping_key_id": "master", "double_wrap": False, "fsync": False, **more}


def kill_driver(server: str, folders: Folders, job: str, *args: Any, **options: Any) -> None:
    """Start a job, and kill its driver. Its tasks go on."""
    running = Driver(server, folders.root / "driver.log", {}, spark_env())
    try:
        folders.rules.set(wait=0.5, spared=(running.pid,))
        running.start(job, *args, **options, target_bytes=8 << 20)
        wait_for("the first files", lambda: len(folders.rules.calls()) > 4)
    finally:
        running.kill()
    calls = len(folders.rules.calls())
    wait_for("the tasks of the dead driver", lambda: len(folders.rules.calls()) > calls + 1)
    assert calls < COUNT - 10


def wait_for_tasks(folders: Folders) -> int:
    """Wait until no task asks for a key, or makes a file, any more. Returns how often keys were asked for."""
    quiet, calls = time.monotonic(), -1
    while (still := time.monotonic() - quiet) < 3 or (leftovers(folders.root) and still < 30):  # on a busy machine
        if (now := len(folders.rules.calls())) != calls:
            quiet, calls = time.monotonic(), now
        time.sleep(0.1)
    return calls


@pytest.mark.parametrize("engine", ["local", "connect"])
def test_resumed_while_the_tasks_of_a_dead_driver_run(server: str, folders: Folders, engine: str) -> None:
    ds = folders.root / "ds"
    kill_driver(server, folders, "encrypt_files", folders.src, ds, **encryption(folders))
    if engine == "local":
        result = folders.encrypt(LocalEngine(1), double_wrap=False, resume="length").counts
    else:
        running = Driver(server, folders.root / "driver.log", {}, spark_env())
        result = running.run("encrypt_files", folders.src, ds, **encryption(folders, resume="length"))["counts"]
        running.close()
    assert result == {"ok": COUNT, "skipped": 0, "failed": 0}
    wait_for_tasks(folders)
    folders.check()


def test_files_of_a_job_that_was_swept_are_not_published(server: str, folders: Folders) -> None:
    """Another job has other keys for their sources by now."""
    ds = folders.root / "ds"
    kill_driver(server, folders, "encrypt_files", folders.src, ds, **encryption(folders))
    before = len(folders.rules.calls())
    assert {row.format for row in sweep(ds, kms=folders.kms).rows} >= {"plan", "file"}
    folders.encrypt(LocalEngine(0), double_wrap=False).raise_for_failures()
    made = {path: path.stat().st_ino for path in ds.rglob("*.ags") if "_ags" not in path.parts}
    assert wait_for_tasks(folders) > before  # some were at it
    assert {path: path.stat().st_ino for path in made} == made
    folders.check()


def test_rekeyed_files_of_a_job_that_was_swept_are_not_published(server: str, folders: Folders) -> None:
    ds = folders.root / "ds"
    folders.encrypt(LocalEngine(0), double_wrap=False).raise_for_failures()
    kill_driver(server, folders, "rekey_files", ds, kms=folders.kms)
    sweep(ds, kms=folders.kms)
    rekey_files(ds, kms=folders.kms, engine=LocalEngine(0), progress=False).raise_for_failures()
    wait_for_tasks(folders)
    assert leftovers(ds) == []
    folders.check()


# ------------------------------------------------------------------------------------------------------------- clusters


def test_executors_that_die(standalone: str, tmp_path: Path, folders: Folders) -> None:
    """The server is on a cluster of two workers. A Python worker dies, and then an executor; nothing is lost."""
    ds, out = folders.root / "ds", folders.root / "spark-out"
    with connect_server(tmp_path / "server", standalone) as url:
        running = Driver(url, tmp_path / "driver.log", {}, spark_env())
        jobs: list[Any] = [
            lambda: running.start("encrypt_files", folders.src, ds, **encryption(folders)),
            lambda: running.start("rekey_files", ds, kms=folders.kms),
            lambda: running.start("decrypt_files", ds, out, kms=folders.kms),
        ]
        for start in jobs:
            folders.rules.set(wait=0.15, spared=(running.pid,))
            start()
            os.kill(caller_after(folders, 3), signal.SIGKILL)
            os.kill(executor_of(caller_after(folders, 10)), signal.SIGKILL)
            result = running.result()
            assert result["counts"] == {"ok": COUNT, "skipped": 0, "failed": 0}
            assert max(row["attempt"] for row in result["rows"]) >= 1
            folders.check()
        assert content(out) == content(folders.src)
        folders.rules.set(wait=0.05, spared=(running.pid,))
        rotated = running.run("rotate", ds, kms=folders.kms)
        assert rotated["counts"]["failed"] == 0
        folders.check()
        running.close()


# ------------------------------------------------------------------------------------------------------- command line


def run_cli(*args: Any, **env: str) -> dict[str, Any]:
    """Run `ags-fast` with ``--json``: its answer, with what it wrote to standard error."""
    command = [sys.executable, "-P", "-m", "ags_fast", *map(str, args), "--json"]
    done = subprocess.run(command, env=spark_env(**env), capture_output=True, text=True, timeout=200)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    return {**answer, "code": done.returncode, "stderr": done.stderr}


def kms_options(folders: Folders) -> list[str]:
    return [word for name, value in folders.kms.items() for word in ("--kms", f"{name}={value}")]


@pytest.mark.parametrize("by", ["option", "environment", "local"])
def test_command_line(server: str, folders: Folders, by: str) -> None:
    shutil.rmtree(folders.src / "d0")
    folders.rules.set()
    url = "local[2]" if by == "local" else server
    env = {"SPARK_REMOTE": url} if by == "environment" else {}
    options = ["--engine", "spark", *(("--spark-remote", url) if by != "environment" else ()), *kms_options(folders)]
    ds = folders.root / "other"
    with local_connect() if by == "local" else nullcontext():
        done = run_cli("encrypt", folders.src, ds, "--wrapping-key-id", "master", "--single-wrap", *options, **env)
        assert done["code"] == 0, done
        assert done["ok"] == COUNT - 14
        done = run_cli("verify", ds, *options, **env)
        assert (done["code"], done["ok"]) == (0, COUNT - 14), done
    folders.check("other")


def test_two_sessions_are_refused(folders: Folders) -> None:
    folders.encrypt(LocalEngine(0), double_wrap=False)
    options = ["--engine", "spark", "--spark-remote", "local[2]", "--spark-master", "local[2]"]
    done = run_cli("verify", folders.root / "ds", *options, *kms_options(folders))
    assert done["code"] == 2
    assert "not allowed with" in done["stderr"]


def test_servers_that_are_not_there(folders: Folders) -> None:
    folders.encrypt(LocalEngine(0), double_wrap=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"sc://127.0.0.1:{taken.getsockname()[1]}/;token=secret"
        options = ["--engine", "spark", "--spark-remote", url, *kms_options(folders)]
        done = run_cli("verify", folders.root / "ds", *options)
    assert done["code"] == 6
    assert done["error"] == "no server of Spark Connect answers at 127.0.0.1: Connection refused"


def server_below(folder: Path) -> int:
    """The process of the server whose files are in a folder."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes()
            if b"SparkConnectServer" in words and str(folder).encode() in words:
                return int(path.parent.name)
    raise AssertionError(folder)


def test_a_server_that_dies(tmp_path: Path, folders: Folders) -> None:
    """pyspark goes on for minutes to look for the server. Ctrl-C ends the job all the same."""
    with connect_server(tmp_path / "server") as url:
        running = Driver(url, tmp_path / "driver.log", {}, spark_env())
        folders.rules.set(wait=0.3, spared=(running.pid,))
        running.start("encrypt_files", folders.src, folders.root / "ds", **encryption(folders), target_bytes=8 << 20)
        wait_for("the first files", lambda: len(folders.rules.calls()) > 4)
        os.kill(server_below(tmp_path / "server"), signal.SIGKILL)
        time.sleep(2)
        running.process.send_signal(signal.SIGINT)
        wait_for("the end of the job", lambda: "KeyboardInterrupt" in running.log.read_text(), 75)
        running.kill()
    assert folders.encrypt(LocalEngine(0), double_wrap=False, resume="length").counts["ok"] == COUNT
    folders.check()


# ----------------------------------------------------------------------------------------------------- keys stay home


def test_keys_are_in_nothing_that_spark_keeps(tmp_path: Path) -> None:
    """Nor in what the client and the server say to each other."""
    check_canary(tmp_path, "local[2,4]", connect=True)


# -------------------------------------------------------------------------------------------------- what may be missing


def test_modules_that_are_missing(server: str, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: the error names the extra. In the workers: the error names the module, without a traceback."""
    with connect_session(server) as session:
        missing, old = (
            r"needs pandas: pip install '.*\[spark\]'",
            r"needs pandas 2.2 or newer \(2.1.4 is installed\): pip",
        )
        for found, text in ((None, missing), ("2.1.4", old)):

            def version(name: str, found: str | None = found) -> str:
                if name != "pandas":
                    return "99.0"
                if found is None:
                    raise PackageNotFoundError(name)
                return found

            with monkeypatch.context() as patch:
                patch.setattr("ags_fast.spark.connect.version", version)
                with pytest.raises(ImportError, match=text):
                    SparkEngine(session)

        class Stranger(Row):
            """A class of a module that only this process has."""

        Stranger.__module__ = "module_of_mine"
        monkeypatch.setitem(sys.modules, "module_of_mine", types.SimpleNamespace(Stranger=Stranger))
        Stranger.__qualname__ = "Stranger"
        engine = SparkEngine(session)
        monkeypatch.setattr(
            "ags_fast.spark.connect.pickle.dumps", lambda tasks, protocol: dumps([Stranger("", None, "ok")], protocol)
        )
        with pytest.raises(ImportError, match="no module 'module_of_mine': every host") as caught:
            folders.encrypt(engine)
        assert "Traceback" not in str(caught.value)
