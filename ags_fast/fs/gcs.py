"""A folder of a Google Cloud Storage bucket, by requests of its JSON API.

gcsfs connects, brings credentials and repeats requests that may succeed. Its files are not used: they complete an
upload whenever they are closed, and they do not check that what they read is still the same object.
"""

from __future__ import annotations

import errno
import json
import os
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from ags_fast import telemetry
from ags_fast.errors import PolicyError
from ags_fast.fs.base import Entry
from ags_fast.fs.objects import ObjectStore, Upload, span
from ags_fast.fs.remote import Looked, entry_of, replaced

if TYPE_CHECKING:
    import builtins  # in the class GcsStore, list is a method
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from ags_fast.fs.base import LeftOut

__all__ = ["GcsStore"]

CHUNK_NBYTES = 8 << 20  # of an upload; a multiple of 256 KiB, as Google wants it
PAGE = 1000  # objects of a listing
WRITER = "ags-writer"  # metadata of an object: `Upload.writer`
BINARY = "application/octet-stream"
FIELDS = "name,size,generation,updated"


class GcsStore(ObjectStore):
    """A folder of a bucket. The stamp of an object is its generation.

    Each request of a range has ifGenerationMatch, and the answer's generation is checked.
    """

    def key(self, path: str) -> tuple[str, str]:
        """Return the bucket and the object's name of a path, or of a prefix."""
        _, root = self.connect()
        bucket, _, prefix = root.partition("/")
        return bucket, f"{prefix}/{path}" if prefix else path

    def call(self, method: str, url: str, *names: str, **arguments: Any) -> tuple[Mapping[str, str], bytes]:
        """Make a request, and wait for the headers and the body of the answer.

        `url` may be the part after ``/storage/v1/``, with {} for each of `names`, which are quoted. `arguments` are
        headers and data, and else the query. FileNotFoundError if there is no such object or bucket, FileExistsError if
        a condition of the request does not hold, PermissionError if the credentials do not allow that, else OSError.
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
        telemetry.debug("store", "gs: %s %s", method, "/".join(names))  # the URL of an upload is a secret
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

    def list(self, prefix: str = "", after: str = "", left_out: LeftOut | None = None) -> Iterator[Entry]:
        """See `Store.list`."""
        bucket, start = self.key(prefix)
        skip = len(start) - len(prefix)
        query = {"prefix": start, "maxResults": PAGE, "fields": f"nextPageToken,items({FIELDS})"}
        if after:
            query["startOffset"] = self.key(after)[1]  # which is listed, too
        page = self.submit("GET", "b/{}/o", bucket, **query)
        while True:
            answer = json.loads(page.result()[1])
            token = answer.get("nextPageToken")
            if token:  # request the next page while the caller works on this one
                page = self.submit("GET", "b/{}/o", bucket, **query, pageToken=token)
            for entry in (_entry(found["name"][skip:], found) for found in answer.get("items", ())):
                if (entry.path > after or not after) and self._is_file(entry, left_out):
                    yield entry
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

    async def found(self, path: str) -> Entry | None:
        """See `ObjectStore.found`."""
        try:
            _, body = await self.ask("GET", "b/{}/o/{}", *self.key(path), fields=FIELDS)
        except FileNotFoundError:
            return None
        return _entry(path, json.loads(body))

    def exists(self) -> bool:
        """See `Store.exists`."""
        bucket, start = self.key("")
        _, body = self.call("GET", "b/{}/o", bucket, prefix=start, maxResults=1, fields="items(name)")
        return bool(json.loads(body).get("items"))

    async def get(self, path: str, stamp: str | None, begin: int, end: int) -> Looked | None:
        """See `ObjectStore.get`."""
        query = {"alt": "media", **({"ifGenerationMatch": stamp} if stamp else {})}
        try:
            headers, data = await self.ask(
                "GET", "b/{}/o/{}", *self.key(path), headers={"Range": span(begin, end)}, **query
            )
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
        size = int(headers["Content-Range"].rpartition("/")[2]) if "Content-Range" in headers else len(data)
        modified = parsedate_to_datetime(headers["Last-Modified"]).timestamp()
        entry = Entry(path, size, headers["X-Goog-Generation"], modified)
        return Looked(entry, size - len(data) if begin < 0 else begin, data)

    def upload(self, path: str, exclusive: bool) -> _Upload:
        """See `ObjectStore.upload`."""
        return _Upload(self, path, exclusive)

    def _delete(self, path: str, read: Entry | None) -> None:
        query = {} if read is None else {"ifGenerationMatch": read.stamp}
        try:
            self.call("DELETE", "b/{}/o/{}", *self.key(path), **query)
        except FileNotFoundError:
            pass
        except FileExistsError as error:
            raise replaced(path) from error


class _NoSuchRangeError(OSError):
    """The object has no byte in the range."""


def _entry(path: str, found: Mapping[str, Any]) -> Entry:
    """The entry of an object's metadata."""
    modified = entry_of(path, {"size": 0, "updated": found["updated"]}).modified
    return Entry(path, int(found["size"]), str(found["generation"]), modified)


