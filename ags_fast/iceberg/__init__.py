"""Encrypted Iceberg tables through unmodified PyIceberg: read, write, turn their keys, verify them."""

from __future__ import annotations

from ags_fast._lazy import lazy as _lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ags_fast.iceberg.catalogs.dynamodb import DynamoDbCatalog
    from ags_fast.iceberg.catalogs.glue import GlueCatalog
    from ags_fast.iceberg.catalogs.hive import HiveCatalog
    from ags_fast.iceberg.catalogs.sql import SqlCatalog
    from ags_fast.iceberg.deletes import Deleted, delete
    from ags_fast.iceberg.encryption import encrypt
    from ags_fast.iceberg.expiry import expire
    from ags_fast.iceberg.io import FileIO
    from ags_fast.iceberg.properties import inspecting
    from ags_fast.iceberg.rekeying import rekey
    from ags_fast.iceberg.rest import RestCatalog
    from ags_fast.iceberg.rotation import rotate
    from ags_fast.iceberg.seals import check_pin, pin, seal
    from ags_fast.iceberg.session import clear_cache
    from ags_fast.iceberg.tables import TableFile, files, load_catalog, open_table
    from ags_fast.iceberg.upkeep import maintain
    from ags_fast.iceberg.verification import verify

__all__ = ["Deleted", "DynamoDbCatalog", "FileIO", "GlueCatalog", "HiveCatalog", "RestCatalog", "SqlCatalog"]
__all__ += ["TableFile", "check_pin", "clear_cache", "delete", "encrypt", "expire", "files", "inspecting"]
__all__ += ["load_catalog", "maintain", "open_table", "pin", "rekey", "rotate", "seal", "verify"]

_HOMES = {
    "catalogs.dynamodb": ("DynamoDbCatalog",),
    "catalogs.glue": ("GlueCatalog",),
    "catalogs.hive": ("HiveCatalog",),
    "catalogs.sql": ("SqlCatalog",),
    "deletes": ("Deleted", "delete"),
    "encryption": ("encrypt",),
    "expiry": ("expire",),
    "io": ("FileIO",),
    "properties": ("inspecting",),
    "rekeying": ("rekey",),
    "rest": ("RestCatalog",),
    "rotation": ("rotate",),
    "seals": ("check_pin", "pin", "seal"),
    "session": ("clear_cache",),
    "tables": ("TableFile", "files", "load_catalog", "open_table"),
    "upkeep": ("maintain",),
    "verification": ("verify",),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _HOMES)
