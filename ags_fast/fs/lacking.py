"""One table of what file systems lack, by the call that says so, and one warning of what a job went on without.

CIFS, sshfs, DrvFs, vfat, exFAT, gcsfuse, NFS and overlay each lack something else. An errno that is not in the table,
such as EIO, ENOSPC, EDQUOT and ESTALE, means danger and is raised.
"""

from __future__ import annotations

import errno
import warnings
from contextlib import contextmanager

TYPE_CHECKING = False  # to import typing takes longer than to import this package
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["CALLS", "gathered", "may_lack", "note", "sentences"]

SHOWN = 20  # in one warning
UNKNOWN = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOTTY})
REFUSED = UNKNOWN | {errno.EPERM, errno.EACCES}
# By call of `os`, or what it is for: the errors that mean no more than that the file system lacks it, and what a job
# goes on without. An empty text: it does the same in another way.
CALLS: dict[str, tuple[frozenset[int], str]] = {
    "fchmod": (REFUSED, "set permission bits"),
    "utime": (REFUSED | {errno.EOVERFLOW, errno.ERANGE}, "set times"),
    "fsync of a folder": (REFUSED | {errno.EBADF, errno.EISDIR}, "sync folders"),
    "flock": (REFUSED | {errno.EBADF, errno.ENOLCK}, "lock files"),
    "link": (REFUSED | {errno.EMLINK, errno.EXDEV}, ""),
    "renameat2": (REFUSED, ""),  # PolicyError: nothing else creates a file only if it is absent
    "O_TMPFILE": (REFUSED | {errno.EISDIR, errno.ENOENT}, ""),
    "resolve": (frozenset({errno.ELOOP, errno.ENOENT, errno.ENOTDIR}), ""),  # a link that leads nowhere
    "rmdir": (REFUSED | {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ENOENT, errno.EBUSY}, ""),
}
# No file system lacks these. ENOENT and the like say what is there, and are of those who call.
_ALL = "access close dup dup2 execv fdopen fstat fsync getcwd isatty listdir lseek lstat makedirs memfd_create mkdir"
_ALL += " open pread preadv pwrite read readlink readv replace scandir stat unlink write"
CALLS |= dict.fromkeys(_ALL.split(), (frozenset(), ""))

_told: dict[int, set[str]] = {}  # of each block that gathers, in any thread


@contextmanager
def gathered() -> Iterator[set[str]]:
    """Gather what file systems lack, in all threads, in place of warnings: see `note`."""
    lacks: set[str] = set()
    _told[id(lacks)] = lacks
    try:
        yield lacks
    finally:
        del _told[id(lacks)]


@contextmanager
def may_lack(call: str) -> Iterator[None]:
    """Go on without what this call in the block is for if the file system lacks that. All else is raised."""
    try:
        yield
    except OSError as error:
        errnos, what = CALLS[call]
        if error.errno not in errnos:
            raise
        note({what} - {""})


def note(lacks: Collection[str]) -> None:
    """Note what file systems lack, also by the report of another process. Warn if nothing gathers it."""
    for told in list(_told.values()):
        told.update(lacks)
    for text in [] if _told else sentences(lacks):
        warnings.warn(text, stacklevel=2)


def sentences(lacks: Collection[str]) -> list[str]:
    """Return the warning of what file systems lack, if they lack anything."""
    found = ", ".join(sorted(lacks)[:SHOWN]) + ", and more" * (len(lacks) > SHOWN)
    return [f"a file system here cannot do this, which was left out: {found}"] if found else []
