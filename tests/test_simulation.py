"""Real operations on datasets over a simulated store: one runs whole between two steps of another, or something befalls
it. See `simulation`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from simulation import oracle
from simulation.actors import Outcome
from simulation.mutants import MUTANTS, source_of
from simulation.operations import FIRST, OPERATIONS
from simulation.oracle import Done
from simulation.store import Door, SimStore
from simulation.world import World
from store_contract import StoreContract

from ags_fast.fs import Store

pytestmark = pytest.mark.timeout(600)

TESTS = Path(__file__).parent
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))}
SHARE = "0.05"  # of the stops before reads that test-more takes; nightly takes all


def simulate(*arguments: str) -> list[dict[str, Any]]:
    """Run schedules in a process of their own, and return what became of each."""
    command = [sys.executable, "-m", "simulation", *arguments, "--json"]
    run = subprocess.run(command, cwd=TESTS, env=ENV, capture_output=True, text=True)
    assert run.returncode in (0, 3), run.stderr
    verdicts: list[dict[str, Any]] = [json.loads(line) for line in run.stdout.splitlines()]
    assert verdicts
    assert run.returncode == 3 * any(verdict["wrong"] for verdict in verdicts)
    return verdicts


def run_python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def wrong(verdicts: list[dict[str, Any]]) -> list[str]:
    return [f"{verdict['schedule']}: {verdict['wrong']}" for verdict in verdicts if verdict["wrong"]]


# ------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize(
    "schedule",
    [
        # What lost data before datasets had one log: a sweep beside a writer, and two writers under a policy.
        "sweep read:_ags/log/ put",
        "overwrite create:_ags/log/ overwrite",
        "overwrite create:_ags/log/ rename --keep 0",
        "put create:_ags/log/ force --scope partition --keep 0",
        # A writer whose commit is not answered, and one that sleeps for two days.
        "put create:_ags/log/ late",
        "put create:_ags/log/ sleeps",
        # A rotation that gives up at its second attempt: its first one has named tables of others.
        "script column1>create:_ags/log/ overwrite1 column1>create:_ags/tables/ column1.lost column1 --columns",
        # Rows of a key store: of a job that has not committed yet, and of a head that is not the newest one any more.
        "kek create:_ags/log/ sweep --sql",
        "put read:_ags/log/ mek --sql",
    ],
)
def test_faults_that_one_log_mends(schedule: str) -> None:
    assert not wrong(simulate("replay", *schedule.split()))


def test_pairs_that_hold() -> None:
    """A few stops of pairs."""
    verdicts = simulate("pairs", "policy", "expire", "--others", "put", "rename", "killed", "lost", "--share", "0.05")
    assert len(verdicts) > 20
    assert not wrong(verdicts)


def test_every_mutant_changes_the_source() -> None:
    for mutant in MUTANTS.values():
        for module in {edit.module for edit in mutant.edits}:
            compile(source_of(module, mutant.edits), module, "exec")


def test_requests() -> None:
    """Of a commit of one small file, with a handle that is open, and of opening one: beside a stat of this store."""
    counts = run_python("""
from simulation import operations
from simulation.store import Door, SimStore
from simulation.world import World

def put(dataset, path):
    with dataset.transaction() as new, new.create(path) as file:
        file.write(b"1")

def counted(work):
    asked, ask = [], SimStore.door.ask
    SimStore.door.ask = lambda kind, *more: (asked.append(kind), ask(kind, *more))[1]
    work()
    SimStore.door.ask = ask
    return len([kind for kind in asked if kind not in ("kms", "stat")])

for keep in (None, 3):
    SimStore.door = Door(World())
    place = operations.Place(keep=keep)
    operations.make(place)
    one = place.open()
    for n in range(20):
        put(one, f"x{n}")
    print(counted(lambda: put(one, "y")), counted(place.open))
