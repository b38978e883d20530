"""Where KEKs live: the mutable medium beside the data that never changes. Entries are wrapped: it keeps no secret.

What all stores can do is `KeyResolver`. Here are one in memory and the one in a folder, of the dataset or another;
`ags_fast.keys.sql` has one in a database.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from ags_fast.errors import AgsError, ConcurrentChangeError, FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.keys.chain import Chain, ChainObjects, sha256
from ags_fast.keys.envelope import (
    KEYS_FORMAT,
    KIND_NBYTES,
    REMOVED,
    Document,
    Envelope,
    KeyEntry,
    UnknownKeyError,
    dumps,
    parse_object,
    seal_document,
    taken,
)
from ags_fast.keys.kms import as_kms, same_counts, shared_client

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from ags_fast.keys.kms import KmsClient

__all__ = [
    "COLUMNS",
    "Change",
    "DatasetKeyStore",
    "Earlier",
    "Entries",
    "KeyResolver",
    "MemoryKeyStore",
    "UnknownKeyError",
    "claimed_keys",
    "for_columns",
    "newest_active",
    "open_key_store",
    "seals_documents",
]

T = TypeVar("T")
U = TypeVar("U")

COLUMNS = {"use": "columns"}  # properties of a KEK that wraps nothing but the data keys of Parquet columns
HISTORY = 1000  # changes that a store remembers


class Listed(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...  # bytes
    @property
    def modified(self) -> float: ...  # seconds since the epoch


class Store(Protocol):
    """What a key store needs of the folder that it lives in: paths are relative to it, with slashes."""

    def list(self, prefix: str = "") -> Iterator[Listed]: ...
    def read(self, path: str, limit: int) -> bytes: ...
    def create(self, path: str, data: bytes) -> None: ...  # exclusively: FileExistsError
    def put(self, path: str, data: bytes, *, fsync: bool = False) -> None: ...  # in the place of what is there
    def delete(self, path: str) -> None: ...
    def full_path(self, path: str) -> str: ...


class Change(NamedTuple):
    """What made a version of a key store."""

    version: int
    time_ms: int  # since the epoch
    changes: dict[str, list[str]]  # "added", "changed", "removed": key ids

    def to_json(self) -> dict[str, Any]:
        return {"version": self.version, "time_ms": self.time_ms, **self.changes}

    @classmethod
    def from_json(cls, value: Any, where: str) -> Change:
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
    """Finds the KEKs of one dataset by id, and changes them for whoever saw the newest version.

    A store may answer from what it has read before. What it answers is never older than its `version` says; a
    `compare_and_swap` from a `version` that was asked for first therefore undoes nothing that others did.
    """

    @property
    def dataset_id(self) -> str:
        """Whose keys they are: what they wrap is bound to it."""

    @property
    def version(self) -> int:
        """Counts the changes, as far as the store has read them; 0 is empty."""

    def refresh(self) -> int:
        """Forget what was read, and return the newest version."""

    def get(self, key_id: str) -> KeyEntry:
        """The entry. UnknownKeyError, which is a KeyAccessError, if there is none, not even in the newest version."""

    def list(self, state: str | None = None) -> builtins.list[KeyEntry]:
        """All entries, or those in one state, by `created_ms`: the oldest first."""

    def compare_and_swap(
        self, changes: Mapping[str, KeyEntry | None], expected_version: int, *, operation: str = "change"
    ) -> int:
        """Put in the entries of `changes`, take out those that are None, and return the new version.

        Raises ConcurrentChangeError, and changes nothing, if the newest version is not `expected_version` any more.
        operation: why, for people who look into the store.
        """

    def history(self) -> builtins.list[Change]:
        """What is known of how it came about, oldest first: the last 1000 changes at most."""

    # A store may also have `digest(version: int) -> str | None`: the SHA-256, in hex, of what stands for the newest
    # version or one before it, None if it is not known any more. Datasets name it, so that a key store that was put
    # back to an older state, or exchanged, is noticed; of a store without it they compare the number.


class Entries(Mapping[str, KeyEntry]):
    """The entries of a store, each looked up when it is asked for: what an `Envelope` takes.

    Only to count them, or to go through them all, reads them all. It pickles as its store.
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
    for key_id, entry in changes.items():
        if entry is not None and entry.key_id != key_id:
            raise ValueError(f"the entry under {key_id!r} is that of {entry.key_id!r}")


def changed(entries: Mapping[str, KeyEntry], changes: Mapping[str, KeyEntry | None]) -> dict[str, KeyEntry]:
    """`entries` after `changes`, in the order in which they were made."""
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
    """The ids of what `changes` made new, another, and gone."""
    return {
        "added": [key_id for key_id in changes if key_id in after and key_id not in before],
        "changed": [i for i in changes if i in before and i in after and before[i] != after[i]],
        "removed": [key_id for key_id in changes if key_id in before and key_id not in after],
    }


