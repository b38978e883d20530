"""``ags-fast keys status|rotate|restore|expire|audit|policy``: the keys of datasets, from a shell."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from ags_fast import jobs
from ags_fast._arguments import positive
from ags_fast.dataset.policy import Policy
from ags_fast.jobs.auditing import EVENTS, audit, key_status
from ags_fast.jobs.command import (
    add_dataset_options,
    add_engine_options,
    engine,
    kms,
    known,
    opened,
    possible,
    result,
)
from ags_fast.jobs.rotation import WHATS
from ags_fast.keys import command as keystores
from ags_fast.keys.command import add_kms_options, kms_properties

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["add_commands"]

SHOWN = 50  # rows of a kind, for people
NOT_A_PROBLEM = ("InUse", "Current")
NUMBERS = ("version", "data keys", "manifests", "files", "bytes")  # columns of tables


def add_commands(keys: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """keys: the commands of ``ags-fast keys``, which get these."""

    def add(name: str, run: Callable[[argparse.Namespace], dict[str, Any]], text: str) -> argparse.ArgumentParser:
        command = keys.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run, text=key_text, usage=command.error, quiet=False)
        command.add_argument("file", metavar="KEYSTORE|DATASET" if name == "status" else "DATASET")
        add_dataset_options(command)
        return command

    add("status", _status, "Show the keys of a dataset, or of a keystore: states, ages, and what ends when.")
    rotate = add("rotate", _rotate, "Replace the keys above the data keys of DATASET. No file of data is written.")
    rotate.add_argument(
        "--what",
        choices=WHATS,
        default="kek",
        help="kek, the default: what wraps data keys; mek: wrap the KEKs by the current version of their master key; "
        "double-wrap: put data keys that the KMS wraps under a KEK",
    )
    rotate.add_argument("--wrapping-key-id", metavar="ID", help="the master key to use from now on")
    rotate.add_argument("--from-key-id", metavar="ID", help="only what is under this master key")
    rotate.add_argument("--documents", action="store_true", help="in single wrap, replace the documents' KEK, too")
    rotate.add_argument("--grace", type=float, default=7, metavar="DAYS", help="that retired KEKs stay; default 7")
    rotate.add_argument("--force-expire", action="store_true", help="then remove the past: `expire --keep 1 --force`")
    rotate.add_argument("--concurrency", type=positive, default=8, metavar="N", help="KMS calls at once; default 8")
    rotate.add_argument("--resume", action="store_true", help="the same rotation has died: take it up")
    add_engine_options(rotate)
    add_kms_options(rotate, new=True)
    expire = add("expire", _expire, "Remove old versions of DATASET, and what only they need. This is final.")
    expire.add_argument("--keep", type=positive, default=1, metavar="N", help="so many of the newest stay; default 1")
    expire.add_argument("--older-than", type=float, metavar="DAYS", help="and those that are younger")
    expire.add_argument("--force", action="store_true", help="do not wait for the grace of retired KEKs")
    restore = add("restore", _restore, "Go back to older keys of DATASET, where the newest do not open with this KMS.")
    restore.add_argument(
        "--version", type=positive, metavar="N", help="of _ags/keys; default: the newest before that opens"
    )
    for command in (rotate, expire, restore):
        command.add_argument("--dry-run", action="store_true", help="show what would be done")
    audit = add("audit", _audit, "Show what depends on which key, what may be destroyed, and what to do.")
    audit.add_argument("--event", choices=EVENTS, help="what has happened; default: nothing but time")
    audit.add_argument(
        "--path", metavar="PATTERN", action="append", dest="paths", help="dek-leaked: such files; may be repeated"
    )
    policy = add("policy", _policy, "Show what DATASET lays down for jobs to come; with options, change it.")
    policy.add_argument(
        "--kek-scope", metavar="SCOPE", help="what shares a KEK: dataset, partition, day, writer, or files:10000"
    )
    policy.add_argument("--kek-lifetime", type=float, metavar="DAYS", help="that a KEK wraps")
    policy.add_argument("--kek-uses", type=positive, metavar="N", help="data keys that a KEK wraps")
    policy.add_argument("--keep", type=_keep, metavar="N", help="versions that jobs keep; `all` expires none")
    policy.add_argument("--keep-days", type=float, metavar="DAYS", help="and those that are younger; 0: none of them")


def _keep(text: str) -> int:
    """0 is all of them."""
    return 0 if text == "all" else positive(text)


# ---------------------------------------------------------------------------------------------------------- operations


def _status(args: argparse.Namespace) -> dict[str, Any]:
    if os.path.isfile(args.file):
        return keystores.keystore_status(args)
    return key_status(args.file, kms=kms(args), **known(args))


def _audit(args: argparse.Namespace) -> dict[str, Any]:
    return audit(args.file, kms=kms(args), event=args.event, paths=args.paths, **known(args))


def _restore(args: argparse.Namespace) -> dict[str, Any]:
    return result(
        jobs.restore_keys(args.file, kms=kms(args), version=args.version, dry_run=args.dry_run, **known(args))
    )


def _rotate(args: argparse.Namespace) -> dict[str, Any]:
    done = jobs.rotate(
        args.file,
        kms=kms(args),
        what=args.what,
        wrapping_key_id=args.wrapping_key_id,
        new_kms=possible(kms_properties(args, new=True)) or None,
        from_key_id=args.from_key_id,
        documents=args.documents,
        grace=timedelta(days=args.grace),
        force_expire=args.force_expire,
        engine=engine(args),
        concurrency=args.concurrency,
        resume=args.resume or None,
        dry_run=args.dry_run,
        progress=False if args.quiet or args.json else None,
        **known(args),
    )
    shown = {**result(done), "what": args.what}
    if done.expired is not None:
        shown["expired"] = result(done.expired)
    return shown


def _expire(args: argparse.Namespace) -> dict[str, Any]:
    done = jobs.expire(
        args.file,
        kms=kms(args),
        keep=args.keep,
        older_than=None if args.older_than is None else timedelta(days=args.older_than),
        force=args.force,
        dry_run=args.dry_run,
        **known(args),
    )
    return result(done)


def _policy(args: argparse.Namespace) -> dict[str, Any]:
    head = opened(args).current()
    policy = head.policy if head else Policy()
    fields = {
        "kek_scope": args.kek_scope,
        "kek_lifetime_days": args.kek_lifetime,
        "kek_uses": args.kek_uses,
        "keep": args.keep,
        "keep_days": args.keep_days,
    }
    changes = {name: value for name, value in fields.items() if value is not None}
    if changes.get("keep") == 0:
        changes |= {"keep": None, "keep_days": None}
    if changes.get("keep_days") == 0:
        changes["keep_days"] = None
    if changes:
        policy = policy.replace(**changes)
        jobs.set_policy(args.file, policy, kms=kms(args), **known(args))
    return {"operation": args.operation, "dataset": args.file, "changed": sorted(changes), "policy": policy.to_json()}


# -------------------------------------------------------------------------------------------------------------- as text


def key_text(found: dict[str, Any]) -> str:
    """A result for people."""
    if "kdf" in found:
        return keystores.as_text(found)
    if found["operation"] == "policy":
        return "\n".join(_policy_lines(found["policy"]))
    if "masters" in found:
        return "\n".join(_status_lines(found))
    return "\n".join(_job_lines(found))


def _policy_lines(policy: dict[str, Any]) -> list[str]:
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


def _status_lines(found: dict[str, Any]) -> list[str]:
    audited = found["operation"] == "audit"
    lines = [
        f"dataset       {found['dataset']}",
        f"version       {found['version']}",
        f"manifests     {found['manifests']}, of which {found['manifests_opened']} had to be opened",
        *_policy_lines(found["policy"]),
        "",
        "KEKs",
        *_table(
            ("key", "kind", "wrapped by", "made", "state", "data keys", "needed by", "ends"),
            [_key_cells(key) for key in found["keys"]],
        ),
        "",
        "Versions",
        *_table(
            ("version", "by", "at (UTC)", "files", "bytes", "expires"),
            [
                (
                    str(version["number"]),
                    version["operation"],
                    _when(version["time_ms"]),
                    f"{version['files']:,}",
                    f"{version['plain_length']:,}",
                    "" if version["expires_ms"] is None else _expires(version["expires_ms"], found["time_ms"]),
                )
                for version in found["versions"]
            ],
        ),
        "",
        "Master keys",
        *(line for master in found["masters"] for line in _master_lines(master, audited)),
    ]
    if found["open_jobs"]:
        lines += ["", "Open jobs"]
        states = {True: "it runs", False: "it has died", None: "it runs, or has died"}
        lines += [f"  {job['job_id']}  {job['operation']}: {states[job['lives']]}" for job in found["open_jobs"]]
    if found["unread"]:
        lines += [
            "",
            "Could not be read, so that the above may lack something",
            *(f"  {text}" for text in found["unread"]),
        ]
    if audited:
        lines += ["", "What each KEK opens", *_opens_lines(found["opens"])]
        lines += ["", *_step_lines(found["event"], found["steps"]), ""]
        lines += [line for note in found["notes"] for line in _wrapped(f"* {note}", 2)]
    return lines


def _key_cells(key: dict[str, Any]) -> tuple[str, ...]:
    kind = "double wrap" if key["double_wrap"] else "single wrap"
    kind += ", columns" if key["for_columns"] else ""
    kind += f", {key['scope']}" if key["scope"] else ""
    by = key["wrapping_key_id"] + ("" if key["master_version"] is None else f" {key['master_version']}")
    needed = [_ranges(key["needed_by_versions"])] if key["needed_by_versions"] else []
    needed += [f"job {job_id}" for job_id in key["needed_by_jobs"]]
    if key["retires_ms"] is not None:
        ends = f"may go from {_when(key['retires_ms'])[:10]}"
    elif key["lifetime_ends_ms"] is not None:
        ends = f"wraps until {_when(key['lifetime_ends_ms'])[:10]}, or {key['uses_left']:,} more"
    else:
        ends = ""
    made = f"{_when(key['created_ms'])[:10]} ({key['age_days']:g} d)"
    return key["key_id"], kind, by, made, key["state"], f"{key['data_keys']:,}", ", ".join(needed) or "nothing", ends


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, as 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _expires(expires_ms: int, now: int) -> str:
    return f"from {_when(expires_ms)[:10]}" if expires_ms > now else "by the next job that commits"


def _master_lines(master: dict[str, Any], audited: bool) -> list[str]:
    current = master["current_version"]
    says = f"wraps by version {current}" if current else "the KMS does not tell which version wraps"
    if master["refused"]:
        says = master["refused"]
    lines = [f"  {master['wrapping_key_id']}: {says}"]
    if not audited:
        for row in master["keks"]:
            version = "versions that it does not tell" if row["version"] is None else f"version {row['version']}"
            old = current is not None and row["version"] is not None and row["version"] != current
            lines.append(
                f"    {version}: wraps {row['keks']:,} KEK{'s' * (row['keks'] != 1)}"
                + ("; `keys rotate --what mek` wraps them by the current one" if old else "")
            )
        return lines
    verdicts = {True: "may be destroyed", False: "must stay", None: "cannot be told"}
    for row in master["versions"]:
        version = "version not told" if row["version"] is None else f"version {row['version']}"
        lines.append(f"    {version}: {verdicts[row['may_be_destroyed']]}: {row['why']}")
        lines += [f"        first  {command}" for command in row["first"]]
    for row in master["listed"]:
        made = "" if row["made_ms"] is None else f" of {_when(row['made_ms'])[:10]}"
        state = "" if row["state"] is None else f" ({row['state'].lower()})"
        lines.append(f"    the KMS lists version {row['version'] or 'without a name'}{made}{state}")
    lines.append(f"    other versions: {verdicts[master['others']]}")
    lines.append(f"    the key as a whole: {verdicts[master['may_be_destroyed']]}: {master['why']}")
    return lines


def _opens_lines(rows: Iterable[dict[str, Any]]) -> list[str]:
    cells = [
        (
            row["key_id"],
            str(row["version"]),
            f"{row['data_keys']:,}",
            f"{row['manifests']:,}",
            "yes" if row["document"] else "",
        )
        for row in rows
    ]
    return _table(("key", "version", "data keys", "manifests", "document"), cells)


def _step_lines(event: str | None, steps: Sequence[dict[str, Any]]) -> list[str]:
    if not steps:
        return ["Nothing is due. (--event says what to do if something has happened.)"]
    lines = ["What is due" if event is None else f"What to do ({event})"]
    for n, step in enumerate(steps, 1):
        lines += _wrapped(f"  {n}. {step['text']}", 5)
        if step["only_if"]:
            lines += _wrapped(f"     Only if {step['only_if']}.", 5)
        if step["command"]:
            lines.append(f"       {step['command']}")
        if "kms_calls" in step:
            calls = ", ".join(f"{count:,} {name}" for name, count in step["kms_calls"].items())
            told = [f"KMS calls: {calls or 'none'}"]
            told += [f"KEKs changed: {step['key_store']['keks']:,}"] if step["key_store"]["keks"] else []
            for what in ("written", "removed"):
                if parts := _amounts(step[what]):
                    told.append(f"{what}: {parts}")
            lines.append(f"       {'; '.join(told)}")
    return lines


def _amounts(counts: dict[str, int]) -> str:
    parts = [f"{count:,} version{'s' * (count != 1)}" for count in (counts.get("versions"),) if count]
    parts += [
        f"{count:,} {thing}{'s' * (count != 1)} of {counts[f'{thing}_bytes']:,} bytes"
        for thing in ("manifest", "file")
        if (count := counts[f"{thing}s"])
    ]
    return ", ".join(parts)


def _job_lines(found: dict[str, Any]) -> list[str]:
    what = f" {found['what']}" if "what" in found else ""
    lines = [f"{found['operation']}{what} of {found['dataset']}, now at version {found['version']}"]
    rows = found["rows"]
    kinds = Counter((row["status"], row["format"]) for row in rows)
    names = {"key": "KEK", "keys": "old key document"}
    removes = found["operation"] == "expire"
    done = {"ok": "removed" if removes else "done", "planned": "would be removed" if removes else "to do"}
    for (status, kind), count in kinds.items():
        if status in done:
            lines.append(f"  {count:,} {names.get(kind, kind)}{'s' * (count != 1)} {done[status]}")
    pairs = [row for row in rows if row["format"] == "key" and row["dst"] and row["status"] in done]
    for row in pairs[:SHOWN]:
        same = row["src"] == row["dst"]
        lines.append(f"    {row['src']}" + (" wrapped anew" if same else f" -> {row['dst']}"))
    lines += [f"    and {len(pairs) - SHOWN:,} more"] if len(pairs) > SHOWN else []
    others = [row for row in rows if row["status"] not in done]
    for row in others[:SHOWN]:
        verb = "stays" if row["error_class"] in NOT_A_PROBLEM else row["status"]
        lines.append(f"  {verb}: {row['src']}: {row['error']}")
    lines += [f"  and {len(others) - SHOWN:,} more: --json shows all"] if len(others) > SHOWN else []
    if not rows:
        lines.append("  nothing to do")
    if "expired" in found:
        lines += _job_lines(found["expired"])
    lines += _next_lines(found)
    return lines


def _next_lines(found: dict[str, Any]) -> list[str]:
    """What is left to be done after a rotation."""
    rows = found["rows"]
    if found["operation"] != "rotate" or not rows or any(row["status"] == "planned" for row in rows):
        return []
    if found["exit_code"]:
        return ["Nothing was committed, and nothing is lost. The same command with --resume goes on from here."]
    if "expired" in found:
        return []
    if found["what"] == "mek":
        return ["Next: `ags-fast keys audit` says whether the old version of the master key may be destroyed."]
    return ["Next: `ags-fast keys expire` removes the old KEKs, and the versions that need them, after their grace."]


def _when(time_ms: int) -> str:
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, 110, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns: numbers to the right."""
    if not rows:
        return ["  none"]
    widths = [max(map(len, column)) for column in zip(heads, *rows[-SHOWN:], strict=True)]
    right = [head in NUMBERS for head in heads]

    def line(cells: Sequence[str]) -> str:
        padded = (
            f"{cell:>{width}}" if to_right else f"{cell:<{width}}"
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        )
        return "  " + "  ".join(padded).rstrip()

    hidden = len(rows) - SHOWN
    earlier = [f"  … {hidden:,} before these: --json shows all"] if hidden > 0 else []
    return [line(heads), *earlier, *map(line, rows[-SHOWN:])]
