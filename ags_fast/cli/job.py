"""What commands on datasets share: the dataset's options, the engine, and the result of a job."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from ags_fast._extras import require
from ags_fast.cli import places
from ags_fast.cli.codes import EXIT_USAGE, ConfigurationError, code_of_rows
from ags_fast.cli.kms import kms, kms_group
from ags_fast.cli.options import DRY_RUN, JSON, OneOf, Option, option, share, values
from ags_fast.cli.pins import PIN
from ags_fast.cli.terminal import complain, escaped, interrupts, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ags_fast.dataset.snapshot import Snapshot
    from ags_fast.jobs.results import JobResult

CONNECT_PORT = 15002
REACH_SECONDS = 20.0

KNOWN = (
    option(
        "--kek-store",
        metavar="URL",
        dest="key_store",
        help="the folder or database with the KEKs of the dataset; default: the dataset itself",
    ),
    PIN,
    option("--min-version", type=int, metavar="N", help="refuse a dataset whose newest version is older"),
)
DATASET = (places.DATASET, kms_group(), *KNOWN, JSON)
ENGINE = (
    option("--engine", choices=("local", "spark"), default="local", help="default: local processes"),
    OneOf(
        (
            option("--spark-master", metavar="URL", help="default: the Spark configuration's"),
            option(
                "--spark-remote", metavar="URL", help="a server of Spark Connect, sc://HOST:PORT; default: SPARK_REMOTE"
            ),
        )
    ),
)
MAINTAIN = (
    option("--verify", type=share, metavar="SHARE", default=0.0, help="verify a share of the files, such as 5%%"),
    DRY_RUN,
)


def known(args: argparse.Namespace) -> dict[str, Any]:
    """What the caller knows of the dataset, and where its keys are: arguments of every function that opens one."""
    names = "key_store", "pin", "min_version"
    return {**{name: getattr(args, name) for name in names}, "storage_options": args.chosen.storage_options}


def opened(args: argparse.Namespace, version: int | None = None) -> Snapshot:
    """The dataset of the command, at a version; None: the newest one."""
    from ags_fast.dataset.access import Access

    return Access.of(args.file, kms(args), version=version, **known(args)).open()


def engine(args: argparse.Namespace) -> Any:
    """The engine of the options, or None for local processes. ConfigurationError if Spark does not start."""
    if args.engine == "local":
        return None
    import logging

    require("pyspark", "--engine spark")
    from pyspark.sql import SparkSession

    from ags_fast.engines.start import is_current_directory_trusted
    from ags_fast.spark import SparkEngine

    # After Ctrl-C py4j logs tracebacks through the root logger. The errors that matter are raised as well.
    logging.getLogger().addFilter(lambda record: f"{os.sep}py4j{os.sep}" not in record.pathname)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else any python3 on the path
    builder = SparkSession.builder.appName(f"ags-fast {args.operation}")
    if args.spark_master:
        os.environ.pop("SPARK_REMOTE", None)
        builder = builder.master(args.spark_master)
    elif remote := args.spark_remote or os.environ.get("SPARK_REMOTE"):
        _check_server(remote)
        builder = builder.remote(remote)
        if not is_current_directory_trusted():  # a server that is started here gives its workers this environment
            os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        session = builder.getOrCreate()
    except Exception as error:
        why = str(error).strip().partition("\n")[0].replace("[JAVA_GATEWAY_EXITED]", "it needs Java 17 or newer.")
        raise ConfigurationError(f"Spark does not start: {why}") from None
    interrupts.take()  # Spark has taken it
    return SparkEngine(session)


def _check_server(remote: str) -> None:
    """Raise ConfigurationError if nothing listens at the URL of a server: pyspark would try for ten minutes."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    url = urlsplit(remote)
    if url.scheme != "sc" or not url.hostname or getproxies():  # a local server, or one that a proxy may reach
        return
    try:
        with socket.create_connection((url.hostname, url.port or CONNECT_PORT), REACH_SECONDS):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigurationError(f"no server of Spark Connect answers at {url.hostname}: {why}") from None


def result(done: JobResult) -> dict[str, Any]:
    """The result of a job as a command shows it. Prints the job's warnings to standard error."""
    for text in done.warnings:
        warn(f"{done.dataset}: {text}")
    skipped = Counter(row.error_class or "" for row in done.rows if row.status == "skipped")
    return {
        "operation": done.op,
        "dataset": done.dataset,
        "job_id": done.job_id,
        "version": done.version,
        "pin": done.pin,
        **done.counts,
        "skipped_by": dict(sorted(skipped.items())),  # skipped files by reason
        "plain_bytes": sum(row.nbytes for row in done.rows if row.status in ("ok", "planned")),
        "seconds": round(done.seconds, 3),
        "kms_calls": {f"{provider} {operation}": n for (provider, operation), n in sorted(done.kms_calls.items())},
        "warnings": done.warnings,
        "rows": [row._asdict() for row in done.rows],
        "exit_code": code_of_rows(row.error_class for row in done.failed),
    }


def confirmed(
    args: argparse.Namespace, job: Callable[..., dict[str, Any]], options: Sequence[Option]
) -> dict[str, Any]:
    """Run a job that removes for good what no command brings back: with --yes, or after a look at what goes."""
    how = values(args, options)
    if args.yes or args.dry_run:
        return job(**how)
    if args.json or sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        args.usage("what this removes cannot be brought back: look at it with --dry-run, and confirm with --yes")
    planned = job(**{**how, "dry_run": True})
    print(args.text(escaped({"operation": args.operation, **planned})), file=sys.stderr)
    if not any(row["status"] == "planned" for row in planned["rows"]):
        return {"exit_code": planned["exit_code"]}
    print("Remove all of this for good? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return job(**how)
    complain("nothing was removed")
    return {"exit_code": EXIT_USAGE}
