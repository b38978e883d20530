"""`KmsClient`: what every client of a key management system does, whatever the system.

A client travels to other processes as its properties, never as keys. So properties hold no secret: they name a file or
an environment variable. Only the caller's properties decide which system is called and where, never a file.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import time
from collections.abc import Mapping
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from ags_fast.ags1 import KeyBytes, bytes_view
from ags_fast.errors import AgsError, KeyAccessError
from ags_fast.keys.kms.accounts import AUDIT_HOOK, DESCRIBE, named_hook, note_call, report_call
from ags_fast.keys.kms.pace import wait_for_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from typing_extensions import Buffer

__all__ = ["ALLOWED", "CACHE_SECONDS", "CONTEXT", "DeniedError", "KeyVersion", "Kms", "KmsClient", "Wrapped"]
__all__ += ["WrapsKeys", "aes_key", "allowed_patterns", "cache_lifetime", "call_rate", "check_key_id", "client_class"]
__all__ += ["context_of", "remembered"]

T = TypeVar("T")

ALLOWED = "encryption.allowed-key-ids"
RATE = "kms.max-calls-per-second"
CONTEXT = "kms.encryption-context."
DATASET_ID = "{dataset-id}"
LIFETIME = "kms.cache-lifetime-seconds"
CACHE_SECONDS = 3600.0
AES_NBYTES = (16, 24, 32)
MAX_KEY_NBYTES = 4096  # the limit of the strictest service
MIN_TELLING_NBYTES = 8  # a shorter key may occur in other bytes by chance
ODD = re.compile("[\0-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and what UTF-8 cannot encode
MAX_SHARED = 16  # clients that a process remembers


def check_key_id(key_id: str) -> str:
    """Return a key's id if it is text that is not empty, has no control characters, and can be encoded as UTF-8.

    Raises:
        TypeError: It is not text.
        ValueError: It is other text.
    """
    if not isinstance(key_id, str):
        raise TypeError(f"a key id is text, not {type(key_id).__name__}")
    if not key_id or ODD.search(key_id):
        raise ValueError(f"a key id is text without control characters and not empty, not {key_id!r}")
    return key_id


class DeniedError(KeyAccessError):
    """The caller may not do that with the key."""


class Wrapped(bytes):
    """A wrapped key, with the version of the master key if only the KMS's answer named that version."""

    version: str | None = None

    @classmethod
    def by(cls, wrapped: bytes, version: str | None) -> Wrapped:
        """Make one from the bytes and the version."""
        made = cls(wrapped)
        made.version = version
        return made


class KeyVersion(NamedTuple):
    """A version of a master key, as a KMS lists it."""

    version: str | None
    made_ms: int | None  # since the epoch
    state: str | None  # in the words of the KMS


def aes_key(plaintext: bytes, key_id: str, more: int = 0) -> bytes:
    """Return the bytes that a KMS unwrapped, if they are as long as an AES key and `more` bytes.

    Args:
        plaintext: The unwrapped bytes.
        key_id: The key that they belong to, for the error.
        more: Bytes that follow the key.

    Raises:
        KeyAccessError: The length is wrong.
    """
    if len(plaintext) - more not in AES_NBYTES:
        raise KeyAccessError(
            f"the KMS unwrapped {len(plaintext)} bytes for {key_id!r}, which are not an AES key: another key was "
            "wrapped there, or the KMS answers wrongly"
        )
    return KeyBytes(plaintext)


