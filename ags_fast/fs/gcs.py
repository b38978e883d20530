"""A folder of a Google Cloud Storage bucket, by requests of its JSON API. gcsfs connects, and brings credentials.

Its files complete an upload whenever they are closed, and do not check that what they read is still the same object.
"""

from __future__ import annotations

import datetime
import io
import json
import os
import re
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ags_fast import telemetry
from ags_fast.errors import PolicyError
from ags_fast.fs.answers import AGAIN
from ags_fast.fs.base import Entry
from ags_fast.fs.objects import ATTEMPTS, ObjectStore, Told, Upload, span

if TYPE_CHECKING:
    import builtins  # in the class GcsStore, list is a method
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from ags_fast.fs.objects import Fetched

__all__ = ["GcsStore"]

CHUNK_NBYTES = 8 << 20  # of an upload; a multiple of 256 KiB, as Google wants it
PAGE = 1000  # objects of a listing
WRITER = "ags-writer"  # metadata of an object: `Upload.writer`
BINARY = "application/octet-stream"
FIELDS = "name,size,generation,updated"
LISTED = f"kind,nextPageToken,items({FIELDS})"
CODES: dict[str | int, str] = dict.fromkeys(("rateLimitExceeded", "userRateLimitExceeded", "backendError"), AGAIN)


class _Upload(Upload):
    """An object in the making: of its parts, which Google calls chunks, one travels while the next is filled.

    The condition "generation 0", which no object has, makes it exclusive. Google lists no unfinished uploads, shows
    nothing of them, and removes them after a week.
    """

    in_flight = 1

    def __init__(self, bucket: GcsStore, path: str, exclusive: bool) -> None:
        super().__init__(bucket, path, exclusive)
        self._bucket, self._key = bucket, bucket.key(path)
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
        return f"{self._bucket.connect()[0]._location}/upload/storage/v1/b/{{}}/o"  # noqa: SLF001 (as in ask)

    def _metadata(self) -> bytes:
        return json.dumps({"name": self._key[1], "metadata": {WRITER: self.writer}}).encode()

    def _start(self) -> None:
        kind = {"Content-Type": "application/json; charset=UTF-8", "X-Upload-Content-Type": BINARY}
        query = {"uploadType": "resumable", **self._condition}
        headers, _ = self._bucket.call("POST", self._url(), self._key[0], headers=kind, data=self._metadata(), **query)
        with self._bucket.understood():
            self._session = headers["Location"]

    def _send_part(self, number: int, data: bytes, last: bool) -> Future[Any]:
        begin, self._sent_nbytes = self._sent_nbytes, self._sent_nbytes + len(data)
        total = self._sent_nbytes if last else None
        return self._bucket.run(_put_chunk(self._bucket, self._session, data, begin, total))

    def _complete(self, answers: Sequence[Any]) -> None:
        pass  # the last chunk has done it

    def _abort(self) -> Future[Any] | None:
        return self._bucket.submit("DELETE", self._session)

    def _put(self, data: bytes) -> None:
        border = os.urandom(16).hex()
        head = f"--{border}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n".encode() + self._metadata()
        head += f"\r\n--{border}\r\nContent-Type: {BINARY}\r\n\r\n".encode()
        kind = {"Content-Type": f'multipart/related; boundary="{border}"'}
        query = {"uploadType": "multipart", **self._condition}
        whole = b"".join((head, data, f"\r\n--{border}--".encode()))
        _, body = self._bucket.call("POST", self._url(), self._key[0], headers=kind, data=whole, **query)
        with self._bucket.understood():
            json.loads(body)["generation"]

    def _writer_there(self) -> str | None:
        _, body = self._bucket.call("GET", "b/{}/o/{}", *self._key, fields="metadata")
        with self._bucket.understood():
            writer: str | None = json.loads(body).get("metadata", {}).get(WRITER)
        return writer


