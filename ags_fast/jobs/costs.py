"""What jobs on the keys of a dataset would cost: the calls of the KMS, and what they write and remove.

The jobs' own decisions (`ags_fast.dataset.decide`) are applied to a snapshot, one job after the other. Nothing is asked
of the KMS for it, and nothing written.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ags_fast.dataset import decide
from ags_fast.dataset.entries import FileEntry, wrapped_by
from ags_fast.dataset.keks import GRACE_MS, clock_ms
from ags_fast.dataset.merging import SMALL_ENTRIES, path_bytes, to_merge
from ags_fast.dataset.policy import DAY_MS
from ags_fast.dataset.tables import TableRef, chunks, named_keys
from ags_fast.keys.entry import KeyEntry
from ags_fast.keys.stores import DatasetKeyStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ags_fast.dataset.decide import Change, Rotation
    from ags_fast.dataset.versions import Version
    from ags_fast.jobs.survey import Survey


@dataclass
class Cost:
    """What a job would take. The bytes of what a job writes are taken to be those of what it replaces."""

    calls: Counter[str] = field(default_factory=Counter)  # of the KMS
    keks: int = 0  # of the key store: put in, changed or taken out
    written: Counter[str] = field(default_factory=Counter)  # manifests, manifest_bytes, files, file_bytes
    removed: Counter[str] = field(default_factory=Counter)  # the same, and versions

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        names = ("manifests", "manifest_bytes", "files", "file_bytes")
        return {
            "kms_calls": {name: count for name, count in sorted(self.calls.items()) if count},
            "key_store": {"keks": self.keks},
            "written": {name: self.written[name] for name in names},
            "removed": {name: self.removed[name] for name in ("versions", *names)},
        }


class Process:
    """A process that knows no key when it begins, and does all of a job's work itself. Counts its calls of the KMS."""

    def __init__(self, rewraps: bool, generates: bool) -> None:
        self.cost = Cost()
        self._rewraps = rewraps
        self._generates = generates
        self._known: set[bytes] = set()  # KEKs that it has unwrapped, as they are wrapped
        self._proven: set[str] = set()  # keys in single wrap that it has seen to open what they wrap

    def unwrap(self, key: KeyEntry, count: int = 1) -> None:
        """Open N keys that a key wraps."""
        if key.wrapped is None:
            self.cost.calls["unwrap"] += count
        elif key.wrapped not in self._known:
            self._known.add(key.wrapped)
            self.cost.calls["unwrap"] += 1

    def wrap(self, key: KeyEntry, count: int) -> None:
        """Wrap N keys by a key."""
        if key.wrapped is not None:
            self.unwrap(key)
            return
        self.cost.calls["wrap"] += count
        self._prove(key)

    def wrap_bare(self, wrapping_key_id: str, count: int) -> None:
        """Have the KMS wrap N keys for the key material of files."""
        self.cost.calls["wrap"] += count
        self._prove(KeyEntry(f"{wrapping_key_id} for key material", wrapping_key_id))

    def rewrap(self, old: KeyEntry, new: KeyEntry, count: int) -> None:
        """Wrap N keys that `old` wraps by `new`."""
        same_master = old.wrapping_key_id == new.wrapping_key_id
        if not (old.double_wrap or new.double_wrap) and same_master and self._rewraps:
            self.cost.calls["rewrap"] += count
            self._prove(new)
            return
        self.unwrap(old, count)
        self.wrap(new, count)

    def make(self, key: KeyEntry) -> None:
        """Have a KEK made, and see that it opens."""
        if key.wrapped is not None:
            self.cost.calls.update(["generate" if self._generates else "wrap", "unwrap"])
            self._known.add(key.wrapped)

    def wrap_kek(self, wrapped: bytes, in_place: bool) -> None:
        """Have a KEK wrapped again, and see that it opens. in_place: under the same master key."""
        self.cost.calls.update(["rewrap"] if in_place and self._rewraps else ["unwrap", "wrap"])
        self.cost.calls["unwrap"] += 1
        self._known.add(wrapped)

    def _prove(self, key: KeyEntry) -> None:
        """Unwrap one key that a key has wrapped, to see that it opens."""
        if key.key_id not in self._proven:
            self._proven.add(key.key_id)
            self.cost.calls["unwrap"] += 1


