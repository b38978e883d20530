"""Open files below a local folder, by descriptors of folders, so that renames meanwhile cannot lead out.

A path that is checked first and followed later could lead elsewhere by then. So each step here starts from an open
folder, which stays the same folder whatever happens to its path.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
import sys
from contextlib import suppress

from ags_fast._core import Descriptor, open_below
from ags_fast.errors import PolicyError
from ags_fast.fs.lacking import CALLS, may_lack

__all__ = ["A_FOLDER", "A_PATH", "LISTED", "NotAFileError", "OpenFolder", "Root", "fsync_folder", "lock"]
__all__ += ["lstat", "not_a_file", "open_regular", "regular"]

LINKS = 40  # followed on the way to one file, as by the system

A_PATH = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK) | os.O_CLOEXEC
A_FOLDER = A_PATH | os.O_DIRECTORY
LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # without O_NONBLOCK, a pipe would wait for a writer


class NotAFileError(OSError):
    """A pipe, a device, a socket or a folder is where a file should be."""


class OpenFolder:
    """The descriptor of a folder, closed when the object is collected."""

    __slots__ = ("_descriptor", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        # Closes the folder. A __del__ here could run before that of a new file in the same cycle of garbage, and the
        # new file needs the folder to remove its temporary name.
        self._descriptor = Descriptor(fd)


class Root:
    """A local folder, below which files are opened.

    Links that lead out are refused with PolicyError. With `follow`, files to read may be wherever links lead.
    """

    def __init__(self, path: str, follow: bool = False) -> None:
        self.path, self.follow = path, follow
        self._made = False  # the folder is only needed when something is written

    def full_path(self, path: str) -> str:
        """Return a file's path for use outside of this folder."""
        return f"{self.path}/{path}"

    def open(self, path: str, flags: int) -> int:
        """Open a file or folder; PolicyError if a link leads out. "" is this folder."""
        try:
            return open_below(self.path, path or ".", flags, 0)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        folder, name = self.resolve(path)
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder.fd)

    def open_to_read(self, path: str, flags: int) -> int:
        """Open a file or folder; with `follow`, also elsewhere."""
        return os.open(self.full_path(path), flags) if self.follow else self.open(path, flags)

    def open_regular(self, path: str) -> tuple[int, os.stat_result]:
        """Open a file to read, and return its descriptor and stat. NotAFileError if it is not regular; never blocks."""
        try:
            fd = self.open_to_read(path, READ)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a socket
                raise not_a_file(self.full_path(path)) from None
            raise
        return regular(fd, self.full_path(path))

    def make(self) -> None:
        """Make this folder."""
        if not self._made:
            os.makedirs(self.path, exist_ok=True)
            self._made = True

    def folder(self, path: str, make: bool) -> OpenFolder:
        """Open a folder to write into, or to delete from. With `make`, make it and missing folders above it."""
        if make:
            self.make()
        try:
            return OpenFolder(self.open(path, A_FOLDER))
        except FileNotFoundError:
            if not make:
                raise
        above, at = OpenFolder(self.open("", A_FOLDER)), ""
        for name in path.split("/"):
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=above.fd)
            at = f"{at}/{name}" if at else name
            above = OpenFolder(self.open(at, A_FOLDER))
        return above

    def resolve(self, path: str) -> tuple[OpenFolder, str]:
        """Find the folder that a path leads to through links, and the name there: not a link, and perhaps missing.

        Each step is from an open folder to the next, and a link is not followed but read.
        """
        folders = [OpenFolder(os.open(self.path, A_FOLDER))]
        todo = path.split("/")[::-1]
        links = 0
        while todo:
            name = todo.pop()
            if name in ("", "."):
                continue
            if name == "..":
                if len(folders) == 1:
                    raise self._leads_out(path, "..")
                folders.pop()
                continue
            found = lstat(name, folders[-1].fd)
            if found is not None and stat.S_ISLNK(found.st_mode):
                links += 1
                if links > LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self.full_path(path))
                from_root, names = self._read_link(path, folders[-1], name)
                if from_root:
                    del folders[1:]
                todo += names
            elif not todo:
                return folders[-1], name
            else:
                try:
                    folders.append(OpenFolder(os.open(name, A_FOLDER | os.O_NOFOLLOW, dir_fd=folders[-1].fd)))
                except NotADirectoryError:
                    links += 1
                    if found is None or not stat.S_ISDIR(found.st_mode) or links > LINKS:
                        raise
                    todo.append(name)
        return folders[-1], "."

    def _read_link(self, path: str, folder: OpenFolder, name: str) -> tuple[bool, list[str]]:
        """Return whether a link's target is absolute, and the names to follow from there, the last one first."""
        try:
            target = os.readlink(name, dir_fd=folder.fd)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False, [name]  # another process has just replaced the link
        if not target.startswith("/"):
            return False, target.split("/")[::-1]
        rest = self._below(target)
        if rest is None:
            raise self._leads_out(path, target)
        return True, rest.split("/")[::-1]

    def _below(self, target: str) -> str | None:
        """Return an absolute path relative to this folder; None if it leads elsewhere."""
        for root in (self.path, os.path.realpath(self.path)):
            if target == root or target.startswith(root.rstrip("/") + "/"):
                return target[len(root) :].lstrip("/")
        return None

    def _leads_out(self, path: str, target: str) -> PolicyError:
        return PolicyError(f"{path!r} leads out of {self.path!r} through a link, to {target!r}")


def not_a_file(path: str) -> NotAFileError:
    """Return the error for a path that is not a regular file."""
    return NotAFileError(errno.EINVAL, "not a regular file", path)


def regular(fd: int, path: str) -> tuple[int, os.stat_result]:
    """Return a descriptor and its stat. If it is not a regular file, close it and raise NotAFileError."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise not_a_file(path)
    return fd, info


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a file to read. NotAFileError if it is not regular, such as a pipe, which could block."""
    return io.FileIO(regular(os.open(path, READ), os.fsdecode(path))[0])


def lstat(path: str, folder: int | None = None) -> os.stat_result | None:
    """Return the stat of a name, or of the link there; None if nothing is there."""
    with suppress(FileNotFoundError):
        return os.lstat(path, dir_fd=folder)
    return None


def lock(fd: int) -> bool | None:
    """Lock a file until it is closed. False: another process holds the lock. None: this file system has no locks."""
    locked: bool | None = None
    try:
        with may_lack("flock"):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
    except BlockingIOError:
        locked = False
    return locked


def rename_new(old: str, new: str, folder: int) -> None:
    """Rename a file in an open folder. FileExistsError: something has the new name. PolicyError: nothing does that."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    rename, flag = (getattr(libc, "renameat2", None), 1) if sys.platform == "linux" else (libc.renameatx_np, 4)
    if rename is not None and not rename(folder, os.fsencode(old), folder, os.fsencode(new), flag):
        return
    if rename is not None and (code := ctypes.get_errno()) not in CALLS["renameat2"][0]:
        raise OSError(code, os.strerror(code), new)
    raise PolicyError(f"{new!r} cannot be created only if absent: this file system has no hard links and no renameat2")


def fsync_folder(fd: int) -> None:
    """Sync a folder to the disk, where the file system can, and close it."""
    folder = OpenFolder(fd)
    with may_lack("fsync of a folder"):
        os.fsync(folder.fd)
