"""Azure Key Vault keys. A wrapped key is the service's result alone, as Iceberg's Java client stores it.

The result does not name the version of the key that wrapped it. So an unwrap tries the latest version first, and then
every older version that is enabled.
"""

from __future__ import annotations

import contextlib
import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ags_fast.errors import IntegrityError, KeyAccessError
from ags_fast.keys.kms.client import DeniedError, KeyVersion, Wrapped
from ags_fast.keys.kms.imports import find_class
from ags_fast.keys.kms.names import BY_PROVIDER
from ags_fast.keys.kms.service import CONNECT_MS, READ_MS, ServiceKms, on_this_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from azure.core.credentials import TokenCredential
    from azure.core.exceptions import HttpResponseError
    from azure.keyvault.keys import KeyClient, KeyProperties
    from azure.keyvault.keys.crypto import CryptographyClient, KeyWrapAlgorithm

__all__ = ["AzureKms"]

T = TypeVar("T")

URL = "azure.keyvault.url"
ALGORITHM = "azure.keyvault.key-wrap-algorithm"
CREDENTIALS = "adls.token-credential-provider"
ALGORITHMS = ("RSA-OAEP-256", "RSA-OAEP", "A256KW", "A192KW", "A128KW")  # not RSA1_5: a padding oracle opens it
VERSION = re.compile(r"[0-9A-Za-z]{1,64}")
KEY_NAME = re.compile(r"[A-Za-z0-9-]{1,127}")

REFUSALS = {
    "KeyDisabled": "enable this version",
    "KeyNotYetValid": "its activation date has not come",
    "KeyOperationForbidden": "the key's operations leave it out",
    "KeyExpired": "it has expired: make a new version, or move its date",
    "ForbiddenByFirewall": "the vault's firewall refuses this machine",
    "ObjectIsDeletedButRecoverable": "the key was deleted: recover it",
    "KeyNotFound": "there is no such key in this vault: check the name and azure.keyvault.url, or recover the key",
    "Unauthorized": "the vault does not accept the caller's token: is it for this tenant?",
}
OTHER_CODES = ("BadParameter", "Forbidden", "ForbiddenByPolicy", "ForbiddenByRbac", "AccessDenied", "Throttled")
NOT_ALLOWED = "the caller may not: allow keys/{action} in the vault's access policy or by a role"


