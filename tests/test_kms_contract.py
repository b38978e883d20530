"""What every KMS client promises, proved on each of them through the provider's own library, and what one alone does.

local: a file. aws: moto, made strict. vault: Vault itself. pkcs11: SoftHSM. gcp and azure: fakes under the real
clients, since there is nothing else to install (servers/fake_gcp.py, servers/fake_azure.py).
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import io
import itertools
import json
import logging
import os
import pickle
import re
import socket
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import servers
from kms_clients import CANARY, Clock, calls_of, forms_of
from kms_services import started
from programs import wrapping
from servers.bad_http import dripping, echoing
from servers.fake_azure import certificate
from support import flip, program, run_python

from ags_fast.errors import AgsError, FormatError, IntegrityError, KeyAccessError
from ags_fast.keys import kms_calls, load_kms
from ags_fast.keys.kms import PROVIDERS, pace
from ags_fast.keys.kms import service as service_module
from ags_fast.keys.kms.imports import find_class
from ags_fast.keys.kms.pace import Pace
from ags_fast.keys.kms.service import with_retries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from kms_services import Service

    from ags_fast.keys import KmsClient

NETWORKED = ("aws", "gcp", "azure", "vault")
builds = pytest.mark.timeout(600)  # the first test of Vault builds it, once for each machine


def service_of(name: str) -> Any:
    @pytest.fixture(scope="module", name=name)
    def fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
        with started(name, tmp_path_factory.mktemp(name)) as service:
            yield service

    return fixture


local_, aws_, gcp_, azure_, vault_, pkcs11_ = map(service_of, PROVIDERS)


def params(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=builds if name == "vault" else ()) for name in names]


def only(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("service", params(names), indirect=True)


@pytest.fixture(params=params(PROVIDERS))
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    found: Service = request.getfixturevalue(request.param)
    yield found
    found.fail(0)
    found.deny(False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which calls wait for their turns, and before retries."""
    clock = Clock()
    monkeypatch.setattr(service_module, "with_retries", functools.partial(with_retries, sleep=clock.sleep))
    monkeypatch.setattr(pace, "Pace", functools.partial(Pace, clock=clock.monotonic, sleep=clock.sleep))
    return clock


@pytest.fixture
def kms(service: Service) -> Iterator[KmsClient]:
    with load_kms(service.properties) as client:
        yield client


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    """One key of each service that the tests only use."""
    return {}


@pytest.fixture
def key_id(service: Service, keys: dict[str, str]) -> str:
    if service.name not in keys:
        keys[service.name] = service.new_key()
    return keys[service.name]


# ---------------------------------------------------------------- all of them


def test_what_was_wrapped_comes_back(service: Service, kms: KmsClient, key_id: str) -> None:
    assert kms.provider == service.name
    sizes = {1, 16, 24, 32, service.longest}
    for size in sizes:
        key = os.urandom(size)
        wrapped = kms.wrap_key(key, key_id)
        assert key not in wrapped or size == 1
        assert kms.wrap_key(key, key_id) != wrapped
        assert kms.unwrap_key(wrapped, key_id) == key
        if service.overhead:
            assert len(wrapped) == size + service.overhead
        if service.name != "local":
            assert service.open(wrapped, key_id) == key
    kms.close()
    assert kms.unwrap_key(wrapped, key_id) == key
    assert pickle.loads(pickle.dumps(kms)).unwrap_key(wrapped, key_id) == key


def test_each_call_is_counted_once(service: Service, kms: KmsClient, key_id: str) -> None:
    name = service.name
    wrapped = kms.wrap_key(CANARY, key_id)
    assert calls_of(lambda: kms.wrap_key(CANARY, key_id)) == {(name, "wrap"): 1}
    assert calls_of(lambda: kms.unwrap_key(wrapped, key_id)) == {(name, "unwrap"): 1}
    rewrap = {(name, "rewrap"): 1} if service.rewraps else {(name, "unwrap"): 1, (name, "wrap"): 1}
    assert kms.supports_rewrap is service.rewraps
    assert calls_of(lambda: kms.rewrap_key(wrapped, key_id)) == rewrap
    if service.requests() is not None:
        kms.wrap_key(CANARY, key_id)
        assert service.requests() == 1
        kms.unwrap_key(wrapped, key_id)
        assert service.requests() == 1


def test_generation(service: Service, kms: KmsClient, key_id: str) -> None:
    assert kms.supports_key_generation is service.generates
    if not service.generates:
        with pytest.raises(NotImplementedError, match="wrap it"):
            kms.generate_key(key_id, 16)
        return
    seen = set()
    for length in (16, 24, 32, 32):
        before = kms_calls()
        key, wrapped = kms.generate_key(key_id, length)
        assert kms_calls() - before == {(service.name, "generate"): 1}
        assert len(key) == length
        assert kms.unwrap_key(wrapped, key_id) == key
        seen.add(key)
    assert len(seen) == 4


def test_versions(service: Service, kms: KmsClient) -> None:
    """What an older version wrapped opens, until that one is disabled; what was rewrapped needs it no more."""
    key_id = service.new_key()
    first = kms.wrap_key(CANARY, key_id)
    service.rotate(key_id)
    second = kms.wrap_key(CANARY, key_id)
    for wrapped in (first, second):
        assert kms.unwrap_key(wrapped, key_id) == CANARY
        with load_kms(service.properties) as fresh:
            assert fresh.unwrap_key(wrapped, key_id) == CANARY
    moved = kms.rewrap_key(first, key_id)
    told = [kms.key_version(wrapped) for wrapped in (first, second, moved)]
    if service.tells_version or service.names_version:
        assert told[0] == service.version(key_id) != told[1] == told[2]
    else:
        assert told[:2] == [None] * 2
    if not service.tells_version:
        assert [kms.key_version(bytes(wrapped)) for wrapped in (first, second, moved)] == [None] * 3

    def named(action: Callable[[], Any], *, lost: bool = False) -> None:
        with pytest.raises(KeyAccessError) as caught:
            action()
        said = str(caught.value)
        assert repr(key_id) in said, said
        assert service.version(key_id) in said.replace(key_id, ""), said
        assert "tag" not in said.lower()
        assert ("lost" in said or "destroyed" in said) is lost

    if service.disables:
        service.enable(key_id, False)
        named(lambda: kms.unwrap_key(first, key_id))
        named(lambda: kms.rewrap_key(first, key_id))
        with load_kms(service.properties) as fresh:
            named(lambda: fresh.unwrap_key(first, key_id))
        assert kms.unwrap_key(second, key_id) == kms.unwrap_key(moved, key_id) == CANARY
        service.enable(key_id, True)
        assert kms.unwrap_key(first, key_id) == CANARY
    if service.destroys:
        service.destroy(key_id)
        named(lambda: kms.unwrap_key(first, key_id), lost=True)
        assert kms.unwrap_key(second, key_id) == kms.unwrap_key(moved, key_id) == CANARY


