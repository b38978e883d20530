"""``ags-fast parquet encrypt|decrypt|reencrypt|inspect|verify``: Parquet files."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from ags_fast import parquet
from ags_fast.cli.files import Progress, aad_prefix, new_output, read_key, standard_input
from ags_fast.cli.options import (
    JSON,
    KEY_FORMAT,
    NEW_FILE,
    THREADS,
    Command,
    FilledPairs,
    Group,
    OneOf,
    aad_prefix_options,
    option,
    switch,
    values,
)
from ags_fast.cli.places import STANDARD
from ags_fast.cli.terminal import printable
from ags_fast.cli.text import fields, table
from ags_fast.fs import file_at, local_path
from ags_fast.parquet import FOOTER_KEY, Keys
from ags_fast.parquet.reading import QUIRKS
from ags_fast.parquet.spec import ALGORITHMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ags_fast.cli.options import Option
    from ags_fast.parquet import Report

READ_NBYTES = 1 << 20
MARK = ".enc"  # in the name of an encrypted file, before its suffix


# ---------------------------------------------------------------------------------------------------------------- keys


def _keys_group(new: str = "", *, stored: bool = False, optional: bool = False) -> Group:
    """The options that say where keys are; an option is never a key itself.

    stored: key metadata can be given, too. optional: columns of a file with a signed footer can be read without the
    footer key.
    """
    without = "; without it the signed footer is not verified, and only columns with keys of their own can be read"
    footer = (
        option(
            f"--{new}footer-key-file",
            metavar="PATH",
            help=f"a file with the footer key: 16, 24 or 32 bytes, raw, in hex or base64{without * optional}",
        ),
        option(f"--{new}footer-key-env", metavar="VARIABLE", help="the environment variable with the footer key"),
    )

    def pairs(name: str, metavar: str, text: str) -> Any:
        return option(f"--{new}{name}", metavar=metavar, action=FilledPairs, help=text)

    metadata = (
        option(
            f"--{new}footer-key-metadata",
            metavar="TEXT",
            help="how readers find the footer key: the text is stored in the file",
        ),
        pairs("column-key-metadata", "NAME=TEXT", "the same for the key of a column"),
    )
    return Group(
        f"{'new ' if new else ''}keys",
        (
            OneOf(footer, required=not optional),
            pairs(
                "column-key", "NAME=PATH", "a column, or a group of columns, and the file with its key; may be repeated"
            ),
            pairs("column-key-env", "NAME=VARIABLE", "the same, with an environment variable"),
            option(
                f"--{new}column-key-footer",
                metavar="NAME",
                action="append",
                default=[],
                help="encrypt this column with the footer key",
            ),
            *(metadata if stored else ()),
        ),
    )


def _keys(args: argparse.Namespace, new: str = "") -> Keys:
    """The keys of the options, read once for all FILEs: a pipe can be read only once."""
    held: dict[str, Keys] = vars(args).setdefault("held", {})
    if new not in held:
        held[new] = _read_keys(args, new)
    return held[new]


def _read_keys(args: argparse.Namespace, new: str) -> Keys:
    def given(name: str) -> Any:
        return getattr(args, new + name, None)

    columns: list[tuple[str, Any]] = []
    columns += [(column, read_key(path, None, args.key_format)) for column, path in given("column_key").items()]
    columns += [(column, read_key(None, name, args.key_format)) for column, name in given("column_key_env").items()]
    columns += [(column, FOOTER_KEY) for column in given("column_key_footer")]
    if len(dict(columns)) < len(columns):
        args.usage("a column was given two keys")
    footer_metadata = given("footer_key_metadata")
    footer_key = None
    if given("footer_key_file") is not None or given("footer_key_env") is not None:
        footer_key = read_key(given("footer_key_file"), given("footer_key_env"), args.key_format)
    elif not columns or FOOTER_KEY in dict(columns).values():
        args.usage("--footer-key-file or --footer-key-env is required, or --column-key for columns that have keys")
    return Keys(
        footer_key,
        dict(columns),
        footer_metadata=None if footer_metadata is None else os.fsencode(footer_metadata),
        column_metadata={name: os.fsencode(text) for name, text in (given("column_key_metadata") or {}).items()},
    )


# ------------------------------------------------------------------------------------------------------------- options

OUTPUT = option("-o", "--output", metavar="PATH")
OUTPUT_HELP = "a file, an existing folder, the URL of a file, or - for standard output; the URL of a folder ends in /"
KEPT = "as FILE has it"
FILES = option("files", nargs="+", metavar="FILE", help="a path, a URL such as s3://bucket/a.parquet, or - alone")
FIRST = (FILES, JSON.but(help="print the result, or the error, as one JSON object for each FILE"))
COMMON = (*FIRST, KEY_FORMAT, aad_prefix_options())

# What the functions of `parquet` take under the same names.
ALGORITHM = option("--algorithm", choices=ALGORITHMS)
LAYOUT = option("--v2-layout", choices=("arrow", "parquet-java"))
WRITING = (
    THREADS,
    switch(
        "--no-store-aad-prefix", "do not store the prefix in the output: readers must know it", off="store_aad_prefix"
    ),
    option(
        "--other-columns",
        choices=("footer", "plain"),
        default="footer",
        help="columns without a key of their own: under the footer key (the default), or in plain text",
    ),
)
READING = (
    THREADS,
    option(
        "--quirk",
        choices=sorted(QUIRKS),
        action="append",
        default=[],
        dest="quirks",
        help="accept a known mistake of this writer; may be repeated",
    ),
    switch(
        "--allow-ctr",
        "accept a FILE under AES_GCM_CTR_V1, whose pages have no tag: anyone who can write FILE can change them",
    ),
    switch(
        "--no-unauthenticated-levels",
        "refuse V2 pages of parquet-java: no tag covers which of their values are null",
        off="allow_unauthenticated_levels",
    ),
)
ENCRYPT = (
    *WRITING,
    ALGORITHM.but(default=ALGORITHMS[0], help=f"default: {ALGORITHMS[0]}"),
    LAYOUT.but(default="arrow", help="the reader of V2 pages; default: arrow"),
    switch("--plaintext-footer", "sign the footer instead of encrypting it, so that anyone can read it"),
    switch("--drop-bloom-filters", "for readers that cannot open bloom filters, such as DuckDB"),
)
DECRYPT = (
    *READING,
    option(
        "--missing",
        choices=("error", "drop"),
        default="error",
        help="columns whose keys are not given: fail (the default), or drop them",
    ),
)
VERIFY = (
    *READING,
    option(
        "--missing",
        choices=("error", "skip"),
        default="error",
        help="columns whose keys are not given: fail (the default), or skip them",
    ),
)
FOOTER = (
    option("--plaintext-footer", action="store_true", default=None, help=f"default: {KEPT}"),
    option(
        "--encrypted-footer", help="encrypt the footer", action="store_false", dest="plaintext_footer", default=None
    ),
)
REENCRYPT = (
    *WRITING,
    *READING[1:],
    ALGORITHM.but(help=f"default: {KEPT}"),
    LAYOUT.but(help=f"the reader of V2 pages; default: {KEPT}"),
    switch("--same-size", "keep every position; columns whose old keys are not given pass unchanged, under their keys"),
)

# ---------------------------------------------------------------------------------------------------------- operations


def _output(args: argparse.Namespace, default: str | None) -> str:
    output: str | None = args.output
    if (output or args.file) == STANDARD:
        return STANDARD
    if output is not None and (output.endswith("/") if local_path(output) is None else os.path.isdir(output)):
        if args.file == STANDARD:
            args.usage("standard input has no name: name a file with -o, or - for standard output")
        return os.path.join(output, os.path.basename(args.file))
    if output is not None:
        if len(args.files) > 1:
            args.usage(f"{len(args.files)} files need a folder for -o, and {output} is none (a URL of one ends in /)")
        return output
    if default is None or default == args.file:
        raise ValueError(f"its name does not end in {MARK}.parquet: name the output with -o")
    return default


def _source(args: argparse.Namespace) -> bytes | str:
    """Return what a function of `parquet` reads: standard input in memory, because the footer is at its end."""
    if len(args.files) > 1 and STANDARD in (*args.files, getattr(args, "output", None)):
        args.usage("- is for one FILE: name no other")
    if args.file != STANDARD:
        return args.file  # type: ignore[no-any-return]
    return b"".join(iter(partial(standard_input(args).read, READ_NBYTES), b""))  # a loop that Ctrl-C ends at once


def _nbytes(source: bytes | str) -> int:
    if isinstance(source, bytes):
        return len(source)
    path = local_path(source)
    if path is not None:
        return os.path.getsize(path)
    store, name = file_at(source)
    found = store.stat(name)
    return 0 if found is None else found.size


def _result(
    args: argparse.Namespace,
    call: Callable[..., Report],
    options: Iterable[Option],
    *keys: Keys,
    output: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Run a function of `parquet` on the file, and return its report. output: where the function writes."""
    from ags_fast.parquet.inspection import shown

    source = _source(args)
    private = call is parquet.decrypt_file
    begun = nullcontext() if output is None else new_output(args, output, private=private, whole=True)
    with begun as new, Progress(args, _nbytes(source)) as progress:
        files = (source,) if new is None else (source, new)
        known = values(args, options)
        report = call(*files, *keys, aad_prefix=aad_prefix(args), progress=progress.update, **known, **more)
    fields = report.to_dict()
    del fields["op"]
    for column, row in zip(fields["columns"], report.columns, strict=True):
        column["key_metadata"] = shown(row.key_metadata)  # as inspect has it
    head = {"input": args.file} | ({} if output is None else {"output": output})
    return {**head, **fields, "seconds": progress.seconds()}


