"""A fake of Google Cloud KMS, since there is none to install: HTTP as Google's client speaks it, Google's own message
types, and keys of this process behind them. Versions, the primary one, states and CRC32C behave as the service's
documentation has it."""

from __future__ import annotations

import datetime
import json
import os
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from google.cloud.kms_v1.types import resources, service

from servers import LocalServer

State = resources.CryptoKeyVersion.CryptoKeyVersionState
CHANGEABLE = (State.ENABLED, State.DISABLED)
INVALID = "Decryption failed: the ciphertext is invalid."
NUMBER, NONCE = 4, 12  # a ciphertext is 0a, the version's number, a nonce, and what AES-GCM makes


VERBS = {
    "encrypt": "Encrypt",
    "decrypt": "Decrypt",
    "destroy": "DestroyCryptoKeyVersion",
    "updatePrimaryVersion": "UpdateCryptoKeyPrimaryVersion",
}


class RefusedError(Exception):
    pass


class FakeGcpKms:
    """failures: status codes that the next requests are answered with. calls: the methods that were called."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.corruptions = 0  # of this many next answers, a bit turns over on the way
        self.calls: list[str] = []
        self._lock = threading.Lock()
        self._keys: dict[str, resources.CryptoKey] = {}
        self._versions: dict[str, dict[str, resources.CryptoKeyVersion]] = {}
        self._material: dict[str, AESGCM] = {}
        self._server = LocalServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, url: str, body: bytes) -> bytes:
        """As the annotations of the service's protocol map HTTP to its methods."""
        path, query = unquote(urlsplit(url).path).removeprefix("/v1/"), parse_qs(urlsplit(url).query)
        name, _, verb = path.partition(":")
        parent, _, kind = name.rpartition("/")
        fields = json.loads(body or b"{}")
        if kind == "cryptoKeyVersions":
            called, fields = "CreateCryptoKeyVersion", {"parent": parent, "crypto_key_version": fields}
            if method == "GET":
                called, fields = "ListCryptoKeyVersions", {"parent": parent}
        elif method == "GET":
            called, fields = "GetCryptoKey", {"name": name}
        elif verb:
            called, fields = VERBS[verb], {"name": name, **fields}
        elif method == "PATCH":
            mask = {"update_mask": query["updateMask"][0]}
            called, fields = "UpdateCryptoKeyVersion", {"crypto_key_version": {"name": name, **fields}, **mask}
        else:
            made = query["cryptoKeyId"][0]
            called, fields = "CreateCryptoKey", {"parent": parent, "crypto_key_id": made, "crypto_key": fields}
        request: Any = getattr(service, f"{called}Request")
        with self._lock:
            self.calls.append(called)
            if self.failures:
                raise RefusedError(self.failures.pop(), "told to")
            answer = getattr(self, called)(request.from_json(json.dumps(fields)))
        text: str = type(answer).to_json(answer)
        return text.encode()

    # ---------------------------------------------------------------- methods, named as the service names them

    def CreateCryptoKey(self, asked: Any) -> Any:  # noqa: N802
        name = f"{asked.parent}/cryptoKeys/{asked.crypto_key_id}"
        self._keys[name] = resources.CryptoKey(name=name, purpose=asked.crypto_key.purpose)
        self._versions[name] = {}
        self._keys[name].primary = self._new_version(name)
        return self._keys[name]

    def CreateCryptoKeyVersion(self, asked: Any) -> Any:  # noqa: N802
        self._key(asked.parent)
        return self._new_version(asked.parent)  # which does not make it primary

    def GetCryptoKey(self, asked: Any) -> Any:  # noqa: N802
        return self._key(asked.name)

    def ListCryptoKeyVersions(self, asked: Any) -> Any:  # noqa: N802
        self._key(asked.parent)
        found = list(self._versions[asked.parent].values())
        return service.ListCryptoKeyVersionsResponse(crypto_key_versions=found, total_size=len(found))

    def UpdateCryptoKeyPrimaryVersion(self, asked: Any) -> Any:  # noqa: N802
        key = self._key(asked.name)
        key.primary = self._enabled(self._version(f"{asked.name}/cryptoKeyVersions/{asked.crypto_key_version_id}"))
        return key

    def UpdateCryptoKeyVersion(self, asked: Any) -> Any:  # noqa: N802
        version = self._version(asked.crypto_key_version.name)
        if version.state not in CHANGEABLE or asked.crypto_key_version.state not in CHANGEABLE:
            raise RefusedError("FAILED_PRECONDITION", f"{version.name} is {version.state.name}")
        version.state = asked.crypto_key_version.state
        return version

    def DestroyCryptoKeyVersion(self, asked: Any) -> Any:  # noqa: N802
        version = self._version(asked.name)
        version.state = State.DESTROY_SCHEDULED  # type: ignore[assignment]
        return version

    def Encrypt(self, asked: Any) -> Any:  # noqa: N802
        version = self._enabled(self._version(self._key(asked.name).primary.name))
        if len(asked.plaintext) > 1 << 16:
            raise RefusedError("INVALID_ARGUMENT", "too long")
        if "plaintext_crc32c" in asked and asked.plaintext_crc32c != google_crc32c.value(asked.plaintext):
            raise RefusedError("INVALID_ARGUMENT", "the checksum does not match")
        number, nonce = int(version.name.rpartition("/")[2]).to_bytes(NUMBER, "big"), os.urandom(NONCE)
        aad = number + asked.additional_authenticated_data
        sealed = b"\x0a" + number + nonce + self._material[version.name].encrypt(nonce, asked.plaintext, aad)
        return service.EncryptResponse(
            name=version.name,
            ciphertext=self._on_its_way(sealed),
            ciphertext_crc32c=google_crc32c.value(sealed),
            verified_plaintext_crc32c="plaintext_crc32c" in asked,
        )

    def Decrypt(self, asked: Any) -> Any:  # noqa: N802
        self._key(asked.name)
        if "ciphertext_crc32c" in asked and asked.ciphertext_crc32c != google_crc32c.value(asked.ciphertext):
            raise RefusedError("INVALID_ARGUMENT", "the checksum does not match")
        head, sealed = asked.ciphertext[: 1 + NUMBER + NONCE], asked.ciphertext[1 + NUMBER + NONCE :]
        number, nonce = head[1 : 1 + NUMBER], head[1 + NUMBER :]
        name = f"{asked.name}/cryptoKeyVersions/{int.from_bytes(number, 'big')}"
        if head[:1] != b"\x0a" or name not in self._material:
            raise RefusedError("INVALID_ARGUMENT", INVALID)
        self._enabled(self._version(name))
        try:
            key = self._material[name].decrypt(nonce, sealed, number + asked.additional_authenticated_data)
        except (InvalidTag, ValueError):
            raise RefusedError("INVALID_ARGUMENT", INVALID) from None
        return service.DecryptResponse(plaintext=self._on_its_way(key), plaintext_crc32c=google_crc32c.value(key))

    # ---------------------------------------------------------------- inside

    def _key(self, name: str) -> resources.CryptoKey:
        if name not in self._keys:
            raise RefusedError("NOT_FOUND", f"CryptoKey {name} not found.")
        return self._keys[name]

    def _version(self, name: str) -> resources.CryptoKeyVersion:
        return self._versions[name.partition("/cryptoKeyVersions/")[0]][name]

    def _enabled(self, version: resources.CryptoKeyVersion) -> resources.CryptoKeyVersion:
        if version.state != State.ENABLED:
            said = f"{version.name} is not enabled, current state is: {version.state.name}."
            raise RefusedError("FAILED_PRECONDITION", said)
        return version

    def _new_version(self, key: str) -> resources.CryptoKeyVersion:
        name = f"{key}/cryptoKeyVersions/{len(self._versions[key]) + 1}"
        self._versions[key][name] = resources.CryptoKeyVersion(
            name=name, state=State.ENABLED, create_time=datetime.datetime.now(datetime.UTC)
        )
        self._material[name] = AESGCM(AESGCM.generate_key(256))
        return self._versions[key][name]

    def _on_its_way(self, data: bytes) -> bytes:
        if not self.corruptions:
            return data
        self.corruptions -= 1
        return bytes([data[0] ^ 1]) + data[1:]


STATUSES = {
    "FAILED_PRECONDITION": 400,
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "PERMISSION_DENIED": 403,
    "UNAVAILABLE": 503,
}


def _handler(fake: FakeGcpKms) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # a body need not wait until its head is acknowledged
        wbufsize = -1  # head and body go out as one: sent apart, the second waits for the first one's acknowledgement

        def log_message(self, *_: Any) -> None:
            pass

        def _go(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                status, data = 200, fake.answer(self.command, self.path, body)
            except RefusedError as refused:
                code, said = refused.args
                status = STATUSES[code]
                data = json.dumps({"error": {"code": status, "message": said, "status": code}}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json; charset=UTF-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = _go  # noqa: N815

    return Handler
