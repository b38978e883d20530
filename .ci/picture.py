"""Draws docs/design.svg: the layers of ags_fast, as pyproject.toml has them and as import-linter checks them.

python3 .ci/picture.py [FILE]
"""

import ast
import sys
import textwrap
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH, LINE, GAP, SIDE = 860, 17, 8, 20
STYLE = """
    rect { fill: #eef1fb; stroke: #3f51b5; rx: 5 }
    .c rect { fill: #e6f4ea; stroke: #2e7d32 }
    text { font: 13px sans-serif; fill: #1a1a2e }
    .name { font: bold 13px monospace }
    .note { font-size: 12px; fill: #3a3a4e }
    .sheet { fill: none; stroke: none }
    @media (prefers-color-scheme: dark) {
        rect { fill: #1c2240; stroke: #7986cb } .c rect { fill: #12291a; stroke: #66bb6a }
        text { fill: #e6edf3 } .note { fill: #b5bdc7 }
    }
"""
BELOW = (
    ("_core.pyx", "buffers and exceptions; no format"),
    ("csrc/", "bytes, keys, threads, descriptors; never Python"),
)


def layers() -> list[list[str]]:
    """From the top, the packages and modules of each layer, without private helpers."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = [row.replace("(", "").replace(")", "").split(" | ") for row in contracts[0]["layers"]]
    named = [[name.removeprefix("ags_fast.") for name in row] for row in rows]
    return [row for row in ([name for name in row if not name.startswith("_")] for row in named) if row]


def first_line(name: str) -> str:
    """What the module's docstring says first."""
    path = ROOT / "ags_fast" / name
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text())) or ""
    return text.partition("\n")[0].rstrip(".").replace("`", "")


def row(y: int, boxes: list[tuple[str, str]]) -> tuple[str, int]:
    """Boxes of one height beside each other, each a name and a note below; and where the next row begins."""
    width = (WIDTH - 2 * SIDE - GAP * (len(boxes) - 1)) / len(boxes)
    notes = [textwrap.wrap(note, int((width - 20) / 6.1)) for _, note in boxes]
    height = 29 + LINE * max(len(note) for note in notes)
    parts = []
    for i, ((name, _), note) in enumerate(zip(boxes, notes, strict=True)):
        x = SIDE + i * (width + GAP)
        parts.append(f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}"/>')
        parts.append(f'<text class="name" x="{x + 10:.0f}" y="{y + 19}">{escape(name)}</text>')
        for n, line in enumerate(note):
            parts.append(f'<text class="note" x="{x + 10:.0f}" y="{y + 36 + LINE * n}">{escape(line)}</text>')
    return "\n".join(parts), y + height + GAP


def draw() -> str:
    """The picture, as SVG."""
    parts, y = [], SIDE
    for names in layers():
        part, y = row(y, [(name, first_line(name)) for name in names])
        parts.append(part)
    for below in BELOW:
        part, y = row(y, [below])
        parts.append(f'<g class="c">{part}</g>')
    height = y - GAP + SIDE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    title = "<title>The layers of ags_fast. Each may import those below, never those above.</title>"
    sheet = f'<rect class="sheet" width="{WIDTH}" height="{height}"/>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", sheet, *parts, "</svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "design.svg").write_text(draw())
