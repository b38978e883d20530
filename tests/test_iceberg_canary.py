"""No key of a table is where users, logs, other processes and other systems look."""

from __future__ import annotations

import io
import logging
import pickle
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from datasets import MASTERS, make_kms
from iceberg_tables import forms_of_key, ids, new_table, rows, sql_catalog, table_keys
from programs.icebergs import print_written_files
from support import program, run_python

from ags_fast.errors import AgsError
from ags_fast.iceberg import clear_cache, delete, expire, files, load_catalog, open_table, rekey, rotate
from ags_fast.iceberg.commit import raw_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable

    from servers import S3Server

pytestmark = pytest.mark.more  # everything is logged and searched


def check(keys: Iterable[bytes], evidence: bytes | str, what: object) -> None:
    data = evidence.encode() if isinstance(evidence, str) else evidence
    assert data, what
    for key in keys:
        found = [form for form in forms_of_key(key) if form in data]
        assert found == [], (what, "a key is there")


def used(catalog: Any, *, vectors: bool = True) -> tuple[Any, set[bytes]]:
    """A table that has gone through everything, and the keys that it has, and had."""
    table = new_table(catalog)
    table.append(rows(0, 100))
    table.append(rows(100, 110))
    keys = table_keys(table)
    if vectors:
        delete(table, "id = 3")
    table.overwrite(rows(200, 210), overwrite_filter="id > 50")
    rotate(table)
    keys |= table_keys(table)
    rekey(table, what="data")
    keys |= table_keys(table)
    expire(table, keep=3)
    return table, keys | table_keys(table)


def test_the_forms_are_found() -> None:
    """The check itself: a key is found in each form in which it could be."""
    key = bytes(range(100, 116))
    texts = [key, key.hex().encode(), repr(key).encode(), str(list(key)).encode(), io.BytesIO(key).read() * 2]
    import base64

    texts += [base64.b64encode(bytes(n) + key + bytes(3)) for n in range(7)]
    for text in texts:
        assert any(form in text for form in forms_of_key(key)), text


def test_objects(tmp_path: Path, kms: dict[str, str]) -> None:
    catalog = sql_catalog(tmp_path, kms)
    table, keys = used(catalog)
    assert len(keys) > 10
    tasks = list(table.scan().plan_files())
    manifests = [one for snapshot in table.metadata.snapshots for one in snapshot.manifests(table.io)]
    entries = [entry for one in manifests for entry in one.fetch_manifest_entry(table.io, discard_deleted=False)]
    data = table.io.new_input(tasks[0].file.file_path)
    shown = [table, table.io, table.io.session, catalog, table.metadata, tasks, manifests, entries, list(files(table))]
    shown += [raw_metadata(table), data, data.open(), table.io.inner(table.location()), table.catalog.properties]
    shown += [table.scan(), rotate(table), rekey(table, what="manifests").table.to_pylist()]
    for one in shown:
        check(keys, repr(one) + str(one) + repr(vars(one) if hasattr(one, "__dict__") else ""), type(one))
    for task in tasks:
        check(keys, pickle.dumps(task), "a scan task")
    check(keys, pickle.dumps([manifests, entries]), "entries")
    with pytest.raises(TypeError):
        pickle.dumps(table)


def test_inspect(tmp_path: Path, kms: dict[str, str]) -> None:
    # PyIceberg's `entries` fails on deletion vectors, which have no sizes of columns.
    table, keys = used(sql_catalog(tmp_path, kms), vectors=False)
    names = [name for name in dir(table.inspect) if not name.startswith("_") and name != "tbl"]
    assert {"files", "manifests", "entries", "all_files", "metadata_log_entries"} <= set(names)
    for name in names:
        found = getattr(table.inspect, name)().to_pylist()
        check(keys, repr(found), name)


def test_storage_and_database(tmp_path: Path, kms: dict[str, str]) -> None:
    table, keys = used(sql_catalog(tmp_path, kms))
    assert ids(table)
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size:
            check(keys, path.read_bytes(), path)


