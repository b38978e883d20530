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
    lengths = entry.plain_length, entry.file_length or None, entry.block_size or None
    return Row(src, dst, status, None, None, *lengths, entry.format, entry.key_id or None, source_length=entry.nbytes)


def failed_row(context: Context, task: Task, attempt: int, error_class: str, error: str) -> Row:
    """Return the row of a file that failed."""
    return make_row(context, task, attempt, "failed", error_class=error_class, error=error)


def is_there(path: str) -> str:
    """Return the message for a file that exists already."""
    return f"{path} exists already: pass overwrite=True to replace it"


def _names(context: Context, task: Task) -> tuple[str, str | None]:
    """Return what an operation reads and writes. A file of the dataset has its path there, whatever its object is."""
    entry, other = task.entry, context.other
    if other is None:
        return entry.path, entry.path if task.old else None
    if context.op == "encrypt":
        return other.full_path(entry.source), entry.path
    return entry.path, other.full_path(entry.path)
