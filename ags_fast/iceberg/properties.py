"""Which properties of tables and servers PyIceberg is shown: those that it reads, and that are data.

Nobody authenticates a table's metadata, a row of a catalog, or what a server sends. PyIceberg takes classes from some
properties, so it is shown no property that the list in ``properties.toml`` lacks. What is not shown stays in the
metadata file.
"""

from __future__ import annotations

import tomllib
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from pyiceberg import __version__

from ags_fast.errors import PolicyError
from ags_fast.iceberg.container import CODEC

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["GONE", "SERVER", "TABLE", "check_code", "inspecting", "is_inspected", "is_shown", "names_code"]
__all__ += ["restored", "shown"]

TABLE, SERVER = "table", "server"  # the lists
GONE = "ags_fast.gone"  # the value that the facade has of a property that PyIceberg was not shown, and that is removed


is_inspected = ContextVar("is_inspected", default=False)  # whether this thread loads a table only to verify it


@contextmanager
def inspecting() -> Iterator[None]:
    """Load tables although their properties are refused, so that `verify` tells which. PyIceberg is not shown them.

    Load a table within it, and call `verify` afterwards. Everything else refuses the table as before.
    """
    token = is_inspected.set(True)
    try:
        yield
    finally:
        is_inspected.reset(token)


def names_code(name: str) -> bool:
    """Tell whether a property names a class or a function, whoever reads it."""
    low = name.lower()
    return low.startswith("py-") or low.endswith(("-impl", ".impl"))


def check_code(names: Iterable[str], whose: str) -> None:
    """Refuse properties that name a class or a function. PolicyError. whose: for the error."""
    for name in names:
        if names_code(name):
            raise PolicyError(
                f"{whose} names {name}, which chooses code: whoever set it would run code in this process, or have "
                "the table written without its keys. Have it removed; set it for the catalog in your own configuration"
            )


def is_shown(name: str, of: str) -> bool:
    """Tell whether PyIceberg is shown a property. of: `TABLE` or `SERVER`."""
    exact, prefixes = _listed(of)
    return name in exact or name.startswith(prefixes)


def shown(properties: Mapping[str, Any] | None, of: str) -> dict[str, Any]:
    """Return those properties that PyIceberg is shown. of: `TABLE` or `SERVER`."""
    return {name: _readable(name, value) for name, value in (properties or {}).items() if is_shown(name, of)}


def restored(base: Mapping[str, Any] | None, written: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the properties of new metadata: what PyIceberg has `written`, and what of `base` it was not shown."""
    written = written or {}
    kept = {name: value for name, value in (base or {}).items() if name in written or not is_shown(name, TABLE)}
    same = {name: value for name, value in kept.items() if _readable(name, value) == written.get(name)}
    return {name: value for name, value in {**kept, **written, **same}.items() if value != GONE}


def _readable(name: str, value: Any) -> Any:
    """Return the value of a property as PyIceberg reads it: codecs have a name more in Java, which ignores case."""
    if name != CODEC:
        return value
    return {"uncompressed": "null"}.get(low := str(value).lower(), low)


@cache
def _listed(of: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names of a list for the installed PyIceberg, and what names may begin with."""
    lists = tomllib.loads(resources.files(__package__).joinpath("properties.toml").read_text())[of]
    installed = _number(__version__)
    names = [name for version, added in lists.items() if _number(version) <= installed for name in added]
    stars = tuple(name[:-1] for name in names if name.endswith("*"))
    return frozenset(names) - {star + "*" for star in stars}, stars


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
