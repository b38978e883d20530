"""kill -9 at each step of a job, and at random moments: the dataset opens at the old version or at the new one, every
file of it decrypts to its source, and whoever takes up the job finishes it and leaves nothing behind."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from datasets import make_kms
from support import program, run_python

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pyarrow")
from programs import kills  # needs pyarrow


@pytest.mark.more
@pytest.mark.parametrize("op", ["create", "encrypt", "rekey"])
@pytest.mark.timeout(300)
def test_every_step(tmp_path: Path, op: str) -> None:
    steps = run_python(program(kills.kill_job_at_steps, tmp_path, op, make_kms(tmp_path)), timeout=280)
    assert int(steps) > 20


@pytest.mark.more
@pytest.mark.parametrize("rounds", [pytest.param(8, id="quick"), pytest.param(200, id="200", marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_random_moments(tmp_path: Path, rounds: int) -> None:
    kms, seed = make_kms(tmp_path), random.SystemRandom().randrange(1 << 32)
    killed = run_python(program(kills.kill_jobs_at_random, tmp_path, kms, rounds, seed), timeout=1780)
    assert int(killed) >= rounds // 4
    assert not list(tmp_path.glob("*.agstmp"))
