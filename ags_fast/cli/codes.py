"""Exit codes: the same cause ends every command with the same code. argparse itself exits with 2."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

EXIT_FAILED, EXIT_USAGE, EXIT_INTEGRITY, EXIT_KEY_ACCESS, EXIT_NOT_FOUND, EXIT_CONFIGURATION = 1, 2, 3, 4, 5, 6
EXIT_SIGNAL = 128  # and the number of the signal that interrupted the command
EXIT_INTERRUPTED = EXIT_SIGNAL + signal.SIGINT
CODES = {
    "IntegrityError": EXIT_INTEGRITY,
    "FormatError": EXIT_INTEGRITY,
    "KeyAccessError": EXIT_KEY_ACCESS,
    "KeyLimitError": EXIT_KEY_ACCESS,
    "UnaccountedError": EXIT_KEY_ACCESS,
    "FileNotFoundError": EXIT_NOT_FOUND,
    "NotADirectoryError": EXIT_NOT_FOUND,
    "PermissionError": EXIT_NOT_FOUND,
    "ConfigurationError": EXIT_CONFIGURATION,
    "ImportError": EXIT_CONFIGURATION,
    "ValueError": EXIT_USAGE,
    "OSError": EXIT_FAILED,  # also a class that derives from ValueError, too
}


class ConfigurationError(Exception):
    """Properties or the environment are invalid, or a module that they need is not installed."""


class OutputClosedError(Exception):
    """Standard output takes nothing more; the cause says why."""


def code_of(error: BaseException) -> int:
    """The exit code of a command that ends with this error."""
    return next((CODES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in CODES), EXIT_FAILED)


def code_of_rows(classes: Iterable[str | None]) -> int:
    """The exit code for files that failed with errors of these classes."""
    codes = {CODES.get(name or "", EXIT_FAILED) for name in classes}
    return code_of_all(code if code in (EXIT_INTEGRITY, EXIT_KEY_ACCESS) else EXIT_FAILED for code in codes)


def code_of_all(codes: Iterable[int]) -> int:
    """One exit code for several: 0 if all are 0; else EXIT_INTEGRITY if it occurs; else the only cause, or 1."""
    bad = {code for code in codes if code}
    if EXIT_INTEGRITY in bad:
        return EXIT_INTEGRITY
    return bad.pop() if len(bad) == 1 else EXIT_FAILED if bad else 0
