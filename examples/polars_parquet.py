"""Query an encrypted Parquet file with polars: only the pages that the query needs are decrypted.

python examples/polars_parquet.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import polars as pl

from ags_fast import parquet


def main() -> None:
    """Write a table with a key for one column, and query it."""
    keys = parquet.Keys(os.urandom(32), {"salary": os.urandom(32)})  # keep them wrapped by a KMS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "people.parquet")
        people = pl.DataFrame({"id": range(1000), "salary": [n * 7 % 1000 for n in range(1000)]})
        parquet.write_table(people, path, keys, row_group_size=100)
        query = parquet.scan_polars(path, keys).filter(pl.col("id") < 50).select(pl.col("salary").sum())
        print(query.collect())


if __name__ == "__main__":
    main()
