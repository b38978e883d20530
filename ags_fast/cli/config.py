"""``ags-fast config show|check``: the configuration that commands use."""

from __future__ import annotations

import hmac
import os
import time
from typing import TYPE_CHECKING, Any

from ags_fast._secrets import check_no_secret
from ags_fast.cli.codes import ConfigurationError
from ags_fast.cli.kms import kms, kms_group, kms_properties
from ags_fast.cli.options import JSON, Command, option
from ags_fast.cli.text import as_text, table
from ags_fast.errors import KeyAccessError
from ags_fast.keys.kms import load_kms
from ags_fast.profiles import ADVICE, CONFIG_ENV, PROFILE_ENV, config_path

if TYPE_CHECKING:
    import argparse

PROBE_NBYTES = 16


def _show(args: argparse.Namespace) -> dict[str, Any]:
    args.file, profile = config_path(), args.chosen
    source = f"profile {profile.name}"
    properties = kms_properties(args, ask=False)
    found: dict[str, Any] = {name: properties[name] for name in sorted(properties)}
    rows = [
        (name, value, source if profile.kms.get(name) == value else "command line") for name, value in found.items()
    ]
    for name in ("wrapping_key_id", "key_store"):
        own, given = getattr(profile, name), getattr(args, name, None)
        if given or own:
            rows.append((name, given or own, "command line" if given and given != own else source))
    rows += [(f"storage_options.{name}", str(value), source) for name, value in (profile.storage_options or {}).items()]
    check_no_secret({name: value for name, value, _ in rows}, "command line", ADVICE)
    return {
        "config": args.file,
        "config_from": CONFIG_ENV if os.environ.get(CONFIG_ENV) else "default",
        "exists": os.path.exists(args.file),
        "profile": profile.name or None,
        "profile_from": None if not profile.name else "--profile" if args.profile else PROFILE_ENV,
        "settings": [{"name": name, "value": value, "from": origin} for name, value, origin in rows],
    }


def _check(args: argparse.Namespace) -> dict[str, Any]:
    args.file, properties = config_path(), kms(args)
    key_id = args.wrapping_key_id or args.chosen.wrapping_key_id
    if key_id is None:
        raise ConfigurationError("no master key to try: set wrapping_key_id in the profile, or --wrapping-key-id")
    client, probe, begun = load_kms(properties), os.urandom(PROBE_NBYTES), time.monotonic()
    try:
        wrapped = client.wrap_key(probe, key_id)
        if not hmac.compare_digest(client.unwrap_key(wrapped, key_id), probe):
            raise KeyAccessError("the KMS unwrapped another key than it wrapped")
    finally:
        client.close()
    return {
        "config": args.file,
        "profile": args.chosen.name or None,
        "wrapping_key_id": key_id,
        "wraps": True,
        "unwraps": True,
        "seconds": round(time.monotonic() - begun, 3),
    }


def config_text(found: dict[str, Any]) -> str:
    """What commands would use, or that the KMS answered."""
    if "settings" not in found:
        return as_text(found)
    there = "" if found["exists"] else ", which does not exist"
    lines = [f"configuration: {found['config']} ({found['config_from']}){there}"]
    lines.append(f"profile: {found['profile']} (from {found['profile_from']})" if found["profile"] else "no profile")
    rows = [(row["name"], row["value"], row["from"]) for row in found["settings"]]
    return "\n".join(lines + (["", *table(("setting", "value", "from"), rows, (False,) * 3)] if rows else []))


OPTIONS = (kms_group(), option("--wrapping-key-id", metavar="ID", help="the master key in the KMS"), JSON)
TEXT = config_text
COMMANDS = tuple(
    Command(name, run, OPTIONS, text, defaults={"file": ""})
    for name, run, text in (
        ("show", _show, "Show what commands would use, and from where. No secret is shown."),
        ("check", _check, "Wrap and unwrap a probe by the KMS and the master key that commands would use."),
    )
)
