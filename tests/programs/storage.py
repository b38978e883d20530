"""Stores: of several processes, forked, held, and out of room."""

from __future__ import annotations

import errno
import functools
import gc
import os
import resource
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from killing import ended
from support import KEY, error_of

from ags_fast import AgsWriter
from ags_fast.fs import Store, local


def store_without_fsspec(folder: Path) -> None:
    store = Store(f"file://{folder}/store")
    store.create_exclusive("a/b", b"x")
    assert [entry.path for entry in store.list()] == ["a/b"]
    assert store.sweep() == []
    assert not {"fsspec", "asyncio", "tempfile", "s3fs"} & set(sys.modules)


def create_at_once(me: int, rounds: int, go: Path, store: Store) -> None:
    store.stat("connected")
    go.with_name(f"go{me}").touch()
    while not go.exists():
        time.sleep(0.001)

    def create(number: int) -> int | None:
        try:
            store.create_exclusive(f"numbered/{number // 4:08d}", f"{me} {number}".encode() + bytes(5000))
        except FileExistsError:
            return None
        return number

    with ThreadPoolExecutor(4) as pool:
        print(*(number for number in pool.map(create, range(4 * rounds)) if number is not None))


def write_slowly(store: Store, size: int) -> None:
    writer = AgsWriter(store.begin("a/file", tag="job-1"), KEY, block_size=100_000)
    writer.write(bytes(size))
    print("writing", flush=True)
    sys.stdin.readline()
    writer.close()


def sweep_beside(url: str) -> None:
    store = Store(url)
    for tag, paths in ("t", {"a/x", "a/y", "gone/x"}), ("t", ["alias/x"]), ("t", {"b/link"}), (None, {"a/x"}):
        print(sorted(store.sweep(tag, 0 if tag is None else None, paths=paths, below="" if tag else "a/below/")))
    print(sorted(store.sweep("t")), sorted(store.sweep("u", paths={"a/x"}, below="b/")))


def sweep_until(url: str, stop: Path) -> None:
    store, swept = Store(url), 0
    while not stop.exists():
        swept += len(store.sweep(older_than=0))
    print(swept)


def hold(url: str) -> None:
    with Store(url).lock("a/lock"):
        print("held", flush=True)
        time.sleep(60)


def fork_while_writing(*urls: str) -> None:
    for url in urls:
        store = Store(url)
        new = store.begin("file")
        new.write(b"parent's")
        pid = os.fork()  # not killing.fork: nothing else may hold the file
        if pid == 0:
            new.publish()
            new.discard()
            del new
            gc.collect()
            os._exit(0)
        assert ended(pid) == 0
        assert store.stat("file") is None
        assert store.sweep(older_than=0) == []
        new.publish()
        assert store.read_small("file", 9) == b"parent's"


def put_too_much(url: str) -> None:
    store = Store(url)

    def check_complete() -> None:
        assert [entry.path for entry in store.list()] == ["a/b/file"]
        assert store.sweep(older_than=0) == []

    new = vars(local)["NewFile"]  # what has a temporary name
    vars(local)["NewFile"] = None
    store.write_small("a/b/file", b"complete", fsync=True)
    assert store.read_small("a/b/file", 9) == b"complete"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    # None cannot be called: step by step, after one step was not possible
    error_of(TypeError, lambda: store.write_small("a/b/large", bytes(5001)))
    check_complete()
    vars(local)["NewFile"] = new
    assert error_of(OSError, lambda: store.write_small("a/b/large", bytes(5001))).errno == errno.EFBIG
    check_complete()


def list_with_links(url: str) -> None:
    for follow in (False, True):
        files, left_out = Store(url, follow=follow).list_all()
        print([entry.path for entry in files])
        print([(kind, path) for path, kind, _ in left_out])


def list_one(store: Store) -> None:
    print(next(iter(store.list())).path)


def fork_with_an_upload(store: Store) -> None:
    store.create_exclusive("parent", b"x")
    half = store.begin("half", exclusive=True)
    half.write(bytes(9 << 20))
    pids = []
    for me in range(2):
        pid = os.fork()  # not killing.fork: nothing else may hold the upload, or catch the end
        if pid == 0:
            assert [entry.path for entry in store.list()][-1] == "parent"
            store.create_exclusive(f"child {me}", b"y")
            error_of(ValueError, functools.partial(half.write, b"x"))
            half.publish()
            half.discard()
            del half
            with AgsWriter(store.begin(f"child/{me}"), bytes(16)) as writer:
                writer.write(bytes(9 << 20))
            if me:
                os._exit(0)
            sys.exit(0)
        pids.append(pid)
    assert not any(map(ended, pids))
    half.publish()
    there = store.stat("half")
    assert there is not None
    assert there.size == 9 << 20
    print(*sorted(entry.path for entry in store.list()), sep=",")


left: list[object] = []  # what the end of the process finds


def leave_uploads(store: Store) -> None:
    for name, size in (("small", 9), ("large", 9 << 20)):
        new = store.begin(name)
        new.write(bytes(size))
        left.append(new)


def names_of_store(store: Store) -> None:
    """What a store says, does and gives back, of names that may not be those of the locale."""
    found, left_out = store.list_all()
    assert found == sorted(store.list(), key=lambda entry: entry.path)
    for entry in found:
        assert store.stat(entry.path) == entry
        assert store.read_small(entry.path, 100) == b"x"
        assert store.read_if_unchanged(entry.path, 1, entry.stamp) == b"x"
        folder, slash, name = entry.path.rpartition("/")
        assert name in store.names(folder + slash)
        assert {entry.path} == {one.path for one in store.list(entry.path)} == store.existing([entry.path])
        store.write_small(f"new/{entry.path}", b"n")
        with store.begin(f"begun/{entry.path}") as new:
            new.write(b"n")
            new.publish()
        with store.open_once(f"begun/{entry.path}") as file:
            assert not file.changed()
        store.create_exclusive(f"only/{entry.path}", b"n")
        store.delete_read(entry)
        assert store.path_in(store.full_path(entry.path)) == entry.path
    store.sync_folders(f"new/{entry.path}" for entry in found)
    print(ascii([entry.path for entry in found]), ascii(left_out), ascii(store.full_path("ü")))
    print(ascii(store.sweep(older_than=0)))
