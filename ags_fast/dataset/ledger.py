"""An encrypted dataset: its keys, its versions, and the manifests that list the files of each version.

The layout and every byte of it are in docs/dataset-format.md. Nothing is ever changed in place: a new version is a new
numbered object, created exclusively, and that creation is the commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.dataset.changes import until_unchanged
from ags_fast.dataset.commit import Commits
from ags_fast.dataset.keks import Want
from ags_fast.dataset.names import HIDDEN, PLANS
from ags_fast.errors import IntegrityError, PolicyError
from ags_fast.fs import Store
from ags_fast.keys.stores import DatasetKeyStore, open_key_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ags_fast.dataset.versions import Version
    from ags_fast.keys.entry import KeyEntry
    from ags_fast.keys.kms import KmsClient


class Ledger(Commits):
    """An encrypted dataset, opened with the caller's KMS. Holds no key: the keys stay in the process-wide cache."""

    @classmethod
    def open(
        cls,
        url: Any,
        kms: KmsClient,
        storage_options: Mapping[str, Any] | None = None,
        key_store: Any = None,
        *,
        pin: str | None = None,
        min_version: int | None = None,
    ) -> Ledger:
        """Open a dataset.

        Args:
            url: The folder of the dataset.
            kms: The client of the KMS.
            storage_options: Options for fsspec.
            key_store: Where the dataset's keys are; None: in the dataset.
            pin: The newest version must be the pinned one or descend from it, now and whenever it is read again.
            min_version: The newest version must have at least this number.

        Raises:
            FileNotFoundError: There is no dataset at `url`.
            IntegrityError: The newest version does not descend from the pin.
            PolicyError: The newest version is older than `min_version`.
        """
        store = url if isinstance(url, Store) else Store(url, storage_options)
        keys = open_key_store(key_store, kms, store=store, storage_options=storage_options)
        opened = cls(store, kms, keys, pin, min_version)
        opened._check_is_there()
        if pin is not None or min_version:
            opened.current()
        return opened

    @classmethod
    def open_at(
        cls,
        store: Store,
        kms: KmsClient,
        key_store: Any = None,
        *,
        version: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        pin: str | None = None,
        min_version: int | None = None,
    ) -> tuple[Ledger, Version | None]:
        """Do what `open` and `current` do, with one look at the keys: it follows the look at the versions.

        The arguments and errors are those of `open` and `current`.
        """
        keys = open_key_store(key_store, kms, store=store, storage_options=storage_options)
        opened = cls(store, kms, keys, pin, min_version)
        newest = opened.newest_number()
        opened._check_is_there()
        fresh = isinstance(keys, DatasetKeyStore) and keys is not key_store
        return opened, opened.current(version=version, listed=newest if fresh else None)

    @classmethod
    def open_or_create(cls, store: Store, kms: KmsClient, wrapping_key_id: str, key_store: Any = None) -> Ledger:
        """Open a dataset. If there is none, create the first of its keys.

        Raises:
            PolicyError: The key store has the keys of another dataset.
        """

        def first_key(opened: Ledger) -> dict[str, KeyEntry | None]:
            if not opened._has_keys():
                entry = Want(wrapping_key_id).new_kek(opened.kms)
                return {entry.key_id: entry}
            if key_store is not None and opened._is_new() and any(key.uses for key in opened.keys.list()):
                raise PolicyError(
                    f"{opened.keys!r} has keys of the dataset {opened.id} already, and {store.url} has none: two "
                    "datasets must not share keys. Name another key store, or the folder of that dataset"
                )
            return {}

        def create(opened: Ledger, keys: dict[str, KeyEntry | None]) -> Ledger:
            opened.keyring.swap(keys, 0)
            return opened

        return until_unchanged(lambda: cls(store, kms, open_key_store(key_store, kms, store=store)), first_key, create)

    def _is_new(self) -> bool:
        """Return whether neither a version nor a plan is there."""
        return not self.newest_number() and not any(self.store.list(PLANS))

    def _check_is_there(self) -> None:
        if not self._has_keys():
            raise FileNotFoundError(f"there is no encrypted dataset at {self.store.url}: it has no {HIDDEN}keys")

    def _has_keys(self) -> bool:
        if self.keys.version == 0 and self.newest_number() and self.keys.refresh() == 0:
            raise IntegrityError(
                f"{self.store.url} has versions, but {self.keys!r} has no {HIDDEN}keys: name the key_store that it was "
                "written with, if they are elsewhere; otherwise somebody took them away"
            )
        return self.keys.version > 0
