"""The binding's Thrift and Parquet part: identity, edits against a document model, pages there and back, hostile bytes.

What is below it, tests/csrc/test_thrift.c and test_parquet.c try in C; what is above it has tests of its own.
"""

from __future__ import annotations

import gc
import io
import os
import struct
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ags_fast import FormatError, IntegrityError, KeyLimitError, _core
from ags_fast.columnar import thrift
from ags_fast.columnar.schema import leaf_paths

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRUE, FALSE, I8, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT, UUID = range(1, 14)

# ---------------------------------------------------------------- a document model, written by the specification


@dataclass
class Value:
    """A value of the compact protocol. Of a struct: {id: value}; of lists and maps: their elements."""

    type: int
    value: Any = None
    element: int = 0
    other: int = 0


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def zigzag(value: int) -> bytes:
    return varint(value << 1 if value >= 0 else (-value << 1) - 1)


def encode(value: Value) -> bytes:
    """The bytes of a value. A bool field has none; a bool element has one."""
    data = value.value
    if value.type in (TRUE, FALSE):
        return b""
    if value.type == I8:
        return struct.pack("b", data)
    if value.type in (I16, I32, I64):
        return zigzag(data)
    if value.type == DOUBLE:
        return struct.pack("<d", data)
    if value.type == BINARY:
        return varint(len(data)) + data
    if value.type == UUID:
        return bytes(data)
    if value.type == MAP:
        if not data:
            return b"\0"
        pairs = b"".join(encode(key) + encode(element) for key, element in data)
        return varint(len(data)) + bytes([value.element << 4 | value.other]) + pairs
    if value.type in (LIST, SET):
        n = len(data)
        head = bytes([n << 4 | value.element]) if n < 15 else bytes([0xF0 | value.element]) + varint(n)
        return head + b"".join(bytes([e.type]) if e.type in (TRUE, FALSE) else encode(e) for e in data)
    out, last = b"", 0
    for number, element in sorted(data.items()):
        delta = number - last
        out += bytes([delta << 4 | element.type]) if delta <= 15 else bytes([element.type]) + zigzag(number)
        out += encode(element)
        last = number
    return out + b"\0"


def values(depth: int = 3) -> st.SearchStrategy[Value]:
    simple = st.one_of(
        st.sampled_from([Value(TRUE), Value(FALSE)]),
        st.builds(Value, st.just(I8), st.integers(-128, 127)),
        st.builds(Value, st.just(I16), st.integers(-(2**15), 2**15 - 1)),
        st.builds(Value, st.just(I32), st.integers(-(2**31), 2**31 - 1)),
        st.builds(Value, st.just(I64), st.integers(-(2**63), 2**63 - 1)),
        st.builds(Value, st.just(DOUBLE), st.floats(allow_nan=False)),
        st.builds(Value, st.just(BINARY), st.binary(max_size=20)),
        st.builds(Value, st.just(UUID), st.binary(min_size=16, max_size=16)),
    )
    if depth == 0:
        return simple
    inner = values(depth - 1)
    strings = st.builds(Value, st.just(BINARY), st.binary(max_size=4))
    numbers = st.builds(Value, st.just(I32), st.integers(0, 1000))
    bools = st.sampled_from([Value(TRUE), Value(FALSE)])
    return st.one_of(
        simple,
        structs(inner),
        st.builds(lambda kind, e: Value(kind, e, BINARY), st.sampled_from([LIST, SET]), st.lists(strings, max_size=20)),
        st.builds(lambda e: Value(LIST, e, TRUE), st.lists(bools, max_size=20)),
        st.builds(lambda e: Value(LIST, e, STRUCT), st.lists(structs(inner), max_size=17)),
        st.builds(lambda e: Value(MAP, e, BINARY, I32), st.lists(st.tuples(strings, numbers), max_size=5)),
    )


def structs(inner: st.SearchStrategy[Value]) -> st.SearchStrategy[Value]:
    ids = st.one_of(st.integers(1, 20), st.integers(1, 32767))
    return st.builds(lambda fields: Value(STRUCT, fields), st.dictionaries(ids, inner, max_size=6))


