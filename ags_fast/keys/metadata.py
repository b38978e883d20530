"""StandardKeyMetadata: Iceberg's key metadata of one file, byte for byte as Java and Rust write it.

One version byte (1), then an Avro binary record without schema: ``encryption_key`` bytes, ``aad_prefix`` null or bytes,
``file_length`` null or long.
"""

from __future__ import annotations

import hmac
import operator
from typing import TYPE_CHECKING

from ags_fast.ags1 import KeyBytes, bytes_view
from ags_fast.errors import FormatError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["StandardKeyMetadata"]

VERSION = 1
LONG_MAX = (1 << 63) - 1


class StandardKeyMetadata:
    """A file's data key, AAD prefix and trusted length.

    encryption_key: 16, 24 or 32 bytes, **not wrapped**: its encoding is only safe inside something that is encrypted.
    aad_prefix: bytes, or None. file_length: bytes of the encrypted file, or None if the writer did not know.

    Equal to another with the same fields; its repr shows no key; it refuses to be pickled.
    """

    __slots__ = ("aad_prefix", "encryption_key", "file_length")

    def __init__(
        self, encryption_key: Buffer, aad_prefix: Buffer | None = None, file_length: int | None = None
    ) -> None:
        self.encryption_key: bytes = (encryption_key := KeyBytes(bytes_view(encryption_key)))  # no number
        self.aad_prefix = None if aad_prefix is None else bytes(bytes_view(aad_prefix))
        self.file_length = None if file_length is None else operator.index(file_length)
        if len(self.encryption_key) not in (16, 24, 32):
            raise ValueError(f"an AES key has 16, 24 or 32 bytes, this one has {len(self.encryption_key)}")
        if self.file_length is not None and not 0 <= self.file_length <= LONG_MAX:
            raise ValueError(f"file_length must be 0 to 2**63 - 1 bytes, not {file_length}")

    def __repr__(self) -> str:
        bits = 8 * len(self.encryption_key)
        prefix = "None" if self.aad_prefix is None else f"<{len(self.aad_prefix)} bytes>"
        return f"StandardKeyMetadata(<{bits}-bit key>, aad_prefix={prefix}, file_length={self.file_length})"

    def __reduce__(self) -> str:
        raise TypeError(
            "key metadata holds a key and is never pickled: send it wrapped, or its encoding inside what is encrypted"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StandardKeyMetadata):
            return NotImplemented
        return hmac.compare_digest(self.encode(), other.encode())

    __hash__ = None  # type: ignore[assignment]  # a hash would be a fingerprint of the key

    def encode(self) -> bytes:
        """The bytes that Iceberg keeps in ``key_metadata``."""
        encoded = bytes([VERSION]) + _encode_bytes(self.encryption_key)
        encoded += b"\0" if self.aad_prefix is None else b"\2" + _encode_bytes(self.aad_prefix)
        encoded += b"\0" if self.file_length is None else b"\2" + _encode_long(self.file_length)
        return KeyBytes(encoded)

    @classmethod
    def decode(cls, encoded: Buffer) -> StandardKeyMetadata:
        """The inverse of `encode`. Like other readers it ignores what follows the record.

        Raises FormatError if a part is missing or impossible, or the version is another.
        """
        encoded = data = KeyBytes(bytes_view(encoded))
        if not data:
            raise FormatError("key metadata is empty")
        if data[0] != VERSION:
            raise FormatError(f"key metadata has version {data[0]}, known is {VERSION}")
        key, at = _decode_bytes(data, 1)
        aad_prefix = file_length = None
        present, at = _decode_union(data, at)
        if present:
            aad_prefix, at = _decode_bytes(data, at)  # __init__ makes plain bytes of it
        present, at = _decode_union(data, at)
        if present:
            file_length, at = _decode_long(data, at)
        try:
            return cls(key, aad_prefix, file_length)
        except ValueError as error:
            raise FormatError(f"key metadata is impossible: {error}") from None


def _encode_long(value: int) -> bytes:
    zigzag = value << 1  # never negative here
    out = bytearray()
    while zigzag > 0x7F:
        out.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    out.append(zigzag)
    return bytes(out)


def _encode_bytes(value: bytes) -> bytes:
    return _encode_long(len(value)) + value


def _decode_long(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise FormatError("key metadata is cut short")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value >> 1 ^ -(value & 1), at
    raise FormatError("key metadata holds a number of more than 64 bits")


def _decode_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = _decode_long(data, at)
    if not 0 <= size <= len(data) - at:
        raise FormatError("key metadata is cut short")
    return KeyBytes(data[at : at + size]), at + size


def _decode_union(data: bytes, at: int) -> tuple[bool, int]:
    branch, at = _decode_long(data, at)
    if branch not in (0, 1):
        raise FormatError(f"key metadata has no field type {branch}")
    return branch == 1, at
