"""``ags-fast config init|show|check``: the configuration that commands use."""

from __future__ import annotations

import hmac
import json
import os
import re
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ags_fast._secrets import check_no_secret
from ags_fast.cli.codes import ConfigurationError
from ags_fast.cli.job import KNOWN
from ags_fast.cli.kms import SECRETS, checked, kms, kms_group, kms_properties
from ags_fast.cli.options import JSON, OVERWRITE, Command, option
from ags_fast.cli.text import as_text, did_you_mean, table
from ags_fast.errors import KeyAccessError
from ags_fast.keys.kms import KMS_TYPE, load_kms, local
from ags_fast.profiles import ADVICE, CONFIG_ENV, DEFAULT, NO_PROFILE, PATHS, PROFILE_ENV, config_path

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

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
        "profile_from": "--profile" if args.profile else PROFILE_ENV if os.environ.get(PROFILE_ENV) else "default",
        "profiles": sorted(_tables(args.file)),
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
    lines += [f"profiles: {', '.join(found['profiles'])}"] if found["profiles"] else []
    rows = [(row["name"], row["value"], row["from"]) for row in found["settings"]]
    return "\n".join(lines + (["", *table(("setting", "value", "from"), rows, (False,) * 3)] if rows else []))


# ---------------------------------------------------------------------------------------------------------------- init

# What `init` asks about each KMS: a property, what it is, and the default, for files of a local keystore.
QUESTIONS: dict[str, tuple[tuple[str, str, str | None], ...]] = {
    "local": (
        (local.PATH, "the keystore, which is made if it does not exist", "keystore.json"),
        (local.KEY_FILE, "the file with the key that opens the keystore", "keystore.key"),
    ),
    "aws": (("client.region", "the region of AWS KMS, such as eu-central-1", None),),
    "gcp": (),
    "azure": (("azure.keyvault.url", "the URL of the vault, such as https://NAME.vault.azure.net", None),),
    "vault": (
        ("vault.address", "the address, such as https://vault.example.com:8200", None),
        ("vault.token-file", "the file with the token", None),
    ),
    "pkcs11": (
        ("kms.pkcs11.library", "the library of the token, such as /usr/lib/softhsm/libsofthsm2.so", None),
        ("kms.pkcs11.token-label", "the label of the token", None),
        ("kms.pkcs11.pin-file", "the file with the PIN", None),
    ),
}


def _init(args: argparse.Namespace) -> dict[str, Any]:
    args.file, name = config_path(), args.profile or os.environ.get(PROFILE_ENV) or DEFAULT
    if not re.fullmatch(r"[\w-]+", name, re.ASCII):
        args.usage(f"a profile's name has letters, digits, - and _ only, not {name!r}")
    if name in _tables(args.file) and not args.overwrite:
        raise FileExistsError(f"{args.file} has a profile {name!r}: --overwrite replaces it")
    args.chosen = NO_PROFILE
    given = kms_properties(args, ask=False) if args.keystore or args.kms else {}
    kind = args.type or given.get(KMS_TYPE) or _answer(args, "TYPE", f"which KMS ({', '.join(QUESTIONS)})", "local")
    if kind not in QUESTIONS or given.get(KMS_TYPE, kind) != kind:
        args.usage(f"name one KMS of {', '.join(QUESTIONS)}, not {kind!r}{did_you_mean(kind, QUESTIONS)}")
    folder = os.path.dirname(args.file)
    settings = {KMS_TYPE: kind, **given}
    for setting, what, default in QUESTIONS[kind] if not any(one in given for one in SECRETS.values()) else ():
        if setting not in settings:
            settings[setting] = _answer(args, f"--kms {setting}=VALUE", what, default and os.path.join(folder, default))
    for setting in settings:
        if setting.endswith(PATHS):
            settings[setting] = os.path.abspath(os.path.expanduser(settings[setting]))
    key_id = args.wrapping_key_id or _answer(
        args, "--wrapping-key-id ID", "the master key", name if kind == "local" else None
    )
    check_no_secret(settings, "command line", ADVICE)
    made = _made(settings, key_id) if kind == "local" else []
    checked(settings)
    _write(
        args.file,
        name,
        {"wrapping_key_id": key_id, **({"kek_store": args.key_store} if args.key_store else {}), **settings},
    )
    return {"config": args.file, "profile": name, "kms": kind, "wrapping_key_id": key_id, "made": made}


