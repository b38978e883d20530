"""PyIceberg's own API on encrypted tables, compared with the same table in plaintext."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import pyarrow as pa
from iceberg_tables import KEY_ID, MASTER, MIXED, ids, new_table, rows, sql_catalog
from pyiceberg import expressions
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform
from pyiceberg.types import IntegerType, LongType, NestedField, StringType, TimestampType

from ags_fast.iceberg import delete, verify

if TYPE_CHECKING:
    from pathlib import Path

    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Catalog:
    return sql_catalog(tmp_path, kms, **MIXED)


NESTED = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("flag", pa.bool_()),
        ("small", pa.int32()),
        ("real", pa.float32()),
        ("double", pa.float64()),
        ("price", pa.decimal128(12, 2)),
        ("day", pa.date32()),
        ("clock", pa.time64("us")),
        ("at", pa.timestamp("us")),
        ("at_utc", pa.timestamp("us", "UTC")),
        ("text", pa.string()),
        ("data", pa.binary()),
        ("fixed", pa.binary(4)),
        ("tags", pa.list_(pa.string())),
        ("pairs", pa.map_(pa.string(), pa.int64())),
        ("place", pa.struct([("x", pa.float64()), ("names", pa.list_(pa.struct([("of", pa.string())])))])),
    ]
)


def nested(first: int, last: int) -> pa.Table:
    """Rows of many types, in which every seventh value is null."""

    def row(i: int) -> dict[str, Any]:
        values = {
            "flag": i % 2 == 0,
            "small": i,
            "real": i / 4,
            "double": i / 8,
            "price": Decimal(i) / 4,
            "day": dt.date(2020, 1, 1) + dt.timedelta(i),
            "clock": dt.time(i % 24, 5),
            "at": dt.datetime(2020, 1, 1) + dt.timedelta(hours=i),
            "at_utc": dt.datetime(2020, 1, 1, tzinfo=dt.UTC) + dt.timedelta(hours=i),
            "text": f"text {i}",
            "data": bytes([i % 256]) * 3,
            "fixed": i.to_bytes(4, "big"),
            "tags": [f"a{i}", None],
            "pairs": {f"k{i}": i},
            "place": {"x": i / 2, "names": [{"of": f"n{i}"}]},
        }
        kept = {name: None if (i + n) % 7 == 0 else value for n, (name, value) in enumerate(values.items())}
        return {"id": i, **kept}

    return pa.Table.from_pylist([row(i) for i in range(first, last)], schema=NESTED)


def two(catalog: Catalog, schema: Any, **more: Any) -> tuple[Table, Table]:
    """The same table, encrypted and in plaintext."""
    made = catalog.create_table("ns.e", schema=schema, properties={KEY_ID: MASTER}, **more)
    return made, catalog.create_table("ns.p", schema=schema, **more)


def test_types_and_nested_ones(catalog: Catalog) -> None:
    both = two(catalog, NESTED)
    for one in both:
        one.append(nested(0, 60))
        one.append(nested(60, 100))
    found, expected = (one.scan().to_arrow().sort_by("id") for one in both)
    assert found.equals(expected)
    assert found.num_rows == 100
    fields = ("id", "place.x", "tags")
    found, expected = (one.scan(selected_fields=fields).to_arrow().sort_by("id") for one in both)
    assert found.equals(expected)
    assert found.column_names == ["id", "tags", "place"]


e: Any = expressions  # its types know only the keyword arguments
FILTERS: list[Any] = [
    "id >= 10 and id < 20",
    "text = 'text 8' or text is null",
    e.And(e.GreaterThanOrEqual("price", Decimal("10.00")), e.LessThan("day", "2020-03-01")),
    e.In("small", {3, 4, 5}),
    e.Not(e.IsNull("text")),
    e.StartsWith("text", "text 1"),
    "at > '2020-01-02T00:00:00'",
    "flag = true",
    "id > 1000",
]


def test_filters_limits_and_counts(catalog: Catalog) -> None:
    both = two(catalog, NESTED)
    for one in both:
        for i in range(4):
            one.append(nested(25 * i, 25 * i + 25))
    for row_filter in FILTERS:
        found, expected = (one.scan(row_filter=row_filter).to_arrow().sort_by("id") for one in both)
        assert found.equals(expected), row_filter
        counts = [one.scan(row_filter=row_filter).count() for one in both]
        assert counts == [expected.num_rows] * 2
        plans = [len(list(one.scan(row_filter=row_filter).plan_files())) for one in both]
        assert plans[0] == plans[1]
    assert both[0].scan(limit=7).to_arrow().num_rows == 7
    reader = both[0].scan(row_filter="id < 60").to_arrow_batch_reader()
    assert sorted(i for batch in reader for i in batch["id"].to_pylist()) == list(range(60))


def test_pandas_duckdb_and_polars(catalog: Catalog) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("duckdb")
    pytest.importorskip("polars")
    table = new_table(catalog)
    table.append(rows(0, 100))
    delete(table, "id = 50")
    scan = table.scan(row_filter="id >= 40")
    expected = [i for i in range(40, 100) if i != 50]
    assert sorted(scan.to_pandas()["id"]) == expected
    assert sorted(scan.to_polars()["id"].to_list()) == expected
    connection = scan.to_duckdb("t")
    assert connection.execute("select count(*), min(id), max(name) from t").fetchone() == (59, 40, "name 99")


def test_time_travel_branches_and_rollback(catalog: Catalog) -> None:
    table = new_table(catalog)
    seen = {}
    for i in range(4):
        table.append(rows(10 * i, 10 * i + 10))
        seen[table.current_snapshot().snapshot_id] = list(range(10 * i + 10))
    for snapshot_id, expected in seen.items():
        assert ids(table, snapshot_id=snapshot_id) == expected
    first, second, *_ = seen
    newest = table.snapshot_as_of_timestamp(table.metadata.last_updated_ms)
    assert ids(table, snapshot_id=newest.snapshot_id) == list(range(40))
    assert table.snapshot_as_of_timestamp(table.metadata.snapshots[0].timestamp_ms - 1) is None
    with table.manage_snapshots() as manage:
        manage.create_branch(first, "dev").create_tag(second, "v2")
    table.append(rows(100, 105), branch="dev")
    table.delete("id < 3", branch="dev")
    assert sorted(table.scan().use_ref("dev").to_arrow()["id"].to_pylist()) == [*range(3, 10), *range(100, 105)]
    assert sorted(table.scan().use_ref("v2").to_arrow()["id"].to_pylist()) == list(range(20))
    assert ids(table) == list(range(40))
    with table.manage_snapshots() as manage:
        manage.remove_tag("v2").remove_branch("dev")
    assert set(table.refs()) == {"main"}
    if hasattr(table.manage_snapshots(), "rollback_to_snapshot"):
        table.manage_snapshots().rollback_to_snapshot(second).commit()
        assert ids(table) == list(range(20))
    assert verify(table).failed == []


INSPECTED = (
    "snapshots",
    "entries",
    "refs",
    "partitions",
    "manifests",
    "metadata_log_entries",
    "history",
    "files",
    "data_files",
    "delete_files",
    "all_files",
    "all_data_files",
    "all_delete_files",
    "all_manifests",
)
# What depends on names, sizes, times and ids, which are others in another table, or on the version of the format.
OTHERS = {
    "committed_at",
    "snapshot_id",
    "parent_id",
    "manifest_list",
    "path",
    "file_path",
    "file",
    "length",
    "file_size_in_bytes",
    "added_snapshot_id",
    "timestamp",
    "latest_snapshot_id",
    "made_current_at",
    "last_updated_at",
    "last_updated_snapshot_id",
    "total_data_file_size_in_bytes",
    "reference_snapshot_id",
    "split_offsets",
    "column_sizes",
    "readable_metrics",
    "summary",
    "key_metadata",
}


def shown(table: pa.Table) -> list[Any]:
    kept = [{name: value for name, value in row.items() if name not in OTHERS} for row in table.to_pylist()]
    for row in kept:
        if "data_file" in row:
            row["data_file"] = {name: value for name, value in row["data_file"].items() if name not in OTHERS}
    return sorted(kept, key=str)


def test_inspect(catalog: Catalog) -> None:
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))
    spec = PartitionSpec(PartitionField(1, 1000, BucketTransform(4), "bucket"))
    both = two(catalog, schema, partition_spec=spec)
    for one in both:
        one.append(rows(0, 20))
        one.append(rows(20, 40))
        one.overwrite(rows(100, 101), overwrite_filter="id = 5")
    public = {name for name in dir(both[0].inspect) if not name.startswith("_") and name != "tbl"}
    assert public - set(INSPECTED) <= {"position_deletes"}
    for name in sorted(public & set(INSPECTED)):
        found, expected = (getattr(one.inspect, name)() for one in both)
        assert found.schema == expected.schema, name
        assert shown(found) == shown(expected), name
        assert (found.num_rows == 0) is (name in ("delete_files", "all_delete_files")), name
        if "key_metadata" in found.column_names:
            assert set(found["key_metadata"].to_pylist()) <= {None}


def test_inspect_with_deletion_vectors(catalog: Catalog) -> None:
    table = new_table(catalog)
    table.append(rows(0, 20))
    delete(table, "id < 5")
    (one,) = table.inspect.delete_files().to_pylist()
    assert (one["content"], one["file_format"], one["record_count"]) == (1, "PUFFIN", 5)
    assert one["key_metadata"] is None
    assert table.inspect.files().num_rows == 2


def test_partitions_and_their_evolution(catalog: Catalog) -> None:
    schema = Schema(
        NestedField(1, "id", LongType()), NestedField(2, "at", TimestampType()), NestedField(3, "name", StringType())
    )
    spec = PartitionSpec(PartitionField(3, 1000, IdentityTransform(), "name"))
    both = two(catalog, schema, partition_spec=spec)

    def some(first: int, last: int) -> pa.Table:
        begin = dt.datetime(2024, 1, 1)
        return pa.table(
            {
                "id": pa.array(range(first, last), pa.int64()),
                "at": pa.array([begin + dt.timedelta(hours=i) for i in range(first, last)], pa.timestamp("us")),
                "name": [f"n{i % 3}" for i in range(first, last)],
            }
        )

    for one in both:
        one.append(some(0, 30))
        with one.update_spec() as update:
            update.add_field("at", DayTransform(), "day").remove_field("name")
        one.append(some(30, 90))
        with one.update_spec() as update:
            update.add_field("id", BucketTransform(4), "bucket")
        one.append(some(90, 100))
        one.overwrite(some(90, 96), overwrite_filter="id >= 85")
    for row_filter in ("name = 'n1'", "at >= '2024-01-03T00:00:00'", "id < 50 and name = 'n2'"):
        found, expected = (one.scan(row_filter=row_filter).to_arrow().sort_by("id") for one in both)
        assert found.equals(expected)
        assert found.num_rows
        plans = [len(list(one.scan(row_filter=row_filter).plan_files())) for one in both]
        assert plans[0] == plans[1]
    assert ids(both[0]) == ids(both[1])
    assert verify(both[0]).failed == []


def test_dynamic_overwrite(catalog: Catalog) -> None:
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "name"))
    both = two(catalog, schema, partition_spec=spec)
    for one in both:
        one.append(pa.table({"id": [1, 2, 3], "name": ["a", "b", "c"]}))
        one.dynamic_partition_overwrite(pa.table({"id": [20, 21], "name": ["b", "d"]}))
        one.overwrite(pa.table({"id": [5], "name": ["c"]}), overwrite_filter="name = 'c'")
    assert ids(both[0]) == ids(both[1]) == [1, 5, 20, 21]


def test_schema_evolution(catalog: Catalog) -> None:
    both = two(catalog, Schema(NestedField(1, "id", IntegerType()), NestedField(2, "name", StringType())))
    for one in both:
        one.append(pa.table({"id": pa.array([1, 2], pa.int32()), "name": ["a", "b"]}))
        with one.update_schema() as update:
            update.update_column("id", LongType()).rename_column("name", "label")
            update.add_column("more", StringType(), doc="new")
        one.append(pa.table({"id": [3], "label": ["c"], "more": ["x"]}))
        with one.update_schema() as update:
            update.delete_column("more").move_first("label")
        with one.update_schema() as update:
            update.union_by_name(Schema(NestedField(1, "again", LongType())))
        one.append(pa.table({"label": ["d"], "id": [4], "again": [7]}))
    found, expected = (one.scan().to_arrow().sort_by("id") for one in both)
    assert found.equals(expected)
    assert found.column_names == ["label", "id", "again"]
    assert both[0].schemas().keys() == both[1].schemas().keys()


def test_upsert_and_transactions(catalog: Catalog) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
    both = two(catalog, schema)
    for one in both:
        one.append(rows(0, 10).cast(schema))
        done = one.upsert(pa.table({"id": [3, 50], "name": ["new", "far"]}, schema=schema), join_cols=["id"])
        assert (done.rows_updated, done.rows_inserted) == (1, 1)
        with one.transaction() as transaction:
            transaction.append(rows(60, 62).cast(schema))
            transaction.delete("id = 0")
            transaction.set_properties({"comment": "x"})
            with transaction.update_schema() as update:
                update.add_column("more", StringType())
    found, expected = (one.scan().to_arrow().sort_by("id") for one in both)
    assert found.equals(expected)
    assert both[0].properties["comment"] == "x"
    assert verify(both[0]).failed == []


def test_a_transaction_that_fails_changes_nothing(catalog: Catalog) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    before = table.metadata_location

    def append_and_fail() -> None:
        with table.transaction() as transaction:
            transaction.append(rows(3, 6))
            transaction.delete("number = 1")

    with pytest.raises(ValueError, match="number"):
        append_and_fail()
    assert catalog.load_table("ns.t").metadata_location == before
    assert ids(table) == [0, 1, 2]


def test_create_table_transaction(catalog: Catalog) -> None:
    with catalog.create_table_transaction(
        "ns.made", schema=rows(0, 1).schema, properties={KEY_ID: MASTER}
    ) as transaction:
        transaction.append(rows(0, 5))
    table = catalog.load_table("ns.made")
    assert ids(table) == list(range(5))
    assert verify(table).failed == []


def test_expire_snapshots_of_pyiceberg(catalog: Catalog) -> None:
    table = new_table(catalog)
    for i in range(3):
        table.append(rows(i, i + 1))
    first = table.metadata.snapshots[0].snapshot_id
    table.maintenance.expire_snapshots().by_id(first).commit()
    table.refresh()
    assert len(table.metadata.snapshots) == 2
    assert ids(table) == [0, 1, 2]
    table.append(rows(3, 4))
    assert ids(table) == [0, 1, 2, 3]
    done = verify(table)
    assert done.failed == []
    assert "1 keys" in done.warnings[0]  # PyIceberg does not know of keys: expire of ours removes them


def test_other_operations_of_catalogs(catalog: Catalog) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    assert catalog.table_exists("ns.t")
    assert ids(catalog.rename_table("ns.t", "ns.u")) == [0, 1, 2]
    assert catalog.list_tables("ns") == [("ns", "u")]
    location = catalog.load_table("ns.u").metadata_location
    catalog.drop_table("ns.u")
    assert ids(catalog.register_table("ns.v", location)) == [0, 1, 2]
