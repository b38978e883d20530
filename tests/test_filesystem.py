"""fsspec's protocol "ags": a dataset as a file system."""

from __future__ import annotations

import gc
import io
import pickle
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, decrypted, leftovers, make_kms
from support import pattern

from ags_fast import Dataset
from ags_fast.errors import ConcurrentChangeError

if TYPE_CHECKING:
    from pathlib import Path

fsspec = pytest.importorskip("fsspec")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TREE = {"a.csv": b"x,y\n1,2\n3,4\n", "b/c.csv": pattern(3000), "b/d/e": b"", "b/d/f": b"f", "g h/\u00fc\u20ac": b"\xff"}


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return make_kms(tmp_path, keys=(MASTER, "hr"))


@pytest.fixture
def options(tmp_path: Path, kms: dict[str, str]) -> dict[str, Any]:
    made = Dataset.create(tmp_path / "dataset", kms=kms, wrapping_key_id=MASTER)
    with made.transaction(fsync=False, block_size=1024) as new:
        for path, data in TREE.items():
            with new.create(path) as file:
                file.write(data)
    return {"dataset": str(tmp_path / "dataset"), "kms": kms, "write_options": {"fsync": False}}


@pytest.fixture
def fs(options: dict[str, Any]) -> Any:
    return fsspec.filesystem("ags", skip_instance_cache=True, **options)


def test_what_is_there(fs: Any) -> None:
    assert fs.ls("", detail=False) == ["a.csv", "b", "g h"]
    assert fs.ls("ags://b/", detail=False) == ["b/c.csv", "b/d"]
    assert fs.ls("/b/d", detail=False) == ["b/d/e", "b/d/f"]
    assert fs.ls("a.csv", detail=False) == ["a.csv"]
    assert fs.find("") == sorted(TREE)
    assert fs.find("b", withdirs=True) == ["b", "b/c.csv", "b/d", "b/d/e", "b/d/f"]
    assert fs.find("", maxdepth=1) == ["a.csv"]
    assert fs.find("a.csv") == ["a.csv"]
    assert fs.glob("b/**/*") == ["b/c.csv", "b/d", "b/d/e", "b/d/f"]
    assert fs.glob("*/*.csv") == ["b/c.csv"]
    assert fs.glob("no*") == []
    assert [(at, sorted(dirs), sorted(names)) for at, dirs, names in fs.walk("b")] == [
        ("b", ["d"], ["c.csv"]),
        ("b/d", [], ["e", "f"]),
    ]
    assert fs.du("") == sum(map(len, TREE.values()))
    assert fs.du("b", total=False) == {p: len(d) for p, d in TREE.items() if p.startswith("b/")}
    assert fs.info("b/c.csv")["size"] == 3000
    assert fs.info("b/c.csv") == {i["name"]: i for i in fs.ls("b")}["b/c.csv"] == fs.find("b", detail=True)["b/c.csv"]
    assert fs.info("b") == {"name": "b", "size": 0, "type": "directory"}
    assert [fs.exists(p) for p in ("", "/", "a.csv", "b", "b/d", "b/", "b/c", "c", "a.csv/x")] == [True] * 6 + [
        False
    ] * 3
    assert [fs.isdir(p) for p in ("", "b/d", "a.csv", "no")] == [True, True, False, False]
    assert [fs.isfile(p) for p in ("", "b/d", "a.csv", "no")] == [False, False, True, False]
    assert "c.csv" in fs.tree("")
    for call in (fs.ls, fs.info, fs.cat_file, fs.open, fs.ukey):
        with pytest.raises(FileNotFoundError):
            call("b/no")
    with pytest.raises(IsADirectoryError):
        fs.open("b/d")


