"""Going back to an older version of a dataset's keys, where the newest does not open with the caller's KMS."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.errors import AgsError
from ags_fast.keys.chain import Chain, sha256
from ags_fast.keys.document import Document
from ags_fast.keys.stores.base import Change, now_ms
from ags_fast.keys.stores.parts import remember
from ags_fast.keys.stores.version import MAX_NBYTES, KeysVersion

if TYPE_CHECKING:
    import builtins
    from collections.abc import Collection

    from ags_fast.keys.entry import KeyEntry
    from ags_fast.keys.stores.documents import KeyDocuments

__all__ = ["Earlier", "earlier_version", "removed_entries", "restored_version"]


class Earlier(NamedTuple):
    """An older version of a dataset's keys that opens, and what a new version with the same content needs."""

    dataset_id: str
    number: int
    newest: int  # the version that the new one comes after
    entries: dict[str, KeyEntry]
    lost: builtins.list[str]  # ids of keys that later versions claim, and this one does not have
    version: KeysVersion
    chain: Chain  # the new version's
    objects: dict[str, bytes]  # that the chain needs


def earlier_version(documents: KeyDocuments, number: int) -> Earlier:
    """Return what an older version has, if the KMS opens it and its buckets are there.

    Raises:
        FileNotFoundError: The document of that version, or of one after it, is gone.
    """
    newest = documents.numbered.newest()
    if not 0 < number < newest:
        raise FileNotFoundError(f"the key store in {documents.folder!r} has no version {number} before {newest}")
    found: list[bytes] = []
    for n in range(number, newest + 1):
        try:
            found.append(documents.numbered.read(n, MAX_NBYTES))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{documents.path(n)} in {documents.folder!r} was removed, by an expiry or in upkeep"
            ) from None
    version = documents.opened(found[0], number)
    entries = documents.entries(version)
    lost: set[str] = set()  # keys that later documents name, whoever wrote them: the new version does not have them
    chain, objects = version.chain, dict[str, bytes]()
    for n, document in enumerate(found, number):
        chain, made = chain.next(sha256(document))
        objects |= made
        with suppress(AgsError, KeyError, TypeError):
            claimed = Document(document, documents.path(n)).claimed()
            lost.update(str(key["key-id"]) for key in claimed.get("keys", ()) if key["key-id"] not in entries)
    return Earlier(version.dataset_id, number, newest, entries, sorted(lost), version, chain, objects)


def restored_version(documents: KeyDocuments, earlier: Earlier) -> tuple[KeysVersion, dict[str, bytes]]:
    """Return a new version that has what an earlier one has, and its new parts.

    It names copies: `tidy` may be about to remove parts that the newest version does not name.
    """
    old, parts = earlier.version, dict[str, bytes]()
    others = (entry for key_id, entry in earlier.entries.items() if key_id not in old.entries)  # not the sealer
    buckets = documents.divided(old.buckets, others, range(len(old.buckets)), parts)
    try:
        changes = documents.history(old)
    except AgsError:  # an object with earlier changes is gone, or was changed
        changes = old.history
    now = Change(earlier.newest + 1, now_ms(), {"added": [], "changed": [], "removed": earlier.lost})
    history, before = remember(changes, (), now, parts)
    after = old.following(
        now.version,
        "restore",
        now,
        entries=old.entries,
        buckets=buckets,
        history=history,
        earlier=before,
        chain=earlier.chain,
    )
    return after, parts


def removed_entries(documents: KeyDocuments, newest: KeysVersion, key_ids: Collection[str]) -> dict[str, KeyEntry]:
    """Return the entries that older documents still have, of keys that the newest version does not have any more."""
    wanted = set(key_ids)
    found: dict[str, KeyEntry] = {}
    for number in sorted(documents.numbered.numbers(), reverse=True) if wanted else ():
        if number >= newest.number:
            continue
        with suppress(AgsError, FileNotFoundError):
            data = documents.numbered.read(number, MAX_NBYTES)
            if documents.digest(newest, number) not in (None, sha256(data)):
                continue  # of another history
            version = documents.opened(data, number)
            for key_id in wanted - found.keys():
                if (entry := documents.find(version, key_id)) is not None:
                    found[key_id] = entry
        if len(found) == len(wanted):
            break
    return found
