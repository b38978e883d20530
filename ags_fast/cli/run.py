"""Runs a command: parses its arguments, prints its result or its error, and returns the exit code."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import traceback
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

from ags_fast.cli.codes import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ConfigurationError,
    OutputClosedError,
    code_of,
    code_of_all,
    code_of_rows,
)
from ags_fast.cli.commands import DATASET_COMMANDS, GROUPS
from ags_fast.cli.terminal import complain, escaped, interrupts, leave, printable, show_warning
from ags_fast.errors import AgsError, FormatError, IntegrityError

if TYPE_CHECKING:
    from collections.abc import Sequence


def command() -> int:
    """Run ``sys.argv`` in a process of its own: Ctrl-C and unencodable text are handled here. Returns the exit code."""
    interrupts.install()
    warnings.showwarning = show_warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed standard output, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        leave()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command in this process and return its exit code.

    Args:
        argv: The arguments after the program's name; ``sys.argv[1:]`` by default.

    Raises:
        SystemExit: With code 2 for wrong arguments; with 0 after ``--help`` and ``--version``.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv).parse_args(argv)
    codes = []
    for file in getattr(args, "files", None) or [args.file]:
        args.file = file
        codes.append(_run(args))
        if codes[-1] == EXIT_INTERRUPTED:
            return EXIT_INTERRUPTED
    return code_of_all(codes)


def _run(args: argparse.Namespace) -> int:
    """Run the command on one file, print its result or its error, and return the exit code."""
    try:
        with interrupts.raised():
            result: dict[str, Any] = args.run(args)
    except KeyboardInterrupt:
        text = "interrupted; nothing half-written was left behind"
        return _report_error(args, EXIT_INTERRUPTED, text, "KeyboardInterrupt")
    except OutputClosedError as error:
        raise BrokenPipeError from error
    except (AgsError, OSError, ValueError, ImportError, ConfigurationError) as error:
        stopped = getattr(error, "result", None)  # of a JobError
        failed = code_of_rows(row.error_class for row in stopped.failed) if stopped is not None else 0
        return _report_error(args, failed or code_of(error), str(error), type(error).__name__, **_place(error))
    except Exception as error:  # a bug
        for line in "".join(traceback.format_exception(error)).splitlines():
            print(printable(line), file=sys.stderr)
        return _report_error(args, EXIT_FAILED, f"unexpected {type(error).__name__}", type(error).__name__)
    code: int = result.get("exit_code", 0)
    if result:
        print(json.dumps(result) if args.json else args.text(escaped(result)))
    return code


def _place(error: Exception) -> dict[str, Any]:
    """The place of an IntegrityError in a stream or in a Parquet file."""
    if not isinstance(error, (IntegrityError, FormatError)):
        return {}
    module = getattr(error, "module", None)
    if module is None:
        return {"block_index": getattr(error, "block_index", None)}
    return {"module": module} | {name: getattr(error, name) for name in ("row_group", "column", "page")}


def _report_error(args: argparse.Namespace, code: int, text: str, error_class: str, **more: Any) -> int:
    if args.json:
        print(
            json.dumps(
                {"operation": args.operation, "input": args.file, "error_class": error_class, "error": text, **more}
            )
        )
    complain(f"{args.file}: {text}")
    return code


# ---------------------------------------------------------------------------------------------------------- arguments


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of one command. It knows the names of the others, whose imports take time."""
    parser: argparse.ArgumentParser = _SafeParser(
        prog="ags-fast", description="Client-side encryption of lakehouse files.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="package, libcrypto and CPU features in use")
    groups = parser.add_subparsers(required=True, metavar="COMMAND")
    command = argv[0] if argv else None
    for name, text in (GROUPS | DATASET_COMMANDS).items():
        if name == command:
            _add(groups, name)
        else:
            groups.add_parser(name, help=text)
    return parser


def _add(groups: argparse._SubParsersAction[argparse.ArgumentParser], name: str) -> None:
    if name == "stream":
        from ags_fast.cli.stream import add_stream

        add_stream(groups)
    elif name == "keys":
        from ags_fast.cli.keys import add_keys

        add_keys(groups)
    elif name == "iceberg":
        from ags_fast.cli.iceberg import add_iceberg

        add_iceberg(groups)
    elif name == "parquet":
        from ags_fast.cli.parquet import add_parquet

        add_parquet(groups)
    else:
        from ags_fast.cli.dataset import add_dataset

        add_dataset(groups, name)


class _SafeParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))  # it may quote a name that a shell has filled in


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ags_fast.cli.version import version_text

        print(version_text())
        parser.exit()
