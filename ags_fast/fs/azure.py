"""A folder of a container of Azure Blob Storage, by the requests of azure-storage-blob.

adlfs connects and brings credentials, and azure-storage-blob repeats requests that may succeed. The files of adlfs are
not used: they complete an upload whenever they are closed, and they do not check that what they read is still the same
blob.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from ags_fast import telemetry
from ags_fast.fs.base import Entry
from ags_fast.fs.objects import ObjectStore, Upload
from ags_fast.fs.remote import Looked, replaced

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from ags_fast.fs.base import LeftOut

__all__ = ["AzureStore"]

PAGE = 5000  # blobs of a listing
WRITER = "ags_writer"  # metadata of a blob: `Upload.writer`; its name must be one that C# takes
# aiohttp warns of bodies of more than 1 MiB, and azure-storage-blob takes only bytes for a blob in one request.
warnings.filterwarnings("ignore", "Sending a large body directly", ResourceWarning)
FOLDER = "hdi_isfolder"  # metadata of a folder, in an account with hierarchical namespace


class AzureStore(ObjectStore):
    """A folder of a container. The stamp of a blob is its ETag, with which each range is read."""

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

    def submit(self, request: str, *names: Any, **arguments: Any) -> Future[Any]:
        """Let the thread of fsspec make a request: see `ask`."""
        return self.run(self.ask(request, *names, **arguments))

    async def ask(self, request: str, *names: Any, **arguments: Any) -> Any:
        """Make a request, by the name of the container client's method. Azure's errors are those of `as_os_errors`."""
        telemetry.debug("store", "az: %s %s", request, self.url)
        with as_os_errors():
            return await getattr(self.client(), request)(*names, **arguments)

    async def blob(self, request: str, path: str, *names: Any, **arguments: Any) -> Any:
        """Make a request of a blob's client: see `ask`."""
        telemetry.debug("store", "az: %s %s/%s", request, self.url, path)
        with as_os_errors():
            return await getattr(self.client().get_blob_client(self.name(path)), request)(*names, **arguments)

    def list(self, prefix: str = "", after: str = "", left_out: LeftOut | None = None) -> Iterator[Entry]:
        """See `Store.list`."""
        start = self.name(prefix)
        skip = len(start) - len(prefix)
        found = self.client().list_blobs(name_starts_with=start, include=["metadata"], results_per_page=PAGE)
        pages = found.by_page()
        page = self.run(_next(pages))
        while (blobs := page.result()) is not None:
            page = self.run(_next(pages))  # while the caller works on this one
            for entry in (_entry(blob.name[skip:], blob) for blob in blobs if not _is_folder(blob)):
                if (entry.path > after or not after) and self._is_file(entry, left_out):
                    yield entry

    async def found(self, path: str) -> Entry | None:
        """See `ObjectStore.found`."""
        try:
            blob = await self.blob("get_blob_properties", path)
        except FileNotFoundError:
            return None
        return None if _is_folder(blob) else _entry(path, blob)

    async def get(self, path: str, stamp: str | None, begin: int, end: int) -> Looked | None:
        """See `ObjectStore.get`."""
        try:
            found = await self.blob("download_blob", path, begin, end - begin, decompress=False, **_if_match(stamp))
            with as_os_errors():
                data = await found.readall()
        except FileExistsError as error:
            raise replaced(path) from error
        except _NoSuchRangeError:
            return None
        entry = _entry(path, found.properties, int(found.properties.content_range.rpartition("/")[2]))
        if stamp and entry.stamp != stamp:
            raise replaced(path)
        return Looked(entry, begin, data)

    def upload(self, path: str, exclusive: bool) -> _Upload:
        """See `ObjectStore.upload`."""
        return _Upload(self, path, exclusive)

    def _delete(self, path: str, read: Entry | None) -> None:
        try:
            self.submit("delete_blob", self.name(path), **_if_match(None if read is None else read.stamp)).result()
        except FileNotFoundError:
            pass
        except FileExistsError as error:
            raise replaced(path) from error


class _Upload(Upload):
    """A blob in the making, of blocks. Azure shows no blocks that are not committed, and removes them after a week.

    All uploads to one name share its blocks: the one that is completed first drops those of the others, which fail.
    """

    def __init__(self, store: AzureStore, path: str, exclusive: bool) -> None:
        super().__init__(store, path, exclusive)
        self._store = store
        self._name = path
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
        except _NoBlocksError as error:
            if self._exclusive:
                raise FileExistsError from error
            raise OSError(errno.EIO, "somebody else has completed this blob meanwhile", self.path) from error

    def _put(self, data: bytes) -> None:
        replace = not self._exclusive
        self._store.run(self._store.blob("upload_blob", self._name, data, overwrite=replace, **self._marked)).result()

    def _writer_there(self) -> str | None:
        metadata = self._store.run(self._store.blob("get_blob_properties", self._name)).result().metadata
        return {key.lower(): value for key, value in metadata.items()}.get(WRITER)


class _NoSuchRangeError(OSError):
    """The blob has no byte in the range."""


class _NoBlocksError(OSError):
    """Blocks that were sent are not there."""


CONDITIONS = ("BlobAlreadyExists", "ConditionNotMet", "TargetConditionNotMet")  # Azure's words for one that fails
OTHERS: Mapping[str, type[OSError]] = {"InvalidBlockList": _NoBlocksError, "InvalidRange": _NoSuchRangeError}


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Raise what a local file would raise.

    Raises:
        FileNotFoundError: There is no such blob or container.
        FileExistsError: A condition of the request does not hold.
        PermissionError: The credentials do not allow that.
        OSError: All else that is in the way.
    """
    import aiohttp
    from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError

    try:
        yield
    except HttpResponseError as error:
        code = getattr(error, "error_code", None) or ""
        code, status = str(getattr(code, "value", code)), error.status_code
        said = f"Azure answers {status}: {code or error.reason}"
        if status == 404:
            raise FileNotFoundError(errno.ENOENT, said) from error
        if code in CONDITIONS:
            raise FileExistsError(errno.EEXIST, said) from error
        if status in (401, 403) or isinstance(error, ClientAuthenticationError):
            raise PermissionError(errno.EACCES, said if status else f"{type(error).__name__}: {error}") from error
        raise OTHERS.get(code, OSError)(errno.EIO, said) from error
    except (AzureError, aiohttp.ClientError) as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


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


async def _next(pages: Any) -> Any:
    """The next page of a listing, or None."""
    with as_os_errors():
        try:
            return [blob async for blob in await anext(pages)]
        except StopAsyncIteration:
            return None


def _if_match(stamp: str | None) -> dict[str, Any]:
    from azure.core import MatchConditions

    return {"etag": f'"{stamp}"', "match_condition": MatchConditions.IfNotModified} if stamp else {}


def _is_folder(blob: Any) -> bool:
    return any(key.lower() == FOLDER and value == "true" for key, value in (blob.metadata or {}).items())


def _entry(path: str, blob: Any, size: int | None = None) -> Entry:
    """The entry of a blob's properties; listings show ETags without the quotes."""
    return Entry(path, blob.size if size is None else size, blob.etag.strip('"'), blob.last_modified.timestamp())
