"""Iceberg's Java in Spark as the judge of encrypted tables: a JVM of its own with a Hive catalog on embedded Derby. In
Iceberg 1.12 no other catalog encrypts. Its KMS, jvm/iceberg/LocalKms.scala, shares a keystore with ours.

    judge = Judge(tmp_path)                     # a context manager; the fixture `judge` of conftest.py has one per file
    judge.kms                                   # properties of ags_fast's KMS: the keystore that Java uses, too
    judge.name()                                # "db.t1", "db.t2": a name that no table has
    judge.sql("SELECT ...")                     # -> list of tuples, as `scan().to_arrow().to_pylist()` has the values
    judge.create("db.t", "id bigint, s string") # an encrypted table; with types that SQL does not have: create_typed
    judge.append("db.t", [(1, "a"), ...])       # INSERT with values as Python has them
    judge.delete("db.t", "id = 2")              # by deletion vectors, with their keys: the SQL of 1.11.0 loses them
    judge.rows("db.t", order_by="id")           # SELECT * as tuples; `read` is Iceberg's own reader, without Spark
    judge.metadata_location("db.t")             # what Python opens: open_table, register_table
    judge.register("db.t", metadata_location)   # a table of what Python wrote; a table of that name is forgotten first
    judge.lineage("db.t", order_by="id")        # SELECT *, _row_id, _last_updated_sequence_number
    judge.hive_uri                              # thrift://: a metastore over the same tables, for Python's HiveCatalog
    judge.warehouse                             # a folder for tables

Java caches no table: after Python commits to the metastore it sees the new one; a table whose catalog is Python's is
registered anew after each commit. A refusal of Java's is a `JudgeError`, whose message names the classes and texts.
Needs the jars that .ci/iceberg-java fetches (`make iceberg-java`); skips without them, and fails in CI.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import decimal
import hashlib
import itertools
import json
import os
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, MASTERS, make_kms
from parquet_peers import HERE, cached, cannot, java, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ags_fast"
# What Spark asks of Java 17, see org.apache.spark.launcher.JavaModuleOptions.
OPENED = (
    "java.io",
    "java.lang",
    "java.lang.invoke",
    "java.lang.reflect",
    "java.net",
    "java.nio",
    "java.util",
    "java.util.concurrent",
    "java.util.concurrent.atomic",
    "jdk.internal.ref",
    "sun.nio.ch",
    "sun.nio.cs",
    "sun.security.action",
    "sun.util.calendar",
)
JVM = (
    "-Xmx1500m",
    "-XX:TieredStopAtLevel=1",
    "-XX:+IgnoreUnrecognizedVMOptions",
    *(f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in OPENED),
    "-Djdk.reflect.useDirectMethodHandle=false",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Duser.timezone=UTC",
)
EPOCH = dt.datetime(1970, 1, 1)
JAVA = os.environ.get("ICEBERG_JAVA", "1.12")  # the version of Iceberg's Java that the tests start


class JudgeError(Exception):
    """Java refuses; the message has its exceptions, the cause last."""


# ---------------------------------------------------------------- what is fetched and compiled once per machine


def _fetched(name: str, lock: str) -> Path:
    """A folder that .ci/iceberg-java fetched, by the file that pins what is in it."""
    pinned = HERE.parent / ".ci" / lock
    if not pinned.exists():
        pytest.skip(f"needs .ci/{lock}, which is in the source tree")
    folder = CACHE / f"{name}-{hashlib.sha256(pinned.read_bytes()).hexdigest()[:16]}"
    if not folder.is_dir():
        cannot("needs Iceberg's Java: make iceberg-java")
    return folder


def spark_jars() -> Path:
    """The jars of the newest Spark that Iceberg's Java runs on."""
    return pyspark_folder() / "pyspark" / "jars"


def pyspark_folder(version: str = "4.1") -> Path:
    """A folder for PYTHONPATH with an older PySpark: "4.1", which is the one with `spark_jars`, or "4.0"."""
    return _fetched("pyspark", f"requirements-pyspark-{version}.txt")


def runtime_jar(version: str = JAVA) -> Path:
    """Iceberg's Java for Spark, one jar."""
    return next(_runtimes(version))


def _runtimes(version: str = "") -> Iterator[Path]:
    return _fetched("iceberg-jars", "iceberg-jars.txt").glob(f"iceberg-spark-runtime-*_*-{version}*.jar")


def avro_jar() -> Path:
    """Spark's own Avro source, for PySpark 4.1."""
    return next(_fetched("iceberg-jars", "iceberg-jars.txt").glob("spark-avro_*.jar"))