def _encrypt(args: argparse.Namespace) -> dict[str, Any]:
    root, suffix = os.path.splitext(args.file)
    output = _output(args, root + MARK + suffix)
    return _result(args, parquet.encrypt_file, ENCRYPT, _keys(args), output=output)


def _decrypt(args: argparse.Namespace) -> dict[str, Any]:
    root, suffix = os.path.splitext(args.file)
    output = _output(args, root.removesuffix(MARK) + suffix)
    return _result(args, parquet.decrypt_file, DECRYPT, _keys(args), output=output)


def _reencrypt(args: argparse.Namespace) -> dict[str, Any]:
    changed = args.new_aad_prefix is not None or args.new_aad_prefix_hex is not None
    more = {
        "new_aad_prefix": aad_prefix(args, "new_") if changed else None,
        "plaintext_footer": args.plaintext_footer,
    }
    output, both = _output(args, None), (_keys(args), _keys(args, "new_"))
    return _result(args, parquet.reencrypt_file, REENCRYPT, *both, output=output, **more)


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    return _result(args, parquet.verify, VERIFY, _keys(args))


def _inspect(args: argparse.Namespace) -> dict[str, Any]:
    return {"input": args.file, **parquet.inspect(_source(args)), "authenticated": False}


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


def parquet_text(result: dict[str, Any]) -> str:
    """The plain fields, a line for each column, and the warnings."""
    columns, warnings = result.get("columns"), result.get("warnings", ())
    hidden = {"columns", "warnings", "buffer_nbytes", "row_group_offsets", "unauthenticated_levels"}
    hidden |= {"footer_verified"} if result.get("footer_verified") else set()
    hidden |= {"aad_prefix_required"} if result.get("algorithm") is None else set()
    plain = fields({name: _shown(value) for name, value in result.items() if value is not None and name not in hidden})
    lines = [*plain]
    if columns:
        shown = [one for one in SHOWN if any(column.get(one[1]) is not None for column in columns)]
        rows = [[_cell(column, field) for _, field, _ in shown] for column in columns]
        lines += ["", *table([name for name, _, _ in shown], rows, [number for _, _, number in shown], fit=True)]
    elif columns is None:
        lines += ["", "The footer is encrypted: its key is needed to see the columns."]
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


