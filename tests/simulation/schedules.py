"""Schedules: which operations run, where they stop, and what befalls them. Each can be run again from its text.

- ``put 37 sweep``: "put" stops before its request 37; then "sweep" runs whole; then "put" goes on. Of stops between
  which the second operation touches nothing that the first one asks for, only the last one is run: the others are the
  same schedule.
- ``put create:_ags/versions/ sweep``: the same, with the first request that creates something there as the stop;
  ``create:_ags/versions/#2`` is the second one, and ``end`` is after all requests.
- ``put 37 late``: one operation, to which at its request 37 happens one of `FAULTS`.
- ``script put1>create:_ags/log/ days sweep1 put1``: operations that take turns as written: see `run_script`.
- ``random 12``: three to seven operations, and all that can befall them, as a seed has it.
"""

from __future__ import annotations

import random
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from simulation.actors import Actor, Outcome, run_whole
from simulation.operations import OPERATIONS, Place, make, outcome_of
from simulation.oracle import Done, judge
from simulation.world import DAY, WRITES, Request, World

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FAULTS = {
    "killed": "the process is killed before this write",
    "lost": "the write is carried out, and the answer is lost",
    "late": "nobody answers; the write is carried out when the operation has given up",
    "later": "nobody answers; the write is carried out two days later, after a sweep",
    "sleeps": "the process sleeps for two days before this request, while others sweep",
}
SCOPES = ("dataset", "partition", "writer", "day", "files:1")
BUSY = ("put", "overwrite", "rename", "sweep", "expire", "force")  # what meets most often
SLEEP = 2 * DAY
TURNS = (1, 5, 20, 60, 100_000, 100_000)  # requests until another one is chosen; the last ones are to its end


class Verdict(NamedTuple):
    """What became of a schedule.

    Attributes:
        schedule: Its text.
        place: How the dataset is set up.
        request: The request at which the first operation stood; the operations of a random schedule.
        wrong: What is not as it must be; None: nothing.
    """

    schedule: str
    place: Place
    request: str
    wrong: str | None


def begun(place: Place, page: int = 1000) -> World:
    """Return a world with a new dataset."""
    database = None if place.key_store is None else Path(place.key_store.partition("sqlite:///")[2].partition("?")[0])
    if database is not None:
        database.unlink(missing_ok=True)
    world, outcome = run_whole(World(page, database), lambda: _made(place), "make")
    assert outcome.said == "yes", outcome
    return world


def _made(place: Place) -> Outcome:
    make(place)
    return Outcome("yes")


def in_database(place: Place, folder: Path) -> Place:
    """Return the place with its keys in a database of SQLite in a folder."""
    return place._replace(key_store=f"sqlite:///{folder / 'keys.db'}?dataset=simulated")


def actor(name: str, place: Place, me: str, world: World) -> Actor:
    """Begin an operation, which stops before its first request."""
    return Actor(name, partial(outcome_of, name, place, me), me, world)


