"""Check the files of a table by tasks on an engine."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ags_fast.dataset.rows import Row
from ags_fast.iceberg.checks import Item, check_file, kind_of
from ags_fast.iceberg.manifests import Known
from ags_fast.iceberg.work.tasks import OLD_KEY, TableContext, table_context
from ags_fast.jobs.results import describe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ags_fast.keys.kms import KmsClient

__all__ = ["CheckContext", "CheckTask", "check_context", "failed_row", "run_file", "task_of"]


class CheckTask(NamedTuple):
    """The check of one file. It holds no key.

    Attributes:
        path: The file.
        format: AVRO, PARQUET, PUFFIN or ORC.
        content: 0 (data), 1 (position deletes) or 2 (equality deletes).
        length: Its bytes on storage, as its manifest says.
        key: Its key metadata, as `TableContext.wrap` returned them; None if it has none.
        vectors: As of an `Item`.
    """

    path: str
    format: str
    content: int
    length: int
    key: bytes | None
    vectors: tuple[tuple[int, int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of work."""
        return self.length

    @property
    def kind(self) -> str:
        """What the row says that the file is."""
        return kind_of(Known(self.path, self.length, None, self.content, self.format))


@dataclass(frozen=True)
class CheckContext(TableContext):
    """What all tasks of a verification share."""

    runner: ClassVar[str] = "ags_fast.iceberg.work.checking"


def check_context(
    job_id: str, table_uuid: str, kms: KmsClient, wrapping_key_id: str, settings: Mapping[str, str]
) -> CheckContext:
    """Return the context of a verification. Its KEK, under which workers get keys, is one call of the KMS.

    Args:
        job_id: The id of the job.
        table_uuid: The table's.
        kms: As `ags_fast.jobs.engines.local.client_for` returned it for the engine.
        wrapping_key_id: The table's master key.
        settings: See `StorageContext`.
    """
    made = table_context(
        "verify", job_id, table_uuid=table_uuid, kms=kms, wrapping_key_id=wrapping_key_id, settings=settings
    )
    return CheckContext(made.op, made.job_id, made.table_uuid, made.envelope, settings=made.settings, threads=1)


def task_of(context: CheckContext, item: Item) -> CheckTask:
    """Return the task that checks a file."""
    one = item.known
    key = context.wrap(one.key_metadata, OLD_KEY, one.path)
    return CheckTask(one.path, one.format or "", one.content, one.length, key, tuple(item.vectors))


def run_file(context: CheckContext, task: CheckTask, attempt: int = 0) -> Row:
    """Check one file. Its error goes into the row."""
    begun = time.monotonic()
    try:
        key = context.unwrap(task.key, OLD_KEY, task.path)
        known = Known(task.path, task.length, key, task.content, task.format)
        plain_length = check_file(context, Item(known, vectors=list(task.vectors)))
    except Exception as error:  # of any storage: the other files are checked all the same
        row = failed_row(context, task, attempt, type(error).__name__, describe(error))
        return row._replace(seconds=time.monotonic() - begun)
    row = Row(task.path, None, "ok", plain_length=plain_length, file_length=task.length, format=task.kind)
    return row._replace(seconds=time.monotonic() - begun, attempt=attempt, host=socket.gethostname())


def failed_row(context: CheckContext, task: CheckTask, attempt: int, error_class: str, error: str) -> Row:
    """Return the row of a task that failed."""
    row = Row(task.path, None, "failed", error_class, error, file_length=task.length, format=task.kind)
    return row._replace(attempt=attempt, host=socket.gethostname())
