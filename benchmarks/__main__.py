"""python -m benchmarks: a table of ratios, JSON and plots. Results are only as good as the machine is quiet."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cryptography.hazmat.backends.openssl import backend as cryptography_backend

import ags_fast
from ags_fast.cli.version import libcrypto_text
from benchmarks import (
    cases,
    clients,
    commits,
    compare,
    datasets,
    frames,
    iceberg,
    jobs,
    measure,
    network,
    parquet,
    rotation,
    slopes,
    start,
)
from benchmarks.evp import EvpError
from benchmarks.measure import TITLES, Group, Row, SkippedError, speed, use_bytecode, warn_if_busy
from benchmarks.targets import TARGETS

GROUPS = (
    cases.GROUPS
    | jobs.GROUPS
    | datasets.GROUPS
    | parquet.GROUPS
    | rotation.GROUPS
    | commits.GROUPS
    | iceberg.GROUPS
    | frames.GROUPS
    | slopes.GROUPS
    | network.GROUPS
    | start.GROUPS
    | clients.GROUPS
)


def main() -> int:
    options = parse_options()
    use_bytecode()
    measure.by_cpu = options.cpu
    try:
        base = compare.read(options.compare) if options.compare else None
    except (OSError, ValueError) as error:
        print(f"benchmarks: --compare: {error}", file=sys.stderr)
        return 2
    output = Path(options.output)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < usable] + [usable]
    with cases.scratch_folder() as scratch:
        bench = cases.Bench(output, scratch, threads, 4 if options.quick else 1)
        chosen = choose(
            {name: make(bench) for name, make in GROUPS.items()},
            options.only,
        )
        if not chosen:
            print(f"benchmarks: no case matches {options.only!r}", file=sys.stderr)
            return 2
        if options.list:
            print(*(case.name for group in chosen.values() for case in group.cases), sep="\n")
            return 0
        rounds = options.repeat or (5 if options.quick else 21)
        try:
            about = describe(bench, rounds)
        except EvpError as error:
            print(f"benchmarks: {error}", file=sys.stderr)
            return 2
        print("\n".join(f"{key:12} {value}" for key, value in about.items()))
        warn_if_busy()
        print("\nThe best run of each; ratios are of the bests, and (median over the rounds). Above 1, ours is better.")
        rows = run(chosen, rounds)
    about["load after"] = load()
    targets = [target.judge(rows) for target in TARGETS]
    print_targets(targets, about)
    results = {"about": about, "rows": [row.as_json() for row in rows], "targets": targets}
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{output / 'results.json'}")
    from benchmarks import plots

    for path in plots.draw(results, output):
        print(path)
    return int(base is not None and compare.show(compare.compare(base, results), options.compare))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the data and of the rounds: for a look")
    parser.add_argument(
        "--only", metavar="PATTERN", default="", help="only cases whose name has a match of this regular expression"
    )
    parser.add_argument(
        "--compare",
        metavar="BASE",
        help="the results.json of another run, or its folder: mark the rows that got slower by more than their noise; "
        "the exit code is then 1",
    )
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="measure the CPU's time of this process and those that it starts: for Spark on a busy machine",
    )
    parser.add_argument("--repeat", type=int, metavar="N", help="rounds (21; with --quick 5)")
    parser.add_argument(
        "--output", metavar="DIR", default="build/benchmarks", help="for results.json and plots (%(default)s)"
    )
    return parser.parse_args()


def choose(groups: dict[str, Group], pattern: str) -> dict[str, Group]:
    chosen = {}
    for name, group in groups.items():
        if matching := [case for case in group.cases if re.search(pattern, case.name)]:
            chosen[name] = Group(group.about, matching)
    return chosen


# ---- the table


def describe(bench: cases.Bench, rounds: int) -> dict[str, Any]:
    model, flags = platform.processor() or platform.machine(), ""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if named := re.search(r"model name\s*: (.*)", text):
            model = named[1]
        flags = " ".join(
            flag for flag in ("aes", "pclmulqdq", "vaes", "vpclmulqdq", "avx512f") if re.search(rf"\b{flag}\b", text)
        )
    size = 64 << 20
    out, data = cases.touched(size), cases.touched(size)
    copy = size / min(bench.evp.copy(out, data) for _ in range(9)) / 1e9
    return {
        "ags_fast": f"{ags_fast.__version__}, {libcrypto_text()}",
        "cryptography": f"{version('cryptography')}, {cryptography_backend.openssl_version_text()}",
        "Python": f"{platform.python_version()}, {platform.platform()}",
        "CPU": f"{model}, {os.cpu_count()} cores; {flags}",
        "memcpy": f"{copy:.1f} GB/s, 64 MiB, one thread",
        "files": str(bench.scratch.parent),
        "load": load(),
        "rounds": rounds,
        "time": "of the CPU" if measure.by_cpu else "by the clock",
    }


def load() -> str:
    return " ".join(f"{n:.2f}" for n in os.getloadavg())


def run(groups: dict[str, Group], rounds: int) -> list[Row]:
    rows = []
    for name, group in groups.items():
        print(f"\n{name}: {group.about}")
        titles = "".join(f"{title:>9}" for title in TITLES.values())
        print(f"{'':47}{titles}{'ours/EVP, beside':>18}{'ours/best Py':>16}")
        for case in group.cases:
            try:
                with case.prepare() as contest:
                    measured = contest.measure(max(1, round(rounds * case.rounds)))
            except SkippedError as reason:
                print(f"  {case.name}: skipped, {reason}")
                continue
            for row in measured:
                print(format_row(row), flush=True)
            rows += measured
    return rows


def format_row(row: Row) -> str:
    text = f"  {row.label:<40}{row.unit:>5}"
    for column in TITLES:
        value = row.shown(column)
        text += " " * 9 if value is None else f"{value:9.{2 if value < 100 else 0}f}"
    for column, width in (("loop" if "loop" in row.samples else "beside", 18), ("best", 16)):
        ratio = ""
        if column in row.samples and "ours" in row.samples:
            best, median = speed(row.samples["ours"], row.samples[column])
            ratio = f"{best:.2f} ({median:.2f})"
        text += ratio.rjust(width)
    return text.rstrip()


def print_targets(targets: list[dict[str, Any]], about: dict[str, Any]) -> None:
    print(f"\ntargets: of all rows that a target is for, the worst. Load was {about['load']}, is {about['load after']}")
    print(f"  {'':52}{'target':>14}{'best':>9}{'median':>9}  verdict")
    for target in targets:
        numbers = "".join(f"{target[key]:9.2f}" if key in target else " " * 9 for key in ("best", "median"))
        worst = f"({target['worst_row']})" if target.get("rows", 0) > 1 else ""
        print(f"  {target['what']:<52}{target['target']:>14}{numbers}  {target['verdict']:<12}{worst}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
