"""Read and write an encrypted dataset with pandas, by paths that begin with ags://.

python examples/pandas_dataset.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pandas as pd
from example_kms import MASTER_KEY, local_kms

from ags_fast import Dataset


def main() -> None:
    """Write two files, and read them."""
    with tempfile.TemporaryDirectory() as folder:
        kms = local_kms(Path(folder))
        Dataset.create(Path(folder, "lake"), kms=kms, wrapping_key_id=MASTER_KEY)
        options = {"dataset": f"{folder}/lake", "kms": kms}
        frame = pd.DataFrame({"id": [1, 2, 3], "name": ["Ada", "Bob", "Cy"]})
        frame.to_csv("ags://2026/orders.csv", index=False, storage_options=options)
        frame.to_parquet("ags://2026/orders.parquet", storage_options=options)
        print(pd.read_csv("ags://2026/orders.csv", storage_options=options))
        print(pd.read_parquet("ags://2026/orders.parquet", columns=["name"], storage_options=options))


if __name__ == "__main__":
    main()
