"""All upkeep of a dataset in one job, to be run every day."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from ags_fast.dataset import reach
from ags_fast.dataset.access import Access
from ags_fast.dataset.keys import Rotation
from ags_fast.dataset.kinds import clock_ms
from ags_fast.dataset.names import new_job_id, plan_path
from ags_fast.dataset.snapshot import Snapshot
from ags_fast.engines.base import checked
from ags_fast.engines.local import LocalEngine, client_for
from ags_fast.errors import AgsError
from ags_fast.jobs.results import JobResult, Row, counted, describe
from ags_fast.jobs.retention import expire_versions, removed_rows, sweep_log
from ags_fast.jobs.rotation import CONCURRENCY, Rotating
from ags_fast.jobs.run import Options, verified
from ags_fast.jobs.verification import check_share, sampled
from ags_fast.jobs.work.rows import planned_row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ags_fast.dataset.access import Folder
    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.log import Log
    from ags_fast.engines.base import Engine
    from ags_fast.jobs.arguments import Reach
    from ags_fast.jobs.results import Progress


@counted
def maintain(
    dataset: Folder,
    *,
    engine: Engine | None = None,
    verify: float = 0.0,
    dry_run: bool = False,
    progress: Progress = None,
    **at: Unpack[Reach],
) -> JobResult:
    """Do what a dataset needs from time to time, such as once a day.

    In this order: dead jobs are ended, and what they have left is removed (`sweep`); KEKs that are past the lifetime or
    the uses that the policy allows are replaced (`rotate`); versions that the policy does not keep, and KEKs that
    nothing needs, are removed (`expire`); and a share of the files is verified. Each step looks at the dataset anew and
    does nothing where nothing is due: so if the job dies, the next one goes on. A step that fails is a failed row, and
    does not keep the others from being done.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        engine: What copies tables and verifies files; None: as `rotate` and `verify_files` have it.
        verify: The share of the files to verify today, from 0 to 1. Each day has other files: with 0.05 each file has
            its turn once in 20 days on average. Who does not have the keys cannot foretell which.
        dry_run: Only plan; the rows have the status "planned".
        progress: How the progress is shown: see `encrypt_files`.
        **at: How the dataset is reached, and the errors if it is not: see `Reach`.

    Returns:
        The rows of all steps. `JobResult.version` is the newest version afterwards.

    Raises:
        ValueError: `verify` is not between 0 and 1.
    """
    check_share("verify", verify)
    runs = checked(engine) or LocalEngine(0)
    at["kms"] = client_for(runs, at["kms"], dataset)
    log, head = Access.of(dataset, **at).open()
    rows: list[Row] = []

    def do(name: str, step: Callable[[], Sequence[Row]]) -> None:
        try:
            found = step()
        except (AgsError, OSError) as error:
            found = [Row(f"{log.store.url}#{name}", None, "failed", type(error).__name__, describe(error))]
        rows.extend(found)
        if callable(progress):
            progress(list(found))

    def rotated() -> Sequence[Row]:
        head = log.head()
        if not (worn := worn_keks(head, clock_ms())):
            return ()
        work = Rotating(log, "kek", Rotation(only=worn), runs, CONCURRENCY, progress if progress is True else False)
        return [*work.replace(head, True, None, dry_run).rows, *removed_rows(log.store, work.cleaned)]

    do("sweep", lambda: _dead(log) if dry_run else sweep_log(log, None).rows)
    do("rotate", rotated)
    do("expire", lambda: _expired(log, dry_run))
    if verify:
        do("verify", lambda: _verified(Snapshot(log, log.head()), verify, engine, progress, dry_run))
    head = log.head()
    return JobResult(new_job_id(), "maintain", log.store.url, head.number, rows, head.pin)


def worn_keks(head: Entry, now_ms: int) -> frozenset[str]:
    """Return the ids of active KEKs that are older, or have wrapped more, than the policy allows."""
    return frozenset(
        key.key_id
        for key in head.keys.values()
        if key.state == "active"
        and key.double_wrap
        and (head.policy.outlived(key.created_ms, now_ms) or key.uses >= head.policy.kek_uses)
    )


def _dead(log: Log) -> list[Row]:
    plans = log.plans()
    paths = [plan_path(plan_id, plans[plan_id].of) for plan_id in plans if reach.is_dead(log, plan_id, plans)]
    return [row._replace(status="planned") for row in removed_rows(log.store, paths)]


def _expired(log: Log, dry_run: bool) -> Sequence[Row]:
    """Expire what the policy does not keep; if it keeps all versions, let KEKs leave that nothing needs."""
    head = log.head()
    keep = None if head.policy.keep is not None else head.number + 1
    return expire_versions(log, head, keep, None, dry_run=dry_run).rows


def _verified(snapshot: Snapshot, share: float, engine: Engine | None, progress: Progress, dry_run: bool) -> list[Row]:
    """Verify the files whose turn is today."""
    rows = sampled(snapshot, snapshot.files(), share)
    if dry_run:
        return [planned_row(row.path, None, row) for row in rows]
    return verified(snapshot, rows, Options(engine, False if callable(progress) else progress))[1]
