"""Benchmarks of encrypted Iceberg tables: CPU time of PyIceberg on them, and on the same tables in plaintext."""

from __future__ import annotations

import functools
import itertools
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog

from ags_fast.iceberg import encrypt, expire, files, load_catalog, rekey
from ags_fast.jobs import LocalEngine
from ags_fast.parquet import Keys, encrypt_file, reencrypt_file
from benchmarks.jobs import room_for
from benchmarks.keystore import MASTER_KEY, keystore
from benchmarks.measure import Case, Contest, Group, Row, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

    from benchmarks.cases import Bench

FILES, ROWS, ROW_GROUP = 4, 600_000, 100_000  # of the large table, seven columns
SECOND_KEY = bytes(range(16))
APPENDS, APPENDED_ROWS = 40, 10
BESIDE = 64 << 10  # bytes of a file that a reader of one column may read beside the column
ROOM = 1 << 30
KEY_ID = "encryption.key-id"


def iceberg(bench: Bench) -> Group:
    """Make the group."""
    cases = [
        Case("iceberg/read", functools.partial(reading, bench), rounds=0.5),
        Case("iceberg/move", functools.partial(moving, bench), rounds=0.25),
        Case("iceberg/small", functools.partial(small_files, bench), rounds=0.5),
    ]
    return Group("PyIceberg on encrypted tables, CPU time; limit: the same tables in plaintext", cases)


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

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        kms = keystore(folder)
        self.catalogs: dict[str, Catalog] = {}
        for column in ("ours", "limit"):
            properties = {"uri": f"sqlite:///{folder}/{column}.db", "warehouse": f"file://{folder}/{column}"}
            made: Catalog = (
                load_catalog(column, kms=kms, type="sql", **properties)
                if column == "ours"
                else SqlCatalog(column, **properties)
            )
            made.create_namespace("bench")
            self.catalogs[column] = made

    def table(self, column: str, name: str, schema: pa.Schema, **properties: str) -> Table:
        """Create a table."""
        more = {KEY_ID: MASTER_KEY} if column == "ours" else {}
        return self.catalogs[column].create_table(f"bench.{name}", schema, properties={**more, **properties})


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
        for column in ("ours", "limit")
    }
    return Contest(made, runs)


@contextmanager
def reading(bench: Bench) -> Iterator[Contest]:
    count = ROWS // 10 if bench.quick else ROWS
    pair, tables = Pair(room_for(bench, ROOM) / "large"), {}
    for column in pair.catalogs:
        for i in range(FILES):
            data = rows(count, i * count)
            if not i:
                limit = {"write.parquet.row-group-limit": str(ROW_GROUP)}
                tables[column] = pair.table(column, "large", data.schema, **limit)
            tables[column].append(data)
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
    made.rows.append(Row("iceberg/read/bytes", f"bytes read for it; limit: and {BESIDE >> 10} KiB a file", "KiB"))
    for column in pair.catalogs:
        beside = FILES * BESIDE if column == "limit" else 0
        run = functools.partial(bytes_read, functools.partial(scan, column, selected_fields=("a",)), beside)
        made.runs["iceberg/read/bytes", column] = run
    yield made


@contextmanager
def moving(bench: Bench) -> Iterator[Contest]:
    """Re-key and encrypt a table in this process; limit: the same files by the functions for one file."""
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
        copy = pair.catalogs["ours"].register_table(f"bench.copy{next(names)}", plain.metadata_location)
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

    told = f"{FILES} files of {count:,} rows, in this process; limit:"
    yield Contest(
        [
            Row("iceberg/move/rekey", f"rekey {told} reencrypt_file", "ms"),
            Row("iceberg/move/encrypt", f"encrypt {told} encrypt_file", "ms"),
        ],
        {
            ("iceberg/move/rekey", "ours"): rekeyed,
            ("iceberg/move/rekey", "limit"): cpu(file_by_file),
            ("iceberg/move/encrypt", "ours"): encrypted,
            ("iceberg/move/encrypt", "limit"): cpu(plain_by_file),
        },
    )


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
