"""An entry of the log: what a dataset is from one moment on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from ags_fast.dataset.columns import Count
from ags_fast.dataset.keks import Keks
from ags_fast.dataset.kinds import clock_ms
from ags_fast.dataset.names import new_job_id
from ags_fast.dataset.policy import Policy
from ags_fast.dataset.tables import Table
from ags_fast.errors import PolicyError
from ags_fast.keys.entry import LATEST_MS, KeyEntry, seals_documents

BLOCK = 64  # digests in a block

Time = Annotated[int, Meta(ge=0, le=LATEST_MS)]  # in milliseconds since the epoch
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
MasterVersion = tuple[str, str]  # a master key, and a version of it
PIN = re.compile(r"([1-9][0-9]{0,17})-([0-9a-f]{64})")


class Pin(NamedTuple):
    """A version of a dataset, as a user keeps it outside of the storage."""

    number: int
    sha256: str  # hex, of its document as it is stored

    @classmethod
    def parse(cls, text: Any) -> Pin:
        """Parse a pin. ValueError if it is malformed."""
        match = PIN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"a pin is '<version>-<SHA-256 of its document, 64 hex digits>', as jobs print it, not {text!r}"
            )
        return cls(int(match[1]), match[2])

    def __str__(self) -> str:
        return f"{self.number}-{self.sha256}"


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last batch of a stream that was committed."""

    stream: str
    batch: Count
    time_ms: Time


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object with the digests of `BLOCK` ancestors."""

    path: str
    first: Annotated[int, Meta(ge=1)]
    sha256: Digest


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a dataset is from one moment on. It never changes.

    Attributes:
        dataset_id: To which all keys are bound.
        number: The highest number is the head.
        operation: What its job did.
        job_id: The job.
        time_ms: When the entry was made, in milliseconds since the epoch.
        first: All entries from this number on are kept, and all below are expired.
        over: The jobs that are finished while their plan is still there: committed at this number, or `ENDED`.
        files: The tables of its snapshot.
        keys: The KEKs of the dataset, by id. Those of the head open every kept version. In the document there are only
            those that no table has as they are; in memory it is a `Keks`, which has them all.
        gone: The versions of master keys that nobody may wrap under: they are about to be destroyed, or are.
        policy: The policy of the dataset.
        streams: The last batches of streams.
        sets: The numbered sets that are whole, and how many files each has. The last `SETS`.
        same: The kept entries that have the files of their parent: a policy does not count them. The last `SAME`.
        near: The SHA-256 of its last ancestors, the parent's last.
        blocks: Those of older ancestors.
        sealer: The KEK that seals the entry.
        left: The KEKs that left, and that a table may have.
        returns: The kept entries that brought files of an older version back.
        key_tables: The tables of KEKs, the newest last.
        digest: The SHA-256 of its bytes, which are stored without this field.
    """

    dataset_id: str
    number: Annotated[int, Meta(ge=1)]
    operation: str
    job_id: str
    time_ms: Time
    first: Annotated[int, Meta(ge=1)]
    over: dict[str, Count]
    files: tuple[Table, ...]
    keys: Mapping[str, KeyEntry]
    gone: tuple[MasterVersion, ...]
    policy: Policy
    streams: tuple[Batch, ...]
    sets: dict[str, Count]
    same: tuple[Count, ...]
    near: tuple[Digest, ...]
    blocks: tuple[Block, ...]
    sealer: str
    left: tuple[str, ...] = ()
    returns: tuple[Count, ...] = ()
    key_tables: tuple[Table, ...] = ()
    digest: str = ""

    @property
    def pin(self) -> str:
        """What a user keeps outside of the storage."""
        return str(Pin(self.number, self.digest))

    @property
    def count(self) -> int:
        """How many files it has."""
        return sum(table.rows for table in self.files)

    @classmethod
    def first_of(cls, dataset_id: str, key: KeyEntry, policy: Policy) -> Entry:
        """Return entry 1 of a new dataset, whose only KEK this is."""
        keys = {key.key_id: key}
        now, no_job = clock_ms(), new_job_id()
        return cls(dataset_id, 1, "create", no_job, now, 1, {}, (), keys, (), policy, (), {}, (), (), (), key.key_id)

    @property
    def nbytes(self) -> int:
        """Bytes of the sources of all files."""
        return sum(table.nbytes for table in self.files)

    def key_ids(self) -> set[str]:
        """Return the ids of the KEKs that open the entry and its tables. `Tables.counted` has those of its files."""
        return {self.sealer, *(table.key_id for table in (*self.files, *self.key_tables))}

    def named(self) -> set[str]:
        """Return the objects that the entry itself names: tables and blocks."""
        return {table.path for table in (*self.files, *self.key_tables)} | {block.path for block in self.blocks}

    def has_batch(self, stream: str, batch: int) -> bool:
        """Whether a batch of a stream, or a later one, was committed."""
        return any(one.stream == stream and one.batch >= batch for one in self.streams)


def main_key(keys: Mapping[str, KeyEntry]) -> KeyEntry:
    """Return the newest KEK that seals documents and tables. PolicyError without one."""
    found = [key for key in Keks.of(keys).inline.values() if seals_documents(key)]
    if not found:
        raise PolicyError("the dataset has no active KEK that seals documents")
    return max(found, key=lambda key: (key.created_ms, key.key_id))
