"""The ags-fast commands for datasets, as a shell runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from support import flip, pattern, python_env

pytest.importorskip("pyarrow")

from typing import TYPE_CHECKING

from ags_fast import cli
from ags_fast.keys import clear_cache

if TYPE_CHECKING:
    from pathlib import Path

KMS = ["--keystore", "keystore", "--key-file", "key"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The current directory: a keystore with the master key m, and a tree in src."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src" / "x").mkdir(parents=True)
    (tmp_path / "src" / "x" / "a").write_bytes(pattern(3_000_000))
    (tmp_path / "src" / "b").write_bytes(b"plain b")
    assert cli.main(["keys", "init", "keystore", "--key-file", "key"]) == 0
    assert cli.main(["keys", "create", "keystore", "m", "--key-file", "key"]) == 0
    capsys.readouterr()
    return tmp_path


def run(*arguments: str) -> int:
    return cli.main([*arguments, *KMS])


def encrypted(*more: str) -> int:
    return run("encrypt", "src", "ds", "--wrapping-key-id", "m", *more)


def test_a_dataset_knows_its_master_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run("encrypt", "src", "ds", "--quiet")
    assert end.value.code == 2
    assert "ds is a new dataset: name its master key by --wrapping-key-id" in capsys.readouterr().err
    assert run("encrypt", "src", "ds", "--min-version", "1") == 5
    assert not (folder / "ds").exists()
    assert encrypted() == 0
    assert cli.main(["keys", "create", "keystore", "other", "--key-file", "key"]) == 0
    for name, master in (("c", "m"), ("d", "other")):
        (folder / "src" / name).write_text("more")
        assert run("encrypt", "src", "ds", "--quiet") == 0
        capsys.readouterr()
        assert run("stat", "ds", name, "--json") == 0
        assert json.loads(capsys.readouterr().out)["wrapping_key_id"] == master
        assert run("keys", "rotate", "ds", "--wrapping-key-id", "other") == 0


def test_results_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert encrypted() == 0
    printed = capsys.readouterr().out
    assert "plain bytes  3,000,007\n" in printed
    assert re.search(r"^seconds {6}\d+\.\d( \(\d+ MB/s\))?$", printed, re.MULTILINE)
    assert run("verify", "ds", "--json") == 0
    assert json.loads(capsys.readouterr().out)["seconds"] > 0


def test_wrong_usage_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for json_too in ([], ["--json"]):
        with pytest.raises(SystemExit) as end:
            cli.main(["ls", "ds", *json_too])
        assert end.value.code == 2
        out, err = capsys.readouterr()
        assert err.startswith("ags-fast ls: error: say which KMS: `ags-fast config init`")
        assert err.endswith(" See ags-fast ls --help\n")
        assert err.count("\n") == 1
        assert bool(json_too) == bool(out)
    told = json.loads(out)
    assert (told["operation"], told["error_class"]) == ("ls", "UsageError")
    assert told["error"].startswith("say which KMS")


def test_round_trip(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert encrypted() == 0
    assert "version      2" in capsys.readouterr().out
    assert run("ls", "ds", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(file["path"], file["plain_length"]) for file in listed["files"]] == [("b", 7), ("x/a", 3_000_000)]
    assert run("rekey", "ds", "--include", "x/*") == 0
    assert run("verify", "ds", "--min-version", "3") == 0
    assert run("decrypt", "ds", "out") == 0
    assert (folder / "out" / "x" / "a").read_bytes() == pattern(3_000_000)
    capsys.readouterr()
    assert run("decrypt", "ds", "out") == 2
    assert "overwrite" in capsys.readouterr().out
    assert run("decrypt", "ds", "out", "--resume=verify") == 0
    assert run("sweep", "ds") == 0


def test_cat_is_bytes(folder: Path) -> None:
    assert encrypted() == 0
    command = [sys.executable, "-m", "ags_fast", "cat", "ds", "x/a", *KMS]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **python_env()}, check=True)
    assert done.stdout == pattern(3_000_000)
    assert done.stderr == b""


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert encrypted("--single-wrap") == 0
    capsys.readouterr()
    assert cli.main(["inspect", "ds", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["authenticated"] is False
    assert [(version["files"], version["follows"]) for version in found["versions"]] == [(0, None), (2, True)]
    assert ("m", False) in [(one["wrapping_key_id"], one["double_wrap"]) for one in found["keys"]]
    assert cli.main(["inspect", "ds"]) == 0
    assert re.search(r"single +m +active", capsys.readouterr().out)


def test_exit_codes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "nowhere") == 5
    assert run("encrypt", "src", "ds", "--wrapping-key-id", "unknown") == 4
    assert "unknown" in capsys.readouterr().err
    assert encrypted() == 0
    with pytest.raises(SystemExit) as usage:
        cli.main(["verify", "ds"])
    assert usage.value.code == 2
    assert run("verify", "ds", "--min-version", "3") == 3
    assert "--min-version 3" in capsys.readouterr().err
    (path,) = (folder / "ds").glob("b.*.ags")
    path.write_bytes(flip(path.read_bytes(), 300))
    assert run("verify", "ds") == 3
    assert "failed" in capsys.readouterr().out
    assert run("cat", "ds", "b") == 3
    assert run("decrypt", "ds", "out") == 3
    assert not (folder / "out" / "b").exists()
    assert (folder / "out" / "x" / "a").exists()
    assert run("verify", "ds", "--max-failures", "0") == 3


def test_dry_run_and_aad_prefix(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert encrypted("--dry-run", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in planned["rows"]] == ["planned", "planned"]
    assert not (folder / "ds").exists()
    assert encrypted("--aad-prefix", "no number") == 2
    assert "{n}" in capsys.readouterr().err
    assert encrypted("--aad-prefix", "set.part{n}", "--delete-sources") == 0
    assert list((folder / "src").rglob("*.*")) == []
    assert not (folder / "src" / "b").exists()
    assert run("verify", "ds") == 0


@pytest.mark.more
def test_passphrase_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "correct horse battery")
    options = ["--passphrase-env", "SECRET"]
    assert cli.main(["keys", "init", "other", *options]) == 0
    assert cli.main(["keys", "create", "other", "m", *options]) == 0
    arguments = ["encrypt", "src", "ds2", "--wrapping-key-id", "m", "--keystore", "other"]
    assert cli.main([*arguments, *options]) == 0
    monkeypatch.setenv("SECRET", "wrong horse battery!")
    clear_cache()  # as in a process of its own
    assert cli.main(["verify", "ds2", "--keystore", "other", *options]) == 4
