"""Definition and repetition levels of data pages: those of a chunk are read, and those of a page of nulls are made.

Levels are bytes here, one for each value of a column. Python packs and unpacks them as a few large integers, which
takes a time that grows with their number, and no loop over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast.columnar import thrift
from ags_fast.columnar.thrift import Struct
from ags_fast.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["HIDE", "PLAIN", "RLE", "chunk_levels", "constant", "null_page", "packed", "packed_nbytes"]

PLAIN, RLE = 0, 3  # encodings
CODECS = {1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}  # as pyarrow names them
HEADER_NBYTES = 4 << 10  # of a page, at first: statistics may make it longer
DIGITS = bytes.maketrans(b"01", b"\0\1")
BITS = [bytes(b"01"[level >> bit & 1] for level in range(256)) for bit in range(8)]
HIDE = 'open the file with missing="hide"'


def constant(level: int, count: int) -> bytes:
    """Encode `count` equal levels."""
    return thrift.varint(count << 1) + bytes([level]) if count else b""


def packed_nbytes(count: int, width: int) -> int:
    """Return how many bytes `packed` levels take."""
    groups = -(-count // 8)
    return len(thrift.varint(groups << 1 | 1)) + groups * width


def packed(levels: bytes, width: int) -> bytes:
    """Encode levels of `width` bits each."""
    groups = -(-len(levels) // 8)
    levels = levels.ljust(8 * groups, b"\0")
    digits = bytearray(len(levels) * width)
    for bit in range(width):
        digits[bit::width] = levels.translate(BITS[bit])
    return thrift.varint(groups << 1 | 1) + int(digits[::-1] or b"0", 2).to_bytes(groups * width, "little")


def _unpacked(data: bytes, width: int) -> bytes:
    digits = f"{int.from_bytes(data, 'little'):0{8 * len(data)}b}"[::-1].encode().translate(DIGITS)
    total = sum(int.from_bytes(digits[bit::width], "little") << bit for bit in range(width))
    return total.to_bytes(len(digits) // width, "little")


def _decoded(data: bytes, highest: int, count: int) -> bytes:
    """Return `count` levels of a page, none above `highest`. FormatError if the page has others."""
    out, at, width = bytearray(), 0, highest.bit_length()
    if width == 0:
        return bytes(count)
    while len(out) < count and at < len(data):
        head = shift = 0
        while at < len(data):
            at += 1
            head |= (data[at - 1] & 0x7F) << shift
            shift += 7
            if data[at - 1] < 0x80:
                break
        left = count - len(out)
        if head & 1:
            nbytes = min(head >> 1, -(-left // 8)) * width
            out += _unpacked(data[at : at + nbytes], width)[:left]
            at += nbytes
        else:
            out += data[at : at + 1] * min(head >> 1, left)
            at += 1
    if len(out) != count or max(out, default=0) > highest:
        raise FormatError("the levels of a page are not as many as its values, or too high: the file is damaged")
    return bytes(out)


def null_page(count: int, levels: Sequence[bytes], widths: Sequence[int]) -> bytes:
    """Return a data page of `count` entries and no value, under any physical type.

    Args:
        count: Of its levels.
        levels: Its encoded repetition levels, and its encoded definition levels.
        widths: How many bits one of these has; 0: the page has none.
    """
    encoded = [part for part, width in zip(levels, widths, strict=True) if width]
    body = b"".join(len(part).to_bytes(4, "little") + part for part in encoded)
    head = thrift.struct((i, thrift.I32, thrift.integer(value)) for i, value in enumerate([count, PLAIN, RLE, RLE], 1))
    sizes = [0, len(body), len(body)]  # after its type, a data page
    fields = [(i, thrift.I32, thrift.integer(value)) for i, value in enumerate(sizes, 1)]
    return thrift.struct([*fields, (5, thrift.STRUCT, head)]) + body


def chunk_levels(
    read: Callable[[int, int], bytes], begin: int, end: int, codec: int, highest: tuple[int, int]
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the repetition and definition levels of each data page of a chunk in plain text.

    Args:
        read: Returns as many bytes from an offset of the file.
        begin: Where the chunk begins.
        end: Where the chunk ends.
        codec: How its pages are compressed, as the footer numbers it.
        highest: The highest repetition level and the highest definition level of the column.

    Raises:
        FormatError: The pages are damaged, or compressed or encoded in a way of which pyarrow knows nothing.
    """
    at = begin
    while at < end:
        header = _header(read, at, end - at)
        at += header.end
        nbytes = header.integer(3) or 0
        v1, v2 = header.struct(5), header.struct(8)
        if nbytes < 0 or at + nbytes > end:
            raise FormatError("a page is longer than its chunk: the file is damaged")
        if v1 is not None:
            yield _of_v1(_uncompressed(read(at, nbytes), codec, header.integer(2) or 0), v1, highest)
        elif v2 is not None:
            sizes = v2.integer(6) or 0, v2.integer(5) or 0
            data, count = read(at, sum(sizes)), v2.integer(1) or 0
            yield _decoded(data[: sizes[0]], highest[0], count), _decoded(data[sizes[0] :], highest[1], count)
        at += nbytes


def _header(read: Callable[[int, int], bytes], at: int, left: int) -> Struct:
    nbytes = HEADER_NBYTES
    while True:
        try:
            return Struct(read(at, min(left, nbytes)))
        except FormatError:
            if nbytes >= left:
                raise
            nbytes *= 16


def _of_v1(data: bytes, header: Struct, highest: tuple[int, int]) -> tuple[bytes, bytes]:
    count, at = header.integer(1) or 0, 0
    found = []
    for level, field in zip(highest, (4, 3), strict=True):
        if level and header.integer(field) != RLE:
            raise FormatError(f"the levels of a page have an encoding that is no longer in use: {HIDE}")
        nbytes = int.from_bytes(data[at : at + 4], "little") if level else 0
        at += 4 if level else 0
        found.append(_decoded(data[at : at + nbytes], level, count))
        at += nbytes
    return found[0], found[1]


def _uncompressed(data: bytes, codec: int, nbytes: int) -> bytes:
    if codec == 0:
        return data
    if codec not in CODECS:
        raise FormatError(f"where columns in one list are null, their neighbours must not be compressed so: {HIDE}")
    try:
        import pyarrow as pa
    except ImportError:
        raise ImportError(f"nulls beside readable columns in lists and structs need pyarrow, or {HIDE}") from None
    try:
        return bytes(pa.decompress(data, nbytes, CODECS[codec], asbytes=True))
    except (OSError, pa.ArrowException) as error:
        raise FormatError(f"a page cannot be decompressed: {error}") from None
