"""Java beside us: on tables whose keys were turned or whose snapshots expired, and with deletion vectors."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from datasets import MASTER
from iceberg_java import HERE, compiled, runtime_jar, spark_jars
from iceberg_tables import KEY_ID, sql_catalog
from kms_clients import keystore
from parquet_peers import java

from ags_fast.iceberg import delete, expire, load_catalog, rotate
from ags_fast.iceberg.commit import raw_metadata
from ags_fast.keys import clear_cache
from ags_fast.keys.kms import local
from ags_fast.puffin.vectors import DeletionVector, decode_vector, read_puffin, write_vectors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from iceberg_java import Judge

pytestmark = pytest.mark.more  # a JVM


# ---------------------------------------------------------------- deletion vectors, to the byte

RANGES: dict[str, list[tuple[int, int]]] = {
    "one": [(0, 0)],
    "array": [(i, i) for i in range(0, 5000, 7)],
    "arrays": [(3, 3), (65_535, 65_536), (1 << 31, 1 << 31), ((1 << 32) - 1, (1 << 32) - 1)],
    "run": [(100, 60_000)],
    "runs or an array": [(i, i + 1) for i in range(0, 400, 3)],
    "as long either way": [(i, i) for i in range(0, 8, 4)],
    "bitset": [(i, i) for i in range(0, 20_000, 3)],
    "runs or a bitset": [(i, i + 8) for i in range(0, 60_000, 20)],
    "many": [(i * 65_536, i * 65_536 + i) for i in range(300)],
    "mixed": [(0, 4), (65_536, 131_070), *((i, i) for i in range(131_072, 262_144, 2)), (1 << 20, 1 << 20)],
    "two halves": [(1, 9), (1 << 32, (1 << 32) + 3)],
}


class Vectors:
    """tests/jvm/vectors, which answers line by line."""

    def __init__(self) -> None:
        classes = compiled(HERE / "jvm" / "vectors", [runtime_jar()])
        path = os.pathsep.join(map(str, (classes, runtime_jar(), spark_jars() / "*")))
        command = [java(), "-XX:TieredStopAtLevel=1", "-cp", path, "ags.judge.Vectors"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8"
        )

    def ask(self, *words: object) -> list[str]:
        assert self._process.stdin
        assert self._process.stdout
        print(*words, sep="\t", file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().rstrip("\n")
        assert answer
        assert not answer.startswith("error:"), answer
        return answer.split("\t")

    def close(self) -> None:
        self._process.communicate(timeout=20)


@pytest.fixture(scope="module")
def vectors() -> Iterator[Vectors]:
    made = Vectors()
    yield made
    made.close()


def of(ranges: Sequence[tuple[int, int]]) -> DeletionVector:
    return DeletionVector.of([i for first, last in ranges for i in range(first, last + 1)])


def told(ranges: Sequence[tuple[int, int]]) -> str:
    return ",".join(f"{first}-{last}" for first, last in ranges)


@pytest.mark.parametrize("shape", RANGES)
def test_vectors_are_javas(tmp_path: Path, vectors: Vectors, shape: str) -> None:
    """The whole Puffin file has Java's bytes, and Java reads ours."""
    given = {"s3://b/таблица/a=1/\U0001f4c4 .parquet": RANGES[shape], "b": [(7, 7)]}
    words = [word for path, ranges in given.items() for word in (path, told(ranges))]
    places = vectors.ask("write", tmp_path / "java.puffin", "me", *words)
    data, blobs = write_vectors({path: of(ranges) for path, ranges in given.items()}, created_by="me")
    theirs = (tmp_path / "java.puffin").read_bytes()
    assert [int(place) for place in places] == [place for one in blobs for place in (one.offset, one.length)]
    assert data == theirs
    assert read_puffin(theirs).blobs == tuple(blobs)
    for blob, ranges in zip(blobs, given.values(), strict=True):
        assert decode_vector(theirs[blob.offset : blob.offset + blob.length], cardinality=None) == of(ranges)
    (tmp_path / "ours.puffin").write_bytes(data)
    answer = vectors.ask("read", tmp_path / "ours.puffin")
    found = {answer[i + 3]: answer[i + 4] for i in range(0, len(answer), 5)}
    joined = {path: told(_joined(ranges)) for path, ranges in given.items()}
    assert found == joined
    assert [int(answer[i + 2]) for i in range(0, len(answer), 5)] == [len(of(one)) for one in given.values()]


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    for first, last in ranges:
        if made and made[-1][1] == first - 1:
            made[-1] = made[-1][0], last
        else:
            made.append((first, last))
    return made


