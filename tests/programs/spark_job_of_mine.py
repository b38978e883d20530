"""A script as users have it: encrypts the current directory with Spark."""

import dataclasses
import json
import sys
from typing import Any

import pyarrow  # noqa: F401  # before the folder of data is on the path of this process
import tqdm  # noqa: F401
from pyspark.sql import SparkSession

from ags_fast.engines.processes import run_isolated  # noqa: F401
from ags_fast.jobs import encrypt_files
from ags_fast.spark import SparkEngine

conf: Any = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", **SparkEngine.recommended_conf()}
spark = SparkSession.builder.master("local[2]").config(map=conf).getOrCreate()
more: Any = {"kms": json.loads(sys.argv[1]), "wrapping_key_id": "master", "fsync": False, "progress": False}
encrypt_files(".", "../out", engine=SparkEngine(spark), **more).raise_for_failures()


class Isolated(SparkEngine):
    """As when a file kills its worker."""

    def run(self, context: Any, tasks: Any, open_cost: Any, report: Any) -> None:
        super().run(dataclasses.replace(context, isolate=True), tasks, open_cost, report)


encrypt_files(".", "../out2", engine=Isolated(spark), **more).raise_for_failures()
