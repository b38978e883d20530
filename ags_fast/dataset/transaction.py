"""Transactions: files that are written and removed by one new version of a dataset, or not at all."""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ags_fast.ags1 import DEFAULT_BLOCK_SIZE, check_block_size
from ags_fast.dataset.decide import Wish
from ags_fast.dataset.entries import FileEntry, check_lengths
from ags_fast.dataset.expiry import expire_by_policy
from ags_fast.dataset.files.contents import MODULES, Contents
from ags_fast.dataset.files.writing import NewDatasetFile, Receipt, Ticket, check_new_path
from ags_fast.dataset.names import PLANS, check_path, folders_above, job_in_name, new_job_id
from ags_fast.dataset.plan import WRITE
from ags_fast.dataset.planning import begin_plan, column_masters, commit_plan, reserve_keys, wrapped_under
from ags_fast.dataset.policy import Policy
from ags_fast.errors import AgsError
from ags_fast.fs.numbered import numbered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ags_fast.dataset.ledger import Ledger
    from ags_fast.dataset.plan import Plan
    from ags_fast.dataset.versions import Version

__all__ = ["Settings", "Transaction"]


@dataclass(frozen=True)
class Settings:
    """How a transaction writes files: the arguments of `Dataset.transaction`."""

    wrapping_key_id: str | None = None
    double_wrap: bool = True
    dek_length: int = 16
    block_size: int = DEFAULT_BLOCK_SIZE
    column_keys: Mapping[str, str] | None = None
    fsync: bool = True
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.dek_length not in (16, 24, 32):
            raise ValueError(f"dek_length must be 16, 24 or 32 bytes, not {self.dek_length}")
        check_block_size(self.block_size)


