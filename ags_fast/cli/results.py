"""The result of a job as text: its facts, one a line, and a table of the rows that people look at."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ags_fast.cli.text import fields, flat, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SHOWN = 50  # rows
OF_KEYS = ("rotate", "restore", "expire")  # of datasets: jobs whose rows are things of several kinds
KINDS = {"key": "KEKs", "chain": "blocks of digests"}


def job_text(found: dict[str, Any]) -> str:
    """Return the facts of a job, its rows, and those of the expiry that the job has done."""
    lines = [*fields(_facts(found)), *_rows(found)]
    if "expired" in found:
        lines += ["", "Then expired:", *_rows(found["expired"], every=True)]
    return "\n".join(lines)


def _facts(found: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in flat(found).items() if value is not None and name != "exit_code"}
    rate = plain["plain_bytes"] / max(plain["seconds"], 1e-3) / 1e6
    seconds = f"{plain['seconds']:,.1f}" + (f" ({rate:,.0f} MB/s)" if rate >= 1 else "")
    plain |= {name: f"{n:,}" for name, n in plain.items() if type(n) is int and name != "version"}
    if found.get("skipped_by"):
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in found["skipped_by"].items())
        plain["skipped"] = f"{plain['skipped']} ({kinds})"
    if "table" in found:
        plain |= _counts(found)
    elif found["operation"] in OF_KEYS:
        plain = {name: value for name, value in plain.items() if name not in ("ok", "skipped", "failed", "plain_bytes")}
        plain |= _counts(found) or {"done": "nothing to do"}
    return plain | {"seconds": seconds}


def _counts(found: Mapping[str, Any]) -> dict[str, str]:
    """Return what was done to how many things of each kind."""
    counts: dict[str, Counter[str]] = {}
    for row in found["rows"]:
        done = "removed" if found["operation"] == "expire" else "done"
        words = {"ok": done, "planned": "to remove" if done == "removed" else "to do", "skipped": "stay"}
        counts.setdefault(KINDS.get(row["format"]) or f"{row['format']}s", Counter())[
            words.get(row["status"], "failed")
        ] += 1
    return {kind: ", ".join(f"{number:,} {word}" for word, number in each.items()) for kind, each in counts.items()}


def _rows(found: Mapping[str, Any], *, every: bool = False) -> Iterator[str]:
    """Return a table of the rows that did not go well; of all with `every`, and with patterns, which chose them."""
    every = every or "matching" in found
    pairs = found.get("operation") == "rotate" and "table" not in found
    rows = [
        (
            row["status"],
            row["format"] or "",
            _name(row),
            f"{row['error_class']}: {row['error']}" if row["error"] else "",
        )
        for row in found["rows"]
        if every
        or (pairs and row["format"] == "key" and row["dst"])
        or (row["error_class"] != "Unchanged" and (row["status"] not in ("ok", "planned") or row["error_class"]))
        or (row["status"] == "planned" and "dataset" in found)
    ]
    if rows:
        used = [place for place in range(4) if any(row[place] for row in rows)]
        shown = [[row[place] for place in used] for row in rows[:SHOWN]]
        heads = [("status", "kind", "name", "why")[place] for place in used]
        yield from ("", *table(heads, shown, [False] * len(used)))
    if len(rows) > SHOWN:
        yield f"and {len(rows) - SHOWN:,} more: --json shows all"


def _name(row: Mapping[str, Any]) -> str:
    return (
        row["src"] if row["dst"] in (None, row["src"]) or row["status"] == "failed" else f"{row['src']} -> {row['dst']}"
    )
