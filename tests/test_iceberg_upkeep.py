"""The daily upkeep of an encrypted table, and rotations that let nothing of the old keys stay."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from iceberg_tables import MASTER, MIXED, SCHEMA, ids, new_table, rows, sql_catalog
from test_iceberg_expiry import filled, needed, stored, text_of

from ags_fast.errors import KeyAccessError, PolicyError
from ags_fast.iceberg import delete, encrypt, expire, files, maintain, open_table, rekey, rotate, verify
from ags_fast.iceberg.commit import edit, raw_metadata
from ags_fast.iceberg.work import plans
from ags_fast.jobs import LocalEngine
from ags_fast.keys.iceberg import LIFESPAN_MS
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from ags_fast.jobs.results import JobResult

HERE = LocalEngine(0)
DAY_MS = 86_400_000


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Any:
    return sql_catalog(tmp_path, kms, **MIXED)


def set_back(table: Any, days: float) -> None:
    """Let the snapshots be as many days older."""
    by = int(days * DAY_MS)

    def older(raw: dict[str, Any]) -> dict[str, Any]:
        logs = {
            name: [{**one, "timestamp-ms": one["timestamp-ms"] - by} for one in raw.get(name) or ()]
            for name in ("snapshots", "snapshot-log")
        }
        return {**raw, **logs}

    edit(table, older)


def kinds(result: JobResult) -> set[str | None]:
    return {row.format for row in result.rows}


def wraps(table: Any) -> set[str]:
    return {one["encrypted-key-metadata"] for one in raw_metadata(table)["encryption-keys"]}


def shown(folder: Path, texts: set[str]) -> set[str]:
    """Those of the texts that a metadata file in a folder has."""
    found = [text_of(path) for path in stored(folder) if path.endswith(".json")]
    return {one for one in texts if any(one in text for text in found)}


# ---------------------------------------------------------------- forced


@pytest.mark.parametrize("what", ["kek", "mek"])
def test_a_rotation_that_expires(tmp_path: Path, catalog: Any, kms: dict[str, str], what: Any) -> None:
    table = filled(catalog)
    snapshots, old = {one.snapshot_id for one in table.metadata.snapshots}, wraps(table)
    if what == "mek":
        local.rotate_key(kms, MASTER)
        old = {one["encrypted-key-metadata"] for one in raw_metadata(table)["encryption-keys"] if one.get("properties")}
    assert shown(tmp_path, old) == old
    result = rotate(table, what=what, force_expire=True)
    assert result.failed == []
    assert not result.warnings
    assert result.expired is not None
    assert kinds(result.expired) == {"metadata"}
    assert {row.status for row in result.expired.rows} == {"ok"}
    assert shown(tmp_path, old) == set()
    assert {one.snapshot_id for one in table.metadata.snapshots} == snapshots
    for snapshot_id in snapshots:
        assert ids(open_table(table.metadata_location, kms=kms), snapshot_id=snapshot_id)
    assert verify(table, orphans=True).counts == {"ok": len(needed(table)), "skipped": 0, "failed": 0}


def test_a_rotation_to_another_kms_that_expires(tmp_path: Path, catalog: Any, kms: dict[str, str]) -> None:
    table = filled(catalog)
    other = {**kms, "kms.local.path": str(tmp_path / "other.json"), "kms.local.key-file": str(tmp_path / "other.key")}
    local.create_keystore(other)
    local.create_key(other, MASTER)
    old = wraps(table)
    result = rotate(table, new_kms=other, force_expire=True)
    assert result.expired is not None
    assert result.expired.failed == []
    assert shown(tmp_path, old) == set()
    assert ids(open_table(table.metadata_location, kms=other)) == ids(sql_catalog(tmp_path, other).load_table("ns.t"))


@pytest.mark.parametrize("what", ["manifests", "data"])
def test_a_rekey_that_expires(tmp_path: Path, catalog: Any, kms: dict[str, str], what: Any) -> None:
    """Whatever the retention: only what branches and tags name stays, and a warning says so."""
    table = new_table(catalog, **{"history.expire.min-snapshots-to-keep": "10"})
    for i in range(3):
        table.append(rows(10 * i, 10 * i + 10))
    delete(table, "id = 3")
    before, expected = {one.path for one in files(table)}, ids(table)
    named = {one["key-id"] for one in raw_metadata(table)["snapshots"]}
    result = rekey(table, what=what, engine=HERE, force_expire=True)
    assert result.failed == []
    assert not result.warnings
    assert result.expired is not None
    assert result.expired.failed == []
    assert len(table.metadata.snapshots) == 1
    assert ids(table) == ids(open_table(table.metadata_location, kms=kms)) == expected
    gone = {path for path in before if what == "data" or path.endswith(".avro")}
    assert not gone & stored(tmp_path)
    assert stored(tmp_path) == needed(table)
    assert shown(tmp_path, named) == set()


def test_what_a_forced_expiry_keeps(tmp_path: Path, catalog: Any) -> None:
    table = filled(catalog)
    result = rekey(table, force_expire=True)
    (warning,) = result.warnings
    assert "dev, one" in warning or "one, dev" in warning
    assert set(table.metadata.refs) == {"main", "dev", "one"}
    assert len(table.metadata.snapshots) == 3
    assert len(table.scan().use_ref("one").to_arrow()) == 10
    assert verify(table).failed == []


def test_a_dry_run_and_a_refusal_expire_nothing(tmp_path: Path, catalog: Any) -> None:
    table = filled(catalog)
    before = stored(tmp_path)
    for call in (rotate, rekey):
        planned = call(table, force_expire=True, dry_run=True)
        assert planned.expired is None
        assert stored(tmp_path) == before
    with pytest.raises(ValueError, match="force_expire"):
        rotate(table, keep_old=True, force_expire=True)
    table.transaction().set_properties({"gc.enabled": "false"}).commit_transaction()
    location = table.metadata_location
    for call in (rotate, rekey):
        with pytest.raises(PolicyError, match=r"gc\.enabled=false"):
            call(table, force_expire=True)
    assert table.refresh().metadata_location == location


# ---------------------------------------------------------------- upkeep


def test_nothing_is_due(tmp_path: Path, catalog: Any) -> None:
    table = filled(catalog)
    before, location = stored(tmp_path), table.metadata_location
    result = maintain(table)
    assert (result.op, result.rows, result.warnings) == ("maintain", [], [])
    assert result.pin
    assert (stored(tmp_path), table.metadata_location) == (before, location)


def test_expiry_by_default(tmp_path: Path, catalog: Any) -> None:
    """Snapshots of more than 5 days go, as with Iceberg Java."""
    table = filled(catalog)
    set_back(table, 6)
    table.append(rows(200, 201))
    expected, current = ids(table), table.current_snapshot().snapshot_id
    planned = maintain(table, dry_run=True)
    assert {row.status for row in planned.rows} == {"planned"}
    result = maintain(table)
    assert result.failed == []
    assert {row.src for row in result.rows} == {row.src for row in planned.rows}
    assert {"snapshot", "manifest-list", "manifest", "manifest-list-key"} <= kinds(result)
    assert set(table.metadata.refs) == {"main", "dev", "one"}
    assert {one.snapshot_id for one in table.metadata.snapshots} == {
        current,
        *(table.metadata.refs[name].snapshot_id for name in ("dev", "one")),
    }
    assert ids(table) == expected
    assert verify(table, orphans=True).counts["failed"] == 0


def test_expiry_by_properties(catalog: Any) -> None:
    table = new_table(catalog, **{"history.expire.max-snapshot-age-ms": str(9 * DAY_MS)})
    for i in range(3):
        table.append(rows(i, i + 1))
    set_back(table, 6)
    assert maintain(table).rows == []
    table.transaction().set_properties({"history.expire.max-snapshot-age-ms": "0"}).commit_transaction()
    table.transaction().set_properties({"history.expire.min-snapshots-to-keep": "2"}).commit_transaction()
    assert sum(row.format == "snapshot" for row in maintain(table).rows) == 1
    assert len(table.metadata.snapshots) == 2
    table.transaction().set_properties({"history.expire.max-snapshot-age-ms": str((1 << 63) - 1)}).commit_transaction()
    assert maintain(table).rows == []
    table.transaction().set_properties({"gc.enabled": "false"}).commit_transaction()
    set_back(table, 10**6)
    assert maintain(table).rows == []


def test_a_kek_past_its_lifetime(monkeypatch: pytest.MonkeyPatch, catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    assert maintain(table).rows == []
    late = time.time_ns() + LIFESPAN_MS * 1_000_000
    monkeypatch.setattr(time, "time_ns", lambda: late)

    def keks() -> list[str]:
        return [one["key-id"] for one in raw_metadata(table)["encryption-keys"] if one["encrypted-by-id"] == MASTER]

    (old,) = keks()
    location = table.metadata_location
    planned = maintain(table, dry_run=True)
    assert kinds(planned) == {"metadata", "kek", "manifest-list-key"}  # older metadata are as old
    assert keks() == [old]
    result = maintain(table)
    assert result.failed == []
    assert {row.src for row in result.rows if row.format == "metadata"} == {
        row.src for row in planned.rows if row.format == "metadata"
    }
    assert os.path.exists(location.removeprefix("file://"))
    new, kept = keks()
    assert kept == old  # for writers that have begun
    assert ids(table) == [0, 1, 2]
    second = maintain(table)
    assert [(row.src, row.status) for row in second.rows if row.format == "kek"] == [(old, "ok")]
    assert keks() == [new]
    assert kinds(maintain(table)) <= {"metadata"}
    assert ids(table) == [0, 1, 2]


def dead_plan(tmp_path: Path, table: Any) -> Path:
    """The plan of a rekey that ended with a failed file."""
    path = Path(next(iter(table.scan().plan_files())).file.file_path.removeprefix("file://"))
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    assert rekey(table, what="data", engine=HERE).failed
    path.write_bytes(whole)
    (found,) = tmp_path.rglob("*.plan")
    return found


def test_plans(tmp_path: Path, catalog: Any) -> None:
    """One by which a run can go on stays, and the result names it. One that no run can use goes."""
    table = new_table(catalog)
    table.append(rows(0, 10))
    table.append(rows(10, 20))
    plan = dead_plan(tmp_path, table)
    (row,) = maintain(table).rows
    assert (row.format, row.status, row.error_class) == ("plan", "skipped", "Unfinished")
    assert row.src == f"file://{plan}"
    assert plan.exists()
    table.append(rows(20, 30))
    expire(table)  # the snapshot that the plan was for
    assert [row.status for row in maintain(table, dry_run=True).rows] == ["planned"]
    assert plan.exists()
    assert [(row.format, row.status) for row in maintain(table).rows] == [("plan", "ok")]
    assert not plan.exists()
    assert maintain(table).rows == []
    rekey(table, what="data", engine=HERE).raise_for_failures()
    assert ids(table) == list(range(30))


def test_a_plan_that_goes_on_after_upkeep(tmp_path: Path, catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 10))
    table.append(rows(10, 20))
    dead_plan(tmp_path, table)
    done = {path.name for path in tmp_path.rglob("*.parquet")}
    maintain(table).raise_for_failures()
    rekey(table, what="data", engine=HERE).raise_for_failures()
    assert len({path.name for path in tmp_path.rglob("*.parquet")} - done) == 1  # the one that had failed


def test_a_plan_that_was_committed(tmp_path: Path, catalog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = catalog.create_table("ns.t", schema=SCHEMA)
    table.append(rows(0, 10))
    with monkeypatch.context() as patched:
        patched.setattr(plans.Plan, "end", lambda self: None)  # dies before it
        encrypt(table, wrapping_key_id=MASTER, engine=HERE).raise_for_failures()
    (plan,) = tmp_path.rglob("*.plan")
    found = [row for row in maintain(table).rows if row.format == "plan"]
    assert [(row.src, row.status) for row in found] == [(f"file://{plan}", "ok")]
    assert not plan.exists()


def test_a_plan_that_is_cut(tmp_path: Path, catalog: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 10))
    plan = dead_plan(tmp_path, table)
    plan.write_bytes(plan.read_bytes()[:-1])
    (row,) = maintain(table).rows
    assert (row.status, row.error_class) == ("skipped", "Unreadable")
    assert plan.exists()


def test_a_share_is_verified(catalog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files each day, as who has the keys can tell beforehand, and all lists and manifests."""
    table = new_table(catalog)
    for i in range(12):
        table.append(rows(i, i + 1))
    data = {one.path for one in files(table) if one.kind == "data"}
    assert {row.src for row in maintain(table, verify=1.0).rows if row.format == "data"} == data
    turns: list[set[str]] = []
    now = time.time_ns()
    for day in range(8):
        monkeypatch.setattr(time, "time_ns", lambda day=day: now + day * DAY_MS * 1_000_000)
        planned = {row.src for row in maintain(table, verify=0.25, dry_run=True).rows if row.format == "data"}
        done = [row for row in maintain(table, verify=0.25).rows if row.format == "data"]
        assert {row.status for row in done} <= {"ok"}
        assert {row.src for row in done} == planned
        turns.append(planned)
    assert turns[0] != turns[1] or turns[1] != turns[2]
    assert 4 <= sum(map(len, turns)) <= 60
    assert not set().union(*turns) - data


