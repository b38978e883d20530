"""The REST catalog, with encrypted tables.

A REST server sends table metadata and makes them from updates, so files of metadata are not written here. An adapter on
the catalog's HTTP session translates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyiceberg.catalog.rest import RestCatalog as _RestCatalog

from ags_fast.errors import PolicyError
from ags_fast.iceberg.catalogs.base import EncryptedCatalog
from ags_fast.iceberg.commit import raw_metadata, table_io
from ags_fast.iceberg.rest.translation import Base, Translator, check_config, committing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.table import CommitTableResponse, Table
    from pyiceberg.table.update import TableRequirement, TableUpdate
    from pyiceberg.typedef import Identifier

    from ags_fast.keys.kms import KmsClient

__all__ = ["RestCatalog"]

SNAPSHOTS = "snapshot-loading-mode"


class _Checked(_RestCatalog):
    """PyIceberg's RestCatalog; what the server's configuration makes of the properties is checked."""

    def __init__(self, name: str, **properties: Any) -> None:
        super().__init__(name, **properties)
        check_config((key for key, value in self.properties.items() if properties.get(key) != value), "the server")


class RestCatalog(EncryptedCatalog, _Checked):
    """PyIceberg's RestCatalog, with encrypted tables.

    All snapshots of a table are loaded, also with ``snapshot-loading-mode``: keys of snapshots that are not seen would
    look unused.

    Args:
        name: The catalog's name.
        kms: A KMS client or its properties; None takes them from the catalog's properties, not from the server's.
        **properties: The catalog's properties.

    Raises:
        PolicyError: The server's configuration names the class that opens files, or the KMS.
    """

    def __init__(self, name: str, kms: KmsClient | Mapping[str, str] | None = None, **properties: Any) -> None:
        super().__init__(name, kms, **properties)
        if SNAPSHOTS in self.properties:
            self.properties[SNAPSHOTS] = "all"
        http = self._session
        for prefix, adapter in list(http.adapters.items()):
            http.mount(prefix, Translator(self.session, adapter))

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Commit updates to a table. See PyIceberg's method."""
        token = committing.set(Base(raw_metadata(table) if table.metadata_location else None, table_io(table)))
        try:
            return super().commit_table(table, requirements, updates)
        finally:
            committing.reset(token)

    def plan_scan(self, identifier: str | Identifier, request: Any) -> Any:
        """Let the server plan a scan of a table in plaintext. See PyIceberg's method.

        Raises:
            PolicyError: The table is encrypted: the server would name files without what opens them.
        """
        if table_io(self.load_table(identifier)).encrypted:
            raise PolicyError("a server cannot plan the scan of an encrypted table: use table.scan(...).plan_files()")
        return super().plan_scan(identifier, request)

    def drop_table(self, identifier: str | Identifier, purge_requested: bool = False) -> None:
        """Drop a table. See PyIceberg's method.

        Args:
            identifier: The table.
            purge_requested: Whether its files are deleted, too: those of an encrypted table from here, as `purge_table`
                does. The server cannot read which they are.
        """
        if purge_requested and table_io(self.load_table(identifier)).encrypted:
            self.purge_table(identifier)
        else:
            super().drop_table(identifier, purge_requested)
