"""What is measured: the codec, the reader and the writer."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ags_fast import AgsCodec, encrypted_length
from benchmarks import peers
from benchmarks.limit import Limit
from benchmarks.measure import Case, Contest, Group, Row, Run

PREFIX = b"benchmarks/00000"  # as long as the AAD prefixes that Iceberg makes
MIB = 1 << 20
BLOCK = MIB


@dataclass(frozen=True)
class Bench:
    """Where and how much. threads: how many to measure with, 1 first. scratch: a folder in memory, if there is one."""

    limit: Limit
    scratch: Path
    threads: list[int]
    quick: bool

    def size(self, nbytes: int) -> int:
        return nbytes // 4 if self.quick else nbytes


def size_name(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes % MIB == 0 else f"{nbytes >> 10} KiB"


def short(nbytes: int) -> str:
    return size_name(nbytes).replace(" ", "")


def threads_name(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


@functools.cache
def random_data(nbytes: int) -> bytearray:
    return bytearray(os.urandom(nbytes))


def touched(nbytes: int) -> bytearray:
    """A buffer whose pages exist: the first use of a page costs more than AES."""
    return bytearray(b"\xff") * nbytes


# ---- codec


def codec(bench: Bench) -> Group:
    cases = []
    for block in (4 << 10, 16 << 10, 64 << 10, 256 << 10, MIB, 4 * MIB):
        for key in (b"k" * 16, b"k" * 32):
            for what, contest in (("encrypt_into", encrypt_into), ("decrypt_into", decrypt_into)):
                name = f"codec/{what}/{short(block)}/aes-{8 * len(key)}"
                cases.append(Case(name, functools.partial(contest, bench, name, block, key)))
    size = size_name(bench.size(64 * MIB))
    return Group(f"encrypt_into and decrypt_into, {size} from buffer to buffer by size of block", cases)


def codec_rows(bench: Bench, name: str, block: int, key: bytes, nbytes: int) -> list[Row]:
    label = f"{name.split('/')[1]} {size_name(block)}, AES-{8 * len(key)}"
    return [Row(f"{name}/{n}t", f"{label}, {threads_name(n)}", nbytes=nbytes) for n in bench.threads]


@contextmanager
def encrypt_into(bench: Bench, name: str, block: int, key: bytes) -> Iterator[Contest]:
    data = random_data(bench.size(64 * MIB))
    out, opened = touched(encrypted_length(len(data), block)), touched(len(data))
    rows = codec_rows(bench, name, block, key, len(data))
    runs: dict[tuple[str, str], Run] = {}
    with ExitStack() as stack:
        for row, n in zip(rows, bench.threads, strict=True):
            nonces = os.urandom(12 * -(-len(data) // block))
            loop = bench.limit.loop(key, PREFIX, block, data, stream=out, nonces=nonces, threads=n)
            best = peers.BestPython(key, PREFIX, block, n)
            stack.callback(best.close)
            ours = AgsCodec(key, aad_prefix=PREFIX, block_size=block, threads=n)
            runs[row.name, "limit"] = loop
            runs[row.name, "best"] = functools.partial(best.encrypt_into, data, out)
            runs[row.name, "ours"] = nothing(ours.encrypt_into, data, out)
        first = rows[0].name
        runs[first, "naive"] = nothing(peers.naive_encrypt, key, PREFIX, block, data)
        if len(key) == 16 and block in (4 << 10, MIB):
            runs[first, "pycryptodome"] = functools.partial(
                peers.pycryptodome_encrypt_into, key, PREFIX, block, data, out
            )

        def check(column: str) -> bool:
            if column == "naive":  # the tests look at what it returns
                return True
            out[:8] = peers.header(block)  # which the bare loop leaves out
            ours.decrypt_into(out, opened, length=len(out))
            out[:] = bytes(len(out))
            return opened == data

        yield Contest(rows, runs, check=check)


@contextmanager
def decrypt_into(bench: Bench, name: str, block: int, key: bytes) -> Iterator[Contest]:
    data = random_data(bench.size(64 * MIB))
    stream = bytearray(AgsCodec(key, aad_prefix=PREFIX, block_size=block).encrypt(data))
    out = touched(len(data))
    rows = codec_rows(bench, name, block, key, len(data))
    runs: dict[tuple[str, str], Run] = {}
    with ExitStack() as stack:
        for row, n in zip(rows, bench.threads, strict=True):
            best = peers.BestPython(key, PREFIX, block, n)
            stack.callback(best.close)
            ours = AgsCodec(key, aad_prefix=PREFIX, threads=n)
            runs[row.name, "limit"] = bench.limit.loop(key, PREFIX, block, out, stream=stream, threads=n)
            runs[row.name, "best"] = functools.partial(best.decrypt_into, stream, out)
            runs[row.name, "ours"] = nothing(ours.decrypt_into, stream, out, length=len(stream))
        first = rows[0].name
        runs[first, "naive"] = nothing(peers.naive_decrypt, key, PREFIX, stream)
        if len(key) == 16 and block in (4 << 10, MIB):
            runs[first, "pycryptodome"] = functools.partial(
                peers.pycryptodome_decrypt_into, key, PREFIX, block, stream, out
            )

        def check(column: str) -> bool:
            right = out == data
            out[:] = bytes(len(out))
            return right or column == "naive"

        yield Contest(rows, runs, check=check)


def whole(bench: Bench) -> Group:
    cases = []
    for key in (b"k" * 16, b"k" * 32):
        for what in ("encrypt", "decrypt"):
            name = f"whole/{what}/1MiB/aes-{8 * len(key)}"
            cases.append(Case(name, functools.partial(encrypt_and_decrypt, bench, name, key)))
    return Group(f"encrypt and decrypt, {size_name(bench.size(64 * MIB))} to new bytes, as naive Python does", cases)


@contextmanager
def encrypt_and_decrypt(bench: Bench, name: str, key: bytes) -> Iterator[Contest]:
    data = random_data(bench.size(64 * MIB))
    stream = AgsCodec(key, aad_prefix=PREFIX).encrypt(data)
    rows = codec_rows(bench, name, BLOCK, key, len(data))
    runs: dict[tuple[str, str], Run] = {}
    for row, n in zip(rows, bench.threads, strict=True):
        ours = AgsCodec(key, aad_prefix=PREFIX, threads=n)
        if "/encrypt/" in name:
            runs[row.name, "ours"] = nothing(ours.encrypt, data)
            runs[row.name, "naive"] = nothing(peers.naive_encrypt, key, PREFIX, BLOCK, data)
        else:
            runs[row.name, "ours"] = nothing(ours.decrypt, stream, length=len(stream))
            runs[row.name, "naive"] = nothing(peers.naive_decrypt, key, PREFIX, stream)
    yield Contest(rows, runs)


def nothing(function: Callable[..., object], *args: object, **kwargs: object) -> Run:
    """The function as a run: what it returns is no time."""

    def run() -> None:
        function(*args, **kwargs)

    return run


GROUPS: dict[str, Callable[[Bench], Group]] = {"codec": codec, "whole": whole}
