"""Puffin files with deletion vectors: which rows of which data files are deleted.

Layout (Iceberg's Puffin specification, version 1): ``PFA1``, blobs, then the footer: ``PFA1``, JSON, its length (4
bytes, little-endian), 4 bytes of flags, ``PFA1``. A blob ``deletion-vector-v1`` is a length (4 bytes, big-endian), the
magic D1 D3 39 64, a 64-bit Roaring bitmap in its portable form, and the CRC-32 of magic and bitmap (big-endian).

A manifest names a deletion vector by the offset and length of its blob, so reading a vector needs no footer. All
functions work on plaintext: an encrypted table keeps a Puffin file inside an AES GCM Stream.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from pyroaring import BitMap

from ags_fast._json import check_marks
from ags_fast._version import __version__
from ags_fast.ags1 import bytes_view
from ags_fast.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import ArrayLike, NDArray

    from ags_fast._types import Buffer

__all__ = [
    "MAX_POSITION",
    "Blob",
    "DeletionVector",
    "PuffinFile",
    "RangeSource",
    "decode_vector",
    "read_puffin",
    "rename_vectors",
    "write_vectors",
]

MAGIC = b"PFA1"
TAIL_NBYTES = 12  # the length of the footer's JSON, flags, magic
COMPRESSED = b"\1\0\0\0"  # flags: the footer's JSON is compressed, with LZ4
MAX_FOOTER_NBYTES = 64 << 20
VECTOR_TYPE = "deletion-vector-v1"
VECTOR_MAGIC = b"\xd1\xd3\x39\x64"
FRAME_NBYTES = 8  # of a vector's blob: its length before, its CRC-32 behind
ROW_POSITION = 2_147_483_645  # Iceberg's field id of a row's position in its file
INHERITED = -1  # the snapshot and the sequence number of a vector are those of its manifest entry
MAX_KEY = (1 << 31) - 2  # of the 32-bit bitmaps in a vector: the largest that Java takes
MAX_POSITION = (MAX_KEY << 32) + (1 << 31)  # the largest position that Java takes

# The portable form of a 32-bit Roaring bitmap.
COOKIE, COOKIE_WITH_RUNS = 12346, 12347
OFFSETS_FROM = 4  # containers, from which a bitmap with runs has their offsets
ARRAY_MOST, BITSET_NBYTES = 4096, 8192


class RangeSource(Protocol):
    """What a Puffin file is read from, such as an `AgsReader`."""

    @property
    def length(self) -> int:
        """Bytes of the file."""

    def read_at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on, or fewer at the end of the file."""


@dataclass(frozen=True, slots=True)
class Blob:
    """What a Puffin file's footer says of one blob.

    Attributes:
        type: Its type, such as ``deletion-vector-v1``.
        fields: Ids of the columns that it was made of.
        snapshot_id: The snapshot that it was made of; -1 for a deletion vector.
        sequence_number: The sequence number of that snapshot; -1 for a deletion vector.
        offset: Where it begins in the file, in bytes: the ``content_offset`` of a manifest entry.
        length: Its bytes in the file: the ``content_size_in_bytes`` of a manifest entry.
        compression_codec: ``lz4`` or ``zstd``; None for a deletion vector.
        properties: Of a deletion vector: ``referenced-data-file`` and ``cardinality``.
    """

    type: str
    fields: tuple[int, ...]
    snapshot_id: int
    sequence_number: int
    offset: int
    length: int
    compression_codec: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as the footer has it, with the fields in Java's order."""
        value: dict[str, Any] = {
            "type": self.type,
            "fields": list(self.fields),
            "snapshot-id": self.snapshot_id,
            "sequence-number": self.sequence_number,
            "offset": self.offset,
            "length": self.length,
        }
        if self.compression_codec is not None:
            value["compression-codec"] = self.compression_codec
        return value | ({"properties": dict(self.properties)} if self.properties else {})

    @classmethod
    def from_json(cls, value: Any) -> Blob:
        """Parse one. FormatError if it is malformed."""
        if not isinstance(value, dict):
            raise FormatError("a blob in the footer of a Puffin file is not a JSON object")
        fields, codec = value.get("fields"), value.get("compression-codec")
        if not isinstance(value.get("type"), str) or not isinstance(codec, str | None):
            raise FormatError("a blob in the footer of a Puffin file has no type, or a codec that is not text")
        if not isinstance(fields, list) or not all(type(one) is int for one in fields):
            raise FormatError("a blob in the footer of a Puffin file has no list of field ids")
        numbers: list[Any] = [value.get(name) for name in ("snapshot-id", "sequence-number", "offset", "length")]
        if not all(type(number) is int and -1 << 63 <= number < 1 << 63 for number in numbers):
            raise FormatError("a blob in the footer of a Puffin file lacks a 64-bit number")
        snapshot_id, sequence_number, offset, length = numbers
        properties = _texts(value.get("properties"))
        return cls(value["type"], tuple(fields), snapshot_id, sequence_number, offset, length, codec, properties)


