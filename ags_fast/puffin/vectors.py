"""Puffin files with deletion vectors: which rows of which data files are deleted.

Layout (Iceberg's Puffin specification, version 1): ``PFA1``, blobs, then the footer: ``PFA1``, JSON, its length (4
bytes, little-endian), 4 bytes of flags, ``PFA1``. A blob ``deletion-vector-v1`` is a length (4 bytes, big-endian), the
magic D1 D3 39 64, a 64-bit Roaring bitmap in its portable form, and the CRC-32 of magic and bitmap (big-endian).

A manifest names a deletion vector by the offset and length of its blob, so reading a vector needs no footer. All
functions work on plaintext: an encrypted table keeps a Puffin file inside an AES GCM Stream.
"""

from __future__ import annotations

import zlib
from array import array
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from pyroaring import BitMap64

from ags_fast._json import check_marks
from ags_fast._version import __version__
from ags_fast.ags1 import bytes_view
from ags_fast.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import ArrayLike, NDArray

    from ags_fast._types import Buffer

__all__ = ["MAX_POSITION", "Blob", "DeletionVector", "PuffinFile"]
__all__ += ["decode_vector", "read_puffin", "rename_vectors", "write_vectors"]

Long = Annotated[int, msgspec.Meta(ge=-1 << 63, le=(1 << 63) - 1)]

MAGIC = b"PFA1"
TAIL_NBYTES = 12  # the length of the footer's JSON, flags, magic
COMPRESSED = b"\1\0\0\0"  # flags: the footer's JSON is compressed, with LZ4
MAX_FOOTER_NBYTES = 64 << 20
VECTOR_TYPE = "deletion-vector-v1"
VECTOR_MAGIC = b"\xd1\xd3\x39\x64"
FRAME_NBYTES = 8  # of a vector's blob: its length before, its CRC-32 behind
ROW_POSITION = 2_147_483_645  # Iceberg's field id of a row's position in its file
INHERITED = -1  # the snapshot and the sequence number of a vector are those of its manifest entry
MAX_POSITION = ((1 << 31) - 2 << 32) + (1 << 31)  # the largest position that Java takes


