"""Rotation of the keys above the data keys. No file of data is written.

One entry of the log has the new KEKs, the tables with each data key wrapped again, and the KEKs of older versions as
the current version of their master key wraps them. Until that entry is there, nothing has changed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Unpack, get_args

from ags_fast._threads import thread_count
from ags_fast._types import Rotated, check_choice
from ags_fast.dataset import keys as decide_keys
from ags_fast.dataset import reach
from ags_fast.dataset.access import Access
from ags_fast.dataset.draft import Again, Draft
from ags_fast.dataset.entry import main_key
from ags_fast.dataset.job import Job
from ags_fast.dataset.keks import Keks
from ags_fast.dataset.keys import Rotation
from ags_fast.dataset.kinds import clock_ms
from ags_fast.dataset.names import new_job_id
from ags_fast.dataset.plan import copy_path, read_copies, read_copy
from ags_fast.engines.base import Engine, checked
from ags_fast.engines.local import LocalEngine, client_for
from ags_fast.errors import KeyAccessError, PolicyError
from ags_fast.jobs.arguments import Reach, milliseconds
from ags_fast.jobs.bars import make_bar
from ags_fast.jobs.copying import CopyContext, CopyTask, table_row
from ags_fast.jobs.results import JobResult, Row, describe
from ags_fast.jobs.results import counted as counted_job
from ags_fast.jobs.retention import apply_retention, expire_versions
from ags_fast.jobs.run import UNREADABLE, take_up, warn_of_dead
from ags_fast.keys.entry import SUCCESSOR, KeyEntry
from ags_fast.keys.envelope import Envelope, in_threads
from ags_fast.keys.kek import rewrap_kek
from ags_fast.keys.kms import Kms, KmsClient, as_kms, check_key_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ags_fast.dataset.access import Folder
    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.job import Rewrite
    from ags_fast.dataset.log import Log
    from ags_fast.dataset.plan import Copy
    from ags_fast.dataset.tables import Table
    from ags_fast.jobs.results import Progress

WHATS = get_args(Rotated)
GRACE = timedelta(days=7)
CONCURRENCY = 8  # calls of a KMS at once
BATCH = 1000  # KEKs, at least, whose new wraps one entry has
BATCHES = 4  # entries, at most, for all KEKs
LOCAL_WORK, KMS_WORK = 1 << 8, 1 << 18  # what one data key costs, in bytes of encryption work
CURRENT = ("Current", "the current version of its master key wraps it")


@counted_job
def rotate(  # noqa: PLR0913 the contract's arguments
    dataset: Folder,
    *,
    what: Rotated = "kek",
    wrapping_key_id: str | None = None,
    new_kms: Kms | None = None,
    from_key_id: str | None = None,
    documents: bool = False,
    also_retired: bool = True,
    grace: timedelta = GRACE,
    force_expire: bool = False,
    engine: Engine | None = None,
    concurrency: int = CONCURRENCY,
    resume: bool | None = None,
    dry_run: bool = False,
    progress: Progress = None,
    **at: Unpack[Reach],
) -> JobResult:
    """Replace the keys above the data keys of `dataset`. The files of data stay as they are, to the last byte.

    Each new wrap of a KEK is unwrapped once before an entry of the log names it, and in single wrap the first DEK that
    is wrapped for each key. If a wrap does not open, nothing has changed, except that ``"mek"`` with more than 1,000
    KEKs has put the new wraps of earlier batches into the log.

    If a table fails, nothing is committed. Where the KMS wraps each DEK, the next call goes on from there.

    Args:
        dataset: The dataset: a path, a URL or a `Store`.
        what: ``"kek"``, ``"mek"`` or ``"double-wrap"``.

            ``"kek"`` replaces what wraps the DEKs. In double wrap: new KEKs, and a version whose tables have every DEK
            wrapped by them. It takes one wrap for each new KEK, and one unwrap for each old KEK that this process does
            not know. In single wrap, the KMS wraps every DEK again: one rewrap for each where the service can, else one
            unwrap and one wrap.

            ``"mek"`` replaces only what wraps the KEKs, after their master key was rotated in the KMS: the current
            version of the master key wraps each KEK, in an entry of the log, and nothing else changes. It takes one
            rewrap, or one unwrap and one wrap, for each KEK, and none where the KMS tells that the current version
            wraps it.

            ``"double-wrap"`` puts DEKs that the KMS wraps under a new KEK: one unwrap for each, and one wrap.
        wrapping_key_id: The master key to use from now on, in place of `from_key_id`.
        new_kms: For ``"mek"``: the KMS to move to. From then on the dataset is opened with this KMS.
        from_key_id: Replace only what is under this master key, such as the key of some columns. None: the master key
            of the dataset's own key. With `new_kms` all KEKs move, and this names those that get under
            `wrapping_key_id`.
        documents: In single wrap, replace the KEK of tables and documents, too. That KEK opens no file, and stays
            otherwise.
        also_retired: For ``"kek"`` and ``"double-wrap"``: also wrap the KEKs that stay, for older versions, as
            ``"mek"`` does, so that nothing needs the old version of the master key. One that does not open stays as it
            is.
        grace: How long a retired KEK stays at least, also when no version needs it. Choose more than the longest
            writing job takes.
        force_expire: Then do `expire(keep=1, skip_grace=True, force=True)`. Its result is the result's `expired`.
        engine: What copies tables. None: threads of this process.
        concurrency: The number of KMS calls at once, in each worker.
        resume: Take up a rotation with the same arguments that died, where the KMS wraps each DEK. None: if the storage
            shows that it died, as local files do; in an object store, if nothing happened for a day.
        dry_run: Return what would be done, and do nothing.
        progress: How the progress is shown: see `encrypt_files`.
        **at: How the dataset is reached, and the errors if it is not: see `Reach`.

    Returns:
        A row for each key and for each table.

    Raises:
        KeyAccessError: The KMS refuses, or a new wrap does not open. Then nothing was written.
        IntegrityError: A new wrap opens to another key.
        PolicyError: The rotation would leave data keys behind.
        ValueError: An argument is malformed.
    """
    _check_arguments(what, new_kms, concurrency, (wrapping_key_id, from_key_id))
    grace_ms = milliseconds("grace", grace) or 0
    engine = checked(engine) or LocalEngine(0)
    at["kms"] = client_for(engine, at["kms"], dataset)
    snapshot = Access.of(dataset, **at).open()
    log, head = snapshot
    with snapshot.unless_expired():
        masters = {key.wrapping_key_id for key in head.keys.values()}
    if from_key_id is not None and from_key_id not in masters:
        under = ", ".join(map(repr, sorted(masters)))
        raise PolicyError(f"no key of {log.store.url} is under {from_key_id!r}, but under {under}")
    # Without from_key_id, another master key replaces the dataset's own, and columns keep theirs.
    left = from_key_id or main_key(head.keys).wrapping_key_id
    asked = Rotation(from_key_id, wrapping_key_id, left, what == "double-wrap", documents, grace_ms)
    work = Rotating(log, what, asked, engine, concurrency, progress)
    if not dry_run:
        log.store.check_writable()
    if what == "mek":
        other = None if new_kms is None else as_kms(new_kms).for_dataset(head.dataset_id)
        result = work.turn(head, other, dry_run)
    else:
        result = work.replace(head, also_retired, resume, dry_run)
    if dry_run or result.failed:
        return result
    if force_expire:
        result.expired = expire_versions(log, log.head(), 1, None, skip_grace=True, force=True)
    else:
        apply_retention(log, log.head(), result, work.cleaned)
    return result


def _check_arguments(what: str, new_kms: object, concurrency: int, key_ids: Sequence[str | None]) -> None:
    check_choice("what", what, Rotated)
    if new_kms is not None and what != "mek":
        raise ValueError(
            "new_kms is for what='mek': a dataset moves as a whole, by its KEKs. In single wrap, rotate to "
            "'double-wrap' first"
        )
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    for key_id in key_ids:
        if key_id is not None:
            check_key_id(key_id)


class _FailedError(Exception):
    """A table was not copied: the rows say why. No AgsError, so that the job does not end by itself."""


class Rotating:
    """One rotation: what its steps share, and the rows that they report."""

    def __init__(
        self, log: Log, what: str, asked: Rotation, engine: Engine, concurrency: int, progress: Progress
    ) -> None:
        self.log, self.what, self.asked = log, what, asked
        self.engine, self.concurrency, self.progress = engine, concurrency, progress
        self.rows: list[Row] = []
        self.cleaned: list[str] = []
        self.dataset_id = log.head().dataset_id
        self.kms = log.kms.for_dataset(self.dataset_id)  # which wraps the KEKs, until they move to another one
        self.current_version: Callable[[str], str | None] = functools.cache(self.kms.current_version)  # of a master key
        # KEKs as the KMS wraps them again, by their wraps before.
        self._wrapped: dict[bytes | str | None, KeyEntry] = {}
        self._closed: dict[str, str] = {}  # KEKs of the past that do not open, and why
        self._proven: set[str] = set()

    # ---- rows

    def report(self, row: Row) -> None:
        """Add a row to the result, and tell the caller."""
        self.rows.append(row)
        if callable(self.progress):
            self.progress([row])

    def key_row(self, old: str, new: str | None, status: str = "ok", why: tuple[str, str] | None = None) -> None:
        """Report a key: its id, the id of the key that takes its place, and (error class, text) of why not."""
        error_class, error = why or (None, None)
        self.report(Row(old, new, status, error_class, error, format="key", key_id=new))

    def bar(self, total: int, unit: str) -> Any:
        """Return a progress bar."""
        return make_bar(f"rotate {self.what}", total, self.progress, unit=unit)

    def result(self, job_id: str, version: Entry) -> JobResult:
        """Return the result of the job. version: what it has made, or the newest version."""
        return JobResult(job_id, "rotate", self.log.store.url, version.number, self.rows, version.pin)

    # ---- KEKs

    def replace(self, head: Entry, also_retired: bool, resume: bool | None, dry_run: bool) -> JobResult:
        """Replace KEKs (R2), wrap DEKs of single wrap again (R1), or put those under a KEK."""
        log, seals = self.log, {table.key_id for table in head.files}
        olds = decide_keys.to_replace(head.keys, self.asked, self._wraps(head.files, head), seals)
        if dry_run:
            self._plan_rows(head, olds, also_retired)
            return self.result(new_job_id(), head)
        if not olds and not (also_retired and self._to_rewrap(head.keys.values(), head)[0]):
            return self.result(new_job_id(), head)
        calls_kms = any(not key.double_wrap for key in olds.values())
        operation = f"rotate-{self.what}"
        facts = {"from": self.asked.from_master, "to": self.asked.to_master, "documents": self.asked.documents}
        job = None
        if calls_kms and resume is not False:
            job = take_up(log, log.head(), operation, facts, patient=resume is None)
        if job is not None and not isinstance(job, Job):  # it was committed before it died
            return self.result(job.job_id, job)
        job = job or Job.begin(log, operation, head=head, resumable=calls_kms, facts=facts)
        copies = read_copies(log, job.id, head) if job.has_tasks else {}
        job.has_copied(copy.table.path for copy in copies.values())

        def others(head: Entry, keys: decide_keys.Keys) -> decide_keys.Keys:
            if not also_retired:
                return keys
            stay, _ = self._to_rewrap((key for key_id, key in keys.items() if key_id in head.keys), head)
            return {**keys, **self._in_new_wraps(head, stay, job.id, strict=False)}

        try:
            made_by = job.rotate(self.asked, lambda work: self._copies(job, work), others, copies)
        except _FailedError:
            if calls_kms:
                job.release()
            else:
                job.give_up()
            return self.result(job.id, log.head())
        except BaseException:
            job.release()
            raise
        self.cleaned = job.cleaned
        reach.remove_rows(log)  # of the wraps before
        self._key_rows(made_by.before.keys, (made_by.version or made_by.head).keys)
        result = self.result(job.id, made_by.version or made_by.head)
        warn_of_dead(job, made_by.head, result)
        return result

    def _wraps(self, tables: Iterable[Table], head: Entry) -> Counter[str]:
        """Count the data keys that each KEK wraps in tables."""
        return self.log.tables.counted(tables, self.log.envelope(head))

    def _plan_rows(self, head: Entry, olds: Mapping[str, KeyEntry], also_retired: bool) -> None:
        for old_id in olds:
            self.key_row(old_id, None, "planned")
        for key in self._to_rewrap(head.keys.values(), head)[0] if also_retired else ():
            if key.key_id not in olds:
                self.key_row(key.key_id, key.key_id, "planned")
        for table in head.files:
            if self._wraps([table], head).keys() & olds.keys():
                self.report(table_row(self.log.store, table, "planned"))

    def _key_rows(self, before: Mapping[str, KeyEntry], after: Mapping[str, KeyEntry]) -> None:
        """Report what an entry has done to KEKs."""
        for key_id, old in before.items():
            new = after.get(key_id, old)
            if new.state != old.state:
                self.key_row(key_id, new.properties.get(SUCCESSOR))
            elif new.wrap != old.wrap:
                self.key_row(key_id, key_id)
            if key_id in self._closed:
                why = f"it stays as it was wrapped before, and does not open: {self._closed[key_id]}"
                self.key_row(key_id, key_id, "skipped", ("KeyAccessError", why))

    # ---- tables

    def _copies(self, job: Job, work: Rewrite) -> dict[str, Copy]:
        """Have the engine copy tables, with their data keys under the new KEKs."""
        log, keys = self.log, work.envelope.entries
        singles = not all(keys[key_id].double_wrap for pair in work.moves.items() for key_id in pair)
        needed = {*work.moves, *work.moves.values(), work.sealer, *(table.key_id for table in work.tables)}
        envelope = Envelope(work.envelope.kms, {key_id: keys[key_id] for key_id in needed}, self._proven)
        for key_id in needed:  # a refusal comes before anything is written
            envelope.prepare(key_id)
        context = CopyContext(
            f"rotate-{self.what}",
            job.id,
            work.head.dataset_id,
            log.store,
            envelope,
            dict(work.moves),
            work.sealer,
            work.head.gone,
            self.concurrency,
            self._tried(work, envelope) if singles else {},
            files_at_once=1 if singles else thread_count(None),  # so that `concurrency` holds
        )
        each = KMS_WORK if singles else LOCAL_WORK
        counts = {log.store.full_path(table.path): table.rows for table in work.tables}
        done: list[str] = []
        missing: list[Row] = []
        with self.bar(sum(counts.values()), " keys") as bar:

            def report(rows: list[Row]) -> None:
                missing.extend(row for row in rows if row.error_class == FileNotFoundError.__name__)
                for row in rows:
                    if row not in missing:
                        self.report(row)
                    bar.update(counts[row.src])
                    if row.status == "ok" and row.dst is not None:
                        done.append(log.store.path_in(row.dst))
                        job.has_copied(done[-1:])

            self.engine.run(context, [CopyTask(table, table.rows * each) for table in work.tables], 0, report)
        if missing and log.head().digest != work.head.digest:
            raise Again  # the version has expired: the tables of the newer one are copied
        for row in missing:
            self.report(row)
        if len(done) < len(work.tables):
            raise _FailedError
        at_once = CONCURRENCY if log.store.parallel and len(done) > 1 else 1
        read = in_threads(lambda path: read_copy(log, copy_path(job.id, path), work.head), done, at_once)
        return {copy.of: copy for copy in read}

    def _tried(self, work: Rewrite, envelope: Envelope) -> dict[tuple[str, bytes], bytes]:
        """Have the KMS wrap one data key for each key in single wrap, before anything is written.

        Returns:
            By the key that it is for, and what it was: the data key as it was wrapped, so that nobody asks again.
        """
        keys, moves = envelope.entries, work.moves
        todo = {old for old, new in moves.items() if not (keys[old].double_wrap and keys[new].double_wrap)}
        ready: dict[tuple[str, bytes], bytes] = {}
        for table in work.tables:
            some = todo & self._wraps([table], work.head).keys()
            for row in self.log.tables.rows(table, work.envelope) if some else ():
                for old, wrapped, bound in row.wraps(work.head.dataset_id):
                    if old in todo:
                        todo.remove(old)
                        (ready[moves[old], wrapped],) = envelope.rewrap_many(old, moves[old], [(wrapped, bound)])
        return ready

    # ---- master keys

    def turn(self, head: Entry, new_kms: KmsClient | None, dry_run: bool) -> JobResult:
        """Have the current version of the master key, another master key or another KMS wrap the KEKs (R3).

        Where a rotation dies, the next one passes over what the current version wraps already.
        """
        log, asked = self.log, self.asked
        leaves = asked.to_master not in (None, asked.left)
        done: dict[str, str] = {}
        part: list[KeyEntry] = []
        looked: dict[str, list[KeyEntry]] = {}  # by the digest of the last head

        def left(head: Entry) -> list[KeyEntry]:
            if head.digest in looked:
                return looked[head.digest]
            if new_kms is not None or leaves:
                self._refuse_single_wrap(head, new_kms is not None)
            keys = [key for key in head.keys.values() if key.key_id not in done]
            todo, rest = self._to_rewrap(keys, head, all_=new_kms is not None)
            done.update((key.key_id, "skipped") for key in rest)
            looked.clear()
            looked[head.digest] = todo
            return todo

        def decided(head: Entry) -> Draft | None:
            # One KMS opens the log, so all KEKs go to another one at once.
            part[:] = left(head) if new_kms is not None else left(head)[:size]
            made = self._in_new_wraps(head, part, job.id, new_kms)
            keys = Keks.of(head.keys).changed(made)
            return Draft("rotate-mek", keys=keys, uses=job.uses(head), kms=new_kms) if part else None

        job_id, todo = new_job_id(), log.look(left, head)
        size = max(BATCH, -(-len(todo) // BATCHES))
        while todo and not dry_run:
            job = Job.begin(log, "rotate-mek", head=head)  # new rows of a key store need a plan, and tables of KEKs do
            made = job.replace_files(decided)
            if made.version is None:
                break  # others have done it
            job_id, head = job.id, made.version
            done.update((key.key_id, "ok") for key in part)
            todo = log.look(left, head) if new_kms is None else []
        if dry_run:
            done.update((key.key_id, "planned") for key in todo)
        else:
            reach.remove_rows(log)  # of the wraps before
        for key_id, status in sorted(done.items(), key=lambda item: item[1] == "skipped"):
            self.key_row(key_id, key_id, status, CURRENT if status == "skipped" else None)
        self._report_key_material(head, asked.left if leaves else None, moves=new_kms is not None)
        return self.result(job_id, head)

    def _to_rewrap(
        self, keys: Iterable[KeyEntry], head: Entry, *, all_: bool = False
    ) -> tuple[list[KeyEntry], list[KeyEntry]]:
        """See `keys.to_rewrap`."""
        found = list(keys)
        self.log.kek_rows.fetch(self.dataset_id, found)
        return decide_keys.to_rewrap(found, self.asked, self.is_current, all_=all_)

    def _in_new_wraps(
        self,
        head: Entry,
        todo: Sequence[KeyEntry],
        job_id: str,
        new_kms: KmsClient | None = None,
        *,
        strict: bool = True,
    ) -> dict[str, KeyEntry]:
        """Return KEKs in new wraps, by their ids. A wrap that was made before is taken.

        strict: an error is raised; else a KEK that does not open is left out.
        """
        log = self.log

        def wrapped(key: KeyEntry) -> KeyEntry | None:
            try:
                new = rewrap_kek(self.kms, log.whole(self.dataset_id, key), new_kms, self.asked.master_of(key))
            except UNREADABLE as error:
                if strict:
                    raise
                self._closed[key.key_id] = describe(error)
                return None
            return log.kek_rows.named(new, job_id)

        log.kek_rows.fetch(self.dataset_id, todo)
        missing = [key for key in todo if key.wrap not in self._wrapped and key.key_id not in self._closed]
        with self.bar(len(missing), " KEKs") as bar:
            at_once = self.concurrency if self.kms.waits or (new_kms or self.kms).waits else 1
            made = in_threads(wrapped, missing, min(at_once, len(missing)) or 1)
            bar.update(len(made))
        self._wrapped.update((key.wrap, new) for key, new in zip(missing, made, strict=True) if new is not None)
        now_ms = clock_ms()
        after = {
            key.key_id: decide_keys.rewrapped_as(key, self._wrapped[key.wrap], now_ms)
            for key in todo
            if key.wrap in self._wrapped
        }
        log.kek_rows.put(self.dataset_id, after.values())
        for key in after.values() if new_kms is None else ():
            if (gone := log.version_of(key)) in head.gone:
                raise PolicyError(f"the KMS wraps by version {gone[1]} of {gone[0]!r}, which was to be destroyed")
        return after

    def _refuse_single_wrap(self, head: Entry, leaves_kms: bool) -> None:
        """Raise PolicyError if data keys that a KMS wraps itself would be left behind."""
        singles = {
            key.key_id
            for key in head.keys.values()
            if not key.double_wrap and (leaves_kms or key.wrapping_key_id == self.asked.left)
        }
        for entry in self.log.kept(head) if leaves_kms and singles else [head]:
            used = self._wraps(entry.files, head)
            if count := sum(used[key_id] for key_id in singles):
                raise PolicyError(
                    f"the KMS itself wraps {count} data keys of version {entry.number}, so its master key cannot be "
                    "left by wrapping KEKs again: rotate(what='double-wrap') or rotate(what='kek', "
                    "wrapping_key_id=...) first, and expire the versions before that"
                )

    def is_current(self, key: KeyEntry) -> bool:
        """Whether the KMS tells that the current version of its master key wraps a KEK."""
        version = None
        with suppress(KeyAccessError):  # the key store does not show it
            version = self.kms.key_version(self.log.kek_rows.whole(self.dataset_id, key).wrapped or b"")
        return version is not None and version == self.current_version(key.wrapping_key_id)

    def _report_key_material(self, head: Entry, left: str | None, *, moves: bool) -> None:
        """Add a row for each master key that opens files of the newest version by key material which this job leaves.

        The job writes no data file, so what files store stays as it is. left: the master key that the dataset leaves.
        """
        log, old = self.log, Counter[str]()
        for table in head.files:
            for row in log.tables.rows(table, log.envelope(head)) if table.material else ():
                for one in row.key_material or ():
                    master = one["wrapping_key_id"]
                    version = self.kms.key_version(one["wrapped_dek"]) or one["master_version"]
                    stays = not moves and master != left
                    if not (stays and version is not None and version == self.current_version(master)):
                        old[master] += 1
        for master, count in sorted(old.items()):
            why = (
                f"{count:,} data key{'s' * (count != 1)} in the key material of files stay as this master key has "
                "wrapped them: rekey_files renews key material"
            )
            self.key_row(master, None, "skipped", ("KeyMaterial", why))
