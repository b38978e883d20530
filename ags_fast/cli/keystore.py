"""``ags-fast keys init|create|list|enable|disable|destroy``: the keystore of the local KMS."""

from __future__ import annotations

import errno
import getpass
import os
import shlex
import stat
import time
from typing import TYPE_CHECKING, Any

from ags_fast.cli.files import warn_if_readable
from ags_fast.cli.job import KNOWN
from ags_fast.cli.kms import KEY_FILE_ENV, KEYSTORE_ENV, SECRETS, TYPED_ENV, ask_passphrase, keystore_secret
from ags_fast.cli.options import DRY_RUN, JSON, Command, Pinned, option, positive, switch
from ags_fast.cli.text import count, fields, flat
from ags_fast.keys.kms import KMS_TYPE, local

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


def _properties(args: argparse.Namespace) -> dict[str, str]:
    """Return the properties of the keystore of the command: of its operand, of the environment, or of the profile."""
    given_secret = any((args.key_file, args.passphrase_file, args.passphrase_env))
    ours = args.chosen.kms if args.chosen.kms.get(KMS_TYPE) == "local" else {}
    args.from_profile = args.file is None and KEYSTORE_ENV not in os.environ and not given_secret and local.PATH in ours
    if args.from_profile:
        args.file = ours[local.PATH]
        return {name: value for name, value in ours.items() if name != KMS_TYPE}
    args.file = args.file or os.environ.get(KEYSTORE_ENV) or ours.get(local.PATH)
    if args.file is None:
        args.usage(f"say which keystore: name KEYSTORE, or set {KEYSTORE_ENV}; `ags-fast config init local` makes one")
    args.key_file = args.key_file or (None if given_secret else os.environ.get(KEY_FILE_ENV))
    given = {
        local.PATH: os.path.abspath(args.file),
        local.KEY_FILE: args.key_file and os.path.abspath(args.key_file),
        local.PASSPHRASE_FILE: args.passphrase_file and os.path.abspath(args.passphrase_file),
        local.PASSPHRASE_ENV: args.passphrase_env,
    }
    for path in (args.key_file, args.passphrase_file):
        if path is not None and os.path.isfile(path):
            warn_if_readable(path, stat.S_IMODE(os.stat(path).st_mode))
    return {name: value for name, value in given.items() if value is not None}


def _passphrase(args: argparse.Namespace, properties: Mapping[str, str], *, twice: bool = False) -> str | None:
    """Ask for the passphrase; None if `properties` say where it is."""
    if any(name in properties for name in SECRETS.values()):
        return None
    passphrase = ask_passphrase(args.file)
    if twice and getpass.getpass("The same again: ") != passphrase:
        raise ValueError("the two passphrases differ; nothing was made")
    return passphrase


def _secret(args: argparse.Namespace) -> list[str]:
    """Return the options that say what opens the keystore, for a command that follows."""
    names = ("key_file", "passphrase_file", "passphrase_env")
    given = ((name, getattr(args, name)) for name in names)
    return [word for name, value in given if value is not None for word in ("--" + name.replace("_", "-"), value)]


def _init(args: argparse.Namespace) -> dict[str, Any]:
    if os.path.lexists(args.file):  # before anybody types a passphrase
        raise FileExistsError(errno.EEXIST, local.TAKEN, args.file)
    properties = _properties(args)
    local.create_keystore(properties, passphrase=_passphrase(args, properties, twice=True))
    shown = {"encryption.kms-type": "local", **properties}
    following = shlex.join(["ags-fast", "keys", "create", args.file, "my-key", *_secret(args)])
    return {"input": args.file, "properties": shown, "next": following}


def _create(args: argparse.Namespace) -> dict[str, Any]:
    make = local.rotate_key if args.new_version else local.create_key
    properties = _properties(args)
    version = make(properties, args.key_id, passphrase=_passphrase(args, properties))
    following = ["encrypt", "FOLDER", "DATASET", "--wrapping-key-id", args.key_id]
    if args.new_version:
        following = ["keys", "rotate", "DATASET", "--what", "mek"]
    opening = [] if args.from_profile else ["--keystore", args.file, *_secret(args)]
    return {
        "input": args.file,
        "key_id": args.key_id,
        "key_version": version,
        "next": shlex.join(["ags-fast", *following, *opening]),
    }


def _list(args: argparse.Namespace) -> dict[str, Any]:
    properties = _properties(args)
    keys = local.status(properties, passphrase=_passphrase(args, properties))["keys"]
    shown = [
        {
            "key_id": key["key_id"],
            "current_version": key["current_version"],
            "versions": len(key["versions"]),
            "created_ms": key["created_ms"],
        }
        for key in keys
    ]
    return {"input": args.file, "keys": shown}


def keystore_status(args: argparse.Namespace) -> dict[str, Any]:
    """Each version of the master keys in a keystore: its state and its age."""
    properties = _properties(args)
    found = local.status(properties, passphrase=_passphrase(args, properties))
    now_ms = time.time_ns() // 1_000_000
    for key in found["keys"]:
        for version in key["versions"]:
            version["age_days"] = round(max(0, now_ms - version["created_ms"]) / 86_400_000, 1)
    return {"input": args.file, **found}


