"""Rows: what a job reports about each file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.rows import Row

if TYPE_CHECKING:
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.jobs.work.context import Context, Task


def make_row(context: Context, task: Task, attempt: int = 0, status: str = "ok", **more: Any) -> Row:
    """Return the row of a file; with the default arguments, of one that succeeded. more: other fields of `Row`."""
    row = planned_row(*_names(context, task), task.entry, status)
    return row._replace(attempt=attempt, host=os.uname().nodename, **more)


def planned_row(src: str, dst: str | None, entry: FileEntry, status: str = "planned") -> Row:
    """Return the row of a file that is not done yet."""
    row = Row(src, dst, status, plain_length=entry.plain_length, format=entry.format, key_id=entry.key_id or None)
    return row._replace(file_length=entry.file_length or None, block_size=entry.block_size or None)


def failed_row(context: Context, task: Task, attempt: int, error_class: str, error: str) -> Row:
    """Return the row of a file that failed."""
    return make_row(context, task, attempt, "failed", error_class=error_class, error=error)


def is_there(path: str) -> str:
    """Return the message for a file that exists already."""
    return f"{path} exists already: pass overwrite=True to replace it"


def _names(context: Context, task: Task) -> tuple[str, str | None]:
    """Return the names of the files that an operation reads and writes."""
    entry, old, other = task.entry, task.old, context.other
    inside = context.dataset.full_path(entry.file)
    if old is not None:
        return context.dataset.full_path(old.file), inside
    if context.op == "verify":
        return inside, None
    assert other is not None
    if context.op == "encrypt":
        return other.full_path(entry.source), inside
    return inside, other.full_path(entry.path)
