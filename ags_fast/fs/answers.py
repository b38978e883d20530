"""What the status of an HTTP answer says, whatever the service, and how long the service asks to wait."""

from __future__ import annotations

import datetime
import errno
import os
import socket
import ssl
from email.utils import parsedate_to_datetime

__all__ = ["AGAIN", "FOREIGN", "MISSING", "REFUSED", "asked_wait", "in_words", "meaning"]

AGAIN = "again"  # the service is busy, or something on the way is
REFUSED = "refused"
MISSING = "missing"  # it is not there
FOREIGN = "foreign"  # not the service: a redirect, a proxy, a page to log in
PASSING = (408, 425, 429)  # and those from 500 on, without
LASTING = {501: REFUSED, 505: REFUSED, 511: FOREIGN}
OTHERS = {404: MISSING, 407: FOREIGN, 410: MISSING, 421: FOREIGN}
NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)


def meaning(status: int) -> str:
    """Return AGAIN, REFUSED, MISSING or FOREIGN for the status of an answer that is not the one that is due."""
    if status < 400:
        return FOREIGN
    if status in PASSING or status >= 500:
        return LASTING.get(status, AGAIN)
    return OTHERS.get(status, REFUSED)


def asked_wait(text: str | None) -> float:
    """Return the seconds that a header Retry-After asks for, which is a number or a date; 0 for any other text."""
    try:
        if text and text.strip().isdecimal():
            return float(text)
        wait = parsedate_to_datetime(text or "") - datetime.datetime.now(datetime.UTC)
    except (ValueError, TypeError, OverflowError):  # TypeError: a date without a zone
        return 0.0
    return max(0.0, wait.total_seconds())


def in_words(error: BaseException) -> str:
    """Return what the network has done, by the innermost error; "" if the network is not to blame."""
    found, one = "", error  # type: str, BaseException | None
    while one is not None:
        if isinstance(one, ssl.SSLError):
            return f"TLS: {getattr(one, 'verify_message', '') or one.reason}"
        if isinstance(one, socket.gaierror):
            return "no such host"
        if isinstance(one, TimeoutError):
            found = "no answer in time"
        elif isinstance(one, ConnectionError) or (isinstance(one, OSError) and one.errno in NO_WAY):
            found = os.strerror(one.errno) if one.errno else "the connection was closed"
        one = one.__cause__ or one.__context__ or getattr(one, "inner_exception", None)
    return found
