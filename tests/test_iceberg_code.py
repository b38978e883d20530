"""No property of a table, or of a catalog's row, chooses what code runs; PyIceberg is shown only what is data."""

from __future__ import annotations

import gzip
import json
import sqlite3
import sys
import tracemalloc
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import pyiceberg_sources
from iceberg_tables import KEY_ID, MASTER, MIXED, SCHEMA, ids, new_table, rows, sql_catalog
from pyiceberg.io import load_file_io

from ags_fast.errors import FormatError, IntegrityError, PolicyError
from ags_fast.iceberg import encrypt, expire, open_table, rekey, rotate
from ags_fast.iceberg.properties import GONE, SERVER, TABLE, is_shown, names_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

# What PyIceberg reads of a catalog's own properties only, or of something else than a table or a server.
NOT_SHOWN = {
    *("auth", "auth.manager", "botocore_session", "cabundle", "client", "impl", "ssl", "type"),  # of REST
    *("client.profile-name", "gcs.session-kwargs", "hdfs.kerberos_ticket", "s3.profile-name"),  # of this machine
    *("DEFAULT_NETLOC", "DEFAULT_SCHEME", "catalog", "echo", "init_catalog_tables", "pool_pre_ping"),
    *("schema_version", "table-name", "ugi", "verbose"),
    *(f"dynamodb.{name}" for name in ("access-key-id", "profile-name", "region", "secret-access-key", "session-token")),
    *(f"gcp.bigquery.{name}" for name in ("credential-file", "credentials-info", "location", "project-id")),
    *(f"glue.{name}" for name in ("access-key-id", "endpoint", "id", "max-retries", "profile-name", "region")),
    *(f"glue.{name}" for name in ("retry-mode", "secret-access-key", "session-token", "skip-archive")),
    *(f"hive.{name}" for name in ("hive2-compatible", "kerberos-authentication", "kerberos-service-name")),
    *("lock-check-max-wait-time", "lock-check-min-wait-time", "lock-check-retries"),
    *("Description", "location", "metadata_location", "owner", "p.*", "table_type"),  # of namespaces and rows
    "referenced-data-file",  # of a blob in a Puffin file
}
# Values that choose among what PyIceberg has itself, or are arguments of it.
CHOICES = {"credential", "s3.signer", "token"}
IMPORTERS = {
    "catalog/__init__.py: _import_catalog",
    "catalog/rest/auth.py: create",
    "io/__init__.py: _import_file_io",
    "io/pyarrow.py: _import_retry_strategy",
    "table/locations.py: _import_location_provider",
    "transforms.py: _try_import",  # of a module that its callers name
}
UNKNOWN = {
    "catalog/__init__.py: key in updated_properties",
    "catalog/__init__.py: updated_properties.pop(key)",
    "catalog/hive.py: existing_hms_parameters.pop(key, None)",
    "catalog/hive.py: key in parameters",
    "catalog/hive.py: parameters.pop(key)",
    "catalog/rest/__init__.py: auth_config.get(auth_type, {})",
    "catalog/rest/__init__.py: self.properties.get(param)",  # audience and resource
    "cli/console.py: metadata.properties.get(property_name)",
    "cli/console.py: namespace_properties.get(property_name)",
    "cli/console.py: property_name in table.metadata.properties",
    "table/metadata.py: self.properties.get(property_name, TableProperties.WRITE_ISOLATION_LEVEL_DEFAULT)",
    "table/snapshots.py: self._additional_properties.get(__key)",
    "table/update/__init__.py: properties.pop(key)",
    "utils/config.py: _config[element]",
    "utils/config.py: new_config[rhs_key]",
    "utils/config.py: rhs_key in new_config",
    "utils/config.py: self.config.get(DEFAULT_CATALOG)",
    "utils/config.py: self.config.get(key)",
    "utils/properties.py: properties.get(property_name)",
}
CODE = ["write.py-location-provider.impl", "s3.retry-strategy-impl", "py-io-impl", "py-catalog-impl", "x.LATER-Impl"]
# Of Java, of Spark, of a user: no PyIceberg reads them.
OTHERS = {"write.spark.fanout.enabled": "true", "hive.metastore.table.owner": "ann", "comment": "x", "s3.later": "y"}


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Any:
    return sql_catalog(tmp_path, kms, **MIXED)


@pytest.fixture(params=["encrypted", "plaintext"])
def table(request: pytest.FixtureRequest, catalog: Any) -> Any:
    made = new_table(catalog) if request.param == "encrypted" else catalog.create_table("ns.t", schema=SCHEMA)
    made.append(rows(0, 3))
    made.append(rows(3, 5))
    return made


