"""Expiry of encrypted Iceberg tables: which snapshots go, and that nothing goes that a snapshot needs."""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import shutil
import socket
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from hypothesis import given, settings
from hypothesis import strategies as st
from iceberg_tables import KEY_ID, MASTER, ids, new_table, rows, sql_catalog, table_keys
from killing import ended, fork, killed_before_steps
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, ValidationException

from ags_fast.errors import AgsError, IntegrityError, PolicyError
from ags_fast.iceberg import FileIO, delete, files, open_table
from ags_fast.iceberg.catalogs.base import EncryptedCatalog
from ags_fast.iceberg.commit import edit, raw_metadata
from ags_fast.iceberg.expiry import expire, expired
from ags_fast.iceberg.garbage import unreachable
from ags_fast.iceberg.manifests import Known
from ags_fast.iceberg.reading import LIST, Node
from ags_fast.iceberg.rotation import rotate
from ags_fast.iceberg.work import removing
from ags_fast.jobs import LocalEngine
from ags_fast.keys import add_manifest_list_key, clear_cache, load_kms, write_encryption_keys
from ags_fast.keys.kms import local
from ags_fast.keys.metadata import StandardKeyMetadata
from ags_fast.metadata.retention import retained

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyiceberg.catalog import Catalog

Raw = dict[str, Any]
NOW, DAY = 1_700_000_000_000, 86_400_000


# ---------------------------------------------------------------- which snapshots go


def line(*ages: int, first: int = 1, parent: int | None = None, **more: Any) -> list[Raw]:
    """Snapshots of these ages in days, each the parent of the next."""
    made = []
    for i, age in enumerate(ages, first):
        made.append({"snapshot-id": i, "timestamp-ms": NOW - age * DAY, "manifest-list": f"list {i}", **more})
        if parent is not None:
            made[-1]["parent-snapshot-id"] = parent
        parent = i
    return made


def metadata(snapshots: list[Raw], refs: dict[str, Raw] | None = None, **properties: Any) -> Raw:
    names = {"min": "min-snapshots-to-keep", "age": "max-snapshot-age-ms", "ref_age": "max-ref-age-ms"}
    given = {f"history.expire.{names[name]}": str(value) for name, value in properties.items()}
    raw: Raw = {"properties": {KEY_ID: MASTER, **given}, "snapshots": snapshots, "last-updated-ms": NOW}
    if refs is not None:
        raw["refs"] = refs
    return raw


def branch(snapshot_id: int, **more: Any) -> Raw:
    return {"snapshot-id": snapshot_id, "type": "branch", **{name.replace("_", "-"): v for name, v in more.items()}}


def tag(snapshot_id: int, **more: Any) -> Raw:
    return branch(snapshot_id, **more) | {"type": "tag"}


def kept(raw: Raw, keep: int = 1, days: float | None = None) -> list[int]:
    older_than_ms = None if days is None else int(days * DAY)
    return sorted(retained(raw, keep=keep, older_than_ms=older_than_ms, now_ms=NOW)[0])


def test_main() -> None:
    raw = metadata(line(9, 7, 5, 3, 1), {"main": branch(5)})
    assert kept(raw) == [5]
    assert kept(raw, 3) == [3, 4, 5]
    assert kept(raw, 1, 6) == [3, 4, 5]
    assert kept(raw, 4, 2) == [2, 3, 4, 5]
    assert kept(raw, 1, 0) == [5]
    assert kept(raw, 99) == [1, 2, 3, 4, 5]
    assert kept({**raw, "refs": {}, "current-snapshot-id": 5}) == [5]  # version 1 has no refs
    assert kept({**raw, "refs": {}, "current-snapshot-id": -1}) == []
    assert kept(metadata([])) == []


