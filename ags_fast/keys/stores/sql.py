"""Wrapped KEKs in a database: the tables ``ags_key_store`` and ``ags_wrapped_keks`` of SQLite or PostgreSQL."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from ags_fast._extras import explaining
from ags_fast._secrets import is_secret_name

with explaining("a database as a key store"):
    import sqlalchemy as sa
    from sqlalchemy import exc, select
    from sqlalchemy.dialects import postgresql, sqlite

from ags_fast.errors import FormatError, KeyAccessError, PolicyError, UnknownKeyError

if TYPE_CHECKING:
    import builtins
    from collections.abc import Collection, Iterator, Mapping

    from sqlalchemy import Connection

__all__ = ["SqlKeyStore"]

DATASET_CHARS = 255  # the longest id of a dataset
DATASET = "dataset"  # the parameter of the URL that says which
CONNECT_SECONDS = 10
STATEMENT_SECONDS = 30
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
            self._url, self._engine, dataset_id = _connect(url, dataset_id)
            weakref.finalize(self, self._engine.dispose)
        if self._engine.dialect.name not in ("sqlite", "postgresql"):
            raise ValueError(f"a key store is in SQLite or PostgreSQL, not in {self._engine.dialect.name}")
        self.dataset_id = dataset_id
        self._ready = False
        _stores.add(self)

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
        """Leave the connections to the parent."""
        self._engine.dispose(close=False)

    @contextmanager
    def _transaction(self, dataset_id: str) -> Iterator[Connection]:
        if self.dataset_id not in (None, dataset_id) or len(dataset_id) > DATASET_CHARS:
            raise UnknownKeyError(f"{self!r} is not the key store of the dataset {dataset_id[:DATASET_CHARS]!r}")
        try:
            with _quiet if self._engine.dialect.name == "sqlite" else nullcontext():
                if not self._ready:
                    self._check_schema()
                with self._engine.begin() as connection:
                    yield connection
        except exc.SQLAlchemyError as error:
            # The driver's words, not SQLAlchemy's, which show each statement with all that it was given.
            said = str(getattr(error, "orig", None) or type(error).__name__).strip().split("\n")[0][:300]
            raise KeyAccessError(f"the key store in {_shown(self._engine)} cannot be used now: {said}") from None

    def _check_schema(self) -> None:
        try:
            versions = self._versions()
        except exc.DBAPIError:  # most likely there is no such table
            versions = []
        if not versions:
            self._create_tables()
            versions = self._versions()
        if versions != [VERSION]:
            raise FormatError(
                f"the key store in {_shown(self._engine)} has the schema {versions[-1]}, and this version of ags_fast "
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
                f"{_shown(self._engine)} has the tables {' and '.join(sorted(old))}, made by ags_fast 0.2: take "
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
        return f"<SqlKeyStore {_shown(self._engine)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._url is None:
            raise TypeError("a key store on an Engine stays in its process: make it of a URL")
        return partial(SqlKeyStore, dataset_id=self.dataset_id), (self._url,)


def _parts(names: list[str]) -> Iterator[list[str]]:
    return (names[at : at + AT_ONCE] for at in range(0, len(names), AT_ONCE))


def _connect(url: str, dataset_id: str | None) -> tuple[str, sa.Engine, str | None]:
    try:
        parsed = sa.make_url(url)
    except (exc.ArgumentError, ValueError):
        # Which is not shown: it may hold a password.
        raise ValueError("a key store in a database has a URL as SQLAlchemy takes it") from None
    if parsed.password is not None or any(map(is_secret_name, parsed.query)):
        raise PolicyError(
            f"the URL of {parsed.host or parsed.drivername} holds a password, and would take it to wherever the store "
            "is sent: leave it out, and set PGPASSWORD, or PGPASSFILE and ~/.pgpass, wherever it is used"
        )
    named = parsed.query.get(DATASET, dataset_id)
    if not isinstance(named, str | None) or dataset_id not in (None, named):
        raise ValueError(f"the URL names the dataset {named!r}, not {dataset_id!r}")
    parsed = parsed.difference_update_query([DATASET])
    settings: dict[str, Any] = {}
    if parsed.get_backend_name() == "sqlite":
        if parsed.database in (None, "", ":memory:") or "mode=memory" in str(parsed):
            raise ValueError("each connection to SQLite's memory sees another database: take a file, or MemoryKeyStore")
        if not parsed.database.startswith("file:"):
            parsed = parsed.set(database=os.path.abspath(parsed.database))
        settings = {"timeout": STATEMENT_SECONDS}
    elif parsed.drivername in ("postgresql", "postgresql+psycopg", "postgresql+psycopg2"):
        settings = {
            "connect_timeout": CONNECT_SECONDS,
            "tcp_user_timeout": 1000 * STATEMENT_SECONDS,
            "options": f"-c statement_timeout={1000 * STATEMENT_SECONDS}",
        }
    settings = {name: value for name, value in settings.items() if name not in parsed.query}
    try:
        # One connection is kept, and looked at before it is used again.
        engine = sa.create_engine(parsed, connect_args=settings, pool_pre_ping=True, pool_size=1, max_overflow=15)
    except exc.NoSuchModuleError:
        raise ValueError(f"SQLAlchemy knows no {parsed.drivername}://") from None
    except ImportError as error:
        raise ImportError(
            f"{parsed.drivername}:// needs a driver ({error.name}): pip install 'psycopg[binary]'"
        ) from None
    return parsed.render_as_string(), engine, named


def _shown(engine: sa.Engine) -> str:
    return engine.url.render_as_string(hide_password=True)


_stores: weakref.WeakSet[SqlKeyStore] = weakref.WeakSet()
_quiet = threading.RLock()  # held while SQLite is asked: a fork would copy locks of its own that a thread holds


def _after_fork() -> None:
    """Have the child of a fork connect for itself: the connections are the parent's."""
    _quiet.release()
    for store in list(_stores):
        store.after_fork()


os.register_at_fork(before=_quiet.acquire, after_in_parent=_quiet.release, after_in_child=_after_fork)
