"""Encrypted tables in the Glue and DynamoDB catalogs, and on S3: on moto's server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")
pytest.importorskip("moto.server")

import iceberg_tables
import pyarrow as pa
from iceberg_tables import KEY_ID, MASTER, MIXED, ids, key_forms, new_table, rows
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError

from ags_fast.errors import IntegrityError, PolicyError
from ags_fast.iceberg import clear_cache, delete, encrypt, expire, files, load_catalog, rekey, rotate, session, verify
from ags_fast.iceberg.commit import edit, raw_metadata
from ags_fast.jobs import LocalEngine

if TYPE_CHECKING:
    from pathlib import Path

    from pyiceberg.catalog import Catalog
    from servers import S3Server

pytestmark = pytest.mark.more  # a moto server and many requests

REGION = "us-east-1"


def boto(server: S3Server, service: str) -> Any:
    import boto3

    return boto3.client(
        service,
        endpoint_url=server.url,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        region_name=REGION,
    )


@pytest.fixture(params=["glue", "dynamodb"])
def connect(request: pytest.FixtureRequest, tmp_path: Path, kms: dict[str, str], moto_s3: S3Server) -> Any:
    """Loads the catalog of this test anew, with properties of its own."""
    kind = request.param
    properties: dict[str, Any] = {"type": kind, "warehouse": f"file://{tmp_path}/wh", "client": boto(moto_s3, kind)}
    if kind == "dynamodb":
        properties["table-name"] = tmp_path.name

    def load(**more: Any) -> Catalog:
        return load_catalog("tests", kms=kms, **properties | MIXED | more)

    load().create_namespace("ns")
    yield load
    for table in load().list_tables("ns"):
        load().drop_table(table)
    load().drop_namespace("ns")


def stored(catalog: Any) -> Any:
    """What the service has of the table ``ns.t``."""
    if hasattr(catalog, "glue"):
        return catalog.glue.get_table(DatabaseName="ns", Name="t")["Table"]["Parameters"]
    found = catalog.dynamodb.get_item(
        TableName=catalog.dynamodb_table_name, Key={"identifier": {"S": "ns.t"}, "namespace": {"S": "ns"}}
    )["Item"]
    return {name.removeprefix("p."): value["S"] for name, value in found.items() if name.startswith("p.")}


def test_everyday_use(connect: Any) -> None:
    table = new_table(connect())
    table.append(rows(0, 10))
    table.append(rows(10, 12))
    table.delete("id < 3")
    other = connect().load_table("ns.t")
    assert ids(other) == list(range(3, 12))
    assert raw_metadata(other)["format-version"] == 3
    with table.update_schema() as schema:
        schema.add_column("more", iceberg_tables.LONG)
    assert connect().load_table("ns.t").schema().column_names == ["id", "name", "more"]


def test_create_table_transaction(connect: Any) -> None:
    with connect().create_table_transaction(
        "ns.t", schema=iceberg_tables.SCHEMA, properties={KEY_ID: MASTER}
    ) as transaction:
        transaction.append(rows(0, 3))
    table = connect().load_table("ns.t")
    assert ids(table) == [0, 1, 2]
    raw = raw_metadata(table)
    assert (raw["format-version"], len(raw["encryption-keys"]), raw["next-row-id"]) == (3, 2, 3)


def test_a_commit_that_comes_second_fails_and_is_retried(connect: Any) -> None:
    table = new_table(connect(), **{"commit.retry.num-retries": "0"})
    first, second = (connect().load_table("ns.t") for _ in range(2))
    first.append(rows(0, 3))
    with pytest.raises(CommitFailedException):
        second.append(rows(3, 6))
    second.refresh().append(rows(6, 9))
    assert ids(table.refresh()) == [0, 1, 2, 6, 7, 8]


def test_the_service_has_the_properties_and_no_keys(connect: Any) -> None:
    catalog = connect()
    table = new_table(catalog)
    table.append(rows(0, 3))
    edit(table, lambda raw: {**raw, "properties": {**raw["properties"], "comment": "x"}})
    rotate(table, what="kek", wrapping_key_id="other").raise_for_failures()
    found = stored(catalog)
    assert (found[KEY_ID], found["comment"]) == ("other", "x")
    assert not any("ags_fast" in name for name in found)
    table.append(rows(3, 4))
    assert ids(connect().load_table("ns.t")) == [0, 1, 2, 3]
    text = json.dumps(found)
    assert not any(form in text for form in key_forms(table))


def test_metadata_of_a_plaintext_table_in_its_place_are_refused(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = connect()
    table = new_table(catalog)
    table.append(rows(0, 3))
    path = table.metadata_location.removeprefix("file://")
    with open(path) as file:
        raw = json.load(file)
    for name in ("encryption-keys", "snapshots", "refs", "snapshot-log", "current-snapshot-id"):
        raw.pop(name)
    raw["properties"] = {}
    with open(path, "w") as file:
        json.dump(raw, file)
    with pytest.raises(IntegrityError, match="this process has seen the table encrypted"):
        connect().load_table("ns.t")
    monkeypatch.setattr(session, "_encrypted", {})  # as in a new process
    with pytest.raises(IntegrityError, match=r"was changed: the catalog has encryption\.key-id=master"):
        connect().load_table("ns.t")
    with pytest.raises(IntegrityError):
        table.append(rows(3, 6))


def test_registered_tables(connect: Any) -> None:
    catalog = connect()
    table = new_table(catalog)
    table.append(rows(0, 3))
    catalog.drop_table("ns.t")
    if hasattr(catalog, "dynamodb"):
        with pytest.raises(NotImplementedError):
            catalog.register_table("ns.t", table.metadata_location)
        return
    again = catalog.register_table("ns.t", table.metadata_location)
    assert stored(catalog)[KEY_ID] == MASTER
    again.append(rows(3, 4))
    assert ids(connect().load_table("ns.t")) == [0, 1, 2, 3]


def test_renamed_tables(connect: Any) -> None:
    catalog = connect()
    new_table(catalog).append(rows(0, 3))
    table = catalog.rename_table("ns.t", "ns.u")
    table.append(rows(3, 4))
    assert ids(connect().load_table("ns.u")) == [0, 1, 2, 3]


def test_purge_deletes_all_files(connect: Any, tmp_path: Path) -> None:
    catalog = connect()
    table = new_table(catalog)
    table.append(rows(0, 10))
    table.delete("id = 3")
    connect().purge_table("ns.t")
    assert [path for path in (tmp_path / "wh").rglob("*") if path.is_file()] == []
    with pytest.raises(NoSuchTableError):
        catalog.load_table("ns.t")


def test_where_other_tables_are(connect: Any, tmp_path: Path) -> None:
    """The service says it, and no metadata are read: also not those that this client would refuse."""
    catalog = connect()
    new_table(catalog)
    other = catalog.create_table("ns.u", schema=iceberg_tables.SCHEMA)
    broken = catalog.create_table("ns.v", schema=iceberg_tables.SCHEMA)
    with open(broken.metadata_location.removeprefix("file://"), "wb") as file:
        file.write(b"no JSON")
    # Other tests' tables are on this server, too, in namespaces of their own.
    found = {name: place for name, place in connect().other_tables(("ns", "t")) if name.startswith("ns.")}
    assert found == {"ns.u": other.metadata_location, "ns.v": broken.metadata_location}


def test_plaintext_tables(connect: Any) -> None:
    catalog = connect()
    table = catalog.create_table("ns.t", schema=iceberg_tables.SCHEMA)
    table.append(rows(0, 3))
    assert ids(connect().load_table("ns.t")) == [0, 1, 2]
    catalog.purge_table("ns.t")


# ----------------------------------------------------------------------------------------------------------------- S3

IO_IMPLS = ("pyiceberg.io.pyarrow.PyArrowFileIO", "pyiceberg.io.fsspec.FsspecFileIO", None)


@pytest.fixture
def s3(tmp_path: Path, moto_s3: S3Server) -> tuple[str, dict[str, str]]:
    """A bucket of this test, and PyIceberg's properties for it."""
    bucket = f"b{abs(hash(str(tmp_path)))}"
    moto_s3.client().create_bucket(Bucket=bucket)
    return bucket, {
        "s3.endpoint": moto_s3.url,
        "s3.access-key-id": moto_s3.key,
        "s3.secret-access-key": moto_s3.secret,
        "s3.region": REGION,
    }


