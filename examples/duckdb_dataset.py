"""Query the Parquet files of an encrypted dataset with DuckDB.

python examples/duckdb_dataset.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import duckdb
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from example_kms import MASTER_KEY, local_kms

from ags_fast import jobs


def main() -> None:
    """Encrypt a folder of Parquet files, and query it."""
    with tempfile.TemporaryDirectory() as folder:
        kms = local_kms(Path(folder))
        plain = Path(folder, "plain")
        for year in (2025, 2026):
            (plain / f"year={year}").mkdir(parents=True)
            rows = pa.table({"id": range(1000), "price": [n / 8 for n in range(1000)]})
            pq.write_table(rows, plain / f"year={year}" / "part-0.parquet")
        lake = f"{folder}/lake"
        jobs.encrypt_files(plain, lake, kms=kms, wrapping_key_id=MASTER_KEY, format="parquet").raise_for_failures()

        connection = duckdb.connect()
        connection.register_filesystem(fsspec.filesystem("ags", dataset=lake, kms=kms))
        query = "SELECT year, count(*), max(price) FROM read_parquet('ags://*/*.parquet') GROUP BY year ORDER BY year"
        for row in connection.sql(query).fetchall():
            print(row)


if __name__ == "__main__":
    main()
