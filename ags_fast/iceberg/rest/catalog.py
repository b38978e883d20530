"""The REST catalog, with encrypted tables.

A REST server sends table metadata and makes them from updates, so files of metadata are not written here. An adapter on
the catalog's HTTP session translates.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from pyiceberg.catalog.rest import RestCatalog as _RestCatalog
from pyiceberg.table.update import AssertCreate

from ags_fast.errors import PolicyError
from ags_fast.iceberg import policy
from ags_fast.iceberg.catalogs.base import EncryptedCatalog, response
from ags_fast.iceberg.commit import edit, raw_metadata, table_io
from ags_fast.iceberg.rest.translation import Translator
from ags_fast.metadata.guard import loading, sealing
from ags_fast.metadata.state import PROPERTY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.table import CommitTableResponse, CreateTableTransaction, Table
    from pyiceberg.table.update import TableRequirement, TableUpdate
    from pyiceberg.typedef import Identifier
    from requests import Session

    from ags_fast.keys.kms import KmsClient

__all__ = ["RestCatalog"]

SNAPSHOTS = "snapshot-loading-mode"


class RestCatalog(EncryptedCatalog, _RestCatalog):
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

    def _create_session(self) -> Session:
        """Return PyIceberg's HTTP session, also the first one, which asks for the server's configuration."""
        self.session.guard.served = True
        http = super()._create_session()
        for prefix, adapter in list(http.adapters.items()):
            http.mount(prefix, Translator(self.session, adapter))
        return http

    def create_table(self, *args: Any, **named: Any) -> Table:
        """Create a table, and seal it in a commit of its own: the server chooses its UUID and location."""
        with sealing("new"):
            return self._first(super().create_table(*args, **named))

    def create_table_transaction(self, *args: Any, **named: Any) -> CreateTableTransaction:
        """Begin to create a table. See PyIceberg's method."""
        with sealing("new"):
            return super().create_table_transaction(*args, **named)

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Commit updates to a table, which another commit seals if this one creates it. See `EncryptedCatalog`."""
        if not any(isinstance(one, AssertCreate) for one in requirements):
            return super().commit_table(table, requirements, updates)
        with sealing("new"):
            super().commit_table(table, requirements, updates)
            return response(self._first(self.load_table(table.name())))

    def _first(self, table: Table) -> Table:
        """Seal the first state of a table that was created."""
        first = raw_metadata(table)
        if policy.is_encrypted(first) and self.session.guard.setting != "off":
            with loading(".".join(table.name())):
                made = edit(table, lambda newest: {**newest} if newest == first else newest)
            if PROPERTY not in made["properties"]:
                warnings.warn("another commit came before the table was sealed: seal the table", stacklevel=3)
        return table

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
        if not purge_requested:
            super().drop_table(identifier)
        elif table_io(self.load_table(identifier)).encrypted:
            self.purge_table(identifier)
        else:
            _RestCatalog.drop_table(self, identifier, purge_requested)
