"""Files named from each kind of root: in each spelling, and by each consumer, all have their whole names."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from typing import TYPE_CHECKING, Any

import parquet_peers as peers
import pytest
from datasets import MASTER, QUIET, encrypt, make_kms, read_tree, write_tree
from parquet_files import KF, rich

from ags_fast import Dataset, parquet
from ags_fast.fs import Store, file_at
from ags_fast.jobs import decrypt_files
from ags_fast.parquet import Keys

if TYPE_CHECKING:
    from pathlib import Path

    from servers import S3Server

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("pyarrow.dataset")
pa, pq = peers.pa, peers.pq

# "1.csv" is "01.csv" without its first letter, and "x" is empty without it.
TREE = {"01.csv": b"one", "1.csv": b"another", "x": b"letter", "in/01.csv": b"two", "in/deep/y": b"three"}
INSIDE = {path.removeprefix("in/"): data for path, data in TREE.items() if path.startswith("in/")}

# What a URL may look like; {p} is a folder with the tree in it, and {cwd} the same one, relative.
ROOTS = [
    *(
        url
        for kind in ("zip", "tar")
        for url in (f"{kind}://::file://{{p}}/{kind}", f"{kind}:///::file://{{p}}/{kind}")
    ),
    *("zip::file://{p}/zip", "tar::file://{p}/tar", "zip://::./zip", "tar://::./tar", "tar://.::file://{p}/dots"),
    *("simplecache::zip://::file://{p}/zip", "zip://::dir://zip::file://{p}", "zip://::memory://packed/zip"),
    *(
        "dir://::file://{p}/d",
        "dir::file://{p}/d",
        "dir:///::file://{p}/d/",
        "dir://::memory://m",
        "dir://d::file://{p}",
    ),
    *("simplecache::file://{p}/d", "simplecache::dir://::file://{p}/d"),
    *("memory://", "memory:///", "memory://m", "memory:///m/", "memory://m/"),
    *("ags://::file://{p}/ds", "ags::file://{p}/ds", "ags:///::file://{p}/ds", "ags://"),
    *("{p}/d", "{p}/d/", "d", "./d", "d/", "d/.", "file://{p}/d", "file://{p}/d/", "file:{p}/d", "local://{p}/d"),
]
FOLDERS = [
    *(
        "zip://in::file://{p}/zip",
        "zip:///in/::file://{p}/zip",
        "tar://in/::file://{p}/tar",
        "tar://./in::file://{p}/dots",
    ),
    *(
        "dir://in::file://{p}/d",
        "dir://d/in::file://{p}",
        "dir:///in/::file://{p}/d",
        "memory://m/in/",
        "memory:///m/in",
    ),
    *("ags://in::file://{p}/ds", "ags:///in/::file://{p}/ds", "ags://in", "d/in/", "file://{p}/d/in"),
]
TARGETS = [
    *(
        "dir://::file://{p}/new",
        "dir://new::file://{p}",
        "dir::file://{p}/new",
        "memory://",
        "memory://new/",
        "memory:///new",
    ),
    *("ags://::file://{p}/ds", "ags://new::file://{p}/ds", "ags:///new/::file://{p}/ds"),
    *("new", "./new/", "{p}/new", "file://{p}/new/"),
]


@pytest.fixture(scope="module")
def kms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_kms(tmp_path_factory.mktemp("kms"))


@pytest.fixture
def place(tmp_path: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the tree in each kind of root."""
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(type(memory), "store", {})
    monkeypatch.setattr(type(memory), "pseudo_dirs", [""])
    monkeypatch.chdir(write_tree(tmp_path / "d", TREE).parent)
    with zipfile.ZipFile("zip", "w") as archive, tarfile.open("tar", "w") as tar, tarfile.open("dots", "w") as dots:
        for path, data in TREE.items():
            archive.writestr(path, data)
            for one, name in ((tar, path), (dots, f"./{path}")):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                one.addfile(info, io.BytesIO(data))
    encrypt("d", "ds", kms, fsync=False)
    return tmp_path


