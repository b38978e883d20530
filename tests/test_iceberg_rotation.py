"""Turning the keys of encrypted Iceberg tables: what changes, what does not, and who comes in between."""

from __future__ import annotations

import base64
import functools
import json
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from iceberg_tables import KEY_ID, MASTER, MIXED, ids, new_table, rows, sql_catalog
from killing import killed_before_steps
from kms_clients import calls_of, keystore
from pyiceberg.catalog.sql import SqlCatalog as Vanilla
from pyiceberg.exceptions import CommitStateUnknownException
from support import flip

from ags_fast.errors import FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.iceberg import FileIO, open_table
from ags_fast.iceberg.catalogs.base import EncryptedCatalog
from ags_fast.iceberg.commit import raw_metadata
from ags_fast.iceberg.rotation import rewrapped_keks, rotate, rotated_keks, with_keys
from ags_fast.keys import (
    StandardKeyMetadata,
    add_manifest_list_key,
    clear_cache,
    load_kms,
    manifest_list_key,
    read_encryption_keys,
    write_encryption_keys,
)
from ags_fast.keys.kms import local
from ags_fast.metadata.unused import named_keys, unused_keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyiceberg.catalog import Catalog

Raw = dict[str, Any]


# ---------------------------------------------------------------- decisions on raw metadata


def skm(i: int) -> StandardKeyMetadata:
    return StandardKeyMetadata(bytes(range(i, i + 16)), b"prefix", 100 + i)


def raw_table(client: Any, snapshots: int, *, now: int = 1_700_000_000_000) -> Raw:
    """The metadata of a table with some snapshots, as far as keys go."""
    keys: list[Any] = []
    named = []
    for i in range(snapshots):
        keys, key_id = add_manifest_list_key(keys, skm(i), client, MASTER, length=16, now=now)
        named.append({"snapshot-id": i, "key-id": key_id, "manifest-list": f"list {i}", "later": [i]})
    return {
        "format-version": 3,
        "properties": {KEY_ID: MASTER, "a": "b"},
        "snapshots": named,
        "encryption-keys": write_encryption_keys(keys),
        "later": {"x": None},
    }


def opened(raw: Raw, client: Any) -> list[StandardKeyMetadata]:
    clear_cache()
    keys = read_encryption_keys(raw["encryption-keys"])
    return [manifest_list_key(keys, one["key-id"], client) for one in raw["snapshots"]]


def keks(raw: Raw) -> list[str]:
    return [key.key_id for key in read_encryption_keys(raw["encryption-keys"]) if key.is_kek]


class Counted(local.LocalKms):
    """Does what it is told before it wraps."""

    before: list[Callable[[], object]]

    def wrap_key(self, key: bytes, key_id: str) -> bytes:
        while self.before:
            self.before.pop()()
        return super().wrap_key(key, key_id)


class Garbling(local.LocalKms):
    """What it wraps does not open."""

    def wrap_key(self, key: bytes, key_id: str) -> bytes:
        return flip(super().wrap_key(key, key_id), 200)


class Confusing(local.LocalKms):
    """What it wraps opens as another key."""

    def wrap_key(self, key: bytes, key_id: str) -> bytes:
        return super().wrap_key(bytes(len(key)), key_id)


class Refusing(local.LocalKms):
    """Wraps, and unwraps nothing that it has wrapped."""

    wrapped: set[bytes]

    def wrap_key(self, key: bytes, key_id: str) -> bytes:
        made = super().wrap_key(key, key_id)
        self.wrapped = {*getattr(self, "wrapped", ()), made}
        return made

    def unwrap_key(self, wrapped: bytes, key_id: str) -> bytes:
        if wrapped in getattr(self, "wrapped", ()):
            raise PermissionError("unwrap")
        return super().unwrap_key(wrapped, key_id)


