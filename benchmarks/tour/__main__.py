"""The program of ``make run``: ``python -m benchmarks.tour``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import ags_fast
from benchmarks.keystore import keystore
from benchmarks.measure import warn_if_busy
from benchmarks.session import SetupError, java_version, spark_session
from benchmarks.tour import avro, compare, dataset, frames, iceberg, parquet, rotation
from benchmarks.tour.files import MADE, OTHERS, files_in, hidden, look_at, make_orders, make_others, names_in
from benchmarks.tour.output import Output, print_end
from benchmarks.tour.steps import JobError, Steps, count

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

DESCRIPTION = (
    "Avro files encrypted on Spark, read split by split, decrypted; a dataset; Parquet; DataFrames; an Iceberg table "
    "that Java shares; and how fast that is."
)
ROTATED = 12  # files in each dataset whose keys are rotated
PARQUET_ROWS = 2  # for each of the orders, in the Parquet file


def tour(
    source: Path | None, output: Path | None, records: int, rounds: int, scratch: Path, kill: bool = False
) -> bool:
    """Run all chapters; returns whether all comparisons came out equal."""
    names = files_in(source) if source else [*MADE, *OTHERS]
    java = java_version()
    root = output or scratch / "output"
    out = Output(root, names)
    where = "in a temporary folder, which is removed in the end" if output is None else f"in {output}"
    print(f"ags_fast {ags_fast.__version__}, {ags_fast.openssl_version()}, {where}\n", flush=True)
    steps = Steps()
    with contextlib.ExitStack() as stack:
        with steps.step("Spark starts"):
            classes = parquet.jvm_classes()  # which the first time takes some seconds to compile
            spark = stack.enter_context(spark_session(scratch / "spark", kill, classes=classes))
        steps.spark = spark
        cpus = spark.sparkContext.defaultParallelism
        steps.say(f"Spark {spark.version} on Java {java}, {count(cpus, 'task')} at a time")
        if source is None:
            source = scratch / "plain"
            with steps.step(f"{records:,} orders are written to Avro files"):
                make_orders(spark, source, records)
                make_others(source)
        with steps.step("The originals are hashed, and their records counted"):
            before = look_at(spark, source, names)
        avro_files = sum(found is not None for _, _, found in before.values())
        nbytes = sum(size for size, _, _ in before.values())
        steps.say(f"{count(len(names), 'file')}, {avro_files} of them Avro, {nbytes / 1e6:,.1f} MB")

        lengths = avro.chapter(spark, steps, source, out, before)
        dataset.chapter(spark, steps, source, root, kill, same_as(spark, before))
        kms = keystore(root)
        parquet.chapter(spark, steps, kms, scratch / "parquet", PARQUET_ROWS * records, rounds, classes)
        frames.chapter(spark, steps, kms, scratch / "frames", records)
        rotation.chapter(spark, steps, kms, source, scratch / "rotation", ROTATED)
        iceberg.chapter(steps, scratch / "iceberg")
        avro.damage(steps, out, lengths)
        if rounds:
            with steps.step("Side by side with pure Python"):
                rows = compare.compare(spark, scratch / "table", cpus, rounds)
            compare.print_table(rows)
    print_end(out if output else None, lengths, {name: size for name, (size, _, _) in before.items()})
    return not steps.failed


def same_as(spark: SparkSession, before: avro.Facts) -> Callable[[Path], str]:
    """A function that says what is wrong with a folder that should be a copy, without files that datasets leave out."""

    def equal(folder: Path) -> str:
        found = look_at(spark, folder, present) if (present := names_in(folder)) else {}
        expected = {name: facts for name, facts in before.items() if not hidden(name)}
        wrong = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
        return "".join(f"{name} is not the original" for name in wrong[:1])

    return equal


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tour", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--input", type=Path, metavar="DIR", help="files to encrypt instead of orders made on the spot")
    parser.add_argument("--output", type=Path, metavar="DIR", help="a new or empty folder to keep the results in")
    parser.add_argument(
        "--kill", action="store_true", help="on a cluster of two executors: kill one of them, and a Python worker"
    )
    parser.add_argument("--records", type=int, default=300_000, metavar="N", help="orders to make (default 300,000)")
    parser.add_argument(
        "--rounds", type=int, default=9, metavar="N", help="of the comparison; 0 leaves it out (default 9)"
    )
    args = parser.parse_args(argv)
    try:
        if args.input:
            args.input = args.input.resolve()
            if not args.input.is_dir():
                raise SetupError(f"{args.input} is not a folder")
        if args.output:
            args.output = args.output.resolve()
        if (
            args.input
            and args.output
            and os.path.commonpath([args.input, args.output]) in map(str, (args.input, args.output))
        ):
            raise SetupError(f"{args.output} and {args.input}: neither may be inside the other")
        warn_if_busy()
        with tempfile.TemporaryDirectory(prefix="ags-tour-") as scratch:
            return 0 if tour(args.input, args.output, args.records, args.rounds, Path(scratch), args.kill) else 1
    except SetupError as error:
        print(f"tour: {error}", file=sys.stderr)
        return 2
    except JobError as error:
        print(f"tour: a Spark job failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tour: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
