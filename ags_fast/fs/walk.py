"""A walk through a local folder: complete files, everything else, and temporary files of dead writers."""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress

from ags_fast.errors import PolicyError
from ags_fast.fs.base import Entry
from ags_fast.fs.below import A_PATH, LISTED, OpenFolder, Root, lock, lstat
from ags_fast.fs.lacking import may_lack
from ags_fast.fs.paths import in_store, temporary_tag

TYPE_CHECKING = False  # to import typing takes longer than to import this package
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from typing import Any

__all__ = ["sweep", "walk"]

REASONS = {
    "OutsideLink": "a link that leads out of the folder",
    "DanglingLink": "a link that leads nowhere",
    "LinkLoop": "a link that leads back to itself, or to a folder that it is in",
    "TemporaryFile": "a file in the making, or left by a dead job",
}


def walk(root: Root, prefix: str, left_out: list[tuple[str, str, str]] | None, after: str = "") -> Iterator[Entry]:
    """List complete files with a path after `after` that begins with `prefix`; add all else there to `left_out`."""
    folder, slash, stem = prefix.rpartition("/")
    # Folders to walk: each path, and the chain of folders above it as (id, chain).
    todo: list[tuple[str, tuple[Any, ...]]] = [(folder + slash, ())]
    while todo:
        shown, above = todo.pop()
        try:
            fd = root.open_to_read(shown.rstrip("/"), LISTED)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PolicyError:
            if not above:
                raise
            if left_out is not None:  # it was a folder a moment ago
                left_out.append((in_store(shown).rstrip("/"), "OutsideLink", REASONS["OutsideLink"]))
            continue
        try:
            itself = os.fstat(fd)
            here = ((itself.st_dev, itself.st_ino), above)
            empty = True
            with os.scandir(fd) as scan:
                for found in scan:
                    empty = False
                    path = shown + found.name
                    if (stem and not found.name.startswith(stem)) or _ends_before(path, after):
                        continue
                    kind, info = _look(root, path, fd, found, here)
                    if kind == "Folder":
                        todo.append((f"{path}/", here))
                    elif kind == "File" and info is not None and path > after:
                        yield Entry.of(in_store(path), info)
                    elif kind and left_out is not None:
                        left_out.append((in_store(path), kind, _reason(kind, info)))
            if empty and shown and left_out is not None:
                left_out.append((in_store(shown), "EmptyFolder", "an empty folder: a dataset has files only"))
        finally:
            os.close(fd)
        stem = ""


def _ends_before(path: str, after: str) -> bool:
    """Whether all paths in a folder sort before `after`. Then its own path does, too."""
    return f"{path}/" < after and not after.startswith(f"{path}/")


def _look(
    root: Root, path: str, folder: int, found: os.DirEntry[str], here: tuple[Any, ...]
) -> tuple[str, os.stat_result | None]:
    """Return what an entry of a folder is: "Folder"; "File" and its stat; a kind that is left out; "" if it is gone."""
    if found.is_symlink():
        kind, info = _behind(root, path, folder, found.name, here)
    elif found.is_dir(follow_symlinks=False):
        kind, info = "Folder", None
    else:
        try:
            kind, info = "File", found.stat(follow_symlinks=False)
        except FileNotFoundError:
            return "", None
    if kind == "File" and info is not None:
        if not stat.S_ISREG(info.st_mode):
            kind = "SpecialFile"
        elif found.name[0] == "." and temporary_tag(found.name) is not None:
            kind = "TemporaryFile"
    return kind, info


