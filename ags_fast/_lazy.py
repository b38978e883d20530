"""Names of a package that are imported when they are first asked for."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def attribute(package: str, homes: Mapping[str, tuple[str, ...]], name: str) -> Any:
    """Return the object that `package` calls `name`, from the module that `homes` names, or the module `name` itself.

    For a package's ``__getattr__``, which is asked once for each name. Raises AttributeError for any other name.
    """
    import importlib
    import sys

    for home, names in homes.items():
        if name in names:
            value: Any = getattr(importlib.import_module(f"{package}.{home}"), name)
            break
    else:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = importlib.import_module(f"{package}.{name}")
    setattr(sys.modules[package], name, value)
    return value
