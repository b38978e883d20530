"""Parquet files of datasets that Parquet's own key tools open, too: `key_material="keytools"`."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import programs.spark
import pytest
from datasets import MASTER, QUIET, leftovers
from parquet_corpus import check_equal, flat, rows
from parquet_peers import rows_of
from second_reader import SecondReader
from spark_jobs import spark_env
from support import flip, program, run_python

from ags_fast import IntegrityError, cli
from ags_fast._core import Key  # noqa: PLC2701 the cipher itself
from ags_fast.dataset import sealed as documents
from ags_fast.dataset.access import Access
from ags_fast.dataset.dataset import Dataset
from ags_fast.dataset.files.contents import Contents
from ags_fast.dataset.files.parquet import parquet_keys
from ags_fast.fs import Store
from ags_fast.jobs import (
    LocalEngine,
    audit,
    compact,
    decrypt_files,
    expire,
    key_status,
    rekey_files,
    remove_files,
    rotate,
    verify_files,
)
from ags_fast.keys import clear_cache, new_kek
from ags_fast.keys.envelope import Envelope
from ags_fast.keys.kms import Wrapped, load_kms, local
from ags_fast.parquet import keytools
from ags_fast.parquet.opened import Opened
from ags_fast.parquet.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.snapshot import Snapshot
    from ags_fast.jobs import JobResult

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pe = pytest.importorskip("pyarrow.parquet.encryption")
msgspec = pytest.importorskip("msgspec")

COLUMNS = {"text": "hr", "number": "finance"}
PATHS = ("year=2024/part-0.parquet", "year=2025/part-0.parquet", "year=2026/part-1.parquet")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    for n, path in enumerate(PATHS):
        (folder / path).parent.mkdir(exist_ok=True)
        pq.write_table(flat(300, seed=n), folder / path, row_group_size=120)
    return folder


def encrypt(src: Path, dataset: Any, kms: Any, **options: Any) -> JobResult:
    given = {"format": "parquet", "column_keys": COLUMNS, "key_material": "keytools", **options}
    done = datasets.encrypt(src, dataset, kms, **given)
    done.raise_for_failures()
    return done


@pytest.fixture
def sealed(tables: Path, dataset: Path, kms: dict[str, str]) -> Path:
    encrypt(tables, dataset, kms)
    return dataset


def with_pyarrow(path: str, kms: Mapping[str, str], columns: list[str] | None = None) -> Any:
    """Read a file by pyarrow's own decryption, which only asks the KMS."""
    client = load_kms(kms)

    class Client(pe.KmsClient):  # type: ignore[name-defined]
        def wrap_key(self, key: bytes, master_key: str) -> bytes:
            raise NotImplementedError

        def unwrap_key(self, wrapped: str, master_key: str) -> bytes:
            return client.unwrap_key(base64.b64decode(wrapped), master_key)

    factory = pe.CryptoFactory(lambda config: Client())
    keys = factory.file_decryption_properties(pe.KmsConnectionConfig())
    return pq.ParquetFile(path, decryption_properties=keys).read(columns=columns)


def entries_of(dataset: Path, kms: Any) -> dict[str, FileEntry]:
    return {entry.path: entry for entry in Access.of(dataset, kms).open().files()}


def check_all_read(src: Path, dataset: Path, kms: dict[str, str], out: Path) -> None:
    """pyarrow by the key material, and ags_fast by the tables, read what the source has."""
    clear_cache()
    for file in Dataset.open(dataset, kms=kms).files():
        assert file.key_material == "keytools"
        assert rows_of(with_pyarrow(file.url, kms)) == rows(src / file.path)
    assert not verify_files(dataset, kms=kms, **QUIET).failed
    decrypt_files(dataset, out, kms=kms, fsync=False, **QUIET).raise_for_failures()
    check_equal(src, out)
    shutil.rmtree(out)


def without(kms: dict[str, str], key_id: str, folder: Path) -> dict[str, str]:
    """The KMS of a caller who may not use one master key."""
    copy = {**kms, "kms.local.path": str(folder / f"without {key_id}")}
    shutil.copy(kms["kms.local.path"], copy["kms.local.path"])
    local.set_state(copy, key_id, "disabled")
    return copy


