"""Transactions that rename and copy files of a dataset."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, QUIET, add_tree, decrypted, encrypt, leftovers, make_kms, read_tree, rows_of, write_tree
from support import pattern

from ags_fast import Dataset
from ags_fast.errors import ConcurrentChangeError, IntegrityError, PolicyError
from ags_fast.jobs import (
    Policy,
    compact,
    expire,
    rekey_files,
    remove_files,
    rotate,
    set_policy,
    sweep,
    verify_files,
)

if TYPE_CHECKING:
    from ags_fast.dataset.entries import FileEntry

TREE = {"a": b"a", "b": pattern(3000), "d/x": b"x", "d/y": b"y", "d/e/z": b"z"}


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return make_kms(tmp_path, keys=(MASTER, "other", "hr"))


@pytest.fixture
def dataset(tmp_path: Path, kms: dict[str, str]) -> Dataset:
    """A dataset with the files of TREE."""
    made = Dataset.create(tmp_path / "dataset", kms=kms, wrapping_key_id=MASTER)
    with made.transaction(fsync=False, block_size=1024) as new:
        for path, data in TREE.items():
            with new.create(path) as file:
                file.write(data)
    return made


def entries(dataset: Dataset, kms: dict[str, str]) -> dict[str, FileEntry]:
    return rows_of(dataset.url, kms)


def objects(dataset: Dataset) -> dict[str, bytes]:
    return {path: data for path, data in read_tree(Path(dataset.url)).items() if not path.startswith("_ags/")}


def check(dataset: Dataset, kms: dict[str, str], tree: dict[str, bytes]) -> None:
    """The newest version has these files, and nothing is left of anything else."""
    assert decrypted(dataset.url, kms) == tree
    verify_files(dataset.url, kms=kms, **QUIET).raise_for_failures()
    assert leftovers(Path(dataset.url), kms) == []


def test_only_manifests_are_written(dataset: Dataset, kms: dict[str, str]) -> None:
    stored, before = objects(dataset), entries(dataset, kms)
    with dataset.transaction(fsync=False) as new:
        new.rename({"a": "b", "b": "d/e/a", "d/x": "f/g/x"}, replace=True)
    renamed = {"b": b"a", "d/e/a": TREE["b"], "f/g/x": b"x", "d/y": b"y", "d/e/z": b"z"}
    assert objects(dataset) == stored
    check(dataset, kms, renamed)
    now = entries(dataset, kms)
    assert now["f/g/x"] == before["d/x"]._replace(path="f/g/x")
    assert {file.path: file.plain_length for file in dataset.files()} == {p: len(data) for p, data in renamed.items()}
    with dataset.open_file("d/e/a") as file:
        assert file.read() == TREE["b"]
    assert decrypted(dataset.url, kms, version=2) == TREE


def test_later_jobs(dataset: Dataset, kms: dict[str, str], tmp_path: Path) -> None:
    """What else changes a dataset goes by objects, too, and takes renamed files for what they are."""
    with dataset.transaction(fsync=False) as new:
        new.rename({"a": "r", "b": "s"})
    tree = {"r": b"a", "s": TREE["b"]} | {path: data for path, data in TREE.items() if path not in ("a", "b")}
    sweep(dataset.url, kms=kms)
    check(dataset, kms, tree)
    rotate(dataset.url, kms=kms, what="kek", progress=False)
    check(dataset, kms, tree)
    rotate(dataset.url, kms=kms, what="mek", wrapping_key_id="other", progress=False)
    compact(dataset.url, kms=kms)
    check(dataset, kms, tree)
    removed = remove_files(dataset.url, "r", kms=kms)
    assert removed.still_in is not None
    assert removed.still_in[:2] == [2, 3]  # in version 2, as "a"
    expire(dataset.url, kms=kms, keep=1)
    del tree["r"]
    check(dataset, kms, tree)
    assert len(objects(dataset)) == len(tree)
    rekey_files(dataset.url, kms=kms, **QUIET).raise_for_failures()
    check(dataset, kms, tree)
    add_tree(Path(dataset.url), kms, {"a": b"again", "s": b"new"}, wrapping_key_id="other", overwrite=True)
    check(dataset, kms, tree | {"a": b"again", "s": b"new"})


def test_a_source_is_not_taken_for_a_renamed_file(tmp_path: Path, kms: dict[str, str]) -> None:
    """Two sources of one size and one time: the one at the new path is encrypted, although its stamp is known."""
    src = write_tree(tmp_path / "src", {"a": b"1", "b": b"2"})
    for name in ("a", "b"):
        os.utime(src / name, ns=(10**18, 10**18))
    encrypt(src, tmp_path / "dataset", kms).raise_for_failures()
    dataset = Dataset.open(tmp_path / "dataset", kms=kms)
    with dataset.transaction(fsync=False) as new:
        new.rename({"a": "b"}, replace=True)
    check(dataset, kms, {"b": b"1"})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        encrypt(src, tmp_path / "dataset", kms)
    encrypt(src, tmp_path / "dataset", kms, overwrite=True).raise_for_failures()
    check(dataset, kms, {"a": b"1", "b": b"2"})


def test_conflicts(dataset: Dataset, kms: dict[str, str]) -> None:
    def others(tree: dict[str, bytes]) -> None:
        with Dataset.open(dataset.url, kms=kms).transaction(fsync=False) as other:
            for path, data in tree.items():
                with other.create(path, replace=True) as file:
                    file.write(data)

    def mine(target: str, theirs: dict[str, bytes]) -> None:
        with dataset.transaction(fsync=False) as new:
            new.rename({"b": "moved", "a": target})
            with new.create("mine") as file:
                file.write(b"mine")
            others(theirs)

    now = dict(TREE)
    for target, theirs in (
        ("new", {"a": b"theirs"}),
        ("new", {"new": b"theirs"}),
        ("new2", {"new2/x": b"theirs"}),
        ("new3/d/e", {"new3/d": b"theirs"}),
    ):
        dataset.refresh()
        with pytest.raises(ConcurrentChangeError):
            mine(target, theirs)
        now |= theirs
        check(dataset, kms, now)
    dataset.refresh()

    def late() -> None:
        with dataset.transaction(fsync=False) as new:
            new.rename({"b": "moved"})
            remove_files(dataset.url, "b", kms=kms)

    with pytest.raises(ConcurrentChangeError):
        late()
    del now["b"]
    check(dataset, kms, now)


def test_refused_renames_change_nothing(dataset: Dataset, kms: dict[str, str]) -> None:
    with dataset.transaction(fsync=False) as new:
        with new.create("made") as file:
            file.write(b"made")
        being = new.create("being")
        for paths, error in (
            ({"no": "x"}, FileNotFoundError),
            ({"no": "no"}, FileNotFoundError),
            ({"a": "b", "b": "b"}, ValueError),
            ({"a": "b"}, FileExistsError),
            ({"a": "made"}, FileExistsError),
            ({"a": "x", "b": "x"}, ValueError),
            ({"a": "d"}, ValueError),
            ({"a": "b/c"}, ValueError),
            ({"a": "x", "b": "x/y"}, ValueError),
            ({"a": "made/x"}, ValueError),
            ({"made": "d/x/y"}, ValueError),
            ({"being": "x"}, ValueError),
            ({"a": "being"}, FileExistsError),
            ({"a": "../x"}, PolicyError),
            ({"a": "_ags/x"}, ValueError),
            ({"a": ""}, PolicyError),
        ):
            with pytest.raises(error):
                new.rename(paths)
        new.rename({"a": "a", "made": "made"})
        being.abort()
    check(dataset, kms, TREE | {"made": b"made"})
    new = dataset.transaction(fsync=False)
    with new:
        new.rename({"a": "x", "made": "a"})
        new.remove("x")
        new.abort()
    with pytest.raises(ValueError, match="over"):
        new.rename({"a": "x"})
    check(dataset, kms, TREE | {"made": b"made"})


def test_with_other_changes(dataset: Dataset, kms: dict[str, str]) -> None:
    with dataset.transaction(fsync=False) as new:
        with new.create("made") as file:
            file.write(b"made")
        new.rename({"made": "m/ade", "a": "m/a"})
        new.rename({"m/a": "m/a2", "m/ade": "b"}, replace=True)  # b of the version goes
        with new.create("a") as file:  # the place is free
            file.write(b"new")
        with new.create("m/a2", replace=True) as file:  # and the renamed file is replaced
            file.write(b"a2")
        new.rename({"d/x": "d/q"})
        new.remove("d/q")
        with pytest.raises(FileNotFoundError):
            new.remove("d/x")
    check(dataset, kms, {"a": b"new", "m/a2": b"a2", "b": b"made", "d/y": b"y", "d/e/z": b"z"})
    with dataset.transaction(fsync=False) as new:
        new.rename({path: f"all/{path}" for path in ("a", "b", "m/a2", "d/y", "d/e/z")})
        new.rename({"all/a": "m"})  # a file where a folder was
    check(dataset, kms, {"m": b"new", "all/b": b"made", "all/m/a2": b"a2", "all/d/y": b"y", "all/d/e/z": b"z"})


@pytest.mark.parametrize("seed", range(4))
def test_many_changes(dataset: Dataset, kms: dict[str, str], seed: int) -> None:
    """Any sequence of changes in one transaction gives what a dictionary gives."""
    rng, now, names = random.Random(seed), dict(TREE), ("a", "b", "d/x", "d", "d/e/z", "d/e", "q", "q/r")
    for _ in range(6):
        with dataset.transaction(fsync=False) as new:
            for n in range(8):
                path, target = rng.sample(names, 2)
                after = dict(now)
                try:
                    if rng.random() < 0.5:
                        new.rename({path: target}, replace=True)
                        after[target] = after.pop(path)
                    elif rng.random() < 0.5:
                        new.remove(path)
                        del after[path]
                    else:
                        with new.create(path, replace=True) as file:
                            file.write(b"%d" % n)
                        after[path] = b"%d" % n
                except (FileNotFoundError, ValueError):
                    continue
                now = after
                assert not any(other.startswith(f"{path}/") for path in now for other in now)
        check(dataset, kms, now)


def test_the_kek_of_a_folder(tmp_path: Path, kms: dict[str, str]) -> None:
    """Where each folder has a KEK, a renamed file has that of its new one: it can be destroyed with that folder."""
    add_tree(tmp_path / "dataset", kms, {"p/a": b"a", "q/b": b"b"}, policy=Policy(kek_scope="partition"))
    dataset = Dataset.open(tmp_path / "dataset", kms=kms)
    before = entries(dataset, kms)
    with dataset.transaction(fsync=False) as new:
        new.rename({"p/a": "q/a"})
    now = entries(dataset, kms)
    assert now["q/a"].key_id == now["q/b"].key_id == before["q/b"].key_id != before["p/a"].key_id
    assert now["q/a"].file == before["p/a"].file
    check(dataset, kms, {"q/a": b"a", "q/b": b"b"})
    set_policy(dataset.url, Policy(), kms=kms)
    dataset.refresh()
    with dataset.transaction(fsync=False) as new:
        new.rename({"q/a": "a"})
    assert entries(dataset, kms)["a"].key_id == before["q/b"].key_id
    check(dataset, kms, {"a": b"a", "q/b": b"b"})


def test_members_of_a_set(tmp_path: Path, kms: dict[str, str]) -> None:
    """A renamed file keeps its number. A set that loses a member is no set any more."""
    tree = {f"{n}": b"%d" % n for n in range(4)}
    add_tree(tmp_path / "dataset", kms, tree, aad_prefix="orders.part{n}")
    dataset = Dataset.open(tmp_path / "dataset", kms=kms)
    with dataset.transaction(fsync=False) as new:
        new.rename({"0": "zero", "1": "0"})
    found = entries(dataset, kms)
    assert [found[path].part for path in ("zero", "0", "2", "3")] == [0, 1, 2, 3]
    assert dataset.snapshot().entry.sets == {found["0"].set_id: 4}
    check(dataset, kms, {"zero": b"0", "0": b"1", "2": b"2", "3": b"3"})
    with dataset.transaction(fsync=False) as new:
        new.rename({"zero": "2"}, replace=True)
    assert dataset.snapshot().entry.sets == {}
    check(dataset, kms, {"2": b"0", "0": b"1", "3": b"3"})


def test_copies_are_protected_as_their_sources(dataset: Dataset, kms: dict[str, str], tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    options: dict[str, Any] = {
        "wrapping_key_id": "other",
        "column_keys": {"s": "hr", "t": MASTER},
        "key_material": "keytools",
    }
    table = pa.table({"x": [1, 2], "s": ["p", "q"], "t": [3, 4]})
    with dataset.transaction(fsync=False, dek_length=24, **options) as new:
        with new.create("t.parquet", "parquet") as file:
            pq.write_table(table, file)
        with new.create("stream") as file:
            file.write(b"stream")
    before = entries(dataset, kms)
    with dataset.transaction(fsync=False) as new:
        new.copy("t.parquet", "u.parquet")
        new.copy("b", "c")
        new.copy("stream", "a", replace=True)
        with pytest.raises(FileExistsError):
            new.copy("b", "d/x")
        with pytest.raises(FileNotFoundError):
            new.copy("no", "x")
        new.rename({"t.parquet": "v.parquet"})
    now, keys = entries(dataset, kms), dataset.snapshot().entry.keys

    def masters(entry: FileEntry) -> list[tuple[str, str]]:
        columns = [(key["column"], keys[key["key_id"]].wrapping_key_id) for key in entry.column_keys or ()]
        return [("", keys[entry.key_id].wrapping_key_id), *columns]

    assert masters(now["u.parquet"]) == [("", "other"), ("s", "hr"), ("t", MASTER)]
    assert masters(now["v.parquet"]) == masters(now["u.parquet"])
    assert masters(now["a"]) == [("", "other")]
    assert (now["c"].block_size, now["a"].block_size) == (1024, before["stream"].block_size)
    assert [one["wrapping_key_id"] for one in now["u.parquet"].key_material or ()] == ["other", "hr", MASTER]
    assert now["v.parquet"].key_material == before["t.parquet"].key_material
    assert now["u.parquet"].file != now["v.parquet"].file == before["t.parquet"].file
    assert now["u.parquet"].wrapped_dek != before["t.parquet"].wrapped_dek
    for path in ("u.parquet", "v.parquet"):
        with dataset.open_file(path) as opened:
            assert pq.read_table(opened) == table
    verify_files(dataset.url, kms=kms, **QUIET).raise_for_failures()
    assert leftovers(Path(dataset.url), kms) == []
    with dataset.open_file("c") as opened:
        assert opened.read() == TREE["b"]


def test_a_copy_that_fails_leaves_nothing(dataset: Dataset, kms: dict[str, str]) -> None:
    victim = Path(dataset.url) / entries(dataset, kms)["b"].file
    sealed = bytearray(victim.read_bytes())
    sealed[100] ^= 1
    victim.write_bytes(sealed)
    with dataset.transaction(fsync=False) as new:
        with pytest.raises(IntegrityError):
            new.copy("b", "c")
        new.copy("a", "a2")
    assert {file.path for file in dataset.files()} == {*TREE, "a2"}
    assert leftovers(Path(dataset.url), kms) == []
