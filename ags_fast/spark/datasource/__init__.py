"""Encrypted datasets as Spark data sources: ``spark.read.format("ags_parquet")`` and ``"ags_avro"``."""

from __future__ import annotations

from ags_fast._lazy import attribute as _attribute

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ags_fast.spark.datasource.sources import AgsAvro, AgsParquet, register

__all__ = ["AgsAvro", "AgsParquet", "register"]

_HOMES = {"sources": ("AgsAvro", "AgsParquet", "register")}


def __getattr__(name: str) -> Any:
    return _attribute(__name__, _HOMES, name)
