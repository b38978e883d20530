"""Transactions: files that are written and removed by one new version of a dataset, or not at all."""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from ags_fast.dataset.begun import Begun, Settings
from ags_fast.dataset.decide import Wish
from ags_fast.dataset.entries import FileEntry, check_lengths
from ags_fast.dataset.expiry import expire_by_policy
from ags_fast.dataset.files.contents import MODULES
from ags_fast.dataset.files.writing import NewDatasetFile, Receipt, Ticket, check_new_path
from ags_fast.dataset.names import check_path, folders_above, job_in_name, new_job_id
from ags_fast.dataset.plan import WRITE
from ags_fast.dataset.planning import commit_plan
from ags_fast.errors import AgsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Set as AbstractSet

    from ags_fast.dataset.ledger import Ledger
    from ags_fast.dataset.versions import Version

__all__ = ["Transaction"]

STREAM_NAME = 256  # characters in the id of a stream


class Transaction:
    """Files that one new version of a dataset adds, replaces and removes. Made by `Dataset.transaction`.

    ``with dataset.transaction() as new:`` begins with a durable plan and ends with a commit. An exception in the block
    drops all of it, and so does a conflict: if another job has committed a change of one of the paths in the meantime,
    the commit raises ConcurrentChangeError. A process that dies leaves nothing in the dataset; `ags_fast.jobs.sweep`
    removes the objects that the process has written.

    Files may be created by several threads, and with `ticket` by other processes. Another process may commit, too: call
    `leave` in the ``with`` block, and there ``with dataset.resume(job_id) as new:``. After the commit, older versions
    are expired as the dataset's policy has it. If that fails, the next transaction or job expires them.

    Attributes:
        job_id: Names the transaction's plan, and is in the name of each object that it writes.
        version: The number of the version that the commit has made; None before, and if there was nothing to commit.
    """

    def __init__(
        self,
        ledger: Ledger,
        base: Version | None,
        settings: Settings,
        committed: Callable[[Version], None],
        left: str | None = None,
    ) -> None:
        self.job_id = left or new_job_id()
        self.version: int | None = None
        self._ledger = ledger
        self._base = base
        self._settings = settings
        self._committed = committed
        self._left = left is not None  # by another process, which has chosen base and settings
        self._lock = threading.RLock()
        self._held = ExitStack()  # releases the plan
        self._begun: Begun | None = None
        self._state = "new"  # then "runs", then "over" or "left"
        self._has_tasks = self._left
        self._attempts: set[str] = set()  # whose receipts have come
        self._open: dict[str, NewDatasetFile | None] = {}  # in the making; None: being created now
        self._objects: set[str] = set()  # that this process has begun
        self._made: dict[str, FileEntry] = {}
        self._removed: dict[str, FileEntry] = {}
        self._clears = False
        self._once: tuple[str, int] | None = None

    def __repr__(self) -> str:
        return f"<Transaction {self.job_id} of {self._ledger.store!r}>"

    def __reduce__(self) -> str:
        raise TypeError("a transaction is never pickled: send a ticket() to tasks")

    # ---- begin and end

    def __enter__(self) -> Transaction:
        with self._lock:
            if self._state != "new":
                raise ValueError("a transaction is begun once: make another one")
            try:
                if self._left:
                    self._begun = Begun.take_up(self._ledger, self.job_id, self._held)
                else:
                    self._begun = Begun.begin(self._ledger, self.job_id, self._base, self._settings, self._held)
            except BaseException:
                self._held.close()
                raise
            self._state = "runs"
        return self

    def __exit__(self, error_class: object, error: object, traceback: object) -> None:
        if self._state in ("left", "over"):
            return
        if error_class is None:
            self._commit()
        else:
            self._drop()

    def _running(self) -> Begun:
        if self._state != "runs" or self._begun is None:
            raise ValueError(
                f"the transaction {'has not begun: use it in a with block' if self._state == 'new' else 'is over'}"
            )
        return self._begun

    # ---- what it changes

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
        check_new_path(path)
        with self._lock:
            ticket = self._running().ticket()
            there = self._check_free(path, replace)
            self._open[path] = None
        try:
            file = ticket.begin(path, format, None, partial(self._finished, there))
        except BaseException:
            with self._lock:
                del self._open[path]
            raise
        with self._lock:
            self._open[path] = file
            self._objects.add(file.object_name)
        return file

    def _finished(self, there: FileEntry | None, file: NewDatasetFile) -> None:
        """Take up a file that was closed, in the place of `there`, or let go of one that was discarded."""
        with self._lock:
            self._open.pop(file.name, None)
            try:
                receipt = file.receipt()
            except ValueError:
                receipt = None
            if receipt is not None and self._state == "runs":
                if file.name in self._made:
                    self.remove(file.name)
                if there is not None:
                    self._removed[file.name] = there
                self._made[file.name] = receipt.entry
                return
        self._ledger.store.delete(file.object_name)  # it may be there, if what failed came after it was published

    def remove(self, path: str) -> None:
        """Remove a file of the dataset, or one that this transaction has created.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is still being written, or the transaction is not running.
        """
        with self._lock:
            begun = self._running()
            if path in self._open:
                raise ValueError(f"{path!r} is still being written: close or abort it first")
            if path in self._made:
                self._ledger.store.delete(self._made.pop(path).file)
                return
            begun.check_base()
            entry = None if path in self._removed else self._ledger.find(begun.base, path)
            if entry is None:
                raise FileNotFoundError(f"the dataset has no {path!r}")
            self._removed[path] = entry

    def remove_all(self) -> None:
        """Remove all files that the dataset had when the transaction began, so that it has only new ones.

        Files that other jobs add meanwhile stay. If the dataset had no files and has some at the commit, that raises
        ConcurrentChangeError, so that of two transactions which replace nothing only one is committed.
        """
        with self._lock:
            begun = self._running()
            begun.check_base()
            self._removed = {entry.path: entry for entry in self._ledger.entries(begun.base)}
            self._clears = True

    def once(self, stream: str, batch: int) -> None:
        """Make the commit record a batch of a stream, and do nothing if this or a later batch is recorded.

        So a batch that is written twice is committed once. A version records the last batch of 64 streams.

        Args:
            stream: The id of the stream: the same whenever it is started again, and no other stream's.
            batch: The number of the batch. Later batches have higher numbers.
        """
        with self._lock:
            self._running()
            if batch < 0 or not 0 < len(stream) <= STREAM_NAME:
                raise ValueError(f"the number of a batch is 0 or more, and an id has 1 to {STREAM_NAME} characters")
            self._once = (stream, batch)

    def leave(self) -> str:
        """Leave the transaction to another process, which takes it up with `Dataset.resume`, adds receipts and commits.

        Call it in the ``with`` block, which then ends without a commit. If no process takes up the transaction,
        `ags_fast.jobs.sweep` removes its files, a day after the last sign of life of its attempts (`Ticket.attempt`).

        Returns:
            The transaction's job id.

        Raises:
            ValueError: It has created or removed a file, or it is not running.
        """
        with self._lock:
            begun = self._running()
            if self._open or self._made or self._removed:
                raise ValueError("leave a transaction before it changes anything: the changes would be lost")
            begun.leave()
            self._state = "left"
            self._held.close()
        return self.job_id

    def abort(self) -> None:
        """End the transaction without a version. The ``with`` block may go on, and changes nothing."""
        self._drop()

    def ticket(self) -> Ticket:
        """Return what tasks in other processes create files with. It pickles, and holds no key."""
        with self._lock:
            self._has_tasks = True
            return self._running().ticket()

    def add(self, receipts: Receipt | Iterable[Receipt]) -> None:
        """Take up files that tasks have written with a ticket of this transaction. A receipt may come twice.

        Raises:
            FileExistsError: The dataset, or this transaction, has another file of that path.
            ValueError: A receipt is of another transaction, or the transaction is not running.
        """
        for receipt in [receipts] if isinstance(receipts, Receipt) else receipts:
            entry = receipt.entry
            with self._lock:
                self._running()
                self._attempts.add(receipt.attempt)
                if {entry.job_id, job_in_name(entry.file)} != {self.job_id}:
                    raise ValueError(f"the receipt of {entry.path!r} is of another transaction")
                if entry.format not in MODULES:
                    raise ValueError(f"the receipt of {entry.path!r} has the format {entry.format!r}")
                if entry == self._made.get(entry.path):
                    continue
                check_new_path(entry.path)
                check_path(entry.file)
                check_lengths([entry])
                self._check_free(entry.path)
                self._made[entry.path] = entry

    def _check_free(self, path: str, replace: bool = False) -> FileEntry | None:
        """Check that a new file may have this path. Return the dataset's file that it replaces, or None."""
        if path in self._open:
            raise FileExistsError(f"{path!r} is being written: close or abort it first")
        begun, taken = self._running(), self._made.keys() | self._open.keys()
        there = _find_place(self._ledger, begun.base, path, taken, self._removed.keys())
        if not replace and (there is not None or path in taken):
            raise FileExistsError(f"the dataset has {path!r}: remove it first, in the same transaction")
        if there is not None:
            begun.check_base()
        return there

    # ---- the end

    def _commit(self) -> None:
        with self._lock:
            begun = self._running()
            if self._open:
                name = min(self._open)
                self._drop()
                raise ValueError(f"{name!r} is still open: close each file before the transaction ends")
            plan = begun.plan
            add = [self._made[path] for path in sorted(self._made)]
            remove = list(self._removed.values())
            try:
                wish = Wish(
                    WRITE,
                    self.job_id,
                    begun.under_their_keks(add),
                    remove,
                    begun.base,
                    whole=True,
                    clears=self._clears,
                    once=self._once,
                )
                lost = bool(begun.attempts() - self._attempts) if self._has_tasks else False
                plan.wrote(None if lost else {entry.file for entry in add})
                plan.no_writer_died = not self._has_tasks
                made = commit_plan(plan, wish, fsync=begun.settings.fsync)
            except BaseException:
                self._drop()
                raise
            self._state = "over"
            self._held.close()
        if made.version is not None and made.version.job_id == self.job_id:
            self.version = made.version.number
            self._committed(made.version)
            with suppress(AgsError, OSError):  # the version is there, and the next job tries again
                expire_by_policy(self._ledger, made.version)

    def _drop(self) -> None:
        """End without a version. What cannot be removed now is left to `sweep`."""
        with self._lock:
            plan = self._running().plan
            self._state = "over"
            plan.taken = True  # nobody goes on with it, so manifests of a commit that failed go, too
            plan.wrote(None if self._has_tasks else self._objects)
            files = [file for file in self._open.values() if file is not None]
        for file in files:
            with suppress(AgsError, OSError, ValueError):
                file.abort()
        with self._held, suppress(AgsError, OSError):
            plan.end()  # looks whether a version was made after all


def _find_place(
    ledger: Ledger, base: Version | None, path: str, taken: AbstractSet[str], removed: AbstractSet[str]
) -> FileEntry | None:
    """Return the file that a version has at the path of a new file, or None.

    Args:
        ledger: The dataset.
        base: The version.
        path: The path of the new file.
        taken: The paths of other new files.
        removed: The paths of files of the version that are removed.

    Raises:
        ValueError: A file would have the path of a folder.
    """
    folders = folders_above(path)
    entries = ledger.find_where(base, [path, *folders], [path])
    found = set(entries)
    below = {other for other in found if other.startswith(f"{path}/")}
    if below and below <= removed:  # others may be there
        found.update(entry.path for entry in ledger.entries(base))
    there = taken | (found - removed)
    for folder in folders:
        if folder in there:
            raise ValueError(f"{folder!r} is a file of the dataset: {path!r} would need a folder of that name")
    if any(other.startswith(f"{path}/") for other in there):
        raise ValueError(f"{path!r} is a folder of the dataset's files, and cannot be a file")
    return entries[path][1] if path in entries and path not in removed else None
