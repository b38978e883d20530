"""Random histories of an encrypted table, and of one in plaintext by PyIceberg alone: they always have the same rows.

``make test-more`` runs a few short ones, ``make nightly`` 30 long ones. One seed again, as a failure names it:
``ICEBERG_SEEDS=17 ICEBERG_STEPS=40 make test-more ARGS=tests/test_iceberg_differential.py``.
"""

from __future__ import annotations

import os
import random
import warnings
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import pyarrow as pa
from datasets import HERE
from iceberg_tables import KEY_ID, MASTER, sql_catalog
from pyiceberg.catalog.sql import SqlCatalog as Vanilla
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import DoubleType, LongType, NestedField, StringType

from ags_fast.iceberg import clear_cache, expire, rekey, rotate, verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FIRST, _, LAST = os.environ.get("ICEBERG_SEEDS", "1-2").partition("-")
SEEDS = range(int(FIRST), int(LAST or FIRST) + 1)
STEPS = int(os.environ.get("ICEBERG_STEPS", "12"))

SCHEMA = Schema(
    NestedField(1, "id", LongType()), NestedField(2, "kind", StringType()), NestedField(3, "name", StringType())
)
SPECS = [
    PartitionSpec(),
    PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "kind")),
    PartitionSpec(PartitionField(1, 1000, BucketTransform(3), "bucket")),
]
KINDS = ("a", "b", "c")


