"""Seals of table metadata: who holds a KEK of the table has written them, and they descend from what was sealed before.

A seal is the property ``ags.seal`` of an Iceberg table: an HMAC, under a key that a KEK makes, over a header that has
the digest of the table's state. The header names earlier seals, and holds the keys that they were made with, wrapped.
So one metadata file alone shows that it descends from a pin, after old files and old KEKs are gone.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from uuid import UUID

from ags_fast._core import NONCE_NBYTES, TAG_NBYTES, Key
from ags_fast.ags1 import KeyBytes
from ags_fast.errors import IntegrityError, PolicyError
from ags_fast.seals.state import PROPERTY, digest, text_of, uuid_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["ID_NBYTES", "LEVELS", "Seal", "SealKey", "decoded", "encoded", "make", "seal_of", "was_made"]

SCHEME = 1
LABEL = "ags-iceberg-seal-1"
NEWEST = 64  # ancestors that a seal names one by one
LEVELS, OF_A_LEVEL = (16, 256, 4096, 65_536), 32  # and those whose numbers are multiples of these
ID_NBYTES, DIGEST_NBYTES = 8, 32  # of an ancestor's id, and of a whole one
WRAPPED_NBYTES, MOST_WRAPPED = NONCE_NBYTES + DIGEST_NBYTES + TAG_NBYTES, 16
FINGERPRINT_NBYTES = 16
NUMBERS = range(1 << 53)
BASE64URL = re.compile("[A-Za-z0-9_-]*", re.ASCII)


class SealKey:
    """What a KEK of a table makes seals with. It shows nothing of the KEK, and no key of another table.

    Args:
        secret: What `Key.extract` of the KEK gives, with the table's UUID as salt: 32 bytes.
        table: The UUID.
    """

    def __init__(self, secret: bytes, table: UUID) -> None:
        self._secret, self._table = KeyBytes(secret), table
        self.fingerprint = self._expanded("fingerprint")[:FINGERPRINT_NBYTES]

    @classmethod
    def of(cls, kek: Key, table: UUID) -> SealKey:
        """Make the key of a KEK."""
        return cls(kek.extract(table.bytes), table)

    def mac(self, header: str) -> bytes:
        """Return the MAC of a seal's header, 32 bytes."""
        return hmac.digest(self._expanded("mac"), f"{LABEL}\n{header}".encode(), "sha256")

    def wrap(self, earlier: SealKey, nonce: bytes | None = None) -> bytes:
        """Wrap the key that sealed before. nonce: for tests only."""
        nonce = os.urandom(NONCE_NBYTES) if nonce is None else nonce
        return nonce + self._wrapping().seal(nonce, earlier._secret, self._aad())

    def unwrap(self, wrapped: bytes) -> SealKey:
        """Return the key that `wrap` was given. IntegrityError if it is another."""
        opened = self._wrapping().open(wrapped[:NONCE_NBYTES], wrapped[NONCE_NBYTES:], self._aad())
        return SealKey(opened, self._table)

    def _wrapping(self) -> Key:
        return Key(self._expanded("wrap"))

    def _aad(self) -> bytes:
        return f"{LABEL} keys".encode() + self._table.bytes

    def _expanded(self, use: str) -> bytes:
        return hmac.digest(self._secret, f"{LABEL} {use}".encode() + b"\x01", "sha256")  # HKDF-Expand, its first block

    def __repr__(self) -> str:
        return f"<SealKey {self.fingerprint.hex()}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a seal key is never pickled")


