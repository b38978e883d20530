"""A reader of datasets made from docs/dataset-format.md only, with cryptography, msgspec and a KMS to unwrap with."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from support import open_stream

from ags_fast.keys.kms import KmsClient

NAMED = ("key_id", "format", "job_id", "set_id")  # columns that have indexes of names
REST = (
    *("file", "key_id", "path", "format", "plain_length", "file_length", "block_size", "job_id", "set_id", "part"),
    *("parts", "source", "stamp", "mode", "mtime_ns", "key_material"),
    *("source_length", "ctime_ns", "inode", "etag", "checksum"),
)
KEY = ("key_id", "wrapping_key_id", "wrapped", "state", "created_ms", "uses", "properties", "more")


class SecondReader:
    def __init__(self, folder: Path, kms: KmsClient) -> None:
        self.folder, self.kms = folder, kms
        self.path = max(str(path.relative_to(folder)) for path in (folder / "_ags/log").glob("*/*"))
        sealer = self.header(self.path)["sealer"]
        self.id, self.keys = self.header(self.path)["dataset_id"], {sealer["key_id"]: sealer}
        self.head = self.document(self.path)
        self.keys = self.head["keys"]
        assert self.keys[self.head["sealer"]] == sealer
        assert (self.head["dataset_id"], self.head["number"]) == (self.id, int(self.path[-10:]))
        older = [key for ref in self.head.get("key_tables", ()) for key in self.key_table(ref)]
        gone = self.head.get("left", ())
        self.keys = {key["key_id"]: key for key in older if key["key_id"] not in gone} | self.keys
        self.keys = {key_id: key for key_id, key in self.keys.items() if key["wrapping_key_id"]}

    def binding(self, purpose: bytes, path: bytes) -> bytes:
        return b"\0".join([b"ags_fast", purpose, self.id.encode(), path])

    def unwrap(self, key_id: str, wrapped: bytes, binding: bytes) -> bytes:
        key = self.keys[key_id]
        if key["wrapped"] is None:
            plain = self.kms.unwrap_key(wrapped, key["wrapping_key_id"])
            assert plain[-32:] == hashlib.sha256(binding).digest()
            return plain[:-32]
        of_text = isinstance(key["wrapped"], str)  # in JSON
        kek = self.kms.unwrap_key(
            base64.b64decode(key["wrapped"]) if of_text else key["wrapped"], key["wrapping_key_id"]
        )
        return AESGCM(kek).decrypt(wrapped[:12], wrapped[12:], binding)

    def header(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / path).read_bytes().split(b"\n")[0])
        assert found["ags"] == 3
        return found

    def document(self, path: str) -> dict[str, Any]:
        header, body = self.header(path), (self.folder / path).read_bytes().partition(b"\n")[2]
        wrapped, nonce, tag = (base64.b64decode(header[name]) for name in ("wrapped", "nonce", "tag"))
        key = self.unwrap(header["sealer"]["key_id"], wrapped, self.binding(b"document", path.encode()))
        assert AESGCM(key).decrypt(nonce, tag, body) == b""
        assert header["dataset_id"] == self.id
        parsed: dict[str, Any] = json.loads(body)
        return parsed

    def pages(self, ref: dict[str, Any]) -> list[Any]:
        """The pages of a table; its counts must be right if it has them."""
        stream = (self.folder / ref["path"]).read_bytes()
        wrapped = ref["wrapped"] if isinstance(ref["wrapped"], bytes) else base64.b64decode(ref["wrapped"])
        data = open_stream(stream, self.unwrap(ref["key_id"], wrapped, self.binding(b"table", ref["path"].encode())))
        assert len(data) == ref["length"]
        directory = msgspec.msgpack.decode(data[ref["directory"] :])
        end = sum(directory[-1][1:])
        counts = data[end : ref["directory"]]
        self.counts = ref["keys"] if ref["keys"] is not None else msgspec.msgpack.decode(zlib.decompress(counts))
        return [(first, data[at : at + length]) for first, at, length in directory]

    def key_table(self, ref: dict[str, Any]) -> list[dict[str, Any]]:
        keys = []
        for first, page in self.pages(ref):
            columns = msgspec.msgpack.decode(zlib.decompress(page))
            keys += [dict(zip(KEY, row, strict=True)) for row in zip(*columns, strict=True)]
            assert keys[-len(columns[0])]["key_id"].encode() == first
        assert len(keys) == ref["rows"]
        return keys

    def table(self, ref: dict[str, Any]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for first, page in self.pages(ref):
            names, wrapped, columns, prefixes, rest = msgspec.msgpack.decode(page)
            values = dict(zip(REST, msgspec.msgpack.decode(zlib.decompress(rest)), strict=True))
            for n in range(len(wrapped)):
                row = {name: None if column is None else column[n] for name, column in values.items()}
                row |= {name: None if row[name] is None else names[row[name]] for name in NAMED}
                keys = [(column, names[i], dek) for column, i, dek in columns[n] or ()]
                rows.append(row | {"wrapped_dek": wrapped[n], "column_keys": keys, "aad_prefix": prefixes[n]})
            assert rows[-len(wrapped)]["path"] == first
        used = [row["key_id"] for row in rows] + [key_id for row in rows for _, key_id, _ in row["column_keys"]]
        assert {key_id: used.count(key_id) for key_id in used} == self.counts
        assert len(rows) == ref["rows"]
        assert [base64.b64decode(ref[name]) for name in ("first", "last")] == [rows[at]["path"] for at in (0, -1)]
        assert rows == sorted(rows, key=lambda row: row["path"])
        return rows

    def digests(self) -> dict[int, str]:
        """The SHA-256 of each entry that the head descends from, as far as it knows, by number."""
        number = self.head["number"]
        found = {number - n: digest for n, digest in enumerate(reversed(self.head["near"]), 1)}
        for block in self.head["blocks"]:
            data = (self.folder / block["path"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == block["sha256"]
            found |= dict(enumerate(json.loads(data), block["first"]))
        return found | {number: hashlib.sha256((self.folder / self.path).read_bytes()).hexdigest()}

    def rows(self) -> list[dict[str, Any]]:
        return [row for ref in self.head["files"] for row in self.table(ref)]

    def files(self) -> dict[str, bytes]:
        return {row["path"].decode(): self.file(row) for row in self.rows()}

    def file(self, row: dict[str, Any]) -> bytes:
        stream = Path(os.fsdecode(os.path.join(bytes(self.folder), row["file"]))).read_bytes()
        assert len(stream) == row["file_length"]
        assert stream[4:8] == row["block_size"].to_bytes(4, "little")
        dek = self.unwrap(row["key_id"], row["wrapped_dek"], self.binding(b"dek", row["file"]))
        return open_stream(stream, dek, row["aad_prefix"])
