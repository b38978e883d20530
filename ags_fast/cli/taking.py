"""``ags-fast cp``: files and folders into a dataset, and out of it."""

from __future__ import annotations

import errno
import fnmatch
import os
import posixpath
import re
import shutil
import time
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, get_args

from ags_fast._types import FileFormat
from ags_fast.cli.commands import TEXTS
from ags_fast.cli.files import StandardOutput, standard_input
from ags_fast.cli.job import DATASET, known
from ags_fast.cli.kms import kms
from ags_fast.cli.options import NO_FSYNC, NO_PRESERVE, OVERWRITE, Command, option
from ags_fast.cli.places import FORM, STANDARD, places
from ags_fast.cli.terminal import warn
from ags_fast.cli.text import fields
from ags_fast.dataset.dataset import Dataset
from ags_fast.fs import NewFile, Store

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

COPY_NBYTES = 1 << 20
AT_ONCE = 100  # files that appear together: each is open until then
Source = tuple[str, list[str]]  # a file or a folder, and its files: what follows the name of the source, "" for a file


def _cp(args: argparse.Namespace) -> dict[str, Any]:
    begun = time.monotonic()
    *sources, target = places((*args.sources, args.target))
    datasets = {place.dataset for place in (*sources, target) if place.dataset is not None}
    if len(datasets) != 1 or {place.dataset is None for place in sources} != {target.dataset is not None}:
        args.usage(f"either DST or every SRC must be in a dataset, the same one: {FORM}")
    (args.file,) = datasets
    if target.dataset is not None and args.version is not None:
        args.usage("--version is for files that are copied out of a dataset")
    dataset = Dataset.open(args.file, kms=kms(args), version=args.version, **known(args))
    copy = _out if target.dataset is None else _in
    copied = copy(args, dataset, [place.path for place in sources], target.path)
    told = {"dataset": args.file, "version": dataset.version, "pin": dataset.pin}
    return {**told, "seconds": round(time.monotonic() - begun, 3), "files": copied}


def _pairs(sources: Iterable[Source], target: str, into: bool) -> list[tuple[str, str]]:
    """Return each file with its target. into: the target is a folder, which gets the sources by their names."""
    join, pairs = posixpath.join, []
    for path, below in sources:
        base = posixpath.basename(path.rstrip("/"))
        name = join(target, base) if into and base not in ("", ".") else target  # a whole dataset has no name
        pairs += [(join(path, rest) if rest else path, join(name, rest) if rest else name) for rest in below]
    for name, count in Counter(name for _, name in pairs).items():
        if count > 1:
            raise ValueError(f"two of the sources would be {name}: copy them one by one")
    return pairs


def _recursive(args: argparse.Namespace, path: str) -> None:
    if not args.recursive:
        raise IsADirectoryError(errno.EISDIR, "a folder is copied with -r", path)


# ------------------------------------------------------------------------------------------------------------------ out


def _found(args: argparse.Namespace, dataset: Dataset, path: str) -> list[Source]:
    """Return the file of the dataset that has this path, or the folder, or what matches it as the shell would do."""
    path = path.rstrip("/")
    if path and dataset.find(path) is not None:
        return [(path, [""])]
    if not path or dataset.has_folder(path):
        _recursive(args, path)
        return [(path, [file.path[len(path) :].lstrip("/") for file in dataset.list_folder(path, deep=True)[1]])]
    if magic := re.search(r"[*?[]", path):
        depth = path.count("/") + 1  # no * matches a slash, because there is one slash for each of the pattern
        files = dataset.list_folder(path[: magic.start()].rpartition("/")[0], deep=True)[1]
        names = {"/".join(file.path.split("/")[:depth]) for file in files}
        if matching := sorted(fnmatch.filter(names, path)):
            return [source for name in matching for source in _found(args, dataset, name)]
    raise FileNotFoundError(f"{args.file} has no file {path!r}: `ags-fast ls` lists the files")


