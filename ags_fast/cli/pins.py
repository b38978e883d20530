"""``--pin`` and ``--pin-file``: what a dataset or table must descend from, and where the next command finds that."""

from __future__ import annotations

import os
import re
import shlex
import stat
from typing import TYPE_CHECKING, Any

from ags_fast.cli.options import OneOf, option

if TYPE_CHECKING:
    import argparse

READ_NCHARS = 1000  # more than a pin has
FORM = re.compile(r"[0-9]+-[0-9a-f]{64}|ags1u?\.[0-9a-f]{32}\.[0-9]+\.[\w.-]+", re.ASCII)  # of a dataset, of a table
PIN = OneOf(
    (
        option("--pin", metavar="PIN", help="refuse what does not descend from this pin, which a job printed"),
        option(
            "--pin-file",
            metavar="FILE",
            help="refuse what does not descend from the pin in FILE; FILE gets the new pin if the command succeeds",
        ),
    )
)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run a command with the pin of its --pin-file, and then keep the new pin there.

    The file stays as it is after a failure and a dry run. A pin never gives way to one that proves less: to that of an
    earlier version, which the command was asked for, or to that of a table without a seal.
    """
    file = getattr(args, "pin_file", None)
    if file is None or args.pin is not None:  # --pin wins over the file of a profile
        return args.run(args)  # type: ignore[no-any-return]
    args.pin = _read(file, "iceberg pin TABLE" if hasattr(args, "catalog") else "pin DATASET")
    result: dict[str, Any] = args.run(args)
    pin = result.get("expired", {}).get("pin") or result.get("pin")  # of the newest version that the command made
    done = not result.get("exit_code") and not getattr(args, "dry_run", False)
    if done and pin and pin != args.pin and _proof(pin) >= _proof(args.pin):
        keep(file, pin)
    return result


def _read(file: str, how: str) -> str:
    begin = f"`ags-fast {how} > {shlex.quote(file)}` makes one, of what is there now"
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise ValueError(f"{file} is not a regular file, and cannot keep the next pin: use --pin")
        with open(file, encoding="utf-8", errors="replace") as opened:
            text = opened.read(READ_NCHARS).strip()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no pin file {file}: {begin}") from None
    if not FORM.fullmatch(text):  # empty, as a command that failed leaves it, or another file: that may be a key
        raise ValueError(f"{file} has no pin: {begin}")
    return text


def _proof(text: str) -> tuple[bool, int]:
    """Return what a pin proves, in order: by a seal or not, and up to which version."""
    number = text.split(".")[2] if "." in text else text.partition("-")[0]
    return text.startswith("ags1."), int(number)


def keep(file: str, text: str) -> None:
    """Replace the pin in a file, whole. OSError has the pin, so that it is not lost."""
    from ags_fast.fs import NewFile

    try:
        with NewFile(file, fsync=True) as new:
            new.write(f"{text}\n".encode())
            new.publish()
    except OSError as error:
        raise OSError(f"the command has succeeded, but {file} cannot keep its pin {text}: {error.strerror}") from error
