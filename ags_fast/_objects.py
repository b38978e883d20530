"""The door to what is not a local folder: S3 over s3fs, and other file systems of fsspec.

An object store has no temporary names: an upload goes to its final key and is not there until it is completed. fsspec's
own files complete it whenever they are closed, by an exception and by the garbage collector too, so S3 is written and
read here by its requests.
"""

from __future__ import annotations

import asyncio
import datetime
import errno
import io
import os
import sys
import threading
import time
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from ags_fast.errors import FormatError, PolicyError
from ags_fast.fs import NO_LOCK_SECONDS, Entry, NewObject, temporary_name, temporary_tag

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from concurrent.futures import Future
    from typing import Self

    from ags_fast.fs import _Entries, _LeftOut, _ReadOnce

    _Paths = list[str]  # in the classes here, list is a method

__all__ = ["door"]

CONNECTIONS = 16  # that are kept, for stores with the same options
AHEAD_NBYTES = 16 << 20  # the most that is read ahead of who reads on and on
PART_NBYTES = 8 << 20  # of an upload; doubled after every 1000 parts, of which S3 takes 10,000 of up to 5 GiB
FIXED_PART_NBYTES = 64 << 20  # where all parts must have one size
PARTS = 10_000
PAGE = 1000  # objects of a listing
PARTS_IN_FLIGHT = 4
SETTLE_SECONDS = 10.0  # that an upload that is given up waits for parts on their way
ATTEMPTS = 5
PAUSE_SECONDS = 0.1  # after the first of them, doubled each time
WRITER = "ags-writer"  # metadata of an object: a random name of who has written it


def door(url: str, options: Mapping[str, Any]) -> _Objects:
    """What `ags_fast.fs.Store` goes through for a URL."""
    scheme = url.partition(":")[0]
    if "::" in url:
        return _Other(url, options)
    return {"s3": _S3, "s3a": _S3, "memory": _Memory}.get(scheme, _Other)(url, options)


