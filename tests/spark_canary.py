"""A driver whose keys are known: python spark_canary.py FOLDER '{"spark.master": ...}'.

It runs every kind of job and gathers in FOLDER/evidence what Spark, the jobs and the system have of it: what it ships
to executors, the pages of its web UI, its local folders, the plans of its jobs, environments and command lines. Then it
prints what nobody may find there, and what must be found, since it was put there.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import sys
import urllib.request
from pathlib import Path
from typing import Any

from datasets import object_of, version_of
from deadly_kms import Rules
from support import pattern

from ags_fast import Dataset
from ags_fast.jobs import JobError, LocalEngine, decrypt_files, encrypt_files, expire, rekey_files, rotate, verify_files
from ags_fast.keys import clear_cache, envelope, kek
from ags_fast.keys.kms import local

BLOCK_SIZE = 1 << 16
known: dict[bytes, str] = {}  # keys, and what they are


def record_keys() -> None:
    """Every key that this process makes or unwraps from now on is known: data keys, KEKs, master keys, store keys."""

    def recording(kind: str, call: Any, keys_of: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            answer = call(*args, **kwargs)
            known.update(dict.fromkeys(keys_of(args, answer), kind))
            return answer

        return wrapper

    for module, kind in ((local, "master key"), (kek, "KEK"), (envelope, "KEK")):
        module.Key = recording(kind, module.Key, lambda args, answer: [bytes(args[0])])  # type: ignore[attr-defined]
    own = envelope.Envelope
    items_of = envelope.Envelope.wrap_many

    def wrap_many(self: Any, key_id: str, items: Any) -> Any:
        items = list(items)
        known.update((dek, "DEK") for dek, _ in items)
        return items_of(self, key_id, items)

    own.wrap_many = wrap_many  # type: ignore[method-assign]
    own.unwrap = recording("DEK", own.unwrap, lambda args, answer: [answer])  # type: ignore[method-assign]


def keep_what_is_shipped(folder: Path) -> None:
    """Every pickle that pyspark makes here goes to executors."""
    from pyspark import serializers

    for name in ("CPickleSerializer", "CloudPickleSerializer"):
        kind = getattr(serializers, name)

        def dumps(self: Any, obj: Any, dumps: Any = kind.dumps, name: str = name) -> bytes:
            data: bytes = dumps(self, obj)
            (folder / f"{name}-{secrets.token_hex(4)}").write_bytes(data)
            return data

        kind.dumps = dumps


def keep_messages(folder: Path) -> None:
    """Every message to and from a server of Spark Connect."""
    from pyspark.sql.connect.proto import base_pb2_grpc

    def kept(coder: Any, kind: str) -> Any:
        def wrapper(message: Any) -> Any:
            coded = coder(message)
            data = coded if kind == "request" else message
            (folder / f"{kind}-{secrets.token_hex(6)}").write_bytes(data)
            return coded

        return wrapper

    class Channel:
        def __init__(self, channel: Any) -> None:
            self._channel = channel

        def __getattr__(self, name: str) -> Any:
            method = getattr(self._channel, name)

            def call(path: str, *, request_serializer: Any, response_deserializer: Any, **more: Any) -> Any:
                return method(
                    path,
                    request_serializer=kept(request_serializer, "request"),
                    response_deserializer=kept(response_deserializer, "response"),
                    **more,
                )

            return call if name.startswith(("unary_", "stream_")) else method

    own: Any = base_pb2_grpc.SparkConnectServiceStub.__init__

    def init(self: Any, channel: Any) -> None:
        own(self, Channel(channel))

    base_pb2_grpc.SparkConnectServiceStub.__init__ = init  # type: ignore[method-assign]


def keep_pages(url: str, app_id: str, folder: Path, *more: str) -> None:
    """What the web UI tells, to people and to programs."""

    def get(path: str) -> bytes:
        with urllib.request.urlopen(url + path, timeout=60) as answer:
            data: bytes = answer.read()
        (folder / path.replace("/", "_")).write_bytes(data)
        return data

    api = f"/api/v1/applications/{app_id}"
    for page in ("jobs", "stages", "allexecutors", "environment", "storage/rdd", "sql"):
        get(f"{api}/{page}")
    for page in ("jobs", "stages", "environment", "storage", "executors", "SQL", *more):
        get(f"/{page}/")
    for execution in json.loads(get(f"{api}/sql?length=1000")):
        get(f"/SQL/execution/?id={execution['id']}")
    for stage in json.loads(get(f"{api}/stages?details=true&withSummaries=true")):
        get(f"/stages/stage/?id={stage['stageId']}&attempt={stage['attemptId']}")
    for job in json.loads(get(f"{api}/jobs")):
        get(f"/jobs/job/?id={job['jobId']}")


def keep_processes(folder: Path) -> None:
    """Environment and command line of this process and of all that it has started."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            stat = (process / "stat").read_text()
        except OSError:
            continue
        parents[int(process.name)] = int(stat.rpartition(")")[2].split()[1])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    for pid in ours:
        for what in ("environ", "cmdline"):
            try:
                (folder / f"{pid}-{what}").write_bytes(Path(f"/proc/{pid}/{what}").read_bytes())
            except OSError:
                pass


