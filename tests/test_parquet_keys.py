"""Keys, AAD prefixes and policies of ags_fast.parquet: whom a file opens for, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
from typing import TYPE_CHECKING, Any

import parquet_files as files
import parquet_peers as peers
import pme_reference as ref
import pytest
from parquet_files import (
    COLUMNS,
    FOUR,
    KF,
    PREFIX,
    RICH_LEAVES,
    UNIFORM,
    Mode,
    data_of,
    key,
    reference,
    refused,
    rich,
    seal,
    unseal,
)
from parquet_peers import GCM

from ags_fast import IntegrityError, KeyAccessError, KeyLimitError, PolicyError, parquet
from ags_fast._core import Key
from ags_fast.parquet import Keys, keytools

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pa, pq = peers.pa, peers.pq


# ---------------------------------------------------------------- without the footer key


SIGNED = Mode(plaintext_footer=True, columns="columns")


def holder(*columns: str) -> Keys:
    """Somebody's who has these columns' keys only."""
    return Keys(None, {column: SIGNED.leaf_keys(RICH_LEAVES)[column,] for column in columns})


def test_a_column_without_the_footer_key() -> None:
    plain = rich()
    sealed, table = seal(plain, SIGNED), pq.read_table(pa.BufferReader(plain))
    keys = holder("id")
    report = parquet.verify(sealed, keys, missing="skip")
    assert (report.footer, report.footer_verified) == ("signed", False)
    assert any("signature was not verified" in warning for warning in report.warnings)
    assert [(row.path, row.key, row.authenticated) for row in report.columns] == [
        ("id", "column", True),
        ("word", "missing", False),
        ("list.list.element", "missing", False),
        ("open", "missing", False),
    ]
    back = bytearray()
    report = parquet.decrypt_file(sealed, back, keys, missing="drop")
    assert not report.footer_verified
    assert any("signature was not verified" in one for one in report.warnings)
    assert pq.read_table(pa.BufferReader(back), page_checksum_verification=True) == table.select(["id"])
    with parquet.open_plain(sealed, keys, missing="hide") as view:
        assert not view.footer_verified
        assert view.columns == ["id"]
        assert pq.read_table(view) == table.select(["id"])
    both = parquet.verify(sealed, SIGNED.keys(RICH_LEAVES))
    assert both.footer_verified
    assert both.warnings == []

    # Where all that is sealed has a key, nothing is missing; columns in plain text are shown.
    partial = Mode(plaintext_footer=True, columns="partial")
    sealed = seal(plain, partial)
    columns = {path: value for path, value in partial.leaf_keys(RICH_LEAVES).items() if value}
    held = {path: value for path, value in columns.items() if path != ("word",)}
    with parquet.open_plain(sealed, Keys(None, held), missing="hide") as view:
        assert pq.read_table(view) == table.select(["id", "list", "open"])


def test_what_needs_the_footer_key() -> None:
    keys, full, plain = holder("id"), SIGNED.keys(RICH_LEAVES), rich()
    sealed = seal(plain, SIGNED)
    for call in (
        lambda: parquet.verify(sealed, keys),
        lambda: parquet.open_plain(sealed, keys),
        lambda: parquet.decrypt_file(sealed, bytearray(), keys),
    ):
        with pytest.raises(KeyAccessError, match="'word' is needed and not given: it is the footer key"):
            call()
    for same_size in (False, True):
        refused(
            KeyAccessError,
            "old footer key.*was not verified",
            parquet.reencrypt_file,
            sealed,
            keys,
            full,
            same_size=same_size,
        )
        refused(ValueError, "footer key is required", parquet.reencrypt_file, sealed, full, keys, same_size=same_size)
    refused(ValueError, "footer key is required", parquet.encrypt_file, plain, keys)
    with pytest.raises(ValueError, match="footer key is required"):
        parquet.write_table(pq.read_table(pa.BufferReader(plain)), bytearray(), keys)
    with pytest.raises(KeyAccessError, match=r"of the footer; without the footer key, Keys\(None, "):
        parquet.verify(sealed, {}.__getitem__)
    encrypted = seal(plain, COLUMNS)
    for call in (
        lambda: parquet.verify(encrypted, Keys(None, {"id": key("x")}), missing="skip"),
        lambda: parquet.open_plain(encrypted, Keys(None, {"id": key("x")}), missing="hide"),
    ):
        with pytest.raises(KeyAccessError, match="footer is encrypted"):
            call()
    for wrong in (
        lambda: Keys(None),
        lambda: Keys(None, {"a": parquet.FOOTER_KEY}),
        lambda: Keys(None, {"a": key("a")}, footer_metadata=b"kf"),
    ):
        with pytest.raises(ValueError, match="without a footer key"):
            wrong()
    assert "no footer" in repr(keys)


def test_what_is_encrypted_is_not_encrypted_again() -> None:
    for mode in FOUR:
        sealed = seal(rich(), mode)
        refused(PolicyError, "encrypted already.*re-encrypt", parquet.encrypt_file, sealed, UNIFORM.keys([]))


@pytest.mark.parametrize("footer", [False, True])
def test_prefixes(footer: bool) -> None:
    plain = rich()
    none, stored, supplied = (Mode(GCM, footer, "uniform", prefix) for prefix in (None, "stored", "supplied"))
    for mode, given, error, match in (
        (none, b"x", PolicyError, "the file has no AAD prefix"),
        (stored, b"x", PolicyError, "AAD prefix is not aad_prefix"),
        (supplied, None, PolicyError, "pass aad_prefix"),
        (supplied, b"x", IntegrityError, "footer"),
        (supplied, b"", PolicyError, "pass aad_prefix"),
    ):
        sealed, keys = seal(plain, mode), mode.keys([])
        refused(error, match, parquet.decrypt_file, sealed, keys, aad_prefix=given)
        refused(error, match, parquet.reencrypt_file, sealed, keys, keys, aad_prefix=given)
        with pytest.raises(error, match=match):
            parquet.verify(sealed, keys, aad_prefix=given)
    assert unseal(seal(plain, stored), stored, [], aad_prefix=PREFIX) == unseal(seal(plain, none), none, [])

    called: list[bytes] = []
    for mode in (none, stored, supplied):
        sealed = seal(plain, mode)
        unseal(sealed, mode, [], aad_prefix_verifier=called.append)
        parquet.verify(
            sealed, mode.keys([]), aad_prefix=mode.supplied, aad_prefix_verifier=called.append, allow_ctr=mode.ctr
        )
    assert called == [b"", b"", *[PREFIX] * 4]

    def wrong(prefix: bytes) -> None:
        raise LookupError(f"not {prefix!r}")

    refused(LookupError, "not b'ware", parquet.decrypt_file, seal(plain, stored), stored.keys([]), aad_prefix_verifier=wrong)  # fmt: skip  # noqa: E501


def test_keys_that_are_none() -> None:
    for size in (0, 1, 15, 17, 20, 31, 33, 64):
        with pytest.raises(ValueError, match="16, 24 or 32 bytes"):
            Keys(bytes(size))
        with pytest.raises(ValueError, match=r"key of 'a'.*16, 24 or 32 bytes"):
            Keys(KF, {"a": bytes(size)})
    for size in (16, 24, 32):
        with pytest.raises(ValueError, match="all zeros"):
            Keys(bytes(size))
        with pytest.raises(ValueError, match=r"key of 'a\.b' is all zeros"):
            Keys(KF, {("a", "b"): bytes(size)})
    with pytest.raises(ValueError, match="column_metadata names 'b'"):
        Keys(KF, {"a": KF}, column_metadata={"b": b"x"})
    refused(ValueError, "all zeros", parquet.decrypt_file, seal(rich(), UNIFORM), lambda metadata: bytes(16))
    keys = COLUMNS.keys(RICH_LEAVES)
    for secret in (COLUMNS.footer, *COLUMNS.leaf_keys(RICH_LEAVES).values()):
        assert repr(secret)[2:-1] not in repr(keys)
        assert secret.hex() not in repr(keys)
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(keys)


def test_misspelt_columns() -> None:
    plain = rich()
    misspelt: list[Any] = ["Id", "list.element", ("id", "x"), "id.", ("list.list.element",)]
    for name in misspelt:
        for mode in FOUR:
            refused(
                ValueError, "has no column", parquet.encrypt_file, plain, Keys(KF, {name: key("x")}), **mode.options
            )
    right: list[Any] = ["list", "list.list", ("list", "list", "element"), "list.list.element"]
    for name in right:
        sealed = bytearray()
        parquet.encrypt_file(plain, sealed, Keys(KF, {name: key("x")}), other_columns="plain")
        found = ref.ParquetFile(bytes(sealed), KF, {"list.list.element": key("x")})
        assert [chunk.path for chunk in found.chunks() if chunk.key] == [RICH_LEAVES[2]] * 2


def test_names_with_dots(plain_files: dict[str, bytes]) -> None:
    """A tuple says which of two columns with the same dotted path; the dotted path says both."""
    plain = plain_files["names with dots"]
    one, two = key("one"), key("two", 32)
    pairs: list[tuple[dict[Any, bytes], dict[Any, bytes]]] = [
        ({("a.b",): one, ("a", "b"): two}, {("a.b",): one, ("a", "b"): two}),
        ({"a.b": one}, {("a.b",): one, ("a", "b"): one}),
        ({"a.b": one, ("a", "b"): two}, {("a.b",): one, ("a", "b"): two}),
        ({("a",): one, "über": two}, {("a", "b"): one, ("a", "c.d"): one, ("über",): two}),
    ]
    for given, expected in pairs:
        sealed = bytearray()
        parquet.encrypt_file(plain, sealed, Keys(KF, given), other_columns="plain")
        file = ref.ParquetFile(bytes(sealed), KF, expected)
        assert {chunk.path: chunk.key for chunk in file.chunks() if chunk.key} == expected
        assert list(file.modules())
        back = bytearray()
        parquet.decrypt_file(sealed, back, Keys(KF, given))
        assert data_of(bytes(back)) == data_of(plain)


def test_missing_keys() -> None:
    plain = rich()
    for mode in (*FOUR, Mode(columns="partial")):
        sealed = seal(plain, mode)
        for keys, column in (
            (Keys(mode.footer), "id"),
            (Keys(mode.footer, {"id": mode.leaf_keys(RICH_LEAVES)["id",]}), "list.list.element"),
        ):
            if mode.columns == "partial" and column != "id":
                continue
            allow: dict[str, Any] = {"allow_ctr": mode.ctr}
            known: dict[str, Any] = {**allow, "aad_prefix": mode.supplied}
            refused(KeyAccessError, f"'{column}'", parquet.decrypt_file, sealed, keys, **known)
            refused(KeyAccessError, f"'{column}'", parquet.reencrypt_file, sealed, keys, keys, **allow)
            with pytest.raises(KeyAccessError, match=f"'{column}'"):
                parquet.verify(sealed, keys, **allow)
            skipped = parquet.verify(sealed, keys, missing="skip", **allow)
            assert "missing" in {one.key for one in skipped.columns}
            dropped = bytearray()
            report = parquet.decrypt_file(sealed, dropped, keys, missing="drop", **allow)
            assert any(f"left out, because their keys are not held: {column}" in one for one in report.warnings)
            table, full = pq.read_table(pa.BufferReader(dropped)), pq.read_table(pa.BufferReader(plain))
            names = [name for name in full.column_names if name in table.column_names]
            assert len(names) == len(table.column_names) > 0
            assert column.split(".")[0] not in names
            assert table.equals(full.select(names))


def test_keys_from_a_function() -> None:
    plain, mode = rich(), Mode(columns="columns", prefix="stored")
    sealed = seal(plain, mode)
    known: dict[bytes, bytes] = {b"of the footer": mode.footer}
    known |= {b"of " + ".".join(path).encode(): value for path, value in mode.leaf_keys(RICH_LEAVES).items()}
    asked: list[bytes] = []

    def retrieve(metadata: bytes) -> bytes:
        asked.append(metadata)
        return known[metadata]

    out = bytearray()
    parquet.decrypt_file(sealed, out, retrieve)
    assert data_of(bytes(out)) == data_of(plain)
    assert sorted(asked) == sorted(known)  # once for each, however many row groups

    refused(KeyAccessError, "footer", parquet.decrypt_file, sealed, {}.__getitem__)
    del known[b"of id"]
    refused(KeyAccessError, "'id'", parquet.decrypt_file, sealed, retrieve)

    def broken(metadata: bytes) -> bytes:
        raise ConnectionError("the KMS is away")

    refused(ConnectionError, "the KMS is away", parquet.decrypt_file, sealed, broken)
    for wrong, error in ((bytes(5), ValueError), ("text", TypeError)):
        refused(error, ".", parquet.decrypt_file, sealed, lambda metadata, wrong=wrong: wrong)

    anonymous = bytearray()
    parquet.encrypt_file(plain, anonymous, Keys(KF))
    refused(KeyAccessError, "no key_metadata", parquet.decrypt_file, anonymous, retrieve)


@pytest.mark.parametrize("footer", [False, True])
def test_functions_are_called_with_none(footer: bool) -> None:
    """For the footer key, where the file stores no key_metadata; a column's cannot be asked for like that."""
    plain, sealed, asked = rich(), bytearray(), []
    parquet.encrypt_file(plain, sealed, Keys(KF), plaintext_footer=footer)

    def retrieve(metadata: bytes | None) -> bytes | None:
        asked.append(metadata)
        return KF if metadata is None else None

    empty: dict[bytes, bytes] = {}
    readers: list[Callable[..., Any]] = [
        lambda source, keys: parquet.decrypt_file(source, bytearray(), keys),
        lambda source, keys: parquet.reencrypt_file(source, bytearray(), keys, Keys(key("new"))),
        parquet.verify,
        parquet.open_plain,
    ]
    for reader in readers:
        asked.clear()
        reader(sealed, retrieve)
        assert asked == [None]
        reader(sealed, {None: KF}.__getitem__)
        for nothing in (empty.__getitem__, empty.get, bytes.hex, keytools.CryptoFactory(None).retriever()):  # type: ignore[arg-type]
            with pytest.raises(KeyAccessError, match="no key_metadata"):
                reader(sealed, nothing)
    parquet.encrypt_file(plain, sealed, Keys(KF, {"id": key("id")}), plaintext_footer=footer)
    asked.clear()
    for reader in readers:
        with pytest.raises(KeyAccessError, match=r"'id'.*no key_metadata for this column, so pass Keys"):
            reader(sealed, retrieve)
    assert set(asked) == {None}
    assert len(asked) == len(readers)
    report = parquet.verify(sealed, retrieve, missing="skip")
    assert [row.path for row in report.columns if row.key == "missing"] == ["id"]
    parquet.encrypt_file(plain, sealed, Keys(KF, {"id": KF}), plaintext_footer=footer)  # one key for all
    for reader in readers:
        reader(sealed, retrieve)
    parquet.encrypt_file(plain, sealed, Keys(KF, {"id": key("id")}, column_metadata={"id": b"unknown"}))
    with pytest.raises(KeyAccessError, match=r"'id'.*no key was found for the key_metadata"):
        parquet.verify(sealed, retrieve)


