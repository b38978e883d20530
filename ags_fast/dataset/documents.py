"""Sealed objects of a dataset: documents and tables, each bound to the dataset and to its path."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.entries import wrapped_by
from ags_fast.dataset.keyring import Keyring
from ags_fast.dataset.names import check_path
from ags_fast.dataset.tables import (
    TABLE_DEK_NBYTES,
    WHOLE_NBYTES,
    Pages,
    TableRef,
    bound,
    decode_entries,
    encode_entries,
    find_rows,
    name_bytes,
    named_keys,
    open_pages,
    seal_table,
)
from ags_fast.errors import FormatError
from ags_fast.fs.numbered import TOMBSTONE
from ags_fast.keys.chain import sha256
from ags_fast.keys.document import Document, document_nbytes, seal_document, taken
from ags_fast.keys.envelope import Envelope, binding

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ags_fast.dataset.cache import TableCache
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.fs import Store
    from ags_fast.keys.kms import KmsClient
    from ags_fast.keys.stores import KeyResolver


class Documents:
    """Seals and opens the objects of one dataset with the keys of its key store.

    Attributes:
        store: The folder of the dataset.
        keys: The key store.
        keyring: The key store, opened with the KMS.
        tables: Keeps manifests for a handle, which opens many files; else None.
    """

    def __init__(self, store: Store, kms: KmsClient, keys: KeyResolver) -> None:
        self.store = store
        self.keys = keys
        self.keyring = Keyring(keys, kms, store.url)
        self.tables: TableCache | None = None
        self._found: dict[tuple[str, str], FileEntry] = {}  # by the digest of a version, and the path
        self._looked_up: set[str] = set()  # the manifests of which a page was read

    @property
    def kms(self) -> KmsClient:
        """The client of the KMS."""
        return self.keyring.kms

    @property
    def id(self) -> str:
        """The id of the dataset, which everything in it is bound to."""
        return self.keys.dataset_id

    @property
    def envelope(self) -> Envelope:
        """What wraps and unwraps data keys under the dataset's keys."""
        return self.keyring.envelope

    def seal_table(self, path: str, entries: Sequence[FileEntry], key_id: str, envelope: Envelope) -> TableRef:
        """Create a table (docs/dataset-format.md, "Tables").

        Args:
            path: The path of the new object.
            entries: The rows, at least one. A caller sorts the rows of a manifest by path.
            key_id: The key that wraps the table's own key.
            envelope: Opens that key.

        Returns:
            The reference to the table.
        """
        dek = os.urandom(TABLE_DEK_NBYTES)
        data = seal_table(encode_entries(entries), dek, self.id, path)
        wrapped = envelope.wrap(key_id, dek, binding(self.id, "dek", path))
        self.store.create_exclusive(path, data)
        names = [name_bytes(entry.path) for entry in entries]
        counts = named_keys(wrapped_by(entries))
        return TableRef(
            path,
            len(data),
            len(entries),
            key_id,
            wrapped,
            counts,
            bound(min(names)),
            bound(max(names)),
            key_material=any(entry.key_material is not None for entry in entries),
        )

    def open_table(self, ref: TableRef, envelope: Envelope) -> list[FileEntry]:
        """Return all entries of a table."""
        return _checked(self._pages(ref, envelope).table(), ref)

    def find_in_table(
        self, ref: TableRef, envelope: Envelope, paths: Collection[bytes], folders: Collection[bytes] = ()
    ) -> list[FileEntry]:
        """Return the entries of a manifest that have these paths, and the first entry in each of these folders.

        A handle keeps manifests. It reads a large one whole when a second lookup comes to it, not for the first one.
        """
        if self.tables is None or (ref.length > WHOLE_NBYTES and ref.path not in self._looked_up):
            self._looked_up.add(ref.path)
            return _checked(find_rows(self.store, self.id, ref, envelope, paths, folders), ref)
        return _checked(self._pages(ref, envelope).take(paths, folders), ref)

    def list_in_table(
        self, ref: TableRef, envelope: Envelope, folder: bytes, deep: bool
    ) -> tuple[set[bytes], list[FileEntry]]:
        """Return the names of the folders, and the files, that a manifest has in a folder: see `Pages.in_folder`."""
        inner, rows = self._pages(ref, envelope).in_folder(folder, deep)
        return inner, _checked(rows, ref)

    def _pages(self, ref: TableRef, envelope: Envelope) -> Pages:
        def load() -> Pages:
            return open_pages(self.store, self.id, ref, envelope)

        pages: Pages = load() if self.tables is None else self.tables.get(ref.path, load)
        return pages

    def seal_body(self, path: str, body: dict[str, Any], key_id: str, envelope: Envelope) -> str:
        """Create an authenticated document (docs/dataset-format.md, "Documents").

        Args:
            path: The path of the new object.
            body: What the document says.
            key_id: The key that seals the document.
            envelope: Opens that key.

        Returns:
            The SHA-256 of the document, in hex.

        Raises:
            FileExistsError: Somebody else was first.
        """
        data = taken(seal_document(envelope, key_id, self.id, path, body), body["format"], path)
        self.store.create_exclusive(path, data)
        return sha256(data)

    def open_body(self, path: str, kind: str, envelope: Envelope) -> tuple[dict[str, Any], str]:
        """Open an authentic document.

        Args:
            path: The path of the document.
            kind: What its `format` must be.
            envelope: Opens the key that seals it.

        Returns:
            What the document says, and the id of the key that seals it.

        Raises:
            FileNotFoundError: There is no document, or a tombstone.
            IntegrityError: The document is not what was written.
            FormatError: The document is of another kind, or malformed.
        """
        return self._opened(path, kind, envelope)[:2]

    def _opened(self, path: str, kind: str, envelope: Envelope) -> tuple[dict[str, Any], str, str]:
        """Return what `open_body` returns, and the SHA-256 of the document."""
        data = self.store.read_small(path, document_nbytes(kind))
        if data == TOMBSTONE:
            raise FileNotFoundError(path)
        document = Document(data, path)
        body = document.authentic(envelope, self.id)
        if body.get("format") != kind:
            raise FormatError(f"{path} is a {body.get('format')!r}, not a {kind!r}")
        return body, document.key_id, sha256(data)


def _checked(table: Any, ref: TableRef) -> list[FileEntry]:
    """Return the entries of a table. Raises PolicyError if a name leads out of the dataset."""
    entries = decode_entries(table, ref.path)
    for entry in entries:
        check_path(entry.path)
        check_path(entry.file)
    return entries
