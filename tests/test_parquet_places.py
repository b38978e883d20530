"""Where Parquet files are: URLs wherever a path is taken, and what a trusted place says of a file."""

from __future__ import annotations

import functools
import io
import os
import zipfile
from typing import TYPE_CHECKING, Any

import fsspec
import parquet_peers as peers
import pytest
from parquet_files import KF, data_of, key, rich

from ags_fast import FormatError, IntegrityError, PolicyError, cli, parquet
from ags_fast.cli.codes import EXIT_USAGE
from ags_fast.keys import StandardKeyMetadata
from ags_fast.parquet import Keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from servers import S3Server

pa, pq = peers.pa, peers.pq
KEYS, NEW = Keys(KF), Keys(key("new"))


# ---------------------------------------------------------------- URLs


def check_every_function(
    folder: str, read: Callable[[str], bytes], write: Callable[[str, bytes], object], **options: Any
) -> list[str]:
    """All of them, from the folder and to it. Returns the names that they wrote."""
    plain = rich()
    write("plain", plain)
    report = parquet.encrypt_file(f"{folder}/plain", f"{folder}/sealed", KEYS, **options)
    assert report.file_length == len(read("sealed"))
    assert parquet.inspect(f"{folder}/sealed", **options)["footer"] == "encrypted"
    assert parquet.verify(f"{folder}/sealed", KEYS, **options).columns[0].authenticated
    for same_size in (False, True):
        old, new = (NEW, KEYS) if same_size else (KEYS, NEW)
        parquet.reencrypt_file(f"{folder}/sealed", f"{folder}/sealed", old, new, same_size=same_size, **options)
        parquet.verify(read("sealed"), new)
    parquet.decrypt_file(f"{folder}/sealed", f"{folder}/back", KEYS, check_crc=False, **options)
    assert pq.read_table(io.BytesIO(read("back"))) == pq.read_table(io.BytesIO(plain))
    with parquet.open_plain(f"{folder}/sealed", KEYS, threads=2, **options) as view:
        assert pq.read_table(view) == pq.read_table(io.BytesIO(plain))
    parquet.write_table(pq.read_table(io.BytesIO(plain)), f"{folder}/written", KEYS, **options)
    assert pq.read_table(parquet.open_plain(read("written"), KEYS)) == pq.read_table(io.BytesIO(plain))

    # What fails leaves what was there, and nothing where nothing was.
    before = read("sealed")
    for name in ("sealed", "never"):
        with pytest.raises(IntegrityError):
            parquet.decrypt_file(f"{folder}/sealed", f"{folder}/{name}", NEW, **options)
        damaged = bytearray(before)
        damaged[len(damaged) // 2] ^= 1
        with pytest.raises(IntegrityError):
            parquet.decrypt_file(damaged, f"{folder}/{name}", KEYS, check_crc=False, **options)
    assert read("sealed") == before
    for call in (parquet.verify, parquet.open_plain):
        with pytest.raises(FileNotFoundError):
            call(f"{folder}/nowhere", KEYS, **options)
    return ["back", "plain", "sealed", "written"]


@pytest.mark.parametrize("folder", ["", "/deep/folder"])
def test_memory(folder: str) -> None:
    folder = f"memory://places-{os.getpid()}{folder}"
    memory = fsspec.filesystem("memory")
    names = check_every_function(
        folder,
        lambda name: memory.cat_file(f"{folder}/{name}"),
        lambda name, data: memory.pipe_file(f"{folder}/{name}", data),
    )
    assert sorted(one["name"].rpartition("/")[2] for one in memory.ls(folder) if one["type"] == "file") == names


def test_memory_without_a_folder() -> None:
    url = f"memory://places-{os.getpid()}.parquet"
    parquet.encrypt_file(rich(), url, KEYS)
    parquet.verify(url, KEYS)
    assert fsspec.filesystem("memory").exists(url)


def test_s3(moto_s3: S3Server) -> None:
    pytest.importorskip("s3fs")
    bucket, client = f"places-{os.urandom(8).hex()}", moto_s3.client()
    client.create_bucket(Bucket=bucket)
    names = check_every_function(
        f"s3://{bucket}/a",
        lambda name: client.get_object(Bucket=bucket, Key=f"a/{name}")["Body"].read(),
        lambda name, data: client.put_object(Bucket=bucket, Key=f"a/{name}", Body=data),
        storage_options=moto_s3.options(),
    )
    found = [one["Key"].removeprefix("a/") for one in client.list_objects_v2(Bucket=bucket)["Contents"]]
    assert sorted(found) == names
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)
    for nowhere in (f"s3://{bucket}", f"s3://{bucket}/a/"):
        with pytest.raises(ValueError, match="not the path of a file"):
            parquet.verify(nowhere, KEYS, storage_options=moto_s3.options())


