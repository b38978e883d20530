"""``ags-fast encrypt|decrypt|verify|rekey|rm|sweep|ls|cat|inspect``: datasets, from a shell."""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from ags_fast import jobs
from ags_fast._arguments import EXIT_FAILED, ConfigurationError, OutputClosedError, code_of_rows
from ags_fast._terminal import interrupts, warn
from ags_fast.ags1 import DEFAULT_BLOCK_SIZE
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.names import VERSIONS, numbered
from ags_fast.dataset.plan import open_plans
from ags_fast.dataset.policy import Policy
from ags_fast.dataset.versions import version_numbers
from ags_fast.errors import FormatError
from ags_fast.fs import Store
from ags_fast.jobs.encryption import FORMATS
from ags_fast.jobs.results import JobResult, shown_counts
from ags_fast.keys.chain import sha256
from ags_fast.keys.command import add_kms_options, kms_properties, pairs
from ags_fast.keys.envelope import Document, document_nbytes
from ags_fast.keys.kms import load_kms
from ags_fast.keys.resolver import claimed_keys, for_columns

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

__all__ = ["add_commands", "add_dataset_options", "add_engine_options", "engine", "kms", "known", "opened", "result"]

SHOWN_FAILURES = 20


def add_commands(groups: argparse._SubParsersAction[argparse.ArgumentParser], size: Callable[[str], int]) -> None:
    def add(name: str, run: Callable[[argparse.Namespace], dict[str, Any]], text: str) -> argparse.ArgumentParser:
        command = groups.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run, operation=name, text=as_text, usage=command.error)
        command.add_argument("file", metavar="SRC" if name == "encrypt" else "DATASET")
        return command

    encrypt = add(
        "encrypt",
        _encrypt,
        "Encrypt the files under SRC into DATASET, a folder or a URL. Left out, and said, are hidden files (names with "
        "a leading . or _, checksums x.crc), links that lead out of SRC, pipes, sockets, devices, and empty folders. "
        "Kept are names, content, permission bits and times; lost are owners, ACLs, extended attributes, and that "
        "files were hard links or sparse.",
    )
    encrypt.add_argument("dataset", metavar="DATASET")
    decrypt = add(
        "decrypt", _decrypt, "Decrypt DATASET into the folder DST. Files get the permission bits and times they had."
    )
    decrypt.add_argument("dst", metavar="DST")
    verify = add("verify", _verify, "Check every tag of every file of DATASET, and that no file is missing.")
    rekey = add("rekey", _rekey, "Write the files of DATASET anew, under new data keys.")
    sweep = add("sweep", _sweep, "Remove what dead jobs have left in DATASET; with a KMS their plans and files too.")
    rm = add("rm", _rm, "Make a version of DATASET without some files. They are gone when older versions are expired.")
    rm.add_argument("paths", metavar="PATH", nargs="+", help="a pattern of their paths, as they were under SRC")
    rm.add_argument("--dry-run", action="store_true", help="show what would be removed, and which versions have it")
    ls = add("ls", _ls, "List the files of DATASET.")
    cat = add("cat", _cat, "Decrypt one file of DATASET to standard output.")
    cat.add_argument("path", metavar="PATH", help="as it was under SRC")
    inspect = add("inspect", _inspect, "Show versions, keys and open jobs of DATASET; without a KMS, unauthenticated.")

    for command in (encrypt, decrypt, verify, rekey, sweep, rm, ls, cat, inspect):
        add_dataset_options(command)
    for command in (encrypt, decrypt, verify, rekey):
        add_engine_options(command)
        command.add_argument("--max-failures", type=int, metavar="N", help="stop after more failed files than that")
    for command in (decrypt, verify, rekey):
        command.add_argument(
            "--path", metavar="PATTERN", action="append", dest="paths", help="only such files; may be repeated"
        )
    for command in (decrypt, verify, ls, cat):
        command.add_argument("--version", type=int, metavar="N", help="default: the newest")
    verify.add_argument("--strict", action="store_true", help="exit with 1 if there are files that no version knows")
    for command in (encrypt, decrypt, rekey):
        command.add_argument("--dry-run", action="store_true", help="show what would be done")
        command.add_argument("--resume", choices=("length", "verify"), help="continue a job that died")
        command.add_argument("--no-fsync", action="store_true", help="do not wait for the disk")
    for command in (encrypt, rekey):
        required = command is encrypt
        command.add_argument("--wrapping-key-id", metavar="ID", required=required, help="the master key in the KMS")
        command.add_argument("--dek-length", type=int, choices=(16, 24, 32), default=16, metavar="BYTES")
        command.add_argument("--verify-after", action="store_true", help="read every file back before it counts")
    for command in (encrypt, decrypt):
        command.add_argument("--overwrite", action="store_true", help="replace files that are there")
    encrypt.add_argument(
        "--format", choices=FORMATS, default="ags1", help="parquet: encrypt Parquet files as such; default ags1"
    )
    encrypt.add_argument(
        "--column-key",
        metavar="COLUMN=ID",
        action="append",
        default=[],
        help="a column of Parquet files, and the master key that it gets a data key under; may be repeated",
    )
    decrypt.add_argument(
        "--missing",
        choices=("error", "drop"),
        default="error",
        help="Parquet columns whose master key is refused: fail, or leave them out; default error",
    )
    encrypt.add_argument("--hidden", action="store_true", help="take hidden files, too: names with a leading . or _")
    encrypt.add_argument(
        "--include", metavar="PATTERN", action="append", help="only such files, and what is in such folders; may repeat"
    )
    encrypt.add_argument(
        "--exclude", metavar="PATTERN", action="append", help="no such files, and nothing in such folders; may repeat"
    )
    encrypt.add_argument(
        "--links",
        choices=("skip", "follow", "error"),
        default="skip",
        help="symbolic links that lead out of SRC; default skip. Those that stay inside are taken as what they lead to",
    )
    decrypt.add_argument(
        "--no-preserve", action="store_true", help="give files no permission bits and times of their sources"
    )
    encrypt.add_argument(
        "--kek-scope", metavar="SCOPE", help="from now on, what shares a KEK: see `ags-fast keys policy`"
    )
    encrypt.add_argument("--single-wrap", action="store_true", help="have the KMS wrap every data key")
    encrypt.add_argument("--block-size", type=size, default=DEFAULT_BLOCK_SIZE, metavar="BYTES", help="default 1M")
    encrypt.add_argument("--aad-prefix", metavar="TEMPLATE", help="such as 'customers.part{n}'; default: random")
    encrypt.add_argument(
        "--delete-sources", action="store_true", help="when all files have been read back from DATASET intact"
    )
    sweep.add_argument("--older-than", type=float, metavar="HOURS", help="only what is so old")


