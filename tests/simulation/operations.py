"""What can be done to a dataset, each as a user would call it, and what that makes of the files of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ags_fast import Dataset, errors
from ags_fast.dataset import reach
from ags_fast.dataset.access import Access
from ags_fast.dataset.draft import Idle
from ags_fast.dataset.keks import Keks
from ags_fast.jobs import (
    JobResult,
    LocalEngine,
    Policy,
    compact,
    encrypt_files,
    expire,
    key_status,
    rekey_files,
    remove_files,
    restore_version,
    rotate,
    set_policy,
    sweep,
)
from ags_fast.keys.stores import rows_of
from simulation.actors import Outcome
from simulation.kms import PROPERTIES
from simulation.store import SimStore

Files = dict[str, bytes]  # what a dataset has: contents by path, and how long KEKs live in days as `LIFETIME`

ROOT = "sim://bucket/dataset"
SOURCES = "sim://bucket/sources"
MASTERS = ("master", "columns")
QUIET: dict[str, Any] = {"engine": LocalEngine(0), "progress": False}
STREAM = "stream"
FIRST = {"d/overwritten": b"one", "d/removed": b"removed", "e/renamed": b"renamed"}
SOURCE = b"from a source"
LIFETIME = "//kek_lifetime_days"  # no path of a file
OLD = 2  # the number of the version that is restored
KNOWN = (errors.AgsError, FileNotFoundError, FileExistsError)  # errors that say what is the matter
ACCUSING = (errors.IntegrityError, errors.FormatError)  # they blame the storage, which is honest here
TYPED = {"TimeoutError", "FileNotFoundError", "FileExistsError", *errors.__all__} - {
    error.__name__ for error in ACCUSING
}  # the names of the errors that a row may have


class Place(NamedTuple):
    """A dataset, and how it is set up.

    Attributes:
        scope: The policy's `kek_scope`.
        keep: The policy's `keep`.
        columns: Whether a Parquet file is there, with a column under a master key of its own.
        key_store: Where the keys are: None, or the URL of a database.
    """

    scope: str = "dataset"
    keep: int | None = 1
    columns: bool = False
    key_store: str | None = None

    @property
    def at(self) -> dict[str, Any]:
        """The arguments with which every call reaches the dataset."""
        return {"kms": PROPERTIES, "key_store": self.key_store}

    def open(self) -> Dataset:
        """Return a new handle."""
        return Dataset.open(ROOT, **self.at)


class Operation(NamedTuple):
    """Something that is done to a dataset.

    Attributes:
        run: Does it. Gets the place, and the name of who does it.
        effect: What it makes of the files; None: it cannot be done to these.
    """

    run: Callable[[Place, str], Any]
    effect: Callable[[Files, str], Files | None] = lambda files, me: files


@cache
def parquet() -> bytes:
    """Return a Parquet file of two columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": [1, 2], "secret": ["x", "y"]}), sink, compression="none", store_schema=False)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def make(place: Place) -> None:
    """Make a dataset whose version `OLD` has files. The next commit expires as the policy says."""
    for key_id in MASTERS:
        SimStore.door.ask("turn", key_id)
    SimStore.door.ask("put", "bucket/sources/encrypted", SOURCE)
    policy = Policy(place.scope)
    dataset = Dataset.create(ROOT, wrapping_key_id="master", policy=policy, **place.at)
    _write(place, FIRST)
    if place.columns:
        dataset.refresh()
        with dataset.transaction(column_keys={"secret": "columns"}) as new, new.create("table", "parquet") as file:
            file.write(parquet())
    if place.keep is not None:
        set_policy(ROOT, policy.replace(keep=place.keep), **place.at)


def _write(place: Place, files: Files, **options: Any) -> None:
    with place.open().transaction(fsync=False) as new:
        for path, data in files.items():
            with new.create(path, **options) as file:
                file.write(data)


def _rename(place: Place, me: str) -> None:
    with place.open().transaction(fsync=False) as new:
        new.rename({"e/renamed": "f/renamed"})


def _batch(place: Place, me: str) -> None:
    with place.open().transaction(fsync=False) as new:
        new.once(STREAM, 1)
        with new.create(f"batch/{me}") as file:
            file.write(b"batch")


def _encrypt(place: Place, me: str) -> JobResult:
    return encrypt_files(
        SOURCES, ROOT, wrapping_key_id="master", overwrite=True, fsync=False, resume="length", **QUIET, **place.at
    )


def _turn(place: Place, me: str) -> JobResult:
    SimStore.door.ask("turn", "master")
    return rotate(ROOT, what="mek", **QUIET, **place.at)


def _expire(place: Place, **options: Any) -> JobResult:
    """Expire as the policy says, or all but the newest version."""
    return expire(ROOT, keep=None if place.keep else 1, **options, **place.at)


def _destroy(place: Place, me: str) -> None:
    """Turn the master key, and destroy its older versions."""
    _turn(place, me)
    log = Access.of(ROOT, PROPERTIES, place.key_store).log()
    newest, destroyed = SimStore.door.ask("kms", "master")
    for version in set(range(1, newest)) - destroyed:
        reach.retire_master(log, Idle(), ("master", str(version)))
        SimStore.door.ask("destroy", "master", version)


def _policy(place: Place, me: str) -> None:
    set_policy(ROOT, Policy(place.scope, kek_lifetime_days=365, keep=place.keep), **place.at)


def _moved(files: Files, old: str, new: str) -> Files | None:
    if old not in files or new in files:
        return None
    return {path: data for path, data in files.items() if path != old} | {new: files[old]}


def _without(files: Files, path: str) -> Files:
    """Files without one of them, which somebody else may have removed before."""
    return {other: data for other, data in files.items() if other != path}


