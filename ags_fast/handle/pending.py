"""What a transaction is about to change, and whether its new files can have their paths."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ags_fast.dataset.names import folders_above

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.handle.writing import NewDatasetFile
    from ags_fast.onelog.snapshot import Snapshot


class Pending:
    """The files that a transaction has made, removed, and is making. Its callers hold the transaction's lock."""

    def __init__(self) -> None:
        self.made: dict[str, FileEntry] = {}
        self.removed: dict[str, FileEntry] = {}  # of the version that the transaction began on
        self.open: dict[str, NewDatasetFile | None] = {}  # in the making; None: being created now
        self._folders: Counter[str] = Counter()  # above files that were made or are in the making

    def __bool__(self) -> bool:
        return bool(self.made or self.removed or self.open)

    def opens(self, path: str) -> None:
        """Take up that a file is being created."""
        self.open[path] = None
        self._folders.update(folders_above(path))

    def closes(self, path: str) -> None:
        """Let go of a file in the making."""
        if path in self.open:
            del self.open[path]
            self._folders.subtract(folders_above(path))

    def puts(self, entry: FileEntry, there: FileEntry | None) -> FileEntry | None:
        """Take up a file, in the place of `there`, the version's file of that path.

        Returns:
            The file that the transaction had made for this path before, or None.
        """
        if there is not None:
            self.removed[entry.path] = there
        before = self.takes_out(entry.path)
        self.made[entry.path] = entry
        self._folders.update(folders_above(entry.path))
        return before

    def takes_out(self, path: str) -> FileEntry | None:
        """Let go of a file that was made. Returns it, or None if no file of this path was made."""
        entry = self.made.pop(path, None)
        if entry is not None:
            self._folders.subtract(folders_above(path))
        return entry

    def check_closed(self, path: str) -> None:
        """Raise ValueError if a file is being made."""
        if path in self.open:
            raise ValueError(f"{path!r} is still being written: close or abort it first")

    def check_free(self, base: Snapshot, paths: Collection[str], replace: bool) -> dict[str, FileEntry]:
        """Check that new files may have these paths.

        Args:
            base: The version that the transaction began on.
            paths: The paths.
            replace: Whether a file may take the place of one of the same path.

        Returns:
            The files of the version that new ones replace, by path.

        Raises:
            FileExistsError: A file has one of the paths. With `replace`: it is being made.
            ValueError: A file would have the path of a folder.
        """
        above = {folder for path in paths for folder in folders_above(path)}
        found = {path: row for path, (_, row) in base.find({*paths, *above}).items()} | base.below(paths)
        stay = {path: entry for path, entry in found.items() if path not in self.removed}
        full = {folder for path in stay for folder in folders_above(path)}
        emptied = {folder for path in found.keys() - stay.keys() for folder in folders_above(path)}
        for path in paths:
            if path in self.open:
                raise FileExistsError(f"{path!r} is being written: close or abort it first")
            for folder in folders_above(path):
                if folder in stay or folder in self.made or folder in self.open or folder in paths:
                    raise ValueError(f"{folder!r} is a file of the dataset: {path!r} would need a folder of that name")
            if self._folders[path] > 0 or path in full or (path in emptied and self._has_files(base, path)):
                raise ValueError(f"{path!r} is a folder of the dataset's files, and cannot be a file")
            if not replace and (path in stay or path in self.made):
                raise FileExistsError(f"the dataset has {path!r}: remove it first, in the same transaction")
        return {path: stay[path] for path in paths if path in stay}

    def _has_files(self, base: Snapshot, folder: str) -> bool:
        """Return whether the version has files in a folder that are not removed."""
        return any(row.path not in self.removed for row in base.list_folder(folder, deep=True)[1])

    def rename(self, base: Snapshot, paths: Mapping[str, str], replace: bool) -> list[FileEntry]:
        """Give files other paths, all at once: see `Transaction.rename`.

        Returns:
            Files that the transaction had made, and that others have replaced.
        """
        if len(set(paths.values())) < len(paths):
            raise ValueError("two files cannot be renamed to one path")
        for path in paths:
            self.check_closed(path)
        known = base.find([path for path in paths if path not in self.made])
        moves: dict[str, FileEntry] = {}
        for path in paths:
            if path in self.made:
                moves[path] = self.made[path]
            elif path in known and path not in self.removed:
                moves[path] = known[path][1]
            else:
                raise FileNotFoundError(f"the dataset has no {path!r}")
        paths = {old: new for old, new in paths.items() if old != new}
        made = {path: entry for path in paths if (entry := self.takes_out(path)) is not None}
        gone = {path: moves[path] for path in paths if path not in made}
        self.removed.update(gone)
        try:
            there = self.check_free(base, set(paths.values()), replace)
        except BaseException:
            for path in gone:
                del self.removed[path]
            for entry in made.values():
                self.puts(entry, None)
            raise
        # Whoever compares a source at the new path with the entry must not take the file for one made from it.
        renamed = [moves[old]._replace(path=new, stamp="") for old, new in paths.items()]
        return [old for new in renamed if (old := self.puts(new, there.get(new.path))) is not None]
