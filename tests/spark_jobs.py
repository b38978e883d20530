"""What the tests of Spark jobs share: trees and datasets whose KMS may be deadly, a driver, a cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deadly_kms import Rules
from support import pattern, python_env

from ags_fast.fs import Store
from ags_fast.jobs import decrypt_files, encrypt_files, sweep, verify_files
from ags_fast.jobs.dataset import Dataset
from ags_fast.jobs.local import LocalEngine
from ags_fast.keys.kms import load_kms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
        store = Store(self.root / dataset)
        return Dataset.open_or_create(store, load_kms(self.kms), "master", False).id

    def check(self, dataset: str = "ds") -> None:
        """Every file decrypts to its source; nothing is left over, and nothing is amiss."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.rules.set()
        assert leftovers(self.root) == []
        verified = verify_files(self.root / dataset, kms=self.kms, engine=LocalEngine(0), progress=False)
        assert verified.counts["failed"] == 0 and verified.counts["skipped"] == 0, verified.rows
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
    env.pop("SPARK_HOME", None)  # pip's
    return {**env, **more}


def wait_for(what: str, ready: Callable[[], Any], seconds: float = 90) -> Any:
    """What `ready` returns, when that is something."""
    until = time.monotonic() + seconds
    while not (answer := ready()):
        assert time.monotonic() < until, f"{what}: not in {seconds} s"
        time.sleep(0.02)
    return answer


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


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
