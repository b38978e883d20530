"""Key management systems: what every client of one can do, how one is found, and what is counted of its calls.

A client travels as its properties and never as keys, so put no secret into them: name a file or an environment
variable. Which system is called, and where, follows from the caller's properties only, never from what a file says of
itself.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import random
import threading
import time
from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from ags_fast.ags1 import bytes_view
from ags_fast.errors import AgsError, KeyAccessError
from ags_fast.keys.kms.names import check_names

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

__all__ = ["KmsClient", "as_kms", "check_key_id", "kms_calls", "load_kms", "set_audit_hook"]

T = TypeVar("T")

KMS_TYPE = "encryption.kms-type"
KMS_IMPL = "encryption.kms-impl"
ALLOWED = "encryption.allowed-key-ids"
RATE = "kms.max-calls-per-second"
CONTEXT = "kms.encryption-context."
DATASET_ID = "{dataset-id}"
LIFETIME = "kms.cache-lifetime-seconds"
CACHE_SECONDS = 3600.0
AUDIT_HOOK = "kms.audit-hook"
PROVIDERS = {
    "local": "ags_fast.keys.kms.local:LocalKms",
    "aws": "ags_fast.keys.kms.aws:AwsKms",
    "gcp": "ags_fast.keys.kms.gcp:GcpKms",
    "azure": "ags_fast.keys.kms.azure:AzureKms",
    "vault": "ags_fast.keys.kms.vault:VaultKms",
    "pkcs11": "ags_fast.keys.kms.pkcs11:Pkcs11Kms",
}
DESCRIBE = "describe"  # the operation that is about no key
MAX_KEY_NBYTES = 4096  # the most that the strictest service takes
MIN_TELLING_NBYTES = 8  # fewer bytes may be among others by chance


# ---------------------------------------------------------------------------------------------------------- accounts

_accounts = threading.Lock()
_calls: Counter[tuple[str, str]] = Counter()
_audit_hook: Callable[[dict[str, Any]], object] | None = None
_counts: ContextVar[tuple[Counter[tuple[str, str]], ...]] = ContextVar("ags_fast_kms_counts", default=())


class UnaccountedError(AgsError):
    """The audit hook that ``kms.audit-hook`` names failed, so the key was not handed out."""


def kms_calls() -> Counter[tuple[str, str]]:
    """How often this process has called a KMS: a snapshot of ``{(provider, operation): calls}``.

    Operations are wrap, unwrap, generate and rewrap: `KmsClient.current_version` asks for no key, and does not count. A
    call that fails counts; its retries do not.
    """
    with _accounts:
        return Counter(_calls)


@contextmanager
def count_calls() -> Iterator[Counter[tuple[str, str]]]:
    """Count, as `kms_calls` does, the calls of this thread, of pools with `same_counts`, and those in `add_calls`."""
    calls: Counter[tuple[str, str]] = Counter()
    token = _counts.set((*_counts.get(), calls))
    try:
        yield calls
    finally:
        _counts.reset(token)


def add_calls(calls: Mapping[tuple[str, str], int]) -> None:
    """Count calls of which another process has told."""
    with _accounts:
        for count in _counts.get():
            count.update(calls)


def same_counts() -> dict[str, Any]:
    """Arguments of a ThreadPoolExecutor whose calls are to count where the caller's do."""
    return {"initializer": _counts.set, "initargs": (_counts.get(),)}


def set_audit_hook(hook: Callable[[dict[str, Any]], object] | None) -> None:
    """Have `hook` called after each KMS call of this process, in the thread that made it; None ends that.

    It is given a dict with provider, operation, wrapping_key_id, time_ms (since the epoch, when the call began),
    seconds, and outcome: ``"ok"`` or the name of an exception class. Never bytes of a key, wrapped or not. What it
    raises fails the call: a key that cannot be accounted for is not handed out.

    Worker processes do not have it. The property ``kms.audit-hook`` names a hook that they call, too.
    """
    global _audit_hook
    _audit_hook = hook


