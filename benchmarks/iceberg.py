"""Benchmarks of encrypted Iceberg tables: CPU time of PyIceberg on them, and on the same tables in plaintext."""

from __future__ import annotations

import functools
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.catalog.sql import SqlCatalog

from ags_fast.iceberg import encrypt, expire, files, load_catalog, rekey
from ags_fast.jobs import LocalEngine
from ags_fast.parquet import Keys, encrypt_file, reencrypt_file
from benchmarks.jobs import room_for
from benchmarks.keystore import MASTER_KEY, keystore
from benchmarks.measure import Case, Contest, Group, Row, Run, SkippedError
from benchmarks.parquet import from_tests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

    from ags_fast.iceberg import TableFile
    from benchmarks.cases import Bench

FILES, ROWS, ROW_GROUP = 4, 600_000, 100_000  # of the large table, seven columns
SECOND_KEY = bytes(range(16))
APPENDS, APPENDED_ROWS = 40, 10
BESIDE = 64 << 10  # bytes of a file that a reader of one column may read beside the column
MANY = 24  # files of the table that workers move
ROOM = 1 << 30
KEY_ID = "encryption.key-id"


def iceberg(bench: Bench) -> Group:
    """Make the group."""
    cases = [
        Case("iceberg/read", functools.partial(reading, bench), rounds=0.5),
        Case("iceberg/move", functools.partial(moving, bench), rounds=0.25),
        Case("iceberg/workers", functools.partial(workers, bench), rounds=0.25),
        Case("iceberg/small", functools.partial(small_files, bench), rounds=0.5),
        Case("iceberg/s3", functools.partial(s3_reading, bench), rounds=0.5),
        Case("iceberg/java", functools.partial(java_reading, bench), rounds=0.25),
    ]
    about = (
        "PyIceberg on encrypted tables, CPU time; beside: the tables in plaintext; best Py: Spark with Iceberg's Java"
    )
    return Group(about, cases)


GROUPS = {"iceberg": iceberg}


def rows(count: int, first: int) -> pa.Table:
    """Rows of seven columns, of which the doubles and one of the integers do not compress."""
    random = np.random.default_rng(first)
    return pa.table(
        {
            "id": np.arange(first, first + count),
            "a": random.random(count),
            "b": random.integers(0, 1 << 60, count),
            "c": random.random(count),
            "d": random.integers(0, 1000, count),
            "name": [f"name {i % 1000} {i}" for i in range(count)],
            "at": pa.array(random.integers(0, 1 << 40, count), pa.timestamp("us")),
        }
    )


class Pair:
    """Two SQL catalogs in a folder, one with encrypted tables and one with plain ones."""

    def __init__(self, folder: Path, warehouse: str = "", **more: str) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._warehouse, self._more = folder, warehouse or f"file://{folder}", more
        self._kms = keystore(folder)
        self.catalogs = {column: self.catalog(column) for column in ("ours", "beside")}
        for made in self.catalogs.values():
            made.create_namespace_if_not_exists("bench")

    def catalog(self, column: str) -> Catalog:
        """Load a catalog, with a session of its own."""
        place = {"uri": f"sqlite:///{self._folder}/{column}.db", "warehouse": f"{self._warehouse}/{column}"}
        properties = {**place, **self._more}
        if column == "ours":
            mixed = {"encryption.plaintext-tables": "write"}
            return load_catalog(column, kms=self._kms, type="sql", **mixed, **properties)
        return SqlCatalog(column, **properties)

    def table(self, column: str, name: str, schema: pa.Schema, **properties: str) -> Table:
        """Create a table."""
        more = {KEY_ID: MASTER_KEY} if column == "ours" else {}
        return self.catalogs[column].create_table(f"bench.{name}", schema, properties={**more, **properties})

    def large(self, count: int) -> dict[str, Table]:
        """Create the large tables: FILES files of `count` rows."""
        tables: dict[str, Table] = {}
        for column in self.catalogs:
            for i in range(FILES):
                data = rows(count, i * count)
                if not i:
                    limit = {"write.parquet.row-group-limit": str(ROW_GROUP)}
                    tables[column] = self.table(column, "large", data.schema, **limit)
                tables[column].append(data)
        return tables


