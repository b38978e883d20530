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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ags_fast.cli import pins
from ags_fast.cli.codes import (
    CODE_TEXTS,
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
from ags_fast.cli.commands import ABOUT, ALONE, GROUPS, MODULES, PROGRAM, SILENT, TASKS, TEXTS
from ags_fast.cli.options import fill, set_defaults
from ags_fast.cli.places import settle, to_standard_output
from ags_fast.cli.terminal import complain, escaped, interrupts, leave, lost, printable, say, show_warning, tell, warn
from ags_fast.cli.text import brief, did_you_mean, wrapped
from ags_fast.errors import AgsError, FormatError, IntegrityError
from ags_fast.profiles import NO_PROFILE, PROFILE_ENV, Profile, UnknownProfileError, config_path, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


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
    argv = [*sys.argv[1:]] if argv is None else [*argv]
    _SafeParser.as_json = "--json" in argv
    parser, rest = _command(argv)
    args = parser.parse_intermixed_args(rest)
    if code := _choose(args):
        return code
    chosen: Profile = args.chosen
    if defaults := chosen.commands.get(args.operation):
        set_defaults(args, defaults, f"{chosen.source}, [profiles.{chosen.name}.{args.operation}]")
        args = parser.parse_intermixed_args(rest)
    _fill(args, chosen)
    if not args.verbose:
        return _run_all(args)
    from ags_fast.engines.records import shown_records

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
    try:
        if args.profile or hasattr(args, "kms") or hasattr(args, "key_file"):  # other commands take nothing from it
            args.chosen = profile(args.profile)
    except UnknownProfileError as error:
        named = os.environ.get(PROFILE_ENV)
        if args.operation == "init":  # is about to write it
            pass
        elif args.profile:
            args.usage(str(error))
        elif named and args.operation == "show":  # looks for what is wrong
            warn(f"{error}. {PROFILE_ENV} names it")
        elif named:
            args.usage(f"{error}. {PROFILE_ENV} names it: correct the variable, or unset it")
    except (ValueError, OSError) as error:
        args.file = config_path()
        known = ConfigurationError(str(error)) if isinstance(error, ValueError) else error
        return _report_error(args, code_of(known), message_of(known, args), known)
    return 0


def _fill(args: argparse.Namespace, chosen: Profile) -> None:
    """Take from the profile what the command line leaves out."""
    args.chosen = chosen
    settle(args)
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
    named = (getattr(args, name, None) for name in ("paths", "include", "inside"))
    if "rows" in result and (patterns := next(filter(None, named), None)):
        result["matching"] = patterns
    code: int = result.get("exit_code", 0)
    quiet = args.quiet or sys.stdout is None  # as daemons have it
    silent = quiet and not (args.json or code or getattr(args, "dry_run", False)) and args.operation in SILENT
    if silent and not args.quiet:
        warn("standard output is closed, so that it does not show the result")
    if silent or result.keys() <= {"exit_code"}:
        return code
    show = say if to_standard_output(args) else tell
    return show(json.dumps(result) if args.json else args.text(escaped(result)), code)


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
        (say if to_standard_output(args) else tell)(json.dumps(told | more), code)
    complain(named(text, error, args))
    return code


# ---------------------------------------------------------------------------------------------------------- arguments


def _command(argv: Sequence[str]) -> tuple[_SafeParser, list[str]]:
    """Return the parser of the command that `argv` names, and the arguments of the command.

    Options may come before the command. Without a command, and for ``help``, the process ends with the help.
    """
    top = _SafeParser(prog=PROGRAM)
    at = 0
    while at < len(argv) and argv[at].startswith("-"):
        if argv[at] == "--version":
            from ags_fast.cli.version import version_text

            top.exit(tell(version_text()))
        at += 2 if argv[at] == "--profile" else 1
    options, words = [*argv[:at]], [*argv[at:]]
    wants_help = not words or "--help" in options or "-h" in options
    while words[:1] == ["help"]:
        words, wants_help = words[1:], True
    if not words:
        if options and not {"--help", "-h"} & {*options}:
            top.error("name a command")
        top.exit(tell(overview(), end=""))
    name = _one_of(words[0], TEXTS.keys(), top, "command")
    if name not in GROUPS:
        parser = _parsers(name)[name]
        rest = words[1:]
    else:
        group = _SafeParser(prog=f"{PROGRAM} {name}")
        parsers = _parsers(name)
        if len(words) < 2 or words[1] in ("-h", "--help"):
            group.exit(tell(_listed(name, parsers), end=""))
        parser = parsers[_one_of(words[1], parsers.keys(), group, "operation")]
        rest = words[2:]
    return parser, ["--help"] if wants_help else [*options, *rest]


def _one_of(word: str, known: Iterable[str], parser: _SafeParser, what: str) -> str:
    if word not in known:
        parser.error(f"there is no {what} {word!r}{did_you_mean(word, known)}")
    return word


def _parsers(name: str, make: Callable[..., _SafeParser] | None = None) -> dict[str, _SafeParser]:
    """Return the parser of a command, or those of a group, by operation, from the module that `MODULES` names."""
    module = import_module(f"ags_fast.cli.{MODULES[name]}")
    parsers = {}
    for one in module.COMMANDS:
        alone = MODULES.get(one.name) == MODULES[name] and one.name in ALONE
        if one.name == name or (name in GROUPS and not alone):
            words = f"{PROGRAM} {name} {one.name}" if name in GROUPS else f"{PROGRAM} {name}"
            parser = make(one.name, help=one.help, prog=words) if make else _SafeParser(prog=words)
            parser.description = one.help
            fill(parser, one, text=getattr(module, "TEXT", None), whole_parser=whole_parser)
            parsers[one.name] = parser
    return parsers


def whole_parser() -> argparse.ArgumentParser:
    """Return a parser that has the arguments of all commands, for what describes them."""
    parser = _SafeParser(prog=PROGRAM, description=ABOUT)
    parser.add_argument("--version", action="store_true", help="show the package, libcrypto and CPU features in use")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, text in TEXTS.items():
        if name in GROUPS:
            _parsers(name, commands.add_parser(name, help=text).add_subparsers(metavar="OPERATION").add_parser)
        elif name in MODULES:
            _parsers(name, commands.add_parser)
        else:
            commands.add_parser(name, help=text)
    return parser


def overview() -> str:
    """Return the help of ags-fast: all commands by task."""
    lines = [ABOUT, "", f"usage: {PROGRAM} COMMAND ...", ""]
    for task, texts in TASKS.items():
        lines += [f"{task}:", *(f"  {name:<11} {brief(text)}" for name, text in texts.items()), ""]
    lines.append(
        f"{PROGRAM} COMMAND --help shows operands, options, examples and exit codes; {PROGRAM} --version, what runs."
    )
    return "\n".join(lines) + "\n"


def _listed(name: str, parsers: Mapping[str, _SafeParser]) -> str:
    """Return the help of a group: its operations."""
    width = max(map(len, parsers))
    lines = [f"usage: {PROGRAM} {name} OPERATION ...", "", TEXTS[name], ""]
    lines += [f"  {one:<{width}}  {brief(parser.description or '')}" for one, parser in parsers.items()]
    return "\n".join([*lines, "", f"{PROGRAM} {name} OPERATION --help shows the rest.", ""])


class _SafeParser(argparse.ArgumentParser):
    as_json = False  # whether the command line asks for JSON

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.color = False  # Python 3.14 writes codes of colors to a terminal

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Take what follows an option that has one value as its value, also if that begins with "-", as ids may.

        A value that may be left out follows its option by "=" only: or an operand would be taken for the value.
        """
        flags, given = self._option_string_actions, list(sys.argv[1:] if args is None else args)
        for i in range([*given, "--"].index("--") - 1, -1, -1):
            option = flags.get(given[i])
            if option is not None and option.nargs == "?":
                given[i] += f"={option.const}"
            value = given[i + 1] if i + 1 < len(given) else ""
            is_value = value[:1] == "-" and value not in ("-", "--") and value.partition("=")[0] not in flags
            if is_value and option is not None and option.nargs is None:
                given[i : i + 2] = [f"{given[i]}={value}"]
        return super().parse_known_args(given, namespace)

    def format_help(self) -> str:
        """Return the help, with examples and exit codes."""
        import tomllib

        examples = tomllib.loads((Path(__file__).parent / "examples.toml").read_text("utf-8"))
        shown = [f"  {PROGRAM} {line}" for line in examples[self.prog.removeprefix(f"{PROGRAM} ")]]
        codes = "; ".join(f"{code} {text}" for code, text in CODE_TEXTS.items())
        return "\n".join([super().format_help(), "examples:", *shown, "", *wrapped(f"exit codes: {codes}", 2), ""])

    def error(self, message: str) -> NoReturn:
        """End with one line: the usage of most commands has more lines than a reader wants to skip."""
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if len(unknown) < len(message.split()) and (near := did_you_mean(unknown[0], self._option_string_actions)):
            message = f"there is no option {unknown[0]}{near}"
        text = printable(message)  # it may quote a name that a shell has filled in
        if self.as_json:
            operation = self.prog.rpartition(" ")[2]
            told = {"operation": operation, "input": None, "error_class": "UsageError", "error": text}
            tell(json.dumps(told), EXIT_USAGE)
        self.exit(
            EXIT_USAGE,
            f"{self.prog}: error: {text}{'' if text.endswith('?') else '.'} See {self.prog} --help\n",
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stderr:
            super()._print_message(message, file)
        elif code := tell(message, end=""):
            self.exit(code)