@settings(max_examples=60, deadline=None)
@given(structs(values()), structs(values(1)), st.binary(max_size=3), st.data())
def test_edits(document: Value, edits: Value, before: bytes, data: st.DataObject) -> None:
    """Fields that are replaced, put in and removed give the bytes of the edited document; all ids at every place."""
    encoded = encode(document)
    source = before + encoded + b"behind"
    fields, end = _core.thrift_fields(source, len(before))
    assert end == len(before) + len(encoded)
    assert {number: (kind, source[begin:stop]) for number, (kind, begin, stop) in fields.items()} == {
        number: (value.type, encode(value)) for number, value in document.value.items()
    }
    assert _core.thrift_splice(source, len(before), []) == encoded
    removed = data.draw(st.sets(st.sampled_from(sorted(document.value)))) if document.value else set()
    wanted = {n: v for n, v in document.value.items() if n not in removed} | edits.value
    changes = dict.fromkeys(removed) | edits.value
    spliced = _core.thrift_splice(
        source,
        len(before),
        [(n, 0 if v is None else v.type, None if v is None else encode(v)) for n, v in sorted(changes.items())],
    )
    assert spliced == encode(Value(STRUCT, wanted))


@settings(max_examples=30, deadline=None)
@given(structs(values()), st.randoms(use_true_random=False))
def test_cut_and_changed_structs(document: Value, random: Any) -> None:
    """A struct that is cut raises FormatError; a changed one that, too, or is another struct."""
    encoded = encode(document)
    for cut in range(len(encoded)):
        with pytest.raises(FormatError):
            _core.thrift_fields(encoded[:cut])
    for _ in range(20):
        changed = bytearray(encoded)
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        for call in (_core.thrift_fields, lambda d: _core.thrift_splice(d, 0, []), _core.Footer, _core.ColumnMetadata):
            try:
                call(bytes(changed))
            except FormatError:
                pass


def test_lists() -> None:
    for n in (0, 1, 14, 15, 16, 200):
        data = b"x" + encode(Value(LIST, [Value(BINARY, b"ab"[: i % 3]) for i in range(n)], BINARY)) + b"y"
        kind, elements, end = _core.thrift_list(data, 1)
        assert (kind, len(elements), end) == (BINARY, n, len(data) - 1)
        assert [data[begin + 1 : stop] for begin, stop in elements] == [b"ab"[: i % 3] for i in range(n)]
    with pytest.raises(FormatError):
        _core.thrift_list(b"\xfc\xff\xff\xff\xff\x0f" + bytes(100), 0)
    with pytest.raises(ValueError, match="none at 5"):
        _core.thrift_list(b"abc", 5)


@pytest.mark.parametrize(
    ("edits", "error", "match"),
    [
        ([(2, I32, b"\0"), (1, I32, b"\0")], ValueError, "ascend"),
        ([(1, I32, b"\0"), (1, I32, b"\0")], ValueError, "ascend"),
        ([(0, I32, b"\0")], ValueError, "ascend"),
        ([(-1, I32, b"\0")], ValueError, "ascend"),
        ([(32768, I32, b"\0")], OverflowError, None),
        ([(1, 0, b"\0")], ValueError, "type 0"),
        ([(1, 14, b"\0")], ValueError, "type 14"),
        ([(1, I32, "text")], TypeError, None),
        ([(1, I32)], ValueError, None),
        (None, TypeError, None),
    ],
)
def test_wrong_edits(edits: Any, error: type[Exception], match: str | None) -> None:
    with pytest.raises(error, match=match):
        _core.thrift_splice(b"\x15\x02\x00", 0, edits)
    assert _core.thrift_splice(b"\x15\x02\x00", 0, [(1, 0, None)]) == b"\0"
    for wide in (1 << 63, -(1 << 63) - 1):
        with pytest.raises(OverflowError):
            _core.thrift_splice(b"\0", 0, [(1, I64, wide)])


@pytest.mark.parametrize("value", [0, 1, -1, 63, 64, -64, -65, 1 << 35, (1 << 63) - 1, -(1 << 63)])
def test_a_splice_encodes_integers(value: int) -> None:
    edits = [(1, I64, value), (2, I64, 7), (5, I64, value)]
    encoded = [(number, kind, thrift.integer(one)) for number, kind, one in edits]
    spliced = _core.thrift_splice(b"\0", 0, [*edits])
    assert spliced == _core.thrift_splice(b"\0", 0, [*encoded])
    assert thrift.Struct(spliced).integer(5) == value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x1c" * 1000,
        b"\x19" * 1000,
        b"\x15\x02\x05\x02\x04\x00",  # a field twice: one reader believes the first, another the last
        b"\x25\x02\x05\x02\x04\x00",  # ids that descend
        b"\x05\x00\x02\x00",  # id 0
        b"\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x1b\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x55",
        b"\x1e\x00",
    ],
)
def test_hostile_structs(data: bytes) -> None:
    for call in (_core.thrift_fields, lambda d: _core.thrift_splice(d, 0, []), _core.Footer, _core.ColumnMetadata):
        with pytest.raises(FormatError):
            call(data)


# ---------------------------------------------------------------- files


