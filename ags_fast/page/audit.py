"""An audit of keys as one page that needs nothing else: no script, no file from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ags_fast._version import __version__
from ags_fast.markup import Html, clipped, el, joined
from ags_fast.page import events, picture, tables
from ags_fast.page.graph import graph_of, kind_of
from ags_fast.page.words import count, policy_lines, when

if TYPE_CHECKING:
    from collections.abc import Mapping

STYLE = (Path(__file__).parent / "page.css").read_text("utf-8")
PROBLEMS = 20  # unread things that are named


def audit_page(found: Mapping[str, Any]) -> str:
    """Return an HTML page, of some 100 KB however many keys and versions there are.

    Args:
        found: What `jobs.audit` returns with ``all_events=True``, with commands (see `printable_audit`).
    """
    short = clipped(found["dataset"].rstrip("/").rpartition("/")[2] or found["dataset"], 80)
    # The style is allowed by its digest: an attribute or element that slipped in would have no effect.
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    allowed = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark">'
        f"{el('title', f'Keys of {short}')}<style>{STYLE}</style>"
    )
    body = el("main", _header(found, short), _next(found), _picture(found), _tables(found), _costs(found), _end(found))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def _header(found: Mapping[str, Any], short: str) -> Html:
    kinds = [kind_of(key, found) for key in found["keys"]]
    wrapping = len(kinds) - kinds.count("retired")
    late = kinds.count("lapsed")
    newest = next((row for row in found["versions"] if row["number"] == found["version"]), None)
    free = sum(held["may_be_destroyed"] is True for master in found["masters"] for held in master["versions"])
    due = len(found["steps"])
    facts = [
        (
            "Due now" if found["event"] is None else "To do",
            count(due, "step"),
            "see below" if due else "nothing is due",
        ),
        ("Master keys", f"{len(found['masters']):,}", f"{count(free, 'version')} may be destroyed"),
        ("KEKs", f"{len(kinds):,}", f"{wrapping:,} wrap, {late:,} past the policy"),
        ("Versions", f"{len(found['versions']):,}", f"the newest is {found['version']}"),
        ("Data keys", f"{sum(key['data_keys'] for key in found['keys']):,}", "in the newest version"),
        ("Files", f"{newest['files'] if newest else 0:,}", "in the newest version"),
    ]
    tiles = [el("div", el("dt", term), el("dd", value, el("small", more))) for term, value, more in facts]
    version = "no version" if found["version"] is None else f"version {found['version']}"
    place = joined(
        el("code", clipped(found["dataset"], 1000), class_="id"), f", {version}, at {when(found['time_ms'])} UTC."
    )
    unread = None
    if found["unread"]:
        items = [el("li", clipped(problem)) for problem in found["unread"][:PROBLEMS]]
        more = len(found["unread"]) - PROBLEMS
        items += [el("li", f"and {more:,} more")] if more > 0 else []
        words = el("p", el("strong", "Something could not be read, so this page may be incomplete:", class_="bad"))
        unread = el("div", words, el("ul", *items), class_="alert", role="alert")
    return el(
        "header",
        el("p", "Audit of keys", class_="eyebrow"),
        el("h1", short),
        el("p", place, class_="lede"),
        unread,
        el("dl", *tiles, class_="facts"),
    )


def _section(title: str, about: str, *parts: object) -> Html:
    return el("section", el("h2", title), el("p", about, class_="note"), *parts)


def _next(found: Mapping[str, Any]) -> Html:
    if found["event"] is not None:
        event = events.NAMES[found["event"]]
        return _section("What to do", f"{event}: run these commands in this order.", events.steps(found["steps"]))
    if not found["steps"]:
        about = "Nothing is due. The policy is kept, and the current versions of the master keys wrap all KEKs."
        return _section("What to do next", about)
    about = "Run these commands in this order. A click on a command selects all of the command."
    return _section("What to do next", about, events.steps(found["steps"]))


def _picture(found: Mapping[str, Any]) -> Html:
    about = (
        "A master key in the KMS wraps KEKs, and a KEK wraps the data keys of versions. Follow a line to see what a "
    )
    about += "key opens. The newest stands at the top of each column."
    caption = "Blue: in use. Grey: retired keys and older versions. Amber: past the policy. A thicker line stands for "
    caption += "more keys. What does not fit shares a box."
    drawn = el("figure", picture.picture(graph_of(found)), el("figcaption", caption))
    return _section("What opens what", about, drawn)


def _tables(found: Mapping[str, Any]) -> Html:
    lines = [line.partition("  ") for line in policy_lines(dict(found["policy"]))]
    rules = el("dl", *(el("div", el("dt", term), el("dd", rule.strip())) for term, _, rule in lines), class_="rules")
    parts = [_section("Master keys", "You destroy versions in the KMS, or in a local keystore.", tables.masters(found))]
    parts.append(el("section", el("h2", "KEKs and the policy"), rules, tables.keks(found)))
    about = "Each version opens as long as its KEKs, and the master key above them, are there."
    parts.append(_section("Versions", about, tables.versions(found)))
    return joined(*parts)


def _costs(found: Mapping[str, Any]) -> Html | None:
    if not found.get("events"):
        return None
    about = "Counted from the plan of the commands, on the dataset as it is now. Nothing was run."
    return _section("What an event would cost", about, events.costs(found["events"]))


def _end(found: Mapping[str, Any]) -> Html:
    jobs = None
    if found["open_jobs"]:
        states = {True: "running", False: "dead", None: "running, or dead"}
        rows = [(tables.name(job["job_id"]), job["operation"], states[job["lives"]]) for job in found["open_jobs"]]
        heads = [("Job", ""), ("Operation", ""), ("State", "tight")]
        shown = tables.table("Open jobs.", heads, rows[: tables.SHOWN], len(rows) - tables.SHOWN)
        jobs = _section("Open jobs", "A dead job keeps its keys until somebody resumes or sweeps the job.", shown)
    notes = el("ul", *(el("li", note) for note in found["notes"]), class_="note")
    about = f"Written by ags_fast {__version__} ({found['dataset_id']}). The page holds ids and names, and no key."
    return joined(jobs, el("section", el("h2", "What this page does not say"), notes), el("p", about, class_="note"))
