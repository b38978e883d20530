"""A job: what it may write is in its plan, and one entry of the log commits it or ends it."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast import telemetry
from ags_fast.dataset import keys as decide_keys
from ags_fast.dataset import names, reach
from ags_fast.dataset.change import Change, Wish, next_change, whole_sets
from ags_fast.dataset.draft import Draft, Plans
from ags_fast.dataset.entry import Batch, Entry, main_key
from ags_fast.dataset.job_keys import JobKeys
from ags_fast.dataset.kinds import SLACK_USES, Want, clock_ms
from ags_fast.dataset.log import ENDED, Log
from ags_fast.dataset.plan import RENEW_SECONDS, TRIES, UNREADABLE, Copy, copy_path, read_files, read_plan, store_files
from ags_fast.dataset.snapshot import expired
from ags_fast.dataset.tables import rewrapped
from ags_fast.errors import AgsError, JobEndedError, UnknownOutcomeError
from ags_fast.fs import without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.keys import Rotation
    from ags_fast.dataset.policy import Policy
    from ags_fast.dataset.tables import Table
    from ags_fast.keys.entry import KeyEntry
    from ags_fast.keys.envelope import Envelope


class Committed(NamedTuple):
    """What became of a job."""

    version: Entry | None  # that it has made; None: there was nothing to commit
    head: Entry  # the newest version since
    change: Change  # what the version has changed
    before: Entry  # the version that it replaced, or the newest one if it made none


class Rewrite(NamedTuple):
    """Tables of which a rotation needs copies."""

    head: Entry  # the version that the tables are of
    tables: Sequence[Table]
    moves: Mapping[str, str]  # {KEK: the KEK that takes its place}
    sealer: str  # the KEK that wraps the data keys of the copies
    envelope: Envelope  # of all these KEKs


class Job:
    """An open job of one process. `begin` and `resume` make one. Its id is in the name of each object that it makes."""

    def __init__(self, log: Log, operation: str, job_id: str, base: Entry) -> None:
        self.log, self.operation, self.id = log, operation, job_id
        self.base = base  # the version that it began on
        self.keys = JobKeys(log, operation, job_id, base)
        self.facts: dict[str, Any] = {}  # what the process that has begun it says to those that go on with it
        self.made: list[str] = []  # objects that this process has made, but plans. The log adds what it makes
        self.cleaned: list[str] = []  # what the end of the job has deleted of versions that are not kept
        self.plans_seen: Plans = {}  # the plans of all jobs, as the job has listed them last
        self.has_tasks = False  # whether other processes write objects of the job
        self.writer_died = False  # whether one of them may have left what nothing tells of
        self.known_plans: set[str] = set()  # further plans of tasks whose objects are all known
        self._beside: set[str] = set()  # what lies beside the plan
        self._can_be_resumed = False
        self._given_up = False
        self._changed = Change()  # what the commit changes
        self._parts: list[str] = []  # objects that only processes of the job read
        self._lists_all = False  # whether this process knows no object of the job
        self._of_tasks: list[str] = []  # further plans of other processes that the next entry ends
        self._lock: Any = None
        self._over = threading.Event()

    @property
    def plans(self) -> list[str]:
        """The ids of its plan, and of this process' further plans."""
        return self.keys.plans

    # ---- begin and end

    @classmethod
    def begin(
        cls,
        log: Log,
        operation: str,
        wants: Mapping[Want, int] | Callable[[str], Mapping[Want, int]] | None = None,
        *,
        head: Entry | None = None,
        ahead: int = 0,
        resumable: bool = False,
        facts: Mapping[str, Any] | None = None,
        policy: Policy | None = None,
    ) -> Job:
        """Begin a job on the newest version, or on `head`: its plan comes before all other objects of it (rule 2).

        `wants` says how many data keys it wraps under each kind of KEK, or tells that from the job's id. It reserves
        `ahead` more of each, if the policy has room. Other processes may go on with a resumable job: its facts, JSON
        values, are what they must know. A policy is what the job brings.
        """
        log.kek_rows.check_writable()
        head = head or log.head()
        for _ in range(TRIES):
            job = cls(log, operation, names.new_job_id(), head)
            job._can_be_resumed = resumable
            job.keys.policy = policy
            job._hold()
            try:
                counts = wants(job.id) if callable(wants) else wants or {}
                planned = job.keys.begin(counts, ahead, facts, resumable)
            except BaseException:
                job.release()
                job._delete_plans(head)  # there is none, but the lock
                raise
            if planned:
                job._show_life()
                return job
            job.release()
        raise UnknownOutcomeError(f"{log.store.url} does not say whether it has stored a plan: nothing was begun")

    @classmethod
    def resume(cls, log: Log, job_id: str) -> Job:
        """Go on with a job that another process has begun, if it is resumable or was left (rules 5 and 9).

        That process may still go on, too: the log lets one of them commit. What this process wraps, it reserves in
        further plans of its own. JobEndedError: the job is over, or cannot be taken up.
        """
        head, plans = log.head(), log.plans()
        plan = read_plan(log, job_id, head)
        if plan is None or job_id in head.over or job_id not in plans or not (plan.resumable or plans[job_id].waits):
            raise JobEndedError(f"the job {job_id} is over, or no other process can go on with it")
        job = cls(log, plan.operation, job_id, head)
        new: dict[str, KeyEntry] = {}
        for one in [plan_id for plan_id, sign in plans.items() if sign.of == job_id]:
            with suppress(*UNREADABLE):  # what was written under its KEKs is lost
                new |= further.new if (further := read_plan(log, one, head, job_id)) is not None else {}
        job.facts, job.keys = plan.facts, JobKeys.of_plan(log, plan, head, new)
        job._can_be_resumed = True
        job.has_tasks = job.writer_died = True
        job._beside = {names.LOCK, names.ALIVE, names.LEFT}
        with suppress(BlockingIOError):  # the other process lives
            job._hold()
        job._show_life()
        return job

    @classmethod
    def finish(cls, log: Log, job_id: str) -> Entry | None:
        """Clean up after a job whose process died between its commit and its end.

        Return the version that the job has made, or the head if that was expired; None: it was not committed.
        """
        head = log.head()
        number = head.over.get(job_id, ENDED)
        if number == ENDED:
            return None
        job = cls(log, "", job_id, head)
        job.keys.plans, job._lists_all = [job_id], True
        job._beside = {names.LOCK, names.ALIVE, names.LEFT}
        job._of_tasks = [plan_id for plan_id, sign in log.plans().items() if sign.of == job_id]
        log.settle(head)
        job._end(head)
        return head if number < head.first else log.entry(number, head)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, error_class: object, error: object, traceback: object) -> None:
        """Let go of the job, if it has not ended."""
        self.release()

    def _hold(self) -> None:
        """Lock the plan while this process lives, where the storage has locks. It tells who is dead, and no more."""
        self._lock = self.log.store.lock(names.beside_plan(self.id, names.LOCK))
        if self._lock is not None:
            self._beside.add(names.LOCK)

    def _show_life(self) -> None:
        """Renew the plan from time to time, where the storage has no locks."""

        def renew() -> None:
            while not self._over.wait(RENEW_SECONDS):
                with suppress(AgsError, OSError):
                    self.renew()

        if self._lock is None and self.log.store.shared:
            threading.Thread(target=renew, name="ags_fast-plan", daemon=True).start()

    def renew(self) -> None:
        """Show that the job lives. JobEndedError: its plan is gone."""
        if self.log.store.stat(names.plan_path(self.id)) is None:
            raise JobEndedError(f"another process has ended the job {self.id}")
        self._beside.add(names.ALIVE)
        self.log.store.write_small(names.beside_plan(self.id, names.ALIVE), b"alive\n", tag=self.id)

    def leave(self) -> None:
        """Let go of the job, which then waits for a day for another process to go on."""
        self.log.store.write_small(names.beside_plan(self.id, names.LEFT), b"left\n", tag=self.id)
        self.release()

    def release(self) -> None:
        """Let go of the job. Its plan stays, and another process may go on with it."""
        self._over.set()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # ---- what it is about to write

    def will_write(self, rows: Sequence[FileEntry]) -> None:
        """Store the files that the job is about to write, before their first byte is written (rule 2)."""
        self.made += [row.file for row in rows]
        self._parts += store_files(self.log, self.id, rows, self.base, self.keys.envelope())

    def planned(self) -> list[FileEntry]:
        """Return the files that processes of this job were about to write."""
        rows, parts = read_files(self.log, self.id, self.base, self.keys.envelope())
        self._parts += parts
        self.made += [row.file for row in rows]
        return [row for row in rows if all(key_id in self.keys for key_id in row.key_ids())]

    def has_copied(self, copies: Iterable[str]) -> None:
        """Take note of copies of tables, of which `store_copy` has stored more: the end of the job deletes that."""
        for path in copies:
            self.made.append(path)
            self._parts.append(copy_path(self.id, path))

    # ---- committing

    def commit(self, wish: Wish) -> Committed:
        """Commit a wish, end the job, and clean up what the entry no longer keeps.

        After an error that is none of these, a job that other processes may go on with has not ended: its plan stays.

        Raises:
            ConcurrentChangeError: Another job has changed a path of a wish that is to be committed whole. The job was
                ended: it will never be committed.
            JobEndedError: Another process has ended the job.
            UnknownOutcomeError: Nobody knows whether it was committed. Nothing was deleted.
        """
        return self.replace_files(partial(self._wished, wish))

    def _wished(self, wish: Wish, head: Entry) -> Draft | None:
        if wish.batch is not None and head.has_batch(*wish.batch):
            return None
        if wish.of is not None and head.first > wish.of:
            raise expired(wish.of, self.log.store.url)
        tables, envelope = self.log.tables, self.log.envelope(head)
        at = tables.find(head.files, wish.paths_around(), envelope)
        below = tables.below(head.files, wish.new_paths(), envelope)
        there = {path: row for path, (_, row) in at.items()}
        objects = {path: row.file for path, row in there.items()}
        change = self._changed = next_change(wish, objects, below.keys(), empty=not head.files)
        if wish.whole and change.refused:
            raise wish.conflict(change.refused, there)
        if not (change.add or change.remove or wish.policy):  # a batch without files need not be known
            return None
        rows = self.keys.under_active(change.add, head, wish.scoped)
        change = self._changed = Change(rows, change.remove, change.refused)
        return self._draft(head, wish, change, {path: at[path] for path in change.remove})

    def replace_files(self, decide: Callable[[Entry], Draft | None]) -> Committed:
        """Commit a draft that is decided from the head alone, as `commit` does a wish."""
        before = self.base

        def noted(head: Entry, plans: Plans) -> Draft | None:
            nonlocal before
            before, self._changed = head, Change()
            self.keys.refresh(head)
            self._note_tasks(head, plans)
            return decide(head)

        try:
            version, head = self.log.append(self, noted)
        except (JobEndedError, UnknownOutcomeError):
            self.release()
            raise
        except (AgsError, OSError) as error:
            if self._can_be_resumed and getattr(error, "path", None) is None:  # nobody can commit what was refused
                self.release()
            elif (done := self.give_up()) is not None:
                return Committed(*done, self._changed, before)
            raise
        if self.id in head.over:
            self._end(head)
            return Committed(version, head, self._changed, before)
        self.give_up()  # nothing was to be committed
        return Committed(None, head, self._changed, head)

    def give_up(self) -> tuple[Entry, Entry] | None:
        """End the job without a commit (rule 5), and delete its objects.

        If it was committed after all, return its version, and the head.
        """
        if self._given_up:
            return None
        self._given_up = True

        def ended(head: Entry, plans: Plans) -> Draft:
            self._note_tasks(head, plans)
            return Draft("end", ends=(self.id, *self._further()), uses=self.uses(head))

        try:
            if self._can_be_resumed or self.has_tasks or self.keys.wraps:
                done = self.log.append(self, ended)
                self._end(done[1])
                return done
        except JobEndedError:
            pass
        self.release()
        with suppress(OSError, AgsError):  # what fails is left to a sweep
            made = self._of_job() if self.has_tasks else self.made
            head = self.log.head()
            for path in made:
                self.log.store.delete(path)
            self._delete_plans(head)
            reach.remove_rows(self.log, self.keys.rows(head))
        return None

    def _end(self, head: Entry) -> None:
        """Delete the plan, and what nothing names (rule 6). What fails is left to a sweep."""
        self.release()
        with suppress(OSError, AgsError):
            store, left = self.log.store, self.made
            if self._lists_all or (self.has_tasks and not self.known_plans.issuperset(self._of_tasks)):
                left = self._of_job()
            elif self.has_tasks or self.writer_died:
                store.sweep(self.id, paths=left)
                folders = (names.TABLES, names.BLOCKS) if self.writer_died else ()  # of which the dead have not told
                left = left + [listed.path for folder in folders for listed in store.list(folder + self.id)]
            self._delete_plans(head)
            reach.remove_rows(self.log, self.keys.rows(head))
            self.cleaned += reach.clean(self.log, head)
            named = head.named().union(row.file for row in self._changed.add)
            if left := [path for path in left if path not in named]:
                reach.delete(self.log, left)

    def _of_job(self) -> list[str]:
        """List the objects of the job: those that its tasks have made, too. Remove what dead tasks were writing."""
        self.log.store.sweep(self.id)
        found = (listed.path for listed in self.log.store.list())
        return [path for path in found if names.job_of(path) == self.id and not names.is_plan(path)]

    def _delete_plans(self, head: Entry) -> None:
        """Delete the job's plans, and before them what lies beside: a plan that is there shows that something is left.

        A further plan that the head has not in `over` is left: a sweep adds its uses.
        """
        store = self.log.store
        for path in self._parts:  # which no entry names
            store.delete(path)
        for name in self._beside | ({names.ALIVE} if self._of_tasks else set()):
            store.delete(names.beside_plan(self.id, name))
        for plan_id in [*self._of_tasks, *reversed(self.plans)]:
            if plan_id == self.id or plan_id in head.over:
                store.delete(names.plan_path(plan_id, None if plan_id == self.id else self.id))
        if store.local:
            store.remove_empty_folders(names.PLANS)

    def _further(self) -> list[str]:
        return [plan_id for plan_id in self.plans if plan_id != self.id] + self._of_tasks

    def _note_tasks(self, head: Entry, plans: Plans) -> None:
        """Take note of the further plans of other processes, which the next entry ends, too."""
        self._of_tasks = [
            plan_id
            for plan_id, sign in plans.items()
            if sign.of == self.id and plan_id not in self.plans and plan_id not in head.over
        ]
        self.plans_seen = plans

    def uses(self, head: Entry) -> dict[str, int]:
        """Return how often each KEK was used, at most. The entry that puts the job in `over` adds it."""
        return dict(self.keys.uses + reach.reserved(self.log, self._of_tasks, self.plans_seen, head))

    def retention(self, head: Entry, policy: Policy | None = None, *, changes: bool = True) -> int | None:
        """Return the first entry that is kept after the next one: see `reach.retention`.

        An error stops no commit: what it leaves is left to whoever expires next.
        """
        try:
            return reach.retention(self.log, head, policy or head.policy, changes=changes)
        except (AgsError, OSError) as error:
            url = without_password(self.log.store.url)
            telemetry.warning("dataset", "old versions of %s are not expired: %s", url, error)
            return None

    def _draft(self, head: Entry, wish: Wish, change: Change, gone: Mapping[str, tuple[Table, FileEntry]]) -> Draft:
        """Return what a wish changes in the head; new tables are written here (rule 3e). gone: files by path."""
        policy, files, first = wish.policy or head.policy, head.files, None
        keys = self.keys.with_new(head, {key_id for row in change.add for key_id in row.key_ids()})
        if change.add or gone:
            tables, sealer = {path: table for path, (table, _) in gone.items()}, main_key(keys).key_id
            files = self.log.tables.replaced(files, tables, change.add, self.id, sealer, self.keys.envelope(head))
            first = self.retention(head, policy)
        streams = head.streams
        if wish.batch is not None:
            streams = (*(one for one in streams if one.stream != wish.batch[0]), Batch(*wish.batch, clock_ms()))
        return Draft(
            wish.operation,
            files=files,
            keys=keys,
            uses=self.uses(head),
            first=first,
            policy=policy,
            streams=streams,
            sets=whole_sets(head.sets, [row for _, row in gone.values()], change.add),
            ends=self._further(),
            returns=wish.of is not None,
        )

    # ---- whole jobs over KEKs

    def rotate(
        self,
        rotation: Rotation,
        rewrite: Callable[[Rewrite], Mapping[str, Copy]],
        others: Callable[[Entry, decide_keys.Keys], decide_keys.Keys],
        copies: Mapping[str, Copy],
    ) -> Committed:
        """Replace KEKs by new ones, and wrap every data key of the newest version under the new ones.

        The data is not touched. KEKs that older versions need stay, retired.

        `rewrite` makes copies of tables, as `Tables.with_wraps` does, and returns them by the paths of the tables;
        `copies` are those that other processes of this job have made. `others` takes the head and the KEKs after the
        rotation, and returns what else becomes of them.
        """
        made = dict(copies)

        def files(head: Entry) -> Draft | None:
            envelope = self.keys.envelope(head)
            counts = {table.path: self.log.tables.counted([table], envelope) for table in head.files}
            wraps, seals = sum(counts.values(), Counter[str]()), {table.key_id for table in head.files}
            olds = decide_keys.to_replace(head.keys, rotation, wraps, seals)
            kinds = {old.key_id: rotation.kind_of(old) for old in olds.values()}
            own = self.keys.own(list(dict.fromkeys(kinds.values())), head)
            moves = {old_id: own[kind].key_id for old_id, kind in kinds.items()}
            new = {old_id: own[kind] for old_id, kind in kinds.items()}
            after = decide_keys.rotated(head.keys, rotation, wraps, new, clock_ms())
            may_be = self.keys.with_others(after, head, {kind: olds[old_id] for old_id, kind in kinds.items()})
            changed = [table for table in head.files if counts[table.path].keys() & moves.keys()]
            todo = [table for table in changed if not self._is_usable(made.get(table.path), may_be, head)]
            sealer = main_key(after).key_id
            self.keys.spend(_wraps([counts[table.path] for table in todo], moves, sealer), head)
            if todo:
                made.update(rewrite(Rewrite(head, todo, moves, sealer, self.keys.envelope(head))))
            envelope = self.keys.envelope(head)
            now = [
                made[table.path].table
                if table in changed
                else rewrapped(table, sealer, envelope, head.dataset_id)
                if table.key_id in moves
                else table
                for table in head.files
            ]
            brought = set(moves.values()).union(self.log.tables.counted(now, envelope), (table.key_id for table in now))
            keys = others(
                head, {key_id: key for key_id, key in may_be.items() if key_id in head.keys or key_id in brought}
            )
            if keys == dict(head.keys) and tuple(now) == head.files:
                return None
            return Draft(
                self.operation,
                files=tuple(now),
                keys=keys,
                uses=self.uses(head),
                first=self.retention(head, changes=tuple(now) != head.files),
                ends=self._further(),
            )

        return self.replace_files(files)

    def _is_usable(self, copy: Copy | None, keys: Mapping[str, KeyEntry], head: Entry) -> bool:
        """Whether a copy may be committed: its KEKs are there, and nothing in it is under a version that is gone."""
        if copy is None or copy.table.key_id not in keys:
            return False
        counts = self.log.tables.counted([copy.table], self.log.envelope(head, dict(keys)))
        return counts.keys() <= keys.keys() and (
            copy.gone == head.gone or all(keys[key_id].double_wrap for key_id in counts)
        )


def _wraps(tables: Sequence[Mapping[str, int]], moves: Mapping[str, str], sealer: str) -> Counter[str]:
    """Count what each KEK wraps when data keys in some tables, which have these counts, move to other KEKs."""
    wraps = Counter(dict.fromkeys(moves.values(), SLACK_USES))
    for counts in tables:
        for old, count in counts.items():
            if old in moves:
                wraps[moves[old]] += count
        wraps[sealer] += 1
    return wraps
