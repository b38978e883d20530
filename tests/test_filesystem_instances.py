"""File systems of protocol "ags": how they are made, kept, sent elsewhere, and which storage they work on."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import programs.jobs
import pytest
from datasets import MASTER, leftovers, make_kms
from support import pattern, program, run_python

from ags_fast import Dataset
from ags_fast.errors import ExpiredError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.keys import KmsClient, load_kms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers import S3Server

fsspec = pytest.importorskip("fsspec")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

DATA = pattern(5000)


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return make_kms(tmp_path, keys=(MASTER, "hr"))


@pytest.fixture
def options(tmp_path: Path, kms: dict[str, str]) -> dict[str, Any]:
    """Arguments of a file system over a dataset with a.csv, b/c.csv and t.parquet."""
    given = {"dataset": str(tmp_path / "dataset"), "kms": kms, "write_options": {"fsync": False}}
    Dataset.create(tmp_path / "dataset", kms=kms, wrapping_key_id=MASTER)
    fs = fsspec.filesystem("ags", skip_instance_cache=True, **given)
    with fs.transaction:
        fs.pipe({"a.csv": b"1,2\n", "b/c.csv": DATA})
        pq.write_table(pa.table({"x": [1, 2]}), "t.parquet", filesystem=fs)
    return given


class Mine(KmsClient):
    """A client that no properties describe."""

    def wrap_key(self, *args: Any) -> Any:
        raise NotImplementedError

    def unwrap_key(self, *args: Any) -> Any:
        raise NotImplementedError


def test_the_entry_point() -> None:
    (found,) = entry_points(group="fsspec.specs", name="ags")
    assert found.load() is fsspec.get_filesystem_class("ags")


def test_arguments(options: dict[str, Any], kms: dict[str, str], tmp_path: Path) -> None:
    for name in ("dataset", "kms"):
        with pytest.raises(TypeError, match=f"needs the argument '{name}'"):
            fsspec.filesystem("ags", **{key: value for key, value in options.items() if key != name})
    with pytest.raises(TypeError, match="needs the argument 'kms'"):
        fsspec.open(f"ags://a.csv::file://{options['dataset']}")
    with pytest.raises(TypeError, match="did you mean 'wrapping_key_id'"):
        fsspec.filesystem("ags", wraping_key_id="x", **options)
    with pytest.raises(TypeError, match="kms is a mapping, not 'str'"):
        fsspec.filesystem("ags", dataset="x", kms="local")
    with pytest.raises(TypeError, match="dataset is the path"):
        fsspec.filesystem("ags", dataset=Dataset.open(options["dataset"], kms=kms), kms=kms)
    with pytest.raises(TypeError, match="cannot be sent"):
        fsspec.filesystem("ags", dataset="x", kms=Mine())
    with pytest.raises(ValueError, match="format must be"):
        fsspec.filesystem("ags", format="avro", **options)
    with pytest.raises(ValueError, match="chained URL"):
        fsspec.filesystem("ags", fo="x", target_protocol="file", **options)
    with pytest.raises(FileNotFoundError, match=r"no dataset at .*none"):
        fsspec.filesystem("ags", dataset=tmp_path / "none", kms=kms).ls("")
    with pytest.raises(ValueError, match="unknown"):
        fsspec.filesystem("ags", dataset=options["dataset"], kms={**kms, "kms.unknown.property": "x"}).exists("a.csv")
    fs = fsspec.filesystem("ags", dataset=options["dataset"], kms=make_kms(tmp_path, name="other", keys=("else",)))
    with pytest.raises(KeyAccessError):
        fs.exists("a.csv")


def test_instances_are_cached(options: dict[str, Any], kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    fs = fsspec.filesystem("ags", **options)
    assert fsspec.filesystem("ags", **options) is fs
    assert fsspec.filesystem("ags", **{**options, "kms": load_kms(kms)}) is fs
    assert fsspec.filesystem("ags", **{**options, "dataset": Path(options["dataset"])}) is fs
    monkeypatch.chdir(Path(options["dataset"]).parent)
    assert fsspec.filesystem("ags", **{**options, "dataset": "dataset"}) is fs
    assert fsspec.filesystem("ags", version=1, **options) is not fs
    assert fs == fsspec.filesystem("ags", **options)
    assert fs.cat("a.csv") == b"1,2\n"


def test_no_key_leaves(options: dict[str, Any], kms: dict[str, str]) -> None:
    """Not in what fsspec keeps, pickles, shows and writes as JSON: neither the master key nor a data key."""
    fs = fsspec.filesystem("ags", **{**options, "kms": load_kms(kms)})
    with fs.open("b/c.csv") as file, fs.open("new", "wb") as new:
        file.read(10)
        shown = [
            repr(fs),
            str(fs),
            repr(file),
            repr(new),
            repr(fs.storage_options),
            repr(fs.storage_args),
            fs._fs_token,
        ]
        shown += [fs.to_json(), repr(fs.__dict__), repr(fs._handle), repr(fs.transaction)]
        if hasattr(fs, "to_dict"):  # an old fsspec has no such method
            shown.append(json.dumps(fs.to_dict()))
            assert type(fs).from_dict(fs.to_dict()) is fs
        pickled = pickle.dumps(fs) + pickle.dumps(file) + pickle.dumps(fsspec.open("ags://a.csv", **options))
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(new)
    keys = [bytes.fromhex(key) for key in _hex_keys(Path(kms["kms.local.path"]))]
    assert keys
    for key in keys:
        assert key not in pickled
        assert all(key.hex() not in text and repr(key)[2:-1] not in text for text in shown)
    assert fs.storage_options["kms"] == kms
    assert pickle.loads(pickle.dumps(fs)).cat("b/c.csv") == DATA
    assert type(fs).from_json(fs.to_json()).cat("a.csv") == b"1,2\n"
    with pytest.raises(ZeroDivisionError), fs.transaction:
        raise ZeroDivisionError


def _hex_keys(keystore: Path) -> Iterator[str]:
    import re

    yield from re.findall(r"\b[0-9a-f]{32,64}\b", keystore.read_text())


def test_versions(options: dict[str, Any], tmp_path: Path, kms: dict[str, str]) -> None:
    fs = fsspec.filesystem("ags", **options)
    fixed = fsspec.filesystem("ags", version=fs.dataset.version, **options)
    before, first = fs.ukey("a.csv"), fs.modified("a.csv")
    others(options, {"a.csv": b"new"})
    assert fs.cat("a.csv") == b"1,2\n"
    assert fs.ukey("a.csv") == before
    fs.invalidate_cache()
    assert fs.cat("a.csv") == b"new"
    assert fs.ukey("a.csv") != before
    assert fs.checksum("a.csv") == int(fs.ukey("a.csv"), 16)
    assert fs.modified("a.csv") == fs.created("a.csv") > first
    assert abs(fs.modified("a.csv").timestamp() - fs.info("a.csv")["mtime"]) < 1e-3
    others(options, {"later": b"1"})
    assert not fs.exists("later")
    assert fs.ls("", detail=False, refresh=True) == ["a.csv", "b", "later", "t.parquet"]
    others(options, {"a.csv": b"newer"})
    fs.pipe("a.csv", b"newest")  # a write begins at the newest version
    fixed.invalidate_cache()
    assert fixed.cat("a.csv") == b"1,2\n"
    for call in (lambda: fixed.pipe("x", b""), lambda: fixed.rm("a.csv"), fixed.transaction.start):
        with pytest.raises(ValueError, match="stays at version"):
            call()
    assert leftovers(tmp_path / "dataset", kms) == []


def others(options: dict[str, Any], tree: dict[str, bytes]) -> None:
    """Write files as another process would."""
    with Dataset.open(options["dataset"], kms=options["kms"]).transaction(fsync=False) as new:
        for path, data in tree.items():
            with new.create(path, replace=True) as file:
                file.write(data)


def test_transactions_without_a_block(options: dict[str, Any], tmp_path: Path, kms: dict[str, str]) -> None:
    fs = fsspec.filesystem("ags", **options)
    fs.start_transaction()
    fs.pipe("a.csv", b"at last")
    others(options, {"later": b"1"})
    fs.invalidate_cache()
    assert fs.cat("a.csv") == b"1,2\n"
    assert not fs.exists("later")
    with pytest.raises(ValueError, match="in a transaction already"):
        fs.start_transaction()
    fs.end_transaction()
    assert fs.cat("a.csv") == b"at last"
    assert fs.exists("later")
    with fs.open("x", "wb", autocommit=False) as file:
        file.write(b"x")
    assert not fs.exists("x")
    file.commit()
    assert fs.cat("x") == b"x"
    with fs.open("x", "wb", autocommit=False) as file:
        pass
    file.discard()
    assert fs.cat("x") == b"x"
    assert leftovers(tmp_path / "dataset", kms) == []


def test_instances_of_one_process_see_each_other(options: dict[str, Any]) -> None:
    """Their arguments differ, as those of a program that writes here and reads there do."""
    fs, other = (fsspec.filesystem("ags", skip_instance_cache=True, **options) for _ in range(2))
    assert not other.exists("x")
    fs.pipe("x", b"x")
    assert other.cat("x") == b"x"
    with other.transaction:
        fs.pipe("x", b"y")
        assert other.cat("x") == b"x"
    assert other.cat("x") == b"y"
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: fsspec.filesystem("ags", **options).rm("x")).result()
    assert not fs.exists("x")


def test_a_dataset_is_made_by_its_first_file(tmp_path: Path, kms: dict[str, str]) -> None:
    given = {"dataset": tmp_path / "new", "kms": kms}
    with pytest.raises(FileNotFoundError, match="give wrapping_key_id"):
        fsspec.filesystem("ags", **given).pipe("x", b"x")
    fs = fsspec.filesystem("ags", wrapping_key_id="hr", **given)
    assert not fs.exists("x")
    fs.makedirs("folder", exist_ok=True)
    fs.pipe("folder/x", b"x")
    assert fs.find("") == ["folder/x"]


def test_folders(options: dict[str, Any]) -> None:
    fs = fsspec.filesystem("ags", **options)
    version = fs.dataset.version
    fs.mkdir("empty")
    fs.makedirs("b", exist_ok=True)
    fs.rmdir("empty")
    assert not fs.exists("empty")
    for call, error in (
        (lambda: fs.mkdir("b"), FileExistsError),
        (lambda: fs.makedirs("a.csv", exist_ok=True), FileExistsError),
        (lambda: fs.rmdir("b"), OSError),
        (lambda: fs.rmdir("a.csv"), NotADirectoryError),
        (lambda: fs.pipe("a.csv/x", b""), ValueError),
        (lambda: fs.pipe("../x", b""), PolicyError),
        (lambda: fs.pipe("_ags/x", b""), ValueError),
    ):
        with pytest.raises(error):
            call()
    fs.touch("empty.parquet")
    assert fs.cat("empty.parquet") == b""
    assert fs.dataset.version == version + 1


def test_columns_keep_their_keys(options: dict[str, Any], kms: dict[str, str]) -> None:
    keyed = {**options, "write_options": {"fsync": False, "column_keys": {"secret": "hr"}}}
    pq.write_table(pa.table({"x": [1], "secret": [2]}), "t2.parquet", filesystem=fsspec.filesystem("ags", **keyed))
    fs = fsspec.filesystem("ags", **options)
    assert fs.info("t2.parquet")["columns"] == ["secret"]
    fs.cp("t2.parquet", "copy.parquet")
    fs.mv("t2.parquet", "moved.parquet")
    for path in ("copy.parquet", "moved.parquet"):
        assert fs.info(path)["columns"] == ["secret"]
        assert pq.read_table(path, filesystem=fs).to_pydict() == {"x": [1], "secret": [2]}
    allowed = {**kms, "encryption.allowed-key-ids": MASTER}
    hides = fsspec.filesystem("ags", dataset=options["dataset"], kms=allowed, missing="hide")
    assert pq.read_table("copy.parquet", filesystem=hides).column_names == ["x"]
    masks = fsspec.filesystem("ags", dataset=options["dataset"], kms=allowed, missing="null")
    assert pq.read_table("copy.parquet", filesystem=masks).to_pydict() == {"x": [1], "secret": [None]}
    with pytest.raises(KeyAccessError):
        fsspec.filesystem("ags", dataset=options["dataset"], kms=allowed).open("moved.parquet")


def test_duckdb_reads_nulls(options: dict[str, Any], kms: dict[str, str]) -> None:
    """The pages of nulls make a file longer: DuckDB asks how long it is."""
    duckdb = pytest.importorskip("duckdb")
    keyed = {**options, "write_options": {"fsync": False, "column_keys": {"s.b": "hr"}}}
    rows = [{"s": None if i % 3 == 0 else {"a": i, "b": "x"}} for i in range(10_000)]
    pq.write_table(pa.Table.from_pylist(rows), "t2.parquet", filesystem=fsspec.filesystem("ags", **keyed))
    allowed = {**kms, "encryption.allowed-key-ids": MASTER}
    masks = fsspec.filesystem("ags", dataset=options["dataset"], kms=allowed, missing="null")
    with masks.open("t2.parquet") as file:
        assert masks.info("t2.parquet")["size"] == masks.size("t2.parquet") == file.size
    with duckdb.connect() as connection:
        connection.register_filesystem(masks)
        found = connection.sql("SELECT count(*), sum(s.a), count(s.b), count(s) FROM 'ags://t2.parquet'").fetchall()
    assert found == [(10_000, sum(i for i in range(10_000) if i % 3), 0, 6666)]


CHILD = """
import pickle, sys
fs, file = pickle.load(sys.stdin.buffer)
assert fs.cat("a.csv") == b"1,2\\n"
fs.pipe("child", file.read())
"""


def test_other_processes(options: dict[str, Any]) -> None:
    fs = fsspec.filesystem("ags", **options)
    with fs.open("b/c.csv") as file:
        file.seek(4000)
        subprocess.run([sys.executable, "-c", CHILD], input=pickle.dumps((fs, file)), check=True)
    fs.invalidate_cache()
    assert fs.cat("child") == DATA[4000:]


def test_a_fork(options: dict[str, Any]) -> None:
    """The child uses the parent's instance, although another thread of the parent held its lock."""
    fs = fsspec.filesystem("ags", **options)
    assert fs.cat("a.csv") == b"1,2\n"
    fs.invalidate_cache()
    with fs._handle._lock:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                assert fsspec.filesystem("ags", **options).cat("b/c.csv") == DATA
                assert fs.cat("b/c.csv") == DATA
                fs.pipe("forked", b"child")
                code = 0
            finally:
                os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    fs.invalidate_cache()
    assert fs.cat("forked") == b"child"


