"""``ags-fast completion``: scripts with which shells complete words. They are static, and start no Python."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from ags_fast.cli.commands import SHELL_COMMANDS
from ags_fast.cli.options import Command, option
from ags_fast.cli.terminal import tell
from ags_fast.cli.tree import Argument, Node, tree_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

# Names of profiles, without a parser of TOML.
PROFILES = (
    r"""sed -n 's/^ *\[profiles\.\([A-Za-z0-9_-]*\)[].].*/\1/p' """
    r""""${AGS_FAST_CONFIG:-${XDG_CONFIG_HOME:-$HOME/.config}/ags_fast/config.toml}" 2>/dev/null | sort -u"""
)
BASH = r"""# bash completion of ags-fast. Load it by: eval "$(ags-fast completion bash)"

_ags_fast_reply() {
    local word
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen "$@" -- "$cur")
}

_ags_fast_profiles() {
    %(profiles)s
}

_ags_fast() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command="" commands="" options="" files="" i
    COMPREPLY=()
    if [ "$cur" = "=" ]; then  # --option=, which bash splits
        cur=""
    elif [ "$prev" = "=" ] && [ "$COMP_CWORD" -gt 1 ]; then
        prev=${COMP_WORDS[COMP_CWORD-2]}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$command ${COMP_WORDS[i]}" in
            %(commands)s) command="$command ${COMP_WORDS[i]}" ;;
        esac
    done
    case "$command" in
%(cases)s
    esac
    if [ -n "$commands" ] && [[ $cur != -* ]]; then
        _ags_fast_reply -W "$commands"
    elif [[ $cur == -* ]]; then
        _ags_fast_reply -W "$options"
    elif [ -n "$files" ]; then
        _ags_fast_reply -f
    fi
}

complete -o filenames -F _ags_fast ags-fast
"""
ZSH = r"""#compdef ags-fast
# zsh completion of ags-fast. Load it by: eval "$(ags-fast completion zsh)", after compinit

_ags_fast_profiles() {
    local -a names
    names=(${(f)"$(%(profiles)s)"})
    compadd -a names
}

%(functions)s
if [ "$funcstack[1]" = "_ags_fast" ]; then
    _ags_fast "$@"
else
    compdef _ags_fast ags-fast
fi
"""
FISH = r"""# fish completion of ags-fast. Load it by: ags-fast completion fish | source

function __ags_fast_profiles
    sh -c %(profiles)s
end

function __ags_fast_words
    set -l words (commandline -opc)
    string match -v -- '-*' $words[2..-1]
end

function __ags_fast_at  # after these words
    set -l words (__ags_fast_words)
    set -l number (count $argv)
    test (count $words) -ge $number; and test "$words[1..$number]" = "$argv"
end

function __ags_fast_exactly  # after these words, and no others
    set -l words (__ags_fast_words)
    test "$words" = "$argv"
end

