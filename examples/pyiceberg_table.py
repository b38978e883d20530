"""Write, read and re-key an encrypted Iceberg table with PyIceberg.

python examples/pyiceberg_table.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
from example_kms import MASTER_KEY, local_kms

from ags_fast import iceberg


def main() -> None:
    """Make a table, change it, and replace its keys."""
    with tempfile.TemporaryDirectory() as folder:
        kms = local_kms(Path(folder))
        catalog = iceberg.load_catalog(
            "lake", kms=kms, type="sql", uri=f"sqlite:///{folder}/lake.db", warehouse=f"file://{folder}/lake"
        )
        catalog.create_namespace("shop")
        rows = pa.table({"id": [1, 2, 3], "name": ["Ada", "Bob", "Cy"]})
        table = catalog.create_table("shop.orders", rows.schema, properties={"encryption.key-id": MASTER_KEY})
        table.append(rows)
        table.append(pa.table({"id": [4], "name": ["Di"]}))
        table.delete("id = 2")
        print(table.scan(row_filter="id > 1").to_arrow().sort_by("id").to_pylist())
        print(iceberg.rekey(table, what="data").counts)  # new data keys, new files, one commit
        print(iceberg.verify(table).counts)


if __name__ == "__main__":
    main()
