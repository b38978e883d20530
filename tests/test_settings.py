"""Settings that guard: each works in each place where a user may put it, or is refused there. None is mistyped."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")
pytest.importorskip("sqlalchemy", reason="needs the extra `iceberg`")

import fsspec
import pyiceberg.catalog
from datasets import MASTERS, make_kms
from iceberg_tables import KEY_ID, MASTER, MIXED, SCHEMA, ids, new_table, rows, sql_catalog

from ags_fast import Dataset, cli, jobs
from ags_fast.errors import KeyAccessError, PolicyError
from ags_fast.iceberg import FileIO, encrypt, load_catalog, open_table, rotate
from ags_fast.iceberg.commit import edit
from ags_fast.keys import clear_cache, load_kms
from ags_fast.keys.kms.accounts import UnaccountedError
from ags_fast.keys.kms.names import GUARDS, TABLE, check_catalog_names, check_names
from ags_fast.spark.datasource.options import ReadOptions

if TYPE_CHECKING:
    from collections.abc import Callable

Settings = dict[str, str]

PLAINTEXT = "encryption.plaintext-tables"
ALLOWED, HOOK = "encryption.allowed-key-ids", "kms.audit-hook"
VALUES = {ALLOWED: "another-key", PLAINTEXT: "read", HOOK: "test_settings:refuse"}
OBEYED = {ALLOWED: KeyAccessError, HOOK: UnaccountedError}
TYPO = {ALLOWED: "encryption.allowed-key-id", PLAINTEXT: "encryption.plaintext-table", HOOK: "kms.audit-hok"}


def refuse(event: dict[str, Any]) -> None:
    """An audit hook that lets no key out."""
    raise ConnectionError(f"nobody hears of {event['operation']}")


class Here:
    """A KMS, a catalog with an encrypted and a plaintext table, and a dataset, all written without a guard."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kms = folder, make_kms(folder, keys=MASTERS)
        self.sql = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/wh"}
        self.config = folder / "config.toml"
        catalog = sql_catalog(folder, self.kms, **MIXED)
        table = new_table(catalog, "secret")
        table.append(rows(0, 3))
        catalog.create_table("ns.plain", schema=SCHEMA).append(rows(0, 3))
        self.location = table.metadata_location
        self.plain_location = catalog.load_table("ns.plain").metadata_location
        (folder / "src").mkdir()
        (folder / "src" / "a").write_bytes(b"text")
        self.dataset = f"{folder}/dataset"
        jobs.encrypt_files(f"{folder}/src", self.dataset, kms=self.kms, wrapping_key_id=MASTER)

    def catalog(self, **settings: str) -> Any:
        """The catalog, without a guard."""
        return load_catalog("tests", kms=self.kms, **self.sql, **{**MIXED, **settings})

    def read(self, catalog: Any) -> None:
        """Read both tables of a catalog."""
        for name in ("ns.secret", "ns.plain"):
            assert len(catalog.load_table(name).scan().to_arrow()) == 3

    def read_locations(self, kms: Any, **settings: str) -> None:
        """Read both tables without a catalog."""
        for location in (self.location, self.plain_location):
            assert len(open_table(location, kms=kms, **settings).scan().to_arrow()) == 3

    def read_configured(self, settings: Settings, kms: Settings | None = None) -> None:
        """Read both tables of a catalog of PyIceberg's configuration."""
        given = [f"    {name}: {json.dumps(value)}" for name, value in {**self.sql, **settings}.items()]
        (self.folder / ".pyiceberg.yaml").write_text("\n".join(["catalog:", "  tests:", *given]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYICEBERG_HOME", str(self.folder))
            self.read(load_catalog("tests", kms=kms))

    def write_profile(self, settings: dict[str, Any], name: str = "p") -> None:
        """Write the configuration of ags-fast."""
        options = settings.pop("storage_options", {})
        lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in settings.items()]
        lines += [f"[profiles.{name}.storage_options]"] if options else []
        lines += [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in options.items()]
        self.config.write_text("\n".join([f"[profiles.{name}]", *lines, ""]))

    def command(self, *args: str) -> None:
        """Run ags-fast. Raises what the command ends with."""
        seen: list[BaseException] = []

        def code_of(error: BaseException) -> int:
            seen.append(error)
            return 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ags_fast.cli.run.code_of", code_of)
            code = cli.main(list(args))
        if seen:
            raise seen[0]
        assert code == 0

    def iceberg(self, name: str, *args: str) -> None:
        """Verify a table by the command."""
        given = [word for pair in self.sql.items() for word in ("--property", "=".join(pair))]
        self.command("iceberg", "files", name, "--catalog", "tests", *given, *args)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Here:
    return Here(tmp_path_factory.mktemp("settings"))


@pytest.fixture
def refusing(shared: Here, monkeypatch: pytest.MonkeyPatch) -> Here:
    """For tests in which nothing is changed, since all is refused."""
    monkeypatch.setenv("AGS_FAST_CONFIG", str(shared.config))
    clear_cache()
    return shared


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    made = Here(tmp_path)
    monkeypatch.setenv("AGS_FAST_CONFIG", str(made.config))
    clear_cache()
    return made


def create(catalog: Any, properties: Settings) -> Any:
    return catalog.create_table("ns.new", schema=SCHEMA, properties=properties)


def set_properties(table: Any, properties: Settings) -> None:
    table.transaction().set_properties(properties).commit_transaction()


def options(word: str, settings: Settings) -> list[str]:
    return [part for name, value in settings.items() for part in (word, f"{name}={value}")]


def keystore_options(kms: Settings) -> list[str]:
    return ["--keystore", kms["kms.local.path"], "--key-file", kms["kms.local.key-file"]]


def both(here: Here, *args: str) -> None:
    for name in ("ns.secret", "ns.plain"):
        here.iceberg(name, *args)


def vanilla(here: Here, settings: Settings) -> None:
    """PyIceberg's own catalog, with our FileIO."""
    catalog: Any = pyiceberg.catalog.load_catalog(
        "tests", **here.sql, **{"py-io-impl": "ags_fast.iceberg.FileIO"}, **here.kms, **settings
    )
    assert isinstance(catalog.load_table("ns.secret").io, FileIO)
    here.read(catalog)


def profile_of(here: Here, settings: dict[str, Any], *args: str) -> None:
    here.write_profile({**here.kms, **settings})
    here.command("cat", here.dataset, "a", "--profile", "p", *args)


def profile_of_another(here: Here, settings: Settings) -> None:
    here.write_profile({"encryption.kms-type": "aws", **settings})
    here.command("cat", here.dataset, "a", "--profile", "p", *options("--kms", here.kms))


def fsspec_read(**arguments: Any) -> None:
    fsspec.filesystem("ags", skip_instance_cache=True, **arguments).cat("a")


def spark_read(here: Here, given: Settings) -> None:
    """What a task of Spark does first: options are parsed and the dataset is opened as in an executor."""
    place = ReadOptions.of({"path": here.dataset, **given}).place
    place.open().open_file("a").read()


PLACES: dict[str, Callable[[Here, Settings], object]] = {
    "settings of a catalog, beside kms=": lambda here, g: here.read(
        load_catalog("tests", kms=here.kms, **here.sql, **g)
    ),
    "settings of a catalog": lambda here, g: here.read(load_catalog("tests", kms=None, **here.sql, **here.kms, **g)),
    "settings of a catalog, beside a client": lambda here, g: here.read(
        load_catalog("tests", kms=load_kms(here.kms), **here.sql, **g)
    ),
    "settings of a catalog of another KMS, beside kms=": lambda here, g: here.read(
        load_catalog(
            "tests", kms=here.kms, **here.sql, **{"encryption.kms-type": "aws", "kms.endpoint": "https://x"}, **g
        )
    ),
    "kms= of a catalog": lambda here, g: here.read(load_catalog("tests", kms=here.kms | g, **here.sql)),
    "client of a catalog": lambda here, g: here.read(load_catalog("tests", kms=load_kms(here.kms | g), **here.sql)),
    ".pyiceberg.yaml": lambda here, g: here.read_configured({**here.kms, **g}),
    ".pyiceberg.yaml, beside kms=": lambda here, g: here.read_configured(g, here.kms),
    "settings of open_table": lambda here, g: here.read_locations(here.kms, **g),
    "kms= of open_table": lambda here, g: here.read_locations(here.kms | g),
    "FileIO alone": vanilla,
    "properties of a new table": lambda here, g: create(here.catalog(), g | {KEY_ID: MASTER}),
    "properties of a new plaintext table": lambda here, g: create(here.catalog(), g),
    "properties of a table": lambda here, g: set_properties(here.catalog().load_table("ns.secret"), g),
    "properties of a plaintext table": lambda here, g: set_properties(here.catalog().load_table("ns.plain"), g),
    "new_kms= of a rotation": lambda here, g: rotate(here.catalog().load_table("ns.secret"), new_kms=here.kms | g),
    "kms= of a dataset": lambda here, g: Dataset.open(here.dataset, kms=here.kms | g).open_file("a").read(),
    "storage_options= of a dataset": lambda here, g: Dataset.open(here.dataset, kms=here.kms, storage_options=g),
    "storage_options= of a job": lambda here, g: jobs.verify_files(here.dataset, kms=here.kms, storage_options=g),
    "kms of fsspec": lambda here, g: fsspec_read(dataset=here.dataset, kms=here.kms | g),
    "arguments of fsspec": lambda here, g: fsspec_read(dataset=here.dataset, kms=here.kms, **g),
    "storage_options of fsspec": lambda here, g: fsspec_read(dataset=here.dataset, kms=here.kms, storage_options=g),
    "options of Spark": lambda here, g: spark_read(here, here.kms | g),
    "option kms of Spark": lambda here, g: spark_read(here, {"kms": json.dumps(here.kms | g)}),
    "options of Spark, beside kms": lambda here, g: spark_read(here, {"kms": json.dumps(here.kms), **g}),
    "storageOptions of Spark": lambda here, g: spark_read(here, here.kms | {"storageOptions": json.dumps(g)}),
    "a profile": profile_of,
    "a profile, beside --keystore": lambda here, g: profile_of(here, g, *keystore_options(here.kms)),
    "a profile of another KMS": profile_of_another,
    "storage_options of a profile": lambda here, g: profile_of(here, {"storage_options": g}),
    "--kms": lambda here, g: here.command("cat", here.dataset, "a", *options("--kms", here.kms | g)),
    "--kms of a table": lambda here, g: both(here, *options("--kms", here.kms | g)),
    "--property of a table": lambda here, g: both(here, *keystore_options(here.kms), *options("--property", g)),
}
REFUSED = (ValueError, TypeError, PolicyError, cli.codes.ConfigurationError)
# Where a guard works. Elsewhere it is refused.
CATALOGS = (
    "settings of a catalog",
    "settings of a catalog, beside kms=",
    "settings of a catalog of another KMS, beside kms=",
    ".pyiceberg.yaml",
    ".pyiceberg.yaml, beside kms=",
    "settings of open_table",
    "FileIO alone",
    "--property of a table",
)
WORKS = {
    PLAINTEXT: {*CATALOGS, "settings of a catalog, beside a client"},
    ALLOWED: {
        *CATALOGS,
        *(place for place in PLACES if place.startswith(("kms", "new_kms", "client", "option", "a profile", "--kms"))),
    },
}
WORKS[HOOK] = WORKS[ALLOWED]


@pytest.mark.parametrize("guard", VALUES)
@pytest.mark.parametrize("place", PLACES)
def test_a_guard_works_or_is_refused(refusing: Here, place: str, guard: str) -> None:
    if guard == PLAINTEXT and place in WORKS[guard]:  # which says what is allowed
        with pytest.raises(PolicyError, match=f"{guard}=read"):
            PLACES[place](refusing, {})
        # The command lists the files of encrypted tables only.
        with pytest.raises(PolicyError, match=r"no encryption\.key-id") if place.startswith("--") else nullcontext():
            PLACES[place](refusing, {guard: VALUES[guard]})
        return
    with pytest.raises(OBEYED[guard] if place in WORKS[guard] else REFUSED) as caught:
        PLACES[place](refusing, {guard: VALUES[guard]})
    assert guard in str(caught.value)


@pytest.mark.parametrize("guard", VALUES)
@pytest.mark.parametrize("place", PLACES)
def test_a_mistyped_guard_is_refused(refusing: Here, place: str, guard: str) -> None:
    with pytest.raises(REFUSED, match=TYPO[guard]) as caught:
        PLACES[place](refusing, {TYPO[guard]: VALUES[guard]})
    is_clients = place in WORKS[guard] and place != "FileIO alone"  # which asks the KMS
    if is_clients:
        assert f"did you mean {guard!r}?" in str(caught.value)


def test_every_guard_is_tried() -> None:
    assert {ALLOWED, HOOK} <= GUARDS


def test_a_guard_in_two_places(refusing: Here) -> None:
    """The same value may be given twice. Two values contradict each other, and none of them wins."""
    given = {ALLOWED: MASTER}
    refusing.read(load_catalog("tests", kms=refusing.kms | given, **refusing.sql, **given, **MIXED))
    with pytest.raises(ValueError, match=f"{ALLOWED}' is given in two places"):
        load_catalog("tests", kms=refusing.kms | given, **refusing.sql, **{ALLOWED: "*"})
    with pytest.raises(ValueError, match=f"{ALLOWED}' is given in two places"):
        spark_read(refusing, {"kms": json.dumps(refusing.kms | given), ALLOWED: "*"})
    refusing.write_profile({**refusing.kms, ALLOWED: "another-key"})  # of which the command line says the last word
    refusing.command(
        "cat", refusing.dataset, "a", "--profile", "p", *keystore_options(refusing.kms), "--kms", f"{ALLOWED}=*"
    )


def test_what_a_catalog_takes_from_its_settings_beside_kms(refusing: Here) -> None:
    catalog = load_catalog("tests", kms=refusing.kms, **refusing.sql, **{"kms.cache-lifetime-seconds": "5"})
    assert catalog.session.kms.cache_seconds == 5  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"'vault.address' is a property of the KMS vault, not of the KMS local"):
        load_catalog("tests", kms=refusing.kms, **refusing.sql, **{"vault.address": "https://vault"})
    own = {"encryption.kms-impl": "kms_clients:Plain", "kms.colour": "blue"}
    load_catalog("tests", kms=None, **refusing.sql, **own)
    with pytest.raises(ValueError, match=r"'encryption.colour' is not a property"):
        load_catalog("tests", kms=None, **refusing.sql, **own, **{"encryption.colour": "blue"})
    for name in ("encryption.key-id", "table-default.encryption.key-id", "ags.colour", "encrytion.key-id"):
        with pytest.raises(ValueError, match=f"{name}' is"):
            load_catalog("tests", kms=refusing.kms, **refusing.sql, **{name: MASTER})