class _Objects:
    """A folder of a file system of fsspec. Each process has a connection of its own."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url = url
        self.options = options
        self._connection: tuple[int, Any, str] | None = None

    def connect(self) -> tuple[Any, str]:
        """The file system, and where in it the folder is."""
        if self._connection is None or self._connection[0] != os.getpid():
            self._connection = (os.getpid(), *_connect(self.url, self.options))
        return self._connection[1:]

    def at(self, path: str) -> str:
        return f"{self.connect()[1]}/{path}"

    def list(self, prefix: str) -> Iterator[Entry]:
        fs, root = self.connect()
        folder = prefix.rpartition("/")[0]
        try:
            found = fs.find(f"{root}/{folder}" if folder else root, detail=True)
        except FileNotFoundError:
            return
        skip = len(fs._strip_protocol(root)) + 1
        for name, info in found.items():
            path = name[skip:]
            if path.startswith(prefix) and info["type"] == "file" and temporary_tag(path.rpartition("/")[2]) is None:
                yield self._entry(path, info if info["size"] is not None else fs.info(name))

    def list_all(self) -> tuple[_Entries, _LeftOut]:
        return sorted(self.list(""), key=lambda entry: entry.path), []

    def stat(self, path: str) -> Entry | None:
        try:
            info = self.connect()[0].info(self.at(path))
        except FileNotFoundError:
            return None
        return self._entry(path, info) if info["type"] == "file" else None

    def _entry(self, path: str, info: Mapping[str, Any]) -> Entry:
        if info["size"] is None:
            raise self._refusal(f"say how many bytes {path!r} has")
        return _entry(path, info)

    def read(self, path: str, limit: int) -> bytes:
        data = self._read(path, limit + 1)
        if len(data) > limit:
            raise FormatError(f"{path} has more than the {limit} bytes that such a file may have")
        return data

    def _read(self, path: str, limit: int) -> bytes:
        data: bytes = self.connect()[0].cat_file(self.at(path), start=0, end=limit)
        return data

    def source(self, path: str, entry: Entry | None) -> _Reader:
        entry = entry or self.stat(path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.url}/{path}")
        stamp = entry.stamp
        return _Reader(lambda begin, end: self._fetch(path, stamp, begin, end), entry.size)

    def _fetch(self, path: str, stamp: str, begin: int, end: int) -> bytes:
        data: bytes = self.connect()[0].cat_file(self.at(path), start=begin, end=end)
        return data

    def create(self, path: str, data: bytes) -> None:
        raise self._refusal("create a file only if it is not there")

    def new(
        self,
        path: str,
        *,
        tag: str,
        exclusive: bool,
        private: bool,
        fsync: bool,
        mode: int | None = None,
        mtime_ns: int | None = None,
    ) -> NewObject:
        raise NotImplementedError

    def exists(self) -> bool:
        return next(self.list(""), None) is not None

    def check_writable(self) -> None:
        """Nothing: it can."""

    def open(self, path: str) -> _ReadOnce:
        entry = self.stat(path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.url}/{path}")
        return _Sequential(self, entry)

    def hold(self, path: str) -> Any:
        return None

    def held(self, path: str) -> bool | None:
        return None

    def remove_folder(self, path: str) -> None:
        """Nothing: there are none."""

    def delete(self, path: str, read: Entry | None) -> None:
        try:
            self.connect()[0].rm_file(self.at(path))
        except FileNotFoundError:
            pass
        except NotImplementedError:
            raise self._refusal("delete files") from None

    def sweep(self, tag: str | None, older_than: float | None, paths: Collection[str], below: str) -> _Paths:
        return []

    def sync_folders(self, paths: Iterable[str]) -> None:
        """Nothing: what is published is on the disk."""

    def _refusal(self, what: str) -> PolicyError:
        scheme = self.url.partition(":")[0]
        return PolicyError(f"{scheme} file systems cannot {what}: use a local folder or S3 for this")


# Of stores with the same options, for one of S3 takes 0.1 s to make. A child of a fork leaves its parent's alone.
_connections: dict[tuple[int, str, str], tuple[Any, str]] = {}


def _connect(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    scheme = url.partition(":")[0]
    of_s3 = scheme in ("s3", "s3a") and "::" not in url
    try:
        import fsspec
        from fsspec.utils import tokenize

        if of_s3:
            import s3fs

            if int(s3fs.__version__.partition(".")[0]) < 2026:
                raise ImportError(f"s3fs {s3fs.__version__} is too old")
        key = (os.getpid(), "s3" if of_s3 else url, tokenize(options))
        found = _connections.get(key)
        if found is None:
            # A listing that is remembered would be wrong, and an instance that is shared somebody else's.
            own = {"use_listings_cache": False, "skip_instance_cache": True}
            made = fsspec.url_to_fs(url, **{**options, **own})
            mine = [other for other in list(_connections) if other[0] == key[0]]
            for old in mine[: max(0, len(mine) + 1 - CONNECTIONS)]:
                _connections.pop(old, None)
            found = _connections.setdefault(key, made)
        fs, root = found
        if of_s3:
            root = fs._strip_protocol(url)
    except ImportError as error:
        needed = "ags_fast[s3]" if scheme in ("s3", "s3a") else "fsspec, and its package for such URLs"
        raise ImportError(f"{scheme} URLs need {needed}: {error}") from error
    return fs, root.rstrip("/")


def _exists(path: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


def _entry(path: str, info: Mapping[str, Any]) -> Entry:
    changed = 0.0
    for name in ("LastModified", "last_modified", "mtime", "modified", "updated", "created"):
        value = info.get(name)
        if isinstance(value, str):
            try:
                value = datetime.datetime.fromisoformat(value)
            except ValueError:
                continue
        if isinstance(value, datetime.datetime):
            value = value.timestamp()
        if isinstance(value, (int, float)):
            changed = float(value)
            break
    stamp = info.get("ETag") or info.get("etag")
    return Entry(path, info["size"], str(stamp) if stamp else repr(changed), changed)


class _Sequential:
    """An object that is read once, in large requests."""

    def __init__(self, folder: _Objects, entry: Entry) -> None:
        self.size, self.stamp = entry.size, entry.stamp
        self._folder = folder
        self._entry = entry
        self._file = folder.source(entry.path, entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def readinto(self, buffer: Any, /) -> int:
        view, filled = memoryview(buffer), 0
        while filled < len(view) and (got := self._file.readinto(view[filled:])):
            filled += got
        return filled

    def changed(self) -> bool:
        return self._folder.stat(self._entry.path) != self._entry


class _Reader(io.RawIOBase):
    """A seekable file over requests of ranges.

    A read that is not the continuation of two others requests just its own bytes. One that is requests more of them,
    no more than were read without a gap before it.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._position = 0
        self._ahead: bytes = b""  # the bytes up to _ahead_end
        self._ahead_end = 0
        self._run_end = -1  # where the last read ended
        self._run = 0  # bytes read without a gap until there
        self._continued = 0  # reads that have continued that run

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if position < 0:
            raise ValueError(f"negative position {position}")
        self._position = position
        return position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return self.read()

    def read(self, size: int | None = -1, /) -> bytes:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        begin = min(self._position, self._size)
        end = self._size if size is None or size < 0 else min(begin + size, self._size)
        if begin == end:
            return b""
        if begin == self._run_end:
            self._continued += 1
        else:
            self._run = self._continued = 0
        data = b""
        ahead_begin = self._ahead_end - len(self._ahead)
        if ahead_begin <= begin < self._ahead_end:
            data = self._ahead[begin - ahead_begin : end - ahead_begin]
        if len(data) < end - begin:
            ahead = min(self._run, AHEAD_NBYTES) if self._continued >= 2 else 0
            more_begin, more_end = begin + len(data), min(end + ahead, self._size)
            more = self._fetch(more_begin, more_end)
            if len(more) > more_end - more_begin:
                raise OSError("the store returned more bytes than it was asked for")
            if more_end > end:
                self._ahead, self._ahead_end = more, more_begin + len(more)
                more = more[: end - more_begin]
            else:
                self._ahead, self._ahead_end = b"", 0
            data = data + more if data else more
        self._position = self._run_end = begin + len(data)
        self._run += len(data)
        return data

    def close(self) -> None:
        self._ahead = b""
        super().close()