class Seal(NamedTuple):
    """A seal.

    Attributes:
        table: The table's UUID.
        n: How many states were sealed before.
        since: The newest number that was sealed over metadata without a seal of their own; 0: none.
        kek: The id of the KEK among the table's ``encryption-keys``.
        state: The digest of the table's state.
        parent: The id of the seal before; None for the first.
        file: The name of the metadata file, without a folder; None over REST, where the server chooses the name.
        ancestors: The first 8 bytes of the ids of earlier seals, oldest first: see `positions`.
        keys: The keys of earlier KEKs, each wrapped by the one after it: 60 bytes each, the newest last.
        mac: The MAC of all of these.
    """

    table: UUID
    n: int
    since: int
    kek: str
    state: bytes
    parent: bytes | None
    file: str | None
    ancestors: bytes
    keys: bytes
    mac: bytes = b""

    @property
    def header(self) -> str:
        """What the MAC is of: canonical JSON."""
        coded = {name: encoded(getattr(self, name)) for name in ("state", "ancestors", "keys")}
        told = {name: getattr(self, name) for name in ("n", "since", "kek", "file")}
        parent = None if self.parent is None else encoded(self.parent)
        return text_of({"v": SCHEME, "table": str(self.table), "parent": parent, **told, **coded})

    @property
    def id(self) -> bytes:
        """The SHA-256 of the header, 32 bytes."""
        return hashlib.sha256(f"{LABEL}\n{self.header}".encode()).digest()

    @property
    def text(self) -> str:
        """The value of the property ``ags.seal``: ASCII."""
        return json.dumps({**json.loads(self.header), "mac": encoded(self.mac)}, separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> Seal:
        """Parse a seal. IntegrityError if it is malformed; PolicyError if it is of a later scheme."""
        try:
            one = json.loads(text, object_pairs_hook=_once)
            if type(one["v"]) is int and one["v"] > SCHEME:
                raise PolicyError(f"{PROPERTY} is of another scheme than {SCHEME}: update ags_fast")
            n, since, kek, file = (one[name] for name in ("n", "since", "kek", "file"))
            if not (type(n) is type(since) is int and 0 <= since <= n and n in NUMBERS):
                raise ValueError("impossible numbers")
            if type(kek) is not str or type(file) not in (str, type(None)):
                raise ValueError("names that are no text")
            parent = None if one["parent"] is None else decoded(one["parent"])
            ancestors, keys, mac = (decoded(one[name]) for name in ("ancestors", "keys", "mac"))
            table, state = UUID(one["table"]), decoded(one["state"])
            made = cls(table, n, since, kek, state, parent, file, ancestors, keys, mac)
            lengths = {len(digest_) for digest_ in (state, mac, parent or bytes(DIGEST_NBYTES))}
            if lengths != {DIGEST_NBYTES} or (parent is None) != (n == 0):
                raise ValueError("impossible lengths")
            if len(ancestors) != ID_NBYTES * len(positions(n)):
                raise ValueError("another number of ancestors")
            if len(keys) % WRAPPED_NBYTES or len(keys) > MOST_WRAPPED * WRAPPED_NBYTES:
                raise ValueError("an impossible length of keys")
            if text_of(one) != text_of(json.loads(made.text)):
                raise ValueError("other members, or another spelling")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"{PROPERTY} was changed: it is no seal ({type(error).__name__})") from None
        return made

    def is_by(self, key: SealKey) -> bool:
        """Tell whether a key made the seal."""
        return hmac.compare_digest(key.mac(self.header), self.mac)

    def ancestor(self, n: int) -> bytes | None:
        """Return the first 8 bytes of the id of the seal with a number: this one or an earlier; None if unnamed."""
        if n == self.n:
            return self.id[:ID_NBYTES]
        named = positions(self.n)
        if n not in named:
            return None
        at = named.index(n) * ID_NBYTES
        return self.ancestors[at : at + ID_NBYTES]

    def earlier(self, key: SealKey) -> Iterator[SealKey]:
        """Yield the seal's key, and those of earlier KEKs, the newest first, as far as each opens the one before."""
        yield key
        with suppress(IntegrityError):
            for at in range(len(self.keys) - WRAPPED_NBYTES, -1, -WRAPPED_NBYTES):
                key = key.unwrap(self.keys[at : at + WRAPPED_NBYTES])
                yield key


def positions(n: int) -> list[int]:
    """Return the numbers of the ancestors that the seal with number `n` names, in order."""
    named = set(range(max(0, n - NEWEST), n))
    for step in LEVELS:
        named.update(range(max(0, (n - 1) // step - OF_A_LEVEL + 1) * step, n, step))
    return sorted(named)


def make(
    raw: Mapping[str, Any],
    kek: str,
    key: SealKey,
    parent: Seal | None = None,
    earlier: SealKey | None = None,
    *,
    file: str | None,
    adopts: bool = False,
    nonce: bytes | None = None,
) -> Seal:
    """Seal the state of a table.

    Args:
        raw: The metadata, but for the seal.
        kek: The id of the KEK.
        key: Its key.
        parent: The seal before, whose MAC was checked.
        earlier: The key of that seal.
        file: The name of the metadata file; None over REST.
        adopts: Whether the metadata before had no seal of their own.
        nonce: For tests only.
    """
    table, n, ancestors, keys = uuid_of(raw), 0, b"", b""
    if parent is not None:
        n, keys = parent.n + 1, parent.keys
        ancestors = b"".join(parent.ancestor(one) or b"" for one in positions(n))
        if earlier is not None and earlier.fingerprint != key.fingerprint:
            keys = (keys + key.wrap(earlier, nonce))[-MOST_WRAPPED * WRAPPED_NBYTES :]
    since = n if adopts else parent.since if parent else 0
    before = None if parent is None else parent.id
    made = Seal(table, n, since, kek, digest(raw), before, file, ancestors, keys)
    return made._replace(mac=key.mac(made.header))


def seal_of(raw: Mapping[str, Any]) -> Seal | None:
    """Return the seal in a table's metadata, unchecked; None if there is none. Errors: see `Seal.read`."""
    text = (raw.get("properties") or {}).get(PROPERTY)
    return None if text is None else Seal.read(text)


def was_made(raw: Mapping[str, Any], made: Mapping[str, Any], base: Mapping[str, Any]) -> bool | None:
    """Tell by the seals whether a table's newest metadata are a sealed state, or come after it; None: unknown.

    base: what the state was to follow.
    """
    with suppress(IntegrityError, PolicyError):
        newest, ours = seal_of(raw), seal_of(made)
        if newest is None and seal_of(base) is None:
            return False  # whoever follows a seal carries it on
        if newest is not None and ours is not None:
            there = newest.ancestor(ours.n) if newest.n >= ours.n else b""
            return None if there is None else there == ours.id[:ID_NBYTES]
    return None


def encoded(data: bytes) -> str:
    """Return base64url without padding."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def decoded(text: Any) -> bytes:
    """Return the bytes of base64url. ValueError if it is not the one spelling of them."""
    if not isinstance(text, str) or not BASE64URL.fullmatch(text):
        raise ValueError("not base64url")
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if encoded(data) != text:
        raise ValueError("another spelling of base64url")
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a member is there twice")
    return made