@dataclass(frozen=True, slots=True)
class PuffinFile:
    """The footer of a Puffin file.

    Attributes:
        blobs: The blobs, in the footer's order.
        properties: Of the file, such as ``created-by``.
    """

    blobs: tuple[Blob, ...]
    properties: Mapping[str, str]


class DeletionVector:
    """A set of row positions: those rows of one data file that are deleted.

    It is immutable, and as small as its bitmap: positions become an array only when asked for.

    Args:
        bitmaps: 32-bit bitmaps of the lower halves of positions, by their upper halves.
    """

    __slots__ = ("_bitmaps",)

    def __init__(self, bitmaps: Mapping[int, BitMap]) -> None:
        self._bitmaps = {key: bitmaps[key] for key in sorted(bitmaps) if bitmaps[key]}
        if self._bitmaps and not (min(self._bitmaps) >= 0 and self.last <= MAX_POSITION):
            raise ValueError(f"positions of rows are 0 to {MAX_POSITION}")

    @classmethod
    def of(cls, positions: ArrayLike) -> DeletionVector:
        """Make one from positions, in any order, with repetitions or without: a numpy or pyarrow array, or a sequence.

        Raises:
            ValueError: A position is negative, or more than Java takes.
            TypeError: The positions are not whole numbers.
        """
        given = np.asarray(positions)
        if not given.size:
            return cls({})
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise TypeError(f"positions of rows are one-dimensional whole numbers, not {given.ndim} x {given.dtype}")
        if int(given.min()) < 0 or int(given.max()) > MAX_POSITION:
            raise ValueError(f"positions of rows are 0 to {MAX_POSITION}")
        wide = given.astype(np.uint64, copy=False)
        keys = wide >> np.uint64(32)
        low = wide.astype(np.uint32)
        return cls({int(key): BitMap(np.ascontiguousarray(low[keys == key])) for key in np.unique(keys)})

    def __len__(self) -> int:
        """The number of deleted rows."""
        return sum(map(len, self._bitmaps.values()))

    def __contains__(self, position: int) -> bool:
        """Whether the row at this position is deleted."""
        bitmap = self._bitmaps.get(position >> 32)
        return bitmap is not None and position & 0xFFFFFFFF in bitmap

    def __eq__(self, other: object) -> bool:
        return self._bitmaps == other._bitmaps if isinstance(other, DeletionVector) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # bitmaps have none

    def __or__(self, other: DeletionVector) -> DeletionVector:
        """Return the rows that either vector deletes."""
        mine, theirs = self._bitmaps, other._bitmaps
        empty = BitMap()
        return DeletionVector({key: mine.get(key, empty) | theirs.get(key, empty) for key in mine.keys() | theirs})

    def __repr__(self) -> str:
        return f"<DeletionVector of {len(self)} rows>"

    @property
    def last(self) -> int:
        """The largest position. ValueError if the vector is empty."""
        if not self._bitmaps:
            raise ValueError("an empty deletion vector has no last position")
        key = max(self._bitmaps)
        return (key << 32) + int(self._bitmaps[key].max())

    def positions(self, begin: int = 0, end: int = MAX_POSITION + 1) -> NDArray[np.uint64]:
        """Return the positions from `begin` up to, without, `end`, in ascending order. They take 8 bytes each."""
        found = [np.empty(0, np.uint64)]
        for key, bitmap in self._bitmaps.items():
            first, stop = max(begin - (key << 32), 0), min(end - (key << 32), 1 << 32)
            if first >= stop:
                continue
            part = bitmap if (first, stop) == (0, 1 << 32) else _cut(bitmap, first, stop)
            low = np.frombuffer(part.to_array(), np.uint32)
            found.append(low.astype(np.uint64) + np.uint64(key << 32))
        return np.concatenate(found)

    def keeps(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Return for each row from `begin` up to, without, `end` whether the vector keeps it: a mask, 1 byte a row."""
        kept = np.ones(max(end - begin, 0), np.bool_)
        kept[(self.positions(begin, end) - np.uint64(begin)).astype(np.int64)] = False
        return kept

    def encode(self) -> bytes:
        """Return the blob ``deletion-vector-v1``, run-length encoded where that is shorter, as Java writes it.

        Raises:
            ValueError: It would have 2 GiB or more, which its length field cannot hold.
        """
        parts = [VECTOR_MAGIC, len(self._bitmaps).to_bytes(8, "little")]
        for key, bitmap in self._bitmaps.items():
            shortest = bitmap.copy()
            shortest.run_optimize()
            parts += [key.to_bytes(4, "little"), shortest.serialize()]
        body = b"".join(parts)
        if len(body) > (1 << 31) - 1 - FRAME_NBYTES:
            raise ValueError(f"a deletion vector of {len(body)} bytes is too long for its file form, below 2 GiB")
        return len(body).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")


def decode_vector(blob: Buffer, *, cardinality: int | None) -> DeletionVector:
    """Read a blob ``deletion-vector-v1``. The memory that this takes is in proportion to the blob.

    Args:
        blob: The bytes from ``content_offset`` on, ``content_size_in_bytes`` of them.
        cardinality: How many rows are deleted, by the ``record_count`` of the manifest entry; None: not known.

    Raises:
        FormatError: The blob is malformed or changed, or has another number of rows.
    """
    data = bytes_view(blob)
    body = data[4:-4]
    if len(data) < FRAME_NBYTES or int.from_bytes(data[:4], "big") != len(body):
        raise FormatError(f"a deletion vector of {len(data)} bytes is cut, or says that it has another length")
    if body[:4] != VECTOR_MAGIC:
        raise FormatError("a deletion vector does not begin with D1 D3 39 64: the offset points elsewhere")
    if int.from_bytes(data[-4:], "big") != zlib.crc32(body):
        raise FormatError("a deletion vector was changed: its CRC-32 is another")
    if len(body) < 12:
        raise FormatError("a deletion vector ends before its number of bitmaps")
    count, at, last, bitmaps = int.from_bytes(body[4:12], "little"), 12, -1, {}
    for _ in range(count):
        if len(body) - at < 4:
            raise FormatError(f"a deletion vector says that it has {count} bitmaps, and ends before")
        half = int.from_bytes(body[at : at + 4], "little")
        if not last < half <= MAX_KEY:
            raise FormatError(f"bitmap {half} of a deletion vector is out of order, or beyond {MAX_KEY}")
        end = at + 4 + _bitmap_nbytes(body[at + 4 :])
        bitmaps[half] = _bitmap(body[at + 4 : end])
        last, at = half, end
    if at != len(body):
        raise FormatError(f"a deletion vector has {len(body) - at} bytes after its last bitmap")
    vector = _checked(bitmaps)
    if cardinality is not None and len(vector) != cardinality:
        raise FormatError(f"a deletion vector has {len(vector)} rows, and its manifest entry says {cardinality}")
    return vector


def write_vectors(
    vectors: Mapping[str, DeletionVector], *, created_by: str = f"ags_fast {__version__}"
) -> tuple[bytes, list[Blob]]:
    """Return a Puffin file of deletion vectors, and what a manifest needs to name each.

    Args:
        vectors: By the location of the data file, exactly as the table's manifests name it.
        created_by: Who writes it, for its footer.

    Raises:
        ValueError: A vector is empty, or there is none: such a vector has no manifest entry.
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


def _footer(blobs: Iterable[Blob], properties: Mapping[str, str]) -> bytes:
    value = {"blobs": [blob.to_json() for blob in blobs], "properties": dict(properties)}
    payload = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    return MAGIC + payload + len(payload).to_bytes(4, "little") + bytes(4) + MAGIC


def rename_vectors(data: Buffer, renamed: Mapping[str, str]) -> bytes:
    """Return a Puffin file whose deletion vectors name other data files. The blobs stay where they are.

    Args:
        data: The file's plaintext.
        renamed: The old and new location of data files. Vectors of others stay as they are.

    Raises:
        FormatError: The file is malformed or cut.
    """
    file, view = read_puffin(data), bytes_view(data)
    blobs = []
    for blob in file.blobs:
        named = blob.properties.get("referenced-data-file", "")
        if named in renamed:
            blob = replace(blob, properties={**blob.properties, "referenced-data-file": renamed[named]})
        blobs.append(blob)
    end = max((blob.offset + blob.length for blob in blobs), default=len(MAGIC))
    return bytes(view[:end]) + _footer(blobs, file.properties)


def read_puffin(source: Buffer | RangeSource) -> PuffinFile:
    """Read the footer of a Puffin file, and no blob.

    Args:
        source: The file's plaintext, or a source of it.

    Raises:
        FormatError: The file is malformed or cut, or the footer names bytes that are not those of a blob.
    """
    read_at, length = _ranges(source)
    if length < 2 * len(MAGIC) + TAIL_NBYTES or read_at(0, 4) != MAGIC:
        raise FormatError(f"the file of {length} bytes is not a Puffin file: it does not begin with PFA1")
    tail = read_at(length - TAIL_NBYTES, TAIL_NBYTES)
    nbytes, flags = int.from_bytes(tail[:4], "little", signed=True), tail[4:8]
    begin = length - TAIL_NBYTES - nbytes - len(MAGIC)
    if tail[8:] != MAGIC or not 0 <= nbytes <= MAX_FOOTER_NBYTES or begin < len(MAGIC):
        raise FormatError("the Puffin file is cut, or its footer has an impossible length")
    footer = read_at(begin, len(MAGIC) + nbytes)
    if footer[:4] != MAGIC or flags not in (bytes(4), COMPRESSED):
        raise FormatError("the footer of the Puffin file does not begin with PFA1, or has unknown flags")
    payload = _unlz4(footer[4:]) if flags == COMPRESSED else footer[4:]
    check_marks(payload, "the footer of a Puffin file")
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        raise FormatError("the footer of the Puffin file is not JSON") from None
    if not isinstance(value, dict) or not isinstance(value.get("blobs"), list):
        raise FormatError("the footer of the Puffin file has no list of blobs")
    blobs = tuple(map(Blob.from_json, value["blobs"]))
    for blob in blobs:
        if not len(MAGIC) <= blob.offset <= blob.offset + blob.length <= begin or blob.length < 0:
            raise FormatError(f"a blob of {blob.length} bytes at {blob.offset} is not inside the Puffin file")
    return PuffinFile(blobs, _texts(value.get("properties")))


def _ranges(source: Any) -> tuple[Any, int]:
    """Return a function that reads ranges, and the length of the file."""
    if hasattr(source, "read_at"):
        return source.read_at, source.length
    data = bytes_view(source)
    return lambda offset, size: bytes(data[offset : offset + size]), len(data)


def _texts(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise FormatError("the properties in the footer of a Puffin file are not texts by name")
    return value


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


def _checked(bitmaps: dict[int, BitMap]) -> DeletionVector:
    try:
        return DeletionVector(bitmaps)
    except ValueError as error:
        raise FormatError(f"a deletion vector is impossible: {error}") from None


def _cut(bitmap: BitMap, first: int, stop: int) -> BitMap:
    """Return the part of a bitmap from `first` up to, without, `stop`."""
    window = BitMap()
    window.add_range(first, stop)
    return bitmap & window


def _bitmap(data: memoryview) -> BitMap:
    """Read a 32-bit bitmap of exactly these bytes."""
    try:
        return BitMap.deserialize(bytes(data))
    except (ValueError, IndexError):
        raise FormatError("a bitmap in a deletion vector is malformed") from None


def _bitmap_nbytes(data: memoryview) -> int:
    """Return how many bytes a 32-bit bitmap takes. FormatError if the data end before.

    The reader of bitmaps does not tell. The form is RoaringFormatSpec's: a cookie, a bit for each container that has
    runs, key and cardinality of each container, their offsets, and the containers.
    """

    def number(at: int, nbytes: int) -> int:
        if at + nbytes > len(data):
            raise FormatError("a bitmap in a deletion vector is cut")
        return int.from_bytes(data[at : at + nbytes], "little")

    cookie = number(0, 4)
    if cookie & 0xFFFF == COOKIE_WITH_RUNS:
        count, at = (cookie >> 16) + 1, 4
        runs = number(at, (count + 7) // 8)
        at += (count + 7) // 8
    elif cookie == COOKIE:
        count, at, runs = number(4, 4), 8, 0
    else:
        raise FormatError("a bitmap in a deletion vector is in no known form")
    if count > 1 << 16:
        raise FormatError("a bitmap in a deletion vector has more containers than there are")
    described = at
    at += 4 * count
    if cookie == COOKIE or count >= OFFSETS_FROM:
        at += 4 * count
    for i in range(count):
        if runs >> i & 1:
            at += 2 + 4 * number(at, 2)
        else:
            rows = number(described + 4 * i + 2, 2) + 1
            at += 2 * rows if rows <= ARRAY_MOST else BITSET_NBYTES
    if at > len(data):
        raise FormatError("a bitmap in a deletion vector is cut")
    return at
