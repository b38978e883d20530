"""A job: what it may write is in its plan, and one entry of the log commits it or ends it."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.dataset.keks import SLACK_USES, Want, clock_ms
from ags_fast.dataset.names import new_job_id
from ags_fast.errors import AgsError, ConcurrentChangeError, PolicyError
from ags_fast.keys.entry import KeyEntry
from ags_fast.keys.envelope import in_threads
from ags_fast.onelog import keys as decide_keys
from ags_fast.onelog import reach
from ags_fast.onelog.change import Change, Wish, next_change, whole_sets
from ags_fast.onelog.deks import key_ids, rewrapped_row, with_new_keys
from ags_fast.onelog.errors import Again, JobEndedError, UnknownOutcomeError
from ags_fast.onelog.log import Batch, Draft, Entry, Log, Plans, main_key
from ags_fast.onelog.names import ALIVE, LEFT, LOCK, PLANS, beside_plan, is_plan, job_of, plan_path
from ags_fast.onelog.plan import Plan, read_files, read_plan, store_files, store_plan
from ags_fast.onelog.tables import counted, rewrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.keys.envelope import Envelope
    from ags_fast.onelog.keys import Rotation

MORE_USES = 64  # data keys that a further plan reserves, at least
TRIES = 20  # ids, until a plan is created with a clear answer
RENEW_SECONDS = 600.0  # between two signs of life
ASK_AT_ONCE = 8  # calls of the KMS


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


class Job:
    """An open job of one process. `begin` makes one.

    Attributes:
        id: Is in the name of each object that the job makes.
        base: The version that it began on.
        facts: What its plan says for processes that go on with it.
        plans: The id of its plan, and those of this process' further plans.
        made: Objects beside the plan that this process has made.
    """

    def __init__(self, log: Log, operation: str, job_id: str, base: Entry) -> None:
        self.log, self.operation, self.id, self.base = log, operation, job_id, base
        self.plans: list[str] = []
        self.resumable = False
        self.facts: dict[str, Any] = {}
        self.made: list[str] = []
        self.has_tasks = False  # whether other processes write objects of the job
        self._keys: dict[str, KeyEntry] = dict(base.keys)  # all that the job knows, to unwrap what it has wrapped
        self._new: dict[str, KeyEntry] = {}  # KEKs that this process has made, and that its commit brings
        self._others: dict[str, KeyEntry] = {}  # KEKs that another process of the job has made: brought, too
        self._chosen: dict[Want, str] = {}
        self._spent: set[str] = set()  # KEKs that have no more uses, by what this process has reserved
        self._uses: Counter[str] = Counter()  # by KEK, what all plans of this object reserve
        self._room: Counter[str] = Counter()  # what this process has reserved, and not yet wrapped
        self._plans: Plans = {}  # as they were listed last
        self._named: set[str] = set()  # files that the commit has added
        self._of_tasks: list[str] = []  # further plans of other processes that the next entry ends
        self._lock: Any = None
        self._over = threading.Event()

    # ---- begin and end

    @classmethod
    def begin(
        cls,
        log: Log,
        operation: str,
        wants: Mapping[Want, int] | None = None,
        *,
        head: Entry | None = None,
        resumable: bool = False,
        facts: Mapping[str, Any] | None = None,
    ) -> Job:
        """Begin a job: its plan is stored before any other object of the job (rule 2).

        Args:
            log: The log.
            operation: What the job does.
            wants: How many data keys it wraps under each kind of KEK.
            head: The version that the job begins on; None: the newest one.
            resumable: Whether other processes may go on with it.
            facts: What a process that goes on must know: JSON values.
        """
        head = head or log.head()
        for _ in range(TRIES):
            job = cls(log, operation, new_job_id(), head)
            job.resumable, job.facts = resumable, dict(facts or {})
            uses = Counter({main_key(head.keys).key_id: min(SLACK_USES, head.policy.kek_uses // 16)})
            for kind, key_id in job._choose(wants or {}, head).items():
                uses[key_id] += (wants or {})[kind]
            job._hold()
            if job._store_plan(job.id, None, uses, head):
                job._show_life()
                return job
            job.release()
        raise UnknownOutcomeError(f"{log.store.url} does not say whether it has stored a plan: nothing was begun")

    @classmethod
    def resume(cls, log: Log, job_id: str) -> Job:
        """Go on with a resumable job that another process has begun (rules 5 and 9).

        That process may still go on, too: the log lets one of them commit. What this process wraps, it reserves in
        further plans of its own.

        Raises:
            JobEndedError: The job is over, or cannot be taken up.
        """
        head = log.head()
        plan = read_plan(log, job_id, head)
        if plan is None or not plan.resumable or job_id in head.over:
            raise JobEndedError(f"the job {job_id} is over, or no other process can go on with it")
        job = cls(log, plan.operation, job_id, head)
        job.resumable, job.facts = True, plan.facts
        job.plans.append(job_id)
        job._uses.update(plan.uses)
        job._keys = {**plan.new, **head.keys}
        job._others = dict(plan.new)
        job.has_tasks = True
        with suppress(BlockingIOError):  # the other process lives
            job._hold()
        job._show_life()
        return job

    def _hold(self) -> None:
        """Lock the plan while this process lives, where the storage has locks. It tells who is dead, and no more."""
        self._lock = self.log.store.lock(beside_plan(self.id, LOCK))

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
        self.log.store.write_small(beside_plan(self.id, ALIVE), b"alive\n", tag=self.id)

    def release(self) -> None:
        """Let go of the job. Its plan stays, and another process may go on with it."""
        self._over.set()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # ---- which KEK wraps

    def _choose(self, wants: Mapping[Want, int], head: Entry) -> dict[Want, str]:
        """Return the ids of the KEKs that are to wrap so many data keys; make those that the head lacks (rule 9)."""
        chosen: dict[Want, KeyEntry] = {}
        there = (
            {key_id: key for key_id, key in head.keys.items() if key_id not in self._spent}
            if self._spent
            else head.keys
        )
        for kind, count in wants.items():
            key = decide_keys.choose(there, kind, count, head.policy, clock_ms())
            if key is not None:
                chosen[kind] = key
            elif head.policy.kek_uses < count:
                raise PolicyError(
                    f"one KEK would wrap {count} data keys, and the dataset's policy allows {head.policy.kek_uses}: "
                    "share it among fewer files by the policy's kek_scope"
                )
        chosen |= self._own([kind for kind in wants if kind not in chosen], head)
        for kind, key in chosen.items():
            self._keys[key.key_id] = key  # one that the head has got since the job began may leave again
            self._chosen[kind] = key.key_id
        return {kind: key.key_id for kind, key in chosen.items()}

    def _own(self, kinds: Collection[Want], head: Entry) -> dict[Want, KeyEntry]:
        """Return new KEKs of this process, not under a version of a master key that is gone; make what is missing."""
        own = {
            Want.of(key): key
            for key in self._new.values()
            if key.key_id not in self._spent and not (key.double_wrap and self.log.version_of(key) in head.gone)
        }
        missing = [kind for kind in kinds if kind not in own]
        kms = self.log.kms.for_dataset(head.dataset_id)
        made = in_threads(lambda kind: kind.new_kek(kms), missing, min(ASK_AT_ONCE, len(missing)) or 1)
        for key in made:
            self._new[key.key_id] = self._keys[key.key_id] = own[Want.of(key)] = key
        return {kind: own[kind] for kind in kinds}

    def take(self, kinds: Sequence[Want]) -> list[str]:
        """Return the ids of the KEKs that wrap the data keys of one new file, one use of each reserved (rule 9).

        Args:
            kinds: Of the file's own data key, and then of those of its columns.
        """
        head, counts = self.base, Counter(kinds)
        while True:
            for kind, count in counts.items():
                if not self._serves(kind, count, head):
                    self._chosen.pop(kind, None)
            self._choose({kind: count for kind, count in counts.items() if kind not in self._chosen}, head)
            wanted = Counter(self._chosen[kind] for kind in kinds)
            if all(self._room[key_id] >= count for key_id, count in wanted.items()):
                self._room.subtract(wanted)
                return [self._chosen[kind] for kind in kinds]
            self._reserve(wanted, head)
            head = self.log.head()  # a KEK may have left before it was reserved

    def _serves(self, kind: Want, count: int, head: Entry) -> bool:
        """Whether the KEK that was chosen for a kind may wrap so many more data keys."""
        key_id = self._chosen.get(kind, "")
        key = head.keys.get(key_id)
        if key is None and key_id not in self._new:
            return False
        if kind.double_wrap:
            used = (key.uses if key else 0) + self._uses[key_id] - self._room[key_id]
            if used + count > head.policy.kek_uses:
                self._spent.add(key_id)
                return False
        return key is None or key.state == "active"

    def _reserve(self, counts: Mapping[str, int], head: Entry) -> None:
        """Store a further plan, before the job wraps what its plans do not reserve (rule 9)."""
        more = {}
        for key_id, count in counts.items():
            if count > self._room[key_id]:  # twice as much as before, so that many files need few plans
                ahead = min(max(MORE_USES, self._uses[key_id]), head.policy.kek_uses - self._uses[key_id])
                more[key_id] = max(count - self._room[key_id], ahead)
        for _ in range(TRIES):
            if self._store_plan(new_job_id(), self.id, more, head):
                return
        raise UnknownOutcomeError(f"{self.log.store.url} does not say whether it has stored a plan: try again")

    def _store_plan(self, plan_id: str, of: str | None, uses: Mapping[str, int], head: Entry) -> bool:
        """Store a plan. False: without a clear answer, so another id is needed, and another KEK."""
        new = {key_id: key for key_id, key in self._new.items() if key_id in uses}
        resumable = self.resumable and of is None
        facts = self.facts if of is None else {}
        plan = Plan(self.operation, plan_id, of, clock_ms(), new, dict(uses), resumable, facts)
        if not store_plan(self.log.store, self.log.envelope(head), main_key(head.keys), head.dataset_id, plan):
            return False
        self.plans.append(plan_id)
        self._uses.update(uses)
        self._room.update(uses)
        return True

    def envelope(self, head: Entry | None = None) -> Envelope:
        """Return what wraps and unwraps under all KEKs that the job knows. head: the newest version; None: `base`."""
        head = head or self.base
        known = {key_id: key for key_id, key in self._keys.items() if key_id not in head.keys}
        return self.log.envelope(head, known)

    # ---- what it is about to write

    def sealed(self, rows: Sequence[FileEntry], kinds: Sequence[Sequence[Want]], dek_length: int) -> list[FileEntry]:
        """Return new files with fresh data keys, wrapped under KEKs that the plan reserves (rule 9).

        Args:
            rows: The files. The columns that have a key of their own are in `column_keys`.
            kinds: For each file the kinds of the KEKs of its own data key and of those of its columns.
            dek_length: Bytes of a data key.
        """
        counts, head = Counter(chain.from_iterable(kinds)), self.base
        if short := {kind: n for kind, n in counts.items() if self._room[self._chosen.get(kind, "")] < n}:
            head = self.log.head()  # `begin` has reserved less: a source has changed, or another process has begun
            for kind, key_id in self._choose(short, head).items():
                self._reserve({key_id: counts[kind]}, head)
        self._room.subtract({self._chosen[kind]: n for kind, n in counts.items()})
        planned = [
            row.with_wraps([(self._chosen[kind], b"") for kind in each]) for row, each in zip(rows, kinds, strict=True)
        ]
        return with_new_keys(planned, dek_length, self.envelope(head), head.dataset_id)

    def will_write(self, rows: Sequence[FileEntry]) -> None:
        """Store the files that the job is about to write, before their first byte is written (rule 2)."""
        self.made += [row.file for row in rows]
        store_files(self.log, self.id, rows, self.base, self.envelope())

    def planned(self) -> list[FileEntry]:
        """Return the files that processes of this job were about to write."""
        rows = read_files(self.log, self.id, self.base, self.envelope())
        self.made += [row.file for row in rows]
        return [row for row in rows if row.key_ids() <= self._keys.keys()]

    # ---- committing

    def commit(self, wish: Wish) -> Committed:
        """Commit a wish, end the job, and clean up what the entry no longer keeps.

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
            last = change = self._change(wish, head)
            if wish.whole and change.refused:
                raise _Refused(change.refused)
            if not (change.add or change.remove or wish.policy or wish.batch):
                return None
            rows = self._under_active(change.add, head, wish.scoped)
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
            self._note_tasks(head, plans)
            draft = decide(head)
            # A draft also names tables that were there before: those are not the job's to delete.
            self.made += [table.path for table in (draft and draft.files) or () if job_of(table.path) == self.id]
            return draft

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
            if (done := self.give_up()) is not None:
                return Committed(*done, change(), before)
            raise
        if self.id in head.over:
            self._end(head)
            return Committed(version, head, change(), before)
        self.give_up()  # nothing was to be committed, and what was wrapped counts all the same (rule 5)
        return Committed(None, head, change(), head)

    def give_up(self) -> tuple[Entry, Entry] | None:
        """End the job without a commit (rule 5), and delete its objects.

        Returns:
            None; or the version in which the job was committed after all, and the head.
        """

        def ended(head: Entry, plans: Plans) -> Draft:
            self._note_tasks(head, plans)
            return Draft("end", ends=(self.id, *self._further()), uses=self.uses(head))

        try:
            done = self.log.append(self, ended)
        except JobEndedError:
            self.release()
            with suppress(OSError, AgsError):  # what fails is left to a sweep
                made = self._of_job() if self.has_tasks else self.made
                head = self.log.head()
                for path in made:
                    self.log.store.delete(path)
                self._delete_plans(head)
            return None
        self._end(done[1])
        return done

    def _end(self, head: Entry) -> None:
        """Delete the plan, and what nothing names (rule 6). What fails is left to a sweep."""
        self.release()
        with suppress(OSError, AgsError):
            left = self._of_job() if self.has_tasks else self.made
            self._delete_plans(head)
            reach.clean(self.log, head)
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
        for name in (ALIVE, LEFT, LOCK) if self.log.store.local or self.has_tasks else ():
            store.delete(beside_plan(self.id, name))
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
        self._plans = plans

    def uses(self, head: Entry) -> dict[str, int]:
        """Return how often each KEK was used, at most. The entry that puts the job in `over` adds it."""
        of_tasks = reach.reserved(self.log, self._of_tasks, self._plans, head) if self._of_tasks else Counter[str]()
        return dict(self._uses + of_tasks)

    def _change(self, wish: Wish, head: Entry) -> Change:
        tables, envelope = self.log.tables, self.log.envelope(head)
        self._at = tables.find(head.files, wish.paths_around(), envelope)
        below = tables.below(head.files, wish.new_paths(), envelope)
        there = {path: row.file for path, (_, row) in self._at.items()}
        return next_change(wish, there, below.keys(), empty=not head.files)

    def _draft(self, head: Entry, wish: Wish, change: Change) -> Draft:
        """Return what a wish changes in the head; new tables are written here (rule 3e)."""
        policy = wish.policy or head.policy
        keys = self.keys_with_new(head, [key_id for row in change.add for key_id in row.key_ids()])
        files = head.files
        if change.add or change.remove:
            gone = {path: self._at[path][0] for path in change.remove}
            sealer = main_key(keys).key_id
            files = self.log.tables.replaced(head.files, gone, change.add, self.id, sealer, self.envelope(head))
            self._named = {row.file for row in change.add}
        first = reach.retention(self.log, head, policy) if change.add or change.remove else None
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

    def keys_with_new(self, head: Entry, used: Sequence[str]) -> dict[str, KeyEntry]:
        """Return the head's KEKs, and those new ones of the job that are used."""
        brought = {**self._others, **self._new}.items()
        new = {key_id: key for key_id, key in brought if key_id in used and key_id not in head.keys}
        return decide_keys.with_new(head.keys, new, head.policy, clock_ms())

    def _under_active(self, rows: Sequence[FileEntry], head: Entry, scoped: bool) -> tuple[FileEntry, ...]:
        """Wrap again the data keys whose KEK has retired or left since, or is not that of the file's path (rule 3d)."""
        kinds = self._kinds(rows, head, scoped)
        moves = [
            [
                kind if not self._stays(key_id, kind, head) else None
                for key_id, kind in zip(key_ids(row), each, strict=True)
            ]
            for row, each in zip(rows, kinds, strict=True)
        ]
        counts = Counter(kind for each in moves for kind in each if kind is not None)
        chosen = self._choose(counts, head)
        missing = {chosen[kind]: count for kind, count in counts.items() if count > self._room[chosen[kind]]}
        if missing:
            self._reserve(missing, head)
            raise Again  # look at the head again: a KEK may have left before it was reserved
        if not counts:
            return tuple(rows)
        self._room.subtract({chosen[kind]: count for kind, count in counts.items()})
        to = [[None if kind is None else chosen[kind] for kind in each] for each in moves]
        envelope = self.envelope(head)
        return tuple(rewrapped_row(row, each, envelope, head.dataset_id) for row, each in zip(rows, to, strict=True))

    def _stays(self, key_id: str, kind: Want, head: Entry) -> bool:
        """Whether a data key may stay under its KEK."""
        there = head.keys.get(key_id)
        if there is not None:
            return there.state == "active" and Want.of(there) == kind
        key = self._new.get(key_id) or self._others.get(key_id)
        return (
            key is not None and Want.of(key) == kind and not (key.double_wrap and self.log.version_of(key) in head.gone)
        )

    def _kinds(self, rows: Sequence[FileEntry], head: Entry, scoped: bool) -> list[list[Want]]:
        """Return which kinds of KEKs the data keys of files are to have."""
        kind_of: dict[str, Want] = {}
        for key_id in {key_id for row in rows for key_id in row.key_ids()}:
            key = self._keys[key_id]
            kind = Want.of(key)
            kind_of[key_id] = (
                kind
                if key_id in head.keys and head.keys[key_id].state == "active"
                else (decide_keys.followed(head.keys, kind))
            )
        kinds = [[kind_of[key_id] for key_id in key_ids(row)] for row in rows]
        policy = head.policy
        mine = [
            i for i, row in enumerate(rows) if scoped and (row.job_id == self.id or policy.kek_scope == "partition")
        ]
        scopes = policy.scopes([rows[i].path for i in mine], self.id, clock_ms())
        for i, scope in zip(mine, scopes, strict=True):
            kinds[i] = [kind._replace(scope=scope) if kind.double_wrap else kind for kind in kinds[i]]
        return kinds

    # ---- whole jobs over KEKs

    def rotate(self, rotation: Rotation) -> Committed:
        """Replace KEKs by new ones, and wrap every data key of the newest version under the new ones.

        The data is not touched. KEKs that older versions need stay, retired.
        """

        def files(head: Entry) -> Draft | None:
            used = counted(head.files).keys() | {table.key_id for table in head.files}
            olds = decide_keys.to_replace(head.keys, rotation, used)
            kinds = {old.key_id: rotation.kind_of(old) for old in olds.values()}
            own = self._own(list(dict.fromkeys(kinds.values())), head)
            new = {old_id: own[kind] for old_id, kind in kinds.items()}
            counts, wraps = counted(head.files), Counter[str]()
            for old_id, made in new.items():
                wraps[made.key_id] += counts[old_id] + SLACK_USES
            missing = {key_id: count for key_id, count in wraps.items() if count > self._room[key_id]}
            if missing:
                self._reserve(missing, head)
                raise Again
            self._room.subtract(wraps)
            keys = decide_keys.rotated(head.keys, rotation, new, clock_ms())
            moves = {old_id: made.key_id for old_id, made in new.items()}
            envelope = self.envelope(head)
            sealer = main_key(keys).key_id
            tables = []
            for table in head.files:
                if table.keys.keys() & moves.keys():
                    rows = [
                        rewrapped_row(row, [moves.get(key_id) for key_id in key_ids(row)], envelope, head.dataset_id)
                        for row in self.log.tables.rows(table, envelope)
                    ]
                    tables += self.log.tables.write(rows, self.id, sealer, envelope)
                elif table.key_id in moves:
                    tables.append(rewrapped(table, sealer, envelope, head.dataset_id))
                else:
                    tables.append(table)
            return Draft(
                self.operation,
                files=tuple(tables),
                keys=keys,
                uses=self.uses(head),
                first=reach.retention(self.log, head, head.policy),
                ends=self._further(),
            )

        return self.replace_files(files)


class _Refused(Exception):  # noqa: N818 # becomes a ConcurrentChangeError when the job has ended
    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__()
        self.paths = paths
