"""A new file of deletion vectors, and what manifests say of it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from ags_fast.iceberg.puffin import DeletionVector

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from ags_fast.iceberg.manifests import Known
    from ags_fast.iceberg.puffin import Blob
    from ags_fast.iceberg.work.heads import Writer

__all__ = ["POSITION_DELETES", "VectorFile", "vectors_of"]

POSITION_DELETES = 1  # content of a file


@dataclass(frozen=True, slots=True, repr=False)
class VectorFile:
    """A Puffin file that was written.

    Attributes:
        file: The file.
        blobs: Where the vector of each data file is.
    """

    file: Known
    blobs: Mapping[str, Blob]

    @classmethod
    def write(cls, writer: Writer, data: bytes, blobs: Mapping[str, Blob]) -> VectorFile:
        """Write the plaintext of a file beside the table's data."""
        return cls(writer.write(writer.location(f"{uuid.uuid4()}-deletes.puffin", data=True), data), blobs)

    def fields(self, name: str, data_file: str, partition: Any, cardinality: int) -> dict[str, Any]:
        """Return what the entry of a vector says.

        Args:
            name: Under which `blobs` has it.
            data_file: The path of the data file that it belongs to.
            partition: The partition of that.
            cardinality: How many rows it deletes.
        """
        assert self.file.key_metadata is not None
        return {
            "content": POSITION_DELETES,
            "file_path": self.file.path,
            "file_format": "PUFFIN",
            "partition": partition,
            "record_count": cardinality,
            "file_size_in_bytes": self.file.length,
            "key_metadata": self.file.key_metadata.encode(),
            "referenced_data_file": data_file,
            "content_offset": self.blobs[name].offset,
            "content_size_in_bytes": self.blobs[name].length,
        }


def vectors_of(rows: pa.Table) -> dict[str, DeletionVector]:
    """Return the vectors of a file of position deletes, of which ``file_path`` and ``pos`` were read, by data file."""
    paths: list[Any] = rows["file_path"].unique().to_pylist()
    return {path: DeletionVector.of(rows.filter(pc.equal(rows["file_path"], path))["pos"].to_numpy()) for path in paths}
