"""What encrypted tables refuse, and that a refusal has written nothing."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from iceberg_damage import plaintext_data, plaintext_manifest, relisted
from iceberg_tables import KEY_ID, MASTER, MIXED, SCHEMA, ids, new_table, rows, sql_catalog
from pyiceberg.schema import Schema
from pyiceberg.table import StagedTable
from pyiceberg.types import NestedField, TimestampNanoType

from ags_fast.errors import IntegrityError, KeyAccessError, PolicyError
from ags_fast.iceberg import delete, files, open_table, policy
from ags_fast.iceberg.manifests import Known

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

RAW: dict[str, Any] = {"format-version": 3, "properties": {KEY_ID: MASTER}, "snapshots": [{"key-id": "k"}]}


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Catalog:
    return sql_catalog(tmp_path, kms, **MIXED)


def stored(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (folder / "wh").rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "change",
    [
        {"format-version": 2},
        {"format-version": 1},
        {"properties": {}, "encryption-keys": [{"key-id": "k"}]},
        {"properties": {KEY_ID: MASTER, "encryption.data-key-length": "20"}},
        {"properties": {KEY_ID: MASTER, "py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO"}},
        {"properties": {KEY_ID: MASTER, "py-catalog-impl": "x.Y"}},
        {"properties": {KEY_ID: MASTER, "encryption.kms-impl": "x.Y"}},
        {"properties": {KEY_ID: MASTER, "kms.endpoint": "http://localhost"}},
        {"properties": {KEY_ID: MASTER, "s3.endpoint": "http://localhost"}},
        {"properties": {KEY_ID: MASTER, "token": "x"}},
        {"properties": {KEY_ID: MASTER, "header.Authorization": "x"}},
        {"properties": {"Py-Io-Impl": "x.Y"}},
        {"snapshots": [{"key-id": "k"}, {"snapshot-id": 5}]},
        {"snapshots": [{"key-id": ""}]},
    ],
)
def test_metadata_that_are_refused(change: dict[str, Any]) -> None:
    policy.check_raw(RAW, "here", policy.Plaintext())
    with pytest.raises(PolicyError):
        policy.check_raw({**RAW, **change}, "here", policy.Plaintext())


def test_changed_metadata_are_refused_at_loading(tmp_path: Path, catalog: Catalog, kms: dict[str, str]) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    place = table.metadata_location.removeprefix("file://")
    with open(place) as file:
        raw = json.load(file)
    raw["properties"]["py-io-impl"] = "pyiceberg.io.pyarrow.PyArrowFileIO"
    with open(place, "w") as file:
        json.dump(raw, file)
    for load in (
        lambda: sql_catalog(tmp_path, kms).load_table("ns.t"),
        lambda: open_table(table.metadata_location, kms=kms),
    ):
        with pytest.raises(PolicyError, match="py-io-impl"):
            load()


@pytest.mark.parametrize("version", ["1", "2"])
def test_an_encrypted_table_has_version_3(tmp_path: Path, catalog: Catalog, version: str) -> None:
    with pytest.raises(PolicyError, match="version 3"):
        new_table(catalog, **{"format-version": version})
    assert stored(tmp_path) == {}
    assert new_table(catalog, **{"format-version": "3"}).properties == {KEY_ID: MASTER}


@pytest.mark.parametrize("method", ["create_table", "create_table_if_not_exists", "create_table_transaction"])
def test_a_new_table_has_a_master_key_that_wraps(tmp_path: Path, catalog: Catalog, method: str) -> None:
    """The KMS is asked when the table is made: not only when its first rows are to be written."""
    with pytest.raises(KeyAccessError, match="'nokey'"):
        getattr(catalog, method)("ns.t", schema=SCHEMA, properties={KEY_ID: "nokey"})
    with pytest.raises(KeyAccessError, match="no KMS was given"):
        getattr(sql_catalog(tmp_path, None), method)("ns.t", schema=SCHEMA, properties={KEY_ID: MASTER})
    assert stored(tmp_path) == {}
    assert not catalog.table_exists("ns.t")


@pytest.mark.parametrize("length", ["0", "8", "17", "x", "128"])
def test_key_lengths(tmp_path: Path, catalog: Catalog, length: str) -> None:
    with pytest.raises(PolicyError, match="16, 24 or 32"):
        new_table(catalog, **{"encryption.data-key-length": length})
    assert stored(tmp_path) == {}


def test_a_table_in_plaintext_is_not_encrypted_by_a_property(tmp_path: Path, catalog: Catalog) -> None:
    table = catalog.create_table("ns.plain", schema=SCHEMA)
    table.append(rows(0, 3))
    before = stored(tmp_path)
    with pytest.raises(PolicyError, match=r"ags_fast\.iceberg\.encrypt"):
        table.transaction().set_properties({KEY_ID: MASTER}).commit_transaction()
    with pytest.raises(PolicyError, match="py-io-impl"):
        table.transaction().set_properties({"py-io-impl": "x.Y"}).commit_transaction()
    assert stored(tmp_path) == before
    assert ids(table) == [0, 1, 2]


@pytest.mark.parametrize("change", [{"write.format.default": "orc"}, {"write.delete.format.default": "ORC"}])
def test_orc_is_refused(tmp_path: Path, catalog: Catalog, change: dict[str, str]) -> None:
    table = new_table(catalog)
    before = stored(tmp_path)
    with pytest.raises(PolicyError, match="ORC"):
        table.transaction().set_properties(change).commit_transaction()
    assert stored(tmp_path) == before


def test_an_upgrade_is_refused(catalog: Catalog) -> None:
    table = new_table(catalog)
    with pytest.raises((PolicyError, ValueError, NotImplementedError)):
        table.transaction().upgrade_table_version(3).commit_transaction()


def test_new_types_are_read_only(tmp_path: Path, catalog: Catalog) -> None:
    with pytest.raises((PolicyError, ValueError)):
        new_table(catalog, schema=Schema(NestedField(1, "t", TimestampNanoType())))
    table = new_table(catalog)
    before = stored(tmp_path)
    with pytest.raises((PolicyError, ValueError)), table.update_schema() as update:
        update.add_column("t", TimestampNanoType())
    assert stored(tmp_path) == before


# ------------------------------------------------------------------------------------------------- files in plaintext


@pytest.mark.parametrize("change", [plaintext_manifest, plaintext_data])
def test_files_in_plaintext_are_refused(
    tmp_path: Path, catalog: Catalog, kms: dict[str, str], change: Callable[[Table, Any], Any]
) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    relisted(table, change)
    for opened in (
        table,
        sql_catalog(tmp_path, kms).load_table("ns.t"),
        open_table(table.metadata_location, kms=kms),
    ):
        with pytest.raises(PolicyError, match="plaintext"):
            opened.scan().to_arrow()
    with pytest.raises(PolicyError, match="plaintext"):
        delete(table, "id = 1")
    with pytest.raises(PolicyError, match="your own configuration"):
        list(files(table))
    with pytest.raises(PolicyError, match="your own configuration"):
        table.transaction().set_properties({"encryption.plaintext-files": "allow"}).commit_transaction()
    allows = {"encryption.plaintext-files": "allow"}
    for opened in (
        sql_catalog(tmp_path, kms, **allows).load_table("ns.t"),
        open_table(table.metadata_location, kms=kms, **allows),
    ):
        assert ids(opened) == [0, 1, 2]
        assert None in [one.key_metadata for one in files(opened)]


def test_two_lengths(catalog: Catalog) -> None:
    def longer(table: Table, record: Any) -> Any:
        return {**record, "manifest_length": record["manifest_length"] + 1}

    table = new_table(catalog)
    table.append(rows(0, 3))
    relisted(table, longer)
    with pytest.raises(IntegrityError, match="two lengths"):
        list(files(table))


def test_an_orc_file_is_refused(catalog: Catalog) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    (known,) = [one for one in files(table) if one.kind == "data"]
    with pytest.raises(PolicyError, match="ORC"):
        table.io.open_known(Known(known.path, known.length, known.key_metadata, format="ORC"))


# ------------------------------------------------------------------------------------------- readers of other libraries


def test_other_readers_are_refused(tmp_path: Path, catalog: Catalog, kms: dict[str, str]) -> None:
    made = new_table(catalog)
    made.append(rows(0, 3))
    made.refresh()
    loaded = sql_catalog(tmp_path, kms).load_table("ns.t")
    renamed = catalog.rename_table("ns.t", "ns.u")
    registered = sql_catalog(tmp_path, kms).register_table("ns.v", made.metadata_location)
    opened = open_table(made.metadata_location, kms=kms)
    for table in (made, loaded, renamed, registered, opened):
        for method in ("to_polars", "to_daft", "to_bodo", "__datafusion_table_provider__"):
            with pytest.raises(PolicyError, match=r"table\.scan"):
                getattr(table, method)()
        with pytest.raises(TypeError, match="never pickled"):
            pickle.dumps(table)
        assert ids(table) == [0, 1, 2]


def test_a_table_that_a_transaction_creates(catalog: Catalog) -> None:
    """Its handle is the transaction's, also after the commit."""
    for name, properties in (("t", {KEY_ID: MASTER}), ("plain", {})):
        transaction = catalog.create_table_transaction(f"ns.{name}", schema=SCHEMA, properties=properties)
        transaction.append(rows(0, 3))
        table = transaction.commit_transaction()
        assert ids(catalog.load_table(f"ns.{name}")) == [0, 1, 2]
        assert isinstance(table, StagedTable)
        with pytest.raises(ValueError, match="staged"):
            table.scan()
        for method in ("to_polars", "to_daft", "to_bodo", "__datafusion_table_provider__"):
            if properties:
                with pytest.raises(PolicyError, match=r"table\.scan"):
                    getattr(table, method)()
        with pytest.raises(TypeError, match="never pickled"):
            pickle.dumps(table)


def test_tables_in_plaintext_keep_polars(catalog: Catalog) -> None:
    pytest.importorskip("polars")
    table = catalog.create_table("ns.plain", schema=SCHEMA)
    table.append(rows(0, 3))
    assert sorted(table.to_polars().collect()["id"].to_list()) == [0, 1, 2]


def test_a_server_never_plans_a_scan(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    monkeypatch.setattr(type(catalog), "supports_server_side_planning", lambda _: True, raising=False)
    assert ids(table) == [0, 1, 2]
    assert ids(table, row_filter="id > 0") == [1, 2]
    plain = catalog.create_table("ns.plain", schema=SCHEMA)
    with pytest.raises(TypeError, match="RestCatalog"):  # the server would be asked
        plain.scan().to_arrow()
