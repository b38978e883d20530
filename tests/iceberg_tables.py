"""Encrypted tables for tests: a KMS, a SQL catalog in a folder, and rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

MASTER = "master"
KEY_ID = "encryption.key-id"
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


def sql_catalog(folder: Path, kms: Mapping[str, str], **properties: Any) -> Catalog:
    """Return the encrypted SQL catalog of a folder, with the namespace ``ns``."""
    from ags_fast.iceberg import load_catalog

    catalog = load_catalog(
        "tests",
        kms=kms,
        **{"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/wh"} | properties,
    )
    catalog.create_namespace_if_not_exists("ns")
    return catalog


def new_table(catalog: Catalog, name: str = "t", *, schema: Any = SCHEMA, **properties: str) -> Table:
    """Create an encrypted table. Underscores in names of properties stand for dots."""
    more = {key.replace("_", "."): value for key, value in properties.items()}
    return catalog.create_table(f"ns.{name}", schema=schema, properties={KEY_ID: MASTER, **more})


def rows(first: int, last: int) -> pa.Table:
    """Rows whose ids are from `first` up to `last`."""
    ids = range(first, last)
    return pa.table({"id": list(ids), "name": [f"name {i}" for i in ids]}, schema=SCHEMA)


def ids(table: Table, **scan: Any) -> list[int]:
    """The ids of a table's rows, sorted."""
    found: list[int] = table.scan(**scan).to_arrow()["id"].to_pylist()
    return sorted(found)