def test_reads(fs: Any, tmp_path: Path) -> None:
    for path, data in TREE.items():
        assert fs.cat_file(path) == data
        with fs.open(path) as file:
            assert (file.size, file.path, file.mode, file.readable()) == (len(data), path, "rb", True)
            assert file.read() == data
    with fs.open("b/c.csv", "rb", cache_type="readahead", block_size=5) as file:
        assert file.seek(-10, 2) == 2990
        assert file.read(4) == TREE["b/c.csv"][2990:2994]
        assert file.tell() == file.loc == 2994
        copy = pickle.loads(pickle.dumps(file))
        assert copy.read() == TREE["b/c.csv"][2994:]
    with fs.open("a.csv", "rt") as text:
        assert list(text) == ["x,y\n", "1,2\n", "3,4\n"]
    assert fs.cat_file("b/c.csv", 5, 10) == TREE["b/c.csv"][5:10]
    assert fs.cat_file("b/c.csv", -5) == TREE["b/c.csv"][-5:]
    assert fs.cat_file("b/c.csv", 10, -5) == TREE["b/c.csv"][10:-5]
    assert fs.cat_file("b/c.csv", 10, 5) == b""
    assert fs.cat(["a.csv", "b/d/f"]) == {"a.csv": TREE["a.csv"], "b/d/f": b"f"}
    assert fs.cat("b", recursive=True) == {p: d for p, d in TREE.items() if p.startswith("b/")}
    assert fs.head("a.csv", 3) == b"x,y"
    assert fs.tail("a.csv", 4) == b"3,4\n"
    assert fs.read_block("a.csv", 1, 4, b"\n") == b"1,2\n"
    got = fs.cat_ranges(["b/c.csv", "a.csv", "b/c.csv", "no"], [0, 2, -7, 0], [9, None, None, 1])
    assert got[:3] == [TREE["b/c.csv"][:9], TREE["a.csv"][2:], TREE["b/c.csv"][-7:]]
    assert isinstance(got[3], FileNotFoundError)
    fs.get("b", str(tmp_path / "out"), recursive=True)
    assert (tmp_path / "out/c.csv").read_bytes() == TREE["b/c.csv"]
    assert (tmp_path / "out/d/f").read_bytes() == b"f"
    target = io.BytesIO()
    fs.get_file("b/c.csv", target)
    assert target.getvalue() == TREE["b/c.csv"]


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_text_has_the_mark_of_its_byte_order(fs: Any, compression: str | None) -> None:
    with fs.open("marked", "w", encoding="utf-16", compression=compression) as text:
        assert text.tell() == 0
        text.write("one")
        text.write("two")
    with fs.open("marked", compression=compression) as file:
        assert file.read() == "onetwo".encode("utf-16")


def test_writes(fs: Any, options: dict[str, Any], tmp_path: Path) -> None:
    first = fs.dataset.version
    with fs.open("new/x", "wb") as file:
        assert (file.writable(), file.readable(), file.seekable()) == (True, False, False)
        file.write(b"one ")
        file.write(memoryview(b"two"))
        assert file.tell() == 7
        assert not fs.exists("new/x")
    assert fs.cat("new/x") == b"one two"
    with fs.open("new/x", "w", encoding="latin-1") as text:
        text.write("thr\u00e9\u00e9")
    assert fs.read_text("new/x", encoding="latin-1") == "thr\u00e9\u00e9"
    with pytest.raises(FileExistsError):
        fs.open("new/x", "xb")
    with fs.open("new/z.gz", "wb", compression="infer") as packed:
        packed.write(b"packed")
    with fs.open("new/z.gz", compression="gzip") as packed:
        assert packed.read() == b"packed"
    assert fs.dataset.version == first + 3
    fs.pipe({"p/1": b"1", "p/2": b"2"})
    (tmp_path / "up").mkdir()
    (tmp_path / "up/q").write_bytes(pattern(9000))
    fs.put(str(tmp_path / "up"), "put", recursive=True)
    assert fs.dataset.version == first + 5
    assert fs.cat("put/q") == pattern(9000)
    fs.cp("b", "copy", recursive=True)
    fs.mv("p", "moved", recursive=True)
    fs.rm("new", recursive=True)
    assert fs.dataset.version == first + 8
    now = TREE | {"put/q": pattern(9000), "moved/1": b"1", "moved/2": b"2"}
    now |= {f"copy{path[1:]}": data for path, data in TREE.items() if path.startswith("b/")}
    assert decrypted(options["dataset"], options["kms"]) == now
    for mode in ("ab", "r+b", "a"):
        with pytest.raises(io.UnsupportedOperation, match="as a whole"):
            fs.open("a.csv", mode)
    with pytest.raises(IsADirectoryError):
        fs.rm("b")
    with pytest.raises(FileNotFoundError):
        fs.rm("no")
    assert leftovers(tmp_path / "dataset", options["kms"]) == []


