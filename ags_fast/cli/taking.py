"""``ags-fast cp``: files into a dataset, and out of it."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from ags_fast.cli.commands import TAKE_COMMANDS
from ags_fast.cli.job import DATASET, known
from ags_fast.cli.kms import kms
from ags_fast.cli.options import FORCE, NO_FSYNC, NO_PRESERVE, Command, option
from ags_fast.cli.text import fields
from ags_fast.dataset.dataset import Dataset
from ags_fast.dataset.names import FORMATS, LOG
from ags_fast.fs import NewFile

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

PLACE = re.compile(r"((?:[\w+.-]+://)?[^:]+):(?!//)(.*)", re.DOTALL)
COPY_NBYTES = 1 << 20
FORM = "DATASET:PATH names a file of a dataset, such as orders.enc:2026/01.csv"


class _Place(NamedTuple):
    """A file or folder; of a dataset, or local (dataset is None)."""

    dataset: str | None
    path: str


def _known(text: str) -> _Place | None:
    """Return what is there: a local file, or a dataset, in a folder or at a URL. None: neither, as far as one sees."""
    if os.path.lexists(text):
        return _Place(None, text)
    if (found := PLACE.fullmatch(text)) and "://" in found[1]:
        return _Place(*found.groups())
    colons = (at for at, char in enumerate(text) if char == ":")
    folder = next((text[:at] for at in colons if os.path.isdir(os.path.join(text[:at], LOG))), None)
    return None if folder is None else _Place(folder, text[len(folder) + 1 :])


def _places(texts: Sequence[str]) -> list[_Place]:
    """Tell files of datasets from local ones, whose names may have colons, too."""
    known = [_known(text) for text in texts]
    may_be = None if any(place and place.dataset for place in known) else PLACE  # a dataset that is not there
    new = [_Place(*found.groups()) if may_be and (found := may_be.fullmatch(t)) else _Place(None, t) for t in texts]
    return [there or other for there, other in zip(known, new, strict=True)]


def _cp(args: argparse.Namespace) -> dict[str, Any]:
    begun = time.monotonic()
    *sources, target = _places((*args.sources, args.target))
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


def _pairs(sources: Sequence[str], target: str, into: bool) -> list[tuple[str, str]]:
    """Return the sources, each with its target. into: the target is a folder."""
    if not into:
        return [(source, target) for source in sources]
    targets = [os.path.join(target, os.path.basename(source)) for source in sources]
    for name in targets:
        if targets.count(name) > 1:
            raise ValueError(f"two of the sources would be {name}: copy them one by one")
    return list(zip(sources, targets, strict=True))


def _out(args: argparse.Namespace, dataset: Dataset, sources: Sequence[str], target: str) -> list[dict[str, Any]]:
    """Decrypt files, which appear when all of them are complete."""
    into = os.path.isdir(target)
    if len(sources) > 1 and not into:
        raise NotADirectoryError(errno.ENOTDIR, "several files need a folder, which is not there", target)
    copied = []
    with ExitStack() as stack:
        made = []
        for path, name in _pairs(sources, target, into):
            file = dataset.find(path)
            if file is None:
                raise FileNotFoundError(f"{args.file} has no file {path!r}: `ags-fast ls` lists the files")
            mode, mtime_ns = (file.mode, file.mtime_ns) if args.preserve else (None, None)
            new = stack.enter_context(
                NewFile(name, exclusive=not args.force, private=True, fsync=args.fsync, mode=mode, mtime_ns=mtime_ns)
            )
            dataset.copy_file(path, cast("BinaryIO", new))
            made.append(new)
            copied.append({"src": path, "dst": name, "plain_bytes": file.plain_length})
        for new in made:
            new.publish()
    return copied


def _in(args: argparse.Namespace, dataset: Dataset, sources: Sequence[str], target: str) -> list[dict[str, Any]]:
    """Encrypt files, and commit one version that has all of them."""
    into = len(sources) > 1 or target == "" or target.endswith("/")
    copied = []
    with dataset.transaction(fsync=args.fsync) as new:
        for source, path in _pairs(sources, target, into):
            if os.path.isdir(source):
                raise IsADirectoryError(errno.EISDIR, "`ags-fast encrypt` takes folders, and cp takes files", source)
            if dataset.find(path) is not None and not args.force:
                raise FileExistsError(f"{args.file} has {path!r}: --force replaces the file")
            with open(source, "rb") as file, new.create(path, args.format, replace=args.force) as out:
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
            option("sources", metavar="SRC", nargs="+", help=f"a file. {FORM}"),
            option("target", metavar="DST", help="a file; a folder for several files"),
            *DATASET[1:],
            option("--version", type=int, metavar="N", help="out of this version; default: the newest"),
            option("--format", choices=FORMATS, default="ags1", help="into: parquet, for Parquet files; default ags1"),
            FORCE.but(help="replace files that exist"),
            NO_FSYNC,
            NO_PRESERVE.but(help="out: do not restore permission bits and times"),
        ),
        TAKE_COMMANDS["cp"],
        defaults={"file": ""},
    ),
)
