"""``ags-fast encrypt|decrypt|verify|rekey|rm|sweep|maintain|compact|cat|inspect``: datasets."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any, get_args

from ags_fast import jobs
from ags_fast._extras import lacks
from ags_fast._types import FileFormat
from ags_fast.ags1 import DEFAULT_BLOCK_SIZE
from ags_fast.cli import places
from ags_fast.cli.codes import EXIT_FAILED, EXIT_NOT_FOUND, ConfigurationError
from ags_fast.cli.commands import TEXTS
from ags_fast.cli.files import StandardOutput, progress
from ags_fast.cli.job import DATASET, ENGINE, MAINTAIN, engine, known, result
from ags_fast.cli.kms import checked, kms, kms_properties
from ags_fast.cli.options import (
    DRY_RUN,
    EXCLUDE,
    INCLUDE,
    JSON,
    NO_FSYNC,
    NO_PRESERVE,
    Command,
    Pairs,
    duration,
    option,
    share,
    size,
    switch,
    values,
)
from ags_fast.cli.places import PATH, PATTERNS
from ags_fast.cli.results import job_text
from ags_fast.cli.terminal import complain, interrupts
from ags_fast.cli.text import fields, flat, table, when
from ags_fast.dataset.access import Access, claimed_entries
from ags_fast.dataset.key_material import KEYTOOLS
from ags_fast.dataset.names import LOG, PLANS, is_plan, job_of
from ags_fast.fs import Store

if TYPE_CHECKING:
    from ags_fast.dataset.policy import Policy
    from ags_fast.dataset.snapshot import Snapshot

# ---------------------------------------------------------------------------------------------------------- options

VERSION = option("--version", type=int, metavar="N", help="the number of a version; default: the newest")
CHOICE = (INCLUDE.but(dest="paths"), EXCLUDE)
MAX_FAILURES = option("--max-failures", type=int, metavar="N", help="stop after more than N failed files")
RESUME = option(
    "--resume",
    nargs="?",
    const="length",
    choices=("length", "verify"),
    help="continue a job that died; =verify also checks the tags of what is finished",
)
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
    option(
        "--format",
        choices=get_args(FileFormat),
        default="ags1",
        help="parquet: encrypt Parquet files as such; auto: do so with Parquet files only; default ags1",
    ),
    option(
        "--column-key",
        metavar="COLUMN=ID",
        action=Pairs,
        dest="column_keys",
        help="a column of Parquet files, and the master key for its data keys; may be repeated",
    ),
    KEY_MATERIAL,
    switch("--allow-empty", "exit with 0 if SRC has no file to encrypt; with --delete, remove all files then"),
    switch("--hidden", "include hidden files: names with a leading . or _"),
    INCLUDE.but(help="only files and folders that match; may be repeated"),
    EXCLUDE.but(help="no files and folders that match; may be repeated"),
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
    switch("--delete", "mirror: the new version leaves out files that are gone from SRC; without it they stay"),
)
KEK_SCOPE = option(
    "--kek-scope", metavar="SCOPE", help="which files share a KEK from now on: see `ags-fast keys policy`"
)
DECRYPT = (
    *WRITING,
    *CHOICE,
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
VERIFY = (
    MAX_FAILURES,
    *CHOICE,
    option("--sample", type=share, metavar="SHARE", help="only a share of the files, such as 5%%, others each day"),
    VERSION,
)
REKEY = (
    *WRITING,
    *CHOICE,
    WRAPPING_KEY_ID,
    DEK_LENGTH,
    VERIFY_AFTER,
    KEY_MATERIAL.but(
        choices=(KEYTOOLS, "none"),
        help="keytools: give Parquet files key material, none: take it away; default: renew it where it is",
    ),
)
DATASETS = option(
    "files",
    nargs="*",
    metavar="DATASET",
    help=f"folders or URLs of datasets, one after the other; default: {places.DATASET_ENV}",
)
OLDER_THAN = option(
    "--older-than",
    type=duration,
    metavar="TIME",
    help="only what is older, such as 12h; default: on a local disk what no process holds, elsewhere 1d",
)

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
    if done.no_sources and not args.allow_empty:
        complain(f"{args.file} has no file to encrypt: --allow-empty accepts that")
        shown["exit_code"] = EXIT_NOT_FOUND
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
    options = {"kms": kms(args), "exclude": args.exclude, "dry_run": args.dry_run, "progress": False}
    done = jobs.remove_files(args.file, args.inside, **options, **known(args))
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
    jobs.copy_file(args.file, args.inside, StandardOutput(), kms=kms(args), version=args.version, **known(args))
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


# ------------------------------------------------------------------------------------------------------------- inspect


def _inspect(args: argparse.Namespace) -> dict[str, Any]:
    from ags_fast.keys.entry import for_columns

    store = Store(args.file, args.chosen.storage_options)
    versions = claimed_entries(store)
    if not versions:
        raise FileNotFoundError(f"there is no encrypted dataset at {store.url}: it has no {LOG}")
    head, stored = versions[-1], {version.number: version.digest for version in versions}
    names = ("key_id", "wrapping_key_id", "double_wrap", "state", "created_ms", "uses")
    keys = [
        {**{name: getattr(key, name) for name in names}, "for_columns": for_columns(key)} for key in head.keys.values()
    ]
    return {
        "dataset": args.file,
        "dataset_id": head.dataset_id,
        "authenticated": False,
        "versions": [
            {
                "number": version.number,
                "operation": version.operation,
                "job_id": version.job_id,
                "time_ms": version.time_ms,
                "files": version.count,
                "source_length": version.nbytes,
                "sha256": version.digest,
                # whether the stored parent is the true one; None: none is stored
                "follows": parent == version.near[-1] if (parent := stored.get(version.number - 1)) else None,
            }
            for version in versions
        ],
        "keys": keys,
        "open_jobs": sorted({str(job_of(one.path)) for one in store.list(PLANS) if is_plan(one.path)}),
    }


def inspect_text(found: dict[str, Any]) -> str:
    """Return the facts, then tables of versions and keys."""
    versions = [
        (f"{one['number']}-{one['sha256']}", one["operation"], when(one["time_ms"]), f"{one['files']:,}")
        for one in found["versions"]
    ]
    keys = []
    for one in found["keys"]:
        wrap = ("double" if one["double_wrap"] else "single") + ", columns" * one["for_columns"]
        keys.append((one["key_id"], wrap, one["wrapping_key_id"], one["state"]))
    lines = [
        *fields(flat(found)),
        "",
        *table(("pin", "operation", "at (UTC)", "files"), versions, (False,) * 3 + (True,)),
    ]
    lines += [
        f"version {one['number']} does NOT follow the stored version {one['number'] - 1}: one of the two was replaced"
        for one in found["versions"]
        if one["follows"] is False
    ]
    lines += ["", *table(("key", "wrap", "wrapped by", "state"), keys, (False,) * 4)]
    lines += [f"open job {job}: running, or dead; --resume continues, sweep ends" for job in found["open_jobs"]]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ commands

TEXT = job_text
COMMANDS = (
    Command(
        "encrypt",
        _encrypt,
        (
            option("file", metavar="SRC", help="the folder to encrypt, or its URL"),
            option("dataset", metavar="DATASET", nargs="?", help=places.DATASET.settings["help"]),
            *DATASET[1:],
            *ENGINE,
            *ENCRYPT,
            KEK_SCOPE,
        ),
        TEXTS["encrypt"],
    ),
    Command(
        "decrypt",
        _decrypt,
        (
            DATASET[0],
            option("dst", metavar="DST", help="the folder for the plaintext, or its URL"),
            *DATASET[1:],
            *ENGINE,
            *DECRYPT,
        ),
        TEXTS["decrypt"],
    ),
    Command(
        "verify",
        _verify,
        (*DATASET, *ENGINE, *VERIFY, switch("--strict", "exit with 1 if DATASET has files that no version names")),
        TEXTS["verify"],
    ),
    Command("rekey", _rekey, (*DATASET, *ENGINE, *REKEY), TEXTS["rekey"]),
    Command("sweep", _sweep, (*DATASET, OLDER_THAN), TEXTS["sweep"]),
    Command("maintain", _maintain, (DATASETS, *DATASET[1:], *ENGINE, *MAINTAIN), TEXTS["maintain"]),
    Command(
        "rm",
        _rm,
        (
            DATASET[0],
            PATTERNS.but(nargs="+", help="a pattern of paths, as they were under SRC; or DATASET:PATTERN"),
            *DATASET[1:],
            EXCLUDE,
            DRY_RUN.but(help="show which files would be removed, and which versions have them"),
        ),
        TEXTS["rm"],
    ),
    Command(
        "restore",
        _restore,
        (
            *DATASET,
            VERSION.but(required=True, help="the number of an older version, as `ags-fast log` lists them"),
            DRY_RUN.but(help="show which files would come back, and which would go"),
        ),
        TEXTS["restore"],
    ),
    Command(
        "compact",
        _compact,
        (*DATASET, DRY_RUN.but(help="show which tables would be merged")),
        TEXTS["compact"],
    ),
    Command(
        "cat",
        _cat,
        (DATASET[0], PATH, *DATASET[1:], VERSION),
        TEXTS["cat"],
    ),
    Command(
        "mount",
        _mount,
        (DATASET[0], option("folder", metavar="DIR", help="an empty folder"), *DATASET[1:], VERSION),
        TEXTS["mount"],
    ),
    Command("inspect", _inspect, (DATASET[0], JSON), TEXTS["inspect"], {"text": inspect_text, "kms": {}}),
)