@pytest.mark.parametrize("keep_old", [False, True])
def test_new_kek(kms: dict[str, str], keep_old: bool) -> None:
    client = load_kms(kms)
    raw = raw_table(client, 3)
    text = json.dumps(raw)
    clear_cache()
    made: list[Any] = []
    calls = calls_of(lambda: made.append(rotated_keks(raw, client, keep_old=keep_old)))
    assert calls == {("local", "wrap"): 1, ("local", "unwrap"): 2}  # the new KEK and the old one
    new, found = made[0]
    assert json.dumps(raw) == text
    assert {**new, "encryption-keys": 0} == {**raw, "encryption-keys": 0}
    assert len(keks(new)) == 1 + keep_old
    assert opened(new, client) == [skm(0), skm(1), skm(2)]
    assert keks(new)[0] not in keks(raw)
    # The old KEK opens nothing any more.
    old = [one for one in raw["encryption-keys"] if one["key-id"] == keks(raw)[0]]
    stolen = [{**one, "encrypted-by-id": keks(raw)[0]} for one in new["encryption-keys"] if "properties" not in one]
    for one in raw["snapshots"]:
        with pytest.raises(IntegrityError):
            manifest_list_key(read_encryption_keys(old + stolen), one["key-id"], client)
    assert [(row.format, row.status) for row in found] == [
        ("kek", "ok"),
        ("kek", "skipped" if keep_old else "ok"),
        *[("manifest-list-key", "ok")] * 3,
    ]
    assert found[1].dst == (None if keep_old else keks(new)[0])
    # Another rotation drops the KEK that nothing needs.
    again = rotated_keks(new, client, keep_old=keep_old).raw
    assert len(keks(again)) == 1 + keep_old
    assert not set(keks(raw)) & set(keks(again))
    assert opened(again, client) == [skm(0), skm(1), skm(2)]


@pytest.mark.parametrize("keep_old", [False, True])
@pytest.mark.parametrize("moves", [False, True])
def test_new_kek_under_another_master(tmp_path: Path, kms: dict[str, str], keep_old: bool, moves: bool) -> None:
    """All KEKs move: Java unwraps them by the table's property."""
    client = load_kms(kms)
    target = load_kms(keystore(tmp_path, "other", name="moved")) if moves else None
    raw = raw_table(client, 2)
    new = rotated_keks(raw, client, wrapping_key_id="other", new_kms=target, keep_old=keep_old).raw
    assert new["properties"] == {KEY_ID: "other", "a": "b"}
    assert raw["properties"][KEY_ID] == MASTER
    found = [key for key in read_encryption_keys(new["encryption-keys"]) if key.is_kek]
    assert [key.encrypted_by_id for key in found] == ["other"] * (1 + keep_old)
    assert opened(new, target or client) == [skm(0), skm(1)]
    for key in found:
        (target or client).unwrap_key(key.encrypted_key_metadata, "other")


def test_other_masters_and_kms(tmp_path: Path, kms: dict[str, str]) -> None:
    """R3b: ids and timestamps stay, the property changes with the labels."""
    client, target = load_kms(kms), load_kms(keystore(tmp_path, MASTER, "other", name="moved"))
    raw = raw_table(client, 2)
    for new_kms, master in ((None, "other"), (target, None), (target, "other")):
        new, found = rewrapped_keks(raw, client, new_kms=new_kms, new_wrapping_key_id=master)
        assert new["properties"][KEY_ID] == (master or MASTER)
        assert opened(new, new_kms or client) == [skm(0), skm(1)]
        for before, after in zip(raw["encryption-keys"], new["encryption-keys"], strict=True):
            changed = {name for name in before if before[name] != after[name]}
            if "properties" in before:
                assert changed == {"encrypted-key-metadata", *(["encrypted-by-id"] if master else [])}
            else:
                assert not changed
        assert [(row.format, row.status, row.key_id) for row in found] == [("kek", "ok", master or MASTER)]
        clear_cache()
        with pytest.raises((KeyAccessError, IntegrityError)):
            manifest_list_key(
                read_encryption_keys(new["encryption-keys"]),
                new["snapshots"][0]["key-id"],
                client if new_kms else _without(kms, "other"),
            )


