"""HashiCorp Vault, by its transit engine. A wrapped key is the engine's ciphertext, the text ``vault:vN:...``."""

from __future__ import annotations

import base64
import contextlib
import math
import os
import re
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ags_fast.errors import FormatError, IntegrityError, KeyAccessError
from ags_fast.fs.answers import MISSING, REFUSED
from ags_fast.keys.kms.client import DeniedError
from ags_fast.keys.kms.names import BY_PROVIDER
from ags_fast.keys.kms.service import BUSY_ADVICE, CONNECT_MS, READ_MS, AnswerError, ServiceKms, only_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Ask = Callable[[Any, str, str], dict[str, Any]]  # of hvac's client of the engine, the key's name, and the mount

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
REFUSALS = {
    403: "the token has expired, or its policy does not allow {path}",
    404: f"there is no such key, or no transit engine at {MOUNT} ({{mount}}): make it first",
    501: "it is not initialized: initialize it, or ask another server",
    503: "it is sealed or not active: unseal it, or ask the active server",
}


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
    again = (412,)  # a standby that lags behind
    check = f"{ADDRESS}, and the certificate's authority in {CA_FILE}, VAULT_CACERT or REQUESTS_CA_BUNDLE"

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

    def current_version(self, wrapping_key_id: str) -> str | None:
        """As `KmsClient` has it."""
        # min_encryption_version does not matter: it bounds versions that requests name, and these name none.
        found = self._find(wrapping_key_id, self._deadline())
        latest = (found or {}).get("latest_version")
        return str(latest) if isinstance(latest, int) else None

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        """As `KmsClient` has it."""
        text = base64.b64encode(key).decode()

        def ask(transit: Any, name: str, mount: str) -> Any:
            return transit.encrypt_data(name, text, type=NO_TYPE, mount_point=mount)

        return _ciphertext(self._call("encrypt", wrapping_key_id, ask))

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        """As `KmsClient` has it."""
        return _plaintext(self._send("decrypt", wrapped, wrapping_key_id))

    def rewrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        """As `KmsClient` has it."""
        return _ciphertext(self._send("rewrap", wrapped, wrapping_key_id))

    def _send(self, action: str, wrapped: bytes, wrapping_key_id: str) -> dict[str, Any]:
        _version(wrapped)
        text, deadline = wrapped.decode(), self._deadline()

        def ask(transit: Any, name: str, mount: str) -> Any:
            send = transit.decrypt_data if action == "decrypt" else transit.rewrap_data
            return send(name, text, mount_point=mount)

        try:
            return self._call(action, wrapping_key_id, ask, deadline)
        except AnswerError:
            raise self._why(wrapped, action, wrapping_key_id, deadline) from None

    def generate_key(self, wrapping_key_id: str, length: int) -> tuple[bytes, bytes]:
        """As `KmsClient` has it."""
        if length == 24:  # the engine makes none of 192 bits
            key = os.urandom(length)
            return key, self.wrap_key(key, wrapping_key_id)

        def ask(transit: Any, name: str, mount: str) -> Any:
            return transit.generate_data_key(name, "plaintext", bits=8 * length, mount_point=mount)

        answer = self._call("datakey", wrapping_key_id, ask)
        return _plaintext(answer), _ciphertext(answer)

    def _call(self, action: str, key_id: str, ask: Ask, deadline: float = 0) -> dict[str, Any]:
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
            except AnswerError as error:
                if error.response.status_code != 403 or token != server.token:
                    raise
                if not self._refused(server.client(token).auth.token.lookup_self):  # another token would not help
                    raise
            with server.lock:
                if server.token == token:
                    server.token = ""
            return request()

        try:
            return self._ask(again, deadline)["data"]  # type: ignore[no-any-return]
        except AnswerError as error:
            if self._code(error) == "status 400":
                if action in ("decrypt", "rewrap"):
                    raise  # `_send` finds out why
                if action != "read":
                    self._find(key_id, deadline)
            raise self._translated(error, action, key_id) from None

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
                "status 400",
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
            return self._refusal(action, key, "status 400", "a key of this type does not encrypt")
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
        with server.lock:
            now = time.monotonic()
            if server.token and now < server.renews_at:
                return server.token
            if (
                server.token
                and server.renewable
                and now < server.ends_at
                and not self._refused(
                    lambda: server.take(server.client(server.token).write_data("auth/token/renew-self", data={}))
                )
            ):
                return server.token
            method = self.properties[METHOD]
            mount = self.properties.get(AUTH_MOUNT, method).strip("/")
            proof = self._proof(method)
            code = self._refused(lambda: server.take(server.client("").write_data(f"auth/{mount}/login", data=proof)))
            if not code:
                return server.token
            raise KeyAccessError(
                f"the KMS vault refused the login by {method} at auth/{mount} ({code}): check {AUTH_MOUNT}, the role "
                "and its credentials, which may have expired or been used up"
            )

    def _refused(self, ask: Callable[[], None]) -> str:
        """Ask, and return how Vault has refused; "" if it has not."""
        try:
            ask()
        except AnswerError as error:
            told = self._told(error)
            if told is None or self._kind(told) not in (REFUSED, MISSING):
                raise
            return told.code
        return ""

    def _proof(self, method: str) -> dict[str, str]:
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
            client = hvac.Client(
                url=self.properties[ADDRESS],
                token=token,
                cert=(cert, self.properties[KEY_FILE]) if cert else None,
                verify=self.properties.get(CA_FILE),
                timeout=timeout,
                namespace=self.properties.get(NAMESPACE),
                allow_redirects=False,  # a redirect would send the token to another host
                session=session,
            )
            client.session.hooks["response"] = [partial(only_json, errors=True)]
            return client

        return _Server(connected)

    def _disconnect(self, connection: _Server) -> None:
        connection.first.adapter.close()

    def _code(self, error: Any) -> str:
        try:
            return f"status {error.response.status_code}" if isinstance(error.response.json()["errors"], list) else ""
        except (ValueError, TypeError, KeyError, RecursionError):
            return ""

    def _translated(self, error: AnswerError, action: str, key_id: str) -> KeyAccessError:
        status, mount = error.response.status_code, self._mount
        path = f"{mount}/{'keys' if action == 'read' else action}/{key_id}"
        advice = REFUSALS.get(status, "a key of this type cannot, or its configuration says no")
        advice = advice.format(path=path, mount=mount)
        busy = advice if status == 503 else BUSY_ADVICE
        return self._failed(error, action, repr(key_id), advice, denied=status == 403, busy=busy)


class _Server:
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

    def take(self, answer: dict[str, Any]) -> None:
        auth, now = answer["auth"], time.monotonic()
        token, seconds = auth["client_token"], float(auth["lease_duration"])
        if not isinstance(token, str) or not token.isprintable():
            raise ValueError  # not an answer of Vault's
        self.token, self.renewable = token, bool(auth["renewable"])
        self.renews_at, self.ends_at = (now + seconds / 2, now + seconds) if seconds else (math.inf, math.inf)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read(MAX_SECRET_NBYTES)


def _secret(what: str, where: str, read: Callable[[], str], instead: str) -> str:
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
    wrapped: bytes = answer["ciphertext"].encode()
    if not WRAPPED.fullmatch(wrapped):
        raise ValueError  # not an answer of Vault's
    return wrapped


def _plaintext(answer: dict[str, Any]) -> bytes:
    return base64.b64decode(answer["plaintext"], validate=True)
