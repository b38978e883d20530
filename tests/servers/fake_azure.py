"""A fake of Azure Key Vault's keys, since there is none to install: its REST interface over TLS, with the challenge for
a token, and RSA keys of this process behind it. Versions, states and errors behave as the service's do."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import ssl
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa

from servers import LocalServer

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "the token of the fake vault"
HASHES = {"RSA-OAEP": hashes.SHA1, "RSA-OAEP-256": hashes.SHA256}
CHALLENGE = (
    'Bearer authorization="https://login.microsoftonline.com/00000000-0000-0000-0000-000000000001", '
    'resource="https://vault.azure.net"'
)
OPERATIONS = ["encrypt", "decrypt", "wrapKey", "unwrapKey", "sign", "verify"]


class RefusedError(Exception):
    pass


class FakeKeyVault:
    """failures: statuses that the next requests are answered with. denied: operations that nobody may do. calls: method
    and path of the requests that came with a token. authority: the certificate to trust."""

    def __init__(self, folder: Path) -> None:
        self.failures: list[int] = []
        self.denied: set[str] = set()
        self.calls: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._keys: dict[str, list[dict[str, Any]]] = {}
        self._clock = int(time.time()) - 10_000
        whole, self.authority = certificate(folder)
        self._server = LocalServer(("127.0.0.1", 0), _handler(self))
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(whole)
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.calls.append((method, path))
            if self.failures:
                raise RefusedError(self.failures.pop(), "Failed", "told to")
            name, *rest = path.removeprefix("/keys/").strip("/").split("/")
            if (method, rest) == ("POST", ["create"]) or (method, rest) == ("POST", ["rotate"]):
                return self._bundle(name, self._new_version(name))
            if (method, rest) == ("GET", ["versions"]):
                return self._page(name)  # of a key that is not there: an empty one
            if (method, rest) == ("DELETE", []):
                deleted = self._bundle(name, self._version(name, None))
                del self._keys[name]
                return deleted
            version = self._version(name, rest[0] if rest and rest[0] else None)
            if method == "GET":
                if "get" in self.denied:
                    raise RefusedError(403, "Forbidden", "Caller is not authorized.", "ForbiddenByRbac")
                return self._bundle(name, version)
            if method == "PATCH":
                version["attributes"].update(body.get("attributes", {}))
                version["operations"] = body.get("key_ops") or version["operations"]
                return self._bundle(name, version)
            return self._use(name, version, rest[-1], body)

    def _use(self, name: str, version: dict[str, Any], operation: str, body: dict[str, Any]) -> dict[str, Any]:
        if operation in self.denied:
            raise RefusedError(403, "Forbidden", "Caller is not authorized to perform action.", "ForbiddenByRbac")
        if not version["attributes"]["enabled"]:
            raise RefusedError(403, "Forbidden", f"{operation} is not allowed on a disabled key.", "KeyDisabled")
        if operation not in (allowed.lower() for allowed in version["operations"]):
            raise RefusedError(403, "Forbidden", f"{operation} is not permitted.", "KeyOperationForbidden")
        if operation != "unwrapkey" or body["alg"] not in HASHES:  # the package wraps with the public key itself
            raise RefusedError(400, "BadParameter", f"{operation} with {body.get('alg')}")
        chosen = HASHES[body["alg"]]
        try:
            key = version["key"].decrypt(_unbase64(body["value"]), padding.OAEP(padding.MGF1(chosen()), chosen(), None))
        except ValueError:
            raise RefusedError(400, "BadParameter", "The parameter is incorrect.") from None
        return {"kid": self._kid(name, version), "value": _base64(key)}

    def _new_version(self, name: str) -> dict[str, Any]:
        self._clock += 60
        version = {
            "id": uuid.uuid4().hex,
            "key": rsa.generate_private_key(65537, 2048),
            "attributes": {"enabled": True, "created": self._clock, "updated": self._clock},
            "operations": OPERATIONS,
        }
        self._keys.setdefault(name, []).append(version)
        return version

    def _version(self, name: str, wanted: str | None) -> dict[str, Any]:
        for version in reversed(self._keys.get(name, [])):
            if wanted in (None, version["id"]):
                return version
        raise RefusedError(404, "KeyNotFound", f"A key with (name/id) {name}/{wanted or ''} was not found.")

    def _page(self, name: str) -> dict[str, Any]:
        """In no order that means something, as the service's lists have."""
        if "list" in self.denied:
            raise RefusedError(403, "Forbidden", "Caller is not authorized.", "ForbiddenByRbac")
        versions = sorted(self._keys.get(name, []), key=lambda version: version["id"])
        found = [{"kid": self._kid(name, version), "attributes": version["attributes"]} for version in versions]
        return {"value": found, "nextLink": None}

    def _bundle(self, name: str, version: dict[str, Any]) -> dict[str, Any]:
        numbers = version["key"].public_key().public_numbers()
        jwk = {"kid": self._kid(name, version), "kty": "RSA", "key_ops": version["operations"]}
        jwk |= {n: _base64(v.to_bytes(-(-v.bit_length() // 8), "big")) for n, v in (("n", numbers.n), ("e", numbers.e))}
        return {"key": jwk, "attributes": version["attributes"]}

    def _kid(self, name: str, version: dict[str, Any]) -> str:
        return f"{self.url}/keys/{name}/{version['id']}"


def _handler(vault: FakeKeyVault) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # a body need not wait until its head is acknowledged
        wbufsize = -1  # head and body go out as one: sent apart, the second waits for the first one's acknowledgement

        def log_message(self, *_: Any) -> None:
            pass

        def _send(self, status: int, value: dict[str, Any], **headers: str) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
            for name, text in headers.items():
                self.send_header(name.replace("_", "-"), text)
            self.end_headers()
            self.wfile.write(data)

        def _go(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                error: dict[str, Any] = {
                    "code": "Unauthorized",
                    "message": "AKV10000: no bearer token that is known here",
                }
                return self._send(401, {"error": error}, WWW_Authenticate=CHALLENGE)
            try:
                return self._send(
                    200, vault.answer(self.command, self.path.partition("?")[0], json.loads(body or "{}"))
                )
            except RefusedError as refused:
                status, code, message, *inner = refused.args
                error = {
                    "code": code,
                    "message": message,
                    **({"innererror": {"code": inner[0]}} if inner else {}),
                }
                return self._send(status, {"error": error})

        do_GET = do_POST = do_PATCH = do_DELETE = _go  # noqa: N815

    return Handler


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unbase64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def certificate(folder: Path) -> tuple[Path, Path]:
    """A key with its certificate for this machine, and the certificate alone."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    places = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(places, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.pem").write_bytes(secret + pem)
    (folder / "authority.pem").write_bytes(pem)
    return folder / "server.pem", folder / "authority.pem"