class _Upload(Upload):
    """An object in the making: of its parts, which Google calls chunks, one travels while the next is filled.

    The condition "generation 0", which no object has, makes it exclusive. Google lists no unfinished uploads, shows
    nothing of them, and removes them after a week.
    """

    in_flight = 1

    def __init__(self, bucket: GcsStore, path: str, exclusive: bool) -> None:
        super().__init__(bucket, path, exclusive)
        self._bucket = bucket
        self._key = bucket.key(path)
        self._condition = {"ifGenerationMatch": "0"} if exclusive else {}
        self._session = ""  # the URL of the upload, once there is one
        self._sent_nbytes = 0

    def _part_size(self) -> int:
        return CHUNK_NBYTES

    def _write(self, view: memoryview) -> None:
        while view:
            if self._filled == CHUNK_NBYTES:  # only now: the last chunk says that it is the last
                self._send()
            taken = view[: CHUNK_NBYTES - self._filled]
            self._filled += self._buffer.write(taken)
            view = view[len(taken) :]

    def _url(self) -> str:
        fs, _ = self._bucket.connect()
        return f"{fs._location}/upload/storage/v1/b/{{}}/o"  # noqa: SLF001 (as in ask)

    def _metadata(self) -> bytes:
        return json.dumps({"name": self._key[1], "metadata": {WRITER: self.writer}}).encode()

    def _start(self) -> None:
        kind = {"Content-Type": "application/json; charset=UTF-8", "X-Upload-Content-Type": BINARY}
        query = {"uploadType": "resumable", **self._condition}
        headers, _ = self._bucket.call("POST", self._url(), self._key[0], headers=kind, data=self._metadata(), **query)
        self._session = headers["Location"]

    def _send_part(self, number: int, data: bytes, last: bool) -> Future[Any]:
        begin = self._sent_nbytes
        self._sent_nbytes += len(data)
        total = self._sent_nbytes if last else None
        return self._bucket.run(_put_chunk(self._bucket, self._session, data, begin, total))

    def _complete(self, answers: Sequence[Any]) -> None:
        pass  # the last chunk has done it

    def _abort(self) -> Future[Any] | None:
        return self._bucket.submit("DELETE", self._session)

    def _put(self, data: bytes) -> None:
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
            data=b"".join((head, data, f"\r\n--{border}--".encode())),
            **self._condition,
        )

    def _writer_there(self) -> str | None:
        _, body = self._bucket.call("GET", "b/{}/o/{}", *self._key, fields="metadata")
        writer: str | None = json.loads(body).get("metadata", {}).get(WRITER)
        return writer


async def _put_chunk(store: GcsStore, session: str, data: bytes, begin: int, total: int | None) -> None:
    """Send a chunk, until the server has all of it."""
    end, view = begin + len(data), memoryview(data)
    while True:
        sent = f"{begin}-{end - 1}" if view else "*"
        headers, _ = await store.ask(
            "PUT",
            session,
            headers={"Content-Range": f"bytes {sent}/{'*' if total is None else total}", "Content-Type": BINARY},
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
