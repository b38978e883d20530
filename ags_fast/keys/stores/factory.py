"""Which key store a caller means: that of the dataset, a folder, a database, or an object of the caller's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ags_fast.fs import Store
from ags_fast.keys.stores.base import KeyResolver
from ags_fast.keys.stores.folder import DatasetKeyStore

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from ags_fast.keys.kms import KmsClient
    from ags_fast.keys.stores.base import Folder

__all__ = ["open_key_store"]

SQL_URL = re.compile(r"(sqlite|postgres(ql)?|cockroachdb|mysql|mariadb|oracle|mssql)(\+\w+)?://")


def open_key_store(
    where: KeyResolver | Store | str | os.PathLike[str] | None,
    kms: KmsClient | Mapping[str, str],
    *,
    store: Folder,
    dataset_id: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> KeyResolver:
    """Open the store of a dataset's keys.

    Args:
        where: None: in the dataset. A URL as SQLAlchemy takes it: in a database, as `SqlKeyStore` has it. Another path
            or URL: in that folder, which holds the keys of this one dataset and nothing else. A `KeyResolver` is
            returned unchanged.
        kms: A client or its properties.
        store: The dataset's folder.
        dataset_id: The dataset that an existing store must be of, and the id of a new one. None accepts the id that
            the store has. A database has many datasets, so there its URL names one: ``?dataset=``.
        storage_options: For the folder that `where` names, as fsspec takes them.
    """
    if where is None:
        return DatasetKeyStore(store, kms, dataset_id=dataset_id)
    if isinstance(where, KeyResolver):
        if dataset_id not in (None, where.dataset_id):
            raise ValueError(f"{where!r} has the keys of the dataset {where.dataset_id!r}, not {dataset_id!r}")
        return where
    if isinstance(where, str) and SQL_URL.match(where):
        from ags_fast.keys.stores.sql import SqlKeyStore  # SQLAlchemy is an optional dependency

        return SqlKeyStore(where, dataset_id=dataset_id)
    folder = where if isinstance(where, Store) else Store(where, storage_options)
    return DatasetKeyStore(folder, kms, dataset_id=dataset_id)
