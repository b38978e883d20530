"""Encrypted datasets as Spark data sources: ``spark.read.format("ags_parquet")`` and ``"ags_avro"``."""

from __future__ import annotations

from ags_fast._lazy import lazy as _lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ags_fast.spark.datasource.sources import AgsAvro, AgsParquet, register

__all__ = ["AgsAvro", "AgsParquet", "register"]

_HOMES = {"sources": ("AgsAvro", "AgsParquet", "register")}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _HOMES)