%(lines)s
"""


def _completion(args: argparse.Namespace) -> dict[str, Any]:
    return {"exit_code": tell(SCRIPTS[args.file](tree_of(args.whole_parser())), end="")}


def bash_script(tree: Node) -> str:
    """Return the script for bash 3.2 and later."""
    nodes = tree.all()
    commands = " | ".join(shlex.quote(f" {' '.join(node.words)}") for node in nodes if node.words)
    cases = "\n".join(line for node in nodes for line in _bash_case(node))
    return BASH % {"profiles": PROFILES, "commands": commands, "cases": cases}


def _bash_case(node: Node) -> Iterator[str]:
    options = [one for one in node.arguments if one.flags]
    yield f"        {shlex.quote(''.join(f' {word}' for word in node.words))})"
    if valued := [one for one in options if one.has_value]:
        yield '            case "$prev" in'
        yield from (f"                {' | '.join(one.flags)}) {_bash_value(one)}return ;;" for one in valued)
        yield "            esac"
    yield f"            options={shlex.quote(' '.join(flag for one in options for flag in one.flags))}"
    if node.nodes:
        yield f"            commands={shlex.quote(' '.join(below.words[-1] for below in node.nodes))}"
    operands = [one for one in node.arguments if not one.flags]
    if words := [choice for one in operands for choice in one.choices]:
        yield f"            commands={shlex.quote(' '.join(words))}"
    elif any(one.is_file for one in operands):
        yield "            files=yes"
    yield "            ;;"


def _bash_value(one: Argument) -> str:
    if one.choices:
        return f"_ags_fast_reply -W {shlex.quote(' '.join(one.choices))}; "
    if one.is_profile:
        return '_ags_fast_reply -W "$(_ags_fast_profiles)"; '
    return "_ags_fast_reply -f; " if one.is_file else ""


def zsh_script(tree: Node) -> str:
    """Return the script for zsh."""
    functions = "\n".join(_zsh_function(node) for node in tree.all())
    return ZSH % {"profiles": PROFILES, "functions": functions}


def _zsh_function(node: Node) -> str:
    specs = [spec for one in node.arguments for spec in _zsh_specs(one)]
    lines = [f"{_zsh_name(node)}() {{"]
    if not node.nodes:
        return "\n".join([*lines, f"    _arguments {_joined(specs)}", "}", ""])
    lines += ["    local curcontext=$curcontext state line", "    local -a commands"]
    lines += [f"    _arguments -C {_joined([*specs, '1:command:->command', '*::argument:->argument'])}"]
    described = [f"{below.words[-1]}:{_brief(below.help).replace(':', chr(92) + ':')}" for below in node.nodes]
    lines += ["    case $state in", f"        command) commands=({_joined(described)})"]
    lines += ["            _describe command commands ;;", "        argument)", "            case $words[1] in"]
    lines += [f"                {below.words[-1]}) {_zsh_name(below)} ;;" for below in node.nodes]
    return "\n".join([*lines, "            esac ;;", "    esac", "}", ""])


def _zsh_name(node: Node) -> str:
    return "_".join(("_ags_fast", *node.words))


def _zsh_specs(one: Argument) -> Iterator[str]:
    value = f":{_zsh_text(one.metavar)}:{_zsh_action(one)}" if one.has_value else ""
    for flag in one.flags:
        yield f"*{flag}[{_zsh_text(_brief(one.help))}]{value}"
    if not one.flags:
        yield f"{'*' if one.repeats else ''}{value}"


def _zsh_action(one: Argument) -> str:
    if one.choices:
        return f"({' '.join(one.choices)})"
    return "_ags_fast_profiles" if one.is_profile else "_files" if one.is_file else " "


def _zsh_text(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


def _joined(words: Iterable[str]) -> str:
    return " \\\n        ".join(map(shlex.quote, words))


def fish_script(tree: Node) -> str:
    """Return the script for fish."""
    lines = [line for node in tree.all() for line in _fish_lines(node)]
    return FISH % {"profiles": _fish_quoted(PROFILES), "lines": "\n".join(lines)}


def _fish_lines(node: Node) -> Iterator[str]:
    at = ["__ags_fast_at", *node.words]
    exactly = " ".join(["__ags_fast_exactly", *node.words])
    for below in node.nodes:
        yield _fish(exactly, "-f", "-a", below.words[-1], "-d", _brief(below.help))
    if not node.words:
        at[0] = "__ags_fast_exactly"
    for one in node.arguments:
        flags = [part for flag in one.flags for part in _fish_flag(flag)]
        shown = ["-d", _brief(one.help)] if one.flags else []
        if one.choices:
            value = ["-x", "-a", " ".join(one.choices)]
        elif one.is_profile:
            value = ["-x", "-a", "(__ags_fast_profiles)"]
        else:
            value = [] if not one.has_value else ["-r", "-F"] if one.is_file else ["-x"]
        if flags:
            yield _fish(" ".join(at), *flags, *value, *shown)
        elif one.choices:
            yield _fish(" ".join(at), "-f", *value[1:])


def _fish_flag(flag: str) -> tuple[str, str]:
    return ("-l", flag[2:]) if flag.startswith("--") else ("-s", flag[1:])


def _fish(condition: str, *words: str) -> str:
    plain = re.compile(r"[\w-]+")
    told = [word if plain.fullmatch(word) else _fish_quoted(word) for word in words]
    return " ".join(["complete -c ags-fast -n", _fish_quoted(condition), *told])


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _brief(text: str) -> str:
    """Return the first part of a help."""
    return re.split(r"[;.]\s|: see ", text, maxsplit=1)[0].rstrip(".")


SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
COMMANDS = (
    Command(
        "completion",
        _completion,
        (option("file", metavar="SHELL", choices=tuple(SCRIPTS), help="bash, zsh or fish"),),
        SHELL_COMMANDS["completion"],
        {"json": False},
    ),
)
