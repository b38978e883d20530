"""Which key store a caller means: a database, a folder, or an object of the caller's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ags_fast.fs import Store
from ags_fast.keys.stores.base import KeyResolver
from ags_fast.keys.stores.folder import FolderKeyStore

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

SQL_URL = re.compile(r"(sqlite|postgres(ql)?|cockroachdb|mysql|mariadb|oracle|mssql)(\+\w+)?://")


def open_key_store(
    where: KeyResolver | Store | str | os.PathLike[str] | None, storage_options: Mapping[str, Any] | None = None
) -> KeyResolver | None:
    """Open the store of a dataset's wrapped KEKs.

    Args:
        where: None: there is none, and the log has them. A URL as SQLAlchemy takes it: a database, as `SqlKeyStore` has
            it. Another path or URL: that folder. A `KeyResolver` is returned unchanged.
        storage_options: For the folder that `where` names, as fsspec takes them.
    """
    if isinstance(where, Store):  # that of a bucket has a `get`, too
        return FolderKeyStore(where)
    if where is None or isinstance(where, KeyResolver):
        return where
    if isinstance(where, str) and SQL_URL.match(where):
        from ags_fast.keys.stores.sql import SqlKeyStore  # SQLAlchemy is an optional dependency

        return SqlKeyStore(where)
    return FolderKeyStore(where, storage_options)