def test_properties() -> None:
    snapshots, refs = line(9, 7, 5, 3, 1), {"main": branch(5)}
    assert kept(metadata(snapshots, refs, min=3)) == [3, 4, 5]
    assert kept(metadata(snapshots, refs, min=3), 4) == [2, 3, 4, 5]
    assert kept(metadata(snapshots, refs, age=6 * DAY)) == [3, 4, 5]
    assert kept(metadata(snapshots, refs, age=6 * DAY), 1, 2) == [5]
    own = {"main": branch(5, min_snapshots_to_keep=2, max_snapshot_age_ms=0)}
    assert kept(metadata(snapshots, own, min=5), 5, 99) == [4, 5]
    own = {"main": branch(5, max_snapshot_age_ms=8 * DAY)}
    assert kept(metadata(snapshots, own)) == [2, 3, 4, 5]
    for bad in ("x", "-1", "1.5", ""):
        with pytest.raises(PolicyError, match="not a whole number"):
            kept(metadata(snapshots, refs, min=bad))


def test_branches_and_tags() -> None:
    snapshots = [*line(9, 7, 5), *line(4, 2, first=11, parent=2), *line(8, first=20)]
    refs = {"main": branch(3), "dev": branch(12), "one": tag(1), "gone": tag(77)}
    assert kept(metadata(snapshots, refs)) == [1, 3, 12]
    assert kept(metadata(snapshots, refs), 2) == [1, 2, 3, 11, 12]
    assert retained(metadata(snapshots, refs), now_ms=NOW)[1] == {"main", "dev", "one"}
    # The age of a branch or tag is that of its snapshot; main has none.
    refs = {"main": branch(3, max_ref_age_ms=0), "dev": branch(12, max_ref_age_ms=DAY), "one": tag(1)}
    assert kept(metadata(snapshots, refs)) == [1, 3]
    assert kept(metadata(snapshots, refs, ref_age=8 * DAY)) == [3]
    refs["dev"] = branch(12, max_ref_age_ms=2 * DAY)
    assert kept(metadata(snapshots, refs)) == [1, 3, 12]
    # Outside of all branches: by age alone.
    assert kept(metadata(snapshots, {"main": branch(3)}), 1, 3) == [3, 12]
    assert kept(metadata(snapshots, {"main": branch(3)}), 1, 8.5) == [2, 3, 11, 12, 20]


def test_staged_snapshots() -> None:
    """Those that wait for publication stay, unless an age is given."""
    staged = line(2, first=9, parent=1, summary={"wap.id": "w"})
    raw = metadata([*line(5, 1), *staged], {"main": branch(2)})
    assert kept(raw) == [2, 9]
    assert kept(raw, 1, 1.5) == [2]
    raw["snapshots"][1]["summary"] = {"published-wap-id": "w"}
    assert kept(raw) == [2]


def test_a_circle_of_parents_ends() -> None:
    snapshots = line(5, 1)
    snapshots[0]["parent-snapshot-id"] = 2
    assert kept(metadata(snapshots, {"main": branch(2)}), 9) == [1, 2]


# ---------------------------------------------------------------- what goes with them


def with_table_keys(kms: dict[str, str], raw: Raw) -> Raw:
    keys: list[Any] = []
    for one in raw["snapshots"]:
        key = StandardKeyMetadata(os.urandom(16), b"", 9)
        keys, one["key-id"] = add_manifest_list_key(keys, key, load_kms(kms), MASTER, length=16)
    return {**raw, "encryption-keys": write_encryption_keys(keys)}