def _without(kms: dict[str, str], key_id: str) -> Any:
    return load_kms({**kms, "encryption.allowed-key-ids": MASTER}) if key_id != MASTER else None


def test_master_version(kms: dict[str, str]) -> None:
    """R3: one wrap and two unwraps a KEK, and nothing the second time."""
    client = load_kms(kms)
    raw = raw_table(client, 3)
    local.rotate_key(kms, MASTER)
    made: list[Any] = []
    calls = calls_of(lambda: made.append(rewrapped_keks(raw, client)))
    assert calls == {("local", "wrap"): 1, ("local", "unwrap"): 2}
    new = made[0].raw
    assert new["properties"] == raw["properties"]
    calls = calls_of(lambda: made.append(rewrapped_keks(new, client)))
    assert calls == {}
    assert made[1].raw is new
    assert [(row.status, row.error_class) for row in made[1].rows] == [("skipped", "Current")]
    local.set_state(kms, MASTER, "destroyed", version=1)
    assert opened(new, client) == [skm(0), skm(1), skm(2)]
    with pytest.raises(KeyAccessError):
        opened(raw, client)


def test_nothing_to_turn(kms: dict[str, str]) -> None:
    client = load_kms(kms)
    raw = {**raw_table(client, 0), "snapshots": []}
    for turn in (rotated_keks, rewrapped_keks):
        assert turn(raw, client).raw is raw
    assert rotated_keks(raw, client, wrapping_key_id="other").raw["properties"][KEY_ID] == "other"
    assert rewrapped_keks(raw, client, new_wrapping_key_id="other").raw["properties"][KEY_ID] == "other"
    for turn in (rotated_keks, rewrapped_keks):
        with pytest.raises(PolicyError, match="plaintext"):
            turn({**raw, "properties": {}}, client)


@pytest.mark.parametrize("kind", [Garbling, Confusing, Refusing])
def test_a_wrap_that_does_not_open_is_not_put_to_use(kms: dict[str, str], kind: type[local.LocalKms]) -> None:
    good, bad = load_kms(kms), kind.with_properties(kms)
    raw = raw_table(good, 2)
    local.rotate_key(kms, MASTER)
    for turn in (
        lambda: rotated_keks(raw, bad),
        lambda: rotated_keks(raw, good, new_kms=bad),
        lambda: rewrapped_keks(raw, bad),
        lambda: rewrapped_keks(raw, good, new_kms=bad),
        lambda: rewrapped_keks(raw, bad, new_wrapping_key_id="other"),
    ):
        clear_cache()
        with pytest.raises((KeyAccessError, IntegrityError)):
            turn()


def test_keys_that_do_not_open(kms: dict[str, str]) -> None:
    """A key that a snapshot needs stops the rotation; one that nothing names stays."""
    client = load_kms(kms)
    raw = raw_table(client, 2)
    stray = {"key-id": "stray", "encrypted-key-metadata": base64.b64encode(bytes(60)).decode()}
    for kek_id in ("gone", keks(raw)[0]):
        dead = {**stray, "encrypted-by-id": kek_id}
        made = rotated_keks({**raw, "encryption-keys": [*raw["encryption-keys"], dead]}, client)
        assert made.raw["encryption-keys"][-1] == dead
        assert (made.rows[-1].status, made.rows[-1].error_class) == ("skipped", "Unused")
        assert opened(made.raw, client) == [skm(0), skm(1)]
        needed = {**raw, "encryption-keys": [*raw["encryption-keys"], dead]}
        needed["snapshots"] = [*raw["snapshots"], {"snapshot-id": 9, "key-id": "stray"}]
        with pytest.raises((KeyAccessError, IntegrityError)):
            rotated_keks(needed, client)
    with pytest.raises(FormatError, match="is a key encryption key"):
        rotated_keks({**raw, "snapshots": [{"snapshot-id": 1, "key-id": keks(raw)[0]}]}, client)


