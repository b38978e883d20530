"""Runs a command: parses its arguments, prints its result or its error, and returns the exit code."""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import sys
import traceback
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from ags_fast.cli import pins
from ags_fast.cli.codes import (
    EXIT_FAILED,
    EXIT_SIGNAL,
    EXIT_USAGE,
    ConfigurationError,
    OutputClosedError,
    code_of,
    code_of_all,
    code_of_rows,
    message_of,
    named,
    say_rows,
)
from ags_fast.cli.commands import GROUPS, MODULES, SILENT, TEXTS
from ags_fast.cli.options import add_commands, set_defaults
from ags_fast.cli.terminal import complain, escaped, interrupts, leave, lost, printable, show_warning, tell, warn
from ags_fast.errors import AgsError, FormatError, IntegrityError
from ags_fast.profiles import NO_PROFILE, PROFILE_ENV, Profile, UnknownProfileError, config_path, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def command() -> int:
    """Run ``sys.argv`` in a process of its own: handles signals and unencodable text. Returns the exit code."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # a file with its number would get what Python and libraries print
            os.open(os.devnull, os.O_RDWR)
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:  # names are bytes, whatever the locale says
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    interrupts.install()
    warnings.showwarning = show_warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return main()
    except KeyboardInterrupt:
        leave(interrupts.number)
        raise
    finally:
        try:
            print(end="", flush=True)
        except OSError:  # `tell` has said so; Python would again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        gc.freeze()  # or Python would look through all that was imported before it ends


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
        if codes[-1] > EXIT_SIGNAL:
            return codes[-1]
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
            result = pins.run(args)
    except KeyboardInterrupt:
        return _report_interruption(args)
    except OutputClosedError as error:
        return lost(error.__cause__)
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
    if result.keys() - {"exit_code"}:
        result = {"operation": args.operation, **result}
    say_rows(result, args)
    if "rows" in result and (patterns := getattr(args, "paths", None) or getattr(args, "include", None)):
        result["matching"] = patterns
    code: int = result.get("exit_code", 0)
    quiet = args.quiet or sys.stdout is None  # as daemons have it
    silent = quiet and not (args.json or code or getattr(args, "dry_run", False)) and args.operation in SILENT
    if silent and not args.quiet:
        warn("standard output is closed, so that it does not show the result")
    if silent or result.keys() <= {"exit_code"}:
        return code
    return tell(json.dumps(result) if args.json else args.text(escaped(result)), code)


def _report_interruption(args: argparse.Namespace) -> int:
    text = "interrupted; nothing half-written was left behind"
    if hasattr(args, "resume"):
        how = "--resume length" if args.operation != "rotate" else "--resume"
        text += f". What is finished stays: the same command with {how} goes on"
    return _report_error(args, EXIT_SIGNAL + interrupts.number, text, KeyboardInterrupt())


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
        tell(json.dumps(told | more), code)
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
    for name, text in TEXTS.items():
        if wanted(name):
            _add(groups, name)
        else:
            groups.add_parser(name, help=text)
    return parser


def _add(groups: argparse._SubParsersAction[argparse.ArgumentParser], name: str) -> None:
    """Add a command or a group of commands, from the module that `MODULES` names."""
    module = import_module(f"ags_fast.cli.{MODULES[name]}")
    commands = [one for one in module.COMMANDS if name in GROUPS or one.name == name]
    if name in GROUPS:
        group = groups.add_parser(name, help=GROUPS[name], allow_abbrev=False)
        groups = group.add_subparsers(required=True, dest="operation", metavar="OPERATION")
    add_commands(groups, commands, text=getattr(module, "TEXT", None), whole_parser=whole_parser)


class _SafeParser(argparse.ArgumentParser):
    as_json = False  # whether the command line asks for JSON

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.color = False  # Python 3.14 writes codes of colors to a terminal

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Take what follows an option that has one value as its value, also if that begins with "-", as ids may."""
        flags, given = self._option_string_actions, list(sys.argv[1:] if args is None else args)
        for i in range([*given, "--"].index("--") - 1, 0, -1):
            option = flags.get(given[i - 1])
            is_value = given[i][:1] == "-" and given[i] != "-" and given[i].partition("=")[0] not in flags
            if is_value and option is not None and option.nargs is None:
                given[i - 1 : i + 1] = [f"{given[i - 1]}={given[i]}"]
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        """End with one line: the usage of most commands has more lines than a reader wants to skip."""
        text = printable(message)  # it may quote a name that a shell has filled in
        if self.as_json:
            operation = self.prog.rpartition(" ")[2]
            told = {"operation": operation, "input": None, "error_class": "UsageError", "error": text}
            tell(json.dumps(told), EXIT_USAGE)
        self.exit(EXIT_USAGE, f"{self.prog}: error: {text}. See {self.prog} --help\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stderr:
            super()._print_message(message, file)
        elif code := tell(message, end=""):
            self.exit(code)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ags_fast.cli.version import version_text

        parser.exit(tell(version_text()))