def test_what_goes(kms: dict[str, str]) -> None:
    raw = metadata(line(9, 7, 5, 3), {"main": branch(4), "old": tag(2, max_ref_age_ms=1), "two": tag(3)})
    raw |= {
        "snapshot-log": [{"snapshot-id": i, "timestamp-ms": i} for i in (3, 1, 2, 3, 4)],
        "statistics": [{"snapshot-id": i, "statistics-path": f"statistics {min(i, 3)}"} for i in (1, 2, 3, 4)],
        "partition-statistics": [{"snapshot-id": i, "statistics-path": f"partitions {i}"} for i in (1, 4)],
        "metadata-log": [{"metadata-file": f"metadata {age}", "timestamp-ms": NOW - age * DAY} for age in (8, 4)],
        "later": 1,
    }
    raw = with_table_keys(kms, raw)
    text = json.dumps(raw)
    made = expired(raw, now_ms=NOW)
    assert json.dumps(raw) == text
    assert [one["snapshot-id"] for one in made.snapshots] == [1, 2]
    assert made.refs == {"old": "tag"}
    assert made.statistics == ["statistics 1", "statistics 2", "partitions 1"]
    assert made.metadata == ["metadata 8", "metadata 4"]
    assert [key.key_id for key in made.keys] == [one["key-id"] for one in raw["snapshots"][:2]]
    new = made.raw
    assert new["snapshots"] == raw["snapshots"][2:]
    assert [one["snapshot-id"] for one in new["snapshot-log"]] == [3, 4]  # nothing before the gap
    assert [one["snapshot-id"] for one in new["statistics"]] == [3, 4]
    assert [one["snapshot-id"] for one in new["partition-statistics"]] == [4]
    assert list(new["refs"]) == ["main", "two"]
    assert new["metadata-log"] == []
    assert new["encryption-keys"] == [raw["encryption-keys"][i] for i in (0, 3, 4)]
    assert new["later"] == 1
    assert list(new) == list(raw)
    again = expired(new, now_ms=NOW)
    assert again.raw is new
    assert next(made.rows("ok"))[:3] == ("1", None, "ok")
    assert Counter(row.format for row in made.rows("ok")) == {"snapshot": 2, "tag": 1, "manifest-list-key": 2}
    # By age: metadata that were current until 4 days ago, and a statistics file that a kept snapshot shares.
    made = expired(raw, older_than_ms=6 * DAY, now_ms=NOW)
    assert [one["snapshot-id"] for one in made.snapshots] == [1, 2]
    assert made.metadata == []
    assert expired(raw, older_than_ms=int(3.5 * DAY), now_ms=NOW).metadata == ["metadata 8"]
    raw["statistics"][3]["statistics-path"] = "statistics 1"
    assert expired(raw, now_ms=NOW).statistics == ["statistics 2", "partitions 1"]
    raw["properties"]["gc.enabled"] = "False"
    with pytest.raises(PolicyError, match=r"gc\.enabled"):
        expired(raw, now_ms=NOW)


def test_a_table_that_has_lost_a_key_id_loses_no_key(kms: dict[str, str]) -> None:
    """Only keys of snapshots that go: any other may be that of the snapshot."""
    raw = with_table_keys(kms, metadata(line(9, 7, 5), {"main": branch(3)}))
    old = [one.pop("key-id") if one["snapshot-id"] == 3 else one["key-id"] for one in raw["snapshots"]]
    made = expired(raw, now_ms=NOW)
    assert len(made.snapshots) == 2
    assert [key.key_id for key in made.keys] == old[:2]


# ---------------------------------------------------------------- which files go


def model(lists: dict[int, list[str]], names: dict[str, dict[str, bool]], bad: str = "") -> Callable[[Node], Node]:
    """The reader of a table in memory, whose list or manifest `bad` was changed."""

    def read(node: Node) -> Node:
        if node.path == bad:
            node.error = IntegrityError("changed")
        elif node.kind == LIST:
            node.named = [Known(path, 1, None) for path in lists[node.snapshot["snapshot-id"]]]
        else:
            node.named = [Known(path, 1, None, status=1 if live else 2) for path, live in names[node.path].items()]
        return node

    return read


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_reachability(data: Any) -> None:
    """Against the definition: what a removed snapshot names, and no kept snapshot."""
    file_names = st.dictionaries(st.sampled_from("abcdef"), st.booleans(), max_size=4)
    names = data.draw(st.dictionaries(st.sampled_from(["m1", "m2", "m3", "m4"]), file_names, min_size=1))
    all_lists = st.lists(st.sampled_from(sorted(names)), max_size=3, unique=True)
    lists = {i: data.draw(all_lists) for i in range(4)}
    cut = data.draw(st.integers(0, 4))
    snapshots = [{"snapshot-id": i, "manifest-list": f"l{i}"} for i in range(4)]
    found = unreachable(model(lists, names), snapshots[:cut], snapshots[cut:])
    left = {path for i in range(cut, 4) for path in lists[i]}
    live = {path for one in left for path, is_live in names[one].items() if is_live}
    manifests = {path for i in range(cut) for path in lists[i]} - left
    expected = {path for one in manifests for path in names[one]} - live
    assert sorted(one.path for one in found) == sorted([*expected, *manifests, *(f"l{i}" for i in range(cut))])
    order = ["data", "manifest", "manifest-list"]
    assert [one.kind for one in found] == sorted((one.kind for one in found), key=order.index)


