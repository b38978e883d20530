"""The targets, row by row, and whether they were reached."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import Row, speed

Value = Callable[[Row, dict[str, Row]], tuple[float, float] | None]  # best and median


def faster_than(column: str) -> Value:
    return lambda row, rows: speed(row.samples["ours"], row.samples[column]) if column in row.samples else None


def faster_than_thread(threads: int) -> Value:
    def value(row: Row, rows: dict[str, Row]) -> tuple[float, float] | None:
        other = rows.get(re.sub(r"\d+t$", f"{threads}t", row.name))
        return speed(row.samples["ours"], other.samples["ours"]) if other else None

    return value


def cost_of(column: str) -> Value:
    """Time or memory as a multiple of the column's."""
    return lambda row, rows: speed(row.samples[column], row.samples["ours"]) if column in row.samples else None


def cost_of_row(name: str) -> Value:
    """Time as a multiple of another row's."""

    def value(row: Row, rows: dict[str, Row]) -> tuple[float, float] | None:
        return speed(rows[name].samples["ours"], row.samples["ours"]) if name in rows else None

    return value


def milliseconds_over(column: str) -> Value:
    def value(row: Row, rows: dict[str, Row]) -> tuple[float, float]:
        ours, other = row.samples["ours"], row.samples[column]
        return (min(ours) - min(other)) * 1e3, (statistics.median(ours) - statistics.median(other)) * 1e3

    return value


@dataclass(frozen=True)
class Target:
    """A ratio to be reached. rows: a regular expression for the names of the rows that must reach it."""

    what: str
    rows: str
    bound: float
    value: Value
    less: bool = False  # the bound is an upper one
    unit: str = ""

    def judge(self, rows: Iterable[Row]) -> dict[str, Any]:
        """The worst best and the worst median of its rows, and whether both reach the bound."""
        by_name = {row.name: row for row in rows if "ours" in row.samples}
        values = {
            name: value
            for name, row in by_name.items()
            if re.fullmatch(self.rows, name) and (value := self.value(row, by_name)) is not None
        }
        verdict = {"what": self.what, "target": f"{'<=' if self.less else '>='} {self.bound:g}{self.unit}"}
        if not values:
            return verdict | {"verdict": "not measured"}
        worst = max if self.less else min
        best, median = worst(v[0] for v in values.values()), worst(v[1] for v in values.values())
        reached = [v <= self.bound if self.less else v >= self.bound for v in (best, median)]
        return verdict | {
            "bound": self.bound,
            "less": self.less,
            "best": best,
            "median": median,
            "verdict": "pass"
            if all(reached)
            else "MISSED"
            if not any(reached)
            else "best only"
            if reached[0]
            else "median only",
            "worst_row": worst(values, key=lambda name: values[name][1]),
            "rows": len(values),
        }