def test_unused_keys(kms: dict[str, str]) -> None:
    client = load_kms(kms)
    raw = raw_table(client, 3)
    assert unused_keys(raw) == []
    assert len(named_keys(raw)) == 3
    rotated = rotated_keks(raw, client, keep_old=True).raw
    assert [key.key_id for key in unused_keys(rotated)] == keks(raw)
    fewer = {**rotated, "snapshots": rotated["snapshots"][1:]}
    gone = {key.key_id for key in unused_keys(fewer)}
    assert gone == {*keks(raw), raw["snapshots"][0]["key-id"]}
    # Statistics may name keys, too.
    kept = {**fewer, "statistics": [{"snapshot-id": 7, "key-id": raw["snapshots"][0]["key-id"]}]}
    assert [key.key_id for key in unused_keys(kept)] == keks(raw)
    # The newest KEK stays for the next writer.
    none = {**rotated, "snapshots": []}
    left = {one["key-id"] for one in rotated["encryption-keys"]} - {key.key_id for key in unused_keys(none)}
    assert left == {keks(rotated)[0]}
    # A snapshot has lost its key: it may be any of them.
    lost = {**rotated, "snapshots": [*fewer["snapshots"], {"snapshot-id": 0}]}
    assert [key.key_id for key in unused_keys(lost)] == keks(raw)
    left_keys = read_encryption_keys(rotated["encryption-keys"])[:1]
    assert with_keys(rotated, left_keys, "m")["properties"] == {KEY_ID: "m", "a": "b"}


# ---------------------------------------------------------------- tables


def stored(folder: Path, *, metadata: bool = False) -> dict[str, bytes]:
    found = {str(path): path.read_bytes() for path in (folder / "wh").rglob("*") if path.is_file()}
    return {path: data for path, data in found.items() if metadata or not path.endswith(".json")}


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Catalog:
    return sql_catalog(tmp_path, kms, **MIXED)


def filled(catalog: Catalog) -> Any:
    table = new_table(catalog)
    for i in range(3):
        table.append(rows(10 * i, 10 * i + 10))
    return table


def check(folder: Path, kms: dict[str, str], first: int) -> None:
    """All is there, for who loads the table anew, and time travel too; and it takes more rows."""
    clear_cache()
    table = sql_catalog(folder, kms).load_table("ns.t")
    assert ids(table) == list(range(30))
    assert ids(table, snapshot_id=first) == list(range(10))
    table.append(rows(30, 31))
    assert ids(sql_catalog(folder, kms).load_table("ns.t")) == list(range(31))


@pytest.mark.parametrize("keep_old", [False, True])
def test_rotate_kek(tmp_path: Path, catalog: Catalog, kms: dict[str, str], keep_old: bool) -> None:
    table = filled(catalog)
    before, raw, first = stored(tmp_path), raw_metadata(table), table.metadata.snapshots[0].snapshot_id
    files = len(stored(tmp_path, metadata=True))
    result = rotate(table, keep_old=keep_old)
    assert (result.op, result.dataset, result.version) == ("rotate", table.location(), None)
    assert result.counts["ok"] == 4 + (not keep_old)
    assert result.kms_calls["local", "wrap"] == 1
    assert "older metadata files" in result.warnings[0]
    assert result.table.num_rows == len(result.rows)
    assert stored(tmp_path) == before
    assert len(stored(tmp_path, metadata=True)) == files + 1
    now = raw_metadata(table)
    assert now["snapshots"] == raw["snapshots"]
    assert ids(table) == list(range(30))
    check(tmp_path, kms, first)
    keys = {one["key-id"]: one for one in raw_metadata(catalog.load_table("ns.t"))["encryption-keys"]}
    last = raw_metadata(catalog.load_table("ns.t"))["snapshots"][-1]
    assert keys[last["key-id"]]["encrypted-by-id"] == keks(now)[0]  # later snapshots use the new KEK


