"""Programs of tests of encrypted Iceberg tables."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from iceberg_tables import ids, new_table, rows, sql_catalog

from ags_fast.iceberg import delete, expire, rekey, rotate


def print_written_files(folder: Path, kms: dict[str, str]) -> None:
    """Works on a table, and prints what Python opened to write, and what is left in the folder of temporary files."""
    import sqlalchemy  # noqa: F401  (imports write compiled modules)

    written: set[str] = set()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            path, mode, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR) or (mode and mode.strip("rbtU")):
                written.add(os.fsdecode(path))

    work(folder, kms, "warm")
    sys.addaudithook(hook)
    work(folder, kms, "t")
    print("\n".join(sorted(written)))
    print("left:", os.listdir(os.environ["TMPDIR"]))


def work(folder: Path, kms: dict[str, str], name: str) -> None:
    """Everything that writes."""
    catalog = sql_catalog(folder, kms)
    table = new_table(catalog, name)
    table.append(rows(0, 100))
    delete(table, "id = 3")
    table.overwrite(rows(200, 210), overwrite_filter="id > 50")
    rotate(table)
    rekey(table, what="manifests")
    rekey(table, what="data")
    expire(table)
    assert len(ids(table)) == 60
