"""Other people's vectors through the engine, and streams whose bytes never change."""

from __future__ import annotations

import base64
import io
import json
import re
from typing import TYPE_CHECKING

import cryptography_vectors
import pytest
from support import open_stream

import ags_fast
from ags_fast._core import Key
from ags_fast.keys import StandardKeyMetadata

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_wycheproof(vectors: Path) -> None:
    """Valid ones match byte for byte, invalid ones raise; a nonce that is not of 12 bytes is refused."""
    suite = json.loads((vectors / "wycheproof_aes_gcm_test.json").read_text())
    seen = {"valid": 0, "invalid": 0, "refused": 0}
    for group in suite["testGroups"]:
        for test in group["tests"]:
            key, nonce, aad, plain, sealed, tag = (
                bytes.fromhex(test[name]) for name in ("key", "iv", "aad", "msg", "ct", "tag")
            )
            if len(nonce) != 12:
                seen["refused"] += 1
                for call, data in ((Key(key).seal, plain), (Key(key).open, sealed + tag)):
                    with pytest.raises(ValueError, match="nonce has 12 bytes"):
                        call(nonce, data, aad)
            elif test["result"] == "valid":
                seen["valid"] += 1
                assert Key(key).seal(nonce, plain, aad) == sealed + tag, test["tcId"]
                assert Key(key).open(nonce, sealed + tag, aad) == plain, test["tcId"]
            else:
                seen["invalid"] += 1
                with pytest.raises(ags_fast.IntegrityError):
                    Key(key).open(nonce, sealed + tag, aad)
    assert sum(seen.values()) == suite["numberOfTests"]
    assert min(seen.values()) >= 50, seen


def cavp(name: str) -> Iterator[dict[str, bytes | None]]:
    """The cases of a NIST CAVP file that have a nonce of 96 bits and a tag of 128: "PT" is None where it must fail."""
    sizes: dict[str, int] = {}
    case: dict[str, bytes | None] = {}
    with cryptography_vectors.open_vector_file(f"ciphers/AES/GCM/{name}", "r") as file:
        for line in [*file, ""]:
            if size := re.match(r"\[(\w+) = (\d+)\]", line):
                sizes[size[1]] = int(size[2])
            elif value := re.match(r"(Key|IV|PT|AAD|CT|Tag) = ?([0-9a-f]*)", line):
                case[value[1]] = bytes.fromhex(value[2])
            elif line.startswith("FAIL"):
                case["PT"] = None
            elif not line.strip() and case:
                if sizes["IVlen"] == 96 and sizes["Taglen"] == 128:
                    yield case
                case = {}


@pytest.mark.parametrize("bits", [128, 192, 256])
def test_nist_cavp(bits: int) -> None:
    passed = failed = 0
    for case in cavp(f"gcmEncryptExtIV{bits}.rsp"):
        key, nonce, aad, plain, sealed, tag = (case[name] for name in ("Key", "IV", "AAD", "PT", "CT", "Tag"))
        assert len(key) == bits // 8  # type: ignore[arg-type]
        assert Key(key).seal(nonce, plain, aad) == sealed + tag  # type: ignore[arg-type, operator]
        passed += 1
    for case in cavp(f"gcmDecrypt{bits}.rsp"):
        key, nonce, aad, plain, sealed, tag = (case[name] for name in ("Key", "IV", "AAD", "PT", "CT", "Tag"))
        if plain is None:
            failed += 1
            with pytest.raises(ags_fast.IntegrityError):
                Key(key).open(nonce, sealed + tag, aad)  # type: ignore[arg-type, operator]
        else:
            passed += 1
            assert Key(key).open(nonce, sealed + tag, aad) == plain  # type: ignore[arg-type, operator]
    assert passed > 375, (passed, failed)
    assert failed > 100, (passed, failed)


