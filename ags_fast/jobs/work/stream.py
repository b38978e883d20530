"""The work on a file in the AGS1 format."""

from __future__ import annotations

import threading
from itertools import chain
from typing import TYPE_CHECKING

from ags_fast._core import OVERHEAD_NBYTES, Key
from ags_fast.ags1 import HEADER_NBYTES, encode_header
from ags_fast.dataset.names import check_path
from ags_fast.errors import AgsError, FormatError, IntegrityError
from ags_fast.jobs.work.context import (
    CHUNK_NBYTES,
    WRITTEN_EARLIER,
    AlreadyEncryptedError,
    Context,
    Outcome,
    SourceChangedError,
    Task,
    encrypted_already,
)
from ags_fast.jobs.work.rows import is_there
from ags_fast.stream import AgsReader, AgsWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.fs.base import ReadOnce
    from ags_fast.jobs.work.context import Operations

SMALL_NBYTES = 64 << 10  # plaintext up to this size is sealed and written by one call
_here = threading.local()  # a thread works on one file at a time


def _chunks(context: Context, file: AgsReader | ReadOnce, block_size: int) -> Iterator[memoryview]:
    """Yield what a file has from its cursor on, chunk by chunk, in one buffer. InterruptedError if the job ends."""
    size = max(CHUNK_NBYTES // block_size, context.threads or 1) * block_size
    buffer: bytearray = getattr(_here, "chunk", bytearray())
    if len(buffer) < size:
        buffer = _here.chunk = bytearray(size)
    chunk = memoryview(buffer)[:size]
    while got := file.readinto(chunk):
        context.check_goes_on(got)
        yield chunk[:got]


def _write(context: Context, task: Task, attempt: int) -> Outcome:
    """Encrypt a source, or a file of the dataset anew."""
    entry = task.entry
    if not _is_finished(context, entry, attempt):
        plain = _small_plaintext_of(context, task) if _is_small(entry) else None
        if plain is not None:
            _write_small(context, entry, plain)
        elif task.old is None:
            _encrypt_steps(context, entry)
        else:
            _rekey_steps(context, task.old, entry)
        if context.verify_after:
            _check(context, entry)
    return _ok(entry)


def _ok(entry: FileEntry) -> Outcome:
    return Outcome("ok", file_length=entry.file_length)


def _small_plaintext_of(context: Context, task: Task) -> bytes | None:
    """Read what a small file is made from, in one step. None if that is impossible, or on any error."""
    if task.old is not None:
        return _small_plaintext(context, task.old)
    assert context.other is not None
    entry = task.entry
    plain = context.other.read_if_unchanged(entry.source, entry.plain_length, entry.stamp)
    if plain is not None:
        _refuse_encrypted(plain)
    return plain


def _encrypt_steps(context: Context, entry: FileEntry) -> None:
    assert context.other is not None
    with context.other.open_once(entry.source) as file:
        if file.stamp != entry.stamp or file.size != entry.plain_length:
            raise SourceChangedError(f"{entry.source} has changed since it was planned: run the job again")
        chunks = _chunks(context, file, entry.block_size)
        first = next(chunks, memoryview(b""))
        _refuse_encrypted(bytes(first[:8]))
        with _writer(context, entry) as writer:
            for chunk in chain([first], chunks):
                writer.write(chunk)
                if writer.tell() > entry.plain_length:  # the file may grow for ever
                    break
            if writer.tell() != entry.plain_length or file.changed():
                raise SourceChangedError(f"{entry.source} changed while it was read: run the job again")
            context.check_plan()


def _refuse_encrypted(head: bytes) -> None:
    if reason := encrypted_already(head):
        raise AlreadyEncryptedError(reason)


def _writer(context: Context, entry: FileEntry) -> AgsWriter:
    return AgsWriter(
        context.dataset.begin(entry.file, tag=context.job_id, fsync=context.fsync),
        context.contents.dek(entry),
        aad_prefix=entry.aad_prefix,
        block_size=entry.block_size,
        threads=context.threads,
    )


def _is_small(entry: FileEntry) -> bool:
    return entry.plain_length <= min(SMALL_NBYTES, entry.block_size)


def _write_small(context: Context, entry: FileEntry, plain: bytes) -> None:
    """Write a small file in one step: the steps of a writer would cost as much as the work."""
    key, block_size = Key(context.contents.dek(entry)), entry.block_size
    stream = key.seal_bytes(entry.aad_prefix, block_size, encode_header(block_size), plain)
    context.check_plan()
    context.dataset.write_small(entry.file, stream, tag=context.job_id, fsync=context.fsync)


def _is_finished(context: Context, entry: FileEntry, attempt: int) -> bool:
    """Return whether an earlier attempt, or the job that is resumed, published the file before it died."""
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


def _check(context: Context, entry: FileEntry) -> None:
    if _small_plaintext(context, entry) is None:
        with context.reader(entry) as reader:
            reader.verify(context.check_goes_on)


def _small_plaintext(context: Context, entry: FileEntry) -> bytes | None:
    """Read and open a small file in one step. None if it is not small, or on any error: a reader reports the error."""
    if not _is_small(entry) or entry.file_length != HEADER_NBYTES + entry.plain_length + OVERHEAD_NBYTES:
        return None
    stream = context.dataset.read_if_unchanged(check_path(entry.file), entry.file_length)
    if stream is None or not stream.startswith(encode_header(entry.block_size)):
        return None
    try:
        key = Key(context.contents.dek(entry))
        return key.open_bytes(entry.aad_prefix, entry.block_size, 0, stream, HEADER_NBYTES, entry.plain_length, 1)
    except (AgsError, ValueError):
        return None


def _verify(context: Context, task: Task, attempt: int) -> Outcome:
    _check(context, task.entry)
    return _ok(task.entry)


def _decrypt(context: Context, task: Task, attempt: int) -> Outcome:
    entry = task.entry
    destination = context.other
    assert destination is not None
    # If the file should not exist, the one-step write itself finds out whether it does.
    fresh = not (attempt or context.resume or context.overwrite)
    if fresh and _decrypt_small(context, entry):
        return _ok(entry)
    there = destination.stat(check_path(entry.path))
    if there is not None:
        same = there.size == entry.plain_length
        # The planner refused files that existed before the job. So another attempt (an earlier one, or one at the same
        # time) or another program wrote this file meanwhile.
        looks = attempt or context.resume or not context.overwrite
        if same and (context.resume == "length" or (looks and same_as_source(context, entry))):
            return Outcome("skipped", *WRITTEN_EARLIER) if context.resume and not attempt else _ok(entry)
        if not context.overwrite and not context.resume:
            raise FileExistsError(is_there(entry.path))
    elif not fresh and _decrypt_small(context, entry):
        return _ok(entry)
    with context.reader(entry) as reader:
        new = context.restored(entry)
        try:
            for chunk in _chunks(context, reader, entry.block_size):
                new.write(chunk)
            new.publish()
        finally:
            new.discard()
    return _ok(entry)


def _decrypt_small(context: Context, entry: FileEntry) -> bool:
    """Decrypt a small file to a new file, in one step. Returns False if nothing was written, for any reason."""
    check_path(entry.path)
    plain = _small_plaintext(context, entry)
    return plain is not None and context.give_restored(entry, plain)


def _rekey_steps(context: Context, old: FileEntry, entry: FileEntry) -> None:
    with context.reader(old) as reader, _writer(context, entry) as writer:
        for chunk in _chunks(context, reader, entry.block_size):
            writer.write(chunk)
        context.check_plan()


OPERATIONS: Operations = {"encrypt": _write, "decrypt": _decrypt, "verify": _verify, "rekey": _write}


def holds(context: Context, entry: FileEntry, file: str) -> bool:
    """Return whether `file` holds what belongs to `entry`. Raises the reader's error if not."""
    with context.reader(entry, file=file) as reader:
        reader.read(1)
    return True


def same_as_source(context: Context, entry: FileEntry) -> bool:
    """Return whether the file outside of the dataset equals the dataset's, after a check of all tags."""
    assert context.other is not None
    with context.reader(entry) as reader, context.other.open_once(entry.path) as file:
        equal = all(reader.read(len(chunk)) == chunk for chunk in _chunks(context, file, entry.block_size))
        return equal and reader.read(1) == b""
