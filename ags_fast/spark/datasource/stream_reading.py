"""Read a dataset as a stream: an offset is a version, and a batch has the files that came since.

A file comes with the version of a job that encrypts or writes files, if that job wrote it. So a file that is rekeyed,
rotated, compacted with others in a manifest or restored does not come again, and one whose content was replaced does.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader

from ags_fast.dataset.dataset import Dataset
from ags_fast.errors import ExpiredError
from ags_fast.spark.datasource import avro_reading, parquet_reading
from ags_fast.spark.datasource.paths import is_hidden

try:
    limits: Any = importlib.import_module("pyspark.sql.streaming.datasource")
except ModuleNotFoundError:  # before Spark 4.2
    limits = None
Base: Any = object if limits is None else limits.SupportsTriggerAvailableNow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType

    from ags_fast.dataset.dataset import SealedFile
    from ags_fast.spark.datasource.options import ReadOptions

__all__ = ["reader"]

READINGS: dict[str, Any] = {"avro": avro_reading, "parquet": parquet_reading}


class StreamReader(DataSourceStreamReader, Base):  # type: ignore[misc]
    """Reads a stream. Pickles; holds no key."""

    def __init__(self, format: str, options: ReadOptions, schema: StructType) -> None:
        if options.place.version is not None:
            raise ValueError("a stream reads versions as they come: set the option startingVersion, not version")
        self._format, self._options, self._schema = format, options, schema
        self._last: int | None = None  # where a query that takes what is available now ends

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 (Spark's name)
        """Return the version before the first batch. After 0, a batch has all files of the version that it reaches."""
        starting = self._options.starting_version
        if starting == "earliest":
            return {"version": 0}
        newest = self._newest()
        if starting == "latest":
            return {"version": newest}
        if int(starting) > newest + 1:
            raise ValueError(f"startingVersion is {starting}, and the newest version is {newest}")
        return {"version": int(starting) - 1}

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, int]:  # noqa: N802 (Spark's name)
        """Return the version that a batch reaches."""
        newest = self._newest() if self._last is None else self._last
        if start is None:
            return {"version": newest}
        first = int(start["version"])
        most = limit.max_files if limits is not None and isinstance(limit, limits.ReadMaxFiles) else None
        if most is None or first == 0:
            return {"version": max(first, newest)}
        files = 0
        for number in range(first + 1, newest + 1):
            files += sum(1 for _ in self._added(number))
            if files >= most:
                return {"version": number}
        return {"version": max(first, newest)}

    def getDefaultReadLimit(self) -> Any:  # noqa: N802 (Spark's name)
        """Return how much a batch may have."""
        most = self._options.max_files
        return limits.ReadAllAvailable() if most is None else limits.ReadMaxFiles(most)

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802 (Spark's name)
        """Return the newest version, for the query's progress."""
        return {"version": self._newest()}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (Spark's name)
        """Let the query end at the version that is the newest now."""
        self._last = self._newest()

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return what the tasks of a batch read. ExpiredError: a version was expired before it was read."""
        begin, stop = int(start["version"]), int(end["version"])
        if begin >= stop:
            return []
        if begin == 0 and self._options.starting_version == "earliest":
            dataset = self._at(stop)
            files = list(self._files(dataset))
        else:
            files = [file for number in range(begin + 1, stop + 1) for file in self._added(number)]
            dataset = self._at(stop)
        found: list[InputPartition] = READINGS[self._format].partitions(dataset, files, self._options, self._schema)
        return found

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read what one task reads, as Arrow batches."""
        found: Iterator[Any] = READINGS[self._format].read(self._options, self._schema, partition)
        return found

    def commit(self, end: dict[str, int]) -> None:
        """Take note that Spark needs no version up to `end` again: nothing is kept here."""

    def _newest(self) -> int:
        return self._options.place.open().version or 0

    def _at(self, number: int) -> Dataset:
        try:
            return replace(self._options.place, version=number).open()
        except ExpiredError as error:
            raise ExpiredError(
                f"version {number} of {self._options.place.url} was expired before this stream read it: {error}. What "
                "it added cannot be told any more. Begin with a new checkpoint, which reads all files again, or give "
                "the new query a later startingVersion; and let the dataset's policy keep versions for longer"
            ) from None

    def _files(self, dataset: Dataset, added: bool = False) -> Iterator[SealedFile]:
        options = self._options
        columns = self._schema.fieldNames()
        for file in dataset.sealed_files(options.files, columns=columns, missing=options.missing, added=added):
            if options.files is None and (
                is_hidden(file.path) or (self._format == "avro" and not file.path.endswith(".avro"))
            ):
                continue
            if self._format == "parquet" or file.format == "ags1":
                yield file

    def _added(self, number: int) -> Iterator[SealedFile]:
        """Iterate over the files that came with a version. A job makes one version, so its id tells its files."""
        return self._files(self._at(number), added=True)


def reader(format: str, options: ReadOptions, schema: StructType) -> DataSourceStreamReader:
    """Return the reader of a stream."""
    return StreamReader(format, options, schema)
