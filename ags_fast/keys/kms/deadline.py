"""Calls that end in time, whatever a server does: a socket's timeout never fires while single bytes keep coming."""

from __future__ import annotations

import contextvars
import ctypes
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OverdueError", "within"]

AGAIN_SECONDS = 1.0  # between two attempts to end a thread

T = TypeVar("T")


class OverdueError(Exception):
    """The call did not end in time."""


class _AbandonedError(BaseException):
    """Nobody waits for this call. Not an Exception, so that no retry of a package catches it."""


class _Call(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._lock, self._returned = threading.Lock(), False
        self.ended = threading.Event()
        self.value: T
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            try:
                self.value = self._work()
            except BaseException as error:
                self.error = error
            self.ended.set()
            with self._lock:
                self._returned = True  # from here on, another thread may have this thread's id
        except _AbandonedError:
            pass

    def abandon(self, thread: threading.Thread) -> None:
        """Have the thread end when it next runs: at the next byte, or when its socket's own timeout fires.

        Repeat that until the thread has ended: Python drops an exception that is raised in a destructor or in a
        callback of the garbage collector.
        """
        self._throw(thread)
        threading.Thread(target=self._insist, args=(thread,), name="ags-fast-kms-end", daemon=True).start()

    def _insist(self, thread: threading.Thread) -> None:
        while not self.ended.wait(AGAIN_SECONDS):
            self._throw(thread)

    def _throw(self, thread: threading.Thread) -> None:
        with self._lock:
            if not self._returned and thread.ident is not None:
                target, thrown = ctypes.c_ulong(thread.ident), ctypes.py_object(_AbandonedError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(target, thrown)


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise what it raises, within a time limit.

    `work` runs in a thread of its own. The thread is ended if it is late, or if the wait for it is interrupted.

    Raises:
        OverdueError: `work` did not end within `seconds`.
    """
    call = _Call(work)
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(call.run,), name="ags-fast-kms", daemon=True)
    thread.start()
    try:
        in_time = call.ended.wait(seconds)
    except BaseException:
        call.abandon(thread)
        raise
    if not in_time:
        call.abandon(thread)
        raise OverdueError
    error = call.error
    if error is None:
        return call.value
    try:
        raise error
    finally:
        del error, call  # they refer to each other
