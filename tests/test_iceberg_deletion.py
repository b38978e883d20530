"""Whoever may write to the storage makes a table's metadata name files of others, and the owner deletes none of them.

The attacks of issue 28, number 2, each on local files and on an S3 server. The victim may delete all files there.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import iceberg_tables
import pyarrow as pa
from iceberg_tables import KEY_ID, MASTER, MIXED, SCHEMA, ids, new_table, rows
from pyiceberg.catalog.sql import SqlCatalog as VanillaCatalog
from pyiceberg.io import load_file_io

from ags_fast.errors import PolicyError
from ags_fast.iceberg import clear_cache, encrypt, expire, load_catalog
from ags_fast.iceberg.catalogs.base import EncryptedCatalog
from ags_fast.iceberg.commit import raw_metadata
from ags_fast.iceberg.garbage import below, own_folders, place
from ags_fast.jobs import LocalEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyiceberg.table import Table

    from ags_fast.jobs.results import JobResult

LEAST = {"format-version": 3, "location": "x", "last-updated-ms": 1, "last-column-id": 1}  # of metadata
ALLOW = {"encryption.plaintext-files": "allow"}
PURGES = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "1",
}


class Lake:
    """A warehouse, and what an attacker does in it."""

    def __init__(self, folder: Path, kms: dict[str, str], root: str, properties: dict[str, str]) -> None:
        self.folder, self._kms, self.root, self.properties = folder, kms, root, properties
        self.files: Any = load_file_io({**properties}, root)

    def catalog(self, **more: Any) -> Any:
        """The victim's catalog, loaded anew."""
        clear_cache()
        return iceberg_tables.sql_catalog(
            self.folder, self._kms, warehouse=f"{self.root}/wh", **{**self.properties, **MIXED, **more}
        )

    def table(self, name: str = "t", **more: Any) -> Any:
        return self.catalog(**more).load_table(f"ns.{name}")

    def write(self, location: str, data: bytes) -> str:
        with self.files.new_output(location).create(overwrite=True) as file:
            file.write(data)
        return location

    def read(self, location: str) -> bytes:
        with self.files.new_input(location).open() as file:
            return bytes(file.read())

    def exists(self, location: str) -> bool:
        return bool(self.files.new_input(location).exists())

    def attack(self, change: Callable[[dict[str, Any]], object], name: str = "t") -> Table:
        """Change the metadata file in the storage, and return the table as its owner loads it then."""
        location = self.table(name).metadata_location
        raw = json.loads(self.read(location))
        change(raw)
        self.write(location, json.dumps(raw).encode())
        return self.table(name)


@pytest.fixture(params=["local", "s3"])
def lake(request: pytest.FixtureRequest, tmp_path: Path, kms: dict[str, str]) -> Lake:
    if request.param == "local":
        return Lake(tmp_path, kms, f"file://{tmp_path}", {})
    server = request.getfixturevalue("moto_s3")
    bucket = f"d{abs(hash(str(tmp_path)))}"
    server.client().create_bucket(Bucket=bucket)
    properties = {
        "s3.endpoint": server.url,
        "s3.access-key-id": server.key,
        "s3.secret-access-key": server.secret,
        "s3.region": "us-east-1",
    }
    return Lake(tmp_path, kms, f"s3://{bucket}", properties)


@pytest.fixture
def local(tmp_path: Path, kms: dict[str, str]) -> Lake:
    return Lake(tmp_path, kms, f"file://{tmp_path}", {})


def filled(lake: Lake, name: str = "t", **properties: str) -> Any:
    table = new_table(lake.catalog(), name)
    if properties:
        table.transaction().set_properties(properties).commit_transaction()
    for i in range(3):
        table.append(rows(3 * i, 3 * i + 3))
    return table


def skipped(result: JobResult) -> dict[str, str]:
    return {row.src: str(row.error) for row in result.rows if row.status == "skipped"}


