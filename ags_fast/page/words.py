"""Numbers, times and sentences of an audit, as text and pages show them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def count(number: int, thing: str) -> str:
    """`number` things, in the plural where that is right."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def when(time_ms: int) -> str:
    """A time in milliseconds since 1970, in UTC, to the second."""
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def day(time_ms: int) -> str:
    """The day of a time in milliseconds since 1970, in UTC."""
    return when(time_ms)[:10]


def uses_note(version: int | None) -> str:
    """Return what the numbers of data keys and of uses mean, and why they differ."""
    where = "the newest version" if version is None else f"version {version}"
    return (
        f"Data keys: those that the KEK wraps in {where}. Uses: what jobs have reserved, which also counts data keys "
        "of other versions and of jobs that died, documents, and spares for second tries."
    )


def policy_lines(policy: dict[str, Any]) -> list[str]:
    """Return a line for each rule of a policy."""
    keep = "all versions" if policy["keep"] is None else f"the newest {policy['keep']}"
    if policy["keep_days"] is not None:
        keep += f", and those younger than {policy['keep_days']:g} days"
    rows = [
        ("KEK scope", policy["kek_scope"]),
        ("KEK lifetime", f"{policy['kek_lifetime_days']:g} days"),
        ("KEK uses", f"{policy['kek_uses']:,}"),
        ("jobs keep", keep),
    ]
    return [f"{name:<12}  {value}" for name, value in rows]


def cost_of(step: Mapping[str, Any]) -> str:
    """Return what a step costs, as a sentence."""
    calls = ", ".join(f"{number:,} {call}" for call, number in step["kms_calls"].items() if number)
    parts = [f"KMS calls: {calls or 'none'}"]
    parts += [f"KEKs changed: {step['key_store']['keks']:,}"] if step["key_store"]["keks"] else []
    parts += [f"{what}: {held}" for what in ("written", "removed") if (held := amounts(step[what]))]
    return "; ".join(parts) + "."


def amounts(counts: Mapping[str, int]) -> str:
    """Return numbers of versions, tables and files, with their bytes."""
    from ags_fast.markup import nbytes  # every start of the command reads this module, and needs no HTML

    parts = [count(number, "version")] if (number := counts.get("versions", 0)) else []
    parts += [
        f"{count(number, thing)} ({nbytes(counts[f'{thing}_bytes'])})"
        for thing in ("table", "file")
        if (number := counts.get(f"{thing}s", 0))
    ]
    return ", ".join(parts)
