"""Rotations of keys, one at a time: what they change and what they leave, what they ask of the KMS, to the call, and
what can be opened afterwards by whom."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections import Counter
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from datasets import HERE, MASTER, decrypted, leftovers, make_kms, read_tree, write_tree
from support import pattern

from ags_fast import Dataset, KeyAccessError, PolicyError, encrypted_length
from ags_fast.dataset import tables as sealed_tables
from ags_fast.dataset.access import Access
from ags_fast.dataset.change import Wish
from ags_fast.dataset.entries import FileEntry
from ags_fast.dataset.entry import main_key
from ags_fast.dataset.job import Job
from ags_fast.dataset.kinds import Want
from ags_fast.jobs import (
    Policy,
    decrypt_files,
    encrypt_files,
    expire,
    rekey_files,
    rotate,
    rotation,
    run,
    set_policy,
    sweep,
    verify_files,
)
from ags_fast.keys import clear_cache, kms_calls, load_kms
from ags_fast.keys.envelope import binding
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ags_fast.dataset.snapshot import Snapshot
    from ags_fast.jobs import JobResult
    from ags_fast.keys import KmsClient
    from ags_fast.keys.entry import KeyEntry

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TREE = {f"{n % 2}/{n}": pattern(300 * n, n) for n in range(6)}
MORE = {f"more/{n}": pattern(200 * n, n) for n in range(2)}
QUIET: dict[str, Any] = {"engine": HERE, "progress": False}
COLD_OPEN = Counter(unwrap=1)  # to see that the key store is authentic, which is asked of each process once


class Rewrapping(local.LocalKms):
    """A keystore that wraps anew without giving the key away, as AWS and Vault do."""

    def rewrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return self.wrap_key(self.unwrap_key(wrapped, wrapping_key_id), wrapping_key_id)


class Bulky(local.LocalKms):
    """A keystore whose wrapped keys are large, as those that carry certificates or policies."""

    NBYTES = 50_000

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        return super().wrap_key(key, wrapping_key_id) + os.urandom(self.NBYTES)

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return super().unwrap_key(wrapped[: -self.NBYTES] or wrapped, wrapping_key_id)  # or a plain keystore's


class Failing(local.LocalKms):
    """A keystore that refuses after so many calls."""

    def __init__(self, properties: dict[str, str], after: int) -> None:
        super().__init__()
        self.initialize(properties)
        self.left = after

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyAccessError("the tests refuse it")

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        self._count()
        return super().wrap_key(key, wrapping_key_id)

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        self._count()
        return super().unwrap_key(wrapped, wrapping_key_id)


def client(kind: type[local.LocalKms], properties: dict[str, str]) -> KmsClient:
    made = kind()
    made.initialize(properties)
    return made


@contextmanager
def asked() -> Iterator[Counter[str]]:
    """What the KMS is asked within, by kind of call."""
    before = kms_calls()
    counts: Counter[str] = Counter()
    yield counts
    for (_, operation), count in (kms_calls() - before).items():
        counts[operation] += count


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return make_kms(tmp_path, keys=(MASTER, "other", "third", "hr"))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return tmp_path / "dataset"


@pytest.fixture(params=["warm", "cold"])
def cold(request: pytest.FixtureRequest) -> bool:
    """Whether the process that rotates has not opened the dataset before."""
    return bool(request.param == "cold")


def encrypt(dataset: Path, kms: Any, tree: dict[str, bytes] = TREE, master: str = MASTER, **options: Any) -> JobResult:
    src = write_tree(dataset.parent / f"src {len(tree)} {min(tree).replace('/', ' ')}", tree)
    options = {**QUIET, "fsync": False, "block_size": 4096, **options}
    result = encrypt_files(src, dataset, kms=kms, wrapping_key_id=master, **options)
    result.raise_for_failures()
    return result


def turned(dataset: Path, kms: Any, what: Any = "kek", **options: Any) -> JobResult:
    result = rotate(dataset, kms=kms, what=what, progress=False, **options)
    result.raise_for_failures()
    return result


def opened(dataset: Path, kms: Any, version: int | None = None) -> Snapshot:
    return Access.of(dataset, kms, version=version).open()


def keys(dataset: Path, kms: Any, state: str | None = None) -> dict[str, KeyEntry]:
    return {key_id: key for key_id, key in opened(dataset, kms).entry.keys.items() if state in (None, key.state)}


def entries(dataset: Path, kms: Any, version: int | None = None) -> dict[str, FileEntry]:
    return {row.path: row for row in opened(dataset, kms, version).files()}


def numbers(dataset: Path, kms: Any) -> list[int]:
    """The versions that are kept, the oldest first."""
    log, head = opened(dataset, kms)
    return [entry.number for entry in reversed(log.kept(head))]


def data(dataset: Path) -> dict[str, bytes]:
    """The encrypted files."""
    return {path: content for path, content in read_tree(dataset).items() if not path.startswith("_ags/")}


def documents(dataset: Path, *folders: str) -> dict[str, dict[str, Any]]:
    """The header of each document: entries of the log, and plans."""
    folders = folders or ("_ags/log/", "_ags/plans/")
    found = {path: content for path, content in read_tree(dataset).items() if path.startswith(folders)}
    return {path: json.loads(content.splitlines()[0]) for path, content in sorted(found.items()) if content}


def log_entries(dataset: Path) -> list[str]:
    return list(documents(dataset, "_ags/log/"))


def raw_kek(kms: Any, entry: KeyEntry) -> AESGCM:
    """A KEK as somebody has it who has stolen it."""
    assert entry.wrapped is not None
    return AESGCM(load_kms(kms).unwrap_key(entry.wrapped, entry.wrapping_key_id))


def opens(kek: AESGCM, wrapped: bytes, bound: bytes) -> bool:
    try:
        kek.decrypt(wrapped[:12], wrapped[12:], bound)
    except (InvalidTag, ValueError):
        return False
    return True


def opened_by(kek: AESGCM, dataset: Path, kms: Any) -> Counter[str]:
    """What of a dataset a KEK opens: keys of files and columns, of tables, of documents; and what it does not."""
    (log, head), counts = opened(dataset, kms), Counter[str]()
    for table in {table.path: table for version in log.kept(head) for table in version.files}.values():
        bound = binding(head.dataset_id, "table", table.path)
        counts["table" if opens(kek, table.wrapped, bound) else "closed"] += 1
        for row in log.tables.rows(table, log.envelope(head)):
            for _, wrapped, bound in row.wraps(head.dataset_id):
                counts["dek" if opens(kek, wrapped, bound) else "closed"] += 1
    for path, header in documents(dataset).items():
        bound = binding(head.dataset_id, "document", path)
        counts["document" if opens(kek, base64.b64decode(header["wrapped"]), bound) else "closed"] += 1
    return counts


def without_keys(entry: FileEntry) -> FileEntry:
    """What a rotation must leave as it is."""
    columns = entry.column_keys and tuple({"column": key["column"]} for key in entry.column_keys)
    return entry._replace(key_id="", wrapped_dek=b"", column_keys=columns)


# ---------------------------------------------------------------------------------------------- R3: the master key


@pytest.mark.parametrize("rewraps", [False, True], ids=["local", "rewraps"])
def test_master_key(kms: dict[str, str], dataset: Path, cold: bool, rewraps: bool) -> None:
    encrypt(dataset, kms, policy=Policy(kek_scope="partition"))
    encrypt(dataset, kms, MORE)
    before, count = read_tree(dataset), len(keys(dataset, kms))
    assert count == 4  # the dataset's own, and one for each folder
    local.rotate_key(kms, MASTER)
    used = client(Rewrapping, kms) if rewraps else load_kms(kms)
    opened(dataset, used)
    if cold:
        clear_cache()
    with asked() as calls:
        result = turned(dataset, used, "mek")
    assert calls == (COLD_OPEN if cold else Counter()) + (
        Counter(rewrap=count, unwrap=count) if rewraps else Counter(unwrap=2 * count, wrap=count)
    )
    assert result.version == 4
    assert result.counts == {"ok": 4, "skipped": 0, "failed": 0}
    assert {row.format for row in result.rows} == {"key"}
    after = read_tree(dataset)
    new = after.keys() - before.keys()
    assert {path: content for path, content in after.items() if path not in new} == before
    assert new == {log_entries(dataset)[-1]}
    with asked() as calls:
        again = turned(dataset, used, "mek")
    assert not calls
    assert again.counts == {"ok": 0, "skipped": 4, "failed": 0}
    assert {row.error_class for row in again.rows} == {"Current"}
    assert read_tree(dataset) == after

    # Now the old version may be destroyed: versions, old and new, are as they were.
    local.set_state(kms, MASTER, "destroyed", version=1)
    clear_cache()
    assert decrypted(dataset, kms) == TREE | MORE
    assert decrypted(dataset, kms, version=2) == TREE
    # Who has but the keys of before has nothing.
    for path in new:
        (dataset / path).unlink()
    with pytest.raises(KeyAccessError, match=f"version 1 of the local key '{MASTER}' was destroyed"):
        opened(dataset, kms)


def test_master_key_before_it_was_rotated(kms: dict[str, str], dataset: Path) -> None:
    encrypt(dataset, kms)
    before = read_tree(dataset)
    with asked() as calls:
        assert turned(dataset, kms, "mek").counts == {"ok": 0, "skipped": 1, "failed": 0}
    assert not calls
    assert read_tree(dataset) == before


@pytest.mark.parametrize("rewraps", [False, True], ids=["local", "rewraps"])
def test_to_another_master_key(kms: dict[str, str], dataset: Path, rewraps: bool) -> None:
    """Another id in the same KMS: nothing that rewraps can do."""
    encrypt(dataset, kms, policy=Policy(kek_scope="partition"))
    files = data(dataset)
    used = client(Rewrapping, kms) if rewraps else load_kms(kms)
    opened(dataset, used)
    with asked() as calls:
        assert turned(dataset, used, "mek", wrapping_key_id="other").counts["ok"] == 3
    assert calls == Counter(unwrap=6, wrap=3)  # each new wrap is tried
    assert {entry.wrapping_key_id for entry in keys(dataset, kms).values()} == {"other"}
    local.set_state(kms, MASTER, "destroyed")
    clear_cache()
    assert decrypted(dataset, kms) == TREE
    assert data(dataset) == files
    encrypt(dataset, kms, MORE, master="other")
    with asked() as calls:
        assert turned(dataset, used, "mek", wrapping_key_id="other").counts == {"ok": 0, "skipped": 4, "failed": 0}
    assert not calls


def test_to_another_kms(tmp_path: Path, kms: dict[str, str], dataset: Path, cold: bool) -> None:
    encrypt(dataset, kms, policy=Policy(kek_scope="partition"))
    files = data(dataset)
    there = make_kms(tmp_path, name="there", keys=("third",))
    opened(dataset, kms)
    if cold:
        clear_cache()
    with asked() as calls:
        turned(dataset, kms, "mek", new_kms=there, wrapping_key_id="third")
    assert calls == (COLD_OPEN if cold else Counter()) + Counter(unwrap=6, wrap=3)
    Path(kms["kms.local.path"]).unlink()
    clear_cache()
    assert decrypted(dataset, there) == TREE
    assert data(dataset) == files
    encrypt(dataset, there, MORE, master="third")
    turned(dataset, there)
    assert expire(dataset, kms=there, keep=1, skip_grace=True).failed == []
    assert decrypted(dataset, there) == TREE | MORE
    assert leftovers(dataset, there) == []


def test_what_the_kms_wraps_itself_cannot_be_moved(tmp_path: Path, kms: dict[str, str], dataset: Path) -> None:
    encrypt(dataset, kms, double_wrap=False)
    before = read_tree(dataset)
    for options in ({"wrapping_key_id": "other"}, {"new_kms": make_kms(tmp_path, name="there")}):
        with pytest.raises(PolicyError, match=r"wraps 6 data keys.*double-wrap"):
            rotate(dataset, kms=kms, what="mek", **options)
    assert read_tree(dataset) == before


# ---------------------------------------------------------------------------------------------- R2: KEKs


def test_kek(kms: dict[str, str], dataset: Path, cold: bool) -> None:
    encrypt(dataset, kms)
    (old,) = keys(dataset, kms).values()
    stolen = raw_kek(kms, old)
    assert opened_by(stolen, dataset, kms) == {"dek": len(TREE), "table": 1, "document": 2}
    before, was = read_tree(dataset), entries(dataset, kms)
    if cold:
        clear_cache()
    with asked() as calls:
        result = turned(dataset, kms)
    # That one unwrap has also got the old KEK.
    assert calls == (COLD_OPEN if cold else Counter()) + Counter(wrap=1, unwrap=1)
    (new,) = keys(dataset, kms, "active").values()
    assert [(row.format, row.src, row.dst) for row in result.rows if row.format == "key"] == [
        ("key", old.key_id, new.key_id)
    ]
    assert result.version == 3
    assert result.counts == {"ok": 2, "skipped": 0, "failed": 0}
    now = entries(dataset, kms)
    assert {path: without_keys(entry) for path, entry in now.items()} == {
        path: without_keys(entry) for path, entry in was.items()
    }
    assert {entry.key_id for entry in now.values()} == {new.key_id}
    assert entries(dataset, kms, version=2) == was
    after = read_tree(dataset)
    assert {path: after[path] for path in before} == before
    assert leftovers(dataset, kms) == []

    # The past can be read, and whoever writes takes the new key.
    clear_cache()
    assert decrypted(dataset, kms) == decrypted(dataset, kms, version=2) == TREE
    encrypt(dataset, kms, MORE)
    assert {entry.key_id for entry in entries(dataset, kms).values()} == {new.key_id}
    turned_again = keys(dataset, kms)[old.key_id]
    assert turned_again.state == "retired"
    assert opened_by(stolen, dataset, kms)["dek"] == len(TREE)

    # After the past is gone the old KEK opens nothing.
    done = expire(dataset, kms=kms, keep=1, skip_grace=True)
    assert old.key_id in {row.key_id for row in done.rows if row.format == "key" and row.status == "ok"}
    assert keys(dataset, kms).keys() == {new.key_id}
    found = opened_by(stolen, dataset, kms)
    assert found.keys() == {"closed"}
    assert found["closed"] >= len(TREE | MORE)
    assert opened_by(raw_kek(kms, keys(dataset, kms)[new.key_id]), dataset, kms)["dek"] == len(TREE | MORE)
    assert {path: content for path, content in data(dataset).items() if path in before} == {
        path: content for path, content in before.items() if not path.startswith("_ags/")
    }
    clear_cache()
    assert decrypted(dataset, kms) == TREE | MORE
    assert leftovers(dataset, kms) == []


def test_kek_by_scope(kms: dict[str, str], dataset: Path, cold: bool) -> None:
    """A wrap and an unwrap for each new KEK, at most an unwrap for each old one, also those that retired before."""
    encrypt(dataset, kms, policy=Policy(kek_scope="partition"))
    scopes = {entry.properties.get("scope") for entry in keys(dataset, kms).values()}
    assert scopes == {None, "partition:0", "partition:1"}
    if cold:
        clear_cache()
    with asked() as calls:
        turned(dataset, kms)
    assert calls == Counter(wrap=3, unwrap=3) + (Counter(unwrap=3) if cold else Counter())
    active = keys(dataset, kms, "active")
    assert {entry.properties.get("scope") for entry in active.values()} == scopes
    assert len(active) == 3
    for path, entry in entries(dataset, kms).items():
        assert active[entry.key_id].properties["scope"] == f"partition:{path[0]}"
    assert expire(dataset, kms=kms, keep=1, skip_grace=True).failed == []
    assert keys(dataset, kms) == active
    clear_cache()
    assert decrypted(dataset, kms) == TREE


def test_kek_under_another_master_key(kms: dict[str, str], dataset: Path) -> None:
    encrypt(dataset, kms)
    with asked() as calls:
        turned(dataset, kms, wrapping_key_id="other")
    assert calls == Counter(wrap=2, unwrap=3)  # the retired KEK moves, too
    assert main_key(opened(dataset, kms).entry.keys).wrapping_key_id == "other"
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    local.set_state(kms, MASTER, "destroyed")
    clear_cache()
    assert decrypted(dataset, kms) == TREE


def test_again_and_again(kms: dict[str, str], dataset: Path) -> None:
    """Every version can be read, each under its own KEK, until they expire."""
    encrypt(dataset, kms)
    for n in range(4):
        turned(dataset, kms)
        encrypt(dataset, kms, {f"then/{n}": b"%d" % n})
    clear_cache()
    for number in numbers(dataset, kms)[1:]:
        assert TREE.items() <= decrypted(dataset, kms, version=number).items()
    assert {entry.state for entry in keys(dataset, kms).values()} == {"active", "retired"}
    assert len(keys(dataset, kms)) == 5
    assert len(keys(dataset, kms, "active")) == 1
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    assert len(keys(dataset, kms)) == 1
    assert len(decrypted(dataset, kms)) == len(TREE) + 4


def test_an_empty_dataset(kms: dict[str, str], dataset: Path) -> None:
    Dataset.create(dataset, kms=kms, wrapping_key_id=MASTER)
    (old,) = keys(dataset, kms)
    turned(dataset, kms)
    turned(dataset, kms, "mek")
    assert keys(dataset, kms)[old].state == "retired"
    encrypt(dataset, kms)
    assert expire(dataset, kms=kms, keep=1, skip_grace=True).counts["ok"] > 0
    assert old not in keys(dataset, kms)
    assert decrypted(dataset, kms) == TREE
    assert leftovers(dataset, kms) == []


# ---------------------------------------------------------------------------------------------- R1, and to double wrap


@pytest.mark.parametrize("rewraps", [False, True], ids=["local", "rewraps"])
def test_single_wrap(kms: dict[str, str], dataset: Path, cold: bool, rewraps: bool) -> None:
    encrypt(dataset, kms, double_wrap=False)
    local.rotate_key(kms, MASTER)
    files = data(dataset)
    used = client(Rewrapping, kms) if rewraps else load_kms(kms)
    was = entries(dataset, used)
    if cold:
        clear_cache()
    with asked() as calls:
        result = turned(dataset, used)
    count = len(TREE)
    assert calls == (COLD_OPEN if cold else Counter()) + (
        # One wrap is tried. The KEK of the documents is wrapped again, too.
        Counter(rewrap=count + 1, unwrap=2) if rewraps else Counter(unwrap=count + 1 + 2, wrap=count + 1)
    )
    assert result.version == 3
    now = entries(dataset, used)
    assert {used.key_version(entry.wrapped_dek) for entry in now.values()} == {"2"}
    assert [without_keys(entry) for entry in now.values()] == [without_keys(entry) for entry in was.values()]
    assert data(dataset) == files
    assert leftovers(dataset, kms) == []
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    local.set_state(kms, MASTER, "destroyed", version=1)
    clear_cache()
    assert decrypted(dataset, kms) == TREE


@pytest.mark.parametrize("concurrency", [1, 4])
def test_single_wrap_under_another_master_key(kms: dict[str, str], dataset: Path, concurrency: int) -> None:
    encrypt(dataset, kms, double_wrap=False)
    used = client(Rewrapping, kms)
    entries(dataset, used)
    with asked() as calls:
        turned(dataset, used, wrapping_key_id="other", concurrency=concurrency)
    # One wrap is tried. The documents move with it: they get a new KEK, and the retired one is wrapped again.
    assert calls == Counter(unwrap=6, wrap=6) + Counter(unwrap=1) + Counter(unwrap=1, wrap=1) + Counter(
        unwrap=2, wrap=1
    )
    assert {keys(dataset, kms)[entry.key_id].wrapping_key_id for entry in entries(dataset, kms).values()} == {"other"}
    assert decrypted(dataset, kms) == TREE


def test_single_wrap_leaves_a_master_key_for_good(kms: dict[str, str], dataset: Path) -> None:
    encrypt(dataset, kms, double_wrap=False)
    turned(dataset, kms, wrapping_key_id="other")
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    local.set_state(kms, MASTER, "destroyed")
    clear_cache()
    assert decrypted(dataset, kms) == TREE
    turned(dataset, kms, wrapping_key_id="third")
    assert {entry.wrapping_key_id for entry in keys(dataset, kms, "active").values()} == {"third"}


@pytest.mark.parametrize("rewraps", [False, True], ids=["local", "rewraps"])
def test_from_single_to_double_wrap(kms: dict[str, str], dataset: Path, cold: bool, rewraps: bool) -> None:
    encrypt(dataset, kms, double_wrap=False)
    files = data(dataset)
    used = client(Rewrapping, kms) if rewraps else load_kms(kms)
    entries(dataset, used)
    if cold:
        clear_cache()
    with asked() as calls:
        turned(dataset, used, "double-wrap")
    assert calls == (COLD_OPEN if cold else Counter()) + Counter(unwrap=len(TREE) + 1, wrap=1)
    (kek,) = keys(dataset, kms, "active").values()
    assert kek.double_wrap
    assert {entry.key_id for entry in entries(dataset, kms).values()} == {kek.key_id}
    assert opened_by(raw_kek(kms, kek), dataset, kms)["dek"] == len(TREE)
    before = read_tree(dataset)
    with asked() as calls:
        assert turned(dataset, used, "double-wrap").counts == {"ok": 0, "skipped": 0, "failed": 0}
    assert not calls
    assert read_tree(dataset) == before
    clear_cache()
    assert decrypted(dataset, kms) == TREE
    assert data(dataset) == files
    with asked() as calls:
        clear_cache()
        turned(dataset, used)  # from here on it is cheap
    assert calls == Counter(unwrap=2, wrap=1)


def test_both_wraps_in_one_dataset(kms: dict[str, str], dataset: Path) -> None:
    encrypt(dataset, kms, double_wrap=False)
    encrypt(dataset, kms, MORE)
    with asked() as calls:
        turned(dataset, kms)
    assert calls == Counter(unwrap=6, wrap=7) + Counter(unwrap=2)  # a wrap of each key is tried
    assert decrypted(dataset, kms) == TREE | MORE
    with asked() as calls:
        turned(dataset, kms, "double-wrap")
    assert calls == Counter(unwrap=7, wrap=1)
    assert decrypted(dataset, kms) == TREE | MORE
    assert leftovers(dataset, kms) == []


# ---------------------------------------------------------------------------------------------- keys of columns


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Parquet files with a column of their own master key."""
    folder = tmp_path / "tables"
    folder.mkdir()
    for n in range(3):
        pq.write_table(pa.table({"id": range(n, 9), "pay": [i * 10.0 for i in range(n, 9)]}), folder / f"{n}.parquet")
    return folder


