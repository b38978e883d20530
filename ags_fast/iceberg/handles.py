"""The tables that catalogs return: PyIceberg's own, but for deletes, and for methods that hand files to other readers.

Such a reader gets the location of the metadata, or paths of data files, and opens them by itself: it would find
ciphertext. Tables in plaintext keep these methods.
"""

from __future__ import annotations

import warnings
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from pyiceberg.table import ALWAYS_TRUE, StagedTable, StaticTable, Table, TableProperties

from ags_fast.errors import PolicyError
from ags_fast.iceberg import policy
from ags_fast.iceberg.deletes import delete

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.table import DataScan

__all__ = ["CatalogTable", "FileTable", "NewTable", "handle"]

COPY_ON_WRITE = "copy-on-write"


class _Handle(Table):
    """What both kinds of tables share."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("a table of ags_fast.iceberg holds keys and is never pickled: load it where it is used")

    def scan(self, *args: Any, **named: Any) -> DataScan:
        """Plan a scan. See PyIceberg's method.

        A REST server never plans the scan of an encrypted table: its answer would name files without what opens them.
        """
        scan = super().scan(*args, **named)
        if policy.KEY_ID in self.metadata.properties:
            scan.catalog = None  # PyIceberg then reads the manifests itself
        return scan

    def to_daft(self) -> Any:
        """Refuse an encrypted table. See PyIceberg's method."""
        self._refuse("to_daft()", "Daft")
        return super().to_daft()

    def to_bodo(self) -> Any:
        """Refuse an encrypted table. See PyIceberg's method."""
        self._refuse("to_bodo()", "Bodo")
        return super().to_bodo()

    def to_polars(self) -> Any:
        """Refuse an encrypted table. See PyIceberg's method."""
        self._refuse("to_polars()", "Polars")
        return super().to_polars()

    def __datafusion_table_provider__(self, *args: Any) -> Any:
        """Refuse an encrypted table. See PyIceberg's method."""
        self._refuse("__datafusion_table_provider__", "DataFusion")
        return super().__datafusion_table_provider__(*args)

    def _refuse(self, method: str, library: str) -> None:
        if policy.KEY_ID in self.metadata.properties:
            raise PolicyError(
                f"{method} of an encrypted table: {library} would open the files by itself, without their keys. Use "
                "table.scan(...), and then its to_arrow(), to_arrow_batch_reader(), to_pandas(), to_polars() or "
                "to_duckdb(); or open the files of ags_fast.iceberg.files(table) by ags_fast.parquet.open_plain"
            )


class CatalogTable(_Handle):
    """A table of a catalog."""

    def delete(
        self,
        delete_filter: BooleanExpression | str = ALWAYS_TRUE,
        snapshot_properties: Mapping[str, str] = MappingProxyType({}),
        case_sensitive: bool = True,
        branch: str | None = "main",
    ) -> None:
        """Delete rows. See PyIceberg's method.

        An encrypted table gets deletion vectors, so that rows which stay keep their row ids: see `delete`. With the
        table's property ``write.delete.mode=copy-on-write``, and in a transaction, rows that stay are written anew.
        """
        mode = self.metadata.properties.get(TableProperties.DELETE_MODE)
        if policy.KEY_ID not in self.metadata.properties or mode == COPY_ON_WRITE or branch is None:
            super().delete(delete_filter, dict(snapshot_properties), case_sensitive, branch)
            return
        done = delete(
            self,
            delete_filter,
            branch=branch,
            snapshot_properties=snapshot_properties,
            case_sensitive=case_sensitive,
        )
        if done.snapshot_id is None:
            warnings.warn("Delete operation did not match any records", stacklevel=2)


class FileTable(_Handle, StaticTable):
    """A table that was opened by the location of its metadata."""


class NewTable(_Handle, StagedTable):
    """A table that a transaction creates."""


def handle(table: Table) -> CatalogTable:
    """Return a table as catalogs of ags_fast.iceberg return it."""
    if isinstance(table, CatalogTable):
        return table
    return CatalogTable(
        table.name(), table.metadata, table.metadata_location, table.io, table.catalog, getattr(table, "config", {})
    )