""").split()
    assert [int(count) for count in counts] == [8, 3, 12, 3]


@pytest.mark.more
@pytest.mark.xdist_group("mutants")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_that_is_left_out(name: str) -> None:
    """The schedule goes wrong without the rule, and only then."""
    schedule = MUTANTS[name].schedule
    assert not wrong(simulate("replay", *schedule))
    command = [sys.executable, "-m", "simulation", "replay", *schedule, "--mutant", name]
    run = subprocess.run(command, cwd=TESTS, env=ENV, capture_output=True, text=True)
    # Without some rules not even the first commit of the dataset comes to an end.
    assert run.returncode == 3 or "ConcurrentChangeError" in run.stderr, run.stderr
    assert "TypeError" not in run.stdout  # the mutant itself is no program


@pytest.mark.more
@pytest.mark.parametrize(
    "first", [pytest.param(name, marks=pytest.mark.xdist_group(f"pairs of {name}")) for name in OPERATIONS]
)
def test_every_pair(first: str) -> None:
    """Each operation stops before each of its writes, and before some of its reads; all others run in the gap."""
    assert not wrong(simulate("pairs", first, "--share", SHARE))


@pytest.mark.more
@pytest.mark.xdist_group("random schedules")
def test_random_schedules() -> None:
    """With KEKs for partitions, writers, days or files, and keys in SQLite."""
    assert not wrong(simulate("random", "--count", "100"))


@pytest.mark.more
@pytest.mark.xdist_group("keys in a database")
def test_keys_in_a_database() -> None:
    names = ("put", "kek", "mek", "expire", "force", "sweep", "destroy", "restore")
    assert not wrong(simulate("pairs", "--sql", "kek", "destroy", "--others", *names, "--share", SHARE))
    assert not wrong(simulate("random", "--sql", "--count", "40"))


# ------------------------------------------------------------------------------------------------ the simulator itself


def test_a_seed_is_one_schedule() -> None:
    """What is random comes from the seed: names, turns, faults, and so the requests."""
    both = simulate("random", "--count", "2", "--seed", "7")
    assert both == [*simulate("replay", "random", "7"), *simulate("replay", "random", "8")]


def done(name: str, said: str, begin: int, end: int) -> Done:
    return Done(name, name, Outcome(said), begin, end)


@pytest.mark.parametrize(
    ("operations", "paths"),
    [
        ([done("put", "yes", 0, 1)], [{"new/put"}]),
        ([done("put", "no", 0, 1)], [set()]),
        ([done("put", "unknown", 0, 1)], [set(), {"new/put"}]),
        ([done("put", "died", 0, 1), done("encrypt", "yes", 0, 1)], [{"encrypted"}, {"encrypted", "new/put"}]),
    ],
)
def test_what_is_possible(operations: list[Done], paths: list[set[str]]) -> None:
    found = [files.keys() - FIRST.keys() for files in oracle.possible(FIRST, operations)]
    assert {frozenset(some) for some in found} == {frozenset(some) for some in paths}


def test_an_order_is_kept() -> None:
    """What had ended before another began came first: a file cannot be overwritten by what was there before."""
    one, other = Done("overwrite", "1", Outcome("yes"), 0, 3), Done("overwrite", "2", Outcome("yes"), 4, 5)
    assert [files["d/overwritten"] for files in oracle.possible(FIRST, [one, other])] == [b"2"]
    at_once = other._replace(begin=2)
    assert {files["d/overwritten"] for files in oracle.possible(FIRST, [one, at_once])} == {b"1", b"2"}


def test_no_order_explains_two_renames() -> None:
    two = [done("rename", "yes", 0, 1), done("rename", "yes", 0, 1)]
    assert not [*oracle.possible(FIRST, two)]


def test_the_judge_sees_harm() -> None:
    """In a process that forks: this one would fork all that pytest has imported."""
    verdicts = run_python("""
from functools import partial
from simulation import actors, operations, oracle, schedules
from simulation.world import Object
actors.ready(operations.all_once)
place = operations.Place(keep=None)
begin = "bucket/dataset/"
def harmed(delete=None, add=None):
    world, outcome = actors.run_whole(schedules.begun(place), partial(operations.outcome_of, "put", place, "put"), 1)
    if delete is not None:
        del world.objects[max(path for path in world.objects if path.startswith(begin + delete))]
    if add is not None:
        world.objects[begin + add] = Object(b"x", world.clock, 10**6)
    print(oracle.judge(world, place, [oracle.Done("put", "put", outcome, 0, 1)]))
harmed()
harmed(delete="d/")
harmed(delete="_ags/tables/")
harmed(delete="_ags/log/")
harmed(add="d/stray")
""").splitlines()
    expected = ["None", *["unreadable"] * 2, "new/put is lost", "1 objects are of no use, such as d/stray"]
    for verdict, begin in zip(verdicts, expected, strict=True):
        assert verdict.startswith(begin), verdicts


class TestSimStore(StoreContract):
    """The simulated store is a store."""

    @pytest.fixture
    def store(self, monkeypatch: pytest.MonkeyPatch) -> Store:
        world = World(page=20)
        world.clock = time.time() - 3600  # each request takes longer there than here
        monkeypatch.setattr(SimStore, "door", Door(world), raising=False)
        return Store("sim://bucket/folder")
