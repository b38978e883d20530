"""How far a job is: lines where standard error is not a terminal, a bar where it is one."""

from __future__ import annotations

import io
import re
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, write_tree
from kms_clients import keystore
from support import pattern
from tqdm import tqdm

from ags_fast.jobs import LocalEngine, decrypt_files, encrypt_files, rekey_files, run, verify_files
from ags_fast.jobs.bars import LINE_SECONDS, Hidden, Lines, make_bar

if TYPE_CHECKING:
    from pathlib import Path


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
    form = r"verify: 1,234 of 2,000 files, 1\.50 GB of 4\.00 GB, \S+ .?B/s, \d+:\d\d left"
    assert re.fullmatch(form, shown[0])
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


def test_a_bar_counts_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    with make_bar("verify", 10, True, files=2_000) as bar:
        bar.update(4, files=1_234)
    assert "1,234/2,000 files" in shown.getvalue()


class Recorder(Hidden):
    """Keeps what it is told: bytes and files."""

    def __init__(self, desc: str, total: int, *args: object, **options: object) -> None:
        self.total, self.seen = total, list[tuple[int, int]]()

    def update(self, n: int = 1, files: int = 0) -> None:
        self.n += n
        self.seen.append((n, files))


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Collect the bars of jobs."""
    bars: list[Recorder] = []

    def make(*args: Any, **options: Any) -> Recorder:
        bars.append(Recorder(*args, **options))
        return bars[-1]

    monkeypatch.setattr(run, "make_bar", make)
    return bars


@pytest.mark.parametrize("processes", [0, 1])
def test_a_large_file_moves_the_bar(processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = recorded(monkeypatch)
    src = write_tree(tmp_path / "src", {"large": pattern(20 << 20), "small": b"1", "sub/empty": b""})
    options: dict[str, Any] = {"kms": keystore(tmp_path, MASTER), "engine": LocalEngine(processes)}
    encrypt_files(src, tmp_path / "ds", wrapping_key_id=MASTER, verify_after=True, fsync=False, **options)
    rekey_files(tmp_path / "ds", fsync=False, **options)
    verify_files(tmp_path / "ds", **options)
    decrypt_files(tmp_path / "ds", tmp_path / "out", fsync=False, **options)
    assert len(bars) == 4
    for bar in bars:
        assert bar.n == bar.total == (20 << 20) + 1
        assert sum(files for _, files in bar.seen) == 3
        assert all(n >= 0 for n, _ in bar.seen)
        if not processes:  # a worker process tells of parts ten times a second
            assert sum(0 < n < 20 << 20 for n, files in bar.seen if not files) > 3


def test_a_file_that_fails_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = recorded(monkeypatch)
    src = write_tree(tmp_path / "src", {"bad": pattern(20 << 20), "good": pattern(3 << 20)})
    options: dict[str, Any] = {"kms": keystore(tmp_path, MASTER), "engine": LocalEngine(0)}
    encrypt_files(src, tmp_path / "ds", wrapping_key_id=MASTER, fsync=False, **options)
    with open(next((tmp_path / "ds").glob("bad.*")), "r+b") as file:
        file.seek(10 << 20)
        file.write(bytes(100))
    assert len(verify_files(tmp_path / "ds", **options).failed) == 1
    assert bars[-1].n == bars[-1].total == 23 << 20


def test_no_bar_without_a_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with make_bar("verify", 10, None) as bar:
        bar.update(4, files=1)
