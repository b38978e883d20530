"""Avro containers of manifests: what the walk in C picks is what fastavro decodes, and malformed ones are refused."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

import fastavro
from hypothesis import given
from hypothesis import strategies as st

from ags_fast.avro.container import encode_header
from ags_fast.errors import FormatError
from ags_fast.iceberg.container import read_container, write_container

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "manifest_entry",
    "fields": [
        {"name": "status", "type": "int", "field-id": 0},
        {"name": "day", "type": ["null", {"type": "int", "logicalType": "date"}], "default": None, "field-id": 1},
        {
            "name": "data_file",
            "field-id": 2,
            "type": {
                "type": "record",
                "name": "r2",
                "fields": [
                    {"name": "path", "type": "string", "field-id": 100},
                    {"name": "flag", "type": "boolean", "field-id": 9},
                    {"name": "uuid", "type": {"type": "fixed", "name": "uuid", "size": 16}, "field-id": 10},
                    {"name": "again", "type": "uuid", "field-id": 11},
                    {"name": "ratio", "type": ["null", "double"], "default": None, "field-id": 12},
                    {
                        "name": "sizes",
                        "field-id": 108,
                        "type": {
                            "type": "array",
                            "items": {
                                "type": "record",
                                "name": "k117_v118",
                                "fields": [
                                    {"name": "key", "type": "int", "field-id": 117},
                                    {"name": "value", "type": "long", "field-id": 118},
                                ],
                            },
                        },
                    },
                    {"name": "names", "type": {"type": "map", "values": "bytes"}, "field-id": 13},
                    {"name": "key_metadata", "type": ["null", "bytes"], "default": None, "field-id": 131},
                    {"name": "row", "type": ["null", "long"], "default": None, "field-id": 142},
                ],
            },
        },
    ],
}
FIELDS = (100, 142, 131, 0, 1)

longs = st.integers(-(1 << 63), (1 << 63) - 1)
records = st.fixed_dictionaries(
    {
        "status": st.integers(-(1 << 31), (1 << 31) - 1),
        "day": st.none() | st.integers(-100, 100),
        "data_file": st.fixed_dictionaries(
            {
                "path": st.text(max_size=20),
                "flag": st.booleans(),
                "uuid": st.binary(min_size=16, max_size=16),
                "again": st.binary(min_size=16, max_size=16),
                "ratio": st.none() | st.floats(allow_nan=False),
                "sizes": st.lists(st.fixed_dictionaries({"key": st.integers(0, 9), "value": longs}), max_size=4),
                "names": st.dictionaries(st.text(max_size=5), st.binary(max_size=5), max_size=3),
                "key_metadata": st.none() | st.binary(max_size=40),
                "row": st.none() | longs,
            }
        ),
    }
)


def wanted(record: dict[str, Any]) -> list[Any]:
    file = record["data_file"]
    return [file["path"].encode(), file["row"], file["key_metadata"], record["status"], record["day"]]


@given(st.lists(records, max_size=5), st.sampled_from(["null", "deflate", "snappy", "zstandard", "bzip2"]))
def test_picks_are_what_fastavro_decodes(written: list[dict[str, Any]], codec: str) -> None:
    data = write_container(SCHEMA, {"content": b"data"}, written, codec)
    container = read_container(data)
    assert list(container.records()) == written
    assert list(container.take(FIELDS, 131)) == [wanted(record) for record in written]
    wiped = [value for _, _, value, _, _ in container.take(FIELDS, 131)]
    assert wiped == [None if (key := wanted(one)[2]) is None else bytes(len(key)) for one in written]
    shown: list[Any] = list(fastavro.reader(io.BytesIO(container.encode(json.dumps(SCHEMA).encode()))))
    assert [one["data_file"]["path"] for one in shown] == [one["data_file"]["path"] for one in written]


@pytest.mark.parametrize("codec", ["null", "deflate", "snappy", "zstandard", "bzip2", "xz"])
def test_codecs(codec: str) -> None:
    pytest.importorskip("cramjam")
    record = {"a": "x" * 1000}
    out = io.BytesIO()
    schema = {"type": "record", "name": "r", "fields": [{"name": "a", "type": "string", "field-id": 1}]}
    fastavro.writer(out, schema, [record] * 3, codec=codec, sync_interval=100)
    assert list(read_container(out.getvalue()).records()) == [record] * 3
    if codec != "xz":
        written = write_container(schema, {}, [record] * 3, codec)
        assert list(fastavro.reader(io.BytesIO(written))) == [record] * 3


def test_cuts_and_flips_are_refused_or_change_values_only() -> None:
    record = {
        "status": 1,
        "day": None,
        "data_file": {
            "path": "p",
            "flag": True,
            "uuid": bytes(16),
            "again": bytes(16),
            "ratio": 1.5,
            "sizes": [{"key": 1, "value": 2}],
            "names": {"a": b"b"},
            "key_metadata": b"key",
            "row": 7,
        },
    }
    data = write_container(SCHEMA, {}, [record] * 2, "null")
    blocks = data.index(b"avro.codec") + 40
    header = len(write_container(SCHEMA, {}, [], "null"))  # without blocks: an empty file
    for cut in {*range(len(data))} - {header}:
        with pytest.raises(FormatError):
            list(read_container(data[:cut]).take(FIELDS, 131))
    for at in range(blocks, len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            try:
                list(read_container(bytes(changed)).take(FIELDS, 131))
            except FormatError:
                pass


@pytest.mark.parametrize(
    "schema",
    [
        b"",
        b"[]",
        b'{"type": "record", "name": "r"}',
        b'{"type": "record", "name": "r", "fields": [{"name": "a", "type": "unheard"}]}',
    ],
)
def test_malformed_schemas(schema: bytes) -> None:
    data = write_container(SCHEMA, {}, [])
    head = data[: data.index(b"avro.schema") + len(b"avro.schema")]
    size = bytearray()
    value = len(schema) << 1
    while value > 0x7F:
        size.append(value & 0x7F | 0x80)
        value >>= 7
    size.append(value)
    rest = data[data.index(b"\x14avro.codec") :]
    with pytest.raises(FormatError):
        list(read_container(head + bytes(size) + schema + rest).take(FIELDS, 131))


def test_a_block_that_decompresses_to_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has no more bytes than Avro for Java takes: a small manifest takes no gigabytes of memory."""
    monkeypatch.setattr("ags_fast.iceberg.container.MAX_BLOCK_NBYTES", 1000)
    schema = {"type": "record", "name": "r", "fields": [{"name": "a", "type": "string", "field-id": 1}]}
    assert list(read_container(write_container(schema, {}, [{"a": "x" * 900}])).records()) == [{"a": "x" * 900}]
    with pytest.raises(FormatError, match="more than 1000 bytes"):
        read_container(write_container(schema, {}, [{"a": "x" * 1001}]))


@pytest.mark.parametrize("kind", ['{"type": "array", "items": ', "["])
def test_schemas_that_are_nested_too_deeply(kind: str) -> None:
    end = "}" if kind != "[" else "]"
    nested = kind * 20_000 + '"int"' + end * 20_000
    text = '{"type": "record", "name": "r", "fields": [{"name": "a", "type": ' + nested + "}]}"
    data = encode_header(text.encode(), bytes(16))
    with pytest.raises(FormatError):
        read_container(data)
