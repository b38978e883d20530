"""What each client of a KMS, and each object store, makes of every answer that is not the one that is due."""

from __future__ import annotations

import base64
import json
import re
from contextlib import contextmanager, suppress
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

import pytest
from kms_clients import CANARY, Clock
from servers.bad_http import Answers
from test_kms_contract import RING_KEY, elsewhere

from ags_fast.errors import IntegrityError, KeyAccessError
from ags_fast.fs.answers import AGAIN, FOREIGN, MISSING, REFUSED, asked_wait, meaning
from ags_fast.keys import load_kms
from ags_fast.keys.kms import service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ags_fast.keys import KmsClient

NETWORKED = {"aws": "boto3", "gcp": "google.cloud.kms", "azure": "azure.keyvault.keys", "vault": "hvac"}
CLASS_NAME = re.compile(r"\b(?!\w*KMS)[A-Z]\w*(Error|Exception|Redirects)\b|NoneType|Traceback")
ADVICE = {
    AGAIN: "stayed busy|sealed",
    FOREIGN: "is not the KMS .*redirect.*check .*(endpoint|address|url)",
    REFUSED: "refused",
    MISSING: "refused",
}


# ---------------------------------------------------------------- the table


def test_each_status_has_one_meaning() -> None:
    found = {status: meaning(status) for status in range(300, 600)}
    busy = {408, 425, 429, *range(500, 600)} - {501, 505, 511}
    assert {status for status in found if found[status] == AGAIN} == busy
    assert {status for status in found if found[status] == MISSING} == {404, 410}
    assert {status for status in found if found[status] == FOREIGN} == {*range(300, 400), 407, 421, 511}
    assert {meaning(status) for status in (200, 204, 206)} == {FOREIGN}  # with a body that cannot be understood


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, 0), ("", 0), ("7", 7), (" 120 ", 120), ("-1", 0), ("soon", 0), ("1e9", 0), (formatdate(0), 0)],
)
def test_what_a_service_asks_to_wait(text: str | None, seconds: float) -> None:
    assert asked_wait(text) == seconds


def test_a_date_to_wait_for() -> None:
    import time

    assert 50 < asked_wait(formatdate(time.time() + 60, usegmt=True)) <= 60


# ---------------------------------------------------------------- each KMS


class Peer:
    """A client of a KMS, what answers it, and what its service would say."""

    def __init__(self, name: str, kms: KmsClient, server: Answers, clock: Clock) -> None:
        self.name, self.kms, self.server, self.clock = name, kms, server, clock
        self.key_id = RING_KEY if name == "gcp" else "k"
        self.wrapped = b"vault:v1:AAAA" if name == "vault" else CANARY * 16

    def failure(self) -> str:
        """What the error of an unwrap says."""
        self.server.asked.clear()
        self.clock.waits.clear()
        with pytest.raises((KeyAccessError, IntegrityError)) as caught:
            self.kms.unwrap_key(self.wrapped, self.key_id)
        said = str(caught.value)
        assert not CLASS_NAME.search(re.sub(r"\(\w+Exception\)", "", said)), said
        assert self.key_id in said or "application default credentials" in said
        return said

    @property
    def error(self) -> bytes:
        """An error in the form of the service's, which names no code that a client knows."""
        inner: dict[str, Any] = {"code": "Odd", "status": "ODD", "message": "odd"}
        return json.dumps({"__type": "com.amazon#OddException", "error": inner, "errors": ["odd"]}).encode()


def version_of(server: Answers) -> bytes:
    jwk = {"kid": f"{server.url}/keys/k/{'0a' * 16}", "kty": "RSA", "n": "AQAB" * 64, "e": "AQAB"}
    return json.dumps({"key": jwk, "attributes": {"enabled": True}}).encode()


