"""One file in, one row out: what a worker does, wherever it runs. Knows nothing of Spark."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from ags_fast.errors import AgsError, FormatError, IntegrityError
from ags_fast.fs import Store
from ags_fast.jobs.dataset import FileEntry, check_path
from ags_fast.jobs.plan import Task
from ags_fast.jobs.results import Row
from ags_fast.keys.envelope import Envelope, binding
from ags_fast.stream import AgsReader, AgsWriter

__all__ = [
    "Context",
    "SourceChangedError",
    "encrypted_already",
    "failed_row",
    "is_there",
    "make_row",
    "planned_row",
    "run_file",
]

CHUNK_NBYTES = 1 << 20  # of plaintext at a time, or a block a thread if that is more


class SourceChangedError(AgsError):
    """A source is not what was planned. The next run, or a resumed one, plans it anew, with a new key."""


class AlreadyEncryptedError(AgsError):
    """A source is encrypted as it is: it is skipped. To open it needs its own key, not the dataset's."""


@dataclass(frozen=True)
class Context:
    """What all files of a job have in common. It goes to every worker, and so holds no key: the KMS is named only by
    its properties, and data keys are wrapped."""

    op: str
    job_id: str
    dataset_id: str
    dataset: Store
    envelope: Envelope
    other: Store | None = None  # the source of an encryption, the destination of a decryption
    threads: int | None = None
    fsync: bool = True
    verify_after: bool = False
    overwrite: bool = False
    resume: str | None = None
    isolate: bool = False  # run each file in a process of its own: one of them kills its worker

    def dek(self, entry: FileEntry) -> bytes:
        return self.envelope.unwrap(entry.key_id, entry.wrapped_dek, binding(self.dataset_id, "dek", entry.file))

    def reader(self, entry: FileEntry, file: str | None = None) -> AgsReader:
        """The plaintext of `entry`, or what `file` has to show for it."""
        name = check_path(file or entry.file)
        try:
            return AgsReader(
                self.dataset.source(name),
                self.dek(entry),
                length=entry.file_length,
                aad_prefix=entry.aad_prefix,
                block_size=entry.block_size,
                threads=self.threads,
            )
        except FileNotFoundError:
            raise IntegrityError(f"{name} is missing, but a manifest says it is part of the dataset") from None


def run_file(context: Context, task: Task, attempt: int = 0) -> Row:
    """Do one file. What is wrong with it is in the row; only what is wrong with the worker is raised."""
    begun = time.monotonic()
    row = make_row(context, task, attempt)
    try:
        note = _OPERATIONS[context.op][0](context, task, attempt)
        if note is not None:
            row = row._replace(status="skipped", error_class=note[0], error=note[1])
    except AlreadyEncryptedError as error:
        row = row._replace(status="skipped", error_class="AlreadyEncryptedError", error=str(error))
    except Exception as error:
        row = row._replace(status="failed", error_class=type(error).__name__, error=describe(error))
    return row._replace(seconds=time.monotonic() - begun)


def make_row(context: Context, task: Task, attempt: int = 0) -> Row:
    """The row of a file with which all is well."""
    _, source, destination = _OPERATIONS[context.op]
    row = planned_row(source(context, task), destination(context, task), task.entry, "ok")
    return row._replace(attempt=attempt, host=_host())


def planned_row(src: str, dst: str | None, entry: FileEntry, status: str = "planned") -> Row:
    """The row of a file that nobody has done yet."""
    return Row(
        src,
        dst,
        status,
        plain_length=entry.plain_length,
        file_length=entry.file_length,
        block_size=entry.block_size,
        format=entry.format,
        key_id=entry.key_id or None,
    )


def failed_row(context: Context, task: Task, attempt: int, error_class: str, error: str) -> Row:
    return make_row(context, task, attempt)._replace(status="failed", error_class=error_class, error=error)


def describe(error: BaseException) -> str:
    """An error in one line. Never an exception's arguments: some libraries put what they were given into them."""
    if isinstance(error, OSError) and error.strerror:
        named = isinstance(error.filename, (str, bytes))  # it may be a descriptor
        return f"{error.strerror}: {os.fsdecode(error.filename)!r}" if named else error.strerror
    if isinstance(error, (AgsError, OSError, ValueError, ImportError)) and str(error):
        return str(error).splitlines()[0][:1000]
    return f"an unexpected {type(error).__name__} in {_origin(error)}"


