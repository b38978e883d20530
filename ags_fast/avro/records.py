"""Avro files inside AGS1, by records: written, cut into splits, and read split by split."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

from ags_fast.errors import AgsError, FormatError
from ags_fast.stream import AgsReader, AgsWriter

try:
    import fastavro
except ModuleNotFoundError:
    raise ModuleNotFoundError("ags_fast.avro needs fastavro: pip install 'ags_fast[avro]'") from None

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ags_fast._types import Buffer, ReadableSource, WritableTarget

__all__ = ["BUFFER_NBYTES", "SYNC_NBYTES", "find_marker", "read_split", "splits", "write"]

SYNC_NBYTES = 16
BUFFER_NBYTES = 1 << 20  # fastavro reads a few bytes at a time; also how much is searched for a sync marker at a time


def splits(
    source: ReadableSource,
    key: Buffer,
    *,
    length: int | None,
    aad_prefix: Buffer | None = b"",
    split_size: int = 64 << 20,
    storage_options: Mapping[str, Any] | None = None,
) -> list[tuple[int, int]]:
    """Cut the plaintext of an encrypted Avro file into ranges. Only the stream's header is read.

    Args:
        source: As for AgsReader.
        key: As for AgsReader.
        length: As for AgsReader.
        aad_prefix: As for AgsReader.
        split_size: About how many bytes of plaintext a split has. A split of at least a block ends where a block ends,
            so that no two splits open the same block.
        storage_options: As for AgsReader.

    Returns:
        ``(start, end)`` plaintext offsets, in bytes, that cover the plaintext once.

    Raises:
        FormatError: As AgsReader.
        IntegrityError: As AgsReader.
        ValueError: `split_size` is less than 1 byte.
    """
    if split_size < 1:
        raise ValueError(f"split_size must be at least 1 byte, not {split_size}")
    with AgsReader(
        source, key, length=length, aad_prefix=aad_prefix, threads=1, storage_options=storage_options
    ) as reader:
        step = max(split_size // reader.block_size * reader.block_size, min(split_size, reader.block_size))
        return [(start, min(start + step, reader.length)) for start in range(0, reader.length, step)]


def read_split(
    source: ReadableSource,
    key: Buffer,
    start: int,
    end: int,
    *,
    length: int | None,
    aad_prefix: Buffer | None = b"",
    reader_schema: Any = None,
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the records of a split.

    Args:
        source: As for AgsReader.
        key: As for AgsReader.
        start: The plaintext offset where the split begins, in bytes.
        end: The plaintext offset where the split ends, in bytes.
        length: As for AgsReader.
        aad_prefix: As for AgsReader.
        reader_schema: An Avro schema to resolve records to, as for fastavro.
        threads: As for AgsReader.
        storage_options: As for AgsReader.

    Raises:
        FormatError: The plaintext is not an Avro file.
        IntegrityError: As AgsReader. A file that was cut never ends early without an error.
        ValueError: `start` and `end` are not a range.
    """
    if not 0 <= start <= end:
        raise ValueError(f"a split begins at 0 or later and does not end before it begins: not {start} to {end}")
    with (
        AgsReader(
            source, key, length=length, aad_prefix=aad_prefix, threads=threads, storage_options=storage_options
        ) as raw,
        _Plaintext(raw, BUFFER_NBYTES) as file,
    ):
        with _avro_errors():
            blocks = fastavro.block_reader(file, reader_schema)
        header_end = file.tell()
        file.seek(header_end - SYNC_NBYTES)
        marker = file.read(SYNC_NBYTES)
        at = header_end - SYNC_NBYTES if start <= header_end - SYNC_NBYTES else find_marker(file, marker, start, end)
        if at is None or at >= end or at + SYNC_NBYTES >= raw.length:
            return
        file.seek(at + SYNC_NBYTES)
        while True:
            with _avro_errors():
                block = next(blocks, None)
                if block is None:
                    return
                records: list[Any] = list(block)
            yield from records
            if block.offset + block.size >= end + SYNC_NBYTES:
                return


class _Plaintext(io.BufferedReader):
    """Allocates no more than there is to read: sizes come from the file, which may be damaged."""

    raw: AgsReader

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size if size is None else min(size, max(0, self.raw.length - self.tell())))


@contextlib.contextmanager
def _avro_errors() -> Iterator[None]:
    """Turn the errors of fastavro, which are of every kind, into FormatError."""
    try:
        yield
    except (AgsError, OSError):
        raise
    except Exception as error:
        raise FormatError(f"the plaintext is not an intact Avro file: {type(error).__name__}: {error}") from error


def find_marker(file: Any, marker: bytes, start: int, end: int) -> int | None:
    """Return where the first sync marker of the split begins, or None."""
    file.seek(start)
    window = b""  # the bytes from `start` on that were read
    while start < end:
        piece = file.read(min(BUFFER_NBYTES, end + SYNC_NBYTES - 1 - start - len(window)))
        if not piece:
            return None
        window += piece
        found: int = window.find(marker)
        if found >= 0:
            return start + found
        skipped = max(0, len(window) - SYNC_NBYTES + 1)  # a marker may begin in the bytes that are kept
        start += skipped
        window = window[skipped:]
    return None


def write(
    target: WritableTarget,
    key: Buffer,
    schema: Any,
    records: Iterable[Any],
    *,
    codec: str = "null",
    aad_prefix: Buffer | None = b"",
    block_size: int = 1 << 20,
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> int:
    """Write records as an Avro file inside AGS1.

    Args:
        target: As for AgsWriter. A path appears only when the file is complete.
        key: As for AgsWriter.
        schema: As for ``fastavro.writer``.
        records: As for ``fastavro.writer``.
        codec: As for ``fastavro.writer``.
        aad_prefix: As for AgsWriter.
        block_size: As for AgsWriter.
        threads: As for AgsWriter.
        storage_options: As for AgsWriter.
        **options: Of ``fastavro.writer``, such as ``sync_interval`` and ``metadata``.

    Returns:
        The stream's length in bytes, which a reader must be told.
    """
    with AgsWriter(
        target, key, aad_prefix=aad_prefix, block_size=block_size, threads=threads, storage_options=storage_options
    ) as raw:
        # No `with` for the buffer: left by an exception it would flush and close, and so complete, the stream.
        file = io.BufferedWriter(raw, BUFFER_NBYTES)
        try:
            fastavro.writer(file, schema, records, codec=codec, **options)
            file.flush()
        except BaseException:
            raw.abort()
            raise
        finally:
            if not raw.closed:
                file.detach()
    return raw.file_length