@dataclass
class File:
    data: bytes
    footer: bytes = field(init=False)

    def __post_init__(self) -> None:
        assert self.data[-4:] == b"PAR1"
        self.footer = self.data[-8 - int.from_bytes(self.data[-8:-4], "little") : -8]

    def chunks(self) -> Iterator[tuple[int, _core.ColumnMetadata, memoryview]]:
        """The chunks that have pages: number, metadata, and the file from their first page on."""
        footer = _core.Footer(self.footer)
        for number in range(footer.chunks):
            metadata = _core.ColumnMetadata(self.footer, footer.chunk(number).metadata)
            if metadata.compressed_nbytes > 0:
                begin = min(x for x in (metadata.data_page, metadata.dictionary_page) if x > 0)
                yield number, metadata, memoryview(self.data)[begin : len(self.data) - 8 - len(self.footer)]


TABLE = pa.table(
    {
        "number": pa.array(range(3000)),
        "text": [None if i % 7 == 0 else f"value {i % 50}" for i in range(3000)],
        "list": [[i, i + 1] if i % 3 else None for i in range(3000)],
        "double": [i / 3 for i in range(3000)],
        "a.b": [{"c": i, "d": None if i % 2 else "x"} for i in range(3000)],
    }
)


@pytest.fixture(scope="module")
def made() -> list[File]:
    """Files that pyarrow writes: both page versions, dictionaries, checksums, indexes, several row groups, nothing."""
    options: list[dict[str, Any]] = [
        {"compression": "none", "use_dictionary": False, "write_page_checksum": True},
        {"compression": "snappy", "row_group_size": 700, "write_page_index": True, "write_page_checksum": True},
        {"compression": "zstd", "data_page_version": "2.0", "write_page_checksum": True, "row_group_size": 1000},
        {"compression": "none", "data_page_version": "2.0", "use_dictionary": False, "write_page_index": True},
        {"sorting_columns": [pq.SortingColumn(0)], "store_schema": False},
    ]
    files = []
    for option in options:
        target = io.BytesIO()
        pq.write_table(TABLE, target, data_page_size=1000, write_batch_size=50, **option)
        files.append(File(target.getvalue()))
    target = io.BytesIO()
    pq.write_table(TABLE.slice(0, 0), target)
    return [*files, File(target.getvalue())]


def run(page_run: _core.PageRun, data: Any, room: int) -> bytes:
    """All of it in one go."""
    out = bytearray(room)
    page_run.feed(data, True, out)
    _core.run_pages([page_run], 1)
    assert page_run.stop == _core.DONE
    return bytes(out[: page_run.produced])


def modules(key: bytes = b"k" * 16, column: int = 0, **options: Any) -> _core.Modules:
    return _core.Modules(_core.Key(key), b"prefix" + bytes(8), 0, column, label="column", **options)


def check_identity(file: File) -> int:
    """The footer and all pages, as they are and after they were sealed and opened; returns how many pages."""
    footer = _core.Footer(file.footer)
    assert footer.end == len(file.footer)
    assert footer.plain({}) == file.footer
    assert _core.thrift_splice(file.footer, 0, []) == file.footer
    assert len(leaf_paths(footer.schema())) * len(footer.groups()) == footer.chunks
    pages = 0
    for number, metadata, data in file.chunks():
        checked = _core.PageRun(None, None, _core.CHECK, metadata.compressed_nbytes, metadata.num_values, table=True)
        run(checked, data, 0)
        assert checked.values == metadata.num_values
        table = checked.table()
        starts = [offset for offset, *_ in table]
        if checked.counts["dictionary_pages"]:
            starts.insert(0, 0)
        pages += len(starts)
        for start in starts:
            _, end = _core.thrift_fields(data, start)
            assert _core.thrift_splice(data, start, []) == data[start:end]
        if checked.pages > _core.ORDINAL_MAX + 1:
            continue
        for ctr in (False, True):
            seal = _core.PageRun(
                None, modules(column=number, ctr=ctr), _core.COPY, metadata.compressed_nbytes, metadata.num_values
            )
            sealed = run(seal, data, 2 * checked.in_total + 100 * len(starts) + 200)
            opened = _core.PageRun(modules(column=number, ctr=ctr), None, _core.COPY, len(sealed), 0)
            assert run(opened, sealed, len(sealed) + 200) == data[: checked.in_total]
    return pages


def test_identity_of_made_files(made: list[File]) -> None:
    assert sum(map(check_identity, made)) >= 400


def test_identity_of_parquet_testing(shared_data: Path) -> None:
    """Every footer and page header that other writers have left there."""
    folder = shared_data / "parquet-testing" / "data"
    if not folder.is_dir():
        pytest.skip("no parquet-testing here")
    files = sorted(folder.rglob("*.parquet"))
    assert len(files) == 75
    assert sum(check_identity(File(path.read_bytes())) for path in files) >= 53_181


