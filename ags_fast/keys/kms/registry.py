"""Which client properties describe: the providers, and classes of users."""

from __future__ import annotations

from collections.abc import Mapping

from ags_fast.keys.kms.accounts import AUDIT_HOOK, named_hook
from ags_fast.keys.kms.client import (
    ALLOWED,
    Kms,
    KmsClient,
    allowed_patterns,
    cache_lifetime,
    call_rate,
    client_class,
    remembered,
)
from ags_fast.keys.kms.imports import KMS_IMPL, find_class
from ags_fast.keys.kms.names import check_kms_names

__all__ = ["KMS_TYPE", "PROVIDERS", "as_kms", "check_travels", "load_kms", "shared_client"]

KMS_TYPE = "encryption.kms-type"
PROVIDERS = {
    "local": "ags_fast.keys.kms.local:LocalKms",
    "aws": "ags_fast.keys.kms.aws:AwsKms",
    "gcp": "ags_fast.keys.kms.gcp:GcpKms",
    "azure": "ags_fast.keys.kms.azure:AzureKms",
    "vault": "ags_fast.keys.kms.vault:VaultKms",
    "pkcs11": "ags_fast.keys.kms.pkcs11:Pkcs11Kms",
}


def load_kms(properties: Mapping[str, str]) -> KmsClient:
    """Make the client that `properties` describe, without calling the KMS.

    ``encryption.kms-type`` is the name of a provider: ``local``, ``aws``, ``gcp``, ``azure``, ``vault`` or ``pkcs11``.
    ``encryption.kms-impl`` is a class of yours instead, ``module:Class``, with the methods `wrap_key` and `unwrap_key`:
    see `KmsClient`. The other properties are the provider's.

    Names that begin with ``encryption.``, ``kms.``, ``vault.`` or ``azure.keyvault.`` must be known, and be the chosen
    provider's. Of other names only a near miss is refused, so the properties of a catalog can be passed unchanged. A
    class of yours reads any name outside of ``encryption.``, unless its attribute ``property_names`` lists the names
    that it reads in these namespaces: then a mistyped name is refused there, too. A listed name that ends with a dot
    stands for all names that begin with it.

    ``encryption.allowed-key-ids``: patterns of the master keys that may be used, separated by commas, such as
    ``arn:aws:kms:*:1234:key/*``. Without this property every id goes to the KMS, also an id that a dataset names and
    that may be an attacker's key, if the KMS lets the caller use it: then the whole dataset can be the attacker's, too.

    ``kms.cache-lifetime-seconds`` (3600): how long a process keeps an unwrapped key. After that time the process asks
    the KMS again, which refuses keys that were revoked meanwhile. 0 keeps nothing.

    ``kms.max-calls-per-second``: how many calls the clients of these properties begin in this process, evenly spaced.

    ``kms.audit-hook``: a function, ``module:function``, called as `set_audit_hook` describes, in every process that has
    clients of these properties, workers of a job included. If the function raises, the caller gets UnaccountedError and
    no key.

    Args:
        properties: Names and values, both text. Put no secret into them: they travel to other processes.

    Raises:
        ValueError: Both or neither of the first two properties are given, the type or a name is unknown, or the
            provider misses a property.
        TypeError: A value is not text, or the class lacks `wrap_key` or `unwrap_key`.
        ImportError: The provider's optional dependency is missing.
    """
    properties = dict(properties)
    if not all(isinstance(text, str) for pair in properties.items() for text in pair):
        raise TypeError("KMS properties are text, names and values")
    kms_type, kms_impl = properties.get(KMS_TYPE), properties.get(KMS_IMPL)
    if (kms_type is None) == (kms_impl is None):
        raise ValueError(f"set {KMS_TYPE} ({', '.join(PROVIDERS)}) or {KMS_IMPL} (module:Class), one of the two")
    if kms_type is not None and kms_type not in PROVIDERS:
        raise ValueError(f"{KMS_TYPE} is {', '.join(PROVIDERS)}, not {kms_type!r}")
    if ALLOWED in properties and not allowed_patterns(properties):
        raise ValueError(f"{ALLOWED} allows no key: leave it out, or name some")
    call_rate(properties)
    cache_lifetime(properties)
    named_hook(properties.get(AUDIT_HOOK))
    impl = kms_impl or PROVIDERS[kms_type or ""]
    kind = find_class(impl)
    if not isinstance(kind, type):
        raise TypeError(f"{impl} is not a class")
    kind = client_class(kind)
    check_kms_names(properties, kind)
    return kind.with_properties(properties)


def as_kms(kms: Kms | None) -> KmsClient:
    """Return the client that an argument is, or that its properties describe.

    Raises:
        TypeError: The argument is neither a mapping, nor an object with the methods of a client.
    """
    if isinstance(kms, KmsClient):
        return kms
    if isinstance(kms, Mapping):
        return load_kms(kms)
    if not hasattr(kms, "unwrap_key"):
        raise TypeError(
            "kms is a mapping of properties, such as {'encryption.kms-type': 'local', ...}, or a client with the "
            f"methods wrap_key and unwrap_key, not {type(kms).__name__}"
        )
    return client_class(type(kms))(kms)  # type: ignore[call-arg, arg-type]  # a class for other objects takes one


def shared_client(kms: Kms) -> KmsClient:
    """Do as `as_kms`, with one client for all callers of this process with the same properties, such as Spark tasks."""
    return remembered(kms, load_kms) if isinstance(kms, Mapping) else as_kms(kms)


def check_travels(client: KmsClient) -> None:
    """Raise TypeError if other processes cannot make the same client from its properties."""
    kind, why = type(client), None
    try:
        properties = client.properties
        ours = [name for name in (KMS_IMPL, AUDIT_HOOK) if properties.get(name, "").startswith("__main__:")]
        if ours:
            why = f"{ours[0]} names the main script, which other processes do not have: move it to a module"
        elif type(made := load_kms(properties)) is not kind:
            why = f"its properties make a {type(made).__name__}: name the class in {KMS_IMPL}"
    except TypeError:
        why = f"it was not made from properties: name the class in {KMS_IMPL}"
    except (ValueError, ImportError) as error:
        why = str(error)
    if why is not None:
        raise TypeError(
            f"the KMS client {kind.__name__} cannot be sent to other processes: {why}. Pass as kms its properties, or "
            "what load_kms makes of them, or run the job in this process: engine=LocalEngine(0)"
        )
