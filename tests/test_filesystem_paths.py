"""Paths of protocol "ags": copies, moves and removals do what fsspec's file system in memory does."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, make_kms

from ags_fast import Dataset
from ags_fast.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

fsspec = pytest.importorskip("fsspec")

NAMES = ("a", "b", "a1", "x y", "\u00e9", "e\u0301", "c#d%20", "p::q", "{a,b}")
# Where a file and a folder would have one path, or a folder is named where a file is meant, fsspec in memory does
# something else each time. Here that is an error, and nothing changes.
REFUSED = (ValueError, IsADirectoryError)


@pytest.fixture
def fs(tmp_path: Path) -> Iterator[Any]:
    """A file system on an empty dataset in memory."""
    url, kms = f"memory://{tmp_path.name}-{os.urandom(4).hex()}", make_kms(tmp_path)
    Dataset.create(url, kms=kms, wrapping_key_id=MASTER)
    yield fsspec.filesystem("ags", dataset=url, kms=kms, skip_instance_cache=True)
    fsspec.filesystem("memory").rm(url, recursive=True)


class Beside:
    """fsspec's file system in memory, with the same files below one folder."""

    def __init__(self) -> None:
        self.fs = fsspec.filesystem("memory")
        self.root = ""

    def at(self, path: Any) -> Any:
        return [self.at(one) for one in path] if isinstance(path, list) else f"{self.root}/{path}"

    def below(self, found: Any) -> Any:
        """What was found, with paths as "ags" has them."""
        if isinstance(found, dict):
            return {self.below(key): value for key, value in found.items()}
        if isinstance(found, (list, tuple)):
            return type(found)(self.below(one) for one in found)
        return found.removeprefix(self.root).lstrip("/") if isinstance(found, str) else found

    def put(self, tree: dict[str, bytes]) -> None:
        """Have these files only, in a new folder."""
        self.root = f"/beside-{os.urandom(4).hex()}"
        self.fs.mkdir(self.root)
        self.fs.pipe({self.at(path): data for path, data in tree.items()})

    def tree(self) -> dict[str, bytes]:
        return {self.below(path): self.fs.cat_file(path) for path in self.fs.find(self.root)}


def tree_of(fs: Any) -> dict[str, bytes]:
    return {path: fs.cat_file(path) for path in fs.find("")}


