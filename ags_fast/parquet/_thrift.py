"""Values of Thrift's compact protocol, for the few that encryption adds to a footer. All else is copied as it is."""

from __future__ import annotations

from ags_fast._core import thrift_fields, thrift_list
from ags_fast.errors import FormatError

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
    "Struct",
    "binary",
    "integer",
    "list_of",
    "struct",
]

TRUE, FALSE, I8, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def integer(value: int) -> bytes:
    """An i16, i32 or i64."""
    return _varint(value << 1 if value >= 0 else (-value << 1) - 1)


def binary(value: bytes) -> bytes:
    return _varint(len(value)) + value


def list_of(kind: int, elements: list[bytes]) -> bytes:
    count = len(elements)
    head = bytes([count << 4 | kind]) if count < 15 else bytes([0xF0 | kind]) + _varint(count)
    return b"".join((head, *elements))


def struct(fields: Iterable[tuple[int, int, bytes | None]]) -> bytes:
    """A struct of (id, type, value), in ascending order, without those whose value is None; a bool's value is b""."""
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
    """The fields of a struct at `begin` in `data`, read when asked for. None: it lacks it, or of another type."""

    __slots__ = ("begin", "data", "end", "fields")

    def __init__(self, data: bytes | memoryview, begin: int = 0) -> None:
        self.data = data
        self.begin = begin
        self.fields, self.end = thrift_fields(data, begin)

    def __contains__(self, number: int) -> bool:
        return number in self.fields

    def integer(self, number: int) -> int | None:
        kind, begin, end = self.fields.get(number, (0, 0, 0))
        if kind not in (I16, I32, I64):
            return None
        value = 0
        for byte in reversed(bytes(self.data[begin:end])):
            value = value << 7 | byte & 0x7F
        return value >> 1 ^ -(value & 1)

    def binary(self, number: int) -> bytes | None:
        kind, begin, end = self.fields.get(number, (0, 0, 0))
        if kind != BINARY:
            return None
        while self.data[begin] >= 0x80:  # the length
            begin += 1
        return bytes(self.data[begin + 1 : end])

    def bool(self, number: int) -> bool | None:
        kind = self.fields.get(number, (0, 0, 0))[0]
        return kind == TRUE if kind in (TRUE, FALSE) else None

    def struct(self, number: int) -> Struct | None:
        kind, begin, _ = self.fields.get(number, (0, 0, 0))
        return Struct(self.data, begin) if kind == STRUCT else None

    def elements(self, number: int) -> list[tuple[int, int]] | None:
        """Where the elements of a list begin and end."""
        kind, begin, _ = self.fields.get(number, (0, 0, 0))
        return thrift_list(self.data, begin)[1] if kind == LIST else None

    def bytes(self, number: int) -> bytes | None:
        """The value as it is encoded."""
        found = self.fields.get(number)
        return None if found is None else bytes(self.data[found[1] : found[2]])

    def strings(self, number: int) -> list[str] | None:
        kind, begin, _ = self.fields.get(number, (0, 0, 0))
        if kind != LIST:
            return None
        element, spans, _ = thrift_list(self.data, begin)
        if element != BINARY:
            raise FormatError("a path in the footer is no list of names: the file is damaged")
        names = []
        for first, end in spans:
            at = first
            while self.data[at] >= 0x80:
                at += 1
            names.append(bytes(self.data[at + 1 : end]).decode("utf-8", "surrogateescape"))
        return names
