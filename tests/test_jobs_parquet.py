"""Datasets of Parquet files: encrypted as such, a data key for each file and one for each named column."""

from __future__ import annotations

import base64
import itertools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import pme_reference
import programs.jobs
import programs.parquets
import pytest
from datasets import HERE, MASTER, leftovers, object_of, read_tree, row_of, version_of, write_tree
from datasets import rows_of as entries_of
from parquet_corpus import CORPUS, check_equal, flat, parquets, rows
from parquet_peers import rows_of
from second_reader import SecondReader
from shares import rest_in_more
from support import flip, program, python_env, run_python, seal_stream

import ags_fast.jobs.work.parquet
from ags_fast import IntegrityError, KeyAccessError, cli, parquet
from ags_fast.dataset.files.parquet import parquet_keys
from ags_fast.dataset.names import object_name
from ags_fast.fs import Store
from ags_fast.jobs import (
    LocalEngine,
    copy_file,
    decrypt_files,
    encrypt_files,
    open_file,
    rekey_files,
    sweep,
    verify_files,
)
from ags_fast.jobs.work.context import Context
from ags_fast.keys.cache import clear_cache
from ags_fast.keys.kms import load_kms, set_audit_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers import S3Server

    from ags_fast.jobs import JobResult

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COLUMNS = {"text": "hr", "number": "finance"}
CANARY = "a longer text that compresses"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree in partitions, as Spark and its like leave it."""
    folder = tmp_path_factory.mktemp("tables")
    for n, part in enumerate(("year=2025/part-0", "year=2026/part-0", "year=2026/month=1/part-1", "größe/x.snappy")):
        path = folder / f"{part}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(flat(400, seed=n), path, row_group_size=150, compression="none", write_page_index=n % 2 == 0)
    write_tree(folder, {"_SUCCESS": b"", "year=2025/.part-0.parquet.crc": b"crc", "_metadata": b"PAR1"})
    return folder


@pytest.fixture
def src(tables: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tables, tmp_path / "src"))


def encrypt(src: Any, dataset: Any, kms: Any, **options: Any) -> JobResult:
    return datasets.encrypt(src, dataset, kms, **{"format": "parquet", **options})


def plans(dataset: Path) -> list[Path]:
    return list(dataset.glob("_ags/plans/*/plan"))


def context_of(dataset: Any, kms: Any) -> Context:
    log, entry = version_of(dataset, kms)
    return Context("verify", "", entry.dataset_id, log.store, log.envelope(entry).subset(entry.keys))


def masters_of(dataset: Any, kms: Any) -> dict[str, str]:
    """The master keys that wrap the KEKs of the newest version."""
    return {key_id: key.wrapping_key_id for key_id, key in version_of(dataset, kms).entry.keys.items()}


def check_round_trip(src: Path, dataset: Path, kms: Any, out: Path, **options: Any) -> None:
    result = decrypt_files(dataset, out, kms=kms, **{"engine": HERE, "fsync": False, "progress": False, **options})
    result.raise_for_failures()
    check_equal(src, out)
    shutil.rmtree(out)


@pytest.fixture
def asked() -> Iterator[list[str]]:
    """The master keys of each KMS call, as the audit has them."""
    calls: list[str] = []
    set_audit_hook(lambda call: calls.append(call["wrapping_key_id"]))
    yield calls
    set_audit_hook(None)


# ---------------------------------------------------------------------------------------------- there and back again


@pytest.mark.parametrize(
    ("processes", "double_wrap"), rest_in_more([(0, True), (0, False), (2, True)], (0, False), (2, True))
)
def test_round_trip(
    src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path, processes: int, double_wrap: bool
) -> None:
    common: dict[str, Any] = {"kms": kms, "engine": LocalEngine(processes), "progress": False}
    done = encrypt(src, dataset, **common, column_keys=COLUMNS, double_wrap=double_wrap, verify_after=True)
    assert done.counts == {"ok": 4, "skipped": 3, "failed": 0}, done.failed
    row = row_of(done, "year=2026/part-0.parquet")
    path = object_of(dataset, kms, "year=2026/part-0.parquet")
    assert row[1:4] == ("year=2026/part-0.parquet", "ok", None)
    assert row.source_length == os.path.getsize(src / "year=2026/part-0.parquet")
    with open_file(dataset, "year=2026/part-0.parquet", kms=kms) as view:  # what a listing says is what reading gives
        assert row[5:9] == (len(view.read()), os.path.getsize(path), None, "parquet")
    assert row.key_id
    for entry in entries_of(dataset, kms).values():
        assert entry.block_size == 0
        assert entry.file_length == os.path.getsize(dataset / entry.file)
        assert {key["column"] for key in entry.column_keys or ()} == COLUMNS.keys()
    assert not any(CANARY.encode() in data for data in read_tree(dataset).values())

    assert encrypt(src, dataset, **common).counts == {"ok": 0, "skipped": 7, "failed": 0}
    checked = verify_files(dataset, **common)
    assert checked.counts == {"ok": 4, "skipped": 0, "failed": 0}, checked.rows
    check_round_trip(src, dataset, kms, tmp_path / "out", engine=common["engine"])
    turned = rekey_files(dataset, **common)
    assert turned.counts["ok"] == 4, turned.failed
    assert turned.version == 3, turned.failed
    assert verify_files(dataset, **common).counts == checked.counts
    for version in (2, 3):
        check_round_trip(src, dataset, kms, tmp_path / "out", engine=common["engine"], version=version)
    assert leftovers(dataset, kms) == []


def test_the_corpus(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    """Whatever a Parquet file has in it."""
    src = tmp_path / "src"
    src.mkdir()
    for n, (name, make) in enumerate(CORPUS.items()):
        make(src / f"{n:02} {name}.parquet")
    encrypt(src, dataset, kms).raise_for_failures()
    rekey_files(dataset, kms=kms, engine=HERE, progress=False, verify_after=True).raise_for_failures()
    for version in (2, 3):
        verify_files(dataset, kms=kms, engine=HERE, progress=False, version=version).raise_for_failures()
        check_round_trip(src, dataset, kms, tmp_path / "out", version=version)


def test_in_memory(src: Path, kms: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    name = f"memory://{tmp_path.name}"
    source = Store(f"{name}/src")
    for path, file in parquets(src).items():
        source.create_exclusive(path, file.read_bytes())
    encrypt(f"{name}/src", f"{name}/ds", kms, column_keys=COLUMNS).raise_for_failures()
    verify_files(f"{name}/ds", kms=kms, progress=False).raise_for_failures()
    rekey_files(f"{name}/ds", kms=kms, progress=False).raise_for_failures()
    decrypt_files(f"{name}/ds", f"{name}/out", kms=kms, progress=False).raise_for_failures()
    out = Store(f"{name}/out")
    write_tree(tmp_path / "out", {entry.path: out.read_small(entry.path, 1 << 30) for entry in out.list()})
    check_equal(src, tmp_path / "out")
    again = decrypt_files(f"{name}/ds", f"{name}/out", kms=kms, progress=False, resume="length")
    assert again.counts == {"ok": 0, "skipped": 4, "failed": 0}


def test_in_s3(src: Path, kms: dict[str, str], tmp_path: Path, moto_s3: S3Server) -> None:
    """From S3 to S3 and back, and read where it is."""
    pytest.importorskip("s3fs")
    bucket = f"bucket-{os.urandom(8).hex()}"
    moto_s3.client().create_bucket(Bucket=bucket)
    shared: dict[str, Any] = {"kms": kms, "storage_options": moto_s3.options(), "engine": HERE, "progress": False}
    source = Store(f"s3://{bucket}/src", moto_s3.options())
    shutil.rmtree(src / "year=2026")  # two files are left: this server is slow
    for path, file in parquets(src).items():
        source.create_exclusive(path, file.read_bytes())
    source.create_exclusive("x.csv", b"1,2")
    url = f"s3://{bucket}/ds"
    done = encrypt(source.url, url, **shared, column_keys=COLUMNS, verify_after=True)
    assert done.counts == {"ok": 2, "skipped": 0, "failed": 1}
    assert done.failed[0].error_class == "FormatError"
    assert rekey_files(url, paths="year*", **shared).counts["ok"] == 1
    decrypt_files(url, tmp_path / "out", **shared).raise_for_failures()
    check_equal(src, tmp_path / "out")
    name, file = parquets(src).popitem()
    with open_file(url, name, kms=kms, storage_options=moto_s3.options()) as view:
        assert rows_of(pq.ParquetFile(view).read()) == rows(file)
    source.delete("x.csv")
    encrypt(source.url, url, **shared, delete_sources=True).raise_for_failures()  # the bytes were compared
    assert list(source.list()) == []


def test_arguments(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    for wrong in (
        {"format": "zip"},
        {"format": "ags1", "column_keys": COLUMNS},
        {"column_keys": {"": MASTER}},
        {"column_keys": {"a\0b": MASTER}},
        {"column_keys": {"a": ""}},
    ):
        with pytest.raises(ValueError, match=r"format|column|key id"):
            encrypt(src, dataset, kms, **wrong)
    with pytest.raises(TypeError, match="dotted"):
        encrypt(src, dataset, kms, column_keys={("a", "b"): MASTER})
    with pytest.raises(KeyAccessError, match="'nobody'"):
        encrypt(src, dataset, kms, column_keys={"text": "nobody"})
    assert not parquets(dataset)
    assert not plans(dataset)
    with pytest.raises(ValueError, match="missing"):
        decrypt_files(dataset, src.parent / "out", kms=kms, missing="hide")  # type: ignore[arg-type]


def test_dry_run(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    done = encrypt(src, dataset, kms, dry_run=True, column_keys=COLUMNS)
    planned = [row for row in done.rows if row.status == "planned"]
    assert len(planned) == 4
    assert not dataset.exists()
    assert {(row.file_length, row.block_size, row.format) for row in planned} == {(None, None, "parquet")}


def test_names() -> None:
    for path, marks, name in (
        ("a/x.parquet", (), "a/x.parquet"),
        ("a/x.snappy.parquet", ("job", 1), "a/x.snappy.job.1.parquet"),
        ("part-0", ("job",), "part-0.job"),
        ("part-0", (), "part-0"),
        ("x.a suffix too long to be one", ("job",), "x.a suffix too long to be one.job"),
    ):
        assert object_name(path, *marks, format="parquet") == name
    long = "f/" + "ü" * 120 + ".parquet"  # 248 bytes
    assert object_name(long, format="parquet") == long
    short = object_name(long, "20260101T000000-0123456789ab", format="parquet")
    assert len(os.fsencode(short.removeprefix("f/"))) <= 255
    assert short.endswith(".20260101T000000-0123456789ab.parquet")


# ---------------------------------------------------------------------------------------------- files that differ


def test_files_that_are_not_to_be_encrypted(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    keys = parquet.Keys(b"k" * 16)
    plain = src / "year=2025/part-0.parquet"
    parquet.encrypt_file(plain, src / "sealed.parquet", keys)
    parquet.encrypt_file(plain, src / "signed.parquet", keys, plaintext_footer=True)
    write_tree(
        src,
        {
            "stream.parquet": seal_stream(b"x" * 100),
            "table.csv": b"a,b\n1,2\n",
            "empty.parquet": b"",
            "cut.parquet": plain.read_bytes()[:-20],
            "damaged.parquet": b"PAR1" + bytes(100) + plain.read_bytes()[104:],
        },
    )
    pq.write_table(pa.table({"id": [1]}), src / "narrow.parquet")
    done = encrypt(src, dataset, kms, column_keys={"text": "hr"})
    found = {Path(row.src).name: (row.status, row.error_class) for row in done.rows if row.status != "ok"}
    assert found == {
        "_SUCCESS": ("skipped", "HiddenFile"),
        "_metadata": ("skipped", "HiddenFile"),
        ".part-0.parquet.crc": ("skipped", "HiddenFile"),
        "sealed.parquet": ("skipped", "AlreadyEncryptedError"),
        "signed.parquet": ("skipped", "AlreadyEncryptedError"),
        "stream.parquet": ("skipped", "AlreadyEncryptedError"),
        "table.csv": ("failed", "FormatError"),
        "empty.parquet": ("failed", "FormatError"),
        "cut.parquet": ("failed", "FormatError"),
        "damaged.parquet": ("failed", "FormatError"),
        "narrow.parquet": ("failed", "ValueError"),
    }
    assert "format='ags1'" in (row_of(done, "table.csv").error or "")
    assert "format='ags1'" not in (row_of(done, "damaged.parquet").error or "")
    assert "no column 'text'" in (row_of(done, "narrow.parquet").error or "")
    assert done.version == 2
    assert done.counts["ok"] == 4
    assert leftovers(dataset, kms) == []

    # As the row says: another format takes what is left, and leaves what is there.
    for name in ("sealed.parquet", "signed.parquet", "narrow.parquet"):
        (src / name).unlink()
    rest = encrypt(src, dataset, kms, format="ags1")
    assert {Path(row.src).name for row in rest.rows if row.status == "ok"} == {
        "table.csv",
        "empty.parquet",
        "cut.parquet",
        "damaged.parquet",
    }
    assert verify_files(dataset, kms=kms, engine=HERE).counts == {"ok": 8, "skipped": 0, "failed": 0}
    turned = rekey_files(dataset, kms=kms, engine=HERE)
    assert turned.counts["ok"] == 8
    decrypt_files(dataset, tmp_path / "out", kms=kms, engine=HERE).raise_for_failures()
    assert (tmp_path / "out" / "table.csv").read_bytes() == b"a,b\n1,2\n"
    assert rows(tmp_path / "out" / "year=2025/part-0.parquet") == rows(plain)


def test_a_source_that_changes(
    src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the plan and the first byte, and between the first byte and the last: it is not in the dataset."""
    paths = sorted(parquets(src).values())
    real = ags_fast.jobs.work.parquet.encrypt_file  # type: ignore[attr-defined]

    class Late:
        def run(self, *args: Any) -> None:
            pq.write_table(flat(10), paths[0])
            HERE.run(*args)

    def changing(plain: Any, new: Any, *args: Any, **options: Any) -> Any:
        if os.fspath(plain) == str(paths[1]):
            report = real(plain, bytearray(), *args, **options)
            os.utime(plain, ns=(1, 1))
            assert report.file_length
        if os.fspath(plain) == str(paths[2]):
            Path(plain).write_bytes(b"PAR1")  # and so it fails
        return real(plain, new, *args, **options)

    monkeypatch.setattr(ags_fast.jobs.work.parquet, "encrypt_file", changing)
    done = encrypt(src, dataset, kms, engine=Late())
    assert {row.src: row.error_class for row in done.failed} == dict.fromkeys(map(str, paths[:3]), "SourceChangedError")
    assert done.counts["ok"] == 1
    assert leftovers(dataset, kms) == []
    monkeypatch.undo()
    pq.write_table(flat(20), paths[2])
    encrypt(src, dataset, kms).raise_for_failures()
    check_round_trip(src, dataset, kms, tmp_path / "out")
    pq.write_table(flat(30), paths[2])
    with pytest.raises(FileExistsError, match="overwrite"):
        encrypt(src, dataset, kms)
    encrypt(src, dataset, kms, overwrite=True, column_keys=COLUMNS).raise_for_failures()
    check_round_trip(src, dataset, kms, tmp_path / "out")


