"""The README's picture: times as fast as others, of recorded runs, one for each class of machine.

``python -m benchmarks.picture`` draws docs/speed.png, and docs/speed-dark.png for dark pages. With the results.json of
a run of ``make bench``, it records that run first, in recorded/ and in the place of the last one of its class.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import NullLocator
from matplotlib.transforms import blended_transform_factory

if TYPE_CHECKING:
    from collections.abc import Iterable

RECORDED = Path(__file__).with_name("recorded")
DOCS = Path(__file__).resolve().parents[1] / "docs"
SPEED = (  # row, column of the peer, label
    ("parquet/encrypt/2t", "naive", "encrypt a Parquet file / pyarrow reads and writes it"),
    ("parquet/encrypt/2t", "best", "encrypt a Parquet file / a warm parquet-java"),
    ("parquet/encrypt/2t", "loop", "encrypt a Parquet file / the EVP loop"),
    ("parquet/view/1t", "beside", "pyarrow reads an encrypted Parquet file / a plain one"),
    ("codec/encrypt_into/4KiB/aes-128/2t", "best", "encrypt a buffer, blocks of 4 KiB / cryptography"),
    ("codec/encrypt_into/1MiB/aes-128/2t", "best", "encrypt a buffer, blocks of 1 MiB / cryptography"),
    ("codec/encrypt_into/1MiB/aes-128/2t", "loop", "encrypt a buffer, blocks of 1 MiB / the EVP loop"),
    ("network/small/verify", "naive", "verify 200 small files in S3 / one at a time"),
    ("network/read", "naive", "read 32 MiB from S3 / s3fs"),
    ("network/read", "best", "read 32 MiB from S3 / boto3's transfer manager"),
    ("rotation/kek/crypto", "best", "re-wrap 10^6 data keys / cryptography"),
)
CLASSES = {  # of machines, in the order of the picture: the flags of the CPU that a class must have
    "AVX-512": {"vaes", "avx512f"},
    "AVX2": {"vaes"},
    "AES-NI": {"aes", "pclmulqdq"},
}
TICKS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class Theme(NamedTuple):
    """Colours. classes: in the order of CLASSES."""

    ink: str
    grey: str
    grid: str
    paper: str
    classes: tuple[str, ...]


THEMES = {
    "speed.png": Theme("#1f2933", "#616e7c", "#e4e7eb", "#ffffff", ("#0b6bcb", "#d9730d", "#2e8b57")),
    "speed-dark.png": Theme("#e6edf3", "#9198a1", "#2b323b", "#0d1117", ("#58a6ff", "#f0a35e", "#57c785")),
}


class Beside(NamedTuple):
    """Ours beside a peer on a class of machine: both figures in the row's unit, and times as fast."""

    ours: float
    peer: float
    unit: str
    best: float
    median: float


def class_of(about: dict[str, Any]) -> str | None:
    """The class of the machine of a run; None if it is none of them."""
    flags = set(about["CPU"].partition(";")[2].split())
    return next((name for name, needed in CLASSES.items() if needed <= flags), None)


def record(results: dict[str, Any]) -> Path:
    """Keep of a run's results what the picture shows. Raises ValueError if it shows nothing of them."""
    name = class_of(results["about"])
    wanted = {row for row, _, _ in SPEED}
    rows = [row for row in results["rows"] if row["name"] in wanted and "ours" in row["columns"]]
    if name is None or not rows:
        raise ValueError("the run has no row of the picture, or the class of its CPU is not known")
    for row in rows:
        for column in row["columns"].values():
            column.pop("samples", None)
    path = RECORDED / f"{name.lower()}.json"
    path.write_text(json.dumps({"about": results["about"], "rows": rows}, indent=1) + "\n")
    return path


def recorded() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RECORDED.glob("*.json"))]


def figures(runs: Iterable[dict[str, Any]]) -> dict[str, dict[str, Beside]]:
    """By label and class: what of the picture was measured."""
    found: dict[str, dict[str, Beside]] = {}
    for run in runs:
        rows = {row["name"]: row for row in run["rows"]}
        name = class_of(run["about"]) or "other"
        for task, peer, label in SPEED:
            ratio = rows.get(task, {}).get("ratios", {}).get(f"ours/{peer}")
            if ratio:
                ours, theirs = (rows[task]["columns"][column]["best"] for column in ("ours", peer))
                found.setdefault(label, {})[name] = Beside(ours, theirs, rows[task]["unit"], **ratio)
    return {label: found[label] for _, _, label in SPEED if label in found}