def s3_objects(server: S3Server, bucket: str) -> dict[str, bytes]:
    client = server.client()
    found = client.list_objects_v2(Bucket=bucket).get("Contents", [])
    return {  # without the folders that PyArrow makes when it deletes files
        one["Key"]: client.get_object(Bucket=bucket, Key=one["Key"])["Body"].read()
        for one in found
        if not one["Key"].endswith("/")
    }


@pytest.mark.parametrize("io_impl", IO_IMPLS)
def test_on_s3(
    tmp_path: Path, kms: dict[str, str], moto_s3: S3Server, s3: tuple[str, dict[str, str]], io_impl: str | None
) -> None:
    bucket, properties = s3
    if io_impl is not None:
        properties |= {"py-io-impl": io_impl}
    catalog = iceberg_tables.sql_catalog(tmp_path, kms, warehouse=f"s3://{bucket}/wh", **MIXED, **properties)
    table = new_table(catalog)
    table.append(rows(0, 1000))
    table.append(rows(1000, 1003))
    table.delete("id < 7")
    assert ids(table) == list(range(7, 1003))
    if io_impl is not None:
        assert type(table.io.inner(table.location())).__name__ == io_impl.rsplit(".", 1)[1]
    again = iceberg_tables.sql_catalog(tmp_path, kms, warehouse=f"s3://{bucket}/wh", **MIXED, **properties).load_table(
        "ns.t"
    )
    assert ids(again, row_filter="id > 1000", selected_fields=("id",)) == [1001, 1002]
    kept = s3_objects(moto_s3, bucket)
    assert {path.rsplit(".", 1)[1]: data[:4] for path, data in kept.items()} == {
        "parquet": b"PARE",
        "avro": b"AGS1",
        "puffin": b"AGS1",
        "json": b'{"fo',
    }
    assert not any(b"name 42" in data for data in kept.values())
    catalog.purge_table("ns.t")
    assert s3_objects(moto_s3, bucket) == {}


