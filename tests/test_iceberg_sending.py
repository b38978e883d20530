"""A FileIO that was pickled: no key travels, and where it arrives it reads what it read before, and nothing else."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import pyarrow as pa
import pyiceberg
from iceberg_damage import plaintext_data, plaintext_manifest, relisted
from iceberg_tables import KEY_ID, MASTER, MIXED, SCHEMA, forms_of_key, ids, new_table, rows, sql_catalog, table_keys
from pyiceberg.catalog.sql import SqlCatalog as VanillaCatalog
from pyiceberg.io.pyarrow import ArrowScan
from support import flip, python_env

from ags_fast.errors import AgsError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.iceberg import FileIO, clear_cache, delete, files, open_table, rotate, session, verify
from ags_fast.iceberg.commit import table_io
from ags_fast.keys import KmsClient
from ags_fast.keys.kms import count_calls

if TYPE_CHECKING:
    from collections.abc import Callable

ALLOWS = {"encryption.plaintext-files": "allow"}


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Any:
    return sql_catalog(tmp_path, kms, **MIXED)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Sends an object to a process that has begun just now."""

    def send(one: Any) -> Any:
        data = pickle.dumps(one)
        clear_cache()
        monkeypatch.setattr(session, "_sessions", weakref.WeakValueDictionary())
        for name in ("_readers", "_encrypted", "_keks", "_masters"):
            monkeypatch.setattr(session, name, type(getattr(session, name))())
        return pickle.loads(data)

    return send


def deleted(table: Any) -> list[int]:
    """Fill a table with two data files and a deletion vector. Returns the ids that stay."""
    table.append(rows(0, 50))
    table.append(rows(50, 100))
    delete(table, "id >= 40 and id < 60")
    return [*range(40), *range(60, 100)]


def reader(table: Any, io: Any = None, **scan: Any) -> tuple[ArrowScan, list[Any]]:
    """What a task has: PyIceberg's reader, and what it reads."""
    planned = table.scan(**scan)
    read = ArrowScan(table.metadata, io or table.io, planned.projection(), planned.row_filter)
    return read, list(planned.plan_files())


def reader_of(table: Any, planned: Any) -> ArrowScan:
    """PyIceberg's reader with the FileIO of `table`, which has planned nothing."""
    return ArrowScan(table.metadata, table.io, planned.scan().projection(), planned.scan().row_filter)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except AgsError as error:
        return type(error)


def read_ids(read: ArrowScan, tasks: list[Any]) -> list[int]:
    return sorted(one for task in tasks for one in read.to_table([task])["id"].to_pylist())


def stored(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (folder / "wh").rglob("*") if path.is_file()}


def opened(io: Any, path: str) -> bytes:
    with io.new_input(path).open() as file:
        return bytes(file.read())


# ----------------------------------------------------------------------------------------------------- what travels


@pytest.mark.parametrize("length", ["16", "32"])
def test_no_key_travels(catalog: Any, kms: dict[str, str], length: str) -> None:
    """Neither one of a file nor of a list, no KEK, and no master key."""
    table = new_table(catalog, **{"encryption.data-key-length": length})
    deleted(table)
    rotate(table, what="kek")
    read, tasks = reader(table)
    keys = table_keys(table)
    keys.add(Path(kms["kms.local.key-file"]).read_bytes())
    assert len(keys) >= 10
    sent = {name: pickle.dumps(one) for name, one in {"io": table.io, "read": read, "tasks": tasks}.items()}
    sent["again"] = pickle.dumps(pickle.loads(sent["io"]))
    sent["scan"] = pickle.dumps(table.scan())
    for data in sent.values():
        assert not [form for key in keys for form in forms_of_key(key) if form in data]
    known = [one.key_metadata for one in files(table) if one.key_metadata]
    prefixes = [one.aad_prefix for one in known if one.aad_prefix]
    assert len(prefixes) == len(known)
    assert not [one for one in (*prefixes, *(one.encode() for one in known)) for data in sent.values() if one in data]


def test_credentials(tmp_path: Path, kms: dict[str, str]) -> None:
    """Those of the storage travel, as a dataset's; those of the catalog only where it signs the storage's requests."""
    own = {"credential": "id:CANARY-1", "token": "CANARY-2", "auth.manager": "CANARY-3", "header.X": "CANARY-4"}
    given = {
        **own,
        "oauth2-server-uri": "CANARY-5",
        "glue.secret-access-key": "CANARY-6",
        "uri": f"sqlite:///{tmp_path}/c",
    }
    table = new_table(sql_catalog(tmp_path, kms, **{**given, "s3.secret-access-key": "STORAGE"}))
    data = pickle.dumps(table.io)
    assert b"STORAGE" in data
    assert b"CANARY" not in data
    assert b"sqlite" not in data
    table.io = FileIO({**table.io.properties, "s3.signer": "S3V4RestSigner"})
    table.io.belongs(table.metadata.table_uuid, table.metadata.location)
    data = pickle.dumps(table.io)
    assert [n for n in range(1, 7) if f"CANARY-{n}".encode() in data] == [2, 4]


