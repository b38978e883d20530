"""A job: what it may write is in its plan, and one entry of the log commits it or ends it."""

from __future__ import annotations

import secrets
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.dataset.entries import FileEntry
from ags_fast.dataset.keks import SLACK_USES, Want, clock_ms
from ags_fast.dataset.names import new_job_id, object_name
from ags_fast.errors import AgsError, ConcurrentChangeError, PolicyError
from ags_fast.keys.entry import KeyEntry
from ags_fast.keys.envelope import binding
from ags_fast.onelog import keys as decide_keys
from ags_fast.onelog import reach
from ags_fast.onelog.change import Change, Wish, next_change
from ags_fast.onelog.errors import Again, JobEndedError, UnknownOutcomeError
from ags_fast.onelog.log import Batch, Draft, Entry, Log, main_key
from ags_fast.onelog.names import job_of, plan_path
from ags_fast.onelog.plan import Plan, read_plan, store_plan
from ags_fast.onelog.tables import rewrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ags_fast.keys.envelope import Envelope
    from ags_fast.onelog.keks import Keks
    from ags_fast.onelog.keys import Rotation

MORE_USES = 64  # data keys that a further plan reserves, at least
TRIES = 20  # ids, until a plan is created with a clear answer


class Committed(NamedTuple):
    """How a job was committed: at this number of the log, with this change; and the head since."""

    number: int
    change: Change
    head: Entry


