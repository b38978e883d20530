"""``ags-fast keys``: the keys of datasets; `keystore` has the commands on keystores."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from ags_fast import jobs
from ags_fast.audit.runbook import EVENTS
from ags_fast.cli import keystore
from ags_fast.cli.audit import expiry_line, status_lines
from ags_fast.cli.commands import TEXTS
from ags_fast.cli.files import progress
from ags_fast.cli.job import DATASET, ENGINE, confirmed, engine, known, opened, result
from ags_fast.cli.kms import checked, kms, kms_group, kms_properties
from ags_fast.cli.options import (
    DRY_RUN,
    INCLUDE,
    OVERWRITE,
    YES,
    Command,
    days,
    duration,
    option,
    positive,
    switch,
    values,
)
from ags_fast.cli.results import job_text
from ags_fast.cli.runbook import printable_audit
from ags_fast.cli.text import count
from ags_fast.fs import NewFile, pwrite_all
from ags_fast.jobs.rotation import WHATS
from ags_fast.keys.kms import KMS_TYPE
from ags_fast.page.words import policy_lines
from ags_fast.profiles import DEFAULT

# ------------------------------------------------------------------------------------------------------------- options


def _keep(text: str) -> int:
    """A number of versions; 0 for all of them."""
    return 0 if text == "all" else positive(text)


ROTATE = (
    option(
        "--what",
        choices=WHATS,
        default="kek",
        help="kek, the default: replace the KEKs, which wrap data keys; mek: wrap the KEKs by the current version of "
        "their master key; double-wrap: wrap data keys by a KEK instead of the KMS",
    ),
    option("--wrapping-key-id", metavar="ID", help="the master key to use from now on"),
    option("--from-key-id", metavar="ID", help="only what this master key wraps"),
    switch("--documents", "in single wrap, also replace the KEK of entries and tables"),
    option(
        "--grace",
        type=duration,
        default=timedelta(days=7),
        metavar="TIME",
        help="how long retired KEKs stay, such as 12h; default 7d",
    ),
    switch(
        "--no-also-retired", "leave retired KEKs, which older versions need, as they are wrapped", off="also_retired"
    ),
    switch("--force-expire", "then remove the past, as `expire --keep 1 --skip-grace --force` does"),
    option("--concurrency", type=positive, default=8, metavar="N", help="KMS calls at once; default 8"),
    switch("--resume", "continue the same rotation after it died"),
    DRY_RUN,
)
EXPIRE = (
    option("--keep", type=positive, metavar="N", help="keep the newest N versions; default: what the policy keeps"),
    option("--older-than", type=duration, metavar="TIME", help="remove only versions older than this, such as 30d"),
    switch("--skip-grace", "do not wait for the grace of retired KEKs"),
    switch("--force", "also remove versions that the policy keeps"),
    DRY_RUN,
)
RESTORE = (
    option(
        "--version",
        type=positive,
        metavar="N",
        help="take the keys as this version has them; default: each key as the newest version that opens has it",
    ),
    DRY_RUN,
)
AUDIT = (
    option("--event", choices=EVENTS, help="what happened; default: nothing but the passing of time"),
    INCLUDE.but(dest="paths", help="for dek-leaked: only files that match; may be repeated"),
)
HTML = option("--html", metavar="FILE", help="write FILE, a page for a browser with pictures, tables and commands")
POLICY = (
    option(
        "--kek-scope",
        metavar="SCOPE",
        help="which files share a KEK: dataset, partition, day, writer, or files:N, such as files:10000",
    ),
    option(
        "--kek-lifetime", type=days, metavar="TIME", dest="kek_lifetime_days", help="how long a KEK wraps, such as 52w"
    ),
    option("--kek-uses", type=positive, metavar="N", help="how many data keys a KEK wraps"),
    option("--keep", type=_keep, metavar="N", help="versions that jobs keep; `all` expires none"),
    option(
        "--keep-within",
        type=days,
        metavar="TIME",
        dest="keep_days",
        help="jobs also keep versions younger than this, such as 30d; 0: no version because of its age",
    ),
)

# ---------------------------------------------------------------------------------------------------------- operations


def _status(args: argparse.Namespace) -> dict[str, Any]:
    if os.path.isfile(args.file):
        return keystore.keystore_status(args)
    return jobs.key_status(args.file, kms=kms(args), **known(args))


def _audit(args: argparse.Namespace) -> dict[str, Any]:
    if args.html is not None:
        return _audit_page(args)
    found = jobs.audit(args.file, kms=kms(args), **values(args, AUDIT), **known(args))
    return printable_audit(found, args.file, _to_name(args), args.key_store)


def _to_name(args: argparse.Namespace) -> dict[str, str] | None:
    """Return the KMS that commands have to name; None if it is that of the default profile, a keystore's."""
    ours = args.chosen.name == DEFAULT and args.chosen.kms == kms(args) and kms(args).get(KMS_TYPE) == "local"
    return None if ours else kms(args)


