"""The jobs that a hand-written program would run over a folder of files: list, draw and wrap keys, encrypt, open."""

from __future__ import annotations

import functools
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks import peers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import SparkSession

BLOCK = 1 << 20
KEK = b"a key of the plain jobs, 32 byte"


class PlainFile(NamedTuple):
    path: str  # of the source
    target: str
    nbytes: int  # of plaintext
    wrapped: bytes  # its key, by KEK
    prefix: bytes


def plain_plan(source: Path, target: Path) -> list[PlainFile]:
    """The files of a tree, with a new key each, and the folders for them."""
    kek, plan = AESGCM(KEK), []
    for folder, _, names in os.walk(source):
        out = os.path.join(target, os.path.relpath(folder, source))
        os.makedirs(out, exist_ok=True)
        for name in names:
            path, nonce, sealed = os.path.join(folder, name), os.urandom(12), os.path.join(out, name)
            wrapped = nonce + kek.encrypt(nonce, os.urandom(16), sealed.encode())
            plan.append(PlainFile(path, sealed, os.stat(path).st_size, wrapped, os.urandom(16)))
    return plan


def plain_copy(files: Iterable[PlainFile]) -> Iterator[int]:
    window = memoryview(bytearray(BLOCK))
    for file in files:
        reading = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        temporary = f"{file.target}.tmp"
        writing = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        while got := os.readv(reading, [window]):
            os.write(writing, window[:got])
        os.close(reading)
        os.close(writing)
        os.replace(temporary, file.target)
        yield file.nbytes


def plain_encrypt(files: Iterable[PlainFile]) -> Iterator[int]:
    """As fast as Python can: no byte is copied, and a small file takes one read and one write."""
    kek, window = AESGCM(KEK), memoryview(bytearray(BLOCK))
    out = memoryview(bytearray(peers.HEADER + BLOCK + peers.OVERHEAD))
    out[: peers.HEADER] = peers.header(BLOCK)
    sealed = out[peers.HEADER :]
    for file in files:
        aes = AESGCM(kek.decrypt(file.wrapped[:12], file.wrapped[12:], file.target.encode()))
        prefix = file.prefix
        reading = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        temporary = f"{file.target}.tmp"
        writing = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        index, left = 0, file.nbytes
        while left:
            got = os.readv(reading, [window])
            nonce = os.urandom(12)
            sealed[:12] = nonce
            aes.encrypt_into(nonce, window[:got], prefix + index.to_bytes(4, "little"), sealed[12 : got + 28])
            os.write(writing, sealed[: got + 28] if index else out[: got + 36])
            index += 1
            left -= got
        os.close(reading)
        os.close(writing)
        os.replace(temporary, file.target)
        yield file.nbytes


def plain_verify(files: Iterable[PlainFile]) -> Iterator[int]:
    return plain_open(files, False)


def plain_decrypt(files: Iterable[PlainFile]) -> Iterator[int]:
    """Decrypt each file beside its stream."""
    return plain_open(files, True)


def plain_open(files: Iterable[PlainFile], writes: bool) -> Iterator[int]:
    kek, window = AESGCM(KEK), memoryview(bytearray(BLOCK))
    sealed = memoryview(bytearray(peers.HEADER + BLOCK + peers.OVERHEAD))
    for file in files:
        aes = AESGCM(kek.decrypt(file.wrapped[:12], file.wrapped[12:], file.target.encode()))
        prefix = file.prefix
        reading = os.open(file.target, os.O_RDONLY | os.O_CLOEXEC)
        if writes:
            temporary = f"{file.target}.tmp"
            writing = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        index, left, begin = 0, file.nbytes, peers.HEADER
        while left:
            size = min(left, BLOCK)
            end = begin + size + peers.OVERHEAD
            if os.readv(reading, [sealed[:end]]) != end or (begin and sealed[:begin] != peers.header(BLOCK)):
                raise ValueError(f"{file.target} is cut, or no stream")
            nonce, text = sealed[begin : begin + 12], sealed[begin + 12 : end]
            aes.decrypt_into(nonce, text, prefix + index.to_bytes(4, "little"), window[:size])
            if writes:
                os.write(writing, window[:size])
            index += 1
            left -= size
            begin = 0
        if os.fstat(reading).st_size != file.nbytes + peers.HEADER + index * peers.OVERHEAD:
            raise ValueError(f"{file.target} is longer than it was")
        os.close(reading)
        if writes:
            os.close(writing)
            os.replace(temporary, f"{file.target}.plain")
        yield file.nbytes


def plain_job(session: SparkSession, task: Callable[..., Iterator[int]], plan: list[PlainFile]) -> None:
    """In the bins that our job has, too."""
    from ags_fast.engines.base import bins
    from ags_fast.jobs.run import LOCAL_OPEN_COST
    from ags_fast.spark.engine import TARGET_BYTES

    context = session.sparkContext
    files = bins(
        plan,
        target_bytes=TARGET_BYTES,
        open_cost=LOCAL_OPEN_COST,
        least=2 * context.defaultParallelism,
    )
    sizes = context.parallelize(files, len(files)).mapPartitions(functools.partial(_each, task)).collect()
    if sum(sizes) != sum(file.nbytes for file in plan):
        raise AssertionError("the plain job has not done all files")


def plain_pool(op: str, source: str, target: str, processes: int) -> None:
    """Encrypt a tree, or verify one that this has encrypted, in a pool of processes."""
    from multiprocessing import get_context

    if op == "encrypt":
        plan = plain_plan(Path(source), Path(target))
    else:
        plan = pickle.loads(Path(f"{target}.plan").read_bytes())
    parts = [plan[number::processes] for number in range(processes)]
    with get_context("fork").Pool(processes) as pool:
        sizes = pool.map(functools.partial(_sum, plain_encrypt if op == "encrypt" else plain_verify), parts)
    if sum(sizes) != sum(file.nbytes for file in plan):
        raise AssertionError("the plain job has not done all files")
    if op == "encrypt":
        Path(f"{target}.plan").write_bytes(pickle.dumps(plan))


def _sum(task: Callable[..., Iterator[int]], files: list[PlainFile]) -> int:
    return sum(task(files))


def _each(task: Callable[..., Iterator[int]], parts: Iterable[list[PlainFile]]) -> Iterator[int]:
    for part in parts:
        yield from task(part)
