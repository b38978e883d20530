"""Options of commands: each is defined once, and fills the argument of a job that has its name."""

from __future__ import annotations

import argparse
import re
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


class Option(NamedTuple):
    """An option of a command, or an operand."""

    flags: tuple[str, ...]
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """The attribute that argparse sets."""
        return str(self.settings.get("dest", self.flags[-1].lstrip("-").replace("-", "_")))

    def but(self, **settings: Any) -> Option:
        """The same option with other settings."""
        return Option(self.flags, {**self.settings, **settings})


class OneOf(NamedTuple):
    """Options that exclude each other."""

    options: tuple[Option, ...]
    required: bool = False


class Group(NamedTuple):
    """Options under a title of their own in the help."""

    title: str
    options: tuple[Option | OneOf, ...]


class Command(NamedTuple):
    """A command: what it runs, what it takes, and its help."""

    name: str
    run: Callable[[argparse.Namespace], dict[str, Any]]
    options: Sequence[Option | OneOf | Group]
    help: str
    defaults: Mapping[str, Any] = MappingProxyType({})


def option(*flags: str, **settings: Any) -> Option:
    """An option with the settings of `argparse.ArgumentParser.add_argument`."""
    return Option(flags, settings)


def switch(flag: str, text: str, *, off: str | None = None) -> Option:
    """An option without a value. off: the name that it sets to False."""
    if off is not None:
        return option(flag, action="store_false", dest=off, help=text)
    return option(flag, action="store_true", help=text)


def fill(parser: argparse.ArgumentParser, command: Command, **defaults: Any) -> None:
    """Give a parser the arguments of a command, and what `main` needs to run it."""
    parser.set_defaults(run=command.run, operation=command.name, usage=parser.error)
    parser.set_defaults(**{**defaults, **command.defaults})
    _add(parser, (PROFILE, HOW_MUCH, *command.options))
    parser.set_defaults(parser=parser, options={one.name: one for one in _flat((*command.options, HOW_MUCH))})


def _flat(options: Iterable[Option | OneOf | Group]) -> Iterator[Option]:
    for one in options:
        if isinstance(one, Option):
            yield one
        else:
            yield from _flat(one.options)


def _add(parser: Any, options: Iterable[Option | OneOf | Group]) -> None:
    for one in options:
        if isinstance(one, Group):
            _add(parser.add_argument_group(one.title), one.options)
        elif isinstance(one, OneOf):
            _add(parser.add_mutually_exclusive_group(required=one.required), one.options)
        else:
            settings = dict(one.settings)
            if one.flags == ("--wrapping-key-id",) and settings.pop("required", False):  # or from the profile
                parser.set_defaults(wants_wrapping_key_id=True)
            parser.add_argument(*one.flags, **settings)


def set_defaults(args: argparse.Namespace, given: Mapping[str, Any], where: str) -> None:
    """Give options of the command that `args` name other defaults, before they are parsed again.

    Args:
        args: What was parsed.
        given: The defaults, by option, as a TOML file has them.
        where: What they come from, for a usage error.
    """
    known: dict[str, Option] = {name: one for name, one in args.options.items() if one.flags[0].startswith("--")}
    for name, value in given.items():
        one = known.get(name.replace("-", "_"))
        if one is None:
            args.usage(f"{where}: {name} is not an option of {args.operation}; its options are {', '.join(known)}")
            return
        is_switch = str(one.settings.get("action", "")).startswith("store_")
        wanted = bool if is_switch else list if one.settings.get("action") == "append" else (str, int, float)
        choices = one.settings.get("choices")
        if not isinstance(value, wanted) or (not is_switch and isinstance(value, bool)):
            kind = "true or false" if is_switch else "a list" if wanted is list else "text or a number"
            args.usage(f"{where}: {name} is {kind}")
        if choices is not None and value not in choices:
            args.usage(f"{where}: {name} is one of {', '.join(map(str, choices))}")
        typed = "type" in one.settings and not isinstance(value, list)
        args.parser.set_defaults(**{one.name: str(value) if typed else value})


