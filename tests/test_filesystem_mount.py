"""``ags-fast mount``: a dataset as a folder."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, make_kms, read_tree
from support import flip, pattern

from ags_fast import Dataset
from ags_fast.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

TREE = {"a.csv": b"1,2\n", "b/c.bin": pattern(3 << 20), "b/d/e": b"", "bad": pattern(100)}


def arguments(dataset: Path, kms: dict[str, str], folder: Path) -> list[str]:
    return ["mount", str(dataset), str(folder), *(f"--kms={name}={value}" for name, value in kms.items())]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    try:
        import fuse  # noqa: F401
    except (ImportError, OSError) as error:
        pytest.skip(f"no fusepy or libfuse: {error}")
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse")
    kms, folder = make_kms(tmp_path), tmp_path / "mounted"
    with Dataset.create(tmp_path / "data", kms=kms, wrapping_key_id=MASTER).transaction(fsync=False) as new:
        for path, data in TREE.items():
            with new.create(path) as file:
                file.write(data)
    (broken,) = (tmp_path / "data").glob("bad.*")
    broken.write_bytes(flip(broken.read_bytes(), -1))
    folder.mkdir()
    command = [sys.executable, "-m", "ags_fast", *arguments(tmp_path / "data", kms, folder)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not os.path.ismount(folder) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    if not os.path.ismount(folder):
        process.kill()
        said = process.communicate()[1]
        assert "refuses to mount" in said, said
        pytest.skip(f"this machine does not let the tests mount: {said[-300:]}")
    yield folder
    process.send_signal(signal.SIGINT)
    process.wait(30)
    assert not os.path.ismount(folder)


def test_mounted(mounted: Path) -> None:
    with pytest.raises(OSError, match="Input/output error") as error:
        (mounted / "bad").read_bytes()
    assert error.value.errno == errno.EIO
    assert sorted(os.listdir(mounted)) == ["a.csv", "b", "bad"]
    assert read_tree(mounted / "b") == {"c.bin": TREE["b/c.bin"], "d/e": b""}
    with open(mounted / "b/c.bin", "rb") as file:
        file.seek(2 << 20)
        assert file.read(100) == TREE["b/c.bin"][2 << 20 :][:100]
    assert (mounted / "a.csv").stat().st_size == 4
    assert not (mounted / "none").exists()
    for change in (lambda: (mounted / "new").write_bytes(b""), (mounted / "a.csv").unlink):
        with pytest.raises(OSError, match="Read-only"):
            change()


def test_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    kms = make_kms(tmp_path)
    assert main(arguments(tmp_path / "data", kms, tmp_path / "none")) == 5
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path != "/dev/fuse" and exists(path))
    assert main(arguments(tmp_path / "data", kms, tmp_path)) == 6
    assert "/dev/fuse" in capsys.readouterr().err
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/fuse" or exists(path))
    monkeypatch.setitem(sys.modules, "fuse", None)
    assert main(arguments(tmp_path / "data", kms, tmp_path)) == 6
    assert "[files]'" in capsys.readouterr().err
