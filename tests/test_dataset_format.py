"""docs/dataset-format.md, read by somebody who has only that page, cryptography, pyarrow and a KMS to unwrap with."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from support import open_stream, pattern

pa = pytest.importorskip("pyarrow")

from ags_fast import jobs  # noqa: E402
from ags_fast.keys.kms import KmsClient, load_kms, local  # noqa: E402


class SecondReader:
    def __init__(self, folder: Path, kms: KmsClient) -> None:
        self.folder, self.kms = folder, kms
        path = self.newest("_ags/keys")
        header = json.loads((folder / path).read_bytes())
        self.id = header["dataset_id"]
        self.keys = {header["sealer"]["key-id"]: header["sealer"]}
        body = self.document(path)
        assert body["format"] == "ags-keys"
        self.keys = {key["key-id"]: key for key in body["keys"]}
        assert self.keys[header["auth"]["key_id"]] == header["sealer"]

    def newest(self, kind: str) -> str:
        return max(f"{kind}/{path.name}" for path in (self.folder / kind).iterdir() if re.match(r"\d{8}", path.name))

    def binding(self, purpose: bytes, path: bytes) -> bytes:
        return b"\0".join([b"ags_fast", purpose, self.id.encode(), path])

    def unwrap(self, key_id: str, wrapped: bytes, binding: bytes) -> bytes:
        key = self.keys[key_id]
        if "encrypted-key-metadata" not in key:
            plain = self.kms.unwrap_key(wrapped, key["encrypted-by-id"])
            assert plain[-32:] == hashlib.sha256(binding).digest()
            return plain[:-32]
        kek = self.kms.unwrap_key(base64.b64decode(key["encrypted-key-metadata"]), key["encrypted-by-id"])
        return AESGCM(kek).decrypt(wrapped[:12], wrapped[12:], binding)

    def document(self, path: str) -> dict[str, Any]:
        content = (self.folder / path).read_bytes()
        outer, (_, sealed, last, _) = json.loads(content), content.split(b"\n")
        assert last == b"}"
        auth = {name: value if name == "key_id" else base64.b64decode(value) for name, value in outer["auth"].items()}
        key = self.unwrap(auth["key_id"], auth["wrapped_key"], self.binding(b"document", path.encode()))
        assert AESGCM(key).decrypt(auth["nonce"], auth["tag"], sealed) == b""
        body: dict[str, Any] = json.loads(sealed)
        assert body["dataset_id"] == outer["dataset_id"] == self.id
        return body

    def table(self, ref: dict[str, Any]) -> list[dict[str, Any]]:
        stream = (self.folder / ref["path"]).read_bytes()
        assert len(stream) == ref["length"]
        key = self.unwrap(
            ref["key_id"], base64.b64decode(ref["wrapped_key"]), self.binding(b"dek", ref["path"].encode())
        )
        table = open_stream(stream, key, self.binding(b"table", ref["path"].encode()))
        plain = pa.decompress(table[8:], int.from_bytes(table[:8], "little"), codec="zstd")
        rows: list[dict[str, Any]] = pa.ipc.open_stream(plain).read_all().to_pylist()
        assert len(rows) == ref["entries"]
        return rows

    def rows(self) -> list[dict[str, Any]]:
        version = self.document(self.newest("_ags/versions"))
        rows = [row for ref in version["manifests"] for row in self.table(ref)]
        assert (version["files"], version["plain_length"]) == (len(rows), sum(row["plain_length"] for row in rows))
        return rows

    def files(self) -> dict[str, bytes]:
        return {row["path"].decode(): self.file(row) for row in self.rows()}

    def file(self, row: dict[str, Any]) -> bytes:
        stream = Path(os.fsdecode(os.path.join(bytes(self.folder), row["file"]))).read_bytes()
        assert len(stream) == row["file_length"]
        assert stream[4:8] == row["block_size"].to_bytes(4, "little")
        dek = self.unwrap(row["key_id"], row["wrapped_dek"], self.binding(b"dek", row["file"]))
        return open_stream(stream, dek, row["aad_prefix"])


@pytest.mark.parametrize("double_wrap", [True, False])
def test_second_reader(tmp_path: Path, double_wrap: bool) -> None:
    properties = {
        "encryption.kms-type": "local",
        "kms.local.path": str(tmp_path / "keystore"),
        "kms.local.key-file": str(tmp_path / "key"),
    }
    local.create_keystore(properties)
    local.create_key(properties, "master")
    plain = {"a.bin": pattern(200_000), "b/c=1/d.avro": pattern(65536, 7), "e": b"", "größe/f.txt": b"x"}
    for name, data in plain.items():
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_bytes(data)
    (tmp_path / "src/e").chmod(0o4640)
    os.utime(tmp_path / "src/e", ns=(0, -1_500_000_007))
    result = jobs.encrypt_files(
        tmp_path / "src",
        tmp_path / "dataset",
        kms=properties,
        wrapping_key_id="master",
        double_wrap=double_wrap,
        block_size=1 << 16,
        aad_prefix="files.part{n}" if double_wrap else None,
    )
    result.raise_for_failures()
    for rekey in (False, True):
        if rekey:
            jobs.rekey_files(tmp_path / "dataset", kms=properties, double_wrap=double_wrap).raise_for_failures()
        reader = SecondReader(tmp_path / "dataset", load_kms(properties))
        assert reader.files() == plain
        for row in reader.rows():
            info = (tmp_path / "src" / row["path"].decode()).stat()
            assert (row["mode"], row["mtime_ns"]) == (info.st_mode & 0o777, info.st_mtime_ns)
            assert row["path"] != b"e" or (row["mode"], row["mtime_ns"]) == (0o640, -1_500_000_007)
