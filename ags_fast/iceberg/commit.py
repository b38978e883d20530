"""Commit an edit of a table's raw metadata, by the catalog's own compare-and-swap."""

from __future__ import annotations

import functools
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ParamSpec

from pyiceberg.exceptions import CommitFailedException

from ags_fast.errors import AgsError, ConcurrentChangeError, IntegrityError, PolicyError
from ags_fast.iceberg import metadata, policy
from ags_fast.iceberg.io import FileIO
from ags_fast.iceberg.reading import load_metadata
from ags_fast.iceberg.session import seen_again
from ags_fast.seals.guard import SEALED
from ags_fast.seals.pins import OpenPin, SealedPin

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyiceberg.table import Table

    from ags_fast.iceberg.metadata import Raw
    from ags_fast.jobs.results import JobResult

__all__ = ["edit", "pin_of", "pinned", "raw_metadata", "table_io"]

P = ParamSpec("P")

ATTEMPTS = 20  # commits that others came first to


def table_io(table: Table) -> FileIO:
    """Return a table's FileIO. PolicyError if the table was not loaded by a catalog of ags_fast.iceberg."""
    if not isinstance(table.io, FileIO):
        raise PolicyError("load the table from a catalog of ags_fast.iceberg: this one was loaded without its keys")
    return table.io


def raw_metadata(table: Table) -> Raw:
    """Return the raw metadata of the table as it was loaded."""
    io = table_io(table)
    if (raw := getattr(table, "raw", None)) is not None:
        return raw  # type: ignore[no-any-return]
    return load_metadata(io.session, table.metadata_location, io.inner(table.metadata_location))


def pin_of(table: Table, raw: Raw) -> str:
    """Return the pin of a table's metadata. Errors: see `Guard.look`."""
    found = table_io(table).session.guard.look(raw, table.metadata_location)
    if found.verdict == SEALED and found.seal is not None and found.key is not None:
        return SealedPin.of(found.seal, found.key).text
    return OpenPin.of(raw).text


def pinned(job: Callable[P, JobResult]) -> Callable[P, JobResult]:
    """Wrap a job so that its result has the pin of the table, as the job leaves it; None if nothing opens the seal."""

    @functools.wraps(job)
    def run(*args: P.args, **options: P.kwargs) -> JobResult:
        result, named = job(*args, **options), dict(options)
        table: Any = args[0] if args else named["table"]
        with suppress(AgsError, OSError):  # what the job has done stays done
            result.pin = pin_of(table, raw_metadata(table))
        return result

    return run


def begin(table: Table) -> None:
    """See before a transaction writes anything that the metadata of an encrypted table are as they were read.

    IntegrityError if not: what the transaction makes of them would be lost, or sealed. The commit needs them, too, and
    takes them from the session, if no other commit comes first.
    """
    io, location = table_io(table), table.metadata_location
    if not io.encrypted or io.session.guard.served:  # a server's answer is the metadata
        return
    try:
        data = metadata.read(io.inner(location).new_input(location))
    except FileNotFoundError:  # expired: then other commits came first
        return
    if data == io.session.stored(location):
        seen_again.set(location)
        return
    if metadata.parse(data, location) != raw_metadata(table):
        raise IntegrityError(f"{location} was changed after the table was loaded: such a file never changes")


def edit(table: Table, change: Callable[[Raw], Raw]) -> Raw:
    """Commit an edit of a table's raw metadata, and return them: one new metadata file. Then `table` is that version.

    `change` gets the newest raw metadata, and returns the new ones: it changes nothing in place, and may be called
    again, if another commit came first. It may return its argument: then nothing is committed.

    Raises:
        ConcurrentChangeError: Other commits came first, 20 times in a row.
        CommitStateUnknownException: It is not known whether the commit was made. Of any other error of the catalog or
            the network that is not known, either, but the newest metadata did not show it.
    """
    session = table_io(table).session
    for _ in range(ATTEMPTS):
        table.refresh()
        base = raw_metadata(table)
        if policy.is_encrypted(base):
            session.guard.see_base(base, table.metadata_location)
        made = change(base)
        if made is base:
            return base
        mark = secrets.token_hex(8)
        session.set_edit(mark, _once(base, made, change))
        try:
            with table.transaction() as transaction:
                transaction.set_properties({metadata.MARK: mark})
        except CommitFailedException:
            continue
        finally:
            session.set_edit(mark, None)
        table.refresh()
        return raw_metadata(table)
    raise ConcurrentChangeError(f"other commits came first, {ATTEMPTS} times in a row: try again")


def _once(base: Raw, made: Raw, change: Callable[[Raw], Raw]) -> Callable[[Raw], Raw]:
    """Return an edit that uses what was made, if the base is the same."""
    return lambda newest: made if newest == base else change(newest)
