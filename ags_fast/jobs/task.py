"""One file in, one row out: what a worker does, wherever it runs. Knows nothing of Spark."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ags_fast._core import OVERHEAD_NBYTES, Key
from ags_fast.ags1 import HEADER_NBYTES, encode_header
from ags_fast.errors import AgsError, FormatError, IntegrityError
from ags_fast.fs import NotAFileError, Store
from ags_fast.jobs.dataset import FileEntry, check_path
from ags_fast.jobs.plan import Task
from ags_fast.jobs.results import Row
from ags_fast.keys.envelope import Envelope, binding
from ags_fast.stream import AgsReader, AgsWriter

if TYPE_CHECKING:
    from ags_fast.fs import NewFile, NewObject

__all__ = [
    "AlreadyEncryptedError",
    "Context",
    "SourceChangedError",
    "describe",
    "encrypted_already",
    "equal",
    "failed_row",
    "is_there",
    "make_row",
    "planned_row",
    "run_file",
]

SMALL_NBYTES = 64 << 10  # of plaintext that is sealed and written by one call
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
    moves: Mapping[str, str] = field(default_factory=dict)  # rotate: the keys to leave, and those to go to
    ready: Mapping[tuple[str, bytes], bytes] = field(default_factory=dict)  # rotate: what the KMS has wrapped anew
    concurrency: int = 1  # rotate: calls of the KMS at once
    isolate: bool = False  # run each file in a process of its own: one of them kills its worker
    without: frozenset[str] = frozenset()  # keys that are not to be had; of Parquet, their columns are left out
    preserve: bool = True  # decrypt: give files the modes and times that their sources had

    def dek(self, entry: FileEntry) -> bytes:
        return self.envelope.unwrap(entry.key_id, entry.wrapped_dek, binding(self.dataset_id, "dek", entry.file))

    def restored(self, entry: FileEntry) -> NewFile | NewObject:
        """The file that an entry is decrypted to, in the making. Until it is complete, nobody else may read it."""
        assert self.other is not None
        mode, mtime_ns = (entry.mode, entry.mtime_ns) if self.preserve else (None, None)
        return self.other.new(entry.path, tag=self.job_id, private=True, fsync=self.fsync, mode=mode, mtime_ns=mtime_ns)

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
        except NotAFileError:
            raise IntegrityError(f"{name} is no regular file, but a manifest says it is part of the dataset") from None


def run_file(context: Context, task: Task, attempt: int = 0) -> Row:
    """Do one file. What is wrong with it is in the row; only what is wrong with the worker is raised."""
    begun = time.monotonic()
    try:
        if task.entry.format != "ags1":
            status, error_class, text, file_length = _run_other(context, task, attempt)
            task = task._replace(entry=task.entry._replace(file_length=file_length))
        else:
            note = _OPERATIONS[context.op][0](context, task, attempt)
            status, error_class, text = ("ok", None, None) if note is None else ("skipped", *note)
    except AlreadyEncryptedError as error:
        status, error_class, text = "skipped", "AlreadyEncryptedError", str(error)
    except Exception as error:
        status, error_class, text = "failed", type(error).__name__, describe(error)
    return make_row(context, task, attempt, status, error_class, text, time.monotonic() - begun)


def _run_other(context: Context, task: Task, attempt: int) -> tuple[str, str | None, str | None, int]:
    """Do a file that is no AGS1 stream: status, class and text of its row, and the bytes of the encrypted file."""
    if context.op == "rotate":
        from ags_fast.jobs.rotation import rewrite_manifest

        return "ok", None, None, rewrite_manifest(context, task, attempt)
    if task.entry.format != "parquet":
        raise FormatError(f"a newer ags_fast made this file: its format is {task.entry.format!r}")
    from ags_fast.jobs import parquet

    return parquet.run(context, task, attempt)


def make_row(
    context: Context,
    task: Task,
    attempt: int = 0,
    status: str = "ok",
    error_class: str | None = None,
    error: str | None = None,
    seconds: float = 0.0,
) -> Row:
    """The row of a file; without more arguments, of one with which all is well."""
    _, source, destination = _OPERATIONS[context.op]
    entry = task.entry
    return Row(
        source(context, task),
        destination(context, task),
        status,
        error_class,
        error,
        entry.plain_length,
        entry.file_length or None,
        entry.block_size or None,
        entry.format,
        entry.key_id or None,
        seconds,
        attempt,
        _host(),
    )


def planned_row(src: str, dst: str | None, entry: FileEntry, status: str = "planned") -> Row:
    """The row of a file that nobody has done yet."""
    return Row(
        src,
        dst,
        status,
        plain_length=entry.plain_length,
        file_length=entry.file_length or None,
        block_size=entry.block_size or None,
        format=entry.format,
        key_id=entry.key_id or None,
    )


def failed_row(context: Context, task: Task, attempt: int, error_class: str, error: str) -> Row:
    return make_row(context, task, attempt, "failed", error_class, error)


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


_host = functools.cache(socket.gethostname)


_here = threading.local()  # a thread does one file at a time


def _chunks(context: Context, block_size: int) -> memoryview:
    size = max(CHUNK_NBYTES // block_size, context.threads or 1) * block_size
    chunk: bytearray = getattr(_here, "chunk", bytearray())
    if len(chunk) < size:
        chunk = _here.chunk = bytearray(size)
    return memoryview(chunk)[:size]


# ---------------------------------------------------------------------------------------------------------- operations


def _encrypt(context: Context, task: Task, attempt: int) -> tuple[str, str] | None:
    entry = task.entry
    assert context.other is not None
    if _is_finished(context, entry, attempt):
        return None
    if _is_small(entry) and (plain := context.other.take(entry.source, entry.plain_length, entry.stamp)) is not None:
        _refuse_encrypted(plain)
        _write_small(context, entry, plain)
    else:
        _encrypt_steps(context, context.other, entry)
    if context.verify_after:
        _check(context, entry)
    return None


def _encrypt_steps(context: Context, source: Store, entry: FileEntry) -> None:
    with source.open(entry.source) as file:
        if file.stamp != entry.stamp or file.size != entry.plain_length:
            raise SourceChangedError(f"{entry.source} has changed since it was planned: run the job again")
        chunk = _chunks(context, entry.block_size)
        got = file.readinto(chunk)
        _refuse_encrypted(bytes(chunk[: min(got, 8)]))
        with _writer(context, entry) as writer:
            while got and writer.tell() <= entry.plain_length:  # it may grow for ever
                writer.write(chunk[:got])
                got = file.readinto(chunk)
            if writer.tell() != entry.plain_length or file.changed():
                raise SourceChangedError(f"{entry.source} changed while it was read: run the job again")


def _refuse_encrypted(head: bytes) -> None:
    if reason := encrypted_already(head):
        raise AlreadyEncryptedError(reason)


def _writer(context: Context, entry: FileEntry) -> AgsWriter:
    return AgsWriter(
        context.dataset.new(entry.file, tag=context.job_id, fsync=context.fsync),
        context.dek(entry),
        aad_prefix=entry.aad_prefix,
        block_size=entry.block_size,
        threads=context.threads,
    )


def _is_small(entry: FileEntry) -> bool:
    return entry.plain_length <= min(SMALL_NBYTES, entry.block_size)


def _write_small(context: Context, entry: FileEntry, plain: bytes) -> None:
    """Like a writer, but all at once: around a small file, each step costs as much as what is done with it."""
    key, block_size = Key(context.dek(entry)), entry.block_size
    stream = key.seal_bytes(entry.aad_prefix, block_size, encode_header(block_size), plain)
    context.dataset.put(entry.file, stream, tag=context.job_id, fsync=context.fsync)


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
    if _is_small(entry) and _is_intact(context, entry):
        return
    with context.reader(entry) as reader:
        reader.verify()


def _is_intact(context: Context, entry: FileEntry) -> bool:
    """Whether all is well with a small file. If not, a reader will say what is wrong."""
    header = encode_header(entry.block_size)
    if entry.file_length != HEADER_NBYTES + entry.plain_length + OVERHEAD_NBYTES:
        return False
    stream = context.dataset.take(check_path(entry.file), entry.file_length)
    if stream is None or not stream.startswith(header):
        return False
    try:
        key = Key(context.dek(entry))
        key.open_bytes(entry.aad_prefix, entry.block_size, 0, stream, HEADER_NBYTES, entry.plain_length, 1)
    except (AgsError, ValueError):
        return False
    return True


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
        if same and (context.resume == "length" or (looks and equal(context, entry))):
            return ("AlreadyThere", "an earlier run wrote it") if context.resume and not attempt else None
        if not context.overwrite and not context.resume:
            raise FileExistsError(is_there(entry.path))
    with context.reader(entry) as reader:
        new = context.restored(entry)
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


def equal(context: Context, entry: FileEntry) -> bool:
    """Whether the file at the entry's path elsewhere is what the dataset holds, every tag of which passes."""
    assert context.other is not None
    with context.reader(entry) as reader, context.other.open(entry.path) as file:
        chunk = _chunks(context, entry.block_size)
        while got := file.readinto(chunk):
            if reader.read(got) != chunk[:got]:
                return False
        return reader.read(1) == b""


def _rekey(context: Context, task: Task, attempt: int) -> tuple[str, str] | None:
    entry = task.entry
    assert task.old is not None
    if _is_finished(context, entry, attempt):
        return None
    with context.reader(task.old) as reader:
        if _is_small(entry):
            _write_small(context, entry, reader.read())
        else:
            with _writer(context, entry) as writer:
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
    "rotate": (_rekey, _old_file, _in_dataset),  # manifests, which are no AGS1 streams of data
}