def protect(tables: Path, dataset: Path, kms: Any, **options: Any) -> None:
    options = {
        **QUIET,
        "format": "parquet",
        "column_keys": {"pay": "hr"},
        "wrapping_key_id": MASTER,
        **options,
    }
    encrypt_files(tables, dataset, kms=kms, **options).raise_for_failures()


def check_tables(tables: Path, dataset: Path, kms: Any, **options: Any) -> None:
    """What the dataset decrypts to has the rows of the sources."""
    out = dataset.with_name("out")
    shutil.rmtree(out, ignore_errors=True)
    clear_cache()
    decrypt_files(dataset, out, kms=kms, fsync=False, **QUIET, **options).raise_for_failures()
    for path in tables.iterdir():
        assert pq.read_table(out / path.name).equals(pq.read_table(path))


def test_keks_of_columns(kms: dict[str, str], dataset: Path, tables: Path, cold: bool) -> None:
    """Each has a successor of its kind, under its own master key."""
    protect(tables, dataset, kms)
    files, was = data(dataset), entries(dataset, kms)
    stolen = [raw_kek(kms, entry) for entry in keys(dataset, kms).values()]
    if cold:
        clear_cache()
    with asked() as calls:
        turned(dataset, kms)
    assert calls == Counter(wrap=2, unwrap=2) + (Counter(unwrap=2) if cold else Counter())
    active = keys(dataset, kms, "active")
    assert sorted((e.wrapping_key_id, e.properties.get("use")) for e in active.values()) == [
        ("hr", "columns"),
        (MASTER, None),
    ]
    for path, entry in entries(dataset, kms).items():
        assert without_keys(entry) == without_keys(was[path])
        assert entry.column_keys is not None
        assert active[entry.key_id].wrapping_key_id == MASTER
        assert [active[key["key_id"]].wrapping_key_id for key in entry.column_keys] == ["hr"]
    check_tables(tables, dataset, kms)
    check_tables(tables, dataset, kms, version=2)
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    for kek in stolen:
        assert opened_by(kek, dataset, kms).keys() == {"closed"}
    assert data(dataset) == files
    assert leftovers(dataset, kms) == []
    check_tables(tables, dataset, kms)