# ---------------------------------------------------------------------------------------------------------- S3


class _S3(_Objects):
    """A folder of a bucket."""

    def key(self, path: str) -> dict[str, str]:
        """Bucket and Key of a path, or of a prefix, as the requests want them."""
        fs, root = self.connect()
        bucket, prefix, _ = fs.split_path(root)
        return {"Bucket": bucket, "Key": f"{prefix}/{path}" if prefix else path}

    def call(self, request: str, **arguments: Any) -> Any:
        """Make a request of S3, by its name in botocore, and wait for the answer. Raises OSError."""
        return result_of(self.submit(request, **arguments))

    def submit(self, request: str, **arguments: Any) -> Future[Any]:
        """Let the thread of fsspec make a request."""
        fs, _ = self.connect()
        coroutine = _send(fs, request, **arguments) if "Body" in arguments else fs._call_s3(request, **arguments)
        return asyncio.run_coroutine_threadsafe(coroutine, fs.loop)

    def list(self, prefix: str) -> Iterator[Entry]:
        where = self.key(prefix)
        skip = len(where["Key"]) - len(prefix)
        query: dict[str, Any] = {"Bucket": where["Bucket"], "Prefix": where["Key"], "MaxKeys": PAGE}
        page = self.submit("list_objects_v2", **query)
        while True:
            answer = result_of(page)
            if answer.get("IsTruncated"):  # the next one comes while somebody looks at this one
                page = self.submit("list_objects_v2", **query, ContinuationToken=answer["NextContinuationToken"])
            for found in answer.get("Contents", ()):
                path = found["Key"][skip:]
                if not path.endswith("/"):  # which is how some mark a folder
                    yield Entry(path, found["Size"], found["ETag"], found["LastModified"].timestamp())
            if not answer.get("IsTruncated"):
                return

    def stat(self, path: str) -> Entry | None:
        try:
            found = self.call("head_object", **self.key(path))
        except FileNotFoundError:
            return None
        return Entry(path, found["ContentLength"], found["ETag"], found["LastModified"].timestamp())

    def exists(self) -> bool:
        where = self.key("")
        answer = self.call("list_objects_v2", Bucket=where["Bucket"], Prefix=where["Key"], MaxKeys=1)
        return bool(answer.get("Contents"))

    def _read(self, path: str, limit: int) -> bytes:
        return self._get(path, "", 0, limit)

    def _fetch(self, path: str, stamp: str, begin: int, end: int) -> bytes:
        return self._get(path, stamp, begin, end)

    def _get(self, path: str, stamp: str, begin: int, end: int) -> bytes:
        fs, _ = self.connect()
        coroutine = self._get_range(fs, path, stamp, begin, end)
        data: bytes = result_of(asyncio.run_coroutine_threadsafe(coroutine, fs.loop))
        return data

    async def _get_range(self, fs: Any, path: str, stamp: str, begin: int, end: int) -> bytes:
        from s3fs.core import S3_RETRYABLE_ERRORS

        arguments = {**self.key(path), "Range": f"bytes={begin}-{end - 1}"}
        if stamp and not fs.local_expiry_check:
            arguments["IfMatch"] = stamp
        attempt = 1
        while True:
            try:
                answer = await fs._call_s3("get_object", **arguments)
                if stamp and answer["ETag"] != stamp:
                    raise _replaced(path)
                async with answer["Body"] as body:
                    data: bytes = await body.read()
                    return data
            except S3_RETRYABLE_ERRORS:
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(PAUSE_SECONDS * 2**attempt)
                attempt += 1
            except OSError as error:
                code = _code(error)
                if code in ("InvalidRange", "416"):
                    return b""
                if code in ("PreconditionFailed", "412"):
                    raise _replaced(path) from error
                raise

    def create(self, path: str, data: bytes) -> None:
        with _Upload(self, path, exclusive=True) as new:
            new.write(data)
            new.publish()

    def new(
        self,
        path: str,
        *,
        tag: str,
        exclusive: bool,
        private: bool,
        fsync: bool,
        mode: int | None = None,
        mtime_ns: int | None = None,
    ) -> _Upload:
        if exclusive and self.stat(path) is not None:  # before all of it is sent in vain
            raise _exists(f"{self.url}/{path}")
        return _Upload(self, path, exclusive)

    def delete(self, path: str, read: Entry | None) -> None:
        self.call("delete_object", **self.key(path))

    def sweep(self, tag: str | None, older_than: float | None, paths: Collection[str], below: str) -> _Paths:
        where = self.key("")
        older_than = older_than or (NO_LOCK_SECONDS if tag is None and older_than is None else 0)
        swept: _Paths = []
        markers: dict[str, str] = {}
        while True:
            page = self.call("list_multipart_uploads", Bucket=where["Bucket"], Prefix=where["Key"], **markers)
            for upload in page.get("Uploads", ()):
                path = upload["Key"].removeprefix(where["Key"])
                if path == upload["Key"] and where["Key"]:  # some servers list all
                    continue
                if (tag is not None and path not in paths) or not path.startswith(below):
                    continue
                if older_than > 0 and time.time() - upload["Initiated"].timestamp() < older_than:
                    continue
                try:
                    self.call(
                        "abort_multipart_upload",
                        Bucket=where["Bucket"],
                        Key=upload["Key"],
                        UploadId=upload["UploadId"],
                    )
                    swept.append(upload["Key"][len(where["Key"]) :])
                except FileNotFoundError:  # completed or aborted meanwhile
                    pass
            if not page.get("IsTruncated"):
                return swept
            markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


