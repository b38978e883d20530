"""A worker process: ``python -m ags_fast.jobs.worker``. Its caller writes a context and then messages to its standard
input; it answers on its standard output with lists of rows, an empty one after each message."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from ags_fast.jobs.task import run_file

REPORT_SECONDS = 0.1


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; the caller decides
    incoming = Connection(os.dup(0), writable=False)
    outgoing = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # what a library prints must not get between the answers
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    context = incoming.recv()
    while True:
        try:
            tasks, attempt = incoming.recv()
        except EOFError:
            return
        rows = []
        reported = time.monotonic()
        for task in tasks:
            rows.append(run_file(context, task, attempt))
            if time.monotonic() - reported > REPORT_SECONDS:
                outgoing.send(rows)
                rows = []
                reported = time.monotonic()
        if rows:
            outgoing.send(rows)
        outgoing.send([])


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(1)  # the caller is gone
