"""The KEKs of a job: which of them wrap, what plans reserve of them, and what the commit brings (rule 9)."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

from ags_fast.dataset import keys as decide
from ags_fast.dataset.deks import key_ids, rewrapped_row, with_new_keys
from ags_fast.dataset.draft import Again
from ags_fast.dataset.entry import main_key
from ags_fast.dataset.kinds import SLACK_USES, Want, clock_ms
from ags_fast.dataset.plan import MORE_USES, Place, Plan, store_further, store_plan
from ags_fast.errors import PolicyError
from ags_fast.keys.entry import moved
from ags_fast.keys.envelope import in_threads
from ags_fast.keys.stores import rows_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.keks import Keks
    from ags_fast.dataset.log import Log
    from ags_fast.dataset.policy import Policy
    from ags_fast.keys.entry import KeyEntry
    from ags_fast.keys.envelope import Envelope

ASK_AT_ONCE = 8  # calls of the KMS


class JobKeys:
    """The KEKs of one process of a job."""

    def __init__(self, log: Log, operation: str, job_id: str, base: Entry) -> None:
        self._log, self._operation, self._job_id, self._base = log, operation, job_id, base
        self.plans: list[str] = []  # the ids of the job's plan, and of this process' further plans
        self.policy: Policy | None = None  # how the job chooses KEKs, if not as the head's policy has it
        self.uses: Counter[str] = Counter()  # how often each KEK was used, at most: what all these plans reserve
        self._keys: dict[str, KeyEntry] = {}  # KEKs that the job wraps under, to unwrap it again if they leave
        self._new: dict[str, KeyEntry] = {}  # KEKs that this process has made, and that its commit brings
        self._others: dict[str, KeyEntry] = {}  # KEKs that another process of the job has made: brought, too
        self._chosen: dict[Want, str] = {}
        self._spent: set[str] = set()  # KEKs that have no more uses, by what this process has reserved
        self._room: Counter[str] = Counter()  # what this process has reserved, and not yet wrapped
        self._began_ms = clock_ms()
        self._proven: set[str] = set()  # keys in single wrap that this process has seen to open what they wrap

    @classmethod
    def of_plan(cls, log: Log, plan: Plan, head: Entry, further: Mapping[str, KeyEntry]) -> JobKeys:
        """Return the KEKs of a job that another process has begun. further: new ones in further plans."""
        keys = cls(log, plan.operation, plan.job_id, head)
        keys.plans.append(plan.job_id)
        keys._began_ms = plan.time_ms
        keys.uses.update(plan.uses)
        there = log.look(lambda head: {key_id: head.keys.get(key_id) for key_id in plan.uses}, head)
        keys._others = {**further, **plan.new}
        keys._keys = {**keys._others, **{key_id: key for key_id, key in there.items() if key is not None}}
        return keys

    def rows(self, head: Entry) -> list[str]:
        """Return the rows of a key store that this process has made, if any, and that are not of KEKs of the head."""
        return rows_of(key for key_id, key in self._new.items() if key_id not in head.keys)

    @property
    def wraps(self) -> bool:
        """Whether the process has wrapped anything but its plan."""
        return self._room != self.uses

    def begin(self, wants: Mapping[Want, int], ahead: int, facts: Mapping[str, Any] | None, resumable: bool) -> bool:
        """Choose KEKs, and store the plan of the job, which reserves uses of them: see `Job.begin`.

        False: the storage gives no clear answer, so the job needs another id, and other KEKs (rule 2).
        """
        head, limit = self._base, self._policy(self._base).kek_uses
        main, slack = main_key(head.keys), min(SLACK_USES, limit // 16)
        uses = Counter({main.key_id: slack})
        if wants and self._is_old(main):  # documents and tables get a new one, whatever the files have
            wants = {Want.of(main): 0, **wants}
        for kind, key_id in self._choose(wants, head).items():
            if key_id in self._new and kind == Want.of(main):
                uses[key_id] += slack
            uses[key_id] += max(wants[kind], min(wants[kind] + ahead, limit - self._keys[key_id].uses))
        what = clock_ms(), self._new_of(uses), dict(uses), resumable, dict(facts or {})
        plan = Plan(self._operation, self._job_id, None, *what)
        if not store_plan(self._place(head), plan):
            return False
        self._is_stored(plan)
        return True

    def __contains__(self, key_id: str) -> bool:
        return key_id in self._keys or key_id in self._base.keys

    def refresh(self, head: Entry) -> None:
        """Take over what has become of the job's KEKs in a newer head: a master key may have been turned."""
        self._keys |= {key_id: key for key_id in self._keys if (key := head.keys.get(key_id)) is not None}

    def kind_of(self, key_id: str) -> Want:
        """Return the kind of a KEK that the job knows."""
        return Want.of(self._keys[key_id])

    def _policy(self, head: Entry) -> Policy:
        return self.policy or head.policy

    def _is_old(self, key: KeyEntry) -> bool:
        return key.double_wrap and self._policy(self._base).outlived(key.created_ms, clock_ms())

    def _choose(self, wants: Mapping[Want, int], head: Entry) -> dict[Want, str]:
        """Return the ids of the KEKs that are to wrap so many data keys; make those that the head lacks (rule 9)."""
        chosen: dict[Want, KeyEntry] = {}
        now_ms, policy, spent = clock_ms(), self._policy(head), self._spent
        found = self._log.look(
            lambda head: [
                decide.choose(head.keys, kind, count, policy, now_ms, spent) for kind, count in wants.items()
            ],
            head,
        )
        for (kind, count), key in zip(wants.items(), found, strict=True):
            if key is not None:
                chosen[kind] = key
            elif policy.kek_uses < count:
                raise PolicyError(
                    f"one KEK would wrap {count} data keys, and the dataset's policy allows {policy.kek_uses}: "
                    "share it among fewer files by the policy's kek_scope"
                )
        chosen |= self.own([kind for kind in wants if kind not in chosen], head)
        for kind, key in chosen.items():
            self._keys[key.key_id] = key  # one that the head has got since the job began may leave again
            self._chosen[kind] = key.key_id
        return {kind: key.key_id for kind, key in chosen.items()}

    def own(self, kinds: Collection[Want], head: Entry) -> dict[Want, KeyEntry]:
        """Return new KEKs of this process, not under a version of a master key that is gone; make what is missing."""
        own = {
            Want.of(key): key
            for key in self._new.values()
            if key.key_id not in self._spent and not self._is_under_gone(key, head)
        }
        missing = [kind for kind in kinds if kind not in own]
        kms = self._log.kms.for_dataset(head.dataset_id)
        made = in_threads(lambda kind: kind.new_kek(kms), missing, min(ASK_AT_ONCE, len(missing)) or 1)
        for key in (self._log.kek_rows.named(key, self._job_id) for key in made):
            self._new[key.key_id] = self._keys[key.key_id] = own[Want.of(key)] = key
        return {kind: own[kind] for kind in kinds}

    def take(self, kinds: Sequence[Want]) -> list[str]:
        """Return the ids of KEKs of these kinds, which are to wrap data keys: a use of each is reserved (rule 9)."""
        head, counts = self._base, Counter(kinds)
        while True:
            for kind, count in counts.items():
                if not self._serves(kind, count, head):
                    self._chosen.pop(kind, None)
            self._choose({kind: count for kind, count in counts.items() if kind not in self._chosen}, head)
            wanted = {self._chosen[kind]: count for kind, count in counts.items()}
            if all(self._room[key_id] >= count for key_id, count in wanted.items()):
                self._room.subtract(wanted)
                return [self._chosen[kind] for kind in kinds]
            self.reserve(wanted, head)
            head = self._log.head()  # a KEK may have left before it was reserved

    def _serves(self, kind: Want, count: int, head: Entry) -> bool:
        """Whether the KEK that was chosen for a kind may wrap so many more data keys."""
        key_id = self._chosen.get(kind, "")
        key = head.keys.get(key_id)
        if key is None and key_id not in self._new:
            return False
        if kind.double_wrap:
            used = (key.uses if key else 0) + self.uses[key_id] - self._room[key_id]
            if used + count > self._policy(head).kek_uses:
                self._spent.add(key_id)
                return False
        return key is None or key.state == "active"

    def reserve(self, counts: Mapping[str, int], head: Entry) -> None:
        """Store a further plan, before the job wraps what its plans do not reserve (rule 9)."""
        more = {}
        for key_id, count in counts.items():
            if count > self._room[key_id]:  # twice as much as before, so that many files need few plans
                ahead = min(max(MORE_USES, self.uses[key_id]), self._policy(head).kek_uses - self.uses[key_id])
                more[key_id] = max(count - self._room[key_id], ahead)
        self._is_stored(store_further(self._place(head), self._operation, self._job_id, more, self._new_of(more)))

    def _place(self, head: Entry) -> Place:
        return Place(self._log.store, self._log.envelope(head), main_key(head.keys), head.dataset_id)

    def _is_stored(self, plan: Plan) -> None:
        """Take note of what a plan reserves, and put the KEKs that it brings into an external key store (rule 10)."""
        self._log.kek_rows.put(self._base.dataset_id, plan.new.values())
        self.plans.append(plan.job_id)
        self.uses.update(plan.uses)
        self._room.update(plan.uses)

    def _new_of(self, uses: Mapping[str, int]) -> dict[str, KeyEntry]:
        return {key_id: key for key_id, key in self._new.items() if key_id in uses}

    def spend(self, wraps: Mapping[str, int], head: Entry) -> None:
        """Use what is reserved of some KEKs. `Again`: it was not, and now is, so look at the head again (rule 9)."""
        missing = {key_id: count for key_id, count in wraps.items() if count > self._room[key_id]}
        if missing:
            self.reserve(missing, head)
            raise Again  # a KEK may have left before it was reserved
        self._room.subtract(wraps)

    def envelope(self, head: Entry | None = None) -> Envelope:
        """Return what wraps and unwraps under all KEKs that the job knows."""
        return self._log.envelope(head or self._base, self._keys, self._proven)

    def sealed(self, rows: Iterable[FileEntry], kinds: Sequence[Sequence[Want]], dek_length: int) -> list[FileEntry]:
        """Return new files with fresh data keys, wrapped under KEKs that the plan reserves (rule 9).

        Columns that have a key of their own are in `column_keys`. kinds: what `kinds_of_files` has said.
        """
        ids = iter(self.take(list(chain.from_iterable(kinds))))
        planned = (row.with_wraps([(next(ids), b"") for _ in each]) for row, each in zip(rows, kinds, strict=True))
        return with_new_keys(planned, dek_length, self.envelope(), self._base.dataset_id)

    def with_new(self, head: Entry, used: Collection[str]) -> Keks:
        """Return the head's KEKs, and those new ones of the job that are used."""
        brought = {**self._others, **self._new}.items()
        main = main_key(head.keys)
        seals = Want.of(main) if self._is_old(main) else None
        new = {
            key_id: key
            for key_id, key in brought
            if key_id not in head.keys and (key_id in used or Want.of(key) == seals)
        }
        return decide.with_new(head.keys, new, self._policy(head), clock_ms())

    def with_others(
        self, keys: Mapping[str, KeyEntry], head: Entry, olds: Mapping[Want, KeyEntry]
    ) -> dict[str, KeyEntry]:
        """Return KEKs, and those that other processes of the job have made and that may come.

        olds: By kind, a KEK that these take the place of.
        """
        may_come = {
            key_id: key
            for key_id, key in self._others.items()
            if key_id not in head.keys and not self._is_under_gone(key, head)
        }
        return {**may_come, **keys} | {
            key_id: moved(key, olds[Want.of(key)]) for key_id, key in may_come.items() if Want.of(key) in olds
        }

    def under_active(self, rows: Sequence[FileEntry], head: Entry, scoped: bool) -> tuple[FileEntry, ...]:
        """Wrap again the data keys whose KEK has retired or left since, or is not that of the file's path (rule 3d)."""
        kinds = self._kinds(rows, head, scoped)
        moves = [
            [
                None if self._stays(key_id, wrapped, kind, head) else kind
                for (key_id, wrapped, _), kind in zip(row.wraps(""), each, strict=True)
            ]
            for row, each in zip(rows, kinds, strict=True)
        ]
        counts = Counter(kind for each in moves for kind in each if kind is not None)
        chosen = self._choose(counts, head)
        if not counts:
            return tuple(rows)
        self.spend({chosen[kind]: count for kind, count in counts.items()}, head)
        to = [[None if kind is None else chosen[kind] for kind in each] for each in moves]
        envelope = self.envelope(head)
        return tuple(rewrapped_row(row, each, envelope, head.dataset_id) for row, each in zip(rows, to, strict=True))

    def _stays(self, key_id: str, wrapped: bytes, kind: Want, head: Entry) -> bool:
        """Whether a data key may stay under its KEK, and under the version of a master key that has wrapped it."""
        key = head.keys.get(key_id) or self._new.get(key_id) or self._others.get(key_id)
        if key is None or key.state != "active" or Want.of(key) != kind:
            return False
        if key.double_wrap:
            return key_id in head.keys or not self._is_under_gone(key, head)
        gone = {version for master, version in head.gone if master == key.wrapping_key_id}
        return not gone or self._log.kms.key_version(wrapped) not in {None, *gone}

    def _is_under_gone(self, key: KeyEntry, head: Entry) -> bool:
        """Whether a version of a master key that nobody may wrap under wraps a KEK."""
        return key.double_wrap and self._log.version_of(key) in head.gone

    def _kinds(self, rows: Sequence[FileEntry], head: Entry, scoped: bool) -> list[list[Want]]:
        """Return which kinds of KEKs the data keys of files are to have."""
        kind_of = {
            key_id: decide.heir_kind(head.keys, head.keys.get(key_id) or self._keys[key_id])
            for key_id in {key_id for row in rows for key_id in row.key_ids()}
        }
        kinds = [[kind_of[key_id] for key_id in key_ids(row)] for row in rows]
        policy = self._policy(head)
        anew = policy.kek_scope == "partition"  # then files that were renamed get another KEK, too
        mine = [i for i, row in enumerate(rows) if scoped and (anew or row.job_id == self._job_id)]
        scopes = decide.scopes_of(policy, [rows[i].path for i in mine], self._job_id, self._began_ms)
        for i, scope in zip(mine, scopes, strict=True):
            kinds[i] = [kind._replace(scope=scope) if kind.double_wrap else kind for kind in kinds[i]]
        return kinds