class Pace:
    """Turns at even distances: a bucket of one token, for which threads queue in the order in which they come."""

    def __init__(
        self,
        per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._distance = 1 / per_second
        self._next = -math.inf
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            now = self._clock()
            turn = max(now, self._next)
            self._next = turn + self._distance
        if turn > now:
            self._sleep(turn - now)


_paces: dict[bytes, Pace] = {}  # by the identity of clients


def _after_fork_in_child() -> None:
    # Locks may have been held by threads that the child does not have; the calls and turns were its parent's.
    global _accounts
    _accounts = threading.Lock()
    _paces.clear()
    _calls.clear()
    _shared.clear()


# ---------------------------------------------------------------------------------------------------------- clients


def check_key_id(key_id: str) -> str:
    """A key's id, if it can be one: not empty, no control characters, encodable. Else TypeError or ValueError."""
    if not isinstance(key_id, str):
        raise TypeError(f"a key id is text, not {type(key_id).__name__}")
    if not key_id or any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in key_id):
        raise ValueError(f"a key id is text without control characters and not empty, not {key_id!r}")
    return key_id


class Wrapped(bytes):
    """A wrapped key, and the version of the master key that wrapped it, where only the KMS's answer names that."""

    version: str | None = None

    @classmethod
    def by(cls, wrapped: bytes, version: str | None) -> Wrapped:
        made = cls(wrapped)
        made.version = version
        return made


class KeyVersion(NamedTuple):
    """What a KMS lists of a master key's version. made_ms: since the epoch. state: in the words of the KMS."""

    version: str | None
    made_ms: int | None
    state: str | None


