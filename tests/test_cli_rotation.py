"""ags-fast keys, on datasets: status, rotate, expire, audit and policy, as a shell runs them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from datasets import HERE, decrypted, read_tree, write_tree

from ags_fast import cli, jobs
from ags_fast.cli.codes import EXIT_INTEGRITY, EXIT_KEY_ACCESS, EXIT_NOT_FOUND, EXIT_USAGE
from ags_fast.cli.kms import kms_options
from ags_fast.dataset.access import Access
from ags_fast.keys import clear_cache, load_kms
from ags_fast.keys.kms import local

pytestmark = pytest.mark.usefixtures("without_workers")

DOCS = Path(__file__).resolve().parents[1] / "docs" / "rotation.md"
KMS = ["--keystore", "keystore", "--key-file", "key"]
TREE = {"x/a": b"a" * 1000, "x/b": b"b", "y/c": b""}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The current directory: a keystore with the master keys m and hr, and a tree in src. Jobs run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ags_fast.jobs.run.LocalEngine", lambda: HERE)
    write_tree(tmp_path / "src", TREE)
    assert cli.main(["keys", "init", "keystore", "--key-file", "key"]) == 0
    for name in ("m", "hr"):
        assert cli.main(["keys", "create", "keystore", name, "--key-file", "key"]) == 0
    capsys.readouterr()
    clear_cache()
    return tmp_path


def properties(name: str = "keystore", key: str = "key") -> dict[str, str]:
    return {
        "encryption.kms-type": "local",
        "kms.local.path": os.path.abspath(name),
        "kms.local.key-file": os.path.abspath(key),
    }


def run(*arguments: str) -> int:
    return cli.main([*arguments, *KMS])


def encrypted(*more: str) -> None:
    assert run("encrypt", "src", "ds", "--wrapping-key-id", "m", "--quiet", *more) == 0


def new_version(name: str = "m") -> None:
    assert cli.main(["keys", "create", "keystore", name, "--new-version", "--key-file", "key"]) == 0


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    assert run(*arguments) == code
    return capsys.readouterr().out


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    return dict(json.loads(text_of(capsys, *arguments, "--json", code=code)))


def test_a_life_of_rotations(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encrypted()
    files = {name: data for name, data in read_tree(folder / "ds").items() if not name.startswith("_ags/")}
    new_version()
    told = text_of(capsys, "keys", "rotate", "ds", "--what", "mek", "--dry-run")
    assert re.search("KEKs +1 to do", told)
    assert "Next" not in told
    told = text_of(capsys, "keys", "rotate", "ds", "--what", "mek")
    assert re.search("KEKs +1 done", told)
    assert "keys audit" in told
    told = text_of(capsys, "keys", "rotate", "ds", "--what", "mek")
    assert re.search("KEKs +1 stay", told)
    assert "current version" in told
    done = json_of(capsys, "keys", "rotate", "ds", "--what", "kek", "--grace", "3d")
    assert (done["operation"], done["what"], done["version"], done["exit_code"]) == ("rotate", "kek", 4, 0)
    assert sorted(row["format"] for row in done["rows"]) == ["key", "table"]
    keys = json_of(capsys, "keys", "status", "ds")["keys"]
    assert [key["state"] for key in keys] == ["retired", "active"]
    assert 2.9 < (keys[0]["retires_ms"] - keys[1]["created_ms"]) / 86_400_000 < 3.1
    told = text_of(capsys, "expire", "ds", "--yes", "--keep", "1", "--older-than", "1d")
    assert "version 3 needs it, and 2 more do" in told
    assert "removed" not in told
    assert run("expire", "ds", "--yes") == EXIT_USAGE
    assert "keeps all versions: pass --keep 1 or a greater number" in capsys.readouterr().err
    told = text_of(capsys, "expire", "ds", "--yes", "--keep", "1")
    assert re.search("versions +3 removed", told)
    assert re.search("tables +1 removed", told)
    assert "its grace is over in 3.0 days" in told
    told = text_of(capsys, "expire", "ds", "--yes", "--keep", "1", "--skip-grace")
    assert re.search("KEKs +1 removed", told)
    assert "nothing to do" in text_of(capsys, "expire", "ds", "--yes", "--keep", "1")
    done = json_of(capsys, "keys", "rotate", "ds", "--what", "kek", "--force-expire", "--wrapping-key-id", "hr")
    assert {row["format"] for row in done["expired"]["rows"]} == {"version", "table", "key"}
    assert "Next" not in text_of(capsys, "keys", "rotate", "ds", "--what", "kek", "--force-expire")
    clear_cache()
    assert decrypted("ds", properties()) == TREE
    assert {name: data for name, data in read_tree(folder / "ds").items() if not name.startswith("_ags/")} == files
    assert {key["wrapping_key_id"] for key in json_of(capsys, "keys", "status", "ds")["keys"]} == {"hr"}


def test_to_another_kms(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    encrypted()
    assert cli.main(["keys", "init", "second", "--key-file", "key2"]) == 0
    assert cli.main(["keys", "create", "second", "n", "--key-file", "key2"]) == 0
    move = ["--new-keystore", "second", "--new-key-file", "key2", "--wrapping-key-id", "n"]
    assert run("keys", "rotate", "ds", "--what", "kek", *move) == EXIT_USAGE
    assert "new_kms" in capsys.readouterr().err
    assert run("keys", "rotate", "ds", "--what", "mek", *move) == 0
    clear_cache()
    assert run("ls", "ds") == 4
    assert decrypted("ds", properties("second", "key2")) == TREE
    back = [word for name, value in properties().items() for word in ("--new-kms", f"{name}={value}")]
    second = ["--keystore", "second", "--key-file", "key2"]
    words = ["keys", "rotate", "ds", "--what", "mek", "--wrapping-key-id", "m", "--from-key-id", "n"]
    assert cli.main([*words, *back, *second]) == 0
    clear_cache()
    assert decrypted("ds", properties()) == TREE
    monkeypatch.setenv("SECRET", "correct horse")
    monkeypatch.setattr(local, "SCRYPT", {"n": 1 << 14, "r": 8, "p": 1})
    assert cli.main(["keys", "init", "third", "--passphrase-env", "SECRET"]) == 0
    assert cli.main(["keys", "create", "third", "m", "--passphrase-env", "SECRET"]) == 0
    assert run(*words[:4], "mek", "--new-keystore", "third", "--new-passphrase-env", "SECRET") == 0
    third = {
        "encryption.kms-type": "local",
        "kms.local.path": str(folder / "third"),
        "kms.local.passphrase-env": "SECRET",
    }
    assert cli.main(["ls", "ds", *kms_options(third)]) == 0
    printed = capsys.readouterr()
    assert "horse" not in printed.out + printed.err


def test_single_wrap_and_what_is_said_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encrypted("--single-wrap")
    told = text_of(capsys, "keys", "status", "ds")
    assert "single wrap" in told
    assert "double wrap" in told
    new_version()
    told = text_of(capsys, "keys", "audit", "ds", "--event", "planned")
    assert "3 data keys of the dataset's version 2" in told
    assert "7 unwrap, 4 wrap" in told  # the KEK of documents is wrapped again, too
    assert run("keys", "rotate", "ds", "--what", "kek", "--concurrency", "2") == 0
    assert re.search("tables +1 done", text_of(capsys, "keys", "rotate", "ds", "--what", "double-wrap"))
    clear_cache()
    assert decrypted("ds", properties()) == TREE


def test_status_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encrypted("--kek-scope", "partition")
    assert run("keys", "rotate", "ds", "--what", "kek") == 0
    lines = text_of(capsys, "keys", "status", "ds").splitlines()
    assert any(line.split() == ["KEK", "scope", "partition"] for line in lines)
    table = lines[lines.index("KEKs") + 1 :]
    table = table[: table.index("")]
    assert len(table) == 1 + 6
    for head in ("kind", "wrapped by", "made", "state", "needed by", "ends"):
        at = table[0].index(head)
        assert all(line[at - 1] == " " and line[at] != " " for line in table), head
    assert sum("may go from 20" in line for line in table) == sum("wraps until 20" in line for line in table) == 3
    assert any("partition:x" in line for line in table)
    assert not any(line.endswith(" ") for line in lines)
    told = text_of(capsys, "keys", "status", "keystore")
    assert "m: 1 version, wraps by 1" in told


def test_audit_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encrypted()
    told = text_of(capsys, "keys", "audit", "ds")
    assert "Nothing is due" in told
    assert "version 1: must stay" in told
    new_version()
    told = text_of(capsys, "keys", "audit", "ds")
    (command,) = [line.strip() for line in told.splitlines() if line.strip().startswith("ags-fast keys rotate")]
    assert cli.main(shlex.split(command)[1:]) == 0
    told = text_of(capsys, "keys", "audit", "ds")
    assert "version 1: may be destroyed" in told
    assert "version 2: must stay" in told
    found = json_of(capsys, "keys", "audit", "ds", "--event", "dek-leaked", "--include", "x/*")
    assert found["steps"][0]["written"]["files"] == 2
    for event in ("kek-leaked", "mek-leaked"):
        told = text_of(capsys, "keys", "audit", "ds", "--event", event)
        assert "KMS calls: " in told
        assert "old copy" in told
    assert "does not help" in " ".join(told.split())


def test_policy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encrypted()
    assert json_of(capsys, "keys", "policy", "ds")["policy"] == asdict(jobs.Policy())
    told = text_of(
        capsys,
        "keys",
        "policy",
        "ds",
        "--kek-scope",
        "files:2",
        "--kek-lifetime",
        "30d",
        "--keep",
        "1",
        "--keep-within",
        "9d",
    )
    assert "files:2" in told
    assert "the newest 1, and those younger than 9 days" in told
    assert json_of(capsys, "keys", "policy", "ds")["policy"] == asdict(jobs.Policy("files:2", 30, keep=1, keep_days=9))
    assert json_of(capsys, "log", "ds")["versions"][0]["operation"] == "policy"
    (folder / "src" / "z").write_bytes(b"z")
    encrypted("--kek-scope", "day")  # and the rest of it stays
    changed = json_of(capsys, "keys", "policy", "ds")["policy"]
    assert changed == asdict(jobs.Policy("day", 30, keep=1, keep_days=9))
    assert json_of(capsys, "keys", "policy", "ds", "--keep-within", "0")["policy"]["keep_days"] is None
    assert json_of(capsys, "keys", "policy", "ds", "--keep", "all")["policy"]["keep"] is None
    assert "all versions" in text_of(capsys, "keys", "policy", "ds")
    number = json_of(capsys, "log", "ds")["versions"][0]["number"]
    assert json_of(capsys, "keys", "policy", "ds")["expires"] == []
    found = json_of(capsys, "keys", "policy", "ds", "--keep", "1")
    first = json_of(capsys, "log", "ds")["versions"][-1]["number"]
    assert found["expires"] == [*range(first, number + 2)]
    assert f"expires versions {first}-{number + 1}" in text_of(capsys, "keys", "policy", "ds")
    number += 1
    assert run("keys", "policy", "ds", "--kek-scope", "moon") == EXIT_USAGE
    assert json_of(capsys, "log", "ds")["versions"][0]["number"] == number


def test_what_the_policy_keeps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who asks to expire more is told, and can."""
    encrypted()
    assert run("rekey", "ds", "--quiet") == 0
    assert run("keys", "policy", "ds", "--keep", "2") == 0
    told = text_of(capsys, "expire", "ds", "--yes")
    assert re.search("versions +1 removed", told)
    assert run("expire", "ds", "--yes", "--keep", "1") == EXIT_INTEGRITY
    said = capsys.readouterr().err
    assert "keeps versions 2 and newer ones" in said
    assert "--force" in said
    assert re.search("versions +1 removed", text_of(capsys, "expire", "ds", "--yes", "--keep", "1", "--force"))
    clear_cache()
    assert decrypted("ds", properties()) == TREE


