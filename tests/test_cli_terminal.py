"""What the commands do to a terminal: names of files do not steer it, and Ctrl-C is one line."""

from __future__ import annotations

import ast
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
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from datasets import MASTER, make_kms, write_tree
from programs import commands
from spark_jobs import local_connect
from support import flip, pattern, program, python_env

pytest.importorskip("pyarrow")

from cli_tree import tree_of

from ags_fast import cli
from ags_fast.cli import stream, terminal
from ags_fast.cli.commands import SILENT
from ags_fast.cli.run import whole_parser
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
        settings[3] |= termios.NOFLSH  # or Linux drops what is on its way out when the terminal takes Ctrl-C
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
        ["decrypt", "ds", "out", name],
    ):
        terminal = Terminal(odd, *arguments, *kms)
        assert terminal.wait() in (2, 5)
        assert "\\x1b[" in check_lines(terminal.output)


def test_names_in_rows_warnings_and_audits(odd: Path, kms: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """On standard output and standard error, whatever they are."""
    encoded = os.fsencode(odd / "ds")
    for name in list(NAMES)[:3]:
        (file,) = (odd / "ds").glob(f"{glob.escape(os.fsdecode(name))}.*.ags")
        file.write_bytes(flip(file.read_bytes(), -1))
    Path(os.fsdecode(encoded + b"/\x1b[5mextra\xff.ags")).touch()
    dataset = os.fsdecode(encoded)
    for command, code in (
        (["verify", dataset], 3),
        (["verify", dataset, "--include", "right*"], 0),
        (["decrypt", dataset, f"{odd}/\x1bout"], 3),
        (["inspect", dataset], 0),
        (["keys", "status", dataset], 0),
        (["keys", "audit", dataset], 0),
        (["keys", "rotate", dataset], 0),
        (["rekey", dataset, "--include", "two*"], 0),
        (["sweep", dataset], 0),
    ):
        quiet = ["--quiet"] if command[0] in ("verify", "decrypt", "rekey") or "rotate" in command else []
        assert cli.main([*command, *quiet, *(kms if command[0] != "inspect" else [])]) == code
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
    assert process.wait() == 0
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
    interrupt(tree, 0.3, "stream", "encrypt", "src/large", "--data-key-file", "key")
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


# -------------------------------------------------------------------------------------------- SIGTERM and SIGHUP


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["stream decrypt", "cp", "decrypt"])
def test_other_signals(tmp_path: Path, kms: list[str], number: int, command: str) -> None:
    """Leave neither plaintext nor temporary files."""
    write_tree(tmp_path, {"src/large": b"", "key": bytes(16)})
    (tmp_path / "key").chmod(0o600)
    os.truncate(tmp_path / "src/large", 400_000_000)
    if command == "stream decrypt":
        assert cli.main(["stream", "encrypt", f"{tmp_path}/src/large", "--data-key-file", f"{tmp_path}/key"]) == 0
        words = [
            "stream",
            "decrypt",
            "src/large.ags",
            "--data-key-file",
            "key",
            "--untrusted-length",
            "-o",
            "out/large",
        ]
    else:
        src, dataset = f"{tmp_path}/src", f"{tmp_path}/ds"
        assert cli.main(["encrypt", src, dataset, "--wrapping-key-id", MASTER, "--quiet", *kms]) == 0
        words = ["cp", "ds:large", "out/large", *kms] if command == "cp" else ["decrypt", "ds", "out", *kms]
    (tmp_path / "out").mkdir()
    line = [sys.executable, "-P", "-m", "ags_fast", *words]
    process = subprocess.Popen(line, cwd=tmp_path, env=python_env(), stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("out/.large.*")):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number, said
    assert "interrupted" in said
    assert "Traceback" not in said
    assert os.listdir(tmp_path / "out") == []


