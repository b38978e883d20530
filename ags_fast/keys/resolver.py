"""Where KEKs live: the mutable medium beside the data that never changes. Entries are wrapped: it keeps no secret."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from ags_fast.errors import ConcurrentChangeError, FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.keys.envelope import Document, Envelope, KeyEntry, seal_document
from ags_fast.keys.kms import as_kms, shared_client

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterable, Iterator

    from ags_fast.keys.kms import KmsClient

__all__ = ["COLUMNS", "Change", "DatasetKeyStore", "KeyResolver", "MemoryKeyStore", "for_columns", "newest_active"]

COLUMNS = {"use": "columns"}  # properties of a KEK that wraps nothing but the data keys of Parquet columns


class Listed(Protocol):
    @property
    def path(self) -> str: ...


class Store(Protocol):
    """What a key store needs of the folder that it lives in: paths are relative to it, with slashes."""

    def list(self, prefix: str = "") -> Iterator[Listed]: ...
    def read(self, path: str, limit: int) -> bytes: ...
    def create(self, path: str, data: bytes) -> None: ...  # exclusively: FileExistsError


class Change(NamedTuple):
    """What made a version of a key store."""

    version: int
    time_ms: int  # since the epoch
    changes: dict[str, list[str]]  # "added", "changed", "removed": key ids


@runtime_checkable
class KeyResolver(Protocol):
    """Finds KEKs by id, and changes them for whoever saw the newest version."""

    @property
    def version(self) -> int:
        """Counts the changes; 0 is empty."""

    def get(self, key_id: str) -> KeyEntry:
        """The entry. KeyAccessError if there is none."""

    def list(self, state: str | None = None) -> builtins.list[KeyEntry]:
        """All entries, or those in one state, oldest first."""

    def compare_and_swap(self, changes: Mapping[str, KeyEntry | None], expected_version: int) -> int:
        """Put in the entries of `changes`, take out those that are None, and return the new version.

        Raises ConcurrentChangeError, and changes nothing, if `version` is not `expected_version` any more.
        """

    def history(self) -> builtins.list[Change]:
        """What is known of how it came about, oldest first."""


def changed(entries: Mapping[str, KeyEntry], changes: Mapping[str, KeyEntry | None]) -> dict[str, KeyEntry]:
    """`entries` after `changes`, in the order in which they were made."""
    result = dict(entries)
    for key_id, entry in changes.items():
        if entry is None:
            result.pop(key_id, None)
        elif entry.key_id != key_id:
            raise ValueError(f"the entry under {key_id!r} is that of {entry.key_id!r}")
        else:
            result[key_id] = entry
    return result


def summary(before: Mapping[str, KeyEntry], after: Mapping[str, KeyEntry]) -> dict[str, list[str]]:
    """The ids of what is new, what is another, and what is gone."""
    return {
        "added": [key_id for key_id in after if key_id not in before],
        "changed": [key_id for key_id in after if key_id in before and before[key_id] != after[key_id]],
        "removed": [key_id for key_id in before if key_id not in after],
    }


def unknown(key_id: str, where: str) -> KeyAccessError:
    return KeyAccessError(f"{where} has no key {key_id!r}: it was removed, or never was there")


def conflict(where: str, expected: int, version: int) -> ConcurrentChangeError:
    return ConcurrentChangeError(
        f"{where} is at version {version}, not at {expected} any more: somebody else has changed it"
    )


def newest_active(entries: Iterable[KeyEntry], wrapping_key_id: str | None = None) -> KeyEntry | None:
    """The entry that was made last of those that wrap, under one master key or under any."""
    found = None
    for entry in entries:
        if entry.state == "active" and wrapping_key_id in (None, entry.wrapping_key_id):
            found = entry if found is None or entry.created_ms >= found.created_ms else found
    return found


def for_columns(entry: KeyEntry) -> bool:
    """Whether a KEK is there for columns only: who cannot unwrap it must still be able to read all the rest."""
    return COLUMNS.items() <= entry.properties.items()


class MemoryKeyStore:
    """A key store that ends with its process. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, KeyEntry] = {}
        self._history: builtins.list[Change] = []

    @property
    def version(self) -> int:
        return len(self._history)

    def get(self, key_id: str) -> KeyEntry:
        entry = self._entries.get(key_id)
        if entry is None:
            raise unknown(key_id, "the key store")
        return entry

    def list(self, state: str | None = None) -> builtins.list[KeyEntry]:
        return [entry for entry in self._entries.values() if state in (None, entry.state)]

    def compare_and_swap(self, changes: Mapping[str, KeyEntry | None], expected_version: int) -> int:
        with self._lock:
            if expected_version != self.version:
                raise conflict("the key store", expected_version, self.version)
            entries = changed(self._entries, changes)
            made = Change(self.version + 1, time.time_ns() // 1_000_000, summary(self._entries, entries))
            self._entries = entries
            self._history.append(made)
            return made.version

    def history(self) -> builtins.list[Change]:
        return list(self._history)

    def __repr__(self) -> str:
        return f"<MemoryKeyStore version={self.version} keys={len(self._entries)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a key store in memory stays in its process: send the entries that are needed, in an Envelope")