def test_view_and_same_size(made: list[File]) -> None:
    """A view is the plaintext, page by page, in the sealed file's places; sealed again, nothing moves."""
    for file in made:
        for number, metadata, data in file.chunks():
            seal = _core.PageRun(
                None, modules(column=number), _core.COPY, metadata.compressed_nbytes, metadata.num_values
            )
            sealed = run(seal, data, 3 * metadata.compressed_nbytes + 5000)
            view = run(
                _core.PageRun(modules(column=number), None, _core.VIEW, len(sealed), 0), sealed, len(sealed) + 200
            )
            assert len(view) == len(sealed)
            check = _core.PageRun(None, None, _core.CHECK, len(view), metadata.num_values, keep_checksum=False)
            run(check, view, 0)
            assert (check.values, check.pages) == (metadata.num_values, seal.pages)
            again = _core.PageRun(modules(column=number), modules(b"2" * 32, 7), _core.SAME_SIZE, len(sealed), 0)
            resealed = run(again, sealed, len(sealed) + 200)
            assert len(resealed) == len(sealed)
            back = _core.PageRun(modules(b"2" * 32, 7), None, _core.COPY, len(resealed), 0)
            opened = run(back, resealed, len(sealed) + 200)
            if not again.counts["dropped_checksums"]:
                assert opened == data[: seal.in_total]


def test_chunks_in_parallel(made: list[File]) -> None:
    """Many chunks by many threads are what they are one by one; the first failure is raised, and no output is left."""
    jobs = []
    for file in made:
        for number, metadata, data in file.chunks():
            for _ in range(8):
                seal = _core.PageRun(
                    None, modules(os.urandom(16), number), _core.COPY, metadata.compressed_nbytes, metadata.num_values
                )
                out = bytearray(3 * metadata.compressed_nbytes + 5000)
                seal.feed(data, True, out)
                jobs.append((seal, out, data))
    _core.run_pages([job[0] for job in jobs], 4)
    opens = []
    for seal, out, data in jobs:
        assert seal.stop == _core.DONE
        back = _core.PageRun(seal.target, None, _core.COPY, seal.produced, 0)
        target = bytearray(seal.produced + 200)
        back.feed(out[: seal.produced], True, target)
        opens.append((back, target, data[: seal.in_total]))
    _core.run_pages([back for back, *_ in opens], 4)
    assert all(target[: back.produced] == plain for back, target, plain in opens)
    damaged = [
        (_core.PageRun(seal.target, None, _core.COPY, seal.produced, 0), bytearray(out)) for seal, out, _ in jobs
    ]
    for i in (10, 20):
        damaged[i][1][50] ^= 1
    targets = []
    for (back, data), (seal, *_) in zip(damaged, jobs, strict=True):  # type: ignore[assignment]
        targets.append(bytearray(seal.produced + 200))
        back.feed(data[: seal.produced], True, targets[-1])
    with pytest.raises(IntegrityError) as raised:
        _core.run_pages([back for back, _ in damaged], 4)
    assert raised.value.module in ("data page header", "dictionary page header")
    assert not any(any(target) for target in targets)


# ---------------------------------------------------------------- page by page


@dataclass
class Page:
    """A V1 page as the tests make it."""

    body: bytes = b"body"
    crc: int | None = None
    more: dict[int, Value] = field(default_factory=dict)

    def encode(self) -> bytes:
        fields = {
            1: Value(I32, 0),
            2: Value(I32, len(self.body)),
            3: Value(I32, len(self.body)),
            5: Value(STRUCT, {1: Value(I32, 1), 2: Value(I32, 0), 3: Value(I32, 3), 4: Value(I32, 3)}),
        }
        if self.crc is not None:
            fields[4] = Value(I32, self.crc)
        return encode(Value(STRUCT, fields | self.more)) + self.body


def test_32768_pages_and_no_more() -> None:
    """The last ordinal is 32767: one page more is refused, also by a LIST, before anything is written."""
    page = Page(b"").encode()
    for pages in (32768, 32769):
        data = page * pages
        for mode in (_core.LIST, _core.COPY):
            out = bytearray(pages * 90) if mode == _core.COPY else None
            seal = _core.PageRun(None, modules(), mode, len(data), pages, label="column")
            seal.feed(data, True, out)
            if pages == 32768:
                _core.run_pages([seal], 1)
                assert (seal.stop, seal.pages) == (_core.DONE, pages)
                if out is not None:
                    back = _core.PageRun(modules(), None, _core.COPY, seal.produced, 0)
                    assert run(back, out[: seal.produced], len(data) + 200) == data
            else:
                with pytest.raises(FormatError, match="more than 32768 data pages"):
                    _core.run_pages([seal], 1)
                assert out is None or not any(out)


