"""Avro container files: their header, and their blocks, checked before anything decodes them, in bounded memory."""

from __future__ import annotations

import io
from itertools import chain
from typing import TYPE_CHECKING, Any

from ags_fast._core import avro_blocks, avro_number
from ags_fast.avro.blocks import MAX_BLOCK_NBYTES, SYNC_NBYTES, decompress, encode
from ags_fast.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ags_fast._types import Buffer

__all__ = ["MAGIC", "PIECE_NBYTES", "Block", "Container", "encode_header", "framed", "parse_header"]

Block = tuple[int, "Buffer"]  # the number of records, and their bytes without a codec

MAGIC = b"Obj\x01"
HEAD_NBYTES = 64 << 10  # read at first; a header is rarely longer
HEAD_PAIRS = 10_000  # in a header
FIND_NBYTES = 1 << 20  # searched for a sync marker at a time
PIECE_NBYTES = 16 << 20  # of plaintext that is decoded at a time; one block at least


class Container:
    """A container file whose plaintext is open.

    No length that the file claims makes it read more than is there, or keep more than a block of a right length.

    Args:
        file: A seekable binary file. It is left open, and its cursor is moved.
        max_block_nbytes: The most bytes that a header, and a compressed block without the codec, may have.

    Attributes:
        length: Bytes of the file.
        metadata: What the header tells, by name.
        codec: The name of the codec.

    Raises:
        FormatError: The plaintext does not begin with an intact header.
    """

    def __init__(self, file: Any, max_block_nbytes: int = MAX_BLOCK_NBYTES) -> None:
        if max_block_nbytes < 1:
            raise ValueError(f"max_block_nbytes must be at least 1, not {max_block_nbytes}")
        self._file = file
        self._max_block_nbytes = max_block_nbytes
        self.length: int = file.seek(0, io.SEEK_END)
        self.metadata, self._header_end = self._read_header()
        self.codec = self.metadata.get("avro.codec", b"null").decode("utf-8", "replace") or "null"
        self._marker = self._read(self._header_end - SYNC_NBYTES, SYNC_NBYTES)

    def header(self, schema: bytes) -> bytes:
        """Return the header of a file with this schema, without a codec, for the blocks of this file."""
        return encode_header(schema, self._marker)

    def pieces(
        self, start: int, end: int, check: Callable[[Buffer, int], object] | None, piece_nbytes: int = PIECE_NBYTES
    ) -> Iterator[list[Block]]:
        """Iterate over the blocks of a split, without the codec: about `piece_nbytes` at a time, one block at least.

        `check` is called with the body of each block, and the number of its records; None if the caller checks them.
        """
        marker = self._marker
        marker_at = self._header_end - SYNC_NBYTES
        found = marker_at if start <= marker_at else find_marker(self._file, marker, start, end)
        if found is None or found >= end:
            return
        at = found + SYNC_NBYTES
        size = piece_nbytes
        memory = memoryview(b"")
        # A block belongs to the split if the marker before it begins in the split.
        while at < self.length and at - SYNC_NBYTES < end:
            wanted = min(size, max(end - at, 0) + HEAD_NBYTES) if size == piece_nbytes else size
            wanted = min(wanted, self.length - at)
            if wanted > len(memory):
                memory = memoryview(bytearray(wanted))
            data = self._fill(at, memory[:wanted])
            blocks, used, needed = avro_blocks(data, marker, end - at + SYNC_NBYTES)
            if not blocks:
                self._check_large(at, needed)
                size = max(needed, 2 * size)
                continue
            size = piece_nbytes
            piece: list[Block] = []
            nbytes = 0
            for rows, begin, stop in blocks:
                body: Buffer = data[begin:stop]
                if self.codec != "null":
                    body = decompress(self.codec, body, self._max_block_nbytes)
                self._check_body(check, body, rows)
                piece.append((rows, body))
                nbytes += memoryview(body).nbytes
                if nbytes >= piece_nbytes:
                    yield piece
                    piece, nbytes = [], 0
            if piece:
                yield piece
            at += used

    def _check_large(self, at: int, needed: int) -> None:
        """Check that a block of `needed` bytes is there, before memory is taken for it."""
        if needed > self.length - at:
            raise FormatError("the plaintext is not an intact Avro file: its last block is cut")
        stop = at + needed - SYNC_NBYTES
        if needed > HEAD_NBYTES and self._read(stop, SYNC_NBYTES) != self._marker:
            raise FormatError("the plaintext is not an intact Avro file: a block does not end at a sync marker")

    def _check_body(self, check: Callable[[Buffer, int], object] | None, body: Buffer, rows: int) -> None:
        if rows > max(memoryview(body).nbytes, self._max_block_nbytes):  # records without bytes could be endless
            raise FormatError(f"the plaintext is not an intact Avro file: a block claims {rows} records")
        if check is not None:
            check(body, rows)

    def _read(self, offset: int, size: int) -> bytes:
        return bytes(self._fill(offset, memoryview(bytearray(size))))

    def _fill(self, offset: int, memory: memoryview) -> memoryview:
        """Read into memory. Returns the part of it that has been filled."""
        self._file.seek(offset)
        done = 0
        while done < len(memory) and (count := self._file.readinto(memory[done:])):
            done += count
        return memory[:done]

    def _read_header(self) -> tuple[dict[str, bytes], int]:
        most = min(self.length, self._max_block_nbytes)
        size = HEAD_NBYTES
        while True:
            data = self._read(0, min(size, self.length))
            if data[:4] != MAGIC[: len(data)] or len(data) < 4:
                raise FormatError("the plaintext is not an Avro file: its first 4 bytes are another format's")
            try:
                return parse_header(data, max(most, HEAD_NBYTES))
            except IndexError:
                if size >= most:
                    raise FormatError("the plaintext is not an intact Avro file: its header is cut") from None
            size *= 4


