"""The one door to storage: a local file that appears at its path only when it is complete."""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["NewFile", "pwrite_all"]


class NewFile:
    """A file in the making. It has a temporary name beside `path` until `publish`, and none after `discard`.

    exclusive: refuse, at the beginning and again in the end, a path that exists (FileExistsError). private: nobody else
    may read it before it is published. fsync: `publish` returns only when file and folder are on the disk.

    A path that is there and is no regular file, such as ``/dev/null`` or a pipe, cannot be replaced; it is written
    directly. A process forked meanwhile can neither publish nor discard: the file is its parent's.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, exclusive: bool = False, private: bool = False, fsync: bool = False
    ) -> None:
        self.path = os.path.realpath(os.fsdecode(path))  # a link's target is what gets replaced
        self._exclusive = exclusive
        self._fsync = fsync
        self._owner = os.getpid()
        self._temporary: str | None = None
        try:
            existing = os.stat(self.path)
        except FileNotFoundError:
            existing = None
        if existing is not None and exclusive:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path)
        if existing is not None and not stat.S_ISREG(existing.st_mode):
            self.fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)  # a folder: IsADirectoryError
            return
        folder, name = os.path.split(self.path)
        shown = os.fsdecode(os.fsencode(name)[:100])  # a name has up to 255 bytes, whatever its characters
        temporary = os.path.join(folder, f".{shown}.{os.urandom(8).hex()}.agstmp")
        self.fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._temporary = temporary
        self._mode = stat.S_IMODE((existing or os.fstat(self.fd)).st_mode)  # the umask's word, without asking it
        if private:
            os.fchmod(self.fd, 0o600)

    @property
    def positional(self) -> bool:
        """Whether it can be written at any position."""
        return self._temporary is not None

    def publish(self) -> None:
        """Give the file its name and close it. If that fails, it is discarded."""
        if self._owner != os.getpid() or self.fd < 0:
            return
        try:
            if self._temporary is not None:
                os.fchmod(self.fd, self._mode)
                if self._fsync:
                    os.fsync(self.fd)
            fd, self.fd = self.fd, -1
            os.close(fd)  # before the name: some file systems report a failed write only here
            if self._temporary is not None:
                if self._exclusive:
                    self._link(self._temporary)
                else:
                    os.replace(self._temporary, self.path)
                self._temporary = None
                if self._fsync:
                    _fsync_folder(os.path.dirname(self.path))
        finally:
            self.discard()

    def _link(self, temporary: str) -> None:
        try:
            os.link(temporary, self.path)  # unlike a rename, it never replaces
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: claim the name with an empty file, then replace that
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            os.replace(temporary, self.path)
        else:
            os.unlink(temporary)

    def discard(self) -> None:
        """Close the file and remove it, unless it has been published. Does nothing the second time."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._temporary is not None and self._owner == os.getpid():
            temporary, self._temporary = self._temporary, None
            try:
                os.unlink(temporary)
            except FileNotFoundError:
                pass


def pwrite_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, or raise."""
    while data:
        written = os.pwrite(fd, data, offset)
        data = data[written:]
        offset += written


def _fsync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
