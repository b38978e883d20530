"""A folder of an S3 bucket, by requests: files of s3fs complete an upload when they are closed, also by an error."""

from __future__ import annotations

import asyncio
import errno
import io
import time
from bisect import bisect_right
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ags_fast import telemetry
from ags_fast.fs.answers import AGAIN, FOREIGN
from ags_fast.fs.base import Entry
from ags_fast.fs.objects import DENIED, PART_NBYTES, ObjectStore, Told, Upload, span
from ags_fast.fs.remote import STATUS

if TYPE_CHECKING:
    import builtins  # in the class S3Store, list is a method
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from ags_fast.fs.objects import Fetched

__all__ = ["PART_NBYTES", "S3Store"]

FIXED_PART_NBYTES = 64 << 20  # where all parts must have one size
PARTS = 10_000  # of an object, of up to 5 GiB
PAGE = 1000  # objects of a listing
WALKS = 16  # through a listing, at once
SHARE = 8  # paths that a walk looks up at least
WRITER = "ags-writer"  # metadata of an object: `Upload.writer`
# Without which an answer is none of S3's. A page to log in has the status 200, too.
NEEDED: dict[str, tuple[str, ...]] = {"list_objects_v2": ("IsTruncated",), "list_multipart_uploads": ("IsTruncated",)}
NEEDED |= {"head_object": ("ContentLength", "ETag", "LastModified"), "get_object": ("ETag", "LastModified")}
NEEDED |= dict.fromkeys(("put_object", "upload_part", "complete_multipart_upload"), ("ETag",))
NEEDED |= {"create_multipart_upload": ("UploadId",)}
# The status 409 says that somebody else works on the object. S3 has words for trouble that passes whose status is 400.
CODES: dict[str | int, str] = {409: AGAIN}
CODES |= dict.fromkeys(("RequestTimeout", "IncompleteBody", "XAmzContentSHA256Mismatch"), AGAIN)
CODES |= {"ExpiredToken": DENIED, "InvalidToken": DENIED, "AuthorizationHeaderMalformed": FOREIGN}
CODES |= {"PermanentRedirect": FOREIGN, "IllegalLocationConstraintException": FOREIGN}


class _Upload(Upload):
    """An object of S3 in the making."""

    def __init__(self, bucket: S3Store, path: str, exclusive: bool) -> None:
        super().__init__(bucket, path, exclusive)
        self._bucket, self._key = bucket, bucket.key(path)
        self._id: dict[str, str] = {}  # UploadId, once there is one
        fs, _ = bucket.connect()
        self._fixed = bool(getattr(fs, "fixed_upload_size", False))  # an old s3fs has no such option
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
        self._bucket.call(request, **self._key, **arguments)

    def _abort(self) -> Future[Any] | None:
        return self._bucket.submit("abort_multipart_upload", **self._key, **self._id)

    def _writer_there(self) -> str | None:
        return self._bucket.call("head_object", **self._key).get("Metadata", {}).get(WRITER)  # type: ignore[no-any-return]


