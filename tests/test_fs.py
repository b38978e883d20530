"""Store over a local folder, fsspec's memory and more: complete or absent, never outside, swept when nobody writes."""

from __future__ import annotations

import ast
import ctypes
import errno
import fcntl
import gc
import io
import os
import pickle
import shutil
import signal
import socket
import stat
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import pytest
from programs import storage
from store_contract import StoreContract, names, put, race, read_all, writing
from support import KEY, finish_python, open_stream, pattern, program, run_python, start_python

from ags_fast import AgsReader, AgsWriter, PolicyError
from ags_fast.fs import NewFile, NewObject, NotAFileError, Store, local, new

if TYPE_CHECKING:
    from pathlib import Path


class TestLocal(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Store(tmp_path / "deep" / "store")


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        pytest.importorskip("fsspec")
        return Store(f"memory://test_fs/{os.urandom(8).hex()}")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def temporary(store: Store) -> list[str]:
    return [name for _, _, files in os.walk(store.url) for name in files if name.endswith(".agstmp")]


# ---------------------------------------------------------------- what is local


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url, path in (
        (tmp_path, tmp_path),
        (f"{tmp_path}/a/", tmp_path / "a"),
        ("a", tmp_path / "a"),
        ("a/../b", tmp_path / "b"),
        ("odd:name", tmp_path / "odd:name"),
        ("a b%20c", tmp_path / "a b%20c"),
        (f"file://{tmp_path}", tmp_path),
        (f"file:{tmp_path}", tmp_path),
        (f"file://localhost{tmp_path}/", tmp_path),
        (f"local://{tmp_path}", tmp_path),
    ):
        store = Store(url)
        assert store.local, url
        assert store.url == str(path), url
    with pytest.raises(ValueError, match="three slashes"):
        Store("file://host/path")
    for url in ("memory://a", "s3://bucket/a", "s3a://bucket", "simplecache::s3://bucket/a"):
        assert not Store(url + "/").local
        assert Store(url + "/").url == url


def test_repr_shows_no_secret() -> None:
    store = Store("sftp://user:password@host:22/folder", {"secret": "hidden"})
    assert repr(store) == "Store('sftp://***@host:22/folder')"
    assert pickle.loads(pickle.dumps(store)).storage_options == {"secret": "hidden"}


def test_a_local_store_needs_no_fsspec(tmp_path: Path) -> None:
    run_python(
        program(storage.store_without_fsspec, tmp_path),
    )


def test_what_is_missing_is_named() -> None:
    with mock.patch.dict(sys.modules, {"s3fs": None}), pytest.raises(ImportError, match=r"pip install '.*\[s3\]'"):
        names(Store("s3://bucket"))
    with mock.patch.dict(sys.modules, {"fsspec": None}), pytest.raises(ImportError, match="need fsspec"):
        names(Store("memory://x"))


@pytest.mark.parametrize("option", ["fixed_upload_size", "local_expiry_check"])
def test_an_option_that_s3fs_does_not_know(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old s3fs would take the option, and do nothing."""
    s3fs = pytest.importorskip("s3fs")

    def older(self: object, *args: object, **kwargs: object) -> None: ...

    monkeypatch.setattr(s3fs.S3FileSystem, "__init__", older)
    with pytest.raises(ImportError, match=rf"s3fs {s3fs.__version__} does not know {option}.*\[s3\]"):
        names(Store("s3://bucket", {option: True}))


def test_list_is_one_walk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call a file, and one a folder: 10**5 files in well under a second."""
    for i in range(3):
        for j in range(5):
            put(store, f"{i}/{j}", b"x")
    calls = mock.Mock(side_effect=os.scandir)
    monkeypatch.setattr(os, "scandir", calls)
    for name in ("stat", "lstat", "listdir", "open"):
        monkeypatch.setattr(os, name, mock.Mock(side_effect=AssertionError(name)))
    assert len(names(store)) == 15
    assert calls.call_count == 4
    calls.reset_mock()
    assert len(names(store, "1/")) == 5
    assert calls.call_count == 1


def test_files_only(store: Store) -> None:
    put(store, "file", b"x")
    os.mkfifo(store.url + "/fifo")
    os.mkdir(store.url + "/empty")
    assert names(store) == ["file"]
    assert store.stat("fifo") is None
    assert store.stat("file/x") is None


# ---------------------------------------------------------------- complete or absent


def test_create_without_hard_links(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename that never replaces takes their place. Without one, too, nothing is created."""

    def refused(*args: object, **folders: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    class WithoutRename:
        def renameat2(self, *args: object) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

        renameatx_np = renameat2

    monkeypatch.setattr(os, "link", refused)
    store.create_exclusive("a/b", b"first")
    with pytest.raises(FileExistsError):
        store.create_exclusive("a/b", b"second")
    assert store.read_small("a/b", 10) == b"first"
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **options: WithoutRename())
    with pytest.raises(PolicyError, match="no hard links and no renameat2"):
        store.create_exclusive("a/c", b"third")
    assert [listed.path for listed in store.list()] == ["a/b"]
    assert os.listdir(os.path.join(store.url, "a")) == ["b"]


def test_nfs_is_told(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"36 35 {os.major(device)}:{os.minor(device)} / /srv rw shared:1 - nfs4 server:/srv rw,vers=4.2\n"
    )
    monkeypatch.setattr(local, "MOUNTS", str(mounts))
    local._is_nfs.cache_clear()  # noqa: SLF001
    try:
        with pytest.warns(UserWarning, match="is on NFS"):
            store.check_writable()
    finally:
        local._is_nfs.cache_clear()  # noqa: SLF001


def test_create_is_durable(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes, then the name, then the folders up to the one that the store is in, each once."""
    done: list[str] = []
    fsync, link = os.fsync, os.link

    def watched_fsync(fd: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def watched_link(source: str, target: str, **folders: int | None) -> None:
        done.append("link")
        link(source, target, **folders)  # type: ignore[arg-type]

    if sys.platform != "linux":
        pytest.skip("needs Linux")
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "link", watched_link)
    store.create_exclusive("a/b/file", b"x")
    root = os.path.realpath(store.url)
    assert done[0].endswith(".agstmp")
    assert done[1] == "link"
    assert {f"{root}/a/b", f"{root}/a", root, os.path.dirname(root)} <= set(done[2:])
    done.clear()
    store.sync_folders(["a/b/file", "a/b/file2", "a/file", "top"])
    assert sorted(done) == [os.path.dirname(root), root, f"{root}/a", f"{root}/a/b"]


def test_create_on_a_full_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_exclusive("a/1", b"x")
    for name in ("write", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, mock.Mock(side_effect=OSError(errno.ENOSPC, "full")))
            with pytest.raises(OSError, match="full"):
                store.create_exclusive("a/2", b"y")
        assert names(store) == ["a/1"]
        assert temporary(store) == []


def test_create_has_one_winner(store: Store, tmp_path: Path) -> None:
    race(store, 3, 300, tmp_path)
    assert temporary(store) == []


def test_create_has_one_winner_in_memory() -> None:
    pytest.importorskip("fsspec")
    store = Store(f"memory://test_fs/{os.urandom(8).hex()}")
    won = []

    def create(me: int) -> None:
        for number in range(200):
            try:
                store.create_exclusive(f"{number}", b"%d" % me)
                won.append((number, b"%d" % me))
            except FileExistsError:
                pass

    threads = [threading.Thread(target=create, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [(number, store.read_small(f"{number}", 9)) for number in range(200)]


# ---------------------------------------------------------------- dead and living writers


def test_kill_9_and_sweep(store: Store) -> None:
    put(store, "b/.other.x.agstmp", b"a user's")
    with writing(store, 1_000_000) as child:
        assert len(temporary(store)) == 2
        assert names(store) == ["b/.other.x.agstmp"]
        for _ in range(2):  # it lives
            assert store.sweep() == store.sweep("job-1", 0) == store.sweep(older_than=0) == []
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert store.sweep("job-2") == store.sweep("file") == store.sweep("") == store.sweep(older_than=3600) == []
    assert len(temporary(store)) == 2
    assert len(store.sweep("job-1")) == 1
    assert temporary(store) == [".other.x.agstmp"]
    assert names(store) == ["b/.other.x.agstmp"]


@pytest.mark.parametrize("openat2", ["1", "0"])
def test_a_sweep_looks_beside_its_paths(store: Store, openat2: str) -> None:
    """Of a tag, and where links lead; a sweep without paths looks everywhere."""
    for folder in ("a", "a/below", "b", "real", "file"):
        for tag in ("t", "u"):
            put(store, f"{folder}/.x.{tag}.{'0' * 16}.agstmp", b"x")
    put(store, "file/target", b"x")
    os.symlink("real", f"{store.url}/alias")
    os.symlink("../file/target", f"{store.url}/b/link")
    printed = run_python(
        program(storage.sweep_beside, store.url),
        AGS_FAST_OPENAT2=openat2,
    )
    name = f".x.{{}}.{'0' * 16}.agstmp"
    t, u = name.format("t"), name.format("u")
    beside = [[f"a/{t}"], [f"alias/{t}"], [f"b/{t}", f"b/{t}"], [f"a/below/{t}", f"a/below/{u}"]]
    assert printed.splitlines() == [*map(str, beside), "[] []"]
    assert sorted(temporary(store)) == [u] * 4


def test_a_living_writer_is_not_swept(store: Store) -> None:
    with writing(store, 1_000_000) as child:
        assert store.sweep(older_than=0) == []
        child.communicate("\n", timeout=60)
        assert child.returncode == 0
    assert len(open_stream(read_all(store, "a/file"))) == 1_000_000
    with store.begin("b/file", tag="t") as new:  # of this process
        assert store.sweep() == store.sweep("t", 0) == []
        new.write(b"x")
        new.publish()
    assert names(store) == ["a/file", "b/file"]


def test_sweep_and_publish_at_once(store: Store, tmp_path: Path) -> None:
    """However often somebody sweeps, no file is lost on its way to its name."""
    stop = tmp_path / "stop"
    sweeper = start_python(
        program(storage.sweep_until, store.url, stop),
    )
    try:
        for i in range(500):
            put(store, f"{i % 7}", b"%d" % i)
            assert store.read_small(f"{i % 7}", 9) == b"%d" % i
            put(store, f"x{i}", b"x", exclusive=True)
            store.delete(f"x{i}")
    finally:
        stop.touch()
        finish_python(sweeper)
    assert temporary(store) == []


def test_a_sweep_before_the_lock(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep may come between the making of a temporary file and its lock: then there is another one."""
    held: list[Any] = []
    lock = new.lock  # type: ignore[attr-defined]

    def late(fd: int) -> bool | None:
        monkeypatch.setattr(new, "lock", lock)
        if held:  # the second time: the sweep is not yet through with it
            held.append(os.open(temporary_path(), os.O_RDWR))
            assert lock(held[-1])
            return lock(fd)
        held.append(-1)
        assert len(store.sweep()) == 1
        return lock(fd)

    def temporary_path() -> str:
        return os.path.join(store.url, *temporary(store))

    for _ in range(2):
        monkeypatch.setattr(new, "lock", late)
        with store.begin("file") as file:
            file.write(b"x")
            file.publish()
        assert store.read_small("file", 1) == b"x"
    os.close(held[-1])
    assert temporary(store) == []


def test_without_locks_age_decides(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    new = store.begin("file", tag="job")
    assert store.sweep() == store.sweep(older_than=60) == store.sweep("job", 60) == []
    os.utime(os.path.join(store.url, *temporary(store)), (time.time() - 100_000,) * 2)
    assert store.sweep(older_than=200_000) == []
    assert len(store.sweep()) == 1
    assert isinstance(new, NewFile)
    with pytest.raises(FileNotFoundError):
        new.publish()
    store.begin("file", tag="job")  # collected at once
    with store.begin("file", tag="job"):
        assert len(store.sweep("job")) == 1  # whose writers are known to be dead


def test_hold(store: Store) -> None:
    """A file shows whether the process that holds it lives."""
    assert store.is_locked("a/lock") is False
    first = store.lock("a/lock")
    assert first is not None
    assert store.is_locked("a/lock")
    with pytest.raises(BlockingIOError):
        store.lock("a/lock")
    first.close()
    assert store.is_locked("a/lock") is False
    child = start_python(
        program(storage.hold, store.url),
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        assert store.is_locked("a/lock")
        with pytest.raises(BlockingIOError):
            store.lock("a/lock")
        child.kill()
        child.wait()
    assert store.is_locked("a/lock") is False


def test_a_fork_does_not_own_the_file(store: Store) -> None:
    run_python(
        program(storage.fork_while_writing, store.url, "memory://fork"),
    )


def test_a_file_that_changes_while_it_is_read(store: Store) -> None:
    put(store, "file", b"x" * 1000)
    for change in (b"longer", b""):
        with store.open_once("file") as file:
            assert file.readinto(bytearray(10)) == 10
            assert not file.changed()
            with open(store.url + "/file", "ab") as other:
                other.write(change)
                other.truncate(500)
            assert file.changed()
    os.mkfifo(store.url + "/fifo")
    os.mkdir(store.url + "/folder")
    for path in ("fifo", "folder"):
        for call in (store.open_once, store.is_locked, lambda path: store.read_small(path, 1)):
            with pytest.raises(NotAFileError, match="regular"):
                call(path)
        with pytest.raises(NotAFileError, match="regular"):
            AgsReader(store.open_seekable(path), KEY, length=None)


def test_take(store: Store) -> None:
    put(store, "a/file", b"12345")
    there = store.stat("a/file")
    assert there is not None
    assert store.read_if_unchanged("a/file", 5) == store.read_if_unchanged("a/file", 5, there.stamp) == b"12345"
    for path, size in (("a/file", 4), ("a/file", 6), ("a", 0)):
        assert store.read_if_unchanged(path, size) is None
    for other in (int(there.stamp) + 1, int(there.stamp) - 1, 0, -1, 1 << 64, 1 << 80, "an etag"):
        assert store.read_if_unchanged("a/file", 5, str(other)) is None
    os.mkfifo(store.url + "/fifo")
    assert store.read_if_unchanged("fifo", 0) is None
    lies = Store("/proc/self")  # of files that have more bytes than their sizes say
    status = lies.stat("status")
    assert status is not None
    assert lies.read_if_unchanged("status", status.size, status.stamp) is None


@pytest.mark.parametrize("quick", [True, False])
def test_put_is_new_write_publish(store: Store, quick: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done: list[bool] = []

    def write_whole(*arguments: Any) -> bool:
        done.append(quick and write(*arguments))
        return done[-1]

    write = local.write_whole  # type: ignore[attr-defined]
    monkeypatch.setattr(local, "write_whole", write_whole)
    put(store, "a/first", b"x")
    before = os.umask(0o027)
    try:
        store.write_small("a/one", b"one", tag="t", fsync=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(store.url + "/a/one").st_mode) == 0o640
    assert done.pop() in {quick, False}
    store.write_small("a/one", b"again")  # replaces; keeps the mode
    assert stat.S_IMODE(os.stat(store.url + "/a/one").st_mode) == 0o640
    assert not done.pop()
    os.rename(store.url + "/a", store.url + "/away")
    store.write_small("a/two", b"two")  # where it should be, not where that folder is now
    assert names(store) == ["a/two", "away/first", "away/one"]
    assert store.read_small("away/one", 9) == b"again"
    os.rename(store.url, tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        store.write_small("a/three", b"three")
    assert not os.path.exists(tmp_path / "elsewhere" / "a" / "three")
    os.mkdir(store.url)
    store.write_small("a/three", b"three")
    assert names(store) == ["a/three"]
    outside = tmp_path / "outside"
    outside.mkdir()
    os.rename(store.url + "/a", store.url + "/b")
    os.symlink(outside, store.url + "/a")
    os.symlink(outside / "file", store.url + "/b/link")
    for path in ("a/four", "b/link"):
        with pytest.raises(PolicyError, match="leads out"):
            store.write_small(path, b"x")
    assert os.listdir(outside) == []
    os.symlink("three", store.url + "/b/inside")
    store.write_small("b/inside", b"through it")
    assert store.read_small("b/three", 99) == b"through it"
    assert os.path.islink(store.url + "/b/inside")
    os.mkdir(store.url + "/b/folder")
    with pytest.raises(IsADirectoryError):
        store.write_small("b/folder", b"x")
    shutil.rmtree(store.url + "/b")
    os.unlink(store.url + "/a")
    store.write_small("b/four", b"four")
    assert names(store) == ["b/four"]
    assert store.sweep(older_than=0) == []


def test_put_has_no_name_before_it_is_complete(store: Store) -> None:
    """Where storage can: not even a temporary one, so there is nothing to sweep, whatever dies."""
    store.check_writable()
    try:
        os.close(os.open(store.url, os.O_TMPFILE | os.O_WRONLY))
    except OSError as error:
        pytest.skip(f"this file system has no files without a name: {error}")
    run_python(
        program(storage.put_too_much, store.url),
    )


# ---------------------------------------------------------------- never outside


def test_links_out_of_the_store(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "file").write_bytes(b"precious")
    put(store, "in/file", b"x")
    os.symlink(outside, store.url + "/absolute")
    os.symlink("../outside", store.url + "/relative")
    os.symlink("..", store.url + "/up")
    os.symlink("../../outside/file", store.url + "/in/link")
    os.symlink("../../outside/new", store.url + "/in/dangling")
    os.symlink("/", store.url + "/in/root")
    for path in ("absolute/x", "relative/sub/x", "absolute/sub/new/x", "up/x", "up/outside/x", "in/root/tmp/ags/x"):
        for call in (store.begin, lambda path: store.create_exclusive(path, b"y"), store.delete):
            with pytest.raises(PolicyError, match="through a link"):
                call(path)
    for path in ("in/link", "in/dangling"):
        with pytest.raises(PolicyError, match="through a link"):
            store.begin(path)
    with pytest.raises(FileExistsError):
        store.create_exclusive("in/link", b"y")
    with pytest.raises((PolicyError, FileExistsError)):
        store.create_exclusive("in/dangling", b"y")
    store.delete("in/link")  # the link
    assert sorted(os.listdir(outside)) == ["file", "sub"]
    assert (outside / "file").read_bytes() == b"precious"
    assert os.listdir(outside / "sub") == []
    assert sorted(os.listdir(tmp_path)) == ["outside", "store"]


def test_links_inside_the_store(store: Store) -> None:
    put(store, "real/file", b"x")
    os.symlink("real", store.url + "/link")
    os.symlink("real/file", store.url + "/alias")
    put(store, "link/two", b"2")
    put(store, "alias", b"new")
    assert store.read_small("real/two", 1) == b"2"
    assert store.read_small("real/file", 3) == b"new"
    assert os.path.islink(store.url + "/alias")
    assert names(store) == ["alias", "link/file", "link/two", "real/file", "real/two"]
    store.delete("link/two")
    assert names(store, "real") == ["real/file"]


def test_a_store_that_is_a_link(store: Store, tmp_path: Path) -> None:
    put(store, "a", b"x")
    os.symlink(store.url, tmp_path / "link")
    other = Store(tmp_path / "link")
    put(other, "b/c", b"y")
    os.symlink("b", store.url + "/d")
    put(other, "d/e", b"z")
    assert names(store) == names(other) == ["a", "b/c", "b/e", "d/c", "d/e"]


def test_loops_of_links(store: Store, tmp_path: Path) -> None:
    put(store, "a/b/file", b"x")
    for place, target in (("a/self", "../a"), ("a/b/up", "../.."), ("a/far", str(tmp_path))):
        os.symlink(target, f"{store.url}/{place}")
        for follow in (False, True):
            files, left_out = Store(store.url, follow=follow).list_all()
            assert [entry.path for entry in files] == ["a/b/file"] or (follow, place) == (True, "a/far")
            kind = "OutsideLink" if (place, follow) == ("a/far", False) else "LinkLoop"
            assert (place, kind) in [left[:2] for left in left_out] or (follow, place) == (True, "a/far")
        assert store.sweep(older_than=0) == []  # follows none
        os.unlink(f"{store.url}/{place}")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "y").symlink_to(tmp_path / "store" / "a")
    os.symlink(tmp_path / "x", store.url + "/a/x")
    assert names(store) == ["a/b/file"]
    assert names(Store(store.url, follow=True)) == ["a/b/file"]
    os.unlink(store.url + "/a/x")
    os.symlink("nowhere", store.url + "/dangling")
    os.symlink("selfish", store.url + "/selfish")
    assert names(store) == ["a/b/file"]


@pytest.mark.parametrize("openat2", ["1", "0"])
def test_list_all(store: Store, tmp_path: Path, openat2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out, by kind; by openat2 and, as in a sandbox without it, step by step."""
    put(store, "a/file", b"x")
    put(store, "b/.hidden", b"x")
    for folder in ("empty", "a/also/empty"):
        os.makedirs(f"{store.url}/{folder}")
    os.mkfifo(store.url + "/fifo")
    with socket.socket(socket.AF_UNIX) as unix:
        monkeypatch.chdir(store.url + "/a")  # a socket's path must be short
        unix.bind("socket")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"x")
    for place, target in (
        ("dangling", "a/nothing"),
        ("self", "self"),
        ("a/loop", ".."),
        ("out", "../outside"),
        ("a/out", str(tmp_path / "outside" / "file")),
        ("in", "a/file"),
        ("a/in", f"{store.url}/b"),
        ("a/fifo", "../fifo"),
        ("null", "/dev/null"),
    ):
        os.symlink(target, f"{store.url}/{place}")
    with open(f"{store.url}/.x..{'0' * 16}.agstmp", "wb"):
        pass
    printed = run_python(
        program(storage.list_with_links, store.url),
        AGS_FAST_OPENAT2=openat2,
    )
    files, left_out, followed, left = map(ast.literal_eval, printed.splitlines())
    always = {
        ("DanglingLink", "dangling"),
        ("EmptyFolder", "a/also/empty/"),
        ("EmptyFolder", "empty/"),
        ("LinkLoop", "a/loop"),
        ("LinkLoop", "self"),
        ("SpecialFile", "a/fifo"),
        ("SpecialFile", "a/socket"),
        ("SpecialFile", "fifo"),
        ("TemporaryFile", f".x..{'0' * 16}.agstmp"),
    }
    assert files == ["a/file", "a/in/.hidden", "b/.hidden", "in"]
    assert set(left_out) == {*always, ("OutsideLink", "out"), ("OutsideLink", "a/out"), ("OutsideLink", "null")}
    assert followed == ["a/file", "a/in/.hidden", "a/out", "b/.hidden", "in", "out/file"]
    assert set(left) == {*always, ("SpecialFile", "null")}


def test_sweep_follows_no_links(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f".file..{'0' * 16}.agstmp").touch()
    put(store, "file", b"x")
    os.symlink(outside, store.url + "/link")
    os.symlink(outside / f".file..{'0' * 16}.agstmp", f"{store.url}/.file..{'1' * 16}.agstmp")
    assert store.sweep(older_than=0) == []
    assert len(os.listdir(outside)) == 1


def test_private_while_it_is_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else can open it at any moment, and then it is as the umask or the old file says."""
    make = os.open
    made: list[int] = []

    def watched(path: str, flags: int, mode: int = 0o777, **options: Any) -> int:
        fd = make(path, flags, mode, **options)
        if flags & os.O_CREAT:
            made.append(stat.S_IMODE(os.fstat(fd).st_mode))
        return fd

    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "open", watched)
        for mode in (0o640, 0o444, 0o666):
            with store.begin("file", private=True) as new:
                new.write(b"x")
                assert made[-1] == 0o600
                assert stat.S_IMODE(os.stat(os.path.join(store.url, *temporary(store))).st_mode) == 0o600
                new.publish()
            assert stat.S_IMODE(os.stat(store.url + "/file").st_mode) == mode or mode == 0o444
            os.chmod(store.url + "/file", {0o640: 0o444, 0o444: 0o666}.get(mode, mode))
    finally:
        os.umask(before)
    assert temporary(store) == []


# ---------------------------------------------------------------- other file systems of fsspec


@pytest.fixture
def filesystems() -> dict[str, Any]:
    """File systems that can rename, discard, or neither; each is a dict of its files."""
    fsspec = pytest.importorskip("fsspec")
    from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

    class Base(AbstractFileSystem):
        cachable = False
        files: dict[str, bytes]

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            name = self._strip_protocol(path)
            if name in self.files:
                return {"name": name, "size": len(self.files[name]), "type": "file", "mtime": time.time() - 60}
            if any(other.startswith(name.rstrip("/") + "/") for other in self.files):
                return {"name": name, "size": 0, "type": "directory"}
            raise FileNotFoundError(path)

        def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
            start = self._strip_protocol(path).rstrip("/") + "/"
            below = {start + name[len(start) :].split("/")[0] for name in self.files if name.startswith(start)}
            if not below:
                raise FileNotFoundError(path)
            return [self.info(name) for name in sorted(below)]

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
            self.info(path)
            return self.files[self._strip_protocol(path)][start:end]

        def rm_file(self, path: str) -> None:
            self.info(path)
            del self.files[self._strip_protocol(path)]

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            pass

    class Upload(AbstractBufferedFile):
        """It completes when it is closed, as those of fsspec do."""

        def _upload_chunk(self, final: bool = False) -> bool:
            if final and self.autocommit:
                self.commit()
            return False

        def commit(self) -> None:
            self.fs.files[self.path] = self.buffer.getvalue()  # type: ignore[attr-defined]

        def discard(self) -> None:
            self.buffer = None

    class Direct(io.BytesIO):
        def __init__(self, files: dict[str, bytes], path: str) -> None:
            super().__init__()
            self.files, self.path = files, path
            files[path] = b""

        def write(self, data: Any) -> int:
            written = super().write(data)
            self.files[self.path] = self.getvalue()
            return written

    class Renames(Base):
        protocol = "renames"
        files: ClassVar[dict[str, bytes]] = {}  # type: ignore[misc]

        def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
            return Direct(self.files, path)

        def mv(self, path1: str, path2: str, **_: Any) -> None:
            self.files[self._strip_protocol(path2)] = self.files.pop(self._strip_protocol(path1))

    class Discards(Base):
        protocol = "discards"
        files: ClassVar[dict[str, bytes]] = {}  # type: ignore[misc]

        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            return Upload(self, path, mode, **options)

    class Neither(Base):
        protocol = "neither"
        files: ClassVar[dict[str, bytes]] = {}  # type: ignore[misc]

        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            return AbstractBufferedFile(self, path, mode, **options)

    found = {"renames": Renames, "discards": Discards, "neither": Neither}
    for name, one in found.items():
        fsspec.register_implementation(name, one, clobber=True)
    return {name: one.files for name, one in found.items()}


@pytest.mark.parametrize("scheme", ["renames", "discards"])
def test_one_that_renames_or_discards(scheme: str, filesystems: Any) -> None:
    files, store = filesystems[scheme], Store(f"{scheme}://root")
    assert names(store) == []
    put(store, "a/file", b"x" * 100, tag="t")
    assert names(store) == ["a/file"]
    assert store.read_small("a/file", 100) == b"x" * 100 == read_all(store, "a/file")
    with AgsWriter(store.begin("a/b/stream"), KEY) as writer:
        writer.write(pattern(3 << 20))
    assert open_stream(read_all(store, "a/b/stream")) == pattern(3 << 20)
    for how in ("discard", "with", "collected"):
        new = store.begin("a/file", tag="t")
        assert isinstance(new, NewObject)
        new.write(b"cut")
        assert store.sweep() == []  # too young
        if how == "discard":
            new.discard()
        elif how == "with":
            with pytest.raises(KeyboardInterrupt), new:
                raise KeyboardInterrupt
        del new
        gc.collect()
        assert sorted(files) == ["root/a/b/stream", "root/a/file"]
        assert files["root/a/file"] == b"x" * 100
    for call in (lambda: store.begin("new", exclusive=True), lambda: store.create_exclusive("new", b"")):
        with pytest.raises(PolicyError, match="only if it does not exist"):
            call()
    left = store.begin("left", tag="t")
    left.write(b"cut")
    assert store.sweep("u") == []
    assert len(store.sweep("t")) == len(files) - 2 + (scheme == "renames")
    assert sorted(files) == ["root/a/b/stream", "root/a/file"]
    for path in names(store):
        store.delete(path)
        store.delete(path)
    assert files == {}


def test_one_that_can_neither(filesystems: Any) -> None:
    filesystems["neither"]["root/old"] = b"old"
    store = Store("neither://root")
    for path in ("old", "new"):
        with pytest.raises(PolicyError, match="rename files or discard an upload"):
            store.begin(path)
    gc.collect()
    assert filesystems["neither"] == {"root/old": b"old"}
    assert store.read_small("old", 3) == b"old"
    with pytest.raises(PolicyError):
        store.create_exclusive("new", b"x")
