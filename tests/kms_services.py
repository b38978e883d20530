"""Each KMS with a server behind it, and an administrator, through the service's own client library."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import servers
from kms_clients import keystore

from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Service:
    """A KMS as the contract needs it: what it can do, and the administrator's actions."""

    name = ""
    generates = False
    rewraps = False
    tells_version = False  # by the bytes alone
    names_version = False  # in the answer to a wrap
    disables = True  # a single version; Vault disables all older versions, too
    destroys = True
    overhead = 0  # how many bytes longer a wrapped key is
    longest = 4096
    unknown = "no-such-key"
    impossible: tuple[str, ...] = ()  # ids that must not reach the service

    properties: dict[str, str]

    def new_key(self) -> str:
        raise NotImplementedError

    def rotate(self, key_id: str) -> None:
        raise NotImplementedError

    def version(self, key_id: str, number: int = 1) -> str:
        """As errors name it."""
        return str(number)

    def enable(self, key_id: str, enabled: bool, number: int = 1) -> None:
        """A version, by its number from 1."""
        raise NotImplementedError

    def destroy(self, key_id: str) -> None:
        """The first version."""
        raise NotImplementedError

    def open(self, wrapped: bytes, key_id: str) -> bytes:
        """Wrap by the library alone: the bytes on the wire are the service's own."""
        raise NotImplementedError

    def requests(self) -> int | None:
        """Return the requests since the last call, if the server counts them."""
        return None

    def fail(self, times: int) -> bool:
        """Answer this many requests as too busy. Return False if the server cannot be made to."""
        return False

    def deny(self, denied: bool) -> bool:
        return False


class Local(Service):
    name = "local"
    tells_version = True
    overhead = 33

    def __init__(self, folder: Path) -> None:
        self.properties = keystore(folder)

    def new_key(self) -> str:
        key_id = f"key {os.urandom(4).hex()}"
        local.create_key(self.properties, key_id)
        return key_id

    def rotate(self, key_id: str) -> None:
        local.rotate_key(self.properties, key_id)

    def enable(self, key_id: str, enabled: bool, number: int = 1) -> None:
        local.set_state(self.properties, key_id, "enabled" if enabled else "disabled", version=number)

    def destroy(self, key_id: str) -> None:
        local.set_state(self.properties, key_id, "destroyed", version=1)


