"""Attackers who write metadata and files in plaintext: no reader takes their rows, whatever the metadata permit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from iceberg_damage import plaintext_data, plaintext_manifest, relisted
from iceberg_tables import MIXED, SCHEMA, ids, new_table, open_whole, rows, sql_catalog

from ags_fast.errors import AgsError, IntegrityError, PolicyError
from ags_fast.iceberg import delete, encrypt, expire, files, open_table, rekey, rotate, session, verify
from ags_fast.iceberg.commit import edit, raw_metadata
from ags_fast.iceberg.container import read_container, write_container
from ags_fast.iceberg.writing import new_key
from ags_fast.jobs import LocalEngine
from ags_fast.keys.metadata import StandardKeyMetadata
from ags_fast.parquet import Keys, encrypt_file

if TYPE_CHECKING:
    from collections.abc import Callable

ALLOWS = {"encryption.plaintext-files": "allow"}
READS = {"encryption.plaintext-tables": "read"}
HERE = LocalEngine(0)
FORGED = 666  # the id of a row, and of a snapshot, that an attacker makes
Raw = dict[str, Any]


def local(location: str) -> Path:
    return Path(location.removeprefix("file://"))


class Victim:
    """An encrypted table, and what an attacker has: its folder, and a snapshot in plaintext with rows of his own."""

    def __init__(self, folder: Path, kms: dict[str, str]) -> None:
        self.folder, self.kms = folder, kms
        catalog = sql_catalog(folder, kms, **MIXED)
        forged = catalog.create_table("ns.forged", schema=SCHEMA)
        forged.append(rows(FORGED, FORGED + 1))
        self.forged: Raw = json.loads(local(forged.metadata_location).read_bytes())["snapshots"][-1]
        self.forged |= {"snapshot-id": FORGED, "sequence-number": 3}
        self.table = new_table(catalog)
        self.table.append(rows(0, 3))
        self.table.append(rows(3, 6))
        self.location = self.table.metadata_location

    def catalog(self, **properties: str) -> Any:
        return sql_catalog(self.folder, self.kms, **properties)

    def change(self, change: Callable[[Raw], object]) -> None:
        """Change the metadata file in its place."""
        path = local(self.location)
        raw = json.loads(path.read_bytes())
        change(raw)
        path.write_text(json.dumps(raw))

    def with_forged(self, raw: Raw, **properties: str) -> None:
        """Make the forged snapshot the newest."""
        raw["snapshots"].append(self.forged)
        raw["current-snapshot-id"] = raw["refs"]["main"]["snapshot-id"] = FORGED
        raw["snapshot-log"].append({"snapshot-id": FORGED, "timestamp-ms": raw["last-updated-ms"]})
        raw["last-sequence-number"] = 3
        raw["properties"] |= properties


@pytest.fixture
def victim(tmp_path: Path, kms: dict[str, str]) -> Victim:
    return Victim(tmp_path, kms)


def allowed(victim: Victim, raw: Raw) -> None:
    victim.with_forged(raw, **ALLOWS)


def listed(victim: Victim, raw: Raw) -> None:
    victim.with_forged(raw, **ALLOWS, **{"encryption.plaintext-snapshots": str(FORGED)})


def stripped_snapshot(victim: Victim, raw: Raw) -> None:
    """The newest snapshot has no key, and a list in plaintext."""
    one = raw["snapshots"][-1]
    del one["key-id"]
    one["manifest-list"] = victim.forged["manifest-list"]
    raw["properties"] |= {**ALLOWS, "encryption.plaintext-snapshots": str(one["snapshot-id"])}


def other_list(victim: Victim, raw: Raw) -> None:
    """The newest snapshot has its key, and a list in plaintext."""
    raw["snapshots"][-1]["manifest-list"] = victim.forged["manifest-list"]
    raw["properties"] |= ALLOWS


def overwritten_list(victim: Victim, raw: Raw) -> None:
    shutil.copyfile(local(victim.forged["manifest-list"]), local(raw["snapshots"][-1]["manifest-list"]))
    raw["properties"] |= ALLOWS


def overwritten_data(victim: Victim, raw: Raw) -> None:
    forged = next((victim.folder / "wh").glob("ns/forged/data/*.parquet"))
    for path in (victim.folder / "wh").glob("ns/t/data/*.parquet"):
        shutil.copyfile(forged, path)
    raw["properties"] |= ALLOWS


def stripped_table(victim: Victim, raw: Raw) -> None:
    """All signs of encryption are gone: a table in plaintext."""
    raw["snapshots"] = []
    raw["snapshot-log"] = []
    victim.with_forged(raw)
    del raw["properties"]["encryption.key-id"], raw["encryption-keys"], raw["next-row-id"]
    raw["format-version"] = 2


MORE = [pytest.param(one, marks=pytest.mark.more) for one in (allowed, other_list, overwritten_list, overwritten_data)]
ATTACKS = (listed, stripped_snapshot, *MORE)
USES: dict[str, Callable[[Any], object]] = {
    "scan": lambda table: ids(table),
    "snapshot": lambda table: ids(table, snapshot_id=FORGED),
    "count": lambda table: table.scan().count(),
    "files": lambda table: list(files(table)),
    "inspect": lambda table: table.inspect.files(),
    "delete": lambda table: delete(table, "id > 1"),
    "PyIceberg's delete": lambda table: table.transaction().delete("id = 0"),
    "overwrite": lambda table: table.overwrite(rows(0, 1), overwrite_filter="id > 1"),
    "append": lambda table: table.append(rows(7, 8)),
    "rekey": lambda table: rekey(table),
    "rekey data": lambda table: rekey(table, what="data", engine=HERE).raise_for_failures(),
}
# What goes on without files of the newest snapshot, or without their rows.
UNSEEN: dict[Any, set[str]] = {overwritten_data: {"count", "files", "inspect", "append", "rekey"}}


@pytest.mark.parametrize("attack", ATTACKS)
def test_forged_rows_are_refused(victim: Victim, attack: Callable[[Victim, Raw], None]) -> None:
    seen = victim.catalog().load_table("ns.t")
    assert ids(seen) == list(range(6))
    victim.change(lambda raw: attack(victim, raw))
    folder = local(victim.location).parent
    before = {path: path.read_bytes() for path in folder.glob("*.metadata.json")}
    uses = {name: use for name, use in USES.items() if name not in UNSEEN.get(attack, ())}
    for name, use in uses.items():
        readers: list[Callable[[], Any]] = [lambda: victim.catalog().load_table("ns.t"), seen.refresh]
        if name in ("scan", "snapshot", "count", "files", "inspect"):
            readers.append(lambda: open_table(victim.location, kms=victim.kms))
        for reader in readers:
            with pytest.raises((AgsError, ValueError)):
                use(reader())
    assert {path: path.read_bytes() for path in folder.glob("*.metadata.json")} == before


@pytest.mark.parametrize("attack", ATTACKS)
def test_verify_finds_forged_rows(victim: Victim, attack: Callable[[Victim, Raw], None]) -> None:
    victim.change(lambda raw: attack(victim, raw))
    for permits in ({}, ALLOWS):
        for engine in (None, HERE):
            catalog = victim.catalog(**permits)
            if attack is allowed and not permits:
                with pytest.raises(PolicyError, match="no key-id"):
                    catalog.load_table("ns.t")
            else:
                assert verify(catalog.load_table("ns.t"), engine=engine).failed


def test_a_table_whose_signs_of_encryption_are_gone(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = victim.catalog(**MIXED).load_table("ns.t")
    victim.change(lambda raw: stripped_table(victim, raw))
    for reader in (
        seen.refresh,
        lambda: victim.catalog(**MIXED).load_table("ns.t"),
        lambda: open_table(victim.location, kms=victim.kms, **READS),
    ):
        with pytest.raises(IntegrityError, match="was changed"):
            reader()
    monkeypatch.setattr(session, "_encrypted", {})  # as in a new process, to which nothing tells that it was encrypted
    for refuser in (victim.catalog().load_table, lambda _: open_table(victim.location, kms=victim.kms)):
        with pytest.raises(PolicyError, match="plaintext-tables=read"):
            refuser("ns.t")
    assert ids(victim.catalog(**READS).load_table("ns.t")) == [FORGED]
    assert ids(open_table(victim.location, kms=victim.kms, **READS)) == [FORGED]


def test_a_catalog_without_tables_in_plaintext(victim: Victim) -> None:
    catalog = victim.catalog()
    for create in (catalog.create_table, catalog.create_table_transaction):
        with pytest.raises(PolicyError, match="is in plaintext"):
            create("ns.plain", schema=SCHEMA)
    assert not catalog.table_exists("ns.plain")
    with pytest.raises(PolicyError, match="is in plaintext"):
        catalog.load_table("ns.forged")
    table = new_table(catalog, "u")
    table.append(rows(0, 3))
    assert ids(table) == [0, 1, 2]
    for name in ("encryption.plaintext-files", "encryption.plaintext-tables"):
        with pytest.raises(ValueError, match="must be '"):
            victim.catalog(**{name: "yes"})
        with pytest.raises(ValueError, match="must be '"):
            open_table(victim.location, kms=victim.kms, **{name: "true"})


def test_a_catalog_that_reads_tables_in_plaintext(victim: Victim) -> None:
    catalog = victim.catalog(**READS)
    table, stored = catalog.load_table("ns.forged"), set((victim.folder / "wh").rglob("*"))
    assert ids(table) == [FORGED]
    for write in (
        lambda: table.append(rows(0, 1)),
        lambda: table.delete(),
        lambda: table.transaction().set_properties({"owner": "x"}).commit_transaction(),
        lambda: catalog.create_table("ns.plain", schema=SCHEMA),
    ):
        with pytest.raises(PolicyError, match="plaintext-tables=write"):
            write()
    assert set((victim.folder / "wh").rglob("*")) == stored
    encrypt(table, wrapping_key_id="master", engine=HERE).raise_for_failures()
    assert ids(victim.catalog().load_table("ns.forged")) == [FORGED]
    assert sql_catalog(victim.folder, None).create_table(
        "ns.plain", schema=SCHEMA
    )  # PyIceberg's own way, without a KMS


def older(victim: Victim) -> None:
    """Add the forged snapshot as one from before the encryption, which is not the newest."""

    def change(raw: Raw) -> None:
        raw["snapshots"].insert(0, victim.forged | {"sequence-number": 0})
        raw["refs"]["old"] = {"snapshot-id": FORGED, "type": "tag"}
        raw["properties"]["encryption.plaintext-snapshots"] = str(FORGED)

    victim.change(change)


def test_a_forged_snapshot_from_before(victim: Victim) -> None:
    """Nothing tells it from a true one, so both are read with the permission of who opens the table."""
    older(victim)
    for table in (victim.catalog().load_table("ns.t"), open_table(victim.location, kms=victim.kms)):
        assert ids(table) == list(range(6))
        for read in (
            lambda table=table: ids(table, snapshot_id=FORGED),
            lambda table=table: table.scan().use_ref("old").to_arrow(),
            lambda table=table: list(files(table, snapshot_id=FORGED)),
            lambda table=table: table.inspect.all_files(),
        ):
            with pytest.raises(PolicyError, match="your own configuration"):
                read()
        for engine in (None, HERE):
            done = verify(table, engine=engine)
            assert done.failed == []
            assert done.counts["skipped"] == 3
            assert str(FORGED) in done.warnings[0]
    allows = victim.catalog(**ALLOWS).load_table("ns.t")
    assert ids(allows, snapshot_id=FORGED) == [FORGED]
    assert ids(open_table(victim.location, kms=victim.kms, **ALLOWS), snapshot_id=FORGED) == [FORGED]


def test_keys_of_a_forged_manifest(victim: Victim) -> None:
    """Its entries name files of the table under an attacker's key, and the attacker has exchanged these files."""
    table = victim.table
    io, raw = table.io, raw_metadata(table)
    path = raw["snapshots"][-1]["manifest-list"]
    known = io.table.known(table.current_snapshot().manifests(io)[0].manifest_path)
    listing = read_container(local(victim.forged["manifest-list"]).read_bytes())
    manifest = read_container(open_whole(known, io.inner(known.path)))
    entries = list(manifest.records())
    key = new_key(16)
    for entry in entries:
        data = local(entry["data_file"]["file_path"])
        sealed = bytearray()
        forged = next((victim.folder / "wh").glob("ns/forged/data/*.parquet")).read_bytes()
        encrypt_file(forged, sealed, Keys(key.encryption_key), aad_prefix=key.aad_prefix, store_aad_prefix=False)
        data.write_bytes(sealed)
        theirs = StandardKeyMetadata(key.encryption_key, key.aad_prefix, len(sealed))
        entry["data_file"] |= {"key_metadata": theirs.encode(), "file_size_in_bytes": len(sealed)}
    made = write_container(manifest.schema, manifest.meta, entries)
    (victim.folder / "m0.avro").write_bytes(made)
    records = [
        {**one, "manifest_path": f"file://{victim.folder}/m0.avro", "manifest_length": len(made)}
        for one in listing.records()
    ]
    (victim.folder / "list.avro").write_bytes(write_container(listing.schema, listing.meta, records))
    victim.forged["manifest-list"] = f"file://{victim.folder}/list.avro"
    older(victim)
    for permits in ({}, ALLOWS):
        again = victim.catalog(**permits).load_table("ns.t")
        for snapshot in (FORGED, None):  # what a manifest in plaintext says of keys never counts
            with pytest.raises(AgsError):
                ids(again, snapshot_id=snapshot)
        if permits:
            assert ids(again, snapshot_id=again.metadata.snapshots[1].snapshot_id) == [0, 1, 2]
    assert path in {row.src for row in verify(victim.catalog().load_table("ns.t")).rows if row.status == "ok"}


