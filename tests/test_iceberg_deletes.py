"""Deletes by deletion vectors: rows that stay keep their file, their row ids and their sequence numbers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from iceberg_tables import ids, new_table, open_whole, rows, sql_catalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from ags_fast.iceberg import delete, files, open_table, rekey
from ags_fast.iceberg.commit import edit, raw_metadata
from ags_fast.iceberg.container import read_container
from ags_fast.iceberg.manifests import Known
from ags_fast.iceberg.work import heads
from ags_fast.jobs import LocalEngine


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Any:
    return sql_catalog(tmp_path, kms)


def table_files(table: Any) -> list[str]:
    """The files below the table's location."""
    return [str(path) for path in Path(table.location().removeprefix("file://")).rglob("*") if path.is_file()]


def live(table: Any) -> list[Known]:
    """All live entries of the current snapshot."""
    head = heads.read_head(table.io, raw_metadata(table))
    return [] if head is None else head.files()


def data(table: Any) -> dict[str, tuple[int | None, int | None]]:
    """The data files, with their first row id and sequence number."""
    return {one.path: (one.first_row_id, one.sequence_number) for one in live(table) if one.content == 0}


def test_rows_that_stay_keep_their_ids(catalog: Any, kms: dict[str, str]) -> None:
    table = new_table(catalog)
    table.append(rows(0, 100))
    table.append(rows(100, 200))
    before = data(table)
    done = delete(table, "id >= 90 and id < 110")
    assert (done.rows, done.vectors, done.files) == (20, 2, 0)
    assert done.snapshot_id == table.current_snapshot().snapshot_id
    assert ids(table) == [*range(90), *range(110, 200)]
    assert data(table) == before
    assert raw_metadata(table)["next-row-id"] == 200
    again = delete(table, "id >= 85 and id < 95")
    assert (again.rows, again.vectors) == (5, 1)
    assert ids(table) == [*range(85), *range(110, 200)]
    vectors = [one for one in live(table) if one.format == "PUFFIN"]
    assert sorted(one.record_count for one in vectors) == [10, 15]
    assert len({one.referenced_data_file for one in vectors}) == 2
    assert ids(open_table(table.metadata_location, kms=kms)) == ids(table)


def test_nothing_that_matches_commits_nothing(catalog: Any) -> None:
    table = new_table(catalog)
    assert delete(table, "id = 1").snapshot_id is None
    table.append(rows(0, 10))
    location = table.metadata_location
    assert delete(table, "id = 77").snapshot_id is None
    delete(table, "id = 7")
    first = table.metadata_location
    assert delete(table, "id = 7").rows == 0
    assert table.metadata_location == first != location


def test_a_file_whose_last_row_goes_is_removed(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 10))
    table.append(rows(10, 20))
    delete(table, "id < 4")
    done = delete(table, "id < 11")
    assert (done.rows, done.vectors, done.files) == (7, 1, 1)
    assert len(data(table)) == 1
    assert [one.record_count for one in live(table) if one.format == "PUFFIN"] == [1]
    assert ids(table) == list(range(11, 20))
    delete(table, "id >= 0")
    assert live(table) == []
    assert ids(table) == []
    summary = table.current_snapshot().summary
    assert summary["total-data-files"] == summary["total-delete-files"] == summary["total-records"] == "0"


def test_time_travel_and_branches(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 10))
    first = table.current_snapshot().snapshot_id
    table.manage_snapshots().create_branch(first, "dev").commit()
    delete(table, "id < 5", branch="dev")
    assert ids(table) == list(range(10))
    assert sorted(table.scan().use_ref("dev").to_arrow()["id"].to_pylist()) == list(range(5, 10))
    delete(table, "id >= 5")
    assert ids(table) == list(range(5))
    assert ids(table, snapshot_id=first) == list(range(10))


