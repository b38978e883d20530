"""Key material of Parquet's key tools: pyarrow's and parquet-java's, ours for them, and material that lies."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import hypothesis
import hypothesis.strategies as st
import parquet_peers
import pme_reference
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from kms_clients import Proper, keystore
from programs import parquets
from shares import rest_in_more
from support import flip, program, start_python

from ags_fast.errors import (
    AgsError,
    ConcurrentChangeError,
    FormatError,
    IntegrityError,
    KeyAccessError,
    PolicyError,
)
from ags_fast.keys import KmsClient, kms_calls, load_kms
from ags_fast.keys.kms import local
from ags_fast.parquet import FOOTER_KEY, Keys, decrypt_file, encrypt_file, keytools

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers import S3Server

TABLE = pa.table(
    {
        "a": list(range(100)),
        "b": [f"text {i % 7}" for i in range(100)],
        "s": [{"x": i / 3, "y": i} for i in range(100)],
        "open": [None if i % 3 else i for i in range(100)],
    }
)
COLUMN_KEYS = {"kc1": ["a", "s.x"], "kc2": ["b"]}
KEY_IDS = ("kf", "kc1", "kc2")
MODES = [(double, internal) for double in (True, False) for internal in (True, False)]
modes = pytest.mark.parametrize(
    ("double", "internal"),
    MODES,
    ids=[f"{'double' if d else 'single'}-{'internal' if i else 'external'}" for d, i in MODES],
)


@pytest.fixture(autouse=True)
def no_keys_in_caches() -> Iterator[None]:
    keytools.clear_cache()
    yield
    keytools.clear_cache()


@pytest.fixture
def properties(tmp_path: Path) -> dict[str, str]:
    return keystore(tmp_path, *KEY_IDS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    return folder


class InMemoryKms(KmsClient):
    """As parquet's mock of that name: nonce, ciphertext, tag, with the master key's id as AAD."""

    provider = "memory"
    master_keys: ClassVar = {"kf": b"0123456789012345", "kc1": b"1234567890123450", "kc2": b"1234567890123451"}

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        nonce = os.urandom(12)
        return nonce + AESGCM(self.master_keys[wrapping_key_id]).encrypt(nonce, key, wrapping_key_id.encode())

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        aes = AESGCM(self.master_keys[wrapping_key_id])
        return aes.decrypt(wrapped[:12], wrapped[12:], wrapping_key_id.encode())


class LocalWrapKms(InMemoryKms):
    """As parquet's LocalWrapKmsClient: what is wrapped is JSON."""

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        encrypted = base64.b64encode(super().wrap_key(key, wrapping_key_id)).decode()
        return json.dumps({"masterKeyVersion": "NO_VERSION", "encryptedKey": encrypted}).encode()

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return super().unwrap_key(base64.b64decode(json.loads(wrapped)["encryptedKey"]), wrapping_key_id)


class HexKms(InMemoryKms):
    """What is wrapped is text that looks like base64."""

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        return super().wrap_key(key, wrapping_key_id).hex().encode()

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return super().unwrap_key(bytes.fromhex(wrapped.decode()), wrapping_key_id)


class ArrowKms(pe.KmsClient):
    """pyarrow's client over the same KMS: base64 of what it wraps."""

    def __init__(self, kms: KmsClient) -> None:
        super().__init__()
        self.kms = kms

    def wrap_key(self, key: bytes, key_id: str) -> bytes:
        return base64.b64encode(self.kms.wrap_key(key, key_id))

    def unwrap_key(self, wrapped: str, key_id: str) -> bytes:
        return self.kms.unwrap_key(base64.b64decode(wrapped), key_id)


def arrow_factory(kms: KmsClient | dict[str, str]) -> pe.CryptoFactory:
    client = load_kms(kms) if isinstance(kms, dict) else kms
    return pe.CryptoFactory(lambda connection: ArrowKms(client))


def arrow_write(path: Path, factory: pe.CryptoFactory, **config: Any) -> None:
    config = {"footer_key": "kf", "column_keys": COLUMN_KEYS, **config}
    properties = factory.file_encryption_properties(
        pe.KmsConnectionConfig(), pe.EncryptionConfiguration(**config), parquet_file_path=str(path)
    )
    with pq.ParquetWriter(path, TABLE.schema, encryption_properties=properties, store_decimal_as_integer=False) as out:
        out.write_table(TABLE, row_group_size=60)


def arrow_read(path: Path, kms: KmsClient | dict[str, str]) -> pa.Table:
    decryption = arrow_factory(kms).file_decryption_properties(
        pe.KmsConnectionConfig(), pe.DecryptionConfiguration(), parquet_file_path=str(path)
    )
    return pq.ParquetFile(path, decryption_properties=decryption).read()


class Made(NamedTuple):
    """What is in `Keys`, to look at."""

    footer: bytes
    columns: dict[Any, bytes]
    footer_metadata: bytes
    column_metadata: dict[Any, bytes]


def made(keys: Keys) -> Made:
    assert keys.footer_metadata is not None
    columns = {}
    for name in keys.column_metadata:
        found = keys.column(name if isinstance(name, tuple) else tuple(name.split(".")))
        assert found is not None
        assert isinstance(found[0], bytes)
        columns[name] = found[0]
    return Made(keys.footer_key(), columns, keys.footer_metadata, dict(keys.column_metadata))


def opened(path: Path, key_of: Callable[[bytes], bytes]) -> pme_reference.ParquetFile:
    """The file, if every module of it opens with the keys that `key_of` finds."""

    def column(_: Any, metadata: bytes | None) -> bytes | None:
        return None if metadata is None else key_of(metadata)

    def footer(metadata: bytes | None) -> bytes:
        assert metadata is not None
        return key_of(metadata)

    file = pme_reference.ParquetFile(path, footer, column)
    assert len({chunk.path for chunk in file.chunks()}) == 5
    assert {module.name for module in file.modules()} >= {"footer", "data page"}
    return file


def all_metadata(file: pme_reference.ParquetFile) -> dict[str, bytes]:
    """Of the footer and of each column that has a key of its own."""
    columns = {".".join(chunk.path): chunk.key_metadata for chunk in file.chunks() if chunk.key_metadata}
    return {"": file.footer_key_metadata, **columns}  # type: ignore[dict-item]


def material_file(path: Path) -> Path:
    return Path(keytools.material_path(path))


def materials(path: Path) -> dict[str, dict[str, Any]]:
    return {reference: json.loads(text) for reference, text in json.loads(material_file(path).read_text()).items()}


def calls_of(action: Callable[[], Any]) -> dict[str, int]:
    before = kms_calls()
    action()
    return {operation: count for (_, operation), count in (kms_calls() - before).items()}


def altered(metadata: bytes, **changes: Any) -> bytes:
    """With other fields; None leaves one out."""
    fields = json.loads(metadata) | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


