"""Iceberg's ``encryption-keys``: bytes as Java and Rust have them, and the two rotations on that list."""

from __future__ import annotations

import base64
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from kms_clients import UnitestKms, keystore
from support import flip

from ags_fast import AgsReader
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError
from ags_fast.keys import (
    EncryptedKey,
    KeyEntry,
    StandardKeyMetadata,
    add_manifest_list_key,
    clear_cache,
    iceberg,
    kms_calls,
    manifest_list_key,
    new_kek,
    read_encryption_keys,
    rewrap_keks,
    rotate_keks,
    write_encryption_keys,
)
from ags_fast.keys.iceberg import _as_in_java, _java_hash
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class Rewrapping(UnitestKms):
    """One that does both in one call."""

    def rewrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        self.calls.append("rewrap")
        nonce, key = os.urandom(12), self.masters[wrapping_key_id]
        return nonce + AESGCM(key).encrypt(nonce, AESGCM(key).decrypt(wrapped[:12], wrapped[12:], None), None)


@pytest.fixture(autouse=True)
def no_cache() -> None:
    clear_cache()


def written(keys: Sequence[EncryptedKey]) -> str:
    """As it is in metadata.json."""
    return json.dumps(write_encryption_keys(keys), separators=(",", ":"), ensure_ascii=False)


def seal(key: bytes, plain: bytes, aad: bytes | None) -> bytes:
    nonce = os.urandom(12)
    return nonce + AESGCM(key).encrypt(nonce, plain, aad)


def kek_json(key_id: str, kek: bytes, created_ms: int, master: str = "keyA", **more: Any) -> dict[str, Any]:
    """As Java's StandardEncryptionManager makes one."""
    return {
        "key-id": key_id,
        "encrypted-key-metadata": base64.b64encode(seal(UnitestKms().masters[master], kek, None)).decode(),
        "encrypted-by-id": master,
        "properties": {"KEY_TIMESTAMP": str(created_ms)},
    } | more


def list_json(key_id: str, metadata: StandardKeyMetadata, kek: bytes, kek_id: str, created_ms: int) -> dict[str, Any]:
    sealed = seal(kek, metadata.encode(), str(created_ms).encode())
    return {
        "key-id": key_id,
        "encrypted-key-metadata": base64.b64encode(sealed).decode(),
        "encrypted-by-id": kek_id,
    }


def metadata_of(i: int) -> StandardKeyMetadata:
    return StandardKeyMetadata(bytes(range(i, i + 16)), b"1234567890123456", 1000 + i)


KEK1, KEK2 = bytes(range(16)), bytes(range(32))
NOW = 1_781_172_301_703


@pytest.fixture
def table() -> list[dict[str, Any]]:
    """Two KEKs, of which Java made the second when the first was 731 days old: after the entry that uses it."""
    old, new = NOW - 731 * 86_400_000, NOW
    return [
        kek_json("rzj/aBG6Pyq1V+S1M3wAgQ==", KEK1, old),
        list_json("a1", metadata_of(1), KEK1, "rzj/aBG6Pyq1V+S1M3wAgQ==", old),
        list_json("a2", metadata_of(2), KEK1, "rzj/aBG6Pyq1V+S1M3wAgQ==", old),
        list_json("b1", metadata_of(3), KEK2, "new", new),
        kek_json("new", KEK2, new),
    ]


def opened(keys: Sequence[EncryptedKey], kms: Any) -> list[StandardKeyMetadata]:
    return [manifest_list_key(keys, key_id, kms) for key_id in ("a1", "a2", "b1")]


# ---------------------------------------------------------------- bytes


