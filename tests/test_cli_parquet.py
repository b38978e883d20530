"""`ags-fast parquet`, as a shell sees it: output, exit codes, and what it leaves behind."""

from __future__ import annotations

import base64
import io
import json
import os
import pty
import stat
import subprocess
import sys
import termios
from typing import TYPE_CHECKING, Any

import parquet_peers as peers
import pytest
from parquet_corpus import flat, nested
from parquet_peers import rows_of
from programs import commands
from support import flip, program, python_env, run_python

from ags_fast import cli
from ags_fast import parquet as apq
from ags_fast.cli.codes import EXIT_INTEGRITY, EXIT_KEY_ACCESS, EXIT_NOT_FOUND, EXIT_USAGE
from ags_fast.parquet import FOOTER_KEY, Keys

if TYPE_CHECKING:
    from pathlib import Path

pq = peers.pq

KF, K1, K2, NEW = bytes(range(16)), bytes(range(100, 132)), bytes(range(50, 74)), bytes(range(200, 216))
FOOTER = ["--footer-key-file", "kf"]
KEYS = [*FOOTER, "--column-key", "text=k1", "--column-key-env", "bytes=AGS_TEST_K2"]
ALL = Keys(KF, {"text": K1, "bytes": K2})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: two Parquet files, and keys in files of every form and in the environment."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(flat(), "flat.parquet", row_group_size=200, write_page_index=True)
    pq.write_table(nested(), "nested.parquet")
    for name, data in (("kf", KF), ("k1", K1.hex().encode()), ("new", base64.b64encode(NEW) + b"\n")):
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o600)
    monkeypatch.setenv("AGS_TEST_K2", K2.hex())
    return tmp_path


def run(*args: object) -> int:
    return cli.main(["parquet", *map(str, args)])


