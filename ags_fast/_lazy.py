"""Names of a package that are imported when they are first asked for."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy(package: str, homes: Mapping[str, tuple[str, ...]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package, whose ``__all__`` has its public names.

    ``__getattr__`` raises AttributeError for an unknown name, and a ModuleNotFoundError that says what to install if
    the module of the name needs a package that is missing. Hide the two from checkers of types, which otherwise take
    any name for one of the package.

    Args:
        package: The name of the package.
        homes: The names by the module that has them, relative to the package. These modules are attributes, too.
    """
    import sys

    def get(name: str) -> Any:
        from importlib import import_module

        home = next((home for home, names in homes.items() if name in names), None)
        if home is None and name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        try:
            module = import_module(f".{home or name}", package)
        except ModuleNotFoundError as error:
            from ags_fast._extras import explained

            raise explained(error, f"{package}.{name}") from None
        value: Any = module if home is None else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return list({*vars(sys.modules[package]), *sys.modules[package].__all__} - {"TYPE_CHECKING", "annotations"})

    return get, names
