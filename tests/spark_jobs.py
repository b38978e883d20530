"""What the tests of Spark jobs share: trees and datasets whose KMS may be deadly, a driver, a cluster."""

from __future__ import annotations

import base64
import fcntl
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deadly_kms import Rules
from support import pattern, python_env

from ags_fast import Dataset
from ags_fast.engines.local import LocalEngine
from ags_fast.jobs import decrypt_files, encrypt_files, sweep, verify_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ags_fast.jobs import JobResult

BLOCK_SIZE = 1 << 16


class Folders:
    """A tree of sources, and where a job writes."""

    def __init__(self, root: Path) -> None:
        self.root, self.src, self.out = root, root / "src", root / "out"
        self.rules = Rules(root / "kms")
        self.kms: Mapping[str, str] = self.rules.kms

    def make(self, sizes: Mapping[str, int]) -> None:
        for seed, (name, size) in enumerate(sizes.items()):
            path = self.src / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pattern(size, seed))

    def encrypt(self, engine: Any, dataset: str = "ds", **options: Any) -> JobResult:
        common = {"wrapping_key_id": "master", "block_size": BLOCK_SIZE, "fsync": False, "progress": False}
        return encrypt_files(self.src, self.root / dataset, kms=self.kms, engine=engine, **{**common, **options})

    def dataset_id(self, dataset: str = "ds") -> str:
        """The id of the dataset, which is made, to be of single wrap."""
        return Dataset.create(self.root / dataset, kms=self.kms, wrapping_key_id="master").id

    def check(self, dataset: str = "ds") -> None:
        """Every file decrypts to its source; nothing is left over, and nothing is amiss."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.rules.set()
        assert leftovers(self.root) == []
        verified = verify_files(self.root / dataset, kms=self.kms, engine=LocalEngine(0), progress=False)
        assert verified.counts["failed"] == 0, verified.rows
        assert verified.counts["skipped"] == 0, verified.rows
        result = decrypt_files(
            self.root / dataset, self.out, kms=self.kms, engine=LocalEngine(0), fsync=False, progress=False
        )
        result.raise_for_failures()
        assert content(self.out) == content(self.src)
        assert [row.src for row in sweep(self.root / dataset, kms=self.kms).rows] == []


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*.agstmp")]


# ---------------------------------------------------------------- processes


def spark_env(**more: str) -> dict[str, str]:
    """For a driver, a master or a worker, and what they start."""
    python = dict.fromkeys(("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"), sys.executable)
    env = {**python_env(), **python, "SPARK_LOCAL_IP": "127.0.0.1"}
    env["JDK_JAVA_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # for JVMs that soon end
    env.pop("SPARK_HOME", None)  # pip's
    return {**env, **more}


@contextmanager
def local_connect() -> Iterator[None]:
    """A turn to start a session with remote("local[2]"): its server listens at a port that PySpark does not choose."""
    with open(Path(tempfile.gettempdir()) / "ags_fast-local-connect.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wait_for(what: str, ready: Callable[[], Any], seconds: float = 200) -> Any:
    """What `ready` returns, when that is something. The limit only ends what hangs: a busy machine takes minutes."""
    until = time.monotonic() + seconds
    while not (answer := ready()):
        assert time.monotonic() < until, f"{what}: not in {seconds} s"
        time.sleep(0.02)
    return answer


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def spark_home(home: Path, work: Path) -> Path:
    """pip's pyspark, but for the folder that the workers of a local-cluster write to."""
    import pyspark

    for folder in (home, work):
        folder.mkdir()
    for path in Path(pyspark.__file__).parent.iterdir():
        if path.name != "work":
            (home / path.name).symlink_to(path)
    (home / "work").symlink_to(work)
    return home


class Driver:
    """A Spark application in a process of its own, which does jobs when it is told to."""

    def __init__(self, master: str, log: Path, conf: Mapping[str, str], env: Mapping[str, str]) -> None:
        settings = {
            "spark.master": master,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.python.unix.domain.socket.enabled": "true",
            **conf,
        }
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("spark_driver.py")), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(env),
                text=True,
            )
        self.pid = self.process.pid

    def start(self, job: str, *args: Any, target_bytes: int = 4 << 20, **options: Any) -> None:
        """Have it do a job of ags_fast.jobs."""
        assert self.process.stdin is not None
        order = {"job": job, "args": [str(arg) for arg in args], "target_bytes": target_bytes, "options": options}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Its answer: counts, version, and rows as dicts."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the driver died:\n{self.log.read_text()[-5000:]}"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, f"{answer}\n{self.log.read_text()[-5000:]}"
        return answer

    def run(self, job: str, *args: Any, **options: Any) -> dict[str, Any]:
        self.start(job, *args, **options)
        return self.result()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(60)
            finally:
                self.process.kill()
                self.process.wait()


def executor_of(worker: int) -> int:
    """Of a Python worker: the JVM that started the process that forked it."""
    pid = parent(parent(worker))
    assert b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return pid


def caller_after(folders: Folders, calls: int) -> int:
    """The worker that asks for the next file's key after so many."""
    return int(wait_for(f"{calls} files", lambda: folders.rules.calls()[calls:])[0][0])