class AzureKms(ServiceKms["_Vault"]):
    """Wraps keys with keys of an Azure Key Vault. Key ids are names of keys.

    To wrap, the caller needs keys/get and keys/wrapKey. To unwrap, the caller needs keys/get, keys/unwrapKey and, for
    older versions, keys/list. RSA wraps locally with the public key, so a wrapped key does not prove who wrapped it.

    Properties, besides those of ServiceKms:

    - ``azure.keyvault.url``: the vault.
    - ``azure.keyvault.key-wrap-algorithm`` (RSA-OAEP-256): the algorithm.
    - ``adls.token-credential-provider``: a class, ``module:Class``, whose ``credential()`` returns a TokenCredential.
      If the class has ``initialize``, that gets the properties that begin with this name and a dot, without these. By
      default the credential is azure.identity's DefaultAzureCredential.
    """

    provider = "azure"
    property_names = BY_PROVIDER[provider]
    packages = ("azure.keyvault.keys",)
    endpoint_property = URL
    check = f"{URL} and the credentials"
    loggers = (
        "azure.core.pipeline.policies.http_logging_policy",
        "azure.core.pipeline.policies._universal",
        "azure.keyvault.keys._generated._model_base",
        "azure.keyvault.keys._generated._serialization",
        "azure.keyvault.keys._generated._utils.model_base",
        "azure.keyvault.keys._generated._utils.serialization",
    )

    def initialize(self, properties: Mapping[str, str]) -> None:
        """As `KmsClient` has it."""
        if not properties.get(URL):
            raise ValueError(f"set {URL}: the vault, such as https://my-vault.vault.azure.net")
        if not properties[URL].startswith("https:"):
            raise ValueError(f"{URL} must be https: the vault takes no tokens otherwise")
        if properties.get(ALGORITHM, ALGORITHMS[0]) not in ALGORITHMS:
            raise ValueError(f"{ALGORITHM} is one of {', '.join(ALGORITHMS)}, not {properties[ALGORITHM]!r}")
        super().initialize(properties)

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        """As `KmsClient` has it."""
        deadline, vault = self._deadline(), self._vault(wrapping_key_id)
        version = self._newest(vault, wrapping_key_id, deadline)
        wrap = partial(vault.crypto(wrapping_key_id, version).wrap_key, self._algorithm, key)
        result = self._request("wrapKey", wrapping_key_id, version, wrap, deadline)
        return Wrapped.by(result.encrypted_key, version)

    def current_version(self, wrapping_key_id: str) -> str:
        """As `KmsClient` has it."""
        return self._newest(self._vault(wrapping_key_id), wrapping_key_id, self._deadline(), to="unwrapKey")

    def versions(self, wrapping_key_id: str) -> list[KeyVersion]:
        """As `KmsClient` has it."""
        with contextlib.suppress(DeniedError):
            return [
                KeyVersion(
                    _checked(one.version),
                    int(one.created_on.timestamp() * 1000) if one.created_on else None,
                    "ENABLED" if one.enabled else "DISABLED",
                )
                for one in self._listed(self._vault(wrapping_key_id), wrapping_key_id, self._deadline())
            ]
        return []

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        """As `KmsClient` has it."""
        deadline, vault = self._deadline(), self._vault(wrapping_key_id)
        known = vault.newest.get(wrapping_key_id)
        newest = known or self._newest(vault, wrapping_key_id, deadline, to="unwrapKey")
        key = self._opened(vault, wrapped, wrapping_key_id, newest, deadline)
        if key is not None:
            return key
        tried, disabled = [newest], []
        for one in self._listed(vault, wrapping_key_id, deadline):
            version = _checked(one.version)
            if not one.enabled:
                disabled.append(version)
            elif version not in tried:
                if time.monotonic() > deadline:
                    advice = f"only {len(tried)} versions were tried"
                    raise self._refusal("unwrapKey", repr(wrapping_key_id), "kms.call-budget-ms", advice)
                key = self._opened(vault, wrapped, wrapping_key_id, version, deadline)
                if key is not None:
                    return key
                tried.append(version)
        if known is not None:  # of an earlier call: if the key was deleted since, say so
            self._newest(vault, wrapping_key_id, deadline, to="unwrapKey")
        if disabled:
            raise KeyAccessError(
                f"no enabled version of the Azure key {wrapping_key_id!r} unwraps this, and these are disabled: "
                f"{', '.join(disabled)}. Enable the one that wrapped it, if its bytes were not changed"
            )
        raise IntegrityError(
            f"a wrapped key is not what any version of the Azure key {wrapping_key_id!r} wrapped: changed, or wrapped "
            f"by another key. Tried: {', '.join(tried)}"
        )

    def _opened(self, vault: _Vault, wrapped: bytes, name: str, version: str, deadline: float) -> bytes | None:
        from azure.core.exceptions import HttpResponseError

        try:
            unwrap = partial(vault.crypto(name, version).unwrap_key, self._algorithm, wrapped)
            result = self._request("unwrapKey", name, version, unwrap, deadline, quiet=True)
        except HttpResponseError as error:
            if self._code(error) and (error.status_code == 400 or _codes(error)[-1] in ("KeyDisabled", "KeyNotFound")):
                return None
            raise self._translated(error, "unwrapKey", name, version) from None
        if not isinstance(result.key, bytes):
            raise ValueError  # not an answer of Azure's
        return result.key

    def _newest(
        self, vault: _Vault, name: str, deadline: float, *, to: Literal["wrapKey", "unwrapKey"] = "wrapKey"
    ) -> str:
        """Return the vault's latest version. To wrap, it must be enabled, which Azure's package does not check."""
        found = self._request("get", name, None, lambda: vault.keys.get_key(name), deadline).properties
        if to == "wrapKey":
            now = time.time()
            refused = None
            if not found.enabled:
                refused = "KeyDisabled"
            elif found.not_before is not None and found.not_before.timestamp() > now:
                refused = "KeyNotYetValid"
            elif found.expires_on is not None and found.expires_on.timestamp() <= now:
                refused = "KeyExpired"
            if refused is not None:
                raise self._refusal(to, f"{name!r}, version {found.version}", refused, REFUSALS[refused])
        vault.newest[name] = _checked(found.version)
        return vault.newest[name]

    def _listed(self, vault: _Vault, name: str, deadline: float) -> list[KeyProperties]:
        found = self._request(
            "list", name, None, lambda: list(vault.keys.list_properties_of_key_versions(name)), deadline
        )
        found.sort(key=lambda one: one.created_on.timestamp() if one.created_on else 0, reverse=True)
        return found

    def _request(
        self, action: str, name: str, version: str | None, ask: Callable[[], T], deadline: float, *, quiet: bool = False
    ) -> T:
        from azure.core.exceptions import HttpResponseError

        try:
            return self._ask(ask, deadline)
        except HttpResponseError as error:
            if quiet and error.status_code:
                raise
            raise self._translated(error, action, name, version) from None

    @property
    def _algorithm(self) -> KeyWrapAlgorithm:
        from azure.keyvault.keys.crypto import KeyWrapAlgorithm

        return KeyWrapAlgorithm(self.properties.get(ALGORITHM, ALGORITHMS[0]))

    def _vault(self, name: str) -> _Vault:
        if not KEY_NAME.fullmatch(name):
            raise KeyAccessError(
                f"{name!r} is not a key id of the KMS azure: name a key of the vault, without URL and version"
            )
        return self._connected()

    def _connect(self) -> _Vault:
        from azure.keyvault.keys import KeyClient

        url = self.properties[URL]
        return _Vault(
            KeyClient(
                url,
                self._credential(),
                retry_total=0,  # the package's retries would multiply ours
                permit_redirects=False,  # a redirect would take the token, and what is sent, to another host
                connection_timeout=self._number(CONNECT_MS) / 1000,
                read_timeout=self._number(READ_MS) / 1000,
                verify_challenge_resource=not on_this_machine(url),
            )
        )

    def _credential(self) -> TokenCredential:
        impl = self.properties.get(CREDENTIALS)
        if impl is None:
            try:
                from azure.identity import DefaultAzureCredential
            except ImportError:
                raise KeyAccessError(
                    f"the KMS azure needs a credential: set {CREDENTIALS}, or pip install azure-identity"
                ) from None
            return DefaultAzureCredential()
        maker = find_class(impl, CREDENTIALS)()
        if hasattr(maker, "initialize"):
            begin = f"{CREDENTIALS}."
            maker.initialize({n[len(begin) :]: text for n, text in self.properties.items() if n.startswith(begin)})
        credential: TokenCredential = maker.credential()
        return credential

    def _disconnect(self, connection: _Vault) -> None:
        connection.keys.close()

    def _code(self, error: Any) -> str:
        return "/".join(_codes(error)) if getattr(getattr(error, "error", None), "code", None) else ""

    def _translated(self, error: HttpResponseError, action: str, name: str, version: str | None) -> KeyAccessError:
        key = repr(name) if version is None else f"{name!r}, version {version}"
        if error.status_code is None:  # no request was sent
            advice = f"no credential gives a token: set {CREDENTIALS}, or what azure.identity looks for"
            return self._refusal(action, key, "no token", advice)
        advice = next((REFUSALS[code] for code in reversed(_codes(error)) if code in REFUSALS), "")
        if error.status_code == 400:
            advice = f"a key of this type cannot do that, or not with this {ALGORITHM}, or not with that many bytes"
        elif error.status_code == 403:
            advice = advice or NOT_ALLOWED.format(action=action)
        denied = error.status_code == 403
        return self._failed(error, action, key, advice or "see what Azure documents for it", denied=denied)


class _Vault:
    def __init__(self, keys: KeyClient) -> None:
        self.keys = keys
        self.newest: dict[str, str] = {}
        self._crypto: dict[tuple[str, str], CryptographyClient] = {}

    def crypto(self, name: str, version: str) -> CryptographyClient:
        found = self._crypto.get((name, version))
        if found is None:
            found = self._crypto[name, version] = self.keys.get_cryptography_client(name, key_version=version)
        return found


def _checked(version: object) -> str:
    if not isinstance(version, str) or not VERSION.fullmatch(version):
        raise ValueError  # not an answer of Azure's
    return version


def _codes(error: HttpResponseError) -> list[str]:
    """Return the status, the service's code if it has one, and its inner code if it has one."""
    told = getattr(error, "error", None)
    inner = getattr(told, "innererror", None)
    said = getattr(told, "code", None), inner.get("code") if isinstance(inner, dict) else None
    status = str(error.status_code) if error.status_code else type(error).__name__
    return [status, *(code for code in said if code in REFUSALS or code in OTHER_CODES)]
