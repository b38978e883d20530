"""The REST catalog, with encrypted tables.

A REST server sends table metadata and makes them from updates, so files of metadata are not written here. An adapter on
the catalog's HTTP session translates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyiceberg.catalog.rest import RestCatalog as _RestCatalog

from ags_fast.errors import PolicyError
from ags_fast.iceberg.catalogs.base import EncryptedCatalog
from ags_fast.iceberg.commit import table_io
from ags_fast.iceberg.rest.translation import Translator

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        http = super()._create_session()
        for prefix, adapter in list(http.adapters.items()):
            http.mount(prefix, Translator(self.session, adapter))
        return http

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
