"""The log of a dataset: numbered entries, of which the highest one, the head, says what is true.

An entry is created exclusively, which is the one compare-and-swap of a dataset. What an entry does not change it has
from its parent. Rules are numbered as in docs/protocol.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Meta

from ags_fast.dataset.keks import clock_ms
from ags_fast.dataset.names import new_job_id
from ags_fast.dataset.policy import Policy
from ags_fast.errors import AgsError, ConcurrentChangeError, FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.keys.chain import Pin
from ags_fast.keys.entry import MASTER_VERSION, KeyEntry, seals_documents
from ags_fast.keys.envelope import Envelope
from ags_fast.keys.kms import KmsClient, as_kms
from ags_fast.onelog.errors import Again, ExpiredError, JobEndedError, UnknownOutcomeError
from ags_fast.onelog.names import (
    FURTHER,
    LEFT,
    LOG,
    PLAN,
    PLANS,
    block_path,
    entry_number,
    entry_path,
    is_plan,
    last_in_folder,
)
from ags_fast.onelog.sealed import Document, decoded, seal
from ags_fast.onelog.tables import Count, Table, Tables, check_unique

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ags_fast.fs import Store

ENTRY_NBYTES = 16 << 20
BLOCK = 64  # digests in a block
NEAR = 8  # digests that an entry holds itself, at least, if there are that many before it
BLOCKS_KEPT = 16  # blocks that an entry names, at most
BATCHES_KEPT = 64  # streams whose last batch an entry records
SETS = 64  # numbered sets that an entry records
SAME = 256  # entries that changed no file, and that an entry records
ENDED = 0  # in `over`: the job was ended, and nothing of it was committed
UNANSWERED = 3  # creates without an answer, at one number, after which the outcome is unknown
RACES = 200  # that a job loses, one after the other, until it gives up: ten minutes of pauses
PAUSE_SECONDS = 0.05  # the mean wait after the first race that was lost; it doubles up to 64 times that

Seen = TypeVar("Seen")
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


MasterVersion = tuple[str, str]  # a master key, and a version of it


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last batch of a stream that was committed."""

    stream: str
    batch: Count
    time_ms: Count


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object with the digests of `BLOCK` ancestors."""

    path: str
    first: Annotated[int, Meta(ge=1)]
    sha256: Digest


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a dataset is from one moment on. It never changes.

    Attributes:
        dataset_id: To which all keys are bound.
        number: The highest number is the head.
        operation: What its job did.
        job_id: The job.
        time_ms: When the entry was made, in milliseconds since the epoch.
        first: All entries from this number on are kept, and all below are expired.
        over: The jobs that are finished while their plan is still there: committed at this number, or `ENDED`.
        files: The tables of its snapshot.
        keys: The KEKs of the dataset, by id. Those of the head open every kept version.
        gone: The versions of master keys that nobody may wrap under: they are about to be destroyed, or are.
        policy: The policy of the dataset.
        streams: The last batches of streams.
        sets: The numbered sets that are whole, and how many files each has. The last `SETS`.
        same: The kept entries that have the files of their parent: a policy does not count them. The last `SAME`.
        near: The SHA-256 of its last ancestors, the parent's last.
        blocks: Those of older ancestors.
        sealer: The KEK that seals the entry.
        digest: The SHA-256 of its bytes, which are stored without this field.
    """

    dataset_id: str
    number: Annotated[int, Meta(ge=1)]
    operation: str
    job_id: str
    time_ms: Count
    first: Annotated[int, Meta(ge=1)]
    over: dict[str, Count]
    files: tuple[Table, ...]
    keys: dict[str, KeyEntry]
    gone: tuple[MasterVersion, ...]
    policy: Policy
    streams: tuple[Batch, ...]
    sets: dict[str, Count]
    same: tuple[Count, ...]
    near: tuple[Digest, ...]
    blocks: tuple[Block, ...]
    sealer: str
    digest: str = ""

    @property
    def pin(self) -> str:
        """What a user keeps outside of the storage."""
        return str(Pin(self.number, self.digest))

    @property
    def count(self) -> int:
        """How many files it has."""
        return sum(table.rows for table in self.files)

    @classmethod
    def first_of(cls, dataset_id: str, key: KeyEntry, policy: Policy) -> Entry:
        """Return entry 1 of a new dataset, whose only KEK this is."""
        keys = {key.key_id: key}
        now, no_job = clock_ms(), new_job_id()
        return cls(dataset_id, 1, "create", no_job, now, 1, {}, (), keys, (), policy, (), {}, (), (), (), key.key_id)

    @property
    def nbytes(self) -> int:
        """Bytes of plaintext of all files."""
        return sum(table.nbytes for table in self.files)

    def key_ids(self) -> set[str]:
        """Return the ids of the KEKs that reading this version needs."""
        return {self.sealer}.union(*(table.key_ids() for table in self.files))

    def has_batch(self, stream: str, batch: int) -> bool:
        """Whether a batch of a stream, or a later one, was committed."""
        return any(one.stream == stream and one.batch >= batch for one in self.streams)


