"""Rewrite the manifests that retired keys wrap something in, and commit a version that has them.

Each manifest is the work of a task, planned, retried and resumed as files are.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from ags_fast.dataset import decide
from ags_fast.dataset.changes import until_unchanged
from ags_fast.dataset.keks import clock_ms
from ags_fast.dataset.look import read_newest
from ags_fast.dataset.manifest_task import ManifestTask
from ags_fast.dataset.names import manifest_name
from ags_fast.dataset.tables import ENTRY_NBYTES, MANIFEST_NBYTES, TABLE_DEK_NBYTES, TableRef, named_keys
from ags_fast.errors import ConcurrentChangeError
from ags_fast.jobs.results import JobResult, Row
from ags_fast.jobs.work.context import Context
from ags_fast.keys.envelope import binding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ags_fast.dataset.decide import Change
    from ags_fast.dataset.keks import Want
    from ags_fast.dataset.ledger import Ledger
    from ags_fast.dataset.plan import Plan
    from ags_fast.dataset.versions import Version
    from ags_fast.jobs.engines.base import Engine
    from ags_fast.jobs.results import Progress
    from ags_fast.keys.entry import KeyEntry
    from ags_fast.keys.envelope import Envelope


LOCAL_WORK, KMS_WORK = 1 << 8, 1 << 18  # what one DEK costs, in bytes of encryption work


class Work:
    """What the steps of a rotation have in common, and the rows that they report."""

    def __init__(self, opened: Ledger, what: str, engine: Engine, concurrency: int, progress: Progress) -> None:
        self.opened = opened
        self.what = what
        self.engine = engine
        self.concurrency = concurrency
        self.progress = progress
        self.rows: list[Row] = []
        self.counts: dict[str, Mapping[str, int]] = {}  # of manifests that do not name their keys
        # DEKs that the KMS has wrapped already, by the key that each is for, and what it was.
        self.ready: dict[tuple[str, bytes], bytes] = {}

    def key_row(self, old: str, new: str | None, status: str = "ok", why: tuple[str, str] | None = None) -> None:
        """Report a key: its id, the id of the key that takes its place, and (error class, text) of why not."""
        error_class, error = why or (None, None)
        self.report(Row(old, new, status, error_class, error, format="key", key_id=new))

    def report(self, row: Row) -> None:
        """Add a row to the result, and tell the caller."""
        self.rows.append(row)
        if callable(self.progress):
            self.progress([row])

    def bar(self, total: int, unit: str) -> Any:
        """Return a progress bar."""
        from ags_fast.jobs.bars import make_bar

        return make_bar(f"rotate {self.what}", total, self.progress, unit=unit)

    def result(self, job_id: str, version: Version | None) -> JobResult:
        """Return the result of the job. version: the dataset's newest version."""
        number, pinned = (version.number, version.pin) if version else (None, None)
        return JobResult(job_id, "rotate", self.opened.store.url, number, self.rows, pinned)


def rewrite(work: Work, plan: Plan, counted: set[tuple[str, str]]) -> Version | None:
    """Commit a version that needs no retired key.

    Args:
        work: What the steps of the rotation have in common.
        plan: The plan of the rotation. It ends with the commit.
        counted: The moves that the uses of the new keys include already, as `decide.counted_moves` has them; more are
            added.

    Returns:
        The version; the newest version if it needs no retired key; None if a manifest failed: the rows say
        why, and the plan stays.
    """
    opened = work.opened
    done: dict[str, list[TableRef]] = {}  # by the path of the manifest that they take the place of
    made: dict[Want, KeyEntry] = {}

    def decided(head: Version | None) -> Change:
        snapshot = read_newest(opened, head, work.counts)
        change = opened.keyring.completed(lambda: decide.rewrite_manifests(snapshot, made, clock_ms()), made)
        opened.keyring.swap(change.keys, snapshot.number)
        return change

    def applied(head: Version | None, change: Change) -> Version | None:
        todo = [ref for ref in change.rewrites if ref.path not in done]
        if todo:
            rows = len(work.rows)
            refs = _rewrite_tables(work, plan, todo, change.moves)
            if refs is None:
                if opened.is_newest(head) and decided(opened.current()).moves == change.moves:
                    return None
                del work.rows[rows:]  # others have expired what was to be read, or retired what was to wrap
                raise ConcurrentChangeError
            done.update(refs)
        if head is None or not (change.reseals or any(ref.path in done for ref in head.manifests)):
            plan.end()
            return head
        _count_uses(work, head, done, change.moves, counted)
        now = [new for ref in head.manifests for new in done.get(ref.path, [ref])]
        version = opened.succeed(head, f"rotate-{work.what}", plan.job_id, now)
        plan.end({ref.path for ref in now})
        return version

    return until_unchanged(
        lambda: opened.current(writes=True), decided, applied, lambda head: not opened.is_newest(head)
    )


