"""The wrapped KEKs of a log: in its entries, or in a key store, of which its entries name the rows.

With a key store the log has KEKs without their wraps. `Wraps.named` takes the wrap of a new KEK away, `Wraps.put`
stores it, and `Wraps.whole` gives it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ags_fast.errors import IntegrityError, KeyAccessError, PolicyError, UnknownKeyError
from ags_fast.keys.entry import ROW, KeyEntry
from ags_fast.keys.stores.base import NAME, KeyResolver, KeyStore, is_row, row_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Whole = Callable[[str, KeyEntry], KeyEntry]  # takes a dataset and a KEK, and returns the KEK with its wrap


class Wraps:
    """The wrapped KEKs of the datasets that one key store has. What was read once is kept, for a row never changes.

    Args:
        resolver: The key store; None: the entries of the log have the wraps, and no method changes anything.
    """

    def __init__(self, resolver: KeyResolver | None) -> None:
        self.resolver = resolver
        self._rows: dict[str, bytes] = {}
        self._new: set[str] = set()  # rows that are not in the store yet

    @property
    def elsewhere(self) -> bool:
        """Whether the wraps are in a key store."""
        return self.resolver is not None

    @property
    def dataset_id(self) -> str | None:
        """The only dataset that the key store is for; None: any."""
        return getattr(self.resolver, "dataset_id", None)

    def named(self, key: KeyEntry, job_id: str) -> KeyEntry:
        """Return a KEK that a job has had wrapped just now, as the log is to have it: `put` stores the wrap."""
        if self.resolver is None or key.wrapped is None:
            return key
        row = row_name(job_id, key.wrapped)
        self._rows[row] = key.wrapped
        self._new.add(row)
        return key.replace(wrapped=None, properties={**key.properties, ROW: row})

    def put(self, dataset_id: str, keys: Iterable[KeyEntry]) -> None:
        """Store the wraps of new KEKs, before anything is wrapped under them, or an entry names them (rule 10)."""
        if new := self._new.intersection(rows_of(keys)):
            self.store().put(dataset_id, {row: self._rows[row] for row in new})
            self._new -= new

    def check_writable(self) -> None:
        """Raise PolicyError if there is a key store that can only be read."""
        if self.resolver is not None:
            self.store()

    def store(self) -> KeyStore:
        """Return the key store, to write there. PolicyError: it can only be read."""
        if not isinstance(self.resolver, KeyStore):
            raise PolicyError(f"the key store {self.resolver!r} can only be read, so the dataset cannot be changed")
        return self.resolver

    def fetch(self, dataset_id: str, keys: Iterable[KeyEntry]) -> None:
        """Ask the store by one request for all KEKs that are about to be used. What it refuses is asked for again."""
        if self.resolver is not None and (missing := [row for row in rows_of(keys) if row not in self._rows]):
            try:
                self._keep(self.resolver.get(dataset_id, missing))
            except (KeyError, KeyAccessError):
                pass

    def whole(self, dataset_id: str, key: KeyEntry) -> KeyEntry:
        """Return a KEK with its wrap.

        Raises:
            UnknownKeyError: The store does not have it.
            KeyAccessError: The store refuses; or none was given.
            IntegrityError: The store has another row in its place.
            PolicyError: The log itself has it.
        """
        if self.resolver is None:
            if ROW in key.properties:
                raise KeyAccessError("the keys of the dataset are in a key store: pass key_store=")
            return key
        if key.wrapped is not None:
            raise PolicyError("the keys of the dataset are in its log, and in no key store: leave out key_store=")
        if not key.double_wrap:
            return key
        row = key.properties[ROW]
        if row not in self._rows:
            try:
                self._keep(self.resolver.get(dataset_id, [row]) if NAME.fullmatch(row) else {})
            except (KeyError, UnknownKeyError):
                pass
        if row not in self._rows:
            raise UnknownKeyError(
                f"{self.resolver!r} has no row {row}, which has the key {key.key_id!r} of the dataset {dataset_id}: "
                "the row was removed, or this is the key store of another dataset"
            )
        return key.replace(wrapped=self._rows[row])

    def _keep(self, found: Mapping[str, bytes]) -> None:
        for row, wrapped in found.items():
            if not is_row(row, wrapped):
                raise IntegrityError(f"{self.resolver!r} has another row in the place of {row}: somebody changed it")
            self._rows[row] = bytes(wrapped)

    def entries(self, dataset_id: str, keys: Mapping[str, KeyEntry], whole: Whole | None = None) -> Any:
        """Return KEKs of the log as an `Envelope` takes them, with their wraps: each is asked for when it is needed.

        whole: takes the place of `Wraps.whole`.
        """
        return keys if self.resolver is None else Entries(self, dataset_id, keys, whole)

    def __reduce__(self) -> tuple[Any, ...]:
        return Wraps, (self.resolver,)


class Entries(Mapping[str, KeyEntry]):
    """KEKs with their wraps. It pickles without what was read."""

    __slots__ = ("_dataset_id", "_held", "_keys", "_whole", "_wraps")

    def __init__(self, wraps: Wraps, dataset_id: str, keys: Mapping[str, KeyEntry], whole: Whole | None = None) -> None:
        self._wraps, self._dataset_id, self._keys, self._whole = wraps, dataset_id, keys, whole or wraps.whole
        self._held: dict[str, KeyEntry] = {}

    def fetch(self, key_ids: Iterable[str]) -> None:
        """Ask the store by one request for these KEKs."""
        keys = (self._keys.get(key_id) for key_id in key_ids)
        self._wraps.fetch(self._dataset_id, [key for key in keys if key is not None])

    def __getitem__(self, key_id: str) -> KeyEntry:
        if (held := self._held.get(key_id)) is None:
            held = self._held[key_id] = self._whole(self._dataset_id, self._keys[key_id])
        return held

    def __contains__(self, key_id: object) -> bool:
        return key_id in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<Entries of {len(self)} keys>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Entries, (self._wraps, self._dataset_id, dict(self._keys))


def in_log(key: KeyEntry) -> KeyEntry:
    """Return a KEK as the log has it: without its wrap, if a key store has that."""
    return key.replace(wrapped=None) if ROW in key.properties else key


def rows_of(keys: Iterable[KeyEntry]) -> list[str]:
    """Return the rows of KEKs that have one."""
    return [key.properties[ROW] for key in keys if ROW in key.properties]