def test_a_plaintext_file_that_an_encrypted_snapshot_names(tmp_path: Path, kms: dict[str, str]) -> None:
    """Also if a snapshot from before names the same file."""
    table = sql_catalog(tmp_path, kms, **MIXED).create_table("ns.t", schema=SCHEMA)
    table.append(rows(0, 3))
    old = next(iter(table.scan().plan_files())).file
    encrypt(table, wrapping_key_id="master", engine=HERE).raise_for_failures()
    assert verify(table).counts == {"ok": 4, "skipped": 5, "failed": 0}  # three files, and two of metadata

    def named_again(table: Any, record: Any) -> Any:
        made = plaintext_data(table, record)
        shutil.copyfile(local(old.file_path), tmp_path / "kept")
        local(f"{table.location()}/data/plain.parquet").unlink()
        return made

    relisted(table, named_again)
    shutil.copyfile(tmp_path / "kept", local(f"{table.location()}/data/plain.parquet"))

    def listing_all(raw: Raw) -> Raw:
        every = ",".join(str(one["snapshot-id"]) for one in raw["snapshots"])
        return {**raw, "properties": {**raw["properties"], "encryption.plaintext-snapshots": every}}

    edit(table, listing_all)
    for engine in (None, HERE):
        (row,) = [row for row in verify(table, engine=engine).rows if row.status == "failed"]
        assert (row.format, row.error_class) == ("data", "PolicyError")
    with pytest.raises(PolicyError, match="your own configuration"):
        ids(table)


