"""JSON from where it may have been made to harm: what parsing takes is bounded before it is parsed."""

from __future__ import annotations

from ags_fast.errors import FormatError

__all__ = ["MARKS", "check_marks", "marks", "marks_taken"]

MARKS, MARKS_NBYTES = 1_000_000, 16 << 20  # commas, colons and brackets in so many bytes of JSON, at most


def marks(data: bytes | str) -> int:
    """No fewer than the values in a JSON text: each takes some 100 bytes at most, beside its own text."""
    if isinstance(data, str):
        return sum(map(data.count, (",", ":", "[", "{")))
    return sum(map(data.count, (b",", b":", b"[", b"{")))


def marks_taken(data: bytes | str) -> int:
    """The most that are taken in a text of this length."""
    return MARKS * -(-len(data) // MARKS_NBYTES)


def check_marks(data: bytes | str, what: str) -> None:
    """FormatError if a JSON text would take too much memory once it is parsed."""
    if (count := marks(data)) > (most := marks_taken(data)):
        raise FormatError(f"{what} has {count} values in {len(data)} bytes, and {most} are the most that are taken")
