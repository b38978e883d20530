"""Results as text for people: fields, tables, dates."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from ags_fast.page.words import count, day, when

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["as_text", "brief", "count", "day", "did_you_mean", "fields", "flat", "table", "when", "wrapped"]

NARROW = 12  # characters that a cell keeps, however narrow the terminal is


def as_text(result: Mapping[str, Any]) -> str:
    """The fields of a flat result, one a line."""
    return "\n".join(fields(result))


def fields(values: Mapping[str, Any]) -> list[str]:
    """A line for each value, after its name."""
    width = max(map(len, values), default=0)
    return [f"{name.replace('_', ' '):<{width}}  {_word(value)}" for name, value in values.items()]


def _word(value: Any) -> str:
    return "yes" if value is True else "no" if value is False else "-" if value is None else str(value)


def brief(text: str) -> str:
    """The first part of a help."""
    return re.split(r"[;.:]\s|[.]$", text, maxsplit=1)[0]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the known one that it resembles, if there is one."""
    from difflib import get_close_matches  # only errors need it

    return next((f": did you mean {near!r}?" for near in get_close_matches(word, [*known], 1)), "")


def flat(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is neither a list nor a dict in a result."""
    return {name: value for name, value in result.items() if not isinstance(value, (list, dict))}


def wrapped(text: str, indent: int) -> list[str]:
    """Lines of at most 110 characters; all but the first are indented."""
    return textwrap.wrap(text, 110, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool], *, fit: bool = False
) -> list[str]:
    """Aligned columns, numbers to the right. fit: cut the widest cells of text in the middle on a narrow terminal."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    if fit and sys.stdout is not None and sys.stdout.isatty():
        _shrink(widths, numbers, shutil.get_terminal_size().columns - 2 * (len(widths) - 1))

    def line(cells: Sequence[str]) -> str:
        fitted = []
        for text, width, number in zip(cells, widths, numbers, strict=True):
            if len(text) > width:
                text = f"{text[: width // 2]}…{text[len(text) - (width - 1) // 2 :]}"
            fitted.append(f"{text:>{width}}" if number else f"{text:<{width}}")
        return "  ".join(fitted).rstrip()

    return [line(heads), *map(line, rows)]


def _shrink(widths: list[int], numbers: Sequence[bool], room: int) -> None:
    """Make columns of text narrower, the widest first, until all fit."""
    while sum(widths) > room:
        widest = max((i for i in range(len(widths)) if not numbers[i]), key=widths.__getitem__)
        if widths[widest] <= NARROW:
            break
        widths[widest] -= 1
