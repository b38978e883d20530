"""What fsspec asks to change in the files of a dataset: each call makes one version."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.core import has_magic

from ags_fast.filesystem.copying import moves, targets
from ags_fast.filesystem.files import CHUNK_NBYTES, DatasetFiles

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ags_fast.dataset.transaction import Transaction

__all__ = ["ChangedFiles"]


class ChangedFiles(DatasetFiles):
    """The part of `AgsFileSystem` that changes files. A subclass opens the files that are written."""

    def _one_version(self) -> AbstractContextManager[Transaction]:
        """Make one version of all changes in a block, unless a transaction is running already."""
        raise NotImplementedError

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Make an empty file. NotImplementedError if a file is there that is to stay as it is."""
        super().touch(path, truncate, **{"format": "ags1", **kwargs})

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write a file. With mode "create" FileExistsError if it is there."""
        with self.open(path, "xb" if mode == "create" else "wb", **kwargs) as file:
            file.write(value)

    def pipe(self, path: Any, value: Any = None, **kwargs: Any) -> None:
        """Write files, in one version: `value` to a path, or a dictionary of paths and bytes."""
        with self._one_version():
            super().pipe(path, value, **kwargs)

    def put_file(
        self, lpath: Any, rpath: str, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        """Encrypt a local file. A folder is not kept. With mode "create" FileExistsError if the file is there."""
        if os.path.isdir(lpath):
            return
        with open(lpath, "rb") as source, self.open(rpath, "xb" if mode == "create" else "wb", **kwargs) as file:
            callback.set_size(os.fstat(source.fileno()).st_size)
            chunk = memoryview(bytearray(CHUNK_NBYTES))
            while got := source.readinto(chunk):
                file.write(chunk[:got])
                callback.relative_update(got)

    def put(self, lpath: Any, rpath: Any, recursive: bool = False, **kwargs: Any) -> None:
        """Encrypt local files, in one version: see fsspec."""
        if isinstance(lpath, str) and isinstance(rpath, str) and has_magic(lpath) and os.path.isfile(lpath):
            inside = rpath.endswith("/") or self.isdir(rpath)  # not a pattern if a file of such a name is there
            lpath, rpath = [lpath], [f"{rpath.rstrip('/')}/{os.path.basename(lpath)}" if inside else rpath]
        with self._one_version():
            super().put(lpath, rpath, recursive=recursive, **kwargs)

    def copy(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        on_error: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Copy files, in one version: see fsspec.

        Args:
            path1: A path or pattern, or a list of them.
            path2: A path, or if `path1` is a list maybe a list of as many paths.
            recursive: Whether to copy the files in folders.
            maxdepth: How many levels of folders to look at; None: all.
            on_error: "ignore" skips files that are not there, "raise" does not; None: "ignore" if `recursive`.
            kwargs: Ignored.
        """
        on_error = on_error or ("ignore" if recursive else "raise")
        pairs = self._targets(path1, path2, recursive, maxdepth)
        if pairs:
            sources, made = map(list, zip(*pairs, strict=True))
            with self._one_version():
                super().copy(sources, made, on_error=on_error, **kwargs)

    def mv(self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Move files, in one version: see fsspec. Only manifests are written: a file keeps its keys, and its bytes.

        Raises:
            FileNotFoundError: Nothing is there.
            IsADirectoryError: A path is a folder, and `recursive` is not set.
            ValueError: Two files would get one path, or a file two.
        """
        if path1 == path2:
            return
        pairs = moves(self._targets(path1, path2, recursive, maxdepth), path1)
        if pairs:
            with self._one_version() as changes:
                changes.rename(dict(pairs), replace=True)

    def _targets(self, path1: Any, path2: Any, recursive: bool, maxdepth: int | None) -> list[tuple[str, str]]:
        into = isinstance(path2, str) and (path2.endswith("/") or self.isdir(path2))
        pairs = targets(self, path1, path2, recursive, maxdepth, into)
        return [(self._strip_protocol(source), self._strip_protocol(target)) for source, target in pairs]

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, in one version.

        Raises:
            FileNotFoundError: A file is not there.
            IsADirectoryError: A path is a folder, and `recursive` is not set.
        """
        paths = self.expand_path(path, recursive=recursive, maxdepth=maxdepth)
        if folders := {one for one in paths if self.isdir(one)}:
            if not recursive:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), min(folders))
            paths = [one for one in paths if one not in folders]
        with self._one_version() as changes:
            for one in paths:
                changes.remove(one)

    def rm_file(self, path: str) -> None:
        """Remove a file. Its path is not a pattern."""
        path = self._strip_protocol(path)
        if self.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        with self._one_version() as changes:
            changes.remove(path)

    # ---- folders: each is there as long as it has files

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Do nothing: folders come with their files. FileExistsError if there is a file or folder."""
        self.makedirs(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: folders come with their files. FileExistsError for a file, or unless `exist_ok` a folder."""
        kind = self._type(path)
        if kind == "file" or (kind is not None and not exist_ok):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def rmdir(self, path: str) -> None:
        """Do nothing: a folder goes with its last file. OSError if `path` has files, NotADirectoryError for a file."""
        kind = self._type(path)
        if kind is not None:
            code = errno.ENOTDIR if kind == "file" else errno.ENOTEMPTY
            raise OSError(code, os.strerror(code), path)
