"""`-` on the command line: standard input and standard output, in real pipes and on terminals."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shlex
import signal
import stat
import struct
import subprocess
import sys
import tarfile
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, make_kms, read_tree, write_tree
from support import flip, pattern, python_env, seal_stream

from ags_fast import AgsReader, cli, encrypted_length
from ags_fast.cli import stream

pq = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMAND = [sys.executable, "-P", "-m", "ags_fast"]
KEY = bytes(range(32))
KEYED = ("--data-key-file", "key")
BLOCK = 1 << 16
PLAIN = pattern(BLOCK * 200 + 1000)  # in chunks of 128 blocks: the second one is short, as its last block is


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("key").write_text(KEY.hex() + "\n")
    Path("key").chmod(0o600)
    return tmp_path


def run(*words: object, data: bytes = b"", code: int = 0) -> tuple[bytes, str]:
    """What a command writes to standard output and to standard error; `data` comes to it through a pipe."""
    done = subprocess.run([*COMMAND, *map(str, words)], input=data, capture_output=True, env=python_env(), timeout=60)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr.decode()


def shell(script: str) -> None:
    line = script.replace("ags-fast", shlex.join(COMMAND))
    subprocess.run(["bash", "-o", "pipefail", "-e", "-c", line], env=python_env(), timeout=60, check=True)


def on_terminal(*words: str, which: Sequence[str]) -> tuple[int, str]:
    """Run a command whose standard input, or output, is a terminal."""
    master, slave = os.openpty()
    ends: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, **dict.fromkeys(which, slave)}
    done = subprocess.run([*COMMAND, *words], **ends, stderr=subprocess.PIPE, env=python_env(), timeout=60)
    os.close(slave)
    os.close(master)
    return done.returncode, done.stderr.decode()


def wait_until_it_reads(child: subprocess.Popen[bytes]) -> None:
    """Wait until a command has taken all that is in the pipe, and sleeps."""
    assert child.stdin is not None
    while True:
        (left,) = struct.unpack("i", fcntl.ioctl(child.stdin, termios.FIONREAD, bytes(4)))
        if not left and Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S":
            return
        assert child.poll() is None
        time.sleep(0.001)


def sealed(plain: bytes = PLAIN) -> bytes:
    return seal_stream(plain, KEY, block_size=BLOCK)


# -------------------------------------------------------------------------------------------------------------- streams


def test_tar_through_encrypt_and_decrypt(here: Path) -> None:
    files = {"a": b"one", "b/c": pattern(3_000_000)}
    write_tree(here / "src", files)
    shell("ags-fast stream keygen data.key --quiet")
    shell(
        "tar c -C src . | ags-fast stream encrypt - --data-key-file data.key --length-file length | cat > src.ags;"
        "cat src.ags | ags-fast stream verify - --data-key-file data.key --length-file length;"
        "mkdir back; cat src.ags | ags-fast stream decrypt - --data-key-file data.key --length-file length"
        " | tar x -C back"
    )
    assert read_tree(here / "back") == files
    assert int((here / "length").read_text()) == os.path.getsize("src.ags")


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, len(PLAIN)])
def test_round_trip(here: Path, size: int) -> None:
    plain = PLAIN[:size]
    data, said = run("stream", "encrypt", "-", *KEYED, "--block-size", "64K", data=plain)
    length = encrypted_length(size, BLOCK)
    assert len(data) == length
    assert f"file length   {length}" in said
    with AgsReader(data, KEY, length=length) as reader:
        assert reader.read() == plain
    for trusted in (("--length", length), ("--untrusted-length",)):
        back, said = run("stream", "decrypt", "-", *KEYED, *trusted, "--json", data=data)
        assert back == plain
        assert json.loads(said)["plain_length"] == size  # the result is not among the bytes
        run("stream", "verify", "-", *KEYED, *trusted, data=data)
    shown, _ = run("stream", "inspect", "-", "--json", data=data)
    assert (json.loads(shown)["file_length"], json.loads(shown)["plain_length"]) == (length, size)
    assert os.listdir() == ["key"]


def test_files_and_standard_streams(here: Path) -> None:
    """One end may be a file: a redirected one gives its mode, a pipe 0600."""
    Path("plain").write_bytes(PLAIN)
    os.chmod("plain", 0o640)
    data, _ = run("stream", "encrypt", "plain", *KEYED, "-o", "-")
    with open("plain", "rb") as file:
        subprocess.run(
            [*COMMAND, "stream", "encrypt", "-", *KEYED, "-o", "a"], stdin=file, env=python_env(), check=True
        )
    run("stream", "decrypt", "-", *KEYED, "--untrusted-length", "-o", "b", data=data)
    assert [stat.S_IMODE(os.stat(name).st_mode) for name in ("a", "b")] == [0o640, 0o600]
    assert run("stream", "decrypt", "a", *KEYED, "--untrusted-length", "-o", "-")[0] == PLAIN
    assert Path("b").read_bytes() == PLAIN
    assert set(os.listdir()) == {"a", "b", "key", "plain"}


@pytest.mark.parametrize("damage", ["flip", "cut", "behind", "another key", "no stream"])
def test_only_authenticated_blocks_come_out(here: Path, damage: str) -> None:
    """Exit 3, and before it whole blocks, of which each has passed."""
    data = sealed()
    length, chunk = len(data), stream.CHUNK_NBYTES
    if damage == "flip":
        data = flip(data, 8 * (chunk + chunk // 2))
    elif damage == "cut":
        data = data[: chunk + chunk // 2]
    elif damage == "behind":
        data += b"x"
    elif damage == "another key":
        Path("key").write_text(bytes(32).hex() + "\n")
    else:
        data = PLAIN
    out, said = run(
        *("stream", "decrypt", "-", *KEYED, "--length", length, "--json"),
        data=data,
        code=0 if damage == "behind" else 3,
    )
    assert out == {"flip": PLAIN[:chunk], "cut": PLAIN[:chunk], "behind": PLAIN}.get(damage, b"")
    told = json.loads(said.splitlines()[0])
    assert told.get("error_class") == {"behind": None, "no stream": "FormatError"}.get(damage, "IntegrityError")
    run("stream", "verify", "-", *KEYED, "--length", length, data=data, code=3)


def test_plaintext_is_not_spooled(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no stream ends the command before it is written to a temporary file."""
    monkeypatch.setenv("TMPDIR", str(here / "tmp"))
    (here / "tmp").mkdir()
    read, write = os.pipe()
    command = [*COMMAND, "stream", "decrypt", "-", *KEYED, "--untrusted-length"]
    child = subprocess.Popen(command, stdin=read, env=python_env(), stderr=subprocess.PIPE)
    os.close(read)
    os.write(write, b"plaintext, and the pipe stays open")
    assert child.wait(60) == 3
    os.close(write)
    assert child.stderr is not None
    assert b"not an AGS1 stream" in child.stderr.read()
    child.stderr.close()