def test_numbered_sets(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    keys = parquet.Keys(b"k" * 16)
    parquet.encrypt_file(src / "year=2025/part-0.parquet", src / "a.parquet", keys, plaintext_footer=True)
    done = encrypt(src, dataset, kms, aad_prefix="t.part{n}", column_keys=COLUMNS)
    assert row_of(done, "/a.parquet".lstrip("/")).error_class == "AlreadyEncryptedError"  # and has no number
    done.raise_for_failures()
    found = entries_of(dataset, kms)
    assert sorted(entry.aad_prefix for entry in found.values()) == [b"t.part%d" % n for n in range(4)]
    rekey_files(dataset, kms=kms, engine=HERE, paths="year*", progress=False).raise_for_failures()
    assert verify_files(dataset, kms=kms, engine=HERE).counts["failed"] == 0
    assert parquet.inspect(object_of(dataset, kms, "größe/x.snappy.parquet"))["aad_prefix_required"] is True
    (src / "b.csv").write_text("no Parquet")
    held = encrypt(src, dataset, kms, aad_prefix="u.part{n}", on_error="row")
    assert [row.error_class for row in held.failed] == ["FormatError"]
    assert held.version == 3
    assert leftovers(dataset, kms) != []
    assert plans(dataset)
    (src / "b.csv").unlink()
    encrypt(src, dataset, kms, aad_prefix="u.part{n}", resume="length").raise_for_failures()
    assert leftovers(dataset, kms) == []


# ---------------------------------------------------------------------------------------------- keys


def test_a_column_has_a_key_of_its_own(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    encrypt(src, dataset, kms, column_keys=COLUMNS, dek_length=32).raise_for_failures()
    context = context_of(dataset, kms)
    deks = set()
    for entry in entries_of(dataset, kms).values():
        (_, wrapped, bound), *columns = entry.wraps(context.dataset_id)
        footer = context.envelope.unwrap(entry.key_id, wrapped, bound)
        own = [context.envelope.unwrap(*wrap) for wrap in columns]
        deks.update([footer, *own])
        path = dataset / entry.file
        with_all = pme_reference.ParquetFile(
            path, footer, dict(zip(COLUMNS, own, strict=True)), aad_prefix=entry.aad_prefix
        )
        with_footer = pme_reference.ParquetFile(path, footer, {}, aad_prefix=entry.aad_prefix)
        seen = [{chunk.path for chunk in file.chunks()} for file in (with_all, with_footer)]
        assert {path[0] for path in seen[0] - seen[1]} == COLUMNS.keys()
        for other in own:
            with pytest.raises(IntegrityError, match="footer"):
                parquet.verify(path, parquet.Keys(other), aad_prefix=entry.aad_prefix)
        with pytest.raises(KeyAccessError):
            parquet.decrypt_file(path, bytearray(), parquet.Keys(footer), aad_prefix=entry.aad_prefix)
        for name in COLUMNS:  # nor with each other's
            wrong = parquet.Keys(footer, {column: own[1 - i] for i, column in enumerate(COLUMNS)})
            with pytest.raises(IntegrityError) as caught:
                parquet.verify(path, wrong, aad_prefix=entry.aad_prefix)
            assert caught.value.column in COLUMNS, name
    assert len(deks) == 4 * 3
    assert {len(dek) for dek in deks} == {32}
    masters = masters_of(dataset, kms)
    assert {
        (key["column"], masters[key["key_id"]])
        for e in entries_of(dataset, kms).values()
        for key in e.column_keys or ()
    } == set(COLUMNS.items())


def test_kms_calls(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path, asked: list[str]) -> None:
    """Double wrap: one call a process for each master key. Single wrap: one for each data key. And one for each key
    that is new, to try its wrap."""
    encrypt(src, dataset, kms, column_keys={**COLUMNS, "id": MASTER}).raise_for_failures()
    assert sorted(asked) == ["finance", "finance", "hr", "hr", MASTER, MASTER]
    for job in (
        lambda: verify_files(dataset, kms=kms, engine=HERE, progress=False),
        lambda: rekey_files(dataset, kms=kms, engine=HERE, progress=False, verify_after=True),
        lambda: decrypt_files(dataset, tmp_path / "out", kms=kms, engine=HERE, progress=False),
    ):
        clear_cache()
        asked.clear()
        job().raise_for_failures()
        assert sorted(asked) == ["finance", "hr", MASTER]

    asked.clear()
    encrypt(src, tmp_path / "single", kms, column_keys=COLUMNS, double_wrap=False).raise_for_failures()
    # Wrapped by the planner, which tries one, and unwrapped by the worker.
    assert [asked.count(key) for key in COLUMNS.values()] == [9, 9]
    asked.clear()
    verify_files(tmp_path / "single", kms=kms, engine=HERE, progress=False).raise_for_failures()
    assert [asked.count(key) for key in COLUMNS.values()] == [4, 4]


def test_each_worker_asks_once(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    counted = {**kms, "encryption.kms-impl": "kms_clients:Counting", "log": str(tmp_path / "log")}
    del counted["encryption.kms-type"]
    encrypt(src, dataset, kms, column_keys=COLUMNS).raise_for_failures()
    run_python(program(programs.jobs.run, "verify_files", dataset, kms=counted))
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == len(set(lines))
    assert len({line.split()[0] for line in lines}) >= 2
    assert {line.split()[1] for line in lines} == {MASTER, "hr", "finance"}


def allowed(kms: dict[str, str], *keys: str) -> dict[str, str]:
    """The KMS of somebody who may use only these master keys."""
    return {**kms, "encryption.allowed-key-ids": ",".join(keys)}


def test_who_may_not_use_a_columns_master_key(
    src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path, asked: list[str]
) -> None:
    encrypt(src, dataset, kms, column_keys=COLUMNS).raise_for_failures()
    some = allowed(kms, MASTER, "hr")
    common: dict[str, Any] = {"kms": some, "engine": HERE, "progress": False}
    for result in (verify_files(dataset, **common), decrypt_files(dataset, tmp_path / "out", **common)):
        assert {row.error_class for row in result.failed} == {"KeyAccessError"}
        assert len(result.failed) == 4
        assert "column 'number'" in (result.failed[0].error or "")
    assert not parquets(tmp_path / "out")
    with pytest.raises(KeyAccessError, match="finance"):
        rekey_files(dataset, **common)
    with pytest.raises(KeyAccessError, match="finance"):
        encrypt(src, tmp_path / "other", some, column_keys=COLUMNS)

    dropped = decrypt_files(dataset, tmp_path / "out", missing="drop", **common)
    assert dropped.counts == {"ok": 4, "skipped": 0, "failed": 0}
    assert {(row.error_class, row.error) for row in dropped.rows} == {
        ("ColumnsDropped", "without number: the KMS refuses their keys")
    }
    for name, path in parquets(src).items():
        assert rows(tmp_path / "out" / name) == rows_of(pq.ParquetFile(path).read().drop_columns(["number"]))
    again = decrypt_files(dataset, tmp_path / "out", missing="drop", resume="verify", **common)
    assert {row.error_class for row in again.rows} == {"AlreadyThere"}
    whole = decrypt_files(dataset, tmp_path / "out", kms=kms, engine=HERE, resume="length")
    assert whole.counts["ok"] == 4  # what is there lacks a column, and is replaced
    check_equal(src, tmp_path / "out")

    # Nobody needs a column's master key to read the rest, or to add to it: nothing else is sealed with its keys.
    pq.write_table(flat(5), src / "new.parquet")
    encrypt(src, dataset, allowed(kms, MASTER)).raise_for_failures()
    checked = verify_files(dataset, paths="new*", kms=allowed(kms, MASTER), engine=HERE)
    assert checked.counts["ok"] == 1
    clear_cache()
    asked.clear()
    decrypt_files(dataset, tmp_path / "out", paths="new*", kms=kms, engine=HERE).raise_for_failures()
    assert set(asked) == {MASTER}


def test_columns_under_the_master_key_of_a_newer_key(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    """A key for columns, though newer, is never taken for files."""
    encrypt(src, dataset, kms, column_keys={"text": "hr"}).raise_for_failures()
    encrypt_files(
        write_tree(src.parent / "more", {"x": b"1"}), dataset, kms=kms, wrapping_key_id="hr", engine=HERE
    ).raise_for_failures()
    keys = sorted(version_of(dataset, kms).entry.keys.values(), key=lambda key: key.created_ms)
    assert [(key.wrapping_key_id, dict(key.properties).get("use")) for key in keys] == [
        (MASTER, None),
        ("hr", "columns"),
        ("hr", None),
    ]
    assert entries_of(dataset, kms)["x"].key_id == keys[2].key_id
    rekey_files(dataset, kms=kms, engine=HERE, wrapping_key_id=MASTER).raise_for_failures()
    for entry in entries_of(dataset, kms).values():
        assert entry.key_id == keys[0].key_id
    verify_files(dataset, kms=kms, engine=HERE).raise_for_failures()


def test_bindings(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    """A wrapped key opens for its dataset, its file and its column, and for nothing else."""
    encrypt(src, dataset, kms, column_keys={"text": "hr", "number": "hr"}).raise_for_failures()
    one, other = itertools.islice(entries_of(dataset, kms).values(), 2)
    context = context_of(dataset, kms)
    text, number = (key["wrapped_dek"] for key in one.column_keys or ())
    theirs = (other.column_keys or ())[0]["wrapped_dek"]
    assert ags_fast.jobs.work.parquet._check(context, one) == one.file_length
    for columns in ((number, text), (theirs, number), (one.wrapped_dek, number)):
        key_ids = [key_id for key_id, _, _ in one.wraps(context.dataset_id)]
        wraps = list(zip(key_ids, (one.wrapped_dek, *columns), strict=True))
        with pytest.raises(IntegrityError, match="wrapped"):
            ags_fast.jobs.work.parquet._check(context, one.with_wraps(wraps))
    with pytest.raises(IntegrityError, match="wrapped"):
        context.envelope.unwrap((one.column_keys or ())[0]["key_id"], text, one.wraps(context.dataset_id)[0][2])
    stranger = Context("verify", "", "another", context.dataset, context.envelope)
    with pytest.raises(IntegrityError, match="wrapped"):
        ags_fast.jobs.work.parquet._check(stranger, one)


def test_keys_are_nowhere(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    done = encrypt(src, dataset, kms, column_keys=COLUMNS)
    context = context_of(dataset, kms)
    deks = [
        context.envelope.unwrap(*wrap)
        for e in entries_of(dataset, kms).values()
        for wrap in e.wraps(context.dataset_id)
    ]
    tree = b"".join(read_tree(dataset).values())
    told = pickle.dumps(context) + repr(done.rows).encode() + repr(context).encode() + tree
    for dek in deks:
        assert dek not in told
        assert dek.hex().encode() not in told
        assert base64.b64encode(dek) not in told
    told_in_file = parquet.inspect(object_of(dataset, kms, "year=2025/part-0.parquet"))["footer_key_metadata"]
    assert context.dataset_id in str(told_in_file)


# ---------------------------------------------------------------------------------------------- rekey


def test_rekey(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    encrypt(src, dataset, kms, column_keys={"text": "hr"}).raise_for_failures()
    before = entries_of(dataset, kms)
    old_files = {name: (dataset / entry.file).read_bytes() for name, entry in before.items()}
    done = rekey_files(dataset, kms=kms, engine=HERE, paths="year=2026/*", dek_length=24, wrapping_key_id="finance")
    done.raise_for_failures()
    assert done.counts["ok"] == 2
    after = entries_of(dataset, kms)
    context = context_of(dataset, kms)
    masters = masters_of(dataset, kms)
    for name, old in before.items():
        new = after[name]
        if not name.startswith("year=2026/"):
            assert new == old
            continue
        assert masters[new.key_id] == "finance"
        assert masters[(new.column_keys or ())[0]["key_id"]] == "hr"
        assert new.file != old.file
        assert new.file.endswith(".parquet")
        assert new.aad_prefix != old.aad_prefix
        assert (new.plain_length, new.source_length, new.stamp) == (old.plain_length, old.source_length, old.stamp)
        deks = [{context.envelope.unwrap(*wrap) for wrap in entry.wraps(context.dataset_id)} for entry in (old, new)]
        assert deks[0].isdisjoint(deks[1])
        assert {len(dek) for dek in deks[1]} == {24}
        for swapped in (old._replace(file_length=0, wrapped_dek=new.wrapped_dek), new._replace(file=old.file)):
            with pytest.raises(IntegrityError):
                ags_fast.jobs.work.parquet._check(context, swapped)
    assert {name: (dataset / entry.file).read_bytes() for name, entry in before.items()} == old_files
    for version in (2, 3):
        check_round_trip(src, dataset, kms, tmp_path / "out", version=version)


# ---------------------------------------------------------------------------------------------- damage


def test_damage(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    encrypt(src, dataset, kms, column_keys=COLUMNS).raise_for_failures()
    paths = sorted(entries_of(dataset, kms))
    pages, footer, cut, gone = (object_of(dataset, kms, path) for path in paths)
    data = pages.read_bytes()
    pages.write_bytes(flip(data, 8 * 100))
    footer.write_bytes(flip(footer.read_bytes(), 8 * (os.path.getsize(footer) - 100)))
    os.truncate(cut, os.path.getsize(cut) - 1)
    gone.unlink()
    write_tree(dataset, {"stranger.parquet": data})
    for job in (
        lambda: verify_files(dataset, kms=kms, engine=HERE),
        lambda: decrypt_files(dataset, tmp_path / "out", kms=kms, engine=HERE),
        lambda: rekey_files(dataset, kms=kms, engine=HERE),
    ):
        result = job()
        found = {row.src: row for row in result.failed}
        assert sorted(found) == paths
        assert {row.error_class for row in result.failed} == {"IntegrityError"}
        errors = [found[path].error or "" for path in paths]
        assert "row group 0" in errors[0]
        assert "page" in errors[0]
        assert "footer" in errors[1]
        assert "bytes, its manifest says" in errors[2]
        assert "is missing" in errors[3]
        extra = [Path(row.src).name for row in result.rows if row.error_class == "ExtraFile"]
        assert extra == (["stranger.parquet"] if result.op == "verify" else [])
    assert not parquets(tmp_path / "out")
    assert entries_of(dataset, kms) == entries_of(dataset, kms, 2)


def test_another_file_in_its_place(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    for path in parquets(src).values():  # all of one size
        pq.write_table(flat(400, seed=1), path, compression="none")
    encrypt(src, dataset, kms, column_keys={"text": "hr"}, aad_prefix="t.{n}").raise_for_failures()
    one, other, third, fourth = sorted(parquets(dataset).values())
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    plain = parquets(src).popitem()[1].read_bytes()
    third.write_bytes(plain)  # as it was before encryption
    signed = bytearray()
    parquet.encrypt_file(plain, signed, parquet.Keys(b"k" * 16), plaintext_footer=True)
    fourth.write_bytes(signed)
    checked = verify_files(dataset, kms=kms, engine=HERE)
    assert {row.error_class for row in checked.failed} == {"IntegrityError"}
    assert len(checked.failed) == 4
    names = {dataset / entry.file: entry.path for entry in entries_of(dataset, kms).values()}
    for path, what in ((one, other), (other, one)):
        error = row_of(checked, names[path]).error or ""
        assert error.startswith("swapped: ")
        assert f"what belongs to {names[what]}" in error
    # If they had the right size, they would be looked at.
    context = context_of(dataset, kms)
    for entry in entries_of(dataset, kms).values():
        if (dataset / entry.file) in (third, fourth):
            with pytest.raises(IntegrityError, match=r"is not what was written|footer"):
                ags_fast.jobs.work.parquet._check(context, entry._replace(file_length=0))


def test_pages_keep_their_tags(src: Path, dataset: Path, tmp_path: Path, kms: dict[str, str]) -> None:
    """A file that is made to say that its pages have no tags is not what was written."""
    encrypt(src, dataset, kms).raise_for_failures()
    path = min(parquets(dataset).values())
    sealed = path.read_bytes()
    at = len(sealed) - 8 - int.from_bytes(sealed[-8:-4], "little")
    assert sealed[at : at + 2] == b"\x1c\x1c"  # FileCryptoMetaData, and the union in it
    path.write_bytes(sealed[: at + 1] + b"\x2c" + sealed[at + 2 :])
    for result in (
        verify_files(dataset, kms=kms, engine=HERE),
        decrypt_files(dataset, tmp_path / "out", kms=kms, engine=HERE),
        rekey_files(dataset, kms=kms, engine=HERE),
    ):
        (row,) = result.failed
        assert row.error_class == "IntegrityError"
        assert "AES_GCM_CTR_V1" in (row.error or "")


def test_levels_keep_their_tags(tmp_path: Path, dataset: Path, kms: dict[str, str]) -> None:
    """Jobs never write V2 pages whose levels have no tag: a file that has some is not what was written."""
    src = tmp_path / "v2"
    src.mkdir()
    pq.write_table(pa.table({"a": [1, None, 3, None]}), src / "a.parquet", data_page_version="2.0")
    encrypt(src, dataset, kms).raise_for_failures()
    (entry,) = entries_of(dataset, kms).values()
    keys, path = parquet_keys(context_of(dataset, kms).contents, entry), dataset / entry.file
    parquet.reencrypt_file(path, path, keys, keys, aad_prefix=entry.aad_prefix, v2_layout="parquet-java")
    assert path.stat().st_size == entry.file_length
    for result in (
        verify_files(dataset, kms=kms, engine=HERE),
        decrypt_files(dataset, tmp_path / "out", kms=kms, engine=HERE),
        rekey_files(dataset, kms=kms, engine=HERE),
    ):
        (row,) = result.failed
        assert row.error_class == "IntegrityError"
        assert "levels outside" in (row.error or "")
    with open_file(dataset, "a.parquet", kms=kms) as view, pytest.raises(IntegrityError, match="levels outside"):
        pq.read_table(view)


@pytest.mark.parametrize("op", ["encrypt", "rekey"])
def test_verify_after(src: Path, dataset: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """What storage makes of a file does not count, if it is another one."""
    if op == "rekey":
        encrypt(src, dataset, kms).raise_for_failures()
    name = {"encrypt": "encrypt_file", "rekey": "reencrypt_file"}[op]
    real = getattr(ags_fast.jobs.work.parquet, name)

    def spoilt(plain: Any, new: Any, *args: Any, **options: Any) -> Any:
        report = real(plain, new, *args, **options)
        if "month=1" in new.path:
            Path(new.path).write_bytes(flip(Path(new.path).read_bytes(), 8 * 100))
        return report

    monkeypatch.setattr(ags_fast.jobs.work.parquet, name, spoilt)
    options: dict[str, Any] = {"verify_after": True, "progress": False, "engine": HERE}
    done = rekey_files(dataset, kms=kms, **options) if op == "rekey" else encrypt(src, dataset, kms, **options)
    assert [row.error_class for row in done.failed] == ["IntegrityError"]
    assert done.counts["ok"] == 3
    assert verify_files(dataset, kms=kms, engine=HERE).counts["failed"] == 0


# ---------------------------------------------------------------------------------------------- resume


class StopError(Exception):
    pass


def stop_after(count: int) -> Callable[[list[Any]], None]:
    seen: list[Any] = []

    def report(more: list[Any]) -> None:
        seen.extend(more)
        if len(seen) >= count:
            raise StopError

    return report


@pytest.mark.parametrize("resume", ["length", "verify"])
@pytest.mark.parametrize("op", ["encrypt", "rekey"])
def test_resume(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path, op: str, resume: str) -> None:
    """What was finished is left as it is, if it is what was planned."""
    if op == "rekey":
        encrypt(src, dataset, kms, column_keys=COLUMNS).raise_for_failures()

    def job(**options: Any) -> JobResult:
        if op == "rekey":
            return rekey_files(dataset, kms=kms, engine=HERE, **{"progress": False, **options})
        return encrypt(src, dataset, kms, column_keys=COLUMNS, **options)

    before = set(parquets(dataset))
    with pytest.raises(StopError):
        job(progress=stop_after(3))
    made = sorted(dataset / name for name in parquets(dataset).keys() - before)
    assert len(made) == 3
    made[0].write_bytes(b"")  # in the place of a finished file
    other = made[1].read_bytes()
    made[1].write_bytes(flip(other, 8 * 100) if resume == "verify" else made[2].read_bytes())
    kept = made[2].stat()
    done = job(resume=resume)
    done.raise_for_failures()
    assert done.counts["ok"] == 4
    assert (made[2].stat().st_ino, made[2].stat().st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)
    assert leftovers(dataset, kms) == []
    assert not plans(dataset)
    verify_files(dataset, kms=kms, engine=HERE).raise_for_failures()
    check_round_trip(src, dataset, kms, tmp_path / "out")


def test_resume_after_a_change(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    """A source that has changed, and columns under other master keys, are planned anew, with new keys."""
    for columns in ({"text": "finance"}, {"text": "hr", "number": "hr"}, None, {"text": "hr"}):
        with pytest.raises(StopError):
            encrypt(src, dataset, kms, column_keys={"text": "hr"}, progress=stop_after(3))
        pq.write_table(flat(50), src / "year=2025/part-0.parquet")
        encrypt(src, dataset, kms, column_keys=columns, resume="length").raise_for_failures()
        masters = masters_of(dataset, kms)
        for entry in entries_of(dataset, kms).values():
            assert {k["column"]: masters[k["key_id"]] for k in entry.column_keys or ()} == (columns or {})
        verify_files(dataset, kms=kms, engine=HERE).raise_for_failures()
        check_round_trip(src, dataset, kms, tmp_path / "out")
        assert leftovers(dataset, kms) == []
        shutil.rmtree(dataset)


def test_decrypt_again(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    encrypt(src, dataset, kms, column_keys=COLUMNS).raise_for_failures()
    out = tmp_path / "out"
    common: dict[str, Any] = {"kms": kms, "engine": HERE, "progress": False}
    decrypt_files(dataset, out, **common).raise_for_failures()
    assert {row.error_class for row in decrypt_files(dataset, out, **common).failed} == {"FileExistsError"}
    one, other, third, _ = sorted(parquets(out).values())
    data = one.read_bytes()
    one.write_bytes(flip(data, 8 * 500))  # as long as it was
    other.write_bytes(other.read_bytes() + b"x")
    third.write_bytes(third.read_bytes()[:-1])
    done = decrypt_files(dataset, out, resume="length", **common)
    assert done.counts == {"ok": 3, "skipped": 1, "failed": 0}
    assert one.read_bytes() == data
    check_equal(src, out)
    sidecar = one.with_name(f".{one.name}.crc")
    sidecar.write_bytes(b"crc of what was there")
    assert decrypt_files(dataset, out, overwrite=True, **common).counts["ok"] == 4
    assert not sidecar.exists()
    check_equal(src, out)
    assert oct(one.stat().st_mode & 0o777) == oct(other.stat().st_mode & 0o777)


@pytest.mark.parametrize("op", rest_in_more(["encrypt", "rekey"], "encrypt"))
@pytest.mark.timeout(300)
def test_killed(tmp_path: Path, kms: dict[str, str], op: str) -> None:
    """At steps that touch storage; whoever takes up the job finishes it, and leaves nothing behind."""
    stride = 8 if op == "encrypt" else 7  # other steps in each run
    begin = int.from_bytes(os.urandom(1)) % stride
    killed = program(programs.parquets.kill_parquet_job_at_steps, tmp_path, op, kms, begin, stride)
    steps = run_python(killed, timeout=280)
    assert int(steps) > 15


# ---------------------------------------------------------------------------------------------- sources that go


def test_delete_sources(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    kept = Path(shutil.copytree(src, tmp_path / "kept"))
    encrypt(src, dataset, kms, column_keys=COLUMNS, delete_sources=True).raise_for_failures()
    assert not parquets(src)
    check_round_trip(kept, dataset, kms, tmp_path / "out")


def test_delete_sources_of_an_earlier_run(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    """It died before it deleted them. Since that may be long ago, what the dataset has is compared with them."""
    encrypt(src, dataset, kms, column_keys=COLUMNS).raise_for_failures()
    rekey_files(dataset, kms=kms, engine=HERE).raise_for_failures()
    changed = src / "year=2025/part-0.parquet"
    there = changed.stat()
    table = pq.ParquetFile(changed).read()
    place = table.schema.get_field_index("id")
    other = table.set_column(place, table.schema.field("id"), pa.array(range(1, 401), pa.int64()))
    pq.write_table(other, changed, row_group_size=150, compression="none", write_page_index=True)
    assert changed.stat().st_size == there.st_size
    os.utime(changed, ns=(there.st_atime_ns, there.st_mtime_ns))
    done = encrypt(src, dataset, kms, delete_sources=True, ignore_ctime=True)
    assert [row.error_class for row in done.failed] == ["SourceChangedError"]
    assert list(parquets(src)) == ["year=2025/part-0.parquet"]


# ---------------------------------------------------------------------------------------------- readers


class SecondParquetReader(SecondReader):
    def file(self, row: dict[str, Any]) -> bytes:
        raise NotImplementedError

    def table_of(self, row: dict[str, Any]) -> pme_reference.ParquetFile:
        """As docs/dataset-format.md has it."""
        name = row["file"]
        path = Path(os.fsdecode(os.path.join(bytes(self.folder), name)))
        assert path.stat().st_size == row["file_length"]
        assert row["format"] == "parquet"
        assert row["block_size"] == 0
        footer = self.unwrap(row["key_id"], row["wrapped_dek"], self.binding(b"dek", name))
        columns = {
            column: self.unwrap(key_id, wrapped, self.binding(b"column:" + column.encode(), name))
            for column, key_id, wrapped in row["column_keys"]
        }
        return pme_reference.ParquetFile(path, footer, columns, aad_prefix=row["aad_prefix"])


@pytest.mark.parametrize("double_wrap", [True, False])
def test_second_reader(src: Path, dataset: Path, kms: dict[str, str], double_wrap: bool) -> None:
    encrypt(src, dataset, kms, column_keys=COLUMNS, double_wrap=double_wrap).raise_for_failures()
    for _ in range(2):
        reader = SecondParquetReader(dataset, load_kms(kms))
        entries = reader.rows()
        assert len(entries) == 4
        assert sum(ref["nbytes"] for ref in reader.head["files"]) == sum(row["source_length"] for row in entries)
        for row in entries:
            assert row["source_length"] == os.path.getsize(src / os.fsdecode(row["path"]))
            opened = reader.table_of(row)
            plain = pq.ParquetFile(src / os.fsdecode(row["path"])).metadata
            assert len(list(opened.chunks())) == plain.num_row_groups * plain.num_columns
            assert opened.aad_prefix == row["aad_prefix"]
            assert opened.data[:4] == b"PARE"
        rekey_files(dataset, kms=kms, engine=HERE, double_wrap=double_wrap).raise_for_failures()


def test_copy_file(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    encrypt(src, dataset, kms, column_keys=COLUMNS).raise_for_failures()
    for name, path in parquets(src).items():
        with (tmp_path / "copy").open("wb") as target:
            copy_file(dataset, name, target, kms=kms)
        assert rows(tmp_path / "copy") == rows(path)
    with (tmp_path / "copy").open("wb") as target, pytest.raises(KeyAccessError, match="column"):
        copy_file(dataset, name, target, kms=allowed(kms, MASTER))


def test_open_file(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    pytest.importorskip("ags_fast.parquet.view")
    encrypt(src, dataset, kms, column_keys=COLUMNS).raise_for_failures()
    for name, path in parquets(src).items():
        table = pq.ParquetFile(path).read()
        with open_file(dataset, name, kms=kms) as view:
            assert rows_of(pq.ParquetFile(view).read()) == rows_of(table)
        with pytest.raises(KeyAccessError, match="number"):
            open_file(dataset, name, kms=allowed(kms, MASTER, "hr"))
        with open_file(dataset, name, kms=allowed(kms, MASTER, "hr"), missing="hide") as view:
            assert rows_of(pq.ParquetFile(view).read()) == rows_of(table.drop_columns(["number"]))
    with pytest.raises(ValueError, match="missing"):
        open_file(dataset, name, kms=kms, missing="drop")  # type: ignore[arg-type]


def test_sweep(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    with pytest.raises(StopError):
        encrypt(src, dataset, kms, column_keys=COLUMNS, progress=stop_after(2))
    swept = sweep(dataset, kms=kms)
    assert [row.format for row in swept.rows].count("file") == 2
    assert not parquets(dataset)
    assert leftovers(dataset, kms) == []


# ---------------------------------------------------------------------------------------------- from a shell


def test_cli(
    src: Path, kms: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [option for name, value in kms.items() for option in ("--kms", f"{name}={value}")]
    few = [*options, "--kms", f"encryption.allowed-key-ids={MASTER}"]

    def run(*arguments: str, kms: list[str] = options) -> tuple[int, str]:
        code = cli.main([*arguments, *kms])
        return code, capsys.readouterr().out

    encrypted = ("encrypt", "src", "ds", "--wrapping-key-id", MASTER, "--format", "parquet")
    with pytest.raises(SystemExit):
        run(*encrypted, "--column-key", "text")
    assert run("encrypt", "src", "ds", "--wrapping-key-id", MASTER, "--column-key", "text=hr")[0] == 2
    code, told = run(*encrypted, "--column-key", "text=hr", "--column-key", "number=finance")
    assert code == 0
    assert "ok           4" in told
    code, told = run("ls", "ds", "--json")
    assert [(file["format"], [*file["column_keys"]]) for file in json.loads(told)["files"]] == [
        ("parquet", ["text", "number"])
    ] * 4
    code, told = run("inspect", "ds", kms=[])
    assert re.search("double, columns +hr +active", told)
    assert run("verify", "ds", kms=few)[0] == 4
    code, told = run("decrypt", "ds", "out", "--missing", "drop", kms=few)
    assert code == 0
    assert "without text, number" in told
    assert run("rekey", "ds", "--include", "year*", "--quiet")[0] == 0
    assert run("decrypt", "ds", "out", "--overwrite", "--quiet")[0] == 0
    check_equal(src, tmp_path / "out")
    command = [sys.executable, "-m", "ags_fast", "cat", "ds", "year=2025/part-0.parquet", *options]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **python_env()}, check=True)
    (tmp_path / "cat").write_bytes(done.stdout)
    assert rows(tmp_path / "cat") == rows(src / "year=2025/part-0.parquet")
    assert done.stderr == b""
