"""``ags-fast encrypt|decrypt|verify|rekey|sweep|ls|cat|inspect``: datasets, from a shell."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from ags_fast import jobs
from ags_fast.ags1 import DEFAULT_BLOCK_SIZE
from ags_fast.errors import FormatError
from ags_fast.fs import Store
from ags_fast.jobs.dataset import DOCUMENT_NBYTES, VERSIONS, Dataset
from ags_fast.jobs.plan import open_plans
from ags_fast.keys.command import ask_passphrase
from ags_fast.keys.envelope import Document, KeyEntry
from ags_fast.keys.kms import KMS_TYPE, load_kms, local
from ags_fast.keys.resolver import for_columns

if TYPE_CHECKING:
    from collections.abc import Callable

    from ags_fast.jobs.results import JobResult

__all__ = ["add_commands"]

EXIT_FAILED, EXIT_INTEGRITY, EXIT_KEY_ACCESS = 1, 3, 4
PASSPHRASE_ENV = "AGS_FAST_TYPED_PASSPHRASE"  # where worker processes find what was typed here
SHOWN_FAILURES = 20


def add_commands(groups: argparse._SubParsersAction[argparse.ArgumentParser], size: Callable[[str], int]) -> None:
    def add(name: str, run: Callable[[argparse.Namespace], dict[str, Any]], text: str) -> argparse.ArgumentParser:
        command = groups.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run, operation=name, text=as_text, usage=command.error)
        command.add_argument("file", metavar="SRC" if name == "encrypt" else "DATASET")
        return command

    encrypt = add("encrypt", _encrypt, "Encrypt every file under SRC into DATASET, a folder or a URL.")
    encrypt.add_argument("dataset", metavar="DATASET")
    decrypt = add("decrypt", _decrypt, "Decrypt DATASET into the folder DST.")
    decrypt.add_argument("dst", metavar="DST")
    verify = add("verify", _verify, "Check every tag of every file of DATASET, and that no file is missing.")
    rekey = add("rekey", _rekey, "Write the files of DATASET anew, under new data keys.")
    sweep = add("sweep", _sweep, "Remove what dead jobs have left in DATASET; with a KMS their plans and files too.")
    ls = add("ls", _ls, "List the files of DATASET.")
    cat = add("cat", _cat, "Decrypt one file of DATASET to standard output.")
    cat.add_argument("path", metavar="PATH", help="as it was under SRC")
    inspect = add("inspect", _inspect, "Show versions, keys and open jobs of DATASET; without a KMS, unauthenticated.")

    for command in (encrypt, decrypt, verify, rekey, sweep, ls, cat, inspect):
        kms = command.add_argument_group("KMS")
        kms.add_argument("--keystore", metavar="PATH", help="a local keystore, made by `ags-fast keys init`")
        secret = kms.add_mutually_exclusive_group()
        secret.add_argument("--key-file", metavar="PATH", help="the file with the key that opens the keystore")
        secret.add_argument("--passphrase-file", metavar="PATH", help="the file with its passphrase")
        secret.add_argument("--passphrase-env", metavar="NAME", help="the environment variable with its passphrase")
        kms.add_argument(
            "--kms",
            metavar="NAME=VALUE",
            action="append",
            default=[],
            help="a property of another KMS, such as encryption.kms-type=aws; may be repeated",
        )
        command.add_argument("--json", action="store_true", help="print the result, or the error, as one JSON object")
    for command in (encrypt, decrypt, verify, rekey):
        command.add_argument("--engine", choices=("local", "spark"), default="local", help="default: local processes")
        command.add_argument("--spark-master", metavar="URL", help="default: what the Spark configuration says")
        command.add_argument("--max-failures", type=int, metavar="N", help="stop after more failed files than that")
        command.add_argument("--quiet", action="store_true", help="show no progress")
    for command in (decrypt, verify, rekey):
        command.add_argument(
            "--path", metavar="PATTERN", action="append", dest="paths", help="only such files; may be repeated"
        )
    for command in (decrypt, verify, ls, cat):
        command.add_argument("--version", type=int, metavar="N", help="default: the newest")
        command.add_argument("--min-version", type=int, metavar="N", help="refuse a dataset whose newest is older")
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
        "--format", choices=jobs.FORMATS, default="ags1", help="parquet: encrypt Parquet files as such; default ags1"
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
    encrypt.add_argument("--single-wrap", action="store_true", help="have the KMS wrap every data key")
    encrypt.add_argument("--block-size", type=size, default=DEFAULT_BLOCK_SIZE, metavar="BYTES", help="default 1M")
    encrypt.add_argument("--aad-prefix", metavar="TEMPLATE", help="such as 'customers.part{n}'; default: random")
    encrypt.add_argument(
        "--delete-sources", action="store_true", help="when all files have been read back from DATASET intact"
    )
    sweep.add_argument("--older-than", type=float, metavar="HOURS", help="only what is so old")


def _pairs(args: argparse.Namespace, option: str, metavar: str, texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            args.usage(f"{option} wants {metavar}, not {text!r}")
        pairs[name] = value
    return pairs


def _properties(args: argparse.Namespace) -> dict[str, str]:
    """Of the KMS; none if no option says which."""
    properties = _pairs(args, "--kms", "NAME=VALUE", args.kms)
    if args.keystore is None:
        return properties
    properties |= {KMS_TYPE: "local", local.PATH: os.path.abspath(args.keystore)}
    if args.key_file:
        properties[local.KEY_FILE] = os.path.abspath(args.key_file)
    elif args.passphrase_file:
        properties[local.PASSPHRASE_FILE] = os.path.abspath(args.passphrase_file)
    elif args.passphrase_env:
        properties[local.PASSPHRASE_ENV] = args.passphrase_env
    else:
        os.environ[PASSPHRASE_ENV] = ask_passphrase(args.keystore)
        properties[local.PASSPHRASE_ENV] = PASSPHRASE_ENV
    return properties


def _kms(args: argparse.Namespace) -> dict[str, str]:
    properties = _properties(args)
    if not properties:
        args.usage("say which KMS: --keystore PATH, or --kms NAME=VALUE for each of its properties")
    return properties


def _shared(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of a job."""
    engine = None
    if args.engine == "spark":
        from pyspark.sql import SparkSession

        from ags_fast.spark import SparkEngine

        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else whatever python3 is on the path
        builder = SparkSession.builder.appName(f"ags-fast {args.operation}")
        engine = SparkEngine((builder.master(args.spark_master) if args.spark_master else builder).getOrCreate())
    return {
        "kms": _kms(args),
        "engine": engine,
        "max_failures": args.max_failures,
        "progress": False if args.quiet or args.json else None,
    }