async def _send(fs: Any, request: str, Body: bytes, **arguments: Any) -> Any:  # noqa: N803
    """A request with a body. s3fs would repeat it with the same file, which has been read to its end by then."""
    from botocore.exceptions import ClientError
    from s3fs.core import S3_RETRYABLE_ERRORS
    from s3fs.errors import translate_boto_error

    attempt = 1
    while True:
        await fs.set_session()
        method = getattr(await fs.get_s3(arguments["Bucket"]), request)
        try:
            return await method(**fs._get_s3_method_kwargs(method, Body=io.BytesIO(Body), **arguments))
        except ClientError as error:
            raise translate_boto_error(error) from error
        except S3_RETRYABLE_ERRORS:
            if attempt == ATTEMPTS:
                raise
            await asyncio.sleep(PAUSE_SECONDS * 2**attempt)
            attempt += 1


def result_of(answer: Future[Any]) -> Any:
    """Wait for an answer. What botocore has to say of the network, of credentials and so on is an OSError."""
    from botocore.exceptions import BotoCoreError

    try:
        return answer.result()
    except BotoCoreError as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


def _code(error: BaseException) -> str:
    """S3's name for an error that s3fs has translated."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _replaced(path: str) -> OSError:
    return OSError(errno.ESTALE, "the object was replaced while it was read", path)


class _Upload(NewObject):
    """An object of S3 in the making: one request if it is small, else parts on their way while it is written."""

    def __init__(self, bucket: _S3, path: str, exclusive: bool) -> None:
        super().__init__()
        self.path = f"{bucket.url}/{path}"
        self._bucket = bucket
        self._key = bucket.key(path)
        self._exclusive = exclusive
        self._upload: dict[str, str] = {}  # UploadId, once there is one
        self._parts: list[Future[Any]] = []
        self._buffer = io.BytesIO()
        self._filled = 0
        fs, _ = bucket.connect()
        self._fixed = bool(fs.fixed_upload_size)
        self._writer = os.urandom(16).hex()
        self._marked = {"Metadata": {**fs.s3_additional_kwargs.get("Metadata", {}), WRITER: self._writer}}

    def __del__(self) -> None:
        if not getattr(self, "_done", True) and self._owner == os.getpid() and not sys.is_finalizing():
            self._done = True
            if self._upload:  # not waited for: this may be the thread that would do it
                for part in self._parts:
                    part.cancel()
                self._bucket.submit("abort_multipart_upload", **self._key, **self._upload)

    def _part_size(self) -> int:
        return FIXED_PART_NBYTES if self._fixed else PART_NBYTES << len(self._parts) // 1000

    def _write(self, view: memoryview) -> None:
        while view:
            taken = view[: self._part_size() - self._filled]
            self._filled += self._buffer.write(taken)
            view = view[len(taken) :]
            if self._filled == self._part_size():
                self._send()

    def _send(self) -> None:
        if not self._upload:
            answer = self._bucket.call("create_multipart_upload", **self._key, **self._marked)
            self._upload = {"UploadId": answer["UploadId"]}
        if len(self._parts) == PARTS:
            raise OSError(errno.EFBIG, f"an object has at most {PARTS} parts", self.path)
        if len(self._parts) >= PARTS_IN_FLIGHT:
            result_of(self._parts[-PARTS_IN_FLIGHT])
        part = {"PartNumber": len(self._parts) + 1, "Body": self._take()}
        self._parts.append(self._bucket.submit("upload_part", **self._key, **self._upload, **part))

    def _take(self) -> bytes:
        buffer, self._buffer, self._filled = self._buffer, io.BytesIO(), 0
        return buffer.getvalue()  # no copy

    def _publish(self) -> None:
        if not self._upload:
            self._commit("put_object", Body=self._take(), **(self._marked if self._exclusive else {}))
            return
        if self._filled:
            self._send()
        parts = [{"PartNumber": i, "ETag": result_of(part)["ETag"]} for i, part in enumerate(self._parts, 1)]
        self._commit("complete_multipart_upload", MultipartUpload={"Parts": parts}, **self._upload)

    def _commit(self, request: str, **arguments: Any) -> None:
        if self._exclusive:
            arguments["IfNoneMatch"] = "*"
        try:
            self._bucket.call(request, **self._key, **arguments)
        except OSError as error:
            refused = isinstance(error, FileExistsError) or _code(error) in ("PreconditionFailed", "412")
            # s3fs repeats a request whose answer was lost; the second one is then refused because of the first.
            if (refused or isinstance(error, FileNotFoundError)) and self._is_ours():
                return
            if refused:
                raise _exists(self.path) from error
            raise

    def _is_ours(self) -> bool:
        try:
            found = self._bucket.call("head_object", **self._key)
        except OSError:
            return False
        return bool(found.get("Metadata", {}).get(WRITER) == self._writer)

    def _discard(self) -> None:
        self._take()
        if not self._upload:
            return
        # A part that is still on its way when the upload is aborted may make the server keep it.
        wait(self._parts, timeout=SETTLE_SECONDS)
        for part in self._parts:
            part.cancel()
        try:
            self._bucket.call("abort_multipart_upload", **self._key, **self._upload)
        except OSError:  # what is left is for `sweep`
            pass


# ---------------------------------------------------------------------------------------------------------- others

_memory_lock = threading.Lock()


class _Memory(_Objects):
    """A folder of fsspec's memory, of this process."""

    def create(self, path: str, data: bytes) -> None:
        self._pipe(path, data, exclusive=True)

    def _pipe(self, path: str, data: bytes, exclusive: bool) -> None:
        fs, _ = self.connect()
        with _memory_lock:  # it looks first and writes then
            if exclusive and fs.exists(self.at(path)):
                raise _exists(f"{self.url}/{path}")
            fs.pipe_file(self.at(path), data)

    def new(
        self,
        path: str,
        *,
        tag: str,
        exclusive: bool,
        private: bool,
        fsync: bool,
        mode: int | None = None,
        mtime_ns: int | None = None,
    ) -> NewObject:
        if exclusive and self.stat(path) is not None:
            raise _exists(f"{self.url}/{path}")
        return _Buffered(self, path, exclusive)