class Sign(NamedTuple):
    """What a listing tells of a plan.

    Attributes:
        alive: When its job last showed life, in seconds since the epoch.
        of: The job whose further plan it is; None: the plan is the job's own.
        waits: Whether its job waits for another process to go on.
    """

    alive: float
    of: str | None = None
    waits: bool = False


Plans = Mapping[str, Sign]  # by the ids of plans


class Draft(NamedTuple):
    """What the next entry changes. A field that is None stays as in the head.

    Attributes:
        operation: What the job does.
        files: The tables of the snapshot.
        keys: The KEKs.
        gone: The versions of master keys that nobody may wrap under.
        uses: How often KEKs were used by jobs that this entry puts in `over`: added to the KEKs that are there.
        first: The first entry that is kept.
        policy: The policy.
        streams: The last batches of streams.
        sets: The numbered sets that are whole.
        ends: The jobs that the entry ends.
    """

    operation: str
    files: tuple[Table, ...] | None = None
    keys: Mapping[str, KeyEntry] | None = None
    gone: tuple[MasterVersion, ...] | None = None
    uses: Mapping[str, int] = {}
    first: int | None = None
    policy: Policy | None = None
    streams: tuple[Batch, ...] | None = None
    sets: Mapping[str, int] | None = None
    ends: Collection[str] = ()


class Work(Protocol):
    """A job, as the log sees it."""

    @property
    def id(self) -> str:
        """The id, which is in the name of each object that the job makes."""

    @property
    def plans(self) -> Collection[str]:
        """The ids of its plan and its further plans, which must be there when it commits; none for an idle job."""


class Idle:
    """A job that writes no object but its entry, and whose wish may be done twice: it needs no plan."""

    plans: Collection[str] = ()

    def __init__(self) -> None:
        self.id = new_job_id()


