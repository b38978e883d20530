"""Writes tests/written/VERSION: datasets, streams, Parquet files and keystores, and what they hold (expected.json)."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import ags_fast
from ags_fast import Dataset, parquet
from ags_fast.jobs import LocalEngine, encrypt_files, rekey_files, remove_files, rotate
from ags_fast.keys import StandardKeyMetadata
from ags_fast.keys.kms import load_kms, local

KEY, COLUMN_KEY, AAD_PREFIX = bytes(range(16)), bytes(range(32, 64)), b"a prefix"
TABLE = pa.table({"id": range(50), "name": [f"name {n}" for n in range(50)], "hired": [n * 1.5 for n in range(50)]})


def main() -> None:
    here = Path(__file__).parent / ags_fast.__version__
    if here.exists():
        sys.exit(f"{here} is there. What a release has written stays as it is.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "new"
        folder.mkdir()
        expected = {
            "streams": _write_streams(folder),
            "parquet": _write_parquet(folder),
            "keystores": _write_keystores(folder),
            "datasets": _write_datasets(folder, Path(temporary) / "src"),
        }
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        shutil.copytree(folder, here)


def _write_streams(folder: Path) -> dict[str, Any]:
    expected = {}
    for name, length, block_size in (("empty", 0, 1 << 20), ("short", 100, 1 << 20), ("blocks", 2500, 1024)):
        plain = _text(name, length)
        with ags_fast.AgsWriter(folder / f"{name}.ags", KEY, aad_prefix=AAD_PREFIX, block_size=block_size) as writer:
            writer.write(plain)
        metadata = StandardKeyMetadata(KEY, AAD_PREFIX, writer.file_length)
        expected[f"{name}.ags"] = {"key_metadata": metadata.encode().hex(), "sha256": _sha256(plain)}
    return expected


def _write_parquet(folder: Path) -> dict[str, Any]:
    plain = io.BytesIO()
    pq.write_table(TABLE, plain, row_group_size=20)
    keys = parquet.Keys(KEY, {"name": COLUMN_KEY})
    for name, options in (
        ("uniform", {"aad_prefix": AAD_PREFIX, "store_aad_prefix": False}),
        ("columns", {"other_columns": "plain", "plaintext_footer": True}),
        ("ctr", {"algorithm": "AES_GCM_CTR_V1"}),
    ):
        chosen = parquet.Keys(KEY) if name == "uniform" else keys
        parquet.encrypt_file(plain.getvalue(), folder / f"{name}.parquet", chosen, **options)
    return {
        "footer_key": KEY.hex(),
        "column_key": COLUMN_KEY.hex(),
        "aad_prefix": AAD_PREFIX.hex(),
        "rows": TABLE.to_pydict(),
    }


def _write_keystores(folder: Path) -> dict[str, Any]:
    """Write `kms` under a key file, whose first key gets a second version later, and `passphrase`."""
    local.create_keystore(_kms(folder))
    for key_id in ("first", "second"):
        local.create_key(_kms(folder), key_id)
    properties = {"encryption.kms-type": "local", "kms.local.path": str(folder / "passphrase")}
    local.create_keystore(properties, passphrase="a passphrase of tests")
    local.create_key(properties, "first", passphrase="a passphrase of tests")
    with load_kms(_kms(folder)) as kms:
        wrapped = kms.wrap_key(KEY, "first")
    return {"passphrase": "a passphrase of tests", "key": KEY.hex(), "wrapped": wrapped.hex()}


def _write_datasets(folder: Path, src: Path) -> dict[str, Any]:
    options: Any = {"kms": _kms(folder), "engine": LocalEngine(0), "progress": False}
    new: Any = options | {"wrapping_key_id": "first"}
    for name in ("year=2026/one.avro", "a b/ü.txt", "empty", "blocks"):
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_bytes(b"" if name == "empty" else _text(name, 2500))
    tables, parts = src.parent / "tables", src.parent / "parts"
    tables.mkdir()
    pq.write_table(TABLE, tables / "table.parquet", row_group_size=20)
    parts.mkdir()
    for number in range(2):
        (parts / f"part {number}").write_bytes(_text("part", number))

    single, double = folder / "single", folder / "double"
    encrypt_files(src, single, double_wrap=False, dek_length=32, **new)
    encrypt_files(src, double, block_size=1024, **new)
    encrypt_files(tables, double, format="parquet", column_keys={"name": "second"}, **new)
    encrypt_files(tables, folder / "keytools", format="parquet", key_material="keytools", **new)
    remove_files(double, "empty", kms=options["kms"], progress=False)
    local.rotate_key(_kms(folder), "first")
    rotate(double, what="mek", **options)
    rotate(double, what="kek", **options)
    rekey_files(double, **options)
    encrypt_files(parts, double, aad_prefix="table.part{n}", **new)
    return {name: _holds(folder / name, options["kms"]) for name in ("single", "double", "keytools")}


def _holds(folder: Path, kms: dict[str, str]) -> dict[str, Any]:
    """The pin, and the files of each version."""
    newest = Dataset.open(folder, kms=kms)
    assert newest.version is not None
    versions = {}
    for number in range(1, newest.version + 1):
        dataset = Dataset.open(folder, kms=kms, version=number)
        versions[str(number)] = {file.path: _sha256(_read(dataset, file.path)) for file in dataset.files()}
    return {"pin": newest.pin, "versions": versions}


def _read(dataset: Dataset, path: str) -> bytes:
    with dataset.open_file(path) as file:
        return file.read()


def _kms(folder: Path) -> dict[str, str]:
    return {
        "encryption.kms-type": "local",
        "kms.local.path": str(folder / "kms"),
        "kms.local.key-file": str(folder / "kms.key"),
    }


def _text(name: str, length: int) -> bytes:
    return (f"{name}\n" * length).encode()[:length]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    main()
