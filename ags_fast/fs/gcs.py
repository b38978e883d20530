"""A folder of a Google Cloud Storage bucket, by requests of its JSON API.

gcsfs connects, brings credentials and repeats requests that may succeed. Its files are not used: they complete an
upload whenever they are closed, and they do not check that what they read is still the same object.
"""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import sys
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from ags_fast.errors import PolicyError
from ags_fast.fs.base import LISTED, Entry, NewOptions
from ags_fast.fs.new import NewObject
from ags_fast.fs.ranges import HEAD_NBYTES
from ags_fast.fs.remote import Looked, RemoteStore, entry_of, file_exists, replaced

if TYPE_CHECKING:
    import builtins  # in the class GcsStore, list is a method
    from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping
    from concurrent.futures import Future

__all__ = ["GcsStore"]

CHUNK_NBYTES = 8 << 20  # of an upload; a multiple of 256 KiB, as Google wants it
PAGE = 1000  # objects of a listing
LOOKS = 16  # objects that are looked up at once
WRITER = "ags-writer"  # metadata of an object: a random name of who has written it
FIELDS = "name,size,generation,updated"


class GcsStore(RemoteStore):
    """A folder of a bucket. The stamp of an object is its generation."""

    stamped = True  # each request of a range has ifGenerationMatch, and the answer's generation is checked

    def key(self, path: str) -> tuple[str, str]:
        """Return the bucket and the object's name of a path, or of a prefix."""
        _, root = self.connect()
        bucket, _, prefix = root.partition("/")
        return bucket, f"{prefix}/{path}" if prefix else path

    def call(self, method: str, url: str, *names: str, **arguments: Any) -> tuple[Mapping[str, str], bytes]:
        """Make a request, and wait for the headers and the body of the answer.

        Args:
            method: GET, POST, PUT or DELETE.
            url: The request's URL, or the part after ``/storage/v1/``, with {} for each name.
            names: What stands for {}: they are quoted.
            arguments: headers and data, and else the query.

        Raises:
            FileNotFoundError: There is no such object or bucket.
            FileExistsError: A condition of the request does not hold.
            PermissionError: The credentials do not allow that.
            OSError: All else that is in the way.
        """
        return self.submit(method, url, *names, **arguments).result()

    def submit(self, method: str, url: str, *names: str, **arguments: Any) -> Future[tuple[Mapping[str, str], bytes]]:
        """Let the thread of fsspec make a request: see `call`."""
        return self.run(self.ask(method, url, *names, **arguments))

    async def ask(self, method: str, url: str, *names: str, **arguments: Any) -> tuple[Mapping[str, str], bytes]:
        """Make a request: see `call`. gcsfs repeats it if that may help."""
        import aiohttp
        import requests
        from gcsfs.core import UnclosableBytesIO
        from gcsfs.retry import HttpError
        from google.auth.exceptions import GoogleAuthError

        fs, _ = self.connect()
        if "data" in arguments:  # aiohttp warns of large bytes, and closes files that gcsfs sends again
            arguments["data"] = UnclosableBytesIO(arguments["data"])
        try:
            answer: tuple[Mapping[str, str], bytes] = await fs._call(method, url, *names, **arguments)  # noqa: SLF001 (gcsfs has public names for files only)
            return answer
        except HttpError as error:
            code = int(error.code or 0)
            if code == 416:
                raise _NoSuchRangeError(errno.EINVAL, "there is no such range") from error
            if code in (401, 403):
                raise PermissionError(errno.EACCES, f"Google Cloud Storage answers {code}: {error.message}") from error
            raise OSError(errno.EIO, f"Google Cloud Storage answers {code}: {error.message}") from error
        except (FileNotFoundError, FileExistsError, PermissionError):
            raise
        except OSError as error:
            if str(error).startswith("Forbidden"):
                raise PermissionError(errno.EACCES, str(error)) from error
            raise
        except GoogleAuthError as error:
            raise PermissionError(errno.EACCES, f"{type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, requests.RequestException, TimeoutError, ValueError) as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Let the thread of fsspec do this work."""
        return asyncio.run_coroutine_threadsafe(work, self.connect()[0].loop)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See `Store.list`."""
        bucket, start = self.key(prefix)
        skip = len(start) - len(prefix)
        query = {"prefix": start, "maxResults": PAGE, "fields": f"nextPageToken,items({FIELDS})"}
        page = self.submit("GET", "b/{}/o", bucket, **query)
        while True:
            answer = json.loads(page.result()[1])
            token = answer.get("nextPageToken")
            if token:  # request the next page while the caller works on this one
                page = self.submit("GET", "b/{}/o", bucket, **query, pageToken=token)
            for found in answer.get("items", ()):
                if not found["name"].endswith("/"):  # which is how some mark a folder
                    yield _entry(found["name"][skip:], found)
            if not token:
                return

    def page(self, folder: str, after: str, count: int) -> tuple[builtins.list[Entry], bool]:
        """See `RemoteStore.page`. One request."""
        bucket, start = self.key(folder)
        skip = len(start)
        # startOffset itself is listed, too
        more = {"startOffset": start + after, "maxResults": count + 1} if after else {"maxResults": count}
        fields = f"nextPageToken,items({FIELDS})"
        _, body = self.call("GET", "b/{}/o", bucket, prefix=start, delimiter="/", fields=fields, **more)
        answer = json.loads(body)
        names = {one["name"][skip:]: one for one in answer.get("items", ()) if not one["name"].endswith("/")}
        found = [_entry(folder + name, one) for name, one in names.items() if name > after]
        return found, bool(answer.get("nextPageToken"))

    def existing(self, paths: Iterable[str]) -> set[str]:
        """See `Store.existing`. A request for each path, 16 at once, or one listing from 1000 paths on."""
        wanted = set(paths)
        if len(wanted) >= LISTED:
            return wanted.intersection(entry.path for entry in self.list())

        async def look() -> set[str]:
            turn = asyncio.Semaphore(LOOKS)

            async def one(path: str) -> str | None:
                async with turn:
                    return None if await self._found(path) is None else path

            return {path for path in await asyncio.gather(*map(one, wanted)) if path is not None}

        found: set[str] = self.run(look()).result()
        return found

    async def _found(self, path: str) -> Entry | None:
        try:
            _, body = await self.ask("GET", "b/{}/o/{}", *self.key(path), fields=FIELDS)
        except FileNotFoundError:
            return None
        return _entry(path, json.loads(body))

    def _stat(self, path: str) -> Entry | None:
        entry: Entry | None = self.run(self._found(path)).result()
        return entry

    def exists(self) -> bool:
        """See `Store.exists`."""
        bucket, start = self.key("")
        _, body = self.call("GET", "b/{}/o", bucket, prefix=start, maxResults=1, fields="items(name)")
        return bool(json.loads(body).get("items"))

    def _request_range(self, path: str, stamp: str | None, begin: int, end: int) -> Future[bytes]:
        return self.run(self._get_range(path, stamp, begin, end))

    async def _get_range(self, path: str, stamp: str | None, begin: int, end: int) -> bytes:
        found = await self._get(path, stamp, f"bytes={begin}-{end - 1}")
        return b"" if found is None else found[1]

    async def _get(self, path: str, stamp: str | None, span: str) -> tuple[Mapping[str, str], bytes] | None:
        """Get a range, and the headers of the answer. None if the object has no byte there."""
        query = {"alt": "media", **({"ifGenerationMatch": stamp} if stamp else {})}
        try:
            headers, data = await self.ask("GET", "b/{}/o/{}", *self.key(path), headers={"Range": span}, **query)
        except FileExistsError as error:
            raise replaced(path) from error
        except _NoSuchRangeError:
            return None
        if stamp and headers.get("X-Goog-Generation") != stamp:
            raise replaced(path)
        if headers.get("Content-Encoding", "identity") != "identity":
            raise PolicyError(
                f"{path} has a Content-Encoding, so a part of the object cannot be read: store it without"
            )
        return headers, data

    def look(self, path: str, tail: bool = False) -> Looked:
        """See `RemoteStore.look`."""
        found = self.run(
            self._get(path, None, f"bytes=-{HEAD_NBYTES}" if tail else f"bytes=0-{HEAD_NBYTES - 1}")
        ).result()
        if found is None:  # it is empty
            return super().look(path, tail)
        headers, data = found
        size = int(headers["Content-Range"].rpartition("/")[2]) if "Content-Range" in headers else len(data)
        modified = parsedate_to_datetime(headers["Last-Modified"]).timestamp()
        entry = Entry(path, size, headers["X-Goog-Generation"], modified)
        return Looked(entry, size - len(data) if tail else 0, data)

    def _read_if_unchanged(self, path: str, size: int, stamp: str | None) -> bytes | None:
        try:
            data = self._read_range(path, stamp, 0, size + 1)
        except OSError:
            return None
        return data if len(data) == size else None

    def _create_exclusive(self, path: str, data: bytes) -> None:
        with _Upload(self, path, exclusive=True) as new:
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

    def _begin(self, path: str, options: NewOptions) -> _Upload:
        if options.exclusive and self.stat(path) is not None:  # before all of the file is sent for nothing
            raise file_exists(self.full_path(path))
        return _Upload(self, path, options.exclusive)

    def _delete(self, path: str, read: Entry | None) -> None:
        query = {} if read is None else {"ifGenerationMatch": read.stamp}
        try:
            self.call("DELETE", "b/{}/o/{}", *self.key(path), **query)
        except FileNotFoundError:
            pass
        except FileExistsError as error:
            raise replaced(path) from error

    def _sweep(
        self, tag: str | None, age: float, age_unlocked: float, paths: Collection[str], below: str
    ) -> builtins.list[str]:
        return []  # Google lists no unfinished uploads, shows nothing of them, and removes them after a week


class _NoSuchRangeError(OSError):
    """The object has no byte in the range."""


def _entry(path: str, found: Mapping[str, Any]) -> Entry:
    """The entry of an object's metadata."""
    modified = entry_of(path, {"size": 0, "updated": found["updated"]}).modified
    return Entry(path, int(found["size"]), str(found["generation"]), modified)


class _Upload(NewObject):
    """An object in the making: one request if it is small, else chunks, of which one travels while the next is filled.

    The condition "generation 0", which no object has, makes it exclusive.
    """

    def __init__(self, bucket: GcsStore, path: str, exclusive: bool) -> None:
        super().__init__()
        self.path = bucket.full_path(path)
        self._bucket = bucket
        self._key = bucket.key(path)
        self._condition = {"ifGenerationMatch": "0"} if exclusive else {}
        self._session = ""  # the URL of the upload, once there is one
        self._way: Future[Any] | None = None  # the chunk on its way
        self._begin = 0  # of the chunk that is being filled
        self._buffer = io.BytesIO()
        self._filled = 0
        self._writer = os.urandom(16).hex()

    def __del__(self) -> None:
        if not getattr(self, "_done", True) and self._owner == os.getpid() and not sys.is_finalizing():
            self._done = True
            if self._session:  # not waited for: this may be the thread that would do it
                if self._way is not None:
                    self._way.cancel()
                self._bucket.submit("DELETE", self._session)

    def _write(self, view: memoryview) -> None:
        while view:
            if self._filled == CHUNK_NBYTES:  # only now: the last chunk says that it is the last
                self._send(None)
            taken = view[: CHUNK_NBYTES - self._filled]
            self._filled += self._buffer.write(taken)
            view = view[len(taken) :]

    def _url(self) -> str:
        fs, _ = self._bucket.connect()
        return f"{fs._location}/upload/storage/v1/b/{{}}/o"  # noqa: SLF001 (as in ask)

    def _metadata(self) -> bytes:
        return json.dumps({"name": self._key[1], "metadata": {WRITER: self._writer}}).encode()

    def _send(self, total: int | None) -> None:
        """Send the chunk that is filled. total: the size of the object, with its last chunk."""
        if not self._session:
            kind = {"Content-Type": "application/json; charset=UTF-8", "X-Upload-Content-Type": BINARY}
            headers, _ = self._bucket.call(
                "POST",
                self._url(),
                self._key[0],
                uploadType="resumable",
                headers=kind,
                data=self._metadata(),
                **self._condition,
            )
            self._session = headers["Location"]
        self._wait()
        data, begin = self._take(), self._begin
        self._begin += len(data)
        self._way = self._bucket.run(_put_chunk(self._bucket, self._session, data, begin, total))

    def _wait(self) -> None:
        way, self._way = self._way, None
        if way is not None:
            way.result()

    def _take(self) -> bytes:
        buffer, self._buffer, self._filled = self._buffer, io.BytesIO(), 0
        return buffer.getvalue()  # no copy

    def _publish(self) -> None:
        try:
            if self._session:
                self._send(self._begin + self._filled)
                self._wait()
            else:
                self._put()
        except (FileExistsError, FileNotFoundError) as error:
            # gcsfs repeats a request whose answer was lost; the second one is then refused because of the first.
            if self._is_ours():
                return
            if isinstance(error, FileExistsError):
                raise file_exists(self.path) from error
            raise

    def _put(self) -> None:
        """Send the whole object, with its metadata, in one request."""
        border = os.urandom(16).hex()
        head = f"--{border}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n".encode() + self._metadata()
        head += f"\r\n--{border}\r\nContent-Type: {BINARY}\r\n\r\n".encode()
        self._bucket.call(
            "POST",
            self._url(),
            self._key[0],
            uploadType="multipart",
            headers={"Content-Type": f'multipart/related; boundary="{border}"'},
            data=b"".join((head, self._take(), f"\r\n--{border}--".encode())),
            **self._condition,
        )

    def _is_ours(self) -> bool:
        try:
            _, body = self._bucket.call("GET", "b/{}/o/{}", *self._key, fields="metadata")
        except OSError:
            return False
        return bool(json.loads(body).get("metadata", {}).get(WRITER) == self._writer)

    def _discard(self) -> None:
        self._take()
        if not self._session:
            return
        try:
            self._wait()
        except OSError:
            pass
        try:
            self._bucket.call("DELETE", self._session)
        except OSError:  # Google removes the upload after a week
            pass


BINARY = "application/octet-stream"


async def _put_chunk(store: GcsStore, session: str, data: bytes, begin: int, total: int | None) -> None:
    """Send a chunk, until the server has all of it."""
    end, view = begin + len(data), memoryview(data)
    while True:
        span = f"{begin}-{end - 1}" if view else "*"
        headers, _ = await store.ask(
            "PUT",
            session,
            headers={"Content-Range": f"bytes {span}/{'*' if total is None else total}", "Content-Type": BINARY},
            data=view,
        )
        if total is not None and "Range" not in headers:
            return
        kept = int(headers["Range"].rpartition("-")[2]) + 1 if "Range" in headers else 0
        if kept >= end:
            return
        if kept < begin:
            raise OSError(errno.EIO, f"Google Cloud Storage has lost a part of an upload, from byte {kept} on")
        view, begin = view[kept - begin :], kept
