"""How many row groups, columns and pages ordinals can count, and how large a page may be."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

import parquet_files as files
import parquet_peers as peers
import pme_reference as ref
import pytest
from parquet_files import (
    KF,
    UNIFORM,
    Mode,
    data_of,
    key,
    refused,
    seal,
    unseal,
)
from support import Target, run_python

from ags_fast import FormatError, parquet
from ags_fast.parquet import Keys

if TYPE_CHECKING:
    from pathlib import Path

pa, pq = peers.pa, peers.pq


def tiny_pages(count: int) -> bytes:
    """A column in so many data pages of one row each."""
    header = ref.Struct([[1, ref.I32, 0], [2, ref.I32, 4], [3, ref.I32, 4]])
    header.set(5, ref.STRUCT, ref.Struct([[1, ref.I32, 1], [2, ref.I32, 0], [3, ref.I32, 3], [4, ref.I32, 3]]))
    page = ref.serialise(header) + b"\1\0\0\0"
    data = page * count
    table = pa.table({"a": pa.array([1], pa.int32())}).cast(pa.schema([pa.field("a", pa.int32(), nullable=False)]))
    sink = io.BytesIO()
    pq.write_table(table, sink, use_dictionary=False, compression="none", store_schema=False, write_statistics=False)
    footer = ref.ParquetFile(sink.getvalue()).footer
    footer.set(3, ref.I64, count)
    [group] = footer[4].items
    meta = group[1].items[0][3]
    for number, value in ((5, count), (6, len(data)), (7, len(data)), (9, 4)):
        meta.set(number, ref.I64, value)
    meta.remove(13, 16)
    group.set(2, ref.I64, len(data))
    group.set(3, ref.I64, count)
    group.set(6, ref.I64, len(data))
    tail = ref.serialise(footer)
    return b"PAR1" + data + tail + len(tail).to_bytes(4, "little") + b"PAR1"


def test_pages_that_ordinals_can_count(tmp_path: Path) -> None:
    most, beyond = tiny_pages(32768), tiny_pages(32769)
    assert pq.read_table(pa.BufferReader(most)).num_rows == 32768
    for threads in (1, 2):
        sealed = seal(most, UNIFORM, [("a",)], threads=threads)
        assert data_of(unseal(sealed, UNIFORM, [("a",)], threads=threads)) == data_of(most)
    decryption = peers.pe.create_decryption_properties(UNIFORM.footer)
    table = pq.ParquetFile(pa.BufferReader(sealed), decryption_properties=decryption).read()
    assert table.column(0).to_pylist() == [1] * 32768

    refused(
        FormatError,
        "column 'a', row group 0: there are more than 32768 data pages",
        parquet.encrypt_file,
        beyond,
        Keys(KF),
    )
    taken = Target()
    with pytest.raises(FormatError, match="more than 32768 data pages"):
        parquet.encrypt_file(beyond, taken, Keys(KF))
    assert not taken.taken  # not a byte was written to what cannot be undone
    with pytest.raises(FormatError, match="more than 32768 data pages"):
        parquet.encrypt_file(beyond, tmp_path / "out", Keys(KF))
    assert os.listdir(tmp_path) == []
    plain = bytearray()
    parquet.encrypt_file(rich_with(beyond), plain, Keys(KF, {"b": key("b")}), other_columns="plain")  # it stays open


def rich_with(tiny: bytes) -> bytes:
    """The file with a second column "b" that is a dictionary-less copy of one page a row group; "a" is as it was."""
    file = ref.ParquetFile(tiny)
    rows = file.footer[3]
    table = pa.table({"b": pa.array([7] * rows, pa.int32())}).cast(
        pa.schema([pa.field("b", pa.int32(), nullable=False)])
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, use_dictionary=False, compression="none", store_schema=False, row_group_size=rows)
    other = ref.ParquetFile(sink.getvalue())
    shift = len(data_of(tiny))
    footer = file.footer
    footer[2].items.append(other.footer[2].items[1])
    footer[2].items[0].set(5, ref.I32, 2)
    footer.remove(7)
    chunk = other.footer[4].items[0][1].items[0]
    chunk[3].set(9, ref.I64, chunk[3][9] + shift)
    footer[4].items[0][1].items.append(chunk)
    tail = ref.serialise(footer)
    data = b"PAR1" + data_of(tiny) + data_of(sink.getvalue())
    return data + tail + len(tail).to_bytes(4, "little") + b"PAR1"


def test_row_groups_that_ordinals_can_count() -> None:
    """Row groups without rows: a footer and nothing else."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, pa.schema([("a", pa.int8())]), store_schema=False):
        pass
    file = ref.ParquetFile(sink.getvalue())
    meta = ref.Struct(
        [
            [1, ref.I32, 1], [2, ref.LIST, ref.List(ref.I32, [0])], [3, ref.LIST, ref.List(ref.BINARY, [b"a"])],
            [4, ref.I32, 0], [5, ref.I64, 0], [6, ref.I64, 0], [7, ref.I64, 0], [9, ref.I64, 0],
        ]
    )  # fmt: skip
    chunk = ref.Struct([[2, ref.I64, 0], [3, ref.STRUCT, meta]])
    group = ref.Struct([[1, ref.LIST, ref.List(ref.STRUCT, [chunk])], [2, ref.I64, 0], [3, ref.I64, 0]])
    file.footer.set(4, ref.LIST, ref.List(ref.STRUCT, [group]))
    one = ref.serialise(group)
    before, after = ref.serialise(file.footer).split(b"\x1c" + one)

    def groups(count: int) -> bytes:
        head = b"\xfc" + bytes([count & 0x7F | 0x80, count >> 7 & 0x7F | 0x80, count >> 14])
        return file.with_footer(before + head + one * count + after)

    mode = Mode(columns="uniform")
    sealed = seal(groups(32768), mode, [("a",)])
    decryption = peers.pe.create_decryption_properties(mode.footer)
    assert pq.read_metadata(pa.BufferReader(sealed), decryption_properties=decryption).num_row_groups == 32768
    back = unseal(sealed, mode, [("a",)])
    last = bytes([0x15 - 0x01, *ref.serialise(ref.Struct([[1, ref.I16, 32767]]))[1:-1]])
    assert last in back[-200:]
    refused(FormatError, "more than 32768 row groups", parquet.encrypt_file, groups(32769), Keys(KF))


