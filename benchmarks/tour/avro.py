"""The tour's first chapter: Avro files encrypted on Spark, read split by split, and decrypted.

The three functions on top are what a user would write.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import ags_fast
from ags_fast import AgsReader, AgsWriter
from benchmarks.tour.files import look_at
from benchmarks.tour.steps import count

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from benchmarks.tour.output import Output
    from benchmarks.tour.steps import Steps

# --------------------------------------------------------------------------------------- what a user would write


def encrypt_on_spark(spark, source, names, target, key_file):
    """Encrypt files of the folder `source`; returns (name, length of the encrypted file) for each."""

    def encrypt(names):  # runs on the executors, once for each partition
        key = Path(key_file).read_bytes()  # where it is used: a key in the closure would travel with the job
        for name in names:
            path = Path(target, name + ".ags")
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(Path(source, name), "rb") as plain, AgsWriter(path, key, aad_prefix=name.encode()) as sealed:
                shutil.copyfileobj(plain, sealed, 1 << 20)
            yield name, sealed.file_length  # keep it where the key is kept: a reader must be told

    return spark.sparkContext.parallelize(names, min(len(names), 256)).mapPartitions(encrypt).collect()


def count_on_spark(spark, folder, lengths, key_file, split_size):
    """Read encrypted Avro files split by split; returns (name, number of records) for each split."""
    from ags_fast import avro

    def splits(files):
        key = Path(key_file).read_bytes()
        for name, length in files:
            path = Path(folder, name + ".ags")
            for start, end in avro.splits(path, key, length=length, aad_prefix=name.encode(), split_size=split_size):
                yield name, length, start, end

    def count(parts):  # runs on the executors
        key = Path(key_file).read_bytes()
        for name, length, start, end in parts:
            path = Path(folder, name + ".ags")
            records = avro.read_split(path, key, start, end, length=length, aad_prefix=name.encode())
            yield name, sum(1 for record in records)

    parts = list(splits(lengths))
    return spark.sparkContext.parallelize(parts, min(len(parts), 256)).mapPartitions(count).collect()


def decrypt_on_spark(spark, folder, lengths, target, key_file):
    """Decrypt files. A file appears, for its owner only, when all of it has proved authentic."""

    def decrypt(files):  # runs on the executors
        key = Path(key_file).read_bytes()
        for name, length in files:
            path = Path(target, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            try:
                with (
                    AgsReader(Path(folder, name + ".ags"), key, length=length, aad_prefix=name.encode()) as sealed,
                    open(partial, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as plain,
                ):
                    shutil.copyfileobj(sealed, plain, 1 << 20)
                partial.rename(path)
            finally:
                partial.unlink(missing_ok=True)

    spark.sparkContext.parallelize(lengths, min(len(lengths), 256)).foreachPartition(decrypt)


# -------------------------------------------------------------------------------------------------------- the tour

Facts = dict[str, tuple[int, str, int | None]]  # of files: size in bytes, SHA-256, and number of Avro records


def chapter(spark: SparkSession, steps: Steps, source: Path, out: Output, before: Facts) -> list[tuple[str, int]]:
    """Encrypt, read and decrypt the files of `before`; returns their names and encrypted lengths."""
    names = list(before)
    nbytes = sum(size for size, _, _ in before.values())
    lengths: list[tuple[str, int]]
    with steps.step("A mapPartitions job encrypts them"):
        lengths = encrypt_on_spark(spark, source, names, out.encrypted, out.key_file)
    out.write_manifest(dict(lengths))
    more = sum(length for _, length in lengths) - nbytes
    steps.say(f"AES-128-GCM in blocks of 1 MiB; {more:,} bytes more, {100 * more / max(1, nbytes):.3f} %")
    records = {name: records for name, (_, _, records) in before.items() if records is not None}
    if records:
        _count_records(spark, steps, out, before, records, [row for row in lengths if row[0] in records])
    with steps.step("A third decrypts them"):
        decrypt_on_spark(spark, out.encrypted, lengths, out.decrypted, out.key_file)
    with steps.step("What came out is hashed"):
        after = look_at(spark, out.decrypted, names)
    wrong = [name for name in names if after[name] != before[name]]
    steps.check(
        f"{count(len(names), 'file')}, bit for bit the originals (SHA-256)",
        "".join(f"{name} is not the original" for name in wrong[:1]),
    )
    return lengths


def _count_records(
    spark: SparkSession,
    steps: Steps,
    out: Output,
    before: Facts,
    records: dict[str, int],
    lengths: list[tuple[str, int]],
) -> None:
    nbytes = sum(before[name][0] for name in records)
    split_size = min(64 << 20, max(1 << 20, nbytes // (8 * spark.sparkContext.defaultParallelism)))  # some for each CPU
    with steps.step("Another reads the Avro files split by split, in parallel"):
        counts = count_on_spark(spark, out.encrypted, lengths, out.key_file, split_size)
    read = dict.fromkeys(records, 0)
    for name, number in counts:
        read[name] += number
    wrong = [name for name, number in records.items() if read[name] != number]
    steps.check(
        f"{sum(read.values()):,} records in {count(len(counts), 'split')}, as many as in each original",
        "".join(f"{name}: {read[name]} records of {records[name]}" for name in wrong[:1]),
    )


def damage(steps: Steps, out: Output, lengths: list[tuple[str, int]]) -> None:
    """Damage copies of an encrypted file, and check that a reader notices."""
    name, length = min(lengths, key=lambda row: (row[1] <= EMPTY_NBYTES, row[1]))
    with steps.step("A bit is flipped, and blocks are cut off"):
        noticed = tamper(out.encrypted / f"{name}.ags", out.key_file.read_bytes(), length, name.encode())
    for what, error in noticed:
        steps.check(f"{what}: {error}", "" if error else f"{what}: not detected")


EMPTY_NBYTES = ags_fast.encrypted_length(0)


def tamper(path: Path, key: bytes, length: int, aad_prefix: bytes) -> list[tuple[str, str]]:
    """What was done to copies of an encrypted file, and how a reader took it: no text if it did not notice."""
    sealed = path.read_bytes()
    flipped = bytearray(sealed)
    flipped[length // 2] ^= 1
    last_block = (len(sealed) - 9) // (ags_fast.encrypted_length(1 << 20) - 8)
    cut = sealed[: ags_fast.encrypted_length(last_block << 20) if last_block else 8]
    noticed = []
    for what, changed in (("one bit flipped", flipped), ("the last block cut off", cut)):
        try:
            with AgsReader(changed, key, length=length, aad_prefix=aad_prefix) as reader:
                reader.verify()
            noticed.append((what, ""))
        except ags_fast.IntegrityError as error:
            noticed.append((what, f"{type(error).__name__}, {str(error).partition(':')[0]}"))
    return noticed
