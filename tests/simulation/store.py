"""The simulated store as ags_fast sees it: `ags_fast.fs.Store` for URLs that begin with ``sim://``.

`Door` is how the process of an operation sends requests: to the world itself, or to the driver (`simulation.actors`).
"""

from __future__ import annotations

import errno
import io
import os
import threading
from typing import TYPE_CHECKING, Any

from ags_fast.errors import FormatError
from ags_fast.fs import Entry, NewObject, Store
from ags_fast.fs.base import ReadOnce
from ags_fast.fs.choose import store_class
from ags_fast.fs.paths import check_path
from ags_fast.fs.ranges import Later, RangeReader
from simulation.world import Object, Request, World

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterator

SCHEME = "sim://"


class Door:
    """Requests to a world in this process. A subclass sends them elsewhere."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._turn = threading.Lock()

    @property
    def now(self) -> float:
        """The time, in seconds since the epoch."""
        return self.world.clock

    def ask(self, kind: str, path: str = "", argument: Any = None) -> Any:
        """Make a request, and return its answer. Requests of several threads come one after the other."""
        with self._turn:
            return self.world.perform(Request(kind, path, argument))


class SimStore(Store):
    """A folder of the simulated store, which has no locks, as an object store. Folders are prefixes of paths."""

    door: Door  # of this process

    def __init__(self, url: Any, storage_options: Any = None, follow: bool = False) -> None:
        super().__init__(url, storage_options, follow)
        self._begin_of_paths = self.url.removeprefix(SCHEME) + "/"

    @property
    def parallel(self) -> bool:
        """One request at a time, so that a schedule is the same when it is run again."""
        return False

    def list(self, prefix: str = "", after: str = "", left_out: Any = None) -> Iterator[Entry]:
        """See `Store.list`. Each page is a request."""
        after, more = after and self._at(after), True
        while more:
            found, more = self.door.ask("list", self._at(prefix), after)
            for path, there in found:
                yield self._entry(path, there)
                after = path

    def page(self, folder: str, after: str, count: int) -> tuple[builtins.list[Entry], bool]:
        """See `ags_fast.fs.remote.RemoteStore.page`."""
        found, more = self.door.ask("page", self._at(folder), (after, count))
        return [self._entry(path, there) for path, there in found], more

    def _at(self, path: str) -> str:
        return self._begin_of_paths + path

    def _entry(self, path: str, there: Object) -> Entry:
        return Entry(path.removeprefix(self._begin_of_paths), len(there.data), str(there.stamp), there.modified)

    def _stat(self, path: str) -> Entry | None:
        there = self.door.ask("stat", self._at(path))
        return None if there is None else self._entry(path, there)

    def _read_small(self, path: str, limit: int) -> bytes:
        data: bytes = self.door.ask("read", self._at(path)).data
        if len(data) > limit:
            raise FormatError(f"{path} has more than {limit} bytes, the most that such a file may have")
        return data

    def _read_if_unchanged(self, path: str, size: int, stamp: str | None) -> bytes | None:
        try:
            there: Object = self.door.ask("read", self._at(path))
        except FileNotFoundError:
            return None
        return there.data if len(there.data) == size and stamp in (None, str(there.stamp)) else None

    def _open_seekable(self, path: str, entry: Entry | None, tail: bool) -> Any:
        there: Object = self.door.ask("read", self._at(path))
        if entry is not None and entry.stamp != str(there.stamp):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), self.full_path(path))
        known = (0, there.data)  # the first request of an object store brings a small file whole
        data = there.data
        return RangeReader(lambda begin, end: Later(lambda: data[begin:end]), len(data), parallel=False, known=known)

    def _open_once(self, path: str) -> ReadOnce:
        return _Once(self.door.ask("read", self._at(path)))

    def _create_exclusive(self, path: str, data: bytes) -> None:
        self.door.ask("create", self._at(path), bytes(data))

    def _write_if_new(self, path: str, data: bytes, fsync: bool, mode: int | None, mtime_ns: int | None) -> bool:
        try:
            self._create_exclusive(path, data)
        except FileExistsError:
            return False
        return True

    def _begin(self, path: str, exclusive: bool, tag: str, **local: Any) -> NewObject:
        if exclusive and self._stat(path) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.full_path(path))
        return _Upload(self.door, self._at(path), self.full_path(path), "create" if exclusive else "put")

    def write_small(self, path: str, data: bytes, *, tag: str = "", fsync: bool = False) -> None:
        """See `Store.write_small`. One request, whether the file exists or not."""
        self.door.ask("put", self._at(check_path(path)), bytes(data))

    def _delete(self, path: str, read: Entry | None) -> None:
        if read is not None and self._stat(path) != read:
            raise OSError("another file has taken its place since it was read")
        self.door.ask("delete", self._at(path))


class _Once(ReadOnce):
    """An object that is read once: one request."""

    def __init__(self, there: Object) -> None:
        self.size, self.stamp = len(there.data), str(there.stamp)
        self._file = io.BytesIO(there.data)

    def _read_into(self, view: memoryview) -> int:
        return self._file.readinto(view)

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        self._file.close()


class _Upload(NewObject):
    """An object in the making: one request when it is complete."""

    def __init__(self, door: Door, at: str, path: str, kind: str) -> None:
        super().__init__()
        self.path = path
        self._door, self._at, self._kind = door, at, kind
        self._data = bytearray()

    def _write(self, view: memoryview) -> None:
        self._data += view

    def _publish(self) -> None:
        self._door.ask(self._kind, self._at, bytes(self._data))

    def _discard(self) -> None:
        self._data.clear()


Store.choose = staticmethod(lambda url: SimStore if url.startswith(SCHEME) else store_class(url))
