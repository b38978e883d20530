"""Makes Spark know "ags_parquet" by itself: Spark imports each module of this kind of name."""

from ags_fast.spark.datasource.sources import AgsParquet as DefaultSource

__all__ = ["DefaultSource"]
