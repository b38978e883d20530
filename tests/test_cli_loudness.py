"""``--quiet`` and ``--verbose``: the same for all commands."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from datasets import MASTER, make_kms, write_tree
from support import flip

pytest.importorskip("pyarrow")

from ags_fast import cli
from ags_fast.keys import clear_cache

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeAlias

    Run: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kms(tmp_path: Path) -> list[str]:
    """Return options for a KMS."""
    return [text for name, value in make_kms(tmp_path).items() for text in ("--kms", f"{name}={value}")]


@pytest.fixture
def run(kms: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in a folder with an encrypted dataset. Returns the exit code and both outputs."""
    write_tree(tmp_path / "src", {"a": b"one", "b": b"two"})
    monkeypatch.chdir(tmp_path)

    def run(*command: str) -> tuple[int, str, str]:
        clear_cache()
        code = cli.main([*command, *kms])
        return code, *capsys.readouterr()

    assert run("encrypt", "src", "ds", "--wrapping-key-id", MASTER, "--quiet") == (0, "", "")
    return run


def test_quiet_commands_print_errors_only(run: Run, tmp_path: Path) -> None:
    for command in (
        ["verify", "ds"],
        ["decrypt", "ds", "out"],
        ["rekey", "ds"],
        ["keys", "rotate", "ds"],
        ["expire", "ds", "--yes", "--keep", "1", "--force"],
        ["rm", "ds", "b"],
        ["compact", "ds"],
        ["config", "check", "--wrapping-key-id", MASTER],
    ):
        code, out, err = run(*command, "--quiet")
        assert (code, out) == (0, ""), command
        assert all(line.startswith("ags-fast: warning: ") for line in err.splitlines()), command
    (name,) = (tmp_path / "ds").glob("a.*ags")  # of the newest version
    name.write_bytes(flip(name.read_bytes(), 60))
    code, out, _ = run("verify", "ds", "--quiet")
    assert code == 3
    assert "failed" in out


def test_quiet_shows_what_was_asked_for(run: Run) -> None:
    for command in (["ls", "ds"], ["log", "ds"], ["keys", "status", "ds"], ["config", "show"], ["cat", "ds", "a"]):
        loud = run(*command)
        assert run(*command, "--quiet") == loud, command
    assert "planned" in run("rm", "ds", "a", "--dry-run", "--quiet")[1]
    assert run("verify", "ds", "--json", "--quiet")[1].startswith("{")


def test_verbose_shows_calls_of_the_kms(run: Run) -> None:
    assert "ags_fast.kms" not in run("verify", "ds")[2]
    code, out, err = run("verify", "ds", "--verbose")
    assert code == 0
    assert re.search(rf"ags_fast\.kms: local: unwrap with {MASTER} took [\d.]+ s: ok", err)
    assert "ags_fast.jobs: " in err
    assert "ags_fast" not in out
    assert not logging.getLogger("ags_fast").handlers  # a program that calls `main` has its own log back
    assert "AGS_FAST_SHOW_RECORDS" not in os.environ
    assert run("verify", "ds")[2] == ""


def test_workers_are_verbose_too(run: Run, kms: list[str]) -> None:
    command = ["encrypt", "src", "ds2", "--wrapping-key-id", MASTER, "--single-wrap", "--verbose", *kms]
    code = "import sys; from ags_fast import cli; sys.exit(cli.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    assert "ags_fast.kms: local: wrap" in done.stderr


def test_quiet_excludes_verbose(run: Run) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("verify", "ds", "--quiet", "--verbose")
    assert stopped.value.code == 2