def test_more_than_32768_columns_are_refused() -> None:
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, pa.schema([("a", pa.int8())]), store_schema=False):
        pass
    file = ref.ParquetFile(sink.getvalue())
    schema = file.footer[2]
    schema.items += schema.items[1:] * 32768
    schema.items[0].set(5, ref.I32, 32769)
    file.footer.remove(7)
    refused(FormatError, "more than 32768 columns", parquet.encrypt_file, file.with_footer(), Keys(KF))


class Sparse(io.RawIOBase):
    """A file of which most bytes are zeros that nobody keeps."""

    def __init__(self, parts: dict[int, bytes], size: int) -> None:
        self.parts, self.size, self.at = parts, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        nbytes = min(len(view), self.size - self.at)
        if nbytes > 1 << 24:
            raise MemoryError("so much is asked for")
        view[:nbytes] = bytes(nbytes)
        for begin, part in self.parts.items():
            first, last = max(begin, self.at), min(begin + len(part), self.at + nbytes)
            if first < last:
                view[first - self.at : last - self.at] = part[first - begin : last - begin]
        self.at += nbytes
        return nbytes


def test_a_page_near_2_gib_is_refused_before_it_is_read() -> None:
    """Framed, its body would have more than 2^31 - 1 bytes."""
    plain = tiny_pages(1)
    file = ref.ParquetFile(plain)
    for nbytes in ((1 << 31) - 32, (1 << 31) - 1):
        header = ref.parse(data_of(plain))[0]
        header.set(3, ref.I32, nbytes)
        head = ref.serialise(header)
        size = len(head) + nbytes
        meta = file.footer[4].items[0][1].items[0][3]
        meta.set(6, ref.I64, size)
        meta.set(7, ref.I64, size)
        footer = ref.serialise(file.footer)
        tail = footer + len(footer).to_bytes(4, "little") + b"PAR1"
        source = Sparse({0: b"PAR1" + head, 4 + size: tail}, 4 + size + len(tail))
        refused(FormatError, "too large to be sealed", parquet.encrypt_file, source, Keys(KF), threads=1)


