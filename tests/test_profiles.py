"""Profiles of config.toml: in Python and on the command line."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from kms_clients import keystore
from kms_services import started
from support import run_python

import ags_fast
from ags_fast import cli
from ags_fast.cli.codes import EXIT_CONFIGURATION, EXIT_KEY_ACCESS, EXIT_NOT_FOUND, EXIT_USAGE
from ags_fast.cli.commands import GROUPS, TEXTS
from ags_fast.cli.keys import COMMANDS as KEYS_COMMANDS
from ags_fast.cli.keystore import COMMANDS as KEYSTORE_COMMANDS
from ags_fast.profiles import COMMANDS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("AGS_FAST_CONFIG", raising=False)
    monkeypatch.delenv("AGS_FAST_PROFILE", raising=False)
    path = tmp_path / "xdg" / "ags_fast" / "config.toml"
    path.parent.mkdir(parents=True)
    return path


def write(path: Path, properties: dict[str, str], name: str = "sales", **settings: str) -> None:
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in {**properties, **settings}.items()]
    with path.open("a") as file:
        print(f"[profiles.{name}]", *lines, sep="\n", file=file)


def as_json(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main([*args, "--json"]) == code
    return dict(json.loads(capsys.readouterr().out))


def test_a_profile_of_the_environment_that_is_gone(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only commands that would take something from the profile end, and the error names the variable."""
    monkeypatch.setenv("AGS_FAST_PROFILE", "gone")
    with pytest.raises(SystemExit) as end:
        cli.main(["ls", str(tmp_path)])
    assert end.value.code == EXIT_USAGE
    assert "AGS_FAST_PROFILE names it" in capsys.readouterr().err
    assert cli.main(["keys", "init", str(tmp_path / "store"), "--key-file", str(tmp_path / "key")]) == 0
    assert as_json(capsys, "config", "show")["profile"] is None
    with pytest.raises(SystemExit):  # the command line names it
        cli.main(["config", "show", "--profile", "gone"])


