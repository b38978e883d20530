"""The tree of a table: snapshots name manifest lists, these name manifests, and manifests name files.

`Tree` is the only reader of that tree. Who walks it says what becomes of a list or manifest that cannot be read:
`refuse` raises its error; `keep` leaves the error in the node, and goes on with the other nodes.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from ags_fast.errors import FormatError, KeyAccessError
from ags_fast.iceberg.manifests import Known
from ags_fast.iceberg.reading import LIST, Node, learn, read_node, refuse
from ags_fast.iceberg.session import ListKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import ThreadPoolExecutor

    from pyiceberg.io import FileIO as InnerIO

    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.session import Session, TableState
    from ags_fast.keys.metadata import StandardKeyMetadata

__all__ = ["Tree", "ahead", "find", "keep"]

T = TypeVar("T")
R = TypeVar("R")

LISTS_AHEAD, MANIFESTS_AHEAD = 8, 4  # that threads read before they are asked for


def keep(node: Node) -> None:
    """Leave the error in the node."""


class Tree:
    """Reads manifest lists and manifests.

    Args:
        session: Says whether the client's configuration allows plaintext.
        keys: Returns the key of a snapshot's list.
        plaintext: Whether to read lists and manifests in plaintext, also if the client's configuration does not allow
            that: for callers that only need the paths, or that report it.
        counts: As for `manifests.manifests`.
        failed: Hears each node that could not be read, and raises its error, or returns.
        pool: Its threads read ahead. None: each node is read when the walk comes to it.
        seen: What lists said of the manifests that other walks have shown: these are passed over, and new ones added.
    """

    def __init__(
        self,
        session: Session,
        inner: Callable[[str], InnerIO],
        keys: Callable[[Raw], StandardKeyMetadata | None],
        *,
        plaintext: bool = False,
        counts: bool = False,
        failed: Callable[[Node], object] = refuse,
        pool: ThreadPoolExecutor | None = None,
        seen: dict[str, object] | None = None,
    ) -> None:
        self._session, self._inner, self._keys = None if plaintext else session, inner, keys
        self._counts = counts
        self._failed, self._pool = failed, pool
        self._seen = {} if seen is None else seen

    @classmethod
    def of(cls, session: Session, inner: Callable[[str], InnerIO], raw: Raw, **options: Any) -> Tree:
        """Return the tree of metadata. The options are those of the class. KeyAccessError without a KMS."""
        entries = {one.get("key-id"): one for one in raw.get("encryption-keys") or () if isinstance(one, dict)}
        return cls(session, inner, ListKeys(entries, session.kms), **options)

    def walk(self, snapshots: Iterable[Raw]) -> Iterator[Node]:
        """Yield the list of each snapshot, and after it those of its manifests that did not come before.

        A manifest comes again if another list says that it has another length, key or number of files.
        """
        lists = ahead(self._pool, self.read, (Node.of_list(one) for one in snapshots), LISTS_AHEAD)
        for node in ahead(self._pool, self.read, self._with_manifests(lists), MANIFESTS_AHEAD):
            if node.error is not None:
                self._failed(node)
            yield node

    def _with_manifests(self, lists: Iterator[Node]) -> Iterator[Node]:
        for node in lists:
            yield node
            for known in node.named:
                said = known.length, known.key_metadata, known.counts
                if self._seen.get(known.path) != said:
                    self._seen[known.path] = said
                    yield Node(known, node.snapshot)

    def read(self, node: Node) -> Node:
        """Read a list or a manifest, if that was not done yet. Returns the node; an error stays in it."""
        if node.seconds is not None:
            return node
        begun = time.perf_counter()
        try:
            if not node.known.path:  # a snapshot of version 1 may name manifests itself
                if "manifests" not in node.snapshot:
                    raise FormatError("the snapshot names no manifest list")
                node.named = [Known(one, 0, None) for one in node.snapshot["manifests"]]
            else:
                if node.kind == LIST:
                    node.known.key_metadata = self._keys(node.snapshot)
                read_node(node, self._inner(node.known.path), self._session, counts=self._counts)
        except Exception as error:  # of any storage
            node.error = error
        node.seconds = round(time.perf_counter() - begun, 6)
        return node


def ahead(pool: ThreadPoolExecutor | None, work: Callable[[T], R], given: Iterable[T], count: int) -> Iterator[R]:
    """Yield what `work` makes of each, in order, while threads work on at most `count` of them."""
    waiting: deque[Any] = deque()
    for one in given:
        if pool is None:
            yield work(one)
            continue
        waiting.append(pool.submit(work, one))
        if len(waiting) >= count:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def find(state: TableState, path: str, inner: InnerIO) -> Known | None:
    """Return what is known of a path, or else what known lists and their manifests say of it. Reads them if needed.

    The newest list comes first. What is not there belongs to an expired snapshot, or to another table. KeyAccessError
    if it may be in one that nothing has the key of.
    """
    known = state.known(path)
    if known is not None:
        return known
    closed: list[Node] = []

    def failed(node: Node) -> None:
        plain = node.known.key_metadata is None and state.session.plaintext.files != "allow"
        if isinstance(node.error, KeyAccessError):
            closed.append(node)
        elif not plain and not isinstance(node.error, FileNotFoundError):
            refuse(node)

    def list_key(snapshot: Raw) -> StandardKeyMetadata | None:
        return state.list_key(snapshot["manifest-list"])

    # A walk passes over the manifests of earlier ones. If these were forgotten since, the second walk reads them again.
    for seen in (dict(state.seen), {}) if state.seen else ({},):
        tree = Tree(state.session, lambda _: inner, list_key, failed=failed, seen=seen)
        for node in tree.walk({"manifest-list": one} for one in state.lists()):
            learn(state, node)
            if (known := next((one for one in node.named if one.path == path), None)) is not None:
                state.seen = seen
                return known
    return refuse(closed[0]) if closed else None
