"""S3 as moto has it, in memory, until it is killed."""

from __future__ import annotations

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

if __name__ == "__main__":
    WSGIRequestHandler.disable_nagle_algorithm = True  # a body need not wait until its head is acknowledged
    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
    print(f"READY http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