def _count_uses(
    work: Work, head: Version, done: Mapping[str, object], moves: Mapping[str, str], counted: set[tuple[str, str]]
) -> None:
    """Add to the uses of keys what they wrap in the places of retired keys and was not counted yet."""
    snapshot = read_newest(work.opened, head, work.counts)
    uses: Counter[str] = Counter()
    for ref in head.manifests:
        for old, count in snapshot.wraps(ref).items() if ref.path in done else ():
            if old in moves and (ref.path, old) not in counted:
                counted.add((ref.path, old))
                uses[moves[old]] += count
    if uses:
        work.opened.keyring.add_uses(uses)


def _rewrite_tables(
    work: Work, plan: Plan, todo: Sequence[TableRef], moves: Mapping[str, str]
) -> dict[str, list[TableRef]] | None:
    """Rewrite the manifests, and reuse what the plan has of them.

    Returns:
        By the path of each manifest what takes its place: one manifest, or several if the KMS wraps to more bytes.
        None if some have failed.
    """
    opened = work.opened
    tasks = _planned_tasks(work, plan, todo, moves)
    needed = {*moves, *moves.values(), *(key_id for task in tasks for key_id in (task.key_id, task.old.key_id))}
    context = Context(
        "rotate",
        plan.job_id,
        opened.id,
        opened.store,
        opened.envelope.subset(needed),
        resume="verify" if plan.taken else None,
        moves=dict(moves),
        ready=work.ready,
        concurrency=work.concurrency,
        files_at_once=1 if _calls_kms(opened.envelope, moves) else None,  # so that `concurrency` holds
    )
    by_name = {opened.store.full_path(task.file): task for task in tasks}
    whole = Counter(task.old.path for task in tasks)
    places: dict[str, dict[int, TableRef]] = {ref.path: {} for ref in todo}
    failed = False
    with work.bar(sum(ref.entries for ref in todo), " keys") as bar:

        def report(rows: list[Row]) -> None:
            nonlocal failed
            for row in rows:
                task = by_name[row.dst or ""]
                work.report(row)
                bar.update(task.rows)
                if row.status == "failed":
                    failed = True
                else:
                    made = _made_ref(task.with_lengths(row.file_length or 0), whole[task.old.path] == 1, moves)
                    places[task.old.path][task.first] = made

        work.engine.run(context, tasks, 0, report)
    return None if failed else {path: [refs[first] for first in sorted(refs)] for path, refs in places.items()}


def _made_ref(task: ManifestTask, is_whole: bool, moves: Mapping[str, str]) -> TableRef:
    """Return the reference to a new manifest. Which keys wrap something in a part of a manifest is not known."""
    old = task.old
    keys = named_keys(decide.moved_counts(dict(old.keys), moves)) if is_whole and old.keys is not None else None
    return task.new._replace(keys=keys, run=old.run or ("" if is_whole else old.path))


def _planned_tasks(work: Work, plan: Plan, todo: Sequence[TableRef], moves: Mapping[str, str]) -> list[ManifestTask]:
    """Return the tasks, made durable: those of the plan, and new tasks for what the plan lacks."""
    opened = work.opened
    key_id, envelope = opened.keyring.document_key(), opened.envelope
    as_planned = plan.body.get("moves") == moves
    planned = {task.path: task for task in plan.rewrites() if task.key_id == key_id} if as_planned else {}
    kms_bound = _calls_kms(envelope, moves)
    wrap_nbytes = max([plan.body.get("wrap_nbytes", 0), *map(len, work.ready.values())])
    tasks, fresh = [], []
    for ref in todo:
        for first, rows in _parts(ref.entries, wrap_nbytes):
            cost = rows * (KMS_WORK if kms_bound else LOCAL_WORK)
            task = planned.get(ManifestTask.name(ref, first))
            if task is None or task.rows != rows:
                file = manifest_name(plan.job_id)
                wrapped = envelope.wrap(key_id, os.urandom(TABLE_DEK_NBYTES), binding(opened.id, "dek", file))
                task = ManifestTask(ref, first, rows, file, key_id, wrapped, cost)
                fresh.append(task)
            tasks.append(task._replace(old=ref))
    if fresh:
        plan.extend([], rewrites=fresh, moves=moves, wrap_nbytes=wrap_nbytes)
    return tasks


def _calls_kms(envelope: Envelope, moves: Mapping[str, str]) -> bool:
    """Whether the KMS wraps or unwraps each DEK that moves from one key to another."""
    return not all(envelope.entries[key_id].double_wrap for pair in moves.items() for key_id in pair)


def _parts(count: int, wrap_nbytes: int) -> list[tuple[int, int]]:
    """Return (first row, number of rows) of each part that a manifest of `count` rows is rewritten to.

    It is one part, unless DEKs that are wrapped to `wrap_nbytes` bytes each would make the manifest too large.
    """
    size = ENTRY_NBYTES + wrap_nbytes
    each = max(1, count if count * size <= MANIFEST_NBYTES else MANIFEST_NBYTES // size)
    return [(first, min(each, count - first)) for first in range(0, max(1, count), each)]
