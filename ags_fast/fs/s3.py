"""A folder of an S3 bucket.

fsspec's own files complete an upload whenever they are closed, by an exception and by the garbage collector too. So S3
is written and read here by its requests.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import sys
import time
from bisect import bisect_right
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from ags_fast.fs.base import Entry, NewOptions
from ags_fast.fs.new import NewObject
from ags_fast.fs.ranges import HEAD_NBYTES
from ags_fast.fs.remote import Looked, RemoteStore, file_exists, replaced

if TYPE_CHECKING:
    import builtins  # in the class S3Store, list is a method
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from concurrent.futures import Future

__all__ = ["S3Store", "result_of"]

PART_NBYTES = 8 << 20  # of an upload; doubled after every 1000 parts, of which S3 takes 10,000 of up to 5 GiB
FIXED_PART_NBYTES = 64 << 20  # where all parts must have one size
PARTS = 10_000
PAGE = 1000  # objects of a listing
WALKS = 16  # through a listing, at once
SHARE = 8  # paths that a walk looks up at least
PARTS_IN_FLIGHT = 4
SETTLE_SECONDS = 10.0  # that an upload that is given up waits for parts on their way
ATTEMPTS = 5
PAUSE_SECONDS = 0.1  # after the first of them, doubled each time
WRITER = "ags-writer"  # metadata of an object: a random name of who has written it


class S3Store(RemoteStore):
    """A folder of a bucket."""

    stamped = True  # each GET has If-Match

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
        coroutine = (_send if "Body" in arguments else _call)(fs, request, **arguments)
        return asyncio.run_coroutine_threadsafe(coroutine, fs.loop)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See `Store.list`."""
        where = self.key(prefix)
        skip = len(where["Key"]) - len(prefix)
        query: dict[str, Any] = {"Bucket": where["Bucket"], "Prefix": where["Key"], "MaxKeys": PAGE}
        page = self.submit("list_objects_v2", **query)
        while True:
            answer = result_of(page)
            if answer.get("IsTruncated"):  # request the next page while the caller works on this one
                page = self.submit("list_objects_v2", **query, ContinuationToken=answer["NextContinuationToken"])
            for found in answer.get("Contents", ()):
                if not found["Key"].endswith("/"):  # which is how some mark a folder
                    yield _entry(skip, found)
            if not answer.get("IsTruncated"):
                return

    def page(self, folder: str, after: str, count: int) -> tuple[builtins.list[Entry], bool]:
        """See `RemoteStore.page`. One request."""
        where = self.key(folder)
        start = {"StartAfter": where["Key"] + after} if after else {}
        query = {"Bucket": where["Bucket"], "Prefix": where["Key"], "Delimiter": "/", "MaxKeys": count}
        answer = self.call("list_objects_v2", **query, **start)
        skip = len(where["Key"]) - len(folder)
        found = [_entry(skip, one) for one in answer.get("Contents", ()) if not one["Key"].endswith("/")]
        return found, bool(answer.get("IsTruncated"))

    def existing(self, paths: Iterable[str]) -> set[str]:
        """See `Store.existing`. One request if they are less than a page apart, else at most one for each."""
        fs, _ = self.connect()
        wanted = sorted(set(paths))
        if not wanted:
            return set()
        found: set[str] = result_of(asyncio.run_coroutine_threadsafe(self._existing(fs, wanted), fs.loop))
        return found

    async def _existing(self, fs: Any, wanted: builtins.list[str]) -> set[str]:
        """Which of these sorted paths are there. The first page shows whether there is more to be listed."""
        found, left = await self._walk(fs, wanted, 1)
        share = max(SHARE, -(-len(left) // WALKS))
        walks = [self._walk(fs, left[i : i + share]) for i in range(0, len(left), share)]
        return found.union(*(more for more, _ in await asyncio.gather(*walks)))

    async def _walk(
        self, fs: Any, wanted: builtins.list[str], pages: int | None = None
    ) -> tuple[set[str], builtins.list[str]]:
        """Look sorted paths up in pages of a listing. Returns those that are there, and those not reached."""
        where = self.key("")
        skip, found, looked_up, at, after = len(where["Key"]), set[str](), set(wanted), 0, ""
        while at < len(wanted) and pages != 0:
            after = max(after, where["Key"] + _before(wanted[at]))
            answer = await _call(
                fs, "list_objects_v2", Bucket=where["Bucket"], Prefix=where["Key"], MaxKeys=PAGE, StartAfter=after
            )
            keys = [one["Key"] for one in answer.get("Contents", ())]
            found |= looked_up.intersection(key[skip:] for key in keys)
            if not keys or not answer.get("IsTruncated"):
                return found, []
            after = keys[-1]
            at = bisect_right(wanted, after[skip:])
            pages = None if pages is None else pages - 1
        return found, wanted[at:]

    def _stat(self, path: str) -> Entry | None:
        try:
            found = self.call("head_object", **self.key(path))
        except FileNotFoundError:
            return None
        return Entry(path, found["ContentLength"], found["ETag"], found["LastModified"].timestamp())

    def exists(self) -> bool:
        """See `Store.exists`."""
        where = self.key("")
        answer = self.call("list_objects_v2", Bucket=where["Bucket"], Prefix=where["Key"], MaxKeys=1)
        return bool(answer.get("Contents"))

    def _request_range(self, path: str, stamp: str | None, begin: int, end: int) -> Future[bytes]:
        fs, _ = self.connect()
        return asyncio.run_coroutine_threadsafe(self._get_range(fs, path, stamp, begin, end), fs.loop)

    async def _get_range(self, fs: Any, path: str, stamp: str | None, begin: int, end: int) -> bytes:
        found = await self._get(fs, path, stamp, f"bytes={begin}-{end - 1}")
        return b"" if found is None else found[1]

    def look(self, path: str, tail: bool = False) -> Looked:
        """See `RemoteStore.look`."""
        fs, _ = self.connect()
        span = f"bytes=-{HEAD_NBYTES}" if tail else f"bytes=0-{HEAD_NBYTES - 1}"
        found = asyncio.run_coroutine_threadsafe(self._get(fs, path, None, span), fs.loop).result()
        if found is None:  # it is empty, or the server does not know such a range
            return super().look(path, tail)
        answer, data = found
        size, modified = len(data), answer["LastModified"].timestamp()
        if "ContentRange" in answer:
            size = int(answer["ContentRange"].rpartition("/")[2])
        return Looked(Entry(path, size, answer["ETag"], modified), size - len(data) if tail else 0, data)

    def _read_if_unchanged(self, path: str, size: int, stamp: str | None) -> bytes | None:
        try:
            data = self._read_range(path, stamp, 0, size + 1)
        except OSError:
            return None
        return data if len(data) == size else None

    async def _get(self, fs: Any, path: str, stamp: str | None, span: str) -> tuple[Any, bytes] | None:
        """Get a range, and S3's answer. None if the object has no byte there."""
        from botocore.exceptions import BotoCoreError
        from s3fs.core import S3_RETRYABLE_ERRORS

        arguments = {**self.key(path), "Range": span}
        if stamp and not fs.local_expiry_check:
            arguments["IfMatch"] = stamp
        attempt = 1
        while True:
            try:
                answer = await _call(fs, "get_object", **arguments)
                if stamp and answer["ETag"] != stamp:
                    raise replaced(path)
                async with answer["Body"] as body:
                    return answer, await body.read()
            except S3_RETRYABLE_ERRORS as error:
                if attempt == ATTEMPTS:
                    if isinstance(error, BotoCoreError):
                        raise _as_os_error(error) from error
                    raise
                await asyncio.sleep(PAUSE_SECONDS * 2**attempt)
                attempt += 1
            except BotoCoreError as error:
                raise _as_os_error(error) from error
            except OSError as error:
                code = _code(error)
                if code in ("InvalidRange", "416"):
                    return None
                if code in ("PreconditionFailed", "412"):
                    raise replaced(path) from error
                raise

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
        with self.begin(path) as new:
            new.write(data)
            new.publish()

    def _begin(self, path: str, options: NewOptions) -> _Upload:
        if options.exclusive and self.stat(path) is not None:  # before all of the file is sent for nothing
            raise file_exists(self.full_path(path))
        return _Upload(self, path, options.exclusive)

    def _delete(self, path: str, read: Entry | None) -> None:
        self.call("delete_object", **self.key(path))

    def _sweep(
        self, tag: str | None, age: float, age_unlocked: float, paths: Collection[str], below: str
    ) -> builtins.list[str]:
        where = self.key("")
        swept = []
        markers: dict[str, str] = {}
        while True:
            page = self.call("list_multipart_uploads", Bucket=where["Bucket"], Prefix=where["Key"], **markers)
            for upload in page.get("Uploads", ()):
                path = upload["Key"].removeprefix(where["Key"])
                if path == upload["Key"] and where["Key"]:  # some servers list all
                    continue
                if (tag is not None and path not in paths) or not path.startswith(below):
                    continue
                if age_unlocked > 0 and time.time() - upload["Initiated"].timestamp() < age_unlocked:
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


def _before(path: str) -> str:
    """A text that sorts before a path, and after most others that do."""
    last = ord(path[-1]) - 1
    return path[:-1] + (f"{chr(last)}\U0010fffd" if last >= 0 and not 0xD800 <= last <= 0xDFFF else "")


async def _call(fs: Any, request: str, **arguments: Any) -> Any:
    """Make a request without a body. s3fs repeats it if that may help."""
    return await fs._call_s3(request, **arguments)  # noqa: SLF001 (s3fs has public names for files only)


async def _send(fs: Any, request: str, Body: bytes, **arguments: Any) -> Any:  # noqa: N803
    """Make a request with a body. s3fs would repeat it with the same file, which has been read to its end by then."""
    from botocore.exceptions import ClientError
    from s3fs.core import S3_RETRYABLE_ERRORS
    from s3fs.errors import translate_boto_error

    attempt = 1
    while True:
        await fs.set_session()
        method = getattr(await fs.get_s3(arguments["Bucket"]), request)
        try:
            given = fs._get_s3_method_kwargs(method, Body=io.BytesIO(Body), **arguments)  # noqa: SLF001 (as in _call)
            return await method(**given)
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
        raise _as_os_error(error) from error


def _as_os_error(error: Exception) -> OSError:
    return OSError(errno.EIO, f"{type(error).__name__}: {error}")


def _entry(skip: int, found: Mapping[str, Any]) -> Entry:
    """The entry of an object as a listing shows it. skip: characters of its key that are not of its path."""
    return Entry(found["Key"][skip:], found["Size"], found["ETag"], found["LastModified"].timestamp())


def _code(error: BaseException) -> str:
    """S3's name for an error that s3fs has translated."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


class _Upload(NewObject):
    """An object of S3 in the making: one request if it is small, else parts on their way while it is written."""

    def __init__(self, bucket: S3Store, path: str, exclusive: bool) -> None:
        super().__init__()
        self.path = bucket.full_path(path)
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
                raise file_exists(self.path) from error
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
