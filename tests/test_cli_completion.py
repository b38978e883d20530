"""``ags-fast completion``: bash is asked for completions; each script is parsed if its shell is here."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyarrow")

from cli_tree import tree_of

from ags_fast import cli
from ags_fast.cli.run import whole_parser

if TYPE_CHECKING:
    from pathlib import Path

# Completes one line after another, as bash splits them, and prints the completions of each on a line.
ASK = r"""
while IFS= read -r line; do
    read -ra COMP_WORDS <<< "${line//=/ = }"
    [[ $line == *" " || $line == *= ]] && COMP_WORDS+=("")
    [[ $line == *= ]] && unset 'COMP_WORDS[${#COMP_WORDS[@]}-1]'
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _ags_fast
    (IFS='|'; printf '%s\n' "${COMPREPLY[*]}")
done
"""


def script_for(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    script, err = capsys.readouterr()
    assert err == ""
    return script


def completions(script: str, folder: Path, *lines: str) -> list[list[str]]:
    """Return what bash completes the last word of each line to."""
    bash = ["bash", "--norc", "-c", f"{script}\n{ASK}"]
    text, environ = "".join(f"{line}\n" for line in lines), {"AGS_FAST_CONFIG": "config.toml", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(bash, input=text, capture_output=True, text=True, check=True, cwd=folder, env=environ)
    assert done.stderr == ""
    return [sorted(line.split("|")) if line else [] for line in done.stdout.splitlines()]


def test_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "ds").mkdir()
    (tmp_path / "config.toml").write_text('[profiles.sales]\nkey_store = "x"\n[profiles.hr.kms]\na = "b"\n')
    files = ["a file", "config.toml", "ds"]
    expected = {
        "ags-fast enc": ["encrypt"],
        "ags-fast keys rot": ["rotate"],
        "ags-fast keys ": [node.words[-1] for node in tree_of(whole_parser()).all() if node.words[:-1] == ("keys",)],
        "ags-fast keys rotate --wh": ["--what"],
        "ags-fast keys rotate --what ": ["double-wrap", "kek", "mek"],
        "ags-fast keys rotate --what=": ["double-wrap", "kek", "mek"],
        "ags-fast keys rotate --what=me": ["mek"],
        "ags-fast keys rotate rotate --what m": ["mek"],
        "ags-fast verify ": files,
        "ags-fast verify d": ["ds"],
        "ags-fast stream decrypt --data-key-file a": ["a file"],
        "ags-fast verify ds --key-file=a": ["a file"],
        "ags-fast verify --json d": ["ds"],
        "ags-fast cat ds ": [],  # a path in the dataset
        "ags-fast decrypt ds ": files,
        "ags-fast rekey ds --wrapping-key-id ": [],  # nothing is known
        "ags-fast ls --profile ": ["hr", "sales"],
        "ags-fast ls ds --profile s": ["sales"],
        "ags-fast completion ": ["bash", "fish", "zsh"],
        "ags-fast --ver": ["--version"],
        "ags-fast ls -": ["--help", "--json"],
    }
    found = dict(zip(expected, completions(script_for("bash", capsys), tmp_path, *expected), strict=True))
    assert {"--help", "--json", "-l", "--long", "--quiet"} <= set(found.pop("ags-fast ls -"))
    del expected["ags-fast ls -"]
    assert found == {line: sorted(words) for line, words in expected.items()}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_has_all_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_for(shell, capsys)
    for node in tree_of(whole_parser()).all():
        for below in node.nodes:
            assert below.words[-1] in script
        for flag in (flag for one in node.arguments for flag in one.flags):
            shown = flag if shell != "fish" else f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            assert shown in script, (node.words, flag)
    if program := shutil.which(shell):
        done = subprocess.run([program, "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_another_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["completion", "csh"])
    assert stopped.value.code == 2
