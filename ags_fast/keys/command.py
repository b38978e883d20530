"""``ags-fast keys``: the keystore of the local KMS, from a shell; and the options of commands that say which KMS."""

from __future__ import annotations

import errno
import getpass
import os
import stat
import time
from typing import TYPE_CHECKING, Any

from ags_fast._terminal import printable, warn
from ags_fast.errors import KeyAccessError
from ags_fast.keys.kms import KMS_IMPL, KMS_TYPE, local

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

__all__ = [
    "add_commands",
    "add_kms_options",
    "as_text",
    "ask_passphrase",
    "keystore_status",
    "kms_options",
    "kms_properties",
    "pairs",
]

TYPED_ENV = "AGS_FAST_TYPED_PASSPHRASE"  # where worker processes find what was typed here
SECRETS = {"key_file": local.KEY_FILE, "passphrase_file": local.PASSPHRASE_FILE, "passphrase_env": local.PASSPHRASE_ENV}


# --------------------------------------------------------------------------------------------------------- which KMS


def add_kms_options(command: argparse.ArgumentParser, *, new: bool = False) -> None:
    """The options that say which KMS; new: those of a second one, ``--new-keystore`` and so on, to move to."""
    dash, a = ("--new-", "to move to another KMS: a") if new else ("--", "a")
    group = command.add_argument_group("the KMS to move to" if new else "KMS")
    group.add_argument(f"{dash}keystore", metavar="PATH", help=f"{a} local keystore, made by `ags-fast keys init`")
    secret = group.add_mutually_exclusive_group()
    secret.add_argument(f"{dash}key-file", metavar="PATH", help="the file with the key that opens the keystore")
    secret.add_argument(f"{dash}passphrase-file", metavar="PATH", help="the file with its passphrase")
    secret.add_argument(f"{dash}passphrase-env", metavar="NAME", help="the environment variable with its passphrase")
    group.add_argument(
        f"{dash}kms",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help=f"{a} property of another KMS, such as encryption.kms-type=aws; may be repeated",
    )


def kms_properties(args: argparse.Namespace, *, new: bool = False) -> dict[str, str]:
    """What the options say; nothing if none was given. A passphrase that no option names is asked for."""
    prefix, dash, variable = ("new_", "--new-", TYPED_ENV + "_NEW") if new else ("", "--", TYPED_ENV)
    properties = pairs(args, f"{dash}kms", "NAME=VALUE", getattr(args, f"{prefix}kms"))
    keystore = getattr(args, f"{prefix}keystore")
    given = {name: value for name in SECRETS if (value := getattr(args, prefix + name)) is not None}
    if keystore is None:
        if given:
            option = next(iter(given)).replace("_", "-")
            args.usage(f"{dash}{option} opens a keystore: say which, with {dash}keystore PATH")
        return properties
    ours = {KMS_TYPE: "local", local.PATH: os.path.abspath(keystore)}
    for name, value in given.items():
        ours[SECRETS[name]] = value if name == "passphrase_env" else os.path.abspath(value)
    for name in (KMS_IMPL, *ours):
        if properties.get(name, ours.get(name)) != ours.get(name):
            args.usage(f"{dash}kms {name}=... does not go with {dash}keystore")
    properties |= ours
    if not given:
        os.environ[variable] = ask_passphrase(keystore)
        properties[local.PASSPHRASE_ENV] = variable
    return properties


def kms_options(properties: Mapping[str, str]) -> list[str]:
    """The options that `kms_properties` would make these of."""
    left = dict(properties)
    options = []
    if left.get(KMS_TYPE) == "local" and local.PATH in left:
        del left[KMS_TYPE]
        options += ["--keystore", left.pop(local.PATH)]
        for name, full in SECRETS.items():
            value = left.pop(full, None)
            if value is not None and not value.startswith(TYPED_ENV):
                options += ["--" + name.replace("_", "-"), value]
    return options + [word for name, value in left.items() for word in ("--kms", f"{name}={value}")]