def test_what_never_travels(tmp_path: Path, catalog: Any, kms: dict[str, str]) -> None:
    class OfMemory(KmsClient):
        provider = "memory"

        def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
            return bytes(one ^ 255 for one in key)

        def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
            return bytes(one ^ 255 for one in wrapped)

    table = new_table(catalog)
    for one in (catalog, table, table.io.session):
        with pytest.raises(TypeError, match="never pickled"):
            pickle.dumps(one)
    with pytest.raises(PolicyError, match="of no table"):
        pickle.dumps(FileIO(kms))
    with pytest.raises(TypeError, match="not initialized from properties"):
        pickle.dumps(new_table(sql_catalog(tmp_path, cast("Any", OfMemory())), "other").io)


# ---------------------------------------------------------------------------------------------------------- reading

CHILD = """
import pickle, sys
from ags_fast.keys.kms import count_calls
read, tasks = pickle.load(sys.stdin.buffer)
with count_calls() as calls:  # which counts those of this thread
    read._io.new_input(tasks[0].file.file_path).open().close()
    ids = [one for task in tasks for one in read.to_table([task])["id"].to_pylist()]
print(sorted(ids), dict(calls))
"""


def test_another_process_reads(catalog: Any) -> None:
    """With one call of the KMS, and the deletion vector."""
    table = new_table(catalog)
    expected = [one for one in deleted(table) if one > 30]
    data = pickle.dumps(reader(table, row_filter="id > 30"))
    env = python_env(PYTHONPATH=os.pathsep.join(filter(None, sys.path)))  # with the PyIceberg of this process
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=data, env=env, capture_output=True, timeout=60, check=True
    )
    assert done.stdout.decode() == f"{expected} {{('local', 'unwrap'): 1}}\n"


def test_times_and_branches(catalog: Any, elsewhere: Any) -> None:
    """Lists of all snapshots are known there; files of older ones are found, too."""
    table = new_table(catalog)
    table.append(rows(0, 3))
    first = table.current_snapshot().snapshot_id
    table.overwrite(rows(3, 6))
    read, tasks = elsewhere(reader(table, snapshot_id=first))
    assert read_ids(read, tasks) == [0, 1, 2]
    again = pickle.loads(pickle.dumps(read))
    assert read_ids(again, tasks) == [0, 1, 2]


def test_manifests_and_lists_open(catalog: Any, elsewhere: Any) -> None:
    table = new_table(catalog)
    deleted(table)
    snapshot = table.current_snapshot()
    listed = [(one.manifest_path, one.content) for one in snapshot.manifests(table.io)]
    io = elsewhere(table.io)
    assert [(one.manifest_path, one.content) for one in snapshot.manifests(io)] == listed
    entries = [one for manifest in snapshot.manifests(io) for one in manifest.fetch_manifest_entry(io)]
    assert len(entries) == 4
    assert all(not hasattr(one.data_file, "key_metadata") or one.data_file.key_metadata is None for one in entries)


