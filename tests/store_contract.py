"""What every Store must do, wherever its files are: test_fs.py and test_s3.py run these tests on theirs."""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from kms_clients import keystore
from programs import storage
from support import KEY, finish_python, open_stream, pattern, program, start_python

from ags_fast import AgsReader, AgsWriter, Dataset, ExpiredError, FormatError, PolicyError
from ags_fast.fs import LocalFile, NewFile, NewObject, Store
from ags_fast.jobs import Policy

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

SIZES = (0, 1, 100_000, 9 << 20)  # the last one takes an upload in parts


def names(store: Store, prefix: str = "") -> list[str]:
    return sorted(entry.path for entry in store.list(prefix))


def put(store: Store, path: str, data: bytes, **options: Any) -> None:
    with store.begin(path, **options) as new:
        new.write(data)
        new.publish()


def read_all(store: Store, path: str) -> bytes:
    """The bytes of a file, as a reader of any source gets them."""
    source = store.open_seekable(path)
    if isinstance(source, LocalFile):
        with open(source, "rb") as file:
            return file.read()
    with source:
        data = source.read()
    assert source.closed
    return data


def race(store: Store, processes: int, rounds: int, folder: Path) -> None:
    """Processes with four threads each create the same files: each file has one winner, and is the winner's."""
    go = folder / "go"
    children = [start_python(program(storage.create_at_once, me, rounds, go, store)) for me in range(processes)]
    while not all((folder / f"go{me}").exists() for me in range(processes)):
        assert all(child.poll() is None for child in children)
        time.sleep(0.01)
    go.touch()
    won = [f"{me} {number}" for me, child in enumerate(children) for number in finish_python(child).split()]
    assert len(won) == rounds
    assert sorted(won) == sorted(read_all(store, path).rstrip(b"\0").decode() for path in names(store))


def race_uploads(store: Store, size: int) -> None:
    """Four threads publish the same new file: one wins, and the file is the winner's."""
    new = [store.begin("file", exclusive=True) for _ in range(4)]
    won: list[int] = []

    def publish(me: int) -> None:
        new[me].write(pattern(size, me))
        try:
            new[me].publish()
            won.append(me)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=publish, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert read_all(store, "file") == pattern(size, won[0])


