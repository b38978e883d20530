"""Jobs over trees of files, by the local engine: what they make, skip, refuse, report and take up again."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import datasets
import kms_clients
import programs.jobs
import pytest
from datasets import (
    HERE,
    MASTER,
    data_files,
    decrypted,
    leftovers,
    make_kms,
    object_of,
    read_tree,
    row_of,
    rows_of,
    small_tree,
    version_of,
    write_tree,
)
from shares import rest_in_more
from support import pattern, program, run_python, seal_stream, start_python

import ags_fast.dataset.names
import ags_fast.jobs.work.dispatch
import ags_fast.jobs.work.stream
from ags_fast import AgsError, IntegrityError, PolicyError
from ags_fast.dataset.change import Wish
from ags_fast.dataset.files.contents import Contents
from ags_fast.dataset.job import Job
from ags_fast.dataset.kinds import Want
from ags_fast.dataset.names import entry_path, job_in_name, job_of, new_job_id
from ags_fast.dataset.plan import read_files, read_plan
from ags_fast.dataset.tables import Tables
from ags_fast.engines.local import LocalEngine
from ags_fast.fs import Store, local
from ags_fast.jobs import JobError, decrypt_files, encrypt_files, open_file, rekey_files, rotate, sweep, verify_files
from ags_fast.jobs.work.context import Context, Task
from ags_fast.keys.cache import clear_cache
from ags_fast.keys.kms import KmsClient, kms_calls, load_kms
from ags_fast.keys.kms.local import LocalKms

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.jobs import JobResult

pytest.importorskip("pyarrow")

HIDDEN = ("_SUCCESS", ".part-00000.avro.crc", "sub/.hidden/x", "_temporary/0/x", "x.crc")


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "src", small_tree())


def encrypt(src: Any, dataset: Any, kms: Any, **options: Any) -> JobResult:
    """With small blocks."""
    return datasets.encrypt(src, dataset, kms, **{"block_size": 1024, **options})


def dead(dataset: Path) -> list[str]:
    """The ids of jobs whose plans are there."""
    return sorted(path.parent.name for path in dataset.glob("_ags/plans/*/plan"))


def damage(path: Path, at: int) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def dek_of(dataset: Path, kms: Any, row: FileEntry) -> bytes:
    return version_of(dataset, kms).contents(row).dek(row)


# ---------------------------------------------------------------------------------------------- there and back again


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("double_wrap", [True, False])
def test_round_trip(
    src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path, processes: int, double_wrap: bool
) -> None:
    engine = LocalEngine(processes)
    tree = small_tree()
    done = encrypt(src, dataset, kms, engine=engine, double_wrap=double_wrap)
    assert done.counts == {"ok": len(tree), "skipped": 0, "failed": 0}
    assert done.version == 2
    assert (done.op, done.dataset) == ("encrypt", str(dataset))
    assert {row.src for row in done.rows} == {str(src / path) for path in tree}
    row = row_of(done, "edge/1025")
    made = object_of(dataset, kms, "edge/1025")
    assert row[1:9] == ("edge/1025", "ok", None, None, 1025, 8 + 1025 + 2 * 28, 1024, "ags1")
    assert row.key_id
    assert row.seconds > 0
    assert row.attempt == 0
    assert row.host
    assert made.stat().st_size == row.file_length
    assert done.table.num_rows == len(tree)
    assert done.table.column_names == list(row._fields)

    checked = verify_files(dataset, kms=kms, engine=engine)
    assert checked.counts == done.counts, checked.failed
    assert checked.version == 2, checked.failed
    back = decrypt_files(dataset, tmp_path / "back", kms=kms, engine=engine)
    assert back.counts == done.counts
    assert read_tree(tmp_path / "back") == tree

    turned = rekey_files(dataset, kms=kms, engine=engine)
    assert turned.counts == done.counts
    assert turned.version == 3
    assert decrypted(dataset, kms) == decrypted(dataset, kms, version=2) == tree
    assert leftovers(dataset, kms) == []
    with open_file(dataset, "edge/2048", kms=kms) as reader:
        assert reader.read() == tree["edge/2048"]
    with pytest.raises(FileNotFoundError, match="'no'"):
        open_file(dataset, "no", kms=kms)


@pytest.mark.parametrize("block_size", [1, 1000, 1 << 20, 3 << 20])
@pytest.mark.parametrize("dek_length", [16, 24, 32])
def test_block_sizes_and_keys(
    dataset: Path, kms: dict[str, str], tmp_path: Path, block_size: int, dek_length: int
) -> None:
    sizes = (0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size + 7)
    tree = {str(n): pattern(n, n) for n in sizes}
    encrypt(
        write_tree(tmp_path / "src", tree), dataset, kms, block_size=block_size, dek_length=dek_length
    ).raise_for_failures()
    assert decrypted(dataset, kms) == tree
    assert {len(dek_of(dataset, kms, row)) for row in rows_of(dataset, kms).values()} == {dek_length}


def test_arguments(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    for wrong in (  # type: ignore[var-annotated]
        {"format": "zip"},
        {"column_keys": {}},
        {"dek_length": 17},
        {"block_size": 0},
        {"resume": "yes"},
        {"on_error": "ignore"},
        {"max_failures": -1},
        {"aad_prefix": "same for all"},
        {"aad_prefix": "{n}{m}"},
        {"aad_prefix": "{0}"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            encrypt(src, dataset, kms, **wrong)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        encrypt(src / "nowhere", dataset, kms)
    with pytest.raises(ValueError, match="processes"):
        LocalEngine(-1)
    assert not dead(dataset)
    for job in (verify_files, rekey_files, sweep):
        with pytest.raises(FileNotFoundError, match="there is no dataset at"):
            job(src, kms=kms)
    with pytest.raises(FileNotFoundError, match="there is no dataset at"):
        decrypt_files(src, dataset, kms=kms)


def test_hidden_files_are_left_out_and_said(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    src = write_tree(tmp_path / "src", {"_year=2026/x": b"a partition", **dict.fromkeys(HIDDEN, b"hidden")})
    done = encrypt(src, dataset, kms)
    assert done.counts == {"ok": 1, "skipped": len(HIDDEN), "failed": 0}
    assert {row.src: row.error_class for row in done.rows if row.status == "skipped"} == {
        str(src / path): "HiddenFile" for path in HIDDEN
    }
    assert decrypted(dataset, kms) == {"_year=2026/x": b"a partition"}


def test_a_tree_of_nothing(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    src = write_tree(tmp_path / "src", {"_SUCCESS": b""})
    assert encrypt(src, dataset, kms).counts == {"ok": 0, "skipped": 1, "failed": 0}
    (src / "_SUCCESS").unlink()
    done = encrypt(src, dataset, kms)
    assert done.rows == []
    assert done.version is None
    assert done.table.num_rows == 0
    for job in (verify_files, lambda *args, **kms: decrypt_files(*args, tmp_path / "back", **kms), rekey_files):  # type: ignore[arg-type, call-arg]
        with pytest.raises(FileNotFoundError, match="there is no dataset at"):
            job(dataset, kms=kms)


def test_names_that_are_no_text(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    """A file's name is bytes: what is no UTF-8 is kept as it is, and the table of rows shows it escaped."""
    tree = {os.fsdecode(b"caf\xe9/\xff\xfe"): b"1", "line\nbreak": b"2", "'\"\\ ~": b"3", "x" * 250: b"4"}
    src = write_tree(tmp_path / os.fsdecode(b"s\xe9"), tree)
    for engine in (HERE, LocalEngine(1)):
        done = encrypt(src, dataset, kms, engine=engine)
        assert done.counts["ok"] == len(tree), done.failed
        assert done.table.num_rows == len(tree)
        assert any(src.endswith(r"/caf\xe9/\xff\xfe") for src in done.table.column("src").to_pylist())
        assert verify_files(dataset, kms=kms, engine=engine).counts["ok"] == len(tree)
        assert rekey_files(dataset, kms=kms, engine=engine).counts["ok"] == len(tree)
        assert decrypted(dataset, kms) == tree
        assert decrypt_files(dataset, tmp_path / "back", kms=kms, engine=engine).counts["ok"] == len(tree)
        assert read_tree(tmp_path / "back") == tree
        shutil.rmtree(dataset)
        shutil.rmtree(tmp_path / "back")


