"""An encrypted dataset: its versions, and the manifests that say which files a version has and how to open them.

The layout and every byte of it are in docs/dataset-format.md. Nothing is ever changed in place: a new version is a new
numbered object, created exclusively, and that creation is the commit.
"""

from __future__ import annotations

import os
import time
from itertools import chain
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.entries import FileEntry, check_lengths, wrapped_by
from ags_fast.dataset.keks import GRACE_MS, SCOPE, SLACK_USES, SUCCESSOR, Uses, Want, master_now, moved, retired
from ags_fast.dataset.names import CHAIN, HIDDEN, MANIFESTS, PLANS, VERSIONS, check_path, manifest_name, numbered
from ags_fast.dataset.policy import Policy
from ags_fast.dataset.tables import (
    TABLE_DEK_NBYTES,
    TableRef,
    chunks,
    decode_entries,
    encode_entries,
    named_keys,
    open_table,
    seal_table,
    whole,
)
from ags_fast.dataset.versions import KeysAt, Version, key_store_digest, version_numbers
from ags_fast.errors import ConcurrentChangeError, FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.fs import NO_LOCK_SECONDS, Store
from ags_fast.keys.chain import Chain, ChainObjects, Pin, sha256
from ags_fast.keys.envelope import (
    DOCUMENT_NBYTES,
    LATEST_MS,
    REMOVED,
    Document,
    Envelope,
    KeyEntry,
    UnknownKeyError,
    binding,
    document_nbytes,
    seal_document,
    taken,
)
from ags_fast.keys.resolver import DatasetKeyStore, Entries, for_columns, open_key_store

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from ags_fast.keys.kms import KmsClient
    from ags_fast.keys.resolver import KeyResolver


PARENTS = 4  # of the last versions, that a writer compares with what is there


