"""Avro object container files inside AGS1: written, cut into splits, and read as records or as Arrow batches.

Splits are ranges of plaintext offsets. A block belongs to the split in which the 16-byte sync marker before it begins
(for the first block, the header's own marker), as in Iceberg's AvroIterable and Avro's DataFileReader. So splits that
cover the plaintext once give every record once, wherever the cuts are.
"""

from __future__ import annotations

from ags_fast._lazy import lazy as _lazy
from ags_fast.avro.records import BUFFER_NBYTES, read_split, splits, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ags_fast.avro.reading import DECODERS, AvroFile, read_batches

__all__ = ["BUFFER_NBYTES", "DECODERS", "AvroFile", "read_batches", "read_split", "splits", "write"]

_HOMES = {"reading": ("DECODERS", "AvroFile", "read_batches")}  # these need pyarrow

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _HOMES)
