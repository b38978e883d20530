"""The one door to storage: a folder, here or in an object store, and files that appear in it only when complete.

`Store` is the folder, `NewFile` and `NewObject` are files in the making. What is particular to object stores is in
`ags_fast._objects`, which is imported with the first of their URLs.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
import time

from ags_fast._core import Descriptor, read_whole, write_whole
from ags_fast.errors import FormatError, PolicyError

TYPE_CHECKING = False  # to import typing takes longer than all of this package
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from typing import Any, Protocol, Self

    from typing_extensions import Buffer

    _Paths = list[str]  # in the classes here, list is a method

__all__ = ["Entry", "NewFile", "NewObject", "Store", "pwrite_all"]

SUFFIX = ".agstmp"  # of every temporary name: .<name>.<tag>.<16 hex digits>.agstmp
HOLD_ATTEMPTS = 20
OPEN_FOLDERS = 128  # that a store keeps open, to write into without walking to them again
NO_LOCK_SECONDS = 86_400.0  # where files cannot be locked, one that was not written to for so long has no writer


# ---------------------------------------------------------------------------------------------------------- a folder


class Entry:
    """A file of a store.

    path: relative to the store, with "/" between its parts. size: in bytes. stamp: changes when the file is replaced:
    an object's etag, or else the time of the last change, in ns. modified: that time, in seconds since the epoch.
    mode: the permission bits, of 0o777, of a local file; else None.
    """

    __slots__ = ("mode", "modified", "path", "size", "stamp")

    def __init__(self, path: str, size: int, stamp: str, modified: float, mode: int | None = None) -> None:
        self.path = path
        self.size = size
        self.stamp = stamp
        self.modified = modified
        self.mode = mode

    @classmethod
    def of(cls, path: str, info: os.stat_result) -> Entry:
        """Of a local file."""
        return cls(path, info.st_size, str(info.st_mtime_ns), info.st_mtime, info.st_mode & 0o777)

    @property
    def mtime_ns(self) -> int | None:
        """`modified` in nanoseconds, as exactly as the storage has the time; None if 64 bits cannot hold that number.

        Nobody knows the time of a file whose `modified` is 0, and whose stamp does not tell: None, too.
        """
        if self.mode is not None:
            time_ns = int(self.stamp)
        elif self.modified:
            time_ns = round(self.modified * 1000) * 1_000_000
        else:
            return None
        return time_ns if -(1 << 63) <= time_ns < 1 << 63 else None

    def __repr__(self) -> str:
        return f"Entry(path={self.path!r}, size={self.size}, stamp={self.stamp!r}, modified={self.modified!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entry) and self._all() == other._all()

    def __hash__(self) -> int:
        return hash(self._all())

    def _all(self) -> tuple[str, int, str, float, int | None]:
        return self.path, self.size, self.stamp, self.modified, self.mode


class Store:
    """A folder of files: a local path, or a URL of fsspec such as ``s3://bucket/folder`` (also ``file://``).

    Paths of files are relative to it, with "/" between their parts. One that would lead out of it is refused with
    PolicyError: by "..", as an absolute path or, where something would be written or deleted, through a link.
    storage_options: for fsspec. They may hold secrets: repr does not show them, a pickle does hold them.

    A store can be used by many threads, pickled, and used in a fork, which gets a connection of its own. Errors are the
    classes of OSError that a local file would raise.
    """

    def __init__(self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        text = os.fsdecode(url)
        path = _local_path(text)
        self.local = path is not None
        self.url = text.rstrip("/") if path is None else path
        self._above = f"{self.url.rstrip('/')}/"
        self.storage_options = dict(storage_options or {})
        self._door: _Door | None = None if path is None else _Folder(path)

    def __repr__(self) -> str:
        scheme, separator, rest = self.url.partition("://")
        host = rest.partition("/")[0]
        if separator and "@" in host:  # a password, perhaps
            rest = "***@" + host.rpartition("@")[2] + rest[len(host) :]
        return f"Store({scheme + separator + rest!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.url, self.storage_options)

    def _open(self) -> _Door:
        if self._door is None:
            from ags_fast._objects import door

            self._door = door(self.url, self.storage_options)
        return self._door

    @property
    def shared(self) -> bool:
        """Whether other processes see the same files: not so in ``memory://``."""
        return not self.url.startswith("memory:")

    def full_path(self, path: str) -> str:
        """What others call a file of this store."""
        return self._above + path

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every complete file whose path begins with `prefix`, hidden ones too, in no order. A missing folder is empty.

        One walk, or one listing in pages. Files in the making are left out. Links are followed: one that leads to a
        folder it is in is an OSError (ELOOP), one that leads nowhere is left out.
        """
        return self._open().list(prefix)

    def stat(self, path: str) -> Entry | None:
        """The file at `path`, or None."""
        return self._open().stat(_checked(path))

    def read(self, path: str, limit: int) -> bytes:
        """All of a small file; FormatError if it has more than `limit` bytes, of which it reads no more."""
        return self._open().read(_checked(path), limit)

    def create(self, path: str, data: bytes) -> None:
        """Write a file that must not be there yet (FileExistsError), and that is there completely or not at all.

        Of many processes that create one file, one succeeds. When this returns, it is on the disk. PolicyError if the
        store cannot do that.
        """
        self._open().create(_checked(path), data)

    def source(self, path: str, entry: Entry | None = None) -> Any:
        """What `AgsReader` takes to read a file: its path here, or a seekable binary file, to be closed.

        Each read of an object makes one request, of just these bytes. Who reads on and on without a gap gets bytes
        ahead, no more than he has read so far. OSError if the object is replaced meanwhile. entry: of this file, where
        it is known, saves a request.
        """
        return self._open().source(_checked(path), entry)

    def new(
        self, path: str, *, tag: str = "", exclusive: bool = False, private: bool = False, fsync: bool = False
    ) -> NewFile | NewObject:
        """A file in the making, and the folders that it is in. The arguments are those of `NewFile`.

        PolicyError if the store might show a part of it: if it can neither rename files nor discard an upload.
        """
        return self._open().new(
            _checked(path), tag=_checked_tag(tag), exclusive=exclusive, private=private, fsync=fsync
        )

    def take(self, path: str, size: int, stamp: str | None = None) -> bytes | None:
        """All of a small file of `size` bytes, in one step; with `stamp`, as `Entry` has it, if it has not changed.

        None leaves it to `open`, or `source`, which say what is wrong, if anything is: it is only quicker than they.
        """
        _checked(path)
        return self._door.take(path, size, stamp) if isinstance(self._door, _Folder) else None

    def put(self, path: str, data: bytes, *, tag: str = "", fsync: bool = False) -> None:
        """A new file with these bytes: what `new`, `write` and `publish` do, but a small one is made quicker."""
        if isinstance(self._door, _Folder) and self._door.put(_checked(path), data, fsync):
            return
        new = self.new(path, tag=tag, fsync=fsync)
        try:
            new.write(data)
            new.publish()
        finally:
            new.discard()

    def exists(self) -> bool:
        """Whether there is such a folder; in an object store, anything in it."""
        return self._open().exists()

    def check_writable(self) -> None:
        """PolicyError, before any work, if `new` would refuse each file. Makes the folder."""
        self._open().check_writable()

    def open(self, path: str) -> _ReadOnce:
        """A file to be read once, from its beginning: see `_ReadOnce`."""
        return self._open().open(_checked(path))

    def hold(self, path: str) -> Any:
        """An object that shows, while it and this process live, that they do: see `held`. None where storage cannot.

        BlockingIOError if somebody else holds it.
        """
        return self._open().hold(_checked(path))

    def held(self, path: str) -> bool | None:
        """Whether a living process holds `path`; None if nobody can tell."""
        return self._open().held(_checked(path))

    def delete(self, path: str) -> None:
        """Remove a file; that it is not there is fine."""
        self._open().delete(_checked(path))

    def remove_folder(self, path: str) -> None:
        """Remove a folder that is empty; elsewhere than here there are none."""
        self._open().remove_folder(_checked(path.rstrip("/")))

    def sweep(self, tag: str | None = None, older_than: float | None = None, *, paths: Collection[str] = ()) -> _Paths:
        """Remove what dead writers left: temporary files, unfinished uploads. Returns their paths.

        tag: only files in the making with this tag; an upload has none, so it is one to `paths` then. older_than: only
        what was not written to for so many seconds, or, an upload, begun so long ago.

        A file whose writer lives is left. Where nobody can tell, of an upload, or on a file system without locks, its
        age is all that protects it: without `older_than` that is a day, and nothing at all with a `tag`, whose writers
        must be known to be dead.
        """
        return self._open().sweep(None if tag is None else _checked_tag(tag), older_than, paths)

    def sync_folders(self, paths: Iterable[str]) -> None:
        """Bring the names of these files, and of the folders that they are in, to the disk."""
        self._open().sync_folders([_checked(path) for path in paths])


def _local_path(url: str) -> str | None:
    """The absolute path that a path or a URL means; None if it is not of this machine."""
    scheme, colon, rest = url.partition(":")
    if scheme in ("file", "local") and rest.startswith("/"):
        if rest.startswith("//"):
            host, slash, rest = rest[2:].partition("/")
            if host not in ("", "localhost"):
                raise ValueError(f"{url!r} names the host {host!r}: a path has three slashes, as in file:///folder")
            rest = slash + rest
        return os.path.abspath(rest)
    if colon and scheme[:1].isalpha() and scheme.replace("+", "").isalnum() and rest.startswith(("//", ":")):
        return None
    return os.path.abspath(url)


def _checked(path: str) -> str:
    if not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise PolicyError(f"{path!r} is no plain relative path of a file: it may lead out of the folder")
    return path


def _checked_tag(tag: str) -> str:
    if tag and not (len(tag) <= 64 and tag.isascii() and tag.replace("-", "").replace("_", "").isalnum()):
        raise ValueError(f"a tag has up to 64 letters, digits, - and _, not {tag!r}")
    return tag


def temporary_name(name: str, tag: str) -> str:
    shown = name
    if len(name) > 100 or not name.isascii():  # a name has up to 255 bytes, whatever its characters
        shown = os.fsdecode(os.fsencode(name)[:100])
    return f".{shown}.{tag}.{os.urandom(8).hex()}{SUFFIX}"


def temporary_tag(name: str) -> str | None:
    """The tag in the name of a temporary file; None if it is no such name."""
    if not (name.endswith(SUFFIX) and name.startswith(".")):
        return None
    rest, _, random = name[1 : -len(SUFFIX)].rpartition(".")
    if len(random) != 16 or not set(random) <= set("0123456789abcdef"):
        return None
    return rest.rpartition(".")[2]


if TYPE_CHECKING:

    class _ReadOnce(Protocol):
        """A file that is read once. size, stamp: as `Entry` has them."""

        size: int
        stamp: str

        def readinto(self, buffer: Buffer, /) -> int:
            """Fill the buffer, or what there is left. Returns how many bytes."""

        def changed(self) -> bool:
            """Whether it has another size or was written to since it was opened."""

        def __enter__(self) -> Self: ...
        def __exit__(self, *error: object) -> None: ...

    class _Door(Protocol):
        """What a `Store` goes through. Paths and tags have been checked."""

        def list(self, prefix: str) -> Iterator[Entry]: ...
        def stat(self, path: str) -> Entry | None: ...
        def read(self, path: str, limit: int) -> bytes: ...
        def create(self, path: str, data: bytes) -> None: ...
        def source(self, path: str, entry: Entry | None) -> Any: ...
        def new(self, path: str, *, tag: str, exclusive: bool, private: bool, fsync: bool) -> NewFile | NewObject: ...
        def exists(self) -> bool: ...
        def check_writable(self) -> None: ...
        def open(self, path: str) -> _ReadOnce: ...
        def hold(self, path: str) -> Any: ...
        def held(self, path: str) -> bool | None: ...
        def delete(self, path: str) -> None: ...
        def remove_folder(self, path: str) -> None: ...
        def sweep(self, tag: str | None, older_than: float | None, paths: Collection[str]) -> _Paths: ...
        def sync_folders(self, paths: Iterable[str]) -> None: ...


class _OpenFolder:
    """A folder that was walked to without following links out of the store. Whoever has it is not led elsewhere."""

    __slots__ = ("fd", "id", "mode", "path")

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path
        info = os.fstat(fd)
        self.id = info.st_dev, info.st_ino
        self.mode: int | None = None  # that a new file gets here, once one has got it

    def is_at(self, path: str) -> bool:
        """Whether this is still what has the path."""
        try:
            info = os.stat(path)
        except OSError:
            return False
        return (info.st_dev, info.st_ino) == self.id

    def __del__(self) -> None:
        os.close(self.fd)


class _Folder:
    """A local folder."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.made = False  # nobody needs it before something is written
        self.open_folders: dict[str, _OpenFolder] = {}

    def list(self, prefix: str) -> Iterator[Entry]:
        folder, slash, stem = prefix.rpartition("/")
        # Folders to walk: their paths, how to show them, and where a link was followed on the way to them.
        todo: list[tuple[str, str, tuple[str, ...]]] = [(os.path.join(self.root, folder), folder + slash, ())]
        while todo:
            path, shown, links = todo.pop()
            try:
                scan = os.scandir(path)
            except FileNotFoundError:
                continue
            with scan:
                for found in scan:
                    name = found.name
                    if stem and not name.startswith(stem):
                        continue
                    try:
                        is_folder = found.is_dir()
                        info = found.stat()
                    except FileNotFoundError:  # gone meanwhile, or a link to nothing
                        continue
                    except OSError as error:
                        if error.errno == errno.ELOOP:  # a link to itself
                            continue
                        raise
                    if is_folder:
                        below = _follow(found, links) if found.is_symlink() else links
                        todo.append((found.path, f"{shown}{name}/", below))
                        continue
                    if stat.S_ISREG(info.st_mode) and (name[0] != "." or temporary_tag(name) is None):
                        yield Entry.of(shown + name, info)
            stem = ""

    def stat(self, path: str) -> Entry | None:
        try:
            info = os.stat(os.path.join(self.root, path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(info.st_mode):
            return None
        return Entry.of(path, info)

    def read(self, path: str, limit: int) -> bytes:
        with open(os.path.join(self.root, path), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            data = b""
            while size <= limit and (more := file.read(limit + 1 - len(data))):  # it may grow
                data += more
                size = max(size, len(data))
        if size > limit:
            raise FormatError(f"{path} has {size} bytes, and such a file may have {limit}")
        return data

    def create(self, path: str, data: bytes) -> None:
        place = self._place(path, make=True)
        if os.path.islink(place):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place)
        with NewFile(place, exclusive=True, fsync=True) as new:
            new.write(data)
            new.publish()
        self.sync_folders([path])

    def source(self, path: str, entry: Entry | None) -> str:
        return os.path.join(self.root, path)

    def new(self, path: str, *, tag: str, exclusive: bool, private: bool, fsync: bool) -> NewFile:
        below, _, name = path.rpartition("/")
        folder = self.open_folders.get(below)
        if folder is None or not folder.is_at(folder.path):
            folder = self._enter(below, path)
        place = f"{folder.path}/{name}"
        found = _stat(name, folder.fd)
        if found is not None and stat.S_ISLNK(found.st_mode):  # its target is what gets replaced
            place = self._inside(place, path)
            return NewFile(place, tag=tag, exclusive=exclusive, private=private, fsync=fsync)
        return NewFile(place, tag=tag, exclusive=exclusive, private=private, fsync=fsync, within=(folder, found))

    def take(self, path: str, size: int, stamp: str | None) -> bytes | None:
        try:
            return read_whole(f"{self.root}/{path}", size, None if stamp is None else int(stamp))
        except (OverflowError, ValueError):  # no stamp that a file has here
            return None

    def put(self, path: str, data: bytes, fsync: bool) -> bool:
        """Whether it could be done in one step."""
        below, _, name = path.rpartition("/")
        folder = self.open_folders.get(below) or self._enter(below, path)
        if not write_whole(folder.fd, folder.path, name, data, fsync):
            return False
        if fsync:
            _fsync_folder(folder.path)
        return True

    def _enter(self, below: str, path: str) -> _OpenFolder:
        folder = self._walk(below, path)
        if len(self.open_folders) >= OPEN_FOLDERS:
            self.open_folders = {}  # one that is in use stays open
        self.open_folders[below] = folder
        return folder

    def _walk(self, below: str, path: str) -> _OpenFolder:
        """Open a folder to write into, and make what is missing on the way."""
        at, flags = self.root, os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
        if not self.made:
            os.makedirs(at, exist_ok=True)
            self.made = True
        fd = os.open(at, flags)
        try:
            for name in below.split("/") if below else ():
                at = f"{at}/{name}"
                try:
                    found = os.lstat(name, dir_fd=fd)
                except FileNotFoundError:
                    try:
                        os.mkdir(name, dir_fd=fd)
                    except FileExistsError:
                        pass
                else:
                    if stat.S_ISLNK(found.st_mode):
                        at = self._inside(at, path)
                        name = at
                above, fd = fd, os.open(name, flags | os.O_NOFOLLOW, dir_fd=fd)
                os.close(above)
        except BaseException:
            os.close(fd)
            raise
        return _OpenFolder(fd, at)

    def exists(self) -> bool:
        return os.path.isdir(self.root)

    def check_writable(self) -> None:
        os.makedirs(self.root, exist_ok=True)
        self.made = True

    def open(self, path: str) -> _ReadOnce:
        return _Sequential(os.path.join(self.root, path))

    def hold(self, path: str) -> Any:
        for _ in range(HOLD_ATTEMPTS):
            try:
                place = self._place(path, make=True)
                file = io.FileIO(place, "ab")
                locked = _lock(file.fileno())
                if locked is None:
                    file.close()
                    return None
                if locked and os.path.samestat(os.fstat(file.fileno()), os.stat(place)):
                    return file
                file.close()
            except FileNotFoundError:  # removed meanwhile, or its folder
                continue
            time.sleep(0.01)  # who only asks, in `held`, locks it for a moment
        raise BlockingIOError(errno.EWOULDBLOCK, "a living process holds it", place)

    def held(self, path: str) -> bool | None:
        try:
            with open(os.path.join(self.root, path), "rb", buffering=0) as file:
                locked = _lock(file.fileno())
        except FileNotFoundError:
            return False
        return None if locked is None else not locked

    def remove_folder(self, path: str) -> None:
        try:
            os.rmdir(self._place(path, make=False))
        except OSError:  # not empty, or not there
            pass

    def delete(self, path: str) -> None:
        try:
            os.unlink(self._place(path, make=False))
        except (FileNotFoundError, NotADirectoryError):
            pass

    def _place(self, path: str, make: bool) -> str:
        """The absolute path of a file that may be written or deleted. `make`: its folders, where they are missing."""
        if make and not self.made:
            os.makedirs(self.root, exist_ok=True)
            self.made = True
        *folders, name = path.split("/")
        at = self.root
        for folder in folders:
            at = f"{at}/{folder}"
            try:
                info = os.lstat(at)
            except FileNotFoundError:
                if make:
                    try:
                        os.mkdir(at)
                    except FileExistsError:
                        self._inside(at, path)
            else:
                if stat.S_ISLNK(info.st_mode):
                    at = self._inside(at, path)
        return f"{at}/{name}"

    def _inside(self, at: str, path: str) -> str:
        """Where the links in `at` lead to: into this folder."""
        root, at = os.path.realpath(self.root), os.path.realpath(at)
        if os.path.commonpath([root, at]) != root:
            raise PolicyError(f"{path!r} leads out of {self.root!r} through a link, to {at!r}")
        return at

    def sweep(self, tag: str | None, older_than: float | None, paths: Collection[str]) -> _Paths:
        age = older_than or 0.0
        age_unlocked = NO_LOCK_SECONDS if tag is None and older_than is None else age
        swept: _Paths = []
        todo = [self.root]
        while todo:
            try:
                scan = os.scandir(todo.pop())
            except FileNotFoundError:
                continue
            with scan:
                for found in scan:
                    if found.is_dir(follow_symlinks=False):
                        todo.append(found.path)
                        continue
                    of = temporary_tag(found.name)
                    if of is None or tag not in (None, of) or not found.is_file(follow_symlinks=False):
                        continue
                    if _sweep_file(found.path, age, age_unlocked):
                        swept.append(os.path.relpath(found.path, self.root))
        return swept

    def sync_folders(self, paths: Iterable[str]) -> None:
        folders = {self.root}
        for path in paths:
            folder = path.rpartition("/")[0]
            while folder and (full := os.path.join(self.root, folder)) not in folders:
                folders.add(full)
                folder = folder.rpartition("/")[0]
        for folder in sorted(folders, key=len, reverse=True):
            _fsync_folder(folder)
        try:
            _fsync_folder(os.path.dirname(self.root))
        except PermissionError:  # one may be allowed to pass through a folder, but not to open it
            pass


class _Sequential:
    """A local file that is read once."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # of a pipe, it would wait for a writer
        self._descriptor = Descriptor(fd)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            self._descriptor.close()
            raise OSError(errno.EINVAL, "not a regular file", path)
        self.size, self.stamp = info.st_size, str(info.st_mtime_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._descriptor.close()

    def readinto(self, buffer: Buffer, /) -> int:
        view, filled = memoryview(buffer), 0
        with self._descriptor as fd:
            while filled < len(view) and (got := os.readv(fd, [view[filled:]])):
                filled += got
        return filled

    def changed(self) -> bool:
        with self._descriptor as fd:
            info = os.fstat(fd)
        return (info.st_size, str(info.st_mtime_ns)) != (self.size, self.stamp)


def _follow(link: os.DirEntry[str], links: tuple[str, ...]) -> tuple[str, ...]:
    """`links` and the place of this one, a link to a folder. OSError if that is a folder one came through."""
    target, place = os.path.realpath(link.path), os.path.realpath(os.path.dirname(link.path))
    if any(target == at or at.startswith(target.rstrip("/") + "/") for at in (*links, place)):
        raise OSError(errno.ELOOP, "this link leads back into a folder that it is in", link.path)
    return (*links, place)


def _sweep_file(path: str, age: float, age_unlocked: float) -> bool:
    """Remove a temporary file of this age, unless its writer lives. Whether it has been removed."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):  # published or swept meanwhile, or somebody else's
        return False
    try:
        locked = _lock(fd)
        least = age if locked else age_unlocked
        if locked is False or (least > 0 and time.time() - os.fstat(fd).st_mtime < least):
            return False
        os.unlink(path)
    except FileNotFoundError:
        return False
    finally:
        os.close(fd)
    return True


def _lock(fd: int) -> bool | None:
    """Lock a file until it is closed. False: somebody else has; None: this file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


# ---------------------------------------------------------------------------------------------------------- new files


class NewFile:
    """A file in the making. It has a temporary name beside `path` until `publish`, and none after `discard`.

    tag: a part of the temporary name, to `sweep` by. exclusive: refuse, at the beginning and again in the end, a path
    that exists (FileExistsError). private: nobody else may read it before it is published. fsync: `publish` returns
    only when file and folder are on the disk.

    A ``with`` block, however it is left, and a collection discard what has not been published. The file is locked while
    its writer lives: so `sweep` knows. A path that is there and is no regular file, such as ``/dev/null`` or a pipe,
    cannot be replaced; it is written directly. A process forked meanwhile can neither publish nor discard: the file is
    its parent's.

    Another thread may discard the file while one writes, which then raises ValueError or goes on into what has no name.
    To publish what another thread is writing discards it, too (ValueError).
    """

    _descriptor: Descriptor | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tag: str = "",
        exclusive: bool = False,
        private: bool = False,
        fsync: bool = False,
        within: tuple[_OpenFolder, os.stat_result | None] | None = None,
    ) -> None:
        self.path = os.fsdecode(path)
        if not self.path.startswith("/"):  # the working directory may change
            self.path = os.path.join(os.getcwd(), self.path)
        self._exclusive = exclusive
        self._fsync = fsync
        self._owner = os.getpid()
        self._temporary: str | None = None
        self._folder: _OpenFolder | None = None
        self._folder_fd: int | None = None  # what the temporary name, and `_name`, are relative to
        self._name = ""
        if within is not None:
            self._folder, existing = within
            self._folder_fd = self._folder.fd
            self._name = self.path.rpartition("/")[2]
        else:
            existing = _stat(self.path)
            if existing is not None and stat.S_ISLNK(existing.st_mode):  # its target is what gets replaced
                self.path = os.path.realpath(self.path)
                existing = _stat(self.path)
            self._name = self.path
        if existing is not None and exclusive:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path)
        if existing is not None and not stat.S_ISREG(existing.st_mode):
            self._descriptor = Descriptor(os.open(self.path, os.O_WRONLY | os.O_CLOEXEC))  # a folder: IsADirectoryError
            return
        mode = self._folder.mode if self._folder is not None else None
        if existing is not None:
            mode = stat.S_IMODE(existing.st_mode)
        elif private and mode is None:
            mode = self._make(tag, 0o666)  # what the umask and the folder say, which only a file can tell
            self.discard()
        self._made = self._make(tag, 0o600 if private else 0o666)
        self._mode = self._made if existing is None and not private else mode or 0
        if self._folder is not None and existing is None:
            self._folder.mode = self._mode

    def _make(self, tag: str, mode: int) -> int:
        """Make the temporary file and lock it. Returns its mode."""
        folder, slash, name = self._name.rpartition("/")
        while True:
            temporary = folder + slash + temporary_name(name, tag)
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=self._folder_fd)
            self._descriptor = Descriptor(fd)
            self._temporary = temporary
            locked = _lock(fd)
            info = os.fstat(fd)
            if locked is not False and info.st_nlink:
                return stat.S_IMODE(info.st_mode)
            self.discard()  # a sweep was there before the lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def __del__(self) -> None:
        if self._descriptor is not None:
            self.discard()

    @property
    def descriptor(self) -> Descriptor:
        """Its file, to be written by position. Closed when it is published or discarded."""
        assert self._descriptor is not None
        return self._descriptor

    @property
    def positional(self) -> bool:
        """Whether it can be written at any position."""
        return self._temporary is not None

    def write(self, data: Buffer, /) -> int:
        """Write all of a bytes-like object where the last one ended. Returns its size in bytes."""
        view = memoryview(data).cast("B")
        nbytes = len(view)
        with self.descriptor as fd:
            while view:
                view = view[os.write(fd, view) :]
        return nbytes

    def publish(self) -> None:
        """Give the file its name and close it. If that fails, it is discarded."""
        if self._owner != os.getpid() or self.descriptor.closed:
            return
        locked = -1
        try:
            if self._temporary is not None:
                folder = self._folder_fd
                with self.descriptor as fd:
                    if self._mode != self._made:
                        os.fchmod(fd, self._mode)
                    if self._fsync:
                        os.fsync(fd)
                    locked = os.dup(fd)
            if not self.descriptor.close():  # before the name: some file systems report a failed write only here
                raise ValueError("this file is being written by another thread: it is discarded")
            if self._temporary is not None:
                if self._exclusive:
                    self._link(self._temporary)
                else:
                    os.replace(self._temporary, self._name, src_dir_fd=folder, dst_dir_fd=folder)
                self._temporary = None
                if self._fsync:
                    _fsync_folder(os.path.dirname(self.path))
        finally:
            if locked >= 0:
                os.close(locked)  # after the name, or a sweep might take the file for a dead writer's
            self.discard()

    def _link(self, temporary: str) -> None:
        folder, name = self._folder_fd, self._name
        try:
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)  # unlike a rename, it never replaces
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: claim the name with an empty file, then replace that
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder))
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        else:
            os.unlink(temporary, dir_fd=folder)

    def discard(self) -> None:
        """Close the file and remove it, unless it has been published. Does nothing the second time."""
        if self._descriptor is not None:
            self._descriptor.close()
        if self._temporary is not None and self._owner == os.getpid():
            temporary, self._temporary = self._temporary, None
            try:
                os.unlink(temporary, dir_fd=self._folder_fd)
            except FileNotFoundError:
                pass


class NewObject:
    """An object in the making: nothing is at its path until `publish`, and nothing is after `discard`.

    A ``with`` block, however it is left, and a collection discard what has not been published. A process forked
    meanwhile can neither write, publish nor discard: the object is its parent's.
    """

    path: str

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._done = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}{' done' if self._done else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            self.discard()

    def write(self, data: Buffer, /) -> int:
        """Write all of a bytes-like object where the last one ended. Returns its size in bytes."""
        if self._owner != os.getpid() or self._done:
            raise ValueError("this object is complete, discarded or another process's")
        view = memoryview(data).cast("B")
        self._write(view)
        return view.nbytes

    def publish(self) -> None:
        """Complete the object: it is at its path, and on the disk. If that fails, it is discarded."""
        if self._owner != os.getpid() or self._done:
            return
        try:
            self._publish()
            self._done = True
        finally:
            self.discard()

    def discard(self) -> None:
        """Give the object up, unless it has been published. Does nothing the second time."""
        if self._owner == os.getpid() and not self._done:
            self._done = True
            self._discard()

    def _write(self, view: memoryview) -> None:
        raise NotImplementedError

    def _publish(self) -> None:
        raise NotImplementedError

    def _discard(self) -> None:
        raise NotImplementedError


def _stat(path: str, folder: int | None = None) -> os.stat_result | None:
    try:
        return os.lstat(path, dir_fd=folder)
    except FileNotFoundError:
        return None


def pwrite_all(file: Descriptor, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, or raise."""
    with file as fd:
        while data:
            written = os.pwrite(fd, data, offset)
            data = data[written:]
            offset += written


def _fsync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
