"""The tour, ``make run``: Avro files encrypted on Spark, read split by split, decrypted; Parquet; and how fast that is.

The three functions on top are what a user would write; the rest makes files, looks at what came out, and prints.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.backends.openssl import backend as cryptography_backend

import ags_fast
from ags_fast import AgsCodec, AgsReader, AgsWriter
from benchmarks import peers, tour_dataset, tour_parquet, tour_rotation
from benchmarks.measure import Contest, Row, Run, speed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import SparkSession

# --------------------------------------------------------------------------------------- what a user would write


def encrypt_on_spark(spark, source, names, target, key_file):
    """Encrypt files of the folder `source`; returns (name, length of the encrypted file) for each."""

    def encrypt(names):  # runs on the executors, once for each partition
        key = Path(key_file).read_bytes()  # where it is used: a key in the closure would travel with the job
        for name in names:
            path = Path(target, name + ".ags")
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(Path(source, name), "rb") as plain, AgsWriter(path, key, aad_prefix=name.encode()) as sealed:
                shutil.copyfileobj(plain, sealed, 1 << 20)
            yield name, sealed.file_length  # keep it where the key is kept: a reader must be told

    return spark.sparkContext.parallelize(names, min(len(names), 256)).mapPartitions(encrypt).collect()


def count_on_spark(spark, folder, lengths, key_file, split_size):
    """Read encrypted Avro files split by split; returns (name, number of records) for each split."""
    from ags_fast import avro

    def splits(files):
        key = Path(key_file).read_bytes()
        for name, length in files:
            path = Path(folder, name + ".ags")
            for start, end in avro.splits(path, key, length=length, aad_prefix=name.encode(), split_size=split_size):
                yield name, length, start, end

    def count(parts):  # runs on the executors
        key = Path(key_file).read_bytes()
        for name, length, start, end in parts:
            path = Path(folder, name + ".ags")
            records = avro.read_split(path, key, start, end, length=length, aad_prefix=name.encode())
            yield name, sum(1 for record in records)

    parts = list(splits(lengths))
    return spark.sparkContext.parallelize(parts, min(len(parts), 256)).mapPartitions(count).collect()


def decrypt_on_spark(spark, folder, lengths, target, key_file):
    """Decrypt files. A file appears, for its owner only, when all of it has proved authentic."""

    def decrypt(files):  # runs on the executors
        key = Path(key_file).read_bytes()
        for name, length in files:
            path = Path(target, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            try:
                with (
                    AgsReader(Path(folder, name + ".ags"), key, length=length, aad_prefix=name.encode()) as sealed,
                    open(partial, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as plain,
                ):
                    shutil.copyfileobj(sealed, plain, 1 << 20)
                partial.rename(path)
            finally:
                partial.unlink(missing_ok=True)

    spark.sparkContext.parallelize(lengths, min(len(lengths), 256)).foreachPartition(decrypt)


# ------------------------------------------------------------------------------------------------------ the files

ORDER = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "placed_at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "status", "type": {"type": "enum", "name": "Status", "symbols": ["NEW", "PAID", "SENT", "RETURNED"]}},
        {
            "name": "customer",
            "type": {
                "type": "record",
                "name": "Customer",
                "fields": [
                    {"name": "id", "type": "long"},
                    {"name": "email", "type": "string"},
                    {"name": "country", "type": {"type": "string", "doc": "ISO 3166"}},
                ],
            },
        },
        {
            "name": "lines",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Line",
                    "fields": [
                        {"name": "sku", "type": "string"},
                        {"name": "quantity", "type": "int"},
                        {"name": "price", "type": "double"},
                    ],
                },
            },
        },
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}
ROTATED = 12  # files in each dataset whose keys are rotated
PARQUET_ROWS = 2  # for each of the orders, in the Parquet file
MADE = [f"2026/{month:02}/orders.avro" for month in range(1, 9)]
OTHERS = {f"2026/{month:02}/scans/{n}.jpg": 4 << 20 for month in range(1, 4) for n in range(8)}  # bytes
OTHERS |= {"2026/README.txt": 1000, "2026/empty": 0, "2026/_SUCCESS": 0, "2026/01/.orders.avro.crc": 12}


def make_orders(spark: SparkSession, folder: Path, count: int) -> None:
    """Write `count` orders to the MADE files."""
    schema = ORDER
    parts = [(name, count * i // len(MADE), count * (i + 1) // len(MADE)) for i, name in enumerate(MADE)]

    def orders(begin: int, end: int) -> Iterator[dict[str, Any]]:
        draw = random.Random(begin)
        for number in range(begin, end):
            customer = int(draw.paretovariate(1.2) * 1000) % 100_000
            yield {
                "id": number,
                "placed_at": 1_767_225_600_000 + number * 997,
                "status": draw.choice(schema["fields"][2]["type"]["symbols"]),
                "customer": {
                    "id": customer,
                    "email": f"{customer:x}@example.org",
                    "country": draw.choice(("AT", "BR", "DE", "FR", "IN", "JP", "NG", "US")),
                },
                "lines": [
                    {
                        "sku": f"SKU-{draw.getrandbits(32):08x}",
                        "quantity": 1 + draw.getrandbits(2),
                        "price": draw.randrange(99, 99_999) / 100,
                    }
                    for _ in range(1 + draw.getrandbits(2))
                ],
                "note": "leave it with the neighbour, please" if draw.random() < 0.1 else None,
            }

    def write(parts: Iterable[tuple[str, int, int]]) -> None:
        import fastavro

        for name, begin, end in parts:
            path = folder / name
            path.parent.mkdir(parents=True)
            with open(path, "wb") as file:
                fastavro.writer(file, schema, orders(begin, end), codec="null")

    spark.sparkContext.parallelize(parts, len(parts)).foreachPartition(write)


def make_others(folder: Path) -> None:
    """What lies beside Avro files in a real tree."""
    for name, nbytes in OTHERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(nbytes))


def look_at(spark: SparkSession, folder: Path, names: list[str]) -> dict[str, tuple[int, str, int | None]]:
    """Size in bytes and SHA-256 of files, and how many records fastavro counts in those that are Avro."""

    def look(names: Iterable[str]) -> Iterator[tuple[str, tuple[int, str, int | None]]]:
        import fastavro

        for name in names:
            with open(folder / name, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                size = file.tell()
                records = None
                file.seek(0)
                if name.endswith(".avro") and fastavro.is_avro(file):
                    file.seek(0)
                    try:
                        records = sum(block.num_records for block in fastavro.block_reader(file))
                    except Exception as error:
                        raise ValueError(f"{name} is no whole Avro file: {error}") from error
            yield name, (size, digest, records)

    return dict(spark.sparkContext.parallelize(names, min(len(names), 256)).mapPartitions(look).collect())


def files_in(folder: Path) -> list[str]:
    """Regular files of a folder and its folders, relative to it. Links are not followed."""
    names = [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    ]
    for name in names:
        if not name.isprintable():
            raise TourError(f"{folder}: the name {name!r} is not printable UTF-8, and here names are AAD prefixes")
    if not names:
        raise TourError(f"{folder} has no files: give a folder with *.avro files, or no INPUT to have some made")
    return names


# -------------------------------------------------------------------------------------------------- where it goes


class TourError(Exception):
    """What the user can do something about, before anything is done."""


class JobError(Exception):
    """A Spark job failed; the message is what its task raised."""


class Output:
    """The folder with the results: encrypted/, decrypted/, the key, and a manifest of the encrypted files' lengths.

    What an earlier tour left is replaced, with its key kept, if this one makes each of its files again; so no run
    takes away what only an encrypted file still holds.
    """

    MADE_BY = "ags_fast tour"

    def __init__(self, root: Path, names: list[str]) -> None:
        self.encrypted = root / "encrypted"
        self.decrypted = root / "decrypted"
        self.key_file = root / "key"
        self._manifest = root / "manifest.json"
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            lost = self._earlier() - set(names)
            if lost:
                raise TourError(f"{root} holds {min(lost)}.ags of an earlier run, and this one would not make it again")
        self.write_manifest(dict.fromkeys(names))
        if not self.key_file.exists():
            _write_private(self.key_file, os.urandom(16))

    def _earlier(self) -> set[str]:
        with contextlib.suppress(OSError, ValueError):
            manifest = json.loads(self._manifest.read_bytes())
            if isinstance(manifest, dict) and manifest.get("made_by") == self.MADE_BY:
                return set(manifest["files"])
        raise TourError(f"{self._manifest.parent} is neither empty nor from an earlier tour: give a new folder")

    def write_manifest(self, lengths: dict[str, int | None]) -> None:
        files = {name: {"length": length, "aad_prefix": name} for name, length in lengths.items()}
        manifest = {"made_by": self.MADE_BY, "format": "AGS1", "files": files}
        _write_private(self._manifest, json.dumps(manifest, indent=1).encode())


def _write_private(path: Path, data: bytes) -> None:
    """A file for its owner only (mode 0600) that is there whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    partial.replace(path)