class Ledger:
    """An encrypted dataset, opened with the caller's KMS. Holds no key: those stay in the process-wide cache.

    The newest version that was read is remembered: each version that is read after it must descend from it, or be an
    ancestor of it, and the first one from the caller's pin. A version that is made names the digest of exactly the
    version that was checked. So nobody can exchange the history between a check and a commit.
    """

    def __init__(
        self, store: Store, kms: KmsClient, keys: KeyResolver, pin: str | None = None, min_version: int | None = None
    ) -> None:
        self.store = store
        self._kms = kms
        self.keys = keys
        self._pin = None if pin is None else Pin.parse(pin)
        self._min_version = min_version or 0
        self._head: Version | None = None  # the newest that was read
        self._fits = ""  # the digest of a version whose last ancestors were seen to be there as it names them
        self._chain_objects = ChainObjects(store, CHAIN)
        self.proven: set[str] = set()  # keys in single wrap, as `Envelope` has it

    @classmethod
    def open(
        cls,
        url: Any,
        kms: KmsClient,
        storage_options: Mapping[str, Any] | None = None,
        key_store: Any = None,
        *,
        pin: str | None = None,
        min_version: int | None = None,
    ) -> Ledger:
        """FileNotFoundError if there is no dataset at `url`. key_store: where its keys are, if not in the dataset.

        pin: the newest version must be the pinned one or descend from it, now (IntegrityError), and whenever it is
        read again. min_version: its number must be at least this (PolicyError).
        """
        store = url if isinstance(url, Store) else Store(url, storage_options)
        keys = open_key_store(key_store, kms, store=store, storage_options=storage_options)
        opened = cls(store, kms, keys, pin, min_version)
        if not opened._has_keys():
            raise FileNotFoundError(f"there is no encrypted dataset at {store.url}: it has no {HIDDEN}keys")
        if pin is not None or min_version:
            opened.current()
        return opened

    @classmethod
    def open_or_create(cls, store: Store, kms: KmsClient, wrapping_key_id: str, key_store: Any = None) -> Ledger:
        while True:
            opened = cls(store, kms, open_key_store(key_store, kms, store=store))
            if opened._has_keys():
                if key_store is not None and opened._is_new() and any(key.uses for key in opened.keys.list()):
                    raise PolicyError(
                        f"{opened.keys!r} has keys of the dataset {opened.id} already, and {store.url} has none: two "
                        "datasets must not share keys. Name another key store, or the folder of that dataset"
                    )
                return opened
            entry = Want(wrapping_key_id).new_kek(opened.kms)
            try:
                opened.keys.compare_and_swap({entry.key_id: entry}, 0)
            except ConcurrentChangeError:
                continue  # somebody else has just created it
            return opened

    def _is_new(self) -> bool:
        """Whether neither a version nor a plan is there."""
        return not self.version_numbers() and not any(self.store.list(PLANS))

    def _has_keys(self) -> bool:
        if self.keys.version == 0 and self.version_numbers() and self.keys.refresh() == 0:
            raise IntegrityError(
                f"{self.store.url} has versions, but {self.keys!r} has no {HIDDEN}keys: name the key_store that it was "
                "written with, if they are elsewhere; otherwise somebody took them away"
            )
        return self.keys.version > 0

    def use_kms(self, kms: KmsClient) -> None:
        """From now on, this client wraps and unwraps keys."""
        self._kms = kms
        if isinstance(self.keys, DatasetKeyStore):
            self.keys.use_kms(kms)

    @property
    def kms(self) -> KmsClient:
        return self._kms.for_dataset(self.id) if self._kms.binds_dataset else self._kms

    @property
    def id(self) -> str:
        return self.keys.dataset_id

    @property
    def envelope(self) -> Envelope:
        return Envelope(self.kms, Entries(self.keys), self.proven)

    # ---- keys

    def reserve(self, wants: Mapping[Want, Uses], policy: Policy | None = None) -> dict[Want, KeyEntry]:
        """For each kind, reserve these uses on the newest active key, or on a new one.

        One whose uses or lifetime are over, as `policy` has it, retires in favour of the new one. All of it is one
        change of the key store; calls of the KMS come before it.
        """
        policy = policy or Policy()
        made: dict[Want, KeyEntry] = {}
        while True:
            version = self.keys.version
            newest: dict[Want, KeyEntry] = {}
            for entry in sorted(self.keys.list("active"), key=lambda entry: (entry.created_ms, entry.key_id)):
                newest[Want.of(entry)] = entry
            chosen: dict[Want, KeyEntry] = {}
            changes: dict[str, KeyEntry | None] = {}
            for want, uses in wants.items():
                held = newest.get(want)
                if held is not None and not want.double_wrap:
                    chosen[want] = held  # the KMS counts its own
                    continue
                if held is None or policy.outlived(held.created_ms) or not policy.has_room(held.uses, *uses):
                    if not policy.has_room(0, *uses):
                        raise PolicyError(
                            f"one KEK would wrap {uses.data_keys} data keys, and the dataset's policy allows "
                            f"{policy.kek_uses}: share it among fewer files by the policy's kek_scope"
                        )
                    if want not in made:
                        self._check_not_left(want.wrapping_key_id, newest.values())
                        made[want] = want.new_kek(self.kms)
                        if held is not None:
                            made[want] = moved(made[want], held)
                    if held is not None:
                        changes[held.key_id] = retired(held, made[want].key_id, GRACE_MS)
                    held = made[want]
                chosen[want] = held.replace(uses=policy.reserved(held.uses, *uses)) if want.double_wrap else held
                changes[held.key_id] = chosen[want]
            try:
                if changes:
                    self.keys.compare_and_swap(changes, version)
            except ConcurrentChangeError:
                self.keys.refresh()
                continue
            return chosen

    def _check_not_left(self, wrapping_key_id: str, active: Iterable[KeyEntry]) -> None:
        """PolicyError if the dataset has left this master key: there may be a reason, of which not every job knows."""
        now = master_now(wrapping_key_id, active)
        if now != wrapping_key_id:
            raise PolicyError(
                f"the keys of {self.store.url} were rotated from the master key {wrapping_key_id!r} to {now!r}: "
                f"pass wrapping_key_id={now!r}, or rotate them back"
            )

    def main_key(self) -> KeyEntry:
        """The newest key that may seal documents; where there is none, that wraps data keys. PolicyError without."""
        active = [entry for entry in self.keys.list("active") if not for_columns(entry)]
        ours = [entry for entry in active if SCOPE not in entry.properties]
        documents = [entry for entry in ours if entry.double_wrap]
        if not active:
            raise PolicyError("the dataset has no active key: name a wrapping_key_id")
        return max(documents or ours or active, key=lambda entry: (entry.created_ms, entry.key_id))

    def document_key(self) -> str:
        """The key that seals documents and tables now. Who wraps DEKs reserves SLACK_USES of it for them, too."""
        entry = self.main_key()
        if not entry.double_wrap:  # of a dataset in single wrap, made by an ags_fast that had none for documents
            want = Want(entry.wrapping_key_id)
            entry = self.reserve({want: Uses(spare=SLACK_USES)})[want]
        return entry.key_id

    def active(self, key_id: str) -> str:
        """The key itself, or if it is retired the one that took its place."""
        entry = self.keys.get(key_id)
        want = Want.of(entry)
        try:
            while entry.state != "active" and SUCCESSOR in entry.properties:
                entry = self.keys.get(entry.properties[SUCCESSOR])
        except KeyAccessError:  # a successor that was retired, too, and is gone
            pass
        if entry.state == "active":
            return entry.key_id
        want = want._replace(wrapping_key_id=master_now(want.wrapping_key_id, self.keys.list("active")))
        return self.reserve({want: Uses()})[want].key_id

    def rewrap(self, entries: Sequence[FileEntry]) -> list[FileEntry]:
        """The same files, with DEKs that retired keys wrap wrapped by those that took their places."""
        counts = wrapped_by(entries)
        moves = {key_id: new for key_id in counts if (new := self.active(key_id)) != key_id}
        if not moves:
            return list(entries)
        self.add_uses({new: counts[old] for old, new in moves.items()})
        envelope = self.envelope
        wraps = [entry.wraps(self.id) for entry in entries]
        todo: dict[str, list[tuple[bytes, bytes]]] = {key_id: [] for key_id in moves}
        for key_id, wrapped, bound in chain.from_iterable(wraps):
            if key_id in moves:
                todo[key_id].append((wrapped, bound))
        done = {old: iter(envelope.rewrap_many(old, moves[old], items)) for old, items in todo.items()}
        return [
            entry.with_wraps([(moves[k], next(done[k])) if k in moves else (k, wrapped) for k, wrapped, _ in those])
            for entry, those in zip(entries, wraps, strict=True)
        ]

    def add_uses(self, uses: Mapping[str, int]) -> None:
        """Count that these keys wrap so many more."""

        def changes() -> dict[str, KeyEntry | None]:
            entries = [self.keys.get(key_id) for key_id in uses]
            return {e.key_id: e.replace(uses=e.uses + uses[e.key_id]) for e in entries if e.double_wrap}

        self.change_keys(changes, "change")

    def change_keys(self, changes: Callable[[], Mapping[str, KeyEntry | None]], operation: str) -> None:
        """Change the key store as `changes` says; it is asked again if somebody else was first."""
        while True:
            version = self.keys.refresh()
            try:
                if made := changes():
                    self.keys.compare_and_swap(made, version, operation=operation)
                return
            except ConcurrentChangeError:
                continue

    # ---- sealed objects

    def seal_table(self, path: str, entries: Sequence[FileEntry], key_id: str, envelope: Envelope) -> TableRef:
        dek = os.urandom(TABLE_DEK_NBYTES)
        data = seal_table(encode_entries(entries), dek, self.id, path)
        wrapped = envelope.wrap(key_id, dek, binding(self.id, "dek", path))
        self.store.create(path, data)
        return TableRef(path, len(data), len(entries), key_id, wrapped, named_keys(wrapped_by(entries)))

    def open_table(self, ref: TableRef, envelope: Envelope, only: str | None = None) -> list[FileEntry]:
        """What it holds; only: of this path, if it is there."""
        entries = decode_entries(open_table(self.store, self.id, ref, envelope), ref.path, only)
        for entry in entries:
            check_path(entry.path)
            check_path(entry.file)
        return entries

    def seal_body(self, path: str, body: dict[str, Any], key_id: str, envelope: Envelope) -> str:
        """Create an authenticated document; its SHA-256. FileExistsError if somebody was first."""
        data = taken(seal_document(envelope, key_id, self.id, path, body), body["format"], path)
        self.store.create(path, data)
        return sha256(data)

    def open_body(self, path: str, kind: str, envelope: Envelope) -> tuple[dict[str, Any], str]:
        """What a document says, if it is authentic and of this kind; and the key that it is sealed with."""
        return self._opened(path, kind, envelope)[:2]

    def _opened(self, path: str, kind: str, envelope: Envelope) -> tuple[dict[str, Any], str, str]:
        """`open_body`, and the SHA-256 of the document."""
        data = self.store.read(path, document_nbytes(kind))
        if data == REMOVED:
            raise FileNotFoundError(path)
        document = Document(data, path)
        body = document.authentic(envelope, self.id)
        if body.get("format") != kind:
            raise FormatError(f"{path} is a {body.get('format')!r}, not a {kind!r}")
        return body, document.key_id, sha256(data)

    # ---- versions

    def version_numbers(self) -> list[int]:
        return version_numbers(self.store)

    def remove_version(self, number: int, digest: str) -> bool:
        """Whether it was there. IntegrityError if what is there is not the document with this SHA-256.

        Something stays in its place for a day: who is late with a commit must find the number taken, or would commit to
        the past. What is older goes, too.
        """
        path = VERSIONS + numbered(number)
        try:
            data = self.store.read(path, document_nbytes("ags-version"))
        except FileNotFoundError:
            data = REMOVED
        removes = data != REMOVED
        if removes:
            if sha256(data) != digest or self.version_numbers()[-1] == number:
                raise IntegrityError(
                    f"{path} is not the version {number} that an expiry was to remove: it was exchanged, or the plan "
                    f"is of another history. Compare with your pin; remove the folder in {PLANS} if that is wrong"
                )
            self.store.put(path, REMOVED, fsync=True)
        for entry in list(self.store.list(VERSIONS)):
            if entry.size == len(REMOVED) and time.time() - entry.modified > NO_LOCK_SECONDS:
                self.store.delete(entry.path)
        return removes

    def current(
        self, *, version: int | None = None, min_version: int | None = None, writes: bool = False
    ) -> Version | None:
        """The highest version, or the one asked for. None if nothing was committed yet.

        IntegrityError if the highest one descends neither from the caller's pin nor from one that was read before.
        writes: the caller is about to change the dataset, so the documents of the last ancestors must be those that
        the highest version names.
        """
        while True:
            known = self._head  # before they are listed: another thread may read newer ones
            numbers = self.version_numbers()
            self.keys.refresh()  # now: a version comes after the keys that it needs
            newest = numbers[-1] if numbers else 0
            self._check_number(newest, known, min_version or 0)
            if version is not None and version not in numbers:
                raise FileNotFoundError(f"the dataset has no version {version}; it has {_ranges(numbers)}")
            if not newest:
                if writes and self.lost_versions() and self.version_numbers() == numbers:
                    self.committed(None)
                return None
            try:
                # Without a pin, an old version can be read even if a newer one was damaged.
                if version in (None, newest) or self._pin is not None:
                    head = self.version(newest)
                    if self._head is None or head.number >= self._head.number:
                        self._head = head
                    if writes:
                        self._check_parents(head, numbers)
                    if version in (None, newest):
                        return head
                return self.version(version or newest)
            except (IntegrityError, UnknownKeyError) as error:
                if self.version_numbers() != numbers:
                    continue  # it may have been expired
                if isinstance(error, UnknownKeyError):  # a version comes after its key: older keys were put back
                    raise IntegrityError(str(error)) from None
                raise

    def committed(self, version: Version | None) -> Version:
        """The version. IntegrityError if there is none: a job on no file must not look like one that has succeeded."""
        if version is not None:
            return version
        open_jobs = sorted({entry.path.split("/")[2] for entry in self.store.list(PLANS)})
        if self.lost_versions():
            why = f"but there are manifests: somebody took {VERSIONS} away. Restore it before anything else is done"
        elif open_jobs:
            jobs = f"job {open_jobs[-1]} is" if len(open_jobs) == 1 else f"the jobs {', '.join(open_jobs)} are"
            why = f"{jobs} open: run encrypt again with resume, or sweep to give up what has died"
        else:
            why = "run encrypt"
        raise IntegrityError(f"no version of {self.store.url} has been committed; {why}")

    def lost_versions(self) -> bool:
        """Where no version is there: whether there was one. Else manifests are of jobs that were planned on none."""
        if not any(self.store.list(MANIFESTS)):
            return False
        plans = [entry.path for entry in self.store.list(PLANS)]
        for path in plans:
            try:
                if path.endswith(".json") and Document(self.store.read(path, DOCUMENT_NBYTES), path).claimed()["base"]:
                    return True
            except (FileNotFoundError, FormatError, KeyError):
                pass  # it ends just now, or is no plan that says so
        return not plans

    def version(self, number: int) -> Version:
        """What the version's document says, if it has its place in the history as far as that is known."""
        path = VERSIONS + numbered(number)
        try:
            body, key_id, digest = self._opened(path, "ags-version", self.envelope)
        except FileNotFoundError:
            raise IntegrityError(f"{path} is missing: it was removed after it was listed") from None
        try:
            if whole(body["version"]) != number:
                raise IntegrityError(f"{path} holds the version {body['version']!r}")
            version = Version(
                number,
                None if body["parent"] is None else whole(body["parent"], number - 1, 1),
                str(body["operation"]),
                str(body["job_id"]),
                whole(body["time_ms"], LATEST_MS),
                whole(body["files"]),
                whole(body["plain_length"]),
                tuple(TableRef.from_json(ref) for ref in body["manifests"]),
                Policy.from_json(body.get("policy", {})),
                key_id,
                Chain.from_json(body, number, path),
                KeysAt.from_json(body["key_store"]),
                digest,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{path} lacks or garbles {error}") from None
        if version.files != (listed := sum(ref.entries for ref in version.manifests)):
            raise FormatError(f"{path} says that it has {version.files} files, and names manifests with {listed}")
        self._check_place(version)
        self._check_keys(version)
        return version

    # ---- the history

    def _check_number(self, newest: int, head: Version | None, min_version: int) -> None:
        """Whether the newest version can follow the pin, and `head`, which was read before."""
        known = max(self._pin.number if self._pin else 0, head.number if head else 0)
        if newest < known:
            was = f"the pin is of version {known}" if head is None else f"version {known} was there before"
            raise IntegrityError(
                f"the newest version of {self.store.url} is {newest or 'gone'}, and {was}: somebody took newer ones "
                "away, or put an older copy in their place"
            )
        min_version = max(min_version, self._min_version)
        if newest < min_version:
            raise PolicyError(
                f"the dataset's newest version is {newest}, older than min_version={min_version}: "
                "somebody took newer ones away"
            )

    def _check_place(self, version: Version) -> None:
        """Whether a version and the newest one that was read, or the pin, are of one history."""
        known = Pin(self._head.number, self._head.sha256) if self._head else self._pin
        if known is None:
            return
        if version.number >= known.number:
            digest = self.digest(version, known.number)
            if digest == known.sha256:
                return
            what = f"version {version.number} of {self.store.url}"
            if digest is None:
                raise IntegrityError(
                    f"{what} remembers the versions from {version.chain.first} on, and the pin is of version "
                    f"{known.number}, which is no longer there: whether it descends from the pin cannot be told any "
                    "more. Compare the dataset with what you know of it, and take a newer pin"
                )
            raise IntegrityError(
                f"{what} does not descend from version {known.number} as "
                f"{'it was before' if self._head else 'the pin has it'}: another history was put in the place of the "
                "dataset's. Nothing was written or deleted. `ags-fast inspect` shows the digests of its versions: "
                "restore what was there from the storage's own versions, or from a copy"
            )
        if self._head is not None:
            self._check_ancestor(self._head, version.number, version.sha256)

    def _check_ancestor(self, head: Version, number: int, found: str) -> None:
        """Whether the document that is there of an older version is the one that `head` descends from."""
        digest = self.digest(head, number)
        if digest == found or (digest is None and self._pin is None):
            return
        path = VERSIONS + numbered(number)
        if digest is None:
            raise IntegrityError(
                f"{path} is older than what version {head.number} remembers, from version {head.chain.first} on: "
                "whether it belongs to the history that is pinned cannot be told"
            )
        raise IntegrityError(
            f"{path} is not the version {number} that version {head.number} descends from: one of the two was "
            "exchanged, as if somebody had put an older history back. Nothing was written or deleted. `ags-fast "
            "inspect` shows their digests: put back the document that is right, from the storage's own versions or "
            "from a copy, and take away those that do not descend from it; then try again"
        )

    def _check_parents(self, head: Version, numbers: Sequence[int]) -> None:
        """IntegrityError if what is there of the last ancestors is not what `head` descends from."""
        if head.sha256 == self._fits:
            return
        for number in numbers:
            if head.number - PARENTS <= number < head.number:
                try:
                    data = self.store.read(VERSIONS + numbered(number), document_nbytes("ags-version"))
                except FileNotFoundError:
                    continue  # expired meanwhile
                if data != REMOVED:
                    self._check_ancestor(head, number, sha256(data))
        self._fits = head.sha256

    def check_history(self) -> None:
        """IntegrityError if a document that is there, of a version or of the keys, is not of the newest one's history:
        for who is about to delete something."""
        self.current(writes=True)
        for _ in self.versions():  # each is compared when it is read
            pass
        if isinstance(self.keys, DatasetKeyStore):
            self.keys.check_history()

    def chain_orphans(self) -> list[str]:
        """The objects with digests that no version names any more, a day old."""
        objects = self._chain_objects
        old = time.time() - NO_LOCK_SECONDS
        listed = objects.in_folder(entry.path for entry in self.store.list(CHAIN) if entry.modified < old)
        if not listed:
            return []
        # Read after they were listed: of what a dead writer left, it names all or is about to name the next.
        head = self.current()
        named = objects.paths(head.chain.needed(head.sha256)) if head else set()
        for version in self.versions():
            named |= objects.paths(version.chain.blocks)
        return [path for path in listed if path not in named]

    def digest(self, version: Version, number: int) -> str | None:
        """The SHA-256 of the document that an ancestor of a version has, or had; or of its own. None if that is older
        than what it remembers, and than what those remember that are still there."""
        if number == version.number:
            return version.sha256
        found = self._chain_objects.digest(version.chain, number)
        oldest = version.chain.first
        while found is None and number < oldest:
            path = VERSIONS + numbered(oldest)
            try:
                body, _, digest = self._opened(path, "ags-version", self.envelope)
            except FileNotFoundError:
                return None
            if digest != self._chain_objects.digest(version.chain, oldest):
                return None
            chain = Chain.from_json(body, oldest, path)
            found = self._chain_objects.digest(chain, number)
            version, oldest = version._replace(chain=chain), chain.first
        return found

    def _check_keys(self, version: Version) -> None:
        """Whether the keys that are there are those that the version was made on, or come after them."""
        named = version.keys
        for last in (False, True):
            if self.keys.version >= named.version:
                digest = key_store_digest(self.keys, named.version)
                if digest is None or named.sha256 in (None, digest):
                    return
            if not last:
                self.keys.refresh()
        raise IntegrityError(
            f"{VERSIONS}{numbered(version.number)} was made on version {named.version} of the keys, and {self.keys!r} "
            f"is at version {self.keys.version}, which does not descend from that: somebody put older keys back, or "
            "those of another history. Restore the newer ones from the storage's own versions, or from a copy"
        )

    def versions(self, after: int = 0) -> Iterator[Version]:
        """All versions, or those with higher numbers; the newest first. One that is expired meanwhile is left out."""
        for number in reversed(self.version_numbers()):
            if number <= after:
                return
            try:
                version = self.version(number)
            except IntegrityError:
                if number in self.version_numbers():
                    raise
                continue
            yield version

    def entries(self, version: Version | None) -> Iterator[FileEntry]:
        """Every file of a version, manifest by manifest. ConcurrentChangeError if it is expired meanwhile."""
        envelope = self.envelope
        for ref in version.manifests if version else ():
            yield from self._of_version(version, ref, envelope)

    def find(self, version: Version | None, path: str) -> FileEntry | None:
        """The file that a version has at `path`. ConcurrentChangeError if it is expired meanwhile."""
        envelope = self.envelope
        for ref in version.manifests if version else ():
            for entry in self._of_version(version, ref, envelope, path):
                check_lengths([entry])
                return entry
        return None

    def _of_version(
        self, version: Version | None, ref: TableRef, envelope: Envelope, only: str | None = None
    ) -> list[FileEntry]:
        try:
            return self.open_table(ref, envelope, only)
        except (IntegrityError, UnknownKeyError):
            if version is None or version.number in self.version_numbers():
                raise
            raise ConcurrentChangeError(f"version {version.number} was expired while it was read") from None

    def load(
        self, version: int | None = None, min_version: int | None = None, *, writes: bool = False
    ) -> tuple[Version | None, list[FileEntry]]:
        """A version, as `current` has it, and all of its files."""
        while True:
            head = self.current(version=version, min_version=min_version, writes=writes)
            try:
                entries = list(self.entries(head))
                check_lengths(entries)
                return head, entries
            except ConcurrentChangeError:
                if version is not None:
                    raise

    def commit(
        self,
        operation: str,
        job_id: str,
        add: Sequence[FileEntry],
        *,
        base: Version | None,
        replaced: Mapping[str, str] | None = None,
        policy: Policy | None = None,
    ) -> tuple[Version | None, list[FileEntry]]:
        """Make a version with the files of `add`; returns it, and those that could not be added.

        DEKs whose key was retired since they were planned are wrapped anew. policy: None leaves what the dataset has.

        base: the version that `add` was planned on. replaced: path -> file of entries to take out, as they were there.
        A path that came, went or changed since then is another job's, and stays as that job has it: ours is returned.
        KMS calls and manifests come before the commit, so that whatever fails leaves the version before.
        """
        replaced = dict(replaced or {})
        written: dict[tuple[Any, ...], TableRef] = {}  # manifests made for an attempt that lost, for the next one
        while True:
            head = self.current(writes=True)
            try:
                version, refused = self._commit_on(head, operation, job_id, add, base, replaced, policy, written)
            except FileExistsError:
                continue
            except IntegrityError:
                if self.is_newest(head):
                    raise
                continue  # what it has was expired meanwhile
            self._remove(ref for ref in written.values() if version is None or ref not in version.manifests)
            return version, [entry for entry in add if entry.path in refused]

    def is_newest(self, version: Version | None) -> bool:
        """Whether nobody has made a version since."""
        return self.version_numbers()[-1:] == ([version.number] if version else [])

    def _commit_on(
        self,
        head: Version | None,
        operation: str,
        job_id: str,
        add: Sequence[FileEntry],
        base: Version | None,
        replaced: Mapping[str, str],
        policy: Policy | None,
        written: dict[tuple[Any, ...], TableRef],
    ) -> tuple[Version | None, set[str]]:
        """`commit`, if `head` is still the newest version. FileExistsError, or IntegrityError, if it is not."""
        add = self.rewrap(add)
        key_id, envelope = self.document_key(), self.envelope
        refused, there = self._conflicts(add, base, head, replaced, envelope)
        added = [entry for entry in add if entry.path not in refused and entry.path not in there]
        if not added:
            return head, refused
        names = {entry.path for entry in added}
        taken = {path: file for path, file in replaced.items() if path in names}
        refs, gone = self._without(head, taken, key_id, envelope, written, job_id) if head else ([], [])
        refs += [self._manifest(chunk, key_id, envelope, written, job_id) for chunk in chunks(added)]
        return self._succeed(head, operation, job_id, refs, added, gone, policy), refused

    def _succeed(
        self,
        head: Version | None,
        operation: str,
        job_id: str,
        refs: Sequence[TableRef],
        added: Sequence[FileEntry],
        gone: Sequence[FileEntry],
        policy: Policy | None = None,
    ) -> Version:
        nbytes = sum(entry.plain_length for entry in added) - sum(entry.plain_length for entry in gone)
        return self.succeed(head, operation, job_id, refs, len(added) - len(gone), nbytes, policy)

    def _without(
        self,
        head: Version,
        taken: Mapping[str, str],
        key_id: str,
        envelope: Envelope,
        written: dict[tuple[Any, ...], TableRef],
        job_id: str,
        sets: Container[str | None] = (),
    ) -> tuple[list[TableRef], list[FileEntry]]:
        """The manifests of a version without the entries of `taken`, path -> file, and these entries. What is left of
        numbered sets in `sets` is no set any more."""
        if not taken:
            return list(head.manifests), []
        refs: list[TableRef] = []
        gone: list[FileEntry] = []
        for ref in head.manifests:
            entries = self.open_table(ref, envelope)
            kept = [
                entry if entry.set_id not in sets else entry._replace(set_id=None, part=None, parts=None)
                for entry in entries
                if taken.get(entry.path) != entry.file
            ]
            gone += [entry for entry in entries if taken.get(entry.path) == entry.file]
            if kept == entries:
                refs.append(ref)
            elif kept:
                refs.append(self._manifest(kept, key_id, envelope, written, job_id))
        return refs, gone

    def commit_removal(self, job_id: str, remove: Sequence[FileEntry]) -> tuple[Version, list[FileEntry]]:
        """Make a version without the files of `remove`; returns it, and those of them that stay, since another job has
        put another file in their place meanwhile. What another job has removed, too, needs no version."""
        files = {entry.path: entry.file for entry in remove}
        sets = {entry.set_id for entry in remove} - {None}
        written: dict[tuple[Any, ...], TableRef] = {}  # manifests made for an attempt that lost, for the next one
        while True:
            head = self.committed(self.current(writes=True))
            try:
                key_id, envelope = self.document_key(), self.envelope
                refs, gone = self._without(head, files, key_id, envelope, written, job_id, sets)
                made = self._succeed(head, "remove", job_id, refs, (), gone) if gone else head
                now = {entry.path for entry in self.entries(made)} if len(gone) < len(remove) else set()
            except (FileExistsError, ConcurrentChangeError):
                continue
            except IntegrityError:
                if self.is_newest(head):
                    raise
                continue  # what it has was expired meanwhile
            self._remove(ref for ref in written.values() if ref not in made.manifests)
            return made, [entry for entry in remove if entry.path in now]

    def succeed(
        self,
        head: Version | None,
        operation: str,
        job_id: str,
        refs: Sequence[TableRef],
        files: int = 0,
        plain_length: int = 0,
        policy: Policy | None = None,
    ) -> Version:
        """Create the version after `head`, which this is the commit of. FileExistsError if somebody was first.

        files, plain_length: what it has more than `head`.
        """
        chain, made = head.chain.next(head.sha256) if head else (Chain(1), {})
        head = head or Version(0, None, "", "", 0, 0, 0, ())
        key_id = self.document_key()
        at = self.keys.version
        version = Version(
            head.number + 1,
            head.number or None,
            operation,
            job_id,
            time.time_ns() // 1_000_000,
            head.files + files,
            head.plain_length + plain_length,
            tuple(refs),
            head.policy if policy is None else policy,
            key_id,
            chain,
            KeysAt(at, key_store_digest(self.keys, at)),
        )
        body = {
            "format": "ags-version",
            "dataset_id": self.id,
            "version": version.number,
            **{name: getattr(version, name) for name in ("parent", "operation", "job_id", "time_ms")},
            "files": version.files,
            "plain_length": version.plain_length,
            "manifests": [ref.to_json() for ref in refs],
            "policy": version.policy.to_json(),
            **chain.to_json(),
            "key_store": version.keys._asdict(),
        }
        self._chain_objects.write(made)
        digest = self.seal_body(VERSIONS + numbered(version.number), body, key_id, self.envelope)
        self._head = version._replace(sha256=digest)
        return self._head

    def _conflicts(
        self,
        add: Sequence[FileEntry],
        base: Version | None,
        head: Version | None,
        replaced: Mapping[str, str],
        envelope: Envelope,
    ) -> tuple[set[str], set[str]]:
        """The paths of `add` that are another job's by now, and those that somebody has committed for us."""
        known = set(base.manifests) if base else set()
        now = set(head.manifests) if head else set()
        if known == now:
            return set(), set()
        ours = {entry.path for entry in add}
        present: dict[str, str] = {}
        for ref in head.manifests if head else ():
            if replaced or ref not in known:
                present.update((e.path, e.file) for e in self.open_table(ref, envelope) if e.path in ours)
        there = {entry.path for entry in add if present.get(entry.path) == entry.file}
        return {path for path in ours - there if present.get(path) != replaced.get(path)}, there

    def _manifest(
        self,
        entries: Sequence[FileEntry],
        key_id: str,
        envelope: Envelope,
        written: dict[tuple[Any, ...], TableRef],
        job_id: str,
    ) -> TableRef:
        name = key_id, tuple((entry.file, entry.key_id, entry.set_id) for entry in entries)
        if name not in written:
            written[name] = self.seal_table(manifest_name(job_id), entries, key_id, envelope)
        return written[name]

    def _remove(self, refs: Iterable[TableRef]) -> None:
        for ref in refs:
            self.store.delete(ref.path)


def _ranges(numbers: Sequence[int]) -> str:
    if not numbers:
        return "none"
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