def test_a_manifest_that_java_left_in_plaintext(victim: Victim) -> None:
    """Who knows that it is Java's permits it, and writes it anew under a key."""
    relisted(victim.table, plaintext_manifest)
    for what in ("manifests", "data"):
        with pytest.raises(PolicyError, match="your own configuration"):
            rekey(victim.catalog().load_table("ns.t"), what=what, engine=HERE)
    (row,) = verify(victim.catalog().load_table("ns.t"), snapshots="current").failed
    assert "encryption.plaintext-files=allow" in str(row.error)
    rekey(victim.catalog(**ALLOWS).load_table("ns.t"), what="data", engine=HERE).raise_for_failures()
    table = victim.catalog().load_table("ns.t")
    assert ids(table) == list(range(6))
    assert verify(table, snapshots="current").failed == []


def test_encrypt_and_later_commits_need_no_permission(tmp_path: Path, kms: dict[str, str]) -> None:
    """What reads no row of snapshots in plaintext goes on without it. To delete what they name takes it."""
    table = sql_catalog(tmp_path, kms, **MIXED).create_table("ns.t", schema=SCHEMA)
    for i in range(3):
        table.append(rows(3 * i, 3 * i + 3))
    old = set((tmp_path / "wh").rglob("*.parquet")) | set((tmp_path / "wh").rglob("*.avro"))
    before = [one.snapshot_id for one in table.metadata.snapshots]
    encrypt(table, wrapping_key_id="master", engine=HERE).raise_for_failures()
    again = sql_catalog(tmp_path, kms).load_table("ns.t")
    assert "encryption.plaintext-files" not in again.properties
    again.append(rows(9, 10))
    again.delete("id = 0")
    again.overwrite(rows(10, 11), overwrite_filter="id = 3")
    rotate(again)
    rekey(again)
    expected = [1, 2, *range(4, 11)]
    assert ids(again) == ids(open_table(again.metadata_location, kms=kms)) == expected
    planned = {row.src for row in expire(again, dry_run=True).rows}
    assert {f"file://{path}" for path in old} <= planned
    done = expire(again)
    assert not done.failed
    assert f"{3 + len(old)} files or snapshots" in done.warnings[0]
    left = {row.src: row for row in done.rows if row.status == "skipped"}
    assert left.keys() == {f"file://{path}" for path in old} | {str(one) for one in before}
    assert all("encryption.plaintext-files=allow" in str(row.error) for row in left.values())
    assert all(path.exists() for path in old)
    assert [one["snapshot-id"] for one in raw_metadata(again)["snapshots"]][:3] == before
    allows = sql_catalog(tmp_path, kms, **ALLOWS).load_table("ns.t")
    assert expire(allows).counts["skipped"] == 0
    again.refresh()
    assert not any(path.exists() for path in old)
    assert not [name for name in again.properties if "plaintext" in name]
    assert verify(again, orphans=True).failed == []
    assert ids(again) == expected
