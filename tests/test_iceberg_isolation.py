"""Deletes of a handle that others have overtaken: what PyIceberg 0.12 makes of them, with deletion vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import pyiceberg
from iceberg_tables import SCHEMA, ids, new_table, rows, sql_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import ValidationException
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import LongType

from ags_fast.iceberg import delete, expire, files, rekey, rotate
from ags_fast.iceberg.commit import edit, raw_metadata
from ags_fast.iceberg.work import heads
from ags_fast.jobs import LocalEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LEVEL = "write.delete.isolation-level"
CONFLICT = "conflict"


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Any:
    return sql_catalog(tmp_path, kms)


@pytest.fixture
def vanilla(tmp_path: Path) -> Any:
    made = SqlCatalog("vanilla", uri=f"sqlite:///{tmp_path}/vanilla.db", warehouse=f"file://{tmp_path}/vanilla")
    made.create_namespace("ns")
    return made


def table_files(table: Any, folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if path.suffix in (".parquet", ".avro", ".puffin")}


# --------------------------------------------------------------------------------- beside PyIceberg with plain tables


def append(first: int, last: int) -> Callable[[Any, str], None]:
    return lambda table, branch: table.append(rows(first, last), branch=branch)


def deleting(filter: str) -> Callable[[Any, str], None]:
    return lambda table, branch: table.delete(filter, branch=branch)


def overwriting(filter: str, first: int, last: int) -> Callable[[Any, str], None]:
    return lambda table, branch: table.overwrite(rows(first, last), overwrite_filter=filter, branch=branch)


LEFT = [0, 2, 3, 4]
# What the other writer does, the filter of the delete, and what comes of it with `serializable` and with `snapshot`.
SCENARIOS: dict[str, tuple[Callable[[Any, str], None], str, Any, Any]] = {
    "rows that match": (append(0, 5), "id = 1", CONFLICT, sorted([0, 1, 2, 3, 4, *LEFT])),
    "other rows": (append(10, 12), "id = 1", [*LEFT, 10, 11], [*LEFT, 10, 11]),
    "rows that may match by their bounds": (overwriting("id > 100", -5, 9), "id = 1", CONFLICT, None),
    "the same rows": (deleting("id = 1"), "id = 1", CONFLICT, CONFLICT),
    "all rows of a file": (deleting("id < 5"), "id = 1", CONFLICT, CONFLICT),
    "rewritten files": (overwriting("id = 3", 30, 31), "id = 1", CONFLICT, CONFLICT),
    "nothing matched, then rows that do": (append(50, 52), "id = 50", CONFLICT, [0, 1, 2, 3, 4, 50, 51]),
    "nothing matches": (append(50, 52), "id = 99", [0, 1, 2, 3, 4, 50, 51], [0, 1, 2, 3, 4, 50, 51]),
}


def outcome(
    catalog: Any, properties: dict[str, str], other: Callable[[Any, str], None], filter: str, branch: str
) -> Any:
    """What a delete by a handle comes to that another writer has overtaken, on an own table."""
    retries = {"commit.retry.min-wait-ms": "1", "commit.retry.max-wait-ms": "2"}
    table = catalog.create_table("ns.t", SCHEMA, properties={**retries, **properties})
    table.append(rows(0, 5))
    if branch != "main":
        table.manage_snapshots().create_branch(table.current_snapshot().snapshot_id, branch).commit()
    stale = catalog.load_table("ns.t")
    other(catalog.load_table("ns.t"), branch)
    there = catalog.load_table("ns.t").scan().use_ref(branch).to_arrow()["id"].to_pylist()
    try:
        stale.delete(filter, branch=branch)
    except ValidationException:
        found = catalog.load_table("ns.t").scan().use_ref(branch).to_arrow()["id"].to_pylist()
        assert sorted(found) == sorted(there)
        return CONFLICT
    found = catalog.load_table("ns.t").scan().use_ref(branch).to_arrow()["id"].to_pylist()
    assert sorted(stale.scan().use_ref(branch).to_arrow()["id"].to_pylist()) == sorted(found)
    return sorted(found)


@pytest.mark.filterwarnings("ignore:Delete operation did not match")
@pytest.mark.parametrize("branch", ["main", "dev"])
@pytest.mark.parametrize("level", [None, "serializable", "snapshot"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_delete_that_was_overtaken(catalog: Any, vanilla: Any, name: str, level: str | None, branch: str) -> None:
    other, filter, serializable, snapshot = SCENARIOS[name]
    properties = {} if level is None else {LEVEL: level}
    found = outcome(catalog, {"encryption.key-id": "master", **properties}, other, filter, branch)
    expected = snapshot if level == "snapshot" else serializable
    if expected is not None:
        assert found == expected
    if not pyiceberg.__version__.startswith("0.11"):  # which has neither isolation levels nor retries
        assert found == outcome(vanilla, properties, other, filter, branch)


@pytest.mark.parametrize("level", ["serializable", "snapshot"])
def test_a_table_that_was_empty(catalog: Any, level: str) -> None:
    table = new_table(catalog)
    table.transaction().set_properties({LEVEL: level}).commit_transaction()
    catalog.load_table("ns.t").append(rows(0, 3))
    if level == "serializable":
        with pytest.raises(ValidationException, match="may have rows that match"):
            delete(table, "id = 1")
    else:
        assert delete(table, "id = 1").snapshot_id is None
    assert ids(catalog.load_table("ns.t")) == [0, 1, 2]


# ------------------------------------------------------------------------------------------------- deletion vectors


def vectors(table: Any) -> list[int]:
    """How many rows each deletion vector deletes."""
    head = heads.read_head(table.io, raw_metadata(table))
    assert head is not None
    return sorted(one.record_count for one in head.files() if one.format == "PUFFIN")


def test_deletes_of_other_rows_of_one_file_are_merged(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 10))
    delete(table, "id < 2")
    first, second = catalog.load_table("ns.t"), catalog.load_table("ns.t")
    assert delete(first, "id = 5").rows == 1
    done = delete(second, "id < 2 or id = 7")  # two of these are deleted in its own snapshot
    assert (done.rows, done.vectors) == (1, 1)
    assert ids(second) == [2, 3, 4, 6, 8, 9]
    assert vectors(second) == [4]
    assert raw_metadata(second)["snapshots"][-1]["summary"]["total-position-deletes"] == "4"


def test_rows_that_both_delete_are_a_conflict(catalog: Any, tmp_path: Path) -> None:
    table = new_table(catalog)
    table.append(rows(0, 10))
    first, second = catalog.load_table("ns.t"), catalog.load_table("ns.t")
    delete(first, "id = 5")
    there = table_files(table, tmp_path)
    with pytest.raises(ValidationException, match="deleted rows that match"):
        delete(second, "id = 5 or id = 6")
    assert table_files(table, tmp_path) == there
    assert delete(second, "id = 5 or id = 6").rows == 1  # it is the newest version by now
    assert ids(second) == [0, 1, 2, 3, 4, 7, 8, 9]


def test_the_last_rows_of_a_file_by_two_deletes(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 4))
    first, second = catalog.load_table("ns.t"), catalog.load_table("ns.t")
    delete(first, "id < 2")
    done = delete(second, "id >= 2")
    assert (done.rows, done.vectors, done.files) == (2, 0, 1)
    assert ids(second) == []


@pytest.mark.parametrize("what", ["kek", "manifests", "property", "schema", "another branch"])
def test_what_does_not_concern_the_rows(catalog: Any, what: str) -> None:
    table = new_table(catalog)
    table.append(rows(0, 10))
    stale, other = catalog.load_table("ns.t"), catalog.load_table("ns.t")
    if what == "kek":
        rotate(other, what="kek")
        expire(other)  # the metadata file of the handle goes
    elif what == "manifests":
        rekey(other)
    elif what == "property":
        other.transaction().set_properties({"comment": "x"}).commit_transaction()
    elif what == "schema":
        with other.update_schema() as update:
            update.rename_column("id", "number")
    else:
        other.manage_snapshots().create_branch(other.current_snapshot().snapshot_id, "dev").commit()
        other.append(rows(0, 3), branch="dev")
    assert delete(stale, "id < 3").rows == 3
    assert stale.scan().to_arrow().num_rows == 7


@pytest.mark.parametrize("what", ["data", "expired", "rolled back"])
def test_what_the_delete_cannot_follow(catalog: Any, what: str, tmp_path: Path) -> None:
    table = new_table(catalog)
    table.append(rows(0, 10))
    first = table.current_snapshot().snapshot_id
    table.append(rows(10, 20))
    stale, other = catalog.load_table("ns.t"), catalog.load_table("ns.t")
    if what == "data":
        rekey(other, what="data", engine=LocalEngine(0)).raise_for_failures()
        why = "removed or rewrote"
    elif what == "expired":
        other.append(rows(20, 30))
        edit(other, lambda raw: {**raw, "snapshots": raw["snapshots"][-1:]})
        why = "not in its history"
    else:
        other.manage_snapshots().rollback_to_snapshot(first).commit()
        why = "not in its history"
    there = table_files(table, tmp_path)
    with pytest.raises(ValidationException, match=why):
        delete(stale, "id = 1")
    assert table_files(table, tmp_path) == there


def test_only_files_with_such_rows_matter(catalog: Any) -> None:
    """PyIceberg's own check goes by bounds: it refuses a delete if any file that may match was rewritten."""
    table = new_table(catalog)
    table.append(rows(0, 10))
    table.append(rows(0, 10).filter([i != 4 for i in range(10)]))
    table.delete("id = 4")  # the first file alone has it
    stale = catalog.load_table("ns.t")
    table.append(rows(20, 30))
    assert delete(stale, "id = 4").snapshot_id is None
    spec = PartitionSpec(PartitionField(1, 1000, BucketTransform(2), "part"))
    parts = catalog.create_table(
        "ns.p", table.schema(), partition_spec=spec, properties={"encryption.key-id": "master"}
    )
    parts.append(rows(0, 10))
    a, b = catalog.load_table("ns.p"), catalog.load_table("ns.p")
    assert [delete(a, "id = 1").rows, delete(b, "id = 2").rows] == [1, 1]
    assert ids(b) == [0, *range(3, 10)]