class _Buffered(NewObject):
    """A file of memory in the making."""

    def __init__(self, folder: _Memory, path: str, exclusive: bool) -> None:
        super().__init__()
        self.path = f"{folder.url}/{path}"
        self._folder = folder
        self._name = path
        self._exclusive = exclusive
        self._buffer = bytearray()

    def _write(self, view: memoryview) -> None:
        self._buffer += view

    def _publish(self) -> None:
        self._folder._pipe(self._name, bytes(self._buffer), self._exclusive)

    def _discard(self) -> None:
        self._buffer = bytearray()


class _Other(_Objects):
    """A folder of any other file system of fsspec: it must rename files, or discard an upload."""

    def check_writable(self) -> None:
        if not _renames(self.connect()[0]):
            self.new("_ags/writable", tag="", exclusive=False, private=False, fsync=False).discard()

    def new(
        self,
        path: str,
        *,
        tag: str,
        exclusive: bool,
        private: bool,
        fsync: bool,
        mode: int | None = None,
        mtime_ns: int | None = None,
    ) -> NewObject:
        if exclusive:
            raise self._refusal("create a file only if it is not there")
        fs, _ = self.connect()
        try:
            if _renames(fs):
                folder, _, name = self.at(path).rpartition("/")
                fs.makedirs(folder, exist_ok=True)
                return _Renamed(fs, f"{folder}/{temporary_name(name, tag)}", self.at(path))
            return _Discardable(fs, self.at(path), self)
        except NotImplementedError:
            raise self._refusal("write files") from None

    def sweep(self, tag: str | None, older_than: float | None, paths: Collection[str], below: str) -> _Paths:
        fs, root = self.connect()
        older_than = older_than or (NO_LOCK_SECONDS if tag is None and older_than is None else 0)
        swept: _Paths = []
        try:
            found = fs.find(root, detail=True)
        except FileNotFoundError:
            return []
        for name, info in found.items():
            of = temporary_tag(name.rpartition("/")[2])
            if of is None or tag not in (None, of) or not name[len(root) + 1 :].startswith(below):
                continue
            if older_than > 0 and time.time() - _entry(name, info).modified < older_than:
                continue
            try:
                fs.rm_file(name)
                swept.append(name[len(fs._strip_protocol(root)) + 1 :])
            except FileNotFoundError:
                pass
        return swept