def _origin(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "native code" if trace is None else f"{trace.tb_frame.f_globals.get('__name__')}, line {trace.tb_lineno}"


_known_host: tuple[int, str] | None = None


def _host() -> str:
    global _known_host
    if _known_host is None or _known_host[0] != os.getpid():
        _known_host = os.getpid(), socket.gethostname()
    return _known_host[1]


_chunk: bytearray | None = None  # of this process, which does one file at a time


def _chunks(context: Context, block_size: int) -> memoryview:
    global _chunk
    size = max(CHUNK_NBYTES // block_size, context.threads or 1) * block_size
    if _chunk is None or len(_chunk) < size:
        _chunk = bytearray(size)
    return memoryview(_chunk)[:size]


# ---------------------------------------------------------------------------------------------------------- operations


def _encrypt(context: Context, task: Task, attempt: int) -> tuple[str, str] | None:
    entry = task.entry
    assert context.other is not None
    if _is_finished(context, entry, attempt):
        return None
    with context.other.open(entry.source) as file:
        if file.stamp != entry.stamp or file.size != entry.plain_length:
            raise SourceChangedError(f"{entry.source} has changed since it was planned: run the job again")
        new = context.dataset.new(entry.file, tag=context.job_id, fsync=context.fsync)
        with AgsWriter(
            new,
            context.dek(entry),
            aad_prefix=entry.aad_prefix,
            block_size=entry.block_size,
            threads=context.threads,
        ) as writer:
            chunk = _chunks(context, entry.block_size)
            while got := file.readinto(chunk):
                if writer.tell() == 0 and (reason := encrypted_already(bytes(chunk[: min(got, 8)]))):
                    raise AlreadyEncryptedError(reason)
                writer.write(chunk[:got])
                if writer.tell() > entry.plain_length:
                    break
            if writer.tell() != entry.plain_length or file.changed():
                raise SourceChangedError(f"{entry.source} changed while it was read: run the job again")
    if context.verify_after:
        _check(context, entry)
    return None


def _is_finished(context: Context, entry: FileEntry, attempt: int) -> bool:
    """Whether an earlier attempt, or the job that is resumed, published the file, and died before it could say so."""
    if not attempt and context.resume != "verify":
        return False
    there = context.dataset.stat(entry.file)
    if there is None or there.size != entry.file_length:
        return False
    if context.resume == "verify":
        try:
            _check(context, entry)
        except (IntegrityError, FormatError):
            return False
    return True


def encrypted_already(head: bytes) -> str | None:
    """Why a file that begins so need not be encrypted; None if it is as it should be."""
    if head[:4] == b"PARE":
        return "it is a Parquet file with an encrypted footer already"
    block_size = int.from_bytes(head[4:8], "little")
    if head[:4] == b"AGS1" and len(head) >= 8 and 0 < block_size < 1 << 31:
        return f"it is an AGS1 stream with blocks of {block_size} bytes already"
    return None


def _check(context: Context, entry: FileEntry) -> None:
    with context.reader(entry) as reader:
        reader.verify()


def _verify(context: Context, task: Task, attempt: int) -> tuple[str, str] | None:
    _check(context, task.entry)
    return None


def _decrypt(context: Context, task: Task, attempt: int) -> tuple[str, str] | None:
    entry = task.entry
    destination = context.other
    assert destination is not None
    there = destination.stat(check_path(entry.path))
    if there is not None:
        same = there.size == entry.plain_length
        # What was there before the job, its planner refused. Another attempt may have written it meanwhile, an earlier
        # one or one that runs beside this one, and so may anybody else.
        looks = attempt or context.resume or not context.overwrite
        if same and (context.resume == "length" or (looks and _equal(context, entry))):
            return ("AlreadyThere", "an earlier run wrote it") if context.resume and not attempt else None
        if not context.overwrite and not context.resume:
            raise FileExistsError(is_there(entry.path))
    with context.reader(entry) as reader:
        new = destination.new(entry.path, tag=context.job_id, private=True, fsync=context.fsync)
        try:
            chunk = _chunks(context, entry.block_size)
            while got := reader.readinto(chunk):
                new.write(chunk[:got])
            new.publish()
        finally:
            new.discard()
    return None


def is_there(path: str) -> str:
    return f"{path} is there already: pass overwrite=True to replace it"


def _equal(context: Context, entry: FileEntry) -> bool:
    assert context.other is not None
    with context.reader(entry) as reader, context.other.open(entry.path) as file:
        chunk = _chunks(context, entry.block_size)
        while got := file.readinto(chunk):
            if reader.read(got) != chunk[:got]:
                return False
    return True


def _rekey(context: Context, task: Task, attempt: int) -> tuple[str, str] | None:
    entry = task.entry
    assert task.old is not None
    if _is_finished(context, entry, attempt):
        return None
    with context.reader(task.old) as reader:
        new = context.dataset.new(entry.file, tag=context.job_id, fsync=context.fsync)
        with AgsWriter(
            new,
            context.dek(entry),
            aad_prefix=entry.aad_prefix,
            block_size=entry.block_size,
            threads=context.threads,
        ) as writer:
            chunk = _chunks(context, entry.block_size)
            while got := reader.readinto(chunk):
                writer.write(chunk[:got])
    if context.verify_after:
        _check(context, entry)
    return None


def _in_dataset(context: Context, task: Task) -> str:
    return context.dataset.full_path(task.entry.file)


def _source_file(context: Context, task: Task) -> str:
    assert context.other is not None
    return context.other.full_path(task.entry.source)


def _destination_file(context: Context, task: Task) -> str:
    assert context.other is not None
    return context.other.full_path(task.entry.path)


def _old_file(context: Context, task: Task) -> str:
    assert task.old is not None
    return context.dataset.full_path(task.old.file)


# What is done, and the names of what it reads and writes.
_OPERATIONS: dict[
    str,
    tuple[
        Callable[[Context, Task, int], tuple[str, str] | None],
        Callable[[Context, Task], str],
        Callable[[Context, Task], str | None],
    ],
] = {
    "encrypt": (_encrypt, _source_file, _in_dataset),
    "decrypt": (_decrypt, _in_dataset, _destination_file),
    "verify": (_verify, _in_dataset, lambda context, task: None),
    "rekey": (_rekey, _old_file, _in_dataset),
}
