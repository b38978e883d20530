"""Benchmarks over a network: an S3 server on this machine that adds latency and limits each connection.

The clock decides here, because nearly all of the time is waiting. The server, of the project's tests, is a process of
its own. Peers are boto3's transfer manager, and s3fs with one request at a time.
"""

from __future__ import annotations

import functools
import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from ags_fast import AgsReader, AgsWriter, encrypted_length, jobs
from benchmarks import peers
from benchmarks.cases import BLOCK, KEYS, MIB, PREFIX, Bench, nothing, random_data, size_name
from benchmarks.datasets import done, make_tree
from benchmarks.keystore import MASTER_KEY, keystore
from benchmarks.measure import Case, Contest, Group, Row, Run, SkippedError
from benchmarks.parquet import from_tests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = KEYS[0]
BUCKET = "benchmarks"
LARGE = 32 * MIB
LATENCY, RATE = 0.03, 3e6  # seconds a request; bytes a second of each connection
RANGES, RANGE_NBYTES = 8, 64 << 10
SMALL_FILES, SMALL, SMALL_LATENCY = 200, 4 << 10, 0.05
AT_ONCE = 16  # of the peer, too


def network(bench: Bench) -> Group:
    size = bench.size(LARGE)
    cases = [
        Case("network/read", functools.partial(read_one, size), rounds=1 / 4),
        Case("network/ranges", functools.partial(read_ranges, size), rounds=1 / 3),
        Case("network/upload", functools.partial(upload_one, size), rounds=1 / 4),
        Case("network/small", functools.partial(small_files, bench, bench.size(SMALL_FILES)), rounds=1 / 6),
    ]
    return Group("S3 with latency; naive: s3fs, one request at a time; best Py: boto3's transfer manager", cases)


