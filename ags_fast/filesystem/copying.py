"""Where the files of a copy or a move go."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

from fsspec.core import has_magic
from fsspec.utils import other_paths

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

__all__ = ["moves", "targets"]


def targets(
    fs: AbstractFileSystem, path1: Any, path2: Any, recursive: bool, maxdepth: int | None, into: bool
) -> list[tuple[str, str]]:
    """Return the files to copy, each with the path that it gets, as fsspec defines them.

    fsspec's own `copy` and `get` find these for paths that begin with "/". Without, they take the first folder for a
    prefix. And they take the path of a file that has characters of a pattern for a pattern.

    Args:
        fs: The file system of the files.
        path1: A path or pattern, or a list of them.
        path2: Where they go: a path, or if `path1` is a list maybe a list of as many paths.
        recursive: Whether to take the files in folders.
        maxdepth: How many levels of folders to look at; None: all.
        into: Whether `path2` is a folder that is there, or a path that ends with "/".

    Raises:
        FileNotFoundError: Nothing is there.
        IsADirectoryError: A list names a folder, and the targets are a list, too.
        ValueError: Two lists have different lengths.
    """
    if isinstance(path1, list) and isinstance(path2, list):
        if len(path1) != len(path2):
            raise ValueError(f"there are {len(path1)} paths and {len(path2)} targets")
        if folders := [path for path in path1 if fs.isdir(path)]:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), folders[0])
        return list(zip(path1, path2, strict=True))
    one = isinstance(path1, (str, os.PathLike))
    found = fs.expand_path(path1, recursive=recursive, maxdepth=maxdepth)
    path1 = os.fspath(path1) if one else path1
    if one and (not recursive or maxdepth is not None):
        found = [path for path in found if not fs.isdir(path)]
    if not found:
        return []
    pattern = one and has_magic(path1) and not fs.exists(path1)
    inside = len(found) == 1 if pattern else one and into and not path1.endswith("/")
    made = other_paths([f"/{path}" for path in found], path2, exists=inside, flatten=not one)
    return [pair for pair in zip(found, made, strict=True) if not fs.isdir(pair[0])]


def moves(pairs: list[tuple[str, str]], path1: Any) -> list[tuple[str, str]]:
    """Return which files a move moves, each with its new path, which may be the path that it has.

    Args:
        pairs: What `targets` has returned.
        path1: What was to be moved.

    Raises:
        IsADirectoryError: Only folders were found.
        ValueError: Two files would get one path, or a file two.
    """
    if not pairs:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path1))
    found: dict[str, str] = {}
    for source, target in pairs:
        if (other := found.setdefault(target, source)) != source:
            raise ValueError(f"{other!r} and {source!r} would both become {target!r}: nothing was moved")
    if len(set(found.values())) < len(found):
        raise ValueError(f"a file would get two paths: nothing was moved of {path1!r}")
    return sorted((source, target) for target, source in found.items())
