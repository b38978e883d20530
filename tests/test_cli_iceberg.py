"""The ags-fast commands for Iceberg tables, as a shell runs them."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support import flip

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from iceberg_tables import MIXED, SCHEMA, ids, new_table, rows, sql_catalog

from ags_fast import cli
from ags_fast.iceberg import delete, files, pin
from ags_fast.keys import clear_cache

if TYPE_CHECKING:
    from pathlib import Path

    from pyiceberg.table import Table

KMS = ["--keystore", "keystore", "--key-file", "key"]
PROPERTIES = {"encryption.kms-type": "local", "kms.local.path": "keystore", "kms.local.key-file": "key"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The current directory: a keystore with the master keys of tables."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["keys", "init", "keystore", "--key-file", "key"]) == 0
    for name in ("master", "other"):
        assert cli.main(["keys", "create", "keystore", name, "--key-file", "key"]) == 0
    capsys.readouterr()
    clear_cache()
    return tmp_path


@pytest.fixture
def table(folder: Path) -> Table:
    made = new_table(sql_catalog(folder, PROPERTIES))
    made.append(rows(0, 10))
    made.append(rows(10, 20))
    delete(made, "id = 3")
    return made


def catalog_options(folder: Path) -> list[str]:
    given = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/wh"}
    options = [word for name, value in given.items() for word in ("--property", f"{name}={value}")]
    return ["--catalog", "tests", *options]


def run(folder: Path, operation: str, *arguments: str, name: str = "ns.t") -> int:
    confirmed = ["--yes"] if operation == "expire" else []
    return cli.main(["iceberg", operation, name, *catalog_options(folder), *KMS, *confirmed, *arguments])


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_verify(folder: Path, table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "verify", "--json", "--orphans") == 0
    found = shown(capsys)
    assert (found["operation"], found["table"], found["failed"], found["skipped"]) == ("verify", "ns.t", 0, 0)
    assert found["ok"] == len(found["rows"]) == 13
    assert run(folder, "verify", "--current") == 0
    text = capsys.readouterr().out
    assert "failed" in text
    assert "metadata.json" not in text  # rows that are well are not shown
    first = str(table.metadata.snapshots[0].snapshot_id)
    assert run(folder, "verify", "--snapshot", first, "--json") == 0
    assert shown(capsys)["ok"] == 7
    assert run(folder, "verify", "--snapshot", "7") == 2


def test_verify_of_a_changed_file(folder: Path, table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    (path, *_) = [one.path.removeprefix("file://") for one in files(table) if one.kind == "data"]
    with open(path, "rb") as file:
        data = file.read()
    with open(path, "wb") as file:
        file.write(flip(data, 800))
    assert run(folder, "verify") == 3
    out = capsys.readouterr().out
    assert "IntegrityError" in out
    assert path in out


def test_files(folder: Path, table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [one.key_metadata.encryption_key for one in files(table) if one.key_metadata is not None]
    assert run(folder, "files", "--json") == 0
    out = capsys.readouterr().out
    found = json.loads(out)["files"]
    assert {one["kind"] for one in found} == {"manifest-list", "manifest", "data", "deletion-vector"}
    assert all(one["encrypted"] for one in found)
    assert run(folder, "files") == 0
    text = capsys.readouterr().out
    assert "deletion-vector" in text
    for key in keys:
        assert key.hex() not in out + text
        assert str(key) not in out + text
    first = str(table.metadata.snapshots[0].snapshot_id)
    assert run(folder, "files", "--snapshot", first, "--json") == 0
    assert len(shown(capsys)["files"]) == 3


def test_a_table_by_the_location_of_its_metadata(
    folder: Path, table: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["iceberg", "verify", table.metadata_location, *KMS, "--json"]) == 0
    assert shown(capsys)["ok"] == 13
    assert cli.main(["iceberg", "files", table.metadata_location, *KMS, "--json"]) == 0
    capsys.readouterr()
    for arguments in (["expire"], ["verify", "--catalog", "x"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(["iceberg", arguments[0], table.metadata_location, *KMS, *arguments[1:]])
        assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        cli.main(["iceberg", "verify", table.metadata_location])
    assert caught.value.code == 2
    assert cli.main(["iceberg", "verify", table.metadata_location.replace("/metadata/", "/metadata/x"), *KMS]) == 5


def test_rotate_and_expire(folder: Path, table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    location = table.metadata_location
    assert run(folder, "rotate", "--dry-run", "--json") == 0
    assert shown(capsys)["planned"] > 0
    assert table.refresh().metadata_location == location
    assert run(folder, "rotate", "--json") == 0
    assert shown(capsys)["ok"] > 0
    assert run(folder, "rotate", "--what", "mek", "--wrapping-key-id", "other") == 0
    assert "keks" in capsys.readouterr().out
    assert run(folder, "expire", "--dry-run", "--json") == 0
    planned = shown(capsys)
    assert planned["planned"] > 0
    table.refresh()
    assert table.properties["encryption.key-id"] == "other"
    assert len(table.metadata.snapshots) == 3
    assert run(folder, "expire", "--keep", "1", "--older-than", "0") == 0
    table.refresh()
    assert len(table.metadata.snapshots) == 1
    assert ids(table) == [i for i in range(20) if i != 3]
    capsys.readouterr()
    assert run(folder, "verify", "--orphans", "--json") == 0
    assert shown(capsys)["skipped"] == 0


def test_rekey_and_encrypt(folder: Path, table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    location = table.metadata_location
    assert run(folder, "rekey", "--dry-run", "--json") == 0
    assert shown(capsys)["planned"] == 3
    assert run(folder, "rekey", "--what", "data", "--dry-run", "--json") == 0
    assert shown(capsys)["planned"] == 3
    assert table.refresh().metadata_location == location
    assert run(folder, "rekey") == 0
    assert "manifest" in capsys.readouterr().out
    assert run(folder, "rekey", "--what", "data", "--json") == 0
    assert shown(capsys)["ok"] == 3
    plain = sql_catalog(folder, PROPERTIES, **MIXED).create_table("ns.plain", schema=SCHEMA)
    plain.append(rows(0, 4))
    assert run(folder, "verify", name="ns.plain") == 3
    assert run(folder, "encrypt", "--wrapping-key-id", "master", "--dry-run", "--json", name="ns.plain") == 0
    assert shown(capsys)["planned"] == 1
    assert run(folder, "encrypt", "--wrapping-key-id", "master", "--json", name="ns.plain") == 0
    capsys.readouterr()
    assert run(folder, "verify", "--json", name="ns.plain") == 0
    assert shown(capsys)["skipped_by"] == {"Plaintext": 3, "Unsealed": 2}
    assert run(folder, "expire", "--json", name="ns.plain") == 0
    assert shown(capsys)["skipped_by"] == {"NotDeleted": 3, "Plaintext": 1}  # the snapshot, and its files
    assert run(folder, "expire", "--property", "encryption.plaintext-files=allow", name="ns.plain") == 0
    capsys.readouterr()
    assert run(folder, "expire", name="ns.plain") == 0  # also the metadata that the expiry before began on
    capsys.readouterr()
    for name in ("ns.plain", "ns.t"):
        assert run(folder, "verify", "--orphans", "--json", "--engine", "local", name=name) == 0
        assert shown(capsys)["skipped"] == 0


def test_force_expire(folder: Path, table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    older = [one.metadata_file for one in table.metadata.metadata_log]
    assert run(folder, "rotate", "--force-expire", "--dry-run", "--json") == 0
    assert "expired" not in shown(capsys)
    assert run(folder, "rotate", "--force-expire", "--json") == 0
    found = shown(capsys)
    assert set(older) <= {row["src"] for row in found["expired"]["rows"] if row["status"] == "ok"}
    assert len(table.refresh().metadata.snapshots) == 3
    assert found["pin"] == pin(table)
    paths = {one.path for one in files(table)}
    assert run(folder, "rekey", "--what", "data", "--force-expire") == 0
    told = capsys.readouterr().out
    for path in paths:
        assert path in told
        assert not os.path.exists(path.removeprefix("file://"))
    assert len(table.refresh().metadata.snapshots) == 1
    assert ids(table) == [i for i in range(20) if i != 3]


def test_maintain(folder: Path, table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    location = table.metadata_location
    assert run(folder, "maintain", "--dry-run", "--json") == 0
    capsys.readouterr()
    assert table.refresh().metadata_location == location
    assert run(folder, "maintain", "--quiet") == 0
    assert capsys.readouterr().out == ""
    (path, *_) = [one.path.removeprefix("file://") for one in files(table.refresh()) if one.kind == "data"]
    with open(path, "rb") as file:
        data = file.read()
    with open(path, "wb") as file:
        file.write(flip(data, 800))
    assert run(folder, "maintain", "--quiet", "--verify", "1") == 3
    assert path in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(folder, "maintain", "--verify", "7")


# ------------------------------------------------------------------------------------------------------ seals and pins

REQUIRE = ["--property", "encryption.metadata-seal=require", "--property", "encryption.allowed-key-ids=master"]


def as_java(folder: Path) -> Table:
    """The table of a client that looks at no seal and makes none, changed by it."""
    made: Table = sql_catalog(folder, PROPERTIES, **{"encryption.metadata-seal": "off"}).load_table("ns.t")
    made.transaction().set_properties({"comment": "x", "other": "y"}).commit_transaction()
    return made


def pin_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert run(folder, "pin") == 0
    return capsys.readouterr().out.strip()


def test_seal_what_others_have_changed(folder: Path, table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    location = as_java(folder).metadata_location
    assert run(folder, "verify", *REQUIRE) == 3
    capsys.readouterr()
    assert run(folder, "seal", "--dry-run", "--quiet", *REQUIRE) == 0
    told = capsys.readouterr().out
    assert "change  of\nAdded   properties/comment\nAdded   properties/other\n" in f"{told}\n"
    assert table.refresh().metadata_location == location
    assert run(folder, "seal", *REQUIRE, "--json") == 0
    found = shown(capsys)
    assert (found["operation"], found["skipped_by"], found["pin"]) == ("seal", {"Added": 2}, pin(table.refresh()))
    assert run(folder, "verify", *REQUIRE) == 0
    capsys.readouterr()
    assert run(folder, "seal", "--json") == 0
    assert shown(capsys)["rows"] == []


def test_nothing_is_sealed_if_a_file_is_damaged(folder: Path, table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    location = as_java(folder).metadata_location
    (path, *_) = [one.path.removeprefix("file://") for one in files(table) if one.kind == "data"]
    with open(path, "r+b") as file:
        data = flip(file.read(), 800)
        file.seek(0)
        file.write(data)
    assert run(folder, "seal") == 3
    told = capsys.readouterr().out
    assert "Added   properties/comment" in told
    assert "Nothing was sealed" in told
    assert path in told
    assert table.refresh().metadata_location == location


def test_a_table_never_sealed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_table(sql_catalog(folder, PROPERTIES, **{"encryption.metadata-seal": "off"})).append(rows(0, 3))
    open_pin = pin_of(folder, capsys)
    assert open_pin.startswith("ags1u.")
    assert run(folder, "pin") == 0
    assert "`ags-fast iceberg seal ns.t` seals it" in capsys.readouterr().err
    assert run(folder, "verify", "--pin", open_pin) == 0
    capsys.readouterr()
    assert run(folder, "seal", "--pin", open_pin) == 2
    assert "the pin is of metadata without a seal" in capsys.readouterr().err
    assert run(folder, "seal") == 0
    assert "Unsealed" in capsys.readouterr().out
    (folder / "pin").write_text(open_pin)
    assert run(folder, "verify", "--pin-file", "pin") == 0
    assert (folder / "pin").read_text().strip() == pin_of(folder, capsys)
    assert pin_of(folder, capsys).startswith("ags1.")


@pytest.mark.parametrize("operation", ["verify", "rotate", "rekey", "expire", "seal", "files", "pin", "maintain"])
def test_a_pin_refuses_an_older_table(
    folder: Path, table: Table, operation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = table.metadata_location
    table.append(rows(20, 30))
    pin_file = folder / "pin"
    pin_file.write_text(kept := pin_of(folder, capsys))
    planned = ["--dry-run"] if operation in ("expire", "maintain") else []  # which would remove the older metadata
    assert run(folder, operation, "--pin", kept, *planned) == 0
    with sqlite3.connect(folder / "catalog.db") as database:
        database.execute("update iceberg_tables set metadata_location = ?", (before,))
    there = sorted(path for path in (folder / "wh").rglob("*"))
    for given in (["--pin", kept], ["--pin-file", str(pin_file)]):
        clear_cache()
        capsys.readouterr()
        assert run(folder, operation, *given, "--json") == 3
        assert shown(capsys)["error_class"] == "IntegrityError"
    assert sorted(path for path in (folder / "wh").rglob("*")) == there
    assert pin_file.read_text() == kept
    if operation in ("verify", "files", "pin"):  # by its location
        assert cli.main(["iceberg", operation, before, *KMS, "--pin", kept]) == 3
        assert cli.main(["iceberg", operation, before, *KMS]) == 0
    assert run(folder, operation, "--pin", "ags1.x") == 2


def test_a_job_keeps_the_pin_of_a_table(folder: Path, table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "pin"
    assert run(folder, "verify", "--pin-file", "pin", "--json") == 5
    assert "`ags-fast iceberg pin TABLE > pin`" in shown(capsys)["error"]
    file.write_text(first := pin_of(folder, capsys))
    for words in (["rotate"], ["rekey"], ["expire"], ["verify"]):
        assert run(folder, *words, "--pin-file", "pin", "--json") == 0
        assert shown(capsys)["pin"] == file.read_text().strip() == pin(table.refresh()), words
    assert file.read_text() != first
    as_java(folder)
    before = file.read_text()
    assert run(folder, "verify", "--pin-file", "pin") == 3
    assert run(folder, "seal", "--pin-file", "pin", "--dry-run") == 0
    assert file.read_text() == before
    assert run(folder, "seal", "--pin-file", "pin") == 0
    assert file.read_text().strip() == pin(table.refresh())


def test_verify_tells_which_property_is_refused(folder: Path, table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    """No other command loads the table."""
    path = table.metadata_location.removeprefix("file://")
    with open(path) as file:
        raw = json.load(file)
    raw["properties"]["py-io-impl"] = "evil.run"
    with open(path, "w") as file:
        json.dump(raw, file)
    assert run(folder, "rekey", "--json") != 0
    capsys.readouterr()
    assert run(folder, "verify", "--json") != 0
    (row,) = [row for row in shown(capsys)["rows"] if row["status"] != "ok"]
    assert (row["src"], row["format"]) == (table.metadata_location, "metadata")
    assert "py-io-impl" in row["error"]


def test_a_catalog_of_the_configuration(
    folder: Path, table: Table, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYICEBERG_HOME", str(folder))
    (folder / ".pyiceberg.yaml").write_text(
        "catalog:\n  tests:\n    type: sql\n"
        f"    uri: sqlite:///{folder}/catalog.db\n    warehouse: file://{folder}/wh\n"
        "    encryption.kms-type: local\n    kms.local.path: keystore\n    kms.local.key-file: key\n"
    )
    assert cli.main(["iceberg", "verify", "ns.t", "--catalog", "tests", "--json"]) == 0
    assert shown(capsys)["ok"] == 13
    assert cli.main(["iceberg", "verify", "ns.t", "--catalog", "else", "--json"]) == 6
    assert shown(capsys)["error_class"] == "ConfigurationError"


@pytest.mark.parametrize("operation", ["verify", "rotate", "rekey", "expire", "seal", "pin", "maintain", "files"])
def test_exit_codes(folder: Path, operation: str, capsys: pytest.CaptureFixture[str]) -> None:
    catalog = sql_catalog(folder, PROPERTIES, **MIXED)
    catalog.create_table("ns.plain", schema=SCHEMA).append(rows(0, 3))
    assert run(folder, operation, name="ns.none") == 5
    assert "ns.none" in capsys.readouterr().err
    assert run(folder, operation, name="ns.plain") == 3
    assert "plaintext" in capsys.readouterr().err


def test_another_keystore(folder: Path, table: Table) -> None:
    assert cli.main(["keys", "init", "empty", "--key-file", "key"]) == 0
    clear_cache()
    options = ["--keystore", "empty", "--key-file", "key"]
    assert cli.main(["iceberg", "verify", "ns.t", *catalog_options(folder), *options]) == 4
    assert cli.main(["iceberg", "files", "ns.t", *catalog_options(folder), *options]) == 4


@pytest.mark.parametrize("operation", ["verify", "rotate", "rekey", "expire", "seal", "pin", "maintain", "files"])
def test_without_pyiceberg(
    folder: Path, operation: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyiceberg", None)
    assert run(folder, operation, "--json") == 6
    captured = capsys.readouterr()
    assert "[iceberg]'" in captured.err
    assert json.loads(captured.out)["error_class"] == "ModuleNotFoundError"