# ---------------------------------------------------------------- reading others' files


@modes
@pytest.mark.parametrize("bits", [128, 192, 256])
def test_keys_of_what_pyarrow_writes(
    properties: dict[str, str], folder: Path, double: bool, internal: bool, bits: int
) -> None:
    path = folder / "file.parquet"
    arrow_write(
        path,
        arrow_factory(properties),
        double_wrapping=double,
        internal_key_material=internal,
        data_key_length_bits=bits,
        plaintext_footer=bits == 192,
    )
    assert material_file(path).exists() is not internal
    retriever = keytools.CryptoFactory(properties).retriever(path)
    metadata = all_metadata(opened(path, retriever))
    assert sorted(metadata) == ["", "a", "b", "s.x"]
    keytools.clear_cache()
    keys: set[bytes] = set()
    calls = calls_of(lambda: keys.update(map(retriever, metadata.values())))
    assert calls == {"unwrap": 3 if double else 4}  # "a" and "s.x" have one master key, and so one KEK
    assert {len(key) for key in keys} == {bits // 8}
    assert len(keys) == 4
    again = keytools.CryptoFactory(load_kms(properties)).retriever(str(path))
    assert calls_of(lambda: opened(path, again)).get("unwrap", 0) == 0 or not double
    assert keytools.resolve(metadata["a"], properties, path) == retriever(memoryview(metadata["a"]))


def test_keys_of_what_parquet_java_writes(vectors: Path) -> None:
    path = vectors / "parquet-testing" / "data" / "external_key_material_java.parquet.encrypted"
    if not path.exists():
        pytest.skip(f"no {path}")
    retriever = keytools.CryptoFactory(InMemoryKms()).retriever(path)
    file = pme_reference.ParquetFile(path, retriever, lambda _, metadata: metadata and retriever(metadata))
    assert sum(module.sealed for module in file.modules()) > 10
    shown = keytools.describe(file.footer_key_metadata or b"")
    assert shown == {"keyMaterialType": "PKMT1", "internalStorage": False, "keyReference": "footerKey"}


def test_booleans_as_the_first_versions_of_parquet_java_wrote_them() -> None:
    factory = keytools.CryptoFactory(InMemoryKms())
    keys = made(factory.encryption_keys("kf"))
    metadata = altered(keys.footer_metadata, internalStorage="true", isFooterKey="true", doubleWrapping="true")
    assert factory.retriever()(metadata) == keys.footer


# ---------------------------------------------------------------- writing for others


@modes
@pytest.mark.parametrize("length", [16, 24, 32])
def test_another_implementation_finds_our_keys(folder: Path, double: bool, internal: bool, length: int) -> None:
    path = folder / "file.parquet"
    factory = keytools.CryptoFactory(
        InMemoryKms(), double_wrapping=double, internal=internal, data_key_length=length, kek_length=48 - length
    )
    keys = made(factory.encryption_keys("kf", COLUMN_KEYS, path=path))
    reader = pme_reference.Pkmt1(InMemoryKms.master_keys, None if internal else path)
    assert reader.footer(keys.footer_metadata) == keys.footer
    assert keys.columns.keys() == keys.column_metadata.keys() == {"a", "s.x", "b"}
    for column, metadata in keys.column_metadata.items():
        assert reader(("any",), metadata) == keys.columns[column] == factory.retriever(path)(metadata)
    everything = [keys.footer, *keys.columns.values()]
    assert len(set(everything)) == 4
    assert {len(key) for key in everything} == {length}
    if double:
        material = reader.material(keys.footer_metadata)
        kek = InMemoryKms().unwrap_key(base64.b64decode(material["wrappedKEK"]), "kf")
        assert len(kek) == 48 - length
        assert len(base64.b64decode(material["keyEncryptionKeyID"])) == 16


@modes
def test_fields_are_those_that_pyarrow_writes(
    properties: dict[str, str], folder: Path, double: bool, internal: bool
) -> None:
    path, ours = folder / "theirs.parquet", folder / "ours.parquet"
    arrow_write(path, arrow_factory(properties), double_wrapping=double, internal_key_material=internal)
    theirs = all_metadata(opened(path, keytools.CryptoFactory(properties).retriever(path)))
    factory = keytools.CryptoFactory(properties, double_wrapping=double, internal=internal)
    keys = made(factory.encryption_keys("kf", COLUMN_KEYS, path=ours))

    def shape(value: Any) -> Any:
        """Names, and values where they are not made up."""
        random = ("wrappedDEK", "wrappedKEK", "keyEncryptionKeyID")
        return {name: (type(item), name not in random and item) for name, item in value.items()}

    for column, metadata in {"": keys.footer_metadata, **keys.column_metadata}.items():
        assert shape(json.loads(metadata)) == shape(json.loads(theirs[column])), column
    if not internal:
        assert {reference: shape(value) for reference, value in materials(ours).items()} == {
            reference: shape(value) for reference, value in materials(path).items()
        }


def test_few_calls_of_the_kms(properties: dict[str, str]) -> None:
    columns = {f"c{i}": "kc1" for i in range(20)}
    factory = keytools.CryptoFactory(properties)
    assert calls_of(lambda: factory.encryption_keys("kf", columns)) == {"wrap": 2}
    keys = made(factory.encryption_keys("kf", columns))
    assert calls_of(lambda: factory.encryption_keys("kf", columns)) == {}
    assert calls_of(lambda: list(map(factory.retriever(), keys.column_metadata.values()))) == {}  # made here
    assert calls_of(lambda: keytools.CryptoFactory(properties, kek_length=32).encryption_keys("kf")) == {"wrap": 1}
    at_once = keytools.CryptoFactory(properties, cache_lifetime=0)
    assert calls_of(lambda: at_once.encryption_keys("kf", columns)) == {"wrap": 2}
    assert calls_of(lambda: at_once.encryption_keys("kf", columns)) == {"wrap": 2}
    single = keytools.CryptoFactory(properties, double_wrapping=False)
    assert calls_of(lambda: single.encryption_keys("kf", {"a": "kc1", "b": "kc1"})) == {"wrap": 3}
    for double in (True, False):  # the KMS makes what it will unwrap
        makes = keytools.CryptoFactory(Proper(), double_wrapping=double, wrapped_text="base64")
        assert calls_of(lambda makes=makes: makes.encryption_keys("kf")) == {"generate": 1}  # type: ignore[misc]


def test_a_kek_lives_as_long_as_it_is_told_to(properties: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("ags_fast.keys.cache.time", clock)
    monkeypatch.setattr(keytools.factory, "time", clock)
    factory = keytools.CryptoFactory(properties, cache_lifetime=60)
    keys = made(factory.encryption_keys("kf"))

    def use() -> None:
        assert factory.retriever()(keys.footer_metadata) == keys.footer
        factory.encryption_keys("kf")

    now[0] += 59
    assert calls_of(use) == {}
    now[0] += 2
    assert calls_of(use) == {"unwrap": 1, "wrap": 1}
    assert calls_of(use) == {}


def test_threads_make_one_call(properties: dict[str, str]) -> None:
    factory = keytools.CryptoFactory(properties)
    keys = made(factory.encryption_keys("kf", {f"c{i}": "kc1" for i in range(32)}))
    keytools.clear_cache()
    gate = threading.Barrier(8)

    def find(column: str) -> bool:
        if int(column[1:]) < 8:
            gate.wait(30)
        return retriever(keys.column_metadata[column]) == keys.columns[column]

    retriever = factory.retriever()
    with ThreadPoolExecutor(8) as pool:
        assert calls_of(lambda: all(pool.map(find, keys.columns)) or pytest.fail("another key")) == {"unwrap": 1}
    keytools.clear_cache()
    with ThreadPoolExecutor(8) as pool:
        assert calls_of(lambda: list(pool.map(lambda _: factory.encryption_keys("kf"), range(8)))) == {"wrap": 1}


def test_a_fork_begins_without_keys(properties: dict[str, str]) -> None:
    factory = keytools.CryptoFactory(properties)
    keys = made(factory.encryption_keys("kf"))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            calls = calls_of(lambda: factory.retriever()(keys.footer_metadata) == keys.footer or os._exit(2))
            os.write(write, json.dumps(calls).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert json.loads(answer.read()) == {"unwrap": 1}
    assert os.waitpid(child, 0)[1] == 0


def test_external_material_is_never_written_over(properties: dict[str, str], folder: Path) -> None:
    path = folder / "file.parquet"
    factory = keytools.CryptoFactory(properties, internal=False)
    with pytest.raises(TypeError, match="path"):
        factory.encryption_keys("kf")
    sidecar = folder / f".{material_file(path).name}.crc"
    sidecar.write_bytes(b"of a file that was here once")
    keys = made(factory.encryption_keys("kf", path=path))
    before = material_file(path).read_bytes()
    assert os.listdir(folder) == [material_file(path).name]  # what Hadoop knew of another one would make it unreadable

    def again() -> None:
        with pytest.raises(FileExistsError):
            factory.encryption_keys("kf", path=path)

    assert calls_of(again) == {}
    assert material_file(path).read_bytes() == before
    material_file(path).rename(folder / f"_TMP{material_file(path).name}")  # parquet-java's rotation was interrupted
    assert calls_of(again) == {}
    assert factory.retriever(path)(keys.footer_metadata) == keys.footer


@pytest.mark.parametrize(
    ("how", "is_error"),
    [
        ({"data_key_length": 128}, ValueError),
        ({"kek_length": 20}, ValueError),
        ({"cache_lifetime": -1}, ValueError),
        ({"cache_lifetime": float("nan")}, ValueError),
        ({"kms_instance_url": ""}, ValueError),
        ({"wrapped_text": "hex"}, ValueError),
    ],
)
def test_impossible_settings(how: dict[str, Any], is_error: type[Exception]) -> None:
    with pytest.raises(is_error):
        keytools.CryptoFactory(InMemoryKms(), **how)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("kc1:a,s.x;kc2:b", {"a": "kc1", "s.x": "kc1", "b": "kc2"}),
        (" kc1 : a , s.x ; ; kc2:b;", {"a": "kc1", "s.x": "kc1", "b": "kc2"}),
        ("arn:aws:kms:eu:1:key/2:a", {"a": "arn:aws:kms:eu:1:key/2"}),
        ({"kc1": ["a", ("s", "x.y")]}, {"a": "kc1", ("s", "x.y"): "kc1"}),
        ({"a": "kc1", ("s", "x"): "kc2", "b": FOOTER_KEY}, {"a": "kc1", ("s", "x"): "kc2", "b": FOOTER_KEY}),
        ({}, {}),
    ],
)
def test_column_keys(given: Any, found: Any) -> None:
    assert keytools.parse_column_keys(given) == found


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("kc1", "column keys are"),
        ("kc1:", "no empty parts"),
        (":a", "column keys are"),
        ("kc1:a,,b", "no empty parts"),
        ("kc1:a;kc2:a", "two master keys"),
        ({"kc1": ["s.x", ("s", "x")]}, "two master keys"),
        ({"kc1": []}, "no columns"),
        ({"a": ""}, "a key id is text"),
        ({"a..b": "k"}, "no empty parts"),
        ({(): "k"}, "no empty parts"),
    ],
)
def test_impossible_column_keys(given: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        keytools.parse_column_keys(given)


@pytest.mark.parametrize("given", [["a"], {"kc1": ("a", "b")}, {"a": None}, {"kc1": [1]}, {("a", 1): "k"}])
def test_column_keys_of_another_type(given: Any) -> None:
    with pytest.raises(TypeError):
        keytools.parse_column_keys(given)


def test_columns_under_the_footer_key(properties: dict[str, str]) -> None:
    keys = keytools.CryptoFactory(properties).encryption_keys("kf", {"a": FOOTER_KEY, ("s", "x.y"): "kc1"})  # type: ignore[arg-type]
    assert keys.column(("a",)) == (FOOTER_KEY, None)
    assert list(keys.column_metadata) == [("s", "x.y")]


# ---------------------------------------------------------------- parquet-java


@pytest.fixture
def plain(folder: Path) -> Path:
    pq.write_table(TABLE, folder / "plain.parquet")
    return folder / "plain.parquet"


def java_conf(**properties: Any) -> dict[str, Any]:
    return parquet_peers.keytools_conf(InMemoryKms.master_keys, **properties)


@pytest.mark.parametrize(
    ("double", "internal", "bits"),
    rest_in_more(
        ((*mode, bits) for mode in MODES for bits in (128, 256)),
        *((*mode, bits) for mode, bits in zip(MODES, (128, 256, 256, 128), strict=True)),
    ),
)
def test_keys_of_what_parquet_java_writes_now(
    parquet_java: parquet_peers.ParquetJava, plain: Path, double: bool, internal: bool, bits: int
) -> None:
    path = plain.with_name("file.parquet")
    conf = java_conf(
        footer_key="kf",
        column_keys="kc1:a,s.x;kc2:b",
        double_wrapping=double,
        key_material_store_internally=internal,
        data_key_length_bits=bits,
        plaintext_footer=bits == 256,
    )
    parquet_java.write(plain, path, conf)
    retriever = keytools.CryptoFactory(InMemoryKms()).retriever(path)
    metadata = all_metadata(opened(path, retriever))
    assert sorted(metadata) == ["", "a", "b", "s.x"]
    assert {len(retriever(data)) for data in metadata.values()} == {bits // 8}
    if not internal:
        for becomes in (None, not double):
            keytools.rotate(path, InMemoryKms(), double_wrapping=becomes, kek_length=32)
            assert parquet_java.read(path, java_conf()).equals(TABLE)


@pytest.mark.parametrize(
    ("double", "internal", "length"),
    rest_in_more(
        ((*mode, length) for mode in MODES for length in (16, 24, 32)),
        *((*mode, length) for mode, length in zip(MODES, (16, 24, 32, 16), strict=True)),
    ),
)
def test_peers_read_files_with_our_key_material(
    parquet_java: parquet_peers.ParquetJava, plain: Path, double: bool, internal: bool, length: int
) -> None:
    """parquet-java is given our keys and their metadata, as they are, to write with: it and pyarrow find them again."""
    path = plain.with_name("file.parquet")
    factory = keytools.CryptoFactory(
        InMemoryKms(), double_wrapping=double, internal=internal, data_key_length=length, kek_length=48 - length
    )
    keys = made(factory.encryption_keys("kf", COLUMN_KEYS, path=path))
    explicit = parquet_peers.PmeKeys(
        keys.footer,
        keys.columns,
        footer_metadata=keys.footer_metadata,
        column_metadata=keys.column_metadata,
        plaintext_footer=length == 24,
    )
    parquet_java.write(plain, path, explicit)
    masters = InMemoryKms.master_keys
    for _ in range(1 if internal else 2):
        assert parquet_java.read(path, java_conf()).equals(TABLE)
        assert parquet_peers.pyarrow_factory_read(path, masters, external=not internal).equals(TABLE)
        opened(path, factory.retriever(path))
        if not internal:
            keytools.rotate(path, InMemoryKms())
            keytools.clear_cache()
    other = masters | {"kc2": bytes(range(16))}
    with pytest.raises(parquet_peers.PeerError, match="Tag"):
        parquet_java.read(path, parquet_peers.keytools_conf(other, key_access_token="whose client is not in its cache"))


def test_rotated_material_passes_the_checksums_of_hadoop(parquet_java: parquet_peers.ParquetJava, plain: Path) -> None:
    """Its local file system keeps one beside each file, and refuses the file that somebody else has replaced."""
    path = plain.with_name("file.parquet")
    checksums = {"fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem"}
    conf = java_conf(footer_key="kf", column_keys="kc1:a", key_material_store_internally=False) | checksums
    parquet_java.write(plain, path, conf)
    sidecar = path.with_name(f".{material_file(path).name}.crc")
    old = sidecar.read_bytes()
    keytools.rotate(path, InMemoryKms())
    assert parquet_java.read(path, conf).equals(TABLE)
    sidecar.write_bytes(old)
    with pytest.raises(parquet_peers.PeerError, match="ChecksumException"):
        parquet_java.read(path, conf)


@modes
@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_peers_read_what_is_encrypted_with_key_material(
    parquet_java: parquet_peers.ParquetJava, plain: Path, double: bool, internal: bool, plaintext_footer: bool
) -> None:
    path, back = plain.with_name("file.parquet"), plain.with_name("back.parquet")
    pq.write_table(TABLE, plain, row_group_size=20)
    factory = keytools.CryptoFactory(
        InMemoryKms(), double_wrapping=double, internal=internal, data_key_length=32 if internal else 24, kek_length=32
    )
    for algorithm in ("AES_GCM_V1", "AES_GCM_CTR_V1"):
        keys = factory.encryption_keys("kf", COLUMN_KEYS, path=path)
        encrypt_file(plain, path, keys, algorithm=algorithm, plaintext_footer=plaintext_footer)
        assert arrow_read(path, InMemoryKms()).equals(TABLE)
        assert parquet_java.read(path, java_conf()).equals(TABLE)
        opened(path, factory.retriever(path))
        if not internal:
            keytools.rotate(path, InMemoryKms(), double_wrapping=not double)
            assert arrow_read(path, InMemoryKms()).equals(TABLE)
            assert parquet_java.read(path, java_conf()).equals(TABLE)
        retriever = factory.retriever(path)
        keytools.clear_cache()
        calls = calls_of(lambda: decrypt_file(path, back, retriever, allow_ctr=True))  # noqa: B023
        assert calls == {"unwrap": 3 if double is internal else 4}  # and not for each of five row groups
        assert pq.read_table(back).equals(TABLE)
        if not internal:
            material_file(path).unlink()
            with pytest.raises(KeyAccessError, match="_KEY_MATERIAL_FOR_file"):
                decrypt_file(path, back, factory.retriever(path), allow_ctr=True)


# ---------------------------------------------------------------- wrapped keys as text


@hypothesis.given(
    st.one_of(st.binary(min_size=1), st.text(min_size=1).map(lambda text: text.encode("utf-8", "replace")))
)
@hypothesis.example(b"abcd")  # text that looks like base64
@hypothesis.example(b"AA==")
def test_text_becomes_the_same_bytes_again(wrapped: bytes) -> None:
    for how in ("auto", "base64"):
        text = keytools.material.to_text(wrapped, how, "k")
        assert keytools.material.from_text(text, how) == wrapped
        assert json.loads(json.dumps(text)) == text


def test_binary_is_base64_and_text_is_itself() -> None:
    assert keytools.material.to_text(b"\x01\x00\xff", "auto", "k") == "AQD/"
    assert keytools.material.to_text(b"\x01\x00\x7f", "auto", "k") == "AQB/"  # UTF-8 by chance
    assert keytools.material.to_text(b"vault:v1:abcd", "auto", "k") == "vault:v1:abcd"
    assert keytools.material.from_text("abcd", "plain") == b"abcd" != keytools.material.from_text("abcd", "auto")
    with pytest.raises(KeyAccessError, match="not text"):
        keytools.material.to_text(b"\xff", "plain", "k")
    with pytest.raises(FormatError):
        keytools.material.from_text("vault:v1:", "base64")


@pytest.mark.parametrize("double", [True, False])
def test_wrapped_keys_that_are_text(double: bool) -> None:
    """As a Java client over the same KMS has it: what the KMS returns, and no base64 of it."""
    for kms, how in ((LocalWrapKms(), "auto"), (HexKms(), "plain")):
        factory = keytools.CryptoFactory(kms, double_wrapping=double, wrapped_text=how)  # type: ignore[arg-type]
        keys = made(factory.encryption_keys("kf"))
        wrapped = json.loads(keys.footer_metadata)["wrappedKEK" if double else "wrappedDEK"]
        assert kms.unwrap_key(wrapped.encode(), "kf")
        keytools.clear_cache()
        assert factory.retriever()(keys.footer_metadata) == keys.footer


# ---------------------------------------------------------------- rotation


@pytest.mark.parametrize("becomes", [None, True, False])
@pytest.mark.parametrize("double", [True, False])
def test_pyarrow_reads_what_was_rotated(
    properties: dict[str, str], folder: Path, double: bool, becomes: bool | None
) -> None:
    path, kms = folder / "file.parquet", load_kms(properties)
    arrow_write(path, arrow_factory(kms), double_wrapping=double, internal_key_material=False)
    retriever = keytools.CryptoFactory(kms).retriever
    metadata = all_metadata(opened(path, retriever(path)))
    keys = {column: retriever(path)(data) for column, data in metadata.items()}
    before, parquet = materials(path), path.read_bytes()
    before["columnKey0"]["of another version"] = {"kept": [1]}
    material_file(path).write_text(json.dumps({name: json.dumps(value) for name, value in before.items()}))
    for key_id in KEY_IDS:
        local.rotate_key(properties, key_id)
    assert keytools.rotate(path, properties, double_wrapping=becomes, kek_length=32) == [str(path)]
    for key_id in KEY_IDS:
        local.set_state(properties, key_id, "destroyed", version=1)
    keytools.clear_cache()

    after = materials(path)
    double = double if becomes is None else becomes
    changed = {"wrappedDEK", "wrappedKEK", "keyEncryptionKeyID", "doubleWrapping"}
    assert after.keys() == before.keys()
    for reference, material in after.items():
        wrapped = base64.b64decode(material["wrappedKEK" if double else "wrappedDEK"])
        assert kms.key_version(wrapped) == "2"
        assert material["doubleWrapping"] is double
        assert ("wrappedKEK" in material, "keyEncryptionKeyID" in material) == (double, double)
        assert all(
            material[name] != before[reference].get(name) for name in changed & material.keys() - {"doubleWrapping"}
        )
        old, new = ({k: v for k, v in fields.items() if k not in changed} for fields in (before[reference], material))
        assert old == new
    assert path.read_bytes() == parquet
    assert {column: retriever(path)(data) for column, data in metadata.items()} == keys
    assert arrow_read(path, kms).equals(TABLE)
    arrow_factory(kms).rotate_master_keys(pe.KmsConnectionConfig(), path, double_wrapping=not double)
    assert {column: retriever(path)(data) for column, data in metadata.items()} == keys  # theirs of ours


def test_a_folder_is_rotated_with_few_calls(properties: dict[str, str], folder: Path) -> None:
    factory = keytools.CryptoFactory(properties, internal=False)
    paths = [folder / "year=1" / "a.parquet", folder / "year=2" / "b.parquet", folder / "c.parquet"]
    keys = {path: made(factory.encryption_keys("kf", COLUMN_KEYS, path=path)) for path in paths}
    running = folder / "_temporary" / "0" / "d.parquet"
    factory.encryption_keys("kf", path=running)
    untouched = material_file(running).read_bytes()
    local.rotate_key(properties, "kf")
    keytools.clear_cache()
    rotated: list[str] = []
    assert calls_of(lambda: rotated.extend(keytools.rotate(folder, properties))) == {"unwrap": 3, "wrap": 3}
    assert sorted(rotated) == sorted(map(str, paths))
    assert material_file(running).read_bytes() == untouched
    for path, one in keys.items():
        assert factory.retriever(path)(one.footer_metadata) == one.footer
        assert materials(path)["footerKey"]["wrappedKEK"] == materials(paths[0])["footerKey"]["wrappedKEK"]
    # New files get KEKs of the new version, too, in a process that has some of the old.
    kek = json.loads(keytools.CryptoFactory(properties).encryption_keys("kf").footer_metadata)["wrappedKEK"]  # type: ignore[arg-type]
    assert load_kms(properties).key_version(base64.b64decode(kek)) == "2"
    single = keytools.CryptoFactory(properties, internal=False, double_wrapping=False)
    single.encryption_keys("kf", {"a": "kc1"}, path=folder / "e.parquet")
    assert calls_of(lambda: keytools.rotate(folder / "e.parquet", properties)) == {"unwrap": 2, "wrap": 2}


def test_new_files_do_not_wait_for_a_lifetime_after_rotation(properties: dict[str, str], folder: Path) -> None:
    factory = keytools.CryptoFactory(properties, internal=False)
    factory.encryption_keys("kf", path=folder / "a.parquet")
    local.rotate_key(properties, "kf")
    keytools.rotate(folder, properties)
    factory.encryption_keys("kf", path=folder / "b.parquet")
    wrapped = base64.b64decode(materials(folder / "b.parquet")["footerKey"]["wrappedKEK"])
    assert load_kms(properties).key_version(wrapped) == "2"


@pytest.mark.more
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["unlink", "write", "fsync", "replace"])
def test_killed_while_it_rotates(properties: dict[str, str], folder: Path, name: str, when: str) -> None:
    path = folder / "file.parquet"
    factory = keytools.CryptoFactory(properties, internal=False)
    keys = made(factory.encryption_keys("kf", COLUMN_KEYS, path=path))
    old = material_file(path).read_bytes()
    sidecar = folder / f".{material_file(path).name}.crc"
    sidecar.write_bytes(b"Hadoop's checksum of the old one")
    child = start_python(program(parquets.kill_material_rotation, path, properties, name, when))
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    is_new = material_file(path).read_bytes() != old
    assert is_new == (name == "replace" and when == "after")
    assert sidecar.exists() == (name == "unlink" and when == "before")  # never beside what it is not of
    keytools.clear_cache()

    def check() -> None:
        retriever = factory.retriever(path)
        assert retriever(keys.footer_metadata) == keys.footer
        assert {c: retriever(metadata) for c, metadata in keys.column_metadata.items()} == keys.columns

    check()
    keytools.rotate(folder, properties)
    check()
    assert not sidecar.exists()
    assert material_file(path).read_bytes() != old


def test_what_parquet_java_left_half_rotated(properties: dict[str, str], folder: Path) -> None:
    """It deletes the old material before it renames the new one."""
    path = folder / "file.parquet"
    factory = keytools.CryptoFactory(properties, internal=False)
    keys = made(factory.encryption_keys("kf", path=path))
    temporary = folder / f"_TMP{material_file(path).name}"
    material_file(path).rename(temporary)
    assert factory.retriever(path)(keys.footer_metadata) == keys.footer
    for place in (folder, path):
        assert keytools.rotate(place, properties) == [str(path)]
        assert material_file(path).exists()
        assert temporary.exists()
    temporary.unlink()
    assert factory.retriever(path)(keys.footer_metadata) == keys.footer


def test_one_that_fails_does_not_stop_the_others(properties: dict[str, str], folder: Path) -> None:
    factory = keytools.CryptoFactory(properties, internal=False)
    for name in "abc":
        factory.encryption_keys("kf", path=folder / name)
    before = {name: material_file(folder / name).read_bytes() for name in "abc"}
    material_file(folder / "a").write_text('{"footerKey": "{}"}')
    with pytest.raises(FormatError, match="PKMT1") as caught:
        keytools.rotate(folder, properties)
    notes = "\n".join(caught.value.__notes__)
    assert "1 of 3" in notes
    assert str(material_file(folder / "a")) in notes
    assert material_file(folder / "a").read_text() == '{"footerKey": "{}"}'
    assert all(material_file(folder / name).read_bytes() != before[name] for name in "bc")


def test_nothing_to_rotate(properties: dict[str, str], folder: Path) -> None:
    path = folder / "file.parquet"
    path.write_bytes(b"PAR1")
    for place in (folder, path, folder / "missing", str(folder) + "/"):
        with pytest.raises(FileNotFoundError, match="no external key material"):
            keytools.rotate(place, properties)


def test_a_material_that_changes_meanwhile_is_left(folder: Path) -> None:
    path = folder / "file.parquet"

    class Racing(InMemoryKms):
        def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
            material_file(path).write_text("somebody else's")
            return super().unwrap_key(wrapped, wrapping_key_id)

    factory = keytools.CryptoFactory(InMemoryKms(), internal=False)
    factory.encryption_keys("kf", path=path)
    with pytest.raises(ConcurrentChangeError):
        keytools.rotate(path, Racing())
    assert os.listdir(folder) == [material_file(path).name]
    assert material_file(path).read_text() == "somebody else's"


def test_object_stores(properties: dict[str, str]) -> None:
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://keytools-{os.getpid()}/folder/file.parquet"
    factory = keytools.CryptoFactory(properties, internal=False)
    keys = made(factory.encryption_keys("kf", COLUMN_KEYS, path=url))
    with pytest.raises(FileExistsError):
        factory.encryption_keys("kf", path=url)
    store = fsspec.filesystem("memory")
    before = store.cat_file(keytools.material_path(url))
    for place in (url, url.rpartition("/")[0]):
        assert keytools.rotate(place, properties) == [url]
        after, before = before, store.cat_file(keytools.material_path(url))
        assert before != after
    assert factory.retriever(url)(keys.footer_metadata) == keys.footer
    assert len(store.ls(url.rpartition("/")[0])) == 1  # nothing temporary
    for nowhere in ("memory://bucket", "folder/", ""):
        with pytest.raises(ValueError, match="not a file's path"):
            factory.encryption_keys("kf", path=nowhere)


def test_s3(properties: dict[str, str], moto_s3: S3Server) -> None:
    pytest.importorskip("s3fs")
    bucket = f"bucket-{os.urandom(8).hex()}"
    client = moto_s3.client()
    client.create_bucket(Bucket=bucket)
    factory = keytools.CryptoFactory(properties, internal=False, storage_options=moto_s3.options())
    urls = [f"s3://{bucket}/{path}" for path in ("a.parquet", "folder/b.parquet")]
    keys = {url: made(factory.encryption_keys("kf", {"a": "kc1"}, path=url)) for url in urls}
    with pytest.raises(FileExistsError):
        factory.encryption_keys("kf", path=urls[0])

    def objects() -> dict[str, bytes]:
        names = [found["Key"] for found in client.list_objects_v2(Bucket=bucket)["Contents"]]
        return {name: client.get_object(Bucket=bucket, Key=name)["Body"].read() for name in names}

    before = objects()
    local.rotate_key(properties, "kf")
    assert keytools.rotate(urls[0], properties, storage_options=moto_s3.options()) == urls[:1]
    assert sorted(keytools.rotate(f"s3://{bucket}", properties, storage_options=moto_s3.options())) == urls
    after = objects()
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in before)
    for url, one in keys.items():
        retriever = factory.retriever(url)
        assert retriever(one.footer_metadata) == one.footer
        assert retriever(one.column_metadata["a"]) == one.columns["a"]