# Made once by support.seal_stream with the nonces bytes([key size, block]) * 6. Key bytes count up from 0xa0,
# plaintext bytes from 0. Prefixes of 124 and 125 bytes are the longest that the engine joins with the block number to
# one call and the shortest that it does not.
FIXED = {
    "empty": (16, b"", 0, "414753310000100010001000100010001000100041143af48e393c9f7c0828e703e9532c"),
    "one byte": (
        16,
        b"prefix",
        1,
        "4147533110000000100010001000100010001000fdee72fb067b5d60b20153d530e16c03b3",
    ),
    "two full blocks": (
        24,
        bytes(range(16)),
        32,
        "414753311000000018001800180018001800180034370fc7baf716089f0bd4a4bc5c04b2f68d4377d007e28dcec7fd7ad470ee89"
        "1801180118011801180118010b3eb4ea01e895ced47d4ef4f88890febd5e78ded4d5f8c86e7f900853736b94",
    ),
    "short last block": (
        32,
        b"x" * 124,
        20,
        "4147533108000000200020002000200020002000805404ac0c9f82d5345824d158fcb9cefacda7aaf62f9ae72001200120012001"
        "20012001b9417c26b97700b48991cd2702af4b41e8f7641ded8fe5af20022002200220022002200279a6fa88a9606185fcef9952"
        "b033ed14e8d493fe",
    ),
    "long prefix": (
        32,
        b"y" * 125,
        17,
        "4147533108000000200020002000200020002000805404ac0c9f82d55fb4a9d34f2ec90cb716a332cf4aed0d2001200120012001"
        "20012001b9417c26b97700b48366f6af5e1a1340e6ae5e34876a258d20022002200220022002200279cdd962cb45e37e48c649aa"
        "02ad19e6a0",
    ),
}


@pytest.mark.parametrize("name", FIXED)
def test_fixed_streams(name: str) -> None:
    key_size, prefix, plain_length, stream_hex = FIXED[name]
    key = bytes(range(0xA0, 0xA0 + key_size))
    plain = bytes(range(plain_length))
    stream = bytes.fromhex(stream_hex)
    assert open_stream(stream, key, prefix) == plain
    assert ags_fast.AgsCodec(key, aad_prefix=prefix).decrypt(stream, length=len(stream)) == plain
    with ags_fast.AgsReader(io.BytesIO(stream), key, aad_prefix=prefix, length=len(stream)) as reader:
        assert reader.read() == plain
        assert ags_fast.encrypted_length(plain_length, reader.block_size) == len(stream)


def test_iceberg_rust_manifest_list(vectors: Path) -> None:
    """The chain that iceberg-rust wrote: master key, KEK, the manifest list's key metadata, AGS1, Avro."""
    fastavro = pytest.importorskip("fastavro")
    folder = vectors / "iceberg-rust"
    table = json.loads((folder / "TableMetadataV3ValidEncryption.json").read_text())
    keys = {entry["key-id"]: entry for entry in table["encryption-keys"]}
    entry = keys[table["snapshots"][0]["key-id"]]
    kek_entry = keys[entry["encrypted-by-id"]]

    wrapped_kek = base64.b64decode(kek_entry["encrypted-key-metadata"])
    kek = Key(bytes(range(16))).open(wrapped_kek[:12], wrapped_kek[12:], b"")
    wrapped = base64.b64decode(entry["encrypted-key-metadata"])
    encoded = Key(kek).open(wrapped[:12], wrapped[12:], kek_entry["properties"]["KEY_TIMESTAMP"].encode())

    metadata = StandardKeyMetadata.decode(encoded)
    assert metadata.encode() == encoded
    assert metadata.file_length is None  # iceberg-rust wraps the key before it knows
    path = folder / "manifest-list-v3-encrypted.avro"
    with ags_fast.open(path, key_metadata=encoded, length=path.stat().st_size) as reader:
        assert reader.block_size == 1 << 20
        reader.verify()
        avro = fastavro.reader(reader)
        assert avro.writer_schema["name"] == "manifest_file"
        assert {"snapshot-id", "format-version"} <= set(avro.metadata), avro.metadata
        assert list(avro) == []  # the snapshot is an append of nothing