def some_tree(rng: random.Random) -> dict[str, bytes]:
    tree: dict[str, bytes] = {}
    for n in range(rng.randint(2, 8)):
        path = some_path(rng)
        if not any(f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/") for other in tree):
            tree[path] = b"%d" % n
    return tree


def some_path(rng: random.Random, tree: dict[str, bytes] | None = None) -> str:
    if tree and rng.random() < 0.6:  # a file, or a folder above one
        path = rng.choice(sorted(tree))
        return path if rng.random() < 0.5 else path.rpartition("/")[0] or path
    return "/".join(rng.choice(NAMES) for _ in range(rng.randint(1, 3)))


def attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def change(rng: random.Random, tree: dict[str, bytes]) -> tuple[str, list[Any], dict[str, Any]]:
    """A call that changes files: its name and its arguments."""
    options: dict[str, Any] = {"recursive": rng.random() < 0.5}
    path: Any = some_path(rng, tree)
    if (kind := rng.random()) < 0.15:
        path = [path, some_path(rng, tree)]
    elif kind < 0.3:
        path += "/"
    elif kind < 0.4:
        path = f"{path.split('/')[0]}/*"
    if (name := rng.choice(["cp", "mv", "rm"])) == "rm":
        return name, [path], options
    target: Any = some_path(rng, tree) + rng.choice(["", "", "/"])
    if isinstance(path, list) and rng.random() < 0.5:
        target = [target, some_path(rng)]
    if name == "cp" and rng.random() < 0.2:  # fsspec's mv loses files if it has a maxdepth
        options["maxdepth"] = rng.randint(1, 2)
    return name, [path, target], options


def loses(name: str, arguments: list[Any], before: dict[str, bytes], after: dict[str, bytes]) -> bool:
    """Whether fsspec's mv loses a file: it removes what was to be moved even if a target is there, too."""
    if name != "mv":
        return False
    sources, targets = (one if isinstance(one, list) else [one] for one in arguments)
    inside = any(
        f"{target.rstrip('/')}/".startswith(f"{source.rstrip('/')}/") for source in sources for target in targets
    )
    return inside or (not set(before.values()) <= set(after.values()) and len(after) < len(before))


@pytest.mark.parametrize("seed", range(12))
def test_changes_as_in_memory(fs: Any, seed: int) -> None:
    rng, beside = random.Random(seed), Beside()
    done = 0
    fs.pipe(some_tree(rng))
    for _ in range(24):
        before = tree_of(fs)
        beside.put(before)
        name, arguments, options = change(rng, before)
        what = f"{name}{(*arguments, options)} on {sorted(before)}"
        _, theirs = attempt(lambda: getattr(beside.fs, name)(*beside.at(arguments), **options))  # noqa: B023
        _, ours = attempt(lambda: getattr(fs, name)(*arguments, **options))  # noqa: B023
        after = tree_of(fs)
        if ours is not None:
            assert after == before, what
            assert theirs is not None or isinstance(ours, REFUSED), (what, ours)
        elif theirs is None and not loses(name, arguments, before, beside.tree()):
            assert after == beside.tree(), what
            done += 1
    assert done > 3


@pytest.mark.parametrize("seed", range(6))
def test_finds_as_in_memory(fs: Any, seed: int) -> None:
    rng, beside = random.Random(100 + seed), Beside()
    tree = some_tree(rng)
    fs.pipe(tree)
    beside.put(tree)
    for _ in range(60):
        name = rng.choice(["ls", "find", "glob", "walk", "expand_path", "exists", "isdir", "isfile", "du", "cat_file"])
        path = some_path(rng, tree) + rng.choice(["", "", "/"])
        options: dict[str, Any] = {"detail": False} if name == "ls" else {}
        if name == "find":
            options["withdirs"] = True
        if name in ("glob", "expand_path"):
            path = f"{path.rstrip('/')}{rng.choice(['', '/*', '*', '/**', '/?', '/[ab]*', '/[!a]*'])}"
        if name in ("walk", "expand_path", "find") and rng.random() < 0.5:
            options["maxdepth"] = rng.randint(1, 2)
        if name == "walk":
            options["topdown"] = rng.random() < 0.5
        what = f"{name}({path!r}, {options}) on {sorted(tree)}"
        theirs, error = attempt(lambda: getattr(beside.fs, name)(beside.at(path), **options))  # noqa: B023
        ours, mine = attempt(lambda: getattr(fs, name)(path, **options))  # noqa: B023
        assert (error is None) == (mine is None), (what, error, mine)
        if error is None:
            assert comparable(name, ours) == comparable(name, beside.below(as_list(theirs))), what


def as_list(found: Any) -> Any:
    return list(found) if hasattr(found, "__next__") else found


def comparable(name: str, found: Any) -> Any:
    if name == "walk":
        return [(at, sorted(folders), sorted(names)) for at, folders, names in found]
    return sorted(found) if isinstance(found, list) else found


MAGIC = ("a[1]", "*", "d[x]/e?", "d[x]/f")


@pytest.fixture
def magic(fs: Any) -> Any:
    """A file system with names that would be patterns, and names that these patterns match."""
    fs.pipe({path: path.encode() for path in (*MAGIC, "a1", "dx/e1")})
    return fs


def test_what_is_there_is_no_pattern(magic: Any, tmp_path: Path) -> None:
    assert magic.cat("a[1]") == b"a[1]"
    assert magic.cat("*") == b"*"
    assert magic.cat(["a[1]", "d[x]/e?"]) == {"a[1]": b"a[1]", "d[x]/e?": b"d[x]/e?"}
    assert magic.cat("d[x]", recursive=True) == {path: path.encode() for path in ("d[x]/e?", "d[x]/f")}
    assert magic.cat("a[1-9]") == {"a1": b"a1"}
    assert magic.expand_path("d[x]", recursive=True) == ["d[x]", "d[x]/e?", "d[x]/f"]
    with magic.open("a[1]") as file:
        assert file.read() == b"a[1]"
    magic.cp("a[1]", "copy")
    magic.mv("d[x]/e?", "moved")
    assert (magic.cat("copy"), magic.cat("moved")) == (b"a[1]", b"d[x]/e?")
    magic.rm("*")
    assert "a1" in magic.find("")
    assert "*" not in magic.find("")
    magic.mv("d[x]", "there", recursive=True)
    magic.rm_file("a[1]")
    assert magic.find("") == ["a1", "copy", "dx/e1", "moved", "there/f"]
    magic.pipe("b[x]", b"")
    magic.rm("b[x]")
    with pytest.raises(IsADirectoryError):
        magic.rm_file("dx")
    with pytest.raises(FileNotFoundError):
        magic.rm_file("d?")
    magic.rm("[dt]*", recursive=True)
    assert magic.find("") == ["a1", "copy", "moved"]


def test_gets_and_puts_what_is_there(magic: Any, tmp_path: Path) -> None:
    def got(name: str) -> dict[str, str]:
        root = tmp_path / name
        return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}

    magic.get("a[1]", str(tmp_path / "one"))
    assert (tmp_path / "one").read_text() == "a[1]"
    (tmp_path / "there").mkdir()
    for path in ("a1", "a[1]"):  # at the top of the dataset, where no "/" is in the path
        magic.get(path, str(tmp_path / "there"))
    magic.get("a1", str(tmp_path / "made") + "/")
    assert got("there") == {"a1": "a1", "a[1]": "a[1]"}
    assert got("made") == {"a1": "a1"}
    magic.get("d[x]", str(tmp_path / "folder"), recursive=True)
    assert got("folder") == {"e?": "d[x]/e?", "f": "d[x]/f"}
    magic.get("", str(tmp_path / "all"), recursive=True)
    assert got("all") == {path: path for path in (*MAGIC, "a1", "dx/e1")}
    magic.get(["a1", "dx/e1"], str(tmp_path / "flat"))
    assert got("flat") == {"a1": "a1", "e1": "dx/e1"}
    magic.put(str(tmp_path / "there" / "a[1]"), "put")
    magic.put(str(tmp_path / "there" / "a[1]"), "d[x]")
    assert (magic.cat("put"), magic.cat("d[x]/a[1]")) == (b"a[1]", b"a[1]")