def test_what_cannot_be_read() -> None:
    """Of a removed snapshot it stays, and is reported; of a kept one it is an error."""
    snapshots = [{"snapshot-id": i, "manifest-list": f"l{i}"} for i in range(3)]
    lists, names = {0: ["m0"], 1: ["m1"], 2: ["m2"]}, {"m0": {"a": True}, "m1": {"b": True}, "m2": {"c": True}}
    for bad, kind, left in (("l0", "manifest-list", {"b", "m1", "l1"}), ("m0", "manifest", {"b", "m1", "l0", "l1"})):
        failed: list[Node] = []
        found = unreachable(model(lists, names, bad), snapshots[:2], snapshots[2:], failed=failed.append)
        assert {one.path for one in found} == left
        assert [(one.path, one.kind) for one in failed] == [(bad, kind)]
    for bad in ("l2", "m2"):
        with pytest.raises(IntegrityError):
            unreachable(model(lists, names, bad), snapshots[:2], snapshots[2:])


# ---------------------------------------------------------------- tables


def stored(folder: Path) -> set[str]:
    return {f"file://{path}" for path in (folder / "wh").rglob("*") if path.is_file()}


def text_of(location: str) -> str:
    with open(location.removeprefix("file://")) as file:
        return file.read()


def needed(table: Any) -> set[str]:
    """What all snapshots name, and the metadata file."""
    found = {table.metadata_location}
    for one in table.metadata.snapshots:
        found |= {file.path for file in files(table, snapshot_id=one.snapshot_id)}
    return found


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Catalog:
    return sql_catalog(tmp_path, kms)


def filled(catalog: Catalog) -> Any:
    """Appends, a delete that rewrites a file, an overwrite, a branch and a tag."""
    table = new_table(catalog)
    for i in range(3):
        table.append(rows(10 * i, 10 * i + 10))
    with table.manage_snapshots() as manage:
        manage.create_tag(table.metadata.snapshots[0].snapshot_id, "one")
        manage.create_branch(table.metadata.snapshots[1].snapshot_id, "dev")
    table.append(rows(100, 105), branch="dev")
    table.delete("id < 5")
    table.overwrite(rows(20, 23), overwrite_filter="id >= 20")
    return table


def test_expire(tmp_path: Path, catalog: Catalog, kms: dict[str, str]) -> None:
    table = filled(catalog)
    before, old = stored(tmp_path), table.metadata_location
    all_keys = {one["key-id"] for one in raw_metadata(table)["encryption-keys"]}
    planned = expire(table, dry_run=True)
    assert stored(tmp_path) == before
    assert table.metadata_location == old
    result = expire(table)
    assert (result.op, result.failed) == ("expire", [])
    assert [row._replace(status="planned")[:10] for row in result.rows] == [row[:10] for row in planned.rows]
    assert {row.status for row in planned.rows} == {"planned"}
    found = Counter(row.format for row in result.rows)
    assert found["snapshot"] == found["manifest-list"] == found["manifest-list-key"] == 4
    assert found["data"] == 1  # of the third append, all of whose rows were replaced
    assert found["manifest"]
    assert found["metadata"] == sum(name.endswith(".json") for name in before) - 1
    # What is stored is what is named, and what was named is stored; and the metadata that the expiry began on.
    assert stored(tmp_path) == needed(table) | {old}
    assert before - stored(tmp_path) == {row.src for row in result.rows if row.src.startswith("file:")}
    raw = raw_metadata(table)
    assert {one["key-id"] for one in raw["encryption-keys"]} == all_keys - {
        row.key_id for row in result.rows if row.format == "snapshot"
    }
    clear_cache()
    table = sql_catalog(tmp_path, kms).load_table("ns.t")
    assert ids(table) == list(range(5, 23))
    assert sorted(table.scan().use_ref("dev").to_arrow()["id"].to_pylist()) == [*range(20), *range(100, 105)]
    assert sorted(table.scan().use_ref("one").to_arrow()["id"].to_pylist()) == list(range(10))
    # The second time these metadata are old, and the third time there is nothing to do. Neither needs a commit.
    now = table.metadata_location
    assert [(row.src, row.status) for row in expire(table).rows] == [(old, "ok")]
    assert stored(tmp_path) == needed(table)
    again = expire(table)
    assert again.rows == []
    assert again.version is None
    assert stored(tmp_path) == needed(table)
    assert table.metadata_location == now
    table.append(rows(50, 51))
    assert ids(table) == [*range(5, 23), 50]