def test_each_manifest_is_read_once(catalog: Any, elsewhere: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all that one process gets of a table, in whatever order; and again once it was forgotten."""
    walk: Any = importlib.import_module("ags_fast.iceberg.walk")
    table = new_table(catalog)
    for i in range(6):
        table.append(rows(i, i + 1))
    _, tasks = reader(table)
    sent, (io, metadata) = pickle.dumps((table.io, table.metadata)), elsewhere((table.io, table.metadata))
    read_node, opened_nodes = walk.read_node, []

    def counted(node: Any, *args: Any, **named: Any) -> Any:
        opened_nodes.append((node.kind, node.path))
        return read_node(node, *args, **named)

    monkeypatch.setattr(walk, "read_node", counted)
    projected = table.scan().projection()
    for task in tasks:
        io, metadata = pickle.loads(sent)
        assert len(read_ids(ArrowScan(metadata, io, projected, table.scan().row_filter), [task])) == 1
    read_manifests = [path for kind, path in opened_nodes if kind == "manifest"]
    assert len(read_manifests) == len(set(read_manifests)) == 6
    io.session.files.clear()  # as when other files have taken the room
    assert len(read_ids(ArrowScan(metadata, io, projected, table.scan().row_filter), tasks[:2])) == 2
    assert io.table.seen
    clear_cache()
    assert not io.table.seen  # which has keys
    assert read_ids(ArrowScan(metadata, io, projected, table.scan().row_filter), tasks) == [*range(6)]


def test_in_the_same_process(catalog: Any) -> None:
    """As with threads of Dask: what the catalog knows is not looked up again."""
    table = new_table(catalog)
    expected = deleted(table)
    sent = pickle.dumps(reader(table))
    with count_calls() as calls:
        read, tasks = pickle.loads(sent)
        assert read_ids(read, tasks) == expected
    assert calls == {}
    table.append(rows(100, 101))
    assert ids(table) == [*expected, 100]


def test_a_later_pickle_brings_later_keys(catalog: Any, elsewhere: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    early = pickle.dumps(reader(table))
    rotate(table, what="kek")
    table.append(rows(3, 6))
    late = pickle.dumps(reader(table))
    elsewhere(None)
    assert read_ids(*pickle.loads(early)) == [0, 1, 2]
    assert read_ids(*pickle.loads(late)) == [*range(6)]
    assert read_ids(*pickle.loads(early)) == [0, 1, 2]


def test_tables_in_plaintext_and_without_a_catalog(tmp_path: Path, catalog: Any, kms: Any, elsewhere: Any) -> None:
    plain = catalog.create_table("ns.plain", schema=SCHEMA)
    plain.append(rows(0, 3))
    table = new_table(catalog)
    table.append(rows(3, 6))
    settings = {"uri": f"sqlite:///{tmp_path}/catalog.db", "py-io-impl": "ags_fast.iceberg.FileIO", **kms}
    alone = VanillaCatalog("tests", **settings).load_table("ns.t")
    found = open_table(table.metadata_location, kms=kms)
    for one, expected in ((plain, [0, 1, 2]), (found, [3, 4, 5]), (alone, [3, 4, 5])):
        assert read_ids(*elsewhere(reader(one))) == expected


# --------------------------------------------------------------------------------------------------- what is refused


def test_it_only_reads(tmp_path: Path, catalog: Any, elsewhere: Any) -> None:
    table, plain = new_table(catalog), catalog.create_table("ns.plain", schema=SCHEMA)
    for one in (table, plain):
        one.append(rows(0, 3))
    before = stored(tmp_path)
    for send, one in ((copy.copy, table.io), (copy.deepcopy, table.io), (copy.copy, plain.io), (elsewhere, table.io)):
        if send is elsewhere:  # which forgets the catalog
            table.append(rows(3, 6))
            assert ids(table) == [*range(6)]
            before = stored(tmp_path)
        io = send(one)
        assert "FileIO" in repr(io)
        path = f"{table.location()}/data/new.parquet"
        with pytest.raises(PolicyError, match=r"only reads, and does not write .*: load the table from a catalog"):
            io.new_output(path)
        with pytest.raises(PolicyError, match="only reads"), io.new_input(path).create() as file:
            file.write(b"PAR1")
        for place in (table.metadata_location, io.new_input(table.metadata_location)):
            with pytest.raises(PolicyError, match="only reads, and does not delete"):
                io.delete(place)
        with pytest.raises(PolicyError, match="opens no metadata"):
            opened(io, table.metadata_location)
        assert stored(tmp_path) == before


def refused(kind: type[AgsError], match: str, *ios: Any, path: str) -> None:
    for io in ios:
        with pytest.raises(kind, match=match):
            opened(io, path)


def test_files_of_others(catalog: Any, elsewhere: Any) -> None:
    """What no snapshot of the table names is not opened: another table's file, and one that lies beside."""
    table, other = new_table(catalog), new_table(catalog, "other")
    for one in (table, other):
        one.append(rows(0, 3))
    (theirs,) = [one.path for one in files(other) if one.kind == "data"]
    beside = f"{table.location()}/data/beside.parquet"
    shutil.copyfile(theirs.removeprefix("file://"), beside.removeprefix("file://"))
    for path in (theirs, beside, other.current_snapshot().manifest_list):
        refused(PolicyError, "named by no snapshot", table.io, elsewhere(table.io), path=path)


@pytest.mark.parametrize("kind", ["data", "deletion-vector", "manifest", "manifest-list"])
def test_changed_files(catalog: Any, elsewhere: Any, kind: str) -> None:
    """A byte was changed after the plan was made."""
    table = new_table(catalog)
    deleted(table)
    read, tasks = reader(table)
    for one in {one.path for one in files(table) if one.kind == kind}:
        path = Path(one.removeprefix("file://"))
        path.write_bytes(flip(path.read_bytes(), path.stat().st_size * 4))
    with pytest.raises(IntegrityError):
        read_ids(*elsewhere((read, tasks)))


@pytest.mark.parametrize("damage", [plaintext_manifest, plaintext_data])
def test_plaintext(tmp_path: Path, kms: dict[str, str], elsewhere: Any, damage: Callable[..., Any]) -> None:
    """The setting of the catalog holds, one way and the other. A table's property gives no permission."""
    allowing = sql_catalog(tmp_path, kms, **ALLOWS)
    table = new_table(allowing)
    table.append(rows(0, 3))
    relisted(table, damage)
    read, tasks = reader(table)
    refusing = sql_catalog(tmp_path, kms).load_table("ns.t")
    with pytest.raises(PolicyError, match="plaintext-files"):
        ids(refusing)
    here = outcome(lambda: read_ids(reader_of(refusing, table), tasks))
    assert (here is PolicyError) == (damage is plaintext_data)
    sent = pickle.dumps((reader_of(refusing, table), read))
    there, allows = elsewhere(pickle.loads(sent))
    assert outcome(lambda: read_ids(there, tasks)) == here
    assert read_ids(allows, tasks) == outcome(lambda: read_ids(read, tasks))


def test_keys_that_are_not_allowed(tmp_path: Path, catalog: Any, kms: dict[str, str], elsewhere: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    _, tasks = reader(table)
    guarded = sql_catalog(tmp_path, kms, **{"encryption.allowed-key-ids": "other"}).load_table("ns.t")
    without = sql_catalog(tmp_path, None).load_table("ns.t")
    for one, match in ((guarded, "allowed-key-ids"), (without, "no KMS was given")):
        read = reader_of(one, table)
        with pytest.raises(KeyAccessError, match=match):
            read_ids(read, tasks)
        with pytest.raises(KeyAccessError, match=match):
            read_ids(elsewhere(read), tasks)


def test_a_table_under_another_master_key(tmp_path: Path, catalog: Any, elsewhere: Any) -> None:
    """A process that got the FileIO knows that the table was encrypted, and under which key."""
    table = new_table(catalog)
    table.append(rows(0, 3))
    io = elsewhere(table.io)
    raw = {"table-uuid": str(table.metadata.table_uuid), "location": table.location(), "format-version": 3}
    with pytest.raises(IntegrityError, match="seen the table encrypted"):
        io.session.check_metadata(raw, "file:///m.json")
    io.session.remember({**raw, "properties": {KEY_ID: MASTER}}, "file:///m.json")
    with pytest.raises(IntegrityError, match="its master key is 'other'"):
        io.session.remember({**raw, "properties": {KEY_ID: "other"}}, "file:///m.json")


# ----------------------------------------------------------------------------------------------------------- polars


def test_polars_reads_by_itself(catalog: Any) -> None:
    """Its own reader would find ciphertext; the error tells what works, and that works."""
    pl = pytest.importorskip("polars")
    table = new_table(catalog)
    table.append(rows(0, 50))
    told = r"pl\.scan_iceberg\(table, reader_override=\"pyiceberg\"\)"
    for expected in ([*range(50)], [*range(40)]):
        for scan in (pl.scan_iceberg(table), pl.scan_iceberg(table).filter(pl.col("id") > 3).select("id")):
            with pytest.raises(PolicyError, match=told) as caught:
                scan.collect()
        for way in ("table.scan", "to_polars()"):
            assert way in str(caught.value)
        lazy = pl.scan_iceberg(table, reader_override="pyiceberg")
        assert sorted(lazy.collect()["id"].to_list()) == expected
        assert sorted(lazy.filter(pl.col("id") >= 30).select("id").collect()["id"].to_list()) == expected[30:]
        assert lazy.select(pl.len()).collect().item() == len(expected)
        assert sorted(table.scan().to_polars()["id"].to_list()) == expected
        delete(table, "id >= 40")


@pytest.mark.skipif(pyiceberg.__version__.startswith("0.11"), reason="has no scan of appended rows")
def test_polars_and_appended_rows(catalog: Any) -> None:
    pl = pytest.importorskip("polars")
    table = new_table(catalog)
    table.append(rows(0, 3))
    first = table.current_snapshot().snapshot_id
    table.append(rows(3, 6))
    with pytest.raises(PolicyError, match="reader_override"):
        pl.scan_iceberg(table, from_snapshot_id_exclusive=first).collect()
    lazy = pl.scan_iceberg(table, from_snapshot_id_exclusive=first, reader_override="pyiceberg")
    assert sorted(lazy.collect()["id"].to_list()) == [3, 4, 5]
    scan = table.incremental_append_scan(from_snapshot_id_exclusive=first)
    assert sorted(scan.to_arrow()["id"].to_pylist()) == [3, 4, 5]


def test_a_copy_of_a_table_is_the_table(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    same = copy.copy(table)
    assert type(same) is type(table)
    same.append(rows(3, 6))
    assert (ids(same), ids(table)) == ([*range(6)], [*range(3)])
    assert isinstance(table_io(same), FileIO)
    verify(table.refresh()).raise_for_failures()
    assert pa.concat_tables([table.scan().to_arrow()]).num_rows == 6