def context_of(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the encryption context that properties name."""
    return {name[len(CONTEXT) :]: text for name, text in properties.items() if name.startswith(CONTEXT)}


def allowed_patterns(properties: Mapping[str, str]) -> list[str]:
    """Return the patterns of the master keys that may be used."""
    return [stripped for part in properties.get(ALLOWED, "*").split(",") if (stripped := part.strip())]


def call_rate(properties: Mapping[str, str]) -> float | None:
    """Return how many calls per second are allowed, or None for no limit."""
    if RATE not in properties:
        return None
    try:
        per_second = float(properties[RATE])
    except ValueError:
        per_second = 0
    if not 0 < per_second < math.inf:
        raise ValueError(f"{RATE} is a number above 0, such as 50 or 0.5, not {properties[RATE]!r}")
    return per_second


def cache_lifetime(properties: Mapping[str, str]) -> float:
    """Return how many seconds a process may keep an unwrapped key."""
    text = properties.get(LIFETIME)
    if text is None:
        return CACHE_SECONDS
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ValueError(f"{LIFETIME} is a whole number of seconds from 0 (ask each time), not {text!r}")
    return float(text)


# ---------------------------------------------------------------------------------------------------------- the client

# The client whose call the thread is in: a public method of a subclass may call that of its base, in the same call.
_calling: ContextVar[KmsClient | None] = ContextVar("ags_fast_kms_calling", default=None)


class WrapsKeys(Protocol):
    """What every KMS does. A class of yours with these two methods is enough: see `KmsClient`."""

    def wrap_key(self, key: bytes, wrapping_key_id: str, /) -> bytes:
        """As `KmsClient` has it."""

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str, /) -> bytes:
        """As `KmsClient` has it."""


Kms: TypeAlias = WrapsKeys | Mapping[str, str]
"""What ``kms=`` takes: a client, or the properties of one. See `load_kms`."""


class KmsClient:
    """A client of a key management system, which keeps master keys and wraps other keys with them.

    Make a client with `load_kms`. For a system of your own, write a class with `wrap_key` and `unwrap_key`, which may
    derive from this one, and name it in ``encryption.kms-impl``. All else is optional: `initialize`, which gets the
    properties, and `close`; `generate_key` and `rewrap_key`, if the system generates and rewraps keys; `key_version`,
    `current_version` and `versions`, if it names versions; and ``waits = False`` if its calls wait for no other
    computer. Raise KeyAccessError if the system refuses: what is not an error of ags_fast becomes one, without its
    message.

    Whoever calls such a method through ags_fast gets more: arguments and answers are checked, calls wait for their
    turn, are counted, and are reported to the audit hook. A method that calls another of the same client makes one
    call.

    Threads share a client. The client opens connections and files with its first call, again after `close`, and again
    in the child of a fork. It pickles as its properties.

    Every method raises KeyAccessError if the KMS refuses, does not know the key or does not answer. It raises
    IntegrityError or FormatError if the bytes of a wrapped key were changed.
    """

    provider = "kms"  # the system's name in errors, counters and the audit
    property_names: ClassVar[Collection[str] | None] = None  # see load_kms
    supports_key_generation = False
    supports_rewrap = False
    waits = True  # whether a call waits for another computer, so that several calls at once save time
    _properties: dict[str, str] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in METHODS:
            if (own := vars(cls).get(name)) is not None:
                setattr(cls, name, _accounted(name, own))
                if name in SIGNS and SIGNS[name] not in vars(cls):
                    setattr(cls, SIGNS[name], True)

    @property
    def properties(self) -> dict[str, str]:
        """The properties from which `load_kms` makes the same client, in this process or in another."""
        if self._properties is None:
            raise TypeError(f"{self!r} was not initialized from properties: make clients with load_kms(properties)")
        return dict(self._properties)

    @property
    def identity(self) -> bytes:
        """The same bytes for clients of the same properties, else unique to the object. For caches, not for storage."""
        if self._properties is not None:
            return json.dumps(self._properties, sort_keys=True).encode()
        return self.__dict__.setdefault("_identity", os.urandom(16))  # type: ignore[no-any-return]

    @property
    def cache_seconds(self) -> float:
        """How many seconds a process may keep a key that this client has unwrapped."""
        return cache_lifetime(self._properties or {})

    @classmethod
    def with_properties(cls, properties: Mapping[str, str]) -> Self:
        """Make an initialized client of this class."""
        client = cls()
        client.initialize(properties)
        client._properties = dict(properties)
        return client

    def initialize(self, properties: Mapping[str, str]) -> None:
        """Take the settings, without calling the KMS.

        Raises:
            ValueError: A property is missing or impossible; the message names it.
        """
        self._properties = dict(properties)

    @property
    def binds_dataset(self) -> bool:
        """Whether `for_dataset` returns another client."""
        return any(DATASET_ID in text for text in context_of(self._properties or {}).values())

    def for_dataset(self, dataset_id: str) -> KmsClient:
        """Return the client for the keys of one dataset.

        It is another client if a property ``kms.encryption-context.NAME`` has ``{dataset-id}`` in its text. The KMS
        logs the context, and unwraps nothing without the context under which it was wrapped.
        """
        if not self.binds_dataset:
            return self
        given = self.properties
        filled = {CONTEXT + name: text.replace(DATASET_ID, dataset_id) for name, text in context_of(given).items()}
        return remembered({**given, **filled}, type(self).with_properties)

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        """Encrypt a key with the current version of the master key.

        Args:
            key: 1 to 4096 bytes.
            wrapping_key_id: The master key, as the KMS names it.
        """
        raise NotImplementedError

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        """Return the key that `wrap_key` was given, whichever version of the master key wrapped it."""
        raise NotImplementedError

    def generate_key(self, wrapping_key_id: str, length: int) -> tuple[bytes, bytes]:
        """Make a new key in the KMS, in one call.

        Args:
            wrapping_key_id: The master key.
            length: Bytes of the new key: 16, 24 or 32.

        Returns:
            The key, and the key wrapped.

        Raises:
            NotImplementedError: `supports_key_generation` is false: draw a key and wrap it.
        """
        raise NotImplementedError(f"the KMS {self.provider} generates no keys: draw one and wrap it")

    def rewrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        """Return the same key, wrapped by the current version of the master key.

        If the KMS rewraps (`supports_rewrap`), the key does not leave it. Otherwise this is an unwrap and a wrap.
        """
        return self.wrap_key(self.unwrap_key(wrapped, wrapping_key_id), wrapping_key_id)

    def key_version(self, wrapped: bytes) -> str | None:
        """Return the version of the master key that wrapped a key, or None if the bytes do not name one.

        This makes no call. Objects that `wrap_key`, `generate_key` and `rewrap_key` return may carry a version that
        their bytes do not name (`Wrapped`).
        """
        return wrapped.version if isinstance(wrapped, Wrapped) else None

    def current_version(self, wrapping_key_id: str) -> str | None:
        """Return the version of the master key that wraps now, as `key_version` names it.

        If the KMS names versions, this makes a call, which the audit hook sees as ``describe``.

        Returns:
            None if the KMS does not name versions, or not to this caller.
        """
        self._check(wrapping_key_id)
        return None

    def versions(self, wrapping_key_id: str) -> list[KeyVersion]:
        """Return the versions that the KMS lists, or the rotations that made them.

        If the KMS can list them, this makes a call, which the audit hook sees as ``describe``.

        Returns:
            An empty list if the KMS lists nothing to this caller.
        """
        self._check(wrapping_key_id)
        return []

    def close(self) -> None:
        """Close connections and drop cached data. The next call opens connections again."""

    # Every call goes through these.

    def _check(self, wrapping_key_id: str) -> None:
        check_key_id(wrapping_key_id)
        patterns = allowed_patterns(self._properties or {})
        if not any(fnmatchcase(wrapping_key_id, pattern) for pattern in patterns):
            raise KeyAccessError(f"{ALLOWED} does not allow the key {wrapping_key_id!r}, so the KMS was not called")

    def _generated(self, answer: tuple[bytes, bytes], length: int) -> tuple[bytes, bytes]:
        key, wrapped = answer
        if len(key) != length:
            raise KeyAccessError(f"the KMS {self.provider} was asked for {length} bytes of key, it gave {len(key)}")
        return KeyBytes(_answer(key)), _wrapped(wrapped, key)

    def _account(self, operation: str, wrapping_key_id: str, call: Callable[[], T]) -> T:
        if _calling.get() is self:
            return call()
        self._check(wrapping_key_id)
        properties = self._properties or {}
        if self.binds_dataset:
            raise KeyAccessError(
                f"a {CONTEXT}* contains {DATASET_ID}, but this key does not belong to a dataset: omit the property here"
            )
        own_hook = named_hook(properties.get(AUDIT_HOOK))
        if (per_second := call_rate(properties)) is not None:
            wait_for_turn(self.identity, per_second)
        note_call(self.provider, operation)
        time_ms, begun, outcome = time.time_ns() // 1_000_000, time.perf_counter(), "ok"
        token = _calling.set(self)
        try:
            return self._carry_out(operation, wrapping_key_id, call)
        except Exception as error:
            outcome = type(error).__name__
            own = isinstance(error, (AgsError, MemoryError))  # a lack of memory is not the fault of the KMS
            failure = error if own else self._blamed(error, operation, wrapping_key_id)
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            _calling.reset(token)
            event = {
                "provider": self.provider,
                "operation": operation,
                "wrapping_key_id": wrapping_key_id,
                "time_ms": time_ms,
                "seconds": time.perf_counter() - begun,
                "outcome": outcome,
            }
            report_call(event, own_hook)
        # Not chained: an unknown exception may hold the key, in its message or its frames.
        failure.__cause__ = failure.__context__ = None
        raise failure

    def _carry_out(self, operation: str, wrapping_key_id: str, call: Callable[[], T]) -> T:
        return call()

    def _blamed(self, error: Exception, operation: str, wrapping_key_id: str) -> KeyAccessError:
        """Return the error for an unknown exception. It names the class, and the meaning of an error number."""
        number = error.errno if isinstance(error, OSError) and isinstance(error.errno, int) else 0
        reason = f"{type(error).__name__} ({os.strerror(number)})" if number else type(error).__name__
        what = "the key" if operation == DESCRIBE else "a key with"
        return KeyAccessError(f"the KMS {self.provider} failed to {operation} {what} {wrapping_key_id!r}: {reason}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.provider}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (getattr(self, "kind", type(self)), self.properties)


METHODS = ("wrap_key", "unwrap_key", "generate_key", "rewrap_key", "current_version", "versions")
SIGNS = {"generate_key": "supports_key_generation", "rewrap_key": "supports_rewrap"}


def _accounted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a subclass with its arguments and its answer checked, and its calls counted and reported."""

    def wrap_key(self: KmsClient, key: Buffer, wrapping_key_id: str) -> bytes:
        key = KeyBytes(bytes_view(key))
        if not 1 <= len(key) <= MAX_KEY_NBYTES:
            raise ValueError(f"a key to wrap has 1 to {MAX_KEY_NBYTES} bytes, this one has {len(key)}")
        return self._account("wrap", wrapping_key_id, lambda: _wrapped(method(self, key, wrapping_key_id), key))

    def unwrap_key(self: KmsClient, wrapped: Buffer, wrapping_key_id: str) -> bytes:
        wrapped = _as_bytes(wrapped)
        return self._account(
            "unwrap", wrapping_key_id, lambda: _unwrapped(method(self, wrapped, wrapping_key_id), wrapped)
        )

    def generate_key(self: KmsClient, wrapping_key_id: str, length: int) -> tuple[bytes, bytes]:
        if length not in AES_NBYTES:
            raise ValueError(f"an AES key has 16, 24 or 32 bytes, not {length}")
        if not self.supports_key_generation:  # a client of these properties
            return KmsClient.generate_key(self, wrapping_key_id, length)
        return self._account(
            "generate", wrapping_key_id, lambda: self._generated(method(self, wrapping_key_id, length), length)
        )

    def rewrap_key(self: KmsClient, wrapped: Buffer, wrapping_key_id: str) -> bytes:
        wrapped = _as_bytes(wrapped)
        return self._account("rewrap", wrapping_key_id, lambda: _answer(method(self, wrapped, wrapping_key_id)))

    def describe(self: KmsClient, wrapping_key_id: str) -> Any:
        return self._account(DESCRIBE, wrapping_key_id, lambda: method(self, wrapping_key_id))

    checked = {one.__name__: one for one in (wrap_key, unwrap_key, generate_key, rewrap_key)}
    return functools.wraps(method)(checked.get(name, describe))


class _Adapted(KmsClient):
    """A client that does what an object of another class does. Nothing of that class gets in the way of `KmsClient`."""

    kind: ClassVar[type]

    def __init__(self, inner: Any = None) -> None:
        self._inner = self.kind() if inner is None else inner

    def initialize(self, properties: Mapping[str, str]) -> None:
        """As `KmsClient` has it."""
        if hasattr(self._inner, "initialize"):
            self._inner.initialize(properties)
        super().initialize(properties)


def _forwarded(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._inner, name)(*args)


@functools.cache
def client_class(kind: type) -> type[KmsClient]:
    """Return the class of clients that do what objects of a class do: itself, if it is one.

    Raises:
        TypeError: The class has not both `wrap_key` and `unwrap_key`.
    """
    for name in ("wrap_key", "unwrap_key"):
        if getattr(kind, name, None) in (None, getattr(KmsClient, name)):
            raise TypeError(f"{kind.__name__} is not a KMS client: give the class a method {name}")
    if issubclass(kind, KmsClient):
        return kind
    own = {name: getattr(kind, name) for name in ("provider", "property_names", "waits") if hasattr(kind, name)}
    own |= {name: _forwarded(name) for name in (*METHODS, "key_version", "close") if hasattr(kind, name)}
    return type(kind.__name__, (_Adapted,), {**own, "kind": kind})


_clients: dict[tuple[tuple[str, str], ...], KmsClient] = {}


def remembered(properties: Mapping[str, str], make: Callable[[dict[str, str]], KmsClient]) -> KmsClient:
    """Return the client of this process that has these properties. If there is none, `make` makes it."""
    name = tuple(sorted(properties.items()))
    client = _clients.get(name)
    if client is None:
        client = make(dict(name))
        if len(_clients) >= MAX_SHARED:
            _clients.clear()
        client = _clients.setdefault(name, client)
    return client


def _unpickled(kind: type, properties: dict[str, str]) -> KmsClient:
    return remembered(properties, client_class(kind).with_properties)


os.register_at_fork(after_in_child=_clients.clear)


def _as_bytes(data: Buffer) -> bytes:
    return data if type(data) is bytes else bytes(bytes_view(data))


def _answer(answer: Any) -> bytes:
    if not isinstance(answer, (bytes, bytearray, memoryview)):
        raise KeyAccessError(f"the KMS client returned {type(answer).__name__} where bytes are due")
    if not len(answer):
        raise KeyAccessError("the KMS client returned nothing where a key is due")
    return answer if type(answer) is Wrapped else bytes(answer)


def _wrapped(answer: Any, key: bytes) -> bytes:
    """Return a wrapped key, unless it contains the key itself, as the answer of a server that echoes requests does."""
    wrapped = _answer(answer)
    if len(key) >= MIN_TELLING_NBYTES and bytes(key) in wrapped:
        raise KeyAccessError("the KMS client returned the key itself where a wrapped key is due: nothing was wrapped")
    return wrapped


def _unwrapped(answer: Any, wrapped: bytes) -> bytes:
    """Return an unwrapped key, unless it is the wrapped key, as the answer of a server that echoes requests is."""
    key = KeyBytes(_answer(answer))
    if key == wrapped:
        raise KeyAccessError("the KMS client returned the wrapped key where the key is due: nothing was unwrapped")
    return key
