"""What the keys of a dataset are, what depends on them, and what an event calls for. Nothing here changes anything.

`key_status` is what people look at every day. `audit` says more, and may open every manifest for it.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from ags_fast.cli.kms import kms_options
from ags_fast.dataset.entries import chosen_files
from ags_fast.dataset.keks import Want
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.policy import DAY_MS
from ags_fast.jobs.costs import Forecast
from ags_fast.jobs.results import shown
from ags_fast.jobs.survey import Master, Survey
from ags_fast.keys.entry import RETIRES_MS, REWRAPPED_MS, SCOPE, SUCCESSOR, for_columns, retires_ms
from ags_fast.keys.kms import KMS_TYPE, KmsClient, as_kms, local

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ags_fast.dataset.snapshot import Snapshot
    from ags_fast.jobs.costs import Cost
    from ags_fast.keys.entry import KeyEntry


EVENTS = ("planned", "kek-leaked", "dek-leaked", "mek-leaked")
NAMED = 8  # things that a sentence names


def key_status(
    dataset: Any,
    *,
    kms: KmsClient | Mapping[str, str],
    min_version: int | None = None,
    pin: str | None = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The keys of `dataset`, what needs them, and what ends when: text, numbers, lists and dicts, as JSON has them.

    - ``keys``: of each KEK its kind, state, dates (milliseconds since 1970) and age, what is left of its lifetime and
      uses as the dataset's policy has them, the version of the master key that wraps it where the KMS tells
      (``master_version``), the versions and open jobs that need it, and how many data keys it wraps in the newest;
    - ``masters``: the master keys, what version of each wraps now, and how many KEKs each version wraps;
    - ``versions``: what there is, and since when the policy lets jobs expire it;
    - ``open_jobs``, ``policy``, ``unread``: what could not be read, and why, so that the rest may lack something.

    No manifest is opened unless the reference to it does not name its keys: ``manifests_opened`` counts those.
    """
    opened = Ledger.open(dataset, as_kms(kms), storage_options, key_store, pin=pin, min_version=min_version)
    return _status(Survey(opened), "status")


def _status(survey: Survey, operation: str) -> dict[str, Any]:
    opened, head = survey.opened, survey.snapshot.head
    now = time.time_ns() // 1_000_000
    manifests = survey.snapshot.manifests()
    return {
        "operation": operation,
        "dataset": shown(opened.store.url),
        "dataset_id": opened.id,
        "time_ms": now,
        "version": head.number if head else None,
        "policy": survey.snapshot.policy.to_json(),
        "masters": _masters(survey),
        "keys": _keys(survey, now),
        "versions": _versions(survey),
        "open_jobs": [
            {"job_id": job.job_id, "operation": job.operation, "lives": job.lives, "keys": sorted(job.keys)}
            for job in survey.jobs
        ],
        "manifests": len(manifests),
        "manifests_opened": len(survey.opened_tables & manifests.keys()),
        "unread": list(survey.unread),
    }


def _keys(survey: Survey, now: int) -> list[dict[str, Any]]:
    needed, policy = _needed_by(survey.snapshot), survey.snapshot.policy
    counts: Counter[str] = Counter()
    for ref in survey.snapshot.head.manifests if survey.snapshot.head else ():
        counts += survey.wraps(ref)
    rows = []
    for entry in survey.keys.values():
        wraps = entry.state == "active" and entry.double_wrap
        rows.append(
            {
                "key_id": entry.key_id,
                "wrapping_key_id": entry.wrapping_key_id,
                "master_version": survey.version_of(entry),
                "double_wrap": entry.double_wrap,
                "for_columns": for_columns(entry),
                "scope": entry.properties.get(SCOPE),
                "state": entry.state,
                "created_ms": entry.created_ms,
                "age_days": round(max(0, now - entry.created_ms) / DAY_MS, 1),
                "lifetime_ends_ms": int(entry.created_ms + policy.kek_lifetime_days * DAY_MS) if wraps else None,
                "uses": entry.uses,
                "uses_left": max(0, policy.kek_uses - entry.uses) if wraps else None,
                "data_keys": counts[entry.key_id],
                "needed_by_versions": needed.get(entry.key_id, []),
                "needed_by_jobs": [job.job_id for job in survey.jobs if entry.key_id in job.keys],
                "successor": entry.properties.get(SUCCESSOR),
                "retires_ms": _number(entry, RETIRES_MS),
                "rewrapped_ms": _number(entry, REWRAPPED_MS),
            }
        )
    return sorted(rows, key=lambda row: (row["created_ms"], row["key_id"]))