def alloy_jar() -> Path:
    """Alloy, which checks the model of the log."""
    return next(_fetched("alloy-jars", "alloy-jars.txt").glob("*.jar"))


def rest_jars() -> list[Path]:
    """Iceberg's core of the version `JAVA`, and what it needs beside `spark_jars`: for a server of the REST catalog."""
    others = set(_fetched("iceberg-jars", "iceberg-jars.txt").glob("*.jar")) - {*_runtimes(), avro_jar()}
    return sorted(one for one in others if one.stem.endswith((JAVA + ".0", "-tests")) or "iceberg" not in one.name)


def compiled(folder: Path, jars: Sequence[Path]) -> Path:
    """The folder of the compiled classes of a folder of Scala sources."""
    sources = sorted(folder.glob("*.scala"))
    digest = hashlib.sha256(json.dumps([[one.name for one in jars], [one.read_text() for one in sources]]).encode())

    def compile_into(target: Path) -> None:
        path = os.pathsep.join([str(spark_jars() / "*"), *map(str, jars)])
        scalac = [
            java(),
            "-cp",
            path,
            "scala.tools.nsc.Main",
            "-usejavacp",
            "-Xlint",
            "-Wconf:cat=deprecation:s",
            "-Werror",
        ]
        run([*scalac, "-d", target, *sources], f"{folder} does not compile")

    return cached(f"jvm-{folder.name}-{digest.hexdigest()[:16]}", compile_into)


def judge_classes(version: str = JAVA) -> Path:
    """The compiled classes of jvm/iceberg: the KMS ags.judge.LocalKms is in it."""
    return compiled(HERE / "jvm" / "iceberg", [runtime_jar(version)])


# ---------------------------------------------------------------- values


