"""Which files only removed snapshots reach, and which of these this client deletes. Nothing else decides it.

Nobody authenticates a metadata file: whoever can write to the storage may have it name any file that its victim may
delete, or one that the table needs, under another spelling. Tags prove what an encrypted list or manifest names. What
only metadata or plaintext name is deleted below the table's own folders, or below `DELETE_ROOTS` of the client.

A table's ``location`` is no own folder, since metadata say it. The folder of the metadata file that the catalog named
is one. If it is called ``metadata``, as writers call it, the folder above is the table's root: own for what lists in
plaintext name. With a ``write.metadata.path`` such as ``s3://lake/metadata`` other tables are below that root. So what
is below folders of another table of the catalog stays.
"""

from __future__ import annotations

import posixpath
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from os.path import dirname, join, realpath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ags_fast.iceberg import metadata, policy
from ags_fast.iceberg.locations import local_path, normal
from ags_fast.iceberg.manifests import DATA
from ags_fast.iceberg.reading import LIST, MANIFEST, Node, refuse
from ags_fast.iceberg.walk import ahead
from ags_fast.iceberg.work.removing import Gone
from ags_fast.jobs.results import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from pyiceberg.typedef import Identifier

    from ags_fast.iceberg.io import FileIO
    from ags_fast.iceberg.manifests import Known
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.jobs.results import Row

__all__ = ["NOT_DELETED", "STATISTICS", "THREADS", "Garbage", "below", "own_folders", "place", "roots_of"]
__all__ += ["statistics_of", "unreachable", "within"]

DELETE_ROOTS = "encryption.delete-roots"
STATISTICS = ("statistics", "partition-statistics")
STATISTICS_HEADS = (b"PFA1", b"PAR1", b"Obj\x01", b"ORC")  # Puffin, or a table of partitions, never encrypted
NOT_DELETED = "NotDeleted"  # the class of the rows of files that stay
THREADS = 8  # that read manifests and delete files, mostly waiting for the storage

CURRENT = "the catalog names this metadata file, or named it when the expiry began: another catalog may do so, too"
PLAIN = (
    "only a list or manifest in plaintext names the file, which whoever can write to the storage can make. "
    f"{policy.PLAINTEXT_FILES}=allow in your own configuration deletes it, if it is below the table's own folders"
)
OUTSIDE = (
    "only metadata or plaintext name the file, and it is not below the table's own folders: "
    f"{DELETE_ROOTS}=<its folder> in your own configuration deletes it"
)
ANOTHERS = "it is in a folder of the catalog's table {}: files of other tables are never deleted"
UNKNOWN = "the catalog does not say where its other tables are, so it may be the file of one: {}"

ASK = "ask the catalog"
Place = tuple[str, ...]  # the segments of a location


# -------------------------------------------------------------------------------------------------------------- places


def place(location: str) -> Place:
    """Return a location in the one spelling by which files are compared."""
    return _spellings(location)[1]


@lru_cache(4096)  # each file is compared with the same few folders
def _spellings(location: str) -> tuple[Place, Place]:
    """Return a location without ``..`` and doubled slashes: as it is written, and with %2e and the like decoded.

    PyArrow's FileIO deletes ``x`` for ``file:///x?y`` and ``file:///x#y``.
    """
    text = normal(re.split("[?#]", location)[0])
    return _segments(text), _segments(unquote(text))


def _segments(text: str) -> Place:
    local = ("file:",) if text.startswith("/") else ()
    return (*local, *(one for one in posixpath.normpath(text).split("/") if one))


def within(location: str, folder: str) -> bool:
    """Tell whether a file is below a folder, however both are spelled."""
    both = zip(_spellings(location), _spellings(folder), strict=True)
    return all(len(one) > len(root) and one[: len(root)] == root for one, root in both)


def below(location: str, folder: str) -> bool:
    """Tell whether a file is below a folder, and no symbolic link leads it elsewhere."""
    if not within(location, folder):
        return False
    path, root = local_path(location), local_path(folder)
    rest = place(location)[len(place(folder)) : -1]
    return not (path and root) or realpath(dirname(path)) == join(realpath(root), *rest)


