"""Where the ags-fast command begins: it says what Ctrl-C does before anything else is imported, which takes a while.

A module of its own, since the package would be imported before one of its modules.
"""

import os
from _signal import SIGINT, signal  # as built in: even `signal` would have to be imported first


def main() -> int:
    signal(SIGINT, _leave)
    from ags_fast.cli import command

    return command()


def _leave(*_: object) -> None:
    try:
        os.write(2, b"ags-fast: interrupted\n")
    finally:
        os._exit(130)
