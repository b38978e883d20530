"""Tables whose newest snapshot is written anew under new data keys."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pyiceberg
from iceberg_tables import MIXED, ids, new_table, rows, sql_catalog

from ags_fast import IntegrityError, PolicyError
from ags_fast.iceberg import clear_cache, delete, encrypt, expire, files, open_table, rekey, verify
from ags_fast.iceberg.commit import raw_metadata
from ags_fast.iceberg.work import tasks
from ags_fast.iceberg.work.heads import commit, read_head
from ags_fast.iceberg.work.tasks import FileTask, TableContext
from ags_fast.iceberg.writing import new_key
from ags_fast.jobs import LocalEngine
from ags_fast.keys.kms import load_kms
from ags_fast.puffin.vectors import read_puffin

if TYPE_CHECKING:
    from pathlib import Path

    from ags_fast.iceberg.manifests import Known

HERE = LocalEngine(0)


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Any:
    return sql_catalog(tmp_path, kms, **MIXED)


def live(table: Any) -> list[Known]:
    """All live entries of the current snapshot."""
    head = read_head(table.io, raw_metadata(table))
    return [] if head is None else head.files()


def lineage(table: Any) -> list[tuple[Any, ...]]:
    """What must stay of each file, whatever its path."""
    found = [(one.content, one.first_row_id, one.sequence_number, one.record_count) for one in live(table)]
    return sorted(found, key=str)


def keys(table: Any) -> dict[str, bytes]:
    """The keys of all files of the current snapshot, by path."""
    return {one.path: one.key_metadata.encryption_key for one in files(table) if one.key_metadata is not None}


def filled(catalog: Any) -> Any:
    table = new_table(catalog)
    for first in (0, 10, 20):
        table.append(rows(first, first + 10))
    delete(table, "id = 3 or id = 14")
    return table


def test_nothing_that_workers_get_has_a_key(kms: dict[str, str]) -> None:
    context = TableContext.begin(
        "rekey", "job", table_uuid="u", kms=load_kms(kms), wrapping_key_id="master", settings={"s3.secret": "hidden"}
    )
    key = new_key(16)
    wrapped = context.wrap(key, tasks.OLD_KEY, "a")
    task = FileTask("a", "PARQUET", 7, wrapped, "b", context.wrap(key, tasks.NEW_KEY, "b"))
    sent = pickle.dumps((context, task))
    assert key.encryption_key not in sent
    assert "hidden" not in repr(context)
    got: TableContext = pickle.loads(sent)[0]
    assert got.unwrap(wrapped, tasks.OLD_KEY, "a") == key
    for purpose, path in ((tasks.NEW_KEY, "a"), (tasks.OLD_KEY, "b")):
        with pytest.raises(IntegrityError):
            got.unwrap(wrapped, purpose, path)


def test_manifests(catalog: Any, kms: dict[str, str]) -> None:
    table = filled(catalog)
    before, entries, old = keys(table), lineage(table), table.current_snapshot()
    next_row_id = raw_metadata(table)["next-row-id"]
    result = rekey(table)
    assert result.counts["ok"] == 4
    assert result.warnings
    after, now = keys(table), table.current_snapshot()
    data = {one.path for one in live(table)}
    assert {path: key for path, key in before.items() if path in data} == {
        path: key for path, key in after.items() if path in data
    }
    assert not {before[path] for path in before if path not in data} & set(after.values())
    assert not (before.keys() & after.keys()) - data
    assert lineage(table) == entries
    assert {one.status for one in live(table)} == {0}
    assert now.summary["operation"] == "replace" if isinstance(now.summary, dict) else True
    assert now.parent_snapshot_id == old.snapshot_id
    assert raw_metadata(table)["next-row-id"] == next_row_id
    expected = [i for i in range(30) if i not in (3, 14)]
    assert ids(table) == ids(table, snapshot_id=old.snapshot_id) == expected
    clear_cache()
    assert ids(open_table(table.metadata_location, kms=kms)) == expected
    table.append(rows(30, 40))
    delete(table, "id < 10")
    assert ids(table) == [i for i in range(10, 40) if i != 14]


def manifests(table: Any) -> list[str]:
    """The paths of the current snapshot's manifests."""
    paths: list[str] = table.inspect.manifests()["path"].to_pylist()
    return paths


def test_manifests_in_other_processes(catalog: Any) -> None:
    table = filled(catalog)
    entries, old = lineage(table), manifests(table)
    result = rekey(table, engine=LocalEngine(2))
    result.raise_for_failures()
    assert sorted(row.src for row in result.rows) == sorted(old)
    assert sorted(row.dst or "" for row in result.rows) == sorted(manifests(table))
    assert lineage(table) == entries
    assert verify(table).failed == []


