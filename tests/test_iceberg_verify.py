"""verify: every object of an encrypted table, each kind of damage told from the others."""

from __future__ import annotations

import base64
import json
import os
import pickle
import time
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import pyarrow.parquet as pq
from iceberg_damage import (
    avro_data,
    list_as_manifest,
    lost_key,
    manifest_as_list,
    plaintext_data,
    plaintext_manifest,
    relisted,
)
from iceberg_tables import KEY_ID, MASTER, MIXED, SCHEMA, new_table, rows, sql_catalog
from pyiceberg.catalog.sql import SqlCatalog as VanillaCatalog
from shares import rest_in_more
from support import flip

from ags_fast.errors import FormatError, PolicyError
from ags_fast.iceberg import delete, encrypt, expire, files, inspecting, open_table, rekey, rotate, verify
from ags_fast.iceberg.commit import edit, raw_metadata
from ags_fast.iceberg.writing import write_sealed
from ags_fast.jobs import LocalEngine
from ags_fast.keys import load_kms
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

    from ags_fast.jobs import JobResult, Row


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Catalog:
    return sql_catalog(tmp_path, kms, **MIXED)


@pytest.fixture
def table(catalog: Catalog) -> Table:
    """Three data files in three snapshots, and a deletion vector."""
    made = new_table(catalog)
    for i in range(3):
        made.append(rows(10 * i, 10 * i + 10))
    delete(made, "id < 4")
    return made


def place(location: str) -> str:
    return location.removeprefix("file://")


def kinds(result: JobResult, status: str = "ok") -> dict[str, int]:
    found: dict[str, int] = {}
    for row in result.rows:
        if row.status == status:
            found[str(row.format)] = found.get(str(row.format), 0) + 1
    return found


def bad(result: JobResult) -> list[Row]:
    return result.failed


def test_an_intact_table(table: Table, kms: dict[str, str]) -> None:
    done = verify(table, orphans=True)
    assert kinds(done) == {"metadata": 5, "manifest-list": 4, "manifest": 4, "data": 3, "deletion-vector": 1}
    assert done.counts == {"ok": 17, "skipped": 0, "failed": 0}
    assert done.warnings == []
    stored = {place(row.src): row.file_length for row in done.rows}
    assert stored == {path: os.path.getsize(path) for path in stored}
    assert len(stored) == len(done.rows)
    assert verify(open_table(table.metadata_location, kms=kms)).counts == done.counts


@pytest.mark.parametrize("processes", rest_in_more([0, 2], 2))
def test_on_an_engine(table: Table, processes: int) -> None:
    here, done = verify(table), verify(table, engine=LocalEngine(processes))
    assert [row[:10] for row in sorted(done.rows)] == [row[:10] for row in sorted(here.rows)]
    (one,) = [one for one in files(table) if one.kind == "data"][:1]
    with open(place(one.path), "rb") as file:
        data = file.read()
    with open(place(one.path), "wb") as file:
        file.write(flip(data, 800))
    (row,) = bad(verify(table, engine=LocalEngine(processes)))
    assert (row.src, row.format, row.error_class) == (one.path, "data", "IntegrityError")
    assert bad(verify(table))[0][:10] == row[:10]


def test_an_engine_gets_no_key(table: Table) -> None:
    sent = []

    class Spy(LocalEngine):
        def run(self, context: Any, tasks: Any, open_cost: int, report: Any) -> None:
            sent.append(pickle.dumps((context, tasks)))
            super().run(context, tasks, open_cost, report)

    assert bad(verify(table, engine=Spy(0))) == []
    keys = [one.key_metadata.encryption_key for one in files(table) if one.key_metadata is not None]
    assert len(sent) == 1
    assert not any(key in sent[0] for key in keys)


def test_some_snapshots(table: Table) -> None:
    first = table.metadata.snapshots[0].snapshot_id
    assert kinds(verify(table, snapshots=[first])) == {"metadata": 5, "manifest-list": 1, "manifest": 1, "data": 1}
    assert kinds(verify(table, snapshots="current"))["manifest-list"] == 1
    assert kinds(verify(table, snapshots=[first], orphans=True), "skipped") == {}
    with pytest.raises(ValueError, match="no snapshot 7"):
        verify(table, snapshots=[7])
    with pytest.raises(ValueError, match="'all', 'current' or ids"):
        verify(table, snapshots="newest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'refuse' or 'allow'"):
        verify(table, statistics="no")  # type: ignore[arg-type]


def test_an_empty_table_and_one_in_plaintext(catalog: Catalog) -> None:
    assert kinds(verify(new_table(catalog, "empty"), orphans=True)) == {"metadata": 1}
    with pytest.raises(PolicyError, match="plaintext"):
        verify(catalog.create_table("ns.plain", schema=SCHEMA))