def run_jobs(folder: Path, rules: Rules, engine: Any) -> None:
    """One of each kind, with files that fail: tampered with, and with a KMS client that says more than it should."""
    evidence = folder / "evidence"

    def keep_plans(rows: Any) -> None:
        keep_processes(evidence / "processes")
        for plans in folder.glob("ds*/_ags"):
            shutil.copytree(plans, evidence / "plans" / secrets.token_hex(4))

    src, common = folder / "src", {"kms": rules.kms, "engine": engine, "progress": keep_plans}
    src.mkdir()
    for i in range(6):
        (src / str(i)).write_bytes(pattern(2 * BLOCK_SIZE, i))
    for name, double in (("ds2", True), ("ds1", False)):
        ds = folder / name
        Dataset.create(ds, kms=rules.kms, wrapping_key_id="master")
        rules.set()
        encryption = {**common, "wrapping_key_id": "master", "double_wrap": double, "block_size": BLOCK_SIZE}
        encrypt_files(src, ds, **encryption).raise_for_failures()
        verify_files(ds, **common).raise_for_failures()
        rekey_files(ds, **common, paths="[12]").raise_for_failures()
        decrypt_files(ds, folder / f"{name}-out", **common).raise_for_failures()
        local.rotate_key(rules.kms, "master")
        for what in ("kek", "mek", "double-wrap") if double else ("kek", "mek"):
            rotate(ds, **common, what=what).raise_for_failures()
        assert expire(ds, kms=rules.kms, keep=2, skip_grace=True).counts["ok"]
        damage(ds, rules.kms, "0")
        rules.set(shout=("3",) if not double else ("None",))
        clear_cache()
        try:
            verify_files(ds, **common, on_error="raise")
        except JobError as error:
            print(error, file=sys.stderr)
        failed = {row.error_class for row in verify_files(ds, **common).failed}
        assert "KeyAccessError" in failed or double, failed
        assert "IntegrityError" in failed, failed
        for version in Dataset.open(ds, kms=rules.kms).versions():
            unwrap_all(ds, rules.kms, version.number)


def damage(dataset: Path, kms: Any, path: str) -> None:
    """Change some bytes of a file."""
    file = object_of(dataset, kms, path)
    data = file.read_bytes()
    file.write_bytes(data[:100] + bytes(8) + data[108:])


def unwrap_all(dataset: Path, kms: Any, version: int | None = None) -> None:
    """Unwrap all data keys of a version, which tells record_keys."""
    snapshot = version_of(dataset, kms, version)
    for row in snapshot.files():
        for wrap in row.wraps(snapshot.entry.dataset_id):
            snapshot.envelope.unwrap(*wrap)


def read_frames(folder: Path, rules: Rules, session: Any) -> None:
    """Read a dataset as a DataFrame, with plans, a shuffle and errors, and leave what Spark tells of it in the log."""
    import pyarrow as pa
    from pyarrow import parquet

    from ags_fast.spark.datasource import register

    rules.set(spared=(os.getpid(),))
    src, ds = folder / "frames", folder / "ds3"
    src.mkdir()
    for i in range(3):
        table = pa.table({"id": list(range(2000 * i, 2000 * i + 2000)), "text": [secrets.token_hex(20)] * 2000})
        parquet.write_table(table, src / f"{i}.parquet", row_group_size=500)
    common: dict[str, Any] = {
        "kms": rules.kms,
        "engine": LocalEngine(0),
        "progress": False,
        "wrapping_key_id": "master",
    }
    encrypt_files(src, ds, **common, format="parquet", column_keys={"text": "master"}).raise_for_failures()
    unwrap_all(ds, rules.kms)
    register(session)
    frame = session.read.format("ags_parquet").options(**rules.kms, metadata="_key_id", splitBytes="20k").load(str(ds))
    frame.explain(True)
    assert frame.repartition(3, "text").sortWithinPartitions("id").groupBy("_key_id").count().collect()[0][1] == 6000
    damage(ds, rules.kms, "1.parquet")
    for options in ({}, {"files": "*", "colums": "id"}):
        try:
            session.read.format("ags_parquet").options(**rules.kms, **options).load(str(ds)).collect()
        except Exception as error:
            print(error, file=sys.stderr)
        else:
            raise AssertionError(options)