def test_rust_fixture(vectors: Path) -> None:
    """A table of iceberg-rust's tests, down to the bytes of its manifest list."""
    folder = vectors / "iceberg-rust"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    text = (folder / "TableMetadataV3ValidEncryption.json").read_text()
    table = json.loads(text)
    keys = read_encryption_keys(table["encryption-keys"])
    assert [key.is_kek for key in keys] == [True, False]
    assert keys[0].created_ms == 1781172301703
    assert written(keys) == json.dumps(table["encryption-keys"], separators=(",", ":"), ensure_ascii=False)
    kms = UnitestKms(**{"master-1": bytes(range(16)), "master-2": bytes(16)})
    stream = (folder / "manifest-list-v3-encrypted.avro").read_bytes()

    def read(keys: Sequence[EncryptedKey], kms: Any) -> bytes:
        found = manifest_list_key(keys, table["snapshots"][0]["key-id"], kms)
        assert found.file_length is None  # Rust wraps before it writes
        with AgsReader(stream, found.encryption_key, length=len(stream), aad_prefix=found.aad_prefix) as reader:
            return reader.read()

    plain = read(keys, kms)
    assert plain.startswith(b"Obj\x01")
    assert kms.calls == ["unwrap"]
    for rotated in (
        rotate_keks(keys, kms, "master-1"),
        rotate_keks(keys, kms, "master-2", keep_old=False),
        rewrap_keks(keys, kms),
        rewrap_keks(keys, kms, new_wrapping_key_id="master-2"),
    ):
        clear_cache()
        assert read(read_encryption_keys(json.loads(written(rotated))), kms) == plain


def test_round_trip(table: list[dict[str, Any]]) -> None:
    """Order, unknown fields, properties that are empty or null: all as it was."""
    odd = [
        {"later": 1, **table[0], "properties": {"z": "ключ 🔑", "KEY_TIMESTAMP": "5", "a": "/+\u2028"}, "null": None},
        {"properties": {}, **table[1]},
        {**table[2], "properties": None},
        {"encrypted-by-id": "new", "key-id": " x ", "encrypted-key-metadata": "AA=="},
        kek_json("new", KEK2, NOW),
    ]
    for keys in (table, odd, []):
        text = json.dumps(keys, separators=(",", ":"), ensure_ascii=False)
        assert written(read_encryption_keys(json.loads(text))) == text
    kek = read_encryption_keys(odd)[0]
    assert kek.created_ms == 5
    assert kek.entry().properties["z"] == "ключ 🔑"
    assert kek.entry().more == {
        "later": 1,
        "null": None,
    }
    assert repr(kek).count("later") == 0


@pytest.mark.parametrize(
    "change",
    [
        {"key-id": None},
        {"key-id": ""},
        {"key-id": 5},
        {"encrypted-by-id": None},
        {"encrypted-key-metadata": "AA"},
        {"encrypted-key-metadata": "AB=="},
        {"encrypted-key-metadata": "A_=="},
        {"encrypted-key-metadata": ""},
        {"encrypted-key-metadata": None},
        {"properties": []},
        {"properties": [1]},
        {"properties": {"a": 1}},
        {"properties": "x"},
    ],
)
def test_impossible_entries(table: list[dict[str, Any]], change: dict[str, Any]) -> None:
    if change != {"properties": []}:  # which is as good as none
        with pytest.raises(FormatError):
            read_encryption_keys([table[0] | change])
    for name in change:
        entry = {field: value for field, value in table[0].items() if field != name}
        if name != "properties":
            with pytest.raises(FormatError, match=f"has no '{name}'"):
                read_encryption_keys([entry])


def test_impossible_lists(table: list[dict[str, Any]]) -> None:
    bad: list[Any] = [None, {}, "[]", [5], [None], [table[0], table[0]]]
    for value in bad:
        with pytest.raises(FormatError):
            read_encryption_keys(value)
    keys = read_encryption_keys(table)
    with pytest.raises(FormatError, match="two entries"):
        write_encryption_keys([*keys, keys[0]])


