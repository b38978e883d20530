"""Encrypted tables through PyIceberg's own API, on a SQL catalog."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import iceberg_tables
from iceberg_tables import KEY_ID, MASTER, MIXED, SCHEMA, ids, new_table, rows, sql_catalog
from kms_clients import UnitestKms
from pyiceberg.catalog.sql import SqlCatalog as Vanilla
from pyiceberg.catalog.sql import SqlCatalog as VanillaCatalog
from pyiceberg.exceptions import CommitStateUnknownException

from ags_fast.errors import KeyAccessError, PolicyError
from ags_fast.iceberg import FileIO, files, open_table
from ags_fast.iceberg.commit import edit, raw_metadata
from ags_fast.iceberg.session import clear_cache
from ags_fast.keys.kms import count_calls

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Any:
    return sql_catalog(tmp_path, kms, **MIXED)


def stored(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (folder / "wh").rglob("*") if path.is_file()}


def raw_of(table: Any) -> dict[str, Any]:
    with open(table.metadata_location.removeprefix("file://")) as file:
        return json.load(file)


def test_everyday_use(tmp_path: Path, catalog: Any, kms: dict[str, str]) -> None:
    table = new_table(catalog)
    table.append(rows(0, 100))
    table.append(rows(100, 110))
    table.delete("id < 5")
    table.overwrite(rows(50, 53), overwrite_filter="id >= 50")
    assert ids(table) == list(range(5, 53))
    assert ids(table, row_filter="id > 50", selected_fields=("id",)) == [51, 52]
    table.upsert(rows(51, 60), join_cols=["id"])
    other = sql_catalog(tmp_path, kms).load_table("ns.t")
    assert ids(other) == list(range(5, 60))
    first = other.metadata.snapshots[0].snapshot_id
    assert ids(other, snapshot_id=first) == list(range(100))
    assert ids(open_table(other.metadata_location, kms=kms)) == list(range(5, 60))


def test_what_is_stored_is_encrypted(tmp_path: Path, catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 1000))
    table.delete("id = 7")
    kinds: dict[str, set[bytes]] = {path.rsplit(".", 1)[1]: set() for path in stored(tmp_path)}
    for path, data in stored(tmp_path).items():
        kinds[path.rsplit(".", 1)[1]].add(data[:4])
        assert b"name 42" not in data
    assert kinds == {"parquet": {b"PARE"}, "avro": {b"AGS1"}, "puffin": {b"AGS1"}, "json": {b'{"fo'}}


def test_metadata_are_of_version_3(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 10))
    table.append(rows(10, 13))
    raw = raw_of(table)
    assert raw["format-version"] == 3
    assert raw["next-row-id"] == 13
    assert [(one["first-row-id"], one["added-rows"]) for one in raw["snapshots"]] == [(0, 10), (10, 3)]
    named = {one["key-id"]: one for one in raw["encryption-keys"]}
    assert {one["key-id"] for one in raw["snapshots"]} < set(named)
    assert [one["encrypted-by-id"] for one in named.values()].count(MASTER) == 1  # one KEK
    assert "ags_fast" not in json.dumps(raw)


def test_fields_that_pyiceberg_does_not_know_stay(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    edit(table, lambda raw: {**raw, "new-field": {"a": [1]}, "snapshots": [{**raw["snapshots"][0], "new": 1}]})
    table.append(rows(3, 5))
    raw = raw_of(table)
    assert raw["new-field"] == {"a": [1]}
    assert [one.get("new") for one in raw["snapshots"]] == [1, None]
    assert ids(table) == [0, 1, 2, 3, 4]


def test_an_edit_writes_no_snapshot(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    before = raw_of(table)
    edit(table, lambda raw: {**raw, "properties": {**raw["properties"], "comment": "x"}})
    after = raw_of(table)
    assert after["snapshots"] == before["snapshots"]
    assert after["properties"]["ags.seal"] != before["properties"]["ags.seal"]
    assert {**table.properties, "ags.seal": after["properties"]["ags.seal"]} == after["properties"]
    assert table.properties == {KEY_ID: MASTER, "comment": "x"}
    assert edit(table, lambda raw: raw) == raw_metadata(table)
    assert raw_of(table) == after


def test_manifest_lists_are_held_until_their_commit(catalog: Any) -> None:
    table = new_table(catalog)
    for i in range(5):
        table.append(rows(i, i + 1))
    table.refresh()
    assert all(table.io.table.held_list(one.manifest_list) is None for one in table.metadata.snapshots)
    assert ids(table) == list(range(5))


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("others", [True, False])
def test_a_catalog_that_does_not_know(catalog: Any, monkeypatch: pytest.MonkeyPatch, made: bool, others: bool) -> None:
    """Whether it made a commit, and another commit came since."""
    table = new_table(catalog)
    table.append(rows(0, 3))
    real = Vanilla.commit_table

    def commit(*given: Any) -> Any:
        monkeypatch.undo()
        if made:
            real(*given)
        if others:
            catalog.load_table("ns.t").append(rows(3, 5))
        raise CommitStateUnknownException("the connection broke")

    def change(raw: dict[str, Any]) -> dict[str, Any]:
        return {**raw, "properties": {**raw["properties"], "comment": "x"}}

    monkeypatch.setattr(Vanilla, "commit_table", commit)
    if made:
        assert edit(table, change)["properties"]["comment"] == "x"
    else:
        with pytest.raises(CommitStateUnknownException):
            edit(table, change)
    assert ("comment" in catalog.load_table("ns.t").properties) == made
    assert ids(catalog.load_table("ns.t")) == list(range(5 if others else 3))


def test_branches_and_tags(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    first = table.current_snapshot().snapshot_id
    with table.manage_snapshots() as manage:
        manage.create_tag(first, "one").create_branch(first, "dev")
    table.append(rows(3, 5), branch="dev")
    table.append(rows(10, 12))
    assert ids(table) == [0, 1, 2, 10, 11]
    assert sorted(table.scan().use_ref("dev").to_arrow()["id"].to_pylist()) == [0, 1, 2, 3, 4]
    assert sorted(table.scan().use_ref("one").to_arrow()["id"].to_pylist()) == [0, 1, 2]
    taken = [range(one["first-row-id"], one["first-row-id"] + one["added-rows"]) for one in raw_of(table)["snapshots"]]
    assert sum(len(one) for one in taken) == raw_of(table)["next-row-id"] == 7


def test_a_session_that_has_forgotten_looks_up_again(tmp_path: Path, catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    tasks = list(table.scan().plan_files())
    clear_cache()
    with table.io.new_input(tasks[0].file.file_path).open() as file:
        assert file.read(4) == b"PAR1"
    table.append(rows(3, 4))
    assert ids(table) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "name", ["py-io-impl", "PY-IO-IMPL", "py-catalog-impl", "encryption.kms-type", "kms.local.path", "s3.endpoint"]
)
def test_settings_of_a_client_are_refused(tmp_path: Path, catalog: Any, name: str) -> None:
    table = new_table(catalog)
    before = stored(tmp_path)
    with pytest.raises(PolicyError, match="names"):
        table.transaction().set_properties({name: "pyiceberg.io.pyarrow.PyArrowFileIO"}).commit_transaction()
    with pytest.raises(PolicyError, match="names"):
        new_table(catalog, "other", **{name: "x"})
    assert stored(tmp_path) == before


@pytest.mark.parametrize("change", [{KEY_ID: "other"}, {"encryption.data-key-length": "17"}])
def test_changes_of_the_encryption_are_refused(tmp_path: Path, catalog: Any, change: dict[str, str]) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    before = stored(tmp_path)
    with pytest.raises(PolicyError):
        table.transaction().set_properties(change).commit_transaction()
    with pytest.raises(PolicyError):
        table.transaction().remove_properties(KEY_ID).commit_transaction()
    assert stored(tmp_path) == before


def test_plaintext_files_are_not_added(tmp_path: Path, catalog: Any) -> None:
    import pyarrow.parquet as pq

    table = new_table(catalog)
    pq.write_table(rows(0, 3), tmp_path / "plain.parquet")
    with pytest.raises(PolicyError, match=r"no key|plaintext"):
        table.add_files([f"file://{tmp_path}/plain.parquet"])
    assert ids(table) == []


def test_a_vanilla_catalog_loses_nothing(tmp_path: Path, catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    before = raw_of(table)
    properties = {"uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/wh"}
    for more in ({}, {"py-io-impl": "ags_fast.iceberg.FileIO"}):
        vanilla = VanillaCatalog("tests", **properties, **more)
        with pytest.raises((NotImplementedError, ValueError, PolicyError, KeyAccessError)):
            vanilla.load_table("ns.t").append(rows(3, 4))
        with pytest.raises((NotImplementedError, ValueError, PolicyError, KeyAccessError)):
            vanilla.load_table("ns.t").transaction().set_properties({"a": "b"}).commit_transaction()
    table.refresh()
    assert raw_of(table) == before


def test_file_io_alone_reads(tmp_path: Path, catalog: Any, kms: dict[str, str]) -> None:
    new_table(catalog).append(rows(0, 3))
    reader = VanillaCatalog(
        "tests",
        **{"uri": f"sqlite:///{tmp_path}/catalog.db", "py-io-impl": "ags_fast.iceberg.FileIO", **kms},
    )
    assert ids(reader.load_table("ns.t")) == [0, 1, 2]


def test_no_kms(tmp_path: Path, catalog: Any) -> None:
    new_table(catalog).append(rows(0, 3))
    bare = sql_catalog(tmp_path, None)
    with pytest.raises(KeyAccessError, match="no KMS was given"):
        ids(bare.load_table("ns.t"))


def test_no_key_is_seen(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    keys = [one.key_metadata.encryption_key for one in files(table) if one.key_metadata]
    assert len(set(keys)) == 3
    shown = [repr(list(files(table))), repr(table.io), repr(table.io.session), repr(table), repr(catalog)]
    tasks = list(table.scan().plan_files())
    shown += [repr(tasks), str(table.inspect.files().to_pylist()), str(table.inspect.manifests().to_pylist())]
    pickled = pickle.dumps([task.file for task in tasks])
    for key in keys:
        assert key not in pickled
        assert not any(str(key) in text or key.hex() in text for text in shown)
    assert table.inspect.files()["key_metadata"].to_pylist() == [None]
    for one in (catalog, table.io.session):
        with pytest.raises(TypeError, match="never pickled"):
            pickle.dumps(one)


def test_tables_in_plaintext_pass_through(catalog: Any) -> None:
    table = catalog.create_table("ns.plain", schema=iceberg_tables.SCHEMA)
    table.append(rows(0, 3))
    assert ids(table) == [0, 1, 2]
    assert isinstance(table.io, FileIO)
    assert raw_of(table)["format-version"] == 2


def test_calls_of_the_kms(tmp_path: Path, catalog: Any, kms: dict[str, str]) -> None:
    with count_calls() as calls:
        table = new_table(catalog)
        for i in range(5):
            table.append(rows(i, i + 1))
    # A probe under the master key, and a new KEK, which is tried once.
    assert calls == {("local", "wrap"): 2, ("local", "unwrap"): 1}
    clear_cache()
    with count_calls() as calls:
        other = sql_catalog(tmp_path, kms).load_table("ns.t")
        assert ids(other) == ids(other, snapshot_id=other.current_snapshot().snapshot_id) == [0, 1, 2, 3, 4]
    assert calls == {("local", "unwrap"): 1}


def test_a_table_of_iceberg_rust(tmp_path: Path, vectors: Path) -> None:
    """Rust does not write the length of a list into its key."""
    folder = vectors / "iceberg-rust"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    text = (folder / "TableMetadataV3ValidEncryption.json").read_text()
    stored = folder / "manifest-list-v3-encrypted.avro"
    location = tmp_path / "00000.metadata.json"
    location.write_text(text.replace("memory:///table/metadata/manifest-list-enc.avro", f"file://{stored}"))
    table: Any = open_table(f"file://{location}", kms=UnitestKms(**{"master-1": bytes(range(16))}))
    with table.io.new_input(f"file://{stored}").open() as file:
        assert file.read(4) == b"Obj\x01"
    assert table.inspect.manifests().num_rows == len(table.current_snapshot().manifests(table.io))


def test_files_of_tables_without_files(catalog: Any) -> None:
    """An error is raised by the call, whether there are files or not."""
    encrypted = new_table(catalog)
    assert list(files(encrypted)) == []
    plain = catalog.create_table("ns.plain", schema=SCHEMA)
    for _ in range(2):
        with pytest.raises(PolicyError, match=r"no encryption\.key-id"):
            files(plain)
        with pytest.raises(ValueError, match="no snapshot 7"):
            files(encrypted, snapshot_id=7)
        with pytest.raises(PolicyError, match=r"no encryption\.key-id"):
            files(plain, snapshot_id=7)
        plain.append(rows(0, 3))
        encrypted.append(rows(0, 3))
    assert [one.kind for one in files(encrypted)] == ["manifest-list", "manifest", "manifest", "data", "data"]
