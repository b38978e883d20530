"""The tour's second half: the same files as an encrypted dataset, whose jobs survive what is done to them."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ags_fast import jobs
from ags_fast.keys.kms import kms_calls
from ags_fast.spark import SparkEngine
from benchmarks.keystore import MASTER_KEY, keystore
from benchmarks.tour.steps import first_failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from benchmarks.tour.steps import Steps

# --------------------------------------------------------------------------------------- what a user would write


def encrypt(spark: SparkSession, source: Path, dataset: Path, kms: dict[str, str], **more: Any) -> jobs.JobResult:
    engine = SparkEngine(spark, target_bytes=16 << 20)
    return jobs.encrypt_files(
        source, dataset, kms=kms, wrapping_key_id=MASTER_KEY, engine=engine, resume="length", overwrite=True, **more
    )


# ------------------------------------------------------------------------------------------------------ the tour


def chapter(
    spark: SparkSession, steps: Steps, source: Path, root: Path, kill: bool, equal: Callable[[Path], str]
) -> None:
    """Encrypt, verify, re-key and decrypt `source`. equal: what is wrong with a folder that should be its copy."""
    engine = SparkEngine(spark, target_bytes=16 << 20)
    dataset, restored = root / "dataset", root / "restored"
    results: list[tuple[jobs.JobResult, float]] = []

    def run(job: Callable[[], jobs.JobResult]) -> jobs.JobResult:
        begun = time.perf_counter()
        result = job()
        results.append((result, time.perf_counter() - begun))
        return result

    with steps.step("A keystore with a master key is made, unless it is there"):
        kms = keystore(root)
    if kill:
        with steps.step("A job encrypts the tree into a dataset; it is interrupted"):
            finished = _interrupted(spark, source, dataset, kms)
        steps.say(f"{finished} files were finished; the plan in {dataset.name}/_ags/plans has every file's wrapped key")
        with steps.step("It is resumed; a Python worker and an executor are killed"):
            killer = Killer(dataset)
            result = run(lambda: encrypt(spark, source, dataset, kms, progress=killer.progress))
            killed = killer.stop()
        say_killed(steps, killed)
    else:
        with steps.step("A job encrypts the tree into a dataset"):
            result = run(lambda: encrypt(spark, source, dataset, kms, progress=False))
    counts = result.counts
    steps.check(
        f"version {result.version}: {counts['ok']:,} files, {counts['skipped']:,} skipped; KMS calls of the driver: "
        f"{sum(kms_calls().values())}",
        first_failure(result),
    )
    with steps.step("Another checks every tag, and that no file is missing"):
        result = run(lambda: jobs.verify_files(dataset, kms=kms, engine=engine, progress=False))
    extra = [row.src for row in result.rows if row.error_class == "ExtraFile"]
    steps.check(
        f"{result.counts['ok']:,} files are authentic, none is missing, and none was added",
        first_failure(result) or "".join(f"{name} belongs to nothing" for name in extra[:1]),
    )
    with steps.step("Another gives every file a new data key"):
        result = run(lambda: jobs.rekey_files(dataset, kms=kms, engine=engine, progress=False))
    steps.check(f"version {result.version}; the previous version can still be read", first_failure(result))
    with steps.step("Another decrypts the dataset"):
        shutil.rmtree(restored, ignore_errors=True)
        result = run(lambda: jobs.decrypt_files(dataset, restored, kms=kms, engine=engine, progress=False))
    steps.check(f"{result.counts['ok']:,} files, bit for bit the originals", first_failure(result) or equal(restored))
    leftovers = [path for folder in (dataset, restored) for path in folder.rglob("*.agstmp")]
    steps.check("no temporary file is left", "".join(f"{path} is left" for path in leftovers[:1]))
    _print_jobs(results)


def say_killed(steps: Steps, killed: list[str]) -> None:
    """Say what was killed. A job that ended before is no error."""
    if len(killed) == len(Killer.VICTIMS):
        steps.check(f"killed: {', '.join(killed)}", "")
    else:  # a small job ends within milliseconds
        steps.say(f"killed: {', '.join(killed) or 'nothing'}; the job was over before more could be killed. Give")
        steps.say("an INPUT with larger files, or none, to see what a kill does")


def _print_jobs(results: list[tuple[jobs.JobResult, float]]) -> None:
    print(f"\n   {'job':<10}{'files':>8}{'MB':>10}{'seconds':>10}{'MB/s':>10}{'failed':>8}")
    for result, seconds in results:
        done = [row for row in result.rows if row.status == "ok"]
        nbytes = sum(row.plain_length or 0 for row in done)
        rate = nbytes / 1e6 / seconds
        print(
            f"   {result.op:<10}{len(done):>8,}{nbytes / 1e6:>10,.1f}{seconds:>10.2f}{rate:>10,.0f}"
            f"{result.counts['failed']:>8}"
        )
    print()


class _InterruptionError(Exception):
    """Stands in for Ctrl-C."""


def _interrupted(spark: SparkSession, source: Path, dataset: Path, kms: dict[str, str]) -> int:
    finished = 0

    def progress(rows: list[jobs.Row]) -> None:
        nonlocal finished
        finished += len(rows)
        raise _InterruptionError

    try:
        encrypt(spark, source, dataset, kms, progress=progress)
    except _InterruptionError:
        pass
    return finished


class Killer:
    """Kills a Python worker when the first rows have come, and an executor after the next: both while they work."""

    VICTIMS = ("a Python worker", "an executor")

    def __init__(self, dataset: Path) -> None:
        self._dataset = dataset
        self._killed: list[str] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def progress(self, rows: list[jobs.Row]) -> None:
        """Nothing to show: the killer looks for itself."""

    def stop(self) -> list[str]:
        self._done.set()
        self._thread.join()
        return self._killed

    def _work(self) -> None:
        for what, find in zip(self.VICTIMS, (_python_worker, _executor), strict=True):
            while not self._done.is_set():
                victim = find() if any(self._dataset.rglob("*.agstmp")) else None
                if victim is not None:
                    os.kill(victim, signal.SIGKILL)
                    self._killed.append(what)
                    break
                time.sleep(0.002)


def _python_worker() -> int | None:
    """A process that a daemon of PySpark under this one has forked."""
    commands, parents = _processes()
    for pid, parent in parents.items():
        if "pyspark.daemon" in commands[pid] and "pyspark.daemon" in commands.get(parent, "") and _below(pid, parents):
            return pid
    return None


def _executor() -> int | None:
    commands, parents = _processes()
    for pid in parents:
        if "CoarseGrainedExecutorBackend" in commands[pid] and "java" in commands[pid] and _below(pid, parents):
            return pid
    return None


def _processes() -> tuple[dict[int, str], dict[int, int]]:
    """The command line and the parent of every process."""
    commands, parents = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                commands[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                commands.pop(int(entry.name), None)
    return commands, parents


def _below(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False
