"""Wrapped KEKs in a database: the tables ``ags_key_store`` and ``ags_wrapped_keks`` of SQLite or PostgreSQL."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ags_fast._extras import explaining

with explaining("a database as a key store"):
    import sqlalchemy as sa
    from sqlalchemy import exc, select
    from sqlalchemy.dialects import postgresql, sqlite

from ags_fast.errors import FormatError, KeyAccessError
from ags_fast.keys.entry import UnknownKeyError
from ags_fast.keys.stores.base import mend_after_fork
from ags_fast.keys.stores.sql import connect, shown

if TYPE_CHECKING:
    import builtins
    from collections.abc import Collection, Iterator, Mapping

    from sqlalchemy import Connection

__all__ = ["SqlKeyStore"]

DATASET_CHARS = 255  # the longest id of a dataset
AT_ONCE = 500  # rows in one statement
VERSION = 1  # of the schema
OF_0_2 = ("ags_keys", "ags_key_versions")  # tables

TABLES = sa.MetaData()
SCHEMA = sa.Table("ags_key_store", TABLES, sa.Column("version", sa.Integer, primary_key=True, autoincrement=False))
KEKS = sa.Table(
    "ags_wrapped_keks",
    TABLES,
    sa.Column("dataset_id", sa.String(DATASET_CHARS), primary_key=True),
    sa.Column("name", sa.String(255), primary_key=True),
    sa.Column("wrapped", sa.LargeBinary, nullable=False),
)


class SqlKeyStore:
    """A key store in a database, for many datasets.

    The tables are made when there are none. Threads may share a store, and the child of a fork connects for itself.
    With a URL it pickles, as that. A database that cannot be reached, or is busy for 30 seconds, is a KeyAccessError.

    Args:
        url: As SQLAlchemy takes it: ``sqlite:////srv/keys.db`` or ``postgresql+psycopg://user@host/database``; or an
            Engine, for settings of your own. A URL travels to other processes, so one with a password is refused:
            PostgreSQL's library takes it from PGPASSWORD, PGPASSFILE or ``~/.pgpass``, where it connects. ``?dataset=``
            says the same as `dataset_id`.
        dataset_id: The only dataset that the store is for; None: any.

    Raises:
        PolicyError: The URL has a password.
        ValueError: It is not a URL of SQLite or PostgreSQL.
    """

    def __init__(self, url: Any, *, dataset_id: str | None = None) -> None:
        self._url: str | None = None
        if isinstance(url, sa.Engine):
            self._engine = url
        else:
            self._url, self._engine, dataset_id = connect(url, dataset_id)
            weakref.finalize(self, self._engine.dispose)
        if self._engine.dialect.name not in ("sqlite", "postgresql"):
            raise ValueError(f"a key store is in SQLite or PostgreSQL, not in {self._engine.dialect.name}")
        self.dataset_id = dataset_id
        self._ready = False
        mend_after_fork(self)

    def get(self, dataset_id: str, names: Collection[str]) -> dict[str, bytes]:
        """See `KeyResolver`."""
        found: dict[str, bytes] = {}
        with self._transaction(dataset_id) as connection:
            for some in _parts([*names]):
                query = select(KEKS.c.name, KEKS.c.wrapped).where(
                    KEKS.c.dataset_id == dataset_id, KEKS.c.name.in_(some)
                )
                found |= {name: bytes(wrapped) for name, wrapped in connection.execute(query)}
        return found

    def put(self, dataset_id: str, rows: Mapping[str, bytes]) -> None:
        """See `KeyStore`."""
        values = [{"dataset_id": dataset_id, "name": name, "wrapped": wrapped} for name, wrapped in rows.items()]
        with self._transaction(dataset_id) as connection:
            connection.execute(self._insert(KEKS), values)

    def list(self, dataset_id: str) -> builtins.list[str]:
        """See `KeyStore`."""
        with self._transaction(dataset_id) as connection:
            return [*connection.scalars(select(KEKS.c.name).where(KEKS.c.dataset_id == dataset_id))]

    def remove(self, dataset_id: str, names: builtins.list[str]) -> None:
        """See `KeyStore`."""
        with self._transaction(dataset_id) as connection:
            for some in _parts(names):
                connection.execute(sa.delete(KEKS).where(KEKS.c.dataset_id == dataset_id, KEKS.c.name.in_(some)))

    def after_fork(self) -> None:
        """Connect again: the connections are the parent's."""
        self._engine.dispose(close=False)

    @contextmanager
    def _transaction(self, dataset_id: str) -> Iterator[Connection]:
        """A connection, whose transaction is committed in the end."""
        if self.dataset_id not in (None, dataset_id) or len(dataset_id) > DATASET_CHARS:
            raise UnknownKeyError(f"{self!r} is not the key store of the dataset {dataset_id[:DATASET_CHARS]!r}")
        try:
            if not self._ready:
                self._check_schema()
            with self._engine.begin() as connection:
                yield connection
        except exc.SQLAlchemyError as error:
            # The driver's words, not SQLAlchemy's, which show each statement with all that it was given.
            said = str(getattr(error, "orig", None) or type(error).__name__).strip().split("\n")[0][:300]
            raise KeyAccessError(f"the key store in {shown(self._engine)} cannot be used now: {said}") from None

    def _check_schema(self) -> None:
        """See that the tables are those that this version knows, and make them if there are none."""
        try:
            versions = self._versions()
        except exc.DBAPIError:  # most likely there is no such table
            versions = []
        if not versions:
            self._create_tables()
            versions = self._versions()
        if versions != [VERSION]:
            raise FormatError(
                f"the key store in {shown(self._engine)} has the schema {versions[-1]}, and this version of ags_fast "
                f"knows {VERSION}: take a newer one"
            )
        self._ready = True

    def _versions(self) -> builtins.list[int]:
        with self._engine.begin() as connection:
            return [*connection.scalars(select(SCHEMA.c.version).order_by(SCHEMA.c.version))]

    def _create_tables(self) -> None:
        """Make the tables. Others may do so at the same time: the version, which is last, is there once."""
        if old := [name for name in sa.inspect(self._engine).get_table_names() if name in OF_0_2]:
            raise FormatError(
                f"{shown(self._engine)} has the tables {' and '.join(sorted(old))}, made by ags_fast 0.2: take "
                "another database, or drop these tables when no dataset of ags_fast 0.2 needs their keys"
            )
        for table in (KEKS, SCHEMA):
            try:
                table.create(self._engine, checkfirst=True)
            except exc.DBAPIError:  # somebody else makes it too; so it is there now
                table.create(self._engine, checkfirst=True)
        with self._engine.begin() as connection:
            connection.execute(self._insert(SCHEMA), {"version": VERSION})

    def _insert(self, table: sa.Table) -> Any:
        insert = sqlite.insert if self._engine.dialect.name == "sqlite" else postgresql.insert
        return insert(table).on_conflict_do_nothing()

    def __repr__(self) -> str:
        return f"<SqlKeyStore {shown(self._engine)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._url is None:
            raise TypeError("a key store on an Engine stays in its process: make it of a URL")
        return _restore, (self._url, self.dataset_id)


def _restore(url: str, dataset_id: str | None) -> SqlKeyStore:
    return SqlKeyStore(url, dataset_id=dataset_id)


def _parts(names: list[str]) -> Iterator[list[str]]:
    return (names[at : at + AT_ONCE] for at in range(0, len(names), AT_ONCE))
