"""AWS KMS. What is stored is the service's ciphertext, as Iceberg's Java client stores it: no encryption context."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ags_fast.errors import IntegrityError, KeyAccessError
from ags_fast.keys.kms import KmsClient, with_retries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["AwsKms"]

ENDPOINT = "kms.endpoint"
REGION = "client.region"
ALGORITHM = "kms.encryption-algorithm-spec"
CONNECT_MS = "kms.connect-timeout-ms"
READ_MS = "kms.read-timeout-ms"
ATTEMPTS = "kms.max-attempts"
SYMMETRIC = "SYMMETRIC_DEFAULT"
DEFAULTS = {CONNECT_MS: 2_000, READ_MS: 5_000, ATTEMPTS: 8}

# What AWS says, and what the caller can do about it. Of other errors only the code is shown: some messages quote what
# was sent, and that was a key.
REFUSALS = {
    "AccessDeniedException": "the caller may not: allow kms:{action} on this key in the key's policy or in IAM",
    "NotFoundException": f"there is no such key in this account and region: check the id and {REGION}",
    "DisabledException": "the key is disabled: enable it",
    "KMSInvalidStateException": "the key is pending deletion or import: cancel the deletion, or import its material",
    "InvalidKeyUsageException": f"the key is not one to encrypt with, or not by this {ALGORITHM}",
    "UnrecognizedClientException": "AWS does not know the caller's credentials",
    "InvalidSignatureException": "AWS does not accept the caller's credentials: is the secret right, and the clock?",
    "ExpiredTokenException": "the caller's credentials have expired: get new ones",
    "InvalidGrantTokenException": "the grant does not allow it",
    "UnsupportedOperationException": "this kind of key cannot do that",
}
QUOTED = ("AccessDeniedException", "NotFoundException", "DisabledException", "KMSInvalidStateException")
NOT_WHAT_WAS_WRAPPED = ("InvalidCiphertextException", "IncorrectKeyException")
BUSY = (
    "ThrottlingException",
    "Throttling",
    "ThrottledException",
    "TooManyRequestsException",
    "RequestLimitExceeded",
    "LimitExceededException",
    "KMSInternalException",
    "DependencyTimeoutException",
    "KeyUnavailableException",
    "InternalFailure",
    "ServiceUnavailable",
)


class AwsKms(KmsClient):
    """Wraps by Encrypt, Decrypt, ReEncrypt and GenerateDataKey.

    Properties: ``client.region``, ``kms.endpoint``, ``kms.encryption-algorithm-spec`` (SYMMETRIC_DEFAULT);
    ``kms.connect-timeout-ms`` (2000), ``kms.read-timeout-ms`` (5000), ``kms.max-attempts`` (8). Credentials come from
    where boto3 finds them: environment, profile, role. Key ids are key ids, ARNs or aliases.

    A service that is busy is asked again, up to ``kms.max-attempts`` times in some 10 seconds; one that cannot be
    reached, once more. Which rotation of a key wrapped something is known to AWS alone.
    """

    provider = "aws"
    supports_rewrap = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: tuple[int, Any] | None = None  # of which process

    @property
    def supports_key_generation(self) -> bool:  # type: ignore[override]
        return self._algorithm == SYMMETRIC

    @property
    def _algorithm(self) -> str:
        return self.properties.get(ALGORITHM, SYMMETRIC)

    def initialize(self, properties: Mapping[str, str]) -> None:
        for name in DEFAULTS:
            text = properties.get(name, "1")
            if not text.isdecimal() or int(text) < 1:
                raise ValueError(f"{name} is a whole number from 1, not {text!r}")
        endpoint = urlsplit(properties.get(ENDPOINT, "https://default"))
        if endpoint.scheme not in ("http", "https") or not endpoint.hostname:
            raise ValueError(f"{ENDPOINT} is a URL such as https://kms.example.com, not {properties[ENDPOINT]!r}")
        if endpoint.scheme == "http" and not _loopback(endpoint.hostname):
            raise ValueError(f"{ENDPOINT} must be https: keys would go to {endpoint.hostname} unencrypted")
        if importlib.util.find_spec("boto3") is None:
            raise ImportError("AWS KMS needs boto3: pip install 'ags_fast[aws]'")
        super().initialize(properties)

    def close(self) -> None:
        held, self._client = self._client, None
        if held is not None and held[0] == os.getpid():
            held[1].close()

    def _wrap(self, key: bytes, wrapping_key_id: str) -> bytes:
        request = {"KeyId": wrapping_key_id, "Plaintext": key, "EncryptionAlgorithm": self._algorithm}
        return self._call("encrypt", wrapping_key_id, request)["CiphertextBlob"]  # type: ignore[no-any-return]

    def _unwrap(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        request = {"KeyId": wrapping_key_id, "CiphertextBlob": wrapped, "EncryptionAlgorithm": self._algorithm}
        return self._call("decrypt", wrapping_key_id, request)["Plaintext"]  # type: ignore[no-any-return]

    def _generate(self, wrapping_key_id: str, length: int) -> tuple[bytes, bytes]:
        size = {"NumberOfBytes": length} if length == 24 else {"KeySpec": f"AES_{8 * length}"}
        answer = self._call("generate_data_key", wrapping_key_id, {"KeyId": wrapping_key_id, **size})
        return answer["Plaintext"], answer["CiphertextBlob"]

    def _rewrap(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        request = {
            "CiphertextBlob": wrapped,
            "SourceKeyId": wrapping_key_id,
            "SourceEncryptionAlgorithm": self._algorithm,
            "DestinationKeyId": wrapping_key_id,
            "DestinationEncryptionAlgorithm": self._algorithm,
        }
        return self._call("re_encrypt", wrapping_key_id, request)["CiphertextBlob"]  # type: ignore[no-any-return]

    def _call(self, method: str, key_id: str, request: dict[str, Any]) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError

        client = self._connected()
        call: Callable[..., dict[str, Any]] = getattr(client, method)
        try:
            with _unlogged():
                return with_retries(lambda: call(**request), _Patience(), attempts=self._number(ATTEMPTS))
        except ClientError as error:
            raise _translated(error, method, key_id) from None
        except BotoCoreError as error:
            raise KeyAccessError(
                f"the KMS aws at {client.meta.endpoint_url} was not reached for the key {key_id!r} "
                f"({type(error).__name__}): check the network, {ENDPOINT}, {REGION} and the credentials"
            ) from None

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None or self._client[0] != os.getpid():
                self._client = os.getpid(), self._connect()
            return self._client[1]

    def _connect(self) -> Any:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        config = Config(
            connect_timeout=self._number(CONNECT_MS) / 1000,
            read_timeout=self._number(READ_MS) / 1000,
            retries={
                "mode": "standard",
                "total_max_attempts": 1,
            },  # the retries are ours: botocore's would multiply them
        )
        try:
            client = boto3.session.Session().client(
                "kms",
                region_name=self.properties.get(REGION),
                endpoint_url=self.properties.get(ENDPOINT),
                config=config,
            )
        except (BotoCoreError, ValueError) as error:  # ValueError: an impossible endpoint
            raise KeyAccessError(
                f"the KMS aws cannot be called ({type(error).__name__}): set {REGION}, {ENDPOINT} and the credentials"
            ) from None
        _hide_debug_records()
        return client

    def _number(self, name: str) -> int:
        return int(self.properties.get(name, DEFAULTS[name]))


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Patience:
    """For `with_retries`: is it worth asking again, and after how many seconds."""

    def __init__(self) -> None:
        self._unreachable = 0

    def __call__(self, error: Exception) -> float | None:
        from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

        if isinstance(error, ClientError):
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return 0.1 if _code(error) in BUSY or status in (429, 500, 502, 503, 504) else None
        if isinstance(error, (ConnectionError, HTTPClientError)):
            self._unreachable += 1
            return 0.2 if self._unreachable == 1 else None
        return None


def _code(error: Any) -> str:
    return str(error.response["Error"].get("Code", "no code")).rpartition("#")[2]


def _translated(error: Any, method: str, key_id: str) -> IntegrityError | KeyAccessError:
    code = _code(error)
    if code in NOT_WHAT_WAS_WRAPPED:
        return IntegrityError(
            f"a wrapped key is not what the AWS key {key_id!r} wrapped ({code}): changed, or wrapped by another key"
        )
    action = "".join(part.capitalize() for part in method.split("_"))
    if code in BUSY:
        advice = "it stayed busy for all attempts: ask less often, or have the quota raised"
    else:
        advice = REFUSALS.get(code, "see what AWS documents for it").format(action=action)
    said = str(error.response["Error"].get("Message", ""))[:300] if code in QUOTED else ""
    quoted = f". AWS says: {said}" if said and said.isprintable() else ""
    return KeyAccessError(f"the KMS aws refused {action} with the key {key_id!r} ({code}): {advice}{quoted}")


# botocore logs requests and responses at level DEBUG, and here they hold keys.

_thread = threading.local()


@contextmanager
def _unlogged() -> Iterator[None]:
    _thread.calls = getattr(_thread, "calls", 0) + 1
    try:
        yield
    finally:
        _thread.calls -= 1


def _wanted(record: logging.LogRecord) -> bool:
    return record.levelno > logging.DEBUG or not getattr(_thread, "calls", 0)


def _hide_debug_records() -> None:
    for name in ("", ".auth", ".awsrequest", ".client", ".endpoint", ".hooks", ".httpsession", ".parsers", ".regions"):
        logger = logging.getLogger(f"botocore{name}")
        if _wanted not in logger.filters:
            logger.addFilter(_wanted)
