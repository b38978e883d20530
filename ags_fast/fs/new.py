"""Files in the making: each appears at its path when it is complete, or never."""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress

from ags_fast._core import Descriptor
from ags_fast.fs.below import A_FOLDER, LISTED, OpenFolder, fsync_folder, lock, lstat, not_a_file, rename_new
from ags_fast.fs.lacking import may_lack, note
from ags_fast.fs.paths import temporary_name

TYPE_CHECKING = False  # to import typing takes longer than to import this package
if TYPE_CHECKING:
    from typing import Self

    from ags_fast._types import Buffer

__all__ = ["NewFile", "NewObject", "pwrite_all"]

EXACT_NS = 2_000_000_000  # vfat has times of even seconds; a time beyond those that it has becomes another one


class NewFile:
    """A file in the making. It has a temporary name beside `path` until `publish`, and none after `discard`.

    A file that was not published is discarded when its ``with`` block ends, or when it is collected. The file is locked
    while its writer lives, so that `sweep` leaves it. An existing path that is not a regular file, such as
    ``/dev/null`` or a pipe, is not replaced but written directly. A child of a fork can neither publish nor discard its
    parent's file.

    If one thread discards the file while another writes, the write raises ValueError, or goes to a file without a name.
    To publish while another thread writes raises ValueError, and discards the file.

    Args:
        path: Where the file appears.
        tag: A part of the temporary name, to `sweep` by.
        exclusive: Refuse a path that exists (FileExistsError), at the beginning and again at the end.
        private: Keep other users from reading the file before it is published.
        fsync: `publish` returns only when file and folder are on the disk.
        mode: The permission bits of the published file, of 0o777. None: those of the file that it replaces, else as the
            umask and the folder have it.
        mtime_ns: The time of the last change of the published file, in nanoseconds since the epoch.
        within: From a store: the open folder, the name in the folder, and the stat of an existing file, or None.
    """

    atomic = True  # whether `publish` replaces a file that is there in one step
    _descriptor: Descriptor | None = None
    _folder: OpenFolder | None = None  # what its names are relative to
    _temporary: str | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tag: str = "",
        exclusive: bool = False,
        private: bool = False,
        fsync: bool = False,
        mode: int | None = None,
        mtime_ns: int | None = None,
        within: tuple[OpenFolder, str, os.stat_result | None] | None = None,
    ) -> None:
        self.path = os.fsdecode(path)
        if not self.path.startswith("/"):  # the working directory may change
            self.path = os.path.join(os.getcwd(), self.path)
        self._exclusive, self._fsync, self._mtime_ns = exclusive, fsync, mtime_ns
        self._owner = os.getpid()
        if within is not None:
            self._folder, self._name, existing = within
        else:
            existing = lstat(self.path)
        if existing is not None and exclusive:  # also a link that leads nowhere: somebody else may have put it there
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path)
        if within is None and existing is not None and stat.S_ISLNK(existing.st_mode):
            self.path = os.path.realpath(self.path)  # its target is what gets replaced
            existing = lstat(self.path)
        # Hadoop's checksum of the file that was there: with it Spark would refuse the new one. In a folder of files
        # that are made, one without its file is somebody's own.
        self.stale_sidecar = within is None or existing is not None
        if existing is not None and not stat.S_ISREG(existing.st_mode):
            if within is not None:  # a pipe put there by an attacker would get plaintext before its tags are checked
                if stat.S_ISDIR(existing.st_mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
                raise not_a_file(self.path)
            self._descriptor = Descriptor(os.open(self.path, os.O_WRONLY | os.O_CLOEXEC))  # a folder: IsADirectoryError
            return
        if within is None:
            folder, _, self._name = self.path.rpartition("/")
            self._folder = OpenFolder(os.open(folder or "/", A_FOLDER))
        if mode is None and existing is not None:
            mode = existing.st_mode
        elif mode is None and private:
            mode = self._usual_mode(tag)
        self._made = self._make(tag, 0o666 if mode is None and not private else 0o600)
        self._mode = self._made if mode is None else mode & 0o777

    def _at(self) -> OpenFolder:
        assert self._folder is not None
        return self._folder

    def remove_sidecar(self) -> str | None:
        """Remove Hadoop's checksum, if `stale_sidecar`. Returns its path, or None if there is none."""
        name = f".{self._name}.crc"
        if self._temporary is None or not self.stale_sidecar:
            return None
        try:
            os.unlink(name, dir_fd=self._at().fd)
        except FileNotFoundError:
            return None
        return os.path.join(os.path.dirname(self.path), name)

    def _usual_mode(self, tag: str) -> int:
        """Return the mode that the umask and the folder give to new files, by making one that is never written to."""
        if hasattr(os, "O_TMPFILE"):  # without a name, so that no other process can open it
            with may_lack("O_TMPFILE"):
                fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666, dir_fd=self._at().fd)
                mode = os.fstat(fd).st_mode
                os.close(fd)
                return mode
        folder, mode = self._folder, self._make(tag, 0o666)
        self.discard()
        self._folder = folder
        return mode

    def _make(self, tag: str, mode: int) -> int:
        while True:
            self._temporary = temporary_name(self._name, tag)  # before the file: a signal may come right behind it
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(self._temporary, flags, mode, dir_fd=self._at().fd)
            self._descriptor = Descriptor(fd)
            locked = lock(fd)
            info = os.fstat(fd)
            if locked is not False and info.st_nlink:
                return stat.S_IMODE(info.st_mode)
            folder = self._folder
            self.discard()  # a sweep came before the lock
            self._folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def __del__(self) -> None:
        self.discard()

    @property
    def descriptor(self) -> Descriptor:
        """The descriptor, for writes by position. Closed when the file is published or discarded."""
        assert self._descriptor is not None
        return self._descriptor

    @property
    def positional(self) -> bool:
        """Whether the file can be written at any position."""
        return self._temporary is not None

    def write(self, data: Buffer, /) -> int:
        """Write all of a bytes-like object where the last one ended. Returns its size in bytes."""
        view = memoryview(data).cast("B")
        nbytes = len(view)
        with self.descriptor as fd:
            while view:
                view = view[os.write(fd, view) :]
        return nbytes

    def publish(self) -> None:
        """Give the file its name and close it. If that fails, it is discarded."""
        if self._owner != os.getpid() or self.descriptor.closed:
            return
        locked, temporary = -1, self._temporary  # what another thread discards meanwhile is not published
        try:
            if temporary is not None:
                folder = self._at()
                with self.descriptor as fd:
                    if self._mode != self._made:
                        with may_lack("fchmod"):
                            os.fchmod(fd, self._mode)
                    if self._mtime_ns is not None:
                        with may_lack("utime"):
                            os.utime(fd, ns=(time.time_ns(), self._mtime_ns))
                            if abs(os.fstat(fd).st_mtime_ns - self._mtime_ns) > EXACT_NS:
                                note({f"keep the time of {self.path!r}"})
                    if self._fsync:
                        os.fsync(fd)
                    locked = os.dup(fd)
            if not self.descriptor.close():  # before the name: some file systems report a failed write only here
                raise ValueError("this file is being written by another thread: it is discarded")
            if temporary is not None:
                if self._exclusive:
                    self._link(temporary)
                else:
                    os.replace(temporary, self._name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
                self._temporary = None
                if self._fsync:
                    fsync_folder(os.open(".", LISTED, dir_fd=folder.fd))
        finally:
            if locked >= 0:
                os.close(locked)  # after the name, or a sweep might take the file for a dead writer's
            self.discard()

    def _link(self, temporary: str) -> None:
        at, name = self._at(), self._name  # which stays open, whatever another thread does
        folder = at.fd
        linked = False
        with may_lack("link"):
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)  # unlike a rename, it never replaces
            linked = True
        if linked:
            os.unlink(temporary, dir_fd=folder)
        else:
            rename_new(temporary, name, folder)

    def discard(self) -> None:
        """Close the file and remove it, unless it has been published. Does nothing the second time."""
        folder, temporary = self._folder, self._temporary  # the folder stays open for as long as this needs it
        if self._descriptor is not None:
            self._descriptor.close()
        if folder is not None and temporary is not None and self._owner == os.getpid():
            self._temporary = None
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder.fd)
        self._folder = None


