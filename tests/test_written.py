"""What each release has written (written/VERSION), this version reads, turns the keys of and adds to."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from datasets import HERE

import ags_fast
from ags_fast import Dataset, parquet
from ags_fast.jobs import expire, rekey_files, rotate, verify_files
from ags_fast.keys.kms import load_kms, local

pq = pytest.importorskip("pyarrow.parquet")

HOME = Path(__file__).parent / "written"
RELEASES = sorted(folder.name for folder in HOME.glob("[0-9]*"))


@pytest.fixture(params=RELEASES)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    folder = shutil.copytree(HOME / request.param, tmp_path / "written")
    (folder / "kms.key").chmod(0o600)  # git keeps no such mode, and a keystore wants no other
    return folder, json.loads((folder / "expected.json").read_text())


def kms_of(folder: Path) -> dict[str, str]:
    path = folder / "kms"
    return {
        "encryption.kms-type": "local",
        "kms.local.path": str(path),
        "kms.local.key-file": f"{path}.key",
    }


def contents(dataset: Dataset) -> dict[str, bytes]:
    """Every file of a version, through the handle."""
    found = {}
    for entry in dataset.files():
        with dataset.open_file(entry.path) as file:
            found[entry.path] = file.read()
    return found


def hashes(contents: dict[str, bytes]) -> dict[str, str]:
    return {path: hashlib.sha256(data).hexdigest() for path, data in contents.items()}


def test_this_version_has_written() -> None:
    assert ags_fast.__version__ in RELEASES, "before a release, run `python -m written` in tests/"


def test_streams(written: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = written
    for name, stream in expected["streams"].items():
        with ags_fast.open(folder / name, key_metadata=bytes.fromhex(stream["key_metadata"])) as file:
            assert hashes({name: file.read()}) == {name: stream["sha256"]}


def test_parquet_files(written: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = written
    sample = expected["parquet"]
    footer_key, column_key, prefix = (bytes.fromhex(sample[key]) for key in ("footer_key", "column_key", "aad_prefix"))
    for name in ("uniform", "columns", "ctr"):
        uniform = name == "uniform"
        chosen = parquet.Keys(footer_key, {} if uniform else {"name": column_key})
        with parquet.open_plain(
            folder / f"{name}.parquet",
            chosen,
            length=None,
            aad_prefix=prefix if uniform else None,
            allow_ctr=name == "ctr",
        ) as file:
            assert pq.read_table(file).to_pydict() == sample["rows"], name


def test_keystores(written: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, expected = written
    stores = expected["keystores"]
    with load_kms(kms_of(folder)) as kms:
        assert kms.unwrap_key(bytes.fromhex(stores["wrapped"]), "first").hex() == stores["key"]
    monkeypatch.setenv("PASSPHRASE_OF_TEST", stores["passphrase"])
    properties = {
        "encryption.kms-type": "local",
        "kms.local.path": str(folder / "passphrase"),
        "kms.local.passphrase-env": "PASSPHRASE_OF_TEST",
    }
    assert [key["key_id"] for key in local.status(properties)["keys"]] == ["first"]
    with load_kms(properties) as kms:
        assert kms.unwrap_key(kms.wrap_key(bytes(16), "first"), "first") == bytes(16)


@pytest.mark.parametrize("name", ["single", "double", "keytools"])
def test_datasets(written: tuple[Path, dict[str, Any]], name: str) -> None:
    folder, expected = written
    dataset, kms, holds = folder / name, kms_of(folder), expected["datasets"][name]
    for number, files in holds["versions"].items():
        assert hashes(contents(Dataset.open(dataset, kms=kms, version=int(number)))) == files, number

    newest = list(holds["versions"].values())[-1]
    options: Any = {"kms": kms, "pin": holds["pin"]}
    assert verify_files(dataset, engine=HERE, progress=False, **options).counts["ok"] == len(newest)
    if name == "double":
        rotate(dataset, what="mek", **options)
        rotate(dataset, what="kek", **options)
    rekey_files(dataset, engine=HERE, progress=False, **options).raise_for_failures()
    opened = Dataset.open(dataset, **options)
    with opened.transaction(wrapping_key_id="first") as changes, changes.create("new") as file:
        file.write(b"new")
    expire(dataset, keep=1, skip_grace=True, **options).raise_for_failures()
    assert hashes(contents(Dataset.open(dataset, kms=kms))) == newest | hashes({"new": b"new"})
