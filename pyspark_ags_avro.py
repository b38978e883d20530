"""Makes Spark know "ags_avro" by itself: Spark imports each module of this kind of name."""

from ags_fast.spark.datasource.sources import AgsAvro as DefaultSource

__all__ = ["DefaultSource"]
