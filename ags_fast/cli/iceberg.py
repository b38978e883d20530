"""``ags-fast iceberg``: encrypted Iceberg tables."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ags_fast._extras import lacks
from ags_fast.cli.codes import ConfigurationError, code_of_all
from ags_fast.cli.job import ENGINE, MAINTAIN, confirmed, engine, result
from ags_fast.cli.kms import checked, kms_group, kms_properties
from ags_fast.cli.options import (
    DRY_RUN,
    JSON,
    YES,
    Command,
    FilledPairs,
    OneOf,
    duration,
    option,
    positive,
    switch,
    values,
)
from ags_fast.cli.pins import PIN
from ags_fast.cli.results import job_text
from ags_fast.cli.terminal import warn
from ags_fast.cli.text import fields, flat, table, when
from ags_fast.errors import ConcurrentChangeError
from ags_fast.seals.pins import parse

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from types import ModuleType

    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

    from ags_fast.jobs.results import JobResult

LOCATIONS = (".metadata.json", ".metadata.json.gz")


# ---------------------------------------------------------------------------------------------------------- the table


def _library() -> ModuleType:
    """Return ags_fast.iceberg. ConfigurationError if PyIceberg is not installed."""
    try:
        import pyiceberg.table  # noqa: F401

        import ags_fast.iceberg
    except ImportError as error:
        raise lacks("ags-fast iceberg", "PyIceberg", "iceberg", error) from None
    return ags_fast.iceberg


@contextmanager
def _explained() -> Iterator[None]:
    """Raise errors of catalogs as errors that a command ends with."""
    from pyiceberg import exceptions

    try:
        yield
    except (exceptions.NoSuchTableError, exceptions.NoSuchNamespaceError, exceptions.NoSuchIdentifierError) as error:
        raise FileNotFoundError(f"the catalog does not know the table: {error}") from None
    except (exceptions.UnauthorizedError, exceptions.ForbiddenError) as error:
        raise PermissionError(f"the catalog refuses: {error}") from None
    except exceptions.NotInstalledError as error:
        raise ConfigurationError(f"the catalog needs a module that is not installed: {error}") from None
    except (exceptions.CommitFailedException, exceptions.WaitingForLockException) as error:
        raise ConcurrentChangeError(f"the catalog refused the commit, and nothing has changed: {error}") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("pyiceberg", "sqlalchemy", "thrift"):
            raise
        text = (str(error).strip() or "no reason given").splitlines()[0]
        raise OSError(f"the catalog fails: {type(error).__name__}: {text}") from None


def _table(args: argparse.Namespace, *, reads: bool = False) -> Table:
    """Return the table of the command. reads: it may be named by the location of its metadata.

    A pin is checked before anything else is read of the table.
    """
    library, properties = _library(), checked(kms_properties(args))
    pin = getattr(args, "pin", None)
    if pin is not None:
        parse(pin)
    with _explained():
        if args.file.endswith(LOCATIONS) and "/" in args.file:
            if not reads:
                args.usage(f"{args.operation} commits to a catalog: name the table as the catalog knows it")
            if args.catalog is not None:
                args.usage("--catalog does not go with the location of metadata")
            if not properties:
                args.usage("say which KMS: --keystore PATH, or --kms NAME=VALUE for each of its properties")
            loaded = library.open_table(args.file, kms=properties, **args.property)
            if pin is not None:
                library.check_pin(loaded, pin)
            return loaded  # type: ignore[no-any-return]
        pins = {} if pin is None or args.operation == "seal" else {args.file: pin}  # seal compares an older state
        return _catalog(args, properties, pins).load_table(args.file)


def _catalog(args: argparse.Namespace, properties: dict[str, str], pins: dict[str, str]) -> Catalog:
    try:
        return _library().load_catalog(args.catalog, kms=properties or None, pins=pins, **args.property)  # type: ignore[no-any-return]
    except (ValueError, ImportError) as error:
        raise ConfigurationError(f"the catalog cannot be loaded: {error}") from None


def _run(args: argparse.Namespace, name: str, loaded: Table, **options: Any) -> dict[str, Any]:
    """Run a function of ags_fast.iceberg on the table, and return its result as commands show it."""
    with _explained():
        done = getattr(_library(), name)(loaded, **options)
    shown = {"operation": done.op, "table": args.file, **_shown(done)}
    if done.expired is not None:
        shown["expired"] = _shown(done.expired)
        shown["exit_code"] = code_of_all((shown["exit_code"], shown["expired"]["exit_code"]))
    return shown


def _shown(done: JobResult) -> dict[str, Any]:
    return {name: value for name, value in result(done).items() if name not in ("operation", "dataset", "version")}


# ---------------------------------------------------------------------------------------------------------- operations


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    chosen = args.snapshots or ("current" if args.current else "all")
    options = {"snapshots": chosen, "statistics": args.statistics, "orphans": args.orphans}
    with _library().inspecting():
        loaded = _table(args, reads=True)
    return _run(args, "verify", loaded, engine=engine(args), **options)


def _rotate(args: argparse.Namespace) -> dict[str, Any]:
    new_kms = checked(kms_properties(args, new=True)) or None
    return _run(args, "rotate", _table(args), new_kms=new_kms, **values(args, ROTATE))


def _rekey(args: argparse.Namespace) -> dict[str, Any]:
    return _run(args, "rekey", _table(args), engine=engine(args), **values(args, REKEY))


def _expire(args: argparse.Namespace) -> dict[str, Any]:
    loaded = _table(args)
    return confirmed(args, lambda **how: _run(args, "expire", loaded, engine=engine(args), **how), EXPIRE)


def _encrypt(args: argparse.Namespace) -> dict[str, Any]:
    args.property.setdefault("encryption.plaintext-tables", "read")
    return _run(args, "encrypt", _table(args), engine=engine(args), **values(args, ENCRYPT))


def _seal(args: argparse.Namespace) -> dict[str, Any]:
    args.property["encryption.metadata-seal"] = "write"  # with require a table that others have changed does not load
    return _run(args, "seal", _table(args), pin=args.pin, dry_run=args.dry_run)


def _maintain(args: argparse.Namespace) -> dict[str, Any]:
    return _run(args, "maintain", _table(args), engine=engine(args), **values(args, MAINTAIN))


def _pin(args: argparse.Namespace) -> dict[str, Any]:
    loaded = _table(args, reads=True)
    with _explained():
        pin = _library().pin(loaded)
    if not pin.startswith("ags1."):
        warn(f"{args.file} has no seal: its pin shows accidents only. `ags-fast iceberg seal {args.file}` seals it")
    return {"table": args.file, "pin": pin}


def _list(args: argparse.Namespace) -> dict[str, Any]:
    properties = checked(kms_properties(args))
    _library()
    with _explained():
        catalog = _catalog(args, properties, {})
        spaces = [tuple(args.file.split("."))] if args.file else catalog.list_namespaces()
        found = sorted(".".join(name) for space in spaces for name in catalog.list_tables(space))
    return {"catalog": catalog.name, "tables": found}


def _describe(args: argparse.Namespace) -> dict[str, Any]:
    with _library().inspecting():
        loaded = _table(args, reads=True)
    metadata, current, properties = loaded.metadata, loaded.current_snapshot(), loaded.properties
    with _explained():
        pin = _library().pin(loaded)
    return {
        "table": args.file,
        "metadata_location": loaded.metadata_location,
        "uuid": str(metadata.table_uuid),
        "format_version": metadata.format_version,
        "wrapping_key_id": properties.get("encryption.key-id"),
        "data_key_length": int(properties.get("encryption.data-key-length", 16)),
        "sealed": pin.startswith("ags1."),
        "pin": pin,
        "snapshots": len(metadata.snapshots),
        "current_snapshot": current and current.snapshot_id,
        "last_updated_ms": metadata.last_updated_ms,
        "columns": [{"name": one.name, "type": str(one.field_type)} for one in loaded.schema().fields],
    }


def _files(args: argparse.Namespace) -> dict[str, Any]:
    loaded = _table(args, reads=True)
    with _explained():
        found = [
            {
                "path": one.path,
                "kind": one.kind,
                "format": one.format,
                "length": one.length,
                "record_count": one.record_count,
                "encrypted": one.key_metadata is not None,
            }
            for one in _library().files(loaded, snapshot_id=args.snapshot)
        ]
    return {"table": args.file, "files": found}


# ------------------------------------------------------------------------------------------------------------- as text


def iceberg_text(found: dict[str, Any]) -> str:
    """Return the plain fields, then a table of files or of rows, and why rows failed."""
    plain = flat(found)
    plain.pop("exit_code", None)
    lines = fields(plain)
    if "columns" in found:
        plain["last_updated_ms"] = f"{when(plain['last_updated_ms'])} UTC"
        columns = [(one["name"], one["type"]) for one in found["columns"]]
        return "\n".join([*fields(plain), "", *table(("column", "type"), columns, (False, False))])
    if "files" in found:
        rows = [
            (
                f"{one['length']:,}",
                f"{one['record_count']:,}",
                one["kind"],
                one["format"] if one["encrypted"] else f"{one['format']}, plaintext",
                one["path"],
            )
            for one in found["files"]
        ]
        lines += ["", *table(("bytes", "rows", "kind", "format", "path"), rows, (True, True, False, False, False))]
        return "\n".join(lines)
    if found["operation"] != "seal":
        return job_text(found)
    seen = [(row["error_class"], row["src"]) for row in found["rows"] if row["status"] == "skipped"]
    lines += ["", *table(("change", "of"), seen, (False, False))] if seen else []  # all: what the command is for
    failed = [row for row in found["rows"] if row["status"] == "failed"]
    lines += ["", "Nothing was sealed: these files are not intact."] if failed else []
    return "\n".join([*lines, *(f"{row['src']}: {row['error_class']}: {row['error']}" for row in failed)])


# ------------------------------------------------------------------------------------------------------------ commands

CATALOGED = (
    option("file", metavar="TABLE", help="the table in the catalog, such as sales.orders"),
    kms_group(),
    option(
        "--catalog", metavar="NAME", help="a catalog in PyIceberg's configuration (.pyiceberg.yaml); or its default"
    ),
    option(
        "--property",
        metavar="NAME=VALUE",
        action=FilledPairs,
        help="a property of the catalog, over those of the configuration, such as type=sql; may be repeated",
    ),
    JSON,
)
PINNED = (*CATALOGED, PIN)
READ = (
    CATALOGED[0].but(help="the table in the catalog, such as sales.orders, or the location of a .metadata.json"),
    *PINNED[1:],
)
WRAPPING_KEY_ID = option("--wrapping-key-id", metavar="ID", help="the master key to use from now on")
ROTATE = (
    option(
        "--what",
        choices=("kek", "mek"),
        default="kek",
        help="kek, the default: a new KEK wraps the keys of all manifest lists; mek: the current version of the master "
        "key wraps the KEKs",
    ),
    WRAPPING_KEY_ID,
    switch("--keep-old", "leave the old KEKs in the table, for writers of other engines that have begun"),
    switch("--force-expire", "then remove older metadata files of any age, with the keys as they were wrapped before"),
    DRY_RUN,
)
REKEY = (
    option(
        "--what",
        choices=("manifests", "data"),
        default="manifests",
        help="manifests, the default: new keys for manifests and their list; data: for data and delete files, too",
    ),
    switch("--force-expire", "then remove all snapshots but those of branches and tags, with the files under old keys"),
    DRY_RUN,
)
EXPIRE = (
    option("--keep", type=positive, default=1, metavar="N", help="how many snapshots of each branch stay; default 1"),
    option("--older-than", type=duration, metavar="TIME", help="remove only what is older than this, such as 30d"),
    DRY_RUN.but(help="show what would be removed, and change nothing"),
)
ENCRYPT = (
    WRAPPING_KEY_ID.but(required=True, help="the master key in the KMS"),
    option(
        "--data-key-length",
        type=int,
        choices=(16, 24, 32),
        default=16,
        metavar="BYTES",
        help="of new keys: 16, 24 or 32; default 16",
    ),
    DRY_RUN,
)
TEXT = iceberg_text
COMMANDS = (
    Command(
        "verify",
        _verify,
        (
            *READ,
            *ENGINE,
            OneOf(
                (
                    option(
                        "--snapshot",
                        type=int,
                        action="append",
                        dest="snapshots",
                        metavar="ID",
                        help="only the files of this snapshot; may be repeated; default: of all",
                    ),
                    switch("--current", "only the files of the current snapshot"),
                )
            ),
            option(
                "--statistics",
                choices=("refuse", "allow"),
                default="refuse",
                help="whether statistics files, which are in plaintext, fail; default refuse",
            ),
            switch("--orphans", "also list the files below the table's location that nothing names"),
        ),
        "Check every tag of every file of TABLE, the lengths of files, and that nothing is in plaintext.",
    ),
    Command(
        "rotate",
        _rotate,
        (*PINNED, *ROTATE, kms_group(new=True)),
        "Replace the keys above the data keys of TABLE. This writes one metadata file, no snapshot and no data.",
    ),
    Command(
        "rekey",
        _rekey,
        (*PINNED, *ENGINE, *REKEY),
        "Write files of TABLE under new keys, in a new snapshot. Row ids stay.",
    ),
    Command(
        "expire",
        _expire,
        (*PINNED, *ENGINE, *EXPIRE, YES),
        "Remove old snapshots of TABLE, and then the keys and files that only they needed. This is final.",
    ),
    Command(
        "encrypt",
        _encrypt,
        (*CATALOGED, *ENGINE, *ENCRYPT),
        "Make TABLE, which is in plaintext, an encrypted one, in a new snapshot. Older snapshots stay in plaintext "
        "until they expire.",
    ),
    Command(
        "seal",
        _seal,
        (*PINNED, DRY_RUN.but(help="show what was changed, and seal nothing")),
        "Seal what others have changed in TABLE, once every tag of every file is checked. Look at --dry-run first.",
    ),
    Command(
        "maintain",
        _maintain,
        (*PINNED, *ENGINE, *MAINTAIN),
        "Do the upkeep of TABLE, such as every day: remove old snapshots and plans of dead jobs, replace old KEKs, and "
        "verify a share of the files.",
    ),
    Command(
        "pin",
        _pin,
        READ,
        "Print the pin of TABLE, to keep where nobody who writes to the table can write.",
        {"text": lambda found: found["pin"]},
    ),
    Command(
        "list",
        _list,
        (
            CATALOGED[0].but(nargs="?", metavar="NAMESPACE", help="only the tables of this namespace"),
            *CATALOGED[1:],
        ),
        "List the tables of a catalog.",
        {"text": lambda found: "\n".join(found["tables"]), "file": ""},
    ),
    Command("describe", _describe, READ, "Show the keys, the seal, the snapshots and the columns of TABLE."),
    Command(
        "files",
        _files,
        (*READ, option("--snapshot", type=int, metavar="ID", help="a snapshot's id; default: the current one")),
        "List the files of a snapshot of TABLE, for another engine. Keys are never shown.",
    ),
)