@contextmanager
def standalone_master(folder: Path) -> Iterator[str]:
    """The URL of a master of two workers, each of another host's address: speculation needs two hosts."""
    import pyspark

    folder.mkdir(parents=True, exist_ok=True)
    running: list[subprocess.Popen[bytes]] = []

    def start(kind: str, host: str, *args: str) -> Path:
        log = folder / f"{kind}-{host}.log"
        command = [
            str(Path(pyspark.__file__).parent / "bin" / "spark-class"),
            f"org.apache.spark.deploy.{kind.lower()}.{kind}",
        ]
        with log.open("wb") as out:
            running.append(
                subprocess.Popen(
                    [*command, "--host", host, "--port", "0", "--webui-port", "0", *args],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=spark_env(SPARK_LOCAL_IP=host, SPARK_DAEMON_MEMORY="256m"),
                )
            )
        return log

    try:
        log = start("Master", "127.0.0.1")
        master = wait_for("a master", lambda: re.search(r"Starting Spark master at (spark://\S+)", log.read_text()))[1]
        logs = [
            start("Worker", host, "--cores", "1", "--memory", "1g", "--work-dir", str(folder / host), master)
            for host in ("127.0.0.1", "127.0.0.2")
        ]
        for log in logs:
            wait_for("a worker", lambda log=log: "Successfully registered with master" in log.read_text())  # type: ignore[misc]
        yield master
    finally:
        for process in reversed(running):
            process.terminate()
        for process in reversed(running):
            try:
                process.wait(20)
            finally:
                process.kill()
                process.wait()


@contextmanager
def connect_server(
    folder: Path,
    master: str = "local[2,4]",
    conf: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """A server of Spark Connect on loopback, in a process of its own: its URL."""
    import pyspark

    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "connect.log"
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.local.dir": str(folder / "scratch"),
        **(conf or {}),
    }
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", master]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=dict(env or spark_env()), cwd=folder
        )
    try:

        def port() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()[-5000:]
            return re.search(r"Spark Connect server started at: \S*?:(\d+)", log.read_text())

        yield f"sc://127.0.0.1:{wait_for('a server', port)[1]}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()


@contextmanager
def connect_session(url: str) -> Iterator[Any]:
    """A session of its own at a server. The process may have a classic session, too."""
    pytest.importorskip("grpc_status")
    from pyspark.sql.connect.session import SparkSession

    session = SparkSession.builder.remote(url).create()
    try:
        yield session
    finally:
        session.stop()


# ---------------------------------------------------------------- canaries


def forms(key: bytes) -> set[bytes]:
    """How a key can stand in bytes: as it is, in hex, in base64 wherever it begins, as Python or JSON write it."""
    found = {key, key.hex().encode(), key.hex().upper().encode(), repr(key)[2:-1].encode()}
    found.add(", ".join(map(str, key)).encode())
    found.add(",".join(map(str, key)).encode())
    for before in range(3):
        text = base64.b64encode(bytes(before) + key)[(0, 2, 3)[before] :].rstrip(b"=")[:-1]
        found |= {text, text.replace(b"+", b"-").replace(b"/", b"_")}
    return found


def content_if_there(path: Path) -> bytes:
    """What is in a file of Spark's, which removes those that it needs no more at any time."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def where(keys: Iterable[bytes], folder: Path) -> set[str]:
    """The files below a folder in which one of these keys stands, in whatever form."""
    texts = {form for key in keys for form in forms(key)}
    files = (path for path in folder.rglob("*") if path.is_file())
    contents = ((path, content_if_there(path)) for path in files)
    return {str(path.relative_to(folder)) for path, data in contents if any(form in data for form in texts)}


def told_by_python(log: Path) -> str:
    """The end of a driver's log without the lines of Spark."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if not re.match(r"\d\d/\d\d/\d\d |\tat ", line))[-5000:]


def check_canary(folder: Path, master: str, *, connect: bool = False) -> None:
    """Run spark_canary.py: its keys are nowhere to be found, and what was put there is."""
    where_to = "spark.remote" if connect else "spark.master"
    evidence = folder / "evidence"
    evidence.mkdir()
    env = {"SPARK_HOME": str(spark_home(folder / "home", evidence / "work"))} if "cluster" in master else {}
    command = [sys.executable, str(Path(__file__).with_name("spark_canary.py")), str(folder)]
    with (evidence / "driver.log").open("wb") as log, local_connect() if connect else nullcontext():
        told = subprocess.run(
            [*command, json.dumps({where_to: master, "spark.executor.memory": "512m"})],
            stdout=subprocess.PIPE,
            stderr=log,
            env=spark_env(**env),
            timeout=240,
        )
    assert told.returncode == 0, told_by_python(evidence / "driver.log")
    answer = json.loads(told.stdout.splitlines()[-1])
    controls = {place: bytes.fromhex(key) for place, key in answer["controls"].items()}
    found = {place: {path.split("/")[0] for path in where([key], evidence)} for place, key in controls.items()}
    assert found["conf"] >= {"events", "ui", "processes"}
    assert found["broadcast"] >= {"local"}
    assert found["closure"] >= {"local", "shipped"}
    assert found["shuffle"] >= {"local", "shipped"}
    assert found["exception"] >= {"driver.log", "events", "ui"}
    if connect:
        assert found["function"] >= {"messages", "shipped"}
        assert found["row"] >= {"messages"}
        assert found["rows"] >= {"messages"}
        assert found["literal"] >= {"messages", "events", "ui"}
    assert any((evidence / "plans").rglob("files-*"))
    processes = b"".join(path.read_bytes() for path in (evidence / "processes").glob("*-cmdline"))
    assert b"pyspark.daemon" in processes
    if "cluster" in master:
        assert b"CoarseGrainedExecutorBackend" in processes
        assert any(path.stat().st_size for path in (evidence / "work").rglob("stderr"))
    keys = {bytes.fromhex(key): kind for key, kind in answer["keys"].items()}
    assert set(keys.values()) == {"key file or passphrase", "master key", "KEK", "DEK"}
    assert len(keys) > 20
    found_keys = where(keys, evidence)
    assert not found_keys, found_keys
