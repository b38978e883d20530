"""Jobs on Spark: the same plan and the same function for each file, in the tasks of a Spark job."""

from __future__ import annotations

from ags_fast._lazy import lazy as _lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ags_fast.spark.engine import SparkEngine

__all__ = ["SparkEngine"]

_HOMES = {"engine": ("SparkEngine",)}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _HOMES)