def test_settings_of_pyiceberg_are_no_near_misses() -> None:
    found: set[str] = set()
    for path in Path(pyiceberg.__file__).parent.rglob("*.py"):
        found |= set(re.findall(r'"([a-z0-9]+(?:[.-][a-z0-9-]+)+)"', path.read_text()))
    assert len(found) > 300
    check_catalog_names(dict.fromkeys(found, ""))
    check_names(found, TABLE, "an Iceberg table")


# ---------------------------------------------------------------- tables

MISTYPED = (
    "encryption.key_id",
    "Encryption.Key-Id",
    "encryption.keyid",
    "encryption.key.id",
    "encryption-key-id",
    "encyrption.key-id",
    "encryption.data-key-lenght",
    "ags.key-id",
    " encryption.key-id",
)


@pytest.mark.parametrize("name", MISTYPED)
def test_a_mistyped_property_of_a_table(refusing: Here, name: str) -> None:
    """In `create_table` it would make a table in plaintext."""
    catalog = refusing.catalog()
    for make in (catalog.create_table, catalog.create_table_transaction, catalog.create_table_if_not_exists):
        with pytest.raises(ValueError, match=f"{name}' is not a property of an Iceberg table"):
            make("ns.new", SCHEMA, properties={name: MASTER})
    assert not catalog.table_exists("ns.new")
    for table in ("ns.secret", "ns.plain"):
        location = catalog.load_table(table).metadata_location
        with pytest.raises(ValueError, match=f"{name}' is not a property of an Iceberg table"):
            set_properties(catalog.load_table(table), {name: MASTER})
        assert catalog.load_table(table).metadata_location == location


