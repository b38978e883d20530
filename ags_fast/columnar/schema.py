"""The tree of a schema, which a footer holds in depth-first order, and its leaf columns."""

from __future__ import annotations

from ags_fast.columnar.thrift import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OPTIONAL", "REPEATED", "REQUIRED", "Node", "leaf_paths", "tree"]

REQUIRED, OPTIONAL, REPEATED = range(3)


def leaf_paths(elements: Iterator[tuple[str, int]]) -> list[tuple[str, ...]]:
    """Return the paths of the leaf columns, in order.

    Args:
        elements: Name and number of children of each element, the root first, as `Footer.schema` yields them: a tree.
    """
    paths: list[tuple[str, ...]] = []
    groups: list[tuple[int, tuple[str, ...]]] = []  # around the current one: children still to come, and their path
    left: int = next(elements)[1]  # children of the current group that are still to come
    path: tuple[str, ...] = ()
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


class Node:
    """An element of the schema: its leaves are those from number `first` to before `stop`, of all columns."""

    __slots__ = ("definition", "element", "first", "kind", "left", "parent", "repetition", "stop")

    def __init__(self, element: Struct, first: int, parent: Node | None) -> None:
        self.element = element
        self.parent = parent
        self.first = first
        self.stop = first + 1
        self.left = element.integer(5) or 0  # children that are still to come
        self.kind = REQUIRED if parent is None else element.integer(3) or REQUIRED
        self.definition: int = (0 if parent is None else parent.definition) + (self.kind != REQUIRED)  # at most
        self.repetition: int = (0 if parent is None else parent.repetition) + (self.kind == REPEATED)

    @property
    def leaves(self) -> set[int]:
        """The numbers of its leaves."""
        return set(range(self.first, self.stop))


def tree(footer: bytes) -> list[Node]:
    """Return the elements of the schema, in its order: each group before what is in it."""
    nodes: list[Node] = []
    around: list[Node] = []
    leaves = 0
    for begin, _ in Struct(footer).elements(2) or []:
        while around and not around[-1].left:
            around.pop().stop = leaves
        node = Node(Struct(footer, begin), leaves, around[-1] if around else None)
        if node.parent is not None:
            node.parent.left -= 1
        if node.left:
            around.append(node)
        else:
            leaves += 1
        nodes.append(node)
    for node in around:
        node.stop = leaves
    return nodes