def test_file_urls(tmp_path: Path) -> None:
    (tmp_path / ".sealed.crc").write_bytes(b"of the file that was there before")
    check_every_function(
        f"file://{tmp_path}",
        lambda name: (tmp_path / name).read_bytes(),
        lambda name, data: (tmp_path / name).write_bytes(data),
    )
    assert sorted(os.listdir(tmp_path)) == ["back", "plain", "sealed", "written"]
    assert (tmp_path / "back").stat().st_mode & 0o777 == (tmp_path / "sealed").stat().st_mode & 0o777


def test_urls_through_others(tmp_path: Path) -> None:
    sealed = bytearray()
    parquet.encrypt_file(rich(), sealed, KEYS)
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("in/a.parquet", sealed)
        archive.writestr("a.parquet", sealed)
    (tmp_path / "a.parquet").write_bytes(sealed)
    for url in (
        f"zip://in/a.parquet::file://{tmp_path}/z.zip",
        f"zip://a.parquet::file://{tmp_path}/z.zip",
        f"simplecache::file://{tmp_path}/a.parquet",
    ):
        assert parquet.verify(url, KEYS).file_length == len(sealed)


def test_a_store_that_shows_parts_is_refused() -> None:
    from fsspec import AbstractFileSystem
    from fsspec.implementations.memory import MemoryFileSystem

    class Plain(MemoryFileSystem):
        protocol = "plain"
        mv = AbstractFileSystem.mv

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(super()._strip_protocol(path.removeprefix("plain:/")))

    fsspec.register_implementation("plain", Plain, clobber=True)
    for call in (
        functools.partial(parquet.encrypt_file, rich()),
        functools.partial(parquet.write_table, pa.table({"a": [1]})),
    ):
        with pytest.raises(PolicyError, match="rename files or discard an upload"):
            call("plain://folder/a.parquet", KEYS)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kf").write_bytes(KF)
    (tmp_path / "kf").chmod(0o600)
    memory, folder = fsspec.filesystem("memory"), f"memory://commands-{os.getpid()}"
    memory.pipe_file(f"{folder}/a.parquet", rich())
    url, keys = f"{folder}/a.enc.parquet", ["--footer-key-file", "kf"]

    def run(*args: str) -> int:
        return cli.main(["parquet", *args])

    assert run("encrypt", f"{folder}/a.parquet", *keys) == 0  # beside it
    assert run("encrypt", f"{folder}/a.parquet", *keys) == EXIT_USAGE
    assert "exists" in capsys.readouterr().err
    assert run("encrypt", f"{folder}/a.parquet", *keys, "--overwrite", "-o", f"{folder}/sealed/") == 0  # in a folder
    parquet.verify(f"{folder}/sealed/a.parquet", KEYS)
    for operation in ("inspect", "verify"):
        assert run(operation, url, *(keys if operation == "verify" else [])) == 0
    assert run("reencrypt", url, *keys, "--new-footer-key-file", "kf", "-o", url, "--overwrite") == 0
    assert run("decrypt", url, *keys, "-o", "here.parquet") == 0
    assert run("decrypt", url, *keys, "-o", f"{folder}/back") == 0
    assert data_of((tmp_path / "here.parquet").read_bytes()) == data_of(memory.cat_file(f"{folder}/back"))
    assert run("verify", f"{folder}/nowhere.parquet", *keys) != 0
    err = capsys.readouterr().err
    assert "nowhere.parquet" in err
    assert "Traceback" not in err


