"""Compares a run with a saved one: which rows got slower by more than their noise.

Two runs are seldom on an equally quiet machine. So where a row has a peer, what is compared is the ratio of ours to the
peer, round by round, in which both had the same machine. The noise of a row is the range of the middle half of
its rounds, in the run where that is larger, and at least 3 %.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

PEERS = ("loop", "beside", "best", "naive", "pycryptodome")  # the first that a row has in both runs is its peer
LEAST_NOISE = 0.03


class Change(NamedTuple):
    """What became of a row. times: its cost now, of its cost before. verdict: "slower", "faster" or "same"."""

    name: str
    peer: str | None
    times: float
    noise: float
    verdict: str


def compare(base: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """Compare the rows that two results have. Rows of one of them are left out."""
    before = {row["name"]: row["columns"] for row in base["rows"] if "ours" in row["columns"]}
    return [
        _change(row["name"], before[row["name"]], row["columns"])
        for row in now["rows"]
        if row["name"] in before and "ours" in row["columns"]
    ]


def _change(name: str, before: dict[str, Any], now: dict[str, Any]) -> Change:
    peer = next((peer for peer in PEERS if peer in before and peer in now), None)
    old, new = _costs(before, peer), _costs(now, peer)
    times = statistics.median(new) / statistics.median(old)
    noise = max(LEAST_NOISE, _spread(old), _spread(new))
    verdict = "slower" if times > 1 + noise else "faster" if times < 1 / (1 + noise) else "same"
    return Change(name, peer, times, noise, verdict)


def _costs(columns: dict[str, Any], peer: str | None) -> list[float]:
    ours: list[float] = columns["ours"]["samples"]
    if peer is None:
        return ours
    return [mine / theirs for mine, theirs in zip(ours, columns[peer]["samples"], strict=False)]


def _spread(costs: list[float]) -> float:
    if len(costs) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(costs, n=4, method="inclusive")
    return (high - low) / middle


def read(path: str) -> dict[str, Any]:
    """Read results: of a file, or of a folder that a run wrote. ValueError if they are something else."""
    file = Path(path)
    text = (file / "results.json" if file.is_dir() else file).read_text()
    try:
        found = json.loads(text)
        for row in found["rows"]:
            row["name"], row["columns"].values()
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is not what a run of the benchmarks wrote") from None
    results: dict[str, Any] = found
    return results


def show(changes: list[Change], base: str) -> bool:
    """Print the changes. Returns whether a row got slower."""
    print(f"\ncompared with {base}: the cost of ours, as ratio to a peer where there is one, now / then")
    for change in sorted(changes, key=lambda change: -change.times):
        mark = {"slower": "SLOWER", "faster": "faster"}.get(change.verdict, "")
        beside = f"/ {change.peer}" if change.peer else ""
        print(f"  {change.name:<44}{beside:<16}{change.times:6.2f}  noise {change.noise:4.0%}  {mark}".rstrip())
    slower = sum(change.verdict == "slower" for change in changes)
    print(f"  {len(changes)} rows are in both, {slower} got slower by more than their noise")
    return slower > 0
