"""What was not sealed is never sealed by the way: by a handle, by a race, by a seal that nobody's key made."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from datasets import make_kms
from iceberg_tables import MASTER, REQUIRE, SEALS, change, ids, local, new_process, new_table, point, rows, sql_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import StaticTable
from pyiceberg.types import StringType

from ags_fast.errors import ConcurrentChangeError, FormatError, IntegrityError, PolicyError
from ags_fast.iceberg import check_pin, expire, open_table, pin, rotate, seal, verify
from ags_fast.iceberg.commit import raw_metadata
from ags_fast.seals.seal import ID_NBYTES, encoded, positions

if TYPE_CHECKING:
    from collections.abc import Callable

STAGE = "_update_and_stage_table"  # PyIceberg's, between the reading of what a commit changes and its writing


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return make_kms(tmp_path, keys=(MASTER,))


@pytest.fixture
def connect(tmp_path: Path, kms: dict[str, str]) -> Callable[..., Any]:
    return lambda **settings: sql_catalog(tmp_path, kms, **settings)


@pytest.fixture
def table(connect: Any) -> Any:
    made = new_table(connect())
    made.append(rows(0, 3))
    made.append(rows(3, 6))
    return made


def an_older_list(raw: dict[str, Any]) -> None:
    """The newest snapshot has the manifest list of the one before: rows are gone."""
    first, second = raw["snapshots"]
    second["manifest-list"], second["key-id"] = first["manifest-list"], first["key-id"]


def another_name(raw: dict[str, Any]) -> None:
    raw["schemas"][-1]["fields"][1]["name"] = "other"


def foreign(n: int) -> Callable[[dict[str, Any]], None]:
    """A seal by a KEK that the table does not have, so that nobody can tell who made it."""

    def forge(raw: dict[str, Any]) -> None:
        one = json.loads(raw["properties"]["ags.seal"])
        named = encoded(bytes(ID_NBYTES * len(positions(n))))
        one |= {"kek": "nobody", "n": n, "since": 0, "mac": encoded(bytes(32)), "ancestors": named}
        raw["properties"]["ags.seal"] = json.dumps(one, separators=(",", ":"))

    return forge


# ------------------------------------------------------------------------------------------ what a handle was read of


@pytest.mark.parametrize("lie", [an_older_list, another_name])
@pytest.mark.parametrize(
    "use",
    [
        lambda one: one.append(rows(6, 8)),
        lambda one: one.overwrite(rows(1, 2), "id = 1"),
        lambda one: one.update_schema().add_column("more", StringType()).commit(),
        lambda one: one.transaction().set_properties({"a": "b"}).commit_transaction(),
    ],
    ids=["append", "overwrite", "schema", "property"],
)
def test_a_handle_of_a_changed_file(
    connect: Any, table: Any, monkeypatch: pytest.MonkeyPatch, lie: Any, use: Any
) -> None:
    """The file is as it was when the commit comes: what the commit makes of the lie would be sealed."""
    good = Path(local(table.metadata_location)).read_text()
    change(table.metadata_location, lie)
    new_process(monkeypatch)
    victim = connect().load_table("ns.t")
    Path(local(table.metadata_location)).write_text(good)
    with pytest.raises(IntegrityError, match=r"changed (after the table was loaded|while the table was open)"):
        use(victim)
    newest = connect(**REQUIRE).load_table("ns.t")
    assert ids(newest) == [*range(6)]
    assert newest.metadata_location == table.metadata_location


def test_a_handle_of_a_changed_file_that_others_follow(
    connect: Any, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another commit came first, on the true state. What the handle adds is then not sealed."""
    good = Path(local(table.metadata_location)).read_text()
    change(table.metadata_location, another_name)
    new_process(monkeypatch)
    victim = connect().load_table("ns.t")
    transaction = victim.transaction()
    Path(local(table.metadata_location)).write_text(good)
    new_process(monkeypatch)
    connect(**REQUIRE).load_table("ns.t").append(rows(6, 7))
    with pytest.warns(UserWarning, match="the commit is not sealed"):
        transaction.set_properties({"a": "b"}).commit_transaction()
    with pytest.raises(IntegrityError):
        connect(**REQUIRE).load_table("ns.t")


