"""Writes what fuzz_parquet.c begins with: python tests/csrc/corpus_parquet.py FOLDER. Needs pyarrow.

Inputs are a recipe of 8 bytes (see the C file) and then footers, indexes and pages that pyarrow wrote, or hostile ones.
The tree's corpus_parquet/ is these and some of what libFuzzer found from them, minimized with its -set_cover_merge=1.
"""

from __future__ import annotations

import io
import struct
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ags_fast import _core

FOOTER, THRIFT, PLAIN, SEALED, INDEX, UNSEALED = range(6)


def seed(target: int, data: bytes, flags: int = 0, a: int = 0, b: int = 0, number: int = 0) -> bytes:
    return struct.pack("<BBBBI", target, flags, a, b, number) + data


def files() -> dict[str, bytes]:
    table = pa.table(
        {
            "i": list(range(40)),
            "s": [None if i % 3 == 0 else f"v{i % 5}" for i in range(40)],
            "l": [[i, i] if i % 2 else None for i in range(40)],
        }
    )
    options = {
        "v1": {"use_dictionary": False, "compression": "none"},
        "v2": {"data_page_version": "2.0", "write_page_checksum": True},
        "dictionary": {"row_group_size": 20, "write_page_index": True, "write_page_checksum": True},
    }
    made = {}
    for name, option in options.items():
        target = io.BytesIO()
        pq.write_table(table, target, data_page_size=64, write_batch_size=8, **option)  # type: ignore[arg-type]
        made[name] = target.getvalue()
    target = io.BytesIO()
    pq.write_table(table.slice(0, 0), target)
    made["empty"] = target.getvalue()
    return made


def seeds() -> dict[str, bytes]:
    made = {}
    for name, data in files().items():
        footer = data[-8 - int.from_bytes(data[-8:-4], "little") : -8]
        made[f"footer-{name}"] = seed(FOOTER, footer, a=5)
        made[f"thrift-{name}"] = seed(THRIFT, footer, a=2, number=0x0312)
        walked = _core.Footer(footer)
        for number in range(walked.chunks):
            chunk = walked.chunk(number)
            columns = _core.ColumnMetadata(footer, chunk.metadata)
            if columns.compressed_nbytes <= 0:
                continue
            begin = min(x for x in (columns.data_page, columns.dictionary_page) if x > 0)
            pages = data[begin : begin + columns.compressed_nbytes]
            if number < 3:
                made[f"plain-{name}-{number}"] = seed(PLAIN, pages, flags=1 | 8, a=4, b=9)
                made[f"sealed-{name}-{number}"] = seed(SEALED, headers(pages), flags=8, a=4, b=12)
            if chunk.offset_index > 0 and number < 2:
                index = data[chunk.offset_index : chunk.offset_index + chunk.offset_index_nbytes]
                made[f"index-{name}-{number}"] = seed(INDEX, index, flags=1, a=0, number=100)
    for name, (target, data) in hostile().items():
        made[f"hostile-{name}"] = seed(target, data, flags=9)
    return made


def headers(pages: bytes) -> bytes:
    """Page headers as fuzz_parquet.c wants them, each with what its body will be when it is sealed."""
    out, at, first = b"", 0, True
    while at < len(pages):
        fields, end = _core.thrift_fields(pages, at)
        begin, stop = fields[3][1:]
        compressed = unzigzag(pages[begin:stop])
        grown = _core.thrift_splice(pages, at, [(3, 5, varint((compressed + 32) * 2)), (4, 0, None)])
        out += bytes([1 if first and 7 in fields else 0, len(grown)]) + grown
        first = False
        at = end + compressed
    return out


def unzigzag(data: bytes) -> int:
    value = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(data))
    return value >> 1 ^ -(value & 1)


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def hostile() -> dict[str, tuple[int, bytes]]:
    page = bytes.fromhex("1500 1564 1564 2c 1514 1500 00 00".replace(" ", ""))
    v2 = bytes.fromhex("1506 1564 1564 5c 1514 3500 15 08 15 00 00 00".replace(" ", ""))
    return {
        "nesting": (THRIFT, b"\x1c" * 100),
        "lists": (THRIFT, b"\x19" * 100),
        "count": (THRIFT, b"\x19\xfc\xff\xff\xff\xff\x0f\x00"),
        "map": (THRIFT, b"\x1b\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x55"),
        "string": (THRIFT, b"\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01a"),
        "varint": (THRIFT, b"\x16" + b"\xff" * 11),
        "twice": (THRIFT, b"\x15\x02\x05\x02\x04\x00"),
        "last-id": (THRIFT, b"\x05\xfe\xff\x03\x02\x15\x02\x00"),
        "schema": (FOOTER, b"\x29\xfc" + varint(60) + b"\x00" * 60 + b"\x00"),
        "groups": (
            FOOTER,
            b"\x29\x1c\x48\x01a\x00\x29\xfc" + varint(60) + b"\x19\x1c\x26\x00\x00\x00" * 10 + b"\x00" * 60,
        ),
        "chunks": (FOOTER, b"\x29\x1c\x48\x01a\x00\x29\x1c\x19\xfc" + varint(300) + b"\x00" * 300),
        "crypto": (FOOTER, b"\x29\x1c\x48\x01a\x00\x29\x1c\x19\x1c\x26\x00\x6c\x1c\x00\x00\x18\x02xy\x00\x00\x00"),
        "locations": (INDEX, b"\x19\x1c\x16\x02\x15\x02\x16\x00\x00\x00"),
        "location-twice": (INDEX, b"\x19\x1c" + b"\x16\x00\x06\x00\x00" * 9 + b"\x15\x02\x00\x00"),
        "location-far": (INDEX, b"\x19\x1c\x16\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01\x15\x02\x00\x00"),
        "levels": (SEALED, bytes([0x44, len(v2)]) + v2),
        "no-body": (SEALED, bytes([2, len(page)]) + page + b"\x00"),
        "cut-body": (SEALED, bytes([2, len(page)]) + page + b"\x05\x2e\x00\x00\x00\x00"),
        "frames": (UNSEALED, b"\xff\xff\xff\xff" * 10),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in seeds().items():
        (folder / name).write_bytes(data)