class Forecast:
    """Jobs that would run one after the other, each in a process of its own. Each finds what the job before it left.

    Other processes that help unwrap the keys that they need, each of them once more. Dead jobs count as swept away, and
    other open jobs as running.

    Args:
        survey: What there is of the dataset.
        rotated: The master keys that count as having a new version in the KMS by then.
    """

    def __init__(self, survey: Survey, rotated: Iterable[str] = ()) -> None:
        self._survey = survey
        self._rotated = frozenset(rotated)
        jobs = tuple(job for job in survey.jobs if job.lives is not False)
        self._now = replace(survey.snapshot, jobs=jobs)
        # Manifests that do not exist yet: what they hold, or what they are made of, and the keys they left.
        self._entries: dict[str, list[FileEntry]] = {}
        self._rewritten: dict[str, tuple[TableRef, Mapping[str, str]]] = {}
        self._fresh: set[bytes] = set()  # KEKs that the current version of a master key would have wrapped
        self._ticks = 0

    # ---- jobs

    def rotate(
        self,
        what: str,
        *,
        master: str | None = None,
        from_master: str | None = None,
        documents: bool = False,
        force_expire: bool = False,
    ) -> Cost:
        """Count what `jobs.rotate` with these arguments would take."""
        process = self._begin()
        left = from_master or self._main_key().wrapping_key_id
        asked = decide.Rotation(what, master, from_master, left, documents)
        if what == "mek":
            self._rewrap_keks(process, asked)
        else:
            self._replace_keks(process, asked)
        if force_expire:
            self._expire(process, 1, None, True)
        else:
            self._apply_retention(process)
        return process.cost

    def rekey(self, paths: Sequence[str] | None = None) -> Cost:
        """Count what `jobs.rekey_files` of these files would take."""
        process, head = self._begin(), self._now.head
        refs = head.manifests if head else ()
        chosen: list[FileEntry] = []
        runs: list[list[TableRef]] = []
        rest: list[FileEntry] = []  # of manifests that are small and change: written with the new entries
        for ref in refs:
            kept = runs[-1] if runs and runs[-1] and ref.run and runs[-1][0].run == ref.run else []
            if not kept:
                runs.append(kept)
            entries = self._open_table(process, ref)
            mine = [e for e in entries if paths is None or any(fnmatch.fnmatchcase(e.path, p) for p in paths)]
            chosen += mine
            if not mine:
                kept.append(ref)
            elif len(mine) < len(entries):
                names = {entry.path for entry in mine}
                others = [entry for entry in entries if entry.path not in names]
                if len(others) < SMALL_ENTRIES:
                    rest += others
                else:
                    kept.append(self._table(process, others, ref.length)._replace(run=ref.run))
        if not chosen or head is None:
            return process.cost
        made = self._reserve(process, chosen)
        process.unwrap(self._main_key())  # of the plan
        self._look_at_jobs(process)
        for key_id, count in wrapped_by(chosen).items():  # to read
            process.unwrap(self._now.keys[key_id], count)
        for key_id, count in wrapped_by(made).items():  # to plan, and to write
            process.wrap(self._now.keys[key_id], count)
            process.unwrap(self._now.keys[key_id], count)
        for key_id, count in wrapped_by(entry for entry in made if entry.key_material is not None).items():
            process.wrap_bare(self._now.keys[key_id].wrapping_key_id, count)
        process.cost.written.update(files=len(made), file_bytes=sum(entry.file_length for entry in made))
        nbytes = sum(ref.length for ref in refs) // max(1, sum(ref.entries for ref in refs))
        runs = [run for run in runs if run]
        places = set(to_merge(runs, len(made) + len(rest)))
        merged = [*made, *rest]
        merged += [e for place in places for ref in runs[place] for e in self._open_table(process, ref)]
        new = [self._table(process, chunk, nbytes * len(chunk)) for chunk in chunks(sorted(merged, key=path_bytes))]
        self._commit(head, [*new, *(ref for i, run in enumerate(runs) if i not in places for ref in run)])
        self._apply_retention(process)
        return process.cost

    def expire(self, *, keep: int = 1, older_than: float | None = None, force: bool = False) -> Cost:
        """Count what `jobs.expire` with these arguments would take. older_than: in days."""
        process = self._begin()
        self._expire(process, keep, older_than, force)
        return process.cost

    # ---- their steps

    def _begin(self) -> Process:
        """Return a process that has opened the key store and the newest version."""
        kms = self._survey.opened.kms
        process = Process(kms.supports_rewrap, kms.supports_key_generation)
        if isinstance(self._survey.opened.keys, DatasetKeyStore):  # whose document a key seals
            process.unwrap(self._main_key())
        if self._now.head is not None:
            process.unwrap(self._now.keys[self._now.head.key_id])
        return process

    def _look_at_jobs(self, process: Process) -> None:
        """Open the plans of running jobs."""
        for job in self._now.jobs:
            for key_id in job.opened_by:
                process.unwrap(self._now.keys[key_id])

    def _tick(self) -> int:
        """Return the time, later with each call, so that what is made last is the newest."""
        self._ticks += 1
        return clock_ms() + self._ticks

    def _apply(self, process: Process, change: Change) -> None:
        """Apply a change of keys, and count the calls that make the new keys."""
        for key_id, key in change.keys.items():
            if key is not None and key_id not in self._now.keys:
                process.make(key)
                self._fresh |= {key.wrapped} if key.wrapped else set()
        self._now = change.apply_to(self._now, self._tick())

    def _replace_keks(self, process: Process, asked: Rotation) -> None:
        self._count(process, self._now.head.manifests if self._now.head else ())
        change = decide.replace_keks(self._now, asked, {}, GRACE_MS, self._tick())
        for old_id, new in change.successors.items():
            if new is not None and (old := self._now.keys[old_id]).double_wrap:
                process.unwrap(old)
        counted, keks = decide.counted_moves(self._now, change), set(change.keys)
        self._apply(process, change)
        before = self._now.head
        change = decide.rewrite_manifests(self._now, {}, self._tick())
        keks |= change.keys.keys()
        moved = {(ref.path, old) for ref in change.rewrites for old in change.moves.keys() & self._now.wraps(ref)}
        heirs = {change.moves[old] for _, old in moved - counted} & self._now.keys.keys()
        keks |= {key_id for key_id in heirs if self._now.keys[key_id].double_wrap}  # which count what moves to them
        process.cost.keks += len(keks)
        if not (change.rewrites or change.reseals) or before is None:
            return
        keys = self._now.keys
        process.unwrap(self._main_key())
        self._apply(process, change)
        for ref in change.rewrites:
            process.unwrap(keys[ref.key_id])
            for key_id, count in self._now.wraps(ref).items():
                if key_id in change.moves:
                    process.rewrap(keys[key_id], self._now.keys[change.moves[key_id]], count)
            process.cost.written.update(manifests=1, manifest_bytes=ref.length)
        assert self._now.head is not None
        for old_ref, ref in zip(before.manifests, self._now.head.manifests, strict=True):
            if ref != old_ref:
                self._rewritten[ref.path] = old_ref, change.moves

    def _rewrap_keks(self, process: Process, asked: Rotation) -> None:
        todo, _ = decide.rewrap_keks(self._now.keys.values(), asked, self._is_current, False)
        wrapped: dict[bytes | None, KeyEntry] = {}
        for entry in todo:
            master = asked.master_of(entry)
            fresh = f"wrapped {self._tick()} {entry.key_id}".encode()
            process.wrap_kek(fresh, master == entry.wrapping_key_id)
            self._fresh.add(fresh)
            wrapped[entry.wrapped] = entry.replace(wrapped=fresh, wrapping_key_id=master)
        changes = decide.put_in_wraps(todo, wrapped, self._tick())
        process.cost.keks += len(changes)
        self._now = decide.Change(changes).apply_to(self._now, self._tick())

    def _is_current(self, entry: KeyEntry) -> bool:
        current = self._survey.current.get(entry.wrapping_key_id)
        if entry.wrapped in self._fresh:
            return current is not None
        if entry.wrapping_key_id in self._rotated or current is None:
            return False
        return self._survey.version_of(entry) == current

    def _reserve(self, process: Process, chosen: Sequence[FileEntry]) -> list[FileEntry]:
        """Return the files as they will be, with the ids of the keys that will wrap their data keys."""
        keys, policy, main = self._now.keys, self._now.policy, self._main_key().wrapping_key_id
        double_wrap = all(keys[key_id].double_wrap for key_id in wrapped_by(chosen))
        masters = [{k["column"]: keys[k["key_id"]].wrapping_key_id for k in e.column_keys or ()} for e in chosen]
        paths = [entry.path for entry in chosen]
        kinds, uses = decide.kinds_for_files(paths, masters, main, double_wrap, policy, "that job", self._tick())
        change = decide.reserve(keys.values(), uses, policy, {}, self._tick())
        process.cost.keks += len(change.keys)
        self._apply(process, change)
        made = decide.with_keys(chosen, kinds, masters, change.chosen)
        return [entry._replace(file=f"{entry.file} of that job") for entry in made]

    def _apply_retention(self, process: Process) -> None:
        policy = self._now.policy
        if policy.keep is not None:
            self._expire(process, policy.keep, policy.keep_days, False)

    def _expire(self, process: Process, keep: int, days: float | None, force: bool) -> None:
        self._look_at_jobs(process)
        for version in self._now.versions:
            process.unwrap(self._now.keys[version.key_id])
        change = decide.expire_versions(self._now, keep, None if days is None else days * DAY_MS, self._tick())
        if change.versions:
            process.unwrap(self._main_key())  # of the plan
        self._apply(process, change)
        kept, old = self._now.manifests(), change.manifests
        if old:
            needed = {entry.file for ref in kept.values() for entry in self._open_table(process, ref)}
            needed = needed.union(*(self._survey.files_of(job) for job in self._now.jobs))
            files = {entry.file: entry.file_length for ref in old for entry in self._open_table(process, ref)}
            lengths = [length for file, length in files.items() if file not in needed]
            process.cost.removed.update(files=len(lengths), file_bytes=sum(lengths))
        sizes = {"manifests": len(old), "manifest_bytes": sum(ref.length for ref in old)}
        process.cost.removed.update(versions=len(change.versions), **sizes)
        self._count(process, kept.values())
        change = decide.expire_keys(self._now, force, self._tick())
        process.cost.calls["unwrap"] += len(change.checks)  # whether or not the process knows them
        process.cost.keks += len(change.keys)
        self._apply(process, change)

    # ---- the picture

    def _main_key(self) -> KeyEntry:
        return decide.main_key(self._now.keys.values())

    def _count(self, process: Process, refs: Iterable[TableRef]) -> None:
        """Open the manifests whose references do not name the keys in them."""
        for ref in refs:
            if ref.keys is None:
                process.unwrap(self._now.keys[ref.key_id])

    def _open_table(self, process: Process, ref: TableRef) -> list[FileEntry]:
        process.unwrap(self._now.keys[ref.key_id])
        return self._read(ref)

    def _read(self, ref: TableRef) -> list[FileEntry]:
        if ref.path in self._entries:
            return self._entries[ref.path]
        if ref.path not in self._rewritten:
            return self._survey.entries(ref)
        before, moves = self._rewritten[ref.path]
        return [
            entry.with_wraps([(moves.get(key_id, key_id), wrapped) for key_id, wrapped, _ in entry.wraps("")])
            for entry in self._read(before)
        ]

    def _table(self, process: Process, entries: list[FileEntry], length: int) -> TableRef:
        wraps = wrapped_by(entries)
        path = f"manifest {self._tick()}"
        process.cost.written.update(manifests=1, manifest_bytes=length)
        self._entries[path] = entries
        self._now = replace(self._now, counts={**self._now.counts, path: wraps})
        return TableRef(path, length, len(entries), self._main_key().key_id, b"", named_keys(wraps))

    def _commit(self, head: Version, refs: Sequence[TableRef]) -> None:
        sealer = self._main_key().key_id
        made = head._replace(number=head.number + 1, time_ms=self._tick(), manifests=tuple(refs), key_id=sealer)
        self._now = replace(self._now, versions=(*self._now.versions, made))