def test_length_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        try:
            ended: object = cli.main(["stream", *words])
        except SystemExit as end:
            ended = end.code
        assert ended == code
        return "".join(capsys.readouterr())

    Path("plain").write_bytes(PLAIN)
    trusted = ("--length-file", "length")
    said("encrypt", "plain", *KEYED, *trusted)
    assert Path("length").read_text() == f"{os.path.getsize('plain.ags')}\n"
    assert json.loads(said("inspect", "plain.ags", *trusted, "--json"))["bytes_behind"] == 0
    with open("plain.ags", "ab") as file:
        file.write(b"behind")
    assert json.loads(said("inspect", "plain.ags", *trusted, "--json"))["bytes_behind"] == 6
    said("decrypt", "plain.ags", *KEYED, *trusted, "-o", "back")
    assert Path("back").read_bytes() == PLAIN
    said("verify", "plain.ags", *KEYED, *trusted, code=3)
    assert "--overwrite" in said("encrypt", "plain", *KEYED, *trusted, "-o", "new", code=2)
    assert not os.path.exists("new")
    Path("empty").touch()
    said("encrypt", "empty", *KEYED, *trusted, "--overwrite")
    assert Path("length").read_text() == f"{encrypted_length(0)}\n"
    for text in ("", "-1", "36 37", "0x24"):
        Path("length").write_text(text)
        assert "has no length" in said("verify", "plain.ags", *KEYED, *trusted, code=2)
    assert "absent" in said("verify", "plain.ags", *KEYED, "--length-file", "absent", code=5)
    for words in (["encrypt", "plain", *KEYED], ["decrypt", "plain.ags", *KEYED], ["inspect", "plain.ags"]):
        assert "name a file" in said(*words, "--length-file", "-", code=2)


