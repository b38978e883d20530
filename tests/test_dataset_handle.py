"""`ags_fast.Dataset`: what a handle shows, what it reads, and what of it travels."""

from __future__ import annotations

import io
import os
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import programs.jobs
import pytest
from datasets import HERE, MASTER, decrypted, make_kms, object_of, rows_of, write_tree
from support import pattern, program, run_python

from ags_fast import Dataset, IntegrityError, PolicyError
from ags_fast.dataset.names import entry_path
from ags_fast.errors import ExpiredError
from ags_fast.fs import Store
from ags_fast.jobs import Policy, encrypt_files, expire, remove_files
from ags_fast.keys.cache import clear_cache
from ags_fast.keys.kms import count_calls

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pyarrow")

TREE = {f"day={n % 3}/{n}.csv": pattern(300 + n, n) for n in range(12)} | {"empty": b""}


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return make_kms(tmp_path)


@pytest.fixture
def url(tmp_path: Path, kms: dict[str, str]) -> Path:
    encrypt(tmp_path, kms, TREE)
    return tmp_path / "dataset"


def encrypt(folder: Path, kms: dict[str, str], tree: dict[str, bytes], **options: Any) -> Any:
    src = write_tree(folder / f"src{len(os.listdir(folder))}", tree)
    result = encrypt_files(
        src, folder / "dataset", kms=kms, wrapping_key_id=MASTER, engine=HERE, fsync=False, **options
    )
    result.raise_for_failures()
    return result


def read(dataset: Dataset) -> dict[str, bytes]:
    found = {}
    for file in dataset.files():
        with dataset.open_file(file.path) as opened:
            found[file.path] = opened.read()
        assert len(found[file.path]) == file.plain_length
        assert os.path.getsize(file.url) == file.file_length
    return found


def test_what_it_shows(url: Path, kms: dict[str, str]) -> None:
    dataset = Dataset.open(url, kms=kms)
    assert (dataset.url, dataset.version) == (str(url), 2)
    assert dataset.pin is not None
    assert dataset.pin.startswith("2-")
    assert read(dataset) == TREE
    (file,) = dataset.files("day=2/11*")
    assert (file.path, file.format, file.plain_length) == ("day=2/11.csv", "ags1", 311)
    assert file.key_id
    with dataset.open_file("day=2/11.csv") as opened:
        opened.seek(300)
        assert opened.read() == TREE["day=2/11.csv"][300:]
    target = io.BytesIO()
    dataset.copy_file("day=0/3.csv", target)
    assert target.getvalue() == TREE["day=0/3.csv"]
    assert list(dataset.files("nothing*")) == []
    with pytest.raises(FileNotFoundError, match="version 2 has no 'nothing'"):
        dataset.open_file("nothing")
    with pytest.raises(ValueError, match="missing"):
        dataset.open_file("empty", missing="drop")  # type: ignore[arg-type]
    assert kms["kms.local.path"] not in repr(dataset)
    assert "version 2" in repr(dataset)


def test_it_is_a_snapshot(url: Path, kms: dict[str, str], tmp_path: Path) -> None:
    dataset, fixed = Dataset.open(url, kms=kms), Dataset.open(url, kms=kms, version=2)
    encrypt(tmp_path, kms, {"empty": b"full", "more": b"more"}, overwrite=True)
    newest = Dataset.open(url, kms=kms, min_version=3, pin=dataset.pin)
    assert (dataset.version, fixed.version, newest.version) == (2, 2, 3)
    assert read(dataset) == TREE
    assert dataset.refresh()
    assert not dataset.refresh()
    assert not fixed.refresh()
    assert (dataset.version, fixed.version, dataset.pin) == (3, 2, newest.pin)
    with dataset.open_file("empty") as new, fixed.open_file("empty") as old:
        assert (new.read(), old.read()) == (b"full", b"")
    expire(url, kms=kms, keep=1)
    with pytest.raises(ExpiredError, match="version 2 was expired"):
        fixed.open_file("empty")
    remove_files(url, "empty", kms=kms)
    expire(url, kms=kms, keep=1)
    with pytest.raises(ExpiredError, match="read the dataset again"):
        dataset.open_file("empty")
    assert dataset.refresh()
    with pytest.raises(FileNotFoundError):
        dataset.open_file("empty")


