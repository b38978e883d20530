"""Versions: the content of their documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.dataset.names import VERSIONS
from ags_fast.dataset.policy import Policy
from ags_fast.dataset.tables import TableRef, whole
from ags_fast.fs.numbered import Numbered
from ags_fast.keys.chain import Chain, Pin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ags_fast.fs import Store
    from ags_fast.keys.stores import KeyResolver


class KeysAt(NamedTuple):
    """The version of the key store that a version of the dataset names."""

    version: int
    sha256: str | None  # hex; None: the store has no digests, so only the number is compared

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> KeysAt:
        """Read it from a JSON object. A malformed object raises KeyError, TypeError or ValueError."""
        digest = value["sha256"]
        return cls(whole(value["version"]), None if digest is None else str(digest))


def runs_of(refs: Iterable[TableRef]) -> list[list[TableRef]]:
    """Group manifests by run. A run is one manifest, or several manifests that have a list."""
    runs: dict[str, list[TableRef]] = {}
    for ref in refs:
        runs.setdefault(ref.run or ref.path, []).append(ref)
    return list(runs.values())


class Version(NamedTuple):
    """A version of a dataset: the content of ``_ags/versions/00000001.json``."""

    number: int
    parent: int | None
    operation: str
    job_id: str
    time_ms: int
    files: int
    plain_length: int  # bytes of all its files, decrypted
    manifests: tuple[TableRef, ...]
    policy: Policy = Policy()
    key_id: str = ""  # the key that seals its document
    chain: Chain = Chain(1)  # the digests of earlier versions
    keys: KeysAt = KeysAt(0, None)  # the version of the key store that it was made on
    sha256: str = ""  # hex, of its document as stored
    lists: tuple[str, ...] = ()  # the names of the lists of its runs of several manifests

    @property
    def pin(self) -> str:
        """The text to keep outside of the storage: see `ags_fast.jobs.JobResult.pin`."""
        return str(Pin(self.number, self.sha256))


def key_store_digest(keys: KeyResolver, version: int) -> str | None:
    """Return the SHA-256 (hex) of a version of the key store; None if the key store has no digests."""
    tell: Callable[[int], str | None] | None = getattr(keys, "digest", None)
    return None if tell is None else tell(version)


def version_numbers(store: Store) -> list[int]:
    """Return the numbers of the stored versions, the lowest first."""
    return Numbered(store, VERSIONS).numbers()
