"""The KEKs of an entry: in memory one mapping, in the storage the entry itself and sealed tables.

KEKs without a scope stand in the entry. They are few, and they open entries and tables, so none of those needs a table
of KEKs to be opened. Of the KEKs with a scope, which can be many, those that changed lately stand there, too; the rest
are in tables, each newer and smaller than the one before. What the entry says of a KEK wins over tables, and a newer
table over an older one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ags_fast.dataset.columns import Count, check_columns, deflated, inflated
from ags_fast.dataset.kinds import Want
from ags_fast.dataset.tables import RATIO, SortedTables, Table, rewrapped
from ags_fast.keys.entry import SCOPE, KeyEntry
from ags_fast.keys.envelope import Envelope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ags_fast.fs import Store

INLINE = 32  # KEKs with a scope, and KEKs that left, that an entry holds itself before a job writes a table of them

Texts = list[str]
Counts = list[Count]
Columns = tuple[Texts, Texts, list[bytes | None], Texts, Counts, Counts, list[dict[str, str]], list[dict[str, Any]]]
# The columns are the fields of `KeyEntry`. A KEK that left has no wrapping key:
LEFT: tuple[Any, ...] = ("", None, "", 0, 0, {}, {})


class _Row(NamedTuple):
    key_id: str
    key: KeyEntry | None  # None: it left


class _Whole(NamedTuple):
    """A whole table in memory: the KEKs by id, and the ids of active ones by kind."""

    keys: dict[str, KeyEntry | None]
    kinds: dict[Want, list[str]]


class KeyTables(SortedTables[_Row]):
    """The tables of the KEKs of one dataset, by id.

    Args:
        store: The folder of the dataset.
        dataset_id: The id of the dataset.
        holding: Returns what opens and seals under KEKs as an entry has them.
    """

    def __init__(self, store: Store, dataset_id: str, holding: Callable[[Mapping[str, KeyEntry]], Envelope]) -> None:
        super().__init__(store, dataset_id)
        self.dataset_id, self.holding = dataset_id, holding
        self._wholes: dict[str, _Whole] = {}  # tables by path

    def name(self, row: _Row) -> bytes:
        """See `SortedTables.name`."""
        return row.key_id.encode()

    def encoded(self, rows: Sequence[_Row]) -> bytes:
        """See `SortedTables.encoded`."""
        return deflated([*zip(*map(_fields, rows), strict=True)], len(rows))

    def decoded(self, data: bytes) -> list[_Row]:
        """See `SortedTables.decoded`."""
        columns = msgspec.msgpack.decode(inflated(data), type=Columns)
        check_columns(columns)
        return [
            _Row(key_id, KeyEntry(key_id, master, *more) if master else None)
            for key_id, master, *more in zip(*columns, strict=True)
        ]

    def find(self, keks: Keks, key_id: str) -> KeyEntry | None:
        """Return a KEK that a table has. It reads a page of a table, not the table."""
        for table in reversed(keks.tables):
            if (whole := self._wholes.get(table.path)) is not None:
                if key_id in whole.keys:
                    return whole.keys[key_id]
            elif table.first <= key_id.encode() <= table.last:
                row = self.at_or_after(table, key_id.encode(), keks.envelope)
                if row is not None and row.key_id == key_id:
                    return row.key
        return None

    def whole(self, keks: Keks, table: Table) -> _Whole:
        """Return a table, and keep it in memory."""
        if (whole := self._wholes.get(table.path)) is None:
            whole = _whole(self.rows(table, keks.envelope))
            self._keep_wholes(keks.tables, {table.path: whole})
        return whole

    def write_after(self, keks: Keks, keys: Mapping[str, KeyEntry | None], job_id: str, sealer: str) -> list[Table]:
        """Store KEKs as new tables of a job, keep them in memory, and return the references."""
        rows = [_Row(key_id, key) for key_id, key in keys.items()]
        tables = self.write(rows, job_id, sealer, keks.envelope)
        wholes = {tables[0].path: _whole(rows)} if len(tables) == 1 else {}
        self._keep_wholes((*keks.tables, *tables), wholes)
        return tables

    def _keep_wholes(self, tables: Iterable[Table], new: Mapping[str, _Whole]) -> None:
        """Have in memory, of these tables only, those that were there and new ones."""
        wholes = {**self._wholes, **new}
        self._wholes = {table.path: wholes[table.path] for table in tables if table.path in wholes}


class Keks(Mapping[str, KeyEntry]):
    """KEKs by id. It never changes, and reads a table when a KEK of it is asked for, or all to yield all KEKs.

    Raises FileNotFoundError when a table is missing: the entry was expired, or the storage is damaged.

    Args:
        inline: What the entry itself has.
        left: The ids of KEKs that left, and that a table may have.
        tables: The tables with the other KEKs, the newest last.
        place: Reads the tables. None: there are none.
    """

    def __init__(
        self,
        inline: Mapping[str, KeyEntry],
        left: Sequence[str] = (),
        tables: tuple[Table, ...] = (),
        place: KeyTables | None = None,
    ) -> None:
        self.inline, self.left, self.tables = inline, dict.fromkeys(left), tables
        self._place = place
        self._all: dict[str, KeyEntry] | None = None

    @classmethod
    def of(cls, keys: Mapping[str, KeyEntry]) -> Keks:
        """Return any mapping of KEKs as this one."""
        return keys if isinstance(keys, cls) else cls(keys)

    @property
    def place(self) -> KeyTables:
        """Where the tables are."""
        assert self._place is not None
        return self._place

    @cached_property
    def envelope(self) -> Envelope:
        """What opens and seals the tables: KEKs that the entry itself has."""
        return self.place.holding(dict(self.inline))

    def __getitem__(self, key_id: str) -> KeyEntry:
        if self._all is not None:
            return self._all[key_id]
        if (key := self.inline.get(key_id)) is None and self.tables and key_id not in self.left:
            key = self.place.find(self, key_id)
        if key is None:
            raise KeyError(key_id)
        return key

    def __iter__(self) -> Iterator[str]:
        return iter(self._merged())

    def __len__(self) -> int:
        return len(self._merged())

    def _merged(self) -> dict[str, KeyEntry]:
        if self._all is None:
            rows = self._rows(self.tables) | dict.fromkeys(self.left) | dict(self.inline)
            self._all = {key_id: key for key_id, key in rows.items() if key is not None}
        return self._all

    def _rows(self, tables: Sequence[Table]) -> dict[str, KeyEntry | None]:
        rows: dict[str, KeyEntry | None] = {}
        for table in tables:
            rows |= self.place.whole(self, table).keys
        return rows

    def active(self, kind: Want) -> list[KeyEntry]:
        """Return the active KEKs of a kind. It reads all tables if the kind has a scope."""
        ids = [*self._inline_kinds.get(kind, ())]
        for table in self.tables if kind.scope is not None else ():
            ids += self.place.whole(self, table).kinds.get(kind, ())
        found = (self.get(key_id) for key_id in dict.fromkeys(ids))
        return [key for key in found if key is not None and key.state == "active" and Want.of(key) == kind]

    @cached_property
    def _inline_kinds(self) -> dict[Want, list[str]]:
        return _kinds(self.inline)

    def changed(self, changes: Mapping[str, KeyEntry | None]) -> Keks:
        """Return these KEKs with some in other states, new ones, and without those that leave: None. It reads nothing.

        Args:
            changes: By the id of a KEK what becomes of it.
        """
        inline = {**self.inline, **changes}
        left = [key_id for key_id, key in changes.items() if key is None and self.tables]
        kept = {key_id: key for key_id, key in inline.items() if key is not None}
        return Keks(kept, (*self.left, *left), self.tables, self._place)

    def became(self, keys: Mapping[str, KeyEntry]) -> Keks:
        """Return KEKs that others have made of these."""
        if isinstance(keys, Keks):
            return keys
        changes = {key_id: key for key_id, key in keys.items() if self.get(key_id) != key}
        return self.changed({**dict.fromkeys(self.keys() - keys.keys()), **changes})

    def stored(self, sealer: str, job_id: str | None) -> Keks:
        """Return the same KEKs as the next entry has them. If there are many in the entry, they move to a table.

        A new table takes in older ones that have few rows beside it, so that each KEK is written again rarely.

        Args:
            sealer: The KEK that wraps data keys of tables.
            job_id: The job that writes tables; None: it may not.
        """
        tables = tuple(
            table
            if self.inline[table.key_id].state == "active"
            else rewrapped(table, sealer, self.envelope, self.place.dataset_id)
            for table in self.tables
        )
        moves = {key_id: key for key_id, key in self.inline.items() if SCOPE in key.properties}
        rows: dict[str, KeyEntry | None] = {**dict.fromkeys(self.left), **moves}
        if job_id is None or len(rows) <= INLINE:
            return Keks(self.inline, (*self.left,), tables, self._place)
        at, count = len(tables), len(rows)
        while at and tables[at - 1].rows < RATIO * count:
            at -= 1
            count += tables[at].rows
        rows = {**self._rows(self.tables[at:]), **rows}
        rows = {key_id: key for key_id, key in rows.items() if key is not None or at}
        new = self.place.write_after(self, rows, job_id, sealer)
        inline = {key_id: key for key_id, key in self.inline.items() if key_id not in moves}
        return Keks(inline, (), (*tables[:at], *new), self._place)


def _whole(rows: Iterable[_Row]) -> _Whole:
    keys = dict(rows)
    return _Whole(keys, _kinds(keys))


def _fields(row: _Row) -> tuple[Any, ...]:
    if (key := row.key) is None:
        return (row.key_id, *LEFT)
    return (
        key.key_id, key.wrapping_key_id, key.wrapped, key.state, key.created_ms, key.uses, key.properties, key.more,
    )  # fmt: skip


def _kinds(keys: Mapping[str, KeyEntry | None]) -> dict[Want, list[str]]:
    kinds: defaultdict[Want, list[str]] = defaultdict(list)
    for key_id, key in keys.items():
        if key is not None and key.state == "active":
            kinds[Want.of(key)].append(key_id)
    return kinds
