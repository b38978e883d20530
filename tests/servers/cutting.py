"""A gateway on loopback that cuts the answer to a request after the server has done it, or sends the request twice."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from typing import Any

IDLE = 60  # seconds


class Gateway:
    """Passes connections on to a server.

    Args:
        host: The server's.
        port: The server's.

    Attributes:
        port: Where it listens on loopback.
        cut: How many more requests that have `marker` lose their answers: the connection ends instead.
        again: Whether such a request is sent a second time, and the second answer is passed on.
    """

    def __init__(self, host: str, port: int) -> None:
        self.marker, self.cut, self.again = b"", 0, False
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                outer._pass(self.request, (host, port))

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    def __enter__(self) -> Gateway:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def lose(self, marker: bytes, *, again: bool = False) -> None:
        """Lose the answer to the next request that has these bytes."""
        self.marker, self.cut, self.again = marker, 1, again

    def _pass(self, client: socket.socket, to: tuple[str, int]) -> None:
        client.settimeout(IDLE)
        server = socket.create_connection(to, IDLE)
        ends = threading.Event()
        asked = bytearray()  # since the last answer

        def answers() -> None:
            nonlocal server
            try:
                while data := server.recv(1 << 16):
                    if self.cut and self.marker in asked:
                        self.cut -= 1
                        if not self.again:
                            break
                        server.close()
                        server = socket.create_connection(to, IDLE)
                        server.sendall(asked)
                        continue
                    asked.clear()
                    client.sendall(data)
            except OSError:
                pass
            ends.set()
            _end(client, server)

        threading.Thread(target=answers, daemon=True).start()
        try:
            while not ends.is_set() and (data := client.recv(1 << 16)):
                asked.extend(data)
                server.sendall(data)
        except OSError:
            pass
        _end(client, server)


def _end(*connections: socket.socket) -> None:
    for one in connections:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)  # else the peer hears of it only when no thread receives any more
        one.close()
