"""The REST catalog of Iceberg Java on loopback, in a JVM of its own: jvm/rest/RestServer.scala."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING

from iceberg_java import compiled, rest_jars, spark_jars
from parquet_peers import HERE, java

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def iceberg_rest(folder: Path) -> Iterator[str]:
    """The URI of an empty catalog, whose tables are in a folder. Tables are forgotten at the end, files are not."""
    classes = compiled(HERE / "jvm" / "rest", rest_jars())
    path = os.pathsep.join(map(str, (classes, *rest_jars(), spark_jars() / "*")))
    options = ["-Xmx512m", "-XX:TieredStopAtLevel=1", "-cp", path]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [java(), *options, "org.apache.iceberg.rest.RestServer", f"file://{folder}/wh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    with server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            if not port:
                raise RuntimeError((folder / "log").read_text()[-2000:])
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()  # nothing in it has to be kept