class Log:
    """The log of one dataset. Each entry that is read is compared with the pin and with the entry read before.

    Args:
        store: The folder of the dataset.
        kms: A client, or its properties.
        pin: The head must descend from this entry, or be it.
    """

    def __init__(self, store: Store, kms: KmsClient | Mapping[str, str], *, pin: Pin | None = None) -> None:
        self.store = store
        self.kms = as_kms(kms)
        self._pin = pin
        self._head: Entry | None = None
        self._created: Entry | None = None  # the last entry that the storage has told this process to be created
        self._read_before: dict[int, Entry] = {}
        self._blocks: dict[str, list[str]] = {}  # of digests, by path
        self._envelope: tuple[str, Envelope] | None = None
        self._tables: Tables | None = None

    @property
    def tables(self) -> Tables:
        """The tables of the dataset."""
        if self._tables is None:
            self._tables = Tables(self.store, self.head().dataset_id)
        return self._tables

    def check_moved(self, head: Entry, error: FileNotFoundError | None = None) -> None:
        """Raise IntegrityError if a head is still the newest entry, though something that it names is missing."""
        if self.head().digest == head.digest:
            path = getattr(error, "filename", None) or "an object"
            raise IntegrityError(f"{path} is missing, but version {head.number} of {self.store.url} names it")

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

    def envelope(self, head: Entry, own: Mapping[str, KeyEntry] | None = None) -> Envelope:
        """Return what wraps and unwraps under the KEKs of a head, and under a job's own new ones."""
        if own:
            return Envelope(self.kms.for_dataset(head.dataset_id), {**head.keys, **own})
        if self._envelope is None or self._envelope[0] != head.digest:
            self._envelope = head.digest, Envelope(self.kms.for_dataset(head.dataset_id), head.keys)
        return self._envelope[1]

    def known(self, entry: Entry) -> Entry:
        """Return the newest head that was read, at least this entry."""
        return entry if self._head is None or self._head.number < entry.number else self._head

    def version_of(self, key: KeyEntry) -> MasterVersion:
        """Return the master key that wraps a KEK, and its version; "" if nobody tells the version."""
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
                entry = self._read(number)
                # A low number can be removed, and created again by a process that slept. The highest number cannot.
                if entry is None or self._highest() != number:
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

    def kept(self, head: Entry) -> list[Entry]:
        """Return all versions that a head keeps, the newest first.

        Raises:
            FileNotFoundError: One of them is not there. If the head is still the newest entry, that is damage.
        """
        found, sure = [head], True
        for number in range(head.number - 1, head.first - 1, -1):
            entry = self._read_before.get(number) or self._read(number, head.keys)
            digest = self.digest(head, number)
            if entry is None or digest not in (None, entry.digest):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), entry_path(number))
            sure &= digest is not None
            found.append(entry)
        if not sure and self.head().first > head.first:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), entry_path(head.first))
        self._read_before = {entry.number: entry for entry in found}
        return found

    def expired(self, head: Entry) -> list[Entry]:
        """Return the entries below `first` that are still there: what is left to clean up."""
        if head.first == 1:
            return []
        found = []
        for listed in self.store.list(LOG):
            number = entry_number(listed.path)
            if 0 < number < head.first:
                with suppress(KeyAccessError):  # a process made it too late: only a sweep finds its objects
                    if (entry := self._read_before.get(number) or self._read(number, head.keys)) is not None:
                        found.append(entry)
        return sorted(found, key=lambda entry: entry.number)

    def plans(self) -> dict[str, Sign]:
        """Return what a listing tells of the plans that are there, by their ids."""
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
        return {plan_id: signs[plan_id] for plan_id in there}

    def digest(self, entry: Entry, number: int) -> str | None:
        """Return the digest of an ancestor, or of the entry itself; None if that is older than its chain goes back.

        Raises:
            IntegrityError: A block of the chain is not what was written.
        """
        if number == entry.number:
            return entry.digest
        if 0 < entry.number - number <= len(entry.near):
            return entry.near[number - entry.number]
        for block in entry.blocks:
            if block.first <= number < block.first + BLOCK:
                return self._digests(block)[number - block.first]
        return None

    def _digests(self, block: Block) -> list[str]:
        """Return the digests in a block. A block is read once."""
        if block.path not in self._blocks:
            data = self.store.read_small(block.path, ENTRY_NBYTES)
            if hashlib.sha256(data).hexdigest() != block.sha256:
                raise IntegrityError(f"{block.path} is not what an entry of the log names: it was changed")
            self._blocks[block.path] = decoded(data, list[str], block.path)
        return self._blocks[block.path]

    def _highest(self) -> int:
        known = self._head.number if self._head else 0
        after = entry_path(known - 1) if known else ""
        number = self._last_after(after)
        # A local folder is not listed at one moment: another folder may have come while this one was read.
        while self.store.local and number and (above := self._last_after(last_in_folder(number))):
            number = above
        if number < known or not number:
            self._check_gone(known)
            return self._highest()
        return number

    def _last_after(self, after: str) -> int:
        return max((entry_number(listed.path) for listed in self.store.list(LOG, after)), default=0)

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
            if self._last_after(""):
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
            data = self.store.read_small(path, ENTRY_NBYTES)
        except FileNotFoundError:
            return None
        return self.opened(data, number, keys)

    def opened(self, data: bytes, number: int, keys: Mapping[str, KeyEntry] | None = None) -> Entry:
        """Return the entry in these bytes, after all checks."""
        path = entry_path(number)
        document = Document.parse(data, path)
        sealer = (keys or {}).get(document.header.sealer.key_id)
        entry = document.opened(self.kms, Entry, sealer)
        known = self._head.dataset_id if self._head else document.header.dataset_id
        if (entry.number, entry.dataset_id, entry.digest) != (number, known, "") or known != document.header.dataset_id:
            raise IntegrityError(f"{path} is an entry of another place")
        if entry.keys.get(entry.sealer) != document.header.sealer or entry.first > number:
            raise FormatError(f"{path} contradicts itself")
        if any(key_id != key.key_id for key_id, key in entry.keys.items()) or len(entry.near) >= number:
            raise FormatError(f"{path} contradicts itself")
        if not entry.key_ids() <= entry.keys.keys():
            raise FormatError(f"{path} names keys that it does not have")
        check_unique(entry.files)
        return msgspec.structs.replace(entry, digest=hashlib.sha256(data).hexdigest())

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
        path, (data, made) = entry_path(1), self._sealed(entry)
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
        tries = _Tries(self.store.url, job.id)
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
                draft = self._decided(decide, head, plans)  # (d) and (e)
                if draft is None:
                    return head, head
                data, entry = self._sealed(self._next(head, draft, job, plans))
                self.settle(head)
                tries.number = entry.number
                tried[entry.number] = entry
                self.store.create_exclusive(entry_path(tries.number), data)  # (f)
                self._created = entry
            except (Again, FileExistsError):
                continue  # (g) only the head says what happened
            except OSError as error:
                tries.no_answer(error)

    def _made(self, number: int, tried: Mapping[int, Entry], head: Entry) -> Entry:
        """Return the version that a job has made. If it was expired since, that may be the head."""
        if number == head.number:
            return head
        entry = tried.get(number)
        if entry is None or self.digest(head, number) not in (None, entry.digest):  # another process of the job
            entry = self._read(number, head.keys)
        return entry or head

    def _decided(self, decide: Callable[[Entry, Plans], Draft | None], head: Entry, plans: Plans) -> Draft | None:
        """Return what `decide` wants. `Again`: what it has read is gone, and so is the head."""
        try:
            return decide(head, plans)
        except ExpiredError:
            raise
        except FileNotFoundError as error:
            self.check_moved(head, error)
            raise Again from None

    def _next(self, head: Entry, draft: Draft, job: Work, plans: Collection[str]) -> Entry:
        """Return the entry after the head."""
        number = head.number + 1
        over = {job_id: at for job_id, at in head.over.items() if job_id in plans}
        over |= dict.fromkeys(draft.ends, ENDED)
        over.setdefault(job.id, number)
        keys = dict(head.keys if draft.keys is None else draft.keys)
        for key_id, uses in draft.uses.items():
            if key_id in keys:
                keys[key_id] = keys[key_id].replace(uses=keys[key_id].uses + uses)
        near, blocks = (*head.near, head.digest), head.blocks
        if len(near) >= NEAR + BLOCK and job.plans and job.id not in draft.ends:
            blocks = (*blocks, self._block(near[:BLOCK], number - len(near), job.id))[-BLOCKS_KEPT:]
            near = near[BLOCK:]
        first = max(head.first, min(draft.first or 1, number))
        same = (*head.same, *(() if draft.files not in (None, head.files) else (number,)))
        return Entry(
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
            main_key(keys).key_id,
        )

    def _block(self, digests: tuple[str, ...], first: int, job_id: str) -> Block:
        path, data = block_path(job_id), msgspec.json.encode(digests)
        self.store.create_exclusive(path, data)
        return Block(path, first, hashlib.sha256(data).hexdigest())

    def _sealed(self, entry: Entry) -> tuple[bytes, Entry]:
        """Return the bytes of an entry, and the entry as the function that reads use has accepted it."""
        envelope = Envelope(self.kms.for_dataset(entry.dataset_id), entry.keys)
        data = seal(envelope, entry.keys[entry.sealer], entry.dataset_id, entry_path(entry.number), entry)
        if len(data) > ENTRY_NBYTES:
            raise PolicyError(f"the next entry of {self.store.url} would have {len(data)} bytes: divide the dataset")
        return data, self.opened(data, entry.number, entry.keys)

    def settle(self, head: Entry) -> None:
        """Sync what was read of the log and of plans, before anything is built on it or said."""
        if self.store.local:
            self.store.sync_folders([entry_path(head.number)])
            with suppress(FileNotFoundError):  # no job has ever had a plan
                self.store.sync_folders([f"{PLANS}-"])