TARGETS = [
    Target("codec, 1 MiB blocks, 1 thread / EVP loop", r"codec/.*/1MiB/.*/1t", 0.98, faster_than("loop")),
    Target("codec, 1 MiB blocks, 1 thread / best Python", r"codec/.*/1MiB/.*/1t", 1.0, faster_than("best")),
    Target("codec, 1 MiB blocks, 2 threads / EVP loop", r"codec/.*/1MiB/.*/2t", 0.95, faster_than("loop")),
    Target("codec, 1 MiB blocks, 2 threads / best Python", r"codec/.*/1MiB/.*/2t", 1.05, faster_than("best")),
    Target("codec, 64 KiB blocks, 1 thread / EVP loop", r"codec/.*/64KiB/.*/1t", 0.97, faster_than("loop")),
    Target("codec, 4 KiB blocks, 1 thread / EVP loop", r"codec/.*/4KiB/.*/1t", 0.9, faster_than("loop")),
    Target("codec, 4 KiB blocks, 2 threads / EVP loop", r"codec/.*/4KiB/.*/2t", 0.9, faster_than("loop")),
    Target("codec, 4 KiB blocks, 2 threads / best Python", r"codec/.*/4KiB/.*/2t", 3, faster_than("best")),
    Target("kernel, VAES, 64 and 512 bytes / EVP", r"kernel/vaes256/\w+/(64|512)B", 2.5, faster_than("loop")),
    Target("kernel, VAES, 1 KiB to 1 MiB / EVP", r"kernel/vaes256/\w+/\d[KM]iB", 1.9, faster_than("loop")),
    Target("codec, VAES, 1 MiB blocks, 1 thread / EVP loop", r"kernel/vaes256/.*/1t", 1.9, faster_than("loop")),
    Target("kernel, AVX-512, 64 bytes / EVP", r"kernel/vaes512/.*/64B", 3, faster_than("loop")),
    Target("kernel, AVX-512, 1 KiB / EVP", r"kernel/vaes512/.*/1KiB", 1.4, faster_than("loop")),
    Target("kernel, AVX-512, all sizes / EVP", r"kernel/vaes512/.*", 0.97, faster_than("loop")),
    Target("kernel, AES-NI, 64 bytes / EVP", r"kernel/vaes128/.*/64B", 3, faster_than("loop")),
    Target("kernel, AES-NI, all sizes / EVP", r"kernel/vaes128/.*", 0.9, faster_than("loop")),
    Target("encrypt() to bytes, 1 thread / naive Python", r"whole/encrypt/.*/1t", 3, faster_than("naive")),
    Target("encrypt() to bytes, 2 threads / naive Python", r"whole/encrypt/.*/2t", 3, faster_than("naive")),
    Target("reader, 64 MiB at a time, 1 thread / EVP loop", r"read/64MiB/.*/1t", 0.95, faster_than("loop")),
    Target("reader, 64 MiB at a time, 2 threads / EVP loop", r"read/64MiB/.*/2t", 0.95, faster_than("loop")),
    Target("reader, 64 MiB at a time, 2 threads / 1 thread", r"read/64MiB/.*/2t", 1.6, faster_than_thread(1)),
    Target("1 MiB reads, 2 threads / EVP loop", r"read/1MiB/.*/2t", 0.85, faster_than("loop")),
    Target("libraries read a stream, 2 threads / plain files", r"callers/.*/2t", 0.85, faster_than("beside")),
    Target("writer, 64 KiB writes, 1 thread / EVP loop", r"write/64KiB/.*/1t", 0.9, faster_than("loop")),
    Target("writer, 64 KiB writes, 2 threads / EVP loop", r"write/64KiB/.*/2t", 0.9, faster_than("loop")),
    Target("open, read, close of 8 KiB / Python stream class", r"small/8KiB/.*", 1.5, faster_than("best")),
    Target("cached 100-byte read_at / plain buffered file", r"cached/.*", 1.0, cost_of("beside"), True, " time"),
    Target("memory / (threads + 2) blocks + 8 MiB", r"memory/.*", 1.0, cost_of("beside"), True),
    Target("Spark encrypts 16 large files / plain copy", r"datasets/spark/encrypt", 0.8, faster_than("beside")),
    Target("Spark encrypts 16 large files / plain Python", r"datasets/spark/encrypt", 0.95, faster_than("best")),
    Target("Spark verifies 16 large files / twice one process", r"datasets/spark/verify.*", 0.9, faster_than("beside")),
    Target("Spark verifies 16 large files / plain Python", r"datasets/spark/verify.*", 0.95, faster_than("best")),
    Target("a 4 KiB file, one process / plain Python", r"datasets/small/.*", 1.0, faster_than("best")),
    Target("a 4 KiB file, whole Spark job / plain Python", r"datasets/small-spark/.*", 1.0, faster_than("best")),
    Target("memory, decrypt of a file / binaryFile recipe", r"datasets/memory/.*", 0.3, cost_of("beside"), True),
    Target("local engine, large files / cp -r", r"datasets/local/.*", 0.7, faster_than("beside")),
    Target("Spark encrypts, a GiB / plain Python", r"slopes/spark/encrypt/slope", 1.0, faster_than("best")),
    Target("Spark verifies, a GiB / plain Python", r"slopes/spark/verify/slope", 1.0, faster_than("best")),
    Target("Spark verifies, a GiB / twice one process", r"slopes/spark/verify/slope", 0.9, faster_than("beside")),
    Target("local jobs in a new process, a GiB / a pool", r"slopes/local/.*/slope", 1.0, faster_than("best")),
    Target("S3, read an object / boto3's transfer manager", r"network/read", 1.0, faster_than("best")),
    Target("S3, 8 ranges / one request", r"network/ranges", 2.5, cost_of("beside"), True, " time"),
    Target("S3, write an object / boto3's transfer manager", r"network/upload", 1.0, faster_than("best")),
    Target("S3, small files / one request at a time", r"network/small/.*", 2.5, faster_than("naive")),
    Target("Parquet: encrypt / pyarrow read+write", r"parquet/encrypt/.*", 10, faster_than("naive")),
    Target("Parquet: encrypt, 2 threads / warm parquet-java", r"parquet/encrypt/2t", 2.5, faster_than("best")),
    Target("Parquet: encrypt / EVP loop", r"parquet/encrypt/.*", 1.3, cost_of("loop"), True, " time"),
    Target("Parquet: decrypt / pyarrow read+write", r"parquet/decrypt/.*", 10, faster_than("naive")),
    Target("Parquet: re-key / pyarrow read+write", r"parquet/rekey/.*", 9, faster_than("naive")),
    Target("Parquet: encrypt 1 of 8 columns / cp", r"parquet/one-column/.*", 1.4, cost_of("beside"), True, " time"),
    Target("Parquet: verify / EVP loop", r"parquet/verify/.*", 0.9, faster_than("loop")),
    Target("Parquet: verify / Python over cryptography", r"parquet/verify/1t", 4, faster_than("naive")),
    Target("Parquet: page checksums / without", r"parquet/checksums/.*", 1.5, cost_of("beside"), True, " time"),
    Target("Parquet: 8 KiB pages / two messages of EVP", r"parquet/pages/.*", 1.25, cost_of("loop"), True, " time"),
    Target(
        "Parquet: pyarrow reads the view / a plain file", r"parquet/view/.*", 1.15, cost_of("beside"), True, " time"
    ),
    Target("Parquet: opened for 1 column / it + 64 KiB", r"parquet/projection", 1.0, cost_of("beside"), True),
    Target("Parquet: open 5,000 columns / read_metadata", r"parquet/footer", 0.29, cost_of("beside"), True, " time"),
    Target("Parquet: write_table / pyarrow's, plain", r"parquet/write_table/.*", 1.1, cost_of("beside"), True, " time"),
    Target(
        "Parquet: 1 KiB chunks, 2 threads / 1 thread, CPU",
        r"parquet/wide/.*/2t",
        0.9,
        faster_than_thread(1),
    ),
    Target(
        "Parquet: write_table, 1 KiB chunks / pyarrow's, CPU",
        r"parquet/wide/write_table/.*",
        1.3,
        cost_of("beside"),
        True,
        " time",
    ),
    Target(
        "Parquet: encrypt, decrypt, re-key 1 KiB chunks / pyarrow's plain write_table, CPU",
        r"parquet/wide/(encrypt|decrypt|rekey)/.*",
        1.0,
        cost_of("beside"),
        True,
        " time",
    ),
    Target("R2: DEKs rewrapped / EVP loop", r"rotation/kek/crypto", 2, cost_of("loop"), True, " time"),
    Target(
        "R2: a DEK of 1,000,000 / of 100,000, whole job",
        r"rotation/kek/job/all",
        1.3,
        cost_of_row("rotation/kek/job/tenth"),
        True,
        " time",
    ),
    Target("R1, KMS of 5 ms: 4 calls at once / 1", r"rotation/kek/single/kms-5ms/4t", 3.5, faster_than_thread(1)),
    Target("R1, KMS of 5 ms: 16 calls at once / 1", r"rotation/kek/single/kms-5ms/16t", 12, faster_than_thread(1)),
    Target("one of 100,000 KEKs looked up / 300 kB read", r"rotation/mek/lookup", 1.0, cost_of("beside"), True),
    Target("Iceberg: full scan / in plaintext, CPU", r"iceberg/read/scan", 1.15, cost_of("beside"), True, " time"),
    Target("Iceberg: one column / in plaintext, CPU", r"iceberg/read/column", 1.12, cost_of("beside"), True, " time"),
    Target("Iceberg: bytes read for it / and 64 KiB a file", r"iceberg/read/bytes", 1.0, cost_of("beside"), True),
    Target(
        "Iceberg: 0.1 % by a filter / in plaintext, CPU", r"iceberg/read/filter", 1.2, cost_of("beside"), True, " time"
    ),
    Target(
        "Iceberg: plan 40 manifests / in plaintext, CPU", r"iceberg/small/plan", 1.2, cost_of("beside"), True, " time"
    ),
    Target(
        "Iceberg: 40 small appends / in plaintext, CPU", r"iceberg/small/append", 1.3, cost_of("beside"), True, " time"
    ),
    Target("Iceberg: rekey data / file by file, CPU", r"iceberg/move/rekey", 1.2, cost_of("beside"), True, " time"),
    Target("Iceberg: encrypt / file by file, CPU", r"iceberg/move/encrypt", 1.2, cost_of("beside"), True, " time"),
    Target("ags_parquet reads / a plain Python data source", r"frames/read/.*", 0.95, faster_than("beside")),
    Target("ags_parquet writes / a plain Python data source", r"frames/write/parquet", 0.95, faster_than("beside")),
    Target("ags_avro writes / a plain Python data source", r"frames/write/avro", 0.95, faster_than("beside")),
    Target("ags_avro reads / a plain Python data source", r"frames/avro/.*", 0.95, faster_than("beside")),
    Target("ags_avro reads / mapPartitions over fastavro", r"frames/avro/.*", 5, faster_than("naive")),
    Target("CSV through ags:// / plain files", r"frames/files/csv/.*", 1.25, cost_of("beside"), True, " time"),
    Target(
        "Parquet through ags:// / plain files",
        r"frames/files/parquet/(pandas|pyarrow)",
        1.25,
        cost_of("beside"),
        True,
        " time",
    ),
    Target("import ags_fast over bare Python", r"import/.*", 15, milliseconds_over("beside"), True, " ms"),
    Target("--version, --help over bare Python", r"start/(version|help)", 60, milliseconds_over("beside"), True, " ms"),
    Target("ls, cat / import pyarrow.parquet", r"start/(ls|cat)", 1.5, cost_of("beside"), True, " time"),
    Target("lines of a file / Python's open", r"lines/.*", 3, cost_of("beside"), True, " time"),
]
