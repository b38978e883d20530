"""The tables that catalogs return: PyIceberg's own, but for deletes, and for methods that hand files to other readers.

Such a reader gets the location of the metadata, or paths of data files, and opens them by itself: it would find
ciphertext. Tables in plaintext keep these methods.
"""

from __future__ import annotations

import sys
import warnings
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import pyiceberg.table
from pyiceberg.table import ALWAYS_TRUE, DataScan, StagedTable, StaticTable, Table, TableProperties, Transaction

from ags_fast.errors import PolicyError
from ags_fast.iceberg import policy
from ags_fast.iceberg.commit import begin, raw_metadata, table_io
from ags_fast.iceberg.container import codec_of
from ags_fast.iceberg.deletes import delete
from ags_fast.iceberg.properties import GONE, TABLE, is_shown, restored
from ags_fast.iceberg.session import shown
from ags_fast.seals.state import PROPERTY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.table.update.snapshot import UpdateSnapshot

    from ags_fast.iceberg.metadata import Raw

__all__ = ["CatalogTable", "FileTable", "NewTable", "handle"]

COPY_ON_WRITE = "copy-on-write"
LAZILY = 'pl.scan_iceberg(table, reader_override="pyiceberg") reads it lazily. '


def _no_keys(what: str, library: str, lazily: str = "") -> PolicyError:
    return PolicyError(
        f"{what} of an encrypted table: {library} would open the files by itself, without their keys. {lazily}Use "
        "table.scan(...), and then its to_arrow(), to_arrow_batch_reader(), to_pandas(), to_polars() or "
        "to_duckdb(); or open the files of ags_fast.iceberg.files(table) by ags_fast.parquet.open_plain"
    )


def _foreign(method: str, library: str, lazily: str = "") -> Any:
    """Return a method of PyIceberg's that hands files to another library, as one that refuses encrypted tables."""

    def call(self: Table, *args: Any) -> Any:
        if policy.KEY_ID in self.metadata.properties:
            raise _no_keys(f"{method}()", library, lazily)
        return getattr(Table, method)(self, *args)

    call.__name__, call.__doc__ = method, "Refuse an encrypted table. See PyIceberg's method."
    return call


def _as(kind: type, one: Any) -> Any:
    """Return an object as one of another class, with the same attributes."""
    made: Any = object.__new__(kind)
    vars(made).update(vars(one))
    return made


def _plan_files(self: Any) -> Any:
    """Return the tasks of a scan. PolicyError for Polars' own reader, of which nothing else tells before it reads."""
    if sys._getframe(1).f_globals.get("__name__", "").startswith("polars."):  # noqa: SLF001 (the caller's module)
        raise _no_keys("pl.scan_iceberg()", "Polars", LAZILY)
    return super(type(self), self).plan_files()


class _Scan(DataScan):
    plan_files = _plan_files


class _AppendScan(getattr(pyiceberg.table, "IncrementalAppendScan", DataScan)):  # type: ignore[misc]  # since 0.12
    plan_files = _plan_files


class _Handle(Table):
    """What both kinds of tables share.

    Attributes:
        raw: The raw metadata of which `metadata` is the facade; None: those that the session has.
    """

    raw: Raw | None = None

    def _see(self) -> None:
        """Keep the raw metadata that this thread has just read or written."""
        by, at, raw = shown.get()
        self.raw = raw if by is table_io(self).session and at == (self.metadata_location or "") else None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a table of ags_fast.iceberg is never pickled: load it where it is used, or send its io and metadata"
        )

    def __copy__(self) -> Self:
        return _as(type(self), self)  # type: ignore[no-any-return]

    @property
    def properties(self) -> dict[str, str]:
        """All properties of the table but its seal, also what PyIceberg is not shown: `ags_fast.iceberg.properties`."""
        if not self.metadata_location:  # a new table, or one of a server that keeps it to itself
            return self.metadata.properties
        found = restored(raw_metadata(self).get("properties"), self.metadata.properties)
        return {name: value for name, value in found.items() if name != PROPERTY}

    def scan(self, *args: Any, **named: Any) -> DataScan:
        """Plan a scan. See PyIceberg's method.

        A REST server never plans the scan of an encrypted table: its answer would name files without what opens them.
        """
        scan = super().scan(*args, **named)
        if policy.KEY_ID in self.metadata.properties:
            scan.catalog = None  # PyIceberg then reads the manifests itself
            scan = _as(_Scan, scan)
        return scan

    def incremental_append_scan(self, **named: Any) -> Any:
        """Plan a scan of rows that were appended. See PyIceberg's method."""
        scan = super().incremental_append_scan(**named)
        return _as(_AppendScan, scan) if policy.KEY_ID in self.metadata.properties else scan

    to_bodo = _foreign("to_bodo", "Bodo")
    to_daft = _foreign("to_daft", "Daft")
    to_polars = _foreign("to_polars", "Polars", LAZILY)
    __datafusion_table_provider__ = _foreign("__datafusion_table_provider__", "DataFusion")


class _Transaction(Transaction):
    """A transaction that also removes properties that PyIceberg is not shown."""

    def update_snapshot(self, *args: Any, **named: Any) -> UpdateSnapshot:
        """Begin a snapshot. See PyIceberg's method, which hears of a wrong codec when data files are written."""
        codec_of(self.table_metadata.properties)
        return super().update_snapshot(*args, **named)

    def remove_properties(self, *removals: str) -> Transaction:
        """Remove properties. See PyIceberg's method."""
        if PROPERTY in removals:
            policy.check_given({PROPERTY: ""}, {})
        here, there = self.table_metadata.properties, self._table.properties
        hidden = [name for name in removals if not is_shown(name, TABLE) and (name in here or name in there)]
        if hidden:
            self.set_properties(dict.fromkeys(hidden, GONE))
        seen = [name for name in removals if name not in hidden]
        return super().remove_properties(*seen) if seen else self


class CatalogTable(_Handle):
    """A table of a catalog."""

    def refresh(self) -> Table:
        """Load the newest metadata. See PyIceberg's method."""
        super().refresh()
        self._see()
        return self

    def _do_commit(self, *args: Any, **named: Any) -> None:
        super()._do_commit(*args, **named)
        self._see()

    def transaction(self) -> Transaction:
        """Begin a transaction. See PyIceberg's method, and `begin` of ags_fast.iceberg.commit."""
        begin(self)
        return _Transaction(self)

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
            self, delete_filter, branch=branch, snapshot_properties=snapshot_properties, case_sensitive=case_sensitive
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
    table_io(table).belongs(table.metadata.table_uuid, table.metadata.location)
    made = CatalogTable(
        table.name(), table.metadata, table.metadata_location, table.io, table.catalog, getattr(table, "config", {})
    )
    made._see()  # noqa: SLF001
    return made