@contextmanager
def answered(name: str, folder: Path, patches: pytest.MonkeyPatch, **more: str) -> Iterator[Peer]:
    pytest.importorskip(NETWORKED[name])
    patches.setenv("AWS_ACCESS_KEY_ID", "test")
    patches.setenv("AWS_SECRET_ACCESS_KEY", "test")
    clock = Clock()
    patches.setattr(service, "time", clock)
    server = Answers(folder if name == "azure" else None)
    patches.setenv("REQUESTS_CA_BUNDLE", server.authority)
    try:
        with load_kms(elsewhere(name, server.url, folder, **{"kms.max-attempts": "2", **more})) as kms:
            peer = Peer(name, kms, server, clock)
            if name == "azure":  # which version there is, before an unwrap
                server.always = (200, {}, version_of(server))
                assert kms.current_version("k") == "0a" * 16
            yield peer
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(params=NETWORKED)
def peer(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    with answered(request.param, tmp_path, monkeypatch) as found:
        yield found


def kind_of(peer: Peer, status: int) -> str:
    if (peer.name, status) in {("vault", 412), ("gcp", 409)}:
        return AGAIN
    return meaning(status)


def test_every_status(peer: Peer) -> None:
    """With an error of the service's own form, and with a page of HTML, which only a busy service may have."""
    for status in range(300, 600):
        for body, own in ((peer.error, True), (b"<html>log in</html>", False)):
            peer.server.always = (status, {"Location": "https://elsewhere.example.com/"}, body)
            kind = kind_of(peer, status) if own or status != 409 else meaning(status)
            if not own and kind != AGAIN:
                kind = FOREIGN
            said = peer.failure()
            if (peer.name, status) == ("gcp", 401):  # Google's package wants a new token, and has none
                assert "application default credentials" in said
                continue
            asked = sum(method != "GET" for method, *_ in peer.server.asked)  # Azure's package looks at keys before
            if own and kind == REFUSED and status == 400:  # may mean that the bytes were changed
                assert "was not" not in said, said
                continue
            assert re.search(ADVICE[kind], said), (status, own, said)
            assert (asked == 2) == (kind == AGAIN), (status, own, peer.server.asked)
            if kind == FOREIGN:
                assert f"status {status}" in said or status in (300, 303), said
            assert len(peer.clock.waits) == asked - 1


def test_waits_as_told(peer: Peer) -> None:
    """Seconds, or until a date; not at all if that is beyond the budget of the call."""
    for text, least, most in (("7", 7, 7), ("", 0.05, 0.1), ("1", 1, 1)):
        peer.server.always = (429, {"Retry-After": text}, peer.error)
        assert re.search("stayed busy", peer.failure())
        (wait,) = peer.clock.waits
        assert least <= wait <= most
    peer.server.always = (503, {"Retry-After": "3600"}, b"")
    assert re.search(r"stayed busy.*kms\.call-budget-ms|sealed", peer.failure())
    assert peer.clock.waits == []


def good(name: str) -> dict[str, Any]:
    """A right answer to an unwrap."""
    text = base64.b64encode(CANARY).decode()
    if name == "aws":
        return {"Plaintext": text, "KeyId": "k", "EncryptionAlgorithm": "SYMMETRIC_DEFAULT"}
    if name == "gcp":
        google_crc32c = pytest.importorskip("google_crc32c")
        return {"plaintext": text, "plaintextCrc32c": str(google_crc32c.value(CANARY))}
    if name == "azure":
        return {"kid": f"https://v/keys/k/{'0a' * 16}", "value": base64.urlsafe_b64encode(CANARY).decode().strip("=")}
    return {"data": {"plaintext": text}}


def malformed(name: str) -> dict[str, bytes]:
    right = good(name)
    (deep,) = [right["data"]] if name == "vault" else [right]
    field = {"aws": "Plaintext", "azure": "value"}.get(name, "plaintext")

    def changed(value: Any) -> bytes:
        inner = {**deep, field: value}
        return json.dumps({"data": inner} if name == "vault" else inner).encode()

    return {
        "empty": b"",
        "a page": b"<html>log in</html>",
        "no fields": b"{}",
        "a list": b"[]",
        "null": b"null",
        "cut": json.dumps(right).encode()[:-5],
        "a null in it": changed(None),
        "a number in it": changed(17),
        "an object in it": changed({"a": "b"}),
        "not base64": changed("%%%"),
        "not UTF-8": b"\xff\xfe{}",
        "nested": b"[" * 100_000,
    }


def test_malformed_bodies(peer: Peer) -> None:
    """No body is taken for a key, tried again, or named by what went wrong in a package."""
    peer.server.gets = version_of(peer.server) if peer.name == "azure" else b""
    peer.server.always = (200, {}, json.dumps(good(peer.name)).encode())
    assert peer.kms.unwrap_key(peer.wrapped, peer.key_id) == CANARY
    for what, body in malformed(peer.name).items():
        peer.server.always = (200, {}, body)
        said = peer.failure()
        assert len(peer.server.asked) == 1, what
        assert re.search(ADVICE[FOREIGN] + "|nothing where a key is due", said), (what, said)
    peer.server.gets = b""
    for what, body in malformed(peer.name).items():
        peer.server.always = (200, {}, body)
        with suppress(KeyAccessError):
            assert peer.kms.current_version(peer.key_id) is None, what


@pytest.mark.parametrize("status", [201, 202, 204, 206])
def test_another_success(peer: Peer, status: int) -> None:
    """Only 200 has a key."""
    peer.server.gets = version_of(peer.server) if peer.name == "azure" else b""
    peer.server.always = (status, {}, json.dumps(good(peer.name)).encode())
    assert re.search(ADVICE[FOREIGN], peer.failure())


# ---------------------------------------------------------------- names of the packages


def test_names_that_the_packages_have() -> None:
    """A name in a list that the package never gives is a rule that never applies, as hvac's PreconditionFailed was."""
    pytest.importorskip("boto3")
    import botocore.session
    from botocore.retries.standard import ThrottledRetryableChecker

    from ags_fast.keys.kms import aws

    model = botocore.session.Session().get_service_model("kms")
    known = {shape.error_code for shape in model.error_shapes} | {shape.name for shape in model.error_shapes}
    # Errors of all services of AWS, which no model lists: docs.aws.amazon.com/kms/latest/APIReference/CommonErrors.html
    known |= {"AccessDeniedException", "UnrecognizedClientException", "InvalidSignatureException"}
    known |= {"ExpiredTokenException", "InternalFailure", "ServiceUnavailable"}
    known |= set(ThrottledRetryableChecker._THROTTLED_ERROR_CODES)  # noqa: SLF001 (botocore has no public one)
    assert {*aws.REFUSALS, *aws.NOT_WHAT_WAS_WRAPPED, *aws.DENIED, *aws.BUSY_CODES} - known == set()


def test_names_of_google() -> None:
    pytest.importorskip("google.cloud.kms")
    from google.api_core.exceptions import from_http_status
    from google.rpc.code_pb2 import Code

    from ags_fast.keys.kms import gcp

    assert {*gcp.REFUSALS, *gcp.BUSY_CODES, *gcp.HTTP_CODES.values()} - set(Code.keys()) == set()
    assert all(from_http_status(status, "").code == status for status in gcp.HTTP_CODES)


def test_names_of_pkcs11() -> None:
    exceptions = pytest.importorskip("pkcs11.exceptions")
    from ags_fast.keys.kms import pkcs11

    for name in (*pkcs11.SESSION_LOST, *pkcs11.NOT_DECRYPTED):
        assert issubclass(getattr(exceptions, name), exceptions.PKCS11Error)
