"""Products of parameters whose members repeat each other: `make test` runs a few of them, `make test-more` the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def rest_in_more(values: Iterable[Any], *few: Any) -> list[Any]:
    """The parameters, in their order, of which make test runs these few."""
    every = list(values)
    assert all(one in every for one in few)
    return [one if one in few else pytest.param(*as_tuple(one), marks=pytest.mark.more) for one in every]


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
