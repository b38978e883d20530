"""The names of all properties, and the check that a client reads each of them.

A mistyped name must not pass: ``encryption.allowed-key-id`` would leave out the guard of
``encryption.allowed-key-ids``.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["BY_PROVIDER", "COMMON", "ELSEWHERE", "SERVICE", "check_names"]

# The one table. A name that ends with a dot stands for all that begin with it.

COMMON = frozenset(  # of every client
    {
        "encryption.allowed-key-ids",
        "encryption.kms-impl",
        "encryption.kms-type",
        "kms.audit-hook",
        "kms.cache-lifetime-seconds",
        "kms.max-calls-per-second",
    }
)
SERVICE = frozenset(  # of every client of a service
    {"kms.call-budget-ms", "kms.connect-timeout-ms", "kms.max-attempts", "kms.read-timeout-ms"}
)
BY_PROVIDER: dict[str, frozenset[str]] = {
    "local": frozenset(
        {"kms.local.key-file", "kms.local.passphrase-env", "kms.local.passphrase-file", "kms.local.path"}
    ),
    "aws": SERVICE
    | {
        "client.assume-role.arn",
        "client.assume-role.external-id",
        "client.assume-role.region",
        "client.assume-role.session-name",
        "client.assume-role.tags.",
        "client.assume-role.timeout-sec",
        "client.profile-name",
        "client.region",
        "kms.encryption-algorithm-spec",
        "kms.encryption-context.",
        "kms.endpoint",
        "kms.grant-tokens",
    },
    "gcp": SERVICE
    | {
        "gcs.impersonate.delegates",
        "gcs.impersonate.lifetime-seconds",
        "gcs.impersonate.service-account",
        "kms.endpoint",
    },
    "azure": SERVICE
    | {
        "adls.token-credential-provider",
        "adls.token-credential-provider.",
        "azure.keyvault.key-wrap-algorithm",
        "azure.keyvault.url",
    },
    "vault": SERVICE
    | {
        "vault.address",
        "vault.auth-method",
        "vault.auth-mount",
        "vault.auth-role",
        "vault.ca-file",
        "vault.client-cert-file",
        "vault.client-key-file",
        "vault.jwt-file",
        "vault.namespace",
        "vault.role-id",
        "vault.secret-id-env",
        "vault.secret-id-file",
        "vault.token-env",
        "vault.token-file",
        "vault.transit-mount",
    },
    "pkcs11": frozenset(  # without timeouts, which do not apply to a library
        {
            "kms.call-budget-ms",
            "kms.max-attempts",
            "kms.pkcs11.library",
            "kms.pkcs11.pin-env",
            "kms.pkcs11.pin-file",
            "kms.pkcs11.token-label",
        }
    ),
}
# Properties of Iceberg's catalogs and tables in the same namespaces, or with names near ours: accepted, and not read.
ELSEWHERE = frozenset(
    {
        "client.role-session-name",
        "encryption.data-key-length",
        "encryption.key-id",
        "gcs.impersonate.scopes",
        "kms.data-key-spec",
    }
)

# Every name in OURS must be known. Other software uses namespaces such as ``client.`` and ``s3.``, too: there a name is
# refused only if it looks like a mistyped name of ours.
OURS = ("encryption.", "kms.", "azure.keyvault.", "vault.")
SHARED = ("client.", "adls.", "gcs.impersonate.")
ALIKE, ALIKE_IN_SHARED, ALIKE_TO_SHOW = 0.9, 0.8, 0.6  # difflib's ratio; below it, a name is another name


def check_names(properties: Mapping[str, str], kind: type[Any]) -> None:
    """Refuse names that no client of this class reads, and that are mistyped or belong to another client.

    A class reads the names that it and its bases list in ``property_names``. It refuses the names of secrets by itself.
    A class that lists nothing may read any name, except in ``encryption.``.

    Raises:
        ValueError: Such a name is given; the message names it.
    """
    lists = ("property_names", "secret_properties")
    listed = {name for base in kind.__mro__ for given in lists for name in vars(base).get(given) or ()}
    taken = COMMON | ELSEWHERE | listed
    strict = OURS if getattr(kind, "property_names", None) is not None else OURS[:1]
    chosen = properties.get("encryption.kms-type") or kind.__name__
    hint = "" if chosen in BY_PROVIDER else f" ({chosen} may list names that it reads in its property_names)"
    for name in properties:
        if _stands_in(name, taken):
            continue
        plain = name.strip().lower().replace("_", "-")
        ours = plain.startswith(strict)
        readers = [provider for provider, names in BY_PROVIDER.items() if _stands_in(name, names)]
        if readers and ours:
            raise ValueError(f"{name!r} is a property of the KMS {', '.join(readers)}, not of {chosen}: omit it{hint}")
        nearest, likeness = ("", 0.0) if readers else _nearest(plain, taken)
        if ours or likeness >= (ALIKE_IN_SHARED if plain.startswith(SHARED) else ALIKE):
            meant = f"did you mean {nearest!r}?" if likeness >= ALIKE_TO_SHOW else f"omit it, nothing reads it{hint}"
            raise ValueError(f"{name!r} is not a property of the KMS {chosen}: {meant}")


def _stands_in(name: str, names: Iterable[str]) -> bool:
    return name in names or any(one.endswith(".") and len(name) > len(one) and name.startswith(one) for one in names)


@lru_cache(256)  # each task of a job asks for the same
def _nearest(name: str, names: frozenset[str]) -> tuple[str, float]:
    matcher = SequenceMatcher(b=name, autojunk=False)
    best, likeness = "", 0.0
    for one in sorted(names):
        matcher.set_seq1(one)
        if matcher.real_quick_ratio() > likeness and (ratio := matcher.ratio()) > likeness:
            best, likeness = one, ratio
    return best, likeness
