"""What the commands exit with: the same code for the same cause, whatever they are about."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support import flip, pattern

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from ags_fast import cli
from ags_fast.cli.codes import code_of, code_of_all, code_of_rows
from ags_fast.errors import (
    AgsError,
    ConcurrentChangeError,
    FormatError,
    IntegrityError,
    JobEndedError,
    KeyAccessError,
    KeyLimitError,
    PolicyError,
    UnknownOutcomeError,
)
from ags_fast.keys import clear_cache
from ags_fast.keys.kms import UnaccountedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("without_workers")

KEYSTORE = ["--key-file", "key"]
KMS = ["--keystore", "keystore", *KEYSTORE]
KEY = ["--data-key-file", "stream.key"]
FOOTER = ["--footer-key-file", "stream.key"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The current directory: a keystore, a dataset, a stream of 100,036 bytes and a Parquet file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src" / "x").mkdir(parents=True)
    (tmp_path / "src" / "x" / "a").write_bytes(pattern(100_000))
    (tmp_path / "src" / "b").write_bytes(b"plain b")
    (tmp_path / "stream.key").write_bytes(bytes(range(100, 116)))
    (tmp_path / "stream.key").chmod(0o600)
    pq.write_table(pa.table({"id": range(1000)}), tmp_path / "f.parquet")
    for command in (
        ["keys", "init", "keystore", *KEYSTORE],
        ["keys", "create", "keystore", "m", *KEYSTORE],
        ["encrypt", "src", "ds", "--wrapping-key-id", "m", "--quiet", *KMS],
        ["stream", "encrypt", "src/x/a", "-o", "a.ags", *KEY],
        ["parquet", "encrypt", "f.parquet", *FOOTER],
    ):
        assert cli.main(command) == 0
    capsys.readouterr()
    return tmp_path


def object_b(folder: Path) -> Path:
    """The object of the dataset that holds b."""
    (found,) = (folder / "ds").glob("b.*.ags")
    return found


def run(*arguments: str) -> int:
    """The exit code; argparse ends with an exception."""
    try:
        return cli.main(list(arguments))
    except SystemExit as stopped:
        return int(stopped.code or 0)


def test_done(folder: Path) -> None:
    for command in (
        ["stream", "verify", "a.ags", "--length", "100036", *KEY],
        ["parquet", "verify", "f.enc.parquet", *FOOTER],
        ["verify", "ds", *KMS],
        ["verify", "ds", "--strict", *KMS],
        ["keys", "status", "ds", *KMS],
        ["keys", "list", "keystore", *KEYSTORE],
    ):
        assert run(*command) == 0, command


def test_what_is_there(folder: Path) -> None:
    assert run("stream", "encrypt", "src/x/a", "-o", "a.ags", *KEY) == 2  # it is there
    assert run("parquet", "encrypt", "f.parquet", *FOOTER) == 2
    assert run("keys", "init", "keystore", *KEYSTORE) == 2
    assert run("keys", "create", "keystore", "m", *KEYSTORE) == 2
    assert run("decrypt", "ds", "out", *KMS) == 0
    assert run("decrypt", "ds", "out", *KMS) == 2
    assert run("verify", "ds", "--min-version", "3", *KMS) == 3


def test_usage(folder: Path) -> None:
    for command in (
        ["nonsense"],
        ["stream", "verify", "a.ags", *KEY],
        ["stream", "decrypt", "src/b", "--length", "1", *KEY],
        ["stream", "encrypt", "src/b", "--aad-prefix-hex", "xy", *KEY],
        ["parquet", "encrypt", "f.parquet", *FOOTER, "--column-key", "no=stream.key", "-o", "new"],
        ["verify", "ds"],
        ["encrypt", "src", "new", "--wrapping-key-id", "m", "--aad-prefix", "no number", *KMS],
        ["encrypt", "src", "src/new", "--wrapping-key-id", "m", *KMS],
        ["keys", "policy", "ds", "--kek-scope", "moon", *KMS],
        ["keys", "create", "keystore", "a\nb", *KEYSTORE],
    ):
        assert run(*command) == 2, command


def test_integrity(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = object_b(folder)
    for path in (folder / "a.ags", folder / "f.enc.parquet", held):
        path.write_bytes(flip(path.read_bytes(), 300))
    assert run("stream", "verify", "a.ags", "--length", "100036", *KEY) == 3
    assert run("stream", "inspect", "src/b") == 3  # of another format
    assert run("parquet", "verify", "f.enc.parquet", "absent", *FOOTER) == 3  # which is worse than another's 5
    for command in (["verify", "ds"], ["verify", "ds", "--strict"], ["decrypt", "ds", "out"], ["cat", "ds", "b"]):
        assert run(*command, *KMS) == 3, command
    assert run("verify", "ds", "--max-failures", "0", *KMS) == 3
    held.unlink()
    assert run("verify", "ds", *KMS) == 3
    data = (folder / "keystore").read_bytes()
    (folder / "keystore").write_bytes(flip(data, 8 * len(data) - 200))
    assert run("keys", "list", "keystore", *KEYSTORE) == 3


def test_nothing_is_not_green(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A scheduled check of a dataset that has no log any more, and a name that matches nothing, are no success."""
    for command in (["verify"], ["rekey"], ["rm"], ["keys", "audit", "--event", "dek-leaked"], ["decrypt"]):
        first, *more = command
        arguments = ["out"] if first == "decrypt" else []
        pattern = ["tpyo/*"] if first == "rm" else ["--include", "tpyo/*"]
        code = run(first, *more[:1], "ds", *arguments, *more[1:], *pattern, *KMS)
        assert code == 5, command
        assert "tpyo" in capsys.readouterr().err, command
    shutil.rmtree("ds/_ags/log")
    for command in (["verify"], ["verify", "--strict"], ["rekey"], ["decrypt"], ["cat"], ["ls"], ["rm"]):
        arguments = {"decrypt": ["out"], "cat": ["b"], "rm": ["b"]}.get(command[0], [])
        assert run(command[0], "ds", *arguments, *command[1:], *KMS) == 3, command
        assert "the log of the dataset at " in capsys.readouterr().err
    assert not (folder / "out").exists() or not any((folder / "out").iterdir())