class Blob(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """What a Puffin file's footer says of one blob.

    Attributes:
        fields: Ids of the columns that it was made of.
        snapshot_id, sequence_number: Those of the snapshot that it was made of; -1 for a deletion vector.
        offset: Where it begins in the file, in bytes: the ``content_offset`` of a manifest entry.
        length: Its bytes in the file: the ``content_size_in_bytes`` of a manifest entry.
        compression_codec: ``lz4`` or ``zstd``; None for a deletion vector.
        properties: Of a deletion vector: ``referenced-data-file`` and ``cardinality``.
    """

    type: str
    fields: tuple[int, ...]
    snapshot_id: Long
    sequence_number: Long
    offset: Long
    length: Long
    compression_codec: str | None = None
    properties: dict[str, str] = {}


class PuffinFile(msgspec.Struct, frozen=True):
    """The footer of a Puffin file: its blobs in order, and its properties, such as ``created-by``."""

    blobs: tuple[Blob, ...]
    properties: dict[str, str] = {}


class DeletionVector:
    """A set of row positions: those rows of one data file that are deleted.

    It is immutable, and as small as its bitmap: positions become an array only when asked for.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: BitMap64) -> None:
        if rows and rows.max() > MAX_POSITION:
            raise ValueError(f"positions of rows are 0 to {MAX_POSITION}")
        self._rows = rows

    @classmethod
    def of(cls, positions: ArrayLike) -> DeletionVector:
        """Make one from positions, in any order, with repetitions or without: a numpy or pyarrow array, or a sequence.

        ValueError if a position is negative, or more than Java takes; TypeError if they are not whole numbers.
        """
        given, rows = np.asarray(positions), array("Q")
        if given.size:
            if given.ndim != 1 or given.dtype.kind not in "iu":
                raise TypeError(f"positions are one-dimensional whole numbers, not {given.ndim} x {given.dtype}")
            if given.min() < 0:
                raise ValueError(f"positions of rows are 0 to {MAX_POSITION}")
            rows.frombytes(np.ascontiguousarray(given, np.uint64).data.cast("B"))
        return cls(BitMap64(rows))

    def __len__(self) -> int:
        """The number of deleted rows."""
        return len(self._rows)

    def __contains__(self, position: int) -> bool:
        """Whether the row at this position is deleted."""
        return 0 <= position <= MAX_POSITION and position in self._rows

    def __eq__(self, other: object) -> bool:
        return self._rows == other._rows if isinstance(other, DeletionVector) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # bitmaps have none

    def __or__(self, other: DeletionVector) -> DeletionVector:
        """Return the rows that either vector deletes."""
        return DeletionVector(self._rows | other._rows)

    def __repr__(self) -> str:
        return f"<DeletionVector of {len(self)} rows>"

    def positions(self, begin: int = 0, end: int = MAX_POSITION + 1) -> NDArray[np.uint64]:
        """Return the positions from `begin` up to, without, `end`, in ascending order. They take 8 bytes each."""
        begin, end, rows = max(begin, 0), min(end, MAX_POSITION + 1), self._rows
        if end - begin <= 1 << 32:
            rows = rows & BitMap64(range(begin, end))
        elif end - begin <= MAX_POSITION:  # a bitmap of the range would be too large
            rows = BitMap64(rows)
            rows.remove_range(0, begin)
            rows.remove_range(end, MAX_POSITION + 1)
        return np.frombuffer(rows.to_array(), np.uint64)

    def keeps(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Return for each row from `begin` up to, without, `end` whether the vector keeps it: a mask, 1 byte a row."""
        kept = np.ones(max(end - begin, 0), np.bool_)
        kept[(self.positions(begin, end) - np.uint64(begin)).astype(np.int64)] = False
        return kept

    def encode(self) -> bytes:
        """Return the blob ``deletion-vector-v1``, run-length encoded where that is shorter, as Java writes it.

        ValueError if it would have 2 GiB or more, which its length field cannot hold.
        """
        body = VECTOR_MAGIC + BitMap64(self._rows).serialize()  # a new bitmap has runs where they are shorter
        if len(body) > (1 << 31) - 1 - FRAME_NBYTES:
            raise ValueError(f"a deletion vector of {len(body)} bytes is too long for its file form, below 2 GiB")
        return len(body).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")


def decode_vector(blob: Buffer, *, cardinality: int | None) -> DeletionVector:
    """Read a blob ``deletion-vector-v1``. The memory that this takes is in proportion to the blob.

    `blob` has the ``content_size_in_bytes`` from ``content_offset`` on. `cardinality` is the ``record_count`` of the
    manifest entry; None: not known. FormatError if the blob was changed, or has another number of rows.
    """
    data = bytes_view(blob)
    body = data[4:-4]
    if len(data) < FRAME_NBYTES or int.from_bytes(data[:4], "big") != len(body):
        raise FormatError(f"a deletion vector of {len(data)} bytes is cut, or says that it has another length")
    if body[:4] != VECTOR_MAGIC:
        raise FormatError("a deletion vector does not begin with D1 D3 39 64: the offset points elsewhere")
    if int.from_bytes(data[-4:], "big") != zlib.crc32(body):
        raise FormatError("a deletion vector was changed: its CRC-32 is another")
    try:
        rows = BitMap64.deserialize(bytes(body[4:]))
        vector = DeletionVector(rows)
    except (ValueError, IndexError):
        raise FormatError(f"a deletion vector is malformed, cut, or goes beyond {MAX_POSITION}") from None
    # What follows the last bitmap is not looked at. Java writes bitmaps without rows, too, which take 12 bytes each.
    again, count = rows.serialize(), int.from_bytes(body[4:12], "little")
    if len(body) != 4 + len(again) + 12 * (count - int.from_bytes(again[:8], "little")):
        raise FormatError("a deletion vector has bytes after its last bitmap, or is in no known form")
    if cardinality is not None and len(vector) != cardinality:
        raise FormatError(f"a deletion vector has {len(vector)} rows, and its manifest entry says {cardinality}")
    return vector


def write_vectors(
    vectors: Mapping[str, DeletionVector], *, created_by: str = f"ags_fast {__version__}"
) -> tuple[bytes, list[Blob]]:
    """Return a Puffin file of deletion vectors, and what a manifest needs to name each.

    `vectors` are by the location of the data file, exactly as the table's manifests name it. ValueError if a vector is
    empty, or there is none: such a vector has no manifest entry.
    """
    if not vectors:
        raise ValueError("a Puffin file of deletion vectors has at least one")
    out, blobs = bytearray(MAGIC), []
    for location, vector in vectors.items():
        if not len(vector):
            raise ValueError(f"the deletion vector of {location} is empty: leave it out")
        blob = vector.encode()
        properties = {"referenced-data-file": location, "cardinality": str(len(vector))}
        blobs.append(
            Blob(VECTOR_TYPE, (ROW_POSITION,), INHERITED, INHERITED, len(out), len(blob), properties=properties)
        )
        out += blob
    return bytes(out + _footer(blobs, {"created-by": created_by})), blobs


def _footer(blobs: Iterable[Blob], properties: dict[str, str]) -> bytes:
    payload = msgspec.json.encode(PuffinFile(tuple(blobs), properties))
    return MAGIC + payload + len(payload).to_bytes(4, "little") + bytes(4) + MAGIC


def rename_vectors(data: Buffer, renamed: Mapping[str, str]) -> bytes:
    """Return a Puffin file whose deletion vectors name other data files. The blobs stay where they are.

    `data` is the file's plaintext, `renamed` the new location by the old one. FormatError if the file is malformed.
    """
    file, view = read_puffin(data), bytes_view(data)
    blobs = []
    for blob in file.blobs:
        named = blob.properties.get("referenced-data-file", "")
        if named in renamed:
            properties = {**blob.properties, "referenced-data-file": renamed[named]}
            blob = msgspec.structs.replace(blob, properties=properties)
        blobs.append(blob)
    end = max((blob.offset + blob.length for blob in blobs), default=len(MAGIC))
    return bytes(view[:end]) + _footer(blobs, file.properties)


def read_puffin(source: Buffer) -> PuffinFile:
    """Read the footer of a Puffin file, given its plaintext, and no blob.

    FormatError if the file is malformed or cut, or the footer names bytes that are not those of a blob.
    """
    data = bytes_view(source)
    length = len(data)
    if length < 2 * len(MAGIC) + TAIL_NBYTES or data[:4] != MAGIC:
        raise FormatError(f"the file of {length} bytes is not a Puffin file: it does not begin with PFA1")
    tail = bytes(data[-TAIL_NBYTES:])
    nbytes, flags = int.from_bytes(tail[:4], "little", signed=True), tail[4:8]
    begin = length - TAIL_NBYTES - nbytes - len(MAGIC)
    if tail[8:] != MAGIC or not 0 <= nbytes <= MAX_FOOTER_NBYTES or begin < len(MAGIC):
        raise FormatError("the Puffin file is cut, or its footer has an impossible length")
    footer = bytes(data[begin : begin + len(MAGIC) + nbytes])
    if footer[:4] != MAGIC or flags not in (bytes(4), COMPRESSED):
        raise FormatError("the footer of the Puffin file does not begin with PFA1, or has unknown flags")
    payload = _unlz4(footer[4:]) if flags == COMPRESSED else footer[4:]
    check_marks(payload, "the footer of a Puffin file")
    try:
        found = msgspec.json.decode(payload, type=PuffinFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"the footer of the Puffin file is not one: {error}") from None
    for blob in found.blobs:
        if not len(MAGIC) <= blob.offset <= blob.offset + blob.length <= begin or blob.length < 0:
            raise FormatError(f"a blob of {blob.length} bytes at {blob.offset} is not inside the Puffin file")
    return found


def _unlz4(data: bytes) -> bytes:
    """Decompress a footer, to at most its largest size."""
    import pyarrow as pa

    try:
        with pa.CompressedInputStream(pa.BufferReader(data), "lz4") as stream:
            plain = bytes(stream.read(MAX_FOOTER_NBYTES + 1))
    except (OSError, pa.ArrowException):
        raise FormatError("the footer of the Puffin file does not decompress") from None
    if len(plain) > MAX_FOOTER_NBYTES:
        raise FormatError(f"the footer of the Puffin file has more than {MAX_FOOTER_NBYTES} bytes")
    return plain
