"""Check the files of a table by tasks on an engine."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ags_fast.dataset.rows import Row
from ags_fast.iceberg.checks import Item, check_file
from ags_fast.iceberg.manifests import Known
from ags_fast.iceberg.work.tasks import OLD_KEY, TableContext
from ags_fast.jobs.results import describe

__all__ = ["CheckContext", "CheckTask", "failed_row", "run_file", "task_of"]


class CheckTask(NamedTuple):
    """The check of one file. It holds no key."""

    path: str
    format: str  # AVRO, PARQUET, PUFFIN or ORC
    content: int  # 0 (data), 1 (position deletes) or 2 (equality deletes)
    length: int  # its bytes on storage, as its manifest says
    key: bytes | None  # its key metadata, as `TableContext.wrap` returned them
    vectors: tuple[tuple[int, int, int], ...]  # as of an `Item`

    @property
    def nbytes(self) -> int:
        """Bytes of work."""
        return self.length

    @property
    def kind(self) -> str:
        """What the row says that the file is."""
        return Known(self.path, self.length, None, self.content, self.format).kind


@dataclass(frozen=True)
class CheckContext(TableContext):
    """What all tasks of a verification share."""

    runner: ClassVar[str] = "ags_fast.iceberg.work.checking"


def task_of(context: CheckContext, item: Item) -> CheckTask:
    """Return the task that checks a file."""
    one = item.known
    key = None if one.key_metadata is None else context.wrap(one.key_metadata, OLD_KEY, one.path)
    return CheckTask(one.path, one.format or "", one.content, one.length, key, tuple(item.vectors))


def run_file(context: CheckContext, task: CheckTask, attempt: int = 0) -> Row:
    """Check one file. Its error goes into the row."""
    begun = time.monotonic()
    try:
        key = None if task.key is None else context.unwrap(task.key, OLD_KEY, task.path)
        known = Known(task.path, task.length, key, task.content, task.format)
        plain_length = check_file(context.inner(task.path), Item(known, vectors=list(task.vectors)))
    except Exception as error:  # of any storage: the other files are checked all the same
        row = failed_row(context, task, attempt, type(error).__name__, describe(error))
        return row._replace(seconds=time.monotonic() - begun)
    row = Row(task.path, None, "ok", plain_length=plain_length, file_length=task.length, format=task.kind)
    return row._replace(seconds=time.monotonic() - begun, attempt=attempt, host=socket.gethostname())


def failed_row(context: CheckContext, task: CheckTask, attempt: int, error_class: str, error: str) -> Row:
    """Return the row of a task that failed."""
    row = Row(task.path, None, "failed", error_class, error, file_length=task.length, format=task.kind)
    return row._replace(attempt=attempt, host=socket.gethostname())
