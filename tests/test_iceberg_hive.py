"""Encrypted tables in a real Hive metastore, and the hash of their metadata that Java wants there."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")
pytest.importorskip("thrift")

import iceberg_tables
import pyarrow as pa
from iceberg_tables import KEY_ID, MASTER, MIXED, ids, key_forms, new_table, rows
from pyiceberg.catalog.hive import HiveCatalog as VanillaCatalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.table.sorting import NullOrder, SortDirection, SortField, SortOrder
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform
from pyiceberg.types import LongType
from servers.hive import hive_metastore

from ags_fast.errors import IntegrityError, KeyAccessError, PolicyError
from ags_fast.iceberg import clear_cache, load_catalog, rotate, session
from ags_fast.iceberg.commit import edit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from iceberg_java import Judge
    from pyiceberg.catalog import Catalog

pytestmark = pytest.mark.more

HASH = "metadata_hash"


@pytest.fixture(scope="module")
def metastore(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with hive_metastore(tmp_path_factory.mktemp("hive")) as uri:
        yield uri


@pytest.fixture
def connect(metastore: str, tmp_path: Path, kms: dict[str, str]) -> Any:
    """Loads the catalog anew. Its namespace is this test's."""
    namespace = f"ns{int.from_bytes(hashlib.sha256(str(tmp_path).encode()).digest()[:6], 'big')}"

    def load() -> Catalog:
        catalog = load_catalog("tests", kms=kms, type="hive", uri=metastore, warehouse=f"file://{tmp_path}/wh", **MIXED)
        catalog.ns = namespace  # type: ignore[attr-defined]
        return catalog

    load().create_namespace(namespace)
    return load


def create(catalog: Any, **properties: str) -> Any:
    return new_table(catalog, namespace=catalog.ns, **properties)


def load(connect: Any) -> Any:
    catalog = connect()
    return catalog.load_table(f"{catalog.ns}.t")


def vanilla(metastore: str) -> Any:
    return VanillaCatalog("plain", uri=metastore)


def stored(metastore: str, connect: Any, name: str = "t") -> dict[str, str]:
    """The parameters that the metastore has."""
    with vanilla(metastore)._client as client:
        return client.get_table(dbname=connect().ns, tbl_name=name).parameters


def set_parameters(metastore: str, connect: Any, **parameters: str | None) -> None:
    namespace = connect().ns
    with vanilla(metastore)._client as client:
        table = client.get_table(dbname=namespace, tbl_name="t")
        for name, value in parameters.items():
            table.parameters.pop(name, None)
            if value is not None:
                table.parameters[name] = value
        client.alter_table(namespace, "t", table)


def path_of(location: str) -> Path:
    """The path of ``file:/x`` and ``file:///x``: Hive's locations have one slash."""
    return Path(urlsplit(location).path)


def file_hash(location: str) -> str:
    return base64.b64encode(hashlib.sha256(path_of(location).read_bytes()).digest()).decode()


def rewrite(location: str, change: Any) -> None:
    path = path_of(location)
    path.write_text(json.dumps(change(json.loads(path.read_text())), separators=(",", ":")))


def test_everyday_use(metastore: str, connect: Any) -> None:
    table = create(connect(), **{"encryption.data-key-length": "32"})
    assert stored(metastore, connect)[HASH] == file_hash(table.metadata_location)
    table.append(rows(0, 10))
    table.append(rows(10, 12))
    table.delete("id < 3")
    other = load(connect)
    assert ids(other) == list(range(3, 12))
    found = stored(metastore, connect)
    assert found[HASH] == file_hash(other.metadata_location)
    assert (found[KEY_ID], found["encryption.data-key-length"]) == (MASTER, "32")
    with table.update_schema() as schema:
        schema.add_column("more", iceberg_tables.LONG)
    assert stored(metastore, connect)[HASH] == file_hash(load(connect).metadata_location)


def test_create_table_transaction(metastore: str, connect: Any) -> None:
    catalog = connect()
    with catalog.create_table_transaction(
        f"{catalog.ns}.t", schema=iceberg_tables.SCHEMA, properties={KEY_ID: MASTER}
    ) as transaction:
        transaction.append(rows(0, 3))
    table = load(connect)
    assert ids(table) == [0, 1, 2]
    assert stored(metastore, connect)[HASH] == file_hash(table.metadata_location)