@pytest.mark.parametrize("engine", [None, LocalEngine(1)], ids=["threads", "process"])
def test_a_damaged_file_is_found(catalog: Any, engine: LocalEngine | None) -> None:
    table = new_table(catalog)
    table.append(rows(0, 10))
    path = next(one.path for one in files(table) if one.kind == "data")
    os.truncate(path.removeprefix("file://"), 100)
    result = maintain(table, verify=1, engine=engine)
    assert [(row.src, row.error_class) for row in result.failed] == [(path, "IntegrityError")]
    assert maintain(table).failed == []


def test_a_step_that_fails_keeps_none_from_being_done(
    tmp_path: Path, catalog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ags_fast.iceberg import upkeep

    table = new_table(catalog)
    table.append(rows(0, 10))

    def broken(*_: object, **__: object) -> None:
        raise KeyAccessError("the KMS refuses")

    for name in ("expire_by", "unused_keys", "find_plan"):
        monkeypatch.setattr(upkeep, name, broken)
    result = maintain(table, verify=1)
    assert {row.src.rpartition("#")[2]: row.error_class for row in result.failed} == dict.fromkeys(
        ("expire", "rotate", "plans"), "KeyAccessError"
    )
    assert result.counts["ok"] == 5  # the metadata file before, too
    assert result.pin


def test_arguments(catalog: Any) -> None:
    table = new_table(catalog)
    assert maintain(table, verify=1).counts["failed"] == 0  # a table without a snapshot
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match="from 0 to 1"):
            maintain(table, verify=share)
    with pytest.raises(TypeError, match="engine"):
        maintain(table, engine="spark")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="plaintext"):
        maintain(catalog.create_table("ns.plain", schema=SCHEMA))
    with pytest.raises(PolicyError, match="catalog"):
        maintain(open_table(table.metadata_location, kms=dict(catalog.session.kms.properties)))
    table.append(rows(0, 1))
    table.transaction().set_properties({"history.expire.max-snapshot-age-ms": "soon"}).commit_transaction()
    (row,) = maintain(table).failed
    assert row.error_class == "PolicyError"
    assert "history.expire.max-snapshot-age-ms" in (row.error or "")
