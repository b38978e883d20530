"""--pin-file: what a nightly job keeps by itself, and what must not replace it."""

from __future__ import annotations

import json
import os
import stat
import threading
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, make_kms, write_tree
from support import flip

from ags_fast import cli
from ags_fast.cli import pins

if TYPE_CHECKING:
    from collections.abc import Callable

FILE = Path("pins/ds")


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """Run a command in a folder with the dataset `ds`, at version 2, and its pin in `FILE`."""
    monkeypatch.chdir(tmp_path)
    options = [f"--kms={name}={value}" for name, value in make_kms(tmp_path).items()]

    def command(*words: str, code: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        assert cli.main([*words, "--json", *options]) == code, capsys.readouterr()
        return dict(json.loads(capsys.readouterr().out))

    write_tree(tmp_path / "src", {"a": b"one", "b/c": b"two"})
    command("encrypt", "src", "ds", "--wrapping-key-id", MASTER)
    command("rm", "ds", "a")
    FILE.parent.mkdir()
    assert cli.main(["pin", "ds", *options]) == 0
    FILE.write_text(capsys.readouterr().out)
    return command


def kept() -> str:
    return FILE.read_text()


def test_a_job_keeps_its_pin(run: Any, tmp_path: Path) -> None:
    first = kept()
    assert first == f"{run('verify', 'ds')['pin']}\n"
    FILE.chmod(0o640)
    jobs = "rekey ds", "encrypt src ds", "maintain ds", "keys rotate ds --force-expire", "expire ds --keep 1 --yes"
    for words in (*jobs, "pin ds"):
        run(*words.split(), "--pin-file", str(FILE))
        assert kept() == f"{run('pin', 'ds')['pin']}\n", words
    assert int(kept().partition("-")[0]) > int(first.partition("-")[0])
    assert stat.S_IMODE(FILE.stat().st_mode) == 0o640
    assert os.listdir("pins") == ["ds"]
    run("verify", "ds", "--pin", first.strip())
    os.symlink("ds", "pins/link")
    run("rekey", "ds", "--pin-file", "pins/link")
    assert Path("pins/link").is_symlink()
    assert kept() == f"{run('pin', 'ds')['pin']}\n"


def test_an_older_dataset_is_refused(run: Any) -> None:
    os.rename("ds", "newer")
    run("encrypt", "src", "ds", "--wrapping-key-id", MASTER)
    before = kept()
    for words in (("verify", "ds"), ("rekey", "ds"), ("sweep", "ds"), ("ls", "ds"), ("pin", "ds"), ("cat", "ds", "a")):
        told = run(*words, "--pin-file", str(FILE), code=3)
        assert told["error_class"] == "IntegrityError"
    assert kept() == before


def test_what_leaves_the_pin_as_it_is(run: Any) -> None:
    before = kept()
    run("rekey", "ds", "--dry-run", "--pin-file", str(FILE))
    run("ls", "ds", "--version", "1", "--pin-file", str(FILE))  # its pin is of that version
    run("verify", "ds", "--version", "1", "--pin-file", str(FILE))
    (file,) = [file["file"] for file in run("ls", "ds")["files"]]
    Path("ds", file).write_bytes(flip(Path("ds", file).read_bytes(), 300))
    run("rekey", "ds", "--pin-file", str(FILE), code=3)
    assert kept() == before


@pytest.mark.parametrize(
    ("old", "new", "replaced"),
    [
        (f"9-{'ab' * 32}", f"10-{'cd' * 32}", True),
        (f"10-{'ab' * 32}", f"9-{'cd' * 32}", False),
        (f"ags1.{'ab' * 16}.9.x.y.z", f"ags1.{'ab' * 16}.10.x.y.z", True),
        (f"ags1.{'ab' * 16}.9.x.y.z", f"ags1u.{'ab' * 16}.10.x..z", False),  # proves nothing against an attacker
        (f"ags1u.{'ab' * 16}.9.x..z", f"ags1u.{'ab' * 16}.9.y..z", True),  # a commit without a snapshot
        (f"ags1u.{'ab' * 16}.9.x..z", f"ags1.{'ab' * 16}.1.x.y.z", True),
    ],
)
def test_a_pin_takes_the_place_of_one_that_proves_no_more(old: str, new: str, replaced: bool, tmp_path: Path) -> None:
    file = tmp_path / "pin"
    file.write_text(f"{old}\n")
    args = Namespace(pin=None, pin_file=str(file), run=lambda args: {"was": args.pin, "pin": new})
    assert pins.run(args) == {"was": old, "pin": new}
    assert file.read_text() == f"{new if replaced else old}\n"


@pytest.mark.parametrize("text", ["", "\n", "x" * 5000, "3-", bytes(range(256)).hex()])
def test_what_is_no_pin(run: Any, text: str) -> None:
    """The check is not left out, and what is in the file, which may be a key, is not shown."""
    FILE.write_text(text)
    told = run("verify", "ds", "--pin-file", str(FILE), code=2)
    assert told["error"] == f"{FILE} has no pin: `ags-fast pin DATASET > {FILE}` makes one, of what is there now"
    assert kept() == text


def test_a_missing_pin_file_does_not_disable_the_check(run: Any) -> None:
    FILE.unlink()
    told = run("verify", "ds", "--pin-file", str(FILE), code=5)
    assert told["error"].startswith(f"there is no pin file {FILE}: `ags-fast pin DATASET > ")
    os.mkfifo(FILE)
    assert "not a regular file" in run("verify", "ds", "--pin-file", str(FILE), code=2)["error"]


def test_a_pin_that_cannot_be_kept_is_shown(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"the command has succeeded, but .* cannot keep its pin 7-ab: No such file"):
        pins.keep(str(tmp_path / "gone" / "pin"), "7-ab")


def test_a_pin_and_a_file_of_pins_exclude_each_other(run: Any) -> None:
    with pytest.raises(SystemExit) as end:
        run("verify", "ds", "--pin-file", str(FILE), "--pin", kept().strip())
    assert end.value.code == 2
    with pytest.raises(SystemExit) as end:
        run("maintain", "ds", "ds", "--pin-file", str(FILE))
    assert end.value.code == 2


def test_two_jobs_at_once_leave_one_whole_pin(tmp_path: Path) -> None:
    file, texts = tmp_path / "pin", [f"{i}-{'ab' * 32}" for i in range(1, 60)]
    file.write_text(f"0-{'ab' * 32}\n")

    def work(mine: list[str]) -> None:
        for text in mine:
            pins.keep(str(file), text)

    threads = [threading.Thread(target=work, args=(texts[i::3],)) for i in range(3)]
    for one in threads:
        one.start()
    while any(one.is_alive() for one in threads):
        assert pins.FORM.fullmatch(file.read_text().strip())
    assert file.read_text().strip() in texts
    assert os.listdir(tmp_path) == ["pin"]


def test_a_file_of_a_profile(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGS_FAST_CONFIG", "config.toml")
    Path("config.toml").write_text(f'[profiles.p.rekey]\npin-file = "{FILE}"\n')
    first = kept()
    run("rekey", "ds", "--profile", "p")
    assert kept() != first
    second = kept()
    run("rekey", "ds", "--profile", "p", "--pin", first.strip())
    assert kept() == second
    FILE.unlink()
    run("rekey", "ds", "--profile", "p", code=5)