def log_of(*locations: str) -> list[dict[str, Any]]:
    return [{"metadata-file": one, "timestamp-ms": 1_700_000_000_000 + i} for i, one in enumerate(locations)]


def named_by(table: Any) -> set[str]:
    """The files that all snapshots of a table need, and its metadata file."""
    from ags_fast.iceberg import files

    found = {table.metadata_location}
    for one in table.metadata.snapshots:
        found |= {file.path for file in files(table, snapshot_id=one.snapshot_id)}
    return found


# ------------------------------------------------------------------------------------------------------ the six attacks


def foreign(lake: Lake, table: Any) -> dict[str, str]:
    """Files that are not the table's, and the reason by which each of them stays."""
    other = filled(lake, "other")
    uuid = raw_metadata(table)["table-uuid"]
    own = table.metadata_location.rpartition("/")[0]
    backup = json.dumps({**LEAST, "table-uuid": uuid}).encode()
    return {
        lake.write(f"{lake.root}/secret/thesis.odt", b"a thesis"): "not below",
        lake.write(f"{lake.root}/backup/t/metadata/00001-a.metadata.json", backup): "not below",
        lake.write(f"{own}-old/00001-a.metadata.json", backup): "not below",
        other.metadata_location: "not below",
        next(iter(file.file.file_path for file in other.scan().plan_files())): "not below",
        lake.write(
            f"{own}/of-another.metadata.json", json.dumps({**LEAST, "table-uuid": "x"}).encode()
        ): "another table",
        lake.write(f"{own}/note.txt", b"a note"): "not table metadata",
        table.current_snapshot().manifest_list: "not table metadata",
        table.metadata_location: "the catalog names",
    }


def test_a_metadata_log_deletes_no_foreign_file(lake: Lake) -> None:
    table = filled(lake)
    old = [one["metadata-file"] for one in raw_metadata(table)["metadata-log"]]
    named = foreign(lake, table)
    hidden = f"{old[0].rpartition('/')[0]}/../../other/metadata/../../../../secret/thesis.odt"
    attacked = lake.attack(lambda raw: raw.update({"metadata-log": log_of(*named, hidden, *old)}))
    planned = expire(attacked, dry_run=True)
    done = expire(attacked)
    assert done.failed == []
    left = skipped(done)
    assert left.keys() == {*named, hidden} == skipped(planned).keys()
    assert all(named.get(path, "not below") in why for path, why in left.items())
    assert all(map(lake.exists, named))
    assert not any(map(lake.exists, old))  # what is the table's own goes as before
    assert "stay" in done.warnings[0]
    assert ids(lake.table()) == list(range(9))
    assert ids(lake.table("other")) == list(range(9))


def test_statistics_delete_no_foreign_file(lake: Lake) -> None:
    """Nor a file that the table needs, whatever its spelling."""
    table = filled(lake)
    own = table.metadata_location.rpartition("/")[0]
    live = [one for one in named_by(table) if one != table.metadata_location]
    oldest = table.metadata.snapshots[0].snapshot_id
    others = [
        lake.write(f"{lake.root}/secret/x.puffin", b"PFA1....PFA1"),
        lake.write(f"{table.location()}/data/x.puffin", b"PFA1....PFA1"),  # nobody writes statistics there
        lake.write(f"{own}/note.txt", b"a note"),
        *live,
        table.metadata_location,
        *(one for path in live for one in spellings(path)),
    ]
    mine = [
        lake.write(f"{own}/1-a.stats", b"PFA1....PFA1"),
        lake.write(f"{own}/partition-stats-1-a.parquet", b"PAR1....PAR1"),
        lake.write(f"{own}/2-b.stats", b"PFA1....PFA1"),
    ]
    entry = {"snapshot-id": oldest, "file-size-in-bytes": 9, "file-footer-size-in-bytes": 3, "blob-metadata": []}

    def change(raw: dict[str, Any]) -> None:
        raw["statistics"] = [{**entry, "statistics-path": path} for path in (*others, mine[0], mine[2])]
        raw["partition-statistics"] = [{"snapshot-id": oldest, "statistics-path": mine[1], "file-size-in-bytes": 9}]

    done = expire(lake.attack(change))
    assert done.failed == []
    assert all(lake.exists(path) for path in others[:3])
    assert not any(map(lake.exists, mine))
    fresh = lake.table()
    assert ids(fresh) == list(range(9))
    assert all(map(lake.exists, named_by(fresh)))


