"""S3 as moto has it, in memory, until it is killed."""

from __future__ import annotations

import io
import threading
from typing import TYPE_CHECKING

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

if TYPE_CHECKING:
    from collections.abc import Iterable
    from wsgiref.types import StartResponse, WSGIEnvironment

# The headers of a condition, and of a call of DynamoDB or Glue, which may have one in its body.
CONDITIONS = ("HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH", "HTTP_X_AMZ_TARGET")


class OneByOne:
    """moto's application. It looks at a condition first and writes then: here nothing comes between."""

    def __init__(self) -> None:
        self.moto = DomainDispatcherApplication(create_backend_app)
        self.lock = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in {"GET", "HEAD"} or not any(name in environ for name in CONDITIONS):
            return self.moto(environ, start_response)
        # The body is here before the lock is: a client that stops in the middle holds up nobody.
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        with self.lock:
            return list(self.moto(environ, start_response))


if __name__ == "__main__":
    WSGIRequestHandler.disable_nagle_algorithm = True  # a body need not wait until its head is acknowledged
    server = make_server("127.0.0.1", 0, OneByOne(), threaded=True)
    print(f"READY http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
