"""What a command says of an error: the options that help, in the words of the shell, and the path that is wrong."""

from __future__ import annotations

import argparse
import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, make_kms, write_tree

pytest.importorskip("pyarrow")

from ags_fast import AgsCodec, cli, jobs
from ags_fast.cli.codes import ConfigurationError, message_of, named
from ags_fast.cli.options import option
from ags_fast.errors import IntegrityError, KeyAccessError, PolicyError
from ags_fast.parquet import Keys

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("without_workers")
OPTIONS = {one.name: one for one in (option(f"--{name}") for name in ("overwrite", "min-version", "version", "force"))}
ARGS = argparse.Namespace(file="src", overwrite=False, options=OPTIONS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("it is there: pass overwrite=True to replace it", "it is there: pass --overwrite to replace it"),
        ("it is older (min_version=7)", "it is older (--min-version 7)"),
        ("no option: other=True", "no option: other=True"),
        ("ds/version=3/a is damaged", "ds/version=3/a is damaged"),
        ("version=3/a is damaged", "version=3/a is damaged"),
        ("a/version=3 is damaged", "a/version=3 is damaged"),
    ],
)
def test_arguments_become_options(text: str, said: str) -> None:
    assert message_of(PolicyError(text), ARGS) == said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PolicyError("too old"), "src: too old"),
        (PolicyError("src is too old"), "src is too old"),
        (PolicyError(f"{os.path.abspath('src')}/a: too old"), f"{os.path.abspath('src')}/a: too old"),
        (PolicyError("my-src and src2 are too old"), "src: my-src and src2 are too old"),
        (IntegrityError("a tag is wrong"), "src: a tag is wrong"),
        (KeyAccessError("the KMS refused"), "the KMS refused"),
        (ConfigurationError("set vault.address"), "set vault.address"),
        (OSError(errno.ENOENT, "No such file", "/dst/x"), "No such file: '/dst/x'"),
        (
            FileExistsError(errno.EEXIST, "File exists", "/dst/x"),
            "File exists: '/dst/x': --overwrite replaces the file",
        ),
    ],
)
def test_the_path_is_the_one_that_is_wrong(error: Exception, said: str) -> None:
    assert named(message_of(error, ARGS), error, ARGS) == said


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    write_tree(tmp_path / "src", {"a": b"one"})
    monkeypatch.chdir(tmp_path)
    return [text for name, value in make_kms(tmp_path).items() for text in ("--kms", f"{name}={value}")]


def said_by(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = cli.main(list(argv))
    return code, capsys.readouterr().err.removeprefix("ags-fast: ").removesuffix("\n")


def test_commands(tree: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encrypt = ("--wrapping-key-id", MASTER, "--no-fsync", *tree)
    code, said = said_by(capsys, "encrypt", "src/a", "ds", *encrypt)
    assert (code, "stream encrypt" in said, said.count("src/a")) == (5, True, 1)
    assert not (tmp_path / "ds").exists()
    assert said_by(capsys, "encrypt", "src", "/proc/none/ds", *encrypt) == (
        5,
        "No such file or directory: '/proc/none'",
    )
    assert cli.main(["encrypt", "src", "ds", *encrypt]) == 0
    capsys.readouterr()
    (tmp_path / "src/a").write_bytes(b"another")
    assert cli.main(["encrypt", "src", "ds", *encrypt]) == 2
    shown = capsys.readouterr()
    told = shown.out + shown.err
    assert "overwrite=True" not in told
    assert "--overwrite" in told
    code, said = said_by(capsys, "verify", "ds", "--min-version", "7", *tree)
    assert "min_version=7" not in said
    (tmp_path / "key").write_bytes(bytes(range(16)))
    (tmp_path / "key").chmod(0o600)
    assert cli.main(["stream", "encrypt", "src/a", "--data-key-file", "key"]) == 0
    capsys.readouterr()
    code, said = said_by(capsys, "stream", "encrypt", "src/a", "--data-key-file", "key")
    assert (code, said) == (2, f"File exists: '{tmp_path / 'src/a.ags'}': --overwrite replaces the file")


def test_what_is_no_argument_at_all(tree: list[str], tmp_path: Path) -> None:
    kms = dict(option.split("=", 1) for option in tree[1::2])
    text: Any = "spark"
    none: Any = None
    with pytest.raises(TypeError, match=r"SparkEngine\(spark\).* not 'str'"):
        jobs.encrypt_files("src", "ds", kms=kms, wrapping_key_id=MASTER, engine=text)
    assert not (tmp_path / "ds").exists()
    with pytest.raises(ValueError, match="kms is not given"):
        jobs.encrypt_files("src", "ds", kms=none, wrapping_key_id=MASTER)
    with pytest.raises(TypeError, match="the footer key is 16, 24 or 32 bytes, not 'str'"):
        Keys(text)
    with pytest.raises(TypeError, match="an AES key is 16, 24 or 32 bytes, not 'NoneType'"):
        AgsCodec(none)
