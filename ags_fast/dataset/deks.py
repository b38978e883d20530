"""The data keys of files: new ones, and those that another KEK is to wrap."""

from __future__ import annotations

import os
from array import array
from itertools import accumulate, chain, islice, pairwise
from typing import TYPE_CHECKING

from ags_fast.ags1 import KeyBytes
from ags_fast.dataset.key_material import with_key_material

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.keys.envelope import Envelope

AT_ONCE = 10_000  # files whose data keys are in memory


def key_ids(row: FileEntry) -> Iterator[str]:
    """Yield the KEK of a file's own data key, and then those of its columns."""
    yield row.key_id
    for key in row.column_keys or ():
        yield key["key_id"]


def with_new_keys(rows: Iterable[FileEntry], length: int, envelope: Envelope, dataset_id: str) -> list[FileEntry]:
    """Return files with new data keys of this length in bytes, wrapped by the KEKs that the files name."""
    made: list[FileEntry] = []
    rest = iter(rows)
    while part := list(islice(rest, AT_ONCE)):
        wraps = [row.wraps(dataset_id) for row in part]
        random = memoryview(os.urandom(length * sum(map(len, wraps))))
        deks = [KeyBytes(random[at : at + length]) for at in range(0, len(random), length)]
        todo: dict[str, list[tuple[bytes, bytes]]] = {}  # {KEK: what to wrap}, so that each KEK wraps many at once
        for (key_id, _, bound), dek in zip(chain.from_iterable(wraps), deks, strict=True):
            todo.setdefault(key_id, []).append((dek, bound))
        done = {key_id: iter(envelope.wrap_many(key_id, items)) for key_id, items in todo.items()}
        wrapped = [
            row.with_wraps([(key_id, next(done[key_id])) for key_id, _, _ in each])._replace(checksum=None)
            for row, each in zip(part, wraps, strict=True)
        ]
        made += with_key_material(envelope, wrapped, deks)
    return made


def rewrapped_row(row: FileEntry, to: Sequence[str | None], envelope: Envelope, dataset_id: str) -> FileEntry:
    """Return a file with its data keys under the KEKs `to`, in the order of `key_ids`; None: a key stays as it is."""
    if not any(to):
        return row
    wraps = []
    for (key_id, wrapped, bound), new in zip(row.wraps(dataset_id), to, strict=True):
        if new is not None:
            wrapped = envelope.wrap(new, envelope.unwrap(key_id, wrapped, bound), bound)
        wraps.append((new or key_id, wrapped))
    return row.with_wraps(wraps)


def rewrapped_column(
    envelope: Envelope,
    old: str,
    new: str,
    prefix: bytes,
    names: Sequence[bytes],
    wrapped: Sequence[bytes],
    ready: Mapping[tuple[str, bytes], bytes] | None = None,
    concurrency: int = 1,
) -> list[bytes]:
    """Return data keys of one KEK wrapped by another, as `Envelope.rewrap_many` does. In double wrap, C does it.

    Each is bound to the prefix and a name.
    """
    if not (envelope.entries[old].double_wrap and envelope.entries[new].double_wrap):
        items = [(one, prefix + name) for one, name in zip(wrapped, names, strict=True)]
        return envelope.rewrap_many(old, new, items, ready, concurrency)
    bound, keys = ((array("i", accumulate(map(len, parts), initial=0)), b"".join(parts)) for parts in (names, wrapped))
    out = bytearray(len(keys[1]))
    envelope.rewrap_buffers(old, new, prefix, bound, keys, out)
    made = bytes(out)
    return [made[begin:end] for begin, end in pairwise(keys[0])]