def _behind(root: Root, path: str, folder: int, name: str, here: tuple[Any, ...]) -> tuple[str, os.stat_result | None]:
    """Return what a link leads to: "Folder"; "File", of any kind, and its stat; or a kind that is left out."""
    try:
        fd = os.open(name, A_PATH, dir_fd=folder) if root.follow else root.open(path, A_PATH)
    except PolicyError:
        return "OutsideLink", None
    except (FileNotFoundError, NotADirectoryError):
        return "DanglingLink", None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
            return "LinkLoop", None
        raise
    info = os.fstat(fd)
    os.close(fd)
    if not stat.S_ISDIR(info.st_mode):
        return "File", info
    while here:
        if here[0] == (info.st_dev, info.st_ino):
            return "LinkLoop", None
        here = here[1]
    return "Folder", None


def _reason(kind: str, info: os.stat_result | None) -> str:
    if kind != "SpecialFile" or info is None:
        return REASONS[kind]
    name = {"p": "pipe", "s": "socket", "d": "folder"}.get(stat.filemode(info.st_mode)[0], "device")
    return f"a {name}, which has no content to read"


def sweep(
    root: Root, tag: str | None, age: float, age_unlocked: float, paths: Collection[str], below: str
) -> list[str]:
    """Remove temporary files whose writers are dead. The arguments are those of `Store._sweep`."""
    if tag is not None and paths:
        return _sweep_beside(root, tag, age, age_unlocked, paths, below)
    swept, todo = list[str](), [below]
    while todo:
        shown = todo.pop()
        if (folder := _opened(root, shown)) is None:
            continue
        with os.scandir(folder.fd) as scan:
            for found in scan:
                if found.is_dir(follow_symlinks=False):
                    todo.append(f"{shown}{found.name}/")
                elif _is_swept(folder.fd, found.name, tag, age, age_unlocked):
                    swept.append(shown + found.name)
    return swept


def _sweep_beside(
    root: Root, tag: str, age: float, age_unlocked: float, paths: Collection[str], below: str
) -> list[str]:
    """Sweep only where writers of these files make temporary files: beside each file, or beside a link's target."""
    beside: dict[str, list[str]] = {}
    for path in paths:
        if path.startswith(below):
            folder, slash, name = path.rpartition("/")
            beside.setdefault(folder + slash, []).append(name)
    swept: list[str] = []
    for shown, names in beside.items():
        if (opened := _opened(root, shown)) is None:
            continue
        folders = [opened]
        for name in names:
            found = lstat(name, opened.fd)
            if found is not None and stat.S_ISLNK(found.st_mode):
                with suppress(PolicyError), may_lack("resolve"):  # it leads out or nowhere, so that no writer was there
                    target, _ = root.resolve(shown + name)
                    folders.append(OpenFolder(os.open(".", LISTED, dir_fd=target.fd)))
        for at in (one.fd for one in folders):
            swept += [shown + name for name in os.listdir(at) if _is_swept(at, name, tag, age, age_unlocked)]
    return swept


def _opened(root: Root, folder: str) -> OpenFolder | None:
    try:
        return OpenFolder(root.open(folder.rstrip("/"), LISTED))
    except (FileNotFoundError, NotADirectoryError, PolicyError):  # removed, or exchanged, meanwhile
        return None


def _is_swept(folder: int, name: str, tag: str | None, age: float, age_unlocked: float) -> bool:
    """Remove a temporary file of the tag if its writer is dead. Return whether it was removed."""
    of = temporary_tag(name)
    if of is None or tag not in (None, of):
        return False
    found = lstat(name, folder)
    return found is not None and stat.S_ISREG(found.st_mode) and _sweep_file(folder, name, age, age_unlocked)


def _sweep_file(folder: int, name: str, age: float, age_unlocked: float) -> bool:
    """Remove a temporary file of this age, unless its writer lives. Return whether it was removed."""
    try:
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except (FileNotFoundError, PermissionError):  # published or swept meanwhile, or another user's
        return False
    try:
        locked = lock(fd)
        least = age if locked else age_unlocked
        if locked is False or (least > 0 and time.time() - os.fstat(fd).st_mtime < least):
            return False
        os.unlink(name, dir_fd=folder)
        return True
    except FileNotFoundError:
        return False
    finally:
        os.close(fd)