def fill_memory(url: str, place: Path) -> None:
    memory = fsspec.filesystem("memory")
    if "packed" in url:
        memory.pipe("/packed/zip", (place / "zip").read_bytes())
    elif "memory" in url:
        memory.pipe({f"{'/m/' if '/m' in url.partition(':')[2] else '/'}{path}": data for path, data in TREE.items()})


def options_of(url: str, place: Path, kms: dict[str, str]) -> dict[str, Any]:
    """The options of fsspec for a URL of these tables."""
    if not url.startswith("ags"):
        return {}
    ags = {"kms": kms, "wrapping_key_id": MASTER}
    return {"ags": ags} if "::" in url else {"dataset": f"{place}/ds", **ags}


@pytest.mark.parametrize(
    ("url", "tree"), [*((url, TREE) for url in ROOTS), *((url, INSIDE) for url in FOLDERS)], ids=[*ROOTS, *FOLDERS]
)
def test_as_a_source(url: str, tree: dict[str, bytes], place: Path, kms: dict[str, str]) -> None:
    fill_memory(url, place)
    options = options_of(url, place, kms)
    url = url.format(p=place)
    done = encrypt(url, place / "made", kms, fsync=False, storage_options=options)
    assert done.counts == {"ok": len(tree), "skipped": 0, "failed": 0}
    dataset = Dataset.open(place / "made", kms=kms)
    assert {file.path: dataset.open_file(file.path).read() for file in dataset.files()} == tree
    store = Store(url, options)
    assert {row.src for row in done.rows} == {store.full_path(path) for path in tree}
    for path, data in tree.items():  # what a row says is what finds the file
        found, name = file_at(store.full_path(path), options)
        assert found.read_small(name, 100) == data
        assert store.path_in(store.full_path(path)) == path


@pytest.mark.parametrize("url", TARGETS)
def test_as_a_destination(url: str, place: Path, kms: dict[str, str]) -> None:
    options = options_of(url, place, kms)
    url = url.format(p=place)
    store = Store(url, options)
    before = {entry.path for entry in store.list()}
    done = decrypt_files("ds", url, kms=kms, storage_options=options, overwrite=True, fsync=False, **QUIET)
    assert done.counts == {"ok": len(TREE), "skipped": 0, "failed": 0}
    assert {entry.path: store.read_small(entry.path, 100) for entry in store.list()} == TREE
    assert before <= TREE.keys()
    assert read_tree(place / "d") == TREE


# ---------------------------------------------------------------- consumers of file systems

KEYS = Keys(KF)
NAMES = ["01.parquet", "in/1.parquet", "p"]  # "p" is empty without its first letter


@pytest.fixture
def parquets(place: Path, request: pytest.FixtureRequest) -> Path:
    """The current folder, with encrypted Parquet files in a folder, in archives and in memory."""
    sealed = bytearray()
    parquet.encrypt_file(rich(), sealed, KEYS)
    write_tree(place / "q", dict.fromkeys(NAMES, bytes(sealed)))
    with zipfile.ZipFile("q.zip", "w") as archive, tarfile.open("q.tar", "w") as tar:
        for name in NAMES:
            archive.write(f"q/{name}", name)
            tar.add(f"q/{name}", name)
    memory = fsspec.filesystem("memory")
    above = "/m/" if request.node.callspec.params["url"] == "memory://m" else "/"
    memory.pipe({above + name: bytes(sealed) for name in NAMES})
    return place


SYSTEMS = [
    *(f"{kind}://::file://{{p}}/q.{kind}" for kind in ("zip", "tar")),
    *("dir://q::file://{p}", "simplecache::zip://::file://{p}/q.zip", "memory://", "memory://m", "file://{p}/q", "q"),
]


