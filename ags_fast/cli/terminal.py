"""The terminal: text without control characters, one line for an error, one line for Ctrl-C."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ags_fast._text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Interrupts", "complain", "escaped", "interrupts", "leave", "printable", "show_warning", "warn"]

AGAIN_SECONDS = 1.0  # a second signal within this time is not meant: some senders send two at once


def escaped(value: Any) -> Any:
    """Apply `printable` to all text in a result, at any depth."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {escaped(name): escaped(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [escaped(inner) for inner in value]
    return value


def complain(text: str) -> None:
    """Print a line to standard error."""
    print(f"ags-fast: {printable(text)}", file=sys.stderr)


def warn(text: str) -> None:
    """Print a warning to standard error."""
    complain(f"warning: {text}")


def leave(*_: object, write: Any = os.write, end: Any = os._exit, line: bytes = b"ags-fast: interrupted\n") -> None:
    """End the process on Ctrl-C without cleaning up. Uses no globals: they may be gone while the interpreter exits."""
    try:
        write(2, line)
    finally:
        end(130)


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt that calls `gone` when nothing holds it any more."""

    def __init__(self, gone: Callable[[], None]) -> None:
        super().__init__()
        self._gone = gone

    def __del__(self) -> None:
        self._gone()


class Interrupts:
    """What Ctrl-C does to a command: it raises KeyboardInterrupt while the command works, and ends it at other times.

    A second Ctrl-C ends the command at once, and may leave files behind.
    """

    def __init__(self) -> None:
        self.installed = False
        self._since: float | None = None
        self._inside = False
        self._before = sys.unraisablehook

    def install(self) -> None:
        """Handle Ctrl-C in this process, which runs nothing but the command."""
        signal.signal(signal.SIGINT, leave)
        if not self.installed:
            self.installed = True
            # Python's end would give the signal its default back, and the command would die of it with its work done.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
            self._before, sys.unraisablehook = sys.unraisablehook, self._unraisable

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise KeyboardInterrupt on Ctrl-C inside the ``with`` block, if `install` was called."""
        if not self.installed:
            yield
            return
        self._since, self._inside = None, True
        self.take()
        try:
            yield
        finally:
            self._inside = False
            signal.signal(signal.SIGINT, leave)

    def take(self) -> None:
        """Take the signal back from a library that took it."""
        if self.installed:
            signal.signal(signal.SIGINT, self._raise)

    def caused(self, error: BaseException) -> bool:
        """Whether an error was raised from Ctrl-C. Python 3.11, for one, makes a RuntimeError of it in __set_name__."""
        cause = error.__cause__
        return cause is not None and (isinstance(cause, Interrupted) or self.caused(cause))

    def _raise(self, *_: object) -> None:
        if self._since is None:
            self._since = time.monotonic()
            raise Interrupted(self._again)
        if time.monotonic() - self._since > AGAIN_SECONDS:
            leave()

    def _again(self) -> None:
        """Interrupt again if nobody handled the exception: destructors and some libraries drop exceptions."""
        if self._inside:
            self._since = None
            main = threading.main_thread().ident or 0
            again = threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT))
            again.daemon = True
            again.start()

    def _unraisable(self, unraisable: Any) -> None:
        """Print nothing for an interruption, which `_again` repeats."""
        if not isinstance(unraisable.exc_value, Interrupted):
            self._before(unraisable)


interrupts = Interrupts()


def show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """Print one line for a warning, without its source line; for `warnings.showwarning`."""
    warn(str(message))