def test_moves_at_the_top_of_a_dataset(fs: Any) -> None:
    """Without a "/" in their paths, files and folders go into folders, and not into their places."""
    fs.pipe({"a": b"a", "b": b"b", "d/x": b"x", "e/y": b"y"})
    fs.cp("a", "d")
    fs.mv("b", "d/")
    fs.mv("e", "d", recursive=True)
    assert tree_of(fs) == {"a": b"a", "d/a": b"a", "d/b": b"b", "d/e/y": b"y", "d/x": b"x"}
    fs.mv(["d/a", "d/b"], ["d/b", "d/a"])  # at once
    assert tree_of(fs) == {"a": b"a", "d/a": b"b", "d/b": b"a", "d/e/y": b"y", "d/x": b"x"}
    fs.mv("d", "d/d", recursive=True)
    assert tree_of(fs) == {"a": b"a", "d/d/a": b"b", "d/d/b": b"a", "d/d/e/y": b"y", "d/d/x": b"x"}
    version = fs.dataset.version
    fs.mv("a", "a")
    fs.mv("no", "no")
    fs.mv("d/d/x", "d/d")  # into the folder that it is in
    for call, error in (
        (lambda: fs.mv("no", "b"), FileNotFoundError),
        (lambda: fs.mv("d/no", "d"), FileNotFoundError),  # into the folder that it would be in
        (lambda: fs.mv("d", "b"), IsADirectoryError),
        (lambda: fs.mv(["a", "d/d/a"], "b/"), ValueError),
        (lambda: fs.mv(["a", "a"], ["b", "c"]), ValueError),
        (lambda: fs.mv("a", "d/d/a/b"), ValueError),
        (lambda: fs.cp("a", "a/b"), ValueError),
        (lambda: fs.mv("a", "../b"), PolicyError),
        (lambda: fs.cp("a", "../b"), PolicyError),
        (lambda: fs.cp(["a"], ["b", "c"]), ValueError),
    ):
        with pytest.raises(error):
            call()
    assert fs.dataset.version == version
    fs.invalidate_cache()
    assert fs.dataset.version == version
    fs.mv("a", "a/b")  # no file "a" is left
    assert fs.cat("a/b") == b"a"


def test_odd_paths(fs: Any) -> None:
    for path in ("", "/", ".", "..", "a/../b", "a//b", "./a", "a/.", "a\0b"):
        with pytest.raises((PolicyError, ValueError, IsADirectoryError)):
            fs.pipe_file(path, b"")
        assert not fs.isfile(path)
    composed, apart = "\u00e9", "e\u0301"
    fs.pipe({composed: b"1", apart: b"2", " ": b"3", "-": b"4", "a\nb": b"5", "%2e%2e": b"6", "x" * 255: b"7"})
    assert len(fs.find("")) == 7
    assert (fs.cat(composed), fs.cat(apart)) == (b"1", b"2")
    assert fs.cat("///%2e%2e/") == b"6"
    assert fs.cat("ags://-") == b"4"