def cpu(function: Callable[[], object]) -> Callable[[], float]:
    """Return a run that tells its CPU time, of all threads."""

    def run() -> float:
        begun = time.process_time()
        function()
        return time.process_time() - begun

    return run


def contest(named: dict[str, tuple[str, Callable[[str], object]]]) -> Contest:
    """Return the contest of rows, by name: a label, and what a column does."""
    made = [Row(name, label, "ms") for name, (label, _) in named.items()]
    runs: dict[tuple[str, str], Run] = {
        (name, column): cpu(functools.partial(function, column))
        for name, (_, function) in named.items()
        for column in ("ours", "beside")
    }
    return Contest(made, runs)


@contextmanager
def reading(bench: Bench) -> Iterator[Contest]:
    count = ROWS // 10 if bench.quick else ROWS
    pair = Pair(room_for(bench, ROOM) / "large")
    tables = pair.large(count)
    few = f"id >= 1000 and id < {1000 + FILES * count // 1000}"

    def scan(column: str, **how: Any) -> object:
        return tables[column].scan(**how).to_arrow()

    made = contest(
        {
            "iceberg/read/scan": (f"scan {FILES} files of {count:,} rows, 7 columns", scan),
            "iceberg/read/column": ("one column of 7, doubles", functools.partial(scan, selected_fields=("a",))),
            "iceberg/read/filter": ("0.1 % of the rows, by a sorted column", functools.partial(scan, row_filter=few)),
        }
    )
    made.rows.append(Row("iceberg/read/bytes", f"bytes read for it; beside: and {BESIDE >> 10} KiB a file", "KiB"))
    for column in pair.catalogs:
        beside = FILES * BESIDE if column == "beside" else 0
        run = functools.partial(bytes_read, functools.partial(scan, column, selected_fields=("a",)), beside)
        made.runs["iceberg/read/bytes", column] = run
    yield made


@contextmanager
def moving(bench: Bench) -> Iterator[Contest]:
    """Re-key and encrypt a table in this process; beside: the same files by the functions for one file."""
    count = ROWS // 10 if bench.quick else ROWS
    folder = room_for(bench, ROOM) / "move"
    pair = Pair(folder)
    table = pair.table("ours", "rekeyed", rows(1, 0).schema)
    plain = pair.catalogs["ours"].create_table("bench.plain", rows(1, 0).schema)
    for i in range(FILES):
        table.append(rows(count, i * count))
        plain.append(rows(count, i * count))
    here, names, to = LocalEngine(0), itertools.count(), folder / "moved"
    new: Any = {"store_aad_prefix": False}

    def rekeyed() -> float:
        begun = time.process_time()
        rekey(table, what="data", engine=here).raise_for_failures()
        spent = time.process_time() - begun
        expire(table)
        return spent

    def encrypted() -> float:
        # A session that has seen a table encrypted takes no older metadata of that table.
        copy = pair.catalog("ours").register_table(f"bench.copy{next(names)}", plain.metadata_location)
        begun = time.process_time()
        result = encrypt(copy, wrapping_key_id=MASTER_KEY, engine=here)
        spent = time.process_time() - begun
        result.raise_for_failures()
        for row in result.rows:
            local_path(row.dst or "").unlink()
        return spent

    def file_by_file() -> None:
        for one in files(table):
            if one.kind == "data" and one.key_metadata is not None:
                old, prefix = Keys(footer=one.key_metadata.encryption_key), one.key_metadata.aad_prefix
                options = {**new, "aad_prefix": prefix, "new_aad_prefix": bytes(16)}
                reencrypt_file(local_path(one.path), to, old, Keys(footer=SECOND_KEY), **options)

    def plain_by_file() -> None:
        for task in plain.scan().plan_files():
            encrypt_file(local_path(task.file.file_path), to, Keys(footer=SECOND_KEY), aad_prefix=bytes(16), **new)

    told = f"{FILES} files of {count:,} rows, in this process; beside:"
    yield Contest(
        [
            Row("iceberg/move/rekey", f"rekey {told} reencrypt_file", "ms"),
            Row("iceberg/move/encrypt", f"encrypt {told} encrypt_file", "ms"),
        ],
        {
            ("iceberg/move/rekey", "ours"): rekeyed,
            ("iceberg/move/rekey", "beside"): cpu(file_by_file),
            ("iceberg/move/encrypt", "ours"): encrypted,
            ("iceberg/move/encrypt", "beside"): cpu(plain_by_file),
        },
    )


