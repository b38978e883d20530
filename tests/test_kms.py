"""KMS clients: finding one, counting its calls, the keystore in a file, and AWS against moto's server made strict."""

from __future__ import annotations

import base64
import errno
import functools
import hashlib
import inspect
import io
import json
import logging
import os
import pickle
import signal
import socket
import stat
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kms_clients import CANARY, Clock, Duck, Echo, Overriding, Plain, Proper, calls_of, forms_of, keystore
from kms_services import Aws, Service, started
from programs import wrapping
from support import finish_python, flip, program, run_python, start_python

from ags_fast import Dataset, jobs
from ags_fast import parquet as apq
from ags_fast.errors import AgsError, FormatError, IntegrityError, KeyAccessError
from ags_fast.keys import KmsClient, clear_cache, kms_calls, load_kms, set_audit_hook
from ags_fast.keys.kms import PROVIDERS, as_kms, check_travels, keystore_file, local, pace, shared_client
from ags_fast.keys.kms.imports import find_class
from ags_fast.keys.kms.names import BY_PROVIDER, COMMON, ELSEWHERE, SERVICE
from ags_fast.keys.kms.pace import Pace
from ags_fast.keys.kms.service import ENDPOINT, with_retries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# ---------------------------------------------------------------- finding one


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({}, r"encryption\.kms-type.*encryption\.kms-impl"),
        ({"encryption.kms-type": "local", "encryption.kms-impl": "a:B"}, r"encryption\.kms-type.*encryption\.kms-impl"),
        ({"encryption.kms-type": "azur"}, "azur"),
        ({"encryption.kms-type": "local"}, r"kms\.local\.path"),
        ({"encryption.kms-type": "local", "kms.local.path": "/x"}, r"kms\.local\.key-file"),
        (
            {
                "encryption.kms-type": "local",
                "kms.local.path": "/x",
                "kms.local.key-file": "/y",
                "kms.local.passphrase-env": "Z",
            },
            "one of",
        ),
        ({"encryption.kms-impl": "org.apache.iceberg.aws.AwsKeyManagementClient"}, "module:Class"),
        ({"encryption.kms-impl": "no_such_module_here:X"}, "no_such_module_here"),
        ({"encryption.kms-impl": "kms_clients:Nobody"}, "Nobody"),
        ({"encryption.kms-type": "aws", "kms.endpoint": "http://kms.example.com"}, "https"),
        ({"encryption.kms-type": "aws", "kms.endpoint": "http://127.example.com"}, "https"),
        ({"encryption.kms-type": "aws", "kms.endpoint": "localhost:80"}, "URL"),
        ({"encryption.kms-type": "aws", "kms.max-attempts": "0"}, r"kms\.max-attempts"),
        *(
            (
                {"encryption.kms-impl": "kms_clients:Plain", "kms.max-calls-per-second": text},
                r"kms\.max-calls-per-second",
            )
            for text in ("", "0", "-1", "many", "nan", "inf")
        ),
        ({"encryption.kms-type": "aws", "kms.read-timeout-ms": "soon"}, r"kms\.read-timeout-ms"),
    ],
)
def test_impossible_properties(properties: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_kms(properties)


AWS = {"encryption.kms-type": "aws"}


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({**AWS, "encryption.allowed-key-id": "a"}, "'encryption.allowed-key-id'.*'encryption.allowed-key-ids'"),
        ({**AWS, "Encryption.Allowed_Key_Ids": "a"}, "'encryption.allowed-key-ids'"),
        ({**AWS, " encryption.allowed-key-ids": "a"}, "'encryption.allowed-key-ids'"),
        ({**AWS, "encrytion.allowed-key-ids": "a"}, "'encryption.allowed-key-ids'"),
        ({**AWS, "kms.read-timeout": "1"}, "'kms.read-timeout-ms'"),
        ({**AWS, "client.regoin": "eu"}, "'client.region'"),
        ({**AWS, "kms.moon-phase": "full"}, "'kms.moon-phase' is not a property of the KMS aws"),
        ({**AWS, "kms.local.path": "/x"}, "'kms.local.path' is a property of the KMS local, not of the KMS aws"),
        ({**AWS, "vault.address": "https://x"}, "of the KMS vault, not of the KMS aws"),
        (
            {"encryption.kms-type": "gcp", "adls.token-credential-providers": "a:B", "kms.endpont": "x"},
            "'kms.endpoint'",
        ),
        ({"encryption.kms-type": "azure", "azure.keyvault.ulr": "https://x"}, "'azure.keyvault.url'"),
        ({"encryption.kms-type": "vault", "vault.adress": "https://x"}, "'vault.address'"),
        ({"encryption.kms-type": "local", "kms.local.keyfile": "x"}, "'kms.local.key-file'"),
        ({"encryption.kms-type": "pkcs11", "kms.pkcs11.pinfile": "x"}, "'kms.pkcs11.pin-file'"),
        (
            {"encryption.kms-impl": "kms_clients:Plain", "encryption.allowed-key-id": "a"},
            "'encryption.allowed-key-ids'",
        ),
        ({"encryption.kms-impl": "kms_clients:Plain", "kms.max-call-per-second": "1"}, "'kms.max-calls-per-second'"),
        ({"encryption.kms-impl": "kms_clients:Listing", "kms.local.path": "x"}, "Listing may list.*property_names"),
        ({"encryption.kms-impl": "kms_clients:Listing", "kms.listing.colour": "x"}, "Listing"),
    ],
)
def test_a_mistyped_name_is_refused(properties: dict[str, str], said: str) -> None:
    for load in (load_kms, as_kms, shared_client):
        with pytest.raises(ValueError, match=said):
            load(properties)


def test_names_of_others_pass(tmp_path: Path) -> None:
    """Those of an Iceberg catalog, of a class of the user's own, and what that class lists or inherits."""
    catalog = {
        "type": "rest",
        "uri": "https://catalog.example.com",
        "warehouse": "s3://bucket/warehouse",
        "py-io-impl": "ags_fast.iceberg:FileIO",
        "header.X-Iceberg-Access-Delegation": "vended-credentials",
        "client.region": "eu-central-1",
        "client.factory": "com.example.Factory",
        "client.role-arn": "arn:aws:iam::1:role/r",
        "client.role-session-name": "s",
        "s3.endpoint": "http://127.0.0.1:1",
        "s3.region": "eu-central-1",
        "glue.endpoint": "http://127.0.0.1:1",
        "gcs.project-id": "p",
        "adls.token-credential-provider": "a:B",
        "encryption.key-id": "k",
        "encryption.data-key-length": "16",
    }
    local_one = keystore(tmp_path, "m")
    for properties in (AWS, local_one, {"encryption.kms-impl": "kms_clients:Plain"}):
        assert load_kms({**catalog, **properties}).properties == {**catalog, **properties}
    own = {"encryption.kms-impl": "kms_clients:Plain", "kms.local.path": "x", "kms.colour": "blue"}
    assert load_kms(own).properties == own
    listing = {"encryption.kms-impl": "kms_clients:Listing", "kms.endpoint": "x", "kms.listing.headers.a": "b"}
    assert load_kms({**listing, "my.own": "c"}).properties["kms.endpoint"] == "x"
    inheriting = {"encryption.kms-impl": "deadly_kms:DeadlyKms", "deadly.folder": "x"}
    del local_one["encryption.kms-type"]
    assert load_kms({**local_one, **inheriting}).provider == "deadly"


