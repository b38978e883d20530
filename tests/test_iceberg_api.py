"""What PyIceberg's classes offer, name by name: a new release's methods fail here until somebody has judged them.

A method that opens files by itself, or writes metadata past the FileIO, needs an answer of ours.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import CreateTableTransaction, DataScan, StagedTable, StaticTable, Table, Transaction
from pyiceberg.table.inspect import InspectTable
from pyiceberg.table.maintenance import MaintenanceTable
from pyiceberg.table.update.snapshot import ExpireSnapshots, ManageSnapshots, UpdateSnapshot

from ags_fast import iceberg
from ags_fast.iceberg.catalogs.base import EncryptedCatalog
from ags_fast.iceberg.handles import CatalogTable, FileTable, NewTable

if TYPE_CHECKING:
    from collections.abc import Iterable

# Ours: the method refuses, or does something else for an encrypted table.
OURS: dict[type, str] = {
    Catalog: "create_table create_table_transaction load_table register_table rename_table commit_table purge_table",
    RestCatalog: "plan_scan drop_table",
    Table: "scan delete to_daft to_bodo to_polars __datafusion_table_provider__",
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
    Table: """transaction inspect maintenance refresh name incremental_append_scan format_version schema schemas spec
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