def framed(header: bytes, blocks: Iterable[Block]) -> Iterator[Buffer]:
    """Iterate over the parts of a file without a codec: a header of `Container.header`, and blocks."""
    yield header
    for rows, body in blocks:
        yield encode(rows) + encode(memoryview(body).nbytes)
        yield body
        yield header[-SYNC_NBYTES:]


def find_marker(file: Any, marker: bytes, start: int, end: int) -> int | None:
    """Return where the first sync marker of the split begins, or None."""
    file.seek(start)
    window = b""  # the bytes from `start` on that were read
    while start < end:
        piece = file.read(min(FIND_NBYTES, end + SYNC_NBYTES - 1 - start - len(window)))
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


def encode_header(schema: bytes, marker: bytes, codec: bytes = b"null", more: Mapping[str, bytes] = {}) -> bytes:
    """Return the header of a container file, with more names in its map."""
    entries = {"avro.schema": schema, "avro.codec": codec, **more}
    out = bytearray(MAGIC) + encode(len(entries))
    for text in chain.from_iterable((name.encode(), value) for name, value in entries.items()):
        out += encode(len(text)) + text
    return bytes(out + encode(0) + marker)


def parse_header(data: bytes, most: int) -> tuple[dict[str, bytes], int]:
    """Read a header of at most `most` bytes: its map, and where it ends. IndexError if the data end before."""
    found: dict[str, bytes] = {}
    at = len(MAGIC)

    def text() -> bytes:
        nonlocal at
        size, at = avro_number(data, at)
        if not 0 <= size <= most - at:
            raise FormatError("the plaintext is not an intact Avro file: its header has an impossible length")
        if at + size > len(data):
            raise IndexError
        at += size
        return data[at - size : at]

    left = HEAD_PAIRS
    while True:
        pairs, at = avro_number(data, at)
        if pairs < 0:
            _, at = avro_number(data, at)
        if pairs == 0:
            break
        left -= abs(pairs)
        if left < 0:
            raise FormatError(f"the plaintext is not an intact Avro file: its header has more than {HEAD_PAIRS} names")
        for _ in range(abs(pairs)):
            name = text().decode("utf-8", "replace")
            found[name] = text()
    if at + SYNC_NBYTES > len(data):
        raise IndexError
    return found, at + SYNC_NBYTES