def own_folders(named: str) -> list[str]:
    """Return the folder of the metadata file that a catalog names, and the table's root, if that is known."""
    folder = re.split("[?#]", named)[0].rpartition("/")[0].rstrip("/")
    root, _, name = folder.rpartition("/")
    return [folder, root] if name == "metadata" else [folder]


def roots_of(catalog: Any) -> list[str]:
    """Return the folders below which a catalog's own configuration allows to delete what metadata name."""
    given = catalog.properties.get(DELETE_ROOTS, "").split(",")
    return [root for one in given if (root := one.strip())]


# -------------------------------------------------------------------------------------------------------- reachability


def statistics_of(raw: Mapping[str, Any]) -> list[str]:
    """Return the locations of statistics files that metadata name."""
    return [one["statistics-path"] for name in STATISTICS for one in raw.get(name) or () if "statistics-path" in one]


def unreachable(
    read: Callable[[Node], Node],
    removed: Iterable[Raw],
    kept: Iterable[Raw],
    statistics: Iterable[str] = (),
    failed: Callable[[Node], object] = refuse,
) -> list[Gone]:
    """Return the files that removed snapshots reach, and kept snapshots do not: data first, manifest lists last.

    Statistics files go, unless a kept snapshot needs a file at that place. `failed` hears each list or manifest of a
    removed snapshot that cannot be read: it stays in the storage, with what only it names. An error of a kept snapshot
    is raised.
    """
    kept = list(kept)
    with ThreadPoolExecutor(THREADS) as pool:

        def nodes(given: Iterable[Node], failed: Callable[[Node], object] = refuse) -> Iterator[Node]:
            for node in ahead(pool, read, given, 4 * THREADS):
                if node.error is None:
                    yield node
                else:
                    failed(node)

        staying = {place(one.path): one for node in nodes(map(Node.of_list, kept)) for one in node.named}
        needed = {place(one["manifest-list"]) for one in kept if "manifest-list" in one} | staying.keys()
        files = {place(path): Gone(path, "statistics") for path in statistics}
        above = _removed(partial(nodes, failed=failed), removed, needed, files)
        for at in needed.union(map(place, (one.path for one in above))):  # no file of data, whatever a manifest says
            files.pop(at, None)
        # The newest first: it has most of the files.
        for node in nodes(Node(one) for one in reversed(staying.values())) if files else ():
            for one in node.files():
                files.pop(place(one.path), None)
            if not files:
                break
    return [*files.values(), *above]


def _removed(
    nodes: Callable[[Iterable[Node]], Iterator[Node]],
    removed: Iterable[Raw],
    needed: Collection[Place],
    files: dict[Place, Gone],
) -> list[Gone]:
    """Return the manifests and lists of removed snapshots that are not needed. Their files are added to `files`."""
    lists: dict[Place, Gone] = {}
    found: dict[Place, tuple[Known, Gone]] = {}
    for node in nodes(map(Node.of_list, sorted(removed, key=lambda one: not one.get("key-id")))):  # sealed ones first
        sealed = node.known.key_metadata is not None
        if node.known.path and place(node.path) not in needed:
            lists.setdefault(place(node.path), Gone(node.path, LIST, sealed=sealed))
        for one in node.named:
            if place(one.path) not in needed:
                found.setdefault(place(one.path), (one, Gone(one.path, MANIFEST, one.length or None, sealed)))
    gone = []
    for node in nodes(Node(one) for one, _ in found.values()):
        known, manifest = found[place(node.path)]
        sealed = manifest.sealed and known.key_metadata is not None
        gone.append(manifest)
        for one in node.named:  # deleted ones, too: an expiry that died may have left them
            if sealed or place(one.path) not in files:
                kind = "data" if one.content == DATA else "deletes"
                files[place(one.path)] = Gone(one.path, kind, one.length, sealed)
    return [*gone, *lists.values()]