@pytest.mark.parametrize("engine", [LocalEngine(0), LocalEngine(2)], ids=["here", "local"])
@pytest.mark.parametrize("io_impl", IO_IMPLS[:2], ids=["pyarrow", "fsspec"])
def test_files_move_on_s3(
    tmp_path: Path,
    kms: dict[str, str],
    moto_s3: S3Server,
    s3: tuple[str, dict[str, str]],
    io_impl: str,
    engine: LocalEngine,
) -> None:
    """encrypt, rekey, verify with orphans, and expire."""
    bucket, properties = s3
    properties |= {"py-io-impl": io_impl, "encryption.plaintext-files": "allow", **MIXED}
    catalog = iceberg_tables.sql_catalog(tmp_path, kms, warehouse=f"s3://{bucket}/wh", **properties)
    table: Any = catalog.create_table("ns.t", schema=iceberg_tables.SCHEMA)
    for first in (0, 100, 200):
        table.append(rows(first, first + 100))
    encrypt(table, wrapping_key_id=MASTER, engine=engine).raise_for_failures()
    assert ids(table) == list(range(300))
    delete(table, "id = 7 or id = 150")
    left = [i for i in range(300) if i not in (7, 150)]
    before = {one.path for one in files(table)}
    done = rekey(table, what="data", engine=engine)
    done.raise_for_failures()
    assert done.counts["ok"] == 4
    assert not before & {one.path for one in files(table)}
    assert not [name for name in s3_objects(moto_s3, bucket) if name.endswith(".plan")]
    expire(table, engine=engine).raise_for_failures()
    clear_cache()
    again = iceberg_tables.sql_catalog(tmp_path, kms, warehouse=f"s3://{bucket}/wh", **properties).load_table("ns.t")
    assert ids(again) == left
    kept = s3_objects(moto_s3, bucket)
    assert {path.rsplit(".", 1)[1]: data[:4] for path, data in kept.items()} == {
        "parquet": b"PARE",
        "avro": b"AGS1",
        "puffin": b"AGS1",
        "json": b'{"fo',
    }
    checked = verify(again, orphans=True, engine=engine)
    assert (checked.failed, checked.counts["skipped"]) == ([], 0)
    folder = again.location().partition(f"{bucket}/")[2]
    orphans = {f"{folder}/data/a b/c=1/left.parquet": b"PAR1plaintext", f"{folder}/data/old.puffin": b"AGS1...."}
    for name, data in orphans.items():
        moto_s3.client().put_object(Bucket=bucket, Key=name, Body=data)
    moto_s3.client().put_object(Bucket=bucket, Key=f"{folder}-of-another/data/x.parquet", Body=b"PAR1")
    checked = verify(again, orphans=True)
    found = {row.src: (row.status, row.error_class) for row in checked.rows if row.status != "ok"}
    assert found == {
        f"s3://{bucket}/{name}": ("failed", "PolicyError") if data[:4] == b"PAR1" else ("skipped", "Orphan")
        for name, data in orphans.items()
    }