def test_an_edit_and_a_rotation_keep_the_parameters_right(metastore: str, connect: Any) -> None:
    table = create(connect())
    table.append(rows(0, 3))
    edit(table, lambda raw: {**raw, "properties": {**raw["properties"], "comment": "x"}})
    rotate(table, what="kek", wrapping_key_id="other").raise_for_failures()
    found = stored(metastore, connect)
    assert (found[KEY_ID], found["comment"]) == ("other", "x")
    assert not any("ags_fast" in name for name in found)
    assert found[HASH] == file_hash(table.metadata_location)
    table.append(rows(3, 4))
    assert ids(load(connect)) == [0, 1, 2, 3]
    assert not any(form in json.dumps(found) for form in key_forms(table))


def test_changed_metadata_are_refused(connect: Any) -> None:
    table = create(connect())
    table.append(rows(0, 3))
    rewrite(table.metadata_location, lambda raw: {**raw, "last-updated-ms": raw["last-updated-ms"] + 1})
    with pytest.raises(IntegrityError, match="was changed: the catalog's metadata_hash"):
        load(connect)
    with pytest.raises(IntegrityError):
        table.append(rows(3, 6))
    clear_cache()
    with pytest.raises(IntegrityError):
        table.refresh()


def test_an_older_metadata_file_in_its_place_is_refused(connect: Any) -> None:
    table = create(connect())
    table.append(rows(0, 3))
    older = path_of(table.metadata_location).read_bytes()
    table.append(rows(3, 6))
    path_of(table.metadata_location).write_bytes(older)
    with pytest.raises(IntegrityError):
        load(connect)


def test_a_stale_hash_is_refused_and_no_hash_is_not(metastore: str, connect: Any) -> None:
    table = create(connect())
    table.append(rows(0, 3))
    right = stored(metastore, connect)[HASH]
    set_parameters(metastore, connect, **{HASH: base64.b64encode(bytes(32)).decode()})
    with pytest.raises(IntegrityError):
        load(connect)
    set_parameters(metastore, connect, **{HASH: None})
    assert ids(load(connect)) == [0, 1, 2]
    load(connect).append(rows(3, 4))
    assert stored(metastore, connect)[HASH] not in (right, None)


@pytest.mark.parametrize("parameters", [{KEY_ID: "other"}, {"encryption.data-key-length": "32"}])
def test_other_encryption_in_the_metastore_is_refused(metastore: str, connect: Any, parameters: dict[str, str]) -> None:
    create(connect()).append(rows(0, 3))
    set_parameters(metastore, connect, **{HASH: None}, **parameters)
    with pytest.raises(IntegrityError, match="the catalog has encryption"):
        load(connect)


def test_metadata_of_a_plaintext_table_in_its_place_are_refused(
    metastore: str, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = create(connect())

    def plain(raw: dict[str, Any]) -> dict[str, Any]:
        return {**raw, "properties": {}, "encryption-keys": []}

    rewrite(table.metadata_location, plain)
    set_parameters(metastore, connect, **{HASH: None})
    with pytest.raises(IntegrityError, match="this process has seen the table encrypted"):
        load(connect)
    monkeypatch.setattr(session, "_encrypted", {})  # as in a new process
    with pytest.raises(IntegrityError, match="the metadata have None"):
        load(connect)


def test_fields_that_java_does_not_write_take_the_hash_away(metastore: str, connect: Any) -> None:
    table = create(connect())
    table.append(rows(0, 3))
    edit(table, lambda raw: {**raw, "new-field": 1})
    assert HASH not in stored(metastore, connect)
    assert ids(load(connect)) == [0, 1, 2]


def test_registered_and_renamed_tables(metastore: str, connect: Any) -> None:
    catalog = connect()
    table = create(catalog)
    table.append(rows(0, 3))
    right = stored(metastore, connect)
    catalog.drop_table(f"{catalog.ns}.t")
    connect().register_table(f"{catalog.ns}.t", table.metadata_location)
    found = stored(metastore, connect)
    assert (found[HASH], found[KEY_ID]) == (right[HASH], MASTER)
    connect().rename_table(f"{catalog.ns}.t", f"{catalog.ns}.u")
    assert stored(metastore, connect, "u")[HASH] == right[HASH]
    renamed = connect().load_table(f"{catalog.ns}.u")
    renamed.append(rows(3, 4))
    assert ids(connect().load_table(f"{catalog.ns}.u")) == [0, 1, 2, 3]


def test_a_vanilla_catalog_loses_nothing(metastore: str, connect: Any) -> None:
    table = create(connect())
    table.append(rows(0, 3))
    before = stored(metastore, connect)
    for more in ({}, {"py-io-impl": "ags_fast.iceberg.FileIO"}):
        catalog = VanillaCatalog("plain", uri=metastore, **more)
        with pytest.raises((NotImplementedError, ValueError, PolicyError, KeyAccessError)):
            catalog.load_table(f"{connect().ns}.t").append(rows(3, 4))
    assert stored(metastore, connect) == before
    assert ids(load(connect)) == [0, 1, 2]


def test_plaintext_tables_have_no_hash(metastore: str, connect: Any) -> None:
    catalog = connect()
    table = catalog.create_table(f"{catalog.ns}.t", schema=iceberg_tables.SCHEMA)
    table.append(rows(0, 3))
    assert ids(load(connect)) == [0, 1, 2]
    assert HASH not in stored(metastore, connect)


def test_purge_deletes_all_files(connect: Any) -> None:
    catalog = connect()
    table = create(catalog)
    table.append(rows(0, 3))
    folder = path_of(table.location())
    assert any(path.suffix == ".parquet" for path in folder.rglob("*"))
    catalog.purge_table(f"{catalog.ns}.t")
    assert [path for path in folder.rglob("*") if path.is_file()] == []


# ------------------------------------------------------------------------------------------- with Java on one metastore

NESTED = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string(), metadata={"doc": "wie heißt es?"}),
        ("amount", pa.decimal128(9, 2)),
        ("at", pa.timestamp("us", tz="UTC")),
        ("tags", pa.list_(pa.string())),
        ("parts", pa.map_(pa.string(), pa.int32())),
        ("place", pa.struct([("x", pa.float64()), ("y", pa.list_(pa.struct([("z", pa.date32())])))])),
        ("key", pa.binary(4)),
    ]
)


