"""A folder of files: `Store` checks arguments, and a subclass for each kind of storage does the work."""

from __future__ import annotations

import os

from ags_fast.errors import PolicyError
from ags_fast.fs.paths import check_path, check_tag, split_chain

TYPE_CHECKING = False  # to import typing takes longer than to import this package
if TYPE_CHECKING:
    import builtins  # in the class Store, list is a method
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from typing import Any, Self

    from ags_fast._types import Buffer
    from ags_fast.fs.new import NewFile, NewObject

    LeftOut = list[tuple[str, str, str]]  # path, kind and reason of what a listing leaves out: see `Store.list_all`

__all__ = ["NO_LOCK_SECONDS", "TIMES_NS", "Entry", "ReadOnce", "Store", "without_password"]

LISTED = 1000  # from this number of names on, a listing shows which of them exist
TIMES_NS = -(1 << 63), (1 << 63) - 1  # the first and last time that 64 bits have, in 1677 and in 2262
NO_LOCK_SECONDS = 86_400.0  # without locks, a file that was not written to for this long has no writer


class Entry:
    """A file of a store.

    Attributes:
        path: Relative to the store, with "/" between its parts.
        size: In bytes.
        stamp: Changes when the file is replaced: an object's etag, or else the time of the last change, in ns.
        modified: The time of the last change, in seconds since the epoch.
        mode: The permission bits, of 0o777, of a local file; else None.
        ctime_ns: The time of the last change of a local file or its attributes, in ns since the epoch; else None.
    """

    __slots__ = ("ctime_ns", "mode", "modified", "path", "size", "stamp")

    def __init__(self, path: str, size: int, stamp: str, modified: float, local: os.stat_result | None = None) -> None:
        self.path, self.size, self.stamp, self.modified = path, size, stamp, modified
        self.mode = None if local is None else local.st_mode & 0o777
        self.ctime_ns = None if local is None else local.st_ctime_ns

    @classmethod
    def of(cls, path: str, info: os.stat_result) -> Entry:
        """Return the entry of a local file."""
        return cls(path, info.st_size, str(info.st_mtime_ns), info.st_mtime, info)

    @property
    def mtime_ns(self) -> int | None:
        """`modified` in nanoseconds, as exactly as the storage has it, or the nearest of TIMES_NS; None if unknown.

        The time is unknown if `modified` is 0 and the file is not local.
        """
        if self.mode is not None:
            time_ns = int(self.stamp)
        elif self.modified:
            time_ns = round(self.modified * 1000) * 1_000_000
        else:
            return None
        return min(max(time_ns, TIMES_NS[0]), TIMES_NS[1])

    def __repr__(self) -> str:
        return f"Entry(path={self.path!r}, size={self.size}, stamp={self.stamp!r}, modified={self.modified!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entry) and self._all() == other._all()

    def __hash__(self) -> int:
        return hash(self._all())

    def _all(self) -> tuple[str, int, str, float, int | None]:
        return self.path, self.size, self.stamp, self.modified, self.mode


class ReadOnce:
    """A file that is read once, from its beginning, in a ``with`` block. Size and stamp are as `Entry` has them."""

    size: int
    stamp: str

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill the buffer, or as much of it as the file has left. Return the number of bytes."""
        view, filled = memoryview(buffer), 0
        while filled < len(view) and (got := self._read_into(view[filled:])):
            filled += got
        return filled

    def changed(self) -> bool:
        """Whether the file has another size or was written to since it was opened."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_into(self, view: memoryview) -> int:
        """Read some of the bytes that are left; 0 at the end."""
        raise NotImplementedError


