"""The one loop of every change: look, decide, apply, and look again when somebody else was first."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ags_fast.errors import ConcurrentChangeError, IntegrityError

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
        is_stale: Tell whether what was read has changed. Then an `IntegrityError` of `decide` or `apply` is no fault:
            an expiry has removed what was to be read. None: every `IntegrityError` is a fault.

    Returns:
        What `apply` returned.
    """
    while True:
        seen = look()
        try:
            return apply(seen, decide(seen))
        except (ConcurrentChangeError, FileExistsError):
            continue
        except IntegrityError:
            if is_stale is None or not is_stale(seen):
                raise
