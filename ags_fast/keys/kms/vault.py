"""HashiCorp Vault, by its transit engine. What is stored is the engine's ciphertext, the text ``vault:vN:...``."""

from __future__ import annotations

import base64
import binascii
import os
import re
from typing import TYPE_CHECKING, Any

from ags_fast.errors import FormatError, IntegrityError, KeyAccessError
from ags_fast.keys.kms.names import BY_PROVIDER
from ags_fast.keys.kms.service import BUSY, BUSY_ADVICE, CONNECT_MS, READ_MS, UNREACHED, ServiceKms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["VaultKms"]

ADDRESS = "vault.address"
NAMESPACE = "vault.namespace"
MOUNT = "vault.transit-mount"
TOKEN_FILE = "vault.token-file"
TOKEN_ENV = "vault.token-env"
TOKENS = f"name a file in {TOKEN_FILE}, such as Vault Agent's, or an environment variable in {TOKEN_ENV}"

KEY_NAME = re.compile(r"\w(?:[\w.-]*\w)?", re.ASCII)
WRAPPED = re.compile(rb"vault:v([1-9][0-9]{0,8}):[A-Za-z0-9+/]+={0,2}")
NO_TYPE = "never-made"
BUSY_ERRORS = ("RateLimitExceeded", "InternalServerError", "BadGateway", "VaultDown", "PreconditionFailed")


