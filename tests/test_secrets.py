"""What looks like a secret is refused, unseen, wherever it would be kept or travel; no frame or repr shows a key."""

from __future__ import annotations

import json
import logging
import os
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from kms_clients import keystore

import ags_fast
from ags_fast import avro, cli, jobs, parquet, telemetry
from ags_fast.cli.codes import EXIT_USAGE
from ags_fast.errors import AgsError
from ags_fast.keys import StandardKeyMetadata
from ags_fast.keys.envelope import Envelope
from ags_fast.keys.kms import names
from ags_fast.spark.datasource.options import check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

HEX = "00112233445566778899aabbccddeeff"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl"
RANDOM = "tH2kQ9vLx0Zp7RwYb4NcJ8sD"
SECRETS = [  # in a property whose name says nothing
    HEX,
    HEX.upper() + HEX,
    f" {HEX}\n",
    "0011 2233 4455 6677 8899 aabb ccdd eeff",
    f"0x{HEX}",
    f"'{HEX}'",
    "AAECAwQFBgcICQoLDA0ODw==",
    "\tAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8= ",
    "AAECAwQFBgcICQoLDA0ODxAREhMUFRYX",
    f"{RANDOM}{RANDOM}",
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "-----BEGIN PRIVATE KEY-----\nMIGH\n-----END PRIVATE KEY-----",
    "AGE-SECRET-KEY-1QJEPFX8MVTGHZ4PRJ7J9CAV6J2UQ",
    "hvs.CAESIJlU02LQZq",
    "s.iyNUhq8Ov4hIAx6snw5mB2nL",
    "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "github_pat_11ABCDEFG0abcdefghijkl",
    "glpat-xxxxXXXXxxxxXXXXxxxx",
    "xoxb-123456789012-abcdefghijkl",
    "AIzaSyDaGmWKa4JsXZ-HjGw7ISLn_3namBGewQe",
    "ya29.a0AfH6SMBx",
    "Zx~8Q~3nWmJ4sT6uV8yB0dF2hK4mN6pR8tV0xZ2b",
    JWT,
    f"Bearer {JWT}",
    "bearer hunter2hunter2",
    "Basic bWU6aHVudGVyMg==",
    "Authorization: Basic bWU6aHVudGVyMg",
    "AWS4-HMAC-SHA256 Credential=AKEXAMPLE/20260101/eu/s3/aws4_request",
    "Cookie: theme=dark; user=me",
    "JSESSIONID=0a1b2c3d",
    "https://me:hunter2@kms.example.com",
    "redis://:hunter2@cache:6379/0",
    "https://0123456789abcdef0123456789abcdef@sentry.example.com/1",
    "me:hunter2@tcp(db:3306)/keys",
    "me:hunter2@db.example.com:5432/keys",
    "jdbc:oracle:thin:scott/tiger@//db:1521/keys",
    "postgresql://db/keys?user=me&password=hunter2",
    "host=db user=me password = hunter2",
    "Driver={ODBC Driver 18};Server=db;UID=sa;PWD=hunter2",
    "Server=db;User Id=sa;Password=hunter2;Encrypt=yes",
    "DefaultEndpointsProtocol=https;AccountName=acc;AccountKey=aHVudGVyMg;EndpointSuffix=core.windows.net",
    "Endpoint=sb://bus;SharedAccessKeyName=root;SharedAccessKey=aHVudGVyMg",
    "BlobEndpoint=https://acc.blob.core.windows.net;SharedAccessSignature=sv=2022&sp=r",
    "https://acc.blob.core.windows.net/c?sv=2022-11-02&sp=r&sig=aHVudGVyMg%3D",
    "https://b.s3.amazonaws.com/k?X-Amz-Expires=60&X-Amz-Signature=0a1b",
    "https://storage.googleapis.com/b/k?Expires=1&Signature=0a1b",
    '{"type": "service_account", "private_key": "hunter2"}',
    "{'client_secret': 'hunter2'}",
]
SECRET_NAMES = [
    *("vault.token", "kms.pkcs11.pin", " Vault.Token ", "client.secret-access-key", "adls.sas-token.acc", "api key"),
    *("fs.azure.account.key.acc.dfs.core.windows.net", "storage.connection_string", "db.pwd", "http.Authorization"),
    *("s3.session-token", "x.AccountKey", "x.cookie", "x.passwd", "fs.s3a.secret.key", "gcs.oauth2.token", "x.sig"),
]
HARMLESS = [
    "arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab",
    "arn:aws:secretsmanager:eu-central-1:111122223333:secret:password",
    "1234abcd-12ab-34cd-56ef-1234567890ab",
    "projects/P1/locations/europe-west3/keyRings/Ring2/cryptoKeys/Key3",
    "SalesDepartmentMasterKeyOfTheYear2026",
    "SalesDepartmentMasterKeyYear2026",
    "https://vault.example.com:8200/v1",
    "https://keys.vault.azure.net/keys/token/8a1b",
    "abfss://container@account.dfs.core.windows.net/warehouse",
    "me@project.iam.gserviceaccount.com",
    "serviceAccount:me@project.iam.gserviceaccount.com",
    "s3://bucket/year=2026/token=7/part-0.parquet",
    "postgresql+psycopg://user@host/database?sslmode=require&passfile=/run/pgpass",
    "/srv/Data1/keys2/KeystoreProd/abc/secret",
    "mypackage.kms_token:VaultKms",
    "VAULT_TOKEN",
    "token, password and key",
    "a=1, b=2",
]


