"""The documents of a dataset's keys in their folder: which there are, and what each consists of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast.errors import IntegrityError
from ags_fast.fs.numbered import Numbered
from ags_fast.keys.chain import Chain, ChainObjects, sha256
from ags_fast.keys.document import Document
from ags_fast.keys.stores.base import listed
from ags_fast.keys.stores.parts import (
    FOLDER,
    all_buckets,
    bucket_of,
    divide,
    entries_in,
    history_of,
    make_bucket,
    parts_in,
    read_bucket,
    some_at_a_time,
)
from ags_fast.keys.stores.version import MAX_NBYTES, KeysVersion

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ags_fast.keys.entry import KeyEntry
    from ags_fast.keys.kms import KmsClient
    from ags_fast.keys.stores.base import Change, Folder
    from ags_fast.keys.stores.parts import Part

__all__ = ["CHAIN", "KeyDocuments", "claimed_keys"]

CHAIN = f"{FOLDER}chain/"


class KeyDocuments:
    """Reads and writes versions of a dataset's keys. It remembers buckets, and nothing else.

    Args:
        folder: The dataset's folder, or another with the same layout.
        kms: The client that opens and seals documents.
        dataset_id: The dataset that they must be of; None accepts any.
    """

    def __init__(self, folder: Folder, kms: KmsClient, dataset_id: str | None) -> None:
        self.folder = folder
        self.kms = kms
        self.dataset_id = dataset_id
        self.numbered = Numbered(folder, FOLDER)
        self.chain_objects = ChainObjects(folder, CHAIN)
        self._buckets: dict[Part, dict[str, KeyEntry]] = {}  # threads fill it without a lock

    def path(self, number: int) -> str:
        """Return the path of a document."""
        return self.numbered.path(number)

    def newest(self, known: KeysVersion | None = None) -> KeysVersion | None:
        """Read the newest version; None if there is none. known: one that need not be opened again."""
        number, data = self.numbered.read_newest(MAX_NBYTES)
        if known is not None and (number, sha256(data)) == (known.number, known.sha256):
            return known
        return self.opened(data, number) if number else None

    def open(self, number: int) -> KeysVersion:
        """Read a version. FileNotFoundError if its document is gone."""
        return self.opened(self.numbered.read(number, MAX_NBYTES), number)

    def opened(self, data: bytes, number: int) -> KeysVersion:
        """Open a document that was read."""
        return KeysVersion.opened(data, number, self.path(number), self.kms, self.dataset_id)

    def descended(self, number: int, data: bytes, newest: KeysVersion) -> KeysVersion:
        """Return an ancestor of a version, of which the version knows the digest: this asks no KMS.

        Raises:
            IntegrityError: It is not the document that the newest version descends from.
        """
        path, digest = self.path(number), sha256(data)
        if self.digest(newest, number) != digest:
            raise IntegrityError(f"{path} is not the version that the newest keys descend from")
        return KeysVersion.parsed(Document(data, path).claimed(), number, path, digest)

    def write(self, after: KeysVersion, parts: Mapping[str, bytes], links: Mapping[str, bytes]) -> KeysVersion:
        """Create a version: what it consists of first, the document last. FileExistsError if its number is taken.

        The KMS seals the document before anything is written, so a refusal leaves nothing behind.

        Args:
            after: The version.
            parts: Its new parts, by path.
            links: The new chain objects, by name.
        """
        sealed, document = after.sealed(self.kms, self.path(after.number))
        some_at_a_time(lambda path: self.folder.create_exclusive(path, parts[path]), parts)
        self.chain_objects.write(links)
        self.numbered.create(after.number, document)
        return sealed

    def divided(
        self,
        buckets: Sequence[Part | None],
        entries: Iterable[KeyEntry],
        places: Collection[int],
        parts: dict[str, bytes],
    ) -> tuple[Part | None, ...]:
        """Return buckets of which some are new. What they hold is remembered, so that it need not be read.

        Args:
            buckets: The buckets before.
            entries: What the new buckets hold; entries of others are passed over.
            places: The numbers of the new buckets.
            parts: Gets the bytes of the new buckets, by path.
        """
        made = list(buckets)
        for place, content in divide(entries, places, len(made)).items() if made else ():
            made[place] = part = make_bucket([entry.to_json() for entry in content.values()], parts)
            if part is not None:
                self._buckets[part] = content
        return tuple(made)

    def keep_buckets(self, version: KeysVersion) -> None:
        """Forget the buckets that a version does not have."""
        self._buckets = {part: self._buckets[part] for part in version.buckets if part in self._buckets}

    def find(self, version: KeysVersion, key_id: str) -> KeyEntry | None:
        """Return a key of a version, if the version has it."""
        entry = version.entries.get(key_id)
        if entry is not None or not version.buckets:
            return entry
        return self._bucket(version, bucket_of(key_id, len(version.buckets))).get(key_id)

    def entries(self, version: KeysVersion, places: Iterable[int] | None = None) -> dict[str, KeyEntry]:
        """Return the sealer and the entries of some buckets, in the order of ids; or all entries of a version."""
        if not version.buckets:
            return version.entries
        chosen = list(range(len(version.buckets)) if places is None else places)
        some_at_a_time(
            lambda place: self._bucket(version, place),
            [place for place in chosen if version.buckets[place] not in self._buckets],
        )
        found = [self._bucket(version, place) for place in chosen]
        return dict(sorted(pair for entries in (*found, version.entries) for pair in entries.items()))

    def _bucket(self, version: KeysVersion, place: int) -> dict[str, KeyEntry]:
        part = version.buckets[place]
        if part is None:
            return {}
        entries = self._buckets.get(part)
        if entries is None:
            entries = self._buckets[part] = read_bucket(self.folder, part, place, len(version.buckets))
        return entries

    def history(self, version: KeysVersion) -> list[Change]:
        """Return the changes that a version remembers."""
        return history_of(self.folder, version.history, version.earlier)

    def digest(self, version: KeysVersion, number: int) -> str | None:
        """Return the SHA-256 of a version, or of an ancestor, in hex; None if the version does not know it."""
        if number == version.number:
            return version.sha256 or None
        return self.chain_objects.digest(version.chain, number)

    def objects(self, version: KeysVersion) -> set[str]:
        """Return the paths of all that the newest version consists of, or the next may be about to name."""
        if not version.number:
            return set()
        links = self.chain_objects.paths(version.chain.needed(version.sha256))
        return {self.path(version.number), *(part.path for part in version.parts()), *links}

    def claimed_objects(self, number: int, data: bytes) -> set[str]:
        """Return the paths of all that a document says it consists of. FormatError if it is not a document."""
        path = self.path(number)
        claimed = Document(data, path).claimed()
        links = self.chain_objects.paths(Chain.from_json(claimed, number, path).blocks)
        parts = (part.path for name in ("buckets", "earlier") for part in parts_in(claimed, name, path) if part)
        return {path, *parts, *links}


def claimed_keys(folder: Folder) -> tuple[str, list[KeyEntry]]:
    """Return the dataset's id and the keys that its newest document claims, without asking a KMS.

    Nothing shows that they are authentic.

    Raises:
        FileNotFoundError: There are no keys.
    """
    numbered = Numbered(folder, FOLDER)
    number, data = numbered.read_newest(MAX_NBYTES)
    path = numbered.path(number)
    if not number:
        raise FileNotFoundError(path)
    claimed = Document(data, path).claimed()
    buckets = parts_in(claimed, "buckets", path)
    entries = entries_in({"keys": [claimed.get("sealer")]} if buckets else claimed, path).values()
    return str(claimed.get("dataset_id")), listed([*all_buckets(folder, buckets), *entries], None)
