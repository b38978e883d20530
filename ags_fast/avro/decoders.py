"""What decodes plain blocks of Avro records to Arrow: datafusion, polars or fastavro.

datafusion and polars were written for intact files: on others datafusion can loop without end, and polars panics. So
they get only blocks that the engine has found to hold whole records, uncompressed, of schemas that they are known to
read right.
"""

from __future__ import annotations

import importlib.util
import io
import os
from typing import TYPE_CHECKING, Any

import fastavro
import pyarrow as pa

from ags_fast.avro.schema import plain_type
from ags_fast.errors import AgsError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ags_fast._types import Buffer
    from ags_fast.avro.schema import Node

NAMES = ("datafusion", "polars", "fastavro")
SCALARS = {"boolean", "int", "long", "float", "double", "bytes", "string"}
# Node kinds that each reads right, as the tests compare them with fastavro.
READS = {
    "datafusion": SCALARS | {"optional", "enum", "record", "array", "map", "fixed"},
    # A boolean that is neither 0 nor 1 is false for polars, and true for the others.
    "polars": SCALARS - {"boolean"} | {"optional", "enum"},
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
    if _first_process and _first_process[0] != os.getpid():
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

    def path(self, parts: list[Buffer]) -> str:
        """Return the path of a file of these parts, in memory. It is there until the next call."""
        if self._file is None:
            self._file = os.fdopen(os.memfd_create("avro"), "wb")
        self._file.seek(0)
        self._file.writelines(parts)
        self._file.truncate()
        return f"/proc/self/fd/{self._file.fileno()}"


def decode(
    name: str, node: Node, data: list[Buffer], columns: list[int], batch_size: int, scratch: Scratch
) -> Iterator[pa.RecordBatch]:
    """Decode a file of `plain_schema` and without a codec, in parts: these fields, none of them empty.

    Raises FormatError if the decoder refuses a value.
    """
    decoders = {"datafusion": _datafusion, "polars": _polars, "fastavro": _fastavro}
    try:
        yield from decoders[name](node, data, columns, batch_size, scratch)
    except (AgsError, OSError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # Rust derives its panics from BaseException
        text = f"the Avro file has values that are not of its schema: {name} raises {type(error).__name__}"
        raise FormatError(text) from error


def _datafusion(
    node: Node, data: list[Buffer], columns: list[int], batch_size: int, scratch: Scratch
) -> Iterator[pa.RecordBatch]:
    import datafusion

    _first_process[:] = _first_process or [os.getpid()]
    config = datafusion.SessionConfig().with_target_partitions(1).with_batch_size(batch_size)
    frame = datafusion.SessionContext(config).read_avro(scratch.path(data), file_extension="")
    if len(columns) < sum(not child.empty for child in node.children):
        frame = frame.select(*(f"f{i}" for i in columns))
    for batch in frame.execute_stream():
        yield batch.to_pyarrow()


def _polars(
    node: Node, data: list[Buffer], columns: list[int], batch_size: int, scratch: Scratch
) -> Iterator[pa.RecordBatch]:
    import polars

    _first_process[:] = _first_process or [os.getpid()]
    names = [f"f{i}" for i in columns]
    table = polars.read_avro(io.BytesIO(b"".join(data)), columns=names).select(names).to_arrow()
    yield from table.to_batches(max_chunksize=batch_size)


def _fastavro(
    node: Node, data: list[Buffer], columns: list[int], batch_size: int, scratch: Scratch
) -> Iterator[pa.RecordBatch]:
    fields = [pa.field(f"f{i}", plain_type(node.children[i])) for i in columns]
    rows: list[Any] = []

    def batch() -> pa.RecordBatch:
        arrays = [pa.array([row[field.name] for row in rows], field.type) for field in fields]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    for row in fastavro.reader(io.BytesIO(b"".join(data))):
        rows.append(row)
        if len(rows) == batch_size:
            yield batch()
            rows.clear()
    if rows:
        yield batch()