def test_storage_that_cannot_replace_in_one_step(folder: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    class Moving(MemoryFileSystem):
        protocol = "moving"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar = [""]

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(super()._strip_protocol(path.removeprefix("moving:/")))

        def mv(self, path1: str, path2: str, **_: Any) -> None:
            raise AssertionError

    fsspec.register_implementation("moving", Moving, clobber=True)
    factory = keytools.CryptoFactory(InMemoryKms(), internal=False)
    path, url = folder / "file.parquet", "moving://folder/file.parquet"
    keys = made(factory.encryption_keys("kf", path=path))
    place = keytools.material_path(url)
    store = fsspec.filesystem("moving")
    store.pipe_file(place, material_file(path).read_bytes())
    assert factory.retriever(url)(keys.footer_metadata) == keys.footer

    def refused() -> None:
        for where in (url, "moving://folder"):
            with pytest.raises(PolicyError, match="one step"):
                keytools.rotate(where, InMemoryKms())

    assert calls_of(refused) == {}
    with pytest.raises(PolicyError, match="only if it does not exist"):
        factory.encryption_keys("kf", path="moving://folder/new.parquet")
    assert store.cat_file(place) == material_file(path).read_bytes()
    assert len(store.ls("moving://folder")) == 1


# ---------------------------------------------------------------- what lies


def test_the_address_in_a_file_is_never_used(
    properties: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kms = folder / "file.parquet", load_kms(properties)
    evil = {"kms_instance_id": "evil", "kms_instance_url": "http://169.254.169.254/latest"}
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("somebody was called"))
    monkeypatch.setattr("ags_fast.keys.kms.registry.find_class", lambda impl: pytest.fail("another client was made"))
    for internal in (True, False):
        factory = keytools.CryptoFactory(kms, internal=internal, **evil)  # type: ignore[arg-type]
        keys = made(factory.encryption_keys("kf", path=path))
        shown = keytools.describe(keys.footer_metadata) if internal else materials(path)["footerKey"]
        assert shown is not None
        assert shown["kmsInstanceURL"] == evil["kms_instance_url"]
        keytools.clear_cache()
        assert calls_of(lambda: keytools.resolve(keys.footer_metadata, kms, path)) == {"unwrap": 1}  # noqa: B023
    keytools.rotate(path, kms)
    assert materials(path)["footerKey"]["kmsInstanceURL"] == evil["kms_instance_url"]
    assert keytools.resolve(keys.footer_metadata, kms, path) == keys.footer


def internal_metadata(double: bool) -> tuple[bytes, bytes]:
    keys = made(keytools.CryptoFactory(InMemoryKms(), double_wrapping=double).encryption_keys("kf"))
    keytools.clear_cache()
    return keys.footer_metadata, keys.footer


DEEP = b'{"keyMaterialType":' + b"[" * 20_000 + b"]" * 20_000 + b"}"


@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        b"kf",
        b"\xff\xfe{}",
        b"[]",
        b'"PKMT1"',
        b"{}",
        b'{"keyMaterialType":"PKMT1"}',
        b'{"keyMaterialType":"PKMT2","internalStorage":true}',
        b'{"keyMaterialType":["PKMT1"],"internalStorage":true}',
        b'{"keyMaterialType":"PKMT1","internalStorage":NaN}',
        b'{"keyMaterialType":"PKMT1","internalStorage":false}',
        b'{"keyMaterialType":"PKMT1","internalStorage":false,"keyReference":7}',
        b'{"keyMaterialType":"PKMT1","internalStorage":false,"keyReference":""}',
        b'{"keyMaterialType":"PKMT1","internalStorage":false,"keyReference":"\\ud800"}',
        b'{"keyMaterialType":"PKMT1","keyMaterialType":"PKMT1","internalStorage":true}',
        b'{"keyMaterialType":"PKMT1","internalStorage":true,"x":' + b"9" * 5000 + b"}",
        b'{"keyMaterialType":"PKMT1"' + b" " * (1 << 20) + b"}",
        DEEP,
    ],
    ids=lambda metadata: repr(metadata[:60]),
)
def test_metadata_that_cannot_be(metadata: bytes, folder: Path) -> None:
    def find() -> None:
        with pytest.raises(FormatError) as caught:
            keytools.resolve(metadata, InMemoryKms(), folder / "file.parquet")
        assert len(str(caught.value)) < 300

    assert calls_of(find) == {}
    shown = keytools.describe(metadata)
    assert shown is None or shown["keyMaterialType"] == "PKMT1"


