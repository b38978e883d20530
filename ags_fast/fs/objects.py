"""What the object stores have in common: conditions instead of locks, requests of ranges, uploads in parts."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from ags_fast.errors import PolicyError
from ags_fast.fs.base import LISTED, Entry
from ags_fast.fs.new import NewObject
from ags_fast.fs.paths import check_path
from ags_fast.fs.ranges import HEAD_NBYTES
from ags_fast.fs.remote import Looked, RemoteStore, file_exists

if TYPE_CHECKING:
    import builtins  # in the class ObjectStore, list is a method
    from collections.abc import Collection, Coroutine, Iterable, Sequence
    from concurrent.futures import Future

__all__ = ["PART_NBYTES", "ObjectStore", "Upload", "span"]

PART_NBYTES = 8 << 20  # of an upload
KEY_NBYTES = 1024  # of a name in a bucket
PARTS_IN_FLIGHT = 4
SETTLE_SECONDS = 10.0  # that an upload that is given up waits for parts on their way
LOOKS = 16  # objects that are looked up at once


def span(begin: int, end: int) -> str:
    """Return the value of an HTTP Range header. A negative `begin`: the last bytes."""
    return f"bytes={begin}-{end - 1}" if begin >= 0 else f"bytes={begin}"


class ObjectStore(RemoteStore):
    """A folder of a bucket. Each read of a range has the object's stamp as its condition.

    Attributes:
        tails: Whether the last bytes can be read before the size is known.
    """

    stamped = True
    tails = True
    lacks = ""  # characters that names cannot have

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Let the thread of fsspec do this work."""
        try:
            loop = self.connect()[0].loop
        except BaseException:
            work.close()  # else Python warns of a coroutine that nobody awaited
            raise
        return asyncio.run_coroutine_threadsafe(work, loop)

    def checked(self, path: str) -> str:
        """See `Store.checked`."""
        nbytes = len(f"{self.connect()[1]}/{check_path(path)}".partition("/")[2].encode("utf-8", "surrogatepass"))
        if nbytes > KEY_NBYTES or any("\ud800" <= char <= "\udfff" or char in self.lacks for char in path):
            raise PolicyError(
                f"{path!r} is no name here: {KEY_NBYTES} bytes of UTF-8 {self.lacks and 'without '}{self.lacks}"
            )
        return path

    async def found(self, path: str) -> Entry | None:
        """Look an object up. None: it does not exist."""
        raise NotImplementedError

    async def get(self, path: str, stamp: str | None, begin: int, end: int) -> Looked | None:
        """Get a range, which the object may have a part of; None if it has no byte there.

        A negative `begin` is the number of bytes before the object's end. OSError if the stamp is another than `stamp`.
        """
        raise NotImplementedError

    def upload(self, path: str, exclusive: bool) -> Upload:
        """Begin an object."""
        raise NotImplementedError

    def _stat(self, path: str) -> Entry | None:
        entry: Entry | None = self.run(self.found(path)).result()
        return entry

    def existing(self, paths: Iterable[str]) -> set[str]:
        """See `Store.existing`. A request for each path, 16 at once, or one listing from 1000 paths on."""
        wanted = set(paths)
        if len(wanted) >= LISTED:
            return wanted.intersection(entry.path for entry in self.list())

        async def look() -> set[str]:
            turn = asyncio.Semaphore(LOOKS)

            async def one(path: str) -> str | None:
                async with turn:
                    return None if await self.found(path) is None else path

            return {path for path in await asyncio.gather(*map(one, wanted)) if path is not None}

        there: set[str] = self.run(look()).result()
        return there

    def _request_range(self, path: str, stamp: str | None, begin: int, end: int) -> Future[bytes]:
        async def data() -> bytes:
            looked = await self.get(path, stamp, begin, end)
            return b"" if looked is None else looked.data

        return self.run(data())

    def look(self, path: str, tail: bool = False) -> Looked:
        """See `RemoteStore.look`."""
        if tail and not self.tails:
            return super().look(path, tail)
        looked: Looked | None = self.run(self.get(path, None, -HEAD_NBYTES if tail else 0, HEAD_NBYTES)).result()
        return super().look(path, tail) if looked is None else looked  # it is empty, or the server knows no such range

    def _read_if_unchanged(self, path: str, size: int, stamp: str | None) -> bytes | None:
        try:
            data = self._read_range(path, stamp, 0, size + 1)
        except OSError:
            return None
        return data if len(data) == size else None

    def _create_exclusive(self, path: str, data: bytes) -> None:
        with self.upload(path, exclusive=True) as new:
            new.write(data)
            new.publish()

    def _write_if_new(self, path: str, data: bytes, fsync: bool, mode: int | None, mtime_ns: int | None) -> bool:
        try:
            self._create_exclusive(path, data)
        except FileExistsError:
            return False
        return True

    def write_small(self, path: str, data: bytes, *, tag: str = "", fsync: bool = False) -> None:
        """See `Store.write_small`. One request, whether the file exists or not."""
        with self.begin(path, tag=tag) as new:
            new.write(data)
            new.publish()

    def _begin(self, path: str, exclusive: bool, tag: str, **local: Any) -> Upload:
        if exclusive and self.stat(path) is not None:  # before all of the file is sent for nothing
            raise file_exists(self.full_path(path))
        return self.upload(path, exclusive)

    def _sweep(
        self, tag: str | None, age: float, age_unlocked: float, paths: Collection[str], below: str
    ) -> builtins.list[str]:
        return []  # unless the storage lists unfinished uploads