def test_nohup(tmp_path: Path) -> None:
    """Who ignores SIGHUP is not interrupted by it. SIGTERM, and a second signal, still end the command."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "key").write_bytes(bytes(16))
    process = subprocess.Popen(
        [sys.executable, "-P", *COMMAND[1:], "stream", "encrypt", "pipe", "--data-key-file", "key", "-o", "out"],
        cwd=tmp_path,
        env=python_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    process.stdout.close()


# ------------------------------------------------------------------------------ standard output that takes nothing


def run_into(folder: Path, output: str, *words: str) -> subprocess.CompletedProcess[str]:
    line = ["sh", "-c", f'exec "$@" {output}', "sh", sys.executable, "-P", "-m", "ags_fast", *words]
    return subprocess.run(line, cwd=folder, env=python_env(), stderr=subprocess.PIPE, text=True, timeout=60)


@pytest.mark.parametrize("output", [">&-", ">/dev/full"])
def test_outputs_that_take_nothing(odd: Path, kms: list[str], output: str) -> None:
    done = run_into(odd, output, "decrypt", "ds", "out", *kms)
    assert (done.returncode, len(list((odd / "out").iterdir()))) == (0 if output == ">&-" else 5, len(NAMES))
    for words in (
        ["ls", "ds", *kms],
        ["cat", "ds", "c1\x9b31m", *kms],
        ["--version"],
        ["ls", "--help"],
        ["keys", "init", "k", "--key-file", "f"],
    ):
        done = run_into(odd, output, *words)
        assert done.returncode == (5 if words[0] != "keys" or output != ">&-" else 0), (words, done.stderr)
        assert "standard output" in done.stderr
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr


SHOWN = {
    "stream encrypt": "key -o k.ags --data-key-file key",
    "stream decrypt": "key.ags -o k.plain --data-key-file key --untrusted-length",
    "stream verify": "key.ags --data-key-file key --untrusted-length",
    "stream inspect": "key.ags",
    "keys status": "ds KMS",
    "keys audit": "ds KMS",
    "keys policy": "ds KMS",
    "ls": "ds -l KMS",
    "log": "ds KMS",
    "diff": "ds 1 KMS",
    "stat": "ds a KMS",
    "du": "ds KMS",
    "cat": "ds a KMS",
    "inspect": "ds",
    "decrypt": "ds OUT KMS",
    "config show": "",
    "config check": "--wrapping-key-id MASTER KMS",
    "completion": "bash",
}


def leaves() -> list[str]:
    return [
        " ".join(node.words) for node in tree_of(whole_parser()).all() if not node.nodes and node.words != ("help",)
    ]


@pytest.mark.parametrize("full", [True, False])
def test_each_command_says_that_its_output_is_lost(
    tmp_path: Path, kms: list[str], full: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help of all that the parser has, and results."""
    monkeypatch.chdir(write_tree(tmp_path, {"src/a": b"1", "key": bytes(16)}))
    (tmp_path / "key").chmod(0o600)
    assert cli.main(["encrypt", "src", "ds", "--wrapping-key-id", MASTER, *kms]) == 0
    assert cli.main(["stream", "encrypt", "key", "--data-key-file", "key"]) == 0
    assert SHOWN.keys() <= {*leaves()}
    for n, command in enumerate(leaves()):
        more = SHOWN.get(command, "--help").replace("KMS", " ".join(kms)).replace("MASTER", MASTER)
        for words in (["--help"], more.replace("OUT", f"out{n}").split()):
            for output in tmp_path.glob("k.*"):
                output.unlink()
            capsys.readouterr()
            with open("/dev/full" if full else os.devnull, "w") as file, monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", file if full else None)
                try:
                    code = cli.main([*command.split(), *words])
                except SystemExit as end:
                    code = end.code  # type: ignore[assignment]
                with suppress(OSError):
                    file.close()
            said = capsys.readouterr().err
            silent = command.split()[-1] in SILENT and not full and words != ["--help"]  # a job of a daemon
            assert code == (0 if silent else 5), (command, words, said)
            assert "standard output" in said
            assert "Traceback" not in said


def test_one_function_prints() -> None:
    """Another `print` would raise where standard output takes nothing."""
    found = {
        (path.name, ast.unparse(node.func))
        for path in Path(cli.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and not any(word.arg == "file" for word in node.keywords)
        and (ast.unparse(node.func) == "print" or ast.unparse(node.func).startswith("sys.stdout"))
    }
    assert found == {
        ("terminal.py", "print"),  # in `tell`
        ("run.py", "print"),  # the last flush
        ("run.py", "sys.stdout.fileno"),
        ("text.py", "sys.stdout.isatty"),
        ("files.py", "sys.stdout.isatty"),
        *(("files.py", f"sys.stdout.buffer.{name}") for name in ("write", "flush")),  # bytes
    }
