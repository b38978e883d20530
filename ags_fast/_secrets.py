"""What looks like a secret: one table for profiles, ``ags-fast config show``, Spark's options and URLs of databases."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["check_no_secret", "is_secret_name"]

SECRET_NAME = re.compile(
    r"secret|passw|passphrase|pwd$|token|credential|authorization|cookie|signature|jsessionid|(^|-)sas-"
    r"|(account|access|private|shared|api|encryption)-?key|connection-?string"
    r"|(^|-)(pass|pin|key|dek|kek|jwt|sig|sas|session-?id)$|^((basic|http)-)?auth$"
)
NOT_SECRET = re.compile(r"-(file|env|label|provider|ids?|grant-tokens)$|accesskeyid$|^adls-token-credential-provider-")
PAIR = re.compile(  # in connection strings, queries of URLs, headers, JSON: name=value, "name": value, name: value
    r"""(?:^|[;&?,\s{"'])([\w.-]+(?: \w+)?)(?:\s*=|["']\s*:|\s*:\s)\s*[^\s;&]"""
)
SECRET_VALUES = (  # anywhere in a value
    r"-----BEGIN|AGE-SECRET-KEY-1",
    r"(?<![\w.])(hv[sbr]\.|[sb]\.(?=[A-Za-z0-9]{24})|gh[opsu]_|github_pat_|glpat-|xox[abeprs]-|AKIA|ASIA|AIza|ya29\.)\w",
    r"(?<![\w.])eyJ[\w-]{8,}\.[\w-]{8,}",  # a JWT
    r"[\w.~-]{3}\dQ~[\w.~-]{30}",  # of an application in Entra ID
    r"//[^/\s]*:[^/\s]+@|://[0-9a-fA-F]{32}@|:thin:\w+/[^/\s]+@",  # a password in a URL, Sentry's DSN, Oracle's
    r"^(?!(serviceAccount|user|group|mailto):)[^/@\s:]+:[^/@\s]+@[\w.(-]",  # user:password@host, @tcp(host)
    r"(?i:^(basic|bearer|digest|negotiate|sharedkey|aws4-hmac-sha256)\s+\S{4})",  # the value of Authorization
)
KEYS = (  # the whole of a value, without blanks and quotes
    r"(0x|hex:)?([0-9a-fA-F]{32}|[0-9a-fA-F]{48}|[0-9a-fA-F]{64})",  # AES keys in hex
    r"(base64:)?([\w+/-]{22}==|[\w+/-]{43}=|[\w+/-]{86}==)",  # AES keys in base64, and the key of an account of Azure
    # A secret key of AWS, and 24 bytes in base64: no path, and no name with a year.
    r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d)(?!/|(.*/){3}|.*\d\d$)([A-Za-z0-9+/]{32}|[A-Za-z0-9+/]{40})",
    r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d.*[A-Za-z].*\d)[\w+]{32,}",  # random text
)
SECRET_VALUE, KEY = (re.compile("|".join(f"(?:{one})" for one in table)) for table in (SECRET_VALUES, KEYS))


def is_secret_name(name: str) -> bool:
    """Whether what has this name is likely to be a secret, and not the name of a file or variable that has one."""
    plain = re.sub(r"[\s._-]+", "-", name.strip().lower())
    return SECRET_NAME.search(plain) is not None and NOT_SECRET.search(plain) is None


def check_no_secret(values: dict[str, Any], place: str, advice: str) -> None:
    """Raise ValueError, without the value, if a value looks like a key or a secret, or has the name of one."""
    for name, value in values.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict | list):
                check_no_secret(one if isinstance(one, dict) else {name: one}, f"{place}, {name}", advice)
            elif one is not None and not isinstance(one, bool) and (is_secret_name(name) or _is_secret(str(one))):
                raise ValueError(f"{place}: the value of {name!r} looks like a secret or a key: {advice}")


def _is_secret(text: str) -> bool:
    bare = re.sub(r"[\s\"']+", "", text)
    found = KEY.fullmatch(bare) or SECRET_VALUE.search(text.strip()) or any(map(is_secret_name, PAIR.findall(text)))
    return bool(found)
