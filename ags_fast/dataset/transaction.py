"""Transactions: files that are written and removed by one new version of a dataset, or not at all."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import asdict
from dataclasses import replace as with_fields
from functools import partial
from typing import TYPE_CHECKING

from ags_fast.dataset.change import Wish
from ags_fast.dataset.deks import key_ids
from ags_fast.dataset.entries import check_lengths
from ags_fast.dataset.entry import main_key
from ags_fast.dataset.files.contents import MODULES, Contents, format_of
from ags_fast.dataset.files.writing import Receipt, Settings, Ticket, begin_file, check_new_path
from ags_fast.dataset.job import Job
from ags_fast.dataset.key_material import KEYTOOLS
from ags_fast.dataset.keys import followed
from ags_fast.dataset.kinds import Want
from ags_fast.dataset.log import ENDED
from ags_fast.dataset.names import check_path, folders_above, job_in_name
from ags_fast.dataset.snapshot import Snapshot
from ags_fast.errors import AgsError, ExpiredError, JobEndedError
from ags_fast.keys.stores.base import JOB_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from ags_fast._types import FileFormat
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.files.writing import NewDatasetFile
    from ags_fast.dataset.log import Log

__all__ = ["Settings", "Transaction"]

STREAM_NAME = 256  # characters in the id of a stream
AHEAD = 64  # data keys that a transaction reserves when it begins


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
        """Take note that a file is being created."""
        self.open[path] = None
        self._folders.update(folders_above(path))

    def closes(self, path: str) -> None:
        """Let go of a file in the making."""
        if path in self.open:
            del self.open[path]
            self._folders.subtract(folders_above(path))

    def puts(self, entry: FileEntry, there: FileEntry | None) -> FileEntry | None:
        """Take up a file, in the place of `there`, the version's file. Returns what was made for this path before."""
        if there is not None:
            self.removed[entry.path] = there
        before = self.takes_out(entry.path)
        self.made[entry.path] = entry
        self._folders.update(folders_above(entry.path))
        return before

    def takes_out(self, path: str) -> FileEntry | None:
        """Let go of a file that was made, and return it."""
        entry = self.made.pop(path, None)
        if entry is not None:
            self._folders.subtract(folders_above(path))
        return entry

    def check_closed(self, path: str) -> None:
        """Raise ValueError if a file is being made."""
        if path in self.open:
            raise ValueError(f"{path!r} is still being written: close or abort it first")

    def check_free(self, base: Snapshot, paths: Collection[str], replace: bool) -> dict[str, FileEntry]:
        """Check that new files may have these paths. Returns the files of the version that they replace, by path.

        FileExistsError: a file has one of the paths, with `replace` one that is being made. ValueError: a file would
        have the path of a folder.
        """
        above = {folder for path in paths for folder in folders_above(path)}
        found = {path: row for path, (_, row) in base.find({*paths, *above}).items()} | base.below(paths)
        stay = {path: entry for path, entry in found.items() if path not in self.removed}
        full = {folder for path in stay for folder in folders_above(path)}
        emptied = {folder for path in found.keys() - stay.keys() for folder in folders_above(path)}

        def has_files(folder: str) -> bool:
            return any(row.path not in self.removed for row in base.list_folder(folder, deep=True)[1])

        for path in paths:
            if path in self.open:
                raise FileExistsError(f"{path!r} is being written: close or abort it first")
            for folder in folders_above(path):
                if folder in stay or folder in self.made or folder in self.open or folder in paths:
                    raise ValueError(f"{folder!r} is a file of the dataset: {path!r} would need a folder of that name")
            if self._folders[path] > 0 or path in full or (path in emptied and has_files(path)):
                raise ValueError(f"{path!r} is a folder of the dataset's files, and cannot be a file")
            if not replace and (path in stay or path in self.made):
                raise FileExistsError(f"the dataset has {path!r}: remove it first, in the same transaction")
        return {path: stay[path] for path in paths if path in stay}

    def rename(self, base: Snapshot, paths: Mapping[str, str], replace: bool) -> list[FileEntry]:
        """Give files other paths: see `Transaction.rename`. Returns files made before that others have replaced."""
        if len(set(paths.values())) < len(paths):
            raise ValueError("two files cannot be renamed to one path")
        for path in paths:
            self.check_closed(path)
        known = base.find([path for path in paths if path not in self.made])
        moves = {path: row for path, (_, row) in known.items() if path not in self.removed}
        moves |= {path: self.made[path] for path in paths if path in self.made}
        for path in paths:
            if path not in moves:
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


