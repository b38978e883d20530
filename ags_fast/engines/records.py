"""Log records of this process, and of its workers, on standard error: what ``--verbose`` shows."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ags_fast._text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SHOWN_ENV", "show_records", "shown_records"]

SHOWN_ENV = "AGS_FAST_SHOW_RECORDS"  # tells workers to show theirs, too


class _Line(logging.Formatter):
    """One line for a record: names of files may contain anything."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return printable(super().format(record))


def show_records() -> logging.Handler:
    """Print records of all loggers ``ags_fast.*``, from DEBUG on, to standard error. Returns the handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line("%(asctime)s %(name)s: %(message)s"))
    logger = logging.getLogger("ags_fast")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    return handler


@contextmanager
def shown_records() -> Iterator[None]:
    """Do as `show_records` in the ``with`` block, and let workers that start in the block do the same."""
    logger = logging.getLogger("ags_fast")
    level, before = logger.level, os.environ.get(SHOWN_ENV)
    handler = show_records()
    os.environ[SHOWN_ENV] = "1"
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        if before is None:
            del os.environ[SHOWN_ENV]
        else:
            os.environ[SHOWN_ENV] = before
