"""The steps of an audit as sentences, and as commands for a shell."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ags_fast.cli.kms import SECRETS, kms_options
from ags_fast.keys.kms import KMS_TYPE, local

if TYPE_CHECKING:
    from collections.abc import Mapping

COMMANDS = {
    "audit": ("keys", "audit"),
    "expire": ("expire",),
    "rekey_files": ("rekey",),
    "rotate": ("keys", "rotate"),
    "sweep": ("sweep",),
}
WORDS = tomllib.loads((Path(__file__).parent / "runbook.toml").read_text("utf-8"))
TEXTS, CONDITIONS = WORDS["texts"], WORDS["conditions"]


def printable_audit(
    found: dict[str, Any], dataset: str, properties: Mapping[str, str] | None, key_store: str | None = None
) -> dict[str, Any]:
    """Return what `jobs.audit` found, with sentences and commands in place of names of steps and functions.

    properties: of the KMS; None: commands find them in the default profile.
    """

    def command(step: Mapping[str, Any]) -> str | None:
        return _command(step["function"], step["arguments"], dataset, properties, key_store)

    def shown(step: dict[str, Any]) -> dict[str, Any]:
        arguments, only_if = step["arguments"], step["only_if"]
        files = "these files" if "paths" in arguments else "each file (--include PATTERN: only matching files)"
        words = {"about": _listed(step["about"]), "files": files, "key_id": arguments.get("key_id")}
        text = TEXTS[step["name"]].format(**words)
        return {**step, "text": text, "only_if": only_if and CONDITIONS[only_if], "command": command(step)}

    def master(row: dict[str, Any]) -> dict[str, Any]:
        versions = [{**version, "first": [command(step) for step in version["first"]]} for version in row["versions"]]
        return {**row, "versions": versions}

    leaked = found["event"] is not None and found["event"].endswith("-leaked")
    events = {event: [shown(step) for step in steps] for event, steps in found.get("events", {}).items()}
    return {
        **found,
        **({"events": events} if events else {}),
        "masters": [master(row) for row in found["masters"]],
        "steps": [shown(step) for step in found["steps"]],
        "notes": [
            *(note.format(what=_what(found["version"])) for note in WORDS["notes"]),
            *([WORDS["leak_note"]] if leaked else []),
        ],
    }


def _what(version: int | None) -> str:
    """Return what an audit is about."""
    return "this dataset" if version is None else f"version {version} of this dataset, with the versions before it"


def _listed(items: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))


def _command(
    function: str | None,
    arguments: Mapping[str, Any],
    dataset: str,
    properties: Mapping[str, str] | None,
    key_store: str | None,
) -> str | None:
    """Return a call of a function of `ags_fast.jobs` as a shell takes it."""
    if function is None:
        return None
    if function == "new_version":
        return _new_version(arguments["key_id"], properties)
    words = ["ags-fast", *COMMANDS[function], dataset]
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, list):
            words += [word for item in value for word in ("--include", item)]
        elif value is True:
            words.append(option)
        else:
            words += [option, f"{value:g}d" if isinstance(value, float) else str(value)]
    return shlex.join([*words, *kms_options(properties or {}), *(("--kek-store", key_store) if key_store else ())])


def _new_version(key_id: str, properties: Mapping[str, str] | None) -> str:
    """Return what gives a master key a new version; a comment if no command of ours does."""
    if properties is None:
        return shlex.join(["ags-fast", "keys", "create", key_id, "--new-version"])
    if properties.get(KMS_TYPE) != "local":
        return f"# in the KMS: give {key_id} a new version"
    ours = (KMS_TYPE, local.PATH, *SECRETS.values())
    _, path, *secret = kms_options({name: properties[name] for name in ours if name in properties})
    return shlex.join(["ags-fast", "keys", "create", path, key_id, "--new-version", *secret])
