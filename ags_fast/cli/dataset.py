"""``ags-fast encrypt|decrypt|verify|rekey|rm|sweep|maintain|compact|cat|inspect``: datasets."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from ags_fast import jobs
from ags_fast._extras import lacks
from ags_fast.ags1 import DEFAULT_BLOCK_SIZE
from ags_fast.cli.codes import EXIT_FAILED, ConfigurationError, OutputClosedError
from ags_fast.cli.commands import DATASET_COMMANDS
from ags_fast.cli.files import progress
from ags_fast.cli.job import DATASET, ENGINE, MAINTAIN, engine, known, result
from ags_fast.cli.kms import checked, kms, kms_properties
from ags_fast.cli.options import DRY_RUN, NO_FSYNC, NO_PRESERVE, Command, Pairs, hours, option, size, switch, values
from ags_fast.cli.terminal import interrupts
from ags_fast.cli.text import day, fields, flat, when
from ags_fast.dataset.access import Access, claimed_entries
from ags_fast.dataset.key_material import KEYTOOLS
from ags_fast.dataset.names import FORMATS, LOG, PLANS, is_plan, job_of
from ags_fast.fs import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.policy import Policy
    from ags_fast.dataset.snapshot import Snapshot

SHOWN_FAILURES = 20


# ---------------------------------------------------------------------------------------------------------- options

VERSION = option("--version", type=int, metavar="N", help="a version's number; default: the newest")
PATHS = option(
    "--path", metavar="PATTERN", action="append", dest="paths", help="only files that match; may be repeated"
)
MAX_FAILURES = option("--max-failures", type=int, metavar="N", help="stop after more than N failed files")
RESUME = option("--resume", choices=("length", "verify"), help="continue a job that died")
OVERWRITE = switch("--overwrite", "replace files that exist")
WRAPPING_KEY_ID = option("--wrapping-key-id", metavar="ID", help="the master key in the KMS")
DEK_LENGTH = option(
    "--dek-length", type=int, choices=(16, 24, 32), default=16, metavar="BYTES", help="16, 24 or 32; default 16"
)
KEY_MATERIAL = option(
    "--key-material",
    choices=(KEYTOOLS,),
    help="keytools: Spark's and pyarrow's own readers open the new Parquet files, too; docs/keys.md says at what price",
)
VERIFY_AFTER = switch("--verify-after", "read every file back before it counts")
WRITING = (MAX_FAILURES, DRY_RUN, RESUME, NO_FSYNC)  # arguments of every job that writes files
ENCRYPT = (
    *WRITING,
    WRAPPING_KEY_ID.but(help="the master key in the KMS; a new dataset needs one, others have one in use"),
    DEK_LENGTH,
    VERIFY_AFTER,
    OVERWRITE.but(help="replace files whose sources have changed"),
    switch("--ignore-ctime", "compare sources by size and time of change only, after a chmod -R for example"),
    switch("--checksum", "keep a keyed digest of each source, and compare sources by their bytes, not by their times"),
    option("--format", choices=FORMATS, default="ags1", help="parquet: encrypt Parquet files as such; default ags1"),
    option(
        "--column-key",
        metavar="COLUMN=ID",
        action=Pairs,
        dest="column_keys",
        help="a column of Parquet files, and the master key for its data keys; may be repeated",
    ),
    KEY_MATERIAL,
    switch("--hidden", "include hidden files: names with a leading . or _"),
    option("--include", metavar="PATTERN", action="append", help="only files and folders that match; may be repeated"),
    option("--exclude", metavar="PATTERN", action="append", help="no files and folders that match; may be repeated"),
    option(
        "--links",
        choices=("skip", "follow", "error"),
        default="skip",
        help="symbolic links that lead out of SRC; default skip. A link that stays inside is followed",
    ),
    switch("--single-wrap", "let the KMS wrap every data key", off="double_wrap"),
    option("--block-size", type=size, default=DEFAULT_BLOCK_SIZE, metavar="BYTES", help="default 1M"),
    option("--aad-prefix", metavar="TEMPLATE", help="such as 'customers.part{n}'; default: random"),
    switch("--delete-sources", "remove the sources after all files have been read back from DATASET intact"),
)
KEK_SCOPE = option(
    "--kek-scope", metavar="SCOPE", help="which files share a KEK from now on: see `ags-fast keys policy`"
)
DECRYPT = (
    *WRITING,
    PATHS,
    VERSION,
    OVERWRITE,
    option(
        "--missing",
        choices=("error", "drop"),
        default="error",
        help="if the KMS refuses a Parquet column's master key: fail, or leave the column out; default error",
    ),
    NO_PRESERVE,
)
VERIFY = (MAX_FAILURES, PATHS, VERSION)
REKEY = (
    *WRITING,
    PATHS,
    WRAPPING_KEY_ID,
    DEK_LENGTH,
    VERIFY_AFTER,
    KEY_MATERIAL.but(
        choices=(KEYTOOLS, "none"),
        help="keytools: give Parquet files key material, none: take it away; default: renew it where it is",
    ),
)
DATASETS = option("files", nargs="+", metavar="DATASET", help="folders or URLs of datasets, one after the other")
OLDER_THAN = option("--older-than", type=hours, metavar="HOURS", help="only files older than this")

# ---------------------------------------------------------------------------------------------------------- operations


def _shared(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of every job on files."""
    return {"kms": kms(args), "engine": engine(args), "progress": progress(args), **known(args)}


