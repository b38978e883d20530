"""Avro files inside AGS1, by records: written, cut into splits, and read split by split."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import operator
import struct
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from ags_fast._extras import explaining
from ags_fast.ags1 import as_key
from ags_fast.avro.blocks import MAX_BLOCK_NBYTES
from ags_fast.avro.checking import checker, readable
from ags_fast.avro.container import Container, framed
from ags_fast.errors import AgsError, FormatError
from ags_fast.stream import AgsReader, AgsWriter

with explaining("ags_fast.avro"):
    import fastavro
    from fastavro.write import LOGICAL_WRITERS, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ags_fast._types import Buffer, ReadableSource, WritableTarget

__all__ = ["BUFFER_NBYTES", "read_split", "splits", "write"]

BUFFER_NBYTES = 1 << 20  # of plaintext that is read or written at a time
FLAGS = ("strict", "strict_allow_default", "disable_tuple_notation")  # of fastavro.writer
BOUNDED: dict[str, Callable[[Any], object]] = {  # what fastavro does not check: whether a value is of the type
    "null": lambda value: value is None,
    "boolean": lambda value: type(value).__name__ in ("bool", "bool_"),  # the latter is numpy's
    "int": lambda value: -(1 << 31) <= operator.index(value) < 1 << 31,
    "long": lambda value: -(1 << 63) <= operator.index(value) < 1 << 63,
    "float": functools.partial(struct.pack, "<f"),
}
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

    `split_size` is about how many bytes of plaintext a split has. A split of at least a block ends where a block ends,
    so that no two splits open the same block. The other arguments are those of AgsReader. Returns ``(start, end)``
    plaintext offsets, in bytes, that cover the plaintext once.

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
    """Yield the records of a split: those of the blocks behind sync markers from `start` to `end`, bytes of plaintext.

    `reader_schema` is an Avro schema to resolve records to, as for fastavro. A header, and a compressed block without
    the codec, may have `max_block_nbytes`. The other arguments are those of AgsReader.

    Raises:
        FormatError: The plaintext is not an intact Avro file, a block has more than `max_block_nbytes`, or a schema or
            a value is none of fastavro's.
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
        named: dict[str, Any] = {}
        with _avro_errors("the Avro file has a malformed schema"):
            schema = readable(json.loads(container.metadata.get("avro.schema", b"")))
            check = checker(fastavro.parse_schema(schema, named), named)
        header = container.header(json.dumps(schema).encode())
        blocks = chain.from_iterable(container.pieces(start, end, check, BUFFER_NBYTES))
        plain: Any = _Parts(framed(header, blocks))
        with _avro_errors("the reader's schema does not fit that of the Avro file"):
            records: Any = fastavro.reader(plain, reader_schema)
        while True:
            with _avro_errors("the Avro file has values that no type of Python, or of the reader's schema, has"):
                some = list(islice(records, RECORDS))
            if not some:
                return
            yield from some


class _Parts:
    """What fastavro reads: the parts of a file, one after the other."""

    def __init__(self, parts: Iterable[Buffer]) -> None:
        self._rest = memoryview(b"")
        self._parts = (memoryview(part) for part in parts)

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
def _avro_errors(what: str) -> Iterator[None]:
    """Turn the errors of fastavro, which are of every kind, into FormatError. Blocks were checked before."""
    try:
        yield
    except (AgsError, OSError, MemoryError):
        raise
    except Exception as error:
        raise FormatError(f"{what}: {type(error).__name__}: {error}") from error


def write(
    target: WritableTarget,
    key: Buffer,
    schema: Any,
    records: Iterable[Any],
    *,
    codec: str = "null",
    aad_prefix: Buffer | None = b"",
    block_size: int | str = 1 << 20,
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> int:
    """Write records as an Avro file inside AGS1. Each is checked against the schema.

    `schema`, `records`, `codec` and `options`, such as ``sync_interval`` and ``metadata``, are as for
    ``fastavro.writer``, the other arguments as for AgsWriter. A path appears only when the file is complete.

    Returns:
        The stream's length in bytes, which a reader must be told.

    Raises:
        ValueError: A value is not of its type, such as a number above the largest int. Nothing is written.
    """
    key = as_key(key)
    with AgsWriter(
        target, key, aad_prefix=aad_prefix, block_size=block_size, threads=threads, storage_options=storage_options
    ) as raw:
        # No `with` for the buffer: left by an exception it would flush and close, and so complete, the stream.
        file = io.BufferedWriter(raw, BUFFER_NBYTES)
        try:
            level = options.pop("codec_compression_level", None)
            flags = {name: options.pop(name, False) for name in FLAGS}
            writer: Any = Writer(file, schema, codec, compression_level=level, options=flags, **options)
            named: dict[str, Any] = {}
            writer.schema = fastavro.parse_schema(_bounded(schema), named)  # after the header with the schema itself
            writer._named_schemas = named  # noqa: SLF001
            for record in records:
                writer.write(record)
            writer.flush()
        except BaseException:
            raw.abort()
            raise
        finally:
            if not raw.closed:
                file.detach()
    return raw.file_length


def _bounded(schema: Any) -> Any:
    """Return a schema whose types check values that fastavro would write as others, or would wrap."""
    if isinstance(schema, list):
        return [one if one == "null" else _bounded(one) for one in schema]
    if not isinstance(schema, dict):
        return _bounded({"type": schema}) if schema in BOUNDED else schema
    made = {name: value for name, value in schema.items() if not name.startswith("__")}  # but fastavro's marks
    if isinstance(kind := made.get("type"), str) and kind in BOUNDED:
        return {**made, "logicalType": "bounded", "logical": made.get("logicalType")}
    made |= {name: _bounded(made[name]) for name in ("type", "items", "values") if name in made}
    if "fields" in made:
        made["fields"] = [{**field, "type": _bounded(field["type"])} for field in made["fields"]]
    return made


def _check_value(value: Any, schema: Any) -> Any:
    """Return what fastavro writes. Raises ValueError, without the value, if it is not of its type."""
    kind = schema["type"]
    prepare = LOGICAL_WRITERS.get(f"{kind}-{schema['logical']}")
    value = value if prepare is None else prepare(value, schema)
    try:
        if BOUNDED[kind](value):
            return value
    except (OverflowError, TypeError, struct.error):
        pass
    raise ValueError(f"a record has a value that is not of its type: it is no {kind}")


LOGICAL_WRITERS.update({f"{kind}-bounded": _check_value for kind in BOUNDED})