def test_the_version_that_wraps(service: Service, kms: KmsClient) -> None:
    """In the words of key_version, whoever has rotated meanwhile."""
    key_id = service.new_key()
    seen = []
    for number in (1, 2, 3):
        before = kms_calls()
        told = kms.current_version(key_id)
        assert kms_calls() == before
        wrapped = kms.wrap_key(CANARY, key_id)
        if service.name == "aws":  # whose Encrypt does not name it
            wrapped = kms.rewrap_key(wrapped, key_id)
            assert kms.key_version(wrapped) == kms.key_version(kms.generate_key(key_id, 16)[1])
        else:
            assert told == service.version(key_id, number)
        assert told == kms.key_version(wrapped)
        assert told not in seen
        seen.append(told)
        service.rotate(key_id)
    with pytest.raises(KeyAccessError, match=f"{service.unknown}.*no (such )?key|no key.*{service.unknown}"):
        kms.current_version(service.unknown)
    with pytest.raises(ValueError, match="key id"):
        kms.current_version("")
    with (
        load_kms({**service.properties, "encryption.allowed-key-ids": "another"}) as narrow,
        pytest.raises(KeyAccessError, match=r"encryption\.allowed-key-ids"),
    ):
        narrow.current_version(key_id)


def test_the_versions_that_are_listed(service: Service, kms: KmsClient) -> None:
    """With dates, and states where there are some; nothing for a caller who may not see them."""
    key_id, begun = service.new_key(), int(time.time()) - 86_400
    service.rotate(key_id)
    service.rotate(key_id)
    before = kms_calls()
    listed = kms.versions(key_id)
    assert kms_calls() == before
    if service.name not in ("aws", "gcp", "azure"):
        assert listed == []
        return
    assert all(one.made_ms and begun < one.made_ms / 1000 < time.time() + 1 for one in listed)
    if service.name == "aws":  # rotations, of which the newest made what wraps now
        assert len(listed) == 2
        assert listed[-1].version == kms.current_version(key_id) != listed[0].version
    else:
        assert {one.version for one in listed} == {service.version(key_id, number) for number in (1, 2, 3)}
        service.enable(key_id, False)
        states = {one.version: one.state for one in kms.versions(key_id)}
        assert states.pop(service.version(key_id)) == "DISABLED"
        assert set(states.values()) == {"ENABLED"}
    if service.name == "azure":
        service.fake.denied = {"list"}  # type: ignore[attr-defined]
    else:
        service.deny(True)
    assert kms.versions(key_id) == []
    if service.name != "azure":
        service.deny(True)
        assert kms.current_version(key_id) is None


@pytest.mark.more
@only("aws", "gcp", "azure")
@pytest.mark.parametrize("double_wrap", [True, False])
def test_status_and_audit_of_versions(service: Service, tmp_path: Path, double_wrap: bool) -> None:
    """What the KMS named when it wrapped is kept with the KEK, and kept right by a rotation."""
    pytest.importorskip("pyarrow")
    from datasets import HERE, write_tree

    from ags_fast import jobs

    key_id, kms = service.new_key(), service.properties
    src, dataset = write_tree(tmp_path / "src", {"a": b"a"}), tmp_path / "dataset"
    options: dict[str, Any] = {"wrapping_key_id": key_id, "double_wrap": double_wrap, "engine": HERE}
    jobs.encrypt_files(src, dataset, kms=kms, **options).raise_for_failures()
    with load_kms(kms) as client:
        first = client.current_version(key_id)
        for after in (False, True):
            if after:
                service.rotate(key_id)
                found = jobs.audit(dataset, kms=kms)
                (master,) = found["masters"]
                versions = {row["version"]: row for row in master["versions"]}
                assert versions[first]["may_be_destroyed"] is False
                assert "wrap-stale-keks" in [step["name"] for step in found["steps"]]
                jobs.rotate(dataset, kms=kms, what="mek", engine=HERE).raise_for_failures()
            current = client.current_version(key_id)
            status = jobs.key_status(dataset, kms=kms)
            kinds = {row["double_wrap"]: row["master_version"] for row in status["keys"]}
            assert kinds.pop(True) == current
            assert set(kinds.values()) <= {None}
            assert status["masters"][0]["current_version"] == current != (first if after else None)
        (master,) = jobs.audit(dataset, kms=kms)["masters"]
        assert current in [row["version"] for row in master["listed"]]
        before = next((row["may_be_destroyed"] for row in master["versions"] if row["version"] == first), None)
        assert before is not False
        assert double_wrap or master["others"] is None  # who wrapped a data key is not known


@only("local", "gcp", "azure", "vault", "pkcs11")
def test_five_versions(service: Service, kms: KmsClient) -> None:
    """Some are disabled, one is destroyed: what they wrapped is refused by name and not taken for damaged."""
    key_id = service.new_key()
    wrapped = {1: kms.wrap_key(CANARY, key_id)}
    for number in range(2, 6):
        service.rotate(key_id)
        wrapped[number] = kms.wrap_key(CANARY, key_id)
    off = {2} if service.name == "vault" else {2, 4}
    refused = off | {1}
    if service.destroys:
        service.destroy(key_id)
    else:
        off.add(1)
    for number in sorted(off):
        service.enable(key_id, False, number)
    with load_kms(service.properties) as fresh:
        for client in (kms, fresh):
            for number, blob in wrapped.items():
                if number not in refused:
                    assert client.unwrap_key(blob, key_id) == CANARY
                    continue
                for action in (client.unwrap_key, client.rewrap_key):
                    with pytest.raises(KeyAccessError) as caught:
                        action(blob, key_id)
                    said = str(caught.value)
                    assert service.name in said.lower(), said
                    assert repr(key_id) in said, said
                    assert service.version(key_id, number) in said.replace(key_id, ""), said
                    assert re.search("enable|lower|set its" if number in off else "lost|destroyed", said), said
                    assert not re.search(r"\btag\b|integrity", said, re.IGNORECASE)
    for number in sorted(off):
        service.enable(key_id, True, number)
    for number in sorted(off | {3, 5}):
        assert kms.unwrap_key(wrapped[number], key_id) == CANARY
    if service.name == "vault":
        return  # which cannot do without the latest
    service.enable(key_id, False, 5)
    if service.tells_version:
        assert (
            kms.current_version(key_id) == kms.key_version(kms.wrap_key(CANARY, key_id)) == service.version(key_id, 4)
        )
        for number in (2, 3, 4):
            service.enable(key_id, False, number)
        for refusing in (lambda: kms.wrap_key(CANARY, key_id), lambda: kms.current_version(key_id)):
            with pytest.raises(KeyAccessError, match=f"{key_id}.*(enable one|make a new one)"):
                refusing()
    else:
        with pytest.raises(KeyAccessError, match=f"{key_id}', version {service.version(key_id, 5)} .*enable"):
            kms.wrap_key(CANARY, key_id)
    with pytest.raises(KeyAccessError, match=service.version(key_id, 5)):
        kms.unwrap_key(wrapped[5], key_id)


