"""The formal model of the log, docs/protocol/log.als: Alloy must end each command as the command expects.

python tests/test_protocol_model.py NAME ...    # some commands; * stands for any letters
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest
from iceberg_java import alloy_jar
from parquet_peers import java

DOCS = Path(__file__).resolve().parents[1] / "docs"
MODEL, PAGE = DOCS / "protocol" / "log.als", DOCS / "protocol.md"
COMMAND = re.compile(r"^(?:check|run) (\w+) .* expect ([01])$", re.MULTILINE)
# What starts fast: most commands take two seconds, and Java's better compiler does not come to pay.
JVM = ("-Xss64m", "-Xmx1500m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def commands() -> dict[str, bool]:
    """By name, whether the command is to find a trace."""
    found = COMMAND.findall(MODEL.read_text())
    assert len(found) == len({name for name, _ in found}), "two commands have one name"
    return {name: expected == "1" for name, expected in found}


def large(name: str) -> bool:
    return name.startswith("large_")


def outcomes(names: list[str]) -> dict[str, bool]:
    """Run some commands in one virtual machine: by name, whether Alloy found a trace. Prints what Alloy says."""
    with tempfile.TemporaryDirectory() as folder:
        alloy = [java(), *JVM, "-jar", str(alloy_jar()), "exec", "-f", "-s", "glucose", "-t", "none", "-o", folder]
        begun = time.monotonic()
        with subprocess.Popen(
            [*alloy, "-c", f"{{{','.join(names)}}}", str(MODEL)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("c "):  # of the solver
                    print(f"{time.monotonic() - begun:7.1f} s  {line}", end="", flush=True)
        # The solver writes between Alloy's words. The receipt has a solution for each command that has a trace.
        receipt = Path(folder, "receipt.json")
        assert receipt.exists(), "Alloy could not read the model"
        done = json.loads(receipt.read_text())["commands"]
        found = {name: "solution" in command for name, command in done.items()}
    assert found.keys() == set(names)
    # Alloy fails if a command has not ended as it expects, and if it could not run one.
    assert process.returncode == 0 or found != {name: commands()[name] for name in names}
    return found


def check(names: list[str]) -> None:
    expected = commands()
    wrong = {name: trace for name, trace in outcomes(names).items() if trace != expected[name]}
    assert wrong == {}, "True: a claim fails, and Alloy has a trace of it. False: nothing is lost without a rule."


def test_each_rule_has_a_variant_and_is_on_the_page() -> None:
    """A variant leaves out one rule: `NoNames` is off in `no_names`, and the page says what is lost."""
    text = MODEL.read_text()
    (rules,) = re.findall(r"^sig (No\w+,[^{]*)\{\}", text, re.MULTILINE)
    declared = re.findall(r"\bNo[A-Z]\w+", rules)
    variants = re.findall(
        r"^check (\w+) \{ (?:.* implies )?holds \} for 0 but exactly 1 (No\w+), .* expect 1$", text, re.MULTILINE
    )
    snake = {name: re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower() for name in declared}
    assert sorted(off for _, off in variants) == sorted(declared)
    assert all(name.removeprefix("large_") == snake[off] for name, off in variants)
    rows = re.findall(r"^\| (\d+)[^|]* \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(name for _, name in rows) == sorted(name for name, _ in variants)
    assert {int(rule) for rule, _ in rows} == set(range(1, 12)), "rules 1 to 11: readers (12) are not in the model"


def test_the_model_is_short() -> None:
    assert len(MODEL.read_text().splitlines()) <= 400


@pytest.mark.more
def test_a_trace_and_a_rule_that_is_needed() -> None:
    check(["ends_and_says_no", "no_trim"])


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute on an idle machine
def test_the_claims_hold_and_each_rule_is_needed() -> None:
    check([name for name in commands() if not large(name)])


@pytest.mark.slow
@pytest.mark.timeout(10800)
def test_larger_scopes() -> None:
    check([name for name in commands() if large(name)])


if __name__ == "__main__":
    outcomes([name for name in commands() if any(fnmatch(name, one) for one in sys.argv[1:])])
