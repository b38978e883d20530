"""Odd trees: what jobs take, leave out, give back and delete."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import socket
import stat
import subprocess
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, encrypt, make_kms, object_of

pytest.importorskip("pyarrow")

from ags_fast import PolicyError, cli
from ags_fast.dataset.names import entry_path
from ags_fast.errors import IntegrityError
from ags_fast.fs import Store
from ags_fast.jobs import (
    JobResult,
    decrypt_files,
    open_file,
    rekey_files,
    sweep,
    verify_files,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def kms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_kms(tmp_path_factory.mktemp("kms"))


@pytest.fixture
def src(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    return tmp_path / "src"


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def decrypt(dataset: Any, dst: Any, kms: dict[str, str], **options: Any) -> JobResult:
    return decrypt_files(dataset, dst, kms=kms, engine=HERE, fsync=False, progress=False, **options)


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def left_out(done: JobResult, src: Path) -> dict[str, str | None]:
    return {row.src.removeprefix(f"{src}/"): row.error_class for row in done.rows if row.status == "skipped"}


# ---------------------------------------------------------------------------------------------- what is taken

HIDDEN = [".env", ".git/config", "_metadata", "_SUCCESS", "a/.part.crc", "a/part.crc", "_ags_not/x"]


@pytest.fixture
def odd(src: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tree with one of everything, and the links beside it."""
    write(src, plain="plain", a__part="part", **{"_year=2026__x": "partition"})
    for path in HIDDEN:
        (src / path).parent.mkdir(exist_ok=True)
        (src / path).write_text(path)
    (src / "_ags").mkdir()
    (src / "_ags" / "own").write_text("a name that datasets use themselves")
    (src / "empty" / "er").mkdir(parents=True)
    os.mkfifo(src / "fifo")
    write(src.parent / "outside", secret="secret")
    for name, target in (
        ("nowhere", "gone"),
        ("loop", "."),
        ("self", "self"),
        ("file out", "../outside/secret"),
        ("out", str(src.parent / "outside")),
        ("inside", "a/part"),
        ("null", "/dev/null"),
    ):
        (src / name).symlink_to(target)
    monkeypatch.chdir(src)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("socket")
        yield src


LINKS = {"nowhere": "DanglingLink", "loop": "LinkLoop", "self": "LinkLoop"}
OUTSIDE = {"file out": "OutsideLink", "out": "OutsideLink", "null": "OutsideLink"}
OTHERS = {
    "fifo": "SpecialFile",
    "socket": "SpecialFile",
    "empty/er/": "EmptyFolder",
    "_ags/own": "ReservedName",
}


def test_all_that_is_left_out_has_a_row(odd: Path, kms: dict[str, str], tmp_path: Path) -> None:
    done = encrypt(odd, tmp_path / "dataset", kms)
    done.raise_for_failures()
    assert {row.src.removeprefix(f"{odd}/") for row in done.rows if row.status == "ok"} == {
        "plain",
        "a/part",
        "inside",
        "_year=2026/x",
    }
    assert left_out(done, odd) == {**LINKS, **OUTSIDE, **OTHERS, **dict.fromkeys(HIDDEN, "HiddenFile")}
    assert all(row.error for row in done.rows if row.status == "skipped")
    assert done.left_out == {
        "DanglingLink": 1,
        "EmptyFolder": 1,
        "HiddenFile": 7,
        "LinkLoop": 2,
        "OutsideLink": 3,
        "ReservedName": 1,
        "SpecialFile": 2,
    }
    decrypt(tmp_path / "dataset", tmp_path / "out", kms).raise_for_failures()
    assert tree(tmp_path / "out") == {
        "plain": "plain",
        "a/part": "part",
        "inside": "part",
        "_year=2026/x": "partition",
    }
    again = encrypt(odd, tmp_path / "dataset", kms)  # all of it is told again
    assert again.left_out == done.left_out
    assert again.counts["skipped"] == sum(done.left_out.values()) + 4


