"""JSON from untrusted places: the memory that parsing takes is bounded before the text is parsed."""

from __future__ import annotations

from ags_fast.errors import FormatError

__all__ = ["MARKS", "check_marks", "marks", "marks_taken"]

MARKS, MARKS_NBYTES = 1_000_000, 16 << 20  # the most commas, colons and brackets in this many bytes of JSON


def marks(data: bytes | str) -> int:
    """Return an upper bound of the number of values in a JSON text. A value takes up to 100 bytes beside its text."""
    if isinstance(data, str):
        return sum(map(data.count, (",", ":", "[", "{")))
    return sum(map(data.count, (b",", b":", b"[", b"{")))


def marks_taken(data: bytes | str) -> int:
    """Return the largest accepted number of values in a text of this length."""
    return MARKS * -(-len(data) // MARKS_NBYTES)


def check_marks(data: bytes | str, what: str) -> None:
    """Raise FormatError if a JSON text would take too much memory once it is parsed."""
    if (count := marks(data)) > (most := marks_taken(data)):
        raise FormatError(f"{what} has {count} values in {len(data)} bytes; {most} are the most that are accepted")
