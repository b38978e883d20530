"""Where the ags-fast command begins: it says what Ctrl-C does before anything else is imported, which takes a while.

``python -P -m ags_fast`` is the same command. Without ``-P`` Python imports from the current directory first.
"""

import os
import sys

# The built-in module: even `signal` would have to be imported first.
from _signal import SIGINT, signal  # type: ignore[import-not-found]


def main() -> int:
    signal(SIGINT, _leave)
    from ags_fast.cli import command

    return command()


def _leave(*_: object) -> None:
    try:
        os.write(2, b"ags-fast: interrupted\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