class Pairs:
    """All schedules with one operation that stops, and another one, or a fault, in the gap.

    Args:
        place: How the dataset is set up.
        first: The operation that stops.
    """

    def __init__(self, place: Place, first: str) -> None:
        self.place, self.first = place, first
        self.base = begun(place)

    def all(self, others: Sequence[str], share: float = 1.0, seed: int = 0) -> Iterator[Verdict]:
        """Run the first operation once, and at its stops those schedules that differ from others.

        Args:
            others: What runs in the gaps: operations, and faults.
            share: Which part of the stops before reads is chosen. All stops before writes are.
            seed: Of that choice.
        """
        chance = random.Random(f"{self.first} {seed}")
        world = self.base.copy()
        world.enter()
        running = actor(self.first, self.place, "first", world)
        at, changes, whole = 0, -1, dict[str, tuple[World, Outcome]]()
        while running.request is not None:
            request = running.request
            if world.changes != changes:
                changes, whole = world.changes, {}
            for other in others:
                chosen = request.kind in WRITES or at == 0 or share == 1.0 or chance.random() < share
                if chosen and self._differs(other, at, request, world, whole):
                    yield self._gap(running.branch(world), at, other, whole)
            world.enter()
            running.step()
            world.leave()
            at += 1
        for other in others:
            if other in OPERATIONS:
                running.world = world
                yield self._gap(running, at, other, {})

    def one(self, stop: str, other: str) -> Verdict:
        """Run one schedule. stop: as in its text."""
        world = self.base.copy()
        world.enter()
        running, at = actor(self.first, self.place, "first", world), 0
        begin, _, count = stop.partition("#")
        left = int(count or 1)
        while running.request is not None:
            left -= begin == str(at) or _shown(running.request).startswith(begin)
            if not left:
                break
            running.step()
            at += 1
        if left and begin not in ("end", str(at)):
            raise ValueError(f"{self.first} makes {at} requests, and none is {stop!r}")
        world.leave()
        return self._gap(running, at, other, {})

    def _differs(
        self, other: str, at: int, request: Request, world: World, whole: dict[str, tuple[World, Outcome]]
    ) -> bool:
        """Whether a schedule is another one than that with the next stop. Puts what ran whole into `whole`."""
        if other in ("killed", "lost", "late", "later"):
            return request.kind in WRITES or (request.kind == "sql" and other == "killed")
        if other not in whole:
            whole[other] = self._whole(world, other)
        return at == 0 or whole[other][0].conflicts(request)

    def _whole(self, world: World, other: str) -> tuple[World, Outcome]:
        """Run what is to run in the gap. Two days later it is a sweep."""
        name, world = ("sweep", _two_days_later(world)) if other not in OPERATIONS else (other, world)
        return run_whole(world, partial(outcome_of, name, self.place, "second"), "second")

    def _gap(self, running: Actor, at: int, other: str, whole: dict[str, tuple[World, Outcome]]) -> Verdict:
        """Let the other operation, or the fault, come where the first one stands, and judge the end."""
        request, world = running.request, running.world.copy()
        running.world = world
        done = []
        if other in OPERATIONS or other == "sleeps":
            after, outcome = whole.get(other) or self._whole(world, other)
            running.world = world = after.copy()
            world.enter()
            done = [Done(other if other in OPERATIONS else "sweep", "second", outcome, at, at)]
            running.run()
            world.leave()
        elif request is not None:
            world.enter()
            self._befall(running, request, other)
            world = running.world
        assert running.outcome is not None
        done.append(Done(self.first, "first", running.outcome, 0, at if request is None else at + 1))
        wrong = judge(world, self.place, done)
        return Verdict(f"{self.first} {at} {other}", self.place, _shown(request) if request else "end", wrong)

    def _befall(self, running: Actor, request: Request, fault: str) -> None:
        """Let a fault happen to the request."""
        if fault == "killed":
            running.die()
            return
        if fault == "lost":
            _carry_out(running.world, request)
        running.tell(None, TimeoutError("no answer"))
        running.run()
        running.world.leave()
        if fault == "later":
            running.world, _ = self._whole(running.world, "later")
        if fault in ("late", "later"):
            _carry_out(running.world, request)


def _shown(request: Request) -> str:
    return f"{request.kind}:{'_'.join(request.path.removeprefix('bucket/dataset/').split())}"


def _two_days_later(world: World) -> World:
    later = world.copy()
    later.clock += SLEEP
    return later


def _carry_out(world: World, request: Request) -> None:
    """Carry out a write whose writer learns nothing."""
    try:
        world.perform(request)
    except OSError:
        pass  # as the store would answer


def run_script(place: Place, steps: Sequence[str]) -> Verdict:
    """Run operations in turns.

    Args:
        place: How the dataset is set up.
        steps: ``put1``: the operation, begun now or before, runs to its end; ``put1>create:_ags/log/``: it runs until
            it stands before the first request that begins so (``#2``: the second; ``$`` at the end: that is just so);
            ``put1.killed``: it is killed there;
            ``put1.lost``: the request is carried out, and the answer is lost; ``put1.late``: nobody answers;
            ``put1.step``: the request is carried out; ``land``: what nobody answered is carried out now; ``days``: two
            days go by.
    """
    world = begun(place)
    world.enter()
    running: dict[str, Actor] = {}
    begins, ends, late = dict[str, int](), dict[str, int](), list[Request]()
    for clock, step in enumerate(steps):
        if step == "days":
            world.clock += SLEEP
        elif step == "land":
            for request in late:
                _carry_out(world, request)
            late.clear()
        else:
            me, stop, fault = step.partition(">")[0].partition(".")[0], step.partition(">")[2], step.partition(".")[2]
            if me not in running:
                running[me] = actor(me.rstrip("0123456789"), place, me, world)
                begins[me] = clock
            _turn(running[me], stop, "" if stop else fault, late)
            ends[me] = clock
    for request in late:
        _carry_out(world, request)
    for one in running.values():
        if one.request is not None:
            one.die()
    done = [Done(one.name, me, one.outcome or Outcome("died"), begins[me], ends[me]) for me, one in running.items()]
    world.leave()
    said = "; ".join(f"{one.me}: {one.outcome.said} {one.outcome.text}" for one in done)
    return Verdict(f"script {' '.join(steps)}", place, said, judge(world, place, done))


