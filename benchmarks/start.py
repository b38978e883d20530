"""Benchmarks of what a user waits for at a terminal: the start of the command, and lines of a file."""

from __future__ import annotations

import functools
import io
import os
import resource
import subprocess
import sys
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ags_fast import Dataset, jobs
from benchmarks.cases import Bench, contest, nothing
from benchmarks.datasets import encrypt, workspace
from benchmarks.keystore import keystore
from benchmarks.measure import Case, Contest, Group, Row, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

LINES = 400_000
PYTHON, PYARROW = "pass", "import pyarrow.parquet"


def start(bench: Bench) -> Group:
    cases = [
        Case(f"start/{command}", functools.partial(starts, bench, command, beside))
        for command, beside in {"version": PYTHON, "help": PYTHON, "ls": PYARROW, "cat": PYARROW}.items()
    ]
    return Group("CPU of a command in a new process; beside: Python, or Python that imports pyarrow.parquet", cases)


def lines(bench: Bench) -> Group:
    cases = [Case(f"lines/{kind}", functools.partial(read_lines, bench, kind)) for kind in ("bytes", "text")]
    return Group(f"{bench.size(LINES):,} lines of a file; beside: Python's open of a plain file", cases)


def process(command: list[str], cache: str) -> Run:
    """CPU seconds of a command in a new process, with compiled modules, as an installed package has them."""
    env = os.environ | {"PYTHONPYCACHEPREFIX": cache}

    def run() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return run


@contextmanager
def starts(bench: Bench, command: str, beside: str) -> Iterator[Contest]:
    with workspace(bench, "start") as folder:
        (folder / "source").mkdir()
        (folder / "source" / "a").write_bytes(b"one\n")
        kms = keystore(folder)
        encrypt(folder / "source", folder / "dataset", kms, jobs.LocalEngine(0))
        keys = [f"--kms={name}={value}" for name, value in kms.items()]
        argv = {
            "version": ["--version"],
            "help": ["--help"],
            "ls": ["ls", str(folder / "dataset"), *keys],
            "cat": ["cat", str(folder / "dataset"), "a", *keys],
        }[command]
        cache = str(folder / "compiled")
        row = Row(f"start/{command}", f"ags-fast {' '.join(argv[:1])}", "ms")
        ours = process([sys.executable, "-P", "-m", "ags_fast", *argv], cache)
        yield contest(row, {"beside": process([sys.executable, "-c", beside], cache), "ours": ours}, 1)


@contextmanager
def read_lines(bench: Bench, kind: str) -> Iterator[Contest]:
    with workspace(bench, "lines") as folder:
        plain = folder / "source" / "a"
        plain.parent.mkdir()
        plain.write_bytes(b"".join(b"%d,some text of a line\n" % number for number in range(bench.size(LINES))))
        kms = keystore(folder)
        encrypt(plain.parent, folder / "dataset", kms, jobs.LocalEngine(0))

        dataset = Dataset.open(folder / "dataset", kms=kms)  # asks the KMS, once

        def of_ours() -> Iterable[bytes | str]:
            file: Any = dataset.open_file("a")
            return file if kind == "bytes" else io.TextIOWrapper(file, encoding="utf-8")

        def of_python() -> Iterable[bytes | str]:
            return open(plain, "rb") if kind == "bytes" else open(plain, encoding="utf-8")

        def drained(opened: Callable[[], Iterable[bytes | str]]) -> None:
            deque(opened(), maxlen=0)

        row = Row(f"lines/{kind}", f"for line in open_file(...), {kind}", "ms")
        yield contest(row, {"beside": nothing(drained, of_python), "ours": nothing(drained, of_ours)}, 1)


GROUPS: dict[str, Callable[[Bench], Group]] = {"start": start, "lines": lines}