def test_deletion_vectors(tmp_path: Path, catalog: Catalog, kms: dict[str, str]) -> None:
    """A Puffin file stays while one of its vectors is needed."""
    table = new_table(catalog)
    for i in range(3):
        table.append(rows(10 * i, 10 * i + 10))
    first = delete(table, "id IN (1, 11, 21)")  # one Puffin file of three vectors
    delete(table, "id IN (2)")  # takes the place of one of them
    puffins = {path for path in stored(tmp_path) if path.endswith(".puffin")}
    assert (first.vectors, len(puffins)) == (3, 2)
    result = expire(table)
    assert result.failed == []
    began = raw_metadata(table)["metadata-log"][-1]["metadata-file"]
    assert puffins <= stored(tmp_path) == needed(table) | {began}
    delete(table, "id IN (12, 22)")
    assert {row.src for row in expire(table).rows if row.format == "deletes"} < puffins
    expire(table)
    assert stored(tmp_path) == needed(table)
    clear_cache()
    table = sql_catalog(tmp_path, kms).load_table("ns.t")
    assert ids(table) == [i for i in range(30) if i % 10 not in (1, 2)]


def test_old_keys_are_gone(tmp_path: Path, catalog: Catalog, kms: dict[str, str]) -> None:
    """After a rotation, no metadata file is left that has a key as the old KEK wrapped it."""
    table = filled(catalog)
    old = {one["encrypted-key-metadata"] for one in raw_metadata(table)["encryption-keys"]}
    rotate(table, keep_old=True)
    assert any(one in text_of(path) for one in old for path in stored(tmp_path) if path.endswith(".json"))
    assert expire(table, keep=99).counts["ok"] >= 2  # the KEK that was kept, and metadata
    assert [row.format for row in expire(table, keep=99).rows] == ["metadata"]  # that the first expiry began on
    left = [path for path in stored(tmp_path) if path.endswith(".json")]
    assert left == [table.metadata_location]
    assert not any(one in text_of(left[0]) for one in old)
    assert len(table.metadata.snapshots) == len(raw_metadata(table)["snapshots"]) > 5
    assert stored(tmp_path) == needed(table)


def test_older_than(tmp_path: Path, catalog: Catalog) -> None:
    table = filled(catalog)
    before, location = stored(tmp_path), table.metadata_location
    assert expire(table, older_than=timedelta(days=1)).rows == []
    assert stored(tmp_path) == before
    assert table.metadata_location == location
    moments = [one.timestamp_ms for one in table.metadata.snapshots]

    def age(raw: Raw) -> Raw:
        """Make all but the newest two snapshots two days older, and the history."""
        shift = {one["snapshot-id"]: 2 * DAY for one in raw["snapshots"] if one["timestamp-ms"] <= moments[-3]}
        return {
            **raw,
            "snapshots": [
                {**one, "timestamp-ms": one["timestamp-ms"] - shift.get(one["snapshot-id"], 0)}
                for one in raw["snapshots"]
            ],
        }

    edit(table, age)
    result = expire(table, older_than=timedelta(days=1))
    found = Counter(row.format for row in result.rows)
    assert found["snapshot"] == 3  # the tag's and the newest of dev stay
    assert "metadata" not in found
    assert needed(table) <= stored(tmp_path)
    assert len([path for path in stored(tmp_path) if path.endswith(".json")]) > 5


