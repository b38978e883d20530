"""Plans: what open jobs may write, durable before the first object (rule 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from ags_fast.keys.entry import KeyEntry
from ags_fast.onelog.keks import Keks
from ags_fast.onelog.log import main_key
from ags_fast.onelog.names import plan_path
from ags_fast.onelog.sealed import Document, seal

if TYPE_CHECKING:
    from ags_fast.onelog.log import Entry, Log

PLAN_NBYTES = 16 << 20


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an open job may write: ``_ags/plans/<job id>/plan``.

    Attributes:
        operation: What the job does.
        job_id: The job whose plan this is.
        of: The job that it is a further plan of; None: the plan is the job's own.
        time_ms: When it was made, in milliseconds since the epoch.
        new: The KEKs that the job brings.
        uses: How many data keys the job wraps under each KEK, at most.
        resumable: Whether other processes may go on with the job.
    """

    operation: str
    job_id: str
    of: str | None
    time_ms: Annotated[int, Meta(ge=0)]
    new: dict[str, KeyEntry]
    uses: dict[str, Annotated[int, Meta(ge=0)]]
    resumable: bool


def store_plan(log: Log, plan: Plan, head: Entry) -> bool:
    """Store a plan by one request. False: there is no clear answer, so the job needs another id, and other KEKs."""
    path = plan_path(plan.job_id)
    data = seal(log.envelope(head), main_key(head.keys), head.dataset_id, path, plan)
    try:
        log.store.create_exclusive(path, data)
    except OSError:  # also FileExistsError: the request may have been repeated on its way
        return False
    return True


def read_plan(log: Log, job_id: str, head: Entry) -> Plan | None:
    """Return the plan of a job; None: it is gone."""
    path = plan_path(job_id)
    try:
        data = log.store.read_small(path, PLAN_NBYTES)
    except FileNotFoundError:
        return None
    document = Document.parse(data, path)
    return document.opened(log.kms, Plan, Keks.of(head.keys).inline.get(document.header.sealer.key_id))