def test_a_metadata_file_is_refused(tmp_path: Path) -> None:
    """Its pages are in other files. A path in an ordinary file means nothing: see test_parquet_ignored.py."""
    table = files.rich_table()
    found: list[Any] = []
    pq.write_to_dataset(table, tmp_path, metadata_collector=found, row_group_size=5)
    pq.write_metadata(table.schema, tmp_path / "_metadata", found)
    assert found[0].row_group(0).column(0).file_path
    refused(FormatError, "is a _metadata file", parquet.encrypt_file, str(tmp_path / "_metadata"), Keys(KF))


# ------------------------------------------------------------------------------------------------ hostile footers

FOOTERS = """
import resource, sys
from ags_fast import AgsError, FormatError, parquet

def varint(number):
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])

def lists(count):
    return b"\\x19\\xfc" + varint(count)

def root(children):
    return b"\\x48\\0\\x15" + varint(2 * children) + b"\\0"

def peak():
    with open("/proc/self/status") as file:
        lines = file.read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

kind, nbytes, most = sys.argv[1], int(sys.argv[2]) << 20, int(sys.argv[3])
leaf, group = b"\\x48\\0\\0", b"\\x55\\2\\0"
chain = group * 62 + leaf
wide = b"\\x19\\xfc" + varint(32768) + b"\\x26\\0\\0" * 32768 + b"\\0"
n = nbytes // {"leaves": 3, "groups": 3, "chains": len(chain), "chunks": len(wide), "notes": 3}[kind]
data = b"\\x15\\2" + {
    "leaves": lambda: lists(n + 1) + root(n) + leaf * n,
    "groups": lambda: lists(n + 1) + root(1) + group * n,
    "chains": lambda: lists(63 * n + 1) + root(n) + chain * n,
    "chunks": lambda: lists(32769) + root(32768) + leaf * 32768 + b"\\x16\\0" + lists(n) + wide * n,
    "notes": lambda: lists(2) + root(1) + leaf + b"\\x16\\0" + b"\\x19\\x0c" + lists(n) + b"\\x18\\0\\0" * n,
}[kind]() + b"\\0"
with open(sys.argv[4], "wb") as file:
    file.write(b"PAR1" + data + len(data).to_bytes(4, "little") + b"PAR1")
size = len(data)
del data
try:
    parquet.inspect(b"")  # imports what it needs
except FormatError:
    pass
if most:
    resource.setrlimit(resource.RLIMIT_AS, (most << 20, most << 20))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = peak()
for call in (parquet.inspect, lambda src: parquet.verify(src, parquet.Keys(bytes(range(16))))):
    try:
        call(sys.argv[4])
        print("read")
    except AgsError as error:
        print(type(error).__name__)
print((peak() - before) / size)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="only Linux tells the peak of memory")
@pytest.mark.parametrize("kind", ["leaves", "groups", "chains", "chunks", "notes"])
def test_a_hostile_footer_takes_six_times_its_size_at_most(kind: str, tmp_path: Path) -> None:
    """Of short elements, which take the most memory each: limits hold while they are read."""
    *ends, times = run_python(FOOTERS, kind, "24", "0", str(tmp_path / "f")).split()
    assert float(times) < 6
    # With keys a file in plaintext is refused before its chunks are looked at.
    first = "read" if kind == "notes" else "FormatError"
    assert ends == [first, "PolicyError" if kind in ("notes", "chunks") else "FormatError"]


@pytest.mark.parametrize("kind", ["leaves", "chains", "chunks"])
def test_a_hostile_footer_where_memory_is_short(kind: str, tmp_path: Path) -> None:
    *ends, _ = run_python(FOOTERS, kind, "96", "512", str(tmp_path / "f")).split()
    assert ends == ["FormatError", "PolicyError" if kind == "chunks" else "FormatError"]
