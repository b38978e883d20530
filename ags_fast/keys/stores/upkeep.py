"""What is removed from a dataset's keys: older documents, and what only they name.

`prune` removes all of the past; an expiry runs it once it has seen that every KEK opens as it is wrapped now. `tidy`
runs with every 4th version. It removes only documents that hold nothing the next one lacks, so it loses neither a KEK
nor a wrap of one.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ags_fast.errors import AgsError, FormatError, IntegrityError
from ags_fast.fs.numbered import TOMBSTONE_SECONDS
from ags_fast.keys.chain import sha256
from ags_fast.keys.stores.documents import CHAIN
from ags_fast.keys.stores.parts import PART, some_at_a_time
from ags_fast.keys.stores.version import MAX_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ags_fast.keys.stores.documents import KeyDocuments
    from ags_fast.keys.stores.version import KeysVersion

__all__ = ["SPARED", "TIDY", "check_history", "prune", "superseded", "tidy"]

SPARED = 10  # older documents that stay for `restore`
TIDY = 4  # versions from one `tidy` to the next: a few, so that no version costs much more than the others


def check_history(documents: KeyDocuments, newest: KeysVersion) -> None:
    """Raise IntegrityError if an old document is not the one that the newest version descends from."""
    for number in documents.numbered.numbers():
        try:
            found = sha256(documents.numbered.read(number, MAX_NBYTES))
        except FileNotFoundError:
            continue  # somebody has pruned it
        if documents.digest(newest, number) not in (None, found):
            raise IntegrityError(
                f"{documents.path(number)} in {documents.folder!r} is not the version of the keys that the newest one "
                "descends from: one of the two was exchanged, as if somebody had put older keys back. Nothing was "
                "deleted. Put back the document that is right, from the storage's own versions or from a copy; then "
                "try again"
            )


def superseded(documents: KeyDocuments, found: dict[str, float], newest: KeysVersion) -> list[str]:
    """Return the paths of all objects that the newest version does not need: first those that others name.

    These are the older documents and what they consist of, and objects that no document names. The latter may be in the
    making until they are a day old.

    Args:
        documents: The documents.
        found: When each object was last modified, in seconds since the epoch. Listed before `newest` was read: so what
            a dead writer left is named by the newest version, or is the next that the newest version would name.
        newest: The newest version.
    """
    needed = documents.objects(newest)
    old = sorted(p for p in found if (number := documents.numbered.number(p)) and number < newest.number)
    named = _named_by(documents, old)
    before = time.time() - TOMBSTONE_SECONDS
    parts = [path for path in found if _is_part(path) and path not in needed]
    return sorted(path for path in parts if path in named or found[path] < before) + old


def _is_part(path: str) -> bool:
    return bool(PART.fullmatch(path)) or path.startswith(CHAIN)


def _named_by(documents: KeyDocuments, paths: Iterable[str]) -> set[str]:
    """The objects that these documents claim to consist of."""
    named: set[str] = set()
    for path in paths:
        number = documents.numbered.number(path) or 0
        with suppress(FileNotFoundError, FormatError):  # somebody removes it, too; or it is damaged, and names nothing
            named |= documents.claimed_objects(number, documents.numbered.read(number, MAX_NBYTES))
    return named


def prune(documents: KeyDocuments, newest: KeysVersion, found: dict[str, float], spare: float) -> list[str]:
    """Remove what is `superseded`.

    Args:
        documents: The documents.
        newest: The newest version.
        found: As `superseded` takes it.
        spare: The last 10 older documents stay, with what they consist of, if they are younger than this, in seconds.

    Returns:
        The full paths of the removed objects.
    """
    numbered = documents.numbered
    there = {number: entry for number, entry in numbered.entries().items() if number < newest.number}
    last = sorted(there)[-SPARED:] if spare else []
    young = [number for number in last if time.time() - there[number].modified < spare]
    stay = _named_by(documents, map(numbered.path, young)) | {numbered.path(number) for number in young}
    gone = [path for path in superseded(documents, found, newest) if path not in stay]
    parts = [path for path in gone if numbered.number(path) is None]
    for path in parts:
        documents.folder.delete(path)
    retired = numbered.retire(number for path in gone if (number := numbered.number(path)))
    return [documents.folder.full_path(path) for path in (*parts, *map(numbered.path, retired))]


def tidy(documents: KeyDocuments, newest: KeysVersion) -> None:
    """Remove a few old documents that hold nothing the next document lacks, the oldest first, and what only they name.

    The last 10 older documents stay. It ends at the first document that holds a KEK, or a wrap of a KEK, that the next
    one does not have: an open job may need the KEK, and an expiry has to see that the new wrap opens. It ends, too, at
    a document that is not the one that the newest version descends from.

    What a version no longer names, later versions do not name either: `restore` copies. So what the next document
    does not name can go.
    """
    numbered = documents.numbered
    stays = newest.number - SPARED
    first = _oldest(documents, stays)
    gone: list[int] = []
    parts: set[str] = set()
    with suppress(AgsError, FileNotFoundError):  # what is missing or exchanged is where it ends
        data, version = _read(documents, first, newest) if first < stays else (b"", newest)
        for number in range(first, min(first + 2 * TIDY, stays)):
            next_data, next_version = _read(documents, number + 1, newest)
            if not _has_all(documents, next_version, version):
                break
            named = documents.claimed_objects(number, data) - documents.claimed_objects(number + 1, next_data)
            parts.update(filter(_is_part, named))
            gone.append(number)
            data, version = next_data, next_version
    if gone and numbered.newest() == newest.number:  # otherwise others go on, and tidy up
        numbered.retire(gone)
        some_at_a_time(documents.folder.delete, sorted(parts - documents.objects(newest)))


def _oldest(documents: KeyDocuments, stays: int) -> int:
    """The oldest document before the number `stays`, which is there; else `stays`."""
    has = documents.numbered.has
    low, high, step = max(1, stays - TIDY), max(1, stays), TIDY
    while low > 1 and has(low - 1):
        low, high, step = max(1, low - 1 - step), low - 1, 2 * step
    if low < high and has(low):  # as usual
        return low
    while low < high:  # all before the oldest are gone
        middle = (low + high) // 2
        low, high = (low, middle) if has(middle) else (middle + 1, high)
    return low


def _read(documents: KeyDocuments, number: int, newest: KeysVersion) -> tuple[bytes, KeysVersion]:
    """An ancestor of the newest version, as its document and as a version."""
    data = documents.numbered.read(number, MAX_NBYTES)
    return data, documents.descended(number, data, newest)


def _has_all(documents: KeyDocuments, newer: KeysVersion, old: KeysVersion) -> bool:
    """Whether a version has every KEK of the version before it, wrapped as it was then."""
    last = newer.history[-1] if newer.history and newer.body["operation"] != "restore" else None
    if last is not None and last.version == newer.number:  # it says what it changed
        ids = (*last.changes["removed"], *last.changes["changed"])
        held = [(documents.find(newer, key_id), documents.find(old, key_id)) for key_id in ids]
        return all(before is None or (now is not None and now.wrapped == before.wrapped) for now, before in held)
    places = None
    if len(newer.buckets) == len(old.buckets):
        places = [i for i, part in enumerate(old.buckets) if part != newer.buckets[i]]
    there = documents.entries(newer, places)
    return all(
        (now := there.get(key_id)) is not None and now.wrapped == entry.wrapped
        for key_id, entry in documents.entries(old, places).items()
    )
