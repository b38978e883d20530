"""What fsspec asks of the files of a dataset: which there are, and what is in them."""

from __future__ import annotations

import errno
import os
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.core import has_magic
from fsspec.implementations.local import make_path_posix
from fsspec.spec import AbstractFileSystem
from fsspec.utils import isfilelike

from ags_fast.dataset.names import check_path
from ags_fast.errors import ExpiredError
from ags_fast.filesystem.copying import targets
from ags_fast.filesystem.place import Handle, plain_arguments
from ags_fast.filesystem.reading import AgsFile, info_of, read_ranges
from ags_fast.fs import NewFile, local_path
from ags_fast.keys.envelope import in_threads

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterator

    from ags_fast._types import OrShow
    from ags_fast.dataset.dataset import Dataset, DatasetFile

__all__ = ["DatasetFiles"]

REQUESTS = 16  # that run at once on an object store
CHUNK_NBYTES = 4 << 20  # of plaintext that is copied at a time
Answer = TypeVar("Answer")


class _ByProperties(type(AbstractFileSystem)):  # type: ignore[misc]
    """Makes instances from arguments without keys, before fsspec makes a token of the arguments and keeps them."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(**plain_arguments(args, kwargs))


class DatasetFiles(AbstractFileSystem, metaclass=_ByProperties):  # type: ignore[misc]
    """The part of `AgsFileSystem` that reads. A subclass sets `_handle`.

    A folder is there if it has files. Paths have no "/" at their beginning. `exists`, `isfile` and `isdir` raise what
    is neither there nor missing: a KMS that refuses, for example.
    """

    protocol = "ags"
    root_marker = ""
    _handle: Handle
    _missing: OrShow = "error"
    _threads: int | None = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        path = super()._strip_protocol(path)
        return path if isinstance(path, list) else path.lstrip("/")

    @property
    def dataset(self) -> Dataset:
        """The handle of the dataset. In a transaction it stays at the version at which the transaction began."""
        return self._handle.get()

    @property
    def fsid(self) -> str:
        """An id of the dataset, which is the same in every process."""
        return f"ags_{self.dataset.id}"

    def _ask(self, question: Callable[[Dataset], Answer]) -> Answer:
        """Ask the dataset. If its version was expired meanwhile, go to the newest one, unless it stays for good."""
        try:
            return question(self.dataset)
        except ExpiredError:
            self.invalidate_cache()
            return question(self.dataset)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Go to the newest version with the next call, in a transaction with the first call after its end."""
        self._handle.renew()

    # ---- what there is

    def ls(self, path: str, detail: bool = True, refresh: bool = False, **kwargs: Any) -> Any:
        """List a folder, or describe a file.

        Args:
            path: The folder or file.
            detail: Return dictionaries as `info` does, else paths.
            refresh: Go to the newest version before.
            kwargs: Ignored.

        Raises:
            FileNotFoundError: Nothing is there.
        """
        if refresh:
            self.invalidate_cache()
        path = self._strip_protocol(path)
        folders, files = self._ask(lambda dataset: dataset.list_folder(path))
        if path and not folders and not files:
            files = [self._find(path)]
        above = f"{path}/" if path else ""
        found = [_folder(above + name) for name in folders] + [info_of(file) for file in files]
        found.sort(key=lambda info: info["name"])
        return found if detail else [info["name"] for info in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Describe a file or folder.

        Returns:
            For a file: name, type, size (bytes of plaintext; of a Parquet file: of its plaintext view), format ("ags1"
            or "parquet"), key_id, columns (those that have keys of their own), file_length (bytes of the encrypted
            file), source_length (bytes of the source), stamp, and if known mtime (seconds since the epoch).

        Raises:
            FileNotFoundError: Nothing is there.
        """
        path = self._strip_protocol(path)
        file = self._look(path)
        if file is None or not file.columns or self._missing == "error":
            return _folder(path) if file is None else info_of(file)
        with self.open(path) as opened:  # without columns, or with nulls, its view may have another size
            return {**info_of(file), "size": opened.size}

    def _look(self, path: str) -> DatasetFile | None:
        """Return the file at a path; None: there is a folder."""

        def look(dataset: Dataset) -> DatasetFile | None:
            file = dataset.find(path) if path else None
            if file is None and path and not dataset.has_folder(path):
                raise _not_found(path)
            return file

        return self._ask(look)

    def _find(self, path: str) -> DatasetFile:
        """Return the file at a path."""
        file = self._look(path)
        if file is None:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return file

    def walk(self, path: str, *args: Any, on_error: Any = "omit", **kwargs: Any) -> Iterator[Any]:
        """Yield the folders below a folder, with what is in each: see fsspec. ExpiredError is never omitted."""

        def failed(error: OSError) -> None:
            if on_error == "raise" or isinstance(error, ExpiredError):
                raise error
            if callable(on_error):
                on_error(error)

        yield from super().walk(path, *args, on_error=failed, **kwargs)

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> Any:
        """Find all files below a folder, sorted by path.

        Args:
            path: The folder, or a file.
            maxdepth: How many levels of folders to look at; None: all.
            withdirs: Find folders, too.
            detail: Return {path: what `info` returns}, else paths.
            kwargs: Ignored.
        """
        if maxdepth is not None:
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, detail=detail)
        path = self._strip_protocol(path)
        _, files = self._ask(lambda dataset: dataset.list_folder(path, deep=True))
        found = {file.path: info_of(file) for file in files}
        if withdirs:
            above = len(path)
            for name in list(found):
                found |= {name[:at]: _folder(name[:at]) for at, c in enumerate(name) if c == "/" and at >= above}
        if not found and path and (file := self._ask(lambda dataset: dataset.find(path))) is not None:
            found = {path: info_of(file)}
        return {name: found[name] for name in sorted(found)} if detail else sorted(found)

    def expand_path(
        self,
        path: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        assume_literal: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Return the files and folders that paths and patterns name: see fsspec. What is there is no pattern."""
        how = {"recursive": recursive, "maxdepth": maxdepth, **kwargs}
        paths = [self._strip_protocol(one) for one in ([path] if isinstance(path, (str, os.PathLike)) else path)]
        there = paths if assume_literal else [one for one in paths if has_magic(one) and self.exists(one)]
        others = [one for one in paths if one not in there]
        found = set(super().expand_path(there, assume_literal=True, **how)) if there else set()
        return sorted(found.union(super().expand_path(others, **how) if others or not there else ()))

    def du(
        self, path: str, total: bool = True, maxdepth: int | None = None, withdirs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the bytes of plaintext in the files below a folder: their sum, or with ``total=False`` by path."""
        found = self.find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True)
        sizes = {name: info["size"] for name, info in found.items()}
        return sum(sizes.values()) if total else sizes

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Return whether there is a file or folder."""
        return self._type(path) is not None

    def isfile(self, path: str) -> bool:
        """Return whether there is a file."""
        return self._type(path) == "file"

    def isdir(self, path: str) -> bool:
        """Return whether there is a folder with files, or `path` is the dataset."""
        return self._type(path) == "directory"

    def _type(self, path: str) -> str | None:
        try:
            return "directory" if self._look(self._strip_protocol(path)) is None else "file"
        except ExpiredError:
            raise
        except FileNotFoundError:
            return None

    def ukey(self, path: str) -> str:
        """Return a text that changes with the content of a file. The content is not read."""
        file = self._find(self._strip_protocol(path))
        return sha256(f"{self.dataset.id} {file.stamp}".encode("utf-8", "surrogateescape")).hexdigest()

    def checksum(self, path: str) -> int:
        """Return `ukey` as a number."""
        return int(self.ukey(path), 16)

    def modified(self, path: str) -> datetime:
        """Return when the content of a file was last changed. NotImplementedError if the dataset does not know it."""
        file = self._find(self._strip_protocol(path))
        if file.mtime_ns is None:
            raise NotImplementedError(f"the dataset does not know when {path!r} was changed")
        return datetime.fromtimestamp(file.mtime_ns / 1e9, UTC)

    def created(self, path: str) -> datetime:
        """Return `modified`: a file is written once, as a whole."""
        return self.modified(path)

    # ---- what is in it

    def _raw(self, path: str) -> io.RawIOBase:
        """Open a file for reading."""
        try:
            return self._ask(lambda dataset: dataset.open_file(path, missing=self._missing, threads=self._threads))
        except FileNotFoundError:
            self._find(path)  # raises the right error
            raise

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        return AgsFile(self, path, self._raw(path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Return the content of a file, or the part from `start` to `end`, as a slice has them."""
        with self._raw(self._strip_protocol(path)) as raw:
            return read_ranges(raw, [(start, end)])[0]

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any) -> Any:
        """Return the content of files: see fsspec. On an object store several are read at the same time."""
        paths = self.expand_path(path, recursive=recursive)
        if not isinstance(path, list) and paths == [self._strip_protocol(path)]:
            return self.cat_file(paths[0], **kwargs)
        if recursive:
            paths = [one for one in paths if not self.isdir(one)]
        found = dict(zip(paths, self._each(lambda one: self.cat_file(one, **kwargs), paths, on_error), strict=True))
        if on_error == "omit":
            return {path: data for path, data in found.items() if not isinstance(data, Exception)}
        return found

    def cat_ranges(
        self, paths: Any, starts: Any, ends: Any, max_gap: int | None = None, on_error: str = "return", **kwargs: Any
    ) -> list[Any]:
        """Return ranges of files. A file is opened once; the requests of an object store for its ranges run at once.

        Args:
            paths: The paths, one for each range.
            starts: Where each range begins, as in a slice, or one number for all of them.
            ends: Where each range ends, as in a slice, or one number for all of them.
            max_gap: Ignored: blocks and pages decide what is read together.
            on_error: "return" puts exceptions in the place of bytes, "raise" raises the first one.
            kwargs: Ignored.
        """
        if not isinstance(paths, list):
            raise TypeError(f"paths is a list, not {type(paths).__name__!r}")
        starts = starts if isinstance(starts, list) else [starts] * len(paths)
        ends = ends if isinstance(ends, list) else [ends] * len(paths)
        if not len(paths) == len(starts) == len(ends):
            raise ValueError(f"there are {len(paths)} paths, {len(starts)} starts and {len(ends)} ends")
        units: dict[str, list[int]] = {}
        for i, path in enumerate(paths):
            units.setdefault(self._strip_protocol(path), []).append(i)

        def read(path: str) -> list[bytes]:
            with self._raw(path) as raw:
                return read_ranges(raw, [(starts[i], ends[i]) for i in units[path]])

        results: list[Any] = [b""] * len(paths)
        for unit, data in zip(units.values(), self._each(read, [*units], on_error), strict=True):
            for at, i in enumerate(unit):
                results[i] = data if isinstance(data, Exception) else data[at]
        return results

    def _each(self, work: Callable[[Any], Any], items: list[Any], on_error: str) -> list[Any]:
        """Do work for each item. Return what it returns, or unless `on_error` is "raise" its exception."""

        def tried(item: Any) -> Any:
            try:
                return work(item)
            except Exception as error:
                if on_error == "raise":
                    raise
                return error

        local = local_path(self._handle.place.url) is not None
        return in_threads(tried, items, 1 if local or len(items) < 2 else min(REQUESTS, len(items)))

    def get(
        self,
        rpath: Any,
        lpath: Any,
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Decrypt files to local paths: see fsspec. Folders come with their files."""
        lpath = make_path_posix(os.fspath(lpath)) if isinstance(lpath, (str, os.PathLike)) else lpath
        into = isinstance(lpath, str) and (lpath.endswith("/") or os.path.isdir(lpath))
        pairs = targets(self, rpath, lpath, recursive, maxdepth, into)
        if pairs:
            rpaths, lpaths = map(list, zip(*pairs, strict=True))
            for path in rpaths:  # one that leads out of the dataset would lead out of the folder
                check_path(self._strip_protocol(path))
            super().get(rpaths, lpaths, callback=callback, **kwargs)

    def get_file(
        self, rpath: str, lpath: Any = None, callback: Any = DEFAULT_CALLBACK, outfile: Any = None, **kwargs: Any
    ) -> None:
        """Decrypt a file to a local path, where it appears when it is complete, or to a file open for writing."""
        if outfile is None and isfilelike(lpath):
            outfile = lpath
        rpath = self._strip_protocol(rpath)
        if outfile is None and self.isdir(rpath):
            os.makedirs(lpath, exist_ok=True)
            return
        with self._raw(rpath) as raw:
            callback.set_size(raw.seek(0, os.SEEK_END))
            raw.seek(0)
            if outfile is not None:
                _copy(raw, outfile, callback)
                return
            os.makedirs(os.path.dirname(os.path.abspath(lpath)), exist_ok=True)
            with NewFile(lpath, private=True) as new:
                _copy(raw, new, callback)
                new.publish()


def _copy(raw: io.RawIOBase, target: Any, callback: Any) -> None:
    chunk = memoryview(bytearray(CHUNK_NBYTES))
    while got := raw.readinto(chunk):
        target.write(chunk[:got])
        callback.relative_update(got)


def _folder(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}


def _not_found(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
