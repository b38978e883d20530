"""Chains of numbered documents, each of which names its ancestors by SHA-256, and pins of such documents.

A document holds the digests of the last few documents. Older digests are in objects of 32 digests each, named by their
own SHA-256, and the document names the last 32 of these objects. So a document stays short, and the digest of any of
the last 1,032 documents is found by reading at most one object. See docs/dataset-format.md, "Chains and pins".
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

from ags_fast.errors import FormatError, IntegrityError
from ags_fast.keys.encoding import dumps, parse_object

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

__all__ = ["Chain", "ChainObjects", "Pin", "sha256"]

BLOCK = 32  # digests in an object
NEAR = 8  # digests that a document holds itself, at least, if there are that many before it
BLOCKS = 32  # objects that a document names, at most
MOVE = NEAR + BLOCK  # digests at which a document moves the oldest 32 of them into an object
DIGEST = re.compile(r"[0-9a-f]{64}")
PIN = re.compile(r"([1-9][0-9]{0,17})-([0-9a-f]{64})")
OBJECT_NBYTES = 4096  # more than an object has
FORMAT = "ags-chain"


def sha256(data: bytes) -> str:
    """Return the SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def _are_digests(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) and DIGEST.fullmatch(item) for item in value)


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
                f"a pin is '<version>-<SHA-256 of its document, 64 hex digits>', as JobResult.pin has it, not {text!r}"
            )
        return cls(int(match[1]), match[2])

    def __str__(self) -> str:
        return f"{self.number}-{self.sha256}"


class Chain(NamedTuple):
    """The digests of earlier versions that the document of version `number` names. Numbers have no gaps."""

    number: int
    near: tuple[str, ...] = ()  # digests of the versions before it, up to number - 1
    blocks: tuple[str, ...] = ()  # names of objects with the digests of those before these, oldest first

    @property
    def first(self) -> int:
        """The oldest version whose digest is known."""
        return self.number - len(self.near) - BLOCK * len(self.blocks)

    @classmethod
    def from_json(cls, body: Mapping[str, Any], number: int, where: str) -> Chain:
        """Return the chain of a document. FormatError, which names `where`, if it is malformed."""
        near, blocks = body.get("ancestors"), body.get("chain", [])
        for digests, most in ((near, MOVE - 1), (blocks, BLOCKS)):
            if not _are_digests(digests) or len(digests) > most:
                raise FormatError(f"{where} has an impossible chain of ancestors")
        chain = cls(number, tuple(near or ()), tuple(blocks))
        whole = len(chain.blocks) < BLOCKS  # then no block was dropped yet
        if chain.first < 1 or (whole and chain.first > 1) or (chain.blocks and len(chain.near) < NEAR):
            raise FormatError(f"{where} has an impossible chain of ancestors")
        return chain

    def to_json(self) -> dict[str, Any]:
        """Return the chain as documents hold it."""
        return {"ancestors": list(self.near), "chain": list(self.blocks)}

    def next(self, digest: str) -> tuple[Chain, dict[str, bytes]]:
        """Return the chain of the version after this one.

        Args:
            digest: The SHA-256 of this version's document, in hex.

        Returns:
            The chain, and the objects that it needs beside those that are there, by name.
        """
        near, made = (*self.near, digest), {}
        blocks = self.blocks
        if len(near) == MOVE:
            name, data = self._block(near)
            made[name] = data
            near, blocks = near[BLOCK:], (*blocks, name)[-BLOCKS:]
        return Chain(self.number + 1, near, blocks), made

    def _block(self, near: tuple[str, ...]) -> tuple[str, bytes]:
        first = self.number + 1 - len(near)
        data = dumps({"format": FORMAT, "first": first, "sha256": near[:BLOCK]}).encode() + b"\n"
        return sha256(data), data

    def needed(self, digest: str) -> set[str]:
        """Return the objects that this chain names, and the one that the next version may be about to name."""
        return {*self.blocks, *self.next(digest)[1]}


class Store(Protocol):
    """A folder, as chains use it. Paths are relative to the folder, with slashes."""

    def read_small(self, path: str, limit: int) -> bytes: ...
    def write_small(self, path: str, data: bytes, *, fsync: bool = False) -> None: ...  # replaces an existing file


class ChainObjects:
    """The objects with older digests: ``<folder><SHA-256>.json``. It remembers what it has read."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._read: dict[str, tuple[str, ...]] = {}

    def path(self, name: str) -> str:
        """Return the path of an object."""
        return f"{self._folder}{name}.json"

    def paths(self, names: Collection[str]) -> set[str]:
        """Return the paths of objects."""
        return {self.path(name) for name in names}

    def write(self, made: Mapping[str, bytes]) -> None:
        """Write objects, before the document that names them.

        An existing object, of a version that lost, has the same bytes or is damaged: so it is replaced.
        """
        for name, data in made.items():
            self._store.write_small(self.path(name), data, fsync=True)

    def digest(self, chain: Chain, number: int) -> str | None:
        """Return the digest of an ancestor; None if it is older than what the chain covers.

        Raises:
            IntegrityError: The object that has the digest is missing, or is not what the chain names.
        """
        if not chain.first <= number < chain.number:
            return None
        at = number - chain.number  # from the end
        if -at <= len(chain.near):
            return chain.near[at]
        block, i = divmod(number - chain.first, BLOCK)
        return self._block(chain.blocks[block], number - i)[i]

    def _block(self, name: str, first: int) -> tuple[str, ...]:
        digests = self._read.get(name)
        if digests is None:
            path = self.path(name)
            try:
                data = self._store.read_small(path, OBJECT_NBYTES)
            except FileNotFoundError:
                raise IntegrityError(f"{path} is missing, but a document of the dataset names it") from None
            except FormatError as error:
                raise IntegrityError(str(error)) from None
            if sha256(data) != name:
                raise IntegrityError(f"{path} does not have the SHA-256 of its name: it was changed")
            body = parse_object(data, path)
            found = body.get("sha256")
            if body.get("first") != first or not _are_digests(found) or len(found) != BLOCK:
                raise IntegrityError(f"{path} has the digests of other versions than it should")
            digests = self._read[name] = tuple(found)
        return digests

    def in_folder(self, paths: Iterator[str]) -> list[str]:
        """Return the paths that are such objects."""
        pattern = re.compile(re.escape(self._folder) + r"[0-9a-f]{64}\.json")
        return [path for path in paths if pattern.fullmatch(path)]