def test_rotate_mek(tmp_path: Path, catalog: Catalog, kms: dict[str, str]) -> None:
    table = filled(catalog)
    before, first, old = stored(tmp_path), table.metadata.snapshots[0].snapshot_id, table.metadata_location
    local.rotate_key(kms, MASTER)
    result = rotate(table, what="mek")
    assert result.counts == {"ok": 1, "skipped": 0, "failed": 0}
    assert result.kms_calls["local", "wrap"] == 1
    assert stored(tmp_path) == before
    local.set_state(kms, MASTER, "destroyed", version=1)
    all_files = stored(tmp_path, metadata=True)
    again = rotate(table, what="mek")
    assert again.counts == {"ok": 0, "skipped": 1, "failed": 0}
    assert not again.kms_calls
    assert not again.warnings
    assert stored(tmp_path, metadata=True) == all_files
    check(tmp_path, kms, first)
    clear_cache()
    with pytest.raises(KeyAccessError):  # the older metadata
        ids(open_table(old, kms=kms))


@pytest.mark.parametrize("what", ["kek", "mek"])
@pytest.mark.parametrize("moves", [False, True])
def test_rotate_to_another_master(
    tmp_path: Path, catalog: Catalog, kms: dict[str, str], what: Any, moves: bool
) -> None:
    table = filled(catalog)
    before, first = stored(tmp_path), table.metadata.snapshots[0].snapshot_id
    target = keystore(tmp_path, "new", name="moved") if moves else kms
    master = "new" if moves else "other"
    rotate(table, what=what, wrapping_key_id=master, new_kms=target if moves else None)
    assert stored(tmp_path) == before
    assert table.properties[KEY_ID] == master
    if not moves:
        local.set_state(kms, MASTER, "destroyed", version=1)
    check(tmp_path, target, first)


def test_arguments(catalog: Catalog, kms: dict[str, str]) -> None:
    table = filled(catalog)
    before = raw_metadata(table)
    for error, options in (
        (ValueError, {"what": "dek"}),
        (ValueError, {"what": "mek", "keep_old": True}),
        (ValueError, {"wrapping_key_id": ""}),
        (TypeError, {"wrapping_key_id": 5}),
        (KeyAccessError, {"wrapping_key_id": "absent"}),
        (KeyAccessError, {"what": "mek", "wrapping_key_id": "absent"}),
    ):
        with pytest.raises(error):
            rotate(table, **options)
    plain = catalog.create_table("ns.plain", schema=table.schema())
    with pytest.raises(PolicyError, match="plaintext"):
        rotate(plain)
    with pytest.raises(PolicyError, match="only reads"):
        rotate(open_table(table.metadata_location, kms=kms))
    table.refresh()
    assert raw_metadata(table) == before


@pytest.mark.parametrize("kind", [Garbling, Confusing, Refusing])
@pytest.mark.parametrize("what", ["kek", "mek"])
def test_a_bad_kms_changes_nothing(
    tmp_path: Path, catalog: Catalog, kms: dict[str, str], what: Any, kind: type[local.LocalKms]
) -> None:
    filled(catalog)
    local.rotate_key(kms, MASTER)
    before = stored(tmp_path, metadata=True)
    table = sql_catalog(tmp_path, kind.with_properties(kms)).load_table("ns.t")  # type: ignore[arg-type]
    with pytest.raises((KeyAccessError, IntegrityError)):
        rotate(table, what=what)
    assert stored(tmp_path, metadata=True) == before


def test_killed(tmp_path: Path, catalog: Catalog, kms: dict[str, str]) -> None:
    """Before each write and commit: the table is as it was, or as it will be, and the next rotation works."""
    filled(catalog)
    first = catalog.load_table("ns.t").metadata.snapshots[0].snapshot_id

    def work() -> None:
        rotate(sql_catalog(tmp_path, kms).load_table("ns.t"))

    seen = set()
    before = [""]

    def prepare() -> None:
        before[:] = keks(raw_metadata(catalog.load_table("ns.t")))
        clear_cache()

    places = [(FileIO, "write_output"), (EncryptedCatalog, "commit_table"), (local.LocalKms, "wrap_key")]
    for _, ended in killed_before_steps(work, places, prepare=prepare):
        clear_cache()
        table = sql_catalog(tmp_path, kms).load_table("ns.t")
        assert ids(table) == list(range(30))
        assert (keks(raw_metadata(table)) != before) == ended
        seen.add(ended)
    assert seen == {True, False}
    check(tmp_path, kms, first)


