"""What is measured from farther away: Avro through fastavro, memory, import, and Spark."""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ags_fast import AgsReader, AgsWriter, encrypted_length
from benchmarks import peers
from benchmarks.cases import BLOCK, KEYS, MIB, PREFIX, Bench, nothing, random_data, size_name, threads_name, touched
from benchmarks.evp import ROOT
from benchmarks.measure import Case, Contest, Group, Row, Run, SkippedError
from benchmarks.session import SetupError, java_version, spark_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

KEY = KEYS[0]
BUFFER = MIB  # fastavro reads a few bytes at a time

# ---- Avro

SCHEMA = {
    "type": "record",
    "name": "Reading",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "sensor", "type": "string"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "value", "type": "double"},
        {"name": "unit", "type": ["null", "string"]},
        {"name": "payload", "type": "bytes"},
    ],
}


def avro(bench: Bench) -> Group:
    count = bench.size(100_000)
    cases = [Case("avro", functools.partial(avro_files, bench, count), rounds=1 / 3)]
    return Group(f"{count:,} records; beside: fastavro with a plain file; best Py: with a seekable stream class", cases)


@contextmanager
def avro_files(bench: Bench, count: int) -> Iterator[Contest]:
    if not importlib.util.find_spec("fastavro"):
        raise SkippedError("fastavro is not installed")
    import fastavro

    from ags_fast import avro

    records = avro_records(count)
    plain, sealed, out = bench.scratch / "plain.avro", bench.scratch / "sealed.avro.ags", bench.scratch / "out.avro"
    with open(plain, "wb") as file:
        fastavro.writer(file, SCHEMA, records)
    length = avro.write(sealed, KEY, SCHEMA, records, aad_prefix=PREFIX)
    size = plain.stat().st_size

    def opened(column: str) -> BinaryIO | io.BufferedIOBase:
        if column == "beside":
            return open(plain, "rb", buffering=BUFFER)
        if column == "best":
            return io.BufferedReader(peers.PythonReader(sealed, KEY, length=length, aad_prefix=PREFIX), BUFFER)
        return io.BufferedReader(AgsReader(sealed, KEY, length=length, aad_prefix=PREFIX), BUFFER)

    def reading(reader: Callable[[Any], Iterable[object]], column: str) -> None:
        with opened(column) as file:
            deque(reader(file), maxlen=0)

    def read_split() -> None:
        deque(avro.read_split(sealed, KEY, 0, size, length=length, aad_prefix=PREFIX), maxlen=0)

    def write_plain() -> None:
        with open(out, "wb", buffering=BUFFER) as file:
            fastavro.writer(file, SCHEMA, records)

    def write_naive() -> None:
        file = io.BytesIO()
        fastavro.writer(file, SCHEMA, records)
        out.write_bytes(peers.naive_encrypt(KEY, PREFIX, BLOCK, file.getvalue()))

    rows = [
        Row("avro/blocks", "block_reader, no records decoded", "ms"),
        Row("avro/reader", "reader over AgsReader", "ms"),
        Row("avro/read_split", "avro.read_split", "ms"),
        Row("avro/write", "avro.write", "ms"),
    ]
    runs: dict[tuple[str, str], Run] = {
        ("avro/read_split", "beside"): functools.partial(reading, fastavro.reader, "beside"),
        ("avro/read_split", "ours"): read_split,
        ("avro/write", "beside"): write_plain,
        ("avro/write", "naive"): write_naive,
        ("avro/write", "ours"): nothing(avro.write, out, KEY, SCHEMA, records, aad_prefix=PREFIX),
    }
    for column in ("beside", "best", "ours"):
        runs["avro/blocks", column] = functools.partial(reading, fastavro.block_reader, column)
        runs["avro/reader", column] = functools.partial(reading, fastavro.reader, column)
    yield Contest(rows, runs)


def avro_records(count: int) -> list[dict[str, object]]:
    noise = bytes(random_data(64 * MIB)[: count + 200])
    return [
        {
            "id": i,
            "sensor": f"sensor-{i % 997}",
            "at": i * 1000,
            "value": i / 7,
            "unit": None,
            "payload": noise[i : i + 200],
        }
        for i in range(count)
    ]


# ---- memory


def memory(bench: Bench) -> Group:
    size = (1 if bench.quick else 10) << 30
    cases = [Case(f"memory/{n}t", functools.partial(peak_memory, bench, size, n), rounds=0) for n in bench.threads]
    return Group(f"peak beyond what was in use, {size >> 30} GiB through; beside: (threads + 2) blocks + 8 MiB", cases)


@contextmanager
def peak_memory(bench: Bench, size: int, threads: int) -> Iterator[Contest]:
    with tempfile.TemporaryDirectory(prefix="ags_fast-", dir=room_for(bench, size)) as folder:

        @functools.cache
        def peaks() -> dict[str, int]:
            command = [sys.executable, "-m", "benchmarks.memory", f"{folder}/stream.ags", str(size), str(threads)]
            answer: dict[str, int] = json.loads(subprocess.check_output(command, cwd=ROOT))
            return answer

        rows = [
            Row(f"memory/{threads}t/{what}", f"{what}, blocks of {size_name(BLOCK)}, {threads_name(threads)}", "MiB")
            for what in ("writer", "reader")
        ]
        runs: dict[tuple[str, str], Run] = {}
        for row in rows:  # bytes take the place of seconds
            what = row.name.split("/")[-1]
            runs[row.name, "beside"] = lambda: float((threads + 2) * BLOCK + 8 * MIB)
            runs[row.name, "ours"] = lambda what=what: float(max(peaks()[what], 1))  # type: ignore[misc]
        yield Contest(rows, runs)


