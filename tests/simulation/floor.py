"""The operations of a simulation over `ags_fast.onelog`, by the names that `simulation.operations` has."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.entries import FileEntry
from ags_fast.dataset.files.contents import Contents, format_of
from ags_fast.dataset.keks import Want
from ags_fast.dataset.names import object_name
from ags_fast.dataset.policy import Policy
from ags_fast.handle.dataset import Dataset
from ags_fast.keys.kms import load_kms
from ags_fast.keystores import open_key_store, rows_of
from ags_fast.onelog import reach
from ags_fast.onelog.change import Wish
from ags_fast.onelog.deks import with_new_keys
from ags_fast.onelog.draft import Draft, Idle
from ags_fast.onelog.entry import Entry
from ags_fast.onelog.errors import ExpiredError, JobEndedError
from ags_fast.onelog.job import Job
from ags_fast.onelog.keks import Keks
from ags_fast.onelog.keys import Rotation
from ags_fast.onelog.log import Log
from ags_fast.onelog.masters import rewrap_keks
from ags_fast.onelog.plan import read_plan
from ags_fast.onelog.snapshot import Snapshot
from simulation import operations
from simulation.kms import PROPERTIES
from simulation.operations import FIRST, LIFETIME, OLD, ROOT, SOURCE, STREAM, Files, Place, parquet
from simulation.store import SimStore

if TYPE_CHECKING:
    from collections.abc import Callable


MAIN = Want("master")
here = Place()  # of the operation that this process does


def opened() -> Log:
    """Return the log of the dataset."""
    return Log(SimStore(ROOT), load_kms(PROPERTIES), key_store=open_key_store(here.key_store))


def dataset() -> Dataset:
    """Return a new handle."""
    return Dataset.open(ROOT, kms=PROPERTIES, key_store=here.key_store)


def make(place: Place) -> None:
    """Make a dataset whose version `OLD` has files."""
    global here
    here = place
    for key_id in operations.MASTERS:
        SimStore.door.ask("turn", key_id)
    made = Dataset.create(
        ROOT, kms=PROPERTIES, wrapping_key_id="master", policy=Policy(place.scope), key_store=place.key_store
    )
    write(FIRST)
    if place.columns:
        made.refresh()
        with made.transaction(column_keys={"secret": "columns"}) as new, new.create("table", "parquet") as file:
            file.write(parquet())
    if place.keep is not None:
        _set_policy(Policy(place.scope, keep=place.keep))


def write(files: Files, *, replace: bool = False, batch: tuple[str, int] | None = None) -> None:
    """Write files as one transaction."""
    with dataset().transaction() as new:
        if batch is not None:
            new.once(*batch)
        for path, data in files.items():
            with new.create(path, replace=replace) as file:
                file.write(data)


def new_row(job: Job, path: str, kind: Want = MAIN) -> FileEntry:
    """Return a new file of a job, without content."""
    (key_id,) = job.keys.take([kind])
    file = object_name(path, f"{job.id}-{secrets.token_hex(4)}")
    job.made.append(file)
    row = FileEntry(
        path, file, "ags1", 0, 36, 1 << 20, key_id, b"", None, bytes(16), job.id, None, None, None, path, ""
    )  # fmt: skip
    (sealed,) = with_new_keys([row], 16, job.keys.envelope(), job.base.dataset_id)
    return sealed


def _written(job: Job, base: Entry, path: str, data: bytes, kind: Want) -> FileEntry:
    row = new_row(job, path, kind)
    contents = Contents(base.dataset_id, job.log.store, job.keys.envelope())
    new = job.log.store.begin(row.file, exclusive=True)
    writer = format_of(row).write(contents, row, new)
    writer.write(data)
    plain_length, file_length = writer.finish()
    return row._replace(plain_length=plain_length, file_length=file_length)


def _rename(place: Place, me: str) -> None:
    with dataset().transaction() as new:
        new.rename({"e/renamed": "f/renamed"})


def _remove(place: Place, me: str) -> None:
    with dataset().transaction() as new:
        try:
            new.remove("d/removed")
        except ExpiredError:
            raise
        except FileNotFoundError:
            pass


def _taken_up(log: Log, operation: str) -> Job | None:
    """Go on with a job that another process has begun, dead or alive."""
    for job_id in sorted(log.plans()):
        plan = read_plan(log, job_id, log.head())
        if plan is not None and plan.operation == operation and plan.of is None:
            try:
                return Job.resume(log, job_id)
            except JobEndedError:
                pass
    return None


def _rekey(place: Place, me: str) -> None:
    log = opened()
    base = log.head()
    snapshot = Snapshot(log, base)
    rows = list(snapshot.files())
    kinds = [Want.of(base.keys[row.key_id]) for row in rows]
    job = _taken_up(log, "rekey") or Job.begin(
        log, "rekey", {kind: kinds.count(kind) for kind in kinds}, resumable=True
    )
    new = []
    for row, kind in zip(rows, kinds, strict=True):
        try:
            with snapshot.unless_expired():
                data = _content(log, base, row)
        except ExpiredError:
            job.give_up()
            raise
        new.append(_written(job, base, row.path, data, kind))
    job.commit(Wish("rekey", new, {row.path: row.file for row in rows}, whole=False))


def _rotate(rotation: Rotation) -> None:
    Job.begin(opened(), "rotate").rotate(rotation)


def _turn(place: Place, me: str) -> None:
    SimStore.door.ask("turn", "master")
    rewrap_keks(opened(), "master")


def _destroy(place: Place, me: str) -> None:
    """Turn the master key, and destroy its older versions."""
    _turn(place, me)
    log = opened()
    newest, destroyed = SimStore.door.ask("kms", "master")
    for version in set(range(1, newest)) - destroyed:
        reach.retire_master(log, Idle(), ("master", str(version)))
        SimStore.door.ask("destroy", "master", version)


def _restore(place: Place, me: str) -> None:
    log = opened()
    log.entry(OLD)
    job = Job.begin(log, "restore")

    def files(head: Entry) -> Draft:
        old = log.entry(OLD)
        return Draft("restore", files=old.files, uses=job.uses(head), first=reach.retention(log, head, head.policy))

    job.replace_files(files)


def _set_policy(policy: Policy) -> None:
    job = Job.begin(opened(), "policy")
    job.commit(Wish("policy", policy=policy))


def _compact(place: Place, me: str) -> None:
    log = opened()
    job = Job.begin(log, "compact")

    def files(head: Entry) -> Draft | None:
        rows = [row for table in head.files for row in log.tables.rows(table, log.envelope(head))]
        tables = log.tables.write(rows, job.id, head.sealer, log.envelope(head)) if len(head.files) > 1 else head.files
        return Draft("compact", files=tuple(tables), uses=job.uses(head), first=reach.retention(log, head, head.policy))

    job.replace_files(files)


def _expire(place: Place, me: str, *, skip_grace: bool = False) -> None:
    log = opened()

    def first(head: Entry) -> int:
        return reach.retention(log, head, head.policy if place.keep else Policy(keep=1), changes=False)

    reach.expire(log, Idle(), first, skip_grace=skip_grace, now_ms=_now_ms())


def _sweep(place: Place, me: str) -> None:
    log = opened()
    reach.sweep(log, Idle())


def _put(place: Place, me: str) -> None:
    write({f"new/{me}": me.encode()})


def _at_place(run: Callable[[Place, str], Any]) -> Callable[[Place, str], Any]:
    def placed(place: Place, me: str) -> Any:
        global here
        here = place
        return run(place, me)

    return placed


_RUNS: dict[str, Callable[[Place, str], Any]] = {
    "put": _put,
    "overwrite": lambda place, me: write({"d/overwritten": me.encode()}, replace=True),
    "rename": _rename,
    "rm": _remove,
    "encrypt": lambda place, me: write({"encrypted": SOURCE}, replace=True),
    "batch": lambda place, me: write({f"batch/{me}": b"batch"}, batch=(STREAM, 1)),
    "rekey": _rekey,
    "compact": _compact,
    "kek": lambda place, me: _rotate(Rotation()),
    "mek": _turn,
    "destroy": _destroy,
    "column": lambda place, me: _rotate(Rotation(from_master="columns")),
    "expire": _expire,
    "force": lambda place, me: _expire(place, me, skip_grace=True),
    "sweep": _sweep,
    "restore": _restore,
    "policy": lambda place, me: _set_policy(Policy(place.scope, kek_lifetime_days=365, keep=place.keep)),
}
RUNS = {name: _at_place(run) for name, run in _RUNS.items()}


def read(place: Place) -> Files:
    """Sweep up, then read every byte of every version. Returns the newest files, and the policy."""
    RUNS["sweep"](place, "last")
    SimStore.door.world.forget()
    log = opened()
    head = log.head()
    if log.kek_rows.elsewhere:
        there, named = set(log.kek_rows.store().list(head.dataset_id)), set(rows_of(head.keys.values()))
        if there != named:
            raise AssertionError(
                f"the key store lacks {len(named - there)} rows, and has {len(there - named)} of no use"
            )
    newest: Files = {}
    for entry in log.kept(head):
        for table in entry.key_tables:
            Keks.of(head.keys).place.rows(table, log.envelope(head))
        files = {
            row.path: _content(log, head, row)
            for table in entry.files
            for row in log.tables.rows(table, log.envelope(head))
        }
        newest = files if entry is head else newest
    return newest | {LIFETIME: f"{head.policy.kek_lifetime_days:g}".encode()}


def _content(log: Log, head: Entry, row: FileEntry) -> bytes:
    contents = Contents(head.dataset_id, log.store, log.envelope(head))
    with format_of(row).view(contents, row) as file:
        return operations.as_source(file.read())


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


__all__ = ["RUNS", "ExpiredError", "make", "read"]
