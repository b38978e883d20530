"""Puffin files with deletion vectors: against PyIceberg's reader, by hand, and changed in every place."""

from __future__ import annotations

import json
import struct
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import KEY, flip, seal_stream

from ags_fast import AgsReader
from ags_fast.errors import FormatError

np = pytest.importorskip("numpy")
pyroaring = pytest.importorskip("pyroaring")

from ags_fast.puffin.vectors import (  # noqa: E402  (needs the two)
    MAX_POSITION,
    Blob,
    DeletionVector,
    decode_vector,
    read_puffin,
    write_vectors,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

PATH = "s3://bucket/таблица/data/00000-0-\U0001f4c4.parquet"
SHAPES: dict[str, Sequence[int]] = {
    "one": [0],
    "array": [3, 5, 65535, 65536, 1 << 31, (1 << 32) - 1],
    "run": range(100, 60_000),
    "bitset": range(0, 20_000, 3),
    "all forms": [*range(5), *range(1 << 16, (1 << 17) - 1), *range(1 << 17, 1 << 18, 2), 1 << 20],
    "many containers": range(0, 1 << 22, 50_000),
    "beyond 32 bits": [1, 1 << 32, (1 << 32) + 1, 5 << 32, MAX_POSITION],
    "two halves": [1, 70_000, (1 << 32) + 1],
    "not the first": [(7 << 32) + 9],
}


@pytest.fixture(params=SHAPES)
def positions(request: pytest.FixtureRequest) -> Sequence[int]:
    return SHAPES[request.param]


def framed(body: bytes) -> bytes:
    """A blob whose frame fits."""
    return struct.pack(">I", len(body)) + body + struct.pack(">I", zlib.crc32(body))


def vector_body(*bitmaps: tuple[int, bytes], count: int | None = None) -> bytes:
    parts = b"".join(struct.pack("<I", key) + bitmap for key, bitmap in bitmaps)
    return b"\xd1\xd3\x39\x64" + struct.pack("<Q", len(bitmaps) if count is None else count) + parts


# ---------------------------------------------------------------- bytes


def test_by_hand() -> None:
    """A whole file, spelled out: as the specification has it, with the fields in Java's order."""
    run = struct.pack("<HHBHHHHH", 12347, 0, 1, 0, 9, 1, 0, 9)  # one container, a run: rows 0 to 9
    blob = framed(b"\xd1\xd3\x39\x64" + struct.pack("<QI", 1, 0) + run)
    footer = (
        '{"blobs":[{"type":"deletion-vector-v1","fields":[2147483645],"snapshot-id":-1,"sequence-number":-1,'
        f'"offset":4,"length":{len(blob)},"properties":{{"referenced-data-file":"{PATH}","cardinality":"10"}}}}],'
        '"properties":{"created-by":"me"}}'
    ).encode()
    expected = b"PFA1" + blob + b"PFA1" + footer + struct.pack("<I", len(footer)) + bytes(4) + b"PFA1"
    data, blobs = write_vectors({PATH: DeletionVector.of(range(10))}, created_by="me")
    assert data == expected
    assert [(one.offset, one.length) for one in blobs] == [(4, len(blob))]
    assert read_puffin(data).blobs == tuple(blobs)


def test_forms_of_containers() -> None:
    """A container has the form that takes the fewest bytes; the lengths are those of RoaringFormatSpec."""
    for positions, nbytes in (
        ([1, 7], 8 + 4 + 4 + 4),  # array
        (range(5000), 5 + 4 + 6),  # run
        (range(0, 10_000, 2), 8 + 4 + 4 + 8192),  # bitset
    ):
        assert len(DeletionVector.of(positions).encode()) == 4 + 4 + 8 + 4 + nbytes + 4


def test_round_trip(positions: Sequence[int]) -> None:
    vector = DeletionVector.of(positions)
    assert len(vector) == len(positions)
    assert vector.positions().tolist() == list(positions)
    other = DeletionVector.of([2])
    data, blobs = write_vectors({PATH: vector, "b": other})
    footer = read_puffin(data)
    assert footer.properties["created-by"].startswith("ags_fast ")
    for blob, written, path in zip(footer.blobs, blobs, (PATH, "b"), strict=True):
        assert blob == written
        assert (blob.type, blob.fields) == ("deletion-vector-v1", (2147483645,))
        assert (blob.snapshot_id, blob.sequence_number, blob.compression_codec) == (-1, -1, None)
        expected = vector if path == PATH else other
        assert blob.properties == {"referenced-data-file": path, "cardinality": str(len(expected))}
        found = decode_vector(data[blob.offset : blob.offset + blob.length], cardinality=len(expected))
        assert found == expected
        assert found.encode() == expected.encode()


def test_pyiceberg_reads_it(positions: Sequence[int]) -> None:
    module = pytest.importorskip("pyiceberg.table.puffin")
    deletion_vector = pytest.importorskip("pyiceberg.table.deletion_vector")
    if len({position >> 32 for position in positions}) != (positions[-1] >> 32) + 1:
        pytest.skip("PyIceberg makes an array without a type of each key that has no positions")
    data, blobs = write_vectors({"first": DeletionVector.of([4]), PATH: DeletionVector.of(positions)})
    file = module.PuffinFile(data)
    assert [(one.offset, one.length, one.snapshot_id) for one in file.footer.blobs] == [
        (one.offset, one.length, -1) for one in blobs
    ]
    vectors = deletion_vector.deletion_vectors_from_puffin_file(file)
    found = {one.referenced_data_file: one.to_vector().to_pylist() for one in vectors}
    assert found == {"first": [4], PATH: list(positions)}


def test_other_writers_forms(positions: Sequence[int]) -> None:
    """Without runs, and with a bitmap for each key, as Java writes empty ones: the same vector."""
    if max(positions) >> 32 > 100:
        positions = [*positions[:-1], 9 << 32]
    low: dict[int, list[int]] = {key: [] for key in range((positions[-1] >> 32) + 1)}
    for position in positions:
        low[position >> 32].append(position & 0xFFFFFFFF)
    body = vector_body(*((key, pyroaring.BitMap(rows).serialize()) for key, rows in low.items()))
    assert decode_vector(framed(body), cardinality=len(positions)) == DeletionVector.of(positions)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, MAX_POSITION) | st.integers(0, 1 << 18), max_size=60),
    st.lists(st.tuples(st.integers(0, 1 << 34), st.integers(1, 5000)), max_size=4),
)
def test_any_positions(single: list[int], runs: list[tuple[int, int]]) -> None:
    expected = {*single, *(row for begin, count in runs for row in range(begin, begin + count))}
    vector = DeletionVector.of(np.array([*expected, *single], np.uint64))
    assert set(vector.positions().tolist()) == expected
    assert decode_vector(vector.encode(), cardinality=len(expected)) == vector
    if expected:
        begin, end = sorted((max(expected) // 2, max(expected) - 1))
        assert vector.positions(begin, end).tolist() == sorted(row for row in expected if begin <= row < end)
        end = min(expected) + 1000
        kept = vector.keeps(min(expected), end).tolist()
        assert kept == [row not in expected for row in range(min(expected), end)]


@settings(max_examples=40, deadline=None)
@given(*[st.sets(st.integers(0, 1 << 33) | st.integers(0, 3000), max_size=200)] * 2)
def test_union(old: set[int], new: set[int]) -> None:
    either = DeletionVector.of(list(old)) | DeletionVector.of(list(new))
    assert set(either.positions().tolist()) == old | new
    assert either == DeletionVector.of(sorted(old | new))
    assert len(either) == len(old | new)
    assert all(row in either for row in old | new)
    assert (1 << 40) + 1 not in either


def test_parts_of_a_wide_vector() -> None:
    """A part costs what the vector has, not what the range could have."""
    vector = DeletionVector.of([0, 5, 1 << 33, MAX_POSITION])
    assert vector.positions(1).tolist() == [5, 1 << 33, MAX_POSITION]
    assert vector.positions(-5, MAX_POSITION).tolist() == [0, 5, 1 << 33]
    assert vector.positions(5, 1 << 33).tolist() == [5]
    assert vector.positions(7, 3).tolist() == DeletionVector.of([]).positions(3).tolist() == []
    assert vector.keeps(4, 7).tolist() == [True, False, True]
    assert -1 not in vector


def test_positions_of_other_types() -> None:
    pa = pytest.importorskip("pyarrow")
    expected = DeletionVector.of([1, 5])
    for given_ in ((5, 1, 1), np.array([5, 1], np.int8), pa.array([1, 5]), pa.chunked_array([[1], [5]]), [5, 1]):
        assert DeletionVector.of(given_) == expected
    assert DeletionVector.of([]) == DeletionVector.of(pa.array([], pa.int64()))
    assert len(DeletionVector.of([])) == 0
    assert expected != [1, 5]
    assert repr(expected) == "<DeletionVector of 2 rows>"
    for bad in ([-1], [MAX_POSITION + 1], [1 << 63]):
        with pytest.raises(ValueError, match="positions of rows"):
            DeletionVector.of(bad)
    for other in ([1.5], ["1"], [[1]], pa.array([1, None])):
        with pytest.raises(TypeError):
            DeletionVector.of(other)


def test_nothing_to_write() -> None:
    with pytest.raises(ValueError, match="at least one"):
        write_vectors({})
    with pytest.raises(ValueError, match="is empty"):
        write_vectors({"a": DeletionVector.of([1]), "b": DeletionVector.of([])})


# ---------------------------------------------------------------- changed


@pytest.mark.parametrize("shape", ["one", "array", "run", "not the first"])
def test_every_flip_and_cut_of_a_vector(shape: str) -> None:
    vector = DeletionVector.of(SHAPES[shape])
    blob = vector.encode()
    for bit in range(8 * len(blob)):
        with pytest.raises(FormatError):
            decode_vector(flip(blob, bit), cardinality=None)
    for size in range(len(blob)):
        with pytest.raises(FormatError):
            decode_vector(blob[:size], cardinality=None)
    with pytest.raises(FormatError):
        decode_vector(blob + b"\0", cardinality=None)
    with pytest.raises(FormatError, match="its manifest entry says"):
        decode_vector(blob, cardinality=len(vector) + 1)


@pytest.mark.parametrize("shape", ["one", "array", "run", "bitset", "all forms"])
def test_every_flip_under_a_right_checksum(shape: str) -> None:
    """An attacker knows CRC-32: then it is refused, or it is another vector, but in memory like that of the file."""
    body = DeletionVector.of(SHAPES[shape]).encode()[4:-4]
    places = {*range(8 * min(len(body), 120)), *range(0, 8 * len(body), 97)}
    read = refused = 0
    for bit in places:
        try:
            found = decode_vector(framed(flip(body, bit)), cardinality=None)
        except FormatError:
            refused += 1
        else:
            read += 1
            assert decode_vector(found.encode(), cardinality=len(found)) == found
            assert len(found) <= 8 * len(body) + (1 << 16) * len(body)
    assert read
    assert refused
    for size in range(4, len(body), max(1, len(body) // 300)):
        with pytest.raises(FormatError):
            decode_vector(framed(body[:size]), cardinality=None)


def test_impossible_vectors() -> None:
    one = pyroaring.BitMap([1]).serialize()
    for body in (
        b"",
        b"\xd1\xd3\x39\x64",
        b"\xd1\xd3\x39\x65" + bytes(8),
        vector_body(count=1 << 62),  # bitmaps that the file does not have: nothing is allocated for them
        vector_body((0, one), count=2),
        vector_body((0, one), (0, one)),
        vector_body((1, one), (0, one)),
        vector_body(((1 << 31) - 1, one)),
        vector_body((0, one + b"\0")),
        vector_body((0, struct.pack("<II", 12346, 1 << 30))),
        vector_body((0, struct.pack("<II", 12346, (1 << 16) + 1) + bytes(1 << 20))),
        vector_body((0, struct.pack("<HH", 12347, 65535))),
        vector_body((0, b"")),
        vector_body((0, struct.pack("<II", 12345, 0))),
        vector_body((0, struct.pack("<IIHHI", 12346, 1, 0, 1, 16) + struct.pack("<HH", 5, 4))),  # not ascending
        vector_body(((1 << 31) - 2, pyroaring.BitMap([(1 << 31) + 1]).serialize())),  # beyond Java's last
    ):
        with pytest.raises(FormatError):
            decode_vector(framed(body), cardinality=None)
    assert len(decode_vector(framed(vector_body()), cardinality=0)) == 0


def test_every_flip_and_cut_of_a_file() -> None:
    """The footer has no checksum: it is refused, or names blobs inside the file. These are refused, or the same."""
    vectors = {"a": DeletionVector.of(range(9)), PATH: DeletionVector.of([1, 1 << 33])}
    data, blobs = write_vectors(vectors)
    for size in range(len(data)):
        with pytest.raises(FormatError):
            read_puffin(data[:size])
    for bit in range(8 * len(data)):
        changed = flip(data, bit)
        for blob, expected in zip(blobs, vectors.values(), strict=True):  # as a manifest names them
            try:
                found = decode_vector(changed[blob.offset : blob.offset + blob.length], cardinality=len(expected))
            except FormatError:
                continue
            assert found == expected
        try:
            footer = read_puffin(changed)
        except FormatError:
            continue
        assert all(4 <= one.offset <= one.offset + one.length < len(data) for one in footer.blobs)
        for one in footer.blobs:
            try:
                found = decode_vector(changed[one.offset : one.offset + one.length], cardinality=None)
            except FormatError:
                continue
            assert found in list(vectors.values())


def puffin(footer: Any, flags: bytes = bytes(4), payload: bytes | None = None) -> bytes:
    payload = json.dumps(footer).encode() if payload is None else payload
    return b"PFA1" + bytes(20) + b"PFA1" + payload + struct.pack("<i", len(payload)) + flags + b"PFA1"


GOOD = {"type": "x", "fields": [1], "snapshot-id": 3, "sequence-number": 4, "offset": 4, "length": 20}


def test_other_footers() -> None:
    """Of statistics, as Java and Trino write them."""
    value = {"blobs": [GOOD | {"compression-codec": "zstd", "properties": {"ndv": "7"}}], "later": 1}
    found = read_puffin(puffin(value))
    assert found.blobs == (Blob("x", (1,), 3, 4, 4, 20, "zstd", {"ndv": "7"}),)
    assert found.properties == {}
    assert json.loads(msgspec.json.encode(found.blobs[0])) == value["blobs"][0]  # type: ignore[index]
    pa = pytest.importorskip("pyarrow")
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "lz4") as stream:
        stream.write(json.dumps(value).encode())
    packed = bytes(sink.getvalue())
    assert read_puffin(puffin(None, b"\1\0\0\0", packed)) == found
    for size in range(len(packed)):
        with pytest.raises(FormatError):
            read_puffin(puffin(None, b"\1\0\0\0", packed[:size]))
    bomb = pa.BufferOutputStream()
    with pa.CompressedOutputStream(bomb, "lz4") as stream:
        for _ in range(65):
            stream.write(bytes(1 << 20))
    with pytest.raises(FormatError, match="more than"):
        read_puffin(puffin(None, b"\1\0\0\0", bytes(bomb.getvalue())))


@pytest.mark.parametrize(
    "change",
    [
        {"type": None},
        {"type": 5},
        {"fields": None},
        {"fields": ["1"]},
        {"fields": [True]},
        {"snapshot-id": None},
        {"snapshot-id": "1"},
        {"sequence-number": 1.5},
        {"offset": True},
        {"offset": 3},
        {"offset": 25},
        {"offset": -1},
        {"offset": 1 << 64},
        {"length": 21},
        {"length": -1},
        {"compression-codec": 5},
        {"properties": []},
        {"properties": {"a": 1}},
    ],
)
def test_impossible_blobs(change: dict[str, Any]) -> None:
    assert read_puffin(puffin({"blobs": [GOOD]})).blobs
    with pytest.raises(FormatError):
        read_puffin(puffin({"blobs": [GOOD | change]}))


def test_impossible_footers() -> None:
    for payload in (b"", b"x", b"[]", b"{}", b'{"blobs":5}', b'{"blobs":[5]}', b"\xff", b"[" * 50_000):
        with pytest.raises(FormatError):
            read_puffin(puffin(None, payload=payload))
    with pytest.raises(FormatError, match="values"):
        read_puffin(puffin(None, payload=b'{"blobs":[' + b"[]," * 2_000_000 + b"[]]}"))
    with pytest.raises(FormatError):
        read_puffin(puffin({"blobs": []}, b"\2\0\0\0"))
    with pytest.raises(FormatError):
        read_puffin(puffin({"blobs": [], "properties": {"a": None}}))
    whole = puffin({"blobs": []})
    for nbytes in (-1, len(whole), (1 << 31) - 1):
        with pytest.raises(FormatError):
            read_puffin(whole[:-12] + struct.pack("<i", nbytes) + whole[-8:])


def test_reading_from_a_stream() -> None:
    """Encrypted, only the ranges that are needed are read."""
    big = DeletionVector.of(range(0, 1 << 24, 2))
    data, blobs = write_vectors({"a": big, "b": DeletionVector.of([7])})
    sealed = seal_stream(data, block_size=1 << 16)
    with AgsReader(sealed, KEY, length=len(sealed)) as reader:
        blob = blobs[1]
        assert decode_vector(reader.read_at(blob.offset, blob.length), cardinality=1).positions().tolist() == [7]
