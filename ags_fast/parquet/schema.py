"""The leaf columns of a schema, which a footer holds as a tree in depth-first order."""

from __future__ import annotations

from ags_fast._core import ORDINAL_MAX
from ags_fast.errors import FormatError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ags_fast.parquet.keys import ColumnPath

__all__ = ["leaf_paths"]

MAX_DEPTH = 64  # of groups in groups


def leaf_paths(elements: list[tuple[str, int]]) -> list[ColumnPath]:
    """Return the paths of the leaf columns, in order.

    Args:
        elements: Name and number of children of each element, the root first, as `Footer.schema` returns them.

    Raises:
        FormatError: The elements are not a tree, are nested too deep, or have more leaves than can be numbered.
    """
    if not elements:
        raise FormatError("the footer's schema is not a tree: it has no root")
    paths: list[ColumnPath] = []
    groups: list[tuple[int, ColumnPath]] = []  # around the current one: children still to come, and their path
    left: int = elements[0][1]  # children of the current group that are still to come
    path: ColumnPath = ()
    for name, children in elements[1:]:
        while not left and groups:
            left, path = groups.pop()
        if not left:
            raise FormatError("the footer's schema is not a tree: it has elements that belong to no group")
        left -= 1
        if children:
            if len(groups) >= MAX_DEPTH - 1:
                raise FormatError(f"the footer's schema is nested more than {MAX_DEPTH} levels deep")
            groups.append((left, path))
            left, path = children, (*path, name)
        else:
            paths.append((*path, name))
    if left or any(more for more, _ in groups):
        raise FormatError("the footer's schema is not a tree: a group lacks children")
    if len(paths) > ORDINAL_MAX + 1:
        raise FormatError(f"more than {ORDINAL_MAX + 1} columns: Parquet encryption cannot number them")
    return paths