class KmsClient:
    """A client of one key management system, which keeps master keys and wraps other keys with them.

    Make one with `load_kms`. For a system of your own, derive a class, name it in ``encryption.kms-impl`` and write
    `_wrap` and `_unwrap`, and where the system can, `_generate` and `_rewrap`, with the two attributes that say so, and
    `key_version` with `_current_version`. (A class that has ``wrap_key`` and ``unwrap_key`` of its own will do.) The
    public methods check, wait for their turn, count, and report to the audit hook.

    Threads share a client. It opens connections and files when it is first called, again after `close`, and again in
    the child of a fork. It pickles as its properties.

    Every method raises KeyAccessError if the KMS refuses, does not know the key or does not answer, IntegrityError or
    FormatError if a wrapped key is not what was wrapped.
    """

    provider = "kms"  # how errors, counters and the audit name the system
    property_names: ClassVar[Collection[str] | None] = None  # see load_kms
    supports_key_generation = False
    supports_rewrap = False
    _properties: dict[str, str] | None = None

    @property
    def properties(self) -> dict[str, str]:
        """What `load_kms` makes the same client of, in this process or in another."""
        if self._properties is None:
            raise TypeError(f"{self!r} was not initialized from properties: make clients with load_kms(properties)")
        return dict(self._properties)

    @property
    def identity(self) -> bytes:
        """Who asks: the same for clients of the same properties, else this object only. For caches, not for storage."""
        if self._properties is not None:
            return json.dumps(self._properties, sort_keys=True).encode()
        return _token(self)

    @property
    def cache_seconds(self) -> float:
        """How long a process may keep a key that this client has unwrapped, and use it without asking again."""
        return _lifetime(self._properties or {})

    def initialize(self, properties: Mapping[str, str]) -> None:
        """Take the settings, without calling the KMS. ValueError names a property that is missing or impossible."""
        self._properties = dict(properties)

    @property
    def binds_dataset(self) -> bool:
        """Whether `for_dataset` makes a difference."""
        return any(DATASET_ID in text for text in context_of(self._properties or {}).values())

    def for_dataset(self, dataset_id: str) -> KmsClient:
        """The client for the keys of one dataset.

        It is another one where a property ``kms.encryption-context.NAME`` has ``{dataset-id}`` in its text. The context
        is bound to what is wrapped: it stands in the KMS's own log, and without the same nothing opens.
        """
        if not self.binds_dataset:
            return self
        given = self.properties
        filled = {CONTEXT + name: text.replace(DATASET_ID, dataset_id) for name, text in context_of(given).items()}
        return shared_client({**given, **filled})

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        """`key` (1 to 4096 bytes), encrypted by the current version of the master key."""
        key = _taken(key)
        if not 1 <= len(key) <= MAX_KEY_NBYTES:
            raise ValueError(f"a key to wrap has 1 to {MAX_KEY_NBYTES} bytes, this one has {len(key)}")
        return self._account("wrap", wrapping_key_id, lambda: _sealed(self._wrap(key, wrapping_key_id), key))

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        """The key that `wrap_key` was given, by whatever version of the master key it was wrapped."""
        wrapped = _taken(wrapped)
        return self._account(
            "unwrap", wrapping_key_id, lambda: _opened(self._unwrap(wrapped, wrapping_key_id), wrapped)
        )

    def generate_key(self, wrapping_key_id: str, length: int) -> tuple[bytes, bytes]:
        """A new key of `length` bytes (16, 24 or 32) and the same wrapped, in one call.

        NotImplementedError unless `supports_key_generation`: draw a key and wrap it.
        """
        if length not in (16, 24, 32):
            raise ValueError(f"an AES key has 16, 24 or 32 bytes, not {length}")
        if not self.supports_key_generation:
            raise NotImplementedError(f"the KMS {self.provider} generates no keys: draw one and wrap it")

        def call() -> tuple[bytes, bytes]:
            key, wrapped = self._generate(wrapping_key_id, length)
            if len(key) != length:
                raise KeyAccessError(f"the KMS {self.provider} was asked for {length} bytes of key, it gave {len(key)}")
            return _bytes(key), _sealed(wrapped, key)

        return self._account("generate", wrapping_key_id, call)

    def rewrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        """The same key, wrapped by the current version of the master key.

        Where the KMS does that itself (`supports_rewrap`), the key does not leave it; elsewhere this is an unwrap
        and a wrap.
        """
        wrapped = _taken(wrapped)
        if not self.supports_rewrap:
            return self.wrap_key(self.unwrap_key(wrapped, wrapping_key_id), wrapping_key_id)
        return self._account("rewrap", wrapping_key_id, lambda: _bytes(self._rewrap(wrapped, wrapping_key_id)))

    def key_version(self, wrapped: bytes) -> str | None:
        """The version of the master key that wrapped it, if the bytes tell; no call is made.

        What `wrap_key`, `generate_key` and `rewrap_key` have just returned may tell more than its bytes (`Wrapped`).
        """
        return wrapped.version if isinstance(wrapped, Wrapped) else None

    def current_version(self, wrapping_key_id: str) -> str | None:
        """The version of the master key that wraps now, in the words of `key_version`.

        None if the KMS does not tell, or not this caller. Where it can be told, this is
        a call, which the audit hook hears of as ``describe``; elsewhere nobody is asked.
        """
        if self._tells_current_version:
            return self._account(DESCRIBE, wrapping_key_id, lambda: self._current_version(wrapping_key_id))
        self._check(wrapping_key_id)
        return None

    def versions(self, wrapping_key_id: str) -> list[KeyVersion]:
        """The versions that the KMS lists, or the rotations that made them. Nothing if it lists none to this caller.

        Where it lists them, this is a call, which the audit hook hears of as ``describe``.
        """
        if type(self)._versions_of is KmsClient._versions_of:
            self._check(wrapping_key_id)
            return []
        return self._account(DESCRIBE, wrapping_key_id, lambda: self._versions_of(wrapping_key_id))

    def close(self) -> None:
        """Let go of connections and of what was read. The next call opens them again."""

    # What a provider writes. Whatever these raise that is no AgsError becomes a KeyAccessError.

    def _wrap(self, key: bytes, wrapping_key_id: str) -> bytes:
        raise NotImplementedError

    def _unwrap(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        raise NotImplementedError

    def _generate(self, wrapping_key_id: str, length: int) -> tuple[bytes, bytes]:
        raise NotImplementedError

    def _rewrap(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        raise NotImplementedError

    def _current_version(self, wrapping_key_id: str) -> str | None:
        raise NotImplementedError

    def _versions_of(self, wrapping_key_id: str) -> list[KeyVersion]:
        raise NotImplementedError

    @property
    def _tells_current_version(self) -> bool:
        return type(self)._current_version is not KmsClient._current_version

    def _check(self, wrapping_key_id: str) -> None:
        check_key_id(wrapping_key_id)
        patterns = _patterns((self._properties or {}).get(ALLOWED, "*"))
        if not any(fnmatchcase(wrapping_key_id, pattern) for pattern in patterns):
            raise KeyAccessError(f"{ALLOWED} does not have the key {wrapping_key_id!r}, so the KMS was not asked")

    def _wait_for_turn(self) -> None:
        per_second = _rate(self._properties or {})
        if per_second is not None:
            identity = self.identity
            with _accounts:
                pace = _paces.setdefault(identity, Pace(per_second))
            pace.wait()

    def _account(self, operation: str, wrapping_key_id: str, call: Callable[[], T]) -> T:
        self._check(wrapping_key_id)
        if self.binds_dataset:
            raise KeyAccessError(f"a {CONTEXT}* has {DATASET_ID} in it, and this key is no dataset's: omit that here")
        own_hook = _own_hook((self._properties or {}).get(AUDIT_HOOK))
        self._wait_for_turn()
        with _accounts:
            if operation != DESCRIBE:
                for count in (_calls, *_counts.get()):
                    count[self.provider, operation] += 1
        time_ms, begun, outcome = time.time_ns() // 1_000_000, time.perf_counter(), "ok"
        try:
            return self._carry_out(operation, wrapping_key_id, call)
        except Exception as error:
            outcome = type(error).__name__
            failure = error if isinstance(error, AgsError) else self._blamed(error, operation, wrapping_key_id)
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            event = {
                "provider": self.provider,
                "operation": operation,
                "wrapping_key_id": wrapping_key_id,
                "time_ms": time_ms,
                "seconds": time.perf_counter() - begun,
                "outcome": outcome,
            }
            try:
                if (hook := _audit_hook) is not None:
                    hook(dict(event))
            finally:
                if own_hook is not None:
                    _report(own_hook, event)
        # Not even chained: nobody knows what a stranger writes into a message, or keeps of what was sent.
        failure.__cause__ = failure.__context__ = None
        raise failure

    def _carry_out(self, operation: str, wrapping_key_id: str, call: Callable[[], T]) -> T:
        return call()

    def _blamed(self, error: Exception, operation: str, wrapping_key_id: str) -> KeyAccessError:
        """What is said of a stranger's exception: its class, and what a number of the system means."""
        number = error.errno if isinstance(error, OSError) and isinstance(error.errno, int) else 0
        reason = f"{type(error).__name__} ({os.strerror(number)})" if number else type(error).__name__
        what = "the key" if operation == DESCRIBE else "a key with"
        return KeyAccessError(f"the KMS {self.provider} failed to {operation} {what} {wrapping_key_id!r}: {reason}")

    def __enter__(self) -> KmsClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.provider}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return shared_client, (self.properties,)


@functools.cache
def _own_hook(name: str | None) -> Callable[[dict[str, Any]], object] | None:
    return None if name is None else find_class(name, AUDIT_HOOK)


def _report(hook: Callable[[dict[str, Any]], object], event: dict[str, Any]) -> None:
    try:
        hook(event)
    except Exception as error:
        named = event["wrapping_key_id"]
        raise UnaccountedError(
            f"{AUDIT_HOOK} failed with {type(error).__name__}, so this {event['operation']} with the key {named!r} "
            "does not count as done: a key that cannot be accounted for is not handed out"
        ) from None


def _token(client: Any) -> bytes:
    """What tells an object from all others, also from one that takes its place in memory."""
    return client.__dict__.setdefault("_ags_fast_token", os.urandom(16))  # type: ignore[no-any-return]


class _Adapter(KmsClient):
    """Counts and reports for an object that has the methods of a client and none of their accounts."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.provider = str(getattr(client, "provider", KmsClient.provider))
        if self.provider == KmsClient.provider:
            self.provider = type(client).__name__
        self._generates = _told(client, "supports_key_generation") and hasattr(client, "generate_key")
        own_rewrap = getattr(type(client), "rewrap_key", None)
        self._rewraps = own_rewrap not in (None, KmsClient.rewrap_key)
        own_version = getattr(type(client), "current_version", None)
        self._tells_version = callable(own_version) and own_version is not KmsClient.current_version

    @property
    def identity(self) -> bytes:
        if self._properties is None and hasattr(self._client, "__dict__"):
            return _token(self._client)
        return super().identity

    @property
    def supports_key_generation(self) -> bool:  # type: ignore[override]
        return self._generates

    @property
    def supports_rewrap(self) -> bool:  # type: ignore[override]
        return self._rewraps

    def initialize(self, properties: Mapping[str, str]) -> None:
        super().initialize(properties)
        if hasattr(self._client, "initialize"):
            self._client.initialize(dict(properties))

    def _wrap(self, key: bytes, wrapping_key_id: str) -> bytes:
        return self._client.wrap_key(key, wrapping_key_id)  # type: ignore[no-any-return]

    def _unwrap(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return self._client.unwrap_key(wrapped, wrapping_key_id)  # type: ignore[no-any-return]

    def _generate(self, wrapping_key_id: str, length: int) -> tuple[bytes, bytes]:
        return self._client.generate_key(wrapping_key_id, length)  # type: ignore[no-any-return]

    def _rewrap(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return self._client.rewrap_key(wrapped, wrapping_key_id)  # type: ignore[no-any-return]

    @property
    def _tells_current_version(self) -> bool:
        return self._tells_version

    def _current_version(self, wrapping_key_id: str) -> str | None:
        return _text(self._client.current_version(wrapping_key_id))

    def key_version(self, wrapped: bytes) -> str | None:
        return _text(self._client.key_version(wrapped)) if hasattr(self._client, "key_version") else None

    def close(self) -> None:
        if hasattr(self._client, "close"):
            self._client.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._client, name)


def _told(client: Any, name: str) -> bool:
    """An attribute, or, as in Java's interface, what a method of that name returns."""
    value = getattr(client, name, False)
    return bool(value() if callable(value) else value)


def _taken(data: Any) -> bytes:
    """Any bytes-like object as bytes; neither text nor a number is one."""
    return data if type(data) is bytes else bytes(bytes_view(data))


def _text(version: Any) -> str | None:
    """A version, whatever it is to its KMS."""
    return None if version is None else str(version)


def _bytes(answer: Any) -> bytes:
    if not isinstance(answer, (bytes, bytearray, memoryview)):
        raise KeyAccessError(f"the KMS client returned {type(answer).__name__} where bytes are due")
    if not len(answer):
        raise KeyAccessError("the KMS client returned nothing where a key is due")
    return answer if type(answer) is Wrapped else bytes(answer)


def _sealed(answer: Any, key: bytes) -> bytes:
    """A wrapped key. KeyAccessError for the key itself, as a server has it that sends back what it is sent."""
    wrapped = _bytes(answer)
    if len(key) >= MIN_TELLING_NBYTES and bytes(key) in wrapped:
        raise KeyAccessError("the KMS client returned the key itself where a wrapped key is due: nothing was wrapped")
    return wrapped


def _opened(answer: Any, wrapped: bytes) -> bytes:
    """A key that was wrapped. KeyAccessError for the wrapped key, as the same server has it."""
    key = _bytes(answer)
    if key == wrapped:
        raise KeyAccessError("the KMS client returned the wrapped key where the key is due: nothing was unwrapped")
    return key


def aes_key(plaintext: bytes, key_id: str, more: int = 0) -> bytes:
    """What a KMS has unwrapped, if it has the size of an AES key and `more` bytes; else KeyAccessError.

    key_id: whose plaintext it is, for the error.
    """
    if len(plaintext) - more not in (16, 24, 32):
        raise KeyAccessError(
            f"what the KMS unwrapped for {key_id!r} is no AES key: it has {len(plaintext)} bytes. Another key was "
            "wrapped there, or the KMS answers wrongly"
        )
    return plaintext


# ---------------------------------------------------------------------------------------------------------- finding one


def load_kms(properties: Mapping[str, str]) -> KmsClient:
    """The client that `properties` describe. It has called nobody yet.

    ``encryption.kms-type`` is the name of a provider: ``local``, ``aws``, ``gcp``, ``azure``, ``vault`` or ``pkcs11``.
    ``encryption.kms-impl`` is a class of yours instead: ``module:Class``. The other properties are the provider's; they
    are text. Raises ValueError for both or neither, an unknown type, what the provider misses, or a name that it does
    not know; ImportError if its optional dependency is missing.

    Names that begin with ``encryption.``, ``kms.``, ``vault.`` or ``azure.keyvault.`` must be known, and be the chosen
    provider's. Elsewhere only a near miss of such a name is refused, so the properties of a catalog can be passed as
    they are. A class of yours reads any name outside of ``encryption.``, unless it lists the names that it reads in
    these namespaces in its attribute ``property_names``: then a mistyped one is refused there, too. A listed name that
    ends with a dot stands for all that begin with it.

    ``encryption.allowed-key-ids``: the master keys that may be used, patterns such as ``arn:aws:kms:*:1234:key/*`` with
    commas between them. Without it any id goes to the KMS, also one that a dataset names and that may be somebody
    else's key, if the KMS lets the caller use it: then a whole dataset can be somebody else's, too.

    ``kms.cache-lifetime-seconds`` (3600): how long a process keeps a key that it had unwrapped. After that it asks
    again, and is refused what was revoked meanwhile. 0: nothing is kept.

    ``kms.max-calls-per-second``: how many calls clients of these properties begin in this process, at even distances.

    ``kms.audit-hook``: a function, ``module:function``, that is called as `set_audit_hook` has it, wherever clients of
    these properties are: in the workers of a job, too. If it raises, the caller gets UnaccountedError and no key.
    """
    properties = dict(properties)
    if not all(isinstance(text, str) for pair in properties.items() for text in pair):
        raise TypeError("KMS properties are text, names and values")
    kms_type, kms_impl = properties.get(KMS_TYPE), properties.get(KMS_IMPL)
    if (kms_type is None) == (kms_impl is None):
        raise ValueError(f"set {KMS_TYPE} ({', '.join(PROVIDERS)}) or {KMS_IMPL} (module:Class), one of the two")
    if kms_type is not None and kms_type not in PROVIDERS:
        raise ValueError(f"{KMS_TYPE} is {', '.join(PROVIDERS)}, not {kms_type!r}")
    if ALLOWED in properties and not _patterns(properties[ALLOWED]):
        raise ValueError(f"{ALLOWED} allows no key: leave it out, or name some")
    _rate(properties)
    _lifetime(properties)
    _own_hook(properties.get(AUDIT_HOOK))
    found = find_class(kms_impl or PROVIDERS[kms_type or ""])()
    client = _adapt(found)
    check_names(properties, type(found))
    client.initialize(properties)
    client._properties = properties
    return client


def as_kms(kms: Any) -> KmsClient:
    """A client, as it is or counted if it is an object of yours; or the client that properties describe."""
    if isinstance(kms, KmsClient) or hasattr(kms, "unwrap_key"):
        return _adapt(kms)
    return load_kms(kms)


def _adapt(client: Any) -> KmsClient:
    if isinstance(client, _Adapter):
        return client
    if isinstance(client, KmsClient):
        own = type(client)
        if own.wrap_key is KmsClient.wrap_key and own.unwrap_key is KmsClient.unwrap_key:
            return client
    missing = [name for name in ("wrap_key", "unwrap_key") if not callable(getattr(client, name, None))]
    if missing:
        raise TypeError(f"{type(client).__name__} is no KMS client: it has no {' and no '.join(missing)}")
    adapter = _Adapter(client)
    given = getattr(client, "_properties", None)
    if isinstance(given, dict):
        adapter._properties = dict(given)
    return adapter


def check_travels(client: KmsClient) -> None:
    """TypeError if other processes cannot make the same client from its properties."""
    why = None
    try:
        properties = client.properties
        ours = [name for name in (KMS_IMPL, AUDIT_HOOK) if properties.get(name, "").startswith("__main__:")]
        if ours:
            why = f"{ours[0]} names the main script, which other processes do not have: move it to a module"
        elif _class(made := load_kms(properties)) is not _class(client):
            why = f"its properties make a {_class(made).__name__}: name the class in {KMS_IMPL}"
    except TypeError:
        why = f"no properties are known that make it: name the class in {KMS_IMPL}"
    except (ValueError, ImportError) as error:
        why = str(error)
    if why is not None:
        raise TypeError(
            f"the KMS client {_class(client).__name__} cannot be sent to other processes: {why}. Pass as kms its "
            "properties, or what load_kms makes of them, or do the job in this process: engine=LocalEngine(0)"
        )


def _class(client: Any) -> type:
    return type(client._client if isinstance(client, _Adapter) else client)


def find_class(impl: str, named_by: str = KMS_IMPL) -> Any:
    """The class that a property names as ``module:Class``; ValueError, with the property's name, if there is none."""
    module, colon, name = impl.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{named_by} is module:Class, such as my_company.kms:Client, not {impl!r}")
    try:
        found: Any = importlib.import_module(module)
        _named.add(module.partition(".")[0])
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise  # the module is there, and misses something itself
        raise ValueError(f"{named_by} names the module {module!r}, which is not there") from None
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ValueError(f"{named_by} names {name!r}, which {module!r} does not have")
    return found


_named: set[str] = set()


def named_modules() -> frozenset[str]:
    """The top-level modules in which this process has found what properties name. Its workers need them, too."""
    return frozenset(_named)


def _rate(properties: Mapping[str, str]) -> float | None:
    if RATE not in properties:
        return None
    try:
        per_second = float(properties[RATE])
    except ValueError:
        per_second = 0
    if not 0 < per_second < math.inf:
        raise ValueError(f"{RATE} is a number above 0, such as 50 or 0.5, not {properties[RATE]!r}")
    return per_second


def context_of(properties: Mapping[str, str]) -> dict[str, str]:
    """The encryption context that properties name."""
    return {name[len(CONTEXT) :]: text for name, text in properties.items() if name.startswith(CONTEXT)}


def _lifetime(properties: Mapping[str, str]) -> float:
    text = properties.get(LIFETIME)
    if text is None:
        return CACHE_SECONDS
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ValueError(f"{LIFETIME} is a whole number of seconds from 0 (ask each time), not {text!r}")
    return float(text)


def _patterns(text: str) -> list[str]:
    return [stripped for part in text.split(",") if (stripped := part.strip())]


_shared: dict[tuple[tuple[str, str], ...], KmsClient] = {}
MAX_SHARED = 16


def shared_client(properties: Mapping[str, str]) -> KmsClient:
    """One client for all who bring the same properties to this process, as each of its Spark tasks does."""
    name = tuple(sorted(properties.items()))
    client = _shared.get(name)
    if client is None:
        client = load_kms(dict(name))
        if len(_shared) >= MAX_SHARED:
            _shared.clear()
        client = _shared.setdefault(name, client)
    return client


# ---------------------------------------------------------------------------------------------------------- retries


def with_retries(
    call: Callable[[], T],
    give_up: Callable[[Exception], float | None],
    *,
    attempts: int,
    longest: float = 5.0,
    deadline: float = math.inf,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What `call` returns, tried up to `attempts` times.

    give_up: says of an exception how many seconds to wait before the first retry, or None if none would help. The waits
    double up to `longest` seconds, and each is cut by a random part, so that many processes do not return as one.
    deadline: by time.monotonic(); no try begins after it.
    """
    attempt = 0
    while True:
        try:
            return call()
        except Exception as error:
            attempt += 1
            first_wait = give_up(error)
            if first_wait is None or attempt >= attempts:
                raise
            wait = min(first_wait * 2 ** (attempt - 1), longest) * random.uniform(0.5, 1)
            if time.monotonic() + wait > deadline:
                raise
        sleep(wait)


os.register_at_fork(after_in_child=_after_fork_in_child)