@pytest.mark.parametrize("url", SYSTEMS)
def test_consumers_of_parquet_filesystem(url: str, parquets: Path) -> None:
    pandas = pytest.importorskip("pandas")
    url = url.format(p=parquets)
    fs, root = fsspec.core.url_to_fs(url)
    plain = parquet.filesystem(KEYS, fs=fs)
    above = f"{root}/" if root or url.startswith("memory") else ""
    expected = [above + name for name in NAMES]
    table = pq.read_table(io.BytesIO(rich()))
    assert plain.find(root) == plain.find(f"ags-parquet://{root}") == expected
    walked = [f"{folder}/{name}".lstrip("/") for folder, _, names in plain.walk(root) for name in names]
    assert sorted(walked) == [name.lstrip("/") for name in expected]
    assert sorted(plain.glob(f"{above}*p*")) == [above + "01.parquet", above + "p"]
    assert {one["name"] for one in plain.ls(root)} == {above + name for name in ("01.parquet", "in", "p")}
    for spelled in (root, f"{root}/", above):
        found = pa.dataset.dataset(spelled, filesystem=plain)
        assert sorted(found.files) == expected
        assert found.to_table().num_rows == len(NAMES) * table.num_rows
    for name in NAMES:
        assert pq.read_table(above + name, filesystem=plain) == table
        assert len(pandas.read_parquet(above + name, filesystem=plain)) == table.num_rows
        with parquet.open_plain(Store(url).full_path(name), KEYS) as view:
            assert pq.read_table(view) == table


@pytest.mark.parametrize("spelled", ["{}", "/{}", "ags://{}", "ags:///{}"])
def test_consumers_of_a_dataset(spelled: str, place: Path, kms: dict[str, str]) -> None:
    """The root of a dataset, and files in it, as fsspec, pandas and Arrow name them."""
    pandas = pytest.importorskip("pandas")
    options = {"dataset": f"{place}/ds", "kms": kms, "wrapping_key_id": MASTER, "skip_instance_cache": True}
    fs = fsspec.filesystem("ags", **options)
    root, inside = spelled.format(""), spelled.format("in")
    assert fs.find(root) == sorted(TREE)
    assert fs.ls(root, detail=False) == ["01.csv", "1.csv", "in", "x"]
    assert fs.find(inside) == fs.find(f"{inside}/") == ["in/01.csv", "in/deep/y"]
    assert fs.glob(spelled.format("*.csv")) == ["01.csv", "1.csv"]
    assert {path: fs.cat_file(spelled.format(path)) for path in TREE} == TREE
    url = f"ags://{spelled.removeprefix('ags://').format('01.csv')}"
    assert list(pandas.read_csv(url, storage_options=options)) == ["one"]
    with fsspec.open_files(url.replace("01", "*"), **options) as files:
        assert [file.read() for file in files] == [b"one", b"another"]
    pandas.DataFrame({"a": [1]}).to_parquet(url.replace("01.csv", "t/0.parquet"), storage_options=options)
    fs.invalidate_cache()
    for folder in ("t", "t/"):  # Arrow takes the names as a listing has them, without a slash at their beginning
        found = pa.dataset.dataset(folder, filesystem=fs)
        assert (found.files, found.to_table().num_rows) == (["t/0.parquet"], 1)


@pytest.mark.parametrize("spelled", ["s3://{}", "s3://{}/", "s3a://{}", "s3://{}/in", "s3://{}/in/"])
def test_a_bucket(spelled: str, place: Path, kms: dict[str, str], moto_s3: S3Server) -> None:
    bucket = f"roots-{os.urandom(8).hex()}"
    moto_s3.client().create_bucket(Bucket=bucket)
    options: dict[str, Any] = {"storage_options": moto_s3.options()}
    url = spelled.format(bucket)
    decrypt_files("ds", url, kms=kms, **options, **QUIET).raise_for_failures()
    above = "in/" if "in" in spelled.partition("}")[2] else ""
    keys = [one["Key"] for one in moto_s3.client().list_objects_v2(Bucket=bucket)["Contents"]]
    assert keys == sorted(above + path for path in TREE)
    encrypt(url, "made", kms, fsync=False, **options).raise_for_failures()
    assert [file.path for file in Dataset.open("made", kms=kms).files()] == sorted(TREE)
