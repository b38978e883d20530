"""Decrypt the files of a dataset in a Spark job of your own, a partition at a time.

python examples/spark_map_partitions.py   (or spark-submit)
"""

from __future__ import annotations

import csv
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from example_kms import MASTER_KEY, local_kms
from pyspark.sql import SparkSession

from ags_fast import Dataset, jobs

if TYPE_CHECKING:
    from collections.abc import Iterator


def main() -> None:
    """Encrypt a folder of CSV files, and sum a column of them on Spark."""
    with tempfile.TemporaryDirectory() as folder:
        kms = local_kms(Path(folder))
        plain, lake = Path(folder, "plain"), f"{folder}/lake"
        plain.mkdir()
        for number in range(8):
            (plain / f"{number}.csv").write_text("id,price\n" + "".join(f"{n},{n * number}\n" for n in range(100)))
        jobs.encrypt_files(plain, lake, kms=kms, wrapping_key_id=MASTER_KEY).raise_for_failures()

        def prices(paths: Iterator[str]) -> Iterator[int]:
            # Once a partition: the KMS is asked for the keys once, not once a file. `kms` names keys and holds none.
            dataset = Dataset.open(lake, kms=kms)
            for path in paths:
                with io.TextIOWrapper(dataset.open_file(path), encoding="utf-8") as file:
                    yield from (int(row["price"]) for row in csv.DictReader(file))

        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        spark = SparkSession.builder.master("local[2]").appName("prices").getOrCreate()
        try:
            names = [file.path for file in Dataset.open(lake, kms=kms).sealed_files()]
            print(spark.sparkContext.parallelize(names, 4).mapPartitions(prices).sum())
        finally:
            spark.stop()


if __name__ == "__main__":
    main()
