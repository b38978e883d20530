"""Rows: what a job reports about each file."""

from __future__ import annotations

import functools
import socket
from typing import TYPE_CHECKING

from ags_fast.dataset.manifest_task import ManifestTask
from ags_fast.dataset.rows import Row, manifest_row

if TYPE_CHECKING:
    from collections.abc import Callable

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.jobs.work.context import AnyTask, Context, Task


def make_row(
    context: Context,
    task: AnyTask,
    attempt: int = 0,
    status: str = "ok",
    error_class: str | None = None,
    error: str | None = None,
    seconds: float = 0.0,
) -> Row:
    """Return the row of a file or manifest; with the default arguments, of one that succeeded."""
    if isinstance(task, ManifestTask):
        row = manifest_row(context.dataset, task.old, status)._replace(key_id=task.key_id)
        row = row._replace(dst=context.dataset.full_path(task.file), file_length=task.length or None)
        return row._replace(error_class=error_class, error=error, seconds=seconds, attempt=attempt, host=_host())
    source, destination = NAMES[context.op]
    entry = task.entry
    return Row(
        source(context, task),
        destination(context, task),
        status,
        error_class,
        error,
        entry.plain_length,
        entry.file_length or None,
        entry.block_size or None,
        entry.format,
        entry.key_id or None,
        seconds,
        attempt,
        _host(),
    )


def planned_row(src: str, dst: str | None, entry: FileEntry, status: str = "planned") -> Row:
    """Return the row of a file that is not done yet."""
    return Row(
        src,
        dst,
        status,
        plain_length=entry.plain_length,
        file_length=entry.file_length or None,
        block_size=entry.block_size or None,
        format=entry.format,
        key_id=entry.key_id or None,
    )


def failed_row(context: Context, task: AnyTask, attempt: int, error_class: str, error: str) -> Row:
    """Return the row of a file that failed."""
    return make_row(context, task, attempt, "failed", error_class, error)


_host = functools.cache(socket.gethostname)


def is_there(path: str) -> str:
    """Return the message for a file that exists already."""
    return f"{path} exists already: pass overwrite=True to replace it"


def _in_dataset(context: Context, task: Task) -> str:
    return context.dataset.full_path(task.entry.file)


def _source_file(context: Context, task: Task) -> str:
    assert context.other is not None
    return context.other.full_path(task.entry.source)


def _destination_file(context: Context, task: Task) -> str:
    assert context.other is not None
    return context.other.full_path(task.entry.path)


def _old_file(context: Context, task: Task) -> str:
    assert task.old is not None
    return context.dataset.full_path(task.old.file)


# The names of the files that each operation reads and writes.
NAMES: dict[str, tuple[Callable[[Context, Task], str], Callable[[Context, Task], str | None]]] = {
    "encrypt": (_source_file, _in_dataset),
    "decrypt": (_in_dataset, _destination_file),
    "verify": (_in_dataset, lambda context, task: None),
    "rekey": (_old_file, _in_dataset),
}