def _plain(value: Any) -> Any:
    """A value that Values.scala wrote, as pyarrow's to_pylist has it."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    [(kind, given)] = value.items()
    if kind == "struct":
        return {name: _plain(one) for name, one in given.items()}
    if kind == "map":
        return [(_plain(key), _plain(one)) for key, one in given]
    if kind in ("timestamp", "timestamptz"):
        micros, nanos = divmod(int(given), 1000)
        at = EPOCH + dt.timedelta(microseconds=micros)
        if nanos:
            return int(given)  # of a type with nanoseconds, which datetime does not have
        return at if kind == "timestamp" else at.replace(tzinfo=dt.UTC)
    if kind == "time":
        return (EPOCH + dt.timedelta(microseconds=int(given))).time()
    kinds: dict[str, Callable[[str], Any]] = {
        "float": float,
        "decimal": decimal.Decimal,
        "bytes": base64.b64decode,
        "date": dt.date.fromisoformat,
        "uuid": uuid.UUID,
        "variant": json.loads,
    }
    return kinds[kind](given)


def _tagged(value: Any) -> Any:
    """The other way round. A dict is a struct, a list of pairs a map, any other list a list."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        return {"struct": {name: _tagged(one) for name, one in value.items()}}
    if isinstance(value, list):
        if value and all(isinstance(one, tuple) for one in value):
            return {"map": [[_tagged(key), _tagged(one)] for key, one in value]}
        return [_tagged(one) for one in value]
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, dt.datetime):
        kind = "timestamptz" if value.tzinfo else "timestamp"
        return {kind: str((value.replace(tzinfo=None) - EPOCH) // dt.timedelta(microseconds=1) * 1000)}
    if isinstance(value, dt.time):
        return {"time": str((dt.datetime.combine(EPOCH.date(), value) - EPOCH) // dt.timedelta(microseconds=1))}
    if isinstance(value, float):
        return {"float": {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(str(value), repr(value))}
    if isinstance(value, dt.date):
        return {"date": value.isoformat()}
    return {{decimal.Decimal: "decimal", uuid.UUID: "uuid"}[type(value)]: str(value)}


def literal(value: Any) -> str:
    """A value of Python as SQL has it."""
    if value is None:
        return "NULL"
    if isinstance(value, bool | int):
        return str(value).upper()
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if isinstance(value, dt.datetime):
        return f"TIMESTAMP{'' if value.tzinfo else '_NTZ'} '{value.isoformat(' ')}'"
    if isinstance(value, dt.date):
        return f"DATE '{value}'"
    if isinstance(value, float):
        return f"double('{value}')"
    if isinstance(value, decimal.Decimal):
        return f"{value}BD"
    if isinstance(value, dict):
        return "named_struct(" + ", ".join(f"'{name}', {literal(one)}" for name, one in value.items()) + ")"
    if value and isinstance(value[0], tuple):
        return "map(" + ", ".join(literal(part) for pair in value for part in pair) + ")"
    return "array(" + ", ".join(map(literal, value)) + ")"


# ---------------------------------------------------------------- the judge


class Judge:
    """A JVM with Spark, Iceberg and a Hive catalog with encryption. See this module for its use.

    Args:
        folder: For the keystore, the metastore's database and the warehouse.
        jvm: Options of the JVM. Those of tests start fast; code that runs for long is slow under them.
        version: Of Iceberg's Java, such as "1.11".
        kms: The KMS of another judge, whose tables this one opens, too.
    """

    def __init__(
        self, folder: Path, jvm: Sequence[str] = JVM, *, version: str = JAVA, kms: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.kms = make_kms(folder, keys=MASTERS) if kms is None else kms
        self.warehouse = folder / "warehouse"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the JVM
        catalog = {
            "warehouse": f"file://{self.warehouse}",
            "encryption.kms-impl": "ags.judge.LocalKms",
            "cache-enabled": "false",
            **{name: value for name, value in self.kms.items() if name.startswith("kms.")},
        }
        settings = json.dumps({"conf": self._conf(catalog), "catalog": catalog})
        path = os.pathsep.join(map(str, (judge_classes(version), runtime_jar(version), spark_jars() / "*")))
        logs = f"-Dderby.system.home={folder}", f"-Djava.io.tmpdir={folder}"
        self._process = subprocess.Popen(
            [java(), *jvm, *logs, "-cp", path, "ags.judge.Judge", settings],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
        )
        self._hive_uri = ""
        self._numbers = itertools.count(1)
        self.sql("CREATE NAMESPACE IF NOT EXISTS db")

    def _conf(self, catalog: Mapping[str, str]) -> dict[str, str]:
        database = f"jdbc:derby:;databaseName={self.folder / 'metastore'};create=true"
        hadoop = {
            "fs.file.impl": "ags.judge.PlainFiles",
            "hive.metastore.disallow.incompatible.col.type.changes": "false",  # of columns in other places
            "javax.jdo.option.ConnectionURL": database,
            "datanucleus.schema.autoCreateAll": "true",
            "datanucleus.connectionPoolingType": "HikariCP",  # the others' jars are not there
            "hive.metastore.schema.verification": "false",
            "hive.metastore.warehouse.dir": str(self.warehouse),
            "hive.metastore.uris": "",
        }
        names = {"": "org.apache.iceberg.spark.SparkCatalog", ".type": "hive"}
        names |= {f".{name}": value for name, value in catalog.items()}
        return {
            "spark.master": "local[1]",
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.datetime.java8API.enabled": "true",
            "spark.sql.warehouse.dir": str(self.warehouse),
            "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
            "spark.sql.defaultCatalog": "hive",
            **{f"spark.sql.catalog.hive{name}": value for name, value in names.items()},
            **{f"spark.hadoop.{name}": value for name, value in hadoop.items()},
        }

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the JVM."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]  # ends it
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._log.close()

    def _ask(self, op: str, **request: Any) -> dict[str, Any]:
        print(json.dumps({"op": op, **request}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            self._log.seek(0)
            raise AssertionError(f"the judge ended: {self._log.read().decode(errors='replace')[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise JudgeError("\n".join(answer["error"]))
        return answer

    @property
    def pid(self) -> int:
        """The number of the JVM's process."""
        return self._process.pid

    def log(self) -> str:
        """What the JVM wrote to its standard error, Spark's log among it."""
        return os.pread(self._log.fileno(), 1 << 30, 0).decode(errors="replace")

    def name(self, namespace: str = "db") -> str:
        """Return a name that no table of this judge has."""
        return f"{namespace}.t{next(self._numbers)}"

    # ------------------------------------------------ SQL

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        """Run a statement of Spark's SQL in the Hive catalog."""
        return [tuple(_plain(row)) for row in self._ask("sql", text=text)["rows"]]

    def dicts(self, text: str) -> list[dict[str, Any]]:
        """Run a statement; each row with the names of its columns."""
        answer = self._ask("sql", text=text)
        return [dict(zip(answer["columns"], _plain(row), strict=True)) for row in answer["rows"]]

    def create(
        self,
        name: str,
        columns: str,
        *,
        encrypted: bool = True,
        key_length: int = 16,
        version: int = 3,
        partitioned: str = "",
        **properties: str,
    ) -> None:
        """Create a table: columns as SQL has them, `partitioned` likewise, properties with _ for a dot."""
        all_properties = {"format-version": str(version), **{key.replace("_", "."): v for key, v in properties.items()}}
        if encrypted:
            all_properties |= {"encryption.key-id": MASTER, "encryption.data-key-length": str(key_length)}
        listed = ", ".join(f"'{key}'='{value}'" for key, value in all_properties.items())
        by = f"PARTITIONED BY ({partitioned})" if partitioned else ""
        self.sql(f"CREATE TABLE {name} ({columns}) USING iceberg {by} TBLPROPERTIES ({listed})")

    def append(self, name: str, rows: Iterable[Sequence[Any]], *, branch: str = "") -> None:
        """Insert rows of values in the order of the columns."""
        values = ", ".join("(" + ", ".join(map(literal, row)) + ")" for row in rows)
        self.sql(f"INSERT INTO {name}{f'.branch_{branch}' if branch else ''} VALUES {values}")

    def rows(self, name: str, order_by: str = "1", *, at: int | str | None = None) -> list[tuple[Any, ...]]:
        """Return all rows, also of another snapshot, branch or tag."""
        version = "" if at is None else f" VERSION AS OF {literal(at)}"
        return self.sql(f"SELECT * FROM {name}{version} ORDER BY {order_by}")

    def lineage(self, name: str, order_by: str = "1") -> list[tuple[Any, ...]]:
        """Return all rows, each with its `_row_id` and `_last_updated_sequence_number` at the end."""
        return self.sql(f"SELECT *, _row_id, _last_updated_sequence_number FROM {name} ORDER BY {order_by}")

    def delete(self, name: str, where: str) -> None:
        """Delete rows by deletion vectors, as Iceberg's Java will write them when it keeps their keys.

        `DELETE FROM` with write.delete.mode=merge-on-read in 1.11.0 gives the vectors' entries no key metadata
        (apache/iceberg#16157), and fails at the next read.
        """
        places: dict[str, list[int]] = {}
        for path, position in self.sql(f"SELECT _file, _pos FROM {name} WHERE {where}"):
            places.setdefault(path, []).append(position)
        self._ask("delete", name=name, places=places)

    def race(self, name: str, threads: int) -> int:
        """Commit empty snapshots in threads, through one table. Return how many were made."""
        return int(self._ask("race", name=name, threads=threads)["commits"])

    # ------------------------------------------------ the catalog

    def metadata_location(self, name: str) -> str:
        """Return where the table's newest metadata are."""
        return str(self._ask("location", name=name)["location"])

    def register(self, name: str, metadata_location: str) -> None:
        """Make a table of metadata that are there; what has the name already is forgotten, its files stay."""
        self._ask("register", name=name, location=metadata_location)

    @property
    def hive_uri(self) -> str:
        """A Hive metastore on loopback, over this judge's tables. It starts when it is first asked for."""
        if not self._hive_uri:
            self._hive_uri = f"thrift://127.0.0.1:{self._ask('metastore')['port']}"
        return self._hive_uri

    # ------------------------------------------------ by Iceberg's own classes, without Spark

    def create_typed(
        self,
        name: str,
        schema: Mapping[str, Any],
        *,
        spec: Mapping[str, Any] | None = None,
        properties: Mapping[str, str],
    ) -> None:
        """Create a table with a schema and a partition spec as metadata.json has them: all of Iceberg's types."""
        more = {"spec": spec} if spec else {}
        self._ask("create", name=name, schema=schema, properties=properties, **more)

    def write(self, name: str, rows: Iterable[Mapping[str, Any]], *, format: str = "parquet") -> None:
        """Append rows as a file (a file for each partition) in Parquet or Avro."""
        self._ask("write", name=name, rows=[_tagged(dict(row)) for row in rows], format=format)

    def delete_equal(self, name: str, rows: Sequence[Mapping[str, Any]], *, format: str = "parquet") -> None:
        """Delete all rows that equal one of these, by a file of equality deletes. The table must not be partitioned."""
        tagged = [_tagged(dict(row)) for row in rows]
        self._ask("eq_delete", name=name, rows=tagged, columns=list(rows[0]), format=format)

    def read(self, name: str, *, snapshot_id: int | None = None) -> list[dict[str, Any]]:
        """Return all rows in any order, also of the types that Spark does not have.

        Iceberg 1.11's own reader does not decrypt deletion vectors: `rows` of a table that has them.
        """
        more = {} if snapshot_id is None else {"snapshot": snapshot_id}
        return [_plain(row) for row in self._ask("read", name=name, **more)["rows"]]
