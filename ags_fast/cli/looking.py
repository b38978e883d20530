"""``ags-fast ls|log|pin|diff|stat|du``: what a dataset has, and had. No file is read, only the log and tables."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Any

from ags_fast.cli.commands import TEXTS as HELP
from ags_fast.cli.job import DATASET, known, opened
from ags_fast.cli.kms import kms
from ags_fast.cli.options import EXCLUDE, Command, option, positive
from ags_fast.cli.places import PATH, PATTERNS
from ags_fast.cli.text import fields, table, when
from ags_fast.dataset.dataset import Dataset, DatasetVersion
from ags_fast.dataset.entries import chosen_files
from ags_fast.dataset.key_material import KEYTOOLS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.entry import Entry

VERSION = option("--version", type=int, metavar="N", help="the number of a version; default: the newest")
UNKNOWN = "-"


# ---------------------------------------------------------------------------------------------------------- operations


def _told(args: argparse.Namespace, version: Entry) -> dict[str, Any]:
    """Return how each result begins."""
    return {"dataset": args.file, "version": version.number, "pin": version.pin}


def _files(args: argparse.Namespace) -> tuple[Entry, list[FileEntry]]:
    """Return the version, and those of its files that match a pattern, sorted by path."""
    snapshot = opened(args, args.version)
    rows = sorted(snapshot.files(), key=lambda row: row.path)
    return snapshot.entry, chosen_files(rows, args.inside or None, args.exclude)


def _fields_of(entry: FileEntry) -> dict[str, Any]:
    return {
        **{name: getattr(entry, name) for name in ("path", "file", "format")},
        "source_length": entry.nbytes,
        **{name: getattr(entry, name) for name in ("plain_length", "file_length", "key_id")},
        "column_keys": {key["column"]: key["key_id"] for key in entry.column_keys or ()},
        "key_material": None if entry.key_material is None else KEYTOOLS,
        "mode": entry.mode,
        "mtime_ns": entry.mtime_ns,
        "job_id": entry.job_id,
    }


def _ls(args: argparse.Namespace) -> dict[str, Any]:
    version, entries = _files(args)
    if args.long:
        args.text = _long_text
    return {**_told(args, version), "files": [_fields_of(entry) for entry in entries]}


def _log(args: argparse.Namespace) -> dict[str, Any]:
    log, newest = opened(args)
    versions = [DatasetVersion.of(version) for version in log.look(log.kept, newest)[: args.last]]
    return {**_told(args, newest), "versions": [version._asdict() for version in versions]}


def _pin(args: argparse.Namespace) -> dict[str, Any]:
    return _told(args, opened(args).entry)


def _diff(args: argparse.Namespace) -> dict[str, Any]:
    dataset = Dataset.open(args.file, kms=kms(args), version=args.new, **known(args))
    changes = [
        change._asdict() | {name: file and file._asdict() for name, file in (("old", change.old), ("new", change.new))}
        for change in dataset.changes(args.old)
    ]
    told = {"dataset": args.file, "version": dataset.version, "pin": dataset.pin}
    return {**told, "since": args.old, "changes": changes}


def _stat(args: argparse.Namespace) -> dict[str, Any]:
    snapshot = opened(args, args.version)
    log, version = snapshot
    entry = snapshot.get(args.inside)
    if entry is None:
        raise FileNotFoundError(f"version {version.number} has no file {args.inside!r}: `ags-fast ls` lists the files")
    head = log.head()
    if (key := log.look(lambda head: head.keys.get(entry.key_id), head)) is not None and key.double_wrap:
        master_version = log.version_of(key)[1] or None
    else:
        master_version = log.kms.key_version(entry.wrapped_dek)
    return {
        **_told(args, version),
        **_fields_of(entry),
        "wrapping_key_id": key and key.wrapping_key_id,
        "master_version": master_version,
        "added_in": next((one.number for one in log.look(log.kept, head) if one.job_id == entry.job_id), None),
    }


def _du(args: argparse.Namespace) -> dict[str, Any]:
    version, entries = _files(args)
    folders: dict[str, tuple[int, ...]] = {"": (0, 0, 0, 0)}
    for entry in entries:
        parts = entry.path.split("/")[:-1][: args.depth]
        for depth in range(len(parts) + 1):
            path = "/".join(parts[:depth])
            more = (1, entry.nbytes, entry.plain_length, entry.file_length)
            folders[path] = tuple(map(sum, zip(folders.get(path, (0, 0, 0, 0)), more, strict=True)))
    names = ("files", "source_length", "plain_length", "file_length")
    listed = [{"path": path, **dict(zip(names, sums, strict=True))} for path, sums in sorted(folders.items())]
    return {**_told(args, version), "folders": listed}


# ------------------------------------------------------------------------------------------------------------- as text


def looking_text(found: dict[str, Any]) -> str:
    """Return the result of a command of this module as text for people."""
    return "\n".join(TEXTS[found["operation"]](found))


def _ls_text(found: dict[str, Any]) -> list[str]:
    return [f"{file['source_length']:>15,}  {file['path']}" for file in found["files"]]


def _long_text(found: dict[str, Any]) -> str:
    lines = table(
        ("mode", "bytes", "encrypted", "changed (UTC)", "key", "path"),
        [
            (
                _mode(file["mode"]),
                f"{file['source_length']:,}",
                f"{file['file_length']:,}",
                _changed(file["mtime_ns"]),
                file["key_id"],
                file["path"],
            )
            for file in found["files"]
        ],
        (False, True, True, False, False, False),
    )
    return "\n".join(lines)


def _mode(mode: int | None) -> str:
    return UNKNOWN if mode is None else stat.filemode(stat.S_IFREG | mode)


def _changed(mtime_ns: int | None) -> str:
    return UNKNOWN if mtime_ns is None else when(mtime_ns // 1_000_000)


def _log_text(found: dict[str, Any]) -> list[str]:
    rows = []
    for one in found["versions"]:
        numbers = f"{one['files']:,}", f"{one['source_length']:,}"
        rows.append((str(one["number"]), one["operation"], when(one["time_ms"]), *numbers, one["pin"]))
    return table(("version", "by", "at (UTC)", "files", "bytes", "pin"), rows, (True, False, False, True, True, False))


def _diff_text(found: dict[str, Any]) -> Iterable[str]:
    for change in found["changes"]:
        old, new = change["old"], change["new"]
        lengths = [f"{file['source_length']:,}" for file in (old, new) if file]
        size = lengths[0] if len(set(lengths)) == 1 else " -> ".join(lengths)
        path = f"{old['path']} -> {new['path']}" if change["kind"] == "moved" else change["path"]
        yield f"{change['kind']:<8}  {path}  ({size} bytes)"
    kinds = [change["kind"] for change in found["changes"]]
    told = ", ".join(f"{kinds.count(kind):,} {kind}" for kind in sorted(set(kinds)))
    yield f"version {found['since']} to {found['version']}: {told or 'the same files'}"


def _stat_text(found: dict[str, Any]) -> list[str]:
    shown = {name: value for name, value in found.items() if name not in ("operation", "pin", "column_keys", "job_id")}
    shown |= {name: f"{found[name]:,} bytes" for name in ("source_length", "plain_length", "file_length")}
    shown["mode"], shown["changed"] = _mode(found["mode"]), f"{_changed(shown.pop('mtime_ns'))} UTC"
    added = found["added_in"]
    shown["added_in"] = f"{'an expired version' if added is None else f'version {added}'}, by job {found['job_id']}"
    lines = fields({name: UNKNOWN if value is None else value for name, value in shown.items()})
    return lines + [f"column {name}: key {key_id}" for name, key_id in found["column_keys"].items()]


def _du_text(found: dict[str, Any]) -> list[str]:
    names = "source_length", "file_length", "files"
    rows = [(*(f"{one[name]:,}" for name in names), f"{one['path']}/".lstrip("/") or ".") for one in found["folders"]]
    return table(("bytes", "encrypted", "files", "folder"), rows, (True, True, True, False))


TEXTS: dict[str, Callable[[dict[str, Any]], Iterable[str]]] = {
    "ls": _ls_text,
    "log": _log_text,
    "pin": lambda found: [found["pin"]],
    "diff": _diff_text,
    "stat": _stat_text,
    "du": _du_text,
}

# ------------------------------------------------------------------------------------------------------------ commands

TEXT = looking_text
COMMANDS = (
    Command(
        "ls",
        _ls,
        (
            DATASET[0],
            PATTERNS,
            *DATASET[1:],
            EXCLUDE,
            VERSION,
            option("-l", "--long", action="store_true", help="all fields"),
        ),
        HELP["ls"],
    ),
    Command(
        "log",
        _log,
        (*DATASET, option("-n", "--last", type=positive, metavar="N", help="only the newest N versions")),
        HELP["log"],
    ),
    Command("pin", _pin, DATASET, HELP["pin"]),
    Command(
        "diff",
        _diff,
        (
            DATASET[0],
            option("old", metavar="A", type=int, help="a version's number"),
            option("new", metavar="B", type=int, nargs="?", help="a version's number; default: the newest"),
            *DATASET[1:],
        ),
        HELP["diff"],
    ),
    Command(
        "stat",
        _stat,
        (DATASET[0], PATH, *DATASET[1:], VERSION),
        HELP["stat"],
    ),
    Command(
        "du",
        _du,
        (
            DATASET[0],
            PATTERNS,
            *DATASET[1:],
            EXCLUDE,
            VERSION,
            option("--depth", type=positive, default=1, metavar="N", help="levels of folders to show; default 1"),
        ),
        HELP["du"],
    ),
)