BAD_FIELDS: list[dict[str, Any]] = [
    {"internalStorage": None},
    {"internalStorage": 1},
    {"internalStorage": "True"},
    {"keyMaterialType": None},
    {"masterKeyID": None},
    {"masterKeyID": ""},
    {"masterKeyID": 5},
    {"masterKeyID": ["kf"]},
    {"masterKeyID": "kf\n"},
    {"masterKeyID": "kf\ud800"},
    {"masterKeyID": "k" * 5000},
    {"doubleWrapping": None},
    {"doubleWrapping": 0},
    {"doubleWrapping": {}},
    {"wrappedDEK": None},
    {"wrappedDEK": 5},
    {"wrappedDEK": "\udfff"},
]
BAD_DOUBLE: list[dict[str, Any]] = [
    {"wrappedDEK": "no base64"},
    {"wrappedDEK": "AAAA"},
    {"wrappedDEK": base64.b64encode(bytes(28 + 17)).decode()},
    {"wrappedDEK": base64.b64encode(bytes(60_000)).decode()},
    {"wrappedKEK": None},
    {"wrappedKEK": {}},
    {"keyEncryptionKeyID": None},
]


@pytest.mark.parametrize(
    ("double", "changes"),
    [*((d, c) for d in (True, False) for c in BAD_FIELDS), *((True, c) for c in BAD_DOUBLE)],
    ids=lambda value: repr(value)[:50],
)
def test_material_that_cannot_be(double: bool, changes: dict[str, Any], folder: Path) -> None:
    """As metadata, and as external material: no call of the KMS is made for it."""
    metadata, key = internal_metadata(double)
    bad = altered(metadata, **changes)
    path = folder / "file.parquet"
    material_file(path).write_text(json.dumps({"footerKey": bad.decode()}))
    refers = b'{"keyMaterialType":"PKMT1","internalStorage":false,"keyReference":"footerKey"}'

    def find() -> None:
        for given in (bad, refers):
            if given is refers and "internalStorage" in changes:
                continue  # which external material need not have
            with pytest.raises(FormatError) as caught:
                keytools.resolve(given, InMemoryKms(), path)
            assert len(str(caught.value)) < 300
            assert key.hex() not in str(caught.value)

    assert calls_of(find) == {}
    if "internalStorage" not in changes:
        with pytest.raises(FormatError):
            keytools.rotate(path, InMemoryKms())
    keytools.describe(bad)


