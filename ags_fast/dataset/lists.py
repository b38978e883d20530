"""Lists of manifests: objects that versions share, each named by the SHA-256 of its bytes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ags_fast.dataset.names import LISTS
from ags_fast.dataset.tables import TableRef
from ags_fast.errors import FormatError, IntegrityError
from ags_fast.keys.chain import sha256
from ags_fast.keys.encoding import dumps, parse_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ags_fast.fs import Store

FORMAT = "ags-manifests"
LIST_NBYTES = 16 << 20  # of a list, at most: some 5 * 10**8 files


class Lists:
    """The lists of one dataset. What was read or made is kept."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, tuple[TableRef, ...]] = {}

    def path(self, name: str) -> str:
        """Return the path of a list."""
        return f"{LISTS}{name}.json"

    def get(self, name: str, where: str) -> tuple[TableRef, ...]:
        """Return the manifests of a list that the document at `where` names. Its bytes must be those of its name."""
        if name not in self._known:
            if not re.fullmatch("[0-9a-f]{64}", name):
                raise FormatError(f"{where} names a list of manifests {name[:80]!r}")
            path = self.path(name)
            try:
                data = self._store.read_small(path, LIST_NBYTES)
            except FileNotFoundError:
                raise IntegrityError(f"{path} is missing, but {where} names it") from None
            if sha256(data) != name:
                raise IntegrityError(f"{path} is not what its name says: it was changed")
            body = parse_object(data, path)
            refs = body.get("manifests")
            if body.get("format") != FORMAT or not isinstance(refs, list) or not refs:
                raise FormatError(f"{path} is not a list of manifests")
            self._known[name] = tuple(TableRef.from_json(ref, name) for ref in refs)
        return self._known[name]

    def add(self, run: Sequence[TableRef]) -> str:
        """Return the name of the list of these manifests."""
        name = sha256(_encoded(run))
        self._known[name] = tuple(ref._replace(run=name) for ref in run)
        return name

    def write(self, names: Iterable[str]) -> None:
        """Write lists that were added. A list that another job has written has the same bytes."""
        for name in names:
            self._store.write_small(self.path(name), _encoded(self._known[name]), fsync=True)


def _encoded(run: Sequence[TableRef]) -> bytes:
    return dumps({"format": FORMAT, "manifests": [ref.to_json() for ref in run]}).encode() + b"\n"
