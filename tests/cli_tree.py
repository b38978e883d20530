"""The commands as a tree, read from their parsers."""

from __future__ import annotations

import argparse
from typing import NamedTuple


class Argument(NamedTuple):
    """An option of a command, or an operand, which has no flags."""

    flags: tuple[str, ...]
    metavar: str
    help: str
    choices: tuple[str, ...]
    has_value: bool
    repeats: bool


class Node(NamedTuple):
    """A command, or a group of commands, which has no arguments.

    Attributes:
        words: What leads there; empty for ags-fast itself.
        help: What it does.
        nodes: The commands of a group.
        arguments: Operands and options, in the order of the help.
        usage: The usage, as argparse has it.
    """

    words: tuple[str, ...]
    help: str
    nodes: tuple[Node, ...]
    arguments: tuple[Argument, ...]
    usage: str

    def all(self) -> tuple[Node, ...]:
        """Return this node and all below."""
        return (self, *(below for node in self.nodes for below in node.all()))


def tree_of(parser: argparse.ArgumentParser, words: tuple[str, ...] = (), text: str = "") -> Node:
    """Return the tree of a parser whose commands have all their arguments."""
    nodes: list[Node] = []
    arguments = []
    for action in parser._actions:  # noqa: SLF001 (argparse has no public list of what was added)
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}  # noqa: SLF001
            nodes += (tree_of(below, (*words, name), helps[name]) for name, below in action.choices.items())
        else:
            arguments.append(_argument(action))
    return Node(words, text or parser.description or "", tuple(nodes), tuple(arguments), parser.format_usage())


def _argument(action: argparse.Action) -> Argument:
    choices = tuple(map(str, action.choices or ()))
    name = "|".join(choices) if choices and not action.metavar else str(action.metavar or action.dest)
    return Argument(
        tuple(action.option_strings),
        name,
        (action.help or "").replace("%%", "%"),
        choices,
        action.nargs != 0,
        action.nargs in ("+", "*"),
    )