def _out(args: argparse.Namespace, dataset: Dataset, paths: Sequence[str], target: str) -> list[dict[str, Any]]:
    """Decrypt files, which appear when all of them are complete, `AT_ONCE` at a time."""
    sources = [source for path in paths for source in _found(args, dataset, path)]
    into = target != STANDARD and os.path.isdir(target)
    if not into and (len(sources) > 1 or (target == STANDARD and sources[0][1] != [""])):
        raise NotADirectoryError(errno.ENOTDIR, "several files need a folder, which is not there", target)
    pairs = _pairs(sources, target, into)
    return [one for at in range(0, len(pairs), AT_ONCE) for one in _decrypt(args, dataset, pairs[at : at + AT_ONCE])]


def _decrypt(args: argparse.Namespace, dataset: Dataset, pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    copied = []
    how: dict[str, Any] = {"exclusive": not args.overwrite, "private": True, "fsync": args.fsync}
    with ExitStack() as stack:
        made: list[NewFile | StandardOutput] = []
        for path, name in pairs:
            file = dataset.find(path)
            assert file is not None
            if args.preserve:
                how |= {"mode": file.mode, "mtime_ns": file.mtime_ns}
            if args.recursive:
                os.makedirs(os.path.dirname(os.path.abspath(name)), exist_ok=True)
            new: NewFile | StandardOutput = StandardOutput() if name == STANDARD else NewFile(name, **how)
            made.append(new)
            stack.push(new.__exit__)
            dataset.copy_file(path, new)
            copied.append({"src": path, "dst": name, "plain_bytes": file.plain_length})
        for new in made:
            new.publish()
    return copied


# ------------------------------------------------------------------------------------------------------------------- in


def _local(args: argparse.Namespace, path: str) -> Source:
    if path == STANDARD or not os.path.isdir(path):
        return path, [""]
    _recursive(args, path)
    listed, left_out = Store(path).list_all()
    for name, _, why in left_out:
        warn(f"{os.path.join(path, name)} is left out: {why}")
    return path, [entry.path for entry in listed]


def _in(args: argparse.Namespace, dataset: Dataset, paths: Sequence[str], target: str) -> list[dict[str, Any]]:
    """Encrypt files, and commit one version that has all of them."""
    folder = target.rstrip("/")
    into = len(paths) > 1 or not folder or target.endswith("/") or dataset.has_folder(folder)
    if STANDARD in paths and into:
        args.usage("standard input has no name: name the file, as in `- orders.enc:2026/01.csv`")
    copied = []
    with dataset.transaction(fsync=args.fsync) as new:
        for source, path in _pairs([_local(args, path) for path in paths], folder, into):
            if dataset.find(path) is not None and not args.overwrite:
                raise FileExistsError(f"{args.file} has {path!r}: --overwrite replaces the file")
            with (
                standard_input(args) if source == STANDARD else open(source, "rb") as file,
                new.create(path, args.format, replace=args.overwrite) as out,
            ):
                shutil.copyfileobj(file, out, COPY_NBYTES)
                copied.append({"src": source, "dst": path, "plain_bytes": out.tell()})
    return copied


def taking_text(found: dict[str, Any]) -> str:
    """A line for each file, then the version."""
    lines = [f"{file['src']} -> {file['dst']}, {file['plain_bytes']:,} bytes" for file in found["files"]]
    return "\n".join(lines + fields({name: found[name] for name in ("version", "pin")}))


TEXT = taking_text
COMMANDS = (
    Command(
        "cp",
        _cp,
        (
            option("sources", metavar="SRC", nargs="+", help=f"a file, or - for standard input. {FORM}"),
            option("target", metavar="DST", help="a file; a folder for several files; - for standard output"),
            *DATASET[1:],
            option(*("-r", "--recursive"), action="store_true", help="copy folders, with all that is in them"),
            option("--version", type=int, metavar="N", help="out of this version; default: the newest"),
            option(
                "--format",
                choices=get_args(FileFormat),
                default="ags1",
                help="into: parquet, for Parquet files; default ags1",
            ),
            OVERWRITE.but(help="replace files that exist"),
            NO_FSYNC,
            NO_PRESERVE.but(help="out: do not restore permission bits and times"),
        ),
        TEXTS["cp"],
        defaults={"file": ""},
    ),
)
