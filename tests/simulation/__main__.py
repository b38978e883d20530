"""``python -m simulation``, in tests/: run schedules over the code of today, and print those that go wrong.

- ``pairs [FIRST ...]``: every pair of operations, and every fault, at every stop that differs.
- ``random --seconds 60 [--seed N]``: random schedules, one seed after the other.
- ``replay put 37 sweep``, ``replay script put1 sweep1`` or ``replay random 12``: one schedule again.

``--scope``, ``--keep``, ``--columns`` and ``--sql`` set up the dataset of pairs. The exit code is 3 if something is
wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from simulation.schedules import Verdict

SAME = {"PYTHONHASHSEED": "0", "AGS_FAST_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def parsed() -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__.partition("\n")[0])
    parser.add_argument("mode", choices=("pairs", "random", "replay"))
    parser.add_argument("what", nargs="*", help="operations that stop; of replay, the text of a schedule")
    parser.add_argument("--others", nargs="+", help="what runs in the gaps of pairs: operations, or faults")
    parser.add_argument("--scope", default="dataset")
    parser.add_argument("--keep", type=int, default=1, help="versions that the policy keeps; 0: all")
    parser.add_argument("--columns", action="store_true", help="with a Parquet file and a KEK of its columns")
    parser.add_argument("--sql", action="store_true", help="with the keys in SQLite")
    parser.add_argument("--inline", type=int, default=1, help="KEKs with a scope, and counts, in an entry")
    parser.add_argument("--mutant", nargs="+", default=(), help="without these rules: see simulation.mutants")
    parser.add_argument("--share", type=float, default=1.0, help="the part of the stops before reads that is taken")
    parser.add_argument("--seed", type=int, default=0, help="of the first random schedule, and of --share")
    parser.add_argument("--count", type=int, help="how many random schedules")
    parser.add_argument("--seconds", type=float, help="stop after this time")
    parser.add_argument("--until-wrong", action="store_true", help="stop at the first schedule that goes wrong")
    parser.add_argument("--json", action="store_true", help="print each verdict, good ones too, as a line of JSON")
    return parser.parse_intermixed_args()


def verdicts(args: argparse.Namespace, folder: Path) -> Iterator[Verdict]:
    """Run what the arguments ask for."""
    from simulation import schedules
    from simulation.operations import OPERATIONS, Place

    if args.mode == "random" or args.what[:1] == ["random"]:
        seeds: Iterable[int] = [int(args.what[1])] if args.mode == "replay" else itertools.count(args.seed)
        for seed in itertools.islice(seeds, args.count):
            yield schedules.run_random(seed, folder, tuple(args.others or OPERATIONS), args.sql)
        return
    place = Place(args.scope, args.keep or None, args.columns)
    if args.sql:
        place = schedules.in_database(place, folder)
    if args.mode == "replay" and args.what[0] == "script":
        yield schedules.run_script(place, args.what[1:])
        return
    if args.mode == "replay":
        first, stop, other = args.what
        yield schedules.Pairs(place, first).one(stop, other)
        return
    others = tuple(args.others or (*OPERATIONS, *schedules.FAULTS))
    firsts = args.what or list(OPERATIONS)
    if args.seconds is not None:  # another night, others come first
        random.Random(args.seed).shuffle(firsts)
    for first in firsts:
        yield from schedules.Pairs(place, first).all(others, args.share, args.seed)


def main() -> int:
    """Run schedules. Return the exit code."""
    args = parsed()
    if args.mutant:
        from simulation.mutants import install

        install(args.mutant)
    from ags_fast.dataset import keks, tables
    from simulation.actors import ready, stop_before_statements
    from simulation.operations import all_once

    keks.INLINE = tables.COUNTS = args.inline
    if args.sql or args.mode == "random":
        stop_before_statements()
    ready(all_once)
    begun, wrong, count = time.monotonic(), Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        for verdict in verdicts(args, Path(folder)):
            count += 1
            if args.json:
                print(json.dumps(verdict._asdict()), flush=True)
            elif verdict.wrong is not None:
                print(f"{count}: {verdict.schedule} ({verdict.request}), {verdict.place}: {verdict.wrong}", flush=True)
            wrong[verdict.schedule] += verdict.wrong is not None
            late = args.seconds is not None and time.monotonic() - begun > args.seconds
            if late or (args.until_wrong and verdict.wrong is not None):
                break
    print(f"{count} schedules, {wrong.total()} of them wrong, {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return 3 if wrong.total() else 0


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in SAME.items()):  # sets must have the same order each time
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **SAME})
    sys.exit(main())