class NewObject:
    """An object in the making: nothing is at its path until `publish`, and nothing is after `discard`.

    An object that was not published is discarded when its ``with`` block ends, or when it is collected. A child of a
    fork can neither write, publish nor discard its parent's object.
    """

    atomic = True  # whether `publish` replaces a file that is there in one step
    path: str

    def __init__(self) -> None:
        self._owner, self._done = os.getpid(), False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}{' done' if self._done else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            self.discard()

    def write(self, data: Buffer, /) -> int:
        """Write all of a bytes-like object where the last one ended. Returns its size in bytes."""
        if self._owner != os.getpid() or self._done:
            raise ValueError("this object is complete, discarded or another process's")
        view = memoryview(data).cast("B")
        self._write(view)
        return view.nbytes

    def publish(self) -> None:
        """Complete the object: it is at its path, and on the disk. If that fails, it is discarded."""
        if self._owner != os.getpid() or self._done:
            return
        try:
            self._publish()
            self._done = True
        finally:
            self.discard()

    def discard(self) -> None:
        """Give the object up, unless it has been published. Does nothing the second time."""
        if self._owner == os.getpid() and not self._done:
            self._done = True
            self._discard()

    if TYPE_CHECKING:

        def _write(self, view: memoryview) -> None: ...
        def _publish(self) -> None: ...
        def _discard(self) -> None: ...


def pwrite_all(file: Descriptor, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, or raise."""
    with file as fd:
        while data:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written
