"""A folder of an S3 bucket.

fsspec's own files complete an upload whenever they are closed, by an exception and by the garbage collector too. So S3
is written and read here by its requests.
"""

from __future__ import annotations

import asyncio
import errno
import io
import time
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from ags_fast import telemetry
from ags_fast.fs.base import Entry
from ags_fast.fs.objects import PART_NBYTES, ObjectStore, Upload, span
from ags_fast.fs.remote import Looked, file_exists, replaced

if TYPE_CHECKING:
    import builtins  # in the class S3Store, list is a method
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from ags_fast.fs.base import LeftOut

__all__ = ["PART_NBYTES", "S3Store"]

FIXED_PART_NBYTES = 64 << 20  # where all parts must have one size
PARTS = 10_000  # of an object, of up to 5 GiB
PAGE = 1000  # objects of a listing
WALKS = 16  # through a listing, at once
SHARE = 8  # paths that a walk looks up at least
ATTEMPTS = 5
PAUSE_SECONDS = 0.1  # after the first of them, doubled each time
WRITER = "ags-writer"  # metadata of an object: `Upload.writer`


class S3Store(ObjectStore):
    """A folder of a bucket. The stamp of an object is its ETag, with which each GET has If-Match."""

    def key(self, path: str) -> dict[str, str]:
        """Bucket and Key of a path, or of a prefix, as the requests want them."""
        fs, root = self.connect()
        bucket, prefix, _ = fs.split_path(root)
        return {"Bucket": bucket, "Key": f"{prefix}/{path}" if prefix else path}

    def call(self, request: str, **arguments: Any) -> Any:
        """Make a request of S3, by its name in botocore, and wait for the answer. Raises OSError."""
        return self.submit(request, **arguments).result()

    def submit(self, request: str, **arguments: Any) -> Future[Any]:
        """Let the thread of fsspec make a request: see `call`."""
        return self.run(_ask(self.connect()[0], request, **arguments))

    def list(self, prefix: str = "", after: str = "", left_out: LeftOut | None = None) -> Iterator[Entry]:
        """See `Store.list`."""
        where = self.key(prefix)
        skip = len(where["Key"]) - len(prefix)
        query: dict[str, Any] = {"Bucket": where["Bucket"], "Prefix": where["Key"], "MaxKeys": PAGE}
        if after:
            query["StartAfter"] = self.key(after)["Key"]
        page = self.submit("list_objects_v2", **query)
        while True:
            answer = page.result()
            if answer.get("IsTruncated"):  # request the next page while the caller works on this one
                page = self.submit("list_objects_v2", **query, ContinuationToken=answer["NextContinuationToken"])
            for entry in (_entry(skip, found) for found in answer.get("Contents", ())):
                if self._is_file(entry, left_out):
                    yield entry
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
        found: set[str] = self.run(self._existing(fs, wanted)).result()
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
            answer = await _ask(
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

    async def found(self, path: str) -> Entry | None:
        """See `ObjectStore.found`."""
        try:
            found = await _ask(self.connect()[0], "head_object", **self.key(path))
        except FileNotFoundError:
            return None
        return Entry(path, found["ContentLength"], found["ETag"], found["LastModified"].timestamp())

    def exists(self) -> bool:
        """See `Store.exists`."""
        where = self.key("")
        answer = self.call("list_objects_v2", Bucket=where["Bucket"], Prefix=where["Key"], MaxKeys=1)
        return bool(answer.get("Contents"))

    async def get(self, path: str, stamp: str | None, begin: int, end: int) -> Looked | None:
        """See `ObjectStore.get`."""
        from botocore.exceptions import BotoCoreError
        from s3fs.core import S3_RETRYABLE_ERRORS

        fs, _ = self.connect()
        arguments = {**self.key(path), "Range": span(begin, end)}
        if stamp and not fs.local_expiry_check:
            arguments["IfMatch"] = stamp
        attempt = 1
        while True:
            try:
                answer = await _call(fs, "get_object", **arguments)
                if stamp and answer["ETag"] != stamp:
                    raise replaced(path)
                async with answer["Body"] as body:
                    data = await body.read()
                size, modified = len(data), answer["LastModified"].timestamp()
                if "ContentRange" in answer:
                    size = int(answer["ContentRange"].rpartition("/")[2])
                entry = Entry(path, size, answer["ETag"], modified)
                return Looked(entry, size - len(data) if begin < 0 else begin, data)
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

    def upload(self, path: str, exclusive: bool) -> _Upload:
        """See `ObjectStore.upload`."""
        return _Upload(self, path, exclusive)

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
                    at = {"Bucket": where["Bucket"], "Key": upload["Key"], "UploadId": upload["UploadId"]}
                    self.call("abort_multipart_upload", **at)
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


async def _ask(fs: Any, request: str, **arguments: Any) -> Any:
    """Make a request. What botocore has to say of the network, of credentials and so on is an OSError."""
    from botocore.exceptions import BotoCoreError

    try:
        return await (_send if "Body" in arguments else _call)(fs, request, **arguments)
    except BotoCoreError as error:
        raise _as_os_error(error) from error


async def _call(fs: Any, request: str, **arguments: Any) -> Any:
    """Make a request without a body. s3fs repeats it if that may help."""
    _log(request, **arguments)
    return await fs._call_s3(request, **arguments)  # noqa: SLF001 (s3fs has public names for files only)


def _log(request: str, Bucket: str, Key: str = "", Prefix: str = "", Range: str = "", **_: object) -> None:  # noqa: N803
    telemetry.debug("store", "s3: %s %s/%s %s", request, Bucket, Key or Prefix, Range)


async def _send(fs: Any, request: str, Body: bytes, **arguments: Any) -> Any:  # noqa: N803
    """Make a request with a body. s3fs would repeat it with the same file, which has been read to its end by then."""
    from botocore.exceptions import ClientError
    from s3fs.core import S3_RETRYABLE_ERRORS
    from s3fs.errors import translate_boto_error

    _log(request, **arguments)
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


def _as_os_error(error: Exception) -> OSError:
    return OSError(errno.EIO, f"{type(error).__name__}: {error}")


def _entry(skip: int, found: Mapping[str, Any]) -> Entry:
    """The entry of an object as a listing shows it. skip: characters of its key that are not of its path."""
    return Entry(found["Key"][skip:], found["Size"], found["ETag"], found["LastModified"].timestamp())


def _code(error: BaseException) -> str:
    """S3's name for an error that s3fs has translated."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


class _Upload(Upload):
    """An object of S3 in the making."""

    def __init__(self, bucket: S3Store, path: str, exclusive: bool) -> None:
        super().__init__(bucket, path, exclusive)
        self._bucket = bucket
        self._key = bucket.key(path)
        self._id: dict[str, str] = {}  # UploadId, once there is one
        fs, _ = bucket.connect()
        self._fixed = bool(fs.fixed_upload_size)
        self._marked = {"Metadata": {**fs.s3_additional_kwargs.get("Metadata", {}), WRITER: self.writer}}

    def _part_size(self) -> int:
        return FIXED_PART_NBYTES if self._fixed else super()._part_size()

    def _start(self) -> None:
        answer = self._bucket.call("create_multipart_upload", **self._key, **self._marked)
        self._id = {"UploadId": answer["UploadId"]}

    def _send_part(self, number: int, data: bytes, last: bool) -> Future[Any]:
        if number == PARTS:
            raise OSError(errno.EFBIG, f"an object has at most {PARTS} parts", self.path)
        return self._bucket.submit("upload_part", **self._key, **self._id, PartNumber=number + 1, Body=data)

    def _put(self, data: bytes) -> None:
        self._commit("put_object", Body=data, **(self._marked if self._exclusive else {}))

    def _complete(self, answers: Sequence[Any]) -> None:
        parts = [{"PartNumber": number, "ETag": answer["ETag"]} for number, answer in enumerate(answers, 1)]
        self._commit("complete_multipart_upload", MultipartUpload={"Parts": parts}, **self._id)

    def _commit(self, request: str, **arguments: Any) -> None:
        if self._exclusive:
            arguments["IfNoneMatch"] = "*"
        try:
            self._bucket.call(request, **self._key, **arguments)
        except OSError as error:
            if _code(error) in ("PreconditionFailed", "412"):
                raise file_exists(self.path) from error
            raise

    def _abort(self) -> Future[Any] | None:
        return self._bucket.submit("abort_multipart_upload", **self._key, **self._id)

    def _writer_there(self) -> str | None:
        writer: str | None = self._bucket.call("head_object", **self._key).get("Metadata", {}).get(WRITER)
        return writer
