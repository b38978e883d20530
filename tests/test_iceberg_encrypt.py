"""Tables in plaintext that become encrypted ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
from iceberg_tables import MASTER, MIXED, SCHEMA, ids, rows, sql_catalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType
from test_iceberg_rekey import live

from ags_fast import KeyAccessError, PolicyError
from ags_fast.iceberg import clear_cache, delete, encrypt, expire, files, open_table, policy, rekey, verify
from ags_fast.iceberg.commit import raw_metadata
from ags_fast.iceberg.container import read_container, write_container
from ags_fast.jobs import LocalEngine

if TYPE_CHECKING:
    pass

HERE = LocalEngine(0)


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Any:
    return sql_catalog(tmp_path, kms, **MIXED)


def plain_table(catalog: Any, version: int) -> Any:
    table = catalog.create_table("ns.t", schema=SCHEMA, properties={"format-version": str(version)})
    for first in (0, 10, 20):
        table.append(rows(first, first + 10))
    return table


def heads(folder: Path) -> dict[str, bytes]:
    """How each file that is not JSON begins."""
    found = {}
    for path in (folder / "wh").rglob("*"):
        if path.is_file() and path.suffix != ".json":
            with path.open("rb") as file:
                found[str(path)] = file.read(4)
    return found


@pytest.mark.more
@pytest.mark.parametrize("engine", [HERE, LocalEngine(2)], ids=["here", "local"])
@pytest.mark.parametrize("version", [1, 2])
def test_versions(tmp_path: Path, catalog: Any, kms: dict[str, str], version: int, engine: LocalEngine) -> None:
    table = plain_table(catalog, version)
    old = [one.snapshot_id for one in table.metadata.snapshots]
    totals = dict(table.current_snapshot().summary.additional_properties)
    before, sequence = set(heads(tmp_path)), [one.sequence_number for one in table.metadata.snapshots]
    result = encrypt(table, wrapping_key_id=MASTER, data_key_length=32, engine=engine)
    result.raise_for_failures()
    assert result.counts["ok"] == 3
    assert all(str(one) in result.warnings[0] for one in old)
    raw = raw_metadata(table)
    assert (raw["format-version"], raw["next-row-id"]) == (3, 30)
    assert raw["properties"]["encryption.key-id"] == MASTER
    assert {head for path, head in heads(tmp_path).items() if path not in before} == {b"PARE", b"AGS1"}
    assert {len(one.key_metadata.encryption_key) for one in files(table) if one.key_metadata} == {32}
    assert sorted(one.sequence_number or 0 for one in live(table)) == (sequence if version == 2 else [0, 0, 0])
    assert sorted(one.first_row_id or 0 for one in live(table)) == [0, 10, 20]
    now = dict(table.current_snapshot().summary.additional_properties)
    for name in ("total-records", "total-data-files", "total-delete-files"):
        assert now[name] == totals[name]
    assert ids(table) == list(range(30))
    allows = sql_catalog(tmp_path, kms, **{"encryption.plaintext-files": "allow"}).load_table("ns.t")
    for i, snapshot in enumerate(old):
        assert ids(allows, snapshot_id=snapshot) == list(range(10 * i + 10))
        with pytest.raises(PolicyError, match="your own configuration"):
            table.scan(snapshot_id=snapshot).to_arrow()
    unsealed = len(raw_metadata(table)["metadata-log"])  # metadata files of the table in plaintext
    assert verify(table, engine=engine).counts == {"ok": 8, "skipped": 3 + 3 + 3 + unsealed, "failed": 0}
    clear_cache()
    again = sql_catalog(tmp_path, kms).load_table("ns.t")
    assert ids(again) == list(range(30))
    again.append(rows(30, 40))
    delete(again, "id = 35 or id = 5")
    rekey(again, what="data", engine=HERE)
    kept = [i for i in range(40) if i not in (5, 35)]
    assert ids(again) == kept
    again = sql_catalog(tmp_path, kms, **{"encryption.plaintext-files": "allow"}).load_table("ns.t")
    expire(again)
    assert {name for name in raw_metadata(again)["properties"] if "plaintext" in name} == set()
    assert set(heads(tmp_path).values()) == {b"PARE", b"AGS1"}
    clear_cache()
    assert ids(open_table(again.metadata_location, kms=kms)) == kept
    with pytest.raises(PolicyError, match="already"):
        encrypt(again, wrapping_key_id=MASTER, engine=HERE)


def add_deletes(catalog: Any, table: Any, folder: Path, deleted: dict[str, list[int]], format: str) -> Any:
    """Register a copy of a table of version 2 with a file of position deletes, which PyIceberg does not write."""
    pairs = [(name, pos) for name, positions in deleted.items() for pos in positions]
    path = folder / f"deletes.{format.lower()}"
    if format == "PARQUET":
        pq.write_table(pa.table({"file_path": [a for a, _ in pairs], "pos": [b for _, b in pairs]}), path)
    else:
        fields = [{"name": "file_path", "type": "string"}, {"name": "pos", "type": "long"}]
        with path.open("wb") as out:
            records = [{"file_path": a, "pos": b} for a, b in pairs]
            fastavro.writer(out, {"type": "record", "name": "r", "fields": fields}, records)
    raw = json.loads(local(table.metadata_location).read_bytes())
    head = dict(raw["snapshots"][-1])
    listed = read_container(local(head["manifest-list"]).read_bytes())
    records = list(listed.records())
    manifest = read_container(local(str(records[0]["manifest_path"])).read_bytes())
    entry = next(manifest.records())
    number = raw["last-sequence-number"] + 1
    entry |= {"status": 1, "snapshot_id": 77, "sequence_number": number, "file_sequence_number": number}
    entry["data_file"] |= {"content": 1, "file_path": f"file://{path}", "file_format": format}
    entry["data_file"] |= {"record_count": len(pairs), "file_size_in_bytes": path.stat().st_size}
    names = [name for name in entry["data_file"] if name.endswith(("_bounds", "_counts", "_sizes"))]
    entry["data_file"] |= dict.fromkeys(names)
    data = write_container(manifest.schema, {**manifest.meta, "content": b"deletes"}, [entry])
    (folder / "deletes-m0.avro").write_bytes(data)
    record = {**records[0], "manifest_path": f"file://{folder}/deletes-m0.avro", "manifest_length": len(data)}
    record |= {"content": 1, "sequence_number": number, "min_sequence_number": number, "added_snapshot_id": 77}
    record |= {"added_rows_count": len(pairs), "added_files_count": 1}
    (folder / "list.avro").write_bytes(write_container(listed.schema, listed.meta, [*records, record]))
    head |= {"snapshot-id": 77, "sequence-number": number, "manifest-list": f"file://{folder}/list.avro"}
    head["summary"] |= {"operation": "delete", "total-delete-files": "1", "total-position-deletes": str(len(pairs))}
    raw |= {"last-sequence-number": number, "current-snapshot-id": 77, "snapshots": [*raw["snapshots"], head]}
    raw["refs"]["main"]["snapshot-id"] = 77
    (folder / "deleted.metadata.json").write_text(json.dumps(raw))
    return catalog.register_table("ns.deleted", f"file://{folder}/deleted.metadata.json")


def local(location: str) -> Path:
    return Path(location.removeprefix("file://"))


@pytest.mark.parametrize("format", ["PARQUET", "AVRO"])
def test_position_deletes_become_vectors(tmp_path: Path, catalog: Any, format: str) -> None:
    plain = plain_table(catalog, 2)
    paths = [task.file.file_path for task in plain.scan().plan_files()]
    gone = {paths[0]: [0, 9], paths[2]: [4], "file:///no/such/file": [1]}
    table = add_deletes(catalog, plain, tmp_path, gone, format)
    left = set(ids(plain)) - {
        plain.scan().to_arrow()["id"].to_pylist()[10 * i + at] for i in (0, 2) for at in gone[paths[i]]
    }
    table.append(rows(30, 32))
    left |= {30, 31}
    if format == "PARQUET":
        assert ids(table) == sorted(left)
    encrypt(table, wrapping_key_id=MASTER, engine=HERE).raise_for_failures()
    assert ids(table) == sorted(left)
    vectors = [one for one in live(table) if one.content == 1]
    assert {one.format for one in vectors} == {"PUFFIN"}
    assert sorted(one.record_count for one in vectors) == [1, 2]
    summary = table.current_snapshot().summary
    assert (summary["total-delete-files"], summary["total-position-deletes"]) == ("2", "3")
    rekey(table, what="data", engine=HERE).raise_for_failures()
    delete(table, "id = 30")
    assert ids(table) == sorted(left - {30})


def test_an_empty_table(catalog: Any) -> None:
    table = catalog.create_table("ns.t", schema=SCHEMA)
    assert encrypt(table, wrapping_key_id=MASTER, engine=HERE).rows == []
    assert "plaintext" not in str(table.metadata.properties)
    table.append(rows(0, 3))
    assert {one.key_metadata is not None for one in files(table)} == {True}
    assert ids(table) == [0, 1, 2]


def test_partitions(catalog: Any) -> None:
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "name"))
    for version in ("1", "2"):
        table = catalog.create_table(
            f"ns.p{version}", schema, partition_spec=spec, properties={"format-version": version}
        )
        table.append(rows(0, 6))
        table.append(rows(3, 8))
        encrypt(table, wrapping_key_id=MASTER, engine=HERE).raise_for_failures()
        assert ids(table) == sorted([*range(6), *range(3, 8)])
        assert ids(table, row_filter="name = 'name 4'") == [4, 4]
        assert len(list(table.scan(row_filter="name = 'name 4'").plan_files())) == 2
        delete(table, "name = 'name 3'")
        table.append(rows(20, 22))
        assert ids(table) == [0, 1, 2, 4, 4, 5, 5, 6, 7, 20, 21]


def test_version_3(tmp_path: Path, catalog: Any, kms: dict[str, str]) -> None:
    """PyIceberg writes none, so this is one of version 2 whose metadata say 3, as after an upgrade by Java."""
    table = plain_table(catalog, 2)
    raw = json.loads(Path(table.metadata_location.removeprefix("file://")).read_bytes())
    raw |= {"format-version": 3, "next-row-id": 500}
    other = tmp_path / "v3.metadata.json"
    other.write_text(json.dumps(raw))
    old = catalog.register_table("ns.v3", f"file://{other}")
    assert old.format_version == 3
    encrypt(old, wrapping_key_id=MASTER, engine=HERE).raise_for_failures()
    raw = raw_metadata(old)
    assert raw["next-row-id"] == 530
    assert sorted(one.first_row_id or 0 for one in live(old)) == [500, 510, 520]
    assert ids(old) == list(range(30))


def test_what_is_refused(tmp_path: Path, catalog: Any) -> None:
    """Before anything is written."""
    table = plain_table(catalog, 2)
    paths = [task.file.file_path for task in table.scan().plan_files()]
    orc = add_deletes(catalog, table, tmp_path, {paths[0]: [1]}, "AVRO")
    listed = tmp_path / "deletes-m0.avro"
    container = read_container(listed.read_bytes())
    entry = next(container.records())
    entry["data_file"]["file_format"] = "ORC"
    listed.write_bytes(write_container(container.schema, container.meta, [entry]))
    raw = json.loads(local(table.metadata_location).read_bytes())
    raw["properties"]["s3.endpoint"] = "elsewhere"
    (tmp_path / "set.metadata.json").write_text(json.dumps(raw))
    table = catalog.register_table("ns.set", f"file://{tmp_path}/set.metadata.json")
    there = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="16, 24 or 32"):
        encrypt(table, wrapping_key_id=MASTER, data_key_length=17)
    with pytest.raises(PolicyError, match="ORC"):
        encrypt(orc, wrapping_key_id=MASTER, engine=HERE)
    with pytest.raises(PolicyError, match=r"s3\.endpoint"):
        encrypt(table, wrapping_key_id=MASTER, engine=HERE)
    with pytest.raises(KeyAccessError):
        encrypt(orc, wrapping_key_id="no such key", engine=HERE)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == there


def test_younger_snapshots_in_plaintext_are_refused(catalog: Any) -> None:
    """Leave to read plaintext is for the snapshots from before."""
    table = plain_table(catalog, 2)
    encrypt(table, wrapping_key_id=MASTER, engine=HERE)
    raw = raw_metadata(table)
    policy.check_raw(raw, "here", policy.Plaintext())
    last = {name: value for name, value in raw["snapshots"][-1].items() if name != "key-id"}
    with pytest.raises(PolicyError, match="younger"):
        policy.check_raw({**raw, "snapshots": [*raw["snapshots"][:-1], last]}, "here", policy.Plaintext())
