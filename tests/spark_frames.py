"""A driver that reads a dataset as DataFrames: python spark_frames.py '{"spark.master": ...}' DATASET '{KMS}'.

Spark is to find the data source by the module pyspark_ags_parquet; in the end it is registered, too. "spark.remote"
in place of "spark.master" is Spark Connect, with the server in this process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pyspark
from pyspark.sql import SparkSession, functions

from ags_fast.spark.datasource import register


def main() -> None:
    settings, path, kms = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    spark = SparkSession.builder.config(map=settings).getOrCreate()
    read = spark.read.format("ags_parquet").options(**kms)
    frame = read.option("metadata", "_file").load(path)
    pruned = read.option("columns", "year,id").option("splitBytes", "20k").load(path)
    declared = read.schema("id bigint, name string").option("files", "year=2025/*").load(path)
    sums = frame.groupBy("year").agg(functions.sum("id"), functions.max("_file")).orderBy("year")
    answer: dict[str, Any] = {
        "version": pyspark.__version__,
        "kind": type(spark).__module__,
        "schema": frame.schema.simpleString(),
        "sums": [list(row) for row in sums.collect()],
        "pruned": pruned.where("year = 2026").selectExpr("sum(id)", "count(*)").collect()[0].asDict(),
        "declared": [list(row) for row in declared.orderBy("id").limit(2).collect()],
    }
    try:
        read.option("colums", "id").load(path).count()
    except Exception as error:
        answer["error"] = str(error)
    register(spark)  # Spark has found the sources already
    answer["registered"] = spark.read.format("ags_parquet").options(**kms).load(path).count()
    print(json.dumps(answer), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
