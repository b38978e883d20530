"""Avro files inside AGS1, by records: written, cut into splits, and read split by split."""

from __future__ import annotations

import contextlib
import io
import json
from itertools import islice
from typing import TYPE_CHECKING, Any

from ags_fast._extras import explaining
from ags_fast.ags1 import as_key
from ags_fast.avro.blocks import MAX_BLOCK_NBYTES
from ags_fast.avro.checking import checker
from ags_fast.avro.container import Container
from ags_fast.errors import AgsError, FormatError
from ags_fast.stream import AgsReader, AgsWriter

with explaining("ags_fast.avro"):
    import fastavro

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ags_fast._types import Buffer, ReadableSource, WritableTarget

__all__ = ["BUFFER_NBYTES", "read_split", "splits", "write"]

BUFFER_NBYTES = 1 << 20  # of plaintext that is read or written at a time
RECORDS = 100  # that are decoded at a time; more would live long enough to cost garbage collections


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
    key = as_key(key)
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
    max_block_nbytes: int = MAX_BLOCK_NBYTES,
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the records of a split. The arguments that are not named here are those of AgsReader.

    `start` and `end` are plaintext offsets, in bytes. `reader_schema` is an Avro schema to resolve records to, as for
    fastavro. A header, and a compressed block without the codec, may have `max_block_nbytes` at most.

    Raises:
        FormatError: The plaintext is not an intact Avro file, or a block has more than `max_block_nbytes`.
        IntegrityError: As AgsReader. A file that was cut never ends early without an error.
        ValueError: `start` and `end` are not a range.
    """
    if not 0 <= start <= end:
        raise ValueError(f"a split begins at 0 or later and does not end before it begins: not {start} to {end}")
    key = as_key(key)
    with AgsReader(
        source, key, length=length, aad_prefix=aad_prefix, threads=threads, storage_options=storage_options
    ) as raw:
        container = Container(raw, max_block_nbytes)
        text = container.metadata.get("avro.schema", b"")
        named: dict[str, Any] = {}
        with _avro_errors():
            check = checker(fastavro.parse_schema(json.loads(text.decode()), named), named)
        plain: Any = _Parts(container.header(text), container.pieces(start, end, check, BUFFER_NBYTES))
        with _avro_errors():
            records: Any = fastavro.reader(plain, reader_schema)
        while True:
            with _avro_errors():
                some = list(islice(records, RECORDS))
            if not some:
                return
            yield from some


class _Parts:
    """What fastavro reads: a header, and blocks that were checked."""

    def __init__(self, header: bytes, pieces: Iterator[tuple[list[Buffer], int]]) -> None:
        self._rest = memoryview(header)
        self._parts = (memoryview(part) for parts, _ in pieces for part in parts)

    def read(self, size: int) -> bytes:
        """Return as many bytes, or what is left."""
        found = bytes(self._rest[:size])
        self._rest = self._rest[size:]
        while len(found) < size and (part := next(self._parts, None)) is not None:
            wanted = size - len(found)
            found += part[:wanted]
            self._rest = part[wanted:]
        return found


@contextlib.contextmanager
def _avro_errors() -> Iterator[None]:
    """Turn the errors of fastavro, which are of every kind, into FormatError."""
    try:
        yield
    except (AgsError, OSError):
        raise
    except Exception as error:
        raise FormatError(f"the plaintext is not an intact Avro file: {type(error).__name__}: {error}") from error


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
    key = as_key(key)
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