def _encrypt(args: argparse.Namespace) -> dict[str, Any]:
    options = values(args, ENCRYPT)
    options["column_keys"] = options["column_keys"] or None
    if args.wrapping_key_id is None and args.pin is None and not args.min_version and _opened(args) is None:
        options["wrapping_key_id"] = args.chosen.wrapping_key_id
        if options["wrapping_key_id"] is None:
            args.usage(f"{args.dataset} is a new dataset: name its master key by --wrapping-key-id")
    done = jobs.encrypt_files(args.file, args.dataset, **_shared(args), **options, policy=_policy(args))
    shown = result(done)
    if done.left_out_all:
        shown["exit_code"] = EXIT_FAILED
    return shown


def _opened(args: argparse.Namespace) -> Snapshot | None:
    """Return the dataset to encrypt into; None if there is none yet."""
    try:
        return Access.of(args.dataset, kms(args), **known(args)).open()
    except FileNotFoundError:
        return None


def _policy(args: argparse.Namespace) -> Policy | None:
    """Return the dataset's policy with the scope of --kek-scope; None without the option."""
    from ags_fast.dataset.policy import Policy

    if args.kek_scope is None:
        return None
    dataset = _opened(args)
    policy = Policy() if dataset is None else dataset.entry.policy
    return policy.replace(kek_scope=args.kek_scope)


def _decrypt(args: argparse.Namespace) -> dict[str, Any]:
    return result(jobs.decrypt_files(args.file, args.dst, **_shared(args), **values(args, DECRYPT)))


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    done = jobs.verify_files(args.file, **_shared(args), **values(args, VERIFY))
    shown = result(done)
    if args.strict and done.extra_files and not shown["exit_code"]:
        shown["exit_code"] = EXIT_FAILED
    return shown


def _rekey(args: argparse.Namespace) -> dict[str, Any]:
    return result(jobs.rekey_files(args.file, **_shared(args), **values(args, REKEY)))


def _rm(args: argparse.Namespace) -> dict[str, Any]:
    done = jobs.remove_files(args.file, args.paths, kms=kms(args), dry_run=args.dry_run, progress=False, **known(args))
    return result(done) | {"still_in": done.still_in}


def _restore(args: argparse.Namespace) -> dict[str, Any]:
    done = jobs.restore_version(args.file, args.version, kms=kms(args), dry_run=args.dry_run, **known(args))
    return result(done)


def _compact(args: argparse.Namespace) -> dict[str, Any]:
    return result(jobs.compact(args.file, kms=kms(args), dry_run=args.dry_run, **known(args)))


def _sweep(args: argparse.Namespace) -> dict[str, Any]:
    properties = checked(kms_properties(args))
    return result(jobs.sweep(args.file, kms=properties or None, older_than=args.older_than, **known(args)))


def _maintain(args: argparse.Namespace) -> dict[str, Any]:
    if len(args.files) > 1 and (args.pin or args.min_version):
        args.usage("--pin and --min-version are of one dataset: maintain it alone")
    return result(jobs.maintain(args.file, **_shared(args), **values(args, MAINTAIN)))


def _cat(args: argparse.Namespace) -> dict[str, Any]:
    out = cast("BinaryIO", _Output())
    jobs.copy_file(args.file, args.path, out, kms=kms(args), version=args.version, **known(args))
    return {}


