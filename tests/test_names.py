"""Odd names on every kind of source: each name that the source listed has a row, and what is taken comes back."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, QUIET, decrypted, encrypt, make_kms, read_tree, write_tree
from parquet_files import rich

from ags_fast import Dataset, PolicyError
from ags_fast.fs import Store
from ags_fast.jobs import decrypt_files, encrypt_files, rekey_files, remove_files, sweep, verify_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from servers import S3Server

# Names that a dataset can have, in a bucket; and those that it cannot.
FINE = {
    "plain": b"1",
    "sp ace/+%2F?&#=~": b"2",
    "quote'\"<>&amp;\\": b"3",
    "ünï/日本/\U0001f600": b"4",
    "a\tb\x01\x7f\r\x1bc": b"5",
    "new\nline": b"13",
    "trailing ./x../y...": b"6",
    "deep/" * 40 + "x": b"7",
    "é" * 120 + "/" + "w" * 250: b"8",
    "n" * 1000: b"9",
    "C:\\x|*": b"10",
    "-rf": b"11",
    "both.d/x": b"12",
}
ODD = {
    "/leading": b"a",
    "mid//dle": b"b",
    "./dot": b"c",
    "x/../up": b"d",
    "..": b"e",
    "ends/": b"f",
    "ends//": b"g",
    "plain/below": b"h",
}
MARKS = ["mark/", "sp ace/"]  # of folders: names that end in a slash and have no content


@pytest.fixture(scope="module")
def kms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_kms(tmp_path_factory.mktemp("kms"))


def check(
    source: Store, kms: Any, tmp_path: Path, fine: Mapping[str, bytes], odd: set[str], marks: set[str], **engine: Any
) -> None:
    """A job's rows account for all names, later jobs go on, and the dataset has what it could take."""
    options = {"storage_options": source.storage_options, **engine}
    dataset = tmp_path / "dataset"
    made = encrypt(source.url, dataset, kms, fsync=False, **options)
    rows = {(row.status, source.path_in(row.src), row.error_class) for row in made.rows}
    assert rows == {
        *(("ok", path, None) for path in fine),
        *(("failed", path, "PolicyError") for path in odd),
        *(("skipped", path, "EmptyFolder") for path in marks),
    }
    assert decrypted(dataset, kms) == dict(fine)
    for done in (
        verify_files(dataset, kms=kms, **{**QUIET, **engine}),
        rekey_files(dataset, kms=kms, **{**QUIET, **engine}),
        sweep(dataset, kms=kms),
    ):
        done.raise_for_failures()
    again = encrypt(source.url, dataset, kms, fsync=False, **options)
    assert again.counts == {"ok": 0, "skipped": len(fine) + len(marks), "failed": len(odd)}
    shutil.rmtree(dataset)


def check_bucket(
    source: Store, pipe: Callable[[str, bytes], object], kms: Any, tmp_path: Path, *, cannot: Callable[[str], bool]
) -> None:
    """As `check`, for a store that takes any names but those that the test's server cannot have."""
    fine, odd = ({path: data for path, data in one.items() if not cannot(path)} for one in (FINE, ODD))
    for path, data in {**fine, **odd, **dict.fromkeys(MARKS, b"")}.items():
        pipe(path, data)
    check(source, kms, tmp_path, fine, set(odd), set(MARKS))
    # As a destination the store has them all back; here a name of 1,000 bytes is a row that fails.
    options = {**QUIET, "kms": kms, "storage_options": source.storage_options}
    encrypt_files(source.url, tmp_path / "two", wrapping_key_id=MASTER, **options)
    back = Store(f"{source.url}/back", source.storage_options)
    done = decrypt_files(tmp_path / "two", back.url, **options)
    done.raise_for_failures()
    assert {entry.path: back.read_small(entry.path, 100) for entry in back.list()} == fine
    here = decrypt_files(tmp_path / "two", tmp_path / "out", kms=kms, **QUIET)
    failed = {row.dst.removeprefix(f"{tmp_path}/out/") for row in here.failed if row.dst}
    assert failed == {path for path in fine if any(len(os.fsencode(part)) > 255 for part in path.split("/"))}
    assert {entry.path for entry in Store(tmp_path / "out").list()} == fine.keys() - failed


def test_s3(kms: dict[str, str], tmp_path: Path, moto_s3: S3Server) -> None:
    bucket, client = f"names-{os.urandom(8).hex()}", moto_s3.client()
    client.create_bucket(Bucket=bucket)
    store = Store(f"s3://{bucket}/a b", moto_s3.options())

    def pipe(path: str, data: bytes) -> None:
        client.put_object(Bucket=bucket, Key=f"a b/{path}", Body=data)

    check_bucket(store, pipe, kms, tmp_path, cannot=lambda path: "\n" in path)  # moto's, of these