def test_arguments(tmp_path: Path, catalog: Catalog, kms: dict[str, str]) -> None:
    table = filled(catalog)
    before = stored(tmp_path)
    for options in ({"keep": 0}, {"older_than": timedelta(seconds=-1)}):
        with pytest.raises(ValueError, match="must"):
            expire(table, **options)
    with pytest.raises(PolicyError, match="only reads"):
        expire(open_table(table.metadata_location, kms=kms))
    with pytest.raises(PolicyError, match="plaintext"):
        expire(catalog.create_table("ns.plain", schema=table.schema()))
    table.transaction().set_properties({"gc.enabled": "false"}).commit_transaction()
    with pytest.raises(PolicyError, match=r"gc\.enabled"):
        expire(table)
    assert before <= stored(tmp_path)


def test_a_changed_file(tmp_path: Path, catalog: Catalog) -> None:
    """Of a snapshot that stays, it stops the expiry; of one that goes, it is reported."""
    table = filled(catalog)
    lists = {one.snapshot_id: one.manifest_list for one in table.metadata.snapshots}
    current = lists[table.current_snapshot().snapshot_id].removeprefix("file://")
    with open(current, "r+b") as file:
        data = file.read()
        file.seek(50)
        file.write(bytes([data[50] ^ 1]))
    before = stored(tmp_path)
    location = table.metadata_location
    with pytest.raises(AgsError):
        expire(table)
    assert stored(tmp_path) == before
    assert catalog.load_table("ns.t").metadata_location == location
    with open(current, "wb") as file:
        file.write(data)
    goes = lists[table.metadata.snapshots[2].snapshot_id].removeprefix("file://")
    os.truncate(goes, 100)
    result = expire(table)
    assert [(row.src, row.format) for row in result.failed] == [(f"file://{goes}", "manifest-list")]
    assert result.failed[0].error_class == "IntegrityError"
    assert f"file://{goes}" in stored(tmp_path)
    assert needed(table) <= stored(tmp_path)
    assert ids(table) == list(range(5, 23))


@pytest.mark.parametrize("engine", [None, LocalEngine(0)])
def test_what_cannot_be_deleted(
    tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, engine: LocalEngine | None
) -> None:
    """It is reported, and so is what was not there; the rest goes all the same."""
    table = filled(catalog)
    planned = [row.src for row in expire(table, dry_run=True).rows if row.format in ("data", "manifest")]
    os.remove(planned[0].removeprefix("file://"))
    kind: Any = type(table.io.inner(table.location()))
    delete = kind.delete

    def refuse(self: Any, location: Any) -> None:
        if location == planned[1]:
            raise PermissionError(13, "not yours", location)
        delete(self, location)

    monkeypatch.setattr(kind, "delete", refuse)
    began = table.metadata_location
    result = expire(table, engine=engine)
    assert [(row.src, row.error_class) for row in result.failed] == [(planned[1], "PermissionError")]
    assert [row.src for row in result.rows if row.status == "skipped"] == [planned[0]]
    assert stored(tmp_path) == needed(table) | {planned[1], began}


@pytest.mark.more
def test_an_engine_deletes_the_files(tmp_path: Path, catalog: Catalog) -> None:
    """In processes of its own, to which no key goes."""
    table = filled(catalog)
    sent: list[bytes] = []

    class Spy(LocalEngine):
        def run(self, context: Any, tasks: Any, open_cost: int, report: Any) -> None:
            sent.append(pickle.dumps((context, list(tasks))))
            super().run(context, tasks, open_cost, report)

    keys = table_keys(table)
    planned = {row.src for row in expire(table, dry_run=True).rows}
    result = expire(table, engine=Spy(2))
    result.raise_for_failures()
    assert {row.src for row in result.rows} == planned
    assert {row.host for row in result.rows if row.src.startswith("file:")} == {socket.gethostname()}
    assert len(sent) == 1
    assert not any(key in sent[0] for key in keys)
    assert [row.format for row in expire(table, engine=Spy(2)).rows] == ["metadata"]
    assert stored(tmp_path) == needed(table)
    assert expire(table, engine=Spy(2)).rows == []


