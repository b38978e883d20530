"""The program of `slow_s3`: a small S3 server with latency, limited connections and a log.

usage: slow_s3_server.py. Prints ``READY <url>`` when it listens, on loopback only. Objects are in memory. Signatures
are not checked, and a bucket is made by its first request.

It knows GET, HEAD and PUT of an object, with Range, If-Match and If-None-Match; DELETE of one and of many; listings
(v2) with prefix, delimiter, start-after and pages; uploads in parts, and their list.
"""

from __future__ import annotations

import asyncio
import base64
import bisect
import contextlib
import datetime
import email.utils
import hashlib
import json
import os
import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Callable

CONTROL = "/_slow/"
TICK_SECONDS = 0.01  # a connection with a rate sends or takes this much at a time


class Stored(NamedTuple):
    data: bytes
    etag: str
    modified: int  # seconds
    metadata: dict[str, str]


class Request(NamedTuple):
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    status: int = 200
    body: bytes | memoryview = b""
    headers: dict[str, str] = {}  # noqa: RUF012 (nobody changes it)


class RefusedError(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.answer = Answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())


def xml(name: str, inner: str) -> bytes:
    head = '<?xml version="1.0" encoding="UTF-8"?>\n'
    return f'{head}<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}</{name}>'.encode()


def shown_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def stored(data: bytes, headers: dict[str, str], etag: str = "") -> Stored:
    metadata = {name: value for name, value in headers.items() if name.startswith("x-amz-meta-")}
    return Stored(data, etag or f'"{hashlib.md5(data).hexdigest()}"', int(time.time()), metadata)


