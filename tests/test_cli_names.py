"""Names that a shell gives: with colons, ids with a leading "-", patterns that are names, links that lead nowhere."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, encrypt, read_tree, write_tree
from kms_clients import keystore

from ags_fast.cli import main
from ags_fast.cli.codes import EXIT_USAGE
from ags_fast.fs import NewFile, Store, file_at
from ags_fast.jobs import open_file
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COLONS = ["a:b", "a::b", "2026-01-01T10:00:00.csv", "c:\\x", ":", "zip", "s3:bucket", "a::b::c"]


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return keystore(tmp_path, MASTER)


def options_of(kms: dict[str, str]) -> list[str]:
    return [word for name, value in kms.items() for word in ("--kms", f"{name}={value}")]


@pytest.fixture
def run(kms: dict[str, str], capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """A command that ends well; returns what it tells in JSON."""

    def command(*words: str) -> dict[str, Any]:
        assert main([*words, *options_of(kms), "--json"]) == 0, capsys.readouterr().err
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        return told

    return command


@pytest.mark.parametrize("name", COLONS)
@pytest.mark.parametrize("absolute", [False, True])
def test_local_names_with_colons(
    tmp_path: Path, kms: dict[str, str], run: Any, name: str, absolute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a source, a dataset, a folder to decrypt into, a file to copy in and out."""
    monkeypatch.chdir(tmp_path)
    above = f"{tmp_path}/" if absolute else ""
    tree = {name: b"1", f"in/{name}": b"22"}
    write_tree(tmp_path / f"src{name}", tree)
    source, dataset, back = (f"{above}{each}{name}" for each in ("src", "ds", "back"))
    found = run("encrypt", source, dataset, "--wrapping-key-id", MASTER)
    assert {row["dst"] for row in found["rows"]} == tree.keys()
    run("decrypt", dataset, back)
    assert read_tree(tmp_path / f"back{name}") == tree
    out = f"{above}out{name}"
    run("cp", f"{dataset}:{name}", out)
    assert (tmp_path / f"out{name}").read_bytes() == b"1"
    run("cp", out, f"{dataset}:copied{name}")
    assert open_file(dataset, f"copied{name}", kms=kms).read() == b"1"
    assert run("rm", dataset, name)["ok"] == 1
    store, file = file_at(out)
    assert (store.local, file, Store(source).full_path("x")) == (True, f"out{name}", f"{tmp_path}/src{name}/x")


def test_chains_stay_chains() -> None:
    for url in ("zip://a::file:///b", "simplecache::s3://a/b", "zip::b.zip", "dir://::file:///x", "cached::zip://a::b"):
        assert not Store(url).local


def test_a_dataset_that_is_not_there_is_named(tmp_path: Path, kms: dict[str, str], capsys: Any) -> None:
    (tmp_path / "a").write_bytes(b"1")
    assert main(["cp", str(tmp_path / "a"), f"{tmp_path}/none:a", *options_of(kms)]) != 0
    assert f"{tmp_path}/none" in capsys.readouterr().err
    assert main_usage(["cp", str(tmp_path / "a"), f"{tmp_path}/b", *options_of(kms)]) == EXIT_USAGE


def main_usage(words: list[str]) -> Any:
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code


@pytest.mark.parametrize("key_id", ["-odd", "--even", "-1", "-x=y"])
def test_ids_with_a_leading_dash(tmp_path: Path, kms: dict[str, str], run: Any, key_id: str) -> None:
    local.create_key(kms, key_id)
    write_tree(tmp_path / "src", {"a": b"1"})
    found = run("encrypt", str(tmp_path / "src"), str(tmp_path / "ds"), "--wrapping-key-id", key_id)
    assert found["ok"] == 1
    assert run("keys", "rotate", str(tmp_path / "ds"), "--what", "kek", "--from-key-id", key_id)["failed"] == 0


def test_a_forgotten_value_is_still_an_error(capsys: Any) -> None:
    assert main_usage(["encrypt", "src", "ds", "--wrapping-key-id", "--dry-run"]) == EXIT_USAGE
    assert main_usage(["encrypt", "src", "ds", "--wrapping-key-id", "--resume=length"]) == EXIT_USAGE
    assert main_usage(["encrypt", "src", "ds", "--wrapping-key-id"]) == EXIT_USAGE
    assert capsys.readouterr().err.count("--wrapping-key-id: expected one argument") == 3
    assert main_usage(["encrypt", "src", "ds", "--overwrit"]) == EXIT_USAGE


