"""What PyIceberg's classes offer, name by name: a new release's methods fail here until somebody has judged them.

A method that opens files by itself, or writes metadata past the FileIO, needs an answer of ours.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from iceberg_tables import KEY_ID, ids, rows, sql_catalog
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CreateTableTransaction, DataScan, StagedTable, StaticTable, Table, Transaction
from pyiceberg.table.inspect import InspectTable
from pyiceberg.table.maintenance import MaintenanceTable
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.table.update.snapshot import ExpireSnapshots, ManageSnapshots, UpdateSnapshot
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from ags_fast import iceberg
from ags_fast.errors import PolicyError
from ags_fast.iceberg.catalogs.base import EncryptedCatalog
from ags_fast.iceberg.handles import CatalogTable, FileTable, NewTable

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# Ours: the method refuses, or does something else for an encrypted table.
OURS: dict[type, str] = {
    Catalog: "create_table create_table_transaction load_table register_table rename_table commit_table purge_table",
    RestCatalog: "plan_scan drop_table",
    Table: "scan incremental_append_scan delete to_daft to_bodo to_polars __datafusion_table_provider__",
}
# These work through the FileIO, through `commit_table`, or on metadata alone.
THROUGH: dict[type, str] = {
    Catalog: """create_table_if_not_exists table_exists view_exists namespace_exists drop_table create_namespace
        create_namespace_if_not_exists drop_namespace list_tables list_namespaces list_views load_view
        load_namespace_properties update_namespace_properties register_view drop_view create_view identifier_to_tuple
        table_name_from namespace_from namespace_to_string supports_server_side_planning identifier_to_database
        identifier_to_database_and_table close name properties""",
    RestCatalog: "load_credentials uri auth_url url",
    SqlCatalog: "create_tables destroy_tables",
    Table: """transaction inspect maintenance refresh name format_version schema schemas spec
        specs sort_order sort_orders last_partition_id properties location location_provider last_sequence_number
        current_snapshot snapshots snapshot_by_id snapshot_by_name snapshot_as_of_timestamp history manage_snapshots
        update_statistics update_schema update_sort_order name_mapping upsert append dynamic_partition_overwrite
        overwrite add_files update_spec refs catalog config io metadata metadata_location""",
    StaticTable: "from_metadata",
    Transaction: """table_metadata upgrade_table_version set_properties update_schema update_sort_order update_snapshot
        update_statistics append dynamic_partition_overwrite overwrite delete upsert add_files update_spec
        remove_properties update_location commit_transaction""",
    DataScan: """snapshot projection plan_files to_arrow to_arrow_batch_reader to_pandas to_polars to_duckdb to_ray
        update use_ref select filter with_case_sensitive count partition_filters scan_plan_helper catalog""",
    InspectTable: """snapshots entries refs partitions manifests metadata_log_entries history files data_files
        delete_files all_manifests all_files all_data_files all_delete_files position_deletes tbl""",
    MaintenanceTable: "expire_snapshots tbl",
    ManageSnapshots: """create_tag remove_tag create_branch remove_branch set_current_snapshot rollback_to_snapshot
        rollback_to_timestamp commit""",
    UpdateSnapshot: "fast_append merge_append overwrite delete",
    ExpireSnapshots: "by_id by_ids older_than commit",
}
SPECIAL = {"__datafusion_table_provider__"}


def offered(kind: type) -> set[str]:
    """The public names of a class, those of its bases included."""
    members: Iterable[tuple[str, Any]] = inspect.getmembers(kind)
    return {
        name
        for name, one in members
        if (not name.startswith("_") or name in SPECIAL)
        and (callable(one) or isinstance(one, property) or inspect.isdatadescriptor(one))
    }


def judged(kind: type) -> set[str]:
    return {name for base in kind.__mro__ for known in (OURS, THROUGH) for name in known.get(base, "").split()}


@pytest.mark.parametrize("kind", [*THROUGH, StagedTable, CreateTableTransaction])
def test_all_that_it_offers_is_judged(kind: type) -> None:
    assert offered(kind) - judged(kind) == set()


def test_what_is_ours_is_ours() -> None:
    def made_by_us(kind: type, name: str) -> bool:
        return str(getattr(kind, name).__module__).startswith("ags_fast.")

    for name in OURS[Catalog].split():
        assert made_by_us(EncryptedCatalog, name), name
        for catalog in ("SqlCatalog", "RestCatalog", "HiveCatalog", "GlueCatalog", "DynamoDbCatalog"):
            assert made_by_us(getattr(iceberg, catalog), name), (catalog, name)
    for name in OURS[RestCatalog].split():
        assert made_by_us(iceberg.RestCatalog, name), name
    for handle in (CatalogTable, FileTable, NewTable):
        for name in OURS[Table].split():
            assert made_by_us(handle, name) or (name == "delete" and handle is not CatalogTable), (handle, name)


# ----------------------------------------------------------------------------------------- arguments of the methods

CATALOGS = {
    "SqlCatalog": "sql",
    "RestCatalog": "rest",
    "HiveCatalog": "hive",
    "GlueCatalog": "glue",
    "DynamoDbCatalog": "dynamodb",
}


def theirs(class_name: str) -> Any:
    return getattr(importlib.import_module(f"pyiceberg.catalog.{CATALOGS[class_name]}"), class_name)


@pytest.mark.parametrize("class_name", CATALOGS)
def test_methods_take_the_arguments_of_pyicebergs(class_name: str) -> None:
    """By position and by name, with the same defaults. A method of ours may take more: PyIceberg's next version's."""
    ours, vanilla = getattr(iceberg, class_name), theirs(class_name)
    for name, method in inspect.getmembers(vanilla, inspect.isfunction):
        if name.startswith("_"):
            continue
        expected = inspect.signature(method).parameters.values()
        found = list(inspect.signature(getattr(ours, name)).parameters.values())
        assert [(one.name, one.kind, one.default) for one in found[: len(expected)]] == [
            (one.name, one.kind, one.default) for one in expected
        ], name
        assert all(one.default is not inspect.Parameter.empty for one in found[len(expected) :]), name


class Bound:
    """Calls a method of a catalog by position, or by name, with all of its arguments."""

    def __init__(self, catalog: Any, by_name: bool) -> None:
        self._catalog, self._by_name = catalog, by_name

    def __call__(self, name: str, *given: Any) -> Any:
        method = getattr(self._catalog, name)
        names = list(inspect.signature(getattr(Catalog, name)).parameters)[1:]
        assert len(names) == len(given), name
        return method(**dict(zip(names, given, strict=True))) if self._by_name else method(*given)


@pytest.mark.parametrize("by_name", [False, True])
def test_the_calls_that_programs_make(tmp_path: Path, kms: dict[str, str], by_name: bool) -> None:
    catalog = sql_catalog(tmp_path, kms)
    call, key = Bound(catalog, by_name), {KEY_ID: "master"}
    order = SortOrder(SortField(1, IdentityTransform()))
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "name"))
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))
    there = f"file://{tmp_path}/elsewhere"

    def check(table: Any, location: str | None = None) -> None:
        table.append(rows(0, 3))
        assert set(ids(catalog.load_table(table.name()))) == {0, 1, 2}
        assert isinstance(table, CatalogTable)
        assert all(one.key_metadata is not None for one in iceberg.files(table))
        assert len(table.spec().fields) == len(table.sort_order().fields) == 1
        assert location in (None, table.location())

    made = call("create_table", "ns.a", schema, there, spec, order, key)
    check(made, there)
    again = call("create_table_if_not_exists", "ns.a", schema, None, spec, order, key)
    assert again.metadata.table_uuid == made.metadata.table_uuid
    check(call("create_table_if_not_exists", ("ns", "b"), schema, None, spec, order, key))
    with call("create_table_transaction", "ns.c", schema, None, spec, order, key) as transaction:
        transaction.append(rows(5, 6))
    assert ids(call("load_table", "ns.c")) == [5]
    check(call("rename_table", "ns.b", ("ns", "d")))
    location = call("load_table", "ns.c").metadata_location
    overwrite = [True] if "overwrite" in inspect.signature(Catalog.register_table).parameters else []
    if overwrite:  # since PyIceberg 0.12, whose SqlCatalog does not do it
        with pytest.raises(NotImplementedError):
            call("register_table", "ns.d", location, True)
    registered = call("register_table", "ns.e", location, *([False] if overwrite else []))
    assert isinstance(registered, CatalogTable)
    assert ids(registered) == [5]
    assert call("table_exists", "ns.c")
    call("purge_table", "ns.a")
    assert not call("table_exists", "ns.a")
    assert not list((tmp_path / "elsewhere").rglob("*.parquet"))
    with pytest.raises(PolicyError, match="version 3"):
        call("create_table", "ns.f", schema, None, spec, order, {**key, "format-version": "2"})
    with pytest.raises(TypeError):
        catalog.create_table("ns.f", schema, None, spec, order, key, None)