def test_retired_keks_may_stay_as_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encrypted()
    new_version()
    assert run("keys", "rotate", "ds", "--no-also-retired") == 0
    assert [key["master_version"] for key in json_of(capsys, "keys", "status", "ds")["keys"]] == ["1", "2"]
    assert run("keys", "rotate", "ds") == 0
    assert {key["master_version"] for key in json_of(capsys, "keys", "status", "ds")["keys"]} == {"2"}


def test_upkeep(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encrypted()
    assert run("rekey", "ds", "--quiet") == 0
    assert run("keys", "policy", "ds", "--kek-lifetime", "0", "--keep", "1") == 0
    before = read_tree(folder / "ds")
    planned = json_of(capsys, "maintain", "ds", "--dry-run", "--verify", "1")
    assert read_tree(folder / "ds") == before
    assert {row["status"] for row in planned["rows"]} == {"planned"}
    done = json_of(capsys, "maintain", "ds", "--verify", "1")
    assert {row["format"] for row in done["rows"]} >= {"key", "table", "version", "file", "ags1"}
    assert (done["operation"], done["failed"], done["exit_code"]) == ("maintain", 0, 0)
    assert text_of(capsys, "maintain", "ds", "--quiet") == ""
    assert cli.main(["encrypt", "src", "second", *KMS, "--wrapping-key-id", "m", "--quiet"]) == 0
    assert run("maintain", "ds", "nothing", "second", "--verify", "1", "--json") == EXIT_NOT_FOUND
    lines = capsys.readouterr()
    assert ["version" in json.loads(line) for line in lines.out.splitlines()] == [True, False, True]
    with pytest.raises(SystemExit, match="2"):
        run("maintain", "ds", "second", "--pin", done["pin"])
    with pytest.raises(SystemExit):
        run("maintain", "ds", "--verify", "2")
    file = next(path for path in (folder / "ds" / "x").iterdir() if path.name.startswith("a."))
    file.write_bytes(bytes(len(file.read_bytes())))
    assert json_of(capsys, "maintain", "ds", "--verify", "1", code=EXIT_INTEGRITY)["failed"] == 1
    clear_cache()
    assert cli.main(["keys", "disable", "keystore", "m", "--key-file", "key"]) == 0
    assert run("maintain", "ds") == EXIT_KEY_ACCESS


def test_key_store_elsewhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--kek-store", str(folder / "keys")]
    encrypted(*place)
    assert run("ls", "ds") == EXIT_KEY_ACCESS
    assert "pass key_store=" in capsys.readouterr().err
    assert run("rekey", "ds", "--quiet", *place) == 0
    assert run("keys", "rotate", "ds", "--what", "kek", "--force-expire", "--quiet", *place) == 0
    for command in (
        ["verify", "ds", "--quiet"],
        ["ls", "ds"],
        ["cat", "ds", "x/b"],
        ["sweep", "ds"],
    ):
        assert run(*command, *place) == 0, command
    assert run("decrypt", "ds", "out", "--quiet", *place) == 0
    assert (folder / "out" / "x" / "b").read_bytes() == b"b"
    capsys.readouterr()
    assert run("keys", "audit", "ds", "--event", "planned", *place) == 0
    assert shlex.join(place) in capsys.readouterr().out
    for words in (["keys", "policy", "ds", "--keep", "2"], ["expire", "ds", "--yes"], ["keys", "status", "ds"]):
        assert run(*words, *place) == 0


def test_exit_codes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encrypted()
    for words in (
        ["rotate", "ds", "--what", "dek"],
        ["audit", "ds", "--event", "rain"],
        ["policy", "ds", "--keep", "none"],
        ["rotate", "ds", "--what", "mek", "--new-key-file", "key"],
    ):
        with pytest.raises(SystemExit) as stopped:
            run("keys", *words)
        assert stopped.value.code == 2, words
    for words in (["status", "ds"], ["status", "ds", "--key-file", "key"]):  # which KMS?
        with pytest.raises(SystemExit) as stopped:
            cli.main(["keys", *words])
        assert stopped.value.code == 2, words
    for code, words in (
        (EXIT_NOT_FOUND, ["status", "nowhere"]),
        (EXIT_USAGE, ["audit", "ds", "--include", "x"]),
        (EXIT_KEY_ACCESS, ["rotate", "ds", "--what", "kek", "--wrapping-key-id", "nobody"]),
    ):
        before = read_tree(folder / "ds")
        assert run("keys", *words, "--json") == code, words
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["error_class"]
        assert read_tree(folder / "ds") == before
    clear_cache()
    assert cli.main(["keys", "disable", "keystore", "m", "--key-file", "key"]) == 0
    for words in (["status"], ["audit"], ["rotate", "--what", "mek"], ["policy"]):
        assert run("keys", words[0], "ds", *words[1:]) == EXIT_KEY_ACCESS, words
    assert run("expire", "ds", "--keep", "1", "--yes") == EXIT_KEY_ACCESS
    assert cli.main(["keys", "enable", "keystore", "m", "--key-file", "key"]) == 0
    table = next((folder / "ds" / "_ags" / "tables").iterdir())
    data = bytearray(table.read_bytes())
    data[100] ^= 1
    table.write_bytes(data)
    capsys.readouterr()
    assert run("keys", "rotate", "ds", "--what", "kek") == EXIT_INTEGRITY
    told = capsys.readouterr().out
    assert "failed" in told
    assert "--resume" in told
    data[100] ^= 1
    table.write_bytes(data)
    assert run("keys", "rotate", "ds", "--resume") == 0  # kek is the default
    assert decrypted("ds", properties()) == TREE


def test_the_commands_of_the_documentation(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which docs/rotation.md has them, and what it says of a copy."""
    if not DOCS.exists():
        pytest.skip("there are no docs beside an installed package")
    text = DOCS.read_text()
    commands = [line for line in text.splitlines() if line.startswith("ags-fast ")]
    assert len(commands) > 20
    assert {word for line in commands for word in shlex.split(line)[1:3]} >= {"rotate", "expire", "audit", "status"}
    write_tree(folder / "orders", {"2026/a": b"a", "2025/b": b"b"})
    commands = [line for line in commands if "config init" not in line]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    keystore = ["--keystore", "keystore.json", "--key-file", "keystore.key"]
    assert cli.main(["config", "init", "local", *keystore, "--wrapping-key-id", "sales"]) == 0
    leaked = text.index("--force-expire\n")
    for line in commands:
        if text.index(line) == text.rindex("\nags-fast", 0, leaked) + 1:
            shutil.copytree("orders.enc", "copy")
        clear_cache()
        assert cli.main(shlex.split(line)[1:]) == 0, line
    capsys.readouterr()
    kms = properties("keystore.json", "keystore.key")
    clear_cache()
    assert decrypted("orders.enc", kms) == decrypted("copy", kms) == {"2026/a": b"a", "2025/b": b"b"}
    assert not {entry.file for entry in entries_of("copy", kms)} & {
        entry.file for entry in entries_of("orders.enc", kms)
    }


def entries_of(dataset: str, kms: dict[str, str]) -> list[Any]:
    return list(Access.of(dataset, kms).open().files())


def test_options_say_what_they_were_made_of() -> None:
    aws = {"encryption.kms-type": "aws", "client.region": "eu"}
    assert kms_options(aws) == ["--kms", "encryption.kms-type=aws", "--kms", "client.region=eu"]
    more = {**properties(), "encryption.allowed-key-ids": "m*"}
    path, key = more["kms.local.path"], more["kms.local.key-file"]
    options = ["--keystore", path, "--key-file", key, "--kms", "encryption.allowed-key-ids=m*"]
    assert kms_options(more) == options
    assert load_kms(more).properties == more
    typed = {"encryption.kms-type": "local", "kms.local.path": path}
    typed["kms.local.passphrase-env"] = "AGS_FAST_TYPED_PASSPHRASE"  # which no other shell has
    assert kms_options(typed) == ["--keystore", path]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kms", "encryption.allowed-key-ids=m", "--kms", "encryption.allowed-key-ids=*"], "ids twice"),
        (["--kms", "encryption.kms-type=aws"], "encryption.kms-type=... does not go with --keystore"),
        (["--kms", "encryption.kms-impl=a:B"], "encryption.kms-impl=... does not go with --keystore"),
    ],
)
def test_options_that_contradict_each_other(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    encrypted()
    with pytest.raises(SystemExit) as ended:
        run("verify", "ds", *options)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert run("verify", "ds", "--kms", "encryption.allowed-key-id=m") != 0
    assert "encryption.allowed-key-ids" in capsys.readouterr().err
