"""The tour's Iceberg chapter: Java in Spark and PyIceberg share an encrypted table, and turn its keys."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pyarrow as pa

from ags_fast import iceberg
from benchmarks.parquet import from_tests

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.tour.steps import Steps

ROWS = 1000
TABLE = "db.orders"


def chapter(steps: Steps, folder: Path) -> None:
    """Java writes a table, Python reads it, appends, deletes, turns its keys and verifies, and Java reads the result.

    Iceberg's Java needs an older Spark than the other chapters, so it runs in a JVM of its own: the tests' judge.
    """
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        with steps.step("Iceberg's Java starts, and writes an encrypted table"):
            judge = from_tests("iceberg_java")
            java = stack.enter_context(judge.Judge(folder))
            java.create(TABLE, "id bigint, item string")
            java.append(TABLE, [(i, f"item {i}") for i in range(ROWS)])
        catalog = iceberg.load_catalog("tour", kms=java.kms, type="hive", uri=java.hive_uri)
        with steps.step("PyIceberg reads it, appends and deletes rows"):
            table = catalog.load_table(TABLE)
            found = table.scan(row_filter=f"id >= {ROWS - 10}").to_arrow()
            ids = range(ROWS, ROWS + 10)
            table.append(pa.table({"id": list(ids), "item": [f"item {i}" for i in ids]}, schema=found.schema))
            deleted = iceberg.delete(table, "id < 5")
        steps.check("the last ten rows of Java's are there", "" if len(found) == 10 else f"there are {len(found)} rows")
        steps.say(f"{deleted.rows} rows deleted by a deletion vector: the others keep their row ids")
        with steps.step("A new KEK wraps the keys, and every tag is verified"):
            before = {one.path for one in iceberg.files(table)}
            iceberg.rotate(table, what="kek").raise_for_failures()
            result = iceberg.verify(table)
        after = {one.path for one in iceberg.files(table)}
        steps.check("the rotation has written one metadata file", "" if before == after else "files have changed")
        steps.check(
            f"every tag of {len(result.rows)} files is right", "" if not result.failed else str(result.failed[0])
        )
        with steps.step("Java reads what Python wrote"):
            try:
                rows = [row[0] for row in java.rows(TABLE, order_by="id")]
                wrong = "" if rows == list(range(5, ROWS + 10)) else f"Java has {len(rows)} rows"
            except judge.JudgeError as error:
                wrong = str(error)[:500]
        steps.check(f"{ROWS + 5:,} rows, the same in Java and Python", wrong)
