"""A small S3 server that is as slow as a network: latency a request, bytes a second a connection, an exact log.

Tests and benchmarks use it, in a process of its own::

    with slow_s3(latency=0.03, rate=3e6) as server:  # seconds a request; bytes/s a connection, both ways, or None
        store = Store("s3://bucket/folder", server.options())  # buckets need not be made
        server.put("bucket", "folder/file", bytes(32 << 20))  # at once, and not in the log
        store.stat("file")
        assert server.operations() == ["HeadObject"]  # since the last `operations` or `log`, in order of arrival
        server.set(latency=0, rate=None)  # from now on
        server.fail("GetObject", times=2, status=503)  # the next two; after=1 lets one pass; status=0 cuts the body

`SlowS3.log` has key, range, times and If-Match of each request, and `in_flight` tells how many ran at once. Benchmarks
get this module by ``from_tests("servers.slow_s3")``. What the server can do is in slow_s3_server.py.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from servers import S3Server, announced

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTROL = "/_slow/"


class Logged(NamedTuple):
    """A request. operation: as S3's reference names it. range: (first, last) as the header has it, or None.

    nbytes: sent or taken of the body. begin, end: seconds of one clock; `end` is None while the request is served.
    """

    operation: str
    bucket: str
    key: str
    range: tuple[int, int] | None
    if_match: str | None
    status: int
    nbytes: int
    begin: float
    end: float | None


def in_flight(log: list[Logged]) -> int:
    """How many requests of a log were served at the same time at most."""
    now = time.monotonic()
    steps = sorted(step for one in log for step in ((one.begin, 1), (one.end or now, -1)))
    most = running = 0
    for _, step in steps:
        running += step
        most = max(most, running)
    return most


class SlowS3(S3Server):
    """Where the server is, and how it behaves."""

    def set(self, latency: float = 0.0, rate: float | None = None) -> None:
        """Be as slow as this from now on. latency: seconds a request. rate: bytes/s a connection, both ways."""
        self._control("set", {"latency": latency, "rate": rate})

    def fail(self, operation: str, times: int = 1, status: int = 503, after: int = 0) -> None:
        """Let requests of an operation fail. status: the answer's; 0: half of the body is sent, then the end."""
        self._control("fail", {"operation": operation, "times": times, "status": status, "after": after})

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Put an object there, as if it were there all along."""
        self._control(f"put/{bucket}/{quote(key)}", data)

    def put_many(self, bucket: str, keys: list[str], data: bytes) -> None:
        """Put the same bytes under many keys."""
        self._control("many", {"bucket": bucket, "keys": keys, "data": base64.b64encode(data).decode()})

    def log(self) -> list[Logged]:
        """The requests since the last call, in the order in which they came."""
        rows = json.loads(self._control("log", {}))
        return [Logged(*row)._replace(range=row[3] and tuple(row[3])) for row in rows]

    def operations(self) -> list[str]:
        """The operations of `log`."""
        return [one.operation for one in self.log()]

    def _control(self, what: str, body: bytes | dict[str, Any]) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + CONTROL + what, data, method="POST")
        with urllib.request.urlopen(request) as answer:
            found: bytes = answer.read()
            return found


@contextlib.contextmanager
def slow_s3(latency: float = 0.0, rate: float | None = None) -> Iterator[SlowS3]:
    """Start the server; see above."""
    with announced([sys.executable, str(Path(__file__).with_name("slow_s3_server.py"))]) as url:
        server = SlowS3(url, "tester", "a secret of the tests")
        server.set(latency, rate)
        yield server
