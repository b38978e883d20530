"""Google Cloud KMS. A wrapped key is the service's ciphertext without AAD, as Iceberg's Java client stores it."""

from __future__ import annotations

import itertools
import re
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ags_fast.errors import IntegrityError, KeyAccessError
from ags_fast.fs.answers import in_words
from ags_fast.keys.kms.client import DeniedError, KeyVersion, Wrapped
from ags_fast.keys.kms.names import BY_PROVIDER
from ags_fast.keys.kms.service import BUSY, ENDPOINT, READ_MS, ServiceKms, only_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from google.auth.credentials import Credentials
    from google.cloud.kms import KeyManagementServiceClient

__all__ = ["GcpKms"]

T = TypeVar("T")

ACCOUNT = "gcs.impersonate.service-account"
DELEGATES = "gcs.impersonate.delegates"
LIFETIME = "gcs.impersonate.lifetime-seconds"
SCOPE = "https://www.googleapis.com/auth/cloudkms"
MAX_VERSIONS = 10_000
PART = r"[A-Za-z0-9_.:-]{1,255}"
KEY_NAME = re.compile(f"projects/{PART}/locations/{PART}/keyRings/{PART}/cryptoKeys/{PART}")
VERSION_STATE = re.compile(r"cryptoKeyVersions/([0-9]{1,9})\b[^A-Z]*([A-Z_]{7,40})")

