"""The steps of an audit as sentences, and as commands for a shell."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from ags_fast.cli.kms import SECRETS, kms_options
from ags_fast.keys.kms import KMS_TYPE, local

if TYPE_CHECKING:
    from collections.abc import Mapping

COMMANDS = {
    "audit": ("keys", "audit"),
    "expire": ("keys", "expire"),
    "rekey_files": ("rekey",),
    "rotate": ("keys", "rotate"),
    "sweep": ("sweep",),
}
TEXTS = {  # {key_id}: the master key of the step; {about}: what the step deals with; {files}: files of the step
    "give-up-the-dead": "Resume the jobs that died ({about}) by their own commands with --resume, or give them up:",
    "wrap-stale-keks": "Older versions of {about} still wrap KEKs: wrap these KEKs by the current version.",
    "replace-worn-keks": "A KEK is older, or has wrapped more keys, than the policy allows: replace it.",
    "remove-what-is-over": "Remove what nothing needs any more, and what the policy does not keep.",
    "rotate-master-key": "Rotate the master key {key_id} in the KMS, unless that is done.",
    "wrap-data-keys": "Have the KMS wrap each data key again. (--what double-wrap instead costs an unwrap for each, "
    "once, and then a rotation takes a call for each KEK.)",
    "replace-worn-keks-too": "Replace the KEKs, too: one is older, or has wrapped more keys, than the policy allows.",
    "wrap-keks": "Wrap the KEKs by the current version. Only an entry of the log is written.",
    "renew-key-material": "Rewrite the files: the old version of the master key has wrapped data keys in their key "
    "material. (--path PATTERN: only matching files; --key-material none: files without it.)",
    "remove-earlier-versions": "Remove the earlier versions, whose data keys the old version of the master key has "
    "wrapped.",
    "new-master-version": "Give {key_id} a new version.",
    "replace-keks-at-once": "Replace the KEKs, and remove the old KEKs with everything that they open.",
    "new-data-keys": "Give each file a new data key.",
    "remove-old-files": "Remove the files under the old data keys.",
    "destroy-old-master-versions": "Destroy the older versions of the master keys in the KMS when no KEK needs them. "
    "Ask which:",
    "new-data-keys-of": "Give {files} a new data key.",
    "remove-versions-and-files": "Remove the earlier versions, with the files under the old data keys.",
    "end-the-access": "First end the access: take the right to use the key from whoever has it. Rewrapping (--what "
    "mek) alone does not help: anyone who had the master key and could read the dataset has the KEKs, and with the "
    "tables the data keys.",
    "new-master-version-or-key": "Give {key_id} a new version, or make a new master key and add --wrapping-key-id to "
    "the next two commands.",
    "wrap-by-a-kek": "Put the data keys, which the KMS wraps, under a new KEK.",
    "replace-keks": "Replace the KEKs.",
    "remove-everything-old": "Remove everything that the old keys open.",
    "ask-again": "Ask again which versions may be destroyed. Disable the old version in the KMS, and destroy it later.",
}
CONDITIONS = {
    "could-write": "whoever has the KEK may also write to the storage: then that KEK seals forged versions, as long "
    "as a KMS opens the KEK",
    "could-read": "whoever has the KEK could read the tables, here or in a copy: then the data keys are known, too",
}
NOTES = (
    "All of this is about {what}, as it is now. Other datasets may use the same master keys: audit them, too. An "
    "earlier copy of this dataset needs what the dataset needed then.",
    "Calls of the KMS are those of one process that does all of the work and knows no key yet. Each other process that "
    "helps (Spark tasks, local workers) unwraps each KEK that it needs once more.",
    "No command here destroys a version of a master key. Destroy it in the KMS (in a local keystore: `ags-fast keys "
    "destroy`): disable it first, read what you need to be able to read, and destroy it later.",
)
LEAK_NOTE = (
    "Nothing calls back what was copied. An old copy of _ags, with the keys that leaked, opens the files in it, and "
    "those here whose data keys are still the same: only rekey changes these."
)


def printable_audit(
    found: dict[str, Any], dataset: str, properties: Mapping[str, str], key_store: str | None = None
) -> dict[str, Any]:
    """Return what `jobs.audit` found, with sentences and commands in place of names of steps and functions."""

    def command(step: Mapping[str, Any]) -> str | None:
        return _command(step["function"], step["arguments"], dataset, properties, key_store)

    def shown(step: dict[str, Any]) -> dict[str, Any]:
        arguments, only_if = step["arguments"], step["only_if"]
        files = "these files" if "paths" in arguments else "each file (--path PATTERN: only matching files)"
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
        "notes": [*(note.format(what=_what(found["version"])) for note in NOTES), *([LEAK_NOTE] if leaked else [])],
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
    properties: Mapping[str, str],
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
            words += [word for item in value for word in ("--path", item)]
        elif value is True:
            words.append(option)
        else:
            words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join([*words, *kms_options(properties), *(("--key-store", key_store) if key_store else ())])


def _new_version(key_id: str, properties: Mapping[str, str]) -> str:
    """Return what gives a master key a new version; a comment if no command of ours does."""
    if properties.get(KMS_TYPE) != "local":
        return f"# in the KMS: give {key_id} a new version"
    ours = (KMS_TYPE, local.PATH, *SECRETS.values())
    _, path, *secret = kms_options({name: properties[name] for name in ours if name in properties})
    return shlex.join(["ags-fast", "keys", "create", path, key_id, "--new-version", *secret])
