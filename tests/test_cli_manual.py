"""``ags-fast man``: a page for each command, which roff reads without a warning."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from ags_fast import cli
from ags_fast.cli.manual import CODES
from ags_fast.cli.run import whole_parser
from ags_fast.cli.tree import tree_of

MACROS = {".TH", ".SH", ".B", ".TP"}
SECTIONS = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPERANDS", "OPTIONS", "EXIT STATUS", "ENVIRONMENT", "FILES", "SEE ALSO"]


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = tmp_path / "share" / "man1"
    assert cli.main(["man", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["pages"] == sorted(page.name for page in folder.iterdir())
    return folder


def test_each_command_has_a_page_with_all_arguments(folder: Path) -> None:
    nodes = tree_of(whole_parser()).all()
    assert {page.stem for page in folder.iterdir()} == {"-".join(("ags-fast", *node.words)) for node in nodes}
    for node in nodes:
        page = (folder / f"{'-'.join(('ags-fast', *node.words))}.1").read_text()
        for one in node.arguments:
            for flag in one.flags:
                assert f"\\fB{flag.replace('-', chr(92) + '-')}\\fR" in page, (node.words, flag)
        for below in node.nodes:
            assert "\\-".join(("ags\\-fast", *below.words)) in page
        if not node.nodes:
            found = re.findall(r"^\.SH (.*)$", page, re.MULTILINE)
            assert [title for title in SECTIONS if title != "OPERANDS" or title in found] == found


def test_pages_are_roff(folder: Path) -> None:
    for page in folder.iterdir():
        for line in page.read_text().splitlines():
            assert line[:1] not in {".", "'"} or line.split()[0] in MACROS, (page.name, line)
            assert "`" not in line, (page.name, line)
    man, page = shutil.which("man"), folder / "ags-fast-keys-rotate.1"
    if man:
        done = subprocess.run([man, "--warnings", "-l", page], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        assert "kek, the default: replace the KEKs" in " ".join(done.stdout.split())


def test_exit_codes_are_those_of_the_documentation() -> None:
    text = (Path(__file__).parents[1] / "docs" / "commands.md").read_text()
    table = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)
    assert {code: f"{said[0].upper()}{said[1:]}." for code, said in table} == CODES
