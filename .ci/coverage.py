"""Runs tests with coverage of Python, Cython and C, and prints which lines they do not run; arguments go to pytest.

The lines are in build/coverage/lines.json: {file: {line: whether it was run}}. The extension in the tree is built for
this, so `make` builds it again afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "coverage"
PYTHON = [sys.executable, "-P"]
Lines = dict[str, dict[int, bool]]


def main() -> int:
    """Build, run and report. Returns the exit status of the first of the tests that fails."""
    os.chdir(ROOT)
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    for old in Path("build").rglob("*.gcda"):
        old.unlink()
    os.environ["AGS_FAST_COVERAGE"] = "1"
    subprocess.run([*PYTHON, "setup.py", "-q", "build_ext", "--inplace"], check=True)
    Path(".venv/built").unlink(missing_ok=True)
    status = subprocess.run([sys.executable, "-m", "coverage", "run", "-m", "pytest", *sys.argv[1:]]).returncode
    status = status or subprocess.run(["bash", "tests/csrc/run.sh", "coverage"]).returncode
    lines = python_lines() | c_lines()
    (WORK / "lines.json").write_text(json.dumps(lines, indent=0, sort_keys=True))
    report(lines)
    return status


def python_lines() -> Lines:
    """Of ags_fast/**.py."""
    coverage, found = [sys.executable, "-m", "coverage"], WORK / "python.json"
    subprocess.run([*coverage, "combine", "-q"], check=True)
    subprocess.run([*coverage, "json", "-q", "-o", found], check=True)
    files = json.loads(found.read_text())["files"]
    return {
        name: dict.fromkeys(file["missing_lines"], False) | dict.fromkeys(file["executed_lines"], True)
        for name, file in files.items()
    }


def c_lines() -> Lines:
    """Of csrc and _core.pyx: what the extension runs, or a C test program."""
    lines: Lines = {}
    for data in Path("build").rglob("*.gcda"):
        command = ["gcov", "--json-format", "--stdout", data.name]
        output = subprocess.run(command, cwd=data.parent, check=True, capture_output=True, text=True).stdout
        for file in json.loads(output)["files"]:
            name = os.path.relpath(ROOT / file["file"], ROOT)
            if name.startswith(("csrc/", "ags_fast/")):
                seen = lines.setdefault(name, {})
                for line in file["lines"]:
                    seen[line["line_number"]] = seen.get(line["line_number"], False) or line["count"] > 0
    return lines


def report(lines: Lines) -> None:
    """Print each file with the lines that were not run, and the sums."""
    for name in sorted(lines):
        missed = sorted(number for number, was_run in lines[name].items() if not was_run)
        print(f"{name:40} {len(lines[name]):5} lines, {len(missed):4} not run  {' '.join(ranges(missed))}")
    for kind, suffixes in (("Python", (".py",)), ("Cython", (".pyx", ".pxi")), ("C", (".c", ".h"))):
        every = [was_run for name in lines if name.endswith(suffixes) for was_run in lines[name].values()]
        print(f"{kind:8} {sum(every):6} of {len(every):6} lines, {100 * sum(every) / max(1, len(every)):.1f} %")


def ranges(numbers: list[int]) -> list[str]:
    """Like 3-5 7."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [f"{first}-{last}" if last > first else f"{first}" for first, last in found]


if __name__ == "__main__":
    sys.exit(main())
