"""Jobs on Spark: what the local engine does, in the tasks of Spark, whose workers die, are cancelled and tell tales."""

from __future__ import annotations

import base64
import dataclasses
import functools
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from audit_hooks import events, processes
from datasets import data_files, make_kms, object_of, rows_of, version_of, write_tree
from spark_jobs import (
    BLOCK_SIZE,
    Folders,
    check_canary,
    connect_server,
    connect_session,
    content,
    forms,
    leftovers,
    where,
)
from spark_sessions import MASTER, SESSIONS

from ags_fast.dataset.draft import Draft, Idle
from ags_fast.dataset.names import plan_path
from ags_fast.engines.local import LocalEngine
from ags_fast.errors import JobEndedError
from ags_fast.jobs import JobError, Policy, decrypt_files, encrypt_files, rekey_files, rotate, sweep, verify_files
from ags_fast.jobs.work.dispatch import run_file
from ags_fast.keys import clear_cache
from ags_fast.keys.kms import local
from ags_fast.keys.stores.base import JOB_ID

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
    pytest.skip("there is no Java runtime", allow_module_level=True)

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from ags_fast.spark import SparkEngine
from ags_fast.spark import engine as spark_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spark_sessions import ConnectServer, LocalSpark

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.jobs import JobResult, Row
    from ags_fast.jobs.work.context import Context, Task