def room_for(bench: Bench, size: int) -> Path:
    """A folder with room for a file: in memory if that leaves enough of it, else on a disk."""
    available = 0
    with suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
        available = int(found[1]) << 10 if found else 0
    if not Path("/proc/self/status").exists():
        raise SkippedError("peaks are read from /proc, which this system lacks")
    for folder, free in ((bench.scratch, available), (Path(tempfile.gettempdir()), sys.maxsize)):
        if min(free, shutil.disk_usage(folder).free) > size * 3 // 2:
            return folder
    raise SkippedError(f"{size >> 30} GiB do not fit into the temporary folders")


# ---- import


def imports(bench: Bench) -> Group:
    cases = [Case("import", functools.partial(import_time, bench), rounds=2)]
    return Group("Python starts, imports it and ends; beside: imports nothing; best Py: cryptography's AESGCM", cases)


@contextmanager
def import_time(bench: Bench) -> Iterator[Contest]:
    # An installed package has its bytecode beside it: here it is kept out of the tree.
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(bench.scratch)}

    def start(source: str) -> None:
        subprocess.run([sys.executable, "-c", source], env=environ, cwd=bench.scratch, check=True)

    row = Row("import/ags_fast", "import ags_fast", "ms")
    sources = {
        "beside": "pass",
        "best": "from cryptography.hazmat.primitives.ciphers.aead import AESGCM",
        "ours": "from ags_fast import AgsCodec, AgsReader, AgsWriter",  # the package alone imports nothing
    }
    yield Contest([row], {(row.name, column): functools.partial(start, source) for column, source in sources.items()})


# ---- Spark


def spark(bench: Bench) -> Group:
    cases = [Case("spark", functools.partial(spark_jobs, bench), rounds=1 / 3)]
    return Group("mapPartitions over files, a task for each core; beside: the job without encryption", cases)


def encrypt_task(column: str, files: Iterable[tuple[str, int]]) -> Iterator[int]:
    best, data = peers.BestPython(KEY, PREFIX, BLOCK, 1), bytearray()
    for path, size in files:
        with open(path, "rb", buffering=0) as plain:
            if column == "naive":
                peers.naive_write(f"{path}.{column}", KEY, PREFIX, BLOCK, memoryview(plain.read()))
            elif column == "best":
                data = data if len(data) == size else touched(size)
                plain.readinto(data)
                with open(f"{path}.{column}", "wb", buffering=0) as sealed:
                    best.write(sealed.fileno(), data)
            else:
                target = f"{path}.{column}"
                with open(target, "wb") if column == "beside" else AgsWriter(target, KEY, aad_prefix=PREFIX) as out:
                    shutil.copyfileobj(plain, out, BLOCK)
        yield size


def verify_task(column: str, files: Iterable[tuple[str, int]]) -> Iterator[int]:
    best, window = peers.BestPython(KEY, PREFIX, BLOCK, 1), touched(BLOCK)
    for path, size in files:
        if column == "naive":
            deque(peers.naive_read(path, KEY, PREFIX), maxlen=0)
        elif column == "ours":
            with AgsReader(path, KEY, length=encrypted_length(size), aad_prefix=PREFIX) as reader:
                reader.verify()
        else:
            with open(path, "rb", buffering=0) as file:
                if column == "best":
                    best.read(file.fileno(), size, [window])
                while column == "beside" and file.readinto(window):
                    pass
        yield size


@contextmanager
def spark_jobs(bench: Bench) -> Iterator[Contest]:
    folder = bench.scratch / "spark"
    folder.mkdir()
    large = [(str(folder / f"large-{i}"), bench.size(64 * MIB)) for i in range(8)]
    tiny = [(str(folder / f"tiny-{i}"), 8 << 10) for i in range(bench.size(4000))]
    for path, size in large + tiny:
        data = memoryview(random_data(64 * MIB))[:size]
        Path(path).write_bytes(data)
        with AgsWriter(f"{path}.ags", KEY, aad_prefix=PREFIX) as writer:
            writer.write(data)
    jobs = []
    for files, what in (
        (large, f"{len(large)} files of {size_name(large[0][1])}"),
        (tiny, f"{len(tiny)} files of 8 KiB"),
    ):
        jobs.append((f"encrypt {what}", encrypt_task, files))
        jobs.append((f"verify {what}", verify_task, [(f"{path}.ags", size) for path, size in files]))
    with ExitStack() as stack:
        try:
            java_version()
            session = stack.enter_context(spark_session(bench.scratch))
        except SetupError as error:
            raise SkippedError(str(error).splitlines()[0]) from None
        rows: list[Row] = []
        runs: dict[tuple[str, str], Run] = {}
        for label, task, files in jobs:
            row = Row(f"spark/{label.replace(' ', '-')}", label, "ms")
            parts = session.sparkContext.parallelize(files, max(bench.threads))
            rows.append(row)
            for column in ("beside", "naive", "best", "ours"):
                job = parts.mapPartitions(functools.partial(task, column))
                runs[row.name, column] = nothing(job.sum)
        yield Contest(rows, runs)


GROUPS: dict[str, Callable[[Bench], Group]] = {"avro": avro, "memory": memory, "import": imports, "spark": spark}
