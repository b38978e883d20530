"""Tables that Iceberg's Java wrote are read equal, and Java reads and appends to those that we wrote."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import iceberg_by_hand
import iceberg_corpus
import pyarrow as pa
from datasets import make_kms
from iceberg_corpus import AVRO, EQUALITY_DELETES, PLAIN, UNREADABLE_BY_JAVA, comparable
from iceberg_java import JAVA, Judge, JudgeError
from iceberg_tables import KEY_ID, MASTER, MIXED, new_table, rows, sql_catalog
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import IntegerType

from ags_fast.errors import AgsError, PolicyError
from ags_fast.iceberg import delete, files, open_table, rekey, verify
from ags_fast.iceberg.commit import raw_metadata

if TYPE_CHECKING:
    from pathlib import Path

    from iceberg_corpus import Corpus, Rows
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

pytestmark = pytest.mark.more  # a JVM


@pytest.fixture(scope="session")
def corpus(judge: Judge) -> Corpus:
    return iceberg_corpus.Corpus(judge)


@pytest.fixture
def catalog(tmp_path: Path, judge: Judge) -> Catalog:
    return sql_catalog(tmp_path, judge.kms, **MIXED)


def rows_of(table: Table, **scan: Any) -> Rows:
    return comparable(table.scan(**scan).to_arrow().to_pylist())


def as_pyiceberg_reads(name: str, expected: Rows) -> Rows:
    """PyIceberg 0.12 reads a null list or map of structs as an empty one, of plaintext tables, too."""
    if name != "nested":
        return expected
    return [{key: [] if key in ("li", "mm") and one is None else one for key, one in row.items()} for row in expected]


# ---------------------------------------------------------------- what Java wrote

READABLE = iceberg_corpus.TABLES.keys() - AVRO - EQUALITY_DELETES - UNREADABLE_BY_JAVA
BY_HAND = (iceberg_corpus.TABLES.keys() | EQUALITY_DELETES) - PLAIN - UNREADABLE_BY_JAVA - {"history", "empty"}


@pytest.mark.parametrize("name", sorted(READABLE))
def test_a_table_of_java_is_read(tmp_path: Path, catalog: Catalog, judge: Judge, corpus: Corpus, name: str) -> None:
    made = corpus[name]
    expected = as_pyiceberg_reads(name, made.rows)
    permits = {"encryption.plaintext-tables": "read"} if name.startswith("plain ") else {}
    table = open_table(made.metadata_location, kms=judge.kms, **permits)
    assert rows_of(table) == expected
    assert rows_of(catalog.register_table("ns.t", made.metadata_location)) == expected
    for version, then in made.versions.items():
        scan = table.scan(snapshot_id=version) if isinstance(version, int) else table.scan().use_ref(version)
        assert comparable(scan.to_arrow().to_pylist()) == then, version


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_the_pieces_read_a_table_of_java(judge: Judge, corpus: Corpus, name: str) -> None:
    made = corpus[name]
    table = iceberg_by_hand.Table.open(made.metadata_location, judge.kms)
    assert comparable(table.rows()) == made.rows


@pytest.mark.parametrize("name", sorted(AVRO | EQUALITY_DELETES))
def test_what_pyiceberg_cannot_read_is_listed(judge: Judge, corpus: Corpus, name: str) -> None:
    """Another engine can open every file by `files`, and PyIceberg says what it lacks."""
    made = corpus[name]
    by_hand = iceberg_by_hand.Table.open(made.metadata_location, judge.kms)
    table = open_table(made.metadata_location, kms=judge.kms)
    listed = [one for one in files(table) if one.kind not in ("manifest-list", "manifest")]
    expected = [
        (one["file_path"], one["file_format"], one["file_size_in_bytes"], one["record_count"], one["key_metadata"])
        for one in (entry["data_file"] for entry in by_hand.entries)
    ]
    found = [(one.path, one.format, one.length, one.record_count, key_bytes(one)) for one in listed]
    assert sorted(found) == sorted(expected)
    with pytest.raises(ValueError, match=r"AVRO|equality deletes"):
        table.scan().to_arrow()


def key_bytes(file: Any) -> bytes:
    encoded: bytes = file.key_metadata.encode()
    return encoded


@pytest.mark.skipif(JAVA != "1.11", reason="later versions keep them")
def test_keys_of_deletion_vectors_that_java_lost(judge: Judge, corpus: Corpus) -> None:
    made = corpus["deletes by SQL"]
    with pytest.raises(JudgeError, match="Null key metadata"):
        judge.rows(made.name)
    with pytest.raises(AgsError):
        open_table(made.metadata_location, kms=judge.kms).scan().to_arrow()


def test_manifests_that_java_rewrites(judge: Judge) -> None:
    """Java 1.11 writes them in plaintext: an error by name. 1.12 encrypts them."""
    name = judge.name()
    judge.create(name, "id bigint")
    for i in range(3):
        judge.append(name, [(i,)])
    assert judge.sql(f"CALL hive.system.rewrite_manifests('{name}')") == [(3, 1)]
    table = open_table(judge.metadata_location(name), kms=judge.kms)
    failed = [(row.format, row.error_class) for row in verify(table).rows if row.status == "failed"]
    if JAVA == "1.11":
        assert failed == [("manifest", "PolicyError")]
    else:
        assert failed == []
        assert sorted(table.scan().to_arrow()["id"].to_pylist()) == [0, 1, 2]


def test_keys_of_threads_that_commit_through_one_table(judge: Judge) -> None:
    """Java 1.11 loses keys now and then, and 1.12 keeps them. `verify` names a snapshot whose key is lost."""
    name = judge.name()
    judge.create(name, "id bigint")
    judge.append(name, [(0,)])
    made = judge.race(name, threads=4)
    table = open_table(judge.metadata_location(name), kms=judge.kms)
    raw = raw_metadata(table)
    keys = {one["key-id"] for one in raw["encryption-keys"]}
    lost = [one for one in raw["snapshots"] if one["key-id"] not in keys]
    failed = [(row.format, row.error_class) for row in verify(table).rows if row.status == "failed"]
    assert failed == [("manifest-list", "KeyAccessError")] * len(lost)
    if JAVA != "1.11":
        assert len(raw["snapshots"]) == made + 1
        assert lost == []


@pytest.mark.parametrize("encrypted", [True, False])
@pytest.mark.skipif(JAVA < "1.12", reason="Java 1.11 writes no table of version 4")
def test_tables_of_version_4_are_refused_by_name(catalog: Catalog, judge: Judge, encrypted: bool) -> None:
    name = judge.name()
    judge.create(name, "id BIGINT", version=4, encrypted=encrypted)
    judge.append(name, [(1,)])
    with pytest.raises(PolicyError, match=r"format version 4, and ags_fast reads tables up to version 3.*AS SELECT"):
        catalog.register_table(("ns", name.rpartition(".")[2]), judge.metadata_location(name))


@pytest.mark.parametrize("key_length", [16, 24, 32])
def test_keys_are_as_long_as_java_asks(judge: Judge, key_length: int) -> None:
    name = judge.name()
    judge.create(name, "id bigint", key_length=key_length)
    judge.append(name, [(1,)])
    table = iceberg_by_hand.Table.open(judge.metadata_location(name), judge.kms)
    listed = list(files(open_table(judge.metadata_location(name), kms=judge.kms)))
    assert [len(one.key_metadata.encryption_key) for one in listed if one.key_metadata] == [key_length] * 3
    assert len(table.entries) == 1


# ---------------------------------------------------------------- what we wrote

ALL_TYPES = pa.schema(
    [
        ("id", pa.int64()),
        ("flag", pa.bool_()),
        ("i", pa.int32()),
        ("f", pa.float32()),
        ("d", pa.float64()),
        ("number", pa.decimal128(20, 3)),
        ("day", pa.date32()),
        ("tz", pa.timestamp("us", "UTC")),
        ("ntz", pa.timestamp("us")),
        ("s", pa.string()),
        ("b", pa.binary()),
        ("st", pa.struct([("x", pa.int32()), ("y", pa.list_(pa.string()))])),
        ("m", pa.map_(pa.string(), pa.float64())),
    ]
)
AT = dt.datetime(2026, 11, 23, 1, 2, 3, 456789)
ONE = {
    "id": 1,
    "flag": True,
    "i": -5,
    "f": 0.5,
    "d": 1e300,
    "number": decimal.Decimal("12345678901234567.890"),
    "day": dt.date(1900, 1, 1),
    "tz": AT.replace(tzinfo=dt.UTC),
    "ntz": AT,
    "s": "ünïcode",
    "b": b"\x00\xff",
    "st": {"x": 1, "y": ["a", None]},
    "m": [("k", 1.5)],
}


def test_java_reads_and_appends_to_a_table_of_ours(catalog: Catalog, judge: Judge) -> None:
    """Every type, then in turns: each reads what the other wrote last."""
    name = judge.name()
    nothing = dict.fromkeys(ONE) | {"id": 2}
    table = new_table(catalog, schema=ALL_TYPES)
    table.append(pa.Table.from_pylist([ONE, nothing], schema=ALL_TYPES))
    expected = [ONE, nothing]
    for turn in range(2):
        judge.register(name, table.metadata_location)
        assert comparable(judge.dicts(f"SELECT * FROM {name}")) == comparable(expected)
        judge.append(name, [(10 + turn, *(None for _ in range(len(ONE) - 1)))])
        expected.append(nothing | {"id": 10 + turn})
        table = catalog.register_table(f"ns.turn_{turn}", judge.metadata_location(name))
        assert rows_of(table) == comparable(expected)
        table.append(pa.Table.from_pylist([nothing | {"id": 20 + turn}], schema=ALL_TYPES))
        expected.append(nothing | {"id": 20 + turn})
    judge.register(name, table.metadata_location)
    assert comparable(judge.dicts(f"SELECT * FROM {name}")) == comparable(expected)


def lineage(judge: Judge, name: str) -> list[tuple[Any, ...]]:
    return judge.sql(f"SELECT id, _row_id, _last_updated_sequence_number FROM {name} ORDER BY id")


def test_rows_have_ids_of_their_own(catalog: Catalog, judge: Judge) -> None:
    name = judge.name()
    table = new_table(catalog)
    table.append(rows(0, 3))
    table.append(rows(3, 5))
    judge.register(name, table.metadata_location)
    first = lineage(judge, name)
    assert first == [(0, 0, 1), (1, 1, 1), (2, 2, 1), (3, 3, 2), (4, 4, 2)]
    judge.append(name, [(5, "java")])
    table = catalog.register_table("ns.again", judge.metadata_location(name))
    table.append(rows(6, 8))
    judge.register(name, table.metadata_location)
    found = lineage(judge, name)
    assert found[:5] == first
    assert len({one[1] for one in found}) == len(found) == 8
    assert raw_metadata(table)["next-row-id"] > max(one[1] for one in found)


@pytest.mark.parametrize("key_length", ["16", "24", "32"])
def test_java_opens_keys_of_every_length(catalog: Catalog, judge: Judge, key_length: str) -> None:
    name = judge.name()
    table = new_table(catalog, **{"encryption_data-key-length": key_length})
    table.append(rows(0, 3))
    judge.register(name, table.metadata_location)
    assert judge.rows(name) == [(0, "name 0"), (1, "name 1"), (2, "name 2")]
    judge.append(name, [(3, "java")])
    assert len(rows_of(open_table(judge.metadata_location(name), kms=judge.kms))) == 4


@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "zstd", "snappy", "bzip2"])
def test_java_reads_manifests_of_every_codec(catalog: Catalog, judge: Judge, codec: str) -> None:
    name = judge.name()
    table = new_table(catalog, **{"write.avro.compression-codec": codec})
    if codec != "snappy":  # PyIceberg asks for a library
        table.append(rows(0, 3))
    else:
        table = new_table(catalog, "s")
        table.append(rows(0, 3))
        table.transaction().set_properties({"write.avro.compression-codec": codec}).commit_transaction()
    rekey(table)
    delete(table, "id = 1")
    judge.register(name, table.metadata_location)
    assert judge.rows(name, order_by="id") == [(0, "name 0"), (2, "name 2")]


def current(table: Table) -> int:
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return snapshot.snapshot_id


def test_java_reads_what_pyiceberg_does_to_a_table(catalog: Catalog, judge: Judge) -> None:
    """Delete, overwrite, upsert, new columns, partitions, branches and tags."""
    table = new_table(catalog)
    table.append(rows(0, 10))
    table.manage_snapshots().create_tag(current(table), "start").commit()
    table.delete("id < 2")
    table.overwrite(rows(100, 102), overwrite_filter="id = 5")
    table.upsert(rows(9, 12).set_column(1, "name", [["changed", "new", "new"]]), join_cols=["id"])
    with table.update_schema() as change:
        change.add_column("more", IntegerType())
        change.rename_column("name", "called")
    with table.update_spec() as spec:
        spec.add_field("id", BucketTransform(3), "bucket")
    table.append(pa.table({"id": [200, 201], "called": ["x", None], "more": pa.array([1, None], pa.int32())}))
    table.manage_snapshots().create_branch(current(table), "side").commit()
    table.append(pa.table({"id": [300], "called": ["branch"], "more": pa.array([3], pa.int32())}), branch="side")
    name = judge.name()
    judge.register(name, table.metadata_location)
    assert comparable(judge.dicts(f"SELECT * FROM {name}")) == rows_of(table)
    assert len(rows_of(table)) == 13
    for ref in ("start", "side"):
        found = judge.dicts(f"SELECT * FROM {name} VERSION AS OF '{ref}'")
        assert comparable(found) == comparable(table.scan().use_ref(ref).to_arrow().to_pylist()), ref
    judge.append(name, [(400, "java", 4)])
    again = open_table(judge.metadata_location(name), kms=judge.kms)
    assert rows_of(again) == comparable(judge.dicts(f"SELECT * FROM {name}"))


@pytest.mark.parametrize("name", ["partitions", "history", "deletion vectors", "aes 256"])
def test_we_change_a_table_of_java(catalog: Catalog, judge: Judge, corpus: Corpus, name: str) -> None:
    """Append to it, and delete whole rows of it; Java reads the result and goes on."""
    made = corpus[name]
    table = catalog.register_table("ns.t", made.metadata_location)
    new = pa.Table.from_pylist([{"id": 1000 + n} for n in range(3)], schema=table.schema().as_arrow())
    table.append(new)
    name = judge.name()
    judge.register(name, table.metadata_location)
    expected = rows_of(table)
    assert [row for row in expected if row["id"] < 1000 or row["id"] >= 2**40] == made.rows
    assert len(expected) == len(made.rows) + 3
    assert comparable(judge.dicts(f"SELECT * FROM {name}")) == expected
    judge.sql(f"DELETE FROM {name} WHERE id = 1000")
    again = catalog.register_table("ns.again", judge.metadata_location(name))
    assert rows_of(again) == [row for row in expected if row["id"] != 1000]
    again.delete("id >= 1000 AND id < 1003")
    judge.register(name, again.metadata_location)
    assert comparable(judge.dicts(f"SELECT * FROM {name}")) == made.rows


def test_java_refuses_another_master_key(tmp_path: Path, catalog: Catalog, judge: Judge) -> None:
    """The judge cannot be wrong about keys: of a table under a keystore that it does not have it reads nothing."""
    (tmp_path / "other").mkdir()
    theirs = make_kms(tmp_path / "other", keys=[MASTER])
    (tmp_path / "theirs").mkdir()
    table = sql_catalog(tmp_path / "theirs", theirs).create_table(
        "ns.t", schema=rows(0, 1).schema, properties={KEY_ID: MASTER}
    )
    table.append(rows(0, 3))
    name = judge.name()
    judge.register(name, table.metadata_location)
    with pytest.raises(JudgeError, match="AEADBadTag"):
        judge.rows(name)
