"""Query a snapshot of an encrypted Iceberg table with DuckDB.

    python examples/iceberg_duckdb.py LOCATION.metadata.json --kms encryption.kms-type=... --sql "FROM t LIMIT 9"

DuckDB opens the data files through a file system of this process, which decrypts the pages that a query needs.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
from fsspec import AbstractFileSystem
from iceberg_snapshot import DataFile, arguments, data_files, opened

if TYPE_CHECKING:
    from pyiceberg.table import Table


class Snapshot(AbstractFileSystem):
    """The data files of a snapshot, as plain Parquet files: ``snapshot://0.parquet`` and so on."""

    protocol = "snapshot"
    cachable = False

    def __init__(self, found: list[DataFile]) -> None:
        super().__init__()
        self._files = {f"snapshot://{i}.parquet": one for i, one in enumerate(found)}

    def paths(self) -> list[str]:
        """The paths that DuckDB is given."""
        return list(self._files)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return the size of a file's plaintext view, in bytes."""
        with self._files[path].open() as view:
            return {"name": path, "type": "file", "size": view.size}

    def glob(self, path: str, **_: Any) -> list[str]:
        """Return the path, if there is such a file."""
        return [path] if path in self._files else []

    def modified(self, path: str) -> datetime:
        """Return the same time for all files: a snapshot's files never change."""
        return datetime.fromtimestamp(0, UTC)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode != "rb":
            raise PermissionError(f"{path} is read-only")
        return self._files[path].open()


def connect(table: Table, snapshot_id: int | None = None) -> duckdb.DuckDBPyConnection:
    """Return a connection in which the snapshot is the view ``t``."""
    found = list(data_files(table, snapshot_id))
    connection = duckdb.connect()
    if not found:
        connection.register("t", table.schema().as_arrow().empty_table())
        return connection
    files = Snapshot(found)
    connection.register_filesystem(files)
    gone: list[tuple[str, list[int]]] = [
        (path, one.deleted.positions().tolist()) for path, one in zip(files.paths(), found, strict=True)
    ]
    deleted = pa.table(
        {
            "filename": pa.array([path for path, rows in gone for _ in rows], pa.string()),
            "file_row_number": pa.array([row for _, rows in gone for row in rows], pa.int64()),
        }
    )
    connection.register("deleted", deleted)
    connection.execute(
        f"""
        CREATE VIEW t AS SELECT * EXCLUDE (filename, file_row_number)
        FROM read_parquet({files.paths()}, filename = true, file_row_number = true)
        ANTI JOIN deleted USING (filename, file_row_number)
        """
    )
    return connection


def main() -> None:
    """Print the answer to a query."""
    parser = arguments(__doc__)
    parser.add_argument("--sql", default="SELECT * FROM t", help="the table's name is t; default: SELECT * FROM t")
    args = parser.parse_args()
    print(connect(opened(args), args.snapshot).sql(args.sql))


if __name__ == "__main__":
    main()
