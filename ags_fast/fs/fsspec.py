"""A folder of fsspec's memory, and of any other file system of fsspec that can show a file only when it is complete."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ags_fast.fs.new import NewObject
from ags_fast.fs.paths import temporary_name, temporary_tag
from ags_fast.fs.remote import RemoteStore, file_exists

if TYPE_CHECKING:
    import builtins
    from collections.abc import Collection

    from ags_fast.fs.base import LeftOut

__all__ = ["MemoryStore", "OtherStore"]

_memory_lock = threading.Lock()


class MemoryStore(RemoteStore):
    """A folder of fsspec's memory, of this process."""

    @property
    def shared(self) -> bool:
        """False: the files are this process's own."""
        return False

    def _create_exclusive(self, path: str, data: bytes) -> None:
        self.pipe(path, data, exclusive=True)

    def pipe(self, path: str, data: bytes, exclusive: bool) -> None:
        """Write a file at once. FileExistsError with `exclusive`, if it is there."""
        fs, _ = self.connect()
        with _memory_lock:  # it looks first and writes then
            if exclusive and fs.exists(self.at(path)):
                raise file_exists(self.full_path(path))
            fs.pipe_file(self.at(path), data)

    def _begin(self, path: str, exclusive: bool, tag: str, **local: Any) -> NewObject:
        if exclusive and self.stat(path) is not None:
            raise file_exists(self.full_path(path))
        return _Buffered(self, path, exclusive)


class _Buffered(NewObject):
    """A file of memory in the making."""

    def __init__(self, store: MemoryStore, path: str, exclusive: bool) -> None:
        super().__init__()
        self.path = store.full_path(path)
        self._store, self._name, self._exclusive = store, path, exclusive
        self._buffer = bytearray()

    def _write(self, view: memoryview) -> None:
        self._buffer += view

    def _publish(self) -> None:
        self._store.pipe(self._name, bytes(self._buffer), self._exclusive)

    def _discard(self) -> None:
        self._buffer = bytearray()


class OtherStore(RemoteStore):
    """A folder of any other file system of fsspec: it must rename files, or discard an upload."""

    def check_writable(self) -> None:
        """See `Store.check_writable`."""
        if not _renames(self.connect()[0]):
            self.begin("_ags/writable").discard()

    def _begin(self, path: str, exclusive: bool, tag: str, **local: Any) -> NewObject:
        if exclusive:
            raise self.refusal("create a file only if it does not exist")
        fs, _ = self.connect()
        try:
            if _renames(fs):
                folder, slash, name = self.at(path).rpartition("/")
                fs.makedirs(folder, exist_ok=True)
                return _Renamed(fs, folder + slash + temporary_name(name, tag), self.at(path))
            return _Discardable(fs, self.at(path), self)
        except NotImplementedError:
            raise self.refusal("write files") from None

    def _sweep(
        self, tag: str | None, age: float, age_unlocked: float, paths: Collection[str], below: str
    ) -> builtins.list[str]:
        left_out: LeftOut = []
        swept = []
        list(self.list(below, left_out=left_out))
        for path, kind, _ in left_out:
            if kind == "TemporaryFile" and tag in (None, temporary_tag(path.rpartition("/")[2])):
                found = self.stat(path)
                if found is not None and (age_unlocked <= 0 or time.time() - found.modified >= age_unlocked):
                    self.delete(path)
                    swept.append(path)
        return swept


def _renames(fs: Any) -> bool:
    """Whether a file gets another name in one step, not by a copy, which others would see grow."""
    from fsspec import AbstractFileSystem
    from fsspec.implementations.dirfs import DirFileSystem

    while isinstance(fs, DirFileSystem):  # passes requests to another one
        fs = fs.fs
    return type(fs).mv is not AbstractFileSystem.mv


class _Renamed(NewObject):
    """A file in the making with a temporary name."""

    atomic = False  # file systems differ in what they do if the file exists

    def __init__(self, fs: Any, temporary: str, path: str) -> None:
        self._file = fs.open(temporary, "wb")
        super().__init__()
        self.path, self._fs, self._temporary = path, fs, temporary

    def _write(self, view: memoryview) -> None:
        _write_all(self._file, view)

    def _publish(self) -> None:
        self._file.close()
        self._fs.mv(self._temporary, self.path)

    def _discard(self) -> None:
        try:
            self._file.close()
        finally:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._temporary)


class _Discardable(NewObject):
    """A file of fsspec that can be closed without completing it."""

    def __init__(self, fs: Any, path: str, store: OtherStore) -> None:
        from fsspec.spec import AbstractBufferedFile

        super().__init__()
        self.path = path
        self._file: Any = None
        file = fs.open(path, "wb", autocommit=False)
        if not isinstance(file, AbstractBufferedFile) or any(
            getattr(type(file), name) is getattr(AbstractBufferedFile, name) for name in ("commit", "discard")
        ):
            _forget(file)
            raise store.refusal("rename files or discard an upload")
        self._file = file

    def _write(self, view: memoryview) -> None:
        _write_all(self._file, view)

    def _publish(self) -> None:
        self._file.close()  # sends the rest, and with autocommit=False no more
        self._file.commit()

    def _discard(self) -> None:
        if self._file is not None:
            try:
                self._file.discard()
            finally:
                _forget(self._file)


def _forget(file: Any) -> None:
    """Let go of a file of fsspec that would write when it is closed, which it also is when it is collected."""
    try:
        file.closed = True
    except AttributeError:
        file.close()


def _write_all(file: Any, view: memoryview) -> None:
    while view:
        written = file.write(view)
        view = view[len(view) if written is None else written :]