def test_the_nearest_property_is_named(refusing: Here) -> None:
    with pytest.raises(ValueError, match=r"did you mean 'encryption.key-id'\?"):
        create(refusing.catalog(), {"encryption.keyid": MASTER})


def test_a_length_of_keys_without_a_master_key(here: Here) -> None:
    catalog, length = here.catalog(), {"encryption.data-key-length": "32"}
    with pytest.raises(PolicyError, match="would be in plaintext"):
        create(catalog, length)
    with pytest.raises(PolicyError, match="would be in plaintext"):
        set_properties(catalog.load_table("ns.plain"), length)
    create(catalog, length | {KEY_ID: MASTER}).append(rows(0, 2))
    set_properties(catalog.load_table("ns.secret"), length)


def test_properties_that_a_table_has_are_not_checked(here: Here) -> None:
    """Another engine may have set them. The table is read, and everything else of it is changed."""
    table, more = here.catalog().load_table("ns.secret"), {"encryption.of-tomorrow": "x"}
    edit(table, lambda raw: {**raw, "properties": {**raw["properties"], **more}})
    table = here.catalog().load_table("ns.secret")
    table.append(rows(3, 5))
    set_properties(table, {"colour": "blue"})
    with table.transaction() as change:
        change.remove_properties("encryption.of-tomorrow")
    assert ids(here.catalog().load_table("ns.secret")) == [0, 1, 2, 3, 4]


