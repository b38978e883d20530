"""Envelopes: data keys (DEKs) wrapped by key encryption keys (KEKs), KEKs wrapped by a KMS, and JSON that is authentic.

A KEK is a `KeyEntry`. In **double wrap** (the default) the entry holds the KEK, wrapped by a master key; the KEK is
unwrapped once per process and wraps DEKs here: nonce (12 bytes), AES-GCM(KEK, DEK), tag (16), with the *binding* as
AAD. In **single wrap** the entry holds no key, and the KMS wraps each DEK, followed by SHA-256 of its binding, since a
KMS has no AAD that all have. A binding says which dataset, purpose and path a DEK is for, so that a wrapped one cannot
be put to another use.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from ags_fast._core import NONCE_NBYTES, OVERHEAD_NBYTES, TAG_NBYTES, Key, rewrap
from ags_fast._json import check_marks, marks, marks_taken
from ags_fast.ags1 import KEY_LIMIT
from ags_fast.errors import AgsError, FormatError, IntegrityError, KeyAccessError, KeyLimitError, PolicyError
from ags_fast.keys.kms import KmsClient, Wrapped, aes_key, as_kms, check_key_id, same_counts, shared_client
from ags_fast.keys.kms.client import CACHE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "Envelope",
    "KeyEntry",
    "binding",
    "clear_cache",
    "new_kek",
    "open_document",
    "seal_document",
]

KEY_NBYTES = (16, 24, 32)
CACHE_ENTRIES = 1024
STATES = ("active", "retired")
DIGEST_NBYTES = 32
LATEST_MS = 253_402_300_799_999  # the end of the year 9999, in milliseconds since the epoch
MAX_USES = (1 << 63) - 1
KEY_TIMESTAMP = "KEY_TIMESTAMP"  # Iceberg's property of a KEK
MASTER_VERSION = "master-version"  # ours: the version that wraps it, where only the KMS's answer named that

Item = TypeVar("Item")
Result = TypeVar("Result")


class UnknownKeyError(KeyAccessError):
    """A key store has no key of this id."""


# ---------------------------------------------------------------------------------------------------------- entries

JSON_FIELDS = ("key-id", "encrypted-by-id", "encrypted-key-metadata", "state", "created-ms", "uses", "properties")


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A KEK as a key store keeps it: never the key itself.

    key_id: names it in manifests. wrapping_key_id: the master key in the KMS. wrapped: the KEK as the KMS wrapped it,
    or None: single wrap. state: ``"active"``, or ``"retired"``, which opens and no longer wraps. created_ms: since the
    epoch. uses: how many DEKs it has wrapped, as far as its store was told. properties: text that travels with it.
    more: fields of its JSON that this version does not know; they are kept.
    """

    key_id: str
    wrapping_key_id: str
    wrapped: bytes | None = None
    state: str = "active"
    created_ms: int = 0
    uses: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_key_id(self.key_id)
        check_key_id(self.wrapping_key_id)
        if type(self.wrapped) not in (bytes, type(None)) or self.wrapped == b"":
            raise ValueError("a wrapped key is bytes, and None in single wrap")
        if self.state not in STATES:
            raise ValueError(f"a key is {' or '.join(STATES)}, not {self.state!r}")
        for name, number, most in (("created_ms", self.created_ms, LATEST_MS), ("uses", self.uses, MAX_USES)):
            if type(number) is not int or not 0 <= number <= most:
                raise ValueError(f"{name} is a whole number from 0 to {most}, not {str(number)[:40]}")
        if not all(isinstance(text, str) for pair in self.properties.items() for text in pair):
            raise ValueError("the properties of a key are text")
        if known := set(self.more) & set(JSON_FIELDS):
            raise ValueError(f"fields that have a name of their own: {', '.join(sorted(known))}")

    @property
    def double_wrap(self) -> bool:
        return self.wrapped is not None

    def replace(self, **changes: Any) -> KeyEntry:
        """The same entry with other values in these fields."""
        return replace(self, **changes)

    def __repr__(self) -> str:
        wrapped = "None" if self.wrapped is None else f"<{len(self.wrapped)} bytes>"
        return (
            f"KeyEntry({self.key_id!r}, wrapping_key_id={self.wrapping_key_id!r}, wrapped={wrapped}, "
            f"state={self.state!r}, created_ms={self.created_ms}, uses={self.uses})"
        )

    def to_json(self) -> dict[str, Any]:
        """As documents hold it. The first three fields are named as in Iceberg's ``encryption-keys``:

        ``key-id``, ``encrypted-by-id`` (the master key), ``encrypted-key-metadata`` (base64; absent in single wrap),
        ``state``, ``created-ms``, ``uses``, ``properties`` (absent if empty), and what was not known when it was read.
        """
        value: dict[str, Any] = {"key-id": self.key_id, "encrypted-by-id": self.wrapping_key_id}
        if self.wrapped is not None:
            value["encrypted-key-metadata"] = base64.b64encode(self.wrapped).decode()
        value |= {"state": self.state, "created-ms": self.created_ms, "uses": self.uses}
        if self.properties:
            value["properties"] = dict(self.properties)
        return {**value, **self.more}

    @classmethod
    def from_json(cls, value: Any) -> KeyEntry:
        """The inverse of `to_json`. FormatError for what no entry is."""
        if not isinstance(value, Mapping):
            raise FormatError(f"a key entry is a JSON object, not {type(value).__name__}")
        wrapped, properties = value.get("encrypted-key-metadata"), value.get("properties", {})
        if not isinstance(properties, Mapping):
            raise FormatError("a key entry is impossible: its properties are no object")
        try:
            return cls(
                value["key-id"],
                value["encrypted-by-id"],
                None if wrapped is None else unbase64(wrapped),
                value["state"],
                value["created-ms"],
                value["uses"],
                dict(properties),
                {name: more for name, more in value.items() if name not in JSON_FIELDS},
            )
        except KeyError as error:
            raise FormatError(f"a key entry has no {error}") from None
        except (TypeError, ValueError) as error:
            raise FormatError(f"a key entry is impossible: {error}") from None