def test_entries_of_key_stores(table: list[dict[str, Any]]) -> None:
    """A KEK is a `KeyEntry`; what only that has is kept in properties."""
    kek = read_encryption_keys(table)[4]
    entry = kek.entry()
    assert (entry.key_id, entry.wrapping_key_id, entry.state, entry.created_ms) == ("new", "keyA", "active", NOW)
    assert EncryptedKey.of(entry).to_json() == kek.to_json()
    more = entry.replace(state="retired", uses=7, properties={"scope": "day=1"}, more={"later": 1})
    as_json = EncryptedKey.of(more).to_json()
    assert list(as_json) == ["key-id", "encrypted-key-metadata", "encrypted-by-id", "properties", "later"]
    assert as_json["properties"] == {
        "KEY_TIMESTAMP": str(NOW),
        "scope": "day=1",
        "ags.state": "retired",
        "ags.uses": "7",
    }
    retired = EncryptedKey.of(entry.replace(state="retired"))
    assert list(retired.properties) == ["ags.state", "KEY_TIMESTAMP"]  # as Java would write it
    again = EncryptedKey.from_json(as_json).entry()
    assert again == more.replace(properties={"scope": "day=1", "KEY_TIMESTAMP": str(NOW)})
    assert EncryptedKey.of(again.replace(state="active", uses=0)).properties.keys() == {"KEY_TIMESTAMP", "scope"}
    with pytest.raises(ValueError, match="single wrap"):
        EncryptedKey.of(KeyEntry("k", "m"))
    for properties in ({"ags.state": "x"}, {"ags.uses": "x"}, {"ags.uses": "-1"}):
        with pytest.raises(FormatError):
            EncryptedKey.from_json(kek.to_json() | {"properties": {"KEY_TIMESTAMP": "1", **properties}}).entry()


def test_the_order_of_javas_hash_map() -> None:
    """As `new HashMap().putAll(...)` of Java 17 goes through these."""
    for given, order in (
        ("KEY_TIMESTAMP ags.state", "ags.state KEY_TIMESTAMP"),
        ("KEY_TIMESTAMP ags.state ags.uses", "ags.state ags.uses KEY_TIMESTAMP"),
        ("KEY_TIMESTAMP ags.uses ags.state note", "note ags.uses ags.state KEY_TIMESTAMP"),
        ("n m l k j i h g f e d c b a", "a b c d e f g h i j k l m n"),
        (
            "KEY_TIMESTAMP ключ 🔑 x ags.master-version owner",
            "owner ключ x ags.master-version KEY_TIMESTAMP 🔑",
        ),
        ("AaAa BBBB AaBB z", "z AaAa BBBB AaBB"),  # three of one hash
    ):
        assert " ".join(_as_in_java(dict.fromkeys(given.split(), ""))) == order
    assert _as_in_java({}) == {}
    for text, value in (
        ("", 0),
        ("a", 97),
        ("5b29941b-b3b4-4d57-8758-a9d1bf340b39", 1872827790),
        ("ключ🔑", 1947827895),
    ):
        assert _java_hash(text) == value
    assert _java_hash("scAmTJzgxf7vDQBetLMWSA==") == -231139115 % (1 << 32)


# ---------------------------------------------------------------- keys of manifest lists


def test_keys_of_manifest_lists(table: list[dict[str, Any]]) -> None:
    keys, kms = read_encryption_keys(table), UnitestKms()
    for _ in range(2):
        assert opened(keys, kms) == [metadata_of(1), metadata_of(2), metadata_of(3)]
    assert kms.calls == ["unwrap", "unwrap"]  # one for each KEK
    with pytest.raises(KeyAccessError, match="no key 'absent'"):
        manifest_list_key(keys, "absent", kms)
    with pytest.raises(FormatError, match="is a key encryption key"):
        manifest_list_key(keys, "new", kms)
    with pytest.raises(KeyAccessError, match="'new', which the table does not have"):
        manifest_list_key(keys[:4], "b1", kms)
    with pytest.raises(FormatError, match="KEY_TIMESTAMP"):  # wrapped by what is no KEK
        manifest_list_key(read_encryption_keys([*table[:3], table[3] | {"encrypted-by-id": "a1"}]), "b1", kms)


