"""Commit an edit of a table's raw metadata, by the catalog's own compare-and-swap."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

from ags_fast.errors import ConcurrentChangeError, PolicyError
from ags_fast.iceberg import metadata
from ags_fast.iceberg.io import FileIO
from ags_fast.iceberg.reading import load_metadata

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyiceberg.table import Table

    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.session import Session

__all__ = ["edit", "raw_metadata", "table_io", "table_session"]

ATTEMPTS = 20  # commits that others came first to
# What a REST server derives: see ags_fast.iceberg.rest.updates, also for the sequence number that an edit takes.
OF_EACH_COMMIT = ("last-updated-ms", "metadata-log", "last-sequence-number")


def table_io(table: Table) -> FileIO:
    """Return a table's FileIO. PolicyError if the table was not loaded by a catalog of ags_fast.iceberg."""
    if not isinstance(table.io, FileIO):
        raise PolicyError("load the table from a catalog of ags_fast.iceberg: this one was loaded without its keys")
    return table.io


def table_session(table: Table) -> Session:
    """Return the session of a table's catalog."""
    return table_io(table).session


def raw_metadata(table: Table) -> Raw:
    """Return the raw metadata of the table as it was loaded."""
    io = table_io(table)
    return load_metadata(io.session, table.metadata_location, io.inner(table.metadata_location))


def edit(table: Table, change: Callable[[Raw], Raw]) -> Raw:
    """Commit an edit of a table's raw metadata: one new metadata file. Afterwards `table` is that version.

    Args:
        table: A table of a catalog of ags_fast.iceberg.
        change: Gets the newest raw metadata, and returns the new ones: it changes nothing in place, and may be called
            again, if another commit came first. It may return its argument: then nothing is committed.

    Returns:
        The new raw metadata.

    Raises:
        ConcurrentChangeError: Other commits came first, 20 times in a row.
        CommitStateUnknownException: The catalog does not know whether it made the commit, and the newest metadata do
            not show that it did.
    """
    session = table_session(table)
    for _ in range(ATTEMPTS):
        table.refresh()
        base = raw_metadata(table)
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
        except CommitStateUnknownException:
            table.refresh()
            if not _was_made(table, session.written(mark), made):
                raise
        finally:
            session.set_edit(mark, None)
        table.refresh()
        return raw_metadata(table)
    raise ConcurrentChangeError(f"other commits came first, {ATTEMPTS} times in a row: try again")


def _was_made(table: Table, written: str | None, made: Raw) -> bool:
    """Tell whether the newest metadata are those of an edit, or follow them.

    Args:
        table: The table, newly loaded.
        written: The metadata file of the edit; None if a server writes it.
        made: What the edit made.
    """
    raw = raw_metadata(table)
    if written is not None:
        return written in (table.metadata_location, *(one["metadata-file"] for one in raw.get("metadata-log") or ()))
    return _content(raw) == _content(made)


def _content(raw: Raw) -> Raw:
    """Return what an edit changes, and a server stores as it is. Keys have no order."""
    content = {name: value for name, value in raw.items() if name not in OF_EACH_COMMIT and value != []}
    if "encryption-keys" in content:
        content["encryption-keys"] = {one["key-id"]: one for one in content["encryption-keys"]}
    return content


def _once(base: Raw, made: Raw, change: Callable[[Raw], Raw]) -> Callable[[Raw], Raw]:
    """Return an edit that uses what was made, if the base is the same."""

    def apply(newest: Raw) -> dict[str, Any]:
        return made if newest == base else change(newest)

    return apply
