"""How the file of a local keystore is read, locked and replaced."""

from __future__ import annotations

import os
import re
import secrets
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ags_fast.errors import FormatError, KeyAccessError
from ags_fast.fs import NewFile, open_regular, pwrite_all
from ags_fast.fs.below import lock

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK_SECONDS = 30.0
MAX_FILE_NBYTES = 64 << 20  # of a keystore: more than 100,000 versions
TAG = "keystore"  # in the names of temporary files


def unreachable(path: str, error: OSError) -> KeyAccessError:
    """Return the error for a keystore that cannot be read or locked."""
    return KeyAccessError(
        f"the keystore {path} cannot be read here: {error.strerror or type(error).__name__}. Every process that "
        "needs a key reads this file: keep it, and what opens it, on a path that all hosts share"
    )


def read(path: str) -> bytes:
    """Return the bytes of the file at `path`. FormatError if a keystore cannot be that large."""
    with open_regular(path) as file:
        data = file.read(MAX_FILE_NBYTES + 1)
    if len(data) > MAX_FILE_NBYTES:
        raise FormatError(f"{path} is not a keystore: it has more than {MAX_FILE_NBYTES} bytes")
    return data


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock for changes of the file at `path`: one thread at a time, over all hosts that share the file."""
    deadline = time.monotonic() + LOCK_SECONDS
    while (fd := _try_lock(path)) is None:
        if time.monotonic() > deadline:
            raise KeyAccessError(
                f"another process has locked the keystore {path} for {LOCK_SECONDS:.0f} seconds: try again"
            )
        time.sleep(0.005 + secrets.randbelow(20) / 1000)
    try:
        yield
    finally:
        os.close(fd)


def _try_lock(path: str) -> int | None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # for writing: NFS grants no exclusive lock otherwise
    except OSError as error:
        raise unreachable(path, error) from None
    locked = False
    try:
        # If the paths differ, the locked file has been replaced.
        locked = lock(fd) is not False and os.path.samestat(os.fstat(fd), os.stat(path))
    finally:
        if not locked:
            os.close(fd)
    return fd if locked else None


def replace(path: str, data: bytes) -> None:
    """Put `data` in the place of the file at `path`, with its mode. Call it under the lock.

    ValueError if a keystore cannot be that large.
    """
    if len(data) > MAX_FILE_NBYTES:
        raise ValueError(f"the keystore {path} is full")
    _sweep(path)
    _publish(NewFile(path, tag=TAG, private=True, fsync=True), data)


def _sweep(path: str) -> None:
    """Remove temporary files of processes that died while they replaced the file at `path`. Call it under the lock."""
    folder, name = os.path.split(path)
    temporary = re.compile(rf"\.{re.escape(name)}\.{TAG}\.[0-9a-f]{{16}}\.agstmp")  # and no other file's
    for other in os.listdir(folder):
        if temporary.fullmatch(other):
            try:
                os.unlink(os.path.join(folder, other))
            except FileNotFoundError:
                pass


def write_new(path: str, data: bytes) -> None:
    """Write a private file at a path that has none."""
    _publish(NewFile(path, exclusive=True, private=True, fsync=True, mode=0o600), data)  # whatever the umask is


def _publish(new: NewFile, data: bytes) -> None:
    try:
        pwrite_all(new.descriptor, data, 0)
        new.publish()
    finally:
        new.discard()
