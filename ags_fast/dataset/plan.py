"""Plans: what open jobs may write, durable before the first object (rule 2)."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ags_fast.dataset.columns import Count
from ags_fast.dataset.entry import MasterVersion, Time, main_key
from ags_fast.dataset.kinds import clock_ms
from ags_fast.dataset.names import beside_plan, new_job_id, plan_path
from ags_fast.dataset.sealed import Body, Document, decoded, read_object, seal
from ags_fast.dataset.tables import Table
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError, PolicyError, UnknownOutcomeError
from ags_fast.keys.entry import KeyEntry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.log import Log
    from ags_fast.fs import Store
    from ags_fast.keys.envelope import Envelope

PLAN_NBYTES = 64 << 20  # some 150,000 new KEKs
TRIES = 20  # ids, until a plan is created with a clear answer
MORE_USES = 64  # data keys, or files, that a further plan reserves, at least
RENEW_SECONDS = 600.0  # between two signs of life
COPY = "table-"  # beside a plan: a copy of a table that is made
UNREADABLE = (FormatError, IntegrityError, KeyAccessError)  # what is wrong with one plan stops no other
PART = "files-"  # beside a plan: the files that the job is about to write


class Place(NamedTuple):
    """Where a plan and what is beside it are stored, and what seals them."""

    store: Store
    envelope: Envelope
    sealer: KeyEntry
    dataset_id: str

    def create(self, path: str, body: msgspec.Struct) -> None:
        """Store a document, after the checks that readers make. PolicyError: it is longer than they take."""
        data = seal(self.envelope, self.sealer, self.dataset_id, path, body)
        if len(data) > PLAN_NBYTES:
            raise PolicyError(f"{path} would have {len(data)} bytes, and {PLAN_NBYTES} are the limit: divide the job")
        decoded(Document.parse(data, path).text, type(body), path)
        self.store.create_exclusive(path, data)


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an open job may write: ``_ags/plans/<job id>/plan``."""

    operation: str  # what the job does
    job_id: str  # of the job whose plan this is, or of the further plan
    of: str | None  # the job that it is a further plan of; None: the plan is the job's own
    time_ms: Time  # when it was made
    new: dict[str, KeyEntry]  # the KEKs that the job brings
    uses: dict[str, Count]  # how many data keys the job wraps under each KEK, at most
    resumable: bool = False  # whether other processes may go on with the job
    facts: dict[str, Any] = {}  # what a process that goes on must know


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tables of the files that a job is about to write, with their data keys."""

    tables: tuple[Table, ...]


class Copy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A copy of a table that a job has made, with its data keys under other KEKs."""

    of: str  # the path of the table
    table: Table  # the copy
    gone: tuple[MasterVersion, ...] = ()  # versions of master keys under which the KMS has certainly wrapped none of it


def copy_path(job_id: str, table: str) -> str:
    """Return the path of what says, beside a plan, that a job has made a table. table: the path of the table."""
    return beside_plan(job_id, f"{COPY}{table.rpartition('-')[2]}")


def store_copy(place: Place, job_id: str, copy: Copy) -> None:
    """Say beside the plan that a copy of a table is made, so that whoever goes on with the job need not make it."""
    place.create(copy_path(job_id, copy.table.path), copy)


def read_copy(log: Log, path: str, head: Entry) -> Copy:
    """Return what `store_copy` has stored."""
    return _read(log, path, Copy, head)


def read_copies(log: Log, job_id: str, head: Entry) -> dict[str, Copy]:
    """Return the copies of tables that processes of a job have made, by the paths of those tables."""
    found = {}
    for listed in log.store.list(beside_plan(job_id, COPY)):
        with suppress(FileNotFoundError, IntegrityError, KeyAccessError):
            copy = read_copy(log, listed.path, head)
            found[copy.of] = copy
    return found


def store_plan(place: Place, plan: Plan) -> bool:
    """Store a plan by one request. False: there is no clear answer, so the job needs another id, and other KEKs."""
    try:
        place.create(plan_path(plan.job_id, plan.of), plan)
    except OSError:  # also FileExistsError: the request may have been repeated on its way
        return False
    return True


def store_further(
    place: Place, operation: str, of: str, uses: Mapping[str, int], new: Mapping[str, KeyEntry] = {}
) -> Plan:
    """Store a further plan of the job `of`, before the job wraps what its plans do not reserve (rule 9)."""
    for _ in range(TRIES):
        plan = Plan(operation, new_job_id(), of, clock_ms(), dict(new), dict(uses))
        if store_plan(place, plan):
            return plan
    raise UnknownOutcomeError(f"{place.store.url} does not say whether it has stored a plan: try again")


def read_plan(log: Log, job_id: str, head: Entry, of: str | None = None) -> Plan | None:
    """Return the plan of a job, or a further one; None: it is gone."""
    try:
        return _read(log, plan_path(job_id, of), Plan, head)
    except FileNotFoundError:
        return None


def _read(log: Log, path: str, kind: type[Body], head: Entry) -> Body:
    return log.unsealed(Document.parse(read_object(log.store, path, PLAN_NBYTES), path), kind, head.keys)


def store_files(log: Log, job_id: str, rows: Sequence[FileEntry], head: Entry, envelope: Envelope) -> list[str]:
    """Store the files that a job is about to write, so that whoever goes on with it uses the same data keys.

    The objects that have them are returned. No entry ever names these.
    """
    sealer = main_key(head.keys)
    tables = log.tables.write(rows, job_id, sealer.key_id, envelope)
    path = beside_plan(job_id, f"{PART}{secrets.token_hex(8)}")
    Place(log.store, envelope, sealer, head.dataset_id).create(path, Part(tuple(tables)))
    return [path, *(table.path for table in tables)]


def read_files(log: Log, job_id: str, head: Entry, envelope: Envelope) -> tuple[list[FileEntry], list[str]]:
    """Return the files that the processes of a job were about to write, and the objects that have them.

    Files whose keys are gone are left out.
    """
    found: list[FileEntry] = []
    objects: list[str] = []
    for listed in sorted(log.store.list(beside_plan(job_id, PART)), key=lambda listed: listed.path):
        try:
            part = _read(log, listed.path, Part, head)
            objects += [listed.path, *(table.path for table in part.tables)]
            found += [row for table in part.tables for row in log.tables.rows(table, envelope)]
        except (FileNotFoundError, *UNREADABLE):
            continue
    return found, objects
