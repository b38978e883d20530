"""Writers of Iceberg tables in processes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iceberg_tables import rows
from pyiceberg.exceptions import CommitFailedException

from ags_fast.iceberg import load_catalog

if TYPE_CHECKING:
    from collections.abc import Mapping


def append_until_done(table: Any, first: int, last: int) -> None:
    """Append rows in one commit. PyIceberg tries again some times at most, and its version 0.11 never."""
    while True:
        try:
            table.append(rows(first, last))
        except CommitFailedException:
            table.refresh()
        else:
            return


def append(name: str, kms: Mapping[str, str], properties: Mapping[str, str], first: int, commits: int) -> None:
    """Append to a table, one row a commit, after a line on standard input."""
    table = load_catalog("tests", kms=kms, **properties).load_table(name)
    print("ready", flush=True)
    input()
    for i in range(first, first + commits):
        append_until_done(table, i, i + 1)
    print("done", flush=True)
