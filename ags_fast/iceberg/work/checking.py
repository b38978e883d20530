"""Check the files of a table by tasks on an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ags_fast.dataset.rows import Row
from ags_fast.iceberg.checks import Item, check_file
from ags_fast.iceberg.manifests import Known
from ags_fast.iceberg.work.tasks import OLD_KEY, TableContext

__all__ = ["CheckContext", "CheckTask", "task_of"]


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

    def row(self, status: str) -> Row:
        """Return the row of the file."""
        return Row(self.path, None, status, file_length=self.length, format=self.kind)


@dataclass(frozen=True)
class CheckContext(TableContext):
    """What all tasks of a verification share."""

    def do(self, task: CheckTask, attempt: int) -> Row:  # type: ignore[override]
        """Check one file."""
        key = None if task.key is None else self.unwrap(task.key, OLD_KEY, task.path)
        known = Known(task.path, task.length, key, task.content, task.format)
        plain_length = check_file(self.inner(task.path), Item(known, vectors=list(task.vectors)))
        return task.row("ok")._replace(plain_length=plain_length)


def task_of(context: CheckContext, item: Item) -> CheckTask:
    """Return the task that checks a file."""
    one = item.known
    key = None if one.key_metadata is None else context.wrap(one.key_metadata, OLD_KEY, one.path)
    return CheckTask(one.path, one.format or "", one.content, one.length, key, tuple(item.vectors))