@pytest.mark.parametrize("name", ["py-io-impl", "ags_fast.io-impl", "ags_fast.session", "s3.endpoint"])
def test_a_table_never_chooses_how_files_are_opened(tmp_path: Path, kms: dict[str, str], name: str) -> None:
    catalog = iceberg_tables.sql_catalog(tmp_path, kms, **{"py-io-impl": IO_IMPLS[1]})
    table = new_table(catalog)
    table.append(rows(0, 3))
    with pytest.raises(PolicyError, match="names"):
        table.transaction().set_properties({name: str(IO_IMPLS[0])}).commit_transaction()
    path = table.metadata_location.removeprefix("file://")
    with open(path) as file:
        raw = json.load(file)
    raw["properties"][name] = IO_IMPLS[0]
    with open(path, "w") as file:
        json.dump(raw, file)
    with pytest.raises(PolicyError, match="names"):
        catalog.load_table("ns.t")


def chunk_bytes(server: S3Server, bucket: str, location: str, table: Any) -> int:
    """The bytes of the second column's encrypted chunks, by the footer as pyarrow reads it."""
    import pyarrow.parquet as pq
    import pyarrow.parquet.encryption as pe

    key = next(one.key_metadata for one in files(table) if one.path == location)
    assert key is not None
    data = server.client().get_object(Bucket=bucket, Key=location.partition(bucket + "/")[2])["Body"].read()
    opened = pe.create_decryption_properties(key.encryption_key, aad_prefix=key.aad_prefix)
    footer = pq.ParquetFile(pa.BufferReader(data), decryption_properties=opened).metadata
    groups = range(footer.num_row_groups)
    return sum(footer.row_group(group).column(1).total_compressed_size for group in groups)


@pytest.mark.parametrize("io_impl", IO_IMPLS[:2])
def test_one_column_reads_little_more_than_its_bytes(
    tmp_path: Path, kms: dict[str, str], moto_s3: S3Server, s3: tuple[str, dict[str, str]], io_impl: str
) -> None:
    bucket, properties = s3
    catalog = iceberg_tables.sql_catalog(
        tmp_path, kms, warehouse=f"s3://{bucket}/wh", **properties, **{"py-io-impl": io_impl}
    )
    n = 400_000
    wide = pa.table({f"c{i}": pa.array([j * 7919 * (i + 1) for j in range(n)], pa.int64()) for i in range(6)})
    table = new_table(catalog, schema=wide.schema, **{"write.parquet.row-group-limit": "100000"})
    table.append(wide)
    (task,) = table.scan().plan_files()
    own = chunk_bytes(moto_s3, bucket, task.file.file_path, table)
    with iceberg_tables.S3Proxy(moto_s3.url) as proxy:
        catalog = iceberg_tables.sql_catalog(
            tmp_path,
            kms,
            warehouse=f"s3://{bucket}/wh",
            **properties | {"s3.endpoint": proxy.url, "py-io-impl": io_impl},
        )
        read = catalog.load_table("ns.t").scan(selected_fields=("c1",)).to_arrow()
        assert read["c1"].to_pylist()[:3] == [0, 2 * 7919, 4 * 7919]
        nbytes, requests = proxy.counts(".parquet")
    assert own < task.file.file_size_in_bytes / 4
    assert nbytes <= own + (64 << 10)
    assert requests <= 2 + 4  # the footer, the magic, and a chunk of each row group