def new_kek(
    kms: KmsClient | Mapping[str, str],
    wrapping_key_id: str,
    *,
    double_wrap: bool = True,
    length: int = 32,
    now: int | None = None,
    properties: Mapping[str, str] | None = None,
) -> KeyEntry:
    """A new KEK of `length` bytes under the master key `wrapping_key_id`; its id is 16 random bytes.

    One call of the KMS in double wrap, none in single wrap. The process that made it need not ask the KMS for it again.
    now: milliseconds since the epoch. In double wrap, `properties` get Iceberg's ``KEY_TIMESTAMP``.
    """
    if length not in KEY_NBYTES:
        raise ValueError(f"an AES key has 16, 24 or 32 bytes, not {length}")
    check_key_id(wrapping_key_id)
    created_ms = time.time_ns() // 1_000_000 if now is None else now
    key_id = base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")
    if not double_wrap:
        return KeyEntry(key_id, wrapping_key_id, None, "active", created_ms, 0, dict(properties or {}))
    client = as_kms(kms)
    if client.supports_key_generation:
        key, wrapped = client.generate_key(wrapping_key_id, length)
    else:
        key = secrets.token_bytes(length)
        wrapped = client.wrap_key(key, wrapping_key_id)
    given = with_version({KEY_TIMESTAMP: str(created_ms), **(properties or {})}, wrapped)
    entry = KeyEntry(key_id, wrapping_key_id, bytes(wrapped), "active", created_ms, 0, given)
    _cache.put(_cache_name(client, entry), Key(key), client.cache_seconds)
    return entry


def rewrap_kek(
    kms: KmsClient, entry: KeyEntry, new_kms: KmsClient | None = None, wrapping_key_id: str | None = None
) -> KeyEntry:
    """The same KEK, wrapped by the current version of its master key; or by another master key, or another KMS.

    Its id and properties stay, and so all that it has wrapped. One rewrap where the service can, under the same master
    key; else an unwrap and a wrap. Then one unwrap, to see that the new wrap opens; this process need not ask again.
    """
    assert entry.wrapped is not None
    after = kms if new_kms is None else new_kms
    master = wrapping_key_id or entry.wrapping_key_id
    if after is kms and master == entry.wrapping_key_id and kms.supports_rewrap:
        wrapped = kms.rewrap_key(entry.wrapped, master)
        changed = entry.replace(wrapped=bytes(wrapped), properties=with_version(entry.properties, wrapped))
        if (held := _cache.peek(_cache_name(kms, entry))) is not None:
            _cache.put(_cache_name(kms, changed), held, kms.cache_seconds)
        check_wrap(kms, changed)
        return changed
    key = aes_key(kms.unwrap_key(entry.wrapped, entry.wrapping_key_id), entry.key_id)
    wrapped = after.wrap_key(key, master)
    changed = entry.replace(
        wrapping_key_id=master, wrapped=bytes(wrapped), properties=with_version(entry.properties, wrapped)
    )
    _cache.put(_cache_name(after, changed), Key(key), after.cache_seconds)
    check_wrap(after, changed)
    return changed


