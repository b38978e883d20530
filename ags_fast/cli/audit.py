"""Show what ``ags-fast keys status`` and ``audit`` find, as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.cli.text import count, day, table, when, wrapped
from ags_fast.page.words import cost_of, policy_lines, uses_note

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SHOWN = 50  # rows of a table
NUMBERS = ("version", "uses", "data keys", "tables", "files", "bytes")  # columns of tables
VERDICTS = {True: "may be destroyed", False: "must stay", None: "unknown"}


def expiry_line(numbers: Sequence[int]) -> str:
    """Return what the next job that commits removes, by these numbers of versions."""
    which = f"version{'s' * (len(numbers) > 1)} {_ranges(numbers)}" if numbers else "no version"
    return f"{'next commit':<12}  expires {which}"


def status_lines(found: dict[str, Any]) -> list[str]:
    """Return all lines of a status or an audit."""
    audited = found["operation"] == "audit"
    lines = [
        f"dataset       {found['dataset']}",
        f"version       {found['version']}",
        f"tables        {found['tables']}, of which {found['tables_opened']} had to be opened",
        *policy_lines(found["policy"]),
        "",
        "KEKs",
        *_table(
            ("key", "kind", "wrapped by", "made", "state", "data keys", "uses", "needed by", "ends"),
            [_key_cells(key) for key in found["keys"]],
        ),
        "",
        *(f"  {line}" for line in wrapped(uses_note(found["version"]), 0)),
        "",
        "Versions of the dataset",
        *_table(
            ("version", "by", "at (UTC)", "files", "bytes", "expires"),
            [_version_cells(version, found["time_ms"]) for version in found["versions"]],
        ),
        "",
        "Master keys, and their versions",
        *(line for master in found["masters"] for line in _master_lines(master, audited)),
    ]
    if found["open_jobs"]:
        lines += ["", "Open jobs"]
        states = {True: "it is running", False: "it died", None: "it is running, or died"}
        lines += [f"  {job['job_id']}  {job['operation']}: {states[job['lives']]}" for job in found["open_jobs"]]
    if found["unread"]:
        lines += ["", "Could not be read, so the above may be incomplete", *(f"  {text}" for text in found["unread"])]
    if audited:
        lines += ["", "What each KEK opens", *_opens_lines(found["opens"])]
        lines += ["", *_step_lines(found["event"], found["steps"]), ""]
        lines += [line for note in found["notes"] for line in wrapped(f"* {note}", 2)]
    return lines


def _key_cells(key: dict[str, Any]) -> tuple[str, ...]:
    kind = "double wrap" if key["double_wrap"] else "single wrap"
    kind += ", columns" if key["for_columns"] else ""
    kind += f", {key['scope']}" if key["scope"] else ""
    by = key["wrapping_key_id"] + ("" if key["master_version"] is None else f" {key['master_version']}")
    needed = [_ranges(key["needed_by_versions"])] if key["needed_by_versions"] else []
    needed += [f"job {job_id}" for job_id in key["needed_by_jobs"]]
    if key["retires_ms"] is not None:
        ends = f"may go from {day(key['retires_ms'])}"
    elif key["lifetime_ends_ms"] is not None:
        ends = f"wraps until {day(key['lifetime_ends_ms'])}, or {key['uses_left']:,} more"
    else:
        ends = ""
    made = f"{day(key['created_ms'])} ({key['age_days']:g} d)"
    numbers = f"{key['data_keys']:,}", f"{key['uses']:,}"
    return key["key_id"], kind, by, made, key["state"], *numbers, ", ".join(needed) or "nothing", ends


def _version_cells(version: dict[str, Any], now: int) -> tuple[str, ...]:
    expires = version["expires_ms"]
    return (
        str(version["number"]),
        version["operation"],
        when(version["time_ms"]),
        f"{version['files']:,}",
        f"{version['source_length']:,}",
        "" if expires is None else f"from {day(expires)}" if expires > now else "by the next job that commits",
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as a text, such as 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _master_lines(master: dict[str, Any], audited: bool) -> list[str]:
    current = master["current_version"]
    says = f"wraps by version {current}" if current else "the KMS does not say which version wraps"
    lines = [f"  {master['wrapping_key_id']}: {master['refused'] or says}"]
    if not audited:
        for row in master["keks"]:
            version = "unknown versions" if row["version"] is None else f"version {row['version']}"
            old = current is not None and row["version"] is not None and row["version"] != current
            lines.append(
                f"    {version}: wraps {count(row['keks'], 'KEK')}"
                + ("; `keys rotate --what mek` wraps them by the current one" if old else "")
            )
        for row in master["key_material"]:
            version = "unknown versions" if row["version"] is None else f"version {row['version']}"
            lines.append(f"    {version}: in the key material of files: {count(row['data_keys'], 'data key')}")
        return lines
    for row in master["versions"]:
        version = "an unknown version" if row["version"] is None else f"version {row['version']}"
        lines.append(f"    {version}: {VERDICTS[row['may_be_destroyed']]}: {row['why']}")
        lines += [f"        first  {command}" for command in row["first"]]
    for row in master["listed"]:
        made = "" if row["made_ms"] is None else f" of {day(row['made_ms'])}"
        state = "" if row["state"] is None else f" ({row['state'].lower()})"
        lines.append(f"    the KMS lists version {row['version'] or 'without a name'}{made}{state}")
    lines.append(f"    other versions: {VERDICTS[master['others']]}")
    lines.append(f"    the key as a whole: {VERDICTS[master['may_be_destroyed']]}: {master['why']}")
    return lines


def _opens_lines(rows: Iterable[dict[str, Any]]) -> list[str]:
    cells = [
        (
            row["key_id"],
            str(row["version"]),
            f"{row['data_keys']:,}",
            f"{row['tables']:,}",
            "yes" if row["document"] else "",
        )
        for row in rows
    ]
    return _table(("key", "version", "data keys", "tables", "document"), cells)


def _step_lines(event: str | None, steps: Sequence[dict[str, Any]]) -> list[str]:
    if not steps:
        return ["Nothing is due. (--event says what to do after an event.)"]
    lines = ["What is due" if event is None else f"What to do ({event})"]
    for n, step in enumerate(steps, 1):
        lines += wrapped(f"  {n}. {step['text']}", 5)
        if step["only_if"]:
            lines += wrapped(f"     Only if {step['only_if']}.", 5)
        if step["command"]:
            lines.append(f"       {step['command']}")
        if "kms_calls" in step:
            lines.append(f"       {cost_of(step)}")
    return lines


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table of the last rows, indented."""
    if not rows:
        return ["  none"]
    head, *lines = table(heads, rows[-SHOWN:], [name in NUMBERS for name in heads])
    hidden = len(rows) - SHOWN
    earlier = [f"… {hidden:,} earlier rows: --json shows all"] if hidden > 0 else []
    return [f"  {line}" for line in (head, *earlier, *lines)]
