"""Writers of one encrypted table at the same time, each in a process of its own."""

from __future__ import annotations

import functools
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from iceberg_tables import KEY_ID, ids, new_table, rows, sql_catalog
from killing import ended, fork
from pyiceberg.exceptions import CommitFailedException, ValidationException

from ags_fast.errors import ConcurrentChangeError
from ags_fast.iceberg import delete, files, rotate
from ags_fast.iceberg.commit import edit, raw_metadata
from ags_fast.keys import clear_cache
from ags_fast.metadata.unused import unused_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from servers.postgres import Postgres

RETRIES = {"commit.retry.num-retries": "20", "commit.retry.min-wait-ms": "10", "commit.retry.max-wait-ms": "200"}
TURNS = 3  # of each writer


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    pytest.importorskip("psycopg")
    from servers.postgres import postgres as started

    with started() as server, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PGPASSWORD", server.password)
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The properties of a catalog that no other test has."""
    if request.param == "sqlite":
        return {"uri": f"sqlite:///{tmp_path}/catalog.db?timeout=60"}
    return {"uri": request.getfixturevalue("postgres").url}


def _append(new: Any, table: Any) -> None:
    table.append(new)


def _overwrite(new: Any, old: str, table: Any) -> None:
    table.overwrite(new, overwrite_filter=old)


class Writers:
    """What each process does: it loads the table, and changes it a few times."""

    def __init__(self, tmp_path: Path, kms: Mapping[str, str], place: Mapping[str, Any]) -> None:
        self.load: Callable[[], Any] = lambda: sql_catalog(tmp_path, kms, **place).load_table("ns.t")

    def patiently(self, change: Callable[[Any], object]) -> object:
        """Change the table, from its newest version if PyIceberg's own retries were too few."""
        table = self.load()
        for _ in range(50):
            try:
                return change(table)
            except (CommitFailedException, ValidationException, ConcurrentChangeError):
                time.sleep(random.uniform(0, 0.05))
                table = self.load()
        raise AssertionError("50 times others came first")

    def append(self, begin: int) -> None:
        for i in range(TURNS):
            new = rows(begin + 2 * i, begin + 2 * i + 2)
            self.patiently(functools.partial(_append, new))

    def overwrite(self, wanted: int) -> None:
        """Replaces one row by another again and again: at the end there is the row `wanted` + TURNS."""
        for i in range(TURNS):
            new, old = rows(wanted + i + 1, wanted + i + 2), f"id = {wanted + i}"
            self.patiently(functools.partial(_overwrite, new, old))

    def delete(self, wanted: int) -> None:
        for i in range(TURNS):
            self.patiently(functools.partial(delete, row_filter=f"id = {wanted + i}"))

    def rotate(self, what: Any) -> None:
        for _ in range(TURNS):
            rotate(self.load(), what=what).raise_for_failures()
            time.sleep(0.05)

    def note(self, name: str) -> None:
        """Counts in the raw metadata, by edits: a lost edit would be a lower number."""

        def change(raw: dict[str, Any]) -> dict[str, Any]:
            properties = raw["properties"]
            return {**raw, "properties": {**properties, name: str(int(properties.get(name, "0")) + 1)}}

        for _ in range(TURNS):
            edit(self.load(), change)


def check_metadata(table: Any, processes: int = 1) -> None:
    """What must hold of the metadata of any encrypted table. Each process wraps under a KEK of its own."""
    raw = raw_metadata(table)
    by_id = {one["key-id"]: one for one in raw["encryption-keys"]}
    assert len(by_id) == len(raw["encryption-keys"]), "a key is there twice"
    assert {one["key-id"] for one in raw["snapshots"]} <= set(by_id), "a snapshot lacks its key"
    keks = {one["key-id"] for one in by_id.values() if one["encrypted-by-id"] == raw["properties"][KEY_ID]}
    assert 1 <= len(keks) <= processes, "a KEK came back"
    assert {one["encrypted-by-id"] for one in by_id.values()} <= {raw["properties"][KEY_ID], *keks}
    assert unused_keys(raw) == []
    taken = sorted((one["first-row-id"], one["added-rows"]) for one in raw["snapshots"])
    end = 0
    for first, added in taken:
        assert first == end, "row ids overlap, or are missing"
        end += added
    assert end == raw["next-row-id"]
    numbers = [one["sequence-number"] for one in raw["snapshots"]]
    assert sorted(set(numbers)) == numbers
    assert max(numbers) == raw["last-sequence-number"]


@pytest.mark.more
def test_twelve_writers(tmp_path: Path, kms: dict[str, str], place: dict[str, Any]) -> None:
    catalog = sql_catalog(tmp_path, kms, **place)
    table = new_table(catalog, **RETRIES)
    table.append(rows(0, 30))
    writers = Writers(tmp_path, kms, place)
    works = [
        *(functools.partial(writers.append, 1000 * i) for i in range(1, 6)),
        functools.partial(writers.overwrite, 10_000),
        functools.partial(writers.overwrite, 20_000),
        functools.partial(writers.delete, 3),
        functools.partial(writers.delete, 20),
        functools.partial(writers.rotate, "kek"),
        functools.partial(writers.rotate, "mek"),
        functools.partial(writers.note, "count"),
    ]
    assert len(works) == 12
    for begin in (10_000, 20_000):
        table.append(rows(begin, begin + 1))
    clear_cache()
    assert [ended(child) for child in [fork(work) for work in works]] == [0] * len(works)
    clear_cache()
    fresh = sql_catalog(tmp_path, kms, **place).load_table("ns.t")
    gone = {*range(3, 3 + TURNS), *range(20, 20 + TURNS)}
    expected = [i for i in range(30) if i not in gone]
    expected += [1000 * i + j for i in range(1, 6) for j in range(2 * TURNS)] + [10_000 + TURNS, 20_000 + TURNS]
    assert ids(fresh) == expected
    assert raw_metadata(fresh)["properties"]["count"] == str(TURNS)
    check_metadata(fresh, len(works) + 1)
    for snapshot in fresh.metadata.snapshots:
        assert len(ids(fresh, snapshot_id=snapshot.snapshot_id)) > 0
        assert all(one.key_metadata for one in files(fresh, snapshot_id=snapshot.snapshot_id))
    catalog.purge_table("ns.t")
