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
    EXIT_USAGE,
    ConfigurationError,
    OutputClosedError,
    code_of,
    code_of_all,
    code_of_rows,
)
from ags_fast.cli.commands import DATASET_COMMANDS, GROUPS, LOOK_COMMANDS, SHELL_COMMANDS, SILENT, TAKE_COMMANDS
from ags_fast.cli.options import set_defaults
from ags_fast.cli.terminal import complain, escaped, interrupts, leave, printable, show_warning, warn
from ags_fast.cli.wording import message_of, named, say_rows
from ags_fast.errors import AgsError, FormatError, IntegrityError
from ags_fast.profiles import NO_PROFILE, PROFILE_ENV, Profile, UnknownProfileError, config_path, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def command() -> int:
    """Run ``sys.argv`` in a process of its own: Ctrl-C and unencodable text are handled here. Returns the exit code."""
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:  # names are bytes, whatever the locale says
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
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
    parser = _parser(argv)
    args = parser.parse_args(argv)
    if code := _choose(args):
        return code
    chosen: Profile = args.chosen
    if defaults := chosen.commands.get(args.operation):
        set_defaults(args, defaults, f"{chosen.source}, [profiles.{chosen.name}.{args.operation}]")
        args = parser.parse_args(argv)
    _fill(args, chosen)
    if not args.verbose:
        return _run_all(args)
    from ags_fast.jobs.records import shown_records

    with shown_records():
        return _run_all(args)


def _run_all(args: argparse.Namespace) -> int:
    """Run the command on each of its files, and return one exit code."""
    codes = []
    for file in getattr(args, "files", None) or [args.file]:
        args.file = file
        codes.append(_run(args))
        if codes[-1] == EXIT_INTERRUPTED:
            return EXIT_INTERRUPTED
    return code_of_all(codes)


def _choose(args: argparse.Namespace) -> int:
    """Set ``args.chosen`` to the profile, an empty one by default. Returns the exit code of a failure, else 0."""
    args.chosen = NO_PROFILE
    by_environment = bool(os.environ.get(PROFILE_ENV)) and hasattr(args, "kms")  # other commands take nothing from it
    try:
        if args.profile or by_environment:
            args.chosen = profile(args.profile)
    except UnknownProfileError as error:
        if args.profile:
            args.usage(str(error))
        elif args.operation == "show":  # looks for what is wrong
            warn(f"{error}. {PROFILE_ENV} names it")
        else:
            args.usage(f"{error}. {PROFILE_ENV} names it: correct the variable, or unset it")
    except (ValueError, OSError) as error:
        args.file = config_path()
        known = ConfigurationError(str(error)) if isinstance(error, ValueError) else error
        return _report_error(args, code_of(known), message_of(known, args), known)
    return 0


def _fill(args: argparse.Namespace, chosen: Profile) -> None:
    """Take from the profile what the command line leaves out."""
    args.chosen = chosen
    if getattr(args, "key_store", "") is None:
        args.key_store = chosen.key_store
    if getattr(args, "wants_wrapping_key_id", False) and args.wrapping_key_id is None:
        args.wrapping_key_id = chosen.wrapping_key_id
        if args.wrapping_key_id is None:
            args.usage("the following arguments are required: --wrapping-key-id")


def _run(args: argparse.Namespace) -> int:
    """Run the command on one file, print its result or its error, and return the exit code."""
    try:
        with interrupts.raised():
            result: dict[str, Any] = args.run(args)
    except KeyboardInterrupt:
        return _report_interruption(args)
    except OutputClosedError as error:
        raise BrokenPipeError from error
    except (AgsError, OSError, ValueError, ImportError, ConfigurationError) as error:
        stopped = getattr(error, "result", None)  # of a JobError
        failed = code_of_rows(row.error_class for row in stopped.failed) if stopped is not None else 0
        return _report_error(args, failed or code_of(error), message_of(error, args), error, **_place(error))
    except Exception as error:
        if interrupts.caused(error):
            return _report_interruption(args)
        # a bug
        for line in "".join(traceback.format_exception(error)).splitlines():
            print(printable(line), file=sys.stderr)
        return _report_error(args, EXIT_FAILED, f"unexpected {type(error).__name__}", error)
    say_rows(result, args)
    code: int = result.get("exit_code", 0)
    silent = args.quiet and not (args.json or code or getattr(args, "dry_run", False)) and args.operation in SILENT
    if result and not silent:
        print(json.dumps(result) if args.json else args.text(escaped(result)))
    return code


