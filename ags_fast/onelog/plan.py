"""Plans: what open jobs may write, durable before the first object (rule 2)."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from ags_fast.dataset.keks import clock_ms
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError
from ags_fast.keys.entry import KeyEntry
from ags_fast.onelog.entry import MasterVersion, main_key
from ags_fast.onelog.keks import Keks
from ags_fast.onelog.names import beside_plan, plan_path
from ags_fast.onelog.sealed import Document, seal
from ags_fast.onelog.tables import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.fs import Store
    from ags_fast.keys.envelope import Envelope
    from ags_fast.onelog.entry import Entry
    from ags_fast.onelog.log import Log

PLAN_NBYTES = 16 << 20
TRIES = 20  # ids, until a plan is created with a clear answer
MORE_USES = 64  # data keys, or files, that a further plan reserves, at least
RENEW_SECONDS = 600.0  # between two signs of life
COPY = "table-"  # beside a plan: a copy of a table that is made
PART = "files-"  # beside a plan: the files that the job is about to write


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
        facts: What a process that goes on must know.
    """

    operation: str
    job_id: str
    of: str | None
    time_ms: Annotated[int, Meta(ge=0)]
    new: dict[str, KeyEntry]
    uses: dict[str, Annotated[int, Meta(ge=0)]]
    resumable: bool = False
    facts: dict[str, Any] = {}

    @classmethod
    def further(cls, operation: str, plan_id: str, of: str, uses: Mapping[str, int]) -> Plan:
        """Return a further plan of a job: it reserves uses of KEKs, and brings none."""
        return cls(operation, plan_id, of, clock_ms(), {}, dict(uses))

    @property
    def path(self) -> str:
        """The path of its object."""
        return plan_path(self.job_id, self.of)


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tables of the files that a job is about to write, with their data keys."""

    tables: tuple[Table, ...]


class Copy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A copy of a table that a job has made, with its data keys under other KEKs.

    Attributes:
        of: The path of the table.
        table: The copy.
        gone: The versions of master keys under which the KMS has certainly wrapped nothing for it.
    """

    of: str
    table: Table
    gone: tuple[MasterVersion, ...] = ()


def copy_path(job_id: str, table: str) -> str:
    """Return the path of what says, beside a plan, that a job has made a table. table: the path of the table."""
    return beside_plan(job_id, f"{COPY}{table.rpartition('-')[2]}")


def store_copy(store: Store, envelope: Envelope, sealer: KeyEntry, dataset_id: str, job_id: str, copy: Copy) -> None:
    """Say beside the plan that a copy of a table is made, so that whoever goes on with the job need not make it."""
    path = copy_path(job_id, copy.table.path)
    store.create_exclusive(path, seal(envelope, sealer, dataset_id, path, copy))


def read_copy(log: Log, path: str, head: Entry, own: Mapping[str, KeyEntry]) -> Copy:
    """Return what `store_copy` has stored. own: KEKs of the job that the head lacks."""
    document = Document.parse(log.store.read_small(path, PLAN_NBYTES), path)
    return log.unsealed(document, Copy, {**own, **Keks.of(head.keys).inline})


def read_copies(log: Log, job_id: str, head: Entry) -> dict[str, Copy]:
    """Return the copies of tables that processes of a job have made, by the paths of those tables."""
    found = {}
    for listed in log.store.list(beside_plan(job_id, COPY)):
        with suppress(FileNotFoundError, IntegrityError, KeyAccessError):
            copy = read_copy(log, listed.path, head, {})
            found[copy.of] = copy
    return found


def store_plan(store: Store, envelope: Envelope, sealer: KeyEntry, dataset_id: str, plan: Plan) -> bool:
    """Store a plan by one request. False: there is no clear answer, so the job needs another id, and other KEKs."""
    data = seal(envelope, sealer, dataset_id, plan.path, plan)
    try:
        store.create_exclusive(plan.path, data)
    except OSError:  # also FileExistsError: the request may have been repeated on its way
        return False
    return True


def read_plan(log: Log, job_id: str, head: Entry, of: str | None = None) -> Plan | None:
    """Return the plan of a job, or a further one; None: it is gone."""
    path = plan_path(job_id, of)
    try:
        data = log.store.read_small(path, PLAN_NBYTES)
    except FileNotFoundError:
        return None
    document = Document.parse(data, path)
    return log.unsealed(document, Plan, head.keys)


def store_files(log: Log, job_id: str, rows: Sequence[FileEntry], head: Entry, envelope: Envelope) -> list[str]:
    """Store the files that a job is about to write, so that whoever goes on with it uses the same data keys.

    Returns:
        The objects that have them. No entry ever names these.
    """
    sealer = main_key(head.keys)
    tables = log.tables.write(rows, job_id, sealer.key_id, envelope)
    path = beside_plan(job_id, f"{PART}{secrets.token_hex(8)}")
    log.store.create_exclusive(path, seal(envelope, sealer, head.dataset_id, path, Part(tuple(tables))))
    return [path, *(table.path for table in tables)]


def read_files(log: Log, job_id: str, head: Entry, envelope: Envelope) -> tuple[list[FileEntry], list[str]]:
    """Return the files that the processes of a job were about to write, and the objects that have them.

    Files whose keys are gone are left out.
    """
    found: list[FileEntry] = []
    objects: list[str] = []
    for listed in sorted(log.store.list(beside_plan(job_id, PART)), key=lambda listed: listed.path):
        try:
            document = Document.parse(log.store.read_small(listed.path, PLAN_NBYTES), listed.path)
            part = log.unsealed(document, Part, head.keys)
            objects += [listed.path, *(table.path for table in part.tables)]
            found += [row for table in part.tables for row in log.tables.rows(table, envelope)]
        except (FileNotFoundError, FormatError, IntegrityError, KeyAccessError):
            continue
    return found, objects