@pytest.mark.more
def test_killed(tmp_path: Path, catalog: Catalog, kms: dict[str, str]) -> None:
    """Before each write, commit and deletion: what is left reads, and no snapshot lacks a file."""
    table = filled(catalog)
    snapshots, base = len(table.metadata.snapshots), tmp_path / "base"
    before, old = stored(tmp_path), table.metadata_location

    def prepare() -> None:
        if not base.exists():
            base.mkdir()
            shutil.copytree(tmp_path / "wh", base / "wh")
            shutil.copy(tmp_path / "catalog.db", base)
        shutil.rmtree(tmp_path / "wh")
        shutil.copytree(base / "wh", tmp_path / "wh")
        shutil.copy(base / "catalog.db", tmp_path)
        clear_cache()

    def work() -> None:
        expire(sql_catalog(tmp_path, kms).load_table("ns.t"))

    places = [(removing, "remove"), (FileIO, "write_output"), (EncryptedCatalog, "commit_table"), (os, "unlink")]
    seen = set()
    for step, by_itself in killed_before_steps(work, places, prepare=prepare):
        clear_cache()
        now = sql_catalog(tmp_path, kms).load_table("ns.t")
        committed = now.metadata_location != old
        assert len(now.metadata.snapshots) == (3 if committed else snapshots), step
        assert needed(now) <= stored(tmp_path), step
        assert ids(now) == list(range(5, 23)), step
        expire(now)
        left = stored(tmp_path) - needed(now)
        if committed and not by_itself:
            # What is left over are files of the table as it was. No key of the table opens those that are encrypted.
            assert left <= before, step
        else:
            assert all(path.endswith(".json") for path in left), step
        assert ids(sql_catalog(tmp_path, kms).load_table("ns.t")) == list(range(5, 23))
        seen.add((committed, by_itself))
    assert seen == {(False, False), (True, False), (True, True)}


def test_an_append_in_between(tmp_path: Path, catalog: Catalog, kms: dict[str, str]) -> None:
    """Between the decision and the commit: the decision is taken again, and the append stays."""
    table = filled(catalog)
    other = sql_catalog(tmp_path, kms).load_table("ns.t")
    kind = type(table.io.session)
    plain = kind.check_writes
    turns = itertools.count()

    def check(self: Any) -> None:
        if self is table.io.session and next(turns) == 1:  # the first is that of `expire` itself
            other.append(rows(200, 203))
        plain(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "check_writes", check)
        result = expire(table)
    assert next(turns) > 2
    assert result.failed == []
    assert sum(row.status == "ok" for row in result.rows) == len(result.rows)
    fresh = sql_catalog(tmp_path, kms).load_table("ns.t")
    assert ids(fresh) == [*range(5, 23), *range(200, 203)]
    # Metadata of the commit that came second, which PyIceberg leaves, and those that the expiry began on.
    left = stored(tmp_path) - needed(fresh)
    assert len(left) == 2
    assert raw_metadata(fresh)["metadata-log"][-1]["metadata-file"] in left


def test_a_commit_whose_outcome_is_not_known(tmp_path: Path, catalog: Catalog, kms: dict[str, str]) -> None:
    """If it was not made, and another commit was, no file is deleted."""
    table = filled(catalog)
    other = sql_catalog(tmp_path, kms).load_table("ns.t")

    def fail(*args: Any) -> Any:
        other.append(rows(200, 203))
        raise CommitStateUnknownException("the connection broke")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "commit_table", fail)
        with pytest.raises(CommitStateUnknownException):
            expire(table)
    assert needed(other) <= stored(tmp_path)
    assert ids(table.refresh()) == ids(other)


