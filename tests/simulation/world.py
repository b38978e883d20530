"""What a simulated store holds, and how it answers requests. The driver owns the world; each request is one step."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

BEGIN = 1_750_000_000.0  # the clock of a new world, in seconds since the epoch
STEP_SECONDS = 0.01  # that a request takes
DAY = 86_400.0
WRITES = frozenset(("create", "put", "delete"))
DATABASE = "database"  # in footprints: a statement of SQL
FREE = frozenset(("kms",))  # requests that nobody stops before: not the store's


class Request(NamedTuple):
    """A request of an operation.

    Attributes:
        kind: "list", "page", "stat", "read", "create", "put", "delete"; "sleep"; "sql"; "kms", "turn" or
            "destroy".
        path: What the request is about: a path, a prefix, a statement or a master key.
        argument: The bytes of a create or put, the name that a page begins after, the seconds of a sleep.
    """

    kind: str
    path: str
    argument: Any = None


class Object(NamedTuple):
    """An object of the store: its bytes, when it was written, and a number that no other object has had."""

    data: bytes
    modified: float
    stamp: int


class World:
    """A store, a clock and a KMS.

    Attributes:
        objects: The objects by path.
        clock: Seconds since the epoch.
        masters: The current version of each master key.
        destroyed: The versions of master keys that are gone, as (master key, version).
        database: The file of a database of keys, which operations open by themselves; None: there is none.
        page: How many names a listing has in one answer.
        changes: How many writes have changed something.
        read: The paths that were read, for footprints.
        listed: The prefixes that were listed or looked up, for footprints.
        written: The paths that were changed, for footprints.
    """

    def __init__(self, page: int = 1000, database: Path | None = None) -> None:
        self.objects: dict[str, Object] = {}
        self.database = database
        self._rows = b""  # of the database
        self.clock = BEGIN
        self.masters: dict[str, int] = {}
        self.destroyed: set[tuple[str, int]] = set()
        self.page = page
        self.changes = 0
        self.forget()

    def forget(self) -> None:
        """Begin new footprints."""
        self.read: set[str] = set()
        self.listed: set[str] = set()
        self.written: set[str] = set()

    def copy(self) -> World:
        """Return a world that goes its own way from here, with new footprints. Whoever changed it has left it."""
        other = World(self.page, self.database)
        other._rows = self._rows
        other.objects, other.masters = dict(self.objects), dict(self.masters)
        other.destroyed = set(self.destroyed)
        other.clock, other.changes = self.clock, self.changes
        return other

    def leave(self) -> None:
        """Keep what the database has, because it will be another world's."""
        if self.database is not None and self.database.exists():
            self._rows = self.database.read_bytes()

    def enter(self) -> None:
        """Give the database the rows of this world. Nobody has a transaction there."""
        if self.database is not None:
            self.database.write_bytes(self._rows)

    def perform(self, request: Request) -> Any:
        """Carry a request out, and return its answer. Raises the OSError that the store answers with."""
        self.clock += STEP_SECONDS
        answer: Any = getattr(self, f"_{request.kind}")(request.path, request.argument)
        return answer

    def conflicts(self, request: Request) -> bool:
        """Whether a request could go otherwise, or change what was done, if it came before what left the footprints."""
        path = request.path
        if request.kind in ("list", "page"):
            return any(written.startswith(path) for written in self.written)
        if request.kind in ("stat", "read"):
            return path in self.written
        if request.kind in WRITES:
            return path in self.written or path in self.read or any(path.startswith(p) for p in self.listed)
        if request.kind == "sql":
            return DATABASE in (self.written if _only_reads(path) else self.written | self.read)
        return request.kind != "sleep"

    # ---- the requests; each gets a path and an argument

    def _list(self, prefix: str, after: str) -> tuple[list[tuple[str, Object]], bool]:
        self.listed.add(prefix)
        return self._some(sorted(path for path in self.objects if path.startswith(prefix) and path > after))

    def _page(self, folder: str, argument: tuple[str, int]) -> tuple[list[tuple[str, Object]], bool]:
        after, count = argument
        self.listed.add(folder)
        names = (path[len(folder) :] for path in self.objects if path.startswith(folder))
        found = sorted(folder + name for name in names if "/" not in name and name > after)
        return self._some(found, count)

    def _some(self, paths: list[str], count: int = 1000) -> tuple[list[tuple[str, Object]], bool]:
        most = min(self.page, count)
        return [(path, self.objects[path]) for path in paths[:most]], len(paths) > most

    def _stat(self, path: str, _: None) -> Object | None:
        self.read.add(path)
        return self.objects.get(path)

    def _read(self, path: str, _: None) -> Object:
        self.read.add(path)
        if path not in self.objects:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.objects[path]

    def _create(self, path: str, data: bytes) -> None:
        self.read.add(path)
        if path in self.objects:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._put(path, data)

    def _put(self, path: str, data: bytes) -> None:
        self.changes += 1
        self.written.add(path)
        self.objects[path] = Object(data, self.clock, self.changes)

    def _delete(self, path: str, _: None) -> None:
        self.read.add(path)
        if self.objects.pop(path, None) is not None:
            self.changes += 1
            self.written.add(path)

    def _sleep(self, _: str, seconds: float) -> None:
        self.clock += seconds

    def _sql(self, statement: str, _: None) -> None:
        """A statement is about to go to the database, which is not a part of the world."""
        (self.read if _only_reads(statement) else self.written).add(DATABASE)
        self.changes += not _only_reads(statement)

    def _kms(self, key_id: str, _: None) -> tuple[int, set[int]]:
        return self.masters[key_id], {version for name, version in self.destroyed if name == key_id}

    def _destroy(self, key_id: str, version: int) -> None:
        self.changes += 1
        self.destroyed.add((key_id, version))

    def _turn(self, key_id: str, _: None) -> None:
        self.changes += 1
        self.masters[key_id] = self.masters.get(key_id, 0) + 1


def _only_reads(statement: str) -> bool:
    return statement.startswith("SELECT")