def spellings(location: str) -> list[str]:
    """Other spellings of a location that PyArrow's FileIO takes, or that a storage may take."""
    scheme, _, rest = location.partition("://")
    folder, _, name = location.rpartition("/")
    found = [f"{folder}/./{name}", f"{folder}//{name}", f"{folder}/x/../{name}", f"{folder}/%2e/{name}"]
    found += [f"{location}?a=b", f"{location}#a", f"{folder}/{name.replace('.', '%2E')}"]
    if scheme == "file":
        return [*found, f"file:///{rest}", f"file:{rest}", rest, f"FILE://{rest}", f"file://localhost{rest}"]
    return [*found, f"s3a://{rest}", f"S3://{rest}"]


def plain_snapshot(lake: Lake, files: list[str], snapshot_id: int) -> dict[str, Any]:
    """Forge a snapshot in plaintext whose list names these files, as a writer that knows nothing of encryption can."""
    vanilla = VanillaCatalog(
        f"forger{snapshot_id}", uri=f"sqlite:///{lake.folder}/forger{snapshot_id}.db", warehouse=f"{lake.root}/forger"
    )
    vanilla.properties.update(lake.properties)
    vanilla.create_namespace("ns")
    made = vanilla.create_table("ns.t", schema=SCHEMA)
    with made.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
        from pyiceberg.typedef import Record

        for path in files:
            fields: Any = {
                "content": DataFileContent.DATA,
                "file_path": path,
                "file_format": FileFormat.PARQUET,
                "partition": Record(),
                "record_count": 1,
                "file_size_in_bytes": 9,
            }
            made_file = DataFile.from_args(**fields)
            made_file._spec_id = 0  # noqa: SLF001 (as PyIceberg's own writers do)
            append.append_data_file(made_file)
    raw = json.loads(lake.read(made.metadata_location))
    return {**raw["snapshots"][0], "snapshot-id": snapshot_id, "sequence-number": 1, "timestamp-ms": 1}


def with_plain_snapshot(snapshot: dict[str, Any]) -> Callable[[dict[str, Any]], object]:
    def change(raw: dict[str, Any]) -> None:
        raw["snapshots"].insert(0, snapshot)
        raw["properties"]["encryption.plaintext-snapshots"] = str(snapshot["snapshot-id"])

    return change


@pytest.mark.parametrize("allows", [False, True])
def test_a_list_in_plaintext_deletes_no_foreign_file(lake: Lake, allows: bool) -> None:
    table, other = filled(lake), filled(lake, "other")
    live = [one.file.file_path for one in table.scan().plan_files()]
    theirs = [one.file.file_path for one in other.scan().plan_files()]
    thesis = lake.write(f"{lake.root}/secret/thesis.odt", b"a thesis")
    plain = lake.write(f"{table.location()}/data/old.parquet", b"PAR1")  # as from before the encryption
    named = [thesis, plain, *theirs, *live, *(one for path in live for one in spellings(path))]
    snapshot = plain_snapshot(lake, named, 7)
    attacked = lake.attack(with_plain_snapshot(snapshot))
    attacked = lake.table(**ALLOW) if allows else attacked
    done = expire(attacked)
    assert done.failed == []
    left = skipped(done)
    assert {thesis, *theirs} <= left.keys()
    assert snapshot["manifest-list"] in left  # it is the forger's, in his own folder
    assert lake.exists(thesis)
    assert lake.exists(plain) == (not allows)
    assert (plain in left) == (not allows)
    fresh = lake.table()
    assert (7 in {one.snapshot_id for one in fresh.metadata.snapshots}) == (not allows)
    assert ids(fresh) == list(range(9))
    assert ids(lake.table("other")) == list(range(9))


