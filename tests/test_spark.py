"""ags_fast inside real Spark, whose workers are forked, used again, limited, killed and replaced.

The session that all tests share serves these but those that need a driver of their own.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import random
import secrets
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import programs.spark
import pytest
from spark_jobs import content_if_there, spark_env
from support import lengths_around, nonces_of, open_stream, pattern, program, run_python, seal_stream

import ags_fast
from ags_fast import AgsCodec, AgsReader, AgsWriter
from ags_fast.keys import StandardKeyMetadata

pytest.importorskip("pyspark")
fastavro = pytest.importorskip("fastavro")
if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
    pytest.skip("there is no Java runtime", allow_module_level=True)

from pyspark import TaskContext  # noqa: E402

from ags_fast import avro  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import SparkSession
    from spark_sessions import LocalSpark

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

CANARY = secrets.token_hex(8).encode()  # the key of all jobs here: 16 bytes that would be seen in any text
BLOCK_SIZE = 1 << 16


@pytest.fixture
def spark(local_spark: LocalSpark) -> SparkSession:
    return local_spark.session()


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key"
    path.touch(0o600)
    path.write_bytes(CANARY)
    return path


def on_executors(
    spark: SparkSession, function: Callable[[Iterable[Any]], Iterable[Any]], items: list[Any]
) -> list[Any]:
    """What `function` yields for each item, in a task of its own; in a new worker if it does not read its input."""
    return spark.sparkContext.parallelize(items, len(items)).mapPartitions(function).collect()


# ------------------------------------------------------------------------------------------------- inside a task


def test_default_threads_are_the_tasks_cpus(spark: SparkSession, key_file: Path, tmp_path: Path) -> None:
    """A task has one CPU unless spark.task.cpus says more, however many the machine has: no helper thread exists."""

    def count(_: Iterable[int]) -> Iterator[Any]:
        def threads() -> int:
            return len(os.listdir("/proc/self/task"))

        key = key_file.read_bytes()
        data = bytes(8 << 20)
        start = threads()
        sealed = AgsCodec(key, block_size=BLOCK_SIZE).encrypt(data)
        AgsCodec(key).decrypt(sealed, length=len(sealed))
        with AgsWriter(tmp_path / "x", key, block_size=BLOCK_SIZE) as writer:
            writer.write(data)
        with AgsReader(tmp_path / "x", key, length=writer.file_length) as reader:
            reader.read()
            reader.verify()
        by_default = threads()
        AgsCodec(key, block_size=BLOCK_SIZE, threads=3).encrypt(data)
        yield TaskContext.get().cpus(), start, by_default, threads()  # type: ignore[union-attr]

    assert on_executors(spark, count, [0]) == [(1, 1, 1, 3)]


def test_round_trip_of_files(spark: SparkSession, key_file: Path, tmp_path: Path) -> None:
    plain = {f"{size}.bin": pattern(size, size) for size in lengths_around(BLOCK_SIZE)}
    for name, data in plain.items():
        (tmp_path / name).write_bytes(data)

    def encrypt(names: Iterable[str]) -> Iterator[tuple[str, int]]:
        key = key_file.read_bytes()
        for name in names:
            target = tmp_path / f"{name}.ags"
            with (
                open(tmp_path / name, "rb") as file,
                AgsWriter(target, key, aad_prefix=name.encode(), block_size=BLOCK_SIZE) as writer,
            ):
                shutil.copyfileobj(file, writer, 100_000)
            yield name, writer.file_length

    def decrypt(rows: Iterable[tuple[str, int]]) -> Iterator[tuple[str, bytes]]:
        key = key_file.read_bytes()
        for name, length in rows:
            with ags_fast.open(tmp_path / f"{name}.ags", key=key, length=length, aad_prefix=name.encode()) as reader:
                reader.verify()
                yield name, reader.read()

    lengths = on_executors(spark, encrypt, list(plain))
    for name, length in lengths:
        stream = (tmp_path / f"{name}.ags").read_bytes()
        assert len(stream) == length
        assert open_stream(stream, CANARY, name.encode()) == plain[name]
    assert dict(on_executors(spark, decrypt, lengths)) == plain


def test_splits_read_in_parallel(spark: SparkSession, key_file: Path, tmp_path: Path) -> None:
    schema = {"type": "record", "name": "r", "fields": [{"name": "id", "type": "long"}]}
    records = [{"id": i} for i in range(50_000)]
    path = tmp_path / "r.avro.ags"
    length = avro.write(path, CANARY, schema, records, block_size=4096)
    ranges = avro.splits(path, CANARY, length=length, split_size=8192)
    assert len(ranges) > 10

    def read(ranges: Iterable[tuple[int, int]]) -> Iterator[dict[str, int]]:
        for start, end in ranges:
            yield from avro.read_split(path, key_file.read_bytes(), start, end, length=length)

    assert on_executors(spark, read, ranges) == records
    random.Random(0).shuffle(ranges)
    assert sorted(row["id"] for row in on_executors(spark, read, ranges)) == [row["id"] for row in records]


def test_integrity_error_fails_the_task_by_name(spark: SparkSession, key_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.ags"
    stream = bytearray(seal_stream(bytes(100), CANARY))
    stream[50] ^= 1
    path.write_bytes(stream)

    def read(_: Iterable[int]) -> Iterator[bytes]:
        with ags_fast.open(path, key=key_file.read_bytes(), length=len(stream)) as reader:
            yield reader.read()

    with pytest.raises(Exception, match=r"IntegrityError: block 0 does not authenticate"):
        on_executors(spark, read, [0])


# -------------------------------------------------------------------------------------------- workers come and go


def test_worker_killed_while_it_writes(spark: SparkSession, key_file: Path, tmp_path: Path) -> None:
    """No file is at the path, and the retry writes it."""
    path = tmp_path / "x.ags"
    data = pattern(40 * BLOCK_SIZE + 7)

    def write(_: Iterable[int]) -> Iterator[tuple[int, list[str], int]]:
        found = os.listdir(tmp_path)
        with AgsWriter(path, key_file.read_bytes(), block_size=BLOCK_SIZE) as writer:
            writer.write(data[: len(data) // 2])
            if TaskContext.get().attemptNumber() == 0:  # type: ignore[union-attr]
                os.kill(os.getpid(), signal.SIGKILL)
            writer.write(data[len(data) // 2 :])
        yield TaskContext.get().attemptNumber(), found, writer.file_length  # type: ignore[union-attr]

    [(attempt, found, length)] = on_executors(spark, write, [0])
    assert attempt == 1
    [partial] = found  # what a killed writer leaves, and nobody can take for a stream
    assert partial.endswith(".agstmp")
    with pytest.raises(ags_fast.AgsError):
        AgsReader(tmp_path / partial, CANARY, length=None)
    assert open_stream(path.read_bytes(), CANARY) == data
    assert length == path.stat().st_size


def test_worker_that_forks(spark: SparkSession, key_file: Path, tmp_path: Path) -> None:
    """As multiprocessing in a user's function does. Parent and child go on, with nonces of their own."""
    data = bytes(1000 * 4096)

    def fork(_: Iterable[int]) -> Iterator[int]:
        codec = AgsCodec(key_file.read_bytes(), block_size=4096, threads=2)
        codec.encrypt(data)
        assert len(os.listdir("/proc/self/task")) == 2  # the caller, and a helper that the child will not have
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that hangs
            with open(tmp_path / "child", "wb") as file:
                file.write(codec.encrypt(data))
            os._exit(len(os.listdir("/proc/self/task")))
        (tmp_path / "parent").write_bytes(codec.encrypt(data))
        yield os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert on_executors(spark, fork, [0]) == [2]  # a helper of its own
    streams = [(tmp_path / name).read_bytes() for name in ("child", "parent")]
    assert [open_stream(stream, CANARY) for stream in streams] == [data, data]
    nonces = [nonce for stream in streams for nonce in nonces_of(stream)]
    assert len(set(nonces)) == 2000