def test_only_the_keks_of_a_column(kms: dict[str, str], dataset: Path, tables: Path) -> None:
    protect(tables, dataset, kms)
    was = entries(dataset, kms)
    with asked() as calls:
        turned(dataset, kms, from_key_id="hr", wrapping_key_id="other")
    assert calls == Counter(wrap=2, unwrap=3)  # the retired KEK moves, too
    for path, entry in entries(dataset, kms).items():
        assert (entry.key_id, entry.wrapped_dek) == (was[path].key_id, was[path].wrapped_dek)
    assert {entry.wrapping_key_id for entry in keys(dataset, kms, "active").values()} == {MASTER, "other"}
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    local.set_state(kms, "hr", "destroyed")
    check_tables(tables, dataset, kms)


def test_single_wrap_of_columns(kms: dict[str, str], dataset: Path, tables: Path) -> None:
    protect(tables, dataset, kms, double_wrap=False)
    with asked() as calls:
        turned(dataset, kms)
    assert calls == Counter(unwrap=8, wrap=6)  # a key for each file and one for its column; of each kind one is tried
    check_tables(tables, dataset, kms)
    with asked() as calls:
        turned(dataset, kms, "double-wrap")
    assert calls == Counter(unwrap=8, wrap=2)  # columns are still another master key's
    check_tables(tables, dataset, kms)
    assert {(e.wrapping_key_id, e.double_wrap) for e in keys(dataset, kms, "active").values()} == {
        (MASTER, True),
        ("hr", True),
    }


