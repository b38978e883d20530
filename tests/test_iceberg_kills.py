"""kill -9 at every write of every operation on an encrypted table: it is as it was, or as it will be, and goes on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import pyiceberg.io.pyarrow
import sqlalchemy.orm
from datasets import HERE
from iceberg_tables import LONG, MASTER, MIXED, SCHEMA, forget_encrypted, ids, new_table, rows, sql_catalog
from killing import killed_before_steps

from ags_fast.iceberg import delete, encrypt, files, rekey, rotate
from ags_fast.iceberg.commit import edit, raw_metadata
from ags_fast.keys import clear_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BEFORE = list(range(10, 40))


class Stepped:
    """A file of PyArrow that is written in two pieces, so that a process can die between them."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> Stepped:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, data: Any) -> None:
        view = memoryview(data)
        for piece in (view[: len(view) // 2], view[len(view) // 2 :]):
            self.put(piece)

    def put(self, piece: memoryview) -> None:
        self._file.write(piece)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class SteppedFile(pyiceberg.io.pyarrow.PyArrowFile):
    """What PyArrowFileIO opens, whose output is `Stepped`."""

    def create(self, overwrite: bool = False) -> Any:
        return Stepped(super().create(overwrite=overwrite))


# Each write, the close of a file, each deletion, and the commit of the catalog's database.
PLACES = [
    (SteppedFile, "create"),
    (Stepped, "put"),
    (Stepped, "close"),
    (pyiceberg.io.pyarrow.PyArrowFileIO, "delete"),
    (sqlalchemy.orm.Session, "commit"),
]


def note(table: Any) -> None:
    edit(table, lambda raw: {**raw, "properties": {**raw["properties"], "comment": "new"}})


def evolve(table: Any) -> None:
    with table.update_schema() as schema:
        schema.add_column("more", LONG)


def create(catalog: Any) -> None:
    with catalog.create_table_transaction(
        "ns.new", schema=catalog.load_table("ns.t").schema(), properties=catalog.load_table("ns.t").properties
    ) as transaction:
        transaction.append(rows(0, 3))


# The operation, the rows after it, and what else tells that it was done.
OPERATIONS: dict[str, tuple[Callable[[Any], object], list[int]]] = {
    "append": (lambda table: table.append(rows(50, 60)), [*BEFORE, *range(50, 60)]),
    "delete": (lambda table: table.delete("id > 20"), list(range(10, 21))),
    "overwrite": (
        lambda table: table.overwrite(rows(50, 53), overwrite_filter="id = 12"),
        [i for i in BEFORE if i != 12] + [50, 51, 52],
    ),
    "deletion vectors": (lambda table: delete(table, "id = 12"), [i for i in BEFORE if i != 12]),
    "edit": (note, BEFORE),
    "evolve": (evolve, BEFORE),
    "rotate": (rotate, BEFORE),
    "rekey manifests": (lambda table: rekey(table, what="manifests", engine=HERE).raise_for_failures(), BEFORE),
    "rekey data": (lambda table: rekey(table, what="data", engine=HERE).raise_for_failures(), BEFORE),
    "mek": (lambda table: rotate(table, what="mek", wrapping_key_id="other"), BEFORE),
}


def make_encrypted(catalog: Any) -> None:
    """The table ``ns.t`` with the rows `BEFORE`."""
    table = new_table(catalog)
    table.append(rows(0, 20))
    table.append(rows(20, 40))
    table.delete("id < 10")


class Table:
    """A table that can be set back to what it was."""

    def __init__(self, tmp_path: Path, kms: Mapping[str, str], make: Callable[[Any], None] = make_encrypted) -> None:
        self.folder, self.base = tmp_path, tmp_path / "base"
        self.connect = lambda: sql_catalog(tmp_path, kms, **MIXED)
        make(self.connect())
        self.location = self.load().metadata_location
        self.base.mkdir()
        shutil.copytree(tmp_path / "wh", self.base / "wh")
        shutil.copy(tmp_path / "catalog.db", self.base)

    def set_back(self) -> None:
        shutil.rmtree(self.folder / "wh")
        shutil.copytree(self.base / "wh", self.folder / "wh")
        shutil.copy(self.base / "catalog.db", self.folder)
        for left in self.folder.glob("catalog.db-*"):  # a journal of a process that was killed
            os.unlink(left)
        clear_cache()
        forget_encrypted()

    def load(self) -> Any:
        clear_cache()
        return self.connect().load_table("ns.t")


def check(table: Any, expected: list[int]) -> None:
    assert ids(table) == expected
    for snapshot in table.metadata.snapshots:
        assert ids(table, snapshot_id=snapshot.snapshot_id)
        assert all(one.key_metadata for one in files(table, snapshot_id=snapshot.snapshot_id))


def check_stored(folder: Path) -> None:
    """What nothing names may be there, but nothing in plaintext: whole files, their beginnings, and empty ones."""
    magics = {".parquet": b"PARE", ".avro": b"AGS1", ".puffin": b"AGS1", ".json": b'{"fo', ".plan": b'{"ke'}
    for path in (folder / "wh").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            magic = magics[path.suffix]
            assert data[:4] == magic[: len(data)], path
            assert b"name 1" not in data
            assert b"Obj\x01" not in data[:4]


QUICK = ("edit",)  # the others have up to 40 steps


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.more] * (name not in QUICK)) for name in OPERATIONS]
)
def test_killed(tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(pyiceberg.io.pyarrow, "PyArrowFile", SteppedFile)
    there = Table(tmp_path, kms)
    work, after = OPERATIONS[name]
    old = raw_metadata(there.load())
    seen, steps = [], 0
    for step, by_itself in killed_before_steps(
        lambda: work(there.connect().load_table("ns.t")), PLACES, prepare=there.set_back
    ):
        table = there.load()
        done = table.metadata_location != there.location
        seen.append((done, by_itself))
        check(table, after if done else BEFORE)
        assert (raw_metadata(table) == old) == (not done), step
        check_stored(tmp_path)
        if not done:  # a retry works
            work(table)
            check(there.load(), after)
        again = there.load()
        again.append(rows(100, 101))
        assert 100 in ids(there.load()), step
        steps += 1
    assert (False, False) in seen
    assert seen[-1] == (True, True)
    assert steps >= 5


@pytest.mark.more
def test_killed_creation(tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a table that is created with its first rows. It is not there, or has them."""
    monkeypatch.setattr(pyiceberg.io.pyarrow, "PyArrowFile", SteppedFile)
    there = Table(tmp_path, kms)
    for step, by_itself in killed_before_steps(lambda: create(there.connect()), PLACES, prepare=there.set_back):
        clear_cache()
        done = there.connect().table_exists("ns.new")
        assert done >= by_itself, step
        check_stored(tmp_path)
        if not done:
            create(there.connect())
        check(there.connect().load_table("ns.new"), [0, 1, 2])


@pytest.mark.more
def test_killed_purge(tmp_path: Path, kms: dict[str, str]) -> None:
    """The table is there as it was, or not at all; no file of it is in plaintext."""
    there = Table(tmp_path, kms)
    seen = set()
    for _, by_itself in killed_before_steps(
        lambda: there.connect().purge_table("ns.t"), PLACES, prepare=there.set_back
    ):
        clear_cache()
        if there.connect().table_exists("ns.t"):
            check(there.load(), BEFORE)
            seen.add("there")
        check_stored(tmp_path)
        if by_itself:
            assert [path for path in (tmp_path / "wh").rglob("*") if path.is_file()] == []
    assert seen == {"there"}


@pytest.mark.more
def test_killed_encryption(tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a table in plaintext: it is one still, or its newest snapshot is encrypted; a second run takes it up."""
    monkeypatch.setattr(pyiceberg.io.pyarrow, "PyArrowFile", SteppedFile)

    def make(catalog: Any) -> None:
        table = catalog.create_table("ns.t", schema=SCHEMA)
        table.append(rows(10, 30))
        table.append(rows(30, 40))

    def work(table: Any) -> None:
        encrypt(table, wrapping_key_id=MASTER, engine=HERE).raise_for_failures()

    there = Table(tmp_path, kms, make)
    seen = set()
    for step, by_itself in killed_before_steps(
        lambda: work(there.connect().load_table("ns.t")), PLACES, prepare=there.set_back
    ):
        table = there.load()
        done = table.metadata_location != there.location
        seen.add((done, by_itself))
        assert ids(table) == BEFORE, step
        if not done:
            work(table)
        table = there.load()
        assert ids(table) == BEFORE, step
        assert all(one.key_metadata for one in files(table)), step
        table.append(rows(50, 51))
        assert ids(there.load()) == [*BEFORE, 50], step
    assert {(False, False), (True, True)} <= seen