class _Tries:
    """What a job has tried to commit, and what it knows of that.

    Attributes:
        number: The number of the last entry that it has tried to create; 0 as soon as the head shows another one there.
    """

    def __init__(self, url: str, job_id: str) -> None:
        self.number = 0
        self._url, self._job_id = url, job_id
        self._pause, self._lost, self._unanswered = PAUSE_SECONDS, 0, 0

    def saw(self, head: int) -> None:
        """Take note of the head's number, which does not have the job in `over`."""
        if self.number == 0:
            return
        if head < self.number:  # nobody has the number yet: the entry may still come
            if self._unanswered >= UNANSWERED:
                raise self._unknown()  # rule 4
            return
        self._lost += 1
        if self._lost >= RACES:
            raise ConcurrentChangeError(f"others change {self._url} all the time: try again later")
        self.number = self._unanswered = 0
        time.sleep(self._pause * (0.5 + random.random()))
        self._pause = min(2 * self._pause, 64 * PAUSE_SECONDS)

    def no_answer(self, error: OSError) -> None:
        """Take note of a request that failed. Raises the error if nothing was tried, or if the error is no failure."""
        if self.number == 0 or isinstance(error, AgsError):
            raise error
        self._unanswered += 1
        if self._unanswered > 2 * UNANSWERED:
            raise self._unknown() from error

    def _unknown(self) -> UnknownOutcomeError:
        return UnknownOutcomeError(
            f"{self._url} does not answer: the job {self._job_id} may be committed, now or later"
        )


def main_key(keys: Mapping[str, KeyEntry]) -> KeyEntry:
    """Return the newest KEK that seals documents and tables. PolicyError without one."""
    found = [key for key in keys.values() if seals_documents(key)]
    if not found:
        raise PolicyError("the dataset has no active KEK that seals documents")
    return max(found, key=lambda key: (key.created_ms, key.key_id))


__all__ = ["ENDED", "Batch", "Draft", "Entry", "Idle", "Log", "Work", "main_key"]
