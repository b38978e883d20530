"""The files of a version: look up some of them, or read all of them, manifest by manifest."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from ags_fast.dataset.entries import check_lengths
from ags_fast.dataset.history import History
from ags_fast.dataset.tables import bound, name_bytes
from ags_fast.errors import ConcurrentChangeError, IntegrityError
from ags_fast.keys.entry import UnknownKeyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.tables import TableRef
    from ags_fast.dataset.versions import Version


class Manifests(History):
    """The versions of one dataset, and the files that each version has."""

    def entries(self, version: Version | None) -> Iterator[FileEntry]:
        """Every file of a version, manifest by manifest. ConcurrentChangeError if it is expired meanwhile."""
        envelope = self.envelope
        for ref in version.manifests if version else ():
            yield from self._of_version(version, lambda ref=ref: self.open_table(ref, envelope))  # type: ignore[misc]

    def find(self, version: Version | None, path: str) -> FileEntry | None:
        """The file that a version has at `path`. ConcurrentChangeError if it is expired meanwhile."""
        return self.find_many(version, [path]).get(path)

    def find_many(self, version: Version | None, paths: Iterable[str]) -> dict[str, FileEntry]:
        """The files that a version has at these paths, by path. ConcurrentChangeError if it is expired meanwhile."""
        found = self.find_where(version, paths)
        check_lengths(entry for _, entry in found.values())
        return {path: entry for path, (_, entry) in found.items()}

    def find_where(
        self, version: Version | None, paths: Iterable[str], folders: Iterable[str] = ()
    ) -> dict[str, tuple[TableRef, FileEntry]]:
        """As `find_many`, with the manifest that each file is in; and a file or more of each of these folders.

        Of a manifest is read what may have one of the paths. A path is in one manifest only. The smallest manifests
        come first, since they cost least.
        """
        inside = sorted({name_bytes(folder) + b"/" for folder in folders})
        names = sorted(set(map(name_bytes, paths)))
        bounds = [bound(name) for name in names]
        found: dict[bytes, tuple[TableRef, FileEntry]] = {}
        envelope = self.envelope
        for ref in sorted(version.manifests, key=lambda ref: ref.entries) if version else ():
            in_range = names[bisect_left(bounds, ref.first) : bisect_right(bounds, ref.last)]
            mine = [name for name in in_range if name not in found]
            some = [name for name in inside if ref.first <= bound(name[:-1] + b"0") and bound(name) <= ref.last]
            if mine or some:
                entries = self._of_version(version, lambda: self.find_in_table(ref, envelope, mine, some))  # noqa: B023
                found |= {name_bytes(entry.path): (ref, entry) for entry in entries}
            if not inside and len(found) == len(names):
                break
        return {entry.path: (ref, entry) for ref, entry in found.values()}

    def _of_version(self, version: Version | None, read: Callable[[], list[FileEntry]]) -> list[FileEntry]:
        """What `read` finds. ConcurrentChangeError if what it needs was expired with the version."""
        try:
            return read()
        except (IntegrityError, UnknownKeyError):
            if version is None or self.has_version(version.number):
                raise
            raise ConcurrentChangeError(f"version {version.number} was expired while it was read") from None

    def load_around(
        self, names: Callable[[], tuple[set[str], set[str]]], *, writes: bool = False
    ) -> tuple[Version | None, dict[str, FileEntry]]:
        """The newest version, and what it has of some paths, and in some folders: at least one file of each.

        names: makes the paths and the folders, if the version has any file. Where they are about as many as its files,
        all files are read.
        """
        while True:
            head = self.current(writes=writes)
            if head is None or not head.files:
                return head, {}
            paths, folders = names()
            try:
                if head.files <= len(paths):
                    found = {entry.path: entry for entry in self.entries(head)}
                else:
                    found = {path: entry for path, (_, entry) in self.find_where(head, paths, folders).items()}
                check_lengths(found.values())
                return head, found
            except ConcurrentChangeError:
                continue  # the version was expired

    def load(
        self, version: int | None = None, min_version: int | None = None, *, writes: bool = False
    ) -> tuple[Version | None, list[FileEntry]]:
        """A version, as `current` has it, and all of its files, sorted by path where they are in one run."""
        while True:
            head = self.current(version=version, min_version=min_version, writes=writes)
            try:
                entries = list(self.entries(head))
                check_lengths(entries)
                return head, entries
            except ConcurrentChangeError:
                if version is not None:
                    raise