def test_transactions(fs: Any, options: dict[str, Any], tmp_path: Path) -> None:
    first = fs.dataset.version
    with fs.transaction:
        with fs.open("a.csv", "wb") as file:
            file.write(b"new")
        fs.pipe("n/1", b"1")
        fs.rm("b/c.csv")
        (tmp_path / "q").write_bytes(b"q")
        fs.put(str(tmp_path / "q"), "n/2")
        fs.mv("b/d/f", "n/f")
        assert fs.cat("a.csv") == TREE["a.csv"]
        assert not fs.exists("n")
    assert fs.dataset.version == first + 1
    now = {"a.csv": b"new", "n/1": b"1", "n/2": b"q", "n/f": b"f", "b/d/e": b"", "g h/\u00fc\u20ac": b"\xff"}
    assert decrypted(options["dataset"], options["kms"]) == now
    with pytest.raises(KeyboardInterrupt), fs.transaction:
        fs.pipe("n/3", b"3")
        fs.rm("a.csv")
        raise KeyboardInterrupt
    other = fsspec.filesystem("ags", skip_instance_cache=True, **options)
    with pytest.raises(ConcurrentChangeError), fs.transaction:
        fs.pipe("a.csv", b"mine")
        fs.pipe("n/4", b"mine")
        other.pipe("a.csv", b"theirs")
    assert not fs.exists("n/4")
    assert fs.cat("a.csv") == b"theirs"
    assert decrypted(options["dataset"], options["kms"]) == now | {"a.csv": b"theirs"}
    assert leftovers(tmp_path / "dataset", options["kms"]) == []


def test_left_by_an_exception(fs: Any, options: dict[str, Any], tmp_path: Path) -> None:
    first = fs.dataset.version
    for mode, compression in (("wb", None), ("w", None), ("wb", "gzip"), ("w", "gzip"), ("xb", None)):
        with pytest.raises(ZeroDivisionError), fs.open("x", mode, compression=compression) as file:
            file.write("half" if "b" not in mode else b"half")
            raise ZeroDivisionError
        with (
            pytest.raises(ZeroDivisionError),
            fsspec.open("ags://x", mode, compression=compression, **options) as file,
        ):
            file.write("half" if "b" not in mode else b"half")
            raise ZeroDivisionError
    file = fs.open("y", "wb")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        file.write(b"kept")
        file.close()
    assert fs.cat("y") == b"kept"
    with pytest.raises(ZeroDivisionError), fs.transaction, fs.open("a.csv", "wb"):
        raise ZeroDivisionError
    with fs.transaction:
        with pytest.raises(ZeroDivisionError), fs.open("a.csv", "wb") as file:
            raise ZeroDivisionError
        fs.pipe("z", b"z")
    for mode, compression in [("wb", None), ("w", None), ("wb", "gzip"), ("w", "gzip")]:
        file = fs.open("a.csv", mode, compression=compression)
        file.write("half" if "b" not in mode else b"half")
        with pytest.warns(ResourceWarning, match="lost"):
            del file
            gc.collect()  # a GzipFile of Python 3.12 refers to itself
    made = [version.operation for version in fs.dataset.versions() if version.number > first]
    assert [operation for operation in made if operation != "end"] == ["write", "write"]
    assert decrypted(options["dataset"], options["kms"]) == TREE | {"y": b"kept", "z": b"z"}
    assert leftovers(tmp_path / "dataset", options["kms"]) == []


def test_parquet(fs: Any, options: dict[str, Any]) -> None:
    table = pa.table({"n": list(range(1000)), "s": [str(n) for n in range(1000)]})
    with fs.open("t/one.parquet", "wb") as file:
        pq.write_table(table, file)
    assert fs.info("t/one.parquet")["format"] == "parquet"
    assert fs.info("t/one.parquet")["size"] == len(fs.cat("t/one.parquet"))
    assert pq.read_table("t/one.parquet", filesystem=fs) == table
    pq.write_table(table, "t/two.parquet", filesystem=fs)
    assert pq.read_table("t", filesystem=fs).num_rows == 2000
    with fs.open("t/raw.parquet", "wb", format="ags1") as file:
        pq.write_table(table, file)
    assert fs.info("t/raw.parquet")["format"] == "ags1"


def test_chained(options: dict[str, Any]) -> None:
    url = f"ags://b/c.csv::file://{options['dataset']}"
    with fsspec.open(url, ags={"kms": options["kms"]}) as file:
        assert file.read() == TREE["b/c.csv"]


class Unprintable:
    def __str__(self) -> str:
        raise ZeroDivisionError


def test_libraries_that_fail(fs: Any, options: dict[str, Any]) -> None:
    """pandas and zipfile close the file in their own `__exit__`."""
    pd = pytest.importorskip("pandas")
    bad = pd.DataFrame({"x": [*range(1000), Unprintable()]})
    with pytest.raises(ZeroDivisionError):
        bad.to_csv("ags://a.csv", storage_options=options, chunksize=10)
    with pytest.raises(ZeroDivisionError), fs.open("zip", "wb") as file, zipfile.ZipFile(file, "w") as packed:
        packed.writestr("x", "half")
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), pq.ParquetWriter("t.parquet", pa.schema({"x": pa.int64()}), filesystem=fs):
        raise ZeroDivisionError
    assert decrypted(options["dataset"], options["kms"]) == TREE
