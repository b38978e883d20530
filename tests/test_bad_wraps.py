"""A KMS that wraps and does not unwrap again: nothing that does not open is ever put to use."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, MASTER, add_tree, decrypted, leftovers, make_kms, read_tree

from ags_fast import FormatError, IntegrityError, KeyAccessError, PolicyError, cli
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.open_jobs import open_plans
from ags_fast.jobs import Policy, expire, rekey_files, restore_keys, rotate
from ags_fast.keys import KeyEntry, clear_cache
from ags_fast.keys.kek import rewrap_kek
from ags_fast.keys.kms import load_kms, local
from ags_fast.keys.stores.upkeep import SPARED

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pyarrow")

TREE = {"0/a": b"a" * 3000, "0/b": b"small", "1/c": b""}


class Broken(local.LocalKms):
    """One whose wraps are no good as the property ``broken`` says, for the master keys in ``broken-for``."""

    def _bad(self, wrapping_key_id: str) -> bool:
        return wrapping_key_id in self.properties.get("broken-for", MASTER).split(",")

    def _wrap(self, key: bytes, wrapping_key_id: str) -> bytes:
        how = self.properties.get("broken") if self._bad(wrapping_key_id) else None
        if how == "garbage":
            return os.urandom(len(super()._wrap(key, wrapping_key_id)))
        if how == "another":
            return super()._wrap(os.urandom(len(key)), wrapping_key_id)
        if how == "short":
            return super()._wrap(key[:5], wrapping_key_id)
        wrapped = super()._wrap(key, wrapping_key_id)
        return wrapped[:-1] + bytes([wrapped[-1] ^ 1]) if how == "flipped" else wrapped

    def _unwrap(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        if self.properties.get("broken") == "encrypt-only" and self._bad(wrapping_key_id):
            raise KeyAccessError("the caller may not decrypt")
        return super()._unwrap(wrapped, wrapping_key_id)


class BrokenRewrap(Broken):
    supports_rewrap = True

    def _rewrap(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return self._wrap(local.LocalKms._unwrap(self, wrapped, wrapping_key_id), wrapping_key_id)


def broken(kms: dict[str, str], how: str, kind: type = Broken, masters: str = MASTER) -> dict[str, str]:
    """The properties of such a KMS, as a user has it loaded."""
    made = {**kms, "encryption.kms-impl": f"{__name__}:{kind.__name__}", "broken": how, "broken-for": masters}
    del made["encryption.kms-type"]
    return made


HOW = ("garbage", "another", "short", "flipped", "encrypt-only")
WRONG = (IntegrityError, KeyAccessError)


def still_opens(dataset: Path, kms: dict[str, str], before: dict[str, bytes]) -> None:
    assert read_tree(dataset) == before
    clear_cache()
    assert decrypted(dataset, kms) == TREE


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", ["kek", "double-wrap", "mek"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_a_rotation_to_wraps_that_do_not_open(
    kms: dict[str, str], dataset: Path, what: str, how: str, warm: bool
) -> None:
    """It ended with nothing that opens: `rotate` put in KEKs that only its process's cache knew."""
    add_tree(dataset, kms, TREE, double_wrap=what != "double-wrap", policy=Policy(kek_scope="partition"))
    before = read_tree(dataset)
    options: dict[str, Any] = {"wrapping_key_id": "other"}
    if warm:
        Ledger.open(dataset, load_kms(broken(kms, how, masters="other"))).load()
    with pytest.raises(WRONG, match="does not open again, so it was not put to use"):
        rotate(dataset, kms=broken(kms, how, masters="other"), what=what, force_expire=True, **options)
    still_opens(dataset, kms, before)


@pytest.mark.parametrize("how", HOW)
def test_a_rotation_in_single_wrap(kms: dict[str, str], dataset: Path, how: str) -> None:
    add_tree(dataset, kms, TREE, double_wrap=False)
    before = read_tree(dataset)
    with pytest.raises(WRONG, match="does not open again, so it was not put to use"):
        rotate(dataset, kms=broken(kms, how, masters="other"), wrapping_key_id="other", force_expire=True)
    still_opens(dataset, kms, before)


