"""A job: what it may write is in its plan, and one entry of the log commits it or ends it."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast import telemetry
from ags_fast.dataset.keks import SLACK_USES, Want, clock_ms
from ags_fast.dataset.names import new_job_id
from ags_fast.errors import AgsError, ConcurrentChangeError
from ags_fast.onelog import keys as decide_keys
from ags_fast.onelog import reach
from ags_fast.onelog.change import Change, Wish, next_change, whole_sets
from ags_fast.onelog.deks import rewrapped_many
from ags_fast.onelog.draft import Draft, Plans, Sign
from ags_fast.onelog.entry import Batch, Entry, main_key
from ags_fast.onelog.errors import JobEndedError, UnknownOutcomeError
from ags_fast.onelog.job_keys import JobKeys
from ags_fast.onelog.log import ENDED, Log
from ags_fast.onelog.names import ALIVE, LEFT, LOCK, PLANS, beside_plan, is_plan, job_of, plan_path
from ags_fast.onelog.plan import RENEW_SECONDS, TRIES, Copy, read_files, read_plan, store_files
from ags_fast.onelog.snapshot import expired
from ags_fast.onelog.tables import rewrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.policy import Policy
    from ags_fast.keys.entry import KeyEntry
    from ags_fast.keys.envelope import Envelope
    from ags_fast.onelog.keys import Rotation
    from ags_fast.onelog.tables import Table


class Committed(NamedTuple):
    """What became of a job.

    Attributes:
        version: The version that it has made; None if there was nothing to commit.
        head: The newest version since.
        change: What the version has changed.
        before: The version that it replaced, or the newest one if it made none.
    """

    version: Entry | None
    head: Entry
    change: Change
    before: Entry


class Rewrite(NamedTuple):
    """Tables of which a rotation needs copies.

    Attributes:
        head: The version that the tables are of.
        tables: The tables.
        moves: {KEK: the KEK that takes its place}.
        sealer: The KEK that wraps the data keys of the copies.
        envelope: Has all these KEKs.
    """

    head: Entry
    tables: Sequence[Table]
    moves: Mapping[str, str]
    sealer: str
    envelope: Envelope


class Job:
    """An open job of one process. `begin` makes one.

    Attributes:
        id: Is in the name of each object that the job makes.
        base: The version that it began on.
        keys: Its KEKs.
        facts: What the process that has begun it says to those that go on with it.
        made: Objects beside the plan that this process has made. The log adds what it makes for the job.
        cleaned: What the end of the job has deleted of versions that are not kept.
        plans_seen: The plans of all jobs, as the job has listed them last.
    """

    def __init__(self, log: Log, operation: str, job_id: str, base: Entry) -> None:
        self.log, self.operation, self.id, self.base = log, operation, job_id, base
        self.keys = JobKeys(log, operation, job_id, base)
        self.facts: dict[str, Any] = {}
        self.made: list[str] = []
        self.cleaned: list[str] = []
        self.plans_seen: Plans = {}
        self.has_tasks = False  # whether other processes write objects of the job
        self.known_plans: set[str] = set()  # further plans of tasks whose objects are all known
        self._beside: set[str] = set()  # what lies beside the plan
        self._can_be_resumed = False
        self._given_up = False
        self._named: set[str] = set()  # files that the commit has added
        self._parts: list[str] = []  # objects that have the planned files
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
        """Begin a job: its plan is stored before any other object of the job (rule 2).

        Args:
            log: The log.
            operation: What the job does.
            wants: How many data keys it wraps under each kind of KEK; or a function that tells from the job's id.
            head: The version that the job begins on; None: the newest one.
            ahead: How many data keys it reserves more of each kind, if the policy has room.
            resumable: Whether other processes may go on with it.
            facts: What a process that goes on must know: JSON values.
            policy: How the job chooses KEKs, if it brings another policy; None: as the head's policy has it.
        """
        log.kek_rows.check_writable()
        head = head or log.head()
        for _ in range(TRIES):
            job = cls(log, operation, new_job_id(), head)
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
        further plans of its own.

        Raises:
            JobEndedError: The job is over, or cannot be taken up.
        """
        head = log.head()
        plan = read_plan(log, job_id, head)
        if plan is None or job_id in head.over or not (plan.resumable or log.plans().get(job_id, Sign(0.0)).waits):
            raise JobEndedError(f"the job {job_id} is over, or no other process can go on with it")
        job = cls(log, plan.operation, job_id, head)
        job.facts, job.keys = plan.facts, JobKeys.of_plan(log, plan, head)
        job._can_be_resumed = True
        job.has_tasks = True
        job._beside = {LOCK, ALIVE, LEFT}
        with suppress(BlockingIOError):  # the other process lives
            job._hold()
        job._show_life()
        return job

    @classmethod
    def finish(cls, log: Log, job_id: str) -> Entry | None:
        """Clean up after a job whose process died between its commit and its end.

        Returns:
            The version that the job has made, or the head if that was expired; None: it was not committed.
        """
        head = log.head()
        number = head.over.get(job_id, ENDED)
        if number == ENDED:
            return None
        job = cls(log, "", job_id, head)
        job.keys.plans, job._lists_all = [job_id], True
        job._beside = {LOCK, ALIVE, LEFT}
        job._note_tasks(head, log.plans())
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
        self._lock = self.log.store.lock(beside_plan(self.id, LOCK))
        if self._lock is not None:
            self._beside.add(LOCK)

    def _show_life(self) -> None:
        """Renew the plan from time to time, where the storage has no locks."""
        if self._lock is None and self.log.store.shared:
            threading.Thread(target=self._renew_again, name="ags_fast-plan", daemon=True).start()

    def _renew_again(self) -> None:
        while not self._over.wait(RENEW_SECONDS):
            with suppress(AgsError, OSError):
                self.renew()

    def renew(self) -> None:
        """Show that the job lives, and see that it does.

        Raises:
            JobEndedError: Its plan is gone.
        """
        if self.log.store.stat(plan_path(self.id)) is None:
            raise JobEndedError(f"another process has ended the job {self.id}")
        self._beside.add(ALIVE)
        self.log.store.write_small(beside_plan(self.id, ALIVE), b"alive\n", tag=self.id)

    def leave(self) -> None:
        """Let go of the job, which then waits for a day for another process to go on."""
        self.log.store.write_small(beside_plan(self.id, LEFT), b"left\n", tag=self.id)
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
        last = Change()

        def decide(head: Entry) -> Draft | None:
            nonlocal last
            last = Change()
            if wish.batch is not None and head.has_batch(*wish.batch):
                return None
            if wish.of is not None and head.first > wish.of:
                raise expired(wish.of, self.log.store.url)
            last = change = self._change(wish, head)
            if wish.whole and change.refused:
                raise _Refused(change.refused)
            if not (change.add or change.remove or wish.policy or wish.batch):
                return None
            rows = self.keys.under_active(change.add, head, wish.scoped)
            last = change = Change(rows, change.remove, change.refused)
            return self._draft(head, wish, change)

        return self._append(decide, lambda: last)

    def replace_files(self, files: Callable[[Entry], Draft | None]) -> Committed:
        """Commit a draft that is decided from the head alone: a rotation, a restored version."""
        return self._append(files, Change)

    def _append(self, decide: Callable[[Entry], Draft | None], change: Callable[[], Change]) -> Committed:
        before = self.base

        def noted(head: Entry, plans: Plans) -> Draft | None:
            nonlocal before
            before = head
            self.keys.refresh(head)
            self._note_tasks(head, plans)
            return decide(head)

        try:
            version, head = self.log.append(self, noted)
        except (JobEndedError, UnknownOutcomeError):
            self.release()
            raise
        except _Refused as refused:
            if (done := self.give_up()) is not None:
                return Committed(*done, change(), before)
            more = f" and {len(refused.paths) - 1} more" if len(refused.paths) > 1 else ""
            raise ConcurrentChangeError(
                f"another job has changed {refused.paths[0]!r}{more}, or a file or folder in that place, meanwhile: "
                "nothing was committed"
            ) from None
        except (AgsError, OSError):
            if self._can_be_resumed:
                self.release()
            elif (done := self.give_up()) is not None:
                return Committed(*done, change(), before)
            raise
        if self.id in head.over:
            self._end(head)
            return Committed(version, head, change(), before)
        self.give_up()  # nothing was to be committed
        return Committed(None, head, change(), head)

    def give_up(self) -> tuple[Entry, Entry] | None:
        """End the job without a commit (rule 5), and delete its objects.

        Returns:
            None; or the version in which the job was committed after all, and the head.
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
            left = self.made
            if self._lists_all or (self.has_tasks and not self.known_plans.issuperset(self._of_tasks)):
                left = self._of_job()
            self._delete_plans(head)
            reach.remove_rows(self.log, self.keys.rows(head))
            self.cleaned += reach.clean(self.log, head)
            named = {table.path for table in head.files}.union(self._named)
            if left := [path for path in left if path not in named]:
                reach.delete(self.log, left)

    def _of_job(self) -> list[str]:
        """List the objects of the job: those that its tasks have made, too."""
        found = (listed.path for listed in self.log.store.list())
        return [path for path in found if job_of(path) == self.id and not is_plan(path)]

    def _delete_plans(self, head: Entry) -> None:
        """Delete the job's plans. A further plan that the head has not in `over` is left: a sweep adds its uses."""
        store = self.log.store
        for plan_id in [*self._of_tasks, *reversed(self.plans)]:
            if plan_id == self.id or plan_id in head.over:
                store.delete(plan_path(plan_id, None if plan_id == self.id else self.id))
        for name in self._beside | ({ALIVE} if self._of_tasks else set()):
            store.delete(beside_plan(self.id, name))
        for path in self._parts:  # which no entry names
            store.delete(path)
        if store.local:
            store.remove_empty_folders(PLANS)

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
        of_tasks = reach.reserved(self.log, self._of_tasks, self.plans_seen, head) if self._of_tasks else Counter[str]()
        return dict(self.keys.uses + of_tasks)

    def retention(self, head: Entry, policy: Policy | None = None, *, changes: bool = True) -> int | None:
        """Return the first entry that is kept after the next one.

        An error stops no commit: what it leaves is left to whoever expires next.

        Args:
            head: The head.
            policy: The policy from now on; None: that of the head.
            changes: Whether the next entry changes files.
        """
        try:
            return reach.retention(self.log, head, policy or head.policy, changes=changes)
        except (AgsError, OSError) as error:
            telemetry.warning("onelog", "old versions of %s are not expired: %s", self.log.store.url, error)
            return None

    def _change(self, wish: Wish, head: Entry) -> Change:
        tables, envelope = self.log.tables, self.log.envelope(head)
        self._at = tables.find(head.files, wish.paths_around(), envelope)
        below = tables.below(head.files, wish.new_paths(), envelope)
        there = {path: row.file for path, (_, row) in self._at.items()}
        return next_change(wish, there, below.keys(), empty=not head.files)

    def _draft(self, head: Entry, wish: Wish, change: Change) -> Draft:
        """Return what a wish changes in the head; new tables are written here (rule 3e)."""
        policy = wish.policy or head.policy
        keys = self.keys.with_new(head, [key_id for row in change.add for key_id in row.key_ids()])
        files = head.files
        if change.add or change.remove:
            gone = {path: self._at[path][0] for path in change.remove}
            sealer = main_key(keys).key_id
            files = self.log.tables.replaced(head.files, gone, change.add, self.id, sealer, self.keys.envelope(head))
            self._named = {row.file for row in change.add}
        first = self.retention(head, policy) if change.add or change.remove else None
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
            sets=whole_sets(head.sets, [self._at[path][1] for path in change.remove], change.add),
            ends=self._further(),
        )

    # ---- whole jobs over KEKs

    def rotate(
        self,
        rotation: Rotation,
        rewrite: Callable[[Rewrite], Mapping[str, Copy]] | None = None,
        others: Callable[[Entry, decide_keys.Keys], decide_keys.Keys] = lambda head, keys: keys,
        copies: Mapping[str, Copy] | None = None,
    ) -> Committed:
        """Replace KEKs by new ones, and wrap every data key of the newest version under the new ones.

        The data is not touched. KEKs that older versions need stay, retired.

        Args:
            rotation: Which KEKs.
            rewrite: Makes copies of tables, as `Tables.with_wraps` does, and returns them by the paths of the tables.
                None: this thread makes the copies.
            others: Takes the head and the KEKs after the rotation; returns what else becomes of the KEKs.
            copies: Copies that other processes of this job have made.
        """
        made = dict(copies or {})

        def files(head: Entry) -> Draft | None:
            counts = self._counts(head)
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
                made.update((rewrite or self._copies)(Rewrite(head, todo, moves, sealer, self.keys.envelope(head))))
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

    def _counts(self, head: Entry) -> dict[str, Counter[str]]:
        """Count, for each table of a version, how many data keys each KEK wraps in it."""
        envelope = self.keys.envelope(head)
        return {table.path: self.log.tables.counted([table], envelope) for table in head.files}

    def _is_usable(self, copy: Copy | None, keys: Mapping[str, KeyEntry], head: Entry) -> bool:
        """Whether a copy may be committed: its KEKs are there, and nothing in it is under a version that is gone."""
        if copy is None or copy.table.key_id not in keys:
            return False
        counts = self.log.tables.counted([copy.table], self.log.envelope(head, dict(keys)))
        return counts.keys() <= keys.keys() and (
            copy.gone == head.gone or all(keys[key_id].double_wrap for key_id in counts)
        )

    def _copies(self, work: Rewrite) -> dict[str, Copy]:
        rewrap, tables = partial(rewrapped_many, work.envelope), self.log.tables
        made = {
            table.path: tables.with_wraps(table, work.moves, rewrap, self.id, work.sealer, work.envelope)
            for table in work.tables
        }
        return {path: Copy(path, table, work.head.gone) for path, table in made.items()}


def _wraps(tables: Sequence[Mapping[str, int]], moves: Mapping[str, str], sealer: str) -> Counter[str]:
    """Count what each KEK wraps when data keys in some tables, which have these counts, move to other KEKs."""
    wraps = Counter(dict.fromkeys(moves.values(), SLACK_USES))
    for counts in tables:
        for old, count in counts.items():
            if old in moves:
                wraps[moves[old]] += count
        wraps[sealer] += 1
    return wraps


class _Refused(Exception):  # noqa: N818 # becomes a ConcurrentChangeError when the job has ended
    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__()
        self.paths = paths
