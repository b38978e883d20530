"""What a transaction changes: files that it creates, copies, renames and removes."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import TYPE_CHECKING

from ags_fast.dataset.at import At
from ags_fast.dataset.files.contents import format_of
from ags_fast.dataset.files.writing import check_new_path
from ags_fast.dataset.pending import Pending

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from ags_fast.dataset.begun import Begun, Settings
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.files.writing import NewDatasetFile, Ticket
    from ags_fast.dataset.ledger import Ledger

__all__ = ["Changing"]


class Changing:
    """The part of a transaction that changes files. `_running` tells whether it may."""

    def __init__(self, ledger: Ledger, job_id: str, settings: Settings) -> None:
        self.job_id = job_id
        self._ledger = ledger
        self._settings = settings
        self._mutex = threading.RLock()
        self._owner = os.getpid()
        self._begun: Begun | None = None
        self._state = "new"  # then "runs", then "over" or "left"
        self._objects: set[str] = set()  # that this process has begun
        self._pending = Pending(ledger)
        self._clears = False

    @property
    def _lock(self) -> threading.RLock:
        """The lock that the threads of the transaction's process share. ValueError in a fork's child."""
        if self._owner != os.getpid():
            raise ValueError(
                "the transaction belongs to the process that began it: begin another one here, or create files with "
                "a ticket of it"
            )
        return self._mutex

    def _running(self) -> Begun:
        if self._state != "runs" or self._begun is None:
            raise ValueError(
                f"the transaction {'has not begun: use it in a with block' if self._state == 'new' else 'is over'}"
            )
        return self._begun

    def create(self, path: str, format: str = "ags1", *, replace: bool = False) -> NewDatasetFile:
        """Create a file. It is part of the transaction when it is closed without an error.

        Args:
            path: The file's path in the dataset.
            format: "ags1" makes an AGS1 stream of any bytes. "parquet" takes the bytes of a plaintext Parquet file,
                from any writer, and encrypts them as Parquet Modular Encryption at `close`. Until then they are
                buffered, sealed under a key that only this process has: up to 16 MiB in memory, more in a temporary
                file.
            replace: Whether the file takes the place of a file of that path. That file stays if the new one is
                discarded.

        Raises:
            FileExistsError: The dataset has this file, and this transaction has not removed it. With `replace`: the
                file is being written.
            ValueError: A file and a folder would have one path, or the transaction is not running.
            PolicyError: The path leads out of the dataset.
        """
        return self._create(path, format, replace, lambda begun: begun.ticket())

    def _create(self, path: str, format: str, replace: bool, ticket_of: Callable[[Begun], Ticket]) -> NewDatasetFile:
        check_new_path(path)
        with self._lock:
            ticket = ticket_of(self._running())
            there = self._check_free([path], replace).get(path)
            self._pending.opens(path)
        try:
            file = ticket.begin(path, format, None, partial(self._finished, there))
        except BaseException:
            with self._lock:
                self._pending.closes(path)
            raise
        with self._lock:
            self._pending.open[path] = file
            self._objects.add(file.object_name)
        return file

    def _finished(self, there: FileEntry | None, file: NewDatasetFile) -> None:
        """Take up a file that was closed, in the place of `there`, or let go of one that was discarded."""
        with self._lock:
            self._pending.closes(file.name)
            try:
                receipt = file.receipt()
            except ValueError:
                receipt = None
            if receipt is not None and self._state == "runs":
                self._delete(self._pending.puts(receipt.entry, there))
                return
        self._ledger.store.delete(file.object_name)  # it may be there, if what failed came after it was published

    def _delete(self, entry: FileEntry | None) -> None:
        """Delete the object of a file that this transaction has made and let go of. Other objects are of versions."""
        if entry is not None and entry.job_id == self.job_id:
            self._ledger.store.delete(entry.file)

    def copy(self, path: str, target: str, *, replace: bool = False) -> None:
        """Copy a file of the version that the transaction began on.

        The copy is encrypted under a new data key, and is protected as its source is: by the same master keys, of the
        file and of columns, with blocks of the same size and, if the source has some, with key material.

        Args:
            path: The path of the file.
            target: The path of the copy.
            replace: Whether the copy takes the place of a file of that path.

        Raises:
            FileNotFoundError: The version has no such file.
            FileExistsError: As for `create`.
            KeyAccessError: The KMS refuses a key of the file.
            ValueError: As for `create`.
        """
        with self._lock:
            begun = self._running()
            begun.check_base()
            at = At(self._ledger, begun.base)
        entry = at.find(path)
        with self._create(target, entry.format, replace, lambda begun: begun.ticket_like(entry)) as file:
            format_of(entry).copy(at.contents(entry, self._settings.threads), entry, file)

    def rename(self, paths: Mapping[str, str], *, replace: bool = False) -> None:
        """Give files other paths, all at once. What is stored of them stays where it is: only manifests are written.

        A file keeps its keys. Only where a KEK is for one partition (`Policy.kek_scope`), the KEK of the new folder
        wraps the file's data keys.

        Args:
            paths: {path: new path}. A new path may be the path of a file that is renamed, too, or the path itself.
            replace: Whether files take the places of others.

        Raises:
            FileNotFoundError: There is no such file.
            FileExistsError: As for `create`.
            ValueError: Two files would get one path, a file and a folder would have one path, a file is still being
                written, or the transaction is not running.
            PolicyError: A path leads out of the dataset.
        """
        for path in paths.values():
            check_new_path(path)
        with self._lock:
            begun = self._running()
            begun.check_base()
            for entry in self._pending.rename(begun.base, paths, replace):
                self._delete(entry)

    def remove(self, path: str) -> None:
        """Remove a file of the dataset, or one that this transaction has created.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is still being written, or the transaction is not running.
        """
        with self._lock:
            begun, pending = self._running(), self._pending
            pending.check_closed(path)
            if path in pending.made:
                self._delete(pending.takes_out(path))
                return
            begun.check_base()
            entry = None if path in pending.removed else self._ledger.find(begun.base, path)
            if entry is None:
                raise FileNotFoundError(f"the dataset has no {path!r}")
            pending.removed[path] = entry

    def remove_all(self) -> None:
        """Remove all files that the dataset had when the transaction began, so that it has only new ones.

        Files that other jobs add meanwhile stay. If the dataset had no files and has some at the commit, that raises
        ConcurrentChangeError, so that of two transactions which replace nothing only one is committed.
        """
        with self._lock:
            begun = self._running()
            begun.check_base()
            self._pending.removed = {entry.path: entry for entry in self._ledger.entries(begun.base)}
            self._clears = True

    def _check_free(self, paths: Collection[str], replace: bool) -> dict[str, FileEntry]:
        """Check that new files may have these paths. Return the dataset's files that they replace."""
        begun = self._running()
        there = self._pending.check_free(begun.base, paths, replace)
        if there:
            begun.check_base()
        return there