def add_dataset_options(command: argparse.ArgumentParser) -> None:
    add_kms_options(command)
    command.add_argument(
        "--key-store", metavar="URL", help="where the dataset's KEKs are: a folder, or a database; default: with it"
    )
    command.add_argument(
        "--pin",
        metavar="PIN",
        help="refuse a dataset whose newest version does not descend from this one: a job's `pin`",
    )
    command.add_argument("--min-version", type=int, metavar="N", help="refuse a dataset whose newest version is older")
    command.add_argument("--json", action="store_true", help="print the result, or the error, as one JSON object")


def add_engine_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--engine", choices=("local", "spark"), default="local", help="default: local processes")
    command.add_argument("--spark-master", metavar="URL", help="default: what the Spark configuration says")
    command.add_argument("--quiet", action="store_true", help="show no progress")


def kms(args: argparse.Namespace) -> dict[str, str]:
    """The properties of the KMS, which are seen to be possible; a passphrase is asked for once."""
    held: dict[str, dict[str, str]] = vars(args).setdefault("held_properties", {})
    if not held:
        properties = kms_properties(args)
        if not properties:
            args.usage("say which KMS: --keystore PATH, or --kms NAME=VALUE for each of its properties")
        held["kms"] = possible(properties)
    return held["kms"]


