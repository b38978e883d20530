"""How to reach a dataset: the arguments that all functions on datasets share, in one value."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from ags_fast._json import check_marks
from ags_fast._types import FilePath
from ags_fast.dataset.entries import chosen_files
from ags_fast.dataset.entry import Entry, Pin
from ags_fast.dataset.kinds import Want
from ags_fast.dataset.log import ENTRY_NBYTES, Log
from ags_fast.dataset.names import LOG, entry_number
from ags_fast.dataset.policy import Policy
from ags_fast.dataset.sealed import Document, decoded, read_object
from ags_fast.dataset.snapshot import Snapshot
from ags_fast.errors import PolicyError
from ags_fast.fs import Store
from ags_fast.keys.kms import Kms, KmsClient, as_kms
from ags_fast.keys.stores import KeyResolver, open_key_store
from ags_fast.profiles import reached

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ags_fast.dataset.entries import FileEntry, Patterns

Folder: TypeAlias = FilePath | Store  # a local path, a URL of fsspec, or a store
KeyPlace: TypeAlias = FilePath | Store | KeyResolver | None  # where a dataset's keys are; None: in the dataset


@dataclass(frozen=True, repr=False, eq=False)
class Access:
    """Where a dataset is, what opens it, and which version is wanted. Holds no key.

    It pickles as its fields, with the KMS client as properties. `storage_options` may hold secrets of the storage.
    """

    store: Store
    kms: KmsClient = field(repr=False)
    key_store: KeyPlace = field(default=None, repr=False)
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)  # of fsspec
    version: int | None = None  # None: the newest
    min_version: int | None = None  # the newest version must have at least this number
    pin: str | None = None  # the newest version must descend from the version that this pin names

    @classmethod
    def of(
        cls,
        dataset: Folder,
        kms: Kms | None = None,
        key_store: KeyPlace = None,
        storage_options: Mapping[str, Any] | None = None,
        version: int | None = None,
        min_version: int | None = None,
        pin: str | None = None,
    ) -> Access:
        """Take the arguments of a public function."""
        at = reached({"kms": kms, "key_store": key_store, "storage_options": storage_options})
        store = dataset if isinstance(dataset, Store) else Store(dataset, at["storage_options"])
        return cls(store, as_kms(at.pop("kms")), **at, version=version, min_version=min_version, pin=pin)

    def log(self) -> Log:
        """Return the log, of which nothing was read yet. ValueError: the pin is malformed."""
        key_store = open_key_store(self.key_store, self.storage_options)
        return Log(self.store, self.kms, pin=None if self.pin is None else Pin.parse(self.pin), key_store=key_store)

    def open(self) -> Snapshot:
        """Open the wanted version: see `Dataset.open`."""
        log = self.log()
        head = log.head()
        if self.min_version is not None and head.number < self.min_version:
            raise PolicyError(
                f"the newest version of {self.store.url} is {head.number}, which is older than "
                f"min_version={self.min_version}: "
                "somebody may have put an older copy in its place"
            )
        return Snapshot(log, head if self.version is None else log.entry(self.version, head))

    def create(self, wrapping_key_id: str, policy: Policy | None = None) -> Snapshot:
        """Create a dataset without files: see `Dataset.create`."""
        self.store.check_writable()
        log = self.log()
        dataset_id = log.kek_rows.dataset_id or os.urandom(16).hex()
        key = Want(wrapping_key_id).new_kek(self.kms.for_dataset(dataset_id))
        return Snapshot(log, log.create(Entry.first_of(dataset_id, key, policy or Policy())))

    def files(self, paths: Patterns = None, exclude: Patterns = None) -> tuple[Snapshot, list[FileEntry]]:
        """Open the wanted version with its files, or those that match a pattern of `paths` and none of `exclude`.

        Raises:
            FileNotFoundError: There is no dataset, or a pattern matches no file.
        """
        snapshot = self.open()
        return snapshot, chosen_files(sorted(snapshot.files()), paths, exclude)


def claimed_entries(store: Store) -> list[Entry]:
    """Return what the entries of a log say, the oldest first, without a check that they are authentic."""
    found = []
    for path in sorted(listed.path for listed in store.list(LOG) if entry_number(listed.path)):
        data = read_object(store, path, ENTRY_NBYTES)
        text = Document.parse(data, path).text
        check_marks(text, path)  # of which nobody knows who has written it
        entry = decoded(text, Entry, path)
        found.append(msgspec.structs.replace(entry, digest=hashlib.sha256(data).hexdigest()))
    return found
