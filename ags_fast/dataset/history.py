"""The versions of a dataset: which one is current, and whether all are of one history.

The newest version that was read is remembered: each version that is read later must descend from the remembered
version or be an ancestor of it, and the first version that is read must fit the caller's pin. A new version names the
digest of exactly the version that was checked. So nobody can exchange the history between a check and a commit.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ags_fast.dataset.changes import until_unchanged
from ags_fast.dataset.documents import Documents
from ags_fast.dataset.lists import Lists
from ags_fast.dataset.names import CHAIN, LISTS, MANIFESTS, PLANS, VERSIONS
from ags_fast.dataset.versions import Version, key_store_digest, version_numbers
from ags_fast.errors import FormatError, IntegrityError, PolicyError
from ags_fast.fs import NO_LOCK_SECONDS
from ags_fast.fs.numbered import Numbered, numbered
from ags_fast.keys.chain import Chain, ChainObjects, Pin, sha256
from ags_fast.keys.document import DOCUMENT_NBYTES, Document, document_nbytes
from ags_fast.keys.entry import UnknownKeyError
from ags_fast.keys.stores import DatasetKeyStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ags_fast.fs import Store
    from ags_fast.keys.kms import KmsClient
    from ags_fast.keys.stores import KeyResolver

PARENTS = 4  # how many ancestors a writer checks


class History(Documents):
    """The versions of one dataset.

    Each version is checked against the newest version that was read and against the pin.
    """

    def __init__(
        self, store: Store, kms: KmsClient, keys: KeyResolver, pin: str | None = None, min_version: int | None = None
    ) -> None:
        super().__init__(store, kms, keys)
        self._pin = None if pin is None else Pin.parse(pin)
        self._min_version = min_version or 0
        self._head: Version | None = None  # the newest that was read
        self._fits = ""  # the digest of a version whose last ancestors were checked
        self._chain_objects = ChainObjects(store, CHAIN)
        self._numbered = Numbered(store, VERSIONS)
        self._lists = Lists(store)

    def version_numbers(self) -> list[int]:
        """List the versions that are there, the lowest first. This costs more the more versions there are."""
        return version_numbers(self.store)

    def newest_number(self) -> int:
        """Return the number of the newest version, or 0 if there is none."""
        return self._numbered.newest(self._head.number if self._head else 0)

    def has_version(self, number: int) -> bool:
        """Return whether a version is there, and was not expired."""
        return self._numbered.has(number)

    def remove_version(self, number: int, digest: str) -> bool:
        """Replace a version by a tombstone: a late commit must find the number taken, or it would commit to the past.

        Args:
            number: The number of the version.
            digest: The SHA-256 that the version's document must have, in hex.

        Returns:
            Whether the version was there.

        Raises:
            IntegrityError: Another document is there.
        """
        try:
            data = self._numbered.read(number, document_nbytes("ags-version"))
        except FileNotFoundError:
            self._numbered.sweep()
            return False
        if sha256(data) == digest and number < self._numbered.newest():
            self._numbered.retire([number])
            return True
        raise IntegrityError(
            f"{self._numbered.path(number)} is not the version {number} that an expiry was to remove: it was "
            "exchanged, or the plan is of another history. Compare with your pin; remove the folder in "
            f"{PLANS} if that is wrong"
        )

    def current(
        self,
        *,
        version: int | None = None,
        min_version: int | None = None,
        writes: bool = False,
        listed: int | None = None,
    ) -> Version | None:
        """Return the newest version.

        Args:
            version: The number of another version to return; None: the newest.
            min_version: The newest version must have at least this number; None: any.
            writes: Whether the caller is about to change the dataset. Then the documents of the last ancestors must be
                those that the newest version names.
            listed: The number of the newest version, if that was looked up before the keys were first read.

        Returns:
            The version; None if nothing was committed yet.

        Raises:
            FileNotFoundError: The dataset has no such version.
            IntegrityError: The newest version descends neither from the caller's pin nor from a version read before.
            PolicyError: The newest version is older than `min_version`.
        """

        def look() -> int:
            nonlocal listed
            known = self._head  # before they are listed: another thread may read newer ones
            newest, listed = listed, None
            if newest is None:
                newest = self.newest_number()
                self.keys.refresh()  # now: a version comes after the keys that it needs
            _check_number(self.store.url, newest, known, self._pin, max(min_version or 0, self._min_version))
            if version is not None and version != newest and not self.has_version(version):
                raise FileNotFoundError(
                    f"the dataset has no version {version}; it has {_ranges(self.version_numbers())}"
                )
            if not newest and writes and lost_versions(self.store) and not self.newest_number():
                self.committed(None)
            return newest

        def read(newest: int) -> Version | None:
            try:
                return self._read_current(newest, newest if version is None else version, writes) if newest else None
            except UnknownKeyError as error:  # a version comes after its key: older keys were put back
                raise IntegrityError(str(error)) from None

        def is_expired(newest: int) -> bool:
            gone = version is not None and version != newest and not self.has_version(version)
            return gone or self.newest_number() != newest

        return until_unchanged(look, read, lambda newest, found: found, is_expired)

    def _read_current(self, newest: int, wanted: int, writes: bool) -> Version:
        """Read the wanted version, and the newest one if it is needed to check the wanted one."""
        if wanted != newest and self._pin is None:
            return self.version(wanted)  # without a pin, an old version can be read even if a newer one was damaged
        head = self.version(newest)
        if self._head is None or head.number >= self._head.number:
            self._head = head
        if writes:
            self._check_parents(head)
        return head if wanted == newest else self.version(wanted)

    def committed(self, version: Version | None) -> Version:
        """Return the version. Raises IntegrityError for None: a job without files must not seem to have succeeded."""
        if version is not None:
            return version
        open_jobs = sorted({entry.path.split("/")[2] for entry in self.store.list(PLANS)})
        if lost_versions(self.store):
            why = f"but there are manifests: somebody took {VERSIONS} away. Restore it before anything else is done"
        elif open_jobs:
            jobs = f"job {open_jobs[-1]} is" if len(open_jobs) == 1 else f"the jobs {', '.join(open_jobs)} are"
            why = f"{jobs} open: run encrypt again with resume, or sweep to give up what has died"
        else:
            why = "run encrypt"
        raise IntegrityError(f"no version of {self.store.url} has been committed; {why}")

    def version(self, number: int) -> Version:
        """Read a version, and check its place in the history as far as the history is known.

        Raises:
            IntegrityError: The version is missing, or not of this history.
        """
        path = VERSIONS + numbered(number)
        try:
            body, key_id, digest = self._opened(path, "ags-version", self.envelope)
        except FileNotFoundError:
            raise IntegrityError(f"{path} is missing: it was removed after it was listed") from None
        version = Version.from_json(
            body, number, path, lambda names: [ref for name in names for ref in self._lists.get(name, path)]
        )._replace(key_id=key_id, sha256=digest)
        self._check_place(version)
        self._check_keys(version)
        return version

    # ---- the history

    def _check_place(self, version: Version) -> None:
        """Check that a version is of one history with the newest version that was read, or with the pin."""
        known = Pin(self._head.number, self._head.sha256) if self._head else self._pin
        if known is None:
            return
        if version.number >= known.number:
            digest = self.digest(version, known.number)
            if digest == known.sha256:
                return
            what = f"version {version.number} of {self.store.url}"
            if digest is None:
                raise IntegrityError(
                    f"{what} remembers the versions from {version.chain.first} on, and the pin is of version "
                    f"{known.number}, which is no longer there: whether it descends from the pin cannot be told any "
                    "more. Compare the dataset with what you know of it, and take a newer pin"
                )
            raise IntegrityError(
                f"{what} does not descend from version {known.number} as "
                f"{'it was before' if self._head else 'the pin has it'}: another history was put in the place of the "
                "dataset's. Nothing was written or deleted. `ags-fast inspect` shows the digests of its versions: "
                "restore what was there from the storage's own versions, or from a copy"
            )
        if self._head is not None:
            self._check_ancestor(self._head, version.number, version.sha256)

    def _check_ancestor(self, head: Version, number: int, found: str) -> None:
        """Check that the document of an older version, with the SHA-256 `found`, is an ancestor of `head`."""
        digest = self.digest(head, number)
        if digest == found or (digest is None and self._pin is None):
            return
        path = VERSIONS + numbered(number)
        if digest is None:
            raise IntegrityError(
                f"{path} is older than what version {head.number} remembers, from version {head.chain.first} on: "
                "whether it belongs to the history that is pinned cannot be told"
            )
        raise IntegrityError(
            f"{path} is not the version {number} that version {head.number} descends from: one of the two was "
            "exchanged, as if somebody had put an older history back. Nothing was written or deleted. `ags-fast "
            "inspect` shows their digests: put back the document that is right, from the storage's own versions or "
            "from a copy, and take away those that do not descend from it; then try again"
        )

    def _check_parents(self, head: Version) -> None:
        """Check that the documents of the last ancestors are those that `head` descends from."""
        if head.sha256 == self._fits:
            return
        for number in range(max(1, head.number - PARENTS), head.number):
            try:
                data = self._numbered.read(number, document_nbytes("ags-version"))
            except FileNotFoundError:
                continue  # expired
            self._check_ancestor(head, number, sha256(data))
        self._fits = head.sha256

    def check_history(self) -> None:
        """Check that all versions, and all documents of the keys, share one history, before something is deleted.

        Raises:
            IntegrityError: They do not.
        """
        self.current(writes=True)
        for _ in self.versions():  # each is compared when it is read
            pass
        if isinstance(self.keys, DatasetKeyStore):
            self.keys.check_history()

    def chain_orphans(self) -> list[str]:
        """Return digests and lists that no version names, and that are at least a day old."""
        objects, lists = self._chain_objects, self._lists
        old = time.time() - NO_LOCK_SECONDS
        listed = objects.in_folder(entry.path for entry in self.store.list(CHAIN) if entry.modified < old)
        listed += [entry.path for entry in self.store.list(LISTS) if entry.modified < old]
        if not listed:
            return []
        # Read after the listing, so that the newest version names every object that a living writer needs.
        head = self.current()
        named = objects.paths(head.chain.needed(head.sha256)) if head else set()
        for version in self.versions():
            named |= objects.paths(version.chain.blocks) | {lists.path(name) for name in version.lists}
        return [path for path in listed if path not in named]

    def digest(self, version: Version, number: int) -> str | None:
        """Return the SHA-256 of the document that a version, or an ancestor of the version, has or had.

        Args:
            version: The version.
            number: The number of the version itself or of the ancestor.

        Returns:
            The SHA-256 in hex. None if the ancestor is older than all that the version and its ancestors remember.
        """
        if number == version.number:
            return version.sha256
        found = self._chain_objects.digest(version.chain, number)
        oldest = version.chain.first
        while found is None and number < oldest:
            path = VERSIONS + numbered(oldest)
            try:
                body, _, digest = self._opened(path, "ags-version", self.envelope)
            except FileNotFoundError:
                return None
            if digest != self._chain_objects.digest(version.chain, oldest):
                return None
            chain = Chain.from_json(body, oldest, path)
            found = self._chain_objects.digest(chain, number)
            version, oldest = version._replace(chain=chain), chain.first
        return found

    def _check_keys(self, version: Version) -> None:
        """Check that the keys are those that the version was made on, or descend from them."""
        named = version.keys
        for last in (False, True):
            if self.keys.version >= named.version:
                digest = key_store_digest(self.keys, named.version)
                if digest is None or named.sha256 in (None, digest):
                    return
            if not last:
                self.keys.refresh()
        raise IntegrityError(
            f"{VERSIONS}{numbered(version.number)} was made on version {named.version} of the keys, and {self.keys!r} "
            f"is at version {self.keys.version}, which does not descend from that: somebody put older keys back, or "
            "those of another history. Restore the newer ones from the storage's own versions, or from a copy"
        )

    def versions(self, after: int = 0) -> Iterator[Version]:
        """Iterate over the versions with numbers above `after`, the newest first.

        A version that is expired meanwhile is left out.
        """
        for number in range(self.newest_number(), after, -1) if after else reversed(self.version_numbers()):
            try:
                version = self.version(number)
            except IntegrityError:
                if self.has_version(number):
                    raise
                continue
            yield version


def _check_number(url: str, newest: int, head: Version | None, pin: Pin | None, min_version: int) -> None:
    """Check that the newest version of a dataset can follow the pin, and `head`, which was read before."""
    known = max(pin.number if pin else 0, head.number if head else 0)
    if newest < known:
        was = f"the pin is of version {known}" if head is None else f"version {known} was there before"
        raise IntegrityError(
            f"the newest version of {url} is {newest or 'gone'}, and {was}: somebody took newer ones "
            "away, or put an older copy in their place"
        )
    if newest < min_version:
        raise PolicyError(
            f"the dataset's newest version is {newest}, older than min_version={min_version}: "
            "somebody took newer ones away"
        )


def _ranges(numbers: Sequence[int]) -> str:
    if not numbers:
        return "none"
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def lost_versions(store: Store) -> bool:
    """Return whether a dataset without a version once had one: it has manifests of jobs that a version preceded."""
    if not any(store.list(MANIFESTS)):
        return False
    plans = [entry.path for entry in store.list(PLANS)]
    for path in plans:
        try:
            if path.endswith(".json") and Document(store.read_small(path, DOCUMENT_NBYTES), path).claimed()["base"]:
                return True
        except (FileNotFoundError, FormatError, KeyError):
            pass  # the job ends just now, or its plan names no version
    return not plans
