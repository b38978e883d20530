"""Wrapped KEKs in a folder or a bucket: an object for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ags_fast.errors import KeyAccessError
from ags_fast.fs import Store
from ags_fast.keys.envelope import in_threads
from ags_fast.keys.stores.base import WRAPPED_NBYTES

if TYPE_CHECKING:
    import builtins
    import os
    from collections.abc import Callable, Collection, Iterable, Mapping

AT_ONCE = 16  # requests
Item = TypeVar("Item")
Result = TypeVar("Result")


class FolderKeyStore:
    """A key store in a folder apart from the datasets. The object ``<dataset id>/<name>`` is a row.

    It pickles as its URL and options. Threads may share it.

    Args:
        where: The folder, or its path or URL. Other datasets may have their rows there, too.
        storage_options: As fsspec takes them.
    """

    def __init__(self, where: Store | str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        self._store = where if isinstance(where, Store) else Store(where, storage_options)

    def get(self, dataset_id: str, names: Collection[str]) -> dict[str, bytes]:
        """See `KeyResolver`."""

        def read(name: str) -> bytes | None:
            try:
                return self._store.read_small(_path(dataset_id, name), WRAPPED_NBYTES)
            except FileNotFoundError:
                return None

        found = zip(names, self._each(read, names), strict=True)
        return {name: wrapped for name, wrapped in found if wrapped is not None}

    def put(self, dataset_id: str, rows: Mapping[str, bytes]) -> None:
        """See `KeyStore`."""

        def create(name: str) -> None:
            try:
                self._store.create_exclusive(_path(dataset_id, name), rows[name])
            except FileExistsError:  # the request was repeated on its way
                self._store.sync_folders([_path(dataset_id, name)])

        self._each(create, rows)

    def list(self, dataset_id: str) -> builtins.list[str]:
        """See `KeyStore`."""
        folder = _path(dataset_id, "")
        (found,) = self._each(lambda folder: [listed.path for listed in self._store.list(folder)], [folder])
        return [path.removeprefix(folder) for path in found]

    def remove(self, dataset_id: str, names: builtins.list[str]) -> None:
        """See `KeyStore`."""
        self._each(lambda name: self._store.delete(_path(dataset_id, name)), names)

    def _each(self, work: Callable[[Item], Result], items: Iterable[Item]) -> builtins.list[Result]:
        items = [*items]
        try:
            return in_threads(work, items, min(AT_ONCE, len(items)) if self._store.parallel and items else 1)
        except OSError as error:
            raise KeyAccessError(f"{self!r} cannot be used now: {error.strerror or type(error).__name__}") from None

    def __repr__(self) -> str:
        return f"<FolderKeyStore of {self._store!r}>"


def _path(dataset_id: str, name: str) -> str:
    from urllib.parse import quote  # not for datasets that have no such store

    return f"{quote(dataset_id, safe='').replace('.', '%2E')}/{name}"
