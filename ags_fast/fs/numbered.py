"""Numbered objects of a folder: each is created exclusively, the highest is current, a removed one leaves a tombstone.

Creating the next number is the compare-and-swap of a dataset: of many writers that create one number, one succeeds. So
a number must stay taken while a late writer could still claim it. `Numbered.retire` therefore puts a tombstone in the
place of an object. A tombstone stays for a day, and readers skip it.
"""

from __future__ import annotations

import errno
import os
import time

from ags_fast.errors import ConcurrentChangeError, IntegrityError

TYPE_CHECKING = False  # to import typing takes longer than all of this package
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Protocol

    class _Listed(Protocol):
        """What a store tells about an object: its path, its size in bytes, its time in seconds since the epoch."""

        @property
        def path(self) -> str: ...
        @property
        def size(self) -> int: ...
        @property
        def modified(self) -> float: ...

    class _Store(Protocol):
        """What numbered objects need of a store. `ags_fast.fs.Store` is one."""

        def list(self, prefix: str = "") -> Iterator[_Listed]: ...
        def read(self, path: str, limit: int) -> bytes: ...
        def create(self, path: str, data: bytes) -> None: ...
        def put(self, path: str, data: bytes, *, fsync: bool = False) -> None: ...
        def delete(self, path: str) -> None: ...


__all__ = ["TOMBSTONE", "TOMBSTONE_SECONDS", "Numbered", "numbered"]

TOMBSTONE = b'{"ags":1,"removed":true}\n'  # no other object has this size, so a listing shows which ones are tombstones
TOMBSTONE_SECONDS = 86_400.0  # longer than any writer takes between a look at the folder and its create
FEW = 64  # objects that are listed rather than searched, which sees every gap
PROBES = 12  # names beyond the newest object that a search asks for, each twice as far as the last one
ATTEMPTS = 100  # to read the newest object while newer ones appear


def numbered(number: int) -> str:
    """Return the name of a numbered object in its folder."""
    return f"{number:08d}.json"