def test_worker_serves_several_jobs(spark: SparkSession, key_file: Path) -> None:
    """Spark keeps workers for the next job, with the module and its pool as they are."""

    def work(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
        for _ in numbers:  # a worker whose input is not read to its end is not used again
            codec = AgsCodec(key_file.read_bytes(), block_size=4096, threads=2)
            sealed = codec.encrypt(bytes(1 << 20))
            assert codec.decrypt(sealed, length=len(sealed)) == bytes(1 << 20)
            yield os.getpid(), codec.sealed

    jobs = [on_executors(spark, work, [0])[0] for _ in range(5)]  # more than there are idle workers
    messages: dict[int, list[int]] = {}
    for pid, sealed in jobs:
        messages.setdefault(pid, []).append(sealed)
    again = [counts for counts in messages.values() if len(counts) > 1]
    assert again, jobs
    for counts in again:  # the count of the key's messages lives as long as the process
        assert {b - a for a, b in itertools.pairwise(counts)} == {256}


# ----------------------------------------------------------------------------------------------- keys stay at home


@pytest.mark.parametrize("what", ["codec", "reader", "writer", "metadata"])
def test_what_holds_a_key_does_not_travel(spark: SparkSession, what: str) -> None:
    stream = seal_stream(b"", CANARY)
    holder = {
        "codec": lambda: AgsCodec(CANARY),
        "reader": lambda: AgsReader(stream, CANARY, length=len(stream)),
        "writer": lambda: AgsWriter(io.BytesIO(), CANARY),
        "metadata": lambda: StandardKeyMetadata(CANARY),
    }[what]()
    with pytest.raises(Exception, match=r"never pickled: .*\b(open|build|send)\b") as caught:
        spark.sparkContext.parallelize([0], 1).map(lambda _: repr(holder)).collect()
    assert not shows(CANARY, str(caught.value).encode())
    if what == "writer":
        holder.abort()  # type: ignore[attr-defined]


def shows(key: bytes, data: bytes) -> bool:
    """Whether a key can be seen in bytes, as it is or as text."""
    base64_text = base64.b64encode(key).rstrip(b"=")[:-1]  # its last character depends on what follows
    return any(form in data for form in (key, key.hex().encode(), key.hex().upper().encode(), base64_text))


def test_keys_stay_out_of_what_spark_writes_down(
    spark: SparkSession, local_spark: LocalSpark, key_file: Path, tmp_path: Path
) -> None:
    """Its event log and local folders, after this test's jobs and those before it."""
    controls = {place: secrets.token_hex(8).encode() for place in ("broadcast", "closure", "shuffle")}
    broadcast = spark.sparkContext.broadcast(controls["broadcast"])
    in_shuffle = controls["shuffle"]
    in_closure = controls["closure"] * 100_000  # a closure of more than 1 MiB becomes a broadcast

    def write(names: Iterable[str]) -> Iterator[tuple[str, int, bytes]]:
        assert broadcast.value
        assert in_closure
        for name in names:
            with AgsWriter(tmp_path / name, key_file.read_bytes()) as writer:
                writer.write(bytes(1000))
            yield name, writer.file_length, in_shuffle

    def fail(names: Iterable[str]) -> Iterator[bytes]:
        for name in names:
            yield AgsReader(tmp_path / name, key_file.read_bytes(), length=None, aad_prefix=b"wrong").read()

    rows = spark.sparkContext.parallelize(["a", "b"], 2).mapPartitions(write).repartition(2).collect()
    assert sorted(rows) == [("a", 1036, in_shuffle), ("b", 1036, in_shuffle)]
    with pytest.raises(Exception, match="IntegrityError"):
        on_executors(spark, fail, ["a"])
    local_spark.wait_for_events()

    written = {path: content_if_there(path) for path in local_spark.folder.rglob("*") if path.is_file()}
    assert any(b"IntegrityError" in data for path, data in written.items() if local_spark.events in path.parents)
    for place, control in controls.items():  # we look where keys would be, and as they would be
        assert any(shows(control, data) for data in written.values()), place
    assert [path for path, data in written.items() if shows(CANARY, data)] == []


# ------------------------------------------------------------------------------------------------------ Avro Java


@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_splits_are_those_of_avro_java(spark: SparkSession, tmp_path: Path, codec: str) -> None:
    """The records of each split, by Iceberg's rule: DataFileReader.sync(start), then until pastSync(end)."""
    schema = {
        "type": "record",
        "name": "r",
        "fields": [{"name": "id", "type": "long"}, {"name": "text", "type": "string"}],
    }
    draw = random.Random(7)
    records = [{"id": i, "text": draw.randbytes(draw.randrange(20)).hex()} for i in range(60)]
    plain = tmp_path / "plain.avro"
    with plain.open("wb") as file:
        fastavro.writer(file, schema, records, codec=codec, sync_interval=150)
    data = plain.read_bytes()
    stream = AgsCodec(CANARY, block_size=100).encrypt(data)
    jvm = spark.sparkContext._jvm

    def java_ids(start: int, end: int) -> list[int]:
        reader = jvm.org.apache.avro.file.DataFileReader(  # type: ignore[union-attr]
            jvm.java.io.File(str(plain)),  # type: ignore[union-attr]
            jvm.org.apache.avro.generic.GenericDatumReader(),  # type: ignore[union-attr]
        )
        try:
            reader.sync(start)
            ids = []
            while reader.hasNext() and not reader.pastSync(end):
                ids.append(reader.next().get("id"))
            return ids
        finally:
            reader.close()

    markers = [at for at in range(len(data)) if data.startswith(data[-16:], at)]
    assert len(markers) > 7
    layouts = [[i * len(data) // parts for i in range(1, parts)] for parts in (1, 2, 3, 7, 20)]
    layouts += [[marker + by for marker in markers[:: 1 + by % 3]] for by in (-1, 0, 1, 15, 16, 17)]
    for layout in layouts:
        edges = sorted({0, len(data), *(cut for cut in layout if cut < len(data))})
        ids = []
        for start, end in itertools.pairwise(edges):
            rows = avro.read_split(stream, CANARY, start, end, length=len(stream))
            of_split = [row["id"] for row in rows]
            assert of_split == java_ids(start, end), (start, end)
            ids += of_split
        assert ids == list(range(60))


# -------------------------------------------------------------------------------------------------- other drivers


@pytest.mark.more
def test_driver_with_a_busy_engine_starts_spark() -> None:
    """It forks the JVM while helper threads work. Its tasks have two CPUs and 512 MiB of address space."""
    told = run_python(
        program(programs.spark.start_beside_threads),
        timeout=240,
        **spark_env(),
    )
    assert json.loads(told) == [[2, 2, 64, 512]]


# ------------------------------------------------------------------------------------------------------- the tour

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.more
@pytest.mark.timeout(600)
def test_tour_of_a_users_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice into one folder; the second time a decrypted file is changed behind the tour's back, which it must see."""
    source, output, scratch = tmp_path / "in", tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    schema = {"type": "record", "name": "r", "fields": [{"name": "id", "type": "long"}]}
    for name, count in {"orders.avro": 3000, "deep/er/no records.avro": 0, "ümlaut & more.avro": 1}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        with open(source / name, "wb") as file:
            fastavro.writer(file, schema, ({"id": i} for i in range(count)), codec="deflate", sync_interval=500)
    (source / "empty").touch()
    (source / "notes.txt").write_bytes(pattern(3_000_000))

    told = run_python(
        program(programs.spark.tour_twice, source, output),
        timeout=540,
        PYTHONPATH=os.pathsep.join([str(ROOT), spark_env()["PYTHONPATH"]]),
        TMPDIR=str(scratch),
    )
    good, bad = told.split("=" * 20)
    assert "5 files, 3 of them Avro" in good
    assert "ok: 2,000 rows, equal to the original's" in good  # by pyarrow and by parquet-java
    assert "parquet-java is left out" not in good
    assert "ok: 3,001 records" in good
    assert "ok: 5 files, bit for bit the originals" in good
    assert "WRONG" not in good
    assert "WRONG: notes.txt is not the original" in bad

    manifest = json.loads((output / "manifest.json").read_bytes())
    key = (output / "key").read_bytes()
    assert {path.stat().st_mode & 0o777 for path in (output / "key", output / "manifest.json")} == {0o600}
    assert len(key) == 16
    assert not shows(key, told.encode() + (output / "manifest.json").read_bytes())
    plain = {path.relative_to(source).as_posix(): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == set(plain)
    for name, entry in manifest["files"].items():
        stream = (output / "encrypted" / f"{name}.ags").read_bytes()
        assert len(stream) == entry["length"]
        assert open_stream(stream, key, entry["aad_prefix"].encode()) == plain[name]

    monkeypatch.chdir(tmp_path)
    listing, _, by_hand = good.partition("What the dataset has:")[2].partition("One file by hand:")
    shown = subprocess.run(["sh", "-c", listing], check=True, capture_output=True, text=True).stdout
    assert "orders.avro" in shown
    for _ in range(2):  # whoever pastes a command may paste it again
        subprocess.run(["sh", "-c", by_hand], check=True)
    command = shlex.split(by_hand.replace("\\\n", " "))
    name = command[command.index("--aad-prefix") + 1]
    assert plain[name]  # an empty file would show nothing
    assert Path(command[-1]).read_bytes() == plain[name]


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("no java", "apt-get install openjdk-17-jre-headless"),
        ("old java", 'is java version "1.8.0_402"'),
        ("no input", "is not a folder"),
        ("empty input", "has no files"),
        ("output in use", "neither empty nor from an earlier tour"),
        ("output of other files", "b.ags of an earlier run"),
        ("output in input", "neither may be inside the other"),
    ],
)
def test_tour_that_cannot_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str, told: str
) -> None:
    """It says why, on the error stream, before Spark starts or anything is written."""
    monkeypatch.syspath_prepend(ROOT)
    tour = pytest.importorskip("benchmarks.tour.__main__")
    monkeypatch.setattr(tour, "spark_session", lambda scratch: pytest.fail("Spark starts"))
    source, output = tmp_path / "in", tmp_path / "out"
    if case != "no input":
        source.mkdir()
    if case != "empty input":
        (source / "a" if source.exists() else tmp_path / "a").touch()
    if case == "no java":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("JAVA_HOME", raising=False)
    if case == "old java":
        java = tmp_path / "home" / "bin" / "java"
        java.parent.mkdir(parents=True)
        java.write_text("#!/bin/sh\necho 'java version \"1.8.0_402\"' >&2\n")
        java.chmod(0o755)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    if case == "output in use":
        output.mkdir()
        (output / "key").write_bytes(b"somebody's")
    if case == "output of other files":
        tour.Output(output, ["a", "b"])
    if case == "output in input":
        output = source / "out"
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert tour.main(["--input", str(source), "--output", str(output)]) == 2
    assert told in capsys.readouterr().err
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