# What the caller can do about each status. Google's messages are not shown: what they quote is not documented.
REFUSALS = {
    "PERMISSION_DENIED": "the caller may not: allow cloudkms.cryptoKeyVersions.useTo{action} on this key",
    "UNAUTHENTICATED": "Google does not accept the caller's credentials: get new ones",
    "NOT_FOUND": "there is no such key: check the project, location, key ring and name",
    "INVALID_ARGUMENT": "it is not a request for this key: is its purpose ENCRYPT_DECRYPT, and the key to wrap small?",
    "FAILED_PRECONDITION": "the version that it takes (to encrypt, the primary one) is off: enable or restore it",
}
STATES = {
    "DISABLED": "enable this version",
    "DESTROY_SCHEDULED": "restore this version before it is destroyed, then enable it",
    "DESTROYED": "what only it had wrapped is lost",
}
NO_TOKEN = "the KMS gcp has no token: set application default credentials, as a file in GOOGLE_APPLICATION_CREDENTIALS"
BUSY_CODES = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL", "ABORTED", "UNKNOWN", "DEADLINE_EXCEEDED")
HTTP_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class GcpKms(ServiceKms["KeyManagementServiceClient"]):
    """Wraps keys with Google Cloud KMS: Encrypt and Decrypt, with CRC32C over requests and answers.

    A key id is the key's resource name, ``projects/P/locations/L/keyRings/R/cryptoKeys/K``. The primary version wraps.
    Google's answer names the version that wrapped; the wrapped bytes do not.

    Credentials are Google's application default credentials.

    Properties, besides those of ServiceKms:

    - ``kms.endpoint``: where the service is.
    - ``gcs.impersonate.service-account``: a service account to impersonate with the credentials.
    - ``gcs.impersonate.delegates``: the chain of delegates, separated by commas.
    - ``gcs.impersonate.lifetime-seconds`` (3600): how long a token of the service account is valid.
    """

    provider = "gcp"
    property_names = BY_PROVIDER[provider]
    packages = ("google.cloud.kms", "google_crc32c", "requests")
    secret_properties = {  # noqa: RUF012, of the base class
        "gcs.oauth2.token": "name a file with credentials in GOOGLE_APPLICATION_CREDENTIALS"
    }
    loggers = (
        "google.auth.transport.requests",
        "google.cloud.kms_v1.services.key_management_service.client",
        "google.cloud.kms_v1.services.key_management_service.transports.rest",
    )

    again = BUSY_CODES
    check = ENDPOINT

    def initialize(self, properties: Mapping[str, str]) -> None:
        """As `KmsClient` has it."""
        seconds = properties.get(LIFETIME, "3600")
        if not (seconds.isascii() and seconds.isdecimal() and 1 <= int(seconds) <= 43200):
            raise ValueError(f"{LIFETIME} is a number of seconds from 1 to 43200, not {seconds!r}")
        super().initialize(properties)

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        """As `KmsClient` has it."""
        import google_crc32c

        def ask(client: KeyManagementServiceClient, name: str) -> bytes:
            request = {"name": name, "plaintext": key, "plaintext_crc32c": google_crc32c.value(key)}
            answer = client.encrypt(request=request, timeout=self._timeout, retry=None)
            sealed: bytes = answer.ciphertext
            if not sealed:
                raise ValueError  # not an answer of Google's
            if not answer.verified_plaintext_crc32c or answer.ciphertext_crc32c != google_crc32c.value(sealed):
                raise _CorruptedError
            return Wrapped.by(sealed, _number(answer.name))

        return self._call("Encrypt", wrapping_key_id, ask)

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        """As `KmsClient` has it."""
        import google_crc32c

        def ask(client: KeyManagementServiceClient, name: str) -> bytes:
            request = {"name": name, "ciphertext": wrapped, "ciphertext_crc32c": google_crc32c.value(wrapped)}
            answer = client.decrypt(request=request, timeout=self._timeout, retry=None)
            key: bytes = answer.plaintext
            if not key:
                raise ValueError  # not an answer of Google's
            if answer.plaintext_crc32c != google_crc32c.value(key):
                raise _CorruptedError
            return key

        return self._call("Decrypt", wrapping_key_id, ask)

    def current_version(self, wrapping_key_id: str) -> str | None:
        """As `KmsClient` has it."""

        def ask(client: KeyManagementServiceClient, name: str) -> str | None:
            return _number(
                client.get_crypto_key(request={"name": name}, timeout=self._timeout, retry=None).primary.name
            )

        with suppress(DeniedError):
            return self._call("Get", wrapping_key_id, ask)
        return None

    def versions(self, wrapping_key_id: str) -> list[KeyVersion]:
        """As `KmsClient` has it."""

        def ask(client: KeyManagementServiceClient, name: str) -> list[KeyVersion]:
            pages = client.list_crypto_key_versions(request={"parent": name}, timeout=self._timeout, retry=None)
            return [
                KeyVersion(_number(one.name), int(one.create_time.timestamp() * 1000), one.state.name)
                for one in itertools.islice(pages, MAX_VERSIONS)
            ]

        with suppress(DeniedError):
            return self._call("List", wrapping_key_id, ask)
        return []

    def _call(self, action: str, key_id: str, ask: Callable[[KeyManagementServiceClient, str], T]) -> T:
        from google.api_core.exceptions import GoogleAPICallError
        from google.auth.exceptions import GoogleAuthError

        if not KEY_NAME.fullmatch(key_id):
            raise KeyAccessError(
                f"{key_id!r} is not a key id of the KMS gcp: projects/P/locations/L/keyRings/R/cryptoKeys/K, without a "
                "version"
            )
        client = self._connected()
        try:
            return self._ask(lambda: ask(client, key_id))
        except GoogleAPICallError as error:
            raise self._translated(error, action, key_id) from None
        except GoogleAuthError as error:
            raise error if in_words(error) else KeyAccessError(NO_TOKEN) from None
        except _CorruptedError:
            raise self._refusal(action, repr(key_id), "CRC32C", "bytes change on the way, each time") from None

    @property
    def _timeout(self) -> float:
        return self._number(READ_MS) / 1000

    def _connect(self) -> KeyManagementServiceClient:
        """Connect by HTTP, not by gRPC, whose threads and locks do not survive a fork."""
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import kms
        from google.cloud.kms_v1.services.key_management_service.transports import KeyManagementServiceRestTransport

        where = urlsplit(self.properties.get(ENDPOINT, "https://cloudkms.googleapis.com"))
        try:
            transport = KeyManagementServiceRestTransport(
                host=where.netloc, url_scheme=where.scheme, credentials=self._credentials(where.scheme)
            )
        except GoogleAuthError:
            raise KeyAccessError(NO_TOKEN) from None
        transport._session.max_redirects = 0  # noqa: SLF001  # a redirect would take what is sent to another host
        transport._session.hooks["response"] = [partial(only_json, errors=False)]  # noqa: SLF001
        return kms.KeyManagementServiceClient(transport=transport)

    def _credentials(self, scheme: str) -> Credentials | None:
        """Return the credentials, or None for the application default ones. Without TLS no credentials are sent."""
        import google.auth
        from google.auth import impersonated_credentials
        from google.auth.credentials import AnonymousCredentials

        if scheme == "http":
            return AnonymousCredentials()  # type: ignore[no-untyped-call]
        if ACCOUNT not in self.properties:
            return None
        source, _ = google.auth.default(scopes=[SCOPE])
        delegates = [stripped for part in self.properties.get(DELEGATES, "").split(",") if (stripped := part.strip())]
        return impersonated_credentials.Credentials(  # type: ignore[no-untyped-call]
            source,
            self.properties[ACCOUNT],
            target_scopes=[SCOPE],
            delegates=delegates or None,
            lifetime=int(self.properties.get(LIFETIME, "3600")),
        )

    def _disconnect(self, connection: KeyManagementServiceClient) -> None:
        connection.transport.close()  # type: ignore[no-untyped-call]

    def _code(self, error: Any) -> str:
        try:
            told = error.response.json()["error"]["status"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return ""
        status = error.response.status_code
        return told if told in (*REFUSALS, *BUSY_CODES) else HTTP_CODES.get(status, f"status {status}")

    def _trouble(self, error: Exception) -> str | None:
        return BUSY if isinstance(error, _CorruptedError) else super()._trouble(error)

    def _translated(self, error: Any, action: str, key_id: str) -> IntegrityError | KeyAccessError:
        code = self._code(error)
        if code == "INVALID_ARGUMENT" and action == "Decrypt":
            return IntegrityError(
                f"a wrapped key is not what the Google key {key_id!r} wrapped ({code}): changed, or by another key"
            )
        named = VERSION_STATE.search(str(error.message)) if code == "FAILED_PRECONDITION" else None
        if named is not None and named[2] in STATES:
            return self._refusal(action, f"{key_id!r}, version {named[1]}", named[2], STATES[named[2]])
        advice = REFUSALS.get(code, "see what Google documents for it").format(action=action)
        return self._failed(error, action, repr(key_id), advice, denied=code == "PERMISSION_DENIED")


def _number(name: str) -> str | None:
    number = name.rpartition("/cryptoKeyVersions/")[2]
    return number if number.isascii() and number.isdecimal() and len(number) < 10 else None


class _CorruptedError(Exception):
    """The bytes changed in transit."""