def unknown(key_id: str, where: str) -> UnknownKeyError:
    return UnknownKeyError(f"{where} has no key {key_id!r}: it was removed, or never was there")


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


def seals_documents(entry: KeyEntry) -> bool:
    """Whether it is a KEK for a dataset's documents: active, in double wrap, and neither for one use nor one scope."""
    return entry.state == "active" and entry.double_wrap and entry.properties.keys().isdisjoint(("use", "scope"))


def open_key_store(
    where: Any,
    kms: KmsClient | Mapping[str, str],
    *,
    store: Store,
    dataset_id: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> KeyResolver:
    """The store of a dataset's keys.

    where: None: in the dataset, whose folder is `store`; a URL of SQLAlchemy, as `SqlKeyStore` takes it; the path or
    the URL of another folder, with its `storage_options`, which then holds the keys of this one dataset and nothing
    else; or a `KeyResolver`, which is taken as it is. dataset_id: demanded of what is opened, and the id of what is
    new. None takes what the place says; a database has many, so there the URL has to say it: ``?dataset=``.
    """
    if where is None:
        return DatasetKeyStore(store, kms, dataset_id=dataset_id)
    if hasattr(where, "compare_and_swap"):
        resolver: KeyResolver = where
        if dataset_id not in (None, resolver.dataset_id):
            raise ValueError(f"{where!r} has the keys of the dataset {resolver.dataset_id!r}, not {dataset_id!r}")
        return resolver
    if isinstance(where, str) and SQL_URL.match(where):
        from ags_fast.keys.sql import SqlKeyStore

        return SqlKeyStore(where, dataset_id=dataset_id)
    from ags_fast import fs

    folder = where if isinstance(where, fs.Store) else fs.Store(where, storage_options)
    return DatasetKeyStore(folder, kms, dataset_id=dataset_id)


SQL_URL = re.compile(r"(sqlite|postgres(ql)?|cockroachdb|mysql|mariadb|oracle|mssql)(\+\w+)?://")


_stores: weakref.WeakSet[Any] = weakref.WeakSet()


def mend_after_fork(store: Any) -> None:
    """Have `store._after_fork()` called in the child of a fork, where the threads are gone that held its locks."""
    _stores.add(store)


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


# ---------------------------------------------------------------------------------------------------------- in memory


class MemoryKeyStore:
    """A key store that ends with its process. Threads may share it."""

    def __init__(
        self, dataset_id: str | None = None, entries: Mapping[str, KeyEntry] | None = None, version: int = 0
    ) -> None:
        self.dataset_id = dataset_id or os.urandom(16).hex()
        self._entries: dict[str, KeyEntry] = dict(entries or {})
        self._history: builtins.list[Change] = []
        self._version = version
        self._after_fork()
        mend_after_fork(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        return self._version

    def refresh(self) -> int:
        return self._version

    @property
    def entries(self) -> Entries:
        return Entries(self)

    def get(self, key_id: str) -> KeyEntry:
        entry = self._entries.get(key_id)
        if entry is None:
            raise unknown(key_id, "the key store")
        return entry

    def list(self, state: str | None = None) -> builtins.list[KeyEntry]:
        return _listed(self._entries.values(), state)

    def compare_and_swap(
        self, changes: Mapping[str, KeyEntry | None], expected_version: int, *, operation: str = "change"
    ) -> int:
        check_changes(changes)
        with self._lock:
            if expected_version != self._version:
                raise conflict("the key store", expected_version, self._version)
            entries = changed(self._entries, changes)
            what = summary(changes, self._entries, entries)
            self._entries = entries
            self._version += 1
            self._history = [*self._history, Change(self._version, _now_ms(), what)][-HISTORY:]
            return self._version

    def history(self) -> builtins.list[Change]:
        return list(self._history)

    def __repr__(self) -> str:
        return f"<MemoryKeyStore version={self.version} keys={len(self._entries)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a key store in memory stays in its process: send the entries that are needed, in an Envelope")


def _listed(entries: Iterable[KeyEntry], state: str | None) -> list[KeyEntry]:
    return sorted((e for e in entries if state in (None, e.state)), key=lambda entry: entry.created_ms)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


# ---------------------------------------------------------------------------------------------------------- in a folder

FOLDER = "_ags/keys"
FORMAT = KEYS_FORMAT
MAX_NBYTES = KIND_NBYTES[FORMAT]  # of a document: a bound for what a lie can allocate
PART_NBYTES = 32 << 20  # of an object beside it, which the document's seal covers
NUMBERED = re.compile(rf"{FOLDER}/(\d{{8,}})\.json")
PART = re.compile(rf"{FOLDER}/(?:buckets|history)/[0-9a-f-]{{36}}\.json")
CHAIN = f"{FOLDER}/chain/"
LINK = re.compile(rf"{CHAIN}[0-9a-f]{{64}}\.json")
INLINE = 500  # entries that a document holds itself, at most
BUCKET = 400  # entries in a bucket on average, at most; and at least a quarter of that
HISTORY_NBYTES = 8 << 10  # of the changes that a document with buckets holds itself
INLINE_HISTORY_NBYTES = 1 << 20  # of those that one without buckets holds
HISTORY_PARTS = 64  # objects with earlier ones
SPARED = 10  # older documents that an expiry leaves which nobody has asked for
ORPHAN_SECONDS = 86_400.0  # what no version names may be in the making for so long
PARALLEL = 8  # requests at a time
ATTEMPTS = 10  # to read a version, while newer ones keep coming


class DatasetKeyStore:
    """The keys of a dataset, in the dataset: ``_ags/keys/00000001.json`` and on, of which the highest is current.

    store: the dataset's folder, or another that has the same layout and nothing but these keys. kms: a client or its
    properties. dataset_id: None takes the one that the newest version says, and makes one up where there is none;
    given, it is demanded. min_version: refuse to start from an older version.

    Each version is one document. Up to 500 entries it holds them all; of more, it names buckets, which are objects of
    some hundred entries each, chosen by the SHA-256 of their ids, and says what SHA-256 each has. A lookup reads the
    document and one bucket, and a change writes the buckets that it touches, and the document.

    A document is authentic under the newest of its keys that `seals_documents`, else under the newest active one that
    is not `for_columns`: nobody who cannot have the KMS unwrap that key can have written it. Objects are created,
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
        self._read: _Version | None = None
        self._seen: tuple[int, str] | None = None  # the newest version that was read, and the digest of its document
        self._buckets: dict[_Part, dict[str, KeyEntry]] = {}  # those that were read; threads fill it without the lock
        self._chain_objects = ChainObjects(store, CHAIN)
        self._after_fork()
        mend_after_fork(self)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()

    @property
    def store(self) -> Store:
        """The folder that the keys are in."""
        return self._store

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

    @property
    def entries(self) -> Entries:
        return Entries(self)

    def get(self, key_id: str) -> KeyEntry:
        with self._lock:
            fresh = self._read is None
        entry = self._using(lambda version: self._find(version, key_id))
        if entry is None and not fresh:  # read a while ago
            self.refresh()
            entry = self._using(lambda version: self._find(version, key_id))
        if entry is None:
            raise unknown(key_id, f"the key store in {self._store!r}")
        return entry

    def list(self, state: str | None = None) -> builtins.list[KeyEntry]:
        return _listed(self._using(self._all).values(), state)

    def envelope(self, key_ids: Iterable[str] | None = None) -> Envelope:
        """An envelope that looks keys up here, or one with those of `key_ids` (KeyAccessError if one is unknown)."""
        entries = self.entries if key_ids is None else {key_id: self.get(key_id) for key_id in key_ids}
        return Envelope(self._kms.for_dataset(self.dataset_id), entries)

    def history(self) -> builtins.list[Change]:
        return self._using(self._history)

    def digest(self, version: int) -> str | None:
        """The SHA-256 of the document of the version that was read, or of one before it, in hex. None if that is more
        than some 1,000 versions back."""

        def of(current: _Version) -> str | None:
            if version == current.number:
                return current.sha256 or None
            return self._chain_objects.digest(current.chain, version)

        return self._using(of)

    def compare_and_swap(
        self, changes: Mapping[str, KeyEntry | None], expected_version: int, *, operation: str = "change"
    ) -> int:
        """As `KeyResolver` has it. PolicyError if no active key would be left."""
        check_changes(changes)
        with self._lock:
            before = self._current()
            # Looked up again, since a number below the newest may be free: old versions get removed.
            if expected_version != before.number or expected_version != self._newest():
                raise self._conflict(expected_version)
            try:
                after, parts = self._changed(before, changes, operation)
            except IntegrityError:
                if self._newest() != expected_version:  # whose buckets are removed by now
                    raise self._conflict(expected_version) from None
                raise
            document = after.sealed(self._kms)  # so what the KMS refuses leaves nothing behind
            _each(lambda path: self._store.create(path, parts[path]), parts)
            self._chain_objects.write(before.next_chain()[1])
            try:
                self._store.create(_path(after.number), document)
            except FileExistsError:
                # The parts stay: this may be the echo of our own request, sent twice, and then a version has them.
                raise self._conflict(expected_version) from None
            self._keep(after._replace(sha256=sha256(document)))
            return after.number

    def use_kms(self, kms: KmsClient) -> None:
        """From now on, this client opens and seals what is read and written."""
        self._kms = kms

    def earlier_numbers(self) -> builtins.list[int]:
        """The versions before the newest whose documents are there, the newest of them first."""
        found = [e for e in self._store.list(f"{FOLDER}/") if NUMBERED.fullmatch(e.path) and e.size != len(REMOVED)]
        return sorted((_number(entry.path) for entry in found), reverse=True)[1:]

    def removed(self, key_ids: Collection[str]) -> dict[str, KeyEntry]:
        """Of keys that the newest version has no more, the entries that older documents still have."""
        found: dict[str, KeyEntry] = {}
        for number in self.earlier_numbers() if key_ids else ():
            with suppress(AgsError, FileNotFoundError):
                data = self._store.read(_path(number), MAX_NBYTES)
                if self.digest(number) not in (None, sha256(data)):
                    continue  # of another history
                version = _Version.opened(data, number, self._kms, self._given_id)
                for key_id in set(key_ids) - found.keys():
                    if (entry := self._find(version, key_id)) is not None:
                        found[key_id] = entry
            if len(found) == len(set(key_ids)):
                break
        return found

    def earlier(self, number: int) -> Earlier:
        """What an older version has, if the KMS opens it, and its buckets are there: `restore` can go back to it.

        Raises FileNotFoundError if the document of that version, or of one after it, is not there any more, and what
        reading a version raises.
        """
        newest = self._newest()
        if not 0 < number < newest:
            raise FileNotFoundError(f"the key store in {self._store!r} has no version {number} before {newest}")
        documents = []
        for n in range(number, newest + 1):
            documents.append(self._store.read(_path(n), MAX_NBYTES))
            if documents[-1] == REMOVED:
                raise FileNotFoundError(f"{_path(n)} in {self._store!r} was removed by an expiry")
        version = _Version.opened(documents[0], number, self._kms, self._given_id)
        entries = self._all(version)
        lost: set[str] = set()  # keys that later documents name, whoever wrote them: in the new version they are gone
        chain, objects = version.chain, dict[str, bytes]()
        for n, document in enumerate(documents, number):
            chain, made = chain.next(sha256(document))
            objects |= made
            with suppress(AgsError, KeyError, TypeError):
                claimed = Document(document, _path(n)).claimed()
                lost.update(str(key["key-id"]) for key in claimed.get("keys", ()) if key["key-id"] not in entries)
        return Earlier(version.dataset_id, number, newest, entries, sorted(lost), version, chain, objects)

    def restore(self, earlier: Earlier) -> int:
        """Make a new version that has what an earlier one has; its number. Nothing is removed.

        ConcurrentChangeError if somebody has made a version since `earlier` was looked up.
        """
        with self._lock:
            now = Change(earlier.newest + 1, _now_ms(), {"added": [], "changed": [], "removed": earlier.lost})
            old, parts = earlier.version, dict[str, bytes]()
            history, before = _remembered(old, now, parts, bool(old.buckets))
            body = {
                **old.body,
                "version": now.version,
                "time_ms": now.time_ms,
                "parent": earlier.newest,
                "operation": "restore",
                "history": [change.to_json() for change in history],
                "earlier": [part._asdict() for part in before],
                **earlier.chain.to_json(),
            }
            if not before:
                del body["earlier"]
            after = old._replace(number=now.version, history=history, earlier=before, body=body, chain=earlier.chain)
            document = after.sealed(self._kms)
            _each(lambda path: self._store.create(path, parts[path]), parts)
            self._chain_objects.write(earlier.objects)
            try:
                self._store.create(_path(now.version), document)
            except FileExistsError:
                raise self._conflict(earlier.newest) from None
            self._keep(after._replace(sha256=sha256(document)))
            return now.version

    def prune(self, spare: float = 0.0) -> builtins.list[str]:
        """Remove what is `superseded`, and return it: full paths.

        In the place of a document something stays for a day: who is late with a change must find its number taken.
        spare: the last 10 older documents stay, with what they consist of, if they were written in the last so many
        seconds: for `restore`.
        """
        self.check_history()
        removed = []
        listed = list(self._store.list(f"{FOLDER}/"))
        before = {entry.path: entry.modified for entry in listed if entry.size == len(REMOVED)}
        young = {entry.path for entry in listed if time.time() - entry.modified < spare}
        stay: set[str] = set()
        for number in self.earlier_numbers()[:SPARED] if spare else ():
            if _path(number) in young:
                with suppress(FileNotFoundError, FormatError):
                    stay |= self.objects(number)
        for path in self.superseded():
            if path in stay:
                continue
            if path not in before:
                removed.append(self._store.full_path(path))
            if not NUMBERED.fullmatch(path) or before.get(path, math.inf) < time.time() - ORPHAN_SECONDS:
                self._store.delete(path)
            elif path not in before:
                self._store.put(path, REMOVED, fsync=True)
        return removed

    def check_history(self) -> None:
        """IntegrityError if an old document that is there is not the one that the newest version descends from."""
        self.refresh()
        for entry in list(self._store.list(f"{FOLDER}/")):
            if NUMBERED.fullmatch(entry.path) and entry.size != len(REMOVED):
                try:
                    data = self._store.read(entry.path, MAX_NBYTES)
                except FileNotFoundError:
                    continue  # somebody has pruned it
                known = None if data == REMOVED else self.digest(_number(entry.path))
                if known not in (None, sha256(data)):
                    raise IntegrityError(
                        f"{entry.path} in {self._store!r} is not the version of the keys that the newest one descends "
                        "from: one of the two was exchanged, as if somebody had put older keys back. Nothing was "
                        "deleted. Put back the document that is right, from the storage's own versions or from a "
                        "copy; then try again"
                    )

    def objects(self, version: int) -> set[str]:
        """The paths of all that a version consists of. Of another version than the newest, as its document claims."""
        current = self._current()
        if version == current.number:
            links = self._chain_objects.paths(current.chain.needed(current.sha256)) if version else set()
            return {_path(version), *(part.path for part in current.parts()), *links} if version else set()
        path = _path(version)
        claimed = Document(self._store.read(path, MAX_NBYTES), path).claimed()
        links = self._chain_objects.paths(Chain.from_json(claimed, version, path).blocks)
        parts = (part.path for name in ("buckets", "earlier") for part in _parts(claimed, name, path) if part)
        return {path, *parts, *links}

    def superseded(self) -> builtins.list[str]:
        """The paths of all objects that the newest version does not need, those first that others name.

        Older documents and what they consist of; and what no document names, once it is a day old: before that, it may
        be in the making.
        """
        # Listed first: what a dead writer left is named by the newest version, or is the next that it would name.
        found = {entry.path: entry.modified for entry in self._store.list(f"{FOLDER}/")}
        newest = self.refresh()
        needed = self.objects(newest)
        old = sorted(path for path in found if (match := NUMBERED.fullmatch(path)) and int(match[1]) < newest)
        named: set[str] = set()
        for path in old:
            try:
                named |= self.objects(_number(path))
            except (FileNotFoundError, FormatError):
                pass  # somebody removes it, too; or it is no document, and names nothing
        before = time.time() - ORPHAN_SECONDS
        parts = [p for p in found if (PART.fullmatch(p) or LINK.fullmatch(p)) and p not in needed]
        return sorted(path for path in parts if path in named or found[path] < before) + old

    def _newest(self) -> int:
        return _newest(self._store)

    def _conflict(self, expected: int) -> ConcurrentChangeError:
        self._read = None
        return conflict(f"the key store in {self._store!r}", expected, self._newest())

    def _current(self) -> _Version:
        with self._lock:
            return self._read or self._keep(self._load())

    def _keep(self, version: _Version) -> _Version:
        if self._seen is not None:
            number, digest = self._seen
            known = version.sha256 if number == version.number else self._chain_objects.digest(version.chain, number)
            if number > version.number or known not in (None, digest):
                raise IntegrityError(
                    f"the newest keys of {self._store!r} are version {version.number}, which does not descend from "
                    f"version {number} as it was read before: somebody put older keys, or others, in their place"
                )
        if version.number:
            self._seen = version.number, version.sha256
        self._read = version
        self._buckets = {part: self._buckets[part] for part in version.buckets if part in self._buckets}
        return version

    def _load(self) -> _Version:
        for _ in range(ATTEMPTS):
            number = self._newest()
            if number < self._min_version:
                raise IntegrityError(
                    f"the newest keys of {self._store!r} are version {number}, below {self._min_version}: newer ones "
                    "were removed, or this is an old copy"
                )
            if number == 0:
                return _Version(self._new_id, 0, {}, (), [], (), {}, Chain(0))
            try:
                data = self._store.read(_path(number), MAX_NBYTES)
            except FileNotFoundError:  # removed since it was listed, so there is a newer one
                continue
            if data == REMOVED:
                if self._newest() == number:
                    raise IntegrityError(f"{_path(number)} is marked as removed, and nothing newer is there")
                continue
            return _Version.opened(data, number, self._kms, self._given_id)
        raise self._too_fast()

    def _using(self, use: Callable[[_Version], T]) -> T:
        """What `use` makes of the version that was read; or of a newer one, since when there is one, objects of the
        older ones may be removed."""
        for _ in range(ATTEMPTS):
            version = self._current()
            try:
                return use(version)
            except IntegrityError:
                if self._newest() <= version.number:
                    raise
                self.refresh()
        raise self._too_fast()

    def _too_fast(self) -> ConcurrentChangeError:
        return ConcurrentChangeError(f"the keys of {self._store!r} change faster than they can be read: try again")

    # ---- buckets

    def _find(self, version: _Version, key_id: str) -> KeyEntry | None:
        entry = version.entries.get(key_id)
        if entry is not None or not version.buckets:
            return entry
        return self._bucket(version, _place(key_id, len(version.buckets))).get(key_id)

    def _all(self, version: _Version) -> dict[str, KeyEntry]:
        return self._of(version, range(len(version.buckets))) if version.buckets else version.entries

    def _of(self, version: _Version, places: Iterable[int]) -> dict[str, KeyEntry]:
        """The entries of these buckets, by their ids, so that their order is always the same."""
        found = _each(lambda place: self._bucket(version, place), places)
        return dict(sorted(pair for entries in found for pair in entries.items()))

    def _bucket(self, version: _Version, place: int) -> dict[str, KeyEntry]:
        part = version.buckets[place]
        if part is None:
            return {}
        entries = self._buckets.get(part)
        if entries is None:
            entries = self._buckets[part] = _bucket(self._store, part, place, len(version.buckets))
        return entries

    def _history(self, version: _Version) -> builtins.list[Change]:
        earlier = _each(lambda part: _content(self._store, part), version.earlier)
        changes = [Change.from_json(c, FOLDER) for body in earlier for c in body["history"]]
        return [*changes, *version.history][-HISTORY:]

    # ---- changes

    def _changed(
        self, before: _Version, changes: Mapping[str, KeyEntry | None], operation: str
    ) -> tuple[_Version, dict[str, bytes]]:
        """The next version, and the objects that it consists of beside what there is."""
        count = len(before.buckets)
        touched = {_place(key_id, count) for key_id in changes} if count else set()
        old = self._of(before, touched) if count else before.entries
        new = changed(old, changes)
        what = summary(changes, old, new)
        total = len(new) - len(old) + (sum(part.entries for part in before.buckets if part) if count else len(old))
        wanted = _how_many(total, count)
        sealer = _next_sealer(next(iter(before.entries.values())), changes) if count else None
        # All entries are looked at only where they move, or if any of them may be the sealer.
        everything = changed(self._all(before), changes) if wanted != count or sealer is None else {}
        sealer = sealer or _sealer(everything.values())
        if sealer is None:
            raise PolicyError("a dataset needs an active key: add the new one in the change that retires the last")

        parts: dict[str, bytes] = {}
        entries, buckets = everything, list(before.buckets if wanted == count else (None,) * wanted)
        if wanted:
            entries = {sealer.key_id: sealer}
            moved = {_place(i, wanted) for ids in what.values() for i in ids} if wanted == count else range(wanted)
            contents: dict[int, builtins.list[Any]] = {place: [] for place in moved}
            for entry in (new if wanted == count else everything).values():
                if (content := contents.get(_place(entry.key_id, wanted))) is not None:
                    content.append(entry.to_json())
            for place, content in contents.items():
                buckets[place] = _made("buckets", "keys", content, parts) if content else None

        number, time_ms = before.number + 1, _now_ms()
        history, earlier = _remembered(before, Change(number, time_ms, what), parts, bool(wanted))
        body = {
            **before.body,  # also what a newer ags_fast wrote there
            "format": FORMAT,
            "dataset_id": before.dataset_id,
            "version": number,
            "time_ms": time_ms,
            "parent": before.number,
            "operation": operation,
            "keys": None if wanted else [entry.to_json() for entry in entries.values()],
            "sealer": sealer.to_json() if wanted else None,
            "buckets": [part and part._asdict() for part in buckets] if wanted else None,
            "history": [change.to_json() for change in history],
            "earlier": [part._asdict() for part in earlier] or None,
            **(chain := before.next_chain()[0]).to_json(),
        }
        body = {name: value for name, value in body.items() if value is not None or name not in OPTIONAL}
        return _Version(before.dataset_id, number, entries, tuple(buckets), history, earlier, body, chain), parts

    def __repr__(self) -> str:
        return f"<DatasetKeyStore {self._store!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._store, self._kms, self._given_id, self._min_version)


def _restore(store: Store, kms: KmsClient, dataset_id: str | None, min_version: int) -> DatasetKeyStore:
    return DatasetKeyStore(store, kms, dataset_id=dataset_id, min_version=min_version)


OPTIONAL = ("keys", "sealer", "buckets", "earlier")  # fields of a document that it has or has not


def claimed_keys(store: Store) -> tuple[str, list[KeyEntry]]:
    """The id of the dataset and the keys that its newest document claims: for people who have no KMS to ask.

    FileNotFoundError if there are none. Nothing shows that they are authentic.
    """
    path = _path(_newest(store))
    claimed = Document(store.read(path, MAX_NBYTES), path).claimed()
    buckets = _parts(claimed, "buckets", path)
    if not buckets:
        return str(claimed.get("dataset_id")), _listed(_entries(claimed, path).values(), None)
    found = _each(lambda i: _bucket(store, buckets[i], i, len(buckets)), range(len(buckets)))
    entries = sorted((entry for bucket in found for entry in bucket.values()), key=lambda entry: entry.key_id)
    return str(claimed.get("dataset_id")), _listed(entries, None)


def _newest(store: Store) -> int:
    numbers = (_number(entry.path) for entry in store.list(f"{FOLDER}/") if NUMBERED.fullmatch(entry.path))
    return max(numbers, default=0)


def _path(number: int) -> str:
    return f"{FOLDER}/{number:08}.json"


def _number(path: str) -> int:
    return int(path.removeprefix(f"{FOLDER}/").removesuffix(".json"))


def _place(key_id: str, count: int) -> int:
    """Which of `count` buckets, a power of 2, has the key: the first bits of the SHA-256 of its id."""
    digest = hashlib.sha256(key_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) * count >> 64


def _how_many(total: int, now: int) -> int:
    """Buckets for so many entries: as many as `now` while that will do; 0: they are all in the document."""
    if total <= INLINE:
        return 0
    if BUCKET // 4 * now <= total <= BUCKET * now:
        return now
    return 1 << max(0, (total - 1) // BUCKET).bit_length()


def _each(do: Callable[[U], T], items: Iterable[U]) -> list[T]:
    """`do` for each, some at a time: object stores take their time for each request, and take many."""
    items = list(items)
    if len(items) < 3:
        return [do(item) for item in items]
    with ThreadPoolExecutor(min(PARALLEL, len(items)), **same_counts()) as pool:
        return list(pool.map(do, items))


def _sealer(entries: Iterable[KeyEntry]) -> KeyEntry | None:
    """The entry that a document is sealed with. The second kind is for datasets in single wrap."""
    entries = list(entries)
    return newest_active(e for e in entries if seals_documents(e)) or newest_active(
        e for e in entries if not for_columns(e)
    )


def _next_sealer(before: KeyEntry, changes: Mapping[str, KeyEntry | None]) -> KeyEntry | None:
    """The one after `changes`; None if it may be any, since the one before has lost its rank and no new one has it."""

    def rank(entry: KeyEntry) -> tuple[bool, int]:
        return seals_documents(entry), entry.created_ms

    changed = {before.key_id: before, **changes}
    best = _sealer(entry for entry in changed.values() if entry is not None)
    return best if best is not None and rank(best) >= rank(before) else None


def _remembered(
    before: _Version, change: Change, parts: dict[str, bytes], move: bool
) -> tuple[list[Change], tuple[_Part, ...]]:
    """The history with one more change: what the document holds, and the objects with what was earlier.

    What becomes too long is moved into another object, which `parts` gets. move: the document is to be short.
    """
    history, earlier = [*before.history, change][-HISTORY:], before.earlier
    told = [change.to_json() for change in history]
    if len(dumps(told)) > (HISTORY_NBYTES if move else INLINE_HISTORY_NBYTES):
        history, earlier = [], (*earlier, _made("history", "history", told, parts))
    while earlier and (
        len(earlier) > HISTORY_PARTS or sum(part.entries for part in earlier[1:]) + len(history) >= HISTORY
    ):
        earlier = earlier[1:]
    return history, earlier


class _Part(NamedTuple):
    """An object of a version beside its document, which names it, so that its seal covers every bit of the object."""

    path: str
    entries: int
    length: int  # bytes
    sha256: str  # base64

    @classmethod
    def of(cls, path: str, entries: int, data: bytes) -> _Part:
        return cls(path, entries, len(data), base64.b64encode(hashlib.sha256(data).digest()).decode())


def _made(kind: str, field: str, items: Sequence[Any], parts: dict[str, bytes]) -> _Part:
    """A new object, which `parts` gets."""
    path = f"{FOLDER}/{kind}/{uuid.uuid4()}.json"
    data = parts[path] = dumps({"format": f"{FORMAT}-{kind}", field: items}).encode() + b"\n"
    if len(data) > PART_NBYTES:
        raise PolicyError(
            f"a part of a key store may have {PART_NBYTES} bytes, and this one would have {len(data)}: make the "
            "change in several steps"
        )
    return _Part.of(path, len(items), data)


def _parts(body: Mapping[str, Any], name: str, path: str) -> tuple[_Part | None, ...]:
    """The objects that a document names in a field."""
    try:
        parts = [value and _Part(**{field: value[field] for field in _Part._fields}) for value in body.get(name, ())]
        for part in filter(None, parts):
            if not (PART.fullmatch(part.path) and 0 < part.length <= PART_NBYTES and part.sha256 > ""):
                raise ValueError("no object of a key store")
            if type(part.entries) is not int or type(part.length) is not int or not 0 < part.entries <= part.length:
                raise ValueError("no object of a key store")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path} has impossible {name} ({type(error).__name__})") from None
    return tuple(part or None for part in parts)


class Earlier(NamedTuple):
    """An older version of a dataset's keys that opens, and what a new version of the same content has to say."""

    dataset_id: str
    number: int
    newest: int  # the version that the new one comes after
    entries: dict[str, KeyEntry]
    lost: builtins.list[str]  # ids of keys that versions after this one claim, and this one has not
    version: _Version
    chain: Chain  # the new version's
    objects: dict[str, bytes]  # that the chain needs


class _Version(NamedTuple):
    """A version of a dataset's keys: ``body`` is the document's, with whatever fields it has."""

    dataset_id: str
    number: int
    entries: dict[str, KeyEntry]  # all; or the sealer, and all in buckets
    buckets: tuple[_Part | None, ...]  # 2**k of them, or none; an empty one is no object
    history: list[Change]  # the last changes
    earlier: tuple[_Part, ...]  # objects with those before
    body: dict[str, Any]
    chain: Chain  # the digests of the versions before it
    sha256: str = ""  # hex, of the document as it is stored

    def next_chain(self) -> tuple[Chain, dict[str, bytes]]:
        """What the version after this one names of those before it."""
        return self.chain.next(self.sha256) if self.number else (Chain(1), {})

    def parts(self) -> list[_Part]:
        return [part for part in (*self.buckets, *self.earlier) if part]

    @classmethod
    def opened(cls, data: bytes, number: int, kms: KmsClient, dataset_id: str | None) -> _Version:
        path = _path(number)
        document = Document(data, path)
        # The sealer's entry is only a claim here, and enough to ask the KMS for the key, which only it can unwrap:
        # that key says whether all of the document is authentic.
        sealer = document.sealer and _entries({"keys": [document.sealer]}, path).get(document.key_id)
        if sealer is None:
            raise FormatError(f"{path} is sealed with {document.key_id!r}, which is not among its keys")
        try:
            own = kms.for_dataset(dataset_id or document.dataset_id)
            body = document.authentic(Envelope(own, {sealer.key_id: sealer}), dataset_id)
        except (FormatError, KeyAccessError) as error:  # the KMS's, which does not know where its key comes from
            raise type(error)(f"{path}: {error}") from None
        buckets = _parts(body, "buckets", path)
        if ("buckets" in body) != ("sealer" in body) or ("buckets" in body) == ("keys" in body):
            raise FormatError(f"{path} has no list of keys, or two")
        if "buckets" in body and (len(buckets) < 1 or len(buckets) & len(buckets) - 1):
            raise FormatError(f"{path} has {len(buckets)} buckets, which is no power of 2")
        entries = {sealer.key_id: sealer} if buckets else _entries(body, path)
        if body.get("format") != FORMAT or body.get("version") != number or type(body["version"]) is not int:
            raise IntegrityError(f"{path} holds {body.get('format')!r} version {body.get('version')!r}")
        changes = body.get("history")
        if not isinstance(changes, list):
            raise FormatError(f"{path} has no history")
        history = [Change.from_json(change, path) for change in changes]
        earlier = tuple(filter(None, _parts(body, "earlier", path)))
        chain = Chain.from_json(body, number, path)
        return cls(body["dataset_id"], number, entries, buckets, history, earlier, body, chain, sha256(data))

    def sealed(self, kms: KmsClient) -> bytes:
        sealer = _sealer(self.entries.values())
        assert sealer is not None
        envelope = Envelope(kms.for_dataset(self.dataset_id), {sealer.key_id: sealer})
        path = _path(self.number)
        return taken(seal_document(envelope, sealer.key_id, self.dataset_id, path, self.body), FORMAT, path)


def _content(store: Store, part: _Part) -> dict[str, Any]:
    """What the object holds, if it is the one that the document names."""
    try:
        data = store.read(part.path, part.length)
    except FileNotFoundError:
        raise IntegrityError(f"{part.path} is missing, but the newest keys of {store!r} name it") from None
    except FormatError as error:
        raise IntegrityError(str(error)) from None
    if part != _Part.of(part.path, part.entries, data):
        raise IntegrityError(f"{part.path} is not what the newest keys of {store!r} name: it was changed")
    return parse_object(data, part.path)


def _bucket(store: Store, part: _Part | None, place: int, count: int) -> dict[str, KeyEntry]:
    """The entries of the bucket that is number `place` of `count`."""
    if part is None:
        return {}
    entries = _entries(_content(store, part), part.path)
    if len(entries) != part.entries or any(_place(key_id, count) != place for key_id in entries):
        raise FormatError(f"{part.path} has other keys than belong there")
    return entries


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
