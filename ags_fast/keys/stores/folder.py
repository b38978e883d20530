"""KEKs in a folder: numbered documents, of the dataset itself or elsewhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from ags_fast.errors import AgsError, ConcurrentChangeError, IntegrityError, PolicyError
from ags_fast.keys.envelope import Envelope
from ags_fast.keys.kms import as_kms, shared_client
from ags_fast.keys.stores import upkeep
from ags_fast.keys.stores.base import (
    Change,
    Entries,
    changed,
    check_changes,
    conflict,
    listed,
    mend_after_fork,
    now_ms,
    summary,
    unknown,
)
from ags_fast.keys.stores.documents import KeyDocuments
from ags_fast.keys.stores.parts import FOLDER, bucket_count, bucket_of, remember
from ags_fast.keys.stores.restore import Earlier, earlier_version, removed_entries, restored_version
from ags_fast.keys.stores.version import MAX_NBYTES, KeysVersion, next_sealer, sealer_of

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Collection, Iterable

    from ags_fast.keys.entry import KeyEntry
    from ags_fast.keys.kms import KmsClient
    from ags_fast.keys.stores.base import Folder

__all__ = ["DatasetKeyStore"]

ATTEMPTS = 10  # to read a version, while newer ones keep coming

T = TypeVar("T")


class DatasetKeyStore:
    """The keys of a dataset in a folder: ``_ags/keys/00000001.json`` and on, of which the highest is current.

    Each version is one document. A document with few entries holds them all. A document with many names buckets, which
    are chosen by the SHA-256 of an entry's id; a lookup reads the document and one bucket, and a change writes the
    document and the buckets that it touches. docs/dataset-format.md, "Documents", has every byte.

    A document is authentic under the newest of its keys that `seals_documents`, or under the newest active key that is
    not `for_columns`: only a caller for whom the KMS unwraps that key can have written it. Objects are created
    exclusively. What this cannot show: that somebody removed the newest versions, or put an older whole dataset in
    place. `min_version` says from where on that is refused.

    The newest version is read with the first lookup, and again by `refresh`, by `get` for an id that is not in it, and
    after a conflict. Threads may share a store. It pickles without what it has read.

    Args:
        store: The dataset's folder, or another that has the same layout and nothing but these keys.
        kms: A client or its properties.
        dataset_id: The dataset that the keys must be of; None accepts the one that the newest version names, and makes
            up an id if there is none.
        min_version: The oldest version to start from.
    """

    def __init__(
        self, store: Folder, kms: KmsClient | Mapping[str, str], *, dataset_id: str | None = None, min_version: int = 0
    ) -> None:
        client = shared_client(kms) if isinstance(kms, Mapping) else as_kms(kms)
        self._documents = KeyDocuments(store, client, dataset_id)
        self._new_id = dataset_id or os.urandom(16).hex()
        self._min_version = min_version
        self._read: KeysVersion | None = None
        self._known: KeysVersion | None = None  # the newest version that was opened with this client
        self._seen: tuple[int, str] | None = None  # the newest version that was read, and the digest of its document
        self.after_fork()
        mend_after_fork(self)

    def after_fork(self) -> None:
        """Make a new lock."""
        self._lock = threading.RLock()

    @property
    def store(self) -> Folder:
        """The folder that the keys are in."""
        return self._documents.folder

    @property
    def dataset_id(self) -> str:
        """As `KeyResolver` has it."""
        return self._current().dataset_id

    @property
    def version(self) -> int:
        """The version that `get` and `list` answer from: the newest when it was read."""
        return self._current().number

    def refresh(self) -> int:
        """Read the newest version, and return its number."""
        with self._lock:
            self._read = None
            return self._current().number

    @property
    def entries(self) -> Entries:
        """The entries as an `Envelope` takes them."""
        return Entries(self)

    def get(self, key_id: str) -> KeyEntry:
        """As `KeyResolver` has it."""
        with self._lock:
            fresh = self._read is None
        entry = self._using(lambda version: self._documents.find(version, key_id))
        if entry is None and not fresh:  # read a while ago
            self.refresh()
            entry = self._using(lambda version: self._documents.find(version, key_id))
        if entry is None:
            raise unknown(key_id, f"the key store in {self.store!r}")
        return entry

    def sealer(self) -> KeyEntry | None:
        """Return the key that seals the documents. This reads no bucket. None if there is no key yet."""
        return self._using(lambda version: sealer_of(version.entries.values()))

    def list(self, state: str | None = None) -> builtins.list[KeyEntry]:
        """As `KeyResolver` has it."""
        return listed(self._using(self._documents.entries).values(), state)

    def envelope(self, key_ids: Iterable[str] | None = None) -> Envelope:
        """Return an envelope that looks keys up here, or one with only the keys `key_ids`.

        Raises:
            KeyAccessError: A key is unknown.
        """
        entries = self.entries if key_ids is None else {key_id: self.get(key_id) for key_id in key_ids}
        return Envelope(self._documents.kms.for_dataset(self.dataset_id), entries)

    def history(self) -> builtins.list[Change]:
        """As `KeyResolver` has it."""
        return self._using(self._documents.history)

    def digest(self, version: int) -> str | None:
        """Return the SHA-256 of the document of the version that was read, or of an earlier one, in hex.

        Returns:
            None if the version is more than some 1,000 versions back.
        """
        return self._using(lambda current: self._documents.digest(current, version))

    def use_kms(self, kms: KmsClient) -> None:
        """Open and seal documents with this client from now on."""
        with self._lock:
            self._documents.kms, self._known = kms, None

    # ---- changes

    def compare_and_swap(
        self, changes: Mapping[str, KeyEntry | None], expected_version: int, *, operation: str = "change"
    ) -> int:
        """As `KeyResolver` has it. Every 4th version removes old documents that hold nothing later ones lack.

        Raises:
            PolicyError: No active key would be left.
        """
        check_changes(changes)
        with self._lock:
            before = self._current()
            # Looked up again: a number below the newest may be free, since tombstones go after a day.
            if expected_version != before.number or expected_version != self._documents.numbered.newest():
                raise self._conflict(expected_version)
            try:
                after, parts = self._changed(before, changes, operation)
            except IntegrityError:
                if self._documents.numbered.newest() != expected_version:  # others have removed its buckets by now
                    raise self._conflict(expected_version) from None
                raise
            version = self._create(after, parts, before.next_chain()[1], expected_version)
            if version.number % upkeep.TIDY == 0:
                with suppress(AgsError, OSError):  # the change is made, and others tidy up, too
                    upkeep.tidy(self._documents, version)
            return version.number

    def _create(
        self, after: KeysVersion, parts: Mapping[str, bytes], links: Mapping[str, bytes], expected: int
    ) -> KeysVersion:
        try:
            return self._keep(self._documents.write(after, parts, links))
        except FileExistsError:
            # The parts stay: this may be the echo of our own request, sent twice, and then a version has them.
            raise self._conflict(expected) from None

    def _changed(
        self, before: KeysVersion, changes: Mapping[str, KeyEntry | None], operation: str
    ) -> tuple[KeysVersion, dict[str, bytes]]:
        """The next version, and its new parts."""
        documents, count = self._documents, len(before.buckets)
        last = next(iter(before.entries.values())) if count else None
        sealer = next_sealer(last, changes) if last else None
        own = {entry.key_id for entry in (last, sealer) if entry}  # the document's, in no bucket
        moved = own if len(own) > 1 else set()
        places = {bucket_of(key_id, count) for key_id in (changes.keys() - own) | moved} if count else None
        old = documents.entries(before, places)
        new = changed(old, changes)
        what = summary(changes, old, new)
        total = len(new) - len(old) + (sum(part.entries for part in before.buckets if part) + 1 if count else len(old))
        wanted = bucket_count(total, count)
        # All entries are looked at only if they move, or if any of them may be the sealer.
        everything = changed(documents.entries(before), changes) if wanted != count or sealer is None else {}
        sealer = sealer or sealer_of(everything.values())
        if sealer is None:
            raise PolicyError("a dataset needs an active key: add the new one in the change that retires the last")
        parts: dict[str, bytes] = {}
        ids = {key_id for ids in what.values() for key_id in ids} - own | moved
        touched = set(range(wanted)) if everything else {bucket_of(key_id, wanted) for key_id in ids if wanted}
        rest = (entry for entry in (everything or new).values() if entry.key_id != sealer.key_id)
        buckets = documents.divided((None,) * wanted if everything else before.buckets, rest, touched, parts)
        change = Change(before.number + 1, now_ms(), what)
        history, earlier = remember(before.history, before.earlier, change, parts)
        after = before.following(
            change.version,
            operation,
            change,
            entries={sealer.key_id: sealer} if wanted else everything,
            buckets=buckets,
            history=history,
            earlier=earlier,
            chain=before.next_chain()[0],
        )
        return after, parts

    # ---- the past

    def earlier_numbers(self) -> builtins.list[int]:
        """Return the versions before the newest whose documents are there, the newest of them first."""
        return sorted(self._documents.numbered.numbers(), reverse=True)[1:]

    def removed(self, key_ids: Collection[str]) -> dict[str, KeyEntry]:
        """Return the entries that older documents still have, of keys that the newest version does not have."""
        return removed_entries(self._documents, self._current(), key_ids)

    def earlier(self, number: int) -> Earlier:
        """Return what an older version has, if the KMS opens it and its buckets are there, for `restore`.

        Raises:
            FileNotFoundError: The document of that version, or of one after it, is gone.
        """
        return earlier_version(self._documents, number)

    def restore(self, earlier: Earlier) -> int:
        """Make a new version that has what an earlier one has, and return its number. Nothing is removed.

        Raises:
            ConcurrentChangeError: Somebody has made a version since `earlier` was looked up.
        """
        with self._lock:
            after, parts = restored_version(self._documents, earlier)
            return self._create(after, parts, earlier.objects, earlier.newest).number

    def check_history(self) -> None:
        """Raise IntegrityError if an old document is not the one that the newest version descends from."""
        self.refresh()
        upkeep.check_history(self._documents, self._current())

    def superseded(self) -> builtins.list[str]:
        """Return the paths of all objects that the newest version does not need."""
        found = self._found()
        self.refresh()
        return upkeep.superseded(self._documents, found, self._current())

    def prune(self, spare: float = 0.0) -> builtins.list[str]:
        """Remove what is `superseded`. A tombstone takes the place of a document for a day.

        Args:
            spare: The last 10 older documents stay if they are younger than this, in seconds: for `restore`.

        Returns:
            The full paths of the removed objects.
        """
        self.check_history()
        found = self._found()
        self.refresh()
        return upkeep.prune(self._documents, self._current(), found, spare)

    def objects(self, version: int) -> set[str]:
        """Return the paths of all that a version consists of; for an older version, what its document claims."""
        current = self._current()
        if version == current.number:
            return self._documents.objects(current)
        return self._documents.claimed_objects(version, self._documents.numbered.read(version, MAX_NBYTES))

    def _found(self) -> dict[str, float]:
        return {entry.path: entry.modified for entry in self.store.list(FOLDER)}

    # ---- the version that was read

    def _conflict(self, expected: int) -> ConcurrentChangeError:
        self._read = None
        return conflict(f"the key store in {self.store!r}", expected, self._documents.numbered.newest())

    def _current(self) -> KeysVersion:
        with self._lock:
            return self._read or self._keep(self._load())

    def _load(self) -> KeysVersion:
        version = self._documents.newest(self._known) or KeysVersion.empty(self._new_id)
        if version.number < self._min_version:
            raise IntegrityError(
                f"the newest keys of {self.store!r} are version {version.number}, below {self._min_version}: newer "
                "ones were removed, or this is an old copy"
            )
        return version

    def _keep(self, version: KeysVersion) -> KeysVersion:
        if self._seen is not None:
            number, digest = self._seen
            if number > version.number or self._documents.digest(version, number) not in (None, digest):
                raise IntegrityError(
                    f"the newest keys of {self.store!r} are version {version.number}, which does not descend from "
                    f"version {number} as it was read before: somebody put older keys, or others, in their place"
                )
        if version.number:
            self._seen = version.number, version.sha256
        self._read = self._known = version
        self._documents.keep_buckets(version)
        return version

    def _using(self, use: Callable[[KeysVersion], T]) -> T:
        """What `use` makes of the version that was read, or of a newer one, if objects of the older one are gone."""
        for _ in range(ATTEMPTS):
            version = self._current()
            try:
                return use(version)
            except IntegrityError:
                if self._documents.numbered.newest() <= version.number:
                    raise
                self.refresh()
        raise ConcurrentChangeError(f"the keys of {self.store!r} change faster than they can be read: try again")

    def __repr__(self) -> str:
        return f"<DatasetKeyStore {self.store!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.store, self._documents.kms, self._documents.dataset_id, self._min_version)


def _restore(store: Folder, kms: KmsClient, dataset_id: str | None, min_version: int) -> DatasetKeyStore:
    return DatasetKeyStore(store, kms, dataset_id=dataset_id, min_version=min_version)