def possible(properties: dict[str, str]) -> dict[str, str]:
    """KMS properties, if a client can be made of them, or none are given."""
    try:
        if properties:
            load_kms(properties)
    except (ValueError, ImportError) as error:
        raise ConfigurationError(str(error)) from None
    return properties


def known(args: argparse.Namespace) -> dict[str, Any]:
    """What the caller knows of the dataset, and where its keys are: arguments of every function that opens one."""
    return {"pin": args.pin, "min_version": args.min_version, "key_store": args.key_store}


def opened(args: argparse.Namespace) -> Ledger:
    return Ledger.open(args.file, load_kms(kms(args)), **known(args))


def engine(args: argparse.Namespace) -> Any:
    if args.engine == "local":
        return None
    import logging

    from pyspark.sql import SparkSession

    from ags_fast.spark import SparkEngine

    # py4j logs, through the root logger and with tracebacks, what Ctrl-C raises in it, and what that leads to. What
    # matters of it is raised as well.
    logging.getLogger().addFilter(lambda record: f"{os.sep}py4j{os.sep}" not in record.pathname)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else whatever python3 is on the path
    builder = SparkSession.builder.appName(f"ags-fast {args.operation}")
    try:
        session = (builder.master(args.spark_master) if args.spark_master else builder).getOrCreate()
    except Exception as error:
        raise ConfigurationError(f"Spark does not start: {str(error).strip().partition(chr(10))[0]}") from None
    interrupts.take()  # Spark has taken it
    return SparkEngine(session)


def _shared(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of a job."""
    return {
        "kms": kms(args),
        "engine": engine(args),
        "max_failures": args.max_failures,
        "progress": False if args.quiet or args.json else None,
        **known(args),
    }


def _encrypt(args: argparse.Namespace) -> dict[str, Any]:
    done = jobs.encrypt_files(
        args.file,
        args.dataset,
        **_shared(args),
        wrapping_key_id=args.wrapping_key_id,
        format=args.format,
        column_keys=pairs(args, "--column-key", "COLUMN=ID", args.column_key) or None,
        double_wrap=not args.single_wrap,
        dek_length=args.dek_length,
        block_size=args.block_size,
        aad_prefix=args.aad_prefix,
        overwrite=args.overwrite,
        resume=args.resume,
        fsync=not args.no_fsync,
        verify_after=args.verify_after,
        delete_sources=args.delete_sources,
        dry_run=args.dry_run,
        policy=_kek_scope(args),
        hidden=args.hidden,
        include=args.include,
        exclude=args.exclude,
        links=args.links,
    )
    told = result(done)
    if done.left_out_all:
        told["exit_code"] = EXIT_FAILED
    return told


def _kek_scope(args: argparse.Namespace) -> Policy | None:
    """The dataset's policy, with the scope that an option says."""
    if args.kek_scope is None:
        return None
    policy = Policy()
    try:
        dataset = Ledger.open(args.dataset, load_kms(kms(args)), **known(args))
    except FileNotFoundError:
        pass
    else:
        policy = head.policy if (head := dataset.current()) else policy
    return policy.replace(kek_scope=args.kek_scope)


def _decrypt(args: argparse.Namespace) -> dict[str, Any]:
    return result(
        jobs.decrypt_files(
            args.file,
            args.dst,
            **_shared(args),
            version=args.version,
            paths=args.paths,
            overwrite=args.overwrite,
            missing=args.missing,
            resume=args.resume,
            fsync=not args.no_fsync,
            dry_run=args.dry_run,
            preserve=not args.no_preserve,
        )
    )


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    done = jobs.verify_files(args.file, **_shared(args), version=args.version, paths=args.paths)
    shown = result(done)
    if args.strict and done.extra_files and not shown["exit_code"]:
        shown["exit_code"] = EXIT_FAILED
    return shown


def _rekey(args: argparse.Namespace) -> dict[str, Any]:
    return result(
        jobs.rekey_files(
            args.file,
            **_shared(args),
            wrapping_key_id=args.wrapping_key_id,
            dek_length=args.dek_length,
            paths=args.paths,
            resume=args.resume,
            fsync=not args.no_fsync,
            verify_after=args.verify_after,
            dry_run=args.dry_run,
        )
    )


def _rm(args: argparse.Namespace) -> dict[str, Any]:
    done = jobs.remove_files(args.file, args.paths, kms=kms(args), dry_run=args.dry_run, progress=False, **known(args))
    return result(done) | {"still_in": done.still_in}


def _sweep(args: argparse.Namespace) -> dict[str, Any]:
    age = None if args.older_than is None else timedelta(hours=args.older_than)
    properties = possible(kms_properties(args))
    return result(jobs.sweep(args.file, kms=properties or None, older_than=age, **known(args)))


def result(done: JobResult) -> dict[str, Any]:
    """What a command shows of a job, whose warnings go to standard error. skipped_by: files that were, by reason."""
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
        "skipped_by": dict(sorted(skipped.items())),
        "plain_bytes": sum(row.plain_length or 0 for row in done.rows if row.status in ("ok", "planned")),
        "kms_calls": {f"{provider} {operation}": n for (provider, operation), n in sorted(done.kms_calls.items())},
        "warnings": done.warnings,
        "rows": [row._asdict() for row in done.rows],
        "exit_code": code_of_rows(row.error_class for row in done.failed),
    }