def test_defaults_of_commands(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(config, keystore(tmp_path, "master"), wrapping_key_id="master")
    before = config.read_text()
    (tmp_path / "src").mkdir()
    for name in ("a", "b"):
        (tmp_path / "src" / name).write_bytes(b"one")
    options = 'block-size = "64K"\nfsync = false\nexclude = ["b*"]\ndek_length = 32\n'
    config.write_text(f"{before}[profiles.sales.encrypt]\n{options}")
    source, dataset = str(tmp_path / "src"), str(tmp_path / "dataset")
    found = as_json(capsys, "encrypt", source, dataset, "--profile", "sales")
    rows = {os.path.basename(row["src"]): row for row in found["rows"]}
    assert (rows["a"]["block_size"], rows["a"]["status"], rows["b"]["status"]) == (64 << 10, "ok", "skipped")
    found = as_json(capsys, "encrypt", source, f"{dataset}2", "--profile", "sales", "--block-size", "1M")
    assert found["rows"][0]["block_size"] == 1 << 20
    assert ags_fast.profile("sales").commands["encrypt"]["dek_length"] == 32
    for wrong, said in {
        "no-such = 1": "no-such is not an option of encrypt",
        "dek_length = 17": "dek_length is one of 16, 24, 32",
        "overwrite = 1": "overwrite is true or false",
        "format = true": "format is text or a number",
        'format = "zip"': "format is one of ags1, parquet",
        'exclude = "b"': "exclude is a list",
        'block_size = "much"': "a number of bytes is required",
        'file = "x"': "file is not an option of encrypt",
    }.items():
        config.write_text(f"{before}[profiles.sales.encrypt]\n{wrong}\n")
        with pytest.raises(SystemExit) as end:
            cli.main(["encrypt", source, f"{dataset}3", "--profile", "sales"])
        assert end.value.code == EXIT_USAGE
        assert said in capsys.readouterr().err, wrong
    assert not os.path.exists(f"{dataset}3")


def test_every_command_of_a_profile_is_one() -> None:
    on_datasets = TEXTS.keys() - {*GROUPS, "help", "completion"}
    keys = {command.name for command in [*KEYS_COMMANDS, *KEYSTORE_COMMANDS]}
    assert set(COMMANDS) <= on_datasets | keys
    assert on_datasets <= set(COMMANDS)


def test_commands_use_the_profile(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = keystore(tmp_path, "master", "other")
    write(config, properties, wrapping_key_id="master")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a").write_bytes(b"one")
    source, dataset = str(tmp_path / "src"), str(tmp_path / "dataset")
    assert as_json(capsys, "encrypt", source, dataset, "--profile", "sales")["ok"] == 1
    monkeypatch.setenv("AGS_FAST_PROFILE", "sales")
    assert [file["path"] for file in as_json(capsys, "ls", dataset)["files"]] == ["a"]
    assert as_json(capsys, "inspect", dataset)["keys"][0]["wrapping_key_id"] == "master"
    second = f"{dataset}2"  # the option wins
    as_json(capsys, "encrypt", source, second, "--wrapping-key-id", "other")
    assert as_json(capsys, "inspect", second)["keys"][0]["wrapping_key_id"] == "other"
    found = ags_fast.profile()
    assert (found.kms, found.wrapping_key_id, found.storage_options) == (properties, "master", None)


def test_show_says_what_comes_from_where(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(config, keystore(tmp_path), wrapping_key_id="master")
    shown = as_json(capsys, "config", "show", "--profile", "sales", "--wrapping-key-id", "other")
    settings = {row["name"]: (row["value"], row["from"]) for row in shown["settings"]}
    assert settings["kms.local.path"] == (str(tmp_path / "keystore"), "profile sales")
    assert settings["wrapping_key_id"] == ("other", "command line")
    assert cli.main(["config", "show"]) == 0
    assert "no profile" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["local", "aws"])
def test_check_wraps_a_probe(name: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with started(name, tmp_path) as service:
        write(config, service.properties, wrapping_key_id=service.new_key())
        write(config, service.properties, "lost", wrapping_key_id=service.unknown)
        write(config, service.properties, "bare")
        found = as_json(capsys, "config", "check", "--profile", "sales")
        assert found["wraps"]
        assert found["unwraps"]
        failed = as_json(capsys, "config", "check", "--profile", "lost", code=EXIT_KEY_ACCESS)
        assert failed["error_class"] == "KeyAccessError"
        bare = as_json(capsys, "config", "check", "--profile", "bare", code=EXIT_CONFIGURATION)
        assert "wrapping_key_id" in bare["error"]


def test_an_unknown_profile_names_the_others(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(config, {"encryption.kms-type": "local"})
    write(config, {"encryption.kms-type": "local"}, "hr")
    with pytest.raises(SystemExit) as ended:
        cli.main(["ls", "nowhere", "--profile", "salse"])
    assert ended.value.code == EXIT_USAGE
    assert "hr, sales" in capsys.readouterr().err
    with pytest.raises(ValueError, match="hr, sales"):
        ags_fast.profile("salse")


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("vault.token", "hvs.CAESIJ"),
        ("kms.local.key-file", "00112233445566778899aabbccddeeff"),
        ("kms.endpoint", "https://me:hunter2@kms"),
        ("vault.address", "AAECAwQFBgcICQoLDA0ODw=="),
        ("kms.pkcs11.pin", "1234"),
        ("client.region", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
    ],
)
def test_a_secret_is_refused_unseen(name: str, secret: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(config, {name: secret})
    assert cli.main(["config", "show", "--profile", "sales"]) == EXIT_CONFIGURATION
    printed = capsys.readouterr()
    assert name in printed.err
    assert secret not in printed.out + printed.err
    with pytest.raises(ValueError, match="looks like a secret") as raised:
        ags_fast.profile("sales")
    assert secret not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kms.encryption-context.sasha", "x"),
        ("wrapping_key_id", "SalesDepartmentMasterKeyOfTheYear2026"),
        ("wrapping_key_id", "arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"),
        ("vault.token-env", "VAULT_TOKEN"),
    ],
)
def test_names_are_no_secrets(name: str, value: str, config: Path) -> None:
    write(config, {name: value})
    assert value in (*ags_fast.profile("sales").kms.values(), ags_fast.profile("sales").wrapping_key_id)


def test_malformed_configurations(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("[profiles.sales]\nkms.local.path = 'x'\n")
    with pytest.raises(ValueError, match="quote the names"):
        ags_fast.profile("sales")
    config.write_text("[profiles.sales]\nhunter2")
    with pytest.raises(ValueError, match="is not TOML") as raised:
        ags_fast.profile("sales")
    assert "hunter2" not in str(raised.value)
    monkeypatch.setenv("AGS_FAST_CONFIG", str(config) + ".gone")
    assert cli.main(["config", "show", "--profile", "sales"]) == EXIT_NOT_FOUND


def test_paths_start_at_the_configuration(config: Path) -> None:
    write(config, {"kms.local.path": "keystore", "kms.local.key-file": "~/key"})
    assert ags_fast.profile("sales").kms == {
        "kms.local.path": str(config.parent / "keystore"),
        "kms.local.key-file": os.path.expanduser("~/key"),
    }


def test_the_import_stays_small() -> None:
    assert run_python("import sys, ags_fast; print('tomllib' in sys.modules)").strip() == "False"