@pytest.mark.parametrize("more", [b'"masterKeyID":"kf"', b'"unknown":NaN', b'"unknown":{"x":1,"x":1}'])
def test_readers_would_not_agree_on_it(more: bytes) -> None:
    metadata, key = internal_metadata(True)
    assert keytools.resolve(metadata[:-1] + b',"unknown":{"x":[1e3]}}', InMemoryKms()) == key
    with pytest.raises(FormatError, match="not the JSON"):
        keytools.resolve(metadata[:-1] + b"," + more + b"}", InMemoryKms())


def bits_of(text: str, bit: int) -> str:
    return base64.b64encode(flip(base64.b64decode(text), bit)).decode()


@pytest.mark.parametrize("bit", [0, 100, -1])
@pytest.mark.parametrize("name", ["wrappedDEK", "wrappedKEK", "keyEncryptionKeyID"])
def test_wrapped_keys_that_were_changed(properties: dict[str, str], name: str, bit: int) -> None:
    factory = keytools.CryptoFactory(properties)
    keys = made(factory.encryption_keys("kf"))
    value = json.loads(keys.footer_metadata)[name]
    bad = altered(keys.footer_metadata, **{name: bits_of(value, bit % (8 * len(base64.b64decode(value))))})
    for _ in range(2):  # with the right KEK in the cache, and without
        with pytest.raises((IntegrityError, FormatError, KeyAccessError), match="'kf'") as caught:
            factory.retriever()(bad)
        assert type(caught.value) is IntegrityError or name == "wrappedKEK"  # its first bits say which version
        keytools.clear_cache()
    assert factory.retriever()(keys.footer_metadata) == keys.footer


