"""The log of a dataset: numbered entries, of which the highest one, the head, says what is true.

An entry is created exclusively, which is the one compare-and-swap of a dataset. What an entry does not change it has
from its parent. Rules are numbered as in docs/protocol.md, which says why each is needed.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections import ChainMap
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ags_fast.dataset.chain import Chain
from ags_fast.dataset.draft import Again, Draft, LeftKeyError, Plans, Sign, Work
from ags_fast.dataset.entry import Entry, MasterVersion, Pin, main_key
from ags_fast.dataset.keks import Keks, KeyTables
from ags_fast.dataset.kinds import clock_ms
from ags_fast.dataset.names import (
    FURTHER,
    LEFT,
    LOG,
    PLAN,
    PLANS,
    above_folder,
    entry_number,
    entry_path,
    is_plan,
    job_of,
)
from ags_fast.dataset.numbers import last_after
from ags_fast.dataset.sealed import Body, Document, read_object, seal
from ags_fast.dataset.tables import Tables, check_unique
from ags_fast.dataset.tries import Tries, note_conflict
from ags_fast.errors import (
    AgsError,
    ExpiredError,
    FormatError,
    IntegrityError,
    JobEndedError,
    KeyAccessError,
    PolicyError,
    UnknownKeyError,
    UnknownOutcomeError,
)
from ags_fast.keys.entry import MASTER_VERSION, ROW, KeyEntry
from ags_fast.keys.envelope import Envelope
from ags_fast.keys.kms import Kms, KmsClient, as_kms
from ags_fast.keys.stores import KeyResolver, Wraps

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from ags_fast.fs import Store

ENTRY_NBYTES = 16 << 20
BATCHES_KEPT = 64  # streams whose last batch an entry records
SETS = 64  # numbered sets that an entry records
SAME = 256  # entries that changed no file, and that an entry records
ENDED = 0  # in `over`: the job was ended, and nothing of it was committed

Seen = TypeVar("Seen")


class Log:
    """The log of one dataset. Each entry that is read is compared with the pin and with the entry read before.

    Args:
        store: The folder of the dataset.
        kms: A client, or its properties.
        pin: The head must descend from this entry, or be it.
        key_store: What has the wrapped KEKs; None: the log itself.
    """

    def __init__(
        self,
        store: Store,
        kms: Kms,
        *,
        pin: Pin | None = None,
        key_store: KeyResolver | None = None,
    ) -> None:
        self.store = store
        self.kek_rows = Wraps(key_store)
        self.kms = as_kms(kms)
        self.earlier: Mapping[str, KeyEntry] = {}  # KEKs as earlier entries have them, where the head's do not open
        self._other_kms: KmsClient | None = None  # which opens the head if the dataset has moved there, or has not
        self._pin = pin
        self._head: Entry | None = None
        self._created: Entry | None = None  # the last entry that the storage has told this process to be created
        self._read_before: dict[int, Entry] = {}
        self._chain = Chain(store)
        self._envelope: tuple[str, Envelope] | None = None
        self._tables: Tables | None = None
        self._key_tables: KeyTables | None = None

    @property
    def tables(self) -> Tables:
        """The tables of the dataset."""
        if self._tables is None:
            self._tables = Tables(self.store, (self._head or self.head()).dataset_id)
        return self._tables

    def check_moved(self, head: Entry, error: FileNotFoundError | None = None) -> None:
        """Raise IntegrityError if a head is still the newest entry, though something that it names is missing."""
        if self.head().digest == head.digest:
            path = getattr(error, "filename", None) or "an object"
            raise IntegrityError(f"{path} is missing, but version {head.number} of {self.store.url} names it")
        note_conflict(self.store.url)

    def look(self, read: Callable[[Entry], Seen], head: Entry | None = None) -> Seen:
        """Return what a function reads of the newest version. It is called again if that was expired meanwhile.

        Args:
            read: The function.
            head: A head that was read before; None: the newest one.
        """
        while True:
            head = head or self.head()
            try:
                return read(head)
            except ExpiredError:
                raise
            except FileNotFoundError as error:
                self.check_moved(head, error)
                head = None

    def envelope(
        self, head: Entry, own: Mapping[str, KeyEntry] | None = None, proven: set[str] | None = None
    ) -> Envelope:
        """Return what wraps and unwraps under the KEKs of a head, and before those under the ones that a job uses."""
        if own is not None:  # so that none of them needs a table, which may be gone
            keys = ChainMap[str, KeyEntry](own, head.keys)  # type: ignore[arg-type] # nobody changes it
            return self._holding(head.dataset_id, keys, proven)
        if self._envelope is None or self._envelope[0] != head.digest:
            self._envelope = head.digest, self._holding(head.dataset_id, head.keys)
        return self._envelope[1]

    def _holding(self, dataset_id: str, keys: Mapping[str, KeyEntry], proven: set[str] | None = None) -> Envelope:
        entries = self.kek_rows.entries(dataset_id, keys, self.whole)
        return Envelope(self.kms.for_dataset(dataset_id), entries, proven)

    def whole(self, dataset_id: str, key: KeyEntry) -> KeyEntry:
        """Return a KEK with its wrap: as it was wrapped last, if its row has left the key store (rule 12)."""
        while True:
            try:
                return self.kek_rows.whole(dataset_id, key)
            except UnknownKeyError as error:
                newest = self.head().keys.get(key.key_id)
                if newest is None:
                    raise LeftKeyError(str(error)) from None
                if newest.properties.get(ROW) == key.properties[ROW]:
                    raise
                key = key.replace(wrapping_key_id=newest.wrapping_key_id, properties=newest.properties)

    def known(self, entry: Entry) -> Entry:
        """Return the newest head that was read, at least this entry."""
        return entry if self._head is None or self._head.number < entry.number else self._head

    def version_of(self, key: KeyEntry) -> MasterVersion:
        """Return the master key that wraps a KEK, and its version; "" if nobody tells the version.

        Raises:
            KeyAccessError: The key store does not show the KEK.
        """
        key = self.kek_rows.whole((self._head or self.head()).dataset_id, key)
        told = self.kms.key_version(key.wrapped) if key.wrapped is not None else None
        return key.wrapping_key_id, told or key.properties.get(MASTER_VERSION, "")

    # ---- reading

    def head(self) -> Entry:
        """Return the newest entry (rule 3a).

        Raises:
            FileNotFoundError: There is no dataset.
            IntegrityError: The log is gone, or does not descend from what was read before.
        """
        while True:
            number = self._highest()
            if self._head is not None and number == self._head.number:
                return self._head  # the head is never removed: so this number is still that entry
            entry: Entry | None
            if self._created is not None and number == self._created.number:
                entry = self._created  # nor was what this process has created, if nothing is above
            else:
                try:
                    entry = self._read(number)
                except KeyAccessError:
                    if self._highest() == number:
                        raise
                    continue  # its sealer was wrapped again since
                # A low number can be removed, and created again by a process that slept. The highest number cannot.
                if entry is None or self._highest(number) != number:
                    continue
                self._check_follows(entry)
            if self._head is not None:
                self._read_before[self._head.number] = self._head
            self._head = entry
            return entry

    def entry(self, number: int, head: Entry | None = None) -> Entry:
        """Return a version that the head keeps (rule 12).

        Args:
            number: Its number.
            head: The head, if it was read after the caller has learned the number.

        Raises:
            ExpiredError: It was expired.
            FileNotFoundError: There is no such version yet.
        """
        held = self._read_before.get(number)
        entry = held or self._read(number, (head or self.head()).keys)
        head = self.head() if held is None or head is None else head
        if not head.first <= number <= head.number:
            if number > head.number:
                raise FileNotFoundError(f"{self.store.url} has no version {number}: the newest one is {head.number}")
            raise ExpiredError(f"version {number} of {self.store.url} was expired: it has {head.first} and newer ones")
        if number == head.number:
            return head
        if entry is None:
            raise IntegrityError(f"version {number} of {self.store.url} is missing, though the dataset keeps it")
        if self.digest(head, number) not in (None, entry.digest):
            raise IntegrityError(f"{entry_path(number)} is not the version that the newest one descends from")
        self._read_before[number] = entry
        return entry

    def kept(self, head: Entry, numbers: Collection[int] | None = None) -> list[Entry]:
        """Return the versions that a head keeps, or those of them with these numbers, the newest first.

        Raises:
            FileNotFoundError: One of them is not there. If the head is still the newest entry, that is damage.
        """
        found, sure = [head], True
        numbers = range(head.first, head.number) if numbers is None else {*numbers} - {head.number}
        for number in sorted(numbers, reverse=True):
            entry = self._read_before.get(number) or self._read(number, head.keys)
            digest = self.digest(head, number)
            if entry is None or digest not in (None, entry.digest):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), entry_path(number))
            sure &= digest is not None
            found.append(entry)
        if not sure and self.head().first > head.first:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), entry_path(head.first))
        read = self._read_before | {entry.number: entry for entry in found}
        self._read_before = {number: entry for number, entry in read.items() if number >= head.first}
        return found

    def descends_from(self, head: Entry, entries: Iterable[Entry]) -> bool:
        """Whether all these entries are certainly ancestors of a head."""
        return all(self.digest(head, entry.number) == entry.digest for entry in entries)

    def below_first(self, head: Entry) -> list[int]:
        """Return the numbers below `first` whose entries are still there, in order: what is to be cleaned up."""
        found = []
        for listed in self.store.list(LOG) if head.first > 1 else ():
            number = entry_number(listed.path)
            if 0 < number < head.first:
                found.append(number)
            elif number and not self.store.local:  # object stores list in order
                break
        return sorted(found)

    def expired(self, head: Entry, numbers: Iterable[int] | None = None) -> list[Entry]:
        """Return the entries below `first` that are still there and can be read: of these numbers, or all."""
        found = []
        for number in self.below_first(head) if numbers is None else numbers:
            # A process made it too late, or it was damaged: only a sweep finds its objects.
            with suppress(FormatError, IntegrityError, KeyAccessError):
                if (entry := self._read_before.get(number) or self._read(number, head.keys)) is not None:
                    found.append(entry)
        return found

    def recover(self) -> list[Entry]:
        """Return the head, though its own KEK may not open, and the kept entries that open, the newest first.

        From then on the KEK is taken as an earlier entry has it. KeyAccessError: none has it in a wrap that opens.
        """
        number, found, head = self._highest(), list[Entry](), None
        error: AgsError = KeyAccessError(f"no version of {self.store.url} opens with this KMS")
        while number and (head is None or number >= head.first):
            try:
                if (entry := self._read(number)) is None:
                    break  # expired
                found, self.earlier = [*found, entry], {**entry.keys, **self.earlier}
                head = head or self.head()
            except (KeyAccessError, IntegrityError) as refused:
                error = refused
            except FileNotFoundError as gone:
                error = IntegrityError(f"{gone.filename} is missing, but version {number} of {self.store.url} names it")
            number -= 1
        if head is None:
            raise error
        if any(self.digest(head, entry.number) not in (None, entry.digest) for entry in found):
            raise IntegrityError(f"{self.store.url} has versions that the newest one does not descend from")
        return [head, *(entry for entry in found if entry.number != head.number)]

    def plans(self) -> dict[str, Sign]:
        """Return what a listing tells of the plans that are there, by their ids.

        A job shows life by its further plans, too, and they live as long as it does.
        """
        signs: dict[str, Sign] = {}
        there = set()
        for listed in self.store.list(PLANS):
            if (match := PLAN.fullmatch(listed.path)) is not None:
                plan_id, name = match[1], match[2]
                sign = signs.get(plan_id, Sign(0.0))
                further = FURTHER.fullmatch(name)
                signs[plan_id] = Sign(
                    max(sign.alive, listed.modified), further[1] if further else sign.of, sign.waits or name == LEFT
                )
                there |= {plan_id} if is_plan(listed.path) else set()
        for sign in [signs[plan_id] for plan_id in there]:
            if sign.of is not None and sign.of in there and sign.alive > signs[sign.of].alive:
                signs[sign.of] = signs[sign.of]._replace(alive=sign.alive)
        return {plan_id: signs[plan_id] for plan_id in there}

    def digest(self, entry: Entry, number: int) -> str | None:
        """Return the digest of an ancestor: see `Chain.digest`."""
        return self._chain.digest(entry, number)

    def _highest(self, seen: int = 0) -> int:
        """Return the highest number. A listing begins at the highest that is known, or that a pin or the caller has."""
        known = self._head.number if self._head else 0
        start = max(known, seen, self._pin.number if self._pin else 0)
        number = last_after(self.store, entry_path(start - 1) if start else "")
        if not number and start > known:  # it is not there any more
            number = last_after(self.store, entry_path(known - 1) if known else "")
        # A local folder is not listed at one moment: another folder may have come while this one was read.
        while self.store.local and number and (above := last_after(self.store, above_folder(number))):
            number = above
        if number < known or not number:
            self._check_gone(known)
            return self._highest()
        return number

    def _check_gone(self, known: int) -> None:
        """Raise the error for a log without an entry, or with an older one; none if somebody is creating it now."""
        url = self.store.url
        if known:
            raise IntegrityError(
                f"version {known} of {url} was there before, and is gone: somebody has put an older copy"
            )
        if any(True for _ in self.store.list("_ags/versions/")):
            raise FormatError(f"{url} was made by ags_fast 0.2: decrypt it with that version, and encrypt it again")
        if next(self.store.list("_ags/"), None) is not None:
            if last_after(self.store, ""):
                return  # entry 1 has come since
            raise IntegrityError(f"the log of the dataset at {url} is gone: restore {LOG} from the storage's versions")
        raise FileNotFoundError(f"there is no dataset at {url}")

    def _read(self, number: int, keys: Mapping[str, KeyEntry] | None = None) -> Entry | None:
        """Return the entry that has a number, or None.

        Args:
            number: The number.
            keys: The KEKs of the head, which open every kept version; None: the entry may be the head.
        """
        path = entry_path(number)
        try:
            return self.opened(read_object(self.store, path, ENTRY_NBYTES), number, keys)
        except FileNotFoundError:  # also LeftKeyError
            return None

    def opened(self, data: bytes, number: int, keys: Mapping[str, KeyEntry] | None = None) -> Entry:
        """Return the entry in these bytes, after all checks."""
        path = entry_path(number)
        document = Document.parse(data, path)
        entry = self._opened(document, keys)
        known = self._head.dataset_id if self._head else document.header.dataset_id
        if (entry.number, entry.dataset_id, entry.digest) != (number, known, "") or known != document.header.dataset_id:
            raise IntegrityError(f"{path} is an entry of another place")
        if entry.keys.get(entry.sealer) != document.header.sealer or entry.first > number:
            raise FormatError(f"{path} contradicts itself")
        if any(key_id != key.key_id for key_id, key in entry.keys.items()) or len(entry.near) >= number:
            raise FormatError(f"{path} contradicts itself")
        if not entry.key_ids() <= entry.keys.keys():
            raise FormatError(f"{path} names keys that it does not have")
        check_unique((*entry.files, *entry.key_tables))
        self._key_tables = self._key_tables or KeyTables(
            self.store, entry.dataset_id, partial(self._holding, entry.dataset_id)
        )
        all_keys = Keks(entry.keys, entry.left, entry.key_tables, self._key_tables)
        return msgspec.structs.replace(entry, keys=all_keys, digest=hashlib.sha256(data).hexdigest())

    def _opened(self, document: Document, keys: Mapping[str, KeyEntry] | None) -> Entry:
        """Return the entry in a document. If only the other KMS opens it, that one becomes the KMS of the log."""
        try:
            return self.unsealed(document, Entry, keys)
        except (KeyAccessError, IntegrityError):
            if self._other_kms is None:
                raise
        before = self.kms
        self.kms, self._other_kms = self._other_kms, before
        try:
            entry = self.unsealed(document, Entry, keys)
        except BaseException:
            self.kms, self._other_kms = before, self.kms
            raise
        self._envelope = None
        return entry

    def unsealed(self, document: Document, kind: type[Body], keys: Mapping[str, KeyEntry] | None) -> Body:
        """Return the body of a document. keys: the KEKs of the head; None: the document may be the head."""
        header = document.header
        known = {} if keys is None else Keks.of(keys).inline  # which need no table
        key_id = header.sealer.key_id
        sealer = self.earlier.get(key_id) or known.get(key_id, header.sealer)
        whole = self.kek_rows.whole if keys is None else self.whole
        return document.opened(self.kms, kind, whole(header.dataset_id, sealer))

    def _check_follows(self, entry: Entry) -> None:
        """Check that an entry is the pinned one and the one read before, or descends from them."""
        before = [("version", Pin(self._head.number, self._head.digest))] if self._head else []
        for what, pin in before + ([("the pin's version", self._pin)] if self._pin else []):
            if pin.number > entry.number or self.digest(entry, pin.number) not in (None, pin.sha256):
                raise IntegrityError(
                    f"version {entry.number} of {self.store.url} does not descend from {what} "
                    f"{pin.number}: somebody has put an older copy, or another history, in its place"
                )

    # ---- writing

    def create(self, entry: Entry) -> Entry:
        """Make entry 1, and see that the store creates exclusively.

        Raises:
            FileExistsError: There is a dataset.
            PolicyError: The store overwrites objects. Nothing stays.
        """
        with suppress(FileNotFoundError):
            self.head()
            raise FileExistsError(f"there is a dataset at {self.store.url}")
        keys = {key_id: self.kek_rows.named(key, entry.job_id) for key_id, key in entry.keys.items()}
        path, (data, made) = entry_path(1), self._sealed(msgspec.structs.replace(entry, keys=keys))
        self.kek_rows.put(entry.dataset_id, keys.values())
        self.store.create_exclusive(path, data)
        try:
            self.store.create_exclusive(path, b"created twice")
        except FileExistsError:
            head = self.head()
            if self.digest(head, 1) != made.digest:
                raise FileExistsError(f"there is a dataset at {self.store.url}") from None
            return head
        self.store.delete(path)
        raise PolicyError(
            f"{self.store.url} overwrote an object that was to be created only if absent; ags_fast needs If-None-Match "
            "(S3), ifGenerationMatch=0 (GCS)"
        )

    def append(self, job: Work, decide: Callable[[Entry, Plans], Draft | None]) -> tuple[Entry, Entry]:
        """Make the next entry: the loop of rule 3.

        Args:
            job: Who makes it.
            decide: Gets the head, and the plans that were listed after the head was read; returns what to change, or
                None. The function takes over nothing from an earlier call. It may write new objects of the job.

        Returns:
            The version that the job has made (if there was nothing to change, the head), and the head.

        Raises:
            JobEndedError: The head has the job as ended.
            UnknownOutcomeError: The entry may be there, now or later.
            ConcurrentChangeError: Others came first 200 times, in some ten minutes.
        """
        self.kek_rows.check_writable()
        tries = Tries(self.store.url, job.id)
        tried: dict[int, Entry] = {}
        while True:
            try:
                head = self.head()  # (a)
                if (at := head.over.get(job.id)) is not None:  # (b)
                    self.settle(head)
                    if at == ENDED:
                        raise JobEndedError(f"another process has ended the job {job.id}: nothing was committed")
                    return self._made(at, tried, head), head
                tries.saw(head.number)
                plans = self.plans()  # (c)
                if any(plan not in plans or plan in head.over for plan in job.plans):
                    raise UnknownOutcomeError(
                        f"the plan of the job {job.id} is gone: somebody has ended the job, or it was committed before"
                    )
                if (after := self._decided(decide, head, job, plans)) is None:  # (d) and (e)
                    return head, head
                data, entry = after
                self.settle(head)
                tries.number = entry.number
                tried[entry.number] = entry
                self.store.create_exclusive(entry_path(tries.number), data)  # (f)
                self._created = entry
            except Again:
                continue
            except OSError as error:  # (g) only the head says what happened
                tries.no_answer(error)

    def _made(self, number: int, tried: Mapping[int, Entry], head: Entry) -> Entry:
        """Return the version that a job has made. If it was expired since, that may be the head."""
        if number == head.number:
            return head
        entry = tried.get(number)
        if entry is None or self.digest(head, number) not in (None, entry.digest):  # another process of the job
            entry = self._read(number, head.keys)
        return entry or head

    def _decided(
        self, decide: Callable[[Entry, Plans], Draft | None], head: Entry, job: Work, plans: Plans
    ) -> tuple[bytes, Entry] | None:
        """Return the entry that `decide` wants, sealed. `Again`: what it has read is gone, and so is the head."""
        try:
            draft = decide(head, plans)
            if draft is None:
                return None
            if draft.kms is not None and draft.kms is not self.kms:
                self.kms, self._other_kms = draft.kms, self.kms
            return self._sealed(self._next(head, draft, job, plans))
        except ExpiredError:
            raise
        except FileNotFoundError as error:  # also LeftKeyError
            self.check_moved(head, error)
            raise Again from None
        except KeyAccessError:
            if self.head().digest == head.digest:
                raise
            raise Again from None

    def _next(self, head: Entry, draft: Draft, job: Work, plans: Collection[str]) -> Entry:
        """Return the entry after the head."""
        number = head.number + 1
        over = {job_id: at for job_id, at in head.over.items() if job_id in plans}
        over |= dict.fromkeys(draft.ends, ENDED)
        over.setdefault(job.id, number)
        writes = bool(job.plans) and job.id not in draft.ends
        keys = Keks.of(head.keys).became(head.keys if draft.keys is None else draft.keys)
        used = {key_id: key.replace(uses=key.uses + n) for key_id, n in draft.uses.items() if (key := keys.get(key_id))}
        keys = keys.changed(used)
        sealer = main_key(keys).key_id
        keys = keys.stored(sealer, job.id if writes else None)
        near, blocks = self._chain.after(head, job.id if writes else None)
        first = max(head.first, min(draft.first or 1, number))
        same = (*head.same, *(() if draft.files not in (None, head.files) else (number,)))
        entry = Entry(
            head.dataset_id,
            number,
            draft.operation,
            job.id,
            max(clock_ms(), head.time_ms),
            first,
            over,
            head.files if draft.files is None else draft.files,
            keys,
            head.gone if draft.gone is None else draft.gone,
            head.policy if draft.policy is None else draft.policy,
            head.streams if draft.streams is None else draft.streams[-BATCHES_KEPT:],
            head.sets if draft.sets is None else dict([*draft.sets.items()][-SETS:]),
            tuple(one for one in same if one >= first)[-SAME:],
            near,
            blocks,
            sealer,
            (*keys.left,),
            tuple(one for one in (*head.returns, *((number,) if draft.returns else ())) if one >= first),
            keys.tables,
        )
        job.made += [path for path in entry.named() if job_of(path) == job.id]
        return entry

    def _sealed(self, entry: Entry) -> tuple[bytes, Entry]:
        """Return the bytes of an entry, and the entry as the function that reads use has accepted it."""
        envelope = self._holding(entry.dataset_id, entry.keys)
        body = msgspec.structs.replace(entry, keys=Keks.of(entry.keys).inline)
        data = seal(envelope, entry.keys[entry.sealer], entry.dataset_id, entry_path(entry.number), body)
        if len(data) > ENTRY_NBYTES:
            raise PolicyError(f"the next entry of {self.store.url} would have {len(data)} bytes: divide the dataset")
        return data, self.opened(data, entry.number, entry.keys)

    def settle(self, head: Entry) -> None:
        """Sync what was read of the log and of plans, before anything is built on it or said."""
        if self.store.local:
            self.store.sync_folders([entry_path(head.number)])
            with suppress(FileNotFoundError):  # no job has ever had a plan
                self.store.sync_folders([f"{PLANS}-"])