def _set_state(args: argparse.Namespace) -> dict[str, Any]:
    properties = _properties(args)
    passphrase = _passphrase(args, properties)
    local.set_state(properties, args.key_id, args.state, version=args.version, passphrase=passphrase)
    version = "all" if args.version is None else args.version
    return {"input": args.file, "key_id": args.key_id, "key_version": version, "state": args.state}


def _destroy(args: argparse.Namespace) -> dict[str, Any]:
    if not args.datasets and not args.unchecked:
        args.usage("say which datasets are under the key: --dataset DATASET for each; or --unchecked to look at none")
    from ags_fast.jobs import destroy_versions

    properties = {KMS_TYPE: "local", **_properties(args)}
    if (typed := _passphrase(args, properties)) is not None:
        os.environ[TYPED_ENV] = typed
        properties[local.PASSPHRASE_ENV] = TYPED_ENV
    done = destroy_versions(
        properties,
        args.key_id,
        args.versions,
        datasets=args.datasets,
        unchecked=args.unchecked,
        dry_run=args.dry_run,
        key_store=args.key_store,
        storage_options=args.chosen.storage_options,
    )
    return {"input": args.file, **done}


def _destroyed_text(result: Mapping[str, Any]) -> str:
    verb = "would be destroyed" if result["dry_run"] else "destroyed"
    lines = [f"{result['key_id']}, version {number}: {verb}" for number in result["destroyed"]]
    before = (number for number in result["versions"] if number not in result["destroyed"])
    lines += [f"{result['key_id']}, version {number}: was destroyed before" for number in before]
    lines += [f"  {dataset} does not need it" for dataset in result["datasets"]]
    return "\n".join(lines + ["  no dataset was looked at"] * (not result["datasets"]))


def keystore_text(result: Mapping[str, Any]) -> str:
    """The fields, then a line for each property, or for each key and version."""
    if "destroyed" in result:
        return _destroyed_text(result)
    told = flat(result)
    following = told.pop("next", None)
    lines = fields(told)
    if "properties" in result:
        lines += ["", "Properties for load_kms, and for the kms= of the jobs:"]
        lines += [f"  {name}={value}" for name, value in result["properties"].items()]
    if "keys" in result:
        lines.append("")
        for key in result["keys"]:
            current = "none is enabled" if key["current_version"] is None else f"wraps by {key['current_version']}"
            versions = key["versions"]
            number = versions if isinstance(versions, int) else len(versions)
            lines.append(f"{key['key_id']}: {count(number, 'version')}, {current}")
            if isinstance(versions, list):
                lines += [f"  {v['version']:>4}  {v['state']:<9}  {v['age_days']} days" for v in versions]
        if not result["keys"]:
            lines.append("no keys yet: `ags-fast keys create` makes one")
    if following is not None:
        lines += ["", "Next:", f"  {following}"]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------- commands

KEYSTORE = (
    option(
        "file", metavar="KEYSTORE", nargs="?", help=f"the keystore; default: {KEYSTORE_ENV}, or that of the profile"
    ),
    keystore_secret("--", "KEYSTORE"),
    JSON,
)
KEY_ID = option("key_id", metavar="KEY_ID")
STATE = (*KEYSTORE, KEY_ID, option("--version", type=int, metavar="N", help="one version; default: all of them"))
DESTROY = (
    option(
        "--version",
        type=positive,
        metavar="N",
        action="append",
        dest="versions",
        required=True,
        help="a version to destroy; may be repeated",
    ),
    option(
        "--dataset",
        metavar="DATASET",
        action=Pinned,
        dest="datasets",
        help="a dataset under the key, which must not need the version; may be repeated",
    ),
    option(
        "--pin",
        metavar="PIN",
        action=Pinned,
        dest="datasets",
        help="the dataset before this must descend from the version of this pin, which a job printed",
    ),
    switch("--unchecked", "look at no dataset: what only these versions wrapped is lost"),
    KNOWN[0].but(help="the folder or database with the KEKs of the datasets; default: each dataset"),
    DRY_RUN,
)
MADE = "; if it does not exist, it is made, with a new key"
COMMANDS = (
    Command(
        "init",
        _init,
        (option("file", metavar="KEYSTORE", help="the file to make"), keystore_secret("--", "KEYSTORE", MADE), JSON),
        "Make an empty KEYSTORE. Without an option the passphrase is asked for, twice.",
    ),
    Command(
        "create",
        _create,
        (
            *KEYSTORE,
            KEY_ID.but(help="the name of the key: any text"),
            switch("--new-version", "rotate the master key KEY_ID: from now on the new version wraps"),
        ),
        "Make a master key in KEYSTORE.",
    ),
    Command("list", _list, KEYSTORE, "Show the master keys in KEYSTORE."),
    Command(
        "enable", _set_state, STATE, "Make a master key, or one version of it, enabled.", defaults={"state": "enabled"}
    ),
    Command(
        "disable",
        _set_state,
        STATE,
        "Make a master key, or one version of it, disabled.",
        defaults={"state": "disabled"},
    ),
    Command(
        "destroy",
        _destroy,
        (*KEYSTORE, KEY_ID, *DESTROY),
        "Destroy old versions of a master key in KEYSTORE if no DATASET needs them. This cannot be undone.",
    ),
)