@contextmanager
def slow_server(latency: float, rate: float | None) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The server, and the options for fsspec."""
    with ExitStack() as stack:
        try:
            import boto3  # noqa: F401
            import s3fs  # noqa: F401

            server = stack.enter_context(from_tests("servers.slow_s3").slow_s3(latency, rate))
        except ImportError as error:
            raise SkippedError(f"a module is missing: {error}") from None
        yield server, server.options()


def sealed(size: int) -> bytes:
    data = memoryview(random_data(64 * MIB))[:size]
    return peers.naive_encrypt(KEY, PREFIX, BLOCK, bytearray(data))


def drain(file: Any) -> None:
    window = bytearray(MIB)
    with file:
        while file.readinto(window):
            pass


@contextmanager
def read_one(size: int) -> Iterator[Contest]:
    """Peers get the bytes of the object, and open nothing."""
    with slow_server(LATENCY, RATE) as (server, options):
        import s3fs

        server.put(BUCKET, "one", sealed(size))
        url, client, fs = f"s3://{BUCKET}/one", server.client(), s3fs.S3FileSystem(**options)
        length = encrypted_length(size, BLOCK)
        row = Row("network/read", f"read {size_name(size)}, 30 ms, 3 MB/s", "s")
        yield Contest(
            [row],
            {
                (row.name, "naive"): lambda: drain(fs.open(url, "rb", block_size=4 * MIB)),
                (row.name, "best"): lambda: client.download_fileobj(BUCKET, "one", io.BytesIO()),
                (row.name, "ours"): lambda: drain(
                    AgsReader(url, KEY, length=length, aad_prefix=PREFIX, storage_options=options)
                ),
            },
        )


@contextmanager
def read_ranges(size: int) -> Iterator[Contest]:
    with slow_server(LATENCY, RATE) as (server, options):
        server.put(BUCKET, "one", sealed(size))
        client, step = server.client(), size // RANGES
        reader = AgsReader(
            f"s3://{BUCKET}/one",
            KEY,
            length=encrypted_length(size, BLOCK),
            aad_prefix=PREFIX,
            storage_options=options,
        )
        ranges = [(i * step, RANGE_NBYTES) for i in range(RANGES)]
        row = Row("network/ranges", f"{RANGES} ranges of {size_name(RANGE_NBYTES)}; beside: one block", "ms")

        def one_block() -> None:
            client.get_object(Bucket=BUCKET, Key="one", Range=f"bytes=8-{8 + BLOCK + 27}")["Body"].read()

        with reader:
            yield Contest(
                [row],
                {(row.name, "beside"): one_block, (row.name, "ours"): nothing(reader.read_ranges, ranges)},
            )


@contextmanager
def upload_one(size: int) -> Iterator[Contest]:
    """Peers send the plaintext."""
    with slow_server(LATENCY, RATE) as (server, options):
        import s3fs

        data = bytes(memoryview(random_data(64 * MIB))[:size])
        client, fs = server.client(), s3fs.S3FileSystem(**options)
        client.put_object(Bucket=BUCKET, Key="any", Body=b"")
        row = Row("network/upload", f"write {size_name(size)}, 30 ms, 3 MB/s", "s")

        def ours() -> None:
            url = f"s3://{BUCKET}/ours"
            with AgsWriter(url, KEY, aad_prefix=PREFIX, storage_options=options) as writer:
                writer.write(data)

        def naive() -> None:
            with fs.open(f"{BUCKET}/naive", "wb", max_concurrency=1) as file:
                file.write(data)

        yield Contest(
            [row],
            {
                (row.name, "naive"): naive,
                (row.name, "best"): lambda: client.upload_fileobj(io.BytesIO(data), BUCKET, "best"),
                (row.name, "ours"): ours,
            },
        )


@contextmanager
def small_files(bench: Bench, count: int) -> Iterator[Contest]:
    """Peers hold the key, and do not plan, commit or look at versions: a request for each file."""
    folder = bench.scratch / "network-small"
    with slow_server(SMALL_LATENCY, None) as (server, options):
        source = make_tree(folder / "source", count, SMALL)
        files = {path.name: path.read_bytes() for path in source.rglob("*.avro")}
        kms, client = keystore(folder), server.client()
        shared: dict[str, Any] = {"kms": kms, "engine": jobs.LocalEngine(0), "progress": False}
        dataset = f"s3://{BUCKET}/dataset"
        numbers = iter(range(1_000_000))

        def ours_encrypts() -> None:
            target = f"s3://{BUCKET}/dataset-{next(numbers)}"
            done(jobs.encrypt_files(source, target, wrapping_key_id=MASTER_KEY, storage_options=options, **shared))

        def encrypt(name: str) -> None:
            body = peers.naive_encrypt(KEY, PREFIX, BLOCK, files[name])
            client.put_object(Bucket=BUCKET, Key=f"plain/{name}", Body=body)

        def verify(name: str) -> None:
            peers.naive_decrypt(KEY, PREFIX, client.get_object(Bucket=BUCKET, Key=f"plain/{name}")["Body"].read())

        def all_files(work: Callable[[str], None], at_once: int) -> None:
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(work, files))

        done(jobs.encrypt_files(source, dataset, wrapping_key_id=MASTER_KEY, storage_options=options, **shared))
        all_files(encrypt, AT_ONCE)
        what = f"{count} files of {size_name(SMALL)}, 50 ms"
        rows = [Row(f"network/small/{op}", f"{op} {what}", "s") for op in ("encrypt", "verify")]
        verified = nothing(jobs.verify_files, dataset, storage_options=options, **shared)
        runs: dict[tuple[str, str], Run] = {}
        for row, work, ours in zip(rows, (encrypt, verify), (ours_encrypts, verified), strict=True):
            runs[row.name, "naive"] = functools.partial(all_files, work, 1)
            runs[row.name, "best"] = functools.partial(all_files, work, AT_ONCE)
            runs[row.name, "ours"] = ours
        yield Contest(rows, runs)


GROUPS: dict[str, Callable[[Bench], Group]] = {"network": network}
