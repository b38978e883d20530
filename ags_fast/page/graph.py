"""Master keys, KEKs and versions of a dataset as boxes and ways between them, few enough to draw."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.page.words import count, day

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

MASTERS, KEKS, VERSIONS = 8, 10, 10  # boxes of a column; what does not fit shares boxes
RANGES = 3  # boxes that older versions share
MATERIAL = "key material"


class Box(NamedTuple):
    """A box: a key, a version, or several of them."""

    name: str
    what: str
    kind: str  # active, retired, lapsed, missing, group


class Graph(NamedTuple):
    """Three columns of boxes by id, and the ways from a box to one of the next column, each with its weight."""

    columns: tuple[dict[Hashable, Box], dict[Hashable, Box], dict[Hashable, Box]]
    ways: dict[tuple[Hashable, Hashable], int]


def graph_of(found: Mapping[str, Any]) -> Graph:
    """Return what opens what, from the newest to the oldest in each column.

    Args:
        found: What `jobs.audit` returns.
    """
    masters, master_of = _masters(found)
    keks, kek_of = _keks(found, master_of)
    versions, version_of = _versions(found)
    ways: dict[tuple[Hashable, Hashable], int] = defaultdict(int)
    held_by = {master["wrapping_key_id"]: master["versions"] for master in found["masters"]}
    for key in found["keys"]:
        by = key["wrapping_key_id"]
        direct = [] if key["double_wrap"] else [row["version"] for row in held_by.get(by, ()) if row["data_keys"]]
        for version in direct or [key["master_version"]]:
            ways[master_of[by, version], kek_of[key["key_id"]]] += 1
    for row in found["opens"]:
        way = kek_of[row["key_id"]], version_of[row["version"]]
        ways[way] = max(ways[way], row["data_keys"], 1)
    for master in found["masters"]:
        for held in master["versions"]:
            for row in held["key_material"]:
                box = master_of[master["wrapping_key_id"], held["version"]]
                ways[box, MATERIAL] += 1
                way = MATERIAL, version_of[row["version"]]
                ways[way] = max(ways[way], row["data_keys"])
    if any(end == MATERIAL for _, end in ways):
        keks[MATERIAL] = Box("key material", "in files", "active")
    used = {box for way in ways for box in way}
    current = {master_of[row["wrapping_key_id"], row["current_version"]] for row in found["masters"]}
    masters = {box: shown for box, shown in masters.items() if box in used | current}
    return Graph((masters, keks, versions), dict(ways))


def _masters(found: Mapping[str, Any]) -> tuple[dict[Hashable, Box], dict[Any, Hashable]]:
    """Return the boxes of master keys, and the box of each version of each."""
    boxes: dict[Hashable, Box] = {}
    weights: dict[tuple[str, Any], tuple[bool, int]] = {}
    for master in found["masters"]:
        key_id, current = master["wrapping_key_id"], master["current_version"]
        weights.setdefault((key_id, current), (True, 0))
        for held in reversed(master["versions"]):
            weights[key_id, held["version"]] = (held["version"] == current, held["keks"] or bool(held["data_keys"]))
    for key in found["keys"]:
        weights.setdefault((key["wrapping_key_id"], key["master_version"]), (False, 1))
    room = len(weights) if len(weights) <= MASTERS else MASTERS - 1
    chosen = set(sorted(weights, key=lambda one: weights[one], reverse=True)[:room])
    of: dict[Any, Hashable] = {}
    for one in weights:
        key_id, version = one
        if one not in chosen:
            of[one] = "masters"
            continue
        of[one] = ("master", *one)
        what = "a version that the KMS does not name" if version is None else f"version {version}"
        current = weights[one][0]
        boxes[of[one]] = Box(key_id, f"{what}{', current' if current else ''}", "active" if current else "retired")
    if len(weights) > room:
        boxes["masters"] = Box(count(len(weights) - room, "other version"), "of master keys", "group")
    return boxes, of


def _keks(
    found: Mapping[str, Any], master_of: Mapping[Any, Hashable]
) -> tuple[dict[Hashable, Box], dict[Any, Hashable]]:
    """Return the boxes of KEKs, and the box of each KEK."""
    keys = {key["key_id"]: key for key in reversed(found["keys"])}
    lost = {row["key_id"] for row in found["opens"]} - keys.keys()
    few = len(keys) + len(lost) <= KEKS
    order = sorted(keys.values(), key=lambda key: (key["state"] == "active", key["data_keys"]), reverse=True)
    chosen = {key["key_id"] for key in (order if few else order[: KEKS - 4])}
    boxes: dict[Hashable, Box] = {}
    of: dict[Any, Hashable] = {}
    groups: dict[tuple[str, bool], list[Mapping[str, Any]]] = defaultdict(list)
    for key_id, key in keys.items():
        if key_id in chosen:
            of[key_id] = ("kek", key_id)
            boxes[of[key_id]] = Box(key_id, _about(key), kind_of(key, found))
        else:
            group = kind_of(key, found), bool(key["needed_by_versions"])
            of[key_id] = ("keks", *group)
            groups[group].append(key)
    for (kind, needed), members in sorted(groups.items()):
        first, last = min(key["created_ms"] for key in members), max(key["created_ms"] for key in members)
        made = day(first) if day(first) == day(last) else f"{day(first)} to {day(last)}"
        words = {"lapsed": "active KEK past the policy", "active": "other active KEK"}.get(kind, f"{kind} KEK")
        name = _plural(len(members), words)
        boxes["keks", kind, needed] = Box(name, f"{made}{'' if needed else ', not needed'}", kind)
    for key_id in lost:
        of[key_id] = "lost" if not few else ("kek", key_id)
        boxes[of[key_id]] = Box(key_id if few else count(len(lost), "KEK"), "not in the key store", "missing")
    return boxes, of


def _plural(number: int, words: str) -> str:
    return f"{number:,} {words}" if number == 1 else f"{number:,} {words.replace('KEK', 'KEKs')}"


def _about(key: Mapping[str, Any]) -> str:
    parts = [key["state"]]
    parts += [] if key["double_wrap"] else ["single wrap"]
    parts += ["columns"] if key["for_columns"] else []
    parts += [f"{key['age_days']:,.0f} days"]
    parts += [key["scope"]] if key["scope"] else []
    return ", ".join(parts)


def kind_of(key: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return "retired", "active", or "lapsed": older, or used more, than the policy allows."""
    if key["state"] != "active":
        return "retired"
    ends, left = key["lifetime_ends_ms"], key["uses_left"]
    return "lapsed" if (ends is not None and ends <= found["time_ms"]) or left == 0 else "active"