def test_every_property_is_documented() -> None:
    page = Path(__file__).parents[1] / "docs" / "keys.md"
    if not page.is_file():
        pytest.skip("no source tree here: an installed package is tested")
    text = page.read_text()
    known = COMMON | SERVICE | ELSEWHERE | frozenset().union(*BY_PROVIDER.values())
    assert [name for name in sorted(known - {"client.role-session-name"}) if f"`{name}" not in text] == []
    for provider, names in BY_PROVIDER.items():
        source = Path(inspect.getfile(find_class(PROVIDERS[provider]))).read_text()
        assert [name for name in sorted(names - SERVICE - {ENDPOINT}) if name.rstrip(".") not in source] == []


def test_properties_are_text(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="text"):
        load_kms({"encryption.kms-type": "local", "kms.local.path": tmp_path})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="Path is not a KMS client: give the class a method wrap_key"):
        load_kms({"encryption.kms-impl": "pathlib:Path"})
    with pytest.raises(TypeError, match="VaultCredential is not a KMS client"):
        load_kms({"encryption.kms-impl": "kms_clients:VaultCredential"})
    with pytest.raises(TypeError, match="KmsClient is not a KMS client"):
        load_kms({"encryption.kms-impl": "ags_fast.keys:KmsClient"})
    with pytest.raises(TypeError, match="keystore is not a class"):
        load_kms({"encryption.kms-impl": "kms_clients:keystore"})


def test_a_missing_dependency_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install '.*\[s3\]'"):
        load_kms({"encryption.kms-type": "aws"})


@pytest.mark.parametrize("name", ["Plain", "Overriding", "Proper", "Able"])
def test_classes_of_users_are_found_counted_and_shipped(name: str) -> None:
    properties = {"encryption.kms-impl": f"kms_clients:{name}", "my.setting": "1"}
    kms = load_kms(properties)
    assert isinstance(kms, KmsClient)
    assert kms.properties == properties
    provider = name.lower()

    def use() -> None:
        wrapped = kms.wrap_key(bytes(range(16)), "master")
        assert kms.unwrap_key(wrapped, "master") == bytes(range(16))

    assert calls_of(use) == {(provider, "wrap"): 1, (provider, "unwrap"): 1}
    again = pickle.loads(pickle.dumps(kms))
    assert again.properties == properties
    assert again.unwrap_key(kms.wrap_key(b"x", "m"), "m") == b"x"
    assert pickle.loads(pickle.dumps(kms)) is again  # one for all tasks of a process
    kms.close()


def test_what_classes_of_users_can() -> None:
    able = load_kms({"encryption.kms-impl": "kms_clients:Able"})
    key, wrapped = able.generate_key("m", 24)
    assert able.unwrap_key(wrapped, "m") == key == bytes(24)
    assert able.key_version(wrapped) == "7"
    before = kms_calls()
    assert able.current_version("m") == "8"
    assert kms_calls() == before
    assert calls_of(lambda: able.rewrap_key(wrapped, "m")) == {("able", "rewrap"): 1}
    plain = load_kms({"encryption.kms-impl": "kms_clients:Plain"})
    assert plain.key_version(b"") is None
    for client in (plain, Overriding(), Proper()):
        before = kms_calls()
        assert client.current_version("m") is None
        assert kms_calls() == before
    with pytest.raises(NotImplementedError, match="wrap it"):
        plain.generate_key("m", 16)
    wrapped = plain.wrap_key(b"key", "m")
    assert calls_of(lambda: plain.rewrap_key(wrapped, "m")) == {("plain", "unwrap"): 1, ("plain", "wrap"): 1}
    overriding = load_kms({"encryption.kms-impl": "kms_clients:Overriding", "my.own": "1"})
    assert overriding.properties == overriding.initialized_with  # type: ignore[attr-defined]


def test_public_methods_of_users_are_checked() -> None:
    """A class may override wrap_key itself: its calls are allowed, counted and reported, and its answers looked at."""
    events: list[str] = []
    set_audit_hook(lambda event: events.append(event["operation"]))
    try:
        kms = load_kms({"encryption.kms-impl": "kms_clients:Overriding", "encryption.allowed-key-ids": "m"})
        assert kms.unwrap_key(kms.wrap_key(CANARY, "m"), "m") == CANARY
        assert events == ["wrap", "unwrap"]
        for ask in (kms.wrap_key, kms.unwrap_key):
            with pytest.raises(KeyAccessError, match="allowed-key-ids"):
                ask(CANARY, "n")
        assert events == ["wrap", "unwrap"]
        with pytest.raises(KeyAccessError, match="nothing was wrapped"):
            Echo().wrap_key(CANARY, "m")
        with pytest.raises(KeyAccessError, match="nothing was unwrapped"):
            Echo().unwrap_key(CANARY, "m")
    finally:
        set_audit_hook(None)


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "passed"])
def test_a_client_need_not_be_derived_from_ours(loaded: bool) -> None:
    """It is checked, counted and limited as ours are, whatever names its class has of its own."""
    properties = {"encryption.kms-impl": "kms_clients:Duck", "encryption.allowed-key-ids": "m", "my.own": "1"}
    kms = load_kms(properties) if loaded else as_kms(Duck())
    assert isinstance(kms, KmsClient)
    assert (kms.supports_rewrap, kms.supports_key_generation, kms.waits) == (True, False, False)

    def use() -> None:
        assert kms.unwrap_key(kms.rewrap_key(kms.wrap_key(CANARY, "m"), "m"), "m") == CANARY

    assert calls_of(use) == {("kms", "wrap"): 1, ("kms", "rewrap"): 1, ("kms", "unwrap"): 1}
    kms.close()
    if not loaded:
        with pytest.raises(TypeError, match="properties"):
            pickle.dumps(kms)
        return
    assert kms.properties == properties
    assert pickle.loads(pickle.dumps(kms)).unwrap_key(kms.wrap_key(CANARY, "m"), "m") == CANARY
    assert type(load_kms(properties)) is type(kms)
    check_travels(kms)
    with pytest.raises(KeyAccessError, match="allowed-key-ids"):
        kms.wrap_key(CANARY, "n")


def test_what_is_a_client(tmp_path: Path) -> None:
    proper = Proper()
    assert as_kms(proper) is proper
    with pytest.raises(TypeError, match="methods wrap_key and unwrap_key, not int"):
        as_kms(5)  # type: ignore[arg-type]
    for client in (proper, Plain(), Overriding()):
        with pytest.raises(TypeError, match="properties"):
            pickle.dumps(client)
        assert client.provider in repr(client)
    properties = keystore(tmp_path)
    assert as_kms(properties).properties == properties == shared_client(properties).properties
    assert shared_client(properties) is shared_client(dict(reversed(properties.items())))


def test_foreign_errors_are_translated_and_quote_nothing() -> None:
    kms = load_kms({"encryption.kms-impl": "kms_clients:Leaky"})
    with pytest.raises(KeyAccessError, match=r"leaky failed to wrap a key with 'm': RuntimeError") as caught:
        kms.wrap_key(CANARY, "m")
    text = "".join(traceback.format_exception(caught.value)) + repr(vars(caught.value))
    assert not any(form in text for form in forms_of(CANARY) - {CANARY.decode()})
    with pytest.raises(KeyAccessError, match="str where bytes"):
        kms.unwrap_key(b"x", "m")
    with pytest.raises(KeyAccessError, match=r"leaky failed to describe the key 'm': RuntimeError") as caught:
        kms.current_version("m")
    assert CANARY.decode() not in str(caught.value)


def test_a_lack_of_memory_is_not_blamed_on_the_kms() -> None:
    kms = load_kms({"encryption.kms-impl": "kms_clients:Starved"})
    with pytest.raises(MemoryError):
        kms.unwrap_key(b"x", "m")


