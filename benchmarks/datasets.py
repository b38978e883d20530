"""Benchmarks of datasets: whole jobs, and a worker's part in a small file.

Every contender reads and writes 1 MiB at a time, to a temporary name that is renamed; nothing is synced to a disk.
Only our small files have no name until they are complete, where the file system can do that, and are then linked.
What our jobs do beyond the files is on the clock: listing, keys, plan, tables, version. The plain ones list, draw
and wrap a key for each file and collect what they did; where files are large they are not even made to do that.

``python -m benchmarks.datasets`` is what some cases start, to look at a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ags_fast import jobs
from ags_fast.dataset.access import Access
from ags_fast.engines.local import LocalEngine
from ags_fast.fs import Store
from ags_fast.jobs.work.context import Context, Task
from ags_fast.jobs.work.dispatch import run_file
from ags_fast.keys.cache import clear_cache
from ags_fast.spark import SparkEngine
from benchmarks import peers
from benchmarks.cases import MIB, Bench, nothing, random_data, size_name
from benchmarks.evp import ROOT
from benchmarks.jobs import room_for
from benchmarks.keystore import MASTER_KEY, keystore
from benchmarks.measure import Case, Contest, Group, Row, Run, SkippedError, below, clock
from benchmarks.plain_jobs import plain_copy, plain_decrypt, plain_encrypt, plain_job, plain_plan, plain_verify
from benchmarks.session import SetupError, java_version, spark_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import SparkSession

    from ags_fast.engines.base import Engine
    from ags_fast.jobs import JobResult

LARGE_FILES, LARGE = 16, 128 * MIB
SMALL_FILES, SMALL = 4000, 4 << 10
FOLDER_FILES = 500  # small ones in a folder
COUNTED = 100  # small files whose system calls are counted
HEAP = "9g"


def datasets(bench: Bench) -> Group:
    large, small = bench.size(LARGE), bench.size(SMALL_FILES)
    ones = [bench.size(size) for size in (2040 * MIB, 1020 * MIB)]  # an array of Java's is less than 2 GiB
    cases = [
        Case("datasets/spark/encrypt", functools.partial(encrypt_large_files, bench, LARGE_FILES, large), rounds=1 / 3),
        Case(
            "datasets/spark/verify",
            functools.partial(verify_large_files, bench, [(LARGE_FILES, large), (LARGE_FILES, 2 * large)]),
            rounds=1 / 3,
        ),
        Case("datasets/small", functools.partial(small_files, bench, small), rounds=1 / 3),
        Case("datasets/small-spark", functools.partial(small_files_on_spark, bench, small), rounds=1 / 3),
        Case("datasets/calls", functools.partial(system_calls, bench), rounds=0),
        Case(
            "datasets/local", functools.partial(tree_of_large_files, bench, LARGE_FILES // 2, 2 * large), rounds=1 / 3
        ),
        Case("datasets/one", functools.partial(one_tiny_file, bench), rounds=1 / 3),
        Case("datasets/memory", functools.partial(memory_of_one_file, bench, ones), rounds=0),
    ]
    return Group(
        "jobs, a task or process for each core; beside: see the row; best Py: the job over cryptography", cases
    )


# ---- trees, and a session


def make_tree(folder: Path, count: int, size: int, linked: bool = False) -> Path:
    """linked: all of them are one file, which takes less memory."""
    data = memoryview(random_data(64 * MIB))
    for i in range(count):
        below = folder / f"day={i // FOLDER_FILES}"
        below.mkdir(parents=True, exist_ok=True)
        path = below / f"part-{i:05d}.avro"
        if i == 0:
            first = path
        elif linked:
            path.hardlink_to(first)
            continue
        with open(path, "wb") as file:
            for begin in range(0, size, len(data)):
                file.write(data[: size - begin])
    return folder


@contextmanager
def workspace(bench: Bench, name: str) -> Iterator[Path]:
    folder = bench.scratch / f"datasets-{name}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def session_in(folder: Path, memory: str | None = None, classes: Path | None = None) -> Iterator[SparkSession]:
    with ExitStack() as stack:
        try:
            java_version()
            session = stack.enter_context(spark_session(folder / "spark", memory=memory, classes=classes))
        except SetupError as error:
            raise SkippedError(str(error).splitlines()[0]) from None
        yield session


def taken(work: Callable[[], object]) -> float:
    """The seconds it takes."""
    start = clock()
    work()
    return clock() - start


def fresh(folder: Path, work: Callable[[], object]) -> float:
    """The seconds of work that makes `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    return taken(work)


def done(result: JobResult) -> JobResult:
    result.raise_for_failures()
    return result


def encrypt(source: Path, dataset: Path, kms: dict[str, str], engine: Engine | None) -> JobResult:
    return done(
        jobs.encrypt_files(
            source, dataset, kms=kms, wrapping_key_id=MASTER_KEY, engine=engine, fsync=False, progress=False
        )
    )


def verify(dataset: Path, kms: dict[str, str], engine: Engine | None) -> JobResult:
    return done(jobs.verify_files(dataset, kms=kms, engine=engine, progress=False))


# ---- large files


@contextmanager
def encrypt_large_files(bench: Bench, count: int, size: int) -> Iterator[Contest]:
    with workspace(bench, "large") as folder, session_in(folder) as session:
        source, out = make_tree(folder / "source", count, size, linked=True), folder / "out"
        kms, engine = keystore(folder), SparkEngine(session)
        row = Row("datasets/spark/encrypt", f"Spark, {count} x {size_name(size)}; beside: copy", nbytes=count * size)

        def plain(task: Callable[..., Iterator[int]]) -> float:
            shutil.rmtree(out, ignore_errors=True)
            plan = plain_plan(source, out)
            return taken(lambda: plain_job(session, task, plan))

        runs: dict[tuple[str, str], Run] = {
            (row.name, "beside"): lambda: plain(plain_copy),
            (row.name, "best"): lambda: plain(plain_encrypt),
            (row.name, "ours"): lambda: fresh(out, lambda: encrypt(source, out, kms, engine)),
        }
        yield Contest([row], runs)


@contextmanager
def verify_large_files(bench: Bench, sizes: list[tuple[int, int]]) -> Iterator[Contest]:
    """Of two sizes: a job's fixed costs are a part of the smaller one, and hidden by the larger."""
    with workspace(bench, "verified") as folder, session_in(folder) as session:
        kms, engine = keystore(folder), SparkEngine(session)
        rows: list[Row] = []
        runs: dict[tuple[str, str], Run] = {}
        for count, size in sizes:
            name = f"datasets/spark/verify-{count}x{size >> 20}MiB"
            source, dataset, sealed = (folder / f"{what}-{name.replace('/', '-')}" for what in ("of", "ours", "plain"))
            make_tree(source, count, size, linked=True)
            encrypt(source, dataset, kms, engine)
            label = f"Spark, {count} x {size_name(size)}; beside: 2 x one"
            rows.append(Row(name, label, nbytes=count * size))
            local = worker_loop(dataset, kms, "verify")
            runs[name, "beside"] = functools.partial(lambda local: taken(local) / 2, local)
            if len(rows) == 1:  # once: it takes as much memory again
                plan = plain_plan(source, sealed)
                sum(plain_encrypt(plan))
                runs[name, "best"] = functools.partial(plain_job, session, plain_verify, plan)
            runs[name, "ours"] = nothing(verify, dataset, kms, engine)
        yield Contest(rows, runs)


def worker_loop(
    dataset: Path, kms: dict[str, str], op: str, other: Path | None = None, count: int | None = None
) -> Callable[[], None]:
    """What a worker process does with a version's files, or `count` of them, in one thread.

    With "encrypt", what made them from `other`.
    """
    context, tasks = worker_tasks(dataset, kms, op, other)
    tasks = tasks[:count]

    def loop() -> None:
        for task in tasks:
            row = run_file(context, task)
            if row.status != "ok":
                raise AssertionError(f"{row.src}: {row.error}")

    return loop


def worker_tasks(dataset: Path, kms: dict[str, str], op: str, other: Path | None) -> tuple[Context, list[Task]]:
    snapshot, rows = Access.of(dataset, kms).files()
    source, store = None if other is None else Store(other), snapshot.log.store
    context = Context(op, "job", snapshot.entry.dataset_id, store, snapshot.envelope, source, threads=1, fsync=False)
    return context, [Task(row) for row in rows]


@contextmanager
def tree_of_large_files(bench: Bench, count: int, size: int) -> Iterator[Contest]:
    what = f"{count} x {size_name(size)}"
    with workspace(bench, "local") as folder:
        source = make_tree(folder / "source", count, size)
        kms, out = keystore(folder), folder / "out"
        row = Row("datasets/local/encrypt", f"local engine, {what}; beside: cp -r", nbytes=count * size)
        cp = ["cp", "-r", str(source), str(out)]
        runs: dict[tuple[str, str], Run] = {
            (row.name, "beside"): lambda: fresh(out, lambda: subprocess.run(cp, check=True)),
            (row.name, "ours"): lambda: fresh(out, lambda: encrypt(source, out, kms, LocalEngine())),
        }
        yield Contest([row], runs)


# ---- small files


@contextmanager
def small_files(bench: Bench, count: int) -> Iterator[Contest]:
    with workspace(bench, "small") as folder:
        source = make_tree(folder / "source", count, SMALL)
        kms, dataset, sealed = keystore(folder), folder / "dataset", folder / "sealed"
        encrypt(source, dataset, kms, LocalEngine(0))
        plan = plain_plan(source, sealed)
        what = f"files of {size_name(SMALL)}, one process"
        opened = folder / "opened"
        others = {"encrypt": source, "verify": None, "decrypt": opened}
        names = [f"datasets/small/{op}" for op in others]
        rows = [Row(name, f"{op} {what}", "us") for name, op in zip(names, others, strict=True)]
        ours = {op: worker_loop(dataset, kms, op, other) for op, other in others.items()}

        def without_files(tree: Path, work: Callable[[], object]) -> float:
            for path in tree.glob("day=*/*"):  # the folders stay
                path.unlink()
            return taken(work)

        runs: dict[tuple[str, str], Run] = {
            (names[0], "beside"): lambda: without_files(sealed, lambda: sum(plain_copy(plan))),
            (names[0], "best"): lambda: without_files(sealed, lambda: sum(plain_encrypt(plan))),
            (names[0], "ours"): lambda: without_files(dataset, ours["encrypt"]),
            (names[1], "best"): lambda: sealed_first(lambda: sum(plain_verify(plan))),
            (names[1], "ours"): lambda: taken(ours["verify"]),
            (names[2], "best"): lambda: sealed_first(lambda: sum(plain_decrypt(plan))),
            (names[2], "ours"): lambda: without_files(opened, ours["decrypt"]),
        }

        def sealed_first(work: Callable[[], object]) -> float:
            """A copy may be where the streams were."""
            without_files(sealed, lambda: sum(plain_encrypt(plan)))
            return taken(work)

        yield Contest(rows, runs, calls=count)


@contextmanager
def small_files_on_spark(bench: Bench, count: int) -> Iterator[Contest]:
    with workspace(bench, "small") as folder, session_in(folder) as session:
        source = make_tree(folder / "source", count, SMALL)
        kms, engine = keystore(folder), SparkEngine(session)
        dataset, sealed, out = folder / "dataset", folder / "sealed", folder / "out"
        encrypt(source, dataset, kms, engine)
        plan = plain_plan(source, sealed)
        list(plain_encrypt(plan))
        what = f"{count} files of {size_name(SMALL)}"
        names = [f"datasets/small-spark/{op}" for op in ("encrypt", "verify")]
        rows = [Row(names[0], f"Spark encrypts {what}", "us"), Row(names[1], f"Spark verifies {what}", "us")]

        def written(task: Callable[..., Iterator[int]]) -> float:
            return fresh(out, lambda: plain_job(session, task, plain_plan(source, out)))

        runs: dict[tuple[str, str], Run] = {
            (names[0], "beside"): lambda: written(plain_copy),
            (names[0], "best"): lambda: written(plain_encrypt),
            (names[0], "ours"): lambda: fresh(out, lambda: encrypt(source, out, kms, engine)),
            (names[1], "best"): lambda: taken(lambda: plain_job(session, plain_verify, plan)),
            (names[1], "ours"): lambda: taken(lambda: verify(dataset, kms, engine)),
        }
        yield Contest(rows, runs, calls=count)


@contextmanager
def one_tiny_file(bench: Bench) -> Iterator[Contest]:
    """What a job costs, whatever it does. The KMS is asked each time."""
    with workspace(bench, "one") as folder, session_in(folder) as session:
        source = make_tree(folder / "source", 1, SMALL)
        kms, out = keystore(folder), folder / "out"

        def ours(engine: Engine | None) -> float:
            clear_cache()
            return fresh(out, lambda: encrypt(source, out, kms, engine))

        engines: dict[str, Engine] = {
            "spark": SparkEngine(session),
            "local": LocalEngine(1),
            "same process": LocalEngine(0),
        }
        rows = [Row(f"datasets/one/{name.replace(' ', '-')}", f"a job over one file: {name}", "ms") for name in engines]
        runs: dict[tuple[str, str], Run] = {
            (row.name, "ours"): functools.partial(ours, engine)
            for row, engine in zip(rows, engines.values(), strict=True)
        }
        runs[rows[0].name, "best"] = lambda: fresh(
            out, lambda: plain_job(session, plain_encrypt, plain_plan(source, out))
        )
        yield Contest(rows, runs)


# ---- system calls


@contextmanager
def system_calls(bench: Bench) -> Iterator[Contest]:
    """What strace counts of a process that does some files, less what it counts if there are half as many."""
    if not shutil.which("strace"):
        raise SkippedError("strace, which counts system calls, is not installed")
    with workspace(bench, "calls") as folder:
        kms = keystore(folder)
        sources = [make_tree(folder / f"source-{count}", count, SMALL) for count in (COUNTED, 2 * COUNTED)]
        for source in sources:
            encrypt(source, folder / f"dataset-{source.name}", kms, LocalEngine(0))
            plan = plain_plan(source, folder / f"sealed-{source.name}")
            sum(plain_encrypt(plan))
            (folder / f"plan-{source.name}").write_bytes(pickle.dumps(plan))

        def counted(what: str, op: str) -> float:
            if op == "encrypt":  # into folders without these files, as a job does; to replace one takes more
                for path in folder.glob(f"{'dataset' if what == 'ours' else 'sealed'}-*/day=*/*"):
                    path.unlink()
            few, many = (_count_calls(folder, what, op, source.name) for source in sources)
            per_file = {name: (many[name] - few[name]) / COUNTED for name in many}
            shown = ", ".join(f"{n:.2g} {name}" for name, n in sorted(per_file.items()) if n > 0.04)
            print(f"  {op} of a file, {'ours' if what == 'ours' else 'plain Python'}: {shown}")
            return sum(per_file.values())

        rows = [
            Row(f"datasets/calls/{op}", f"system calls, {op} a small file", "calls") for op in ("encrypt", "verify")
        ]
        runs: dict[tuple[str, str], Run] = {}
        for row in rows:
            for column in ("best", "ours"):
                run = functools.cache(functools.partial(counted, column, row.name.split("/")[-1]))
                runs[row.name, column] = run
        yield Contest(rows, runs)


def _count_calls(folder: Path, what: str, op: str, source: str) -> Counter[str]:
    table = folder / "strace"
    command = [sys.executable, "-m", "benchmarks.datasets", "worker", what, op, str(folder), source]
    traced = ["strace", "-f", "-c", "-o", str(table), *command]
    answer = subprocess.run(traced, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SkippedError(f"strace does not work here: {answer.stderr.strip().splitlines()[-1:]}")
    return Counter(
        {
            found[2]: int(found[1])
            for found in re.finditer(
                r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+)(?: +\d+)? +(?!total)(\w+)$", table.read_text(), re.M
            )
        }
    )


def worker(what: str, op: str, folder: Path, source: str) -> None:
    """The process that is traced. Its plan was made before."""
    if what == "ours":
        worker_loop(folder / f"dataset-{source}", keystore(folder), op, folder / source)()
    else:
        sum(
            (plain_encrypt if op == "encrypt" else plain_verify)(pickle.loads((folder / f"plan-{source}").read_bytes()))
        )


# ---- memory


@contextmanager
def memory_of_one_file(bench: Bench, sizes: list[int]) -> Iterator[Contest]:
    """Peaks of the JVM and its Python workers, each job in a new session. The recipe may die of a large file."""
    with ExitStack() as stack:
        rows: list[Row] = []
        runs: dict[tuple[str, str], Run] = {}
        for size in sizes:
            name = tempfile.TemporaryDirectory(prefix="ags_fast-", dir=room_for(bench, 3 * size))
            folder = Path(stack.enter_context(name))
            encrypt(make_tree(folder / "source", 1, size), folder / "dataset", keystore(folder), None)
            shutil.rmtree(folder / "source")
            row = Row(f"datasets/memory/{size >> 20}MiB", f"decrypt {size_name(size)}; beside: binaryFile", "MiB")
            rows.append(row)
            runs[row.name, "ours"] = functools.partial(_peak, "ours", folder)
            if "beside" not in (column for _, column in runs):  # of the largest file that it survives
                try:
                    _peak("recipe", folder)
                except JobDiedError as error:
                    print(f"  the binaryFile recipe of {size_name(size)} dies with a heap of {HEAP}: {error}")
                else:
                    runs[row.name, "beside"] = functools.partial(_peak, "recipe", folder)
        yield Contest(rows, runs)


class JobDiedError(Exception):
    """With it, the session."""


@functools.cache
def _peak(what: str, folder: Path) -> float:
    command = [sys.executable, "-m", "benchmarks.datasets", "memory", what, str(folder)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    log = (folder / "spark" / "spark.log").read_text(errors="replace")
    shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.rmtree(folder / "spark", ignore_errors=True)
    if answer.returncode:
        raise JobDiedError("".join(re.findall(r"\w*OutOfMemory.*|ERROR.*", log)[:1]))
    peaks: dict[str, int] = json.loads(answer.stdout.splitlines()[-1])
    print(f"  {what}: {', '.join(f'{process} {nbytes / MIB:.0f} MiB' for process, nbytes in peaks.items())}")
    return float(sum(peaks.values()))


def memory(what: str, folder: Path) -> None:
    """Decrypt the dataset in `folder`, in a session of this process; prints the peaks of what is below it."""
    kms, out = keystore(folder), folder / "out"
    with session_in(folder, HEAP) as session:
        watch = Watch()
        if what == "ours":
            done(
                jobs.decrypt_files(
                    folder / "dataset", out, kms=kms, engine=SparkEngine(session), fsync=False, progress=False
                )
            )
        else:
            context, tasks = worker_tasks(folder / "dataset", kms, "verify", None)
            out.mkdir()
            for task in tasks:
                entry = task.entry
                recipe(
                    session, context.dataset.full_path(entry.file), out, context.contents.dek(entry), entry.aad_prefix
                )
        peaks = watch.stop()
    nbytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if nbytes != sum(task.entry.plain_length for task in worker_tasks(folder / "dataset", kms, "verify", None)[1]):
        raise AssertionError(f"{nbytes} bytes came out")
    print(json.dumps(peaks))


def recipe(session: SparkSession, path: str, out: Path, key: bytes, prefix: bytes) -> None:
    """Decrypt a file as people do it: Spark reads it, and a function gets its bytes."""

    def decrypt(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            for name, content in zip(batch.column("path"), batch.column("content"), strict=True):
                data = peers.naive_decrypt(key, prefix, content.as_py())
                temporary = out / "temporary"
                temporary.write_bytes(data)
                temporary.replace(out / Path(name.as_py()).stem)
            yield batch.select(["path"])

    read = session.read.format("binaryFile").load(path).select("path", "content")
    read.mapInArrow(decrypt, "path string").collect()


class Watch:
    """The peak of each process below this one, by what it is."""

    def __init__(self) -> None:
        self._peaks: dict[tuple[str, int], int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, int]:
        self._done.set()
        self._thread.join()
        peaks: Counter[str] = Counter()
        for (command, _), nbytes in self._peaks.items():
            peaks[command] += nbytes
        return dict(peaks)

    def _work(self) -> None:
        while True:
            for pid in below(os.getpid()):
                with suppress(OSError):
                    status = Path(f"/proc/{pid}/status").read_text()
                    peak, name = re.search(r"VmHWM:\s+(\d+)", status), re.search(r"Name:\s+(\S+)", status)
                    if peak and name and name[1].startswith(("java", "python")):  # not a JVM's child before its exec
                        self._peaks[name[1], pid] = int(peak[1]) << 10
            if self._done.wait(0.05):
                return


GROUPS: dict[str, Callable[[Bench], Group]] = {"datasets": datasets}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.datasets", description=__doc__)
    parser.add_argument("what", choices=("worker", "memory"))
    parser.add_argument("arguments", nargs="+")
    options = parser.parse_args()
    if options.what == "worker":
        of, op, folder, source = options.arguments
        worker(of, op, Path(folder), source)
    else:
        memory(options.arguments[0], Path(options.arguments[1]))
