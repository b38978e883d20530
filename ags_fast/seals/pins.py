"""Pins of Iceberg tables: a text, not secret, from which a table must descend. Its owner keeps it away from the table.

``ags1.`` is of a sealed table: only who held a KEK of the table can make what descends from the pin. ``ags1u.`` is of a
table without a seal, and shows accidents, such as a restore or a fork: it proves nothing against who writes metadata.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from uuid import UUID

from ags_fast.errors import IntegrityError
from ags_fast.seals.seal import ID_NBYTES, LEVELS, decoded, encoded
from ags_fast.seals.state import digest, snapshot_text, uuid_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ags_fast.seals.seal import Seal, SealKey

__all__ = ["OpenPin", "SealedPin", "parse"]

SEALED, OPEN = "ags1", "ags1u"
DIGEST_NBYTES, HALF_NBYTES = 32, 16
SIZES = (DIGEST_NBYTES, HALF_NBYTES, len(LEVELS) * ID_NBYTES)  # of what a sealed pin has
RENEW = "If the table's owner did that, make a new pin"


class SealedPin(NamedTuple):
    """The pin of a sealed state.

    Attributes:
        table: The table's UUID.
        n: The number of the seal.
        id: Its id, 32 bytes.
        fingerprint: Of the key that made the seal, 16 bytes.
        levels: The first 8 bytes of the ids at the newest multiples, not above `n`, of 16, 256, 4,096 and 65,536.
    """

    table: UUID
    n: int
    id: bytes
    fingerprint: bytes
    levels: bytes

    @classmethod
    def of(cls, seal: Seal, key: SealKey) -> Self:
        """Make the pin of a seal, which was checked."""
        levels = b"".join(seal.ancestor(seal.n // step * step) or b"" for step in LEVELS)
        return cls(seal.table, seal.n, seal.id, key.fingerprint, levels)

    @property
    def text(self) -> str:
        """The pin, as its owner keeps it: some 150 characters."""
        coded = ".".join(map(encoded, (self.id, self.fingerprint, self.levels)))
        return f"{SEALED}.{self.table.hex}.{self.n}.{coded}"

    def check(self, seal: Seal, key: SealKey) -> None:
        """Raise IntegrityError unless a seal, which was checked, descends from the pin. key: what made the seal."""
        if seal.table != self.table:
            raise _another("it is another table")
        if seal.n < self.n:
            raise _another(f"the table's state {seal.n} is older than the pin's, {self.n}: it was rolled back")
        if self.fingerprint not in (one.fingerprint for one in seal.earlier(key)):
            raise _another("its seal was made with a key that does not follow from the pin's")
        if seal.n == self.n:
            if seal.id != self.id:
                raise _another(f"its state {self.n} is another")
            return
        places = [(self.n, self.id[:ID_NBYTES])]
        places += [(self.n // step * step, self._level(i)) for i, step in enumerate(LEVELS)]
        for n, known in places:
            if (named := seal.ancestor(n)) is not None:
                if named != known:
                    raise _another(f"its state {n} was another")
                return
        raise _another("the pin is too old: nothing shows what came in between")

    def _level(self, number: int) -> bytes:
        return self.levels[number * ID_NBYTES : (number + 1) * ID_NBYTES]


class OpenPin(NamedTuple):
    """The pin of metadata without a seal.

    Attributes:
        table: The table's UUID.
        sequence_number: The table's ``last-sequence-number``.
        state: The digest of its state, 32 bytes.
        main: The id of the newest snapshot of ``main``; None if there is none.
        snapshot: Half of the SHA-256 of that snapshot's canonical text, 16 bytes.
    """

    table: UUID
    sequence_number: int
    state: bytes
    main: int | None
    snapshot: bytes

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Make the pin of metadata."""
        head = _main(raw)
        main = None if head is None else head["snapshot-id"]
        return cls(uuid_of(raw), raw.get("last-sequence-number") or 0, digest(raw), main, _half(head))

    @property
    def text(self) -> str:
        """The pin, as its owner keeps it."""
        main = "" if self.main is None else str(self.main)
        coded = encoded(self.state), main, encoded(self.snapshot)
        return f"{OPEN}.{self.table.hex}.{self.sequence_number}.{'.'.join(coded)}"

    def check(self, raw: Mapping[str, Any]) -> None:
        """Raise IntegrityError unless metadata are those of the pin, or seem to come after them."""
        if uuid_of(raw) != self.table:
            raise _another("it is another table")
        if digest(raw) == self.state:
            return
        if (raw.get("last-sequence-number") or 0) < self.sequence_number:
            raise _another("its last sequence number is older than the pin's: it was rolled back")
        if self.main is None:
            return
        snapshots = {one["snapshot-id"]: one for one in raw.get("snapshots") or ()}
        one, left = _main(raw), len(snapshots)
        while one is not None and one["snapshot-id"] != self.main and left:
            one, left = snapshots.get(one.get("parent-snapshot-id")), left - 1
        if one is None or one["snapshot-id"] != self.main:
            raise _another(f"the snapshot {self.main} is no ancestor of its newest one, or was expired")
        if _half(one) != self.snapshot:
            raise _another(f"its snapshot {self.main} is another")


def parse(text: str) -> SealedPin | OpenPin:
    """Parse a pin. ValueError if it is malformed."""
    made: SealedPin | OpenPin | None = None
    whole = False
    try:
        kind, table, number, first, second, third = text.split(".")
        if kind == SEALED:
            made = SealedPin(UUID(table), int(number), *map(decoded, (first, second, third)))
            whole = (len(made.id), len(made.fingerprint), len(made.levels)) == SIZES
        elif kind == OPEN:
            main = int(second) if second else None
            made = OpenPin(UUID(table), int(number), decoded(first), main, decoded(third))
            whole = len(made.state) == DIGEST_NBYTES and len(made.snapshot) == (0 if main is None else HALF_NBYTES)
    except (AttributeError, TypeError, ValueError):
        pass
    if made is None or made.text != text or not whole:
        raise ValueError("this is no pin of an Iceberg table: ags_fast.iceberg.pin(table) makes one")
    return made


def _another(why: str) -> IntegrityError:
    return IntegrityError(f"the table does not descend from its pin: {why}. {RENEW}")


def _main(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    head = ((raw.get("refs") or {}).get("main") or {}).get("snapshot-id", raw.get("current-snapshot-id"))
    return next((one for one in raw.get("snapshots") or () if one["snapshot-id"] == head), None)


def _half(snapshot: Mapping[str, Any] | None) -> bytes:
    return b"" if snapshot is None else hashlib.sha256(snapshot_text(snapshot)).digest()[:HALF_NBYTES]
