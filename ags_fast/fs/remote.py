"""A folder of a file system of fsspec: the common part of S3 and all others.

An object store has no temporary names: an upload goes to its final key and does not appear until it is completed.
"""

from __future__ import annotations

import asyncio
import datetime
import errno
import os
import re
from functools import partial
from importlib import import_module
from inspect import signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast._extras import install
from ags_fast.errors import FormatError, PolicyError
from ags_fast.fs.base import Entry, ReadOnce, Store
from ags_fast.fs.paths import temporary_tag
from ags_fast.fs.ranges import Later, RangeReader

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ags_fast.fs.base import LeftOut
    from ags_fast.fs.ranges import _Answer

__all__ = ["Looked", "RemoteStore", "entry_of", "file_exists", "replaced"]

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # the extra that brings what URLs of a scheme need
EXTRAS |= dict.fromkeys(("az", "abfs", "abfss"), "azure")
# An older one leaves conditions out of requests. So creation would be unconditional, and of two writers both would win.
BOTOCORE = 1, 36
CONNECTIONS = 16  # kept for stores with the same options
FOLDER_ROOT = re.compile(r"(\w+::)*dir(:/+)?::")  # the root of fsspec's DirFileSystem, perhaps behind a cache
STATUS = "ags-status"  # added to the headers of S3's answers
REQUESTS = 64  # to S3 at once, in a process; the options may have config_kwargs={"max_pool_connections": N}


class Looked(NamedTuple):
    """A file's entry, and the bytes from `begin` on that came with it."""

    entry: Entry
    begin: int
    data: bytes


