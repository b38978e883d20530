"""The one loop of every change: look, decide, apply, and look again when somebody else was first."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ags_fast import telemetry
from ags_fast.errors import ConcurrentChangeError, IntegrityError, PolicyError

if TYPE_CHECKING:
    from collections.abc import Callable

Seen = TypeVar("Seen")
Decided = TypeVar("Decided")
Result = TypeVar("Result")


def until_unchanged(
    look: Callable[[], Seen],
    decide: Callable[[Seen], Decided],
    apply: Callable[[Seen, Decided], Result],
    is_stale: Callable[[Seen], bool] | None = None,
) -> Result:
    """Apply a decision by compare-and-swap. When somebody else was first, look and decide again.

    Args:
        look: Read what the decision depends on.
        decide: Make the decision. A pure function of what was read.
        apply: Carry the decision out, and return the result. Raises `ConcurrentChangeError` or `FileExistsError` when
            what was read has changed.
        is_stale: Tell whether what was read has changed. Then an `IntegrityError` or `PolicyError` of `decide` or
            `apply` is expected: an expiry, say, has removed what was to be read. None: it never is.

    Returns:
        What `apply` returned.
    """

    def attempt(seen: Seen) -> Result:
        try:
            return apply(seen, decide(seen))
        except FileExistsError as error:
            raise ConcurrentChangeError("somebody else was first") from error
        except (IntegrityError, PolicyError) as error:
            if is_stale is None or not is_stale(seen):
                raise
            raise ConcurrentChangeError("what was read has changed") from error

    return until_read(look, attempt)


def until_read(look: Callable[[], Seen], read: Callable[[Seen], Result]) -> Result:
    """Read what `look` has found. When that has gone meanwhile, look and read again.

    Args:
        look: Find what is to be read.
        read: Read it. Raises `ConcurrentChangeError` when it has gone.
    """
    while True:
        seen = look()
        try:
            return read(seen)
        except ConcurrentChangeError as error:
            telemetry.info("dataset", "tried again: %s", error)
            telemetry.add("conflicts", 1)
