"""The terminal: text without control characters, one line for an error, one line for Ctrl-C, SIGTERM and SIGHUP."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ags_fast._text import printable
from ags_fast.cli.codes import EXIT_NOT_FOUND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "Interrupts",
    "complain",
    "escaped",
    "interrupts",
    "leave",
    "lost",
    "printable",
    "say",
    "show_warning",
    "tell",
    "warn",
]

AGAIN_SECONDS = 0.2  # a second signal within this time is not meant: some senders send two at once
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    say(f"ags-fast: {printable(text)}")


def say(text: str, code: int = 0) -> int:
    """Print to standard error, if anybody reads it: a terminal that hangs up does not. Returns the exit code."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr)
    return code


def tell(text: str, code: int = 0, end: str = "\n") -> int:
    """Print to standard output at once. Returns the exit code: `code`, or if that is 0 and the text is lost, why."""
    try:
        if sys.stdout is None:  # it was closed when Python began
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        print(text, end=end, flush=True)
    except OSError as error:
        return code or lost(error)
    return code


def lost(error: BaseException | None) -> int:
    """Say why standard output takes nothing, unless its reader has seen enough, as `head`. Returns the exit code."""
    if isinstance(error, BrokenPipeError):
        return 0
    complain(f"what the command shows is lost, because standard output takes nothing: {getattr(error, 'strerror', '')}")
    return EXIT_NOT_FOUND


def warn(text: str) -> None:
    """Print a warning to standard error."""
    complain(f"warning: {text}")


def leave(
    number: int, *_: object, write: Any = os.write, end: Any = os._exit, line: bytes = b"ags-fast: interrupted\n"
) -> None:
    """End the process on a signal without cleaning up. Uses no globals: they may be gone while Python exits."""
    try:
        write(2, line)
    finally:
        end(128 + number)


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt that calls `gone` when nothing holds it any more."""

    def __init__(self, gone: Callable[[], None]) -> None:
        super().__init__()
        self._gone = gone

    def __del__(self) -> None:
        self._gone()


class Interrupts:
    """What Ctrl-C, SIGTERM and SIGHUP do to a command: they raise KeyboardInterrupt while it works, and else end it.

    A second signal ends the command at once, and may leave files behind. What nohup has ignored stays ignored.
    """

    def __init__(self) -> None:
        self.installed = False
        self.number: int = signal.SIGINT  # the signal that came
        self._taken: list[int] = []
        self._since: float | None = None
        self._inside = False
        self._before = sys.unraisablehook

    def install(self) -> None:
        """Handle the signals in this process, which runs nothing but the command."""
        self._taken = [one for one in SIGNALS if one == signal.SIGINT or signal.getsignal(one) != signal.SIG_IGN]
        self._handle(leave)
        if not self.installed:
            self.installed = True
            # Python's end would give signals their defaults back, and the command would die of one with its work done.
            atexit.register(self._handle, signal.SIG_IGN)
            self._before, sys.unraisablehook = sys.unraisablehook, self._unraisable

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise KeyboardInterrupt on a signal inside the ``with`` block, if `install` was called."""
        if not self.installed:
            yield
            return
        self._since, self._inside = None, True
        self.take()
        try:
            yield
        finally:
            self._inside = False
            self._handle(leave)

    def take(self) -> None:
        """Take the signals back from a library that took them."""
        if self.installed:
            self._handle(self._raise)

    def drop(self) -> None:
        """Leave the signals to a library that handles those that nobody else does."""
        self._handle(signal.SIG_DFL)

    def _handle(self, how: Any) -> None:
        for number in self._taken:
            signal.signal(number, how)

    def caused(self, error: BaseException) -> bool:
        """Whether an error was raised from a signal. Python 3.11, for one, makes RuntimeErrors in __set_name__."""
        cause = error.__cause__
        return cause is not None and (isinstance(cause, Interrupted) or self.caused(cause))

    def _raise(self, number: int, *_: object) -> None:
        if self._since is None:
            self._since, self.number = time.monotonic(), number
            raise Interrupted(self._again)
        if time.monotonic() - self._since > AGAIN_SECONDS:
            leave(number)

    def _again(self) -> None:
        """Interrupt again if nobody handled the exception: destructors and some libraries drop exceptions."""
        if self._inside:
            self._since = None
            main = threading.main_thread().ident or 0
            again = threading.Timer(0.01, signal.pthread_kill, (main, self.number))
            again.daemon = True
            again.start()

    def _unraisable(self, unraisable: Any) -> None:
        """Print nothing for an interruption, which `_again` repeats."""
        if not isinstance(unraisable.exc_value, Interrupted):
            self._before(unraisable)


interrupts = Interrupts()


def show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """Print one line for a warning, without its source line; for `warnings.showwarning`."""
    if category.__name__ != "JobFailuresWarning":  # which the result of a command shows
        warn(str(message))