@contextlib.contextmanager
def writing(store: Store, size: int) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of a file."""
    child = start_python(program(storage.write_slowly, store, size))
    with child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "writing\n"
            yield child
        finally:
            child.kill()


class StoreContract:
    """`store` is a fixture: an empty store whose folder does not exist yet."""

    def test_empty(self, store: Store) -> None:
        assert names(store) == names(store, "some/folder") == []
        assert store.stat("nothing") is None
        assert store.stat("no/thing") is None
        with pytest.raises(FileNotFoundError):
            store.read_small("nothing", 10)
        with pytest.raises(FileNotFoundError), AgsReader(store.open_seekable("nothing"), KEY, length=None):
            pass
        store.delete("nothing")
        store.delete("no/thing")
        assert store.sweep() == store.sweep("tag", 0) == []

    def test_list_and_stat(self, store: Store) -> None:
        paths = ["top", "a/one", "a/two", "a/b/three", "ab", ".hidden/.file", "part=x y/%41 é&+?#.avro", "a.agstmp"]
        for i, path in enumerate(paths):
            put(store, path, bytes(i))
        found = {entry.path: entry for entry in store.list()}
        assert {path: entry.size for path, entry in found.items()} == {path: i for i, path in enumerate(paths)}
        for path, entry in found.items():
            again = store.stat(path)
            assert again is not None
            assert (again.path, again.size, again.stamp) == (path, entry.size, entry.stamp)
            assert 1.7e9 < entry.modified < 5e9
            assert read_all(store, path) == bytes(entry.size)
            assert entry == pickle.loads(pickle.dumps(entry))
            assert repr(path) in repr(entry)
        assert names(store, "a/") == ["a/b/three", "a/one", "a/two"]
        for after in ("a/b", "a/b/three", "a/one", "a/z", "part=x y/%41 é&+?#.avro"):
            assert sorted(entry.path for entry in store.list(after=after)) == [p for p in sorted(paths) if p > after]
            found_in = sorted(entry.path for entry in store.list("a/", after))
            assert found_in == [p for p in sorted(paths) if p > after and p.startswith("a/")]
        assert names(store, "a") == ["a.agstmp", "a/b/three", "a/one", "a/two", "ab"]
        assert names(store, "a/b/th") == ["a/b/three"]
        assert names(store, "x") == names(store, "a/x/") == []
        assert store.stat("a") is None
        put(store, "top", b"changed")
        assert store.stat("top").stamp != found["top"].stamp  # type: ignore[union-attr]
        for path in paths:
            store.delete(path)
            store.delete(path)
        assert names(store) == []

    def test_read_has_a_limit(self, store: Store) -> None:
        for size in (0, 1, 1000):
            put(store, "file", pattern(size))
            assert store.read_small("file", size) == store.read_small("file", 5000) == pattern(size)
            if size:
                for limit in (0, size - 1):
                    with pytest.raises(FormatError, match="may have"):
                        store.read_small("file", limit)

    def test_create_never_replaces(self, store: Store) -> None:
        for size in SIZES:
            path = f"_ags/versions/{size}.json"
            store.create_exclusive(path, pattern(size))
            for data in (b"", b"other", pattern(size)):
                with pytest.raises(FileExistsError):
                    store.create_exclusive(path, data)
            assert read_all(store, path) == pattern(size)
            store.delete(path)
            store.create_exclusive(path, b"new")
            assert store.read_small(path, 3) == b"new"
        assert store.sweep(older_than=0) == []

    @pytest.mark.parametrize("exclusive", [False, True])
    def test_new_appears_when_complete(self, store: Store, exclusive: bool) -> None:
        for size in SIZES:
            path, plain = f"folder {size}/file", pattern(size)
            new = store.begin(path, tag="job-1", exclusive=exclusive)
            assert isinstance(new, (NewFile, NewObject))
            assert new.path.endswith(path)
            for begin in range(0, size, 1 << 20):
                assert new.write(memoryview(plain)[begin : begin + (1 << 20)]) == min(1 << 20, size - begin)
            assert store.stat(path) is None
            assert names(store, "folder") == []
            new.publish()
            new.publish()
            new.discard()
            assert read_all(store, path) == plain
            if exclusive:
                with pytest.raises(FileExistsError):
                    store.begin(path, exclusive=True)
            else:
                put(store, path, b"replaced")
                assert read_all(store, path) == b"replaced"
            store.delete(path)
        assert names(store) == []
        assert store.sweep(older_than=0) == []

    def test_new_that_loses_the_race(self, store: Store) -> None:
        """Nothing was there when it began, and something is in the end."""
        for size in SIZES:
            new = store.begin("file", exclusive=True)
            new.write(pattern(size))
            put(store, "file", b"somebody was faster")
            with pytest.raises(FileExistsError):
                new.publish()
            assert read_all(store, "file") == b"somebody was faster"
            store.delete("file")
        assert names(store) == []
        assert store.sweep(older_than=0) == []

    @pytest.mark.parametrize("how", ["discard", "with", "collected", "in a cycle"])
    def test_new_given_up(self, store: Store, how: str) -> None:
        put(store, "old", b"old")
        for path, sizes in (("old", SIZES[-2:]), ("new", SIZES[1:])):
            for size in sizes:
                new = store.begin(path)
                new.write(pattern(size))
                if how == "discard":
                    new.discard()
                    new.discard()
                    new.publish()
                elif how == "with":
                    with pytest.raises(KeyboardInterrupt), new:
                        raise KeyboardInterrupt
                elif how == "in a cycle":  # then what it needs may be finalized before it
                    cycle: list[object] = [new]
                    cycle.append(cycle)
                    del cycle
                del new
                gc.collect()
            assert names(store) == ["old"]
            assert store.read_small("old", 9) == b"old"
        self.no_uploads(store)

    def no_uploads(self, store: Store) -> None:
        assert store.sweep(older_than=0) == []

    @pytest.mark.parametrize("size", SIZES)
    def test_under_a_writer(self, store: Store, size: int) -> None:
        plain = pattern(size)
        with AgsWriter(store.begin("a/file", exclusive=True), KEY, aad_prefix=b"p", block_size=100_000) as writer:
            writer.write(plain)
        source = store.open_seekable("a/file")
        with AgsReader(source, KEY, length=writer.file_length, aad_prefix=b"p") as reader:
            assert reader.read() == plain
            reader.seek(size // 2)
            assert reader.read(10) == plain[size // 2 :][:10]
            reader.verify()
        assert open_stream(read_all(store, "a/file"), KEY, b"p") == plain

        def write_half() -> None:
            with AgsWriter(store.begin("a/cut"), KEY, block_size=1000) as writer:
                writer.write(plain)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            write_half()
        writer = AgsWriter(store.begin("a/cut"), KEY)
        writer.write(plain)
        writer.abort()
        assert names(store) == ["a/file"]
        with pytest.raises(ValueError, match="are for a path"):
            AgsWriter(store.begin("a/cut"), KEY, exclusive=True)

    def test_reads_of_a_source(self, store: Store) -> None:
        """Any reads are those of a file, whatever is read ahead."""
        data = pattern(300_000)
        put(store, "file", data)
        source = store.open_seekable("file", store.stat("file"))
        right = io.BytesIO(data)
        with io.FileIO(source) if isinstance(source, LocalFile) else source as file:
            on = -1  # where the last one ended
            moves = [(on, 1000)] * 40 + [(0, 10), (299_990, 100), (on, 5), (5000, 0)]
            moves += [(on, size) for size in (1, 70_000, 70_000, 30_000, 10)]
            for offset, size in [*moves, (7, -1), (400_000, 5)]:
                if offset >= 0:
                    assert file.seek(offset) == right.seek(offset)
                assert file.read(size) == right.read(size)
                assert file.tell() == right.tell()
            assert file.seek(-5, io.SEEK_END) == 299_995
            assert file.seek(2, io.SEEK_CUR) == 299_997
            buffer = bytearray(10)
            assert file.readinto(buffer) == 3
            assert buffer == data[-3:] + bytes(7)
            assert file.seekable()
            assert file.readable()
            assert not file.writable()
            with pytest.raises((ValueError, OSError)):
                file.seek(-1)
        with pytest.raises(ValueError, match="closed"):
            file.read(1)

    def test_only_plain_relative_paths(self, store: Store) -> None:
        put(store, "in/side", b"x")
        for path in ("", "/", "/etc/passwd", "..", "../x", "in/../../x", "in/..", "./x", "in//x", "in/", "x/."):
            for call in (
                lambda path: store.begin(path),
                lambda path: store.create_exclusive(path, b"y"),
                lambda path: store.read_small(path, 10),
                store.stat,
                store.open_seekable,
                store.delete,
                lambda path: store.sync_folders([path]),
            ):
                with pytest.raises(PolicyError, match="relative path"):
                    call(path)
        assert names(store) == ["in/side"]

    def test_tags(self, store: Store) -> None:
        for tag in ("a.b", "a/b", "..", "a" * 65, "é", " "):
            with pytest.raises(ValueError, match="letters"):
                store.begin("file", tag=tag)
            with pytest.raises(ValueError, match="letters"):
                store.sweep(tag)

    def test_pickle_and_repr(self, store: Store) -> None:
        put(store, "file", b"x")
        again = pickle.loads(pickle.dumps(store))
        assert again.url == store.url
        assert again.local == store.local
        assert names(again) == ["file"]
        assert repr(again) == f"Store({store.url!r})"

    def test_sync_folders(self, store: Store) -> None:
        put(store, "a/b/c/file", b"x")
        put(store, "a/d/file", b"x", fsync=True)
        store.sync_folders(["a/b/c/file", "a/d/file"])

    def test_exists(self, store: Store) -> None:
        assert not store.exists()
        store.check_writable()
        put(store, "a/file", b"x")
        assert store.exists()

    def test_read_once(self, store: Store) -> None:
        data = pattern(3_000_000)
        put(store, "file", data)
        with store.open_once("file") as file:
            entry = store.stat("file")
            assert entry is not None
            assert (file.size, file.stamp) == (entry.size, entry.stamp)
            got, buffer = bytearray(), bytearray(700_000)
            while filled := file.readinto(buffer):
                assert filled == min(len(buffer), len(data) - len(got))
                got += buffer[:filled]
            assert got == data
            assert not file.changed()
        with pytest.raises(FileNotFoundError):
            store.open_once("nothing")

    def test_whole(self, store: Store) -> None:
        for data in (b"x", b"", pattern(100_000)):  # the first makes the folder, the others replace it
            store.write_small("a/file", data, tag="t")
            assert store.read_small("a/file", len(data)) == data
            store.write_small("a/other", data)
            store.delete("a/other")
            entry = store.stat("a/file")
            assert entry is not None
            assert entry.size == len(data)
            assert store.read_if_unchanged("a/file", entry.size, entry.stamp) in (data, None)  # None: only step by step
        assert names(store) == ["a/file"]
        assert store.sweep("t") == []
        for path in ("a/nothing", "nothing/file"):
            assert store.read_if_unchanged(path, 0) is None
        for path in ("../file", "/file", "a/../file"):
            with pytest.raises(PolicyError):
                store.write_small(path, b"x")
            with pytest.raises(PolicyError):
                store.read_if_unchanged(path, 1)

    def test_folders_that_are_empty(self, store: Store) -> None:
        put(store, "top/a/b/file", b"x")
        for folder in ("top/a", "top", "nothing"):
            store.remove_empty_folders(folder)
        assert names(store) == ["top/a/b/file"]
        store.delete("top/a/b/file")
        store.remove_empty_folders("top/a")
        store.remove_empty_folders("top/")
        put(store, "top/a", b"now a file")
        assert names(store) == ["top/a"]

    # ---- a dataset

    def test_writers_of_a_dataset_race(self, store: Store, tmp_path: Path) -> None:
        """Two commit to one log, and expire old versions, while a third follows them."""
        kms, each = keystore(tmp_path, "master"), 4
        seen = Dataset.create(store, kms=kms, wrapping_key_id="master", policy=Policy(keep=2))

        def write(me: int) -> None:
            dataset = Dataset.open(pickle.loads(pickle.dumps(store)), kms=kms)
            for i in range(each):
                with dataset.transaction(fsync=False) as new, new.create(f"{me}/{i}") as file:
                    file.write(b"%d %d" % (me, i))

        threads = [threading.Thread(target=write, args=(me,)) for me in range(2)]
        for thread in threads:
            thread.start()
        before: set[str] = set()
        alive = True
        while alive:
            alive = any(thread.is_alive() for thread in threads)
            seen.refresh()
            with contextlib.suppress(ExpiredError):
                paths = {file.path for file in seen.files()}
                assert before <= paths
                assert len(paths) == seen.version - 1
                before = paths
        assert seen.version == 2 * each + 1
        for me in range(2):
            for i in range(each):
                with seen.open_file(f"{me}/{i}") as file:
                    assert file.read() == b"%d %d" % (me, i)
        assert [version.number for version in seen.versions()] == [seen.version, seen.version - 1]
