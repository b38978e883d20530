"""Transactions: files that are written and removed by one new version of a dataset, or not at all."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from ags_fast.dataset.begun import Begun, Settings
from ags_fast.dataset.changing import Changing
from ags_fast.dataset.decide import Wish
from ags_fast.dataset.entries import check_lengths
from ags_fast.dataset.expiry import expire_by_policy
from ags_fast.dataset.files.contents import MODULES
from ags_fast.dataset.files.writing import Receipt, Ticket, check_new_path
from ags_fast.dataset.names import check_path, job_in_name, new_job_id
from ags_fast.dataset.plan import WRITE
from ags_fast.dataset.planning import commit_plan
from ags_fast.errors import AgsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ags_fast.dataset.ledger import Ledger
    from ags_fast.dataset.versions import Version

__all__ = ["Transaction"]

STREAM_NAME = 256  # characters in the id of a stream


class Transaction(Changing):
    """Files that one new version of a dataset adds, replaces and removes. Made by `Dataset.transaction`.

    ``with dataset.transaction() as new:`` begins with a durable plan and ends with a commit. An exception in the block
    drops all of it, and so does a conflict: if another job has committed a change of one of the paths in the meantime,
    the commit raises ConcurrentChangeError. A process that dies leaves nothing in the dataset; `ags_fast.jobs.sweep`
    removes the objects that the process has written.

    Files may be created by several threads, and with `ticket` by other processes. A fork's child needs a ticket, too,
    and its end of the block does nothing. Another process may commit: call `leave` in the ``with`` block, and there
    ``with dataset.resume(job_id) as new:``. After the commit, older versions are expired as the dataset's policy has
    it. If that fails, the next transaction or job expires them.

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
        super().__init__(ledger, left or new_job_id(), settings)
        self.version: int | None = None
        self._base = base
        self._committed = committed
        self._left = left is not None  # by another process, which has chosen base and settings
        self._held = ExitStack()  # releases the plan
        self._has_tasks = self._left
        self._attempts: set[str] = set()  # whose receipts have come
        self._once: tuple[str, int] | None = None

    def __repr__(self) -> str:
        return f"<Transaction {self.job_id} of {self._ledger.store!r}>"

    def __reduce__(self) -> str:
        raise TypeError("a transaction is never pickled: send a ticket() to tasks")

    # ---- begin and end

    def __enter__(self) -> Transaction:
        if self._state == "new":
            self._owner = os.getpid()
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
        if self._state in ("left", "over") or self._owner != os.getpid():
            return
        if error_class is None:
            self._commit()
        else:
            self._drop()

    # ---- what other processes do

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
            if self._pending:
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
                if entry == self._pending.made.get(entry.path):
                    continue
                check_new_path(entry.path)
                check_path(entry.file)
                check_lengths([entry])
                self._check_free([entry.path], replace=False)
                self._pending.puts(entry, None)

    # ---- the end

    def _commit(self) -> None:
        with self._lock:
            begun = self._running()
            if self._pending.open:
                name = min(self._pending.open)
                self._drop()
                raise ValueError(f"{name!r} is still open: close each file before the transaction ends")
            plan = begun.plan
            add = [entry for _, entry in sorted(self._pending.made.items())]
            remove = list(self._pending.removed.values())
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
                plan.wrote(None if lost else {entry.file for entry in add if entry.job_id == self.job_id})
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
            files = [file for file in self._pending.open.values() if file is not None]
        for file in files:
            with suppress(AgsError, OSError, ValueError):
                file.abort()
        with self._held, suppress(AgsError, OSError):
            plan.end()  # looks whether a version was made after all
