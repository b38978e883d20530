"""Keystores and KMS clients for the tests, some of them as users write them. Children import it as `kms_clients`."""

from __future__ import annotations

import base64
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ags_fast.keys import KmsClient, kms_calls
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from typing_extensions import Buffer


CANARY = b"canary-key-16-by"


def forms_of(secret: bytes) -> set[str]:
    """How a secret may look in text."""
    return {secret.decode(), secret.hex(), base64.b64encode(secret).decode().rstrip("="), repr(list(secret))[1:-1]}


def calls_of(action: Callable[[], Any]) -> dict[tuple[str, str], int]:
    """The KMS calls of an action."""
    before = kms_calls()
    action()
    return dict(kms_calls() - before)


class Clock:
    """A clock that advances only by sleeps; a `still` clock never advances."""

    time_ns = staticmethod(time.time_ns)  # so that it can stand for the module
    perf_counter = staticmethod(time.perf_counter)

    def __init__(self, *, still: bool = False) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self._still = still

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += 0 if self._still else seconds


def keystore(folder: Path, *key_ids: str, name: str = "keystore") -> dict[str, str]:
    """A keystore under a key file, with these master keys; the properties of its client."""
    properties = {
        "encryption.kms-type": "local",
        "kms.local.path": str(folder / name),
        "kms.local.key-file": str(folder / f"{name}.key"),
    }
    local.create_keystore(properties)
    for key_id in key_ids:
        local.create_key(properties, key_id)
    return properties


class Plain(KmsClient):
    """The two methods that a client must have. Its wrapping does not encrypt."""

    provider = "plain"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        self.calls.append("wrap")
        return wrapping_key_id.encode() + b":" + bytes(byte ^ 0x55 for byte in key)

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        self.calls.append("unwrap")
        return bytes(byte ^ 0x55 for byte in wrapped.partition(b":")[2])


class Overriding(Plain):
    """A client with public methods of its own, which count nothing, and private settings."""

    provider = "overriding"

    def initialize(self, properties: Mapping[str, str]) -> None:
        self.initialized_with = properties

    def wrap_key(self, key: Buffer, wrapping_key_id: str) -> bytes:
        return super().wrap_key(bytes(key), wrapping_key_id)

    def unwrap_key(self, wrapped: Buffer, wrapping_key_id: str) -> bytes:
        return super().unwrap_key(bytes(wrapped), wrapping_key_id)


class Echo(KmsClient):
    """A client whose public methods return their arguments."""

    def wrap_key(self, key: Buffer, wrapping_key_id: str) -> bytes:
        return bytes(key)

    def unwrap_key(self, wrapped: Buffer, wrapping_key_id: str) -> bytes:
        return bytes(wrapped)


class Duck:
    """A client that is not derived from KmsClient, some of whose names are used there, too."""

    waits = False
    properties: Any = None

    def initialize(self, properties: Mapping[str, str]) -> None:
        self.properties, self._properties, self.identity = properties, "mine", b"mine"

    def _check(self, wrapping_key_id: str) -> None:
        raise AssertionError

    _account = _carry_out = _check

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        return key[::-1]

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return wrapped[::-1]

    def rewrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return self.wrap_key(self.unwrap_key(wrapped, wrapping_key_id), wrapping_key_id)


class Proper(KmsClient):
    """The client of the documentation."""

    provider = "proper"

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        return b"wrapped:" + key[::-1]

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return wrapped[8:][::-1]

    def generate_key(self, wrapping_key_id: str, length: int) -> tuple[bytes, bytes]:
        key = bytes(range(length))
        return key, self.wrap_key(key, wrapping_key_id)


class Listing(Proper):
    """Reads properties whose names begin like those of ags_fast."""

    property_names = ("kms.endpoint", "kms.listing.headers.")


class Able(Plain):
    """Does everything that a client can do."""

    provider = "able"

    def generate_key(self, wrapping_key_id: str, length: int) -> tuple[bytes, bytes]:
        return bytes(length), self.wrap_key(bytes(length), wrapping_key_id)

    def rewrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return wrapped + b"!"

    def key_version(self, wrapped: bytes) -> str:
        return "7"

    def current_version(self, wrapping_key_id: str) -> str:
        return "8"

    def close(self) -> None:
        self.calls.append("close")


class Leaky(Plain):
    """Fails with the key in its message."""

    provider = "leaky"

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        raise RuntimeError(f"cannot wrap {key.hex()}")

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> Any:
        return wrapped.hex()

    def current_version(self, wrapping_key_id: str) -> str:
        raise RuntimeError("canary-key-16-by")


class Starved(Plain):
    """Has no memory left."""

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        raise MemoryError


class VaultCredential:
    """For the fake of Azure Key Vault: a credential whose token it knows, or what ``.token`` says."""

    def initialize(self, properties: dict[str, str]) -> None:
        self.token = properties["token"]

    def credential(self) -> VaultCredential:
        return self

    def get_token(self, *scopes: str, **_: Any) -> Any:
        from azure.core.credentials import AccessToken

        assert scopes == ("https://vault.azure.net/.default",)
        return AccessToken(self.token, int(time.time()) + 3600)


class Counting(local.LocalKms):
    """Writes each process that unwraps a key, and the master key, to a file."""

    def unwrap_key(self, wrapped: bytes, key_id: str) -> bytes:
        with open(self.properties["log"], "a") as log:
            print(os.getpid(), key_id, file=log)
        return super().unwrap_key(wrapped, key_id)


class Poison(local.LocalKms):
    """Kills a process that unwraps the N-th wrapped data key, N in `poison`: 24 bytes, and 32 of binding."""

    wrapped = 0

    def wrap_key(self, key: bytes, key_id: str) -> bytes:
        made = super().wrap_key(key, key_id)
        if len(key) != 56:
            return b"o" + made
        Poison.wrapped += 1
        return (b"p" if str(Poison.wrapped - 1) in self.properties["poison"].split() else b"o") + made

    def unwrap_key(self, wrapped: bytes, key_id: str) -> bytes:
        if wrapped[:1] == b"p" and os.path.exists(self.properties["armed"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().unwrap_key(wrapped[1:], key_id)


class UnitestKms(Plain):
    """As the KMS of Iceberg's own tests wraps: nonce, AES-GCM without AAD, tag."""

    provider = "unitest"

    def __init__(self, **masters: bytes) -> None:
        super().__init__()
        self.masters = masters or {"keyA": b"0123456789012345", "keyB": b"1123456789012345"}

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        self.calls.append("wrap")
        nonce = os.urandom(12)
        return nonce + AESGCM(self.masters[wrapping_key_id]).encrypt(nonce, key, None)

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        self.calls.append("unwrap")
        return AESGCM(self.masters[wrapping_key_id]).decrypt(wrapped[:12], wrapped[12:], None)
