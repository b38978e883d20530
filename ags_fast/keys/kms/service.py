"""What all clients of services share: settings, one connection for each process, retries, and logs without keys."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import math
import os
import random
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

from ags_fast import telemetry
from ags_fast._extras import lacks
from ags_fast.errors import AgsError, KeyAccessError
from ags_fast.fs.answers import AGAIN, FOREIGN, asked_wait, in_words, meaning
from ags_fast.keys.kms.client import DeniedError, KmsClient
from ags_fast.keys.kms.deadline import OverdueError, within

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

__all__ = ["BUSY", "UNREACHED", "AnswerError", "ServiceKms", "Told", "on_this_machine", "only_json"]
__all__ += ["with_retries"]

T = TypeVar("T")
ConnectionT = TypeVar("ConnectionT")

ENDPOINT = "kms.endpoint"
CONNECT_MS = "kms.connect-timeout-ms"
READ_MS = "kms.read-timeout-ms"
ATTEMPTS = "kms.max-attempts"
BUDGET_MS = "kms.call-budget-ms"
DEFAULTS = {CONNECT_MS: 2_000, READ_MS: 5_000, ATTEMPTS: 8, BUDGET_MS: 30_000}

# Kinds of trouble that may pass.
BUSY = "busy"
UNREACHED = "unreached"

BUSY_ADVICE = f"it stayed busy, or asks to wait longer than {BUDGET_MS}: ask less often, or raise the quota"


class Told(NamedTuple):
    """What was answered to a request that failed.

    Attributes:
        status: Of HTTP.
        code: As errors show it; "" if the answer has not the form of the service's errors.
        wait: Seconds that the service asks to wait.
    """

    status: int
    code: str
    wait: float = 0.0


class AnswerError(Exception):
    """An answer that is not the one that is due, got by the package `requests`."""

    def __init__(self, response: Any) -> None:
        super().__init__()
        self.response = response


def only_json(response: Any, errors: bool, **_: object) -> None:
    """Hook of a session of `requests`: raise AnswerError for what is neither a JSON object nor an error.

    errors: Raise it for errors, too.
    """
    try:
        taken = response.status_code in (200, 204) and isinstance(response.json() if response.content else {}, dict)
    except (ValueError, RecursionError):
        taken = False
    if not taken and (errors or response.status_code < 400):
        raise AnswerError(response)


class ServiceKms(KmsClient, Generic[ConnectionT]):
    """A client of a service, over one connection for each process, which `_connect` makes.

    Properties:

    - ``kms.connect-timeout-ms`` (2000) and ``kms.read-timeout-ms`` (5000): the timeouts of each request.
    - ``kms.max-attempts`` (8): attempts per call while the service is busy. An unreachable service is retried once.
    - ``kms.call-budget-ms`` (30000): a call runs in a thread of its own, and ends by then whatever the service does.
    """

    packages: ClassVar[tuple[str, ...]] = ()  # of the optional dependency
    endpoint_property: ClassVar[str] = ENDPOINT
    secret_properties: ClassVar[Mapping[str, str]] = {}  # names under which others take secrets, and what to do instead
    loggers: ClassVar[tuple[str, ...]] = ()  # loggers of the packages that write requests and answers
    again: ClassVar[Collection[int | str]] = ()  # statuses and codes that pass, besides those that always do
    check: ClassVar[str] = ""  # what may be wrong if the service is not reached

    def __init__(self) -> None:
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._connection: ConnectionT | None = None

    def initialize(self, properties: Mapping[str, str]) -> None:
        """As `KmsClient` has it."""
        for name in DEFAULTS:
            text = properties.get(name, "1")
            if not (text.isascii() and text.isdecimal()) or int(text) < 1:
                raise ValueError(f"{name} is a whole number from 1, not {text!r}")
        for name, instead in self.secret_properties.items():
            if name in properties:
                raise ValueError(f"{name} is a secret, and properties travel and are shown: {instead}")
        if self.endpoint_property in properties:
            _check_url(self.endpoint_property, properties[self.endpoint_property])
        for package in self.packages:
            if not _installed(package):
                raise lacks(f"the KMS {self.provider}", package)
        super().initialize(properties)

    def close(self) -> None:
        """As `KmsClient` has it."""
        with self._here():
            held, self._connection = self._connection, None
        if held is not None:
            self._disconnect(held)

    # What a provider writes.

    def _connect(self) -> ConnectionT:
        raise NotImplementedError

    def _disconnect(self, connection: ConnectionT) -> None:
        pass

    def _code(self, error: Any) -> str:
        """The service's name for the error, as messages show it; "" if it is none of the service's errors."""
        raise NotImplementedError

    # What it calls.

    @property
    def _where(self) -> str:
        return self.properties.get(self.endpoint_property, "its usual address")

    def _told(self, error: Any) -> Told | None:
        """Return what was answered; None: there was no answer."""
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        if response is None or status is None:
            return None
        return Told(status, self._code(error), asked_wait(response.headers.get("Retry-After")))

    def _kind(self, told: Told) -> str:
        """Return what the answer says: see `meaning`. An error in a form that the service does not have is FOREIGN."""
        kind = AGAIN if told.status in self.again or told.code in self.again else meaning(told.status)
        return kind if kind == AGAIN or told.code else FOREIGN

    def _trouble(self, error: Exception) -> str | None:
        """BUSY or UNREACHED if a retry may help."""
        told = self._told(error)
        if told is not None:
            return BUSY if self._kind(told) == AGAIN else None
        return UNREACHED if in_words(error) else None

    def _connected(self) -> ConnectionT:
        with self._here():
            if self._connection is None:
                self._connection = self._connect()
                for name in (*LOGGERS, *self.loggers):
                    _hide_records(name)
            return self._connection

    def _carry_out(self, operation: str, wrapping_key_id: str, call: Callable[[], T]) -> T:
        budget = self._number(BUDGET_MS)
        try:
            return within(budget / 1000, call)
        except OverdueError:
            # Leave the lock and the connection of the late call alone: other calls may still use the connection.
            self._lock, self._connection = threading.Lock(), None
            overdue = KeyAccessError(
                f"the KMS {self.provider} did not end {operation} with the key {wrapping_key_id!r} within {budget} ms: "
                f"check the network and the service, or raise {BUDGET_MS}"
            )
        except AgsError as error:
            error.__traceback__ = None  # its frames hold requests and answers
            raise
        raise overdue

    @contextmanager
    def _here(self) -> Iterator[None]:
        if self._pid != os.getpid():  # forked, maybe while another thread held the lock; the connection is the parent's
            self._lock, self._pid, self._connection = threading.Lock(), os.getpid(), None
        with self._lock:
            yield

    def _deadline(self) -> float:
        return time.monotonic() + self._number(BUDGET_MS) / 1000

    def _ask(self, request: Callable[[], T], deadline: float | None = None) -> T:
        """Return what the request returns, with retries. Pass the `deadline` of a call that makes several requests."""
        misses = 0

        def patience(error: Exception) -> float | None:
            nonlocal misses
            trouble = self._trouble(error)
            misses += trouble == UNREACHED
            if trouble is None or misses > 1:
                return None
            return 0.1 if trouble == BUSY else 0.2

        with _unlogged():
            return with_retries(
                request,
                patience,
                attempts=self._number(ATTEMPTS),
                deadline=deadline or self._deadline(),
                sleep=self._wait,
                asked=lambda error: getattr(self._told(error), "wait", 0.0),
            )

    def _wait(self, seconds: float) -> None:
        telemetry.info("kms", "%s: a request failed, and is sent again in %.1f s", self.provider, seconds)
        telemetry.add("kms.retries", 1, {"provider": self.provider})
        time.sleep(seconds)

    def _number(self, name: str) -> int:
        return int(self.properties.get(name, DEFAULTS[name]))

    def _refusal(self, action: str, named: str, code: str, advice: str) -> KeyAccessError:
        return KeyAccessError(f"the KMS {self.provider} refused {action} with the key {named} ({code}): {advice}")

    def _failed(
        self, error: Exception, action: str, named: str, advice: str, *, denied: bool, busy: str = BUSY_ADVICE
    ) -> KeyAccessError:
        """Return the error for an answer. advice: what to do if the service refused. denied: if the caller may not."""
        told = self._told(error)
        kind = FOREIGN if told is None else self._kind(told)
        if told is None or kind == FOREIGN:
            return self._foreign(action, named, f" (status {told.status})" if told else "")
        refused = self._refusal(action, named, told.code or f"status {told.status}", busy if kind == AGAIN else advice)
        return DeniedError(str(refused)) if denied and kind != AGAIN else refused

    def _foreign(self, action: str, named: str, told: str = "") -> KeyAccessError:
        return KeyAccessError(
            f"what answers {action} with the key {named} at {self._where}{told} is not the KMS {self.provider}, but a "
            f"redirect, a proxy or another service: check {self.endpoint_property}, and the proxies on the way"
        )

    def _blamed(self, error: Exception, operation: str, wrapping_key_id: str) -> KeyAccessError:
        named = repr(wrapping_key_id)
        if self._told(error) is not None:
            return self._failed(error, operation, named, "see what the service documents for it", denied=False)
        if words := in_words(error):
            return KeyAccessError(
                f"the KMS {self.provider} at {self._where} was not reached for the key {named} ({words}): "
                f"check the network, {self.check}"
            )
        if type(error) is OSError or (isinstance(error, OSError) and error.errno):
            return super()._blamed(error, operation, wrapping_key_id)
        return self._foreign(operation, named)  # the package did not understand the answer


def with_retries(
    call: Callable[[], T],
    retry_after: Callable[[Exception], float | None],
    *,
    attempts: int,
    longest: float = 5.0,
    deadline: float = math.inf,
    sleep: Callable[[float], None] = time.sleep,
    asked: Callable[[Exception], float] = lambda _: 0.0,
) -> T:
    """Return what `call` returns, tried up to `attempts` times.

    The waits double, and each is cut by a random part, so that many processes do not return at the same moment.

    Args:
        call: What to try.
        retry_after: Returns for an exception the seconds to wait before the first retry, or None not to retry.
        attempts: How often to try at most.
        longest: The longest wait, in seconds.
        deadline: By time.monotonic(); no try begins after it.
        sleep: Waits for some seconds.
        asked: Returns for an exception the seconds to wait at least, as the service asks.
    """
    attempt = 0
    while True:
        try:
            return call()
        except Exception as error:
            attempt += 1
            first_wait = retry_after(error)
            if first_wait is None or attempt >= attempts:
                raise
            wait = max(min(first_wait * 2 ** (attempt - 1), longest) * random.uniform(0.5, 1), asked(error))
            if time.monotonic() + wait > deadline:
                raise
        sleep(wait)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package that it is part of
        return False


def _check_url(name: str, text: str) -> None:
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname or url.username or url.password:
        raise ValueError(f"{name} is a URL such as https://kms.example.com")
    if url.scheme == "http" and not on_this_machine(text):
        raise ValueError(f"{name} must be https: keys would go to {url.hostname} unencrypted")


def on_this_machine(url: str) -> bool:
    """Whether a URL's host is this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ---------------------------------------------------------------------------------------------------------- logs
# Some packages log requests and answers, which hold keys. Records of other uses of these packages stay in the log.

LOGGERS = ("urllib3.connection", "urllib3.connectionpool")  # they log the lines of an answer's head that do not parse

_thread = threading.local()


@contextmanager
def _unlogged() -> Iterator[None]:
    _thread.calls = getattr(_thread, "calls", 0) + 1
    try:
        yield
    finally:
        _thread.calls -= 1


def _wanted(_: logging.LogRecord) -> bool:
    return not getattr(_thread, "calls", 0)


def _hide_records(name: str) -> None:
    logger = logging.getLogger(name)
    if _wanted not in logger.filters:
        logger.addFilter(_wanted)
