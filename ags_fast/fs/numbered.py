"""Numbered objects of a folder: each is created exclusively, the highest is current, a removed one leaves a tombstone.

Creating the next number is the compare-and-swap of a dataset: of many writers that create one number, one succeeds. So
a number must stay taken while a late writer could still claim it. `Numbered.retire` therefore puts a tombstone in the
place of an object. Readers skip a tombstone. A tombstone stays for a day; a landmark stays longer.

What a commit needs costs a few requests, however many objects there are. Where a part of a folder can be listed, as in
S3, the search for the highest number lists a page here and there. A local folder is searched by asking for names. The
landmarks show that search the way: they are the numbers that consist of the first binary digits of the highest number.
"""

from __future__ import annotations

import errno
import os
import time

from ags_fast.errors import ConcurrentChangeError, IntegrityError

TYPE_CHECKING = False  # to import typing takes longer than all of this package
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from typing import Any, Protocol

    from ags_fast.fs.base import Entry as _Listed

    class _Paged(Protocol):
        """The method `ags_fast.fs.remote.RemoteStore.page`."""

        def __call__(self, folder: str, after: str, count: int) -> tuple[Iterable[_Listed], bool]: ...


__all__ = ["TOMBSTONE", "TOMBSTONE_SECONDS", "Numbered", "numbered"]

