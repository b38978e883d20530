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
from contextlib import suppress

from ags_fast._core import Descriptor, open_below, open_file, read_whole, write_whole
from ags_fast.errors import FormatError, PolicyError

TYPE_CHECKING = False  # to import typing takes longer than all of this package
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from typing import Any, Protocol, Self

    from typing_extensions import Buffer

    # In the classes here, list is a method.
    _Paths = list[str]
    _Entries = list["Entry"]
    _LeftOut = list[tuple[str, str, str]]

__all__ = [
    "Entry",
    "LocalFile",
    "NewFile",
    "NewObject",
    "NotAFileError",
    "Store",
    "file_at",
    "folder_of",
    "local_path",
    "open_regular",
    "pwrite_all",
]

SUFFIX = ".agstmp"  # of every temporary name: .<name>.<tag>.<16 hex digits>.agstmp
HOLD_ATTEMPTS = 20
MADE_FOLDERS = 4096  # that a store remembers to have made, or found
PATH_NBYTES = 4095  # of a path, from the root of the system: what is longer nobody else could open
LINKS = 40  # that are followed on the way to one file, as the system has it
NO_LOCK_SECONDS = 86_400.0  # where files cannot be locked, one that was not written to for so long has no writer

A_PATH = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK) | os.O_CLOEXEC
A_FOLDER = A_PATH | os.O_DIRECTORY
LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # of a pipe, it would wait for a writer