FOLDER = "_ags/keys"
FORMAT = "ags-keys"
MAX_NBYTES = 256 << 20  # of a version: some 10^6 keys, and a bound for what a lie can allocate
HISTORY = 1000  # changes that a version remembers
NUMBERED = re.compile(r"(\d{8,})\.json")


class DatasetKeyStore:
    """The keys of a dataset, in the dataset: ``_ags/keys/00000001.json`` and on, of which the highest is current.

    store: the dataset's folder. kms: a client or its properties. dataset_id: None takes the one that the newest version
    says, and makes one up where there is none; given, it is demanded. min_version: refuse to start from an older
    version.

    Each version holds all entries, and is authentic under the active key among them that was made last, keys that are
    `for_columns` aside: nobody who cannot have the KMS unwrap that key can have written it. Versions are created,
    exclusively, and never overwritten. What cannot be seen: that somebody removed the newest versions, or put an older
    whole dataset in place. `min_version` says from where on that is refused.

    The newest version is read when something is first asked for, and again by `refresh`, by `get` for an id that is not
    in it, and after a conflict. Threads may share a store. It pickles without what it has read.
    """

    def __init__(
        self, store: Store, kms: KmsClient | Mapping[str, str], *, dataset_id: str | None = None, min_version: int = 0
    ) -> None:
        self._store = store
        self._kms = shared_client(kms) if isinstance(kms, Mapping) else as_kms(kms)
        self._given_id = dataset_id
        self._new_id = dataset_id or os.urandom(16).hex()
        self._min_version = min_version
        self._lock = threading.RLock()
        self._read: _Version | None = None

    @property
    def dataset_id(self) -> str:
        return self._current().dataset_id

    @property
    def version(self) -> int:
        """The version that `get` and `list` answer from, which is the newest when it was read."""
        return self._current().number

    def refresh(self) -> int:
        """Read the newest version, and return its number."""
        with self._lock:
            self._read = None
            return self._current().number

    def get(self, key_id: str) -> KeyEntry:
        with self._lock:
            known = self._read
            entry = self._current().entries.get(key_id)
            if entry is None and known is not None:  # read a while ago
                self.refresh()
                entry = self._current().entries.get(key_id)
        if entry is None:
            raise unknown(key_id, f"the dataset {self._store!r}")
        return entry

    def list(self, state: str | None = None) -> builtins.list[KeyEntry]:
        return [entry for entry in self._current().entries.values() if state in (None, entry.state)]

    def envelope(self, key_ids: Iterable[str] | None = None) -> Envelope:
        """An envelope with all entries, or with those of `key_ids` (KeyAccessError if one is unknown)."""
        entries = self._current().entries if key_ids is None else {key_id: self.get(key_id) for key_id in key_ids}
        return Envelope(self._kms, entries)

    def history(self) -> builtins.list[Change]:
        return [Change(*item) for item in self._current().history]

    def compare_and_swap(
        self, changes: Mapping[str, KeyEntry | None], expected_version: int, *, operation: str = "change"
    ) -> int:
        """As `KeyResolver` has it; `operation` says why, in the version. PolicyError if no active key would be left."""
        with self._lock:
            before = self._current()
            # Looked up again, since a number below the newest may be free: old versions get removed.
            if expected_version != before.number or expected_version != self._newest():
                self._read = None
                raise conflict(f"the key store of {self._store!r}", expected_version, self._newest())
            after = before.changed(changes, operation)
            try:
                self._store.create(_path(after.number), after.sealed(self._kms))
            except FileExistsError:
                self._read = None
                raise conflict(f"the key store of {self._store!r}", expected_version, self._newest()) from None
            self._read = after
            return after.number

    def _newest(self) -> int:
        found = (NUMBERED.fullmatch(entry.path.removeprefix(f"{FOLDER}/")) for entry in self._store.list(f"{FOLDER}/"))
        return max((int(match[1]) for match in found if match), default=0)

    def _current(self) -> _Version:
        with self._lock:
            if self._read is None:
                self._read = self._load()
            return self._read

    def _load(self) -> _Version:
        for _ in range(10):
            number = self._newest()
            if number < self._min_version:
                raise IntegrityError(
                    f"the newest keys of {self._store!r} are version {number}, below {self._min_version}: newer ones "
                    "were removed, or this is an old copy"
                )
            if number == 0:
                return _Version.empty(self._new_id)
            try:
                data = self._store.read(_path(number), MAX_NBYTES)
            except FileNotFoundError:  # removed since it was listed, so there is a newer one
                continue
            return _Version.opened(data, number, self._kms, self._given_id)
        raise ConcurrentChangeError(f"the keys of {self._store!r} change faster than they can be read: try again")

    def __repr__(self) -> str:
        return f"<DatasetKeyStore {self._store!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._store, self._kms, self._given_id, self._min_version)