class Bucket:
    """Objects by key, and the keys in order."""

    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.keys: list[str] = []
        self.uploads: dict[str, tuple[str, float, dict[str, str], dict[int, Stored]]] = {}

    def put(self, key: str, one: Stored) -> None:
        if key not in self.objects:
            bisect.insort(self.keys, key)
        self.objects[key] = one

    def delete(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            del self.keys[bisect.bisect_left(self.keys, key)]

    def get(self, request: Request) -> Stored:
        found = self.objects.get(request.key)
        if found is None:
            raise RefusedError(404, "NoSuchKey")
        wanted = request.headers.get("if-match")
        if wanted not in (None, "*") and wanted.strip('"') != found.etag.strip('"'):
            raise RefusedError(412, "PreconditionFailed")
        return found

    def check_new(self, request: Request) -> None:
        if request.headers.get("if-none-match") == "*" and request.key in self.objects:
            raise RefusedError(412, "PreconditionFailed")
        if "if-match" in request.headers:
            self.get(request)


class Operations:
    """What S3 does, by the names of its reference."""

    def __init__(self) -> None:
        self.buckets: dict[str, Bucket] = {}

    def bucket(self, name: str) -> Bucket:
        return self.buckets.setdefault(name, Bucket())

    @staticmethod
    def name_of(request: Request) -> str:
        query, method = request.query, request.method
        if not request.key:
            names = {"PUT": "CreateBucket", "HEAD": "HeadBucket", "DELETE": "DeleteBucket", "POST": "DeleteObjects"}
            other = "ListMultipartUploads" if "uploads" in query else "ListObjectsV2"
            return "ListBuckets" if not request.bucket else names.get(method, other)
        if method == "PUT" and "uploadId" in query:
            return "UploadPart"
        if method == "PUT":
            return "CopyObject" if "x-amz-copy-source" in request.headers else "PutObject"
        if method == "POST":
            return "CreateMultipartUpload" if "uploads" in query else "CompleteMultipartUpload"
        if method == "DELETE":
            return "AbortMultipartUpload" if "uploadId" in query else "DeleteObject"
        return {"GET": "GetObject", "HEAD": "HeadObject"}[method]

    def run(self, name: str, request: Request) -> Answer:
        return HANDLERS[name](self.bucket(request.bucket), request)


def list_buckets(bucket: Bucket, request: Request) -> Answer:
    return Answer(body=xml("ListAllMyBucketsResult", "<Buckets></Buckets>"))


def nothing(bucket: Bucket, request: Request) -> Answer:
    return Answer()


def get_object(bucket: Bucket, request: Request) -> Answer:
    found = bucket.get(request)
    headers = {
        "ETag": found.etag,
        "Last-Modified": email.utils.formatdate(found.modified, usegmt=True),
        "Accept-Ranges": "bytes",
        "Content-Type": "binary/octet-stream",
        **found.metadata,
    }
    wanted = range_of(request.headers, len(found.data))
    if wanted is None:
        return Answer(200, found.data, headers)
    first, last = wanted
    if first >= len(found.data):
        raise RefusedError(416, "InvalidRange")
    last = min(last, len(found.data) - 1)
    headers["Content-Range"] = f"bytes {first}-{last}/{len(found.data)}"
    return Answer(206, memoryview(found.data)[first : last + 1], headers)


def range_of(headers: dict[str, str], size: int | None) -> tuple[int, int] | None:
    """size: of the object; None leaves a range without an end, or of the last bytes, as the header has it."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("range", ""))
    if match is None:
        return None
    first, last = match.groups()
    if not first:
        return (-int(last), -1) if size is None else (max(0, size - int(last)), size - 1)
    return int(first), int(last) if last else (-1 if size is None else size)


def put_object(bucket: Bucket, request: Request) -> Answer:
    bucket.check_new(request)
    one = stored(request.body, request.headers)
    bucket.put(request.key, one)
    return Answer(headers={"ETag": one.etag})


def delete_object(bucket: Bucket, request: Request) -> Answer:
    bucket.delete(request.key)
    return Answer(204)


def delete_objects(bucket: Bucket, request: Request) -> Answer:
    keys = [one.text or "" for one in ElementTree.fromstring(request.body).iter() if one.tag.endswith("Key")]
    for key in keys:
        bucket.delete(key)
    return Answer(body=xml("DeleteResult", "".join(f"<Deleted><Key>{escape(k)}</Key></Deleted>" for k in keys)))


def list_objects(bucket: Bucket, request: Request) -> Answer:
    query = request.query
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token") or query.get("start-after", "")
    limit = int(query.get("max-keys", 1000))
    at = max(bisect.bisect_left(bucket.keys, prefix), bisect.bisect_right(bucket.keys, after))
    found: list[str] = []
    folders: list[str] = []
    last = ""
    while at < len(bucket.keys) and bucket.keys[at].startswith(prefix) and len(found) + len(folders) < limit:
        key = bucket.keys[at]
        folder, slash, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        if slash:
            last = prefix + folder + slash + "\U0010ffff"
            if prefix + folder + slash > after or not after:
                folders.append(prefix + folder + slash)
            at = bisect.bisect_right(bucket.keys, last)
        else:
            found.append(key)
            last = key
            at += 1
    more = at < len(bucket.keys) and bucket.keys[at].startswith(prefix)
    inner = f"<IsTruncated>{'true' if more else 'false'}</IsTruncated><KeyCount>{len(found) + len(folders)}</KeyCount>"
    if more:
        inner += f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"
    encode: Callable[[str], str] = quote if query.get("encoding-type") == "url" else escape
    if "encoding-type" in query:
        inner += "<EncodingType>url</EncodingType>"
    for key in found:
        one = bucket.objects[key]
        inner += (
            f"<Contents><Key>{encode(key)}</Key><LastModified>{shown_time(one.modified)}</LastModified>"
            f"<ETag>{escape(one.etag)}</ETag><Size>{len(one.data)}</Size></Contents>"
        )
    inner += "".join(f"<CommonPrefixes><Prefix>{encode(one)}</Prefix></CommonPrefixes>" for one in folders)
    return Answer(body=xml("ListBucketResult", inner))


def list_uploads(bucket: Bucket, request: Request) -> Answer:
    inner = "<IsTruncated>false</IsTruncated>"
    for upload, (key, begun, _, _) in bucket.uploads.items():
        if key.startswith(request.query.get("prefix", "")):
            inner += (
                f"<Upload><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
                f"<Initiated>{shown_time(begun)}</Initiated></Upload>"
            )
    return Answer(body=xml("ListMultipartUploadsResult", inner))


def create_upload(bucket: Bucket, request: Request) -> Answer:
    upload = os.urandom(8).hex()
    bucket.uploads[upload] = request.key, time.time(), request.headers, {}
    return Answer(body=xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>"))


def upload_of(bucket: Bucket, request: Request) -> tuple[str, float, dict[str, str], dict[int, Stored]]:
    found = bucket.uploads.get(request.query["uploadId"])
    if found is None:
        raise RefusedError(404, "NoSuchUpload")
    return found


def upload_part(bucket: Bucket, request: Request) -> Answer:
    part = upload_of(bucket, request)[3][int(request.query["partNumber"])] = stored(request.body, {})
    return Answer(headers={"ETag": part.etag})


def complete_upload(bucket: Bucket, request: Request) -> Answer:
    _, _, headers, parts = upload_of(bucket, request)
    bucket.check_new(request)
    tree = ElementTree.fromstring(request.body)
    numbers = [int(one.text or 0) for one in tree.iter() if one.tag.endswith("PartNumber")]
    if not set(numbers) <= set(parts):
        raise RefusedError(400, "InvalidPart")
    chosen = [parts[number] for number in numbers]
    digest = hashlib.md5(b"".join(bytes.fromhex(part.etag.strip('"')) for part in chosen)).hexdigest()
    one = stored(b"".join(part.data for part in chosen), headers, f'"{digest}-{len(chosen)}"')
    bucket.put(request.key, one)
    del bucket.uploads[request.query["uploadId"]]
    return Answer(body=xml("CompleteMultipartUploadResult", f"<ETag>{escape(one.etag)}</ETag>"))


def abort_upload(bucket: Bucket, request: Request) -> Answer:
    upload_of(bucket, request)
    del bucket.uploads[request.query["uploadId"]]
    return Answer(204)


HANDLERS: dict[str, Callable[[Bucket, Request], Answer]] = {
    "ListBuckets": list_buckets,
    "CreateBucket": nothing,
    "HeadBucket": nothing,
    "DeleteBucket": nothing,
    "DeleteObjects": delete_objects,
    "ListObjectsV2": list_objects,
    "ListMultipartUploads": list_uploads,
    "GetObject": get_object,
    "HeadObject": get_object,
    "PutObject": put_object,
    "DeleteObject": delete_object,
    "CreateMultipartUpload": create_upload,
    "UploadPart": upload_part,
    "CompleteMultipartUpload": complete_upload,
    "AbortMultipartUpload": abort_upload,
}


class Server:
    """Speaks HTTP, slowly, and writes the log."""

    def __init__(self) -> None:
        self.operations = Operations()
        self.latency = 0.0
        self.rate: float | None = None
        self.faults: list[dict[str, Any]] = []
        self.rows: list[list[Any]] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self.serve_one(reader, writer):
                pass
        writer.close()

    async def serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line = await reader.readline()
        if not line:
            return False
        method, target, _ = line.decode("latin-1").split(" ")
        headers = {}
        while (header := (await reader.readline()).decode("latin-1").rstrip("\r\n")) != "":
            name, _, value = header.partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if target.startswith(CONTROL):
            answer = self.control(target[len(CONTROL) :], await self.taken(reader, headers, None))
            await self.send(writer, method, answer, None, None)
            return True
        url = urlsplit(target)
        bucket, _, key = unquote(url.path[1:]).partition("/")
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        row: list[Any] = [
            "",
            bucket,
            key,
            range_of(headers, None),
            headers.get("if-match"),
            0,
            0,
            time.monotonic(),
            None,
        ]
        request = Request(method, bucket, key, query, headers, b"")
        row[0] = name = self.operations.name_of(request)
        self.rows.append(row)
        body = decoded(await self.taken(reader, headers, self.rate), headers)
        await asyncio.sleep(max(0.0, row[7] + self.latency - time.monotonic()) if not body else self.latency)
        fault = self.fault(name)
        try:
            if fault:
                raise RefusedError(fault, {503: "SlowDown", 500: "InternalError"}.get(fault, "AccessDenied"))
            answer = self.operations.run(name, request._replace(body=body))
        except RefusedError as refused:
            answer = refused.answer
        row[5], row[6] = answer.status, len(body) or (0 if method == "HEAD" else len(answer.body))
        try:
            whole = await self.send(writer, method, answer, self.rate, fault)
        finally:
            row[8] = time.monotonic()
        return whole

    async def taken(self, reader: asyncio.StreamReader, headers: dict[str, str], rate: float | None) -> bytes:
        left = int(headers.get("content-length") or 0)
        parts, begun, done = [], time.monotonic(), 0
        while left:
            part = await reader.read(min(left, int(rate * TICK_SECONDS) + 1 if rate else 1 << 20))
            if not part:
                raise asyncio.IncompleteReadError(b"", left)
            parts.append(part)
            left -= len(part)
            done += len(part)
            if rate:
                await asyncio.sleep(max(0.0, begun + done / rate - time.monotonic()))
        return b"".join(parts)

    async def send(
        self, writer: asyncio.StreamWriter, method: str, answer: Answer, rate: float | None, fault: int | None
    ) -> bool:
        """Send an answer. False if it was cut, so that the connection ends."""
        body = memoryview(answer.body)
        lines = [f"HTTP/1.1 {answer.status} -", f"Content-Length: {len(body)}", "x-amz-request-id: 0"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        body = body[: 0 if method == "HEAD" else len(body) // 2 if fault == 0 else len(body)]
        begun, step = time.monotonic(), int(rate * TICK_SECONDS) + 1 if rate else 1 << 20
        for at in range(0, len(body), step):
            if rate:
                await asyncio.sleep(max(0.0, begun + (at + step) / rate - time.monotonic()))
            writer.write(body[at : at + step])
            await writer.drain()
        await writer.drain()
        return fault != 0

    def fault(self, name: str) -> int | None:
        """The status that a request of this operation fails with, 0: it is cut, None: it does not."""
        for fault in self.faults:
            if fault["operation"] == name:
                if fault["after"]:
                    fault["after"] -= 1
                    continue
                fault["times"] -= 1
                if not fault["times"]:
                    self.faults.remove(fault)
                return int(fault["status"])
        return None

    def control(self, what: str, body: bytes) -> Answer:
        if what.startswith("put/"):
            bucket, _, key = unquote(what[4:]).partition("/")
            self.operations.bucket(bucket).put(key, stored(body, {}))
            return Answer()
        said = json.loads(body)
        if what == "set":
            self.latency, self.rate = said["latency"], said["rate"]
        elif what == "fail":
            self.faults.append(said)
        elif what == "many":
            one = stored(base64.b64decode(said["data"]), {})
            for key in said["keys"]:
                self.operations.bucket(said["bucket"]).put(key, one)
        elif what == "log":
            rows, self.rows = self.rows, []
            return Answer(body=json.dumps(rows).encode())
        return Answer()


def decoded(body: bytes, headers: dict[str, str]) -> bytes:
    """A body without the chunks in which some clients sign it."""
    if not headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
        return body
    parts: list[bytes] = []
    at = 0
    while True:
        line = body.index(b"\r\n", at)
        size = int(body[at:line].partition(b";")[0], 16)
        if not size:
            return b"".join(parts)
        parts.append(body[line + 2 : line + 2 + size])
        at = line + 2 + size + 2


async def main() -> None:
    server = await asyncio.start_server(Server().connected, "127.0.0.1", 0, limit=1 << 20, backlog=512)
    print(f"READY http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