def _encrypt(args: argparse.Namespace) -> dict[str, Any]:
    return _result(
        jobs.encrypt_files(
            args.file,
            args.dataset,
            **_shared(args),
            wrapping_key_id=args.wrapping_key_id,
            format=args.format,
            column_keys=_pairs(args, "--column-key", "COLUMN=ID", args.column_key) or None,
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
        )
    )


def _decrypt(args: argparse.Namespace) -> dict[str, Any]:
    return _result(
        jobs.decrypt_files(
            args.file,
            args.dst,
            **_shared(args),
            version=args.version,
            min_version=args.min_version,
            paths=args.paths,
            overwrite=args.overwrite,
            missing=args.missing,
            resume=args.resume,
            fsync=not args.no_fsync,
            dry_run=args.dry_run,
        )
    )


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    return _result(
        jobs.verify_files(
            args.file, **_shared(args), version=args.version, min_version=args.min_version, paths=args.paths
        )
    )


def _rekey(args: argparse.Namespace) -> dict[str, Any]:
    return _result(
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


def _sweep(args: argparse.Namespace) -> dict[str, Any]:
    age = None if args.older_than is None else timedelta(hours=args.older_than)
    return _result(jobs.sweep(args.file, kms=_properties(args) or None, older_than=age))


def _result(result: JobResult) -> dict[str, Any]:
    classes = {row.error_class for row in result.failed}
    code = EXIT_FAILED if classes else 0
    if classes & {"IntegrityError", "FormatError"}:
        code = EXIT_INTEGRITY
    elif classes == {"KeyAccessError"}:
        code = EXIT_KEY_ACCESS
    return {
        "operation": result.op,
        "dataset": result.dataset,
        "job_id": result.job_id,
        "version": result.version,
        **result.counts,
        "plain_bytes": sum(row.plain_length or 0 for row in result.rows if row.status in ("ok", "planned")),
        "rows": [row._asdict() for row in result.rows],
        "exit_code": code,
    }


def _ls(args: argparse.Namespace) -> dict[str, Any]:
    dataset = Dataset.open(args.file, load_kms(_kms(args)))
    version = dataset.current(version=args.version, min_version=args.min_version)
    shown = ("path", "file", "format", "plain_length", "file_length", "key_id")
    files = [
        {name: getattr(entry, name) for name in shown}
        | {"column_keys": {key["column"]: key["key_id"] for key in entry.column_keys or ()}}
        for entry in sorted(dataset.entries(version), key=lambda entry: entry.path)
    ]
    return {
        "operation": args.operation,
        "dataset": args.file,
        "version": version.number if version else None,
        "files": files,
    }


def _cat(args: argparse.Namespace) -> dict[str, Any]:
    out = sys.stdout.buffer
    jobs.copy_file(args.file, args.path, out, kms=_kms(args), version=args.version, min_version=args.min_version)
    out.flush()
    return {}


def _inspect(args: argparse.Namespace) -> dict[str, Any]:
    properties = _properties(args)
    store = Store(args.file)
    if properties:
        dataset = Dataset.open(store, load_kms(properties))
        versions = [dataset.version(number)._asdict() for number in dataset.version_numbers()]
        keys, dataset_id = dataset.keys.list(), dataset.id
    else:
        names = sorted(entry.path for entry in store.list(VERSIONS))
        claims = [Document(store.read(name, DOCUMENT_NBYTES), name).claimed for name in names]
        versions = [{**claim, "number": claim.get("version")} for claim in claims]
        found = sorted(entry.path for entry in store.list("_ags/keys/"))
        if not found:
            raise FileNotFoundError(f"there is no encrypted dataset at {store.url}: it has no _ags/keys")
        claim = Document(store.read(found[-1], DOCUMENT_NBYTES), found[-1]).claimed
        keys, dataset_id = [KeyEntry.from_json(key) for key in claim.get("keys", ())], str(claim.get("dataset_id"))
    shown = ("number", "parent", "operation", "job_id", "time_ms", "files", "plain_length")
    try:
        listed = [{name: version[name] for name in shown} for version in versions]
    except KeyError as error:
        raise FormatError(f"a version in {VERSIONS} lacks {error}") from None
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
    width = max(map(len, plain), default=0)
    lines = [f"{name.replace('_', ' '):<{width}}  {value}" for name, value in plain.items() if name != "exit_code"]
    lines += [f"{entry['plain_length']:>15,}  {entry['path']}" for entry in result.get("files", ())]
    for version in result.get("versions", ()):
        when = datetime.fromtimestamp(version["time_ms"] / 1000, UTC)
        lines.append(
            f"version {version['number']}: {version['operation']} at {when:%Y-%m-%d %H:%M:%S} UTC by job "
            f"{version['job_id']}, {version['files']:,} files, {version['plain_length']:,} bytes"
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