def with_version(properties: Mapping[str, str], wrapped: bytes | str | None) -> dict[str, str]:
    """The properties of a KEK, with the version that has just wrapped it (or is given), if that is told."""
    version = wrapped.version if isinstance(wrapped, Wrapped) else wrapped if isinstance(wrapped, str) else None
    others = {name: text for name, text in properties.items() if name != MASTER_VERSION}
    return others if version is None else {**others, MASTER_VERSION: version}


def check_wrap(kms: KmsClient, entry: KeyEntry) -> None:
    """Have the KMS unwrap a KEK that it has just wrapped, before anything depends on that.

    This process has the KEK at hand, so nothing else would show that the wrap opens. Raises KeyAccessError if the KMS
    does not unwrap it, IntegrityError if it returns another key.
    """
    assert entry.wrapped is not None
    name = _cache_name(kms, entry)
    held = _cache.peek(name)
    try:
        key = kms.unwrap_key(entry.wrapped, entry.wrapping_key_id)
        if len(key) not in KEY_NBYTES:
            raise IntegrityError(f"no AES key: it has {len(key)} bytes")
        found = Key(key)
        if held is not None:
            nonce = os.urandom(NONCE_NBYTES)
            found.open(nonce, held.seal(nonce, b"", b"the same key?"), b"the same key?")
        _cache.put(name, found if held is None else held, kms.cache_seconds)
    except (FormatError, IntegrityError) as error:
        raise IntegrityError(_bad_wrap(entry, error)) from None
    except KeyAccessError as error:
        raise KeyAccessError(_bad_wrap(entry, error)) from None


def _bad_wrap(entry: KeyEntry, error: AgsError) -> str:
    return (
        f"what the KMS has just wrapped under {entry.wrapping_key_id!r} for the key {entry.key_id!r} does not open "
        f"again, so it was not put to use: {error}"
    )


def check_unwraps(kms: KmsClient, entry: KeyEntry, witness: tuple[bytes, bytes] | None) -> None:
    """Have the KMS unwrap a KEK, whether or not this process has it at hand. IntegrityError if it is another one.

    witness: a key that the KEK has wrapped, and its binding; without one, nothing needs the KEK.
    """
    assert entry.wrapped is not None
    key = aes_key(kms.unwrap_key(entry.wrapped, entry.wrapping_key_id), entry.key_id)
    wrapped, bound = witness or (b"", b"")
    try:
        if witness is not None:
            Key(key).open(wrapped[:NONCE_NBYTES], wrapped[NONCE_NBYTES:], bound)
    except IntegrityError:
        raise IntegrityError(
            f"what the KMS unwrapped for {entry.key_id!r} does not open what this KEK has wrapped: its older wraps, in "
            "_ags/keys, are kept"
        ) from None


def binding(dataset_id: str, purpose: str, path: str) -> bytes:
    """What a wrapped key is bound to: ``ags_fast`` 00 purpose 00 dataset_id 00 path, in UTF-8."""
    bound = f"ags_fast\0{purpose}\0{dataset_id}\0{path}"
    if bound.count("\0") != 3:
        raise ValueError("a NUL cannot be in a dataset id, a purpose or a path")
    return bound.encode("utf-8", "surrogateescape")  # a file's name need not be text


# ---------------------------------------------------------------------------------------------------------- cache


class _Flight:
    """A KMS call that other threads wait for."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.key: Key | None = None
        self.error: AgsError | None = None


class _Cache:
    """Unwrapped KEKs of this process. A key lives only in a `Key`, which wipes its memory when the last user lets go
    of it.

    What is older than it may be (`seconds`, or the lifetime that its client has) is dropped when anything is looked up
    or put in; the longest unused goes when there are more than `entries`. Threads that want one that is not there make
    one call for it. A fork's child begins with an empty one.
    """

    def __init__(self, seconds: float = CACHE_SECONDS, entries: int = CACHE_ENTRIES) -> None:
        self.seconds, self.entries = seconds, entries
        self.reset()

    def reset(self) -> None:
        """Forget everything, and the lock, which a thread may have held that a fork's child does not have."""
        self._lock = threading.Lock()
        self._keys: OrderedDict[bytes, tuple[float, Key]] = OrderedDict()
        self._until = math.inf  # no key is old before
        self._flights: dict[bytes, _Flight] = {}

    def clear(self) -> None:
        with self._lock:
            self._keys.clear()

    def __len__(self) -> int:
        with self._lock:
            self._drop_old()
            return len(self._keys)

    def get(self, name: bytes, load: Callable[[], Key], seconds: float | None = None) -> Key:
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
            if flight.error is not None:  # with its own traceback, and not one more call for each thread that waited
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
        with self._lock:
            self._drop_old()
            held = self._keys.get(name)
            return None if held is None else held[1]

    def put(self, name: bytes, key: Key, seconds: float | None = None) -> None:
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


