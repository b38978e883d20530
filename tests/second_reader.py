"""A reader of datasets made from docs/dataset-format.md only, with cryptography, pyarrow and a KMS to unwrap with."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from support import open_stream

from ags_fast.keys.kms import KmsClient


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
        key = self.unwrap(auth["key_id"], auth["wrapped_key"], self.binding(b"document", path.encode()))  # type: ignore[arg-type]
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
        end = 8 + int.from_bytes(table[:8], "little")
        rows: list[dict[str, Any]] = []
        for count, packed, length, first in json.loads(table[8:end])["pages"]:
            plain = pa.decompress(table[end : end + packed], length, codec="zstd")
            page = pa.ipc.open_stream(plain).read_all().to_pylist()
            assert (len(page), page[0]["path"][:255]) == (count, base64.b64decode(first))
            rows += page
            end += packed
        assert (end, len(rows)) == (len(table), ref["entries"])
        bounds = [base64.b64decode(ref[name]) for name in ("first", "last")]
        assert all(bounds[0] <= row["path"][:255] <= bounds[1] for row in rows)
        return rows

    def manifests(self, version: dict[str, Any]) -> list[dict[str, Any]]:
        """The references of a version, those in lists too."""
        refs = list(version["manifests"])
        for name in version["lists"]:
            data = (self.folder / f"_ags/lists/{name}.json").read_bytes()
            assert hashlib.sha256(data).hexdigest() == name
            refs += json.loads(data)["manifests"]
        return refs

    def digests(self, path: str) -> dict[int, str]:
        """The SHA-256 of each version that a document descends from, as far as it knows, by number."""
        body, folder = self.document(path), path.rpartition("/")[0]
        chain = {"_ags/versions": "_ags/chain", "_ags/keys": "_ags/keys/chain"}[folder]
        number = body["version"] - len(body["ancestors"])
        found = dict(enumerate(body["ancestors"], number))
        for name in reversed(body["chain"]):
            data = (self.folder / f"{chain}/{name}.json").read_bytes()
            block = json.loads(data)
            number -= len(block["sha256"])
            assert (hashlib.sha256(data).hexdigest(), block["first"], len(block["sha256"])) == (name, number, 32)
            found |= dict(enumerate(block["sha256"], number))
        found[body["version"]] = hashlib.sha256((self.folder / path).read_bytes()).hexdigest()
        return found

    def check_history(self) -> dict[int, str]:
        """That all versions which are there are of one history, and made on keys of one; their digests."""
        for kind in ("_ags/keys", "_ags/versions"):
            digests = self.digests(self.newest(kind))
            there = {int(path.stem): path.read_bytes() for path in (self.folder / kind).glob("0*.json")}
            there = {number: data for number, data in there.items() if data != b'{"ags":1,"removed":true}\n'}
            assert there
            assert {
                number: hashlib.sha256(data).hexdigest() for number, data in there.items()
            }.items() <= digests.items()
        made_on = self.document(self.newest("_ags/versions"))["key_store"]
        assert self.digests(self.newest("_ags/keys"))[made_on["version"]] == made_on["sha256"]
        return digests

    def rows(self) -> list[dict[str, Any]]:
        version = self.document(self.newest("_ags/versions"))
        rows = []
        for ref in self.manifests(version):
            found = self.table(ref)
            rows += found
            assert found == sorted(found, key=lambda row: row["path"])
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
