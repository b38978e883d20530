"""Thrift's compact protocol, for the few values that encryption adds to a footer. All others are copied as they are."""

from __future__ import annotations

from ags_fast._core import thrift_fields, thrift_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "BINARY",
    "FALSE",
    "I16",
    "I32",
    "I64",
    "LIST",
    "STRUCT",
    "TRUE",
    "Edits",
    "Struct",
    "binary",
    "integer",
    "list_of",
    "struct",
    "varint",
]

Edits = list[tuple[int, int, bytes | int | None]]  # of a struct, as `thrift_splice` takes them: field, type, value

TRUE, FALSE, I8, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)


def varint(value: int) -> bytes:
    """Encode a number that is not negative."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def integer(value: int) -> bytes:
    """Encode an i16, i32 or i64."""
    return varint(value << 1 if value >= 0 else (-value << 1) - 1)


def binary(value: bytes) -> bytes:
    """Encode bytes with their length."""
    return varint(len(value)) + value


def list_of(kind: int, elements: list[bytes]) -> bytes:
    """Encode a list of encoded elements."""
    count = len(elements)
    head = bytes([count << 4 | kind]) if count < 15 else bytes([0xF0 | kind]) + varint(count)
    return b"".join((head, *elements))


def struct(fields: Iterable[tuple[int, int, bytes | None]]) -> bytes:
    """Encode a struct of (id, type, value), in ascending order, without None values; a bool's value is b""."""
    out = bytearray()
    last = 0
    for number, kind, value in fields:
        if value is not None:
            out.append((number - last) << 4 | kind)
            out += value
            last = number
    out.append(0)
    return bytes(out)


class Struct:
    """The fields of the struct at `begin` in `data`. A field that is missing, or has another type, reads as None."""

    __slots__ = ("begin", "data", "end", "fields")

    def __init__(self, data: bytes | memoryview, begin: int = 0) -> None:
        self.data = data
        self.begin = begin
        self.fields, self.end = thrift_fields(data, begin)

    def __contains__(self, number: int) -> bool:
        return number in self.fields

    def integer(self, number: int) -> int | None:
        """Return an i16, i32 or i64."""
        kind, begin, end = self.fields.get(number, (0, 0, 0))
        if kind not in (I16, I32, I64):
            return None
        value = 0
        for byte in reversed(bytes(self.data[begin:end])):
            value = value << 7 | byte & 0x7F
        return value >> 1 ^ -(value & 1)

    def binary(self, number: int) -> bytes | None:
        """Return bytes."""
        kind, begin, end = self.fields.get(number, (0, 0, 0))
        return _binary(self.data, begin, end) if kind == BINARY else None

    def bool(self, number: int) -> bool | None:
        """Return a bool."""
        kind = self.fields.get(number, (0, 0, 0))[0]
        return kind == TRUE if kind in (TRUE, FALSE) else None

    def struct(self, number: int) -> Struct | None:
        """Return a struct."""
        kind, begin, _ = self.fields.get(number, (0, 0, 0))
        return Struct(self.data, begin) if kind == STRUCT else None

    def elements(self, number: int) -> list[tuple[int, int]] | None:
        """Return where the elements of a list begin and end."""
        kind, begin, _ = self.fields.get(number, (0, 0, 0))
        return thrift_list(self.data, begin)[1] if kind == LIST else None

    def binaries(self, number: int) -> list[bytes] | None:
        """Return the elements of a list of bytes."""
        kind, begin, _ = self.fields.get(number, (0, 0, 0))
        if kind != LIST:
            return None
        element, spans, _ = thrift_list(self.data, begin)
        return [_binary(self.data, first, end) for first, end in spans] if element == BINARY else None


def _binary(data: bytes | memoryview, begin: int, end: int) -> bytes:
    while data[begin] >= 0x80:  # the length
        begin += 1
    return bytes(data[begin + 1 : end])