def test_a_filter_without_case(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 5))
    stale = catalog.load_table("ns.t")
    table.append(rows(10, 12))
    assert delete(stale, "ID = 1", case_sensitive=False).rows == 1
    stale = catalog.load_table("ns.t")
    table.refresh()
    table.append(rows(0, 2))
    with pytest.raises(ValidationException):
        delete(stale, "ID = 0", case_sensitive=False)


def test_a_column_that_grew_since(catalog: Any) -> None:
    import pyarrow as pa

    table = catalog.create_table(
        "ns.t", pa.schema([("id", pa.int32())]), properties={"encryption.key-id": "master", LEVEL: "serializable"}
    )
    table.append(pa.table({"id": pa.array([1, 2], pa.int32())}))
    stale = catalog.load_table("ns.t")
    with table.update_schema() as update:
        update.update_column("id", LongType())
    table.append(pa.table({"id": pa.array([1, 1 << 40], pa.int64())}))
    with pytest.raises(ValidationException):
        delete(stale, "id = 1")


# ------------------------------------------------------------------------------------------------------- lost races


@pytest.mark.parametrize("level", ["serializable", "snapshot"])
def test_a_commit_that_comes_between(catalog: Any, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other writer commits after the delete has written its files: its next attempt is checked, too."""
    table = new_table(catalog)
    table.transaction().set_properties({LEVEL: level}).commit_transaction()
    table.append(rows(0, 5))
    before = table_files(table, tmp_path)
    commit, calls = catalog.commit_table, []

    def late(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            catalog.load_table("ns.t").append(rows(100, 102))
            catalog.load_table("ns.t").append(rows(0, 2))
        return commit(*args)

    monkeypatch.setattr(catalog, "commit_table", late)
    if level == "serializable":
        with pytest.raises(ValidationException, match="may have rows that match"):
            delete(table, "id < 3")
        assert ids(catalog.load_table("ns.t")) == sorted([*range(5), 100, 101, 0, 1])
    else:
        assert delete(table, "id < 3").rows == 3
        assert ids(table) == [0, 1, 3, 4, 100, 101]
    named = {one.path for one in files(catalog.load_table("ns.t"))}
    new = [path for path in table_files(table, tmp_path) if f"file://{path}" not in named]
    assert all(path in before or "snap-" in path for path in new)


def test_a_history_in_a_circle(catalog: Any) -> None:
    """Nobody authenticates which snapshot is whose parent."""
    table = new_table(catalog)
    table.append(rows(0, 3))
    stale = catalog.load_table("ns.t")
    table.append(rows(10, 13))

    def circle(raw: dict[str, Any]) -> dict[str, Any]:
        own = [{**one, "parent-snapshot-id": one["snapshot-id"]} for one in raw["snapshots"]]
        return {**raw, "snapshots": own}

    edit(table, circle)
    with pytest.raises(ValidationException, match="not in its history"):
        delete(stale, "id = 1")


def test_a_tag_is_no_branch(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    table.manage_snapshots().create_tag(table.current_snapshot().snapshot_id, "v1").commit()
    location = table.metadata_location
    with pytest.raises(ValueError, match="v1 is a tag"):
        delete(table, "id = 1", branch="v1")
    assert catalog.load_table("ns.t").metadata_location == location


def test_a_level_that_nobody_knows(catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    table.transaction().set_properties({LEVEL: "snapshots"}).commit_transaction()
    stale = catalog.load_table("ns.t")
    table.append(rows(10, 13))
    with pytest.raises(ValueError, match="'serializable' or 'snapshot'"):
        delete(stale, "id = 1")
    assert ids(catalog.load_table("ns.t")) == [0, 1, 2, 10, 11, 12]
