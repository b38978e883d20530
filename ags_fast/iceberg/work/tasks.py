"""Work on files of a table, one task a file, as engines run it: what workers get, and how a file gets a new key.

Neither a context nor a task nor a row holds a key. A job has one KEK, which the KMS has wrapped. The KEK wraps the key
metadata of each file, bound to the table, the purpose and the path. A worker asks the KMS once for the KEK.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self
from urllib.parse import urlsplit

from ags_fast import opening, parquet, stream
from ags_fast.dataset.rows import Row
from ags_fast.engines.base import JobContext
from ags_fast.errors import AgsError, FormatError, IntegrityError, KeyAccessError
from ags_fast.iceberg.locations import ENCRYPTED, local_path
from ags_fast.jobs.results import describe
from ags_fast.keys.envelope import Envelope, binding
from ags_fast.keys.kek import new_kek
from ags_fast.keys.metadata import StandardKeyMetadata

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from pyiceberg.io import FileIO as InnerIO

    from ags_fast.keys.entry import KeyEntry
    from ags_fast.keys.kms import KmsClient

__all__ = ["NEW_KEY", "OLD_KEY", "FileTask", "StorageContext", "TableContext", "failed_row", "run_file"]

OLD_KEY, NEW_KEY = "iceberg-file", "iceberg-new-file"  # purposes of wrapped key metadata
CHUNK_NBYTES = 4 << 20


class FileTask(NamedTuple):
    """The work on one file of a table."""

    path: str
    format: str  # AVRO, PARQUET, PUFFIN or `MANIFEST`
    length: int  # its bytes on storage, as its manifest says
    key: bytes | None  # its key metadata, as `TableContext.wrap` returned them for `OLD_KEY`; None: in plaintext
    to: str  # where the new file goes
    new_key: bytes  # the key metadata of the new file, wrapped for `NEW_KEY`
    renamed: tuple[tuple[str, str], ...] = ()  # by a file of deletion vectors: old and new path of each data file
    begun: bool = False  # whether an earlier run may have written the new file
    # Of a manifest: content, first row id, snapshot, sequence number and counts, as `Known` has them, and the codec.
    listed: tuple[Any, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of work."""
        return self.length

    def row(self, status: str) -> Row:
        """Return the row of the file."""
        return Row(self.path, self.to, status, format=self.format)


@dataclass(frozen=True)
class StorageContext(JobContext):
    """What all tasks share that open or delete files as they are stored. A kind of job has a subclass with `do`."""

    runner: ClassVar[str] = "ags_fast.iceberg.work.tasks"

    settings: Mapping[str, str] = field(repr=False, kw_only=True)  # FileIO's; may have credentials of the storage

    def inner(self, path: str) -> InnerIO:
        """Return PyIceberg's own FileIO for a location."""
        return _inner_io(json.dumps(dict(self.settings), sort_keys=True), urlsplit(path).scheme)

    def do(self, task: Any, attempt: int) -> Row:
        """Do one task, and return its row. An error becomes a row, too."""
        raise NotImplementedError


