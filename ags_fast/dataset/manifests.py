"""The files of a version: look one up, or read all of them, manifest by manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast.dataset.entries import check_lengths
from ags_fast.dataset.history import History
from ags_fast.errors import ConcurrentChangeError, IntegrityError
from ags_fast.keys.entry import UnknownKeyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.tables import TableRef
    from ags_fast.dataset.versions import Version
    from ags_fast.keys.envelope import Envelope


class Manifests(History):
    """The versions of one dataset, and the files that each version has."""

    def entries(self, version: Version | None) -> Iterator[FileEntry]:
        """Every file of a version, manifest by manifest. ConcurrentChangeError if it is expired meanwhile."""
        envelope = self.envelope
        for ref in version.manifests if version else ():
            yield from self._of_version(version, ref, envelope)

    def find(self, version: Version | None, path: str) -> FileEntry | None:
        """The file that a version has at `path`. ConcurrentChangeError if it is expired meanwhile."""
        envelope = self.envelope
        for ref in version.manifests if version else ():
            for entry in self._of_version(version, ref, envelope, path):
                check_lengths([entry])
                return entry
        return None

    def _of_version(
        self, version: Version | None, ref: TableRef, envelope: Envelope, only: str | None = None
    ) -> list[FileEntry]:
        try:
            return self.open_table(ref, envelope, only)
        except (IntegrityError, UnknownKeyError):
            if version is None or version.number in self.version_numbers():
                raise
            raise ConcurrentChangeError(f"version {version.number} was expired while it was read") from None

    def load(
        self, version: int | None = None, min_version: int | None = None, *, writes: bool = False
    ) -> tuple[Version | None, list[FileEntry]]:
        """A version, as `current` has it, and all of its files."""
        while True:
            head = self.current(version=version, min_version=min_version, writes=writes)
            try:
                entries = list(self.entries(head))
                check_lengths(entries)
                return head, entries
            except ConcurrentChangeError:
                if version is not None:
                    raise
