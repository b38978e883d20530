"""Decoded manifests that are kept in memory, up to a number of bytes."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

CACHE_NBYTES = 128 << 20  # of decoded tables: about 500,000 files


class TableCache:
    """Manifests by the path of their object, which never changes. The longest unused go first.

    limit, held_nbytes: the most bytes of decoded tables, and those that are held now.

    Threads that want one table wait for one load of it. A fork's child begins with an empty cache.
    """

    def __init__(self, nbytes: int = CACHE_NBYTES) -> None:
        self.limit = nbytes
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._tables: OrderedDict[str, Future[Any]] = OrderedDict()
        self.held_nbytes = 0

    def get(self, path: str, load: Callable[[], Any]) -> Any:
        """Return the table at `path`, which `load` reads if it is not here."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            held = self._tables.get(path)
            if held is not None:
                self._tables.move_to_end(path)
            else:
                loading: Future[Any] = Future()
                self._tables[path] = loading
        if held is not None:
            return held.result()
        try:
            table = load()
        except BaseException as error:
            with self._lock:
                self._tables.pop(path, None)
            loading.set_exception(error)
            raise
        with self._lock:
            self.held_nbytes += table.nbytes
            loading.set_result(table)
            for old in list(self._tables):
                if self.held_nbytes <= self.limit:
                    break
                if self._tables[old].done():
                    self.held_nbytes -= self._tables.pop(old).result().nbytes
        return table
