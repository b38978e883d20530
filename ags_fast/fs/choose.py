"""Which kind of store a URL needs, and for a file's URL, which store and which name in it."""

from __future__ import annotations

import importlib
import os

from ags_fast.fs.base import Store
from ags_fast.fs.local import LocalStore
from ags_fast.fs.paths import absolute_path, folder_of, split_chain

TYPE_CHECKING = False  # to import typing takes longer than to import this package
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

__all__ = ["file_at", "store_class"]

STORES = {"memory": ("fsspec", "MemoryStore")}
STORES |= dict.fromkeys(("s3", "s3a"), ("s3", "S3Store")) | dict.fromkeys(("gs", "gcs"), ("gcs", "GcsStore"))
STORES |= dict.fromkeys(("az", "abfs", "abfss"), ("azure", "AzureStore"))


def store_class(url: str) -> type[Store]:
    """Return the class of store that a path or a URL needs. Stores over fsspec are imported with their first URL."""
    if absolute_path(url) is not None:
        return LocalStore
    module, name = STORES.get(url.partition(":")[0] if "::" not in url else "", ("fsspec", "OtherStore"))
    return getattr(importlib.import_module(f"ags_fast.fs.{module}"), name)  # type: ignore[no-any-return]


Store.choose = store_class


def file_at(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> tuple[Store, str]:
    """Return the store that a file's URL or path leads to, and the name there. ValueError: no file can have the URL."""
    text = os.fsdecode(url)
    path, below = split_chain(text)
    above, slash, name = path.rpartition("/")
    rooted = below or (above + slash).endswith(("memory://", "ags://"))  # elsewhere the first name is a bucket's
    folder = above + slash if rooted else folder_of(path)
    if folder is None or not name:
        raise ValueError(f"{text!r} is not the path of a file")
    return Store(folder + below, storage_options), name
