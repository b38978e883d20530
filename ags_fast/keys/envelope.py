"""Envelopes: data keys (DEKs) wrapped by key encryption keys (KEKs), which a KMS has wrapped.

A KEK is a `KeyEntry`. In **double wrap** (the default) the KEK is unwrapped once per process and wraps DEKs here: nonce
(12 bytes), AES-GCM(KEK, DEK), tag (16), with the *binding* as AAD. In **single wrap** the KMS wraps each DEK, followed
by SHA-256 of its binding, since not every KMS has an AAD. A binding names the dataset, purpose and path that a DEK is
for, so that a wrapped DEK cannot be put to another use.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from ags_fast._core import NONCE_NBYTES, OVERHEAD_NBYTES, Key, rewrap
from ags_fast.ags1 import KEY_LIMIT, KeyBytes
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError, KeyLimitError, PolicyError, UnknownKeyError
from ags_fast.keys.cache import cache_name, unwrapped_keks
from ags_fast.keys.entry import KeyEntry
from ags_fast.keys.kek import KEK_NBYTES, bad_wrap
from ags_fast.keys.kms import Kms, KmsClient, aes_key, as_kms, same_counts, shared_client

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence


__all__ = ["Envelope", "binding", "in_threads"]

DIGEST_NBYTES = 32

Item = TypeVar("Item")
Result = TypeVar("Result")

_proving = threading.RLock()  # held by the thread that has a wrap tried, for which the others wait


def _after_fork_in_child() -> None:
    global _proving
    _proving = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def binding(dataset_id: str, purpose: str, path: str) -> bytes:
    """Return what a wrapped key is bound to: ``ags_fast`` 00 purpose 00 dataset_id 00 path, in UTF-8.

    Raises:
        ValueError: One of them has a NUL in it.
    """
    bound = f"ags_fast\0{purpose}\0{dataset_id}\0{path}"
    if bound.count("\0") != 3:
        raise ValueError("a NUL cannot be in a dataset id, a purpose or a path")
    return bound.encode("utf-8", "surrogateescape")  # a file's name need not be text


class Envelope:
    """Wraps and unwraps DEKs under the KEKs of `entries`.

    It pickles as properties and entries, so it can be sent wherever the KMS can be reached: a `subset` anywhere, an
    envelope over a key store where that store can be reached, too. Threads may share it.

    Args:
        kms: A client, or its properties.
        entries: A dict is copied. Any other mapping, such as that of a key store, is kept and asked for one entry at a
            time, so that the store need not be read whole.
        proven: Ids of keys in single wrap for which this job has seen that the KMS opens what it wraps; the envelope
            adds to the set. None: nothing is tried.
        kek_lengths: The bytes that a KEK may have. A dataset's KEKs have 32. Parquet's key tools have the KMS wrap data
            keys without a binding, and those have 16 or 24 bytes: so such a wrap is never taken for a KEK's.
    """

    __slots__ = ("_client", "_kek_lengths", "_looks_up", "_names", "_properties", "_proven", "entries")

    def __init__(
        self,
        kms: Kms,
        entries: Mapping[str, KeyEntry],
        proven: set[str] | None = None,
        kek_lengths: Collection[int] = (KEK_NBYTES,),
    ) -> None:
        self._properties: dict[str, str] | None = dict(kms) if isinstance(kms, Mapping) else None
        self._client: KmsClient | None = None if isinstance(kms, Mapping) else as_kms(kms)
        self._looks_up = not isinstance(entries, (dict, MappingProxyType))
        self.entries: Mapping[str, KeyEntry] = entries if self._looks_up else MappingProxyType(dict(entries))
        self._names: dict[str, tuple[KeyEntry, bytes]] = {}
        self._proven = proven
        self._kek_lengths = tuple(kek_lengths)
        for key_id, entry in () if self._looks_up else self.entries.items():
            _check_name(key_id, entry)

    @property
    def kms(self) -> KmsClient:
        """The client."""
        if self._client is None:
            self._client = shared_client(self._properties or {})
        return self._client

    def subset(self, key_ids: Iterable[str]) -> Envelope:
        """Return an envelope with only these KEKs, for places where others are not needed."""
        chosen = {key_id: self._entry(key_id) for key_id in key_ids}
        kms = self.kms if self._properties is None else self._properties
        return Envelope(kms, chosen, self._proven, self._kek_lengths)

    def wrap(self, key_id: str, dek: bytes, binding: bytes) -> bytes:
        """Return `dek`, wrapped for the use that `binding` names. PolicyError if the KEK is retired."""
        return self.wrap_many(key_id, ((dek, binding),))[0]

    def wrap_many(self, key_id: str, items: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        """Return `wrap` of each ``(dek, binding)``: a KMS call for each in single wrap, at most one in double wrap.

        In single wrap, if `proven` was given, the first DEK that a job has wrapped by a key is unwrapped again.
        """
        entry = self._entry(key_id)
        self._check_wraps(entry)
        items = list(items)
        if not entry.double_wrap:
            kms, master = self.kms, entry.wrapping_key_id
            wrapped = []
            for dek, bound in items:
                wrapped.append(bytes(kms.wrap_key(KeyBytes(dek + hashlib.sha256(bound).digest()), master)))
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
        """Return the DEK.

        Raises:
            IntegrityError: It is not what was wrapped, or was wrapped for another use.
            KeyAccessError: The key is not in the entries, or the KMS refuses.
        """
        entry = self._entry(key_id)
        if not entry.double_wrap:
            opened = aes_key(self.kms.unwrap_key(wrapped, entry.wrapping_key_id), key_id, DIGEST_NBYTES)
            dek, digest = KeyBytes(opened[:-DIGEST_NBYTES]), opened[-DIGEST_NBYTES:]
            if not hmac.compare_digest(digest, hashlib.sha256(binding).digest()):
                raise IntegrityError(f"a key wrapped by {key_id!r} was wrapped for another file or dataset")
            return dek
        key = self._key(entry)
        if len(wrapped) <= OVERHEAD_NBYTES:
            raise FormatError(f"{len(wrapped)} bytes are too short for a wrapped key")
        try:
            return KeyBytes(key.open(wrapped[:NONCE_NBYTES], wrapped[NONCE_NBYTES:], binding))
        except IntegrityError:
            raise IntegrityError(
                f"a wrapped key is not what {key_id!r} wrapped: it was changed, or wrapped for another file or dataset"
            ) from None

    def unwrap_many(self, key_id: str, items: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        """Return `unwrap` of each ``(wrapped, binding)``."""
        entry = self._entry(key_id)
        if not entry.double_wrap:
            return [self.unwrap(key_id, wrapped, bound) for wrapped, bound in items]
        open_ = self._key(entry).open
        try:
            return [KeyBytes(open_(one[:NONCE_NBYTES], one[NONCE_NBYTES:], bound)) for one, bound in items]
        except (IntegrityError, ValueError):
            return [self.unwrap(key_id, wrapped, bound) for wrapped, bound in items]  # to say what is wrong

    def rewrap_many(
        self,
        old: str,
        new: str,
        items: Sequence[tuple[bytes, bytes]],
        ready: Mapping[tuple[str, bytes], bytes] | None = None,
        concurrency: int = 1,
    ) -> list[bytes]:
        """Wrap DEKs that the key `old` wrapped by the key `new`, for the same use.

        From double wrap to double wrap, this needs no KMS. If the KMS wraps DEKs, it is called for each DEK: once if it
        rewraps and both keys are under one master key, otherwise as `unwrap` and `wrap` call it.

        Args:
            old: The key that has wrapped the DEKs.
            new: The key that wraps them from now on.
            items: Each ``(wrapped, binding)``.
            ready: Results that are known already, by the key `new` and the wrapped DEK.
            concurrency: Threads that call the KMS.
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
            wrapped = bytes(kms.rewrap_key(item[0], master))
            self._prove(after, wrapped, item[1])
            return wrapped

        return in_threads(ask, items, concurrency if kms.waits else 1)

    def rewrap_buffers(self, old: str, new: str, prefix: bytes, names: Any, wrapped: Any, out: bytearray) -> None:
        """Wrap DEKs of one KEK by another. names, wrapped: offsets (int32), and what is between each two of them."""
        self._check_wraps(self._entry(new))
        before, after = self._key(self._entry(old)), self._key(self._entry(new))
        try:
            rewrap(before, after, prefix, names[0], names[1], wrapped[0], wrapped[1], out)
        except (IntegrityError, ValueError):
            spans = [pairwise(memoryview(at).cast("B").cast("i")) for at, _ in (wrapped, names)]
            for (i, j), (k, m) in zip(*spans, strict=True):  # to say what is wrong, and with which
                try:
                    self.unwrap(old, bytes(wrapped[1][i:j]), prefix + bytes(names[1][k:m]))
                except (FormatError, IntegrityError) as error:
                    raise type(error)(f"{os.fsdecode(bytes(names[1][k:m]))}: {error}") from None
            raise

    def wrap_bare(self, key_id: str, dek: bytes) -> tuple[str, bytes]:
        """Have the KMS wrap a DEK itself and without a binding, as Parquet's key tools do.

        The first wrap of a master key that a job has made is unwrapped again, if `proven` was given.

        Returns:
            The id of the master key, which is that of the KEK, and the wrapped DEK as the KMS has returned it.

        Raises:
            PolicyError: The KEK is retired.
            IntegrityError: The wrap does not open again.
            KeyAccessError: The KMS refuses.
        """
        entry = self._entry(key_id)
        self._check_wraps(entry)
        wrapping_key_id = entry.wrapping_key_id
        wrapped = self.kms.wrap_key(dek, wrapping_key_id)
        bare = KeyEntry(f"{wrapping_key_id} for key material", wrapping_key_id)
        self._see_open(bare, lambda: self.kms.unwrap_key(wrapped, wrapping_key_id), dek)
        return wrapping_key_id, wrapped

    def _prove(self, entry: KeyEntry, wrapped: bytes, bound: bytes, dek: bytes | None = None) -> None:
        """Once in a job, see that a wrap of the KMS under the master key of `entry` opens again.

        One wrap for each key is enough: the key decides whether the caller may decrypt, and whether the service's
        answers can be opened. Damage to a single wrap is found when its file is read.
        """
        self._see_open(entry, lambda: self.unwrap(entry.key_id, wrapped, bound), dek)

    def _see_open(self, entry: KeyEntry, unwrap: Callable[[], bytes], dek: bytes | None) -> None:
        if self._proven is None or entry.key_id in self._proven:
            return
        with _proving:
            if entry.key_id in self._proven:
                return
            try:
                if unwrap() != dek and dek is not None:
                    raise IntegrityError("it is another key")
            except (FormatError, IntegrityError) as error:
                raise IntegrityError(bad_wrap(entry, error)) from None
            except KeyAccessError as error:
                raise KeyAccessError(bad_wrap(entry, error)) from None
            self._proven.add(entry.key_id)

    def _check_wraps(self, entry: KeyEntry) -> None:
        if entry.state != "active":
            raise PolicyError(f"the key {entry.key_id!r} is retired: it opens what it wrapped, and wraps nothing new")
        if entry.uses > KEY_LIMIT:  # the store counts ahead, for all processes
            raise _used_up(entry)

    def extract(self, key_id: str, salt: bytes) -> bytes:
        """Return what `Key.extract` gives of a KEK, in double wrap."""
        return KeyBytes(self._key(self._entry(key_id)).extract(salt))

    def prepare(self, key_id: str) -> None:
        """Have the KMS unwrap a KEK now, so that a refusal comes before any work. In single wrap, do nothing."""
        if (entry := self._entry(key_id)).double_wrap:
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
        if known is not entry:  # the store may have another entry by now
            name = cache_name(self.kms, entry)
            self._names[entry.key_id] = entry, name
        return unwrapped_keks.get(name, lambda: self._load(entry), self.kms.cache_seconds)

    def _load(self, entry: KeyEntry) -> Key:
        assert entry.wrapped is not None
        key = aes_key(self.kms.unwrap_key(entry.wrapped, entry.wrapping_key_id), entry.key_id)
        if len(key) not in self._kek_lengths:
            raise IntegrityError(
                f"the KMS unwrapped {len(key)} bytes for {entry.key_id!r}, and such a KEK has another length: somebody "
                "put another wrapped key in its place"
            )
        return Key(key)

    def __repr__(self) -> str:
        return f"<Envelope of {self.entries!r}>" if self._looks_up else f"<Envelope of {len(self.entries)} keys>"

    def __reduce__(self) -> tuple[Any, ...]:
        properties = self.kms.properties if self._properties is None else self._properties
        entries = self.entries if self._looks_up else dict(self.entries)
        return Envelope, (properties, entries, self._proven, self._kek_lengths)


def _used_up(entry: KeyEntry) -> KeyLimitError:
    return KeyLimitError(f"the key {entry.key_id!r} would wrap more than {KEY_LIMIT} keys: make a new one")


def in_threads(work: Callable[[Item], Result], items: Iterable[Item], concurrency: int) -> list[Result]:
    """Return the result for each item, in order, worked on by `concurrency` threads. The first exception ends it."""
    if concurrency == 1:
        return [work(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(concurrency, **same_counts()) as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _check_name(key_id: str, entry: KeyEntry) -> None:
    if entry.key_id != key_id:
        raise ValueError(f"the entry under {key_id!r} belongs to {entry.key_id!r}")
