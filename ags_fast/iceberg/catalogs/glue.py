"""The Glue catalog, with encrypted tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyiceberg.catalog.glue import GlueCatalog as _GlueCatalog

from ags_fast.iceberg.catalogs.base import EncryptedCatalog, check_stored, set_stored

if TYPE_CHECKING:
    from pyiceberg.table import Table

__all__ = ["GlueCatalog"]


class GlueCatalog(EncryptedCatalog, _GlueCatalog):
    """PyIceberg's GlueCatalog, with encrypted tables."""

    def _create_glue_table(self, database_name: str, table_name: str, table_input: Any) -> None:
        set_stored(self.session, table_input.get("Parameters", {}))
        super()._create_glue_table(database_name, table_name, table_input)

    def _update_glue_table(self, database_name: str, table_name: str, table_input: Any, version_id: str) -> None:
        set_stored(self.session, table_input.get("Parameters", {}))
        super()._update_glue_table(database_name, table_name, table_input, version_id)

    def _convert_glue_to_iceberg(self, glue_table: Any) -> Table:
        table = super()._convert_glue_to_iceberg(glue_table)
        return check_stored(self.session, glue_table["Parameters"], table)