@pytest.mark.parametrize("how", HOW[:-1])
@pytest.mark.parametrize("single", [False, True], ids=["double", "single"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_a_service_whose_rewrap_does_not_open(
    kms: dict[str, str], dataset: Path, how: str, single: bool, warm: bool
) -> None:
    add_tree(dataset, kms, TREE, double_wrap=not single)
    local.rotate_key(kms, MASTER)
    before = read_tree(dataset)
    used = broken(kms, how, BrokenRewrap)
    if warm:
        Ledger.open(dataset, load_kms(used)).load()
    elif how == "another" and not single:
        return  # which an expiry finds, before it removes what opens: test_that_new_wraps_open_is_seen_...
    with pytest.raises(WRONG, match="does not open again, so it was not put to use"):
        rotate(dataset, kms=used, what="kek" if single else "mek", force_expire=True)
    still_opens(dataset, kms, before)


@pytest.mark.parametrize("how", HOW)
def test_a_move_to_another_kms(tmp_path: Path, kms: dict[str, str], dataset: Path, how: str) -> None:
    add_tree(dataset, kms, TREE)
    before = read_tree(dataset)
    there = make_kms(tmp_path, name="there", keys=(MASTER, "third"))
    with pytest.raises(WRONG, match="does not open again, so it was not put to use"):
        rotate(dataset, kms=kms, what="mek", new_kms=broken(there, how, masters="third"), wrapping_key_id="third")
    still_opens(dataset, kms, before)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("double_wrap", [True, False], ids=["double", "single"])
def test_a_new_dataset(kms: dict[str, str], dataset: Path, how: str, double_wrap: bool) -> None:
    with pytest.raises(WRONG, match="does not open again, so it was not put to use"):
        add_tree(dataset, broken(kms, how), TREE, double_wrap=double_wrap)
    assert [path for path in read_tree(dataset) if not path.startswith("_ags/")] == []
    # A dataset in single wrap has a KEK of its own; that one opens, where only DEKs do not.
    clear_cache()
    add_tree(dataset, kms, TREE, double_wrap=double_wrap)
    assert decrypted(dataset, kms) == TREE
    assert leftovers(dataset, kms) == []


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("double_wrap", [True, False], ids=["double", "single"])
def test_keys_that_a_job_reserves(kms: dict[str, str], dataset: Path, how: str, double_wrap: bool) -> None:
    """Of another master key, for another kind of wrap, or since the one before is used up."""
    add_tree(dataset, kms, TREE, policy=Policy(kek_scope="partition"))
    before = read_tree(dataset)
    used = broken(kms, how, masters="other")
    for job in (
        lambda: add_tree(dataset, used, {"2/new": b""}, wrapping_key_id="other", double_wrap=double_wrap),
        lambda: rekey_files(
            dataset, kms=used, wrapping_key_id="other", double_wrap=double_wrap, engine=HERE, progress=False
        ),
    ):
        with pytest.raises(WRONG, match="does not open again, so it was not put to use"):
            job()
        after = read_tree(dataset)
        assert {path: data for path, data in after.items() if not path.startswith("_ags/keys/")} == {
            path: data for path, data in before.items() if not path.startswith("_ags/keys/")
        }
        clear_cache()
        assert decrypted(dataset, kms) == TREE
        assert open_plans(Ledger.open(dataset, load_kms(kms)).store) == []


# ---------------------------------------------------------------- the way back


def documents(dataset: Path) -> list[str]:
    folder = dataset / "_ags/keys"
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".json" and path.stat().st_size > 100)


def moved_to_a_key_that_is_gone(dataset: Path, kms: dict[str, str], **options: Any) -> None:
    add_tree(dataset, kms, TREE, **options)
    rotate(dataset, kms=kms, what="mek", wrapping_key_id="other")
    local.set_state(kms, "other", "destroyed")
    clear_cache()
    with pytest.raises(KeyAccessError):
        decrypted(dataset, kms)


@pytest.mark.parametrize("scope", ["dataset", "partition"])
def test_back_to_older_keys(kms: dict[str, str], dataset: Path, scope: str) -> None:
    moved_to_a_key_that_is_gone(dataset, kms, policy=Policy(kek_scope=scope))
    before = read_tree(dataset)
    planned = restore_keys(dataset, kms=kms, dry_run=True)
    assert read_tree(dataset) == before
    assert {row.status for row in planned.rows} == {"planned"}
    result = restore_keys(dataset, kms=kms)
    assert result.op == "restore"
    assert result.failed == []
    assert len(result.rows) == (1 if scope == "dataset" else 3)
    after = read_tree(dataset)
    assert before.items() <= after.items()
    assert len(after) == len(before) + 1
    clear_cache()
    assert decrypted(dataset, kms) == TREE
    (new,) = after.keys() - before.keys()
    made = json.loads(after[new])["body"]
    assert (made["operation"], made["parent"]) == ("restore", len(documents(dataset)) - 1)
    assert made["version"] == made["parent"] + 1 == int(new[-13:-5])
    assert made["ancestors"][-1] == hashlib.sha256(after[f"_ags/keys/{made['parent']:08}.json"]).hexdigest()
    assert {(row.status, row.error_class) for row in restore_keys(dataset, kms=kms).rows} == {("skipped", "Current")}
    assert read_tree(dataset) == after
    # All goes on: writers, rotations, expiries, pins.
    add_tree(dataset, kms, {"2/new": b""})
    result = rotate(dataset, kms=kms, force_expire=True)
    assert result.expired is not None
    assert result.expired.failed == []
    assert len(documents(dataset)) == 1
    clear_cache()
    assert decrypted(dataset, kms) == TREE | {"2/new": b""}
    assert leftovers(dataset, kms) == []


def test_back_from_what_somebody_has_put_there(kms: dict[str, str], dataset: Path) -> None:
    add_tree(dataset, kms, TREE)
    good = documents(dataset)[-1]
    number = int(good[:8]) + 1
    (dataset / f"_ags/keys/{number:08}.json").write_bytes(b"x" * 200)
    with pytest.raises(FormatError):
        decrypted(dataset, kms)
    restore_keys(dataset, kms=kms).raise_for_failures()
    assert decrypted(dataset, kms) == TREE


def test_back_to_a_version_by_its_number(kms: dict[str, str], dataset: Path) -> None:
    add_tree(dataset, kms, TREE)
    second = documents(dataset)[1]
    rotate(dataset, kms=kms)
    with pytest.raises(FileNotFoundError):
        restore_keys(dataset, kms=kms, version=17)
    result = restore_keys(dataset, kms=kms, version=int(second[:8]))
    # The version that the rotation made needs the key that it put in.
    assert [(row.format, row.status, row.error_class) for row in result.rows] == [
        ("key", "ok", None),
        ("version", "failed", "UnknownKeyError"),
    ]
    assert result.rows[1].src.endswith("_ags/versions/00000002.json")
    clear_cache()
    assert decrypted(dataset, kms, version=1) == TREE
    restore_keys(dataset, kms=kms, version=3).raise_for_failures()  # and back
    clear_cache()
    assert decrypted(dataset, kms) == TREE


def test_pins_of_what_goes_back(kms: dict[str, str], dataset: Path) -> None:
    add_tree(dataset, kms, TREE)
    pin = rotate(dataset, kms=kms, what="mek", wrapping_key_id="other").pin
    local.set_state(kms, "other", "disabled")
    before = read_tree(dataset)
    for known in ({"pin": f"1-{'0' * 64}"}, {"pin": f"9-{'0' * 64}"}, {"min_version": 2}):
        with pytest.raises((IntegrityError, PolicyError)):
            restore_keys(dataset, kms=kms, **known)
        assert read_tree(dataset) == before
    restore_keys(dataset, kms=kms, pin=pin).raise_for_failures()
    assert decrypted(dataset, kms) == TREE


def test_no_way_back(tmp_path: Path, kms: dict[str, str], dataset: Path) -> None:
    moved_to_a_key_that_is_gone(dataset, kms)
    local.set_state(kms, MASTER, "disabled")
    before = read_tree(dataset)
    with pytest.raises(KeyAccessError, match=r"no older document in _ags/keys .* version 2: "):
        restore_keys(dataset, kms=kms)
    with pytest.raises(KeyAccessError):
        restore_keys(dataset, kms=kms, version=1)
    assert read_tree(dataset) == before
    local.set_state(kms, MASTER, "enabled")
    (dataset / "_ags/keys/00000002.json").write_bytes(b'{"ags":1,"removed":true}\n')
    with pytest.raises(FileNotFoundError, match="was removed"):
        restore_keys(dataset, kms=kms, version=1)
    pytest.importorskip("sqlalchemy")
    with pytest.raises(PolicyError, match="keeps no documents"):
        restore_keys(dataset, kms=kms, key_store=f"sqlite:///{tmp_path}/keys.db?dataset=d")


def test_back_to_buckets(kms: dict[str, str], dataset: Path) -> None:
    add_tree(dataset, kms, TREE)
    keys = Ledger.open(dataset, load_kms(kms)).keys
    more = {f"k{n}": KeyEntry(f"k{n}", MASTER, b"x", "retired") for n in range(600)}
    keys.compare_and_swap(more, keys.version)
    (entry,) = keys.list("active")
    keys.compare_and_swap({entry.key_id: rewrap_kek(load_kms(kms), entry, None, "other")}, keys.version)
    local.set_state(kms, "other", "destroyed")
    restore_keys(dataset, kms=kms)
    clear_cache()
    found = Ledger.open(dataset, load_kms(kms)).keys
    assert len(found.list()) == 601
    assert found.get("k17") == more["k17"]
    assert decrypted(dataset, kms) == TREE
    assert [change.version for change in found.history()] == [1, 2, 3, 5]  # 4 is what was left


def test_a_retention_leaves_the_way_back(kms: dict[str, str], dataset: Path) -> None:
    """What expires by itself leaves the last few documents; what is asked for, none."""
    add_tree(dataset, kms, TREE, policy=Policy(keep=1))
    rotate(dataset, kms=kms, what="mek", wrapping_key_id="other")
    for _ in range(SPARED):
        rotate(dataset, kms=kms, what="kek")
    assert len(documents(dataset)) == 1 + SPARED
    assert decrypted(dataset, kms) == TREE
    assert leftovers(dataset, kms) == []
    for name in documents(dataset):
        os.utime(dataset / "_ags/keys" / name, (1, 1))
    add_tree(dataset, kms, {"2/new": b""}, wrapping_key_id="other")
    assert len(documents(dataset)) <= 2  # older than the grace
    expire(dataset, kms=kms)
    assert len(documents(dataset)) == 1


def test_back_from_a_shell(kms: dict[str, str], dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved_to_a_key_that_is_gone(dataset, kms)
    options = [text for name, value in kms.items() for text in ("--kms", f"{name}={value}")]
    assert cli.main(["keys", "restore", str(dataset), *options, "--dry-run"]) == 0
    assert "1 KEK to do" in capsys.readouterr().out
    assert cli.main(["keys", "restore", str(dataset), *options]) == 0
    clear_cache()
    assert decrypted(dataset, kms) == TREE
    assert cli.main(["keys", "restore", str(dataset), *options, "--json"]) == 0
    assert "the newest keys open" in capsys.readouterr().out