# -------------------------------------------------------------------------------------------------------- what may go


class Garbage:
    """Decides which files of a table are deleted.

    named: the metadata file that the catalog names. keep: more metadata files that stay. name: the table's, by which it
    is told from the catalog's other tables.
    """

    def __init__(
        self, io: FileIO, catalog: Any, uuid: object, named: str, *, keep: Iterable[str] = (), name: Identifier = ()
    ) -> None:
        self._io, self._uuid, self._folders = io, str(uuid), own_folders(named)
        self._sure = [self._folders[0], *(f"{root}/data" for root in self._folders[1:])]
        self._roots = roots_of(catalog)
        self._keep = {place(one) for one in keep}
        self._catalog, self._name = catalog, name

    def other_name(self) -> str | None:
        """Return another name that the catalog has for the same table, if the catalog tells."""
        with suppress(Exception):  # of any catalog, and of any storage
            for name, named in self._catalog.other_tables(self._name):
                same = named is not None and place(own_folders(named)[0]) == place(self._folders[0])
                if same and self._misnamed(Gone(named, "metadata")) is None:
                    return str(name)
        return None

    def split(self, files: Iterable[Gone]) -> tuple[list[Gone], list[Row]]:
        """Return the files that may be deleted, and a row for each that stays."""
        files = list(files)
        with ThreadPoolExecutor(THREADS) as pool:
            judged = list(zip(files, pool.map(self._refusal, files), strict=True))
        go, stay = [], []
        for one, reason in judged:
            why = self._anothers(one) if reason == ASK else reason
            if why is None:
                go.append(one)
            else:
                stay.append(one.row("skipped")._replace(error_class=NOT_DELETED, error=why))
        return go, stay

    def _refusal(self, one: Gone) -> str | None:
        """Return why a file stays; None if it may be deleted; `ASK` if it may be another table's."""
        path, bare = one.path, one.kind in ("metadata", "statistics")  # bare: metadata name it
        if place(path) in self._keep:
            return CURRENT
        if one.sealed:
            return None if any(within(path, folder) for folder in self._sure) else ASK
        if not bare and self._io.session.plaintext.files != "allow":
            return PLAIN
        own = self._folders[:1] if bare else self._folders
        if not any(below(path, root) for root in (*own, *self._roots)):
            return OUTSIDE
        try:
            reason = self._misnamed(one) if bare else None
        except FileNotFoundError:
            return None  # which whoever deletes it reports
        except Exception as error:  # of any storage
            return describe(error)
        return reason if one.kind == "metadata" and below(path, own[0]) else reason or ASK

    def _misnamed(self, one: Gone) -> str | None:
        """Return why a file is not what metadata say that it is."""
        with self._io.inner(one.path).new_input(one.path).open() as file:
            if one.kind == "statistics":
                is_one = bytes(file.read(4)).startswith(STATISTICS_HEADS)
                return None if is_one else "metadata say that it has statistics, and it is no such file"
            uuid = metadata.parse(bytes(file.read()), one.path).get("table-uuid")
        return None if uuid == self._uuid else f"it has the metadata of another table, {uuid}"

    @cached_property
    def _others(self) -> dict[Place, str] | str:
        """The folders of the catalog's other tables, and whose each is; or why they are not known."""
        found: dict[Place, str] = {}
        try:
            for name, named in self._catalog.other_tables(self._name):
                if named is None:
                    return str(name)
                found.update((place(folder), name) for folder in own_folders(named))
        except Exception as error:  # of any catalog
            return describe(error)
        return found

    def _anothers(self, one: Gone) -> str | None:
        """Return why a file may be another table's. The deeper folder has it; of two that share one, a sealed list."""
        if isinstance(self._others, str):
            return UNKNOWN.format(self._others)
        at, mine = place(one.path), [place(folder) for folder in self._folders]
        for above in (at[:depth] for depth in range(len(at) - 1, 0, -1)):
            if above in self._others and not (one.sealed and above in mine):
                return ANOTHERS.format(self._others[above])
            if above in mine:
                return None
        return None
