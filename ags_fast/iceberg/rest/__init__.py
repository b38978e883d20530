"""PyIceberg's REST catalog, with encrypted tables: see `ags_fast.iceberg.rest.translation`."""

from __future__ import annotations

from ags_fast.iceberg.rest.catalog import RestCatalog

__all__ = ["RestCatalog"]
