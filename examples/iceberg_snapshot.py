"""The data files of a snapshot of an encrypted Iceberg table, opened as plain Parquet files for any reader.

This module needs no engine. It applies deletion vectors. What it does not apply, it refuses.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fsspec
import pyarrow.parquet as pq

import ags_fast
from ags_fast.iceberg import files, open_table
from ags_fast.parquet import open_plain
from ags_fast.puffin.vectors import DeletionVector, decode_vector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyiceberg.table import Table

    from ags_fast.iceberg import TableFile


@dataclass(frozen=True)
class DataFile:
    """A data file of a snapshot. Its key is in `file`, and is not shown.

    Attributes:
        file: The file.
        deleted: The positions of its rows that are deleted.
    """

    file: TableFile
    deleted: DeletionVector

    def open(self) -> Any:
        """Open it as a plain Parquet file. Pages are decrypted, and their tags checked, as they are read."""
        one = self.file
        return open_plain(stored(one.path), key_metadata=one.key_metadata, length=one.length)


def stored(location: str) -> Any:
    """Open a file as it is stored: a path, or a URL of any storage that fsspec knows."""
    return fsspec.open(location).open()


def data_files(table: Table, snapshot_id: int | None = None) -> Iterator[DataFile]:
    """Yield the data files of a snapshot, with their deleted rows.

    Args:
        table: A table of `ags_fast.iceberg`.
        snapshot_id: Which snapshot; None is the current one.

    Raises:
        NotImplementedError: The snapshot has deletes or files that this example does not read.
        IntegrityError: A file was changed.
    """
    found: list[TableFile] = []
    vectors: dict[str, DeletionVector] = {}
    for one in files(table, snapshot_id=snapshot_id):
        if one.kind == "deletion-vector":
            assert one.referenced_data_file is not None
            vectors[one.referenced_data_file] = read_vector(one)
        elif one.kind in ("position-deletes", "equality-deletes"):
            raise NotImplementedError(f"{one.path} has {one.kind}: read the snapshot by table.scan() of PyIceberg")
        elif one.kind == "data":
            if one.format != "PARQUET" or one.key_metadata is None:
                raise NotImplementedError(f"{one.path} is not an encrypted Parquet file")
            found.append(one)
    snapshot = table.current_snapshot() if snapshot_id is None else table.snapshot_by_id(snapshot_id)
    schema = table.schema() if snapshot is None or snapshot.schema_id is None else table.schemas()[snapshot.schema_id]
    wanted = [(field.field_id, field.name) for field in schema.fields]
    for one in found:
        data = DataFile(one, vectors.get(one.path, DeletionVector.of(())))
        check_columns(data, wanted)
        yield data


def read_vector(one: TableFile) -> DeletionVector:
    """Read a deletion vector: a blob in a Puffin file, which is inside an AES GCM Stream."""
    assert one.content_offset is not None
    assert one.content_size is not None
    with ags_fast.open(stored(one.path), key_metadata=one.key_metadata, length=one.length) as puffin:
        blob = puffin.read_at(one.content_offset, one.content_size)
    return decode_vector(blob, cardinality=one.record_count)


def check_columns(data: DataFile, wanted: list[tuple[int, str]]) -> None:
    """Refuse a file that was written before the table's columns changed: it would need a mapping by field ids."""
    with data.open() as view:
        schema = pq.read_schema(view)
    there = [(int(field.metadata[b"PARQUET:field_id"]), field.name) for field in schema]
    if there != wanted:
        raise NotImplementedError(
            f"{data.file.path} has other columns than the snapshot: use table.scan() of PyIceberg"
        )


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return the arguments that name a table and its KMS."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("metadata", help="the location of the table's .metadata.json")
    parser.add_argument("--kms", action="append", metavar="NAME=VALUE", required=True, help="a property of the KMS")
    parser.add_argument("--snapshot", type=int, metavar="ID", help="default: the current snapshot")
    return parser


def opened(args: argparse.Namespace) -> Table:
    """Open the table of the arguments."""
    return open_table(args.metadata, kms=dict(one.split("=", 1) for one in args.kms))