def _needed_by(snapshot: Snapshot) -> dict[str, list[int]]:
    """The versions that need each key."""
    needed: dict[str, list[int]] = defaultdict(list)
    for version in snapshot.versions:
        for key_id in snapshot.keys_of(version):
            needed[key_id].append(version.number)
    return needed


def _number(entry: KeyEntry, name: str) -> int | None:
    return int(entry.properties[name]) if name in entry.properties else None


def _masters(survey: Survey) -> list[dict[str, Any]]:
    counts: dict[str, Counter[str | None]] = defaultdict(Counter)
    for entry in survey.keys.values():
        counts[entry.wrapping_key_id].update([survey.version_of(entry)] if entry.double_wrap else ())
    return [
        {
            "wrapping_key_id": key_id,
            "current_version": survey.current.get(key_id),
            "keks": [{"version": v, "keks": n} for v, n in sorted(keks.items(), key=lambda item: _order(item[0]))],
            "refused": survey.refused.get(key_id),
        }
        for key_id, keks in sorted(counts.items())
    ]


def _order(version: str | None) -> tuple[bool, int, str]:
    """As people count: 9 before 10."""
    text = version or ""
    return version is None, len(text) if text.isdecimal() else 0, text


def _versions(survey: Survey) -> list[dict[str, Any]]:
    policy, versions = survey.snapshot.policy, survey.versions
    rows = []
    for i, version in enumerate(versions):
        expires = None
        if policy.keep is not None and i < len(versions) - policy.keep:
            # When so many newer ones were there, and it was as old as it has to be.
            expires = max(versions[i + policy.keep].time_ms, int(version.time_ms + (policy.keep_days or 0) * DAY_MS))
        rows.append(
            {
                "number": version.number,
                "operation": version.operation,
                "job_id": version.job_id,
                "time_ms": version.time_ms,
                "files": version.files,
                "plain_length": version.plain_length,
                "key_id": version.key_id,
                "expires_ms": expires,
            }
        )
    return rows


NOTES = (
    "All of this is about this dataset, as it is now. Other datasets may use the same master keys: audit them, too. A "
    "copy of it that was made earlier needs what the dataset needed then.",
    "Calls of the KMS are those of one process that does all of the work and knows no key yet. Each other process that "
    "helps (Spark tasks, local workers) unwraps each KEK that it needs once more.",
    "Nothing here destroys a version of a master key. That is yours to do, in the KMS: disable it first, read what you "
    "need to be able to read, and destroy it later.",
)
LEAK_NOTE = (
    "Nothing calls back what was copied. An old copy of _ags, with the keys that leaked, opens the files in it, and "
    "those here whose data keys are still the same: only rekey changes these."
)


