"""StandardKeyMetadata byte for byte, and what `open` does with it."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import KEY, KEYS, OTHER_KEY, open_stream, seal_stream

import ags_fast
from ags_fast import FormatError
from ags_fast.keys import StandardKeyMetadata

if TYPE_CHECKING:
    from pathlib import Path

# As Iceberg's Java and Rust write it, also checked against fastavro: key and prefix, then file_length.
JAVA = bytes.fromhex("0120303132333435363738393031323334350220313233343536373839303132333435 36")
VECTORS = [
    (b"0123456789012345", b"1234567890123456", None, JAVA + b"\0"),
    (b"0123456789012345", b"1234567890123456", 100_000, JAVA + bytes.fromhex("02c09a0c")),
    (b"k" * 16, None, None, b"\1\x20" + b"k" * 16 + b"\0\0"),
    (b"k" * 24, b"", 0, b"\1\x30" + b"k" * 24 + b"\2\0" + b"\2\0"),
    (
        b"k" * 32,
        b"p" * 64,
        (1 << 63) - 1,
        b"\1\x40" + b"k" * 32 + b"\2\x80\1" + b"p" * 64 + b"\2\xfe" + b"\xff" * 8 + b"\1",
    ),
]
SCHEMA = {
    "type": "record",
    "name": "key_metadata",
    "fields": [
        {"name": "encryption_key", "type": "bytes"},
        {"name": "aad_prefix", "type": ["null", "bytes"]},
        {"name": "file_length", "type": ["null", "long"]},
    ],
}


@pytest.mark.parametrize(("key", "prefix", "length", "encoded"), VECTORS)
def test_byte_exact(key: bytes, prefix: bytes | None, length: int | None, encoded: bytes) -> None:
    metadata = StandardKeyMetadata(key, prefix, length)
    assert metadata.encode() == encoded
    for data in (encoded, bytearray(encoded), memoryview(encoded), encoded + b"trailing"):  # Java ignores it, too
        decoded = StandardKeyMetadata.decode(data)
        assert (decoded.encryption_key, decoded.aad_prefix, decoded.file_length) == (key, prefix, length)
        assert decoded == metadata
    for n in range(len(encoded)):
        with pytest.raises(FormatError):
            StandardKeyMetadata.decode(encoded[:n])


@given(
    st.sampled_from(list(KEYS.values())),
    st.none() | st.binary(max_size=300),
    st.none() | st.integers(0, (1 << 63) - 1),
)
def test_fastavro_agrees(key: bytes, prefix: bytes | None, length: int | None) -> None:
    fastavro = pytest.importorskip("fastavro")
    file = io.BytesIO(b"\1")
    file.seek(1)
    record = {"encryption_key": key, "aad_prefix": prefix, "file_length": length}
    fastavro.schemaless_writer(file, SCHEMA, record)
    encoded = StandardKeyMetadata(key, prefix, length).encode()
    assert encoded == file.getvalue()
    assert fastavro.schemaless_reader(io.BytesIO(encoded[1:]), SCHEMA, None) == record
    assert StandardKeyMetadata.decode(file.getvalue()) == StandardKeyMetadata(key, prefix, length)


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda tail: b"\1\x20" + KEY + tail))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        metadata = StandardKeyMetadata.decode(data)
    except FormatError:
        return
    assert StandardKeyMetadata.decode(metadata.encode()) == metadata


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\0" + JAVA[1:] + b"\0",  # versions
        b"\2" + JAVA[1:] + b"\0",
        b"\1\x1f" + b"k" * 16 + b"\0\0",  # negative key size
        b"\1\x1e" + b"k" * 15 + b"\0\0",  # 15 bytes of key
        b"\1\x42" + b"k" * 33 + b"\0\0",
        b"\1\0\0\0",
        b"\1\xff\xff\xff\xff\xff\xff\xff\xff\xff\1",  # key sizes far beyond the end
        b"\1\xfe\xff\xff\xff\xff\xff\xff\xff\xff\1",
        b"\1" + b"\xff" * 20,  # no number ends
        b"\1\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # more than 64 bits
        JAVA[:18] + b"\4" + b"\0\0",  # no such branch of the union
        JAVA[:18] + b"\1" + b"\0\0",
        JAVA[:18] + b"\2\1\0",  # negative prefix size
        JAVA + b"\4",
        JAVA + b"\2\1",  # negative file_length
        b"Obj\1" + bytes(30),  # an Avro container
    ],
)
def test_impossible_encodings(encoded: bytes) -> None:
    with pytest.raises(FormatError):
        StandardKeyMetadata.decode(encoded)


def test_impossible_fields() -> None:
    for size in (0, 8, 15, 17, 33):
        with pytest.raises(ValueError, match="16, 24 or 32"):
            StandardKeyMetadata(bytes(size))
    for length in (-1, 1 << 63):
        with pytest.raises(ValueError, match="file_length"):
            StandardKeyMetadata(KEY, None, length)
    for junk in ("text" * 4, 16, [0] * 16, None):  # bytes(16) would be sixteen zeros: a key that everybody knows
        with pytest.raises(TypeError):
            StandardKeyMetadata(junk)  # type: ignore[arg-type]
    for junk in ("text", 5, [1]):
        with pytest.raises(TypeError):
            StandardKeyMetadata(KEY, junk)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            StandardKeyMetadata.decode(junk)  # type: ignore[arg-type]
    for junk in ("5", 1.5):  # type: ignore[assignment]
        with pytest.raises(TypeError):
            StandardKeyMetadata(KEY, None, junk)  # type: ignore[arg-type]


def test_object_protocol() -> None:
    metadata = StandardKeyMetadata(bytearray(KEY), memoryview(b"prefix"), 77)
    assert (metadata.encryption_key, metadata.aad_prefix) == (KEY, b"prefix")
    assert metadata == StandardKeyMetadata(KEY, b"prefix", 77)
    for other in (
        StandardKeyMetadata(OTHER_KEY, b"prefix", 77),
        StandardKeyMetadata(KEY, None, 77),
        metadata.encode(),
        None,
    ):
        assert metadata != other
    assert repr(metadata) == "StandardKeyMetadata(<128-bit key>, aad_prefix=<6 bytes>, file_length=77)" == str(metadata)
    for function in (pickle.dumps, copy.copy, copy.deepcopy, hash):
        with pytest.raises(TypeError):
            function(metadata)


# ---------------------------------------------------------------- open(key_metadata=...)


def test_open_takes_all_from_key_metadata(tmp_path: Path) -> None:
    path = tmp_path / "file"
    to_write = StandardKeyMetadata(KEY, b"prefix")
    with ags_fast.open(path, "wb", key_metadata=to_write) as writer:
        writer.write(b"some bytes")
    assert open_stream(path.read_bytes(), KEY, b"prefix") == b"some bytes"
    metadata = StandardKeyMetadata(KEY, b"prefix", writer.file_length)
    for given_metadata in (metadata, metadata.encode(), bytearray(metadata.encode())):
        for more in ({}, {"key": KEY}, {"aad_prefix": b"prefix"}, {"length": metadata.file_length}):  # the same is fine
            with ags_fast.open(path, key_metadata=given_metadata, **more) as reader:
                assert reader.read() == b"some bytes"
    with ags_fast.open(path, key_metadata=to_write, length=writer.file_length) as reader:  # its writer did not know
        assert reader.read() == b"some bytes"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ags_fast.IntegrityError):
        ags_fast.open(path, key_metadata=metadata)


def test_open_refuses_contradictions() -> None:
    sealed = seal_stream(b"some bytes", KEY, b"prefix")
    metadata = StandardKeyMetadata(KEY, b"prefix", len(sealed))
    for more in (
        {"key": OTHER_KEY},
        {"key": KEY + KEY},
        {"key": b""},
        {"aad_prefix": b"another"},
        {"length": len(sealed) + 1},
        {"length": None},  # to trust the source is not what the metadata says
    ):
        with pytest.raises(ValueError, match="key_metadata"):
            ags_fast.open(sealed, key_metadata=metadata, **more)
    with pytest.raises(ValueError, match="key_metadata"):
        ags_fast.open(io.BytesIO(), "wb", key_metadata=metadata, key=OTHER_KEY)
    no_prefix = StandardKeyMetadata(KEY, None, len(sealed))
    with pytest.raises(ValueError, match="key_metadata"):  # None is b"" everywhere
        ags_fast.open(sealed, key_metadata=no_prefix, aad_prefix=b"prefix")


def test_open_demands_key_and_length() -> None:
    sealed = seal_stream(b"some bytes")
    for options in ({}, {"length": None}, {"key": KEY}, {"key": None, "length": len(sealed)}):
        with pytest.raises(TypeError, match="required"):
            ags_fast.open(sealed, **options)
    with pytest.raises(TypeError, match="length is required"):
        ags_fast.open(sealed, key_metadata=StandardKeyMetadata(KEY))
    with pytest.raises(TypeError):
        ags_fast.open(io.BytesIO(), "wb")
    with pytest.raises(TypeError, match="length"):
        ags_fast.open(io.BytesIO(), "wb", key=KEY, length=5)
    for junk in ("text", 5, object()):
        with pytest.raises(TypeError):
            ags_fast.open(sealed, key_metadata=junk)  # type: ignore[call-overload]
    with pytest.raises(FormatError):
        ags_fast.open(sealed, key_metadata=b"\2")
    for mode in ("a", "ab", "r+", "r+b", "", None):
        with pytest.raises(ValueError, match="mode"):
            ags_fast.open(sealed, mode, key=KEY, length=len(sealed))  # type: ignore[arg-type]


def test_open_passes_its_arguments_on(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with ags_fast.open(path, "wb", key=KEY, block_size=100, threads=1) as writer:
        writer.write(bytes(250))
        assert writer.block_size == 100
    length = writer.file_length
    with ags_fast.open(path, key=KEY, length=length, block_size=100, threads=1) as reader:
        assert reader.block_size == 100
        assert reader.read() == bytes(250)
    with pytest.raises(FormatError):
        ags_fast.open(path, key=KEY, length=length, block_size=99)
    with pytest.raises(FormatError):
        ags_fast.open(path, key=KEY, length=length, max_block_size=99)
    for options in ({"threads": 0}, {"block_size": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            ags_fast.open(path, "wb", key=KEY, **options)  # type: ignore[call-overload]