def _with_batch(files: Files, me: str) -> Files:
    return files if any(path.startswith("batch/") for path in files) else files | {f"batch/{me}": b"batch"}


def first_files(place: Place) -> Files:
    """The files of a new dataset; Parquet as its source."""
    lifetime = f"{Policy().kek_lifetime_days:g}".encode()
    return FIRST | ({"table": parquet()} if place.columns else {}) | {LIFETIME: lifetime}


OPERATIONS = {
    "put": Operation(
        lambda place, me: _write(place, {f"new/{me}": me.encode()}),
        lambda files, me: files | {f"new/{me}": me.encode()},
    ),
    "overwrite": Operation(
        lambda place, me: _write(place, {"d/overwritten": me.encode()}, replace=True),
        lambda files, me: files | {"d/overwritten": me.encode()},
    ),
    "rename": Operation(_rename, lambda files, me: _moved(files, "e/renamed", "f/renamed")),
    "rm": Operation(
        lambda place, me: remove_files(ROOT, "d/removed", progress=False, **place.at),
        lambda files, me: _without(files, "d/removed"),
    ),
    "encrypt": Operation(_encrypt, lambda files, me: files | {"encrypted": SOURCE}),
    "batch": Operation(_batch, _with_batch),
    "rekey": Operation(lambda place, me: rekey_files(ROOT, fsync=False, **QUIET, **place.at)),
    "compact": Operation(lambda place, me: compact(ROOT, **place.at)),
    "kek": Operation(lambda place, me: rotate(ROOT, what="kek", **QUIET, **place.at)),
    "mek": Operation(_turn),
    "destroy": Operation(_destroy),
    "column": Operation(lambda place, me: rotate(ROOT, what="kek", from_key_id="columns", **QUIET, **place.at)),
    "expire": Operation(lambda place, me: _expire(place)),
    "force": Operation(lambda place, me: _expire(place, skip_grace=True)),
    "sweep": Operation(lambda place, me: sweep(ROOT, **place.at)),
    "restore": Operation(
        lambda place, me: restore_version(ROOT, OLD, progress=False, **place.at),
        lambda files, me: FIRST | {LIFETIME: files[LIFETIME]},
    ),
    "policy": Operation(_policy, lambda files, me: files | {LIFETIME: b"365"}),
}


def all_once() -> None:
    """Make a dataset, and do everything to it."""
    place = Place()
    make(place)
    for name in OPERATIONS:
        outcome_of(name, place, "warm")


def read(place: Place) -> Files:
    """Sweep up, then read every byte of every version. Returns what the newest one has."""
    if failed := sweep(ROOT, **place.at).failed:
        raise AssertionError(f"the last sweep: {failed[0].error_class}: {failed[0].error}")
    SimStore.door.world.forget()
    _check_keys(place)
    numbers = [version.number for version in place.open().versions()]
    contents = [_contents(place, number) for number in numbers]  # the newest first
    lifetime = f"{key_status(ROOT, **place.at)['policy']['kek_lifetime_days']:g}"
    return contents[0] | {LIFETIME: lifetime.encode()}


def _check_keys(place: Place) -> None:
    """Read all tables of KEKs. Raise AssertionError unless the key store has just the rows that the head names."""
    log, head = Access.of(ROOT, PROPERTIES, place.key_store).open()
    for entry in log.kept(head):
        for table in entry.key_tables:
            Keks.of(head.keys).place.rows(table, log.envelope(head))
    if log.kek_rows.elsewhere:
        there, named = set(log.kek_rows.store().list(head.dataset_id)), set(rows_of(head.keys.values()))
        if there != named:
            raise AssertionError(
                f"the key store lacks {len(named - there)} rows, and has {len(there - named)} of no use"
            )


def _contents(place: Place, number: int) -> Files:
    dataset = Dataset.open(ROOT, version=number, **place.at)
    return {file.path: _content(dataset, file.path) for file in dataset.files()}


def _content(dataset: Dataset, path: str) -> bytes:
    with dataset.open_file(path) as file:
        data: bytes = file.read()
    return as_source(data)


def as_source(data: bytes) -> bytes:
    """Return the source of a file's plaintext: of a Parquet file, the plaintext view has other bytes."""
    return parquet() if data[:4] == b"PAR1" and _same_rows(data, parquet()) else data


def _same_rows(one: bytes, other: bytes) -> bool:
    """Whether two Parquet files have the same values."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    first, second = (pq.read_table(pa.BufferReader(data)) for data in (one, other))
    return bool(first.equals(second))


def outcome_of(name: str, place: Place, me: str) -> Outcome:
    """Do an operation, and say how it ended, as its user sees it."""
    try:
        result = OPERATIONS[name].run(place, me)
    except TimeoutError as error:
        return Outcome("unknown", _text(error))
    except ACCUSING as error:
        return Outcome("wrong", _text(error))
    except KNOWN as error:
        return Outcome("unknown" if type(error).__name__ == "UnknownOutcomeError" else "no", _text(error))
    except Exception as error:
        return Outcome("wrong", _text(error))
    if not isinstance(result, JobResult):
        return Outcome("yes")
    more = getattr(result, "expired", None)
    failed = [*result.failed, *(more.failed if more else ())]
    if wrong := [row for row in failed if row.error_class not in TYPED]:
        return Outcome("wrong", f"{wrong[0].error_class}: {wrong[0].error}")
    if any(row.error_class == "TimeoutError" for row in failed):
        return Outcome("unknown", str(failed[0].error))
    return Outcome("no" if result.failed else "yes", "; ".join(f"{row.error_class}: {row.error}" for row in failed))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
