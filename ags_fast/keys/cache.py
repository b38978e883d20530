"""Unwrapped KEKs of a process: each unwrapped once, kept for a while, and wiped."""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from ags_fast.errors import AgsError
from ags_fast.keys.kms.client import CACHE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ags_fast._core import Key
    from ags_fast.keys.entry import KeyEntry
    from ags_fast.keys.kms import KmsClient

__all__ = ["KeyCache", "cache_name", "clear_cache", "unwrapped_keks"]

ENTRIES = 1024


class _Flight:
    """A KMS call that other threads wait for."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.key: Key | None = None
        self.error: AgsError | None = None


class KeyCache:
    """Keys by name. Each lives only in a `Key`, which wipes its memory when its last user drops it.

    A lookup or a `put` drops the keys that are older than allowed, and the longest unused if there are too many.
    Threads that want a key that is missing make one call for it. The child of a fork begins with an empty cache.

    Args:
        seconds: How long a key is kept, unless its client says otherwise.
        entries: How many keys are kept.
    """

    def __init__(self, seconds: float = CACHE_SECONDS, entries: int = ENTRIES) -> None:
        self.seconds, self.entries = seconds, entries
        self.reset()

    def reset(self) -> None:
        """Forget everything, and make a new lock: after a fork, another thread of the parent may hold the old one."""
        self._lock = threading.Lock()
        self._keys: OrderedDict[bytes, tuple[float, Key]] = OrderedDict()
        self._until = math.inf  # no key expires before
        self._flights: dict[bytes, _Flight] = {}

    def clear(self) -> None:
        """Drop all keys."""
        with self._lock:
            self._keys.clear()

    def __len__(self) -> int:
        with self._lock:
            self._drop_old()
            return len(self._keys)

    def get(self, name: bytes, load: Callable[[], Key], seconds: float | None = None) -> Key:
        """Return the key, which `load` brings if it is missing. An error of `load` reaches all threads that wait."""
        while True:
            with self._lock:
                self._drop_old()
                if (held := self._keys.get(name)) is not None:
                    self._keys.move_to_end(name)
                    return held[1]
                flight = self._flights.get(name)
                leads = flight is None
                if flight is None:
                    flight = self._flights[name] = _Flight()
            if leads:
                return self._load(name, load, flight, seconds)
            flight.done.wait()
            if flight.key is not None:
                return flight.key
            if flight.error is not None:  # with its own traceback, and without a call for each thread that waited
                raise type(flight.error)(*flight.error.args)

    def _load(self, name: bytes, load: Callable[[], Key], flight: _Flight, seconds: float | None) -> Key:
        try:
            key = flight.key = load()
            self.put(name, key, seconds)
            return key
        except AgsError as error:
            flight.error = error
            raise
        finally:
            with self._lock:
                self._flights.pop(name, None)
            flight.done.set()

    def peek(self, name: bytes) -> Key | None:
        """Return the key if it is there."""
        with self._lock:
            self._drop_old()
            held = self._keys.get(name)
            return None if held is None else held[1]

    def put(self, name: bytes, key: Key, seconds: float | None = None) -> None:
        """Keep a key for some seconds; 0 keeps nothing."""
        seconds = self.seconds if seconds is None else seconds
        if seconds <= 0:
            return
        with self._lock:
            self._drop_old()
            until = time.monotonic() + seconds
            self._keys[name] = until, key
            self._until = min(self._until, until)
            self._keys.move_to_end(name)
            while len(self._keys) > self.entries:
                self._keys.popitem(last=False)

    def _drop_old(self) -> None:
        now = time.monotonic()
        if now < self._until:
            return
        for name in [name for name, (until, _) in self._keys.items() if until <= now]:
            del self._keys[name]
        self._until = min((until for until, _ in self._keys.values()), default=math.inf)


unwrapped_keks = KeyCache()  # of this process
os.register_at_fork(after_in_child=unwrapped_keks.reset)


def clear_cache() -> None:
    """Drop all unwrapped KEKs of this process. Each is wiped as soon as no call uses it any more."""
    unwrapped_keks.clear()


def cache_name(client: KmsClient, entry: KeyEntry) -> bytes:
    """Return the name of an unwrapped KEK in the cache: the client's identity, the master key and the wrapped bytes.

    So a caller does not get a KEK that only another client, with other properties, may unwrap.
    """
    parts = (client.identity, entry.wrapping_key_id.encode(), entry.wrapped or b"")
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