def answer(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert run(*args, "--json") == code
    shown = capsys.readouterr()
    result: dict[str, Any] = json.loads(shown.out)
    if not code:
        assert shown.err == ""
    return result


def rows(path: str | Path) -> Any:
    return rows_of(pq.read_table(path))


# ---------------------------------------------------------------------------------------------------------- operations


def test_round_trip(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Encrypt, verify, re-key, decrypt; with names by default and with names given."""
    assert run("encrypt", "flat.parquet", *KEYS, "--fsync", "--threads", 2) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "output         flat.enc.parquet" in shown.out
    assert "warning" not in shown.out
    back = bytearray()
    apq.decrypt_file("flat.enc.parquet", back, ALL)
    assert rows_of(pq.read_table(io.BytesIO(back))) == rows("flat.parquet")

    assert run("verify", "flat.enc.parquet", *KEYS) == 0
    table = capsys.readouterr().out
    assert [line.split()[1] for line in table.splitlines() if line.startswith(("id ", "text ", "bytes "))] == [
        "footer",
        "column",
        "column",
    ]
    new = ["--new-footer-key-file", "new", "--new-column-key", "text=new", "--new-column-key-footer", "bytes"]
    assert run("reencrypt", "flat.enc.parquet", *KEYS, *new, "-o", "other.parquet") == 0
    os.rename("flat.parquet", "kept")
    assert run("decrypt", "other.parquet", "--footer-key-file", "new", "--column-key", "text=new") == EXIT_USAGE
    assert "-o" in capsys.readouterr().err
    assert run("decrypt", "flat.enc.parquet", *KEYS) == 0
    assert run("decrypt", "other.parquet", "--footer-key-file", "new", "--column-key", "text=new", "-o", "b") == 0
    assert rows("b") == rows("flat.parquet") == rows("kept")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(os.stat("b").st_mode) == 0o666 & ~umask
    assert not [name for name in os.listdir() if name.endswith(".agstmp")]


def test_nothing_is_overwritten_unless_asked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "flat.enc.parquet").write_bytes(b"precious")
    assert run("encrypt", "flat.parquet", *FOOTER) == EXIT_USAGE
    assert (here / "flat.enc.parquet").read_bytes() == b"precious"
    assert run("encrypt", "flat.parquet", *FOOTER, "--overwrite") == 0
    assert run("decrypt", "flat.enc.parquet", *FOOTER) == EXIT_USAGE  # flat.parquet is there
    data = (here / "flat.enc.parquet").read_bytes()
    in_place = ["flat.enc.parquet", *FOOTER, "--new-footer-key-file", "new", "-o", "flat.enc.parquet", "--same-size"]
    assert run("reencrypt", *in_place) == EXIT_USAGE
    assert (here / "flat.enc.parquet").read_bytes() == data
    assert run("reencrypt", *in_place, "--overwrite") == 0
    assert len((here / "flat.enc.parquet").read_bytes()) == len(data)
    apq.verify("flat.enc.parquet", Keys(NEW))
    os.mkfifo("pipe")
    assert (
        run("decrypt", "flat.enc.parquet", "--footer-key-file", "new", "-o", "/dev/null", "--overwrite") == EXIT_USAGE
    )
    assert "regular" in capsys.readouterr().err


def test_options_reach_the_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(
        capsys,
        *("encrypt", "flat.parquet", *FOOTER, "--column-key", "text=k1", "--column-key-footer", "id"),
        *("--footer-key-metadata", "kf", "--column-key-metadata", "text=the text's key = k1"),
        *("--algorithm", "AES_GCM_CTR_V1", "--plaintext-footer", "--other-columns", "plain"),
        *("--aad-prefix-hex", b"table/1".hex(), "--no-store-aad-prefix"),
    )
    assert (result["operation"], result["algorithm"], result["footer"]) == ("encrypt", "AES_GCM_CTR_V1", "signed")
    assert result["file_length"] == os.path.getsize("flat.enc.parquet")
    said = answer(capsys, "inspect", "flat.enc.parquet")
    assert said["aad_prefix_required"]
    assert said["footer_key_metadata"] == "kf"
    assert not said["authenticated"]
    kinds = {column["path"]: (column["key"], column["key_metadata"]) for column in said["columns"]}
    assert kinds["id"] == ("footer", None)
    assert kinds["flag"] == ("plain", None)
    assert kinds["text"] == ("column", "the text's key = k1")
    common = ["flat.enc.parquet", *FOOTER, "--column-key", "text=k1"]
    for operation in (["verify"], ["decrypt", "-o", "no"], ["reencrypt", "--new-footer-key-file", "new", "-o", "no"]):
        assert run(*operation, *common, "--aad-prefix", "table/1") == EXIT_INTEGRITY
        said = capsys.readouterr().err  # type: ignore[assignment]
        assert "claims AES_GCM_CTR_V1" in said
        assert "--allow-ctr" in said
    common.append("--allow-ctr")
    assert run("verify", *common) == EXIT_INTEGRITY  # the prefix is not in the file
    checked = answer(capsys, "verify", *common, "--aad-prefix", "table/1")
    rows_by_path = {column["path"]: column for column in checked["columns"]}
    assert rows_by_path["text"]["key_metadata"] == "the text's key = k1"
    assert not rows_by_path["text"]["authenticated"]
    assert any("CTR" in text for text in checked["warnings"])

    changes = ["--new-aad-prefix", "table/2", "--encrypted-footer", "--algorithm", "AES_GCM_V1"]
    again = ["reencrypt", *common, "--aad-prefix", "table/1", "--new-footer-key-file", "new", *changes]
    answer(capsys, *again, "-o", "again.parquet")
    said = answer(capsys, "inspect", "again.parquet")
    assert (said["algorithm"], said["footer"], said["aad_prefix"]) == ("AES_GCM_V1", "encrypted", "table/2")
    assert said["columns"] is None
    answer(capsys, "decrypt", "again.parquet", "--footer-key-file", "new", "-o", "back")
    assert rows("back") == rows("flat.parquet")


def test_columns_without_the_footer_key(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("encrypt", "flat.parquet", *KEYS, "--plaintext-footer") == 0
    mine = ["flat.enc.parquet", "--column-key", "text=k1"]
    result = answer(capsys, "verify", *mine, "--missing", "skip")
    assert not result["footer_verified"]
    assert any("not verified" in text for text in result["warnings"])
    answer(capsys, "decrypt", *mine, "--missing", "drop", "-o", "back")
    assert "text" in pq.read_schema("back").names
    assert "bytes" not in pq.read_schema("back").names
    with pytest.raises(SystemExit):
        run("verify", "flat.enc.parquet")
    assert "--column-key" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("reencrypt", *mine, "--new-footer-key-file", "new", "-o", "again")


def test_columns_without_keys(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("encrypt", "flat.parquet", *KEYS) == 0
    for operation in ("decrypt", "verify"):
        output = ["-o", "back"] if operation == "decrypt" else []
        assert run(operation, "flat.enc.parquet", *FOOTER, *output) == EXIT_KEY_ACCESS
    some = [*FOOTER, "--column-key", "text=k1"]
    result = answer(capsys, "verify", "flat.enc.parquet", *some, "--missing", "skip")
    assert [column["path"] for column in result["columns"] if column["key"] == "missing"] == ["bytes"]
    assert run("verify", "flat.enc.parquet", *some, "--missing", "skip") == 0
    assert "not checked" in capsys.readouterr().out
    new = ["--new-footer-key-file", "new", "--new-column-key", "text=new", "-o", "turned"]
    assert run("reencrypt", "flat.enc.parquet", *some, *new) == EXIT_KEY_ACCESS
    assert run("reencrypt", "flat.enc.parquet", *some, *new, "--same-size") == 0  # bytes is passed on
    apq.verify("turned", Keys(NEW, {"text": NEW, "bytes": K2}))
    result = answer(capsys, "decrypt", "flat.enc.parquet", *some, "--missing", "drop", "-o", "back")
    assert pq.read_schema("back").names == [name for name in flat().schema.names if name != "bytes"]
    assert "bytes" in result["warnings"][0]


def test_v2_layouts_quirks_and_bloom_filters(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"data_page_version": "2.0", "bloom_filter_options": {"id": {"ndv": 100}}}
    pq.write_table(flat(), "v2.parquet", **options)
    for layout in ("arrow", "parquet-java"):
        result = answer(capsys, "encrypt", "v2.parquet", *FOOTER, "--v2-layout", layout, "--overwrite")
        assert ("except parquet-java will not read" in result["warnings"][0]) == (layout == "parquet-java")
        answer(capsys, "decrypt", "v2.enc.parquet", *FOOTER, "-o", "back", "--overwrite", "--quirk", "duckdb")
        assert rows("back") == rows("v2.parquet")
        java = layout == "parquet-java"
        strict = ["v2.enc.parquet", *FOOTER, "--no-unauthenticated-levels"]
        for operation in (["verify"], ["decrypt", "-o", "no", "--overwrite"]):
            assert run(*operation, *strict) == (EXIT_INTEGRITY if java else 0)
        capsys.readouterr()
        assert run("verify", "v2.enc.parquet", *FOOTER) == 0
        said = capsys.readouterr().out
        assert ("not of levels" in said) == ("have no tag" in said) == java
    modules = []
    for more in ([], ["--drop-bloom-filters"]):
        result = answer(capsys, "encrypt", "v2.parquet", *FOOTER, "--overwrite", *more)
        modules.append(next(column["modules"] for column in result["columns"] if column["path"] == "id"))
    assert modules[0] == modules[1] + 2


def test_several_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line of JSON for each, and the exit code of what was worst."""
    (here / "out").mkdir()
    assert run("encrypt", "flat.parquet", "nested.parquet", *FOOTER, "-o", "out", "--json") == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["output"] for result in results] == ["out/flat.parquet", "out/nested.parquet"]
    files = ["out/flat.parquet", "out/nested.parquet"]
    assert run("verify", *files, *FOOTER) == 0
    assert capsys.readouterr().out.count("operation  ") == 2
    assert run("verify", files[0], "absent", files[1], *FOOTER, "--json") == EXIT_NOT_FOUND
    shown = capsys.readouterr()
    assert [json.loads(line).get("error_class") for line in shown.out.splitlines()] == [None, "FileNotFoundError", None]
    assert "absent" in shown.err
    (here / "cut").write_bytes((here / files[0]).read_bytes()[:-1])
    assert run("verify", "absent", "cut", *files, *FOOTER) == EXIT_INTEGRITY
    assert run("verify", files[0], files[0], "--footer-key-file", "none") == EXIT_KEY_ACCESS
    with pytest.raises(SystemExit) as stopped:
        run("decrypt", *files, *FOOTER, "-o", "one")
    assert stopped.value.code == 2
    assert not os.path.exists("one")


def test_a_pipe_holds_the_key_once(here: Path) -> None:
    """As `--footer-key-file <(command)` gives it: it is read once, whatever the number of files."""
    (here / "out").mkdir()
    read, write = os.pipe()
    os.write(write, KF)
    os.close(write)
    files = ("flat.parquet", "nested.parquet")
    assert run("encrypt", *files, "--footer-key-file", f"/dev/fd/{read}", "-o", "out") == 0
    os.close(read)
    for name in files:
        apq.verify(here / "out" / name, Keys(KF))


# ---------------------------------------------------------------------------------------------------------- errors


def test_integrity(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("encrypt", "flat.parquet", *KEYS) == 0
    data = (here / "flat.enc.parquet").read_bytes()
    (here / "flat.enc.parquet").write_bytes(flip(data, 8 * 300))
    before = sorted(os.listdir())
    result = answer(capsys, "verify", "flat.enc.parquet", *KEYS, code=EXIT_INTEGRITY)
    place = [result[name] for name in ("error_class", "module", "row_group", "column")]
    assert place == ["IntegrityError", "dictionary page", 0, "id"]
    assert result["page"] is None
    assert run("decrypt", "flat.enc.parquet", *KEYS, "-o", "back") == EXIT_INTEGRITY
    new = ["--new-footer-key-file", "new", "-o", "back"]
    assert run("reencrypt", "flat.enc.parquet", *KEYS, *new) == EXIT_INTEGRITY
    assert sorted(os.listdir()) == before
    (here / "flat.enc.parquet").write_bytes(data)
    assert run("verify", "flat.enc.parquet", "--footer-key-file", "new") == EXIT_INTEGRITY
    assert run("verify", "flat.enc.parquet", *KEYS, "--aad-prefix", "another") == EXIT_INTEGRITY  # a policy's
    assert run("inspect", "kf") == EXIT_INTEGRITY  # no Parquet file
    assert run("verify", "flat.parquet", *FOOTER) == EXIT_INTEGRITY  # it is not encrypted at all
    assert run("encrypt", "flat.enc.parquet", *FOOTER, "-o", "twice") != 0


def test_usage(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in (
        ["encrypt", "flat.parquet"],  # no key
        ["encrypt", *FOOTER],  # no file
        ["encrypt", "flat.parquet", "--footer-key", KF.hex()],  # a key is never an argument
        ["encrypt", "flat.parquet", *FOOTER, "--footer-key-env", "AGS_TEST_K2"],
        ["encrypt", "flat.parquet", *FOOTER, "--column-key", "text"],
        ["encrypt", "flat.parquet", *FOOTER, "--column-key", "text="],
        ["encrypt", "flat.parquet", *FOOTER, "--column-key", "text=k1", "--column-key-footer", "text"],
        ["encrypt", "flat.parquet", *FOOTER, "--algorithm", "AES"],
        ["encrypt", "flat.parquet", *FOOTER, "--aad-prefix", "a", "--aad-prefix-hex", "00"],
        ["reencrypt", "flat.parquet", *FOOTER, "-o", "x"],  # no new key
        ["reencrypt", "flat.parquet", *FOOTER, "--new-footer-key-file", "new"],  # no output
        ["verify", "flat.parquet", *FOOTER, "--missing", "drop"],
        ["inspect", "flat.parquet", *FOOTER],  # needs none
        ["verify", "flat.parquet", "-", *FOOTER],  # is for one file
        ["encrypt", "flat.parquet", "nested.parquet", *FOOTER, "-o", "-"],
        ["encrypt", "-", *FOOTER, "-o", "."],  # has no name
    ):
        with pytest.raises(SystemExit) as stopped:
            run(*args)
        assert stopped.value.code == 2, args
    assert sorted(os.listdir()) == ["flat.parquet", "k1", "kf", "nested.parquet", "new"]
    assert run("encrypt", "flat.parquet", *FOOTER, "--column-key", "txt=k1") == EXIT_USAGE
    assert "'txt'" in capsys.readouterr().err
    assert run("encrypt", "flat.parquet", *FOOTER, "--aad-prefix-hex", "xy") == EXIT_USAGE
    assert "--aad-prefix-hex" in capsys.readouterr().err


def test_keys_are_refused_and_never_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in (
        ["--footer-key-file", "absent"],
        ["--footer-key-env", "AGS_TEST_ABSENT"],
        ["--footer-key-file", "k1", "--key-format", "raw"],
        [*FOOTER, "--column-key", "text=absent"],
        [*FOOTER, "--column-key-env", "text=AGS_TEST_ABSENT"],
    ):
        assert run("encrypt", "flat.parquet", *args) == EXIT_KEY_ACCESS, args
    (here / "kf").chmod(0o644)
    assert run("encrypt", "flat.parquet", *KEYS) == 0
    assert run("verify", "flat.enc.parquet", *KEYS, "--json") == 0
    shown = capsys.readouterr()
    assert "chmod 600" in shown.err
    for key in (KF, K1, K2):
        for text in (key.hex(), base64.b64encode(key).decode(), repr(key)[2:-1]):
            assert text not in shown.out + shown.err


def test_group_and_tuple_paths(here: Path) -> None:
    """The name of a group is every column in it."""
    assert (
        run("encrypt", "nested.parquet", *FOOTER, "--column-key", "deep=k1", "--column-key-footer", "struct.age") == 0
    )
    columns = apq.verify("nested.enc.parquet", Keys(KF, {"deep": K1, "struct": FOOTER_KEY})).columns
    assert {row.path.split(".")[0] for row in columns if row.key == "column"} == {"deep"}


# ---------------------------------------------------------------------------------------------------------- terminal


def on_a_terminal(width: int, *args: object) -> tuple[int, list[str]]:
    """The exit code and the lines of `ags-fast parquet` on a terminal of so many columns."""
    primary, secondary = pty.openpty()
    termios.tcsetwinsize(secondary, (24, width))
    command = [sys.executable, "-m", "ags_fast", "parquet", *map(str, args)]
    env = python_env()
    env.pop("COLUMNS", None)
    process = subprocess.Popen(command, stdout=secondary, stderr=secondary, env=env)
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
    return process.wait(timeout=30), shown.decode().replace("\r\n", "\n").split("\n")


def test_tables_fit_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a_column_with_quite_a_long_name_as_people_have_them"
    pq.write_table(flat().rename_columns([name, *flat().schema.names[1:]]), "long.parquet")
    more = ["--column-key", f"{name}=k1", "--column-key-metadata", f"{name}={'key-of-that-' * 3}"]
    common = ["long.parquet", *FOOTER, *more, "--overwrite"]
    code, lines = on_a_terminal(80, "encrypt", *common)
    assert code == 0
    assert any("encrypt: 100%" in line for line in lines)
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("column ")) :]
    assert max(map(len, table)) <= 80
    assert "…" in table[1]
    assert table[1].startswith("a_column")
    code, lines = on_a_terminal(200, "encrypt", *common, "--quiet")
    assert code == 0
    assert not any(line.strip() for line in lines)
    code, lines = on_a_terminal(200, "encrypt", *common)
    assert any(name in line and "key-of-that-" * 3 in line for line in lines)
    assert run("encrypt", *common) == 0  # no terminal: nothing is cut
    assert name in capsys.readouterr().out


def test_a_file_cannot_steer_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[2Jevil\u202e"
    pq.write_table(flat().rename_columns([name, *flat().schema.names[1:]]), "evil.parquet")
    metadata = Keys(KF, {name: K1}, footer_metadata=b"\x1b]0;x\x07", column_metadata={name: b"\x1b[31m"})
    for plaintext_footer in (True, False):
        options: dict[str, Any] = {"plaintext_footer": plaintext_footer, "aad_prefix": b"\x1b[1m"}
        apq.encrypt_file("evil.parquet", "evil.enc.parquet", metadata, **options)
        assert run("inspect", "evil.enc.parquet") == 0
        assert run("inspect", "evil.parquet", "--json") == 0
        assert run("verify", "evil.enc.parquet", *FOOTER, "--column-key", f"{name}=k1") == 0
        assert run("verify", "evil.enc.parquet", *FOOTER) == EXIT_KEY_ACCESS
        assert run("decrypt", "evil.enc.parquet", *FOOTER, "--missing", "drop", "-o", "back", "--overwrite") == 0
    shown = capsys.readouterr()
    assert "evil" in shown.out
    assert not {char for char in shown.out + shown.err if char != "\n" and not char.isprintable()}


def test_inspect_needs_neither_pyarrow_nor_keys(here: Path) -> None:
    out = run_python(program(commands.inspect, str(here / "flat.parquet")))
    assert "footer" in out
    assert "text" in out
