"""Rotation of a master key: the KEKs under it are wrapped again, and what they have wrapped stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast.keys.entry import MASTER_VERSION, ROW, KeyEntry, with_version
from ags_fast.keys.envelope import in_threads
from ags_fast.keys.kek import rewrap_kek
from ags_fast.onelog import reach
from ags_fast.onelog.draft import Draft
from ags_fast.onelog.entry import Entry
from ags_fast.onelog.job import Job
from ags_fast.onelog.keks import Keks
from ags_fast.onelog.log import Log

if TYPE_CHECKING:
    pass

ASK_AT_ONCE = 8  # calls of the KMS


def rewrap_keks(log: Log, wrapping_key_id: str) -> Entry:
    """Wrap the KEKs under a master key again, by its newest version, and return the head.

    Where the wraps are in a key store, each new wrap is a new row, and the old rows leave it after the entry.

    Args:
        log: The log.
        wrapping_key_id: The master key.

    Raises:
        KeyAccessError: The KMS refuses.
    """
    done: dict[bytes | None, KeyEntry] = {}  # by what was wrapped again
    job = Job.begin(log, "mek")  # with a plan: there may be new rows, or tables of KEKs

    def changed(head: Entry) -> Draft:
        kms = log.kms.for_dataset(head.dataset_id)
        under = [key for key in head.keys.values() if key.double_wrap and key.wrapping_key_id == wrapping_key_id]
        log.kek_rows.fetch(head.dataset_id, under)
        olds = [log.whole(head.dataset_id, key) for key in under]
        todo = list({old.wrapped: old for old in olds if old.wrapped not in done}.values())
        made = in_threads(lambda old: rewrap_kek(kms, old), todo, min(ASK_AT_ONCE, len(todo)) or 1)
        done.update({old.wrapped: log.kek_rows.named(new, job.id) for old, new in zip(todo, made, strict=True)})
        keys = {key.key_id: _wrapped_as(done[old.wrapped], key) for key, old in zip(under, olds, strict=True)}
        log.kek_rows.put(head.dataset_id, keys.values())
        return Draft("mek", keys=Keks.of(head.keys).changed(keys), uses=job.uses(head))

    committed = job.replace_files(changed)
    reach.remove_rows(log)
    return committed.head


def _wrapped_as(wrapped: KeyEntry, key: KeyEntry) -> KeyEntry:
    """Return a KEK with another wrap of it."""
    properties = with_version(key.properties, wrapped.properties.get(MASTER_VERSION))
    if ROW in wrapped.properties:
        properties[ROW] = wrapped.properties[ROW]
    return key.replace(wrapped=wrapped.wrapped, properties=properties)