@pytest.mark.parametrize("how", ["rm", "decrypt", "verify", "rekey", "encrypt"])
def test_a_command_says_what_a_pattern_matched(
    tmp_path: Path, kms: dict[str, str], capsys: pytest.CaptureFixture[str], how: str
) -> None:
    src, dataset = tmp_path / "src", tmp_path / "ds"
    write_tree(src, {"[a]": b"1", "a": b"2", "b1": b"3", "b2": b"4", "c": b"5"})
    encrypt(src, dataset, kms).raise_for_failures()
    words = {
        "rm": ["rm", str(dataset), "[a]", "b*"],
        "decrypt": ["decrypt", str(dataset), str(tmp_path / "back"), "--include", "[a]", "--include", "b*"],
        "verify": ["verify", str(dataset), "--include", "[a]", "--include", "b*"],
        "rekey": ["rekey", str(dataset), "--include", "[a]", "--include", "b*"],
        "encrypt": ["encrypt", str(src), str(tmp_path / "new"), "--include", "[a]", "--include", "b*"],
    }[how]
    more = ["--wrapping-key-id", MASTER] if how == "encrypt" else []
    assert main([*words, *more, *options_of(kms)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    names = {words[2].rpartition("/")[2] for words in lines if words[:2] == ["ok", "ags1"]}
    assert names == {"[a]", "b1", "b2"}


def test_without_a_pattern_no_file_is_listed(tmp_path: Path, kms: dict[str, str], capsys: Any) -> None:
    write_tree(tmp_path / "src", {"a": b"1"})
    encrypt(tmp_path / "src", tmp_path / "ds", kms).raise_for_failures()
    assert main(["verify", str(tmp_path / "ds"), *options_of(kms)]) == 0
    assert "ags1" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["stream encrypt", "stream decrypt", "parquet encrypt", "cp", "keys audit"])
@pytest.mark.parametrize("leads", ["nowhere", "to a file"])
def test_outputs_follow_no_link_without_force(
    tmp_path: Path, kms: dict[str, str], command: str, leads: str, capsys: Any
) -> None:
    """Somebody who may write to the folder could have made the link, so that the output gets elsewhere."""
    there = tmp_path / "elsewhere" / "there"
    there.parent.mkdir()
    if leads != "nowhere":
        there.write_bytes(b"kept")
    out = tmp_path / "out"
    out.symlink_to(there)
    words = _output_to(out, tmp_path, kms, command)
    assert main(words) == EXIT_USAGE
    assert "--overwrite" in capsys.readouterr().err
    assert [path.name for path in there.parent.iterdir()] == ([] if leads == "nowhere" else ["there"])
    assert out.is_symlink()
    if leads != "nowhere":
        assert there.read_bytes() == b"kept"
    assert main([*words, "--overwrite"]) == 0
    assert there.read_bytes() not in (b"", b"kept")


def _output_to(out: Path, tmp_path: Path, kms: dict[str, str], command: str) -> list[str]:
    """Return the words of a command that writes a file."""
    key, plain, stream = tmp_path / "raw.key", tmp_path / "plain", tmp_path / "plain.ags"
    key.write_bytes(bytes(range(16)))
    key.chmod(0o600)
    plain.write_bytes(b"plain")
    raw = ["--data-key-file", str(key), "--key-format", "raw"]
    if command.startswith("stream"):
        if command == "stream encrypt":
            return [*command.split(), str(plain), "-o", str(out), *raw]
        assert main(["stream", "encrypt", str(plain), "-o", str(stream), *raw, "--quiet"]) == 0
        return [*command.split(), str(stream), "-o", str(out), "--length", str(stream.stat().st_size), *raw]
    if command == "parquet encrypt":
        pa = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"n": range(9)}), plain)
        return ["parquet", "encrypt", str(plain), "-o", str(out), "--footer-key-file", str(key)]
    write_tree(tmp_path / "src", {"a": b"1"})
    encrypt(tmp_path / "src", tmp_path / "ds", kms).raise_for_failures()
    if command == "cp":
        return ["cp", f"{tmp_path}/ds:a", str(out), *options_of(kms)]
    return ["keys", "audit", str(tmp_path / "ds"), "--html", str(out), *options_of(kms)]


def test_the_library_follows_its_callers_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with NewFile(tmp_path / "link") as new:
        new.write(b"1")
        new.publish()
    assert (tmp_path / "there").read_bytes() == b"1"
