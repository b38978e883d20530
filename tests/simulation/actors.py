"""Operations as processes that stop before each request to the store.

An actor is a forked child of the driver. Between two requests it runs freely; at a request it waits for the driver's
answer. Its clock is the world's, and its random names come from its seed, so the same answers lead to the same requests
(in a driver with PYTHONHASHSEED=0: `simulation.__main__` sees to that). An actor dies when its line to the driver is
closed: nothing of its process runs any more, as after kill -9.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import socket
import threading
import time
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.keys import clear_cache
from simulation.store import Door, SimStore
from simulation.world import FREE, Request, World

if TYPE_CHECKING:
    from collections.abc import Callable

FORK = ctypes.PyDLL(None).fork  # which runs none of the hooks of Python's: a copy of an actor knows of no fork
PATIENCE = 60.0  # real seconds until an operation must have made its next request


class Outcome(NamedTuple):
    """How an operation has ended.

    Attributes:
        said: "yes", "no", "unknown"; "wrong" is an error that no honest store deserves; "died".
        text: The error, or what else there is to say.
        value: What the operation has returned.
    """

    said: str
    text: str = ""
    value: Any = None


class Actor:
    """An operation that runs until its next request.

    Attributes:
        name: Tells it from others in a schedule.
        world: What answers it.
        request: What it is about to ask of the store; None: it has ended.
        outcome: How it has ended; None: it has not.
    """

    def __init__(self, name: str, work: Callable[[], Outcome], seed: object, world: World) -> None:
        self.name = name
        self.world = world
        self.request: Request | None = None
        self.outcome: Outcome | None = None
        mine, theirs = socket.socketpair()
        if os.fork() == 0:
            mine.close()
            _run(lambda: _Line(theirs, world.clock), work, seed)
        theirs.close()
        self._line = Connection(mine.detach())
        self._wait()

    def step(self) -> None:
        """Carry out the request, and let the operation go on to its next one."""
        assert self.request is not None
        try:
            answer, error = self.world.perform(self.request), None
        except OSError as failed:
            answer, error = None, failed
        self.tell(answer, error)

    def tell(self, answer: Any, error: OSError | None = None) -> None:
        """Give the operation an answer, or the error that its request raises, and let it go on."""
        self._line.send(("answer", self.world.clock, answer, error))
        self._wait()

    def run(self) -> Outcome:
        """Answer all that it asks, to its end."""
        while self.request is not None:
            self.step()
        assert self.outcome is not None
        return self.outcome

    def die(self) -> None:
        """End its process where it stands."""
        if self.outcome is None:
            self.request, self.outcome = None, Outcome("died")
            self._line.close()

    def branch(self, world: World) -> Actor:
        """Return a copy of the operation, which stands before the same request and goes its own way in a world."""
        copy = object.__new__(Actor)
        copy.name, copy.world, copy.request, copy.outcome = self.name, world, self.request, None
        mine, theirs = socket.socketpair()
        self._line.send(("branch", 0.0, None, None))
        reduction.send_handle(self._line, theirs.fileno(), 0)
        theirs.close()
        copy._line = Connection(mine.detach())
        return copy

    def _wait(self) -> None:
        if not self._line.poll(PATIENCE):
            raise TimeoutError(f"{self.name} hangs after {self.request}")
        try:
            told = self._line.recv()
        except EOFError:
            raise AssertionError(f"the process of {self.name} ended by itself after {self.request}") from None
        if isinstance(told, Request):
            self.request = told
            if told.kind in FREE:
                self.step()
        else:
            self.request, self.outcome = None, told
            self._line.close()


def run_whole(world: World, work: Callable[[], Outcome], seed: object) -> tuple[World, Outcome]:
    """Run an operation from its beginning to its end, in a process of its own where nobody stops it.

    Returns:
        The world afterwards, with the operation's footprints, and how it has ended.
    """
    after = world.copy()
    after.enter()
    mine, theirs = socket.socketpair()
    if os.fork() == 0:
        mine.close()

        def done() -> Outcome:
            outcome = work()
            return Outcome(outcome.said, outcome.text, (after, outcome.value))

        _run(lambda: _Whole(after, theirs), done, seed)
    theirs.close()
    line = Connection(mine.detach())
    if not line.poll(PATIENCE):
        raise TimeoutError("an operation hangs though nobody stops it")
    outcome: Outcome = line.recv()
    line.close()
    world_after, value = outcome.value
    world_after.leave()
    return world_after, outcome._replace(value=value)


class _Line(Door):
    """Requests to the driver."""

    def __init__(self, end: socket.socket, clock: float) -> None:
        self._clock = clock
        self._line = Connection(end.detach())
        self._lock = threading.Lock()  # several threads may call the KMS

    @property
    def now(self) -> float:
        return self._clock

    def ask(self, kind: str, path: str = "", argument: Any = None) -> Any:
        with self._lock:
            return self._ask(Request(kind, path, argument))

    def _ask(self, request: Request) -> Any:
        self._line.send(request)
        while True:
            try:
                what, clock, answer, error = self._line.recv()
            except EOFError:
                os._exit(9)  # the driver has killed this operation
            if what == "answer":
                self._clock = clock
                if error is not None:
                    raise error
                return answer
            handle = reduction.recv_handle(self._line)
            if FORK() == 0:
                self._line.close()
                self._line = Connection(handle)
            else:
                os.close(handle)

    def end(self, outcome: Outcome) -> None:
        """Tell the driver how the operation has ended."""
        self._line.send(outcome)


class _Whole(Door):
    """Requests that are carried out at once; the driver gets the end."""

    def __init__(self, world: World, end: socket.socket) -> None:
        super().__init__(world)
        self._end = Connection(end.detach())

    def end(self, outcome: Outcome) -> None:
        """See `_Line.end`."""
        self._end.send(outcome)


def _run(door: Callable[[], Any], work: Callable[[], Outcome], seed: object) -> None:
    """Be the process of an operation. Does not return."""
    code = 1
    try:
        gc.disable()
        SimStore.door = here = door()
        _fix_time_and_chance(here, random.Random(str(seed)))
        here.end(work())
        code = 0
    except BrokenPipeError:
        code = 9  # the driver needs it no more
    finally:
        if code == 1:
            import traceback

            traceback.print_exc()
        os._exit(code)


def _fix_time_and_chance(door: Door, chance: random.Random) -> None:
    """Take the time from the world, and what is drawn for names from the seed."""
    gmtime = time.gmtime
    time.time = lambda: door.now
    time.time_ns = lambda: int(door.now * 1e9)
    time.monotonic = lambda: door.now
    time.gmtime = lambda seconds=None: gmtime(door.now if seconds is None else seconds)
    time.sleep = lambda seconds: door.ask("sleep", "", seconds)
    pid = os.getpid()
    os.getpid = lambda: pid  # also of a copy
    os.urandom = chance.randbytes
    random._urandom = chance.randbytes  # type: ignore[attr-defined] # what `secrets` draws from


def stop_before_statements() -> None:
    """Make each statement to a database of keys a request, unless its transaction has written something.

    From its first write on, a transaction of SQLite keeps others out, so that they could only wait for the one that is
    stopped.
    """
    from sqlalchemy import Engine, event

    @event.listens_for(Engine, "before_cursor_execute")
    def stop(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if not connection.connection.driver_connection.in_transaction:
            SimStore.door.ask("sql", statement)


def ready(warm: Callable[[], Any]) -> None:
    """Make this process one that forks operations: they import nothing, and look at no old object for garbage.

    Args:
        warm: Does in this process, once, what operations do: Python runs code faster when the code has run before.
    """
    SimStore.door = Door(World())
    warm()
    clear_cache()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children leave nothing behind
    gc.collect()
    gc.freeze()
    gc.disable()