# ---------------------------------------------------------------- others in between


@pytest.mark.parametrize("what", ["kek", "mek"])
@pytest.mark.parametrize("other", ["append", "kek", "mek"])
def test_another_commit_comes_first(
    tmp_path: Path, catalog: Catalog, kms: dict[str, str], what: Any, other: Any
) -> None:
    """Between what the rotation has read and its commit. Nothing is lost, and nothing old comes back."""
    first = filled(catalog).metadata.snapshots[0].snapshot_id
    local.rotate_key(kms, MASTER)
    client = Counted.with_properties(kms)
    table = sql_catalog(tmp_path, client).load_table("ns.t")  # type: ignore[arg-type]
    theirs = catalog.load_table("ns.t")
    old = raw_metadata(theirs)

    def act() -> None:
        if other == "append":
            theirs.append(rows(100, 110))
        else:
            rotate(theirs, what=other)

    client.before = [act]
    rotate(table, what=what)
    assert client.before == []
    now = raw_metadata(sql_catalog(tmp_path, kms).load_table("ns.t"))
    if "kek" in (what, other):
        assert not set(keks(old)) & set(keks(now))
    assert len(keks(now)) == 1
    if what == "mek" or other == "mek":
        local.set_state(kms, MASTER, "destroyed", version=1)
    assert opened(now, load_kms(kms))
    if other == "append":
        table = sql_catalog(tmp_path, kms).load_table("ns.t")
        assert ids(table) == [*range(30), *range(100, 110)]
    else:
        check(tmp_path, kms, first)


@pytest.mark.parametrize("what", ["kek", "mek"])
def test_a_writer_that_began_before(tmp_path: Path, catalog: Catalog, kms: dict[str, str], what: Any) -> None:
    """Its snapshot comes under the new keys, and the old KEK does not come back."""
    table = filled(catalog)
    local.rotate_key(kms, MASTER)
    stale = sql_catalog(tmp_path, kms).load_table("ns.t")
    with stale.transaction() as transaction:
        transaction.append(rows(100, 101))
        rotate(table, what=what)
    local.set_state(kms, MASTER, "destroyed", version=1)
    clear_cache()
    late = sql_catalog(tmp_path, kms).load_table("ns.t")
    assert ids(late) == [*range(30), 100]
    assert keks(raw_metadata(late)) == keks(raw_metadata(table))


@pytest.mark.parametrize("what", ["kek", "mek"])
def test_a_commit_whose_outcome_is_not_known(tmp_path: Path, catalog: Catalog, kms: dict[str, str], what: Any) -> None:
    """If it was not made, and another commit was, the rotation does not say that it was."""
    table = filled(catalog)
    local.rotate_key(kms, MASTER)
    other = sql_catalog(tmp_path, kms).load_table("ns.t")
    commit: Any = Vanilla.commit_table

    def act(self: Any, *args: Any, made: bool) -> Any:
        if self is not catalog:
            return commit(self, *args)
        if made:
            commit(self, *args)
        other.append(rows(30, 31))
        raise CommitStateUnknownException("the connection broke")

    for made in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Vanilla, "commit_table", functools.partialmethod(act, made=made))
            if made:
                assert rotate(table, what=what).counts["ok"]
            else:
                with pytest.raises(CommitStateUnknownException):
                    rotate(table, what=what)
    local.set_state(kms, MASTER, "destroyed", version=1)
    clear_cache()
    assert ids(sql_catalog(tmp_path, kms).load_table("ns.t")) == [*range(30), 30, 30]