def test_hidden_files_and_links_on_request(odd: Path, kms: dict[str, str], tmp_path: Path) -> None:
    done = encrypt(odd, tmp_path / "dataset", kms, hidden=True, links="follow")
    done.raise_for_failures()
    assert left_out(done, odd) == {**LINKS, **OTHERS, "null": "SpecialFile"}
    decrypt(tmp_path / "dataset", tmp_path / "out", kms).raise_for_failures()
    back = tree(tmp_path / "out")
    assert {path: back[path] for path in HIDDEN} == {path: path for path in HIDDEN}
    assert back["out/secret"] == back["file out"] == "secret"
    assert len(back) == len(HIDDEN) + 6


def test_include_and_exclude(odd: Path, kms: dict[str, str], tmp_path: Path) -> None:
    done = encrypt(odd, tmp_path / "one", kms, include=["a", "plai?"], exclude="*.crc", hidden=True)
    assert {row.src.removeprefix(f"{odd}/") for row in done.rows if row.status == "ok"} == {"a/part", "plain"}
    kinds = left_out(done, odd)
    assert kinds["a/part.crc"] == kinds[".env"] == kinds["fifo"] == kinds["out"] == "Excluded"
    done = encrypt(odd, tmp_path / "two", kms, exclude=[".git", "_*", "out"], hidden=True)
    kinds = left_out(done, odd)
    assert kinds[".git/config"] == kinds["_metadata"] == kinds["out"] == "Excluded"
    assert kinds["fifo"] == "SpecialFile"
    assert ".env" not in kinds
    with pytest.raises(ValueError, match=r"include='sale\*' matches no file"):
        encrypt(odd, tmp_path / "three", kms, include=["a/*", "sale*"])
    assert not (tmp_path / "three").exists()


def test_links_as_errors(odd: Path, kms: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="a link that leads out"):
        encrypt(odd, tmp_path / "dataset", kms, links="error", exclude=list(LINKS))
    with pytest.raises(PolicyError, match="nowhere is a link that leads nowhere"):
        encrypt(odd, tmp_path / "dataset", kms, links="error", exclude=["file out", "out", "null", "loop", "self"])
    assert not (tmp_path / "dataset").exists()
    encrypt(odd, tmp_path / "dataset", kms, links="error", exclude=[*LINKS, *OUTSIDE]).raise_for_failures()
    with pytest.raises(ValueError, match="'skip', 'follow' or 'error'"):
        encrypt(odd, tmp_path / "dataset", kms, links="yes")


