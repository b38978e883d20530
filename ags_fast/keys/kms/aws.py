"""AWS KMS.

A wrapped key is the service's ciphertext, as Iceberg's Java client stores it. It has an encryption context only if the
properties name one.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

from ags_fast.errors import IntegrityError, KeyAccessError
from ags_fast.fs.answers import asked_wait, in_words
from ags_fast.keys.kms.client import ALLOWED, CONTEXT, DeniedError, KeyVersion, Wrapped, context_of
from ags_fast.keys.kms.names import BY_PROVIDER
from ags_fast.keys.kms.service import BUSY, CONNECT_MS, ENDPOINT, READ_MS, ServiceKms, Told

if TYPE_CHECKING:
    from collections.abc import Mapping

    from boto3.session import Session
    from botocore.config import Config
    from botocore.exceptions import ClientError

__all__ = ["AwsKms"]

REGION = "client.region"
ALGORITHM = "kms.encryption-algorithm-spec"
SYMMETRIC = "SYMMETRIC_DEFAULT"
PROFILE = "client.profile-name"
GRANTS = "kms.grant-tokens"
ROLE = "client.assume-role.arn"
ROLE_EXTERNAL_ID = "client.assume-role.external-id"
ROLE_REGION = "client.assume-role.region"
ROLE_SECONDS = "client.assume-role.timeout-sec"
ROLE_SESSION = "client.assume-role.session-name"
ROLE_TAGS = "client.assume-role.tags."

# AWS's error codes, and what the caller can do about each. AWS's messages are not shown: some quote the request, which
# holds a key.
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
NOT_WHAT_WAS_WRAPPED = ("InvalidCiphertextException", "IncorrectKeyException")
DENIED = ("AccessDeniedException", "UnsupportedOperationException")
MATERIAL_ID = re.compile(r"[0-9a-f]{64}")
MATERIAL_STATES = ("CURRENT", "NON_CURRENT", "PENDING_ROTATION", "PENDING_MULTI_REGION_IMPORT_AND_ROTATION")
CODE = re.compile(r"[A-Z][A-Za-z]{2,48}Exception")
ALIAS = re.compile(r"(^|:)alias/")
MRK_ARN = re.compile(r"(arn:aws[a-z-]*:kms:)([a-z0-9-]+)(:[0-9]{12}:key/mrk-[A-Za-z0-9-]{1,64})")
KEY_ARN = re.compile(r"arn:aws[a-z-]{0,16}:kms:[a-z0-9-]{1,32}:[0-9]{12}:key/[A-Za-z0-9-]{1,64}")
BUSY_CODES = (
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


class AwsKms(ServiceKms[Any]):
    """Wraps keys with AWS KMS: Encrypt, Decrypt, ReEncrypt and GenerateDataKey.

    Key ids are key ids, ARNs or aliases. The ARN of a multi-region key stands for its replica in the client's region.

    Properties, besides those of ServiceKms:

    - ``client.region`` and ``kms.endpoint``: where the service is.
    - ``kms.encryption-algorithm-spec`` (SYMMETRIC_DEFAULT): the algorithm.
    - ``kms.grant-tokens``: grant tokens, separated by commas.
    - ``kms.encryption-context.NAME``: one entry of the encryption context. See `KmsClient.for_dataset`.
    - ``client.profile-name``: the profile with the credentials. By default boto3 finds credentials as it always does.
    - ``client.assume-role.arn``, and Iceberg's other properties of this prefix: a role to assume with the credentials.
    """

    provider = "aws"
    property_names = BY_PROVIDER[provider]
    packages = ("boto3",)
    loggers = (
        "botocore",
        "botocore.auth",
        "botocore.awsrequest",
        "botocore.client",
        "botocore.endpoint",
        "botocore.hooks",
        "botocore.httpsession",
        "botocore.parsers",
        "botocore.regions",
    )
    again = BUSY_CODES
    check = f"{ENDPOINT}, {REGION} and the credentials"

    @property
    def supports_key_generation(self) -> bool:  # type: ignore[override]
        """Whether the algorithm is symmetric: only such keys generate."""
        return self._algorithm == SYMMETRIC

    @property
    def _algorithm(self) -> str:
        return self.properties.get(ALGORITHM, SYMMETRIC)

    def initialize(self, properties: Mapping[str, str]) -> None:
        """As `KmsClient` has it."""
        role = properties.get(ROLE)
        if role is None and (given := [name for name in properties if name.startswith("client.assume-role.")]):
            raise ValueError(f"{given[0]} is about a role: name it in {ROLE}, or omit that")
        seconds = properties.get(ROLE_SECONDS, "3600")
        if not (seconds.isascii() and seconds.isdecimal() and 900 <= int(seconds) <= 43200):
            raise ValueError(f"{ROLE_SECONDS} is a number of seconds from 900 to 43200, not {seconds!r}")
        context = context_of(properties)
        if context and properties.get(ALGORITHM, SYMMETRIC) != SYMMETRIC:
            raise ValueError(f"only a symmetric key takes an encryption context: omit {CONTEXT}* or {ALGORITHM}")
        if bad := [name for name, text in context.items() if not text or name.startswith("aws:")]:
            raise ValueError(f"{CONTEXT}{bad[0]}: a context has texts that are not empty, and no names of AWS's")
        super().initialize(properties)

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        """As `KmsClient` has it."""
        request = {"Plaintext": key, **self._one_key(wrapping_key_id)}
        return _blob(self._call("encrypt", wrapping_key_id, request))

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        """As `KmsClient` has it."""
        request = {"CiphertextBlob": wrapped, **self._one_key(wrapping_key_id)}
        return _blob(self._call("decrypt", wrapping_key_id, request), "Plaintext")

    def generate_key(self, wrapping_key_id: str, length: int) -> tuple[bytes, bytes]:
        """As `KmsClient` has it."""
        size = {"NumberOfBytes": length} if length == 24 else {"KeySpec": f"AES_{8 * length}"}
        request = {**self._one_key(wrapping_key_id), **size}
        del request["EncryptionAlgorithm"]
        answer = self._call("generate_data_key", wrapping_key_id, request)
        return _blob(answer, "Plaintext"), Wrapped.by(_blob(answer), _material(answer, "KeyMaterialId"))

    def rewrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        """As `KmsClient` has it."""
        one = self._one_key(wrapping_key_id)
        shared = {"GrantTokens": one.pop("GrantTokens")} if "GrantTokens" in one else {}
        sides = {f"{side}{name}": value for side in ("Source", "Destination") for name, value in one.items()}
        request = {"CiphertextBlob": wrapped, **sides, **shared}
        answer = self._call("re_encrypt", wrapping_key_id, request)
        return Wrapped.by(_blob(answer), _material(answer, "DestinationKeyMaterialId"))

    def current_version(self, wrapping_key_id: str) -> str | None:
        """As `KmsClient` has it."""
        answer = self._described("describe_key", wrapping_key_id)
        return _material(answer.get("KeyMetadata", {}), "CurrentKeyMaterialId")

    def versions(self, wrapping_key_id: str) -> list[KeyVersion]:
        """List what the key's rotations have made. AWS lists rotations of a key, not of an alias."""
        if ALIAS.search(wrapping_key_id):
            return []
        found: list[KeyVersion] = []
        more: dict[str, Any] = {"IncludeKeyMaterial": "ALL_KEY_MATERIAL"}
        while more:
            answer = self._described("list_key_rotations", wrapping_key_id, **more)
            for one in answer.get("Rotations", ()):
                when, state = one.get("RotationDate"), one.get("KeyMaterialState")
                made_ms = None if when is None else int(when.timestamp() * 1000)
                state = state if state in MATERIAL_STATES else None
                found.append(KeyVersion(_material(one, "KeyMaterialId"), made_ms, state))
            more = {**more, "Marker": answer["NextMarker"]} if answer.get("Truncated") else {}
        return found

    def _described(self, method: str, key_id: str, **more: Any) -> dict[str, Any]:
        with contextlib.suppress(DeniedError):
            return self._call(method, key_id, {"KeyId": self._one_key(key_id)["KeyId"], **more})
        return {}

    def _one_key(self, key_id: str) -> dict[str, Any]:
        given: dict[str, Any] = {"KeyId": key_id, "EncryptionAlgorithm": self._algorithm}
        if (parts := MRK_ARN.fullmatch(key_id)) is not None:
            given["KeyId"] = parts[1] + self._connected().meta.region_name + parts[3]
        return given | self._every

    @property
    def _every(self) -> dict[str, Any]:
        tokens = [stripped for token in self.properties.get(GRANTS, "").split(",") if (stripped := token.strip())]
        context = context_of(self.properties)
        return ({"EncryptionContext": context} if context else {}) | ({"GrantTokens": tokens} if tokens else {})

    def _call(self, method: str, key_id: str, request: dict[str, Any]) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

        client, deadline = self._connected(), self._deadline()

        def ask() -> dict[str, Any]:
            try:
                answer: dict[str, Any] = getattr(client, method)(**request)
            except HTTPClientError as error:
                if type(error) is not HTTPClientError:
                    raise
                raise ValueError from None  # botocore did not understand the answer
            if answer["ResponseMetadata"]["HTTPStatusCode"] != 200:
                raise ValueError  # botocore takes 300 for a success
            return answer

        try:
            return self._ask(ask, deadline)
        except ClientError as error:
            if self._code(error) == "IncorrectKeyException" and ALIAS.search(key_id):
                raise self._alias_moved(key_id, request["CiphertextBlob"], deadline) from None
            raise self._translated(error, method, key_id) from None
        except BotoCoreError as error:
            raise error if in_words(error) else _unready() from None

    def _alias_moved(self, key_id: str, wrapped: bytes, deadline: float) -> KeyAccessError:
        """Return an error that names the key which wrapped. Only AWS can read that key's name, in answer to a Decrypt.

        Without the name if the caller limits which keys may be used, since this Decrypt may use any key.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        client, named = self._connected(), ""
        if ALLOWED not in self.properties and self._algorithm == SYMMETRIC:
            with contextlib.suppress(BotoCoreError, ClientError, KeyError):
                named = str(self._ask(lambda: client.decrypt(CiphertextBlob=wrapped, **self._every), deadline)["KeyId"])
        old = named if KEY_ARN.fullmatch(named) else "the key that it pointed to before"
        return KeyAccessError(
            f"the AWS alias {key_id!r} points to another key than the one that wrapped this, {old}: point the alias "
            "back to that, move to a key's id with `ags-fast keys rotate --what mek --wrapping-key-id ID`, and name "
            "keys by their ids or ARNs from then on"
        )

    def _connect(self) -> Any:
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        config = Config(
            connect_timeout=self._number(CONNECT_MS) / 1000,
            read_timeout=self._number(READ_MS) / 1000,
            retries={"mode": "standard", "total_max_attempts": 1},  # botocore's retries would multiply ours
        )
        try:
            return self._session(config).client(
                "kms",
                region_name=self.properties.get(REGION) or self.properties.get(ROLE_REGION),
                endpoint_url=self.properties.get(ENDPOINT),
                config=config,
            )
        except (BotoCoreError, ValueError):  # ValueError: an impossible endpoint
            raise _unready() from None

    def _session(self, config: Config) -> Session:
        import boto3
        import botocore.session
        from botocore.credentials import CredentialProvider, DeferredRefreshableCredentials

        session = boto3.session.Session(profile_name=self.properties.get(PROFILE))
        if ROLE not in self.properties:
            return session

        name = "ags-fast-assume-role"
        credentials = DeferredRefreshableCredentials(lambda: self._taken_on(session, config), name)
        members = {"METHOD": name, "CANONICAL_NAME": name, "load": lambda _: credentials}
        of_role = botocore.session.Session()
        of_role.get_component("credential_provider").insert_before(
            "env", type("RoleProvider", (CredentialProvider,), members)()
        )
        return boto3.session.Session(botocore_session=of_role)

    def _taken_on(self, session: Session, config: Config) -> dict[str, str]:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        given = self.properties
        request: dict[str, Any] = {
            "RoleArn": given[ROLE],
            "RoleSessionName": given.get(ROLE_SESSION, "ags_fast"),
            "DurationSeconds": int(given.get(ROLE_SECONDS, "3600")),
        }
        if ROLE_EXTERNAL_ID in given:
            request["ExternalId"] = given[ROLE_EXTERNAL_ID]
        tags = {name[len(ROLE_TAGS) :]: text for name, text in given.items() if name.startswith(ROLE_TAGS)}
        if tags:
            request["Tags"] = [{"Key": name, "Value": text} for name, text in tags.items()]
        try:
            region = given.get(ROLE_REGION) or given.get(REGION)
            made = session.client("sts", region_name=region, config=config).assume_role(**request)["Credentials"]
            return {
                "access_key": made["AccessKeyId"],
                "secret_key": made["SecretAccessKey"],
                "token": made["SessionToken"],
                "expiry_time": made["Expiration"].isoformat(),
            }
        except (BotoCoreError, ClientError, ResponseParserError, KeyError) as error:
            if self._trouble(error) == BUSY:
                raise  # to be tried again
            told = self._told(error)
            code = f"{told.code} status {told.status}".strip() if told else "no answer of AWS STS"
        raise KeyAccessError(
            f"the KMS aws was not called: the role {given[ROLE]!r} could not be assumed ({code}). Allow "
            "sts:AssumeRole to the caller, and trust the caller in the role"
        )

    def _disconnect(self, connection: Any) -> None:
        connection.close()

    @property
    def _where(self) -> str:
        return str(self._connected().meta.endpoint_url)

    def _code(self, error: Any) -> str:
        code = str(error.response["Error"].get("Code", "")).rpartition("#")[2]
        return code if code in BUSY_CODES or CODE.fullmatch(code) else ""

    def _told(self, error: Any) -> Told | None:
        answer = (getattr(error, "response", None) or {}).get("ResponseMetadata")
        if answer is None:
            return None
        return Told(answer["HTTPStatusCode"], self._code(error), asked_wait(answer["HTTPHeaders"].get("retry-after")))

    def _translated(self, error: ClientError, method: str, key_id: str) -> IntegrityError | KeyAccessError:
        code = self._code(error)
        if code in NOT_WHAT_WAS_WRAPPED:
            return IntegrityError(
                f"a wrapped key is not what the AWS key {key_id!r} wrapped ({code}): changed, or wrapped by another key"
                " or under another encryption context"
            )
        action = "".join(part.capitalize() for part in method.split("_"))
        advice = REFUSALS.get(code, "see what AWS documents for it").format(action=action)
        return self._failed(error, action, repr(key_id), advice, denied=code in DENIED)


def _unready() -> KeyAccessError:
    return KeyAccessError(f"the KMS aws cannot be called: set {REGION}, {ENDPOINT}, and the credentials or {PROFILE}")


def _blob(answer: Mapping[str, Any], name: str = "CiphertextBlob") -> bytes:
    if not isinstance(answer[name], bytes):
        raise TypeError  # not an answer of AWS's
    return answer[name]  # type: ignore[no-any-return]


def _material(answer: Mapping[str, Any], name: str) -> str | None:
    """Return the id of the material that a rotation made, 64 hexadecimal digits, if the answer has one."""
    text = answer.get(name)
    return text if isinstance(text, str) and MATERIAL_ID.fullmatch(text) else None
