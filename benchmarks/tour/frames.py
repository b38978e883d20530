"""The tour's chapter of DataFrames: Spark writes one into a dataset; Spark, pandas and DuckDB read it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast import Dataset
from benchmarks.keystore import MASTER_KEY
from benchmarks.tour.parquet import differs

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from benchmarks.tour.steps import Steps

# --------------------------------------------------------------------------------------- what a user would write


def write(frame: DataFrame, dataset: str, kms: dict[str, str]) -> None:
    """Add a DataFrame to a dataset, as one new version."""
    frame.write.format("ags_parquet").options(wrappingKeyId=MASTER_KEY, **kms).mode("append").save(dataset)


def read(spark: SparkSession, dataset: str, kms: dict[str, str]) -> DataFrame:
    """Read a dataset as a DataFrame."""
    return spark.read.format("ags_parquet").options(**kms).load(dataset)


def mean_by_pandas(dataset: str, kms: dict[str, str]) -> float:
    """Read the files of a dataset by their URLs."""
    import pandas as pd

    options = {"dataset": dataset, "kms": kms}
    paths = [file.path for file in Dataset.open(dataset, kms=kms).files()]
    frames = [pd.read_parquet(f"ags://{path}", columns=["price"], storage_options=options) for path in paths]
    return float(pd.concat(frames)["price"].mean())


def mean_by_duckdb(dataset: str, kms: dict[str, str]) -> float:
    """Ask DuckDB."""
    import duckdb
    import fsspec

    with duckdb.connect() as connection:
        connection.execute("set threads = 1")  # its threads share a file of fsspec, and move each other's position
        connection.register_filesystem(fsspec.filesystem("ags", dataset=dataset, kms=kms))
        (mean,) = connection.sql("select avg(price) from 'ags://*.parquet'").fetchall()[0]
    return float(mean)


# ------------------------------------------------------------------------------------------------------ the tour


def chapter(spark: SparkSession, steps: Steps, kms: dict[str, str], folder: Path, rows: int) -> None:
    """Write a DataFrame of `rows` rows, and read it by three tools."""
    folder.mkdir(parents=True, exist_ok=True)
    dataset = str(folder / "frames.enc")
    frame = spark.range(rows).selectExpr("id", "id % 1000 / 10 as price", "concat('item ', id % 97) as item")
    with steps.step("Spark writes a DataFrame into a dataset, as one version"):
        write(frame, dataset, kms)
    handle = Dataset.open(dataset, kms=kms)
    files = sum(1 for _ in handle.files())
    steps.say(f"version {handle.version}, {files} encrypted Parquet files; no plaintext touched the disk")
    with steps.step("Spark reads the dataset as a DataFrame"):
        problem = differs(frame, read(spark, dataset, kms))
    steps.check(f"{rows:,} rows, equal to those that were written", problem)
    expected = sum(i % 1000 / 10 for i in range(rows)) / rows
    for name, mean in (("pandas", mean_by_pandas), ("DuckDB", mean_by_duckdb)):
        with steps.step(f"{name} reads a column through ags://"):
            found = mean(dataset, kms)
        steps.check(
            f"the mean price is {found:.2f}", "" if abs(found - expected) < 1e-6 else f"{found}, not {expected}"
        )
