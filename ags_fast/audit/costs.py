"""What jobs on the keys of a dataset would cost: the calls of the KMS, and what they write and remove.

The functions with which the jobs decide are applied to versions in memory, one job after the other. Nothing is asked of
the KMS for it, and nothing written.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec

from ags_fast.dataset import keys as decide
from ags_fast.dataset.change import first_kept
from ags_fast.dataset.deks import key_ids
from ags_fast.dataset.entry import main_key
from ags_fast.dataset.keys import Rotation
from ags_fast.dataset.kinds import GRACE_MS, Want, clock_ms
from ags_fast.dataset.tables import written_again
from ags_fast.keys.entry import KeyEntry, retired

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ags_fast.audit.survey import Survey
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.policy import Policy
    from ags_fast.dataset.tables import Table

NAMES = ("tables", "table_bytes", "files", "file_bytes")


class Cost:
    """What a job would take, done by one process that knows no key when it begins."""

    def __init__(self, rewraps: bool, generates: bool) -> None:
        self.calls, self.keks = Counter[str](), 0
        self.written, self.removed = Counter[str](), Counter[str]()
        self._rewraps, self._generates = rewraps, generates
        self._known: set[bytes | str | None] = set()  # KEKs that the process has unwrapped, as they are wrapped
        self._proven: set[str] = set()  # keys in single wrap that it has seen to open what they wrap

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        return {
            "kms_calls": {name: count for name, count in sorted(self.calls.items()) if count},
            "key_store": {"keks": self.keks},
            "written": {name: self.written[name] for name in NAMES},
            "removed": {name: self.removed[name] for name in ("versions", *NAMES)},
        }

    def unwrap(self, key: KeyEntry, count: int = 1) -> None:
        """Open N keys that a key wraps."""
        if not key.double_wrap:
            self.calls["unwrap"] += count
        elif key.wrap not in self._known:
            self._known.add(key.wrap)
            self.calls["unwrap"] += 1

    def wrap(self, key_id: str, count: int) -> None:
        """Have the KMS itself wrap N data keys. The first one is unwrapped, to see that it opens."""
        self.calls["wrap"] += count
        self._prove(key_id)

    def _prove(self, key_id: str) -> None:
        self.calls["unwrap"] += key_id not in self._proven
        self._proven.add(key_id)

    def make(self, key: KeyEntry) -> None:
        """Have a KEK made, and see that it opens."""
        if key.double_wrap:
            self.calls.update(["generate" if self._generates else "wrap", "unwrap"])
            self._known.add(key.wrapped)

    def move(self, old: KeyEntry, new: KeyEntry, count: int) -> None:
        """Wrap N data keys by another key."""
        if not old.double_wrap and not new.double_wrap and old.wrapping_key_id == new.wrapping_key_id and self._rewraps:
            self.calls["rewrap"] += count
            self._prove(new.key_id)
            return
        self.unwrap(old, count)
        if not new.double_wrap:
            self.wrap(new.key_id, count)

    def rewrap(self, key: KeyEntry, in_place: bool, wrapped: bytes) -> None:
        """Have a KEK wrapped again, and see that it opens. in_place: under the same master key."""
        self.calls.update(["rewrap"] if in_place and self._rewraps else ["unwrap", "wrap"])
        self.calls["unwrap"] += 1
        self._known.add(wrapped)


class Forecast:
    """Jobs that would run one after the other, each in a process of its own. Each finds what the job before it left.

    Args:
        survey: What there is of the dataset.
        rotated: The master keys that count as having a new version in the KMS by then.
    """

    def __init__(self, survey: Survey, rotated: Iterable[str] = ()) -> None:
        self._survey, self._rotated = survey, frozenset(rotated)
        self._entries = list(survey.entries)  # the oldest first
        self._planned = set[str]().union(*(job.keys for job in survey.jobs if job.lives is not False))
        self._fresh: set[bytes | None] = set()  # what the current version of a master key would have wrapped
        # By the paths of tables that are not there yet: what they are copies of, and KEKs and objects in other places.
        self._copies: dict[str, tuple[Sequence[Table], Mapping[str, str], Mapping[str, str]]] = {}
        self._ticks = 0

    # ---- jobs

    def rotate(
        self, what: str, *, from_key_id: str | None = None, documents: bool = False, force_expire: bool = False
    ) -> Cost:
        """Count what `rotate` with these arguments would take."""
        cost, head = self._begin()
        left = from_key_id or main_key(head.keys).wrapping_key_id
        asked = Rotation(from_key_id, None, left, what == "double-wrap", documents)
        keys, files = dict(head.keys), list(head.files)
        if what != "mek":
            keys, files = self._replaced(cost, head, asked)
        todo, _ = decide.to_rewrap((key for key in keys.values() if key.key_id in head.keys), asked, self._is_current)
        for key in todo:
            wrapped = self._wrap()
            cost.rewrap(key, asked.master_of(key) == key.wrapping_key_id, wrapped)
            keys[key.key_id] = decide.rewrapped_as(keys[key.key_id], key.replace(wrapped=wrapped), clock_ms())
        if keys != head.keys or tuple(files) != head.files:
            self._commit(cost, head, keys, tuple(files))
        self._after(cost, force_expire)
        return cost

    def rekey(self, paths: Sequence[str] | None = None) -> Cost:
        """Count what `rekey_files` of these files would take."""
        cost, head = self._begin()
        keys, moves = dict(head.keys), dict[str, str]()
        chosen: dict[str, list[FileEntry]] = {}  # by table
        for table in head.files:
            cost.unwrap(keys[table.key_id])
            rows = self._rows(table)
            mine = [row for row in rows if paths is None or any(fnmatch.fnmatchcase(row.path, p) for p in paths)]
            chosen |= {table.path: mine} if mine else {}
        rows = [*chain.from_iterable(chosen.values())]
        cost.written.update(files=len(rows), file_bytes=sum(row.file_length for row in rows))
        material = Counter(one["wrapping_key_id"] for row in rows for one in row.key_material or ())
        for wrapping_key_id, count in material.items():
            cost.wrap(f"{wrapping_key_id} for key material", count)
        old = Counter(key_id for row in rows for key_id in key_ids(row))
        for key_id, count in old.items():
            cost.unwrap(keys[key_id], count)  # to read
        kinds = self._kinds(head, rows, all(keys[key_id].double_wrap for key_id in old))
        wanted, main = Counter(chain.from_iterable(kinds)), main_key(keys)
        if rows and head.policy.outlived(main.created_ms, clock_ms()):  # documents get a new one, whatever files have
            wanted[Want.of(main)] += 0
        for kind, count in wanted.items():
            new = decide.choose(keys, kind, count, head.policy, clock_ms()) or self._kek(cost, kind, keys)
            cost.unwrap(new, count)  # to write
            if not new.double_wrap:
                cost.wrap(new.key_id, count)
            for row, each in zip(rows, kinds, strict=True):
                moves |= {key_id: new.key_id for key_id, one in zip(key_ids(row), each, strict=True) if one == kind}
        if chosen:
            again = written_again(head.files, chosen, len(rows))
            some = [table for table in head.files if table.path in again]
            made = self._copy(cost, some, moves, {row.file: f"{row.file} again" for row in rows})
            self._commit(cost, head, keys, (*(table for table in head.files if table.path not in again), made))
        self._after(cost)
        return cost

    def sweep(self) -> None:
        """Have dead jobs ended, by an entry."""
        head = self._entries[-1]
        self._commit(Cost(False, False), head, dict(head.keys), head.files)

    def _kinds(self, head: Entry, rows: Sequence[FileEntry], double_wrap: bool) -> list[list[Want]]:
        scopes = head.policy.scopes([row.path for row in rows], "that job", clock_ms())
        masters = [
            {key["column"]: head.keys[key["key_id"]].wrapping_key_id for key in row.column_keys or ()} for row in rows
        ]
        main = main_key(head.keys).wrapping_key_id
        return decide.kinds_of_files(scopes, masters, main, double_wrap)

    def expire(
        self, *, keep: int | None = None, older_than: float | None = None, skip_grace: bool = False, force: bool = False
    ) -> Cost:
        """Count what `expire` with these arguments would take. older_than: in days."""
        cost, head = self._begin()
        self._expire(cost, head.policy.for_expiry(keep, older_than), skip_grace)
        return cost

    # ---- their steps

    def _begin(self) -> tuple[Cost, Entry]:
        kms, head = self._survey.log.kms, self._entries[-1]
        cost = Cost(kms.supports_rewrap, kms.supports_key_generation)
        cost.unwrap(head.keys[head.sealer])
        return cost, head

    def _wrap(self) -> bytes:
        """Return what a master key would have wrapped."""
        self._ticks += 1
        wrapped = f"wrap {self._ticks}".encode()
        self._fresh.add(wrapped)
        return wrapped

    def _kek(self, cost: Cost, kind: Want, keys: dict[str, KeyEntry]) -> KeyEntry:
        """Have a KEK made."""
        wrapped = self._wrap()
        now_ms = clock_ms() + self._ticks  # so that what is made last is the newest
        key = KeyEntry(
            f"new {self._ticks}", kind.wrapping_key_id, wrapped if kind.double_wrap else None, "active", now_ms, 0,
            kind.properties(),
        )  # fmt: skip
        cost.make(key)
        keys[key.key_id] = key
        for old in decide.active(keys, kind)[1:]:
            keys[old.key_id] = retired(old, key.key_id, GRACE_MS, now_ms)
        return key

    def _replaced(self, cost: Cost, head: Entry, asked: Rotation) -> tuple[dict[str, KeyEntry], list[Table]]:
        wraps = self._survey.wraps(head.files)
        olds = decide.to_replace(head.keys, asked, wraps, {table.key_id for table in head.files})
        made: dict[Want, KeyEntry] = {}
        for old in olds.values():
            if (kind := asked.kind_of(old)) not in made:
                made[kind] = self._kek(cost, kind, {})
        new = {old_id: made[asked.kind_of(old)] for old_id, old in olds.items()}
        keys = decide.rotated(head.keys, asked, wraps, new, clock_ms())
        files: list[Table] = []
        sealer = main_key(keys).key_id
        for table in head.files:
            counts = self._survey.wraps([table])
            moved = counts.keys() & new.keys()
            if moved or table.key_id in new:
                cost.unwrap(head.keys[table.key_id])
            if moved:
                for old_id in moved:
                    cost.move(head.keys[old_id], new[old_id], counts[old_id])
                table = self._copy(cost, [table], {old_id: key.key_id for old_id, key in new.items()})
            files.append(msgspec.structs.replace(table, key_id=sealer) if moved or table.key_id in new else table)
        return dict(keys), files

    def _rows(self, table: Table) -> list[FileEntry]:
        """Return the rows of a table, as they are by then."""
        if table.path not in self._copies:
            return [*self._survey.rows(table)]
        before, moves, names = self._copies[table.path]
        return [
            row.with_wraps([(moves.get(key_id, key_id), wrapped) for key_id, wrapped, _ in row.wraps("")])._replace(
                file=names.get(row.file, row.file)
            )
            for table in before
            for row in self._rows(table)
        ]

    def _copy(
        self, cost: Cost, tables: Sequence[Table], moves: Mapping[str, str], names: Mapping[str, str] | None = None
    ) -> Table:
        """Have the rows of tables written as one."""
        self._ticks += 1
        counts = Counter[str]()
        for key_id, count in self._survey.wraps(tables).items():
            counts[moves.get(key_id, key_id)] += count
        made = msgspec.structs.replace(
            tables[0],
            path=f"table {self._ticks}",
            keys=dict(counts),
            rows=sum(table.rows for table in tables),
            length=sum(table.length for table in tables),
            material=any(table.material for table in tables),
        )
        self._copies[made.path] = tables, moves, names or {}
        cost.written.update(tables=1, table_bytes=made.length)
        return made

    def _commit(self, cost: Cost, head: Entry, keys: dict[str, KeyEntry], files: tuple[Table, ...]) -> None:
        cost.keks += sum(head.keys.get(key_id) != key for key_id, key in keys.items()) + len(head.keys.keys() - keys)
        number, same = head.number + 1, head.same if files != head.files else (*head.same, head.number + 1)
        sealer, now_ms = main_key(keys).key_id, clock_ms() + self._ticks
        made = msgspec.structs.replace(
            head, number=number, time_ms=now_ms, keys=keys, files=files, same=same, sealer=sealer
        )
        self._entries.append(made)

    def _after(self, cost: Cost, force_expire: bool = False) -> None:
        """Expire versions after a job. What the policy says is in the entry of its commit."""
        head = self._entries[-1]
        if head.policy.keep is not None and head.number not in head.same:
            self._drop(cost, self._first(head.policy, head.number, head.same))
        if force_expire:
            self._expire(cost, head.policy.replace(keep=1, keep_days=None), True)
        elif head.policy.keep is not None:
            self._expire(cost, head.policy, False)

    def _first(self, policy: Policy, number: int, same: Collection[int]) -> int:
        times = {entry.number: entry.time_ms for entry in self._entries}
        return first_kept(policy, number, self._entries[0].number, same, times, clock_ms() + self._ticks)

    def _expire(self, cost: Cost, policy: Policy, skip_grace: bool) -> None:
        head = self._entries[-1]
        first = self._first(policy, head.number + 1, (*head.same, head.number + 1))
        if first > self._entries[0].number:
            self._commit(cost, head, dict(head.keys), head.files)
            self._drop(cost, first)
        head = self._entries[-1]
        ids = set[str]().union(*map(self._survey.needed, self._entries))
        left = decide.leaving(head.keys, ids, self._planned, skip_grace, clock_ms() + self._ticks)
        if left:
            keys = {key_id: key for key_id, key in head.keys.items() if key_id not in left}
            self._commit(cost, head, keys, head.files)

    def _drop(self, cost: Cost, first: int) -> None:
        """Delete what versions below `first` alone have."""
        head, going = self._entries[-1], [entry for entry in self._entries if entry.number < first]
        self._entries = [entry for entry in self._entries if entry.number >= first]
        tables = {table.path: table for entry in self._entries for table in entry.files}
        gone = {table.path: table for entry in going for table in entry.files if table.path not in tables}
        for entry in self._entries if going else ():
            cost.unwrap(head.keys[entry.sealer])
        if gone:
            for table in (*tables.values(), *gone.values()):
                cost.unwrap(head.keys[table.key_id])
            needed = {row.file for table in tables.values() for row in self._rows(table)}
            sizes = {row.file: row.file_length for table in gone.values() for row in self._rows(table)}
            sizes = {file: size for file, size in sizes.items() if file not in needed}
            cost.removed.update(files=len(sizes), file_bytes=sum(sizes.values()))
            cost.removed.update(tables=len(gone), table_bytes=sum(table.length for table in gone.values()))
        cost.removed.update(versions=len(going))

    def _is_current(self, key: KeyEntry) -> bool:
        current = self._survey.current.get(key.wrapping_key_id)
        if key.wrapped in self._fresh or key.wrapping_key_id in self._rotated or current is None:
            return key.wrapped in self._fresh and current is not None
        return self._survey.version_of(key) == current
