"""How far a job is: lines where standard error is not a terminal, a bar where it is one."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest
from tqdm import tqdm

from ags_fast.jobs.bars import LINE_SECONDS, Hidden, Lines, make_bar


def lines_of(capsys: pytest.CaptureFixture[str], count: int) -> list[str]:
    """Wait until `count` lines are there."""
    until, text = time.monotonic() + 20, ""
    while text.count("\n") < count and time.monotonic() < until:
        time.sleep(0.005)
        text += capsys.readouterr().err
    return text.splitlines()


def test_lines_tell_files_bytes_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with Lines("verify", 4_000_000_000, 2_000, seconds=0.01) as lines:
        lines.update(1_500_000_000, files=1_234)
        shown = lines_of(capsys, 2)  # also while nothing is counted
    pattern = r"verify: 1,234 of 2,000 files, 1\.50 GB of 4\.00 GB, \S+ .?B/s, \d+:\d\d left"
    assert re.fullmatch(pattern, shown[0])
    assert len(shown) >= 2


def test_lines_of_other_things(capsys: pytest.CaptureFixture[str]) -> None:
    with Lines("rotate kek", 10, unit=" keys", seconds=0.01) as lines:
        assert re.fullmatch(r"rotate kek: 0 keys of 10 keys, 0 keys/s", lines_of(capsys, 1)[0])
        lines.update(10)
        assert lines.text().startswith("rotate kek: 10 keys of 10 keys, ")
        assert "left" not in lines.text()


def test_no_line_after_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with Lines("verify", 10, seconds=0.02):
        pass
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_job_without_a_terminal_has_lines_if_it_is_told_to() -> None:
    with make_bar("verify", 10, "lines") as shown:
        assert isinstance(shown, Lines)
    assert LINE_SECONDS == 30
    for progress in (None, False, print):
        with make_bar("verify", 10, progress) as shown:
            assert isinstance(shown, Hidden)
    with make_bar("verify", 10, True) as shown:
        assert isinstance(shown, tqdm)


@pytest.mark.parametrize("progress", [None, "lines", True])
def test_a_terminal_has_a_bar(progress: object, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", shown)
    with make_bar("verify", 10, progress) as bar:
        bar.update(4, files=1)
    assert re.search(r"verify:.*4\.00/10\.0", shown.getvalue())


def test_no_bar_without_a_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with make_bar("verify", 10, None) as bar:
        bar.update(4, files=1)
