"""A folder of a container of Azure Blob Storage, by requests. adlfs connects, and brings credentials.

Its files complete an upload whenever they are closed, and do not check that what they read is still the same blob.
"""

from __future__ import annotations

import atexit
import errno
import os
import warnings
import weakref
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ags_fast import telemetry
from ags_fast.fs.answers import REFUSED
from ags_fast.fs.base import Entry
from ags_fast.fs.objects import CHANGED, OUTSIDE, UNSENT, ObjectStore, Told, Upload
from ags_fast.fs.remote import RemoteStore

if TYPE_CHECKING:
    import builtins  # in the class AzureStore, list is a method
    from collections.abc import Sequence
    from concurrent.futures import Future

    from ags_fast.fs.objects import Fetched

__all__ = ["AzureStore"]

PAGE = 5000  # blobs of a listing
WRITER = "ags_writer"  # metadata of a blob: `Upload.writer`; its name must be one that C# takes
# aiohttp warns of bodies of more than 1 MiB, and azure-storage-blob takes only bytes for a blob in one request.
warnings.filterwarnings("ignore", "Sending a large body directly", ResourceWarning)
FOLDER = "hdi_isfolder"  # metadata of a folder, in an account with hierarchical namespace
ONCE: dict[str, Any] = {"retry_total": 0, "permit_redirects": False}  # the SDK neither repeats nor redirects a request
CODES: dict[str | int, str] = {"BlobAlreadyExists": CHANGED, "InvalidBlockList": UNSENT, "InvalidRange": OUTSIDE}
LEASES = ("LeaseIdMissing", "LeaseIdMismatchWithBlobOperation", "LeaseLost", "LeaseNotPresentWithBlobOperation")
CODES |= dict.fromkeys(LEASES, REFUSED)  # with the status of a condition that does not hold


class _Upload(Upload):
    """A blob in the making, of blocks. Azure shows no blocks that are not committed, and removes them after a week.

    All uploads to one name share its blocks: the one that is completed first drops those of the others, which fail.
    """

    def __init__(self, store: AzureStore, path: str, exclusive: bool) -> None:
        super().__init__(store, path, exclusive)
        self._store, self._name = store, path
        self._marked = {"metadata": {WRITER: self.writer}}

    def _block(self, number: int) -> str:
        return f"{self.writer}-{number:06}"  # all blocks of a blob have names of one length

    def _send_part(self, number: int, data: bytes, last: bool) -> Future[Any]:
        return self._store.run(self._store.blob("stage_block", self._name, self._block(number), data))

    def _complete(self, answers: Sequence[Any]) -> None:
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(self._block(number)) for number in range(len(answers))]
        condition = {"match_condition": MatchConditions.IfMissing} if self._exclusive else {}
        work = self._store.blob("commit_block_list", self._name, blocks, **condition, **self._marked)
        try:
            self._store.run(work).result()
        except OSError as error:
            if error.errno != errno.ENODATA:  # somebody else's upload has dropped the blocks
                raise
            if self._exclusive:
                raise FileExistsError from error
            raise OSError(errno.EIO, "somebody else has completed this blob meanwhile", self.path) from error

    def _put(self, data: bytes) -> None:
        replace = not self._exclusive
        self._store.run(self._store.blob("upload_blob", self._name, data, overwrite=replace, **self._marked)).result()

    def _writer_there(self) -> str | None:
        metadata = self._store.run(self._store.blob("get_blob_properties", self._name)).result().metadata
        return {key.lower(): value for key, value in metadata.items()}.get(WRITER)