def test_a_kek_is_not_found_by_the_id_that_a_file_gives_it() -> None:
    """Else a file that names somebody's KEK with a wrapped KEK of its own would get into the cache."""
    factory = keytools.CryptoFactory(InMemoryKms(), cache_lifetime=0)
    mine, theirs = (json.loads(factory.encryption_keys("kf").footer_metadata) for _ in range(2))  # type: ignore[arg-type]
    cached = keytools.CryptoFactory(InMemoryKms()).retriever()
    cached(json.dumps(theirs).encode())
    mixed = theirs | {"wrappedKEK": mine["wrappedKEK"]}
    with pytest.raises(IntegrityError):
        cached(json.dumps(mixed).encode())


def test_what_the_client_keeps_bounds_the_lifetime(tmp_path: Path) -> None:
    """kms.cache-lifetime-seconds is a promise of the whole process."""
    properties = keystore(tmp_path, "kf")
    for text, calls in (("0", 3), ("3600", 1)):
        factory = keytools.CryptoFactory({**properties, "kms.cache-lifetime-seconds": text})
        metadata = factory.encryption_keys("kf").footer_metadata
        keytools.clear_cache()
        before = kms_calls()
        for _ in range(3):
            factory.retriever()(metadata)
        assert sum((kms_calls() - before).values()) == calls


