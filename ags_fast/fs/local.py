"""A folder of this machine."""

from __future__ import annotations

import errno
import io
import os
import stat
import time
import warnings
from contextlib import suppress
from functools import cache

from ags_fast._core import Descriptor, open_file, read_whole, write_whole
from ags_fast.errors import FormatError, PolicyError
from ags_fast.fs.base import Entry, ReadOnce, Store
from ags_fast.fs.below import A_PATH, LISTED, OpenFolder, Root, fsync_folder, lock, lstat, not_a_file, regular
from ags_fast.fs.lacking import may_lack
from ags_fast.fs.new import NewFile
from ags_fast.fs.paths import absolute_path, check_path, in_store, on_disk
from ags_fast.fs.walk import sweep, walk

TYPE_CHECKING = False  # to import typing takes longer than to import this package
if TYPE_CHECKING:
    import builtins  # in the class LocalStore, list is a method
    from collections.abc import Collection, Iterator, Mapping
    from typing import Any

    from ags_fast.fs.base import LeftOut

__all__ = ["LocalFile", "LocalStore"]

USUAL_NS = 10**9 << 31  # from 1970 on, every file system has the times until 2038
HOLD_ATTEMPTS = 20
MADE_FOLDERS = 4096  # existing folders that a store remembers
MOUNTS = "/proc/self/mountinfo"  # of Linux
PATH_NBYTES = 4095  # of an absolute path: other programs cannot open a longer one


class LocalFile:
    """A file of a local store, as a source. `open` never leaves the store; a path from `os.fspath` may."""

    __slots__ = ("_path", "_root")

    def __init__(self, root: Root, path: str) -> None:
        self._root, self._path = root, path

    def __fspath__(self) -> str:
        return self._root.full_path(self._path)

    def open(self, length: int | None, small: int) -> tuple[Descriptor | None, int, bytes]:
        """Open the file as `ags_fast._core.open_file` opens a path. NotAFileError if it is not regular."""
        below = None if self._root.follow else self._root.path
        try:
            descriptor, size, data = open_file(os.fspath(self) if below is None else self._path, length, small, below)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENXIO):
                raise
            fd, info = self._root.open_regular(self._path)
            return Descriptor(fd), info.st_size, b""
        if descriptor is not None and size < 0:
            descriptor.close()
            raise not_a_file(os.fspath(self))
        return descriptor, size, data


class _Sequential(ReadOnce):
    """A local file that is read once."""

    def __init__(self, fd: int, info: os.stat_result) -> None:
        self._descriptor = Descriptor(fd)
        self.size, self.stamp = info.st_size, str(info.st_mtime_ns)

    def _read_into(self, view: memoryview) -> int:
        with self._descriptor as fd:
            return os.readv(fd, [view])

    def changed(self) -> bool:
        with self._descriptor as fd:
            info = os.fstat(fd)
        return (info.st_size, str(info.st_mtime_ns)) != (self.size, self.stamp)

    def close(self) -> None:
        self._descriptor.close()


