"""The results as pictures: throughput by block size, the cost of commits, and how far each target was reached."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator, NullLocator
from matplotlib.transforms import blended_transform_factory

from benchmarks import picture

if TYPE_CHECKING:
    from pathlib import Path

INK, GREY, PALE = "#1f2933", "#616e7c", "#9aa5b1"
LINES = {  # column: label, colour, line style, width
    "loop": ("EVP loop", INK, (0, (5, 2)), 1.6),
    "ours": ("ags_fast", "#0b6bcb", "-", 3.0),
    "best": ("best Python", "#e8830c", "-", 1.8),
    "naive": ("naive Python", "#8a94a0", "-", 1.8),
    "pycryptodome": ("pycryptodome", "#c45bb8", "none", 0),
}
VERDICTS = {"pass": "#2e9e5b", "best only": "#e0a100", "median only": "#e0a100", "MISSED": "#d1453b"}
STYLE: dict[Any, Any] = {
    "figure.dpi": 144,
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": PALE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "grid.color": "#e4e7eb",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def draw(results: dict[str, Any], output: Path) -> list[Path]:
    """Writes the pictures for which there are results; returns their paths."""
    made = []
    with pyplot.rc_context(STYLE):
        for bits in (128, 256):
            points = codec_points(results["rows"], bits)
            if len({point["block"] for point in points}) > 1:
                made += [draw_codec(points, bits, results["about"], output)]
        if any(len(points) > 1 for points in commit_points(results["rows"]).values()):
            made += [draw_commits(commit_points(results["rows"]), results["about"], output)]
        if speed := picture.draw([results], output / "speed.png"):
            made += [speed]
        if targets := [target for target in results["targets"] if "best" in target]:
            made += [draw_targets(targets, results["about"], output)]
    return made


def codec_points(rows: list[dict[str, Any]], bits: int) -> list[dict[str, Any]]:
    points = []
    for row in rows:
        found = re.fullmatch(rf"codec/(\w+)/(\d+)([KM])iB/aes-{bits}/(\d+)t", row["name"])
        if found:
            block = int(found[2]) << (10 if found[3] == "K" else 20)
            points.append({"what": found[1], "block": block, "threads": int(found[4]), "columns": row["columns"]})
    return points


def draw_codec(points: list[dict[str, Any]], bits: int, about: dict[str, Any], output: Path) -> Path:
    whats = ["encrypt_into", "decrypt_into"]
    threads = sorted({point["threads"] for point in points})
    blocks = sorted({point["block"] for point in points})
    size = (1.6 + 4.2 * len(threads), 7.6)
    figure, grid = pyplot.subplots(len(whats), len(threads), figsize=size, sharex=True, sharey=True, squeeze=False)
    handles = {}
    for line, what in zip(grid, whats, strict=True):
        for axes, n in zip(line, threads, strict=True):
            here = {p["block"]: p["columns"] for p in points if p["what"] == what and p["threads"] == n}
            axes.set_title(f"{what}, {n} thread{'s' * (n > 1)}")
            for column, (label, colour, style, width) in LINES.items():
                x = [i for i, block in enumerate(blocks) if column in here.get(block, {})]
                best, median = ([here[blocks[i]][column][key] for i in x] for key in ("best", "median"))
                drawn = axes.plot(x, best, color=colour, linestyle=style, linewidth=width, marker="o", markersize=4)
                if width:
                    axes.fill_between(x, median, best, color=colour, alpha=0.12, linewidth=0)
                if x:
                    handles[label] = drawn[0]
            axes.set_xticks(range(len(blocks)), [size_text(block) for block in blocks])
            axes.yaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
            axes.margins(x=0.04)
    grid[0, 0].set_ylim(bottom=0)  # of all, now that all is drawn
    for axes in grid[:, 0]:
        axes.set_ylabel("GB/s of plaintext")
    for axes in grid[-1]:
        axes.set_xlabel("size of block")
    title(figure, f"AES-{bits} GCM streams from buffer to buffer", "Line: best run; shade: down to the median.", about)
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=len(handles))
    figure.tight_layout(rect=(0, 0.045, 0.99, 0.915))
    return save(figure, output / f"codec-aes-{bits}.png")


def commit_points(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Milliseconds by the number of commits."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        found = re.fullmatch(r"commits/(encrypt_files|transaction)/(commit|oldest|newest)/(\d+)", row["name"])
        if found:
            label = f"{found[1]}: commit" if found[2] == "commit" else f"{found[1]}: open_file of the {found[2]}"
            points.setdefault(label, []).append((int(found[3]), row["columns"]["ours"]["best"]))
    return points


def draw_commits(points: dict[str, list[tuple[int, float]]], about: dict[str, Any], output: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(8.5, 5))
    for label, line in points.items():
        numbers, costs = zip(*sorted(line), strict=True)
        style = "-" if label.endswith("commit") else "--"
        axes.plot(numbers, costs, linestyle=style, linewidth=2, marker="o", markersize=4, label=label)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("commits before, of one small file each")
    axes.set_ylabel("ms of CPU")
    title(figure, "Commits, and lookups after N commits", "Commits: mean of 32; open_file: least of 5.", about)
    figure.legend(loc="lower center", ncols=2)
    figure.tight_layout(rect=(0, 0.14, 0.99, 0.88))
    return save(figure, output / "commits.png")


def draw_targets(targets: list[dict[str, Any]], about: dict[str, Any], output: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(11, 1.9 + 0.36 * len(targets)))
    reach = [tuple(reached(target, key) for key in ("best", "median")) for target in targets]
    low, high = min(0.5, *(min(r) for r in reach)) * 0.9, max(2.0, *(max(r) for r in reach))
    columns = {"best": (0.82, "{:.2f}"), "median": (0.895, "{:.2f}"), "target": (0.985, "{}")}
    across = blended_transform_factory(figure.transFigure, axes.transData)
    beside: dict[str, Any] = {"transform": across, "va": "center", "ha": "right"}
    for y, (target, (best, median)) in enumerate(zip(targets, reach, strict=True)):
        axes.barh(y, best - low, left=low, height=0.62, color=VERDICTS[target["verdict"]], alpha=0.85)
        axes.plot([median], [y], marker="|", markersize=13, markeredgewidth=2.2, color=INK)
        for column, (x, text) in columns.items():
            axes.text(x, y, text.format(target[column]), **beside)
    for column, (x, _) in columns.items():
        axes.text(x, -1, column, color=GREY, **beside)
    axes.axvline(1, color=INK, linewidth=1.4)
    axes.set_xscale("log")
    axes.set_xlim(low, high * 1.08)
    ticks = [x for x in (0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20) if low <= x <= high]
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(targets)), [target["what"] for target in targets])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.set_ylim(len(targets) - 0.4, -1.5)
    axes.set_xlabel("how far the target was reached: 1 is exactly, to the right is better")
    title(figure, "Targets, each by its worst row", "Bar: best run; tick: median over the rounds.", about)
    inch = 1 / figure.get_figheight()
    figure.subplots_adjust(left=0.325, right=0.76, bottom=0.6 * inch, top=1 - 0.75 * inch)
    return save(figure, output / "targets.png")


def reached(target: dict[str, Any], key: str) -> float:
    value = max(target[key], 1e-9)
    return float(target["bound"] / value if target["less"] else value / target["bound"])


def size_text(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def title(figure: Any, text: str, small: str, about: dict[str, Any]) -> None:
    inch = 1 / figure.get_figheight()
    figure.text(0.012, 1 - 0.1 * inch, text, fontsize=14, fontweight="bold", va="top")
    ours, theirs = (about[who].split(", ")[1].split()[:2] for who in ("ags_fast", "cryptography"))
    where = f"{about['CPU'].split(';')[0]}, load {about['load'].split()[0]}"
    where += f"; {' '.join(ours)} in ags_fast, {' '.join(theirs)} in cryptography"
    line = f"{small} {where}"
    figure.text(0.012, 1 - 0.42 * inch, line, fontsize=8.5, color=GREY, va="top")


def save(figure: Any, path: Path) -> Path:
    figure.savefig(path)
    pyplot.close(figure)
    return path
