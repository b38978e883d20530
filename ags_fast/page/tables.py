"""The tables of the page. Each shows what matters most, and says how many rows it leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.markup import Html, clipped, el, joined, nbytes
from ags_fast.page.graph import kind_of
from ags_fast.page.picture import meter
from ags_fast.page.words import count, day, uses_note, when

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHOWN = 40  # rows of a table
VERDICTS = {True: ("good", "may be destroyed"), False: ("soft", "must stay"), None: ("warn", "unknown")}


def table(caption: str, heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[object]], left_out: int = 0) -> Html:
    """Return a table that scrolls inside itself where it is too wide.

    Args:
        caption: What it shows.
        heads: For each column its title, and the class of its cells.
        rows: The cells. The first of a row is its head.
        left_out: The number of rows that are not there.
    """
    if left_out > 0:
        caption += f" {count(left_out, 'more row')}: ags-fast keys audit --json has all."
    # On a phone each row is a block. Roles keep the table a table for screen readers, whatever the style makes of it.
    titles = (el("th", title, scope="col", role="columnheader", class_=look or None) for title, look in heads)
    body = [
        el(
            "tr",
            el("th", row[0], scope="row", role="rowheader"),
            *(
                el("td", cell, role="cell", class_=look or None, data_label=title)
                for cell, (title, look) in zip(row[1:], heads[1:], strict=True)
            ),
            role="row",
        )
        for row in rows
    ]
    inside = el(
        "table",
        el("caption", caption, role="caption"),
        el("thead", el("tr", *titles, role="row"), role="rowgroup"),
        el("tbody", *body, role="rowgroup"),
        role="table",
    )
    return el("div", inside, class_="scroll", tabindex=0, role="region", aria_label=caption)


def name(value: object, look: str = "id") -> Html:
    """Return an id as code."""
    return el("code", clipped(value), class_=look)


def sub(value: object) -> Html:
    """Return a second line of a cell."""
    return el("span", value, class_="sub")


def masters(found: Mapping[str, Any]) -> Html:
    """Return the versions of master keys, and which of them may be destroyed."""
    rows: list[tuple[object, ...]] = []
    total = 0
    for master in found["masters"]:
        total += len(master["versions"]) + 1
        look, verdict = VERDICTS[master["may_be_destroyed"]]
        if len(rows) >= SHOWN:
            continue
        current = master["current_version"]
        says = master["refused"] or (f"wraps by version {current}" if current else "the KMS names no version")
        why = joined(clipped(master["why"]), sub(f"Versions not listed here: {VERDICTS[master['others']][1]}."))
        rows.append(
            (joined(name(master["wrapping_key_id"]), sub(clipped(says))), "all", "", "", _mark(look, verdict), why)
        )
        for held in reversed(master["versions"]):
            if len(rows) >= SHOWN:
                break
            look, verdict = VERDICTS[held["may_be_destroyed"]]
            version = "without a name" if held["version"] is None else clipped(held["version"], 40)
            keys = max((row["data_keys"] for row in (*held["data_keys"], *held["key_material"])), default=0)
            rows.append(
                (
                    name(master["wrapping_key_id"]),
                    joined(version, sub("current") if held["current"] else None),
                    f"{held['keks']:,}",
                    f"{keys:,}",
                    _mark(look, verdict),
                    joined(clipped(held["why"], 600), _first(held["first"])),
                )
            )
    heads = [("Master key", ""), ("Version", "tight"), ("KEKs", "num"), ("Data keys", "num"), ("Verdict", "tight")]
    caption = "Master keys: what each version wraps, and whether you may destroy that version in the KMS."
    return table(caption, [*heads, ("Why", "wide")], rows, total - len(rows))


def _mark(look: str, words: str) -> Html:
    return el("span", words, class_=look)


def _first(commands: Sequence[str | None]) -> Html | None:
    shown = [command for command in commands if command]
    return el("details", el("summary", "What to run first"), *map(command_line, shown)) if shown else None


def command_line(command: str) -> Html:
    """Return a command that is selected as a whole, to paste it."""
    code = el("pre", el("code", command), tabindex=0)
    if command.isprintable():
        return code
    return joined(code, sub("A name has characters that do not print: type the name by hand."))


def keks(found: Mapping[str, Any]) -> Html:
    """Return KEKs: those that wrap first, then those that are needed, the newest first."""

    def rank(key: Mapping[str, Any]) -> tuple[bool, bool, bool, int]:
        kind, needed = kind_of(key, found), bool(key["needed_by_versions"])
        return kind == "lapsed", kind == "active", needed, key["created_ms"]

    order = sorted(found["keys"], key=rank, reverse=True)
    heads = [("KEK", ""), ("State", "tight"), ("Wrapped by", ""), ("Age", "tight"), ("Uses", "tight")]
    heads += [("Data keys now", "num"), ("Needed by", ""), ("Ends", "")]
    caption = f"KEKs: ages and uses against the policy ({found['policy']['kek_lifetime_days']:,g} days, "
    caption += f"{found['policy']['kek_uses']:,} uses), and what needs each. Those that wrap come first. "
    caption += uses_note(found["version"])
    return table(caption, heads, [_kek(key, found) for key in order[:SHOWN]], len(order) - SHOWN)


def _kek(key: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[object, ...]:
    policy, kind = found["policy"], kind_of(key, found)
    about = ["double wrap" if key["double_wrap"] else "single wrap", *(["columns"] if key["for_columns"] else [])]
    about += [clipped(key["scope"], 80)] if key["scope"] else []
    version = "" if key["master_version"] is None else f"version {clipped(key['master_version'], 40)}"
    needed = [_ranges(key["needed_by_versions"])] if key["needed_by_versions"] else []
    needed += [count(len(key["needed_by_jobs"]), "open job")] if key["needed_by_jobs"] else []
    wraps = key["lifetime_ends_ms"] is not None
    age, uses = f"{key['age_days']:,.0f} days", f"{key['uses']:,}"
    lifetime = policy["kek_lifetime_days"]
    if wraps:
        spent = key["age_days"] / lifetime if lifetime else 1.0
        used = key["uses"] / policy["kek_uses"]
        age_cell = joined(age, meter(spent, f"{spent:.0%} of the lifetime"))
        uses_cell = joined(uses, meter(used, f"{used:.0%} of the uses"))
    if key["retires_ms"] is not None:
        ends = f"may be removed from {day(key['retires_ms'])}"
    elif wraps:
        ends = f"wraps until {day(key['lifetime_ends_ms'])}"
    else:
        ends = ""
    return (
        joined(name(key["key_id"], "id key"), sub(", ".join(about))),
        _mark("warn", "past the policy") if kind == "lapsed" else key["state"],
        joined(name(key["wrapping_key_id"]), sub(version)),
        age_cell if wraps else age,
        uses_cell if wraps else uses,
        f"{key['data_keys']:,}",
        ", ".join(needed) or "nothing",
        ends,
    )


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) > 4:
        return f"{len(numbers):,} versions, {min(numbers):,} to {max(numbers):,}"
    return f"version{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def versions(found: Mapping[str, Any]) -> Html:
    """Return the newest versions of the dataset."""
    keys: dict[int, list[Mapping[str, Any]]] = {}
    for row in found["opens"]:
        keys.setdefault(row["version"], []).append(row)
    rows = []
    for version in list(reversed(found["versions"]))[:SHOWN]:
        expires = version["expires_ms"]
        late = expires is not None and expires <= found["time_ms"]
        opened = keys.get(version["number"], [])
        rows.append(
            (
                str(version["number"]),
                version["operation"],
                when(version["time_ms"]),
                f"{version['files']:,}",
                nbytes(version["source_length"]),
                count(len(opened), "KEK"),
                f"{sum(row['data_keys'] for row in opened):,}",
                "" if expires is None else "by the next job that commits" if late else f"from {day(expires)}",
            )
        )
    heads = [("Version", ""), ("Made by", "tight"), ("At (UTC)", "tight"), ("Files", "num"), ("Plaintext", "num")]
    heads += [("Opened by", "num"), ("Data keys", "num"), ("Expires", "")]
    caption = "Versions of the dataset, the newest first, and when the policy lets jobs expire each."
    return table(caption, heads, rows, len(found["versions"]) - SHOWN)