class Upload(NewObject):
    """An object in the making: one request if it is small, else parts that travel while the next one is filled.

    Attributes:
        writer: A random name, which is in the object's metadata: shows who has written it.
    """

    in_flight = PARTS_IN_FLIGHT

    def __init__(self, store: ObjectStore, path: str, exclusive: bool) -> None:
        super().__init__()
        self.path = store.full_path(path)
        self.writer = os.urandom(16).hex()
        self._exclusive = exclusive
        self._parts: list[Future[Any]] = []  # sent, or on their way
        self._buffer = io.BytesIO()
        self._filled = 0

    def __del__(self) -> None:
        if not getattr(self, "_done", True) and self._owner == os.getpid() and not sys.is_finalizing():
            self._done = True
            if self._parts:  # not waited for: this may be the thread that would do it
                self._cancel()
                self._abort()

    def _part_size(self) -> int:
        return PART_NBYTES << len(self._parts) // 1000

    def _write(self, view: memoryview) -> None:
        while view:
            taken = view[: self._part_size() - self._filled]
            self._filled += self._buffer.write(taken)
            view = view[len(taken) :]
            if self._filled == self._part_size():
                self._send()

    def _send(self, last: bool = False) -> None:
        """Send the part that is filled."""
        if not self._parts:
            self._start()
        elif len(self._parts) >= self.in_flight:
            self._parts[-self.in_flight].result()
        self._parts.append(self._send_part(len(self._parts), self._take(), last))

    def _take(self) -> bytes:
        buffer, self._buffer, self._filled = self._buffer, io.BytesIO(), 0
        return buffer.getvalue()  # no copy

    def _publish(self) -> None:
        try:
            if self._parts:
                if self._filled:
                    self._send(last=True)
                self._complete([part.result() for part in self._parts])
            else:
                self._put(self._take())
        except (FileExistsError, FileNotFoundError) as error:
            # Clients repeat a request whose answer was lost; the second one is then refused because of the first.
            if self._is_ours():
                return
            if isinstance(error, FileExistsError):
                raise file_exists(self.path) from error
            raise

    def _is_ours(self) -> bool:
        try:
            return self._writer_there() == self.writer
        except OSError:
            return False

    def _discard(self) -> None:
        self._take()
        if self._parts:
            # A part that is still on its way when the upload is aborted may make the server keep it.
            wait(self._parts, timeout=SETTLE_SECONDS)
            self._cancel()
            aborted = self._abort()
            try:
                if aborted is not None:
                    aborted.result()
            except OSError:  # what is left is for `sweep`, or for the server
                pass

    def _cancel(self) -> None:
        for part in self._parts:
            part.cancel()

    def _start(self) -> None:
        """Begin an upload in parts."""

    def _abort(self) -> Future[Any] | None:
        """Let the server forget the parts, if it can."""
        return None

    if TYPE_CHECKING:
        # Send the whole object in one request. FileExistsError if the object is exclusive and one is there.
        def _put(self, data: bytes) -> None: ...

        # Send a part; the first is number 0. The last one may not be known to be the last if it is full.
        def _send_part(self, number: int, data: bytes, last: bool) -> Future[Any]: ...

        # Make an object of the parts, by the answers to them. FileExistsError as for `_put`.
        def _complete(self, answers: Sequence[Any]) -> None: ...

        # The writer of the object that is there. OSError if there is none.
        def _writer_there(self) -> str | None: ...
