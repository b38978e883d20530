"""Profiles: KMS properties, a master key and options of a storage under one name, in ``config.toml``. Never a key."""

from __future__ import annotations

import errno
import os
import re
from typing import Any, NamedTuple

from ags_fast._secrets import check_no_secret

__all__ = ["ADVICE", "COMMANDS", "CONFIG_ENV", "DEFAULT", "NO_PROFILE", "PATHS", "PROFILE_ENV", "Profile"]
__all__ += ["UnknownProfileError", "config_path", "profile", "reached"]

CONFIG_ENV, PROFILE_ENV = "AGS_FAST_CONFIG", "AGS_FAST_PROFILE"
DEFAULT = "default"  # the profile that is used if none is named
SETTINGS = ("wrapping_key_id", "kek_store", "storage_options")
COMMANDS = (  # of ags-fast, those whose options may have other defaults
    *("encrypt", "decrypt", "verify", "rekey", "sweep", "maintain", "rm", "restore", "compact", "cat", "mount"),
    *("inspect", "cp", "ls", "log", "pin", "diff", "stat", "du"),
    *("status", "audit", "rotate", "expire", "policy"),
)
PATHS = (".path", "-file", ".library")  # how names of properties end whose value is a path

ADVICE = "keep it in a file or in an environment variable, and name that"


class UnknownProfileError(ValueError):
    """The configuration has no profile of this name."""


class Profile(NamedTuple):
    """What jobs take, under one name."""

    name: str  # "" if no profile was chosen
    kms: dict[str, str]  # the properties of the KMS, for ``kms=``
    wrapping_key_id: str | None  # the master key of new datasets
    key_store: str | None  # where KEKs are kept; None: in the dataset itself
    storage_options: dict[str, Any] | None  # for fsspec
    commands: dict[str, dict[str, Any]]  # by command, such as "encrypt", other defaults for its options
    source: str  # the file that has the profile


NO_PROFILE = Profile("", {}, None, None, None, {}, "")


def config_path() -> str:
    """Return the path of the configuration, which need not exist: see docs/keys.md."""
    if named := os.environ.get(CONFIG_ENV):
        return os.path.abspath(named)
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # as the XDG specification has it
        base = os.path.expanduser("~/.config")
    return os.path.join(base, "ags_fast", "config.toml")


def profile(name: str | None = None) -> Profile:
    """Return a profile of the configuration, the file that `config_path` returns. Its folder is where paths start.

    Args:
        name: The name of the profile; by default ``AGS_FAST_PROFILE``, else "default".

    Raises:
        ValueError: There is no such profile (the message names those there are), the file is malformed, or a value
            looks like a key or a secret. The value is not in the message.
        FileNotFoundError: ``AGS_FAST_CONFIG`` names a file that is not there.
    """
    name, path = name or os.environ.get(PROFILE_ENV) or DEFAULT, config_path()
    profiles = _read(path).get("profiles", {})
    if not isinstance(profiles, dict) or not isinstance(profiles.get(name, {}), dict):
        raise ValueError(f"{path}: profiles are tables: [profiles.NAME]")
    if name not in profiles:
        there = f"the file has {', '.join(sorted(profiles))}" if profiles else "`ags-fast config init` writes one"
        raise UnknownProfileError(f"{path} has no profile {name!r}: {there}")
    return _checked(name, profiles[name], path)


def reached(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments that reach a dataset: without `kms`, those that are missing are of the default profile."""
    if given.get("kms") is not None:
        return given
    try:
        ours = profile()._asdict()
    except UnknownProfileError as error:
        raise ValueError(f"kms is not given, and {error}") from None
    missing = [name for name in ("kms", "key_store", "storage_options") if given.get(name) is None]
    return {**given, **{name: ours[name] for name in missing}}


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            import tomllib

            return tomllib.load(file)
    except FileNotFoundError:
        if os.environ.get(CONFIG_ENV):
            raise FileNotFoundError(errno.ENOENT, f"{CONFIG_ENV} names a file that is not there", path) from None
        return {}
    except ValueError as error:  # its message may quote the file
        place = re.search(r"\(at [\w ,]+\)$", str(error))
        raise ValueError(f"{path} is not TOML {place[0] if place else ''}".rstrip()) from None


def _checked(name: str, table: dict[str, Any], path: str) -> Profile:
    place, kms, commands = f"{path}, profile {name}", {}, {}
    check_no_secret(table, place, ADVICE)
    for setting, value in table.items():
        if setting in SETTINGS:
            if not isinstance(value, dict if setting == "storage_options" else str):
                raise ValueError(f"{place}: {setting} is {'a table' if setting == 'storage_options' else 'text'}")
        elif isinstance(value, dict) and setting in COMMANDS:
            commands[setting] = value
        elif isinstance(value, dict):
            raise ValueError(f'{place}: quote the names of KMS properties, such as "{setting}.NAME" = "VALUE"')
        elif "." not in setting:
            raise ValueError(f"{place}: {setting} is not a setting: use {', '.join(SETTINGS)} or a quoted KMS property")
        elif not isinstance(value, str):
            raise ValueError(f"{place}: {setting} is text: quote the value")
        else:
            is_path = setting.endswith(PATHS)
            kms[setting] = os.path.join(os.path.dirname(path), os.path.expanduser(value)) if is_path else value
    key_id, key_store, storage = (table.get(one) for one in SETTINGS)
    return Profile(name, kms, key_id, key_store, storage, commands, path)
