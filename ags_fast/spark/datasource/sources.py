"""The two data sources. Spark imports this module in every session, so all else is imported when it is used."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException
from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from ags_fast.spark.datasource.options import ReadOptions, WriteOptions

__all__ = ["AgsAvro", "AgsParquet", "register"]


def register(spark: SparkSession) -> None:
    """Register both data sources with a session, if Spark did not find them by itself.

    Spark finds them if the modules pyspark_ags_parquet and pyspark_ags_avro are on the Python path of the driver, or on
    Spark Connect of the server. Where it found them, this does no harm.
    """
    for source in (AgsParquet, AgsAvro):
        try:
            spark.dataSource.register(source)
        except AnalysisException as error:  # PySpark 4.0; newer ones put it in the place of the one they found
            if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise


class _Source(DataSource):
    """What both formats share: each part of the work is in a module of its own."""

    format = ""
    _inferred = False  # whether Spark has asked for the schema; it does not if the user declares one
    _version: int | None = None  # of the dataset when it did: the DataFrame shows this version for good

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        from ags_fast.spark.datasource.options import check

        check(options)  # before the options are pickled

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return f"ags_{cls.format}"

    def schema(self) -> StructType:
        """Return the schema of the files that the options choose."""
        options = self._read()
        self._version = options.place.open().version
        found: StructType = self._part("_reading").schema(self._at_version(options))
        self._inferred = True
        return found

    def reader(self, schema: StructType) -> Any:
        """Return what reads a DataFrame."""
        return self._part("_reading").reader(self._at_version(self._read()), schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """Return what writes a DataFrame."""
        return _part("writing").writer(self.format, self._write(), schema, overwrite)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 (Spark's name)
        """Return what reads a stream."""
        return _part("stream_reading").reader(self.format, self._read(), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 (Spark's name)
        """Return what writes a stream."""
        return _part("writing").stream_writer(self.format, self._write(), schema, overwrite)

    def _part(self, suffix: str) -> Any:
        return _part(self.format + suffix)

    def _read(self) -> ReadOptions:
        from ags_fast.spark.datasource.options import ReadOptions

        return replace(ReadOptions.of(self.options), inferred=self._inferred)

    def _at_version(self, options: ReadOptions) -> ReadOptions:
        return replace(options, place=replace(options.place, version=options.place.version or self._version))

    def _write(self) -> WriteOptions:
        from ags_fast.spark.datasource.options import WriteOptions

        return WriteOptions.of(self.options)


def _part(name: str) -> Any:
    return import_module(f"ags_fast.spark.datasource.{name}")


class AgsParquet(_Source):
    """The Parquet files of an encrypted dataset: ``spark.read.format("ags_parquet")``."""

    format = "parquet"


class AgsAvro(_Source):
    """The Avro files of an encrypted dataset: ``spark.read.format("ags_avro")``."""

    format = "avro"