class Pair:
    """An encrypted table, and one in plaintext, to which the same happens."""

    def __init__(self, folder: Path, kms: dict[str, str], seed: int) -> None:
        self.random = random.Random(seed)
        self._kms, self._folder = kms, folder
        self._next = 0  # id of a row
        self.spec = self.random.choice(SPECS)
        self._plain = self._vanilla()
        self._plain.create_namespace("ns")
        self.tables: list[Any] = [
            catalog.create_table("ns.t", SCHEMA, partition_spec=self.spec, properties=properties)
            for catalog, properties in ((self._plain, {}), (self._encrypted(), {KEY_ID: MASTER}))
        ]
        self.refs: dict[str, str] = {}
        self.history: list[str] = []

    def _vanilla(self) -> Any:
        (self._folder / "plain").mkdir(exist_ok=True)
        place = {"uri": f"sqlite:///{self._folder}/plain/catalog.db", "warehouse": f"file://{self._folder}/plain/wh"}
        return Vanilla("plain", **place)

    def _encrypted(self) -> Any:
        return sql_catalog(self._folder, self._kms)

    # ------------------------------------------------------------------------------------------------------ helpers

    def both(self, work: Callable[[Any], object]) -> None:
        """Do the same to both tables. Both allow it, or both refuse it with the same error."""
        ends = []
        for table in self.tables:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    work(table)
                    ends.append("")
                except ValueError as error:
                    ends.append(f"{type(error).__name__}: {error}")
        assert ends[0] == ends[1], self.history

    def rows(self, ids: list[int]) -> pa.Table:
        """Rows with these ids, for the columns that the tables have."""
        schema = schema_to_pyarrow(self.tables[0].schema(), include_field_ids=False)
        columns: dict[str, Any] = {}
        for field in schema:
            if field.name == "id":
                columns["id"] = ids
            elif field.name == "kind":
                columns["kind"] = [self.random.choice(KINDS) for _ in ids]
            elif field.type == pa.float64():
                columns[field.name] = [self.random.choice((None, self.random.random())) for _ in ids]
            else:
                columns[field.name] = [self.random.choice((None, f"{field.name} {i}")) for i in ids]
        return pa.table(columns, schema=schema)

    def fresh(self) -> pa.Table:
        count = self.random.randrange(1, 12)
        self._next += count
        return self.rows(list(range(self._next - count, self._next)))

    def some(self) -> str:
        """A filter."""
        at = self.random.randrange(self._next + 1)
        kind = self.random.choice(KINDS)
        return self.random.choice(
            (f"id < {at}", f"id >= {at}", f"id = {at}", f"id >= {at} and id < {at + 4}", f"kind = '{kind}'")
        )

    def ref(self, kind: str) -> str | None:
        return self.random.choice([name for name, one in self.refs.items() if one == kind] or [None])

    # --------------------------------------------------------------------------------------------------- operations

    def append(self) -> None:
        rows, branch = self.fresh(), self.random.choice((None, self.ref("branch"))) or "main"
        self.both(lambda table: table.append(rows, branch=branch))

    def delete(self) -> None:
        wanted = self.some()
        self.both(lambda table: table.delete(wanted))

    def copy_on_write(self) -> None:
        wanted = self.some()

        def work(table: Any) -> None:
            with table.transaction() as transaction:
                transaction.delete(wanted)

        self.both(work)

    def overwrite(self) -> None:
        rows, wanted = self.fresh(), self.some()
        self.both(lambda table: table.overwrite(rows, overwrite_filter=wanted))

    def dynamic_overwrite(self) -> None:
        if self.spec is SPECS[1]:
            rows = self.fresh()
            self.both(lambda table: table.dynamic_partition_overwrite(rows))

    def upsert(self) -> None:
        old = self.random.sample(range(self._next), min(self._next, 5))
        rows = pa.concat_tables([self.rows(old), self.fresh()])
        self.both(lambda table: table.upsert(rows, join_cols=["id"]))

    def evolve(self) -> None:
        """Change a column, and append. PyIceberg reads a snapshot, and upserts, by the schema that the snapshot has:
        that of `rekey` has the newest one, as of Java's rewrites, and the table in plaintext has none such."""
        extra = [name for name in self.tables[0].schema().column_names if name not in ("id", "kind")]
        name, kind = f"c{len(self.history)}", self.random.choice((DoubleType(), StringType()))
        choice = self.random.choice(("add", "add", "rename", "drop"))
        one = self.random.choice(extra) if extra else None

        def work(table: Any) -> None:
            with table.update_schema() as update:
                if choice == "add" or one is None:
                    update.add_column(name, kind)
                elif choice == "rename":
                    update.rename_column(one, name)
                else:
                    update.delete_column(one)

        self.both(work)
        rows = self.fresh()
        self.both(lambda table: table.append(rows))

    def set_ref(self) -> None:
        """Make a branch or a tag of the newest snapshot."""
        if self.tables[0].current_snapshot() is None:
            return None
        kind = self.random.choice(("branch", "tag"))
        name = f"{kind}{self.random.randrange(3)}"
        if name in self.refs:
            return self.remove_ref(name)
        self.refs[name] = kind

        def work(table: Any) -> None:
            with table.manage_snapshots() as manage:
                make = manage.create_branch if kind == "branch" else manage.create_tag
                make(table.current_snapshot().snapshot_id, name)

        self.both(work)
        return None

    def remove_ref(self, name: str) -> None:
        kind = self.refs.pop(name)

        def work(table: Any) -> None:
            with table.manage_snapshots() as manage:
                (manage.remove_branch if kind == "branch" else manage.remove_tag)(name)

        self.both(work)

    def roll_back(self) -> None:
        tag = self.ref("tag")

        def work(table: Any) -> None:
            with table.manage_snapshots() as manage:
                manage.set_current_snapshot(ref_name=tag)

        if tag is not None:
            self.both(work)

    def transaction(self) -> None:
        rows, wanted, name = self.fresh(), self.some(), f"p{len(self.history)}"

        def work(table: Any) -> None:
            with table.transaction() as transaction:
                transaction.append(rows)
                transaction.delete(wanted)
                transaction.set_properties({name: wanted})

        self.both(work)

    def turn_keys(self) -> None:
        table = self.tables[1]
        choice: Any = self.random.choice(("kek", "mek", "manifests", "data"))
        result = rotate(table, what=choice) if choice in ("kek", "mek") else rekey(table, what=choice, engine=HERE)
        result.raise_for_failures()

    def expire(self) -> None:
        expire(self.tables[1], keep=self.random.choice((1, 1, 3))).raise_for_failures()

    def reload(self) -> None:
        clear_cache()
        self.tables = [catalog.load_table("ns.t") for catalog in (self._vanilla(), self._encrypted())]

    # ------------------------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        seen: list[dict[str, Any]] = []
        for table in self.tables:
            found = {"columns": table.schema().column_names, "properties": self._properties(table)}
            for name in ("main", *self.refs):
                scan = table.scan() if name == "main" else table.scan().use_ref(name)
                found[name] = sorted(scan.to_arrow().to_pylist(), key=lambda row: row["id"])
            wanted = f"id >= {self._next // 2}"
            found["filtered"] = sorted(table.scan(row_filter=wanted).to_arrow()["id"].to_pylist())
            seen.append(found)
        for name, expected in seen[0].items():
            assert seen[1][name] == expected, (name, self.history)

    @staticmethod
    def _properties(table: Any) -> dict[str, str]:
        return {name: value for name, value in table.properties.items() if name.startswith("p")}


OPERATIONS = (
    *[Pair.append] * 4,
    *[Pair.delete] * 3,
    *[Pair.turn_keys] * 3,
    *[Pair.set_ref] * 2,
    *[Pair.upsert] * 2,
    Pair.copy_on_write,
    Pair.overwrite,
    Pair.dynamic_overwrite,
    Pair.evolve,
    Pair.roll_back,
    Pair.transaction,
    Pair.expire,
    Pair.reload,
)


@pytest.mark.more
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_history(tmp_path: Path, kms: dict[str, str], seed: int) -> None:
    pair = Pair(tmp_path, kms, seed)
    pair.append()
    for _ in range(STEPS):
        operation = pair.random.choice(OPERATIONS)
        pair.history.append(operation.__name__)
        try:
            operation(pair)
            pair.check()
        except BaseException:
            print(f"seed {seed}: ICEBERG_SEEDS={seed} ICEBERG_STEPS={STEPS}; {', '.join(pair.history)}")
            raise
    pair.reload()
    pair.check()
    assert verify(pair.tables[1], engine=HERE).failed == []