def test_purge_deletes_no_foreign_file(lake: Lake) -> None:
    table = filled(lake)
    oldest = table.metadata.snapshots[0].snapshot_id
    own = named_by(table) | {one["metadata-file"] for one in raw_metadata(table)["metadata-log"]}
    named = [one for one in foreign(lake, table) if one not in own]
    statistics = lake.write(f"{lake.root}/secret/x.puffin", b"PFA1")
    plain = plain_snapshot(lake, named, 7)
    entry = {"snapshot-id": oldest, "statistics-path": statistics, "file-size-in-bytes": 9}

    def change(raw: dict[str, Any]) -> None:
        raw["metadata-log"] += log_of(*named)
        raw["statistics"] = [{**entry, "file-footer-size-in-bytes": 3, "blob-metadata": []}]
        with_plain_snapshot(plain)(raw)

    lake.attack(change)
    for settings in ({}, ALLOW):
        catalog = lake.catalog(**settings)
        backup = {path: lake.read(path) for path in own}
        with pytest.warns(UserWarning, match="files stay, such as"):
            catalog.purge_table("ns.t")
        assert not any(map(lake.exists, own))
        mine = f"{table.location()}/"  # there, files that lists in plaintext name go, too, if that is allowed
        outside = [one for one in named if not (settings and one.startswith(mine))]
        assert all(map(lake.exists, (*outside, statistics, plain["manifest-list"])))
        for path, data in backup.items():
            lake.write(path, data)
        catalog.register_table("ns.t", table.metadata_location)
    assert ids(lake.table("other")) == list(range(9))