@pytest.mark.more
@pytest.mark.timeout(300)
@pytest.mark.parametrize("expires", [False, True])
def test_races(tmp_path: Path, catalog: Catalog, kms: dict[str, str], expires: bool) -> None:
    """12 processes append while others turn the keys, and expire: no row is lost, and no key that is needed."""
    first = new_table(catalog)
    first.append(rows(0, 1))
    writers, appends = 12, 2
    clear_cache()

    def append(begin: int) -> None:
        table, done = sql_catalog(tmp_path, kms).load_table("ns.t"), 0
        while done < appends:
            try:
                table.append(rows(begin + done, begin + done + 1))
                done += 1
            except (CommitFailedException, ValidationException, FileNotFoundError):
                # Others came first, or the snapshot that it began with was expired.
                table = sql_catalog(tmp_path, kms).load_table("ns.t")

    def turn(what: Any) -> None:
        for _ in range(3):
            if what == "mek":
                local.rotate_key(kms, MASTER)
            rotate(sql_catalog(tmp_path, kms).load_table("ns.t"), what=what)

    def remove() -> None:
        for _ in range(4):
            assert expire(sql_catalog(tmp_path, kms).load_table("ns.t")).failed == []

    works: list[Callable[[], object]] = [
        *(functools.partial(append, 10 * i) for i in range(1, writers + 1)),
        lambda: turn("kek"),
        lambda: turn("mek"),
    ]
    children = [fork(work) for work in works + [remove] * expires]
    assert [ended(child) for child in children] == [0] * len(children)
    rotate(sql_catalog(tmp_path, kms).load_table("ns.t"), what="mek")
    local.set_state(kms, MASTER, "destroyed", version=1)
    clear_cache()
    table = sql_catalog(tmp_path, kms).load_table("ns.t")
    assert ids(table) == [0, *(10 * i + j for i in range(1, writers + 1) for j in range(appends))]
    assert needed(table) <= stored(tmp_path)
    for one in table.metadata.snapshots:
        assert ids(table, snapshot_id=one.snapshot_id)
    if not expires:
        assert len(table.metadata.snapshots) == writers * appends + 1
    expire(table)
    assert ids(table) == [0, *(10 * i + j for i in range(1, writers + 1) for j in range(appends))]


# ---------------------------------------------------------------- branches and tags that are set again


def test_a_tag_that_is_set_again_has_no_old_age(catalog: Catalog) -> None:
    """Its old age would have `expire` delete it, and the snapshot that only it names."""
    table = new_table(catalog)
    table.append(rows(0, 2))
    table.append(rows(2, 4))
    first, second = (one.snapshot_id for one in table.snapshots())
    for name in ("moved", "same"):
        table.manage_snapshots().create_tag(first, name, max_ref_age_ms=1).commit()
    table.manage_snapshots().create_branch(first, "line", max_ref_age_ms=1, min_snapshots_to_keep=3).commit()
    table.manage_snapshots().create_tag(second, "moved").commit()
    table.manage_snapshots().create_tag(first, "same").commit()
    table.manage_snapshots().create_branch(second, "line", max_snapshot_age_ms=DAY).commit()
    refs = raw_metadata(table)["refs"]
    assert refs["moved"] == tag(second)
    assert refs["same"] == tag(first)
    assert refs["line"] == branch(second, max_snapshot_age_ms=DAY)
    table.append(rows(4, 6))
    result = expire(table)
    assert not any(row.format in ("tag", "branch", "snapshot") for row in result.rows if row.status == "ok")
    assert ids(table, snapshot_id=first) == [0, 1]
    assert ids(table, snapshot_id=second) == [0, 1, 2, 3]


def test_a_branch_that_moves_keeps_its_retention(catalog: Catalog) -> None:
    """PyIceberg says nothing of it when it appends, deletes or rolls back."""
    table = new_table(catalog)
    table.append(rows(0, 2))
    first = table.current_snapshot().snapshot_id
    kept: dict[str, Any] = {"max_snapshot_age_ms": 7 * DAY, "min_snapshots_to_keep": 3}
    table.manage_snapshots().create_branch(first, "main", **kept).commit()
    table.manage_snapshots().create_branch(first, "line", max_ref_age_ms=9 * DAY, **kept).commit()
    table.append(rows(2, 4))
    table.append(rows(4, 6), branch="line")
    table.delete("id = 4", branch="line")
    refs = raw_metadata(table)["refs"]
    moved = refs["line"]["snapshot-id"]
    assert moved != first
    assert refs["line"] == branch(moved, max_ref_age_ms=9 * DAY, **kept)
    assert refs["main"] == branch(table.current_snapshot().snapshot_id, **kept)
    table.manage_snapshots().rollback_to_snapshot(first).commit()
    assert raw_metadata(table)["refs"]["main"] == branch(first, **kept)
    table.manage_snapshots().create_branch(first, "main", min_snapshots_to_keep=5).commit()
    assert raw_metadata(table)["refs"]["main"] == branch(first, **kept | {"min_snapshots_to_keep": 5})
