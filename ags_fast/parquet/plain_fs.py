"""The fsspec filesystem over `open_plain`. This module imports fsspec."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from ags_fast._cursor import Turns
from ags_fast._types import OrAllow, OrShow, ReadableSource, Retriever, check_choice
from ags_fast.parquet.reading import Reading, accepting
from ags_fast.parquet.view import PlainView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import NoReturn, Unpack

    from ags_fast.parquet.keys import Keys
    from ags_fast.parquet.reading import Accepting

__all__ = ["PlainFileSystem", "filesystem"]


@accepting
def filesystem(
    keys: Keys | Retriever | None = None,
    *,
    keys_for: Callable[[str], Keys | Retriever] | None = None,
    target_protocol: str = "file",
    target_options: Mapping[str, Any] | None = None,
    fs: AbstractFileSystem | None = None,
    aad_prefix: bytes | Callable[[str], bytes | None] | None = None,
    missing: OrShow = "error",
    plain: OrAllow = "refuse",
    **accepted: Unpack[Accepting],
) -> PlainFileSystem:
    """Make an fsspec filesystem, "ags-parquet", that shows encrypted Parquet files as plain ones; read-only.

    It is for libraries that take a filesystem: `duckdb.register_filesystem`, `pyarrow.dataset`, `pandas.read_parquet`.
    Paths are those of the target filesystem, with or without ``ags-parquet://``. `info` and `size` return the size of a
    view in bytes, for which they open its footer. Listings do not: the size is None there.

    Args:
        keys: The keys of all files, as for open_plain.
        keys_for: In place of `keys`, a function from a path to keys.
        target_protocol: The protocol of the filesystem that holds the files.
        target_options: The options of that filesystem.
        fs: In place of both, that filesystem itself.
        aad_prefix: The AAD prefix of all files, or a function from a path to an AAD prefix.
        missing: As for open_plain.
        plain: What becomes of files without encryption: "refuse" raises PolicyError, "allow" shows them as they are.
        **accepted: What is accepted of the files, and the errors for others: see `Accepting`.

    Raises:
        TypeError: Neither `keys` nor `keys_for` is given, or both are.
        ValueError: Another argument is impossible.
    """
    if (keys is None) == (keys_for is None):
        raise TypeError("either keys or keys_for is required")
    check_choice("plain", plain, OrAllow)
    target = fs if fs is not None else fsspec.filesystem(target_protocol, **(target_options or {}))
    reading = Reading(keys, allow_plain=plain == "allow", **accepted)

    def reading_of(path: str) -> Reading:
        prefix = aad_prefix(path) if callable(aad_prefix) else aad_prefix
        return replace(reading, keys=keys if keys_for is None else keys_for(path), aad_prefix=prefix)

    return PlainFileSystem(_Settings(target, reading_of, missing))


class _Settings:
    """The settings of a filesystem in one object, since fsspec shows, hashes and serialises arguments."""

    def __init__(self, fs: AbstractFileSystem, reading_of: Callable[[str], Reading], missing: OrShow) -> None:
        self.fs = fs
        self._reading_of = reading_of
        self._missing = missing

    def __reduce__(self) -> NoReturn:
        raise TypeError("a filesystem that holds keys is never pickled: make one where it is used")

    def open(self, path: str, source: ReadableSource) -> PlainView:
        return PlainView(source, self._reading_of(path), self._missing)


class PlainFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Encrypted Parquet files of another filesystem as plain ones; read-only. See `filesystem`."""

    protocol = "ags-parquet"
    cachable = False  # an instance for other keys must not be found under the same arguments
    root_marker = ""

    def __init__(self, settings: _Settings) -> None:
        super().__init__()
        self.fs = settings.fs
        self._settings = settings
        # A class method in other filesystems, but here the form of paths is up to the target.
        self._strip_protocol = self._target_path
        self._sizes: dict[str, tuple[str, int]] = {}  # of views: the file's version, bytes

    def __reduce__(self) -> NoReturn:
        self._settings.__reduce__()

    def __repr__(self) -> str:
        return f"<ags_fast filesystem of plain views over {self.fs.protocol!r}>"

    def to_dict(self, *, include_password: bool = True) -> NoReturn:
        """Raise TypeError: a filesystem that holds keys is never serialised."""
        self._settings.__reduce__()

    def _target_path(self, path: Any) -> Any:
        if isinstance(path, list):
            return [self._target_path(one) for one in path]
        path = os.fspath(path).removeprefix(f"{self.protocol}://")
        return self.fs._strip_protocol(path)  # noqa: SLF001 (fsspec has no other name for it)

    @property
    def fsid(self) -> str:
        """An id of this filesystem."""
        return f"{self.protocol}_{id(self._settings)}"

    # ---- what there is

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        """List a folder. The sizes of files are None."""
        found = self.fs.ls(self._strip_protocol(path), detail=True, **kwargs)
        return [_shown(entry) for entry in found] if detail else [entry["name"] for entry in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Describe a file or folder. A file's size is the size of its view in bytes."""
        path = self._strip_protocol(path)
        entry = self.fs.info(path, **kwargs)
        if entry["type"] != "file":
            return _shown(entry)
        version = self.fs.ukey(path)
        known = self._sizes.get(path)
        if known is None or known[0] != version:
            with self.open(path) as file:
                known = self._sizes[path] = version, file.size
        return {**_shown(entry), "size": known[1]}

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether there is such a file or folder."""
        return bool(self.fs.exists(self._strip_protocol(path), **kwargs))

    def isfile(self, path: str) -> bool:
        """Whether there is such a file."""
        return bool(self.fs.isfile(self._strip_protocol(path)))

    def isdir(self, path: str) -> bool:
        """Whether there is such a folder."""
        return bool(self.fs.isdir(self._strip_protocol(path)))

    def ukey(self, path: str) -> Any:
        """Return the target's version of a file."""
        return self.fs.ukey(self._strip_protocol(path))

    def created(self, path: str) -> Any:
        """Return when a file was made."""
        return self.fs.created(self._strip_protocol(path))

    def modified(self, path: str) -> Any:
        """Return when a file was last changed."""
        return self.fs.modified(self._strip_protocol(path))

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget the sizes of views, and what the target keeps."""
        self._sizes.clear()
        self.fs.invalidate_cache(path if path is None else self._strip_protocol(path))

    # ---- files

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> PlainFile:
        if mode != "rb":
            raise PermissionError(f"views of encrypted Parquet files are read-only: {mode!r}")
        return PlainFile(self, path, self._settings)


def _shown(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry as it is listed. The size of a file is not the size of its view, which only its footer tells."""
    return {**entry, "size": None} if entry["type"] == "file" else dict(entry)


class PlainFile(AbstractBufferedFile):  # type: ignore[misc]
    """A view with the methods of fsspec's files. It has no buffer: the view keeps the pages that it opened.

    Threads may share the file: each reads from where it has sought.
    """

    def __init__(self, fs: PlainFileSystem, path: str, settings: _Settings) -> None:
        local = isinstance(settings.fs, LocalFileSystem)
        self._source = path if local else settings.fs.open(path, "rb")
        try:
            self.view = settings.open(path, self._source)
        except BaseException:
            self._close_source()
            raise
        self._turns = Turns()
        super().__init__(fs, path, "rb", cache_type="none", size=self.view.size)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a view holds keys and is never pickled: open it where it is read")

    def _close_source(self) -> None:
        if not isinstance(self._source, str):
            self._source.close()

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.view.read_at(start, end - start)

    def seek(self, loc: int, whence: int = 0) -> int:
        """Move the cursor, also past the end. Returns the new position, in bytes from the beginning."""
        with self._turns.lock:
            if whence == os.SEEK_CUR:
                loc, whence = loc + self._place(), os.SEEK_SET
            self.loc = self.view.seek(loc, whence)
            self._turns.sought(self.loc)
            return self.loc

    def tell(self) -> int:
        """Return the position of the cursor, in bytes from the beginning."""
        with self._turns.lock:
            position = self._turns.mine(reads=False)
            return int(self.loc) if position is None else position

    def _place(self) -> int:
        """Go to where this thread has sought last, if another one has moved the cursor. Returns the position."""
        position = self._turns.mine(reads=True)
        if position is not None:
            self.loc = position
        return int(self.loc)

    def read(self, length: int | None = -1) -> bytes:
        """Read exactly `length` bytes, or all that are left if fewer are; with None or -1, all that are left."""
        data: bytes = self._read(length, self.view.read_at)
        return data

    def readinto(self, buffer: Any) -> int:
        """Fill a writable buffer.

        Returns:
            The number of bytes read: fewer than the buffer has only at the end. After an error the buffer is all zeros.
        """
        size: int = self._read(memoryview(buffer).nbytes, lambda begin, _: self.view.readinto_at(begin, buffer))
        return size

    def readline(self) -> bytes:
        """Read a line."""
        with self._turns.lock:
            self.view.seek(self._place())
            line = self.view.readline()
            self.loc = self.view.tell()
            return line

    def _read(self, size: int | None, directly: Callable[[int, int], Any]) -> Any:
        """Move the cursor behind what is to be read, and read it. After an error the cursor is where it was."""
        with self._turns.lock:
            begin = self._place()
            left = max(0, self.size - begin)
            size = left if size is None or size < 0 else min(size, left)
            self.loc = begin + size
        try:
            return directly(begin, size)
        except BaseException:
            self.seek(begin)
            raise

    def close(self) -> None:
        """Close the view, and the file if it was opened here."""
        view = getattr(self, "view", None)  # None if it could not be opened
        if view is not None and not view.closed:
            view.close()
            self._close_source()
        super().close()
