"""The leaf columns of a schema, which a footer holds as a tree in depth-first order."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ags_fast.parquet.keys import ColumnPath

__all__ = ["leaf_paths"]


def leaf_paths(elements: Iterator[tuple[str, int]]) -> list[ColumnPath]:
    """Return the paths of the leaf columns, in order.

    Args:
        elements: Name and number of children of each element, the root first, as `Footer.schema` yields them: a tree.
    """
    paths: list[ColumnPath] = []
    groups: list[tuple[int, ColumnPath]] = []  # around the current one: children still to come, and their path
    left: int = next(elements)[1]  # children of the current group that are still to come
    path: ColumnPath = ()
    for name, children in elements:
        while not left:
            left, path = groups.pop()
        left -= 1
        if children:
            groups.append((left, path))
            left, path = children, (*path, name)
        else:
            paths.append((*path, name))
    return paths