class VaultKms(ServiceKms):
    """Wraps by encrypt, decrypt, datakey and rewrap of a transit engine.

    Properties: ``vault.address``, ``vault.transit-mount`` (transit), ``vault.namespace``, ``vault.token-file`` or
    ``vault.token-env``, and those of ServiceKms. Without the last two, the token is in the environment variable
    VAULT_TOKEN or in the file ~/.vault-token, as Vault's own tools have it. It is read for each request, so that an
    agent may renew it. Key ids are names of keys.

    Vault makes a key that it does not know when it is asked to encrypt with it, if the policy lets it. So each wrap
    says that such a key would have to be of a type that there is not: then Vault makes none.
    """

    provider = "vault"
    property_names = BY_PROVIDER[provider]
    packages = ("hvac",)
    endpoint_property = ADDRESS
    secret_properties = {"vault.token": TOKENS, "vault.secret-id": TOKENS}  # noqa: RUF012, of the base class
    supports_key_generation = True
    supports_rewrap = True

    def initialize(self, properties: Mapping[str, str]) -> None:
        if not properties.get(ADDRESS):
            raise ValueError(f"set {ADDRESS}: the server, such as https://vault.example.com:8200")
        if properties.get(TOKEN_FILE) and properties.get(TOKEN_ENV):
            raise ValueError(f"set one of {TOKEN_FILE} and {TOKEN_ENV}")
        super().initialize(properties)

    def key_version(self, wrapped: bytes) -> str | None:
        return str(_version(wrapped))

    def _current_version(self, wrapping_key_id: str) -> str | None:
        """min_encryption_version does not matter: it only bounds versions that a request names, and ours name none."""
        found = self._find(wrapping_key_id, self._deadline())
        latest = (found or {}).get("latest_version")
        return str(latest) if isinstance(latest, int) else None

    def _wrap(self, key: bytes, wrapping_key_id: str) -> bytes:
        text = base64.b64encode(key).decode()
        answer = self._call(
            "encrypt",
            wrapping_key_id,
            lambda t, n, m: t.encrypt_data(n, text, type=NO_TYPE, mount_point=m),
            self._deadline(),
        )
        return _ciphertext(answer)

    def _unwrap(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        _version(wrapped)
        text, deadline = wrapped.decode(), self._deadline()
        try:
            answer = self._call(
                "decrypt", wrapping_key_id, lambda t, n, m: t.decrypt_data(n, text, mount_point=m), deadline
            )
        except _InvalidError:
            raise self._why(wrapped, "decrypt", wrapping_key_id, deadline) from None
        return _plaintext(answer)

    def _rewrap(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        _version(wrapped)
        text, deadline = wrapped.decode(), self._deadline()
        try:
            answer = self._call(
                "rewrap", wrapping_key_id, lambda t, n, m: t.rewrap_data(n, text, mount_point=m), deadline
            )
        except _InvalidError:
            raise self._why(wrapped, "rewrap", wrapping_key_id, deadline) from None
        return _ciphertext(answer)

    def _generate(self, wrapping_key_id: str, length: int) -> tuple[bytes, bytes]:
        if length == 24:  # the engine makes none of 192 bits
            key = os.urandom(length)
            return key, self._wrap(key, wrapping_key_id)
        answer = self._call(
            "datakey",
            wrapping_key_id,
            lambda t, n, m: t.generate_data_key(n, "plaintext", bits=8 * length, mount_point=m),
            self._deadline(),
        )
        return _plaintext(answer), _ciphertext(answer)

    def _call(self, action: str, key_id: str, ask: Callable[[Any, str, str], Any], deadline: float) -> dict[str, Any]:
        from hvac.exceptions import InvalidRequest, VaultError
        from requests.exceptions import RequestException

        if not KEY_NAME.fullmatch(key_id):  # it becomes part of a path
            raise KeyAccessError(f"{key_id!r} is no key of the KMS vault: the name of a transit key")
        client, mount = self._connected(), self._mount

        def request() -> Any:
            client.token = self._token()
            return ask(client.secrets.transit, key_id, mount)

        try:
            return self._ask(request, deadline)["data"]  # type: ignore[no-any-return]
        except InvalidRequest:
            if action in ("decrypt", "rewrap"):
                raise _InvalidError from None
            if action != "read":
                self._find(key_id, deadline)
            raise self._refusal(
                action, repr(key_id), "InvalidRequest", "a key of this type cannot, or its configuration says no"
            ) from None
        except VaultError as error:
            raise self._translated(error, action, key_id) from None
        except RequestException as error:
            check = f"{ADDRESS}, and the certificate's authority in VAULT_CACERT or REQUESTS_CA_BUNDLE"
            raise self._not_reached(self.properties[ADDRESS], repr(key_id), error, check) from None

    def _find(self, key_id: str, deadline: float) -> dict[str, Any] | None:
        """What Vault tells of the key; None if that is not allowed. KeyAccessError if there is no such key."""
        try:
            return self._call("read", key_id, lambda t, n, m: t.read_key(n, mount_point=m), deadline)
        except _ForbiddenError:
            return None

    def _why(self, wrapped: bytes, action: str, key_id: str, deadline: float) -> IntegrityError | KeyAccessError:
        """Why a request was refused: Vault says the same of a version that is too old and of bytes that changed."""
        version = _version(wrapped)
        key = f"{key_id!r}, version {version}"
        found = self._find(key_id, deadline)
        if found is None:
            return self._refusal(
                action,
                key,
                "InvalidRequest",
                "there is no such key or version, or it may no longer be used, or the bytes were changed: allow read "
                f"on {self._mount}/keys/{key_id} to be told which",
            )
        if version < found.get("min_available_version", 0):
            return self._refusal(action, key, "trimmed", "what only it had wrapped is lost, unless a backup has it")
        if version < found.get("min_decryption_version", 0):
            return self._refusal(
                action, key, "disabled", f"lower the key's min_decryption_version to {version} to use it"
            )
        if not found.get("supports_decryption", True):
            return self._refusal(action, key, "InvalidRequest", "a key of this type does not encrypt")
        return IntegrityError(
            f"a wrapped key is not what the Vault key {key_id!r} wrapped, which has versions up to "
            f"{int(found.get('latest_version', 0))}: changed, or wrapped by another key (it names version {version})"
        )

    @property
    def _mount(self) -> str:
        return self.properties.get(MOUNT, "transit").strip("/")

    def _token(self) -> str | None:
        """None: where hvac looks for it."""
        properties = self.properties
        try:
            if path := properties.get(TOKEN_FILE):
                with open(path) as file:
                    token = file.read(4096).strip()
            elif name := properties.get(TOKEN_ENV):
                path, token = name, os.environ.get(name, "").strip()
            else:
                from hvac.utils import get_token_from_env

                path, token = "VAULT_TOKEN", get_token_from_env()
        except (OSError, ValueError) as error:
            raise KeyAccessError(
                f"the token of the KMS vault cannot be read here ({type(error).__name__}): {path}"
            ) from None
        if not token or not token.isprintable():
            raise KeyAccessError(f"the KMS vault needs a token, and there is none in {path}: {TOKENS}")
        return token

    def _connect(self) -> Any:
        import hvac

        timeout = (self._number(CONNECT_MS) / 1000, self._number(READ_MS) / 1000)
        return hvac.Client(
            url=self.properties[ADDRESS],
            token="",
            timeout=timeout,
            namespace=self.properties.get(NAMESPACE),
            allow_redirects=False,  # the token would go along, to wherever
        )

    def _disconnect(self, connection: Any) -> None:
        connection.adapter.close()

    def _trouble(self, error: Exception) -> str | None:
        from requests.exceptions import ConnectionError, Timeout

        if type(error).__name__ in BUSY_ERRORS:
            return BUSY
        return UNREACHED if isinstance(error, (ConnectionError, Timeout)) else None

    def _translated(self, error: Exception, action: str, key_id: str) -> KeyAccessError:
        code = type(error).__name__
        path = f"{self._mount}/{'keys' if action == 'read' else action}/{key_id}"
        if code == "VaultDown":
            advice = "it is sealed or not active: unseal it, or ask the active server"
        elif code in BUSY_ERRORS:
            advice = BUSY_ADVICE
        elif code == "Forbidden":
            advice = f"the token has expired, or its policy does not allow {path}"
        elif code == "InvalidPath":
            advice = f"there is no such key, or no transit engine at {MOUNT} ({self._mount}): make it first"
        else:
            advice = "see what Vault documents for it"
        made = _ForbiddenError if code == "Forbidden" else KeyAccessError
        return made(str(self._refusal(action, repr(key_id), code, advice)))


class _InvalidError(Exception):
    """Vault says no more than that the request is invalid."""


class _ForbiddenError(KeyAccessError):
    pass


def _version(wrapped: bytes) -> int:
    found = WRAPPED.fullmatch(wrapped)
    if found is None:
        raise FormatError(f"these {len(wrapped)} bytes are no key that Vault's transit engine wrapped")
    return int(found[1])


def _ciphertext(answer: dict[str, Any]) -> bytes:
    text = answer.get("ciphertext")
    wrapped = text.encode() if isinstance(text, str) else b""
    if not WRAPPED.fullmatch(wrapped):
        raise KeyAccessError("the KMS vault answered with something else than a ciphertext of transit")
    return wrapped


def _plaintext(answer: dict[str, Any]) -> bytes:
    try:
        return base64.b64decode(answer["plaintext"], validate=True)
    except (KeyError, TypeError, binascii.Error):
        raise KeyAccessError("the KMS vault answered with something else than a plaintext") from None