def values(args: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """What the command line says for `options`: keyword arguments of a job."""
    return {one.name: getattr(args, one.name) for one in options}


class Pairs(argparse._AppendAction):  # noqa: SLF001 (from which shtab knows that an option may be repeated)
    """Collects the values NAME=VALUE of a repeated option into a dict, which is empty without the option."""

    allows_empty = True

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, default={}, **settings)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        """Add one pair; a usage error for a malformed pair and for two values of one name."""
        found = dict(getattr(namespace, self.dest))
        name, equals, value = values.partition("=")
        if not equals or not (self.allows_empty or (name and value)):
            parser.error(f"{flag} wants {self.metavar}, not {values!r}")
        if found.setdefault(name, value) != value:
            parser.error(f"{flag} gives {name} twice")
        setattr(namespace, self.dest, found)


class FilledPairs(Pairs):
    """`Pairs` whose names and values are not empty."""

    allows_empty = False


class Pinned(argparse.Action):
    """Collects ``--dataset`` into a dict, each with the value of the ``--pin`` that follows it, or None."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, default={}, **settings)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        """Add a dataset, or a pin; a usage error for a pin that follows no dataset, and for a dataset named twice."""
        found: dict[str, str | None] = dict(getattr(namespace, self.dest))
        if flag == "--dataset":
            if values in found:
                parser.error(f"--dataset gives {values} twice")
            found[values] = None
        else:
            last = next(reversed(found), None)
            if last is None or found[last] is not None:
                parser.error("--pin follows the --dataset that it belongs to")
            found[last] = values
        setattr(namespace, self.dest, found)


# ------------------------------------------------------------------------------------------------------- kinds of value

UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}  # of durations, in seconds


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 is required, not {text!r}")
    return int(text)


def size(text: str) -> int:
    """A number of bytes."""
    from ags_fast.ags1 import nbytes_of

    try:
        return nbytes_of(text)
    except ValueError:
        what = "a number of bytes is required, such as 4096, 64K or 1M"
        raise argparse.ArgumentTypeError(f"{what}, not {text!r}") from None


def duration(text: str) -> timedelta:
    """A time with its unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])|0", text)
    try:
        if match is not None:
            return timedelta(seconds=float(match[1] or 0) * UNITS[match[2] or "s"])
    except OverflowError:
        pass
    raise argparse.ArgumentTypeError(f"a time with its unit is required, such as 12h, 7d or 4w, not {text!r}")


def days(text: str) -> float:
    """The days of a time with its unit."""
    return duration(text) / timedelta(days=1)


def share(text: str) -> float:
    """A part of the whole, from 0 to 1."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"a share is required, such as 5% or 0.05, not {text!r}")
    return value


# --------------------------------------------------------------------------------------------- options of many commands

PROFILE = option("--profile", metavar="NAME", help="a profile of config.toml; default: AGS_FAST_PROFILE")
JSON = switch("--json", "print the result, or the error, as one JSON object")
HOW_MUCH = OneOf(
    (
        option(
            *("-q", "--quiet"),
            action="store_true",
            help="print only errors, warnings and what the command is there to show",
        ),
        option(
            *("-v", "--verbose"),
            action="store_true",
            help="log calls to the KMS and the store, and the steps of jobs, to standard error",
        ),
    )
)
DRY_RUN = switch("--dry-run", "show what would be done, and change nothing")
THREADS = option("--threads", type=positive, metavar="N", help="number of threads; default: the usable CPUs")
OVERWRITE = switch("--overwrite", "replace the output if it exists")
INCLUDE = option("--include", metavar="PATTERN", action="append", help="only files that match; may be repeated")
EXCLUDE = option("--exclude", metavar="PATTERN", action="append", help="no files that match; may be repeated")
YES = switch("--yes", "do not ask")
NO_FSYNC = switch("--no-fsync", "do not wait for the disk", off="fsync")
NO_PRESERVE = switch("--no-preserve", "do not restore permission bits and times", off="preserve")
NEW_FILE = (
    OVERWRITE,
    switch("--fsync", "return only when the output is on the disk"),
    NO_PRESERVE.but(help="do not give the output the permission bits of FILE"),
)
KEY_FORMAT = option(
    "--key-format",
    choices=("auto", "raw", "hex", "base64"),
    default="auto",
    help="how keys are written; auto (the default) fails if a key can be read in two ways",
)


def aad_prefix_options(new: str = "", text: str = "text that tells this file from others under the same key") -> OneOf:
    """``--aad-prefix`` and ``--aad-prefix-hex``; with new="new-", ``--new-aad-prefix`` and its like."""
    return OneOf(
        (
            option(f"--{new}aad-prefix", metavar="TEXT", help=text),
            option(f"--{new}aad-prefix-hex", metavar="HEX", help="the same, as bytes"),
        )
    )
