"""KEKs in a database: the tables ``ags_keys`` and ``ags_key_versions`` of SQLite or PostgreSQL, for many datasets."""

from __future__ import annotations

import json
import threading
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ags_fast._extras import explaining

with explaining("a database as a key store"):
    import sqlalchemy as sa
    from sqlalchemy import delete, exc, func, insert, select, update

from ags_fast.errors import FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.keys.chain import sha256
from ags_fast.keys.encoding import parse_object
from ags_fast.keys.entry import KeyEntry
from ags_fast.keys.envelope import binding
from ags_fast.keys.stores.base import (
    HISTORY,
    Change,
    Entries,
    check_changes,
    conflict,
    mend_after_fork,
    summary,
    unknown,
)
from ags_fast.keys.stores.database import DATASET, connect, shown

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import Connection

__all__ = ["SqlKeyStore"]

DATASET_CHARS = 255  # the longest id of a dataset
KEY_CHARS = 512  # the longest id of a key: an index takes no more than some 2700 bytes
ROWS = 500  # looked up or removed in one statement
ROW_CHARS = 32 << 20  # of JSON

# Times are milliseconds since the epoch.
TABLES = sa.MetaData()
KEYS = sa.Table(
    "ags_keys",
    TABLES,
    sa.Column("dataset_id", sa.String(DATASET_CHARS), primary_key=True),
    sa.Column("key_id", sa.String(KEY_CHARS), primary_key=True),
    sa.Column("entry", sa.Text, nullable=False),  # JSON, as `KeyEntry.to_json` has it
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("changed_version", sa.BigInteger, nullable=False),
)
VERSIONS = sa.Table(
    "ags_key_versions",
    TABLES,
    sa.Column("dataset_id", sa.String(DATASET_CHARS), primary_key=True),
    sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("time_ms", sa.BigInteger, nullable=False),
    sa.Column("operation", sa.Text, nullable=False),
    sa.Column("changes", sa.Text, nullable=False),  # JSON: {"added": [key id, …], "changed": …, "removed": …}
    sa.Column("digest", sa.String(64), nullable=False),  # SHA-256 of the one before and of this change, hex
)


