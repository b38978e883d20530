"""The ags-fast command, as a shell sees it: output, exit codes, and what it leaves behind."""

import base64
import json
import os
import pty
import resource
import signal
import stat
import subprocess
import sys
import termios
import time

import pytest

import ags_fast
from ags_fast import cli
from ags_fast.cli.codes import (
    EXIT_INTEGRITY,
    EXIT_INTERRUPTED,
    EXIT_KEY_ACCESS,
    EXIT_NOT_FOUND,
    EXIT_USAGE,
)

KEY = bytes(range(100, 132))
PLAIN = bytes(range(256)) * 700  # 179,200 bytes: three blocks of 64 KiB, the last one short


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.bin").write_bytes(PLAIN)
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "key").chmod(0o600)
    return tmp_path


def run(*args):
    """The exit code of `ags-fast stream ARGS`, in this process."""
    return cli.main(["stream", *map(str, args)])


def encrypted(*more):
    """Encrypt plain.bin; returns the length that a decryption needs."""
    assert run("encrypt", "plain.bin", "--data-key-file", "key", "--block-size", "64K", "--overwrite", *more) == 0
    return ags_fast.encrypted_length(len(PLAIN), 1 << 16)


def test_round_trip(here, capsys):
    length = encrypted("--aad-prefix", "table/7", "--fsync")
    report = capsys.readouterr()
    assert f"file length   {length}" in report.out
    assert report.err == ""  # not a terminal: no bar
    with ags_fast.AgsReader("plain.bin.ags", KEY, length=length, aad_prefix=b"table/7") as reader:
        assert reader.read() == PLAIN
    common = ("plain.bin.ags", "--data-key-file", "key", "--length", length)
    assert run("verify", *common, "--aad-prefix-hex", b"table/7".hex()) == 0
    assert run("decrypt", *common, "--aad-prefix", "table/7", "-o", "back", "--threads", "2") == 0
    assert (here / "back").read_bytes() == PLAIN
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((here / "back").stat().st_mode) == 0o666 & ~umask


def test_default_names_and_overwriting(here, capsys):
    length = encrypted()
    common = ("plain.bin.ags", "--data-key-file", "key", "--length", length)
    (here / "plain.bin").write_bytes(b"precious")
    assert run("decrypt", *common) == EXIT_USAGE
    assert (here / "plain.bin").read_bytes() == b"precious"
    assert run("decrypt", *common, "--overwrite") == 0
    assert (here / "plain.bin").read_bytes() == PLAIN
    assert run("encrypt", "plain.bin", "--data-key-file", "key") == EXIT_USAGE  # plain.bin.ags is there
    os.rename("plain.bin.ags", "other")
    assert run("decrypt", "other", *common[1:]) == EXIT_USAGE
    assert "-o" in capsys.readouterr().err


def test_json(here, capsys):
    length = encrypted("--json")
    result = json.loads(capsys.readouterr().out)
    assert (result["operation"], result["output"], result["file_length"]) == ("encrypt", "plain.bin.ags", length)
    assert (result["plain_length"], result["block_size"]) == (len(PLAIN), 1 << 16)
    assert run("inspect", "plain.bin.ags", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["blocks"], result["plain_length"], result["authenticated"]) == (3, len(PLAIN), False)
    with open("plain.bin.ags", "r+b") as file:
        file.seek(8 + 2 * (65536 + 28) + 50)
        file.write(b"\0\0\0\0")
    assert run("verify", "plain.bin.ags", "--data-key-file", "key", "--untrusted-length", "--json") == EXIT_INTEGRITY
    result = json.loads(capsys.readouterr().out)
    assert (result["error_class"], result["block_index"]) == ("IntegrityError", 2)


