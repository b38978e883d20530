"""Jobs on Spark: the same plan and the same function for each file, in the tasks of a Spark job."""

from __future__ import annotations

from ags_fast._lazy import attribute as _attribute

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ags_fast.spark.engine import SparkEngine

__all__ = ["SparkEngine"]

_HOMES = {"engine": ("SparkEngine",)}


def __getattr__(name: str) -> Any:
    return _attribute(__name__, _HOMES, name)