def pairs(args: argparse.Namespace, option: str, metavar: str, texts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            args.usage(f"{option} wants {metavar}, not {text!r}")
        if found.setdefault(name, value) != value:
            args.usage(f"{option} gives {name} twice")
    return found


# ---------------------------------------------------------------------------------------------------------- keystores


def add_commands(
    groups: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Those on keystores. Returns ``keys``, for others to add theirs: `status` is to be among them."""
    keys = groups.add_parser("keys", help="keys of datasets, and master keys in a local keystore", allow_abbrev=False)
    operations = keys.add_subparsers(required=True, dest="operation", metavar="OPERATION")

    def add(name: str, run: Callable[[argparse.Namespace], dict[str, Any]], text: str) -> argparse.ArgumentParser:
        operation = operations.add_parser(name, help=text, description=text, allow_abbrev=False)
        operation.set_defaults(run=run, text=as_text)
        operation.add_argument("file", metavar="KEYSTORE")
        secret = operation.add_mutually_exclusive_group()
        made = "; made, with a new key, if it is not there" if name == "init" else ""
        secret.add_argument("--key-file", metavar="PATH", help=f"the file with the key that opens KEYSTORE{made}")
        secret.add_argument("--passphrase-file", metavar="PATH", help="the file with the passphrase")
        secret.add_argument("--passphrase-env", metavar="NAME", help="the environment variable with the passphrase")
        operation.add_argument("--json", action="store_true", help="print the result, or the error, as one JSON object")
        return operation

    add("init", _init, "Make an empty KEYSTORE. Without an option the passphrase is asked for, twice.")
    create = add("create", _create, "Make a master key in KEYSTORE.")
    create.add_argument("key_id", metavar="KEY_ID", help="what it will be called: any text")
    create.add_argument(
        "--new-version",
        action="store_true",
        help="rotate the master key KEY_ID: what is wrapped from now on is wrapped by the new version",
    )
    add("list", _list, "Show the master keys in KEYSTORE.")
    for name, state in (("enable", "enabled"), ("disable", "disabled")):
        operation = add(name, _set_state, f"Make a master key, or one version of it, {state}.")
        operation.set_defaults(state=state)
        operation.add_argument("key_id", metavar="KEY_ID")
        operation.add_argument("--version", type=int, metavar="N", help="default: all of them")
    return operations


def _properties(args: argparse.Namespace) -> dict[str, str]:
    given = {
        local.PATH: os.path.abspath(args.file),
        local.KEY_FILE: args.key_file and os.path.abspath(args.key_file),
        local.PASSPHRASE_FILE: args.passphrase_file and os.path.abspath(args.passphrase_file),
        local.PASSPHRASE_ENV: args.passphrase_env,
    }
    for path in (args.key_file, args.passphrase_file):
        if path is not None and os.path.isfile(path) and stat.S_IMODE(os.stat(path).st_mode) & 0o077:
            warn(f"others can read {path}: chmod 600 it")
    return {name: value for name, value in given.items() if value is not None}


def ask_passphrase(keystore: str) -> str:
    """What somebody types. KeyAccessError where there is nobody."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        raise KeyAccessError(
            "there is no terminal to ask for the passphrase: use --passphrase-file, --passphrase-env or --key-file"
        ) from None
    return getpass.getpass(f"Passphrase of {printable(keystore)}: ")


def _passphrase(args: argparse.Namespace, *, twice: bool = False) -> str | None:
    """The passphrase that somebody types, or None if an option says where it is."""
    if any(value is not None for value in (args.key_file, args.passphrase_file, args.passphrase_env)):
        return None
    passphrase = ask_passphrase(args.file)
    if twice and getpass.getpass("The same again: ") != passphrase:
        raise ValueError("the two passphrases differ; nothing was made")
    return passphrase


def _init(args: argparse.Namespace) -> dict[str, Any]:
    if os.path.lexists(args.file):  # before anybody types a passphrase
        raise FileExistsError(errno.EEXIST, local.TAKEN, args.file)
    properties = _properties(args)
    local.create_keystore(properties, passphrase=_passphrase(args, twice=True))
    shown = {"encryption.kms-type": "local", **properties}
    return {"operation": args.operation, "input": args.file, "properties": shown}


def _create(args: argparse.Namespace) -> dict[str, Any]:
    make = local.rotate_key if args.new_version else local.create_key
    version = make(_properties(args), args.key_id, passphrase=_passphrase(args))
    return {"operation": args.operation, "input": args.file, "key_id": args.key_id, "key_version": version}


def _list(args: argparse.Namespace) -> dict[str, Any]:
    keys = local.status(_properties(args), passphrase=_passphrase(args))["keys"]
    shown = [
        {
            "key_id": key["key_id"],
            "current_version": key["current_version"],
            "versions": len(key["versions"]),
            "created_ms": key["created_ms"],
        }
        for key in keys
    ]
    return {"operation": args.operation, "input": args.file, "keys": shown}


def keystore_status(args: argparse.Namespace) -> dict[str, Any]:
    """Each version of the master keys in a keystore: its state and its age."""
    found = local.status(_properties(args), passphrase=_passphrase(args))
    now_ms = time.time_ns() // 1_000_000
    for key in found["keys"]:
        for version in key["versions"]:
            version["age_days"] = round(max(0, now_ms - version["created_ms"]) / 86_400_000, 1)
    return {"operation": args.operation, "input": args.file, **found}


def _set_state(args: argparse.Namespace) -> dict[str, Any]:
    local.set_state(_properties(args), args.key_id, args.state, version=args.version, passphrase=_passphrase(args))
    version = "all" if args.version is None else args.version
    return {
        "operation": args.operation,
        "input": args.file,
        "key_id": args.key_id,
        "key_version": version,
        "state": args.state,
    }


def as_text(result: dict[str, Any]) -> str:
    """A result for people: the plain fields, then a line for each key and version, or for each property."""
    plain = {name: value for name, value in result.items() if not isinstance(value, (dict, list))}
    width = max(map(len, plain))
    lines = [f"{name.replace('_', ' '):<{width}}  {value}" for name, value in plain.items()]
    if "properties" in result:
        lines += ["", "Properties for load_kms, and for the kms= of the jobs:"]
        lines += [f"  {name}={value}" for name, value in result["properties"].items()]
    if "keys" in result:
        lines.append("")
        for key in result["keys"]:
            current = "none is enabled" if key["current_version"] is None else f"wraps by {key['current_version']}"
            versions = key["versions"]
            count = versions if isinstance(versions, int) else len(versions)
            lines.append(f"{key['key_id']}: {count} version{'s' * (count != 1)}, {current}")
            if isinstance(versions, list):
                lines += [f"  {v['version']:>4}  {v['state']:<9}  {v['age_days']} days" for v in versions]
        if not result["keys"]:
            lines.append("no keys yet: `ags-fast keys create` makes one")
    return "\n".join(lines)
