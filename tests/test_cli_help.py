"""The door: help by task, examples that parse, suggestions, options before the command."""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cli_tree import tree_of
from support import python_env

import ags_fast
from ags_fast import cli, jobs
from ags_fast.cli.codes import CODE_TEXTS, EXIT_NOT_FOUND, EXIT_USAGE
from ags_fast.cli.commands import GROUPS, TASKS
from ags_fast.cli.run import whole_parser

EXAMPLES = tomllib.loads((Path(ags_fast.__file__).parent / "cli" / "examples.toml").read_text("utf-8"))
COMMANDS = [node.words for node in tree_of(whole_parser()).all() if node.words and not node.nodes and node.arguments]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def ended(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return the exit code of a command, and what it prints to standard output and error."""
    try:
        code = cli.main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    return code, *capsys.readouterr()


@pytest.mark.parametrize("words", [[], ["help"], ["help", "help"], ["--help"], ["-h"]])
def test_all_commands_by_task(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ended(capsys, *words)
    assert (code, err) == (0, "")
    for task, commands in TASKS.items():
        assert f"{task}:\n" in out
        assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in commands)
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("words", COMMANDS, ids="-".join)
def test_each_help_has_examples_and_exit_codes(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ended(capsys, *words, "--help")
    if words == ("help",):
        return
    assert (code, ended(capsys, "help", *words)[1]) == (0, out)
    examples = EXAMPLES[" ".join(words)]
    assert len(examples) >= 2
    assert all(f"\n  ags-fast {line}" in out for line in examples)
    said = " ".join(out.split())
    assert all(f"{number} {text}" in said for number, text in CODE_TEXTS.items())


def test_examples_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs up to the command's own code."""
    assert EXAMPLES.keys() == {" ".join(words) for words in COMMANDS} - {"help"}
    ran: list[str] = []

    def run(args: argparse.Namespace) -> int:
        ran.append(args.parser.prog)
        return 0

    monkeypatch.setattr("ags_fast.cli.run._run_all", run)
    monkeypatch.setenv("AGS_FAST_DATASET", "ds")
    cli.main(["config", "init", "local", "--wrapping-key-id", "sales"])
    config = Path("config/ags_fast/config.toml")
    config.parent.mkdir(parents=True)
    config.write_text('[profiles.sales]\nwrapping_key_id = "sales"\n[profiles.default]\nwrapping_key_id = "sales"\n')
    for command, lines in EXAMPLES.items():
        for line in lines:
            words = shlex.split(re.split("[<>|]", line)[0])
            assert cli.main(words) == 0
            assert ran[-1] == f"ags-fast {command}", line


@pytest.mark.parametrize("group", GROUPS)
def test_help_of_a_group(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ended(capsys, group)
    assert (code, err, out) == (0, "", ended(capsys, "help", group)[1])
    assert all(f"\n  {words[1]} " in out for words in COMMANDS if words[0] == group)


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["encrpt", "a", "b"], "encrypt"),
        (["help", "verfy"], "verify"),
        (["keys", "rotat", "ds"], "rotate"),
        (["ls", "ds", "--keysotre", "k"], "--keystore"),
        (["encrypt", "a", "b", "--wraping-key-id", "k"], "--wrapping-key-id"),
    ],
)
def test_did_you_mean(words: list[str], near: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "init", "local", "--profile", "sales"]) == 0
    capsys.readouterr()
    code, out, err = ended(capsys, *words)
    assert (code, out) == (EXIT_USAGE, "")
    assert f"did you mean '{near}'?" in err
    assert len(err.splitlines()) == 1


def test_options_before_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("src").mkdir()
    Path("src/a").write_text("a")
    assert cli.main(["--profile", "p", "--quiet", "config", "init", "local"]) == 0
    capsys.readouterr()
    assert ended(capsys, "--profile", "p", "-q", "encrypt", "src", "ds") == (0, "", "")
    ags_fast.keys.clear_cache()
    code, out, err = ended(capsys, "--profile", "p", "-v", "ls", "ds")
    assert (code, out.split()) == (0, ["1", "a"])
    assert "ags_fast.kms" in err
    assert ended(capsys, "--json")[0] == EXIT_USAGE


def test_one_profile_serves_commands_and_python(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "init", "local", "--wrapping-key-id", "sales"]) == 0
    for path in ("config/ags_fast/keystore.json", "config/ags_fast/keystore.key"):
        assert os.stat(path).st_mode & 0o077 == 0, path
    assert cli.main(["config", "check"]) == 0
    Path("src").mkdir()
    Path("src/a").write_text("a")
    assert cli.main(["encrypt", "src", "ds"]) == 0
    assert cli.main(["keys", "create", "hr"]) == 0
    assert jobs.verify_files("ds", kms=ags_fast.profile().kms).counts["ok"] == 1
    capsys.readouterr()
    code, _, err = ended(capsys, "config", "init", "local")
    assert code == EXIT_USAGE
    assert "--overwrite" in err
    before = Path("config/ags_fast/config.toml").read_text()
    aws = ["config", "init", "aws", "--kms", "client.region=eu-central-1", "--wrapping-key-id", "alias/x"]
    assert cli.main([*aws, "--profile", "prod"]) == 0
    assert cli.main([*aws, "--profile", "prod", "--overwrite"]) == 0
    assert Path("config/ags_fast/config.toml").read_text().startswith(before)
    assert ags_fast.profile("prod").kms == {"encryption.kms-type": "aws", "client.region": "eu-central-1"}
    assert ags_fast.profile().wrapping_key_id == "sales"
    capsys.readouterr()
    assert "default, prod" in ended(capsys, "config", "show")[1]


