"""Read Avro files to Arrow, split by split, with bounded memory."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ags_fast.ags1 import as_key
from ags_fast.avro.blocks import MAX_BLOCK_NBYTES
from ags_fast.avro.checking import by_program
from ags_fast.avro.container import Container
from ags_fast.avro.decoders import NAMES, Scratch, decode, refusal
from ags_fast.avro.schema import parse, plain_schema, program
from ags_fast.avro.shaping import nothing, shape
from ags_fast.errors import FormatError
from ags_fast.stream import AgsReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ags_fast._types import Buffer, ReadableSource

__all__ = ["DECODERS", "AvroFile", "read_batches"]

DECODERS = ("auto", *NAMES)
BATCH_ROWS = 16384

log = logging.getLogger("ags_fast.avro")


class AvroFile:
    """An Avro file whose plaintext is open, such as what `Dataset.open_file` returns.

    Args:
        file: A seekable binary file, which is left open.
        times: Whether times of day become Arrow's times; otherwise they stay numbers, as in Spark's own Avro source.
        max_block_nbytes: The most bytes that a header, and a compressed block without the codec, may have.

    Attributes:
        schema: The Arrow schema of the records.
        codec: The name of the codec.

    Raises:
        FormatError: The plaintext is not an Avro file of records, or its schema is one that Arrow cannot express.
    """

    def __init__(self, file: Any, *, times: bool = True, max_block_nbytes: int = MAX_BLOCK_NBYTES) -> None:
        self._container = Container(file, max_block_nbytes)
        self._node = parse(self._container.metadata.get("avro.schema", b""), times)
        self.codec = self._container.codec
        self.schema = pa.schema(list(self._node.type))

    def batches(
        self,
        start: int = 0,
        end: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        decoder: str = "auto",
        batch_size: int = BATCH_ROWS,
    ) -> Iterator[pa.RecordBatch]:
        """Read the records of a split. About 16 MiB of plaintext, or one Avro block, are decoded at a time.

        The split goes from `start` to `end`, bytes of plaintext; None: to the end of the file. `columns` are the fields
        to read, in their order; None: all. `decoder` is "ags_fast", "datafusion", "polars" or "fastavro"; "auto" is the
        first that is installed and reads the schema, which the log ``ags_fast.avro`` tells. A batch has `batch_size`
        rows at most.

        Raises:
            FormatError: The plaintext is not an intact Avro file, or a block has more than `max_block_nbytes`.
            IntegrityError: As AgsReader.
            ValueError: The range is impossible, a column is unknown, or the decoder does not read this schema.
        """
        end = self._container.length if end is None else end
        if not 0 <= start <= end:
            raise ValueError(f"a split begins at 0 or later and does not end before it begins: not {start} to {end}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        names = list(self._node.names)
        chosen = names if columns is None else list(columns)
        if unknown := set(chosen) - set(names):
            raise ValueError(f"the file has no fields {sorted(unknown)}; it has {names}")
        return self._decoded(start, end, [names.index(name) for name in chosen], self._choose(decoder), batch_size)

    def _choose(self, decoder: str) -> str:
        if decoder not in DECODERS:
            raise ValueError(f"decoder must be one of {', '.join(DECODERS)}, not {decoder!r}")
        refused: list[str] = []
        for name in NAMES if decoder == "auto" else (decoder,):
            why = refusal(name, self._node)
            if why is None:
                log.info("%s decodes an Avro file of codec %s%s", name, self.codec, "".join(refused))
                return name
            refused.append(f"; {name}: {why}")
        raise ValueError(f"{decoder} cannot read this file: {why}. Take decoder='auto'")

    def _decoded(
        self, start: int, end: int, fields: list[int], decoder: str, batch_size: int
    ) -> Iterator[pa.RecordBatch]:
        node = self._node
        schema = pa.schema([node.type.field(i) for i in fields])
        full = [i for i in fields if not node.children[i].empty]
        check = None if decoder == NAMES[0] and full else by_program(None if node.empty else program(node))
        header = self._container.header(json.dumps(plain_schema(node, decimals=decoder == "datafusion")).encode())
        with closing(Scratch()) as scratch:
            for blocks in self._container.pieces(start, end, check):
                rows = sum(count for count, _ in blocks)
                if not full:
                    parts: Iterable[Any] = (range(at, min(at + batch_size, rows)) for at in range(0, rows, batch_size))
                else:
                    parts = decode(decoder, node, header, blocks, full, batch_size, scratch)
                found = 0
                for part in parts:
                    found += len(part)
                    yield self._shaped(part, fields, full, schema)
                if found != rows:
                    raise FormatError(f"{decoder} gives {found} of the {rows} records of a part of the file")

    def _shaped(self, part: Any, fields: list[int], full: list[int], schema: pa.Schema) -> pa.RecordBatch:
        arrays = []
        for i in fields:
            child = self._node.children[i]
            try:
                array = nothing(child, len(part)) if child.empty else shape(child, part.column(full.index(i)))
                if any(pa.types.is_decimal(below.type) for below in child.all()):
                    array.validate(full=True)
            except (pa.ArrowInvalid, pa.ArrowIndexError) as error:
                raise FormatError(f"the Avro file has values that are not of its schema: {error}") from None
            arrays.append(array)
        if not arrays:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * len(part), pa.struct([])))
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def read_batches(
    source: ReadableSource,
    key: Buffer,
    start: int = 0,
    end: int | None = None,
    *,
    length: int | None,
    aad_prefix: Buffer | None = b"",
    columns: Sequence[str] | None = None,
    decoder: str = "auto",
    batch_size: int = BATCH_ROWS,
    max_block_nbytes: int = MAX_BLOCK_NBYTES,
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the records of a split of an encrypted Avro file as Arrow batches.

    The first and last arguments are those of AgsReader, the others those of `AvroFile` and its `batches`. So are the
    errors.
    """
    key = as_key(key)
    with AgsReader(
        source, key, length=length, aad_prefix=aad_prefix, threads=threads, storage_options=storage_options
    ) as file:
        opened = AvroFile(file, max_block_nbytes=max_block_nbytes)
        yield from opened.batches(start, end, columns=columns, decoder=decoder, batch_size=batch_size)