class SqlKeyStore:
    """The keys of a dataset in a database, which may have those of others, too.

    url: as SQLAlchemy takes it: ``sqlite:///keys.db`` or ``postgresql+psycopg://user@host/database``, with
    ``?dataset=`` and the dataset's id, unless `dataset_id` says it; or an Engine, for settings of your own. A URL
    travels to other processes, so one with a password is refused: PostgreSQL's library takes it from PGPASSWORD,
    PGPASSFILE or ``~/.pgpass``, where it connects.

    The tables are made when there are none. Every change is one transaction, which the primary key of
    ``ags_key_versions`` decides. The database says who may change the keys: nothing else shows that an entry is not
    what was put in.

    Entries that were read are kept until `refresh`; what is not among them is one SELECT by the primary key. Threads
    may share a store, and the child of a fork connects for itself. With a URL it pickles, as that. KeyAccessError if
    the database cannot be reached, is busy for 30 seconds, or refuses.
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
        self._ready = False
        self._lock = threading.RLock()
        self._version: int | None = None
        self._known: dict[str, KeyEntry] = {}
        mend_after_fork(self)
        if dataset_id is None:
            raise PolicyError(
                f"{shown(self._engine)} may have many datasets: add ?{DATASET}= and an id. {self._choices()}"
            )
        binding(dataset_id, "", "")  # ValueError if it cannot be one
        if not 0 < len(dataset_id) <= DATASET_CHARS:
            raise ValueError(f"the id of a dataset has 1 to {DATASET_CHARS} characters here")
        self.dataset_id = dataset_id

    @property
    def version(self) -> int:
        """As `KeyResolver` has it."""
        with self._lock:
            return self.refresh() if self._version is None else self._version

    def refresh(self) -> int:
        """As `KeyResolver` has it."""
        newest = select(func.max(VERSIONS.c.version)).where(VERSIONS.c.dataset_id == self.dataset_id)
        with self._lock:
            self._known, self._version = {}, None
            with self._transaction() as connection:
                self._version = version = connection.scalar(newest) or 0
            return int(version)

    @property
    def entries(self) -> Entries:
        """The entries as an `Envelope` takes them."""
        return Entries(self)

    def get(self, key_id: str) -> KeyEntry:
        """As `KeyResolver` has it."""
        with self._lock:
            entry = self._known.get(key_id)
            if entry is None:
                self._first_version()
                with self._transaction() as connection:
                    entry = self._select(connection, [key_id]).get(key_id)
                if entry is None:
                    raise unknown(key_id, f"{self!r}")
                self._known[key_id] = entry
            return entry

    def list(self, state: str | None = None) -> builtins.list[KeyEntry]:
        """As `KeyResolver` has it."""
        query = select(KEYS.c.key_id, KEYS.c.entry).where(KEYS.c.dataset_id == self.dataset_id)
        if state is not None:
            query = query.where(KEYS.c.state == state)
        self._first_version()
        with self._transaction() as connection:
            return [_entry(*row) for row in connection.execute(query.order_by(KEYS.c.created_ms, KEYS.c.key_id))]

    def digest(self, version: int) -> str | None:
        """What stands for a version, and all before it: a SHA-256 in hex. None if there was no such version."""
        query = select(VERSIONS.c.digest).where(VERSIONS.c.dataset_id == self.dataset_id, VERSIONS.c.version == version)
        with self._transaction() as connection:
            found: str | None = connection.scalar(query)
            return found

    def compare_and_swap(
        self, changes: Mapping[str, KeyEntry | None], expected_version: int, *, operation: str = "change"
    ) -> int:
        """As `KeyResolver` has it."""
        check_changes(changes)
        for key_id in changes:
            if len(key_id) > KEY_CHARS:
                raise ValueError(f"the id of a key has up to {KEY_CHARS} characters here")
        with self._lock:
            try:
                with self._transaction() as connection:
                    self._change(connection, changes, expected_version, operation)
            except (_LostError, exc.IntegrityError):  # of two that insert one version, the later one waits, and fails
                raise conflict(f"{self!r}", expected_version, self.refresh()) from None
            except KeyAccessError:
                self._version = None  # for nobody knows whether it was made
                raise
            self._version = expected_version + 1
            self._known = {key_id: entry for key_id, entry in changes.items() if entry is not None}
            return self._version

    def history(self) -> builtins.list[Change]:
        """As `KeyResolver` has it."""
        query = select(VERSIONS.c.version, VERSIONS.c.time_ms, VERSIONS.c.changes).where(
            VERSIONS.c.dataset_id == self.dataset_id
        )
        with self._transaction() as connection:
            rows = connection.execute(query.order_by(VERSIONS.c.version.desc()).limit(HISTORY)).all()
        return [
            Change.from_json({"version": number, "time_ms": time_ms, **_json(changes)}, f"{self!r}")
            for number, time_ms, changes in reversed(rows)
        ]

    def __repr__(self) -> str:
        return f"<SqlKeyStore {shown(self._engine)} {DATASET}={self.dataset_id!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._url is None:
            raise TypeError("a key store on an Engine stays in its process: make it of a URL")
        return _restore, (self._url, self.dataset_id)

    def after_fork(self) -> None:
        """Make a new lock, and connect again."""
        self._lock = threading.RLock()
        self._engine.dispose(close=False)  # the connections are the parent's

    def _first_version(self) -> None:
        """Know a version before anything is read, so that none is newer than what was read."""
        if self._version is None:
            self.refresh()

    def _choices(self) -> str:
        try:
            with self._transaction() as connection:
                ids = list(connection.scalars(select(VERSIONS.c.dataset_id).distinct().limit(20)))
        except KeyAccessError as error:
            return str(error)
        return f"It has {', '.join(map(repr, sorted(ids)))}" if ids else "It has none yet"

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """A connection, whose transaction is committed in the end. IntegrityError of SQLAlchemy passes."""
        try:
            if not self._ready:
                self._create_tables()
            with self._engine.begin() as connection:
                yield connection
        except exc.IntegrityError:
            raise
        except exc.SQLAlchemyError as error:
            # The driver's words, not SQLAlchemy's, which show each statement with all that it was given.
            said = str(getattr(error, "orig", None) or type(error).__name__).strip().split("\n")[0][:300]
            raise KeyAccessError(f"the key store in {shown(self._engine)} cannot be used now: {said}") from None

    def _create_tables(self) -> None:
        for table in TABLES.sorted_tables:
            try:
                table.create(self._engine, checkfirst=True)
            except exc.DBAPIError:  # somebody else makes it too; so it is there now
                table.create(self._engine, checkfirst=True)
        self._ready = True

    # ---- inside of a transaction

    def _select(self, connection: Connection, key_ids: Sequence[str]) -> dict[str, KeyEntry]:
        found: dict[str, KeyEntry] = {}
        for begin in range(0, len(key_ids), ROWS):
            some = KEYS.c.key_id.in_(key_ids[begin : begin + ROWS])
            query = select(KEYS.c.key_id, KEYS.c.entry).where(KEYS.c.dataset_id == self.dataset_id, some)
            found |= {key_id: _entry(key_id, text) for key_id, text in connection.execute(query)}
        return found

    def _change(
        self, connection: Connection, changes: Mapping[str, KeyEntry | None], expected: int, operation: str
    ) -> None:
        mine, number = {"dataset_id": self.dataset_id}, expected + 1
        made = {
            "version": number,
            "time_ms": time.time_ns() // 1_000_000,
            "operation": operation,
            "changes": "",
            "digest": "",
        }
        # First of all: SQLite locks the database for it, and PostgreSQL has others who insert this version wait.
        connection.execute(insert(VERSIONS), mine | made)
        last = select(VERSIONS.c.version, VERSIONS.c.digest).where(VERSIONS.c.dataset_id == self.dataset_id)
        newest = connection.execute(last.order_by(VERSIONS.c.version.desc()).limit(2)).all()
        if [version for version, _ in newest] != [number, expected][:number]:
            raise _LostError
        before = self._select(connection, list(changes))
        after = {key_id: entry for key_id, entry in changes.items() if entry is not None}
        what = summary(changes, before, after)
        told = [*made.values(), newest[-1][1], what, [after[i].to_json() for i in (*what["added"], *what["changed"])]]
        connection.execute(
            update(VERSIONS).where(VERSIONS.c.dataset_id == self.dataset_id, VERSIONS.c.version == number),
            {"changes": json.dumps(what), "digest": sha256(json.dumps(told).encode())},
        )
        gone = [*what["changed"], *what["removed"]]
        for begin in range(0, len(gone), ROWS):
            some = KEYS.c.key_id.in_(gone[begin : begin + ROWS])
            connection.execute(delete(KEYS).where(KEYS.c.dataset_id == self.dataset_id, some))
        rows = [
            {
                **mine,
                "key_id": key_id,
                "entry": json.dumps(after[key_id].to_json(), separators=(",", ":")),
                "state": after[key_id].state,
                "created_ms": after[key_id].created_ms,
                "changed_version": number,
            }
            for key_id in (*what["added"], *what["changed"])
        ]
        if rows:
            connection.execute(insert(KEYS), rows)


class _LostError(Exception):
    """The newest version is another one."""


def _restore(url: str, dataset_id: str) -> SqlKeyStore:
    return SqlKeyStore(url, dataset_id=dataset_id)


def _json(text: str) -> dict[str, Any]:
    if len(text) > ROW_CHARS:
        raise FormatError(f"a row of the key store has {len(text)} characters, and {ROW_CHARS} are the most")
    return parse_object(text.encode("utf-8", "surrogatepass"), "a row of the key store")


def _entry(key_id: str, text: str) -> KeyEntry:
    entry = KeyEntry.from_json(_json(text))
    if entry.key_id != key_id:
        raise IntegrityError(f"the row of the key {key_id!r} holds the key {entry.key_id!r}")
    return entry
