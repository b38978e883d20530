"""The table's property ``write.avro.compression-codec``: by which manifests and their lists are compressed."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import fastavro
import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from iceberg_tables import KEY_ID, MASTER, MIXED, SCHEMA, ids, new_table, open_whole, rows, sql_catalog

from ags_fast.iceberg import clear_cache, delete, encrypt, expire, files, open_table, rekey, rotate, verify
from ags_fast.iceberg.commit import edit, raw_metadata
from ags_fast.iceberg.manifests import Known
from ags_fast.jobs import LocalEngine

if TYPE_CHECKING:
    from pathlib import Path

CODEC = "write.avro.compression-codec"
# A name of the property, and Avro's. Java's names are there, too, and Java ignores case.
NAMES = {
    "null": "null",
    "uncompressed": "null",
    "deflate": "deflate",
    "gzip": "deflate",
    "GZIP": "deflate",
    "snappy": "snappy",
    "zstd": "zstandard",
    "zstandard": "zstandard",
    "bzip2": "bzip2",
}
HERE = LocalEngine(0)


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Any:
    return sql_catalog(tmp_path, kms, **MIXED)


def set_codec(table: Any, codec: str) -> None:
    """As another engine does it."""
    edit(table, lambda raw: {**raw, "properties": {**(raw.get("properties") or {}), CODEC: codec}})


def codecs(table: Any) -> set[str]:
    """The codecs of the newest snapshot's manifests and of its list, as they are stored."""
    found, io_of = set(), table.io
    snapshot = table.current_snapshot().snapshot_id
    for one in files(table):
        if one.kind not in ("manifest", "manifest-list"):
            continue
        known = io_of.table.known(one.path) or Known(one.path, one.length, one.key_metadata)
        if one.kind == "manifest" and known.snapshot_id not in (None, snapshot):
            continue
        plain = open_whole(known, io_of.inner(one.path))
        found.add(fastavro.reader(io.BytesIO(plain)).codec)
    return found


def table_files(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if path.suffix in (".parquet", ".avro", ".puffin", ".plan")}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written(catalog: Any, kms: dict[str, str], name: str) -> None:
    pytest.importorskip("cramjam")
    table = new_table(catalog)
    table.append(rows(0, 10))
    table.append(rows(10, 20))
    assert codecs(table) == {"deflate"}
    set_codec(table, name)
    if name != "snappy":  # PyIceberg asks for a library
        table.append(rows(20, 30))
        assert codecs(table) == {NAMES[name]}
        table.overwrite(rows(0, 5), overwrite_filter="id < 5")
    rekey(table)
    assert codecs(table) == {NAMES[name]}
    table = catalog.load_table("ns.t")
    delete(table, "id = 3 or id = 12")
    assert codecs(table) == {NAMES[name]}
    rekey(table, what="data", engine=HERE).raise_for_failures()
    assert codecs(table) == {NAMES[name]}
    assert table.properties[CODEC] == raw_metadata(table)["properties"][CODEC] == name
    clear_cache()
    wanted = [i for i in range(20 if name == "snappy" else 30) if i not in (3, 12)]
    assert ids(catalog.load_table("ns.t")) == wanted
    assert ids(open_table(table.metadata_location, kms=kms)) == wanted
    verify(table).raise_for_failures()


def test_a_property_that_is_set_through_pyiceberg(catalog: Any) -> None:
    table = new_table(catalog)
    with table.transaction() as transaction:
        transaction.set_properties({CODEC: "zstd"})
        transaction.append(rows(0, 5))
    assert codecs(table) == {"zstandard"}
    table.transaction().set_properties({CODEC: "bzip2"}).commit_transaction()
    table.append(rows(5, 6))
    assert codecs(table) == {"bzip2"}
    table.transaction().remove_properties(CODEC).commit_transaction()
    table.append(rows(6, 7))
    assert codecs(table) == {"deflate"}
    assert ids(table) == list(range(7))


def test_uncompressed_stays_what_java_reads(catalog: Any) -> None:
    """PyIceberg calls it ``null``, which Java does not know."""
    table = catalog.create_table("ns.t", SCHEMA, properties={KEY_ID: MASTER, CODEC: "uncompressed"})
    table.append(rows(0, 3))
    table.transaction().set_properties({"comment": "x"}).commit_transaction()
    assert raw_metadata(table)["properties"][CODEC] == "uncompressed"
    plain = catalog.create_table("ns.plain", SCHEMA, properties={CODEC: "UNCOMPRESSED"})
    plain.append(rows(0, 3))
    assert ids(plain) == [0, 1, 2]
    assert plain.properties[CODEC] == "UNCOMPRESSED"


@pytest.mark.parametrize("codec", ["bzip2", "null", "zstd"])
def test_a_table_that_is_encrypted_later(catalog: Any, codec: str) -> None:
    table = catalog.create_table("ns.t", SCHEMA, properties={CODEC: codec, "format-version": "2"})
    table.append(rows(0, 10))
    encrypt(table, wrapping_key_id=MASTER, engine=HERE).raise_for_failures()
    assert codecs(table) == {NAMES[codec]}
    assert ids(table) == list(range(10))


# ------------------------------------------------------------------------------------------------------ unknown codecs


def test_an_unknown_codec_is_refused_when_it_is_given(catalog: Any) -> None:
    with pytest.raises(ValueError, match=r"compression-codec is 'lz4'.*zstd"):
        new_table(catalog, **{CODEC: "lz4"})
    table = new_table(catalog)
    with pytest.raises(ValueError, match=r"compression-codec is 'lz4'.*zstd"):
        table.transaction().set_properties({CODEC: "lz4"}).commit_transaction()


@pytest.mark.parametrize("action", ["append", "overwrite", "delete", "manifests", "data", "encrypt"])
def test_an_unknown_codec_that_is_there_is_told_before_anything_is_written(
    catalog: Any, tmp_path: Path, action: str
) -> None:
    table = new_table(catalog) if action != "encrypt" else catalog.create_table("ns.t", SCHEMA)
    table.append(rows(0, 3))
    set_codec(table, "lz4")
    location, there = table.metadata_location, table_files(tmp_path)
    act = {
        "append": lambda: table.append(rows(3, 5)),
        "overwrite": lambda: table.overwrite(rows(3, 5)),
        "delete": lambda: delete(table, "id = 1"),
        "encrypt": lambda: encrypt(table, wrapping_key_id=MASTER, engine=HERE),
        "manifests": lambda: rekey(table, engine=HERE),
        "data": lambda: rekey(table, what="data", engine=HERE),
    }[action]
    with pytest.raises(ValueError, match=r"compression-codec is 'lz4': it must be one of .*zstd"):
        act()
    assert table_files(tmp_path) == there
    assert catalog.load_table("ns.t").metadata_location == location
    if action != "encrypt":  # what writes no manifest goes on
        rotate(table, what="kek")
        expire(table)
    assert ids(catalog.load_table("ns.t")) == [0, 1, 2]
    table.transaction().set_properties({CODEC: "gzip"}).commit_transaction()
    table.append(rows(3, 4))
    assert ids(table) == [0, 1, 2, 3]
