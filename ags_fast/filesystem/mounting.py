"""A dataset as a folder of this machine, by FUSE and fusepy (the extra `files`); read-only."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import stat
import time
from typing import TYPE_CHECKING, Any

from ags_fast.errors import AgsError, KeyAccessError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ags_fast.filesystem.reading import AgsFile
    from ags_fast.filesystem.system import AgsFileSystem

__all__ = ["mount"]

log = logging.getLogger("ags_fast")
# What the kernel asks beside the methods below, and the answer.
ANSWERS: dict[str, Any] = dict.fromkeys(("access", "flush", "fsync", "fsyncdir", "opendir", "releasedir"), 0)
ANSWERS |= {"init": None, "destroy": None, "listxattr": (), "statfs": {}}


def mount(fs: AgsFileSystem, folder: str) -> None:
    """Show a dataset at an empty folder, until it is unmounted or the process is interrupted.

    Only the user that mounts it sees the files. They are those of one version.

    Args:
        fs: The dataset.
        folder: The folder, which exists.

    Raises:
        ImportError: fusepy is not installed.
        OSError: libfuse is not installed, or the system refuses to mount.
    """
    import fuse

    fs.info("")  # opens the dataset, and asks the KMS, while errors can still be shown
    try:
        fuse.FUSE(_Operations(fs), folder, foreground=True, ro=True, fsname="ags", default_permissions=True)
    except RuntimeError:
        raise OSError(f"the system refuses to mount at {folder}: see the message of FUSE") from None


class _Operations:
    """What the kernel asks. Its threads share the readers, which are read by position."""

    def __init__(self, fs: AgsFileSystem) -> None:
        self._fs = fs
        self._files: dict[int, AgsFile] = {}
        self._numbers = itertools.count(1)
        self._mounted = time.time()

    def __call__(self, operation: str, *args: Any) -> Any:
        """Do what the kernel asks. What goes wrong becomes an OSError with one of the system's numbers."""
        if operation in ANSWERS:
            return ANSWERS[operation]
        method = getattr(self, operation, None)
        if method is None:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        try:
            return method(*args)
        except AgsError as error:
            log.error("%s of a mounted dataset: %s", operation, error)
            code = errno.EACCES if isinstance(error, KeyAccessError) else errno.EIO
            raise OSError(code, os.strerror(code)) from None

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """Describe a file or folder."""
        info = self._fs.info(path)
        is_file = info["type"] == "file"
        changed = info.get("mtime", self._mounted)
        return {
            "st_mode": stat.S_IFREG | 0o444 if is_file else stat.S_IFDIR | 0o555,
            "st_size": info["size"],
            "st_nlink": 1 if is_file else 2,
            "st_uid": os.getuid(),
            "st_gid": os.getgid(),
            **dict.fromkeys(("st_mtime", "st_ctime", "st_atime"), changed),
        }

    def readdir(self, path: str, fh: int) -> list[str]:
        """List a folder."""
        return [".", "..", *(name.rpartition("/")[2] for name in self._fs.ls(path, detail=False))]

    def open(self, path: str, flags: int) -> int:
        """Open a file."""
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        number = next(self._numbers)
        self._files[number] = self._fs.open(path)
        return number

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Read a part of an open file. All of it has passed its tags."""
        read_at: Callable[[int, int], bytes] = self._files[fh].raw.read_at  # type: ignore[attr-defined]
        return read_at(offset, size)

    def release(self, path: str, fh: int) -> None:
        """Close a file."""
        self._files.pop(fh).close()
