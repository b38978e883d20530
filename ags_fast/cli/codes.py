"""How errors end a command: the same cause with the same code, and in the words of the shell.

argparse itself exits with 2. The words are options in place of Python's arguments, and the path that an error is about.
"""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING, Any

from ags_fast.errors import KeyAccessError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

EXIT_FAILED, EXIT_USAGE, EXIT_INTEGRITY, EXIT_KEY_ACCESS, EXIT_NOT_FOUND, EXIT_CONFIGURATION, EXIT_ENDED = range(1, 8)
EXIT_SIGNAL = 128  # and the number of the signal that interrupted the command
EXIT_INTERRUPTED = EXIT_SIGNAL + signal.SIGINT
CODE_TEXTS = {
    "0": "done",
    "1": "some files failed",
    "2": "usage, or the output exists (--overwrite)",
    "3": "integrity, format or policy, --pin and --min-version",
    "4": "no access to a key",
    "5": "not found, no permission, not reached, a source without files, or standard output takes nothing",
    "6": "configuration, or a missing module",
    "7": "another process was in the way or ended the job, or the outcome is unknown",
    "130": "interrupted by Ctrl-C (129: SIGHUP, 143: SIGTERM)",
}
CODES = {
    "IntegrityError": EXIT_INTEGRITY,
    "FormatError": EXIT_INTEGRITY,
    "PolicyError": EXIT_INTEGRITY,
    "KeyAccessError": EXIT_KEY_ACCESS,
    "KeyLimitError": EXIT_KEY_ACCESS,
    "UnaccountedError": EXIT_KEY_ACCESS,
    "ConcurrentChangeError": EXIT_ENDED,
    "UnknownOutcomeError": EXIT_ENDED,
    "ConfigurationError": EXIT_CONFIGURATION,
    "ImportError": EXIT_CONFIGURATION,
    "FileExistsError": EXIT_USAGE,
    "IsADirectoryError": EXIT_USAGE,
    "UnsupportedChangeError": EXIT_USAGE,
    "OSError": EXIT_NOT_FOUND,  # also a class that derives from ValueError, too
    "ValueError": EXIT_USAGE,
}

# What a file may fail with, so that the command ends with that code.
OF_FILES = {name for name, code in CODES.items() if code in (EXIT_INTEGRITY, EXIT_KEY_ACCESS, EXIT_ENDED)}
OF_FILES.add("FileExistsError")

# name=True, name=7, name='word': as Python has them. Parts of paths, such as year=2026/, are not.
ARGUMENT = re.compile(r"(?<![^\s(])([a-z][a-z_]*)=(True|\d+|'[\w-]+')(?![^\s,:;.)])")


class ConfigurationError(Exception):
    """Properties or the environment are invalid, or a module that they need is not installed."""


class OutputClosedError(Exception):
    """Standard output takes nothing more; the cause says why."""


def code_of(error: BaseException) -> int:
    """The exit code of a command that ends with this error."""
    return next((CODES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in CODES), EXIT_FAILED)


def code_of_rows(classes: Iterable[str | None]) -> int:
    """The exit code for files that failed with errors of these classes."""
    return code_of_all(CODES[name] if name in OF_FILES else EXIT_FAILED for name in set(classes))


def code_of_all(codes: Iterable[int]) -> int:
    """One exit code for several: 0 if all are 0; else EXIT_INTEGRITY if it occurs; else the only cause, or 1."""
    bad = {code for code in codes if code}
    if EXIT_INTEGRITY in bad:
        return EXIT_INTEGRITY
    return bad.pop() if len(bad) == 1 else EXIT_FAILED if bad else 0


def message_of(error: BaseException, args: argparse.Namespace) -> str:
    """Return an error's message for the user of a command."""
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, (str, bytes)):
        text = f"{error.strerror}: {os.fsdecode(error.filename)!r}"
        replaced = isinstance(error, FileExistsError) and hasattr(args, "overwrite")
        return f"{text}: --overwrite replaces the file" if replaced else text
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
    name, value = found[1], found[2].strip("'")
    if name not in args.options:
        return found[0]
    flag = args.options[name].flags[-1]
    return flag if value == "True" else f"{flag} {value}"