def put_controls(context: Any) -> dict[str, bytes]:
    """What shows that we look where keys would be: secrets where Spark's users put them."""
    controls = {place: secrets.token_bytes(16) for place in ("broadcast", "closure", "shuffle", "exception")}
    broadcast = context.broadcast(controls["broadcast"])
    in_closure, in_shuffle = controls["closure"] * 100_000, controls["shuffle"]
    text = controls["exception"].hex()

    def use(numbers: Any) -> Any:
        assert broadcast.value
        assert in_closure
        return [(number, in_shuffle) for number in numbers]

    def fail(_: Any) -> Any:
        raise ValueError(text)

    assert len(context.parallelize([0, 1], 2).mapPartitions(use).repartition(2).collect()) == 2
    try:
        context.parallelize([0], 1).foreachPartition(fail)
    except Exception:
        pass
    return controls


def put_controls_of_connect(session: Any) -> dict[str, bytes]:
    """The same for a session of Spark Connect."""
    controls = {place: secrets.token_bytes(16) for place in ("function", "row", "rows", "literal")}
    in_function = controls["function"]

    def use(batches: Any) -> Any:
        assert in_function
        return batches

    for place, count in (("row", 1), ("rows", 100_000)):
        frame = session.createDataFrame([(controls[place],)] * count, "a binary")
        assert frame.mapInArrow(use, "a binary").count() == count
    assert session.range(1).selectExpr(f"id = 0 and 'a' != '{controls['literal'].hex()}'").count() == 1
    return controls


def main() -> None:
    folder = Path(sys.argv[1])
    evidence = folder / "evidence"
    for name in ("events", "local", "messages", "plans", "processes", "shipped", "ui"):
        (evidence / name).mkdir(parents=True)
    record_keys()
    settings = json.loads(sys.argv[2])
    rules = Rules(folder / "kms", passphrase="cluster" in settings.get("spark.master", ""))
    known[(folder / "kms" / "key").read_bytes()] = "key file or passphrase"
    keep_what_is_shipped(evidence / "shipped")

    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from ags_fast.spark import SparkEngine

    in_conf = secrets.token_bytes(16)
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(folder / "local"),
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (evidence / "events").as_uri(),
        "spark.eventLog.compress": "false",
        "spark.broadcast.compress": "false",
        "spark.shuffle.compress": "false",
        "spark.shuffle.spill.compress": "false",
        "spark.executorEnv.CONTROL": base64.b64encode(in_conf).decode(),
        **settings,
    }
    remote = "spark.remote" in settings  # the server is in this process
    if remote:
        keep_messages(evidence / "messages")
    session = SparkSession.builder.config(map=conf).getOrCreate()
    context: Any = SparkContext._active_spark_context
    context.setLogLevel("DEBUG")
    run_jobs(folder, rules, SparkEngine(session))
    with contextlib.redirect_stdout(sys.stderr):  # the log of the driver is evidence
        read_frames(folder, rules, session)
    context.setLogLevel("INFO")
    controls = {"conf": in_conf, **put_controls(context)}
    if remote:
        controls |= put_controls_of_connect(session)
    keep_processes(evidence / "processes")
    context._jsc.sc().listenerBus().waitUntilEmpty()
    keep_pages(context.uiWebUrl, context.applicationId, evidence / "ui", *(["connect"] if remote else []))
    shutil.copytree(folder / "local", evidence / "local", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))
    session.stop()
    print(
        json.dumps(
            {
                "keys": {key.hex(): kind for key, kind in known.items()},
                "controls": {place: key.hex() for place, key in controls.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