def test_a_column_is_named_once() -> None:
    k1, k2 = key("1"), key("2")
    twice: list[dict[Any, Any]]
    for value in (k2, k1, parquet.FOOTER_KEY):
        twice = [{"s": k1, ("s",): value}, {("s",): value, "s": k1}]
        for pair in twice:
            with pytest.raises(ValueError, match="'s' is named twice"):
                Keys(KF, pair)
    # With dots it takes the file to tell.
    plain = rich()
    for path in (("list",), ("list", "list"), RICH_LEAVES[2]):
        keys = Keys(KF, {".".join(path) if len(path) > 1 else "list.list": k1, path: k2})
        if len(path) > 1:
            with pytest.raises(ValueError, match="named twice"):
                parquet.encrypt_file(plain, bytearray(), keys)
        else:
            parquet.encrypt_file(plain, bytearray(), keys)  # a column of a group may have another key
    named: list[Any] = [{"a.b": "k1", ("a", "b"): "k2"}, "k1:s;k2:s", {"s": "k1", ("s",): "k1"}]
    for columns in named:
        with pytest.raises(ValueError, match="named twice"):
            keytools.parse_column_keys(columns)


def test_addresses_in_a_file_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key material that names a KMS: no connection is made, whatever is asked of the file."""
    import socket

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", never)
    monkeypatch.setattr(socket, "create_connection", never)
    monkeypatch.setattr(socket, "getaddrinfo", never)
    material = json.dumps(
        {
            "keyMaterialType": "PKMT1", "internalStorage": True, "isFooterKey": True, "kmsInstanceID": "evil",
            "kmsInstanceURL": "http://169.254.169.254/", "masterKeyID": "m", "wrappedDEK": "AAAA",
            "doubleWrapping": False,
        }
    ).encode()  # fmt: skip
    sealed, back = bytearray(), bytearray()
    keys = Keys(KF, {"id": key("id")}, footer_metadata=material, column_metadata={"id": material})
    parquet.encrypt_file(rich(), sealed, keys)
    parquet.decrypt_file(sealed, back, keys)
    parquet.verify(sealed, keys)
    assert "169.254.169.254" in json.dumps(parquet.inspect(sealed))


def test_the_key_counts_every_module() -> None:
    """Also the bodies of pages under CTR, of which the spec allows 2^31 with their headers."""
    plain = rich()
    for one in FOUR:
        mode = Mode(one.algorithm, one.plaintext_footer, generation=f"count {one}")
        held = Key(mode.footer)
        before = held.sealed
        sealed = seal(plain, mode)
        modules = [one for one in reference(sealed, mode, RICH_LEAVES).modules() if one.sealed]
        assert held.sealed - before == len(modules)


def test_the_limit_of_a_key(tmp_path: Path) -> None:
    """2^32 messages: refused before the first that is too many, and nothing is left."""
    mode = Mode(footer_size=32, generation="limit")
    keys = mode.keys([])
    plain = rich()
    sealed = seal(plain, mode)
    held = Key(mode.footer)
    modules = sum(one.sealed for one in reference(sealed, mode, []).modules())
    held.carry((1 << 32) - held.sealed - modules)
    files.write(tmp_path / "plain", plain)
    parquet.encrypt_file(tmp_path / "plain", tmp_path / "last", keys)  # up to the very last one
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(KeyLimitError):
        parquet.encrypt_file(tmp_path / "plain", tmp_path / "beyond", keys)
    other = Mode(generation="limit other")
    files.write(tmp_path / "other", seal(plain, other))
    before.append("other")
    with pytest.raises(KeyLimitError):
        parquet.reencrypt_file(tmp_path / "other", tmp_path / "beyond", other.keys([]), keys)
    assert sorted(os.listdir(tmp_path)) == sorted(before)
    assert data_of(unseal(sealed, mode, [])) == data_of(plain)  # what was sealed opens
    parquet.verify(tmp_path / "last", keys)
