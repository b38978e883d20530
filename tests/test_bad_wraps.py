"""A KMS that wraps and does not unwrap again: nothing that does not open is ever put to use."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, MASTER, add_tree, decrypted, leftovers, make_kms, read_tree

from ags_fast import FormatError, IntegrityError, KeyAccessError, PolicyError, cli
from ags_fast.cli.codes import EXIT_INTEGRITY, EXIT_KEY_ACCESS
from ags_fast.cli.kms import kms_options
from ags_fast.dataset.access import Access
from ags_fast.dataset.names import entry_path
from ags_fast.jobs import Policy, expire, rekey_files, restore_keys, rotate
from ags_fast.keys import clear_cache
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pyarrow")

TREE = {"0/a": b"a" * 3000, "0/b": b"small", "1/c": b""}


class Broken(local.LocalKms):
    """One whose wraps are no good as the property ``broken`` says, for the master keys in ``broken-for``."""

    def _bad(self, wrapping_key_id: str) -> bool:
        return wrapping_key_id in self.properties.get("broken-for", MASTER).split(",")

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        how = self.properties.get("broken") if self._bad(wrapping_key_id) else None
        if how == "garbage":
            return os.urandom(len(super().wrap_key(key, wrapping_key_id)))
        if how == "another":
            return super().wrap_key(os.urandom(len(key)), wrapping_key_id)
        if how == "short":
            return super().wrap_key(key[:5], wrapping_key_id)
        wrapped = super().wrap_key(key, wrapping_key_id)
        return wrapped[:-1] + bytes([wrapped[-1] ^ 1]) if how == "flipped" else wrapped

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        if self.properties.get("broken") == "encrypt-only" and self._bad(wrapping_key_id):
            raise KeyAccessError("the caller may not decrypt")
        if self.properties.get("broken") == "changed" and self._bad(wrapping_key_id):
            wrapped = wrapped[:-1] + bytes([wrapped[-1] ^ 1])
        return super().unwrap_key(wrapped, wrapping_key_id)


class BrokenRewrap(Broken):
    def rewrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return self.wrap_key(local.LocalKms.unwrap_key(self, wrapped, wrapping_key_id), wrapping_key_id)


def broken(kms: dict[str, str], how: str, kind: type = Broken, masters: str = MASTER) -> dict[str, str]:
    """The properties of such a KMS, as a user has it loaded."""
    made = {**kms, "encryption.kms-impl": f"{__name__}:{kind.__name__}", "broken": how, "broken-for": masters}
    del made["encryption.kms-type"]
    return made


HOW = ("garbage", "another", "short", "flipped", "encrypt-only")
WRONG = (IntegrityError, KeyAccessError)


def still_opens(dataset: Path, kms: dict[str, str], before: dict[str, bytes]) -> None:
    """Nothing has changed but, at most, what says that a job has ended, or lets another one take it up."""
    after = read_tree(dataset)
    assert {path: after.pop(path, b"") for path in before} == before
    assert all(path.startswith(("_ags/log/", "_ags/plans/")) for path in after)
    clear_cache()
    assert decrypted(dataset, kms) == TREE


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", ["kek", "double-wrap", "mek"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_a_rotation_to_wraps_that_do_not_open(
    kms: dict[str, str], dataset: Path, what: Any, how: str, warm: bool
) -> None:
    """It ended with nothing that opens: `rotate` put in KEKs that only its process's cache knew."""
    add_tree(dataset, kms, TREE, double_wrap=what != "double-wrap", policy=Policy(kek_scope="partition"))
    before = read_tree(dataset)
    options: dict[str, Any] = {"wrapping_key_id": "other"}
    if warm:
        Access.of(dataset, broken(kms, how, masters="other")).open()
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
        Access.of(dataset, used).open()
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
        still_opens(dataset, kms, before)
        assert Access.of(dataset, kms).log().plans() == {}


# ---------------------------------------------------------------- the way back


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
    assert after.keys() - before.keys() == {entry_path(4)}
    assert Access.of(dataset, kms).open().entry.operation == "restore-keys"
    assert {(row.status, row.error_class) for row in restore_keys(dataset, kms=kms).rows} == {("skipped", "Current")}
    assert read_tree(dataset) == after
    # All goes on: writers, rotations, expiries, pins.
    add_tree(dataset, kms, {"2/new": b""})
    result = rotate(dataset, kms=kms, force_expire=True)
    assert result.expired is not None
    assert result.expired.failed == []
    clear_cache()
    assert decrypted(dataset, kms) == TREE | {"2/new": b""}
    assert leftovers(dataset, kms) == []


def test_what_somebody_has_put_there(kms: dict[str, str], dataset: Path) -> None:
    add_tree(dataset, kms, TREE)
    (dataset / entry_path(3)).write_bytes(b"x" * 200)
    for work in (decrypted, lambda dataset, kms: restore_keys(dataset, kms=kms)):
        with pytest.raises(FormatError, match=entry_path(3)):
            work(dataset, kms)