def test_only_keys_that_are_allowed(tmp_path: Path) -> None:
    """What a dataset says of its master key is only a claim: the caller may say which ones to believe."""
    properties = keystore(tmp_path, "team a/1", "team b/1", "Team a/1")
    kms = load_kms({**properties, "encryption.allowed-key-ids": "other, team a/*"})
    wrapped = kms.wrap_key(b"x", "team a/1")
    before = kms_calls()
    for key_id in ("team b/1", "Team a/1", "team a"):
        with pytest.raises(KeyAccessError, match=r"encryption\.allowed-key-ids does not allow"):
            kms.unwrap_key(wrapped, key_id)
        with pytest.raises(KeyAccessError, match=r"encryption\.allowed-key-ids does not allow"):
            kms.current_version(key_id)
    assert kms_calls() == before
    assert kms.unwrap_key(wrapped, "team a/1") == b"x"
    with pytest.raises(ValueError, match="allows no key"):
        load_kms({**properties, "encryption.allowed-key-ids": " , "})


@pytest.mark.parametrize("key_id", ["", "a\nb", "a\0b", "\x7f", "\x85", "\ud800"])
def test_impossible_key_ids(key_id: str) -> None:
    with pytest.raises(ValueError, match="key id"):
        Proper().wrap_key(b"x", key_id)
    with pytest.raises(ValueError, match="key id"):
        Proper().current_version(key_id)
    with pytest.raises(TypeError):
        Proper().wrap_key(b"x", 5)  # type: ignore[arg-type]


def test_bytes_like_keys(tmp_path: Path) -> None:
    kms = load_kms(keystore(tmp_path, "m"))
    for kind in (bytes, bytearray, memoryview):
        wrapped = kms.wrap_key(kind(CANARY), "m")  # type: ignore[arg-type]
        assert kms.unwrap_key(kind(wrapped), "m") == CANARY  # type: ignore[arg-type]
        assert kms.unwrap_key(kms.rewrap_key(kind(wrapped), "m"), "m") == CANARY  # type: ignore[arg-type]
    for junk in ("text", 16, None, [1]):
        for method in (kms.wrap_key, kms.unwrap_key, kms.rewrap_key):
            with pytest.raises(TypeError):
                method(junk, "m")  # type: ignore[arg-type]


def test_impossible_keys() -> None:
    for key in (b"", bytes(4097)):
        with pytest.raises(ValueError, match="4096"):
            Proper().wrap_key(key, "m")
    for length in (0, 8, 33):
        with pytest.raises(ValueError, match="16, 24 or 32"):
            Proper().generate_key("m", length)


# ---------------------------------------------------------------- accounts


def test_audit(tmp_path: Path) -> None:
    kms = load_kms(keystore(tmp_path, "clé 1"))
    seen: list[dict[str, Any]] = []
    set_audit_hook(seen.append)
    try:
        wrapped = kms.wrap_key(CANARY, "clé 1")
        kms.unwrap_key(wrapped, "clé 1")
        with pytest.raises(KeyAccessError):
            kms.unwrap_key(wrapped, "clé 2")
        kms.current_version("clé 1")
    finally:
        set_audit_hook(None)
    assert [(e["provider"], e["operation"], e["wrapping_key_id"], e["outcome"]) for e in seen] == [
        ("local", "wrap", "clé 1", "ok"),
        ("local", "unwrap", "clé 1", "ok"),
        ("local", "unwrap", "clé 2", "KeyAccessError"),
        ("local", "describe", "clé 1", "ok"),
    ]
    now_ms = time.time() * 1000
    assert all(now_ms - 60_000 < e["time_ms"] <= now_ms and 0 <= e["seconds"] < 60 for e in seen)
    assert not any(isinstance(value, (bytes, bytearray)) for e in seen for value in e.values())
    assert not any(form in repr(seen) for form in forms_of(CANARY))
    kms.wrap_key(CANARY, "clé 1")
    assert len(seen) == 4


def test_a_key_that_cannot_be_accounted_for_is_not_handed_out() -> None:
    def fail(event: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "the audit log is full")

    set_audit_hook(fail)
    try:
        with pytest.raises(OSError, match="full"):
            Proper().wrap_key(b"x", "m")
    finally:
        set_audit_hook(None)