def test_changed_bytes(service: Service, kms: KmsClient, key_id: str) -> None:
    wrapped = kms.wrap_key(CANARY, key_id)
    size = len(wrapped)
    bad = [flip(wrapped, 8 * at) for at in {size // 2, size - 20, size - 1}]
    bad += [wrapped[:-1], b"", CANARY, bytes(len(wrapped)), b"\xff" * 300]
    for changed in bad:
        if changed == b"" and service.name == "aws":
            continue  # boto3 sends none
        with pytest.raises((IntegrityError, FormatError)) as caught:
            kms.unwrap_key(changed, key_id)
        assert "tag" not in str(caught.value)
    assert kms.unwrap_key(wrapped, key_id) == CANARY


def test_another_key(service: Service, kms: KmsClient, key_id: str) -> None:
    wrapped = kms.wrap_key(CANARY, key_id)
    other = service.new_key()
    with pytest.raises(IntegrityError, match=other):
        kms.unwrap_key(wrapped, other)


def test_a_key_that_is_not_there(service: Service, kms: KmsClient, key_id: str) -> None:
    wrapped = kms.wrap_key(CANARY, key_id)
    for _ in range(2):  # nor is it afterwards
        for action in (lambda: kms.wrap_key(CANARY, service.unknown), lambda: kms.unwrap_key(wrapped, service.unknown)):
            with pytest.raises(KeyAccessError, match=f"{service.unknown}.*no (such )?key|no key.*{service.unknown}"):
                action()


@only("gcp", "azure", "vault")
def test_ids_that_are_none_are_not_sent(service: Service, kms: KmsClient) -> None:
    service.requests()
    for key_id in service.impossible:
        for action in (lambda: kms.wrap_key(CANARY, key_id), lambda: kms.unwrap_key(b"vault:v1:AAAA", key_id)):  # noqa: B023
            with pytest.raises(KeyAccessError, match=f"is not a key id of the KMS {service.name}"):
                action()
    assert not service.requests()


@only(*NETWORKED)
def test_a_refusal_is_final(service: Service, kms: KmsClient, key_id: str) -> None:
    wrapped = kms.wrap_key(CANARY, key_id)
    actions: list[Callable[[], Any]] = [lambda: kms.wrap_key(CANARY, key_id), lambda: kms.unwrap_key(wrapped, key_id)]
    for action in actions:
        assert service.deny(True)
        service.requests()
        with pytest.raises(KeyAccessError, match="allow"):
            action()
        assert service.requests() == 1
        service.deny(False)
        action()


@only("aws", "gcp", "azure")  # Vault's own quotas are below
def test_a_busy_service(service: Service, key_id: str, clock: Clock) -> None:
    kms = load_kms({**service.properties, "kms.max-attempts": "3"})
    wrapped = kms.wrap_key(CANARY, key_id)
    for action in (lambda: kms.wrap_key(CANARY, key_id), lambda: kms.unwrap_key(wrapped, key_id)):
        service.requests()
        service.fail(2)
        assert sum(calls_of(action).values()) == 1  # whatever it took
        assert service.requests() == 3
        service.fail(1000)
        with pytest.raises(KeyAccessError, match=f"KMS {service.name} .*stayed busy"):
            action()
        assert service.requests() == 3
    kms.close()


@only(*NETWORKED)
def test_the_budget_of_a_call(service: Service, key_id: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that stays busy is asked less and less often, at moments that others do not share, and not for long."""
    monkeypatch.setattr(service_module, "time", clock)
    patient = {"kms.max-attempts": "1000", "kms.call-budget-ms": "20000"}
    with load_kms({**service.properties, **patient}) as kms:
        kms.wrap_key(CANARY, key_id)
        service.fail(1000)
        service.requests()
        with pytest.raises(KeyAccessError, match=f"KMS {service.name} .*stayed busy"):
            kms.wrap_key(CANARY, key_id)
    parts = [wait / min(0.1 * 2**number, 5) for number, wait in enumerate(clock.waits)]
    assert service.requests() == len(parts) + 1
    assert all(0.5 <= part <= 1 for part in parts)
    assert len(set(parts)) > 3
    assert 15 < sum(clock.waits) < 20


def test_calls_per_second(service: Service, key_id: str, clock: Clock) -> None:
    """Each call waits for its turn, whatever it does."""
    with load_kms({**service.properties, "kms.max-calls-per-second": "10"}) as kms:
        before = kms_calls()
        wrapped = kms.wrap_key(CANARY, key_id)
        assert kms.unwrap_key(wrapped, key_id) == CANARY
        kms.rewrap_key(wrapped, key_id)
        kms.current_version(key_id)
        with pytest.raises((IntegrityError, FormatError)):
            kms.unwrap_key(CANARY, key_id)
        calls = sum((kms_calls() - before).values()) + 1  # which is not counted
    assert clock.waits == [pytest.approx(0.1)] * (calls - 1)


@only(*NETWORKED)
def test_a_service_out_of_reach(service: Service, clock: Clock) -> None:
    name = service.name
    endpoint = {"azure": "azure.keyvault.url", "vault": "vault.address"}.get(name, "kms.endpoint")
    scheme = service.properties[endpoint].partition(":")[0]
    for listens in (False, True):  # it takes connections, and answers nothing
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            if listens:
                silent.listen()
            url = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}"
            begun = time.monotonic()
            quick = {"kms.read-timeout-ms": "100", "kms.connect-timeout-ms": "100"}
            with (
                load_kms({**service.properties, endpoint: url, **quick}) as kms,
                pytest.raises(KeyAccessError, match=f"KMS {name} at {url}.* was not reached for the key .*check the"),
            ):
                kms.wrap_key(CANARY, "m" if name != "gcp" else service.unknown)
            assert time.monotonic() - begun < 5


def test_keys_never_show(service: Service, kms: KmsClient, key_id: str) -> None:
    """Also in what the libraries log at DEBUG, requests and answers among it, some of them beside the message."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.format = lambda record: f"{record.getMessage()} {vars(record)}"  # type: ignore[method-assign]
    root = logging.getLogger()
    google = logging.getLogger("google")
    before, propagated = root.level, google.propagate
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    google.propagate = True
    shown = [repr(kms), repr(kms.__reduce__())]
    try:
        wrapped = kms.wrap_key(CANARY, key_id)
        assert kms.unwrap_key(wrapped, key_id) == CANARY
        kms.rewrap_key(wrapped, key_id)
        bad: list[Callable[[], Any]] = [
            lambda: kms.unwrap_key(flip(wrapped, 8 * len(wrapped) - 8), key_id),
            lambda: kms.unwrap_key(CANARY, key_id),
            lambda: kms.wrap_key(CANARY, service.unknown),
            lambda: kms.wrap_key(CANARY * 200, key_id + "x"),
        ]
        for action in bad:
            with pytest.raises(AgsError) as caught:
                action()
            shown += [*traceback.format_exception(caught.value), repr(vars(caught.value))]
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        google.propagate = propagated
    everything = "\n".join([*shown, text.getvalue()])
    assert not any(form in everything for form in forms_of(CANARY))
    secrets = [getattr(service, "token", None), getattr(getattr(service, "hsm", None), "pin", None)]
    assert not any(secret and secret in everything for secret in secrets)


def elsewhere(name: str, url: str, folder: Path, **more: str) -> dict[str, str]:
    """Properties of a provider whose service is at `url`; none is needed to make keys or names."""
    (folder / "token").write_text("a token of the tests")
    provider = "adls.token-credential-provider"
    own = {
        "aws": {"kms.endpoint": url, "client.region": "us-east-1"},
        "gcp": {"kms.endpoint": url},
        "azure": {"azure.keyvault.url": url, provider: "kms_clients:VaultCredential", f"{provider}.token": "t"},
        "vault": {"vault.address": url, "vault.token-file": str(folder / "token")},
    }
    return {"encryption.kms-type": name, **own[name], **more}


@pytest.fixture(params=["aws", "gcp", "azure", "vault"])
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of one; its package can be used without a service."""
    name: str = request.param
    package = {"aws": "boto3", "gcp": "google.cloud.kms", "azure": "azure.keyvault.keys", "vault": "hvac"}[name]
    pytest.importorskip(package)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    return name


RING_KEY = "projects/p/locations/l/keyRings/r/cryptoKeys/k"


@pytest.mark.more
@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n{", b"HTTP/1.1 200 OK\r\nA: "])
def test_a_service_that_drips(provider: str, head: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and the answer never: the call ends with its budget, and its connection with it."""
    with dripping(head, tmp_path if provider == "azure" else None) as (url, authority, let_go):
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", authority)
        limits = {"kms.call-budget-ms": "400", "kms.read-timeout-ms": "60000"}
        key_id = RING_KEY if provider == "gcp" else "k"
        with load_kms(elsewhere(provider, url, tmp_path, **limits)) as kms:
            for _ in range(2):
                begun = time.monotonic()
                with pytest.raises(KeyAccessError, match=r"within 400 ms.*kms\.call-budget-ms"):
                    kms.unwrap_key(b"vault:v1:AAAA", key_id)
                assert time.monotonic() - begun < 20
        assert let_go.wait(60)
        for thread in threading.enumerate():
            if thread.name == "ags-fast-kms":
                thread.join(20)
                assert not thread.is_alive()


def test_a_service_that_echoes(provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that it was sent gets into an error, what that is chained to, or a log; nor is it taken for a wrap."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.format = lambda record: f"{record.getMessage()} {vars(record)}"  # type: ignore[method-assign]
    root, google = logging.getLogger(), logging.getLogger("google")
    before, propagated = root.level, google.propagate
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    google.propagate = True
    shown: list[str] = []
    key_id = RING_KEY if provider == "gcp" else "k"
    wrapped = b"vault:v1:" + base64.b64encode(CANARY) if provider == "vault" else CANARY
    try:
        with echoing(tmp_path if provider == "azure" else None) as server:
            monkeypatch.setenv("REQUESTS_CA_BUNDLE", server.authority)
            properties = elsewhere(provider, server.url, tmp_path, **{"kms.max-attempts": "1"})

            def actions(kms: KmsClient) -> list[Callable[..., bytes]]:
                own = [] if provider == "azure" else [kms.wrap_key]  # Azure's is done here, with the public key
                return [*own, kms.unwrap_key, kms.rewrap_key]

            forms = itertools.product(("json", "taken", "raw", "head"), (200, 400, 403, 404, 500))
            with load_kms(properties) as kms:
                for (server.form, server.status), action in itertools.product(forms, actions(kms)):
                    with pytest.raises((AgsError, ValueError)) as caught:
                        key = action(CANARY if action == kms.wrap_key else wrapped, key_id)
                        assert (action, key) == (kms.rewrap_key, wrapped)  # as it was, and that opens
                        raise KeyAccessError("unchanged")
                    error: BaseException = caught.value
                    assert server.status != 200 or type(error) is KeyAccessError
                    assert error.__cause__ is None
                    assert error.__context__ is None
                    shown += [str(error), repr(error), repr(vars(error)), *traceback.format_exception(error)]
            assert server.requests >= 10
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        google.propagate = propagated
    everything = "\n".join([*shown, text.getvalue()])
    assert not any(form in everything for form in forms_of(CANARY))


def test_threads_share_a_client(service: Service, kms: KmsClient, key_id: str) -> None:
    kms.close()  # so that they open the connection, too
    start = threading.Barrier(8)
    rounds = 50 if service.name == "pkcs11" else 3  # without a server

    def use(number: int) -> bool:
        key = bytes([number]) * 16
        start.wait()
        return all(kms.unwrap_key(kms.wrap_key(key, key_id), key_id) == key for _ in range(rounds))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(8)))


@pytest.mark.more
def test_a_fork(service: Service, key_id: str) -> None:
    """A child makes connections of its own, whoever held the parent's; both go on."""
    run_python(
        program(wrapping.kms_of_threads_after_fork, service.properties, key_id),
    )


@pytest.mark.parametrize("name", [name for name in PROVIDERS if name != "local"])
def test_a_missing_package(name: str) -> None:
    needed = {
        "gcp": {"kms.endpoint": "https://cloudkms.googleapis.com"},
        "azure": {"azure.keyvault.url": "https://v.vault.azure.net"},
        "vault": {"vault.address": "https://vault"},
        "pkcs11": {"kms.pkcs11.library": "x.so", "kms.pkcs11.token-label": "t", "kms.pkcs11.pin-env": "PIN"},
    }
    extra = {"aws": "s3", "gcp": "gcs", "azure": "azure"}.get(name, "kms")
    packages = find_class(PROVIDERS[name]).packages
    assert packages
    for package in packages:
        real = importlib.util.find_spec
        with (
            mock.patch("importlib.util.find_spec", lambda asked: None if asked == package else real(asked)),  # noqa: B023
            pytest.raises(ImportError, match=rf"{package}.*pip install '.*\[{extra}\]'"),
        ):
            load_kms({"encryption.kms-type": name, **needed.get(name, {})})


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"encryption.kms-type": "gcp", "kms.endpoint": "http://cloudkms.googleapis.com"}, "https"),
        ({"encryption.kms-type": "gcp", "gcs.oauth2.token": "s3cret"}, r"gcs\.oauth2\.token is a secret"),
        ({"encryption.kms-type": "azure"}, r"azure\.keyvault\.url"),
        ({"encryption.kms-type": "azure", "azure.keyvault.url": "http://127.0.0.1:1"}, "https"),
        (
            {
                "encryption.kms-type": "azure",
                "azure.keyvault.url": "https://x",
                "azure.keyvault.key-wrap-algorithm": "RSA1_5",
            },
            "RSA-OAEP-256",
        ),
        ({"encryption.kms-type": "vault"}, r"vault\.address"),
        ({"encryption.kms-type": "vault", "vault.address": "http://vault:8200"}, "https"),
        ({"encryption.kms-type": "vault", "vault.address": "https://root:s3cret@vault"}, "URL"),
        ({"encryption.kms-type": "vault", "vault.address": "https://v", "vault.token": "s3cret"}, "is a secret"),
        (
            {
                "encryption.kms-type": "vault",
                "vault.address": "https://v",
                "vault.token-file": "a",
                "vault.token-env": "B",
            },
            "one of",
        ),
        *(
            ({"encryption.kms-type": "vault", "vault.address": "https://v", **more}, said)
            for more, said in (
                ({"vault.auth-method": "ldap"}, "approle"),
                ({"vault.auth-method": "approle"}, r"needs vault\.role-id"),
                ({"vault.auth-method": "approle", "vault.role-id": "r"}, r"one of vault\.secret-id-file"),
                ({"vault.auth-method": "kubernetes"}, r"needs vault\.auth-role"),
                ({"vault.auth-method": "jwt"}, r"needs vault\.jwt-file"),
                ({"vault.auth-method": "cert"}, r"needs vault\.client-cert-file"),
                ({"vault.client-cert-file": "c"}, "both"),
                ({"vault.role-id": "r"}, r"vault\.role-id is not for vault\.auth-method token"),
                ({"vault.auth-method": "jwt", "vault.jwt-file": "j", "vault.token-file": "t"}, "token-file is not for"),
                ({"vault.secret-id": "s3cret"}, "is a secret"),
                ({"vault.jwt": "s3cret"}, "is a secret"),
            )
        ),
        ({"encryption.kms-type": "pkcs11", "kms.pkcs11.library": "a"}, "token-label"),
        ({"encryption.kms-type": "pkcs11", "kms.pkcs11.library": "a", "kms.pkcs11.token-label": "b"}, "pin-file"),
        (
            {
                "encryption.kms-type": "pkcs11",
                "kms.pkcs11.library": "a",
                "kms.pkcs11.token-label": "b",
                "kms.pkcs11.pin-env": "C",
                "kms.pkcs11.pin": "s3cret",
            },
            "is a secret",
        ),
        ({"encryption.kms-type": "aws", "kms.call-budget-ms": "-1"}, r"kms\.call-budget-ms"),
    ],
)
def test_impossible_properties(properties: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        load_kms(properties)
    assert "s3cret" not in str(caught.value)


# ---------------------------------------------------------------- Google Cloud


def test_gcp_finds_what_changes_on_the_way(gcp: Any, clock: Clock) -> None:
    key_id = gcp.new_key()
    with load_kms({**gcp.properties, "kms.max-attempts": "3"}) as kms:
        wrapped = kms.wrap_key(CANARY, key_id)
        gcp.fake.corruptions = 2
        assert kms.unwrap_key(wrapped, key_id) == CANARY
        gcp.fake.corruptions = 2
        assert kms.unwrap_key(kms.wrap_key(CANARY, key_id), key_id) == CANARY
        assert not gcp.fake.corruptions
        gcp.fake.corruptions = 3
        with pytest.raises(KeyAccessError, match="CRC32C"):
            kms.unwrap_key(wrapped, key_id)


def test_gcp_forks_amid_requests(gcp: Any) -> None:
    """Four threads are in the client at each fork; no child hangs or is ended by gRPC, and the threads go on."""
    out = run_python(
        program(wrapping.fork_beside_threads, {**gcp.properties, "kms.read-timeout-ms": "20000"}, gcp.new_key()),
    )
    assert out == "[]\n"


def test_gcp_without_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("google.cloud.kms")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(KeyAccessError, match="GOOGLE_APPLICATION_CREDENTIALS"):
        load_kms({"encryption.kms-type": "gcp"}).wrap_key(b"x", "projects/p/locations/l/keyRings/r/cryptoKeys/k")


def test_gcp_impersonates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Google's library is given. Google itself was not asked."""
    auth = pytest.importorskip("google.auth")
    from google.auth.credentials import AnonymousCredentials

    monkeypatch.setattr(auth, "default", lambda scopes: (AnonymousCredentials(), "p"))
    account = {
        "gcs.impersonate.service-account": "keys@p.iam.gserviceaccount.com",
        "gcs.impersonate.delegates": "a@p.iam.gserviceaccount.com, b@p.iam.gserviceaccount.com",
        "gcs.impersonate.lifetime-seconds": "600",
        "gcs.impersonate.scopes": "cloud-platform",
    }
    with load_kms({"encryption.kms-type": "gcp", **account}) as kms:
        made: Any = kms
        used = made._connected().transport._session.credentials
        assert used.service_account_email == "keys@p.iam.gserviceaccount.com"
        assert (used._lifetime, len(used._delegates)) == (600, 2)
    with pytest.raises(ValueError, match="lifetime-seconds"):
        load_kms({"encryption.kms-type": "gcp", "gcs.impersonate.lifetime-seconds": "0"})
    with pytest.raises(ValueError, match="did you mean 'gcs"):
        load_kms({"encryption.kms-type": "gcp", "gcs.impersonate.service-acount": "a"})


# ---------------------------------------------------------------- Azure


def test_azure_tries_older_versions_last(azure: Any) -> None:
    """Newest first, one request a version; and no more requests than that once it is known which is the newest."""
    name = azure.new_key()
    with load_kms(azure.properties) as kms:
        blobs = []
        for number in range(4):
            if number:
                azure.rotate(name)
            blobs.append(kms.wrap_key(CANARY, name))
        versions = [
            v.version for v in sorted(azure.admin.list_properties_of_key_versions(name), key=lambda v: v.created_on)
        ]
        for blob in blobs:  # the clients of all versions are there
            assert kms.unwrap_key(blob, name) == CANARY
        azure.requests()
        azure.fake.calls = []
        assert kms.unwrap_key(blobs[1], name) == CANARY
        used = [path.split("/")[3] for method, path in azure.fake.calls if method == "POST"]
        assert used == [versions[3], versions[2], versions[1]]
        assert len(azure.fake.calls) == 4
        azure.fake.calls = []
        assert kms.unwrap_key(blobs[3], name) == CANARY
        assert len(azure.fake.calls) == 1


def test_azure_wraps_with_enabled_versions_only(azure: Any) -> None:
    """The package would: it wraps with the public key, and does not look whether that is allowed."""
    name = azure.new_key()
    with load_kms(azure.properties) as kms:
        kms.wrap_key(CANARY, name)
        azure.enable(name, False)
        with pytest.raises(KeyAccessError, match=rf"{name}.*version {azure.version(name)}.*KeyDisabled.*enable"):
            kms.wrap_key(CANARY, name)
        azure.enable(name, True)
        with pytest.raises(KeyAccessError, match="with that many bytes"):
            kms.wrap_key(bytes(191), name)
        azure.admin.update_key_properties(name, key_operations=["unwrapKey"])
    with load_kms(azure.properties) as kms, pytest.raises(KeyAccessError, match=r"KeyOperationForbidden.*operations"):
        kms.wrap_key(CANARY, name)


def test_azure_permissions(azure: Any) -> None:
    name = azure.new_key()
    with load_kms(azure.properties) as kms:
        first = kms.wrap_key(CANARY, name)
        azure.rotate(name)
        kms.wrap_key(CANARY, name)
        azure.fake.denied = {"list"}
        try:
            with pytest.raises(KeyAccessError, match="keys/list"):
                kms.unwrap_key(first, name)
        finally:
            azure.fake.denied = set()
    provider = "adls.token-credential-provider"
    with (
        load_kms({**azure.properties, f"{provider}.token": "unknown"}) as kms,
        pytest.raises(KeyAccessError, match="does not accept the caller's token"),
    ):
        kms.wrap_key(CANARY, name)
    with (
        load_kms({**azure.properties, provider: "kms_clients:Nobody"}) as kms,
        pytest.raises(KeyAccessError),
    ):
        kms.wrap_key(CANARY, name)


def test_azure_key_that_was_deleted(azure: Any) -> None:
    """Also when the client is open and has used it: that is no damage to what the key wrapped."""
    name = azure.new_key()
    with load_kms(azure.properties) as kms, load_kms(azure.properties) as only_wrapped:
        wrapped = kms.wrap_key(CANARY, name)
        assert kms.unwrap_key(wrapped, name) == CANARY
        only_wrapped.wrap_key(CANARY, name)
        azure.admin.begin_delete_key(name)
        for client in (kms, only_wrapped, load_kms(azure.properties)):
            for action in (client.unwrap_key, client.rewrap_key, client.wrap_key):
                with pytest.raises(KeyAccessError, match=f"{name}.*KeyNotFound.*recover the key"):
                    action(wrapped, name)


# ---------------------------------------------------------------- Vault


@builds
def test_vault_makes_no_keys(vault: Any) -> None:
    """Its encrypt would, for a token that may create."""
    with load_kms(vault.properties) as kms:
        for action in (lambda: kms.wrap_key(CANARY, "mistyped"), lambda: kms.generate_key("mistyped", 24)):
            with pytest.raises(KeyAccessError, match="no such key"):
                action()
    from hvac.exceptions import InvalidPath

    with pytest.raises(InvalidPath):
        vault.admin.read_key("mistyped")


@builds
def test_vault_makes_no_key_anew(vault: Any) -> None:
    """A key that was deleted behind an open client stays so, for whatever token."""
    name = vault.new_key()
    may_not_read = vault.limited(f'path "transit/encrypt/{name}" {{ capabilities = ["create", "update"] }}')
    with load_kms(vault.properties) as kms:
        wrapped = kms.wrap_key(CANARY, name)
        vault.client.write_data(f"transit/keys/{name}/config", data={"deletion_allowed": True})
        vault.admin.delete_key(name)
        for action in (kms.wrap_key, kms.unwrap_key, kms.rewrap_key):
            with pytest.raises(KeyAccessError, match="no such key"):
                action(wrapped, name)
        try:
            vault.file.write_text(may_not_read)
            with pytest.raises(KeyAccessError, match=name):
                kms.wrap_key(CANARY, name)
        finally:
            vault.file.write_text(vault.token)
    from hvac.exceptions import InvalidPath

    with pytest.raises(InvalidPath):
        vault.admin.read_key(name)


def test_vault_that_refuses_everything(tmp_path: Path) -> None:
    """With 400, also to be read what the key is: that is not asked again for that answer."""
    pytest.importorskip("hvac")
    asked: list[str] = []

    class Refusing(BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"errors": []}')

        do_GET = do_POST = do_PUT = answer  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    (tmp_path / "token").write_text("a token")
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        properties = {"encryption.kms-type": "vault", "vault.address": url, "vault.token-file": str(tmp_path / "token")}
        with load_kms(properties) as kms:
            actions: list[Callable[[], Any]] = [
                lambda: kms.wrap_key(CANARY, "k"),
                lambda: kms.generate_key("k", 16),
                lambda: kms.generate_key("k", 24),
                lambda: kms.unwrap_key(b"vault:v1:AAAA", "k"),
                lambda: kms.rewrap_key(b"vault:v1:AAAA", "k"),
                lambda: kms.current_version("k"),
            ]
            for action in actions:
                asked.clear()
                with pytest.raises(KeyAccessError, match=r"'k'.*status 400"):
                    action()
                assert 1 <= len(asked) <= 2
        server.shutdown()


@builds
def test_vault_with_few_rights(vault: Any, tmp_path: Path) -> None:
    """A token that may only encrypt and decrypt: what Vault does not tell is not guessed."""
    name = vault.new_key()
    rules = [f'path "transit/{action}/{name}" {{ capabilities = ["update"] }}' for action in ("encrypt", "decrypt")]
    token = vault.limited("\n".join(rules))
    with mock.patch.dict(os.environ, {"A_TOKEN": token}):
        properties = {one: text for one, text in vault.properties.items() if one != "vault.token-file"}
        with load_kms({**properties, "vault.token-env": "A_TOKEN"}) as kms:
            wrapped = kms.wrap_key(CANARY, name)
            assert kms.unwrap_key(wrapped, name) == CANARY
            changed = wrapped[:20] + (b"B" if wrapped[20:21] == b"A" else b"A") + wrapped[21:]  # is base64 still
            with pytest.raises(KeyAccessError, match=rf"version 1.*changed.*allow read on transit/keys/{name}"):
                kms.unwrap_key(changed, name)
            with pytest.raises(KeyAccessError, match=f"status 403.*transit/rewrap/{name}"):
                kms.rewrap_key(wrapped, name)
            before = kms_calls()
            assert kms.current_version(name) is None
            assert kms_calls() == before
    with (
        load_kms({**vault.properties, "vault.token-file": str(tmp_path / "none")}) as kms,
        pytest.raises(KeyAccessError, match="cannot be read here"),
    ):
        kms.unwrap_key(wrapped, name)


@builds
def test_vault_wraps_with_the_latest_version(vault: Any) -> None:
    """Whatever min_encryption_version is: the least that a request may name."""
    name = vault.new_key()
    for _ in range(2):
        vault.rotate(name)
    with load_kms(vault.properties) as kms:
        for least in (0, 2, 3):
            vault.configure(name, 1, least)
            assert kms.current_version(name) == kms.key_version(kms.wrap_key(CANARY, name)) == "3"


@builds
def test_vault_takes_a_renewed_token(vault: Any) -> None:
    name = vault.new_key()
    with load_kms(vault.properties) as kms:
        wrapped = kms.wrap_key(CANARY, name)
        vault.client.auth.token.revoke(old := vault.limited('path "transit/*" { capabilities = ["update"] }'))
        try:
            vault.file.write_text(old)
            with pytest.raises(KeyAccessError, match="expired"):
                kms.unwrap_key(wrapped, name)
        finally:
            vault.file.write_text(vault.token)
        assert kms.unwrap_key(wrapped, name) == CANARY


POLICY = 'path "transit/*" { capabilities = ["read", "update"] }'


@pytest.fixture
def logins(vault: Any) -> Iterator[Any]:
    """The administrator's client, with a policy `use` and logins by AppRole and JWT (also where Kubernetes' is)."""
    vault.client.sys.create_or_update_policy("use", POLICY)
    for kind, path in (("approle", "approle"), ("jwt", "jwt"), ("jwt", "kubernetes")):
        vault.client.sys.enable_auth_method(kind, path=path)
    yield vault.client
    for path in ("approle", "jwt", "kubernetes"):
        vault.client.sys.disable_auth_method(path)


def by(vault: Any, method: str, **more: str) -> dict[str, str]:
    """Properties of a client that logs in."""
    given = {name: text for name, text in vault.properties.items() if name != "vault.token-file"}
    return {**given, "vault.auth-method": method, **{f"vault.{n.replace('_', '-')}": text for n, text in more.items()}}


def tokens_given(client: Any) -> int:
    return len(client.list("auth/token/accessors")["data"]["keys"])


@builds
@pytest.mark.usefixtures("clock")  # a login that is refused is tried again
def test_vault_approle(vault: Any, logins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One login for many calls; another when the token is revoked; none when the policy says no."""
    logins.auth.approle.create_or_update_approle("job", token_policies=["use"], token_ttl="1h")
    role_id = logins.auth.approle.read_role_id("job")["data"]["role_id"]
    secret_id = logins.auth.approle.generate_secret_id("job")["data"]["secret_id"]
    (tmp_path / "secret").write_text(secret_id + "\n")
    monkeypatch.setenv("SECRET_ID", secret_id)
    name = vault.new_key()
    for source in ({"secret_id_file": str(tmp_path / "secret")}, {"secret_id_env": "SECRET_ID"}):
        before = tokens_given(logins)
        with load_kms(by(vault, "approle", role_id=role_id, **source)) as kms:
            client: Any = kms
            for _ in range(3):
                wrapped = kms.wrap_key(CANARY, name)
                assert kms.unwrap_key(wrapped, name) == CANARY
            assert tokens_given(logins) == before + 1
            logins.auth.token.revoke(first := client._connected().token)
            assert kms.unwrap_key(wrapped, name) == CANARY
            assert client._connected().token != first
            logins.sys.create_or_update_policy("use", 'path "transit/decrypt/*" { capabilities = ["update"] }')
            second = client._connected().token
            with pytest.raises(KeyAccessError, match=f"status 403.*transit/encrypt/{name}"):
                kms.wrap_key(CANARY, name)
            assert client._connected().token == second
            assert kms.unwrap_key(wrapped, name) == CANARY
            logins.sys.create_or_update_policy("use", POLICY)
        assert secret_id not in repr(kms) + repr(kms.properties)
    (tmp_path / "secret").write_text("wrong")
    with (
        load_kms(by(vault, "approle", role_id=role_id, secret_id_file=str(tmp_path / "secret"))) as kms,
        pytest.raises(KeyAccessError, match="refused the login by approle at auth/approle"),
    ):
        kms.wrap_key(CANARY, name)


@builds
@pytest.mark.usefixtures("clock")  # a login that is refused is tried again
def test_vault_renews_a_token(vault: Any, logins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret id that is good once: the token of that one login is renewed when half of its time is over."""
    logins.auth.approle.create_or_update_approle("once", token_policies=["use"], token_ttl="1h", secret_id_num_uses=1)
    (tmp_path / "secret").write_text(logins.auth.approle.generate_secret_id("once")["data"]["secret_id"])
    role_id = logins.auth.approle.read_role_id("once")["data"]["role_id"]
    name, now = vault.new_key(), time.monotonic()
    with load_kms(by(vault, "approle", role_id=role_id, secret_id_file=str(tmp_path / "secret"))) as kms:
        client: Any = kms
        wrapped = kms.wrap_key(CANARY, name)
        token, renews_at = client._connected().token, client._connected().renews_at
        assert 1700 < renews_at - now < 1900
        client._connected().renews_at = 0.0
        assert kms.unwrap_key(wrapped, name) == CANARY
        assert client._connected().token == token
        assert client._connected().renews_at >= renews_at
        client._connected().ends_at = client._connected().renews_at = 0.0  # too late for that
        with pytest.raises(KeyAccessError, match="refused the login by approle"):
            kms.unwrap_key(wrapped, name)


def signed_jwt(key: Any, **claims: Any) -> str:
    def part(value: bytes) -> str:
        return base64.urlsafe_b64encode(value).decode().rstrip("=")

    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    text = ".".join(part(json.dumps(value).encode()) for value in ({"alg": "RS256", "typ": "JWT"}, claims))
    return f"{text}.{part(key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


@builds
@pytest.mark.parametrize("method", ["jwt", "kubernetes"])
def test_vault_jwt(vault: Any, logins: Any, tmp_path: Path, method: str) -> None:
    """A login by Kubernetes is the same request. Behind it is Vault's JWT login here, which needs no cluster."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    logins.write_data(f"auth/{method}/config", data={"jwt_validation_pubkeys": [public.decode()]})
    role = {"role_type": "jwt", "bound_audiences": ["vault"], "user_claim": "sub", "token_policies": ["use"]}
    logins.write_data(f"auth/{method}/role/job", data=role)
    file, name, now = tmp_path / "jwt", vault.new_key(), int(time.time())
    properties = by(vault, method, auth_role="job", jwt_file=str(file))
    with load_kms(properties) as kms:
        with pytest.raises(KeyAccessError, match=r"JWT.*cannot be read here.*jwt"):
            kms.wrap_key(CANARY, name)
        file.write_text(late := signed_jwt(key, sub="pod", aud="vault", iat=now - 2000, exp=now - 1000))
        with pytest.raises(KeyAccessError, match=f"refused the login by {method}") as caught:
            kms.wrap_key(CANARY, name)
        assert late not in str(caught.value)
        file.write_text(signed_jwt(key, sub="pod", aud="vault", iat=now, exp=now + 600))  # as a cluster renews it
        assert kms.unwrap_key(kms.wrap_key(CANARY, name), name) == CANARY


@builds
def test_vault_certificates(tmp_path: Path) -> None:
    """One of the client's, for TLS and for the login; and whom to trust."""
    import hvac

    whole, authority = certificate(tmp_path)
    (tmp_path / "c").mkdir()
    own, shown = certificate(tmp_path / "c")
    with servers.vault("root of this test", whole) as url:
        admin = hvac.Client(url=url, token="root of this test", verify=str(authority))
        admin.sys.create_or_update_policy("use", POLICY)
        admin.secrets.transit.create_key("k")
        admin.sys.enable_auth_method("cert")
        trusted = {"certificate": shown.read_text(), "token_policies": ["use"]}
        admin.write_data("auth/cert/certs/job", data=trusted)
        properties = {
            "encryption.kms-type": "vault",
            "vault.address": url,
            "vault.ca-file": str(authority),
            "vault.auth-method": "cert",
            "vault.client-cert-file": str(own),
            "vault.client-key-file": str(own),
        }
        for more in ({}, {"vault.auth-role": "job"}):
            with load_kms({**properties, **more}) as kms:
                assert kms.unwrap_key(kms.wrap_key(CANARY, "k"), "k") == CANARY
        with (
            load_kms({**properties, "vault.auth-role": "none"}) as kms,
            pytest.raises(KeyAccessError, match="refused the login by cert"),
        ):
            kms.wrap_key(CANARY, "k")
        with (
            load_kms({**properties, "vault.ca-file": str(shown), "kms.max-attempts": "1"}) as kms,
            pytest.raises(KeyAccessError, match=r"TLS: .*vault\.ca-file"),
        ):
            kms.wrap_key(CANARY, "k")
        admin.adapter.close()


@builds
def test_vault_throttles(vault: Any) -> None:
    """By a quota of its own."""
    name = vault.new_key()
    with load_kms(vault.properties) as kms, load_kms({**vault.properties, "kms.max-attempts": "1"}) as hasty:
        wrapped = kms.wrap_key(CANARY, name)
        hasty.unwrap_key(wrapped, name)
        vault.client.write_data("sys/quotas/rate-limit/test", data={"rate": 5, "path": "transit/"})
        try:
            for _ in range(6):
                assert kms.unwrap_key(wrapped, name) == CANARY
            with pytest.raises(KeyAccessError, match=r"status 429.*stayed busy"):
                [hasty.unwrap_key(wrapped, name) for _ in range(20)]
        finally:
            vault.client.delete("sys/quotas/rate-limit/test")


# ---------------------------------------------------------------- PKCS#11


def test_pkcs11_wrong_pins_are_not_repeated(pkcs11: Any, tmp_path: Path) -> None:
    """In a process that has not logged in yet. A token locks itself after some."""
    key_id = pkcs11.new_key()
    (tmp_path / "pin").write_text("a wrong pin")
    out = run_python(
        program(
            wrapping.mend_a_pin,
            {**pkcs11.properties, "kms.pkcs11.pin-file": str(tmp_path / "pin")},
            key_id,
            pkcs11.hsm.pin,
        ),
    )
    first, second = out.splitlines()
    assert "is wrong: it was refused." in first
    assert "not tried again" in second
    assert "a wrong pin" not in out


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a search in a session that is gone
def test_pkcs11_logs_in_again(pkcs11: Any) -> None:
    """When another user of the library has logged the process out, and when the session is gone."""
    key_id = pkcs11.new_key()
    out = run_python(
        program(wrapping.share_a_token, pkcs11.properties, key_id, pkcs11.hsm.pin),
    )
    assert out.split() == ["1"]  # all of the process are logged in again
    with load_kms(pkcs11.properties) as kms:
        wrapped = kms.wrap_key(CANARY, key_id)
        kms._connected()._session.close()  # type: ignore[attr-defined]
        assert kms.unwrap_key(wrapped, key_id) == CANARY


@pytest.mark.more
def test_pkcs11_forks_amid_threads(pkcs11: Any) -> None:
    """Eight threads are in the library when the process forks; parent and children go on, with eight threads each."""
    run_python(
        program(wrapping.fork_beside_sessions, pkcs11.properties, pkcs11.new_key()),
    )


def test_pkcs11_beside_tls(pkcs11: Any, azure: Any) -> None:
    """A connection that is open when the library is loaded goes on: what that leaves in OpenSSL is not its error."""
    run_python(
        program(
            wrapping.two_openssls,
            pkcs11.properties,
            pkcs11.new_key(),
            azure.fake.url.rpartition(":")[2],
            azure.fake.authority,
        ),
    )


def test_pkcs11_what_the_token_has(pkcs11: Any) -> None:
    key_id = pkcs11.new_key()
    for name, text, said in (
        ("token-label", "another", "no token 'another'"),
        ("library", "/none.so", "check kms.*lib"),
    ):
        with (
            load_kms({**pkcs11.properties, f"kms.pkcs11.{name}": text}) as kms,
            pytest.raises(KeyAccessError, match=said),
        ):
            kms.wrap_key(CANARY, key_id)
    with load_kms(pkcs11.properties) as kms:
        pkcs11.enable(key_id, False)
        with pytest.raises(KeyAccessError, match=f"{key_id}.*disabled.*CKA_ENCRYPT"):
            kms.wrap_key(CANARY, key_id)
        pkcs11.enable(key_id, True)
        pkcs11.add_version(key_id, b"\x01\x00")  # 256, not before 2
        pkcs11.add_version(key_id, b"\x02")
        assert kms.key_version(kms.wrap_key(CANARY, key_id)) == "0100"
        pkcs11.add_version(key_id, b"\x02")
        with pytest.raises(KeyAccessError, match="two versions"):
            kms.wrap_key(CANARY, key_id)


# ---------------------------------------------------------------- datasets, whose master key is rotated


@pytest.mark.more
@pytest.mark.parametrize("double_wrap", [True, False], ids=["double", "single"])
def test_a_dataset_outlives_the_version_that_it_was_written_under(
    service: Service, double_wrap: bool, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    from datasets import HERE, decrypted, write_tree

    from ags_fast import jobs
    from ags_fast.keys import clear_cache

    key_id, kms, tree = service.new_key(), service.properties, {f"{n % 2}/{n}": b"%d" % n for n in range(5)}
    src, dataset = write_tree(tmp_path / "src", tree), tmp_path / "dataset"
    jobs.encrypt_files(
        src, dataset, kms=kms, wrapping_key_id=key_id, double_wrap=double_wrap, engine=HERE
    ).raise_for_failures()
    service.rotate(key_id)
    clear_cache()
    opens = Counter({(service.name, "unwrap"): 1})  # once for each process: the KEK of the documents
    anew = Counter((service.name, operation) for operation in (["rewrap"] if service.rewraps else ["unwrap", "wrap"]))
    tried = Counter({(service.name, "unwrap"): 1})  # a new wrap, before anything depends on it
    before = kms_calls()
    if not double_wrap:
        jobs.rotate(dataset, kms=kms, what="kek", also_retired=False).raise_for_failures()
        assert kms_calls() - before == opens + Counter({call: len(tree) for call in anew}) + tried
        before = kms_calls() - opens
    jobs.rotate(dataset, kms=kms, what="mek").raise_for_failures()
    assert kms_calls() - before == opens + anew + tried
    jobs.expire(dataset, kms=kms, keep=1, skip_grace=True).raise_for_failures()
    if service.destroys:
        service.destroy(key_id)
    clear_cache()
    assert decrypted(dataset, kms) == tree
