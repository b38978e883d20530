"""A limit of calls per second, shared by all clients of the same properties in a process."""

from __future__ import annotations

import math
import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Pace", "wait_for_turn"]


class Pace:
    """Rate limiter: one call every 1/per_second seconds, first come, first served."""

    def __init__(
        self,
        per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._distance = 1 / per_second
        self._next = -math.inf
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Sleep until the caller's turn."""
        with self._lock:
            now = self._clock()
            turn = max(now, self._next)
            self._next = turn + self._distance
        if turn > now:
            self._sleep(turn - now)


_lock = threading.Lock()
_paces: dict[bytes, Pace] = {}


def wait_for_turn(identity: bytes, per_second: float) -> None:
    """Sleep until the next turn of the clients with this identity."""
    with _lock:
        pace = _paces.setdefault(identity, Pace(per_second))
    pace.wait()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    _paces.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