@pytest.mark.parametrize("words", [["aws"], ["azure", "--wrapping-key-id", "k"], ["awss"], ["gcp"], ["la la", "x"]])
def test_what_init_misses(words: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ended(capsys, "config", "init", *words)
    assert (code, out, len(err.splitlines())) == (EXIT_USAGE, "", 1)
    assert not (here / "config").exists()


def test_secrets_do_not_go_into_the_profile(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["config", "init", "vault", "--kms", "vault.address=https://v", "--kms", "vault.token=hvs.CAESIJlU9mD"]
    code, _, err = ended(capsys, *words, "--wrapping-key-id", "k")
    assert code != 0
    assert "hvs." not in err
    assert not (here / "config" / "ags_fast" / "config.toml").exists()


def test_places(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """DATASET PATH, DATASET:PATH, and :PATH in AGS_FAST_DATASET."""
    assert cli.main(["config", "init", "local"]) == 0
    Path("src/x").mkdir(parents=True)
    for name in ("a", "b:c", "x/y"):
        Path("src", name).write_text(name)
    assert cli.main(["encrypt", "src", "ds"]) == 0
    capsys.readouterr()
    for words in (["ds", "x/y"], ["ds:x/y"]):
        for command in ("cat", "stat"):
            code, out, err = ended(capsys, command, *words)
            assert (code, err) == (0, "")
            assert "x/y" in out
    assert ended(capsys, "cat", "ds", "b:c")[1] == ended(capsys, "cat", "ds:b:c")[1] == "b:c"
    assert ended(capsys, "ls", "ds:x/*")[1].split() == ["3", "x/y"]
    assert ended(capsys, "ls", "ds", "--exclude", "x/*", "*")[1].split() == ["1", "a", "3", "b:c"]
    monkeypatch.setenv("AGS_FAST_DATASET", "ds")
    assert ended(capsys, "cat", ":x/y")[1] == ended(capsys, "cat", "x/y")[1] == "x/y"
    assert len(ended(capsys, "ls")[1].splitlines()) == 3
    assert ended(capsys, "rm", ":a", ":x/*", "--exclude", "x/*")[0] == 0
    assert ended(capsys, "ls")[1].split() == ["3", "b:c", "3", "x/y"]
    monkeypatch.delenv("AGS_FAST_DATASET")
    assert ended(capsys, "ls")[0] == EXIT_USAGE
    shutil.copytree("ds", "other")
    assert ended(capsys, "ls", "ds:x/*", "other:y")[0] == EXIT_USAGE
    assert ended(capsys, "cat", "ds:nothing")[0] == EXIT_NOT_FOUND


def test_a_source_without_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "init", "local"]) == 0
    Path("src").mkdir()
    capsys.readouterr()
    code, out, err = ended(capsys, "encrypt", "src", "ds")
    assert code == EXIT_NOT_FOUND
    assert "--allow-empty" in err
    assert "None" not in out
    assert not Path("ds").exists()
    assert ended(capsys, "encrypt", "src", "ds", "--allow-empty")[0] == 0
    assert not Path("ds").exists()
    Path("src/.hidden").write_text("x")
    assert ended(capsys, "encrypt", "src", "ds")[0] == EXIT_NOT_FOUND
    assert not Path("ds").exists()


@pytest.mark.parametrize(("answer", "left"), [("y\n", 2), ("n\n", 3), ("\n", 3)])
def test_expire_asks_on_a_terminal(answer: str, left: int, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset_of_three_versions()
    shown = on_terminal(["expire", "ds", "--keep", "1"], answer)
    assert "2 to remove" in shown
    assert "for good? [y/N]" in shown
    assert versions(capsys) == left


def test_expire_without_a_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset_of_three_versions()
    capsys.readouterr()
    code, out, err = ended(capsys, "expire", "ds", "--keep", "1")
    assert (code, out) == (EXIT_USAGE, "")
    assert "--yes" in err
    assert ended(capsys, "expire", "ds", "--keep", "1", "--dry-run")[0] == 0
    assert versions(capsys) == 3
    assert ended(capsys, "expire", "ds", "--keep", "1", "--yes")[0] == 0
    assert versions(capsys) == 2  # and the one of the expiry


def dataset_of_three_versions() -> None:
    assert cli.main(["config", "init", "local"]) == 0
    Path("src").mkdir()
    for name in "ab":
        Path("src", name).write_text(name)
        assert cli.main(["encrypt", "src", "ds", "--quiet"]) == 0


def versions(capsys: pytest.CaptureFixture[str]) -> int:
    capsys.readouterr()
    assert cli.main(["log", "ds"]) == 0
    return len(capsys.readouterr().out.splitlines()) - 1


def on_terminal(words: list[str], answer: str) -> str:
    """Run a command on a terminal of its own, and answer its question. Return what it shows."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "ags_fast", *words], stdin=theirs, stdout=theirs, stderr=theirs, env=python_env()
    )
    os.close(theirs)
    shown = b""
    while not (asked := b"[y/N]" in shown) and child.poll() is None:
        if select.select([ours], [], [], 1)[0]:
            shown += os.read(ours, 4096)
    assert asked, shown
    os.write(ours, answer.encode())
    while True:
        try:
            more = os.read(ours, 4096)
        except OSError:
            break
        if not more:
            break
        shown += more
    child.wait()
    os.close(ours)
    return shown.decode()
