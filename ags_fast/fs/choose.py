"""Which kind of store a URL needs, and for a file's URL, which store and which name in it."""

from __future__ import annotations

import os

from ags_fast.fs.base import Store
from ags_fast.fs.local import LocalStore
from ags_fast.fs.paths import absolute_path, folder_of

TYPE_CHECKING = False  # to import typing takes longer than to import this package
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

__all__ = ["file_at", "store_class"]


def store_class(url: str) -> type[Store]:
    """Return the class of store that a path or a URL needs. Stores over fsspec are imported with their first URL."""
    if absolute_path(url) is not None:
        return LocalStore
    scheme = url.partition(":")[0]
    if scheme in ("s3", "s3a") and "::" not in url:
        from ags_fast.fs.s3 import S3Store

        return S3Store
    if scheme in ("gs", "gcs") and "::" not in url:
        from ags_fast.fs.gcs import GcsStore

        return GcsStore
    if scheme in ("az", "abfs", "abfss") and "::" not in url:
        from ags_fast.fs.azure import AzureStore

        return AzureStore
    from ags_fast.fs.fsspec import MemoryStore, OtherStore

    return MemoryStore if scheme == "memory" and "::" not in url else OtherStore


Store.choose = store_class


def file_at(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> tuple[Store, str]:
    """Return the store that a file's URL or path leads to, and the file's name there.

    Raises:
        ValueError: No file can have this URL.
    """
    text = os.fsdecode(url)
    chain, colons, last = "", "", text
    if "::" in text:  # a chained URL of fsspec: the first part with a path has the file's path
        chain, colons, last = text.partition("::")
        if "://" in chain:
            chain, colons, last = "", "", chain
    rest = text[len(chain) + len(colons) + len(last) :]
    rooted = "::" in text or last.startswith("memory://")  # elsewhere the first name is a bucket's
    folder = f"{last.rpartition('/')[0]}/" if rooted else folder_of(last)
    name = last.rpartition("/")[2]
    if folder is None or not name:
        raise ValueError(f"{text!r} is not the path of a file")
    return Store(chain + colons + folder + rest, storage_options), name
