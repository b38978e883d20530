"""The Hive catalog, with encrypted tables.

A Hive metastore is the trusted place of an encrypted table: it has the id of the master key, and the hash of the
metadata. Java refuses a table whose metadata have another hash, and so does this catalog.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyiceberg.catalog.hive import HiveCatalog as _HiveCatalog

from ags_fast.iceberg import policy
from ags_fast.iceberg.catalogs.base import LOCATION, EncryptedCatalog, check_stored, set_stored
from ags_fast.metadata.javajson import METADATA_HASH, java_hash

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyiceberg.typedef import Identifier

    from ags_fast.iceberg.session import Session
    from ags_fast.keys.kms import Kms

__all__ = ["HiveCatalog"]


class HiveCatalog(EncryptedCatalog, _HiveCatalog):
    """PyIceberg's HiveCatalog, with encrypted tables."""

    def __init__(self, name: str, kms: Kms | None = None, **properties: Any) -> None:
        super().__init__(name, kms, **properties)
        self._client: Any = _Connection(self._client, self.session)

    def pinned(self, identifier: str | Identifier) -> str:
        """Return the name of a table by which a pin of it is known: a metastore knows no capital letters."""
        return super().pinned(identifier).lower()

    def _convert_hive_into_iceberg(self, table: Any) -> Table:
        parameters = table.parameters
        self.session.expect(parameters.get(LOCATION, ""), parameters.get(METADATA_HASH))
        return check_stored(self.session, parameters, super()._convert_hive_into_iceberg(table))


class _Connection:
    """PyIceberg's connection to the metastore; what it stores of tables has the hash of their metadata."""

    def __init__(self, connection: Any, session: Session) -> None:
        self._connection = connection
        self._session = session

    def __enter__(self) -> _Client:
        return _Client(self._connection.__enter__(), self._session)

    def __exit__(self, *error: Any) -> None:
        self._connection.__exit__(*error)


class _Client:
    """A client of the metastore. What stores a table is here, all else is PyIceberg's."""

    def __init__(self, client: Any, session: Session) -> None:
        self._client = client
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def create_table(self, tbl: Any) -> None:
        """Create a table."""
        self._client.create_table(_hashed(self._session, tbl))

    def alter_table_with_environment_context(self, *, new_tbl: Any, **named: Any) -> None:
        """Change a table."""
        self._client.alter_table_with_environment_context(new_tbl=_hashed(self._session, new_tbl), **named)


def _hashed(session: Session, table: Any) -> Any:
    """Return a table of the metastore with the hash of its metadata. Without one Java compares the master keys only."""
    parameters = table.parameters
    set_stored(session, parameters)
    raw = session.raw(parameters.get(LOCATION, ""))
    if raw is not None:
        parameters.pop(METADATA_HASH, None)
        made = java_hash(raw) if policy.is_encrypted(raw) else None
        if made is not None:
            parameters[METADATA_HASH] = made
    return table