def test_tampering(table: list[dict[str, Any]]) -> None:
    kms = UnitestKms()

    def refused(change: dict[str, Any], at: int) -> None:
        clear_cache()
        keys = read_encryption_keys([entry | change if i == at else entry for i, entry in enumerate(table)])
        with pytest.raises((IntegrityError, FormatError, KeyAccessError)):
            manifest_list_key(keys, "b1", kms)

    for at in (3, 4):
        sealed = base64.b64decode(table[at]["encrypted-key-metadata"])
        for bit in range(0, 8 * len(sealed), 5):
            refused({"encrypted-key-metadata": base64.b64encode(flip(sealed, bit)).decode()}, at)
        refused({"encrypted-key-metadata": base64.b64encode(sealed[:20]).decode()}, at)
    refused({"encrypted-key-metadata": table[1]["encrypted-key-metadata"]}, 3)
    for timestamp in (str(NOW + 1), "0" + str(NOW), "", "x", "+1", "-1", "1_0", "9" * 19):
        refused({"properties": {"KEY_TIMESTAMP": timestamp}}, 4)
    refused({"properties": {}}, 4)


def test_adding(table: list[dict[str, Any]]) -> None:
    """By hand, as Java will open it."""
    keys, kms = read_encryption_keys(table), UnitestKms()
    more, key_id = add_manifest_list_key(keys, metadata_of(9), kms, "keyA", now=NOW + 1)
    assert more[:-1] == keys
    assert len(base64.b64decode(key_id)) == 16
    assert kms.calls == ["unwrap"]
    last = write_encryption_keys(more)[-1]
    assert list(last) == ["key-id", "encrypted-key-metadata", "encrypted-by-id"]
    assert (last["key-id"], last["encrypted-by-id"]) == (key_id, "new")
    sealed = base64.b64decode(last["encrypted-key-metadata"])
    assert AESGCM(KEK2).decrypt(sealed[:12], sealed[12:], str(NOW).encode()) == metadata_of(9).encode()
    # 731 days later a new KEK is made, and under another master key, and where all are retired.
    retired = [EncryptedKey.of(key.entry().replace(state="retired")) if key.is_kek else key for key in keys]
    for given, master, now in ((keys, "keyA", NOW + 731 * 86_400_000), (keys, "keyB", NOW), (retired, "keyA", NOW)):
        kms.calls.clear()
        more, key_id = add_manifest_list_key(given, metadata_of(9), kms, master, now=now)
        kek, key = more[-2:]
        assert kms.calls == ["wrap", "unwrap"]  # which shows that the new KEK opens
        assert more[:-2] == given
        assert kek.is_kek
        assert kek.created_ms == now
        assert kek.encrypted_by_id == master
        assert key.encrypted_by_id == kek.key_id
        assert manifest_list_key(read_encryption_keys(json.loads(written(more))), key_id, kms) == metadata_of(9)


# ---------------------------------------------------------------- rotation


def javas_choice(keys: Sequence[EncryptedKey], master: str, now: int) -> str:
    """The KEK that StandardEncryptionManager.keyEncryptionKeyID() finds: a HashMap of 16 buckets that doubles."""
    buckets = 16
    while len(keys) > buckets * 3 // 4:
        buckets *= 2
    in_order = sorted(keys, key=lambda key: _java_hash(key.key_id) & buckets - 1)
    return next(k.key_id for k in in_order if k.encrypted_by_id == master and now - k.created_ms < 730 * 86_400_000)


@pytest.mark.parametrize("keep_old", [True, False])
def test_new_keks(table: list[dict[str, Any]], keep_old: bool) -> None:
    keys, kms = read_encryption_keys(table), UnitestKms()
    rotated = rotate_keks(keys, kms, "keyA", keep_old=keep_old, now=NOW - 5)
    assert kms.calls == ["wrap", *["unwrap"] * 3]  # the new KEK, and 1 unwrap for each old one
    kek = rotated[0]
    assert kek.is_kek
    assert kek.created_ms == NOW + 1
    left = [key for key in keys if keep_old or not key.is_kek]
    assert [key.key_id for key in rotated[1:]] == [key.key_id for key in left]
    for before, after in zip(left, rotated[1:], strict=True):
        if before.is_kek:
            assert after == before
        else:
            assert after.encrypted_by_id == kek.key_id
            assert after.encrypted_key_metadata != before.encrypted_key_metadata
    clear_cache()
    kms.calls.clear()
    again = read_encryption_keys(json.loads(written(rotated)))
    assert opened(again, kms) == opened(keys, kms)[:3]
    assert kms.calls.count("unwrap") == 3
    stolen = [*keys[:1], *(EncryptedKey(k.key_id, k.encrypted_key_metadata, keys[0].key_id) for k in again[-3:])]
    with pytest.raises(IntegrityError):  # the old KEK opens none of them any more
        manifest_list_key(stolen, again[-1].key_id, kms)
    assert javas_choice(again, "keyA", NOW) == kek.key_id
    more, key_id = add_manifest_list_key(again, metadata_of(8), kms, "keyA", now=NOW + 2)
    assert more[-1].encrypted_by_id == kek.key_id
    assert manifest_list_key(more, key_id, kms) == metadata_of(8)


