"""Errors of the log. They move to `ags_fast.errors` when datasets stand on this floor."""

from __future__ import annotations

from ags_fast.errors import AgsError, ConcurrentChangeError
from ags_fast.keys.entry import UnknownKeyError


class JobEndedError(ConcurrentChangeError):
    """Another process has ended the job: the head of the log says so. Nothing was committed, and nothing will be."""


class UnknownOutcomeError(AgsError):
    """Nobody knows whether the job was committed, or will be: the storage did not answer. Nothing was deleted."""


class ExpiredError(AgsError, FileNotFoundError):
    """The version was expired: the dataset has only newer ones."""


class LeftKeyError(UnknownKeyError, FileNotFoundError):
    """The KEK has left the dataset, and its row has left the key store: no kept version needs it."""


class Again(Exception):  # noqa: N818 # no error: what was decided is out of date
    """Read the head again, and decide anew."""