class LocalStore(Store):
    """A folder of this machine. Files are opened, made and removed below it only: see `ags_fast.fs.below`."""

    local = True

    def __init__(
        self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, follow: bool = False
    ) -> None:
        path = absolute_path(os.fsdecode(url))
        assert path is not None
        super().__init__(path, storage_options, follow)
        self.url = path  # the root of all has its slash
        self._around = f"{in_store(path).rstrip('/')}/", ""
        self._root = Root(path, follow)
        self._made_folders: set[str] = set()

    def checked(self, path: str) -> str:
        """See `Store.checked`."""
        return on_disk(check_path(path))

    # ---- the folder

    def list(self, prefix: str = "", after: str = "", left_out: LeftOut | None = None) -> Iterator[Entry]:
        """See `Store.list`."""
        return walk(self._root, on_disk(prefix), left_out, on_disk(after))

    def names(self, folder: str) -> builtins.list[str]:
        """See `Store.names`."""
        try:
            found = OpenFolder(self._root.open_to_read(on_disk(folder.rstrip("/")), LISTED))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [*map(in_store, os.listdir(found.fd))]

    def exists(self) -> bool:
        """See `Store.exists`."""
        try:
            return stat.S_ISDIR(os.stat(self.url).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def check_writable(self) -> None:
        """See `Store.check_writable`."""
        self._root.make()
        if _is_nfs(os.stat(self.url).st_dev):
            warnings.warn(
                f"{self.url} is on NFS, where a machine may see what another one has replaced long ago: mount it with "
                "noac, or write from one machine",
                stacklevel=2,
            )

    def _sweep(
        self, tag: str | None, age: float, age_unlocked: float, paths: Collection[str], below: str
    ) -> builtins.list[str]:
        return [*map(in_store, sweep(self._root, tag, age, age_unlocked, [*map(on_disk, paths)], on_disk(below)))]

    def _remove_empty_folders(self, path: str) -> None:
        try:
            folder = OpenFolder(self._root.open(path, LISTED))
        except (FileNotFoundError, NotADirectoryError, PolicyError):
            return
        for name in os.listdir(folder.fd):
            with may_lack("rmdir"):  # no folder, not empty, or not there any more
                os.rmdir(name, dir_fd=folder.fd)

    def _sync_folders(self, paths: builtins.list[str]) -> None:
        folders = {""}
        for path in paths:
            folder = path.rpartition("/")[0]
            while folder not in folders:
                folders.add(folder)
                folder = folder.rpartition("/")[0]
        for folder in sorted(folders, key=len, reverse=True):
            self._sync(folder)
        with suppress(PermissionError):  # one may be allowed to pass through a folder, but not to open it
            fsync_folder(os.open(os.path.dirname(self.url), LISTED))

    def _sync(self, folder: str) -> None:
        fsync_folder(self._root.open(folder, LISTED))

    # ---- reading

    def _stat(self, path: str) -> Entry | None:
        try:
            fd = self._root.open_to_read(path, A_PATH)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # so nothing has that name
                return None
            raise
        try:
            info = os.fstat(fd)
        finally:
            os.close(fd)
        return Entry.of(in_store(path), info) if stat.S_ISREG(info.st_mode) else None

    def _read_small(self, path: str, limit: int) -> bytes:
        fd, info = self._root.open_regular(path)
        with io.FileIO(fd) as file:
            size, data = info.st_size, b""
            while size <= limit and (more := file.read(limit + 1 - len(data))):  # it may grow
                data += more
                size = max(size, len(data))
        if size > limit:
            raise FormatError(f"{path} has {size} bytes; such a file may have at most {limit}")
        return data

    def _read_if_unchanged(self, path: str, size: int, stamp: str | None) -> bytes | None:
        try:
            mtime_ns = None if stamp is None else int(stamp)
            if self.follow:
                return read_whole(None, self._root.full_path(path), size, mtime_ns)
            return read_whole(self.url, path, size, mtime_ns)
        except (OverflowError, ValueError):  # no stamp that a file has here
            return None

    def _open_seekable(self, path: str, entry: Entry | None, tail: bool) -> LocalFile:
        return LocalFile(self._root, path)

    def _open_once(self, path: str) -> ReadOnce:
        return _Sequential(*self._root.open_regular(path))

    # ---- writing

    def _create_exclusive(self, path: str, data: bytes) -> None:
        with self._begin(path, exclusive=True, tag="", fsync=True) as new:
            new.write(data)
            new.publish()
        self._sync_folders([path])

    def _begin(self, path: str, exclusive: bool, tag: str, **local: Any) -> NewFile:
        if self._is_too_long(path):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), self._root.full_path(path))
        below, _, name = path.rpartition("/")
        folder = self._root.folder(below, make=True)
        found = lstat(name, folder.fd)
        if found is not None and not exclusive and stat.S_ISLNK(found.st_mode):
            folder, name = self._root.resolve(path)  # the link's target is what gets replaced
            found = lstat(name, folder.fd)
        within = folder, name, found
        return NewFile(self._root.full_path(path), tag=tag, exclusive=exclusive, within=within, **local)

    def _is_too_long(self, path: str) -> bool:
        """Refuse a path that is too long: descriptors of folders could write the file, but no path could open it."""
        whole = self._root.full_path(path)
        return 4 * len(whole) > PATH_NBYTES and len(os.fsencode(whole)) > PATH_NBYTES

    def _write_if_new(self, path: str, data: bytes, fsync: bool, mode: int | None, mtime_ns: int | None) -> bool:
        below, _, name = path.rpartition("/")
        if self._is_too_long(path) or not 0 <= (mtime_ns or 0) < USUAL_NS:
            return False
        if below not in self._made_folders:
            self._root.folder(below, make=True)
            if len(self._made_folders) >= MADE_FOLDERS:
                self._made_folders = set()
            self._made_folders.add(below)
        if not write_whole(self.url, below or ".", name, data, fsync, mode, mtime_ns):
            return False
        if fsync:
            self._sync(below)
        return True

    def _lock(self, path: str) -> Any:
        below, _, name = path.rpartition("/")
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        for _ in range(HOLD_ATTEMPTS):
            try:
                folder = self._root.folder(below, make=True)
                fd, info = regular(os.open(name, flags, 0o666, dir_fd=folder.fd), self._root.full_path(path))
                file = io.FileIO(fd, "ab")
                locked = lock(fd)
                if locked is None:
                    file.close()
                    return None
                if locked and os.path.samestat(info, os.lstat(name, dir_fd=folder.fd)):
                    return file
                file.close()
            except FileNotFoundError:  # removed meanwhile, or its folder
                continue
            time.sleep(0.01)  # a call of `is_locked` locks the file for a moment
        raise BlockingIOError(errno.EWOULDBLOCK, "a living process holds it", self._root.full_path(path))

    def _is_locked(self, path: str) -> bool | None:
        try:
            fd, _ = self._root.open_regular(path)
        except FileNotFoundError:
            return False
        with io.FileIO(fd):
            locked = lock(fd)
        return None if locked is None else not locked

    def _delete(self, path: str, read: Entry | None) -> None:
        below, _, name = path.rpartition("/")
        with suppress(FileNotFoundError, NotADirectoryError):
            folder = self._root.folder(below, make=False)
            if read is not None:
                found = os.lstat(name, dir_fd=folder.fd)
                if stat.S_ISLNK(found.st_mode):
                    target = os.readlink(name, dir_fd=folder.fd)
                    raise OSError(f"this is a link to {target!r}, which still has the content: delete both yourself")
                now = found.st_size, str(found.st_mtime_ns)
                if not stat.S_ISREG(found.st_mode) or now != (read.size, read.stamp):
                    raise OSError("another file has taken its place since it was read")
            os.unlink(name, dir_fd=folder.fd)


@cache
def _is_nfs(device: int) -> bool:
    """Whether Linux says that a device is an NFS mount."""
    with suppress(OSError, StopIteration), open(MOUNTS) as mounts:
        wanted = f" {os.major(device)}:{os.minor(device)} "
        return next(line for line in mounts if wanted in line).partition(" - ")[2].startswith("nfs")
    return False