def test_java_reads_what_java_does_not_write(tmp_path: Path, vectors: Vectors) -> None:
    """Without the empty bitmaps that Java writes for the keys between."""
    ranges = [((7 << 32) + 5, (7 << 32) + 6), (900 << 32, 900 << 32)]
    data, _ = write_vectors({"a": of(ranges)})
    (tmp_path / "a.puffin").write_bytes(data)
    assert vectors.ask("read", tmp_path / "a.puffin")[3:] == ["a", told(ranges)]
    vectors.ask("write", tmp_path / "b.puffin", "me", "a", told([(2 << 32, 2 << 32)]))  # which has them
    theirs = (tmp_path / "b.puffin").read_bytes()
    blob = read_puffin(theirs).blobs[0]
    found = decode_vector(theirs[blob.offset : blob.offset + blob.length], cardinality=1)
    assert found.positions().tolist() == [2 << 32]


# ---------------------------------------------------------------- tables


def java_table(judge: Judge, folder: Path) -> tuple[str, Any]:
    """A table of Java's with three snapshots, in a catalog of ours."""
    name = judge.name()
    judge.create(name, "id BIGINT, name STRING")
    for i in range(3):
        judge.append(name, [(10 * i + j, f"name {j}") for j in range(10)])
    table = sql_catalog(folder, judge.kms).register_table("ns.t", judge.metadata_location(name))
    return name, table


def python_ids(table: Any, **scan: Any) -> list[int]:
    clear_cache()
    found: list[int] = table.scan(**scan).to_arrow()["id"].to_pylist()
    return sorted(found)


def java_ids(judge: Judge, name: str, at: int | None = None) -> list[int]:
    return [row[0] for row in judge.rows(name, "id", at=at)]


@pytest.mark.parametrize("keep_old", [False, True])
def test_java_after_a_new_kek(tmp_path: Path, judge: Judge, keep_old: bool) -> None:
    """Java reads and time-travels, its append takes the new KEK, and we read the append."""
    name, table = java_table(judge, tmp_path)
    first = table.metadata.snapshots[0].snapshot_id
    result = rotate(table, keep_old=keep_old)
    new_kek = next(row.src for row in result.rows if row.format == "kek")
    judge.register(name, table.metadata_location)
    assert java_ids(judge, name) == list(range(30))
    assert java_ids(judge, name, first) == list(range(10))
    judge.append(name, [(100, "x")])
    again = sql_catalog(tmp_path, judge.kms).register_table("ns.again", judge.metadata_location(name))
    assert python_ids(again) == [*range(30), 100]
    raw = raw_metadata(again)
    keys = {one["key-id"]: one for one in raw["encryption-keys"]}
    assert keys[raw["snapshots"][-1]["key-id"]]["encrypted-by-id"] == new_kek
    assert sum("properties" in one for one in keys.values()) == 1 + keep_old
    expire(again)
    judge.register(name, again.metadata_location)
    assert java_ids(judge, name) == [*range(30), 100]


def test_java_after_a_new_master_version(tmp_path: Path, judge: Judge) -> None:
    name, table = java_table(judge, tmp_path)
    first = table.metadata.snapshots[0].snapshot_id
    version = local.rotate_key(judge.kms, MASTER)
    assert rotate(table, what="mek").counts["ok"] == 1
    local.set_state(judge.kms, MASTER, "disabled", version=version - 1)
    try:
        judge.register(name, table.metadata_location)
        assert java_ids(judge, name) == list(range(30))
        assert java_ids(judge, name, first) == list(range(10))
        judge.append(name, [(100, "x")])
        again = sql_catalog(tmp_path, judge.kms).register_table("ns.again", judge.metadata_location(name))
        assert python_ids(again) == [*range(30), 100]
    finally:
        local.set_state(judge.kms, MASTER, "enabled", version=version - 1)


@pytest.mark.parametrize("what", ["kek", "mek"])
@pytest.mark.parametrize("keep_old", [False, True])
def test_java_after_another_master(tmp_path: Path, judge: Judge, what: Any, keep_old: bool) -> None:
    if what == "mek" and keep_old:
        pytest.skip("makes no new KEK")
    name, table = java_table(judge, tmp_path)
    rotate(table, what=what, wrapping_key_id="other", keep_old=keep_old)
    assert table.properties[KEY_ID] == "other"
    judge.register(name, table.metadata_location)
    assert java_ids(judge, name) == list(range(30))
    judge.append(name, [(100, "x")])
    again = sql_catalog(tmp_path, judge.kms).register_table("ns.again", judge.metadata_location(name))
    assert python_ids(again) == [*range(30), 100]


