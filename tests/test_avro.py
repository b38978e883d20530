"""Avro inside AGS1: any set of splits gives the records of the plain file, each once, and Avro Java's in each split.

tests/test_spark.py asks the Java implementation itself.
"""

from __future__ import annotations

import io
import itertools
import os
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import KEY, Source

import ags_fast
from ags_fast import AgsCodec, FormatError, IntegrityError

fastavro = pytest.importorskip("fastavro")
from ags_fast import avro  # noqa: E402  # needs fastavro

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PREFIX = b"orders/2026"
SCHEMA = {
    "type": "record",
    "name": "order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"]},
        {"name": "lines", "type": {"type": "array", "items": "double"}},
        {"name": "raw", "type": "bytes"},
    ],
}
SYNC_NBYTES = 16


def codecs() -> Iterator[Any]:
    """fastavro's codecs; those whose library is not installed are skipped."""
    for codec in ("null", "deflate", "snappy", "zstandard"):
        try:
            fastavro.writer(io.BytesIO(), SCHEMA, make_records(1), codec=codec)
        except ValueError as error:
            yield pytest.param(codec, marks=pytest.mark.skip(reason=str(error)))
        else:
            yield codec


def make_records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {
            "id": i,
            "note": None if draw.random() < 0.3 else "é" * draw.randrange(40),
            "lines": [draw.random() for _ in range(draw.randrange(4))],
            "raw": draw.randbytes(draw.randrange(30)),
        }
        for i in range(count)
    ]


def make_avro(records: Iterable[dict[str, Any]], **options: Any) -> bytes:
    """A plain Avro file; one block for about every `sync_interval` bytes."""
    file = io.BytesIO()
    fastavro.writer(file, SCHEMA, records, **options)
    return file.getvalue()


def seal(plain: bytes, block_size: int = 1 << 20) -> bytes:
    return AgsCodec(KEY, aad_prefix=PREFIX, block_size=block_size).encrypt(plain)


def read(source: Any, start: int, end: int, *, length: int | None = None, **options: Any) -> list[dict[str, Any]]:
    if length is None:
        length = len(source)
    return list(avro.read_split(source, KEY, start, end, length=length, aad_prefix=PREFIX, **options))


def cut_at(points: Iterable[int], end: int) -> list[tuple[int, int]]:
    edges = sorted({0, end, *points})
    return list(itertools.pairwise(edges))


# ------------------------------------------------------------------------------- the rule, written a second time


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value >> 1 ^ -(value & 1), at


def to_varint(value: int) -> bytes:
    value = (value << 1) ^ (value >> 63)
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def sync_marker(plain: bytes) -> tuple[bytes, int]:
    """The file's sync marker, and where it begins in the header: behind the magic and a map of bytes."""
    at = 4
    count, at = varint(plain, at)
    while count:
        for _ in range(2 * count):  # keys and values
            size, at = varint(plain, at)
            at += size
        count, at = varint(plain, at)
    return plain[at : at + SYNC_NBYTES], at