class AzureStore(ObjectStore):
    """A folder of a container. The stamp of a blob is its ETag, with which each range is read."""

    service = "Azure Blob Storage"
    advice = "the account, or the endpoint in connection_string"
    codes = CODES
    uploads = _Upload
    exists = RemoteStore.exists  # there may be folders only
    lacks = "\\"  # the SDK makes it a slash
    tails = False  # Azure has no ranges that count from the end
    _client: tuple[Any, Any] | None = None

    def client(self) -> Any:
        """Return the client of the container."""
        fs, root = self.connect()
        if self._client is None or self._client[0] is not fs:
            _end_in_this_process(fs)
            self._client = fs, fs.service_client.get_container_client(root.partition("/")[0])
        return self._client[1]

    def name(self, path: str) -> str:
        """Return the name of a path, or of a prefix, in the container."""
        prefix = self.connect()[1].partition("/")[2]
        return f"{prefix}/{path}" if prefix else path

    async def ask(self, request: str, *names: Any, path: str | None = None, **arguments: Any) -> Any:
        """Make a request, by the name of a method of the client of the container, or of the blob at `path`."""
        telemetry.debug("store", "az: %s %s/%s", request, self.url, path or "")
        client = self.client() if path is None else self.client().get_blob_client(self.name(path))
        given = {request, *(name for name in arguments if name != "overwrite" or not arguments[name])}

        async def send() -> Any:
            found = await getattr(client, request)(*names, **arguments, **ONCE)
            if request in ("upload_blob", "commit_block_list") and not found.get("etag"):
                raise KeyError("etag")
            return (found, await found.readall()) if request == "download_blob" else found

        return await self.patiently(send, self.url if path is None else self.full_path(path), given)

    async def blob(self, request: str, path: str, *names: Any, **arguments: Any) -> Any:
        """Make a request of a blob's client: see `ask`."""
        return await self.ask(request, *names, path=path, **arguments)

    def _host(self) -> str:
        return str(urlsplit(self.client().url).hostname)

    def _told(self, error: Any) -> Told | None:
        response = getattr(error, "response", None)
        if response is None:
            return None
        code, headers = getattr(error, "error_code", None) or "", response.headers
        code, kind = str(getattr(code, "value", code)), headers.get("Content-Type", "xml")
        own = bool(code) or "xml" in kind or headers.get("Content-Length") == "0"
        words = "" if code or not own else str(response.reason or "")
        return Told(response.status_code, code, words, own, headers.get("Retry-After"), headers.get("Location", ""))

    async def _listed(self, prefix: str, after: str, token: str | None, count: int = 0) -> Any:
        options = {"include": ["metadata"], "results_per_page": count or PAGE, **ONCE}
        found = self.client().list_blobs(name_starts_with=self.name(prefix), **options)

        async def send() -> Any:
            pages = found.by_page(token)
            blobs = [blob async for blob in await anext(pages)]
            if not pages.container:
                raise KeyError("ContainerName")
            return blobs, pages.continuation_token

        return await self.patiently(send, self.url)

    def _entries(self, answer: Any) -> tuple[builtins.list[Entry], Any]:
        blobs, token = answer
        skip = len(self.name(""))
        return [_entry(blob.name[skip:], blob) for blob in blobs if not _is_folder(blob)], token

    async def _head(self, path: str) -> Entry:
        blob = await self.blob("get_blob_properties", path)
        if _is_folder(blob):
            raise FileNotFoundError
        return _entry(path, blob)

    async def _fetch(self, path: str, stamp: str | None, begin: int, end: int) -> Fetched:
        came: list[str] = []

        def note(answer: Any) -> None:
            asked = answer.http_request.headers.get("x-ms-range", "").partition("-")[0].replace("=", " ")
            told = answer.http_response.headers.get("Content-Range", "")
            if told.partition("-")[0] == asked:  # the package itself would take any range
                came.append(told)

        arguments = {"decompress": False, "raw_response_hook": note, **_if_match(stamp)}
        found, data = await self.blob("download_blob", path, begin, end - begin, **arguments)
        entry = _entry(path, found.properties)
        if begin and not entry.size:
            raise OSError(errno.ERANGE, "there is no such range", path)
        told = f"{came[0].partition('-')[0]}-{came[-1].partition('-')[2]}" if came else ""  # of all its requests
        return entry.stamp, entry.modified, told if entry.size else None, data

    def _remove(self, path: str, stamp: str | None) -> None:
        self.submit("delete_blob", self.name(path), **_if_match(stamp)).result()


def _end_in_this_process(fs: Any) -> None:
    """Let a child of a fork leave the client alone: adlfs would have it closed at the end, which waits for ever."""
    endings = [one for one in tuple(weakref.finalize._registry) if one.atexit and (one.peek() or [None])[0] is fs]  # type: ignore[attr-defined]  # noqa: SLF001
    for one in endings:
        one.atexit = False
    if endings:
        atexit.register(_end, os.getpid(), endings)


def _end(owner: int, endings: list[Any]) -> None:
    if os.getpid() == owner:
        for one in endings:
            one()


def _if_match(stamp: str | None) -> dict[str, Any]:
    from azure.core import MatchConditions

    return {"etag": f'"{stamp}"', "match_condition": MatchConditions.IfNotModified} if stamp else {}


def _is_folder(blob: Any) -> bool:
    return any(key.lower() == FOLDER and value == "true" for key, value in (blob.metadata or {}).items())


def _entry(path: str, blob: Any) -> Entry:
    """The entry of a blob's properties; listings show ETags without the quotes."""
    return Entry(path, int(blob.size), blob.etag.strip('"'), blob.last_modified.timestamp())
