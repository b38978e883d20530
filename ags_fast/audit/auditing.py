"""The keys of a dataset, and what depends on them. Nothing here changes anything.

`key_status` is for every day. `audit` says more, may open every table for it, and adds the steps of the runbook.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from ags_fast._types import Event, check_choice
from ags_fast.audit import runbook
from ags_fast.audit.report import Report
from ags_fast.audit.survey import Master, Survey
from ags_fast.dataset.access import Access
from ags_fast.dataset.entries import chosen_files
from ags_fast.dataset.kinds import clock_ms
from ags_fast.dataset.policy import DAY_MS
from ags_fast.dataset.rows import shown
from ags_fast.keys.entry import RETIRES_MS, REWRAPPED_MS, SCOPE, SUCCESSOR, for_columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.keys.entry import KeyEntry
    from ags_fast.keys.kms import Kms


NAMED = 8  # things that a sentence names


def key_status(
    dataset: Folder,
    *,
    kms: Kms | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """Show the keys of a dataset, what needs each key, and when each ends.

    No table is opened unless its files have key material.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        kms: The properties of a KMS, or a client; None: as the default profile says.
        min_version: Refuse a dataset whose newest version is older.
        pin: Refuse a dataset whose newest version does not descend from the version that this pin (see
            `JobResult.pin`) names.
        key_store: Where the dataset's keys are; None: in the dataset.
        storage_options: Options for fsspec.

    Returns:
        A dict of text, numbers, lists and dicts, as JSON has them. A notebook shows it as tables.

        - ``keys``: of each KEK its kind, state, dates (milliseconds since 1970) and age, what is left of the lifetime
          and uses that the dataset's policy allows, the version of the master key that wraps it where the KMS tells
          (``master_version``), the versions and open jobs that need it, and how many data keys it wraps in the newest
          version.
        - ``masters``: the master keys, which version of each wraps now, and how many KEKs each version wraps.
          ``key_material``: how many data keys of the newest version each version opens by key material in files.
        - ``versions``: the versions, and from when on the policy lets jobs expire each.
        - ``open_jobs``, ``policy``.
        - ``unread``: what could not be read, and why. The rest may then be incomplete.
        - ``tables``, ``tables_opened``: the number of tables of files, and of those that had to be opened.

    Raises:
        FileNotFoundError: There is no dataset.
        IntegrityError: Something in the dataset was changed, or it does not descend from the pin.
        PolicyError: The dataset is older than `min_version`.
        ConcurrentChangeError: The dataset changes faster than it can be read.
        KeyAccessError: The KMS refuses what is needed to open the dataset.
    """
    snapshot = Access.of(dataset, kms, key_store, storage_options, min_version=min_version, pin=pin).open()
    return Report(_status(Survey(snapshot.log), "status"))


def _status(survey: Survey, operation: str, holders: Iterable[Master] = ()) -> dict[str, Any]:
    head, now = survey.head, clock_ms()
    return {
        "operation": operation,
        "dataset": shown(survey.log.store.url),
        "dataset_id": head.dataset_id,
        "time_ms": now,
        "version": head.number,
        "policy": head.policy.to_json(),
        "masters": _masters(survey, {master.key_id for master in holders}),
        "keys": _keys(survey, now),
        "versions": _versions(survey),
        "open_jobs": [
            {"job_id": job.job_id, "operation": job.operation, "lives": job.lives, "keys": sorted(job.keys)}
            for job in survey.jobs
        ],
        "tables": len(survey.tables()),
        "tables_opened": len(survey.opened),
        "unread": list(survey.unread),
    }


def _keys(survey: Survey, now: int) -> list[dict[str, Any]]:
    head, policy, counts = survey.head, survey.head.policy, survey.wraps(survey.head.files)
    needed = [(entry.number, survey.needed(entry)) for entry in survey.entries]

    def row(key: KeyEntry) -> dict[str, Any]:
        wraps = key.state == "active" and key.double_wrap
        return {
            "key_id": key.key_id,
            "wrapping_key_id": key.wrapping_key_id,
            "master_version": survey.version_of(key),
            "double_wrap": key.double_wrap,
            "for_columns": for_columns(key),
            "scope": key.properties.get(SCOPE),
            "state": key.state,
            "created_ms": key.created_ms,
            "age_days": round(max(0, now - key.created_ms) / DAY_MS, 1),
            "lifetime_ends_ms": int(key.created_ms + policy.kek_lifetime_days * DAY_MS) if wraps else None,
            "uses": key.uses,
            "uses_left": max(0, policy.kek_uses - key.uses) if wraps else None,
            "data_keys": counts[key.key_id],
            "needed_by_versions": [number for number, key_ids in needed if key.key_id in key_ids],
            "needed_by_jobs": [job.job_id for job in survey.jobs if key.key_id in job.keys],
            "successor": key.properties.get(SUCCESSOR),
            "retires_ms": _number(key, RETIRES_MS),
            "rewrapped_ms": _number(key, REWRAPPED_MS),
        }

    return sorted(map(row, head.keys.values()), key=lambda row: (row["created_ms"], row["key_id"]))


def _number(key: KeyEntry, name: str) -> int | None:
    return int(key.properties[name]) if name in key.properties else None


def _masters(survey: Survey, also: set[str]) -> list[dict[str, Any]]:
    counts: dict[str, Counter[str | None]] = defaultdict(Counter)
    for key in survey.head.keys.values():
        counts[key.wrapping_key_id].update([survey.version_of(key)] if key.double_wrap else ())
    material: dict[str, Counter[str | None]] = defaultdict(Counter)
    for master, count in survey.counted(survey.head, material=True).items():
        material[master.key_id][master.version] += count

    def rows(found: Counter[str | None], name: str) -> list[dict[str, Any]]:
        return [{"version": v, name: n} for v, n in sorted(found.items(), key=lambda item: _order(item[0]))]

    return [
        {
            "wrapping_key_id": key_id,
            "current_version": survey.current.get(key_id),
            "keks": rows(counts[key_id], "keks"),
            "key_material": rows(material[key_id], "data_keys"),
            "refused": survey.refused.get(key_id),
        }
        for key_id in sorted(counts.keys() | material.keys() | also)
    ]


def _order(version: str | None) -> tuple[bool, int, str]:
    """Sort versions as people count: 9 before 10."""
    text = version or ""
    return version is None, len(text) if text.isdecimal() else 0, text


def _versions(survey: Survey) -> list[dict[str, Any]]:
    policy, entries, same = survey.head.policy, survey.entries, set(survey.head.same)
    rows = []
    for i, entry in enumerate(entries):
        expires, newer = None, [later for later in entries[i + 1 :] if later.number not in same]
        if policy.keep is not None and len(newer) >= policy.keep:
            # When `keep` newer versions were there, and the version was as old as the policy wants.
            oldest = int(entry.time_ms + (policy.keep_days or 0) * DAY_MS)
            expires = max(newer[policy.keep - 1].time_ms, oldest)
        rows.append(
            {
                "number": entry.number,
                "operation": entry.operation,
                "job_id": entry.job_id,
                "time_ms": entry.time_ms,
                "files": entry.count,
                "source_length": entry.nbytes,
                "key_id": entry.sealer,
                "expires_ms": expires,
            }
        )
    return rows


def audit(
    dataset: Folder,
    *,
    kms: Kms | None = None,
    event: Event | None = None,
    paths: str | Sequence[str] | None = None,
    all_events: bool = False,
    min_version: int | None = None,
    pin: str | None = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """Show what depends on which key, which versions of master keys may be destroyed, and what to do now.

    Tables that name keys in single wrap are opened, since only the wrapped keys in them tell what wrapped them. For an
    event, all tables may be opened. Nothing is changed, and nothing is destroyed.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        kms: The properties of a KMS, or a client; None: as the default profile says.
        event: What has happened; None: nothing. ``"planned"``: a regular rotation of the master key.
            ``"kek-leaked"``, ``"dek-leaked"`` or ``"mek-leaked"``: somebody may have such a key.
        paths: For ``"dek-leaked"``: patterns of `fnmatch` of the files whose data keys may be known; None: all files.
        all_events: Also return ``events``: for each event, the steps that it would call for.
        min_version: Refuse a dataset whose newest version is older.
        pin: Refuse a dataset whose newest version does not descend from the version that this pin (see
            `JobResult.pin`) names.
        key_store: Where the dataset's keys are; None: in the dataset.
        storage_options: Options for fsspec.

    Returns:
        What `key_status` returns, and more.

        - ``opens``: for each KEK and version, the number of data keys and tables that the KEK opens, and whether it
          opens the version's document.
        - in ``masters``, ``versions``: what each version of a master key holds, ``may_be_destroyed`` (True, False, or
          None: it cannot be told), ``why``, and ``first``: what to run before that version may be destroyed.
          ``others``: of all versions that are not listed. Of the master key as a whole, ``may_be_destroyed`` and
          ``why`` likewise. ``listed``: the versions that the KMS lists, with dates and states, as far as it tells this
          caller.
        - ``steps``: what `event` calls for; without an event, what is due. Each has a ``name``; the ``function`` of
          `ags_fast.jobs` to call and its ``arguments`` (``older_than`` in days); ``only_if``, the name of a condition
          or None; ``about``, the ids of the jobs or master keys that it deals with; ``kms_calls`` by operation; and
          what the function writes and removes. The function "new_version" is yours to do in the KMS: give the master
          key `key_id` a new version. The function None is a step that only people can do. ``first`` has items with a
          ``function`` and ``arguments``, too. `ags-fast keys audit` prints each as a sentence and a command.

    Raises:
        ValueError: `event` is unknown, or `paths` are given without the event "dek-leaked".
        FileNotFoundError: There is no dataset, or a pattern of `paths` matches no file.
        IntegrityError: Something in the dataset was changed, or it does not descend from the pin.
        PolicyError: The dataset is older than `min_version`.
        ConcurrentChangeError: The dataset changes faster than it can be read.
        KeyAccessError: The KMS refuses what is needed to open the dataset.
    """
    check_choice("event", event, Event, None)
    if paths is not None and event != "dek-leaked":
        raise ValueError("paths are for event='dek-leaked': the files whose data keys somebody may have")
    snapshot = Access.of(dataset, kms, key_store, storage_options, min_version=min_version, pin=pin).open()
    survey = Survey(snapshot.log, deep=True)
    if paths is not None:
        chosen_files([row for table in survey.head.files for row in survey.rows(table)], paths)
    holders = _holders(survey)
    result = _status(survey, "audit", holders)
    for row in result["masters"]:
        listed = survey.listed.get(row["wrapping_key_id"], [])
        row["listed"] = [one._asdict() for one in sorted(listed, key=lambda one: one.made_ms or 0)]
        row |= _verdicts(survey, row["wrapping_key_id"], holders)
    now = result["time_ms"]
    facts = runbook.Facts(
        survey,
        now,
        may_expire=any(row["expires_ms"] is not None and row["expires_ms"] <= now for row in result["versions"]),
        kms_wraps_before=any(held.data_keys or held.key_material for held in holders.values()),
        paths=[paths] if isinstance(paths, str) else paths,
    )
    events = {name: runbook.steps(name, facts) for name in runbook.EVENTS} if all_events else None
    return Report(
        {
            **result,
            "opens": _opens(survey),
            "event": event,
            "steps": runbook.steps(event, facts),
            **({"events": events} if events else {}),
            "tables_opened": len(survey.opened),
        }
    )


def _opens(survey: Survey) -> list[dict[str, Any]]:
    """Return what each KEK opens, by version."""
    rows = []
    for entry in survey.entries:
        data_keys, tables = survey.wraps(entry.files), Counter(table.key_id for table in entry.files)
        rows += [
            {
                "key_id": key_id,
                "version": entry.number,
                "data_keys": data_keys[key_id],
                "tables": tables[key_id],
                "document": key_id == entry.sealer,
            }
            for key_id in sorted(survey.needed(entry))
        ]
    return sorted(rows, key=lambda row: (row["key_id"], row["version"]))


class _Held:
    """What depends on a version of a master key."""

    def __init__(self) -> None:
        self.keks: list[KeyEntry] = []  # of the newest version
        self.data_keys: dict[int, int] = {}  # by version of the dataset; of which the KMS wraps the keys
        self.key_material: dict[int, int] = {}  # by version of the dataset: data keys that it opens in files
        self.jobs: set[str] = set()
        self.superseded = 0  # KEKs that it has wrapped in older versions only

    def __bool__(self) -> bool:
        return bool(self.keks or self.data_keys or self.key_material or self.jobs)


def _holders(survey: Survey) -> dict[Master, _Held]:
    held: dict[Master, _Held] = defaultdict(_Held)
    for key in survey.head.keys.values():
        if key.double_wrap:
            held[Master(key.wrapping_key_id, survey.version_of(key))].keks.append(key)
    for entry in survey.entries:
        for master, count in survey.counted(entry).items():
            held[master].data_keys[entry.number] = count
        for master, count in survey.counted(entry, material=True).items():
            held[master].key_material[entry.number] = count
    for job in survey.jobs:
        new = {Master(key.wrapping_key_id, survey.version_of(key)) for key in job.new if key.double_wrap}
        for master in new | job.masters:
            held[master].jobs.add(job.job_id)
    for master, count in survey.superseded().items():
        held[master].superseded = count
    return held


def _verdicts(survey: Survey, key_id: str, holders: Mapping[Master, _Held]) -> dict[str, Any]:
    """Return what depends on a master key and on each of its versions, and whether each may be destroyed."""
    current = survey.current.get(key_id)
    mine = {master: held for master, held in holders.items() if master.key_id == key_id}
    if current is not None:
        mine.setdefault(Master(key_id, current), _Held())
    unknown = mine.get(Master(key_id, None))
    doubts = []  # because of which nothing can be said of what nothing is known to depend on
    if survey.unread:
        doubts.append(f"something could not be read: {survey.unread[0]}")
    if unknown:
        doubts.append(f"the KMS does not tell which version wrapped {_list(_what(unknown))}")
    rows = []
    for master, held in sorted(mine.items(), key=lambda item: _order(item[0].version)):
        is_current = None if current is None else master.version == current
        verdict, why = _verdict(master, held, is_current, unknown, doubts)
        rows.append(
            {
                "version": master.version,
                "current": is_current,
                "keks": len(held.keks),
                "data_keys": _by_version(held.data_keys),
                "key_material": _by_version(held.key_material),
                "open_jobs": sorted(held.jobs),
                "superseded": held.superseded,
                "may_be_destroyed": verdict,
                "why": why,
                "first": _first(survey, key_id, master.version == current, held) if held else [],
            }
        )
    if any(mine.values()):
        whole, why = False, "something of this dataset needs one of its versions"
    elif survey.unread:
        whole, why = None, doubts[0]
    else:
        whole, why = True, "nothing of this dataset is under it, as far as this name of it goes"
    return {"versions": rows, "others": None if doubts else True, "may_be_destroyed": whole, "why": why}


def _by_version(counts: Mapping[int, int]) -> list[dict[str, int]]:
    return [{"version": number, "data_keys": count} for number, count in counts.items()]


def _verdict(
    master: Master, held: _Held, is_current: bool | None, unknown: _Held | None, doubts: Sequence[str]
) -> tuple[bool | None, str]:
    """Return whether a version of a master key may be destroyed, and why."""
    if master.version is None:
        over = "only KEKs of older versions, which are wrapped anew, were wrapped by it"
        return None, doubts[-1] if unknown else over
    if reasons := _what(held):
        return False, f"it opens {_list(reasons)}"
    if is_current:
        return False, "it is the current one: what is wrapped next is wrapped by it"
    if doubts:
        return None, _list(doubts)
    why = "nothing of this dataset needs it"
    if held.superseded:
        keks = _count(held.superseded, "KEK")
        why += f"; older versions still have {keks} as it wrapped them, until expire removes these"
    return True, why


def _what(held: _Held) -> list[str]:
    """Return what depends on a version of a master key, as texts."""
    reasons = []
    if held.keks:
        names = ", ".join(entry.key_id for entry in held.keks[:NAMED])
        more = ", …" if len(held.keks) > NAMED else ""
        reasons.append(f"{_count(len(held.keks), 'KEK')} ({names}{more})")
    if held.data_keys:
        most = max(held.data_keys.values())
        reasons.append(f"{_count(most, 'data key')} of {_versions_named(list(held.data_keys))}")
    if held.key_material:
        count, versions = _count(max(held.key_material.values()), "data key"), list(held.key_material)
        reasons.append(f"{count} in the key material of files of {_versions_named(versions)}")
    if held.jobs:
        reasons.append(f"keys of the open job{'s' * (len(held.jobs) > 1)} {', '.join(sorted(held.jobs))}")
    return reasons


def _versions_named(numbers: Sequence[int]) -> str:
    if len(numbers) > NAMED:
        return f"the dataset's {len(numbers)} versions from {min(numbers)} to {max(numbers)}"
    return f"the dataset's version{'s' * (len(numbers) > 1)} {_list([str(number) for number in numbers])}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def _list(items: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1]))) if items else "nothing"


def _first(survey: Survey, key_id: str, is_current: bool, held: _Held) -> list[dict[str, Any]]:
    """Return what to run so that nothing needs that version any more."""
    newest, policy = survey.head.number, survey.head.policy
    data_keys, material = newest in held.data_keys, newest in held.key_material
    actions: list[tuple[bool, str, dict[str, Any]]] = [
        (bool(held.jobs), "sweep", {}),
        (is_current, "new_version", {"key_id": key_id}),
        (data_keys, "rotate", {"what": "kek", "from_key_id": key_id}),  # which wraps the KEKs that stay, too
        (bool(held.keks) and not data_keys, "rotate", {"what": "mek", "from_key_id": key_id}),
        (material, "rekey_files", {}),
        (bool(held.data_keys or held.key_material), "expire", runbook.newest_only(policy)),
    ]
    return [{"function": function, "arguments": arguments} for needed, function, arguments in actions if needed]