def test_delete_after_commit_deletes_no_foreign_file(lake: Lake) -> None:
    table = filled(lake, **PURGES)
    old = [one["metadata-file"] for one in raw_metadata(table)["metadata-log"]]
    assert len(old) == 1
    named = foreign(lake, table)
    attacked = lake.attack(lambda raw: raw.update({"metadata-log": log_of(*named, *old)}))
    with pytest.warns(UserWarning, match="files stay, such as"):
        attacked.append(rows(9, 10))
    assert all(map(lake.exists, named))
    assert not lake.exists(old[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attacked.append(rows(10, 11))  # of the honest log that follows, files go without a warning
    assert not lake.exists(table.metadata_location)
    assert ids(lake.table()) == list(range(11))


def test_other_spellings_are_the_same_file(local: Lake) -> None:
    """Of the current metadata file, of the one that the expiry began on, and of live files: they stay."""
    table = filled(local)
    named = spellings(table.metadata_location)
    attacked = local.attack(lambda raw: raw.update({"metadata-log": log_of(*named)}))
    done = expire(attacked)
    assert skipped(done).keys() == set(named)
    assert local.exists(table.metadata_location)
    assert ids(local.table()) == list(range(9))


# --------------------------------------------------------------------------------------------------------- other tables


def test_a_snapshot_of_another_table(lake: Lake) -> None:
    """Its list is sealed, under the same master key. But its files are below another table of the catalog."""
    filled(lake)
    other = filled(lake, "other")
    theirs = raw_metadata(other)

    def change(raw: dict[str, Any]) -> None:
        raw["snapshots"] = [*copy.deepcopy(theirs["snapshots"]), *raw["snapshots"]]
        raw["encryption-keys"] += copy.deepcopy(theirs["encryption-keys"])

    attacked = lake.attack(change)
    done = expire(attacked)
    assert done.failed == []
    assert {why.rpartition(":")[0] for why in skipped(done).values()} == {
        "it is in a folder of the catalog's table ns.other"
    }
    assert all(map(lake.exists, named_by(lake.table("other"))))
    assert ids(lake.table("other")) == list(range(9))


def test_roots_of_the_client(lake: Lake) -> None:
    """Below them goes what metadata name, but no file of another table; a folder with a longer name is another."""
    table = filled(lake)
    other = filled(lake, "other")
    uuid = raw_metadata(table)["table-uuid"]
    data = json.dumps({**LEAST, "table-uuid": uuid}).encode()
    old, older, longer = (
        lake.write(f"{lake.root}/{name}/metadata/00001-a.metadata.json", data) for name in ("old", "older", "old-x")
    )
    named = [old, older, longer, other.metadata_location]
    lake.attack(lambda raw: raw.update({"metadata-log": log_of(*named)}))
    scheme, _, rest = lake.root.partition("://")
    for root in (f" {scheme.upper()}://{rest}//x/../old/ , {lake.root}/wh", f"{lake.root}/other,{lake.root}/wh/ns"):
        attacked = lake.table(**{"encryption.delete-roots": root})
        left = skipped(expire(attacked, dry_run=True))
        assert left.keys() == set(named) - ({old} if "old" in root else set())
    done = expire(lake.table(**{"encryption.delete-roots": f"{lake.root}/old/,{lake.root}/wh"}))
    assert skipped(done).keys() == {older, longer, other.metadata_location}
    assert not lake.exists(old)
    assert ids(lake.table("other")) == list(range(9))


def test_roots_are_the_clients(local: Lake) -> None:
    """No table sets them, and a mistyped name is refused."""
    catalog = local.catalog()
    with pytest.raises((PolicyError, ValueError), match="delete-roots"):
        catalog.create_table("ns.t", schema=SCHEMA, properties={KEY_ID: MASTER, "encryption.delete-roots": "file:///"})
    with pytest.raises(ValueError, match="delete-roots"):
        local.catalog(**{"encryption.delete-root": "file:///"})
    table = filled(local)
    thesis = local.write(f"{local.root}/secret/x.stats", b"PFA1")
    oldest = table.metadata.snapshots[0].snapshot_id
    entry = {"snapshot-id": oldest, "statistics-path": thesis, "file-size-in-bytes": 9}

    def change(raw: dict[str, Any]) -> None:
        raw["statistics"] = [{**entry, "file-footer-size-in-bytes": 3, "blob-metadata": []}]
        raw["properties"]["encryption.delete-roots"] = local.root

    location = table.metadata_location
    try:
        attacked = local.attack(change)
    except PolicyError:  # a client's setting in the metadata may as well be refused
        assert local.exists(location)
    else:
        assert skipped(expire(attacked)).keys() >= {thesis}
    assert local.exists(thesis)


def test_a_table_in_the_folder_of_another(local: Lake) -> None:
    """The deeper folder has its files; nobody else's lists in plaintext name them."""
    table = filled(local)
    catalog = local.catalog()
    inner = catalog.create_table(
        "ns.inner", schema=SCHEMA, location=f"{table.location()}/inner", properties={KEY_ID: MASTER}
    )
    inner.append(rows(0, 3))
    theirs = [one.file.file_path for one in inner.scan().plan_files()]
    local.attack(with_plain_snapshot(plain_snapshot(local, theirs, 7)))
    done = expire(local.table(**ALLOW))
    assert "ns.inner" in skipped(done)[theirs[0]]
    assert ids(local.table("inner")) == [0, 1, 2]


def test_tables_that_share_their_folders(local: Lake) -> None:
    """Each deletes what its own sealed lists name. What plaintext names stays."""
    table, catalog = filled(local), local.catalog()
    twin = catalog.create_table("ns.twin", schema=SCHEMA, location=table.location(), properties={KEY_ID: MASTER})
    twin.append(rows(0, 3))
    theirs = [one.file.file_path for one in twin.scan().plan_files()]
    plain = plain_snapshot(local, theirs, 7)
    more = log_of(twin.metadata_location, *(one["metadata-file"] for one in raw_metadata(twin)["metadata-log"]))

    def change(raw: dict[str, Any]) -> None:
        with_plain_snapshot(plain)(raw)
        raw["metadata-log"] += more

    local.attack(change)
    expire(local.table(**ALLOW))
    assert ids(local.table("twin")) == [0, 1, 2]
    local.table().append(rows(9, 10))
    local.attack(change)
    with pytest.warns(UserWarning, match="files stay"):
        local.catalog(**ALLOW).purge_table("ns.t")
    assert ids(local.table("twin")) == [0, 1, 2]


def test_two_names_for_one_table(lake: Lake, tmp_path: Path, kms: dict[str, str]) -> None:
    """In a second catalog, which nobody can ask: the metadata file that it names stays."""
    table = filled(lake)
    second = load_catalog(
        "second",
        kms=kms,
        type="sql",
        uri=f"sqlite:///{tmp_path}/second.db",
        warehouse=f"{lake.root}/wh",
        **lake.properties,
    )
    second.create_namespace("b")
    second.register_table("b.t", table.metadata_location)
    assert expire(lake.table()).failed == []
    clear_cache()
    again = second.load_table("b.t")
    assert again.metadata_location == table.metadata_location
    assert ids(again) == list(range(9))
    again.append(rows(9, 10))
    assert ids(second.load_table("b.t")) == list(range(10))


def test_two_names_in_one_catalog(local: Lake) -> None:
    """To purge one would take the files of the other."""
    table = filled(local)
    catalog = local.catalog()
    catalog.register_table("ns.again", table.metadata_location)
    with pytest.raises(PolicyError, match=r"ns\.again"):
        catalog.purge_table("ns.t")
    assert ids(local.table("again")) == ids(local.table()) == list(range(9))
    catalog.drop_table("ns.again")
    catalog.purge_table("ns.t")
    assert not [path for path in Path(local.folder, "wh").rglob("*") if path.is_file()]


def test_where_other_tables_are(local: Lake) -> None:
    """The catalog says it, and no metadata are read: also not those that this client would refuse."""
    filled(local)
    catalog = local.catalog()
    catalog.create_namespace("a.b")
    made = [catalog.create_table(name, schema=SCHEMA) for name in ("ns.u", "a.b.v")]
    local.write(made[1].metadata_location, b"no JSON")
    refuses = local.catalog(**{"encryption.plaintext-files": "refuse"})
    assert dict(refuses.other_tables(("ns", "t"))) == {
        "ns.u": made[0].metadata_location,
        "a.b.v": made[1].metadata_location,
    }


def test_a_catalog_that_does_not_answer(local: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may be another table's stays then; what is surely the table's own goes."""
    table = filled(local)
    own = table.metadata_location.rpartition("/")[0]
    statistics = local.write(f"{own}/1.stats", b"PFA1")
    oldest = table.metadata.snapshots[0].snapshot_id
    entry = {"snapshot-id": oldest, "statistics-path": statistics, "file-size-in-bytes": 9}
    attacked = local.attack(
        lambda raw: raw.update(statistics=[{**entry, "file-footer-size-in-bytes": 3, "blob-metadata": []}])
    )

    def refuse(*_: Any) -> Any:
        raise PermissionError("you may not list tables")

    monkeypatch.setattr(EncryptedCatalog, "list_namespaces", refuse, raising=False)
    done = expire(attacked)
    assert "you may not list tables" in skipped(done)[statistics]
    assert done.counts["ok"] > 5


# ----------------------------------------------------------------------------------------------------- links and places


def test_a_link_below_the_own_folder_leads_nowhere(local: Lake, tmp_path: Path) -> None:
    table = filled(local)
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "x.stats").write_bytes(b"PFA1")
    own = table.metadata_location.rpartition("/")[0]
    os.symlink(secret, Path(own.removeprefix("file://"), "link"))
    oldest = table.metadata.snapshots[0].snapshot_id
    entry = {"snapshot-id": oldest, "statistics-path": f"{own}/link/x.stats", "file-size-in-bytes": 9}
    attacked = local.attack(
        lambda raw: raw.update(statistics=[{**entry, "file-footer-size-in-bytes": 3, "blob-metadata": []}])
    )
    assert f"{own}/link/x.stats" in skipped(expire(attacked))
    assert (secret / "x.stats").exists()


def test_places() -> None:
    assert own_folders("s3://b/t/metadata/0.metadata.json") == ["s3://b/t/metadata", "s3://b/t"]
    assert own_folders("s3://b/t/other/0.metadata.json") == ["s3://b/t/other"]
    for location in ("file:///a/b/c", "/a/b/c"):
        assert all(place(one) == place(location) for one in spellings(f"file://{location.removeprefix('file://')}"))
    assert all(place(one) == place("s3://a/b/c") for one in spellings("s3://a/b/c"))
    root = "s3://b/t"
    inside = ["s3://b/t/x", "s3a://b/t/x", "s3://b//t/x", "s3://b/t/y/../x", "S3://b/t/a=%2F/x"]
    outside = ["s3://b/t", "s3://b/t/", "s3://b/t2/x", "s3://b/t/../x", "s3://b/t/%2e%2e/x", "s3://c/t/x", "gs://b/t/x"]
    outside += ["s3://b/%74/x", "/b/t/x", "file:///b/t/x", "s3://b/t/..%2fx", "s3://b/t/%2E%2E%2Fu"]
    assert [one for one in inside if not below(one, root)] == []
    assert [one for one in outside if below(one, root)] == []
    assert below("file:////a/b", "file:///")
    assert not below("s3://a/b", "file:///")


# ------------------------------------------------------------------------------------------------ what should go, goes


@pytest.mark.parametrize("engine", [None, LocalEngine(0)])
def test_all_that_is_the_tables_goes(lake: Lake, engine: LocalEngine | None) -> None:
    """Of a table that was in plaintext, too, if the client's configuration allows it."""
    made = lake.catalog().create_table("ns.t", schema=SCHEMA)
    made.append(rows(0, 3))
    made.append(rows(3, 6))
    encrypt(made, wrapping_key_id=MASTER, engine=LocalEngine(0)).raise_for_failures()
    table = lake.table(**ALLOW)
    table.delete("id = 1")
    table.overwrite(rows(6, 9), overwrite_filter="id > 3")
    done = expire(table, engine=engine)
    assert done.counts["skipped"] == done.counts["failed"] == 0
    expire(table, engine=engine)
    assert stored(lake) == named_by(lake.table())
    assert ids(lake.table()) == [0, 2, 3, 6, 7, 8]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lake.catalog().purge_table("ns.t")
    assert stored(lake) == set()


def stored(lake: Lake) -> set[str]:
    from ags_fast.iceberg.orphans import stored_files

    class Io:
        def inner(self, _: str) -> Any:
            return lake.files

    return {one.path for one in stored_files(Io(), f"{lake.root}/wh") if not one.path.endswith("/")}  # type: ignore[arg-type]


def test_files_elsewhere_that_sealed_lists_name(lake: Lake) -> None:
    """With the property ``write.data.path``: the list proves that they are the table's."""
    table = filled(lake, **{"write.data.path": f"{lake.root}/elsewhere"})
    table.overwrite(pa.table({"id": [1], "name": ["x"]}, schema=SCHEMA))
    gone = {row.src for row in expire(table, dry_run=True).rows if row.format == "data"}
    assert len(gone) == 3
    assert all(one.startswith(f"{lake.root}/elsewhere/") for one in gone)
    done = expire(table)
    assert done.counts["skipped"] == 0
    assert not any(map(lake.exists, gone))
