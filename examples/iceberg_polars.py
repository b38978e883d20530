"""Read a snapshot of an encrypted Iceberg table with Polars.

python examples/iceberg_polars.py LOCATION.metadata.json --kms encryption.kms-type=... [--columns id,name]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl
from iceberg_snapshot import arguments, data_files, opened

from ags_fast.parquet import scan_polars

if TYPE_CHECKING:
    from pyiceberg.table import Table


def read(table: Table, snapshot_id: int | None = None, columns: list[str] | None = None) -> pl.DataFrame:
    """Return the rows of a snapshot. Only the pages of the columns that are asked for are read."""
    frames = []
    for one in data_files(table, snapshot_id):
        with one.open() as view:
            # pl.read_parquet would decrypt the whole file first; this decrypts what the columns need.
            scan = scan_polars(view)
            frame = (scan if columns is None else scan.select(columns)).collect()
        if len(one.deleted):
            frame = frame.filter(pl.Series(one.deleted.keeps(0, frame.height)))
        frames.append(frame)
    return pl.concat(frames) if frames else pl.DataFrame()


def main() -> None:
    """Print the rows."""
    parser = arguments(__doc__)
    parser.add_argument("--columns", metavar="NAMES", help="separated by commas; default: all")
    args = parser.parse_args()
    print(read(opened(args), args.snapshot, args.columns.split(",") if args.columns else None))


if __name__ == "__main__":
    main()