def test_back_to_a_version_by_its_number(kms: dict[str, str], dataset: Path) -> None:
    add_tree(dataset, kms, TREE)
    rotate(dataset, kms=kms, what="mek", wrapping_key_id="other")
    rotate(dataset, kms=kms, what="mek", wrapping_key_id="third")
    with pytest.raises(FileNotFoundError, match="no version 17"):
        restore_keys(dataset, kms=kms, version=17)
    local.set_state(kms, "third", "disabled")
    result = restore_keys(dataset, kms=kms, version=2)  # None would be version 3
    assert [(row.format, row.status) for row in result.rows] == [("key", "ok")]
    keys = Access.of(dataset, kms).open().entry.keys
    assert {key.wrapping_key_id for key in keys.values()} == {MASTER}
    local.set_state(kms, "other", "destroyed")
    clear_cache()
    assert decrypted(dataset, kms) == TREE


def test_pins_of_what_goes_back(kms: dict[str, str], dataset: Path) -> None:
    add_tree(dataset, kms, TREE)
    pin = rotate(dataset, kms=kms, what="mek", wrapping_key_id="other").pin
    local.set_state(kms, "other", "disabled")
    before = read_tree(dataset)
    for known in ({"pin": f"1-{'0' * 64}"}, {"pin": f"9-{'0' * 64}"}, {"min_version": 9}):
        with pytest.raises((IntegrityError, PolicyError)):
            restore_keys(dataset, kms=kms, **known)
        assert read_tree(dataset) == before
    restore_keys(dataset, kms=kms, pin=pin).raise_for_failures()
    assert decrypted(dataset, kms) == TREE


def test_no_way_back(kms: dict[str, str], dataset: Path) -> None:
    moved_to_a_key_that_is_gone(dataset, kms)
    local.set_state(kms, MASTER, "disabled")
    before = read_tree(dataset)
    for version in (None, 2):
        with pytest.raises(KeyAccessError, match=r"(is disabled|was destroyed)"):
            restore_keys(dataset, kms=kms, version=version)
    assert read_tree(dataset) == before
    local.set_state(kms, MASTER, "enabled")
    with pytest.raises(FileNotFoundError, match="no version 17"):
        restore_keys(dataset, kms=kms, version=17)


def test_a_retention_leaves_the_way_back(kms: dict[str, str], dataset: Path) -> None:
    """The version before a rotation of the master key is kept until another version has files of its own."""
    add_tree(dataset, kms, TREE, policy=Policy(keep=1))
    for master in ("third", "other"):
        rotate(dataset, kms=kms, what="mek", wrapping_key_id=master)
        expire(dataset, kms=kms)
    local.set_state(kms, "other", "destroyed")
    local.set_state(kms, "third", "destroyed")
    restore_keys(dataset, kms=kms).raise_for_failures()
    clear_cache()
    assert decrypted(dataset, kms) == TREE
    rotate(dataset, kms=kms, what="mek", wrapping_key_id="hr")
    add_tree(dataset, kms, {"2/new": b""}, wrapping_key_id="hr")
    assert Access.of(dataset, kms).open().entry.first == 7
    assert leftovers(dataset, kms) == []


def test_back_from_a_shell(kms: dict[str, str], dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved_to_a_key_that_is_gone(dataset, kms)
    options = [text for name, value in kms.items() for text in ("--kms", f"{name}={value}")]
    assert cli.main(["keys", "restore", str(dataset), *options, "--dry-run"]) == 0
    assert re.search("KEKs +1 to do", capsys.readouterr().out)
    assert cli.main(["keys", "restore", str(dataset), *options]) == 0
    clear_cache()
    assert decrypted(dataset, kms) == TREE
    assert cli.main(["keys", "restore", str(dataset), *options, "--json"]) == 0
    assert "its newest wrap opens" in capsys.readouterr().out


@pytest.mark.parametrize("masters", [MASTER, "other", f"other,{MASTER}"])
@pytest.mark.parametrize("how", ["changed", "encrypt-only"])
def test_which_error_says_that_there_is_no_way_back(
    kms: dict[str, str], dataset: Path, capsys: pytest.CaptureFixture[str], how: str, masters: str
) -> None:
    """IntegrityError if somebody has changed the wraps, KeyAccessError if the KMS refuses a call."""
    add_tree(dataset, kms, TREE)
    add_tree(dataset, kms, {"2/new": b""}, wrapping_key_id="other")
    kind, code = (IntegrityError, EXIT_INTEGRITY) if how == "changed" else (KeyAccessError, EXIT_KEY_ACCESS)
    used = broken(kms, how, masters=masters)
    with pytest.raises(kind):
        restore_keys(dataset, kms=used)
    assert cli.main(["keys", "restore", str(dataset), *kms_options(used)]) == code
    capsys.readouterr()
