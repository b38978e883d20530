"""Read what an audit needs of a dataset: its versions, open jobs and keys, and what the KMS tells of master keys."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.dataset import reach
from ags_fast.dataset.names import LOCK, beside_plan
from ags_fast.dataset.plan import PART, read_files, read_plan
from ags_fast.errors import AgsError, ConcurrentChangeError, ExpiredError, KeyAccessError, UnknownKeyError
from ags_fast.keys.entry import MASTER_VERSION, KeyEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ags_fast.dataset.draft import Plans
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.log import Log
    from ags_fast.dataset.tables import Table
    from ags_fast.keys.kms import KeyVersion

ATTEMPTS = 5  # to find a dataset that nobody changes meanwhile


class Master(NamedTuple):
    """A version of a master key. None: the KMS does not tell which."""

    key_id: str
    version: str | None


class OpenJob(NamedTuple):
    """A job that has a plan, and that the head has not in `over`."""

    job_id: str
    operation: str
    lives: bool | None  # whether its process lives; None: that cannot be told
    keys: frozenset[str]  # the ids of the KEKs that its plans name
    new: tuple[KeyEntry, ...]  # the KEKs that it brings
    masters: frozenset[Master]  # what wraps the data keys that it has planned in single wrap


class Survey:
    """A dataset as its head shows it, and what the KMS tells of its master keys.

    Attributes:
        head: The head, whose KEKs open every kept version.
        entries: The kept versions that could be read, the oldest first.
        jobs: The open jobs.
        unread: What could not be read: whatever depends on it is not known.
        current: By master key the version that wraps now, where the KMS tells.
        refused: By master key why the KMS does not even say that.
        listed: By master key its versions, where the KMS lists them; if deep.
        opened: The paths of the tables that were opened.
        deep: Whether to find out what the KMS itself has wrapped, which opens tables with such data keys.

    Raises:
        ConcurrentChangeError: The dataset has changed during each of several attempts.
        IntegrityError: Something of the dataset is missing, or was changed.
    """

    def __init__(self, log: Log, *, deep: bool = False) -> None:
        self.log, self.deep = log, deep
        self.opened: set[str] = set()
        self._by_kms: dict[str, dict[bool, Counter[Master]]] = {}  # by table: see `by_kms`
        for _ in range(ATTEMPTS):
            head = log.head()
            try:
                self._look(head)
                break
            except ExpiredError:
                continue
            except FileNotFoundError as error:
                log.check_moved(head, error)
        else:
            raise ConcurrentChangeError("the dataset changes faster than it can be looked at: let its jobs end")
        self.current: dict[str, str | None] = {}
        self.refused: dict[str, str] = {}
        self.listed: dict[str, list[KeyVersion]] = {}
        left = {master.key_id for found in self._by_kms.values() for counts in found.values() for master in counts}
        keks = [*self.head.keys.values(), *(key for job in self.jobs for key in job.new)]
        kms = log.kms.for_dataset(self.head.dataset_id)
        for key_id in sorted(left.union(key.wrapping_key_id for key in keks)):
            try:
                self.current[key_id] = kms.current_version(key_id)
                if deep:
                    self.listed[key_id] = kms.versions(key_id)
            except KeyAccessError as error:
                self.current.setdefault(key_id, None)
                self.refused[key_id] = str(error)

    def _look(self, head: Entry) -> None:
        self.head, self.unread = head, list[str]()
        self.log.kek_rows.fetch(head.dataset_id, [*head.keys.values()])
        plans = self.log.plans()
        own = [plan_id for plan_id, sign in plans.items() if sign.of is None and plan_id not in head.over]
        found = [self._try(f"the plan of the job {one}", self._job, one, plans) for one in own]
        self.jobs: list[OpenJob] = [job for job in found if job is not None]
        numbers = range(head.first, head.number)
        read = [self._try(f"version {number}", self.log.entry, number, head) for number in numbers]
        self.entries: list[Entry] = [*(entry for entry in read if entry is not None), head]
        for table in self.tables().values():
            if table.material or (self.deep and not self.doubles(table)):
                self._try(table.path, self.by_kms, table)

    def _try(self, what: str, look: Callable[..., Any], *args: Any) -> Any:
        try:
            return look(*args)
        except KeyAccessError as error:
            self.unread.append(f"{what}: {error}")
            return None

    def _job(self, job_id: str, plans: Plans) -> OpenJob | None:
        log, head = self.log, self.head
        own = [job_id, *(plan_id for plan_id, sign in plans.items() if sign.of == job_id)]
        read = [read_plan(log, plan_id, head, plans[plan_id].of) for plan_id in own]
        if (plan := read[0]) is None:
            return None
        uses = frozenset(key_id for one in read if one is not None for key_id in one.uses)
        new = tuple(key for one in read if one is not None for key in one.new.values())
        held = log.store.is_locked(beside_plan(job_id, LOCK))
        lives = True if held else False if reach.is_dead(log, job_id, plans) else None
        masters = set[Master]()
        if self.deep and any(True for _ in log.store.list(beside_plan(job_id, PART))):
            keys = {**head.keys, **{key.key_id: key for key in new}}
            rows, _ = read_files(log, job_id, head, log.envelope(head, keys))
            masters = {
                Master(keys[key_id].wrapping_key_id, self.version_of_bytes(wrapped))
                for row in rows
                for key_id, wrapped, _ in row.wraps("")
                if key_id in keys and not keys[key_id].double_wrap
            }
        return OpenJob(job_id, plan.operation, lives, uses, new, frozenset(masters))

    # ---- what there is

    def tables(self) -> dict[str, Table]:
        """Return the tables of all versions, by path."""
        return {table.path: table for entry in self.entries for table in entry.files}

    def doubles(self, table: Table) -> bool:
        """Whether KEKs wrap all data keys in a table."""
        return all(self.head.keys[key_id].double_wrap for key_id in self.wraps([table]))

    def wraps(self, tables: Iterable[Table]) -> Counter[str]:
        """Count the data keys that each KEK wraps in these tables."""
        some = [*tables]
        self.opened.update(table.path for table in some if table.keys is None)
        return self.log.tables.counted(some, self.log.envelope(self.head))

    def needed(self, entry: Entry) -> set[str]:
        """Return the KEKs that a version needs."""
        return reach.needed_keks(self.log, [entry], self.head)

    def rows(self, table: Table) -> Iterator[FileEntry]:
        """Open a table, and yield its rows."""
        self.opened.add(table.path)
        yield from self.log.tables.rows(table, self.log.envelope(self.head))

    def by_kms(self, table: Table) -> dict[bool, Counter[Master]]:
        """Count the data keys in a table that versions of master keys wrap themselves, without a KEK.

        True: those that they open by the key material in files. False: the rest.
        """
        if table.path not in self._by_kms:
            found = {False: Counter[Master](), True: Counter[Master]()}
            for row in self.rows(table) if table.material or not self.doubles(table) else ():
                for key_id, wrapped, _ in row.wraps(""):
                    if not (key := self.head.keys[key_id]).double_wrap:
                        found[False][Master(key.wrapping_key_id, self.version_of_bytes(wrapped))] += 1
                for one in row.key_material or ():
                    version = self.version_of_bytes(one["wrapped_dek"]) or one["master_version"]
                    found[True][Master(one["wrapping_key_id"], version)] += 1
            self._by_kms[table.path] = found
        return self._by_kms[table.path]

    def counted(self, entry: Entry, *, material: bool = False) -> Counter[Master]:
        """Count `by_kms` of all tables of a version. What cannot be opened is left out."""
        counts = Counter[Master]()
        for table in entry.files:
            with suppress(KeyAccessError):
                counts += self.by_kms(table)[material]
        return counts

    def superseded(self) -> Counter[Master]:
        """Count the KEKs that versions of master keys have wrapped in older versions of the dataset, and not in it."""
        now = {(key.key_id, key.wrap) for key in self.head.keys.values()}
        every = (key for entry in self.entries for key in entry.keys.values() if key.double_wrap)
        old = {(key.key_id, key.wrap): key for key in every if (key.key_id, key.wrap) not in now}
        self.log.kek_rows.fetch(self.head.dataset_id, old.values())
        there = [key for key in old.values() if self._has(key)]
        wraps = {(Master(key.wrapping_key_id, self.version_of(key)), key.key_id) for key in there}
        return Counter(master for master, _ in wraps)

    def _has(self, key: KeyEntry) -> bool:
        """Whether a wrapped KEK is still somewhere: a key store lets an older wrap go."""
        try:
            self.log.kek_rows.whole(self.head.dataset_id, key)
        except UnknownKeyError:
            return False
        except AgsError:
            pass
        return True

    def version_of(self, key: KeyEntry) -> str | None:
        """Return the version of its master key that wraps a KEK; None if it is not known."""
        if not key.double_wrap:
            return None
        with suppress(AgsError):  # another KMS's, from before the dataset moved; or the key store does not show it
            return self.log.version_of(key)[1] or None
        return key.properties.get(MASTER_VERSION)

    def version_of_bytes(self, wrapped: bytes) -> str | None:
        """Return the version of the master key that wrapped a key, as the wrapped key tells; None if it does not."""
        with suppress(AgsError):  # another KMS's, from before the dataset moved
            return self.log.kms.key_version(wrapped)
        return None