def test_a_tree_of_hidden_files_is_not_ok(src: Path, kms: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    write(src, _SUCCESS="")
    with pytest.warns(UserWarning, match=r"no file of .*src is encrypted: all of them are left out \(1 HiddenFile\)"):
        assert encrypt(src, tmp_path / "dataset", kms).left_out == {"HiddenFile": 1}
    options = ["--keystore", kms["kms.local.path"], "--key-file", kms["kms.local.key-file"]]
    command = ["encrypt", str(src), str(tmp_path / "dataset"), *options, "--wrapping-key-id", "master"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cli.main(command) == 5
    told = capsys.readouterr().out
    assert "1 HiddenFile" in told
    assert "skipped" in told
    assert cli.main([*command, "--hidden", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped_by"] == {}
    (src / "_SUCCESS").unlink()
    (src / "folder").mkdir()  # an empty one is no file
    assert cli.main([*command, "--hidden"]) == 5
    assert cli.main([*command, "--hidden", "--allow-empty"]) == 0


def test_options_of_the_command(odd: Path, kms: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    options = ["--keystore", kms["kms.local.path"], "--key-file", kms["kms.local.key-file"], "--json", "--no-fsync"]
    (odd / "plain").chmod(0o600)
    command = ["encrypt", str(odd), str(tmp_path / "dataset"), *options, "--wrapping-key-id", "master"]
    assert cli.main([*command, "--links", "follow", "--include", "plain", "--include", "out", "--exclude", "f*"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == 2
    assert told["skipped_by"]["Excluded"] > 10
    assert cli.main(["decrypt", str(tmp_path / "dataset"), str(tmp_path / "out"), *options, "--no-preserve"]) == 0
    assert stat.S_IMODE((tmp_path / "out" / "plain").stat().st_mode) != 0o600
    assert cli.main([*command, "--links", "error"]) not in (0, 2)


# ---------------------------------------------------------------------------------------------- modes and times


def test_modes_and_times_come_back(src: Path, kms: dict[str, str], tmp_path: Path) -> None:
    modes = {"private": 0o600, "group": 0o660, "all": 0o777, "narrow": 0o400, "setuid": 0o6755, "sticky": 0o1644}
    for i, (name, mode) in enumerate(modes.items()):
        write(src, **{name: name})
        os.utime(src / name, ns=(0, 10**18 * i - 1_234_567_891))
        (src / name).chmod(mode)
    encrypt(src, tmp_path / "dataset", kms).raise_for_failures()
    rekey_files(tmp_path / "dataset", kms=kms, engine=HERE, progress=False).raise_for_failures()
    before = os.umask(0o077)
    try:
        decrypt(tmp_path / "dataset", tmp_path / "out", kms).raise_for_failures()
        decrypt(tmp_path / "dataset", tmp_path / "fresh", kms, preserve=False).raise_for_failures()
    finally:
        os.umask(before)
    for name, mode in modes.items():
        info = (tmp_path / "out" / name).stat()
        assert (stat.S_IMODE(info.st_mode), info.st_mtime_ns) == (mode & 0o777, (src / name).stat().st_mtime_ns)
        fresh = (tmp_path / "fresh" / name).stat()
        assert stat.S_IMODE(fresh.st_mode) == 0o600
        assert fresh.st_mtime > time.time() - 1000
    (tmp_path / "out" / "private").chmod(0o666)
    decrypt(tmp_path / "dataset", tmp_path / "out", kms, overwrite=True).raise_for_failures()
    assert stat.S_IMODE((tmp_path / "out" / "private").stat().st_mode) == 0o600
    assert encrypt(tmp_path / "out", tmp_path / "dataset", kms).counts["skipped"] == len(modes)  # times and all


def test_an_object_has_no_mode(src: Path, kms: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = f"memory://test_trees/{os.urandom(8).hex()}"
    Store(f"{url}/src").write_small("a", b"x")
    encrypt(f"{url}/src", f"{url}/dataset", kms).raise_for_failures()
    before = os.umask(0o027)
    try:
        decrypt(f"{url}/dataset", tmp_path / "out", kms).raise_for_failures()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out" / "a").stat().st_mode) == 0o640


def test_a_parquet_file_gets_its_mode(src: Path, kms: dict[str, str], tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1, 2, 3]}), src / "a.parquet")
    (src / "a.parquet").chmod(0o640)
    os.utime(src / "a.parquet", ns=(0, 7))
    encrypt(src, tmp_path / "dataset", kms, format="parquet").raise_for_failures()
    decrypt(tmp_path / "dataset", tmp_path / "out", kms).raise_for_failures()
    info = (tmp_path / "out" / "a.parquet").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_mtime_ns) == (0o640, 7)


def test_one_stream_keeps_its_permissions(src: Path, capsys: Any) -> None:
    write(src, plain="plain")
    (src / "key").write_text("00" * 16)
    (src / "key").chmod(0o600)
    key = ["--data-key-file", str(src / "key"), "--key-format", "hex"]
    path = str(src / "plain")
    before = os.umask(0o027)
    try:
        for mode, encrypted, wanted in ((0o600, None, 0o600), (0o666, None, 0o640), (0o644, 0o600, 0o600)):
            os.chmod(path, mode)
            assert cli.main(["stream", "encrypt", path, *key, "--overwrite"]) == 0
            if encrypted is not None:
                os.chmod(path + ".ags", encrypted)
            assert cli.main(["stream", "decrypt", path + ".ags", *key, "--untrusted-length", "--overwrite"]) == 0
            assert stat.S_IMODE(os.stat(path).st_mode) == wanted
    finally:
        os.umask(before)
    os.mkfifo(src / "fifo")
    assert cli.main(["stream", "decrypt", path + ".ags", *key, "--untrusted-length", "-o", str(src / "fifo")]) != 0
    for operation in ("verify", "inspect"):  # neither waits for somebody to write
        more = key if operation == "verify" else []
        length = ["--length", "100"]
        assert cli.main(["stream", operation, str(src / "fifo"), *more, *length]) != 0
    capsys.readouterr()
    with subprocess.Popen(["tee", str(src / "fifo")], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as tee:
        assert tee.stdin is not None
        tee.stdin.write(b"through a pipe")
        tee.stdin.close()
        assert cli.main(["stream", "encrypt", str(src / "fifo"), *key, "-o", str(src / "piped"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plain_length"] == 14
    assert stat.S_IMODE((src / "piped").stat().st_mode) == 0o600


# ---------------------------------------------------------------------------------------------- deleting sources


def test_a_link_is_not_deleted_in_place_of_what_was_read(src: Path, kms: dict[str, str], tmp_path: Path) -> None:
    write(src, plain="plain", folder__file="file")
    write(tmp_path / "outside", secret="secret", deep__er="deeper")
    (src / "alias").symlink_to("plain")
    (src / "link").symlink_to("folder")
    (src / "out").symlink_to(tmp_path / "outside" / "secret")
    (src / "deep").symlink_to(tmp_path / "outside" / "deep")
    done = encrypt(src, tmp_path / "dataset", kms, delete_sources=True, links="follow")
    failed = {row.src.removeprefix(f"{src}/"): row for row in done.failed}
    assert {name: row.error_class for name, row in failed.items()} == {
        "alias": "OSError",
        "out": "OSError",
        "deep/er": "PolicyError",
    }
    assert "was not deleted: this is a link to 'plain', which still has the content" in (failed["alias"].error or "")
    assert tree(tmp_path / "outside") == {"secret": "secret", "deep/er": "deeper"}
    assert not (src / "folder" / "file").exists()  # it was read, here and through a link to its folder
    decrypt(tmp_path / "dataset", tmp_path / "out", kms).raise_for_failures()
    assert len(tree(tmp_path / "out")) == 6


# ---------------------------------------------------------------------------------------------- what could block


def places(dataset: Path, kms: dict[str, str]) -> dict[str, Path]:
    """A file of each kind, of a dataset with one file."""
    return {
        "data": object_of(dataset, kms, "plain"),
        "entry": dataset / entry_path(2),
        "table": next((dataset / "_ags/tables").iterdir()),
    }


@pytest.mark.parametrize("kind", ["data", "entry", "table"])
@pytest.mark.parametrize("what", ["fifo", "device", "socket", "folder"])
def test_what_could_block_in_place_of_a_file(
    src: Path, kms: dict[str, str], tmp_path: Path, kind: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(src, plain="plain")
    dataset = tmp_path / "dataset"
    pin = encrypt(src, dataset, kms).pin
    place = places(dataset, kms)[kind]
    place.unlink()
    if what == "fifo":
        os.mkfifo(place)
    elif what == "device":
        try:
            os.mknod(place, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero, which never ends
            place.open("rb").close()
        except PermissionError:
            pytest.skip("makes no devices")
    elif what == "socket":
        monkeypatch.chdir(place.parent)
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(place.name)
    else:
        place.mkdir()

    def run() -> Any:
        """What comes of it; no thread is to wait for ever."""
        got: list[Any] = []

        def call(job: Any) -> None:
            try:
                done = job()
                got.append(done.failed if isinstance(done, JobResult) else done)
            except (OSError, ValueError, IntegrityError, PolicyError) as error:
                got.append(error)

        for job in (
            lambda: verify_files(dataset, kms=kms, engine=HERE, progress=False),
            lambda: decrypt(dataset, tmp_path / "out", kms),
            lambda: rekey_files(dataset, kms=kms, engine=HERE, progress=False),
            lambda: open_file(dataset, "plain", kms=kms).close(),
            lambda: encrypt(src, dataset, kms, pin=pin),
            lambda: sweep(dataset, kms=kms),
        ):
            thread = threading.Thread(target=call, args=(job,), daemon=True)
            thread.start()
            thread.join(30)
            assert not thread.is_alive(), f"{job} waits"
        return got

    verified, decrypted, rekeyed, opened, encrypted, _ = run()
    if kind == "data":
        assert [row.error_class for row in (*verified, *decrypted, *rekeyed)] == ["IntegrityError"] * 3
        assert isinstance(opened, IntegrityError)
    elif kind == "table":
        assert {type(error) for error in (verified, decrypted, rekeyed, opened, encrypted)} == {IntegrityError}
    else:  # the version before is the newest one, unless a pin says better
        assert verified == decrypted == rekeyed == []
        assert isinstance(opened, FileNotFoundError)
        assert isinstance(encrypted, IntegrityError)
        monkeypatch.setattr("ags_fast.dataset.tries.PAUSE_SECONDS", 0.001)
        with pytest.raises(IntegrityError, match="no file has the name of version 2"):
            encrypt(src, dataset, kms)
    assert not (tmp_path / "out").exists() or tree(tmp_path / "out") == {}


def test_a_fifo_where_a_file_shall_be(src: Path, kms: dict[str, str], tmp_path: Path) -> None:
    """Whoever put it there reads what is written to it, which has not passed every tag yet."""
    write(src, plain="plain")
    encrypt(src, tmp_path / "dataset", kms).raise_for_failures()
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / "plain")
    reader = os.open(tmp_path / "out" / "plain", os.O_RDONLY | os.O_NONBLOCK)
    done = decrypt(tmp_path / "dataset", tmp_path / "out", kms, overwrite=True)
    assert [row.error_class for row in done.failed] == ["NotAFileError"]
    assert os.read(reader, 100) == b""
    os.close(reader)


# ---------------------------------------------------------------------------------------------- names and addresses


def test_a_path_that_becomes_too_long_is_a_row(src: Path, kms: dict[str, str], tmp_path: Path) -> None:
    """4,095 bytes is what a path may have, and `.ags` comes after it."""
    room = 4093 - len(f"{src}/")
    names = ["d" * 100] * (room // 101 - 1)
    deep = "/".join(names)
    name = "f" * (room - len(deep) - 1)
    at = os.open(src, os.O_RDONLY)
    for folder in names:
        os.mkdir(folder, dir_fd=at)
        above, at = at, os.open(folder, os.O_RDONLY, dir_fd=at)
        os.close(above)
    with os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT, dir_fd=at), "wb") as file:
        file.write(b"deep")
    os.close(at)
    write(src, plain="plain")
    done = encrypt(src, tmp_path / "dataset", kms)
    assert done.counts == {"ok": 1, "skipped": 0, "failed": 1}
    assert done.failed[0].src == f"{src}/{deep}/{name}"
    assert done.failed[0].error_class == "OSError"
    assert "too long" in (done.failed[0].error or "")
    decrypt(tmp_path / "dataset", tmp_path / "out", kms).raise_for_failures()
    assert tree(tmp_path / "out") == {"plain": "plain"}
    subprocess.run(["rm", "-rf", src], check=True)  # shutil's rmtree goes by paths


def test_a_dataset_that_cannot_be_written_to(src: Path, kms: dict[str, str], tmp_path: Path) -> None:
    """A web server is read, and what would write to it is refused."""
    pytest.importorskip("aiohttp")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    write(src, plain="plain")
    encrypt(src, tmp_path / "dataset", kms).raise_for_failures()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert verify_files(f"{url}/dataset", kms=kms, engine=HERE, progress=False).counts["ok"] == 1
        decrypt(f"{url}/dataset", tmp_path / "out", kms).raise_for_failures()
        for job in (
            lambda: encrypt(src, f"{url}/new", kms),
            lambda: encrypt(src, f"{url}/dataset", kms, overwrite=True),
            lambda: rekey_files(f"{url}/dataset", kms=kms, engine=HERE, progress=False),
            lambda: decrypt(tmp_path / "dataset", f"{url}/out", kms),
            lambda: Store(f"{url}/dataset").delete("plain.ags"),
        ):
            with pytest.raises(PolicyError, match="http file systems cannot"):
                job()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    shutil.rmtree(tmp_path / "out")
