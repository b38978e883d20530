"""Whether a source has changed: by size, time of change, etag and, on a local disk, ctime; then by its bytes."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, QUIET, read_tree, row_of, write_tree
from kms_clients import calls_of, keystore

from ags_fast.dataset.access import Access
from ags_fast.dataset.dataset import Dataset
from ags_fast.errors import ExpiredError, KeyAccessError
from ags_fast.fs import Store
from ags_fast.fs.base import Entry
from ags_fast.jobs import LocalEngine, decrypt_files, encrypt_files, expire, rekey_files, rotate, run
from ags_fast.jobs.work import dispatch
from ags_fast.jobs.work.context import Context
from ags_fast.keys import clear_cache
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from pathlib import Path

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.jobs import JobResult

TREE = {"a": b"1", "b/c": b"22" * 700, "b/d": b"", "large": bytes(range(256)) * 9000}


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return keystore(tmp_path, MASTER)


class World:
    """A source, and a dataset of it."""

    def __init__(self, folder: Path, kms: dict[str, str]) -> None:
        self.folder, self.src, self.url, self.kms = folder, folder / "src", folder / "ds", kms

    def encrypt(self, **options: Any) -> JobResult:
        options = {"wrapping_key_id": MASTER, "fsync": False} | QUIET | options
        return encrypt_files(self.src, self.url, kms=self.kms, **options)

    def files(self) -> dict[str, bytes]:
        shutil.rmtree(self.folder / "back", ignore_errors=True)
        decrypt_files(self.url, self.folder / "back", kms=self.kms, **QUIET).raise_for_failures()
        return read_tree(self.folder / "back")

    def rows(self) -> list[FileEntry]:
        return Access.of(self.url, self.kms).files()[1]

    def change(self, name: str, data: bytes) -> None:
        """Write other bytes; the time of change is as before."""
        path = self.src / name
        times = os.stat(path)
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.fixture
def world(tmp_path: Path, kms: dict[str, str]) -> World:
    made = World(tmp_path, kms)
    write_tree(made.src, TREE)
    made.encrypt().raise_for_failures()
    return made


@pytest.mark.parametrize("workers", [0, 2])
def test_other_bytes_of_the_same_size_and_time(world: World, workers: int) -> None:
    large = TREE["large"][::-1]
    world.change("large", large)
    world.change("a", b"2")
    with pytest.raises(FileExistsError, match=r"'a' and 1 more.*overwrite=True"):
        world.encrypt()
    done = world.encrypt(overwrite=True, engine=LocalEngine(workers))
    assert done.counts == {"ok": 2, "skipped": 2, "failed": 0}
    assert world.files() == {**TREE, "a": b"2", "large": large}
    assert world.encrypt().counts == {"ok": 0, "skipped": 4, "failed": 0}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("how", ["chmod", "restored", "renamed"])
def test_the_same_bytes_are_not_written_again(world: World, how: str, overwrite: bool) -> None:
    """After ``chmod -R``, ``rsync -t`` or a restore from a backup."""
    before = read_tree(world.url)
    if how == "chmod":
        for path in world.src.rglob("*"):
            path.chmod(0o700)
    else:
        shutil.copytree(world.src, world.folder / "copy")  # keeps the times of change
        shutil.rmtree(world.src)
        (world.folder / "copy").rename(world.src)
    again = world.encrypt(overwrite=overwrite)
    assert {row.error_class for row in again.rows} == {"Unchanged"}
    assert again.version == 2
    assert read_tree(world.url) == before
    assert sorted(path.name for path in world.url.rglob("*.agstmp")) == []


def test_parquet_is_compared_by_its_bytes(tmp_path: Path, kms: dict[str, str]) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    world = World(tmp_path, kms)
    world.src.mkdir()
    for name in ("touched", "other"):
        pq.write_table(pa.table({"n": range(1000)}), world.src / name, use_dictionary=False, compression="none")
    world.encrypt(format="parquet").raise_for_failures()
    (world.src / "touched").chmod(0o600)
    data = (world.src / "other").read_bytes()
    world.change("other", data.replace((7).to_bytes(8, "little"), (8).to_bytes(8, "little"), 1))
    done = world.encrypt(format="parquet", overwrite=True)
    assert (row_of(done, "touched").error_class, row_of(done, "other").status) == ("Unchanged", "ok")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_refused_key_is_no_change(tmp_path: Path, kms: dict[str, str], overwrite: bool) -> None:
    """Who may not open a column cannot compare it: that is said, and nothing is written."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    world = World(tmp_path, kms)
    world.src.mkdir()
    pq.write_table(pa.table({"n": range(9), "secret": range(9)}), world.src / "a")
    local.create_key(kms, "column")
    world.encrypt(format="parquet", column_keys={"secret": "column"}).raise_for_failures()
    before = read_tree(world.url)
    local.set_state(kms, "column", "disabled")
    clear_cache()
    (world.src / "a").chmod(0o600)
    with pytest.raises(KeyAccessError, match="disabled"):
        world.encrypt(format="parquet", column_keys={"secret": "column"}, overwrite=overwrite)
    assert read_tree(world.url) == before


