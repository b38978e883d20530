"""The REST catalog, with encrypted tables.

A REST server sends table metadata and makes them from updates, so files of metadata are not written here. An adapter on
the catalog's HTTP session translates.
"""

from __future__ import annotations

import warnings
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from pyiceberg.catalog.rest import RestCatalog as _RestCatalog
from pyiceberg.table import Table
from pyiceberg.table.update import AssertCreate

from ags_fast.errors import PolicyError
from ags_fast.iceberg import policy
from ags_fast.iceberg.catalogs.base import EncryptedCatalog, response
from ags_fast.iceberg.commit import edit, raw_metadata, table_io
from ags_fast.iceberg.rest.translation import Translator
from ags_fast.iceberg.session import shown
from ags_fast.seals.guard import sealing
from ags_fast.seals.state import PROPERTY

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyiceberg.table import CommitTableResponse
    from pyiceberg.table.update import TableRequirement, TableUpdate
    from pyiceberg.typedef import Identifier
    from requests import Session

    from ags_fast.iceberg.metadata import Raw
    from ags_fast.keys.kms import Kms

__all__ = ["RestCatalog"]

P = ParamSpec("P")
T = TypeVar("T")
SNAPSHOTS = "snapshot-loading-mode"


def _first(table: Table, first: Raw) -> Table:
    """Seal the first state of a table, as its server has answered: that has chosen its UUID and location."""
    if policy.is_encrypted(first) and table_io(table).session.guard.setting != "off":
        made = edit(table, lambda newest: {**newest} if newest == first else newest)
        if PROPERTY not in made["properties"]:
            warnings.warn("another commit came before the table was sealed: seal the table", stacklevel=3)
    return table


def _creates(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that creates a table, or begins to, as one whose table is then sealed."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **named: P.kwargs) -> T:
        with sealing("new"):
            made = method(self, *args, **named)
            if isinstance(made, Table):
                _first(made, raw_metadata(made))
            return made

    return call


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

    def __init__(self, name: str, kms: Kms | None = None, **properties: Any) -> None:
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

    create_table = _creates(EncryptedCatalog.create_table)
    create_table_transaction = _creates(EncryptedCatalog.create_table_transaction)

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Commit updates to a table, which another commit seals if this one creates it. See `EncryptedCatalog`."""
        if not any(isinstance(one, AssertCreate) for one in requirements):
            return super().commit_table(table, requirements, updates)
        with sealing("new"):
            super().commit_table(table, requirements, updates)
            first = shown.get()[2]
            return response(_first(self.load_table(table.name()), first))

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