_cache = _Cache()
_proving = threading.RLock()  # of one thread that has a wrap tried, for which the others wait


def _after_fork_in_child() -> None:
    global _proving
    _proving = threading.RLock()
    _cache.reset()


os.register_at_fork(after_in_child=_after_fork_in_child)


def clear_cache() -> None:
    """Drop all unwrapped KEKs of this process and wipe them, as soon as no call uses them any more."""
    _cache.clear()


def _cache_name(client: KmsClient, entry: KeyEntry) -> bytes:
    """What an unwrapped KEK is found by: who unwraps it, by which master key, and the wrapped bytes themselves.

    Who may not unwrap it is not given what another client, with other properties, has unwrapped.
    """
    parts = (client.identity, entry.wrapping_key_id.encode(), entry.wrapped or b"")
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


# ---------------------------------------------------------------------------------------------------------- envelopes


class Envelope:
    """Wraps and unwraps DEKs under the KEKs of `entries`, with `kms`: a client, or its properties.

    entries: a dict is copied. Any other mapping is kept, and asked for one entry at a time: that of a key store, which
    need not be read whole for one key. proven: ids of keys in single wrap of which this job has seen that the KMS opens
    what it wraps; more are added to the set. None: nobody wants to see it.

    It pickles as properties and entries, so it can be sent wherever the KMS can be reached: a `subset` wherever it is
    sent, one over a key store where that can be reached, too. Threads may share it.
    """

    __slots__ = ("_client", "_looks_up", "_names", "_properties", "_proven", "entries")

    def __init__(
        self, kms: KmsClient | Mapping[str, str], entries: Mapping[str, KeyEntry], proven: set[str] | None = None
    ) -> None:
        self._properties: dict[str, str] | None = dict(kms) if isinstance(kms, Mapping) else None
        self._client: KmsClient | None = None if isinstance(kms, Mapping) else as_kms(kms)
        self._looks_up = not isinstance(entries, (dict, MappingProxyType))
        self.entries: Mapping[str, KeyEntry] = entries if self._looks_up else MappingProxyType(dict(entries))
        self._names: dict[str, tuple[KeyEntry, bytes]] = {}
        self._proven = proven
        for key_id, entry in () if self._looks_up else self.entries.items():
            _check_name(key_id, entry)

    @property
    def kms(self) -> KmsClient:
        if self._client is None:
            self._client = shared_client(self._properties or {})
        return self._client

    def subset(self, key_ids: Iterable[str]) -> Envelope:
        """An envelope with only these KEKs, to send to where others are not needed."""
        chosen = {key_id: self._entry(key_id) for key_id in key_ids}
        return Envelope(self.kms if self._properties is None else self._properties, chosen, self._proven)

    def wrap(self, key_id: str, dek: bytes, binding: bytes) -> bytes:
        """`dek`, wrapped for the use that `binding` says. PolicyError if the KEK is retired."""
        return self.wrap_many(key_id, ((dek, binding),))[0]

    def wrap_many(self, key_id: str, items: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        """`wrap` for each ``(dek, binding)``: a KMS call for each in single wrap, at most one in double wrap.

        In single wrap, the first that a job has wrapped by a key is unwrapped again, where `proven` was given.
        """
        entry = self._entry(key_id)
        self._check_wraps(entry)
        items = list(items)
        if not entry.double_wrap:
            kms, master = self.kms, entry.wrapping_key_id
            wrapped = []
            for dek, bound in items:
                wrapped.append(kms.wrap_key(dek + hashlib.sha256(bound).digest(), master))
                self._prove(entry, wrapped[-1], bound, dek)
            return wrapped
        key = self._key(entry)
        if key.sealed + len(items) > KEY_LIMIT:
            raise _used_up(entry)
        seal = key.seal
        nonces = os.urandom(NONCE_NBYTES * len(items))  # drawn and used up in this call: a fork duplicates none of them
        wrapped = []
        at = 0
        for dek, bound in items:
            nonce = nonces[at : at + NONCE_NBYTES]
            at += NONCE_NBYTES
            wrapped.append(nonce + seal(nonce, dek, bound))
        return wrapped

    def unwrap(self, key_id: str, wrapped: bytes, binding: bytes) -> bytes:
        """The DEK. IntegrityError if it is not what was wrapped, or was wrapped for another use.

        KeyAccessError if the key is not in the entries, or the KMS refuses.
        """
        entry = self._entry(key_id)
        if not entry.double_wrap:
            opened = aes_key(self.kms.unwrap_key(wrapped, entry.wrapping_key_id), key_id, DIGEST_NBYTES)
            dek, digest = opened[:-DIGEST_NBYTES], opened[-DIGEST_NBYTES:]
            if not hmac.compare_digest(digest, hashlib.sha256(binding).digest()):
                raise IntegrityError(f"a key that {key_id!r} wrapped was wrapped for another file or dataset")
            return dek
        key = self._key(entry)
        if len(wrapped) <= OVERHEAD_NBYTES:
            raise FormatError(f"{len(wrapped)} bytes are too short for a wrapped key")
        try:
            return key.open(wrapped[:NONCE_NBYTES], wrapped[NONCE_NBYTES:], binding)
        except IntegrityError:
            raise IntegrityError(
                f"a wrapped key is not what {key_id!r} wrapped: it was changed, or wrapped for another file or dataset"
            ) from None

    def unwrap_many(self, key_id: str, items: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        """`unwrap` for each ``(wrapped, binding)``."""
        entry = self._entry(key_id)
        if not entry.double_wrap:
            return [self.unwrap(key_id, wrapped, bound) for wrapped, bound in items]
        open_ = self._key(entry).open
        try:
            return [open_(wrapped[:NONCE_NBYTES], wrapped[NONCE_NBYTES:], bound) for wrapped, bound in items]
        except (IntegrityError, ValueError):
            return [self.unwrap(key_id, wrapped, bound) for wrapped, bound in items]  # which says what is wrong

    def rewrap_many(
        self,
        old: str,
        new: str,
        items: Sequence[tuple[bytes, bytes]],
        ready: Mapping[tuple[str, bytes], bytes] | None = None,
        concurrency: int = 1,
    ) -> list[bytes]:
        """DEKs that the key `old` wrapped, each ``(wrapped, binding)``, wrapped by the key `new` for the same use.

        Double wrap to double wrap is done here. Where the KMS wraps DEKs, it is asked for each: once if it can rewrap
        and both keys are under one master key, else as `unwrap` and `wrap` do, by so many threads at once. ready: those
        that it need not be asked for, by the key `new` and what they are wrapped as.
        """
        before, after = self._entry(old), self._entry(new)
        self._check_wraps(after)
        if before.double_wrap:
            deks = self.unwrap_many(old, items)
            return self.wrap_many(new, [(dek, bound) for dek, (_, bound) in zip(deks, items, strict=True)])
        kms, master, known = self.kms, after.wrapping_key_id, ready or {}
        rewraps = not after.double_wrap and kms.supports_rewrap and before.wrapping_key_id == master

        def ask(item: tuple[bytes, bytes]) -> bytes:
            if (had := known.get((new, item[0]))) is not None:
                return had
            if not rewraps:
                return self.wrap(new, self.unwrap(old, *item), item[1])
            wrapped = kms.rewrap_key(item[0], master)
            self._prove(after, wrapped, item[1])
            return wrapped

        return in_threads(ask, items, concurrency)

    def rewrap_column(
        self,
        old: str,
        new: str,
        prefix: bytes,
        names: Any,
        wrapped: Any,
        ready: Mapping[tuple[str, bytes], bytes] | None = None,
        concurrency: int = 1,
    ) -> Any:
        """`rewrap_many` of an Arrow array of wrapped DEKs, whose bindings are `prefix` and a name in the array `names`.

        Returns such an array. In double wrap no Python object is made of any of them.
        """
        import pyarrow as pa

        before, after = self._entry(old), self._entry(new)
        if not (before.double_wrap and after.double_wrap):
            rows = zip(wrapped.to_pylist(), names.to_pylist(), strict=True)
            items = [(w, prefix + name) for w, name in rows]
            return pa.array(self.rewrap_many(old, new, items, ready, concurrency), pa.binary())
        self._check_wraps(after)
        out = bytearray(len(wrapped.buffers()[2] or b""))
        try:
            rewrap(self._key(before), self._key(after), prefix, *_arrow(names), *_arrow(wrapped), out)
        except (IntegrityError, ValueError):
            rows = zip(wrapped.to_pylist(), names.to_pylist(), strict=True)
            for one, name in rows:  # which says what is wrong, and with which
                try:
                    self.unwrap(old, one or b"", prefix + name)
                except (FormatError, IntegrityError) as error:
                    raise type(error)(f"{os.fsdecode(name)}: {error}") from None
            raise
        return pa.BinaryArray.from_buffers(
            wrapped.type, len(wrapped), [None, wrapped.buffers()[1], pa.py_buffer(out)], offset=wrapped.offset
        )

    def _prove(self, entry: KeyEntry, wrapped: bytes, bound: bytes, dek: bytes | None = None) -> None:
        """Once in a job, see that what the KMS wraps under the master key of `entry` opens again.

        One for each key will do: whether the caller may decrypt, and whether the service returns what it can open, is
        decided by the key. What is wrong with one wrap alone is found when its file is read, like any damage to it.
        """
        if self._proven is None or entry.key_id in self._proven:
            return
        with _proving:
            if entry.key_id in self._proven:
                return
            try:
                if self.unwrap(entry.key_id, wrapped, bound) != dek and dek is not None:
                    raise IntegrityError("it is another key")
            except (FormatError, IntegrityError) as error:
                raise IntegrityError(_bad_wrap(entry, error)) from None
            except KeyAccessError as error:
                raise KeyAccessError(_bad_wrap(entry, error)) from None
            self._proven.add(entry.key_id)

    def _check_wraps(self, entry: KeyEntry) -> None:
        if entry.state != "active":
            raise PolicyError(f"the key {entry.key_id!r} is retired: it opens what it wrapped, and wraps nothing new")
        if entry.uses > KEY_LIMIT:  # its store counts for all processes, ahead
            raise _used_up(entry)

    def prepare(self, key_id: str) -> None:
        """Have the KMS unwrap a KEK now, so that a refusal comes before any work. Nothing to do in single wrap."""
        entry = self._entry(key_id)
        if entry.double_wrap:
            self._key(entry)

    def _entry(self, key_id: str) -> KeyEntry:
        entry = self.entries.get(key_id)
        if entry is None:
            raise UnknownKeyError(
                f"no key store that was read has the key {key_id!r}: it was removed, or the keys are older than what "
                "names it"
            )
        if self._looks_up:
            _check_name(key_id, entry)
        return entry

    def _key(self, entry: KeyEntry) -> Key:
        known, name = self._names.get(entry.key_id, (None, b""))
        if known is not entry:  # a store may have another by now
            name = _cache_name(self.kms, entry)
            self._names[entry.key_id] = entry, name
        return _cache.get(name, lambda: self._load(entry), self.kms.cache_seconds)

    def _load(self, entry: KeyEntry) -> Key:
        assert entry.wrapped is not None
        return Key(aes_key(self.kms.unwrap_key(entry.wrapped, entry.wrapping_key_id), entry.key_id))

    def __repr__(self) -> str:
        return f"<Envelope of {self.entries!r}>" if self._looks_up else f"<Envelope of {len(self.entries)} keys>"

    def __reduce__(self) -> tuple[Any, ...]:
        properties = self.kms.properties if self._properties is None else self._properties
        return _restore, (properties, self.entries if self._looks_up else dict(self.entries), self._proven)


def _restore(properties: dict[str, str], entries: Mapping[str, KeyEntry], proven: set[str] | None) -> Envelope:
    return Envelope(properties, entries, proven)


def _used_up(entry: KeyEntry) -> KeyLimitError:
    return KeyLimitError(f"the key {entry.key_id!r} would wrap more than {KEY_LIMIT} keys: make a new one")


def _arrow(array: Any) -> tuple[Any, Any]:
    """The offsets of an Arrow array of bytes, and the bytes."""
    _, offsets, data = array.buffers()
    return memoryview(offsets)[4 * array.offset : 4 * (array.offset + len(array) + 1)], data or b""


def in_threads(work: Callable[[Item], Result], items: Iterable[Item], concurrency: int) -> list[Result]:
    """The result for each item, in order; so many are worked at once. What is raised first ends it."""
    if concurrency == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(concurrency, **same_counts()) as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _check_name(key_id: str, entry: KeyEntry) -> None:
    if entry.key_id != key_id:
        raise ValueError(f"the entry under {key_id!r} is that of {entry.key_id!r}")


# ---------------------------------------------------------------------------------------------------------- documents

DOCUMENT = 1
REMOVED = b'{"ags":1,"removed":true}\n'  # in the place of a numbered document whose number must stay taken for a while
AUTH_FIELDS = ("key_id", "wrapped_key", "nonce", "tag")
TO_BODY, END = ',"body":\n', b"\n}\n"
HEADER_NBYTES = 256 << 10  # of a document's first line, which is parsed before anything is known to be authentic
DOCUMENT_NBYTES = 64 << 20  # of a document: the plan of a rotation of some 10**5 KEKs
KEYS_FORMAT = "ags-keys"  # of documents that list the key that seals them
KIND_NBYTES = {
    KEYS_FORMAT: 8 << 20,  # 500 entries of 16 KiB each
    "ags-version": 16 << 20,  # some 5 * 10**8 files
}


def seal_document(
    envelope: Envelope, key_id: str, dataset_id: str, path: str, body: Mapping[str, Any], *, length: int = 32
) -> bytes:
    """`body` as an authentic document for `path` of a dataset. It is not secret: everybody can read it.

    Three lines: ``{"ags":1,"dataset_id":…,"auth":{"key_id","wrapped_key","nonce","tag"},"body":``, bytes in base64; the
    body's JSON; and ``}``. A fresh key is wrapped under `key_id`, bound to the dataset, ``document`` and the path; the
    tag is AES-GCM's over no plaintext, with the bytes of the second line as AAD. `body` says its ``dataset_id``. The
    body of the format ``ags-keys`` lists the key `key_id` itself, and the first line repeats that entry, as
    ``sealer``. PolicyError if that line would be longer than what readers take.
    """
    if body.get("dataset_id") != dataset_id:
        raise ValueError("a document's body says the dataset_id that it is for")
    text = dumps(body).encode()
    key = secrets.token_bytes(length)
    nonce = os.urandom(NONCE_NBYTES)
    auth = {
        "key_id": key_id,
        "wrapped_key": _base64(envelope.wrap(key_id, key, binding(dataset_id, "document", path))),
        "nonce": _base64(nonce),
        "tag": _base64(Key(key).seal(nonce, b"", text)),
    }
    sealer = _sealer_in(body, key_id)
    header = _line({"ags": DOCUMENT, "dataset_id": dataset_id, "auth": auth} | ({"sealer": sealer} if sealer else {}))
    if len(header) > HEADER_NBYTES:
        raise PolicyError(
            f"the document {path} would begin with {len(header)} bytes about the key {key_id!r}, and readers take "
            f"{HEADER_NBYTES}: its properties are too long"
        )
    return header + text + END


def taken(data: bytes, kind: str, path: str) -> bytes:
    """A document of this format, if readers take one of its size. PolicyError otherwise."""
    if len(data) > (most := document_nbytes(kind)) or marks(data) > marks_taken(data):
        raise PolicyError(
            f"the document {path} would have {len(data)} bytes and {marks(data)} values, and readers take {most} and "
            f"{marks_taken(data)}: divide the dataset"
        )
    return data


def document_nbytes(kind: Any) -> int:
    """The most bytes that a document of this format may have."""
    return KIND_NBYTES.get(kind, DOCUMENT_NBYTES)


def _sealer_in(body: Mapping[str, Any], key_id: str) -> Any:
    """What a document that lists the key that seals it says of that key; None if it is another document."""
    if body.get("format") != KEYS_FORMAT:
        return None
    keys = body.get("keys", [body.get("sealer")])
    found = (key for key in keys if isinstance(key, dict) and key.get("key-id") == key_id)
    return next(found, None)


def open_document(
    data: bytes,
    dataset_id: str | None,
    path: str,
    resolve: Envelope | Callable[[str], KeyEntry],
    kms: KmsClient | Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The body of a document that `seal_document` made for this dataset and path.

    dataset_id: None takes the one that the document says. resolve: an envelope that has the key, or a function that
    finds a key's entry, with the `kms` to use.

    Raises FormatError if it is no such document, IntegrityError if it is another one or was changed, KeyAccessError as
    `Envelope.unwrap` does.
    """
    document = Document(data, path)
    if not isinstance(resolve, Envelope):
        if kms is None:
            raise TypeError("a function that finds entries needs the kms, too")
        resolve = Envelope(kms, {document.key_id: resolve(document.key_id)})
    return document.authentic(resolve, dataset_id)


class Document:
    """A document as it was read. Its body is not parsed before `authentic` has checked its tag.

    key_id: the key that seals it, dataset_id: whose it is, sealer: the JSON of that key's entry, in a document of keys.
    These come from the first line, and are claims until `authentic` has returned.
    """

    def __init__(self, data: bytes, path: str) -> None:
        self.path = path
        begin = data.find(b"\n", 0, HEADER_NBYTES) + 1
        self._body = memoryview(data)[begin : -len(END)]
        try:
            header = json.loads(str(data[:begin], "utf-8").removesuffix(TO_BODY) + "}")
            fields = {"ags", "dataset_id", "auth"}
            if not fields <= header.keys() <= fields | {"sealer"} or tuple(header["auth"]) != AUTH_FIELDS:
                raise ValueError("other fields")
            if header["ags"] != DOCUMENT or type(header["ags"]) is not int:
                raise FormatError(f"the document {path} has version {header['ags']!r}, known is {DOCUMENT}")
            auth = header["auth"]
            self.key_id: str = check_key_id(auth["key_id"])
            self.dataset_id: str = header["dataset_id"]
            self.sealer: Any = header.get("sealer")
            self._wrapped, self._nonce, self._tag = (unbase64(auth[name]) for name in AUTH_FIELDS[1:])
            if (len(self._nonce), len(self._tag)) != (NONCE_NBYTES, TAG_NBYTES):
                raise ValueError("a nonce or a tag of another size")
            if not isinstance(self.dataset_id, str) or ("sealer" in header and not isinstance(self.sealer, dict)):
                raise ValueError("no text, or no object")
            # One way to write it: nothing that the tag does not cover can differ.
            if _line(header) != data[:begin] or not data.endswith(END, begin):
                raise ValueError("other bytes than a document has")
        except FormatError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FormatError(f"{path} is no document of ags_fast, or was damaged ({type(error).__name__})") from None

    @property
    def wrapped_key(self) -> bytes:
        return self._wrapped

    def claimed(self) -> dict[str, Any]:
        """What the body says, whoever wrote it."""
        return parse_object(self._body.tobytes(), self.path)

    def authentic(self, envelope: Envelope, dataset_id: str | None) -> dict[str, Any]:
        """The body, if every bit of the document is what was sealed for this path of this dataset."""
        if self.key_id not in envelope.entries:
            raise UnknownKeyError(
                f"the document {self.path} is sealed with the key {self.key_id!r}, which is not among the dataset's in "
                "_ags/keys: it was changed, or they are older than it"
            )
        try:
            envelope.prepare(self.key_id)
        except IntegrityError as error:  # what the KMS says is about its key
            raise IntegrityError(f"the key of the document {self.path} does not open: {error}") from None
        try:
            if dataset_id not in (None, self.dataset_id):
                raise IntegrityError("another dataset's")
            key = envelope.unwrap(self.key_id, self._wrapped, _bound(self.dataset_id, self.path))
            if len(key) not in KEY_NBYTES:
                raise IntegrityError("no AES key")
            Key(key).open(self._nonce, self._tag, self._body)
        except IntegrityError:
            raise IntegrityError(
                f"the document {self.path} is not what was written for it: it was changed, moved here, or is another "
                "dataset's"
            ) from None
        body = self.claimed()
        if body.get("dataset_id") != self.dataset_id or dumps(_sealer_in(body, self.key_id)) != dumps(self.sealer):
            raise IntegrityError(f"the document {self.path} says something else in its first line than in its body")
        return body


def _bound(dataset_id: str, path: str) -> bytes:
    try:
        return binding(dataset_id, "document", path)
    except ValueError:
        raise FormatError(f"the document {path} names a dataset that cannot be") from None


def _line(header: Mapping[str, Any]) -> bytes:
    return (dumps(header)[:-1] + TO_BODY).encode()


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def parse_object(data: bytes, path: str) -> dict[str, Any]:
    """The JSON object that `data` is. FormatError if it is none, or would take too much memory."""
    check_marks(data, path)
    try:
        body = json.loads(str(data, "utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"{path} holds no JSON, or was damaged ({type(error).__name__})") from None
    if not isinstance(body, dict):
        raise FormatError(f"{path} holds no JSON object")
    return body


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError("a number that is too large")
    return number


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def unbase64(text: Any) -> bytes:
    """The bytes of a base64 text, if it is the one that they have. ValueError otherwise."""
    data = base64.b64decode(text, validate=True)
    if not isinstance(text, str) or _base64(data) != text:
        raise ValueError("this is not base64 as it is written here")
    return data
