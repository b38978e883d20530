"""The command `ags-fast` in processes of its own. As a script, the command that says when it takes signals."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from ags_fast import cli
from ags_fast.cli import stream


def announce() -> None:
    """Python's start is not ours, what comes after `ready` is."""
    import ags_fast.__main__ as command

    take = vars(command)["signal"]

    def ready(*args: Any) -> None:
        take(*args)
        os.write(1, b"ready\n")

    vars(command)["signal"] = ready
    sys.exit(command.main())


class Dying:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)


class Named:
    def __set_name__(self, owner: type, name: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)


def define() -> None:
    """Python 3.11 makes a RuntimeError of what the definition of a class raises here."""
    type("Owner", (), {"name": Named()})


def drop() -> None:
    """As a library that takes every exception for its own."""
    with suppress(BaseException):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)


def interrupt_in(place: str) -> None:
    def run(args: object) -> dict[str, Any]:
        {"class": define, "destructor": Dying, "library": drop}[place]()
        time.sleep(100)
        return {}

    vars(stream)["open_regular"] = run
    sys.argv = ["ags-fast", "stream", "inspect", "x"]
    sys.exit(cli.command())


def interrupt_at_the_end() -> None:
    """Python deletes the attributes of modules last."""
    vars(sys.modules[__name__])["_dying"] = Dying()
    sys.argv = ["ags-fast", "--version"]
    sys.exit(cli.command())


def inspect(path: str) -> None:
    assert cli.main(["parquet", "inspect", path]) == 0
    assert not {"pyarrow", "numpy", "pandas"} & set(sys.modules)


if __name__ == "__main__":
    announce()
