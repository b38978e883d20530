"""The tree of lists and manifests has one reader: what it shows, in which order, and what becomes of errors."""

from __future__ import annotations

import ast
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from iceberg_tables import new_table, rows, sql_catalog

import ags_fast.iceberg
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError
from ags_fast.iceberg import expire, files, load_catalog, rekey, verify
from ags_fast.iceberg.commit import raw_metadata
from ags_fast.iceberg.manifests import Known
from ags_fast.iceberg.reading import LIST, MANIFEST, Node
from ags_fast.iceberg.session import ListKeys
from ags_fast.iceberg.walk import Tree, keep
from ags_fast.iceberg.work.heads import read_head
from ags_fast.keys.kms import KmsClient


@pytest.fixture
def table(tmp_path: Path, kms: dict[str, str]) -> Any:
    made = new_table(sql_catalog(tmp_path, kms))
    for i in range(4):
        made.append(rows(10 * i, 10 * i + 10))
    return made


def tree(table: Any, **options: Any) -> Tree:
    return Tree.of(table.io.session, table.io.inner, raw_metadata(table), **options)


def walked(table: Any, **options: Any) -> list[Node]:
    return list(tree(table, **options).walk(raw_metadata(table)["snapshots"]))


def damage(path: str) -> None:
    with open(path.removeprefix("file://"), "r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("threads", [0, 4])
def test_each_list_and_after_it_what_is_new(table: Any, threads: int) -> None:
    if threads:
        with ThreadPoolExecutor(threads) as pool:
            found = walked(table, pool=pool, counts=True)
    else:
        found = walked(table, counts=True)
    assert [node.kind for node in found] == [LIST, MANIFEST] * 4
    assert len({node.path for node in found}) == 8
    assert [len(node.named) for node in found] == [1, 1, 2, 1, 3, 1, 4, 1]
    for listed, manifest, snapshot in zip(found[::2], found[1::2], raw_metadata(table)["snapshots"], strict=True):
        assert listed.path == snapshot["manifest-list"]
        assert listed.snapshot is manifest.snapshot is snapshot
        assert manifest.known.counts == (1, 0, 0, 10, 0, 0)


@pytest.mark.parametrize("threads", [0, 4])
@pytest.mark.parametrize("what", [LIST, MANIFEST])
def test_an_error_is_raised_or_kept(table: Any, what: str, threads: int) -> None:
    bad = next(node for node in walked(table)[4:] if node.kind == what).path  # of the third snapshot
    damage(bad)
    with ThreadPoolExecutor(4) as pool:
        options: dict[str, Any] = {"pool": pool} if threads else {}
        seen: list[Node] = []
        with pytest.raises(IntegrityError, match=bad):
            seen.extend(tree(table, **options).walk(raw_metadata(table)["snapshots"]))
        assert len(seen) == (4 if what == LIST else 5)
        found = walked(table, failed=keep, **options)
    assert [(node.path, type(node.error)) for node in found if node.error] == [(bad, IntegrityError)]
    # The manifest of the third snapshot is in the list of the fourth, too.
    assert Counter(node.kind for node in found) == {LIST: 4, MANIFEST: 4}
    (row,) = (row for row in verify(table).rows if row.src == bad)
    assert (row.status, row.error_class) == ("failed", "IntegrityError")
    assert bad not in (row.error or "")  # `src` says it


def test_a_manifest_of_which_another_list_says_something_else(table: Any) -> None:
    seen: dict[str, object] = {}
    assert len(walked(table, seen=seen)) == 8
    assert [node.kind for node in walked(table, seen=seen)] == [LIST] * 4
    path = next(iter(seen))
    seen[path] = (1, None, ())
    assert [node.path for node in walked(table, seen=seen) if node.kind == MANIFEST] == [path]


def test_manifests_without_a_list(table: Any) -> None:
    """As snapshots of version 1 may name them; one that names neither is malformed."""
    io, one = table.io, walked(table)[1]
    paths = [one.path]
    old = {"snapshot-id": 5, "manifests": paths}
    found = list(tree(table, plaintext=True, failed=keep).walk([old]))
    assert [(node.path, node.kind) for node in found] == [("snapshot 5", LIST), (one.path, MANIFEST)]
    assert isinstance(found[1].error, KeyAccessError)  # it is encrypted, and an old snapshot says no key
    assert found[0].error is None
    with pytest.raises(FormatError, match="snapshot 6: the snapshot names no manifest list"):
        list(tree(table).walk([{"snapshot-id": 6}]))
    assert io.table.known(one.path) is not None


def test_an_encrypted_list_whose_key_was_lost(table: Any) -> None:
    """It is no damaged file in plaintext."""
    raw = raw_metadata(table)
    path = raw["snapshots"][-1]["manifest-list"]
    options: Any = {"plaintext": True}
    with pytest.raises(KeyAccessError, match=f"{path}: it is encrypted, but its entry has no key"):
        list(tree(table, **options).walk([{"snapshot-id": 1, "manifest-list": path}]))


def test_a_kek_that_the_kms_refuses_is_asked_for_once(table: Any) -> None:
    raw, asked = raw_metadata(table), []

    class Refusing(KmsClient):
        def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
            raise NotImplementedError

        def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
            asked.append(wrapping_key_id)
            raise KeyAccessError("the KMS refuses")

    keys = ListKeys({one["key-id"]: one for one in raw["encryption-keys"]}, Refusing())
    for snapshot in raw["snapshots"]:
        with pytest.raises(KeyAccessError, match="the KMS refuses"):
            keys(snapshot)
    assert asked == ["master"]


class Counting:
    """Counts how often each file is opened."""

    def __init__(self, io: Any) -> None:
        self.opened: Counter[str] = Counter()
        self._real = io.inner

    def __call__(self, location: str) -> Any:
        inner = self._real(location)
        outer = self

        class Inner:
            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

            def new_input(self, path: str) -> Any:
                outer.opened[path] += 1
                return inner.new_input(path)

        return Inner()


@pytest.mark.parametrize("work", ["verify", "files", "expire", "rekey", "head"])
def test_each_list_and_manifest_is_opened_once(table: Any, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    paths = {node.path for node in walked(table)}
    counting = Counting(table.io)
    monkeypatch.setattr(type(table.io), "inner", lambda _, location: counting(location))
    if work == "verify":
        assert {row.status for row in verify(table).rows} == {"ok"}
    elif work == "files":
        assert len(list(files(table))) == 9
    elif work == "expire":
        expire(table, dry_run=True)
    elif work == "rekey":
        rekey(table)
    else:
        assert read_head(table.io, raw_metadata(table)) is not None
    opened = {path: count for path, count in counting.opened.items() if path in paths}
    assert opened
    assert set(opened.values()) == {1}


def test_what_was_learned_is_of_the_table_that_was_read(tmp_path: Path, kms: dict[str, str], table: Any) -> None:
    """Listing, verifying and expiring fill no cache with the keys of all files."""
    catalog = load_catalog("tests", kms=kms, type="sql", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse="file:///x")
    again: Any = catalog.load_table("ns.t")
    paths = {one.path for one in files(again)}
    assert len(paths) == 9
    assert {row.status for row in verify(again).rows} == {"ok"}
    expire(again, dry_run=True)
    assert [path for path in paths if again.io.table.known(path)] == []
    assert len(again.scan().to_arrow()) == 40


READERS = {"manifests": {"reading"}, "data_files": {"reading", "upgrading"}, "open_node": {"reading"}}


def test_nothing_else_reads_lists_and_manifests() -> None:
    """What takes entries out of a container is called by the one reader, and for what `encrypt` makes of a manifest."""
    found: dict[str, set[str]] = {name: set() for name in READERS}
    for path in Path(ags_fast.iceberg.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in found:
                    found[name].add(path.stem)
    assert found == READERS


def test_a_node_shows_no_key() -> None:
    assert "known" not in repr(Node(Known("p", 0, None)))
