"""How to reach a dataset: the arguments that all functions on datasets share, in one value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ags_fast._extras import require
from ags_fast._types import FilePath
from ags_fast.dataset.entries import chosen_files
from ags_fast.dataset.ledger import Ledger
from ags_fast.fs import Store
from ags_fast.keys.kms import KmsClient, as_kms
from ags_fast.keys.stores import KeyResolver

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.versions import Version

Folder: TypeAlias = FilePath | Store  # a local path, a URL of fsspec, or a store
KeyPlace: TypeAlias = FilePath | Store | KeyResolver | None  # where a dataset's keys are; None: in the dataset


@dataclass(frozen=True)
class Access:
    """Where a dataset is, what opens it, and which version is wanted. Holds no key.

    It pickles as its fields, with the KMS client as properties. `storage_options` may hold secrets of the storage.

    Attributes:
        store: The folder of the dataset.
        kms: The client of the KMS.
        key_store: Where the dataset's keys are; None: in the dataset.
        storage_options: Options for fsspec.
        version: The number of the version; None: the newest.
        min_version: The newest version must have at least this number; None: any.
        pin: The newest version must descend from the version that this pin names; None: any.
    """

    store: Store
    kms: KmsClient = field(repr=False)
    key_store: KeyPlace = field(default=None, repr=False)
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    version: int | None = None
    min_version: int | None = None
    pin: str | None = None

    def __post_init__(self) -> None:
        """Raise ModuleNotFoundError without pyarrow, before anything is written."""
        require("pyarrow", "a dataset")

    @classmethod
    def of(
        cls,
        dataset: Folder,
        kms: KmsClient | Mapping[str, str],
        key_store: KeyPlace = None,
        storage_options: Mapping[str, Any] | None = None,
        version: int | None = None,
        min_version: int | None = None,
        pin: str | None = None,
    ) -> Access:
        """Take the arguments of a public function."""
        store = dataset if isinstance(dataset, Store) else Store(dataset, storage_options)
        return cls(store, as_kms(kms), key_store, storage_options, version, min_version, pin)

    def open(self) -> Ledger:
        """Open the dataset.

        Raises:
            FileNotFoundError: There is no dataset.
            IntegrityError: The dataset does not descend from the pin.
        """
        return Ledger.open(
            self.store, self.kms, self.storage_options, self.key_store, pin=self.pin, min_version=self.min_version
        )

    def open_at(self, version: int | None) -> tuple[Ledger, Version | None]:
        """Open the dataset, and this version of it: see `Ledger.open_at`."""
        return Ledger.open_at(
            self.store,
            self.kms,
            self.key_store,
            version=version,
            storage_options=self.storage_options,
            pin=self.pin,
            min_version=self.min_version,
        )

    def create(self, wrapping_key_id: str) -> Ledger:
        """Open the dataset. If there is none, create its first key, under this master key."""
        return Ledger.open_or_create(self.store, self.kms, wrapping_key_id, self.key_store)

    def load(
        self, paths: str | Sequence[str] | None = None, *, writes: bool = False
    ) -> tuple[Ledger, Version, list[FileEntry]]:
        """Open the wanted version with its files, or those that match a pattern of `paths`.

        Args:
            paths: Patterns of `fnmatch`; None takes every file.
            writes: Whether the caller is about to change the dataset.

        Raises:
            FileNotFoundError: There is no dataset, or a pattern matches no file.
            IntegrityError: No version has been committed, or the dataset does not descend from the pin.
        """
        opened = self.open()
        head, entries = opened.load(self.version, self.min_version, writes=writes)
        return opened, opened.committed(head), entries if paths is None else chosen_files(entries, paths)
