"""What jobs on the keys of a dataset would ask of the KMS, and write: counted ahead, by what its documents say.

Each method does to a picture of the dataset what the job of its name does to the dataset, so that what a second job
finds is what the first would leave. Nothing is asked of the KMS for it, and nothing written.
"""

from __future__ import annotations

import fnmatch
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.entries import FileEntry, wrapped_by
from ags_fast.dataset.keks import GRACE_MS, SLACK_USES, Want, clock_ms, is_idle
from ags_fast.dataset.merging import SMALL_ENTRIES, path_bytes, to_merge
from ags_fast.dataset.policy import DAY_MS, Policy
from ags_fast.dataset.tables import TableRef, chunks, named_keys
from ags_fast.jobs.rotation import to_replace
from ags_fast.keys.entry import REWRAPPED_MS, SCOPE, SUCCESSOR, KeyEntry, for_columns, retired, retires_ms
from ags_fast.keys.stores import DatasetKeyStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ags_fast.dataset.snapshot import Survey
    from ags_fast.dataset.versions import Version


@dataclass
class Cost:
    """What a job would take. Bytes of what it writes are those of what it replaces."""

    calls: Counter[str] = field(default_factory=Counter)  # of the KMS
    keks: int = 0  # of the key store: put in, changed or taken out
    written: Counter[str] = field(default_factory=Counter)  # manifests, manifest_bytes, files, file_bytes
    removed: Counter[str] = field(default_factory=Counter)  # the same, and versions

    def to_json(self) -> dict[str, Any]:
        names = ("manifests", "manifest_bytes", "files", "file_bytes")
        return {
            "kms_calls": {name: count for name, count in sorted(self.calls.items()) if count},
            "key_store": {"keks": self.keks},
            "written": {name: self.written[name] for name in names},
            "removed": {name: self.removed[name] for name in ("versions", *names)},
        }


