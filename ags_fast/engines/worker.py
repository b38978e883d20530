"""The program of a worker process.

The caller writes a context and then messages to its standard input. The worker answers on its standard output: None
when it is ready, then lists of rows, and an empty list after each message; None while only parts of files are done.
With each answer come the calls of the KMS and the bytes done since the last one, and what file systems lack.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from ags_fast.engines.records import SHOWN_ENV, show_records
from ags_fast.engines.together import run_files
from ags_fast.fs.lacking import gathered
from ags_fast.keys.kms import kms_calls

if TYPE_CHECKING:
    from ags_fast.dataset.rows import Row


REPORT_SECONDS = 0.1


def main() -> None:
    """Run tasks until the caller closes the pipe."""
    # Ctrl-C goes to all processes of a terminal; only the caller handles it. SIGINT was blocked until here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if os.environ.get(SHOWN_ENV):
        show_records()
    with suppress(EOFError, BrokenPipeError), gathered() as lacks:
        return _work(lacks)
    sys.exit(1)  # the caller is gone


def _work(lacks: set[str]) -> None:
    incoming = Connection(os.dup(0), writable=False)
    outgoing = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_end_with_caller, args=(incoming.fileno(),), daemon=True).start()
    told, done, sent, lock = kms_calls(), 0, time.monotonic(), threading.RLock()

    def report(rows: list[Row] | None) -> None:
        """Send rows, and what else there is since the last report."""
        nonlocal told, done, sent
        with lock:
            calls = kms_calls()
            outgoing.send((rows, calls - told, lacks, done))
            told, done, sent = calls, 0, time.monotonic()

    def moved(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            if time.monotonic() - sent > REPORT_SECONDS:
                report(None)

    context = replace(incoming.recv(), moved=moved)
    outgoing.send(None)

    while True:
        try:
            tasks, attempt = incoming.recv()
        except EOFError:
            return
        rows, reported = [], time.monotonic()
        for row in run_files(context, tasks, attempt):
            rows.append(row)
            if time.monotonic() - reported > REPORT_SECONDS:
                report(rows)
                rows, reported = [], time.monotonic()
        if rows:
            report(rows)
        report([])


def _end_with_caller(fd: int) -> None:
    """End at once when the caller is gone.

    Another process may have resumed the job or cleaned up after it. A file that appears later would be a surprise.
    """
    hangup = select.poll()
    hangup.register(fd, select.POLLHUP)
    hangup.poll()
    os._exit(1)
