"""Tables that Iceberg's Java wrote, with the rows that Java reads in them. They are small, and made at their first use.

`Corpus(judge)["types"]` is a `Made`. Most are encrypted; those that are not, and those that PyIceberg cannot read by
itself, are in sets of names below.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
import uuid
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from iceberg_java import JAVA

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from iceberg_java import Judge

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Made:
    """A table of the corpus.

    rows: what Java reads in the newest snapshot, sorted by id.
    versions: the same of other snapshots, by snapshot id, branch or tag.
    """

    name: str
    metadata_location: str
    rows: Rows
    versions: Mapping[int | str, Rows]


def comparable(rows: Rows) -> Rows:
    """Rows sorted by id, in which NaN equals NaN, and -0.0 differs from 0.0."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        if isinstance(value, float) and (math.isnan(value) or value == 0):
            return f"float {value}"
        return value

    return sorted((plain(row) for row in rows), key=lambda row: row["id"])


# ---------------------------------------------------------------- the tables

COLUMNS = {
    "flag": ("boolean", True, False),
    "i": ("int", 2**31 - 1, -(2**31)),
    "l": ("bigint", 2**63 - 1, -(2**63) + 1),
    "f": ("float", 1.5, -0.0),
    "d": ("double", math.pi, -1e300),
    "small": ("decimal(9,2)", decimal.Decimal("1234567.89"), decimal.Decimal("-0.01")),
    "middle": ("decimal(18,4)", decimal.Decimal("12345678901234.5678"), decimal.Decimal("-1.0000")),
    "large": ("decimal(38,10)", decimal.Decimal("1234567890123456789012345678.0123456789"), decimal.Decimal("0E-10")),
    "day": ("date", dt.date(1969, 12, 31), dt.date(9999, 12, 31)),
    "tz": ("timestamp", dt.datetime(2026, 11, 23, 1, 2, 3, 456789, dt.UTC), dt.datetime(1901, 1, 1, tzinfo=dt.UTC)),
    "ntz": ("timestamp_ntz", dt.datetime(2026, 11, 23, 1, 2, 3, 456789), dt.datetime(1969, 12, 31, 23, 59, 59, 999999)),
    "s": ("string", "ünïcode 日本 '\\", ""),
    "b": ("binary", bytes(range(256)), b""),
}


def _types(judge: Judge, name: str, **properties: Any) -> None:
    judge.create(name, "id bigint, " + ", ".join(f"{key} {one[0]}" for key, one in COLUMNS.items()), **properties)
    values = list(COLUMNS.values())
    judge.append(name, [(1, *(one[1] for one in values)), (2, *(one[2] for one in values)), (3, *[None] * len(values))])
    special = [math.nan, math.inf, -math.inf, 0.0]
    judge.append(name, [(4 + n, *(x if key in "fd" else None for key in COLUMNS)) for n, x in enumerate(special)])


def _typed(judge: Judge, name: str, *, format: str) -> None:
    """Types that Spark does not have, and a required column. Hive's catalog refuses timestamps with nanoseconds."""
    kinds = {"time": "time", "uuid": "uuid", "fixed": "fixed[5]"}
    values = {"time": dt.time(23, 59, 59, 999999), "uuid": uuid.UUID(int=2**127 + 1), "fixed": b"\x00\x01\xff12"}
    fields = [{"id": n, "name": key, "required": False, "type": kind} for n, (key, kind) in enumerate(kinds.items(), 2)]
    schema = {"type": "struct", "schema-id": 0, "fields": [{"id": 1, "name": "id", "required": True, "type": "long"}]}
    schema["fields"] += fields  # type: ignore[operator]
    judge.create_typed(name, schema, properties={"format-version": "3", "encryption.key-id": "master"})
    judge.write(name, [{"id": 1, **values}, {"id": 2}], format=format)


def _nested(judge: Judge, name: str, **properties: Any) -> None:
    judge.create(
        name,
        "id bigint, st struct<a: int, b: struct<c: string, d: array<double>>>, li array<struct<x: int, y: string>>, "
        "ll array<array<int>>, m map<string, int>, mm map<int, struct<p: string, q: array<date>>>",
        **properties,
    )
    full = {"a": 1, "b": {"c": "deep", "d": [1.0, 2.5]}}
    rows: list[tuple[Any, ...]] = [
        (1, full, [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}], [[1, 2], [3]], [("k", 1), ("l", 2)], None),
        (2, full, None, [[4]], [("m", 3)], [(7, {"p": "q", "q": [dt.date(2026, 1, 1)]})]),
        (3, None, None, None, None, None),
    ]
    judge.append(name, rows)
    # Lists without elements, and nulls in them, have no literal with a type of its own.
    judge.sql(
        f"INSERT INTO {name} SELECT 4, named_struct('a', CAST(NULL AS int), 'b', named_struct('c', '', 'd', "
        "CAST(array() AS array<double>))), CAST(array() AS array<struct<x: int, y: string>>), array(array(1, NULL)), "
        "map('n', CAST(NULL AS int)), NULL"
    )


def _partitions(judge: Judge, name: str) -> None:
    by = "kind, bucket(4, id), day(at), truncate(2, text)"
    judge.create(name, "id bigint, kind string, at timestamp, text string", partitioned=by)
    day = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
    rows = [(n, "ab"[n % 2], day + dt.timedelta(days=n % 2), f"text {n % 3}" * (n % 2)) for n in range(6)]
    judge.append(name, [*rows, (6, None, None, None)])
    judge.sql(f"ALTER TABLE {name} DROP PARTITION FIELD bucket(4, id)")
    judge.append(name, [(7, "a", day, "later")])