def test_ordinals_of_columns_and_row_groups() -> None:
    key = _core.Key(bytes(range(16)))
    _core.Modules(key, b"", 32767, 32767)
    for row_group, column in ((32768, 0), (0, 32768), (-1, 0), (0, -1)):
        with pytest.raises(FormatError, match="up to 32767"):
            _core.Modules(key, b"", row_group, column)


def test_step_by_step() -> None:
    """However little input and room is handed out, the bytes are the same."""
    data = b"".join(Page(os.urandom(n), more={40: Value(BINARY, b"unknown" * n)}).encode() for n in (0, 1, 50, 300))
    sealed = run(_core.PageRun(None, modules(), _core.COPY, len(data), 4), data, len(data) + 500)
    for step in (1, 3, 64):
        back = _core.PageRun(modules(), None, _core.COPY, len(sealed), 0)
        out, at, have, room = b"", 0, 0, 0
        while back.stop != _core.DONE:
            buffer = bytearray(room)
            back.feed(sealed[at:have], have == len(sealed), buffer)
            _core.run_pages([back], 1)
            at += back.consumed
            out += buffer[: back.produced]
            if back.stop == _core.MORE_INPUT:
                assert back.wanted > have - at
                have = min(len(sealed), have + step)
            elif back.stop == _core.MORE_OUTPUT:
                assert back.wanted > room - back.produced
                room += step
        assert out == data