def java_blocks(plain: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The blocks that Avro Java's DataFileReader reads of a split: where each begins and how many records it has.

    `sync(start)` scans for the first whole marker from `start` on; iteration goes on until `pastSync(end)`.
    """
    marker, _ = sync_marker(plain)
    found = plain.find(marker, start)
    block_start = len(plain) if found < 0 else found + SYNC_NBYTES
    while not (block_start >= end + SYNC_NBYTES or block_start >= len(plain)):
        count, at = varint(plain, block_start)
        size, at = varint(plain, at)
        yield block_start, count
        block_start = at + size + SYNC_NBYTES


def java_ids(plain: bytes, start: int, end: int) -> list[int]:
    """The numbers of the records in a split, as `java_blocks` has it."""
    blocks = list(java_blocks(plain, 0, len(plain)))
    first = {begin: sum(count for _, count in blocks[:i]) for i, (begin, _) in enumerate(blocks)}
    return [first[begin] + i for begin, count in java_blocks(plain, start, end) for i in range(count)]


def check(plain: bytes, records: list[dict[str, Any]], sealed: bytes, ranges: list[tuple[int, int]]) -> None:
    got = []
    for start, end in ranges:
        rows = read(sealed, start, end)
        assert [row["id"] for row in rows] == java_ids(plain, start, end), (start, end)
        got += rows
    assert got == records


# --------------------------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize("codec", list(codecs()))
@pytest.mark.parametrize("block_size", [16, 1000, 1 << 20])
def test_splits_together_equal_one_unsplit_read(codec: str, block_size: int) -> None:
    plain = make_avro(make_records(300), codec=codec, sync_interval=700)
    records = list(fastavro.reader(io.BytesIO(plain)))
    sealed = seal(plain, block_size)
    assert len(list(java_blocks(plain, 0, len(plain)))) > 7
    for parts in (1, 2, 3, 7, 20):
        size = -(-len(plain) // parts)
        ranges = avro.splits(sealed, KEY, length=len(sealed), aad_prefix=PREFIX, split_size=size)
        assert ranges[0][0] == 0
        assert ranges[-1][1] == len(plain)
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert all(end - start <= size for start, end in ranges)
        check(plain, records, sealed, ranges)


def test_splits_of_a_few_bytes() -> None:
    records = make_records(20)
    plain = make_avro(records, sync_interval=100)
    sealed = seal(plain, 64)
    for size in (3, 17):
        ranges = avro.splits(sealed, KEY, length=len(sealed), aad_prefix=PREFIX, split_size=size)
        assert len(ranges) == -(-len(plain) // size)
        check(plain, records, sealed, ranges)


def test_splits_of_a_block_or_more_end_where_blocks_end() -> None:
    sealed = seal(make_avro(make_records(300)), 1000)
    for size in (1000, 1999, 2500, 3000):
        ranges = avro.splits(sealed, KEY, length=len(sealed), aad_prefix=PREFIX, split_size=size)
        assert {start % 1000 for start, _ in ranges} == {0}
        assert {end - start for start, end in ranges[:-1]} == {size // 1000 * 1000}


@pytest.mark.parametrize("block_size", [7, 64, 4096])
def test_two_splits_cut_at_every_byte(block_size: int) -> None:
    """So every marker straddles the splits' boundary in every way and, with small blocks, that of AGS1 blocks."""
    records = make_records(12)
    plain = make_avro(records, sync_interval=150)
    sealed = seal(plain, block_size)
    assert len(list(java_blocks(plain, 0, len(plain)))) > 3
    for cut in range(len(plain) + 1):
        check(plain, records, sealed, [(0, cut), (cut, len(plain))])


@given(data=st.data())
def test_any_cuts_of_any_file(data: st.DataObject) -> None:
    records = make_records(data.draw(st.integers(0, 40), "records"), data.draw(st.integers(0, 9), "seed"))
    plain = make_avro(
        records,
        codec=data.draw(st.sampled_from(["null", "deflate"]), "codec"),
        sync_interval=data.draw(st.integers(1, 2000), "sync_interval"),
        metadata={"note": "x" * data.draw(st.integers(0, 300), "metadata")},
    )
    sealed = seal(plain, data.draw(st.integers(1, 600), "block_size"))
    cuts = data.draw(st.sets(st.integers(0, len(plain)), max_size=12), "cuts")
    check(plain, records, sealed, cut_at(cuts, len(plain)))


def test_marker_is_found_across_the_pieces_it_is_looked_for_in() -> None:
    """A split may begin in the middle of a large Avro block: the next marker is then looked for piece by piece."""
    records = [{**record, "raw": bytes(5 * avro.BUFFER_NBYTES // 2)} for record in make_records(3)]
    plain = make_avro(records, sync_interval=1)
    sealed = seal(plain)
    marker, _ = sync_marker(plain)
    second = plain.index(marker, avro.BUFFER_NBYTES)
    for back in (*range(-1, SYNC_NBYTES + 2), avro.BUFFER_NBYTES):
        start = second + back - avro.BUFFER_NBYTES
        assert [row["id"] for row in read(sealed, start, len(plain))] == java_ids(plain, start, len(plain)) == [1, 2]
        for end in (second, second + 1, second + SYNC_NBYTES):
            assert [row["id"] for row in read(sealed, start, end)] == java_ids(plain, start, end)


def test_header_longer_than_blocks_and_splits() -> None:
    records = make_records(200)
    plain = make_avro(records, sync_interval=500, metadata={"statistics": "x" * 50_000})
    sealed = seal(plain, 1024)
    ranges = avro.splits(sealed, KEY, length=len(sealed), aad_prefix=PREFIX, split_size=3000)
    header_end = sync_marker(plain)[1] + SYNC_NBYTES
    assert sum(end <= header_end for _, end in ranges) > 10
    check(plain, records, sealed, ranges)


def test_header_belongs_to_the_split_in_which_its_marker_begins() -> None:
    records = make_records(5)
    plain = make_avro(records)  # one block
    sealed = seal(plain, 50)
    _, header_marker = sync_marker(plain)
    for start, end in [(0, 5), (0, header_marker), (3, header_marker), (header_marker + 1, len(plain)), (7, 7)]:
        assert read(sealed, start, end) == [], (start, end)
    for start, end in [(0, header_marker + 1), (header_marker, header_marker + 1), (4, len(plain) + 99)]:
        assert read(sealed, start, end) == records, (start, end)


@pytest.mark.parametrize("block_size", [1, 64, 1 << 20])
def test_file_without_records(block_size: int) -> None:
    plain = make_avro([])
    sealed = seal(plain, block_size)
    check(plain, [], sealed, cut_at(range(0, len(plain), 40), len(plain)))


def test_split_reads_little_more_than_its_own_part() -> None:
    """The header, the rest of its last Avro block, and what is read ahead: about a buffer each."""
    split_size = 4 << 20
    records = [{**record, "raw": bytes(100_000)} for record in make_records(200)]
    sealed = seal(make_avro(records), 1 << 16)
    ranges = avro.splits(Source(sealed), KEY, length=len(sealed), aad_prefix=PREFIX, split_size=split_size)
    assert len(ranges) == 5
    got = []
    for start, end in ranges:
        source = Source(sealed)
        got += read(source, start, end, length=len(sealed))
        assert sum(size for _, size in source.requests) < split_size + 4 * avro.BUFFER_NBYTES
        assert not source.closed  # a file passed in is left open
    assert got == records


def test_reader_schema_projects() -> None:
    records = make_records(100)
    sealed = seal(make_avro(records, sync_interval=300), 256)
    projection = {
        "type": "record",
        "name": "order",
        "fields": [
            {"name": "note", "type": ["null", "string"]},
            {"name": "id", "type": "double"},
            {"name": "channel", "type": "string", "default": "web"},
        ],
    }
    ranges = avro.splits(sealed, KEY, length=len(sealed), aad_prefix=PREFIX, split_size=1000)
    got = [row for start, end in ranges for row in read(sealed, start, end, reader_schema=projection)]
    assert got == [{"note": row["note"], "id": float(row["id"]), "channel": "web"} for row in records]


@pytest.mark.parametrize(("start", "end"), [(-1, 5), (5, 4)])
def test_impossible_splits(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="split"):
        read(seal(make_avro([])), start, end)
    with pytest.raises(ValueError, match="split_size"):
        avro.splits(seal(b""), KEY, length=None, split_size=0)


# ------------------------------------------------------------------------------------------ cut, changed, not Avro


def test_cut_file_is_an_error_never_fewer_rows() -> None:
    """Avro takes an early end for the end of the file. Cut at every byte, the trusted length tells."""
    plain = make_avro(make_records(12), sync_interval=150)
    sealed = seal(plain, 64)
    for size in range(len(sealed)):
        with pytest.raises(IntegrityError):
            read(sealed[:size], 0, len(plain), length=len(sealed))


def test_file_cut_while_it_is_read(tmp_path: Any) -> None:
    records = make_records(30_000)
    plain = make_avro(records)
    sealed = seal(plain, 4096)
    path = tmp_path / "orders.avro.ags"
    path.write_bytes(sealed)
    rows = avro.read_split(path, KEY, 0, len(plain), length=len(sealed), aad_prefix=PREFIX)
    assert next(rows) == records[0]
    os.truncate(path, 8 + len(sealed) // 2 // 4124 * 4124)  # whole blocks
    with pytest.raises(IntegrityError):
        list(rows)


def test_changed_block_is_an_error_never_fewer_rows() -> None:
    plain = make_avro(make_records(12), sync_interval=150)
    sealed = seal(plain, 64)
    for index in range(-(-len(plain) // 64)):
        changed = bytearray(sealed)
        changed[8 + index * 92 + 20] ^= 0x10
        with pytest.raises(IntegrityError) as caught:
            read(bytes(changed), 0, len(plain))
        assert caught.value.block_index == index


@pytest.mark.parametrize(
    "plain", [b"", b"Obj", b"Obj\x01", b"PAR1" + bytes(100), b"Obj\x01\x00" + bytes(16), bytes(5000)]
)
def test_what_is_no_avro_file(plain: bytes) -> None:
    with pytest.raises(FormatError):
        read(seal(plain), 0, len(plain))


def test_avro_file_that_was_cut_before_it_was_sealed() -> None:
    """Where one of its blocks ends it is a shorter Avro file, to any reader; anywhere else it is a FormatError."""
    records = make_records(12)
    plain = make_avro(records, sync_interval=150)
    ends = {0: sync_marker(plain)[1] + SYNC_NBYTES}
    for begin, count in java_blocks(plain, 0, len(plain)):
        ends[max(ends) + count] = plain.index(sync_marker(plain)[0], begin) + SYNC_NBYTES
    whole = {end: count for count, end in ends.items()}
    assert whole[len(plain)] == len(records)
    for size in range(len(plain)):
        sealed = seal(plain[:size], 256)
        if size in whole:
            assert read(sealed, 0, size) == records[: whole[size]]
        else:
            with pytest.raises(FormatError):
                read(sealed, 0, size)


def test_avro_file_that_ends_inside_a_number() -> None:
    """An end of file there is none to take for the end of the blocks."""
    plain = make_avro([{**record, "raw": b""} for record in make_records(400)], sync_interval=1 << 20)
    header_end = sync_marker(plain)[1] + SYNC_NBYTES
    assert plain[header_end] >= 0x80  # the count has two bytes
    with pytest.raises(FormatError):
        read(seal(plain[: header_end + 1]), 0, len(plain))


@pytest.mark.parametrize("size", [-5, 1 << 31, 1 << 40, 1 << 62])
def test_avro_block_that_claims_an_impossible_size(size: int) -> None:
    """A size from a file is checked against what is left of it before memory is asked for."""
    plain = make_avro(make_records(5))
    _, at = sync_marker(plain)
    lie = plain[: at + SYNC_NBYTES] + to_varint(5) + to_varint(size) + plain[-100:]
    with pytest.raises(FormatError):
        read(seal(lie), 0, len(lie))


@given(data=st.data())
def test_changed_plaintext_raises_only_format_errors(data: st.DataObject) -> None:
    """Sealed rubbish is authentic rubbish: records, or FormatError, whatever fastavro stumbles over."""
    plain = bytearray(make_avro(make_records(5), sync_interval=100))
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        plain[data.draw(st.integers(0, len(plain) - 1), "at")] = data.draw(st.integers(0, 255), "to")
    start = data.draw(st.integers(0, len(plain)), "start")
    try:
        read(seal(bytes(plain), 128), start, len(plain))
    except FormatError:
        pass


# ---------------------------------------------------------------------------------------------------------- write


@pytest.mark.parametrize("codec", list(codecs()))
def test_write_is_fastavros_file_inside_a_stream(tmp_path: Any, codec: str) -> None:
    records = make_records(300)
    path = tmp_path / "orders.avro.ags"
    metadata = {"writer": "test"}
    length = avro.write(
        path, KEY, SCHEMA, iter(records), codec=codec, aad_prefix=PREFIX, sync_interval=900, metadata=metadata
    )
    assert length == path.stat().st_size
    with ags_fast.open(path, key=KEY, length=length, aad_prefix=PREFIX, block_size=1 << 20) as file:
        reader = fastavro.reader(file)
        assert reader.metadata["avro.codec"] == codec
        assert reader.metadata["writer"] == "test"
        assert list(reader) == records
        plain = file.read_at(0, file.length)
    assert len(list(java_blocks(plain, 0, len(plain)))) > 3


def test_write_to_an_open_file() -> None:
    records = make_records(300)
    target = io.BytesIO(b"before")
    target.seek(6)
    length = avro.write(target, KEY, SCHEMA, records, aad_prefix=PREFIX, block_size=100)
    assert not target.closed
    sealed = target.getvalue()[6:]
    assert len(sealed) == length
    assert read(sealed, 0, length) == records


@pytest.mark.parametrize("at", [0, 1, 5000])
def test_failing_records_leave_no_file(tmp_path: Any, at: int) -> None:
    class SourceError(Exception):
        pass

    def records() -> Iterator[dict[str, Any]]:
        yield from make_records(at)
        raise SourceError

    with pytest.raises(SourceError):
        avro.write(tmp_path / "orders.avro.ags", KEY, SCHEMA, records(), block_size=1000)
    assert os.listdir(tmp_path) == []


def test_records_that_are_not_the_schemas_leave_the_old_file(tmp_path: Any) -> None:
    path = tmp_path / "orders.avro.ags"
    path.write_bytes(b"old")
    with pytest.raises((TypeError, ValueError)):
        avro.write(path, KEY, SCHEMA, [*make_records(3), {"id": "three"}])
    assert os.listdir(tmp_path) == ["orders.avro.ags"]
    assert path.read_bytes() == b"old"