@contextmanager
def workers(bench: Bench) -> Iterator[Contest]:
    """Re-key by worker processes, by the clock; beside: as many threads that move the files, in this process."""
    count = ROWS // 10 if bench.quick else ROWS
    folder = room_for(bench, 3 * ROOM) / "workers"
    table = Pair(folder).table("ours", "many", rows(1, 0).schema)
    data = rows(count, 0)
    for _ in range(MANY):
        table.append(data)

    def rekeyed(number: int) -> float:
        begun = time.perf_counter()
        rekey(table, what="data", engine=LocalEngine(number)).raise_for_failures()
        spent = time.perf_counter() - begun
        expire(table)
        return spent

    def move(numbered: tuple[int, TableFile]) -> None:
        number, one = numbered
        assert one.key_metadata is not None
        old, new = Keys(footer=one.key_metadata.encryption_key), Keys(footer=SECOND_KEY)
        prefixes: dict[str, Any] = {"aad_prefix": one.key_metadata.aad_prefix, "new_aad_prefix": bytes(16)}
        to = folder / f"moved{number}"
        reencrypt_file(local_path(one.path), to, old, new, store_aad_prefix=False, threads=1, **prefixes)

    def bare(number: int) -> float:
        todo = list(enumerate(one for one in files(table) if one.kind == "data"))
        begun = time.perf_counter()
        with ThreadPoolExecutor(number) as pool:
            list(pool.map(move, todo))
        spent = time.perf_counter() - begun
        for i, _ in todo:
            (folder / f"moved{i}").unlink()
        return spent

    made = Contest([], {})
    for number in dict.fromkeys((1, len(os.sched_getaffinity(0)))):
        name, label = f"iceberg/workers/rekey/{number}w", f"rekey {MANY} files of {count:,} rows, workers: {number}"
        made.rows.append(Row(name, label, "ms"))
        made.runs[name, "ours"] = functools.partial(rekeyed, number)
        made.runs[name, "beside"] = functools.partial(bare, number)
    yield made


