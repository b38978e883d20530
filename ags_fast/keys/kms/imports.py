"""Classes and functions that properties name as ``module:Name``."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["KMS_IMPL", "find_class", "named_modules"]

KMS_IMPL = "encryption.kms-impl"

_named: set[str] = set()


def find_class(impl: str, named_by: str = KMS_IMPL) -> Any:
    """Import what a property names.

    Args:
        impl: ``module:Class`` or ``module:function``.
        named_by: The name of the property, for errors.

    Raises:
        ValueError: The text is malformed, or the module or name does not exist.
    """
    module, colon, name = impl.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{named_by} is module:Class, such as my_company.kms:Client, not {impl!r}")
    try:
        found: Any = importlib.import_module(module)
        _named.add(module.partition(".")[0])
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise  # the module exists, and one of its own imports does not
        raise ValueError(f"{named_by} names the module {module!r}, which is not there") from None
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ValueError(f"{named_by} names {name!r}, which the module {module!r} does not have")
    return found


def named_modules() -> frozenset[str]:
    """Return the top-level modules in which this process found what properties name. Worker processes need them."""
    return frozenset(_named)
