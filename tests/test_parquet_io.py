"""Where ags_fast.parquet reads from and writes to: paths, files, pipes; and what is left after a failure."""

from __future__ import annotations

import io
import os
import threading
from typing import TYPE_CHECKING, Any

import parquet_files as files
import parquet_peers as peers
import pme_reference as ref
import pytest
from parquet_files import (
    COLUMNS,
    FOUR,
    KF,
    RICH_LEAVES,
    UNIFORM,
    Mode,
    data_of,
    reference,
    rich,
    seal,
    unseal,
)
from programs import parquets
from support import Source, Target, program, run_python

from ags_fast import FormatError, IntegrityError, parquet
from ags_fast.parquet import Keys

if TYPE_CHECKING:
    from pathlib import Path

pa, pq = peers.pa, peers.pq


def test_sources_and_targets(tmp_path: Path) -> None:
    """Paths, bytes and files, in any combination, give the same."""
    plain, mode = rich(), COLUMNS
    keys = mode.keys(RICH_LEAVES)
    path = files.write(tmp_path / "plain", plain)
    sealed = files.write(tmp_path / "sealed", seal(plain, mode))
    data = sealed.read_bytes()
    sources: list[Any] = [str(sealed), sealed, memoryview(data), bytearray(data), Source(data)]
    for number, source in enumerate(sources):
        for threads in (1, 2):
            out = tmp_path / f"out{number}{threads}"
            parquet.decrypt_file(source, out, keys, threads=threads)
            assert data_of(out.read_bytes()) == data_of(plain)
            assert parquet.verify(source, keys, threads=threads).columns
            assert parquet.inspect(source)["footer"] == "encrypted"
    with sealed.open("rb") as file, sealed.open("rb", buffering=0) as raw:
        for source in (file, raw, io.BytesIO(sealed.read_bytes())):
            taken = bytearray(b"what was there")
            parquet.decrypt_file(source, taken, keys)
            assert data_of(bytes(taken)) == data_of(plain)
    for target in (io.BytesIO(), Target(), Target(lambda data, before: min(len(data), 7))):
        parquet.encrypt_file(path, target, keys, threads=1)
        written = bytes(target.getvalue() if isinstance(target, io.BytesIO) else target.taken)
        assert data_of(unseal(written, mode, RICH_LEAVES)) == data_of(plain)
        assert not target.closed
    impossible: list[Any] = [5, None, "", bytes(3)]
    for wrong in impossible:
        with pytest.raises((TypeError, OSError)):
            parquet.encrypt_file(path, wrong, keys)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_pipe(threads: int) -> None:
    plain, mode = rich(), FOUR[1]
    read, write = os.pipe()
    taken: list[bytes] = []

    def drain() -> None:
        with os.fdopen(read, "rb") as file:
            taken.append(file.read())

    reader = threading.Thread(target=drain)
    reader.start()
    with os.fdopen(write, "wb") as file:
        assert not file.seekable()
        report = parquet.encrypt_file(plain, file, mode.keys(RICH_LEAVES), threads=threads, **mode.options)
    reader.join()
    assert report.file_length == len(taken[0])
    assert data_of(unseal(taken[0], mode, RICH_LEAVES)) == data_of(plain)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("how", ["raises", "takes none", "raises once"])
def test_a_target_that_fails(how: str, threads: int, plain_files: dict[str, bytes]) -> None:
    """What failed is told, however it goes on; nothing is written behind the gap."""
    plain = plain_files["20 row groups"]
    keys = UNIFORM.keys([])
    whole = len(seal(plain, UNIFORM, [("id",), ("text",)]))
    for limit in (0, 4, 1000, whole - 300, whole - 8):
        failed: list[int] = []

        def take(data: bytes, before: int, limit: int = limit, failed: list[int] = failed) -> int:
            if before + len(data) <= limit or (failed and how == "raises once"):
                return len(data)
            failed.append(before)
            if how == "takes none":
                return 0
            raise OSError(28, "No space left on device")

        target = Target(take)
        with pytest.raises(OSError, match="reports 0 of" if how == "takes none" else "No space left"):
            parquet.encrypt_file(plain, target, keys, threads=threads)
        assert len(target.taken) <= limit


def test_a_target_that_is_there_stays_if_it_fails(tmp_path: Path) -> None:
    plain = rich()
    sealed = seal(plain, UNIFORM)
    file = reference(sealed, UNIFORM, RICH_LEAVES)
    last = [module for module in file.modules() if module.kind == ref.BLOOM_BITSET][-1]
    damaged = file.flip(last)
    out = files.write(tmp_path / "out", b"what was there")
    with pytest.raises(IntegrityError):
        parquet.decrypt_file(damaged, out, UNIFORM.keys([]))
    assert out.read_bytes() == b"what was there"
    assert os.listdir(tmp_path) == ["out"]
    taken = bytearray(b"something")
    with pytest.raises(IntegrityError):
        parquet.decrypt_file(damaged, taken, UNIFORM.keys([]))
    assert taken == b""