def test_manifests_that_another_commit_adds(catalog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have moved by then stay as they are, and only the new one moves."""
    table = filled(catalog)
    late: list[int] = []
    commit = catalog.commit_table

    def racing(*args: Any) -> Any:
        if not late:
            late.append(1)
            catalog.load_table("ns.t").append(rows(30, 40))
        return commit(*args)

    monkeypatch.setattr(catalog, "commit_table", racing)
    result = rekey(table)
    result.raise_for_failures()
    assert len(result.rows) == len({row.src for row in result.rows}) == 5
    assert sorted(row.dst or "" for row in result.rows) == sorted(manifests(table))
    assert ids(table) == [i for i in range(40) if i not in (3, 14)]
    assert verify(table, orphans=True).counts["failed"] == 0
    assert not [row for row in verify(table, orphans=True).rows if row.error_class == "Orphan" and "-m0" in row.src]


def test_a_damaged_manifest(tmp_path: Path, catalog: Any) -> None:
    """Nothing is committed, and the next run goes on by the plan, to the same places."""
    table = filled(catalog)
    path, location = manifests(table)[1], table.metadata_location
    file = tmp_path.joinpath(path.removeprefix(f"file://{tmp_path}/"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    first = rekey(table)
    assert [(row.src, row.error_class) for row in first.failed] == [(path, "IntegrityError")]
    assert table.refresh().metadata_location == location
    assert len(list(tmp_path.rglob("*-rekey-manifests-*.plan"))) == 1
    file.write_bytes(whole)
    second = rekey(table)
    second.raise_for_failures()
    assert {row.src: row.dst for row in second.rows} == {row.src: row.dst for row in first.rows}
    assert not list(tmp_path.rglob("*.plan"))
    assert verify(table, snapshots="current").failed == []
    third = rekey(table)
    assert not {row.dst for row in third.rows} & {row.dst for row in second.rows}


def test_a_list_that_tells_other_numbers(catalog: Any) -> None:
    """The new list says what the old one did, so that must be true."""
    table = filled(catalog)

    def lying(raw: dict[str, Any], head: Any, writer: Any) -> dict[str, Any]:
        records = [{**one.record, "existing_rows_count": one.record["existing_rows_count"] + 1} for one in head.named]
        made: dict[str, Any] = writer.commit(writer.begin({}), head.listed, records)
        return made

    commit(table, lying)
    location = table.metadata_location
    assert {row.error_class for row in rekey(table).failed} == {"FormatError"}
    assert table.refresh().metadata_location == location
    rekey(table, what="data", engine=HERE).raise_for_failures()
    assert verify(table, snapshots="current").failed == []


@pytest.mark.parametrize("engine", [HERE, LocalEngine(2)], ids=["here", "local"])
def test_data(tmp_path: Path, catalog: Any, kms: dict[str, str], engine: LocalEngine) -> None:
    table = filled(catalog)
    before, entries, old = keys(table), lineage(table), table.current_snapshot()
    next_row_id, totals = raw_metadata(table)["next-row-id"], dict(old.summary.additional_properties)
    result = rekey(table, what="data", engine=engine)
    result.raise_for_failures()
    assert result.counts["ok"] == 4
    after = keys(table)
    assert not before.keys() & after.keys()
    assert not set(before.values()) & set(after.values())
    assert lineage(table) == entries
    assert raw_metadata(table)["next-row-id"] == next_row_id
    expected = [i for i in range(30) if i not in (3, 14)]
    assert ids(table) == ids(table, snapshot_id=old.snapshot_id) == expected
    now = dict(table.current_snapshot().summary.additional_properties)
    for name in ("total-records", "total-data-files", "total-delete-files", "total-position-deletes"):
        assert now.get(name) == totals.get(name), name
    vectors = [one for one in live(table) if one.format == "PUFFIN"]
    data = {one.path for one in live(table) if one.content == 0}
    assert {one.referenced_data_file for one in vectors} <= data
    with table.io.open_known(vectors[0]) as file:
        named = {blob.properties["referenced-data-file"] for blob in read_puffin(file.read()).blobs}
    assert named <= data
    assert not list(tmp_path.rglob("*.plan"))
    expire(table)
    assert ids(table) == expected
    assert ids(open_table(table.metadata_location, kms=kms)) == expected
    delete(table, "id = 4")
    assert ids(table) == [i for i in expected if i != 4]


def test_nothing_to_do(catalog: Any) -> None:
    table = new_table(catalog)
    location = table.metadata_location
    assert rekey(table).rows == rekey(table, what="data", engine=HERE).rows == []
    assert table.metadata_location == location
    with pytest.raises(ValueError, match="'manifests' or 'data'"):
        rekey(table, what="files")  # type: ignore[arg-type]


def test_plaintext_tables_are_refused(catalog: Any) -> None:
    table = catalog.create_table("ns.plain", schema=rows(0, 1).schema)
    with pytest.raises(PolicyError, match="encrypt"):
        rekey(table)


def group_offsets(table: Any, location: str) -> list[int]:
    """Where the row groups of an encrypted file begin, as pyarrow reads its footer."""
    known = next(one for one in live(table) if one.path == location)
    assert known.key_metadata is not None
    key = pe.create_decryption_properties(known.key_metadata.encryption_key, aad_prefix=known.key_metadata.aad_prefix)
    footer = pq.ParquetFile(location.removeprefix("file://"), decryption_properties=key).metadata
    first = [footer.row_group(i).column(0) for i in range(footer.num_row_groups)]
    return [one.dictionary_page_offset or one.data_page_offset for one in first]


def test_split_offsets(tmp_path: Path, catalog: Any) -> None:
    """Spark splits files there: they are those of the encrypted file."""
    table = new_table(catalog, **{"write.parquet.row-group-limit": "1000"})
    table.append(rows(0, 3500))
    table.append(rows(3500, 3503))

    def check(groups: list[int]) -> None:
        found = {task.file.file_path: task.file.split_offsets for task in table.scan().plan_files()}
        assert found == {path: group_offsets(table, path) for path in found}
        assert sorted(len(offsets or ()) for offsets in found.values()) == groups

    check([1, 4])
    delete(table, "id = 7")
    table.transaction().set_properties({"comment": "x"}).commit_transaction()
    rekey(table)
    check([1, 4])
    rekey(table, what="data", engine=HERE).raise_for_failures()
    check([1, 4])
    expire(table)
    table.overwrite(rows(9, 10), overwrite_filter="id >= 3500")
    check([1, 4])


def split_offsets(table: Any) -> dict[str, list[int] | None]:
    """What the entries of the newest snapshot say of data files."""
    return {task.file.file_path: task.file.split_offsets for task in table.scan().plan_files()}


def test_split_offsets_of_merged_manifests(tmp_path: Path, kms: dict[str, str], catalog: Any) -> None:
    """Each append merges all manifests: entries of files that others wrote keep what they say."""
    merge = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"}
    table = new_table(catalog, **merge, **{"write.parquet.row-group-limit": "1000"})
    for i in range(4):
        table.append(rows(3000 * i, 3000 * i + 2500))
        if i == 1:  # as another process does it
            clear_cache()
            catalog = sql_catalog(tmp_path, kms)
            table = catalog.load_table("ns.t")
        found = split_offsets(table)
        assert found == {path: group_offsets(table, path) for path in found}
        assert [len(offsets or ()) for offsets in found.values()] == [3] * (i + 1)
    assert len([one for one in table.inspect.manifests().to_pylist() if one["content"] == 0]) == 1


@pytest.mark.parametrize("merge", [True, False])
def test_split_offsets_after_a_lost_race(catalog: Any, merge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyIceberg's second attempt has the offsets of the plaintext file again."""
    if pyiceberg.__version__.startswith("0.11"):
        pytest.skip("PyIceberg 0.11 makes one attempt")
    options = {"commit.manifest-merge.enabled": str(merge).lower(), "commit.manifest.min-count-to-merge": "2"}
    options |= {"write.parquet.row-group-limit": "1000", "commit.retry.min-wait-ms": "1"}
    table = new_table(catalog, **options)
    table.append(rows(0, 2500))
    commit, calls = catalog.commit_table, []

    def late(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            catalog.load_table("ns.t").append(rows(3000, 5500))
        return commit(*args)

    monkeypatch.setattr(catalog, "commit_table", late)
    table.append(rows(6000, 8500))
    assert len(calls) == 3
    found = split_offsets(table)
    assert len(found) == 3
    assert found == {path: group_offsets(table, path) for path in found}


@pytest.mark.parametrize("version", ["1", "2"])
def test_split_offsets_of_a_table_that_is_encrypted(catalog: Any, version: str) -> None:
    properties = {"write.parquet.row-group-limit": "1000", "format-version": version}
    table = catalog.create_table("ns.plain", rows(0, 1).schema, properties=properties)
    table.append(rows(0, 3500))
    table.append(rows(3500, 3503))
    before = {len(offsets or ()): offsets for offsets in split_offsets(table).values()}
    encrypt(table, wrapping_key_id="master", engine=HERE).raise_for_failures()
    found = split_offsets(table)
    assert sorted(len(offsets or ()) for offsets in found.values()) == [1, 4]
    assert found == {path: group_offsets(table, path) for path in found}
    assert before[4] not in found.values()  # modules are longer by their tags
