"""HTML and SVG in which text stays text, whoever chose it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from ags_fast._text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Html", "clipped", "el", "grid", "joined", "nbytes", "sheet", "text"]

UNITS = ("bytes", "kB", "MB", "GB", "TB")
LONGEST = 300  # characters of a text that somebody else chose


class Html(str):
    """Markup that needs no escaping, because this module made it."""

    __slots__ = ()


def text(value: object) -> Html:
    """Return `value` as escaped text; what is `Html` already stays as it is."""
    return value if isinstance(value, Html) else Html(escape(printable(str(value))))


def joined(*parts: object) -> Html:
    """Return all parts one after the other, escaped unless they are `Html`. None is left out."""
    return Html("".join(text(part) for part in parts if part is not None))


def el(name: str, *children: object, **attributes: object) -> Html:
    """Return an element. Of its children all but `Html` is escaped. Of all, None is left out.

    An attribute ``class_`` becomes class, and ``aria_label`` aria-label.
    """
    given = (
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{''.join(given)}>{joined(*children)}</{name}>")


def clipped(value: Any, longest: int = LONGEST) -> str:
    """Return a printable text of at most `longest` characters, cut in the middle."""
    shown = printable(str(value))
    if len(shown) <= longest:
        return shown
    return f"{shown[: longest // 2]}…{shown[len(shown) - (longest - 1) // 2 :]}"


def nbytes(number: int) -> str:
    """Return a number of bytes for people, such as 1.2 GB."""
    if number < 10_000:
        return f"{number:,} byte{'s' * (number != 1)}"
    size, power = number / 1000, 1
    while size >= 999.5 and power < len(UNITS) - 1:
        size, power = size / 1000, power + 1
    return f"{size:.3g} {UNITS[power]}" if size < 999.5 else f"{size:,.0f} {UNITS[power]}"


def sheet(caption: str, facts: Iterable[tuple[str, object]]) -> Html:
    """Return a table with a name and a value in each row, for a notebook. Facts that are None are left out."""
    rows = (
        el("tr", el("th", name, scope="row", align="left"), el("td", _cell(value), align="left"))
        for name, value in facts
        if value is not None
    )
    return el("table", el("caption", clipped(caption)), el("tbody", *rows))


def grid(caption: str, heads: Sequence[str], rows: Sequence[Sequence[object]], shown: int = 10) -> Html:
    """Return a table of the first `shown` rows, for a notebook; empty without rows."""
    if not rows:
        return Html()
    more = f"; {len(rows) - shown:,} more are not shown" if len(rows) > shown else ""
    head = el("tr", *(el("th", title, scope="col", align="left") for title in heads))
    body = (el("tr", *(el("td", _cell(cell), align="left") for cell in row)) for row in rows[:shown])
    return el("table", el("caption", clipped(caption) + more), el("thead", head), el("tbody", *body))


def _cell(value: object) -> object:
    return value if isinstance(value, Html) else clipped(value)
