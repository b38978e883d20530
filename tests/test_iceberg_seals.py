"""Sealed tables: what each setting reads and commits on, which attacks it finds, pins, and the way back to a seal."""

from __future__ import annotations

import base64
import json
import os
import shutil
import warnings
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import pyarrow as pa
from datasets import make_kms
from iceberg_tables import (
    KEY_ID,
    MASTER,
    REQUIRE,
    SEALS,
    change,
    ids,
    local,
    new_process,
    new_table,
    point,
    rows,
    sql_catalog,
)
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.types import StringType

from ags_fast._core import Key
from ags_fast.errors import ConcurrentChangeError, FormatError, IntegrityError, PolicyError
from ags_fast.iceberg import check_pin, expire, load_catalog, pin, rekey, rotate, seal, seals, verify
from ags_fast.iceberg.commit import raw_metadata
from ags_fast.keys import clear_cache
from ags_fast.keys.kms import count_calls
from ags_fast.seals.guard import CHANGED, sealing
from ags_fast.seals.seal import Seal, SealKey, make

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OTHER = "other"


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return make_kms(tmp_path, keys=(MASTER, OTHER))


@pytest.fixture
def connect(tmp_path: Path, kms: dict[str, str]) -> Callable[..., Any]:
    return lambda **settings: sql_catalog(tmp_path, kms, **settings)


@pytest.fixture
def table(connect: Any) -> Any:
    made = new_table(connect())
    made.append(rows(0, 3))
    made.append(rows(3, 6))
    return made


def number(table: Any) -> int | None:
    """How many states were sealed before the newest."""
    text = raw_metadata(table)["properties"].get("ags.seal")
    return None if text is None else json.loads(text)["n"]


# ------------------------------------------------------------------------------------------------------- what is sealed