def test_in_memory(kms: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    name = f"memory://{tmp_path.name}"
    tree = small_tree()
    source = Store(f"{name}/src")
    for path, data in tree.items():
        source.create_exclusive(path, data)
    for engine in (HERE, LocalEngine(2)):  # other processes would not see it
        encrypt(f"{name}/src", f"{name}/{engine}", kms, engine=engine).raise_for_failures()
        assert verify_files(f"{name}/{engine}", kms=kms, engine=engine).counts["ok"] == len(tree)
        rekey_files(f"{name}/{engine}", kms=kms, engine=engine).raise_for_failures()
        assert decrypted(f"{name}/{engine}", kms) == tree
        decrypt_files(f"{name}/{engine}", f"{name}/back {engine}", kms=kms, engine=engine).raise_for_failures()
        back = Store(f"{name}/back {engine}")
        assert {entry.path: back.read_small(entry.path, 1 << 20) for entry in back.list()} == tree


# ---------------------------------------------------------------------------------------------- keys


def test_small_files_go_the_short_way(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To open a reader takes as long as the work on the file."""
    kms, dataset = make_kms(tmp_path), tmp_path / "dataset"
    write_tree(src, {f"{nbytes}": bytes(nbytes) for nbytes in (0, 1, 4096, 60_000)})
    encrypt_files(src, dataset, kms=kms, wrapping_key_id=MASTER, engine=HERE)
    opened: list[str] = []
    reader = Context.reader

    def counted(self: Context, entry: FileEntry, file: str | None = None) -> Any:
        opened.append(entry.path)
        return reader(self, entry, file)

    monkeypatch.setattr(Context, "reader", counted)
    verify_files(dataset, kms=kms, engine=HERE)
    decrypt_files(dataset, tmp_path / "out", kms=kms, engine=HERE)
    assert rekey_files(dataset, kms=kms, engine=HERE).counts["ok"] == len(read_tree(src))
    large = {path for path, data in read_tree(src).items() if len(data) > 64 << 10}
    assert set(opened) == large
    assert decrypted(dataset, kms) == read_tree(src)


def test_kms_calls(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    """Double wrap: one call a process, and one more to try a new wrap. Single wrap: one for each key, and none for what
    is not opened."""

    def calls() -> dict[tuple[str, str], int]:
        return dict(kms_calls() - before)

    before = kms_calls()
    encrypt(src, dataset, kms).raise_for_failures()
    assert calls() == {("local", "wrap"): 1, ("local", "unwrap"): 1}
    encrypt(src, dataset, kms)
    assert sum(calls().values()) == 2
    clear_cache()
    before = kms_calls()
    verify_files(dataset, kms=kms, engine=HERE).raise_for_failures()
    rekey_files(dataset, kms=kms, engine=HERE).raise_for_failures()
    decrypt_files(dataset, tmp_path / "back", kms=kms, engine=HERE).raise_for_failures()
    assert calls() == {("local", "unwrap"): 1}

    before = kms_calls()
    encrypt(src, tmp_path / "single", kms, double_wrap=False).raise_for_failures()
    files = len(small_tree())
    assert files <= calls()["local", "wrap"] <= files + 10
    before = kms_calls()
    verify_files(tmp_path / "single", kms=kms, engine=HERE).raise_for_failures()
    assert files <= calls()["local", "unwrap"] <= files + 20


def test_each_worker_asks_the_kms_once(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    counted = {**kms, "encryption.kms-impl": "kms_clients:Counting", "log": str(tmp_path / "log")}
    del counted["encryption.kms-type"]
    encrypt(src, dataset, kms).raise_for_failures()
    run_python(program(programs.jobs.run, "verify_files", dataset, kms=counted))
    callers = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert 2 <= len(callers) == len(set(callers)) <= 3


def test_other_master_keys(dataset: Path, tmp_path: Path) -> None:
    """A job may bring another master key, or another wrapping: the dataset has a key for each."""
    kms = make_kms(tmp_path, keys=(MASTER, "other"))
    tree = {"a": b"1", "b": b"2", "c": b"3"}
    src = tmp_path / "src"
    for (path, data), key, double_wrap in zip(
        tree.items(), (MASTER, "other", MASTER), (True, True, False), strict=True
    ):
        write_tree(src, {path: data})
        encrypt_files(
            src, dataset, kms=kms, wrapping_key_id=key, double_wrap=double_wrap, engine=HERE
        ).raise_for_failures()
    keys = version_of(dataset, kms).entry.keys.values()
    assert sorted((key.wrapping_key_id, key.double_wrap) for key in keys) == [
        (MASTER, False),
        (MASTER, True),
        ("other", True),
    ]
    assert len({row.key_id for row in rows_of(dataset, kms).values()}) == 3
    assert decrypted(dataset, kms) == tree
    rekey_files(dataset, kms=kms, wrapping_key_id="other", engine=HERE).raise_for_failures()
    assert decrypted(dataset, kms) == tree


def test_a_key_that_the_kms_does_not_have(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(AgsError, match="'nobody'"):
        encrypt_files(src, dataset, kms=kms, wrapping_key_id="nobody", engine=HERE)
    assert read_tree(dataset) == {}
    encrypt(src, dataset, kms)
    clear_cache()
    with pytest.raises(AgsError, match="another key or keystore wrapped it"):
        verify_files(dataset, kms=make_kms(tmp_path, name="stranger"), engine=HERE)


# ---------------------------------------------------------------------------------------------- sets


def test_a_numbered_set(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    encrypt(src, dataset, kms, aad_prefix="customers.part{n:05}").raise_for_failures()
    entries = list(rows_of(dataset, kms).values())
    assert [entry.path for entry in entries] == sorted(small_tree())
    assert [entry.aad_prefix for entry in entries] == [b"customers.part%05d" % n for n in range(len(entries))]
    assert [(entry.part, entry.parts) for entry in entries] == [(n, len(entries)) for n in range(len(entries))]
    assert verify_files(dataset, kms=kms, engine=HERE).counts["failed"] == 0
    rekey_files(dataset, kms=kms, engine=HERE, paths="edge/*").raise_for_failures()  # stays a set
    assert verify_files(dataset, kms=kms, engine=HERE).counts["failed"] == 0

    gone = object_of(dataset, kms, "a b/ü €/日本.txt")
    gone.unlink()
    (row,) = verify_files(dataset, kms=kms, engine=HERE).failed
    assert row.error_class == "IntegrityError"
    assert f"{gone.name} is missing" in (row.error or "")


def test_swapped_members_are_named(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    src = write_tree(tmp_path / "src", {f"{n}": pattern(500, n) for n in range(5)})
    encrypt(src, dataset, kms, aad_prefix="t.{n}")
    one, other = (object_of(dataset, kms, path) for path in "13")
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    one.write_bytes(contents[1])
    checked = verify_files(dataset, kms=kms, engine=HERE)
    assert {row.src for row in checked.failed} == {"1", "3"}
    assert f"swapped: {one.name} holds what belongs to 3, part 3" in (row_of(checked, "1").error or "")
    assert f"swapped: {other.name} holds what belongs to 1, part 1" in (row_of(checked, "3").error or "")


def test_members_that_a_version_has_twice(
    dataset: Path, kms: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables cannot be forged, so this one is made by somebody who has the keys."""
    src = write_tree(tmp_path / "src", {f"{n}": pattern(500, n) for n in range(4)})
    encrypt(src, dataset, kms, aad_prefix="t.{n}")
    row = rows_of(dataset, kms)["3"]
    with monkeypatch.context() as patch:
        patch.setattr("ags_fast.dataset.job.whole_sets", lambda sets, removed, added: dict(sets))
        job = Job.begin(version_of(dataset, kms).log, "forge", {Want(MASTER): 1})
        job.commit(Wish("forge", [row._replace(path="again")]))
    rows = verify_files(dataset, kms=kms, engine=HERE).failed
    assert [row.error_class for row in rows] == ["IntegrityError"] * 2
    assert all("part 3 of the 4 files" in (row.error or "") for row in rows)


def test_a_set_is_whole_though_a_source_is_encrypted_already(
    dataset: Path, kms: dict[str, str], tmp_path: Path
) -> None:
    src = write_tree(tmp_path / "src", {"a": b"1", "b": seal_stream(b"x"), "c": b"3"})
    done = encrypt(src, dataset, kms, aad_prefix="t.{n}")
    assert done.counts == {"ok": 2, "skipped": 1, "failed": 0}
    assert verify_files(dataset, kms=kms, engine=HERE).failed == []
    write_tree(src, {"aa": b"2"})
    encrypt(src, dataset, kms, aad_prefix="t.{n}").raise_for_failures()
    assert verify_files(dataset, kms=kms, engine=HERE).failed == []


# ---------------------------------------------------------------------------------------------- again, and skipped


def test_unchanged_files_are_skipped_and_new_ones_added(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    encrypt(src, dataset, kms)
    before = read_tree(dataset)
    again = encrypt(src, dataset, kms)
    assert {row.error_class for row in again.rows} == {"Unchanged"}
    assert again.version == 2
    assert read_tree(dataset) == before
    write_tree(src, {"new/file": b"new"})
    added = encrypt(src, dataset, kms)
    assert added.counts == {"ok": 1, "skipped": len(small_tree()), "failed": 0}
    assert added.version == 3
    assert decrypted(dataset, kms) == {**small_tree(), "new/file": b"new"}
    assert decrypted(dataset, kms, version=2) == small_tree()
    (src / "one").unlink()  # what is gone from the source stays in the dataset
    assert encrypt(src, dataset, kms).version == 3
    assert leftovers(dataset, kms) == []


def test_overwrite(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    encrypt(src, dataset, kms)
    write_tree(src, {"one": b"another", "edge/1024": b"also another"})
    with pytest.raises(FileExistsError, match=r"'edge/1024' and 1 more.*overwrite=True"):
        encrypt(src, dataset, kms)
    done = encrypt(src, dataset, kms, overwrite=True)
    assert done.counts == {"ok": 2, "skipped": len(small_tree()) - 2, "failed": 0}
    assert decrypted(dataset, kms) == {**small_tree(), "one": b"another", "edge/1024": b"also another"}
    assert decrypted(dataset, kms, version=2) == small_tree()
    assert verify_files(dataset, kms=kms, engine=HERE).counts == {"ok": len(small_tree()), "skipped": 0, "failed": 0}
    assert leftovers(dataset, kms) == []


def test_what_is_encrypted_already_is_skipped(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    tree = {"a.ags": seal_stream(bytes(10)), "b.parquet": b"PARE" + bytes(99) + b"PARE", "AGS1": b"AGS1\0\0\0\0"}
    done = encrypt(write_tree(tmp_path / "src", {**tree, "c": b"AGS1"}), dataset, kms)
    assert done.counts == {"ok": 2, "skipped": 2, "failed": 0}
    for name in ("a.ags", "b.parquet"):
        row = row_of(done, name)
        assert row.error_class == "AlreadyEncryptedError"
        assert "already" in (row.error or "")
    assert decrypted(dataset, kms) == {"AGS1": tree["AGS1"], "c": b"AGS1"}
    assert leftovers(dataset, kms) == []


def test_sources_in_the_place_of_one_another(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    src = write_tree(tmp_path / "src", {"x": b"1", "x.ags/y": b"2"})  # no object's name is that of a source
    encrypt(src, dataset, kms).raise_for_failures()
    assert decrypted(dataset, kms) == read_tree(src)
    (src / "x").unlink()
    write_tree(src, {"x/y": b"2"})
    done = encrypt(src, dataset, kms)
    assert [(row.src, row.error_class) for row in done.failed] == [(str(src / "x/y"), "PolicyError")]
    assert "'x' is a file" in (done.failed[0].error or "")
    assert decrypted(dataset, kms) == {"x": b"1", "x.ags/y": b"2"}
    assert leftovers(dataset, kms) == []


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "Delta"),
        ("deep/down/_delta_log/x.json", "Delta"),
        ("metadata/v1.metadata.json", "Iceberg"),
        ("table/metadata/00000-abc.metadata.json", "Iceberg"),
        (".hoodie/hoodie.properties", "Hudi"),
        ("t/.hoodie/x/y", "Hudi"),
    ],
)
def test_tables_are_refused(dataset: Path, kms: dict[str, str], tmp_path: Path, path: str, kind: str) -> None:
    src = write_tree(tmp_path / "src", {path: b"", "data/part-0.parquet": b"x"})
    with pytest.raises(PolicyError, match=f"{kind} table"):
        encrypt(src, dataset, kms)
    assert not dataset.exists()


def test_one_folder_inside_the_other_is_refused(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(src)
    for where in (src, src / "sub", tmp_path, tmp_path / "link", tmp_path / "link" / "x", f"file://{src}/y"):
        with pytest.raises(ValueError, match="inside"):
            encrypt(src, where, kms)
    encrypt(src, dataset, kms)
    (tmp_path / "link2").symlink_to(dataset)
    for where in (dataset, dataset / "sub", tmp_path, tmp_path / "link2", tmp_path / "link2" / "x"):
        with pytest.raises(ValueError, match="inside"):
            decrypt_files(dataset, where, kms=kms)
    assert {k.split("/")[0] for k in read_tree(src)} == {k.split("/")[0] for k in small_tree()}


def test_dry_run(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    before = kms_calls()
    planned = encrypt(src, dataset, kms, dry_run=True)
    assert planned.counts == {"ok": 0, "skipped": 0, "failed": 0, "planned": len(small_tree())}
    assert kms_calls() == before
    assert not dataset.exists()
    assert planned.version is None
    assert row_of(planned, "one").dst == "one"
    encrypt(src, dataset, kms)
    write_tree(src, {"more": b"x"})
    before_tree = read_tree(dataset)
    assert encrypt(src, dataset, kms, dry_run=True).counts["planned"] == 1
    assert rekey_files(dataset, kms=kms, dry_run=True).counts["planned"] == len(small_tree())
    assert decrypt_files(dataset, tmp_path / "no", kms=kms, dry_run=True).counts["planned"] == len(small_tree())
    assert read_tree(dataset) == before_tree
    assert not (tmp_path / "no").exists()


# ---------------------------------------------------------------------------------------------- deleting sources


def test_sources_are_deleted_when_all_is_verified(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    write_tree(src, {"_SUCCESS": b""})
    encrypt(src, dataset, kms, delete_sources=True).raise_for_failures()
    assert read_tree(src) == {"_SUCCESS": b""}
    assert decrypted(dataset, kms) == small_tree()


def test_no_source_is_deleted_if_one_fails(
    src: Path, dataset: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (src / "broken").symlink_to("/proc/self/mem")  # reads as an error
    done = encrypt(src, dataset, kms, delete_sources=True, links="follow")
    assert done.counts["failed"] == 1
    assert done.version == 2
    (src / "broken").unlink()
    assert read_tree(src) == small_tree()


def test_no_source_is_deleted_if_what_was_written_is_bad(
    src: Path, dataset: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Job.commit

    def rot(self: Job, wish: Wish) -> Any:  # the disk loses a bit after the commit
        made = commit(self, wish)
        damage(object_of(dataset, kms, "edge/2048"), 1500)
        return made

    monkeypatch.setattr(Job, "commit", rot)
    done = encrypt(src, dataset, kms, delete_sources=True)
    assert [row.error_class for row in done.failed] == ["IntegrityError"]
    assert read_tree(src) == small_tree()


def test_a_source_that_changed_meanwhile_is_not_deleted(
    src: Path, dataset: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Job.commit

    def edit(self: Job, wish: Wish) -> Any:
        (src / "one").write_bytes(b"edited")
        return commit(self, wish)

    monkeypatch.setattr(Job, "commit", edit)
    done = encrypt(src, dataset, kms, delete_sources=True)
    assert [(row.src, row.error_class) for row in done.failed] == [(str(src / "one"), "SourceChangedError")]
    assert "not deleted: the source has changed since" in (done.failed[0].error or "")
    assert read_tree(src) == {"one": b"edited"}


def test_what_an_earlier_run_did_not_come_to_delete(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    encrypt(src, dataset, kms)
    other = src / "edge/1024"
    stamp = other.stat().st_mtime_ns
    other.write_bytes(bytes(1024))  # looks the same, and is not
    os.utime(other, ns=(stamp, stamp))
    write_tree(src, {"new": b"x"})
    done = encrypt(src, dataset, kms, delete_sources=True, ignore_ctime=True)
    assert done.counts == {"ok": 1, "skipped": len(small_tree()) - 1, "failed": 1}
    assert row_of(done, "edge/1024").error_class == "SourceChangedError"
    assert read_tree(src) == {"edge/1024": bytes(1024)}
    done = encrypt(src, dataset, kms, delete_sources=True, ignore_ctime=True)
    assert done.counts == {"ok": 0, "skipped": 3, "failed": 1}
    assert done.left_out == {"EmptyFolder": 3}  # where files were
    assert read_tree(src) == {"edge/1024": bytes(1024)}
    other.write_bytes(small_tree()["edge/1024"])
    os.utime(other, ns=(stamp, stamp))
    encrypt(src, dataset, kms, delete_sources=True, ignore_ctime=True).raise_for_failures()
    assert read_tree(src) == {}
    assert decrypted(dataset, kms) == {**small_tree(), "new": b"x"}


def test_a_source_that_cannot_be_deleted_is_a_row(
    src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path
) -> None:
    outside = write_tree(tmp_path / "outside", {"kept": b"not ours to delete"})
    (src / "link").symlink_to(outside)
    done = encrypt(src, dataset, kms, delete_sources=True, links="follow")
    assert [row.error_class for row in done.failed] == ["PolicyError"]
    assert done.version == 2
    assert "not deleted" in (row_of(done, "link/kept").error or "")
    assert read_tree(outside) == {"kept": b"not ours to delete"}
    assert read_tree(src) == {}
    assert decrypted(dataset, kms) == {**small_tree(), "link/kept": b"not ours to delete"}


# ---------------------------------------------------------------------------------------------- rows of bad files


def test_failures_are_rows(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    (src / "unreadable").symlink_to("/proc/self/mem")
    (src / "grows").symlink_to("/proc/self/status")  # says 0 bytes, and has some
    done = encrypt(src, dataset, kms, links="follow")
    assert done.counts == {"ok": len(small_tree()), "skipped": 0, "failed": 2}
    assert row_of(done, "unreadable").error_class == "OSError"
    assert row_of(done, "grows").error_class == "SourceChangedError"
    assert "None" not in str([row.error for row in done.failed])
    with pytest.raises(JobError, match="and 1 more") as caught:
        done.raise_for_failures()
    assert caught.value.result is done
    assert decrypted(dataset, kms) == small_tree()
    assert leftovers(dataset, kms) == []


@pytest.mark.parametrize("change", ["shrunk", "grown", "rewritten", "gone", "folder"])
def test_sources_that_change_after_they_were_planned(
    src: Path, dataset: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    victim = src / "edge" / "2048"
    will_write = Job.will_write

    def then(job: Job, rows: Any) -> None:
        will_write(job, rows)
        match change:
            case "shrunk":
                os.truncate(victim, 10)
            case "grown":
                victim.write_bytes(bytes(5000))
            case "rewritten":
                victim.write_bytes(bytes(2048))
            case _:
                victim.unlink()
                if change == "folder":
                    victim.mkdir()

    monkeypatch.setattr(Job, "will_write", then)
    done = encrypt(src, dataset, kms)
    assert done.counts == {"ok": len(small_tree()) - 1, "skipped": 0, "failed": 1}
    expected = {"gone": "FileNotFoundError", "folder": "NotAFileError"}.get(change, "SourceChangedError")
    assert row_of(done, "edge/2048").error_class == expected
    assert "edge/2048" not in decrypted(dataset, kms)
    assert leftovers(dataset, kms) == []


@pytest.mark.parametrize("change", ["shrunk", "grown", "rewritten"])
def test_sources_that_change_while_they_are_read(
    src: Path, dataset: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    victim = src / "big"
    victim.write_bytes(pattern(3 << 20))
    write = ags_fast.jobs.work.stream.AgsWriter.write  # type: ignore[attr-defined]

    def writing(self: Any, data: Any) -> int:
        if self.tell() == 1 << 20:
            if change == "shrunk":
                os.truncate(victim, 2 << 20)
            else:
                with open(victim, "r+b") as file:
                    file.seek(0 if change == "rewritten" else 3 << 20)
                    file.write(b"changed")
        return write(self, data)

    monkeypatch.setattr(ags_fast.jobs.work.stream.AgsWriter, "write", writing)  # type: ignore[attr-defined]
    done = encrypt(src, dataset, kms, block_size=1 << 16)
    assert row_of(done, "big").error_class == "SourceChangedError"
    assert done.counts["failed"] == 1
    assert leftovers(dataset, kms) == []


def test_bad_files_of_a_dataset_are_rows(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    encrypt(src, dataset, kms)
    objects = {path: dataset / row.file for path, row in rows_of(dataset, kms).items()}
    damage(objects["edge/1024"], 500)
    objects["edge/1025"].unlink()
    os.truncate(objects["edge/2048"], 1060)
    objects["one"].unlink()
    objects["one"].mkdir()
    with open(objects["empty"], "ab") as file:
        file.write(b"more")
    write_tree(dataset, {"stranger": b"?"})
    checked = verify_files(dataset, kms=kms, engine=HERE)
    for name in ("edge/1024", "edge/1025", "edge/2048"):
        assert row_of(checked, name).error_class == "IntegrityError"
    assert row_of(checked, "one").status == row_of(checked, "empty").status == "failed"
    extra = row_of(checked, "stranger")
    assert (extra.status, extra.error_class) == ("skipped", "ExtraFile")
    assert checked.counts == {"ok": len(small_tree()) - 5, "skipped": 1, "failed": 5}

    back = decrypt_files(dataset, tmp_path / "back", kms=kms, engine=HERE)
    bad = {"edge/1024", "edge/1025", "edge/2048", "one"}  # what follows the last block is never read
    assert {row.dst for row in back.failed} == {str(tmp_path / "back" / name) for name in bad}
    assert read_tree(tmp_path / "back") == {k: v for k, v in small_tree().items() if k not in bad}
    turned = rekey_files(dataset, kms=kms, engine=HERE)
    assert turned.counts["failed"] == 4
    for row in (*checked.failed, *back.failed, *turned.failed):
        assert row.error_class
        assert row.error
        assert "unexpected" not in row.error


def test_verify_after(src: Path, dataset: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    encrypt(src, dataset, kms, verify_after=True).raise_for_failures()
    check = ags_fast.jobs.work.stream._check

    def rot(context: Any, entry: Any) -> None:
        if entry.path == "edge/1024":
            os.truncate(dataset / entry.file, 1000)
        check(context, entry)

    monkeypatch.setattr(ags_fast.jobs.work.stream, "_check", rot)
    done = rekey_files(dataset, kms=kms, engine=HERE, verify_after=True)
    assert [(row.src, row.error_class) for row in done.failed] == [("edge/1024", "IntegrityError")]
    monkeypatch.undo()
    assert decrypted(dataset, kms) == small_tree()
    assert leftovers(dataset, kms) == []


def test_files_of_somebody_else_are_left(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    foreign = write_tree(dataset, {"one.ags": b"theirs", "edge/1024.ags/x": b"a folder"}) and read_tree(dataset)  # type: ignore[truthy-bool]
    done = encrypt(src, dataset, kms)
    assert {row.src for row in done.failed} <= {str(src / "edge/1024")}
    found = decrypted(dataset, kms)
    assert found.items() <= small_tree().items()
    assert found["one"] == small_tree()["one"]
    assert foreign.items() <= read_tree(dataset).items()  # type: ignore[union-attr]
    assert verify_files(dataset, kms=kms, engine=HERE).counts["skipped"] == 2


def test_on_error_and_max_failures(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    src = write_tree(tmp_path / "src", {f"{n:02}": b"x" for n in range(20)})
    encrypt(src, dataset, kms)
    for n in range(5):
        object_of(dataset, kms, f"{n:02}").write_bytes(b"AGS1")
    for engine in (HERE, LocalEngine(1)):
        with pytest.raises(JobError, match="stopped after") as caught:
            verify_files(dataset, kms=kms, engine=engine, on_error="raise")
        assert caught.value.result.failed
        with pytest.raises(JobError, match="stopped after"):
            verify_files(dataset, kms=kms, engine=engine, max_failures=3)
        assert verify_files(dataset, kms=kms, engine=engine, max_failures=5).counts["failed"] == 5


def test_progress(src: Path, dataset: Path, kms: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Any] = []
    done = encrypt(src, dataset, kms, engine=LocalEngine(1), progress=rows.extend)
    assert sorted(rows) == sorted(done.rows)
    verify_files(dataset, kms=kms, engine=HERE, progress=False)
    assert capsys.readouterr().err == ""
    verify_files(dataset, kms=kms, engine=HERE, progress="lines")
    assert capsys.readouterr().err == ""  # a line every 30 s
    verify_files(dataset, kms=kms, engine=HERE, progress=True)
    assert "verify" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- versions


def test_versions(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    encrypt(src, dataset, kms)
    rekey_files(dataset, kms=kms, engine=HERE, paths=["edge/*", "one"]).raise_for_failures()
    assert verify_files(dataset, kms=kms, engine=HERE, version=2, min_version=3).version == 2
    with pytest.raises(PolicyError, match="min_version=4"):
        verify_files(dataset, kms=kms, min_version=4)
    with pytest.raises(FileNotFoundError, match="no version 9: the newest one is 3"):
        verify_files(dataset, kms=kms, version=9)
    for version in (2, 3):
        done = decrypt_files(dataset, tmp_path / str(version), kms=kms, engine=HERE, version=version, min_version=3)
        assert done.version == version
        assert read_tree(tmp_path / str(version)) == small_tree()
    old, new = (rows_of(dataset, kms, n) for n in (2, 3))
    for path, entry in new.items():
        chosen = path.startswith("edge/") or path == "one"
        assert (entry.file != old[path].file) == (entry.wrapped_dek != old[path].wrapped_dek) == chosen
        assert (entry.aad_prefix != old[path].aad_prefix) == chosen
    (dataset / entry_path(3)).unlink()
    with pytest.raises(PolicyError, match="older than min_version=3"):
        open_file(dataset, "one", kms=kms, min_version=3)
    assert decrypted(dataset, kms) == small_tree()


def test_rekey_gives_new_keys(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    encrypt(src, dataset, kms)
    rekey_files(dataset, kms=kms, engine=HERE, dek_length=32).raise_for_failures()
    deks = [dek_of(dataset, kms, row) for version in (2, 3) for row in rows_of(dataset, kms, version).values()]
    assert len(set(deks)) == len(deks) == 2 * len(small_tree())
    assert {len(dek) for dek in deks[len(small_tree()) :]} == {32}


# ---------------------------------------------------------------------------------------------- decryption


def test_decryption_leaves_what_is_there(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    encrypt(src, dataset, kms)
    back = write_tree(tmp_path / "back", {"one": b"y", "edge/1024": b"?", "mine": b"!"})
    done = decrypt_files(dataset, back, kms=kms, engine=HERE)
    assert {row.error_class for row in done.failed} == {"FileExistsError"}
    assert len(done.failed) == 2
    assert read_tree(back) == {**small_tree(), "one": b"y", "edge/1024": b"?", "mine": b"!"}
    done = decrypt_files(dataset, back, kms=kms, engine=HERE, resume="length")  # "one" has the right length
    assert done.counts == {"ok": 1, "skipped": len(small_tree()) - 1, "failed": 0}
    assert read_tree(back) == {**small_tree(), "one": b"y", "mine": b"!"}
    done = decrypt_files(dataset, back, kms=kms, engine=HERE, resume="verify")
    assert done.counts == {"ok": 1, "skipped": len(small_tree()) - 1, "failed": 0}
    assert read_tree(back) == {**small_tree(), "mine": b"!"}
    (back / "one").write_bytes(b"y")
    done = decrypt_files(dataset, back, kms=kms, engine=HERE, overwrite=True)
    assert done.counts["ok"] == len(small_tree())
    assert read_tree(back) == {**small_tree(), "mine": b"!"}


def test_a_second_attempt_to_decrypt_takes_nothing_for_its_own(
    src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path
) -> None:
    """Of a file that is there when a killed worker's file is tried again, only the bytes say who wrote it."""
    encrypt(src, dataset, kms)
    back = write_tree(tmp_path / "back", {"one": b"y", "edge/1024": small_tree()["edge/1024"]})
    entries = rows_of(dataset, kms)
    opened = version_of(dataset, kms)
    for overwrite in (False, True):
        context = Context(
            "decrypt", "j", opened.entry.dataset_id, Store(dataset), opened.envelope, Store(back), overwrite=overwrite
        )
        assert ags_fast.jobs.work.dispatch.run_file(context, Task(entries["edge/1024"]), 1).status == "ok"
        row = ags_fast.jobs.work.dispatch.run_file(context, Task(entries["one"]), 1)
        assert (row.status, (back / "one").read_bytes()) == (("ok", b"x") if overwrite else ("failed", b"y"))


@pytest.mark.parametrize("quick", [False, True])
def test_plaintext_is_private_until_it_is_checked(
    src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    """A small file is written when its tag has passed, and has no name until it is complete; where that is possible."""
    encrypt(src, dataset, kms)
    back = tmp_path / "back"
    seen = []
    expected = small_tree()
    write_whole = vars(local)["write_whole"]

    def watched_write(root: str, folder: str, name: str, data: bytes, *arguments: Any) -> bool:
        if not quick or root != str(back):
            return quick and write_whole(root, folder, name, data, *arguments)
        path = os.path.normpath(os.path.join(root, folder, name))
        assert not os.path.exists(path)
        assert data == expected[os.path.relpath(path, root)]  # all of it, so its tag has passed
        made = write_whole(root, folder, name, data, *arguments)
        if made:
            seen.append(0o600)
        return made

    monkeypatch.setattr(local, "write_whole", watched_write)
    publish = ags_fast.fs.NewFile.publish

    def watch(self: Any) -> None:
        if self.path.startswith(str(back)):
            with self.descriptor as fd:
                seen.append(stat.S_IMODE(os.fstat(fd).st_mode))
            assert not os.path.exists(self.path)
        publish(self)

    monkeypatch.setattr(ags_fast.fs.NewFile, "publish", watch)
    old = os.umask(0o022)
    try:
        decrypt_files(dataset, back, kms=kms, engine=HERE).raise_for_failures()
    finally:
        os.umask(old)
    assert seen == [0o600] * len(small_tree())
    assert {stat.S_IMODE(os.stat(back / path).st_mode) for path in small_tree()} == {0o644}


def test_nothing_is_written_outside(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    encrypt(src, dataset, kms)
    outside = write_tree(tmp_path / "outside", {"file": b"untouched"})
    back = tmp_path / "back"
    back.mkdir()
    (back / "edge").symlink_to(outside)
    (back / "one").symlink_to(outside / "file")
    (back / "empty").symlink_to(outside / "new")
    for options in ({}, {"overwrite": True}, {"resume": "verify"}, {"resume": "length", "overwrite": True}):
        done = decrypt_files(dataset, back, kms=kms, engine=HERE, **options)
        bad = {row.dst.removeprefix(f"{back}/") for row in done.failed}  # type: ignore[union-attr]
        assert {"one", "edge/1023", "edge/1024", "edge/1025", "edge/2048", "empty"} == bad
        assert read_tree(outside) == {"file": b"untouched"}
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "edge").write_bytes(b"a file where a folder should be")
    done = decrypt_files(dataset, tmp_path / "taken", kms=kms, engine=HERE)
    assert done.counts["failed"] == 4
    assert all("/edge/" in (row.dst or "") for row in done.failed)
    inside = tmp_path / "inside"
    (inside / "real").mkdir(parents=True)
    (inside / "edge").symlink_to("real")
    decrypt_files(dataset, inside, kms=kms, engine=HERE).raise_for_failures()


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "a//b", "./x", "", "a/", "a\0b", "..", "a/."])
def test_paths_that_lead_elsewhere(path: str) -> None:
    with pytest.raises(PolicyError):
        ags_fast.dataset.names.check_path(path)


@pytest.mark.parametrize("field", ["path", "file"])
def test_a_table_that_leads_elsewhere(
    src: Path, dataset: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Nobody without the keys can write one. Somebody with them gets no farther."""
    encrypt(src, dataset, kms)
    log, entry = version_of(dataset, kms)
    (row, *_) = rows_of(dataset, kms).values()
    forged = row._replace(**dict[str, Any]({field: "../../forged"}))
    with monkeypatch.context() as patch:
        patch.setattr("ags_fast.dataset.tables.check_rows", lambda rows: None)
        (table,) = log.tables.write([forged], new_job_id(), row.key_id, log.envelope(entry))
    with pytest.raises(PolicyError, match="forged"):
        Tables(log.store, entry.dataset_id).rows(table, log.envelope(entry))


# ---------------------------------------------------------------------------------------------- what kills workers


@pytest.fixture
def poison(kms: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A KMS under which the files number 2, 3 and 7 kill the process that opens their keys."""
    monkeypatch.setattr(kms_clients.Poison, "wrapped", 0)
    (tmp_path / "armed").touch()
    del kms["encryption.kms-type"]
    return {
        **kms,
        "encryption.kms-impl": "kms_clients:Poison",
        "poison": "2 3 7",
        "armed": str(tmp_path / "armed"),
    }


def test_files_that_kill_their_workers(dataset: Path, poison: dict[str, str], tmp_path: Path) -> None:
    tree = {f"{n:02}": pattern(100, n) for n in range(20)}
    src = write_tree(tmp_path / "src", tree)
    done = encrypt(src, dataset, poison, engine=LocalEngine(2), double_wrap=False, dek_length=24)
    assert done.counts == {"ok": 17, "skipped": 0, "failed": 3}
    for name in ("02", "03", "07"):
        row = row_of(done, name)
        assert (row.error_class, row.attempt) == ("WorkerDiedError", 2)
        assert "SIGKILL" in (row.error or "")
    left = {name: data for name, data in tree.items() if name not in ("02", "03", "07")}
    assert decrypted(dataset, poison) == left
    assert leftovers(dataset, poison) == []
    (tmp_path / "armed").unlink()
    kms_clients.Poison.wrapped = 0
    encrypt(src, dataset, {**poison, "poison": "0 2"}, double_wrap=False, dek_length=24).raise_for_failures()
    assert decrypted(dataset, poison) == tree

    (tmp_path / "armed").touch()
    # By default, too, a client that is not ours works in processes, however little there is to do.
    for checked in (
        verify_files(dataset, kms=poison, engine=LocalEngine(1)),
        decrypt_files(dataset, tmp_path / "back", kms=poison),
    ):
        assert checked.counts["ok"] == 18
        assert {row.error_class for row in checked.failed} == {"WorkerDiedError"}
    assert len(read_tree(tmp_path / "back")) == 18


def test_workers_that_do_not_start(
    src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is no file's fault, and three processes for each file would not make it better."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho >> {tmp_path}/started\nexit 7\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ChildProcessError, match=r"3 worker processes in a row were gone with status 7"):
        encrypt(src, dataset, kms, engine=LocalEngine(2))
    assert len((tmp_path / "started").read_text()) <= 4
    encrypt(src, dataset, kms, resume="length").raise_for_failures()
    assert leftovers(dataset, kms) == []


class OfMyOwn(KmsClient):
    """A KMS client that no properties describe."""

    def __init__(self, kms: dict[str, str]) -> None:
        self._client = load_kms(kms)

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        return self._client.wrap_key(key, wrapping_key_id)

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return self._client.unwrap_key(wrapped, wrapping_key_id)


class MyLocalKms(LocalKms):
    """One whose properties make another."""


def test_clients_that_workers_cannot_make(src: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    """Nothing is begun with them, unless all is done in this process."""
    by_hand, in_main = MyLocalKms(), LocalKms()
    by_hand.initialize(kms)
    in_main.initialize({**kms, "encryption.kms-impl": "__main__:LocalKms"})
    for client in (OfMyOwn(kms), by_hand, in_main, MyLocalKms()):
        for engine in (None, LocalEngine(2)):
            with pytest.raises(TypeError, match=r"cannot be sent to other processes.*LocalEngine\(0\)"):
                encrypt(src, dataset, client, engine=engine)
        assert not dataset.exists()
    for client in (OfMyOwn(kms), by_hand):
        name = tmp_path / type(client).__name__
        encrypt(src, name, client).raise_for_failures()
        before = read_tree(name)
        for job in (verify_files, rekey_files, rotate, lambda *args, **options: decrypt_files(*args, src, **options)):  # type: ignore[arg-type, call-arg]
            with pytest.raises(TypeError, match="cannot be sent to other processes"):
                job(name, kms=client, engine=LocalEngine(1))
        assert read_tree(name) == before
        assert verify_files(name, kms=client, engine=HERE).counts["ok"] == len(small_tree())
        assert verify_files(name, kms=load_kms(kms), engine=HERE).counts["ok"] == len(small_tree())


def test_workers_end_with_their_caller(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    """A worker that lived on would finish its file after somebody else has taken up the job."""
    src = write_tree(tmp_path / "src", {"0": b""})
    with open(src / "0", "wb") as file:
        file.truncate(8 << 30)  # some seconds
    child = start_python(program(programs.jobs.run, "encrypt_files", src, dataset, kms=kms, wrapping_key_id=MASTER))
    workers = wait_for(lambda: worker_pids(child.pid) if dead(dataset) else [])
    wait_for(lambda: [name for name in os.listdir(dataset) if name.endswith(".agstmp")])
    child.kill()
    child.communicate()
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers), seconds=3)
    assert len(sweep(dataset).rows) == 1


def worker_pids(parent: int) -> list[str]:
    with open(f"/proc/{parent}/task/{parent}/children") as file:
        return file.read().split()


def wait_for(what: Callable[[], Any], seconds: float = 30) -> Any:
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.01)
    return found


# ---------------------------------------------------------------------------------------------- ended, and taken up


@pytest.mark.parametrize("op", rest_in_more(["encrypt", "rekey", "decrypt"], "encrypt"))
def test_ctrl_c(dataset: Path, kms: dict[str, str], tmp_path: Path, op: str) -> None:
    tree = {f"{n:03}": pattern(100_000, n) for n in range(100)}
    src = write_tree(tmp_path / "src", tree)
    if op != "encrypt":
        encrypt(src, dataset, kms)
    out = tmp_path / "out" if op == "decrypt" else src
    target = out if op == "decrypt" else dataset
    before = len(list(dataset.iterdir())) if op == "rekey" else 0
    places = {"encrypt": (src, dataset), "rekey": (dataset,), "decrypt": (dataset, out)}[op]
    options: dict[str, Any] = {"kms": kms}
    if op == "encrypt":
        options |= {"wrapping_key_id": MASTER, "block_size": 1024}
    child = start_python(program(programs.jobs.run, f"{op}_files", *places, at_once=1, **options))
    wait_for(lambda: target.exists() and len(list(target.iterdir())) > before + 10)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert child.returncode != 0
    assert "KeyboardInterrupt" in err
    assert [path for path in read_tree(target) if path.endswith(".agstmp")] == []
    assert read_tree(src) == tree
    out_text = run_python(program(programs.jobs.run, f"{op}_files", *places, **options, resume="length"))
    assert " 0 failed" in out_text
    if op == "decrypt":
        assert read_tree(out) == tree
    assert decrypted(dataset, kms) == tree
    assert leftovers(dataset, kms) == []
    assert verify_files(dataset, kms=kms, engine=HERE).counts == {"ok": 100, "skipped": 0, "failed": 0}


class StopError(Exception):
    pass


def interrupted(src: Path, dataset: Path, kms: Any, after: int, op: str = "encrypt", **options: Any) -> None:
    """A job that ends after so many files, its plan left."""
    rows: list[Any] = []

    def progress(more: list[Any]) -> None:
        rows.extend(more)
        if len(rows) >= after:
            raise StopError

    def job() -> None:
        if op == "encrypt":
            encrypt(src, dataset, kms, progress=progress, **options)
        else:
            rekey_files(dataset, kms=kms, engine=HERE, progress=progress, **options)

    with pytest.raises(StopError):
        job()
    assert len(dead(dataset)) == 1


@pytest.mark.parametrize("resume", ["length", "verify"])
@pytest.mark.parametrize("op", ["encrypt", "rekey"])
def test_resume(src: Path, dataset: Path, kms: dict[str, str], resume: Any, op: str) -> None:
    if op == "rekey":
        encrypt(src, dataset, kms)
    interrupted(src, dataset, kms, 5, op)
    (job_id,) = dead(dataset)
    begun = {path: data for path, data in read_tree(dataset).items() if job_in_name(path) == job_id}
    begun = {path: data for path, data in begun.items() if not path.startswith("_ags/")}
    assert len(begun) == 5
    victim, other = sorted(begun)[:2]
    flipped = bytearray(begun[victim])
    flipped[-1] ^= 1
    (dataset / victim).write_bytes(flipped)  # of the right length
    (dataset / other).write_bytes(b"short")
    seen: list[Any] = []
    done = (
        encrypt(src, dataset, kms, resume=resume, progress=seen.extend)
        if op == "encrypt"
        else rekey_files(dataset, kms=kms, engine=HERE, resume=resume, progress=seen.extend)
    )
    assert len(seen) == len(small_tree())  # what was finished before is progress too
    assert done.job_id == job_id, done.failed
    assert done.counts["ok"] == len(small_tree()), done.failed
    after = read_tree(dataset)
    assert after[other] != b"short"
    assert (after[victim] == flipped) == (resume == "length")
    assert all(after[path] == begun[path] for path in begun if path not in (victim, other))
    assert dead(dataset) == []
    assert leftovers(dataset, kms) == []
    if resume == "verify":
        assert decrypted(dataset, kms) == small_tree()


def test_without_resume_a_new_job_leaves_the_old_one(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    interrupted(src, dataset, kms, 5)
    (job_id,) = dead(dataset)
    old = {path: read_tree(dataset)[path] for path in data_files(dataset)}
    done = encrypt(src, dataset, kms)
    assert done.counts["ok"] == len(small_tree())
    assert decrypted(dataset, kms) == small_tree()
    assert len(dead(dataset)) == 1
    assert old.items() <= read_tree(dataset).items()
    assert verify_files(dataset, kms=kms, engine=HERE).counts["skipped"] == 0  # what an open job knows is not extra
    swept = sweep(dataset, kms=kms)
    assert {row.src for row in swept.rows if row.format == "file"} == {str(dataset / path) for path in old}
    assert job_id not in repr(read_tree(dataset).keys())
    assert dead(dataset) == []
    assert leftovers(dataset, kms) == []
    assert decrypted(dataset, kms) == small_tree()


def test_resume_of_what_has_changed(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    """A changed source gets another key and another name: the old name may hold the old content under the old key."""
    interrupted(src, dataset, kms, 5)
    (job_id,) = dead(dataset)
    first = {path.partition(f".{job_id}")[0]: path for path in data_files(dataset)}
    log, entry = version_of(dataset, kms)
    plan = read_plan(log, job_id, entry)
    assert plan is not None
    envelope = log.envelope(entry, plan.new)
    old = {row.path: row for row in read_files(log, job_id, entry, envelope)[0]}
    deks = {path: Contents(entry.dataset_id, log.store, envelope).dek(row) for path, row in old.items()}
    name = min(first)
    changed = {name: b"now it is this", "one": b"and that", "a new one": b"!"}
    write_tree(src, changed)
    (src / "empty").unlink()
    done = encrypt(src, dataset, kms, resume="length")
    assert done.job_id == job_id
    assert done.counts["failed"] == 0
    expected = {**small_tree(), **changed}
    del expected["empty"]
    assert decrypted(dataset, kms) == expected
    assert leftovers(dataset, kms) == []
    for path, row in rows_of(dataset, kms).items():
        if path in changed:
            assert row.file not in first.values()
            assert dek_of(dataset, kms, row) != deks.get(path)
        else:
            assert row == old[path]


def test_resume_twice(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    interrupted(src, dataset, kms, 3)
    for n in range(3):
        write_tree(src, {"one": b"changed" * n, f"new {n}": b"x"})
        interrupted(src, dataset, kms, 2, resume="length")
    encrypt(src, dataset, kms, resume="length").raise_for_failures()
    expected = {**small_tree(), "one": b"changed" * 2, **{f"new {n}": b"x" for n in range(3)}}
    assert decrypted(dataset, kms) == expected
    assert dead(dataset) == leftovers(dataset, kms) == []


def test_resume_takes_no_living_jobs_plan(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    seen: list[JobResult] = []

    def progress(rows: list[Any]) -> None:
        if not seen:  # while this job lives, in this process as in another
            seen.append(encrypt(src, dataset, kms, resume="length"))
            assert sweep(dataset, kms=kms).rows == []

    done = encrypt(src, dataset, kms, progress=progress)
    (inner,) = seen
    assert inner.job_id != done.job_id
    assert inner.counts["failed"] == 0
    assert {row.error_class for row in done.failed} == {"ConcurrentChangeError"}  # the inner one was first
    assert decrypted(dataset, kms) == small_tree()
    assert leftovers(dataset, kms) == []


def test_of_two_that_resume_one_job_one_does(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    interrupted(src, dataset, kms, 3)
    (job_id,) = dead(dataset)
    with Job.resume(version_of(dataset, kms).log, job_id):
        done = encrypt(src, dataset, kms, resume="length")
        assert done.job_id != job_id
    assert encrypt(src, dataset, kms, resume="length").job_id  # nothing to do, and the plan is ended
    assert dead(dataset) == leftovers(dataset, kms) == []


def test_resume_of_a_set(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    tree = {f"{n}": pattern(100 * n, n) for n in range(10)}
    src = write_tree(tmp_path / "src", tree)
    interrupted(src, dataset, kms, 4, aad_prefix="t.{n}")
    (job_id,) = dead(dataset)
    write_tree(src, {"3": b"changed"})
    assert encrypt(src, dataset, kms, aad_prefix="t.{n}", resume="length").job_id == job_id
    assert decrypted(dataset, kms) == {**tree, "3": b"changed"}
    assert verify_files(dataset, kms=kms, engine=HERE).counts == {"ok": 10, "skipped": 0, "failed": 0}

    write_tree(src, {"x1": b"1", "x3": b"3"})
    interrupted(src, dataset, kms, 1, aad_prefix="t.{n}")
    (job_id,) = dead(dataset)
    write_tree(src, {"x2": b"2"})  # another set
    done = encrypt(src, dataset, kms, aad_prefix="t.{n}", resume="length")
    assert done.job_id != job_id
    assert done.counts["ok"] == 3
    assert verify_files(dataset, kms=kms, engine=HERE).counts == {"ok": 13, "skipped": 0, "failed": 0}
    assert dead(dataset) == leftovers(dataset, kms) == []


def test_a_set_is_committed_whole(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    (src / "broken").symlink_to("/proc/self/mem")
    done = encrypt(src, dataset, kms, aad_prefix="t.{n}", links="follow")
    assert done.version == 1
    assert done.counts["failed"] == len(small_tree()) + 1
    assert row_of(done, "broken").error_class == "OSError"
    assert row_of(done, "one").error_class == "IncompleteSetError"
    assert decrypted(dataset, kms) == {}
    assert len(dead(dataset)) == 1
    (src / "broken").unlink()
    (src / "broken").write_bytes(b"mended")
    done = encrypt(src, dataset, kms, aad_prefix="t.{n}", resume="length")
    done.raise_for_failures()
    assert decrypted(dataset, kms) == {**small_tree(), "broken": b"mended"}
    assert verify_files(dataset, kms=kms, engine=HERE).failed == []
    assert leftovers(dataset, kms) == []


def test_a_failed_job_can_be_resumed_while_its_error_is_kept(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    (src / "broken").symlink_to("/proc/self/mem")
    with pytest.raises(JobError) as caught:
        encrypt(src, dataset, kms, on_error="raise", links="follow")
    (job_id,) = dead(dataset)
    (src / "broken").unlink()
    assert encrypt(src, dataset, kms, resume="length").job_id == job_id
    assert caught.value.result.failed
    assert decrypted(dataset, kms) == small_tree()
    assert leftovers(dataset, kms) == []


def test_resume_makes_one_listing_and_opens_no_file(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    src = write_tree(tmp_path / "src", {f"{n % 7}/{n:04}": b"x" for n in range(1500)})
    interrupted(src, dataset, kms, 1499, fsync=False)
    out = run_python(program(programs.jobs.resume_frugally, str(src), str(dataset), kms))
    files, scans, stats = map(int, out.split())
    assert files <= 3, out
    assert scans <= 2, out
    assert stats < 40, out
    assert len(decrypted(dataset, kms)) == 1500
    assert leftovers(dataset, kms) == []


# ---------------------------------------------------------------------------------------------- sweep


def test_sweep(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    encrypt(src, dataset, kms)
    write_tree(src, {"more": b"x", "still more": b"y"})
    interrupted(src, dataset, kms, 1)
    (job_id,) = dead(dataset)
    strange = f"20260101T000000-{0:012x}"
    left = {
        f".one.{job_id}.0123456789abcdef.agstmp": "temporary",
        "edge/.x..0123456789abcdef.agstmp": "temporary",
        f"_ags/tables/{strange}-{0:016x}": "table",
        f"_ags/plans/{strange}/plan": "plan",
        f"one.{strange}-00000000.ags": "file",
    }
    write_tree(dataset, dict.fromkeys(left, b"?"))
    of_job = {path for path in read_tree(dataset) if job_of(path) == job_id}
    assert sweep(dataset, kms=kms, older_than=timedelta(hours=1)).rows == []
    swept = sweep(dataset, kms=kms)
    assert {row.src for row in swept.rows} == {str(dataset / path) for path in left.keys() | of_job}
    formats = {row.src: row.format for row in swept.rows}
    assert {path: formats[str(dataset / path)] for path in left} == left
    assert leftovers(dataset, kms) == []
    assert list((dataset / "_ags/plans").iterdir()) == []
    assert sweep(dataset, kms=kms).rows == []
    assert decrypted(dataset, kms) == small_tree()


def test_a_log_that_is_gone(src: Path, dataset: Path, kms: dict[str, str]) -> None:
    """Who took the log away must not make a job begin a new dataset over the old one."""
    encrypt(src, dataset, kms)
    shutil.move(dataset / "_ags" / "log", dataset.parent / "log")
    with pytest.raises(IntegrityError, match="_ags/log"):
        encrypt(src, dataset, kms)
    with pytest.raises(IntegrityError, match="_ags/log"):
        verify_files(dataset, kms=kms)
    shutil.move(dataset.parent / "log", dataset / "_ags" / "log")
    assert decrypted(dataset, kms) == small_tree()
