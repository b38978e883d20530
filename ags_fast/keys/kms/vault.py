"""HashiCorp Vault, by its transit engine. A wrapped key is the engine's ciphertext, the text ``vault:vN:...``."""

from __future__ import annotations

import base64
import binascii
import contextlib
import math
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from ags_fast.errors import FormatError, IntegrityError, KeyAccessError
from ags_fast.keys.kms.client import DeniedError
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
METHOD = "vault.auth-method"
AUTH_MOUNT = "vault.auth-mount"
ROLE = "vault.auth-role"
ROLE_ID = "vault.role-id"
SECRET_ID_FILE = "vault.secret-id-file"
SECRET_ID_ENV = "vault.secret-id-env"
JWT_FILE = "vault.jwt-file"
CERT_FILE = "vault.client-cert-file"
KEY_FILE = "vault.client-key-file"
CA_FILE = "vault.ca-file"
# The ways to log in, and what each needs and may have.
METHODS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "token": ((), (TOKEN_FILE, TOKEN_ENV)),
    "approle": ((ROLE_ID,), (SECRET_ID_FILE, SECRET_ID_ENV)),
    "kubernetes": ((ROLE,), (JWT_FILE,)),
    "jwt": ((JWT_FILE,), (ROLE,)),
    "cert": ((CERT_FILE, KEY_FILE), (ROLE,)),
}
KUBERNETES_JWT = "/var/run/secrets/kubernetes.io/serviceaccount/token"
SECRET_IDS = f"name a file in {SECRET_ID_FILE}, or an environment variable in {SECRET_ID_ENV}"
MAX_SECRET_NBYTES = 1 << 16
TOKENS = f"name a file in {TOKEN_FILE}, such as Vault Agent's, or an environment variable in {TOKEN_ENV}"

KEY_NAME = re.compile(r"\w(?:[\w.-]*\w)?", re.ASCII)
WRAPPED = re.compile(rb"vault:v([1-9][0-9]{0,8}):[A-Za-z0-9+/]+={0,2}")
NO_TYPE = "never-made"
BUSY_ERRORS = ("RateLimitExceeded", "InternalServerError", "BadGateway", "VaultDown", "PreconditionFailed")


class _Transit(Protocol):
    """What is used of hvac's client of the transit engine."""

    def encrypt_data(self, name: str, plaintext: str, *, type: str, mount_point: str) -> dict[str, Any]: ...
    def decrypt_data(self, name: str, ciphertext: str, *, mount_point: str) -> dict[str, Any]: ...
    def rewrap_data(self, name: str, ciphertext: str, *, mount_point: str) -> dict[str, Any]: ...
    def generate_data_key(self, name: str, key_type: str, *, bits: int, mount_point: str) -> dict[str, Any]: ...
    def read_key(self, name: str, *, mount_point: str) -> dict[str, Any]: ...