def test_base_and_facade_are_of_one_reading(connect: Any, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit loads a changed file; another thread of the catalog reads the good one before the commit writes."""
    location = table.metadata_location
    good = Path(local(location)).read_text()
    new_process(monkeypatch)
    victim = connect().load_table("ns.t")
    stage = getattr(SqlCatalog, STAGE)

    def between(*args: Any) -> Any:
        made = stage(*args)
        Path(local(location)).write_text(good)
        victim.catalog.session.clear()
        return made

    monkeypatch.setattr(SqlCatalog, STAGE, between)
    transaction = victim.transaction()
    change(location, another_name)
    victim.catalog.session.clear()
    with pytest.raises(IntegrityError, match="was changed while the table was open"):
        transaction.set_properties({"a": "b"}).commit_transaction()
    monkeypatch.undo()
    assert connect(**REQUIRE).load_table("ns.t").metadata_location == location


# ------------------------------------------------------------------------------------------------- seals of nobody


@pytest.mark.parametrize("n", [5, 2**53 - 1])
def test_a_seal_that_no_key_of_the_table_made_has_no_descendants(
    connect: Any, table: Any, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    change(table.metadata_location, foreign(n))
    new_process(monkeypatch)
    mine = connect().load_table("ns.t")
    seal(mine).raise_for_failures()
    assert json.loads(raw_metadata(mine)["properties"]["ags.seal"])["n"] == 0
    for use in (rotate, lambda one: one.append(rows(6, 7))):
        use(connect(**REQUIRE).load_table("ns.t"))
    assert ids(connect(**REQUIRE).load_table("ns.t")) == [*range(7)]


def malformed(raw: dict[str, Any]) -> None:
    raw["properties"]["ags.seal"] = "nonsense"


def forged(raw: dict[str, Any]) -> None:
    raw["properties"]["ags.seal"] = raw["properties"]["ags.seal"].replace('"n":2', '"n":1')


def later(raw: dict[str, Any]) -> None:
    raw["properties"]["ags.seal"] = raw["properties"]["ags.seal"].replace('"v":1', '"v":2')


@pytest.mark.parametrize("attack", [malformed, forged, later])
def test_the_way_back_from_any_seal(connect: Any, table: Any, monkeypatch: pytest.MonkeyPatch, attack: Any) -> None:
    """One byte by who writes to the storage must leave the owner a way out."""
    kept = pin(table)
    change(table.metadata_location, attack)
    new_process(monkeypatch)
    mine = connect().load_table("ns.t")
    (row,) = seal(mine, dry_run=True).rows
    assert (row.status, row.error_class) == ("skipped", "Unsealed")
    with pytest.raises((IntegrityError, PolicyError)):
        seal(mine, pin=kept)
    seal(mine).raise_for_failures()
    newest = connect(**REQUIRE).load_table("ns.t")
    assert ids(newest) == [*range(6)]
    with pytest.raises(IntegrityError, match="does not descend"):
        check_pin(newest, kept)


def test_the_seal_is_not_removed_as_a_property(connect: Any, table: Any) -> None:
    for setting in ("write", "off"):
        with pytest.raises(PolicyError, match=r"ags\.seal is not set or removed"):
            connect(**{SEALS: setting}).load_table("ns.t").transaction().remove_properties("ags.seal")


def test_texts_that_look_like_numbers_of_a_state(connect: Any, table: Any) -> None:
    change(table.metadata_location, lambda raw: raw.update(more="f64:3ff0000000000000"))
    with pytest.raises(FormatError, match="begins with f64:"):
        connect(**REQUIRE).load_table("ns.t")
    for text in ("NaN", "[" * 900 + "]" * 900):
        change(table.metadata_location, lambda raw: raw.update(more="@@"))
        path = Path(local(table.metadata_location))
        path.write_text(path.read_text().replace('"@@"', text))
        with pytest.raises((FormatError, IntegrityError)):
            connect(**REQUIRE).load_table("ns.t")


# ------------------------------------------------------------------------------------------------------- what was seen


def test_ones_own_commit_is_remembered(tmp_path: Path, connect: Any, table: Any) -> None:
    catalog = connect(**REQUIRE)
    mine = catalog.load_table("ns.t")
    before = mine.metadata_location
    mine.append(rows(6, 7))
    point(tmp_path, before)
    with pytest.raises(IntegrityError, match="rolled back"):
        catalog.load_table("ns.t")


def test_an_older_handle_is_no_rollback(connect: Any, table: Any) -> None:
    """What is older than what the catalog has seen since is refused by the catalog's own compare-and-swap alone."""
    catalog = connect(**REQUIRE)
    old = catalog.load_table("ns.t")
    for n in range(17):
        catalog.load_table("ns.t").transaction().set_properties({"n": str(n)}).commit_transaction()
    catalog.session.clear()
    assert old.properties["encryption.key-id"] == MASTER
    assert not verify(old).failed
    old.refresh().append(rows(6, 7))
    assert ids(old) == [*range(7)]


def test_a_newer_state_while_a_table_is_loaded(connect: Any, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread sees a newer state between the catalog's answer and the reading of the file."""
    catalog = connect(**REQUIRE)
    guard = catalog.session.guard
    check = type(guard).check_read
    once = [True]

    def between(self: Any, raw: Any, location: str) -> None:
        if once and self is guard:
            once.clear()
            connect(**REQUIRE).load_table("ns.t").append(rows(6, 7))
            other = threading.Thread(target=catalog.load_table, args=("ns.t",))
            other.start()
            other.join()
        check(self, raw, location)

    monkeypatch.setattr(type(guard), "check_read", between)
    assert ids(catalog.load_table("ns.t")) == [*range(6)]
    assert ids(catalog.load_table("ns.t")) == [*range(7)]


def test_expire_after_a_seal_with_a_pin(connect: Any, table: Any) -> None:
    """The KEK that sealed is in use, although it wraps no key of a list."""
    kept = pin(table)
    rotate(connect(**{SEALS: "off"}).load_table("ns.t"), keep_old=True)
    mine = connect().load_table("ns.t")
    seal(mine, pin=kept)
    expire(mine).raise_for_failures()
    assert ids(connect(**REQUIRE).load_table("ns.t")) == [*range(6)]


def test_two_first_seals(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whole commit of another runs between the checks of `seal` and its commit."""
    new_table(connect(**{SEALS: "off"})).append(rows(0, 3))
    mine, other = (connect().load_table("ns.t") for _ in range(2))
    stage = getattr(SqlCatalog, STAGE)

    def between(*args: Any) -> Any:
        monkeypatch.undo()
        made = stage(*args)
        other.append(rows(3, 4))
        return made

    monkeypatch.setattr(SqlCatalog, STAGE, between)
    with pytest.raises(ConcurrentChangeError, match="look at the differences again"):
        seal(mine)
    assert ids(connect().load_table("ns.t")) == [*range(4)]


# --------------------------------------------------------------------------------------------------- who demands a seal


def test_require_without_a_catalog(connect: Any, table: Any, kms: dict[str, str]) -> None:
    change(table.metadata_location, lambda raw: raw["properties"].update(comment="x"))
    settings = {**kms, **REQUIRE, "py-io-impl": "ags_fast.iceberg.FileIO"}
    with pytest.raises(IntegrityError, match="was changed after it was sealed"):
        StaticTable.from_metadata(table.metadata_location, settings)
    with pytest.raises(ValueError, match="compare this one by check_pin"):
        open_table(table.metadata_location, kms=kms, pins={"ns.t": pin(table)})


def test_what_require_needs(connect: Any, table: Any) -> None:
    unsealed = new_table(connect(**{SEALS: "off"}), "u")
    with pytest.raises(ValueError, match="pins of sealed tables"):
        connect(**{SEALS: "require", "pins": {"ns.u": pin(unsealed)}})
    with pytest.raises(ValueError, match=r"needs encryption\.allowed-key-ids"):
        connect(**{SEALS: "require", "encryption.allowed-key-ids": "**"})
    with pytest.raises(ValueError, match="looks at no seal"):
        connect(**{SEALS: "off", "pins": {"ns.t": pin(table)}})
