"""A KMS that wraps and does not unwrap again: nothing that does not open is ever put to use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, MASTER, decrypted, leftovers, make_kms, read_tree, write_tree

from ags_fast import IntegrityError, KeyAccessError
from ags_fast.jobs import Dataset, Policy, encrypt_files, rekey_files, rotate
from ags_fast.jobs.plan import open_plans
from ags_fast.keys import clear_cache
from ags_fast.keys.kms import load_kms, local

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


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    clear_cache()
    return make_kms(tmp_path, keys=(MASTER, "other"))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return tmp_path / "dataset"


def encrypt(dataset: Path, kms: dict[str, str], tree: dict[str, bytes] = TREE, **options: Any) -> None:
    src = write_tree(dataset.parent / f"src {len(list(dataset.parent.iterdir()))}", tree)
    encrypt_files(
        src, dataset, kms=kms, wrapping_key_id=options.pop("master", MASTER), engine=HERE, progress=False, **options
    ).raise_for_failures()


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
    encrypt(dataset, kms, double_wrap=what != "double-wrap", policy=Policy(kek_scope="partition"))
    before = read_tree(dataset)
    options: dict[str, Any] = {"wrapping_key_id": "other"}
    if warm:
        Dataset.open(dataset, load_kms(broken(kms, how, masters="other"))).load()
    with pytest.raises(WRONG, match="does not open again, so it was not put to use"):
        rotate(dataset, kms=broken(kms, how, masters="other"), what=what, force_expire=True, **options)
    still_opens(dataset, kms, before)


@pytest.mark.parametrize("how", HOW)
def test_a_rotation_in_single_wrap(kms: dict[str, str], dataset: Path, how: str) -> None:
    encrypt(dataset, kms, double_wrap=False)
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
    encrypt(dataset, kms, double_wrap=not single)
    local.rotate_key(kms, MASTER)
    before = read_tree(dataset)
    used = broken(kms, how, BrokenRewrap)
    if warm:
        Dataset.open(dataset, load_kms(used)).load()
    elif how == "another" and not single:
        return  # which an expiry finds, before it removes what opens: test_that_new_wraps_open_is_seen_...
    with pytest.raises(WRONG, match="does not open again, so it was not put to use"):
        rotate(dataset, kms=used, what="kek" if single else "mek", force_expire=True)
    still_opens(dataset, kms, before)


@pytest.mark.parametrize("how", HOW)
def test_a_move_to_another_kms(tmp_path: Path, kms: dict[str, str], dataset: Path, how: str) -> None:
    encrypt(dataset, kms)
    before = read_tree(dataset)
    there = make_kms(tmp_path, name="there", keys=(MASTER, "third"))
    with pytest.raises(WRONG, match="does not open again, so it was not put to use"):
        rotate(dataset, kms=kms, what="mek", new_kms=broken(there, how, masters="third"), wrapping_key_id="third")
    still_opens(dataset, kms, before)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("double_wrap", [True, False], ids=["double", "single"])
def test_a_new_dataset(kms: dict[str, str], dataset: Path, how: str, double_wrap: bool) -> None:
    with pytest.raises(WRONG, match="does not open again, so it was not put to use"):
        encrypt(dataset, broken(kms, how), double_wrap=double_wrap)
    assert [path for path in read_tree(dataset) if not path.startswith("_ags/")] == []
    # A dataset in single wrap has a KEK of its own; that one opens, where only DEKs do not.
    clear_cache()
    encrypt(dataset, kms, double_wrap=double_wrap)
    assert decrypted(dataset, kms) == TREE and leftovers(dataset, kms) == []


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("double_wrap", [True, False], ids=["double", "single"])
def test_keys_that_a_job_reserves(kms: dict[str, str], dataset: Path, how: str, double_wrap: bool) -> None:
    """Of another master key, for another kind of wrap, or since the one before is used up."""
    encrypt(dataset, kms, policy=Policy(kek_scope="partition"))
    before = read_tree(dataset)
    used = broken(kms, how, masters="other")
    for job in (
        lambda: encrypt(dataset, used, {"2/new": b""}, master="other", double_wrap=double_wrap),
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
        assert open_plans(Dataset.open(dataset, load_kms(kms)).store) == []
