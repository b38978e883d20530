"""Objects of a key store beside its documents: buckets of entries, and earlier history.

A document names each part with its length and SHA-256, so the document's seal covers every bit of the part. A part is
created exclusively under a random name and never changed.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import isqrt
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ags_fast.errors import FormatError, IntegrityError, PolicyError
from ags_fast.keys.document import KEYS_FORMAT
from ags_fast.keys.encoding import dumps, parse_object, to_base64
from ags_fast.keys.entry import KeyEntry
from ags_fast.keys.kms import same_counts
from ags_fast.keys.stores.base import HISTORY, Change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ags_fast.keys.stores.base import Folder

__all__ = [
    "FOLDER",
    "INLINE",
    "PART",
    "Part",
    "all_buckets",
    "bucket_count",
    "bucket_of",
    "bucket_size",
    "divide",
    "entries_in",
    "history_of",
    "make_bucket",
    "parts_in",
    "read_bucket",
    "remember",
    "some_at_a_time",
]

FOLDER = "_ags/keys/"
PART_NBYTES = 32 << 20
PART = re.compile(rf"{FOLDER}(?:buckets|history)/[0-9a-f-]{{36}}\.json")
INLINE = 64  # entries that a document holds itself, at most
BUCKET = 64  # entries in a bucket on average, at most, where that is more than the square root of all
HISTORY_NBYTES = 8 << 10  # of the changes that a document holds itself
HISTORY_PARTS = 64  # objects with earlier changes
PARALLEL = 8  # requests at a time

T = TypeVar("T")
U = TypeVar("U")


class Part(NamedTuple):
    """A reference to a part."""

    path: str
    entries: int
    length: int  # bytes
    sha256: str  # base64

    @classmethod
    def of(cls, path: str, entries: int, data: bytes) -> Part:
        """Return the reference to an object with these bytes."""
        return cls(path, entries, len(data), to_base64(hashlib.sha256(data).digest()))


def parts_in(body: Mapping[str, Any], name: str, path: str) -> tuple[Part | None, ...]:
    """Return the parts that a document names in a field. FormatError if a reference is impossible."""
    try:
        parts = [value and Part(**{field: value[field] for field in Part._fields}) for value in body.get(name, ())]
        for part in filter(None, parts):
            if not (PART.fullmatch(part.path) and 0 < part.length <= PART_NBYTES and part.sha256 > ""):
                raise ValueError("not an object of a key store")
            if type(part.entries) is not int or type(part.length) is not int or not 0 < part.entries <= part.length:
                raise ValueError("not an object of a key store")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path} has impossible {name} ({type(error).__name__})") from None
    return tuple(part or None for part in parts)


def _made(kind: str, field: str, items: Sequence[Any], parts: dict[str, bytes]) -> Part:
    """A new part, whose bytes are added to `parts`."""
    path = f"{FOLDER}{kind}/{uuid.uuid4()}.json"
    data = parts[path] = dumps({"format": f"{KEYS_FORMAT}-{kind}", field: items}).encode() + b"\n"
    if len(data) > PART_NBYTES:
        raise PolicyError(
            f"a part of a key store may have {PART_NBYTES} bytes, and this one would have {len(data)}: make the "
            "change in several steps"
        )
    return Part.of(path, len(items), data)


def _content(folder: Folder, part: Part) -> dict[str, Any]:
    """The JSON of a part. IntegrityError if it is not the object that the document names."""
    try:
        data = folder.read_small(part.path, part.length)
    except FileNotFoundError:
        raise IntegrityError(f"{part.path} is missing, but the newest keys of {folder!r} name it") from None
    except FormatError as error:
        raise IntegrityError(str(error)) from None
    if part != Part.of(part.path, part.entries, data):
        raise IntegrityError(f"{part.path} is not what the newest keys of {folder!r} name: it was changed")
    return parse_object(data, part.path)


def some_at_a_time(do: Callable[[U], T], items: Iterable[U]) -> list[T]:
    """Return `do` of each item, with several requests at a time: object stores answer many slow requests at once."""
    items = list(items)
    if len(items) < 3:
        return [do(item) for item in items]
    with ThreadPoolExecutor(min(PARALLEL, len(items)), **same_counts()) as pool:
        return list(pool.map(do, items))


# ---------------------------------------------------------------------------------------------------------- buckets


def bucket_of(key_id: str, count: int) -> int:
    """Return which of `count` buckets, a power of 2, has a key: the first bits of the SHA-256 of its id."""
    digest = hashlib.sha256(key_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) * count >> 64


def bucket_size(total: int) -> int:
    """Return how many of N entries a bucket has on average, at most. It has at least a quarter of that.

    A change writes a bucket, and a document that names all buckets: with the square root, both stay small.
    """
    return max(BUCKET, isqrt(total))


def bucket_count(total: int, now: int) -> int:
    """Return the number of buckets for N entries: `now` as long as that fits; 0 if the document holds them all."""
    if total <= INLINE:
        return 0
    size = bucket_size(total)
    if size // 4 * now <= total <= size * now:
        return now
    return 1 << max(0, (total - 1) // size).bit_length()


def divide(entries: Iterable[KeyEntry], places: Iterable[int], count: int) -> dict[int, dict[str, KeyEntry]]:
    """Return what belongs into the buckets `places` of `count`."""
    contents: dict[int, dict[str, KeyEntry]] = {place: {} for place in places}
    for entry in entries:
        if (content := contents.get(bucket_of(entry.key_id, count))) is not None:
            content[entry.key_id] = entry
    return contents


def make_bucket(entries: Sequence[dict[str, Any]], parts: dict[str, bytes]) -> Part | None:
    """Return a new bucket, whose bytes are added to `parts`; None if it is empty."""
    return _made("buckets", "keys", entries, parts) if entries else None


def read_bucket(folder: Folder, part: Part | None, place: int, count: int) -> dict[str, KeyEntry]:
    """Return the entries of the bucket that is number `place` of `count`."""
    if part is None:
        return {}
    entries = entries_in(_content(folder, part), part.path)
    if len(entries) != part.entries or any(bucket_of(key_id, count) != place for key_id in entries):
        raise FormatError(f"{part.path} has other keys than belong there")
    return entries


def all_buckets(folder: Folder, buckets: Sequence[Part | None]) -> list[KeyEntry]:
    """Return the entries of all buckets, by their ids."""
    found = some_at_a_time(lambda i: read_bucket(folder, buckets[i], i, len(buckets)), range(len(buckets)))
    return sorted((entry for bucket in found for entry in bucket.values()), key=lambda entry: entry.key_id)


def entries_in(body: Mapping[str, Any], path: str) -> dict[str, KeyEntry]:
    """Return the entries that a document or a bucket lists. FormatError if the list is malformed."""
    keys = body.get("keys")
    if not isinstance(keys, list):
        raise FormatError(f"{path} has no list of keys")
    try:
        entries = {entry.key_id: entry for entry in map(KeyEntry.from_json, keys)}
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    if len(entries) != len(keys):
        raise FormatError(f"{path} has two keys of one id")
    return entries


# ---------------------------------------------------------------------------------------------------------- history


def remember(
    history: Sequence[Change], earlier: tuple[Part, ...], change: Change, parts: dict[str, bytes]
) -> tuple[list[Change], tuple[Part, ...]]:
    """Return a history with one more change: what the document holds, and the parts with what was earlier.

    If the document's part becomes too long, it is moved into a new part, whose bytes are added to `parts`.
    """
    changes = [*history, change][-HISTORY:]
    told = [one.to_json() for one in changes]
    if len(dumps(told)) > HISTORY_NBYTES:
        changes, earlier = [], (*earlier, _made("history", "history", told, parts))
    while earlier and (
        len(earlier) > HISTORY_PARTS or sum(part.entries for part in earlier[1:]) + len(changes) >= HISTORY
    ):
        earlier = earlier[1:]
    return changes, earlier


def history_of(folder: Folder, history: Sequence[Change], earlier: Sequence[Part]) -> list[Change]:
    """Return all changes that are remembered, oldest first."""
    bodies = some_at_a_time(lambda part: _content(folder, part), earlier)
    changes = [Change.from_json(change, FOLDER) for body in bodies for change in body["history"]]
    return [*changes, *history][-HISTORY:]