@dataclass(frozen=True)
class TableContext(StorageContext):
    """What all tasks of a job on a table share. Its own tasks move files to new keys and new paths."""

    table_uuid: str
    envelope: Envelope  # the KEK of the job, and the KMS. It pickles by the KMS's properties

    @classmethod
    def begin(
        cls, op: str, job_id: str, *, kms: KmsClient, wrapping_key_id: str, kek: KeyEntry | None = None, **fields: Any
    ) -> Self:
        """Return the context of a job. `kms` is as `ags_fast.engines.local.client_for` returned it for the engine.

        `kek` is the KEK of the job that this one continues; None makes one, by one call of the KMS.
        """
        entry = kek or new_kek(kms, wrapping_key_id)
        envelope = Envelope(kms, {entry.key_id: entry})
        envelope.prepare(entry.key_id)
        return cls(op, job_id, envelope=envelope, **fields)

    @property
    def kek(self) -> KeyEntry:
        """The KEK of the job, as the KMS wrapped it."""
        (entry,) = self.envelope.entries.values()
        return entry

    def wrap(self, key: StandardKeyMetadata, purpose: str, path: str) -> bytes:
        """Wrap a file's key metadata for one purpose."""
        return self.envelope.wrap(self.kek.key_id, key.encode(), binding(self.table_uuid, purpose, path))

    def unwrap(self, wrapped: bytes, purpose: str, path: str) -> StandardKeyMetadata:
        """Return the key metadata that `wrap` has wrapped. IntegrityError if it was for another purpose or path."""
        bound = binding(self.table_uuid, purpose, path)
        return StandardKeyMetadata.decode(self.envelope.unwrap(self.kek.key_id, wrapped, bound))

    def do(self, task: FileTask, attempt: int) -> Row:
        """Move one file to a new key and a new path."""
        return task.row("ok")._replace(file_length=_move(self, task, attempt))


_inner: dict[tuple[str, str], InnerIO] = {}


def _inner_io(settings: str, scheme: str) -> InnerIO:
    """Return PyIceberg's own FileIO for a scheme, by its settings as JSON: one a process."""
    if (settings, scheme) not in _inner:
        from pyiceberg.io import load_file_io  # late: a worker on local files has no need of it, and starts faster

        _inner[settings, scheme] = load_file_io(json.loads(settings), f"{scheme}://" if scheme else "/")
    return _inner[settings, scheme]


# --------------------------------------------------------------------------------------------------------------- rows


def run_file(context: StorageContext, task: Any, attempt: int = 0) -> Row:
    """Do one task. Its error goes into the row."""
    begun = time.monotonic()
    try:
        row = context.do(task, attempt)
    except Exception as error:  # of any storage: the other files are done all the same
        row = failed_row(context, task, attempt, type(error).__name__, describe(error))
    return row._replace(seconds=time.monotonic() - begun, attempt=attempt, host=socket.gethostname())


def failed_row(context: StorageContext, task: Any, attempt: int, error_class: str, error: str) -> Row:
    """Return the row of a task that failed. A task has a method `row`."""
    row: Row = task.row("failed")
    return row._replace(error_class=error_class, error=error, attempt=attempt, host=socket.gethostname())


# --------------------------------------------------------------------------------------------------------------- work


class _Move(NamedTuple):
    """One file to move, with its keys, in the worker that moves it."""

    context: TableContext
    task: FileTask
    old: StandardKeyMetadata | None
    new: StandardKeyMetadata

    def open(self) -> Any:
        """Open the file as it is stored. IntegrityError if it has another length than its manifest says."""
        path, task = local_path(self.task.path), self.task
        there = os.path.getsize(path) if path else len(self.context.inner(task.path).new_input(task.path))
        if there != task.length:
            raise IntegrityError(f"{task.path} has {there} bytes, its manifest says {task.length}")
        return open(path, "rb") if path else self.context.inner(task.path).new_input(task.path).open()

    def destination(self) -> AbstractContextManager[Any]:
        """Return, to be entered, what the new file is written to: a path, or a stream of PyIceberg's."""
        path, to = local_path(self.task.to), self.task.to
        if path is None:
            return self.context.inner(to).new_output(to).create(overwrite=True)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return nullcontext(path)


def _move(context: TableContext, task: FileTask, attempt: int) -> int:
    """Write the new file of a task. Returns its length."""
    old = None if task.key is None else context.unwrap(task.key, OLD_KEY, task.path)
    if old is not None and old.file_length not in (None, task.length):
        raise IntegrityError(f"{task.path} has two lengths: {task.length} by its entry, {old.file_length} by its key")
    new = context.unwrap(task.new_key, NEW_KEY, task.to)
    move = _Move(context, task, old, new)
    if task.listed:
        return _manifest(move)
    if (task.begun or attempt) and (length := _written(move)) is not None:
        return length
    if task.format not in MOVERS:
        raise FormatError(f"{task.path} has the format {task.format}, which has no encryption")
    with move.open() as source:
        head = source.read(4)
        source.seek(0)
        if old is None and head in ENCRYPTED:
            raise KeyAccessError(f"{task.path} is encrypted, and its manifest has no key for it: the key is lost")
        return MOVERS[task.format](move, source)