def test_threads_share_the_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that come at once are told turns at even distances, whichever client of these properties they use."""
    clock = Clock(still=True)
    monkeypatch.setattr(pace, "Pace", functools.partial(Pace, clock=clock.monotonic, sleep=clock.sleep))
    properties = {**keystore(tmp_path, "m"), "kms.max-calls-per-second": "4"}
    start = threading.Barrier(8)

    def use(number: int) -> None:
        kms = load_kms(properties)
        start.wait()
        for _ in range(5):
            kms.wrap_key(b"key", "m")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert sorted(clock.waits) == [turn / 4 for turn in range(1, 40)]
    clock.waits.clear()
    load_kms({**properties, "more": "1"}).wrap_key(b"key", "m")  # others have turns of their own
    load_kms(keystore(tmp_path, "m", name="unlimited")).wrap_key(b"key", "m")
    narrow = load_kms({**properties, "encryption.allowed-key-ids": "n"})
    for _ in range(2):
        with pytest.raises(KeyAccessError, match="does not allow the key"):
            narrow.wrap_key(b"key", "m")
    assert not clock.waits
    clock.now = 1000.0  # what was not used is not saved up
    for _ in range(3):
        load_kms(properties).wrap_key(b"key", "m")
    assert clock.waits == [0.25, 0.5]


def test_a_limit_of_calls_for_objects_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(pace, "Pace", functools.partial(Pace, clock=clock.monotonic, sleep=clock.sleep))
    kms = load_kms({"encryption.kms-impl": "kms_clients:Able", "kms.max-calls-per-second": "0.5"})
    kms.unwrap_key(kms.wrap_key(b"key", "m"), "m")
    kms.generate_key("m", 16)
    kms.current_version("m")
    assert clock.waits == [2.0] * 3


def test_a_fork_counts_its_own_calls(tmp_path: Path) -> None:
    out = run_python(
        program(wrapping.kms_after_fork, tmp_path),
    )
    assert out.splitlines() == ["{('local', 'unwrap'): 1}", "{('local', 'wrap'): 1}"]


def test_retries() -> None:
    waits: list[float] = []
    tries: list[int] = []

    def fails(times: int) -> str:
        tries.append(1)
        if len(tries) <= times:
            raise OSError("busy")
        return "done"

    assert with_retries(lambda: fails(3), lambda error: 1.0, attempts=4, longest=3.0, sleep=waits.append) == "done"
    assert len(waits) == 3
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, (1, 2, 3), strict=True))
    tries.clear()
    with pytest.raises(OSError, match="busy"):
        with_retries(lambda: fails(9), lambda error: 0.0, attempts=4, sleep=waits.append)
    assert len(tries) == 4
    tries.clear()
    with pytest.raises(OSError, match="busy"):
        with_retries(lambda: fails(9), lambda error: None, attempts=4, sleep=waits.append)
    assert len(tries) == 1


# ---------------------------------------------------------------- the local keystore: a client


def test_local_wraps_by_versions(tmp_path: Path) -> None:
    properties = keystore(tmp_path, "m")
    kms = load_kms(properties)
    first = kms.wrap_key(CANARY, "m")
    assert first[0] == 1
    assert first[1:5] == b"\1\0\0\0"
    assert len(first) == 5 + 12 + 16 + 16
    assert kms.wrap_key(CANARY, "m") != first
    assert local.rotate_key(properties, "m") == 2  # in another client of the file, which this one notices
    second = kms.wrap_key(CANARY, "m")
    assert (kms.key_version(first), kms.key_version(second)) == ("1", "2")
    assert kms.unwrap_key(first, "m") == kms.unwrap_key(second, "m") == CANARY
    third = kms.rewrap_key(first, "m")
    assert kms.key_version(third) == "2"
    assert kms.unwrap_key(third, "m") == CANARY
    local.set_state(properties, "m", "disabled", version=1)
    with pytest.raises(KeyAccessError, match="version 1 of the local key 'm' is disabled"):
        kms.unwrap_key(first, "m")
    local.set_state(properties, "m", "enabled", version=1)
    assert kms.unwrap_key(first, "m") == CANARY
    local.set_state(properties, "m", "disabled", version=2)
    assert kms.key_version(kms.wrap_key(CANARY, "m")) == "1"
    local.set_state(properties, "m", "destroyed", version=1)
    with pytest.raises(KeyAccessError, match="version 1 of the local key 'm' was destroyed"):
        kms.unwrap_key(first, "m")
    with pytest.raises(KeyAccessError, match="destroyed"):
        local.set_state(properties, "m", "enabled", version=1)
    with pytest.raises(KeyAccessError, match="no enabled version"):
        kms.wrap_key(CANARY, "m")
    local.set_state(properties, "m", "enabled")
    assert kms.unwrap_key(second, "m") == CANARY
    states = [v["state"] for v in local.status(properties)["keys"][0]["versions"]]
    assert states == ["destroyed", "enabled"]
    assert (
        "sealed"
        not in json.loads(json.loads(Path(properties["kms.local.path"]).read_bytes())["body"])["keys"]["m"]["versions"][
            0
        ]
    )


def test_local_tells_what_is_wrong(tmp_path: Path) -> None:
    properties = keystore(tmp_path, "m", "other")
    kms = load_kms(properties)
    wrapped = kms.wrap_key(CANARY, "m")
    with pytest.raises(KeyAccessError, match="no key 'absent'"):
        kms.wrap_key(CANARY, "absent")
    with pytest.raises(IntegrityError, match="'other'"):
        kms.unwrap_key(wrapped, "other")
    elsewhere = load_kms(keystore(tmp_path, "m", name="elsewhere"))
    with pytest.raises(IntegrityError, match="another key or keystore"):
        elsewhere.unwrap_key(wrapped, "m")
    for bit in range(8 * len(wrapped)):
        with pytest.raises((IntegrityError, FormatError, KeyAccessError)) as caught:
            kms.unwrap_key(flip(wrapped, bit), "m")
        if 8 <= bit < 40:
            assert "no version" in str(caught.value)  # never "bad tag"
    for size in range(len(wrapped)):
        with pytest.raises((IntegrityError, FormatError)):
            kms.unwrap_key(wrapped[:size], "m")
    assert kms.unwrap_key(wrapped, "m") == CANARY
    with pytest.raises(ValueError, match="already"):
        local.create_key(properties, "m")
    with pytest.raises(KeyAccessError, match="no key"):
        local.rotate_key(properties, "absent")
    with pytest.raises(KeyAccessError, match="no version 9"):
        local.set_state(properties, "m", "disabled", version=9)
    with pytest.raises(ValueError, match="enabled, disabled, destroyed"):
        local.set_state(properties, "m", "gone")


def test_local_client_opens_again(tmp_path: Path) -> None:
    kms = load_kms(keystore(tmp_path, "m"))
    wrapped = kms.wrap_key(CANARY, "m")
    kms.close()
    kms.close()
    assert kms.unwrap_key(wrapped, "m") == CANARY
    assert pickle.loads(pickle.dumps(kms)).unwrap_key(wrapped, "m") == CANARY
    pickled = pickle.dumps(kms)
    assert CANARY not in pickled
    assert (tmp_path / "keystore.key").read_bytes() not in pickled


def test_where_the_keystore_is_not_shared(tmp_path: Path) -> None:
    properties = keystore(tmp_path, "m")
    kms = load_kms({**properties, "kms.local.path": str(tmp_path / "absent")})
    with pytest.raises(KeyAccessError, match=r"absent cannot be read here.*path that all hosts share"):
        kms.wrap_key(b"x", "m")
    with pytest.raises(KeyAccessError, match="cannot be read here"):
        local.create_key({**properties, "kms.local.path": str(tmp_path / "absent")}, "n")
    kms = load_kms({**properties, "kms.local.key-file": str(tmp_path / "absent")})
    with pytest.raises(KeyAccessError, match=r"absent of kms\.local\.key-file cannot be read here"):
        kms.wrap_key(b"x", "m")
    held = load_kms(properties)
    held.wrap_key(b"x", "m")
    os.unlink(properties["kms.local.path"])
    with pytest.raises(KeyAccessError, match="cannot be read here"):
        held.wrap_key(b"x", "m")


# ---------------------------------------------------------------- the local keystore: secrets


def passphrase_properties(tmp_path: Path, passphrase: str = "correct horse") -> dict[str, str]:
    (tmp_path / "passphrase").write_text(f"{passphrase}\n")
    return {
        "encryption.kms-type": "local",
        "kms.local.path": str(tmp_path / "keystore"),
        "kms.local.passphrase-file": str(tmp_path / "passphrase"),
    }


def test_passphrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = passphrase_properties(tmp_path, "Schlüssel")
    local.create_keystore(properties)
    local.create_key(properties, "m")
    kdf = json.loads((tmp_path / "keystore").read_bytes())["kdf"]
    assert {name: kdf[name] for name in ("name", "n", "r", "p")} == {"name": "scrypt", "n": 1 << 17, "r": 8, "p": 1}
    derived: list[int] = []
    scrypt = hashlib.scrypt
    monkeypatch.setattr("hashlib.scrypt", lambda *args, **more: derived.append(1) or scrypt(*args, **more))  # type: ignore[func-returns-value, redundant-expr]
    kms = load_kms(properties)
    wrapped = kms.wrap_key(CANARY, "m")
    local.rotate_key(properties, "m", passphrase="Schlu\u0308ssel")  # the same letters from another keyboard
    assert kms.unwrap_key(wrapped, "m") == CANARY
    assert kms.key_version(kms.wrap_key(b"x", "m")) == "2"
    assert len(derived) == 2  # the client, and the rotation
    by_env = {name: value for name, value in properties.items() if "passphrase" not in name}
    by_env["kms.local.passphrase-env"] = "AGS_TEST_PASSPHRASE"
    with pytest.raises(KeyAccessError, match="AGS_TEST_PASSPHRASE"):
        load_kms(by_env).unwrap_key(wrapped, "m")
    monkeypatch.setenv("AGS_TEST_PASSPHRASE", "Schlüssel")
    assert load_kms(by_env).unwrap_key(wrapped, "m") == CANARY
    monkeypatch.setenv("AGS_TEST_PASSPHRASE", "another canary-key")
    with pytest.raises(KeyAccessError, match="passphrase does not open") as caught:
        load_kms(by_env).unwrap_key(wrapped, "m")
    assert "canary-key" not in "".join(traceback.format_exception(caught.value))
    for passphrase in ("", "\n"):
        (tmp_path / "passphrase").write_text(passphrase)
        with pytest.raises(KeyAccessError, match="empty"):
            load_kms(properties).unwrap_key(wrapped, "m")
    other = keystore(tmp_path, "m", name="other")
    with pytest.raises(KeyAccessError, match="another kind of secret"):
        load_kms({**by_env, "kms.local.path": other["kms.local.path"]}).wrap_key(b"x", "m")


def test_key_files(tmp_path: Path) -> None:
    key = bytes(range(200, 232))
    properties = keystore(tmp_path)
    os.unlink(properties["kms.local.path"])
    (tmp_path / "keystore.key").write_bytes(key)
    local.create_keystore(properties)
    local.create_key(properties, "m")
    wrapped = load_kms(properties).wrap_key(CANARY, "m")
    for form in (key.hex() + "\n", key.hex().upper(), base64.b64encode(key).decode() + "\r\n"):
        (tmp_path / "keystore.key").write_text(form)
        assert load_kms(properties).unwrap_key(wrapped, "m") == CANARY
    for data in (b"", key[:31], key + b"\n", key.hex()[:63].encode(), bytes(1 << 20)):
        (tmp_path / "keystore.key").write_bytes(data)
        with pytest.raises(KeyAccessError, match="not a key file"):
            load_kms(properties).unwrap_key(wrapped, "m")
    (tmp_path / "keystore.key").write_bytes(key[::-1])
    with pytest.raises(KeyAccessError, match="key file does not open"):
        load_kms(properties).unwrap_key(wrapped, "m")


# ---------------------------------------------------------------- the local keystore: its file


def test_files_are_private_and_never_replaced(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        properties = keystore(tmp_path, "m")
    finally:
        os.umask(before)
    for name in ("keystore", "keystore.key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    held = (tmp_path / "keystore").read_bytes()
    with pytest.raises(FileExistsError):
        local.create_keystore(properties)
    assert (tmp_path / "keystore").read_bytes() == held
    (tmp_path / "keystore").chmod(0o640)  # an administrator's choice stays
    local.create_key(properties, "n")
    assert stat.S_IMODE((tmp_path / "keystore").stat().st_mode) == 0o640
    key = (tmp_path / "keystore.key").read_bytes()
    os.unlink(tmp_path / "keystore")
    local.create_keystore(properties)
    assert (tmp_path / "keystore.key").read_bytes() == key  # a key file that is there is taken


def test_every_bit_of_a_keystore(tmp_path: Path) -> None:
    properties = keystore(tmp_path, "m", "ключ")
    path = tmp_path / "keystore"
    good = path.read_bytes()
    wrapped = load_kms(properties).wrap_key(CANARY, "m")

    def refused(data: bytes, *, by_client: bool = True) -> None:
        with pytest.raises((FormatError, IntegrityError, KeyAccessError)):
            if by_client:
                path.write_bytes(data)
                load_kms(properties).unwrap_key(wrapped, "m")
            else:  # the same without the files, which take ten times as long
                outer = local._parse(data, "keystore")
                local._Keystore("keystore", outer, local._store_key(outer, secret, "keystore"))

    secret = local._secret(properties)
    outer = local._parse(good, "keystore")
    assert len(local._Keystore("keystore", outer, local._store_key(outer, secret, "keystore")).keys) == 2
    for bit in range(8 * len(good)):
        refused(flip(good, bit), by_client=bit % 101 == 0)
    for size in range(len(good)):
        refused(good[:size], by_client=size % 101 == 0)
    for data in (good + b"\n", b"", b"[" * 100_000, b"null", json.dumps(json.loads(good), indent=1).encode()):
        refused(data)
    path.write_bytes(good)
    assert load_kms(properties).unwrap_key(wrapped, "m") == CANARY


def test_a_body_of_another_keystore_or_key(tmp_path: Path) -> None:
    """Parts that are authentic somewhere else: of a keystore with the same secret, of another key of the same one."""
    properties = keystore(tmp_path, "m", "n")
    other = {**properties, "kms.local.path": str(tmp_path / "other")}
    local.create_keystore(other)
    local.create_key(other, "m")
    path = tmp_path / "keystore"
    mine, others = json.loads(path.read_bytes()), json.loads((tmp_path / "other").read_bytes())
    for fields in (("body", "seal"), ("store_id",), ("kdf",), ("check",), ("store_id", "kdf", "check")):
        path.write_bytes(local._dumps({**mine, **{name: others[name] for name in fields}}).encode() + b"\n")
        with pytest.raises((IntegrityError, KeyAccessError)):
            load_kms(properties).wrap_key(b"x", "m")


@pytest.mark.parametrize(
    "forged",
    [
        {"n": 1 << 30},
        {"n": 1 << 18, "r": 16},
        {"r": 1 << 40},
        {"p": 1 << 30},
        {"n": 3 << 15},
        {"n": 2},
        {"n": 0},
        {"n": -(1 << 17)},
        {"r": 0},
        {"p": 0},
        {"n": True},
        {"n": 131072.0},
        {"n": "131072"},
        {"n": 1 << 5000},
        {"salt": ""},
        {"salt": "A" * 400},
        {"salt": None},
        {"name": "none"},
        {"more": 1},
    ],
)
def test_forged_scrypt_parameters_are_refused_unused(
    forged: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "SCRYPT", {"n": 1 << 14, "r": 8, "p": 1})  # quicker; a reader takes what the file says
    properties = passphrase_properties(tmp_path)
    local.create_keystore(properties)
    outer = json.loads((tmp_path / "keystore").read_bytes())
    outer["kdf"].update(forged)
    (tmp_path / "keystore").write_bytes(local._dumps(outer).encode() + b"\n")
    monkeypatch.setattr("hashlib.scrypt", lambda *args, **more: pytest.fail("used"))
    with pytest.raises(FormatError):
        load_kms(properties).wrap_key(b"x", "m")


def test_weaker_parameters_do_not_open_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SCRYPT", {"n": 1 << 15, "r": 8, "p": 1})
    properties = passphrase_properties(tmp_path)
    local.create_keystore(properties)
    data = (tmp_path / "keystore").read_bytes()
    (tmp_path / "keystore").write_bytes(data.replace(b'"n":32768', b'"n":16384'))
    with pytest.raises(KeyAccessError, match="header was changed"):
        load_kms(properties).wrap_key(b"x", "m")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    properties = keystore(tmp_path)
    os.truncate(tmp_path / "keystore", 1 << 40)  # sparse
    with pytest.raises(FormatError, match="not a keystore"):
        load_kms(properties).wrap_key(b"x", "m")


def test_processes_that_create_keys_at_once_lose_none(tmp_path: Path) -> None:
    properties = keystore(tmp_path)
    paths = properties["kms.local.path"], properties["kms.local.key-file"]
    children = [start_python(program(wrapping.create_keys, *paths, name, 15)) for name in ("a", "b", "c")]
    for child in children:
        finish_python(child)
    found = {key["key_id"] for key in local.status(properties)["keys"]}
    assert found == {f"{name} {i}" for name in ("a", "b", "c") for i in range(15)}
    assert sorted(os.listdir(tmp_path)) == ["keystore", "keystore.key"]


@pytest.mark.more
def test_a_kill_leaves_the_old_keystore_or_the_new(tmp_path: Path) -> None:
    properties = keystore(tmp_path)
    paths = properties["kms.local.path"], properties["kms.local.key-file"]
    made = 0
    for attempt in range(12):
        child = start_python(program(wrapping.create_keys, *paths, attempt, 10_000))
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.003 * attempt)
        os.kill(child.pid, signal.SIGKILL)
        said = 1 + len(child.stdout.read().splitlines())  # communicate() would pass by what readline() has read ahead
        child.communicate()
        keys = [key["key_id"] for key in local.status(properties)["keys"]]
        mine = [key_id for key_id in keys if key_id.startswith(f"{attempt} ")]
        assert len(keys) - made == len(mine)
        assert len(mine) in (said, said + 1)
        made = len(keys)
    (tmp_path / ".keystore.key.keystore.0123456789abcdef.agstmp").touch()  # somebody else's, who may live
    local.create_key(properties, "last")
    os.unlink(tmp_path / ".keystore.key.keystore.0123456789abcdef.agstmp")
    assert sorted(os.listdir(tmp_path)) == ["keystore", "keystore.key"]  # nor is anything left of the dead


def test_a_lock_that_nobody_lets_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    properties = keystore(tmp_path)
    monkeypatch.setattr(keystore_file, "LOCK_SECONDS", 0.2)
    with open(properties["kms.local.path"], "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(KeyAccessError, match="another process has locked"):
            local.create_key(properties, "m")
        assert local.status(properties)["keys"] == []  # readers need no lock
    local.create_key(properties, "m")


def test_local_keys_never_show(tmp_path: Path) -> None:
    properties = keystore(tmp_path, "m")
    secret = (tmp_path / "keystore.key").read_bytes()
    kms = load_kms(properties)
    wrapped = kms.wrap_key(CANARY, "m")
    texts = [repr(kms), str(kms), repr(kms.__reduce__()), repr(local.status(properties))]
    for bad in (wrapped[:-1], b"", CANARY * 4):
        with pytest.raises(AgsError) as caught:
            kms.unwrap_key(bad, "m")
        texts += [*traceback.format_exception(caught.value), repr(vars(caught.value))]
    everything = "\n".join(texts).encode() + (tmp_path / "keystore").read_bytes()
    for hidden in (CANARY, secret):
        for form in (hidden, hidden.hex().encode(), base64.b64encode(hidden).rstrip(b"=")):
            assert form not in everything


# ---------------------------------------------------------------- AWS


@pytest.fixture(scope="module")
def moto_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with started("aws", tmp_path_factory.mktemp("aws")) as service:
        yield service


@pytest.fixture
def moto(moto_service: Aws) -> Aws:
    moto_service.deny(False)
    return moto_service


def test_aws_on_the_wire(moto: Aws) -> None:
    """What Java's client sends, and no encryption context, which Java's could not give back."""
    key_id = moto.new_key()
    kms = load_kms(moto.properties)
    assert kms.supports_key_generation
    assert kms.supports_rewrap
    moto.calls()
    wrapped = kms.wrap_key(CANARY, key_id)
    assert kms.unwrap_key(wrapped, key_id) == CANARY
    assert moto.admin.decrypt(CiphertextBlob=wrapped)["Plaintext"] == CANARY  # the blob as it is
    again = kms.rewrap_key(wrapped, key_id)
    assert kms.unwrap_key(again, key_id) == CANARY
    for size in (16, 24, 32):
        key, sealed = kms.generate_key(key_id, size)
        assert len(key) == size
        assert kms.unwrap_key(sealed, key_id) == key
    assert kms.key_version(wrapped) is None
    decrypt = ("Decrypt", ["CiphertextBlob", "EncryptionAlgorithm", "KeyId"])
    reencrypt = [
        "CiphertextBlob",
        "DestinationEncryptionAlgorithm",
        "DestinationKeyId",
        "SourceEncryptionAlgorithm",
        "SourceKeyId",
    ]
    assert moto.calls() == [
        ("Encrypt", ["EncryptionAlgorithm", "KeyId", "Plaintext"]),
        decrypt,
        ("Decrypt", ["CiphertextBlob"]),
        ("ReEncrypt", reencrypt),
        decrypt,
        ("GenerateDataKey", ["KeyId", "KeySpec"]),
        decrypt,
        ("GenerateDataKey", ["KeyId", "NumberOfBytes"]),
        decrypt,
        ("GenerateDataKey", ["KeyId", "KeySpec"]),
        decrypt,
    ]
    kms.close()
    assert kms.unwrap_key(wrapped, key_id) == CANARY
    assert pickle.loads(pickle.dumps(kms)).unwrap_key(wrapped, key_id) == CANARY


def test_aws_aliases_and_arns(moto: Aws) -> None:
    made = moto.admin.create_key()["KeyMetadata"]
    alias = f"alias/test-{os.urandom(4).hex()}"
    moto.admin.create_alias(AliasName=alias, TargetKeyId=made["KeyId"])
    kms = load_kms(moto.properties)
    for name in (made["KeyId"], made["Arn"], alias):
        wrapped = kms.wrap_key(CANARY, name)
        assert all(kms.unwrap_key(wrapped, other) == CANARY for other in (made["KeyId"], made["Arn"], alias))


def test_aws_alias_that_was_moved(moto: Aws) -> None:
    """Everything that the key before wrapped is there, and so is the way back; nothing was changed."""
    old, new = (moto.admin.create_key()["KeyMetadata"]["Arn"] for _ in range(2))
    alias = f"alias/test-{os.urandom(4).hex()}"
    moto.admin.create_alias(AliasName=alias, TargetKeyId=old)
    whole = old.partition(":key/")[0] + ":" + alias
    kms = load_kms(moto.properties)
    wrapped = kms.wrap_key(CANARY, alias)
    moto.admin.update_alias(AliasName=alias, TargetKeyId=new)
    for name in (alias, whole):
        for action in (kms.unwrap_key, kms.rewrap_key):
            with pytest.raises(KeyAccessError, match=rf"{alias}.*{old}.*alias back.*rotate --what mek") as caught:
                action(wrapped, name)
            assert new not in str(caught.value)
    narrow = load_kms({**moto.properties, "encryption.allowed-key-ids": "alias/*"})
    moto.calls()
    with pytest.raises(KeyAccessError, match=r"the key that it pointed to before.*alias back"):
        narrow.unwrap_key(wrapped, alias)
    assert [names for _, names in moto.calls()] == [["CiphertextBlob", "EncryptionAlgorithm", "KeyId"]]
    for name in (old, new):  # by an id that is no alias, another key's wrap is a change
        if name == old:
            assert kms.unwrap_key(wrapped, name) == CANARY
        else:
            with pytest.raises(IntegrityError, match="by another key"):
                kms.unwrap_key(wrapped, name)
    moto.admin.disable_key(KeyId=old.rpartition("/")[2])
    with pytest.raises(KeyAccessError, match="the key that it pointed to before"):
        kms.unwrap_key(wrapped, alias)
    moto.admin.enable_key(KeyId=old.rpartition("/")[2])
    moto.admin.update_alias(AliasName=alias, TargetKeyId=old)
    assert kms.unwrap_key(wrapped, alias) == CANARY


def test_a_dataset_under_an_alias_that_was_moved(moto: Aws, tmp_path: Path) -> None:
    """The way that the error says leads back: the alias, then a move to the key's id."""
    old, new = (moto.new_key() for _ in range(2))
    alias = f"alias/test-{os.urandom(4).hex()}"
    moto.admin.create_alias(AliasName=alias, TargetKeyId=old)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a").write_bytes(b"a")
    dataset, here = str(tmp_path / "ds"), jobs.LocalEngine(processes=0)
    common: dict[str, Any] = {"kms": moto.properties, "engine": here}
    jobs.encrypt_files(str(tmp_path / "src"), dataset, wrapping_key_id=alias, **common).raise_for_failures()
    clear_cache()
    moto.admin.update_alias(AliasName=alias, TargetKeyId=new)
    with pytest.raises(KeyAccessError, match=f"{old}.*alias back"):
        jobs.verify_files(dataset, **common)
    moto.admin.update_alias(AliasName=alias, TargetKeyId=old)
    jobs.rotate(dataset, what="mek", wrapping_key_id=old, **common)
    clear_cache()
    moto.admin.update_alias(AliasName=alias, TargetKeyId=new)
    assert not jobs.verify_files(dataset, **common).failed


