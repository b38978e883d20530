"""The C programs of tests/csrc, as `tests/csrc/run.sh` builds and runs them. What each guards, its first lines say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "tests" / "csrc" / "run.sh"

if sys.platform != "linux":
    pytest.skip("the C tests use Linux's memfd and linker", allow_module_level=True)
if not (ROOT / "csrc").is_dir():
    pytest.skip("no source tree here: an installed package is tested", allow_module_level=True)
for tool in ("bash", os.environ.get("CC", "cc").split()[0]):
    if not shutil.which(tool):
        pytest.skip(f"no {tool} here", allow_module_level=True)


def run(*modes: str) -> None:
    environ = {**os.environ, "PYTHON": sys.executable}
    result = subprocess.run(
        ["bash", str(RUN), *modes], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert result.returncode == 0, f"run.sh {' '.join(modes)}:\n{result.stdout}"


@pytest.mark.more
@pytest.mark.timeout(1200)  # a program that hangs ends itself after ten minutes
def test_programs() -> None:
    run("plain")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sizes_over_2_gib() -> None:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if available < 4 << 30:
        pytest.skip(f"needs 4 GiB of free memory, there are {available >> 20} MiB")
    run("large")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fuzz() -> None:
    if not shutil.which("clang"):
        pytest.skip("no clang here")
    run("fuzz", "300")
