"""What the document of a version says."""

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
    """A version of the key store, as a version of the dataset names it."""

    version: int
    sha256: str | None  # hex; None: the store has no digests, so that only the number can be compared

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> KeysAt:
        digest = value["sha256"]
        return cls(whole(value["version"]), None if digest is None else str(digest))


def runs_of(refs: Iterable[TableRef]) -> list[list[TableRef]]:
    """Return the runs of these manifests: of one manifest each, or of several that have a list."""
    runs: dict[str, list[TableRef]] = {}
    for ref in refs:
        runs.setdefault(ref.run or ref.path, []).append(ref)
    return list(runs.values())


class Version(NamedTuple):
    """What ``_ags/versions/00000001.json`` says."""

    number: int
    parent: int | None
    operation: str
    job_id: str
    time_ms: int
    files: int
    plain_length: int  # bytes of all its files, decrypted
    manifests: tuple[TableRef, ...]
    policy: Policy = Policy()
    key_id: str = ""  # that its document is sealed with
    chain: Chain = Chain(1)  # the digests of the versions before it
    keys: KeysAt = KeysAt(0, None)  # the version of the key store that it was made on
    sha256: str = ""  # hex, of its document as it is stored
    lists: tuple[str, ...] = ()  # the names of the lists that its runs of several manifests are in

    @property
    def pin(self) -> str:
        """What to keep of it outside of the storage: see `ags_fast.jobs.JobResult.pin`."""
        return str(Pin(self.number, self.sha256))


def key_store_digest(keys: KeyResolver, version: int) -> str | None:
    """The SHA-256 of a version of the key store; None if it does not tell."""
    tell: Callable[[int], str | None] | None = getattr(keys, "digest", None)
    return None if tell is None else tell(version)


def version_numbers(store: Store) -> list[int]:
    """Of the versions that are there, the lowest first."""
    return Numbered(store, VERSIONS).numbers()