def test_aws_profile(moto: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(
        "[profile sales]\naws_access_key_id = AKIASALES\naws_secret_access_key = s\nregion = us-east-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    key_id = moto.new_key()
    with load_kms({**moto.properties, "client.profile-name": "sales"}) as kms:
        assert kms.unwrap_key(kms.wrap_key(CANARY, key_id), key_id) == CANARY
        assert "Credential=AKIASALES/" in moto.last()["Authorization"]
    with (
        load_kms({**moto.properties, "client.profile-name": "none"}) as kms,
        pytest.raises(KeyAccessError, match=r"client\.profile-name"),
    ):
        kms.wrap_key(CANARY, key_id)


def test_aws_role(moto: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """By credentials that are not the caller's, from STS; they travel as properties only."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", moto.url)
    key_id = moto.new_key()
    role = {
        "client.assume-role.arn": "arn:aws:iam::123456789012:role/reader",
        "client.assume-role.external-id": "external",
        "client.assume-role.region": "us-east-1",
        "client.assume-role.session-name": "session",
        "client.assume-role.tags.team": "sales",
        "client.assume-role.timeout-sec": "900",
    }
    with load_kms({**moto.properties, **role}) as kms:
        wrapped = pickle.loads(pickle.dumps(kms)).wrap_key(CANARY, key_id)
        assert kms.unwrap_key(wrapped, key_id) == CANARY
        assert "Credential=ASIA" in moto.last()["Authorization"]
    without_region = {name: text for name, text in moto.properties.items() if name != "client.region"}
    with load_kms({**without_region, **role}) as kms:
        assert kms.unwrap_key(wrapped, key_id) == CANARY
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{closed.getsockname()[1]}")
    with (
        load_kms({**moto.properties, **role}) as kms,
        pytest.raises(KeyAccessError, match=r"role/reader.*no answer of AWS STS.*sts:AssumeRole"),
    ):
        kms.unwrap_key(wrapped, key_id)
    for name, text in (("timeout-sec", "899"), ("timeout-sec", "an hour"), ("arn", None)):
        changed: dict[str, Any] = {**role, f"client.assume-role.{name}": text}
        with pytest.raises(ValueError, match=r"client\.assume-role\."):
            load_kms({**moto.properties, **{name: text for name, text in changed.items() if text is not None}})


def test_aws_grant_tokens(moto: Aws) -> None:
    key_id = moto.new_key()
    with load_kms({**moto.properties, "kms.grant-tokens": "one, two"}) as kms:
        for action in (
            lambda: kms.unwrap_key(kms.wrap_key(CANARY, key_id), key_id),
            lambda: kms.generate_key(key_id, 24),
            lambda: kms.rewrap_key(kms.wrap_key(CANARY, key_id), key_id),
        ):
            action()
            assert moto.last()["GrantTokens"] == ["one", "two"]


def test_aws_multi_region_keys(moto: Aws) -> None:
    """What was wrapped in one region opens in another, by the replica, whatever region the key's name has."""
    made = moto.admin.create_key(MultiRegion=True)["KeyMetadata"]
    moto.admin.replicate_key(KeyId=made["KeyId"], ReplicaRegion="eu-west-1")
    there_properties = {**moto.properties, "client.region": "eu-west-1"}
    with load_kms(moto.properties) as here, load_kms(there_properties) as there:
        for name in (made["Arn"], made["KeyId"]):
            wrapped = here.wrap_key(CANARY, name)
            assert there.unwrap_key(wrapped, name) == CANARY
            if name == made["Arn"]:
                assert moto.last()["KeyId"] == name.replace("us-east-1", "eu-west-1")
            assert here.unwrap_key(there.rewrap_key(wrapped, name), name) == CANARY
        with pytest.raises(KeyAccessError, match=r"encryption\.allowed-key-ids"):
            load_kms({**there_properties, "encryption.allowed-key-ids": "arn:aws:kms:eu-west-1:*"}).unwrap_key(
                wrapped, made["Arn"]
            )
        single = moto.admin.create_key()["KeyMetadata"]["Arn"]
        with pytest.raises(KeyAccessError):
            there.unwrap_key(here.wrap_key(CANARY, single), single)


def test_aws_encryption_context(moto: Aws) -> None:
    key_id = moto.new_key()
    context = {"kms.encryption-context.dataset": "sales", "kms.encryption-context.team": "a"}
    with load_kms({**moto.properties, **context}) as kms, load_kms(moto.properties) as plain:
        wrapped = kms.wrap_key(CANARY, key_id)
        assert moto.last()["EncryptionContext"] == {"dataset": "sales", "team": "a"}
        for blob in (wrapped, kms.rewrap_key(wrapped, key_id), kms.generate_key(key_id, 16)[1]):
            assert kms.unwrap_key(blob, key_id)
            with pytest.raises(IntegrityError, match="another encryption context"):
                plain.unwrap_key(blob, key_id)
        with pytest.raises(IntegrityError, match="another encryption context"):
            kms.unwrap_key(plain.wrap_key(CANARY, key_id), key_id)
    for name, text in (("a", ""), ("aws:a", "b")):
        with pytest.raises(ValueError, match=r"kms\.encryption-context"):
            load_kms({**moto.properties, f"kms.encryption-context.{name}": text})
    with pytest.raises(ValueError, match="symmetric"):
        load_kms({**moto.properties, **context, "kms.encryption-algorithm-spec": "RSAES_OAEP_SHA_256"})
    with (
        load_kms({**moto.properties, "kms.encryption-context.d": "{dataset-id}"}) as kms,
        pytest.raises(KeyAccessError, match="dataset-id"),
    ):
        kms.wrap_key(CANARY, key_id)


@pytest.mark.parametrize("double_wrap", [pytest.param(True, marks=pytest.mark.more), False])
def test_a_dataset_with_its_id_in_the_context(moto: Aws, tmp_path: Path, double_wrap: bool) -> None:
    """Each request names it; a dataset gets there and back by a move to another KMS; another's keys do not open."""
    key_id = moto.new_key()
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a").write_bytes(b"a")
    bound = {**moto.properties, "kms.encryption-context.dataset": "{dataset-id}"}
    here: Any = jobs.LocalEngine(processes=0)
    src, ids = str(tmp_path / "src"), set()
    for name in ("one", "two"):
        dataset = str(tmp_path / name)
        common: dict[str, Any] = {"kms": bound, "engine": here}
        options: dict[str, Any] = {"wrapping_key_id": key_id, "double_wrap": double_wrap}
        clear_cache()
        jobs.encrypt_files(src, dataset, **options, **common).raise_for_failures()
        asked = moto.last()
        own = jobs.key_status(dataset, kms=bound)["dataset_id"]
        ids.add(own)
        assert asked["EncryptionContext"] == {"dataset": own}
        clear_cache()
        assert not jobs.verify_files(dataset, **common).failed
        assert moto.last()["EncryptionContext"] == {"dataset": own}
        turns: Any = ("kek", "mek")[: 1 + double_wrap]
        for what in turns:
            jobs.rotate(dataset, what=what, **common)
        assert not jobs.verify_files(dataset, kms=bound, engine=jobs.LocalEngine(processes=1)).failed
        clear_cache()
        assert jobs.open_file(dataset, "a", kms=bound).read() == b"a"
        clear_cache()
        with pytest.raises(IntegrityError, match="encryption context"):
            jobs.verify_files(dataset, kms=moto.properties, engine=here)
        assert jobs.restore_keys(dataset, kms=bound).counts["skipped"]
        assert jobs.restore_keys(dataset, kms=bound, version=1, dry_run=True).counts["skipped"]
        if double_wrap:
            jobs.rotate(dataset, what="mek", new_kms=moto.properties, **common)
            clear_cache()
            assert not jobs.verify_files(dataset, kms=moto.properties, engine=here).failed
            jobs.rotate(dataset, what="mek", kms=moto.properties, new_kms=bound, engine=here)
            clear_cache()
            assert not jobs.verify_files(dataset, **common).failed
    assert len(ids) == 2


def test_key_material_with_the_dataset_in_the_context(moto: Aws, tmp_path: Path) -> None:
    """Parquet's key tools send the same context. AWS names no version of what Encrypt makes, so audits cannot."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    key_id, dataset = moto.new_key(), str(tmp_path / "ds")
    (tmp_path / "src").mkdir()
    pq.write_table(pa.table({"id": [1]}), tmp_path / "src" / "a.parquet")
    bound = {**moto.properties, "kms.encryption-context.dataset": "{dataset-id}"}
    common: dict[str, Any] = {"kms": bound, "engine": jobs.LocalEngine(processes=0)}
    options: dict[str, Any] = {"wrapping_key_id": key_id, "format": "parquet", "key_material": "keytools"}
    jobs.encrypt_files(str(tmp_path / "src"), dataset, **options, **common).raise_for_failures()
    clear_cache()
    opened = Dataset.open(dataset, kms=bound)
    (file,) = opened.files()
    theirs = {**moto.properties, "kms.encryption-context.dataset": opened.id}
    with apq.open_plain(file.url, apq.keytools.CryptoFactory(theirs).retriever()) as plain:
        assert pq.read_table(plain).num_rows == 1
    with pytest.raises(IntegrityError, match="encryption context"):
        apq.open_plain(file.url, apq.keytools.CryptoFactory(moto.properties).retriever())
    (master,) = jobs.audit(dataset, kms=bound)["masters"]
    assert master["key_material"] == [{"version": None, "data_keys": 1}]
    assert master["versions"][-1]["may_be_destroyed"] is None
    done = jobs.rotate(dataset, what="mek", **common)
    assert [row.src for row in done.rows if row.error_class == "KeyMaterial"] == [key_id]


def test_aws_rotation(moto: Aws) -> None:
    key_id = moto.new_key()
    kms = load_kms(moto.properties)
    wrapped = kms.wrap_key(CANARY, key_id)
    moto.admin.rotate_key_on_demand(KeyId=key_id)
    assert kms.unwrap_key(wrapped, key_id) == CANARY
    assert calls_of(lambda: kms.rewrap_key(wrapped, key_id)) == {("aws", "rewrap"): 1}


def test_aws_refusals(moto: Aws) -> None:
    key_id, other = moto.new_key(), moto.new_key()
    kms = load_kms(moto.properties)
    wrapped = kms.wrap_key(CANARY, key_id)
    for bit in (0, 8 * 40, 8 * len(wrapped) - 1):  # the id in moto's blob, the nonce, the ciphertext
        with pytest.raises(IntegrityError, match=key_id):
            kms.unwrap_key(flip(wrapped, bit), key_id)
    with pytest.raises(IntegrityError, match=other):
        kms.unwrap_key(wrapped, other)
    absent = "00000000-0000-0000-0000-000000000000"
    with pytest.raises(KeyAccessError, match=rf"aws .*{absent}.*NotFoundException.*client\.region"):
        kms.wrap_key(CANARY, absent)
    moto.admin.disable_key(KeyId=key_id)
    actions: list[Callable[[], Any]] = [
        lambda: kms.wrap_key(CANARY, key_id),
        lambda: kms.unwrap_key(wrapped, key_id),
        lambda: kms.rewrap_key(wrapped, key_id),
        lambda: kms.generate_key(key_id, 32),
    ]
    for action in actions:
        with pytest.raises(KeyAccessError, match=rf"{key_id}.*DisabledException.*enable it"):
            action()
    moto.admin.enable_key(KeyId=key_id)
    assert kms.unwrap_key(wrapped, key_id) == CANARY
    moto.admin.schedule_key_deletion(KeyId=key_id, PendingWindowInDays=7)
    with pytest.raises(KeyAccessError, match="cancel the deletion"):
        kms.unwrap_key(wrapped, key_id)
    moto.fail_with("AccessDeniedException", 1)
    moto.calls()
    with pytest.raises(KeyAccessError, match="kms:Encrypt"):
        kms.wrap_key(CANARY, other)
    assert len(moto.calls()) == 1  # no use in asking again
    moto.fail_with("ValidationException", 1)
    with pytest.raises(KeyAccessError, match="ValidationException") as caught:
        kms.wrap_key(CANARY, other)
    assert "told to" not in str(caught.value)  # a message that may quote what was sent


def test_aws_throttling(moto: Aws) -> None:
    key_id = moto.new_key()
    kms = load_kms({**moto.properties, "kms.max-attempts": "4"})
    kms.wrap_key(CANARY, key_id)
    moto.calls()
    moto.fail_with("ThrottlingException", 3)
    assert calls_of(lambda: kms.wrap_key(CANARY, key_id)) == {("aws", "wrap"): 1}  # one call, whatever it took
    assert len(moto.calls()) == 4
    moto.fail_with("KMSInternalException", 1000)
    begun = time.monotonic()
    with pytest.raises(KeyAccessError, match="stayed busy"):
        kms.wrap_key(CANARY, key_id)
    assert len(moto.calls()) == 4
    assert time.monotonic() - begun < 5


def test_aws_out_of_reach(moto: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    begun = time.monotonic()
    with pytest.raises(KeyAccessError, match=f"aws at {url} was not reached"):
        load_kms({**moto.properties, "kms.endpoint": url}).wrap_key(CANARY, "m")
    assert time.monotonic() - begun < 5
    with socket.socket() as silent:  # takes connections, answers nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(KeyAccessError, match="no answer in time"):
            load_kms({**moto.properties, "kms.endpoint": url, "kms.read-timeout-ms": "300"}).wrap_key(CANARY, "m")
        assert time.monotonic() - begun < 5
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(KeyAccessError, match="credentials"):
        load_kms(moto.properties).wrap_key(CANARY, "m")
    without_region = {name: value for name, value in moto.properties.items() if name != "client.region"}
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    with pytest.raises(KeyAccessError, match=r"client\.region"):
        load_kms(without_region).wrap_key(CANARY, "m")


def test_aws_keys_are_not_logged(moto: Aws) -> None:
    """botocore writes requests and answers to its log, in full, for whoever turns DEBUG on."""
    key_id = moto.new_key()
    kms = load_kms(moto.properties)
    kms.wrap_key(b"before", key_id)
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        wrapped = kms.wrap_key(CANARY, key_id)
        assert kms.unwrap_key(wrapped, key_id) == CANARY
        load_kms(moto.properties).unwrap_key(wrapped, key_id)  # also where the client is made meanwhile
        generated, _ = kms.generate_key(key_id, 32)
        moto.admin.encrypt(KeyId=key_id, Plaintext=b"another's call")
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    logged = text.getvalue()
    assert base64.b64encode(b"another's call").decode() in logged  # otherwise this looks in the wrong place
    assert not any(form in logged for form in forms_of(CANARY))
    assert base64.b64encode(generated).decode() not in logged
    assert generated.hex() not in logged


def test_aws_in_a_fork(moto: Aws) -> None:
    """A child makes connections of its own."""
    key_id = moto.new_key()
    run_python(
        program(wrapping.aws_after_fork, moto.url, key_id),
    )


def test_calls_of_jobs_without_a_cache(tmp_path: Path) -> None:
    """As docs/keys.md has them."""
    here: Any = jobs.LocalEngine(processes=0, files_at_once=1)  # two at once share a call
    for files in (1, 5):
        folder = tmp_path / str(files)
        (folder / "src").mkdir(parents=True)
        for number in range(files):
            (folder / "src" / str(number)).write_bytes(b"x")
        dataset = str(folder / "ds")
        kms = {**keystore(folder, "m"), "kms.cache-lifetime-seconds": "0"}
        common: dict[str, Any] = {"kms": kms, "engine": here}
        src = str(folder / "src")
        told = [
            sum(calls_of(lambda: jobs.encrypt_files(src, dataset, wrapping_key_id="m", **common)).values()),  # noqa: B023
            sum(calls_of(lambda: jobs.decrypt_files(dataset, str(folder / "out"), **common)).values()),  # noqa: B023
            sum(calls_of(lambda: jobs.verify_files(dataset, **common)).values()),  # noqa: B023
            sum(calls_of(lambda: jobs.open_file(dataset, "0", kms=kms).close()).values()),  # noqa: B023
        ]
        assert told == [15 + files, 3 + files, 5 + files, 4]