def test_keygen(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys that differ, in files of their own, which --data-key-file takes without --key-format."""
    Path("plain").write_bytes(b"plain")
    keys = set()
    for bits, name in ((None, "a"), (128, "b"), (192, "c"), (256, "d")):
        make = ["stream", "keygen", name, *(() if bits is None else ("--bits", str(bits)))]
        assert cli.main([*make, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["bits"] == (bits or 128)
        text = Path(name).read_text()
        assert text.endswith("\n")
        assert len(bytes.fromhex(text)) * 8 == (bits or 128)
        assert stat.S_IMODE(os.stat(name).st_mode) == 0o600
        assert cli.main(["stream", "encrypt", "plain", "--data-key-file", name, "-o", "sealed", "--overwrite"]) == 0
        with AgsReader("sealed", bytes.fromhex(text), length=None) as reader:
            assert reader.read() == b"plain"
        assert cli.main(make) == 2
        shown = capsys.readouterr()
        assert "exists" in shown.err
        assert text.strip() not in shown.out + shown.err
        assert Path(name).read_text() == text
        keys.add(text)
    assert cli.main(["stream", "keygen", "-"]) == 0
    printed = capsys.readouterr().out
    assert len(printed) == 33
    assert len(keys | {printed}) == 5
    assert not os.path.exists("-")


def test_a_file_named_minus(here: Path) -> None:
    """It is neither read nor made; `./-` names it."""
    Path("-").write_bytes(b"in the file")
    os.chmod("-", 0o644)
    data, _ = run("stream", "encrypt", "-", *KEYED, data=b"in the pipe")
    assert run("stream", "decrypt", "-", *KEYED, "--length", len(data), data=data)[0] == b"in the pipe"
    data, _ = run("stream", "encrypt", "./-", *KEYED, "-o", "-")
    assert run("stream", "decrypt", "-", *KEYED, "--length", len(data), data=data)[0] == b"in the file"
    for option in ("--data-key-file", "--footer-key-file"):
        group = "stream" if option == "--data-key-file" else "parquet"
        assert "not read from standard input" in run(group, "encrypt", "key", option, "-", "-o", "-", code=2)[1]
    assert set(os.listdir()) == {"-", "key"}


# -------------------------------------------------------------------------------------------------------------- Parquet


def test_parquet(here: Path) -> None:
    pq.write_table(pa.table({"x": list(range(1000)), "y": ["text"] * 1000}), "plain")
    plain, keyed = Path("plain").read_bytes(), ("--footer-key-file", "key")
    data, said = run("parquet", "encrypt", "-", *keyed, data=plain)
    assert "footer" in said
    assert "encrypted" in run("parquet", "inspect", "-", data=data)[0].decode()
    run("parquet", "verify", "-", *keyed, data=data)
    back, said = run("parquet", "decrypt", "-", *keyed, "--json", data=data)
    assert json.loads(said)["row_groups"] == 1
    assert pq.read_table(io.BytesIO(back)).equals(pq.read_table("plain"))
    run("stream", "keygen", "new")
    other, _ = run("parquet", "reencrypt", "-", *keyed, "--new-footer-key-file", "new", "-o", "-", data=data)
    run("parquet", "verify", "-", "--footer-key-file", "new", data=other)
    run("parquet", "encrypt", "-", *keyed, "-o", "file", data=plain)
    assert run("parquet", "decrypt", "file", *keyed, "-o", "-")[0] == back
    assert set(os.listdir()) == {"file", "key", "new", "plain"}


def test_parquet_comes_out_whole_or_not_at_all(here: Path) -> None:
    """A bad tag at the end of the file, and nothing of what has passed before it."""
    pq.write_table(pa.table({"x": pa.array([pattern(1 << 20)] * 3, pa.binary())}), "plain", row_group_size=1)
    data, _ = run("parquet", "encrypt", "plain", "--footer-key-file", "key", "-o", "-")
    for operation in ("decrypt", "reencrypt"):
        new = ("--new-footer-key-file", "key", "-o", "-") if operation == "reencrypt" else ()
        bad = flip(data, 8 * (5 * len(data) // 6))
        out, said = run("parquet", operation, "-", "--footer-key-file", "key", *new, data=bad, code=3)
        assert out == b""
        assert "row group 2" in said


# ------------------------------------------------------------------------------------------------------------------- cp


@pytest.fixture
def kms(here: Path) -> list[str]:
    """The options of a KMS, and the dataset `ds`."""
    properties = make_kms(here)
    options = [f"--kms={name}={value}" for name, value in properties.items()]
    write_tree(here / "src", {"2026/01.csv": b"jan", "2026/02.csv": b"feb", "2026/old/03.csv": b"mar", "top": b"top"})
    assert cli.main(["encrypt", "src", "ds", "--wrapping-key-id", MASTER, "--quiet", *options]) == 0
    return options


def test_cp_and_cat(here: Path, kms: list[str]) -> None:
    shown, _ = run("cp", "-", "ds:2026/pipe.csv", "--json", *kms, data=PLAIN)
    assert json.loads(shown)["files"] == [{"src": "-", "dst": "2026/pipe.csv", "plain_bytes": len(PLAIN)}]
    out, said = run("cp", "ds:2026/pipe.csv", "-", "--json", *kms)
    assert out == PLAIN == run("cat", "ds:2026/pipe.csv", *kms)[0]
    assert json.loads(said)["files"] == [{"src": "2026/pipe.csv", "dst": "-", "plain_bytes": len(PLAIN)}]
    assert "overwrite" in run("cp", "-", "ds:2026/pipe.csv", *kms, data=b"new", code=2)[1]
    assert "several files" in run("cp", "-r", "ds:2026", "-", *kms, code=5)[1]
    code, said = on_terminal("cp", "ds:top", "-", *kms, which=["stdout"])
    assert code == 0, said
    assert not os.path.exists("-")


# --------------------------------------------------------------------------------------------- terminals, ends, signals


@pytest.mark.parametrize("group", ["stream", "parquet"])
def test_a_terminal_is_refused(here: Path, group: str) -> None:
    keyed = KEYED if group == "stream" else ("--footer-key-file", "key")
    length = ("--untrusted-length",) if group == "stream" else ()
    for words in (("encrypt", "key", *keyed, "-o", "-"), ("decrypt", "key", *keyed, *length, "-o", "-")):
        if group == "stream" and words[0] == "decrypt":
            Path("stream").write_bytes(sealed())
            words = ("decrypt", "stream", *words[2:])
        code, said = on_terminal(group, *words, which=["stdout"])
        assert code == 2, said
        assert "-o FILE" in said
    for words in (("encrypt", "-", *keyed), ("decrypt", "-", *keyed, *length), ("verify", "-", *keyed, *length)):
        code, said = on_terminal(group, *words, which=["stdin"])
        assert code == 2, said
        assert "standard input is a terminal" in said


@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [(">&-", 5, "standard output"), (">/dev/full", 5, "No space"), ("<&-", 5, "standard input is closed")],
)
def test_streams_that_are_closed_or_full(here: Path, redirected: str, code: int, said: str) -> None:
    pq.write_table(pa.table({"x": [1]}), "plain")
    for words in (("stream", "encrypt", "-", *KEYED), ("parquet", "encrypt", "-", "--footer-key-file", "key")):
        line = f"exec {shlex.join([*COMMAND, *words])} <plain {redirected}"
        done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, env=python_env(), timeout=60)
        assert done.returncode == code, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("encrypt", "-"), ("decrypt", "stream", "-o", "-", "--untrusted-length")])
def test_a_reader_that_has_seen_enough(here: Path, words: tuple[str, ...]) -> None:
    Path("plain").write_bytes(PLAIN)
    Path("stream").write_bytes(sealed())
    with open("plain", "rb") as file:
        child = subprocess.Popen(
            [*COMMAND, "stream", *words, *KEYED],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=python_env(),
        )
    assert child.stdout is not None
    assert child.stderr is not None
    assert len(child.stdout.read(10)) == 10
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(60) == 0
    child.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "words",
    [
        ("stream", "encrypt", "-", *KEYED, "-o", "out", "--length-file", "length"),
        ("stream", "decrypt", "-", *KEYED, "--length", str(len(sealed(PLAIN))), "-o", "out"),
        ("stream", "decrypt", "-", *KEYED, "--untrusted-length", "-o", "out"),
        ("parquet", "encrypt", "-", "--footer-key-file", "key", "-o", "out"),
        ("cp", "-", "ds:new"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_ctrl_c_while_a_pipe_is_read(here: Path, kms: list[str], words: tuple[str, ...], number: int) -> None:
    """The command waits for the rest of its input. What it has half-written goes."""
    before = set(os.listdir())
    data = sealed() if "decrypt" in words else PLAIN
    more = kms if words[0] == "cp" else []
    child = subprocess.Popen([*COMMAND, *words, *more], stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=python_env())
    assert child.stdin is not None
    assert child.stderr is not None
    child.stdin.write(data[: len(data) * 3 // 4])
    child.stdin.flush()
    wait_until_it_reads(child)
    child.send_signal(number)
    said = child.stderr.read().decode()
    assert child.wait(60) == 128 + number, said
    assert "interrupted" in said
    assert "Traceback" not in said
    child.stderr.close()
    child.stdin.close()
    assert set(os.listdir()) == before
    if words[0] == "cp":
        run("ls", "ds", "new", *kms, code=5)
        run("verify", "ds", *kms)


def test_tar_file_is_whole(here: Path) -> None:
    """What comes out is what tar has made, to the last byte of its padding."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        tar.add("key")
    data, _ = run("stream", "encrypt", "-", *KEYED, data=made.getvalue())
    assert run("stream", "decrypt", "-", *KEYED, "--untrusted-length", data=data)[0] == made.getvalue()
