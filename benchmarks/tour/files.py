"""The tour's files: orders in Avro, and what lies beside such files in a real tree."""

from __future__ import annotations

import hashlib
import os
import random
from typing import TYPE_CHECKING, Any

from benchmarks.session import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

ORDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "placed_at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "status", "type": {"type": "enum", "name": "Status", "symbols": ["NEW", "PAID", "SENT", "RETURNED"]}},
        {
            "name": "customer",
            "type": {
                "type": "record",
                "name": "Customer",
                "fields": [
                    {"name": "id", "type": "long"},
                    {"name": "email", "type": "string"},
                    {"name": "country", "type": {"type": "string", "doc": "ISO 3166"}},
                ],
            },
        },
        {
            "name": "lines",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Line",
                    "fields": [
                        {"name": "sku", "type": "string"},
                        {"name": "quantity", "type": "int"},
                        {"name": "price", "type": "double"},
                    ],
                },
            },
        },
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}
MADE = [f"2026/{month:02}/orders.avro" for month in range(1, 9)]
OTHERS = {f"2026/{month:02}/scans/{n}.jpg": 4 << 20 for month in range(1, 4) for n in range(8)}  # bytes
OTHERS |= {"2026/README.txt": 1000, "2026/empty": 0, "2026/_SUCCESS": 0, "2026/01/.orders.avro.crc": 12}


def make_orders(spark: SparkSession, folder: Path, count: int) -> None:
    """Write `count` orders to the MADE files."""
    schema = ORDER
    parts = [(name, count * i // len(MADE), count * (i + 1) // len(MADE)) for i, name in enumerate(MADE)]

    def orders(begin: int, end: int) -> Iterator[dict[str, Any]]:
        draw = random.Random(begin)
        for number in range(begin, end):
            customer = int(draw.paretovariate(1.2) * 1000) % 100_000
            yield {
                "id": number,
                "placed_at": 1_767_225_600_000 + number * 997,
                "status": draw.choice(schema["fields"][2]["type"]["symbols"]),
                "customer": {
                    "id": customer,
                    "email": f"{customer:x}@example.org",
                    "country": draw.choice(("AT", "BR", "DE", "FR", "IN", "JP", "NG", "US")),
                },
                "lines": [
                    {
                        "sku": f"SKU-{draw.getrandbits(32):08x}",
                        "quantity": 1 + draw.getrandbits(2),
                        "price": draw.randrange(99, 99_999) / 100,
                    }
                    for _ in range(1 + draw.getrandbits(2))
                ],
                "note": "leave it with the neighbour, please" if draw.random() < 0.1 else None,
            }

    def write(parts: Iterable[tuple[str, int, int]]) -> None:
        import fastavro

        for name, begin, end in parts:
            path = folder / name
            path.parent.mkdir(parents=True)
            with open(path, "wb") as file:
                fastavro.writer(file, schema, orders(begin, end), codec="null")

    spark.sparkContext.parallelize(parts, len(parts)).foreachPartition(write)


def make_others(folder: Path) -> None:
    """What lies beside Avro files in a real tree."""
    for name, nbytes in OTHERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(nbytes))


def look_at(spark: SparkSession, folder: Path, names: list[str]) -> dict[str, tuple[int, str, int | None]]:
    """Size in bytes and SHA-256 of files, and how many records fastavro counts in those that are Avro."""

    def look(names: Iterable[str]) -> Iterator[tuple[str, tuple[int, str, int | None]]]:
        import fastavro

        for name in names:
            with open(folder / name, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                size = file.tell()
                records = None
                file.seek(0)
                if name.endswith(".avro") and fastavro.is_avro(file):
                    file.seek(0)
                    try:
                        records = sum(block.num_records for block in fastavro.block_reader(file))
                    except Exception as error:
                        raise ValueError(f"{name} is not a complete Avro file: {error}") from error
            yield name, (size, digest, records)

    return dict(spark.sparkContext.parallelize(names, min(len(names), 256)).mapPartitions(look).collect())


def files_in(folder: Path) -> list[str]:
    """Regular files of a folder and its folders, relative to it. Links are not followed."""
    names = [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    ]
    for name in names:
        if not name.isprintable():
            raise SetupError(f"{folder}: the name {name!r} is not printable UTF-8, and here names are AAD prefixes")
    if not names:
        raise SetupError(f"{folder} has no files: give a folder with *.avro files, or no INPUT to have some made")
    return names


def names_in(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


def hidden(name: str) -> bool:
    """What a dataset leaves out: markers and checksums."""
    return any(part[0] in "._" and "=" not in part for part in name.split("/")) or name.endswith(".crc")