class Transaction:
    """Files that one new version of a dataset adds, replaces and removes. Made by `Dataset.transaction`.

    ``with dataset.transaction() as new:`` begins with a durable plan and ends with a commit. An exception in the block
    drops all of it, and so does a conflict: if another job has committed a change of one of the paths in the meantime,
    the commit raises ConcurrentChangeError. A process that dies leaves nothing in the dataset; `ags_fast.jobs.sweep`
    removes the objects that the process has written.

    Files may be created by several threads, and with `ticket` by other processes. After the commit, older versions are
    expired as the dataset's policy has it. If that fails, the next transaction or job expires them.

    Attributes:
        job_id: Names the transaction's plan, and is in the name of each object that it writes.
        version: The number of the version that the commit has made; None before, and if there was nothing to commit.
    """

    def __init__(
        self, ledger: Ledger, base: Version | None, settings: Settings, committed: Callable[[Version], None]
    ) -> None:
        self.job_id = new_job_id()
        self.version: int | None = None
        self._ledger = ledger
        self._base = base
        self._settings = settings
        self._committed = committed
        self._lock = threading.RLock()
        self._policy = base.policy if base else Policy()
        self._held = ExitStack()  # releases the plan
        self._plan: Plan | None = None
        self._ticket: Ticket | None = None
        self._state = "new"  # then "runs", then "over"
        self._has_tasks = False
        self._open: dict[str, NewDatasetFile | None] = {}  # in the making; None: being created now
        self._objects: set[str] = set()  # that this process has begun
        self._made: dict[str, FileEntry] = {}
        self._removed: dict[str, FileEntry] = {}

    def __repr__(self) -> str:
        return f"<Transaction {self.job_id} of {self._ledger.store!r}>"

    def __reduce__(self) -> str:
        raise TypeError("a transaction is never pickled: send a ticket() to tasks")

    # ---- begin and end

    def __enter__(self) -> Transaction:
        with self._lock:
            if self._state != "new":
                raise ValueError("a transaction is begun once: make another one")
            self._begin()
            self._state = "runs"
        return self

    def __exit__(self, error_class: object, error: object, traceback: object) -> None:
        if error_class is None:
            self._commit()
        else:
            self._drop()

    def _begin(self) -> None:
        ledger, settings = self._ledger, self._settings
        ledger.store.check_writable()
        (template,) = reserve_keys(
            ledger,
            self._policy.replace(kek_scope="dataset"),  # at the commit, each file gets the KEK that its path is to have
            self.job_id,
            settings.wrapping_key_id,
            settings.double_wrap,
            [_template(self.job_id, settings.block_size)],
            [dict(settings.column_keys or {})],
        )
        number = self._base.number if self._base else 0
        facts = {"operation": WRITE, "base": number, "wraps": sorted(template.key_ids())}
        self._plan, _ = begin_plan(ledger, self._held, self.job_id, [], settings.dek_length, **facts)
        contents = Contents(ledger.id, ledger.store, ledger.envelope.subset(template.key_ids()), settings.threads)
        place = f"{PLANS}{self.job_id}/{numbered(self._plan.number)}"
        self._ticket = Ticket(contents, template, settings.dek_length, settings.fsync, place)

    def _running(self) -> tuple[Plan, Ticket]:
        if self._state != "runs" or self._plan is None or self._ticket is None:
            raise ValueError(
                f"the transaction {'has not begun: use it in a with block' if self._state == 'new' else 'is over'}"
            )
        return self._plan, self._ticket

    # ---- what it changes

    def create(self, path: str, format: str = "ags1") -> NewDatasetFile:
        """Create a file. It is part of the transaction when it is closed without an error.

        Args:
            path: The file's path in the dataset.
            format: "ags1" makes an AGS1 stream of any bytes. "parquet" takes the bytes of a plaintext Parquet file,
                from any writer, and encrypts them as Parquet Modular Encryption at `close`. Until then they are
                buffered, sealed under a key that only this process has: up to 16 MiB in memory, more in a temporary
                file.

        Raises:
            FileExistsError: The dataset has this file, and this transaction has not removed it.
            ValueError: A file and a folder would have one path, or the transaction is not running.
            PolicyError: The path leads out of the dataset.
        """
        check_new_path(path)
        with self._lock:
            _, ticket = self._running()
            self._check_free(path)
            self._open[path] = None
        try:
            file = ticket.begin(path, format, None, self._finished)
        except BaseException:
            with self._lock:
                del self._open[path]
            raise
        with self._lock:
            self._open[path] = file
            self._objects.add(file.object_name)
        return file

    def _finished(self, file: NewDatasetFile) -> None:
        """Take up a file that was closed, or let go of one that was discarded."""
        with self._lock:
            self._open.pop(file.name, None)
            try:
                receipt = file.receipt()
            except ValueError:
                receipt = None
            if receipt is not None and self._state == "runs":
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
            self._running()
            if path in self._open:
                raise ValueError(f"{path!r} is still being written: close or abort it first")
            if path in self._made:
                self._ledger.store.delete(self._made.pop(path).file)
                return
            entry = None if path in self._removed else self._ledger.find(self._base, path)
            if entry is None:
                raise FileNotFoundError(f"the dataset has no {path!r}")
            self._removed[path] = entry

    def ticket(self) -> Ticket:
        """Return what tasks in other processes create files with. It pickles, and holds no key."""
        with self._lock:
            _, ticket = self._running()
            self._has_tasks = True
            return ticket

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

    def _check_free(self, path: str) -> None:
        """Check that a new file may have this path."""
        folders = folders_above(path)
        found = set(self._ledger.find_where(self._base, [path, *folders], [path]))
        below = {other for other in found if other.startswith(f"{path}/")}
        if below and below <= self._removed.keys():  # others may be there
            found.update(entry.path for entry in self._ledger.entries(self._base))
        there = self._made.keys() | self._open.keys() | (found - self._removed.keys())
        if path in there:
            raise FileExistsError(f"the dataset has {path!r}: remove it first, in the same transaction")
        for folder in folders:
            if folder in there:
                raise ValueError(f"{folder!r} is a file of the dataset: {path!r} would need a folder of that name")
        if any(other.startswith(f"{path}/") for other in there):
            raise ValueError(f"{path!r} is a folder of the dataset's files, and cannot be a file")

    # ---- the end

    def _commit(self) -> None:
        with self._lock:
            plan, _ = self._running()
            if self._open:
                name = min(self._open)
                self._drop()
                raise ValueError(f"{name!r} is still open: close each file before the transaction ends")
            add = [self._made[path] for path in sorted(self._made)]
            remove = list(self._removed.values())
            try:
                wish = Wish(WRITE, self.job_id, self._under_their_keks(add), remove, self._base, whole=True)
                plan.wrote({entry.file for entry in add})
                plan.no_writer_died = not self._has_tasks
                made = commit_plan(plan, wish, fsync=self._settings.fsync)
            except BaseException:
                self._drop()
                raise
            self._state = "over"
            self._held.close()
        if made.version is not None and (add or remove):
            self.version = made.version.number
            self._committed(made.version)
            with suppress(AgsError, OSError):  # the version is there, and the next job tries again
                expire_by_policy(self._ledger, made.version)

    def _under_their_keks(self, add: list[FileEntry]) -> list[FileEntry]:
        """Return the files, their data keys wrapped by the KEKs that the policy has for their paths."""
        if not add:
            return add
        ledger, settings = self._ledger, self._settings
        masters = [column_masters(ledger, entry) for entry in add]
        wanted = reserve_keys(
            ledger, self._policy, self.job_id, settings.wrapping_key_id, settings.double_wrap, [*add], masters
        )
        return wrapped_under(ledger, add, wanted)

    def _drop(self) -> None:
        """End without a version. What cannot be removed now is left to `sweep`."""
        with self._lock:
            plan, _ = self._running()
            self._state = "over"
            plan.taken = True  # nobody goes on with it, so manifests of a commit that failed go, too
            plan.wrote(None if self._has_tasks else self._objects)
            files = [file for file in self._open.values() if file is not None]
        for file in files:
            with suppress(AgsError, OSError, ValueError):
                file.abort()
        with self._held, suppress(AgsError, OSError):
            plan.end()  # looks whether a version was made after all


def _template(job_id: str, block_size: int) -> FileEntry:
    """Return an entry with what all files of a transaction have in common."""
    return FileEntry(
        path="",
        file="",
        format="ags1",
        plain_length=0,
        file_length=0,
        block_size=block_size,
        key_id="",
        wrapped_dek=b"",
        column_keys=None,
        aad_prefix=b"",
        job_id=job_id,
        set_id=None,
        part=None,
        parts=None,
        source="",
        stamp="",
    )
