"""What must be true when all operations of a schedule have ended: `judge` says what is not."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, NamedTuple

from simulation.actors import Outcome, run_whole
from simulation.operations import OPERATIONS, ROOT, Files, Place, first_files, read
from simulation.world import DAY, World

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

NEEDED = ("_ags/tables/", "_ags/plans/")  # of `_ags/`, what a sweep leaves only if reading the dataset needs it


class Done(NamedTuple):
    """An operation of a schedule, and when it ran: from before request `begin` of the schedule to before `end`."""

    name: str
    me: str
    outcome: Outcome
    begin: int
    end: int


def possible(files: Files, done: Sequence[Done]) -> Iterator[Files]:
    """Yield all that the files may be, if each operation had its effect at one moment while it ran, or none at all.

    An operation that said yes had its effect, one that said no had none, and of another one nobody knows.
    """
    sure = [one for one in done if one.outcome.said == "yes"]
    perhaps = [one for one in done if one.outcome.said in ("unknown", "died", "wrong")]
    for chosen in range(1 << len(perhaps)):
        some = sure + [one for i, one in enumerate(perhaps) if chosen >> i & 1]
        for order in permutations(some):
            if any(later.end < earlier.begin for i, earlier in enumerate(order) for later in order[i + 1 :]):
                continue
            made: Files | None = files
            for one in order:
                made = OPERATIONS[one.name].effect(made, one.me) if made is not None else None
            if made is not None:
                yield made


def judge(world: World, place: Place, done: Sequence[Done]) -> str | None:
    """Return what is wrong at the end of a schedule; None: nothing.

    Three days later one sweep cleans up. Then every version that the dataset has must be readable, the newest one must
    have just the files and the policy that the operations have made, and every object of data, tables and plans
    must be of use.
    """
    for one in done:
        if one.outcome.said == "wrong":
            return f"{one.name} got an error that nothing explains: {one.outcome.text}"
    later = world.copy()
    later.clock += 3 * DAY
    after, last = run_whole(later, lambda: _read(place), "sweep")
    if last.said != "yes":
        return f"unreadable after {said(done)}: {last.text}"
    found: Files = last.value
    expected = [*possible(first_files(place), done)]
    if not expected:
        return f"no order of the operations explains what they said: {said(done)}"
    if found not in expected:
        return f"{_difference(found, expected)} after {said(done)}"
    prefix = ROOT.removeprefix("sim://") + "/"
    ours = {path.removeprefix(prefix) for path in after.objects.keys() - after.read if path.startswith(prefix)}
    left = sorted(path for path in ours if not path.startswith("_ags/") or path.startswith(NEEDED))
    return f"{len(left)} objects are of no use, such as {left[0]}, after {said(done)}" if left else None


def said(done: Iterable[Done]) -> str:
    """Return what each operation has said, for people."""
    return ", ".join(f"{one.name} ({one.outcome.said})" for one in done)


def _difference(found: Files, expected: Sequence[Files]) -> str:
    nearest = min(expected, key=lambda files: len(found.items() ^ files.items()))
    wrong = sorted(path for path in found.keys() | nearest.keys() if found.get(path) != nearest.get(path))
    path = wrong[0]
    what = "lost" if path not in found else "there, and should not be" if path not in nearest else "another"
    return f"{path} is {what}"


def _read(place: Place) -> Outcome:
    """Sweep up and read everything, where nobody else runs."""
    try:
        return Outcome("yes", value=read(place))
    except Exception as error:
        return Outcome("wrong", f"{type(error).__name__}: {error}")