def test_master_keys_of_columns(tmp_path: Path, kms: dict[str, str], dataset: Path, tables: Path) -> None:
    protect(tables, dataset, kms)
    for master in (MASTER, "hr"):
        local.rotate_key(kms, master)
    with asked() as calls:
        assert turned(dataset, kms, "mek", from_key_id="hr").counts["ok"] == 1
    assert calls == Counter(unwrap=2, wrap=1)
    with asked() as calls:
        assert turned(dataset, kms, "mek").counts == {"ok": 1, "skipped": 1, "failed": 0}
    assert calls == Counter(unwrap=2, wrap=1)
    for master in (MASTER, "hr"):
        local.set_state(kms, master, "destroyed", version=1)
    check_tables(tables, dataset, kms)
    turned(dataset, kms, "mek", wrapping_key_id="third")  # the dataset's own, and not the column's
    assert {entry.wrapping_key_id for entry in keys(dataset, kms).values()} == {"third", "hr"}
    there = make_kms(tmp_path, name="there", keys=("third", "hr"))
    turned(dataset, kms, "mek", new_kms=there)
    Path(kms["kms.local.path"]).unlink()
    check_tables(tables, dataset, there)


# ---------------------------------------------------------------------------------------------- expire


def removed(result: JobResult, dataset: Path) -> dict[str, set[str]]:
    """What a run has removed, by its kind: paths in the dataset, and ids of keys."""
    found: dict[str, set[str]] = {}
    for row in result.rows:
        if row.status == "ok":
            found.setdefault(row.format or "", set()).add(row.src.removeprefix(f"{dataset}/"))
    return found