def nested(first: int, last: int) -> pa.Table:
    values = [
        {
            "id": i,
            "name": f"name {i} \u00fc\u2028",
            "amount": Decimal(i),
            "at": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
            "tags": ["a"],
            "parts": [("p", i)],
            "place": {"x": 1.5, "y": [{"z": dt.date(2026, 1, 2)}]},
            "key": b"abcd",
        }
        for i in range(first, last)
    ]
    return pa.Table.from_pylist(values, schema=NESTED)


def test_java_takes_the_hash_of_python_and_python_that_of_java(judge: Judge) -> None:
    """Each of them commits to what the other wrote; Java refuses a hash that is not its own."""
    name = judge.name()
    catalog: Any = load_catalog("tests", kms=judge.kms, type="hive", uri=judge.hive_uri)
    found = Schema(*assign_fresh_schema_ids(catalog._convert_schema_if_needed(NESTED)).fields, identifier_field_ids=[1])
    table = catalog.create_table(
        name,
        schema=found,
        partition_spec=PartitionSpec(
            PartitionField(1, 1000, BucketTransform(4), "id_bucket"), PartitionField(4, 1001, DayTransform(), "at_day")
        ),
        sort_order=SortOrder(SortField(1, IdentityTransform(), SortDirection.DESC, NullOrder.NULLS_LAST)),
        properties={KEY_ID: MASTER, "encryption.data-key-length": "24", "comment": 'a "quoted" \\ text, \t /ü'},
    )
    assert judge.rows(name) == []
    table.append(nested(0, 3))
    assert len(judge.rows(name)) == 3
    judge.sql(f"INSERT INTO {name} SELECT * FROM {name} WHERE id = 1")
    table.refresh()
    assert ids(table) == [0, 1, 1, 2]
    with table.manage_snapshots() as manage:
        manage.create_tag(table.current_snapshot().snapshot_id, "one", max_ref_age_ms=10**12)
        manage.create_branch(table.current_snapshot().snapshot_id, "dev", min_snapshots_to_keep=3)
    with table.update_schema() as schema:
        schema.add_column("more", LongType(), doc="later")
        schema.delete_column("tags")
    with table.update_spec() as spec:
        spec.remove_field("at_day")
    table.overwrite(table.scan().to_arrow().slice(0, 2).cast(table.schema().as_arrow()), overwrite_filter="id = 1")
    before = sorted(ids(table))
    assert sorted(row[0] for row in judge.rows(name)) == before
    rotate(table, what="kek").raise_for_failures()
    assert len(judge.rows(name)) == len(before)
    judge.sql(f"DELETE FROM {name} WHERE id = 2")
    judge.sql(f"INSERT INTO {name} SELECT * FROM {name} WHERE id = 0")
    table.refresh()
    assert sorted(ids(table)) == sorted(row[0] for row in judge.rows(name))
    assert table.metadata.table_uuid is not None
    table.append(table.scan(row_filter="id = 0").to_arrow())
    with catalog._client as client:
        parameters = client.get_table(*name.split(".")).parameters
    assert parameters[HASH] == file_hash(table.metadata_location)
    assert sorted(row[0] for row in judge.rows(name)) == sorted(ids(table))
