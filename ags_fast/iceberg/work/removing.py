"""Delete files that nothing needs any more, by tasks on an engine. Neither a context nor a task has a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.dataset.rows import Row
from ags_fast.iceberg.work.tasks import StorageContext
from ags_fast.jobs.results import describe

if TYPE_CHECKING:
    from pyiceberg.io import FileIO as InnerIO

__all__ = ["Gone", "RemovalContext", "remove"]


class Gone(NamedTuple):
    """A file that no snapshot reaches any more."""

    path: str
    kind: str  # "data", "deletes", "manifest", "manifest-list", "statistics" or "metadata"
    length: int | None = None  # bytes on storage
    sealed: bool = False  # whether an encrypted list or manifest names it

    @property
    def nbytes(self) -> int:
        """Bytes of work: a deletion costs a request, whatever the file has."""
        return 0

    def row(self, status: str) -> Row:
        """Return the row of the file."""
        return Row(self.path, None, status, file_length=self.length, format=self.kind)


@dataclass(frozen=True)
class RemovalContext(StorageContext):
    """What all tasks of a removal share."""

    def do(self, task: Gone, attempt: int) -> Row:
        """Delete one file."""
        return remove(self.inner(task.path), task)


def remove(inner: InnerIO, one: Gone) -> Row:
    """Delete a file, and return its row."""
    try:
        inner.delete(one.path)
    except FileNotFoundError:
        return one.row("skipped")._replace(error_class="AlreadyGone", error="the file was not there")
    except Exception as error:  # of any storage: the other files are deleted all the same
        return one.row("failed")._replace(error_class=type(error).__name__, error=describe(error))
    return one.row("ok")