def test_failures_name_their_place_and_leave_zeros() -> None:
    pages = [Page(bytes([i]) * 60).encode() for i in range(4)]
    data = b"".join(pages)
    sealed = run(_core.PageRun(None, modules(), _core.COPY, len(data), 4), data, len(data) + 500)
    at = len(sealed) // 2  # the third page's header begins here: all are of one size
    for offset, module in ((at + 20, "data page header"), (at + len(sealed) // 4 - 5, "data page")):
        for key in (b"k" * 16, b"?" * 16):
            bad = bytearray(sealed)
            bad[offset] ^= 1
            out = bytearray(b"?" * (len(data) + 200))
            back = _core.PageRun(modules(key), None, _core.COPY, len(sealed), 0)
            back.feed(bad, True, out)
            with pytest.raises(IntegrityError) as raised:
                _core.run_pages([back], 1)
            wrong_key = key != b"k" * 16
            place = ("data page header", 0) if wrong_key else (module, 2)
            assert (raised.value.module, raised.value.page) == place
            assert (raised.value.row_group, raised.value.column) == (0, "column")
            assert not any(out)
    with pytest.raises(IntegrityError) as raised:
        run(_core.PageRun(modules(b"?" * 16), None, _core.COPY, len(sealed), 0, dictionary=True), sealed, 1000)
    assert raised.value.module == "dictionary page header"


def test_checksums() -> None:
    """A wrong CRC stays wrong, by as much, unless it is asked for; a right one is that of what is stored."""
    wrong = Page(b"some bytes", crc=12345).encode()
    sealed = run(_core.PageRun(None, modules(), _core.COPY, len(wrong), 1), wrong, 500)
    back = _core.PageRun(modules(), None, _core.COPY, len(sealed), 0)
    assert run(back, sealed, 500) == wrong
    assert back.counts["wrong_checksums"] == back.counts["checksums"] == 1
    for source, data in ((None, wrong), (modules(), sealed)):
        with pytest.raises(IntegrityError, match="CRC") as raised:
            run(_core.PageRun(source, None, _core.CHECK, len(data), 1, keep_checksum=False), data, 500)
        assert raised.value.module == "data page"


@pytest.mark.parametrize(
    "more",
    [
        {3: Value(I64, 4)},
        {3: Value(I32, -1)},
        {3: Value(I32, 5)},
        {2: Value(I32, -1)},
        {1: Value(I32, 1)},
        {1: Value(I32, 3)},
        {1: Value(I32, 4)},
        {5: Value(STRUCT, {})},
        {5: Value(STRUCT, {1: Value(I32, -1)})},
        {7: Value(STRUCT, {1: Value(I32, 1)})},
        {8: Value(STRUCT, {1: Value(I32, 1)})},
    ],
)
def test_hostile_pages(more: dict[int, Value]) -> None:
    page = Page(more=more).encode()
    for mode, target in ((_core.CHECK, None), (_core.COPY, modules())):
        with pytest.raises(FormatError):
            run(_core.PageRun(None, target, mode, len(page), 1), page, 500)


@pytest.mark.parametrize("levels", [5, 100, 2**31 - 1, -1])
def test_levels_larger_than_their_page(levels: int) -> None:
    """Of a V2 page that was sealed with such a header, too: its writer had the key."""
    inner = Value(STRUCT, {1: Value(I32, 1), 4: Value(I32, 0), 5: Value(I32, levels), 6: Value(I32, 0)})
    plain = {1: Value(I32, 3), 2: Value(I32, 4), 8: inner}
    page = encode(Value(STRUCT, plain | {3: Value(I32, 4)})) + b"body"
    with pytest.raises(FormatError):
        run(_core.PageRun(None, modules(), _core.COPY, len(page), 1, v2_layout=2), page, 500)
    header = encode(Value(STRUCT, plain | {3: Value(I32, 36)}))
    key = modules().key
    prefix = b"prefix" + bytes(8)

    def sealed(module: int, data: bytes) -> bytes:
        frame = key.seal(bytes([module] * 12), data, prefix + bytes([module]) + bytes(6))
        return struct.pack("<I", len(frame) + 12) + bytes([module] * 12) + frame

    data = sealed(4, header) + sealed(2, b"body")
    for layout in (0, 1, 2):
        for target in (None, modules()):
            with pytest.raises(FormatError):
                run(_core.PageRun(modules(), target, _core.COPY, len(data), 0, v2_layout=layout), data, 500)


def test_key_limit() -> None:
    key = _core.Key(os.urandom(16))
    key.carry(2**32 - 3)
    data = Page().encode() * 2
    out = bytearray(500)
    seal = _core.PageRun(None, _core.Modules(key, b"", 0, 0), _core.COPY, len(data), 2)
    seal.feed(data, True, out)
    with pytest.raises(KeyLimitError):
        _core.run_pages([seal], 1)
    assert not any(out)


# ---------------------------------------------------------------- footers and indexes


def test_footers_lose_what_encryption_put_there(made: list[File]) -> None:
    """crypto_metadata and encrypted_column_metadata go, meta_data comes back: the footer is as it was."""
    crypto = encode(Value(STRUCT, {1: Value(STRUCT, {})}))
    for file in made:
        footer = _core.Footer(file.footer)
        fields, _ = _core.thrift_fields(file.footer)
        opened, groups = {}, []
        number = 0
        for begin, _end, _first, _count in footer.groups():
            group, _ = _core.thrift_fields(file.footer, begin)
            _, columns, _ = _core.thrift_list(file.footer, group[1][1])
            sealed = []
            for start, _stop in columns:
                chunk = footer.chunk(number)
                metadata = _core.ColumnMetadata(file.footer, chunk.metadata)
                edits: list[tuple[int, int, bytes | int | None]] = [(8, STRUCT, crypto)]
                if number % 2:
                    opened[number] = file.footer[metadata.begin : metadata.end]
                    edits = [(3, 0, None), (8, STRUCT, crypto), (9, BINARY, b"\x03abc")]
                sealed.append(_core.thrift_splice(file.footer, start, edits))
                number += 1
            head = bytes([len(sealed) << 4 | STRUCT]) if len(sealed) < 15 else b"\xfc" + varint(len(sealed))
            groups.append(_core.thrift_splice(file.footer, begin, [(1, LIST, head + b"".join(sealed))]))
        head = bytes([len(groups) << 4 | STRUCT]) if len(groups) < 15 else b"\xfc" + varint(len(groups))
        encrypted = _core.Footer(_core.thrift_splice(file.footer, 0, [(4, LIST, head + b"".join(groups))]))
        assert 4 in fields
        assert encrypted.encrypted() == footer.chunks
        assert encrypted.plain(opened) == file.footer
        if footer.chunks:
            with pytest.raises(IndexError):
                encrypted.plain({footer.chunks: b"\0"})
            with pytest.raises(TypeError):
                encrypted.plain({0: None})  # type: ignore[dict-item]


def schema(*elements: tuple[str, int]) -> bytes:
    leaves = [
        Value(STRUCT, {4: Value(BINARY, name.encode())} | ({5: Value(I32, children)} if children else {}))
        for name, children in elements
    ]
    return encode(Value(STRUCT, {2: Value(LIST, leaves, STRUCT)}))


def test_leaves() -> None:
    data = schema(("root", 3), ("a", 0), ("b", 2), ("c", 0), ("d", 1), ("e.f", 0), ("g", 0))
    assert leaf_paths(_core.Footer(data).schema()) == [("a",), ("b", "c"), ("b", "d", "e.f"), ("g",)]
    assert leaf_paths(_core.Footer(schema(("root", 0))).schema()) == []
    assert [_core.Footer(one).columns for one in (data, schema(("root", 0)), schema(("root", 1), ("a", 0)))] == [
        4,
        0,
        1,
    ]
    for elements in (
        [("root", 2), ("a", 0)],
        [("root", 1), ("a", 0), ("b", 0)],
        [("root", 1), *[(f"{i}", 1) for i in range(70)], ("leaf", 0)],
        [("root", 2**31 - 2), ("a", 0)],
        [("root", 32769), *[("a", 0)] * 32769],
    ):
        with pytest.raises(FormatError):
            leaf_paths(_core.Footer(schema(*elements)).schema())


@pytest.mark.parametrize(
    ("crypto", "said"),
    [
        (None, (False, False, None)),
        ({1: Value(STRUCT, {})}, (True, False, None)),
        ({2: Value(STRUCT, {1: Value(LIST, [], BINARY)})}, (False, True, None)),
        ({2: Value(STRUCT, {2: Value(BINARY, b"m")})}, (False, True, b"m")),
        ({2: Value(STRUCT, {2: Value(BINARY, b"")})}, (False, True, None)),
        ({1: Value(STRUCT, {}), 2: Value(STRUCT, {2: Value(BINARY, b"m")})}, (True, True, b"m")),
        ({2: Value(I32, 7)}, (False, False, None)),
        ({2: Value(STRUCT, {2: Value(I32, 7)})}, (False, True, None)),
        ({3: Value(STRUCT, {2: Value(BINARY, b"m")})}, (False, False, None)),
    ],
)
def test_what_crypto_metadata_say(crypto: dict[int, Value] | None, said: tuple[bool, bool, bytes | None]) -> None:
    fields = {2: Value(I64, 0), 3: Value(STRUCT, {5: Value(I64, 3), 7: Value(I64, 90), 9: Value(I64, 4)})}
    chunk = Value(STRUCT, fields | ({} if crypto is None else {8: Value(STRUCT, crypto)}))
    group = Value(STRUCT, {1: Value(LIST, [chunk], STRUCT)})
    leaves = [Value(STRUCT, {4: Value(BINARY, b"root"), 5: Value(I32, 1)}), Value(STRUCT, {4: Value(BINARY, b"a")})]
    file = {2: Value(LIST, leaves, STRUCT), 3: Value(I64, 3), 4: Value(LIST, [group], STRUCT)}
    for signed in (False, True):
        more = {8: Value(STRUCT, {1: Value(STRUCT, {})})} if signed else {}
        footer = _core.Footer(encode(Value(STRUCT, file | more)))
        assert (footer.rows, footer.signed) == (3, signed)
        one = _core.Chunk(footer, 0, 5, 6, 0, ("a",), "a")
        assert (one.raw.footer_key, one.raw.column_key, one.raw.key_metadata) == said
        assert bool(one.raw.crypto) == (crypto is not None)
        assert (one.numbers().num_values, one.numbers().compressed_nbytes, one.begin(), one.whole) == (3, 90, 4, True)


def test_footers_are_cut_and_changed(made: list[File]) -> None:
    """FormatError or another footer, never anything else."""
    for file in (made[1], made[5]):
        for cut in range(0, len(file.footer), 7):
            with pytest.raises(FormatError):
                _core.Footer(file.footer[:cut])
        for at in range(len(file.footer)):
            changed = bytearray(file.footer)
            changed[at] ^= 0x11
            try:
                footer = _core.Footer(bytes(changed))
                leaf_paths(footer.schema())
                for number in range(footer.chunks):
                    chunk = _core.Chunk(footer, number, 0, 0, 0, ("a",), "a")
                    assert _core.ColumnMetadata(footer.data, chunk.raw.metadata).end <= footer.end
                footer.plain({})
            except FormatError:
                pass
    with pytest.raises(FormatError, match="32768"):
        _core.Footer(schema(("root", 0))[:-1] + b"\x29\xfc" + varint(32769) + bytes(40000))


def test_offset_indexes() -> None:
    locations = [
        Value(STRUCT, {1: Value(I64, 1000 + 60 * i), 2: Value(I32, 60), 3: Value(I64, i), 9: Value(BINARY, b"unknown")})
        for i in range(20)
    ]
    index = encode(Value(STRUCT, {1: Value(LIST, locations, STRUCT), 2: Value(LIST, [Value(I64, 1)] * 20, I64)}))
    assert _core.offset_index(index, 1000, 1000) == index
    moved = [replace(x, value=x.value | {1: Value(I64, x.value[1].value + 2**40)}) for x in locations]
    expected = encode(Value(STRUCT, {1: Value(LIST, moved, STRUCT), 2: Value(LIST, [Value(I64, 1)] * 20, I64)}))
    assert _core.offset_index(index, 1000, 1000 + 2**40) == expected
    with pytest.raises(FormatError):
        _core.offset_index(index, 1001, 0)
    with pytest.raises(FormatError):
        _core.offset_index(index, 0, 2**63 - 1)
    with pytest.raises(FormatError):
        _core.PageRun(None, None, _core.LIST, 0, 0, table=True).offset_index(index, 1000, 0)
    for cut in range(len(index)):
        with pytest.raises(FormatError):
            _core.offset_index(index[:cut], 1000, 0)


# ---------------------------------------------------------------- callers


def test_modes_and_their_sides() -> None:
    gcm, ctr = modules(), modules(ctr=True)
    for source, target, mode, options in (
        (None, None, _core.COPY, {}),
        (gcm, None, _core.SAME_SIZE, {}),
        (gcm, ctr, _core.SAME_SIZE, {}),
        (gcm, gcm, _core.SAME_SIZE, {"short_sizes": True}),
        (gcm, gcm, _core.VIEW, {}),
        (None, None, _core.VIEW, {}),
        (None, None, 5, {}),
        (None, None, -1, {}),
    ):
        with pytest.raises(ValueError, match=r"pages are copied|frames keep their size|a view is of|there is no mode"):
            _core.PageRun(source, target, mode, 0, 0, **options)


def test_runs_are_run_once_at_a_time() -> None:
    data = Page().encode()
    check = _core.PageRun(None, None, _core.CHECK, len(data), 1)
    check.feed(data, True)
    with pytest.raises(ValueError, match="once"):
        _core.run_pages([check, check], 2)
    with pytest.raises(ValueError, match="once"):
        _core.run_pages([check, None], 2)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        _core.run_pages([1], 2)  # type: ignore[list-item]
    _core.run_pages([check], 1)
    assert check.stop == _core.DONE
    _core.run_pages([], 1)


def test_buffers() -> None:
    buffer = bytearray(1000)
    seal = _core.PageRun(None, modules(), _core.COPY, 10, 1)
    with pytest.raises(BufferError, match="overlap"):
        seal.feed(memoryview(buffer)[:600], True, memoryview(buffer)[500:])
    with pytest.raises(TypeError, match="writable"):
        seal.feed(buffer, True, bytes(10))
    with pytest.raises(BufferError, match="contiguous"):
        seal.feed(memoryview(buffer)[::2], True, bytearray(10))


def test_threads_share_keys(made: list[File]) -> None:
    """Calls from several threads at once, with the same key and other runs."""
    key = modules(b"s" * 32)
    chunks = [(metadata, bytes(data)) for _, metadata, data in made[0].chunks()]
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for metadata, data in chunks:
                seal = _core.PageRun(None, key, _core.COPY, metadata.compressed_nbytes, metadata.num_values)
                sealed = run(seal, data, 3 * metadata.compressed_nbytes + 5000)
                back = _core.PageRun(key, None, _core.COPY, len(sealed), 0)
                assert run(back, sealed, len(sealed) + 200) == data[: seal.in_total]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_modules() -> None:
    key = _core.Key(b"k" * 16)
    aad = b"prefix" + bytes(range(8))
    for module, name in enumerate(_core.MODULES):
        place = _core.Modules(key, aad, None if module == 0 else 258, None if module == 0 else 3, label="a.b")
        frame = place.seal(module, b"data")
        suffix = (
            bytes([module]) + (b"" if module == 0 else b"\x02\x01\x03\x00") + (b"\0\0" if module in (2, 4) else b"")
        )
        assert frame[:4] == struct.pack("<I", 32)
        assert key.open(frame[4:16], frame[16:], aad + suffix) == b"data"
        assert place.open(module, frame + b"behind") == (b"data", 36)
        for bad in (frame[:-1], b"", b"\0" * 40, b"\xff" * 40):
            with pytest.raises(FormatError, match=name):
                place.open(module, bad)
        for at in range(4, 36):
            bad = bytearray(frame)  # type: ignore[assignment]
            bad[at] ^= 1  # type: ignore[index]
            with pytest.raises(IntegrityError) as raised:
                place.open(module, bad)
            assert (raised.value.module, raised.value.page) == (name, None)
    bare = _core.Modules(key, None, 0, 0)
    frame = bare.seal(2, b"")
    assert key.open(frame[4:16], frame[16:], b"") == b""
    for call in (bare.seal, bare.open):
        with pytest.raises(ValueError, match="type 10"):
            call(10, frame)


def test_no_keys_in_texts_and_no_leaks() -> None:
    secret = b"\x01\x02secretsecret\x03\x04"
    place = modules(secret)
    assert "secret" not in repr(place)
    for thing in (place, _core.PageRun(place, None, _core.CHECK, 0, 0)):
        with pytest.raises(TypeError):
            thing.__reduce__()
    gc.collect()
