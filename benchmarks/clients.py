"""Benchmarks of the client of S3: the store of ags_fast, which is over s3fs, beside obstore.

Nothing is encrypted. The clock is that of a server with latency, the CPU time that of one without. obstore is no
dependency of the project: without it, the rows are skipped.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ags_fast.fs import Store
from benchmarks.cases import MIB, Bench, random_data
from benchmarks.measure import Case, Contest, Group, Row, Run, SkippedError
from benchmarks.network import AT_ONCE, BUCKET, LARGE, LATENCY, RANGE_NBYTES, RANGES, RATE, drain, slow_server

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = "clients"
FILES, FILE_NBYTES = 80, 4 << 10
STEP, REQUESTS = 4 * MIB, 8  # of the peer that reads one object by ranges, as the store does
PART = 8 * MIB
Works = dict[str, Callable[[], Any]]


def clients(bench: Bench) -> Group:
    size = bench.size(LARGE)
    cases = [
        Case("clients/clock", functools.partial(works_of, size, "clock"), rounds=1 / 4),
        Case("clients/cpu", functools.partial(works_of, size, "cpu"), rounds=1),
    ]
    return Group("clients of S3; best Py: obstore", cases)


@contextmanager
def works_of(size: int, what: str) -> Iterator[Contest]:
    with slow_server(LATENCY, RATE) as (server, options):
        if what == "cpu":
            server.set()
        data = bytes(memoryview(random_data(64 * MIB))[:size])
        server.put(BUCKET, f"{FOLDER}/one", data)
        server.put_many(BUCKET, [f"{FOLDER}/{i}" for i in range(FILES)], data[:FILE_NBYTES])
        labels = {
            "read": f"read {size // MIB} MiB",
            "ranges": f"{RANGES} ranges of {RANGE_NBYTES >> 10} KiB at once",
            "small": f"read {FILES} files of {FILE_NBYTES >> 10} KiB, {AT_ONCE} at once",
            "upload": f"write {size // MIB} MiB, 4 parts at once",
            "create": f"write {FILES} files of {FILE_NBYTES >> 10} KiB, {AT_ONCE} at once",
        }
        unit = "ms" if what == "cpu" else "s"
        rows = [Row(f"clients/{what}/{name}", f"{label}, {what}", unit) for name, label in labels.items()]
        runs: dict[tuple[str, str], Run] = {}
        for column, works in (("best", of_obstore(options, data)), ("ours", of_store(options, data))):
            for row in rows:
                work = works[row.name.rpartition("/")[2]]
                runs[row.name, column] = functools.partial(_spent, work, what)
        yield Contest(rows, runs)


def _spent(work: Callable[[], Any], what: str) -> float:
    now = time.process_time if what == "cpu" else time.perf_counter
    begun = now()
    work()
    return now() - begun


def _starts(size: int) -> list[int]:
    return [i * (size // RANGES) for i in range(RANGES)]


def _all(work: Callable[[int], Any], count: int = FILES, at_once: int = AT_ONCE) -> list[Any]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(work, range(count)))


def of_store(options: dict[str, Any], data: bytes) -> Works:
    store = Store(f"s3://{BUCKET}/{FOLDER}", options)
    entry = store.stat("one")

    def ranges() -> None:
        with store.open_seekable("one", entry) as file:
            wanted = [(start, start + RANGE_NBYTES) for start in _starts(len(data))]
            with file.expect(wanted):
                for start, _ in wanted:
                    file.seek(start)
                    file.read(RANGE_NBYTES)

    def upload() -> None:
        with store.begin("new") as new:
            for start in range(0, len(data), MIB):
                new.write(memoryview(data)[start : start + MIB])
            new.publish()

    return {
        "read": lambda: drain(store.open_once("one")),
        "ranges": ranges,
        "small": lambda: _all(lambda i: store.read_small(f"{i}", FILE_NBYTES)),
        "upload": upload,
        "create": lambda: _all(lambda i: store.write_small(f"new/{i}", data[:FILE_NBYTES])),
    }


def of_obstore(options: dict[str, Any], data: bytes) -> Works:
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError as error:
        raise SkippedError(f"a module is missing: {error}") from None
    store = S3Store(
        BUCKET,
        prefix=FOLDER,
        endpoint=options["endpoint_url"],
        access_key_id=options["key"],
        secret_access_key=options["secret"],
        region=options["client_kwargs"]["region_name"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )

    def read() -> None:
        size = obstore.head(store, "one")["size"]

        def one(i: int) -> Any:
            return obstore.get_range(store, "one", start=i * STEP, length=min(STEP, size - i * STEP))

        _all(one, -(-size // STEP), REQUESTS)

    starts = _starts(len(data))
    return {
        "read": read,
        "ranges": lambda: obstore.get_ranges(store, "one", starts=starts, lengths=[RANGE_NBYTES] * RANGES),
        "small": lambda: _all(lambda i: obstore.get(store, f"{i}").bytes()),
        "upload": lambda: obstore.put(store, "new", data, use_multipart=True, chunk_size=PART, max_concurrency=4),
        "create": lambda: _all(lambda i: obstore.put(store, f"new/{i}", data[:FILE_NBYTES], use_multipart=False)),
    }


GROUPS: dict[str, Callable[[Bench], Group]] = {"clients": clients}