def _mount(args: argparse.Namespace) -> dict[str, Any]:
    if sys.platform == "linux" and not os.path.exists("/dev/fuse"):
        raise ConfigurationError("there is no /dev/fuse: load the module fuse, or give the container the device")
    if not os.path.isdir(args.folder):
        raise NotADirectoryError(f"{args.folder} is not a folder: make one")
    try:
        import fuse  # noqa: F401 (looks for libfuse)

        from ags_fast.filesystem import AgsFileSystem
        from ags_fast.filesystem.mounting import mount
    except ImportError as error:
        raise lacks("a mount", "fusepy", "files", error) from None
    except OSError as error:
        raise ConfigurationError(f"{error}: install libfuse 2 (on Debian: apt-get install libfuse2 fuse)") from None
    interrupts.drop()
    mount(AgsFileSystem(args.file, kms(args), version=args.version, **known(args)), args.folder)
    return {}


class _Output(io.RawIOBase):
    """Return standard output, for bytes."""

    def write(self, data: Any) -> int:
        left = memoryview(data)
        try:
            if sys.stdout is None:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            while left:  # with PYTHONUNBUFFERED a write may take less than all
                left = left[sys.stdout.buffer.write(left) :]
            sys.stdout.buffer.flush()
        except OSError as error:
            raise OutputClosedError from error
        return len(data)


# ------------------------------------------------------------------------------------------------------------- inspect


def _inspect(args: argparse.Namespace) -> dict[str, Any]:
    from ags_fast.keys.entry import for_columns

    properties = checked(kms_properties(args))
    if args.key_store is not None and not properties:
        args.usage("with --key-store the keys are shown only with a KMS: --keystore PATH, or --kms NAME=VALUE")
    store = Store(args.file, args.chosen.storage_options)
    if properties:
        log, head = Access.of(store, properties, **known(args)).open()
        versions, keys = log.look(lambda head: (log.kept(head)[::-1], [*head.keys.values()]), head)
    else:
        if args.pin is not None or args.min_version:
            args.usage("--pin and --min-version are checked only with a KMS: --keystore PATH, or --kms NAME=VALUE")
        versions = claimed_entries(store)
        if not versions:
            raise FileNotFoundError(f"there is no encrypted dataset at {store.url}: it has no {LOG}")
        keys = [*versions[-1].keys.values()]
    head = versions[-1]
    return {
        "dataset": args.file,
        "dataset_id": head.dataset_id,
        "authenticated": bool(properties),
        "versions": _listed(versions),
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
        "open_jobs": sorted({str(job_of(one.path)) for one in store.list(PLANS) if is_plan(one.path)}),
    }


def _listed(versions: list[Entry]) -> list[dict[str, Any]]:
    """Return the shown fields of versions. follows: whether the stored parent is the true one; None: none is stored."""
    stored = {version.number: version.digest for version in versions}
    return [
        {
            "number": version.number,
            "parent": version.number - 1 or None,
            "operation": version.operation,
            "job_id": version.job_id,
            "time_ms": version.time_ms,
            "files": version.count,
            "plain_length": version.nbytes,
            "sha256": version.digest,
            "parent_sha256": version.near[-1] if version.near else None,
            "follows": parent == version.near[-1] if (parent := stored.get(version.number - 1)) else None,
        }
        for version in versions
    ]


# ------------------------------------------------------------------------------------------------------------- as text


def dataset_text(found: dict[str, Any]) -> str:
    """Return the plain fields, then a line for each version, key, open job and failure."""
    plain = flat(found)
    plain.pop("exit_code", None)
    if "seconds" in plain:
        took = _time(plain["seconds"], plain["plain_bytes"])
        grouped = {name: f"{n:,}" for name, n in plain.items() if type(n) is int and name != "version"}
        plain |= {**grouped, "seconds": took}
    if found.get("skipped_by"):
        from ags_fast.jobs.results import shown_counts

        plain["skipped"] = f"{plain['skipped']} ({shown_counts(found['skipped_by'])})"
    lines = fields(plain)
    for version in found.get("versions", ()):
        lines += _version_lines(version)
    lines += map(_key_line, found.get("keys", ()))
    lines += [
        f"open job {job}: it is running, or died; --resume continues it, sweep gives it up"
        for job in found.get("open_jobs", ())
    ]
    rows = found.get("rows", ())
    lines += _row_lines([row for row in rows if row["status"] != "ok" or row["error_class"]])
    if "matching" in found:
        lines += _row_lines([row for row in rows if row["status"] == "ok" and not row["error_class"]])
    return "\n".join(lines)


