"""``ags-fast completion``: scripts with which shells complete words. They are static, and start no Python."""

from __future__ import annotations

import argparse
from typing import Any

import shtab

from ags_fast.cli.commands import TEXTS
from ags_fast.cli.options import Command, option
from ags_fast.cli.terminal import tell
from ags_fast.cli.text import brief

FILES = {"DATASET", "DIR", "DST", "FILE", "KEYSTORE", "KEYSTORE|DATASET", "PATH", "SRC"}
# Names of profiles, without a parser of TOML.
NAMES = (
    r"""sed -n 's/^ *\[profiles\.\([A-Za-z0-9_-]*\)[].].*/\1/p' """
    r""""${AGS_FAST_CONFIG:-${XDG_CONFIG_HOME:-$HOME/.config}/ags_fast/config.toml}" 2>/dev/null | sort -u"""
)
IN_FISH = NAMES.replace("\\", "\\\\").replace("'", "\\'")
PROFILES: dict[str, Any] = {
    "bash": "_ags_fast_profiles",
    "zsh": "_ags_fast_profiles",
    "fish": "(_ags_fast_profiles)",
    "preamble": {
        "bash": f'_ags_fast_profiles() {{\n  compgen -W "$({NAMES})" -- "$1"\n}}',
        "zsh": f'_ags_fast_profiles() {{\n  compadd -- ${{(f)"$({NAMES})"}}\n}}',
        "fish": f"function _ags_fast_profiles\n  sh -c '{IN_FISH}'\nend",
    },
}
# bash splits --option=value into three words, which shtab does not join.
EQUALS = r"""
_ags_fast() {
  local i words=()
  for ((i = 0; i <= COMP_CWORD; i++)); do
    [ "${COMP_WORDS[i]}" = "=" ] || words+=("${COMP_WORDS[i]}")
  done
  [ "${COMP_WORDS[COMP_CWORD]}" != "=" ] || words+=("")
  local COMP_WORDS=("${words[@]}") COMP_CWORD=$((${#words[@]} - 1))
  _shtab_ags_fast
}

complete -o bashdefault -F _ags_fast ags-fast
"""


def _completion(args: argparse.Namespace) -> dict[str, Any]:
    parser = args.whole_parser()
    _mark(parser)
    script = shtab.complete(parser, args.file)
    return {"exit_code": tell(script + EQUALS if args.file == "bash" else script)}


def _mark(parser: argparse.ArgumentParser) -> None:
    """Tell shtab which arguments are files and profiles, and let it show the first part of each help."""
    for action in parser._actions:  # noqa: SLF001 (argparse has no public list of what was added)
        action.help = brief(action.help or "")
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for choice in action._choices_actions:  # noqa: SLF001
                choice.help = brief(choice.help or "")
            for below in action.choices.values():
                _mark(below)
        elif "--profile" in action.option_strings:
            action.complete = PROFILES  # type: ignore[attr-defined]
        elif action.metavar in FILES and (action.option_strings or action.metavar != "PATH"):  # not inside a dataset
            action.complete = shtab.FILE  # type: ignore[attr-defined]


COMMANDS = (
    Command(
        "completion",
        _completion,
        (option("file", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish"),),
        TEXTS["completion"],
        {"json": False},
    ),
)
