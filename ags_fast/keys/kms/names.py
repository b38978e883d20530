"""The names of all settings, and the check that each place takes only those that are read there.

A mistyped name must not pass: ``encryption.allowed-key-id`` would leave out the guard of
``encryption.allowed-key-ids``, and with ``encryption.key_id`` a table would be in plaintext.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["BY_PROVIDER", "CATALOG", "COMMON", "ELSEWHERE", "GUARDS", "SERVICE", "TABLE", "check_catalog_names"]
__all__ += ["check_kms_names", "check_names", "guards", "merged"]

# The one table. A name that ends with a dot stands for all that begin with it.

GUARDS = frozenset(  # of every client; they mean the same for each KMS
    {"encryption.allowed-key-ids", "kms.audit-hook", "kms.cache-lifetime-seconds", "kms.max-calls-per-second"}
)
COMMON = GUARDS | {"encryption.kms-impl", "encryption.kms-type"}
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
OF_CATALOG = ("delete-roots", "metadata-seal", "plaintext-files", "plaintext-tables")
CATALOG = frozenset(f"encryption.{name}" for name in OF_CATALOG)
TABLE = frozenset({"encryption.data-key-length", "encryption.key-id", "encryption.plaintext-snapshots"})  # of Iceberg
# Of Iceberg's own catalogs, with names near ours: accepted, and not read.
ELSEWHERE = frozenset({"client.role-session-name", "gcs.impersonate.scopes", "kms.data-key-spec"})
READERS = {"every KMS": COMMON} | {f"the KMS {provider}": names for provider, names in BY_PROVIDER.items()}
READERS |= {"an Iceberg catalog": CATALOG, "an Iceberg table": TABLE}

# Every name in ALWAYS must be known, and every name in OURS but to a user's own class. Other software uses namespaces
# such as ``client.`` and ``s3.``, too: there a name is refused only if it looks like a mistyped name of ours.
ALWAYS = ("encryption.", "ags.")
OURS = (*ALWAYS, "kms.", "azure.keyvault.", "vault.")
DEFAULTS = ("table-default.encryption.", "table-override.encryption.")  # which PyIceberg's catalogs ignore
SHARED = ("client.", "adls.", "gcs.impersonate.")
ALIKE, ALIKE_IN_SHARED, ALIKE_TO_SHOW = 0.9, 0.8, 0.6  # difflib's ratio; below it, a name is another name


def check_names(
    names: Iterable[str], taken: frozenset[str], reader: str, strict: tuple[str, ...] = OURS, hint: str = ""
) -> None:
    """Refuse names that nothing reads at one place: those with a strict prefix, and near misses of known names.

    Args:
        names: What a user gives.
        taken: The names that are read there.
        reader: What reads them, for the error.
        strict: Prefixes of which every name must be known.
        hint: What else the error says.

    Raises:
        ValueError: The message has the name, and where it belongs or which name is nearest.
    """
    for name in names:
        plain = name.strip().lower().replace("_", "-")
        ours = plain.startswith(strict)
        if _stands_in(name, taken):
            continue
        readers = [place for place, read in READERS.items() if _stands_in(name, read)]
        if readers and ours:
            where = f"{name!r} is a property of {', '.join(readers)}, not of {reader}"
            raise ValueError(f"{where}: give it there, or omit it{hint}")
        nearest, likeness = ("", 0.0) if readers else _nearest(plain, taken | COMMON | CATALOG | TABLE)
        if ours or likeness >= (ALIKE_IN_SHARED if plain.startswith(SHARED) else ALIKE):
            meant = f"did you mean {nearest!r}?" if likeness >= ALIKE_TO_SHOW else f"omit it, nothing reads it{hint}"
            raise ValueError(f"{name!r} is not a property of {reader}: {meant}")


def check_kms_names(properties: Mapping[str, str], kind: type[Any]) -> None:
    """Refuse names that no client of this class reads, and that are mistyped or belong elsewhere. ValueError.

    A class reads the names that it and its bases list in ``property_names``. It refuses the names of secrets by itself.
    A class that lists nothing may read any name, except in `ALWAYS`.
    """
    lists = ("property_names", "secret_properties")
    listed = {name for base in kind.__mro__ for given in lists for name in vars(base).get(given) or ()}
    strict = OURS if getattr(kind, "property_names", None) is not None else ALWAYS
    chosen = properties.get("encryption.kms-type") or kind.__name__
    hint = "" if chosen in BY_PROVIDER else f" ({chosen} may list names that it reads in its property_names)"
    check_names(properties, COMMON | ELSEWHERE | TABLE | listed, f"the KMS {chosen}", strict, hint)


def check_catalog_names(properties: Mapping[str, Any]) -> None:
    """Refuse names among a catalog's settings, or among those of several uses, that nothing reads. ValueError."""
    strict = ALWAYS if "encryption.kms-impl" in properties else OURS  # that class is asked when it is loaded
    known = CATALOG | ELSEWHERE | COMMON.union(*BY_PROVIDER.values())
    hint = " (a table's properties are given when it is created)"
    check_names(properties, known, "an Iceberg catalog", (*strict, *DEFAULTS), hint)


def guards(properties: Mapping[str, str]) -> dict[str, str]:
    """Return what stays of the properties of a KMS when another takes its place: guards, and names that are refused."""
    strict = ALWAYS if "encryption.kms-impl" in properties else OURS
    gone = (COMMON - GUARDS).union(*BY_PROVIDER.values())
    stays = (name for name in properties if name in GUARDS or (name.startswith(strict) and not _stands_in(name, gone)))
    return {name: properties[name] for name in stays}


def merged(kms: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Return the properties of a KMS from two places. ValueError if they contradict each other."""
    if twice := [name for name, value in more.items() if kms.get(name, value) != value]:
        raise ValueError(f"{twice[0]!r} is given in two places, with different values: leave one out")
    return {**more, **kms}


def _stands_in(name: str, names: Iterable[str]) -> bool:
    return name in names or any(one.endswith(".") and len(name) > len(one) and name.startswith(one) for one in names)


@lru_cache(256)  # each task of a job asks for the same
def _nearest(name: str, names: frozenset[str]) -> tuple[str, float]:
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(b=name, autojunk=False)
    best, likeness = "", 0.0
    for one in sorted(names):
        matcher.set_seq1(one)
        if matcher.real_quick_ratio() > likeness and (ratio := matcher.ratio()) > likeness:
            best, likeness = one, ratio
    return best, likeness
