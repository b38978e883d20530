"""The SQL catalog on SQLite and PostgreSQL, by PyIceberg's own configuration."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")
pytest.importorskip("psycopg")

import pyiceberg.catalog
from iceberg_tables import KEY_ID, MASTER, SCHEMA, ids, key_forms, new_table, rows
from support import python_env

import ags_fast.iceberg
from ags_fast.errors import KeyAccessError, PolicyError
from ags_fast.iceberg import SqlCatalog
from ags_fast.iceberg.commit import raw_metadata
from ags_fast.iceberg.session import kms_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from servers.postgres import Postgres

CLASS = "ags_fast.iceberg.SqlCatalog"


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    from servers.postgres import postgres as started

    with started() as server, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PGPASSWORD", server.password)
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/catalog.db"
    return str(request.getfixturevalue("postgres").url)


@pytest.fixture
def configured(tmp_path: Path, uri: str, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a catalog in a file ``.pyiceberg.yaml``, which has all settings of the KMS, too."""
    name = tmp_path.name.replace("_", "-")
    settings = {"uri": uri, "warehouse": f"file://{tmp_path}/wh", "py-catalog-impl": CLASS, **kms}
    settings["py-io-impl"] = "ags_fast.iceberg.FileIO"  # who forgets the class of the catalog only reads
    lines = [f"    {key}: {value}" for key, value in settings.items()]
    (tmp_path / ".pyiceberg.yaml").write_text("\n".join(["catalog:", f"  {name}:", *lines, ""]))
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", type(pyiceberg.catalog._ENV_CONFIG)())
    return name


def test_by_pyicebergs_configuration(configured: str) -> None:
    """PyIceberg itself takes a catalog's class from arguments only; all else comes from the file."""
    catalog = pyiceberg.catalog.load_catalog(configured, **{"py-catalog-impl": CLASS})
    assert isinstance(catalog, SqlCatalog)
    catalog.create_namespace("ns")
    table = new_table(catalog)
    table.append(rows(0, 10))
    table.delete("id < 3")
    table.overwrite(rows(20, 22), overwrite_filter="id = 5")
    other = ags_fast.iceberg.load_catalog(configured)
    assert isinstance(other, SqlCatalog)
    assert ids(other.load_table("ns.t")) == [3, 4, 6, 7, 8, 9, 20, 21]
    other.purge_table("ns.t")
    other.drop_namespace("ns")


def test_without_the_class_nothing_is_written_in_plaintext(configured: str, tmp_path: Path) -> None:
    ags_fast.iceberg.load_catalog(configured).create_namespace("ns")
    table = new_table(ags_fast.iceberg.load_catalog(configured))
    table.append(rows(0, 3))
    vanilla = pyiceberg.catalog.load_catalog(configured)
    assert not isinstance(vanilla, SqlCatalog)
    assert ids(vanilla.load_table("ns.t")) == [0, 1, 2]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PolicyError, match="only reads"):
        vanilla.create_table("ns.u", schema=SCHEMA, properties={KEY_ID: MASTER})
    with pytest.raises(PolicyError, match="only reads"):
        vanilla.load_table("ns.t").append(rows(3, 6))
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before and path.is_file()] == []
    ags_fast.iceberg.load_catalog(configured).purge_table("ns.t")
    vanilla.drop_namespace("ns")


def test_a_class_that_is_not_ours(configured: str) -> None:
    with pytest.raises(ValueError, match="py-catalog-impl="):
        ags_fast.iceberg.load_catalog(configured, kms=None, **{"py-catalog-impl": "pyiceberg.catalog.sql.SqlCatalog"})


def test_the_command_of_pyiceberg(configured: str) -> None:
    """`pyiceberg` reads encrypted tables: its catalogs are its own, the FileIO is ours."""
    catalog = ags_fast.iceberg.load_catalog(configured)
    catalog.create_namespace("ns")
    new_table(catalog).append(rows(0, 3))
    done = subprocess.run(
        [sys.executable, "-m", "pyiceberg.cli.console", "--catalog", configured, "files", "ns.t"],
        env=python_env(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    catalog.purge_table("ns.t")
    catalog.drop_namespace("ns")
    if "No module named" in done.stderr:
        pytest.skip("needs click and rich, which PyIceberg's command wants")
    assert done.returncode == 0, done.stderr


def test_the_database_has_no_keys(uri: str, tmp_path: Path, kms: dict[str, str]) -> None:
    import sqlalchemy

    catalog: Any = ags_fast.iceberg.load_catalog(
        tmp_path.name, kms=kms, type="sql", uri=uri, warehouse=f"file://{tmp_path}/wh"
    )
    catalog.create_namespace("ns")
    table = new_table(catalog)
    table.append(rows(0, 3))
    table.delete("id = 1")
    with sqlalchemy.create_engine(uri).connect() as connection:
        found = [
            [str(value) for value in row]
            for name in sqlalchemy.inspect(connection).get_table_names()
            for row in connection.execute(sqlalchemy.text(f"SELECT * FROM {name}"))
        ]
    text = str(found)
    assert raw_metadata(table)["location"] in text
    assert not any(form in text for form in key_forms(table))
    catalog.purge_table("ns.t")


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"encryption.allowed-key-ids": "other,third"}, KeyAccessError, "allowed-key-ids"),
        ({"encryption.allowed-key-id": "other"}, ValueError, "did you mean 'encryption.allowed-key-ids'"),
    ],
)
def test_guards_of_the_kms_are_not_lost(
    tmp_path: Path, kms: dict[str, str], more: dict[str, str], error: type[Exception], message: str
) -> None:
    place: Any = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/wh"}
    with pytest.raises(error, match=message):
        new_table(ags_fast.iceberg.load_catalog("tests", kms=None, **place, **kms, **more))


def test_what_a_kms_is_told_of_a_catalog() -> None:
    told = {
        "encryption.kms-type": "aws",
        "client.region": "eu-central-1",
        "client.assume-role.arn": "arn:aws:iam::1:role/r",
        "kms.endpoint": "https://kms",
        "adls.token-credential-provider": "a:B",
        "gcs.impersonate.service-account": "s",
    }
    others = {"client.secret-access-key": "secret", "s3.region": "x", KEY_ID: MASTER, "uri": "u"}
    assert kms_of({**told, **others}) == told
    assert kms_of(others) is None