def test_what_is_refused(url: Path, kms: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Dataset.open(tmp_path / "nowhere", kms=kms)
    with pytest.raises(FileNotFoundError, match="no version 7"):
        Dataset.open(url, kms=kms, version=7)
    with pytest.raises(PolicyError):
        Dataset.open(url, kms=kms, min_version=3)
    with pytest.raises(ValueError, match="pin"):
        Dataset.open(url, kms=kms, pin="1")
    with pytest.raises(IntegrityError, match="pin"):
        Dataset.open(url, kms=kms, pin=f"1-{'0' * 64}")
    os.unlink(object_of(url, kms, "empty"))
    with pytest.raises(IntegrityError, match="missing"):
        Dataset.open(url, kms=kms).open_file("empty")


def test_create(tmp_path: Path, kms: dict[str, str]) -> None:
    url = tmp_path / "dataset"
    dataset = Dataset.create(url, kms=kms, wrapping_key_id=MASTER, policy=Policy(kek_scope="day"))
    assert (dataset.version, list(dataset.files())) == (1, [])
    pin = dataset.pin
    with pytest.raises(FileExistsError, match=r"Dataset\.open"):
        Dataset.create(url, kms=kms, wrapping_key_id=MASTER)
    assert encrypt(tmp_path, kms, TREE, pin=pin).version == 2
    assert not list(dataset.files())
    assert dataset.refresh()
    assert read(dataset) == TREE == decrypted(url, kms)
    assert dataset.id == Dataset.open(url, kms=kms).id


def test_creates_at_once(tmp_path: Path, kms: dict[str, str]) -> None:
    def create(_: int) -> Any:
        try:
            return Dataset.create(tmp_path / "dataset", kms=kms, wrapping_key_id=MASTER)
        except FileExistsError:
            return None

    with ThreadPoolExecutor(8) as pool:
        made = [dataset for dataset in pool.map(create, range(8)) if dataset is not None]
    assert len(made) == 1
    assert made[0].version == 1


class Reads:
    """Counts what a store is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: Counter[str] = Counter()
        for name in ("read_small", "list", "stat", "open_seekable", "open_once"):
            monkeypatch.setattr(Store, name, self.counted(name, getattr(Store, name)))

    def counted(self, name: str, real: Any) -> Any:
        def call(store: Store, path: str = "", *args: Any) -> Any:
            self.paths[f"{name} {path}"] += 1
            return real(store, path, *args)

        return call

    def tables(self) -> int:
        return sum(n for path, n in self.paths.items() if "tables/" in path)


@pytest.mark.parametrize("threads", [1, 8])
def test_calls_and_reads(tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """1,000 files: one call of the KMS, each manifest at most once, and for each file its own request."""
    for commit in range(4):
        encrypt(tmp_path, kms, {f"{commit}/{n}": b"%d" % n for n in range(250)})
    clear_cache()
    reads = Reads(monkeypatch)

    def one(path: str) -> None:
        with dataset.open_file(path) as opened:
            assert opened.read() == path.partition("/")[2].encode()

    with count_calls() as calls:
        dataset = Dataset.open(tmp_path / "dataset", kms=kms)
        paths = [file.path for file in dataset.files()]
        assert len(paths) == 1000
        before = reads.paths.copy()
        with ThreadPoolExecutor(threads, initializer=lambda: None) as pool:
            list(pool.map(one, paths))
    assert sum(calls.values()) <= 1
    assert calls.keys() <= {("local", "unwrap")}
    assert reads.tables() == 1
    asked = reads.paths - before
    objects = [row.file for row in rows_of(tmp_path / "dataset", kms).values()]
    assert asked == Counter(f"open_seekable {path}" for path in objects)


def test_memory_is_bounded(tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for commit in range(3):
        encrypt(tmp_path, kms, {f"{commit}/{n}": b"%d" % n for n in range(5)})
    reads = Reads(monkeypatch)
    for rows, expected in ((20, 2), (0, 6)):
        monkeypatch.setattr("ags_fast.dataset.tables.CACHED", rows)
        dataset = Dataset.open(tmp_path / "dataset", kms=kms)
        before = reads.tables()
        for _ in range(3):
            assert len(list(dataset.files())) == 15
        assert reads.tables() - before == expected


def test_it_travels_without_a_key(url: Path, kms: dict[str, str], tmp_path: Path) -> None:
    dataset = Dataset.open(url, kms=kms, pin=Dataset.open(url, kms=kms).pin)
    with dataset.open_file("empty"):
        pass  # now this process has the keys at hand
    data = pickle.dumps(dataset)
    assert len(data) < 2000
    encrypt(tmp_path, kms, {"more": b"more"})
    copy = pickle.loads(data)
    assert (copy.version, copy.pin) == (2, dataset.pin)
    assert read(copy) == TREE
    assert copy.refresh()
    assert copy.version == 3
    (tmp_path / "handle").write_bytes(data)
    said = run_python(program(programs.jobs.read_handle, tmp_path / "handle", "day=0/3.csv"))
    assert said.split() == ["2", TREE["day=0/3.csv"].hex()]
    fixed = pickle.loads(pickle.dumps(Dataset.open(url, kms=kms, version=2)))
    assert not fixed.refresh()
    assert fixed.version == 2


def test_another_version_in_its_place(url: Path, kms: dict[str, str], tmp_path: Path) -> None:
    data = pickle.dumps(Dataset.open(url, kms=kms))
    other = tmp_path / "other"
    other.mkdir()
    encrypt(tmp_path, kms, {"more": b"more"})
    os.replace(url / entry_path(3), url / entry_path(2))
    with pytest.raises(IntegrityError):
        _ = pickle.loads(data).version


def test_import_is_lazy() -> None:
    said = run_python(  # a string: a process that imports nothing else
        """
        import sys
        import ags_fast
        assert not [name for name in sys.modules if name.startswith(("ags_fast.dataset", "pyarrow", "ags_fast.jobs"))]
        print(ags_fast.Dataset.__name__, "ags_fast.jobs" in sys.modules, "pyarrow" in sys.modules)
        """
    )
    assert said.split() == ["Dataset", "False", "False"]
