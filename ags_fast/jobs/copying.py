"""The work of a rotation: copy a table with its data keys under other KEKs. It runs in a worker, on any machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ags_fast.dataset.deks import rewrapped_column
from ags_fast.dataset.names import plan_path
from ags_fast.dataset.plan import Copy, Place, store_copy
from ags_fast.dataset.tables import Tables
from ags_fast.engines.base import JobContext
from ags_fast.errors import JobEndedError
from ags_fast.jobs.results import Row, describe
from ags_fast.keys.stores import in_log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ags_fast.dataset.entry import MasterVersion
    from ags_fast.dataset.tables import Table
    from ags_fast.fs import Store
    from ags_fast.keys.envelope import Envelope


class CopyTask(NamedTuple):
    """The copying of one table. `nbytes` is encryption work that costs as much."""

    table: Table
    nbytes: int

    @property
    def path(self) -> str:
        """What tells the task from the other tasks of its job."""
        return self.table.path


@dataclass(frozen=True)
class CopyContext(JobContext):
    """What all copying of a rotation shares."""

    runner: ClassVar[str] = __name__

    dataset_id: str
    dataset: Store
    envelope: Envelope  # the KEKs that are left, those that take their places, and those of the tables
    moves: Mapping[str, str]  # {KEK: the KEK that takes its place}
    sealer: str  # the KEK that wraps the data keys of the copies
    gone: tuple[MasterVersion, ...]  # the versions of master keys under which the KMS wraps nothing any more
    concurrency: int  # calls of the KMS at once
    ready: Mapping[tuple[str, bytes], bytes]  # what the KMS has wrapped already: see `Envelope.rewrap_many`

    @property
    def stores(self) -> tuple[Store | None, ...]:
        """The dataset."""
        return (self.dataset,)

    def rewrap(
        self, old: str, new: str, prefix: bytes, names: Sequence[bytes], wrapped: Sequence[bytes]
    ) -> list[bytes]:
        """See `rewrapped_column`."""
        return rewrapped_column(self.envelope, old, new, prefix, names, wrapped, self.ready, self.concurrency)


def table_row(dataset: Store, table: Table, status: str = "ok") -> Row:
    """Return the row of a table."""
    return Row(
        dataset.full_path(table.path), None, status, file_length=table.length, format="table", key_id=table.key_id
    )


def run_file(context: CopyContext, task: CopyTask, attempt: int = 0) -> Row:
    """Copy a table, and say so beside the plan. Each attempt makes an object of its own."""
    begun, envelope = time.monotonic(), context.envelope
    try:
        if context.dataset.stat(plan_path(context.job_id)) is None:
            raise JobEndedError(f"job {context.job_id} has ended: the table is not copied")
        tables = Tables(context.dataset, context.dataset_id)
        made = tables.with_wraps(task.table, context.moves, context.rewrap, context.job_id, context.sealer, envelope)
        copy, sealer = Copy(task.table.path, made, context.gone), in_log(envelope.entries[context.sealer])
        store_copy(Place(context.dataset, envelope, sealer, context.dataset_id), context.job_id, copy)
    except Exception as error:
        row = failed_row(context, task, attempt, type(error).__name__, describe(error))
        return row._replace(seconds=time.monotonic() - begun)
    row = table_row(context.dataset, task.table)._replace(dst=context.dataset.full_path(made.path), key_id=made.key_id)
    return row._replace(file_length=made.length, seconds=time.monotonic() - begun, attempt=attempt)


def failed_row(context: CopyContext, task: CopyTask, attempt: int, error_class: str, error: str) -> Row:
    """Return the row of a table that was not copied."""
    row = table_row(context.dataset, task.table, "failed")
    return row._replace(error_class=error_class, error=error, attempt=attempt)