def _ls(args: argparse.Namespace) -> dict[str, Any]:
    dataset = opened(args)
    head, entries = dataset.load(args.version)
    version = dataset.committed(head)
    shown = ("path", "file", "format", "plain_length", "file_length", "key_id")
    files = [
        {name: getattr(entry, name) for name in shown}
        | {"column_keys": {key["column"]: key["key_id"] for key in entry.column_keys or ()}}
        for entry in sorted(entries, key=lambda entry: entry.path)
    ]
    return {
        "operation": args.operation,
        "dataset": args.file,
        "version": version.number,
        "pin": version.pin,
        "files": files,
    }


def _cat(args: argparse.Namespace) -> dict[str, Any]:
    out = cast("BinaryIO", _Output())
    jobs.copy_file(args.file, args.path, out, kms=kms(args), version=args.version, **known(args))
    return {}


class _Output(io.RawIOBase):
    """Standard output, for bytes."""

    def write(self, data: Any) -> int:
        left = memoryview(data)
        try:
            while left:  # with PYTHONUNBUFFERED a write may take less than all
                left = left[sys.stdout.buffer.write(left) :]
            sys.stdout.buffer.flush()
        except BrokenPipeError as error:
            raise OutputClosedError from error
        return len(data)


def _inspect(args: argparse.Namespace) -> dict[str, Any]:
    properties = possible(kms_properties(args))
    if args.key_store is not None and not properties:
        args.usage("keys that are elsewhere are shown with a KMS only: --keystore PATH, or --kms NAME=VALUE")
    store = Store(args.file)
    if properties:
        dataset = Ledger.open(store, load_kms(properties), **known(args))
        found = [dataset.version(number) for number in dataset.version_numbers()]
        versions = [{**version._asdict(), "ancestors": version.chain.near} for version in found]
        keys, dataset_id = dataset.keys.list(), dataset.id
    else:
        if args.pin is not None or args.min_version:
            args.usage("--pin and --min-version are checked with a KMS only: --keystore PATH, or --kms NAME=VALUE")
        names = [VERSIONS + numbered(number) for number in version_numbers(store)]
        documents = [(name, store.read(name, document_nbytes("ags-version"))) for name in names]
        claims = [(Document(data, name).claimed(), sha256(data)) for name, data in documents]
        versions = [{**claim, "number": claim.get("version"), "sha256": digest} for claim, digest in claims]
        if not any(store.list("_ags/keys/")):
            raise FileNotFoundError(f"there is no encrypted dataset at {store.url}: it has no _ags/keys")
        dataset_id, keys = claimed_keys(store)
    shown = ("number", "parent", "operation", "job_id", "time_ms", "files", "plain_length", "sha256")
    there = {version["number"]: version["sha256"] for version in versions}
    try:
        listed = [
            {name: version[name] for name in shown}
            | {"parent_sha256": version["ancestors"][-1] if version["ancestors"] else None}
            for version in versions
        ]
    except (KeyError, TypeError) as error:
        raise FormatError(f"a version in {VERSIONS} lacks {error}") from None
    for version in listed:  # whether the version before it is the one that is there; None: it is not there
        before = there.get(version["parent"])
        version["follows"] = None if before is None else before == version["parent_sha256"]
    return {
        "operation": args.operation,
        "dataset": args.file,
        "dataset_id": dataset_id,
        "authenticated": bool(properties),
        "versions": listed,
        "keys": [
            {
                "key_id": key.key_id,
                "wrapping_key_id": key.wrapping_key_id,
                "double_wrap": key.double_wrap,
                "for_columns": for_columns(key),
                "state": key.state,
                "created_ms": key.created_ms,
                "uses": key.uses,
            }
            for key in keys
        ],
        "open_jobs": open_plans(store),
    }


