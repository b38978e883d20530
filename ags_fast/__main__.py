"""The entry point of the ags-fast command: it handles signals before the other imports, which take a while.

``python -P -m ags_fast`` is the same command. Without ``-P`` Python imports from the current directory first.
"""

import gc
import os
import sys

# The built-in module: even `signal` would have to be imported first.
from _signal import SIG_IGN, SIGHUP, SIGINT, SIGTERM, getsignal, signal  # type: ignore[import-not-found]  # noqa: PLC2701


def main() -> int:
    """Run ``ags-fast`` with the arguments of this process and return its exit code."""
    for number in (SIGINT, SIGTERM, SIGHUP):
        if number == SIGINT or getsignal(number) != SIG_IGN:  # as nohup has it
            signal(number, _leave)
    # pyarrow imports numpy, whose OpenBLAS starts threads that spin for 45 ms. Commands, and their workers, use none.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(20_000)  # most of what a command makes are modules, which stay
    from ags_fast.cli import command

    return command()


def _leave(number: int, *_: object) -> None:
    try:
        os.write(2, b"ags-fast: interrupted\n")
    finally:
        os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