def _tables(path: str) -> dict[str, Any]:
    """Return the profiles of a configuration that `profile` can read."""
    if not os.path.exists(path):
        return {}
    return dict(tomllib.loads(Path(path).read_text("utf-8")).get("profiles", {}))


def _answer(args: argparse.Namespace, option: str, what: str, default: str | None) -> str:
    """Ask on a terminal; elsewhere, take the default, or end with a usage error that names the option."""
    if sys.stdin is not None and sys.stdin.isatty() and not args.json:
        print(
            f"{what[:1].upper()}{what[1:]}{f' [{default}]' if default else ''}: ", end="", file=sys.stderr, flush=True
        )
        if answer := sys.stdin.readline().strip():
            return answer
    return default or str(args.usage(f"{option} is required: {what}"))


def _made(settings: Mapping[str, str], key_id: str) -> list[str]:
    """Make the keystore with the master key, unless the keystore is there. Returns the files that were made."""
    path, key_file = settings[local.PATH], settings.get(local.KEY_FILE)
    if os.path.lexists(path):
        return []
    files = [path] if key_file is None or os.path.lexists(key_file) else [path, key_file]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    local.create_keystore(settings)
    local.create_key(settings, key_id)
    return files


def _write(path: str, name: str, settings: Mapping[str, str]) -> None:
    """Put a profile into the configuration, in the place of the one of that name. The rest stays, byte by byte."""
    from ags_fast.fs import NewFile

    os.makedirs(os.path.dirname(path), exist_ok=True)
    before = Path(path).read_text("utf-8") if os.path.exists(path) else ""
    table = re.compile(rf"^\[profiles\.{name}[].].*?(?=^\[(?!profiles\.{name}[].])|\Z)", re.DOTALL | re.MULTILINE)
    before = table.sub("", before).rstrip("\n")
    lines = [
        f"{setting if '.' not in setting else json.dumps(setting)} = {json.dumps(value)}"
        for setting, value in settings.items()
    ]
    text = "\n".join([*([before, ""] if before else []), f"[profiles.{name}]", *lines, ""])
    with NewFile(path, fsync=True) as new:
        new.write(text.encode())
        new.publish()


def _init_text(found: dict[str, Any]) -> str:
    lines = [f"{found['config']}: profile {found['profile']}, by {found['kms']}, master key {found['wrapping_key_id']}"]
    lines += [f"made {path}" for path in found["made"]]
    if len(found["made"]) > 1:
        lines.append(
            "Who has both files can decrypt. Who loses one of them cannot: back them up, apart from each other."
        )
    return "\n".join([*lines, "", "Next:", "  ags-fast config check", "  ags-fast encrypt FOLDER DATASET"])


WRAPPING_KEY_ID = option("--wrapping-key-id", metavar="ID", help="the master key in the KMS")
TEXT = config_text
COMMANDS = (
    Command(
        "init",
        _init,
        (
            option("type", metavar="TYPE", nargs="?", help=f"the KMS: {', '.join(QUESTIONS)}"),
            kms_group(),
            WRAPPING_KEY_ID,
            KNOWN[0],
            OVERWRITE.but(help="replace the profile if it exists"),
            JSON,
        ),
        "Write the profile that commands, and kms=None in Python, use: the default one, or that of --profile. What is "
        "not given is asked for on a terminal. A local keystore is made with its master key.",
        defaults={"file": "", "text": _init_text},
    ),
    *(
        Command(name, run, (kms_group(), WRAPPING_KEY_ID, JSON), text, defaults={"file": ""})
        for name, run, text in (
            ("show", _show, "Show profiles, what commands would use, and from where. No secret is shown."),
            ("check", _check, "Wrap and unwrap a probe by the KMS and the master key that commands would use."),
        )
    ),
)
