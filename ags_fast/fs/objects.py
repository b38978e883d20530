"""What the object stores have in common: conditions instead of locks, requests of ranges, uploads in parts."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import random
import re
import sys
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from ags_fast import telemetry
from ags_fast.errors import AgsError, PolicyError
from ags_fast.fs.answers import AGAIN, FOREIGN, MISSING, REFUSED, asked_wait, in_words, meaning
from ags_fast.fs.base import LISTED, Entry
from ags_fast.fs.new import NewObject
from ags_fast.fs.paths import check_path
from ags_fast.fs.ranges import HEAD_NBYTES
from ags_fast.fs.remote import Looked, RemoteStore, file_exists, replaced

if TYPE_CHECKING:
    import builtins  # in the class ObjectStore, list is a method
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from ags_fast.fs.base import LeftOut

    Fetched = tuple[str, float, str | None, bytes]

__all__ = ["PART_NBYTES", "ObjectStore", "Told", "Upload", "ranged", "span"]

PART_NBYTES = 8 << 20  # of an upload
KEY_NBYTES = 1024  # of a name in a bucket
PARTS_IN_FLIGHT = 4
SETTLE_SECONDS = 10.0  # that an upload that is given up waits for parts on their way
LOOKS = 16  # objects that are looked up at once
ATTEMPTS = 6  # of a request while the service is busy or not reached
PAUSE_SECONDS = 0.1  # before the second attempt; three times as long before each further one
WAIT_SECONDS = 60.0  # that a service may ask to wait

# What an answer says, besides what `answers.meaning` knows, and the error that it becomes.
DENIED, CHANGED, OUTSIDE, LACKING, UNSENT = "denied", "changed", "outside", "lacking", "unsent"
ERRNOS = {MISSING: errno.ENOENT, DENIED: errno.EACCES, CHANGED: errno.EEXIST, OUTSIDE: errno.ERANGE}
ERRNOS |= {LACKING: errno.ENOSYS, UNSENT: errno.ENODATA}
STATUSES = {401: DENIED, 403: DENIED, 412: CHANGED, 416: OUTSIDE, 501: LACKING}  # of all stores

# What requests have that says which of these a right answer may be.
CONDITIONS = dict.fromkeys(("IfMatch", "IfNoneMatch", "ifGenerationMatch", "match_condition", "overwrite"), CHANGED)
CONDITIONS |= {"Content-Range": CHANGED, "Range": OUTSIDE, "download_blob": OUTSIDE}  # an upload keeps its condition
# Names of exceptions of the packages: the connection was not made, or ended; credentials are not there or not taken.
LOST = {"ConnectionError", "HTTPClientError", "IncompleteReadError", "ClientError", "TransportError"}
LOST |= {"ServiceRequestError", "ServiceResponseError"}
UNKNOWN = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "SSOError", "GoogleAuthError"}
UNKNOWN |= {"TokenRetrievalError", "UnauthorizedSSOTokenError", "ClientAuthenticationError"}

T = TypeVar("T")


class Told(NamedTuple):
    """What was answered instead of what is due."""

    status: int  # of HTTP; 0: there was no answer
    code: str = ""  # the service's word for it
    words: str = ""  # what it says besides
    own: bool = True  # whether it has the form of the service's errors
    wait: str | None = None  # the header Retry-After
    location: str = ""  # where it redirects to


async def pause(seconds: float) -> None:
    """Wait before a request is sent again."""
    await asyncio.sleep(seconds)


def span(begin: int, end: int) -> str:
    """Return the value of an HTTP Range header. A negative `begin`: the last bytes."""
    return f"bytes={begin}-{end - 1}" if begin >= 0 else f"bytes={begin}"


def ranged(begin: int, end: int, told: str | None, data: bytes, path: str) -> tuple[int, int, bytes]:
    """Return where the bytes of an answer begin, the object's size, and the bytes.

    told: The header Content-Range. None: the answer is the whole object. OSError if it is another range than `span`'s.
    """
    size, first = len(data), max(0, len(data) + begin) if begin < 0 else 0
    if told is None and begin <= 0:  # a server may leave a range out of account
        return first, size, data[first : size if begin < 0 else end]
    if found := re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", told or "", re.ASCII):
        first, last, size = map(int, found.groups())
        due = (begin, min(end, size)) if begin >= 0 else (max(0, size + begin), size)
        if (first, last + 1) == due and len(data) == due[1] - due[0]:
            return first, size, data
    answer = f"{told or 'all'}, {len(data)} bytes"
    raise OSError(errno.EIO, f"the store answers another range than {span(begin, end)}: {answer}", path)


def _misread(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) and error.args else "its answer cannot be read"


class ObjectStore(RemoteStore):
    """A folder of a bucket. Each read of a range has the object's stamp as its condition."""

    stamped = True
    tails = True  # whether the last bytes can be read before the size is known
    lacks = ""  # characters that names cannot have
    service: str  # for messages
    advice: str  # what to check if something else answers
    codes: Mapping[str | int, str]  # the service's words for errors, and statuses that say more here than elsewhere
    uploads: type[Any]

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Let the thread of fsspec do this work."""
        try:
            loop = self.connect()[0].loop
        except BaseException:
            work.close()  # else Python warns of a coroutine that nobody awaited
            raise
        return asyncio.run_coroutine_threadsafe(work, loop)

    def checked(self, path: str) -> str:
        """See `Store.checked`."""
        nbytes = len(f"{self.connect()[1]}/{check_path(path)}".partition("/")[2].encode("utf-8", "surrogatepass"))
        if nbytes > KEY_NBYTES or any("\ud800" <= char <= "\udfff" or char in self.lacks for char in path):
            such = f"{KEY_NBYTES} bytes of UTF-8 {self.lacks and 'without '}{self.lacks}"
            raise PolicyError(f"{path!r} is no name here: {such}")
        return path

    def submit(self, *names: Any, **arguments: Any) -> Future[Any]:
        """Let the thread of fsspec make a request: see `ask`."""
        return self.run(self.ask(*names, **arguments))

    def call(self, *names: Any, **arguments: Any) -> Any:
        """Make a request, and wait for the answer: see `ask`."""
        return self.submit(*names, **arguments).result()

    async def ask(self, *names: Any, **arguments: Any) -> Any:
        """Make a request; the arguments are those of the package. Raises what `patiently` does."""
        raise NotImplementedError

    def upload(self, path: str, exclusive: bool) -> Upload:
        """Begin an object."""
        return self.uploads(self, path, exclusive)  # type: ignore[no-any-return]

    async def patiently(self, send: Callable[[], Awaitable[T]], path: str, given: Iterable[str] = ()) -> T:
        """Make a request, again while the service is busy or not reached. All requests of all stores come here.

        given: Names of what it has, for CONDITIONS.

        FileNotFoundError: There is no such object or bucket. FileExistsError: A condition of the request does not hold.
        PermissionError: The credentials do not allow that. OSError: All else that is in the way; see ERRNOS.
        """
        attempt = 1
        while True:
            try:
                return await send()
            except AgsError:
                raise
            except Exception as error:
                kind, told = self._judged(error)
                wait = asked_wait(told.wait)
                if kind != AGAIN or attempt == ATTEMPTS or wait > WAIT_SECONDS:
                    if kind in (CHANGED, OUTSIDE) and kind not in {CONDITIONS.get(name) for name in given}:
                        kind = REFUSED
                    raise self._failure(kind, told, attempt, wait, path) from error
            wait = max(wait, PAUSE_SECONDS * 3 ** (attempt - 1) * random.uniform(0.5, 1))
            telemetry.info("store", "%s: a request failed, and is sent again in %.1f s", self.service, wait)
            await pause(wait)
            attempt += 1

    def _judged(self, error: Exception) -> tuple[str, Told]:
        """What an exception of a package means. One that says nothing of the service is raised."""
        told = self._told(error)
        if told is not None:
            kind = meaning(told.status)
            if not told.own:
                return (kind if kind == AGAIN else FOREIGN), told
            kind = STATUSES.get(told.status, kind)
            return self.codes.get(told.code) or self.codes.get(told.status) or kind, told
        names, words = {one.__name__ for one in type(error).__mro__}, in_words(error)
        if words or names & LOST:
            return (REFUSED if words.startswith("TLS") else AGAIN), Told(0, "", words or "the connection was closed")
        if names & UNKNOWN:
            return DENIED, Told(0, "", str(error))
        if isinstance(error, OSError):
            raise error
        if "BotoCoreError" in names:  # it has not asked: a name, a region or an option is wrong
            return REFUSED, Told(0, "", str(error))
        return FOREIGN, Told(0, "", _misread(error))

    def _failure(self, kind: str, told: Told, attempts: int, wait: float, path: str) -> OSError:
        said = ": ".join(filter(None, (f"{told.status or ''} {told.code}".strip(), told.words)))
        if kind == FOREIGN and told.location and 300 <= told.status < 400:
            to = urlsplit(told.location).hostname or told.location
            said = f"{self._host()} redirects to {to} ({said}); this is not {self.service}: check {self.advice}"
            return OSError(errno.EIO, said, path)
        if kind == FOREIGN:
            return self.foreign(said, path)
        if not told.status and kind == AGAIN:
            said = f"{self._host()} was not reached in {attempts} attempts: {said}. Check {self.advice}"
        elif wait > WAIT_SECONDS:
            said += f". It asks to wait {wait:.0f} s, and a request waits at most {WAIT_SECONDS:.0f} s: come back then"
        elif kind == AGAIN:
            said += f". It stayed busy in {attempts} attempts: ask less at once, or come back later"
        elif kind == DENIED:
            said += ". Check the credentials, and what they allow"
        said = f"{self.service}{' answers' if told.status else ':'} {said}"
        return OSError(ERRNOS.get(kind, errno.EIO), said, path)

    def foreign(self, why: str, path: str = "") -> OSError:
        """Return the error for an answer that the service would not give."""
        said = f"{self._host()} does not answer like {self.service}: {why}; is the endpoint right? Check {self.advice}"
        return OSError(errno.EIO, said, path or self.url)

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Raise OSError for an answer without what it must have."""
        try:
            yield
        except AgsError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise self.foreign(_misread(error)) from error

    def list(self, prefix: str = "", after: str = "", left_out: LeftOut | None = None) -> Iterator[Entry]:
        """See `Store.list`."""
        page, seen, token = self.run(self._listed(prefix, after, None)), set[Any](), "first"
        while token:
            with self.understood():
                entries, token = self._entries(page.result())
                if self.new(token, seen):  # request the next page while the caller works on this one
                    page = self.run(self._listed(prefix, after, token))
            for entry in entries:
                if (entry.path > after or not after) and self._is_file(entry, left_out):
                    yield entry

    def new(self, token: Any, seen: set[Any]) -> Any:
        """Return the token of the next page of a listing, or None. OSError: with the `seen` ones it would never end."""
        if token in seen:
            raise self.foreign("a listing comes back to where it was")
        seen.add(token)
        return token

    def exists(self) -> bool:
        """See `Store.exists`."""
        with self.understood():
            return bool(self._entries(self.run(self._listed("", "", None, 1)).result())[0])

    async def found(self, path: str) -> Entry | None:
        """Look an object up. None: it does not exist."""
        try:
            with self.understood():
                return await self._head(path)
        except FileNotFoundError:
            return None

    async def get(self, path: str, stamp: str | None, begin: int, end: int) -> Looked | None:
        """Get a range, which the object may have a part of; None if it has no byte there.

        A negative `begin` is the number of bytes before the object's end. OSError if the stamp is another than `stamp`.
        """
        try:
            with self.understood():
                found, modified, told, data = await self._fetch(path, stamp, begin, end)
        except FileExistsError as error:
            raise replaced(path) from error
        except OSError as error:
            if error.errno == ERRNOS[OUTSIDE]:
                return None
            raise
        if stamp and found != stamp:
            raise replaced(path)
        at, size, data = ranged(begin, end, told, data, path)
        return Looked(Entry(path, size, found, modified), at, data)

    if TYPE_CHECKING:

        def _host(self) -> str: ...
        def _told(self, error: Any) -> Told | None: ...  # what was answered; None: there was no answer
        def _remove(self, path: str, stamp: str | None) -> None: ...  # FileExistsError: its stamp is another one
        async def _listed(self, prefix: str, after: str, token: str | None, count: int = ...) -> Any: ...  # a page
        def _entries(self, answer: Any) -> tuple[builtins.list[Entry], Any]: ...  # of it, and the next page's token
        async def _head(self, path: str) -> Entry: ...

        # The stamp and the time of an object, the Content-Range of the answer, and its bytes: see `get`.
        async def _fetch(self, path: str, stamp: str | None, begin: int, end: int) -> Fetched: ...

    def _stat(self, path: str) -> Entry | None:
        return self.run(self.found(path)).result()

    def existing(self, paths: Iterable[str]) -> set[str]:
        """See `Store.existing`. A request for each path, 16 at once, or one listing from 1000 paths on."""
        wanted = set(paths)
        if len(wanted) >= LISTED:
            return wanted.intersection(entry.path for entry in self.list())

        async def look() -> set[str]:
            turn = asyncio.Semaphore(LOOKS)

            async def one(path: str) -> str | None:
                async with turn:
                    return None if await self.found(path) is None else path

            return {path for path in await asyncio.gather(*map(one, wanted)) if path is not None}

        return self.run(look()).result()

    def _request_range(self, path: str, stamp: str | None, begin: int, end: int) -> Future[bytes]:
        async def data() -> bytes:
            looked = await self.get(path, stamp, begin, end)
            return b"" if looked is None else looked.data

        return self.run(data())

    def look(self, path: str, tail: bool = False) -> Looked:
        """See `RemoteStore.look`."""
        if tail and not self.tails:
            return super().look(path, tail)
        looked = self.run(self.get(path, None, -HEAD_NBYTES if tail else 0, HEAD_NBYTES)).result()
        return super().look(path, tail) if looked is None else looked  # it is empty, or the server knows no such range

    def _read_if_unchanged(self, path: str, size: int, stamp: str | None) -> bytes | None:
        try:
            data = self._read_range(path, stamp, 0, size + 1)
        except OSError:
            return None
        return data if len(data) == size else None

    def _create_exclusive(self, path: str, data: bytes) -> None:
        with self.upload(path, exclusive=True) as new:
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
        with self.begin(path, tag=tag) as new:
            new.write(data)
            new.publish()

    def _begin(self, path: str, exclusive: bool, tag: str, **local: Any) -> Upload:
        if exclusive and self.stat(path) is not None:  # before all of the file is sent for nothing
            raise file_exists(self.full_path(path))
        return self.upload(path, exclusive)

    def _delete(self, path: str, read: Entry | None) -> None:
        with suppress(FileNotFoundError):
            try:
                self._remove(path, None if read is None else read.stamp)
            except FileExistsError as error:
                if self._stat(path) is not None:  # else this is the repetition of a request whose answer was lost
                    raise replaced(path) from error