pytestmark = [pytest.mark.spark, pytest.mark.more, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=SESSIONS)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Gives the session of a master, of one kind: the one that runs, if it has this master."""
    if request.param == "classic":
        spark: LocalSpark = request.getfixturevalue("local_spark")
        yield lambda master: spark.session(master, settings_of(master))
        return
    folder = tmp_path_factory.mktemp("spark")
    shared: ConnectServer = request.getfixturevalue("shared_connect")
    with ExitStack() as held:

        @functools.cache
        def connect(master: str) -> Any:
            url = shared.url
            if master != MASTER:
                url = held.enter_context(connect_server(folder / master, master, settings_of(master)))
            return held.enter_context(connect_session(url))

        yield connect


def settings_of(master: str) -> dict[str, str]:
    return {**SparkEngine.recommended_conf(), "spark.task.cpus": "2"} if master == "local[2]" else {}


@pytest.fixture
def spark(session: Callable[[str], Any]) -> Any:
    return session(MASTER)


@pytest.fixture
def engine(spark: Any) -> SparkEngine:
    """With tasks of a few files."""
    return SparkEngine(spark, target_bytes=8 << 20)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


def comparable(result: JobResult, *roots: str) -> list[tuple[Any, ...]]:
    """Rows without what differs from run to run: seconds, host, ids; and, of paths, what the dataset is called."""

    def strip(text: str | None) -> str | None:
        for root in roots:
            text = text and text.replace(root, "*")
        return text and re.sub(rf"{JOB_ID.pattern}(-[0-9a-f]{{8,16}})?", "*", text)

    return sorted(
        (strip(row.src), strip(row.dst), row.status, row.error_class, strip(row.error), *row[5:9], row.attempt)
        for row in result.rows
    )


# ------------------------------------------------------------------------------------------- as the local engine does


def test_jobs_equal_the_local_engines(engine: SparkEngine, folders: Folders) -> None:
    sizes = {f"d{i % 3}/{i}": (0, 1, BLOCK_SIZE, 3 * BLOCK_SIZE + 7)[i % 4] for i in range(40)}
    folders.make({**sizes, "_SUCCESS": 0, ".0.crc": 8, "big": 9_000_000, "year=2026/ä b.avro": 100})
    (folders.src / "ags").write_bytes(b"AGS1\0\0\1\0" + bytes(100))
    results = {}
    for name, of in {"local": LocalEngine(2), "spark": engine}.items():
        root = folders.root
        common: dict[str, Any] = {"kms": folders.kms, "engine": of, "progress": False}
        results[name] = [
            folders.encrypt(of, name, verify_after=name == "spark"),
            folders.encrypt(of, name),  # nothing is new
            verify_files(root / name, **common),
            rekey_files(root / name, paths="d1/*", **common),
            verify_files(root / name, version=2, **common),
            decrypt_files(root / name, root / f"{name}-out", **common),
            decrypt_files(root / name, root / f"{name}-out", **common),  # all there
            decrypt_files(root / name, root / f"{name}-out", resume="verify", **common),
            decrypt_files(root / name, root / f"{name}-out", overwrite=True, **common),
        ]
    for ours, other in zip(results["spark"], results["local"], strict=True):
        assert comparable(ours, "/spark") == comparable(other, "/local")
        assert ours.version == other.version
    plain = {name: data for name, data in content(folders.src).items() if name[0] not in "._" and name != "ags"}
    assert content(folders.root / "spark-out") == content(folders.root / "local-out") == plain
    assert Counter(row.status for row in results["spark"][0].rows) == {"ok": 42, "skipped": 3}
    assert [result.counts["failed"] for result in results["spark"]] == [0, 0, 0, 0, 0, 0, 42, 0, 0]
    assert leftovers(folders.root) == []


def test_parquet_jobs_equal_the_local_engines(engine: SparkEngine, folders: Folders) -> None:
    """A data key for each file and one for a column, of which a worker asks the KMS for each master key once."""
    local.create_key(folders.kms, "hr")
    for n in range(12):
        path = folders.src / f"part={n % 3}" / f"{n}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": list(range(n)), "ssn": [f"ssn {i}" for i in range(n)]}), path)
    for name, data in {"_SUCCESS": b"", "x.csv": b"1,2", "sealed": b"PARE" + bytes(99) + b"PARE"}.items():
        (folders.src / name).write_bytes(data)
    pq.write_table(pa.table({"id": [1]}), folders.src / "narrow")
    results = {}
    for name, of in {"local": LocalEngine(2), "spark": engine}.items():
        root = folders.root
        common: dict[str, Any] = {"kms": folders.kms, "engine": of, "progress": False}
        denied = {**common, "kms": {**folders.kms, "encryption.allowed-key-ids": "master"}}
        columns = {"format": "parquet", "column_keys": {"ssn": "hr"}}
        folders.rules.set()
        results[name] = [
            folders.encrypt(of, name, **columns),
            folders.encrypt(of, name, **columns),
            verify_files(root / name, **common),
            verify_files(root / name, **denied),
            rekey_files(root / name, paths="part=1/*", verify_after=True, **common),
            decrypt_files(root / name, root / f"{name}-out", **common),
            decrypt_files(root / name, root / f"{name}-out", resume="length", **common),
            decrypt_files(root / name, root / f"{name}-less", missing="drop", **denied),
        ]
        # Two master keys, and one of them again for whoever may not use the other.
        assert max(Counter(folders.rules.calls()).values()) <= 3
        for path in folders.src.glob("part=*/*"):
            table = pq.ParquetFile(path).read()
            below = path.relative_to(folders.src)
            assert pq.ParquetFile(root / f"{name}-out" / below).read() == table
            assert pq.ParquetFile(root / f"{name}-less" / below).read() == table.select(["id"])
    for ours, other in zip(results["spark"], results["local"], strict=True):
        assert comparable(ours, "/spark") == comparable(other, "/local")
        assert ours.version == other.version
    counts = [tuple(result.counts.values())[:3] for result in results["spark"]]
    assert counts == [
        (12, 2, 2),
        (0, 14, 2),
        (12, 0, 0),
        (0, 0, 12),
        (4, 0, 0),
        (12, 0, 0),
        (0, 12, 0),
        (12, 0, 0),
    ]
    assert {row.error_class for row in results["spark"][3].rows} == {"KeyAccessError"}
    assert leftovers(folders.root) == []


@pytest.mark.parametrize("double_wrap", [True, False])
def test_rotations_equal_the_local_engines(engine: SparkEngine, folders: Folders, double_wrap: bool) -> None:
    """The same keys in the same places. A process asks for a KEK once, and of DEKs that the KMS wraps each is asked for
    once."""
    for n in range(3):  # a manifest each
        folders.make({f"d{m % 2}/{n} {m}": 10 * m for m in range(3)})
        folders.encrypt(LocalEngine(0), double_wrap=double_wrap, policy=Policy(kek_scope="partition"))
    shutil.copytree(folders.root / "ds", folders.root / "other")
    was = {entry.file: entry for entry in entries(folders, "ds")}
    results = {}
    for name, used in (("ds", engine), ("other", LocalEngine(0))):
        dataset_id = version_of(folders.root / name, folders.kms).entry.dataset_id
        folders.rules.set(dataset_id=dataset_id, files=tuple(was))
        clear_cache()
        results[name] = rotate(folders.root / name, kms=folders.kms, engine=used, progress=False)
        calls = folders.rules.calls()  # of other processes than this one
        of_files = [file for _, file in calls if file != "None"]
        assert len(of_files) == len(set(of_files))
        if used is not engine:
            assert calls == []
            continue
        assert len(of_files) == (0 if double_wrap else len(was) - 1)  # one was tried before anything was written
        keks = Counter(pid for pid, file in calls if file == "None")
        assert keks
        assert max(keks.values()) <= (2 * 3 if double_wrap else 1)
    assert results["ds"].counts == results["other"].counts
    assert results["ds"].version == results["other"].version == 5
    kinds = [sorted((row.format, row.status) for row in result.rows) for result in results.values()]
    assert kinds[0] == kinds[1]
    for name in results:
        head = version_of(folders.root / name, folders.kms).entry
        active = {key_id: key for key_id, key in head.keys.items() if key.state == "active"}
        assert {entry.file for entry in entries(folders, name)} == was.keys()
        for entry in entries(folders, name):
            assert entry._replace(key_id="", wrapped_dek=b"") == was[entry.file]._replace(key_id="", wrapped_dek=b"")
            scope = f"partition:{entry.path[:2]}" if double_wrap else None
            assert active[entry.key_id].properties.get("scope") == scope
        folders.check(name)


def entries(folders: Folders, name: str) -> list[FileEntry]:
    return list(rows_of(folders.root / name, folders.kms).values())


def test_bad_files_are_rows(engine: SparkEngine, folders: Folders) -> None:
    folders.make(dict.fromkeys("abcdefgh", 3 * BLOCK_SIZE))
    folders.encrypt(engine).raise_for_failures()
    ds = folders.root / "ds"
    a, b, c, d, e = (object_of(ds, folders.kms, path) for path in "abcde")
    sealed = a.read_bytes()
    a.write_bytes(sealed[:100] + bytes([sealed[100] ^ 1]) + sealed[101:])
    b.unlink()
    os.truncate(c, len(sealed) - 1)
    os.truncate(d, len(sealed) - BLOCK_SIZE - 28)
    e.unlink()
    e.mkdir()
    (ds / "stranger").write_bytes(b"?")
    for job in (
        lambda: verify_files(ds, kms=folders.kms, engine=engine, progress=False),
        lambda: decrypt_files(ds, folders.out, kms=folders.kms, engine=engine, progress=False),
        lambda: rekey_files(ds, kms=folders.kms, engine=engine, progress=False),
    ):
        result = job()
        assert {row.src: row.error_class for row in result.failed} == {
            "a": "IntegrityError",
            "b": "IntegrityError",
            "c": "IntegrityError",
            "d": "IntegrityError",
            "e": "IntegrityError",
        }
        assert result.counts["ok"] == 3
        extra = [Path(row.src).name for row in result.rows if row.error_class == "ExtraFile"]
        assert extra == (["stranger"] if result.op == "verify" else [])
    assert sorted(content(folders.out)) == ["f", "g", "h"]
    assert leftovers(folders.root) == []


def test_sources_that_go_wrong_are_rows(engine: SparkEngine, folders: Folders) -> None:
    """Between the plan and the read: gone, cut, replaced. What is left is a dataset without them."""
    folders.make(dict.fromkeys("abcdefgh", 3 * BLOCK_SIZE))

    class LateEngine:
        def run(self, *args: Any) -> None:
            (folders.src / "a").unlink()
            os.truncate(folders.src / "b", 10)
            (folders.src / "c").write_bytes(bytes(3 * BLOCK_SIZE))
            engine.run(*args)

    result = folders.encrypt(LateEngine())
    failed = {Path(row.src).name: row.error_class for row in result.failed}
    assert failed == {"a": "FileNotFoundError", "b": "SourceChangedError", "c": "SourceChangedError"}
    folders.encrypt(engine).raise_for_failures()
    folders.check()


def test_progress_comes_while_the_job_runs(spark: Any, folders: Folders) -> None:
    folders.make({str(i): 1 << 20 for i in range(16)})
    folders.dataset_id()
    folders.rules.set(wait=0.1)
    came: list[tuple[float, list[Row]]] = []
    few = SparkEngine(spark, target_bytes=2 << 20)
    result = folders.encrypt(few, double_wrap=False, progress=lambda rows: came.append((time.monotonic(), rows)))
    assert sorted(row for _, rows in came for row in rows) == sorted(result.rows)
    assert len(came) > 2
    assert came[-1][0] - came[0][0] > 0.2


def test_one_kms_call_a_process(spark: Any, folders: Folders) -> None:
    """In double wrap, however many files and tasks there are; in single wrap, one a file."""
    folders.make({str(i): 1000 for i in range(60)})
    many = SparkEngine(spark, target_bytes=6 << 20)  # of which opening a file counts for 512 KiB
    folders.rules.set()
    assert folders.encrypt(many).counts["ok"] == 60
    callers = Counter(pid for pid, _ in folders.rules.calls())
    assert 1 <= len(callers) <= 4
    assert set(callers.values()) == {1}
    folders.encrypt(many, "single", double_wrap=False).raise_for_failures()
    folders.rules.set()
    verify_files(folders.root / "single", kms=folders.kms, engine=many, progress=False).raise_for_failures()
    assert len(folders.rules.calls()) == 60
    folders.check()


def test_what_the_file_systems_of_executors_lack(engine: SparkEngine, folders: Folders) -> None:
    """Content never depends on attributes, and the job tells of them once."""
    folders.make({"a": 100_000, "b/c": 100_000})
    folders.encrypt(engine, double_wrap=False).raise_for_failures()
    folders.rules.set(weak=True)
    out = folders.root / "spark-out"
    done = decrypt_files(folders.root / "ds", out, kms=folders.kms, engine=engine, progress=False)
    done.raise_for_failures()
    assert [text for text in done.warnings if "set times" in text] == done.warnings != []
    assert content(out) == content(folders.src)


# ------------------------------------------------------------------------------------------------- workers that die


@pytest.mark.parametrize("after", [0.0, 0.02], ids=["at once", "later"])
def test_workers_that_are_killed(engine: SparkEngine, folders: Folders, after: float) -> None:
    """Twice at one file, once at another, while others are written; every job survives that and loses nothing."""
    folders.make({str(i): 20_000_000 if i < 2 else 100_000 for i in range(24)})
    folders.dataset_id()
    ds = folders.root / "ds"
    kill = {"0": 1, "7": 2}
    folders.rules.set(kill=kill, kill_after=after)
    result = folders.encrypt(engine, double_wrap=False)
    result.raise_for_failures()
    assert max(row.attempt for row in result.rows) >= 1
    if after == 0:
        assert Counter(file for _, file in folders.rules.calls())["7"] > 2
    folders.check()

    folders.rules.set(kill=kill, kill_after=after)
    verify_files(ds, kms=folders.kms, engine=engine, progress=False).raise_for_failures()
    folders.rules.set(kill=kill, kill_after=after)
    out = folders.root / "spark-out"
    decrypt_files(ds, out, kms=folders.kms, engine=engine, progress=False).raise_for_failures()
    assert content(out) == content(folders.src)
    folders.rules.set(kill=kill, kill_after=after)
    rekey_files(ds, kms=folders.kms, engine=engine, progress=False).raise_for_failures()
    folders.check()


@pytest.mark.parametrize("op", ["encrypt", "decrypt"])
@pytest.mark.parametrize("master", ["local[2,4]", "local[2]"])
def test_poison_file_is_a_failed_row(session: Callable[[str], Any], folders: Folders, master: str, op: str) -> None:
    """It kills whoever touches it. Where a task has one attempt only, too."""
    engine = SparkEngine(session(master), target_bytes=8 << 20)
    folders.make({str(i): 100_000 for i in range(30)})
    folders.dataset_id()
    poison = {"7": 1000}
    if op == "encrypt":
        folders.rules.set(kill=poison)
        result = folders.encrypt(engine, double_wrap=False)
    else:
        folders.encrypt(LocalEngine(0), double_wrap=False)
        folders.rules.set(kill=poison)
        result = decrypt_files(folders.root / "ds", folders.out, kms=folders.kms, engine=engine, progress=False)
        assert {**content(folders.out), "7": b""} == {**content(folders.src), "7": b""}
    [bad] = result.failed
    assert Path(bad.src).name.startswith("7")
    assert bad.error_class == "WorkerDiedError"
    assert "SIGKILL" in (bad.error or "")
    assert result.counts == {"ok": 29, "skipped": 0, "failed": 1}
    assert leftovers(folders.root) == []
    folders.rules.set()
    folders.encrypt(engine, double_wrap=False)
    folders.check()


def test_attempts_side_by_side(folders: Folders) -> None:
    """A speculative one is done before the first, which then finds its files there, and is the one that counts."""
    folders.make({str(i): 100_000 for i in range(5)})
    folders.dataset_id()
    ds = folders.root / "ds"

    class Both:
        def run(self, context: Context, tasks: list[Task], _: int, report: Callable[[list[Row]], None]) -> None:
            for task in tasks:
                assert run_file(context, task, 1).status == "ok"
            report([run_file(context, task, 0) for task in tasks])

    folders.encrypt(Both()).raise_for_failures()
    folders.check()
    assert rekey_files(ds, kms=folders.kms, engine=Both(), progress=False).counts["ok"] == 5  # type: ignore[arg-type]
    folders.check()
    out = folders.root / "both"
    assert decrypt_files(ds, out, kms=folders.kms, engine=Both(), progress=False).counts["ok"] == 5  # type: ignore[arg-type]
    assert content(out) == content(folders.src)


@pytest.mark.parametrize("op", ["encrypt", "rekey", "rotate"])
def test_a_job_that_another_process_ends(folders: Folders, op: str) -> None:
    """Its next task finds that out before it publishes a file. The driver does not wait for the others."""
    folders.make({str(i): 1000 for i in range(5)})
    ds = folders.root / "ds"
    if op != "encrypt":
        folders.encrypt(LocalEngine(0), policy=Policy(kek_scope="files:1"))
    before = data_files(ds)

    class Ended:
        tasks_outlive_driver = True
        begun = 0

        def run(self, context: Any, tasks: list[Any], _: int, report: Callable[[list[Row]], None]) -> None:
            log = version_of(ds, folders.kms).log
            log.append(Idle(), lambda head, plans: Draft("sweep", ends=[context.job_id]))
            log.store.delete(plan_path(context.job_id))
            for task in tasks:
                self.begun += 1
                report([import_module(context.runner).run_file(context, task, 0)])

    engine: Any = Ended()
    common: dict[str, Any] = {"kms": folders.kms, "engine": engine, "progress": False}
    if op == "rotate":  # a table that is not copied is a row
        assert {row.error_class for row in rotate(ds, **common).failed} == {"JobEndedError"}
    else:
        with pytest.raises(JobEndedError, match="has ended"):
            folders.encrypt(engine) if op == "encrypt" else rekey_files(ds, **common)
    assert engine.begun == 1
    assert data_files(ds) == before
    assert [row.format for row in sweep(ds, kms=folders.kms).rows if row.format == "file"] == []


@pytest.mark.parametrize(
    ("text", "killed"),
    [
        ("Job aborted ... SparkException: Python worker exited unexpectedly (crashed). Consider", True),
        ("Job aborted ... ExecutorLostFailure (executor 1 exited caused by one of the running tasks)", True),
        ("Job aborted ... java.net.SocketException: Connection reset", True),
        ("Job aborted ... java.io.IOException: Broken pipe", True),
        ("[SPARK_JOB_CANCELLED] Job 3 cancelled part of cancelled job group", False),
        ("Job 3 cancelled because ... ExecutorLostFailure", False),
        ("Job aborted ... PythonException: Traceback ... ModuleNotFoundError: No module named 'ags_fast'", False),
    ],
)
def test_what_spark_says_when_workers_die(text: str, killed: bool) -> None:
    """Only then are files tried again, each in a process of its own."""
    assert spark_engine._killed(RuntimeError(text)) is killed


# ------------------------------------------------------------------------------------------------------ being stopped


def active_jobs(spark: Any) -> list[Any]:
    if isinstance(spark, SparkSession):
        return list(spark.sparkContext.statusTracker().getActiveJobsIds())
    return list(spark.interruptAll())  # nothing is left to interrupt


@pytest.mark.parametrize("by", ["callback", "signal"])
def test_ctrl_c_cancels_and_sweeps(spark: Any, folders: Folders, by: str) -> None:
    """No worker is at it any more when the exception arrives. What was finished is not done again."""
    folders.make({str(i): 500_000 for i in range(40)})
    few = SparkEngine(spark, target_bytes=4 << 20)
    folders.dataset_id()
    folders.rules.set(wait=0.3)

    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))

    def interrupt(rows: list[Row]) -> None:
        if by == "callback":
            raise KeyboardInterrupt
        if not timer.is_alive():
            timer.start()

    with pytest.raises(KeyboardInterrupt):
        folders.encrypt(few, double_wrap=False, progress=interrupt)
    assert leftovers(folders.root) == []
    assert active_jobs(spark) == []
    finished = {path.name: path.stat().st_ino for path in (folders.root / "ds").glob("*.ags")}
    assert 0 < len(finished) < 40
    calls = len(folders.rules.calls())
    time.sleep(1)
    assert len(folders.rules.calls()) == calls

    assert verify_files(folders.root / "ds", kms=folders.kms, engine=few, progress=False).counts["ok"] == 0
    result = folders.encrypt(few, double_wrap=False, resume="length")
    assert result.counts == {"ok": 40, "skipped": 0, "failed": 0}
    assert {name: (folders.root / "ds" / name).stat().st_ino for name in finished} == finished
    folders.check()


@pytest.mark.parametrize("wait", [0.0, 0.2])
def test_ctrl_c_before_spark_has_begun(
    spark: Any, engine: SparkEngine, folders: Folders, monkeypatch: pytest.MonkeyPatch, wait: float
) -> None:
    """There is no job yet that could be cancelled, and none is left to run later."""
    folders.make({str(i): 1000 for i in range(8)})
    target, name = (spark.sparkContext, "setJobGroup") if isinstance(spark, SparkSession) else (spark, "addTag")
    begin = getattr(target, name)

    def begin_late(*args: Any, **kwargs: Any) -> None:
        time.sleep(wait)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        begin(*args, **kwargs)

    monkeypatch.setattr(target, name, begin_late)
    folders.rules.set(wait=0.2)
    with pytest.raises(KeyboardInterrupt):
        folders.encrypt(engine)
    time.sleep(0.1)  # the thread that Spark has been told of takes its leave
    assert "ags_fast" not in {thread.name.split(" ")[0] for thread in threading.enumerate()}
    assert active_jobs(spark) == []
    written = content(folders.root / "ds")
    time.sleep(0.5)
    assert content(folders.root / "ds") == written
    monkeypatch.undo()
    assert folders.encrypt(engine, resume="length").counts["ok"] == 8
    folders.check()


def test_max_failures_cancels(spark: Any, folders: Folders) -> None:
    folders.make({str(i): 100_000 for i in range(40)})
    folders.encrypt(LocalEngine(0), double_wrap=False)
    for path in (folders.root / "ds").glob("*.ags"):
        os.truncate(path, 1000)
    folders.rules.set(wait=0.2)
    few = SparkEngine(spark, target_bytes=2 << 20)
    begun = time.monotonic()
    with pytest.raises(JobError, match="stopped after") as caught:
        verify_files(folders.root / "ds", kms=folders.kms, engine=few, max_failures=3, progress=False)
    assert 3 < len(caught.value.result.failed) < 40
    assert time.monotonic() - begun < 20
    assert active_jobs(spark) == []
    with pytest.raises(JobError, match="stopped after"):
        decrypt_files(folders.root / "ds", folders.out, kms=folders.kms, engine=few, on_error="raise", progress=False)
    assert content(folders.out) == {}


# ----------------------------------------------------------------------------------------------------------- settings


def test_file_of_a_stranger_is_not_replaced(spark: Any, folders: Folders) -> None:
    """Nor taken for ours because it has our size, by whatever attempt."""
    folders.make({str(i): 1000 for i in range(8)})
    folders.dataset_id()
    folders.encrypt(LocalEngine(0), double_wrap=False)
    folders.out.mkdir()
    (folders.out / "3").write_bytes(bytes(1000))
    folders.rules.set(kill={"5": 1, "4": 1})
    result = decrypt_files(folders.root / "ds", folders.out, kms=folders.kms, engine=SparkEngine(spark), progress=False)
    assert [(row.src, row.error_class) for row in result.failed] == [("3", "FileExistsError")]
    assert result.counts["ok"] == 7
    assert content(folders.out) == {**content(folders.src), "3": bytes(1000)}
    with pytest.raises(JobError, match="stopped after 8 failed"):
        decrypt_files(folders.root / "ds", folders.out, kms=folders.kms, engine=SparkEngine(spark), on_error="raise")


def test_sessions_that_will_not_do(session: Callable[[str], Any]) -> None:
    with pytest.raises(TypeError, match="SparkSession is required, not 'str'"):
        SparkEngine("local[2]")
    with pytest.raises(ValueError, match="target_bytes"):
        SparkEngine(session("local[2,4]"), target_bytes=0)


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize(
    ("master", "given", "expected"), [("local[2,4]", None, 1), ("local[2,4]", 3, 3), ("local[2]", None, 2)]
)
def test_threads_of_a_task(
    session: Callable[[str], Any],
    folders: Folders,
    master: str,
    given: int | None,
    expected: int,
    isolate: bool,
) -> None:
    """They are those that the engine is given, or spark.task.cpus; in a process of a file's own, too."""
    folders.make({"a": 10})
    folders.dataset_id()
    folders.rules.set(kill={"a": 2 if isolate else 0})
    folders.encrypt(SparkEngine(session(master), threads=given), double_wrap=False).raise_for_failures()
    assert folders.rules.threads()[-1] == expected


