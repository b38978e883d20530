"""Children that are forked, and killed: before each of their steps, or at random moments."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def fork(work: Callable[[], object]) -> int:
    """The number of a child that does the work and ends, with 1 if that raises."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def ended(pid: int) -> int:
    """Wait for a child. Returns its exit code, or minus the signal that has killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_before(step: int, places: Sequence[tuple[Any, str]]) -> None:
    """Have this process killed when it calls the places, functions by owner and name, for the N-th time."""
    steps = itertools.count()

    def deadly(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    for owner, name in places:
        setattr(owner, name, deadly(getattr(owner, name)))


def killed_before_steps(
    work: Callable[[], object],
    places: Sequence[tuple[Any, str]],
    *,
    prepare: Callable[[], object] = lambda: None,
    first: int = 0,
    stride: int = 1,
) -> Iterator[tuple[int, bool]]:
    """Do the work in one child after another, each killed before a later step, until one ends by itself.

    Yields each child's step, and if the child ended by itself, for the caller to look at what is left.
    """

    def child(step: int) -> None:
        kill_before(step, places)
        work()

    for step in itertools.count(first, stride):
        prepare()
        code = ended(fork(functools.partial(child, step)))
        assert code in (0, -signal.SIGKILL), (step, code)
        yield step, code == 0
        if code == 0:
            return


class Moments:
    """Kills children at random moments: about half of them before their end, however busy the machine is.

    Args:
        rng: Draws the moments.
        seconds: How long a child takes, as a first guess.
    """

    def __init__(self, rng: random.Random, seconds: float = 0.2) -> None:
        self.killed = 0
        self._rng = rng
        self._first = seconds
        self._seconds: dict[str, float] = {}

    def kill(
        self,
        work: Callable[[], object],
        kind: str = "",
        *,
        meanwhile: Callable[[], object] = lambda: time.sleep(0.001),
        group: bool = False,
    ) -> bool:
        """Do the work in a child, and kill it, or its whole group. Returns if the child ended by itself before."""
        seconds = self._seconds.get(kind, self._first)
        moment = time.monotonic() + self._rng.uniform(0, seconds)

        def child() -> None:
            os.setpgid(0, 0)
            work()

        pid = fork(child)
        while time.monotonic() < moment:
            meanwhile()
        try:
            (os.killpg if group else os.kill)(pid, signal.SIGKILL)
        except ProcessLookupError:  # no group yet
            os.kill(pid, signal.SIGKILL)
        code = ended(pid)
        assert code in (0, -signal.SIGKILL), (kind, code)
        self.killed += code != 0
        self._seconds[kind] = seconds * (1.1 if code else 0.8)
        return code == 0