@pytest.mark.parametrize("kind", ["manifest-list", "manifest", "data", "deletion-vector"])
@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "gone"])
def test_damage_is_found_where_it_is(table: Table, kind: str, damage: str) -> None:
    (path, *_) = [place(one.path) for one in files(table) if one.kind == kind]
    with open(path, "rb") as file:
        data = file.read()
    if damage == "gone":
        os.remove(path)
    else:
        changed = {"flip": flip(data, 8 * (len(data) // 2)), "cut": data[:-1], "longer": data + b"x"}[damage]
        with open(path, "wb") as file:
            file.write(changed)
    done = verify(table)
    (row,) = bad(done)
    assert (place(row.src), row.format) == (path, kind)
    assert row.error_class in (("FileNotFoundError",) if damage == "gone" else ("IntegrityError", "FormatError"))
    assert row.error
    intact = verify(table, snapshots=[table.metadata.snapshots[0].snapshot_id])
    assert (intact.failed == []) is (kind in ("manifest-list", "deletion-vector") or path not in str(intact.rows))


def test_swapped_files(table: Table) -> None:
    first, second, *_ = [place(one.path) for one in files(table) if one.kind == "data"]
    os.rename(first, first + "x")
    os.rename(second, first)
    os.rename(first + "x", second)
    assert {place(row.src) for row in bad(verify(table))} == {first, second}


def test_files_in_plaintext_are_told(catalog: Catalog, kms: dict[str, str]) -> None:
    for name, change, kind in (("m", plaintext_manifest, "manifest"), ("d", plaintext_data, "data")):
        table = new_table(catalog, name)
        table.append(rows(0, 3))
        table.append(rows(3, 6))
        relisted(table, change)
        done = verify(table)
        (row,) = bad(done)
        assert (row.format, row.error_class) == (kind, "PolicyError")
        assert "plaintext" in str(row.error)
        assert "Java" in str(row.error)
        allows = open_table(table.metadata_location, kms=kms, **{"encryption.plaintext-files": "allow"})
        assert bad(verify(allows)) == [row]  # nothing permits it in a snapshot that is encrypted


def test_a_key_that_java_lost_is_no_tampering(catalog: Catalog) -> None:
    table = new_table(catalog)
    table.append(rows(0, 10))
    delete(table, "id = 3")
    relisted_vectors(table)
    (row,) = bad(verify(table, snapshots="current"))
    assert (row.format, row.error_class) == ("deletion-vector", "KeyAccessError")
    assert "16157" in str(row.error)
    assert "nobody changed it" in str(row.error)
    relisted(table, lost_key)
    rows_found = {row.format: row.error_class for row in bad(verify(table, snapshots="current"))}
    assert rows_found == {"deletion-vector": "KeyAccessError", "data": "KeyAccessError"}


def relisted_vectors(table: Table) -> None:
    """As `relisted` with `lost_key`, of the manifest with deletion vectors."""

    def change(table: Table, record: Any) -> Any:
        return lost_key(table, record) if record["content"] == 1 else record

    relisted(table, change, every=True)


def test_avro_data_files(catalog: Catalog) -> None:
    """PyIceberg does not read these; their tags are checked all the same."""
    table = new_table(catalog)
    table.append(rows(0, 3))
    relisted(table, avro_data)
    (one,) = [one for one in files(table) if one.kind == "data"]
    assert one.format == "AVRO"
    assert bad(verify(table)) == []
    with open(place(one.path), "rb") as file:
        data = file.read()
    assert len(data) == one.length
    block = (1 << 20) + 28
    for changed in (data[: 8 + block], data[: 8 + 2 * block], data[:-1], data + b"x", flip(data, 8 * len(data) - 1)):
        with open(place(one.path), "wb") as file:
            file.write(changed)
        for engine in (None, LocalEngine(0)):
            (row,) = bad(verify(table, engine=engine))
            assert (row.src, row.error_class) == (one.path, "IntegrityError")


def test_the_hash_of_a_hive_metastore(table: Any) -> None:
    """The metastore's ``metadata_hash`` is compared with the file again."""
    session = table.io.session
    session.expect(table.metadata_location, "AAAA")
    (row,) = bad(verify(table))
    assert (row.format, row.error_class) == ("metadata", "IntegrityError")
    session.expect(table.metadata_location, None)
    assert bad(verify(table)) == []


def test_counts_of_a_list(table: Table) -> None:
    relisted(table, lambda _, record: {**record, "existing_rows_count": 7})
    (row,) = bad(verify(table))
    assert (row.format, row.error_class) == ("manifest", "FormatError")
    assert "7 existing rows" in str(row.error)


def test_a_lost_key_of_a_list(table: Table) -> None:
    first = table.metadata.snapshots[0]

    def lose(raw: dict[str, Any]) -> dict[str, Any]:
        key = raw["snapshots"][0]["key-id"]
        return {**raw, "encryption-keys": [one for one in raw["encryption-keys"] if one["key-id"] != key]}

    edit(table, lose)
    (row,) = bad(verify(table))
    assert (row.src, row.error_class) == (first.manifest_list, "KeyAccessError")


def test_a_master_key_that_is_refused_fails_every_list_once(table: Table) -> None:
    def lose(raw: dict[str, Any]) -> dict[str, Any]:
        keys = [{**one, "encrypted-by-id": "gone"} if "properties" in one else one for one in raw["encryption-keys"]]
        return {**raw, "encryption-keys": keys}

    table.io.session.guard.setting = "off"  # type: ignore[attr-defined]  # nobody could seal that
    edit(table, lose)
    from ags_fast.keys import clear_cache

    clear_cache()
    done = verify(table)
    assert kinds(done, "failed") == {"manifest-list": 4}
    assert {row.error_class for row in bad(done)} == {"KeyAccessError"}
    assert sum(done.kms_calls.values()) <= 4


def test_keys_without_use_are_a_warning(table: Table) -> None:
    def forget(raw: dict[str, Any]) -> dict[str, Any]:
        return {**raw, "snapshots": raw["snapshots"][1:], "snapshot-log": raw["snapshot-log"][1:]}

    edit(table, forget)
    (text,) = verify(table).warnings
    assert "1 key" in text


def test_changed_metadata(table: Table) -> None:
    with open(place(table.metadata_location)) as file:
        raw = json.load(file)
    raw["last-updated-ms"] += 1
    with open(place(table.metadata_location), "w") as file:
        json.dump(raw, file)
    (row,) = bad(verify(table))
    assert (row.format, row.error_class) == ("metadata", "IntegrityError")


def test_statistics(table: Any) -> None:
    snapshot = table.current_snapshot().snapshot_id
    inner = table.io.inner(table.location())
    for name, data in (("plain", b"PFA1..."), ("gone", None)):
        if data is not None:
            with inner.new_output(f"{table.location()}/metadata/{name}.stats").create() as file:
                file.write(data)
    write_sealed(f"{table.location()}/metadata/sealed.stats", b"PFA1", 16, inner)

    def add(raw: dict[str, Any]) -> dict[str, Any]:
        made = [
            {
                "snapshot-id": snapshot,
                "statistics-path": f"{table.location()}/metadata/{name}.stats",
                "file-size-in-bytes": 7,
                "file-footer-size-in-bytes": 3,
                "blob-metadata": [],
            }
            for name in ("plain", "sealed", "gone")
        ]
        return {**raw, "statistics": made}

    edit(table, add)
    done = verify(table, orphans=True)
    found = {row.src.rsplit("/", 1)[1]: row.error_class for row in bad(done)}
    assert found == {
        "plain.stats": "PolicyError",
        "sealed.stats": "KeyAccessError",
        "gone.stats": "FileNotFoundError",
    }
    done = verify(table, statistics="allow")
    assert kinds(done, "skipped") == {"statistics": 1}
    assert len(bad(done)) == 2
    first = table.metadata.snapshots[0].snapshot_id
    assert bad(verify(table, snapshots=[first])) == []


# ------------------------------------------------------------------------------------------------------------- orphans


def test_what_a_vanilla_append_left(tmp_path: Path, table: Table) -> None:
    vanilla = VanillaCatalog("tests", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/wh")
    folder = f"{place(table.location())}/data"
    before = set(os.listdir(folder))
    with pytest.raises((NotImplementedError, ValueError)):
        vanilla.load_table("ns.t").append(rows(3, 4))
    left = {f"{folder}/{name}" for name in set(os.listdir(folder)) - before}
    if not left:  # the version of PyIceberg refuses before it writes
        pq.write_table(rows(3, 4), f"{folder}/left.parquet")
        left = {f"{folder}/left.parquet"}
    assert bad(verify(table)) == []
    found = bad(verify(table, orphans=True))
    assert {place(row.src) for row in found} >= left
    assert {row.error_class for row in found} == {"PolicyError"}


def test_orphans_that_are_encrypted_are_skipped(table: Any) -> None:
    inner = table.io.inner(table.location())
    write_sealed(f"{table.location()}/data/a/b=c/x.avro", b"x", 16, inner)
    done = verify(table, orphans=True)
    assert bad(done) == []
    (row,) = [row for row in done.rows if row.status == "skipped"]
    assert (row.src, row.error_class) == (f"{table.location()}/data/a/b=c/x.avro", "Orphan")


def test_a_plan_that_is_left_is_told(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    from ags_fast.iceberg.work import heads

    with monkeypatch.context() as patch:
        patch.setattr(heads, "edit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rekey(table, what="data", engine=LocalEngine(0))
    left = {row.src: row for row in verify(table, orphans=True).rows if row.status == "skipped"}
    (plan,) = [row for path, row in left.items() if path.endswith(".plan")]
    assert "start the operation again" in str(plan.error)
    assert len(left) == 1 + 4  # the plan, and the new files
    rekey(table, what="data", engine=LocalEngine(0)).raise_for_failures()
    done = verify(table, orphans=True)
    assert (done.failed, kinds(done, "skipped")) == ([], {})


def test_what_older_metadata_name_is_no_orphan(table: Table) -> None:
    first = table.metadata.snapshots[0].manifest_list
    edit(table, lambda raw: {**raw, "snapshots": raw["snapshots"][1:], "snapshot-log": []})
    assert kinds(verify(table, orphans=True), "skipped") == {}
    expire(table)  # removes the older metadata, which alone named the first snapshot
    left = [row.src for row in verify(table, orphans=True).rows if row.status == "skipped"]
    assert left == [first]


def test_other_spellings_of_locations() -> None:
    from ags_fast.iceberg.locations import normal

    assert normal("file:/a/b") == normal("file:///a/b") == normal("/a/b") == "/a/b"
    assert normal("s3a://x/y") == normal("s3://x/y") != normal("s3://x/z")
    assert normal("file:///a b/c=1:2/d?e#f") == "/a b/c=1:2/d?e#f"
    assert normal("/a/b:c") == "/a/b:c"


def test_fsspec_lists_too(tmp_path: Path, kms: dict[str, str]) -> None:
    catalog = sql_catalog(tmp_path, kms)
    table = new_table(catalog)
    table.append(rows(0, 3))
    from pyiceberg.io.fsspec import FsspecFileIO

    from ags_fast.iceberg.orphans import stored_files

    class Spy:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def inner(self, _: str) -> Any:
            return self._inner

    location = table.location()
    through = [set(stored_files(Spy(one), location)) for one in (FsspecFileIO({}), table.io.inner(location))]  # type: ignore[arg-type]
    assert through[0] == through[1] != set()


# ---------------------------------------------------------------------------------- what somebody did to the metadata


def attack(table: Table, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the metadata file in the storage."""
    with open(place(table.metadata_location)) as file:
        raw = json.load(file)
    change(raw)
    with open(place(table.metadata_location), "w") as file:
        json.dump(raw, file)


@pytest.mark.parametrize("name", ["py-io-impl", "write.py-location-provider.impl", "s3.endpoint"])
def test_properties_that_are_refused(tmp_path: Path, table: Table, kms: dict[str, str], name: str) -> None:
    """Nothing loads the table, but to verify it. Such a handle writes nothing."""
    attack(table, lambda raw: raw["properties"].update({name: "evil.run"}))
    for load in (
        lambda: sql_catalog(tmp_path, kms).load_table("ns.t"),
        lambda: open_table(table.metadata_location, kms=kms),
    ):
        with pytest.raises(PolicyError, match=name):
            load()
        with inspecting():
            loaded: Any = load()
        assert name not in loaded.metadata.properties
        (row,) = bad(verify(loaded))
        assert (row.src, row.format, row.error_class) == (table.metadata_location, "metadata", "PolicyError")
        assert name in str(row.error)
    with inspecting():
        loaded = sql_catalog(tmp_path, kms).load_table("ns.t")
    before = set(tmp_path.rglob("*"))
    for call in (lambda: loaded.append(rows(9, 10)), lambda: rotate(loaded), lambda: expire(loaded)):
        with pytest.raises(PolicyError, match=name):
            call()
    assert before <= set(tmp_path.rglob("*"))


def test_places_outside_of_the_table(tmp_path: Path, table: Table, kms: dict[str, str]) -> None:
    elsewhere = f"file://{tmp_path}/elsewhere"
    assert verify(table).warnings == []
    table.transaction().set_properties({"write.data.path": elsewhere}).commit_transaction()
    table.append(rows(9, 10))
    files_, next_ = verify(table).warnings
    assert "1 files are not below" in files_
    assert elsewhere in files_
    assert "write.data.path" in next_
    roots = sql_catalog(tmp_path, kms, **{"encryption.delete-roots": elsewhere}).load_table("ns.t")
    assert verify(roots).warnings == []  # the user knows of this place

    def change(raw: dict[str, Any]) -> None:
        raw.update(location=f"file://{tmp_path}", properties={KEY_ID: MASTER})
        raw["metadata-log"].append({"metadata-file": "file:///etc/passwd", "timestamp-ms": 1})

    attack(table, change)
    files_, next_ = verify(sql_catalog(tmp_path, kms).load_table("ns.t")).warnings
    assert "2 files" in files_
    assert f"location, where its next files go, is not below its own folder: file://{tmp_path}" in next_


@pytest.mark.parametrize("what", ["a manifest list, where a manifest", "a manifest, where a manifest list"])
def test_lists_and_manifests_do_not_stand_in_for_each_other(
    tmp_path: Path, table: Table, kms: dict[str, str], what: str
) -> None:
    """Whoever has the table's keys can seal such files: no reader takes one for the other."""
    if what.startswith("a manifest list"):
        relisted(table, list_as_manifest)
    else:
        manifest_as_list(table)
    fresh = sql_catalog(tmp_path, kms).load_table("ns.t")
    with pytest.raises(FormatError, match=what):
        fresh.scan().to_arrow()
    (row,) = [row for row in verify(fresh, snapshots="current").rows if row.status == "failed"]
    assert row.error_class == "FormatError"
    assert row.error is not None
    assert what in row.error


def test_keys_that_somebody_added(tmp_path: Path, table: Table, kms: dict[str, str]) -> None:
    """A KEK under another master key, and one with a time by which it stays the newest."""
    local.create_key(kms, "mallory")
    later = str(int(time.time() * 1000) + 10**9)
    key = load_kms(kms).wrap_key(os.urandom(16), "mallory")
    entry = {
        "key-id": "hers",
        "encrypted-key-metadata": base64.b64encode(key).decode(),
        "encrypted-by-id": "mallory",
        "properties": {"KEY_TIMESTAMP": later},
    }
    attack(table, lambda raw: raw["encryption-keys"].append(entry))
    found = verify(sql_catalog(tmp_path, kms).load_table("ns.t")).warnings
    assert any("several master keys" in text and "mallory, master" in text for text in found)
    assert any("the KEK hers is newer" in text for text in found)


def test_keks_that_changed_since_this_process_loaded_the_table(
    tmp_path: Path, table: Table, kms: dict[str, str]
) -> None:
    """One is another key under the old name, one is new; those of this process are no news."""
    catalog = sql_catalog(tmp_path, kms)
    known = catalog.load_table("ns.t")
    known.append(rows(50, 51))
    assert verify(known).warnings == []
    changed = next(key["key-id"] for key in raw_metadata(known)["encryption-keys"] if key["encrypted-by-id"] == MASTER)

    def change(raw: dict[str, Any]) -> None:
        (kek,) = (key for key in raw["encryption-keys"] if key["key-id"] == changed)
        wrapped = base64.b64encode(load_kms(kms).wrap_key(os.urandom(16), MASTER)).decode()
        raw["encryption-keys"].append({**kek, "key-id": "hers", "encrypted-key-metadata": wrapped})
        kek["encrypted-key-metadata"] = wrapped

    attack(table.refresh(), change)
    others = [text for text in verify(catalog.load_table("ns.t")).warnings if "other processes" in text]
    assert [sorted([changed, "hers"]) == one.split(": ")[1].split(". ")[0].split(", ") for one in others] == [True]
    assert not any("other processes" in text for text in verify(sql_catalog(tmp_path, kms).load_table("ns.t")).warnings)


def test_another_key_id(tmp_path: Path, table: Table, kms: dict[str, str]) -> None:
    attack(table, lambda raw: raw["properties"].update({KEY_ID: "mallory"}))
    seal, text = verify(sql_catalog(tmp_path, kms).load_table("ns.t")).warnings
    assert "was changed after it was sealed" in seal
    assert "mallory, master" in text


def test_snapshots_in_plaintext_that_were_not_chosen(tmp_path: Path, catalog: Catalog) -> None:
    plain = catalog.create_table("ns.plain", schema=SCHEMA)
    plain.append(rows(0, 3))
    encrypt(plain, wrapping_key_id=MASTER, engine=LocalEngine(0)).raise_for_failures()
    before = str(plain.metadata.snapshots[0].snapshot_id)
    (text,) = verify(plain, snapshots="current").warnings
    assert text == f"snapshots in plaintext were not chosen: {before}"
    (text,) = verify(plain).warnings
    assert before in text
