"""The data keys of files: new ones, and those that another KEK is to wrap."""

from __future__ import annotations

import os
from array import array
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

from ags_fast._core import rewrap
from ags_fast.dataset.key_material import with_key_material
from ags_fast.errors import FormatError, IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.keys.envelope import Envelope

AT_ONCE = 10_000  # files whose data keys are in memory


def key_ids(row: FileEntry) -> Iterator[str]:
    """Yield the KEK of a file's own data key, and then those of its columns."""
    yield row.key_id
    for key in row.column_keys or ():
        yield key["key_id"]


def with_new_keys(rows: Sequence[FileEntry], length: int, envelope: Envelope, dataset_id: str) -> list[FileEntry]:
    """Return files with new data keys, wrapped by the KEKs that the files name.

    Args:
        rows: The files.
        length: Bytes of a data key.
        envelope: The KEKs.
        dataset_id: The dataset, to which wrapped keys are bound.
    """
    made: list[FileEntry] = []
    for at in range(0, len(rows), AT_ONCE):
        part = rows[at : at + AT_ONCE]
        wraps = [row.wraps(dataset_id) for row in part]
        random = memoryview(os.urandom(length * sum(map(len, wraps))))
        deks = [bytes(random[at : at + length]) for at in range(0, len(random), length)]
        todo: dict[str, list[tuple[bytes, bytes]]] = {}  # {KEK: what to wrap}, so that each KEK wraps many at once
        for (key_id, _, bound), dek in zip(chain.from_iterable(wraps), deks, strict=True):
            todo.setdefault(key_id, []).append((dek, bound))
        done = {key_id: iter(envelope.wrap_many(key_id, items)) for key_id, items in todo.items()}
        wrapped = [
            row.with_wraps([(key_id, next(done[key_id])) for key_id, _, _ in each])
            for row, each in zip(part, wraps, strict=True)
        ]
        made += with_key_material(envelope, wrapped, deks)
    return made


def rewrapped_row(row: FileEntry, to: Sequence[str | None], envelope: Envelope, dataset_id: str) -> FileEntry:
    """Return a file with its data keys under other KEKs.

    Args:
        row: The file.
        to: The KEK for each of its data keys, in the order of `key_ids`; None: the data key stays as it is.
        envelope: All these KEKs.
        dataset_id: The dataset.
    """
    if not any(to):
        return row
    wraps = []
    for (key_id, wrapped, bound), new in zip(row.wraps(dataset_id), to, strict=True):
        if new is not None:
            wrapped = envelope.wrap(new, envelope.unwrap(key_id, wrapped, bound), bound)
        wraps.append((new or key_id, wrapped))
    return row.with_wraps(wraps)


def rewrapped_many(
    envelope: Envelope,
    old: str,
    new: str,
    prefix: bytes,
    names: Sequence[bytes],
    wrapped: Sequence[bytes],
    concurrency: int = 1,
) -> list[bytes]:
    """Return wrapped data keys of one KEK as another one wraps them. In double wrap, C does it.

    Args:
        envelope: Both KEKs.
        old: The KEK that has wrapped them.
        new: The KEK that is to.
        prefix: What binds a data key is this, and then its name.
        names: The names.
        wrapped: The wrapped data keys.
        concurrency: Threads that call the KMS.
    """
    if (pair := envelope.pair(old, new)) is None:
        items = [(one, prefix + name) for one, name in zip(wrapped, names, strict=True)]
        return envelope.rewrap_many(old, new, items, None, concurrency)
    data, at = b"".join(wrapped), _offsets(wrapped)
    out = bytearray(len(data))
    try:
        rewrap(*pair, prefix, _offsets(names), b"".join(names), at, data, out)
    except (IntegrityError, ValueError):
        for one, name in zip(wrapped, names, strict=True):  # to say what is wrong, and with which
            try:
                envelope.unwrap(old, one, prefix + name)
            except (FormatError, IntegrityError) as error:
                raise type(error)(f"{os.fsdecode(name)}: {error}") from None
        raise
    made = bytes(out)
    return [made[begin:end] for begin, end in pairwise(at)]


def _offsets(parts: Sequence[bytes]) -> array[int]:
    """Return where each part begins in all of them joined, and where the last one ends."""
    return array("i", accumulate(map(len, parts), initial=0))