@pytest.mark.parametrize("nbytes", [1, 15, 17, 31, 33, 64])
def test_keys_of_another_length(nbytes: int) -> None:
    kms = InMemoryKms()
    wrapped = base64.b64encode(kms.wrap_key(bytes(range(nbytes)), "kf")).decode()
    for double, changes in ((False, {"wrappedDEK": wrapped}), (True, {"wrappedKEK": wrapped})):
        with pytest.raises(KeyAccessError, match=f"{nbytes} bytes for 'kf', which are not an AES key"):
            keytools.resolve(altered(internal_metadata(double)[0], **changes), kms)


@pytest.mark.parametrize("double", [True, False])
def test_a_kms_that_refuses(properties: dict[str, str], double: bool) -> None:
    factory = keytools.CryptoFactory(properties, double_wrapping=double, cache_lifetime=0)
    keys = made(factory.encryption_keys("kf", {"a": "kc1"}))
    for metadata in (
        altered(keys.footer_metadata, masterKeyID="nobody's"),
        altered(keys.footer_metadata, masterKeyID="kc1"),
    ):
        with pytest.raises((KeyAccessError, IntegrityError), match=r"nobody's|kc1"):
            factory.retriever()(metadata)
    with pytest.raises(KeyAccessError, match="nobody's"):
        factory.encryption_keys("nobody's")
    local.set_state(properties, "kf", "disabled")
    with pytest.raises(KeyAccessError, match="'kf'"):
        factory.retriever()(keys.footer_metadata)
    limited = keytools.CryptoFactory(properties | {"encryption.allowed-key-ids": "kc*"})
    assert limited.retriever()(keys.column_metadata["a"]) == keys.columns["a"]
    with pytest.raises(KeyAccessError, match="allowed-key-ids"):
        limited.retriever()(keys.footer_metadata)