def audit(
    dataset: Any,
    *,
    kms: KmsClient | Mapping[str, str],
    event: str | None = None,
    paths: str | Sequence[str] | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What depends on which key, whether versions of master keys may be destroyed, and what to do now. As `key_status`,
    and more:

    - ``opens``: for each KEK, how many data keys, manifests and version documents it opens, by version;
    - in ``masters``, ``versions``: what each version of a master key holds, ``may_be_destroyed`` (True, False, or None:
      it cannot be told), ``why``, and ``first``: commands to run before it may be. ``others``: of all versions that are
      not listed. Of the master key as a whole, ``may_be_destroyed`` and ``why`` likewise. ``listed``: the versions that
      the KMS lists, or the rotations that made them, with dates and states, as far as it tells this caller;
    - ``steps``: what `event` calls for, or without one what is due: text, ``command``, ``kms_calls`` (by operation) and
      what the command writes and removes;
    - ``notes``: what else is to be known.

    event: ``"planned"``, a regular rotation of the master key; ``"kek-leaked"``, ``"dek-leaked"`` (with `paths`, the
    patterns of the files whose keys those are) or ``"mek-leaked"``: somebody may have such a key.

    Manifests that name keys in single wrap are opened, for only the wrapped keys in them tell what wrapped them; for an
    event, all manifests may be. Nothing is changed, and nothing destroyed.
    """
    if event is not None and event not in EVENTS:
        raise ValueError(f"event must be {', '.join(map(repr, EVENTS))} or None, not {event!r}")
    if paths is not None and event != "dek-leaked":
        raise ValueError("paths are for event='dek-leaked': the files whose data keys somebody may have")
    opened = Ledger.open(dataset, as_kms(kms), storage_options, key_store, pin=pin, min_version=min_version)
    survey = Survey(opened, deep=True)
    if paths is not None:
        head = opened.committed(survey.snapshot.head)
        chosen_files([entry for ref in head.manifests for entry in survey.entries(ref)], paths)
    shell = _Shell(opened, dataset, key_store)
    result = _status(survey, "audit")
    holders = _holders(survey)
    for row in result["masters"]:
        listed = survey.listed.get(row["wrapping_key_id"], [])
        row["listed"] = [one._asdict() for one in sorted(listed, key=lambda one: one.made_ms or 0)]
        row |= _verdicts(survey, shell, row["wrapping_key_id"], holders)
    known = {row["wrapping_key_id"] for row in result["masters"]}
    for key_id in sorted({master.key_id for master in holders} - known):
        row = {"wrapping_key_id": key_id, "current_version": None, "keks": [], "refused": survey.refused.get(key_id)}
        row["listed"] = []
        result["masters"].append(row | _verdicts(survey, shell, key_id, holders))
    steps = _Steps(survey, shell, holders, [paths] if isinstance(paths, str) else paths)
    chosen = {
        None: steps.due,
        "planned": steps.planned,
        "kek-leaked": steps.kek_leaked,
        "dek-leaked": steps.dek_leaked,
        "mek-leaked": steps.mek_leaked,
    }[event]()
    return {
        **result,
        "opens": _opens(survey),
        "event": event,
        "steps": chosen,
        "notes": [*NOTES, *([LEAK_NOTE] if event in EVENTS[1:] else [])],
        "manifests_opened": len(survey.opened_tables & survey.snapshot.manifests().keys()),
    }


def _opens(survey: Survey) -> list[dict[str, Any]]:
    rows = []
    for version in survey.versions:
        data_keys: Counter[str] = Counter()
        for ref in version.manifests:
            data_keys += survey.wraps(ref)
        manifests = Counter(ref.key_id for ref in version.manifests)
        rows += [
            {
                "key_id": key_id,
                "version": version.number,
                "data_keys": data_keys[key_id],
                "manifests": manifests[key_id],
                "document": key_id == version.key_id,
            }
            for key_id in sorted({*data_keys, *manifests, version.key_id})
        ]
    return sorted(rows, key=lambda row: (row["key_id"], row["version"]))


class _Held:
    """What depends on a version of a master key."""

    def __init__(self) -> None:
        self.keks: list[KeyEntry] = []  # of the key store
        self.data_keys: dict[int, int] = {}  # by version of the dataset; of which the KMS wraps the keys
        self.jobs: set[str] = set()
        self.superseded = 0  # KEKs in objects that the key store no longer needs, as these say

    def __bool__(self) -> bool:
        return bool(self.keks or self.data_keys or self.jobs)


def _holders(survey: Survey) -> dict[Master, _Held]:
    held: dict[Master, _Held] = defaultdict(_Held)
    for entry in survey.keys.values():
        if entry.double_wrap:
            held[Master(entry.wrapping_key_id, survey.version_of(entry))].keks.append(entry)
    for version in survey.versions:
        counts: Counter[Master] = Counter()
        for ref in version.manifests:
            if ref.path not in survey.closed:
                counts += survey.kms_wraps(ref)
        for master, count in counts.items():
            held[master].data_keys[version.number] = count
    for job in survey.jobs:
        masters = [Master(key.wrapping_key_id, survey.version_of(key)) for key in job.keks if key.double_wrap]
        for ref in job.tables:
            masters += survey.kms_wraps(ref) if ref.path not in survey.closed else ()
        for master in masters:
            held[master].jobs.add(job.job_id)
    for master, count in survey.superseded().items():
        held[master].superseded = count
    return held


def _verdicts(survey: Survey, shell: _Shell, key_id: str, holders: Mapping[Master, _Held]) -> dict[str, Any]:
    """Of a master key, and of each of its versions: what depends on it, and whether it may be destroyed."""
    current = survey.current.get(key_id)
    mine = {master: held for master, held in holders.items() if master.key_id == key_id}
    if current is not None:
        mine.setdefault(Master(key_id, current), _Held())
    unknown = mine.get(Master(key_id, None))
    running = [job.job_id for job in survey.jobs if job.lives is not False]
    doubts = []  # because of which nothing can be said of what nothing is known to depend on
    if survey.unread:
        doubts.append(f"something could not be read: {survey.unread[0]}")
    if unknown:
        doubts.append(f"the KMS does not tell which version wrapped {_list(_what(unknown))}")
    rows = []
    for master, held in sorted(mine.items(), key=lambda item: _order(item[0].version)):
        reasons = _what(held)
        if master.version is None:
            verdict: bool | None = None
            why = doubts[-1] if unknown else "only what the key store no longer needs was wrapped by it"
        elif reasons:
            verdict, why = False, f"it opens {_list(reasons)}"
        elif master.version == current:
            verdict, why = False, "it is the current one: what is wrapped next is wrapped by it"
        elif doubts:
            verdict, why = None, _list(doubts)
        else:
            verdict, why = True, "nothing of this dataset needs it"
            if held.superseded:
                why += f": {_count(held.superseded, 'KEK')} in what the key store no longer needs, and expire removes"
            if running:
                why += f". Let {', '.join(running)} end first: its workers may know KEKs as they were wrapped before"
        rows.append(
            {
                "version": master.version,
                "current": None if current is None else master.version == current,
                "keks": len(held.keks),
                "data_keys": [{"version": number, "data_keys": count} for number, count in held.data_keys.items()],
                "open_jobs": sorted(held.jobs),
                "superseded": held.superseded,
                "may_be_destroyed": verdict,
                "why": why,
                "first": _first(survey, shell, key_id, master.version == current, held) if held else [],
            }
        )
    needed = [reason for held in mine.values() for reason in _what(held)]
    if needed:
        whole, why = False, "something of this dataset needs one of its versions"
    elif survey.unread:
        whole, why = None, doubts[0]
    else:
        whole, why = True, "nothing of this dataset is under it, as far as this name of it goes"
    return {
        "versions": rows,
        "others": None if doubts else True,
        "may_be_destroyed": whole,
        "why": why,
    }


def _what(held: _Held) -> list[str]:
    """What depends on it, for people."""
    reasons = []
    if held.keks:
        names = ", ".join(entry.key_id for entry in held.keks[:NAMED])
        more = ", …" if len(held.keks) > NAMED else ""
        reasons.append(f"{_count(len(held.keks), 'KEK')} of the key store ({names}{more})")
    if held.data_keys:
        most = max(held.data_keys.values())
        reasons.append(f"{_count(most, 'data key')} of {_versions_named(list(held.data_keys))}")
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


def _first(survey: Survey, shell: _Shell, key_id: str, is_current: bool, held: _Held) -> list[str]:
    """What to run before nothing needs that version any more."""
    commands = []
    if held.jobs:
        commands.append(shell.line("sweep"))
    if is_current:
        commands.append(shell.new_version(key_id))
    if held.keks:
        commands.append(shell.line("keys", "rotate", "--what", "mek", "--from-key-id", key_id))
    newest = survey.snapshot.head.number if survey.snapshot.head else 0
    if newest in held.data_keys:
        commands.append(shell.line("keys", "rotate", "--what", "kek", "--from-key-id", key_id))
    if held.data_keys:
        commands.append(shell.line("keys", "expire"))
    return commands


class _Shell:
    """Commands on the dataset as a shell takes them, with the options that say which KMS."""

    def __init__(self, opened: Ledger, dataset: Any, key_store: Any) -> None:
        self._dataset = dataset if isinstance(dataset, str) else shown(opened.store.url)
        if isinstance(dataset, os.PathLike):
            self._dataset = os.fspath(dataset)
        try:
            self.properties = opened.kms.properties
        except TypeError:  # an object of the caller's
            self.properties = {}
        self._options = kms_options(self.properties)
        if isinstance(key_store, str):
            self._options += ["--key-store", key_store]

    def line(self, command: str, *words: str) -> str:
        """command: such as ``rekey``, or ``keys`` with its operation as the next word."""
        names = [command]
        if command == "keys":
            names, words = [command, words[0]], words[1:]
        return shlex.join(["ags-fast", *names, self._dataset, *words, *self._options])

    def new_version(self, key_id: str) -> str:
        """What gives a master key a new version; where it is no command of ours, in words."""
        if self.properties.get(KMS_TYPE) != "local":
            return f"# in the KMS: give {key_id} a new version"
        ours = (KMS_TYPE, local.PATH, *local.SECRETS)
        _, path, *secret = kms_options({name: self.properties[name] for name in ours if name in self.properties})
        return shlex.join(["ags-fast", "keys", "create", path, key_id, "--new-version", *secret])


class _Steps:
    """What is to be done, in order. What each step costs is counted on what those before it leave."""

    def __init__(
        self, survey: Survey, shell: _Shell, holders: Mapping[Master, _Held], paths: Sequence[str] | None
    ) -> None:
        self.survey = survey
        self.shell = shell
        self.holders = holders
        self.paths = paths
        self.steps: list[dict[str, Any]] = []
        entries = survey.keys.values()
        self.masters = sorted({entry.wrapping_key_id for entry in entries if entry.state == "active"})
        counts: Counter[str] = Counter()
        for ref in survey.snapshot.head.manifests if survey.snapshot.head else ():
            counts += survey.wraps(ref)
        # Whether the KMS wraps data keys, of the newest version or of any.
        self.single = any(not entry.double_wrap and entry.state == "active" for entry in entries)
        self.single_before = any(held.data_keys for held in holders.values())
        # KEKs that --what double-wrap does not replace.
        self.others = any(
            entry.state == "active" and entry.double_wrap and Want.of(entry) != Want(entry.wrapping_key_id)
            for entry in entries
        )
        self.doubles_wrap = any(survey.keys[key_id].double_wrap for key_id in counts if key_id in survey.keys)

    def _add(
        self, text: str, command: str | None = None, cost: Cost | None = None, *, only_if: str | None = None
    ) -> None:
        step: dict[str, Any] = {"text": text, "only_if": only_if, "command": command}
        if cost is not None:
            step |= cost.to_json()
        self.steps.append(step)

    def _jobs(self) -> None:
        if dead := [job for job in self.survey.jobs if not job.lives]:
            names = ", ".join(job.job_id for job in dead)
            self._add(
                f"Resume what has died ({names}) by its own command with --resume, or give it up:",
                self.shell.line("sweep"),
            )

    def due(self) -> list[dict[str, Any]]:
        """Without an event: what time has brought about."""
        survey = self.survey
        now = time.time_ns() // 1_000_000
        self._jobs()
        stale = sorted(
            {
                entry.wrapping_key_id
                for entry in survey.keys.values()
                if entry.double_wrap
                and survey.current.get(entry.wrapping_key_id) is not None
                and survey.version_of(entry) not in (None, survey.current[entry.wrapping_key_id])
            }
        )
        forecast = Forecast(survey)
        if stale:
            self._add(
                f"Older versions of {_list(stale)} still wrap KEKs: wrap these by the current one.",
                self.shell.line("keys", "rotate", "--what", "mek"),
                forecast.rotate("mek"),
            )
        if self._worn(now):
            self._add(
                "A KEK is older, or has wrapped more keys, than the policy allows: replace it.",
                self.shell.line("keys", "rotate", "--what", "kek"),
                forecast.rotate("kek"),
            )
        needed = _needed_by(survey.snapshot).keys() | {key_id for job in survey.jobs for key_id in job.keys}
        over = any(
            entry.state == "retired" and entry.key_id not in needed and retires_ms(entry) <= now
            for entry in survey.keys.values()
        )
        if over or any(row["expires_ms"] is not None and row["expires_ms"] <= now for row in _versions(survey)):
            policy = survey.snapshot.policy
            words = ["--keep", str(policy.keep)] if policy.keep else ["--keep", str(max(1, len(survey.versions)))]
            if policy.keep_days is not None:
                words += ["--older-than", f"{policy.keep_days:g}"]
            self._add(
                "Something is there that nothing needs any more, or the policy does not keep: remove it.",
                self.shell.line("keys", "expire", *words),
                forecast.expire(keep=int(words[1]), days=policy.keep_days),
            )
        return self.steps

    def _worn(self, now: int) -> bool:
        policy = self.survey.snapshot.policy
        return any(
            entry.state == "active"
            and entry.double_wrap
            and (policy.outlived(entry.created_ms, now) or entry.uses >= policy.kek_uses)
            for entry in self.survey.keys.values()
        )

    def planned(self) -> list[dict[str, Any]]:
        """A master key is rotated by plan, or has been."""
        survey, shell = self.survey, self.shell
        self._jobs()
        done = {
            entry.wrapping_key_id
            for entry in survey.keys.values()
            if entry.double_wrap
            and survey.current.get(entry.wrapping_key_id) is not None
            and survey.version_of(entry) != survey.current[entry.wrapping_key_id]
        }
        for key_id in self.masters:
            if key_id not in done:
                self._add(f"Rotate the master key {key_id} in the KMS, unless that is done.", shell.new_version(key_id))
        forecast = Forecast(survey, rotated=set(self.masters) - done)
        if self.single:
            self._add(
                "Have the KMS wrap each data key anew. (--what double-wrap instead costs an unwrap for each, once, and "
                "then a rotation takes a call for each KEK.)",
                shell.line("keys", "rotate", "--what", "kek"),
                forecast.rotate("kek"),
            )
        elif self._worn(time.time_ns() // 1_000_000):
            self._add(
                "Replace the KEKs, too: one is older, or has wrapped more keys, than the policy allows.",
                shell.line("keys", "rotate", "--what", "kek"),
                forecast.rotate("kek"),
            )
        self._add(
            "Wrap the KEKs by the current version. Nothing but the key store is touched.",
            shell.line("keys", "rotate", "--what", "mek"),
            forecast.rotate("mek"),
        )
        if self.single_before:
            self._add(
                "Remove the versions before, whose data keys the old version of the master key has wrapped.",
                shell.line("keys", "expire"),
                forecast.expire(),
            )
        self._ask()
        return self.steps

    def kek_leaked(self) -> list[dict[str, Any]]:
        """Somebody may have a KEK, unwrapped."""
        shell = self.shell
        words = ["--documents"] if self.single and not self.doubles_wrap else []
        forecast = Forecast(self.survey)
        self._jobs()
        writes = "who has it may also write to the storage: then it seals a key store of theirs, while a KMS opens it"
        for key_id in self.masters:
            self._add(f"Give {key_id} a new version.", shell.new_version(key_id), only_if=writes)
        self._add(
            "Replace the KEKs, and remove the old ones with everything that they open.",
            self.shell.line("keys", "rotate", "--what", "kek", *words, "--force-expire"),
            forecast.rotate("kek", documents=bool(words), force_expire=True),
        )
        whoever = "who has the KEK could read the manifests, here or in a copy: then the data keys are known, too"
        self._add("Give each file a new data key.", self.shell.line("rekey"), forecast.rekey(), only_if=whoever)
        self._add(
            "Remove the files under the old ones.",
            self.shell.line("keys", "expire"),
            forecast.expire(),
            only_if=whoever,
        )
        self._add(
            "Destroy the older versions of the master keys in the KMS, when no KEK needs them: ask again which.",
            shell.line("keys", "audit"),
            only_if=writes,
        )
        return self.steps

    def dek_leaked(self) -> list[dict[str, Any]]:
        """Somebody may have data keys."""
        forecast = Forecast(self.survey)
        self._jobs()
        words = [word for pattern in self.paths or () for word in ("--path", pattern)]
        which = "these files" if self.paths else "each file (--path PATTERN: only such)"
        self._add(f"Give {which} a new data key.", self.shell.line("rekey", *words), forecast.rekey(self.paths))
        self._add(
            "Remove the versions before, with the files under the old data keys.",
            self.shell.line("keys", "expire"),
            forecast.expire(),
        )
        return self.steps

    def mek_leaked(self) -> list[dict[str, Any]]:
        """Somebody may have a master key, or could use it."""
        shell = self.shell
        forecast = Forecast(self.survey, rotated=self.masters)
        self._jobs()
        self._add(
            "First end it: take the right to use the key from whoever has it. Rewrapping (--what mek) alone does not "
            "help: who had the master key and could read _ags/keys has the KEKs, and with the manifests the data keys."
        )
        for key_id in self.masters:
            self._add(
                f"Give {key_id} a new version, or make a new master key and add --wrapping-key-id to the next two.",
                shell.new_version(key_id),
            )
        if self.single:
            self._add(
                "Put the data keys, which the KMS wraps, under a new KEK.",
                shell.line("keys", "rotate", "--what", "double-wrap"),
                forecast.rotate("double-wrap"),
            )
        if not self.single or self.others:
            self._add("Replace the KEKs.", shell.line("keys", "rotate", "--what", "kek"), forecast.rotate("kek"))
        self._add("Give each file a new data key.", shell.line("rekey"), forecast.rekey())
        self._add(
            "Remove everything that the old keys open.",
            shell.line("keys", "expire", "--force"),
            forecast.expire(force=True),
        )
        self._ask()
        return self.steps

    def _ask(self) -> None:
        self._add(
            "Ask again which versions may be destroyed. Disable the old one in the KMS, and destroy it later.",
            self.shell.line("keys", "audit"),
        )