TOMBSTONE = b'{"ags":1,"removed":true}\n'  # no other object has this size, so a listing shows which ones are tombstones
TOMBSTONE_SECONDS = 86_400.0  # longer than any writer takes between a look at the folder and its create
FEW = 64  # objects that the first look lists rather than searches, which sees every gap
SOME = 16  # tombstones that one step of upkeep looks at
PAGE = 1000  # objects of one request of a listing
LAST_SORTED = 99_999_999  # up to this number, names sort as numbers do
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

    def __init__(self, store: Any, folder: str) -> None:
        self._store = store
        self.folder = folder
        self._local = bool(getattr(store, "local", False))  # to ask for one name is much quicker than a listing
        self._stat: Callable[[str], _Listed | None] | None = getattr(store, "stat", None)
        self._page: _Paged | None = None if self._local else getattr(store, "page", None)
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

        Numbers are given without a gap, and the lowest ones go first. The first look lists a local folder with few
        objects. Any look lists the folder if a name shows that there is a gap: somebody took objects away, and the
        highest number is still the current one.

        Args:
            known: A number that was there. The search begins at it.
        """
        known = max(known, self._seen)
        if self._local:
            powers = (1 << i for i in reversed(range(LAST_SORTED.bit_length())))
            low = next((number for number in (known, *powers) if number and self._is_taken(number)), 0)
            self._seen = self._above(low, 1 if low == known else low) if low else max(self._found(), default=0)
        else:
            self._seen = self._by_pages(known)
        return self._seen

    def _above(self, low: int, step: int) -> int:
        """The highest number, if `low` is taken, and the folder is a local one. step: 1, or the number is below it."""
        if step == 1:
            while self._is_taken(low + step):
                low += step
                step *= 2
        while step > 1:
            step //= 2
            low += step if self._is_taken(low + step) else 0
        if (low < FEW and not self._seen) or any(self._is_taken(low + (1 << i)) for i in range(1, PROBES)):
            return max(self._found(), default=0)
        return low

    def _by_pages(self, known: int) -> int:
        """The highest number, from pages of a listing: each shows what is above a number, whatever gaps there are."""
        found, more = self._listed_after(known - 1)
        if known not in found and known:
            found, more = self._listed_after(0)
        low, step = max(found, default=0), PAGE
        while more:
            found, further = self._listed_after(low + step)
            if found:
                low, more, step = max(found), further, 2 * step
            elif further:  # names that are not numbers
                return max(self._found(), default=0)
            elif step:
                step = step // 2 if step > PAGE else 0
            else:
                break
        return low if low < LAST_SORTED else max(self._found(), default=0)

    def _listed_after(self, number: int, count: int = PAGE) -> tuple[dict[int, _Listed], bool]:
        """The first objects above a number, in one request, and whether there is more; all objects without pages."""
        if self._page is None:
            return self._found(), False
        entries, more = self._page(self.folder, numbered(number) if number > 0 else "", count)
        return self._by_number(entries), more

    def has(self, number: int) -> bool:
        """Return whether there is an object of this number, and not a tombstone."""
        return self._there([number]).keys() == {number}

    def _there(self, numbers: Collection[int]) -> dict[int, _Listed]:
        """The objects of these numbers, without the tombstones: by a request for each, or, of many, a listing."""
        if self._stat is None or len(numbers) > FEW:
            found = self._found()
            there = {number: found[number] for number in numbers if number in found}
        else:
            asked = ((number, self._stat(self.path(number))) for number in numbers)
            there = {number: entry for number, entry in asked if entry is not None}
        return {number: entry for number, entry in there.items() if not _is_tombstone(entry)}

    def _is_taken(self, number: int) -> bool:
        return self._stat is not None and self._stat(self.path(number)) is not None

    def create(self, number: int, data: bytes) -> None:
        """Create an object.

        Raises:
            FileExistsError: The number is taken, perhaps by a tombstone.
        """
        self._store.create_exclusive(self.path(number), data)

    def read(self, number: int, limit: int) -> bytes:
        """Read an object of at most `limit` bytes.

        Raises:
            FileNotFoundError: There is no such object, or a tombstone.
            FormatError: The object has more bytes.
        """
        data: bytes = self._store.read_small(self.path(number), limit)
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
                data = self._store.read_small(self.path(number), limit)
            except FileNotFoundError:  # removed since it was listed
                continue
            if data != TOMBSTONE:
                return number, data
            if self.newest() == number:
                raise IntegrityError(f"{self.path(number)} is a tombstone, and nothing newer is there")
        raise ConcurrentChangeError(f"the objects in {self.folder} change faster than they can be read: try again")

    def retire(self, numbers: Iterable[int]) -> list[int]:
        """Put tombstones in the places of objects, and remove some tombstones that are older than a day.

        Args:
            numbers: The objects. Numbers without an object, or with a tombstone, are passed over.

        Returns:
            The numbers that have a tombstone now and had none before.

        Raises:
            ValueError: The highest number is among them: it is current. Nothing has been changed.
        """
        newest, retired = self.newest(), sorted(set(numbers))
        if retired and retired[-1] >= newest > 0:
            raise ValueError(f"{self.path(retired[-1])} is the newest object of its folder: it cannot be retired")
        retired = sorted(self._there(retired))
        for number in retired:
            self._store.write_small(self.path(number), TOMBSTONE, fsync=True)
        self._sweep(self._oldest(newest), newest, TOMBSTONE_SECONDS)
        return retired

    def sweep(self, older_than: float = TOMBSTONE_SECONDS) -> None:
        """Remove all tombstones that are older than `older_than` seconds, but for landmarks.

        The highest number stays, whatever has it.
        """
        found = self._found()
        self._sweep(found, max(found, default=0), older_than)

    def _oldest(self, newest: int) -> dict[int, _Listed]:
        """Some of the lowest objects, and landmarks that the newest number has just passed."""
        if not self._local or self._stat is None:
            return self._listed_after(0, 4 * SOME)[0]  # some of them may be landmarks
        low, high = 0, newest // 2  # odd numbers are not landmarks: the lowest are free, the rest are taken
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_taken(2 * middle + 1) else (middle + 1, high)
        numbers = [*range(2 * low, min(2 * low + SOME, newest))]
        for number in range(max(1, newest - SOME), newest + 1):
            zeros = (number & -number).bit_length() - 1
            numbers += [passed for i in range(zeros) if (passed := number - (1 << i)) < 2 * low]
        asked = ((number, self._stat(self.path(number))) for number in numbers)
        return {number: entry for number, entry in asked if entry is not None}

    def _found(self) -> dict[int, _Listed]:
        return self._by_number(self._store.list(self.folder))

    def _by_number(self, entries: Iterable[_Listed]) -> dict[int, _Listed]:
        listed = ((self.number(entry.path), entry) for entry in entries)
        return {number: entry for number, entry in listed if number is not None}

    def _sweep(self, found: Mapping[int, _Listed], newest: int, older_than: float) -> None:
        before = time.time() - older_than
        for number, entry in found.items():
            is_landmark = number <= newest < number + (number & -number)
            if _is_tombstone(entry) and entry.modified < before and not is_landmark:
                self._store.delete(self.path(number))


def _is_tombstone(entry: _Listed) -> bool:
    return entry.size == len(TOMBSTONE)