def test_what_is_removed(kms: dict[str, str], dataset: Path) -> None:
    """All that only old versions had, to the object; each has a row."""
    encrypt(dataset, kms)
    was = entries(dataset, kms)
    rekey_files(dataset, kms=kms, paths="0/*", **QUIET).raise_for_failures()
    encrypt(dataset, kms, MORE)
    turned(dataset, kms)
    (old,) = keys(dataset, kms, "retired")
    log, head = opened(dataset, kms)
    tables = {table.path for version in log.kept(head) for table in version.files}
    before = read_tree(dataset)
    with asked() as calls:
        done = expire(dataset, kms=kms, keep=1, skip_grace=True)
    assert not calls
    after = read_tree(dataset)
    assert removed(done, dataset) == {
        "version": {path for path in before if path.startswith("_ags/log/")} - set(log_entries(dataset)),
        "table": tables - {table.path for table in head.files},
        "file": {row.file for path, row in was.items() if path.startswith("0/")},
        "key": {old},
    }
    gone = set().union(*(paths for kind, paths in removed(done, dataset).items() if kind != "key"))
    assert before.keys() - after.keys() == gone
    assert leftovers(dataset, kms) == []
    assert not log.plans()
    clear_cache()
    assert decrypted(dataset, kms) == TREE | MORE
    assert verify_files(dataset, kms=kms, **QUIET).counts == {"ok": 8, "skipped": 0, "failed": 0}
    assert expire(dataset, kms=kms, keep=1, skip_grace=True).rows == []
    assert read_tree(dataset) == after


def test_what_would_be_removed(kms: dict[str, str], dataset: Path) -> None:
    encrypt(dataset, kms)
    rekey_files(dataset, kms=kms, paths="0/*", **QUIET).raise_for_failures()
    turned(dataset, kms)
    before = read_tree(dataset)
    planned = [
        row._replace(status="ok") for row in expire(dataset, kms=kms, keep=1, skip_grace=True, dry_run=True).rows
    ]
    assert read_tree(dataset) == before
    done = expire(dataset, kms=kms, keep=1, skip_grace=True)
    for kind in ("version", "table", "file", "key"):
        assert {row.src for row in planned if row.format == kind} == {
            row.src for row in done.rows if row.format == kind
        }


def test_what_is_kept(kms: dict[str, str], dataset: Path) -> None:
    encrypt(dataset, kms)
    for n in range(4):
        encrypt(dataset, kms, {f"then/{n}": b"%d" % n})

    assert expire(dataset, kms=kms, keep=9).version == 6
    assert numbers(dataset, kms) == [1, 2, 3, 4, 5, 6]
    expire(dataset, kms=kms, keep=1, older_than=timedelta(days=1))  # none is so old
    assert numbers(dataset, kms) == [1, 2, 3, 4, 5, 6]
    expire(dataset, kms=kms, keep=3)
    assert numbers(dataset, kms) == [4, 5, 6, 7]  # and the expiry itself, which changes no file
    expire(dataset, kms=kms, keep=2, older_than=timedelta(0))
    assert numbers(dataset, kms) == [5, 6, 7, 8]
    expire(dataset, kms=kms, keep=1)
    assert numbers(dataset, kms) == [6, 7, 8, 9]
    assert len(decrypted(dataset, kms)) == len(TREE) + 4
    assert leftovers(dataset, kms) == []


def test_grace(kms: dict[str, str], dataset: Path) -> None:
    """A retired KEK that nothing needs stays for writers that know no other, unless it is forced."""
    encrypt(dataset, kms)
    (old,) = keys(dataset, kms)
    turned(dataset, kms, grace=timedelta(days=3))
    rows = expire(dataset, kms=kms, keep=2).rows
    assert [(row.status, row.error_class) for row in rows if row.key_id == old] == [("skipped", "InUse")]
    assert "version 2" in next(row.error for row in rows if row.key_id == old)  # type: ignore[operator]
    rows = expire(dataset, kms=kms, keep=1).rows
    assert [(row.status, row.error) for row in rows if row.src == old] == [("skipped", "its grace is over in 3.0 days")]
    assert old in keys(dataset, kms)
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    assert old not in keys(dataset, kms)
    (old,) = keys(dataset, kms)
    turned(dataset, kms, grace=timedelta(0))
    expire(dataset, kms=kms, keep=1)
    assert old not in keys(dataset, kms)
    assert decrypted(dataset, kms) == TREE


def test_forced_in_the_same_job(kms: dict[str, str], dataset: Path) -> None:
    encrypt(dataset, kms)
    (old,) = keys(dataset, kms)
    result = turned(dataset, kms, force_expire=True)
    assert result.expired is not None
    assert old in removed(result.expired, dataset)["key"]
    assert numbers(dataset, kms) == [3, 4, 5]  # the rotation, and two entries of the expiry
    local.rotate_key(kms, MASTER)
    assert turned(dataset, kms, "mek", force_expire=True).expired is not None
    local.set_state(kms, MASTER, "destroyed", version=1)
    clear_cache()
    assert decrypted(dataset, kms) == TREE
    assert leftovers(dataset, kms) == []