class Job:
    """An open job of one process. `begin` makes one.

    Attributes:
        id: Is in the name of each object that the job makes.
        plans: The id of its plan, and those of its further plans.
    """

    def __init__(self, log: Log, operation: str, job_id: str) -> None:
        self.log, self.operation, self.id = log, operation, job_id
        self.plans: list[str] = []
        self.resumable = False
        self.base: Entry  # the version that it began on
        self.made: list[str] = []  # objects beside the plan
        self._keys: dict[str, KeyEntry] = {}  # the KEKs that the job wraps under, to unwrap it again if they leave
        self._new: dict[str, KeyEntry] = {}  # KEKs that this process has made, and that its commit brings
        self._others: dict[str, KeyEntry] = {}  # KEKs that another process of the job has made: brought, too
        self._chosen: dict[Want, str] = {}
        self._mine: dict[Want, str] = {}  # the last of `_new` of a kind
        self._uses: Counter[str] = Counter()  # by KEK, what all plans of this object reserve
        self._room: Counter[str] = Counter()  # what this process has reserved, and not yet wrapped

    @classmethod
    def begin(
        cls,
        log: Log,
        operation: str,
        wants: Mapping[Want, int] | None = None,
        *,
        head: Entry | None = None,
        resumable: bool = False,
    ) -> Job:
        """Begin a job: its plan is stored before any other object of the job (rule 2).

        Args:
            log: The log.
            operation: What the job does.
            wants: How many data keys it wraps under each kind of KEK.
            head: The version that the job begins on; None: the newest one.
            resumable: Whether other processes may go on with it.
        """
        head = head or log.head()
        for _ in range(TRIES):
            job = cls(log, operation, new_job_id())
            job.resumable = resumable
            job.base = head
            uses = Counter({main_key(head.keys).key_id: SLACK_USES})
            for kind, count in (wants or {}).items():
                uses[job._choose(kind, count, head)] += count
            if job._store_plan(job.id, None, uses, head):
                return job
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
        if plan is None or not plan.resumable or plan.of is not None or job_id in head.over:
            raise JobEndedError(f"the job {job_id} is over, or no other process can go on with it")
        job = cls(log, plan.operation, job_id)
        job.resumable = True
        job.base = head
        job.plans.append(job_id)
        job._uses.update(plan.uses)
        there = log.look(lambda head: {key_id: head.keys.get(key_id) for key_id in plan.uses}, head)
        job._keys = {**plan.new, **{key_id: key for key_id, key in there.items() if key is not None}}
        job._others = dict(plan.new)
        return job

    def _choose(self, kind: Want, count: int, head: Entry) -> str:
        """Return the id of the KEK of a kind that is to wrap; make one if the head has none (rule 9)."""
        now_ms = clock_ms()
        key = self.log.look(lambda head: decide_keys.choose(head.keys, kind, count, head.policy, now_ms), head)
        if key is None:
            if head.policy.kek_uses < count:
                raise PolicyError(f"one KEK would wrap {count} data keys: the policy allows {head.policy.kek_uses}")
            key = self._own(kind, head)
        self._keys[key.key_id] = key  # one that the head has got since the job began may leave again
        self._chosen[kind] = key.key_id
        return key.key_id

    def _own(self, kind: Want, head: Entry) -> KeyEntry:
        """Return a new KEK of this process, not under a version of a master key that is gone; make it if need be."""
        key = self._new.get(self._mine.get(kind, ""))
        if key is None or self.log.version_of(key) in head.gone:
            key = kind.new_kek(self.log.kms.for_dataset(head.dataset_id))
            self._new[key.key_id] = self._keys[key.key_id] = key
            self._mine[kind] = key.key_id
        return key

    def _store_plan(self, plan_id: str, of: str | None, uses: Mapping[str, int], head: Entry) -> bool:
        """Store a plan. False: without a clear answer, so another id is needed, and another KEK."""
        new = {key_id: key for key_id, key in self._new.items() if key_id in uses}
        if not store_plan(
            self.log, Plan(self.operation, plan_id, of, clock_ms(), new, dict(uses), self.resumable), head
        ):
            return False
        self.plans.append(plan_id)
        self._uses.update(uses)
        self._room.update(uses)
        return True

    def reserve(self, counts: Mapping[str, int], head: Entry) -> None:
        """Store a further plan, before the job wraps what its plans do not reserve (rule 9).

        Args:
            counts: How many data keys it wraps under each KEK.
            head: The head.
        """
        for _ in range(TRIES):
            uses = {key_id: max(count, MORE_USES) for key_id, count in counts.items()}
            if self._store_plan(new_job_id(), self.id, uses, head):
                return
        raise UnknownOutcomeError(f"{self.log.store.url} does not say whether it has stored a plan: try again")

    # ---- writing files

    def new_file(self, path: str, kind: Want, *, format: str = "ags1", block_size: int = 1 << 20) -> FileEntry:
        """Return the row of a new file: a fresh data key, wrapped for an object that only this job writes."""
        head = self.base
        key_id = self._chosen.get(kind) or self._choose(kind, 1, head)
        while self._room[key_id] < 1:
            self.reserve({key_id: 1}, head)
            head = self.log.head()  # a KEK may have left before it was reserved
            if key_id not in self._new and key_id not in head.keys:
                key_id = self._choose(kind, 1, head)
        self._room[key_id] -= 1
        file = object_name(path, f"{self.id}-{secrets.token_hex(4)}", format=format)
        wrapped = self.envelope(head).wrap(key_id, secrets.token_bytes(16), binding(head.dataset_id, "dek", file))
        self.made.append(file)
        size = block_size if format == "ags1" else 0
        return FileEntry(
            path, file, format, 0, 0, size, key_id, wrapped, None, secrets.token_bytes(16), self.id, None, None, None,
            path, "",
        )  # fmt: skip

    def envelope(self, head: Entry) -> Envelope:
        """Return what wraps and unwraps under all KEKs that the job knows."""
        return self.log.envelope(head, self._keys)

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

        def decide(head: Entry, plans: Mapping[str, float]) -> Draft | None:
            nonlocal last
            last = Change()
            if wish.batch is not None and head.has_batch(*wish.batch):
                return None
            last = change = self._change(wish, head)
            if wish.whole and change.refused:
                raise _Refused(change.refused)
            if not (change.add or change.remove or wish.policy or wish.batch):
                return None
            rows = self._under_active(change.add, head)
            last = change = Change(rows, change.remove, change.refused)
            return self._draft(head, wish, change)

        return self._append(decide, lambda: last)

    def replace_files(self, files: Callable[[Entry], Draft | None]) -> Committed:
        """Commit a draft that is decided from the head alone: a rotation, a restored version."""
        return self._append(lambda head, plans: files(head), Change)

    def _append(
        self, decide: Callable[[Entry, Mapping[str, float]], Draft | None], change: Callable[[], Change]
    ) -> Committed:
        def noted(head: Entry, plans: Mapping[str, float]) -> Draft | None:
            self._keys |= {key_id: key for key_id in self._keys if (key := head.keys.get(key_id)) is not None}
            draft = decide(head, plans)
            # A draft also names tables that were there before: those are not the job's to delete.
            self.made += [table.path for table in (draft and draft.files) or () if job_of(table.path) == self.id]
            return draft

        try:
            number, head = self.log.append(self, noted)
        except (JobEndedError, UnknownOutcomeError):
            raise
        except _Refused as refused:
            if (done := self.give_up()) is not None:
                return Committed(done[0], change(), done[1])
            more = f" and {len(refused.paths) - 1} more" if len(refused.paths) > 1 else ""
            raise ConcurrentChangeError(
                f"another job has changed {refused.paths[0]!r}{more}, or a file or folder in that place, meanwhile: "
                "nothing was committed"
            ) from None
        except (AgsError, OSError):
            if (done := self.give_up()) is not None:
                return Committed(done[0], change(), done[1])
            raise
        if self.id in head.over:
            self._end(head)
        else:  # nothing was to be committed, and what was wrapped counts all the same (rule 5)
            self.give_up()
        return Committed(number, change(), head)

    def give_up(self) -> tuple[int, Entry] | None:
        """End the job without a commit (rule 5), and delete its objects.

        Returns:
            None; or the number at which the job was committed after all, and the head.
        """
        try:
            done = self.log.append(
                self, lambda head, plans: Draft("end", ends=(self.id, *self._further()), uses=self.uses())
            )
        except JobEndedError:
            for path in self.made:
                with suppress(OSError):  # left to a sweep
                    self.log.store.delete(path)
            self._delete_plans(self.log.head())
            return None
        self._end(done[1])
        return done

    def _end(self, head: Entry) -> None:
        """Delete the plan, and what nothing names (rule 6). What fails is left to a sweep."""
        with suppress(OSError, AgsError):
            self._delete_plans(head)
            reach.clean(self.log, head)
            named = head.named()
            if left := [path for path in self.made if path.startswith("_ags/") and path not in named]:
                reach.delete(self.log, left)

    def _delete_plans(self, head: Entry) -> None:
        """Delete the job's plans. A further plan that the head has not in `over` is left: a sweep adds its uses."""
        for plan in reversed(self.plans):
            if plan == self.id or plan in head.over:
                self.log.store.delete(plan_path(plan))

    def _further(self) -> list[str]:
        return self.plans[1:]

    def uses(self) -> dict[str, int]:
        """Return how often each KEK was used, at most. The entry that puts the job in `over` adds it."""
        return dict(self._uses)

    def _change(self, wish: Wish, head: Entry) -> Change:
        tables, envelope = self.log.tables, self.log.envelope(head)
        self._at = tables.find(head.files, wish.paths_around(), envelope)
        below = tables.below(head.files, wish.new_paths(), envelope)
        return next_change(wish, {path: row.file for path, (_, row) in self._at.items()}, below.keys())

    def _draft(self, head: Entry, wish: Wish, change: Change) -> Draft:
        """Return what a wish changes in the head; new tables are written here (rule 3e)."""
        policy = wish.policy or head.policy
        keys = self.keys_with_new(head, {key_id for row in change.add for key_id in row.key_ids()})
        files = head.files
        if change.add or change.remove:
            gone = {path: self._at[path][0] for path in change.remove}
            sealer = main_key(keys).key_id
            files = self.log.tables.replaced(head.files, gone, change.add, self.id, sealer, self.envelope(head))
        first = reach.retention(self.log, head, policy) if change.add or change.remove else None
        streams = head.streams
        if wish.batch is not None:
            streams = (*(one for one in streams if one.stream != wish.batch[0]), Batch(*wish.batch, clock_ms()))
        return Draft(
            wish.operation,
            files=files,
            keys=keys,
            uses=self.uses(),
            first=first,
            policy=policy,
            streams=streams,
            ends=self._further(),
        )

    def keys_with_new(self, head: Entry, used: Collection[str]) -> Keks:
        """Return the head's KEKs, and those new ones of the job that are used."""
        brought = {**self._others, **self._new}.items()
        new = {key_id: key for key_id, key in brought if key_id in used and key_id not in head.keys}
        return decide_keys.with_new(head.keys, new, head.policy, clock_ms())

    def _under_active(self, rows: Sequence[FileEntry], head: Entry) -> tuple[FileEntry, ...]:
        """Wrap again the data keys whose KEK has retired or left since they were wrapped (rule 3d)."""
        moves: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for key_id, count in Counter(key_id for row in rows for key_id in row.key_ids()).items():
            there = head.keys.get(key_id)
            key = self._new.get(key_id) or self._others.get(key_id)
            own = key is not None and self.log.version_of(key) not in head.gone
            if (there is None and not own) or (there is not None and there.state != "active"):
                moves[key_id] = self._choose(Want.of(there or self._keys[key_id]), count, head)
                counts[moves[key_id]] += count
        missing = {key_id: count for key_id, count in counts.items() if count > self._room[key_id]}
        if missing:
            self.reserve(missing, head)
            raise Again  # look at the head again: a KEK may have left before it was reserved
        if not moves:
            return tuple(rows)
        self._room.subtract(counts)
        envelope = self.envelope(head)
        return tuple(_moved(row, moves, envelope, head.dataset_id) for row in rows)

    # ---- whole jobs over KEKs

    def rotate(self, rotation: Rotation) -> Committed:
        """Replace KEKs by new ones, and wrap every data key of the newest version under the new ones.

        The data is not touched. KEKs that older versions need stay, retired.
        """

        def files(head: Entry) -> Draft | None:
            envelope, counted = self.envelope(head), self.log.tables.counted
            counts, wraps = counted(head.files, envelope), Counter[str]()
            used = counts.keys() | {table.key_id for table in head.files}
            olds = decide_keys.to_replace(head.keys, rotation, used)
            new = {old.key_id: self._own(rotation.kind_of(old), head) for old in olds.values()}
            for old_id, made in new.items():
                wraps[made.key_id] += counts[old_id] + SLACK_USES
            missing = {key_id: count for key_id, count in wraps.items() if count > self._room[key_id]}
            if missing:
                self.reserve(missing, head)
                raise Again
            self._room.subtract(wraps)
            keys = decide_keys.rotated(head.keys, rotation, new, clock_ms())
            moves = {old_id: made.key_id for old_id, made in new.items()}
            envelope = self.envelope(head)
            sealer = main_key(keys).key_id
            tables = []
            for table in head.files:
                if counted([table], envelope).keys() & moves.keys():
                    rows = [
                        _moved(row, moves, envelope, head.dataset_id) for row in self.log.tables.rows(table, envelope)
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
                uses=self.uses(),
                first=reach.retention(self.log, head, head.policy),
                ends=self._further(),
            )

        return self.replace_files(files)


class _Refused(Exception):  # noqa: N818 # becomes a ConcurrentChangeError when the job has ended
    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__()
        self.paths = paths


def _moved(row: FileEntry, moves: Mapping[str, str], envelope: Envelope, dataset_id: str) -> FileEntry:
    """Return a row with its data keys under other KEKs."""
    if row.key_ids().isdisjoint(moves):
        return row
    wraps = []
    for key_id, wrapped, bound in row.wraps(dataset_id):
        to = moves.get(key_id)
        wraps.append(
            (key_id, wrapped) if to is None else (to, envelope.wrap(to, envelope.unwrap(key_id, wrapped, bound), bound))
        )
    return row.with_wraps(wraps)