def test_ignore_ctime_reads_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.change("a", b"2")
    monkeypatch.setattr("ags_fast.jobs.work.stream.same_as_source", pytest.fail)
    assert world.encrypt(ignore_ctime=True).counts == {"ok": 0, "skipped": 4, "failed": 0}


def test_an_unchanged_tree_asks_no_kms(world: World) -> None:
    assert calls_of(lambda: world.encrypt()) == {}


def test_rows_without_a_ctime(tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of datasets before, and of other storages: size and time of change decide."""
    of = Entry.of

    def without(path: str, info: os.stat_result) -> Entry:
        entry = of(path, info)
        entry.ctime_ns = None
        return entry

    world = World(tmp_path, kms)
    write_tree(world.src, TREE)
    with monkeypatch.context() as patched:
        patched.setattr(Entry, "of", without)
        world.encrypt().raise_for_failures()
    world.change("a", b"2")
    assert world.encrypt().counts == {"ok": 0, "skipped": 4, "failed": 0}


def test_a_damaged_file_of_the_dataset_is_made_again(world: World) -> None:
    (world.src / "large").chmod(0o600)
    (damaged,) = [path for path in world.url.rglob("*large*") if path.is_file()]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(FileExistsError, match="'large'"):
        world.encrypt()
    assert world.encrypt(overwrite=True).counts == {"ok": 1, "skipped": 3, "failed": 0}
    assert world.files() == TREE


@pytest.fixture
def summed(tmp_path: Path, kms: dict[str, str]) -> World:
    """A source, and a dataset with keyed digests of its files."""
    made = World(tmp_path, kms)
    write_tree(made.src, TREE)
    made.encrypt(checksum=True).raise_for_failures()
    return made


@pytest.mark.parametrize("workers", [0, 2])
def test_a_digest_finds_what_no_time_shows(summed: World, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source is read. The files of the dataset are not."""
    of = Entry.of

    def frozen(path: str, info: os.stat_result) -> Entry:
        entry = of(path, info)
        entry.ctime_ns = 1
        return entry

    summed.change("large", TREE["large"][::-1])
    for path in summed.src.rglob("*"):
        if path.name != "large":
            os.utime(path, ns=(1, 1))
    monkeypatch.setattr(Entry, "of", frozen)
    monkeypatch.setattr("ags_fast.jobs.work.stream.same_as_source", pytest.fail)
    with pytest.raises(FileExistsError, match="'large'"):
        summed.encrypt(checksum=True)
    done = summed.encrypt(checksum=True, overwrite=True, engine=LocalEngine(workers))
    assert done.counts == {"ok": 1, "skipped": 3, "failed": 0}
    assert summed.files() == {**TREE, "large": TREE["large"][::-1]}
    assert summed.encrypt(checksum=True).counts == {"ok": 0, "skipped": 4, "failed": 0}


def test_a_digest_spares_the_dataset_after_a_chmod(summed: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in summed.src.rglob("*"):
        path.chmod(0o700)
    monkeypatch.setattr("ags_fast.jobs.work.stream.same_as_source", pytest.fail)
    assert summed.encrypt().counts == {"ok": 0, "skipped": 4, "failed": 0}


def test_a_digest_is_keyed(summed: World, tmp_path: Path) -> None:
    """The same bytes have another digest in each file. No digest is that of the bytes, and none is in the clear."""
    digests = [row.checksum for row in summed.rows() if row.checksum is not None]
    assert list(map(len, digests)) == [32] * 4
    assert not set(digests) & {hashlib.sha256(data).digest() for data in TREE.values()}
    other = World(tmp_path / "other", summed.kms)
    write_tree(other.src, TREE)
    result = other.encrypt(checksum=True)
    assert {row.checksum for row in result.rows}.isdisjoint(digest.hex() for digest in digests)
    stored = b"".join(path.read_bytes() for path in summed.url.rglob("*") if path.is_file())
    assert not any(digest in stored or digest.hex().encode() in stored for digest in digests)


@pytest.mark.parametrize("how", ["rekey", "rename", "rotate"])
def test_a_digest_lives_as_long_as_the_data_key(summed: World, how: str) -> None:
    if how == "rekey":
        rekey_files(summed.url, kms=summed.kms, **QUIET).raise_for_failures()
    elif how == "rotate":
        rotate(summed.url, kms=summed.kms, what="kek", **QUIET).raise_for_failures()
    else:
        with Dataset.open(summed.url, kms=summed.kms).transaction() as transaction:
            transaction.rename({"large": "large2"})
        (summed.src / "large").rename(summed.src / "large2")
    kept = [row.checksum is not None for row in summed.rows()]
    assert kept == [how != "rekey"] * 4
    for path in summed.src.rglob("*"):
        path.chmod(0o700)
    assert summed.encrypt(checksum=True).counts == {"ok": 0, "skipped": 4, "failed": 0}


def test_digests_of_parquet(tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    world = World(tmp_path, kms)
    world.src.mkdir()
    local.create_key(kms, "column")
    for name in ("touched", "other"):
        pq.write_table(pa.table({"n": range(9), "secret": range(9)}), world.src / name, compression="none")
    options: dict[str, Any] = {"format": "parquet", "column_keys": {"secret": "column"}, "checksum": True}
    world.encrypt(**options).raise_for_failures()
    os.utime(world.src / "touched", ns=(1, 1))
    data = (world.src / "other").read_bytes()
    world.change("other", data.replace((7).to_bytes(8, "little"), (8).to_bytes(8, "little"), 1))
    monkeypatch.setattr("ags_fast.jobs.work.parquet.same_as_source", pytest.fail)
    done = world.encrypt(overwrite=True, **options)
    assert (row_of(done, "touched").error_class, row_of(done, "other").status) == ("Unchanged", "ok")
    local.set_state(kms, "column", "disabled")
    clear_cache()
    with pytest.raises(KeyAccessError, match="disabled"):  # who may not open the column cannot try values
        world.encrypt(overwrite=True, **options)


def test_a_source_that_changes_beside_its_digest(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is of the bytes that were encrypted, or the file fails."""
    (world.src / "new").write_bytes(b"1" * 100)
    checksum = dispatch._checksum  # noqa: SLF001 (one whole write between two steps)

    def late(*args: Any, **options: Any) -> bytes:
        world.change("new", b"2" * 101)
        return checksum(*args, **options)

    monkeypatch.setattr(dispatch, "_checksum", late)
    result = world.encrypt(checksum=True, engine=LocalEngine(0))
    assert row_of(result, "new").error_class == "SourceChangedError"


def test_a_version_that_expires_during_a_comparison(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gone with its version is no changed source: one whole rekey and expiry between plan and comparison."""
    (world.src / "large").chmod(0o600)
    verified = run.verified

    def late(*args: Any, **options: Any) -> Any:
        rekey_files(world.url, kms=world.kms, **QUIET).raise_for_failures()
        expire(world.url, kms=world.kms, keep=1)
        return verified(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(run, "verified", late)
        with pytest.raises(ExpiredError, match="cannot be compared with its source"):
            world.encrypt()
    assert world.encrypt().counts == {"ok": 0, "skipped": 4, "failed": 0}


@pytest.mark.timeout(20)
def test_a_source_that_grows_for_ever_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Growing(io.BytesIO):
        size = 100

        def readinto(self, buffer: Any) -> int:
            return len(buffer)

        def changed(self) -> bool:
            return True

    context, digest = Access.of(world.url, world.kms).open(), hashlib.sha256()
    with monkeypatch.context() as patched:
        patched.setattr(Store, "open_once", lambda *_: Growing())
        outside = Context(
            "compare", "", context.entry.dataset_id, context.log.store, context.envelope, Store(world.src)
        )
        assert outside.digest_outside("a", digest) == hashlib.sha256(bytes(101)).digest()
