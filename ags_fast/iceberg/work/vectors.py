"""A new file of deletion vectors, and what manifests say of it."""

from __future__ import annotations

import uuid
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import fastavro
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ags_fast.errors import FormatError
from ags_fast.iceberg import rewriting
from ags_fast.iceberg.manifests import DELETES
from ags_fast.puffin.vectors import DeletionVector, write_vectors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ags_fast.iceberg.manifests import Known
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.reading import Node
    from ags_fast.iceberg.work.heads import Writer

__all__ = ["POSITION_DELETES", "VectorFile", "read_deletes"]

POSITION_DELETES = 1  # content of a file


class VectorFile:
    """A new file of deletion vectors beside a table's data, and a manifest of them for each partition spec.

    `vectors` are by the path of the data file, as entries name it. `paths` has the path that each data file will have.
    Nothing is written while one of them is not known.
    """

    def __init__(self, writer: Writer, vectors: Mapping[str, DeletionVector], paths: Mapping[str, str]) -> None:
        self._writer, self._vectors, self._paths = writer, vectors, paths
        self._named: dict[int, list[tuple[Node, str, Any]]] = defaultdict(list)
        self.length = 0  # bytes of the file
        if len(paths) == len(vectors) > 0:
            data, blobs = write_vectors({paths[path]: vector for path, vector in vectors.items()})
            self._file = writer.write(writer.location(f"{uuid.uuid4()}-deletes.puffin", data=True), data)
            self._blobs, self.length = dict(zip(vectors, blobs, strict=True)), self._file.length

    def note(self, one: Node, entries: list[rewriting.Record]) -> None:
        """Look at the entries of a manifest of data files."""
        for entry in entries:
            path = entry["data_file"]["file_path"]
            if path in self._vectors:
                self._named[one.known.spec_id or 0].append((one, path, entry["data_file"]["partition"]))

    def write_manifests(self, snapshot: Raw) -> list[rewriting.Record]:
        """Write the manifests, and return what the list says of them."""
        made = []
        for noted in self._named.values():
            like, number = noted[0][0], snapshot["snapshot-id"]
            container = like.container()
            added = [rewriting.new_entry(container, number, self._fields(path, one)) for _, path, one in noted]
            record = self._writer.write_manifest(container, added, DELETES, like=like.record, snapshot=snapshot)
            made.append(record)
        return made

    def _fields(self, path: str, partition: Any) -> dict[str, Any]:
        assert self._file.key_metadata is not None
        return {
            "content": POSITION_DELETES,
            "file_path": self._file.path,
            "file_format": "PUFFIN",
            "partition": partition,
            "record_count": len(self._vectors[path]),
            "file_size_in_bytes": self._file.length,
            "key_metadata": self._file.key_metadata.encode(),
            "referenced_data_file": self._paths[path],
            "content_offset": self._blobs[path].offset,
            "content_size_in_bytes": self._blobs[path].length,
        }


def read_deletes(file: Any, known: Known) -> dict[str, DeletionVector]:
    """Read a file of position deletes, given its plaintext: a vector by data file. FormatError if it is none."""
    try:
        if known.format == "AVRO":
            found: dict[str, list[int]] = defaultdict(list)
            read: Any = fastavro.reader(file)
            for row in read:
                found[row["file_path"]].append(row["pos"])
            return {path: DeletionVector.of(positions) for path, positions in found.items()}
        rows = pq.read_table(file, columns=["file_path", "pos"])
        paths: list[Any] = rows["file_path"].unique().to_pylist()
        return {
            one: DeletionVector.of(rows.filter(pc.equal(rows["file_path"], one))["pos"].to_numpy()) for one in paths
        }
    except (pa.ArrowException, ValueError, KeyError, TypeError):
        raise FormatError(f"{known.path} is not a file of position deletes") from None
