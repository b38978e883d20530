"""Names of a package that are imported when they are first asked for."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def attribute(package: str, homes: Mapping[str, tuple[str, ...]], name: str) -> Any:
    """Return the object that `package` calls `name`, from the module that `homes` names, or the module `name` itself.

    For a package's ``__getattr__``, which is asked once for each name. Raises AttributeError for any other name, and a
    ModuleNotFoundError that says what to install if the module needs a package that is missing.
    """
    import importlib
    import sys

    home = next((home for home, names in homes.items() if name in names), None)
    if home is None and name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{package}.{home or name}")
    except ModuleNotFoundError as error:
        from ags_fast._extras import explained

        raise explained(error, f"{package}.{name}") from None
    value: Any = module if home is None else getattr(module, name)
    setattr(sys.modules[package], name, value)
    return value