def test_a_kms_that_wraps_nothing() -> None:
    class Empty(InMemoryKms):
        def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
            return b""

    for double in (True, False):
        with pytest.raises(KeyAccessError, match="nothing"):
            keytools.CryptoFactory(Empty(), double_wrapping=double).encryption_keys("kf")


def test_external_material_that_is_not_there(folder: Path) -> None:
    path = folder / "file.parquet"
    factory = keytools.CryptoFactory(InMemoryKms(), internal=False)
    keys = made(factory.encryption_keys("kf", path=path))
    with pytest.raises(KeyAccessError, match="path"):
        factory.retriever()(keys.footer_metadata)
    with pytest.raises(KeyAccessError, match=r"_KEY_MATERIAL_FOR_other\.parquet\.json"):
        factory.retriever(folder / "other.parquet")(keys.footer_metadata)
    (folder / "secret").write_text("{}")
    for reference in ("columnKey0", "../secret", "/etc/passwd", "x" * 10_000):
        with pytest.raises(KeyAccessError, match="has no key") as caught:
            factory.retriever(path)(altered(keys.footer_metadata, keyReference=reference))
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"footerKey":{}}',
        b'{"footerKey":7}',
        b'{"footerKey":"x"}',
        b'{"footerKey":"","footerKey":""}',
        DEEP,
    ],
    ids=lambda content: repr(content[:40]),
)
def test_external_material_that_cannot_be(folder: Path, content: bytes) -> None:
    path = folder / "file.parquet"
    material_file(path).write_bytes(content)
    refers = b'{"keyMaterialType":"PKMT1","internalStorage":false,"keyReference":"footerKey"}'
    with pytest.raises(FormatError):
        keytools.resolve(refers, InMemoryKms(), path)
    with pytest.raises(FormatError):
        keytools.rotate(path, InMemoryKms())
    assert material_file(path).read_bytes() == content


def test_a_huge_external_material_is_not_read(folder: Path) -> None:
    path = folder / "file.parquet"
    with open(material_file(path), "wb") as file:
        file.truncate(1 << 36)
    refers = b'{"keyMaterialType":"PKMT1","internalStorage":false,"keyReference":"footerKey"}'
    with pytest.raises(FormatError, match="68719476736 bytes"):
        keytools.resolve(refers, InMemoryKms(), path)


@hypothesis.given(data=st.data(), double=st.booleans())
def test_any_json_is_refused_by_its_type(data: st.DataObject, double: bool) -> None:
    metadata, key = internal_metadata(double)
    fields = json.loads(metadata)
    value = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=20), st.lists(st.text(max_size=3)))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(value)
    changed = json.dumps(fields).encode()
    keytools.describe(changed)
    try:
        found = keytools.resolve(changed, InMemoryKms())
    except AgsError as error:
        said = repr(error)
    else:
        said = ""
        assert found == key
    assert key.hex() not in said


# ---------------------------------------------------------------- showing, and keeping quiet


def test_describe(folder: Path) -> None:
    path = folder / "file.parquet"
    kms = InMemoryKms()
    keys = made(keytools.CryptoFactory(kms).encryption_keys("kf", {"a": "kc1"}))
    shown = keytools.describe(memoryview(keys.footer_metadata))
    assert shown == json.loads(keys.footer_metadata)
    assert shown["masterKeyID"] == "kf"  # type: ignore[index]
    assert shown["kmsInstanceURL"] == "DEFAULT"  # type: ignore[index]
    assert shown["isFooterKey"] is True  # type: ignore[index]
    assert keytools.describe(keys.column_metadata["a"]) == json.loads(keys.column_metadata["a"])
    external = made(keytools.CryptoFactory(kms, internal=False).encryption_keys("kf", path=path))
    assert keytools.describe(external.footer_metadata) == {
        "keyMaterialType": "PKMT1",
        "internalStorage": False,
        "keyReference": "footerKey",
    }
    odd = altered(keys.footer_metadata, dek="in clear", masterKeyID="\x1b[2J", wrappedDEK=["x"], doubleWrapping=7)
    left = json.loads(keys.footer_metadata)
    for name in ("masterKeyID", "wrappedDEK", "doubleWrapping"):
        del left[name]
    assert keytools.describe(odd) == left
    for other in (b"", b"kf", b"{}", b'{"keyMaterialType":"PKMT9"}', DEEP):
        assert keytools.describe(other) is None


def test_factories_and_retrievers_pickle_and_tell_no_key(properties: dict[str, str], folder: Path) -> None:
    path = folder / "file.parquet"
    factory = keytools.CryptoFactory(properties, internal=False, data_key_length=32)
    keys = made(factory.encryption_keys("kf", {"a": "kc1"}, path=path))
    retriever = factory.retriever(path)
    assert retriever(keys.footer_metadata) == keys.footer
    for found in (retriever, factory, keytools.CryptoFactory(load_kms(properties), internal=False)):
        pickled = pickle.dumps(found)
        shown = f"{found!r} {found}"
        for key in (keys.footer, keys.columns["a"]):
            assert key not in pickled
            assert key.hex() not in shown
            assert repr(key)[2:-1] not in shown
        assert properties["kms.local.key-file"] not in shown
    assert pickle.loads(pickle.dumps(retriever))(keys.footer_metadata) == keys.footer
    again = pickle.loads(pickle.dumps(factory))
    assert (again.internal, again.data_key_length) == (False, 32)
