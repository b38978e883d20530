"""What a command shows: text that steers no terminal, one line for an error, nothing but one line for Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Interrupts", "complain", "escaped", "interrupts", "leave", "printable", "show_warning", "warn"]

AGAIN_SECONDS = 1.0  # until another Ctrl-C is meant: some senders send two at once


def printable(text: str) -> str:
    """`text` in one line that shows what is in it: names of files and messages may hold anything.

    Control characters, line ends, what turns the direction of text, and bytes that are not UTF-8 (surrogates, as Python
    has them) become escapes such as ``\\x1b``. A backslash stays one: only JSON is exact.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(char: str) -> str:
    number = ord(char)
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a name
        return f"\\x{number - 0xDC00:02x}"
    return char.encode("unicode_escape").decode()


def escaped(value: Any) -> Any:
    """All text in a result, at any depth, as `printable` has it."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {escaped(name): escaped(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [escaped(inner) for inner in value]
    return value


def complain(text: str) -> None:
    """A line on standard error."""
    print(f"ags-fast: {printable(text)}", file=sys.stderr)


def warn(text: str) -> None:
    complain(f"warning: {text}")


def leave(*_: object, write: Any = os.write, end: Any = os._exit, line: bytes = b"ags-fast: interrupted\n") -> None:
    """On Ctrl-C where nothing is to be cleaned up. Works as long as the interpreter does, so its names are its own."""
    try:
        write(2, line)
    finally:
        end(130)


class Interrupts:
    """What Ctrl-C does to a command: it raises KeyboardInterrupt while the command works, and ends it at other times.

    A second one ends it at once, whatever is left behind then.
    """

    def __init__(self) -> None:
        self._installed = False
        self._since: float | None = None
        self._before = sys.unraisablehook

    def install(self) -> None:
        """Decide for this process, which is the command's own."""
        signal.signal(signal.SIGINT, leave)
        if not self._installed:
            self._installed = True
            self._before, sys.unraisablehook = sys.unraisablehook, self._unraisable

    @contextmanager
    def raised(self) -> Iterator[None]:
        if not self._installed:
            yield
            return
        self._since = None
        self.take()
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, leave)

    def take(self) -> None:
        """Take the signal, which a library may have taken meanwhile."""
        if self._installed:
            signal.signal(signal.SIGINT, self._raise)

    def _raise(self, *_: object) -> None:
        if self._since is None:
            self._since = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - self._since > AGAIN_SECONDS:
            leave()

    def _unraisable(self, unraisable: Any) -> None:
        """A destructor or callback that is interrupted cannot raise: interrupt again, what comes after it."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._since = None
            main = threading.main_thread().ident or 0
            again = threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            self._before(unraisable)


interrupts = Interrupts()


def show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """For `warnings.showwarning`: a line, and not the source that warns."""
    warn(str(message))
