"""A real Hive metastore on loopback, in a JVM of its own: Spark's jars have it, with Derby as its database."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from servers import cannot

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# DataNucleus and Derby look into classes of the JDK.
OPENED = ("java.net", "java.lang", "java.util")


@contextlib.contextmanager
def hive_metastore(folder: Path) -> Iterator[str]:
    """The URI of an empty metastore, which keeps its database and logs in a folder."""
    pyspark = pytest.importorskip("pyspark")
    gateway = pytest.importorskip("py4j.java_gateway")
    jars = os.path.join(os.path.dirname(pyspark.__file__), "jars")
    if shutil.which("java") is None or not glob.glob(f"{jars}/hive-metastore-*.jar"):
        cannot("needs a Java runtime, and a pyspark with Hive")
    settings = {
        "java.io.tmpdir": folder,
        "derby.stream.error.file": folder / "derby.log",
        "javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={folder}/metastore;create=true",
        "hive.async.log.enabled": "false",
        "hive.metastore.schema.verification": "false",
        "hive.metastore.warehouse.dir": folder / "warehouse",
        "datanucleus.schema.autoCreateAll": "true",
        "datanucleus.connectionPoolingType": "HikariCP",
    }
    options = ["-Xmx256m", "-XX:TieredStopAtLevel=1", *(f"-D{name}={value}" for name, value in settings.items())]
    options += [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED]
    with (folder / "log").open("w") as log:
        port, process = gateway.launch_gateway(
            classpath=f"{jars}/*",
            jarpath=glob.glob(f"{jars}/py4j-*.jar")[0],
            javaopts=options,
            die_on_exit=True,
            return_proc=True,
            redirect_stdout=log,
            redirect_stderr=log,
        )
    java = gateway.JavaGateway(gateway_parameters=gateway.GatewayParameters(port=port))
    try:
        hive = java.jvm.org.apache.hadoop.hive
        configuration = hive.conf.HiveConf()
        hive.metastore.txn.TxnDbUtil.prepDb(configuration)  # tables of locks: only Hive's schema tool makes them else
        at = hive.metastore.MetaStoreUtils.startMetaStore(configuration)
        yield f"thrift://127.0.0.1:{at}"
    finally:
        process.kill()  # nothing in it has to be kept
        process.wait()
        java.close()