class NotAFileError(OSError):
    """A pipe, a device, a socket or a folder is where a file should be."""


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
    PolicyError: by "..", as an absolute path or through a link. So it is also if somebody renames folders meanwhile.
    Links that stay inside are followed, and so are those that the folder's own path goes through.
    storage_options: for fsspec. They may hold secrets: repr does not show them, a pickle does hold them.
    follow: what is read, never what is written or deleted, may be wherever links lead.

    A store can be used by many threads, pickled, and used in a fork, which gets a connection of its own. Errors are the
    classes of OSError that a local file would raise.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        follow: bool = False,
    ) -> None:
        text = os.fsdecode(url)
        path = _local_path(text)
        self.local = path is not None
        self.url = text.rstrip("/") if path is None else path
        if self.url.endswith(":"):
            self.url += "//"  # the root of a file system, such as memory://
        self._above = self.url if self.url.endswith("/") else f"{self.url}/"
        self.storage_options = dict(storage_options or {})
        self.follow = follow
        self._door: _Door | None = None if path is None else _Folder(path, follow)

    def __repr__(self) -> str:
        scheme, separator, rest = self.url.partition("://")
        host = rest.partition("/")[0]
        if separator and "@" in host:  # a password, perhaps
            rest = "***@" + host.rpartition("@")[2] + rest[len(host) :]
        return f"Store({scheme + separator + rest!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.url, self.storage_options, self.follow)

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

        One walk, or one listing in pages. Files in the making are left out, and so are links that lead out, nowhere, or
        to a folder that they are in; see `list_all`.
        """
        return self._open().list(prefix)

    def list_all(self) -> tuple[_Entries, _LeftOut]:
        """What `list` has, and what it leaves out: path, kind and reason of each.

        The kinds are "OutsideLink", "DanglingLink", "LinkLoop", "SpecialFile" (pipes, sockets, devices), "EmptyFolder"
        (its path ends in "/") and "TemporaryFile".
        """
        return self._open().list_all()

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
        """What `AgsReader` takes to read a file: a `LocalFile` here, or a seekable binary file, to be closed.

        Each read of an object makes one request, of just these bytes. Who reads on and on without a gap gets bytes
        ahead, no more than he has read so far. OSError if the object is replaced meanwhile. entry: of this file, where
        it is known, saves a request.
        """
        return self._open().source(_checked(path), entry)

    def new(
        self,
        path: str,
        *,
        tag: str = "",
        exclusive: bool = False,
        private: bool = False,
        fsync: bool = False,
        mode: int | None = None,
        mtime_ns: int | None = None,
    ) -> NewFile | NewObject:
        """A file in the making, and the folders that it is in. The arguments are those of `NewFile`.

        PolicyError if the store might show a part of it: if it can neither rename files nor discard an upload.
        NotAFileError if what is there is no regular file. An object has neither mode nor mtime_ns.
        """
        return self._open().new(
            _checked(path),
            tag=_checked_tag(tag),
            exclusive=exclusive,
            private=private,
            fsync=fsync,
            mode=mode,
            mtime_ns=mtime_ns,
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
        """Remove a file; that it is not there is fine. Of a link, it is the link that is removed."""
        self._open().delete(_checked(path), None)

    def delete_read(self, entry: Entry) -> None:
        """Remove the file that was read as `entry`.

        OSError if the file has changed since, or if `path` is a link, and so what was read is elsewhere.
        """
        self._open().delete(_checked(entry.path), entry)

    def remove_folder(self, path: str) -> None:
        """Remove a folder that is empty; elsewhere than here there are none."""
        self._open().remove_folder(_checked(path.rstrip("/")))

    def remove_empty_folders(self, path: str) -> None:
        """Remove those that are in this folder; elsewhere than here there are none."""
        if isinstance(door := self._open(), _Folder):
            door.remove_empty_folders(_checked(path.rstrip("/")))

    def sweep(
        self,
        tag: str | None = None,
        older_than: float | None = None,
        *,
        paths: Collection[str] = (),
        below: str = "",
    ) -> _Paths:
        """Remove what dead writers left: temporary files, unfinished uploads. Returns their paths.

        below: in this folder only, which ends in a slash.
        tag: only files in the making with this tag; an upload has none, so it is one to `paths` then. older_than: only
        what was not written to for so many seconds, or, an upload, begun so long ago.

        A file whose writer lives is left. Where nobody can tell, of an upload, or on a file system without locks, its
        age is all that protects it: without `older_than` that is a day, and nothing at all with a `tag`, whose writers
        must be known to be dead.
        """
        return self._open().sweep(None if tag is None else _checked_tag(tag), older_than, paths, below)

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


def local_path(url: str | os.PathLike[str]) -> str | None:
    """The path that a path or a URL means, and a path as it is given; None for a URL that is not of this machine."""
    text = os.fsdecode(url)
    path = _local_path(text)
    return text if path == os.path.abspath(text) else path


def folder_of(path: str) -> str | None:
    """The folder, or URL of one, that a file is in; None if this cannot be a file's path."""
    folder, slash, name = path.rpartition("/")
    if not name or folder.endswith(":/"):  # "s3://bucket"
        return None
    if not folder or folder.endswith("://"):
        folder += slash  # a root is nothing but this slash
    return folder or "."


