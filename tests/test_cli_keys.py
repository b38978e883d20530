"""ags-fast keys, as a shell sees it."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from support import python_env

from ags_fast import Dataset, IntegrityError, cli, jobs
from ags_fast.cli.codes import EXIT_INTEGRITY, EXIT_KEY_ACCESS, EXIT_NOT_FOUND, EXIT_USAGE
from ags_fast.keys import clear_cache, load_kms
from ags_fast.keys.kms import local


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: str) -> int:
    return cli.main(["keys", *args])


def as_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(*args, "--json") == 0
    return dict(json.loads(capsys.readouterr().out))


KEY = ("--key-file", "key")


def test_each_command_names_the_next(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """What is printed works when pasted, with names of one's own."""
    (here / "my files").mkdir()
    (here / "my files" / "a").write_text("a")
    capsys.readouterr()

    def following(line: list[str]) -> list[str]:
        assert cli.main(line) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        return [{"FOLDER": "my files", "DATASET": "made"}.get(word, word) for word in shlex.split(last)[1:]]

    create = following(["keys", "init", "a keystore", "--key-file", "a key"])
    assert cli.main(following(create)) == 0
    capsys.readouterr()
    assert cli.main(following([*create, "--new-version"])) == 0
    assert re.search("KEKs +1 done", capsys.readouterr().out)