class Numbered:
    """The objects ``<folder>00000001.json``, ``<folder>00000002.json`` and so on of a store.

    Other objects may be in the folder: their names are ignored.

    Args:
        store: Where the folder is.
        folder: Its path in the store, with the slash at its end.
    """

    def __init__(self, store: _Store, folder: str) -> None:
        self._store = store
        self.folder = folder
        # Asks for one name, where that is much quicker than a listing.
        self._stat: Callable[[str], _Listed | None] | None = (
            getattr(store, "stat", None) if getattr(store, "local", False) else None
        )
        self._seen = 0  # the newest number that was found

    def __repr__(self) -> str:
        return f"Numbered({self._store!r}, {self.folder!r})"

    def path(self, number: int) -> str:
        """Return the path of an object in the store, whether the object is there or not."""
        return self.folder + numbered(number)

    def number(self, path: str) -> int | None:
        """Return the number of the object at a path, or None if the path is not that of a numbered object."""
        digits = path[len(self.folder) : -len(".json")]
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):  # fits in 64 bits
            return None
        number = int(digits)
        return number if number and path == self.path(number) else None

    def entries(self) -> dict[int, _Listed]:
        """List the objects by number, the lowest first, without the tombstones.

        The highest number is always listed: a tombstone in its place means that somebody took the newest object away,
        which a reader must see.
        """
        found = self._found()
        highest = max(found, default=0)
        return {n: found[n] for n in sorted(found) if n == highest or not _is_tombstone(found[n])}

    def numbers(self) -> list[int]:
        """Return the numbers that `entries` has."""
        return [*self.entries()]

    def newest(self, known: int = 0) -> int:
        """Return the highest number, or 0 if there is none.

        Numbers are given without a gap, and the lowest ones go first. So in a local folder the highest number is found
        by asking for some names. The folder is listed only where there are few objects, where the lowest numbers are
        gone, or where a name shows that there is a gap: somebody took objects away, and the highest number is still
        the current one.

        Args:
            known: A number that was there. The search begins at it.
        """
        starts = (max(known, self._seen), 1) if self._stat is not None else ()
        low = next((number for number in starts if number and self._is_taken(number)), 0)
        self._seen = self._above(low) if low else max(self._found(), default=0)
        return self._seen

    def _above(self, low: int) -> int:
        """The highest number, if `low` is taken and the folder is a local one."""
        step = 1
        while self._is_taken(low + step):
            low += step
            step *= 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_taken(middle) else (low, middle)
        if low < FEW or any(self._is_taken(low + (1 << i)) for i in range(1, PROBES)):
            return max(self._found(), default=0)
        return low

    def has(self, number: int) -> bool:
        """Return whether there is an object of this number, and not a tombstone."""
        entry = self._found().get(number) if self._stat is None else self._stat(self.path(number))
        return entry is not None and not _is_tombstone(entry)

    def _is_taken(self, number: int) -> bool:
        return self._stat is not None and self._stat(self.path(number)) is not None

    def create(self, number: int, data: bytes) -> None:
        """Create an object.

        Raises:
            FileExistsError: The number is taken, perhaps by a tombstone.
        """
        self._store.create(self.path(number), data)

    def read(self, number: int, limit: int) -> bytes:
        """Read an object of at most `limit` bytes.

        Raises:
            FileNotFoundError: There is no such object, or a tombstone.
            FormatError: The object has more bytes.
        """
        data = self._store.read(self.path(number), limit)
        if data == TOMBSTONE:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path(number))
        return data

    def read_newest(self, limit: int) -> tuple[int, bytes]:
        """Read the object with the highest number, whatever is created and retired meanwhile.

        Returns:
            The number and the bytes; (0, b"") if there is no object.

        Raises:
            IntegrityError: A tombstone has the highest number.
            ConcurrentChangeError: Objects appear and go faster than they can be read.
        """
        for _ in range(ATTEMPTS):
            number = self.newest()
            if not number:
                return 0, b""
            try:
                data = self._store.read(self.path(number), limit)
            except FileNotFoundError:  # removed since it was listed
                continue
            if data != TOMBSTONE:
                return number, data
            if self.newest() == number:
                raise IntegrityError(f"{self.path(number)} is a tombstone, and nothing newer is there")
        raise ConcurrentChangeError(f"the objects in {self.folder} change faster than they can be read: try again")

    def retire(self, numbers: Iterable[int]) -> list[int]:
        """Put tombstones in the places of objects, and remove tombstones that are older than a day.

        Args:
            numbers: The objects. Numbers without an object, or with a tombstone, are passed over.

        Returns:
            The numbers that have a tombstone now and had none before.

        Raises:
            ValueError: The highest number is among them: it is current. Nothing has been changed.
        """
        found, retired = self._found(), sorted(set(numbers))
        if retired and retired[-1] >= max(found, default=0) > 0:
            raise ValueError(f"{self.path(retired[-1])} is the newest object of its folder: it cannot be retired")
        retired = [number for number in retired if number in found and not _is_tombstone(found[number])]
        for number in retired:
            self._store.put(self.path(number), TOMBSTONE, fsync=True)
        self._sweep(found, TOMBSTONE_SECONDS)
        return retired

    def sweep(self, older_than: float = TOMBSTONE_SECONDS) -> None:
        """Remove tombstones that are older than `older_than` seconds. The highest number stays, whatever has it."""
        self._sweep(self._found(), older_than)

    def _found(self) -> dict[int, _Listed]:
        listed = ((self.number(entry.path), entry) for entry in self._store.list(self.folder))
        return {number: entry for number, entry in listed if number is not None}

    def _sweep(self, found: dict[int, _Listed], older_than: float) -> None:
        highest, before = max(found, default=0), time.time() - older_than
        for number, entry in found.items():
            if number != highest and _is_tombstone(entry) and entry.modified < before:
                self._store.delete(self.path(number))


def _is_tombstone(entry: _Listed) -> bool:
    return entry.size == len(TOMBSTONE)