# ---------------------------------------------------------------------------------------------------------- Spark

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
        raise TourError(f"there is no Java here{f' ({java})' if java else ''}. {advice}") from None
    version = re.search(r'version "(?:1\.)?(\d+)', told)
    if version is None or int(version[1]) < OLDEST_JAVA:
        raise TourError(f"{java} is {told.splitlines()[0] if told else 'broken'}. {advice}")
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
        raise TourError("there is no pyspark here: pip install 'ags_fast[spark,avro]'") from None
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
        raise TourError(f"Spark does not start: {type(error).__name__}\n{tail}") from error
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


def _why(error: BaseException) -> str:
    """What a task raised, without the hundred lines around it."""
    raised = re.findall(r"^\w[\w.]*(?:Error|Exception|Interrupt)\b.*", str(error), re.MULTILINE)
    return next((line for line in raised if not line.startswith(("org.", "java."))), str(error)[:2000])


# ------------------------------------------------------------------------------------------------------- the tour

WIDTH = 78


class Steps:
    """Prints what happens: a title when a step begins, what it took when it ends, and tasks done in between."""

    def __init__(self) -> None:
        self._number = 0
        self.spark: SparkSession | None = None
        self.failed = False

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        self._number += 1
        line = f"{self._number}. {title} "
        print(line, end="", flush=True)
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(line, done), daemon=True)
        if sys.stdout.isatty() and self.spark:
            watcher.start()
        start = time.perf_counter()
        try:
            yield
        except BaseException as error:
            print()
            if type(error).__name__ == "Py4JJavaError":
                raise JobError(_why(error)) from error
            raise
        finally:
            seconds = time.perf_counter() - start
            done.set()
            if watcher.ident:
                watcher.join()
        print(f"{'.' * (WIDTH - len(line) - 8)}{seconds:6.1f} s")

    def _watch(self, line: str, done: threading.Event) -> None:
        assert self.spark is not None
        tracker = self.spark.sparkContext.statusTracker()
        shown = ""
        while not done.wait(0.2):
            stages = [info for info in map(tracker.getStageInfo, tracker.getActiveStageIds()) if info]
            shown = "".join(f"{info.numCompletedTasks} of {info.numTasks} tasks" for info in stages[:1])
            print(f"\r{line}{shown:<20}\r{line}", end="", flush=True)

    def say(self, text: str) -> None:
        print(f"   {text}")

    def check(self, text: str, problem: str) -> None:
        """A comparison, and what is wrong with it, if anything is. The tour goes on, and fails in the end."""
        self.failed |= bool(problem)
        self.say(f"WRONG: {problem}" if problem else f"ok: {text}")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def tour(
    source: Path | None, output: Path | None, records: int, rounds: int, scratch: Path, kill: bool = False
) -> bool:
    """Everything; returns whether all comparisons came out equal."""
    names = files_in(source) if source else [*MADE, *OTHERS]
    java = java_version()
    out = Output(output or scratch / "output", names)
    where = "in a temporary folder, which is removed in the end" if output is None else f"in {output}"
    print(f"ags_fast {ags_fast.__version__}, {ags_fast.openssl_version()}, {where}\n")
    steps = Steps()
    with contextlib.ExitStack() as stack:
        with steps.step("Spark starts"):
            classes = tour_parquet.jvm_classes()  # which the first time takes some seconds to compile
            spark = stack.enter_context(spark_session(scratch / "spark", kill, classes=classes))
        steps.spark = spark
        cpus = spark.sparkContext.defaultParallelism
        steps.say(f"Spark {spark.version} on Java {java}, {_count(cpus, 'task')} at a time")

        if source is None:
            source = scratch / "plain"
            with steps.step(f"{records:,} orders are written to Avro files"):
                make_orders(spark, source, records)
                make_others(source)
        with steps.step("The originals are hashed, and their records counted"):
            before = look_at(spark, source, names)
        records_of = {name: count for name, (_, _, count) in before.items() if count is not None}
        nbytes = sum(size for size, _, _ in before.values())
        steps.say(f"{_count(len(names), 'file')}, {len(records_of)} of them Avro, {nbytes / 1e6:,.1f} MB")

        with steps.step("A mapPartitions job encrypts them"):
            lengths = encrypt_on_spark(spark, source, names, out.encrypted, out.key_file)
        out.write_manifest(dict(lengths))
        more = sum(length for _, length in lengths) - nbytes
        steps.say(f"AES-128-GCM in blocks of 1 MiB; {more:,} bytes more, {100 * more / max(1, nbytes):.3f} %")

        if records_of:
            of_avro = sum(before[name][0] for name in records_of)
            split_size = min(64 << 20, max(1 << 20, of_avro // (8 * cpus)))  # some for each CPU, even of little
            with steps.step("Another reads the Avro files split by split, in parallel"):
                avro_lengths = [(name, length) for name, length in lengths if name in records_of]
                counts = count_on_spark(spark, out.encrypted, avro_lengths, out.key_file, split_size)
            read = dict.fromkeys(records_of, 0)
            for name, count in counts:
                read[name] += count
            wrong = [name for name, count in records_of.items() if read[name] != count]
            steps.check(
                f"{sum(read.values()):,} records in {_count(len(counts), 'split')}, as many as in each original",
                "".join(f"{name}: {read[name]} records of {records_of[name]}" for name in wrong[:1]),
            )

        with steps.step("A third decrypts them"):
            decrypt_on_spark(spark, out.encrypted, lengths, out.decrypted, out.key_file)
        with steps.step("What came out is hashed"):
            after = look_at(spark, out.decrypted, names)
        wrong = [name for name in names if after[name] != before[name]]
        steps.check(
            f"{_count(len(names), 'file')}, bit for bit the originals (SHA-256)",
            "".join(f"{name} is not the original" for name in wrong[:1]),
        )

        def equal(folder: Path) -> str:
            found = look_at(spark, folder, present) if (present := names_in(folder)) else {}
            expected = {name: facts for name, facts in before.items() if not hidden(name)}
            wrong = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
            return "".join(f"{name} is not the original" for name in wrong[:1])

        root = output or scratch / "output"
        tour_dataset.chapter(spark, steps, source, root, kill, equal)
        kms = tour_dataset.keystore(root)
        tour_parquet.chapter(spark, steps, kms, scratch / "parquet", PARQUET_ROWS * records, rounds, classes)
        tour_rotation.chapter(spark, steps, kms, source, scratch / "rotation", ROTATED)

        name, length = min(lengths, key=lambda row: (row[1] <= EMPTY_NBYTES, row[1]))
        with steps.step("A bit is flipped, and blocks are cut off"):
            noticed = tamper(out.encrypted / f"{name}.ags", out.key_file.read_bytes(), length, name.encode())
        for what, error in noticed:
            steps.check(f"{what}: {error}", "" if error else f"{what}: nobody noticed")

        if rounds:
            with steps.step("Side by side with pure Python"):
                rows = compare(spark, scratch / "table", cpus, rounds)
            print_table(rows)
    if output is not None:
        print_output(out, *lengths[0])
    return not steps.failed


def names_in(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


def hidden(name: str) -> bool:
    """What a dataset leaves out: markers and checksums."""
    return any(part[0] in "._" and "=" not in part for part in name.split("/")) or name.endswith(".crc")


EMPTY_NBYTES = ags_fast.encrypted_length(0)


def tamper(path: Path, key: bytes, length: int, aad_prefix: bytes) -> list[tuple[str, str]]:
    """What was done to copies of an encrypted file, and how a reader took it: no text if it did not notice."""
    sealed = path.read_bytes()
    flipped = bytearray(sealed)
    flipped[length // 2] ^= 1
    last_block = (len(sealed) - 9) // (ags_fast.encrypted_length(1 << 20) - 8)
    cut = sealed[: ags_fast.encrypted_length(last_block << 20) if last_block else 8]
    noticed = []
    for what, changed in (("one bit flipped", flipped), ("the last block cut off", cut)):
        try:
            with AgsReader(changed, key, length=length, aad_prefix=aad_prefix) as reader:
                reader.verify()
            noticed.append((what, ""))
        except ags_fast.IntegrityError as error:
            noticed.append((what, f"{type(error).__name__}, {str(error).partition(':')[0]}"))
    return noticed


def print_output(out: Output, name: str, length: int) -> None:
    root = out.key_file.parent
    words = ["ags-fast", "stream", "decrypt", out.encrypted / f"{name}.ags", "--key-file", out.key_file]
    words += ["--aad-prefix", name, "--length", length, "-o", Path(name).name]
    print(f"\nIn {root} are now: encrypted/, decrypted/, manifest.json with the lengths to trust, and the key, which")
    print("in real life is kept elsewhere. One file by hand:\n")
    print("   " + " \\\n      ".join([shlex.join(map(str, words[:4])), shlex.join(map(str, words[4:]))]))


# ------------------------------------------------------------------------------------------------------ the table

SIZE = 64 << 20  # bytes that are encrypted between buffers
SPARK_SIZE = 512 << 20  # and by a Spark job, from files to files


def compare(spark: SparkSession, folder: Path, cpus: int, rounds: int) -> list[Row]:
    """Ours, Python as people write it, and the best Python, taking turns."""
    key, prefix, block_size = os.urandom(16), b"one of the files", 1 << 20
    data = bytearray(os.urandom(block_size) * (SIZE // block_size))
    stream = bytearray(AgsCodec(key, aad_prefix=prefix).encrypt(data))
    length, out = len(stream), bytearray(SIZE)

    codec = AgsCodec(key, aad_prefix=prefix, threads=1)
    rows = [Row("seal", "encrypt() returns bytes", nbytes=SIZE), Row("open", "decrypt() returns bytes", nbytes=SIZE)]
    runs: dict[tuple[str, str], Run] = {
        ("seal", "ours"): _run(codec.encrypt, data),
        ("seal", "naive"): _run(peers.naive_encrypt, key, prefix, block_size, data),
        ("open", "ours"): _run(codec.decrypt, stream, length=length),
        ("open", "naive"): _run(peers.naive_decrypt, key, prefix, stream),
    }
    done = Contest(rows, runs).measure(rounds)

    for threads in sorted({1, min(cpus, 2)}):
        codec = AgsCodec(key, aad_prefix=prefix, threads=threads)
        with contextlib.closing(peers.BestPython(key, prefix, block_size, threads)) as best:
            label = f"to a buffer, {_count(threads, 'thread')}"
            rows = [
                Row("seal", f"encrypt_into {label}", nbytes=SIZE),
                Row("open", f"decrypt_into {label}", nbytes=SIZE),
            ]
            runs = {
                ("seal", "ours"): _run(codec.encrypt_into, data, stream),
                ("seal", "best"): _run(best.encrypt_into, data, stream),
                ("open", "ours"): _run(codec.decrypt_into, stream, out, length=length),
                ("open", "best"): _run(best.decrypt_into, stream, out),
            }
            done += Contest(rows, runs).measure(rounds)
    return done + compare_on_spark(spark, folder, cpus)


def _run(function: Callable[..., object], *args: Any, **named: Any) -> Run:
    """A call that lets go of its result within the time that is taken."""

    def run() -> None:
        function(*args, **named)

    return run


def compare_on_spark(spark: SparkSession, folder: Path, cpus: int) -> list[Row]:
    """The tour's encrypting job, and one that does the same in plain Python."""
    plain, sealed, key_file = folder / "plain", folder / "sealed", folder / "key"
    plain.mkdir(parents=True)
    _write_private(key_file, os.urandom(16))
    size = min(SPARK_SIZE, shutil.disk_usage(folder).free // 8) // (cpus << 20) << 20
    names = [str(i) for i in range(cpus)]
    for name in names:
        with open(plain / name, "wb") as file:
            piece = os.urandom(1 << 20)
            for _ in range(size >> 20):
                file.write(piece)

    def naive(names: Iterable[str]) -> None:
        key = key_file.read_bytes()
        for name in names:
            data = (plain / name).read_bytes()
            peers.naive_write(f"{sealed / name}.ags", key, name.encode(), 1 << 20, memoryview(data))

    def run_naive() -> None:
        spark.sparkContext.parallelize(names, len(names)).foreachPartition(naive)

    def run_ours() -> None:
        encrypt_on_spark(spark, plain, names, sealed, key_file)

    row = Row("spark", f"Spark job, {len(names)} x {size >> 20} MiB, file to file", nbytes=size * len(names))
    return Contest([row], {("spark", "ours"): run_ours, ("spark", "naive"): run_naive}).measure(5)


def print_table(rows: list[Row]) -> None:
    print(f"\n   {'GB/s, AES-128, blocks of 1 MiB':<42}{'ours':>5}{'best Python':>14}{'plain Python':>15}")
    for row in rows:
        cells = [f"{row.shown('ours'):5.1f}"]
        for column in ("best", "naive"):
            if column in row.samples:
                ratio = speed(row.samples["ours"], row.samples[column])[0]
                cells.append(f"{row.shown(column):5.1f} ({ratio:.2f}x)")
            else:
                cells.append("-")
        print("   {:<42}{}{:>14}{:>15}".format(row.label, *cells))
    theirs = f"cryptography {version('cryptography')}, {cryptography_backend.openssl_version_text()}"
    print(f"\n   The best run of each, and in brackets how many times as fast ours was.\n   Python: {theirs}")


# ------------------------------------------------------------------------------------------------ the command line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tour", description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", type=Path, metavar="DIR", help="files to encrypt instead of orders made on the spot")
    parser.add_argument("--output", type=Path, metavar="DIR", help="a new or empty folder to keep the results in")
    parser.add_argument(
        "--kill", action="store_true", help="on a cluster of two executors: kill one of them, and a Python worker"
    )
    parser.add_argument("--records", type=int, default=300_000, metavar="N", help="orders to make (default 300,000)")
    parser.add_argument(
        "--rounds", type=int, default=9, metavar="N", help="of the comparison; 0 leaves it out (default 9)"
    )
    args = parser.parse_args(argv)
    try:
        if args.input:
            args.input = args.input.resolve()
            if not args.input.is_dir():
                raise TourError(f"{args.input} is not a folder")
        if args.output:
            args.output = args.output.resolve()
        if (
            args.input
            and args.output
            and os.path.commonpath([args.input, args.output]) in map(str, (args.input, args.output))
        ):
            raise TourError(f"{args.output} and {args.input}: neither may be inside the other")
        with tempfile.TemporaryDirectory(prefix="ags-tour-") as scratch:
            return 0 if tour(args.input, args.output, args.records, args.rounds, Path(scratch), args.kill) else 1
    except TourError as error:
        print(f"tour: {error}", file=sys.stderr)
        return 2
    except JobError as error:
        print(f"tour: a Spark job failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tour: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
