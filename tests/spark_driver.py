"""A Spark driver for tests: python spark_driver.py '{"spark.master": ...}'. Does a job for each line of its input.

The master may be the URL of a server of Spark Connect.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import SparkSession

from ags_fast import jobs
from ags_fast.spark import SparkEngine


def main() -> None:
    settings = json.loads(sys.argv[1])
    url = settings["spark.master"]
    builder = SparkSession.builder.remote(url) if url.startswith("sc:") else SparkSession.builder.config(map=settings)
    session = builder.getOrCreate()
    for line in sys.stdin:
        order = json.loads(line)
        engine = SparkEngine(session, target_bytes=order["target_bytes"])
        try:
            if order["job"].startswith("iceberg."):
                result = _on_table(order, engine)
            else:
                result = getattr(jobs, order["job"])(*order["args"], engine=engine, progress=False, **order["options"])
            rows = [row._asdict() for row in result.rows]
            answer: dict[str, Any] = {"counts": result.counts, "version": result.version, "rows": rows}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    session.stop()


def _on_table(order: dict[str, Any], engine: SparkEngine) -> jobs.JobResult:
    """Do a job of ags_fast.iceberg on a table of a catalog, which two of the options describe."""
    from ags_fast import iceberg

    options = order["options"]
    table = iceberg.load_catalog("tests", kms=options.pop("kms"), **options.pop("catalog")).load_table(*order["args"])
    result: jobs.JobResult = getattr(iceberg, order["job"].removeprefix("iceberg."))(table, engine=engine, **options)
    return result


if __name__ == "__main__":
    main()