def as_text(result: dict[str, Any]) -> str:
    """For people: the plain fields, then a line for each file, version, key or failure."""
    plain = {name: value for name, value in result.items() if not isinstance(value, (list, dict))}
    if result.get("skipped_by"):
        plain["skipped"] = f"{plain['skipped']} ({shown_counts(result['skipped_by'])})"
    width = max(map(len, plain), default=0)
    lines = [f"{name.replace('_', ' '):<{width}}  {value}" for name, value in plain.items() if name != "exit_code"]
    lines += [f"{entry['plain_length']:>15,}  {entry['path']}" for entry in result.get("files", ())]
    for version in result.get("versions", ()):
        when = datetime.fromtimestamp(version["time_ms"] / 1000, UTC)
        lines.append(
            f"version {version['number']}: {version['operation']} at {when:%Y-%m-%d %H:%M:%S} UTC by job "
            f"{version['job_id']}, {version['files']:,} files, {version['plain_length']:,} bytes; "
            f"pin {version['number']}-{version['sha256']}"
        )
        if version["follows"] is False:
            lines.append(
                f"  it does NOT follow the version {version['parent']} that is there: one of them was exchanged"
            )
    for key in result.get("keys", ()):
        wrap = "double wrap" if key["double_wrap"] else "single wrap"
        when = datetime.fromtimestamp(key["created_ms"] / 1000, UTC)
        lines.append(
            f"key {key['key_id']}: {wrap} by {key['wrapping_key_id']}{', for columns' if key['for_columns'] else ''}, "
            f"{key['state']}, made {when:%Y-%m-%d}, {key['uses']:,} uses"
        )
    open_job = "open job {}: it runs, or died; --resume continues it, sweep gives it up"
    lines += map(open_job.format, result.get("open_jobs", ()))
    notable = [row for row in result.get("rows", ()) if row["status"] != "ok" or row["error_class"]]
    for row in notable[:SHOWN_FAILURES]:
        why = f": {row['error_class']}: {row['error']}" if row["error_class"] else ""
        lines.append(f"{row['status']}  {row['src']}{why}")
    if len(notable) > SHOWN_FAILURES:
        lines.append(f"and {len(notable) - SHOWN_FAILURES} more: --json shows all")
    return "\n".join(lines)