def _audit_page(args: argparse.Namespace) -> dict[str, Any]:
    """Write the page of ``--html``."""
    from ags_fast.page.audit import audit_page

    # The page may be read in another folder: its commands name the dataset, and the keys, from the root.
    place = args.file if "://" in args.file else os.path.abspath(args.file)
    keys = args.key_store if args.key_store is None or "://" in args.key_store else os.path.abspath(args.key_store)
    with NewFile(args.html, exclusive=not args.overwrite) as new:
        found = jobs.audit(args.file, kms=kms(args), all_events=True, **values(args, AUDIT), **known(args))
        page = printable_audit(found, place, _to_name(args), keys)
        pwrite_all(new.descriptor, audit_page(page).encode(), 0)
        new.publish()
    return {**page, "html": args.html}


def _restore(args: argparse.Namespace) -> dict[str, Any]:
    return result(jobs.restore_keys(args.file, kms=kms(args), **values(args, RESTORE), **known(args)))


def _rotate(args: argparse.Namespace) -> dict[str, Any]:
    done = jobs.rotate(
        args.file,
        kms=kms(args),
        new_kms=checked(kms_properties(args, new=True)) or None,
        engine=engine(args),
        progress=progress(args),
        **values(args, ROTATE),
        **known(args),
    )
    shown = {**result(done), "what": args.what}
    if done.expired is not None:
        shown["expired"] = result(done.expired)
    return shown


def _expire(args: argparse.Namespace) -> dict[str, Any]:
    return confirmed(args, lambda **how: result(jobs.expire(args.file, kms=kms(args), **how, **known(args))), EXPIRE)


def _policy(args: argparse.Namespace) -> dict[str, Any]:
    from ags_fast.jobs.retention import will_expire

    log, head = opened(args)
    policy = head.policy
    changes = {name: value for name, value in values(args, POLICY).items() if value is not None}
    if changes.get("keep") == 0:
        changes |= {"keep": None, "keep_days": None}
    if changes.get("keep_days") == 0:
        changes["keep_days"] = None
    if changes:
        policy = policy.replace(**changes)
        jobs.set_policy(args.file, policy, kms=kms(args), **known(args))
    shown = {"dataset": args.file, "changed": sorted(changes)}
    return {**shown, "policy": asdict(policy), "expires": [*will_expire(log, policy)]}


# ------------------------------------------------------------------------------------------------------------- as text


def keys_text(found: dict[str, Any]) -> str:
    """The result of a command on the keys of a dataset."""
    if "kdf" in found:
        return keystore.keystore_text(found)
    if found["operation"] == "policy":
        return "\n".join([*policy_lines(found["policy"]), expiry_line(found["expires"])])
    if "html" in found:
        due = "nothing is due" if not found["steps"] else f"{count(len(found['steps']), 'step')} to do"
        return f"{found['html']} shows the keys of {found['dataset']}, version {found['version']}: {due}"
    if "masters" in found:
        return "\n".join(status_lines(found))
    return "\n".join([job_text(found), *_next_lines(found)])


def _next_lines(found: dict[str, Any]) -> list[str]:
    """What to do after a rotation."""
    rows = found["rows"]
    if found["operation"] != "rotate" or not rows or any(row["status"] == "planned" for row in rows):
        return []
    if found["exit_code"]:
        return ["Nothing was committed, and nothing is lost. The same command with --resume continues from here."]
    if "expired" in found:
        return []
    if found["what"] == "mek":
        return ["Next: `ags-fast keys audit` says whether the old version of the master key may be destroyed."]
    return ["Next: `ags-fast expire DATASET --keep 1` removes the old KEKs after their grace, and what needs them."]


# ------------------------------------------------------------------------------------------------------------ commands

TEXT = keys_text
COMMANDS = (
    *(one._replace(defaults={**one.defaults, "text": keystore.keystore_text}) for one in keystore.COMMANDS),
    Command(
        "status",
        _status,
        (
            DATASET[0].but(metavar="KEYSTORE|DATASET", help="a keystore, or a dataset; default: AGS_FAST_DATASET"),
            *DATASET[1:],
        ),
        "Show the keys of a dataset, or of a keystore: their states and ages, and when what ends.",
    ),
    Command(
        "rotate",
        _rotate,
        (*DATASET, *ROTATE, *ENGINE, kms_group(new=True)),
        "Replace the keys above the data keys of DATASET. Data files are not written.",
    ),
    Command(
        "expire",
        _expire,
        (*DATASET, *EXPIRE, YES),
        TEXTS["expire"],
    ),
    Command(
        "restore",
        _restore,
        (*DATASET, *RESTORE),
        "Go back to older keys of DATASET if the newest keys do not open with this KMS.",
    ),
    Command(
        "audit",
        _audit,
        (*DATASET, *AUDIT, HTML, OVERWRITE.but(help="replace the FILE of --html if it exists")),
        "Show what depends on which key, which master-key versions may be destroyed, and what to do.",
    ),
    Command(
        "policy", _policy, (*DATASET, *POLICY), "Show the policy of DATASET for later jobs; with options, change it."
    ),
)