def test_a_master_key_that_is_not_there(here: Here) -> None:
    """The call that names it fails, not the first append."""
    catalog, bare = here.catalog(), load_catalog("tests", kms=None, **here.sql)
    unknown = {KEY_ID: "nobody"}
    for make in (catalog.create_table, catalog.create_table_transaction):
        with pytest.raises(KeyAccessError, match="no key 'nobody'"):
            make("ns.new", SCHEMA, properties=unknown)
    for make in (bare.create_table, bare.create_table_transaction):
        with pytest.raises(KeyAccessError, match="no KMS was given"):
            make("ns.new", SCHEMA, properties={KEY_ID: MASTER})
    assert not catalog.table_exists("ns.new")
    assert not list(here.folder.glob("wh/ns/new/**/*"))
    empty = create(catalog, {KEY_ID: MASTER})
    for what in ("kek", "mek"):
        with pytest.raises(KeyAccessError, match="no key 'nobody'"):
            rotate(empty, what=what, wrapping_key_id="nobody")
    plain = catalog.create_table("ns.empty", SCHEMA)
    with pytest.raises(KeyAccessError, match="no key 'nobody'"):
        encrypt(plain, wrapping_key_id="nobody")
    for name in ("ns.new", "ns.empty"):
        catalog.load_table(name).append(rows(0, 2))
        assert ids(catalog.load_table(name)) == [0, 1]