def test_partitions_and_evolved_schemas(catalog: Any) -> None:
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "name"))
    table = catalog.create_table("ns.p", schema, partition_spec=spec, properties={"encryption.key-id": "master"})
    table.append(rows(0, 6))
    table.append(rows(0, 6))
    with table.update_schema() as update:
        update.rename_column("id", "number").add_column("more", StringType())
    with table.update_spec() as update:
        update.remove_field("name")
    table.refresh()
    import pyarrow as pa

    table.append(pa.table({"number": [7, 8], "name": ["a", "b"], "more": ["x", None]}))
    assert delete(table, "number = 3 or more = 'x'").rows == 3
    left = sorted(table.scan().to_arrow()["number"].to_pylist())
    assert left == [0, 0, 1, 1, 2, 2, 4, 4, 5, 5, 8]


def test_a_column_that_was_renamed_since(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 5))
    with table.update_schema() as update:
        update.rename_column("id", "Number")
    assert delete(table, "number < 2", case_sensitive=False).rows == 2
    with pytest.raises(ValueError, match="number"):
        delete(table, "number < 2")
    assert table.scan().to_arrow()["Number"].to_pylist() == [2, 3, 4]


def test_the_method_of_tables(catalog: Any) -> None:
    """As PyIceberg has it, but rows that stay keep their ids, unless the table's property asks for new files."""
    table = new_table(catalog)
    table.append(rows(0, 10))
    before = data(table)
    table.delete("id < 3", snapshot_properties={"who": "test"})
    assert table.current_snapshot().summary["who"] == "test"
    with pytest.warns(UserWarning, match="did not match"):
        table.delete("id < 3")
    assert data(table) == before
    table.transaction().set_properties({"write.delete.mode": "copy-on-write"}).commit_transaction()
    table.delete("id < 4")
    assert data(table).keys().isdisjoint(before)
    assert ids(table) == list(range(4, 10))


def test_null_rows_stay(catalog: Any) -> None:
    import pyarrow as pa

    table = new_table(catalog)
    table.append(pa.table({"id": pa.array([1, None, 3], pa.int64()), "name": ["a", "b", None]}))
    assert delete(table, "id > 1").rows == 1
    assert sorted(table.scan().to_arrow()["name"].to_pylist()) == ["a", "b"]


def test_pyiceberg_goes_on_after_a_delete(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 100))
    delete(table, "id < 10")
    table.append(rows(100, 110))
    table.overwrite(rows(50, 60), overwrite_filter="id >= 50 and id < 60")
    assert ids(table) == list(range(10, 110))
    delete(table, "id >= 105")
    assert ids(table) == list(range(10, 105))


def test_merged_manifests_keep_row_ids(catalog: Any) -> None:
    merge = {"commit_manifest-merge_enabled": "true", "commit_manifest_min-count-to-merge": "2"}
    table = new_table(catalog, **merge)
    for i in range(3):
        table.append(rows(10 * i, 10 * i + 10))
        delete(table, f"id = {10 * i}")
    before = data(table)
    table.append(rows(30, 40))
    manifests = [one for one in table.inspect.manifests().to_pylist() if one["content"] == 0]
    assert [one["existing_data_files_count"] + one["added_data_files_count"] for one in manifests] == [4]
    assert before.items() < data(table).items()
    first = sorted(one for one, _ in data(table).values() if one is not None)
    assert all(b - a >= 10 for a, b in pairwise(first))
    assert len(first) == 4
    assert ids(table) == [i for i in range(40) if i not in (0, 10, 20)]