class GcsStore(ObjectStore):
    """A folder of a bucket. The stamp of an object is its generation, with which each range is read."""

    service = "Google Cloud Storage"
    advice = "endpoint_url, and the proxies on the way"
    codes = CODES
    uploads = _Upload

    def key(self, path: str) -> tuple[str, str]:
        """Return the bucket and the object's name of a path, or of a prefix."""
        _, root = self.connect()
        bucket, _, prefix = root.partition("/")
        return bucket, f"{prefix}/{path}" if prefix else path

    async def ask(
        self, method: str, url: str, *names: str, headers: Any = None, data: Any = None, **query: Any
    ) -> tuple[Mapping[str, str], bytes]:
        """Make a request, and return the headers and the body of the answer.

        `url` may be the part after ``/storage/v1/``, with {} for each of `names`, which are quoted. The status 308 says
        that a chunk of an upload has come, and that more is due.
        """
        fs, _ = self.connect()
        telemetry.debug("store", "gs: %s %s", method, "/".join(names))  # the URL of an upload is a secret
        await fs._set_session()  # noqa: SLF001 (gcsfs has public names for files only)
        headers = headers or {}

        async def send() -> tuple[Mapping[str, str], bytes]:
            async with fs.session.request(
                method,
                fs._format_path(url, names),  # noqa: SLF001 (as above)
                params=fs._get_params(query),  # noqa: SLF001 (as above)
                headers=fs._get_headers(headers),  # noqa: SLF001 (as above)
                data=None if data is None else io.BytesIO(data),  # aiohttp warns of large bytes
                timeout=fs.requests_timeout,
                allow_redirects=False,
            ) as answer:
                body = await answer.read()
            more = answer.status == 308 and "Content-Range" in headers and "Location" not in answer.headers
            if not (more or 200 <= answer.status < 300) or (query.get("alt") != "media" and body[:1] == b"<"):
                raise _AnswerError(_read(answer.status, answer.headers, body))
            return answer.headers, body

        return await self.patiently(send, f"gs://{'/'.join(names)}", {*query, *headers})

    def _host(self) -> str:
        return str(urlsplit(self.connect()[0].base).hostname)

    def _told(self, error: Any) -> Told | None:
        return error.args[0] if isinstance(error, _AnswerError) else None

    async def _listed(self, prefix: str, after: str, token: str | None, count: int = 0) -> Any:
        bucket, start = self.key(prefix)
        more = {"startOffset": self.key(after)[1]} if after else {}  # which is listed, too
        more |= {"pageToken": token} if token else {}
        return await self.ask("GET", "b/{}/o", bucket, prefix=start, maxResults=count or PAGE, fields=LISTED, **more)

    def _entries(self, answer: Any) -> tuple[builtins.list[Entry], Any]:
        page, skip = json.loads(answer[1]), len(self.key("")[1])
        if not {"kind", "items", "nextPageToken"} & page.keys():
            raise KeyError("kind")
        return [_entry(one["name"][skip:], one) for one in page.get("items", ())], page.get("nextPageToken")

    async def _head(self, path: str) -> Entry:
        return _entry(path, json.loads((await self.ask("GET", "b/{}/o/{}", *self.key(path), fields=FIELDS))[1]))

    async def _fetch(self, path: str, stamp: str | None, begin: int, end: int) -> Fetched:
        query = {"alt": "media", **({"ifGenerationMatch": stamp} if stamp else {})}
        where = {"Range": span(begin, end)}
        headers, data = await self.ask("GET", "b/{}/o/{}", *self.key(path), headers=where, **query)
        if headers.get("Content-Encoding", "identity") != "identity":
            raise PolicyError(f"{path} has a Content-Encoding, so that no part of it can be read: store it without")
        modified = parsedate_to_datetime(headers["Last-Modified"]).timestamp()
        return headers["X-Goog-Generation"], modified, headers.get("Content-Range"), data

    def _remove(self, path: str, stamp: str | None) -> None:
        self.call("DELETE", "b/{}/o/{}", *self.key(path), **({"ifGenerationMatch": stamp} if stamp else {}))


class _AnswerError(Exception):
    """An answer that is not the one that is due: a `Told`."""


def _read(status: int, headers: Mapping[str, str], body: bytes) -> Told:
    """What an answer tells. Errors of downloads are plain text, those of the proxies of others HTML or other JSON."""
    code, words = "", body[:200].decode(errors="replace")
    own = re.match(rb"\s*<(!doctype|html)", body, re.IGNORECASE) is None
    try:
        error = json.loads(body)["error"]
        code, words = str(error["errors"][0]["reason"]) if error.get("errors") else "", str(error.get("message", ""))
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
        own = own and body[:1] not in (b"{", b"[")
    return Told(status, code, words if own else "", own, headers.get("Retry-After"), headers.get("Location", ""))


def _entry(path: str, found: Mapping[str, Any]) -> Entry:
    modified = datetime.datetime.fromisoformat(found["updated"]).timestamp()
    return Entry(path, int(found["size"]), str(int(found["generation"])), modified)


async def _put_chunk(store: GcsStore, session: str, data: bytes, begin: int, total: int | None) -> None:
    end, view, standing = begin + len(data), memoryview(data), 0
    while True:
        sent = f"bytes {f'{begin}-{end - 1}' if view else '*'}/{'*' if total is None else total}"
        kind = {"Content-Range": sent, "Content-Type": BINARY}
        headers, body = await store.ask("PUT", session, headers=kind, data=view)
        with store.understood():
            if total is not None and "Range" not in headers and body:
                json.loads(body)["generation"]
                return
            kept = int(headers["Range"].rpartition("-")[2]) + 1 if "Range" in headers else 0
        if kept == end and total is None:
            return
        standing = standing + 1 if kept <= begin else 0
        if not begin <= kept <= end or standing == ATTEMPTS:
            raise store.foreign(f"it keeps {kept} bytes of an upload, and is sent those from {begin} to {end}")
        view, begin = view[kept - begin :], kept