def test_a_keystore_from_a_shell(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    assert run("init", "keystore", *KEY) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    shown, _, following = printed.out.partition("\nNext:\n")
    assert following == "  ags-fast keys create keystore my-key --key-file key\n"
    lines = [line.strip() for line in shown.splitlines() if line.startswith("  ")]
    properties = dict(line.split("=", 1) for line in lines)
    assert properties == {
        "encryption.kms-type": "local",
        "kms.local.path": str(here / "keystore"),
        "kms.local.key-file": str(here / "key"),
    }
    assert all(stat.S_IMODE((here / name).stat().st_mode) == 0o600 for name in ("keystore", "key"))
    assert run("list", "keystore", *KEY) == 0
    assert "no keys yet" in capsys.readouterr().out
    assert as_json(capsys, "create", "keystore", "my key", *KEY)["key_version"] == 1
    wrapped = load_kms(properties).wrap_key(b"a key", "my key")
    assert as_json(capsys, "create", "keystore", "my key", "--new-version", *KEY)["key_version"] == 2
    assert load_kms(properties).unwrap_key(wrapped, "my key") == b"a key"
    listed = as_json(capsys, "list", "keystore", *KEY)["keys"]
    assert [(key["key_id"], key["versions"], key["current_version"]) for key in listed] == [("my key", 2, 2)]
    assert as_json(capsys, "disable", "keystore", "my key", "--version", "2", *KEY)["state"] == "disabled"
    found = as_json(capsys, "status", "keystore", *KEY)
    assert found["kdf"] == {"name": "hmac-sha256"}
    assert [(v["version"], v["state"]) for v in found["keys"][0]["versions"]] == [(1, "enabled"), (2, "disabled")]
    assert all(0 <= v["age_days"] < 1 for v in found["keys"][0]["versions"])
    assert run("status", "keystore", *KEY) == 0
    out = capsys.readouterr().out
    assert "my key: 2 versions, wraps by 1" in out
    assert "disabled" in out
    assert run("disable", "keystore", "my key", *KEY) == 0
    assert run("list", "keystore", *KEY) == 0
    assert "none is enabled" in capsys.readouterr().out
    assert run("enable", "keystore", "my key", *KEY) == 0
    assert load_kms(properties).unwrap_key(wrapped, "my key") == b"a key"


DESTROY = ("destroy", "keystore", "m", *KEY, "--version", "1")


@pytest.fixture
def kms(here: Path) -> dict[str, str]:
    """A keystore whose key `m` has two versions; the first one wraps the KEKs of the datasets `one` and `two`."""
    (here / "src").mkdir()
    (here / "src" / "a").write_text("a")
    made = {"encryption.kms-type": "local", local.PATH: "keystore", local.KEY_FILE: "key"}
    local.create_keystore(made)
    local.create_key(made, "m")
    for dataset in ("one", "two"):
        encrypted = jobs.encrypt_files("src", dataset, kms=made, wrapping_key_id="m", engine=jobs.LocalEngine(0))
        encrypted.raise_for_failures()
    local.rotate_key(made, "m")
    return made


def refused(capsys: pytest.CaptureFixture[str], code: int, *args: str) -> str:
    """What a command says that ends with `code` and leaves the keystore as it is."""
    before = Path("keystore").read_bytes()
    capsys.readouterr()
    try:
        ended: Any = run(*args)
    except SystemExit as error:  # of the parser
        ended = error.code
    assert ended == code
    assert Path("keystore").read_bytes() == before
    return capsys.readouterr().err


def test_versions_that_must_stay(capsys: pytest.CaptureFixture[str], kms: dict[str, str]) -> None:
    unchecked = (*DESTROY, "--unchecked")
    assert "--unchecked" in refused(capsys, EXIT_USAGE, *DESTROY)
    assert "wraps now" in refused(capsys, EXIT_USAGE, *unchecked, "--version", "2")
    assert "no version 3" in refused(capsys, EXIT_KEY_ACCESS, *unchecked, "--version", "3")
    assert "no key 'n'" in refused(capsys, EXIT_KEY_ACCESS, "destroy", "keystore", "n", *unchecked[3:])
    refused(capsys, EXIT_NOT_FOUND, *DESTROY, "--dataset", "nowhere")
    local.rotate_key(kms, "m")
    local.set_state(kms, "m", "disabled", version=3)
    assert "is the newest one" in refused(capsys, EXIT_USAGE, *unchecked, "--version", "3")
    assert "wraps now" in refused(capsys, EXIT_USAGE, *unchecked, "--version", "2")
    local.create_keystore({**kms, local.PATH: "another"})  # which opens neither dataset
    other = {**kms, local.PATH: "another"}
    local.create_key(other, "m")
    local.rotate_key(other, "m")
    with pytest.raises(IntegrityError):
        jobs.destroy_versions(other, "m", [1], datasets={"one": None})
    assert local.destroy_versions(other, "m", [1], dry_run=True) == [1]  # which is still there


def test_versions_that_nothing_needs_are_destroyed(
    capsys: pytest.CaptureFixture[str], here: Path, kms: dict[str, str]
) -> None:
    shutil.copytree("two", "old")
    wrapped = load_kms(kms).wrap_key(b"a key", "m")
    assert cli.main(["keys", "rotate", "one", "--what", "mek", "--keystore", "keystore", *KEY]) == 0
    told = refused(capsys, EXIT_INTEGRITY, *DESTROY, "--dataset", "one", "--dataset", "two")
    assert "two at version 2" in told
    assert "wraps 1 keys" in told
    assert "/one" not in told
    assert cli.main(["keys", "rotate", "two", "--what", "mek", "--keystore", "keystore", *KEY]) == 0
    pins = [Dataset.open(one, kms=kms).pin for one in ("one", "two")]
    checked = (*DESTROY, "--dataset", "one", "--pin", pins[0], "--dataset", "two")
    before = (here / "keystore").read_bytes()
    for words in ((*DESTROY, "--pin", pins[0]), (*checked[:-2], "--pin", pins[0]), (*checked, "--dataset", "one")):
        assert "--" in refused(capsys, EXIT_USAGE, *words)
    told = refused(capsys, EXIT_INTEGRITY, *DESTROY, "--dataset", "one", "--dataset", "two", "--pin", pins[0])
    assert "does not descend from the pin" in told
    assert as_json(capsys, *checked, "--dry-run")["destroyed"] == [1]
    assert (here / "keystore").read_bytes() == before
    capsys.readouterr()
    assert run(*checked) == 0
    assert capsys.readouterr().out.startswith("m, version 1: destroyed\n")
    assert stat.S_IMODE((here / "keystore").stat().st_mode) == 0o600
    assert as_json(capsys, *checked)["destroyed"] == []  # again
    assert load_kms(kms).unwrap_key(wrapped, "m") == b"a key"
    capsys.readouterr()
    options = ("--keystore", "keystore", *KEY)
    assert cli.main(["verify", "one", *options]) == 0
    clear_cache()  # as in a process of its own
    assert cli.main(["verify", "old", *options]) == EXIT_KEY_ACCESS
    assert "version 1 of the local key 'm' was destroyed" in capsys.readouterr().err


def test_an_open_job_keeps_no_version(kms: dict[str, str]) -> None:
    """A job that runs, in this process, knows keys as they were wrapped before. It wraps again."""
    jobs.rotate("one", kms=kms, what="mek").raise_for_failures()
    with Dataset.open("one", kms=kms).transaction() as changes:
        with changes.create("b") as file:
            file.write(b"b")
        assert jobs.destroy_versions(kms, "m", [1], datasets={"one": None})["destroyed"] == [1]
    assert Dataset.open("one", kms=kms).open_file("b").read() == b"b"
    with pytest.raises(ValueError, match="unchecked=True"):
        jobs.destroy_versions(kms, "m", [1])
    with pytest.raises(TypeError, match="each with a pin"):
        jobs.destroy_versions(kms, "m", [1], datasets=["one"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="local keystore"):
        jobs.destroy_versions({"encryption.kms-type": "aws"}, "m", [1], unchecked=True)


def test_exit_codes(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    assert run("init", "keystore", *KEY) == 0
    assert run("create", "keystore", "m", *KEY) == 0
    secret = (here / "key").read_bytes()
    for expected, args in (
        (EXIT_USAGE, ("init", "keystore", *KEY)),  # never over one that is there
        (EXIT_NOT_FOUND, ("init", "nowhere/keystore", *KEY)),
        (EXIT_USAGE, ("create", "keystore", "m", *KEY)),
        (EXIT_USAGE, ("create", "keystore", "a\nb", *KEY)),
        (EXIT_KEY_ACCESS, ("create", "keystore", "n", "--new-version", *KEY)),
        (EXIT_KEY_ACCESS, ("list", "absent", *KEY)),
        (EXIT_KEY_ACCESS, ("list", "keystore", "--key-file", "absent")),
        (EXIT_KEY_ACCESS, ("list", "keystore", "--key-file", "keystore")),
        (EXIT_KEY_ACCESS, ("list", "keystore", "--passphrase-env", "AGS_TEST_ABSENT")),
        (EXIT_KEY_ACCESS, ("enable", "keystore", "m", "--version", "9", *KEY)),
    ):
        assert run(*args) == expected, args
        assert run(*args, "--json") == expected
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["error_class"]
    data = bytearray((here / "keystore").read_bytes())
    data[-30] ^= 1
    (here / "keystore").write_bytes(data)
    assert run("status", "keystore", *KEY) == EXIT_INTEGRITY
    printed = capsys.readouterr()
    assert secret.hex() not in printed.out + printed.err
    for args in (  # type: ignore[assignment]
        ["keys", "--json"],
        ["keys", "init"],
        ["keys", "list", "k", "--key", "00"],
        ["keys", "list", "k", *KEY, *KEY[:1]],
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(args)
        assert stopped.value.code == 2
    with pytest.raises(SystemExit):  # two secrets
        run("list", "keystore", *KEY, "--passphrase-env", "X")


def test_passphrases_from_files_and_the_environment(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "SCRYPT", {"n": 1 << 14, "r": 8, "p": 1})
    (here / "passphrase").write_text("correct horse\n")
    assert run("init", "keystore", "--passphrase-file", "passphrase") == 0
    assert "chmod 600" in capsys.readouterr().err
    (here / "passphrase").chmod(0o600)
    monkeypatch.setenv("AGS_TEST_PASSPHRASE", "correct horse")
    assert run("create", "keystore", "m", "--passphrase-env", "AGS_TEST_PASSPHRASE") == 0
    assert as_json(capsys, "list", "keystore", "--passphrase-file", "passphrase")["keys"][0]["key_id"] == "m"
    monkeypatch.setenv("AGS_TEST_PASSPHRASE", "incorrect horse")
    assert run("list", "keystore", "--passphrase-env", "AGS_TEST_PASSPHRASE") == EXIT_KEY_ACCESS
    printed = capsys.readouterr()
    assert "horse" not in printed.out + printed.err


def typed(passphrases: list[str], *args: str) -> tuple[int, str]:
    """The command on a terminal, at which somebody types these. Its exit code and what was to be seen."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(python_env())
        os.execv(sys.executable, [sys.executable, "-m", "ags_fast", "keys", *args])
    shown, prompts = b"", 0
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:
            break
        if not piece:
            break
        shown += piece
        if shown.count(b": ") > prompts and shown.endswith(b": ") and prompts < len(passphrases):
            os.write(terminal, passphrases[prompts].encode() + b"\n")
            prompts = shown.count(b": ")
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def test_a_passphrase_that_is_typed(here: Path) -> None:
    code, shown = typed(["sésame", "sésame"], "init", "keystore")
    assert code == 0
    assert "again" in shown
    assert "sésame" not in shown
    code, shown = typed(["sésame"], "create", "keystore", "m")
    assert code == 0, shown
    code, shown = typed(["open"], "list", "keystore")
    assert code == EXIT_KEY_ACCESS
    assert "does not open" in shown
    (here / "passphrase").write_text("sésame")
    properties = {
        "encryption.kms-type": "local",
        "kms.local.path": str(here / "keystore"),
        "kms.local.passphrase-file": str(here / "passphrase"),
    }
    assert load_kms(properties).wrap_key(b"x", "m")
    code, shown = typed(["one", "another"], "init", "second")
    assert code == EXIT_USAGE
    assert "differ" in shown
    assert not (here / "second").exists()
    code, shown = typed([], "init", "keystore")
    assert code == EXIT_USAGE
    assert "Passphrase" not in shown


def test_without_a_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import subprocess

    command = [sys.executable, "-m", "ags_fast", "keys", "init", "keystore"]
    done = subprocess.run(
        command, env=python_env(), input="typed\n", capture_output=True, text=True, start_new_session=True, check=False
    )
    assert done.returncode == EXIT_KEY_ACCESS
    assert "--passphrase-file" in done.stderr
    assert os.listdir(here) == []
