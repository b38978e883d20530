"""Check what has changed, in less than a minute: linters, the tests of the packages, some schedules of the simulator.

What has changed is what git does not have committed; if that is nothing, the last commit. The tests of a package are in
tests/budgets.toml. All steps run, whatever fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
SCHEDULES = ("pairs", "policy", "expire", "--others", "put", "rename", "--share", "0.05", "--seconds", "5")  # that hold


def changed() -> list[str]:
    """Return the paths of files that have changed and are there."""

    def git(*arguments: str) -> list[str]:
        run = subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        return run.stdout.splitlines()

    found = git("diff", "--name-only", "HEAD") + git("ls-files", "--others", "--exclude-standard")
    return [path for path in found or git("diff", "--name-only", "HEAD~1", "HEAD") if (ROOT / path).is_file()]


def tests_of(paths: list[str]) -> list[str]:
    """Return the test files that look at these paths."""
    table: dict[str, list[str]] = tomllib.loads((TESTS / "budgets.toml").read_text())["tests"]
    found = set[str]()
    for path in paths:
        top, *inside = Path(path).parts
        if top == "ags_fast" and inside:
            found.update(table.get(inside[0], table["rest"]))
        elif top == "csrc":
            found.update(table["rest"])
        elif top == "tests" and inside[0].startswith("test_") and inside[0].endswith(".py"):
            found.add(inside[0])
        elif top == "tests" and inside[0] == "simulation":
            found.add("test_simulation.py")
    return [f"tests/{name}" for name in sorted(found)]


def main() -> int:
    """Run all steps. Return the exit code."""
    python = [sys.executable, "-P", "-m"]
    tests = tests_of(changed())
    steps = [
        [*python, "ruff", "check", "--quiet"],
        [*python, "ruff", "format", "--check", "--quiet"],
        [sys.executable, "-P", str(Path(sys.executable).with_name("lint-imports"))],
        [*python, "mypy", "--no-error-summary"],
        [sys.executable, "-m", "simulation", *SCHEDULES],
    ]
    if tests:
        workers = str((os.cpu_count() or 1) + 1)
        marks = ["-m", "not slow and not more and not spark"]
        steps.append([sys.executable, "-m", "pytest", "-q", "-n", workers, "--dist", "loadfile", *marks, *tests])
    failed = []
    for step in steps:
        begun = time.monotonic()
        folder = TESTS if "simulation" in step else ROOT
        name = next(Path(word).name for word in step[1:] if not word.startswith("-"))
        quiet = name == "lint-imports"
        code = subprocess.run(step, cwd=folder, stdout=subprocess.DEVNULL if quiet else None, check=False).returncode
        print(f"--- {name}: {'failed' if code else 'passed'}, {time.monotonic() - begun:.0f} s", flush=True)
        failed += [name] if code else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
