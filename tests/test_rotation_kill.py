"""kill -9 at each step of a rotation or an expiry, and at random moments: every version that is there can be read, the
same call finishes what was begun, and nothing is left of it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from datasets import MASTER, make_kms
from support import program, run_python

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pyarrow")
from programs import kills  # needs pyarrow

FEW = ("mek", "move")  # change the key store, and write no plan
OPS = ["single", "kek", "mek", "move", "double-wrap", "expire", "force", "forced"]


def stepped(folder: Path, op: str, first: int, stride: int) -> tuple[int, int]:
    """How many steps a job was killed before, and a number above that of all its steps."""
    kms, there = make_kms(folder, keys=(MASTER, "other")), make_kms(folder, name="there", keys=("third",))
    out = run_python(program(kills.kill_rotation_at_steps, folder, kms, there, op, first, stride), timeout=280)
    killed, steps = map(int, out.split())
    return killed, steps


@pytest.mark.more
@pytest.mark.parametrize("op", OPS)
@pytest.mark.timeout(300)
def test_some_steps(tmp_path: Path, op: str) -> None:
    killed, _ = stepped(tmp_path, op, OPS.index(op), 4 if op in FEW else 13)
    assert killed >= 1


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.timeout(300)
def test_every_step(tmp_path: Path, op: str) -> None:
    killed, steps = stepped(tmp_path, op, 0, 1)
    assert killed == steps > (4 if op in FEW else 20)


@pytest.mark.parametrize("wanted", [pytest.param(5, id="quick"), pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_random_moments(tmp_path: Path, wanted: int) -> None:
    kms, there = (make_kms(tmp_path, name=name, keys=(MASTER, "other")) for name in ("kms", "there"))
    seed = random.SystemRandom().randrange(1 << 30)
    out = run_python(program(kills.kill_rotations_at_random, tmp_path, kms, there, wanted, seed), timeout=880)
    assert int(out) >= wanted
