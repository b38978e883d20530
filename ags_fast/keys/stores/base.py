"""What a key store can do, and the names of its rows.

A *row* is a wrapped KEK. Its name has the id of the job that made it, random bits, and the SHA-256 of the wrapped KEK.
So no name is used twice, a row never changes, and a reader sees whether it is the row that the log names.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import builtins
    from collections.abc import Collection, Iterable, Mapping

JOB_ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{12}")
WRAPPED_NBYTES = 1 << 20  # the longest wrapped KEK
NAME = re.compile(rf"({JOB_ID.pattern})-[0-9a-f]{{8}}-([0-9a-f]{{64}})")


@runtime_checkable
class KeyResolver(Protocol):
    """Looks wrapped KEKs up. With no more than that, datasets can be read and not changed."""

    def get(self, dataset_id: str, names: Collection[str]) -> Mapping[str, bytes]:
        """Return wrapped KEKs, each under the name of its row.

        Args:
            dataset_id: The dataset whose rows they are.
            names: The rows.

        Returns:
            What there is: a row that is not there may be left out.

        Raises:
            KeyError: There is no such row. UnknownKeyError says the same.
            KeyAccessError: The store does not answer, or refuses.
        """


@runtime_checkable
class KeyStore(KeyResolver, Protocol):
    """Keeps wrapped KEKs of datasets. Each method raises KeyAccessError if the store does not answer, or refuses.

    A read after a write has ended sees what was written. A store for one dataset only has its id as the attribute
    ``dataset_id``.
    """

    def put(self, dataset_id: str, rows: Mapping[str, bytes]) -> None:
        """Store wrapped KEKs by name, durably: when it returns, they are there. A row that is there stays as it is."""

    def list(self, dataset_id: str) -> Iterable[str]:
        """Return the names of all rows of a dataset."""

    def remove(self, dataset_id: str, names: builtins.list[str]) -> None:
        """Remove rows. Those that are not there are no matter."""


def row_name(job_id: str, wrapped: bytes) -> str:
    """Return the name of a new row."""
    return f"{job_id}-{secrets.token_hex(4)}-{hashlib.sha256(wrapped).hexdigest()}"


def job_of_row(name: str) -> str | None:
    """Return the id of the job that made a row; None: no job of ags_fast made it."""
    return match[1] if (match := NAME.fullmatch(name)) else None


def is_row(name: str, wrapped: bytes) -> bool:
    """Whether a row has this name."""
    match = NAME.fullmatch(name)
    return match is not None and match[2] == hashlib.sha256(wrapped).hexdigest()