def test_everything_is_sealed(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit makes a sealed state of a sealed state, whichever process makes it, and a pin of each holds."""
    catalog = connect()
    pins = []
    made = new_table(catalog)
    steps: dict[str, Callable[[Any], object]] = {
        "append": lambda one: one.append(rows(0, 6)),
        "delete": lambda one: one.delete("id = 2"),
        "property": lambda one: one.transaction().set_properties({"comment": "x"}).commit_transaction(),
        "schema": lambda one: one.update_schema().add_column("more", StringType()).commit(),
        "tag": lambda one: one.manage_snapshots().create_tag(one.current_snapshot().snapshot_id, "a").commit(),
        "no tag": lambda one: one.manage_snapshots().remove_tag("a").commit(),
        "kek": rotate,
        "mek": lambda one: rotate(one, what="mek"),
        "manifests": lambda one: rekey(one, what="manifests"),
        "data": rekey,
        "expire": expire,
        "append again": lambda one: one.append(rows(6, 8)),
    }
    for what, step in steps.items():
        pins.append(pin(made))
        new_process(monkeypatch)
        made = connect(**REQUIRE).load_table("ns.t")
        before = number(made)
        done = step(made)
        assert getattr(done, "pin", pin(made)) == pin(made), what
        made = connect(**REQUIRE).load_table("ns.t")
        if what != "mek":  # the KEKs are under the newest version already
            assert (number(made) or 0) > (before or 0), what
        for one in pins:
            check_pin(made, one)
    assert ids(made) == [0, 1, 3, 4, 5, 6, 7]
    assert verify(made).counts["failed"] == 0


def test_off_neither_looks_nor_seals(connect: Any, table: Any) -> None:
    before = number(table)
    other = connect(**{SEALS: "off"}).load_table("ns.t")
    other.append(rows(6, 8))
    assert number(other) == before  # the property is carried on
    change(other.metadata_location, lambda raw: raw["properties"].update({"ags.seal": "nonsense"}))
    clear_cache()
    other = connect(**{SEALS: "off"}).load_table("ns.t")
    other.append(rows(8, 9))
    assert ids(other) == [*range(9)]


def test_a_table_that_was_never_sealed_stays_so_without_a_word(connect: Any) -> None:
    made = new_table(connect(**{SEALS: "off"}))
    assert number(made) is None
    made = connect().load_table("ns.t")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.append(rows(0, 3))
    assert number(made) is None
    assert seal(made).counts["failed"] == 0
    assert number(made) == 0
    made.append(rows(3, 5))
    assert number(made) == 1


def test_who_reads_under_write_asks_no_kms(connect: Any, table: Any) -> None:
    clear_cache()
    with count_calls() as calls:
        connect().load_table("ns.t")
    assert not calls


def test_properties_of_a_user(table: Any) -> None:
    """Users see no seal, so that they give it to no other table; nobody sets it."""
    assert table.properties == {KEY_ID: MASTER}
    with pytest.raises(PolicyError, match=r"ags\.seal is not set"):
        table.transaction().set_properties({"ags.seal": "x"}).commit_transaction()


# ------------------------------------------------------------------------------------------------------------- attacks


def a_property(raw: dict[str, Any]) -> None:
    raw["properties"]["comment"] = "changed"


def code(raw: dict[str, Any]) -> None:
    raw["properties"]["py-io-impl"] = "os.system"


def no_seal(raw: dict[str, Any]) -> None:
    del raw["properties"]["ags.seal"]


def plaintext(raw: dict[str, Any]) -> None:
    raw["properties"] = {}
    raw["encryption-keys"], raw["snapshots"], raw["refs"], raw["current-snapshot-id"] = [], [], {}, None


def statistics(raw: dict[str, Any]) -> None:
    snapshot = raw["snapshots"][-1]["snapshot-id"]
    raw["statistics"] = [
        {
            "snapshot-id": snapshot,
            "statistics-path": "file:///etc/passwd",
            "file-size-in-bytes": 1,
            "file-footer-size-in-bytes": 1,
            "blob-metadata": [],
        }
    ]


def another_head(raw: dict[str, Any]) -> None:
    raw["current-snapshot-id"] = raw["refs"]["main"]["snapshot-id"] = raw["snapshots"][0]["snapshot-id"]


def a_forged_seal(raw: dict[str, Any]) -> None:
    told = json.loads(raw["properties"]["ags.seal"])
    raw["properties"]["ags.seal"] = json.dumps({**told, "mac": "A" * 43}, separators=(",", ":"))


def another_master(raw: dict[str, Any]) -> None:
    for one in raw["encryption-keys"]:
        if "KEY_TIMESTAMP" in (one.get("properties") or {}):
            one["encrypted-by-id"] = OTHER
    raw["properties"][KEY_ID] = OTHER


ATTACKS = (a_property, code, no_seal, plaintext, statistics, another_head, a_forged_seal, another_master)


@pytest.mark.parametrize("attack", ATTACKS)
def test_require_reads_nothing_that_is_not_sealed(connect: Any, table: Any, attack: Any) -> None:
    """IntegrityError, before any property is looked at: fresh, and by a handle that is held."""
    held = connect(**REQUIRE).load_table("ns.t")
    change(table.metadata_location, attack)
    with pytest.raises(IntegrityError):
        connect(**REQUIRE).load_table("ns.t")
    for use in (held.refresh, lambda: held.append(rows(6, 7)), lambda: rotate(held), lambda: rekey(held)):
        with pytest.raises(IntegrityError):
            use()


@pytest.mark.parametrize("attack", [a_property, no_seal, statistics, another_head])
def test_write_launders_nothing(connect: Any, table: Any, attack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not sealed is not sealed by the next commit."""
    before = number(table)
    change(table.metadata_location, attack)
    new_process(monkeypatch)
    other = connect().load_table("ns.t")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        other.append(rows(6, 8))
    assert number(other) == (None if attack is no_seal else before)
    assert any("is not sealed" in str(one.message) for one in told) == (attack is not no_seal)
    with pytest.raises(IntegrityError):
        connect(**REQUIRE).load_table("ns.t")


def test_a_forged_seal_is_never_committed_on(connect: Any, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    change(table.metadata_location, a_forged_seal)
    new_process(monkeypatch)
    other = connect().load_table("ns.t")
    with pytest.raises(IntegrityError, match="forged"):
        other.append(rows(6, 8))


def test_an_older_file(tmp_path: Path, connect: Any, table: Any) -> None:
    """Under the newest one's name it is refused; where the catalog names it, memory and pins tell."""
    kept, older = pin(table), raw_metadata(table)["metadata-log"][-1]["metadata-file"]
    newest, held = table.metadata_location, connect(**REQUIRE)
    held.load_table("ns.t")
    shutil.copyfile(local(newest), local(newest) + ".kept")
    shutil.copyfile(local(older), local(newest))
    with pytest.raises(IntegrityError, match="or moved"):
        connect(**REQUIRE).load_table("ns.t")
    shutil.copyfile(local(newest) + ".kept", local(newest))
    point(tmp_path, older)
    with pytest.raises(IntegrityError, match="rolled back"):
        held.load_table("ns.t")
    with pytest.raises(IntegrityError, match="rolled back"):
        connect(pins={"ns.t": kept}).load_table("ns.t")
    assert ids(connect(**REQUIRE).load_table("ns.t")) == [0, 1, 2]  # whom nobody has told that there is more


def test_a_moved_file(tmp_path: Path, connect: Any, table: Any) -> None:
    place = tmp_path / "elsewhere" / table.metadata_location.rpartition("/")[2]
    place.parent.mkdir()
    shutil.copyfile(local(table.metadata_location), place)
    point(tmp_path, f"file://{place}")
    with pytest.raises(IntegrityError, match="was moved"):
        connect(**REQUIRE).load_table("ns.t")


def test_another_sealed_table(tmp_path: Path, connect: Any, table: Any) -> None:
    """Its own seal holds. Only a pin by identifier tells, and it does."""
    kept = pin(table)
    other = new_table(connect(), "mallory")
    other.append(rows(600, 603))
    shutil.copyfile(local(other.metadata_location), local(table.metadata_location))
    with pytest.raises(IntegrityError, match="or moved"):
        connect(**REQUIRE).load_table("ns.t")
    point(tmp_path, other.metadata_location)
    with pytest.raises(IntegrityError, match="another table"):
        connect(pins={"ns.t": kept}).load_table("ns.t")
    connect(pins={"ns.t": kept}).load_table("ns.mallory")  # which has no pin


def test_a_kek_that_was_put_back(connect: Any, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has a KEK from before a rotation seals with it. A pin that is younger than the rotation tells."""
    old = next(one for one in raw_metadata(table)["encryption-keys"] if one.get("properties"))
    stale = pin(table)
    rotate(table, keep_old=False)
    kept = pin(table)

    def forge(raw: dict[str, Any]) -> None:
        told = Seal.read(raw["properties"].pop("ags.seal"))
        leaked = table.io.session.kms.unwrap_key(base64.b64decode(old["encrypted-key-metadata"]), MASTER)
        key = SealKey.of(Key(leaked), UUID(raw["table-uuid"]))
        raw["encryption-keys"].append(old)
        raw["properties"]["comment"] = "forged"
        made = make(raw, old["key-id"], key, told, None, file=told.file)
        raw["properties"]["ags.seal"] = made.text

    change(table.metadata_location, forge)
    new_process(monkeypatch)
    with pytest.raises(IntegrityError, match="does not follow"):
        connect(pins={"ns.t": kept}).load_table("ns.t")
    # Without a pin, or with one from before the rotation, the first load believes it: docs/iceberg.md says so.
    assert connect(**REQUIRE).load_table("ns.t").properties["comment"] == "forged"
    assert connect(pins={"ns.t": stale}).load_table("ns.t").properties["comment"] == "forged"


# -------------------------------------------------------------------------------------------------------- back to seals


def test_seal_shows_what_was_changed(connect: Any, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, before = pin(table), number(table)
    foreign = connect(**{SEALS: "off"}).load_table("ns.t")  # stands for Java, which carries the seal on
    foreign.transaction().set_properties({"comment": "x"}).commit_transaction()
    new_process(monkeypatch)
    with pytest.raises(IntegrityError, match="ags-fast iceberg seal"):
        connect(**REQUIRE).load_table("ns.t")
    owner = connect().load_table("ns.t")
    shown = seal(owner, dry_run=True)
    assert [(row.src, row.error_class) for row in shown.rows] == [("properties/comment", "Added")]
    assert number(owner) == before
    keks = {one["key-id"] for one in raw_metadata(owner)["encryption-keys"]}
    assert [row.src for row in seal(owner).rows] == ["properties/comment"]
    assert number(owner) == before + 1  # type: ignore[operator]
    assert {one["key-id"] for one in raw_metadata(owner)["encryption-keys"]} > keks  # a new KEK
    told = json.loads(raw_metadata(owner)["properties"]["ags.seal"])
    assert told["since"] == told["n"] == before + 1  # type: ignore[operator]
    check_pin(connect(**REQUIRE).load_table("ns.t"), kept)
    assert seal(owner).rows == []  # it is sealed


def test_a_forged_history(connect: Any, table: Any) -> None:
    """A seal does not cover the log of snapshots: who requires seals is shown the line of main instead."""
    first, second = (one.snapshot_id for one in table.metadata.snapshots)
    true = [(one.timestamp_ms, one.snapshot_id) for one in table.history()]
    forged = [{"timestamp-ms": 1, "snapshot-id": second}, {"timestamp-ms": true[0][0] + 1, "snapshot-id": first}]
    change(table.metadata_location, lambda raw: raw.update({"snapshot-log": forged}))
    clear_cache()
    assert len(connect().load_table("ns.t").snapshot_as_of_timestamp(2).manifests(table.io)) == 2  # believed
    table = connect(**REQUIRE).load_table("ns.t")
    assert [(one.timestamp_ms, one.snapshot_id) for one in table.history()] == true
    assert table.snapshot_as_of_timestamp(2) is None
    table.append(rows(6, 7))
    raw = raw_metadata(table)
    third = {"timestamp-ms": table.current_snapshot().timestamp_ms, "snapshot-id": table.current_snapshot().snapshot_id}
    assert raw["snapshot-log"] == [*forged, third]  # for Java, whose own it is
    assert [one.snapshot_id for one in table.history()] == [first, second, third["snapshot-id"]]
    table.manage_snapshots().rollback_to_snapshot(second).commit()
    assert [one["snapshot-id"] for one in raw_metadata(table)["snapshot-log"]][-2:] == [third["snapshot-id"], second]
    assert [one.snapshot_id for one in table.refresh().history()] == [first, second]  # the present line only
    assert ids(table) == [*range(6)]


def test_verify_tells_what_each_seal_says(connect: Any, table: Any) -> None:
    """The files of the log have rows, which fail nothing: nobody reads the table by those files."""
    connect(**{SEALS: "off"}).load_table("ns.t").transaction().set_properties({"a": "b"}).commit_transaction()
    done = verify(connect().load_table("ns.t"))
    assert any("was changed after it was sealed" in text for text in done.warnings)
    seal(connect().load_table("ns.t"))
    table = connect().load_table("ns.t")
    log = [one.metadata_file for one in table.metadata.metadata_log]
    change(log[0], a_property)
    change(log[1], a_forged_seal)
    os.remove(local(log[2]))
    done = verify(table)
    told = {row.src: (row.status, row.error_class) for row in done.rows if row.format == "metadata"}
    assert told == {
        table.metadata_location: ("ok", None),
        log[0]: ("skipped", "Changed"),
        log[1]: ("skipped", "IntegrityError"),
        log[3]: ("skipped", "Changed"),
    }
    assert not [text for text in done.warnings if "sealed" in text]
    unseen = verify(connect(**{SEALS: "off"}).load_table("ns.t"))
    assert [row.src for row in unseen.rows if row.format == "metadata"] == [table.metadata_location]


def test_seal_with_a_pin_keeps_the_kek(connect: Any, table: Any) -> None:
    kept = pin(table)
    connect(**{SEALS: "off"}).load_table("ns.t").transaction().set_properties({"a": "b"}).commit_transaction()
    owner = connect().load_table("ns.t")
    keks = [one["key-id"] for one in raw_metadata(owner)["encryption-keys"]]
    seal(owner, pin=kept)
    assert [one["key-id"] for one in raw_metadata(owner)["encryption-keys"]] == keks
    with pytest.raises(ValueError, match="no pin"):
        check_pin(owner, "x")


def test_nothing_damaged_is_sealed(connect: Any, table: Any) -> None:
    connect(**{SEALS: "off"}).load_table("ns.t").transaction().set_properties({"a": "b"}).commit_transaction()
    owner = connect().load_table("ns.t")
    before = number(owner)
    path = local(owner.inspect.files()["file_path"][0].as_py())
    with open(path, "r+b") as file:
        file.seek(40)
        file.write(b"damage")
    assert seal(owner).counts["failed"] == 1
    assert number(connect().load_table("ns.t")) == before


def test_seal_refuses_an_older_state_although_it_is_sealed(connect: Any, table: Any, tmp_path: Path) -> None:
    kept = pin(table)
    point(tmp_path, raw_metadata(table)["metadata-log"][-1]["metadata-file"])
    older = connect().load_table("ns.t")
    assert seal(older).rows == []
    with pytest.raises(IntegrityError, match="rolled back"):
        seal(older, pin=kept)


# ----------------------------------------------------------------------------------------------------------------- pins


def test_a_pin_makes_its_table_require(connect: Any, table: Any) -> None:
    kept = pin(table)
    pinned = connect(pins={"ns.t": kept})
    made = pinned.load_table("ns.t")
    made.append(rows(6, 8))
    change(made.metadata_location, a_property)
    with pytest.raises(IntegrityError):
        connect(pins={"ns.t": kept}).load_table("ns.t")
    with pytest.raises(IntegrityError):
        made.append(rows(8, 9))


def test_a_pin_without_a_seal(connect: Any) -> None:
    made = new_table(connect(**{SEALS: "off"}))
    made.append(rows(0, 3))
    kept = pin(made)
    assert kept.startswith("ags1u.")
    made.append(rows(3, 5))
    check_pin(made, kept)
    pinned = connect(pins={"ns.t": kept})
    assert ids(pinned.load_table("ns.t")) == [0, 1, 2, 3, 4]
    made.manage_snapshots().rollback_to_snapshot(made.history()[0].snapshot_id).commit()
    made.append(rows(7, 8))
    check_pin(made, kept)
    change(made.metadata_location, lambda raw: raw["snapshots"][0].update({"timestamp-ms": 5}))
    with pytest.raises(IntegrityError, match="is another"):
        pinned.load_table("ns.t")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({SEALS: "yes"}, "must be one of require, write, off"),
        ({SEALS: "require"}, "needs encryption.allowed-key-ids, or pins"),
        ({SEALS: "require", "encryption.allowed-key-ids": "*"}, "needs encryption.allowed-key-ids, or pins"),
        ({"pins": {"ns.t": "ags1.x"}}, "no pin of an Iceberg table"),
    ],
)
def test_settings_that_are_refused(connect: Any, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        connect(**settings)


def test_a_table_without_a_pin_is_refused_where_nothing_else_tells(connect: Any, table: Any) -> None:
    other = new_table(connect(), "u")
    with pytest.raises(ValueError, match=r"or a pin of ns\.t"):
        connect(**{SEALS: "require", "pins": {"ns.u": pin(other)}}).load_table("ns.t")
    with pytest.raises(NoSuchTableError, match=r"a pin of ns\.tt, and no such table"):
        connect(pins={"ns.tt": pin(table)})


def test_load_catalog_takes_pins(tmp_path: Path, kms: dict[str, str], table: Any) -> None:
    named = {"type": "sql", "uri": f"sqlite:///{tmp_path / 'catalog.db'}", "warehouse": f"file://{tmp_path / 'wh'}"}
    catalog = load_catalog("tests", kms=kms, pins={"ns.t": pin(table)}, **named)
    assert ids(catalog.load_table("ns.t")) == [*range(6)]


def test_tables_in_plaintext_have_no_pin(connect: Any) -> None:
    plain = connect(**{"encryption.plaintext-tables": "write"}).create_table(
        "ns.plain", pa.schema([("id", pa.int64())])
    )
    for use in (pin, seal, lambda one: check_pin(one, "x")):
        with pytest.raises(PolicyError, match="in plaintext"):
            use(plain)


def test_other_format_versions(connect: Any, table: Any) -> None:
    change(table.metadata_location, lambda raw: raw.update({"format-version": 4}))
    with pytest.raises((IntegrityError, FormatError)):
        connect(**REQUIRE).load_table("ns.t")


@pytest.mark.filterwarnings("ignore:.*is not sealed")
def test_a_file_that_changes_while_it_is_held(connect: Any, table: Any) -> None:
    """The verdict is of the bytes that were read, and not of where they were."""
    held = connect().load_table("ns.t")
    held.append(rows(6, 7))
    before = number(held)
    change(held.metadata_location, a_property)
    held.refresh()
    held.append(rows(7, 8))
    assert number(held) == before
    with pytest.raises(IntegrityError):
        connect(**REQUIRE).load_table("ns.t")


@pytest.mark.filterwarnings("ignore:.*is not sealed")
def test_a_seal_of_a_later_scheme(connect: Any, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is carried on, and nothing is sealed over it; who requires seals is told to update."""

    def later(raw: dict[str, Any]) -> None:
        raw["properties"]["ags.seal"] = raw["properties"]["ags.seal"].replace('"v":1', '"v":2')

    change(table.metadata_location, later)
    new_process(monkeypatch)
    other = connect().load_table("ns.t")
    other.append(rows(6, 8))
    assert '"v":2' in raw_metadata(other)["properties"]["ags.seal"]
    with pytest.raises(PolicyError, match="update ags_fast"):
        connect(**REQUIRE).load_table("ns.t")


@pytest.mark.parametrize("what", ["kek", "mek"])
def test_to_another_kms(tmp_path: Path, table: Any, what: Any) -> None:
    (tmp_path / "moved").mkdir()
    target = make_kms(tmp_path / "moved", keys=(OTHER,))
    kept = pin(table)
    rotate(table, what=what, wrapping_key_id=OTHER, new_kms=target)
    moved = sql_catalog(tmp_path, target, **{SEALS: "require", "encryption.allowed-key-ids": OTHER})
    check_pin(moved.load_table("ns.t"), kept)
    moved.load_table("ns.t").append(rows(6, 8))
    assert ids(moved.load_table("ns.t")) == [*range(8)]


def test_an_append_while_the_differences_are_shown(connect: Any, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody has looked at is not sealed: a whole commit comes between the checks of `seal` and its own."""
    off = {SEALS: "off"}
    connect(**off).load_table("ns.t").transaction().set_properties({"a": "b"}).commit_transaction()
    owner = connect().load_table("ns.t")
    before = number(owner)

    def verify_slowly(one: Any, **options: Any) -> Any:
        done = verify(one, **options)
        connect(**off).load_table("ns.t").append(rows(6, 8))
        return done

    monkeypatch.setattr(seals, "verify", verify_slowly)
    with pytest.raises(ConcurrentChangeError, match="changed meanwhile"):
        seal(owner)
    assert number(connect().load_table("ns.t")) == before


def test_a_verdict_that_was_kept_is_looked_at_again(connect: Any, table: Any) -> None:
    """Whoever adopts a state lets no later commit begin on it where a seal is required."""
    connect(**{SEALS: "off"}).load_table("ns.t").transaction().set_properties({"a": "b"}).commit_transaction()
    changed = connect().load_table("ns.t")
    guard, raw = connect(**REQUIRE).session.guard, raw_metadata(changed)
    with sealing("new"):
        assert guard.see_base(raw, changed.metadata_location).verdict == CHANGED
    with pytest.raises(IntegrityError, match="requires a seal"):
        guard.see_base(raw, changed.metadata_location)
