"""Errors in the words of the shell: options in place of Python's arguments, and the path that an error is about."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from ags_fast.cli.codes import ConfigurationError
from ags_fast.errors import KeyAccessError

if TYPE_CHECKING:
    import argparse

__all__ = ["message_of", "named", "say_rows"]

# name=True, name=7: as Python has them. Parts of paths, such as year=2026/, are not.
ARGUMENT = re.compile(r"(?<![^\s(])([a-z][a-z_]*)=(True|\d+)(?![^\s,:;.)])")


def message_of(error: BaseException, args: argparse.Namespace) -> str:
    """Return an error's message for the user of a command."""
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, (str, bytes)):
        text = f"{error.strerror}: {os.fsdecode(error.filename)!r}"
        replaced = isinstance(error, FileExistsError) and hasattr(args, "force")
        return f"{text}: --force replaces the file" if replaced else text
    return _in_shell(str(error), args)


def say_rows(result: dict[str, Any], args: argparse.Namespace) -> None:
    """Put the errors of a result's rows into the words of the shell."""
    for row in result.get("rows", ()):
        if row.get("error"):
            row["error"] = _in_shell(row["error"], args)


def _in_shell(text: str, args: argparse.Namespace) -> str:
    return ARGUMENT.sub(lambda found: _option(found, args), text)


def named(text: str, error: BaseException, args: argparse.Namespace) -> str:
    """Return a message with the path that the command was given, if the error may be about it and does not name it."""
    about_keys = isinstance(error, (KeyAccessError, ConfigurationError, ImportError))
    if about_keys or (isinstance(error, OSError) and error.filename is not None) or _names(text, args.file):
        return text
    return f"{args.file}: {text}"


def _names(text: str, path: str) -> bool:
    return any(re.search(rf"(?<![\w/.-]){re.escape(one)}(?![\w-])", text) for one in (path, os.path.abspath(path)))


def _option(found: re.Match[str], args: argparse.Namespace) -> str:
    name, value = found.groups()
    if not hasattr(args, name):
        return found[0]
    flag = "--" + name.replace("_", "-")
    return flag if value == "True" else f"{flag} {value}"