class Forecast:
    """Jobs that would run one after the other, each in a process of its own that knows no key yet, and does all of the
    work itself. Others that help it unwrap the keys that they need, each of them once more.

    rotated: the master keys of which the KMS is taken to have a new version by then. Of open jobs, those that have died
    are taken to be swept away, and others to go on.
    """

    def __init__(self, survey: Survey, rotated: Iterable[str] = ()) -> None:
        self._survey = survey
        self._kms = survey.opened.kms
        self._rotated = frozenset(rotated)
        self._jobs = [job for job in survey.jobs if job.lives is not False]
        self._keys: dict[str, KeyEntry] = dict(survey.keys)
        self._versions: list[Version] = list(survey.versions)  # the oldest first
        # Manifests that are only in the picture: what they hold, or what they are made of, and the keys they left.
        self._entries: dict[str, list[FileEntry]] = {}
        self._rewritten: dict[str, tuple[TableRef, Mapping[str, str]]] = {}
        self._cost = Cost()
        self._known: set[bytes] = set()  # KEKs that the process has unwrapped, as they are wrapped
        self._proven: set[str] = set()  # keys in single wrap that it has seen to open what they wrap
        self._fresh: set[bytes] = set()  # that the current version of a master key would have wrapped
        self._names = 0

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
        """As `jobs.rotate`."""
        self._begin()
        replaced = from_master or self._main_key().wrapping_key_id
        if what == "mek":
            self._rewrap_keks(master, from_master, replaced)
        else:
            self._rewrap_deks(what, master, from_master, replaced, documents)
        if force_expire:
            self._expire(1, None, True)
        else:
            self._apply_retention()
        return self._cost

    def rekey(self, paths: Sequence[str] | None = None) -> Cost:
        """As `jobs.rekey_files`."""
        self._begin()
        head = self._head()
        refs = head.manifests if head else ()
        chosen: list[FileEntry] = []
        runs: list[list[TableRef]] = []
        rest: list[FileEntry] = []  # of manifests that are small and change: written with the new entries
        for ref in refs:
            kept = runs[-1] if runs and runs[-1] and ref.run and runs[-1][0].run == ref.run else []
            if not kept:
                runs.append(kept)
            entries = self._open_table(ref)
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
                    kept.append(self._table(others, ref.length)._replace(run=ref.run))
        if not chosen or head is None:
            return self._cost
        wraps = wrapped_by(chosen)
        made = self._reserve(chosen, head.policy, all(self._keys[key_id].double_wrap for key_id in wraps))
        self._unwrap(self._document_key())  # of the plan
        self._look_at_jobs()
        for key_id, count in wraps.items():  # to read
            self._unwrap(key_id, count)
        for key_id, count in wrapped_by(made).items():  # to plan, and to write
            if not self._keys[key_id].double_wrap:
                self._cost.calls["wrap"] += count
                self._prove(self._keys[key_id])
            self._unwrap(key_id, count)
        self._cost.written.update(files=len(made), file_bytes=sum(entry.file_length for entry in made))
        nbytes = sum(ref.length for ref in refs) // max(1, sum(ref.entries for ref in refs))
        runs = [run for run in runs if run]
        places = set(to_merge(runs, len(made) + len(rest)))
        merged = [*made, *rest, *(e for place in places for ref in runs[place] for e in self._open_table(ref))]
        new = [self._table(chunk, nbytes * len(chunk)) for chunk in chunks(sorted(merged, key=path_bytes))]
        self._commit([*new, *(ref for place, run in enumerate(runs) if place not in places for ref in run)])
        self._apply_retention()
        return self._cost

    def expire(self, *, keep: int = 1, days: float | None = None, force: bool = False) -> Cost:
        """As `jobs.expire`."""
        self._begin()
        self._expire(keep, days, force)
        return self._cost

    # ---- what the KMS is asked

    def _begin(self) -> None:
        """A process opens the dataset: its key store, and its newest version."""
        self._cost, self._known, self._proven = Cost(), set(), set()
        if isinstance(self._survey.opened.keys, DatasetKeyStore):  # whose document a key seals
            self._unwrap(self._main_key().key_id)
        if (head := self._head()) is not None:
            self._unwrap(head.key_id)

    def _look_at_jobs(self) -> None:
        """At the plans of those that run."""
        for job in self._jobs:
            for key_id in job.opened_by:
                self._unwrap(key_id)

    def _unwrap(self, key_id: str, count: int = 1) -> None:
        """So many keys that it wraps are opened."""
        entry = self._keys[key_id]
        if entry.wrapped is None:
            self._cost.calls["unwrap"] += count
        elif entry.wrapped not in self._known:
            self._known.add(entry.wrapped)
            self._cost.calls["unwrap"] += 1

    def _new_key(self, want: Want) -> KeyEntry:
        self._names += 1
        properties = {} if want.scope is None else {SCOPE: want.scope}
        if want.columns:
            properties["use"] = "columns"
        wrapped = None
        if want.double_wrap:
            self._cost.calls["generate" if self._kms.supports_key_generation else "wrap"] += 1
            self._cost.calls["unwrap"] += 1  # to see that it opens
            wrapped = self._as_wrapped()
            self._known.add(wrapped)
        now = time.time_ns() // 1_000_000 + self._names  # the newest of all
        return KeyEntry(f"new key {self._names}", want.wrapping_key_id, wrapped, "active", now, 0, properties)

    def _as_wrapped(self) -> bytes:
        self._names += 1
        wrapped = f"wrapped {self._names}".encode()
        self._fresh.add(wrapped)
        return wrapped

    # ---- rotations

    def _rewrap_deks(
        self, what: str, master: str | None, from_master: str | None, replaced: str, documents: bool
    ) -> None:
        head = self._head()
        refs = head.manifests if head else ()
        counts = self._counts(refs)

        def target(entry: KeyEntry) -> str:
            return master if master and entry.wrapping_key_id == replaced else entry.wrapping_key_id

        active = [entry for entry in self._keys.values() if entry.state == "active"]
        old = to_replace(active, what, counts, target, documents)
        old = [entry for entry in old if from_master in (None, entry.wrapping_key_id)]
        made: dict[Want, KeyEntry] = {}
        for entry in old:
            if is_idle(entry, counts) and head is not None and entry.created_ms < head.time_ms:
                self._keys[entry.key_id] = retired(entry, None, GRACE_MS, clock_ms())
                continue
            want = Want.of(entry)._replace(wrapping_key_id=target(entry))
            if what == "double-wrap":
                want = want._replace(double_wrap=True, scope=None)
            if entry.double_wrap:
                self._unwrap(entry.key_id)
            if want not in made:
                made[want] = self._new_key(want)
            self._keys[entry.key_id] = retired(entry, made[want].key_id, GRACE_MS, clock_ms())
        self._keys |= {entry.key_id: entry for entry in made.values()}
        self._cost.keks += len(old) + len(made)
        moves = {
            entry.key_id: self._active(entry)
            for entry in self._keys.values()
            if entry.state == "retired" and SUCCESSOR in entry.properties
        }
        needs = {ref.path: {ref.key_id, *self._wraps(ref)} for ref in refs}
        todo = [ref for ref in refs if not needs[ref.path].isdisjoint(moves)]
        if not todo:
            return
        self._unwrap(self._document_key())
        new_refs: dict[str, TableRef] = {}
        for ref in todo:
            self._unwrap(ref.key_id)
            for key_id, count in self._wraps(ref).items():
                if key_id in moves:
                    self._rewrap(self._keys[key_id], self._keys[moves[key_id]], count)
            new_refs[ref.path] = self._rewritten_table(ref, moves)
        self._commit([new_refs.get(ref.path, ref) for ref in refs])

    def _active(self, entry: KeyEntry) -> str:
        while entry.state != "active" and entry.properties.get(SUCCESSOR) in self._keys:
            entry = self._keys[entry.properties[SUCCESSOR]]
        if entry.state != "active":
            fresh = self._new_key(Want.of(entry))
            self._keys[fresh.key_id] = fresh
            return fresh.key_id
        return entry.key_id

    def _rewrap(self, old: KeyEntry, new: KeyEntry, count: int) -> None:
        same_master = old.wrapping_key_id == new.wrapping_key_id
        if not (old.double_wrap or new.double_wrap) and same_master and self._kms.supports_rewrap:
            self._cost.calls["rewrap"] += count
            self._prove(new)
            return
        self._unwrap(old.key_id, count)
        if new.double_wrap:
            self._unwrap(new.key_id)
        else:
            self._cost.calls["wrap"] += count
            self._prove(new)

    def _prove(self, entry: KeyEntry) -> None:
        """One key that it has wrapped is unwrapped again, to see that it opens."""
        if entry.key_id not in self._proven:
            self._proven.add(entry.key_id)
            self._cost.calls["unwrap"] += 1

    def _rewrap_keks(self, master: str | None, from_master: str | None, replaced: str) -> None:
        for entry in list(self._keys.values()):
            if entry.wrapped is None or from_master not in (None, entry.wrapping_key_id):
                continue
            target = master if master and entry.wrapping_key_id == replaced else entry.wrapping_key_id
            same = target == entry.wrapping_key_id
            if same and self._is_current(entry):
                continue
            wrapped = self._as_wrapped()
            if same and self._kms.supports_rewrap:
                self._cost.calls["rewrap"] += 1
            else:
                self._cost.calls.update(unwrap=1, wrap=1)
            self._cost.calls["unwrap"] += 1  # to see that it opens
            self._known.add(wrapped)
            properties = {**entry.properties, REWRAPPED_MS: "0"}
            self._keys[entry.key_id] = entry.replace(wrapped=wrapped, wrapping_key_id=target, properties=properties)
            self._cost.keks += 1

    def _is_current(self, entry: KeyEntry) -> bool:
        current = self._survey.current.get(entry.wrapping_key_id)
        if entry.wrapped in self._fresh:
            return current is not None
        if entry.wrapping_key_id in self._rotated or current is None:
            return False
        return self._survey.version_of(entry) == current

    # ---- rekey

    def _reserve(self, chosen: Sequence[FileEntry], policy: Policy, double_wrap: bool) -> list[FileEntry]:
        """The files as they will be, with the keys that wrap theirs."""
        main = self._main_key().wrapping_key_id
        paths = [entry.path for entry in chosen]
        scopes = policy.scopes(paths, "that job") if double_wrap else [None] * len(chosen)
        wants = []
        uses: Counter[Want] = Counter({Want(main): 0})
        for entry, scope in zip(chosen, scopes, strict=True):
            masters = [self._keys[key["key_id"]].wrapping_key_id for key in entry.column_keys or ()]
            mine = [Want(main, double_wrap, False, scope)]
            mine += [Want(master, double_wrap, master != main, scope) for master in masters]
            for want in mine:
                uses[want] += 1
            wants.append(mine)
        newest: dict[Want, KeyEntry] = {}
        for key in sorted(self._keys.values(), key=lambda key: (key.created_ms, key.key_id)):
            if key.state == "active":
                newest[Want.of(key)] = key
        for want, count in uses.items():
            held = newest.get(want)
            spare = count + (SLACK_USES + len(chosen) // 1000) * (want == Want(main))
            over = held is not None and (
                policy.outlived(held.created_ms, clock_ms()) or not policy.has_room(held.uses, count, spare)
            )
            if held is None or (want.double_wrap and over):
                new = newest[want] = self._new_key(want)
                if held is not None:
                    self._keys[held.key_id] = retired(held, new.key_id, GRACE_MS, clock_ms())
                self._keys[new.key_id] = new
            self._cost.keks += want.double_wrap
        made = []
        for entry, mine in zip(chosen, wants, strict=True):
            first, *rest = (newest[want].key_id for want in mine)
            pairs = zip(entry.column_keys or (), rest, strict=True)
            columns = tuple({**key, "key_id": key_id} for key, key_id in pairs)
            made.append(entry._replace(key_id=first, column_keys=columns or None, file=f"{entry.file} anew"))
        return made

    # ---- expire

    def _apply_retention(self) -> None:
        head = self._head()
        if head is not None and head.policy.keep is not None:
            self._expire(head.policy.keep, head.policy.keep_days, False)

    def _expire(self, keep: int, days: float | None, force: bool) -> None:
        cost, now = self._cost, time.time_ns() // 1_000_000
        self._look_at_jobs()
        for version in self._versions:
            self._unwrap(version.key_id)
        gone = [v for v in self._versions[:-keep] if days is None or v.time_ms < now - days * DAY_MS]
        self._versions = [version for version in self._versions if version not in gone]
        kept = {ref.path: ref for version in self._versions for ref in version.manifests}
        old = {ref.path: ref for version in gone for ref in version.manifests if ref.path not in kept}
        if gone:
            self._unwrap(self._document_key())  # of the plan
        if old:
            needed = {entry.file for ref in kept.values() for entry in self._open_table(ref)}
            for job in self._jobs:
                needed |= job.files()
            files = {entry.file: entry.file_length for ref in old.values() for entry in self._open_table(ref)}
            lengths = [length for file, length in files.items() if file not in needed]
            cost.removed.update(files=len(lengths), file_bytes=sum(lengths))
        cost.removed.update(
            versions=len(gone), manifests=len(old), manifest_bytes=sum(ref.length for ref in old.values())
        )
        used = {version.key_id for version in self._versions}
        used |= {ref.key_id for ref in kept.values()} | set(self._counts(kept.values()))
        for job in self._jobs:
            used |= job.keys
        for entry in list(self._keys.values()):
            over = force or now >= retires_ms(entry)
            if entry.state == "retired" and entry.key_id not in used and over:
                del self._keys[entry.key_id]
                cost.keks += 1
            elif REWRAPPED_MS in entry.properties:
                cost.calls["unwrap"] += 1  # whether or not the process knows it
                cost.keks += 1
                properties = {name: text for name, text in entry.properties.items() if name != REWRAPPED_MS}
                self._keys[entry.key_id] = entry.replace(properties=properties)

    # ---- the picture

    def _head(self) -> Version | None:
        return self._versions[-1] if self._versions else None

    def _main_key(self) -> KeyEntry:
        active = [entry for entry in self._keys.values() if entry.state == "active" and not for_columns(entry)]
        ours = [entry for entry in active if SCOPE not in entry.properties]
        documents = [entry for entry in ours if entry.double_wrap]
        return max(documents or ours or active, key=lambda entry: (entry.created_ms, entry.key_id))

    def _document_key(self) -> str:
        entry = self._main_key()
        if not entry.double_wrap:
            entry = self._new_key(Want(entry.wrapping_key_id))
            self._keys[entry.key_id] = entry
        return entry.key_id

    def _wraps(self, ref: TableRef) -> Counter[str]:
        """How many DEKs each key wraps there."""
        if ref.path in self._entries:
            return wrapped_by(self._entries[ref.path])
        if ref.path not in self._rewritten:
            return self._survey.wraps(ref)
        before, moves = self._rewritten[ref.path]
        counts: Counter[str] = Counter()
        for key_id, count in self._wraps(before).items():
            counts[moves.get(key_id, key_id)] += count
        return counts

    def _counts(self, refs: Iterable[TableRef]) -> Counter[str]:
        """The same of all of these. Those that do not tell are opened."""
        counts: Counter[str] = Counter()
        for ref in refs:
            if ref.keys is None:
                self._unwrap(ref.key_id)
            counts += self._wraps(ref)
        return counts

    def _open_table(self, ref: TableRef) -> list[FileEntry]:
        self._unwrap(ref.key_id)
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

    def _table(self, entries: list[FileEntry], length: int) -> TableRef:
        ref = self._new_ref(length, len(entries), named_keys(wrapped_by(entries)))
        self._entries[ref.path] = entries
        return ref

    def _rewritten_table(self, before: TableRef, moves: Mapping[str, str]) -> TableRef:
        ref = self._new_ref(before.length, before.entries, None)
        self._rewritten[ref.path] = before, moves
        return ref if before.keys is None else ref._replace(keys=named_keys(self._wraps(ref)))

    def _new_ref(self, length: int, count: int, keys: tuple[tuple[str, int], ...] | None) -> TableRef:
        self._names += 1
        self._cost.written.update(manifests=1, manifest_bytes=length)
        return TableRef(f"manifest {self._names}", length, count, self._document_key(), b"", keys)

    def _commit(self, refs: Sequence[TableRef]) -> None:
        head = self._head()
        assert head is not None
        now = time.time_ns() // 1_000_000
        made = head._replace(number=head.number + 1, time_ms=now, manifests=tuple(refs), key_id=self._document_key())
        self._versions.append(made)