def test_writers_take_the_new_kek_of_many(table: list[dict[str, Any]]) -> None:
    """Java's too, whatever the ids of the old ones, and also when the list has grown."""
    kms = UnitestKms()
    olds = [kek_json(f"kek {i}", KEK2, NOW - i) for i in range(40)]
    lists = [list_json(f"list {i}", metadata_of(i % 100), KEK2, f"kek {i % 40}", NOW - i % 40) for i in range(300)]
    keys = read_encryption_keys([*olds, *lists])
    for _ in range(3):
        rotated = rotate_keks(keys, kms, "keyA", now=NOW)
        for size in (len(rotated), 384, 700):
            grown = [*rotated, *(EncryptedKey(f"more {i}", b"x", "x") for i in range(size - len(rotated)))]
            assert javas_choice(grown, "keyA", NOW) == rotated[0].key_id
    assert manifest_list_key(rotated, "list 299", kms) == metadata_of(99)
    with pytest.raises(KeyAccessError, match="which the table does not have"):
        rotate_keks(keys[1:], kms, "keyA")


def test_what_else_an_entry_holds_survives(table: list[dict[str, Any]]) -> None:
    for entry in table:
        entry["later"] = [entry["key-id"]]
    table[1]["properties"] = {"note": "n"}
    kms = UnitestKms()
    for turn in (
        lambda keys: rotate_keks(keys, kms, "keyA")[1:],
        lambda keys: rewrap_keks(keys, kms, new_wrapping_key_id="keyB"),
    ):
        for before, after in zip(table, write_encryption_keys(turn(read_encryption_keys(table))), strict=True):
            assert list(before) == list(after)
            assert before["later"] == after["later"]
            assert before.get("properties") == after.get("properties")


def test_master_keys(table: list[dict[str, Any]]) -> None:
    """KEKs are wrapped anew; ids, timestamps and the keys of manifest lists stay."""
    keys = read_encryption_keys(table)
    other = UnitestKms(keyC=b"2" * 32)
    turns: list[tuple[Any, Callable[[Any], list[EncryptedKey]], str, list[str], Any]] = [
        (UnitestKms(), lambda kms: rewrap_keks(keys, kms), "keyA", ["unwrap", "wrap", "unwrap"] * 2, None),
        (Rewrapping(), lambda kms: rewrap_keks(keys, kms), "keyA", ["rewrap", "unwrap"] * 2, None),
        (
            Rewrapping(),
            lambda kms: rewrap_keks(keys, kms, new_wrapping_key_id="keyA"),
            "keyA",
            ["rewrap", "unwrap"] * 2,
            None,
        ),
        (
            Rewrapping(),
            lambda kms: rewrap_keks(keys, kms, new_wrapping_key_id="keyB"),
            "keyB",
            ["unwrap", "wrap", "unwrap"] * 2,
            None,
        ),
        (
            UnitestKms(),
            lambda kms: rewrap_keks(keys, kms, new_kms=other, new_wrapping_key_id="keyC"),
            "keyC",
            ["unwrap"] * 2,
            other,
        ),
    ]
    for kms, turn, master, calls, reader in turns:
        clear_cache()
        rotated = turn(kms)
        assert kms.calls == calls
        for before, after in zip(keys, rotated, strict=True):
            if before.is_kek:
                assert (after.key_id, after.properties, after.encrypted_by_id) == (
                    before.key_id,
                    before.properties,
                    master,
                )
                assert after.encrypted_key_metadata != before.encrypted_key_metadata
            else:
                assert after == before
        again = read_encryption_keys(json.loads(written(rotated)))
        assert opened(again, reader or kms) == [metadata_of(1), metadata_of(2), metadata_of(3)]
    assert other.calls == ["wrap", "unwrap"] * 2
    with pytest.raises(FormatError, match="KEY_TIMESTAMP"):
        rewrap_keks([EncryptedKey("k", b"x", "keyA", {"KEY_TIMESTAMP": "x"})], UnitestKms())