@pytest.fixture
def ran() -> Iterator[list[str]]:
    """A module `evil`, whose functions tell here that they ran."""
    calls: list[str] = []
    module: Any = types.ModuleType("evil")
    module.run = lambda *args, **named: calls.append("run")
    sys.modules["evil"] = module
    yield calls
    del sys.modules["evil"]


def seal_of(table: Table) -> dict[str, Any]:
    """The property that users are not shown, if the table has it."""
    return {name: value for name, value in raw_of(table)["properties"].items() if name == "ags.seal"}


def raw_of(table: Table) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(Path(table.metadata_location.removeprefix("file://")).read_text())
    return raw


def attacked(table: Table, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the metadata file, as who may write to the storage can."""
    raw = raw_of(table)
    change(raw)
    Path(table.metadata_location.removeprefix("file://")).write_text(json.dumps(raw))


# ------------------------------------------------------------------------------------------------------ the attacks


@pytest.mark.parametrize("name", CODE)
def test_a_table_that_names_code_is_refused(
    tmp_path: Path, table: Any, kms: dict[str, str], ran: list[str], name: str
) -> None:
    attacked(table, lambda raw: raw["properties"].update({name: "evil.run"}))
    before = {path: path.read_bytes() for path in (tmp_path / "wh").rglob("*") if path.is_file()}
    fresh = sql_catalog(tmp_path, kms, **MIXED)
    calls: list[Callable[[], object]] = [
        lambda: fresh.load_table("ns.t"),
        lambda: open_table(table.metadata_location, kms=kms, **{"encryption.plaintext-files": "allow"}),
        lambda: fresh.register_table("ns.again", table.metadata_location),
        lambda: table.append(rows(5, 6)),  # a handle from before the attack
        lambda: table.delete("id = 1"),
        lambda: table.overwrite(rows(5, 6)),
        lambda: table.transaction().set_properties({"a": "b"}).commit_transaction(),
        lambda: rotate(table),
        lambda: rekey(table, what="manifests"),
        lambda: rekey(table, what="data"),
        lambda: expire(table, keep=1),
        lambda: encrypt(table, wrapping_key_id=MASTER),
    ]
    for call in calls:
        with pytest.raises((PolicyError, IntegrityError), match=rf"{name}|in plaintext|was changed after the table"):
            call()
    assert ran == []
    after = {path: path.read_bytes() for path in (tmp_path / "wh").rglob("*") if path.is_file()}
    assert before.items() <= after.items()


def test_a_location_is_not_run(tmp_path: Path, table: Any, kms: dict[str, str]) -> None:
    """The attack as it was found: the location is Python, and the provider executes it."""
    mark = tmp_path / "ran"
    location = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    attacked(
        table,
        lambda raw: raw.update(
            location=location, properties={**raw["properties"], "write.py-location-provider.impl": "builtins.exec"}
        ),
    )
    for change in (
        lambda: table.append(rows(5, 6)),
        lambda: sql_catalog(tmp_path, kms, **MIXED).load_table("ns.t").append(rows(5, 6)),
    ):
        with pytest.raises((PolicyError, IntegrityError), match=r"chooses code|was changed after the table"):
            change()
    assert not mark.exists()


@pytest.mark.parametrize("name", CODE)
def test_a_change_that_names_code_is_refused(catalog: Any, table: Any, ran: list[str], name: str) -> None:
    before = raw_of(table)
    with pytest.raises(PolicyError, match=name):
        table.transaction().set_properties({name: "evil.run"}).commit_transaction()
    for properties in ({name: "evil.run"}, {name: "evil.run", KEY_ID: MASTER}):
        with pytest.raises(PolicyError, match=name):
            catalog.create_table("ns.other", schema=SCHEMA, properties=properties)
    assert ran == []
    table.refresh()
    assert raw_of(table) == before


NAMES = ["forged", "forged.parquet", "forged.metadata.json.bak", "x.metadata.json.gz", "version-hint.text"]


@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "plain") for name in NAMES), *(("forged.json", form) for form in ("plain", "spaces", "gzip"))],
)
def test_metadata_under_any_name_are_checked(
    tmp_path: Path, table: Any, kms: dict[str, str], ran: list[str], name: str, form: str
) -> None:
    """A row of the catalog names the file."""
    raw = raw_of(table)
    forged = Path(tmp_path, "wh", name)

    def write(properties: dict[str, str]) -> None:
        data = json.dumps({**raw, "properties": {**raw["properties"], **properties}}).encode()
        forged.write_bytes({"plain": data, "spaces": b" \n\t\r " + data, "gzip": gzip.compress(data)}[form])

    with sqlite3.connect(tmp_path / "catalog.db") as database:
        database.execute("UPDATE iceberg_tables SET metadata_location = ?", (f"file://{forged}",))
    write({"py-io-impl": "evil.run"})
    with pytest.raises(PolicyError, match="py-io-impl"):
        sql_catalog(tmp_path, kms, **MIXED).load_table("ns.t")
    assert ran == []
    write({"comment": "x"})  # they are taken for what they are
    loaded = sql_catalog(tmp_path, kms, **MIXED).load_table("ns.t")
    assert ids(loaded) == [0, 1, 2, 3, 4]
    loaded.append(rows(5, 6))
    assert raw_of(loaded)["properties"] == {**raw["properties"], "comment": "x"}


def _bomb() -> bytes:
    """Gzip of 3 GiB of spaces, as members of 64 MiB each, in about 3 MB."""
    return gzip.compress(b" " * (64 << 20)) * 48


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(_bomb, id="bomb"),
        pytest.param(lambda: b"{" + b'"a":[' * 100_000, id="nested"),
        pytest.param(lambda: b'{"format-version": 2, "properties": ["py-io-impl"]}', id="properties"),
        pytest.param(lambda: b'{"format-version": "2"}', id="version"),
        pytest.param(lambda: gzip.compress(b"{}")[:-9], id="cut"),
        pytest.param(lambda: b"\x1f\x8b" + bytes(100), id="not gzip"),
    ],
)
@pytest.mark.parametrize("name", ["00001-x.gz.metadata.json", "forged.json"])
def test_metadata_that_no_reader_can_hold(
    tmp_path: Path, catalog: Any, kms: dict[str, str], data: Callable[[], bytes], name: str
) -> None:
    catalog.create_table("ns.t", schema=SCHEMA)
    Path(tmp_path, "wh", name).write_bytes(data())
    with sqlite3.connect(tmp_path / "catalog.db") as database:
        database.execute("UPDATE iceberg_tables SET metadata_location = ?", (f"file://{tmp_path}/wh/{name}",))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            catalog.load_table("ns.t")
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


# --------------------------------------------------------------------------------------------- what PyIceberg is shown


def test_what_pyiceberg_does_not_know_stays_in_the_file(tmp_path: Path, table: Any, kms: dict[str, str]) -> None:
    shown = dict(table.properties)
    attacked(table, lambda raw: raw["properties"].update(OTHERS))
    loaded = sql_catalog(tmp_path, kms, **MIXED).load_table("ns.t")
    assert loaded.metadata.properties == shown
    assert not OTHERS.keys() & loaded.io.properties.keys()
    assert loaded.properties == {**shown, **OTHERS}
    loaded.append(rows(5, 6))
    loaded.transaction().set_properties({"write.target-file-size-bytes": "1000000"}).commit_transaction()
    loaded.delete("id = 0")
    with loaded.update_schema() as update:
        update.rename_column("name", "title")
    if KEY_ID in shown:
        rotate(loaded)
        rekey(loaded, what="manifests")
    else:
        encrypt(loaded, wrapping_key_id=MASTER)
    expire(loaded, keep=1)
    assert OTHERS.items() <= raw_of(loaded)["properties"].items()
    assert {**loaded.properties, **seal_of(loaded)} == raw_of(loaded)["properties"]
    assert ids(loaded) == [1, 2, 3, 4, 5]


def test_storage_of_a_table_in_plaintext_is_the_catalogs(tmp_path: Path, catalog: Any, kms: dict[str, str]) -> None:
    """Whoever changes its metadata does not get the client's credentials sent to another host."""
    table = catalog.create_table("ns.t", schema=SCHEMA)
    table.append(rows(0, 3))
    evil = {"s3.endpoint": "http://evil", "s3.proxy-uri": "http://evil", "warehouse": "s3://evil", "uri": "http://evil"}
    attacked(table, lambda raw: raw["properties"].update(evil))
    loaded = sql_catalog(tmp_path, kms, **MIXED).load_table("ns.t")
    assert "evil" not in str(loaded.io.properties)
    assert "evil" not in str(loaded.io.settings)
    assert ids(loaded) == [0, 1, 2]


def test_properties_of_a_user(tmp_path: Path, catalog: Catalog, table: Any, kms: dict[str, str]) -> None:
    """They are set, changed, seen and removed, though PyIceberg is not shown them."""
    before = table.properties
    table.transaction().set_properties({"comment": "x", "team": "y"}).commit_transaction()
    assert table.properties == {**before, "comment": "x", "team": "y"}
    loaded = sql_catalog(tmp_path, kms, **MIXED).load_table("ns.t")
    assert loaded.properties == table.properties
    loaded.transaction().set_properties({"comment": "z"}).commit_transaction()
    assert loaded.properties["comment"] == "z"
    with loaded.transaction() as transaction:
        transaction.remove_properties("comment")
        transaction.set_properties({"team": "a", "new": "b"})
        transaction.remove_properties("new", "team")
        transaction.append(rows(5, 6))
    assert loaded.properties == before
    assert raw_of(loaded)["properties"].keys() - before.keys() <= {"ags.seal"}
    assert GONE not in Path(loaded.metadata_location.removeprefix("file://")).read_text()
    with pytest.raises(KeyError):
        loaded.transaction().remove_properties("never").commit_transaction()
    table.refresh()
    assert table.properties == before
    assert ids(table) == [0, 1, 2, 3, 4, 5]
    made = catalog.create_table_transaction("ns.other", SCHEMA, properties={"comment": "x", **before})
    made.append(rows(0, 1))
    made.commit_transaction()
    assert catalog.load_table("ns.other").properties == {"comment": "x", **before}


def test_the_clients_own_configuration_chooses_code(tmp_path: Path, kms: dict[str, str]) -> None:
    io = "pyiceberg.io.fsspec.FsspecFileIO"
    catalog = sql_catalog(tmp_path, kms, **MIXED, **{"py-io-impl": io, "s3.retry-strategy-impl": "evil.run"})
    table = new_table(catalog)
    table.append(rows(0, 3))
    assert type(table.io.inner("/")).__name__ == "FsspecFileIO"
    assert table.io.settings["s3.retry-strategy-impl"] == "evil.run"
    assert ids(table) == [0, 1, 2]


def test_a_catalog_of_pyiceberg_with_our_file_io(tmp_path: Path, table: Any, kms: dict[str, str]) -> None:
    settings = {"py-io-impl": "ags_fast.iceberg.FileIO", **kms}
    attacked(table, lambda raw: raw["properties"].update({"py-io-impl": "evil.run"}))
    forged = tmp_path / "wh" / "forged.json"
    forged.write_text(Path(table.metadata_location.removeprefix("file://")).read_text())
    for place in (table.metadata_location, f"file://{forged}"):
        with pytest.raises(PolicyError, match="py-io-impl"):
            load_file_io(settings, place).new_input(place).open()


# -------------------------------------------------------------------------------------------------- PyIceberg's sources


def test_every_property_that_pyiceberg_reads_is_known() -> None:
    """If this fails with a new PyIceberg: put what is data into ``properties.toml``, all else into NOT_SHOWN."""
    found = pyiceberg_sources.walk(pyiceberg_sources.installed())
    assert len(found.read) > 130
    listed = {name for name in found.read if is_shown(name.replace("*", "x"), TABLE) or is_shown(name, SERVER)}
    code = {name for name in found.read if names_code(name)}
    assert not listed & code
    assert found.read - listed - code == NOT_SHOWN & found.read
    assert not found.unknown - UNKNOWN


def test_what_reaches_an_import_or_a_call_is_not_shown() -> None:
    found = pyiceberg_sources.walk(pyiceberg_sources.installed())
    assert found.importers == IMPORTERS
    assert {"py-io-impl", "py-catalog-impl", "s3.retry-strategy-impl", "auth", "impl"} <= found.calls
    assert {name for name in found.calls if not names_code(name)} <= NOT_SHOWN | CHOICES
    for name in found.calls - CHOICES:
        assert not is_shown(name, TABLE)
        assert not is_shown(name, SERVER)
    assert not any(is_shown(name, TABLE) for name in CHOICES)


def test_the_walk_finds_a_new_property(tmp_path: Path) -> None:
    """One that a later PyIceberg could have, in each way in which a value can choose what runs."""
    (tmp_path / "later.py").write_text(
        'CODEC = "write.codec.class"\n'
        "def codec(table_properties):\n"
        '    name = table_properties.get(CODEC, "x")\n'
        "    return importlib.import_module(name)\n"
        "def chosen(properties):\n"
        '    if kind := properties["write.kind"]:\n'
        "        return KINDS[kind](1)\n"
        "def made(config):\n"
        '    maker = MAKERS.get(config.get("write.maker"))\n'
        "    return maker()\n"
        "def data(properties):\n"
        '    return int(property_as_int(properties, f"write.{x}.size"))\n'
        "def unclear(properties, name):\n"
        "    return properties.get(name)\n"
    )
    found = pyiceberg_sources.walk(tmp_path)
    assert found.read == {"write.codec.class", "write.kind", "write.maker", "write.*"}
    assert found.calls == {"write.codec.class", "write.kind", "write.maker"}
    assert found.importers == {"later.py: codec"}
    assert found.unknown == {"later.py: properties.get(name)"}
