"""What to do, and what events would cost: steps with commands, and their sums."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ags_fast.markup import Html, clipped, el, joined
from ags_fast.page.tables import command_line, sub, table
from ags_fast.page.words import amounts, cost_of, count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STEPS = 20  # steps that a list shows
NAMES = {
    "planned": "The master key is rotated as planned",
    "kek-leaked": "A KEK has leaked",
    "dek-leaked": "Data keys of all files have leaked",
    "mek-leaked": "The master key has leaked, or was misused",
}


def steps(found: Sequence[Mapping[str, Any]]) -> Html:
    """Return steps as a numbered list, each with its command and its cost."""
    shown = [_step(step) for step in found[:STEPS]]
    more = len(found) - STEPS
    rest = (
        el("p", f"{count(more, 'more step')}: ags-fast keys audit --json has all.", class_="note") if more > 0 else None
    )
    return joined(el("ol", *shown, class_="steps"), rest)


def _step(step: Mapping[str, Any]) -> Html:
    only_if = el("p", f"Only if {step['only_if']}.", class_="soft") if step["only_if"] else None
    command = command_line(step["command"]) if step["command"] else None
    cost = el("p", sub(cost_of(step))) if "kms_calls" in step else None
    return el("li", el("p", clipped(step["text"], 1000)), only_if, command, cost)


def sum_of(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the costs of steps together, as one step has them."""
    sums: dict[str, Counter[str]] = {name: Counter() for name in ("kms_calls", "key_store", "written", "removed")}
    sums["key_store"]["keks"] = 0
    for step in steps:
        for name, counter in sums.items():
            counter.update(step.get(name, {}))
    return {name: dict(counter) for name, counter in sums.items()}


def costs(events: Mapping[str, Sequence[Mapping[str, Any]]]) -> Html:
    """Return a table of what each event would cost, and the steps of each event to open."""
    rows = []
    for event, found in events.items():
        always = [step for step in found if not step["only_if"]]
        rows.append(_row(NAMES[event], "" if len(always) == len(found) else "at the least", sum_of(always)))
        if len(always) < len(found):
            reasons = "if the KEK's holder could also read tables and write"
            rows.append(_row(NAMES[event], reasons, sum_of(found)))
    heads = [("Event", "wide"), ("KMS calls", "num"), ("KEKs changed", "num")]
    heads += [("Written", ""), ("Removed", "")]
    caption = "What an event would cost now, counted for one process that does all of the work."
    lists = [
        el("details", el("summary", f"Steps: {NAMES[event][0].lower()}{NAMES[event][1:]}"), steps(found))
        for event, found in events.items()
    ]
    return joined(table(caption, heads, rows), *lists)


def _row(name: str, more: str, cost: Mapping[str, Any]) -> tuple[object, ...]:
    calls = cost["kms_calls"]
    each = ", ".join(f"{number:,} {call}" for call, number in calls.items() if number)
    return (
        joined(name, sub(more) if more else None),
        joined(f"{sum(calls.values()):,}", sub(each) if each else None),
        f"{cost['key_store']['keks']:,}",
        amounts(cost["written"]) or "nothing",
        amounts(cost["removed"]) or "nothing",
    )
