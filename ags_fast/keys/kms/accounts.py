"""Accounts of calls to a KMS: counters of the process and of a job, and audit hooks."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ags_fast import telemetry
from ags_fast.errors import AgsError
from ags_fast.keys.kms.imports import find_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    _Event = dict[str, Any]
    _Hook = Callable[[_Event], object]
    _Calls = Counter[tuple[str, str]]

__all__ = ["AUDIT_HOOK", "DESCRIBE", "UnaccountedError", "add_calls", "count_calls", "kms_calls", "named_hook"]
__all__ += ["note_call", "report_call", "same_counts", "set_audit_hook"]

AUDIT_HOOK = "kms.audit-hook"
DESCRIBE = "describe"  # an operation that uses no key, and is not counted

_lock = threading.Lock()
_calls: _Calls = Counter()
_hook: _Hook | None = None
_named: dict[str, _Hook] = {}  # by the text of the property
_counts: ContextVar[tuple[_Calls, ...]] = ContextVar("ags_fast_kms_counts", default=())


class UnaccountedError(AgsError):
    """The audit hook that ``kms.audit-hook`` names failed, so the key was not handed out."""


def kms_calls() -> Counter[tuple[str, str]]:
    """Return how often this process has called a KMS.

    A failed call counts; its retries do not. `KmsClient.current_version` and `KmsClient.versions` use no key and do not
    count.

    Returns:
        A snapshot of ``{(provider, operation): calls}``. The operations are wrap, unwrap, generate and rewrap.
    """
    with _lock:
        return Counter(_calls)


@contextmanager
def count_calls() -> Iterator[Counter[tuple[str, str]]]:
    """Count the calls of this thread, of pools made with `same_counts`, and calls passed to `add_calls`."""
    calls: _Calls = Counter()
    token = _counts.set((*_counts.get(), calls))
    try:
        yield calls
    finally:
        _counts.reset(token)


def add_calls(calls: Mapping[tuple[str, str], int]) -> None:
    """Count calls that another process has reported."""
    with _lock:
        for count in _counts.get():
            count.update(calls)
    for (provider, operation), count_of in calls.items():
        _tell(provider, operation, count_of)


def same_counts() -> dict[str, Any]:
    """Return arguments for a ThreadPoolExecutor. Its threads then count their calls as the caller does."""
    return {"initializer": _counts.set, "initargs": (_counts.get(),)}


def set_audit_hook(hook: Callable[[dict[str, Any]], object] | None) -> None:
    """Set a function to be called after each KMS call of this process, in the thread that made the call.

    If the hook raises, the call fails: a key that cannot be accounted for is not handed out. Worker processes do not
    have this hook; a hook named by the property ``kms.audit-hook`` is called in workers, too.

    Args:
        hook: The function, or None to remove it. Its argument is a dict with provider, operation, wrapping_key_id,
            time_ms (start of the call, milliseconds since the epoch), seconds, and outcome: ``"ok"`` or the name of an
            exception class. The dict never has bytes of a key, wrapped or not.
    """
    global _hook
    _hook = hook


def note_call(provider: str, operation: str) -> None:
    """Count a call for this process, and for every `count_calls` around this thread."""
    if operation != DESCRIBE:
        with _lock:
            for count in (_calls, *_counts.get()):
                count[provider, operation] += 1
        _tell(provider, operation, 1)


def _tell(provider: str, operation: str, calls: int) -> None:
    telemetry.add("kms.calls", calls, {"provider": provider, "operation": operation})


def named_hook(name: str | None) -> _Hook | None:
    """Return the function that ``kms.audit-hook`` names. ValueError if it does not exist."""
    if name is None:
        return None
    if name not in _named:
        _named[name] = find_class(name, AUDIT_HOOK)
    return _named[name]


def report_call(event: _Event, own_hook: _Hook | None) -> None:
    """Report a call to the log, to the process's hook and to the hook that the client's properties name."""
    names = ("provider", "operation", "wrapping_key_id", "seconds", "outcome")
    telemetry.debug("kms", "%s: %s with %s took %.3f s: %s", *(event[name] for name in names))
    try:
        if (hook := _hook) is not None:
            hook(dict(event))
    finally:
        if own_hook is not None:
            _report(own_hook, event)


def _report(hook: _Hook, event: _Event) -> None:
    try:
        hook(event)
    except Exception as error:
        raise UnaccountedError(
            f"{AUDIT_HOOK} failed with {type(error).__name__}, so the result of this {event['operation']} with the key "
            f"{event['wrapping_key_id']!r} is dropped: a key that cannot be accounted for is not handed out"
        ) from None


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    _calls.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
