"""What the commands do to a terminal: names of files do not steer it, and Ctrl-C is one line."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import random
import signal
import subprocess
import sys
import termios
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from datasets import MASTER, make_kms, write_tree
from programs import commands
from spark_jobs import local_connect
from support import pattern, program, python_env

pytest.importorskip("pyarrow")

from ags_fast import cli
from ags_fast.cli import stream, terminal
from ags_fast.cli.terminal import escaped, printable

if TYPE_CHECKING:
    from collections.abc import Callable

# What a folder of data may have in it: colours and titles, bytes that are not UTF-8, ends of lines, turned directions.
pytestmark = pytest.mark.usefixtures("without_workers")

NAMES = {
    b"\x1b[31mred": "\\x1b[31mred",
    b"title\x1b]0;pwned\x07": "title\\x1b]0;pwned\\x07",
    b"not utf-8 \xff\xfe": "not utf-8 \\xff\\xfe",
    b"two\nlines  9,999  forged": "two\\nlines  9,999  forged",
    b"c1\xc2\x9b31m": "c1\\x9b31m",
    "right\u202eleft".encode(): "right\\u202eleft",
    "line\u2028end\r\b".encode(): "line\\u2028end\\r\\x08",
    "plain ünïcode 日本 \\x1b".encode(): "plain ünïcode 日本 \\x1b",
}
COMMAND = ("-P", commands.__file__)


class Terminal:
    """The command `ags-fast`, as the only one in a terminal."""

    def __init__(self, folder: Path, *arguments: str, python: tuple[str, ...] = COMMAND) -> None:
        self.master, slave = os.openpty()
        settings = termios.tcgetattr(slave)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        self.process = subprocess.Popen(
            [sys.executable, *python, *arguments],
            cwd=folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env=python_env(TERM="xterm"),
        )
        os.close(slave)
        self.output = b""

    def wait_ready(self) -> None:
        while b"ready" not in self.output:
            assert self._read(), self.output

    def press_ctrl_c(self) -> None:
        os.write(self.master, b"\x03")

    def wait(self) -> int:
        """The exit code, of which nothing is left running in the terminal."""
        while self._read():
            pass
        code = self.process.wait(timeout=30)
        os.close(self.master)
        until = time.monotonic() + 10
        while True:
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return code
            assert time.monotonic() < until, "a worker lives on"
            time.sleep(0.01)

    def _read(self) -> bool:
        try:
            more = os.read(self.master, 1 << 16)
        except OSError:  # the other side is closed
            return False
        self.output += more
        return bool(more)


@pytest.fixture
def kms(tmp_path: Path) -> list[str]:
    return [word for name, value in make_kms(tmp_path).items() for word in ("--kms", f"{name}={value}")]


# ----------------------------------------------------------------------------------------------------------- names


def test_printable() -> None:
    for name, shown in NAMES.items():
        assert printable(os.fsdecode(name)) == shown
    assert printable("\ud800") == "\\ud800"
    assert escaped({"\x1b": ["\x1b", ("\n", 1, None, {"a": "\x7f"})]}) == {
        "\\x1b": ["\\x1b", ["\\n", 1, None, {"a": "\\x7f"}]]
    }


@pytest.fixture
def odd(tmp_path: Path, kms: list[str], capsys: pytest.CaptureFixture[str]) -> Path:
    """A dataset of files with such names, in a folder with one."""
    folder = tmp_path / "\x1b[2Jfolder"
    (folder / "src").mkdir(parents=True)
    for i, name in enumerate(NAMES):
        Path(os.fsdecode(os.fsencode(folder / "src") + b"/" + name)).write_bytes(bytes(i))
    assert cli.main(["encrypt", f"{folder}/src", f"{folder}/ds", "--wrapping-key-id", MASTER, "--quiet", *kms]) == 0
    capsys.readouterr()
    return folder


def check_lines(output: bytes) -> str:
    """Nothing steers the terminal: what it gets is text and ends of lines."""
    text = output.decode().replace("\r\n", "\n")
    assert all(char.isprintable() or char == "\n" for char in text), text
    return text


def test_names_in_a_terminal(odd: Path, kms: list[str]) -> None:
    terminal = Terminal(odd, "ls", "ds", *kms)
    assert terminal.wait() == 0
    lines = check_lines(terminal.output).splitlines()
    for shown in NAMES.values():
        assert sum(line.endswith(f"  {shown}") for line in lines) == 1
    terminal = Terminal(odd, "encrypt", "src", "ds", "--wrapping-key-id", MASTER, *kms)
    assert terminal.wait() == 0
    assert "8 Unchanged" in check_lines(terminal.output)
    name = os.fsdecode(min(NAMES))
    for arguments in (
        ["cat", "ds", f"{name}.no"],
        ["verify", f"{odd}/none"],
        ["decrypt", "ds", "out", "--nonsense", name],
    ):
        terminal = Terminal(odd, *arguments, *kms)
        assert terminal.wait() in (2, 5)
        assert "\\x1b[" in check_lines(terminal.output)


def test_names_in_rows_warnings_and_audits(odd: Path, kms: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """On standard output and standard error, whatever they are."""
    encoded = os.fsencode(odd / "ds")
    for name in list(NAMES)[:3]:
        (file,) = (odd / "ds").glob(f"{glob.escape(os.fsdecode(name))}.*.ags")
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    Path(os.fsdecode(encoded + b"/\x1b[5mextra\xff.ags")).touch()
    dataset = os.fsdecode(encoded)
    for command, code in (
        (["verify", dataset], 3),
        (["verify", dataset, "--path", "right*"], 0),
        (["decrypt", dataset, f"{odd}/\x1bout"], 3),
        (["inspect", dataset], 0),
        (["keys", "status", dataset], 0),
        (["keys", "audit", dataset], 0),
        (["keys", "rotate", dataset], 0),
        (["rekey", dataset, "--path", "two*"], 0),
        (["sweep", dataset], 0),
    ):
        quiet = ["--quiet"] if command[0] in ("verify", "decrypt", "rekey") or "rotate" in command else []
        assert cli.main([*command, *quiet, *kms]) == code
        out, err = capsys.readouterr()
        check_lines((out + err).encode())


def test_json_is_exact(odd: Path, kms: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", f"{odd}/ds", "--json", *kms]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    assert out[:-1].isprintable()
    assert {os.fsencode(file["path"]) for file in json.loads(out)["files"]} == {*NAMES}


def test_mistakes_of_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What nobody expects is told as it is, and steers no terminal either."""

    def run(args: object) -> dict[str, object]:
        raise RuntimeError("\x1b[31m no \x07")

    monkeypatch.setattr(stream, "open_regular", run)
    assert cli.main(["stream", "inspect", "x\x1b", "--json"]) == 1
    out, err = capsys.readouterr()
    check_lines((out + err).encode())
    assert "Traceback" in err
    assert "\\x1b[31m no \\x07" in err
    assert json.loads(out)["input"] == "x\x1b"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_outputs_of_other_encodings(odd: Path, kms: list[str], encoding: str) -> None:
    """What they lack is escaped, too, and ends no command."""
    command = [sys.executable, "-P", "-m", "ags_fast", "ls", "ds", *kms]
    done = subprocess.run(command, cwd=odd, env=python_env(PYTHONIOENCODING=encoding), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode(encoding).count("\\u65e5\\u672c") == 1


@pytest.mark.parametrize("command", ["ls", "cat"])
def test_readers_that_have_seen_enough(tmp_path: Path, kms: list[str], command: str) -> None:
    write_tree(tmp_path / "src", {"a": pattern(1 << 20), **{f"{n}" * 50: b"" for n in range(1000, 1600)}})
    assert cli.main(["encrypt", f"{tmp_path}/src", f"{tmp_path}/ds", "--wrapping-key-id", MASTER, "--quiet", *kms]) == 0
    arguments = ["ls", "ds"] if command == "ls" else ["cat", "ds", "a"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ags_fast", *arguments, *kms],
        cwd=tmp_path,
        env=python_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1
    process.stderr.close()


# ----------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Some seconds of work."""
    write_tree(tmp_path / "src", {f"{n}": pattern(200_000, n) for n in range(60)})
    with open(tmp_path / "src" / "large", "wb") as file:
        file.truncate(20 << 30)
    return tmp_path


def interrupt(
    folder: Path,
    after: float,
    *arguments: str,
    python: tuple[str, ...] = COMMAND,
    begun: Callable[[], bool] = lambda: True,
) -> None:
    """Press Ctrl-C `after` seconds after the command is ready and `begun` is true."""
    terminal = Terminal(folder, *arguments, python=python)
    if python == COMMAND:
        terminal.wait_ready()
    while not begun():
        assert terminal.process.poll() is None
        time.sleep(0.05)
    time.sleep(after)
    terminal.press_ctrl_c()
    code = terminal.wait()
    text = terminal.output.decode()
    lines = [line for line in text.replace("\r", "\n").splitlines() if line.startswith("ags-fast")]
    assert code == 130, (after, code, text)
    assert len(lines) == 1, (after, code, text)
    assert "interrupted" in lines[0], (after, code, text)
    for word in ("Traceback", "Exception", "Error", "File "):
        assert word not in text, (after, text)


def moments(count: int) -> list[float]:
    """From the first import to when workers are at it."""
    chosen = random.Random(16)
    return [0.001, *(round(1.5 * chosen.random() ** 2, 4) for _ in range(count - 1))]


@pytest.mark.parametrize("after", [0.001, 0.03, 0.25, 0.8])
def test_ctrl_c(tree: Path, kms: list[str], after: float) -> None:
    interrupt(tree, after, "encrypt", "src", "ds", "--wrapping-key-id", MASTER, *kms)


MOMENTS = moments(40)


@pytest.mark.parametrize(
    "after",
    [pytest.param(one, marks=pytest.mark.slow if n % 4 else pytest.mark.more) for n, one in enumerate(MOMENTS)],
)
def test_ctrl_c_at_any_moment(tree: Path, kms: list[str], after: float) -> None:
    interrupt(tree, after, "encrypt", "src", "ds", "--wrapping-key-id", MASTER, *kms)


SPARK = ("--engine", "spark", "--spark-master", "local[2]")


@pytest.mark.more
@pytest.mark.spark
@pytest.mark.parametrize(
    ("session", "after"), [("--spark-master", 0.0), ("--spark-master", 1.0), ("--spark-remote", 1.0)]
)
def test_ctrl_c_while_spark_works(
    tree: Path, kms: list[str], session: str, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")

    spark = ("--engine", "spark", session, "local[2]")

    def begun() -> bool:
        """Whether a task has written a file of data."""
        return any("_ags" not in path.parts for path in (tree / "ds").rglob("*.ags"))

    with local_connect() if session == "--spark-remote" else nullcontext():
        interrupt(tree, after, "encrypt", "src", "ds", "--wrapping-key-id", MASTER, *spark, *kms, begun=begun)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("after", [1.5, 7.0, 10.0, 12.0, 14.0])
def test_ctrl_c_at_any_moment_of_spark(
    tree: Path, kms: list[str], after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the JVM and its context start, when the launcher of PySpark may print what it was interrupted at."""
    pytest.importorskip("pyspark")
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    interrupt(tree, after, "encrypt", "src", "ds", "--wrapping-key-id", MASTER, *SPARK, *kms)


def test_ctrl_c_of_a_stream(tree: Path) -> None:
    (tree / "key").write_bytes(bytes(16))
    (tree / "key").chmod(0o600)
    interrupt(tree, 0.3, "stream", "encrypt", "src/large", "--key-file", "key")
    assert sorted(path.name for path in (tree / "src").iterdir() if "large" in path.name) == ["large"]


def test_ctrl_c_twice(tree: Path, kms: list[str]) -> None:
    """As some terminals and time limits send it: the second does not break what the first has begun."""
    terminal = Terminal(tree, "encrypt", "src", "ds", "--wrapping-key-id", MASTER, *kms)
    while not list(tree.glob("ds/*.agstmp")):
        time.sleep(0.01)
    terminal.press_ctrl_c()
    os.kill(terminal.process.pid, signal.SIGINT)
    assert terminal.wait() == 130
    assert b"Traceback" not in terminal.output
    assert terminal.output.count(b"ags-fast:") == 1
    assert list(tree.glob("ds/*.agstmp")) == []


@pytest.mark.parametrize("place", ["class", "destructor", "library"])
def test_ctrl_c_that_is_dropped(place: str) -> None:
    """Python raises nothing, or another error, in some places, and some code drops every exception."""
    command = [sys.executable, "-P", *program(commands.interrupt_in, place)]
    done = subprocess.run(command, env=python_env(), capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.startswith("ags-fast: ")
    assert done.stderr.count("\n") == 1
    assert "interrupted" in done.stderr


def test_ctrl_c_at_the_end() -> None:
    """Python gives signals their default back while it ends."""
    command = [sys.executable, "-P", *program(commands.interrupt_at_the_end)]
    done = subprocess.run(command, env=python_env(), capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ags_fast ")


def test_main_leaves_the_callers_signals_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a process that is not the command's own."""
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    assert cli.main(["stream", "inspect", str(tmp_path / "nothing")]) == 5
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before
    assert terminal.interrupts.installed is False
