"""``ags-fast parquet encrypt|decrypt|reencrypt|inspect|verify``: Parquet files, from a shell."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from ags_fast import parquet
from ags_fast._arguments import (
    Progress,
    aad_prefix,
    add_key_format,
    check_plain_output,
    kept_mode,
    positive,
    read_key,
)
from ags_fast._terminal import printable
from ags_fast.fs import NewFile, NewObject, file_at, local_path
from ags_fast.parquet._file import ALGORITHMS, FOOTER_KEY, QUIRKS, Keys

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from ags_fast.parquet import Report

__all__ = ["add_commands"]

MARK = ".enc"  # in the name of an encrypted file, before its suffix
NARROW = 12  # characters that a cell keeps, however narrow the terminal is


def add_commands(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    group = groups.add_parser("parquet", help="Parquet files and their own encryption", allow_abbrev=False)
    operations = group.add_subparsers(required=True, dest="operation", metavar="OPERATION")

    def add(name: str, run: Callable[[argparse.Namespace], dict[str, Any]], text: str) -> argparse.ArgumentParser:
        operation = operations.add_parser(name, help=text, description=text, allow_abbrev=False)
        operation.set_defaults(run=run, text=as_text, usage=operation.error)
        operation.add_argument(
            "files", nargs="+", metavar="FILE", help="a path, or a URL such as s3://bucket/a.parquet"
        )
        operation.add_argument(
            "--json", action="store_true", help="print the result, or the error, as one JSON object for each FILE"
        )
        return operation

    encrypt = add("encrypt", _encrypt, "Encrypt FILE without decoding a value.")
    decrypt = add("decrypt", _decrypt, "Decrypt FILE. The output appears when every tag has passed.")
    reencrypt = add("reencrypt", _reencrypt, "Give FILE new keys, without plaintext on the way.")
    add("inspect", _inspect, "Show what FILE says of its encryption, without a key. None of it is authenticated.")
    verify = add("verify", _verify, "Check every tag of FILE, and that all its parts are there.")

    for operation in (encrypt, decrypt, reencrypt, verify):
        _add_keys(operation, "", stored=operation is encrypt, optional=operation in (decrypt, verify))
        add_key_format(operation)
        operation.add_argument("--threads", type=positive, metavar="N", help="default: the usable CPUs")
        operation.add_argument("--quiet", action="store_true", help="show no progress")
    _add_keys(reencrypt, "new-", stored=True, optional=False)
    for operation, new in ((encrypt, ""), (decrypt, ""), (verify, ""), (reencrypt, ""), (reencrypt, "new-")):
        prefix = operation.add_mutually_exclusive_group()
        text = "text that tells this file from others" if not new else "another one; default: the old one"
        prefix.add_argument(f"--{new}aad-prefix", metavar="TEXT", help=text)
        prefix.add_argument(f"--{new}aad-prefix-hex", metavar="HEX", help="the same, as bytes")
    for operation in (encrypt, reencrypt):
        kept = "as FILE has it" if operation is reencrypt else None
        operation.add_argument("--algorithm", choices=ALGORITHMS, help=f"default: {kept or ALGORITHMS[0]}")
        operation.add_argument(
            "--no-store-aad-prefix", action="store_true", help="readers must know it: it is not in the output"
        )
        operation.add_argument(
            "--other-columns",
            choices=("footer", "plain"),
            default="footer",
            help="columns that are not named: under the footer key (the default), or in plain text",
        )
        operation.add_argument(
            "--v2-layout",
            choices=("arrow", "parquet-java"),
            help=f"who is to read V2 pages; default: {kept or 'arrow'}",
        )
    encrypt.add_argument("--plaintext-footer", action="store_true", help="sign the footer, and let others read it")
    encrypt.add_argument("--drop-bloom-filters", action="store_true", help="for readers that cannot open them: DuckDB")
    footer = reencrypt.add_mutually_exclusive_group()
    footer.add_argument("--plaintext-footer", action="store_true", default=None, help="default: as FILE has it")
    footer.add_argument("--encrypted-footer", action="store_false", dest="plaintext_footer", default=None)
    reencrypt.add_argument(
        "--same-size",
        action="store_true",
        help="nothing moves; columns whose old keys are not given pass through under these",
    )
    for operation, without in ((decrypt, "drop"), (verify, "skip")):
        operation.add_argument(
            "--missing",
            choices=("error", without),
            default="error",
            help=f"columns whose keys are not given are an error (the default), or {without}ped",
        )
    for operation in (decrypt, reencrypt, verify):
        operation.add_argument(
            "--quirk",
            choices=sorted(QUIRKS),
            action="append",
            default=[],
            dest="quirks",
            help="read what this writer gets wrong; may be repeated",
        )
        operation.add_argument(
            "--allow-ctr",
            action="store_true",
            help="take a FILE under AES_GCM_CTR_V1, whose page bytes have no tag: who can write to it can change them",
        )
        operation.add_argument(
            "--no-unauthenticated-levels",
            action="store_false",
            dest="allow_unauthenticated_levels",
            help="refuse V2 pages of parquet-java: which of their values are null has no tag, and could be changed",
        )
    for operation, default in (
        (encrypt, f"NAME{MARK}.parquet for NAME.parquet"),
        (decrypt, f"NAME.parquet for NAME{MARK}.parquet"),
        (reencrypt, None),
    ):
        operation.add_argument(
            "-o",
            "--output",
            metavar="PATH",
            required=default is None,
            help="a file, or a folder that is there, or the URL of a file, or, with / at its end, of a folder"
            + ("" if default is None else f"; default: {default}"),
        )
        operation.add_argument("--force", action="store_true", help="replace the output if it exists")
        operation.add_argument("--fsync", action="store_true", help="return when the output is on the disk")


def _add_keys(operation: argparse.ArgumentParser, new: str, *, stored: bool, optional: bool) -> None:
    """The options that say where keys are; none of them is a key. stored: key metadata can be given, too. optional:
    columns of a file with a signed footer can be read without the footer key.
    """
    group = operation.add_argument_group(f"{'new ' if new else ''}keys")
    footer = group.add_mutually_exclusive_group(required=not optional)
    without = "; without, columns with keys of their own beside a signed footer, which is not verified" * optional
    footer.add_argument(
        f"--{new}footer-key-file",
        metavar="PATH",
        help=f"a file with the footer key: 16, 24 or 32 bytes, or their text{without}",
    )
    footer.add_argument(f"--{new}footer-key-env", metavar="VARIABLE", help="the environment variable with its text")

    def repeated(name: str, metavar: str, text: str) -> None:
        group.add_argument(f"--{new}{name}", metavar=metavar, action="append", default=[], help=text)

    repeated("column-key", "NAME=PATH", "the file with the key of a column, or of all in a group; may be repeated")
    repeated("column-key-env", "NAME=VARIABLE", "the same, in an environment variable")
    repeated("column-key-footer", "NAME", "this column is under the footer key")
    if stored:
        group.add_argument(
            f"--{new}footer-key-metadata", metavar="TEXT", help="what readers find the footer key by: it is in the file"
        )
        repeated("column-key-metadata", "NAME=TEXT", "the same for the key of a column")


def _keys(args: argparse.Namespace, new: str = "") -> Keys:
    """Read once for all FILEs: a pipe can be read only once, too."""
    held: dict[str, Keys] = vars(args).setdefault("held", {})
    if new in held:
        return held[new]

    def option(name: str) -> Any:
        return getattr(args, new + name, None)

    def pairs(name: str) -> list[tuple[str, str]]:
        shown = f"--{new}{name}".replace("_", "-")
        found = []
        for text in option(name) or ():
            column, equals, value = text.partition("=")
            if not (column and equals and value):
                args.usage(f"{shown} wants NAME=VALUE, not {text!r}")
            found.append((column, value))
        return found

    columns: list[tuple[str, Any]] = []
    columns += [(column, read_key(path, None, args.key_format)) for column, path in pairs("column_key")]
    columns += [(column, read_key(None, name, args.key_format)) for column, name in pairs("column_key_env")]
    columns += [(column, FOOTER_KEY) for column in option("column_key_footer")]
    if len(dict(columns)) < len(columns):
        args.usage("a column was given two keys")
    footer_metadata = option("footer_key_metadata")
    footer_key = None
    if option("footer_key_file") is not None or option("footer_key_env") is not None:
        footer_key = read_key(option("footer_key_file"), option("footer_key_env"), args.key_format)
    elif not columns or FOOTER_KEY in dict(columns).values():
        args.usage("--footer-key-file or --footer-key-env is required, or --column-key for columns that have keys")
    keys = held[new] = Keys(
        footer_key,
        dict(columns),
        footer_metadata=None if footer_metadata is None else os.fsencode(footer_metadata),
        column_metadata={column: os.fsencode(text) for column, text in pairs("column_key_metadata")},
    )
    return keys


# ---------------------------------------------------------------------------------------------------------- operations


def _output(args: argparse.Namespace, default: str | None) -> str:
    output: str | None = args.output
    if output is not None and (output.endswith("/") if local_path(output) is None else os.path.isdir(output)):
        return os.path.join(output, os.path.basename(args.file))
    if output is not None:
        if len(args.files) > 1:
            args.usage(f"{len(args.files)} files need a folder for -o, and {output} is none (a URL of one ends in /)")
        return output
    if default is None or default == args.file:
        raise ValueError(f"its name does not end in {MARK}.parquet: name the output with -o")
    return default


def _new_file(args: argparse.Namespace, output: str, *, private: bool = False) -> NewFile | NewObject:
    path = local_path(output)
    if path is not None:
        if private:
            check_plain_output(path)
        source = local_path(args.file)
        mode = kept_mode(args.file if source is None else source) if private or not os.path.exists(path) else None
        return NewFile(path, exclusive=not args.force, private=private, fsync=args.fsync, mode=mode)
    store, name = file_at(output)
    return store.new(name, exclusive=not args.force, private=private, fsync=args.fsync)


def _progress(args: argparse.Namespace) -> Progress:
    path = local_path(args.file)
    if path is not None:
        return Progress(args, os.path.getsize(path))
    store, name = file_at(args.file)
    found = store.stat(name)
    return Progress(args, 0 if found is None else found.size)


def _result(args: argparse.Namespace, report: Report, progress: Progress, output: str | None = None) -> dict[str, Any]:
    from ags_fast.parquet._check import shown

    fields = report.to_dict()
    del fields["op"]
    for column, row in zip(fields["columns"], report.columns, strict=True):
        column["key_metadata"] = shown(row.key_metadata)  # as inspect has it
    head = {"operation": args.operation, "input": args.file}
    if output is not None:
        head["output"] = output
    return {**head, **fields, "seconds": progress.seconds()}


def _encrypt(args: argparse.Namespace) -> dict[str, Any]:
    root, suffix = os.path.splitext(args.file)
    output = _output(args, root + MARK + suffix)
    keys = _keys(args)
    with _new_file(args, output) as new, _progress(args) as progress:
        report = parquet.encrypt_file(
            args.file,
            new,
            keys,
            algorithm=args.algorithm or ALGORITHMS[0],
            plaintext_footer=args.plaintext_footer,
            other_columns=args.other_columns,
            aad_prefix=aad_prefix(args),
            store_aad_prefix=not args.no_store_aad_prefix,
            v2_layout=args.v2_layout or "arrow",
            drop_bloom_filters=args.drop_bloom_filters,
            threads=args.threads,
            progress=progress.update,
        )
    return _result(args, report, progress, output)


def _decrypt(args: argparse.Namespace) -> dict[str, Any]:
    root, suffix = os.path.splitext(args.file)
    output = _output(args, root.removesuffix(MARK) + suffix)
    keys = _keys(args)
    with _new_file(args, output, private=True) as new, _progress(args) as progress:
        report = parquet.decrypt_file(
            args.file,
            new,
            keys,
            aad_prefix=aad_prefix(args),
            missing=args.missing,
            quirks=args.quirks,
            allow_ctr=args.allow_ctr,
            allow_unauthenticated_levels=args.allow_unauthenticated_levels,
            threads=args.threads,
            progress=progress.update,
        )
    return _result(args, report, progress, output)


def _reencrypt(args: argparse.Namespace) -> dict[str, Any]:
    output = _output(args, None)
    old, new_keys = _keys(args), _keys(args, "new_")
    changed = args.new_aad_prefix is not None or args.new_aad_prefix_hex is not None
    with _new_file(args, output) as new, _progress(args) as progress:
        report = parquet.reencrypt_file(
            args.file,
            new,
            old,
            new_keys,
            aad_prefix=aad_prefix(args),
            new_aad_prefix=aad_prefix(args, "new_") if changed else None,
            store_aad_prefix=not args.no_store_aad_prefix,
            same_size=args.same_size,
            algorithm=args.algorithm,
            plaintext_footer=args.plaintext_footer,
            other_columns=args.other_columns,
            v2_layout=args.v2_layout,
            quirks=args.quirks,
            allow_ctr=args.allow_ctr,
            allow_unauthenticated_levels=args.allow_unauthenticated_levels,
            threads=args.threads,
            progress=progress.update,
        )
    return _result(args, report, progress, output)


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    keys = _keys(args)
    with _progress(args) as progress:
        report = parquet.verify(
            args.file,
            keys,
            aad_prefix=aad_prefix(args),
            missing=args.missing,
            quirks=args.quirks,
            allow_ctr=args.allow_ctr,
            allow_unauthenticated_levels=args.allow_unauthenticated_levels,
            threads=args.threads,
            progress=progress.update,
        )
    return _result(args, report, progress)


def _inspect(args: argparse.Namespace) -> dict[str, Any]:
    return {"operation": args.operation, "input": args.file, **parquet.inspect(args.file), "authenticated": False}


# ---------------------------------------------------------------------------------------------------------- text

# The columns of a column's table: what stands above, the field, and whether it is a number.
SHOWN = (
    ("column", "path", False),
    ("key", "key", False),
    ("pages", "data_pages", True),
    ("dicts", "dictionary_pages", True),
    ("modules", "modules", True),
    ("bytes", "nbytes", True),
    ("tags", "authenticated", False),
    ("key metadata", "key_metadata", False),
)

TAGS = {"plain": "none", "missing": "not checked"}


def as_text(result: dict[str, Any]) -> str:
    """For people: the plain fields, a line for each column, and the warnings."""
    columns, warnings = result.get("columns"), result.get("warnings", ())
    plain = {
        name.replace("_", " "): _shown(value)
        for name, value in result.items()
        if value is not None and name not in ("columns", "warnings", "buffer_nbytes", "unauthenticated_levels")
    }
    if result.get("footer_verified"):
        plain.pop("footer verified")
    if result.get("algorithm") is None:
        plain.pop("aad prefix required", None)
    width = max(map(len, plain))
    lines = [f"{name:<{width}}  {value}" for name, value in plain.items()]
    if columns:
        fields = [one for one in SHOWN if any(column.get(one[1]) is not None for column in columns)]
        rows = [[_cell(column, field) for _, field, _ in fields] for column in columns]
        lines += ["", *_table([name for name, _, _ in fields], rows, [number for _, _, number in fields])]
    elif columns is None:
        lines += ["", "The footer is encrypted: without its key nobody sees the columns."]
    if warnings:
        lines += ["", *(f"warning: {printable(text)}" for text in warnings)]
    return "\n".join(lines) + "\n" * (len(lines) > len(plain))


def _cell(column: dict[str, Any], field: str) -> str:
    value = column.get(field)
    if field == "authenticated":
        sealed = column["key"] in ("footer", "column")  # and if its pages have no tags, its headers have
        without = "levels" if column.get("tags", {}).get("values") else "pages"
        return "all" if value and sealed else f"not of {without}" if sealed else TAGS[column["key"]]
    if isinstance(value, int):
        unknown = value == 0 and column["key"] in ("plain", "missing")  # of what was copied, or not looked at
        return "" if unknown else f"{value:,}"
    return "" if value is None else _shown(value)


def _shown(value: Any) -> str:
    """A value as people read it; key metadata as far as it tells which key to ask for."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, dict):
        return printable(str(value))
    if "hex" in value:
        return f"0x{value['hex']}"
    parts = [str(value.get("keyMaterialType"))]
    if "masterKeyID" in value:
        parts.append(f"master key {value['masterKeyID']}")
    if "doubleWrapping" in value:
        parts.append("double wrapping" if value["doubleWrapping"] else "single wrapping")
    if value.get("internalStorage") is False:
        parts.append(f"external {value.get('keyReference', 'material')}")
    return printable(", ".join(parts))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool]) -> list[str]:
    """Lines as wide as needed, but no wider than a terminal: then the widest cells of text are cut in the middle."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - 2 * (len(widths) - 1)
        while sum(widths) > room:
            widest = max((i for i in range(len(widths)) if not numbers[i]), key=widths.__getitem__)
            if widths[widest] <= NARROW:
                break
            widths[widest] -= 1

    def line(cells: Sequence[str]) -> str:
        fitted = []
        for text, width, number in zip(cells, widths, numbers, strict=True):
            if len(text) > width:
                text = f"{text[: width // 2]}…{text[len(text) - (width - 1) // 2 :]}"
            fitted.append(f"{text:>{width}}" if number else f"{text:<{width}}")
        return "  ".join(fitted).rstrip()

    return [line(header), *map(line, rows)]