def test_recommended_conf(session: Callable[[str], Any]) -> None:
    """It is settings of Spark, by name and by what they take: one that is misspelt would do nothing, and not say so."""
    if not isinstance(found := session("local[2]"), SparkSession):  # has them
        for name, value in SparkEngine.recommended_conf().items():
            assert found.conf.get(name) == value
        return
    context = found.sparkContext
    known = context._jvm.org.apache.spark.internal.config.ConfigEntry  # type: ignore[union-attr]
    for name, value in SparkEngine.recommended_conf().items():
        assert context.getConf().get(name) == value
        assert known.findEntry(name) is not None, name
    assert known.findEntry("spark.python.unix.domain.socket.enable") is None


@pytest.mark.parametrize("isolate", [False, True])
def test_calls_are_accounted_for(engine: SparkEngine, tmp_path: Path, isolate: bool) -> None:
    """In Spark's workers, and in processes of a file's own: each call is told to the hook, and counted; or no key."""
    log = tmp_path / "log"
    kms = {**make_kms(tmp_path, keys=[str(log)]), "kms.audit-hook": "audit_hooks:note"}
    src = write_tree(tmp_path / "src", {str(n): bytes([n]) for n in range(4)})
    run = engine.run
    if isolate:
        engine.run = lambda context, *args: run(dataclasses.replace(context, isolate=True), *args)  # type: ignore[method-assign]
    options: dict[str, Any] = {"engine": engine, "kms": kms, "progress": False}
    done = encrypt_files(
        src, tmp_path / "ds", wrapping_key_id=str(log), double_wrap=False, fsync=False, verify_after=True, **options
    )
    done.raise_for_failures()
    assert done.kms_calls == events(log)
    assert {os.getpid()} < processes(log)
    log.with_suffix(".spared").write_text(str(os.getpid()))
    done = verify_files(tmp_path / "ds", **options)
    assert done.counts["ok"] == 0
    assert {row.error_class for row in done.failed} == {"UnaccountedError"}


# ----------------------------------------------------------------------------------------------------- keys stay home


def test_keys_are_in_nothing_that_spark_keeps(tmp_path: Path) -> None:
    check_canary(tmp_path, "local[2,4]")


def test_canary_would_be_found(tmp_path: Path) -> None:
    """However it is written down, and wherever in a file."""
    key = os.urandom(16)
    for i, form in enumerate(sorted(forms(key))):
        (tmp_path / "evidence" / str(i)).mkdir(parents=True)
        (tmp_path / "evidence" / str(i) / "file").write_bytes(bytes(1000) + form + b"tail")
        assert len(where([os.urandom(16), key], tmp_path)) == i + 1
    for before in range(5):
        text = base64.b64encode(os.urandom(before) + key + os.urandom(before))
        assert any(form in text for form in forms(key))
    assert where([os.urandom(16)], tmp_path) == set()