def refused(raised: pytest.ExceptionInfo[ValueError], secret: str) -> None:
    assert secret.strip() not in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("secret", SECRETS)
def test_a_value_that_looks_like_a_secret(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    monkeypatch.setenv("AGS_FAST_CONFIG", str(config))
    for line in (f'"client.region" = {json.dumps(secret)}', f"storage_options = {{ a = [{json.dumps(secret)}] }}"):
        config.write_text(f"[profiles.sales]\n{line}\n")
        with pytest.raises(ValueError, match="looks like a secret") as raised:
            ags_fast.profile("sales")
        refused(raised, secret)
    config.unlink()
    monkeypatch.delenv("AGS_FAST_CONFIG")
    assert cli.main(["config", "show", "--kms", f"client.region={secret}"]) == EXIT_USAGE
    printed = "".join(capsys.readouterr())
    assert "looks like a secret" in printed
    assert secret.strip() not in printed
    nested = json.dumps({"a": [[{"b": secret}]], "c": {"d": {"e": secret}}})
    for name in ("client.region", "keyStore", "wrappingKeyId", "path", "kms", "storageOptions", "columnKeys"):
        with pytest.raises(ValueError, match="looks like a secret") as raised:
            check({name: nested if name in ("kms", "storageOptions", "columnKeys") else secret})
        refused(raised, secret)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_name_of_a_secret(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.toml"
    monkeypatch.setenv("AGS_FAST_CONFIG", str(config))
    config.write_text(f'[profiles.sales]\n"{name}" = "hunter2"\n')
    with pytest.raises(ValueError, match="looks like a secret") as raised:
        ags_fast.profile("sales")
    refused(raised, "hunter2")
    for options in ({name: "hunter2"}, {"storageOptions": json.dumps({name: "hunter2", "anon": True})}):
        with pytest.raises(ValueError, match="looks like a secret") as raised:
            check(options)
        refused(raised, "hunter2")


@pytest.mark.parametrize("value", HARMLESS)
def test_what_is_no_secret(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.toml"
    monkeypatch.setenv("AGS_FAST_CONFIG", str(config))
    config.write_text(f'[profiles.sales]\n"client.region" = {json.dumps(value)}\n')
    assert ags_fast.profile("sales").kms == {"client.region": value}
    check({"path": value, "wrappingKeyId": value, "pin": HEX, "columnKeys": '{"token": "hr"}'})


def test_no_property_of_a_kms_has_the_name_of_a_secret() -> None:
    every = names.COMMON.union(*names.BY_PROVIDER.values()) | names.CATALOG | names.TABLE
    check({name: "value" for name in every if not name.endswith(".")})


# ------------------------------------------------------------------------------------------------ frames and logs


def locals_of(error: BaseException | None) -> str:
    """The repr of every local of the product's frames, as tools show them that report exceptions."""
    shown, seen = [], set()
    package = os.path.dirname(ags_fast.__file__) + os.sep  # a checkout may be in a folder of the same name
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename.startswith(package):
                shown += [f"{frame.f_code.co_qualname}.{name}: {value!r}" for name, value in frame.f_locals.items()]
        error = error.__cause__ or error.__context__
    assert shown
    return "\n".join(shown)


def unseen(call: Callable[[], object], *secrets: bytes) -> None:
    """The call raises, and no frame of the product shows a secret."""
    with pytest.raises((AgsError, OSError, ValueError, TypeError)) as raised:
        call()
    text = locals_of(raised.value)
    lines = [line for line in text.splitlines() for secret in secrets if repr(secret)[2:-1] in line]
    assert [line.partition(":")[0] for line in lines] == []
    assert not any(secret.hex() in text for secret in secrets)


def drained(rows: Iterable[object]) -> None:
    for _ in rows:
        pass


def failing(key: bytes, folder: Path) -> Iterator[Callable[[], object]]:
    """Calls that fail, with the key among their arguments."""
    stream = ags_fast.AgsCodec(key).encrypt(b"plaintext")
    cut, length = stream[:-1], len(stream)
    metadata = StandardKeyMetadata(key, b"", length).encode()
    missing = folder / "no" / "where"
    yield lambda: ags_fast.AgsReader(cut, key, length=length)
    yield lambda: ags_fast.AgsReader(cut, key, length=length, aad_prefix="text")  # type: ignore[arg-type]
    yield lambda: ags_fast.AgsReader(stream, bytes(32), length=None).read()
    yield lambda: ags_fast.AgsWriter(missing, key)
    yield lambda: ags_fast.AgsWriter(missing, key, block_size=0)
    yield lambda: ags_fast.AgsCodec(key, sealed_before=1 << 33)
    yield lambda: ags_fast.AgsCodec(key).decrypt(cut, length=length)
    yield lambda: ags_fast.open(cut, "rb", key=key, length=length)
    yield lambda: ags_fast.open(cut, "rb", key_metadata=metadata)
    yield lambda: ags_fast.open(cut, "rb", key_metadata=metadata, key=bytes(len(key)))
    yield lambda: ags_fast.open(cut, "rb", key_metadata=metadata, length=7)
    yield lambda: ags_fast.open(missing, "wb", key=key)
    yield lambda: ags_fast.open(stream, "rb", key_metadata=metadata[:-1])
    yield lambda: StandardKeyMetadata.decode(metadata[: len(key) + 2])
    yield lambda: StandardKeyMetadata(key, file_length=-1)
    yield lambda: avro.splits(cut, key, length=length)
    yield lambda: drained(avro.read_split(cut, key, 0, 9, length=length))
    yield lambda: drained(avro.read_batches(cut, key, length=length))
    yield lambda: avro.write(missing, key, {"type": "record", "name": "r", "fields": []}, [])
    yield lambda: parquet.Keys(key, {"a": key, ("a",): key})
    yield lambda: parquet.Keys(None, {"a": key}, footer_metadata=b"x")
    yield lambda: parquet.Keys(key, column_metadata={"b": b""})
    yield lambda: parquet.verify(stream, parquet.Keys(key))
    yield lambda: parquet.verify(stream, lambda _: key)


@pytest.mark.parametrize("size", [16, 24, 32])
def test_no_frame_shows_the_key_that_it_was_given(size: int, tmp_path: Path) -> None:
    key = bytes(range(100, 100 + size))
    for call in failing(key, tmp_path):
        unseen(call, key)


def test_no_frame_shows_a_key_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of a file nor of a table or document, whatever is damaged or refused."""
    kms, src, url = keystore(tmp_path, "master", "other"), tmp_path / "src", str(tmp_path / "ds")
    src.mkdir()
    for name in ("a", "b"):
        (src / name).write_bytes(name.encode() * 100_000)
    jobs.encrypt_files(str(src), url, kms=kms, wrapping_key_id="master")
    keys: set[bytes] = set()
    own, many = Envelope.unwrap, Envelope.unwrap_many

    def unwrap(self: Envelope, *args: Any) -> bytes:
        key = own(self, *args)
        keys.add(bytes(key))
        return key

    def unwrap_many(self: Envelope, *args: Any) -> list[bytes]:
        found = many(self, *args)
        keys.update(map(bytes, found))
        return found

    monkeypatch.setattr(Envelope, "unwrap", unwrap)
    monkeypatch.setattr(Envelope, "unwrap_many", unwrap_many)

    def read() -> None:
        dataset = ags_fast.Dataset.open(url, kms=kms)
        for name in ("a", "b"):
            with dataset.open_file(name) as file:
                file.read()

    read()
    assert len(keys) >= 3  # of two files, and of a document or table
    for file in sorted(path for path in (tmp_path / "ds").rglob("*") if path.is_file()):
        data = file.read_bytes()
        for damaged in (data[:-1], data[:-20] + bytes(20)):
            file.write_bytes(damaged)
            try:
                read()
            except Exception as error:
                text = locals_of(error)
                assert not any(repr(key)[2:-1] in text for key in keys), file
        file.write_bytes(data)
    denied = {**kms, "encryption.allowed-key-ids": "master"}
    unseen(lambda: jobs.rotate(url, kms=kms, what="mek", new_kms=denied, wrapping_key_id="other"), *keys)


@pytest.mark.parametrize("name", [name for name in vars(ags_fast)["__all__"] if not name.endswith("Error")])
def test_an_object_whose_init_has_raised_has_a_repr(name: str) -> None:
    made = getattr(ags_fast, name)
    for args in ((), (object(),), (object(),) * 2, (b"", b"")):
        options: dict[str, Any]
        for options in ({}, {"length": None}, {"kms": {}}):
            try:
                made(*args, **options)
            except Exception as error:
                for frame, _ in traceback.walk_tb(error.__traceback__):
                    for value in frame.f_locals.values():
                        repr(value)


def test_names_in_the_log_are_escaped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "ags_fast"):
        telemetry.info("jobs", "%s: %s, %d, %.1f", "a\nERROR forged\x1b[2J", ValueError("b\udcff\u202e"), 3, 0.25)
    assert caplog.messages == [r"a\nERROR forged\x1b[2J: b\xff\u202e, 3, 0.2"]