class Aws(Service):
    """moto's server, which is made strict."""

    name = "aws"
    generates = rewraps = True
    disables = destroys = False  # of a rotated key, AWS can do that to no version
    unknown = "00000000-0000-0000-0000-000000000000"

    def __init__(self, url: str) -> None:
        boto3 = pytest.importorskip("boto3")
        self.url = url
        self.admin = boto3.client("kms", endpoint_url=url, region_name="us-east-1")
        self.properties = {"encryption.kms-type": "aws", "kms.endpoint": url, "client.region": "us-east-1"}

    def new_key(self) -> str:
        return str(self.admin.create_key()["KeyMetadata"]["KeyId"])

    def rotate(self, key_id: str) -> None:
        self.admin.rotate_key_on_demand(KeyId=key_id)

    def open(self, wrapped: bytes, key_id: str) -> bytes:
        plaintext: bytes = self.admin.decrypt(CiphertextBlob=wrapped)["Plaintext"]
        return plaintext

    def requests(self) -> int:
        return len(self.calls())

    def calls(self) -> list[tuple[str, list[str]]]:
        with urllib.request.urlopen(f"{self.url}/_strict/calls") as answer:
            return [(name, arguments) for name, arguments in json.load(answer)]

    def last(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/_strict/last") as answer:
            asked: dict[str, Any] = json.load(answer)
            return asked

    def fail_with(self, code: str, times: int) -> None:
        asked = urllib.request.Request(f"{self.url}/_strict/fail?code={code}&times={times}", method="POST")
        urllib.request.urlopen(asked).close()

    def fail(self, times: int) -> bool:
        self.fail_with("ThrottlingException", times)
        return True

    def deny(self, denied: bool) -> bool:
        self.fail_with("AccessDeniedException", 1 if denied else 0)
        return True


class Gcp(Service):
    """A fake under Google's own client."""

    name = "gcp"
    names_version = True
    ring = "projects/p/locations/global/keyRings/r"
    unknown = f"{ring}/cryptoKeys/none"
    impossible = (
        "key",
        f"{ring}/cryptoKeys/a/cryptoKeyVersions/1",
        f"{ring}/cryptoKeys/../x",
        f"{ring}/cryptoKeys/a?b",
    )

    def __init__(self, fake: Any) -> None:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import kms
        from google.cloud.kms_v1.services.key_management_service.transports import KeyManagementServiceRestTransport

        self.fake = fake
        place = fake.url.removeprefix("http://")
        transport = KeyManagementServiceRestTransport(host=place, url_scheme="http", credentials=AnonymousCredentials())
        self.admin = kms.KeyManagementServiceClient(transport=transport)
        self.properties = {"encryption.kms-type": "gcp", "kms.endpoint": fake.url}

    def new_key(self) -> str:
        made = self.admin.create_crypto_key(
            parent=self.ring,
            crypto_key_id=f"key-{os.urandom(4).hex()}",
            crypto_key={"purpose": 1},  # type: ignore[arg-type]
        )
        return str(made.name)

    def rotate(self, key_id: str) -> None:
        version = self.admin.create_crypto_key_version(parent=key_id, crypto_key_version={})  # type: ignore[arg-type]
        self.admin.update_crypto_key_primary_version(name=key_id, crypto_key_version_id=version.name.rpartition("/")[2])

    def enable(self, key_id: str, enabled: bool, number: int = 1) -> None:
        version = {"name": f"{key_id}/cryptoKeyVersions/{number}", "state": "ENABLED" if enabled else "DISABLED"}
        self.admin.update_crypto_key_version(crypto_key_version=version, update_mask={"paths": ["state"]})  # type: ignore[arg-type]

    def destroy(self, key_id: str) -> None:
        self.admin.destroy_crypto_key_version(name=f"{key_id}/cryptoKeyVersions/1")

    def open(self, wrapped: bytes, key_id: str) -> bytes:
        plaintext: bytes = self.admin.decrypt(request={"name": key_id, "ciphertext": wrapped}).plaintext
        return plaintext

    def requests(self) -> int:
        calls, self.fake.calls = self.fake.calls, []
        return len(calls)

    def fail(self, times: int) -> bool:
        self.fake.failures = ["UNAVAILABLE"] * times
        return True

    def deny(self, denied: bool) -> bool:
        self.fake.failures = ["PERMISSION_DENIED"] * denied
        return True


class Azure(Service):
    """A fake under Microsoft's own client."""

    name = "azure"
    names_version = True
    destroys = False  # a single version: only the key
    longest = 190
    impossible = ("a/b", "../secrets/x", "a?b", "a b", "https://elsewhere.vault.azure.net/keys/a")

    def __init__(self, fake: Any) -> None:
        from azure.keyvault.keys import KeyClient
        from kms_clients import VaultCredential
        from servers import fake_azure

        self.fake = fake
        provider = "adls.token-credential-provider"
        self.properties = {
            "encryption.kms-type": "azure",
            "azure.keyvault.url": fake.url,
            provider: "kms_clients:VaultCredential",
            f"{provider}.token": fake_azure.TOKEN,
        }
        credential = VaultCredential()
        credential.initialize({"token": fake_azure.TOKEN})
        self.admin = KeyClient(fake.url, credential, verify_challenge_resource=False, retry_total=0)
        self.versions: dict[str, list[str]] = {}

    def new_key(self) -> str:
        name = f"key-{os.urandom(4).hex()}"
        self.versions[name] = [self.admin.create_rsa_key(name, size=2048).properties.version]  # type: ignore[list-item]
        return name

    def rotate(self, key_id: str) -> None:
        self.versions[key_id].append(self.admin.rotate_key(key_id).properties.version)  # type: ignore[arg-type]

    def version(self, key_id: str, number: int = 1) -> str:
        return self.versions[key_id][number - 1]

    def enable(self, key_id: str, enabled: bool, number: int = 1) -> None:
        self.admin.update_key_properties(key_id, version=self.version(key_id, number), enabled=enabled)

    def open(self, wrapped: bytes, key_id: str) -> bytes:
        from azure.keyvault.keys.crypto import KeyWrapAlgorithm

        key: bytes = self.admin.get_cryptography_client(key_id).unwrap_key(KeyWrapAlgorithm.rsa_oaep_256, wrapped).key
        return key

    def requests(self) -> int:
        calls, self.fake.calls = self.fake.calls, []
        return len(calls)

    def fail(self, times: int) -> bool:
        self.fake.failures = [429] * times
        return True

    def deny(self, denied: bool) -> bool:
        self.fake.denied = {"get", "unwrapkey"} if denied else set()
        return True


class Vault(Service):
    """Vault itself."""

    name = "vault"
    generates = rewraps = tells_version = True
    impossible = ("a/b", "../../sys/seal", "a?b", "a b", ".")

    def __init__(self, url: str, token: str, folder: Path) -> None:
        import hvac

        self.url = url
        self.file = folder / "token"
        self.token = token
        self.file.write_text(token + "\n")
        self.properties = {
            "encryption.kms-type": "vault",
            "vault.address": url,
            "vault.token-file": str(self.file),
        }
        self.client = hvac.Client(url=url, token=token)
        self.admin = self.client.secrets.transit
        self.sent = 0
        self.throttled = False

    def new_key(self) -> str:
        name = f"key-{os.urandom(4).hex()}"
        self.admin.create_key(name)
        return name

    def rotate(self, key_id: str) -> None:
        self.admin.rotate_key(key_id)

    def enable(self, key_id: str, enabled: bool, number: int = 1) -> None:
        least = number if enabled else number + 1
        self.configure(key_id, least, least)

    def destroy(self, key_id: str) -> None:
        self.configure(key_id, 2, 2)  # Vault wants both before it trims
        self.admin.trim_key(key_id, 2)

    def configure(self, key_id: str, decrypt: int, encrypt: int) -> None:
        """The least versions that may. hvac's own method refuses the two to be equal."""
        config = {"min_decryption_version": decrypt, "min_encryption_version": encrypt}
        self.client.write_data(f"transit/keys/{key_id}/config", data=config)

    def open(self, wrapped: bytes, key_id: str) -> bytes:
        return base64.b64decode(self.admin.decrypt_data(key_id, wrapped.decode())["data"]["plaintext"])

    def requests(self) -> int:
        sent, self.sent = self.sent, 0
        return sent

    def fail(self, times: int) -> bool:
        """Answer all further requests of an hour as too busy: the first one uses up the quota."""
        if times:
            self.client.write_data("sys/quotas/rate-limit/busy", data={"rate": 1, "interval": "1h", "path": "transit/"})
            self.admin.list_keys()
        elif self.throttled:
            self.client.delete("sys/quotas/rate-limit/busy")
        self.throttled = times > 0
        return True

    def limited(self, rules: str) -> str:
        """A token under a policy of its own."""
        name = f"policy-{os.urandom(4).hex()}"
        self.client.sys.create_or_update_policy(name, rules)
        made = self.client.auth.token.create(policies=[name], ttl="1h", no_default_policy=True)
        return str(made["auth"]["client_token"])

    def deny(self, denied: bool) -> bool:
        self.file.write_text(
            self.limited('path "transit/hmac/*" { capabilities = ["update"] }') if denied else self.token
        )
        return True


class Pkcs11(Service):
    """SoftHSM, whose library is in this process."""

    name = "pkcs11"
    generates = tells_version = True
    overhead = 2 + 1 + 12 + 16

    def __init__(self, hsm: servers.Hsm, folder: Path) -> None:
        import pkcs11

        # In a thread that ends, as the client does it: what SoftHSM leaves there is taken for errors of TLS.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(pkcs11.lib, hsm.library).result()
        self.hsm = hsm
        self.file = folder / "pin"
        self.file.write_text(hsm.pin + "\n")
        self.properties = {
            "encryption.kms-type": "pkcs11",
            "kms.pkcs11.library": hsm.library,
            "kms.pkcs11.token-label": hsm.token,
            "kms.pkcs11.pin-file": str(self.file),
        }

    @contextlib.contextmanager
    def session(self) -> Iterator[Any]:
        """Return a session that may change objects. The process is logged in already, or stays logged in."""
        import pkcs11

        token = pkcs11.lib(self.hsm.library).get_token(token_label=self.hsm.token)
        with contextlib.suppress(pkcs11.exceptions.UserAlreadyLoggedIn):
            token.open(user_pin=self.hsm.pin)
        session = token.open(rw=True)
        yield session
        session.close()

    def add_version(self, key_id: str, number: bytes) -> None:
        from pkcs11 import Attribute, KeyType

        with self.session() as session:
            session.generate_key(
                KeyType.AES,
                256,
                label=key_id,
                id=number,
                store=True,
                template={Attribute.SENSITIVE: True, Attribute.EXTRACTABLE: False, Attribute.MODIFIABLE: True},
            )

    def new_key(self) -> str:
        key_id = f"clé {os.urandom(4).hex()}"
        self.add_version(key_id, b"\x01")
        return key_id

    def rotate(self, key_id: str) -> None:
        from pkcs11 import Attribute

        with self.session() as session:
            newest = max(one[Attribute.ID][0] for one in session.get_objects({Attribute.LABEL: key_id}))
        self.add_version(key_id, bytes([newest + 1]))

    def version(self, key_id: str, number: int = 1) -> str:
        return bytes([number]).hex()

    @contextlib.contextmanager
    def object(self, key_id: str, number: bytes) -> Iterator[Any]:
        from pkcs11 import Attribute

        with self.session() as session:
            (key,) = session.get_objects({Attribute.LABEL: key_id, Attribute.ID: number})
            yield key

    def enable(self, key_id: str, enabled: bool, number: int = 1) -> None:
        from pkcs11 import Attribute

        with self.object(key_id, bytes([number])) as key:
            key[Attribute.ENCRYPT] = key[Attribute.DECRYPT] = enabled

    def destroy(self, key_id: str) -> None:
        with self.object(key_id, b"\x01") as key:
            key.destroy()

    def open(self, wrapped: bytes, key_id: str) -> bytes:
        """CKA_ID of one byte only."""
        from pkcs11 import GCMParams, Mechanism

        head, nonce, sealed = wrapped[:3], wrapped[3:15], wrapped[15:]
        with self.object(key_id, head[2:]) as key:
            params = GCMParams(nonce, head + key_id.encode())
            return bytes(key.decrypt(sealed, mechanism=Mechanism.AES_GCM, mechanism_param=params))


def counting(vault: Vault) -> Callable[..., Any]:
    """How hvac sends a request, the administrator's too."""
    from requests.adapters import HTTPAdapter

    send = HTTPAdapter.send

    def counted(adapter: Any, request: Any, **options: Any) -> Any:
        vault.sent += request.url.startswith(vault.url)
        return send(adapter, request, **options)

    return counted


@contextlib.contextmanager
def started(name: str, folder: Path) -> Iterator[Service]:
    """A service of this name, with its server."""
    if name == "local":
        yield Local(folder)
    elif name == "aws":
        with servers.strict_moto() as url, pytest.MonkeyPatch.context() as environment:
            environment.setenv("AWS_ACCESS_KEY_ID", "test")
            environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
            yield Aws(url)
    elif name == "gcp":
        pytest.importorskip("google.cloud.kms")
        from servers.fake_gcp import FakeGcpKms

        fake = FakeGcpKms()
        service = Gcp(fake)
        try:
            yield service
        finally:
            service.admin.transport.close()
            fake.stop()
    elif name == "azure":
        pytest.importorskip("azure.keyvault.keys")
        from servers.fake_azure import FakeKeyVault

        vault = FakeKeyVault(folder)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("REQUESTS_CA_BUNDLE", str(vault.authority))
            try:
                yield Azure(vault)
            finally:
                vault.stop()
    elif name == "vault":
        token = os.urandom(12).hex()
        with servers.vault(token) as url, pytest.MonkeyPatch.context() as patches:
            vault = Vault(url, token, folder)  # type: ignore[assignment]
            patches.setattr("requests.adapters.HTTPAdapter.send", counting(vault))  # type: ignore[arg-type]
            yield vault  # type: ignore[misc]
    else:
        with servers.softhsm() as hsm:
            yield Pkcs11(hsm, folder)
