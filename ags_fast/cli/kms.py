"""Options that name a KMS, and the properties that they give."""

from __future__ import annotations

import getpass
import os
from typing import TYPE_CHECKING

from ags_fast.cli.codes import ConfigurationError
from ags_fast.cli.options import Group, OneOf, Option, Pairs, option
from ags_fast.cli.terminal import printable
from ags_fast.errors import KeyAccessError
from ags_fast.keys.kms import KMS_IMPL, KMS_TYPE, load_kms, local
from ags_fast.keys.kms.names import guards

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

KEYSTORE_ENV, KEY_FILE_ENV = "AGS_FAST_KEYSTORE", "AGS_FAST_KEY_FILE"
TYPED_ENV = "AGS_FAST_TYPED_PASSPHRASE"  # where worker processes find a typed passphrase
SECRETS = {"key_file": local.KEY_FILE, "passphrase_file": local.PASSPHRASE_FILE, "passphrase_env": local.PASSPHRASE_ENV}


def kms_group(*, new: bool = False) -> Group:
    """Return the options that name a KMS. new: for the KMS to move to, ``--new-keystore`` and so on."""
    dash, a = ("--new-", "to move to another KMS: a") if new else ("--", "a")
    default = "" if new else f"; default: {KEYSTORE_ENV}"
    return Group(
        "the KMS to move to" if new else "KMS",
        (
            option(
                f"{dash}keystore", metavar="PATH", help=f"{a} local keystore, made by `ags-fast keys init`{default}"
            ),
            keystore_secret(dash, "the keystore"),
            option(
                f"{dash}kms",
                metavar="NAME=VALUE",
                action=Pairs,
                help=f"{a} property of another KMS, such as encryption.kms-type=aws; may be repeated",
            ),
        ),
    )


def keystore_secret(dash: str, keystore: str, made: str = "") -> OneOf:
    """Return the options that name what opens a keystore."""
    options: tuple[Option, ...] = (
        option(f"{dash}key-file", metavar="PATH", help=f"the file with the key that opens {keystore}{made}"),
        option(f"{dash}passphrase-file", metavar="PATH", help="the file with the passphrase"),
        option(f"{dash}passphrase-env", metavar="NAME", help="the environment variable with the passphrase"),
    )
    return OneOf(options)


def kms(args: argparse.Namespace) -> dict[str, str]:
    """Return the properties of the KMS. They are checked once, and a passphrase is asked for once.

    Without properties, the command ends with a usage error.
    """
    held: dict[str, dict[str, str]] = vars(args).setdefault("held_properties", {})
    if not held:
        properties = kms_properties(args)
        if not properties:
            how = "`ags-fast config init` writes a profile for all commands; or --keystore PATH, or --kms NAME=VALUE"
            args.usage(f"say which KMS: {how}")
        held["kms"] = checked(properties)
    return held["kms"]


def checked(properties: dict[str, str]) -> dict[str, str]:
    """Return `properties`, which may be empty. Raises ConfigurationError if they make no client."""
    try:
        if properties:
            load_kms(properties)
    except (ValueError, ImportError) as error:
        raise ConfigurationError(str(error)) from None
    return properties


def kms_properties(args: argparse.Namespace, *, new: bool = False, ask: bool = True) -> dict[str, str]:
    """Return the properties that the options give, else the profile's.

    Single properties, of the same kind of KMS, win over the profile's. Another KMS takes the place of the profile's,
    but not of its guards. Asks for a passphrase if a keystore is named without a secret.
    """
    prefix, dash, variable = ("new_", "--new-", TYPED_ENV + "_NEW") if new else ("", "--", TYPED_ENV)
    properties = dict(getattr(args, f"{prefix}kms"))
    keystore = getattr(args, f"{prefix}keystore")
    given = {name: value for name in SECRETS if (value := getattr(args, prefix + name)) is not None}
    profile = {} if new else args.chosen.kms
    if not (new or keystore or properties):
        keystore = os.environ.get(KEYSTORE_ENV)
    if not (new or given) and keystore and (key_file := os.environ.get(KEY_FILE_ENV)):
        given = {"key_file": key_file}
    if keystore is None:
        if given:
            flag = next(iter(given)).replace("_", "-")
            args.usage(f"{dash}{flag} opens a keystore: say which, with {dash}keystore PATH")
        if any(name in properties and properties[name] != profile.get(name) for name in (KMS_TYPE, KMS_IMPL)):
            profile = guards(profile)
        return {**profile, **properties}
    ours = {KMS_TYPE: "local", local.PATH: os.path.abspath(keystore)}
    for name, value in given.items():
        ours[SECRETS[name]] = value if name == "passphrase_env" else os.path.abspath(value)
    for name in (KMS_IMPL, *ours):
        if properties.get(name, ours.get(name)) != ours.get(name):
            args.usage(f"{dash}kms {name}=... does not go with {dash}keystore")
    properties = {**guards(profile), **properties, **ours}
    if not given and ask:
        os.environ[variable] = ask_passphrase(keystore)
        properties[local.PASSPHRASE_ENV] = variable
    return properties


def kms_options(properties: Mapping[str, str]) -> list[str]:
    """Return the options that `kms_properties` would turn into `properties`."""
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


def ask_passphrase(keystore: str) -> str:
    """Ask for a passphrase on the terminal. Raises KeyAccessError without a terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        raise KeyAccessError(
            "no terminal to ask for the passphrase on: use --passphrase-file, --passphrase-env or --key-file"
        ) from None
    return getpass.getpass(f"Passphrase of {printable(keystore)}: ")