def test_memory(kms: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    monkeypatch.setattr(type(memory), "store", {})
    memory.pipe("/made", b"")

    def pipe(path: str, data: bytes) -> None:
        memory.store[f"/a/{path}"] = file = memory.store["/made"].__class__(memory, f"/a/{path}", data)
        file.commit()

    check_bucket(Store("memory://a"), pipe, kms, tmp_path, cannot=lambda path: path == "plain/below")


@pytest.mark.more
@pytest.mark.timeout(900)  # the first time, a server has to be built
def test_gcs(kms: dict[str, str], tmp_path: Path, fake_gcs: str) -> None:
    pytest.importorskip("gcsfs")
    bucket = f"names-{os.urandom(8).hex()}"
    store: Any = Store(f"gs://{bucket}/a b", {"endpoint_url": fake_gcs, "token": "anon", "project": "test"})
    headers = {"Content-Type": "application/json"}
    store.call("POST", "b", data=json.dumps({"name": bucket}).encode(), headers=headers)

    def pipe(path: str, data: bytes) -> None:
        query = {"uploadType": "media", "name": f"a b/{path}", "data": data}
        store.call("POST", f"{fake_gcs}/upload/storage/v1/b/{bucket}/o", **query)

    check_bucket(store, pipe, kms, tmp_path, cannot=lambda path: False)


@pytest.mark.more
@pytest.mark.timeout(900)
def test_azure(kms: dict[str, str], tmp_path: Path, azurite: dict[str, str]) -> None:
    pytest.importorskip("adlfs")
    store: Any = Store(f"az://names-{os.urandom(8).hex()}/a b", azurite)
    store.submit("create_container").result()

    def pipe(path: str, data: bytes) -> None:
        store.run(store.blob("upload_blob", path, data)).result()

    def cannot(path: str) -> bool:
        """Azure has no backslash. Azurite refuses dots (signatures) and control characters (listings)."""
        return not path.isprintable() or "\\" in path or path[:1] == "." or "/." in path

    check_bucket(store, pipe, kms, tmp_path, cannot=cannot)
    with pytest.raises(PolicyError):
        store.write_small("a\\b", b"x")


def test_here(kms: dict[str, str], tmp_path: Path) -> None:
    """A local disk has no such odd names, but names that are not UTF-8 and that are as long as names can be."""
    names = [
        b"\xff\xfe/\x80",
        b"\xc3",
        "\u00e9".encode() * 127,
        b"w" * 255,
        b"\x01\n\r\x1b[31m",
        b"a\\b ",
        b"-rf",
        b"~",
    ]
    for name in names:
        path = os.path.join(os.fsencode(tmp_path), b"src", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(name)
    fine = {os.fsdecode(name): name for name in names}
    check(Store(tmp_path / "src"), kms, tmp_path, fine, set(), set())


@pytest.mark.more
@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.parametrize("locale", ["UTF-8", "ASCII"])
def test_spark(
    kms: dict[str, str], tmp_path: Path, moto_s3: S3Server, local_spark: Any, locale: str, request: Any
) -> None:
    """Executors have a locale of their own: names are the same in each."""
    from ags_fast.spark import SparkEngine

    session = local_spark.session()
    if locale == "ASCII":
        environment = session.sparkContext.environment
        before = dict(environment)
        request.addfinalizer(lambda: (environment.clear(), environment.update(before)))
        environment.update(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
        found = session.range(1).rdd.map(lambda _: __import__("sys").getfilesystemencoding()).collect()
        assert found == ["ascii"]
    engine = SparkEngine(session)
    bucket, client = f"names-{os.urandom(8).hex()}", moto_s3.client()
    client.create_bucket(Bucket=bucket)
    fine = {path: data for path, data in FINE.items() if "\n" not in path}  # moto's listings cannot
    for path, data in {**fine, **ODD, **dict.fromkeys(MARKS, b"")}.items():
        client.put_object(Bucket=bucket, Key=f"a b/{path}", Body=data)
    store = Store(f"s3://{bucket}/a b", moto_s3.options())
    here = tmp_path / "bucket"
    long = {path for path in fine if any(len(os.fsencode(part)) > 200 for part in path.split("/"))}
    check(store, kms, here, fine, set(ODD), set(MARKS), engine=engine)
    back = decrypt_files(_made(store, kms, tmp_path), tmp_path / "out", kms=kms, progress=False, engine=engine)
    failed = {row.dst.removeprefix(f"{tmp_path}/out/") for row in back.failed if row.dst}
    assert failed <= long
    assert read_tree(tmp_path / "out") == {path: data for path, data in fine.items() if path not in failed}


def _made(store: Store, kms: Any, tmp_path: Path) -> Path:
    encrypt(store.url, tmp_path / "made", kms, storage_options=store.storage_options)
    return tmp_path / "made"


def test_names_that_the_target_cannot_have(kms: dict[str, str], tmp_path: Path, moto_s3: S3Server) -> None:
    """Names of an object store are UTF-8: another one is a row that fails, in the dataset and of a decryption."""
    (tmp_path / "src").mkdir()
    for name in (b"good", b"latin-\xe9"):
        with open(os.path.join(os.fsencode(tmp_path), b"src", name), "wb") as file:
            file.write(b"x")
    moto_s3.client().create_bucket(Bucket=(bucket := f"names-{os.urandom(8).hex()}"))
    options = {**QUIET, "kms": kms, "storage_options": moto_s3.options()}
    made = encrypt_files(tmp_path / "src", f"s3://{bucket}/ds", wrapping_key_id=MASTER, **options)
    assert made.counts == {"ok": 1, "skipped": 0, "failed": 1}
    assert [row.src for row in made.failed] == [f"{tmp_path}/src/latin-\udce9"]
    verify_files(f"s3://{bucket}/ds", **options).raise_for_failures()
    assert [
        file.path for file in Dataset.open(f"s3://{bucket}/ds", kms=kms, storage_options=moto_s3.options()).files()
    ] == ["good"]
    encrypt(tmp_path / "src", tmp_path / "ds", kms).raise_for_failures()
    done = decrypt_files(tmp_path / "ds", f"s3://{bucket}/out", **options)
    assert done.counts == {"ok": 1, "skipped": 0, "failed": 1}


# ---------------------------------------------------------------- names that are patterns, too

MAGIC = {"a[1].csv": b"1", "a1.csv": b"2", "*": b"3", "b?/x": b"4", "bc/x": b"5"}


@pytest.mark.parametrize("name", ["a[1].csv", "*", "b?/x"])
def test_an_exact_name_wins_over_a_pattern(kms: dict[str, str], tmp_path: Path, name: str) -> None:
    src = write_tree(tmp_path / "src", MAGIC)
    for way, left in (("include", {name}), ("exclude", MAGIC.keys() - {name})):
        encrypt(src, tmp_path / way, kms, **{way: name})
        assert decrypted(tmp_path / way, kms).keys() == left
    encrypt(src, tmp_path / "ds", kms)
    dataset = Dataset.open(tmp_path / "ds", kms=kms)
    assert [file.path for file in dataset.files(name)] == [name]
    done = decrypt_files(tmp_path / "ds", tmp_path / "out", kms=kms, paths=name, **QUIET)
    assert read_tree(tmp_path / "out") == {name: MAGIC[name]}
    assert done.counts["ok"] == 1
    gone = remove_files(tmp_path / "ds", name, kms=kms)
    assert [row.src for row in gone.rows] == [row.src for row in done.rows]
    assert decrypted(tmp_path / "ds", kms).keys() == MAGIC.keys() - {name}


def test_folders_whose_names_are_patterns(kms: dict[str, str], tmp_path: Path) -> None:
    src = write_tree(tmp_path / "src", MAGIC)
    encrypt(src, tmp_path / "ds", kms, include="b?")
    assert decrypted(tmp_path / "ds", kms) == {"b?/x": b"4"}
    encrypt(src, tmp_path / "two", kms, include="a?.csv")  # no such name: a pattern
    assert decrypted(tmp_path / "two", kms) == {"a1.csv": b"2"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_checksums_that_are_restored_or_somebodys_own(kms: dict[str, str], tmp_path: Path, overwrite: bool) -> None:
    """Only the checksum of a file that is replaced goes, and not if the dataset has another one."""
    pytest.importorskip("pyarrow")
    plain = {f"{above}{name}.parquet": rich() for above in ("", "in/") for name in ("a", "b")}
    src = write_tree(tmp_path / "src", {**plain, ".a.parquet.crc": b"crc\0of a", "in/.a.parquet.crc": b"crc\0of in/a"})
    done = encrypt(src, tmp_path / "ds", kms, format="parquet", include="*.parquet")
    done.raise_for_failures()
    encrypt(src, tmp_path / "ds", kms, hidden=True, include="*.crc").raise_for_failures()
    out = write_tree(tmp_path / "out", {".b.parquet.crc": b"own"})
    if overwrite:
        write_tree(
            out, {"a.parquet": b"before", "in/b.parquet": b"before", "in/.b.parquet.crc": b"crc\0of what was there"}
        )
    decrypt_files(tmp_path / "ds", out, kms=kms, overwrite=overwrite, **QUIET).raise_for_failures()
    checksums = {path: data for path, data in read_tree(out).items() if path.endswith(".crc")}
    assert checksums == {".a.parquet.crc": b"crc\0of a", "in/.a.parquet.crc": b"crc\0of in/a", ".b.parquet.crc": b"own"}