class S3Store(ObjectStore):
    """A folder of a bucket. The stamp of an object is its ETag, with which each GET has If-Match."""

    service = "S3"
    advice = "endpoint_url, and the bucket's region: client_kwargs={'region_name': ...}"
    codes = CODES
    uploads = _Upload

    def key(self, path: str) -> dict[str, str]:
        """Bucket and Key of a path, or of a prefix, as the requests want them."""
        fs, root = self.connect()
        bucket, prefix, _ = fs.split_path(root)
        return {"Bucket": bucket, "Key": f"{prefix}/{path}" if prefix else path}

    async def ask(self, request: str, Body: Any = None, **arguments: Any) -> Any:  # noqa: N803
        """Make a request of S3, by its name in botocore. The Body of the answer has been read."""
        fs, _ = self.connect()
        at = f"{arguments['Bucket']}/{arguments.get('Key') or arguments.get('Prefix', '')}"
        telemetry.debug("store", "s3: %s %s %s", request, at, arguments.get("Range", ""))
        await fs.set_session()

        async def send() -> Any:
            method = getattr(await fs.get_s3(arguments["Bucket"]), request)
            body = {} if Body is None else {"Body": io.BytesIO(Body)}  # which is read to its end
            answer = await method(**fs._get_s3_method_kwargs(method, **arguments, **body))  # noqa: SLF001 (s3fs has public names for files only)
            if "Body" in answer:
                async with answer["Body"] as stream:
                    answer["Body"] = await stream.read()
            for name in NEEDED.get(request, ()):
                answer[name]
            meta = answer["ResponseMetadata"]
            if request not in NEEDED and meta["HTTPStatusCode"] != 204 and _is_page(meta["HTTPHeaders"]):
                raise ValueError("a page")
            return answer

        return await self.patiently(send, f"s3://{at}", arguments)

    def _host(self) -> str:
        return str(urlsplit(self.connect()[0]._s3.meta.endpoint_url).hostname)  # noqa: SLF001 (as in ask)

    def _told(self, error: Any) -> Told | None:
        response = getattr(error, "response", None)
        if not isinstance(response, dict):
            return None
        found, meta = response.get("Error", {}), response.get("ResponseMetadata", {})
        headers, code = meta.get("HTTPHeaders", {}), found.get("Code") or "0"
        status, region = meta.get("HTTPStatusCode", 0), headers.get("x-amz-bucket-region") or found.get("Region")
        words = f"the bucket is in the region {region}" if region else str(found.get("Message") or "")
        wait, location = headers.get("retry-after"), headers.get("location") or found.get("Endpoint") or ""
        if not code.isdecimal():
            return Told(status, code, words, True, wait, location)
        # botocore makes a 500 of each body that it cannot read.
        status = int(headers.get(STATUS, status))
        own = status >= 300 and (error.operation_name == "HeadObject" or not _is_page(headers))
        return Told(status, "", words if own else "", own, wait, location)

    async def _listed(self, prefix: str, after: str, token: str | None, count: int = 0) -> Any:
        bucket, start = self.key(prefix).values()
        more = {"StartAfter": self.key(after)["Key"]} if after else {}
        more |= {"ContinuationToken": token} if token else {}
        return await self.ask("list_objects_v2", Bucket=bucket, Prefix=start, MaxKeys=count or PAGE, **more)

    def _entries(self, answer: Any) -> tuple[builtins.list[Entry], Any]:
        skip = len(self.key("")["Key"])
        found = [
            Entry(one["Key"][skip:], one["Size"], one["ETag"], one["LastModified"].timestamp())
            for one in answer.get("Contents", ())
        ]
        return found, answer["NextContinuationToken"] if answer["IsTruncated"] else None

    def existing(self, paths: Iterable[str]) -> set[str]:
        """See `Store.existing`. One request if they are less than a page apart, else at most one for each."""
        wanted = sorted(set(paths))
        return self.run(self._existing(wanted)).result() if wanted else set()

    async def _existing(self, wanted: builtins.list[str]) -> set[str]:
        """Which of these sorted paths are there. The first page shows whether there is more to be listed."""
        found, left = await self._walk(wanted, 1)
        share = max(SHARE, -(-len(left) // WALKS))
        walks = [self._walk(left[i : i + share]) for i in range(0, len(left), share)]
        return found.union(*(more for more, _ in await asyncio.gather(*walks)))

    async def _walk(self, wanted: builtins.list[str], count: int | None = None) -> tuple[set[str], builtins.list[str]]:
        """Look sorted paths up in pages of a listing. Returns those that are there, and those not reached."""
        skip, found, looked_up, at, after = len(self.key("")["Key"]), set[str](), set(wanted), 0, ""
        while at < len(wanted) and count != 0:
            after = max(after, _before(wanted[at]))
            answer = await self._listed("", after, None)
            with self.understood():
                paths = [one["Key"][skip:] for one in answer.get("Contents", ())]
                found |= looked_up.intersection(paths)
                if not answer["IsTruncated"]:
                    return found, []
            if not paths or paths[-1] <= after:
                raise self.foreign("a listing comes back to where it was")
            after = paths[-1]
            at = bisect_right(wanted, after)
            count = None if count is None else count - 1
        return found, wanted[at:]

    async def _head(self, path: str) -> Entry:
        found = await self.ask("head_object", **self.key(path))
        return Entry(path, found["ContentLength"], found["ETag"], found["LastModified"].timestamp())

    def _if(self, stamp: str | None) -> dict[str, str]:
        return {"IfMatch": stamp} if stamp and not getattr(self.connect()[0], "local_expiry_check", False) else {}

    async def _fetch(self, path: str, stamp: str | None, begin: int, end: int) -> Fetched:
        found = await self.ask("get_object", **self.key(path), Range=span(begin, end), **self._if(stamp))
        return found["ETag"], found["LastModified"].timestamp(), found.get("ContentRange"), found["Body"]

    def _remove(self, path: str, stamp: str | None) -> None:
        try:
            self.call("delete_object", **self.key(path), **self._if(stamp))
        except OSError as error:
            if error.errno != errno.ENOSYS or not stamp:
                raise
            self.call("delete_object", **self.key(path))  # the server knows no condition of a DELETE

    def _sweep(
        self, tag: str | None, age: float, age_unlocked: float, paths: Collection[str], below: str
    ) -> builtins.list[str]:
        where, swept, seen = self.key(""), list[str](), set[Any]()
        more: Any = ("", "")
        while more:
            markers = {"KeyMarker": more[0], "UploadIdMarker": more[1]} if any(more) else {}
            page = self.call("list_multipart_uploads", Bucket=where["Bucket"], Prefix=where["Key"], **markers)
            with self.understood():
                found = [(one["Key"], one["UploadId"], one["Initiated"].timestamp()) for one in page.get("Uploads", ())]
                more = page["IsTruncated"] and self.new((page["NextKeyMarker"], page["NextUploadIdMarker"]), seen)
            for key, upload, begun in found:
                path = key.removeprefix(where["Key"])
                if path == key and where["Key"]:  # some servers list all
                    continue
                if (tag is not None and path not in paths) or not path.startswith(below):
                    continue
                if age_unlocked > 0 and time.time() - begun < age_unlocked:
                    continue
                with suppress(FileNotFoundError):  # completed or aborted meanwhile
                    self.call("abort_multipart_upload", Bucket=where["Bucket"], Key=key, UploadId=upload)
                    swept.append(path)
        return swept


def _before(path: str) -> str:
    """A text that sorts before a path, and after most others that do."""
    last = ord(path[-1]) - 1
    return path[:-1] + (f"{chr(last)}\U0010fffd" if last >= 0 and not 0xD800 <= last <= 0xDFFF else "")


def _is_page(headers: Mapping[str, str]) -> bool:
    """Whether an answer has a body that is not S3's."""
    return "xml" not in headers.get("content-type", "xml") and headers.get("content-length") != "0"