class RemoteStore(Store):
    """A folder of a file system of fsspec. Each process has a connection of its own."""

    stamped = False  # whether each read of a range checks that the file still has the stamp of its entry
    _connection: tuple[int, Any, str] | None = None

    def connect(self) -> tuple[Any, str]:
        """Return the file system, and where in it the folder is."""
        if self._connection is None or self._connection[0] != os.getpid():
            self._connection = (os.getpid(), *_connect(self.url, self.storage_options))
        return self._connection[1:]

    def at(self, path: str) -> str:
        """Return the path of a file in the file system."""
        root = self.connect()[1]
        return root + path if root.endswith("/") or not root else f"{root}/{path}"

    def list(self, prefix: str = "", after: str = "", left_out: LeftOut | None = None) -> Iterator[Entry]:
        """See `Store.list`."""
        fs, root = self.connect()
        folder = prefix.rpartition("/")[0]
        try:
            found = fs.find(self.at(folder) if folder else root, detail=True)
        except FileNotFoundError:
            return
        skip, others = len(self.at("")), [] if left_out is None else left_out
        for name, info in sorted(found.items()):
            path = name[skip:]
            if path <= after or not path.startswith(prefix):
                continue
            if info["type"] != "file":
                others.append((path, "SpecialFile", f"a {info['type']}, which has no content to read"))
            elif temporary_tag(path.rpartition("/")[2]) is not None:
                others.append((path, "TemporaryFile", "a file in the making, or left by a dead job"))
            else:
                entry = self._entry(path, info if info["size"] is not None else fs.info(name))
                if self._is_file(entry, left_out):
                    yield entry

    @staticmethod
    def _is_file(entry: Entry, left_out: LeftOut | None) -> bool:
        """Whether what is listed is taken as a file. With `left_out`, so is content whose name ends in a slash."""
        named = entry.path != "" and not entry.path.endswith("/")
        if not (named or entry.size or left_out is None):
            left_out.append((entry.path, "EmptyFolder", "the mark of a folder: a dataset has files only"))
        return named or (left_out is not None and entry.size > 0)

    def _stat(self, path: str) -> Entry | None:
        try:
            info = self.connect()[0].info(self.at(path))
        except FileNotFoundError:
            return None
        return self._entry(path, info) if info["type"] == "file" else None

    def _entry(self, path: str, info: Mapping[str, Any]) -> Entry:
        if info["size"] is None:
            raise self.refusal(f"say how many bytes {path!r} has")
        return entry_of(path, info)

    def _read_small(self, path: str, limit: int) -> bytes:
        data = self._read_range(path, None, 0, limit + 1)
        if len(data) > limit:
            raise FormatError(f"{path} has more than {limit} bytes, the most that such a file may have")
        return data

    def _read_range(self, path: str, stamp: str | None, begin: int, end: int) -> bytes:
        """Read a range. OSError if the object's stamp is another one by now, where the storage has stamps."""
        return self._request_range(path, stamp, begin, end).result()

    def _request_range(self, path: str, stamp: str | None, begin: int, end: int) -> _Answer:
        fs, _ = self.connect()
        name = self.at(path)
        if not self.parallel:
            return Later(lambda: fs.cat_file(name, start=begin, end=end))
        coroutine = fs._cat_file(name, start=begin, end=end)  # noqa: SLF001 (fsspec documents it for plugins)
        return asyncio.run_coroutine_threadsafe(coroutine, fs.loop)

    @property
    def parallel(self) -> bool:
        """Whether several requests may run at once, in the thread of fsspec. Other file systems may share one cursor.

        Files of ``tar://``, for example, are read through one open file, and those of ``ftp://`` over one connection.
        """
        from fsspec.asyn import AsyncFileSystem
        from fsspec.implementations.dirfs import DirFileSystem

        fs, _ = self.connect()
        while isinstance(fs, DirFileSystem):  # says that it is asynchronous also if what it passes requests to is not
            fs = fs.fs
        return issubclass(type(fs), AsyncFileSystem) and fs.async_impl and not fs.asynchronous

    def look(self, path: str, tail: bool = False) -> Looked:
        """Look at a file that is to be read, in one request if the storage tells size and stamp with some bytes.

        With `tail`, these are its last bytes, else its first. FileNotFoundError if there is no such file.
        """
        entry = self._stat(path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.full_path(path))
        return Looked(entry, 0, b"")

    def reader(self, looked: Looked, steady: bool = False) -> RangeReader:
        """Open a file that was looked at. steady: it will be read from its beginning to its end."""
        path, stamp = looked.entry.path, looked.entry.stamp
        return RangeReader(
            lambda begin, end: self._request_range(path, stamp, begin, end),
            looked.entry.size,
            parallel=self.parallel,
            known=(looked.begin, looked.data),
            steady=steady,
        )

    def _open_seekable(self, path: str, entry: Entry | None, tail: bool) -> RangeReader:
        return self.reader(self.look(path, tail) if entry is None else Looked(entry, 0, b""))

    def _open_once(self, path: str) -> ReadOnce:
        return _Sequential(self, path)

    def _create_exclusive(self, path: str, data: bytes) -> None:
        raise self.refusal("create a file only if it does not exist")

    def _delete(self, path: str, read: Entry | None) -> None:
        try:
            self.connect()[0].rm_file(self.at(path))
        except FileNotFoundError:
            pass
        except NotImplementedError:
            raise self.refusal("delete files") from None

    def refusal(self, what: str) -> PolicyError:
        """Return the error for what file systems of this kind cannot do."""
        scheme = self.url.partition(":")[0]
        return PolicyError(f"{scheme} file systems cannot {what}: use a local folder or an object store")


# Shared by stores with the same options: to connect to S3 takes 0.1 s. A child of a fork does not use its parent's.
_connections: dict[tuple[int, str, str], tuple[Any, str]] = {}


def _check_s3(options: Collection[str]) -> None:
    """Raise ImportError for packages that are too old: s3fs ignores options, and conditions, that are not known."""
    import botocore
    import s3fs

    for name in {"fixed_upload_size", "local_expiry_check"}.intersection(options):
        if name not in signature(s3fs.S3FileSystem.__init__).parameters:
            raise ImportError(f"s3fs {s3fs.__version__} does not know {name}")
    if tuple(map(int, botocore.__version__.split(".")[:2])) < BOTOCORE:
        raise ImportError(f"botocore {botocore.__version__} is older than {BOTOCORE[0]}.{BOTOCORE[1]}")


