"""Files of datasets on the command line: ``DATASET PATH``, ``DATASET:PATH``, and ``:PATH`` in ``AGS_FAST_DATASET``."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.cli.options import option

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

STANDARD = "-"  # standard input as a source, standard output as a target; never a file of that name
DATASET_ENV = "AGS_FAST_DATASET"
FORM = "DATASET:PATH is a file of a dataset, such as orders.enc:2026/01.csv"
PLACE = re.compile(r"((?:[\w+.-]+://)?[^:]*):(?!//)(.*)", re.DOTALL)
DATASET = option("file", metavar="DATASET", nargs="?", help=f"the folder or URL of the dataset; default: {DATASET_ENV}")
PATH = option("inside", metavar="PATH", help="a file, as it was under SRC; or DATASET:PATH in place of DATASET PATH")
PATTERNS = option(
    "inside",
    metavar="PATTERN",
    nargs="*",
    help="only files that match, such as '2026/*'; or DATASET:PATTERN in place of DATASET PATTERN",
)


class Place(NamedTuple):
    """A file or folder; of a dataset, or local (dataset is None)."""

    dataset: str | None
    path: str


def _there(text: str) -> Place | None:
    """Return what is there: a local file, or a dataset, in a folder or at a URL. None: neither, as far as one sees."""
    if os.path.lexists(text):
        return Place(None, text)
    if (found := PLACE.fullmatch(text)) and ("://" in found[1] or (not found[1] and DATASET_ENV in os.environ)):
        return Place(found[1] or os.environ[DATASET_ENV], found[2])
    from ags_fast.dataset.names import LOG

    colons = (at for at, char in enumerate(text) if char == ":")
    folder = next((text[:at] for at in colons if os.path.isdir(os.path.join(text[:at], LOG))), None)
    return None if folder is None else Place(folder, text[len(folder) + 1 :])


def places(texts: Sequence[str]) -> list[Place]:
    """Tell files of datasets from local ones, whose names may have colons, too."""
    known = [_there(text) for text in texts]
    may_be = None if any(place and place.dataset for place in known) else PLACE  # a dataset that is not there
    new = [
        Place(*found.groups()) if may_be and (found := may_be.fullmatch(text)) and found[1] else Place(None, text)
        for text in texts
    ]
    return [there or other for there, other in zip(known, new, strict=True)]


def to_standard_output(args: argparse.Namespace) -> bool:
    """Whether a command writes bytes to standard output: then its result, or its error, goes to standard error."""
    output = getattr(args, "output", getattr(args, "target", ""))
    return STANDARD == (args.file if output is None else output)


def settle(args: argparse.Namespace) -> None:
    """Say in ``args.file`` which dataset, and in ``args.inside`` which of its files, the operands of a command name."""
    if not any(one.flags[0][0] != "-" and one.settings["metavar"].endswith("DATASET") for one in args.options.values()):
        return
    default, inside = os.environ.get(DATASET_ENV), getattr(args, "inside", None)
    words = [
        word
        for word in (getattr(args, "file", None), *([inside] if isinstance(inside, str) else inside or ()))
        if word is not None
    ]
    found = places(words) if inside is not None else []
    if found and all(place.dataset for place in found):
        args.file, *others = dict.fromkeys(place.dataset for place in found)
        if others:
            args.usage(f"all files must be of one dataset: {args.file} and {others[0]} are two")
        _put(args, [place.path for place in found if place.path])
    for name in ("file", "files", "dataset"):
        if name in args.options and not getattr(args, name):
            if default is None:
                args.usage(f"say which dataset: name DATASET, or set {DATASET_ENV}")
            setattr(args, name, [default] if name == "files" else default)


def _put(args: argparse.Namespace, paths: list[str]) -> None:
    wants_one = isinstance(args.inside, str)
    if wants_one and len(paths) != 1:
        args.usage("name one file of the dataset: DATASET PATH, or DATASET:PATH")
    args.inside = paths[0] if wants_one else paths