def test_threads(options: dict[str, Any]) -> None:
    fs = fsspec.filesystem("ags", **options)
    begin = threading.Barrier(8)

    def work(n: int) -> bytes:
        begin.wait()
        with fs.open(f"n/{n}", "wb") as file:
            file.write(b"%d" % n)
        return bytes(fs.cat("b/c.csv"))

    with ThreadPoolExecutor(8) as pool, fs.transaction:
        assert set(pool.map(work, range(8))) == {DATA}
    assert fs.cat("n", recursive=True) == {f"n/{n}": b"%d" % n for n in range(8)}


@pytest.fixture(params=["memory", "s3"])
def place(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """A folder in an object store, and its options."""
    name = f"bucket-{os.urandom(8).hex()}"
    if request.param == "memory":
        return f"memory://{name}/data", {}
    pytest.importorskip("s3fs")
    server: S3Server = request.getfixturevalue("moto_s3")
    server.client().create_bucket(Bucket=name)
    return f"s3://{name}/deep/data", server.options()


def test_object_stores(place: tuple[str, dict[str, Any]], kms: dict[str, str], tmp_path: Path) -> None:
    url, storage = place
    fs = fsspec.filesystem("ags", dataset=url, kms=kms, storage_options=storage, wrapping_key_id=MASTER)
    tree = {f"d/{n}": pattern(200_000 + n, n) for n in range(6)} | {"big": pattern(5 << 20)}
    fs.pipe(tree)
    assert fs.cat("d", recursive=True) == {path: data for path, data in tree.items() if path != "big"}
    wanted = [("big", 0, 10), ("d/1", 5, 9), ("big", 3 << 20, (3 << 20) + 7), ("big", 12, 20), ("d/1", -4, None)]
    found = fs.cat_ranges(*map(list, zip(*wanted, strict=True)), on_error="raise")
    assert found == [tree[path][start:end] for path, start, end in wanted]
    pq.write_table(pa.table({"x": list(range(1000))}), "t/x.parquet", filesystem=fs)
    assert pq.read_table("t", filesystem=fs).num_rows == 1000
    fs.get("d", str(tmp_path / "out"), recursive=True)
    assert (tmp_path / "out/3").read_bytes() == tree["d/3"]
    with fs.transaction:
        fs.mv("d/1", "e/1")
        fs.rm("big")
    chained = {"ags": {"kms": kms}, url.partition(":")[0]: storage}
    with fsspec.open(f"ags://e/1::{url}", **chained) as file:
        assert file.read() == tree["d/1"]
    with fsspec.open(f"ags://e/new::{url}", "wb", **chained) as file:
        file.write(b"new")
    assert sorted(file.path for file in fsspec.open_files(f"ags://e/*::{url}", **chained)) == ["e/1", "e/new"]
    fs.invalidate_cache()
    assert fs.find("") == [*(f"d/{n}" for n in (0, 2, 3, 4, 5)), "e/1", "e/new", "t/x.parquet"]


def test_requests_wait_together(kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On an object store two files are read at the same time. A file is opened once for all of its ranges."""
    fs = fsspec.filesystem("ags", dataset=f"memory://{os.urandom(8).hex()}", kms=kms, wrapping_key_id=MASTER)
    data = pattern(3 << 20)
    fs.pipe({"a": data, "b": b"b"})
    both, open_file = threading.Barrier(2, timeout=30), Dataset.open_file

    def slow(self: Dataset, *args: Any, **options: Any) -> Any:
        both.wait()
        return open_file(self, *args, **options)

    monkeypatch.setattr(Dataset, "open_file", slow)
    assert fs.cat(["a", "b"]) == {"a": data, "b": b"b"}
    wanted = [("a", 0, 9), ("b", 0, 1), ("a", 2 << 20, (2 << 20) + 9)]
    found = fs.cat_ranges(*map(list, zip(*wanted, strict=True)))
    assert found == [data[:9], b"b", data[2 << 20 : (2 << 20) + 9]]


def test_chained_urls(options: dict[str, Any], kms: dict[str, str], tmp_path: Path) -> None:
    folder, ags = options["dataset"], {"ags": {"kms": kms}}
    for url in (f"ags://b/c.csv::file://{folder}", f"ags://b/c.csv::{folder}", f"ags:///b/c.csv::local://{folder}"):
        with fsspec.open(url, **ags) as file:
            assert file.read() == DATA
    fs, path = fsspec.core.url_to_fs(f"ags::file://{folder}", **ags)
    assert (path, fs.ls(path, detail=False)) == ("", ["a.csv", "b", "t.parquet"])
    assert fsspec.filesystem("dir", path="b", fs=fs).cat("c.csv") == DATA
    with fsspec.open("ags://packed.zip", "wb", **options) as file, zipfile.ZipFile(file, "w") as packed:
        packed.writestr("in.txt", DATA)
    with fsspec.open(f"zip://in.txt::ags://packed.zip::file://{folder}", **ags) as file:
        assert file.read() == DATA
    with fsspec.open(f"ags://b/c.csv::dir://dataset::file://{tmp_path}", **ags) as file:
        assert file.read() == DATA


# ---- versions that go


@pytest.mark.parametrize(
    "ask",
    [
        lambda fs: fs.ls("b", detail=False),
        lambda fs: fs.find(""),
        lambda fs: [files for _, _, files in fs.walk("")],
        lambda fs: fs.glob("*/*.csv"),
        lambda fs: fs.exists("a.csv"),
        lambda fs: fs.info("b/c.csv")["size"],
        lambda fs: fs.cat("b/c.csv"),
        lambda fs: fs.cat_ranges(["b/c.csv"], 10, 20, on_error="raise"),
    ],
)
def test_a_version_that_was_expired(options: dict[str, Any], kms: dict[str, str], ask: Callable[[Any], Any]) -> None:
    """A file system goes on with the newest version, unless it stays at one for good: then nothing looks empty."""
    place = {"dataset": options["dataset"], "kms": kms, "skip_instance_cache": True}
    version = Dataset.open(options["dataset"], kms=kms).version
    follows, stays = (fsspec.filesystem("ags", **place, version=number) for number in (None, version))
    assert follows.dataset.version == stays.dataset.version == version
    run_python(program(programs.jobs.replace_and_expire, options["dataset"], kms))
    assert ask(follows) == ask(fsspec.filesystem("ags", **place))
    with pytest.raises(ExpiredError):
        ask(stays)


@pytest.mark.parametrize("opened", [False, True])
def test_a_log_that_is_gone(options: dict[str, Any], kms: dict[str, str], opened: bool) -> None:
    """Nothing says that there are no files."""
    fs = fsspec.filesystem("ags", skip_instance_cache=True, wrapping_key_id=MASTER, **options)
    handle = Dataset.open(options["dataset"], kms=kms)
    if opened:
        assert fs.dataset.version == handle.version
        fs.invalidate_cache()
    shutil.rmtree(os.path.join(options["dataset"], "_ags/log"))
    for ask in (
        lambda: fs.ls(""),
        lambda: fs.find(""),
        lambda: fs.exists("a.csv"),
        lambda: list(fs.walk("")),
        lambda: fs.pipe("x", b""),
        lambda: list(handle.versions()),
        handle.refresh,
        lambda: Dataset.open(options["dataset"], kms=kms),
        lambda: Dataset.create(options["dataset"], kms=kms, wrapping_key_id=MASTER),
    ):
        with pytest.raises(IntegrityError, match="gone"):
            ask()