def _report_interruption(args: argparse.Namespace) -> int:
    text = "interrupted; nothing half-written was left behind"
    if hasattr(args, "resume"):
        how = "--resume length" if args.operation != "rotate" else "--resume"
        text += f". What is finished stays: the same command with {how} goes on"
    return _report_error(args, EXIT_INTERRUPTED, text, KeyboardInterrupt())


def _place(error: Exception) -> dict[str, Any]:
    """The place of an IntegrityError in a stream or in a Parquet file."""
    if not isinstance(error, (IntegrityError, FormatError)):
        return {}
    module = getattr(error, "module", None)
    if module is None:
        return {"block_index": getattr(error, "block_index", None)}
    return {"module": module} | {name: getattr(error, name) for name in ("row_group", "column", "page")}


def _report_error(args: argparse.Namespace, code: int, text: str, error: BaseException, **more: Any) -> int:
    if args.json:
        told = {"operation": args.operation, "input": args.file, "error_class": type(error).__name__, "error": text}
        print(json.dumps(told | more))
    complain(named(text, error, args))
    return code


# ---------------------------------------------------------------------------------------------------------- arguments


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of one command. It knows the names of the others, whose imports take time."""
    _SafeParser.as_json = "--json" in argv
    return _with_commands(lambda name: name == (argv[0] if argv else None))


def whole_parser() -> argparse.ArgumentParser:
    """Return a parser that has the arguments of all commands."""
    return _with_commands(lambda _: True)


def _with_commands(wanted: Callable[[str], bool]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _SafeParser(
        prog="ags-fast", description="Client-side encryption of lakehouse files.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="package, libcrypto and CPU features in use")
    groups = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text in (GROUPS | DATASET_COMMANDS | TAKE_COMMANDS | LOOK_COMMANDS | SHELL_COMMANDS).items():
        if wanted(name):
            _add(groups, name)
        else:
            groups.add_parser(name, help=text)
    return parser


def _add(groups: argparse._SubParsersAction[argparse.ArgumentParser], name: str) -> None:
    if name == "config":
        from ags_fast.cli.config import add_config

        add_config(groups)
    elif name == "stream":
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
    elif name == "completion":
        from ags_fast.cli.completion import add_completion

        add_completion(groups, whole_parser)
    elif name in TAKE_COMMANDS:
        from ags_fast.cli.taking import add_taking

        add_taking(groups, name)
    elif name == "man":
        from ags_fast.cli.manual import add_man

        add_man(groups, whole_parser)
    elif name in LOOK_COMMANDS:
        from ags_fast.cli.looking import add_looking

        add_looking(groups, name)
    else:
        from ags_fast.cli.dataset import add_dataset

        add_dataset(groups, name)


class _SafeParser(argparse.ArgumentParser):
    as_json = False  # whether the command line asks for JSON

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.color = False  # Python 3.14 writes codes of colors to a terminal

    def error(self, message: str) -> NoReturn:
        """End with one line: the usage of most commands has more lines than a reader wants to skip."""
        text = printable(message)  # it may quote a name that a shell has filled in
        if self.as_json:
            operation = self.prog.rpartition(" ")[2]
            print(json.dumps({"operation": operation, "input": None, "error_class": "UsageError", "error": text}))
        self.exit(EXIT_USAGE, f"{self.prog}: error: {text}. See {self.prog} --help\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ags_fast.cli.version import version_text

        print(version_text())
        parser.exit()