class VaultKms(ServiceKms["_Server"]):
    """Wraps keys with a transit engine of Vault: encrypt, decrypt, datakey and rewrap. Key ids are names of keys.

    Properties, besides those of ServiceKms:

    - ``vault.address``, ``vault.namespace`` and ``vault.transit-mount`` (transit): where the engine is.
    - ``vault.token-file`` or ``vault.token-env``: where the token is. By default it is in the environment variable
      VAULT_TOKEN or in the file ~/.vault-token, as for Vault's own tools. The client reads the token for each request,
      so an agent may renew it.
    - ``vault.auth-method``: log in instead of reading a token. ``approle`` takes ``vault.role-id``, and
      ``vault.secret-id-file`` or ``vault.secret-id-env``. ``kubernetes`` takes ``vault.auth-role`` and
      ``vault.jwt-file`` (the pod's). ``jwt`` takes ``vault.jwt-file`` and ``vault.auth-role``. ``cert`` takes
      ``vault.client-cert-file``, ``vault.client-key-file`` and ``vault.auth-role``. The client renews its token after
      half of the token's lifetime. It logs in again if the renewal fails or a token is refused.
    - ``vault.auth-mount``: where the method is mounted; by default at the method's name.
    - ``vault.client-cert-file`` and ``vault.client-key-file``: shown to any server that asks for a certificate.
    - ``vault.ca-file``: the authorities to trust. By default hvac finds them.

    If the policy allows it, Vault makes an unknown key when it is asked to encrypt with it. So each wrap asks for a key
    type that does not exist, and Vault makes none.
    """

    provider = "vault"
    property_names = BY_PROVIDER[provider]
    packages = ("hvac",)
    endpoint_property = ADDRESS
    secret_properties = {  # noqa: RUF012, of the base class
        "vault.token": TOKENS,
        "vault.secret-id": SECRET_IDS,
        "vault.jwt": f"name a file in {JWT_FILE}",
    }
    supports_key_generation = True
    supports_rewrap = True

    def initialize(self, properties: Mapping[str, str]) -> None:
        """As `KmsClient` has it."""
        if not properties.get(ADDRESS):
            raise ValueError(f"set {ADDRESS}: the server, such as https://vault.example.com:8200")
        if properties.get(TOKEN_FILE) and properties.get(TOKEN_ENV):
            raise ValueError(f"set one of {TOKEN_FILE} and {TOKEN_ENV}")
        method = properties.get(METHOD, "token")
        if method not in METHODS:
            raise ValueError(f"{METHOD} is {', '.join(METHODS)}, not {method!r}")
        needed, more = METHODS[method]
        if missing := [name for name in needed if not properties.get(name)]:
            raise ValueError(f"{METHOD} {method} needs {missing[0]}")
        every = {name for names in METHODS.values() for part in names for name in part} - {CERT_FILE, KEY_FILE}
        every |= {AUTH_MOUNT} if method == "token" else set()
        if other := sorted((every - {*needed, *more}) & properties.keys()):
            raise ValueError(f"{other[0]} is not for {METHOD} {method}: omit it, or set another method")
        if method == "approle" and bool(properties.get(SECRET_ID_FILE)) == bool(properties.get(SECRET_ID_ENV)):
            raise ValueError(f"set one of {SECRET_ID_FILE} and {SECRET_ID_ENV}")
        if bool(properties.get(CERT_FILE)) != bool(properties.get(KEY_FILE)):
            raise ValueError(f"set both of {CERT_FILE} and {KEY_FILE}, or none")
        super().initialize(properties)

    def key_version(self, wrapped: bytes) -> str | None:
        """As `KmsClient` has it."""
        return str(_version(wrapped))

    def _current_version(self, wrapping_key_id: str) -> str | None:
        # min_encryption_version does not matter: it bounds versions that requests name, and these name none.
        found = self._find(wrapping_key_id, self._deadline())
        latest = (found or {}).get("latest_version")
        return str(latest) if isinstance(latest, int) else None

    def _wrap(self, key: bytes, wrapping_key_id: str) -> bytes:
        text = base64.b64encode(key).decode()

        def ask(transit: _Transit, name: str, mount: str) -> dict[str, Any]:
            return transit.encrypt_data(name, text, type=NO_TYPE, mount_point=mount)

        return _ciphertext(self._call("encrypt", wrapping_key_id, ask))

    def _unwrap(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return _plaintext(self._send("decrypt", wrapped, wrapping_key_id))

    def _rewrap(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return _ciphertext(self._send("rewrap", wrapped, wrapping_key_id))

    def _send(self, action: str, wrapped: bytes, wrapping_key_id: str) -> dict[str, Any]:
        """Return Vault's answer to a decrypt or a rewrap of a wrapped key."""
        _version(wrapped)
        text, deadline = wrapped.decode(), self._deadline()

        def ask(transit: _Transit, name: str, mount: str) -> dict[str, Any]:
            send = transit.decrypt_data if action == "decrypt" else transit.rewrap_data
            return send(name, text, mount_point=mount)

        try:
            return self._call(action, wrapping_key_id, ask, deadline)
        except _InvalidError:
            raise self._why(wrapped, action, wrapping_key_id, deadline) from None

    def _generate(self, wrapping_key_id: str, length: int) -> tuple[bytes, bytes]:
        if length == 24:  # the engine makes none of 192 bits
            key = os.urandom(length)
            return key, self._wrap(key, wrapping_key_id)

        def ask(transit: _Transit, name: str, mount: str) -> dict[str, Any]:
            return transit.generate_data_key(name, "plaintext", bits=8 * length, mount_point=mount)

        answer = self._call("datakey", wrapping_key_id, ask)
        return _plaintext(answer), _ciphertext(answer)

    def _call(
        self, action: str, key_id: str, ask: Callable[[_Transit, str, str], dict[str, Any]], deadline: float = 0
    ) -> dict[str, Any]:
        from hvac.exceptions import Forbidden, InvalidRequest, VaultError
        from requests.exceptions import RequestException

        if not KEY_NAME.fullmatch(key_id):  # it becomes part of a path
            raise KeyAccessError(f"{key_id!r} is not a key id of the KMS vault: name a transit key")
        server, mount, token = self._connected(), self._mount, ""
        deadline = deadline or self._deadline()

        def request() -> dict[str, Any]:
            nonlocal token
            token = self._token(server)
            client = server.client(token)
            return ask(client.secrets.transit, key_id, mount)

        def again() -> dict[str, Any]:
            """Try once more with a new token if the token of a login has expired or was revoked."""
            try:
                return request()
            except Forbidden:
                if token != server.token or server.lives(token):
                    raise
            with server.lock:
                if server.token == token:
                    server.token = ""
            return request()

        try:
            return self._ask(again, deadline)["data"]  # type: ignore[no-any-return]
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
            check = f"{ADDRESS}, and the certificate's authority in {CA_FILE}, VAULT_CACERT or REQUESTS_CA_BUNDLE"
            raise self._not_reached(self.properties[ADDRESS], repr(key_id), error, check) from None

    def _find(self, key_id: str, deadline: float) -> dict[str, Any] | None:
        """Return Vault's description of the key; None if that is not allowed. KeyAccessError: the key is unknown."""
        with contextlib.suppress(DeniedError):
            return self._call("read", key_id, lambda t, n, m: t.read_key(n, mount_point=m), deadline)
        return None

    def _why(self, wrapped: bytes, action: str, key_id: str, deadline: float) -> IntegrityError | KeyAccessError:
        """Return the error of a refused request. Vault's own is the same for old versions and for changed bytes."""
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

    def _token(self, server: _Server) -> str:
        if self.properties.get(METHOD, "token") != "token":
            return self._logged_in(server)
        properties = self.properties
        if path := properties.get(TOKEN_FILE):
            return _secret("token", path, lambda: _read(path), TOKENS)
        if name := properties.get(TOKEN_ENV):
            return _secret("token", name, lambda: os.environ.get(name, ""), TOKENS)
        from hvac.utils import get_token_from_env

        return _secret("token", "VAULT_TOKEN", lambda: get_token_from_env() or "", TOKENS)

    def _logged_in(self, server: _Server) -> str:
        """Return the token of a login: the current token, the token after its renewal, or the token of a new login."""
        from hvac.exceptions import Forbidden, InvalidRequest

        with server.lock:
            now = time.monotonic()
            if server.token and now < server.renews_at:
                return server.token
            if server.token and server.renewable and now < server.ends_at:
                with contextlib.suppress(Forbidden, InvalidRequest):
                    server.take(server.client(server.token).write_data("auth/token/renew-self", data={}))
                    return server.token
            method = self.properties[METHOD]
            mount = self.properties.get(AUTH_MOUNT, method).strip("/")
            code = ""
            try:
                server.take(server.client("").write_data(f"auth/{mount}/login", data=self._proof(method)))
                return server.token
            except (Forbidden, InvalidRequest) as error:
                code = type(error).__name__
            raise KeyAccessError(
                f"the KMS vault refused the login by {method} at auth/{mount} ({code}): check {AUTH_MOUNT}, the role "
                "and its credentials, which may have expired or been used up"
            )

    def _proof(self, method: str) -> dict[str, str]:
        """Return the arguments of a login."""
        given = self.properties
        role = {"role": given[ROLE]} if ROLE in given else {}
        if method == "cert":
            return {"name": given[ROLE]} if role else {}
        if method == "approle":
            path, name = given.get(SECRET_ID_FILE, ""), given.get(SECRET_ID_ENV, "")
            read = (lambda: _read(path)) if path else (lambda: os.environ.get(name, ""))
            return {"role_id": given[ROLE_ID], "secret_id": _secret("secret id", path or name, read, SECRET_IDS)}
        path = given.get(JWT_FILE, KUBERNETES_JWT)
        return {**role, "jwt": _secret("JWT", path, lambda: _read(path), f"name its file in {JWT_FILE}")}

    def _connect(self) -> _Server:
        import hvac

        timeout = (self._number(CONNECT_MS) / 1000, self._number(READ_MS) / 1000)
        cert = self.properties.get(CERT_FILE)

        def connected(token: str, session: Any = None) -> Any:
            return hvac.Client(
                url=self.properties[ADDRESS],
                token=token,
                cert=(cert, self.properties[KEY_FILE]) if cert else None,
                verify=self.properties.get(CA_FILE),
                timeout=timeout,
                namespace=self.properties.get(NAMESPACE),
                allow_redirects=False,  # a redirect would send the token to another host
                session=session,
            )

        return _Server(connected)

    def _disconnect(self, connection: _Server) -> None:
        connection.first.adapter.close()

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
        made = DeniedError if code == "Forbidden" else KeyAccessError
        return made(str(self._refusal(action, repr(key_id), code, advice)))


class _Server:
    """A connection, and the token of a login if the client has logged in."""

    def __init__(self, connected: Callable[..., Any]) -> None:
        self._connected = connected
        self.first = connected("")
        self._last = "", self.first
        self.lock = threading.Lock()
        self.token = ""
        self.renews_at = self.ends_at = math.inf
        self.renewable = False

    def client(self, token: str) -> Any:
        """Return a client for one token, so that threads with another token are left alone. All share connections."""
        last = self._last
        if last[0] != token:
            last = self._last = token, self._connected(token, self.first.session)
        return last[1]

    def lives(self, token: str) -> bool:
        """Whether Vault accepts a token that it refused something. Then another token would not help."""
        from hvac.exceptions import Forbidden

        try:
            self.client(token).auth.token.lookup_self()
        except Forbidden:
            return False
        return True

    def take(self, answer: dict[str, Any]) -> None:
        """Keep the token that Vault has issued or renewed."""
        auth, now = answer["auth"], time.monotonic()
        token, seconds = auth["client_token"], float(auth["lease_duration"])
        if not isinstance(token, str) or not token.isprintable():
            raise KeyAccessError("the KMS vault answered a login with something else than a token")
        self.token, self.renewable = token, bool(auth["renewable"])
        self.renews_at, self.ends_at = (now + seconds / 2, now + seconds) if seconds else (math.inf, math.inf)


class _InvalidError(Exception):
    """Vault calls the request invalid, and does not say why."""


def _read(path: str) -> str:
    with open(path) as file:
        return file.read(MAX_SECRET_NBYTES)


def _secret(what: str, where: str, read: Callable[[], str], instead: str) -> str:
    """Return a secret, read for each use so that an agent may renew it."""
    try:
        text = read().strip()
    except (OSError, ValueError) as error:
        raise KeyAccessError(
            f"the {what} of the KMS vault cannot be read here ({type(error).__name__}): {where}"
        ) from None
    if not text or not text.isprintable():
        raise KeyAccessError(f"the KMS vault needs a {what}, and there is none in {where}: {instead}")
    return text


def _version(wrapped: bytes) -> int:
    found = WRAPPED.fullmatch(wrapped)
    if found is None:
        raise FormatError(f"these {len(wrapped)} bytes are not a key wrapped by Vault's transit engine")
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