def _time(seconds: float, nbytes: int) -> str:
    """Return how long a job took, and how fast it was if that is more than its start."""
    text = f"{seconds:,.1f}"
    rate = nbytes / max(seconds, 1e-3) / 1e6
    return f"{text} ({rate:,.0f} MB/s)" if rate >= 1 else text


def _version_lines(version: dict[str, Any]) -> Iterator[str]:
    yield (
        f"version {version['number']}: {version['operation']} at {when(version['time_ms'])} UTC by job "
        f"{version['job_id']}, {version['files']:,} files, {version['plain_length']:,} bytes; "
        f"pin {version['number']}-{version['sha256']}"
    )
    if version["follows"] is False:
        yield f"  it does NOT follow the stored version {version['parent']}: one of the two was replaced"


def _key_line(key: dict[str, Any]) -> str:
    wrap = "double wrap" if key["double_wrap"] else "single wrap"
    return (
        f"key {key['key_id']}: {wrap} by {key['wrapping_key_id']}{', for columns' if key['for_columns'] else ''}, "
        f"{key['state']}, made {day(key['created_ms'])}, {key['uses']:,} uses"
    )


def _row_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows[:SHOWN_FAILURES]:
        why = f": {row['error_class']}: {row['error']}" if row["error_class"] else ""
        to = f" -> {row['dst']}" if row["dst"] and row["status"] == "ok" else ""
        yield f"{row['status']}  {row['src']}{to}{why}"
    if len(rows) > SHOWN_FAILURES:
        yield f"and {len(rows) - SHOWN_FAILURES} more: --json shows all"


# ------------------------------------------------------------------------------------------------------------ commands

TEXT = dataset_text
COMMANDS = (
    Command(
        "encrypt",
        _encrypt,
        (
            DATASET[0].but(metavar="SRC"),
            option("dataset", metavar="DATASET"),
            *DATASET[1:],
            *ENGINE,
            *ENCRYPT,
            KEK_SCOPE,
        ),
        DATASET_COMMANDS["encrypt"],
    ),
    Command(
        "decrypt",
        _decrypt,
        (DATASET[0], option("dst", metavar="DST"), *DATASET[1:], *ENGINE, *DECRYPT),
        DATASET_COMMANDS["decrypt"],
    ),
    Command(
        "verify",
        _verify,
        (*DATASET, *ENGINE, *VERIFY, switch("--strict", "exit with 1 if DATASET has files that no version names")),
        DATASET_COMMANDS["verify"],
    ),
    Command("rekey", _rekey, (*DATASET, *ENGINE, *REKEY), DATASET_COMMANDS["rekey"]),
    Command("sweep", _sweep, (*DATASET, OLDER_THAN), DATASET_COMMANDS["sweep"]),
    Command("maintain", _maintain, (DATASETS, *DATASET[1:], *ENGINE, *MAINTAIN), DATASET_COMMANDS["maintain"]),
    Command(
        "rm",
        _rm,
        (
            DATASET[0],
            option("paths", metavar="PATH", nargs="+", help="a pattern of paths, as they were under SRC"),
            *DATASET[1:],
            DRY_RUN.but(help="show which files would be removed, and which versions have them"),
        ),
        DATASET_COMMANDS["rm"],
    ),
    Command(
        "restore",
        _restore,
        (
            *DATASET,
            VERSION.but(required=True, help="the number of an older version, as `ags-fast log` lists them"),
            DRY_RUN.but(help="show which files would come back, and which would go"),
        ),
        DATASET_COMMANDS["restore"],
    ),
    Command(
        "compact",
        _compact,
        (*DATASET, DRY_RUN.but(help="show which tables would be merged")),
        DATASET_COMMANDS["compact"],
    ),
    Command(
        "cat",
        _cat,
        (DATASET[0], option("path", metavar="PATH", help="as it was under SRC"), *DATASET[1:], VERSION),
        DATASET_COMMANDS["cat"],
    ),
    Command(
        "mount",
        _mount,
        (DATASET[0], option("folder", metavar="DIR", help="an empty folder"), *DATASET[1:], VERSION),
        DATASET_COMMANDS["mount"],
    ),
    Command("inspect", _inspect, DATASET, DATASET_COMMANDS["inspect"]),
)