def _renames(fs: Any) -> bool:
    """Whether a file gets another name in one step, not by a copy, which others would see grow."""
    from fsspec import AbstractFileSystem

    return type(fs).mv is not AbstractFileSystem.mv


class _Renamed(NewObject):
    """A file in the making with a temporary name."""

    def __init__(self, fs: Any, temporary: str, path: str) -> None:
        super().__init__()
        self.path = path
        self._fs = fs
        self._temporary = temporary
        self._file = fs.open(temporary, "wb")

    def _write(self, view: memoryview) -> None:
        _write_all(self._file, view)

    def _publish(self) -> None:
        self._file.close()
        self._fs.mv(self._temporary, self.path)

    def _discard(self) -> None:
        try:
            self._file.close()
        finally:
            try:
                self._fs.rm_file(self._temporary)
            except FileNotFoundError:
                pass


class _Discardable(NewObject):
    """A file of fsspec that can be closed without completing it."""

    def __init__(self, fs: Any, path: str, folder: _Other) -> None:
        from fsspec.spec import AbstractBufferedFile

        super().__init__()
        self.path = path
        self._file: Any = None
        file = fs.open(path, "wb", autocommit=False)
        if not isinstance(file, AbstractBufferedFile) or any(
            getattr(type(file), name) is getattr(AbstractBufferedFile, name) for name in ("commit", "discard")
        ):
            _forget(file)
            raise folder._refusal("rename files or discard an upload")
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