def _turn(one: Actor, stop: str, fault: str, late: list[Request]) -> None:
    """Let an operation run until it stands before a request; or let something befall the request it stands before."""
    if fault:
        request = one.request
        assert request is not None, f"{one.name} has ended"
        if fault == "killed":
            one.die()
        elif fault == "step":
            one.step()
        else:
            if fault == "lost":
                _carry_out(one.world, request)
            else:
                late.append(request)
            one.tell(None, TimeoutError("no answer"))
        return
    begin, _, count = stop.partition("#")
    left = int(count or 1)
    while one.request is not None:
        left -= bool(stop) and f"{_shown(one.request)}$".startswith(begin)
        if not left:
            return
        one.step()
    assert not stop, f"{one.name} makes no request {stop}"


def run_random(
    seed: int, folder: Path | None = None, names: tuple[str, ...] = tuple(OPERATIONS), sql: bool = False
) -> Verdict:
    """Run a random schedule.

    Args:
        seed: Of all that is decided by chance.
        folder: For a database of keys; None: a temporary one.
        names: The operations to choose from.
        sql: Whether the keys are in a database; else they are in one schedule of five.
    """
    chance = random.Random(seed)
    place = Place(chance.choice(SCOPES), chance.choice((None, 1, 1, 2)), chance.random() < 0.3)
    with tempfile.TemporaryDirectory() as temporary:
        if chance.random() < 0.2 or sql:
            place = in_database(place, folder or Path(temporary))
        world = begun(place, chance.choice((2, 3, 1000)))
        world.enter()
        return _Random(chance, place, world, seed, names).run()


class _Random:
    """A random schedule: operations take turns of random lengths, often to their end.

    In some schedules processes die, answers are lost, writes land late, or days pass between two turns.
    """

    def __init__(self, chance: random.Random, place: Place, world: World, seed: int, names: tuple[str, ...]) -> None:
        self.chance, self.place, self.world, self.seed = chance, place, world, seed
        some = tuple(name for name in names if name in BUSY) if chance.random() < 0.5 else names
        self.days = chance.random() < 0.25  # whether processes sleep for days
        self.faults = chance.random() < 0.5  # whether processes die, and answers are lost
        self.chosen = [chance.choice(some or names) for _ in range(chance.randint(3, 5))]
        self.chosen += ["sweep", "sweep"] if self.days else []  # which have nothing to do otherwise
        self.running = [actor(name, place, f"{name}{i}", world) for i, name in enumerate(self.chosen)]
        self.begins = [0 for _ in self.running]
        self.ends = [0 for _ in self.running]
        self.late: list[Request] = []
        self.clock = 0

    def run(self) -> Verdict:
        """Run it to its end, and judge."""
        chance = self.chance
        begun = set[int]()
        while living := [i for i, one in enumerate(self.running) if one.request is not None]:
            i = chance.choice(living)
            if i not in begun:
                begun.add(i)
                self.begins[i] = self.clock
            for _ in range(chance.choice(TURNS)):
                if self.running[i].request is None:
                    break
                self.clock += 1
                self._step(self.running[i])
            self.ends[i] = self.clock
            if self.days and chance.random() < 0.3:
                self.world.clock += chance.choice((0.6, 2.0)) * DAY
        for request in self.late:
            _carry_out(self.world, request)
        self.world.leave()
        done = [
            Done(name, f"{name}{i}", one.outcome or Outcome("died"), self.begins[i], self.ends[i])
            for i, (name, one) in enumerate(zip(self.chosen, self.running, strict=True))
        ]
        wrong = judge(self.world, self.place, done)
        place = self.place._replace(key_store=self.place.key_store and "sqlite")  # wherever the database was
        return Verdict(f"random {self.seed}", place, " ".join(self.chosen), wrong)

    def _step(self, one: Actor) -> None:
        chance, request = self.chance, one.request
        assert request is not None
        if self.late and chance.random() < 0.05:
            _carry_out(self.world, self.late.pop(chance.randrange(len(self.late))))
        if not self.faults or chance.random() > (0.06 if request.kind in (*WRITES, "sql") else 0.003):
            one.step()
            return
        how = chance.random()
        if how < 0.4 or request.kind not in WRITES:
            one.die()
            return
        if how < 0.7:
            _carry_out(self.world, request)
        else:
            self.late.append(request)
        one.tell(None, TimeoutError("no answer"))
