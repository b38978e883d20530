"""What a catalog knows of one table is that table's: attacks of whoever writes to the storage, and nowhere else."""

from __future__ import annotations

import base64
import shutil
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from datasets import make_kms
from iceberg_damage import relisted
from iceberg_tables import (
    KEY_ID,
    MASTER,
    MIXED,
    SCHEMA,
    change,
    ids,
    local,
    new_process,
    new_table,
    rows,
    sql_catalog,
)

from ags_fast.errors import AgsError, FormatError, IntegrityError, PolicyError
from ags_fast.iceberg import files, open_table, rotate, verify
from ags_fast.iceberg.commit import raw_metadata
from ags_fast.iceberg.reading import show_metadata
from ags_fast.keys import load_kms
from ags_fast.keys.metadata import StandardKeyMetadata

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Raw = dict[str, Any]

OTHER = "other"  # a master key that the attacker may use, too


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


def stored(folder: Path) -> set[Path]:
    return {path for path in (folder / "wh").rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------- mixing tables


def with_list_of(mine: Any, her: Any) -> None:
    """Mallory puts her manifest list in the place of another table's, and lets her metadata name that place."""
    theirs, hers = (one.current_snapshot().manifest_list for one in (mine, her))
    shutil.copyfile(local(hers), local(theirs))
    change(her.metadata_location, lambda raw: raw["snapshots"][-1].update({"manifest-list": theirs}))


def with_manifest_of(mine: Any, her: Any) -> None:
    """The same with a manifest, under a key of hers."""
    theirs, hers = (one.current_snapshot().manifests(one.io)[0].manifest_path for one in (mine, her))
    known = her.io.table.known(hers)
    shutil.copyfile(local(hers), local(theirs))

    def renamed(_: Any, record: Any) -> Any:
        return {**record, "manifest_path": theirs, "key_metadata": known.key_metadata.encode()}

    relisted(her, renamed)


@pytest.mark.parametrize("attack", [with_list_of, with_manifest_of])
@pytest.mark.parametrize("first", ["payroll", "mallory"])
def test_rows_of_another_table_are_never_sealed_in(
    connect: Any, first: str, attack: Callable[[Any, Any], None]
) -> None:
    payroll, her = new_table(connect(), "payroll"), new_table(connect(), "mallory")
    for i in range(2):
        payroll.append(rows(3 * i, 3 * i + 3))
    her.append(rows(600, 603))
    attack(payroll, her)
    catalog = connect()
    if first == "payroll":
        held = catalog.load_table("ns.payroll")
        assert ids(catalog.load_table("ns.mallory")) == [600, 601, 602]
    else:
        assert ids(catalog.load_table("ns.mallory")) == [600, 601, 602]
        held = catalog.load_table("ns.payroll")
    for use in (  # a list or a manifest was destroyed, and its tags do not fit
        ids,
        lambda one: one.append(rows(6, 7)),
        lambda one: one.overwrite(rows(7, 8), overwrite_filter="id < 602"),
        lambda one: one.delete("id = 4"),
        lambda one: ids(one.refresh()),
    ):
        with suppress(AgsError):
            assert 600 not in (use(held) or ())
    with pytest.raises(AgsError):
        ids(connect().load_table("ns.payroll"))
    assert ids(catalog.load_table("ns.mallory")) == [600, 601, 602]


def test_a_path_that_comes_with_another_key(table: Any, connect: Any) -> None:
    """Somebody who has the table's KEK writes a list that names a known manifest under a key of his own."""
    again = connect().load_table("ns.t")
    assert ids(again) == list(range(6))

    def under_another_key(_: Any, record: Any) -> Any:
        old = StandardKeyMetadata.decode(record["key_metadata"])
        return {**record, "key_metadata": StandardKeyMetadata(bytes(16), bytes(16), old.file_length).encode()}

    relisted(table, under_another_key)
    for read in (ids, lambda one: one.append(rows(6, 7)), lambda one: one.delete("id = 1")):
        with pytest.raises(IntegrityError, match="another key"):
            read(again.refresh())


def test_files_of_another_encrypted_table_are_not_added(table: Any, connect: Any) -> None:
    catalog = connect()
    other = new_table(catalog, "other")
    assert ids(catalog.load_table("ns.t")) == list(range(6))  # so that the catalog knows the keys
    path = next(one.path for one in files(table) if one.kind == "data")
    with pytest.raises(PolicyError, match="no snapshot of the encrypted table"):
        other.add_files([path])
    assert other.refresh().current_snapshot() is None


# ---------------------------------------------------------------------------------------------------- downgrade


def stripped(raw: Raw, **more: Any) -> None:
    """All signs of encryption are gone: a table in plaintext, without snapshots."""
    raw |= {"snapshots": [], "snapshot-log": [], "refs": {}, "current-snapshot-id": -1, "format-version": 2, **more}
    del raw["properties"][KEY_ID], raw["encryption-keys"], raw["next-row-id"]


STRIPS: dict[str, Callable[[Raw], object]] = {
    "as it is": stripped,
    "UUID in another spelling": lambda raw: stripped(raw, **{"table-uuid": raw["table-uuid"].upper()}),
    "another UUID": lambda raw: stripped(raw, **{"table-uuid": str(uuid.uuid4())}),
    "another UUID and location": lambda raw: stripped(
        raw, **{"table-uuid": str(uuid.uuid4()), "location": raw["location"] + "x"}
    ),
}


@pytest.mark.parametrize("strip", STRIPS)
@pytest.mark.parametrize("settings", [{}, MIXED], ids=["default", "mixed"])
def test_a_held_handle_writes_nothing_to_what_was_stripped(
    tmp_path: Path, connect: Any, table: Any, strip: str, settings: dict[str, str]
) -> None:
    held = connect(**settings).load_table("ns.t")
    change(held.metadata_location, STRIPS[strip])
    before = stored(tmp_path)
    for write in (
        lambda: held.append(rows(6, 7)),
        lambda: held.overwrite(rows(6, 7)),
        lambda: held.delete("id = 1"),
        lambda: held.transaction().set_properties({"owner": "x"}).commit_transaction(),
        lambda: rotate(held),
        held.refresh,
    ):
        with pytest.raises(AgsError):
            write()
    assert stored(tmp_path) == before


@pytest.mark.parametrize("strip", STRIPS)
def test_what_was_encrypted_is_never_taken_for_plaintext(
    tmp_path: Path, connect: Any, kms: Any, table: Any, strip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = connect(**MIXED)
    held = catalog.load_table("ns.t")
    change(held.metadata_location, STRIPS[strip])
    with pytest.raises(IntegrityError, match="plaintext"):
        catalog.load_table("ns.t")
    location = held.metadata_location
    with pytest.raises(IntegrityError, match="plaintext"):
        open_table(location, kms=kms, **{"encryption.plaintext-tables": "read"})
    new_process(monkeypatch)
    with pytest.raises(PolicyError, match="plaintext-tables=read"):
        connect().load_table("ns.t")
    if strip == "as it is":
        assert ids(connect(**MIXED).load_table("ns.t")) == []  # nothing tells a new process


def test_a_table_may_be_dropped_and_made_again(tmp_path: Path, connect: Any, table: Any) -> None:
    catalog = connect(**MIXED)
    catalog.load_table("ns.t")
    catalog.drop_table("ns.t")
    again = catalog.create_table("ns.t", schema=SCHEMA)
    again.append(rows(0, 1))
    assert ids(catalog.load_table("ns.t")) == [0]


# --------------------------------------------------------------------------------------------- key substitution


def with_kek(location: str, kms: dict[str, str], master: str, *, old: bool = False) -> str:
    """Add a KEK whose key the attacker has: a new one, or the table's first one, as if it were new. Returns its id."""
    made = []

    def added(raw: Raw) -> None:
        keks = [one for one in raw["encryption-keys"] if "KEY_TIMESTAMP" in one.get("properties", {})]
        late = max(int(one["properties"]["KEY_TIMESTAMP"]) for one in keks) + 1000
        one = dict(keks[0], **{"key-id": "leaked"}, properties={"KEY_TIMESTAMP": str(late)})
        if not old:
            wrapped = load_kms(kms).wrap_key(bytes(16), master)
            text = base64.b64encode(wrapped).decode()
            one |= {"encrypted-key-metadata": text, "encrypted-by-id": master}
        raw["encryption-keys"].insert(0, one)
        made.append(one["key-id"])

    change(location, added)
    return made[0]


@pytest.mark.parametrize("old", [False, True], ids=["new", "leaked"])
@pytest.mark.parametrize("knows", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("master", [MASTER, OTHER])
def test_no_writer_wraps_under_a_kek_of_somebody_else(
    connect: Any, kms: Any, table: Any, old: bool, knows: bool, master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not knows:
        new_process(monkeypatch)
    catalog = connect()
    if knows:
        catalog.load_table("ns.t").append(rows(6, 7))
    location = connect().load_table("ns.t").metadata_location
    planted = with_kek(location, kms, master, old=old)
    writer = catalog.load_table("ns.t")
    writer.append(rows(7, 8))
    writer.delete("id = 7")
    keys = {one["key-id"]: one for one in raw_metadata(writer)["encryption-keys"]}
    for snapshot in raw_metadata(writer)["snapshots"][-2:]:
        assert keys[snapshot["key-id"]]["encrypted-by-id"] != planted
    assert ids(connect().load_table("ns.t"))[:6] == list(range(6))
    assert verify(writer).failed == []


def test_a_kek_whose_wrap_was_exchanged(connect: Any, kms: Any, table: Any) -> None:
    """Under the id of the writer's own KEK."""
    own = next(one for one in raw_metadata(table)["encryption-keys"] if one["encrypted-by-id"] == MASTER)
    with_kek(table.metadata_location, kms, MASTER)

    def exchanged(raw: Raw) -> None:
        first = raw["encryption-keys"].pop(0)
        for one in raw["encryption-keys"]:
            if one["key-id"] == own["key-id"]:
                one["encrypted-key-metadata"] = first["encrypted-key-metadata"]

    change(table.metadata_location, exchanged)
    again = connect().load_table("ns.t")
    try:
        again.append(rows(6, 7))
    except AgsError:  # what the old KEK wraps does not open any more
        return
    raw = raw_metadata(again)
    keys = {one["key-id"]: one for one in raw["encryption-keys"]}
    assert keys[raw["snapshots"][-1]["key-id"]]["encrypted-by-id"] != own["key-id"]


def test_one_kek_seals_and_wraps(connect: Any, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KEK that sealed the state before, whichever process made it."""
    for i in range(3):
        new_process(monkeypatch)
        connect().load_table("ns.t").append(rows(i, i + 1))
    raw = raw_metadata(connect().load_table("ns.t"))
    assert sum(one["encrypted-by-id"] == MASTER for one in raw["encryption-keys"]) == 1


def test_one_kek_for_each_process_without_seals(connect: Any, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def keks() -> int:
        raw = raw_metadata(connect().load_table("ns.t"))
        return sum(one["encrypted-by-id"] == MASTER for one in raw["encryption-keys"])

    off = {"encryption.metadata-seal": "off"}
    assert keks() == 1
    for i in range(3):
        connect(**off).load_table("ns.t").append(rows(i, i + 1))
    assert keks() == 1
    new_process(monkeypatch)
    for i in range(3):
        connect(**off).load_table("ns.t").append(rows(i, i + 1))
    assert keks() == 2


def test_another_master_key_is_never_taken_silently(connect: Any, table: Any) -> None:
    held = connect().load_table("ns.t")
    allowing = connect(**{"encryption.allowed-key-ids": f"{MASTER},{OTHER}"}).load_table("ns.t")
    change(table.metadata_location, lambda raw: raw["properties"].update({KEY_ID: OTHER}))
    for use in (held.refresh, lambda: held.append(rows(6, 7)), lambda: rotate(held)):
        with pytest.raises(IntegrityError, match=f"its master key is '{OTHER}'|was changed after the table was loaded"):
            use()
    allowing.refresh()
    with pytest.raises(AgsError):
        connect(**{"encryption.allowed-key-ids": MASTER}).load_table("ns.t").append(rows(6, 7))


def test_this_process_may_move_a_table_to_another_master_key(connect: Any, table: Any) -> None:
    held = connect().load_table("ns.t")
    rotate(table, what="mek", wrapping_key_id=OTHER)
    for one in (table, held.refresh()):
        one.append(rows(6, 7))
    assert ids(connect().load_table("ns.t")) == [*range(6), 6, 6]


def test_an_empty_file_is_not_what_a_server_said(connect: Any, table: Any) -> None:
    """A server's answer names a metadata file that nobody has read: an empty one is malformed all the same."""
    known, location = connect().session, f"{table.location()}/metadata/of-a-server.metadata.json"
    known.remember(raw_metadata(table), location)
    with pytest.raises(FormatError, match="not JSON"):
        show_metadata(known, b"", location)