class Transaction:
    """Files that one new version of a dataset adds, replaces and removes. Made by `Dataset.transaction`.

    ``with dataset.transaction() as new:`` begins with a durable plan and ends with a commit. An exception in the block
    drops all of it, and so does a conflict: if another job has committed a change of one of the paths in the meantime,
    the commit raises ConcurrentChangeError. A process that dies leaves nothing in the dataset; `ags_fast.jobs.sweep`
    removes the objects that the process has written.

    Files may be created by several threads, and with `ticket` by other processes. A fork's child needs a ticket, too,
    and its end of the block does nothing. Another process may commit: call `leave` in the ``with`` block, and there
    ``with dataset.resume(job_id) as new:``. The version that is committed also expires older ones, as the dataset's
    policy has it.

    Attributes:
        job_id: Names the transaction's plan, and is in the name of each object that it writes; "" before the block.
        version: The number of the version that the commit has made; None before, and if there was nothing to commit.
    """

    def __init__(
        self, base: Snapshot, settings: Settings, committed: Callable[[Entry], None], left: str | None = None
    ) -> None:
        self.job_id = left or ""
        self.version: int | None = None
        self._base = base
        self._settings = settings
        self._committed = committed
        self._left = left is not None  # by another process, which has chosen base and settings
        self._mutex = threading.RLock()
        self._owner = os.getpid()
        self._job: Job | None = None
        self._state = "new"  # then "runs", then "over" or "left"
        self._pending = Pending()
        self._clears = False
        self._once: tuple[str, int] | None = None
        self._expired: int | None = None  # the version that it began on, if that was expired meanwhile
        self._contents: dict[frozenset[str], Contents] = {}
        self._kinds: list[Want] = []  # of the KEKs of a new file

    def __repr__(self) -> str:
        return f"<Transaction {self.job_id} of {self._log.store!r}>"

    def __reduce__(self) -> str:
        raise TypeError("a transaction is never pickled: send a ticket() to tasks")

    @property
    def _log(self) -> Log:
        return self._base.log

    @property
    def _lock(self) -> threading.RLock:
        """The lock that the threads of the transaction's process share. ValueError in a fork's child."""
        if self._owner != os.getpid():
            raise ValueError(
                "the transaction belongs to the process that began it: begin another one here, or create files with "
                "a ticket of it"
            )
        return self._mutex

    @contextmanager
    def _running(self) -> Iterator[Job]:
        """Hold the lock of a transaction that runs. ValueError: it does not, or this is a fork's child."""
        with self._lock:
            if self._state != "runs" or self._job is None:
                raise ValueError(
                    f"the transaction {'has not begun: use it in a with block' if self._state == 'new' else 'is over'}"
                )
            yield self._job

    # ---- begin and end

    def __enter__(self) -> Transaction:
        if self._state == "new":
            self._owner = os.getpid()
        with self._lock:
            if self._state != "new":
                raise ValueError("a transaction is begun once: make another one")
            self._job = self._taken_up() if self._left else self._begun()
            self.job_id = self._job.id
            self._state = "runs"
        return self

    def _begun(self) -> Job:
        """Make the plan durable."""
        entry = self._base.entry
        self._log.store.check_writable()
        wants = dict.fromkeys(self._settings.kinds(entry), 1)
        facts = {"base": entry.number, "settings": asdict(self._settings)}
        return Job.begin(self._log, "write", wants, head=entry, ahead=AHEAD, facts=facts)

    def _taken_up(self) -> Job:
        """Go on with the transaction that another process has left."""
        if not JOB_ID.fullmatch(self.job_id):
            raise ValueError(f"{self.job_id!r} is not the id of a transaction")
        at = self._log.head().over.get(self.job_id, ENDED)
        if at != ENDED:
            Job.finish(self._log, self.job_id)
            raise JobEndedError(f"the transaction {self.job_id} was committed before, as version {at}")
        sign = self._log.plans().get(self.job_id)
        if sign is not None and not sign.waits:
            raise ValueError(f"the job {self.job_id} is not a transaction that was left")
        job = Job.resume(self._log, self.job_id)
        self._settings, number = Settings(**job.facts["settings"]), job.facts["base"]
        try:
            self._base = Snapshot(self._log, self._log.entry(number, job.base))
        except ExpiredError:
            self._base, self._expired = Snapshot(self._log, job.base), number
        return job

    def __exit__(self, error_class: object, error: object, traceback: object) -> None:
        if self._state in ("left", "over") or self._owner != os.getpid():
            return
        if error_class is None:
            self._commit()
        else:
            self.abort()

    def abort(self) -> None:
        """End the transaction without a version. The ``with`` block may go on, and changes nothing.

        What cannot be removed now is left to `ags_fast.jobs.sweep`.
        """
        with self._running() as job:
            self._state = "over"
            files = [file for file in self._pending.open.values() if file is not None]
        for file in files:
            with suppress(AgsError, OSError, ValueError):
                file.abort()
        with suppress(AgsError, OSError):
            job.give_up()

    def leave(self) -> str:
        """Leave the transaction to another process, which takes it up with `Dataset.resume`, adds receipts and commits.

        Call it in the ``with`` block, which then ends without a commit. If no process takes up the transaction,
        `ags_fast.jobs.sweep` removes its files, a day after the last sign of life of its attempts (`Ticket.attempt`).

        Returns:
            The transaction's job id.

        Raises:
            ValueError: It has created or removed a file, or it is not running.
        """
        with self._running() as job:
            if self._pending:
                raise ValueError("leave a transaction before it changes anything: the changes would be lost")
            job.leave()
            self._state = "left"
        return self.job_id

    def once(self, stream: str, batch: int) -> None:
        """Make the commit record a batch of a stream, and do nothing if this or a later batch is recorded.

        So a batch that is written twice is committed once. A version records the last batch of 64 streams.

        Args:
            stream: The id of the stream: the same whenever it is started again, and no other stream's.
            batch: The number of the batch. Later batches have higher numbers.
        """
        with self._running():
            if batch < 0 or not 0 < len(stream) <= STREAM_NAME:
                raise ValueError(f"the number of a batch is 0 or more, and an id has 1 to {STREAM_NAME} characters")
            self._once = (stream, batch)

    # ---- tasks in other processes

    def ticket(self) -> Ticket:
        """Return what tasks in other processes create files with. It pickles, and holds no key."""
        with self._running() as job:
            job.has_tasks = True
            return self._ticket(self._settings.kinds(job.base), self._settings)

    def add(self, receipts: Receipt | Iterable[Receipt]) -> None:
        """Take up files that tasks have written with a ticket of this transaction. A receipt may come twice.

        Raises:
            FileExistsError: The dataset, or this transaction, has another file of that path.
            ValueError: A receipt is of another transaction, or the transaction is not running.
        """
        for receipt in [receipts] if isinstance(receipts, Receipt) else receipts:
            row = receipt.entry
            with self._running() as job:
                job.has_tasks = True
                job.known_plans.update(receipt.attempts)
                if {row.job_id, job_in_name(row.file)} != {job.id}:
                    raise ValueError(f"the receipt of {row.path!r} is of another transaction")
                if row.format not in MODULES:
                    raise ValueError(f"the receipt of {row.path!r} has the format {row.format!r}")
                if row == self._pending.made.get(row.path):
                    continue
                check_new_path(row.path)
                check_path(row.file)
                check_lengths([row])
                self._check_free([row.path], replace=False)
                self._pending.puts(row, None)

    # ---- changes

    def create(self, path: str, format: FileFormat = "ags1", *, replace: bool = False) -> NewDatasetFile:
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
        if not self._kinds:  # once: it may read all KEKs
            self._kinds = self._settings.kinds(self._base.entry)
        return self._create(path, format, replace, self._settings, self._kinds)

    def _create(
        self, path: str, format: str, replace: bool, settings: Settings, kinds: Sequence[Want]
    ) -> NewDatasetFile:
        check_new_path(path)
        with self._running():
            there = self._check_free([path], replace).get(path)
            self._pending.opens(path)
        try:
            file = begin_file(self._ticket(kinds, settings), path, format, lambda: None, partial(self._finished, there))
        except BaseException:
            with self._lock:
                self._pending.closes(path)
            raise
        with self._running() as job:
            self._pending.open[path] = file
            job.made.append(file.object_name)
        return file

    def _ticket(self, kinds: Sequence[Want], settings: Settings) -> Ticket:
        """Return what writes new files, with a use of the KEK of each kind reserved."""
        with self._running() as job:
            key_ids, sealer = tuple(job.keys.take(kinds)), main_key(job.base.keys)
            known = frozenset((*key_ids, sealer.key_id))
            if known not in self._contents:
                envelope = job.keys.envelope().subset(known)
                self._contents[known] = Contents(job.base.dataset_id, self._log.store, envelope, settings.threads)
            return Ticket(self._contents[known], job.id, key_ids, settings, sealer)

    def _finished(self, there: FileEntry | None, file: NewDatasetFile, receipt: Receipt | None) -> None:
        """Take up a file that was closed, in the place of `there`, or let go of one that was discarded."""
        with self._lock:
            self._pending.closes(file.name)
            if receipt is not None and self._state == "runs":
                self._delete(self._pending.puts(receipt.entry, there))
                return
        self._log.store.delete(file.object_name)  # it may be there, if what failed came after it was published

    def _delete(self, row: FileEntry | None) -> None:
        """Delete the object of a file that this transaction has made and let go of. Other objects are of versions."""
        if row is not None and row.job_id == self.job_id:
            self._log.store.delete(row.file)

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
        with self._running():
            self._check_base()
        row = self._base.file(path)
        contents = self._base.contents(row, self._settings.threads)
        keys = self._base.log.known(self._base.entry).keys
        kinds = [followed(keys, Want.of(keys[key_id])._replace(scope=None)) for key_id in key_ids(row)]
        columns = {
            key["column"]: kind.wrapping_key_id for key, kind in zip(row.column_keys or (), kinds[1:], strict=True)
        }
        settings = with_fields(
            self._settings,
            dek_length=len(contents.dek(row)),
            block_size=row.block_size or self._settings.block_size,
            column_keys=columns,
            key_material=None if row.key_material is None else KEYTOOLS,
        )
        with self._create(target, row.format, replace, settings, kinds) as file:
            format_of(row).copy(contents, row, file)

    def rename(self, paths: Mapping[str, str], *, replace: bool = False) -> None:
        """Give files other paths, all at once. What is stored of them stays where it is: only tables are written.

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
        with self._running():
            self._check_base()
            for row in self._pending.rename(self._base, paths, replace):
                self._delete(row)

    def remove(self, path: str) -> None:
        """Remove a file of the dataset, or one that this transaction has created.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is still being written, or the transaction is not running.
        """
        with self._running():
            pending = self._pending
            pending.check_closed(path)
            if path in pending.made:
                self._delete(pending.takes_out(path))
                return
            self._check_base()
            row = None if path in pending.removed else self._base.get(path)
            if row is None:
                raise FileNotFoundError(f"the dataset has no {path!r}")
            pending.removed[path] = row

    def remove_all(self) -> None:
        """Remove all files that the dataset had when the transaction began, so that it has only new ones.

        Files that other jobs add meanwhile stay. If the dataset had no files and has some at the commit, that raises
        ConcurrentChangeError, so that of two transactions which replace nothing only one is committed.
        """
        with self._running():
            self._check_base()
            self._pending.removed = {row.path: row for row in self._base.files()}
            self._clears = True

    def _check_base(self) -> None:
        """Raise ExpiredError if the version that the transaction began on was expired meanwhile."""
        if self._expired is not None:
            raise ExpiredError(
                f"version {self._expired}, on which the transaction began, was expired meanwhile: begin again"
            )

    def _check_free(self, paths: Collection[str], replace: bool) -> dict[str, FileEntry]:
        """Check that new files may have these paths. Return the dataset's files that they replace."""
        there = self._pending.check_free(self._base, paths, replace)
        if there:
            self._check_base()
        return there

    # ---- the end

    def _commit(self) -> None:
        with self._running() as job:
            pending = self._pending
            if pending.open:
                name = min(pending.open)
                self.abort()
                raise ValueError(f"{name!r} is still open: close each file before the transaction ends")
            add = [row for _, row in sorted(pending.made.items())]
            remove = {path: row.file for path, row in pending.removed.items()}
            wish = Wish("write", add, remove, batch=self._once, clears=self._clears, scoped=True)
            try:
                if self._settings.fsync:
                    self._log.store.sync_folders(row.file for row in add)
                made = job.commit(wish)
            except BaseException:
                self.abort()
                raise
            self._state = "over"
        if made.version is not None:
            self.version = made.version.number
            self._committed(made.version)