def draw(runs: list[dict[str, Any]], path: Path, theme: Theme = THEMES["speed.png"]) -> Path | None:
    """Draw the runs, each of a class of its own, to a PNG. None if the picture shows nothing of them."""
    rows = figures(runs)
    if not rows:
        return None
    names = [name for name in (*CLASSES, "other") if any(name in row for row in rows.values())]
    height = 0.3 + 0.14 * len(names)  # inches of a row
    colours = dict(zip((*CLASSES, "other"), (*theme.classes, theme.grey), strict=True))
    with pyplot.rc_context({"font.size": 10, "font.family": "DejaVu Sans", "text.color": theme.ink, "figure.dpi": 144}):
        figure, axes = pyplot.subplots(figsize=(11, 1.9 + height * len(rows)), facecolor=theme.paper)
        for y, row in enumerate(rows.values()):
            for number, name in enumerate(names):
                if name in row:
                    at = y + (number - (len(names) - 1) / 2) * 0.62 / len(names)
                    _one(axes, at, row[name], colours[name])
        _axes(axes, rows, theme)
        _texts(figure, rows, runs, colours, theme)
        inch = 1 / figure.get_figheight()
        figure.subplots_adjust(left=0.345, right=0.76, bottom=0.55 * inch, top=1 - 0.95 * inch)
        figure.savefig(path, facecolor=theme.paper)
        pyplot.close(figure)
    return path


def _one(axes: Any, y: float, figure: Beside, colour: str) -> None:
    """A line from 1 to the best run, a dot there, a tick at the median; the figures at the right."""
    axes.plot([1, figure.best], [y, y], color=colour, linewidth=4, solid_capstyle="butt", alpha=0.55)
    axes.plot([figure.best], [y], marker="o", markersize=8, color=colour)
    axes.plot([figure.median], [y], marker="|", markersize=12, markeredgewidth=1.8, color=colour)
    across = blended_transform_factory(axes.figure.transFigure, axes.transData)
    texts = f"{figure.best:.2g} x", _value(figure.ours, figure.unit), _value(figure.peer, figure.unit)
    for x, text in zip(COLUMNS, texts, strict=True):
        axes.text(x, y, text, transform=across, va="center", ha="right", color=colour, fontsize=9.5)


COLUMNS = {0.82: "times", 0.905: "ags_fast", 0.985: "the other"}


def _value(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}" if value >= 1 else f"{value:.2g} {unit}"


def _axes(axes: Any, rows: dict[str, dict[str, Beside]], theme: Theme) -> None:
    ratios = [ratio for row in rows.values() for figure in row.values() for ratio in (figure.best, figure.median)]
    low, high = min(0.75, *ratios) * 0.93, max(2.0, *ratios) * 1.15
    axes.set_facecolor(theme.paper)
    axes.axvline(1, color=theme.ink, linewidth=1.4, zorder=1)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    ticks = [x for x in TICKS if low <= x <= high]
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks], color=theme.ink)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(rows)), list(rows), color=theme.ink)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.grid(axis="x", color=theme.grid)
    axes.set_axisbelow(True)
    axes.set_xlabel("times as fast as the other", color=theme.ink)
    across = blended_transform_factory(axes.figure.transFigure, axes.transData)
    for x, text in COLUMNS.items():
        axes.text(x, -0.85, text, transform=across, ha="right", color=theme.grey, fontsize=9.5)


def _texts(
    figure: Any, rows: dict[str, dict[str, Beside]], runs: list[dict[str, Any]], colours: dict[str, str], theme: Theme
) -> None:
    inch = 1 / figure.get_figheight()
    bests = [one.best for row in rows.values() for one in row.values()]
    text = f"ags_fast is {min(bests):.2g} to {max(bests):.2g} times as fast as the others"
    figure.text(0.012, 1 - 0.12 * inch, text, fontsize=14, fontweight="bold", va="top")
    small = "Right of 1, ags_fast is the faster one. Dot: best run; tick: median over the rounds."
    figure.text(0.012, 1 - 0.44 * inch, small, fontsize=9, color=theme.grey, va="top")
    x = 0.012
    for run in runs:
        name = class_of(run["about"]) or "other"
        label = f"● {name}: {run['about']['CPU'].partition(';')[0]}"
        drawn = figure.text(x, 1 - 0.66 * inch, label, fontsize=9, color=colours[name], va="top")
        x = drawn.get_window_extent().x1 / figure.bbox.width + 0.02


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description=__doc__)
    parser.add_argument("results", nargs="?", help="the results.json of a run, to be recorded")
    args = parser.parse_args()
    if args.results:
        print(record(json.loads(Path(args.results).read_text())))
    for name, theme in THEMES.items():
        print(draw(recorded(), DOCS / name, theme))


if __name__ == "__main__":
    main()