def test_another_kms_and_back(tmp_path: Path, judge: Judge) -> None:
    """Java opens the table again when it is back in the KMS that Java has."""
    name, table = java_table(judge, tmp_path)
    moved = keystore(tmp_path, "far", name="moved")
    rotate(table, what="mek", wrapping_key_id="far", new_kms=moved)
    there = sql_catalog(tmp_path, moved).load_table("ns.t")
    assert python_ids(there) == list(range(30))
    rotate(there, what="kek", wrapping_key_id=MASTER, new_kms=judge.kms)
    judge.register(name, there.metadata_location)
    assert java_ids(judge, name) == list(range(30))


def test_java_after_an_expiry(tmp_path: Path, judge: Judge) -> None:
    """Deletes by both, and a tag: Java and we read the same of what is left, and Java appends."""
    name, table = java_table(judge, tmp_path)
    first = table.metadata.snapshots[0].snapshot_id
    with table.manage_snapshots() as manage:
        manage.create_tag(first, "first")
    delete(table, "id IN (3, 13, 23)")
    delete(table, "id < 2")
    delete(table, "id IN (4, 14, 24)")  # no vector of the first Puffin file is left
    before = python_ids(table)
    result = expire(table)
    assert result.failed == []
    assert {row.format for row in result.rows} >= {"snapshot", "manifest", "manifest-list", "deletes", "metadata"}
    assert python_ids(table) == before
    judge.register(name, table.metadata_location)
    assert java_ids(judge, name) == before == [i for i in range(2, 30) if i not in (3, 13, 23, 4, 14, 24)]
    assert java_ids(judge, name, first) == list(range(10))
    judge.append(name, [(100, "x")])
    judge.sql(f"DELETE FROM {name} WHERE id = 5")
    again = sql_catalog(tmp_path, judge.kms).register_table("ns.again", judge.metadata_location(name))
    assert python_ids(again) == sorted({*before, 100} - {5})
    expire(again)
    rotate(again)
    judge.register(name, again.metadata_location)
    assert java_ids(judge, name) == sorted({*before, 100} - {5})


def test_java_expires_too(tmp_path: Path, judge: Judge) -> None:
    """Its expiry leaves keys; ours removes them, and what it did not delete."""
    name, table = java_table(judge, tmp_path)
    rotate(table)
    judge.register(name, table.metadata_location)
    judge.sql(f"CALL hive.system.expire_snapshots(table => '{name}', older_than => TIMESTAMP '2100-01-01 00:00:00')")
    again = sql_catalog(tmp_path, judge.kms).register_table("ns.again", judge.metadata_location(name))
    assert len(again.metadata.snapshots) == 1
    keys = len(raw_metadata(again)["encryption-keys"])
    result = expire(again)
    assert result.failed == []
    left = raw_metadata(again)["encryption-keys"]
    assert len(left) == 2 < keys
    judge.register(name, again.metadata_location)
    assert java_ids(judge, name) == list(range(30))


@pytest.mark.parametrize("master", [None, "third"])
@pytest.mark.parametrize("what", ["kek", "mek"])
def test_in_one_metastore(judge: Judge, what: Any, master: str | None) -> None:
    """Java and we take turns in one Hive catalog: nothing is registered, and Java checks the hash of the metadata."""
    pytest.importorskip("thrift")
    name = judge.name()
    judge.create(name, "id BIGINT, name STRING")
    judge.append(name, [(i, "java") for i in range(10)])
    catalog = load_catalog("hive", type="hive", uri=judge.hive_uri, kms=judge.kms)
    table = catalog.load_table(name)
    delete(table, "id = 3")
    rotate(table, what=what, wrapping_key_id=master)
    assert java_ids(judge, name) == [i for i in range(10) if i != 3]
    judge.append(name, [(100, "java")])
    table = catalog.load_table(name)
    assert table.properties[KEY_ID] == (master or MASTER)
    rotate(table, keep_old=True)
    result = expire(table)
    assert result.failed == []
    assert {row.format for row in result.rows} >= {"snapshot", "manifest-list", "metadata", "kek"}
    judge.append(name, [(101, "java")])
    expected = [*(i for i in range(10) if i != 3), 100, 101]
    assert java_ids(judge, name) == expected
    clear_cache()
    assert python_ids(catalog.load_table(name)) == expected
    again = expire(catalog.load_table(name), keep=9)
    # What the first expiry began on, and what it wrote.
    assert Counter((row.format, row.status) for row in again.rows) == {("metadata", "ok"): 2}
    assert java_ids(judge, name) == expected