def test_a_commit_that_came_first_is_seen(catalog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = new_table(catalog)
    table.append(rows(0, 10))
    other = catalog.load_table("ns.t")
    real: Any = heads.edit  # type: ignore[attr-defined]
    calls: list[int] = []

    def late(*args: Any) -> Any:
        if not calls:
            calls.append(1)
            other.append(rows(10, 13))
        return real(*args)

    monkeypatch.setattr(heads, "edit", late)
    assert delete(table, "id < 2").rows == 2
    assert ids(table) == list(range(2, 13))


def test_what_is_written_is_encrypted(tmp_path: Path, catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 10))
    delete(table, "id = 4")
    kinds = {one.kind: one for one in files(table)}
    assert set(kinds) == {"manifest-list", "manifest", "data", "deletion-vector"}
    for path in (tmp_path / "wh").rglob("*"):
        if path.is_file() and path.suffix != ".json":
            assert path.read_bytes()[:4] in (b"AGS1", b"PARE")
    vector = kinds["deletion-vector"]
    assert vector.key_metadata is not None
    plain = open_whole(Known(vector.path, vector.length, vector.key_metadata), table.io.inner(vector.path))
    assert plain[:4] == b"PFA1"
    listed = read_container(
        open_whole(
            Known(
                table.current_snapshot().manifest_list,
                0,
                table.io.table.list_key(table.current_snapshot().manifest_list),
            ),
            table.io.inner("/"),
        )
    )
    assert listed.meta["format-version"] == b"3"
    edit(table, lambda raw: raw)


@pytest.mark.parametrize("error", [ConnectionError("after the commit"), KeyboardInterrupt()])
@pytest.mark.parametrize("action", ["delete", "manifests", "data"])
def test_an_error_after_the_commit_loses_nothing(catalog: Any, action: Any, error: BaseException) -> None:
    """The snapshot is there, so its files must be."""
    table = new_table(catalog)
    table.append(rows(0, 10))
    commit = catalog.commit_table

    def act(table: Any) -> None:
        if action == "delete":
            delete(table, "id = 3")
        else:
            rekey(table, what=action, engine=LocalEngine(0))

    def commit_and_fail(*args: Any) -> Any:
        commit(*args)
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "commit_table", commit_and_fail)
        with pytest.raises(type(error)):
            act(table)
    table = catalog.load_table("ns.t")
    assert len(table.metadata.snapshots) == 2
    assert ids(table) == [i for i in range(10) if i != 3 or action != "delete"]


# ---------------------------------------------------------------- more entries of a snapshot's summary

NOT_TEXT: list[dict[Any, Any]] = [{"job": 1}, {"job": None}, {"job": ["a"]}, {"job": b"a"}, {1: "a"}]


@pytest.mark.parametrize("more", NOT_TEXT)
def test_entries_that_are_not_text_are_refused_before_the_commit(catalog: Any, more: dict[Any, Any]) -> None:
    """Java loads no table with such an entry."""
    table = new_table(catalog)
    table.append(rows(0, 3))
    location = table.metadata_location
    before = sorted(table_files(table))
    with pytest.raises(TypeError, match="snapshot_properties are text"):
        delete(table, "id = 1", snapshot_properties=more)
    with pytest.raises(TypeError, match="snapshot_properties are text"):
        table.delete("id = 1", snapshot_properties=more)
    assert sorted(table_files(table)) == before
    for change in (table.append, table.overwrite):
        with pytest.raises(TypeError):
            change(rows(3, 5), snapshot_properties=more)
    with pytest.raises(TypeError), table.transaction() as transaction:
        transaction.delete("id = 1", snapshot_properties=more)
    assert catalog.load_table("ns.t").metadata_location == location
    assert ids(catalog.load_table("ns.t")) == [0, 1, 2]


def test_the_entries_of_a_delete_win(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    own = {"operation": "append", "total-records": "many", "added-data-files": "99", "added-dvs": "7", "job": "nightly"}
    delete(table, "id = 1", snapshot_properties={**own, "added-by": "me"})
    head = raw_metadata(table)["snapshots"][-1]["summary"]
    assert head["operation"] == "delete"
    assert (head["total-records"], head["added-dvs"]) == ("3", "1")
    assert "added-data-files" not in head
    assert (head["job"], head["added-by"]) == ("nightly", "me")
    table.append(rows(3, 5), snapshot_properties={"total-records": "many", "job": "daily"})
    assert catalog.load_table("ns.t").current_snapshot().summary["total-records"] == "5"
    delete(table, "id = 3")
    assert ids(table) == [0, 2, 4]
