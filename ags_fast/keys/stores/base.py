"""What all key stores can do (`KeyResolver`), and what they share."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from ags_fast.errors import ConcurrentChangeError, FormatError
from ags_fast.keys.entry import KeyEntry, UnknownKeyError

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterable, Iterator

__all__ = [
    "HISTORY",
    "Change",
    "Entries",
    "Folder",
    "KeyResolver",
    "changed",
    "check_changes",
    "conflict",
    "listed",
    "mend_after_fork",
    "now_ms",
    "summary",
    "unknown",
]

HISTORY = 1000  # changes that a store remembers


class Listed(Protocol):
    """A file of a folder."""

    @property
    def path(self) -> str:
        """Relative to the folder."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def modified(self) -> float:
        """Seconds since the epoch."""


class Folder(Protocol):
    """What a key store needs of the folder that it lives in, as `ags_fast.fs.Store` has it.

    Paths are relative to the folder, with slashes.
    """

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Every file whose path begins with `prefix`."""

    def read_small(self, path: str, limit: int) -> bytes:
        """All of a file. FormatError if it has more than `limit` bytes."""

    def create_exclusive(self, path: str, data: bytes) -> None:
        """Create a file exclusively: FileExistsError if it is there."""

    def write_small(self, path: str, data: bytes, *, fsync: bool = False) -> None:
        """Write a file, which replaces one that is there."""

    def delete(self, path: str) -> None:
        """Remove a file, if it is there."""

    def full_path(self, path: str) -> str:
        """The path or URL of a file."""


class Change(NamedTuple):
    """What made a version of a key store."""

    version: int
    time_ms: int  # since the epoch
    changes: dict[str, list[str]]  # "added", "changed", "removed": key ids

    def to_json(self) -> dict[str, Any]:
        """Return the change as documents hold it."""
        return {"version": self.version, "time_ms": self.time_ms, **self.changes}

    @classmethod
    def from_json(cls, value: Any, where: str) -> Change:
        """Return the change that `to_json` has written. FormatError, which names `where`, if it is malformed."""
        try:
            changes = {name: value[name] for name in ("added", "changed", "removed")}
            lists = all(type(ids) is list and all(type(key_id) is str for key_id in ids) for ids in changes.values())
            if not lists or not all(type(value[name]) is int and value[name] >= 0 for name in ("version", "time_ms")):
                raise TypeError
            return cls(value["version"], value["time_ms"], changes)
        except (KeyError, TypeError) as error:
            raise FormatError(f"{where} has an impossible history ({type(error).__name__})") from None


@runtime_checkable
class KeyResolver(Protocol):
    """Looks KEKs of one dataset up by id; changes them by compare-and-swap on the version.

    A store may answer from what it has read before. An answer is never older than the store's `version`, so a
    `compare_and_swap` from a `version` that was read first undoes nothing that others did.

    A store may also have ``digest(version: int) -> str | None``: the SHA-256, in hex, of what stands for the newest
    version or an earlier one; None if it is not known any more. Datasets name the digest, so that a key store that was
    set back to an older state, or exchanged, is noticed. Of a store without it, datasets compare the number only.
    """

    @property
    def dataset_id(self) -> str:
        """The dataset; what its keys wrap is bound to it."""

    @property
    def version(self) -> int:
        """The number of changes, as far as the store has read them; 0 is empty."""

    def refresh(self) -> int:
        """Forget what was read, and return the newest version."""

    def get(self, key_id: str) -> KeyEntry:
        """Return the entry. UnknownKeyError, a KeyAccessError, if not even the newest version has it."""

    def list(self, state: str | None = None) -> builtins.list[KeyEntry]:
        """Return all entries, or those in one state, by `created_ms`: the oldest first."""

    def compare_and_swap(
        self, changes: Mapping[str, KeyEntry | None], expected_version: int, *, operation: str = "change"
    ) -> int:
        """Change entries, if nobody else has.

        Args:
            changes: The entries to put in, by id; None takes an entry out.
            expected_version: The version that the changes were decided on.
            operation: The reason, for people who look into the store.

        Returns:
            The new version.

        Raises:
            ConcurrentChangeError: The newest version is another one; nothing was changed.
        """

    def history(self) -> builtins.list[Change]:
        """Return the changes that made the store, oldest first: the last 1000 at most."""


class Entries(Mapping[str, KeyEntry]):
    """The entries of a store as an `Envelope` takes them: each is looked up when it is needed.

    Only counting or iterating reads all entries. It pickles as its store.
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: KeyResolver) -> None:
        self._keys = keys

    def __getitem__(self, key_id: str) -> KeyEntry:
        try:
            return self._keys.get(key_id)
        except UnknownKeyError:
            raise KeyError(key_id) from None

    def __iter__(self) -> Iterator[str]:
        return (entry.key_id for entry in self._keys.list())

    def __len__(self) -> int:
        return len(self._keys.list())

    def __repr__(self) -> str:
        return f"<Entries of {self._keys!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Entries, (self._keys,)


def check_changes(changes: Mapping[str, KeyEntry | None]) -> None:
    """Raise ValueError if an entry is under another id than its own."""
    for key_id, entry in changes.items():
        if entry is not None and entry.key_id != key_id:
            raise ValueError(f"the entry under {key_id!r} is that of {entry.key_id!r}")


def changed(entries: Mapping[str, KeyEntry], changes: Mapping[str, KeyEntry | None]) -> dict[str, KeyEntry]:
    """Return `entries` after `changes`, in the order in which they were made."""
    result = dict(entries)
    for key_id, entry in changes.items():
        if entry is None:
            result.pop(key_id, None)
        else:
            result[key_id] = entry
    return result


def summary(
    changes: Mapping[str, KeyEntry | None], before: Mapping[str, KeyEntry], after: Mapping[str, KeyEntry]
) -> dict[str, list[str]]:
    """Return the ids of the entries that `changes` added, changed and removed."""
    return {
        "added": [key_id for key_id in changes if key_id in after and key_id not in before],
        "changed": [i for i in changes if i in before and i in after and before[i] != after[i]],
        "removed": [key_id for key_id in changes if key_id in before and key_id not in after],
    }


def listed(entries: Iterable[KeyEntry], state: str | None) -> list[KeyEntry]:
    """Return all entries, or those in one state: the oldest first."""
    return sorted((e for e in entries if state in (None, e.state)), key=lambda entry: entry.created_ms)


def unknown(key_id: str, where: str) -> UnknownKeyError:
    """Return the error for an id that a store does not have."""
    return UnknownKeyError(f"{where} has no key {key_id!r}: it was removed, or never was there")


def conflict(where: str, expected: int, version: int) -> ConcurrentChangeError:
    """Return the error of a compare-and-swap that lost."""
    return ConcurrentChangeError(
        f"{where} is at version {version}, not at {expected} any more: somebody else has changed it"
    )


def now_ms() -> int:
    """Return the time in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class Forkable(Protocol):
    """A store with locks."""

    def after_fork(self) -> None:
        """Make new locks: other threads of the parent may hold the old ones."""


_stores: weakref.WeakSet[Any] = weakref.WeakSet()


def mend_after_fork(store: Forkable) -> None:
    """Have `store.after_fork()` called in the child of a fork."""
    _stores.add(store)


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
