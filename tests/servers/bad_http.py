"""Servers that behave badly: one sends back what it is sent, one sends a byte now and then and never ends."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from servers import LocalServer
from servers.fake_azure import CHALLENGE, certificate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def echoing(tls: Path | None = None) -> Iterator[Echo]:
    """tls: a folder for a certificate."""
    server = Echo(("127.0.0.1", 0), _EchoHandler)
    server.begin(tls)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class Echo(LocalServer):
    """status: that it answers with. form: what has the text that was sent: ``json`` (each field of an error), ``taken``
    (each field of a success), ``raw`` (the body is as it came), ``head`` (the status line and headers)."""

    status = 400
    form = "json"
    authority = ""
    requests = 0

    def begin(self, tls: Path | None) -> None:
        scheme = "http"
        if tls is not None:
            whole, authority = certificate(tls)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(whole)
            self.socket = context.wrap_socket(self.socket, server_side=True)
            scheme, self.authority = "https", str(authority)
        self.url = f"{scheme}://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _EchoHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body need not wait until its head is acknowledged
    server: Echo

    def log_message(self, *_: Any) -> None:
        pass

    def _go(self) -> None:
        self.server.requests += 1
        if self.server.authority and self._as_azure():
            return
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        texts = [self.path, sent.decode(errors="replace"), *_texts(sent)]
        said = " ".join(texts)
        body, kind = sent, "application/json"
        secret = max(_texts(sent), key=len, default="nothing")
        if self.server.form == "json":
            inner = {"code": secret, "message": said, "status": secret, "innererror": {"code": secret}}
            body = json.dumps(
                {"__type": secret, "message": said, "error": inner, "errors": [said, secret], "warnings": [said]}
            ).encode()
        elif self.server.form == "taken":
            names = ("Plaintext", "CiphertextBlob", "KeyId", "plaintext", "ciphertext", "name", "value", "kid")
            fields = dict.fromkeys(names, secret)
            body = json.dumps({**fields, "data": fields, "key": fields, "attributes": fields}).encode()
        elif self.server.form == "head":
            body, kind = b"", secret
        self.send_response(self.server.status, secret if self.server.form == "head" else None)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.server.form == "head":
            self.send_header("x-amzn-requestid", secret)
            self.send_header("x-amzn-errortype", secret)
            self.send_header("x-ms-request-id", secret)
            self.wfile.write(b"".join(self._headers_buffer) + secret.encode() + b"\r\n")  # type: ignore[has-type]
            self._headers_buffer = []  # type: ignore[var-annotated]
        self.end_headers()
        self.wfile.write(body)

    def _as_azure(self) -> bool:
        """What comes before anything is sent that could be echoed: the challenge for a token, and what a key is."""
        body = b""
        if not self.headers.get("Authorization"):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(401)
            self.send_header("WWW-Authenticate", CHALLENGE)
        elif self.command == "GET" and not self.path.partition("?")[0].endswith("/versions"):
            jwk = {"kid": f"{self.server.url}/keys/k/{'0a' * 16}", "kty": "RSA", "n": "AQAB" * 64, "e": "AQAB"}
            body = json.dumps({"key": jwk, "attributes": {"enabled": True}}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
        else:
            return False
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return True

    do_GET = do_POST = do_PUT = _go  # noqa: N815


def _texts(sent: bytes) -> list[str]:
    """What may be a key in a request: its strings, also without base64."""
    try:
        values = [value for value in json.loads(sent).values() if isinstance(value, str)]
    except (ValueError, AttributeError):
        return []
    opened = []
    for value in values:
        with contextlib.suppress(ValueError):
            opened.append(base64.b64decode(value).decode())
    return values + opened


@contextlib.contextmanager
def dripping(head: bytes, tls: Path | None = None) -> Iterator[tuple[str, str, threading.Event]]:
    """Sends `head`, and then a byte every 50 ms, until the client lets go. Yields the URL, the authority to trust, and
    an event: some client has let go."""
    let_go, ends = threading.Event(), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    context, scheme, authority = None, "http", ""
    if tls is not None:
        whole, certified = certificate(tls)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(whole)
        scheme, authority = "https", str(certified)

    def drip(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if context is not None:
                connection = context.wrap_socket(connection, server_side=True)
            with connection:
                connection.recv(65536)
                data = head
                while not ends.wait(0.05):
                    try:
                        connection.sendall(data)
                    except OSError:
                        let_go.set()
                        return
                    data = b" "

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", authority, let_go
    finally:
        ends.set()
        listener.close()


class Answers(Echo):
    """A server that gives what it is told to: the answers of `first`, each once, and then `always`.

    An answer is a status, headers and a body. `asked` has the method, path and headers of each request.
    """

    def __init__(self, tls: Path | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _AnswersHandler)
        self.first: list[tuple[int, dict[str, str], bytes]] = []
        self.always: tuple[int, dict[str, str], bytes] = (200, {}, b"{}")
        self.gets = b""  # what a GET gets in their place
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.begin(tls)


class _AnswersHandler(_EchoHandler):
    server: Answers

    def _go(self) -> None:
        if self.server.authority and not self.headers.get("Authorization"):
            self._as_azure()
            return
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path, dict(self.headers)))
        status, headers, body = self.server.first.pop(0) if self.server.first else self.server.always
        if self.command == "GET" and self.server.gets:
            status, headers, body = 200, {}, self.server.gets
        body = b"" if self.command == "HEAD" or status in (204, 304) else body
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _go  # noqa: N815