def _versions(found: Mapping[str, Any]) -> tuple[dict[Hashable, Box], dict[Any, Hashable]]:
    """Return the boxes of the dataset's versions, and the box of each version."""
    rows: Sequence[Mapping[str, Any]] = found["versions"]
    single = len(rows) if len(rows) <= VERSIONS else VERSIONS - RANGES
    boxes: dict[Hashable, Box] = {}
    of: dict[Any, Hashable] = {}
    for row in reversed(rows[len(rows) - single :]):
        of[row["number"]] = ("version", row["number"])
        newest = row["number"] == found["version"]
        what = f"{row['operation']}, {count(row['files'], 'file')}"
        boxes[of[row["number"]]] = Box(f"version {row['number']}", what, "active" if newest else "retired")
    older = rows[: len(rows) - single]
    size = -(-len(older) // RANGES) or 1
    for start in reversed(range(0, len(older), size)):
        part = older[start : start + size]
        first, last = part[0]["number"], part[-1]["number"]
        for row in part:
            of[row["number"]] = ("versions", first)
        name = f"{first} to {last}" if first != last else f"version {first}"
        boxes["versions", first] = Box(name, count(len(part), "version"), "group")
    for row in found["opens"]:
        of.setdefault(row["version"], ("version", row["version"]))
    return boxes, of
