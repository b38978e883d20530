"""The files of a version: look up some of them, or read all of them, manifest by manifest."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, TypeVar

from ags_fast.dataset.changes import until_read
from ags_fast.dataset.entries import check_lengths
from ags_fast.dataset.history import History
from ags_fast.dataset.names import is_manifest_of
from ags_fast.dataset.tables import bound, name_bytes
from ags_fast.errors import ConcurrentChangeError, IntegrityError
from ags_fast.keys.entry import UnknownKeyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.tables import TableRef
    from ags_fast.dataset.versions import Version


Found = TypeVar("Found")
FOUND_FILES = 4096  # that a handle remembers


class Manifests(History):
    """The versions of one dataset, and the files that each version has."""

    def entries(self, version: Version | None, job_id: str | None = None) -> Iterator[FileEntry]:
        """Iterate over the files of a version, manifest by manifest.

        Args:
            version: The version.
            job_id: Only the files that this job has written. It is the job that made the version, so these files are in
                manifests that it wrote, and no other manifest is read.

        Raises:
            ConcurrentChangeError: The version was expired meanwhile.
        """
        envelope = self.envelope
        for ref in version.manifests if version else ():
            if job_id is None:
                yield from self._of_version(version, lambda ref=ref: self.open_table(ref, envelope))  # type: ignore[misc]
            elif is_manifest_of(ref.path, job_id):
                found = self._of_version(version, lambda ref=ref: self.open_table(ref, envelope))  # type: ignore[misc]
                yield from (entry for entry in found if entry.job_id == job_id)

    def list_folder(self, version: Version | None, folder: str, deep: bool = False) -> tuple[set[str], list[FileEntry]]:
        """Return the names of the folders, and the files, that a version has in a folder. The errors are of `entries`.

        Args:
            version: The version.
            folder: The path of the folder; "": the dataset itself.
            deep: Return all files below the folder, and no folders.
        """
        inside = name_bytes(folder) + b"/" if folder else b""
        folders: set[bytes] = set()
        files: list[FileEntry] = []
        envelope = self.envelope
        for ref in version.manifests if version else ():
            if inside and not _may_have(ref, inside):
                continue
            inner, entries = self._of_version(version, lambda: self.list_in_table(ref, envelope, inside, deep))  # noqa: B023
            folders |= inner
            files += entries
        return {name.decode("utf-8", "surrogateescape") for name in folders}, files

    def find(self, version: Version | None, path: str) -> FileEntry | None:
        """Return the file that a version has at `path`. The errors are those of `entries`.

        A handle remembers files that were found: callers that look at a file tend to open it next.
        """
        if version is None or self.tables is None:
            return self.find_many(version, [path]).get(path)
        key = version.sha256, path
        entry = self._found.get(key)
        if entry is None and (entry := self.find_many(version, [path]).get(path)) is not None:
            if len(self._found) >= FOUND_FILES:
                self._found.clear()
            self._found[key] = entry
        return entry

    def find_many(self, version: Version | None, paths: Iterable[str]) -> dict[str, FileEntry]:
        """Return the files that a version has at these paths, by path. The errors are those of `entries`."""
        found = self.find_where(version, paths)
        check_lengths(entry for _, entry in found.values())
        return {path: entry for path, (_, entry) in found.items()}

    def find_where(
        self, version: Version | None, paths: Iterable[str], folders: Iterable[str] = ()
    ) -> dict[str, tuple[TableRef, FileEntry]]:
        """Return the files at some paths, and at least one file in each of some folders, each with its manifest.

        Only the parts of a manifest that may have one of the paths are read. The smallest manifests come first, since
        they cost least, and a path is in one manifest only.
        """
        inside = sorted({name_bytes(folder) + b"/" for folder in folders})
        names = sorted(set(map(name_bytes, paths)))
        bounds = [bound(name) for name in names]
        found: dict[bytes, tuple[TableRef, FileEntry]] = {}
        envelope = self.envelope
        for ref in sorted(version.manifests, key=lambda ref: ref.entries) if version else ():
            in_range = names[bisect_left(bounds, ref.first) : bisect_right(bounds, ref.last)]
            mine = [name for name in in_range if name not in found]
            some = [name for name in inside if _may_have(ref, name)]
            if mine or some:
                entries = self._of_version(version, lambda: self.find_in_table(ref, envelope, mine, some))  # noqa: B023
                found |= {name_bytes(entry.path): (ref, entry) for entry in entries}
            if not inside and len(found) == len(names):
                break
        return {entry.path: (ref, entry) for ref, entry in found.values()}

    def _of_version(self, version: Version | None, read: Callable[[], Found]) -> Found:
        """Return what `read` finds. Raises ConcurrentChangeError if the version was expired meanwhile."""
        try:
            return read()
        except (IntegrityError, UnknownKeyError):
            if version is None or self.has_version(version.number):
                raise
            raise ConcurrentChangeError(f"version {version.number} was expired while it was read") from None

    def load_around(
        self, names: Callable[[], tuple[set[str], set[str]]], *, writes: bool = False
    ) -> tuple[Version | None, dict[str, FileEntry]]:
        """Read the newest version, and the files that it has at some paths and in some folders.

        Args:
            names: Makes the paths and the folders, if the version has any file. If there are about as many paths as
                files, all files are read.
            writes: Whether the caller is about to change the dataset.

        Returns:
            The version, and its files by path: those at the paths, and at least one in each folder.
        """

        def read(head: Version | None) -> tuple[Version | None, dict[str, FileEntry]]:
            if head is None or not head.files:
                return head, {}
            paths, folders = names()
            if head.files <= len(paths):
                found = {entry.path: entry for entry in self.entries(head)}
            else:
                found = {path: entry for path, (_, entry) in self.find_where(head, paths, folders).items()}
            check_lengths(found.values())
            return head, found

        return until_read(lambda: self.current(writes=writes), read)

    def load(
        self, version: int | None = None, min_version: int | None = None, *, writes: bool = False
    ) -> tuple[Version | None, list[FileEntry]]:
        """Read a version, as `current` finds it, and all of its files, sorted by path where they are in one run.

        Raises:
            ConcurrentChangeError: The version that was asked for was expired meanwhile.
        """

        def look() -> Version | None:
            return self.current(version=version, min_version=min_version, writes=writes)

        def read(head: Version | None) -> tuple[Version | None, list[FileEntry]]:
            entries = list(self.entries(head))
            check_lengths(entries)
            return head, entries

        return until_read(look, read) if version is None else read(look())


def _may_have(ref: TableRef, folder: bytes) -> bool:
    """Whether files of a folder may be in a manifest. The path of the folder ends in a "/"."""
    return ref.first <= bound(folder[:-1] + b"0") and bound(folder) <= ref.last
