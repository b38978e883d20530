"""Uses of KEKs that this process has reserved in a key store and not used yet, so that few commits write keys."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ags_fast.keys.stores.base import KeyResolver

__all__ = ["has_reserved", "reserved_ahead", "take_reserved", "uses_ahead"]

OFTEN = 32  # reservations of a process that reserve what they need and no more
MOST = 1 << 14  # spare uses of one reservation, at most


@dataclass(slots=True)
class _Held:
    """The uses of one KEK."""

    left: int = 0
    reservations: int = 0
    version: int = 0  # of the key store that has them, or one that descends from it
    digest: str | None = None  # of that version


_lock = threading.Lock()
_held: dict[tuple[str, str], _Held] = {}  # by dataset and KEK


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _held.clear()  # they are the parent's


os.register_at_fork(after_in_child=_after_fork_in_child)


def uses_ahead(keys: KeyResolver, key_id: str, count: int) -> int:
    """Return how many uses to reserve beside those that are needed now.

    A process that reserves uses of one KEK again and again reserves twice as many each time. What it does not use is
    lost when it ends: the key store counts more uses than there were, never fewer.

    Args:
        keys: The key store.
        key_id: The KEK.
        count: The uses that are needed now.
    """
    with _lock:
        held = _held.get((keys.dataset_id, key_id))
        often = held.reservations - OFTEN if held else -1
        return 0 if often < 0 else min(MOST, count << min(often, 14))


def has_reserved(dataset_id: str) -> bool:
    """Whether this process has uses of a KEK of the dataset left."""
    with _lock:
        return any(held.left for (dataset, _), held in _held.items() if dataset == dataset_id)


def reserved_ahead(keys: KeyResolver, key_id: str, count: int) -> None:
    """Remember that the version of `keys` that was just made has reserved `count` uses that are not needed yet."""
    name, version = (keys.dataset_id, key_id), keys.version
    digest = _digest(keys, version)
    with _lock:
        held = _held.setdefault(name, _Held())
        held.left = count  # if another thread has left some, they are lost
        held.reservations += 1
        held.version, held.digest = version, digest


def take_reserved(keys: KeyResolver, key_id: str, count: int) -> bool:
    """Take uses that this process has reserved before.

    The key store must descend from the version that reserved them. It does not if older keys were put back, or if
    `keys` is that of a copy of the dataset.

    Args:
        keys: The key store, as it is now: refreshed.
        key_id: The KEK.
        count: The uses.

    Returns:
        Whether there were that many. If not, none was taken.
    """
    name = keys.dataset_id, key_id
    with _lock:
        held = _held.get(name)
        if held is None or held.left < count:
            return False
        version, digest = held.version, held.digest
    now = keys.version
    known = now >= version and _digest(keys, version) == digest
    digest_now = _digest(keys, now)
    with _lock:
        held = _held.get(name)
        if held is None or held.version != version or held.left < count:
            return False
        if not known:
            held.left = 0
            return False
        held.left -= count
        held.version, held.digest = now, digest_now
        return True


def _digest(keys: KeyResolver, version: int) -> str | None:
    tell = getattr(keys, "digest", None)
    return None if tell is None else tell(version)
