"""Where the files of a copy or a move go."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

from fsspec.core import has_magic
from fsspec.utils import other_paths

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

__all__ = ["move", "targets"]


def targets(
    fs: AbstractFileSystem, path1: Any, path2: Any, recursive: bool, maxdepth: int | None
) -> tuple[list[str], list[str]]:
    """Return the files to copy and the path that each of them gets, as fsspec defines them.

    fsspec's own `copy` finds these for paths that begin with "/". Without, it takes the first folder for a prefix.

    Raises:
        FileNotFoundError: Nothing is there.
        IsADirectoryError: A list names a folder, and the targets are a list, too.
        ValueError: Two lists have different lengths.
    """
    if isinstance(path1, list) and isinstance(path2, list):
        if len(path1) != len(path2):
            raise ValueError(f"there are {len(path1)} paths and {len(path2)} targets")
        sources = [fs._strip_protocol(path) for path in path1]
        if folders := [path for path in sources if fs.isdir(path)]:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), folders[0])
        return sources, [fs._strip_protocol(path) for path in path2]
    one = isinstance(path1, (str, os.PathLike))
    found = fs.expand_path(path1, recursive=recursive, maxdepth=maxdepth)
    path1 = os.fspath(path1) if one else path1
    into = isinstance(path2, str) and (path2.endswith("/") or fs.isdir(path2))
    if not one:
        inside = False
    elif has_magic(path1) and not fs.isfile(path1):
        inside = len(found) == 1 or (not recursive and sum(not fs.isdir(path) for path in found) == 1)
    else:
        inside = into and not path1.endswith("/")
    if not recursive or (one and maxdepth is not None):
        found = [path for path in found if not fs.isdir(path)]
    made = other_paths([f"/{path}" for path in found], path2, exists=inside, flatten=not one) if found else []
    pairs = [
        (source, fs._strip_protocol(target)) for source, target in zip(found, made, strict=True) if not fs.isdir(source)
    ]
    return [source for source, _ in pairs], [target for _, target in pairs]


def move(fs: AbstractFileSystem, path1: Any, path2: Any, recursive: bool, maxdepth: int | None) -> list[str]:
    """Copy files, and return those to remove: a file that was not copied, or is a target itself, stays.

    Raises:
        IsADirectoryError: A path is a folder, and `recursive` is not set.
        ValueError: Two files would get one path.
    """
    if isinstance(path1, str) and isinstance(path2, str) and fs._strip_protocol(path1) == fs._strip_protocol(path2):
        return []
    sources, made = targets(fs, path1, path2, recursive, maxdepth)
    if not sources:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path1))
    if len(set(made)) < len(made):
        twice = next(path for path in made if made.count(path) > 1)
        raise ValueError(f"two files would become {twice!r}: nothing was moved")
    pairs = [(source, target) for source, target in zip(sources, made, strict=True) if source != target]
    fs.copy([source for source, _ in pairs], [target for _, target in pairs])
    return sorted({source for source, _ in pairs}.difference(made))