def test_key_access(folder: Path) -> None:
    clear_cache()
    (folder / "other.key").write_bytes(bytes(32))
    for command in (
        ["stream", "verify", "a.ags", "--length", "100036", "--key-env", "AGS_TEST_ABSENT"],
        ["parquet", "verify", "f.enc.parquet", "--footer-key-file", "absent"],
        ["verify", "ds", "--keystore", "keystore", "--key-file", "other.key"],
        ["verify", "ds", "--keystore", "absent", *KEYSTORE],
        ["encrypt", "src", "new", "--wrapping-key-id", "unknown", *KMS],
        ["keys", "rotate", "ds", "--wrapping-key-id", "unknown", *KMS],
        ["keys", "list", "keystore", "--key-file", "absent"],
    ):
        assert run(*command) == 4, command


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
def test_no_permission(folder: Path) -> None:
    (folder / "a.ags").chmod(0)
    assert run("stream", "inspect", "a.ags") == 5


def test_not_found(folder: Path) -> None:
    for command in (
        ["stream", "inspect", "absent"],
        ["stream", "encrypt", "absent", *KEY],
        ["stream", "encrypt", "src/b", "-o", "nowhere/b", *KEY],
        ["parquet", "inspect", "absent"],
        ["parquet", "verify", "f.enc.parquet", "absent", *FOOTER],
        ["encrypt", "absent", "new", "--wrapping-key-id", "m", *KMS],
        *([command, "absent", *KMS] for command in ("verify", "ls", "rekey")),
        ["inspect", "absent"],
        ["decrypt", "absent", "out", *KMS],
        ["cat", "ds", "absent", *KMS],
        *(["keys", command, "absent", *KMS] for command in ("status", "rotate", "audit", "policy")),
        ["expire", "absent", "--yes", *KMS],
    ):
        assert run(*command) == 5, command
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    "properties",
    [
        ["encryption.kms-type=amazon"],
        ["encryption.kms-impl=nowhere_at_all:Kms"],
        ["encryption.kms-type=local"],
        ["encryption.kms-type=local", "encryption.kms-impl=a:b"],
        ["encryption.kms-type=local", "kms.local.path=keystore", "kms.local.key-fil=key"],
    ],
)
def test_configuration(folder: Path, properties: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    kms = [word for pair in properties for word in ("--kms", pair)]
    for command in (
        ["verify", "ds"],
        ["encrypt", "src", "new", "--wrapping-key-id", "m"],
        ["cat", "ds", "b"],
        ["ls", "ds"],
        ["sweep", "ds"],
        ["keys", "status", "ds"],
        ["keys", "rotate", "ds"],
    ):
        assert run(*command, *kms, "--json") == 6, command
        assert json.loads(capsys.readouterr().out)["error_class"] == "ConfigurationError"
    assert run("keys", "rotate", "ds", "--what", "mek", *KMS, "--new-kms", properties[0]) == 6
    assert not (folder / "new").exists()


def test_missing_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("boto3", "pyspark", "pyspark.sql"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    assert run("verify", "ds", "--kms", "encryption.kms-type=aws", "--kms", "client.region=x") in (4, 6)
    assert run("verify", "ds", "--engine", "spark", *KMS) == 6


def test_spark_without_java(folder: Path) -> None:
    pytest.importorskip("pyspark")
    words = ["verify", "ds", "--engine", "spark", "--spark-master", "local[1]", *KMS]
    env = {**os.environ, "JAVA_HOME": str(folder / "src")}  # where there is no Java
    done = subprocess.run([sys.executable, "-m", "ags_fast", *words], env=env, capture_output=True, text=True)
    assert done.returncode == 6
    assert "Spark does not start: it needs Java 17 or newer" in done.stderr


def test_files_that_no_version_knows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(object_b(folder), "ds/extra.ags")
    assert run("verify", "ds", *KMS) == 0
    shown = capsys.readouterr()
    assert "ags-fast: warning: " in shown.err
    assert "ds: 1 file is in the dataset's folder that no version" in shown.err
    assert "skipped      1 (1 ExtraFile)" in shown.out
    shutil.copy(object_b(folder), "ds/another.ags")
    assert run("verify", "ds", "--strict", "--json", *KMS) == 1
    shown = capsys.readouterr()
    assert "2 files are in the dataset's folder" in shown.err
    result = json.loads(shown.out)
    assert (result["exit_code"], result["skipped_by"]) == (1, {"ExtraFile": 2})
    object_b(folder).unlink()
    assert run("verify", "ds", "--strict", *KMS) == 3


def test_what_was_skipped_is_said_by_kind(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy("a.ags", "src/sealed")
    assert run("encrypt", "src", "ds", "--wrapping-key-id", "m", *KMS) == 0
    assert "skipped      3 (1 AlreadyEncryptedError, 2 Unchanged)" in capsys.readouterr().out


def test_codes_of_errors() -> None:
    class OwnError(IntegrityError, ValueError):
        pass

    for error, code in (
        (AgsError(), 1),
        (ConcurrentChangeError(), 7),
        (JobEndedError(), 7),
        (UnknownOutcomeError(), 7),
        (PolicyError(), 3),
        (FileExistsError(), 2),
        (OSError(28, "full"), 5),
        (TimeoutError(), 5),
        (IntegrityError(""), 3),
        (FormatError(), 3),
        (OwnError(""), 3),
        (KeyAccessError(), 4),
        (KeyLimitError(), 4),
        (UnaccountedError(), 4),
        (FileNotFoundError(), 5),
        (PermissionError(), 5),
        (ModuleNotFoundError(), 6),
        (ValueError(), 2),
    ):
        assert code_of(error) == code, error
    assert [code_of_all(codes) for codes in ([], [0, 0], [0, 5], [5, 4], [1, 3, 4])] == [0, 0, 5, 1, 3]
    names: Callable[..., int] = lambda *classes: code_of_rows(classes)  # noqa: E731
    assert [names(), names("KeyAccessError"), names("KeyAccessError", "OSError")] == [0, 4, 1]
    assert [names("FileNotFoundError"), names("AnyError", None), names("OSError", "IntegrityError")] == [1, 1, 3]
    assert [names("FileExistsError"), names("FileExistsError", "OSError"), names("ValueError")] == [2, 1, 1]
