"""Write DataFrames and streams to a dataset: tasks encrypt, and the driver makes one version.

Spark creates a writer, runs tasks and commits in different processes. So the transaction is begun with the writer and
left; its plan is durable, and the commit takes it up by its id. If nobody commits, there is no version, and a sweep
removes the files.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from ags_fast.dataset.dataset import Dataset
from ags_fast.errors import ConcurrentChangeError
from ags_fast.spark.datasource.conversion import arrow_schema
from ags_fast.spark.datasource.partitioning import Partitioner
from ags_fast.spark.datasource.row_files import write_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from ags_fast.dataset.files.writing import Receipt, Ticket
    from ags_fast.spark.datasource.options import Place, WriteOptions
    from ags_fast.spark.datasource.row_files import FileFormat

__all__ = ["stream_writer", "writer"]

ROWS = 10_000  # in a batch
QUERY = "sql.streaming.queryId"  # the same whenever a query is started again from its checkpoint


@dataclass
class Message(WriterCommitMessage):
    """What a task returns. Pickles; holds wrapped keys only."""

    job_id: str
    receipts: list[Receipt] = field(repr=False)
    query: str | None = None  # the id of the streaming query


class Task:
    """What a task does with its rows. Pickles; holds no key."""

    def __init__(self, format: str, options: WriteOptions, schema: StructType) -> None:
        self._partitioner = Partitioner(options.partition_by, schema)
        self._rows_per_file = options.rows_per_file
        inner = self._partitioner.schema
        self._schema = arrow_schema(inner)
        self._format = _format(format, options, inner, self._schema)

    def write(self, ticket: Ticket, job_id: str, number: int, rows: Iterable[pa.RecordBatch], **how: Any) -> Message:
        """Write rows to files named after the job and a number."""
        receipts = write_rows(
            ticket,
            rows,
            format=self._format,
            partitioner=self._partitioner,
            name=f"part-{number:05d}-{job_id}",
            schema=self._schema,
            rows_per_file=self._rows_per_file,
            **how,
        )
        return Message(job_id, receipts)

    @property
    def has_partitions(self) -> bool:
        """Whether rows go to folders by their values."""
        return bool(self._partitioner.columns)


def _format(format: str, options: WriteOptions, schema: StructType, arrow: pa.Schema) -> FileFormat:
    if format == "parquet":
        from ags_fast.spark.datasource.parquet_writing import ParquetFormat

        return ParquetFormat(schema, arrow, options.codec, options.column_keys)
    if options.column_keys:
        raise ValueError("the option columnKeys is for ags_parquet: in Avro all columns have one key")
    if options.key_material:
        raise ValueError("the option keyMaterial is for ags_parquet: Parquet's key tools open no other files")
    from ags_fast.spark.datasource.avro_writing import AvroFormat

    return AvroFormat(schema, options.codec)


@dataclass(frozen=True)
class Job:
    """A transaction that was left, and what becomes of it. Pickles; holds no key."""

    place: Place
    job_id: str
    ticket: Ticket
    overwrite: bool

    @classmethod
    def begin(cls, options: WriteOptions, overwrite: bool) -> Job | None:
        """Open the dataset, create it if there is none, and begin. None: the option ifExists says to write nothing."""
        dataset = _open_or_create(options)
        if options.if_exists != "write" and next(dataset.files(), None) is not None:
            if options.if_exists == "ignore":
                return None
            raise FileExistsError(f"the dataset {options.place.url} has files, and the option ifExists is error")
        with dataset.transaction(
            wrapping_key_id=options.wrapping_key_id,
            dek_length=options.dek_length,
            block_size=options.block_size,
            column_keys=options.column_keys or None,
            key_material=options.key_material,
        ) as new:
            ticket = new.ticket()
            job_id = new.leave()
        return cls(replace(options.place, pin=options.place.pin or dataset.pin), job_id, ticket, overwrite)

    def commit(self, messages: Sequence[Message | None], task: Task | None, batch: int | None = None) -> None:
        """Make one version of what tasks have written. task: makes a file without rows, if there is no other."""
        commit(self.place, self.job_id, messages, self.overwrite, batch, self.ticket if task else None, task)

    def abort(self) -> None:
        """Remove what tasks have written."""
        abort(self.place, self.job_id)


def commit(
    place: Place,
    job_id: str,
    messages: Sequence[Message | None],
    overwrite: bool,
    batch: int | None = None,
    ticket: Ticket | None = None,
    task: Task | None = None,
) -> None:
    """Take up a transaction, and commit it.

    Args:
        place: The dataset.
        job_id: The id of the transaction.
        messages: What the tasks have returned.
        overwrite: Whether the files that the dataset had at the beginning go.
        batch: The number of the batch of a stream; None: no stream.
        ticket: For a file without rows, which keeps the schema of a DataFrame without rows; None: no such file.
        task: What writes that file.
    """
    done = [message for message in messages if message is not None]
    receipts = [receipt for message in done for receipt in message.receipts]
    dataset = place.open()
    with dataset.resume(job_id) as new:
        if batch is not None:
            new.once(_query(done), batch)
        if overwrite:
            new.remove_all()
        if not receipts and ticket and task and (overwrite or next(dataset.files(), None) is None):
            receipts = task.write(ticket, job_id, 0, (), even_empty=not task.has_partitions).receipts
        new.add(receipts)


def abort(place: Place, job_id: str) -> None:
    """Take up a transaction, and drop it. Nothing happens if it is over: a commit that failed has dropped it."""
    try:
        with place.open().resume(job_id) as new:
            new.abort()
    except ConcurrentChangeError:
        pass


def _query(messages: Iterable[Message]) -> str:
    for message in messages:
        if message.query:
            return message.query
    raise RuntimeError(f"Spark's tasks have no property {QUERY}: without it no batch can be committed exactly once")


def _open_or_create(options: WriteOptions) -> Dataset:
    place = options.place
    if place.version is not None:
        raise ValueError("the option version is for reading: a write makes the next version")
    try:
        return place.open()
    except FileNotFoundError:
        if options.wrapping_key_id is None:
            raise ValueError(
                f"there is no dataset at {place.url}: give wrappingKeyId, the id of a master key, to create it"
            ) from None
    try:
        Dataset.create(
            place.url,
            kms=place.kms,
            wrapping_key_id=options.wrapping_key_id,
            key_store=place.key_store,
            storage_options=place.storage_options,
        )
    except FileExistsError:  # another job was faster
        pass
    return place.open()


# ---------------------------------------------------------------------------------------------------------- DataFrames


class Writer(DataSourceArrowWriter):
    """Writes a DataFrame."""

    def __init__(self, task: Task, job: Job | None) -> None:
        self._task = task
        self._job = job

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Message:
        """Write the rows of one task."""
        return self.write_partition(_context().partitionId(), iterator)

    def write_partition(self, number: int, rows: Iterable[pa.RecordBatch]) -> Message:
        """Write the rows of a partition of the DataFrame."""
        if self._job is None:
            return Message("", [])
        return self._task.write(self._job.ticket, self._job.job_id, number, rows, even_empty=False)

    def commit(self, messages: Sequence[Any]) -> None:
        """Make the version."""
        if self._job is not None:
            self._job.commit(messages, self._task)

    def abort(self, messages: Sequence[Any]) -> None:
        """Remove what tasks have written."""
        if self._job is not None:
            self._job.abort()


def writer(format: str, options: WriteOptions, schema: StructType, overwrite: bool) -> Writer:
    """Begin to write a DataFrame. The transaction is begun last, when nothing is left to be refused."""
    if overwrite and options.if_exists != "write":
        raise ValueError("the option ifExists goes with mode append: overwrite replaces what exists")
    task = Task(format, options, schema)
    return Writer(task, Job.begin(options, overwrite))


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise RuntimeError("rows are written by tasks of Spark only")
    return context


# ---------------------------------------------------------------------------------------------------------- streams


# PySpark 4.0 streams rows only.
IN_ROWS = not hasattr(datasource, "DataSourceStreamArrowWriter")
_Base: Any = datasource.DataSourceStreamWriter if IN_ROWS else datasource.DataSourceStreamArrowWriter


class StreamWriter(_Base):  # type: ignore[misc]
    """Writes the batches of a stream.

    Spark makes a writer for each batch, and sends it to the tasks. It makes another one that commits batches, and never
    sends that one anywhere. So a batch begins when its writer is pickled for the first time.
    """

    def __init__(self, format: str, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if options.if_exists != "write":
            raise ValueError("the option ifExists is not for streams: each batch adds to the dataset")
        self._task = Task(format, options, schema)
        self._options = options
        self._schema = schema
        self._overwrite = overwrite
        self._job: Job | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._job is None:
            self._job = Job.begin(self._options, self._overwrite)
        return self.__dict__

    def write(self, iterator: Iterator[Any]) -> Message:
        """Write the rows of one task."""
        assert self._job is not None
        context = _context()
        rows = _batches(iterator, self._schema) if IN_ROWS else iterator
        job, number = self._job, context.partitionId()
        return replace(
            self._task.write(job.ticket, job.job_id, number, rows, even_empty=False),
            query=context.getLocalProperty(QUERY),
        )

    def commit(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Make the version of a batch, unless a version has it."""
        job_id = next(message.job_id for message in messages if message is not None)
        commit(self._options.place, job_id, messages, self._overwrite, batchId)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Remove what tasks have written. If no task has returned, the batch is not known: a sweep removes it."""
        for job_id in {message.job_id for message in messages if message is not None}:
            abort(self._options.place, job_id)


def stream_writer(format: str, options: WriteOptions, schema: StructType, overwrite: bool) -> StreamWriter:
    """Return what writes a stream."""
    return StreamWriter(format, options, schema, overwrite)


def _batches(rows: Iterator[Any], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Return rows of PySpark 4.0 as batches."""
    from pyspark.sql.conversion import LocalDataToArrowConversion

    while some := list(islice(rows, ROWS)):
        yield from LocalDataToArrowConversion.convert(some, schema, False).to_batches()
