"""The rows of one task, on their way into files: a file or more for each partition, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ags_fast.dataset.files.writing import Attempt, Receipt, Ticket
    from ags_fast.spark.datasource.partitioning import Partitioner

__all__ = ["FileFormat", "Rows", "write_rows"]

BUFFER_NBYTES = 128 << 20  # of Arrow data that a task holds before it writes the largest part of it: a row group
OPEN_FILES = 32  # of a task at the same time


class TableFile(Protocol):
    """A file in the making."""

    def write_table(self, table: pa.Table) -> None:
        """Write rows."""

    def close(self) -> None:
        """Complete the file."""


class FileFormat(Protocol):
    """How files of one format are made."""

    suffix: str

    def target(self, arrow: pa.Schema) -> pa.Schema:
        """Return the schema of the tables that a file takes."""

    def create(self, attempt: Attempt, path: str) -> TableFile:
        """Create a file."""


@dataclass
class _Part:
    """The rows of one partition that are not in a complete file."""

    held: list[pa.RecordBatch] = field(default_factory=list)
    nbytes: int = 0  # of `held`
    rows: int = 0  # in the file that is open, and held
    file: TableFile | None = None


class Rows:
    """Takes rows, and makes files of them.

    Args:
        attempt: Creates the files.
        format: How they are made.
        partitioner: Cuts the rows.
        name: The beginning of the files' names, which no other task has.
        schema: The Arrow schema of the files' columns, as Spark has them.
        rows_per_file: The most rows of a file.
    """

    def __init__(
        self,
        attempt: Attempt,
        format: FileFormat,
        partitioner: Partitioner,
        name: str,
        schema: pa.Schema,
        rows_per_file: int,
    ) -> None:
        self._attempt = attempt
        self._format = format
        self._partitioner = partitioner
        self._name = name
        self._schema = schema
        self._target = format.target(schema)
        self._rows_per_file = rows_per_file
        self._parts: dict[str, _Part] = {}  # by folder, that of the last rows last
        self._nbytes = 0
        self._made = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows."""
        for folder, rows in self._partitioner.cut(batch):
            part = self._parts.pop(folder, None) or _Part()
            self._parts[folder] = part
            start = 0
            while start < rows.num_rows:
                room = self._rows_per_file - part.rows
                self._hold(part, rows.slice(start, room))
                start += room
                if part.rows == self._rows_per_file:
                    self._close(folder, part)
        while self._nbytes > BUFFER_NBYTES:
            folder, part = max(self._parts.items(), key=lambda one: one[1].nbytes)
            self._flush(folder, part)

    def finish(self, *, even_empty: bool) -> None:
        """Complete all files. even_empty: Make one file if there was no row."""
        for folder, part in self._parts.items():
            self._close(folder, part)
        if even_empty and not self._made:
            self._close("", _Part([pa.RecordBatch.from_pylist([], self._schema)]))

    def _hold(self, part: _Part, rows: pa.RecordBatch) -> None:
        part.held.append(rows)
        part.rows += rows.num_rows
        part.nbytes += rows.nbytes
        self._nbytes += rows.nbytes

    def _flush(self, folder: str, part: _Part) -> None:
        """Write what is held of a partition."""
        if part.file is None:
            open_ones = [(name, one) for name, one in self._parts.items() if one.file is not None]
            if len(open_ones) >= OPEN_FILES:
                self._close(*open_ones[0])  # whose last rows came longest ago
            path = f"{folder}{self._name}-c{self._made:03d}{self._format.suffix}"
            self._made += 1
            part.file = self._format.create(self._attempt, path)
        table = pa.Table.from_batches([self._as_declared(rows) for rows in part.held])
        self._nbytes -= part.nbytes
        part.held, part.nbytes = [], 0
        part.file.write_table(table.cast(self._target))

    def _as_declared(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if rows.schema == self._schema:
            return rows
        from ags_fast.spark.datasource.conversion import conform

        columns = [conform(rows.column(i), one.type, one.name) for i, one in enumerate(self._schema)]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _close(self, folder: str, part: _Part) -> None:
        if part.held:
            self._flush(folder, part)
        if part.file is not None:
            part.file.close()
        part.file, part.rows = None, 0


def write_rows(
    ticket: Ticket,
    batches: Iterable[pa.RecordBatch],
    *,
    even_empty: bool,
    **how: Any,
) -> list[Receipt]:
    """Write the rows of one attempt of a task to files.

    Args:
        ticket: Of the transaction.
        batches: The rows.
        even_empty: Whether one file is made if there is no row.
        **how: Arguments of `Rows`.

    Returns:
        The receipts for the transaction.
    """
    with ticket.attempt() as attempt:
        rows = Rows(attempt, **how)
        for batch in batches:
            attempt.renew()
            if batch.num_rows:
                rows.add(batch)
        rows.finish(even_empty=even_empty)
    return attempt.receipts()
