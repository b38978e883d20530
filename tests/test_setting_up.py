"""What `make` says: which tools are missing, that long steps live, and what keeps a tour from showing more."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CI = ROOT / ".ci"
if not (CI / "tools").is_file():
    pytest.skip("needs the source tree", allow_module_level=True)

pytestmark = pytest.mark.more


def run(*command: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": sys.executable} | ({"PATH": str(path)} if path else {})
    env.pop("JAVA_HOME", None)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder of programs for PATH: a compiler, but no Java, no Maven and no apt-get."""
    for name in ("bash", "env", "cc", "gcc", "perl", "make", "as", "ld", "rm", "mktemp", "tail", "sed"):
        if found := shutil.which(name):
            (tmp_path / name).symlink_to(found)
    return tmp_path


def test_tools_are_named_in_one_go(bare: Path) -> None:
    done = run(CI / "tools", "python", "cc", "java", "--optional", "maven", path=bare)
    assert done.returncode == 1
    assert "apt-get install default-jre-headless maven" in done.stderr


def test_only_tests_need_an_optional_tool(bare: Path) -> None:
    done = run(CI / "tools", "python", "cc", "--optional", "maven", path=bare)
    assert (done.returncode, "maven" in done.stderr) == (0, True)
    assert "will be skipped" in done.stderr
    assert run(CI / "tools", "python", "cc", "maven", path=bare).returncode == 1


def test_a_step_shows_why_it_failed() -> None:
    good = run(CI / "step", "Counting (a second)", "echo", "one")
    assert re.fullmatch(r"Counting \(a second\)\n   Counting: done in \d s\n", good.stdout)
    bad = run(CI / "step", "Counting (a second)", "sh", "-c", "echo one two; exit 3")
    assert bad.returncode == 3
    assert re.fullmatch(r"Counting: failed after \d s\.\none two\n", bad.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_step_ends_with_all_that_it_started(tmp_path: Path, number: int) -> None:
    program = f"sleep 50 & echo $! >{tmp_path}/id; wait"
    with subprocess.Popen([CI / "step", "Waiting", "sh", "-c", program], stdout=subprocess.PIPE) as step:
        while not (tmp_path / "id").exists() or not (text := (tmp_path / "id").read_text()):
            time.sleep(0.01)
        step.send_signal(number)
        assert step.wait(10) == 128 + number
    deadline = time.monotonic() + 5
    while Path(f"/proc/{text.strip()}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(ProcessLookupError):
        os.kill(int(text), 0)


def test_a_busy_machine_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(ROOT)
    measure = pytest.importorskip("benchmarks.measure")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 9e3, 9e3))
    measure.warn_if_busy()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(os, "getloadavg", lambda: (9e3, 0.0, 0.0))
    measure.warn_if_busy()
    assert "9000.0, on" in capsys.readouterr().err


def test_a_job_that_is_over_before_a_kill_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    dataset = pytest.importorskip("benchmarks.tour.dataset")
    steps = pytest.importorskip("benchmarks.tour.steps").Steps()
    dataset.say_killed(steps, dataset.Killer(tmp_path).stop())
    assert not steps.failed
    assert "killed: nothing; the job was over" in capsys.readouterr().out