class Upload(NewObject):
    """An object in the making: one request if it is small, else parts that travel while the next one is filled."""

    in_flight = PARTS_IN_FLIGHT

    def __init__(self, store: ObjectStore, path: str, exclusive: bool) -> None:
        super().__init__()
        self.path = store.full_path(path)
        self.writer = os.urandom(16).hex()  # in the metadata of the object: who has written it
        self._exclusive = exclusive
        self._parts: list[Future[Any]] = []  # sent, or on their way
        self._buffer, self._filled = io.BytesIO(), 0

    def __del__(self) -> None:
        if not getattr(self, "_done", True) and self._owner == os.getpid() and not sys.is_finalizing():
            self._done = True
            if self._parts:  # not waited for: this may be the thread that would do it
                self._cancel()
                self._abort()

    def _part_size(self) -> int:
        return PART_NBYTES << len(self._parts) // 1000

    def _write(self, view: memoryview) -> None:
        while view:
            taken = view[: self._part_size() - self._filled]
            self._filled += self._buffer.write(taken)
            view = view[len(taken) :]
            if self._filled == self._part_size():
                self._send()

    def _send(self, last: bool = False) -> None:
        if not self._parts:
            self._start()
        elif len(self._parts) >= self.in_flight:
            self._parts[-self.in_flight].result()
        self._parts.append(self._send_part(len(self._parts), self._take(), last))

    def _take(self) -> bytes:
        buffer, self._buffer, self._filled = self._buffer, io.BytesIO(), 0
        return buffer.getvalue()  # no copy

    def _publish(self) -> None:
        try:
            if self._parts:
                if self._filled:
                    self._send(last=True)
                self._complete([part.result() for part in self._parts])
            else:
                self._put(self._take())
        except (FileExistsError, FileNotFoundError) as error:
            # A request whose answer was lost is repeated; the second one is then refused because of the first.
            with suppress(OSError):
                if self._writer_there() == self.writer:
                    return
            if isinstance(error, FileExistsError):
                raise file_exists(self.path) from error
            raise

    def _discard(self) -> None:
        self._take()
        if self._parts:
            # A part that is still on its way when the upload is aborted may make the server keep it.
            wait(self._parts, timeout=SETTLE_SECONDS)
            self._cancel()
            with suppress(OSError):  # what is left is for `sweep`, or for the server
                if (aborted := self._abort()) is not None:
                    aborted.result()

    def _cancel(self) -> None:
        for part in self._parts:
            part.cancel()

    def _start(self) -> None:
        """Begin an upload in parts."""

    def _abort(self) -> Future[Any] | None:
        """Let the server forget the parts, if it can."""

    if TYPE_CHECKING:
        # FileExistsError: the object is exclusive and one is there. The last part may be full, and not known to be it.
        def _put(self, data: bytes) -> None: ...
        def _send_part(self, number: int, data: bytes, last: bool) -> Future[Any]: ...
        def _complete(self, answers: Sequence[Any]) -> None: ...

        # The writer of the object that is there. OSError if there is none.
        def _writer_there(self) -> str | None: ...