def _written(move: _Move) -> int | None:
    """Return the length of the new file if an earlier run has written it whole; None if it must be written."""
    task, path = move.task, move.task.to
    there = move.context.inner(path).new_input(path)
    if task.format == "PUFFIN" or not there.exists():
        return None
    try:
        length = len(there)
        opened: Any = there.open()
        with opened as file:
            if task.format == "PARQUET":
                keys = parquet.Keys(footer=move.new.encryption_key)
                parquet.verify(file, keys, aad_prefix=move.new.aad_prefix, threads=move.context.threads)
                return length
            with move.open() as source, _plain(move, source) as plain:
                wanted = plain.seek(0, os.SEEK_END)
            key = move.new
            with stream.AgsReader(file, key.encryption_key, aad_prefix=key.aad_prefix, length=length) as written:
                written.verify()
                return length if written.length == wanted else None
    except (AgsError, OSError):
        return None


def _plain(move: _Move, source: Any) -> Any:
    """Return the plaintext of a file that is an AGS1 stream, or in plaintext."""
    if move.old is None:
        return source
    return opening.open(source, key_metadata=move.old, length=move.task.length)


def _parquet(move: _Move, source: Any) -> int:
    new = parquet.Keys(footer=move.new.encryption_key)
    options: Any = {"store_aad_prefix": False, "threads": move.context.threads}
    with move.destination() as target:
        if move.old is None:
            report = parquet.encrypt_file(source, target, new, aad_prefix=move.new.aad_prefix, **options)
        else:
            options |= {"aad_prefix": move.old.aad_prefix, "new_aad_prefix": move.new.aad_prefix}
            old = parquet.Keys(footer=move.old.encryption_key)
            report = parquet.reencrypt_file(source, target, old, new, **options)
    return report.file_length


def _stream(move: _Move, source: Any) -> int:
    with _plain(move, source) as plain:
        return _seal(move, lambda out: shutil.copyfileobj(plain, out, CHUNK_NBYTES))


def _puffin(move: _Move, source: Any) -> int:
    from ags_fast.puffin.vectors import rename_vectors  # late: most workers have no deletion vector

    with _plain(move, source) as plain:
        data = rename_vectors(plain.read(), dict(move.task.renamed))
    return _seal(move, lambda out: out.write(data))


def _manifest(move: _Move) -> int:
    """Write the live entries of a manifest, which keep what they inherit from its list as values of their own."""
    from ags_fast.iceberg.checks import check_counts  # late: few jobs have manifests as tasks
    from ags_fast.iceberg.manifests import Known
    from ags_fast.iceberg.reading import Node, read_node
    from ags_fast.iceberg.rewriting import entries, manifest_bytes

    task, known = move.task, Known(move.task.path, move.task.length, move.old)
    known.content, known.first_row_id, known.snapshot_id, known.sequence_number, known.counts, codec = task.listed
    node = Node(known)
    read_node(node, move.context.inner(task.path))
    check_counts(node)
    container = node.container()
    data = manifest_bytes(container, entries(container, known), known.content, codec)
    return _seal(move, lambda out: out.write(data))


def _seal(move: _Move, write: Callable[[Any], object]) -> int:
    key, threads = move.new, move.context.threads
    with (
        move.destination() as target,
        stream.AgsWriter(target, key.encryption_key, aad_prefix=key.aad_prefix, threads=threads) as out,
    ):
        write(out)
    return out.file_length


MOVERS: Mapping[str, Callable[[_Move, Any], int]] = {"PARQUET": _parquet, "AVRO": _stream, "PUFFIN": _puffin}
