"""``ags-fast man``: manual pages, made from the parsers."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from ags_fast._version import __version__
from ags_fast.cli.commands import SHELL_COMMANDS
from ags_fast.cli.options import JSON, Command, option
from ags_fast.cli.text import count
from ags_fast.cli.tree import Argument, Node, tree_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

PROGRAM = "ags-fast"
CODES = {
    "0": "Done.",
    "1": "Some files failed, or everything was skipped; another job was in the way, or the outcome is unknown.",
    "2": "Usage.",
    "3": "Integrity or format.",
    "4": "No access to the key.",
    "5": "Not found, no permission, an expired version, or standard output takes nothing.",
    "6": "Configuration, or a missing module.",
    "129": "Interrupted by SIGHUP.",
    "130": "Interrupted by Ctrl-C.",
    "143": "Interrupted by SIGTERM.",
}
ENVIRONMENT = {
    "AGS_FAST_CONFIG": "The path of the configuration.",
    "AGS_FAST_PROFILE": "The profile to use if --profile is not given.",
    "AGS_FAST_THREADS": "The number of threads of a process; by default the usable CPUs.",
}
CONFIG = {
    "$XDG_CONFIG_HOME/ags_fast/config.toml, ~/.config/ags_fast/config.toml": "Profiles of KMS properties and of "
    "defaults. `ags-fast config show` prints what commands use."
}


def _man(args: argparse.Namespace) -> dict[str, Any]:
    found = pages(tree_of(args.whole_parser()))
    os.makedirs(args.file, exist_ok=True)
    for name, page in found.items():
        with open(os.path.join(args.file, name), "w", encoding="utf-8") as file:
            file.write(page)
    return {"folder": args.file, "pages": sorted(found)}


def _text(found: dict[str, Any]) -> str:
    return f"{count(len(found['pages']), 'page')} in {found['folder']}"


def pages(tree: Node) -> dict[str, str]:
    """Return a page for ags-fast, and one for each command, by the names of their files."""
    return {f"{_name(node)}.1": "\n".join(_page(node, tree)) + "\n" for node in tree.all()}


def _name(node: Node) -> str:
    return "-".join((PROGRAM, *node.words))


def _page(node: Node, tree: Node) -> Iterator[str]:
    yield f'.TH "{_name(node).upper()}" "1" "" "ags_fast {__version__}" "ags_fast"'
    yield from (".SH NAME", f"{_roff(_name(node))} \\- {_roff(_brief(node.help))}")
    usage = " ".join(node.usage.split()).removeprefix("usage: ")
    program = " ".join((PROGRAM, *node.words))
    yield from (".SH SYNOPSIS", f".B {_roff(program)}", _roff(usage.removeprefix(program).strip()))
    yield from (".SH DESCRIPTION", _roff(_sentence(node.help)))
    if node.nodes:
        yield ".SH COMMANDS"
        for below in node.nodes:
            yield from _item(f"\\fB{_roff(_name(below))}\\fR(1)", _sentence(below.help))
    for title, wanted in (("OPERANDS", False), ("OPTIONS", True)):
        arguments = [one for one in node.arguments if bool(one.flags) == wanted]
        yield from [f".SH {title}"] if arguments else []
        for one in arguments:
            yield from _item(_heading(one), _sentence(one.help, one.choices))
    for title, items in (("EXIT STATUS", CODES), ("ENVIRONMENT", ENVIRONMENT), ("FILES", CONFIG)):
        yield f".SH {title}"
        for name, text in items.items():
            yield from _item(f"\\fB{_roff(name)}\\fR", text)
    above = [one for one in tree.all() if node.words[:-1] == one.words and one is not node]
    beside = [one for one in above[0].nodes if one is not node] if above else []
    if above:
        yield ".SH SEE ALSO"
        yield ", ".join(f"\\fB{_roff(_name(one))}\\fR(1)" for one in (*above, *beside))


def _item(heading: str, text: str) -> Iterator[str]:
    yield from (".TP", heading, _roff(text) or "\\&")


def _heading(one: Argument) -> str:
    value = f"\\fI{_roff(one.metavar)}\\fR" if one.has_value else ""
    if not one.flags:
        return value + (" ..." if one.repeats else "")
    flags = ", ".join(f"\\fB{_roff(flag)}\\fR" for flag in one.flags)
    return f"{flags} {value}".rstrip()


def _roff(text: str) -> str:
    r"""Escape text for roff: a hyphen would become a dash. What is between backticks is bold."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    escaped = re.sub(r"`([^`]*)`", r"\\fB\1\\fR", escaped)
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped


def _brief(text: str) -> str:
    return re.split(r"\.(\s|$)", text, maxsplit=1)[0]


def _sentence(text: str, choices: tuple[str, ...] = ()) -> str:
    """Return a help as a sentence. The name of a choice at its beginning stays as it is."""
    if re.split(r"[:,;. ]", text, maxsplit=1)[0] not in choices:
        text = text[:1].upper() + text[1:]
    return text if not text or text.endswith((".", ":", "?")) else f"{text}."


TEXT = _text
COMMANDS = (
    Command(
        "man",
        _man,
        (option("file", metavar="DIR", help="the folder; made if it does not exist"), JSON),
        SHELL_COMMANDS["man"],
    ),
)
