"""A Spark driver for tests: python spark_driver.py '{"spark.master": ...}'. Does a job for each line of its input.

The master may be the URL of a server of Spark Connect.
"""

from __future__ import annotations

import json
import sys

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
            result = getattr(jobs, order["job"])(*order["args"], engine=engine, progress=False, **order["options"])
            rows = [row._asdict() for row in result.rows]
            answer = {"counts": result.counts, "version": result.version, "rows": rows}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    session.stop()


if __name__ == "__main__":
    main()