# ------------------------------------------------------------------------------------------------------------ commands

TEXT = parquet_text
COMMANDS = (
    Command(
        "encrypt",
        _encrypt,
        (
            *COMMON,
            _keys_group(stored=True),
            *ENCRYPT,
            OUTPUT.but(help=f"{OUTPUT_HELP}; default: NAME{MARK}.parquet for NAME.parquet"),
            *NEW_FILE,
        ),
        "Encrypt FILE without decoding values.",
    ),
    Command(
        "decrypt",
        _decrypt,
        (
            *COMMON,
            _keys_group(optional=True),
            *DECRYPT,
            OUTPUT.but(help=f"{OUTPUT_HELP}; default: NAME.parquet for NAME{MARK}.parquet"),
            *NEW_FILE,
        ),
        "Decrypt FILE. The output appears when every tag has passed, also at standard output.",
    ),
    Command(
        "reencrypt",
        _reencrypt,
        (
            *COMMON,
            _keys_group(),
            _keys_group("new-", stored=True),
            aad_prefix_options("new-", "a new prefix; default: the old one"),
            *REENCRYPT,
            OneOf(FOOTER),
            OUTPUT.but(help=OUTPUT_HELP, required=True),
            *NEW_FILE,
        ),
        "Give FILE new keys. Plaintext is never written.",
    ),
    Command("inspect", _inspect, FIRST, "Show the encryption of FILE without a key. None of it is authenticated."),
    Command(
        "verify",
        _verify,
        (*COMMON, _keys_group(optional=True), *VERIFY),
        "Check every tag of FILE, and that all its parts are there.",
    ),
)