def test_a_job_that_is_open_when_its_key_goes(
    kms: dict[str, str], dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that has its plan when the KEKs are replaced, and all that is old is removed by force, finishes.
    Its data keys are wrapped again."""
    encrypt(dataset, kms)
    (old,) = keys(dataset, kms)
    rows: list[Any] = []
    write = run.write_files

    def run_late(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(run, "write_files", write)
        done = turned(dataset, kms, force_expire=True)
        assert done.expired is not None
        rows.extend(row for row in done.expired.rows if row.src == old)
        return write(*args, **options)

    monkeypatch.setattr(run, "write_files", run_late)
    encrypt(dataset, kms, MORE)
    assert [(row.status, row.error_class, row.error) for row in rows] == [
        ("skipped", "InUse", "an open job may need it")
    ]
    (new,) = keys(dataset, kms, "active")
    assert {entry.key_id for entry in entries(dataset, kms).values()} == {new}  # wrapped anew when it committed
    assert decrypted(dataset, kms) == TREE | MORE
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    assert keys(dataset, kms).keys() == {new}
    assert leftovers(dataset, kms) == []


def test_a_bare_copy(tmp_path: Path, kms: dict[str, str], dataset: Path) -> None:
    """What somebody copied before the past was removed by force: with the old KEK it is open for ever; without, and
    without the KMS, never. That is what removing protects, and what it does not."""
    encrypt(dataset, kms)
    (old,) = keys(dataset, kms).values()
    stolen, files = raw_kek(kms, old), data(dataset)
    turned(dataset, kms)
    copy = Path(shutil.copytree(dataset, tmp_path / "copy"))
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    assert opened_by(stolen, dataset, kms).keys() == {"closed"}
    # The tables of the copy, and the data, which is the same as ever:
    assert opened_by(stolen, copy, kms)["dek"] == len(TREE)
    assert data(copy) == data(dataset) == files
    # Only a new DEK for each file ends that for the data of tomorrow.
    rekey_files(dataset, kms=kms, **QUIET).raise_for_failures()
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    assert data(dataset).keys().isdisjoint(files)
    # Who can ask the KMS opens the copy, as long as the master key's version is there.
    assert decrypted(copy, kms, version=2) == TREE
    local.rotate_key(kms, MASTER)
    turned(dataset, kms, "mek")
    local.set_state(kms, MASTER, "destroyed", version=1)
    clear_cache()
    assert decrypted(dataset, kms) == TREE
    with pytest.raises(KeyAccessError, match="destroyed"):
        decrypted(copy, kms)


def test_retention_of_later_jobs(kms: dict[str, str], dataset: Path) -> None:
    """Jobs that commit leave as many versions as the dataset's policy has it, and say what they removed."""
    encrypt(dataset, kms, policy=Policy(keep=2))
    seen = []
    for n in range(3):
        result = encrypt(dataset, kms, {f"then/{n}": b"%d" % n})
        assert result.expired is not None
        assert result.expired.op == "expire"
        seen.append(numbers(dataset, kms))
    assert seen == [[2, 3], [3, 4], [4, 5]]
    (old,) = keys(dataset, kms)
    assert turned(dataset, kms).expired is not None
    assert rekey_files(dataset, kms=kms, **QUIET).expired is not None
    assert numbers(dataset, kms) == [6, 7]
    assert old in keys(dataset, kms)  # nothing needs it, and its grace is not over
    assert turned(dataset, kms, "mek").expired is not None
    set_policy(dataset, Policy(keep=1, keep_days=1), kms=kms)
    encrypt(dataset, kms, MORE)
    assert numbers(dataset, kms) == [6, 7, 8, 9]
    assert leftovers(dataset, kms) == []
    assert len(decrypted(dataset, kms)) == len(TREE) + 3 + len(MORE)


# ---------------------------------------------------------------------------------------------- readers


def test_a_reader_asks_once(kms: dict[str, str], dataset: Path, tmp_path: Path) -> None:
    """However many files, versions and tables there are under a KEK."""
    encrypt(dataset, kms, policy=Policy(keep=9))
    encrypt(dataset, kms, MORE)
    turned(dataset, kms, "mek")
    for n, read in enumerate((verify_files, lambda d, **o: decrypt_files(d, tmp_path / "out", **o))):
        clear_cache()
        with asked() as calls:
            read(dataset, kms=load_kms(kms), **QUIET).raise_for_failures()  # type: ignore[operator]
        assert calls == Counter(unwrap=1), n
    with asked() as calls:
        verify_files(dataset, kms=load_kms(kms), **QUIET).raise_for_failures()
        encrypt(dataset, kms, {"then": b"one"})
    assert not calls


def test_versions_of_a_master_key_that_are_disabled(kms: dict[str, str], dataset: Path, tmp_path: Path) -> None:
    """Five versions are in use, some are disabled: it is said which are missing, and nothing is called broken."""
    for n in range(5):
        if n:
            local.rotate_key(kms, MASTER)
        encrypt(dataset, kms, {f"{n}/{m}": pattern(99, n) for m in range(2)}, policy=Policy(kek_scope="files:9"))
    for version in (2, 4):
        local.set_state(kms, MASTER, "disabled", version=version)
    clear_cache()
    for result in (
        verify_files(dataset, kms=kms, **QUIET),
        decrypt_files(dataset, tmp_path / "out", kms=kms, fsync=False, **QUIET),
        rekey_files(dataset, kms=kms, dek_length=32, paths=["1/*", "3/*"], **QUIET),
    ):
        assert {Path(row.src).parent.name for row in result.failed} == {"1", "3"}
        for row in result.failed:
            version = 1 + int(Path(row.src).parent.name)
            assert row.error_class == "KeyAccessError"
            assert f"version {version} of the local key {MASTER!r} is disabled" in row.error  # type: ignore[operator]
    sweep(dataset, kms=kms)
    before = opened(dataset, kms).entry
    for what in ("kek", "mek"):
        clear_cache()
        with pytest.raises(KeyAccessError, match=f"version [24] of the local key '{MASTER}' is disabled"):
            rotate(dataset, kms=kms, what=what)
        head = opened(dataset, kms).entry
        assert head.files == before.files, what
        assert {key_id: key.wrapped for key_id, key in head.keys.items()} == {
            key_id: key.wrapped for key_id, key in before.keys.items()
        }
        assert leftovers(dataset, kms) == []
    # The dataset's own KEK: nothing opens, for the same reason.
    local.set_state(kms, MASTER, "disabled", version=1)
    clear_cache()
    with pytest.raises(KeyAccessError, match=f"version 1 of the local key '{MASTER}' is disabled"):
        verify_files(dataset, kms=kms, **QUIET)
    for version in (1, 2, 4):
        local.set_state(kms, MASTER, "enabled", version=version)
    turned(dataset, kms, "mek")
    for version in (1, 2, 3, 4):
        local.set_state(kms, MASTER, "destroyed", version=version)
    clear_cache()
    assert len(decrypted(dataset, kms)) == 10


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("allowed", range(11))
@pytest.mark.parametrize("options", [{"what": "kek"}, {"what": "mek"}, {"what": "mek", "wrapping_key_id": "other"}])
def test_a_kms_that_refuses(kms: dict[str, str], dataset: Path, options: dict[str, str], allowed: int) -> None:
    """Whichever call is refused, nothing has changed: at most an entry says that the job has ended."""
    encrypt(dataset, kms, policy=Policy(kek_scope="partition"))
    local.rotate_key(kms, MASTER)
    before, files = read_tree(dataset), opened(dataset, kms).entry.files
    clear_cache()
    # To open it, and for each of three KEKs an unwrap, a wrap and a trial; R2 has unwrapped one of them by then, and
    # leaves KEKs of the past that do not open.
    refused = allowed < (9 if options["what"] == "kek" else 10)
    with pytest.raises(KeyAccessError, match=r"the tests refuse it$") if refused else nullcontext():
        rotate(dataset, kms=Failing(kms, allowed), **options, concurrency=1 + allowed % 2)  # type: ignore[arg-type]
    assert (opened(dataset, kms).entry.files == files) == (refused or options["what"] == "mek")
    assert (set(read_tree(dataset)) - {*before, *log_entries(dataset)} == set()) == (
        refused or options["what"] == "mek"
    )
    assert {key.state for key in keys(dataset, kms).values()} == {"active"} or not refused
    clear_cache()
    rotate(dataset, kms=kms, **options).raise_for_failures()  # type: ignore[arg-type]
    assert decrypted(dataset, kms) == TREE
    assert leftovers(dataset, kms) == []


def test_a_new_kms_that_refuses(tmp_path: Path, kms: dict[str, str], dataset: Path) -> None:
    encrypt(dataset, kms, policy=Policy(kek_scope="partition"))
    there = make_kms(tmp_path, name="there")
    before = read_tree(dataset)
    for allowed in range(3):
        with pytest.raises(KeyAccessError, match="the tests refuse it"):
            rotate(dataset, kms=kms, what="mek", new_kms=Failing(there, allowed))
        assert read_tree(dataset) == before
    with pytest.raises(KeyAccessError, match="'nobody'"):
        rotate(dataset, kms=kms, what="mek", new_kms=there, wrapping_key_id="nobody")
    with pytest.raises(KeyAccessError, match="allowed-key-ids"):
        rotate(dataset, kms={**kms, "encryption.allowed-key-ids": MASTER}, wrapping_key_id="other")
    assert read_tree(dataset) == before
    clear_cache()
    assert decrypted(dataset, kms) == TREE


@pytest.mark.parametrize("what", ["kek", "double-wrap"])
def test_a_kms_that_refuses_in_single_wrap(kms: dict[str, str], dataset: Path, what: Any) -> None:
    """The first refusal comes before any key is wrapped; a later one leaves what was read as it was, and the next run
    asks for the rest only."""
    encrypt(dataset, kms, double_wrap=False)
    before = read_tree(dataset)
    for allowed in (0, 1):
        clear_cache()
        with pytest.raises(KeyAccessError, match="the tests refuse it"):
            rotate(dataset, kms=Failing(kms, allowed), what=what, concurrency=1)
        now = read_tree(dataset)
        assert {path: now.pop(path) for path in before} == before
        assert all(path.startswith("_ags/plans/") for path in now)
    result = rotate(dataset, kms=Failing(kms, 6), what=what, concurrency=1)
    assert [(row.error_class, row.error) for row in result.failed] == [("KeyAccessError", "the tests refuse it")]
    assert result.version == 2
    assert numbers(dataset, kms) == [1, 2]
    assert decrypted(dataset, kms) == TREE
    again = turned(dataset, kms, what)
    assert again.job_id == result.job_id
    assert again.version == 3
    assert decrypted(dataset, kms) == TREE
    assert leftovers(dataset, kms) == []
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    assert decrypted(dataset, kms) == TREE
    assert leftovers(dataset, kms) == []


def test_tables_that_are_done_are_not_asked_for_again(
    kms: dict[str, str], dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_tables, "RATIO", 0)  # no commit merges tables
    for n in range(3):
        encrypt(dataset, kms, {f"{n}/{m}": b"%d" % m for m in range(3)}, double_wrap=False)
    opened(dataset, kms)
    # Two of three tables: 3 unwraps and 3 wraps each, and no more but one to try a wrap.
    result = rotate(dataset, kms=Failing(kms, 6 + 6 + 1 + 1), concurrency=1)
    assert sum(row.status == "ok" for row in result.rows if row.format == "table") == 2
    with asked() as calls:
        turned(dataset, kms)
    assert calls == Counter(unwrap=4, wrap=3)
    assert len(decrypted(dataset, kms)) == 9
    assert leftovers(dataset, kms) == []


@pytest.mark.parametrize("double_wrap", [True, False])
def test_a_damaged_table(
    kms: dict[str, str], dataset: Path, double_wrap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is committed. Where the KMS wraps each data key, the next run goes on from there."""
    monkeypatch.setattr(sealed_tables, "RATIO", 0)
    encrypt(dataset, kms, double_wrap=double_wrap)
    encrypt(dataset, kms, MORE, double_wrap=double_wrap)
    tables = [dataset / table.path for table in opened(dataset, kms).entry.files]
    whole = tables[1].read_bytes()
    tables[1].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    result = rotate(dataset, kms=kms, concurrency=1)
    assert [(Path(row.src).name, row.error_class) for row in result.failed] == [(tables[1].name, "IntegrityError")]
    assert Counter(row.status for row in result.rows) == {"failed": 1, "ok": 1}
    assert [dataset / table.path for table in opened(dataset, kms).entry.files] == tables
    tables[1].write_bytes(whole)
    assert decrypted(dataset, kms) == TREE | MORE
    again = turned(dataset, kms)
    assert (again.job_id == result.job_id) != double_wrap
    assert {entry.key_id for entry in entries(dataset, kms).values()} <= keys(dataset, kms, "active").keys()
    assert decrypted(dataset, kms) == TREE | MORE
    assert leftovers(dataset, kms) == []


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"what": "dek"}, ValueError, "'dek'"),
        ({"concurrency": 0}, ValueError, "concurrency"),
        ({"grace": timedelta(-1)}, ValueError, "grace"),
        ({"wrapping_key_id": ""}, ValueError, "key id"),
        ({"from_key_id": 7}, TypeError, "int"),
        ({"new_kms": {}}, ValueError, "what='mek'"),
        ({"what": "double-wrap", "new_kms": {}}, ValueError, "what='mek'"),
        ({"wrapping_key_id": "nobody"}, KeyAccessError, "nobody"),
        ({"what": "mek", "wrapping_key_id": "nobody"}, KeyAccessError, "nobody"),
        ({"what": "mek", "new_kms": {}}, ValueError, "encryption.kms-type"),
    ],
)
def test_arguments_of_rotate(
    kms: dict[str, str], dataset: Path, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    encrypt(dataset, kms)
    before = read_tree(dataset)
    with pytest.raises(error, match=text):
        rotate(dataset, kms=kms, **options)
    assert read_tree(dataset) == before


def test_arguments_of_expire(kms: dict[str, str], dataset: Path, tmp_path: Path) -> None:
    encrypt(dataset, kms)
    before = read_tree(dataset)
    for keep in (0, -1):
        with pytest.raises(ValueError, match="keep"):
            expire(dataset, kms=kms, keep=keep)
    for nowhere in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError):
            expire(nowhere, kms=kms)
        with pytest.raises(FileNotFoundError):
            rotate(nowhere, kms=kms)
    assert read_tree(dataset) == before


@pytest.mark.parametrize(
    "options",
    [
        {"what": "kek"},
        {"what": "kek", "wrapping_key_id": "other"},
        {"what": "mek"},
        {"what": "mek", "wrapping_key_id": "other"},
        {"what": "double-wrap"},
    ],
)
@pytest.mark.parametrize("double_wrap", [True, False])
def test_dry_runs(kms: dict[str, str], dataset: Path, options: dict[str, Any], double_wrap: bool) -> None:
    """They say what would be done, and neither write nor wrap."""
    encrypt(dataset, kms, double_wrap=double_wrap)
    local.rotate_key(kms, MASTER)
    if not double_wrap and options["what"] == "mek" and len(options) > 1:
        return  # refused
    before = read_tree(dataset)
    with asked() as calls:
        planned = rotate(dataset, kms=kms, dry_run=True, force_expire=True, **options)
    assert not calls
    assert read_tree(dataset) == before
    assert {row.status for row in planned.rows} <= {"planned"}
    assert planned.expired is None
    done = turned(dataset, kms, **options)
    assert sorted((row.format, row.src) for row in planned.rows) == sorted((r.format, r.src) for r in done.rows)


# ---------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("double_wrap", [True, False])
def test_wrapped_keys_of_50_kilobytes(kms: dict[str, str], dataset: Path, double_wrap: bool) -> None:
    """They pass everywhere."""
    used = client(Bulky, kms)
    tree = {f"{n:03}": b"%d" % n for n in range(8 if double_wrap else 170)}
    encrypt(dataset, used, tree, double_wrap=double_wrap)
    local.rotate_key(kms, MASTER)
    for what in ("kek", "mek", "double-wrap"):
        turned(dataset, used, what)
        assert opened(dataset, used).entry.count == len(tree)
    expire(dataset, kms=used, keep=1, skip_grace=True)
    local.set_state(kms, MASTER, "destroyed", version=1)
    clear_cache()
    verify_files(dataset, kms=used, **QUIET).raise_for_failures()
    (kek,) = keys(dataset, used).values()
    assert kek.wrapped is not None
    assert len(kek.wrapped) > Bulky.NBYTES


def many_entries(dataset: Path, kms: Any, count: int) -> list[FileEntry]:
    """A dataset of so many files, as far as its tables know: rotations read no others."""
    Dataset.create(dataset, kms=kms, wrapping_key_id=MASTER)
    log = opened(dataset, kms).log
    job = Job.begin(log, "encrypt", {Want(MASTER): count})
    names = [(f"{n % 7}/{n:06}", f"{n % 7}/{n:06}.{job.id}-00000000.ags") for n in range(count)]
    (key_id,) = job.keys.uses
    items = [(n.to_bytes(16, "big"), binding(job.base.dataset_id, "dek", file)) for n, (_, file) in enumerate(names)]
    wraps = job.keys.envelope().wrap_many(key_id, items)
    made = [
        FileEntry(
            path,
            file,
            "ags1",
            n,
            encrypted_length(n, 4096),
            4096,
            key_id,
            wrapped,
            None,
            b"",
            job.id,
            None,
            None,
            None,
            path,
            "",
        )
        for n, ((path, file), wrapped) in enumerate(zip(names, wraps, strict=True))
    ]
    job.commit(Wish("encrypt", made))
    return made


def test_several_tables_of_many_rows(kms: dict[str, str], dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 5_000
    monkeypatch.setattr(sealed_tables, "TABLE_ROWS", rows)
    count = 2 * rows + 1
    was = many_entries(dataset, kms, count)
    stolen = raw_kek(kms, *keys(dataset, kms).values())
    with asked() as calls:
        result = turned(dataset, kms)
    assert calls == Counter(wrap=1, unwrap=1)
    assert sum(row.format == "table" for row in result.rows) == 3
    found = opened(dataset, kms)
    assert [table.rows for table in found.entry.files] == [rows, rows, 1]
    now = list(found.files())
    assert now == sorted(now, key=lambda entry: entry.path)
    now.sort(key=lambda entry: entry.plain_length)
    assert [without_keys(entry) for entry in now] == [without_keys(entry) for entry in was]
    (new,) = keys(dataset, kms, "active")
    items = [(entry.wrapped_dek, binding(found.entry.dataset_id, "dek", entry.file)) for entry in now]
    assert found.envelope.unwrap_many(new, items) == [n.to_bytes(16, "big") for n in range(count)]
    assert {entry.key_id for entry in now} == {new}
    assert not any(opens(stolen, wrapped, bound) for wrapped, bound in items)
    assert len({wrapped[:12] for wrapped, _ in items}) == count
    assert keys(dataset, kms)[new].uses >= count


def test_uses_are_counted(kms: dict[str, str], dataset: Path) -> None:
    """What a new KEK wraps is counted before it does."""
    encrypt(dataset, kms)
    encrypt(dataset, kms, MORE)
    turned(dataset, kms)
    (new,) = keys(dataset, kms, "active").values()
    assert new.uses >= len(TREE | MORE) + 3  # and a table for each, and an entry of the log


def test_uses_of_keks_that_retired_before(kms: dict[str, str], dataset: Path) -> None:
    encrypt(dataset, kms, {f"{n}": b"" for n in range(80)}, policy=Policy(kek_lifetime_days=0))
    encrypt(dataset, kms, {"then": b""})
    assert len(keys(dataset, kms, "retired")) == 2
    turned(dataset, kms)
    uses = Counter(entry.key_id for entry in entries(dataset, kms).values())
    for key_id, entry in keys(dataset, kms, "active").items():
        assert entry.uses >= uses[key_id]


# ---------------------------------------------------------------------------------------------- batches of KEKs


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """KEKs go into the key store in batches, as if there were thousands."""
    monkeypatch.setattr(rotation, "BATCH", 1)


@pytest.mark.usefixtures("small_batches")
def test_master_keys_of_many_keks_go_on(kms: dict[str, str], dataset: Path) -> None:
    """What the KMS has wrapped before it refused need not be asked for again."""
    encrypt(dataset, kms, policy=Policy(kek_scope="files:1"))
    local.rotate_key(kms, MASTER)
    opened(dataset, kms)
    before = keys(dataset, kms)
    with pytest.raises(KeyAccessError, match="the tests refuse it"):
        rotate(dataset, kms=Failing(kms, 3 * 4 + 1), what="mek", concurrency=1)
    after = keys(dataset, kms)
    assert sum(after[key_id] != entry for key_id, entry in before.items()) == 4
    assert opened(dataset, kms).log.plans() == {}
    with asked() as calls:
        turned(dataset, kms, "mek")
    assert calls == Counter(unwrap=6, wrap=3)
    assert opened(dataset, kms).log.plans() == {}
    assert leftovers(dataset, kms) == []
    local.set_state(kms, MASTER, "destroyed", version=1)
    clear_cache()
    assert decrypted(dataset, kms) == TREE


@pytest.mark.usefixtures("small_batches")
def test_wraps_by_a_version_that_is_no_longer_current(kms: dict[str, str], dataset: Path) -> None:
    encrypt(dataset, kms, policy=Policy(kek_scope="partition"))
    local.rotate_key(kms, MASTER)
    with pytest.raises(KeyAccessError):
        rotate(dataset, kms=Failing(kms, 5), what="mek", concurrency=1)
    local.rotate_key(kms, MASTER)
    turned(dataset, kms, "mek")
    for version in (1, 2):
        local.set_state(kms, MASTER, "destroyed", version=version)
    clear_cache()
    assert decrypted(dataset, kms) == TREE


@pytest.mark.usefixtures("small_batches")
def test_wraps_by_another_kms_are_given_up(tmp_path: Path, kms: dict[str, str], dataset: Path) -> None:
    encrypt(dataset, kms, policy=Policy(kek_scope="partition"))
    one, two = (make_kms(tmp_path, name=name) for name in ("one", "two"))
    with pytest.raises(KeyAccessError):
        rotate(dataset, kms=kms, what="mek", new_kms=Failing(one, 2), concurrency=1)
    turned(dataset, kms, "mek", new_kms=two)
    clear_cache()
    assert decrypted(dataset, two) == TREE


# ---------------------------------------------------------------------------------------------- what some may not use


def test_retention_by_who_may_not_use_the_key_of_a_column(kms: dict[str, str], dataset: Path, tables: Path) -> None:
    protect(tables, dataset, kms)
    for master in (MASTER, "hr"):
        local.rotate_key(kms, master)
    turned(dataset, kms, "mek")
    set_policy(dataset, Policy(keep=1), kms=kms)
    clear_cache()
    result = encrypt(dataset, {**kms, "encryption.allowed-key-ids": MASTER}, MORE)
    assert result.expired is not None
    assert result.expired.failed == []
    assert numbers(dataset, kms) == [5]


def test_versions_in_single_wrap_are_not_left_behind(tmp_path: Path, kms: dict[str, str], dataset: Path) -> None:
    encrypt(dataset, kms, double_wrap=False)
    turned(dataset, kms, "double-wrap")
    there = make_kms(tmp_path, name="there")
    with pytest.raises(PolicyError, match="expire"):
        rotate(dataset, kms=kms, what="mek", new_kms=there)
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    turned(dataset, kms, "mek", new_kms=there)
    clear_cache()
    assert decrypted(dataset, there) == TREE


def test_what_several_old_versions_have_is_removed_once(kms: dict[str, str], dataset: Path) -> None:
    encrypt(dataset, kms)
    turned(dataset, kms)
    set_policy(dataset, Policy(kek_scope="partition"), kms=kms)
    rekey_files(dataset, kms=kms, **QUIET).raise_for_failures()
    rows = expire(dataset, kms=kms, keep=1).rows
    assert {row.format for row in rows} >= {"version", "table", "file"}
    assert max(Counter(row.src for row in rows).values()) == 1
    assert leftovers(dataset, kms) == []
    assert decrypted(dataset, kms) == TREE
