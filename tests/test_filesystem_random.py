"""Random sequences of calls: protocol "ags" does what fsspec's local file system does with the same files."""

from __future__ import annotations

import io
import os
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, leftovers, make_kms, read_tree, write_tree

from ags_fast import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable

fsspec = pytest.importorskip("fsspec")

NAMES = ("a", "b", "a1", "x y", "\u00e9", "c#d%20", "{a,b}")
LINES = ("x,y\n", "\r\n", "\u20ac\u00fc\r", "1,2\n", "long " * 300, "\n", "\x0b\u2028")
# Where a file and a folder would have one path, or a folder is named where a file is meant, the local file system does
# something else each time. Here that is an error, and nothing changes.
REFUSED = (ValueError, IsADirectoryError, FileExistsError)


class Pair:
    """A dataset, and a folder with the same files."""

    def __init__(self, tmp_path: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tmp_path = tmp_path
        self.root = tmp_path / "plain"
        self.root.mkdir()
        self.options: dict[str, Any] = {"dataset": str(tmp_path / "dataset"), "kms": make_kms(tmp_path)}
        self.options["write_options"] = {"fsync": False, "block_size": 1024}
        Dataset.create(self.options["dataset"], kms=self.options["kms"], wrapping_key_id=MASTER)
        self.ags = self.open()
        self.local = fsspec.filesystem("file", auto_mkdir=True, skip_instance_cache=True)
        self.tree: dict[str, bytes] = {}
        self.versions: dict[int, dict[str, bytes]] = {}  # what each had
        self.same = 0  # calls that both did

    def open(self, **options: Any) -> Any:
        return fsspec.filesystem("ags", skip_instance_cache=True, **self.options, **options)

    def at(self, path: Any) -> Any:
        """Where paths of the dataset are in the folder."""
        if isinstance(path, dict):
            return {self.at(key): value for key, value in path.items()}
        return [self.at(one) for one in path] if isinstance(path, list) else f"{self.root}/{path}"

    def below(self, found: Any) -> Any:
        """What was found in the folder, with paths as "ags" has them."""
        if isinstance(found, dict):
            return {self.below(key): self.below(value) for key, value in found.items()}
        if isinstance(found, (list, tuple)):
            return type(found)(self.below(one) for one in found)
        return found.removeprefix(str(self.root)).lstrip("/") if isinstance(found, str) else found

    def settle(self) -> None:
        """Make the folder what the dataset is: without empty folders, and after calls that only one of them did."""
        shutil.rmtree(self.root)
        write_tree(self.root, self.tree)

    # ---- what a step begins with

    def data(self) -> bytes:
        if self.rng.random() < 0.3:
            return "".join(self.rng.choices(LINES, k=self.rng.randint(0, 40))).encode()
        return self.rng.randbytes(self.rng.choice((0, 1, 1023, 1024, 1025, self.rng.randint(0, 5000))))

    def some_path(self) -> str:
        return "/".join(self.rng.choices(NAMES, k=self.rng.randint(1, 3)))

    def path(self) -> str:
        """A path, often that of a file, or of a folder above one."""
        if self.tree and self.rng.random() < 0.7:
            path = self.rng.choice(sorted(self.tree))
            return path if self.rng.random() < 0.7 else path.rpartition("/")[0] or path
        return self.some_path()

    def paths(self) -> Any:
        path: Any = self.path()
        if (kind := self.rng.random()) < 0.15:
            return [path, self.path()]
        return path + "/" if kind < 0.25 else f"{path.split('/')[0]}/*" if kind < 0.35 else path

    def there(self, path: str) -> bool:
        return path in self.tree or folder_of(path, self.tree)

    # ---- changes

    def change(self, call: Callable[[Any, Callable[[Any], Any]], Any], what: str) -> None:
        """Do one call on both. It makes one version or changes nothing."""
        before, made = dict(self.tree), self.made()
        _, theirs = attempt(lambda: call(self.local, self.at))
        _, ours = attempt(lambda: call(self.ags, lambda path: path))
        what = f"{what} on {sorted(before)}: {ours!r} and {theirs!r}"
        after = contents(self.ags)
        self.tree = after
        if ours is not None:
            assert after == before, what
            assert theirs is not None or isinstance(ours, REFUSED) or read_tree(self.root) == before, what
        elif theirs is None:
            assert after == read_tree(self.root), what
            self.same += 1
        assert self.made() - made <= (ours is None), what
        assert after == before or self.made() == made + 1, what
        self.versions[self.number()] = after
        self.settle()

    def number(self) -> int:
        return int(self.ags.dataset.version)

    def made(self) -> int:
        """How many versions have other files than the one before."""
        return sum(version.operation not in ("create", "end") for version in self.ags.dataset.versions())

    def pipe(self) -> None:
        value: Any = {self.path(): self.data() for _ in range(self.rng.randint(1, 3))}
        self.change(lambda fs, at: fs.pipe(at(value)), f"pipe {sorted(value)}")

    def pipe_file(self) -> None:
        path, data, mode = self.path(), self.data(), self.rng.choice(("create", "overwrite"))
        self.change(lambda fs, at: fs.pipe_file(at(path), data, mode=mode), f"pipe_file {path} {mode}")

    def write(self) -> None:
        """Write a file in pieces, in every mode."""
        path, mode = self.path(), self.rng.choice(("wb", "w", "wt", "xb", "x", "ab", "r+b", "a"))
        options: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": self.rng.choice((None, ""))}
        pieces: list[Any] = [self.data() for _ in range(self.rng.randint(0, 4))]
        if "b" not in mode:
            pieces = [piece.decode("utf-8", "replace") for piece in pieces]

        def call(fs: Any, at: Any) -> None:
            if fs is self.ags and mode[0] in "ar":
                with pytest.raises((io.UnsupportedOperation, NotImplementedError)):
                    fs.open(path, mode, **options)
                raise ValueError("refused, as it must be")
            with fs.open(at(path), mode, **options) as file:
                for piece in pieces:
                    file.write(piece)

        self.change(call, f"open {path} {mode} {options}")

    def leave(self) -> None:
        """An exception that leaves a file drops it."""
        path, data = self.path(), self.data()

        def call(fs: Any, at: Any) -> None:
            if fs is self.ags:
                with fs.open(path, "wb") as file:
                    file.write(data)
                    raise ValueError("left")

        self.change(call, f"leave {path}")

    def put(self) -> None:
        source = self.tmp_path / "source"
        shutil.rmtree(source, ignore_errors=True)
        write_tree(source, {path: self.data() for path in ("f", "d/g", "d/h/i", "x y/j")[: self.rng.randint(1, 4)]})
        where = self.rng.choice(("f", "f", "", "/", "d", "d/", "*", "d/*", ["f", "x y/j"]))
        lpath: Any = [str(source / one) for one in where] if isinstance(where, list) else f"{source}/{where}".rstrip()
        rpath = self.path() + self.rng.choice(("", "/"))
        recursive = self.rng.random() < 0.6
        self.change(lambda fs, at: fs.put(lpath, at(rpath), recursive=recursive), f"put {where!r} {rpath} {recursive}")

    def copy_or_move(self) -> None:
        name = self.rng.choice(("cp", "mv"))
        # On the local file system mv takes one path, which may be a folder, and a "/" at the end says nothing.
        path1: Any = self.path() if name == "mv" else self.paths()
        path2, recursive = self.path(), name == "mv" or self.rng.random() < 0.5
        if name == "cp" or folder_of(path2, self.tree):
            path2 += self.rng.choice(("", "", "/"))
        if name == "mv" and path1 == path2.rstrip("/"):
            return
        sources = path1 if isinstance(path1, list) else [path1]
        if any(path2.startswith(f"{one}/") and not self.there(one) for one in sources):
            return  # the local file system makes the folders of the target before it looks for the source
        how = f"{name} {path1!r} {path2!r} {recursive}"
        self.change(lambda fs, at: getattr(fs, name)(at(path1), at(path2), recursive=recursive), how)

    def remove(self) -> None:
        path, recursive = self.path(), self.rng.random() < 0.5
        self.change(lambda fs, at: fs.rm(at(path), recursive=recursive), f"rm {path} {recursive}")

    def transact(self) -> None:
        """Several changes at once, or none of them. Reads show the version at which the transaction began."""
        base, now, number = dict(self.tree), dict(self.tree), self.number()
        commits, said = self.rng.random() < 0.7, []
        try:
            with self.ags.transaction:
                for _ in range(self.rng.randint(1, 6)):
                    said.append(self.change_within(base, now))
                    assert contents(self.ags) == base, said
                if not commits:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            now = base
        self.tree = contents(self.ags)
        assert self.tree == now, (said, sorted(base))
        assert self.number() - number in ((1,) if now != base else (0, 1)), said
        self.versions[self.number()] = now
        self.same += now != base
        self.settle()

    def change_within(self, base: dict[str, bytes], now: dict[str, bytes]) -> str:
        """A change in a transaction that began at `base` and has made `now` of it. Returns what was called."""
        name = self.rng.choice(("pipe", "xb", "rm", "cp", "mv"))
        path, target, data = self.path(), self.path(), self.data()
        said = f"{name} {path} {target if name in ('cp', 'mv') else ''}"
        if name == "mv" and path == target:
            return said
        made = path
        if name in ("cp", "mv"):
            made = f"{target}/{path.rpartition('/')[2]}" if folder_of(target, base) else target
        new = dict(now)
        if name in ("rm", "mv"):
            works = path in new and not folder_of(path, base)
            moved = new.pop(path, b"")
        else:
            works, moved = name != "cp" or path in base, base.get(path, b"") if name == "cp" else data
        if name != "rm":
            works = works and free(made, new) and not (name == "xb" and made in new)
            new[made] = moved
        calls: dict[str, Callable[[], Any]] = {
            "pipe": lambda: self.ags.pipe_file(path, data),
            "xb": lambda: self.ags.pipe_file(path, data, mode="create"),
            "rm": lambda: self.ags.rm_file(path),
            "cp": lambda: self.ags.cp(path, target),
            "mv": lambda: self.ags.mv(path, target),
        }
        _, error = attempt(calls[name])
        if name == "cp" and folder_of(path, base):  # without its files it is nothing to copy
            assert error is None, said
            return said
        assert (error is None) == works, (said, error, sorted(base), sorted(now))
        if works:
            now.clear()
            now.update(new)
        return said

    # ---- reads

    def look(self) -> None:
        name = self.rng.choice(("ls", "find", "glob", "walk", "exists", "isdir", "isfile", "du", "cat", "info"))
        path = self.path() + self.rng.choice(("", "", "/"))
        options: dict[str, Any] = {}
        if name in ("ls", "find"):
            options["detail"] = self.rng.random() < 0.5
        if name == "glob":
            path = path.rstrip("/") + self.rng.choice(("", "/*", "*", "/**", "/?", "/[ab]*", "**/a*"))
        if name == "find":
            options["withdirs"] = self.rng.random() < 0.5
        if name in ("walk", "find") and self.rng.random() < 0.5:
            options["maxdepth"] = self.rng.randint(1, 2)
        if name == "walk":
            options["topdown"] = self.rng.random() < 0.5
        self.compare(name, lambda fs, at: plain(getattr(fs, name)(at(path), **options)), f"{name} {path!r} {options}")

    def compare(self, name: str, call: Callable[[Any, Callable[[Any], Any]], Any], what: str) -> None:
        theirs, error = attempt(lambda: call(self.local, self.at))
        ours, mine = attempt(lambda: call(self.ags, lambda path: path))
        what = f"{what} on {sorted(self.tree)}"
        assert (error is None) == (mine is None), (what, error, mine)
        if error is None:
            assert comparable(name, ours) == comparable(name, self.below(theirs)), what

    def read(self) -> None:
        """Read a file with a random sequence of seeks and reads, as bytes or as text."""
        if not self.tree:
            return
        path, mode, seed = self.rng.choice(sorted(self.tree)), self.rng.choice(("rb", "r", "rt")), self.rng.random()
        options: dict[str, Any] = {}
        if "b" not in mode:
            options = {"encoding": "utf-8", "errors": "replace", "newline": self.rng.choice((None, "", "\n", "\r"))}
        size = len(self.tree[path]) if "b" in mode else None
        with open(self.at(path), mode, **options) as plain_file:
            theirs = moves_in(plain_file, random.Random(seed), size)
        with self.ags.open(path, mode, **options) as file:
            assert moves_in(file, random.Random(seed), size) == theirs, (path, mode, options, seed)

    def read_ranges(self) -> None:
        if not self.tree:
            return
        paths = self.rng.choices(sorted(self.tree), k=self.rng.randint(1, 5))
        bounds = [self.slice_of(len(self.tree[path])) for path in paths]
        expected = [self.tree[path][begin:end] for path, (begin, end) in zip(paths, bounds, strict=True)]
        starts, ends = [begin for begin, _ in bounds], [end for _, end in bounds]
        assert self.ags.cat_ranges(paths, starts, ends, on_error="raise") == expected
        for path, (begin, end), data in zip(paths, bounds, expected, strict=True):
            assert self.ags.cat_file(path, begin, end) == data
            assert self.ags.head(path, 700) == self.tree[path][:700]
            assert self.ags.tail(path, 700) == self.tree[path][-700:]

    def slice_of(self, size: int) -> tuple[int | None, int | None]:
        begin, end = (self.rng.choice((None, 0, self.rng.randint(-size, size + 9))) for _ in range(2))
        return begin, end

    def get(self) -> None:
        """What `get` brings of a folder is the folder."""
        target = self.tmp_path / "got"
        shutil.rmtree(target, ignore_errors=True)
        self.ags.get("", f"{target}/", recursive=True)
        assert read_tree(target) == self.tree


def attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def contents(fs: Any) -> dict[str, bytes]:
    found = {path: fs.cat_file(path) for path in fs.find("")}
    assert {path: len(data) for path, data in found.items()} == fs.du("", total=False)
    return found


def folder_of(path: str, tree: dict[str, bytes]) -> bool:
    return any(other.startswith(f"{path}/") for other in tree)


def free(path: str, tree: dict[str, bytes]) -> bool:
    """Whether a file may have a path beside those files: no folder has the path, and no file that of its folder."""
    return not folder_of(path, tree) and not any(path.startswith(f"{other}/") for other in tree)


def plain(found: Any) -> Any:
    """What both file systems know, without times."""
    if hasattr(found, "__next__"):
        return list(found)
    if isinstance(found, dict) and "type" in found:
        return info(found)
    if isinstance(found, dict):
        return {path: plain(value) for path, value in found.items()}
    return [plain(one) for one in found] if isinstance(found, list) else found


def info(found: dict[str, Any]) -> tuple[str, ...]:
    return (found["name"], found["type"], *([f"{found['size']} bytes"] if found["type"] == "file" else []))


def comparable(name: str, found: Any) -> Any:
    if name == "walk":
        return sorted((at, sorted(folders), sorted(names)) for at, folders, names in found)
    return sorted(found) if isinstance(found, list) else found


def moves_in(file: Any, rng: random.Random, size: int | None) -> list[Any]:
    """What a file returns to a sequence of calls. Text, which has no size, is only read on."""
    found: list[Any] = []
    binary = size is not None
    for _ in range(rng.randint(1, 12)):
        call = rng.choice(("read", "read", "readline", "next", "lines", *(["seek", "readinto", "tell"] * binary)))
        count = rng.choice((-1, 0, 1, rng.randint(0, 3000)))
        if call == "read":
            found.append(file.read(count))
        elif call == "readline":
            found.append(file.readline(count))
        elif call == "next":
            found.append(next(file, None) if not binary else next(iter(file), None))
        elif call == "lines":
            found.append(file.readlines(max(count, 0)))
        elif call == "seek":
            whence = rng.randint(0, 2)
            offset = rng.randint(0, (size or 0) + 100) - (0, file.tell(), size or 0)[whence]
            found.append(file.seek(offset, whence))
        elif call == "readinto":
            buffer = bytearray(max(count, 0))
            found.append((file.readinto(buffer), bytes(buffer)))
        else:
            found.append(file.tell())
    return found


def run(tmp_path: Path, seed: int, steps: int) -> Pair:
    pair = Pair(tmp_path, seed)
    weights: dict[Callable[[], None], int] = {pair.pipe: 3, pair.pipe_file: 2, pair.write: 3, pair.leave: 1}
    weights |= {pair.put: 3, pair.copy_or_move: 5, pair.remove: 2, pair.transact: 4}
    reads = [pair.look, pair.look, pair.look, pair.read, pair.read, pair.read_ranges, pair.get]
    for _ in range(steps):
        pair.rng.choices([*weights], [*weights.values()])[0]()
        for _ in range(4):
            pair.rng.choice(reads)()
    assert contents(pair.open()) == pair.tree  # of another instance, which reads all that is stored
    assert leftovers(tmp_path / "dataset", pair.options["kms"]) == []
    for number in pair.rng.sample(sorted(pair.versions.keys() - {0}), min(4, len(pair.versions) - 1)):
        assert contents(pair.open(version=number)) == pair.versions[number]
    return pair


@pytest.mark.parametrize("seed", range(3))
def test_calls_as_on_the_local_file_system(tmp_path: Path, seed: int) -> None:
    assert run(tmp_path, seed, 25).same > 8


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [int(one) for one in os.environ.get("AGS_FAST_SEEDS", "").split()] or range(100, 160))
def test_long_sequences_of_calls(tmp_path: Path, seed: int) -> None:
    assert run(tmp_path, seed, 60).same > 12
