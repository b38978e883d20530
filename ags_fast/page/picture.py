"""SVG: what opens what, and meters of what is used up."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.markup import Html, clipped, el, joined
from ags_fast.page.graph import Graph

if TYPE_CHECKING:
    from collections.abc import Hashable

HEADS = ("Master keys", "KEKs", "Versions")


class Size(NamedTuple):
    """The measures of a picture, in its own units: those of the screen, where the picture is as wide as planned."""

    width: int
    box: tuple[int, int]  # width and height
    gap: int  # between boxes of a column
    letters: tuple[float, float]  # sizes of name and description
    pad: int


BROAD = Size(900, (238, 42), 11, (12.5, 11.5), 14)
NARROW = Size(330, (98, 42), 9, (10.5, 9.5), 8)


def picture(graph: Graph) -> Html:
    """Return the picture twice: for a screen, and for a phone. The style of the page shows one of them."""
    return joined(_drawn(graph, BROAD, "broad"), _drawn(graph, NARROW, "narrow"))


def _drawn(graph: Graph, size: Size, name: str) -> Html:
    width, height = size.box
    most = max(map(len, graph.columns))
    top = 30
    total = top + most * (height + size.gap)
    places: dict[Hashable, tuple[float, float]] = {}
    parts = []
    for i, (head, column) in enumerate(zip(HEADS, graph.columns, strict=True)):
        x = i * (size.width - width) / 2
        parts.append(el("text", head, x=f"{x:g}", y=16, class_="head", font_size=size.letters[1] + 1))
        room = (total - top - len(column) * height) / max(1, len(column))
        for n, box in enumerate(column):
            places[box] = (x, top + room / 2 + n * (height + room))
    kinds = {box: shown.kind for column in graph.columns for box, shown in column.items()}
    for (start, end), weight in graph.ways.items():
        if start in places and end in places:
            parts.append(_way(places[start], places[end], size, weight, kinds[start], kinds[end]))
    for column in graph.columns:
        parts += [_box(places[box], size, *shown) for box, shown in column.items()]
    counts = " and ".join(f"{len(column)} boxes of {head}" for head, column in zip(HEADS, graph.columns, strict=True))
    label = f"Master keys open KEKs, and KEKs open versions: {counts}. The tables below say the same."
    return el(
        "svg", *parts, viewBox=f"0 0 {size.width} {total:g}", role="img", aria_label=label, class_=f"picture {name}"
    )


def _way(start: tuple[float, float], end: tuple[float, float], size: Size, weight: int, *kinds: str) -> Html:
    x, y = start[0] + size.box[0], start[1] + size.box[1] / 2
    to, at = end[0], end[1] + size.box[1] / 2
    half = (x + to) / 2
    thick = min(1.25 + 0.55 * math.log10(max(1, weight)), 5)
    alive = all(kind in ("active", "lapsed", "group") for kind in kinds)
    path = f"M{x:g} {y:.4g}C{half:g} {y:.4g} {half:g} {at:.4g} {to:g} {at:.4g}"
    return el("path", d=path, class_="way active" if alive else "way", stroke_width=f"{thick:.3g}")


def _box(place: tuple[float, float], size: Size, name: str, what: str, kind: str) -> Html:
    width, height = size.box
    title = el("title", f"{clipped(name)}: {clipped(what)}")
    shape = el("rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=6, class_="box")
    stripe = el("rect", x=0.5, y=0.5, width=4, height=height - 1, rx=2, class_="stripe")
    large, small = size.letters
    # 0.62: the width of a letter of monospaced type; 0.56: of most others, at the widest.
    shown = clipped(name, int((width - size.pad - 8) / (0.62 * large)))
    about = clipped(what, int((width - size.pad - 6) / (0.56 * small)))
    first = el("text", shown, x=size.pad, y=f"{height * 0.43:g}", class_="name", font_size=large)
    second = el("text", about, x=size.pad, y=f"{height * 0.8:g}", class_="what", font_size=small)
    # An svg of its own cuts off what letters wider than usual would write over the neighbours.
    return el(
        "svg",
        title,
        shape,
        stripe,
        first,
        second,
        x=f"{place[0]:g}",
        y=f"{place[1]:.4g}",
        width=width,
        height=height,
        class_=kind,
    )


def meter(part: float, label: str) -> Html:
    """Return a bar that is filled to `part`, 1 being all that the policy allows."""
    filled = el(
        "rect", width=f"{100 * min(max(part, 0), 1):.3g}%", height=8, rx=4, class_="over" if part >= 1 else "part"
    )
    return el(
        "svg",
        el("rect", width="100%", height=8, rx=4, class_="all"),
        filled,
        class_="meter",
        role="img",
        aria_label=label,
    )