def _config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of botocore. It repeats no request, and it follows no redirect but to the region of a bucket.

    For a redirect that does not name a region botocore would ask for the region, be redirected, and ask for ever.
    """
    from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]
    from botocore.exceptions import ClientError

    class Direct(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: Any) -> Any:
            session = await super()._get_session(proxy_url)
            return SimpleNamespace(request=partial(session.request, allow_redirects=False))

        async def send(self, request: Any) -> Any:
            answer = await super().send(request)
            answer.headers[STATUS] = str(answer.status_code)
            if 300 <= answer.status_code < 400 and "x-amz-bucket-region" not in answer.headers:
                told = {"HTTPStatusCode": answer.status_code, "HTTPHeaders": answer.headers}
                raise ClientError({"Error": {}, "ResponseMetadata": told}, "")
            return answer

    own = {"retries": {"total_max_attempts": 1, "mode": "standard"}}
    return {"max_pool_connections": REQUESTS, "http_session_cls": Direct, **options, **own}


def _connect(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    scheme = url.partition(":")[0]
    extra = EXTRAS.get(scheme) if "::" not in url else None
    try:
        import fsspec
        from fsspec.utils import tokenize

        if extra == "s3":
            _check_s3(options)
        elif extra is not None:
            import_module({"gcs": "gcsfs", "azure": "adlfs"}[extra])  # to tell which package is missing
        place = url if extra is None else extra
        if extra == "azure":
            place = "/".join(url.split("/")[:3])  # may name the account
        key = (os.getpid(), place, tokenize(options))
        found = _connections.get(key)
        if found is None:
            # A cached listing would be wrong, and a cached instance could belong to other code.
            own: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
            if extra == "s3":  # botocore's default of ten would keep requests of files and of their ranges waiting
                own["config_kwargs"] = _config(options.get("config_kwargs") or {})
            made = fsspec.core.url_to_fs(url, **{**options, **own})
            mine = [other for other in list(_connections) if other[0] == key[0]]
            for old in mine[: max(0, len(mine) + 1 - CONNECTIONS)]:
                _connections.pop(old, None)
            found = _connections.setdefault(key, made)
        fs, root = found
        if extra is not None:
            root = fs._strip_protocol(url).rstrip("/")  # noqa: SLF001 (fsspec documents it for plugins)
        elif FOLDER_ROOT.match(url):
            root = ""  # fsspec gives the next part's path, as it is right for caches
        else:
            root = root or fs.root_marker  # with which names in listings begin
    except ImportError as error:
        needs = "fsspec, and its package for such URLs" if extra is None else f"the extra {extra}"
        raise ImportError(f"{scheme} URLs need {needs} ({error}): {install(extra or 'files')}") from error
    return fs, root


def entry_of(path: str, info: Mapping[str, Any]) -> Entry:
    """Return the entry of a file, from what fsspec tells about the file."""
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


def file_exists(path: str) -> FileExistsError:
    """Return the error for a file that exists and must not."""
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


def replaced(path: str) -> OSError:
    """Return the error for an object that is another one than before."""
    return OSError(errno.ESTALE, "the object was replaced while it was read", path)


class _Sequential(ReadOnce):
    """An object that is read once, with several requests at once."""

    def __init__(self, store: RemoteStore, path: str) -> None:
        looked = store.look(path)
        self._entry = looked.entry
        self.size, self.stamp = self._entry.size, self._entry.stamp
        self._store = store
        self._file = store.reader(looked, steady=True)

    def _read_into(self, view: memoryview) -> int:
        got: int = self._file.readinto(view)
        return got

    def changed(self) -> bool:
        return not self._store.stamped and self._store.stat(self._entry.path) != self._entry

    def close(self) -> None:
        self._file.close()
