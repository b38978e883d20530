"""Datasets read in little memory. Imports nothing that takes much of it."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

from support import error_of

from ags_fast import AgsError
from ags_fast.dataset.access import Access, claimed_entries
from ags_fast.fs import Store

if TYPE_CHECKING:
    from collections.abc import Callable


def read_in_512_mib(folder: str, kms: dict[str, str]) -> None:
    """Prints the errors of a reader with keys, and of one without; reading must fail."""
    resource.setrlimit(resource.RLIMIT_AS, (512 << 20,) * 2)
    _refuse(lambda: Access.of(folder, kms).files(), lambda: claimed_entries(Store(folder)))


def refused_in_512_mib(folder: str, kms: dict[str, str]) -> None:
    """Prints the error of a reader with keys."""
    resource.setrlimit(resource.RLIMIT_AS, (512 << 20,) * 2)
    _refuse(lambda: Access.of(folder, kms).files())


def _refuse(*calls: Callable[[], object]) -> None:
    for call in calls:
        began = time.process_time()
        error = error_of(AgsError, call)
        print(type(error).__name__, error)
        assert time.process_time() - began < 20