# ---------------------------------------------------------------------------------------------------- written and read


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (0, {}),
        (0, {"double_wrap": False, "dek_length": 24}),
        (0, {"column_keys": None, "aad_prefix": "orders.part{n}"}),
        (2, {"verify_after": True}),
    ],
)
def test_others_read(
    tables: Path, dataset: Path, kms: dict[str, str], tmp_path: Path, processes: int, options: dict[str, Any]
) -> None:
    encrypt(tables, dataset, kms, engine=LocalEngine(processes), **options)
    check_all_read(tables, dataset, kms, tmp_path / "out")
    opened = Dataset.open(dataset, kms=kms)
    with opened.open_file(PATHS[1]) as file:
        assert rows_of(pq.ParquetFile(file).read()) == rows(tables / PATHS[1])
    assert encrypt(tables, dataset, kms, **options).counts == {"ok": 0, "skipped": 3, "failed": 0}


def test_a_group_of_columns(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    """Each column of the group names the group's key, and files with V2 pages open by pyarrow."""
    table = pa.table(
        {"id": [1, 2], "who": [{"name": "a", "age": 1}, {"name": "b", "age": None}], "tags": [["x"], None]}
    )
    (tmp_path / "src").mkdir()
    pq.write_table(table, tmp_path / "src/nested.parquet", data_page_version="2.0")
    encrypt(tmp_path / "src", dataset, kms, column_keys={"who": "hr", "tags": "finance"})
    check_all_read(tmp_path / "src", dataset, kms, tmp_path / "out")
    less = without(kms, "hr", tmp_path)
    (file,) = Dataset.open(dataset, kms=less).files()
    assert with_pyarrow(file.url, less, ["id", "tags"]).equals(table.select(["id", "tags"]))


def test_what_files_store(sealed: Path, kms: dict[str, str]) -> None:
    """The KMS itself wraps the keys that the table has, and the AAD prefix is the table's."""
    opened = Access.of(sealed, kms).open()
    dataset_id = opened.entry.dataset_id
    for entry in entries_of(sealed, kms).values():
        deks = [opened.envelope.unwrap(*wrap) for wrap in entry.wraps(dataset_id)]
        with Opened(Store(sealed).open_seekable(entry.file), Reading(parquet_keys(contents_of(opened), entry))) as file:
            assert file.crypto is not None
            assert file.crypto.stored == entry.aad_prefix
            stored = [file.crypto.key_metadata, *(chunk.key_metadata for chunk in file.chunks())]
        by_master = {json.loads(one)["masterKeyID"]: one for one in stored if one}
        assert list(by_master) == [MASTER, "finance", "hr"]
        assert [keytools.resolve(one, kms) for one in by_master.values()] == [deks[0], deks[2], deks[1]]
        found = json.loads(by_master[MASTER])
        assert (found["datasetID"], found["doubleWrapping"], found["isFooterKey"]) == (dataset_id, False, True)
        assert len({entry.wrapped_dek, *(one["wrapped_dek"] for one in entry.key_material or ())}) == 4


def contents_of(opened: Snapshot) -> Contents:
    return Contents(opened.entry.dataset_id, opened.log.store, opened.envelope)


def test_a_second_reader(sealed: Path, kms: dict[str, str]) -> None:
    """What docs/dataset-format.md says of key material."""
    client = load_kms(kms)
    reader = SecondReader(sealed, client)
    for ref in reader.head["files"]:
        assert ref["material"] is True
        for row in reader.table(ref):
            found = {column: (master, wrapped) for column, master, _, wrapped in row["key_material"]}
            use = reader.binding(b"dek", row["file"])
            wraps = {"": (row["key_id"], row["wrapped_dek"], use)}
            for column, key_id, wrapped in row["column_keys"]:
                bound = reader.binding(b"column:" + column.encode(), row["file"])
                wraps[column] = key_id, wrapped, bound
            for column, (key_id, wrapped, bound) in wraps.items():
                master, by_master = found.pop(column)
                assert master == reader.keys[key_id]["wrapping_key_id"]
                assert client.unwrap_key(by_master, master) == reader.unwrap(key_id, wrapped, bound)
            assert found == {}


def test_without_a_master_key(sealed: Path, kms: dict[str, str], tmp_path: Path) -> None:
    less = without(kms, "hr", tmp_path)
    for file in Dataset.open(sealed, kms=less).files():
        others = [name for name in flat(1).column_names if name != "text"]
        assert rows_of(with_pyarrow(file.url, less, others)) == rows_of(with_pyarrow(file.url, kms, others))
        with pytest.raises(Exception, match="hr"):
            with_pyarrow(file.url, less, ["text"])
        with pytest.raises(Exception, match=MASTER):
            with_pyarrow(file.url, without(kms, MASTER, tmp_path))


def test_material_is_only_where_it_is_wanted(tables: Path, dataset: Path, kms: dict[str, str]) -> None:
    """Files without it are as they always were; so are their tables, which others may read."""
    encrypt(tables, dataset, kms, key_material=None)
    assert not any(table.material for table in Access.of(dataset, kms).open().entry.files)
    assert all(row.key_material is None for row in entries_of(dataset, kms).values())
    for file in Dataset.open(dataset, kms=kms).files():
        assert file.key_material is None
        with pytest.raises(OSError, match="AAD prefix"):
            with_pyarrow(file.url, kms)


def test_a_transaction(tables: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    handle = Dataset.create(dataset, kms=kms, wrapping_key_id=MASTER)
    with handle.transaction(column_keys=COLUMNS, key_material="keytools") as new:
        for path in PATHS[:2]:
            with new.create(path, "parquet") as file:
                file.write((tables / path).read_bytes())
        with new.create("notes.txt") as notes:
            notes.write(b"streams have no key metadata")
        ticket = pickle.loads(pickle.dumps(new.ticket()))
        with ticket.create(PATHS[2], "parquet") as file:
            file.write((tables / PATHS[2]).read_bytes())
        new.add(file.receipt())
    assert {file.path: file.key_material for file in handle.files()} == dict.fromkeys(PATHS, "keytools") | {
        "notes.txt": None
    }
    with handle.transaction() as change:
        change.remove("notes.txt")
    check_all_read(tables, dataset, kms, tmp_path / "out")


def test_a_job_that_died_is_resumed(
    tables: Path, dataset: Path, kms: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planned material is the files', whichever attempt wrote them; without material the plan does not fit."""
    _die(monkeypatch, lambda: encrypt(tables, dataset, kms))
    before = {path.name: path.read_bytes() for path in sorted(dataset.glob("*/*.parquet"))}
    assert before
    encrypt(tables, dataset, kms, resume="length")
    assert {path.name: path.read_bytes() for path in sorted(dataset.glob("*/*.parquet"))} == before
    check_all_read(tables, dataset, kms, tmp_path / "out")
    other = tmp_path / "other"
    _die(monkeypatch, lambda: encrypt(tables, other, kms, key_material=None))
    encrypt(tables, other, kms, resume="length")
    check_all_read(tables, other, kms, tmp_path / "out")


def _die(monkeypatch: pytest.MonkeyPatch, job: Callable[[], object]) -> None:
    """Run a job that ends between its files and their commit."""
    with monkeypatch.context() as patch:
        patch.setattr("ags_fast.jobs.run.commit_files", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job()


# ---------------------------------------------------------------------------------------------------- keys are renewed


def materials_of(dataset: Path, kms: Any) -> dict[tuple[str, str], tuple[str, str | None]]:
    """By file and column: the master key, and which version of it has wrapped the key."""
    client = load_kms(kms)
    return {
        (path, one["column"]): (one["wrapping_key_id"], client.key_version(one["wrapped_dek"]))
        for path, entry in entries_of(dataset, kms).items()
        for one in entry.key_material or ()
    }


def test_rotations_keep_it_and_rekey_renews_it(tables: Path, sealed: Path, kms: dict[str, str], tmp_path: Path) -> None:
    before = materials_of(sealed, kms)
    assert Counter(before.values()) == {(MASTER, "1"): 3, ("hr", "1"): 3, ("finance", "1"): 3}
    rotate(sealed, kms=kms, what="kek", **QUIET)
    rotate(sealed, kms=kms, what="double-wrap", **QUIET)
    local.rotate_key(kms, MASTER)
    done = rotate(sealed, kms=kms, what="mek", **QUIET)
    left = [row for row in done.rows if row.error_class == "KeyMaterial"]
    assert [(row.src, row.status) for row in left] == [(MASTER, "skipped")]
    assert "3 data keys" in str(left[0].error)
    assert "rekey_files" in str(left[0].error)
    assert materials_of(sealed, kms) == before
    check_all_read(tables, sealed, kms, tmp_path / "out")
    local.set_state(kms, MASTER, "disabled", version=1)  # what audit advises against costs other readers, not us
    clear_cache()
    assert not verify_files(sealed, kms=kms, **QUIET).failed
    for file in Dataset.open(sealed, kms=kms).files():
        with pytest.raises(Exception, match=r"no enabled version|disabled"):
            with_pyarrow(file.url, kms)

    rekey_files(sealed, kms=kms, dek_length=24, **QUIET).raise_for_failures()
    assert Counter(materials_of(sealed, kms).values()) == {(MASTER, "2"): 3, ("hr", "1"): 3, ("finance", "1"): 3}
    assert not [row for row in rotate(sealed, kms=kms, what="mek", **QUIET).rows if row.error_class == "KeyMaterial"]
    expire(sealed, kms=kms, keep=1, skip_grace=True)
    check_all_read(tables, sealed, kms, tmp_path / "out")
    assert leftovers(sealed, kms) == []


def test_another_master_key(tables: Path, sealed: Path, kms: dict[str, str], tmp_path: Path) -> None:
    done = rotate(sealed, kms=kms, what="mek", wrapping_key_id="other", **QUIET)
    assert [row.src for row in done.rows if row.error_class == "KeyMaterial"] == [MASTER]
    assert {master for (_, column), (master, _) in materials_of(sealed, kms).items() if not column} == {MASTER}
    rekey_files(sealed, kms=kms, **QUIET).raise_for_failures()
    assert {master for (_, column), (master, _) in materials_of(sealed, kms).items() if not column} == {"other"}
    check_all_read(tables, sealed, kms, tmp_path / "out")


def test_given_and_taken_away(tables: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    encrypt(tables, dataset, kms, key_material=None)
    rekey_files(dataset, kms=kms, key_material="keytools", paths=PATHS[0], **QUIET).raise_for_failures()
    assert [f.path for f in Dataset.open(dataset, kms=kms).files() if f.key_material] == [PATHS[0]]
    rekey_files(dataset, kms=kms, key_material="keytools", **QUIET).raise_for_failures()
    check_all_read(tables, dataset, kms, tmp_path / "out")
    rekey_files(dataset, kms=kms, key_material="none", **QUIET).raise_for_failures()
    assert materials_of(dataset, kms) == {}
    assert not any(table.material for table in Access.of(dataset, kms).open().entry.files)


def test_merged_with_files_without_it(tables: Path, dataset: Path, kms: dict[str, str]) -> None:
    """Tables that are merged, compacted and rewritten lose nothing, and tell whether they hold key material."""
    encrypt(tables, dataset, kms, include="year=2024")
    before = materials_of(dataset, kms)
    encrypt(tables, dataset, kms, include="year=2025", key_material=None)
    encrypt(tables, dataset, kms, format="ags1", column_keys=None, key_material=None, include="year=2026")
    for change in (
        lambda: compact(dataset, kms=kms),
        lambda: rotate(dataset, kms=kms, what="kek", **QUIET),
        lambda: remove_files(dataset, PATHS[1], kms=kms),
        lambda: rekey_files(dataset, kms=kms, paths=PATHS[2], key_material="keytools", **QUIET),  # no Parquet file
    ):
        assert materials_of(dataset, kms) == before != {}
        assert any(table.material for table in Access.of(dataset, kms).open().entry.files)
        change()
    assert materials_of(dataset, kms) == before
    rekey_files(dataset, kms=kms, paths=PATHS[0], **QUIET).raise_for_failures()
    assert materials_of(dataset, kms).keys() == before.keys()


def test_a_leaked_kek_opens_nothing_by_it(sealed: Path, kms: dict[str, str]) -> None:
    """So a rotation of the KEK is worth what it is worth in any dataset: no file has a wrap of the old one."""
    head = Access.of(sealed, kms).open().entry
    (kek,) = (key for key in head.keys.values() if key.wrapping_key_id == MASTER)
    rotate(sealed, kms=kms, what="kek", force_expire=True, **QUIET)
    assert kek.wrapped is not None
    leaked = load_kms(kms).unwrap_key(kek.wrapped, MASTER)
    for entry in entries_of(sealed, kms).values():
        stored = [one["wrapped_dek"] for one in entry.key_material or ()]
        stored += [base64.b64decode(base64.b64encode(one)) for one in stored]
        for wrapped in stored:
            for bound in (b"", *(bound for *_, bound in entry.wraps(head.dataset_id))):
                with pytest.raises(IntegrityError):
                    Key(leaked).open(wrapped[:12], wrapped[12:], bound)


# ---------------------------------------------------------------------------------------------------- what jobs tell


def version_row(found: dict[str, Any], master: str, version: str) -> dict[str, Any]:
    rows = [row for one in found["masters"] if one["wrapping_key_id"] == master for row in one["versions"]]
    return next(row for row in rows if row["version"] == version)


def test_audit_counts_it(tables: Path, sealed: Path, kms: dict[str, str]) -> None:
    local.rotate_key(kms, MASTER)
    rotate(sealed, kms=kms, what="mek", **QUIET)
    status = key_status(sealed, kms=kms)
    assert {one["wrapping_key_id"]: one["key_material"] for one in status["masters"]} == {
        key_id: [{"version": "1", "data_keys": 3}] for key_id in (MASTER, "hr", "finance")
    }
    found = audit(sealed, kms=kms, event="planned")
    row = version_row(found, MASTER, "1")
    assert (row["may_be_destroyed"], row["keks"], row["data_keys"]) == (False, 0, [])
    assert row["key_material"] == [{"version": number, "data_keys": 3} for number in (2, 3)]
    assert "3 data keys in the key material of files of the dataset's versions 2" in row["why"]
    assert [step["function"] for step in row["first"]] == ["rekey_files", "expire"]
    names = [step["name"] for step in found["steps"]]
    assert names[-4:] == ["wrap-keks", "renew-key-material", "remove-earlier-versions", "ask-again"]
    rekey_files(sealed, kms=kms, **QUIET).raise_for_failures()
    row = version_row(audit(sealed, kms=kms), MASTER, "1")
    assert [step["function"] for step in row["first"]] == ["expire"]
    expire(sealed, kms=kms, keep=1)
    row = version_row(audit(sealed, kms=kms), MASTER, "2")
    assert {one["data_keys"] for one in row["key_material"]} == {3}
    versions = {one["wrapping_key_id"]: one["versions"] for one in audit(sealed, kms=kms)["masters"]}
    assert [one for one in versions[MASTER] if one["version"] == "1" and one["key_material"]] == []


class Told(local.LocalKms):
    """Names versions in its answers only, as Google Cloud and Azure do."""

    provider = "told"

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        wrapped = super().wrap_key(key, wrapping_key_id)
        return Wrapped.by(wrapped, local.LocalKms.key_version(self, wrapped))

    def key_version(self, wrapped: bytes) -> str | None:
        return wrapped.version if isinstance(wrapped, Wrapped) else None


def test_versions_that_only_answers_name(tables: Path, dataset: Path, kms: dict[str, str]) -> None:
    told = {name: text for name, text in kms.items() if name != "encryption.kms-type"}
    told["encryption.kms-impl"] = f"{__name__}:Told"
    local.rotate_key(kms, MASTER)
    encrypt(tables, dataset, told, column_keys=None)
    (master,) = audit(dataset, kms=told)["masters"]
    assert master["key_material"] == [{"version": "2", "data_keys": 3}]
    for rotated in (False, True):
        left = [row for row in rotate(dataset, kms=told, what="mek", **QUIET).rows if row.error_class == "KeyMaterial"]
        assert bool(left) == rotated
        local.rotate_key(kms, MASTER)


@pytest.mark.parametrize("event", ["planned", "kek-leaked", "dek-leaked", "mek-leaked"])
def test_what_events_call_for(sealed: Path, kms: dict[str, str], event: Any) -> None:
    """Files are rewritten if a master key or a data key is concerned. A KEK's leak says nothing about key material."""
    found = audit(sealed, kms=kms, event=event)
    steps = [step for step in found["steps"] if step["function"] == "rekey_files" and step["only_if"] is None]
    assert len(steps) == (event != "kek-leaked")


# ---------------------------------------------------------------------------------------------------- and by attackers


def test_changed_material_is_found(sealed: Path, kms: dict[str, str]) -> None:
    """No tag covers the footer key's metadata, so only the manifest tells."""
    entry = entries_of(sealed, kms)[PATHS[0]]
    path = sealed / entry.file
    good = path.read_bytes()
    at = good.index(b'"wrappedDEK":"') + 20
    assert good.count(b'"wrappedDEK":"') == 1  # those of the columns are under the footer's seal
    path.write_bytes(flip(good, 8 * at))
    failed = verify_files(sealed, kms=kms, **QUIET).failed
    assert [row.error_class for row in failed] == ["IntegrityError"]
    assert "key material" in str(failed[0].error)
    assert rows_of(pq.ParquetFile(Dataset.open(sealed, kms=kms).open_file(PATHS[0])).read())  # it does not need it


def test_a_file_in_the_place_of_another(sealed: Path, kms: dict[str, str]) -> None:
    """Others cannot tell, as the docs say. ags_fast can."""
    one, other = (entries_of(sealed, kms)[path] for path in PATHS[:2])
    (sealed / one.file).write_bytes((sealed / other.file).read_bytes())
    assert rows_of(with_pyarrow(str(sealed / one.file), kms)) == rows_of(with_pyarrow(str(sealed / other.file), kms))
    assert [row.error_class for row in verify_files(sealed, kms=kms, **QUIET).failed] == ["IntegrityError"]
    with pytest.raises(IntegrityError):
        Dataset.open(sealed, kms=kms).open_file(PATHS[0])


def test_a_data_key_never_passes_for_a_kek(sealed: Path, kms: dict[str, str], tmp_path: Path) -> None:
    """Anyone who knows one data key has, in the file, what the KMS made of it: that must not seal a version."""
    head = Access.of(sealed, kms).open().entry
    (footer, *_) = entries_of(sealed, kms)[PATHS[0]].key_material or ()
    forged = new_kek(kms, MASTER).replace(wrapped=footer["wrapped_dek"])
    path = max((sealed / "_ags/log").glob("*/*"))
    theirs = Envelope(load_kms(kms), {forged.key_id: forged}, kek_lengths=(16,))
    at = str(path.relative_to(sealed))
    body = json.loads(path.read_bytes().splitlines()[1])
    body |= {"keys": {forged.key_id: msgspec.to_builtins(forged)}, "sealer": forged.key_id}
    path.write_bytes(documents.seal(theirs, forged, head.dataset_id, at, body))
    clear_cache()
    with pytest.raises(IntegrityError, match="16 bytes"):
        Access.of(sealed, kms).open()


def test_lengths_of_data_keys(tables: Path, sealed: Path, kms: dict[str, str], tmp_path: Path) -> None:
    """None is as long as a KEK."""
    with pytest.raises(ValueError, match="16 or 24 bytes"):
        encrypt(tables, tmp_path / "other", kms, dek_length=32)
    with pytest.raises(ValueError, match="16 or 24 bytes"):
        rekey_files(sealed, kms=kms, dek_length=32, **QUIET)
    with pytest.raises(ValueError, match="16 or 24 bytes"):
        Dataset.open(sealed, kms=kms).transaction(dek_length=32, key_material="keytools")


def test_refusals(tables: Path, dataset: Path, kms: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="'keytools' or None"):
        encrypt(tables, dataset, kms, key_material="pkmt1")
    with pytest.raises(ValueError, match="format='parquet'"):
        encrypt(tables, dataset, kms, format="ags1", column_keys=None)
    assert not dataset.exists()
    encrypt(tables, dataset, kms)
    with pytest.raises(ValueError, match="'none' or None"):
        rekey_files(dataset, kms=kms, key_material="other", **QUIET)  # type: ignore[arg-type]


def test_wraps_that_do_not_open_are_not_used(
    tables: Path, dataset: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As elsewhere, the first wrap of each master key is tried before anything depends on it."""
    Dataset.create(dataset, kms=kms, wrapping_key_id=MASTER)
    real = Envelope.wrap_bare
    client = type(load_kms(kms))
    wrap = client.wrap_key

    def bad(self: Envelope, key_id: str, dek: bytes) -> tuple[str, bytes]:
        monkeypatch.setattr(client, "wrap_key", lambda self, key, key_id: wrap(self, bytes(len(key)), key_id))
        try:
            return real(self, key_id, dek)
        finally:
            monkeypatch.setattr(client, "wrap_key", wrap)

    monkeypatch.setattr(Envelope, "wrap_bare", bad)
    with pytest.raises(IntegrityError, match="does not open again"):
        encrypt(tables, dataset, kms)


# ---------------------------------------------------------------------------------------------------- from a shell


def test_commands(
    tables: Path, dataset: Path, kms: dict[str, str], capsys: pytest.CaptureFixture[str], without_workers: None
) -> None:
    keystore = ["--keystore", kms["kms.local.path"], "--key-file", kms["kms.local.key-file"]]
    master = ["--wrapping-key-id", MASTER]
    common = [*keystore, "--no-fsync"]
    options = [*master, "--format", "parquet", "--key-material", "keytools", "--json"]
    assert cli.main(["encrypt", str(tables), str(dataset), *options, *common]) == 0
    capsys.readouterr()
    assert cli.main(["ls", str(dataset), "--json", *keystore]) == 0
    assert {file["key_material"] for file in json.loads(capsys.readouterr().out)["files"]} == {"keytools"}
    assert cli.main(["keys", "status", str(dataset), *keystore]) == 0
    assert "version 1: in the key material of files: 3 data keys" in capsys.readouterr().out
    assert cli.main(["keys", "audit", str(dataset), "--event", "planned", *keystore]) == 0
    assert f"ags-fast rekey {dataset}" in capsys.readouterr().out
    assert cli.main(["rekey", str(dataset), "--key-material", "none", *common]) == 0
    assert materials_of(dataset, kms) == {}


# ---------------------------------------------------------------------------------------------------- Spark


@pytest.mark.more
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_spark_reads(tables: Path, dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    """Spark encrypts; Spark's own reader reads what it is given by name, with the class that the tour compiles."""
    from benchmarks.tour.parquet import jvm_classes  # in the source tree only

    classes = jvm_classes()
    if classes is None or not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        pytest.skip("no JVM can compile and run the KMS client here")
    call = program(
        programs.spark.keytools,
        str(tables),
        str(dataset),
        kms,
        without(kms, "hr", tmp_path),
        COLUMNS,
        str(classes),
        str(tmp_path / "out"),
    )
    found = json.loads(run_python(call, timeout=240, **spark_env()).splitlines()[-1])
    for n, path in enumerate(PATHS):
        (read,) = (tmp_path / "out" / str(n)).glob("*.parquet")
        assert rows(read) == rows(tables / path), path
    assert found["by_year"] == [["2024", 300], ["2025", 300], ["2026", 300]]
    assert found["filtered"] == 3
    assert found["without hr"] == 900
    assert "KeyAccessDenied" in found["text without hr"] or "encrypted column" in found["text without hr"]
    assert found["folder after rekey"] == 1800  # of two versions: why files are named
    assert found["after rekey"] == 900
    assert found["after an attack"] == 900  # files in others' places, and a plaintext file: only we notice
    assert found["verified"] == ["failed", "ok", "failed"]
