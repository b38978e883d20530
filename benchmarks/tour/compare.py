"""The tour's table: ours beside Python as people write it, and beside the best Python."""

from __future__ import annotations

import contextlib
import os
import shutil
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.backends.openssl import backend as cryptography_backend

from ags_fast import AgsCodec
from benchmarks import peers
from benchmarks.measure import Contest, Row, Run, speed
from benchmarks.tour.avro import encrypt_on_spark
from benchmarks.tour.output import write_private
from benchmarks.tour.steps import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pyspark.sql import SparkSession

SIZE = 64 << 20  # bytes that are encrypted between buffers
SPARK_SIZE = 512 << 20  # and by a Spark job, from files to files


def compare(spark: SparkSession, folder: Path, cpus: int, rounds: int) -> list[Row]:
    """Ours, Python as people write it, and the best Python, taking turns."""
    key, prefix, block_size = os.urandom(16), b"one of the files", 1 << 20
    data = bytearray(os.urandom(block_size) * (SIZE // block_size))
    stream = bytearray(AgsCodec(key, aad_prefix=prefix).encrypt(data))
    length, out = len(stream), bytearray(SIZE)

    codec = AgsCodec(key, aad_prefix=prefix, threads=1)
    rows = [Row("seal", "encrypt() returns bytes", nbytes=SIZE), Row("open", "decrypt() returns bytes", nbytes=SIZE)]
    runs: dict[tuple[str, str], Run] = {
        ("seal", "ours"): _run(codec.encrypt, data),
        ("seal", "naive"): _run(peers.naive_encrypt, key, prefix, block_size, data),
        ("open", "ours"): _run(codec.decrypt, stream, length=length),
        ("open", "naive"): _run(peers.naive_decrypt, key, prefix, stream),
    }
    done = Contest(rows, runs).measure(rounds)

    for threads in sorted({1, min(cpus, 2)}):
        codec = AgsCodec(key, aad_prefix=prefix, threads=threads)
        with contextlib.closing(peers.BestPython(key, prefix, block_size, threads)) as best:
            label = f"to a buffer, {count(threads, 'thread')}"
            rows = [
                Row("seal", f"encrypt_into {label}", nbytes=SIZE),
                Row("open", f"decrypt_into {label}", nbytes=SIZE),
            ]
            runs = {
                ("seal", "ours"): _run(codec.encrypt_into, data, stream),
                ("seal", "best"): _run(best.encrypt_into, data, stream),
                ("open", "ours"): _run(codec.decrypt_into, stream, out, length=length),
                ("open", "best"): _run(best.decrypt_into, stream, out),
            }
            done += Contest(rows, runs).measure(rounds)
    return done + compare_on_spark(spark, folder, cpus)


def _run(function: Callable[..., object], *args: Any, **named: Any) -> Run:
    """A call that lets go of its result within the time that is taken."""

    def run() -> None:
        function(*args, **named)

    return run


def compare_on_spark(spark: SparkSession, folder: Path, cpus: int) -> list[Row]:
    """The tour's encrypting job, and one that does the same in plain Python."""
    plain, sealed, key_file = folder / "plain", folder / "sealed", folder / "key"
    plain.mkdir(parents=True)
    write_private(key_file, os.urandom(16))
    size = min(SPARK_SIZE, shutil.disk_usage(folder).free // 8) // (cpus << 20) << 20
    names = [str(i) for i in range(cpus)]
    for name in names:
        with open(plain / name, "wb") as file:
            piece = os.urandom(1 << 20)
            for _ in range(size >> 20):
                file.write(piece)

    def naive(names: Iterable[str]) -> None:
        key = key_file.read_bytes()
        for name in names:
            data = (plain / name).read_bytes()
            peers.naive_write(f"{sealed / name}.ags", key, name.encode(), 1 << 20, memoryview(data))

    def run_naive() -> None:
        spark.sparkContext.parallelize(names, len(names)).foreachPartition(naive)

    def run_ours() -> None:
        encrypt_on_spark(spark, plain, names, sealed, key_file)

    row = Row("spark", f"Spark job, {len(names)} x {size >> 20} MiB, file to file", nbytes=size * len(names))
    return Contest([row], {("spark", "ours"): run_ours, ("spark", "naive"): run_naive}).measure(5)


def print_table(rows: list[Row]) -> None:
    print(f"\n   {'GB/s, AES-128, blocks of 1 MiB':<42}{'ours':>5}{'best Python':>14}{'plain Python':>15}")
    for row in rows:
        cells = [f"{row.shown('ours'):5.1f}"]
        for column in ("best", "naive"):
            if column in row.samples:
                ratio = speed(row.samples["ours"], row.samples[column])[0]
                cells.append(f"{row.shown(column):5.1f} ({ratio:.2f}x)")
            else:
                cells.append("-")
        print("   {:<42}{}{:>14}{:>15}".format(row.label, *cells))
    theirs = f"cryptography {version('cryptography')}, {cryptography_backend.openssl_version_text()}"
    print(f"\n   The best run of each, and in brackets how many times as fast ours was.\n   Python: {theirs}")