def file_at(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> tuple[Store, str]:
    """The store that a file's URL, or path, leads to, and the file's name there. ValueError if it is no file's."""
    text = os.fsdecode(url)
    chain, colons, last = "", "", text
    if "::" in text:  # a URL of fsspec through others: the first one that has a path has the file's
        chain, colons, last = text.partition("::")
        if "://" in chain:
            chain, colons, last = "", "", chain
    rest = text[len(chain) + len(colons) + len(last) :]
    rooted = "::" in text or last.startswith("memory://")  # elsewhere the first name is a bucket's
    folder = f"{last.rpartition('/')[0]}/" if rooted else folder_of(last)
    name = last.rpartition("/")[2]
    if folder is None or not name:
        raise ValueError(f"{text!r} is no path of a file")
    return Store(chain + colons + folder + rest, storage_options), name


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
        def list_all(self) -> tuple[_Entries, _LeftOut]: ...
        def stat(self, path: str) -> Entry | None: ...
        def read(self, path: str, limit: int) -> bytes: ...
        def create(self, path: str, data: bytes) -> None: ...
        def source(self, path: str, entry: Entry | None) -> Any: ...
        def new(
            self,
            path: str,
            *,
            tag: str,
            exclusive: bool,
            private: bool,
            fsync: bool,
            mode: int | None,
            mtime_ns: int | None,
        ) -> NewFile | NewObject: ...
        def exists(self) -> bool: ...
        def check_writable(self) -> None: ...
        def open(self, path: str) -> _ReadOnce: ...
        def hold(self, path: str) -> Any: ...
        def held(self, path: str) -> bool | None: ...
        def delete(self, path: str, read: Entry | None) -> None: ...
        def remove_folder(self, path: str) -> None: ...
        def sweep(self, tag: str | None, older_than: float | None, paths: Collection[str], below: str) -> _Paths: ...
        def sync_folders(self, paths: Iterable[str]) -> None: ...


class _OpenFolder:
    """A folder that was opened below another. Whoever has it is not led elsewhere, whatever becomes of its path."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class LocalFile:
    """A file of a local store, as a source: `open` stays in the store, its path, as `os.fspath` has it, does not."""

    __slots__ = ("_folder", "_path")

    def __init__(self, folder: _Folder, path: str) -> None:
        self._folder = folder
        self._path = path

    def __fspath__(self) -> str:
        return f"{self._folder.root}/{self._path}"

    def open(self, length: int | None, small: int) -> tuple[Descriptor | None, int, bytes]:
        """As `ags_fast._core.open_file` opens a path. NotAFileError if it is no regular file."""
        root = None if self._folder.follow else self._folder.root
        try:
            descriptor, size, data = open_file(os.fspath(self) if root is None else self._path, length, small, root)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENXIO):
                raise
            fd, info = self._folder.open_regular(self._path)
            return Descriptor(fd), info.st_size, b""
        if descriptor is not None and size < 0:
            descriptor.close()
            raise _not_a_file(os.fspath(self))
        return descriptor, size, data


class _Folder:
    """A local folder. What is opened, made or removed is so below it, by descriptors of folders: no path is checked
    first and followed then, when somebody may have put a link into it."""

    def __init__(self, root: str, follow: bool = False) -> None:
        self.root = root
        self.follow = follow  # links out of it, to read
        self.made = False  # nobody needs it before something is written
        self.made_folders: set[str] = set()

    def _open(self, path: str, flags: int) -> int:
        """Open what is there; PolicyError if a link leads out. "" is this folder."""
        try:
            return open_below(self.root, path or ".", flags, 0)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        folder, name = self._resolve(path)
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder.fd)

    def _open_to_read(self, path: str, flags: int) -> int:
        return os.open(f"{self.root}/{path}", flags) if self.follow else self._open(path, flags)

    def open_regular(self, path: str) -> tuple[int, os.stat_result]:
        """The descriptor of a file to read, and what it is. NotAFileError if it is no regular one; it never blocks."""
        try:
            fd = self._open_to_read(path, READ)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a socket
                raise _not_a_file(f"{self.root}/{path}") from None
            raise
        return _regular(fd, f"{self.root}/{path}")

    def _resolve(self, path: str) -> tuple[_OpenFolder, str]:
        """The folder that a path leads to through links, and the name there, which is no link; it may be missing.

        Each step is from an open folder to the next, and a link is not followed but read.
        """
        folders = [_OpenFolder(os.open(self.root, A_FOLDER))]
        todo = path.split("/")[::-1]
        links = 0
        while todo:
            name = todo.pop()
            if name in ("", "."):
                continue
            if name == "..":
                if len(folders) == 1:
                    raise self._leads_out(path, "..")
                folders.pop()
                continue
            found = _stat(name, folders[-1].fd)
            if found is not None and stat.S_ISLNK(found.st_mode):
                links += 1
                if links > LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), f"{self.root}/{path}")
                try:
                    target = os.readlink(name, dir_fd=folders[-1].fd)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    todo.append(name)  # somebody has just put something else there
                    continue
                if target.startswith("/"):
                    rest = self._below(target)
                    if rest is None:
                        raise self._leads_out(path, target)
                    target = rest
                    del folders[1:]
                todo += target.split("/")[::-1]
            elif todo:
                try:
                    folders.append(_OpenFolder(os.open(name, A_FOLDER | os.O_NOFOLLOW, dir_fd=folders[-1].fd)))
                except NotADirectoryError:
                    links += 1
                    if found is None or not stat.S_ISDIR(found.st_mode) or links > LINKS:
                        raise
                    todo.append(name)
            else:
                return folders[-1], name
        return folders[-1], "."

    def _below(self, target: str) -> str | None:
        """What an absolute path is relative to this folder; None if it leads elsewhere."""
        for root in (self.root, os.path.realpath(self.root)):
            if target == root or target.startswith(root.rstrip("/") + "/"):
                return target[len(root) :].lstrip("/")
        return None

    def _leads_out(self, path: str, target: str) -> PolicyError:
        return PolicyError(f"{path!r} leads out of {self.root!r} through a link, to {target!r}")

    def _folder(self, path: str, make: bool) -> _OpenFolder:
        """A folder to write into, or to delete from. make: it, and what is missing on the way."""
        if make and not self.made:
            os.makedirs(self.root, exist_ok=True)
            self.made = True
        try:
            return _OpenFolder(self._open(path, A_FOLDER))
        except FileNotFoundError:
            if not make:
                raise
        above, at = _OpenFolder(self._open("", A_FOLDER)), ""
        for name in path.split("/"):
            try:
                os.mkdir(name, dir_fd=above.fd)
            except FileExistsError:
                pass
            at = f"{at}/{name}" if at else name
            above = _OpenFolder(self._open(at, A_FOLDER))
        return above

    def list(self, prefix: str) -> Iterator[Entry]:
        return self._walk(prefix, None)

    def list_all(self) -> tuple[_Entries, _LeftOut]:
        left_out: _LeftOut = []
        return sorted(self._walk("", left_out), key=lambda entry: entry.path), sorted(left_out)

    def _walk(self, prefix: str, left_out: _LeftOut | None) -> Iterator[Entry]:
        folder, slash, stem = prefix.rpartition("/")
        # Folders to walk: their paths, and which ones they are in: (id, those above) of each on the way.
        todo: list[tuple[str, tuple[Any, ...]]] = [(folder + slash, ())]
        while todo:
            shown, above = todo.pop()
            try:
                fd = self._open_to_read(shown.rstrip("/"), LISTED)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except PolicyError:
                if not above:
                    raise
                if left_out is not None:  # it was a folder a moment ago
                    left_out.append((shown.rstrip("/"), "OutsideLink", _LINKS["OutsideLink"]))
                continue
            try:
                info = os.fstat(fd)
                here = ((info.st_dev, info.st_ino), above)
                empty = True
                with os.scandir(fd) as scan:
                    for found in scan:
                        empty = False
                        name = found.name
                        if stem and not name.startswith(stem):
                            continue
                        if found.is_symlink():
                            kind, what = self._behind(shown + name, fd, name, here)
                        elif found.is_dir(follow_symlinks=False):
                            kind, what = "", None
                        else:
                            try:
                                kind, what = "", found.stat(follow_symlinks=False)
                            except FileNotFoundError:  # gone meanwhile
                                continue
                        if what is None and not kind:
                            todo.append((f"{shown}{name}/", here))
                        elif what is not None and stat.S_ISREG(what.st_mode):
                            if name[0] != "." or temporary_tag(name) is None:
                                yield Entry.of(shown + name, what)
                            elif left_out is not None:
                                left_out.append(
                                    (shown + name, "TemporaryFile", "a file in the making, or left by a dead job")
                                )
                        elif left_out is not None:
                            if what is not None:
                                left_out.append(
                                    (shown + name, "SpecialFile", f"{_kind(what)}, which has no content to read")
                                )
                            else:
                                left_out.append((shown + name, kind, _LINKS[kind]))
                if empty and shown and left_out is not None:
                    left_out.append((shown, "EmptyFolder", "an empty folder: a dataset has files only"))
            finally:
                os.close(fd)
            stem = ""

    def _behind(self, path: str, folder: int, name: str, here: tuple[Any, ...]) -> tuple[str, os.stat_result | None]:
        """What a link leads to: ("", its stat), of a folder ("", None); or why it leads to nothing of this store."""
        try:
            fd = os.open(name, A_PATH, dir_fd=folder) if self.follow else self._open(path, A_PATH)
        except PolicyError:
            return "OutsideLink", None
        except (FileNotFoundError, NotADirectoryError):
            return "DanglingLink", None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link to itself
                return "LinkLoop", None
            raise
        info = os.fstat(fd)
        os.close(fd)
        if not stat.S_ISDIR(info.st_mode):
            return "", info
        while here:
            if here[0] == (info.st_dev, info.st_ino):
                return "LinkLoop", None
            here = here[1]
        return "", None

    def stat(self, path: str) -> Entry | None:
        try:
            fd = self._open_to_read(path, A_PATH)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # so nothing has that name
                return None
            raise
        try:
            info = os.fstat(fd)
        finally:
            os.close(fd)
        return Entry.of(path, info) if stat.S_ISREG(info.st_mode) else None

    def read(self, path: str, limit: int) -> bytes:
        fd, info = self.open_regular(path)
        with io.FileIO(fd) as file:
            size = info.st_size
            data = b""
            while size <= limit and (more := file.read(limit + 1 - len(data))):  # it may grow
                data += more
                size = max(size, len(data))
        if size > limit:
            raise FormatError(f"{path} has {size} bytes, and such a file may have {limit}")
        return data

    def create(self, path: str, data: bytes) -> None:
        with self.new(path, exclusive=True, fsync=True) as new:
            new.write(data)
            new.publish()
        self.sync_folders([path])

    def source(self, path: str, entry: Entry | None) -> LocalFile:
        return LocalFile(self, path)

    def new(
        self,
        path: str,
        *,
        tag: str = "",
        exclusive: bool = False,
        private: bool = False,
        fsync: bool = False,
        mode: int | None = None,
        mtime_ns: int | None = None,
    ) -> NewFile:
        if self._is_too_long(path):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), f"{self.root}/{path}")
        below, _, name = path.rpartition("/")
        folder = self._folder(below, make=True)
        found = _stat(name, folder.fd)
        if found is not None and not exclusive and stat.S_ISLNK(found.st_mode):  # its target is what gets replaced
            folder, name = self._resolve(path)
            found = _stat(name, folder.fd)
        return NewFile(
            f"{self.root}/{path}",
            tag=tag,
            exclusive=exclusive,
            private=private,
            fsync=fsync,
            mode=mode,
            mtime_ns=mtime_ns,
            within=(folder, name, found),
        )

    def _is_too_long(self, path: str) -> bool:
        """By descriptors of folders it could be written, and then not be read by its path."""
        whole = f"{self.root}/{path}"
        return 4 * len(whole) > PATH_NBYTES and len(os.fsencode(whole)) > PATH_NBYTES

    def take(self, path: str, size: int, stamp: str | None) -> bytes | None:
        try:
            mtime_ns = None if stamp is None else int(stamp)
            if self.follow:
                return read_whole(None, f"{self.root}/{path}", size, mtime_ns)
            return read_whole(self.root, path, size, mtime_ns)
        except (OverflowError, ValueError):  # no stamp that a file has here
            return None

    def put(self, path: str, data: bytes, fsync: bool) -> bool:
        """Whether it could be done in one step."""
        below, _, name = path.rpartition("/")
        if self._is_too_long(path):
            return False
        if below not in self.made_folders:
            self._folder(below, make=True)
            if len(self.made_folders) >= MADE_FOLDERS:
                self.made_folders = set()
            self.made_folders.add(below)
        if not write_whole(self.root, below or ".", name, data, fsync):
            return False
        if fsync:
            self._sync(below)
        return True

    def exists(self) -> bool:
        return os.path.isdir(self.root)

    def check_writable(self) -> None:
        os.makedirs(self.root, exist_ok=True)
        self.made = True

    def open(self, path: str) -> _ReadOnce:
        return _Sequential(*self.open_regular(path))

    def hold(self, path: str) -> Any:
        below, _, name = path.rpartition("/")
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        for _ in range(HOLD_ATTEMPTS):
            try:
                folder = self._folder(below, make=True)
                fd, info = _regular(os.open(name, flags, 0o666, dir_fd=folder.fd), f"{self.root}/{path}")
                file = io.FileIO(fd, "ab")
                locked = _lock(fd)
                if locked is None:
                    file.close()
                    return None
                if locked and os.path.samestat(info, os.lstat(name, dir_fd=folder.fd)):
                    return file
                file.close()
            except FileNotFoundError:  # removed meanwhile, or its folder
                continue
            time.sleep(0.01)  # who only asks, in `held`, locks it for a moment
        raise BlockingIOError(errno.EWOULDBLOCK, "a living process holds it", f"{self.root}/{path}")

    def held(self, path: str) -> bool | None:
        try:
            fd, _ = self.open_regular(path)
        except FileNotFoundError:
            return False
        try:
            locked = _lock(fd)
        finally:
            os.close(fd)
        return None if locked is None else not locked

    def remove_folder(self, path: str) -> None:
        below, _, name = path.rpartition("/")
        try:
            folder = self._folder(below, make=False)
            os.rmdir(name, dir_fd=folder.fd)
        except OSError:  # not empty, or not there
            pass

    def remove_empty_folders(self, path: str) -> None:
        try:
            fd = self._open(path, LISTED)
        except (FileNotFoundError, NotADirectoryError, PolicyError):
            return
        try:
            for name in os.listdir(fd):
                with suppress(OSError):  # no folder, not empty, or not there any more
                    os.rmdir(name, dir_fd=fd)
        finally:
            os.close(fd)

    def delete(self, path: str, read: Entry | None) -> None:
        """read: only if it is still the file that was read so."""
        below, _, name = path.rpartition("/")
        try:
            folder = self._folder(below, make=False)
            if read is not None:
                found = os.lstat(name, dir_fd=folder.fd)
                if stat.S_ISLNK(found.st_mode):
                    target = os.readlink(name, dir_fd=folder.fd)
                    raise OSError(f"it is a link to {target!r}, which still has the content: delete both yourself")
                if not stat.S_ISREG(found.st_mode) or (found.st_size, str(found.st_mtime_ns)) != (
                    read.size,
                    read.stamp,
                ):
                    raise OSError("another file has taken its place since it was read")
            os.unlink(name, dir_fd=folder.fd)
        except (FileNotFoundError, NotADirectoryError):
            pass

    def sweep(self, tag: str | None, older_than: float | None, paths: Collection[str], below: str) -> _Paths:
        age = older_than or 0.0
        age_unlocked = NO_LOCK_SECONDS if tag is None and older_than is None else age
        swept: _Paths = []
        todo = [below]
        while todo:
            shown = todo.pop()
            try:
                fd = self._open(shown.rstrip("/"), LISTED)
            except (FileNotFoundError, NotADirectoryError, PolicyError):  # removed, or exchanged, meanwhile
                continue
            try:
                with os.scandir(fd) as scan:
                    for found in scan:
                        if found.is_dir(follow_symlinks=False):
                            todo.append(f"{shown}{found.name}/")
                            continue
                        of = temporary_tag(found.name)
                        if of is None or tag not in (None, of) or not found.is_file(follow_symlinks=False):
                            continue
                        if _sweep_file(fd, found.name, age, age_unlocked):
                            swept.append(shown + found.name)
            finally:
                os.close(fd)
        return swept

    def sync_folders(self, paths: Iterable[str]) -> None:
        folders = {""}
        for path in paths:
            folder = path.rpartition("/")[0]
            while folder not in folders:
                folders.add(folder)
                folder = folder.rpartition("/")[0]
        for folder in sorted(folders, key=len, reverse=True):
            self._sync(folder)
        try:
            _fsync_folder(os.open(os.path.dirname(self.root), LISTED))
        except PermissionError:  # one may be allowed to pass through a folder, but not to open it
            pass

    def _sync(self, folder: str) -> None:
        _fsync_folder(self._open(folder, LISTED))


_LINKS = {
    "OutsideLink": "a link that leads out of the folder",
    "DanglingLink": "a link that leads nowhere",
    "LinkLoop": "a link that leads back to itself, or to a folder that it is in",
}


def _kind(info: os.stat_result) -> str:
    for name, test in (("pipe", stat.S_ISFIFO), ("socket", stat.S_ISSOCK), ("folder", stat.S_ISDIR)):
        if test(info.st_mode):
            return f"a {name}"
    return "a device"


def _not_a_file(path: str) -> NotAFileError:
    return NotAFileError(errno.EINVAL, "not a regular file", path)


def _regular(fd: int, path: str) -> tuple[int, os.stat_result]:
    """A descriptor and what it is; it is closed, and NotAFileError raised, if that is no regular file."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise _not_a_file(path)
    return fd, info


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """A file to read. NotAFileError if it is a pipe, which could block, or no file at all."""
    return io.FileIO(_regular(os.open(path, READ), os.fsdecode(path))[0])


class _Sequential:
    """A local file that is read once."""

    def __init__(self, fd: int, info: os.stat_result) -> None:
        self._descriptor = Descriptor(fd)
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


def _sweep_file(folder: int, name: str, age: float, age_unlocked: float) -> bool:
    """Remove a temporary file of this age, unless its writer lives. Whether it has been removed."""
    try:
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except (FileNotFoundError, PermissionError):  # published or swept meanwhile, or somebody else's
        return False
    try:
        locked = _lock(fd)
        least = age if locked else age_unlocked
        if locked is False or (least > 0 and time.time() - os.fstat(fd).st_mtime < least):
            return False
        os.unlink(name, dir_fd=folder)
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
    only when file and folder are on the disk. mode: its permission bits when it is published, of 0o777; None is those
    of the file that it replaces, or what the umask and the folder say. mtime_ns: when it was last changed, as `publish`
    shall leave it, in nanoseconds since the epoch.

    A ``with`` block, however it is left, and a collection discard what has not been published. The file is locked while
    its writer lives: so `sweep` knows. A path that is there and is no regular file, such as ``/dev/null`` or a pipe,
    cannot be replaced; it is written directly. A process forked meanwhile can neither publish nor discard: the file is
    its parent's.

    Another thread may discard the file while one writes, which then raises ValueError or goes on into what has no name.
    To publish what another thread is writing discards it, too (ValueError).
    """

    _descriptor: Descriptor | None = None
    _folder: _OpenFolder | None = None  # what its names are relative to

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tag: str = "",
        exclusive: bool = False,
        private: bool = False,
        fsync: bool = False,
        mode: int | None = None,
        mtime_ns: int | None = None,
        within: tuple[_OpenFolder, str, os.stat_result | None] | None = None,
    ) -> None:
        self.path = os.fsdecode(path)
        if not self.path.startswith("/"):  # the working directory may change
            self.path = os.path.join(os.getcwd(), self.path)
        self._exclusive = exclusive
        self._fsync = fsync
        self._owner = os.getpid()
        self._mtime_ns = mtime_ns
        self._temporary: str | None = None
        if within is not None:
            self._folder, self._name, existing = within
        else:
            existing = _stat(self.path)
            if existing is not None and stat.S_ISLNK(existing.st_mode):  # its target is what gets replaced
                self.path = os.path.realpath(self.path)
                existing = _stat(self.path)
        if existing is not None and exclusive:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path)
        if existing is not None and not stat.S_ISREG(existing.st_mode):
            if within is not None:  # who put it there would get what is written, all of it checked or not
                if stat.S_ISDIR(existing.st_mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
                raise _not_a_file(self.path)
            self._descriptor = Descriptor(os.open(self.path, os.O_WRONLY | os.O_CLOEXEC))  # a folder: IsADirectoryError
            return
        if within is None:
            folder, _, self._name = self.path.rpartition("/")
            self._folder = _OpenFolder(os.open(folder or "/", A_FOLDER))
        if mode is None and existing is not None:
            mode = existing.st_mode
        elif mode is None and private:
            mode = self._usual_mode(tag)
        self._made = self._make(tag, 0o666 if mode is None and not private else 0o600)
        self._mode = self._made if mode is None else mode & 0o777

    def _at(self) -> _OpenFolder:
        assert self._folder is not None
        return self._folder

    def remove_sidecar(self) -> str | None:
        """Remove Hadoop's checksum of the file that this one will replace: with it Spark would refuse the new one.

        Returns its path, or None if there is none. Below the folder that the file is made in, like all else.
        """
        name = f".{self._name}.crc"
        if self._temporary is None:
            return None
        try:
            os.unlink(name, dir_fd=self._at().fd)
        except FileNotFoundError:
            return None
        return os.path.join(os.path.dirname(self.path), name)

    def _usual_mode(self, tag: str) -> int:
        """What the umask and the folder say, which only a file can tell: one that is never written to."""
        try:  # it has no name: nobody else can open it
            fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666, dir_fd=self._at().fd)
        except (AttributeError, OSError):
            folder, mode = self._folder, self._make(tag, 0o666)
            self.discard()
            self._folder = folder
            return mode
        mode = os.fstat(fd).st_mode
        os.close(fd)
        return mode

    def _make(self, tag: str, mode: int) -> int:
        """Make the temporary file and lock it. Returns its mode."""
        while True:
            temporary = temporary_name(self._name, tag)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(temporary, flags, mode, dir_fd=self._at().fd)
            self._descriptor = Descriptor(fd)
            self._temporary = temporary
            locked = _lock(fd)
            info = os.fstat(fd)
            if locked is not False and info.st_nlink:
                return stat.S_IMODE(info.st_mode)
            folder = self._folder
            self.discard()  # a sweep was there before the lock
            self._folder = folder

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
        locked, temporary = -1, self._temporary  # what another thread discards meanwhile is not published
        try:
            if temporary is not None:
                folder = self._at()
                with self.descriptor as fd:
                    if self._mode != self._made:
                        os.fchmod(fd, self._mode)
                    if self._mtime_ns is not None:
                        os.utime(fd, ns=(time.time_ns(), self._mtime_ns))
                    if self._fsync:
                        os.fsync(fd)
                    locked = os.dup(fd)
            if not self.descriptor.close():  # before the name: some file systems report a failed write only here
                raise ValueError("this file is being written by another thread: it is discarded")
            if temporary is not None:
                if self._exclusive:
                    self._link(temporary)
                else:
                    os.replace(temporary, self._name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
                self._temporary = None
                if self._fsync:
                    _fsync_folder(os.open(".", LISTED, dir_fd=folder.fd))
        finally:
            if locked >= 0:
                os.close(locked)  # after the name, or a sweep might take the file for a dead writer's
            self.discard()

    def _link(self, temporary: str) -> None:
        at, name = self._at(), self._name  # which stays open, whatever another thread does
        folder = at.fd
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
        folder, temporary = self._folder, self._temporary  # the folder stays open for as long as this needs it
        if self._descriptor is not None:
            self._descriptor.close()
        if folder is not None and temporary is not None and self._owner == os.getpid():
            self._temporary = None
            try:
                os.unlink(temporary, dir_fd=folder.fd)
            except FileNotFoundError:
                pass
        self._folder = None


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


def _fsync_folder(fd: int) -> None:
    """Bring a folder to the disk, and close it."""
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