def test_a_source_is_replaced_when_the_new_one_is_complete(tmp_path: Path) -> None:
    plain, mode, turned = rich(), COLUMNS, Mode(columns="columns", generation="second")
    for same_size in (False, True):
        path = files.write(tmp_path / f"file{same_size}", seal(plain, mode))
        path.chmod(0o640)
        with path.open("rb") as before:
            parquet.reencrypt_file(
                path, path, mode.keys(RICH_LEAVES), turned.keys(RICH_LEAVES), same_size=same_size, allow_ctr=mode.ctr
            )
            assert os.fstat(before.fileno()).st_ino != path.stat().st_ino
            assert data_of(unseal(before.read(), mode, RICH_LEAVES)) == data_of(plain)  # a reader keeps the old one
        back = unseal(path, turned, RICH_LEAVES)
        assert pq.read_table(pa.BufferReader(back)).equals(pq.read_table(pa.BufferReader(plain)))
        assert path.stat().st_mode & 0o777 == 0o640
    path = files.write(tmp_path / "file", plain)
    parquet.encrypt_file(path, path, mode.keys(RICH_LEAVES))
    parquet.decrypt_file(path, path, mode.keys(RICH_LEAVES), allow_ctr=mode.ctr)
    assert data_of(path.read_bytes()) == data_of(plain)
    assert sorted(os.listdir(tmp_path)) == ["file", "fileFalse", "fileTrue"]


def test_hadoops_checksum_beside_a_target_is_removed(tmp_path: Path) -> None:
    sidecar = files.write(tmp_path / ".out.crc", b"crc")
    report = parquet.encrypt_file(rich(), tmp_path / "out", Keys(KF))
    assert not sidecar.exists()
    assert any(str(sidecar) in warning for warning in report.warnings)


def test_hadoops_checksum_elsewhere_is_left(tmp_path: Path) -> None:
    """The folder becomes a link to another one meanwhile: that is not where the file is made."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    files.write(folder / ".out.crc", b"crc")
    theirs = files.write(other / ".out.crc", b"crc")

    def progress(nbytes: int) -> None:
        if not folder.is_symlink():
            folder.rename(tmp_path / "moved")
            folder.symlink_to(other)

    parquet.encrypt_file(rich(), folder / "out", Keys(KF), progress=progress)
    assert theirs.exists()
    assert os.listdir(other) == [".out.crc"]
    assert os.listdir(tmp_path / "moved") == ["out"]


def test_a_source_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    plain = rich()
    sealed = seal(plain, COLUMNS)
    for call, data in ((parquet.encrypt_file, plain), (parquet.decrypt_file, sealed)):
        state = {"reads": 0, "size": len(data) // 2}

        def answer(offset: int, right: bytes, state: dict[str, int] = state) -> bytes:
            state["reads"] += 1
            return right if state["reads"] <= 2 else right[: max(0, state["size"] - offset)]

        with pytest.raises((IntegrityError, FormatError, OSError)):
            call(Source(data, answer), tmp_path / "out", COLUMNS.keys(RICH_LEAVES), threads=1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("op", ["encrypt", "decrypt", "verify"])
def test_a_path_that_is_cut_while_it_is_read(tmp_path: Path, op: str) -> None:
    """No SIGBUS, no half a file."""
    table = pa.table({name: pa.array([os.urandom(10_000) for _ in range(200)]) for name in "abc"})
    for threads in (1, 2):
        path = tmp_path / "file"
        pq.write_table(table, path, use_dictionary=False, row_group_size=100)
        if op != "encrypt":
            parquet.encrypt_file(path, path, Keys(KF))
        out = run_python(program(parquets.cut_while_reading, path, op, threads))
        assert "cut" in out, out
        assert "['file']" in out, out


def test_a_full_disk(tmp_path: Path, plain_files: dict[str, bytes]) -> None:
    import errno

    plain = plain_files["large page"]
    files.write(tmp_path / "file", plain)
    before = seal(plain, UNIFORM, [("bytes",)])
    sealed = files.write(tmp_path / "file.sealed", before)
    assert UNIFORM.footer != KF
    parquet.reencrypt_file(sealed, sealed, UNIFORM.keys([]), Keys(KF))
    before = sealed.read_bytes()
    for limit, threads in ((4, 2), (1_000_000, 1), (1_000_000, 2), (len(plain) - 100, 2)):
        out = run_python(program(parquets.fill_up, tmp_path / "file", limit, threads)).split("\n")
        assert out[:4] == [str(errno.EFBIG)] * 4
        assert out[4] == "['file', 'file.sealed']"
    assert sealed.read_bytes() == before
