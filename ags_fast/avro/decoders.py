"""What decodes plain blocks of Avro records to Arrow: the engine if they are flat, else datafusion, polars or fastavro.

datafusion and polars were written for intact files: on others datafusion can loop without end, and polars panics. So
they get only blocks that the engine has found to hold whole records, uncompressed, of schemas that they read right.
"""

from __future__ import annotations

import importlib.util
import io
import os
from itertools import islice
from typing import TYPE_CHECKING, Any

import fastavro
import pyarrow as pa

from ags_fast._core import AVRO_BYTES, AVRO_ENUM, AVRO_FIXED, AVRO_INT, AVRO_NUMBER, avro_columns
from ags_fast.avro.container import framed
from ags_fast.avro.schema import plain_type
from ags_fast.errors import AgsError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ags_fast._types import Buffer
    from ags_fast.avro.container import Block
    from ags_fast.avro.schema import Node

NAMES = (
    "ags_fast",
    "datafusion",
    "polars",
    "fastavro",
)  # the first finds by itself that a block holds no whole records
ROOM_NBYTES = 64 << 20  # of columns at a time: each has room for all bytes of the blocks, and touches what it needs
# The kind in the engine, and the bytes of a value in Arrow.
FLAT = {"int": (AVRO_INT, 4), "long": (AVRO_NUMBER, 8), "enum": (AVRO_ENUM, 4)}
FLAT |= {"bytes": (AVRO_BYTES, 0), "string": (AVRO_BYTES, 0), "fixed": (AVRO_FIXED, 0)}
FLAT |= {"boolean": (AVRO_FIXED, 1), "float": (AVRO_FIXED, 4), "double": (AVRO_FIXED, 8)}
# Node kinds that each reads right, as the tests compare them with fastavro.
READS = {
    "ags_fast": {*FLAT, "optional"},
    "datafusion": {*FLAT, "optional", "record", "array", "map"},
    "polars": {*FLAT, "optional"} - {"boolean", "fixed"},  # a boolean that is neither 0 nor 1 is false for polars alone
}

_first_process: list[int] = []  # where threads of datafusion or polars may run


def refusal(name: str, node: Node) -> str | None:
    """Return why a decoder does not take files of this schema; None if it does."""
    if name == "fastavro":
        return None
    if importlib.util.find_spec(name) is None:
        return "not installed"
    if name == "datafusion" and not (hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")):
        return "reads files by path only, and this system has no files in memory"
    if name != "ags_fast" and _first_process and _first_process[0] != os.getpid():
        return "cannot run in a forked process whose parent has used it"
    for below in node.all():
        if below is node or below.empty:
            continue
        if below.kind not in READS[name]:
            return f"does not read {below.kind}"
        if any(child.empty for child in below.children if below.kind != "record"):
            return "does not read items without bytes"
        if below.kind == "fixed" and below.number == 0:
            return "does not read a fixed of 0 bytes"
    return None


class Scratch:
    """Memory for one file without a codec after the other, kept so that the system need not clear its pages again."""

    def __init__(self) -> None:
        self._file: Any = None

    def close(self) -> None:
        """Release the memory."""
        if self._file is not None:
            self._file.close()

    def path(self, parts: Iterable[Buffer]) -> str:
        """Return the path of a file of these parts, in memory. It is there until the next call."""
        if self._file is None:
            self._file = os.fdopen(os.memfd_create("avro"), "wb")
        self._file.seek(0)
        self._file.writelines(parts)
        self._file.truncate()
        return f"/proc/self/fd/{self._file.fileno()}"


def decode(
    name: str, node: Node, header: bytes, blocks: list[Block], columns: list[int], batch_size: int, scratch: Scratch
) -> Iterator[pa.RecordBatch]:
    """Decode blocks without a codec, in parts: these fields, none of them empty. `header` has `plain_schema`.

    Raises FormatError if the decoder refuses a value.
    """
    try:
        if name == "ags_fast":
            yield from _flat(node, blocks, columns, batch_size)
        elif name == "datafusion":
            yield from _datafusion(node, scratch.path(framed(header, blocks)), columns, batch_size)
        else:
            others = {"polars": _polars, "fastavro": _fastavro}
            yield from others[name](node, b"".join(framed(header, blocks)), columns, batch_size)
    except (AgsError, OSError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # Rust derives its panics from BaseException
        text = f"the Avro file has values that are not of its schema: {name} raises {type(error).__name__}"
        raise FormatError(text) from error


def _flat(node: Node, blocks: list[Block], columns: list[int], batch_size: int) -> Iterator[pa.RecordBatch]:
    """Decode as many blocks at once as a batch has room for; one at least."""
    some: list[Block] = []
    rows = room = 0
    for block in [*blocks, (batch_size + 1, b"")]:  # the last one is none
        room += memoryview(block[1]).nbytes * len(columns)
        if some and (rows + block[0] > batch_size or room > ROOM_NBYTES):
            batch = _columns(node, some, columns, rows)
            yield from (batch.slice(at, batch_size) for at in range(0, rows, batch_size))
            some, rows, room = [], 0, memoryview(block[1]).nbytes * len(columns)
        some.append(block)
        rows += block[0]


def _columns(node: Node, blocks: list[Block], columns: list[int], rows: int) -> pa.RecordBatch:
    fields, types = [], {}
    for i, field in enumerate(node.children):
        value = field.children[0] if field.kind == "optional" else field
        if value.empty:
            continue
        kind, width = FLAT[value.kind]
        null = -1 if value is field else field.number
        fields.append((kind, null, value.number or width, value.kind == "boolean", i in columns))
        if i in columns:
            types[i] = pa.binary(value.number) if value.kind == "fixed" else plain_type(value)
    arrays = {}
    for (i, of), buffers in zip(types.items(), avro_columns(blocks, fields), strict=True):
        valid, offsets, values = (None if buffer is None else pa.py_buffer(buffer) for buffer in buffers)
        arrays[i] = pa.Array.from_buffers(of, rows, [valid, *([offsets] if offsets else []), values])
        if pa.types.is_string(of):
            arrays[i].validate(full=True)  # as UTF-8
    return pa.RecordBatch.from_arrays([arrays[i] for i in columns], [f"f{i}" for i in columns])


def _datafusion(node: Node, path: str, columns: list[int], batch_size: int) -> Iterator[pa.RecordBatch]:
    import datafusion

    _first_process[:] = _first_process or [os.getpid()]
    config = datafusion.SessionConfig().with_target_partitions(1).with_batch_size(batch_size)
    frame = datafusion.SessionContext(config).read_avro(path, file_extension="")
    if len(columns) < sum(not child.empty for child in node.children):
        frame = frame.select(*(f"f{i}" for i in columns))
    for batch in frame.execute_stream():
        yield batch.to_pyarrow()


def _polars(node: Node, data: bytes, columns: list[int], batch_size: int) -> Iterator[pa.RecordBatch]:
    import polars

    _first_process[:] = _first_process or [os.getpid()]
    names = [f"f{i}" for i in columns]
    table = polars.read_avro(io.BytesIO(data), columns=names).select(names).to_arrow()
    yield from table.to_batches(max_chunksize=batch_size)


def _fastavro(node: Node, data: bytes, columns: list[int], batch_size: int) -> Iterator[pa.RecordBatch]:
    fields = [pa.field(f"f{i}", plain_type(node.children[i])) for i in columns]
    reader: Iterator[Any] = fastavro.reader(io.BytesIO(data))
    while rows := list(islice(reader, batch_size)):
        arrays = [pa.array([row[field.name] for row in rows], field.type) for field in fields]
        yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