class Garbling(Rewrapping):
    """What it wraps does not open."""

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        return flip(super().wrap_key(key, wrapping_key_id), 100)

    def rewrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return flip(super().rewrap_key(wrapped, wrapping_key_id), 100)


class Confusing(Rewrapping):
    """What it wraps opens as another key."""

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        return super().wrap_key(bytes(len(key)), wrapping_key_id)

    def rewrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return super().wrap_key(bytes(16), wrapping_key_id)


@pytest.mark.parametrize("kind", [Garbling, Confusing])
def test_a_wrap_that_does_not_open_is_not_put_to_use(table: list[dict[str, Any]], kind: type[Rewrapping]) -> None:
    keys = read_encryption_keys(table)
    actions: list[Callable[[UnitestKms], object]] = [
        lambda kms: rotate_keks(keys, kms, "keyA"),
        lambda kms: add_manifest_list_key(keys, metadata_of(9), kms, "keyB", now=NOW),
        lambda kms: rewrap_keks(keys, kms),
        lambda kms: rewrap_keks(keys, kms, new_wrapping_key_id="keyB"),
        lambda kms: rewrap_keks(keys, UnitestKms(), new_kms=kms, new_wrapping_key_id="keyB"),
    ]
    for action in actions:
        clear_cache()
        with pytest.raises((KeyAccessError, IntegrityError)):
            action(kind())


def test_a_key_that_opens_as_another_is_not_put_to_use(
    table: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of memory changes keys of lists between two wraps: each is opened again and compared."""
    keys, clean = read_encryption_keys(table), iceberg._wrapped  # noqa: SLF001
    monkeypatch.setattr(iceberg, "_wrapped", lambda kek, plain, client: clean(kek, list(plain)[::-1], client))
    with pytest.raises(IntegrityError, match="opens as another key under its new KEK"):
        rotate_keks(keys, UnitestKms(), "keyA")


def test_the_old_version_is_destroyed(tmp_path: Path) -> None:
    """Afterwards all is readable but what was written before; and the second run has nothing to do."""
    kms = keystore(tmp_path, "m")
    keys: list[EncryptedKey] = []
    ids = []
    for i in range(3):
        keys, key_id = add_manifest_list_key(keys, metadata_of(i), kms, "m", now=NOW + i * 800 * 86_400_000)
        ids.append(key_id)
    assert sum(key.is_kek for key in keys) == 3
    local.rotate_key(kms, "m")
    before = kms_calls()
    rotated = rewrap_keks(keys, kms)
    made = kms_calls() - before
    assert made == {("local", "unwrap"): 6, ("local", "wrap"): 3}
    before = kms_calls()
    assert rewrap_keks(rotated, kms) == rotated
    assert kms_calls() == before
    local.set_state(kms, "m", "destroyed", version=1)
    clear_cache()
    assert [manifest_list_key(rotated, key_id, kms) for key_id in ids] == [metadata_of(i) for i in range(3)]
    clear_cache()
    for key_id in ids:
        with pytest.raises(KeyAccessError, match="destroyed"):
            manifest_list_key(keys, key_id, kms)


def test_nothing_shows_a_key(table: list[dict[str, Any]]) -> None:
    kms = UnitestKms()
    keys = rotate_keks(read_encryption_keys(table), kms, "keyA")
    kek = new_kek(kms, "keyA")
    shown = repr(keys) + repr(EncryptedKey.of(kek)) + written(keys)
    for secret in (KEK1, KEK2, *(metadata_of(i).encryption_key for i in (1, 2, 3))):
        for form in (secret.hex(), base64.b64encode(secret).decode(), repr(secret)[2:-1]):
            assert form not in shown
