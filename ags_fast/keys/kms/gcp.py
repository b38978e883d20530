"""Google Cloud KMS. What is stored is the service's ciphertext, as Iceberg's Java client stores it: no AAD."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ags_fast.errors import IntegrityError, KeyAccessError
from ags_fast.keys.kms.names import BY_PROVIDER
from ags_fast.keys.kms.service import BUSY, BUSY_ADVICE, ENDPOINT, READ_MS, UNREACHED, ServiceKms, on_this_machine

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GcpKms"]

PART = r"[A-Za-z0-9_.:-]{1,255}"
KEY_NAME = re.compile(f"projects/{PART}/locations/{PART}/keyRings/{PART}/cryptoKeys/{PART}")
VERSION_STATE = re.compile(r"cryptoKeyVersions/([0-9]+)[^A-Z]*([A-Z_]{7,40})")

# What the caller can do about a status. Its message is not shown: nobody knows what is in one.
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
BUSY_CODES = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL", "ABORTED", "UNKNOWN")


class GcpKms(ServiceKms):
    """Wraps by Encrypt and Decrypt, both ways under CRC32C.

    Properties: ``kms.endpoint`` and those of ServiceKms. Credentials are Google's application default credentials.
    A key id is the key's resource name, ``projects/P/locations/L/keyRings/R/cryptoKeys/K``. A new version wraps once it
    is made the primary one; which one wrapped something is known to Google alone.
    """

    provider = "gcp"
    property_names = BY_PROVIDER[provider]
    packages = ("google.cloud.kms", "google_crc32c")
    secret_properties = {  # noqa: RUF012, of the base class
        "gcs.oauth2.token": "name a file with credentials in GOOGLE_APPLICATION_CREDENTIALS"
    }
    loggers = (
        "google.cloud.kms_v1.services.key_management_service.client",
        "google.cloud.kms_v1.services.key_management_service.transports.grpc",
    )

    def _wrap(self, key: bytes, wrapping_key_id: str) -> bytes:
        import google_crc32c

        def ask(client: Any, name: str) -> bytes:
            request = {"name": name, "plaintext": key, "plaintext_crc32c": google_crc32c.value(key)}
            answer = client.encrypt(request=request, timeout=self._timeout, retry=None)
            sealed: bytes = answer.ciphertext
            if not answer.verified_plaintext_crc32c or answer.ciphertext_crc32c != google_crc32c.value(sealed):
                raise _CorruptedError
            return sealed

        return self._call("Encrypt", wrapping_key_id, ask)

    def _unwrap(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        import google_crc32c

        def ask(client: Any, name: str) -> bytes:
            request = {"name": name, "ciphertext": wrapped, "ciphertext_crc32c": google_crc32c.value(wrapped)}
            answer = client.decrypt(request=request, timeout=self._timeout, retry=None)
            key: bytes = answer.plaintext
            if answer.plaintext_crc32c != google_crc32c.value(key):
                raise _CorruptedError
            return key

        return self._call("Decrypt", wrapping_key_id, ask)

    def _call(self, action: str, key_id: str, ask: Callable[[Any, str], bytes]) -> bytes:
        from google.api_core.exceptions import GoogleAPICallError
        from google.auth.exceptions import GoogleAuthError

        if not KEY_NAME.fullmatch(key_id):
            raise KeyAccessError(
                f"{key_id!r} is no key of the KMS gcp, projects/P/locations/L/keyRings/R/cryptoKeys/K without a version"
            )
        client = self._connected()
        try:
            return self._ask(lambda: ask(client, key_id))
        except GoogleAPICallError as error:
            raise self._translated(error, action, key_id) from None
        except GoogleAuthError as error:
            raise _no_credentials(error) from None
        except _CorruptedError:
            raise self._refusal(action, repr(key_id), "CRC32C", "bytes change on the way, each time") from None

    @property
    def _timeout(self) -> float:
        return self._number(READ_MS) / 1000

    def _connect(self) -> Any:
        from google.api_core.client_options import ClientOptions
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import kms

        endpoint = self.properties.get(ENDPOINT)
        place = urlsplit(endpoint or "").netloc
        if endpoint and endpoint.startswith("http:") and on_this_machine(endpoint):  # no credentials go there
            import grpc
            from google.cloud.kms_v1.services.key_management_service import transports

            channel = grpc.insecure_channel(place)
            return kms.KeyManagementServiceClient(
                transport=transports.KeyManagementServiceGrpcTransport(channel=channel)
            )
        try:
            return kms.KeyManagementServiceClient(client_options=ClientOptions(api_endpoint=place or None))
        except GoogleAuthError as error:
            raise _no_credentials(error) from None

    def _disconnect(self, connection: Any) -> None:
        connection.transport.close()

    def _trouble(self, error: Exception) -> str | None:
        code, said = _code(error), str(getattr(error, "message", ""))
        if code == "DEADLINE_EXCEEDED" or (code == "UNAVAILABLE" and "failed to connect" in said):
            return UNREACHED
        return BUSY if code in BUSY_CODES or isinstance(error, _CorruptedError) else None

    def _translated(self, error: Any, action: str, key_id: str) -> IntegrityError | KeyAccessError:
        code = _code(error)
        if self._trouble(error) == UNREACHED:
            where = self.properties.get(ENDPOINT, "cloudkms.googleapis.com")
            return self._not_reached(where, repr(key_id), error, ENDPOINT)
        if code == "INVALID_ARGUMENT" and action == "Decrypt":
            return IntegrityError(
                f"a wrapped key is not what the Google key {key_id!r} wrapped ({code}): changed, or by another key"
            )
        named = VERSION_STATE.search(str(error.message)) if code == "FAILED_PRECONDITION" else None
        if named is not None and named[2] in STATES:
            return self._refusal(action, f"{key_id!r}, version {named[1]}", named[2], STATES[named[2]])
        advice = BUSY_ADVICE if code in BUSY_CODES else REFUSALS.get(code, "see what Google documents for it")
        return self._refusal(action, repr(key_id), code, advice.format(action=action))


class _CorruptedError(Exception):
    """The bytes that came are not those that went."""


def _code(error: Exception) -> str:
    status = getattr(error, "grpc_status_code", None)
    return str(status.name) if status is not None else type(error).__name__


def _no_credentials(error: Exception) -> KeyAccessError:
    return KeyAccessError(
        f"the KMS gcp cannot be called ({type(error).__name__}): set application default credentials, such as a "
        "file in GOOGLE_APPLICATION_CREDENTIALS"
    )