# ---------------------------------------------------------------- key metadata and length


def iceberg(prefix: bytes | None = b"table/file") -> tuple[bytes, Any]:
    """A file as Iceberg's writers make it: one key, and a prefix that is not in it."""
    sealed = bytearray()
    parquet.encrypt_file(rich(), sealed, KEYS, aad_prefix=prefix, store_aad_prefix=False)
    return bytes(sealed), pq.read_table(io.BytesIO(rich()))


@pytest.mark.parametrize("prefix", [b"table/file", None])
@pytest.mark.parametrize("source", ["bytes", "path", "file", "url"])
def test_key_metadata(tmp_path: Path, prefix: bytes | None, source: str) -> None:
    sealed, table = iceberg(prefix)
    url = f"memory://metadata-{os.getpid()}/{prefix!r}"

    def src(data: bytes) -> Any:
        (tmp_path / "a").write_bytes(data)
        fsspec.filesystem("memory").pipe_file(url, data)
        return {"bytes": data, "path": tmp_path / "a", "file": io.BytesIO(data), "url": url}[source]

    known, unknown = (StandardKeyMetadata(KF, prefix, length) for length in (len(sealed), None))
    for metadata in (known, unknown, known.encode(), unknown.encode()):
        for options in ({}, {"length": len(sealed)}, {"aad_prefix": prefix}):
            with parquet.open_plain(src(sealed), key_metadata=metadata, **options) as view:
                assert pq.read_table(view) == table

    # A stored length that is not the file's.
    for data in (sealed[:-1], sealed + b"\0", sealed + sealed):
        with pytest.raises(IntegrityError, match=f"has {len(data)} bytes, not {len(sealed)}"):
            parquet.open_plain(src(data), key_metadata=known)
    for length in (len(sealed) - 1, len(sealed) + 1, 0):
        with pytest.raises(IntegrityError, match=f"should have {length} bytes, but {len(sealed)}"):
            parquet.open_plain(src(sealed), key_metadata=known, length=length)
        with pytest.raises(IntegrityError):
            parquet.open_plain(src(sealed), key_metadata=StandardKeyMetadata(KF, prefix, length))

    # What follows the length is never read: not even a whole file that somebody has appended.
    for metadata in (known, unknown):
        with parquet.open_plain(src(sealed + b"PAR1"), key_metadata=metadata, length=len(sealed)) as view:
            assert pq.read_table(view) == table
    with parquet.open_plain(src(sealed + sealed), KEYS, length=len(sealed), aad_prefix=prefix) as view:
        assert pq.read_table(view) == table
    with pytest.raises(IntegrityError, match=f"has {len(sealed)} bytes, not {len(sealed) + 1}"):
        parquet.open_plain(src(sealed), KEYS, length=len(sealed) + 1, aad_prefix=prefix)


def test_key_metadata_or_keys() -> None:
    sealed, _ = iceberg()
    metadata = StandardKeyMetadata(KF, b"table/file", len(sealed))
    with pytest.raises(ValueError, match="give one of them"):
        parquet.open_plain(sealed, KEYS, key_metadata=metadata)
    with pytest.raises(TypeError, match="keys or key_metadata is required"):
        parquet.open_plain(sealed)
    with pytest.raises(TypeError, match="keys or key_metadata is required"):
        parquet.open_plain(sealed, length=len(sealed))
    with pytest.raises(ValueError, match="aad_prefix is not the one"):
        parquet.open_plain(sealed, key_metadata=metadata, aad_prefix=b"another")
    with pytest.raises(ValueError, match="length is a number of bytes"):
        parquet.open_plain(sealed, KEYS, length=-1)
    for broken in (b"", b"\2" + metadata.encode()[1:]):
        with pytest.raises(FormatError):
            parquet.open_plain(sealed, key_metadata=broken)
    with pytest.raises(PolicyError, match="prefix"):  # the file wants one, the metadata has none
        parquet.open_plain(sealed, key_metadata=StandardKeyMetadata(KF))
    with pytest.raises(IntegrityError):
        parquet.open_plain(sealed, key_metadata=StandardKeyMetadata(key("x"), b"table/file"))
