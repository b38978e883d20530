"""Jobs over files on the floor of one log: encrypt, rekey, remove, decrypt, verify, read one file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, QUIET, read_tree, write_tree
from kms_clients import keystore

pytest.importorskip("msgspec")

from ags_fast.handle.dataset import Dataset
from ags_fast.newjobs import (
    copy_file,
    decrypt_files,
    encrypt_files,
    open_file,
    verify_files,
)
from ags_fast.onelog import reach
from ags_fast.onelog.draft import Idle
from ags_fast.onelog.log import Log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ags_fast.jobs.results import JobResult

TREE = {"a": b"1", "b/c": b"22" * 700, "b/d e": b"", "z": b"333"}


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return keystore(tmp_path, MASTER, "other")


class World:
    """A source, a dataset, and jobs in this process."""

    def __init__(self, folder: Path, kms: dict[str, str]) -> None:
        self.src, self.url, self.kms = folder / "src", folder / "ds", kms

    def encrypt(self, tree: Mapping[str, bytes] | None = None, **options: Any) -> JobResult:
        write_tree(self.src, {} if tree is None else tree)
        return encrypt_files(
            self.src, self.url, kms=self.kms, **{"wrapping_key_id": MASTER, "fsync": False, **QUIET, **options}
        )

    def log(self) -> Log:
        return Dataset.open(self.url, kms=self.kms).snapshot().log

    def files(self, version: int | None = None) -> dict[str, bytes]:
        dataset = Dataset.open(self.url, kms=self.kms, version=version)
        return {file.path: dataset.open_file(file.path).read() for file in dataset.files()}

    def swept(self) -> list[str]:
        return reach.sweep(self.log(), Idle(), 0)


@pytest.fixture
def world(tmp_path: Path, kms: dict[str, str]) -> World:
    return World(tmp_path, kms)


def test_round_trip(world: World, tmp_path: Path) -> None:
    done = world.encrypt(TREE)
    done.raise_for_failures()
    assert (done.version, done.counts["ok"]) == (2, 4)
    assert world.files() == TREE
    back = tmp_path / "back"
    decrypt_files(world.url, back, kms=world.kms, **QUIET).raise_for_failures()
    assert read_tree(back) == TREE
    checked = verify_files(world.url, kms=world.kms, **QUIET)
    assert checked.counts == {"ok": 4, "skipped": 0, "failed": 0}
    assert checked.extra_files == 0
    target = io.BytesIO()
    copy_file(world.url, "b/c", target, kms=world.kms)
    assert target.getvalue() == open_file(world.url, "b/c", kms=world.kms).read() == TREE["b/c"]
    assert world.swept() == []
