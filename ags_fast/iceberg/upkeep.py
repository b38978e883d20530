"""All upkeep of an encrypted table in one job, to be run every day."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from ags_fast.dataset.kinds import clock_ms
from ags_fast.dataset.names import new_job_id
from ags_fast.dataset.policy import DAY_MS
from ags_fast.engines.base import checked
from ags_fast.errors import FormatError, IntegrityError, PolicyError
from ags_fast.iceberg import policy
from ags_fast.iceberg.commit import pinned, raw_metadata, table_io
from ags_fast.iceberg.expiry import GC, expire_by
from ags_fast.iceberg.reading import MANIFEST
from ags_fast.iceberg.rotation import rotate
from ags_fast.iceberg.snapshots import head_of
from ags_fast.iceberg.verification import PLAN
from ags_fast.iceberg.verification import verify as verify_table
from ags_fast.iceberg.walk import Tree
from ags_fast.iceberg.work.plans import OPS, find_plan, plan_location
from ags_fast.iceberg.work.removing import Gone, remove
from ags_fast.jobs.results import JobResult, Row, counted, describe
from ags_fast.jobs.verification import drawn
from ags_fast.keys.iceberg import LIFESPAN_MS, read_encryption_keys
from ags_fast.metadata.retention import MAX_SNAPSHOT_AGE, number
from ags_fast.metadata.unused import unused_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyiceberg.table import Table

    from ags_fast.engines.base import Engine

__all__ = ["maintain"]

AGE_MS = 5 * DAY_MS  # Iceberg's own, for tables that say none
NO_PLAN = "no run of this release goes on by the plan ({}): delete the plan if no other release works on the table"


@counted
@pinned
def maintain(table: Table, *, engine: Engine | None = None, verify: float = 0.0, dry_run: bool = False) -> JobResult:
    """Do what an encrypted table needs from time to time, such as once a day.

    In this order: snapshots, branches and tags that the table's properties ``history.expire.*`` do not keep are
    removed, with keys that nothing needs and older metadata files (`expire`); KEKs that are older than 730 days are
    replaced (`rotate`), and stay for writers that have begun, until the next day's run removes them; plans by which no
    `rekey` or `encrypt` can go on are deleted; and a share of the files is verified. Each step looks at the table anew,
    and does nothing where nothing is due: so if the job dies, the next one goes on. A step that fails is a failed row,
    and does not keep the others from being done.

    Without properties Iceberg's defaults hold: snapshots older than 5 days go, but for the newest of each branch and
    those of tags. Metadata files stay as long. With ``gc.enabled=false`` no snapshot and no key is removed.

    Args:
        table: A table of a catalog of ags_fast.iceberg. Afterwards it is the new version.
        engine: Deletes and verifies files; None: threads of this process.
        verify: The share of the data and delete files to verify today, from 0 to 1. Each day has other files: with 0.05
            each file has its turn once in 20 days on average. Who does not have the keys cannot foretell which.
        dry_run: Only plan; the rows have the status "planned".

    Returns:
        The rows of all steps. A plan by which a run can go on is "skipped": start that run again.

    Raises:
        PolicyError: The table is in plaintext, or was not loaded by a catalog of ags_fast.iceberg.
        ValueError: `verify` is not between 0 and 1.
    """
    if not 0 <= verify <= 1:
        raise ValueError(f"verify is a share of the files, from 0 to 1, not {verify!r}")
    checked(engine)
    table_io(table).session.check_writes()
    if not policy.is_encrypted(raw_metadata(table.refresh())):
        raise PolicyError("the table is in plaintext: use PyIceberg's table.maintenance")
    steps: dict[str, Callable[[], JobResult]] = {
        "expire": lambda: _expired(table, engine, dry_run),
        "rotate": lambda: _rotated(table, dry_run),
        "plans": lambda: _result(table, _plans(table, dry_run)),
    }
    if verify:
        steps["verify"] = lambda: _verified(table, engine, verify, dry_run)
    result = _result(table)
    for name, step in steps.items():
        try:
            table.refresh()
            done = step()
        except Exception as error:  # of any catalog, storage or KMS: the other steps are done all the same
            failed = Row(f"{table.location()}#{name}", None, "failed", type(error).__name__, describe(error))
            done = _result(table, [failed])
        result.rows += done.rows
        result.warnings += done.warnings
    return result


def _result(table: Table, rows: Iterable[Row] = ()) -> JobResult:
    return JobResult(new_job_id(), "maintain", table.location(), None, list(rows))


def _expired(table: Table, engine: Engine | None, dry_run: bool) -> JobResult:
    """Expire what the table's properties do not keep."""
    properties = raw_metadata(table)["properties"]
    if properties.get(GC, "").lower() == "false":
        return _result(table)
    age = number(properties, MAX_SNAPSHOT_AGE)
    return expire_by(table, engine, dry_run=dry_run, older_than_ms=AGE_MS if age is None else age)


def _rotated(table: Table, dry_run: bool) -> JobResult:
    """Replace the KEKs if one is past its lifetime, and not about to be removed."""
    raw = raw_metadata(table)
    unused = {key.key_id for key in unused_keys(raw)}
    keks = [key for key in read_encryption_keys(raw.get("encryption-keys") or ()) if key.is_kek]
    if any(clock_ms() - key.created_ms >= LIFESPAN_MS and key.key_id not in unused for key in keks):
        return rotate(table, keep_old=True, dry_run=dry_run)
    return _result(table)


def _plans(table: Table, dry_run: bool) -> Iterator[Row]:
    """Delete plans of jobs that were committed, or whose snapshot is gone, and name the others.

    A job that runs needs no plan to come to its end.
    """
    io, raw = table_io(table), raw_metadata(table)
    for op in OPS:
        gone = Gone(plan_location(raw, op), "plan")
        left = gone.row("skipped")
        try:
            plan = find_plan(io, raw, op, kms=io.session.kms, wrapping_key_id=raw["properties"][policy.KEY_ID])
        except (FormatError, IntegrityError) as error:
            yield left._replace(error_class="Unreadable", error=NO_PLAN.format(describe(error)))
            continue
        if plan is not None and plan.goes_on(raw):
            yield left._replace(error_class="Unfinished", error=PLAN)
        elif plan is not None:
            yield gone.row("planned") if dry_run else remove(io.inner(gone.path), gone)


def _verified(table: Table, engine: Engine | None, share: float, dry_run: bool) -> JobResult:
    """Verify the files whose turn is today."""
    io, raw = table_io(table), raw_metadata(table)
    head, day = head_of(raw), str(clock_ms() // DAY_MS)
    key = None if head is None else io.table.list_key(head["manifest-list"])
    secret = os.urandom(32) if key is None else hashlib.sha256(b"draws" + key.encryption_key).digest()

    def chosen(path: str) -> bool:
        return drawn(secret, day, path) < share

    if not dry_run:
        return verify_table(table, statistics="allow", engine=engine, only=chosen)
    nodes = Tree.of(io.session, io.inner, raw).walk(raw.get("snapshots") or ())
    files = {one.path: one for node in nodes if node.kind == MANIFEST for one in node.files() if chosen(one.path)}
    rows = [Row(one.path, None, "planned", file_length=one.length, format=one.kind) for one in files.values()]
    return _result(table, rows)
