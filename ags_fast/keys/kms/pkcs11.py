"""A hardware security module, or anything else behind a PKCS#11 library: AES keys that cannot leave the device.

All AES keys with the same label (CKA_LABEL, the key id) are one master key. Each is a version, and its CKA_ID, read as
a big-endian number, is the version's number. The highest version that may encrypt wraps. CKA_ENCRYPT and CKA_DECRYPT
false disable a version. Deleting the object destroys the version.

A wrapped key is 01, the length of CKA_ID (1 byte), CKA_ID, nonce (12), ciphertext, tag (16): AES-GCM, with everything
before the nonce and the key id (UTF-8) as AAD.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from ags_fast._core import NONCE_NBYTES, OVERHEAD_NBYTES
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError
from ags_fast.keys.kms.client import KmsClient
from ags_fast.keys.kms.names import BY_PROVIDER
from ags_fast.keys.kms.service import BUSY, ServiceKms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pkcs11 import Session
    from pkcs11._pkcs11 import lib

__all__ = ["Pkcs11Kms"]

LIBRARY = "kms.pkcs11.library"
TOKEN = "kms.pkcs11.token-label"
PIN_FILE = "kms.pkcs11.pin-file"
PIN_ENV = "kms.pkcs11.pin-env"
PINS = f"name a file in {PIN_FILE}, or an environment variable in {PIN_ENV}"
BLOB_VERSION = 1
MAX_ID_NBYTES = 64
TAG_BITS = 128

# After these errors a new session may work: the device was restarted or changed, or other code of this process has
# logged out.
SESSION_LOST = (
    "DeviceError",
    "DeviceRemoved",
    "ObjectHandleInvalid",
    "KeyHandleInvalid",
    "SessionClosed",
    "SessionHandleInvalid",
    "TokenNotPresent",
    "UserNotLoggedIn",
)
NOT_DECRYPTED = ("EncryptedDataInvalid", "EncryptedDataLenRange", "DataInvalid", "GeneralError", "FunctionFailed")

T = TypeVar("T")


class Pkcs11Kms(ServiceKms["_Token"]):
    """Wraps keys by AES-GCM with keys of a PKCS#11 token. Key ids are labels of keys.

    A library makes one call at a time in a process, and no time limit applies to a call. A fork waits until the call
    ends. A PIN that was refused is not tried again, because after some attempts the token would lock itself.

    Properties:

    - ``kms.pkcs11.library``: the path of the vendor's library.
    - ``kms.pkcs11.token-label``: the label of the token.
    - ``kms.pkcs11.pin-file`` or ``kms.pkcs11.pin-env``: where the PIN is.
    - ``kms.max-attempts`` (8): attempts per call while the session is lost.
    """

    provider = "pkcs11"
    property_names = BY_PROVIDER[provider]
    packages = ("pkcs11",)
    secret_properties = {"kms.pkcs11.pin": PINS}  # noqa: RUF012, of the base class

    # In the caller's thread: a library that is abandoned in the middle of a call cannot be used again.
    _carry_out = KmsClient._carry_out  # noqa: SLF001
    _blamed = KmsClient._blamed  # noqa: SLF001

    def initialize(self, properties: Mapping[str, str]) -> None:
        """As `KmsClient` has it."""
        for name in (LIBRARY, TOKEN):
            if not properties.get(name):
                raise ValueError(f"set {LIBRARY} (the vendor's library) and {TOKEN}")
        if bool(properties.get(PIN_FILE)) == bool(properties.get(PIN_ENV)):
            raise ValueError(f"set one of {PIN_FILE} and {PIN_ENV}: where the token's PIN is")
        super().initialize(properties)

    def key_version(self, wrapped: bytes) -> str | None:
        """As `KmsClient` has it."""
        return _split(wrapped)[0].hex()

    def current_version(self, wrapping_key_id: str) -> str:
        """As `KmsClient` has it."""
        return self._with(wrapping_key_id, lambda session: self._newest(session, wrapping_key_id)[0].hex())

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        """As `KmsClient` has it."""
        return self._with(wrapping_key_id, lambda session: self._sealed(session, key, wrapping_key_id))

    def generate_key(self, wrapping_key_id: str, length: int) -> tuple[bytes, bytes]:
        """As `KmsClient` has it."""

        def drawn(session: Session) -> tuple[bytes, bytes]:
            key = session.generate_random(8 * length)
            return key, self._sealed(session, key, wrapping_key_id)

        return self._with(wrapping_key_id, drawn)

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        """As `KmsClient` has it."""
        number, head, nonce, sealed = _split(wrapped)

        def opened(session: Session) -> bytes:
            from pkcs11 import Attribute, GCMParams, Mechanism, PKCS11Error

            versions = self._versions(session, wrapping_key_id)
            master = next((one for one_number, one in versions if one_number == number), None)
            if master is None:
                known = ", ".join(one_number.hex() for one_number, _ in versions)
                raise self._refusal(
                    "to unwrap",
                    f"{wrapping_key_id!r}, version {number.hex()}",
                    "no such version",
                    f"it was destroyed, or is in another token: restore it, or name that token. Versions here: {known}",
                )
            if not master[Attribute.DECRYPT]:
                raise self._refusal(
                    "to unwrap",
                    f"{wrapping_key_id!r}, version {number.hex()}",
                    "disabled",
                    "set its CKA_DECRYPT to use it",
                )
            params = GCMParams(nonce, head + wrapping_key_id.encode(), TAG_BITS)
            try:
                return bytes(master.decrypt(sealed, mechanism=Mechanism.AES_GCM, mechanism_param=params))
            except PKCS11Error as error:
                if type(error).__name__ not in NOT_DECRYPTED or not _works(master):
                    raise
            raise IntegrityError(
                f"a wrapped key is not what version {number.hex()} of the PKCS#11 key {wrapping_key_id!r} wrapped: its "
                "bytes were changed, or another key wrapped it"
            )

        return self._with(wrapping_key_id, opened)

    def _sealed(self, session: Session, key: bytes, key_id: str) -> bytes:
        from pkcs11 import GCMParams, Mechanism

        number, master = self._newest(session, key_id)
        head, nonce = bytes([BLOB_VERSION, len(number)]) + number, os.urandom(NONCE_NBYTES)
        params = GCMParams(nonce, head + key_id.encode(), TAG_BITS)
        return head + nonce + bytes(master.encrypt(key, mechanism=Mechanism.AES_GCM, mechanism_param=params))

    def _newest(self, session: Session, key_id: str) -> tuple[bytes, Any]:
        from pkcs11 import Attribute

        for number, master in self._versions(session, key_id):
            if master[Attribute.ENCRYPT]:
                return number, master
        raise self._refusal(
            "to wrap", repr(key_id), "disabled", "no version may encrypt: make a new one, or set CKA_ENCRYPT of one"
        )

    def _versions(self, session: Session, key_id: str) -> list[tuple[bytes, Any]]:
        """Return the AES keys of this label with their CKA_ID, highest first."""
        from pkcs11 import Attribute, KeyType, ObjectClass

        asked = {Attribute.CLASS: ObjectClass.SECRET_KEY, Attribute.KEY_TYPE: KeyType.AES, Attribute.LABEL: key_id}
        found = [(bytes(one[Attribute.ID]), one) for one in session.get_objects(asked)]
        if not found:
            raise _NoKeyError
        for number, _ in found:
            if not 1 <= len(number) <= MAX_ID_NBYTES:
                raise self._refusal(
                    "to work", repr(key_id), "CKA_ID", f"a version has an id of 1 to {MAX_ID_NBYTES} bytes: set it"
                )
        if len({number for number, _ in found}) < len(found):
            raise self._refusal("to work", repr(key_id), "CKA_ID", "two versions have the same id: change one")
        return sorted(found, key=lambda pair: (int.from_bytes(pair[0], "big"), pair[0]), reverse=True)

    def _with(self, key_id: str, work: Callable[[Session], T]) -> T:
        from pkcs11 import PKCS11Error

        token = self._connected()
        looked_again = False

        def once() -> T:
            nonlocal looked_again
            with token.session(self._pin) as session:
                try:
                    return work(session)
                except _NoKeyError:
                    # It looks the same after other code of this process has logged out.
                    again, looked_again = not looked_again, True
                    if again:
                        token.forget()
                        raise _LoggedOutError from None
                    raise
                except PKCS11Error as error:
                    if type(error).__name__ in SESSION_LOST:
                        token.forget()
                    raise

        try:
            return self._ask(once)
        except _NoKeyError:
            raise self._refusal(
                "to work",
                repr(key_id),
                "no such key",
                f"the token {self.properties[TOKEN]!r} has no AES key of this label",
            ) from None
        except PKCS11Error as error:
            raise self._refusal(
                "to work",
                repr(key_id),
                type(error).__name__,
                f"check {LIBRARY}, {TOKEN}, and that the key may do AES-GCM with a nonce of the caller's",
            ) from None

    def _pin(self) -> str:
        name = self.properties.get(PIN_FILE) or self.properties[PIN_ENV]
        try:
            if self.properties.get(PIN_FILE):
                with open(name, encoding="utf-8") as file:
                    pin = file.read(4096).rstrip("\r\n")
            else:
                pin = os.environ.get(name, "")
        except (OSError, ValueError) as error:
            raise KeyAccessError(
                f"the PIN of the KMS pkcs11 cannot be read here ({type(error).__name__}): {name}"
            ) from None
        if not pin:
            raise KeyAccessError(f"the KMS pkcs11 needs the token's PIN, and there is none in {name}")
        return pin

    def _connect(self) -> _Token:
        return _token(self.properties[LIBRARY], self.properties[TOKEN])

    def _trouble(self, error: Exception) -> str | None:
        lost = isinstance(error, _LoggedOutError) or type(error).__name__ in SESSION_LOST
        return BUSY if lost else None


class _NoKeyError(Exception):
    pass


class _LoggedOutError(Exception):
    pass


def _split(wrapped: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    size = wrapped[1] if len(wrapped) > 1 and wrapped[0] == BLOB_VERSION else 0
    head = 2 + size
    if not 1 <= size <= MAX_ID_NBYTES or len(wrapped) < head + OVERHEAD_NBYTES + 1:
        raise FormatError(f"these {len(wrapped)} bytes are not a key wrapped by the KMS pkcs11")
    return wrapped[2:head], wrapped[:head], wrapped[head : head + NONCE_NBYTES], wrapped[head + NONCE_NBYTES :]


def _works(master: Any) -> bool:
    """Whether a key opens what it sealed. Some libraries report a wrong tag only as a general failure."""
    from pkcs11 import Attribute, GCMParams, Mechanism, PKCS11Error

    if not master[Attribute.ENCRYPT]:
        return True  # this cannot be tested; but the device has just found the key and read its attributes
    params = GCMParams(os.urandom(NONCE_NBYTES), b"", TAG_BITS)
    try:
        sealed = master.encrypt(b"works", mechanism=Mechanism.AES_GCM, mechanism_param=params)
        return bytes(master.decrypt(sealed, mechanism=Mechanism.AES_GCM, mechanism_param=params)) == b"works"
    except PKCS11Error:
        return False


# ---------------------------------------------------------------------------------------------------------- sessions
# A process logs in to a token once for all its sessions, and closing one session logs all sessions out. So all clients
# share one session for each token until the process ends. The package initializes a library for calls of one thread
# only, so each library has one lock.


class _Token:
    def __init__(self, library: _Library, label: str) -> None:
        self._library, self._label = library, label
        self._session: Session | None = None
        self._refused: bytes | None = None  # the hash of a PIN

    @contextlib.contextmanager
    def session(self, pin: Callable[[], str]) -> Iterator[Session]:
        with self._library.lock:
            if self._session is None:
                self._session = self._open(pin())
            yield self._session

    def forget(self) -> None:
        """Close the session, which logs out, so that the next one logs in. Call this in a session."""
        from pkcs11 import PKCS11Error

        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(PKCS11Error):
                session.close()

    def _open(self, pin: str) -> Session:
        from pkcs11 import NoSuchToken, PKCS11Error
        from pkcs11.exceptions import PinIncorrect, UserAlreadyLoggedIn

        digest = hashlib.sha256(pin.encode()).digest()
        if digest == self._refused:
            raise _wrong_pin(self._label, "it was refused before, and is not tried again")
        try:
            token = self._library.loaded().get_token(token_label=self._label)
            try:
                return token.open(user_pin=pin)
            except UserAlreadyLoggedIn:
                return token.open()
        except PinIncorrect:
            self._refused = digest
            raise _wrong_pin(self._label, "it was refused") from None
        except NoSuchToken:
            raise KeyAccessError(
                f"the KMS pkcs11 has no token {self._label!r}: check {TOKEN}, {LIBRARY} and what configures that"
            ) from None
        except PKCS11Error as error:
            if type(error).__name__ in SESSION_LOST:
                raise
            raise KeyAccessError(
                f"the KMS pkcs11 opens no session with the token {self._label!r} ({type(error).__name__}): "
                f"check {LIBRARY}, {TOKEN} and the PIN"
            ) from None


class _Library:
    def __init__(self, path: str, *, forked: bool) -> None:
        self.lock = threading.RLock()
        self.tokens: dict[str, _Token] = {}
        self._path, self._forked = path, forked

    def loaded(self) -> lib:
        # In a thread that ends: some libraries, such as SoftHSM's, leave errors in OpenSSL's queue of the thread that
        # loads them. The next read of that thread from a TLS connection would seem to have failed.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self._load).result()

    def _load(self) -> lib:
        import pkcs11

        library = pkcs11.lib(self._path)
        if self._forked:  # a child must initialize the library again, after it has ended the parent's use
            with contextlib.suppress(pkcs11.PKCS11Error):
                library.finalize()
            library.initialize()
            self._forked = False
        return library


_libraries: dict[str, _Library] = {}
_inherited: set[str] = set()
_guard = threading.Lock()


def _token(path: str, label: str) -> _Token:
    with _guard:
        library = _libraries.setdefault(path, _Library(path, forked=path in _inherited))
        return library.tokens.setdefault(label, _Token(library, label))


def _before_fork() -> None:
    """Wait until no thread is in a library: a child could not release the library's own locks, nor OpenSSL's."""
    _guard.acquire()
    for library in _libraries.values():
        library.lock.acquire()


def _after_fork_in_parent() -> None:
    for library in _libraries.values():
        library.lock.release()
    _guard.release()


def _after_fork_in_child() -> None:
    global _guard
    _guard = threading.Lock()
    _inherited.update(_libraries)
    _libraries.clear()


def _wrong_pin(label: str, why: str) -> KeyAccessError:
    return KeyAccessError(f"the PIN for the token {label!r} of the KMS pkcs11 is wrong: {why}. Correct it: {PINS}")


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