class Store:
    """A folder of files: a local path, or a URL of fsspec such as ``s3://bucket/folder`` (also ``file://``).

    Paths of files are relative to the folder, with "/" between their parts. A path that would lead out of the folder is
    refused with PolicyError: by "..", as an absolute path or through a link, also if another process renames folders
    meanwhile. Links that stay inside are followed, and so are links on the folder's own path.

    Threads may share a store, it may be pickled, and a fork gets a connection of its own. Errors are the
    classes of OSError that a local file would raise.

    Args:
        url: The folder. It need not exist.
        storage_options: For fsspec. They may hold secrets: repr hides them, a pickle contains them.
        follow: Links may lead out of the folder for files that are read, not for files that are written or deleted.
    """

    local = False  # whether the folder is on this machine
    choose: Callable[[str], type[Store]]  # the class for a URL; `ags_fast.fs.choose` sets it

    def __new__(
        cls, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, follow: bool = False
    ) -> Store:
        """Make a store of the class that the URL needs."""
        return object.__new__(Store.choose(os.fsdecode(url)) if cls is Store else cls)

    def __init__(
        self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, follow: bool = False
    ) -> None:
        plain = os.fsdecode(url).rstrip("/")
        self.url = f"{plain}//" if plain.endswith(":") else plain  # the root of a file system, such as memory://
        above, below = split_chain(self.url)
        self._around = above if above.endswith("/") else f"{above}/", below
        self.storage_options, self.follow = dict(storage_options or {}), follow
        if misplaced := [name for name in self.storage_options if "." in str(name)]:  # file systems would ignore it
            raise ValueError(f"{misplaced[0]!r} is no option of a file system: give properties of a KMS as kms=")

    def __repr__(self) -> str:
        return f"Store({without_password(self.url)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (os.fsencode(self.url) if self.local else self.url, self.storage_options, self.follow)

    @property
    def shared(self) -> bool:
        """Whether other processes see the same files. False for ``memory://``."""
        return True

    @property
    def parallel(self) -> bool:
        """Whether several threads may work with files of the folder at once."""
        return True

    def full_path(self, path: str) -> str:
        """Return a file's path or URL for use outside of this store."""
        above, below = self._around
        return above + path + below

    def path_in(self, full_path: str) -> str:
        """Return the path that `full_path` was made of."""
        above, below = self._around
        return full_path.removeprefix(above).removesuffix(below)

    def checked(self, path: str) -> str:
        """Return the path of a file as `os` or the service takes it. PolicyError if there can be no such file."""
        return check_path(path)

    def list(self, prefix: str = "", after: str = "", left_out: LeftOut | None = None) -> Iterator[Entry]:
        """List every complete file whose path begins with `prefix`, hidden files too.

        One walk, or one listing in pages. Objects come in the order of their paths, local files in any. A missing
        folder is empty. Files in the making are left out, and so are links that lead out, nowhere, or to a folder that
        they are in; see `list_all`. If `after` is given, only paths that sort after this one are listed; S3 and Google
        Cloud Storage begin there, and a walk skips folders before.
        """
        raise NotImplementedError

    def names(self, folder: str) -> builtins.list[str]:
        """Return the names of all that is in a folder, of files in the making, too. A missing folder is empty."""
        return sorted({entry.path[len(folder) :].partition("/")[0] for entry in self.list(folder)})

    def list_all(self) -> tuple[builtins.list[Entry], LeftOut]:
        """List all files, and what `list` leaves out.

        Returns:
            The entries, also of objects with content whose names end in "/", which no file can have; and path, kind and
            reason of each thing that is left out. The kinds are "OutsideLink", "DanglingLink", "LinkLoop",
            "SpecialFile" (pipes, sockets, devices), "EmptyFolder" (its path ends in "/") and "TemporaryFile".
        """
        left_out: LeftOut = []
        return sorted(self.list(left_out=left_out), key=lambda entry: entry.path), sorted(left_out)

    def exists(self) -> bool:
        """Whether the folder exists; in an object store, whether it has any object."""
        return next(self.list(), None) is not None

    def check_writable(self) -> None:
        """Raise PolicyError if `new` would refuse every file. Call this before any work. Makes the folder."""

    def sweep(
        self, tag: str | None = None, older_than: float | None = None, *, paths: Collection[str] = (), below: str = ""
    ) -> builtins.list[str]:
        """Remove temporary files and unfinished uploads of dead writers.

        A file whose writer lives is left. For an upload, or on a file system without locks, it is unknown whether the
        writer lives. Then only the age protects the file. Without `older_than` that age is a day, and with a `tag` it
        is zero: the writers of a tag must be known to be dead.

        With a `tag` only files in the making with this tag are removed, in a local folder only those beside `paths`, if
        there are any: a writer makes its temporary file beside the file that it writes. An upload has no tag: with
        `tag`, the uploads to `paths` are removed. `older_than`: only files not written to, and uploads begun, at least
        this many seconds ago. `below`: only in this folder; ends in a slash. Returns the removed paths.
        """
        unlocked = older_than if older_than is not None else NO_LOCK_SECONDS if tag is None else 0.0
        return self._sweep(None if tag is None else check_tag(tag), older_than or 0.0, unlocked, paths, below)

    def remove_empty_folders(self, path: str) -> None:
        """Remove the empty folders in this folder. An object store has no folders."""
        self._remove_empty_folders(self.checked(path.rstrip("/")))

    def sync_folders(self, paths: Iterable[str]) -> None:
        """Sync the names of these files, and of the folders that they are in, to the disk."""
        self._sync_folders([self.checked(path) for path in paths])

    # ---- reading

    def existing(self, paths: Iterable[str]) -> set[str]:
        """Return which of these names are taken, also by a link that leads out of the folder."""
        return _existing(self, set(paths))

    def stat(self, path: str) -> Entry | None:
        """Return the file at `path`, or None."""
        return self._stat(self.checked(path))

    def read_small(self, path: str, limit: int) -> bytes:
        """Read all of a small file. FormatError if the file has more than `limit` bytes; then no more are read."""
        return self._read_small(self.checked(path), limit)

    def read_if_unchanged(self, path: str, size: int, stamp: str | None = None) -> bytes | None:
        """Read all of a small file of `size` bytes, and of this stamp, in one step, where the storage can.

        Returns None if anything is in the way: `open_once` and `open_seekable` raise the right error.
        """
        return self._read_if_unchanged(self.checked(path), size, stamp)

    def open_seekable(self, path: str, entry: Entry | None = None, *, tail: bool = False) -> Any:
        """Return what `AgsReader` takes to read a file: a `LocalFile`, or a seekable binary file, to be closed.

        A read of an object requests just its own bytes. Reads that go on without a gap get bytes ahead of them, up to
        the file's `read_ahead` (16 MiB), in several requests at once. OSError if the object is replaced meanwhile.

        An `entry` saves a request. Without it S3 tells it with the first 64 KiB, with `tail` with the last ones.
        """
        return self._open_seekable(self.checked(path), entry, tail)

    def open_once(self, path: str) -> ReadOnce:
        """Open a file that is read once, from its beginning to its end: see `ReadOnce`."""
        return self._open_once(self.checked(path))

    # ---- writing

    def create_exclusive(self, path: str, data: bytes) -> None:
        """Write a file that must not exist. It appears complete or not at all.

        If several processes create one file, one succeeds. When this returns, the file is on the disk. FileExistsError
        if the file exists, PolicyError if the store cannot do that.
        """
        self._create_exclusive(self.checked(path), data)

    def begin(
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
        """Begin a file in the making, and make the folders that it is in.

        The arguments are those of `NewFile`. An object has neither mode nor mtime_ns. PolicyError if the store can
        neither rename files nor discard an upload, so that a part of the file might show. NotAFileError if a pipe, a
        device, a socket or a folder is there.
        """
        local = {"private": private, "fsync": fsync, "mode": mode, "mtime_ns": mtime_ns}
        return self._begin(self.checked(path), exclusive, check_tag(tag), **local)

    def write_if_new(
        self, path: str, data: bytes, *, fsync: bool = False, mode: int | None = None, mtime_ns: int | None = None
    ) -> bool:
        """Write a small file that does not exist, in one step, where the storage can. The arguments are `NewFile`'s.

        Returns whether the file was written. If not, nothing is left of the file: `begin` does the same in several
        steps, replaces an existing file, and raises the right error.
        """
        return self._write_if_new(self.checked(path), data, fsync, mode, mtime_ns)

    def write_small(self, path: str, data: bytes, *, tag: str = "", fsync: bool = False) -> None:
        """Write a new file with these bytes: like `begin`, `write` and `publish`, but quicker for a small file."""
        if self._write_if_new(self.checked(path), data, fsync, None, None):
            return
        new = self.begin(path, tag=tag, fsync=fsync)
        try:
            new.write(data)
            new.publish()
        finally:
            new.discard()

    def lock(self, path: str) -> Any:
        """Lock `path` while the returned lock and this process live. None if the storage has no locks.

        BlockingIOError if another process holds the lock.
        """
        return self._lock(self.checked(path))

    def is_locked(self, path: str) -> bool | None:
        """Whether a living process holds the lock of `path`; None if the storage has no locks."""
        return self._is_locked(self.checked(path))

    def delete(self, path: str) -> None:
        """Remove a file, if it exists. If `path` is a link, the link is removed."""
        self._delete(self.checked(path), None)

    def delete_read(self, entry: Entry) -> None:
        """Remove the file that was read as `entry`.

        OSError if the file has changed since, or if `path` is a link, so that the file that was read is elsewhere.
        """
        self._delete(self.checked(entry.path), entry)

    # ---- for subclasses: paths and tags have been checked

    if TYPE_CHECKING:

        def _stat(self, path: str) -> Entry | None: ...
        def _read_small(self, path: str, limit: int) -> bytes: ...
        def _open_seekable(self, path: str, entry: Entry | None, tail: bool) -> Any: ...
        def _open_once(self, path: str) -> ReadOnce: ...
        def _create_exclusive(self, path: str, data: bytes) -> None: ...
        def _begin(self, path: str, exclusive: bool, tag: str, **local: Any) -> NewFile | NewObject: ...

    def _read_if_unchanged(self, path: str, size: int, stamp: str | None) -> bytes | None:
        return None

    def _write_if_new(self, path: str, data: bytes, fsync: bool, mode: int | None, mtime_ns: int | None) -> bool:
        return False

    def _lock(self, path: str) -> Any:
        return None

    def _is_locked(self, path: str) -> bool | None:
        return None

    def _delete(self, path: str, read: Entry | None) -> None:
        """If `read` is given, remove only the file that was read as this entry."""
        raise NotImplementedError

    def _remove_empty_folders(self, path: str) -> None:
        pass

    def _sweep(
        self, tag: str | None, age: float, age_unlocked: float, paths: Collection[str], below: str
    ) -> builtins.list[str]:
        """Remove only what is older, in seconds, than `age` if locks work, or than `age_unlocked` if they do not."""
        return []

    def _sync_folders(self, paths: builtins.list[str]) -> None:
        pass


def _existing(store: Store, paths: set[str]) -> set[str]:
    if len(paths) >= LISTED:
        return paths.intersection(entry.path for entry in store.list())
    found = set()
    for path in paths:
        try:
            if store.stat(path) is not None:
                found.add(path)
        except PolicyError:  # a link that leads out of the folder
            found.add(path)
    return found


def without_password(url: str) -> str:
    """Return a URL for messages."""
    scheme, separator, rest = url.partition("://")
    host = rest.partition("/")[0]
    if separator and "@" in host:  # a password, perhaps
        rest = "***@" + host.rpartition("@")[2] + rest[len(host) :]
    return scheme + separator + rest