def _history(judge: Judge, name: str) -> None:
    judge.create(name, "id int, a string, b float, gone string")
    judge.append(name, [(1, "one", 1.5, "x"), (2, "two", 2.5, "y")])
    judge.sql(f"ALTER TABLE {name} CREATE TAG start")
    judge.sql(f"ALTER TABLE {name} ADD COLUMN c struct<d: int>")
    judge.sql(f"ALTER TABLE {name} RENAME COLUMN a TO renamed")
    judge.sql(f"ALTER TABLE {name} ALTER COLUMN id TYPE bigint")
    judge.sql(f"ALTER TABLE {name} ALTER COLUMN b TYPE double")
    judge.sql(f"ALTER TABLE {name} DROP COLUMN gone")
    judge.append(name, [(2**40, "three", 3.5, {"d": 4})])
    judge.sql(f"ALTER TABLE {name} CREATE BRANCH side")
    judge.append(name, [(5, "on the branch", None, None)], branch="side")
    judge.append(name, [(6, "on main", None, None)])
    judge.sql(f"DELETE FROM {name} WHERE id = 1")  # copy on write
    judge.sql(f"UPDATE {name} SET renamed = 'changed' WHERE id = 2")


def _numbers(judge: Judge, name: str, first: int = 0, last: int = 20, **properties: Any) -> None:
    """A table of ids and texts, of some files if it is partitioned."""
    judge.create(name, "id bigint, s string, part int", **properties)
    judge.append(name, [(n, f"text {n}", n % 3) for n in range(first, last)])


def _deletion_vectors(judge: Judge, name: str, **properties: Any) -> None:
    _numbers(judge, name, partitioned="part", **properties)
    judge.append(name, [(n, "second", 0) for n in range(20, 25)])
    judge.delete(name, "id % 5 = 0")
    judge.delete(name, "id % 5 = 1 AND part = 0")  # a vector in place of another


def _deletes_by_sql(judge: Judge, name: str) -> None:
    _numbers(judge, name, write_delete_mode="merge-on-read")
    judge.sql(f"DELETE FROM {name} WHERE id = 3")


def _equality_deletes(judge: Judge, name: str, *, format: str = "parquet", **properties: Any) -> None:
    _numbers(judge, name, **properties)
    judge.delete_equal(name, [{"id": 1}, {"id": 2}], format=format)
    judge.delete_equal(name, [{"s": "text 9", "part": 0}, {"s": "text 8", "part": 0}], format=format)  # one of the two
    judge.append(name, [(1, "again", 5)])  # later than its delete


def _plain(judge: Judge, name: str, version: int) -> None:
    _numbers(judge, name, partitioned="part", encrypted=False, version=version)
    judge.append(name, [(n, None, 1) for n in range(20, 23)])
    if version == 2:
        judge.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('write.delete.mode'='merge-on-read')")
        judge.sql(f"DELETE FROM {name} WHERE id = 4")  # a file of positions
    elif version == 3:
        judge.delete(name, "id = 4")


TABLES: dict[str, Callable[[Judge, str], None]] = {
    "types": _types,
    "types avro": partial(_types, write_format_default="avro"),
    "typed": partial(_typed, format="parquet"),
    "typed avro": partial(_typed, format="avro"),
    "nested": _nested,
    "nested avro": partial(_nested, write_format_default="avro"),
    "partitions": _partitions,
    "history": _history,
    "empty": lambda judge, name: judge.create(name, "id bigint"),
    "aes 192": partial(_numbers, key_length=24),
    "aes 256": partial(_deletion_vectors, key_length=32),
    "deletion vectors": _deletion_vectors,
    "deletion vectors avro": partial(_deletion_vectors, write_format_default="avro"),
    "equality deletes": _equality_deletes,
    "equality deletes avro": partial(_equality_deletes, format="avro", write_format_default="avro"),
    "deletes by SQL": _deletes_by_sql,
    "plain v1": partial(_plain, version=1),
    "plain v2": partial(_plain, version=2),
    "plain v3": partial(_plain, version=3),
}
PLAIN = {"plain v1", "plain v2", "plain v3"}
BY_JAVAS_OWN_READER = {"typed", "typed avro"}  # Spark does not have the types
UNREADABLE_BY_JAVA = {"deletes by SQL"} if JAVA == "1.11" else set()  # which loses the keys of deletion vectors
AVRO = {name for name in TABLES if name.endswith("avro")}
EQUALITY_DELETES = {"equality deletes", "equality deletes avro"}


class Corpus:
    """The tables of a judge, by name. A test that changes one does so in a catalog of its own: `register_table`."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self._made: dict[str, Made] = {}

    def __getitem__(self, key: str) -> Made:
        if key not in self._made:
            name = self.judge.name()
            TABLES[key](self.judge, name)
            self._made[key] = Made(name, self.judge.metadata_location(name), *self._read(key, name))
        return self._made[key]

    def _read(self, key: str, name: str) -> tuple[Rows, dict[int | str, Rows]]:
        if key in UNREADABLE_BY_JAVA:
            return [], {}
        if key in BY_JAVAS_OWN_READER:
            return comparable(self.judge.read(name)), {}
        select = f"SELECT * FROM {name}"
        versions: dict[int | str, Rows] = {}
        if key == "history":
            ids = [one[0] for one in self.judge.sql(f"SELECT snapshot_id FROM {name}.snapshots")]
            for version in (*ids, "start", "side"):
                at = version if isinstance(version, int) else f"'{version}'"
                versions[version] = comparable(self.judge.dicts(f"{select} VERSION AS OF {at}"))
        return comparable(self.judge.dicts(select)), versions