def local_path(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def bytes_read(function: Callable[[], object], beside: int) -> float:
    """Return how many bytes this process reads meanwhile, and `beside`."""

    def read_so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar

    begun = read_so_far()
    function()
    return read_so_far() - begun + beside


@contextmanager
def small_files(bench: Bench) -> Iterator[Contest]:
    pair, data = Pair(room_for(bench, ROOM) / "small"), rows(APPENDS * APPENDED_ROWS, 0)
    made = iter(range(1 << 30))

    def append(column: str) -> Table:
        table = pair.table(column, f"t{next(made)}", data.schema)
        for i in range(APPENDS):
            table.append(data.slice(i * APPENDED_ROWS, APPENDED_ROWS))
        return table

    tables = {column: append(column) for column in pair.catalogs}
    yield contest(
        {
            "iceberg/small/plan": (
                f"plan a scan of {APPENDS} manifests",
                lambda column: list(tables[column].scan().plan_files()),
            ),
            "iceberg/small/append": (f"{APPENDS} appends of {APPENDED_ROWS} rows to a new table", append),
        }
    )


@contextmanager
def missing_skips() -> Iterator[None]:
    """Skip a case where a helper of the tests says what it misses."""
    try:
        yield
    except BaseException as error:  # pytest's way to say that something is missing is no Exception
        if not isinstance(error, ImportError) and type(error).__name__ not in ("Skipped", "Failed"):
            raise
        raise SkippedError(str(error)) from None


@contextmanager
def s3_reading(bench: Bench) -> Iterator[Contest]:
    """Tables on moto's S3, a process of its own. Requests are counted by a proxy, which only their row goes through."""
    count = ROWS // 10 if bench.quick else ROWS // 4
    folder = room_for(bench, ROOM) / "s3"
    with ExitStack() as stack:
        with missing_skips():
            server = stack.enter_context(from_tests("servers").moto_s3())
            proxy = stack.enter_context(from_tests("iceberg_tables").S3Proxy(server.url))
        server.client().create_bucket(Bucket="bench")
        settings = {"s3.access-key-id": server.key, "s3.secret-access-key": server.secret, "s3.region": "us-east-1"}
        pair = Pair(folder, "s3://bench", **settings, **{"s3.endpoint": server.url})
        tables = pair.large(count)
        counted = Pair(folder, "s3://bench", **settings, **{"s3.endpoint": proxy.url})
        through = {column: catalog.load_table("bench.large") for column, catalog in counted.catalogs.items()}

        def requests(column: str, **how: Any) -> float:
            begun = proxy.requests
            through[column].scan(**how).to_arrow()
            return float(proxy.requests - begun)

        one: dict[str, Any] = {"selected_fields": ("a",)}
        made = contest(
            {
                "iceberg/s3/plan": ("S3: plan a scan", lambda column: list(tables[column].scan().plan_files())),
                "iceberg/s3/scan": (
                    f"S3: scan {FILES} files of {count:,} rows",
                    lambda column: tables[column].scan().to_arrow(),
                ),
                "iceberg/s3/column": ("S3: one column of 7", lambda column: tables[column].scan(**one).to_arrow()),
            }
        )
        for name, label, how in (("scan", "S3: requests of the scan", {}), ("column", "S3: and of one column", one)):
            made.rows.append(Row(f"iceberg/s3/{name}-requests", label, "calls"))
            for column in tables:
                made.runs[f"iceberg/s3/{name}-requests", column] = functools.partial(requests, column, **how)
        yield made


SUMS = ("id", "a", "b", "c", "d")
QUERY = f"SELECT {', '.join(f'sum(cast({name} AS double))' for name in SUMS)}, sum(length(name)) FROM db.large"
WARM = 6  # runs until the JVM has compiled what it runs


@contextmanager
def java_reading(bench: Bench) -> Iterator[Contest]:
    """Sums over an encrypted table by Iceberg's Java in Spark, on one core and warm, and by PyIceberg and pyarrow."""
    count = ROWS // 10 if bench.quick else ROWS
    folder = room_for(bench, ROOM) / "java"
    folder.mkdir()
    with ExitStack() as stack:
        with missing_skips():
            peer = from_tests("iceberg_java")
            fast = [option for option in peer.JVM if "TieredStopAtLevel" not in option]
            judge = stack.enter_context(peer.Judge(folder, fast))
        warehouse = {"uri": f"sqlite:///{folder}/ours.db", "warehouse": f"file://{folder}/ours"}
        catalog = load_catalog("java", kms=judge.kms, type="sql", **warehouse)
        catalog.create_namespace("bench")
        more = {KEY_ID: peer.MASTER, "write.parquet.row-group-limit": str(ROW_GROUP)}
        table = catalog.create_table("bench.large", rows(1, 0).schema, properties=more)
        for i in range(FILES):
            table.append(rows(count, i * count))
        judge.register("db.large", table.metadata_location)
        found: dict[str, Any] = {}

        def by_python() -> None:
            data = table.scan(selected_fields=(*SUMS, "name")).to_arrow()
            sums = [pc.sum(pc.cast(data[name], pa.float64(), safe=False)) for name in SUMS]
            found["ours"] = [one.as_py() for one in (*sums, pc.sum(pc.utf8_length(data["name"])))]

        def by_java() -> None:
            (found["best"],) = judge.sql(QUERY)

        def by_java_cpu() -> float:
            begun = cpu_of(judge.pid)
            by_java()
            return cpu_of(judge.pid) - begun

        for _ in range(WARM):
            by_java()
        label = f"sums of {len(SUMS) + 1} columns, {FILES} files of {count:,} rows"
        yield Contest(
            [Row("iceberg/java/cpu", label, "ms"), Row("iceberg/java/wall", "the same by the clock", "ms")],
            {
                ("iceberg/java/cpu", "ours"): cpu(by_python),
                ("iceberg/java/cpu", "best"): by_java_cpu,
                ("iceberg/java/wall", "ours"): by_python,
                ("iceberg/java/wall", "best"): by_java,
            },
            check=lambda column: np.allclose(found[column], found.get("ours", found[column]), rtol=1e-9),
        )


def cpu_of(pid: int) -> float:
    """Return the CPU time that all threads of another process have used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
