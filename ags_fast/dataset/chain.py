"""The digests of ancestors that entries name, so that a pin and an older version can be compared with the head.

An entry has the digests of its last ancestors itself. Older ones are in blocks, of which it names the last.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from ags_fast.dataset.entry import BLOCK, Block, Entry
from ags_fast.dataset.names import block_path
from ags_fast.dataset.sealed import decoded, read_object
from ags_fast.errors import IntegrityError

if TYPE_CHECKING:
    from ags_fast.fs import Store

NEAR = 8  # digests that an entry holds itself, at least, if there are that many before it
BLOCKS_KEPT = 16  # blocks that an entry names, at most
BLOCK_NBYTES = 16 << 10  # more than a block has


class Chain:
    """The chain of one log. What it reads is kept.

    Args:
        store: The folder of the dataset.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._blocks: dict[str, list[str]] = {}  # of digests, by path

    def digest(self, entry: Entry, number: int) -> str | None:
        """Return the digest of an ancestor, or of the entry itself; None if that is older than its chain goes back.

        Raises:
            IntegrityError: A block of the chain is not what was written.
        """
        if number == entry.number:
            return entry.digest
        if 0 < entry.number - number <= len(entry.near):
            return entry.near[number - entry.number]
        for block in entry.blocks:
            if block.first <= number < block.first + BLOCK:
                return self._digests(block)[number - block.first]
        return None

    def _digests(self, block: Block) -> list[str]:
        """Return the digests in a block. A block is read once."""
        if block.path not in self._blocks:
            data = read_object(self._store, block.path, BLOCK_NBYTES)
            if hashlib.sha256(data).hexdigest() != block.sha256:
                raise IntegrityError(f"{block.path} is not what an entry of the log names: it was changed")
            self._blocks[block.path] = decoded(data, list[str], block.path)
        return self._blocks[block.path]

    def after(self, head: Entry, job_id: str | None) -> tuple[tuple[str, ...], tuple[Block, ...]]:
        """Return `near` and `blocks` of the entry after a head.

        Args:
            head: The head.
            job_id: The job that makes the entry; None: it may write no block.
        """
        near, blocks = (*head.near, head.digest), head.blocks
        if job_id is not None and len(near) >= NEAR + BLOCK:
            blocks = (*blocks, self._block(near[:BLOCK], head.number + 1 - len(near), job_id))[-BLOCKS_KEPT:]
            near = near[BLOCK:]
        return near, blocks

    def _block(self, digests: tuple[str, ...], first: int, job_id: str) -> Block:
        path, data = block_path(job_id), msgspec.json.encode(digests)
        self._store.create_exclusive(path, data)
        return Block(path, first, hashlib.sha256(data).hexdigest())
