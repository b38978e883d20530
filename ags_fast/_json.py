"""JSON from untrusted places: the memory that parsing takes is bounded before the text is parsed."""

from __future__ import annotations

from ags_fast.errors import FormatError

__all__ = ["MARKS", "check_marks"]

MARKS, MARKS_NBYTES = 1_000_000, 16 << 20  # the most commas, colons and brackets in this many bytes of JSON


def check_marks(data: bytes | str, what: str) -> None:
    """Raise FormatError if a JSON text would take too much memory once it is parsed.

    The marks are an upper bound of the number of values. A value takes up to 100 bytes beside its text.
    """
    count = sum(data.count(mark) if isinstance(data, str) else data.count(mark.encode()) for mark in ",:[{")
    if count > (most := MARKS * -(-len(data) // MARKS_NBYTES)):
        raise FormatError(f"{what} has {count} values in {len(data)} bytes; {most} are the most that are accepted")