@pytest.mark.more
def test_logs(tmp_path: Path, kms: dict[str, str], moto_s3: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    """Of all libraries, on S3, at the most talkative level."""
    pytest.importorskip("s3fs")
    caplog.set_level(logging.DEBUG)
    bucket = "canary-of-iceberg"
    moto_s3.client().create_bucket(Bucket=bucket)
    storage = {
        "s3.endpoint": moto_s3.url,
        "s3.access-key-id": moto_s3.key,
        "s3.secret-access-key": moto_s3.secret,
        "s3.region": "us-east-1",
        "py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO",
    }
    table, keys = used(sql_catalog(tmp_path, kms, warehouse=f"s3://{bucket}/wh", **storage))
    clear_cache()
    assert ids(open_table(table.metadata_location, kms=kms, **storage))
    said = "\n".join([caplog.text, *(repr(vars(record)) for record in caplog.records)])
    assert {"botocore", "s3fs"} <= {record.name.split(".")[0] for record in caplog.records}
    check(keys, said, "logs")


def test_services(tmp_path: Path, kms: dict[str, str], moto_s3: S3Server) -> None:
    """What Glue and DynamoDB have."""
    import boto3

    login = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    glue, dynamodb = (boto3.client(name, endpoint_url=moto_s3.url, **login) for name in ("glue", "dynamodb"))
    for kind, client in (("glue", glue), ("dynamodb", dynamodb)):
        catalog = load_catalog(
            "tests",
            kms=kms,
            type=kind,
            client=client,
            warehouse=f"file://{tmp_path}/{kind}",
            **{"table-name": "canary"},
        )
        catalog.create_namespace("canary")
        table = catalog.create_table("canary.t", schema=rows(0, 1).schema, properties={"encryption.key-id": "master"})
        table.append(rows(0, 10))
        rotate(table)
        if kind == "glue":
            found = [
                glue.get_tables(DatabaseName="canary"),
                glue.get_table_versions(DatabaseName="canary", TableName="t"),
            ]
        else:
            found = dynamodb.scan(TableName="canary")["Items"]
        assert table.metadata_location in repr(found)
        check(table_keys(table), repr(found), kind)
        catalog.drop_table("canary.t")


def flip(path: str, at: int) -> None:
    file = Path(path.removeprefix("file://"))
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_errors(tmp_path: Path, kms: dict[str, str]) -> None:
    """Of a table of which one file after another is changed, and of a KMS with other keys."""
    catalog = sql_catalog(tmp_path, kms)
    table, keys = used(catalog)
    said = []

    def collect(*actions: Any) -> None:
        for action in actions:
            clear_cache()
            try:
                action()
            except (AgsError, OSError, ValueError) as error:
                said.append("".join(traceback.format_exception(error)) + repr(error) + repr(vars(error)))
                causes = [error.__cause__, error.__context__]
                said.extend(repr(cause) + repr(getattr(cause, "args", "")) for cause in causes)

    def use() -> list[int]:
        return ids(sql_catalog(tmp_path, kms).load_table("ns.t"))

    for one in files(table):
        for at in (5, one.length // 2, one.length - 1):
            flip(one.path, at)
            collect(use)
            flip(one.path, at)
    assert len(said) >= 3 * len(list(files(table))) - 3
    other = tmp_path / "other"
    other.mkdir()
    wrong = make_kms(other, keys=MASTERS)
    collect(
        lambda: ids(sql_catalog(tmp_path, wrong).load_table("ns.t")),
        lambda: rotate(sql_catalog(tmp_path, wrong).load_table("ns.t")),
        lambda: sql_catalog(tmp_path, wrong).load_table("ns.t").append(rows(0, 1)),
        lambda: table.transaction().set_properties({"encryption.key-id": "third"}).commit_transaction(),
        lambda: table.add_files([f"file://{tmp_path}/none.parquet"]),
    )
    check(keys, "\n".join(said), "errors")
    assert use()


def test_files_that_the_process_writes(tmp_path: Path, kms: dict[str, str]) -> None:
    """Python opens only files of the table and the database to write, and leaves nothing in the temporary folder."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    said = run_python(program(print_written_files, tmp_path, kms), TMPDIR=str(temporary)).splitlines()
    assert said[-1] == "left: []"
    others = [path for path in said[:-1] if not path.startswith((str(tmp_path / "wh"), str(tmp_path / "catalog.db")))]
    # A manifest takes its name when it is whole. Before, its name is relative to the table's folder.
    others = [path for path in others if not re.fullmatch(r"\.[0-9a-f-]{36}-m0\.avro\.\.[0-9a-f]{16}\.agstmp", path)]
    assert [path for path in others if path and path != "/dev/null"] == []