def _restore(store: Store, kms: KmsClient, dataset_id: str | None, min_version: int) -> DatasetKeyStore:
    return DatasetKeyStore(store, kms, dataset_id=dataset_id, min_version=min_version)


def _path(number: int) -> str:
    return f"{FOLDER}/{number:08}.json"


class _Version(NamedTuple):
    """A version of a dataset's keys: ``body`` is the document's, with whatever fields it has."""

    dataset_id: str
    number: int
    entries: dict[str, KeyEntry]
    history: builtins.list[tuple[int, int, dict[str, builtins.list[str]]]]
    body: dict[str, Any]

    @classmethod
    def empty(cls, dataset_id: str) -> _Version:
        return cls(dataset_id, 0, {}, [], {})

    @classmethod
    def opened(cls, data: bytes, number: int, kms: KmsClient, dataset_id: str | None) -> _Version:
        path = _path(number)
        document = Document(data, path)
        # The entries are only claims here. They are enough to ask the KMS for the key, which only it can unwrap, and
        # that key then says whether all of them are authentic.
        entries = _entries(document.claimed, path)
        sealer = entries.get(document.key_id)
        if sealer is None:
            raise FormatError(f"{path} is sealed with {document.key_id!r}, which is not among its keys")
        try:
            body = document.authentic(Envelope(kms, {sealer.key_id: sealer}), dataset_id)
        except (FormatError, KeyAccessError) as error:  # the KMS's, which does not know where its key comes from
            raise type(error)(f"{path}: {error}") from None
        if body.get("format") != FORMAT or body.get("version") != number:
            raise IntegrityError(f"{path} holds {body.get('format')!r} version {body.get('version')!r}")
        try:
            history = [
                (c["version"], c["time_ms"], {name: list(c[name]) for name in ("added", "changed", "removed")})
                for c in body["history"]
            ]
        except (KeyError, TypeError) as error:
            raise FormatError(f"{path} has an impossible history ({type(error).__name__})") from None
        return cls(body["dataset_id"], number, entries, history, body)

    def changed(self, changes: Mapping[str, KeyEntry | None], operation: str) -> _Version:
        entries = changed(self.entries, changes)
        number, time_ms = self.number + 1, time.time_ns() // 1_000_000
        history = [*self.history, (number, time_ms, summary(self.entries, entries))][-HISTORY:]
        body = {
            **self.body,  # also what a newer ags_fast wrote there
            "format": FORMAT,
            "dataset_id": self.dataset_id,
            "version": number,
            "time_ms": time_ms,
            "parent": self.number,
            "operation": operation,
            "keys": [entry.to_json() for entry in entries.values()],
            "history": [{"version": v, "time_ms": t, **what} for v, t, what in history],
        }
        return _Version(self.dataset_id, number, entries, history, body)

    def sealed(self, kms: KmsClient) -> bytes:
        sealer = newest_active(entry for entry in self.entries.values() if not for_columns(entry))
        if sealer is None:
            raise PolicyError("a dataset needs an active key: add the new one in the change that retires the last")
        envelope = Envelope(kms, {sealer.key_id: sealer})
        return seal_document(envelope, sealer.key_id, self.dataset_id, _path(self.number), self.body)


def _entries(body: Mapping[str, Any], path: str) -> dict[str, KeyEntry]:
    keys = body.get("keys")
    if not isinstance(keys, list):
        raise FormatError(f"{path} has no list of keys")
    try:
        entries = {entry.key_id: entry for entry in map(KeyEntry.from_json, keys)}
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    if len(entries) != len(keys):
        raise FormatError(f"{path} has two keys of one id")
    return entries
