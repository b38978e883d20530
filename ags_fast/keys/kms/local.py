"""A keystore in one file: versioned master keys, sealed under a passphrase or a key file. No server, no account.

The file is JSON in exactly the bytes that this module writes, `FILE` below:

- ``format`` ("ags-keystore"), ``version`` (1), ``store_id`` (random, hex);
- ``kdf``: how the store key (32 bytes) is derived. ``{"name": "scrypt", "n", "r", "p", "salt"}``: from the passphrase.
  ``{"name": "hmac-sha256", "salt"}``: HMAC(key, "ags-keystore" 00 salt), with the 32 bytes of a key file as key;
- ``check``: nonce and tag of an empty message under the store key, AAD "ags-keystore/check" 00 store_id 00 kdf as
  JSON. A wrong passphrase fails here, a changed file at ``seal``;
- ``body``: JSON text. ``{"keys": {id: {"created_ms", "versions": [{"version", "created_ms", "state", "sealed"}]}}}``,
  where ``sealed`` is nonce, ciphertext and tag of the 32 bytes of the master key, AAD "ags-keystore/key" 00 store_id
  00 version 00 id. A destroyed version has no ``sealed``;
- ``seal``: nonce and tag of an empty message, AAD "ags-keystore/body" 00 store_id 00 body.

Bytes are base64. The algorithm is AES-256-GCM throughout. A wrapped key is 01, the version (4 bytes, little-endian),
nonce, ciphertext, tag, with the key id as AAD. Changes are made under a lock on the file, and replace the whole file.
The keystore cannot detect that an older copy was put in its place: protect the folder like the key.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import threading
import time
import unicodedata
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from ags_fast._core import NONCE_NBYTES, OVERHEAD_NBYTES, Key
from ags_fast._json import check_marks
from ags_fast.ags1 import KeyBytes
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError
from ags_fast.keys.encoding import to_base64, unbase64
from ags_fast.keys.kms.client import KmsClient, check_key_id
from ags_fast.keys.kms.keystore_file import locked, read, replace, unreachable, write_new
from ags_fast.keys.kms.names import BY_PROVIDER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["LocalKms", "create_key", "create_keystore", "destroy_versions", "rotate_key", "set_state", "status"]

PATH = "kms.local.path"
KEY_FILE = "kms.local.key-file"
PASSPHRASE_FILE = "kms.local.passphrase-file"
PASSPHRASE_ENV = "kms.local.passphrase-env"
SECRETS = (KEY_FILE, PASSPHRASE_FILE, PASSPHRASE_ENV)

FORMAT, VERSION = "ags-keystore", 1
FILE = {"format", "version", "store_id", "kdf", "check", "body", "seal"}
STATES = ("enabled", "disabled", "destroyed")
SCRYPT = {"n": 1 << 17, "r": 8, "p": 1}  # 128 MiB and half a second
SCRYPT_MAX_NBYTES = 256 << 20  # a file may not make its reader allocate more
SCRYPT_MIN_N, SCRYPT_MAX_P = 1 << 14, 4
MAX_SECRET_NBYTES = 1 << 16
BLOB_VERSION, BLOB_HEAD = 1, 5
TAKEN = "a file exists there already, and may hold keys that are needed"

T = TypeVar("T")
Secret = tuple[str, bytes]  # "key file" or "passphrase", and its bytes


class LocalKms(KmsClient):
    """Wraps with the master keys of a keystore file.

    Every process that uses the client must be able to read the files: on a cluster, put them on a path that all hosts
    share. The client sees new keys and versions as soon as the host sees the new file.

    Properties:

    - ``kms.local.path``: the keystore file.
    - ``kms.local.key-file``, ``kms.local.passphrase-file`` or ``kms.local.passphrase-env``: where the secret is that
      opens the keystore.
    """

    provider = "local"
    property_names = BY_PROVIDER[provider]
    waits = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._store_key: tuple[dict[str, Any], Key] | None = None
        self._stamp: tuple[int, ...] | None = None
        self._store: _Keystore | None = None

    def initialize(self, properties: Mapping[str, str]) -> None:
        """As `KmsClient` has it."""
        super().initialize(properties)
        _check_properties(properties)

    def close(self) -> None:
        """As `KmsClient` has it."""
        with self._here():
            self._store_key = self._stamp = self._store = None

    def key_version(self, wrapped: bytes) -> str | None:
        """As `KmsClient` has it."""
        return str(_blob_version(wrapped))

    def current_version(self, wrapping_key_id: str) -> str:
        """As `KmsClient` has it."""
        return str(self._current().newest(wrapping_key_id)[0])

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        """As `KmsClient` has it."""
        version, master = self._current().newest(wrapping_key_id)
        nonce = os.urandom(NONCE_NBYTES)
        head = bytes([BLOB_VERSION]) + version.to_bytes(4, "little")
        return head + nonce + master.seal(nonce, key, wrapping_key_id.encode())

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        """As `KmsClient` has it."""
        version = _blob_version(wrapped)
        master = self._current().master(wrapping_key_id, version)
        nonce, sealed = wrapped[BLOB_HEAD : BLOB_HEAD + NONCE_NBYTES], wrapped[BLOB_HEAD + NONCE_NBYTES :]
        try:
            return master.open(nonce, sealed, wrapping_key_id.encode())
        except IntegrityError:
            raise IntegrityError(
                f"the wrapped key is not what version {version} of the local key {wrapping_key_id!r} wrapped: its "
                "bytes were changed, or another key or keystore wrapped it"
            ) from None

    def _current(self) -> _Keystore:
        """Return the keystore as the file has it now. Its master keys are opened at their first use."""
        with self._here():
            path = self.properties[PATH]
            try:
                stamp = _stamp(os.stat(path))
                if self._store is None or stamp != self._stamp:
                    outer = _parse(read(path), path)
                    header = {name: outer[name] for name in ("store_id", "kdf", "check")}
                    if self._store_key is None or self._store_key[0] != header:  # half a second, once
                        self._store_key = header, _store_key(outer, _secret(self.properties), path)
                    self._store = _Keystore(path, outer, self._store_key[1])
                    self._stamp = stamp
            except OSError as error:
                raise unreachable(path, error) from None
            return self._store

    @contextmanager
    def _here(self) -> Iterator[None]:
        if self._pid != os.getpid():  # forked, maybe while another thread held the lock
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            yield


def _check_properties(properties: Mapping[str, str]) -> None:
    if not properties.get(PATH):
        raise ValueError(f"set {PATH}: the keystore file that `ags-fast keys init` made")
    given = [name for name in SECRETS if properties.get(name)]
    if len(given) != 1:
        raise ValueError(f"set one of {', '.join(SECRETS)}: what opens the keystore")


def _blob_version(wrapped: bytes) -> int:
    if len(wrapped) < BLOB_HEAD + OVERHEAD_NBYTES + 1 or wrapped[0] != BLOB_VERSION:
        raise FormatError(f"these {len(wrapped)} bytes are not a key wrapped by the local KMS")
    return int.from_bytes(wrapped[1:BLOB_HEAD], "little")


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _secret(properties: Mapping[str, str]) -> Secret:
    """Return the secret that opens the keystore. A KeyAccessError names the place of the secret, never its bytes."""
    _check_properties(properties)
    if name := properties.get(PASSPHRASE_ENV):
        text = os.environ.get(name)
        if not text:
            raise KeyAccessError(f"the environment variable {name} with the keystore's passphrase is not set")
        return "passphrase", _passphrase(os.fsencode(text))
    origin = KEY_FILE if properties.get(KEY_FILE) else PASSPHRASE_FILE
    path = properties[origin]
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SECRET_NBYTES + 1)
    except OSError as error:
        raise KeyAccessError(
            f"{path} of {origin} cannot be read here: {error.strerror}. Every process that needs a key reads this file"
        ) from None
    if origin == PASSPHRASE_FILE:
        return "passphrase", _passphrase(data.rstrip(b"\r\n"))
    return "key file", KeyBytes(_key_of_file(data, path))


def _passphrase(data: bytes) -> bytes:
    if not data or len(data) > MAX_SECRET_NBYTES:
        raise KeyAccessError("the keystore's passphrase is empty or longer than a passphrase can be")
    try:  # Unicode has two spellings of an accented letter; keyboards of different systems make different ones
        return KeyBytes(unicodedata.normalize("NFC", data.decode()).encode())
    except UnicodeDecodeError:
        return KeyBytes(data)


def _key_of_file(data: bytes, path: str) -> bytes:
    text = data.strip()
    if len(data) == 32:
        return data
    if re.fullmatch(rb"[0-9A-Fa-f]{64}", text):
        return bytes.fromhex(text.decode())
    if re.fullmatch(rb"[A-Za-z0-9+/]{43}=", text):
        return base64.b64decode(text)
    raise KeyAccessError(f"{path} is not a key file of a keystore: 32 bytes, raw, in hex or in base64")


def _store_key(outer: dict[str, Any], secret: Secret, path: str) -> Key:
    kind, value = secret
    kdf = outer["kdf"]
    if kind != ("passphrase" if kdf["name"] == "scrypt" else "key file"):
        raise KeyAccessError(f"a {kind} does not open the keystore {path}: it was made with another kind of secret")
    key = _derive(kdf, value)
    nonce, tag = _split(outer["check"])
    try:
        key.open(nonce, tag, _check_aad(outer["store_id"], kdf))
    except IntegrityError:
        raise KeyAccessError(
            f"the {kind} does not open the keystore {path}: it belongs to another keystore, or the file's header was "
            "changed"
        ) from None
    return key


def _derive(kdf: dict[str, Any], secret: bytes) -> Key:
    salt = unbase64(kdf["salt"])
    if kdf["name"] == "scrypt":
        n, r, p = kdf["n"], kdf["r"], kdf["p"]
        return Key(hashlib.scrypt(secret, salt=salt, n=n, r=r, p=p, maxmem=128 * r * (n + p + 2) + (1 << 20), dklen=32))
    return Key(hmac.digest(secret, FORMAT.encode() + b"\0" + salt, "sha256"))


def _check_aad(store_id: str, kdf: dict[str, Any]) -> bytes:
    return _aad("check", store_id, _dumps(kdf))


def _aad(purpose: str, *parts: str) -> bytes:
    return "\0".join((f"{FORMAT}/{purpose}", *parts)).encode()


class _Keystore:
    def __init__(self, path: str, outer: dict[str, Any], store_key: Key) -> None:
        self._path, self._outer, self._store_key = path, outer, store_key
        nonce, tag = _split(outer["seal"])
        try:
            store_key.open(nonce, tag, _aad("body", outer["store_id"], outer["body"]))
        except IntegrityError:
            raise IntegrityError(f"the bytes of the keystore {path} were changed") from None
        self.keys: dict[str, dict[str, Any]] = json.loads(outer["body"])["keys"]
        self._open: dict[tuple[str, int], Key] = {}

    def newest(self, key_id: str) -> tuple[int, Key]:
        for version in reversed(self.versions_of(key_id)):
            if version["state"] == "enabled":
                return version["version"], self.master(key_id, version["version"])
        raise KeyAccessError(
            f"the local key {key_id!r} has no enabled version: enable one, or rotate it to make a new one"
        )

    def master(self, key_id: str, number: int) -> Key:
        versions = self.versions_of(key_id)
        version = next((v for v in versions if v["version"] == number), None)
        if version is None:
            raise KeyAccessError(
                f"the local key {key_id!r} has no version {number}, only "
                f"{', '.join(str(v['version']) for v in versions)}: "
                f"another keystore than {self._path} wrapped it"
            )
        if version["state"] == "disabled":
            raise KeyAccessError(f"version {number} of the local key {key_id!r} is disabled: enable it to use it")
        if version["state"] == "destroyed":
            raise KeyAccessError(
                f"version {number} of the local key {key_id!r} was destroyed: keys that only it wrapped are lost, "
                "unless a backup of the keystore still has this version"
            )
        master = self._open.get((key_id, number))
        if master is None:
            nonce, sealed = _split(version["sealed"])
            master = Key(self._store_key.open(nonce, sealed, self._master_aad(key_id, number)))
            self._open[key_id, number] = master
        return master

    def versions_of(self, key_id: str) -> list[dict[str, Any]]:
        if key_id not in self.keys:
            raise KeyAccessError(
                f"the keystore {self._path} has no key {key_id!r}: `ags-fast keys create` makes it, `ags-fast keys "
                "list` shows the keys"
            )
        return self.keys[key_id]["versions"]  # type: ignore[no-any-return]

    def _master_aad(self, key_id: str, number: int) -> bytes:
        return _aad("key", self._outer["store_id"], str(number), key_id)

    # Changes. They are only in memory until the result of `encode` is written.

    def add_version(self, key_id: str, *, first: bool) -> int:
        now_ms = time.time_ns() // 1_000_000
        if not first:
            self.versions_of(key_id)
        elif key_id in self.keys:
            raise ValueError(f"the keystore has a key {key_id!r} already")
        versions = self.keys.setdefault(key_id, {"created_ms": now_ms, "versions": []})["versions"]
        number = versions[-1]["version"] + 1 if versions else 1
        if number >> 32:
            raise ValueError(f"the local key {key_id!r} has the largest possible number of versions")
        sealed = _seal(self._store_key, secrets.token_bytes(32), self._master_aad(key_id, number))
        versions.append({"version": number, "created_ms": now_ms, "state": "enabled", "sealed": sealed})
        return number

    def set_state(self, key_id: str, number: int | None, state: str) -> None:
        """Set the state of one version, or of all versions that are not destroyed."""
        versions = self.versions_of(key_id)
        if number is not None and all(v["version"] != number for v in versions):
            raise KeyAccessError(f"the local key {key_id!r} has no version {number}")
        for version in versions:
            if (number is None and version["state"] != "destroyed") or number == version["version"]:
                if version["state"] == "destroyed" != state:
                    raise KeyAccessError(
                        f"version {number} of the local key {key_id!r} was destroyed: it is gone for good"
                    )
                version["state"] = state
                if state == "destroyed":
                    version.pop("sealed", None)

    def destroy(self, key_id: str, numbers: Sequence[int]) -> list[int]:
        """Destroy versions. Returns those that were not destroyed before."""
        versions = self.versions_of(key_id)
        wrapping = max((v["version"] for v in versions if v["state"] == "enabled"), default=None)
        for number in numbers:
            if number in (wrapping, versions[-1]["version"]):
                what = "wraps now" if number == wrapping else "is the newest one"
                raise ValueError(
                    f"version {number} of the local key {key_id!r} {what}, so it stays, and nothing was destroyed: "
                    "`ags-fast keys create --new-version` makes a newer one"
                )
        left = {v["version"] for v in versions if v["state"] != "destroyed"}
        for number in numbers:
            self.set_state(key_id, number, "destroyed")
        return sorted(left.intersection(numbers))

    def encode(self) -> bytes:
        return _encode(self._outer, {"keys": self.keys}, self._store_key)


def _encode(outer: dict[str, Any], body: dict[str, Any], store_key: Key) -> bytes:
    text = _dumps(body)
    seal = _seal(store_key, b"", _aad("body", outer["store_id"], text))
    return _dumps({**outer, "body": text, "seal": seal}).encode() + b"\n"


def _seal(key: Key, data: bytes, aad: bytes) -> str:
    nonce = os.urandom(NONCE_NBYTES)
    return to_base64(nonce + key.seal(nonce, data, aad))


def _split(text: str) -> tuple[bytes, bytes]:
    data = unbase64(text)
    return data[:NONCE_NBYTES], data[NONCE_NBYTES:]


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _parse(data: bytes, path: str) -> dict[str, Any]:
    check_marks(data, path)
    try:
        outer = json.loads(data)
        if not isinstance(outer, dict) or outer.get("format") != FORMAT:
            raise ValueError("another format")
        if outer.get("version") != VERSION:
            raise FormatError(f"the keystore {path} has version {outer.get('version')!r}; only {VERSION} is known")
        if outer.keys() != FILE or _dumps(outer).encode() + b"\n" != data:
            raise ValueError("other bytes than a keystore has")
        if not all(isinstance(outer[name], str) for name in ("store_id", "check", "body", "seal")):
            raise ValueError("a field of another type")
        if any(len(unbase64(outer[name])) != OVERHEAD_NBYTES for name in ("check", "seal")):
            raise ValueError("a tag of another size")
        _check_kdf(outer["kdf"])
    except FormatError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, MemoryError, binascii.Error) as error:
        # Name the class only: the parser's message may quote the file.
        raise FormatError(f"{path} is not a keystore of ags_fast, or was damaged ({type(error).__name__})") from None
    return outer


def _check_kdf(kdf: Any) -> None:
    if not isinstance(kdf, dict) or not 16 <= len(unbase64(kdf["salt"])) <= 64:
        raise ValueError("no salt")
    if kdf["name"] == "hmac-sha256" and kdf.keys() == {"name", "salt"}:
        return
    if kdf["name"] != "scrypt" or kdf.keys() != {"name", "n", "r", "p", "salt"}:
        raise ValueError("no such derivation")
    n, r, p = kdf["n"], kdf["r"], kdf["p"]
    if any(type(number) is not int for number in (n, r, p)) or r < 1 or p < 1:
        raise ValueError("no numbers")
    if n < SCRYPT_MIN_N or n & (n - 1) or 128 * n * r > SCRYPT_MAX_NBYTES or p > SCRYPT_MAX_P:
        raise FormatError(
            f"the keystore asks for scrypt with N={n}, r={r}, p={p}; N is a power of 2 from {SCRYPT_MIN_N}, and "
            f"128*N*r is at most {SCRYPT_MAX_NBYTES} bytes"
        )


def create_keystore(properties: Mapping[str, str], *, passphrase: str | None = None) -> None:
    """Make an empty keystore at ``kms.local.path``.

    Args:
        properties: As LocalKms takes them. If ``kms.local.key-file`` does not exist, it is made, with a new key.
        passphrase: Used instead of the property that names one.

    Raises:
        FileExistsError: There is a file at the path.
        ValueError: A property is missing.
    """
    path = properties.get(PATH)
    if not path:
        raise ValueError(f"set {PATH}: the path of the new keystore")
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, TAKEN, path)
    key_file = properties.get(KEY_FILE)
    if key_file and passphrase is None and not os.path.lexists(key_file):
        write_new(key_file, secrets.token_bytes(32))
    kind, value = _given(properties, passphrase)
    salt = to_base64(os.urandom(32))
    kdf = {"name": "scrypt", **SCRYPT, "salt": salt} if kind == "passphrase" else {"name": "hmac-sha256", "salt": salt}
    store_key = _derive(kdf, value)
    outer: dict[str, Any] = {"format": FORMAT, "version": VERSION, "store_id": os.urandom(16).hex(), "kdf": kdf}
    outer["check"] = _seal(store_key, b"", _check_aad(outer["store_id"], kdf))
    write_new(path, _encode(outer, {"keys": {}}, store_key))


def create_key(properties: Mapping[str, str], key_id: str, *, passphrase: str | None = None) -> int:
    """Make a master key, and return its version, 1. `properties` and `passphrase` are as for `create_keystore`.

    Raises:
        ValueError: The keystore has a key of that id.
    """
    check_key_id(key_id)
    return _change(properties, passphrase, lambda store: store.add_version(key_id, first=True))


def rotate_key(properties: Mapping[str, str], key_id: str, *, passphrase: str | None = None) -> int:
    """Make a new version of a master key, and return its number.

    The new version wraps from now on; the older ones still unwrap. The arguments are those of `create_key`.
    """
    return _change(properties, passphrase, lambda store: store.add_version(key_id, first=False))


def set_state(
    properties: Mapping[str, str], key_id: str, state: str, *, version: int | None = None, passphrase: str | None = None
) -> None:
    """Make a version of a master key, or all versions with None, ``enabled``, ``disabled`` or ``destroyed``.

    A destroyed version is deleted from the file for good, and keys that only it wrapped are lost. Copies of the file
    and the disk below may still have the version. The other arguments are those of `create_key`.

    Raises:
        ValueError: There is no such state.
        KeyAccessError: The key or version does not exist, or was destroyed.
    """
    if state not in STATES:
        raise ValueError(f"a state is {', '.join(STATES)}, not {state!r}")
    _change(properties, passphrase, lambda store: store.set_state(key_id, version, state))


def destroy_versions(
    properties: Mapping[str, str],
    key_id: str,
    versions: Sequence[int],
    *,
    dry_run: bool = False,
    passphrase: str | None = None,
) -> list[int]:
    """Destroy old versions of a master key in one change, and return those that were not destroyed before.

    Nothing is asked about what they wrapped: `ags_fast.jobs.destroy_versions` looks at datasets first. As for
    `set_state`, a destroyed version is deleted from the file for good.

    Args:
        properties: As for `create_keystore`.
        key_id: The master key.
        versions: The numbers of the versions.
        dry_run: Change nothing.
        passphrase: As for `create_keystore`.

    Raises:
        ValueError: One of the versions wraps now, or is the newest one. Nothing was destroyed.
        KeyAccessError: The key or a version does not exist. Nothing was destroyed.
    """
    if dry_run:
        store, _ = _load(properties.get(PATH) or "", properties, passphrase)
        return store.destroy(key_id, versions)
    return _change(properties, passphrase, lambda store: store.destroy(key_id, versions))


def status(properties: Mapping[str, str], *, passphrase: str | None = None) -> dict[str, Any]:
    """Return what the keystore holds, without key bytes. The arguments are those of `create_keystore`.

    Returns:
        ``path``, ``store_id``, ``kdf`` and ``keys``: for each key ``key_id``, ``created_ms``, ``current_version`` and
        its ``versions`` (``version``, ``created_ms``, ``state``). Times are milliseconds since the epoch.
    """
    path = properties.get(PATH) or ""
    store, outer = _load(path, properties, passphrase)
    keys = [
        {
            "key_id": key_id,
            "created_ms": key["created_ms"],
            "current_version": max((v["version"] for v in key["versions"] if v["state"] == "enabled"), default=None),
            "versions": [{name: v[name] for name in ("version", "created_ms", "state")} for v in key["versions"]],
        }
        for key_id, key in store.keys.items()
    ]
    kdf = {name: value for name, value in outer["kdf"].items() if name != "salt"}
    return {"path": path, "store_id": outer["store_id"], "kdf": kdf, "keys": keys}


def _given(properties: Mapping[str, str], passphrase: str | None) -> Secret:
    if passphrase is None:
        return _secret(properties)
    return "passphrase", _passphrase(passphrase.encode("utf-8", "surrogateescape"))


def _load(path: str, properties: Mapping[str, str], passphrase: str | None) -> tuple[_Keystore, dict[str, Any]]:
    try:
        outer = _parse(read(path), path)
    except OSError as error:
        raise unreachable(path, error) from None
    return _Keystore(path, outer, _store_key(outer, _given(properties, passphrase), path)), outer


def _change(properties: Mapping[str, str], passphrase: str | None, change: Callable[[_Keystore], T]) -> T:
    path = os.path.realpath(properties.get(PATH) or "")
    with locked(path):
        store, _ = _load(path, properties, passphrase)
        result = change(store)
        replace(path, store.encode())
    return result
