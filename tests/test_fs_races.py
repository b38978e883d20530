"""Folders that become links while a store is used: nothing outside of it is written, read or deleted."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from programs import races
from support import program, run_python, start_python

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("openat2", ["1", pytest.param("0", marks=pytest.mark.more)])
def test_a_folder_that_becomes_a_link_at_any_step(tmp_path: Path, openat2: str) -> None:
    steps, _, wrong = run_python(
        program(races.exchange_at_every_step, tmp_path / "base"), AGS_FAST_OPENAT2=openat2
    ).partition(" ")
    assert wrong == "[]\n"
    assert int(steps) > 150


def test_jobs_in_a_loop_of_renames(tmp_path: Path) -> None:
    """Somebody who may write to a folder turns one below it into a link out of it and back, as fast as can be."""
    outside = tmp_path / "outside"
    (outside / "e").mkdir(parents=True)
    (tmp_path / "out/d/e").mkdir(parents=True)
    (tmp_path / "out/inner").symlink_to("d/e")
    for n in range(8, 12):
        (outside / "e" / str(n)).write_bytes(b"precious")
    renames = start_python(program(races.exchange_for_ever, tmp_path / "out/d", outside))
    try:
        assert renames.stdout is not None
        if renames.stdout.readline() != "0\n":
            pytest.skip("needs renameat2")
        done = run_python(program(races.run_jobs, tmp_path))
    finally:
        renames.send_signal(signal.SIGKILL)
        renames.communicate()
    assert int(done.split()[-1]) > 0
    assert sorted(os.listdir(outside / "e"), key=int) == ["8", "9", "10", "11"]
    assert {path.read_bytes() for path in (outside / "e").iterdir()} == {b"precious"}


def test_what_is_secret_is_never_seen_by_others(tmp_path: Path) -> None:
    """Not for a moment, and not under a temporary name."""
    (tmp_path / "base").mkdir()
    printed = run_python(program(races.show_modes, tmp_path / "base")).splitlines()
    assert printed[-5:] == [
        "key 0o600",
        "keystore 0o600",
        "private 0o600",
        "shared 0o600 0o640",
        "narrow 0o400 0o600",
    ]
