"""Run one task. A table names the module that works on each format."""

from __future__ import annotations

import functools
import hmac
import time
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from ags_fast.dataset.entries import source_mac_key, with_lengths
from ags_fast.errors import FormatError, IntegrityError
from ags_fast.jobs.results import Row, describe
from ags_fast.jobs.work.context import AlreadyEncryptedError, Context, Operations, Outcome, Task
from ags_fast.jobs.work.rows import failed_row as failed_row
from ags_fast.jobs.work.rows import make_row

if TYPE_CHECKING:
    from ags_fast.dataset.entries import FileEntry

# A module is imported when a task first needs it: importing Parquet's takes longer than a small job.
MODULES = {"ags1": "ags_fast.jobs.work.stream", "parquet": "ags_fast.jobs.work.parquet"}


class Work(Protocol):
    """The functions in the module of a format."""

    OPERATIONS: Operations

    def holds(self, context: Context, entry: FileEntry, file: str) -> bool:
        """Return whether `file` holds what belongs to `entry`. Raises the reader's error if not."""

    def same_as_source(self, context: Context, entry: FileEntry) -> bool:
        """Return whether the source of a file has the bytes that the dataset holds."""


@functools.cache
def work_on(format: str) -> Work:
    """Return the module that works on files of a format. Raises FormatError for a format of a newer ags_fast."""
    if format not in MODULES:
        raise FormatError(f"a newer ags_fast made this file: its format is {format!r}")
    return cast("Work", import_module(MODULES[format]))


def _compare(context: Context, task: Task, attempt: int) -> Outcome:
    entry, same = task.entry, False
    with suppress(IntegrityError, FormatError, OSError):  # a damaged file is made again; a refused key says nothing
        if entry.checksum is None:
            same = work_on(entry.format).same_as_source(context, entry)
        else:
            same = hmac.compare_digest(_checksum(context, entry), entry.checksum)
    return Outcome("ok" if same else "skipped", None if same else "Different", file_length=entry.file_length)


def _checksum(context: Context, entry: FileEntry, planned: bool = False) -> bytes:
    """Return the keyed digest of the source of a file. planned: the source must be as it was planned."""
    wraps = entry.wraps(context.dataset_id)
    mac = hmac.new(source_mac_key([context.envelope.unwrap(*wrap) for wrap in wraps]), digestmod="sha256")
    return context.digest_outside(entry.path, mac, entry if planned else None)


def run_file(context: Context, task: Task, attempt: int = 0) -> Row:
    """Run the task of one file. Its error goes into the row; only a fault of the worker is raised."""
    begun, checksum = time.monotonic(), None
    with context.counted(task.nbytes):
        try:
            operation = _compare if context.op == "compare" else work_on(task.entry.format).OPERATIONS[context.op]
            status, error_class, text, length, plain = operation(context, task, attempt)
            if context.checksum:
                checksum = _checksum(context, task.entry, planned=True).hex()
            task = task._replace(entry=with_lengths(task.entry, length, plain))
        except AlreadyEncryptedError as error:
            status, error_class, text = "skipped", "AlreadyEncryptedError", str(error)
        except Exception as error:
            status, error_class, text = "failed", type(error).__name__, describe(error)
    facts = {"error_class": error_class, "error": text, "seconds": time.monotonic() - begun, "checksum": checksum}
    return make_row(context, task, attempt, status, **facts)
