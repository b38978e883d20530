"""Blocks of Avro files: where they are, and their bytes without a codec, in bounded memory."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

try:
    import pyarrow as pa
except ModuleNotFoundError:  # fastavro has other libraries
    pa = None

from ags_fast.errors import FormatError

if TYPE_CHECKING:
    from ags_fast._types import Buffer

__all__ = ["MAX_BLOCK_NBYTES", "SYNC_NBYTES", "decompress", "encode"]

SYNC_NBYTES = 16  # of a sync marker
MAX_BLOCK_NBYTES = 200 << 20  # of plain records in a compressed block: as the default of Avro for Java
STREAM_NBYTES = 256 << 10  # that are decompressed at a time


def encode(value: int) -> bytes:
    """Encode a long that is not negative."""
    value <<= 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decompress(codec: str, body: Buffer, limit: int) -> Buffer:
    """Decompress the body of a block. FormatError: the codec is unknown, the body damaged, or above the limit."""
    try:
        match codec:
            case "deflate":
                return _deflate(body, limit)
            case "bzip2":
                return _by_stream(bz2.BZ2File(io.BytesIO(body)), limit)
            case "xz":
                return _by_stream(lzma.LZMAFile(io.BytesIO(body)), limit)
            case "snappy":
                return _snappy(body, limit)
            case "zstandard":
                return _zstandard(body, limit)
            case _:
                raise FormatError(f"the codec of the Avro file is unknown: {codec!r}")
    except FormatError:
        raise
    except (zlib.error, lzma.LZMAError, OSError, ValueError, EOFError) as error:
        raise FormatError(f"the plaintext is not an intact Avro file: a block is not {codec} data") from error


def _deflate(body: Buffer, limit: int) -> bytes:
    decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
    data = decompressor.decompress(body, limit + 1)
    if len(data) > limit:
        raise _too_large(limit)
    if not decompressor.eof:
        raise EOFError
    return data


def _by_stream(stream: Any, limit: int) -> bytes:
    """Read a stream of one member or more."""
    parts = []
    found = 0
    with stream:
        while part := stream.read(STREAM_NBYTES):
            parts.append(part)
            found += len(part)
            if found > limit:
                raise _too_large(limit)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _by_fastavro(codec: str, body: Buffer, limit: int) -> Buffer:
    """Decompress a block with the library that fastavro takes. What has more bytes is refused afterwards."""
    from fastavro.read import BLOCK_READERS

    view = memoryview(body)
    data: bytes = BLOCK_READERS[codec](io.BytesIO(encode(view.nbytes) + bytes(view))).read()
    if len(data) > limit:
        raise _too_large(limit)
    return data


def _snappy(body: Buffer, limit: int) -> Buffer:
    """Decompress a block of snappy: its length, and data. AES-GCM's tag covers more than the CRC-32 at the end."""
    view = memoryview(body)
    length = 0
    for i, byte in enumerate(bytes(view[:5])):
        length |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            break
    if length > limit:
        raise _too_large(limit)
    if pa is None:
        return _by_fastavro("snappy", body, limit)
    data: Buffer = pa.decompress(view[:-4], length, "snappy")
    return data


def _zstandard(body: Buffer, limit: int) -> Buffer:
    if pa is None:
        return _by_fastavro("zstandard", body, limit)
    known = _zstandard_nbytes(body)
    if known is not None and known <= limit:
        with suppress(OSError, ValueError):  # more than that, because other frames follow
            data: Buffer = pa.decompress(body, known, "zstd")
            return data
    return _by_stream(pa.CompressedInputStream(pa.BufferReader(body), "zstd"), limit)


def _zstandard_nbytes(body: Buffer) -> int | None:
    """Return the bytes that a frame says it has, if it does (RFC 8878, section 3.1.1.1)."""
    head = bytes(memoryview(body)[:18])
    flags = head[4] if len(head) > 4 else 0
    single = bool(flags & 0x20)
    size = (1 if single else 0, 2, 4, 8)[flags >> 6]
    begin = 5 + (not single) + (0, 1, 2, 4)[flags & 3]
    if not size or head[:4] != b"\x28\xb5\x2f\xfd" or begin + size > len(head):
        return None
    return int.from_bytes(head[begin : begin + size], "little") + (256 if size == 2 else 0)


def _too_large(limit: int) -> FormatError:
    return FormatError(
        f"a block of the Avro file decompresses to more than {limit} bytes: if you trust the file's writer, raise the "
        "limit (max_block_nbytes; in Spark the option maxBlockBytes)"
    )