def test_inspect_says_what_does_not_fit(here, capsys):
    length = encrypted()
    with open("plain.bin.ags", "ab") as file:
        file.write(b"behind")
    assert run("inspect", "plain.bin.ags", "--length", length, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bytes_behind"] == 6
    assert run("inspect", "plain.bin.ags", "--length", length + 100) == EXIT_INTEGRITY
    assert run("inspect", "plain.bin") == EXIT_INTEGRITY
    assert run("inspect", "absent") == EXIT_NOT_FOUND


@pytest.mark.parametrize("damage", ["flip", "cut", "cut at a block", "prefix", "key", "behind"])
def test_integrity(here, damage):
    length = encrypted()
    data = bytearray((here / "plain.bin.ags").read_bytes())
    more = []
    if damage == "flip":
        data[-1] ^= 1  # in the last block: all that comes before is good
    elif damage == "cut":
        del data[-1]
    elif damage == "cut at a block":
        del data[8 + 2 * (65536 + 28) :]
    elif damage == "prefix":
        more = ["--aad-prefix", "another"]
    elif damage == "key":
        (here / "key").write_bytes(KEY[::-1])
    else:
        data += b"behind"
    (here / "plain.bin.ags").write_bytes(data)
    common = ("plain.bin.ags", "--data-key-file", "key", "--length", length, *more)
    assert run("verify", *common) == EXIT_INTEGRITY
    before = sorted(os.listdir())
    expected = 0 if damage == "behind" else EXIT_INTEGRITY  # what is behind the length is nobody's
    assert run("decrypt", *common, "-o", "back") == expected
    assert sorted(os.listdir()) == sorted([*before, "back"] if damage == "behind" else before)


def test_usage():
    for args in (
        ["stream", "decrypt", "f", "--data-key-file", "k"],  # no length, and no word that none is trusted
        ["stream", "encrypt", "f"],  # no key
        ["stream", "encrypt", "f", "--key", "00" * 16],  # a key is never an argument
        ["stream", "encrypt", "f", "--data-key-file", "k", "--block-size", "many"],
        ["stream", "encrypt", "f", "--data-key-file", "k", "--threads", "0"],
        ["--json"],
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(args)
        assert stopped.value.code == 2


def test_keys(here, monkeypatch, capsys):
    length = encrypted()
    verify = ("verify", "plain.bin.ags", "--length", length)
    for name, text in (("hex", KEY.hex() + "\n"), ("base64", base64.b64encode(KEY).decode())):
        (here / name).write_text(text)
        assert run(*verify, "--data-key-file", name) == 0
        monkeypatch.setenv("AGS_TEST_KEY", text)
        assert run(*verify, "--key-env", "AGS_TEST_KEY") == 0
    assert "chmod 600" in capsys.readouterr().err
    assert run(*verify, "--data-key-file", "absent") == EXIT_KEY_ACCESS
    assert run(*verify, "--key-env", "AGS_TEST_ABSENT") == EXIT_KEY_ACCESS
    (here / "short").write_bytes(KEY[:15])
    assert run(*verify, "--data-key-file", "short") == EXIT_KEY_ACCESS
    # 32 hexadecimal digits are a key of 16 bytes in hex, or one of 32 as they are, or one of 24 in base64.
    (here / "either").write_text(KEY[:16].hex())
    assert run(*verify, "--data-key-file", "either") == EXIT_KEY_ACCESS
    assert run(*verify, "--data-key-file", "either", "--key-format", "hex") == EXIT_INTEGRITY
    shown = capsys.readouterr()
    assert KEY[:16].hex() not in shown.out + shown.err
    assert KEY[:15].decode("latin1") not in shown.out + shown.err


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert ags_fast.__version__ in out
    assert ags_fast.openssl_version() in out
    assert "(bundled)" in out or "(system)" in out


def command(*args):
    return [sys.executable, "-m", "ags_fast", "stream", *map(str, args)]


@pytest.mark.more
def test_files_larger_than_memory(here):
    size = 700 << 20
    with open("large", "wb") as file:
        file.truncate(size)  # sparse

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))

    def small(*args):
        done = subprocess.run(command(*args), preexec_fn=limit, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0, done.stderr

    small("encrypt", "large", "--data-key-file", "key")
    length = ags_fast.encrypted_length(size)
    assert os.path.getsize("large.ags") == length
    small("verify", "large.ags", "--data-key-file", "key", "--length", length)


def test_interrupted(here):
    fifo_like = here / "slow"
    with open(fifo_like, "wb") as file:
        file.truncate(64 << 30)  # sparse: far more than can be encrypted before the signal
    process = subprocess.Popen(
        command("encrypt", "slow", "--data-key-file", "key", "-o", "out"), stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 30
    while not any(name.endswith(".agstmp") and os.path.getsize(name) for name in os.listdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == EXIT_INTERRUPTED
    assert b"interrupted" in errors
    assert sorted(os.listdir()) == ["key", "plain.bin", "slow"]


def test_progress_on_a_terminal(here):
    length = encrypted()
    primary, secondary = pty.openpty()
    termios.tcsetwinsize(secondary, (24, 80))
    process = subprocess.Popen(
        command("verify", "plain.bin.ags", "--data-key-file", "key", "--length", length), stderr=secondary
    )
    os.close(secondary)
    shown = b""
    while True:
        try:
            piece = os.read(primary, 4096)
        except OSError:  # how Linux says that the other side is closed
            break
        if not piece:
            break
        shown += piece
    os.close(primary)
    assert process.wait(timeout=30) == 0
    assert b"verify: 100%" in shown
