"""The highest number in a log, found by few listings."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from ags_fast.dataset.names import FOLDER, LOG, entry_number, entry_path

if TYPE_CHECKING:
    from ags_fast.fs import Store


def last_after(store: Store, after: str) -> int:
    """Return the highest number of an entry after a path; 0: there is none. A long log is not listed whole."""
    if store.local:
        return _last_in_folders(store, after)
    last, more = _page_after(store, after)
    step, up = FOLDER, True
    while more:
        number, further = _page_after(store, entry_path(last + step))
        if number:
            last, more = number, further
        elif not step:
            break
        up = up and bool(number)
        step = 2 * step if up else step // 2 if step > FOLDER else 0
    return last


def _page_after(store: Store, after: str) -> tuple[int, bool]:
    """Return the highest number of the first entries after a path, and whether there may be more."""
    numbers = [entry_number(listed.path) for listed in islice(store.list(LOG, after), FOLDER)]
    return max(numbers, default=0), len(numbers) == FOLDER


def _last_in_folders(store: Store, after: str) -> int:
    """Do what `last_after` does by the names in the newest folders, and a look at one file."""
    for folder in sorted(store.names(LOG), reverse=True):
        below = f"{LOG}{folder}/"
        if below < after and not after.startswith(below):
            break
        for name in sorted(store.names(below), reverse=True):
            path = below + name
            if path <= after:
                break
            if (number := entry_number(path)) and store.stat(path) is not None:
                return number
    return 0
