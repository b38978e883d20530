"""The SQL catalog, with encrypted tables."""

from __future__ import annotations

from pyiceberg.catalog.sql import SqlCatalog as _SqlCatalog

from ags_fast.iceberg.catalogs.base import EncryptedCatalog

__all__ = ["SqlCatalog"]


class SqlCatalog(EncryptedCatalog, _SqlCatalog):
    """PyIceberg's SqlCatalog, with encrypted tables: SQLite or PostgreSQL."""
